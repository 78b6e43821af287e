"""What the coordinator needs of the other stations. Each has a real part and a fake in `asyncrl.testing`.

Everything here is small: references, ordinals, versions and counts. Token data stays in workers, blocks and files.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from asyncrl.runtime.functions import short
from asyncrl.types import Prompt

__all__ = [
    "FILTERED",
    "NOTHING_TO_LEARN",
    "NOT_FINITE",
    "UNFORESEEN",
    "WAYS_OUT",
    "EngineLoad",
    "EvaluationLost",
    "Example",
    "Finished",
    "Learner",
    "Manifest",
    "PartDied",
    "PromptSource",
    "PushReport",
    "RolloutFailed",
    "Rollouts",
    "Scored",
    "Scores",
    "StepResult",
    "TensorEntry",
    "WeightSync",
    "unforeseen",
]


UNFORESEEN = "not foreseen: "
"""How the failure of a group begins that ended with an exception nobody foresaw."""
FILTERED = "filtered: "
"""How the failure of a group begins that the user's own filter left out."""
CAUSE_LENGTH = 300
"""Characters of an error's message that a reason repeats."""
STACK_LENGTH = 20_000
"""Characters of a stack that are kept: an error's message may be of any length."""


class PartDied(RuntimeError):
    """A process of the run died, or a stream broke because one did. A new attempt, from the last committed checkpoint, may go better."""


class EvaluationLost(Exception):
    """The replica that was held for an evaluation is gone, and with it the version. The message says how."""


class RolloutFailed(Exception):
    """A group could not be generated within its deadline. The message says why."""


def unforeseen(what: str, error: BaseException) -> str:
    """What to say of an exception that nobody foresaw: a line that begins with UNFORESEEN, then the stack."""
    cause = short(" ".join(str(error).split()), CAUSE_LENGTH)
    return f"{UNFORESEEN}{what}: {type(error).__name__}: {cause}\n{short(''.join(traceback.format_exception(error)), STACK_LENGTH)}"


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What a generator's engine has to do, when it has finished a group."""

    replica: str
    kv_use: float
    """Share of its KV cache's blocks in use, 0 to 1."""
    waiting: int
    """Completions in its queue."""
    preemptions: int
    """Completions that lost their KV cache to others, since the engine's start."""
    aborted: tuple[int, ...] = ()
    """Completions of requests that were given up, since the engine's start: item k counts those of 2^(k-1) to 2^k - 1 tokens, item 0 those of none."""
    aborted_tokens: int = 0
    """Their tokens."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A group that waits, in its rollout worker, to be scored."""

    ordinal: int
    begun: int
    """Oldest token version among its trajectories."""
    tokens: int
    """Completion tokens generated."""
    load: EngineLoad | None = None
    """Of the engine that made it, where that is known."""


@dataclass(frozen=True, slots=True)
class Example:
    """One trajectory of a group, for a person to see what the model writes. Long texts have lost their middle."""

    prompt: str
    completion: str
    reward: float | None
    reward_parts: Mapping[str, float | None]
    version: int
    """Oldest version among its tokens."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A scored group: where its row is, and what control needs to know of it."""

    ordinal: int
    begun: int
    ref: Any
    """Where its row is: (Ray object reference to the IPC stream of an Arrow table of groups, row). A fake may hold anything."""
    tokens: int
    rewards: tuple[float, ...]
    """Rewards of the usable trajectories."""
    reward_parts: Mapping[str, float]
    """Mean of each part over the usable trajectories."""
    usable: int
    """Trajectories with status ok. Fewer than two: the group is dropped."""
    truncated: int
    """Trajectories that ended at max_completion_length or max_length, or in a loop (rollout.repetition_stop)."""
    newest: int = 0
    """Newest token version among its trajectories."""
    content: str = ""
    """Hash of its row (`asyncrl.contracts.content_hash`)."""
    masked: Mapping[str, int] = field(default_factory=dict)
    """Trajectories by the status that masks them."""
    unscored: Mapping[str, int] = field(default_factory=dict)
    """Reward function → trajectories that it gave no reward, whatever else masks them."""
    failure: str | None = None
    """Why scoring gave the group up (policy drop_group), or None."""
    lost: bool = False
    """There is no such group any more: `failure` says why."""
    logprob_sum: float = 0.0
    """Sum of the completions' behaviour log-probs, in nats, those that are no numbers left out."""
    looping: int = 0
    """Trajectories that hold a loop of one n-gram."""
    characters: int = 0
    """Characters of the completions."""
    unprintable: int = 0
    """Those of them that no text has: control characters, private and unassigned ones, and what stands for bytes that are no text."""
    source: str | None = None
    """Name of the source of its prompt; None if data.train has one source."""
    example: Example | None = None


NOT_FINITE = "NaN or Inf in loss or gradient"
NOTHING_TO_LEARN = "no trajectory of the batch has a token to learn from"
WAYS_OUT = {
    NOT_FINITE: "lower learner.learning_rate",
    NOTHING_TO_LEARN: "look at status and loss_mask of its rows",
}
"""Why a step was skipped, and what to do about it."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step attempted. `applied` is False if all ranks skipped it."""

    applied: bool
    metrics: Mapping[str, float]
    note: str = ""
    """Why the step deserves a look, and where its batch was kept; "" for an ordinary one."""
    reason: str = ""
    """Why it was skipped, one of WAYS_OUT; "" for an applied one."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `nbytes` bytes from `offset` in bucket `bucket`, row-major, of `dtype` (torch's name, such as "float32")."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bucket: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version's weights: every tensor of the checkpoint exactly once, under its name there, in buckets held in the object store by the learner."""

    run_id: str
    attempt: int
    version: int
    tensors: tuple[TensorEntry, ...]
    buckets: tuple[Any, ...]
    """Object references (uint8 arrays), one per bucket."""
    sizes: tuple[int, ...]
    """Bytes of each bucket."""
    checksums: tuple[int, ...]
    """zlib.crc32 of each bucket."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    """Tensors of the checkpoint that no version has, as neither side computes with them."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """A version is committed: every live replica has applied it, or after the grace at least half of them."""

    version: int
    replicas: Mapping[str, Mapping[str, float]]
    """Per replica: fetch_s, pause_s, apply_s, tokens_during_fetch, in_flight, longest_gap_s."""
    unroutable: tuple[str, ...] = ()
    """Replicas that did not apply it in time; they take no traffic until they have caught up."""


class PromptSource(Protocol):
    """Prompts in ordinal order, without end."""

    async def next(self) -> Prompt: ...

    async def close(self) -> None: ...


class Rollouts(Protocol):
    """Makes groups and keeps each until it is acknowledged."""

    async def rollout(self, prompt: Prompt, committed: int) -> Finished:
        """Generate the group of one prompt with weights at least as new as `committed`; return when it waits for scoring. Cancelled: give it up.

        Raises:
            RolloutFailed: not done by the deadline. The group is forgotten.
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
    """Scored groups in the order in which they are done. Each is in a complete Parquet file before it comes; the caller acknowledges it."""

    async def next(self) -> list[Scored]: ...

    def ended_below(self, ordinal: int) -> None:
        """Every group below this ordinal has its outcome: a copy of one that comes later is dropped."""
        ...

    async def save(self, groups: Sequence[Scored], path: Path) -> None:
        """Write the groups' rows as one Parquet file, in this order."""
        ...

    async def load(self, path: Path) -> list[Scored]:
        """The groups of a file that `save` wrote, in its order. They do not come by `next` again."""
        ...

    async def close(self) -> None: ...


class Learner(Protocol):
    """The learner group: all ranks act together, one call at a time."""

    async def step(self, batch: Sequence[Scored]) -> StepResult: ...

    async def gather(self, version: int) -> Manifest:
        """Put the current weights in the object store as this version, bucket by bucket."""
        ...

    async def save(self, directory: Path) -> Mapping[str, tuple[int, int]]:
        """Write the learner's state under `directory`. Returns every file of it: name relative to `directory` → bytes, and zlib.crc32 of them."""
        ...

    async def close(self) -> None: ...


class WeightSync(Protocol):
    """Brings one version to all replicas, but one that is held for an evaluation."""

    async def push(self, manifest: Manifest) -> PushReport:
        """Return when every live replica has applied the version, or after a grace at least half of them.

        Raises:
            RuntimeError: fewer applied it in time.
        """
        ...

    async def hold(self, version: int) -> str | None:
        """Let one replica keep `version`, the committed one, until `release`: it takes no newer version and only requests that name it, and no push
        counts it. Call it while nothing is being pushed.

        Returns:
            The replica's id. None: fewer than two replicas have the version, so that none can be spared.
        """
        ...

    async def release(self, replica: str) -> None:
        """The replica takes the newest version, and counts again. One that has died meanwhile is no error."""
        ...
