"""Rules between settings. A senseless combination is refused with the reason and a fix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from operator import attrgetter
from typing import TypeAlias

from asyncrl.config.algorithm import AlgorithmConfig, PreferenceTraining
from asyncrl.config.algorithm_rules import check_algorithm
from asyncrl.config.environment_rules import check_environment
from asyncrl.config.placement_rules import check_placement
from asyncrl.config.run_settings import RunSettings
from asyncrl.config.schema import GeneratorConfig, Source
from asyncrl.config.settings import Settings
from asyncrl.contracts.section import Section

HIGHEST_RANK = 512
"""Highest rank of an adapter that vLLM takes."""
SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
OWN_SETS = ("greedy", "sampled")
"""The evaluation sets of eval.data."""
MEASURED = (
    "prompts",
    "accuracy",
    "scored",
    "unscored_ratio",
    "late_ratio",
    "failed_ratio",
    "completion_tokens",
    "truncated_ratio",
)
"""Metrics that every set reports, in addition to its rewards."""
OVER_ALL_SETS = ("failed_ratio", "newest_version")
"""Metrics of a whole evaluation. A set's metric must not have the same name."""

ActsWith: TypeAlias = tuple[tuple[str, str, tuple[object, ...], str], ...]
"""(Setting, another setting, the other's values for which the first has an effect, how the message
describes them)."""
ACTS_IN_EVERY_RUN: ActsWith = (
    ("learner.cast_lm_head_to_fp32", "learner.bf16", (True,), "learner.bf16: true"),
    ("learner.gpu_memory_utilization", "learner.device", ("cuda",), "learner.device: cuda"),
    *(
        (f"learner.{name}", "learner.zero_stage", (3,), "learner.zero_stage: 3")
        for name in ("offload_optimizer", "offload_param", "zero_hpz_partition_size")
    ),
    (
        "learner.offload_param",
        "learner.offload_optimizer",
        ("cpu",),
        "learner.offload_optimizer: cpu",
    ),
    ("model.revision", "model.on_hub", (True,), "the name of a model on the hub in model.path"),
    ("observe.project", "observe.has_sinks", (True,), "observe.sinks"),
)
ACTS_WITH: ActsWith = (
    ("engines.gpu_memory_utilization", "engines.device", ("cuda",), "generator.device: cuda"),
    ("engines.kv_cache_memory_bytes", "engines.device", ("cpu",), "generator.device: cpu"),
    ("engines.num_threads", "engines.device", ("cpu",), "generator.device: cpu"),
    ("engines.expert_parallel", "engines.device", ("cuda",), "generator.device: cuda"),
    (
        "engines.expert_parallel",
        "engines.splits_layers",
        (True,),
        "generator.tensor_parallel_size above 1",
    ),
    ("observe.trained_tokens", "algorithm.preference", (None,), "a policy objective"),
    ("eval.max_prompts", "eval.evaluates", (True,), "eval.data or eval.sets"),
    ("eval.in_flight", "eval.evaluates", (True,), "eval.data or eval.sets"),
    ("eval.in_flight", "placement", ("decoupled", "share"), "placement: decoupled or share"),
    ("eval.pass_threshold", "eval.draws_several", (True,), "a set of eval.sets with n above 1"),
    ("rollout.repetition_stop", "rollout.ignore_eos", (False,), "rollout.ignore_eos: false"),
    (
        "data.length_policy",
        "judges_length",
        (True,),
        "warm_start.data and data.max_length, or a data.max_length of max_prompt_length or less",
    ),
)


def check_rules(config: Settings) -> None:
    """Raise ValueError for the first rule that does not hold."""
    check_sources(
        {
            "data.train": config.data.train,
            "eval.data": config.eval.data,
            "warm_start.data": config.warm_start.data if config.warm_start else None,
        }
        | {f"eval.sets.{name}.data": chosen.data for name, chosen in config.eval.sets.items()}
    )
    check_placement(config)
    check_lora(config)
    check_environment(config)
    _check_batches(config)
    _check_long_completions(config)
    _check_evaluation(config)
    check_algorithm(config)
    check_effects(config, ACTS_WITH)
    check_nodes(config.engines)


def check_nodes(generator: GeneratorConfig) -> None:
    """Check that the nodes of an engine get the same number of devices, and CPUs.

    Raises:
        ValueError: `generator.nnodes` cannot be used as given.
    """
    if generator.workers % generator.nnodes:
        raise ValueError(
            f"generator.nnodes = {generator.nnodes} does not divide tensor_parallel_size *"
            f" pipeline_parallel_size = {generator.workers}, the devices of an engine; use a"
            " divisor"
        )
    if generator.nnodes > 1 and not generator.num_cpus:
        raise ValueError(
            f"generator.num_cpus = 0 does not work with generator.nnodes = {generator.nnodes},"
            " since Ray reserves CPUs on each node of an engine; use 0.1 or more"
        )


def check_sources(settings: Mapping[str, str | tuple[Source, ...] | None]) -> None:
    """Check that all sources of data.train have a weight or none has, and that names are unique.

    Args:
        settings: dotted name of a setting → its value.

    Raises:
        ValueError: a source cannot be used as given.
    """
    for setting, value in settings.items():
        sources = value if isinstance(value, tuple) else ()
        if isinstance(value, tuple) and not value:
            raise ValueError(f"{setting} is an empty list; name a path")
        for number, source in enumerate(sources):
            if source.weight is not None and (setting != "data.train" or len(sources) == 1):
                raise ValueError(
                    f"{setting}.{number}.weight = {source.weight:g} only has an effect with several"
                    " sources in data.train; leave it out"
                )
            if source.revision is not None and not source.on_hub:
                raise ValueError(
                    f"{setting}.{number}.revision = {source.revision!r} only has an effect with a"
                    " dataset on the hub; leave it out"
                )
        weighted = [source for source in sources if source.weight is not None]
        if weighted and len(weighted) < len(sources):
            without = next(source for source in sources if source.weight is None)
            raise ValueError(
                f"{setting}: source {without.label!r} has no weight, and others have one; give all"
                " of them a weight, or none"
            )
        labels = [source.label for source in sources]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(
                f"{setting}: several sources have the name {twice[0]!r}; give each its own name"
            )


def _check_batches(config: Settings) -> None:
    rollout, staleness, generator = config.rollout, config.staleness, config.engines
    if generator.least_replicas > generator.num_replicas:
        raise ValueError(
            f"generator.min_replicas = {generator.min_replicas} is above generator.num_replicas ="
            f" {generator.num_replicas}; lower it, or raise num_replicas"
        )
    if rollout.rollout_batch_size % rollout.num_steps_per_rollout:
        raise ValueError(
            f"rollout.num_steps_per_rollout = {rollout.num_steps_per_rollout} does not divide "
            f"rollout.rollout_batch_size = {rollout.rollout_batch_size}; change one of them"
        )
    if rollout.global_batch_size not in (None, config.global_batch_size):
        raise ValueError(
            f"rollout.global_batch_size = {rollout.global_batch_size}, but rollout_batch_size *"
            f" n_samples_per_prompt / num_steps_per_rollout = {config.global_batch_size}; set that,"
            " or leave it out"
        )
    if staleness.max_staleness < rollout.num_steps_per_rollout - 1:
        raise ValueError(
            f"staleness.max_staleness = {staleness.max_staleness} is too low for"
            f" rollout.num_steps_per_rollout = {rollout.num_steps_per_rollout}: the last step of a"
            f" round trains groups that are {rollout.num_steps_per_rollout - 1} versions old; set"
            f" staleness.max_staleness: {rollout.num_steps_per_rollout - 1}"
        )
    if staleness.masks and config.lora is not None:
        raise ValueError(
            "staleness.on_stale: mask does not work with lora: a completion keeps its adapter, so"
            " all of its tokens have one version; set staleness.on_stale: wait"
        )
    if staleness.masks and generator.in_flight == "drain":
        raise ValueError(
            "staleness.on_stale: mask has no effect with generator.in_flight: drain, where all"
            " tokens of a completion have one version; set generator.in_flight: keep"
        )
    whole = config.algorithm.needs_whole_groups
    if staleness.masks and whole is not None:
        raise ValueError(
            f"staleness.on_stale: mask leaves out single tokens, and {whole} compares whole"
            " completions of a group; set staleness.on_stale: wait"
        )
    if rollout.n_samples_per_prompt == 1 and config.algorithm.compares_siblings:
        raise ValueError(
            f"rollout.n_samples_per_prompt = 1 is too low for {_comparing(config.algorithm)}"
        )


def _comparing(algorithm: AlgorithmConfig) -> str:
    """What compares the trajectories of a group, and the way out."""
    if isinstance(algorithm, PreferenceTraining):
        return "algorithm.preference, which compares the completions of a prompt; set 2 or more"
    return (
        f"algorithm.advantage: {algorithm.advantage.name}, which compares the trajectories of a"
        " group; set 2 or more, or algorithm.advantage: remax, reinforce_plus_plus or gae"
    )


def _check_long_completions(config: Settings) -> None:
    overlong = config.reward.overlong
    if overlong is not None and overlong.buffer > config.rollout.max_completion_length:
        raise ValueError(
            f"reward.overlong.buffer = {overlong.buffer} is above"
            f" rollout.max_completion_length = {config.rollout.max_completion_length}; lower it"
        )
    longest = config.data.max_prompt_length + config.rollout.max_completion_length
    if config.environment is None and (config.data.max_length or 0) > longest:
        raise ValueError(
            f"data.max_length = {config.data.max_length} is above data.max_prompt_length +"
            f" rollout.max_completion_length = {longest}, so it has no effect; lower it, or leave"
            " it out"
        )
    _check_trajectories(config)


def _check_evaluation(config: Settings) -> None:
    if config.warm_start is not None and config.eval.data is None:
        raise ValueError(
            f"warm_start.data = {config.warm_start.data!r} needs eval.data: the accuracy on it ends"
            " the warm start; name a held-out file"
        )
    _check_sandbox(config)
    if config.max_steps == 0 and not config.eval.evaluates:
        raise ValueError(
            "max_steps = 0 only evaluates, and there are no held-out prompts; set eval.data or"
            " eval.sets, or max_steps"
        )
    if config.eval.every_steps and not config.eval.evaluates:
        raise ValueError(
            f"eval.every_steps = {config.eval.every_steps} has nothing to evaluate on; set"
            " eval.data or eval.sets, or leave it out"
        )
    _check_sets(config)
    _check_metric_names(config)
    if config.eval.accuracy is not None and config.eval.accuracy not in config.reward.functions:
        raise ValueError(
            f"eval.accuracy = {config.eval.accuracy!r} is not one of reward.functions"
            f" {sorted(config.reward.functions)}; name one"
        )


def _check_sandbox(config: Settings) -> None:
    """Check that a reward that runs model-written code has a sandbox, with a limit below the
    reward's deadline."""
    sandbox, deadline_s = config.reward.sandbox, config.reward.deadline_s
    for name, reward in config.reward.functions.items():
        if not reward.runs_code:
            continue
        if sandbox is None:
            raise ValueError(
                f"reward.functions.{name}.function = {reward.function!r} runs code that the model"
                " wrote: set reward.sandbox to namespaces or landlock, or to a service"
                " (docs/how_to/sandbox.md)"
            )
        if sandbox.wall_s >= deadline_s:
            raise ValueError(
                f"reward.sandbox.wall_s = {sandbox.wall_s:g} is not below reward.deadline_s ="
                f" {deadline_s:g}; lower wall_s, or raise deadline_s"
            )


def _check_sets(config: Settings) -> None:
    for name, eval_set in config.eval.sets.items():
        field = f"eval.sets.{name}"
        if not SET_NAME.fullmatch(name) or name in OWN_SETS:
            raise ValueError(
                f"{field}: a set's name is 1 to 32 letters, digits, '_' or '-', starting with a"
                f" letter or digit. {' and '.join(OWN_SETS)} are the sets of eval.data; choose"
                " another name"
            )
        if eval_set.data is None and config.eval.data is None:
            raise ValueError(f"{field} has no prompts; set {field}.data, or eval.data")
        cut = [name for name in ("top_p", "top_k", "min_p") if getattr(eval_set, name) is not None]
        if eval_set.temperature == 0 and cut:
            raise ValueError(
                f"{field}.{cut[0]} has no effect at temperature 0, which always takes the most"
                " probable token; leave one of them out"
            )
        if eval_set.temperature == 0 and eval_set.n > 1:
            raise ValueError(
                f"{field}.n = {eval_set.n} at temperature 0 would give the same completion"
                f" {eval_set.n} times; set n: 1, or a temperature above 0"
            )


MEASURED_REWARDS = frozenset({"mean", "std", "min", "p10", "median", "p90", "max"}) | {
    "unscored_ratio",
    "zero_variance_ratio",
}
"""Names of `reward/NAME` that are metrics of the step's rewards."""


def _check_metric_names(config: Settings) -> None:
    """Check that metrics have unique names, or one would overwrite another."""
    for name in config.reward.functions.keys() & MEASURED_REWARDS:
        raise ValueError(
            f"reward.functions.{name}: reward/{name} is a metric of all rewards; choose another"
            " name"
        )
    known = dict.fromkeys(OVER_ALL_SETS, "all sets")
    own = {config.accuracy} & set(MEASURED)
    rewards = [name for name in config.reward.functions if name not in own]
    for set_name, measured in product(config.evaluation_sets, [*MEASURED, *rewards]):
        metric = f"{set_name}_{measured}"
        if metric in known:
            of_reward = measured in config.reward.functions
            named = f"reward.functions.{measured}" if of_reward else f"eval.sets.{set_name}"
            raise ValueError(
                f"{named}: two metrics would have the name eval/{metric} (the other belongs to"
                f" {known[metric]}); choose another name"
            )
        known[metric] = f"set {set_name}"


def _check_trajectories(config: Settings) -> None:
    """Check the longest possible trajectory now, so that it cannot fail in the middle of a run."""
    learner, longest = config.learner, config.longest_trajectory
    if longest > learner.max_tokens_per_row:
        shared = (
            f" * sequence_parallel_size = {learner.max_tokens_per_row}"
            if learner.sequence_parallel_size > 1
            else ""
        )
        raise ValueError(
            f"{config.longest_text} is above learner.max_tokens_per_gpu ="
            f" {learner.max_tokens_per_gpu}{shared}; raise that or learner.sequence_parallel_size,"
            " or set a lower data.max_length"
        )


def check_effects(config: RunSettings, rows: ActsWith) -> None:
    """Refuse a setting that differs from its default and has no effect.

    Raises:
        ValueError: there is such a setting.
    """
    for setting, other, values, how in (*ACTS_IN_EVERY_RUN, *rows):
        section, _, name = setting.rpartition(".")
        owner = attrgetter(section)(config)
        field = type(owner).model_fields.get(name)
        if field is None:  # it is of another alternative
            continue
        value = getattr(owner, name)
        if value != field.default and attrgetter(other)(config) not in values:
            raise ValueError(
                f"{setting.replace('engines.', 'generator.')} = {_shown(value)!r} only has an"
                f" effect with {how}; leave it out, or set that"
            )


def _shown(value: object) -> object:
    """The value for people; of a section, its name or first setting."""
    if not isinstance(value, Section):
        return value
    return getattr(value, next(iter(type(value).model_fields)))


def check_lora(config: Settings) -> None:
    if config.lora is not None and config.lora.use_dora:
        raise ValueError(
            "lora.use_dora: true does not work with generators, since vLLM takes no DoRA adapters;"
            " leave it out, or use it in asyncrl sft, dpo or reward_model"
        )
    if config.lora is not None and config.engines.nnodes > 1:
        raise ValueError(
            f"lora does not work with generator.nnodes = {config.engines.nnodes}, since vLLM"
            " reads an adapter's files on every node; use engines on one node"
        )
    if config.lora is not None and config.lora.r > HIGHEST_RANK:
        raise ValueError(
            f"lora.r = {config.lora.r} is above {HIGHEST_RANK}, the highest rank that vLLM takes;"
            " lower it"
        )
    if config.lora is not None and config.engines.in_flight in ("keep", "drain"):
        raise ValueError(
            f"generator.in_flight = {config.engines.in_flight!r} only has an effect with lora:"
            " null, since a completion keeps its adapter; leave it out, or set that"
        )
