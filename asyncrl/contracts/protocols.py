"""The protocols between stations. Each protocol of this module has a real implementation, and a
fake in `asyncrl.testing`."""

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
from asyncrl.contracts.text_listener import Heard


class PromptSource(Protocol):
    """An endless source of prompts in ordinal order."""

    async def next(self) -> Prompt: ...

    async def close(self) -> None: ...


class Rollouts(Protocol):
    """Generates groups and keeps each one until it is acknowledged."""

    async def rollout(self, prompt: Prompt, committed: int) -> Finished:
        """Generate the group of one prompt with weights at least as new as `committed`. Returns
        when the group is ready for scoring. Canceling the call drops the group.

        Raises:
            RolloutFailedError: the deadline passed. The group is dropped.
        """
        ...

    def committed(self, version: int) -> None:
        """Require at least this version for all further requests, including retries."""
        ...

    async def ack(self, ordinals: Sequence[int]) -> None:
        """Forget these groups: their scored rows are on disk."""
        ...

    async def close(self) -> None: ...


class Scores(Protocol):
    """Scored groups in the order in which they finish. Each is in a complete Parquet file before
    `next` returns it, and the caller acknowledges it."""

    async def next(self) -> list[Scored]: ...

    def ended_below(self, ordinal: int) -> None:
        """Drop further copies of groups below this ordinal: all of them have an outcome."""
        ...

    async def save(self, groups: Sequence[Scored], path: Path) -> None:
        """Write the groups' rows to one Parquet file, in this order."""
        ...

    async def load(self, path: Path) -> list[Scored]:
        """The groups of a file that `save` wrote, in its order. `next` does not return them."""
        ...

    async def close(self) -> None: ...


class Learner(Protocol):
    """The learner. All its ranks act together, one call at a time."""

    async def step(self, batch: Sequence[Scored]) -> StepResult: ...

    async def gather(self, version: int) -> Manifest:
        """Put the current weights into the object store as this version, bucket by bucket."""
        ...

    async def save(self, directory: Path) -> Mapping[str, tuple[int, int]]:
        """Write the learner's state under `directory`.

        Returns:
            Each file: name relative to `directory` → (size in bytes, zlib.crc32).
        """
        ...

    async def watch(self) -> None:
        """Run until canceled.

        Raises:
            PartDiedError: a rank has died, even if no call needed it.
        """
        ...

    async def close(self) -> None: ...


class SharedDevice(Protocol):
    """The learner on GPUs that generators use in their shifts. Between `leave_device` and
    `take_device`, nothing else may call the learner."""

    async def take_device(self) -> None:
        """Load the learner's states again. Does nothing if they are on the device.

        Raises:
            RuntimeError: the generators have not left enough memory.
        """
        ...

    async def leave_device(self) -> None:
        """Free the device's memory. Does nothing if it is free.

        Raises:
            RuntimeError: what stays leaves too little for the generators.
        """
        ...


class WeightSync(Protocol):
    """Publishes versions to all replicas except one that an evaluation has reserved."""

    async def push(self, manifest: Manifest) -> PushReport:
        """Return when every live replica has applied the version, or when at least half of them
        have and the grace period is over.

        Raises:
            RuntimeError: fewer than half applied it in time.
        """
        ...

    async def hold(self, version: int) -> str | None:
        """Reserve one replica at `version`, the committed one, until `release`.

        The replica takes no newer version, answers only requests that name it, and does not count
        in a push. Do not call this during a push.

        Returns:
            The replica's id. None if fewer than two replicas have the version.
        """
        ...

    async def release(self, replica: str) -> None:
        """End the reservation: the replica takes the newest version and counts again. Does nothing
        if the replica has died."""
        ...

    async def rest(self) -> None:
        """Make every replica rest: it generates nothing, keeps its requests, and applies versions.
        Replicas that start later rest from their start.

        Raises:
            RuntimeError: a replica still generates.
        """
        ...

    async def wake(self) -> None:
        """End the rest: requests continue where they stopped.

        Raises:
            RuntimeError: a replica still rests.
        """
        ...


class ReferencePolicy(Protocol):
    """A reference policy that takes the policy's weights now and then."""

    async def refresh(self, manifest: Manifest) -> Mapping[str, float]:
        """Return metrics when the version scores groups, and is where checkpoints and a restarted
        process find it.

        Raises:
            RuntimeError: the version was not taken.
        """
        ...


class Checkpoints(Protocol):
    """Writes the coordinator's checkpoints."""

    async def write(
        self, state: State, waiting: Sequence[Scored], learner: Learner, scores: Scores
    ) -> Path:
        """Write one checkpoint and return its directory. Only a complete checkpoint is committed.

        Args:
            waiting: the groups of `state.waiting`, in its order.
            learner, scores: save their parts of the checkpoint.
        """
        ...


class Generate(Protocol):
    """One generator, or several behind a router."""

    async def generate(self, request: GenerateRequest, heard: Heard | None = None) -> Generated:
        """Generate the completions of one request.

        Args:
            heard: called with the text of each completion as it comes, and with none of it twice.

        Raises:
            StaleReplicaError: no replica could serve the requested version.
            GenerationTimeoutError: the request passed its deadline.
        """
        ...

    async def logprobs(
        self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], min_weights: WeightsId | None
    ) -> dict[str, list[tuple[float, ...]]]:
        """Log-probs of fixed tokens, in nats at temperature 1, by each replica's model.

        Args:
            rows: (context ids, ids to score) each.

        Returns:
            Replica → log-probs of each row's second ids.
        """
        ...


TableRow = Mapping[str, str | float | None]
"""One row of a table: column → value."""


class Sink(Protocol):
    """Receives metrics by step. Names are those of metrics.jsonl; metrics of events other than
    `step` have the prefix `<event>/`."""

    def add(self, step: int, now: float, scalars: Mapping[str, float]) -> None:
        """`now` is in Unix seconds."""
        ...

    def add_histogram(self, step: int, now: float, name: str, values: Sequence[float]) -> None: ...

    def add_table(self, step: int, now: float, name: str, rows: Sequence[TableRow]) -> None:
        """Every row has the same columns. Texts are redacted and bounded, but they are model
        output: a sink must not interpret them as markup."""
        ...

    def close(self, failed: bool = False) -> None: ...
