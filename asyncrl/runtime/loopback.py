"""Keeps calls to this machine away from HTTP proxies. A session's URL, a judge and Ray itself are
on loopback. Clients that follow `http_proxy` would send prompts and keys to the proxy."""

from __future__ import annotations

import os
from collections.abc import Mapping

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Each by its name: some clients do not understand 127.0.0.0/8."""
LOWER, UPPER, GRPC = "no_proxy", "NO_PROXY", "no_grpc_proxy"
"""Variables with the hosts that need no proxy. Some clients read only one of the first two. gRPC
reads only the last one if it is set."""


def without_proxy_on_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """These variables, with loopback among the hosts that need no proxy. What they name already
    stays, and `*` stays alone: for some clients it means every host only then."""
    changed = dict(environment)
    for name, other in ((LOWER, UPPER), (UPPER, LOWER), (GRPC, GRPC)):
        named = environment.get(name, environment.get(other))
        if name != GRPC or named is not None:
            changed[name] = _with_loopback(named or "")
    return changed


def _with_loopback(named: str) -> str:
    hosts = [host.strip() for host in named.split(",") if host.strip()]
    if hosts == ["*"]:
        return "*"
    return ",".join([*hosts, *(host for host in LOOPBACK if host not in hosts)])


def call_loopback_directly() -> None:
    """Do so in this process, and in those that it starts from now on."""
    os.environ.update(without_proxy_on_loopback(os.environ))
