"""The generators that a run starts for itself. They outlive an attempt whose learner died: an
engine takes far longer to start than a version to publish."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from asyncrl.config import GeneratorConfig
from asyncrl.generation.app import application, begin_generators, end_generators
from asyncrl.generation.orphans import watch_application
from asyncrl.generation.settings import GeneratorApp, registry_name
from asyncrl.runtime.serve_calls import ask_all
from asyncrl.weights.version_registry import take_lease

__all__ = ["OwnGenerators", "end_lease", "lease_generators"]

logger = logging.getLogger("asyncrl")

RELEASE_S = 10.0
"""Seconds in which every replica says that it has given up an attempt's requests. Generators that
are slower are started again."""


async def lease_generators(name: str, run: str) -> Any:
    """The lease on an application, whose actor is its version registry as well. `run` names the run
    for others. Raises LeaseHeldError."""
    return await take_lease(registry_name(name), f"run {run}, process {os.getpid()}", name)


def end_lease(registry: Any, name: str) -> None:
    """Others may have the application from now on; if it goes on, it keeps the last weights."""
    ray.kill(registry)
    logger.info(
        "the lease on generators %r has ended; if they go on, then with the last version that they"
        " applied",
        name,
    )


class OwnGenerators:
    """One Serve application of a run, with its lease. `begin` starts it, `release` readies it for
    the next attempt, `end` ends it."""

    def __init__(self, name: str, registry: Any, settings: GeneratorApp) -> None:
        self.name, self.registry, self.settings = name, registry, settings
        self.watcher: Any = None
        """The actor that ends the application if this driver cannot. None where the cluster ends
        with the driver."""
        self._beginning: asyncio.Future[Any] | None = None

    async def begin(self, watched: bool) -> Any:
        """Ask Serve for the application; return its handle at once."""
        self.watcher = watch_application(self.name) if watched else None
        self._beginning = asyncio.ensure_future(
            asyncio.to_thread(begin_generators, self.settings, self.name)
        )
        return await asyncio.shield(self._beginning)

    @property
    def attached(self) -> GeneratorConfig:
        """The generator settings of a further attempt, which attaches to the application."""
        return self.settings.generator.model_copy(update={"attach": self.name})

    async def release(self, run_id: str, attempt: int) -> bool:
        """Have every replica give up what the attempt has asked for, and withdraw its version.
        False: they cannot serve another attempt."""
        try:
            async with asyncio.timeout(RELEASE_S):
                app = (await asyncio.to_thread(serve.status)).applications.get(self.name)
                if app is None or app.status != ApplicationStatus.RUNNING:
                    return False
                await self.registry.withdraw.remote()
                answers = await ask_all(
                    application(self.name), "abandon", run_id, attempt, timeout_s=RELEASE_S
                )
        except (
            Exception
        ) as error:  # Ray raises no narrower class for an actor of a cluster that is gone
            logger.warning(
                "generators %r start again with the next attempt: %s: %s",
                self.name,
                type(error).__name__,
                error,
            )
            return False
        return bool(answers) and not any(isinstance(answer, BaseException) for answer in answers)

    async def end(self) -> None:
        """End the application, then the lease. If this fails or is cut short, the watcher goes on,
        and ends the application once the lease has ended."""
        try:
            if self._beginning is not None and not self._beginning.done():
                await asyncio.wait(
                    [self._beginning]
                )  # a thread that still asks Serve would start the application after its end
            await end_generators(self.name)
            if self.watcher is not None:
                ray.kill(self.watcher)
        finally:
            end_lease(self.registry, self.name)
