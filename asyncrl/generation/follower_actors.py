"""The further nodes of a replica's engine. Each has a `Follower` in an actor of the replica's
placement group, so it is placed, and ends, with the replica."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.config import GeneratorConfig
from asyncrl.contracts.messages import Manifest
from asyncrl.generation.engine.arguments import engine_environment
from asyncrl.generation.follower import Follower
from asyncrl.generation.rendezvous import Meeting
from asyncrl.generation.settings import GeneratorApp
from asyncrl.runtime.ray.objects import DEATHS, Actor
from asyncrl.weights.manifest import ManifestError
from asyncrl.weights.staging import StagingError

CALLS = 4
"""Calls that a follower answers at once: `run` never returns."""
STOP_S = 15.0
"""Seconds that a follower gets to end its workers before its process is killed. Serve gives the
whole replica 20."""


def bundle(generator: GeneratorConfig) -> dict[str, float]:
    """What a replica declares to Ray on each of its nodes."""
    gpus = {"GPU": float(generator.workers_per_node)} if generator.device == "cuda" else {}
    return {"CPU": generator.num_cpus, **gpus}


class Followers:
    """All nodes of an engine but the first; none for an engine on one node. Use it from one event
    loop."""

    def __init__(self, app: GeneratorApp) -> None:
        """Start a process on each node. This process is in the first bundle of a placement group
        that has one for each node of the engine (`asyncrl.generation.app.build_app`)."""
        self._actors = [_start_actor(app, rank) for rank in range(1, app.generator.nnodes)]

    async def run(self, meeting: Meeting) -> str:
        """Start the workers, and wait until a node is lost. Returns why. Keeps the meeting open
        meanwhile."""
        running = [
            asyncio.ensure_future(actor.run.remote(meeting.node(rank)))
            for rank, actor in enumerate(self._actors, 1)
        ]
        try:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for call in running:
                call.cancel()
        rank, call = next((rank, call) for rank, call in enumerate(running, 1) if call in done)
        error = call.exception()
        cause = (str(error).strip().splitlines() or [""])[-1].strip()
        return f"node {rank} of the vLLM engine is lost ({type(error).__name__}: {cause})"

    async def stage(self, manifest: Manifest) -> list[tuple[dict[str, object], float]]:
        """Let each node fetch a version. Returns what each node's workers need to map it, and the
        seconds that it took there.

        Raises:
            ManifestError, StagingError: a node cannot fetch it; nothing has changed. Call `unstage`
                nevertheless.
        """
        staged = []
        for rank, answer in enumerate(await self._everywhere("stage", manifest), 1):
            if isinstance(answer, DEATHS):
                raise StagingError(
                    f"node {rank} of the engine is lost ({type(answer).__name__}); Serve replaces"
                    " the replica"
                ) from answer
            # Ray's exception of a task has that of the method.
            cause = getattr(answer, "cause", answer)
            if isinstance(cause, (ManifestError, StagingError)):
                raise type(cause)(f"node {rank} of the engine: {cause}") from cause
            if isinstance(answer, BaseException):
                raise answer
            staged.append(answer)
        return staged

    async def unstage(self) -> None:
        """Delete each node's copy of a version. A node that is lost has none."""
        await self._everywhere("unstage")

    async def stop(self) -> None:
        """End all workers and processes on the other nodes."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._everywhere("stop"), STOP_S)
        for actor in self._actors:
            ray.kill(actor)

    async def _everywhere(self, method: str, *arguments: object) -> list[Any]:
        """The answer of each node, or its exception."""
        calls = (getattr(actor, method).remote(*arguments) for actor in self._actors)
        return list(await asyncio.gather(*calls, return_exceptions=True))


def _start_actor(app: GeneratorApp, rank: int) -> Actor:
    generator, amounts = app.generator, bundle(app.generator)
    environment = engine_environment(generator.device, generator.num_threads, generator.nnodes)
    group = ray.util.get_current_placement_group()
    assert group is not None  # `build_app` asks Serve for one
    scheduling = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=rank
    )
    actor = ray.remote(Follower).options(
        num_cpus=amounts["CPU"],
        num_gpus=amounts.get("GPU", 0),
        max_concurrency=CALLS,
        scheduling_strategy=scheduling,
        runtime_env={"env_vars": environment},
    )
    return actor.remote(app)
