"""The Ray cluster of a run: the one at RAY_ADDRESS, or a local cluster."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import ray
from ray._private import auto_init_hook, services
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray.job_config import JobConfig

from asyncrl.config import Config, ConfigError, RunSettings
from asyncrl.generation.shared_serve import forget_controller
from asyncrl.run.cluster.cluster_address import answering_cluster, without_uv
from asyncrl.run.cluster.placement import needed
from asyncrl.run.cluster.ray_token import keep_token_private
from asyncrl.runtime.files.temporary import ProcessTemporaryFolder, remove_left_behind
from asyncrl.runtime.ray.shutdown import shut_down_ray as shut_down_ray
from asyncrl.runtime.redact import print_shown
from asyncrl.sandbox.machine import usable_cpus

logger = logging.getLogger("asyncrl")

END_S = 10.0
"""Seconds for the processes of a failed node start to end."""
LOOK_EVERY_S = 0.5
"""Seconds between two looks at the processes of a local cluster."""
ASK_EVERY_S, MOST_SILENT = 5.0, 3
"""Seconds between two questions to another cluster, and the questions without an answer after which
it is gone. Ray itself ends this process a minute after the cluster."""


_shutting_down = threading.Event()
"""Set while this process ends its own cluster, whose processes then end one by one."""


class RayEndedError(RuntimeError):
    """The cluster of the run has ended. The message names what ended."""


@contextmanager
def ray_cluster(config: RunSettings) -> Iterator[Path | None]:
    """Connect to the cluster at RAY_ADDRESS (in a submitted job, that of the job), or start a local
    cluster that ends with the run.

    Yields:
        The log folder of a local cluster; None for another one.

    Raises:
        ConfigError: no cluster answers at RAY_ADDRESS.
        RuntimeError: the cluster accepts work without a token.
    """
    _shutting_down.clear()
    # Otherwise, a thread that calls Ray after its end would start a second cluster, which leaks.
    auto_init_hook.enable_auto_connect = False
    without_uv()
    address = answering_cluster()
    if address:
        keep_token_private()
        with _signals_stay():
            ray.init(address=address, log_to_driver=False, configure_logging=False)
    else:
        cpus = needed(config)["CPU"] if isinstance(config, Config) else config.num_cpus
        start_local_ray(max(usable_cpus(), math.ceil(cpus)), configure_logging=False)
    node: Any = ray._private.worker._global_node
    session = Path(node.get_session_dir_path())
    try:
        _refuse_open_ray(config.ray_without_token)
        yield None if address else session / "logs"
    finally:
        _shutting_down.set()
        shut_down_ray()
        forget_controller()
        remove_left_behind(ProcessTemporaryFolder.where())


def _refuse_open_ray(allowed: bool = False) -> None:
    """Raise RuntimeError if this process uses Ray without a token, since everyone who reaches its
    ports could then run code. `allowed`: print a warning instead."""
    if is_token_auth_enabled():
        return
    if not allowed:
        raise RuntimeError(
            "Ray's token authentication is off; unset RAY_AUTH_MODE. Start a standing cluster"
            " with RAY_AUTH_MODE=token and a token from `ray get-auth-token --generate`."
            " ray_without_token: true accepts a cluster that is open to everyone who reaches its"
            " ports"
        )
    print_shown(
        "asyncrl: ray_without_token: everyone who reaches this cluster's ports can run code on its"
        " machines, and can read or change runs",
        file=sys.stderr,
    )


@contextmanager
def _signals_stay() -> Iterator[None]:
    """Keep this process's handler of SIGTERM, and hold the signal back during the body. `ray.init`
    installs one handler that ends the process at once, and one that ends it after three seconds."""
    utils: Any = ray._private.utils
    ours, before = signal.getsignal(signal.SIGTERM), utils.set_sigterm_handler
    if threading.current_thread() is not threading.main_thread() or not callable(ours):
        yield
        return
    received: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.alarm(0)  # which Ray's second handler has set

    signal.signal(signal.SIGTERM, hold)
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = before
        signal.signal(signal.SIGTERM, ours)  # instead of Ray's second handler
        if received:
            os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _in_own_sessions() -> Iterator[None]:
    """Start Ray's servers in sessions of their own. A signal to this process's group, as `timeout`
    or a scheduler sends it, then reaches this process only, which ends them in order. The kernel
    ends them if this process is killed."""
    module: Any = services
    before = module.ConsolePopen
    module.ConsolePopen = functools.partial(before, start_new_session=True)
    try:
        yield
    finally:
        module.ConsolePopen = before


def wait_until_ray_ends(over: threading.Event) -> RayEndedError | None:
    """Wait until the cluster to which this process is connected has ended, and return the error
    that says so. None: `over` was set before."""
    silent, asked = 0, time.monotonic()
    while not over.wait(LOOK_EVERY_S):
        node: Any = ray._private.worker._global_node
        if node is None or _shutting_down.is_set():
            continue
        if node.all_processes:
            ended = _ended(node.all_processes)
            # `ray stop` ends all of them. Without one that only keeps logs, a run goes on.
            if len(ended) > 1 or {"gcs_server", "raylet"} & {*ended}:
                return RayEndedError(
                    f"Ray's processes on this machine ended during the run ({', '.join(ended)});"
                    " did somebody run `ray stop`, or did the machine run out of memory?"
                )
        elif time.monotonic() - asked >= ASK_EVERY_S:
            why = _silence()
            silent, asked = (silent + 1 if why else 0), time.monotonic()
            if silent == MOST_SILENT:
                return RayEndedError(f"the Ray cluster ended during the run: {why}")
    return None


def _ended(processes: Mapping[str, Any]) -> list[str]:
    """Kinds of Ray's processes, started by this process, that have ended."""
    return [
        kind
        for kind, started in list(processes.items())
        if any(one.process.poll() is not None for one in started)
    ]


def _silence() -> str:
    """Why the cluster at RAY_ADDRESS does not answer; "" if it does."""
    try:
        answering_cluster()
    except ConfigError as error:
        return str(error)
    return ""


def start_local_ray(
    num_cpus: int,
    tries: int = 4,
    configure_logging: bool = True,
    object_store_memory: int | None = None,
) -> None:
    """Start a local Ray cluster for this process.

    Ray gives a node 30 seconds to start, which can be too short on a busy machine. Then this ends
    the processes of the failed try and tries again.
    """
    keep_token_private()
    # Ray would put the current folder before Python's own modules in every worker. The workers
    # start there, and `asyncrl.runtime.imports` puts it last. Ray leaves it out for such a job.
    job = JobConfig(_client_job=True)
    for tries_left in reversed(range(tries)):
        before = set(psutil.Process().children(recursive=True))
        try:
            with _signals_stay(), _in_own_sessions():
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=configure_logging,
                    job_config=job,
                    object_store_memory=object_store_memory,
                )
            return
        except Exception as error:  # Ray raises no narrower class
            shut_down_ray()
            left = [
                process
                for process in psutil.Process().children(recursive=True)
                if process not in before
            ]
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, END_S)
            if "timed out during startup" not in str(error) or not tries_left:
                raise
            logger.warning("the start of Ray's node timed out; trying again")
