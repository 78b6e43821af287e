"""The Ray cluster of a run: the one that is named, or a local one of its own."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import (
    Iterator,
)
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import auto_init_hook
from ray._private.authentication.authentication_utils import is_token_auth_enabled

from asyncrl.config import Config
from asyncrl.generation.app import (
    forget_controller,
)
from asyncrl.preflight.cluster_address import answering_cluster
from asyncrl.preflight.placement import (
    needed,
)
from asyncrl.runtime.redact import print_shown
from asyncrl.runtime.temporary import TemporaryPlace, remove_left_behind

__all__ = ["ray_cluster", "start_local_ray"]

logger = logging.getLogger("asyncrl")

END_S = 10.0
"""Seconds that the processes of a node that did not start get to end."""


@contextmanager
def ray_cluster(config: Config) -> Iterator[Path | None]:
    """A Ray cluster: the one that RAY_ADDRESS names (in a submitted job, the job's), else a local
    one that ends with the run. Of that one, gives the folder of its logs.

    Raises:
        ConfigError: no cluster answers at RAY_ADDRESS.
        RuntimeError: the cluster takes work without a token.
    """
    # A thread that calls Ray after its end would start a second cluster, which nobody ends.
    auto_init_hook.enable_auto_connect = False
    address = answering_cluster()
    if address:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    else:
        start_local_ray(
            max(os.cpu_count() or 1, math.ceil(needed(config)["CPU"])), configure_logging=False
        )
    node: Any = ray._private.worker._global_node
    session = Path(node.get_session_dir_path())
    try:
        _refuse_open_ray(config.ray_without_token)
        yield None if address else session / "logs"
    finally:
        ray.shutdown()
        forget_controller()
        remove_left_behind(TemporaryPlace.where())


def _refuse_open_ray(allowed: bool = False) -> None:
    """Raise RuntimeError unless this process speaks to Ray with a token: without one, anybody who
    reaches its ports can run code. `allowed`: say so instead."""
    if is_token_auth_enabled():
        return
    if not allowed:
        raise RuntimeError(
            "Ray's token authentication is off; unset RAY_AUTH_MODE, or on a standing cluster"
            " start it with RAY_AUTH_MODE=token and a token of `ray get-auth-token --generate`;"
            " ray_without_token: true uses it as it is, open to everyone who reaches its ports"
        )
    print_shown(
        "asyncrl: ray_without_token: everyone who reaches this cluster's ports can run code on its"
        " machines, and read or change runs",
        file=sys.stderr,
    )


def start_local_ray(num_cpus: int, tries: int = 4, **options: Any) -> None:
    """A Ray cluster of this process's own. Ray gives a node 30 seconds to start, which a busy
    machine may not keep: then once more, after the processes that the try has left are ended."""
    for tries_left in reversed(range(tries)):
        before = set(psutil.Process().children(recursive=True))
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                **options,
            )
            return
        except Exception as error:  # Ray raises no narrower class
            ray.shutdown()
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
            logger.warning("Ray's node timed out while it started; trying once more")
