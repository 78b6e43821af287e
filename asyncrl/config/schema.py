"""The settings tree: one class per section."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypedDict

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from asyncrl.algorithms.optimizers import AdamW, Optimizer
from asyncrl.algorithms.overlong import Overlong
from asyncrl.algorithms.schedules import Constant, Schedule
from asyncrl.contracts.section import ByKey, ByName, Section, Short, Unset
from asyncrl.runtime.functions import FUNCTION
from asyncrl.runtime.ray.defaults import TASK_CPUS
from asyncrl.runtime.setting_paths import (
    Arguments,
    DataPath,
    LocalPath,
    ModelPath,
    is_hub_data,
    is_hub_name,
)

ENTRY_NAME = r"^[^/]+$"
"""Pattern of a reward function's name. It has no '/', because metric names put one after it."""
HUB_CACHE = re.compile(
    r"(?P<cache>.+)/(?P<kind>models|datasets)--(?P<owner>[^/]+?)--(?P<name>[^/]+)"
    r"/snapshots/(?P<commit>[0-9a-f]{40})"
)
"""Path of one commit of a model or dataset in the hub's cache."""


def _number_or_auto(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    try:
        found = validate(value)
    except ValidationError:
        found = None
    if found == "auto" or (isinstance(found, int) and found > 0):
        return found
    raise ValueError("use 1 or more, or auto")


class ModelConfig(Section):
    path: ModelPath
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

    path: DataPath
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
        match = HUB_CACHE.fullmatch(self.path)
        path = Path(self.path)
        plain = path.parent if re.search(r"[*?[]", path.name) else path
        last = match["name"] if match else plain.name.split(".")[0]
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
    Annotated[DataPath, Tag("(path)")] | Annotated[tuple[Source, ...], Tag("(sources)")],
    Discriminator(_source_tag),
    BeforeValidator(_as_sources),
]


def sources_of(value: str | tuple[Source, ...]) -> tuple[Source, ...]:
    """The sources of a setting. A string is the path of a single source."""
    return (Source(path=value),) if isinstance(value, str) else value


class RefuseLong(Section):
    """Refuse the run."""

    name: Literal["error"] = "error"


class DropLong(Section):
    """Leave the row out and count it."""

    name: Literal["drop"] = "drop"


class CutLong(Section):
    """Cut the row to max_length. A row without any completion token or prompt token is left out and
    counted."""

    name: Literal["truncate"] = "truncate"
    side: Literal["keep_start", "keep_end"] = "keep_start"
    """Which tokens remain. `keep_start`: the first ones, so the completion loses its end.
    `keep_end`: the last ones, so the prompt loses its start."""


LengthPolicy: TypeAlias = Annotated[RefuseLong | DropLong | CutLong, ByName("error")]


def side_of(policy: Section) -> Literal["keep_start", "keep_end"]:
    """Which tokens a policy keeps."""
    return policy.side if isinstance(policy, CutLong) else "keep_start"


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
    chat_template_kwargs: dict[str, Any] = Field(default={})
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
    length_policy: LengthPolicy = RefuseLong()
    """What happens to rows of warm_start.data above max_length, and to prompts that leave no room
    for a completion."""
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


class RepetitionStop(Section):
    """When a completion that repeats itself ends."""

    times: int = Field(ge=2)
    """Times in a row that an n-gram may appear. Runs of a single token count too (dashes, spaces),
    so 20 or more is usual."""
    ngram: int = Field(default=16, gt=0)
    """Longest n-gram, in tokens."""


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
    rollout_stop: list[str] = Field(default=[])
    """Additional strings that end a completion, beyond EOS and the chat end token. Special tokens
    and strings of any length are allowed. The tokens of the stop string stay in the completion and
    are trained on. The text that rewards receive ends before the stop string."""
    rollout_stop_token_ids: list[int] = Field(default=[])
    """Additional stop token ids. Their text stays in what rewards receive."""
    ignore_eos: bool = False
    """Continue past EOS until max_completion_length (for measurements)."""
    repetition_stop: Annotated[RepetitionStop, Short("times")] | None = None
    """End a rollout's completion after an n-gram appeared so many times in a row. Or a mapping
    with times and ngram. It counts as truncated (finish reason `repetition`). None = never."""
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
        stop = self.repetition_stop
        return None if stop is None else (stop.ngram, stop.times)


class RewardFunction(Section):
    function: str = Field(pattern=FUNCTION)
    """`package.module:function`, importable in a new process."""
    weight: float = 1.0
    """Weight in the reward. 0 = only reported."""
    per_token: bool = False
    """The function returns one reward per completion token of each trajectory. With advantage: gae,
    each token gets its own reward. Every other advantage uses their sum as the trajectory's reward.
    """
    arguments: Arguments = Field(default={})
    """Keyword arguments for every call, in addition to those that asyncrl passes. `{runs_root}/` at
    the start of a text is replaced. They are saved and shown with the config, so do not put secrets
    here."""

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


class _Sandbox(Section):
    """Limits of code that the model wrote."""

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


class SandboxService(_Sandbox):
    """A sandbox service that runs all code."""

    KEY: ClassVar[str] = "service"

    service: str = Field(pattern=r"^https?://[^/]+/?$")
    """URL of the service, such as http://127.0.0.1:8700."""
    level: Literal["landlock", "namespaces", "container"]
    """Minimum isolation that the service must have. docs/how_to/sandbox.md compares the levels."""


class LocalSandbox(_Sandbox):
    """Each reward process runs code on its own machine."""

    level: Literal["landlock", "namespaces"]
    """Minimum isolation. docs/how_to/sandbox.md compares the levels."""
    python: str | None = Field(default=None, pattern="^/")
    """Absolute path of the Python interpreter for programs. Default: the interpreter that runs
    asyncrl, without the packages of its environment."""
    paths: list[Annotated[str, Field(pattern="^/")]] = Field(default=[])
    """Absolute paths of folders that programs may read and import from, in addition to the
    system's."""

    @field_validator("level", mode="before")
    @classmethod
    def containers_are_of_a_service(cls, level: object) -> object:
        if level == "container":
            raise ValueError("needs a service; set reward.sandbox.service, or use namespaces")
        return level


SandboxConfig: TypeAlias = Annotated[SandboxService | LocalSandbox, ByKey(), Short("level")]


class FailRun(Section):
    """End the run."""

    name: Literal["fail"] = "fail"
    tries: ClassVar[int] = 1
    """How often a group is scored at most."""


class DropGroup(Section):
    """Drop the group."""

    name: Literal["drop_group"] = "drop_group"
    tries: ClassVar[int] = 1


class Retry(Section):
    """Try again, then drop the group."""

    name: Literal["retry"] = "retry"
    retries: int = Field(default=2, ge=0)
    """Additional tries."""

    @property
    def tries(self) -> int:
        """See `FailRun.tries`."""
        return self.retries + 1


class RewardConfig(Section):
    functions: dict[Annotated[str, Field(pattern=ENTRY_NAME)], RewardFunction] = Field(default={})
    """Name (without '/') → function. The reward is the weighted sum of all functions. Each value is
    also recorded as a reward part. Default with an environment: its own rewards; without one, give
    at least one function."""
    deadline_s: float = Field(default=30.0, gt=0)
    """Seconds that one function may take for one group. After that, its process is killed and
    `policy` applies."""
    policy: Annotated[FailRun | DropGroup | Retry, ByName("fail")] = FailRun()
    """What happens when a reward raises, hangs or breaks its contract."""
    overlong: Annotated[Overlong, Short("buffer")] | None = None
    """A penalty of long completions: its buffer in tokens, or a mapping with buffer and penalty.
    None = none."""
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
    sandbox: SandboxConfig | None = None
    """Where rewards run code that the model wrote (`asyncrl.rewards.code`): a level, or a mapping
    with more settings. None = model-written code is never run."""
    shuffle: bool = False
    """Control experiment: permute the rewards over each step's batch, so the model has nothing to
    learn. Improvements of such a run do not come from the rewards."""

    @property
    def per_token(self) -> bool:
        """Whether any function rewards each token."""
        return any(reward.per_token for reward in self.functions.values())


InFlight: TypeAlias = Literal["keep", "recompute", "drain"]
SessionEnd: TypeAlias = Literal[
    "done", "length", "turns", "deadline", "agent_error", "env_error", "reward_error", "closed"
]

AGENT = "asyncrl.environments.agent:play"
"""Function of the environment that an agent is."""


class EnvironmentConfig(Section):
    """Sessions: each trajectory is one try of an environment at a prompt, with many turns of
    the model."""

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
    train_ends: list[SessionEnd] = Field(default=["done", "length", "turns"])
    """Sessions with these ends are trained. Others are masked, and their reward counts nowhere.
    `length`: the context is full. `turns`, `deadline`: a limit. `agent_error`: the agent failed.
    `env_error`: the environment raised, blocked its process or ended it. `reward_error`: it gave no
    valid reward. `closed`: the run ended the session."""
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

    @property
    def entry(self) -> str:
        """`package.module:name` of what the environment processes import."""
        raise NotImplementedError

    @property
    def entry_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `entry`."""
        raise NotImplementedError

    @property
    def at_url(self) -> bool:
        """Whether each session has a URL of its own, for agents that speak HTTP."""
        return True


class FunctionEnvironment(EnvironmentConfig):
    """An environment in Python."""

    KEY: ClassVar[str] = "function"

    function: str = Field(pattern=FUNCTION)
    """`package.module:name`, importable in a new process: an async function of a task and the
    model, or a class with reset and step. docs/how_to/environments.md has both."""
    arguments: dict[str, Any] = Field(default={})
    """Keyword arguments of the function, or of the class, for every session. They are saved and
    shown with the config, so do not put secrets here."""
    url: bool = False
    """Serve each session at a URL of its own on loopback, for agents that speak HTTP."""

    @property
    def entry(self) -> str:
        return self.function

    @property
    def entry_arguments(self) -> dict[str, Any]:
        return self.arguments

    @property
    def at_url(self) -> bool:
        return self.url


class AgentFunction(EnvironmentConfig):
    """An agent in Python that runs as it is, and talks to its session at a URL."""

    KEY: ClassVar[str] = "agent"

    agent: str = Field(pattern=FUNCTION)
    """`package.module:name`: a function of a task and the model, async or not. `model.base_url` and
    `model.api_key` are those of its session."""
    arguments: dict[str, Any] = Field(default={})
    """Keyword arguments of the function. They are saved and shown with the config, so do not put
    secrets here."""

    @property
    def entry(self) -> str:
        return AGENT

    @property
    def entry_arguments(self) -> dict[str, Any]:
        return {"function": self.agent, "arguments": self.arguments}


class AgentCommand(EnvironmentConfig):
    """A program that runs as it is, and talks to its session at a URL."""

    KEY: ClassVar[str] = "command"

    command: list[str] = Field(min_length=1)
    """A program and its arguments, run once for each session. `{NAME}` in them is the column NAME
    of the task; `{prompt}` is its prompt. The program gets OPENAI_BASE_URL, OPENAI_API_KEY,
    ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, and not the secrets of this process. Its standard
    output reaches reward functions as `session_output`."""
    variables: dict[str, str] = Field(default={})
    """Further environment variables of the program. They are saved and shown with the config, so do
    not put secrets here."""
    stdin: Literal["prompt", "task", "none"] | None = None
    """What the program can read from its standard input: the prompt's text, the task as JSON, or
    nothing. None = the prompt, unless an argument has `{prompt}`: some programs add what they read
    to their arguments."""

    @property
    def entry(self) -> str:
        return AGENT

    @property
    def entry_arguments(self) -> dict[str, Any]:
        return {"command": self.command, "variables": self.variables, "stdin": self.stdin}


Environment: TypeAlias = Annotated[FunctionEnvironment | AgentFunction | AgentCommand, ByKey()]


class GeneratorConfig(Section):
    """Generators that the run starts."""

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
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Fraction of the GPU memory that one engine uses (device: cuda). Default: 0.9; with
    `placement: share` 0.35; with `placement: colocate`, in the generators' shift, 0.85."""
    in_flight: Annotated[InFlight | None, Unset] = None
    """How generations in flight at a weight update continue. `keep`: with the old KV cache.
    `recompute`: after recomputing the KV cache. `drain`: they finish before the update. Default:
    `keep` for engines on GPUs, where a full cache takes long to recompute, else `recompute`; also
    `recompute` with `staleness.max_staleness: 0`, in `placement: colocate`, and for standing
    generators."""
    start_timeout_s: Annotated[float | None, Unset] = Field(default=None, gt=0)
    """Seconds from a replica's placement to its first answer. Default: derived from the size of the
    model files."""
    stall_timeout_s: Annotated[float | None, Unset] = Field(default=None, gt=0)
    """Seconds without any answer from an engine or its process before the replica is replaced. An
    engine answers between its steps. So set more than its longest step, and more than a weight
    update. Default: derived from the size of the model files."""

    @property
    def gpu_share(self) -> float:
        """Fraction of the GPU memory that one engine uses."""
        return 0.9 if self.gpu_memory_utilization is None else self.gpu_memory_utilization

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


class AttachedGenerators(Section):
    """The generators of a standing Serve application, which the run uses exclusively until it
    ends."""

    KEY: ClassVar[str] = "attach"

    attach: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the standing Serve application (serve_configs/)."""
    start_timeout_s: Annotated[float | None, Unset] = Field(default=None, gt=0)
    """Seconds from a replica's placement to its first answer. Default: derived from the size of the
    model files."""

    _engines: GeneratorConfig = PrivateAttr(default_factory=GeneratorConfig)

    @property
    def engines(self) -> GeneratorConfig:
        """The application's own settings, once the run has asked it."""
        return self._engines

    def with_engines(self, engines: GeneratorConfig) -> AttachedGenerators:
        """These settings, with the settings of the attached application."""
        found = self.model_copy()
        found._engines = engines
        return found


ZERO_BUCKET_ELEMENTS = 50_000_000
"""Elements of gradients or weights that ZeRO moves between the ranks at a time."""
LOGPROB_BYTES = {"cpu": 224 << 20, "cuda": 1 << 30}
"""Device → default size of a chunk of logits, in bytes."""


class LearnerConfig(Section):
    world_size: int = Field(default=1, gt=0)
    """Ranks of the learner, over which ZeRO shards what `zero_stage` says.
    world_size / sequence_parallel_size of them process different rows."""
    zero_stage: Literal[1, 2, 3] = 3
    """What ZeRO shards over the ranks. 3: optimizer states, gradients and weights. 2: optimizer
    states and gradients. 1: optimizer states. With 1 and 2, each rank has all weights and gathers
    none, which takes more memory and less time. For offload_optimizer, offload_param and
    zero_hpz_partition_size, use 3; for bf16, 2 or 3. A resume may change it."""
    sequence_parallel_size: int = Field(default=1, gt=0)
    """Neighboring ranks that split the tokens of each packed row (DeepSpeed Ulysses). A trajectory
    may then be this many times as long. Must divide world_size and the model's attention heads."""
    zero_hpz_partition_size: int = Field(default=1, gt=0)
    """Neighboring ranks, often those of a node, that keep a second copy of the weights between
    them. The backward pass then gathers layers from these ranks only (ZeRO++ hpZ,
    arXiv:2306.10209). Must divide world_size and be below it. 1 = no second copy."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the ranks, with gloo on cpu and nccl on cuda."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
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
    optimizer: Optimizer = AdamW()
    """The optimizer. Its state is part of a checkpoint."""
    learning_rate: Annotated[float | None, Unset] = Field(default=None, ge=0)
    """Peak learning rate. Default: 1e-6; 2e-5 for SFT, and 1e-5 for a reward model."""
    schedule: Schedule = Constant()
    """How the learning rate changes over max_steps."""
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
    def the_stage_sums_gradients_in_float32(self) -> LearnerConfig:
        if self.zero_stage == 1 and self.bf16:
            raise ValueError(
                "zero_stage = 1 keeps float32 weights only, not bf16: true; use zero_stage: 2,"
                " or bf16: false"
            )
        return self

    @model_validator(mode="after")
    def rows_are_split_over_equal_groups_of_ranks(self) -> LearnerConfig:
        if self.world_size % self.sequence_parallel_size:
            raise ValueError(
                f"sequence_parallel_size = {self.sequence_parallel_size} does not divide"
                f" learner.world_size = {self.world_size}; change one of them"
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


class Wait(Section):
    """Hold batches back until no outstanding group would expire, so no long completion is lost."""

    name: Literal["wait"] = "wait"


class Drop(Section):
    """Abort a group as soon as it can no longer be trained in time."""

    name: Literal["drop"] = "drop"
    over_sampling: int = Field(default=0, ge=0)
    """Groups admitted in addition to those that can be trained in time; the fastest are trained."""


class Mask(Section):
    """Train the tokens of a group that are fresh enough, and mask its older ones. That is biased:
    it leaves out the first tokens of long completions, and short completions that wait for a long
    one."""

    name: Literal["mask"] = "mask"


class StalenessConfig(Section):
    max_staleness: int = Field(default=2, ge=0)
    """Hard bound on staleness, in versions. Older tokens are never trained. 0 = synchronous
    training, and the default with `placement: colocate`."""
    on_stale: Annotated[Wait | Drop | Mask, ByName("wait")] = Wait()
    """What happens to groups that may become too old."""

    @property
    def over_sampling(self) -> int:
        """Groups admitted in addition to those that can be trained in time."""
        return self.on_stale.over_sampling if isinstance(self.on_stale, Drop) else 0

    @property
    def masks(self) -> bool:
        """Whether tokens beyond `max_staleness` are masked. Otherwise no scored group has any."""
        return isinstance(self.on_stale, Mask)


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
    sets: dict[str, EvalSet] = Field(default={})
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
    save: LocalPath | None = None
    """Directory for checkpoints. Default: `checkpoints/` in the run directory. `{runs_root}` in it
    is replaced."""
    load: LocalPath | None = None
    """Run directory (or its checkpoints) to start from if this run has no checkpoint: weights,
    optimizer, versions and data position. `{runs_root}` in it is replaced."""
    ckpt_step: int | None = Field(default=None, ge=0)
    """Step of the checkpoint to start from, instead of the newest. With `load`, it names a step of
    that other run until this run has its own checkpoints. Then, if this run has no such step, its
    newest checkpoint is used."""


class Bfd(Section):
    """Rows stay whole."""

    name: Literal["bfd"] = "bfd"
    completion_policy: Literal["truncate", "drop", "error"] = "error"
    """What happens to a target that, with its EOS, is longer than rollout.max_completion_length.
    `truncate`: remove tokens from its end, EOS first. `drop`: leave the row out and count it.
    `error`: refuse the run before anything is allocated."""


class BfdSplit(Section):
    """Longer rows are cut. Rows may have any length; data.max_length does not apply either."""

    name: Literal["bfd_split"] = "bfd_split"
    completion_policy: ClassVar[Literal["split"]] = "split"


class Wrapped(Section):
    """Rows follow one another and are cut wherever a micro-batch is full."""

    name: Literal["wrapped"] = "wrapped"
    completion_policy: Literal["truncate", "drop", "split", "error"] = "error"
    """As with `bfd`. `split`: keep the whole row, however long."""


class WarmStartConfig(Section):
    """Supervised steps before version 0, until the greedy accuracy on held-out prompts is in a
    window."""

    data: Sources
    """Prompts as in data.train plus a column of answers: a path or sources, without weights."""
    target_column: str = "answer"
    """Column with the text that should follow the prompt. EOS is appended, or the template's
    end-of-turn token if a chat template renders the prompts."""
    packing_strategy: Annotated[Bfd | BfdSplit | Wrapped, ByName("bfd")] = Bfd()
    """How a step's rows are packed into micro-batches of learner.max_tokens_per_gpu tokens. Pieces
    of cut rows do not attend to one another, and the first token of a piece is not predicted.
    Held-out answers must fit in one piece."""
    min_accuracy: float = Field(default=0.40, ge=0, le=1)
    """Lower edge of the accuracy window."""
    max_accuracy: float = Field(default=0.65, ge=0, le=1)
    """Upper edge of the accuracy window. If the accuracy jumps over it, the warm start returns to
    its last check, and then checks more often or halves the learning rate."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Learning rate of the supervised steps."""
    batch_size: int = Field(default=256, gt=0)
    """Rows per supervised step."""
    check_every_steps: int = Field(default=10, gt=0)
    """Supervised steps between two accuracy checks. Until the accuracy is half of min_accuracy,
    four times as many."""
    max_steps: int = Field(default=2000, gt=0)
    """Supervised steps after which the warm start fails."""

    @property
    def splits(self) -> bool:
        """Whether longer rows stay whole until they are packed."""
        return self.packing_strategy.completion_policy == "split"

    @model_validator(mode="after")
    def the_window_is_not_empty(self) -> WarmStartConfig:
        if self.min_accuracy > self.max_accuracy:
            raise ValueError(
                f"min_accuracy = {self.min_accuracy} is above max_accuracy = {self.max_accuracy};"
                " lower it"
            )
        return self


class ObserveConfig(Section):
    sinks: list[Literal["wandb", "mlflow", "trackio"]] = Field(default=[])
    """Where metrics go in addition to metrics.jsonl and TensorBoard. Each sink is an optional
    extra: `pip install 'asyncrl[wandb]'`."""
    completions_every: int = Field(default=10, ge=0)
    """Steps between two tables of completions and histograms of rewards in TensorBoard and the
    sinks. 0 = none."""
    trained_tokens: bool = True
    """Record what each policy step computed at the tokens that it trained: the learner's log-prob,
    importance weight and advantage, and what was clipped or masked. About 6 bytes a token, in
    `trained/*.parquet`."""
    stall_s: float = Field(default=300.0, gt=0)
    """Seconds without progress before the run reports which stage hangs, what it waits for, and
    what its workers do. The run continues."""
    project: str = "asyncrl"
    """Project in W&B and trackio, experiment in MLflow. The name of the run there is `name`."""

    @property
    def has_sinks(self) -> bool:
        """Whether any sink is named."""
        return bool(self.sinks)
