"""The settings tree: one class per section."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypedDict

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
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
    "DistillationConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "EvalSet",
    "GeneratorConfig",
    "LearnerConfig",
    "ModelConfig",
    "ObserveConfig",
    "OnlinePreferenceConfig",
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
"""Pattern of a reward function's name. It has no '/', because metric names put one after it."""
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
HUB_CACHE = re.compile(
    r"(?P<cache>.+)/(?P<kind>models|datasets)--(?P<owner>[^/]+?)--(?P<name>[^/]+)"
    r"/snapshots/(?P<commit>[0-9a-f]{40})"
)
"""Path of one commit of a model or dataset in the hub's cache."""
DATA_FILE = re.compile(r".*\.(parquet|pq|arrow|jsonl|ndjson|json|csv|txt)(\.\w+)?")


class Section(BaseModel):
    """A section of the settings. Unknown keys are refused, and values cannot be changed."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


def _number_or_auto(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    try:
        found = validate(value)
    except ValidationError:
        found = None
    if found == "auto" or (isinstance(found, int) and found > 0):
        return found
    raise ValueError("use 1 or more, or auto")


def _unset(value: object) -> object:
    return None if value == "auto" else value


Unset = BeforeValidator(_unset)
"""Turns `auto` into None. Then the value is derived from other settings (`asyncrl.config.derived`).
"""


class ModelConfig(Section):
    path: str
    """Hugging Face checkpoint directory with config, safetensors files and tokenizer, for learner
    and generators. Or the name of a model on the hub (`owner/name`), which is fetched once per
    node. `{runs_root}` in it is replaced."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub. Default: the main branch when the run starts."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the generators' weights and of published versions."""

    @property
    def on_hub(self) -> bool:
        """Whether `path` names a model on the hub."""
        return is_hub_name(self.path)


class Source(Section):
    """A source of rows: a file, several files, a folder or a dataset on the hub."""

    path: str
    """Parquet or JSONL file, glob (`/data/*.parquet`), folder, or name of a dataset on the hub
    (`owner/name`). The files of a glob or folder are read in the order of their names."""
    split: str | None = None
    """Split of a folder or of a dataset on the hub. Default: the only split of a folder; `train` on
    the hub."""
    subset: str | None = None
    """Subset (configuration) of a folder or of a dataset on the hub. Default: the only one, or its
    README.md's default."""
    revision: str | None = None
    """Branch, tag or commit of a dataset on the hub. Default: the main branch when the run starts.
    """
    weight: float | None = Field(default=None, gt=0)
    """Share of prompts from this source, relative to the other weights. Only for data.train, and
    for all sources or none. Default: each row appears once per epoch."""
    prompt_column: str | None = None
    """Column with the prompts of this source. Default: data.prompt_column."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the source in metrics and in the column `source_name`. Default: taken from its path.
    """

    @property
    def on_hub(self) -> bool:
        """Whether `path` names a dataset on the hub."""
        return is_hub_data(self.path)

    @property
    def label(self) -> str:
        """Name of the source: `name`, else the end of its path."""
        if self.name is not None:
            return self.name
        place = HUB_CACHE.fullmatch(self.path)
        path = Path(self.path)
        plain = path.parent if re.search(r"[*?[]", path.name) else path
        last = place["name"] if place else plain.name.split(".")[0]
        parts = [re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-._") or "data"]
        parts += [part for part in (self.subset, self.split) if part]
        return ".".join(parts)[:64]


def _as_sources(value: object) -> object:
    """A single path stays as it is. Anything else becomes a tuple of sources."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return value[0]  # the command line gives a single path as a list
    if isinstance(value, dict | Source):
        value = [value]
    if isinstance(value, list | tuple):
        return tuple({"path": item} if isinstance(item, str) else item for item in value)
    return value


def _source_tag(value: object) -> str:
    return "(sources)" if isinstance(value, tuple) else "(path)"


Sources = Annotated[
    Annotated[str, Tag("(path)")] | Annotated[tuple[Source, ...], Tag("(sources)")],
    Discriminator(_source_tag),
    BeforeValidator(_as_sources),
]


def sources_of(value: str | tuple[Source, ...]) -> tuple[Source, ...]:
    """The sources of a setting. A string is the path of a single source."""
    return (Source(path=value),) if isinstance(value, str) else value


class DataConfig(Section):
    train: Sources
    """Training prompts: a path, or a list of sources to mix. A path may be whatever `path` of a
    source may be. A source is a mapping with path, split, subset, revision, weight, prompt_column
    and name."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages ({role, content})."""
    apply_chat_template: bool = False
    """Render each string prompt as one user message with the tokenizer's chat template. Lists of
    messages are always rendered."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as `enable_thinking: false`. Variables that the template
    does not use are refused."""
    system_prompt: str | None = Field(default=None, min_length=1)
    """System message to add before every chat. Refused if a chat already has a system message, or
    if the template ignores system messages."""
    tools: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    """JSON schemas of the functions that the chat template lists in every prompt. A prompt with its
    own tools (tools_column) lists only those."""
    tools_column: str | None = None
    """Column with each prompt's tools: a list of JSON schemas, or that list as JSON text. A null or
    empty value means the schemas in `tools`."""
    max_prompt_length: int = Field(default=512, gt=0)
    """Longest prompt, in tokens."""
    prompt_policy: Literal["truncate", "drop", "error"] = "error"
    """What happens to a longer prompt. `truncate`: remove tokens from its start. `drop`: leave the
    row out and count it. `error`: refuse the run before anything is allocated."""
    max_length: int | None = Field(default=None, gt=1)
    """Longest prompt plus completion, in tokens. Generation stops there at the latest. None =
    max_prompt_length + max_completion_length."""
    length_policy: Literal["truncate", "drop", "error"] = "error"
    """What happens to rows of warm_start.data above max_length, and to prompts that leave no room
    for a completion. `truncate`: cut to max_length. `drop`: leave the row out and count it.
    `error`: refuse the run."""
    length_side: Literal["keep_start", "keep_end"] = "keep_start"
    """Which tokens remain when length_policy truncates. `keep_start`: the first ones, so the
    completion loses its end. `keep_end`: the last ones, so the prompt loses its start. A row
    without any completion token or prompt token is left out and counted."""
    unused_keys: Literal["error", "drop"] = "error"
    """What happens to a key or a part of a chat that does not reach the text, such as an image or a
    key that the chat template does not write. `error`: refuse the run. `drop`: leave it out and
    count it."""
    shuffle: bool = True
    """Shuffle each epoch, seeded by (seed, epoch). False keeps the order of the files; weighted
    sources then take turns."""


class KeptTokens(TypedDict):
    """The sampling limits of a generation request."""

    top_p: float
    top_k: int
    min_p: float


class RolloutConfig(Section):
    rollout_batch_size: int = Field(default=16, gt=0)
    """Groups per round."""
    n_samples_per_prompt: int = Field(default=8, gt=0)
    """Trajectories per group. 1 is only possible with advantage: remax, reinforce_plus_plus or gae,
    which do not compare the trajectories of a group."""
    num_steps_per_rollout: int = Field(default=1, gt=0)
    """Optimizer steps per round. Must divide rollout_batch_size."""
    global_batch_size: int | None = Field(default=None, gt=0)
    """Trajectories per step. Optional: if set, it must equal rollout_batch_size *
    n_samples_per_prompt / num_steps_per_rollout."""
    max_completion_length: int = Field(gt=0)
    """Longest completion, in tokens (data.max_length may end it earlier). Required, because a model
    may never emit a stop token."""
    temperature: float = Field(default=1.0, ge=0.01)
    """Sampling temperature. Generator and learner both compute log-probs at this temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most probable tokens whose probabilities add up to this value. 1 = from all.
    Below 1, the generator renormalizes its log-probs over the kept tokens, and the learner does
    not. So it is only allowed for objectives that never compare the two: no ratio, correction or
    KL."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many most probable tokens. 0 = from all. Otherwise, the same restriction as
    for top_p applies."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Sample from tokens whose probability is at least this fraction of the highest one. 0 = from
    all. Otherwise, the same restriction as for top_p applies."""
    rollout_stop: list[str] = []
    """Additional strings that end a completion, beyond EOS and the chat end token. Special tokens
    and strings of any length are allowed. The tokens of the stop string stay in the completion and
    are trained on. The text that rewards receive ends before the stop string."""
    rollout_stop_token_ids: list[int] = []
    """Additional stop token ids. Their text stays in what rewards receive."""
    ignore_eos: bool = False
    """Continue past EOS until max_completion_length (for measurements)."""
    repetition_stop: int | None = Field(default=None, ge=2)
    """End a rollout's completion after an n-gram has appeared this many times in a row. It counts
    as truncated (finish reason `repetition`). Runs of a single token count too (dashes, spaces), so
    20 or more is usual. None = never."""
    repetition_ngram: int = Field(default=16, gt=0)
    """Longest n-gram that repetition_stop checks, in tokens."""
    adaptive_concurrency: bool = True
    """Adapt the number of concurrent groups to the engines' KV caches during the run, up to
    max_concurrency. False: always max_concurrency."""
    max_concurrency: int | None = Field(default=None, gt=0)
    """Most groups to generate at once. Default: as many as the staleness budget admits."""
    num_workers: int = Field(default=1, gt=0)
    """Rollout worker processes."""
    deadline_s: Annotated[float | None, Unset] = Field(default=None, gt=0)
    """Seconds after which the generation of a group fails, retries included. Default: derived from
    the longest completion and the number of concurrent completions. Each evaluation set derives its
    own from its longest completion. `asyncrl plan` shows the value."""
    max_errors: int = Field(default=100, ge=0)
    """Unexpected exceptions allowed in an attempt, counted over groups and evaluation completions.
    Each counts as failed, and metrics.jsonl keeps its stack trace. One more ends the run."""

    @property
    def kept_tokens(self) -> KeptTokens:
        """top_p, top_k and min_p."""
        return {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}

    @property
    def cuts_distribution(self) -> bool:
        """Whether rollouts sample from only some of the tokens."""
        return (self.top_p, self.top_k, self.min_p) != (1.0, 0, 0.0)

    @property
    def repetition(self) -> tuple[int, int] | None:
        """(Longest n-gram in tokens, repetitions in a row) that end a completion; None = never."""
        return (
            None if self.repetition_stop is None else (self.repetition_ngram, self.repetition_stop)
        )

    @property
    def stops_repetition(self) -> bool:
        """Whether a repeated n-gram ends a completion."""
        return self.repetition_stop is not None


class RewardFunction(Section):
    function: str = Field(pattern=FUNCTION)
    """`package.module:function`, importable in a new process."""
    weight: float = 1.0
    """Weight in the reward. 0 = only reported."""
    per_token: bool = False
    """The function returns one reward per completion token of each trajectory. With advantage: gae,
    each token gets its own reward. Every other advantage uses their sum as the trajectory's reward.
    """
    arguments: dict[str, Any] = {}
    """Keyword arguments for every call, in addition to those that asyncrl passes. They are saved
    and shown with the config, so do not put secrets here."""

    @property
    def compares_completions(self) -> bool:
        """Whether this is the built-in reward that compares a group's completions."""
        return self.function in (
            "asyncrl.rewards.builtin:pairwise_judge",
            "asyncrl.rewards.pairwise:pairwise_judge",
        )

    @property
    def runs_code(self) -> bool:
        """Whether this is the built-in reward that runs code written by the model."""
        return self.function in (
            "asyncrl.rewards.builtin:code_tests",
            "asyncrl.rewards.code:code_tests",
        )


class SandboxConfig(Section):
    level: Literal["landlock", "namespaces", "container"] | None = None
    """Minimum isolation for code that the model wrote. docs/how_to/sandbox.md compares the levels.
    None = model-written code is never run."""
    service: str | None = Field(default=None, pattern=r"^https?://[^/]+/?$")
    """URL of a sandbox service that runs all code, such as http://127.0.0.1:8700. None = each
    reward process runs code on its own machine."""
    python: str | None = Field(default=None, pattern="^/")
    """Absolute path of the Python interpreter for programs. Default: the interpreter that runs
    asyncrl, without the packages of its environment."""
    paths: list[Annotated[str, Field(pattern="^/")]] = []
    """Absolute paths of folders that programs may read and import from, in addition to the
    system's."""
    wall_s: float = Field(default=10.0, gt=0)
    """Wall-clock seconds for the tests of one completion."""
    cpu_s: float = Field(default=10.0, gt=0)
    """CPU seconds for the tests of one completion."""
    memory_bytes: int = Field(default=1 << 30, gt=0)
    """Address space of one process, and total memory of all processes of one completion, in bytes.
    """
    processes: int = Field(default=32, gt=0)
    """Processes and threads of one completion at the same time."""
    disk_bytes: int = Field(default=64 << 20, gt=0)
    """Bytes that a program may write to its folder."""
    output_bytes: int = Field(default=1 << 20, gt=0)
    """Bytes that a program may print."""

    @property
    def runs_code(self) -> bool:
        """Whether there is a sandbox."""
        return self.level is not None

    @property
    def is_local(self) -> bool:
        """Whether there is a sandbox and it is on this machine."""
        return self.runs_code and self.service is None


class RewardConfig(Section):
    functions: dict[Annotated[str, Field(pattern=ENTRY_NAME)], RewardFunction] = Field(min_length=1)
    """Name (without '/') → function. The reward is the weighted sum of all functions. Each value is
    also recorded as a reward part."""
    deadline_s: float = Field(default=30.0, gt=0)
    """Seconds that one function may take for one group. After that, its process is killed and
    `policy` applies."""
    policy: Literal["fail", "drop_group", "retry"] = "fail"
    """What happens when a reward raises, hangs or breaks its contract. `fail`: end the run.
    `drop_group`: drop the group. `retry`: try `retries` more times, then drop the group."""
    retries: int = Field(default=2, ge=0)
    """Additional tries with `policy: retry`."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Tokens before a completion's limit in which its length is penalized (DAPO's soft overlong
    penalty). The penalty rises linearly from 0 to overlong_penalty. The limit is
    max_completion_length, or what data.max_length leaves of it. 0 = no penalty."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """Reward that a completion loses when it reaches its limit."""
    tasks: int = Field(default=1, gt=0)
    """Scoring tasks, each with its own reward processes. Ray spreads them over the nodes by
    num_cpus and num_gpus."""
    processes: int = Field(default=2, gt=0)
    """Reward processes per scoring task, and for evaluation. A slow group blocks only its own
    process."""
    num_cpus: float = Field(default=TASK_CPUS, ge=0)
    """Logical CPUs that one scoring task declares to Ray, its reward processes included."""
    num_gpus: float = Field(default=0.0, ge=0)
    """GPUs that one scoring task declares to Ray and shares among its reward processes. If there is
    an evaluation, its reward processes take the same number again."""
    concurrency: int = Field(default=1, gt=0)
    """Groups that one reward process scores at once. Async functions share one event loop. Above 1,
    plain functions run in one thread per group, so they must be thread-safe."""
    memory_bytes: int = Field(default=4 << 30, gt=0)
    """Private memory that one reward process may use, in bytes (RLIMIT_DATA on Linux). A reward
    that needs more fails, before the machine runs out of memory."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where rewards run code that the model wrote (`asyncrl.rewards.code`)."""
    shuffle: bool = False
    """Control experiment: permute the rewards over each step's batch, so the model has nothing to
    learn. Improvements of such a run do not come from the rewards."""

    @property
    def per_token(self) -> bool:
        """Whether any function rewards each token."""
        return any(reward.per_token for reward in self.functions.values())

    @property
    def penalizes_length(self) -> bool:
        """Whether the soft overlong penalty applies."""
        return self.overlong_buffer > 0


class AgentConfig(Section):
    """An agent that runs as it is, and talks to its session at a URL. It is an environment, and the
    section `environment` has its limits."""

    command: list[str] | None = Field(default=None, min_length=1)
    """A program and its arguments, run once for each session. `{NAME}` in them is the column NAME
    of the task; `{prompt}` is its prompt. The program gets OPENAI_BASE_URL, OPENAI_API_KEY,
    ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, and not the secrets of this process. Its standard
    output reaches reward functions as `session_output`."""
    function: str | None = Field(default=None, pattern=FUNCTION)
    """`package.module:name` instead of a program: a function of a task and the model, async or not.
    `model.base_url` and `model.api_key` are those of its session."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""
    variables: dict[str, str] = {}
    """Further environment variables of the program. They are saved and shown with the config, so do
    not put secrets here."""
    stdin: Literal["prompt", "task", "none"] | None = None
    """What the program can read from its standard input: the prompt's text, the task as JSON, or
    nothing. None = the prompt, unless an argument has `{prompt}`: some programs add what they read
    to their arguments."""


SessionEnd: TypeAlias = Literal[
    "done", "length", "turns", "deadline", "agent_error", "env_error", "reward_error", "closed"
]


class EnvironmentConfig(Section):
    """Sessions: each trajectory is one try of an environment at a prompt, with many turns of
    the model."""

    function: str = Field(pattern=FUNCTION)
    """`package.module:name`, importable in a new process: an async function of a task and the
    model, or a class with reset and step. docs/how_to/environments.md has both."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function, or of the class, for every session. They are saved and
    shown with the config, so do not put secrets here."""
    max_turns: int = Field(default=16, gt=0)
    """Most turns of one session."""
    deadline_s: float = Field(default=300.0, gt=0)
    """Seconds of one session from its start in a process, the model's and the environment's
    together: its tools count, and so does what other sessions block."""
    turn_s: float | None = Field(default=None, gt=0)
    """Seconds of one turn of the model. A session with a longer one ends with `deadline`. None =
    only deadline_s counts."""
    tool_s: float | None = Field(default=None, gt=0)
    """Seconds from an answer to the session's next request, or to its end: its tools, its own code
    and its scoring. It leaves out what other sessions block. A session that takes longer ends with
    `deadline`. None = only deadline_s counts."""
    train_ends: list[SessionEnd] = [
        "done",
        "length",
        "turns",
    ]
    """Sessions with these ends are trained. Others are masked, and their reward counts nowhere.
    `length`: the context is full. `turns`, `deadline`: a limit. `agent_error`: the agent failed.
    `env_error`: the environment raised, blocked its process or ended it. `reward_error`: it gave no
    valid reward. `closed`: the run ended the session."""
    url: bool = False
    """Serve each session at a URL of its own on loopback, for agents that speak HTTP. The section
    `agent` sets it."""
    history: Literal["verbatim", "template"] = "verbatim"
    """What a turn continues from. `verbatim`: the tokens that were sampled before it. `template`:
    the same, but only where the chat template would write the same tokens. A template that strips
    earlier reasoning does not, and each turn is then a row of its own."""
    processes: int = Field(default=2, gt=0)
    """Environment processes of each rollout worker."""
    concurrency: int = Field(default=64, gt=0)
    """Sessions that one environment process runs at once."""
    block_s: float = Field(default=10.0, ge=1.0)
    """Seconds that the code of one session may run without an await. Then its process is killed:
    this session ends with env_error, and the others of the process begin again."""
    memory_bytes: int = Field(default=4 << 30, gt=0)
    """Private memory that one environment process may use, in bytes (RLIMIT_DATA on Linux)."""


class GeneratorConfig(Section):
    attach: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of a standing Serve application (serve_configs/) whose generators the run uses
    exclusively until it ends. None = the run starts its own."""
    num_replicas: int = Field(default=1, gt=0)
    """Serve replicas, each with one vLLM engine."""
    tensor_parallel_size: int = Field(default=1, gt=0)
    """Devices of one engine, which split every layer between them. On CPU these are worker
    processes. Must divide the model's attention heads and intermediate size, and divide or be a
    multiple of its key-value heads."""
    pipeline_parallel_size: int = Field(default=1, gt=0)
    """Parts of an engine's layers, each on devices of its own. An engine has
    tensor_parallel_size * pipeline_parallel_size devices."""
    nnodes: int = Field(default=1, gt=0)
    """Nodes that the devices of one engine are spread over, the same number on each. A replica then
    has a process on every one of its nodes, and listens on their addresses."""
    expert_parallel: bool = False
    """Give each device of an engine whole experts of a mixture-of-experts model, instead of a part
    of every expert. On GPUs only: vLLM's kernels for CPUs end the worker."""
    min_replicas: int | None = Field(default=None, gt=0)
    """Smallest number of replicas that an attempt may start with, if no more fit after
    `placement_timeout_s`. The batch stays the same, so fewer replicas only take longer. None = all
    `num_replicas`."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device that the engines run on."""
    num_cpus: float = Field(default=0.4, ge=0)
    """Logical CPUs that one replica declares to Ray, on each of its nodes."""
    num_threads: int = Field(default=1, gt=0)
    """Torch threads of each worker process of an engine on CPU. Small models gain nothing from
    more."""
    max_num_seqs: Annotated[int | None, Unset] = Field(default=None, gt=0)
    """Sequences that one engine runs at once. Default: derived from the run's concurrent
    completions, the replicas and the device. For standing generators, the most that suits the
    device."""
    kv_cache_memory_bytes: int = Field(default=256 << 20, gt=0)
    """KV cache of one engine on CPU, in bytes, over all its worker processes."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Fraction of the GPU memory that one engine uses (device: cuda). Default with `placement:
    share`: 0.35; with `placement: colocate`, in the generators' turn: 0.85."""
    in_flight: Literal["keep", "recompute", "drain"] = "recompute"
    """How generations in flight at a weight update continue. `keep`: with the old KV cache.
    `recompute`: after recomputing the KV cache. `drain`: they finish before the update."""
    start_timeout_s: Annotated[float | None, Unset] = Field(default=None, gt=0)
    """Seconds from a replica's placement to its first answer. Default: derived from the size of the
    model files."""
    stall_timeout_s: Annotated[float | None, Unset] = Field(default=None, gt=0)
    """Seconds without any answer from an engine or its process before the replica is replaced. An
    engine answers between its steps. So set more than its longest step, and more than a weight
    update. Default: derived from the size of the model files."""

    @property
    def own(self) -> bool:
        """Whether the run starts its own generators."""
        return self.attach is None

    @property
    def splits_layers(self) -> bool:
        """Whether several devices share each layer."""
        return self.tensor_parallel_size > 1

    @property
    def workers(self) -> int:
        """Devices of one engine, each with a worker process."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def workers_per_node(self) -> int:
        """Devices of one engine on each of its nodes."""
        return self.workers // self.nnodes

    @property
    def least_replicas(self) -> int:
        """Replicas that an attempt needs in order to start."""
        return self.min_replicas or self.num_replicas

    @property
    def replicas_text(self) -> str:
        """The number of replicas, or its range, for people."""
        return (
            f"{self.num_replicas}"
            if self.least_replicas == self.num_replicas
            else f"{self.least_replicas} to {self.num_replicas}"
        )


LOGPROB_BYTES = {"cpu": 224 << 20, "cuda": 1 << 30}
"""Device → default size of a chunk of logits, in bytes."""


class LearnerConfig(Section):
    world_size: int = Field(default=1, gt=0)
    """ZeRO-3 ranks. Parameters, gradients and optimizer states are sharded over all of them.
    world_size / sequence_parallel_size of them process different rows."""
    sequence_parallel_size: int = Field(default=1, gt=0)
    """Neighboring ranks that split the tokens of each packed row (DeepSpeed Ulysses). A trajectory
    may then be this many times as long. Must divide world_size and the model's attention heads."""
    zero_hpz_partition_size: int = Field(default=1, gt=0)
    """Neighboring ranks, often those of a node, that keep a second copy of the weights between
    them. The backward pass then gathers layers from these ranks only (ZeRO++ hpZ,
    arXiv:2306.10209). Must divide world_size and be below it. 1 = no second copy."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the ranks, with gloo on cpu and nccl on cuda."""
    gpu_memory_utilization: float = Field(default=1.0, gt=0, le=1)
    """Largest fraction of a GPU's memory that PyTorch may allocate in one rank (device: cuda).
    Default with `placement: share`: 0.5."""
    num_cpus: float = Field(default=0.4, ge=0)
    """Logical CPUs that one rank declares to Ray."""
    num_threads: Annotated[int | Literal["auto"], WrapValidator(_number_or_auto)] = 1
    """Torch threads per rank. `auto`: the rank also uses cores of which other processes use little,
    if it measures that they make it faster. It chooses between micro-batches. The order of sums
    then differs between runs, so results agree only to rounding. A reference policy has one thread.
    Needs device: cpu and world_size: 1."""
    bf16: bool = False
    """Train in bfloat16 with float32 master weights."""
    cast_lm_head_to_fp32: bool = False
    """With bf16, compute the logits in float32 from the bf16 hidden states and head. bfloat16
    rounds a logit of 8 by up to 0.03. Needs a float32 copy of the head and a slower product."""
    logprob_memory_bytes: Annotated[int | None, Unset] = Field(default=None, gt=0)
    """Memory for one chunk of logits and the values computed from it, in bytes. A chunk has at
    least one token. Default: 224 MiB on cpu, 1 GiB on cuda."""
    max_tokens_per_gpu: int = Field(default=4096, gt=0)
    """Most tokens of a micro-batch on one rank, prompts and completions together. Micro-batches are
    always filled dynamically."""
    packing: Literal["rows", "none"] | None = None
    """`rows`: many trajectories share a packed row, which is fastest. `none`: one trajectory per
    forward pass, with the model's own attention, for models whose layers would mix packed
    trajectories. Default: rows where the model allows it. `asyncrl plan` shows the choice and the
    reason."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward pass and recompute everything else. Saves
    memory and takes about a third more time."""
    offload_optimizer: Literal["none", "cpu"] = "none"
    """Where the float32 master weights, AdamW moments and gradients are stored and the optimizer
    step runs. `none`: with the model. `cpu`: in host memory. With device: cpu it works but saves
    nothing."""
    offload_param: Literal["none", "cpu"] = "none"
    """Where each rank keeps its shard of the weights when not in use. Needs offload_optimizer: cpu,
    because the optimizer states are at least six times as large."""
    ds3_gather_for_generation: bool = False
    """TRL's switch to gather the whole model on every rank for generation. Only false is supported.
    """
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW, or plain SGD without momentum. SGD is for comparisons, because it does not amplify
    rounding errors."""
    learning_rate: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""
    value_learning_rate: float | None = Field(default=None, ge=0)
    """Peak learning rate of the value head (advantage: gae), with the schedule of learning_rate. A
    new head usually needs 10 to 100 times the policy's rate. Default: learning_rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Applied steps in which the learning rate rises linearly from 0."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to 0 at max_steps."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay, or SGD's L2 penalty. It does not apply to norms, biases and
    the decay rates of recurrent layers."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Clip the gradient to this L2 norm."""
    call_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds in which every rank must answer a call: a start, step, version, save or load. Ranks
    that do not answer count as dead: they are ended, and a new attempt starts (`max_restarts`).
    Collectives wait a minute longer, so that the driver decides."""
    max_skipped_steps: int = Field(default=3, gt=0)
    """Consecutive skipped steps (NaN or Inf) after which the run ends."""
    find_nonfinite: bool = False
    """After a skipped step, find the responsible trajectory by bisection. Costs about as much as
    the step."""
    grad_norm_spike: float = Field(default=10.0, gt=1)
    """Save the batch of a step whose gradient norm is above this many times the median of the last
    32 steps."""

    @field_validator("ds3_gather_for_generation")
    @classmethod
    def model_is_never_gathered(cls, gather: bool) -> bool:
        if gather:
            raise ValueError(
                "generators receive weights in buckets of weights.bucket_bytes, so no rank gathers"
                " the whole model; set it to false, or leave it out"
            )
        return gather

    @model_validator(mode="after")
    def second_copies_are_sharded(self) -> LearnerConfig:
        ranks, size = self.world_size, self.zero_hpz_partition_size
        if size > 1 and (ranks % size or size == ranks):
            raise ValueError(
                f"zero_hpz_partition_size = {size} must divide world_size = {ranks} and be below"
                " it; use 1 to keep no second copy"
            )
        return self

    @model_validator(mode="after")
    def threads_are_of_one_rank(self) -> LearnerConfig:
        if self.num_threads == "auto" and (self.device != "cpu" or self.world_size > 1):
            raise ValueError(
                "num_threads = 'auto' needs device: cpu and world_size: 1; use a number of threads"
            )
        return self

    @property
    def least_threads(self) -> int:
        """Torch threads that every rank has at all times."""
        return 1 if self.num_threads == "auto" else self.num_threads

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks, or groups of ranks, that process different rows."""
        return self.world_size // self.sequence_parallel_size

    @property
    def logprob_bytes(self) -> int:
        """Memory of one chunk of logits, in bytes."""
        return self.logprob_memory_bytes or LOGPROB_BYTES[self.device]

    @property
    def max_tokens_per_row(self) -> int:
        """Most tokens of one micro-batch, over all ranks that share it."""
        return self.max_tokens_per_gpu * self.sequence_parallel_size


class CorrectionConfig(Section):
    """Correction for tokens that another policy sampled, in addition to the loss's own ratio.
    Masked tokens still count in every denominator."""

    truncation: Literal["none", "token", "sequence", "geometric"] = "none"
    """Weight each token by min(π_old / π_behavior, cap). `token`: the ratio of the token (TIS).
    `sequence`: the product over the trajectory. `geometric`: the geometric mean over the
    trajectory. Needs an old_policy other than behavior."""
    cap: float = Field(default=2.0, ge=1)
    """Largest truncated weight, and largest ratio in the KL term of the loss."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """Smallest truncated weight. It raises the weight of tokens that the learner now rarely
    samples. 0 = none."""
    normalize: bool = False
    """Divide the truncated weights by their mean over the step's tokens. Costs an additional
    forward pass."""
    mask_below: float | None = Field(default=None, gt=0, lt=1)
    """Mask tokens whose π_learner / π_behavior is below this value (IcePop)."""
    mask_above: float | None = Field(default=None, gt=1)
    """Mask tokens whose π_learner / π_behavior is above this value (IcePop)."""
    reject_above: float | None = Field(default=None, gt=0)
    """Mask tokens or trajectories whose KL estimate is above this value, in nats."""
    reject_estimator: Literal["k1", "k2", "k3"] = "k3"
    """KL estimate: -l, l²/2 or e^l - 1 - l, with l = log π_learner / π_behavior."""
    reject_level: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = "token"
    """Unit of rejection: a single token, or a trajectory by the sum, mean or maximum over its
    tokens."""
    sequence_mask_above: float | None = Field(default=None, gt=0)
    """Mask trajectories with a negative advantage whose mean log π_behavior / π_learner is above
    this value (DeepSeek-V3.2's off-policy sequence mask)."""

    @property
    def truncates(self) -> bool:
        """Whether tokens have truncated weights."""
        return self.truncation != "none"

    @property
    def rejects(self) -> bool:
        """Whether a KL estimate may mask tokens."""
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
    "grpo_batch_std",
    "gdpo",
    "dr_grpo",
    "rloo",
    "remax",
    "opo",
    "maxrl",
    "pass_at_k",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gae",
)
LOSSES = (
    "ppo",
    "clip_cov",
    "kl_cov",
    "gspo",
    "gmpo",
    "vespo",
    "cispo",
    "sapo",
    "dppo",
    "reinforce",
)


def _built_in_or_own(names: tuple[str, ...]) -> AfterValidator:
    def check(name: str) -> str:
        if name in names or re.match(FUNCTION, name):
            return name
        raise ValueError(
            f"use one of {', '.join(names)}, or your own function as package.module:function"
        )

    return AfterValidator(check)


class OnlinePreferenceConfig(Section):
    """Asynchronous online DPO."""

    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """Loss of a pair. `sigmoid`: DPO (arXiv:2305.18290). `ipo`: arXiv:2310.12036, with mean
    log-probs."""
    beta: float = Field(default=0.1, gt=0, le=1000)
    """Strength of the reference: a small beta lets the policy move further from it."""
    pairs: Literal["best_worst", "margin"] = "best_worst"
    """Pairs of a group. `best_worst`: the completion with the highest reward against the one with
    the lowest. `margin`: all pairs, the largest differences first, at most max_pairs."""
    min_margin: float = Field(default=1e-6, gt=0)
    """Smallest difference of the rewards of a pair. Default: rewards only have to differ."""
    max_pairs: int = Field(default=4, gt=0)
    """Most pairs of a group (pairs: margin)."""
    missing_eos_penalty: float = Field(default=0.0, ge=0)
    """Subtract this from the reward of a completion that was cut off, before pairs are chosen. The
    recorded reward stays as it is."""
    weight_cap: float | None = Field(default=2.0, ge=1)
    """Weight each pair by min(π_learner / π_behavior of both completions, weight_cap), for tokens
    that an older version sampled. None = no weight, which max_staleness above 1 refuses unless
    algorithm.allow_uncorrected is set."""
    ce_coef: float = Field(default=0.0, ge=0)
    """Weight of the next-token loss on the chosen sides, a mean over their tokens (RPO,
    arXiv:2404.19733)."""


class DistillationConfig(Section):
    """On-policy distillation: a frozen teacher scores the tokens that the policy sampled."""

    teacher: str = Field(min_length=1)
    """The teacher: a Hugging Face checkpoint directory, a name on the hub, or the base URL of an
    OpenAI-compatible server, such as http://127.0.0.1:8000/v1. A model runs in a process of its
    own, on the learner's device. It must have the model's tokenizer. `{runs_root}` in it is
    replaced."""
    use: Literal["advantage", "top_k", "ref_kl"] = "advantage"
    """`advantage`: each token gets the advantage coef * (log π_teacher - log π_behavior), whose
    expectation is the negative reverse KL divergence. `top_k`: coef * the reverse KL divergence is
    a part of the loss. It is over the sampled token, the teacher's top_k most probable others, and
    the rest as one. `ref_kl`: the teacher is the reference policy of
    algorithm.kl_loss_coef or kl_coef."""
    top_k: int = Field(default=32, gt=0, le=128)
    """Tokens of the teacher at each place, besides the sampled one (use: top_k). Each adds 8 bytes
    per completion token to a group's row."""
    coef: float = Field(default=1.0, gt=0)
    """Weight of the teacher's advantage (use: advantage) or divergence (use: top_k), per nat."""
    reward_weight: float = Field(default=0.0, ge=0)
    """Weight of the rewards' advantage. 0 = rewards are only measured."""
    model: str | None = None
    """Model name in requests to a URL. Default: the first model that the server lists."""
    key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_]\w*$")
    """Environment variable with the URL's API key, set on every node. None = no key is sent."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for one completion at a URL, retries included. After that, it is masked."""
    retries: int = Field(default=2, ge=0)
    """Retries after a server error or a lost connection at a URL."""
    at_once: int = Field(default=32, gt=0)
    """Concurrent requests to a URL."""
    max_failed_groups: int = Field(default=32, gt=0)
    """Groups in a row without any answer of the teacher, after which the run ends."""

    @property
    def is_url(self) -> bool:
        """Whether the teacher is a server, not a model that the run loads."""
        return self.teacher.startswith(("http://", "https://"))

    @property
    def adds_advantage(self) -> bool:
        """Whether each token gets an advantage from the teacher."""
        return self.use == "advantage"

    @property
    def uses_top_k(self) -> bool:
        """Whether the loss has the divergence from the teacher over top_k tokens."""
        return self.use == "top_k"


class AlgorithmConfig(Section):
    advantage: Annotated[str, _built_in_or_own(ADVANTAGES)] = "grpo"
    """`grpo`: (r - mean) / std of the group, with the population std (verl and TRL use the sample
    std). `grpo_batch_std`: (r - mean) / std of the step's rewards (Lite PPO). `gdpo`: `grpo` of
    each reward function, then their weighted sum, normalized over the step's trajectories.
    `dr_grpo`: r - mean. `rloo`: r - mean of the other trajectories. `remax`: r - r of the prompt's
    greedy completion, which the generators make for each group and the learner never trains. `opo`:
    r - mean weighted by length. `maxrl`: (r - mean) / mean. `pass_at_k`: `grpo` of subsets of
    pass_k trajectories; a subset passes if one of them does. `reinforce_plus_plus`: r, normalized
    over the step. `reinforce_plus_plus_baseline`: r - mean, normalized over the step. `gae`: per
    token, from a value head on the learner, normalized over the step. Or your own function, as
    `package.module:function` (docs/how_to/own_algorithm.md)."""
    loss: Annotated[str, _built_in_or_own(LOSSES)] = "ppo"
    """`ppo`: clipped ratio per token. `clip_cov`: `ppo` without some tokens of high covariance.
    `kl_cov`: ratio without a clip, with a penalty on the tokens of highest covariance. `gspo`:
    clipped ratio per trajectory. `gmpo`: geometric mean of clipped ratios. `vespo`: soft weight per
    trajectory. `cispo`: clipped weight. `sapo`: soft gate. `dppo`: mask by probability difference.
    `reinforce`: no ratio. Or your own function, as `package.module:function`."""
    old_policy: Literal["behavior", "learner", "log_linear"] = "behavior"
    """Denominator of the loss's ratio. `behavior`: the policy that sampled. `learner`: the
    learner's policy at the step (the recomputed proximal policy of decoupled PPO). `log_linear`: an
    estimate of the policy one version before. correction.truncation corrects from the behavior
    policy to the other two."""
    loss_aggregation: Literal[
        "token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "fixed"
    ] = "token_mean"
    """`token_mean`: mean over the step's tokens. `sequence_mean_token_sum`: mean over trajectories
    of their token sums. `sequence_mean_token_mean`: mean over trajectories of their token means.
    `fixed`: token sums divided by max_completion_length (Dr. GRPO)."""
    filter_zero_variance: bool = False
    """Leave out groups whose rewards are all equal, and admit new groups instead (DAPO's dynamic
    sampling). With advantage: remax, the baseline's reward is one of them."""
    group_filter: str | None = Field(default=None, pattern=FUNCTION)
    """Your own function, as `package.module:function`, that decides whether a scored group is
    trained. New groups are admitted for those left out."""
    eps_clip: float | None = Field(default=None, gt=0, le=1)
    """Lower clip of the ratio: 1 - eps_clip. Default: 0.2, and 1 (no clip) for cispo. GSPO's ratio
    is a mean over the trajectory, and its paper uses 3e-4 below and 4e-4 above for long
    completions. GMPO clips before its mean, and its paper uses 0.33 below and 0.49 above."""
    eps_clip_high: float = Field(default=0.28, gt=0)
    """Upper clip of the ratio: 1 + eps_clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """For negative advantages, bound PPO's loss by this times the advantage (loss: ppo)."""
    tau_positive: float = Field(default=1.0, gt=0)
    """SAPO's temperature for positive advantages."""
    tau_negative: float = Field(default=1.05, gt=0)
    """SAPO's temperature for negative advantages."""
    dppo_threshold: float = Field(default=0.15, gt=0, lt=1)
    """Largest change of a token's probability in DPPO."""
    vespo_k_positive: float = Field(default=2.0, ge=0)
    """VESPO weights a trajectory by W^k · exp(λ·(1 - W)), with W its product of ratios. This is k
    for advantages of at least 0. The weight is largest at W = k / λ."""
    vespo_lambda_positive: float = Field(default=3.0, gt=0)
    """VESPO's λ for advantages of at least 0. A higher value weights large W less."""
    vespo_k_negative: float = Field(default=3.0, ge=0)
    """VESPO's k for negative advantages. A higher value weights small W less."""
    vespo_lambda_negative: float = Field(default=2.0, gt=0)
    """VESPO's λ for negative advantages."""
    cov_share: float = Field(default=2e-4, gt=0, le=1)
    """Share of the step's tokens that clip_cov and kl_cov select, at least one token. The
    covariance of a token is (log π - mean) · (A - mean), with means over the step. Costs an
    additional forward pass. The paper uses 2e-4, and 2e-3 for kl_cov with a 7B model."""
    clip_cov_low: float = 1.0
    """clip_cov draws its tokens from those with a covariance above this, and stops their gradient.
    """
    clip_cov_high: float = 5.0
    """clip_cov draws its tokens from those with a covariance below this."""
    kl_cov_coef: float = Field(default=1.0, gt=0)
    """Weight of abs(log ratio) in the loss of kl_cov's tokens: those with the highest
    covariances. It has no gradient where the ratio is 1."""
    turn_coef: float = Field(default=0.0, ge=0)
    """Weight of the rewards of turns, which an environment returns as `turns`. A token of turn k
    then has the advantage A + turn_coef * C. A is that of its session. C compares the credit of its
    turn with that of turn k of the group's other sessions, by `advantage` (MT-GRPO). Needs
    advantage: grpo, dr_grpo or rloo. 0 = rewards of turns are only measured."""
    turn_gamma: float = Field(default=0.0, ge=0, le=1)
    """Discount of the rewards of later turns in the credit of a turn: its reward plus turn_gamma
    times the credit of the next turn. 0 = its own reward, 1 = all rewards up to the end. Needs
    turn_coef."""
    pass_k: int = Field(default=4, gt=0)
    """Trajectories of a subset (advantage: pass_at_k). Must be below n_samples_per_prompt."""
    pass_threshold: float = 1.0
    """A trajectory passes if its reward is at least this value (advantage: pass_at_k)."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token (advantage: gae)."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """GAE's lambda: 0 looks one token ahead, 1 looks to the end of the completion (advantage: gae).
    """
    value_coef: float = Field(default=0.5, gt=0)
    """Weight of the value head's squared error in the loss (advantage: gae)."""
    bootstrap_truncated: bool = False
    """Where a completion was cut off, count the value of the state after its last token as the
    reward that would have followed (advantage: gae). Needs one more token in
    learner.max_tokens_per_gpu than the longest trajectory."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Bonus for the entropy of each token's distribution, in units of the loss per nat."""
    ce_coef: float = Field(default=0.0, ge=0)
    """Weight of the next-token loss on the step's completions with a reward of at least
    ce_min_reward, a mean over all their tokens. VAPO uses 0.1 (arXiv:2504.05118)."""
    ce_min_reward: float = 1.0
    """Least reward of a completion in the next-token loss of ce_coef."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Subtract this times the trajectory's KL divergence from the reference policy, summed over its
    trained tokens, from the reward. Needs kl_estimator: k1, the only estimator with the right
    gradient in the reward. Needs advantage: dr_grpo, rloo, opo or reinforce_plus_plus_baseline,
    because dividing by the rewards' std would undo the coefficient. Not with kl_loss_coef or
    filter_zero_variance."""
    kl_loss_coef: float = Field(default=0.0, ge=0)
    """Add this times the KL divergence from the reference policy to the loss, aggregated like the
    loss."""
    kl_estimator: Literal["k1", "k2", "k3", "low_var"] = "k3"
    """With l = log π_ref / π: -l, l²/2, e^l - 1 - l, or the last one capped at 10 (low_var). In the
    loss, each token is weighted by π_learner / π_behavior, at most correction.cap. In the reward
    (kl_coef), only k1."""
    ref_load: str | None = None
    """Reference policy: a Hugging Face checkpoint directory or a name on the hub. Default:
    model.path. `{runs_root}` in it is replaced."""
    ref_update_interval: int | None = Field(default=None, gt=0)
    """Versions between two refreshes of the reference policy. It takes the weights of each version
    that is a multiple of this, and steps wait for it. Not with lora or distillation. None = it
    stays frozen."""
    ref_num_cpus: float = Field(default=0.2, ge=0)
    """Logical CPUs that the reference policy's process declares to Ray."""
    ref_gpu_memory_utilization: float = Field(default=0.1, gt=0, le=1)
    """Largest fraction of a GPU's memory that PyTorch may allocate in the reference policy or the
    teacher, with `placement: share`. In other placements it has a GPU of its own."""
    correction: CorrectionConfig = CorrectionConfig()
    allow_uncorrected: bool = False
    """Allow an uncorrected loss on stale tokens."""
    preference: OnlinePreferenceConfig | None = None
    """Online DPO instead of a policy gradient: pairs of a group's completions
    replace advantages. `preference: {}` takes the defaults. Of the other settings of `algorithm`,
    only ref_load, ref_update_interval, ref_num_cpus, filter_zero_variance, group_filter and
    allow_uncorrected then have an effect. None = policy gradient."""
    distillation: DistillationConfig | None = None
    """On-policy distillation from a teacher, alone or in addition to rewards. Experimental, except
    with `use: top_k`. None = no teacher."""

    @property
    def clip_low(self) -> float:
        """How far below 1 the ratio is clipped."""
        return self.eps_clip if self.eps_clip is not None else 1.0 if self.loss == "cispo" else 0.2

    @property
    def trains_text(self) -> bool:
        """Whether the loss has a next-token component."""
        return self.ce_coef > 0

    @property
    def compares_siblings(self) -> bool:
        """Whether a trajectory's advantage depends on the other trajectories of its group."""
        if self.distillation is not None and not self.distillation.reward_weight:
            return False
        return self.advantage not in ("reinforce_plus_plus", "gae", "remax")

    @property
    def compares_sequences(self) -> bool:
        """Whether the loss of a token may depend on the other tokens of its trajectory."""
        correction = self.correction
        return (
            self.loss in ("gspo", "gmpo", "vespo")
            or self.loss not in LOSSES
            or correction.truncation in ("sequence", "geometric")
            or (correction.rejects and correction.reject_level != "token")
            or correction.sequence_mask_above is not None
        )

    @property
    def needs_whole_groups(self) -> str | None:
        """The setting that compares whole completions of a group, so that none of their tokens can
        be masked; None without."""
        if self.preference is not None:
            return "algorithm.preference"
        return "algorithm.advantage: remax" if self.needs_baseline else None

    @property
    def needs_baseline(self) -> bool:
        """Whether each group needs the prompt's greedy completion."""
        return self.advantage == "remax"

    @property
    def clips(self) -> bool:
        """Whether eps_clip and eps_clip_high apply: the loss clips a ratio, and that ratio is not
        always 1."""
        clipping = ("ppo", "clip_cov", "gspo", "gmpo", "cispo")
        return self.loss in clipping and self.old_policy != "learner"

    @property
    def selects_tokens(self) -> bool:
        """Whether the loss treats tokens of high covariance differently."""
        return self.loss in ("clip_cov", "kl_cov")

    @property
    def rewards_turns(self) -> bool:
        """Whether rewards of turns are part of the advantages."""
        return self.turn_coef > 0

    @property
    def needs_one_advantage(self) -> bool:
        """Whether the loss is defined for one advantage per trajectory only."""
        return self.loss in ("gmpo", "vespo")

    @property
    def caps(self) -> bool:
        """Whether correction.cap applies."""
        return self.correction.truncates or self.kl_loss_coef > 0

    @property
    def has_reference(self) -> bool:
        """Whether a KL term, a preference or distillation needs a frozen policy's log-probs. With
        distillation, that policy is the teacher."""
        if self.preference is not None or self.distillation is not None:
            return True
        return self.kl_coef > 0 or self.kl_loss_coef > 0

    @property
    def loads_reference(self) -> bool:
        """Whether the run loads the frozen policy, instead of asking a server."""
        return self.has_reference and not (self.distillation and self.distillation.is_url)

    @property
    def token_advantages(self) -> str | None:
        """The setting that gives each token its own advantage; None if none does."""
        if self.advantage == "gae":
            return "advantage: gae"
        if self.turn_coef:
            return "turn_coef"
        adds = self.distillation is not None and self.distillation.adds_advantage
        return "distillation.use: advantage" if adds else None

    @property
    def corrected(self) -> bool:
        """Whether every token's gradient includes a function of π_learner / π_behavior."""
        if self.preference is not None:
            return self.preference.weight_cap is not None
        if self.loss == "reinforce" or self.old_policy != "behavior":
            return self.correction.truncation != "none"
        return True

    @property
    def compares_behavior(self) -> str | None:
        """The part of the objective that compares the generator's log-probs with others; None if
        there is none."""
        if self.preference is not None:
            return None if self.preference.weight_cap is None else "preference.weight_cap"
        if self.distillation is not None and self.distillation.adds_advantage:
            return "the teacher's advantage"
        if self.distillation is not None and self.distillation.uses_top_k:
            return "the metric distill/reverse_kl"
        if self.old_policy != "learner":
            return f"the ratio of loss: {self.loss} against old_policy: {self.old_policy}"
        if self.correction.truncation != "none" or self.correction.masks:
            return "the correction"
        return "the KL term" if self.has_reference else None


class StalenessConfig(Section):
    max_staleness: int = Field(default=2, ge=0)
    """Hard bound on staleness, in versions. Older tokens are never trained. 0 = synchronous
    training."""
    on_stale: Literal["wait", "drop", "mask"] = "wait"
    """`wait`: hold batches back until no outstanding group would expire, so no long completion is
    lost. `drop`: abort a group as soon as it can no longer be trained in time. `mask`: train the
    tokens of a group that are fresh enough, and mask its older ones. That is biased: it leaves out
    the first tokens of long completions, and short completions that wait for a long one."""
    over_sampling: int = Field(default=0, ge=0)
    """Groups admitted in addition to those that can be trained in time; the fastest are trained.
    Needs on_stale: drop."""


class WeightsConfig(Section):
    bucket_bytes: int = Field(default=64 << 20, gt=0)
    """Size of one published bucket, in bytes. The largest parameter is the minimum."""
    push_timeout_s: Annotated[float | None, Unset] = Field(default=None, gt=0)
    """Seconds that a version may wait for half of the live replicas, retries included. After that,
    the run ends. With `in_flight: drain`, the clock stops while generations in flight still produce
    tokens. Must be longer than `generator.stall_timeout_s` and a replica's start, so that the
    version waits for a replacement. Default: derived from the size of the model files, and with
    drain from the longest completion."""
    commit_grace_s: Annotated[float | None, Unset] = Field(default=None, ge=0)
    """Seconds that a version waits for all live replicas. After that, half of them are enough, and
    at least one. The other replicas get no requests for this version, and no version waits for
    them, until they have caught up. Default: a fifth of push_timeout_s."""
    logprob_tolerance: float | None = Field(default=None, gt=0)
    """Largest allowed difference between generator and learner log-probs at the same version, in
    nats. In float32 it bounds the maximum (default 1e-4). In bfloat16 it bounds the mean (default
    0.03), because rounding alone moves improbable tokens by tenths."""
    check_every_versions: int = Field(default=20, ge=0)
    """Versions between two comparisons of log-probs on probe prompts. 0 = only at the start."""
    probe_prompts: int = Field(default=32, gt=0)
    """Probe prompts per comparison."""
    probe_tokens: int = Field(default=64, gt=0)
    """Tokens to sample for each probe, limited by the model's context and the learner's token cap.
    """


class EvalSet(Section):
    """One evaluation set: its prompts and its sampling settings."""

    data: Sources | None = None
    """Prompts: a path or sources, as in eval.data. Default: eval.data. `{runs_root}` in a path is
    replaced."""
    n: int = Field(default=1, gt=0)
    """Completions per prompt. Above 1, avg@n and pass@k are reported too, for k = 1, 2, 4, … and n.
    """
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature; 0 = greedy. Default: rollout.temperature."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the most probable tokens whose probabilities add up to this value. 1 = from all.
    Default: rollout.top_p. Evaluation does not train, so every objective allows it. Recorded
    log-probs are normalized over the kept tokens."""
    top_k: int | None = Field(default=None, ge=0)
    """Sample from this many most probable tokens. 0 = from all. Default: rollout.top_k."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Sample from tokens whose probability is at least this fraction of the highest one. 0 = from
    all. Default: rollout.min_p."""
    max_completion_length: int | None = Field(default=None, gt=0)
    """Longest completion, in tokens, regardless of data.max_length. Default: as in rollouts."""
    max_prompts: int | None = Field(default=None, gt=0)
    """Prompts to use, from the start of the file. With several sources, the same number from each
    where possible. Default: eval.max_prompts."""


class EvalConfig(Section):
    data: Sources | None = None
    """Held-out prompts: a path or sources as in data.train, without weights. Rows of several
    sources alternate. They form the sets `greedy` (temperature 0) and `sampled`
    (rollout.temperature). None = no evaluation, unless `sets` is given."""
    sets: dict[str, EvalSet] = {}
    """Name → additional evaluation set. Its metrics are `eval/<name>_...`."""
    every_steps: int = Field(default=0, ge=0)
    """Steps between two evaluations. 0 = only before and after training."""
    max_prompts: int = Field(default=1024, gt=0)
    """Prompts per evaluation, from the start of the file. With several sources, the same number
    from each where possible."""
    accuracy: str | None = None
    """Name of the reward function whose mean is reported as accuracy. Default: the first of
    reward.functions."""
    pass_threshold: float = 1.0
    """A completion passes (pass@k) if that reward is at least this value."""
    in_flight: bool = False
    """Evaluate while versions change: updates continue, and a completion may have tokens of several
    versions. False: every completion uses one version. With several replicas, an evaluation
    reserves one, which keeps its version while training continues with the others. With a single
    replica, updates wait for the evaluation."""

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.data is not None or bool(self.sets)

    @property
    def draws_several(self) -> bool:
        """Whether a set has several completions per prompt."""
        return any(eval_set.n > 1 for eval_set in self.sets.values())


class CheckpointConfig(Section):
    every_steps: int = Field(default=50, ge=0)
    """Applied steps between two checkpoints. 0 = only at the end."""
    keep: int = Field(default=2, gt=0)
    """Number of committed checkpoints to keep."""
    on_stop_s: float = Field(default=120, ge=0)
    """Seconds that a stop (Ctrl-C, SIGTERM, SIGHUP, an interrupted cell) waits for the step in
    progress and its checkpoint. 0 = it does not wait, and steps since the last checkpoint are lost.
    """
    save: str | None = None
    """Directory for checkpoints. Default: `checkpoints/` in the run directory. `{runs_root}` in it
    is replaced."""
    load: str | None = None
    """Run directory (or its checkpoints) to start from if this run has no checkpoint: weights,
    optimizer, versions and data position. `{runs_root}` in it is replaced."""
    ckpt_step: int | None = Field(default=None, ge=0)
    """Step of the checkpoint to start from, instead of the newest. With `load`, it names a step of
    that other run until this run has its own checkpoints. Then, if this run has no such step, its
    newest checkpoint is used."""


class WarmStartConfig(Section):
    """Supervised steps before version 0, until the greedy accuracy on held-out prompts is in a
    window."""

    data: Sources | None = None
    """Prompts as in data.train plus a column of answers: a path or sources, without weights. None =
    no warm start."""
    target_column: str = "answer"
    """Column with the text that should follow the prompt. EOS is appended, or the template's
    end-of-turn token if a chat template renders the prompts."""
    completion_policy: Literal["truncate", "drop", "split", "error"] = "error"
    """What happens to a target that, with its EOS, is longer than rollout.max_completion_length.
    `truncate`: remove tokens from its end, EOS first. `drop`: leave the row out and count it.
    `split`: keep the whole row, however long (data.max_length does not apply either), and let
    packing_strategy cut it into pieces. `error`: refuse the run before anything is allocated.
    Held-out answers must fit in one piece, so `split` refuses longer ones."""
    min_accuracy: float = Field(default=0.40, ge=0, le=1)
    """Lower edge of the accuracy window."""
    max_accuracy: float = Field(default=0.65, ge=0, le=1)
    """Upper edge of the accuracy window. If the accuracy jumps over it, the warm start returns to
    its last check and halves the learning rate."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Learning rate of the supervised steps."""
    batch_size: int = Field(default=256, gt=0)
    """Rows per supervised step."""
    packing_strategy: Literal["bfd", "bfd_split", "wrapped"] = "bfd"
    """How a step's rows are packed into micro-batches of learner.max_tokens_per_gpu tokens. `bfd`:
    rows stay whole. `bfd_split`: longer rows are cut; needs completion_policy: split. `wrapped`:
    rows follow one another and are cut wherever a micro-batch is full. Pieces do not attend to one
    another, and the first token of a piece is not predicted."""
    check_every_steps: int = Field(default=10, gt=0)
    """Supervised steps between two accuracy checks."""
    max_steps: int = Field(default=2000, gt=0)
    """Supervised steps after which the warm start fails."""

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
    """Where metrics go in addition to metrics.jsonl and TensorBoard. Each sink is an optional
    extra: `pip install 'asyncrl[wandb]'`."""
    completions_every: int = Field(default=10, ge=0)
    """Steps between two tables of completions and histograms of rewards in TensorBoard and the
    sinks. 0 = none."""
    stall_s: float = Field(default=300.0, gt=0)
    """Seconds without progress before the run reports which stage hangs, what it waits for, and
    what its workers do. The run continues."""
    project: str = "asyncrl"
    """Project in W&B and trackio, experiment in MLflow. The name of the run there is `name`."""

    @property
    def has_sinks(self) -> bool:
        """Whether any sink is named."""
        return bool(self.sinks)


def is_hub_name(path: str) -> bool:
    """Whether this is `owner/name` of a model on the Hugging Face hub: it has that form, and no
    such path exists here."""
    return HUB_NAME.fullmatch(path) is not None and not Path(path).exists()


def is_hub_data(path: str) -> bool:
    """Whether this is `owner/name` of a dataset on the hub: it passes `is_hub_name` and is not a
    file name."""
    return is_hub_name(path) and not DATA_FILE.fullmatch(path.lower())
