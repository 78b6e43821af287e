"""The generators that a run starts for itself. They outlive an attempt whose learner died, since
starting an engine takes far longer than publishing a version."""

from __future__ import annotations

import asyncio
import logging
import os

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from asyncrl.config.schema import AttachedGenerators
from asyncrl.generation.app import application, begin_generators, end_generators
from asyncrl.generation.orphans import watch_application
from asyncrl.generation.settings import GeneratorApp, registry_name
from asyncrl.generation.shared_serve import end_shared_serve
from asyncrl.runtime.ray.objects import Actor
from asyncrl.runtime.ray.serve_calls import Handle, ask_all
from asyncrl.weights.version_registry import take_lease

logger = logging.getLogger("asyncrl")

RELEASE_S = 10.0
"""Seconds in which every replica must confirm that it has given up an attempt's requests. Slower
generators are restarted."""


async def lease_generators(name: str, run: str) -> Actor:
    """Take the lease on an application. Returns its actor, which is also the version registry.

    Args:
        run: how other drivers' messages name this run.

    Raises:
        LeaseHeldError: another driver holds the lease.
    """
    return await take_lease(registry_name(name), f"run {run}, process {os.getpid()}", name)


def end_lease(registry: Actor, name: str) -> None:
    """End the lease, so that another driver can take the application. An application that keeps
    running keeps its weights."""
    ray.kill(registry)
    logger.info(
        "the lease on generators %r has ended; generators that keep running keep the last version"
        " that they applied",
        name,
    )


class RunGenerators:
    """One Serve application of a run, with its lease. `begin` deploys it, `release` prepares it for
    the next attempt, and `end` ends it."""

    def __init__(self, name: str, registry: Actor, settings: GeneratorApp) -> None:
        self.name, self.registry, self.settings = name, registry, settings
        self.watcher: Actor | None = None
        """The actor that ends the application if this driver cannot. None if the cluster ends with
        the driver."""
        self._beginning: asyncio.Future[Handle] | None = None

    async def begin(self, watched: bool) -> Handle:
        """Deploy the application and return its handle without waiting for the replicas."""
        self.watcher = watch_application(self.name) if watched else None
        self._beginning = asyncio.ensure_future(
            asyncio.to_thread(begin_generators, self.settings, self.name, shared=watched)
        )
        return await asyncio.shield(self._beginning)

    @property
    def attached(self) -> AttachedGenerators:
        """The generator settings of the next attempt, which attaches to this application."""
        return AttachedGenerators(attach=self.name).with_engines(self.settings.generator)

    async def release(self, run_id: str, attempt: int) -> bool:
        """Make every replica give up the attempt's requests, and withdraw the attempt's version.
        Returns whether the application can serve another attempt."""
        try:
            async with asyncio.timeout(RELEASE_S):
                app = (await asyncio.to_thread(serve.status)).applications.get(self.name)
                if app is None or app.status != ApplicationStatus.RUNNING:
                    return False
                await self.registry.withdraw.remote()
                answers = await ask_all(
                    application(self.name), "abandon", run_id, attempt, timeout_s=RELEASE_S
                )
        # Ray raises no narrower class for an actor of a cluster that is gone.
        except Exception as error:
            logger.warning(
                "generators %r restart with the next attempt: %s: %s",
                self.name,
                type(error).__name__,
                error,
            )
            return False
        return bool(answers) and not any(isinstance(answer, BaseException) for answer in answers)

    async def end(self) -> None:
        """End the application, then the lease, then Serve if the run started it and nobody uses
        it. If this fails or is canceled, the watcher does it once the lease has ended."""
        try:
            if self._beginning is not None and not self._beginning.done():
                # Otherwise the thread could deploy the application after this method has ended it.
                await asyncio.wait([self._beginning])
            await end_generators(self.name)
        finally:
            end_lease(self.registry, self.name)
        if self.watcher is not None:
            await end_shared_serve(self.name)
            ray.kill(self.watcher)
