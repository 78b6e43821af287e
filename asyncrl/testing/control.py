"""Fakes for the protocols of control."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from asyncrl.contracts.errors import RolloutFailedError
from asyncrl.contracts.messages import (
    EngineLoad,
    Example,
    Finished,
    Manifest,
    PushReport,
    Scored,
    StepResult,
)
from asyncrl.contracts.outcomes import NOT_FINITE, Outcome
from asyncrl.contracts.protocols import Learner, Scores
from asyncrl.contracts.rows import Prompt
from asyncrl.contracts.state import State
from asyncrl.runtime.shared import Written, size_and_checksum

__all__ = [
    "FakeCheckpoints",
    "FakeLearner",
    "FakeLogprobCheck",
    "FakePrompts",
    "FakeRecorder",
    "FakeReplicas",
    "FakeRollouts",
    "FakeScores",
    "FakeWeightSync",
]

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


class FakeReplicas:
    """Generator replicas as far as versions go: each holds one, never goes back, and catches up
    from the version registry like a real one. One of them may be held for an evaluation."""

    def __init__(self, count: int = 1) -> None:
        self.versions = [-1] * count
        self.registry = -1
        """The newest version announced."""
        self.held: int | None = None
        """The replica that keeps its version."""

    @property
    def free(self) -> list[int]:
        """Those that take requests and versions: all but the one that is held."""
        return [replica for replica in range(len(self.versions)) if replica != self.held]

    def route(self, ordinal: int) -> int:
        """The replica that a group goes to."""
        return self.free[ordinal % len(self.free)]

    def hold(self, version: int) -> int | None:
        """Hold one that has the version, unless it is the only one."""
        if self.held is not None:
            raise AssertionError(f"replica {self.held} is held already")
        able = [replica for replica, its in enumerate(self.versions) if its == version]
        self.held = able[-1] if len(able) > 1 else None
        return self.held

    def release(self, replica: int) -> None:
        """It catches up, unless it has died meanwhile."""
        if self.held == replica:
            self.held = None
            self.apply(replica, self.registry)

    def apply(self, replica: int, version: int) -> None:
        """The replica holds at least this version from now on."""
        if replica == self.held and version > self.versions[replica]:
            raise AssertionError(
                f"replica {replica} is held at version {self.versions[replica]}, and was given"
                f" {version}"
            )
        self.versions[replica] = max(self.versions[replica], version)

    def serve(self, replica: int, committed: int) -> int:
        """The version with which the replica answers a request that asks for at least
        `committed`."""
        if self.versions[replica] < committed:
            self.apply(replica, self.registry)
        if self.versions[replica] < committed:
            raise AssertionError(
                f"replica {replica} is at {self.versions[replica]} and the version registry at"
                f" {self.registry}, while {committed} is committed"
            )
        return self.versions[replica]

    def restart(self, replica: int) -> None:
        """A new process takes the replica's place; nobody holds it."""
        self.versions[replica] = -1
        self.held = None if self.held == replica else self.held


class FakeRollouts:
    """Groups of `tokens(ordinal)` tokens; finished ones wait in `outbox` for `FakeScores`. Ordinal
    o goes to free replica o modulo their number.

    `latency(ordinal)` in seconds of the event loop's clock; `fails(ordinal)` gives a reason or
    None; a replica that `dies(ordinal)` restarts and makes the group again. A latency above
    `deadline_s` fails the group. `kv_use(ordinal)` is what the engine says when the group is done.
    """

    def __init__(
        self,
        latency: Latency = _no_latency,
        fails: Callable[[int], str | None] = lambda _: None,
        tokens: Callable[[int], int] = lambda _: 4,
        replicas: FakeReplicas | None = None,
        dies: Callable[[int], bool] = lambda _: False,
        deadline_s: float = float("inf"),
        kv_use: Callable[[int], float] | None = None,
    ) -> None:
        self.kv_use = kv_use
        self.latency, self.fails, self.tokens, self.dies, self.deadline_s = (
            latency,
            fails,
            tokens,
            dies,
            deadline_s,
        )
        self.replicas = replicas
        self.outbox: asyncio.Queue[Finished] = asyncio.Queue()
        self.unacked: set[int] = set()
        self.admitted: list[int] = []
        """Ordinals of all groups asked for."""
        self.newest_committed = -1

    async def rollout(self, prompt: Prompt, committed: int) -> Finished:
        self.admitted.append(prompt.ordinal)
        if committed < 0 or committed != self.newest_committed:
            raise AssertionError(
                f"asked for version {committed}, while {self.newest_committed} is committed"
            )
        finished = await self._generate(prompt.ordinal)
        self.unacked.add(prompt.ordinal)
        self.outbox.put_nowait(finished)
        return finished

    async def _generate(self, ordinal: int) -> Finished:
        replica, oldest_version = self._serve(ordinal)
        latency = self.latency(ordinal)
        await asyncio.sleep(min(latency, self.deadline_s))
        if reason := "deadline" if latency > self.deadline_s else self.fails(ordinal):
            raise RolloutFailedError(reason)
        if self.replicas is not None and self.dies(ordinal):
            self.replicas.restart(replica)
            replica, oldest_version = self._serve(ordinal)
            await asyncio.sleep(latency)
        load = (
            None
            if self.kv_use is None
            else EngineLoad(f"fake {replica}", self.kv_use(ordinal), 0, 0)
        )
        return Finished(ordinal, oldest_version, self.tokens(ordinal), load)

    def _serve(self, ordinal: int) -> tuple[int, int]:
        """The replica that makes the group, and its version."""
        if self.replicas is None:
            return 0, self.newest_committed
        replica = self.replicas.route(ordinal)
        return replica, self.replicas.serve(replica, self.newest_committed)

    def committed(self, version: int) -> None:
        if version < self.newest_committed:
            raise AssertionError(f"committed went back from {self.newest_committed} to {version}")
        self.newest_committed = version

    async def ack(self, ordinals: Sequence[int]) -> None:
        self.unacked -= set(ordinals)

    async def close(self) -> None:
        return None


class FakeScores:
    """Scores what `rollouts` finished, each after its own `latency(ordinal)`. `score(ordinal)`
    gives the usable trajectories' rewards.

    `Scored.ref` is the version in which the group really began, for `FakeLearner` to check.
    """

    def __init__(
        self,
        rollouts: FakeRollouts,
        latency: Latency = _no_latency,
        score: Callable[[int], Sequence[float]] = lambda ordinal: (0.0, 1.0),
        fails: Callable[[int], str | None] = lambda _: None,
    ) -> None:
        self.rollouts, self.latency, self.score, self.fails = rollouts, latency, score, fails
        self.ended = 0
        self._done: asyncio.Queue[Scored] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    async def next(self) -> list[Scored]:
        if not self._tasks:
            self._tasks.add(asyncio.ensure_future(self._read()))
        done = [await self._done.get()]
        while not self._done.empty():
            done.append(self._done.get_nowait())
        return done

    def ended_below(self, ordinal: int) -> None:
        if ordinal < self.ended:
            raise AssertionError(
                f"all groups below {self.ended} had ended, and now only those below {ordinal}"
            )
        self.ended = ordinal

    async def save(self, groups: Sequence[Scored], path: Path) -> None:
        path.write_text(json.dumps([asdict(scored) for scored in groups]))

    async def load(self, path: Path) -> list[Scored]:
        rows = json.loads(path.read_text())
        return [
            Scored(
                **{
                    **row,
                    "rewards": tuple(row["rewards"]),
                    "example": row["example"] and Example(**row["example"]),
                }
            )
            for row in rows
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _read(self) -> None:
        while True:
            task = asyncio.ensure_future(self._score(await self.rollouts.outbox.get()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _score(self, finished: Finished) -> None:
        await asyncio.sleep(self.latency(finished.ordinal))
        ordinal, rewards = finished.ordinal, tuple(self.score(finished.ordinal))
        parts = {"fake": sum(rewards) / len(rewards)} if rewards else {}
        self._done.put_nowait(
            Scored(
                ordinal,
                finished.oldest_version,
                finished.oldest_version,
                finished.tokens,
                rewards,
                parts,
                len(rewards),
                0,
                finished.oldest_version,
                failure=self.fails(ordinal),
            )
        )


class FakeLearner:
    """Counts steps; `skips(n)` says whether the n-th attempted step (from 0) is skipped, for
    `reason`. Keeps every batch it was given.

    With `max_staleness` it refuses a group that really began earlier, whatever control believes.
    """

    def __init__(
        self,
        groups_per_step: int,
        latency: float = 0.0,
        skips: Callable[[int], bool] = lambda _: False,
        version: int = 0,
        max_staleness: int | None = None,
        reason: str = NOT_FINITE,
    ) -> None:
        self.groups_per_step, self.latency, self.skips, self.version, self.max_staleness = (
            groups_per_step,
            latency,
            skips,
            version,
            max_staleness,
        )
        self.reason = reason
        self.batches: list[list[Scored]] = []
        self.gathered: list[int] = []
        self.busy = False

    async def step(self, batch: Sequence[Scored]) -> StepResult:
        if len(batch) != self.groups_per_step or len({scored.ordinal for scored in batch}) != len(
            batch
        ):
            raise AssertionError(
                f"a batch of {[scored.ordinal for scored in batch]}, not {self.groups_per_step}"
                " distinct groups"
            )
        if self.max_staleness is not None and any(
            self.version - scored.ref > self.max_staleness for scored in batch
        ):
            raise AssertionError(
                f"groups begun at {[scored.ref for scored in batch]} were to be trained at"
                f" {self.version}"
            )
        await self._work()
        applied = not self.skips(len(self.batches))
        self.batches.append(list(batch))
        self.version += applied
        return StepResult(
            applied, {"loss": 0.0}, *("", "") if applied else (self.reason, self.reason)
        )

    async def gather(self, version: int) -> Manifest:
        if version != self.version:
            raise AssertionError(
                f"version {version} was to be gathered, while the learner is at {self.version}"
            )
        await self._work()
        self.gathered.append(version)
        return Manifest("fake", 0, version, (), (), (), ())

    async def save(self, directory: Path) -> dict[str, Written]:
        await self._work()
        (directory / "version").write_text(str(self.version))
        return {"version": size_and_checksum(directory / "version")}

    async def close(self) -> None:
        return None

    async def _work(self) -> None:
        if self.busy:
            raise AssertionError(
                "the learner was called while it worked: its calls are collectives"
            )
        self.busy = True
        await asyncio.sleep(self.latency)
        self.busy = False


class FakeWeightSync:
    """Brings a version to every replica that is not held after `latency(version)`, but to those
    that `lags(replica, version)` (never the first, nor more than half): they are unroutable until
    they catch up. `fails(version, attempt)` makes a push raise, after half of the replicas have it.
    """

    def __init__(
        self,
        latency: Latency = _no_latency,
        fails: Callable[[int, int], bool] = lambda version, attempt: False,
        replicas: FakeReplicas | None = None,
        lags: Callable[[int, int], bool] = lambda replica, version: False,
    ) -> None:
        self.latency, self.fails, self.lags = latency, fails, lags
        self.replicas = replicas or FakeReplicas()
        self.applied: list[int] = []
        self.attempts: dict[int, int] = {}

    async def push(self, manifest: Manifest) -> PushReport:
        version, replicas = manifest.version, self.replicas
        if self.applied and version <= self.applied[-1]:
            raise AssertionError(f"version {version} was pushed after {self.applied[-1]}")
        replicas.registry = version
        behind = [replica for replica in replicas.free[1:] if self.lags(replica, version)][
            : len(replicas.free) // 2
        ]
        for replica in range(len(replicas.versions)):
            await asyncio.sleep(self.latency(version) / len(replicas.versions))
            attempt = self.attempts.get(version, 0) + 1
            if 2 * replica >= len(replicas.versions) - 1 and self.fails(version, attempt):
                self.attempts[version] = attempt
                raise RuntimeError(f"push of version {version} failed")
            if replica not in behind and replica != replicas.held:
                replicas.apply(replica, version)
        self.applied.append(version)
        applied = {
            f"fake {replica}": {"pause_s": 0.0}
            for replica in replicas.free
            if replica not in behind
        }
        return PushReport(version, applied, tuple(f"fake {replica}" for replica in behind))

    async def hold(self, version: int) -> str | None:
        if not self.applied or version != self.applied[-1]:
            raise AssertionError(
                f"version {version} was to be held, and {self.applied} were applied"
            )
        replica = self.replicas.hold(version)
        return None if replica is None else f"fake {replica}"

    async def release(self, replica: str) -> None:
        self.replicas.release(int(replica.removeprefix("fake ")))


class FakeCheckpoints:
    """Keeps the states in memory, and the groups that wait."""

    def __init__(self) -> None:
        self.states: list[State] = []
        self.waiting: list[list[Scored]] = []
        """For each state."""

    async def write(
        self, state: State, waiting: Sequence[Scored], learner: Learner, scores: Scores
    ) -> Path:
        await asyncio.sleep(0)
        if [scored.ordinal for scored in waiting] != [ordinal for _, ordinal in state.waiting]:
            raise AssertionError(
                f"the state lists {state.waiting}, and {[scored.ordinal for scored in waiting]}"
                " wait"
            )
        self.states.append(state)
        self.waiting.append(list(waiting))
        return Path(f"step_{state.version}")


class FakeRecorder:
    """Keeps everything in lists."""

    def __init__(self) -> None:
        self.records: list[tuple[str, int, int, dict[str, float | str]]] = []
        self.all_outcomes: list[Outcome] = []

    def record(
        self, event: str, step: int, version: int, metrics: Mapping[str, float | str]
    ) -> None:
        self.records.append((event, step, version, dict(metrics)))

    def outcomes(self, outcomes: list[Outcome], outstanding: list[int]) -> None:
        if {ended.ordinal for ended in outcomes if ended.outcome != "waiting"} & set(outstanding):
            raise AssertionError("a group has come to its end and is outstanding")
        self.all_outcomes += outcomes

    async def flushed(self) -> None:
        return None


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
            raise AssertionError(
                f"generators were checked at {version}, the learner at {self.learner_side[-1]}"
            )
        self.generator_side.append(version)
        if version == self.fails_at:
            raise RuntimeError(f"log-probs differ at version {version}")
        return {"check/logprob_max_diff": 0.0, "check/tokens": 1.0}
