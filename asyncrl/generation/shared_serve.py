"""Serve on a Ray cluster that others share. Whoever starts Serve sets its HTTP options for all,
until Serve is shut down. So a run that starts it opens the proxy that the files in serve_configs/
ask for. The last run shuts down a Serve that a run started.

A mark in Ray's key-value store names the controller that a run started. Whoever ends it changes the
mark first and then looks for leases. A starting run takes its lease first and then reads the mark.
So one of the two always sees the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time

import ray
from ray import serve
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.serve import context
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.exceptions import RayServeException
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.generation.settings import registry_name
from asyncrl.weights.version_registry import REGISTRY_NAMESPACE, find_registry

logger = logging.getLogger("asyncrl")

HOST, PORT = "127.0.0.1", 8000
"""What serve_configs/ ask for. The head node listens there while Serve runs."""

MARK = "asyncrl-started-serve"
STARTED, ENDING = "started", "ending"
END_S = 40.0
"""Seconds that the end of Serve may take. Serve gives up after 30."""
LEASE_ENDS_S = 5.0
"""Seconds in which Ray forgets the name of a lease that has ended."""
LOOK_EVERY_S = 0.2
PROBE_S = 60.0
"""Seconds that the head node gets to say whether the port is free."""
HEAD = "node:__internal_head__"
"""The resource of Ray's head node."""


def start_serve(shared: bool) -> None:
    """Connect to the cluster's Serve, or start it.

    Args:
        shared: others may use this cluster after the run. Otherwise Serve opens no port.
    """
    if not shared:
        serve.start(proxy_location=ProxyLocation.Disabled)
        return
    _wait_for_end()
    if _controller() is not None:
        return
    where = ProxyLocation.HeadOnly if _port_is_free() else ProxyLocation.Disabled
    try:
        serve.start(proxy_location=where, http_options=HTTPOptions(host=HOST, port=PORT))
    except ValueError:  # another driver has started it meanwhile
        if _controller() is None:
            raise
        return
    if (started := _controller()) is not None:
        _mark(STARTED, started)


async def end_shared_serve(name: str) -> None:
    """Shut down Serve if a run started it and nothing uses it: no application is left, and no run
    has a lease.

    Args:
        name: the caller's own application, whose lease it has just ended.
    """
    controller = _controller()
    if controller is None or _marked() != (STARTED, controller):
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LEASE_ENDS_S):
            while find_registry(registry_name(name)) is not None:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_EVERY_S)
    _mark(ENDING, controller)
    if _leases() or (await asyncio.to_thread(serve.status)).applications:
        _mark(STARTED, controller)
        return
    client = context._get_global_client()
    if client is not None:
        # `serve.shutdown` waits for an answer that the end of the controller makes an error, which
        # Ray prints.
        await client._controller.graceful_shutdown.remote(wait=False)
        while _controller() == controller:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_EVERY_S)
    logger.info("Serve, which a run started, has ended with its last application")


def forget_controller() -> None:
    """Drop Serve's connection to its controller. Call this after `shut_down_ray`: Serve would
    reuse the old controller in this process's next cluster, since both count jobs from 1."""
    context._disconnect()


def _wait_for_end() -> None:
    """Return once no other run is shutting Serve down."""
    deadline = time.monotonic() + END_S
    while (controller := _controller()) is not None and _marked() == (ENDING, controller):
        if time.monotonic() > deadline:  # whoever began to end it is gone
            _mark(STARTED, controller)
            return
        time.sleep(LOOK_EVERY_S)


def _controller() -> str | None:
    """The actor id of Serve's controller; None if Serve does not run."""
    forget_controller()  # a cached connection may be that of an earlier controller
    try:
        client = context._get_global_client()
    except RayServeException:
        return None
    return None if client is None else str(client._controller._actor_id.hex())


def _marked() -> tuple[str, str]:
    """(STARTED or ENDING, actor id of the controller) of the mark; empty without one."""
    state, _, controller = (_internal_kv_get(MARK) or b"").decode().partition(" ")
    return state, controller


def _mark(state: str, controller: str) -> None:
    _internal_kv_put(MARK, f"{state} {controller}".encode())


def _leases() -> list[str]:
    """The leases that runs of this cluster hold."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return [
        actor["name"]
        for actor in named
        if actor["namespace"] == REGISTRY_NAMESPACE and actor["name"].endswith(registry_name(""))
    ]


def _port_is_free() -> bool:
    """Whether the head node's proxy can listen. Serve itself would share the port with another
    Serve on that machine, and each would get half of the connections."""
    head = next(
        (node["NodeID"] for node in ray.nodes() if node["Alive"] and HEAD in node["Resources"]),
        None,
    )
    if head is None:
        return False

    def can_listen() -> bool:  # a nested function travels whole: the head may lack this package
        with contextlib.closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, PORT))
                probe.listen()
            except OSError:
                return False
        return True

    there = NodeAffinitySchedulingStrategy(head, soft=False)
    probe = ray.remote(can_listen).options(num_cpus=0, scheduling_strategy=there)
    try:
        return bool(ray.get(probe.remote(), timeout=PROBE_S))
    except ray.exceptions.RayError as error:
        logger.warning("cannot see whether %s:%d is free: %s", HOST, PORT, error)
        return False
