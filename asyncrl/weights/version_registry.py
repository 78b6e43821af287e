"""The version registry: where a replica that started late, was restarted or missed a broadcast
finds the newest version.

It is the lease on the application as well: Ray gives its name to one actor at a time, and ends it
with the driver that opened it, however that ends.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.contracts.messages import Manifest

__all__ = [
    "REGISTRY_NAMESPACE",
    "LeaseHeldError",
    "VersionRegistry",
    "find_registry",
    "lease_holder",
    "open_registry",
    "take_lease",
]

REGISTRY_NAMESPACE = "asyncrl"

RELEASE_S = 10.0
"""Seconds in which Ray notices that a driver was killed, and ends its version registry."""

ANSWER_S = 5.0
"""Seconds that a version registry gets to say whose it is: its process may still be starting."""

LOOK_EVERY_S = 0.2


class LeaseHeldError(RuntimeError):
    """Another job has the application. The message names it."""


class VersionRegistry:
    """Holds the newest manifest of the job. A manifest's buckets belong to the learner; the version
    registry only borrows them."""

    def __init__(self, holder: str = "a job") -> None:
        """`holder` is the job, as another one is told who has the application."""
        self._holder = holder
        self._manifest: Manifest | None = None

    def announce(self, manifest: Manifest) -> None:
        """From now on this is the current version.

        Raises:
            ValueError: an older version of the same run and attempt.
        """
        before = self._manifest
        if (
            before is not None
            and (before.run_id, before.attempt) == (manifest.run_id, manifest.attempt)
            and manifest.version < before.version
        ):
            raise ValueError(
                f"version {manifest.version} was announced after version {before.version} of the"
                " same attempt"
            )
        self._manifest = manifest

    def withdraw(self) -> None:
        """No version is current until the next is announced: the learner that published the newest
        has ended, and its buckets with it."""
        self._manifest = None

    def current(self) -> Manifest | None:
        """The newest manifest, or None before the first and after `withdraw`."""
        return self._manifest

    def newest(self) -> tuple[str, int, int] | None:
        """Run, attempt and version of the newest manifest, or None before the first."""
        return (
            None
            if self._manifest is None
            else (self._manifest.run_id, self._manifest.attempt, self._manifest.version)
        )

    def holder(self) -> str:
        """Whose version registry it is."""
        return self._holder


def open_registry(name: str, holder: str = "a job") -> Any:
    """Start the job's version registry and return its actor handle. It ends with the job, and lives
    on the driver's node: the loss of another one is not its end. If its process dies, Ray starts it
    again, empty until a version is announced.

    Raises:
        ValueError: a version registry of that name is there already.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(VersionRegistry).options(
        name=name,
        namespace=REGISTRY_NAMESPACE,
        num_cpus=0,
        scheduling_strategy=here,
        max_restarts=-1,
        max_task_retries=-1,
    )
    return actor.remote(holder)


def find_registry(name: str) -> Any | None:
    """Actor handle of a job's version registry, or None if there is none."""
    try:
        return ray.get_actor(name, namespace=REGISTRY_NAMESPACE)
    except ValueError:
        return None


async def take_lease(name: str, holder: str, application: str, release_s: float = RELEASE_S) -> Any:
    """Open the version registry, and with it have the application to oneself until the version
    registry or this driver ends.

    Args:
        release_s: seconds to wait for a version registry that is there: its driver may be dead, and
            Ray about to notice.

    Raises:
        LeaseHeldError: another job has it after that.
    """
    deadline = time.monotonic() + release_s
    while True:
        try:
            return open_registry(name, holder)
        except ValueError:
            other = await lease_holder(name) or "a job that is ending"
        if time.monotonic() > deadline:
            raise LeaseHeldError(
                f"generators {application!r} are leased by {other}; wait for its end, or use"
                " another application"
            )
        await asyncio.sleep(LOOK_EVERY_S)


async def lease_holder(name: str) -> str | None:
    """Whose version registry of that name there is; None if there is none. One that does not answer
    is named as such."""
    registry = await asyncio.to_thread(find_registry, name)
    if registry is None:
        return None
    try:
        holder: str = await asyncio.wait_for(registry.holder.remote(), ANSWER_S)
        return holder
    except TimeoutError:
        return "a job whose version registry does not answer yet"
    except ray.exceptions.RayActorError:
        return None
