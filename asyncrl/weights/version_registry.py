"""The version registry: an actor that knows the newest version. Replicas that start late, restart
or miss a broadcast ask it.

It also serves as the lease on the application. Ray gives its name to one actor at a time. The actor
ends with the driver that opened it, even if the driver is killed.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from typing import TYPE_CHECKING

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.contracts.messages import Manifest

if TYPE_CHECKING:
    from asyncrl.runtime.ray.objects import Actor

REGISTRY_NAMESPACE = "asyncrl"

RELEASE_S = 10.0
"""Seconds that Ray needs to notice a killed driver and to end its version registry."""

ANSWER_S = 5.0
"""Seconds to wait for a version registry to name its holder. Its process may still be starting."""

LOOK_EVERY_S = 0.2


class LeaseHeldError(RuntimeError):
    """Another job has the lease on the application. The message names that job."""


class VersionRegistry:
    """Stores the newest manifest of the job. The learner owns the manifest's buckets; the version
    registry only borrows them."""

    def __init__(self, holder: str = "a job") -> None:
        """`holder` describes this job to other jobs that want the application."""
        self._holder = holder
        self._manifest: Manifest | None = None
        self._learner_shift: bool | None = None
        self._learner_on_device = None if _restarted() else False

    def announce(self, manifest: Manifest) -> None:
        """Make this the current version.

        Raises:
            ValueError: the version is older than the current one of the same run and attempt.
        """
        current = self._manifest
        if (
            current is not None
            and (current.run_id, current.attempt) == (manifest.run_id, manifest.attempt)
            and manifest.version < current.version
        ):
            raise ValueError(
                f"version {manifest.version} was announced after version {current.version} of the"
                " same attempt"
            )
        self._manifest = manifest

    def withdraw(self) -> None:
        """Forget the current version until the next is announced, and end the learner's shift.
        Called when the learner that published it has ended: its buckets are lost."""
        self._manifest = None
        self._learner_shift = self._learner_on_device = False

    def set_learner_shift(self, shift: bool) -> None:
        """Say whether the learner uses the devices now, so that the replicas must rest."""
        self._learner_shift = shift

    def learner_shift(self) -> bool | None:
        """Whether the replicas must rest. None if nobody has said so since this process started."""
        return self._learner_shift

    def set_learner_on_device(self, on_device: bool) -> None:
        """Say whether the learner's states are on the GPUs that replicas use too."""
        self._learner_on_device = on_device

    def learner_on_device(self) -> bool | None:
        """Whether an engine that starts now would find the learner on its GPU. None if nobody has
        said so since Ray restarted this process."""
        return self._learner_on_device

    def current(self) -> Manifest | None:
        """The newest manifest. None before the first one and after `withdraw`."""
        return self._manifest

    def newest(self) -> tuple[str, int, int] | None:
        """Run, attempt and version of the newest manifest. None before the first one and after
        `withdraw`."""
        return (
            None
            if self._manifest is None
            else (self._manifest.run_id, self._manifest.attempt, self._manifest.version)
        )

    def holder(self) -> str:
        """The job that opened this version registry."""
        return self._holder


def _restarted() -> bool:
    """Whether Ray has restarted this process's actor."""
    if not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return False
    with warnings.catch_warnings():
        # Ray calls its own deprecated `actor_id` there.
        warnings.simplefilter("ignore", DeprecationWarning)
        return bool(context.was_current_actor_reconstructed)


def open_registry(name: str, holder: str = "a job") -> Actor:
    """Start the job's version registry and return its actor handle.

    It ends with the job. It runs on the driver's node, so it survives the loss of any other node.
    If its process dies, Ray restarts it, empty until a version is announced.

    Raises:
        ValueError: a version registry of that name already exists.
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


def find_registry(name: str) -> Actor | None:
    """Actor handle of a job's version registry. None if it does not exist."""
    try:
        return ray.get_actor(name, namespace=REGISTRY_NAMESPACE)
    except ValueError:
        return None


async def take_lease(
    name: str, holder: str, application: str, release_s: float = RELEASE_S
) -> Actor:
    """Open the version registry, which leases the application to this job until the version
    registry or this driver ends.

    Args:
        release_s: seconds to wait for an existing version registry to end. Its driver may be dead
            without Ray having noticed.

    Raises:
        LeaseHeldError: another job still has the lease after that time.
    """
    deadline = time.monotonic() + release_s
    while True:
        try:
            return open_registry(name, holder)
        except ValueError:
            holder_now = await lease_holder(name) or "a job that is ending"
        if time.monotonic() > deadline:
            raise LeaseHeldError(
                f"generators {application!r} are leased by {holder_now}; wait for its end, or use"
                " another application"
            )
        await asyncio.sleep(LOOK_EVERY_S)


async def lease_holder(name: str) -> str | None:
    """The job that opened the version registry of that name. None if it does not exist. If it does
    not answer, the result says so."""
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
