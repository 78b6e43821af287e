"""`on_stale: drop` ends a group whose sessions wait for a turn. The coordinator, the driver's side,
a rollout worker and an environment process are real, and Ray and the engine are not."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
from fake_actors import FakeMethod

from asyncrl.config import Config
from asyncrl.contracts.group_table import table_from_ipc
from asyncrl.contracts.messages import Finished, Generated, GenerateRequest
from asyncrl.contracts.rows import Completion, Prompt, VersionSpan
from asyncrl.contracts.state import State
from asyncrl.contracts.text_listener import Heard
from asyncrl.control.coordinator import Coordinator, Parts, Schedule
from asyncrl.control.staleness import Staleness
from asyncrl.preflight.specs import worker_spec
from asyncrl.rollout.driver import RayRollouts
from asyncrl.rollout.worker import RolloutWorker
from asyncrl.testing import (
    FakeGenerate,
    FakeLearner,
    FakePrompts,
    FakeRecorder,
    FakeScores,
    FakeWeightSync,
)
from asyncrl.text.tokenizer import load_tokenizer
from jobs.guess.task import make_model

SAMPLES, SLOW = 3, 0
"""Sessions of a group, and the group whose second turns do not come."""
LATE = {"messages": [{"role": "user", "content": "late"}]}


class Turns(FakeGenerate):
    """Answers at once, except the second turns of the slow group. The others wait for them."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        self.ids = tuple(load_tokenizer(str(model)).encode("5<|im_end|>"))
        self.turns = Counter[str]()
        self.waiting = self.canceled = 0
        self.all_wait = asyncio.Event()

    async def generate(self, request: GenerateRequest, heard: Heard | None = None) -> Generated:
        session = str(request.session)
        _, ordinal, _, _ = session.split("-")
        self.turns[session] += 1
        if int(ordinal) != SLOW:
            await self.all_wait.wait()
        elif self.turns[session] == 2:
            await self._held()
        spans = (VersionSpan(self.version, 0, len(self.ids)),)
        completion = Completion(self.ids, (-0.5,) * len(self.ids), spans, "stop", "5")
        return Generated((completion,), "fake", 1.0, 2.0)

    async def _held(self) -> None:
        self.waiting += 1
        if self.waiting == SAMPLES:
            self.all_wait.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.canceled += 1


class Prompts(FakePrompts):
    """Their sessions take two turns, and write their keys to the file of their group."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    async def next(self) -> Prompt:
        prompt = await super().next()
        file = str(self._folder / str(prompt.ordinal))
        return replace(prompt, columns={"fault": "catches", "file": file})


class Actor:
    """A worker whose calls come as to an actor of Ray."""

    def __init__(self, worker: RolloutWorker) -> None:
        self._worker = worker

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: object) -> asyncio.Future[Any]:
            return asyncio.ensure_future(getattr(self._worker, method)(*arguments))

        return FakeMethod(remote)


class Rollouts(RayRollouts):
    """Hands finished groups to `FakeScores`, and new versions to the generator."""

    def __init__(self, worker: RolloutWorker, turns: Turns) -> None:
        super().__init__([Actor(worker)], 60)
        self._turns = turns
        self.outbox: asyncio.Queue[Finished] = asyncio.Queue()
        self.versions: dict[int, tuple[int, ...]] = {}

    async def rollout(self, prompt: Prompt, committed: int) -> Finished:
        finished = await super().rollout(prompt, committed)
        self.outbox.put_nowait(finished)
        return finished

    def committed(self, version: int) -> None:
        self._turns.version = version
        super().committed(version)

    async def close(self) -> None:
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)


def make_worker(model: Path, turns: Turns) -> RolloutWorker:
    environment = {
        "function": "tests.environments.environments_under_test:tells_its_key",
        "processes": 1,
        "url": True,
    }
    config = Config.model_validate(
        {
            "name": "worker",
            "max_steps": 1,
            "model": {"path": str(model)},
            "data": {"train": "unused", "max_length": 160},
            "environment": environment,
            "rollout": {"n_samples_per_prompt": SAMPLES, "max_completion_length": 12},
        }
    )
    return RolloutWorker(worker_spec(config, "run", 1, lambda: turns))


def told(folder: Path, ordinal: int) -> list[Sequence[str]]:
    """The process, the URL and the key of each session of a group."""
    return [line.split() for line in (folder / str(ordinal)).read_text().splitlines()]


async def late_answers(folder: Path, ordinal: int) -> list[tuple[int, str]]:
    """What requests get with the keys of a group's sessions."""
    found = []
    async with httpx2.AsyncClient() as client:
        for _, url, key in told(folder, ordinal):
            headers = {"authorization": f"Bearer {key}"}
            answer = await client.post(f"{url}/chat/completions", json=LATE, headers=headers)
            found.append((answer.status_code, answer.json()["error"]["session_end"]))
    return found


async def dropped(folder: Path) -> None:
    make_model(folder / "model", 0)
    turns = Turns(folder / "model")
    worker = make_worker(folder / "model", turns)
    await worker.ready()
    rollouts, recorder = Rollouts(worker, turns), FakeRecorder()
    coordinator = Coordinator(
        Parts(
            prompts=Prompts(folder),
            rollouts=rollouts,
            scores=FakeScores(rollouts),  # type: ignore[arg-type]
            learner=FakeLearner(2, max_staleness=1),
            weights=FakeWeightSync(),
            recorder=recorder,
        ),
        Schedule(6, Staleness(1, 2, "drop", over_sampling=1)),
        State("run", 0, 0, 0, 0, ()),
    )
    try:
        await coordinator.run()
        outcomes = {one.ordinal: (one.outcome, one.reason) for one in recorder.all_outcomes}
        assert outcomes.pop(SLOW) == ("dropped", "stale")
        trained = [ordinal for ordinal, (how, _) in outcomes.items() if how == "trained"]
        assert len(trained) == 12
        while await worker.under_way():  # noqa: ASYNC110
            await asyncio.sleep(0.02)

        assert (turns.waiting, turns.canceled) == (SAMPLES, SAMPLES)
        assert await late_answers(folder, SLOW) == [(409, "closed")] * SAMPLES
        assert await late_answers(folder, 1) == [(409, "done")] * SAMPLES
        assert worker._sessions is not None
        (process,) = worker._sessions._player._pool._processes
        while process.running:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        # It was not replaced: the last groups ran in it, too.
        everyone = [told(folder, ordinal) for ordinal in (SLOW, *trained)]
        assert len({number for group in everyone for number, _, _ in group}) == 1
        rows = await worker.take("reader", 100, 0.1)
        assert rows is None or SLOW not in table_from_ipc(rows)["ordinal"].to_pylist()
    finally:
        await rollouts.close()
        await worker.close()


async def test_a_group_that_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    await asyncio.wait_for(dropped(tmp_path), 60)
