"""The settings tree: one class per section."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
)

from asyncrl.runtime.functions import FUNCTION
from asyncrl.runtime.ray_defaults import TASK_CPUS

__all__ = [
    "ADVANTAGES",
    "DATA_FILE",
    "ENTRY_NAME",
    "HUB_CACHE",
    "HUB_NAME",
    "LOSSES",
    "AlgorithmConfig",
    "CheckpointConfig",
    "CorrectionConfig",
    "DataConfig",
    "EvalConfig",
    "EvalSet",
    "GeneratorConfig",
    "LearnerConfig",
    "ModelConfig",
    "ObserveConfig",
    "RewardConfig",
    "RewardFunction",
    "RolloutConfig",
    "SandboxConfig",
    "Section",
    "Source",
    "Sources",
    "StalenessConfig",
    "Unset",
    "WarmStartConfig",
    "WeightsConfig",
    "is_hub_data",
    "is_hub_name",
    "sources_of",
]

ENTRY_NAME = r"^[^/]+$"
"""Name of a reward function: metrics have a '/' after it."""
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
HUB_CACHE = re.compile(
    r"(?P<cache>.+)/(?P<kind>models|datasets)--(?P<owner>[^/]+?)--(?P<name>[^/]+)"
    r"/snapshots/(?P<commit>[0-9a-f]{40})"
)
"""Where the hub's cache keeps a commit of a model or a dataset."""
DATA_FILE = re.compile(r".*\.(parquet|pq|jsonl|ndjson|json|csv|txt)(\.\w+)?")


class Section(BaseModel):
    """A part of the tree: unknown keys refused, values frozen."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


def _unset(value: Any) -> Any:
    return None if value == "auto" else value


Unset = BeforeValidator(_unset)
"""`auto` and null leave a setting to be derived from others (`asyncrl.config.derived`)."""


class ModelConfig(Section):
    path: str
    """Hugging Face checkpoint directory: config, safetensors and tokenizer. Read by learner and
    generators alike. `{runs_root}` in it is replaced. Or `owner/name` of a model on the hub, which
    is fetched once per node."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub. Default: the main branch as it is when the run
    starts."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights that the generators hold, and in which versions are published."""

    @property
    def on_hub(self) -> bool:
        """Whether `path` names a model on the hub."""
        return is_hub_name(self.path)


class Source(Section):
    """Rows of one origin: a file, several files, a folder or a dataset on the hub."""

    path: str
    """Parquet or JSONL file, glob (`/data/*.parquet`), folder, or `owner/name` of a dataset on
    the hub. A glob's and a folder's files are read in the order of their names."""
    split: str | None = None
    """Split of a folder or a dataset on the hub. Default: the only one there is; on the hub,
    train."""
    subset: str | None = None
    """Subset (configuration) of a folder or a dataset on the hub. Default: the only one, or the
    one that its README.md calls default."""
    revision: str | None = None
    """Branch, tag or commit of a dataset on the hub. Default: the main branch as it is when the
    run starts."""
    weight: float | None = Field(default=None, gt=0)
    """Share of the prompts that come from this source, relative to the other weights; only in
    data.train, and for all sources or none. Default: each row as often as any other."""
    prompt_column: str | None = None
    """Column with this source's prompts. Default: data.prompt_column."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the source in metrics and in the column `source_name`. Default: from its path."""

    @property
    def on_hub(self) -> bool:
        """Whether `path` names a dataset on the hub."""
        return is_hub_data(self.path)

    @property
    def label(self) -> str:
        """Name of the source: the given one, else the end of its path."""
        if self.name is not None:
            return self.name
        place = HUB_CACHE.fullmatch(self.path)
        path = Path(self.path)
        plain = path.parent if re.search(r"[*?[]", path.name) else path
        last = place["name"] if place else plain.name.split(".")[0]
        parts = [re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-._") or "data"]
        parts += [part for part in (self.subset, self.split) if part]
        return ".".join(parts)[:64]


def _several(value: Any) -> Any:
    """One path as it is; anything else as a list of sources: a mapping is one, a string a path."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return value[0]  # what a command line makes of a path
    if isinstance(value, dict | Source):
        value = [value]
    if isinstance(value, list | tuple):
        return tuple({"path": item} if isinstance(item, str) else item for item in value)
    return value


def _form(value: Any) -> str:
    return "(sources)" if isinstance(value, tuple) else "(path)"


Sources = Annotated[
    Annotated[str, Tag("(path)")] | Annotated[tuple[Source, ...], Tag("(sources)")],
    Discriminator(_form),
    BeforeValidator(_several),
]


def sources_of(value: str | tuple[Source, ...]) -> tuple[Source, ...]:
    """The sources of a setting: a string is the path of one."""
    return (Source(path=value),) if isinstance(value, str) else value


class DataConfig(Section):
    train: Sources
    """Training prompts: a path as of a source, or a list of sources, which are mixed. A source is
    a mapping of path, split, subset, revision, weight, prompt_column and name."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages ({role, content})."""
    apply_chat_template: bool = False
    """Render string prompts as one user message through the tokenizer's chat template. Chat
    messages always are."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as `enable_thinking: false`. One that the template does
    not know is refused."""
    system_prompt: str | None = Field(default=None, min_length=1)
    """System message put before every chat. Refused where a chat has one of its own, or the
    template leaves system messages out."""
    tools: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    """JSON schemas of functions that the chat template shows in every prompt. A prompt with tools
    of its own (tools_column) shows those alone."""
    tools_column: str | None = None
    """Column with each prompt's tools: a list of JSON schemas, or the same as JSON text; null or
    empty = those of `tools`."""
    max_prompt_length: int = Field(default=512, gt=0)
    """Longest prompt, in tokens."""
    prompt_policy: Literal["truncate", "drop", "error"] = "error"
    """What happens to a longer prompt: it loses tokens at its start, the row is left out and
    counted, or the run is refused before anything is allocated."""
    max_length: int | None = Field(default=None, gt=1)
    """Longest prompt plus completion, in tokens: a generation ends there at the latest. None =
    max_prompt_length + max_completion_length."""
    length_policy: Literal["truncate", "drop", "error"] = "error"
    """What happens to a longer prompt plus completion of warm_start.data, and to a prompt that
    leaves no token of max_length to generate: it is cut, left out and counted, or the run is
    refused."""
    length_side: Literal["keep_start", "keep_end"] = "keep_start"
    """Which tokens of a longer prompt plus completion stay (length_policy: truncate): the first, so
    that the completion is cut at its end, or the last, so that the prompt is cut at its start. A
    row left without a completion token, or without a prompt, is left out and counted."""
    shuffle: bool = True
    """Permute every epoch by (seed, epoch). False keeps the files' order; weighted sources take
    turns."""


class RolloutConfig(Section):
    rollout_batch_size: int = Field(default=16, gt=0)
    """Groups per round."""
    n_samples_per_prompt: int = Field(default=8, gt=0)
    """Trajectories per group. 1 only with an advantage that compares no siblings:
    reinforce_plus_plus or gae."""
    num_steps_per_rollout: int = Field(default=1, gt=0)
    """Optimizer steps per round. Must divide rollout_batch_size."""
    global_batch_size: int | None = Field(default=None, gt=0)
    """Trajectories per step. Optional: if given, it must equal rollout_batch_size *
    n_samples_per_prompt / num_steps_per_rollout."""
    max_completion_length: int = Field(gt=0)
    """Longest completion, in tokens (data.max_length may end it earlier). Required: nothing else
    ends a model that never stops."""
    temperature: float = Field(default=1.0, ge=0.01)
    """Sampling temperature. Log-probs are those of the distribution sampled from, on both sides."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most probable tokens that together have this probability. 1 = from all. Below
    1 the generator's log-probs are renormalized over the kept tokens and the learner's are not:
    only for objectives that compare the two nowhere, without a ratio, correction or KL."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many most probable tokens. 0 = from all. Otherwise as top_p."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Sample from tokens of at least this times the most probable one's probability. 0 = from all.
    Otherwise as top_p."""
    rollout_stop: list[str] = []
    """Further strings that end a completion, beyond EOS and the chat end token: a special token, or
    any string, of however many tokens. The tokens that spell it stay in the completion and are
    trained on. The text that rewards get goes up to it."""
    rollout_stop_token_ids: list[int] = []
    """Further stop token ids. What such a token spells stays in the text that rewards get."""
    ignore_eos: bool = False
    """Go on past EOS to max_completion_length (for measurements)."""
    repetition_stop: int | None = Field(default=None, ge=2)
    """End a completion of a rollout when its last tokens are one n-gram so many times in a row: it
    would only go on. It counts as truncated (finish reason `repetition`). Runs of one token count
    too (rows of dashes, spaces), so 20 or more is usual. None = never."""
    repetition_ngram: int = Field(default=16, gt=0)
    """Longest n-gram that repetition_stop looks for, in tokens."""
    adaptive_concurrency: bool = True
    """Generate as many groups at once as the engines' KV caches hold, found while running; never
    more than max_concurrency. False: max_concurrency."""
    max_concurrency: int | None = Field(default=None, gt=0)
    """Groups generated at once, at most. Default: as many as the staleness budget admits."""
    num_workers: int = Field(default=1, gt=0)
    """Rollout worker processes."""
    deadline_s: Annotated[float | None, Unset] = Field(default=None, gt=0)
    """Seconds after which a group's generation, retries included, fails. Default: derived from the
    longest completion and how many run at once; each evaluation set's from its own longest
    completion. `asyncrl plan` says what it is."""
    max_errors: int = Field(default=100, ge=0)
    """Groups and completions of evaluations that may end with an exception that asyncrl does not
    foresee, in one attempt. Each counts as failed, and its stack is kept in metrics.jsonl; one more
    ends the run."""

    @property
    def kept_tokens(self) -> dict[str, Any]:
        """top_p, top_k and min_p, as a request has them."""
        return {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}

    @property
    def cuts_distribution(self) -> bool:
        """Whether rollouts sample from some tokens alone."""
        return (self.top_p, self.top_k, self.min_p) != (1.0, 0, 0.0)

    @property
    def repetition(self) -> tuple[int, int] | None:
        """(Longest n-gram in tokens, times in a row) that end a completion; None = nothing does."""
        return (
            None if self.repetition_stop is None else (self.repetition_ngram, self.repetition_stop)
        )

    @property
    def stops_repetition(self) -> bool:
        """Whether a repeated n-gram ends a completion."""
        return self.repetition_stop is not None


class RewardFunction(Section):
    function: str = Field(pattern=FUNCTION)
    """`package.module:function`, importable in a fresh process."""
    weight: float = 1.0
    """Weight in the reward. 0 = reported only."""
    per_token: bool = False
    """The function returns a list of rewards for each trajectory, one per completion token. Under
    advantage: gae each comes with its token; under every other advantage the trajectory's reward is
    their sum."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of every call, beside those that asyncrl gives it. They are stored and
    shown with the config: no secrets."""

    @property
    def runs_code(self) -> bool:
        """Whether it is the built-in reward that runs what a model wrote."""
        return self.function in (
            "asyncrl.rewards.builtin:code_tests",
            "asyncrl.rewards.code:code_tests",
        )


class SandboxConfig(Section):
    level: Literal["landlock", "namespaces", "container"] | None = None
    """Least isolation of code that a model wrote: without it nothing is run. docs/sandbox.md
    compares the levels. None = no reward runs such code."""
    service: str | None = Field(default=None, pattern=r"^https?://[^/]+/?$")
    """URL of a sandbox service that runs everything, such as http://127.0.0.1:8700. None = each
    reward process's own machine."""
    python: str | None = Field(default=None, pattern="^/")
    """Absolute path of the programs' interpreter. Default: the one that runs asyncrl, without the
    packages of its environment."""
    paths: list[Annotated[str, Field(pattern="^/")]] = []
    """Absolute paths of folders that programs may read and import from, besides the system's."""
    wall_s: float = Field(default=10.0, gt=0)
    """Seconds on the clock for the tests of one completion."""
    cpu_s: float = Field(default=10.0, gt=0)
    """Seconds of processor time for them."""
    memory_bytes: int = Field(default=1 << 30, gt=0)
    """Address space of one process, and memory of all processes of one completion."""
    processes: int = Field(default=32, gt=0)
    """Processes and threads of one completion at once."""
    disk_bytes: int = Field(default=64 << 20, gt=0)
    """Bytes in a program's folder."""
    output_bytes: int = Field(default=1 << 20, gt=0)
    """Bytes that a program may print."""

    @property
    def runs_code(self) -> bool:
        """Whether there is a sandbox."""
        return self.level is not None

    @property
    def is_local(self) -> bool:
        """Whether there is one, and this machine is it."""
        return self.runs_code and self.service is None


class RewardConfig(Section):
    functions: dict[Annotated[str, Field(pattern=ENTRY_NAME)], RewardFunction] = Field(min_length=1)
    """Name (without "/") → function. The reward is their weighted sum; each is kept as a reward
    part."""
    deadline_s: float = Field(default=30.0, gt=0)
    """Seconds one function may take for one group. Then the process that computes it is killed and
    the policy decides."""
    policy: Literal["fail", "drop_group", "retry"] = "fail"
    """When a reward raises, hangs or breaks its contract: end the run, drop the group, or try again
    (`retries` times, then drop the group)."""
    retries: int = Field(default=2, ge=0)
    """Further tries under `policy: retry`."""
    overlong_buffer: int = Field(default=0, ge=0)
    """The last so many tokens before a completion's limit (max_completion_length, or what
    data.max_length leaves of it) cost reward, linearly up to overlong_penalty (DAPO's soft overlong
    penalty). 0 = none."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """What a completion that reaches its limit loses."""
    tasks: int = Field(default=1, gt=0)
    """Scoring tasks, each with reward processes of its own. Ray spreads them over the nodes by
    num_cpus and num_gpus."""
    processes: int = Field(default=2, gt=0)
    """Reward processes of one scoring task, and of evaluation: so many slow groups do not delay the
    others."""
    num_cpus: float = Field(default=TASK_CPUS, ge=0)
    """Logical CPUs that one scoring task, its reward processes included, declares to Ray."""
    num_gpus: float = Field(default=0.0, ge=0)
    """GPUs that one scoring task declares to Ray; its reward processes share them. Evaluation's
    reward processes, if there is anything to evaluate on, take as many once more."""
    concurrency: int = Field(default=1, gt=0)
    """Groups that one reward process scores at once. Async functions share the process's event
    loop. A plain function gets a thread per group when this is above 1: then it must be safe to
    call from several."""
    memory_bytes: int = Field(default=4 << 30, gt=0)
    """Memory of its own that one reward process may take (Linux, RLIMIT_DATA); a reward that asks
    for more fails, before the machine runs out."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where rewards run code that a model wrote (`asyncrl.rewards.code`)."""
    shuffle: bool = False
    """Control experiment: permute the rewards over each step's whole batch, so that there is
    nothing to learn. The rewards do not cause what such a run still gains."""

    @property
    def per_token(self) -> bool:
        """Whether any function rewards each token."""
        return any(reward.per_token for reward in self.functions.values())

    @property
    def penalizes_length(self) -> bool:
        """Whether the soft overlong penalty acts."""
        return self.overlong_buffer > 0


class GeneratorConfig(Section):
    attach: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of a standing Serve application (serve_configs/) whose generators the run uses, alone,
    until it ends. None = it starts its own."""
    num_replicas: int = Field(default=1, gt=0)
    """Serve replicas, each one vLLM engine."""
    min_replicas: int | None = Field(default=None, gt=0)
    """An attempt begins with fewer than `num_replicas`, but with at least so many, where no more
    have room after `placement_timeout_s`. None = with all of them. The batch stays the same; fewer
    replicas only take longer for it."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What the engines run on."""
    num_cpus: float = Field(default=0.4, ge=0)
    """Logical CPUs that one replica declares to Ray."""
    max_num_seqs: Annotated[int | None, Unset] = Field(default=None, gt=0)
    """Sequences that one engine runs at once. Default: derived from how many completions the run
    has under way, the replicas and the device; the most that suits the device for generators that
    stand."""
    kv_cache_memory_bytes: int = Field(default=256 << 20, gt=0)
    """KV cache of one engine on CPU, in bytes."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU's memory that one engine takes (device: cuda)."""
    in_flight: Literal["keep", "recompute", "drain"] = "recompute"
    """Generations in flight at an update: go on with the old KV cache, go on after recomputing it,
    or finish first."""
    start_timeout_s: Annotated[float | None, Unset] = Field(default=None, gt=0)
    """Seconds a replica may take from placement to its first answer. Default: derived from the size
    of the model's files."""
    stall_timeout_s: Annotated[float | None, Unset] = Field(default=None, gt=0)
    """Seconds for which an engine, or the process around it, may answer nothing at all before it is
    replaced. An engine answers between any two of its steps: longer than the longest step and than
    an update of its weights. Default: derived from the size of the model's files."""

    @property
    def own(self) -> bool:
        """Whether the run starts generators of its own."""
        return self.attach is None

    @property
    def least_replicas(self) -> int:
        """Replicas without which an attempt does not begin."""
        return self.min_replicas or self.num_replicas

    @property
    def replicas_text(self) -> str:
        """How many replicas there are, as a person reads it."""
        return (
            f"{self.num_replicas}"
            if self.least_replicas == self.num_replicas
            else f"{self.least_replicas} to {self.num_replicas}"
        )


LOGPROB_BYTES = {"cpu": 224 << 20, "cuda": 1 << 30}
"""Device → bytes of a chunk of logits that suit it."""


class LearnerConfig(Section):
    world_size: int = Field(default=1, gt=0)
    """ZeRO-3 ranks. All of them shard parameters, gradients and optimizer; world_size /
    sequence_parallel_size of them take different rows."""
    sequence_parallel_size: int = Field(default=1, gt=0)
    """Neighboring ranks that share each packed row, a part of its tokens each (DeepSpeed Ulysses),
    so that a trajectory may be this many times as long. Must divide world_size and the model's
    attention heads."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What the ranks run on: gloo on cpu, nccl on cuda."""
    num_cpus: float = Field(default=0.4, ge=0)
    """Logical CPUs that one rank declares to Ray."""
    num_threads: int = Field(default=1, gt=0)
    """Torch threads of one rank."""
    bf16: bool = False
    """Train in bfloat16 with fp32 master weights."""
    cast_lm_head_to_fp32: bool = False
    """Under bf16, compute the logits in float32 from the bf16 hidden states and head. bfloat16
    rounds a logit of 8 by up to 0.03. Costs a float32 copy of the head and a slower product."""
    logprob_memory_bytes: Annotated[int | None, Unset] = Field(default=None, gt=0)
    """Memory of one chunk of logits and what is computed from it, in bytes; a chunk has at least
    one token. Default: 224 MiB on cpu, 1 GiB on cuda."""
    max_tokens_per_gpu: int = Field(default=4096, gt=0)
    """Hard cap on the tokens that one rank holds of a micro-batch, prompt and completion counted.
    Dynamic batching is always on."""
    packing: Literal["rows", "none"] | None = None
    """`rows`: many trajectories share a packed row, which is fastest. `none`: one trajectory a
    forward, with the model's own attention, for models whose layers would carry one packed
    trajectory into the next. Default: rows where the model allows it; `asyncrl plan` says which,
    and why."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward pass and compute the rest again: less memory,
    about a third more time."""
    offload_optimizer: Literal["none", "cpu"] = "none"
    """Where the fp32 masters, AdamW's moments and the step's gradients lie, and where the step is
    computed: with the model, or in host memory. On device: cpu it works and saves nothing."""
    offload_param: Literal["none", "cpu"] = "none"
    """Where this rank's shard of the weights lies between uses. Needs offload_optimizer: cpu, whose
    states are six times as large or more."""
    ds3_gather_for_generation: bool = False
    """TRL's switch for gathering the whole model on every rank to generate from it. False is the
    only way here."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW, or plain SGD without momentum (for comparisons: nothing in it amplifies rounding)."""
    learning_rate: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""
    value_learning_rate: float | None = Field(default=None, ge=0)
    """Peak learning rate of the value head (advantage: gae); its schedule is that of learning_rate.
    A fresh head usually wants 10 to 100 times as much as the policy. Default: learning_rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Applied steps over which the learning rate rises linearly from 0."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up: stay, or fall to 0 at max_steps."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay, SGD's L2 penalty. Norms, biases and the decay rates of
    recurrent layers have none."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Clip the gradient to this L2 norm."""
    call_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds in which every rank must answer one call: a step, a version, a save or load, the
    start. Ranks that do not count as died: they are ended, and a new attempt begins
    (`max_restarts`). Collectives wait a minute longer, so that the driver decides."""
    max_skipped_steps: int = Field(default=3, gt=0)
    """Steps skipped in a row (NaN or Inf) after which the run ends."""
    find_nonfinite: bool = False
    """When a step is skipped, find the trajectory that did it by bisection. Costs about as much as
    the step."""
    grad_norm_spike: float = Field(default=10.0, gt=1)
    """Keep the batch of a step whose gradient norm is above this many times the median of the last
    32 steps'."""

    @field_validator("ds3_gather_for_generation")
    @classmethod
    def model_is_never_gathered(cls, asked: bool) -> bool:
        if asked:
            raise ValueError(
                "nothing generates in the learner: generators are processes of their own, and"
                " weights reach them in buckets of weights.bucket_bytes, so no rank ever holds the"
                " model whole; set it to false, or leave it out"
            )
        return asked

    @property
    def data_parallel_size(self) -> int:
        """Ranks, or groups of ranks, that take different rows."""
        return self.world_size // self.sequence_parallel_size

    @property
    def logprob_bytes(self) -> int:
        """Memory of one chunk of logits, in bytes."""
        return self.logprob_memory_bytes or LOGPROB_BYTES[self.device]

    @property
    def max_tokens_per_row(self) -> int:
        """Hard cap on the tokens of one micro-batch, over all ranks that share it."""
        return self.max_tokens_per_gpu * self.sequence_parallel_size


class CorrectionConfig(Section):
    """What makes up for tokens that another policy sampled, beyond the loss's own ratio. Masked
    tokens stay in every denominator."""

    truncation: Literal["none", "token", "sequence"] = "none"
    """Weigh each token by min(π_old / π_behavior, cap): per token (TIS), or the product over the
    trajectory. Needs an old_policy other than behavior."""
    cap: float = Field(default=2.0, ge=1)
    """Largest truncated weight, and largest ratio in the KL term of the loss."""
    normalize: bool = False
    """Divide the truncated weights by their mean over the step's tokens. Costs a further forward
    pass."""
    mask_below: float | None = Field(default=None, gt=0, lt=1)
    """Mask tokens whose π_learner / π_behavior is below this (IcePop)."""
    mask_above: float | None = Field(default=None, gt=1)
    """Mask tokens whose π_learner / π_behavior is above this (IcePop)."""
    reject_above: float | None = Field(default=None, gt=0)
    """Mask what has a KL estimate above this, in nats."""
    reject_estimator: Literal["k1", "k2", "k3"] = "k3"
    """The KL estimate: -l, l²/2 or e^l - 1 - l, with l = log π_learner / π_behavior."""
    reject_level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = "token"
    """What is judged: a token alone, or the trajectory by the sum, mean or largest of its tokens.
    """
    sequence_mask_above: float | None = Field(default=None, gt=0)
    """Mask trajectories of negative advantage whose mean log π_behavior / π_learner is above this
    (DeepSeek-V3.2's off-policy sequence mask)."""

    @property
    def rejects(self) -> bool:
        """Whether a KL estimate may mask tokens: reject_above is set."""
        return self.reject_above is not None

    @property
    def masks(self) -> bool:
        """Whether any token may be masked."""
        return any(
            value is not None
            for value in (
                self.mask_below,
                self.mask_above,
                self.reject_above,
                self.sequence_mask_above,
            )
        )


ADVANTAGES = (
    "grpo",
    "dr_grpo",
    "rloo",
    "maxrl",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gae",
)
LOSSES = ("ppo", "gspo", "cispo", "sapo", "dppo", "reinforce")


def _built_in_or_own(names: tuple[str, ...]) -> AfterValidator:
    def check(name: str) -> str:
        if name in names or re.match(FUNCTION, name):
            return name
        raise ValueError(
            f"use one of {', '.join(names)}, or a function of your own as package.module:function"
        )

    return AfterValidator(check)


class AlgorithmConfig(Section):
    advantage: Annotated[str, _built_in_or_own(ADVANTAGES)] = "grpo"
    """GRPO: (r - mean) / std of the group, the population's std (verl and TRL take the sample's).
    dr_grpo: r - mean. rloo: r - mean of the others. maxrl: (r - mean) / mean. reinforce_plus_plus:
    r, normalized over the step; its baseline variant: r - mean, normalized over the step. gae: per
    token, by a value head on the learner, normalized over the step. Or a function of your own, as
    `package.module:function` (docs/own_algorithms.md)."""
    loss: Annotated[str, _built_in_or_own(LOSSES)] = "ppo"
    """PPO's clipped ratio per token; GSPO's per trajectory; CISPO's clipped weight; SAPO's soft
    gate; DPPO's mask by probability difference; plain REINFORCE. Or a function of your own, as
    `package.module:function`."""
    old_policy: Literal["behavior", "learner", "log_linear"] = "behavior"
    """Denominator of the loss's ratio: the policy that sampled; the learner's at the step
    (decoupled PPO's recomputed proximal policy); the log-linear guess at the version before. The
    way from the behavior policy to the others is correction.truncation's."""
    loss_aggregation: Literal[
        "token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "fixed"
    ] = "token_mean"
    """Mean over the step's tokens; over trajectories of token sums; of token means; or token sums
    over max_completion_length (Dr.GRPO)."""
    filter_zero_variance: bool = False
    """Leave out groups whose rewards are all equal, and admit others instead (DAPO's dynamic
    sampling)."""
    group_filter: str | None = Field(default=None, pattern=FUNCTION)
    """A function of your own, as `package.module:function`, that says whether a scored group is
    trained; others are admitted for those left out."""
    eps_clip: float | None = Field(default=None, gt=0, le=1)
    """Lower clip of the ratio: 1 - eps_clip. Default: 0.2; for CISPO 1, which is no lower clip.
    (GSPO's ratio is a mean over the trajectory: its paper uses 3e-4 below and 4e-4 above for long
    answers.)"""
    eps_clip_high: float = Field(default=0.28, gt=0)
    """Upper clip of the ratio: 1 + eps_clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """For negative advantages, bound PPO's loss by this times the advantage (loss: ppo)."""
    tau_positive: float = Field(default=1.0, gt=0)
    """SAPO's temperature for positive advantages."""
    tau_negative: float = Field(default=1.05, gt=0)
    """SAPO's temperature for negative advantages."""
    dppo_threshold: float = Field(default=0.15, gt=0, lt=1)
    """DPPO's largest move of a token's probability."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token (advantage: gae)."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """How far an advantage looks ahead before it trusts the value head: 0 = one token, 1 = to the
    end (advantage: gae)."""
    value_coef: float = Field(default=0.5, gt=0)
    """Weight of the value head's squared error in the loss (advantage: gae)."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Bonus for the entropy of each token's distribution, in units of the loss per nat."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Take this times the trajectory's KL divergence from the reference policy, summed over its
    tokens, from the reward. With kl_estimator: k1, the only one whose gradient is then the
    divergence's. With advantage: dr_grpo, rloo or reinforce_plus_plus_baseline: a division by the
    rewards' std would undo the coefficient. Not beside kl_loss_coef or filter_zero_variance."""
    kl_loss_coef: float = Field(default=0.0, ge=0)
    """Add this times the KL divergence from the reference policy, aggregated as the loss is, to the
    loss."""
    kl_estimator: Literal["k1", "k2", "k3", "low_var"] = "k3"
    """With l = log π_ref / π: -l, l²/2, e^l - 1 - l, or that and at most 10. In the loss, each
    token counts π_learner / π_behavior times, at most correction.cap. In the reward (kl_coef): k1.
    """
    ref_load: str | None = None
    """Hugging Face checkpoint directory of the reference policy, or its name on the hub; frozen.
    Default: model.path. `{runs_root}` in it is replaced."""
    ref_num_cpus: float = Field(default=0.2, ge=0)
    """Logical CPUs that the reference's process declares to Ray."""
    correction: CorrectionConfig = CorrectionConfig()
    allow_uncorrected: bool = False
    """Allow an uncorrected loss on stale tokens."""

    @property
    def clip_low(self) -> float:
        """How far below 1 the ratio is clipped."""
        return self.eps_clip if self.eps_clip is not None else 1.0 if self.loss == "cispo" else 0.2

    @property
    def compares_siblings(self) -> bool:
        """Whether a trajectory's advantage depends on the others of its group."""
        return self.advantage not in ("reinforce_plus_plus", "gae")

    @property
    def clips(self) -> bool:
        """Whether eps_clip and eps_clip_high act: a loss that clips a ratio which is not always
        1."""
        return self.loss in ("ppo", "gspo", "cispo") and self.old_policy != "learner"

    @property
    def caps(self) -> bool:
        """Whether correction.cap acts."""
        return self.correction.truncation != "none" or self.kl_loss_coef > 0

    @property
    def has_reference(self) -> bool:
        """Whether a KL term needs the reference policy."""
        return self.kl_coef > 0 or self.kl_loss_coef > 0

    @property
    def corrected(self) -> bool:
        """Whether every token's gradient carries a function of π_learner / π_behavior."""
        if self.loss == "reinforce" or self.old_policy != "behavior":
            return self.correction.truncation != "none"
        return True

    @property
    def compares_behavior(self) -> str | None:
        """What in the objective holds the generator's log-probs against other ones; None if nothing
        does."""
        if self.old_policy != "learner":
            return f"the ratio of loss: {self.loss} against old_policy: {self.old_policy}"
        if self.correction.truncation != "none" or self.correction.masks:
            return "the correction"
        return "the KL term" if self.has_reference else None


class StalenessConfig(Section):
    max_staleness: int = Field(default=2, ge=0)
    """Hard bound, in versions: no trajectory is trained whose oldest token is older. 0 =
    synchronous training."""
    on_stale: Literal["wait", "drop"] = "wait"
    """`wait` holds batches back until no outstanding group would expire, so no long answer is lost.
    `drop` aborts a group as soon as it can no longer be trained in time."""
    over_sampling: int = Field(default=0, ge=0)
    """Groups admitted beyond those that can be trained in time; the fastest win. Needs on_stale:
    drop."""


class WeightsConfig(Section):
    bucket_bytes: int = Field(default=64 << 20, gt=0)
    """Size of one published bucket, in bytes; raised to the largest parameter if that is larger."""
    push_timeout_s: Annotated[float | None, Unset] = Field(default=None, gt=0)
    """Seconds that a version may wait for half of the live replicas, retries included; then the run
    ends. Under `in_flight: drain` no time passes while the generations under way make tokens.
    Longer than `generator.stall_timeout_s` and the start of a replica, so that one that is replaced
    is waited for. Default: derived from the size of the model's files, and the longest completion
    under in_flight: drain."""
    commit_grace_s: Annotated[float | None, Unset] = Field(default=None, ge=0)
    """Seconds that a version waits for all live replicas. After that at least half of them, and
    never fewer than one, are enough. The others get no request that asks for it until they have
    caught up, and no version waits for them before. Default: a fifth of push_timeout_s."""
    logprob_tolerance: float | None = Field(default=None, gt=0)
    """Difference allowed between generator and learner log-probs at the same version, in nats: the
    largest in float32 (default 1e-4), the mean in bfloat16 (default 0.03), where rounding alone
    moves improbable tokens by tenths."""
    check_every_versions: int = Field(default=20, ge=0)
    """Compare log-probs of probe prompts every so many versions during the run. 0 = at start only.
    """
    probe_prompts: int = Field(default=32, gt=0)
    """Probe prompts of one comparison."""
    probe_tokens: int = Field(default=64, gt=0)
    """Tokens sampled for each probe, as far as the model's context and the learner's token cap go.
    """


class EvalSet(Section):
    """One evaluation set: prompts, and how they are sampled."""

    data: Sources | None = None
    """Its prompts: a path or sources as in eval.data. Default: eval.data. `{runs_root}` in a path
    is replaced."""
    n: int = Field(default=1, gt=0)
    """Completions of each prompt. Above 1, avg@n and pass@k are reported as well, for k = 1, 2, 4,
    … and n."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature; 0 = greedy. Default: rollout.temperature."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the most probable tokens that together have this probability. 1 = from all.
    Default: rollout.top_p. Nothing is trained here, so any objective allows it; the log-probs that
    are kept are those among the kept tokens."""
    top_k: int | None = Field(default=None, ge=0)
    """Sample from this many most probable tokens. 0 = from all. Default: rollout.top_k."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Sample from tokens of at least this times the most probable one's probability. 0 = from all.
    Default: rollout.min_p."""
    max_completion_length: int | None = Field(default=None, gt=0)
    """Longest completion, in tokens; data.max_length does not bound it then. Default: as in
    rollouts."""
    max_prompts: int | None = Field(default=None, gt=0)
    """Its prompts: the first so many of the file; of several sources, equally many of each as far
    as they go. Default: eval.max_prompts."""


class EvalConfig(Section):
    data: Sources | None = None
    """Held-out prompts: a path or sources as in data.train, without weights; several sources
    take turns, row by row. They are the sets `greedy` (temperature 0) and `sampled`
    (rollout.temperature). None = no evaluation, unless there are `sets`."""
    sets: dict[str, EvalSet] = {}
    """Name → further set. Metrics are `eval/<name>_...`."""
    every_steps: int = Field(default=0, ge=0)
    """Evaluate every so many steps. 0 = before and after only."""
    max_prompts: int = Field(default=1024, gt=0)
    """Prompts of one evaluation: the first so many of the file; of several sources, equally many of
    each as far as they go."""
    accuracy: str | None = None
    """Name of the reward function whose mean is called accuracy. Default: the first one of
    reward.functions."""
    pass_threshold: float = 1.0
    """A completion passes (pass@k) if that reward is this or more."""
    in_flight: bool = False
    """Evaluate over changing versions: updates go on, and a completion may have tokens of several.
    False: every completion is of one version. With two or more replicas one of them keeps it while
    training goes on with the others; with a single replica, updates wait for the evaluation."""

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.data is not None or bool(self.sets)

    @property
    def draws_several(self) -> bool:
        """Whether a set has several completions of each prompt."""
        return any(one.n > 1 for one in self.sets.values())


class CheckpointConfig(Section):
    every_steps: int = Field(default=50, ge=0)
    """Save every so many applied steps. 0 = only at the end."""
    keep: int = Field(default=2, gt=0)
    """Committed checkpoints kept."""
    save: str | None = None
    """Directory of the checkpoints. Default: `checkpoints/` in the run directory. `{runs_root}` in
    it is replaced."""
    load: str | None = None
    """Run directory (or its checkpoints) to begin from, if this run has no checkpoint of its own:
    weights, optimizer, versions and data frontier. `{runs_root}` in it is replaced."""
    ckpt_step: int | None = Field(default=None, ge=0)
    """Begin from the checkpoint of this step, not from the newest: the run's own. With `load`, it
    is a step of the run there, for as long as this run has none of its own; after that, one that
    this run has not got is passed over for its newest."""


class WarmStartConfig(Section):
    """Supervised steps before version 0, until held-out greedy accuracy lies in a window."""

    data: Sources | None = None
    """Prompts as in data.train, with a column of answers: a path or sources, without weights.
    None = no warm start."""
    target_column: str = "answer"
    """Column with the text that should follow the prompt. EOS is appended, or where a chat template
    renders the prompts, what ends its turns."""
    completion_policy: Literal["truncate", "drop", "split", "error"] = "error"
    """What happens to a target that is longer, with its EOS, than rollout.max_completion_length: it
    loses tokens at its end, the EOS first, the row is left out and counted, the row stays whole (as
    long as it may be: data.max_length does not bound it either) and packing_strategy cuts it into
    pieces, or the run is refused before anything is allocated. Held-out rows are answered in one
    piece: under `split` a longer one is refused."""
    min_accuracy: float = Field(default=0.40, ge=0, le=1)
    """Lower edge of the window."""
    max_accuracy: float = Field(default=0.65, ge=0, le=1)
    """Upper edge of the window. A run that jumps over it goes back to its last check with a halved
    learning rate."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Learning rate of the supervised steps."""
    batch_size: int = Field(default=256, gt=0)
    """Rows of one supervised step."""
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = "bfd"
    """What happens to a step's rows before they share micro-batches of learner.max_tokens_per_gpu
    tokens. bfd: they stay whole; bfd_split: longer rows are cut (needs completion_policy: split: no
    other row is longer); wrapped: one after the other, cut at every so many tokens. Pieces are
    apart: none sees another, and the first token of a piece is not predicted."""
    check_every_steps: int = Field(default=10, gt=0)
    """Supervised steps between two checks of the accuracy."""
    max_steps: int = Field(default=2000, gt=0)
    """Supervised steps after which the warm start is given up."""

    @property
    def splits(self) -> bool:
        """Whether longer rows stay whole until they are packed."""
        return self.completion_policy == "split"

    @property
    def given(self) -> bool:
        """Whether there is a warm start."""
        return self.data is not None


class ObserveConfig(Section):
    sinks: list[Literal["wandb", "mlflow", "trackio"]] = []
    """Where metrics go beside metrics.jsonl and TensorBoard. Each is an extra to install: `pip
    install 'asyncrl[wandb]'`."""
    completions_every: int = Field(default=10, ge=0)
    """Steps between two tables of completions, and histograms of rewards, in TensorBoard and the
    sinks. 0: none."""
    stall_s: float = Field(default=300.0, gt=0)
    """Seconds without progress until the run says which stage hangs, what it waits for,
    and what its workers do. Nothing is ended."""
    project: str = "asyncrl"
    """Project of W&B and trackio, experiment of MLflow. The run's name is `name`."""

    @property
    def has_sinks(self) -> bool:
        """Whether any sink is named."""
        return bool(self.sinks)


def is_hub_name(path: str) -> bool:
    """Whether this is `owner/name` of a model on the Hugging Face hub: it looks so, and no such
    directory is here."""
    return HUB_NAME.fullmatch(path) is not None and not Path(path).exists()


def is_hub_data(path: str) -> bool:
    """Whether this is `owner/name` of a dataset on the hub: as `is_hub_name`, and no file's
    name."""
    return is_hub_name(path) and not DATA_FILE.fullmatch(path.lower())
