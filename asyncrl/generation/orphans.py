"""Generators whose driver is gone. Serve's controller is detached, so an application outlives a
driver that was killed, and goes on holding its GPUs.

A watcher ends it. The watcher is a detached actor without CPUs. It needs a living Ray head and
Serve controller, as the application does. It starts on the driver's node, where the code surely is.
If that node is lost, Ray starts the watcher again on another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.generation.app import end_generators
from asyncrl.generation.settings import registry_name
from asyncrl.weights.version_registry import (
    REGISTRY_NAMESPACE,
    find_registry,
    lease_holder,
    take_lease,
)

__all__ = ["ApplicationWatcher", "application_name", "end_orphans", "watch_application"]

logger = logging.getLogger("asyncrl")

GRACE_S = 10.0
"""Seconds between the end of the lease and the end of the application: what a dying driver has
asked of Serve arrives meanwhile."""
LOOK_EVERY_S = 1.0
NODE_LOST_S = 75.0
"""Seconds in which Ray declares a node dead that is gone, and with it the drivers there: five
health checks in a row, of 13 s each at most."""
END_S = 60.0
"""Seconds that Serve gets to end an application: each of its replicas has 20 to end on its own."""


def application_name(name: str, run_id: str, attempt: int | None = None) -> str:
    """The Serve application of one attempt of a run, which no other attempt shares. Without an
    attempt: what the names of all of them begin with."""
    return f"asyncrl-{name}-{run_id[:8]}-" + ("" if attempt is None else str(attempt))


class ApplicationWatcher:
    """Ends an application once nobody holds the lease on it, and then itself."""

    async def __init__(  # type: ignore[misc]  # Ray awaits an actor's constructor
        self, application: str, grace_s: float
    ) -> None:
        self._application, self._grace_s = application, grace_s
        self._watching = asyncio.create_task(self._watch())

    async def ready(self) -> None:
        """Answers once the watcher's process runs."""

    async def _watch(self) -> None:
        while True:
            try:
                if await self._abandoned():
                    break
            # Ray's control service or Serve's controller may be away for a while, and raise no
            # narrower class
            except Exception as error:
                logger.warning(
                    "the watcher of %r tries again: %s: %s",
                    self._application,
                    type(error).__name__,
                    error,
                )
            await asyncio.sleep(LOOK_EVERY_S)
        ray.kill(ray.get_runtime_context().current_actor)

    async def _abandoned(self) -> bool:
        """Whether the lease has ended. The application has then ended as well."""
        if await self._leased():
            return False
        await asyncio.sleep(self._grace_s)
        if await self._leased():
            return False
        if self._application in await _applications():
            await _end(self._application)
        return True

    async def _leased(self) -> bool:
        return await asyncio.to_thread(find_registry, registry_name(self._application)) is not None


def watch_application(application: str, grace_s: float = GRACE_S) -> Any:
    """Start the watcher of an application whose lease this driver has, and return its actor
    handle."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    actor = ray.remote(ApplicationWatcher).options(
        name=f"{application}-watcher",
        namespace=REGISTRY_NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        scheduling_strategy=here,
        max_restarts=-1,
    )
    return actor.remote(application, grace_s)


async def end_orphans(
    name: str, run_id: str, tell: Callable[[str], None] = lambda line: None
) -> None:
    """End at once what earlier attempts of the run have left on this cluster. Their engines are not
    taken over: the config may have changed since, and they still serve requests of the dead driver.

    Raises:
        LeaseHeldError: another driver has an attempt of this run, also after the time that Ray
            takes to notice the loss of its node.
        RuntimeError: Serve does not end one.
    """
    for application in sorted(await _applications()):
        if application.startswith(application_name(name, run_id)):
            if holder := await lease_holder(registry_name(application)):
                tell(
                    f"waiting up to {NODE_LOST_S:g} s for the end of {holder}, which has"
                    f" {application}"
                )
            lease = await take_lease(
                registry_name(application),
                f"a new attempt of run {name!r}",
                application,
                NODE_LOST_S,
            )
            tell(f"ending {application}, left by an earlier attempt")
            await _end(application)
            ray.kill(lease)


async def _applications() -> set[str]:
    return set((await asyncio.to_thread(serve.status)).applications)


async def _end(application: str) -> None:
    try:
        await asyncio.wait_for(end_generators(application), END_S)
    except TimeoutError:
        raise RuntimeError(
            f"generators {application!r} did not end within {END_S:g} s; see `serve status`"
        ) from None
