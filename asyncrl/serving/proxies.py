"""What Serve's HTTP proxies bind, which decides whether an application needs a key."""

from __future__ import annotations

import ray
from ray.serve.config import ProxyLocation
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException


def nodes() -> int:
    """Number of living nodes of the cluster."""
    return sum(bool(node["Alive"]) for node in ray.nodes())


def bound_host() -> str | None:
    """The host that Serve's proxies bind; None if they bind none. The first start of Serve on this
    cluster set it, so a later config file may differ."""
    client = _get_global_client()
    assert client is not None  # the call raises if Serve does not run
    host: str | None = client.http_config.host
    return host


def refuse_closed_proxies() -> None:
    """Raise RayServeException if this cluster's Serve runs without HTTP proxies: nobody could reach
    the routes. Serve ignores what a later config file asks for. Without a cluster, do nothing."""
    if not ray.is_initialized():
        return
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return
    if ray.get(client._controller.get_proxy_location.remote()) == ProxyLocation.Disabled:
        raise RayServeException(
            "http: true: Serve on this cluster was started without HTTP proxies, and cannot open"
            " them any more; run `serve shutdown` when its applications (`serve status`) may end,"
            " and deploy again, or set http: false"
        )
