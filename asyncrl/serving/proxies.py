"""What Serve's HTTP proxies bind, which decides whether an application needs a key."""

from __future__ import annotations

import ray
from ray.serve.context import _get_global_client

__all__ = ["bound_host", "nodes"]


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
