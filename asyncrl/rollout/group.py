"""The rollout workers of one run, seen from the driver: `Rollouts` over Ray actors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from asyncrl.contracts.errors import RolloutFailedError
from asyncrl.contracts.messages import Finished
from asyncrl.contracts.rows import Prompt
from asyncrl.rollout.worker import RolloutWorker, WorkerSpec
from asyncrl.runtime.failures import unforeseen
from asyncrl.runtime.ray_defaults import TASK_CPUS
from asyncrl.runtime.ray_objects import DEATHS

__all__ = ["RayRollouts", "start_rollouts"]

logger = logging.getLogger("asyncrl")

CALLS_AT_ONCE = 10_000
"""An async actor's limit of concurrent calls. What really limits groups in flight is the
coordinator's slots."""
RESTART_PAUSE_S = 0.2
LAST_GUARD_S = 30.0
"""Seconds beyond the deadline, which the worker keeps itself, until a worker that does not answer
is given up."""


@dataclass(slots=True)
class _Held:
    """A group that a worker makes or keeps, until it is acknowledged."""

    prompt: Prompt
    worker: int
    finished: bool = False


@dataclass(slots=True)
class _Worker:
    actor: Any
    load: int = 0
    """Groups it makes or keeps."""


def start_rollouts(spec: WorkerSpec) -> RayRollouts:
    """Start spec.rollout.num_workers actors. Call it on the event loop; `await rollouts.ready()`
    before use."""
    remote = ray.remote(RolloutWorker).options(
        num_cpus=TASK_CPUS, max_concurrency=CALLS_AT_ONCE, max_restarts=-1, max_task_retries=0
    )
    return RayRollouts(
        [remote.remote(spec) for _ in range(spec.rollout.num_workers)],
        spec.deadline_s,
    )


class RayRollouts:
    """`Rollouts`: each prompt goes to the worker with the least to do.

    A worker that dies is restarted by Ray, empty. Whatever it made or kept is generated again under
    the same ordinal: groups in flight by the `rollout` call that waits for them, finished ones by a
    task of this class, since nobody waits for those.
    """

    def __init__(self, actors: Sequence[Any], deadline_s: float) -> None:
        self.workers = list(actors)
        self._deadline_s = deadline_s
        self._states = [_Worker(actor) for actor in actors]
        self._held: dict[int, _Held] = {}
        self._committed = 0
        self.when_lost: Callable[[int, BaseException], None] = lambda ordinal, error: None
        """Called with the ordinal of a finished group that was lost with its worker and could not
        be made again, and why."""
        self._again: set[asyncio.Task[None]] = set()
        self._watchers = [
            asyncio.create_task(self._watch(index)) for index in range(len(self._states))
        ]

    async def ready(self) -> None:
        """Wait until every worker's constructor is done. Raises its error."""
        await asyncio.gather(*(state.actor.ready.remote() for state in self._states))

    async def rollout(self, prompt: Prompt, committed: int) -> Finished:
        """Generate the group of one prompt; return when it waits for scoring. Raises
        RolloutFailedError."""
        self.committed(committed)
        held = self._held[prompt.ordinal] = _Held(prompt, -1)
        try:
            finished = await self._until_deadline(held)
        except BaseException:
            # Failed or given up: nobody will acknowledge it.
            self._forget(prompt.ordinal)
            raise
        held.finished = True
        return finished

    def committed(self, version: int) -> None:
        """From now on requests, retries included, ask for at least this version."""
        if version > self._committed:
            self._committed = version
            for state in self._states:
                state.actor.committed.remote(version)

    async def ack(self, ordinals: Sequence[int]) -> None:
        """These groups' scored rows are safe: forget them. Ordinals held no more (duplicates) are
        told to every worker."""
        by_worker: dict[int, list[int]] = {}
        for ordinal in ordinals:
            held = self._forget(ordinal)
            for worker in range(len(self._states)) if held is None else [held.worker]:
                by_worker.setdefault(worker, []).append(ordinal)
        for worker, theirs in by_worker.items():
            self._states[worker].actor.ack.remote(theirs)

    async def close(self) -> None:
        """End the workers. A scoring reader that takes from them ends as well."""
        tasks = [*self._watchers, *self._again]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for state in self._states:
            ray.kill(state.actor)

    async def _until_deadline(self, held: _Held) -> Finished:
        """Try on the least loaded worker; if it dies, on whichever is up, until the deadline (the
        worker's own is the usual one)."""
        ordinal = held.prompt.ordinal
        try:
            async with asyncio.timeout(self._deadline_s + LAST_GUARD_S):
                while True:
                    index = self._assign(held)
                    call = self._states[index].actor.rollout.remote(held.prompt, self._committed)
                    try:
                        finished: Finished = await call
                        return finished
                    except asyncio.CancelledError:
                        ray.cancel(call)
                        raise
                    except DEATHS:
                        await asyncio.sleep(RESTART_PAUSE_S)
        except RolloutFailedError as error:
            raise RolloutFailedError(_message(error)) from None
        except TimeoutError:
            raise RolloutFailedError(
                f"group {ordinal}: no rollout worker was up within rollout.deadline_s ="
                f" {self._deadline_s:g} s"
            ) from None
        except (
            Exception
        ) as error:  # an answer that cannot be read, or whatever else comes of this one call
            raise RolloutFailedError(unforeseen(f"group {ordinal}", error)) from None

    def _assign(self, held: _Held) -> int:
        if held.worker >= 0:
            self._states[held.worker].load -= 1
        held.worker = min(range(len(self._states)), key=lambda index: self._states[index].load)
        self._states[held.worker].load += 1
        return held.worker

    def _forget(self, ordinal: int) -> _Held | None:
        held = self._held.pop(ordinal, None)
        if held is not None and held.worker >= 0:
            self._states[held.worker].load -= 1
        return held

    async def _watch(self, index: int) -> None:
        """Learn of a worker's death, and make again what only it had."""
        state = self._states[index]
        while True:
            try:
                await state.actor.until_dead.remote()
            # a death, or something else by which Ray loses the call: nobody would learn of a death
            # after it
            except Exception as error:
                if not isinstance(error, DEATHS):
                    logger.warning(
                        "rollout worker %d counts as died: %s: %s",
                        index,
                        type(error).__name__,
                        error,
                    )
                lost = [
                    held for held in self._held.values() if held.worker == index and held.finished
                ]
                for held in lost:
                    held.finished = False
                    task = asyncio.create_task(self._make_again(held))
                    self._again.add(task)
                    task.add_done_callback(self._again.discard)
                await asyncio.sleep(RESTART_PAUSE_S)

    async def _make_again(self, held: _Held) -> None:
        """Generate a lost finished group again, by its deadline. Its scored row may turn up after
        all: then nobody needs this copy."""
        ordinal = held.prompt.ordinal
        try:
            await self._until_deadline(held)
        except Exception as error:  # whatever it is, when_lost decides
            if self._held.get(ordinal) is held:
                self._forget(ordinal)
                self.when_lost(ordinal, error)
            return
        held.finished = True
        if self._held.get(ordinal) is not held:
            self._states[held.worker].actor.ack.remote([ordinal])


def _message(error: RolloutFailedError) -> str:
    """The worker's own message, without Ray's traceback text around it."""
    cause = getattr(error, "cause", None)
    return str(cause) if cause is not None else str(error)
