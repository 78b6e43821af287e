"""Ends generators whose driver is gone. Serve's controller is detached, so an application outlives
a driver that was killed, and keeps its GPUs.

A watcher ends such an application. It is a detached actor without CPUs. Like the application, it
needs a live Ray head and Serve controller. It starts on the driver's node, which has the code. If
that node is lost, Ray restarts the watcher on another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import ray
from ray import serve
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.generation.app import end_generators
from asyncrl.generation.settings import registry_name
from asyncrl.generation.shared_serve import end_shared_serve, forget_controller
from asyncrl.runtime.ray.objects import Actor
from asyncrl.weights.version_registry import (
    REGISTRY_NAMESPACE,
    find_registry,
    lease_holder,
    take_lease,
)

logger = logging.getLogger("asyncrl")

GRACE_S = 10.0
"""Seconds between the end of the lease and the end of the application. In this time the last
requests of a dying driver reach Serve."""
LOOK_EVERY_S = 1.0
NODE_LOST_S = 75.0
"""Seconds in which Ray declares a lost node and its drivers dead: five consecutive health checks of
at most 13 s each."""
END_S = 60.0
"""Seconds that Serve gets to end an application. Each replica gets 20 of them before Serve kills
it."""


def application_name(name: str, run_id: str, attempt: int | None = None) -> str:
    """Name of the Serve application of one attempt of a run. Without an attempt: the prefix of the
    names of all the run's applications."""
    return f"asyncrl-{name}-{run_id[:8]}-" + ("" if attempt is None else str(attempt))


class ApplicationWatcher:
    """Ends an application once the lease on it has ended, and Serve if a run started it and nobody
    uses it. Then it ends itself."""

    async def __init__(  # type: ignore[misc]  # Ray awaits an actor's constructor
        self, application: str, grace_s: float
    ) -> None:
        self._application, self._grace_s = application, grace_s
        self._watching = asyncio.create_task(self._watch())

    async def ready(self) -> None:
        """Return once the watcher's process runs."""

    async def _watch(self) -> None:
        while True:
            try:
                if await self._abandoned():
                    break
            # Ray's control service or Serve's controller may be unreachable for a while. They
            # raise no narrower class.
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
        """Return whether the lease has ended. If so, all that it was for has been ended too."""
        if await self._leased():
            return False
        await asyncio.sleep(self._grace_s)
        if await self._leased():
            return False
        if self._application in await _applications():
            await _end(self._application)
        await end_shared_serve(self._application)
        return True

    async def _leased(self) -> bool:
        return await asyncio.to_thread(find_registry, registry_name(self._application)) is not None


def watch_application(application: str, grace_s: float = GRACE_S) -> Actor:
    """Start the watcher of an application whose lease this driver holds, and return its actor
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
    """End the applications that earlier attempts of the run have left on this cluster. Their
    engines are not reused: the config may have changed, and they still serve the dead driver's
    requests.

    Args:
        tell: called with each line for the user.

    Raises:
        LeaseHeldError: another driver still holds the lease of an attempt of this run, after the
            time that Ray takes to notice the loss of a node.
        RuntimeError: Serve did not end an application in time.
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
    forget_controller()  # Serve may run again, or no more
    return set((await asyncio.to_thread(serve.status)).applications)


async def _end(application: str) -> None:
    try:
        await asyncio.wait_for(end_generators(application), END_S)
    except TimeoutError:
        raise RuntimeError(
            f"generators {application!r} did not end within {END_S:g} s; see `serve status`"
        ) from None
