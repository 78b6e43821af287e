"""Messages between stations. Token data does not travel in them: it stays in workers, blocks and
files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from asyncrl.contracts.rows import Completion, VersionSpan

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    import ray

RowRef: TypeAlias = "tuple[ray.ObjectRef[pa.Buffer], int]"
"""Location of a group's row: a reference to the Arrow IPC stream of a table of groups, and the
index of the row."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of a generator's engine when it finished a group."""

    replica: str
    kv_use: float
    """Fraction of KV cache blocks in use, 0 to 1."""
    waiting: int
    """Completions in the engine's queue."""
    preemptions: int
    """Preemptions since the engine started: completions that lost their KV cache to others."""
    aborted: tuple[int, ...] = ()
    """Histogram of the completions aborted since the engine started, by length. Item 0 counts those
    without tokens, item k those of 2^(k-1) to 2^k - 1 tokens. The engine's last 0.1 s do not
    count."""
    aborted_tokens: int = 0
    """Tokens of the aborted completions, counted in the same way."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """State of one generator replica: its weights, its engine and its settings."""

    replica: str
    """Id of the replica."""
    weights: WeightsId | None
    """The current weights; None = those of the checkpoint."""
    held: bool
    """Whether an evaluation has reserved the replica at these weights."""
    rests: bool
    """Whether the replica generates nothing because the learner uses its device."""
    pid: int
    package: str
    """Folder of the asyncrl package that the replica runs."""
    broken: str | None
    """Why the weights are in an unknown state; None if they are intact."""
    start_times: Mapping[str, float]
    """Stage of the engine's startup → seconds."""
    applied: Mapping[str, float]
    """Timings of the last weight update; empty before the first."""
    tokens_at_pause: tuple[int, ...]
    """Tokens of each unfinished completion when the last update paused the engine."""
    tokens_generated: int
    """Completion tokens generated since the engine started, up to 0.1 s ago. The last ones of an
    aborted completion do not count."""
    load: EngineLoad
    kv_cache_tokens: int
    """Capacity of the KV cache, in tokens."""
    memory_bytes: int
    """Resident memory of the replica and its engine's processes."""
    stop_token_ids: tuple[int, ...]
    """Token ids that end every completion, in ascending order."""
    stop_strings: tuple[str, ...]
    """Strings that end every completion, in alphabetical order."""
    tokenizer: str
    """Hash of the tokenizer."""
    max_model_len: int
    """Longest prompt plus completion, in tokens."""
    app: Mapping[str, object]
    """The replica's settings (`asyncrl.generation.GeneratorApp`)."""
    parameters: int
    """Checksum of the parameters' names and shapes."""
    base_weights: str
    """Hash of the checkpoint's weight files, to which adapters are added; empty if the generators
    take whole weights."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A generated group that waits in its rollout worker for scoring."""

    ordinal: int
    oldest_version: int
    """Oldest token version among its trajectories."""
    tokens: int
    """Completion tokens of its trajectories."""
    load: EngineLoad | None = None
    """Load of the engine that generated the group, if known."""
    baseline_tokens: int = 0
    """Tokens of its baseline."""


@dataclass(frozen=True, slots=True)
class TrajectoryText:
    """One trajectory of a group, shown to the user as a sample. Long texts are cut in the
    middle."""

    prompt: str
    completion: str
    reward: float | None
    reward_parts: Mapping[str, float | None]
    version: int
    """Oldest policy version among the tokens."""


@dataclass(frozen=True, slots=True)
class ScoredBaseline:
    """Summary of a scored group's baseline for control."""

    reward: float | None
    """None: no reward function could score it, or it has no tokens. The group is then dropped."""
    tokens: int
    truncated: bool
    """Whether it was cut off, as `Scored.truncated`."""


@dataclass(frozen=True, slots=True)
class SessionCounts:
    """Summary of the sessions of a group for control."""

    ends: Mapping[str, int]
    """How they ended → how many did."""
    turns: int
    branches: Mapping[str, int]
    """Class of branches, of `asyncrl.contracts.nodes.BRANCHES` → how many there are."""
    unparsed: int
    """Turns whose tool calls or reasoning could not be parsed."""
    overridden: int
    """Arguments of requests that had no effect, such as a temperature."""
    tokens: Mapping[str, int]
    """`trained`, or why they are not → their sampled tokens. They add up to `Scored.tokens`. What
    `on_stale: mask` leaves out is known when the group is trained."""
    model_s: float
    other_s: float
    """Seconds that the sessions waited for the model, and all other seconds."""
    rewarded_turns: int = 0
    """Turns to which the environment gave a reward of their own."""
    turn_reward: float = 0.0
    """The sum of these rewards."""
    reusable: int = 0
    """Prompt tokens in whole cache blocks that an earlier turn of the session had read or sampled
    with the same weights."""
    cached: int = 0
    """Those of them that the engine had in its prefix cache."""
    repeated: int = 0
    """Sampled tokens that a row has as context, because an earlier row trains them."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """How and why sessions failed that are not trained → how many did. Those without a turn that
    `unasked` counts are among them."""
    unasked: int = 0
    """Sessions in which the model took no turn, although nothing failed."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Summary of a scored group for control, with the location of its row."""

    ordinal: int
    oldest_version: int
    ref: RowRef | None
    """Location of the row; None for a lost group."""
    tokens: int
    rewards: tuple[float, ...]
    """Rewards of the usable trajectories."""
    reward_parts: Mapping[str, float]
    """Mean of each part over the usable trajectories."""
    usable: int
    """Trajectories with status ok. Control drops a group with fewer than two."""
    truncated: int
    """Trajectories that reached max_completion_length or max_length, or ended in a loop
    (rollout.repetition_stop)."""
    newest: int = 0
    """Newest token version among the trajectories and the baseline, as `oldest_version` is the
    oldest."""
    versions: tuple[int, ...] = ()
    """Each version that sampled a token with loss of a usable trajectory, in increasing order."""
    loss_tokens: tuple[int, ...] = ()
    """How many such tokens each of `versions` sampled."""
    content: str = ""
    """Hash of the row (`asyncrl.contracts.content_hash`)."""
    masked: Mapping[str, int] = field(default_factory=dict)
    """Masked trajectories by status."""
    unscored: Mapping[str, float] = field(default_factory=dict)
    """Reward function → trajectories without a reward from it. Includes those masked for another
    reason. NAME/unscored_REASON → those that the function did not score for this reason."""
    failure: str | None = None
    """Why scoring dropped the group; None if it did not."""
    lost: bool = False
    """Whether the group no longer exists. `failure` says why."""
    lengths: tuple[int, ...] = ()
    """Tokens of each trajectory's completion, or of all turns of its session. They add up to
    `tokens`."""
    logprob_sum: float = 0.0
    """Sum of the completions' finite behavior log-probs, in nats."""
    looping: int = 0
    """Trajectories with a repeating n-gram."""
    characters: int = 0
    """Characters in the completions."""
    unprintable: int = 0
    """Characters that do not belong in text: control, private-use, unassigned and replacement
    characters, and surrogates."""
    source: str | None = None
    """Name of the prompt's source; None if data.train has one source."""
    reference_version: int | None = None
    """The version of the reference policy that scored the group; None without one."""
    baseline: ScoredBaseline | None = None
    """None in a run without baselines."""
    sessions: SessionCounts | None = None
    """None without an environment."""
    example: TrajectoryText | None = None

    @property
    def equal_rewards(self) -> bool:
        """Whether all rewards of the group are equal, that of its baseline included."""
        of_baseline = () if self.baseline is None else (self.baseline.reward,)
        return bool(self.rewards) and len({*self.rewards, *of_baseline}) == 1


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one attempted optimizer step. `applied` is False if all ranks skipped it."""

    applied: bool
    metrics: Mapping[str, float]
    note: str = ""
    """What is unusual about the step, and where its batch was kept; "" for an ordinary step."""
    reason: str = ""
    """Why the step was skipped, a key of `WAYS_OUT`; "" for an applied step."""


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """The learner's loss on held-out rows of next-token prediction."""

    nll: float
    """Sum of the negative log-likelihoods of the targets, in nats."""
    tokens: int
    """Number of targets."""
    exact: float
    """Share of the rows (0..1) all of whose targets are the argmax."""

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood per target, in nats."""
        return self.nll / self.tokens


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Location of one tensor: `nbytes` bytes from `offset` in bucket `bucket`, row-major. `dtype`
    is torch's name, such as "float32"."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bucket: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version's weights: every tensor of the checkpoint exactly once, under its checkpoint
    name. The learner keeps the buckets in Ray's object store."""

    run_id: str
    attempt: int
    version: int
    tensors: tuple[TensorEntry, ...]
    buckets: tuple[ray.ObjectRef[npt.NDArray[np.uint8]], ...]
    """Object reference of each bucket's bytes."""
    sizes: tuple[int, ...]
    """Size of each bucket, in bytes."""
    checksums: tuple[int, ...]
    """`asyncrl.weights.layout.bucket_checksum` of each bucket."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    """Tensors of the checkpoint that are not published, because neither the learner nor the
    generators compute with them."""
    adapter: Mapping[str, object] | None = None
    """PEFT's settings (adapter_config.json) of a version that is an adapter. Its tensors are then
    the adapter's, under PEFT's names. None = the tensors are the whole checkpoint."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """Report on a committed version: every live replica applied it, or at least half of them when
    the grace period ended."""

    version: int
    replicas: Mapping[str, Mapping[str, float]]
    """Replica → fetch_s, pause_s, paused_at, apply_s, applied_at, tokens_during_fetch, in_flight,
    recomputed_tokens, longest_gap_s."""
    unroutable: tuple[str, ...] = ()
    """Replicas that did not apply it in time. They get no traffic until they catch up."""


@dataclass(frozen=True, slots=True)
class WeightsId:
    """Identity of one version's weights. Versions are ordered only within one run and attempt."""

    run_id: str
    attempt: int
    version: int


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request for completions of one prompt, given as token ids."""

    prompt_ids: tuple[int, ...]
    n: int
    """Number of completions."""
    max_tokens: int
    """Maximum completion length, in tokens."""
    temperature: float
    """0 = greedy. Log-probs are those of the sampling distribution; at 0, those of temperature
    1."""
    seed: int | None = None
    deadline_s: float = 300.0
    """Seconds from arrival at the replica until the request is aborted."""
    min_weights: WeightsId | None = None
    """Oldest acceptable weights. None = any."""
    ignore_eos: bool = False
    repetition: tuple[int, int] | None = None
    """(longest n-gram in tokens, repeats): end a completion whose last tokens repeat one n-gram
    this often. None = never."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, in addition to the generator's. The completion keeps the
    tokens of the string; its text ends before the string."""
    schema: str | None = None
    """JSON schema that the completion's text must follow. The engine then forces tokens."""
    top_p: float = 1.0
    """Sample from the most probable tokens that together have this probability. 1 = from all. Below
    1, log-probs are normalized over the kept tokens."""
    top_k: int = 0
    """Sample from this many most probable tokens. 0 = from all."""
    min_p: float = 0.0
    """Sample from tokens with at least this fraction of the highest probability. 0 = from all."""
    baseline: bool = False
    """Whether to generate the prompt's greedy completion too, in addition to the n. It samples from
    all tokens at temperature 0, and the request's other limits apply to it."""
    replica: str | None = None
    """Id of the replica that an evaluation reserved. Only it may answer, with exactly
    `min_weights`. None = any replica."""
    session: str | None = None
    """Names the session that the request is a turn of. It may use the KV cache that earlier turns
    of the session filled with the same weights, and goes to the same replica as they if it can."""
    tries: int = 0
    """Tries of this request that a replica could not answer. With a session, each makes another
    replica the first choice."""
    continued: int = 0
    """Last tokens of `prompt_ids` that another replica has sampled for this completion before it
    died. A streamed text begins with theirs, and the tokens do not."""


@dataclass(frozen=True, slots=True)
class Generated:
    """The n completions of a request, and the id of the replica that generated them."""

    completions: tuple[Completion, ...]
    replica: str
    started_at: float
    finished_at: float
    """When the replica, with acceptable weights, accepted the request and when it finished, by its
    process's `steady_time`."""
    load: EngineLoad | None = None
    """Load of the engine at the end."""
    baseline: Completion | None = None
    """The greedy completion, if it was requested."""
    cached_tokens: tuple[int, ...] = ()
    """For each completion, tokens of the prompt whose KV the engine had in its prefix cache: whole
    blocks, and not the prompt's last token."""
    cache_block: int = 0
    """Tokens of a block of that cache; 0 without a prefix cache."""
    times: tuple[tuple[float, float], ...] = ()
    """For each completion, when the engine first computed it and when its last token came, by the
    process's `steady_time`. Empty if the engine told no times."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A replica has accepted a request whose completion it sends in pieces."""

    replica: str
    version: int
    """Of its weights at that moment."""
    at: float
    """By its process's `steady_time`."""


@dataclass(frozen=True, slots=True)
class Details:
    """What each `StreamPiece` of a streamed completion contains."""

    whole: bool = False
    """Send the completion as one piece at its end, which costs less."""
    top: int = 0
    """Number of most probable tokens to report per position, with their log-probs."""
    prompt: bool = False
    """Report the prompt's tokens too, with log-probs at temperature 1."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """T consecutive tokens with T log-probs, in nats."""

    ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    """None for the first token of a prompt, which has no prediction."""
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Per position, (id, log-prob) of the most probable tokens, best first. Empty unless
    requested."""


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """A completion's new tokens and text since its previous piece."""

    tokens: Tokens
    text: str
    finish_reason: str | None = None
    """Set on the last piece."""
    versions: tuple[VersionSpan, ...] = ()
    """Set on the last piece, for the whole completion."""
    cached_tokens: int = 0
    """Set on the last piece, see `Generated.cached_tokens`."""
    prompt: Tokens | None = None
    """Set on the first piece, if requested."""


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """A standing replica's weights, and the job that leases it."""

    weights: WeightsId | None
    """None = those of the checkpoint."""
    lease: str | None
    """The job that leases the application, or None."""

    @property
    def text(self) -> str:
        """A description for the user."""
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
