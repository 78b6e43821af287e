"""What stations tell each other. Token data stays in workers, blocks and files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.contracts.rows import Completion, VersionSpan

__all__ = [
    "Details",
    "EngineLoad",
    "Example",
    "Finished",
    "GenerateRequest",
    "Generated",
    "Manifest",
    "Piece",
    "PushReport",
    "ReplicaStatus",
    "Scored",
    "ServedWeights",
    "StepResult",
    "TensorEntry",
    "Tokens",
    "WeightsId",
]


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
    """Completions of requests that were given up, since the engine's start: item k counts those of
    2^(k-1) to 2^k - 1 tokens, item 0 those of none."""
    aborted_tokens: int = 0
    """Their tokens."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One generator replica: its weights, its engine, and what it was started with."""

    replica: str
    """Its id."""
    weights: WeightsId | None
    """The weights that answer now; None: the checkpoint's own."""
    held: bool
    """Whether an evaluation holds it at these weights."""
    pid: int
    package: str
    """Folder of the asyncrl package that it runs."""
    broken: str | None
    """Why its weights are in an unknown state, if they are."""
    start_times: Mapping[str, float]
    """Part of the engine's start → seconds."""
    applied: Mapping[str, float]
    """Timings of the last update of the weights; empty before the first."""
    tokens_at_pause: tuple[int, ...]
    """Tokens that each unfinished completion had when the last update paused the engine."""
    tokens_generated: int
    """Completion tokens since the engine's start."""
    load: EngineLoad
    kv_cache_tokens: int
    """Tokens that the KV cache holds."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end every completion, in ascending order."""
    stop_strings: tuple[str, ...]
    """Strings that end every completion, in alphabetical order."""
    tokenizer: str
    """Hash of its tokenizer."""
    max_model_len: int
    """Longest prompt plus completion, in tokens."""
    app: Mapping[str, Any]
    """Its settings (`asyncrl.generation.GeneratorApp`)."""
    parameters: int
    """Checksum of the parameters' names and shapes."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A group that waits, in its rollout worker, to be scored."""

    ordinal: int
    oldest_version: int
    """Oldest token version among its trajectories."""
    tokens: int
    """Completion tokens generated."""
    load: EngineLoad | None = None
    """Of the engine that made it, where that is known."""


@dataclass(frozen=True, slots=True)
class Example:
    """One trajectory of a group, for a person to see what the model writes. Long texts have lost
    their middle."""

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
    oldest_version: int
    ref: Any
    """Where its row is: (Ray object reference to the IPC stream of an Arrow table of groups, row).
    A fake may hold anything."""
    tokens: int
    rewards: tuple[float, ...]
    """Rewards of the usable trajectories."""
    reward_parts: Mapping[str, float]
    """Mean of each part over the usable trajectories."""
    usable: int
    """Trajectories with status ok. Fewer than two: the group is dropped."""
    truncated: int
    """Trajectories that ended at max_completion_length or max_length, or in a loop
    (rollout.repetition_stop)."""
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
    """Sum of the completions' behavior log-probs, in nats, those that are no numbers left out."""
    looping: int = 0
    """Trajectories that hold a loop of one n-gram."""
    characters: int = 0
    """Characters of the completions."""
    unprintable: int = 0
    """Those of them that no text has: control characters, private and unassigned ones, and what
    stands for bytes that are no text."""
    source: str | None = None
    """Name of the source of its prompt; None if data.train has one source."""
    example: Example | None = None


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
    """Where one tensor lies: `nbytes` bytes from `offset` in bucket `bucket`, row-major, of `dtype`
    (torch's name, such as "float32")."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bucket: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version's weights: every tensor of the checkpoint exactly once, under its name there, in
    buckets held in the object store by the learner."""

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
    """A version is committed: every live replica has applied it, or after the grace at least half
    of them."""

    version: int
    replicas: Mapping[str, Mapping[str, float]]
    """Per replica: fetch_s, pause_s, apply_s, tokens_during_fetch, in_flight, longest_gap_s."""
    unroutable: tuple[str, ...] = ()
    """Replicas that did not apply it in time; they take no traffic until they have caught up."""


@dataclass(frozen=True, slots=True)
class WeightsId:
    """Identity of one version's weights: ordered by version, and only within one run and
    attempt."""

    run_id: str
    attempt: int
    version: int


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Completions wanted for one prompt, as token ids."""

    prompt_ids: tuple[int, ...]
    n: int
    """Completions."""
    max_tokens: int
    """Longest completion, in tokens."""
    temperature: float
    """0 = greedy. Log-probs are those of the distribution sampled from (at 0: of the model's own).
    """
    seed: int | None = None
    deadline_s: float = 300.0
    """Seconds from arrival at the replica until the request is aborted."""
    min_weights: WeightsId | None = None
    """Oldest weights that may answer. None = whatever is loaded."""
    ignore_eos: bool = False
    repetition: tuple[int, int] | None = None
    """End a completion whose last tokens are one n-gram of at most so many tokens, so many times in
    a row. None = never."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, beside the generator's own. The tokens that spell one stay in
    it, the text goes up to it."""
    top_p: float = 1.0
    """Sample from the most probable tokens that together have this probability. 1 = from all.
    Log-probs are then those among the kept tokens."""
    top_k: int = 0
    """Sample from this many most probable tokens. 0 = from all."""
    min_p: float = 0.0
    """Sample from tokens of at least this times the most probable one's probability. 0 = from all.
    """
    replica: str | None = None
    """Id of the only replica that may answer, and with no other weights than `min_weights`: it is
    held at them for an evaluation. None = any replica."""


@dataclass(frozen=True, slots=True)
class Generated:
    """n completions and the id of the replica that made them."""

    completions: tuple[Completion, ...]
    replica: str
    started_at: float
    finished_at: float
    """When the replica, with the weights asked for, took the request, and when it was done: by its
    process's `steady_time`."""
    load: EngineLoad | None = None
    """Of its engine, when they were done."""


@dataclass(frozen=True, slots=True)
class Details:
    """What a stream of pieces tells."""

    whole: bool = False
    """The completion as one piece, at its end. That costs less."""
    top: int = 0
    """Most probable tokens at each place, with their log-probs."""
    prompt: bool = False
    """The prompt's tokens as well: log-probs at temperature 1."""
    spelled: bool = False
    """Whether the tokens' texts are needed. Nothing that an engine knows of."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """T tokens in a row, with T log-probs (nats)."""

    ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    """None for a prompt's first token, which nothing predicts."""
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Of each token, the ids and log-probs of the most probable ones at its place, best first.
    Empty unless they were asked for."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a completion has gained since its last piece."""

    tokens: Tokens
    text: str
    finish_reason: str | None = None
    """With the last piece."""
    versions: tuple[VersionSpan, ...] = ()
    """With the last piece: of the whole completion."""
    prompt: Tokens | None = None
    """With the first piece, if it was asked for."""


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """Which weights a replica holds, and for whom."""

    weights: WeightsId | None
    """None: the checkpoint's own."""
    lease: str | None
    """The job that has the application, or None."""

    @property
    def text(self) -> str:
        """In words."""
        if self.weights is None:
            held = "the checkpoint's own weights"
        else:
            held = (
                f"version {self.weights.version} of run {self.weights.run_id}, attempt"
                f" {self.weights.attempt}"
            )
        if self.lease is not None:
            return f"serving {held}; leased by {self.lease}"
        return (
            f"serving {held}; no lease"
            if self.weights is None
            else f"serving {held}, the last of an ended lease"
        )
