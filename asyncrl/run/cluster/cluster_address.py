"""Find the Ray cluster of a command and check that it answers, before the command connects. Ray
itself waits many minutes for an address without a cluster."""

from __future__ import annotations

import os
import socket

import grpc
from ray._common.network_utils import parse_address  # type: ignore[attr-defined]
from ray._private import ray_constants
from ray._private.grpc_utils import init_grpc_channel
from ray._private.services import canonicalize_bootstrap_address
from ray.core.generated.gcs_service_pb2 import CheckAliveRequest  # type: ignore[attr-defined]
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

from asyncrl.config import ConfigError

UV = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
CONNECT_S = 3.0
"""Seconds for the machine of a cluster to accept a connection."""
ANSWER_S = 6.0
"""Seconds for the cluster's control service (GCS) to answer."""
WAY_OUT = (
    "set it to the host and port that `ray start` printed, or unset it: `asyncrl train` then starts"
    " a local cluster"
)


def without_uv() -> None:
    """Keep Ray from packing the current folder, with the runs in it, and from installing packages
    on each node, if `uv run` started this process. Ray fails on a folder of more than 512 MiB.
    Nodes have their own environment. If the variable is set, it decides. Ray reads it once, when
    it is imported."""
    if os.environ.setdefault(UV, "0") == "0":
        ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False


def answering_cluster(default: str | None = None) -> str | None:
    """The `host:port` of the cluster at RAY_ADDRESS, or at `default`, whose control service has
    just answered. None: neither is set.

    Raises:
        ConfigError: RAY_ADDRESS is not the address of a cluster, or no cluster answers there within
            about ten seconds.
    """
    named = os.environ.get("RAY_ADDRESS") or default
    if named in (None, "local"):
        return None
    if named.lower().startswith(("http://", "https://")):
        raise ConfigError(
            f"RAY_ADDRESS = {named!r} is the address of Ray's job service; submit with `ray job"
            f" submit --address {named} -- asyncrl train …`, or {WAY_OUT}"
        )
    if named.startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS = {named!r} is a Ray Client address, which does not support Serve and Ray"
            f" Data; {WAY_OUT}"
        )
    try:
        address = canonicalize_bootstrap_address(named)
    except ConnectionError:
        raise ConfigError(
            f"RAY_ADDRESS = {named!r}: no Ray cluster runs on this machine; start one with `ray"
            f" start --head`, or {WAY_OUT}"
        ) from None
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"RAY_ADDRESS = {named!r} is not a host and port ({error}); {WAY_OUT}"
        ) from None
    if address is None:
        return None
    if why := _connection_problem(address):
        raise ConfigError(
            f"RAY_ADDRESS = {named!r}: no Ray cluster answers at {address} ({why}); {WAY_OUT}"
        )
    return address


def _connection_problem(address: str) -> str:
    """Why no gRPC service answers there; empty if one does."""
    host, port = parse_address(address)
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        return f"{getattr(error, 'strerror', None) or error or type(error).__name__}"
    with init_grpc_channel(address) as channel:
        try:
            NodeInfoGcsServiceStub(channel).CheckAlive(CheckAliveRequest(), timeout=ANSWER_S)
        except grpc.RpcError as error:
            code = error.code()
            # Ray answered and needs a token. Its own error explains that.
            if code is grpc.StatusCode.UNAUTHENTICATED:
                return ""
            what = (
                f"within {ANSWER_S:g} s"
                if code is grpc.StatusCode.DEADLINE_EXCEEDED
                else f"({code.name.lower()})"
            )
            return f"a process listens there, but did not answer like Ray {what}"
    return ""
