"""What each station offers to the others. Each protocol has a real part and a fake in
`asyncrl.testing`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from asyncrl.contracts.messages import (
    Finished,
    Generated,
    GenerateRequest,
    Manifest,
    PushReport,
    Scored,
    StepResult,
    WeightsId,
)
from asyncrl.contracts.rows import Prompt
from asyncrl.contracts.state import State

__all__ = [
    "Checkpoints",
    "Generate",
    "Learner",
    "PromptSource",
    "Rollouts",
    "Scores",
    "Sink",
    "TableRow",
    "WeightSync",
]


class PromptSource(Protocol):
    """Prompts in ordinal order, without end."""

    async def next(self) -> Prompt: ...

    async def close(self) -> None: ...


class Rollouts(Protocol):
    """Makes groups and keeps each until it is acknowledged."""

    async def rollout(self, prompt: Prompt, committed: int) -> Finished:
        """Generate the group of one prompt with weights at least as new as `committed`; return when
        it waits for scoring. Cancelled: give it up.

        Raises:
            RolloutFailedError: not done by the deadline. The group is forgotten.
        """
        ...

    def committed(self, version: int) -> None:
        """From now on requests, retries included, ask for at least this version."""
        ...

    async def ack(self, ordinals: Sequence[int]) -> None:
        """These groups' scored rows are safe: forget them."""
        ...

    async def close(self) -> None: ...


class Scores(Protocol):
    """Scored groups in the order in which they are done. Each is in a complete Parquet file before
    it comes; the caller acknowledges it."""

    async def next(self) -> list[Scored]: ...

    def ended_below(self, ordinal: int) -> None:
        """Every group below this ordinal has its outcome: a copy of one that comes later is
        dropped."""
        ...

    async def save(self, groups: Sequence[Scored], path: Path) -> None:
        """Write the groups' rows as one Parquet file, in this order."""
        ...

    async def load(self, path: Path) -> list[Scored]:
        """The groups of a file that `save` wrote, in its order. They do not come by `next`
        again."""
        ...

    async def close(self) -> None: ...


class Learner(Protocol):
    """The learner group: all ranks act together, one call at a time."""

    async def step(self, batch: Sequence[Scored]) -> StepResult: ...

    async def gather(self, version: int) -> Manifest:
        """Put the current weights in the object store as this version, bucket by bucket."""
        ...

    async def save(self, directory: Path) -> Mapping[str, tuple[int, int]]:
        """Write the learner's state under `directory`. Returns every file of it: name relative to
        `directory` → bytes, and zlib.crc32 of them."""
        ...

    async def close(self) -> None: ...


class WeightSync(Protocol):
    """Brings one version to all replicas, but one that is held for an evaluation."""

    async def push(self, manifest: Manifest) -> PushReport:
        """Return when every live replica has applied the version, or after a grace at least half of
        them.

        Raises:
            RuntimeError: fewer applied it in time.
        """
        ...

    async def hold(self, version: int) -> str | None:
        """Let one replica keep `version`, the committed one, until `release`: it takes no newer
        version and only requests that name it, and no push counts it. Call it while nothing is
        being pushed.

        Returns:
            The replica's id. None: fewer than two replicas have the version, so that none can be
            spared.
        """
        ...

    async def release(self, replica: str) -> None:
        """The replica takes the newest version, and counts again. One that has died meanwhile is no
        error."""
        ...


class Checkpoints(Protocol):
    """Where the coordinator's checkpoints go."""

    async def write(
        self, state: State, waiting: Sequence[Scored], learner: Learner, scores: Scores
    ) -> Path:
        """Write one checkpoint and return its directory. It counts only once all of it is there.

        Args:
            waiting: the groups of `state.waiting`, in its order.
            learner, scores: save their parts of it.
        """
        ...


class Generate(Protocol):
    """One generator, or many behind a router."""

    async def generate(self, request: GenerateRequest) -> Generated:
        """Raises StaleReplicaError or GenerationTimeoutError."""
        ...

    async def logprobs(
        self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], min_weights: WeightsId | None
    ) -> dict[str, list[tuple[float, ...]]]:
        """Log-probs (nats, temperature 1) of each row's second ids, given its first, by replica:
        what each one's model says of tokens that are fixed."""
        ...


TableRow = Mapping[str, str | float | None]
"""Column → value of one row of a table."""


class Sink(Protocol):
    """Takes numbers against the step. Names are those of metrics.jsonl; of events other than `step`
    they begin with `<event>/`."""

    def add(self, step: int, now: float, scalars: Mapping[str, float]) -> None:
        """`now` is in Unix seconds."""
        ...

    def add_histogram(self, step: int, now: float, name: str, values: Sequence[float]) -> None: ...

    def add_table(self, step: int, now: float, name: str, rows: Sequence[TableRow]) -> None:
        """Every row has the same columns. Its texts are redacted and bounded, and still a model's:
        no sink may read them as markup."""
        ...

    def close(self, failed: bool = False) -> None: ...
