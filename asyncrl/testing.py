"""Fakes for every protocol, deterministic, in memory; they check what they are given. For tests of control flow, yours and ours."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from asyncrl.control.fates import Fate
from asyncrl.control.protocols import Finished, Manifest, PushReport, RolloutFailed, Scored, StepResult
from asyncrl.generation.protocol import Generated, GenerateRequest, WeightsId
from asyncrl.types import Completion, Prompt, VersionSpan

__all__ = ["FakeGenerate", "FakeLearner", "FakeLogprobCheck", "FakePrompts", "FakeRecorder", "FakeRollouts", "FakeScores", "FakeWeightSync"]

Latency = Callable[[int], float]


def _no_latency(_: int) -> float:
    return 0.0


class FakePrompts:
    """Prompts 0, 1, 2, … from a frontier."""

    def __init__(self, lowest: int = 0, finished_above: Sequence[int] = ()) -> None:
        self.ordinal = lowest
        self.skip = set(finished_above)

    async def next(self) -> Prompt:
        while self.ordinal in self.skip:
            self.ordinal += 1
        prompt = Prompt(self.ordinal, 0, f"prompt {self.ordinal}", (self.ordinal % 50 + 1,))
        self.ordinal += 1
        return prompt

    async def close(self) -> None:
        return None


class FakeRollouts:
    """Groups of `tokens` tokens begun at the version committed when they start; finished groups wait in `outbox` for `FakeScores`.

    `latency(ordinal)` in seconds of the event loop's clock; `fails(ordinal)` gives a reason or None.
    """

    def __init__(self, latency: Latency = _no_latency, fails: Callable[[int], str | None] = lambda _: None, tokens: int = 4) -> None:
        self.latency, self.fails, self.tokens = latency, fails, tokens
        self.outbox: asyncio.Queue[Finished] = asyncio.Queue()
        self.unacked: set[int] = set()
        self.admitted: list[int] = []
        """Ordinals of all groups asked for."""
        self.newest_committed = -1

    async def rollout(self, prompt: Prompt, committed: int) -> Finished:
        self.admitted.append(prompt.ordinal)
        if committed < 0 or committed != self.newest_committed:
            raise AssertionError(f"asked for version {committed}, while {self.newest_committed} is committed")
        await asyncio.sleep(self.latency(prompt.ordinal))
        if reason := self.fails(prompt.ordinal):
            raise RolloutFailed(reason)
        finished = Finished(prompt.ordinal, begun=committed, tokens=self.tokens)
        self.unacked.add(prompt.ordinal)
        self.outbox.put_nowait(finished)
        return finished

    def committed(self, version: int) -> None:
        if version < self.newest_committed:
            raise AssertionError(f"committed went back from {self.newest_committed} to {version}")
        self.newest_committed = version

    async def ack(self, ordinals: Sequence[int]) -> None:
        self.unacked -= set(ordinals)

    async def close(self) -> None:
        return None


class FakeScores:
    """Scores what `rollouts` finished, oldest first, after `latency(ordinal)`. `score(ordinal)` gives two or more rewards."""

    def __init__(
        self,
        rollouts: FakeRollouts,
        latency: Latency = _no_latency,
        score: Callable[[int], Sequence[float]] = lambda ordinal: (0.0, 1.0),
        fails: Callable[[int], str | None] = lambda _: None,
    ) -> None:
        self.rollouts, self.latency, self.score, self.fails = rollouts, latency, score, fails

    async def next(self) -> list[Scored]:
        finished = await self.rollouts.outbox.get()
        await asyncio.sleep(self.latency(finished.ordinal))
        await self.rollouts.ack([finished.ordinal])
        rewards = tuple(self.score(finished.ordinal))
        parts = {"fake": sum(rewards) / len(rewards)} if rewards else {}
        return [
            Scored(finished.ordinal, finished.begun, None, finished.tokens, rewards, parts, len(rewards), 0, failure=self.fails(finished.ordinal)),
        ]

    async def close(self) -> None:
        return None


class FakeLearner:
    """Counts steps; `skips(n)` says whether the n-th attempted step (from 0) is skipped. Keeps every batch it was given."""

    def __init__(self, groups_per_step: int, latency: float = 0.0, skips: Callable[[int], bool] = lambda _: False, version: int = 0) -> None:
        self.groups_per_step, self.latency, self.skips, self.version = groups_per_step, latency, skips, version
        self.batches: list[list[Scored]] = []
        self.gathered: list[int] = []
        self.busy = False

    async def step(self, batch: Sequence[Scored]) -> StepResult:
        if len(batch) != self.groups_per_step or len({scored.ordinal for scored in batch}) != len(batch):
            raise AssertionError(f"a batch of {[scored.ordinal for scored in batch]}, not {self.groups_per_step} distinct groups")
        await self._work()
        applied = not self.skips(len(self.batches))
        self.batches.append(list(batch))
        self.version += applied
        return StepResult(applied, {"loss": 0.0})

    async def gather(self, version: int) -> Manifest:
        if version != self.version:
            raise AssertionError(f"version {version} was to be gathered, while the learner is at {self.version}")
        await self._work()
        self.gathered.append(version)
        return Manifest("fake", 0, version, (), (), (), ())

    async def save(self, directory: Path) -> None:
        await self._work()
        (directory / "version").write_text(str(self.version))

    async def close(self) -> None:
        return None

    async def _work(self) -> None:
        if self.busy:
            raise AssertionError("the learner was called while it worked: its calls are collectives")
        self.busy = True
        await asyncio.sleep(self.latency)
        self.busy = False


class FakeWeightSync:
    """Applies every version after `latency(version)`; `fails(version, attempt)` makes a push raise."""

    def __init__(self, latency: Latency = _no_latency, fails: Callable[[int, int], bool] = lambda version, attempt: False) -> None:
        self.latency, self.fails = latency, fails
        self.applied: list[int] = []
        self.attempts: dict[int, int] = {}

    async def push(self, manifest: Manifest) -> PushReport:
        if self.applied and manifest.version <= self.applied[-1]:
            raise AssertionError(f"version {manifest.version} was pushed after {self.applied[-1]}")
        await asyncio.sleep(self.latency(manifest.version))
        attempt = self.attempts[manifest.version] = self.attempts.get(manifest.version, 0) + 1
        if self.fails(manifest.version, attempt):
            raise RuntimeError(f"push of version {manifest.version} failed")
        self.applied.append(manifest.version)
        return PushReport(manifest.version, {"fake": {"pause_s": 0.0}})


class FakeRecorder:
    """Keeps everything in lists."""

    def __init__(self) -> None:
        self.records: list[tuple[str, int, int, dict[str, float | str]]] = []
        self.all_fates: list[Fate] = []

    def record(self, event: str, step: int, version: int, metrics: Mapping[str, float | str]) -> None:
        self.records.append((event, step, version, dict(metrics)))

    def fates(self, fates: list[Fate]) -> None:
        self.all_fates += fates


class FakeLogprobCheck:
    """Agrees always, unless told to fail at a version."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.learner_side: list[int] = []
        self.generator_side: list[int] = []

    async def at_gather(self, version: int) -> None:
        self.learner_side.append(version)

    async def after_commit(self, version: int) -> Mapping[str, float]:
        if version != self.learner_side[-1]:
            raise AssertionError(f"generators were checked at {version}, the learner at {self.learner_side[-1]}")
        self.generator_side.append(version)
        if version == self.fails_at:
            raise RuntimeError(f"log-probs differ at version {version}")
        return {"check/logprob_max_diff": 0.0, "check/tokens": 1.0}


class FakeGenerate:
    """Seeded random completions over token ids 3 … vocabulary - 1, at version `version` (may be changed between calls)."""

    def __init__(self, vocabulary: int = 40, version: int = 0, latency: float = 0.0) -> None:
        self.vocabulary, self.version, self.latency = vocabulary, version, latency

    async def generate(self, request: GenerateRequest) -> Generated:
        if request.min_weights is not None and request.min_weights.version > self.version:
            raise AssertionError(f"version {request.min_weights.version} was asked for, and {self.version} is there")
        await asyncio.sleep(self.latency)
        return Generated(tuple(self._completion(request, index) for index in range(request.n)), replica="fake")

    async def logprobs(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], min_weights: WeightsId | None) -> dict[str, list[tuple[float, ...]]]:
        return {"fake": [tuple(-random.Random(f"{token}").random() for token in completion) for _, completion in rows]}

    def _completion(self, request: GenerateRequest, index: int) -> Completion:
        random_ = random.Random(f"{request.seed}/{request.prompt_ids}/{index}")
        length = request.max_tokens if request.ignore_eos else random_.randint(1, request.max_tokens)
        ids = tuple(random_.randrange(3, self.vocabulary) for _ in range(length))
        logprobs = tuple(-random_.random() for _ in ids)
        reason = "length" if length == request.max_tokens else "stop"
        return Completion(ids, logprobs, (VersionSpan(self.version, 0, length),), reason, text=" ".join(map(str, ids)))
