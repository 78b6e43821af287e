"""Rules between settings. A senseless combination is refused with the reason and a fix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import attrgetter

from asyncrl.config.derived import push_timeout_s, stall_timeout_s
from asyncrl.config.distillation_rules import check_distillation
from asyncrl.config.environment_rules import check_environment, check_turn_rewards
from asyncrl.config.placement_rules import check_placement
from asyncrl.config.preference_rules import check_preference
from asyncrl.config.schema import GeneratorConfig, Source
from asyncrl.config.settings import Settings

__all__ = ["check_nodes", "check_rules", "check_sources"]

WARM_START = (
    "target_column",
    "completion_policy",
    "packing_strategy",
    "min_accuracy",
    "max_accuracy",
    "learning_rate",
    "batch_size",
    "check_every_steps",
    "max_steps",
)
"""Settings of a warm start, except its data."""

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

ACTS_WITH: tuple[tuple[str, str, tuple[object, ...], str], ...] = (
    (
        "algorithm.eps_clip",
        "algorithm.clips",
        (True,),
        "algorithm.loss: ppo, clip_cov, gspo, gmpo or cispo and an old_policy other than learner",
    ),
    (
        "algorithm.eps_clip_high",
        "algorithm.clips",
        (True,),
        "algorithm.loss: ppo, clip_cov, gspo, gmpo or cispo and an old_policy other than learner",
    ),
    (
        "algorithm.correction.cap",
        "algorithm.caps",
        (True,),
        "algorithm.correction.truncation or kl_loss_coef",
    ),
    (
        "algorithm.correction.floor",
        "algorithm.correction.truncates",
        (True,),
        "algorithm.correction.truncation",
    ),
    *(
        (f"algorithm.vespo_{name}", "algorithm.loss", ("vespo",), "algorithm.loss: vespo")
        for name in ("k_positive", "lambda_positive", "k_negative", "lambda_negative")
    ),
    (
        "algorithm.cov_share",
        "algorithm.selects_tokens",
        (True,),
        "algorithm.loss: clip_cov or kl_cov",
    ),
    ("algorithm.clip_cov_low", "algorithm.loss", ("clip_cov",), "algorithm.loss: clip_cov"),
    ("algorithm.clip_cov_high", "algorithm.loss", ("clip_cov",), "algorithm.loss: clip_cov"),
    ("algorithm.kl_cov_coef", "algorithm.loss", ("kl_cov",), "algorithm.loss: kl_cov"),
    ("algorithm.pass_k", "algorithm.advantage", ("pass_at_k",), "algorithm.advantage: pass_at_k"),
    (
        "algorithm.pass_threshold",
        "algorithm.advantage",
        ("pass_at_k",),
        "algorithm.advantage: pass_at_k",
    ),
    ("algorithm.ce_min_reward", "algorithm.trains_text", (True,), "algorithm.ce_coef above 0"),
    ("algorithm.bootstrap_truncated", "algorithm.advantage", ("gae",), "algorithm.advantage: gae"),
    ("algorithm.tau_positive", "algorithm.loss", ("sapo",), "algorithm.loss: sapo"),
    ("algorithm.tau_negative", "algorithm.loss", ("sapo",), "algorithm.loss: sapo"),
    ("algorithm.dppo_threshold", "algorithm.loss", ("dppo",), "algorithm.loss: dppo"),
    ("algorithm.allow_uncorrected", "algorithm.corrected", (False,), "an uncorrected loss"),
    ("algorithm.gamma", "algorithm.advantage", ("gae",), "algorithm.advantage: gae"),
    ("algorithm.turn_gamma", "algorithm.rewards_turns", (True,), "algorithm.turn_coef above 0"),
    ("algorithm.gae_lambda", "algorithm.advantage", ("gae",), "algorithm.advantage: gae"),
    ("algorithm.value_coef", "algorithm.advantage", ("gae",), "algorithm.advantage: gae"),
    ("learner.value_learning_rate", "algorithm.advantage", ("gae",), "algorithm.advantage: gae"),
    (
        "algorithm.kl_estimator",
        "algorithm.has_reference",
        (True,),
        "algorithm.kl_coef or kl_loss_coef above 0",
    ),
    (
        "algorithm.ref_update_interval",
        "algorithm.has_reference",
        (True,),
        "algorithm.preference, or kl_coef or kl_loss_coef above 0",
    ),
    (
        "algorithm.ref_num_cpus",
        "algorithm.has_reference",
        (True,),
        "algorithm.kl_coef or kl_loss_coef above 0",
    ),
    (
        "algorithm.correction.reject_estimator",
        "algorithm.correction.rejects",
        (True,),
        "algorithm.correction.reject_above",
    ),
    (
        "algorithm.correction.reject_level",
        "algorithm.correction.rejects",
        (True,),
        "algorithm.correction.reject_above",
    ),
    ("learner.cast_lm_head_to_fp32", "learner.bf16", (True,), "learner.bf16: true"),
    ("learner.adam_betas", "learner.optimizer", ("adamw",), "learner.optimizer: adamw"),
    ("learner.adam_eps", "learner.optimizer", ("adamw",), "learner.optimizer: adamw"),
    *(
        (
            f"generator.{name}",
            "generator.own",
            (True,),
            "generators that the run starts; generator.attach uses generators already configured",
        )
        for name in (
            "num_replicas",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "nnodes",
            "expert_parallel",
            "min_replicas",
            "device",
            "num_cpus",
            "num_threads",
            "max_num_seqs",
            "kv_cache_memory_bytes",
            "gpu_memory_utilization",
            "in_flight",
            "stall_timeout_s",
        )
    ),
    ("generator.in_flight", "lora", (None,), "lora: null, since a completion keeps its adapter"),
    ("generator.gpu_memory_utilization", "generator.device", ("cuda",), "generator.device: cuda"),
    ("learner.gpu_memory_utilization", "learner.device", ("cuda",), "learner.device: cuda"),
    (
        "algorithm.ref_gpu_memory_utilization",
        "shares_gpus",
        (True,),
        "placement: share and learner.device: cuda",
    ),
    (
        "algorithm.ref_gpu_memory_utilization",
        "algorithm.loads_reference",
        (True,),
        "a reference policy or teacher on the cluster",
    ),
    ("generator.kv_cache_memory_bytes", "generator.device", ("cpu",), "generator.device: cpu"),
    ("generator.num_threads", "generator.device", ("cpu",), "generator.device: cpu"),
    ("generator.expert_parallel", "generator.device", ("cuda",), "generator.device: cuda"),
    (
        "generator.expert_parallel",
        "generator.splits_layers",
        (True,),
        "generator.tensor_parallel_size above 1",
    ),
    ("eval.max_prompts", "eval.evaluates", (True,), "eval.data or eval.sets"),
    ("eval.in_flight", "eval.evaluates", (True,), "eval.data or eval.sets"),
    ("eval.in_flight", "placement", ("decoupled", "share"), "placement: decoupled or share"),
    ("eval.pass_threshold", "eval.draws_several", (True,), "a set of eval.sets with n above 1"),
    ("model.revision", "model.on_hub", (True,), "the name of a model on the hub in model.path"),
    ("observe.project", "observe.has_sinks", (True,), "observe.sinks"),
    (
        "reward.overlong_penalty",
        "reward.penalizes_length",
        (True,),
        "reward.overlong_buffer above 0",
    ),
    *(
        (f"reward.sandbox.{name}", "reward.sandbox.runs_code", (True,), "reward.sandbox.level")
        for name in (
            "service",
            "wall_s",
            "cpu_s",
            "memory_bytes",
            "processes",
            "disk_bytes",
            "output_bytes",
        )
    ),
    *(
        (
            f"reward.sandbox.{name}",
            "reward.sandbox.is_local",
            (True,),
            "reward.sandbox.level and no reward.sandbox.service",
        )
        for name in ("python", "paths")
    ),
    ("reward.retries", "reward.policy", ("retry",), "reward.policy: retry"),
    ("rollout.repetition_ngram", "rollout.stops_repetition", (True,), "rollout.repetition_stop"),
    ("rollout.repetition_stop", "rollout.ignore_eos", (False,), "rollout.ignore_eos: false"),
    (
        "data.length_policy",
        "judges_length",
        (True,),
        "warm_start.data and data.max_length, or a data.max_length of max_prompt_length or less",
    ),
    ("data.length_side", "data.length_policy", ("truncate",), "data.length_policy: truncate"),
    *(
        (f"warm_start.{name}", "warm_start.given", (True,), "warm_start.data")
        for name in WARM_START
    ),
    (
        "learner.offload_param",
        "learner.offload_optimizer",
        ("cpu",),
        "learner.offload_optimizer: cpu",
    ),
)
"""(Setting, another setting, the other's values for which the first has an effect, how the message
describes them)."""


def check_rules(config: Settings) -> None:
    """Raise ValueError for the first rule that does not hold."""
    check_sources(
        {
            "data.train": config.data.train,
            "eval.data": config.eval.data,
            "warm_start.data": config.warm_start.data,
        }
        | {f"eval.sets.{name}.data": chosen.data for name, chosen in config.eval.sets.items()}
    )
    check_preference(config)
    check_placement(config)
    check_lora(config)
    check_distillation(config)
    check_environment(config)
    check_turn_rewards(config)
    _check_batches(config)
    _check_lengths_and_timeouts(config)
    _check_evaluation(config)
    _check_old_policy(config)
    _check_dual_clip(config)
    _check_loss(config)
    _check_advantage(config)
    _check_pass_at_k(config)
    _check_gdpo(config)
    _check_correction(config)
    _check_kl(config)
    _check_kept_tokens(config)
    _check_effects(config)
    check_nodes(config.generator)


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
    rollout, staleness, generator = config.rollout, config.staleness, config.generator
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
    if staleness.over_sampling and staleness.on_stale != "drop":
        raise ValueError(
            f"staleness.over_sampling = {staleness.over_sampling} needs staleness.on_stale: drop;"
            f" with `{staleness.on_stale}`, set over_sampling: 0"
        )
    if staleness.on_stale == "mask" and config.lora is not None:
        raise ValueError(
            "staleness.on_stale: mask does not work with lora: a completion keeps its adapter, so"
            " all of its tokens have one version; set staleness.on_stale: wait"
        )
    if staleness.on_stale == "mask" and generator.in_flight == "drain":
        raise ValueError(
            "staleness.on_stale: mask has no effect with generator.in_flight: drain, where all"
            " tokens of a completion have one version; set generator.in_flight: keep"
        )
    whole = config.algorithm.needs_whole_groups
    if staleness.on_stale == "mask" and whole is not None:
        raise ValueError(
            f"staleness.on_stale: mask leaves out single tokens, and {whole} compares whole"
            " completions of a group; set staleness.on_stale: wait"
        )
    if rollout.n_samples_per_prompt == 1 and config.algorithm.compares_siblings:
        raise ValueError(
            "rollout.n_samples_per_prompt = 1 is too low for algorithm.advantage:"
            f" {config.algorithm.advantage}, which compares the trajectories of a group; set 2 or"
            " more, or algorithm.advantage: remax, reinforce_plus_plus or gae"
        )


def _check_lengths_and_timeouts(config: Settings) -> None:
    alone = config.environment is None
    if (
        alone
        and config.data.max_length is not None
        and config.data.max_length
        > (longest := config.data.max_prompt_length + config.rollout.max_completion_length)
    ):
        raise ValueError(
            f"data.max_length = {config.data.max_length} is above data.max_prompt_length +"
            f" rollout.max_completion_length = {longest}, so it has no effect; lower it, or leave"
            " it out"
        )
    if config.generator.own and push_timeout_s(config) <= stall_timeout_s(config):
        raise ValueError(
            f"weights.push_timeout_s = {push_timeout_s(config):g} is not above"
            f" generator.stall_timeout_s = {stall_timeout_s(config):g}: a stalled generator would"
            " end the run before it is replaced; raise push_timeout_s, or lower stall_timeout_s"
        )
    _check_trajectories(config)
    _check_bootstrap(config)
    _check_packing(config)


def _check_evaluation(config: Settings) -> None:
    if config.warm_start.data is not None and config.eval.data is None:
        raise ValueError(
            f"warm_start.data = {config.warm_start.data!r} needs eval.data: the accuracy on it ends"
            " the warm start; name a held-out file"
        )
    _check_sandbox(config)
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
        if sandbox.level is None:
            raise ValueError(
                f"reward.functions.{name}.function = {reward.function!r} runs code that the model"
                " wrote: set reward.sandbox.level to namespaces, landlock or container"
                " (docs/how_to/sandbox.md)"
            )
        if sandbox.wall_s >= deadline_s:
            raise ValueError(
                f"reward.sandbox.wall_s = {sandbox.wall_s:g} is not below reward.deadline_s ="
                f" {deadline_s:g}; lower wall_s, or raise deadline_s"
            )
    if sandbox.level == "container" and sandbox.service is None:
        raise ValueError(
            "reward.sandbox.level = 'container' needs an external service; set"
            " reward.sandbox.service, or use namespaces or landlock"
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
        if eval_set.temperature == 0 and (
            cut := [
                name for name in ("top_p", "top_k", "min_p") if getattr(eval_set, name) is not None
            ]
        ):
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
    for set_name in [*(OWN_SETS if config.eval.data is not None else ()), *config.eval.sets]:
        for measured in [
            *MEASURED,
            *(
                name
                for name in config.reward.functions
                if name != config.accuracy or name not in MEASURED
            ),
        ]:
            metric = f"{set_name}_{measured}"
            if metric in known:
                reward = (
                    f"reward.functions.{measured}"
                    if measured in config.reward.functions
                    else f"eval.sets.{set_name}"
                )
                raise ValueError(
                    f"{reward}: two metrics would have the name eval/{metric} (the other belongs to"
                    f" {known[metric]}); choose another name"
                )
            known[metric] = f"set {set_name}"


def _check_packing(config: Settings) -> None:
    """Check that packing cuts longer rows if there are any, and only then."""
    warm_start = config.warm_start
    if warm_start.packing_strategy == "bfd_split" and not warm_start.splits:
        raise ValueError(
            "warm_start.packing_strategy = 'bfd_split' has nothing to cut with completion_policy:"
            f" {warm_start.completion_policy}, since every row then fits in"
            " learner.max_tokens_per_gpu; set warm_start.completion_policy: split, or"
            " packing_strategy: bfd"
        )
    if warm_start.splits and warm_start.packing_strategy == "bfd":
        raise ValueError(
            "warm_start.completion_policy = 'split' needs a strategy that cuts; set"
            " warm_start.packing_strategy: bfd_split or wrapped"
        )


def _check_trajectories(config: Settings) -> None:
    """Check the longest possible trajectory now, so that it cannot fail in the middle of a run."""
    learner, longest = config.learner, config.longest_trajectory
    if learner.world_size % learner.sequence_parallel_size:
        raise ValueError(
            f"learner.sequence_parallel_size = {learner.sequence_parallel_size} does not divide"
            f" learner.world_size = {learner.world_size}; change one of them"
        )
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
    if config.algorithm.loads_reference and longest > learner.max_tokens_per_gpu:
        way = (
            "lower data.max_length"
            if config.algorithm.distillation is not None
            else "set algorithm.kl_coef and kl_loss_coef to 0"
        )
        raise ValueError(
            f"{config.longest_text} is above learner.max_tokens_per_gpu ="
            f" {learner.max_tokens_per_gpu}, and the reference policy cannot split a row over"
            f" ranks; raise that, or {way}"
        )


def _check_bootstrap(config: Settings) -> None:
    """Check that the longest trajectory leaves room for the token whose value follows it."""
    longest, room = config.longest_trajectory, config.learner.max_tokens_per_row
    if config.algorithm.bootstrap_truncated and longest >= room:
        raise ValueError(
            "algorithm.bootstrap_truncated: true needs one token more than the longest trajectory:"
            f" {config.longest_text} leaves none of learner.max_tokens_per_gpu *"
            f" sequence_parallel_size = {room}; raise max_tokens_per_gpu"
        )


def _check_effects(config: Settings) -> None:
    """Refuse a setting that differs from its default and has no effect."""
    for setting, other, values, how in ACTS_WITH:
        section, _, name = setting.rpartition(".")
        owner = attrgetter(section)(config)
        value = getattr(owner, name)
        if (
            value != type(owner).model_fields[name].default
            and attrgetter(other)(config) not in values
        ):
            raise ValueError(
                f"{setting} = {value!r} only has an effect with {how}; leave it out, or set that"
            )


def _check_kept_tokens(config: Settings) -> None:
    """Refuse to compare log-probs over the kept tokens with log-probs over all tokens."""
    compares = config.algorithm.compares_behavior
    for name, value in config.rollout.kept_tokens.items():
        if compares is not None and value != type(config.rollout).model_fields[name].default:
            raise ValueError(
                f"rollout.{name} = {value:g} renormalizes the generator's log-probs over the kept"
                f" tokens, and {compares} compares them with the learner's. Leave it out, or set"
                " algorithm.loss: reinforce and old_policy: learner, without correction and KL"
            )


def _check_old_policy(config: Settings) -> None:
    algorithm = config.algorithm
    if algorithm.correction.truncation != "none" and algorithm.old_policy == "behavior":
        raise ValueError(
            f"algorithm.correction.truncation = {algorithm.correction.truncation!r} with"
            " algorithm.old_policy: behavior would count the behavior policy twice; set"
            " algorithm.old_policy: learner, or correction.truncation: none"
        )
    if algorithm.correction.normalize and algorithm.correction.truncation == "none":
        raise ValueError(
            "algorithm.correction.normalize: true has no weights to divide; set"
            " correction.truncation: token, sequence or geometric, or leave it out"
        )
    if algorithm.loss in ("reinforce", "dppo", "vespo") and algorithm.old_policy != (
        wanted := "learner" if algorithm.loss == "reinforce" else "behavior"
    ):
        raise ValueError(
            f"algorithm.loss = {algorithm.loss!r} is defined for algorithm.old_policy: {wanted},"
            f" not {algorithm.old_policy}; set old_policy: {wanted}"
        )
    if algorithm.loss == "kl_cov" and algorithm.old_policy == "learner":
        raise ValueError(
            "algorithm.loss = 'kl_cov' with algorithm.old_policy: learner always has a ratio of 1,"
            " so its penalty is 0; set algorithm.old_policy: behavior, or algorithm.loss: clip_cov"
        )
    if algorithm.loss in ("gspo", "gmpo", "cispo", "sapo") and algorithm.old_policy == "learner":
        raise ValueError(
            f"algorithm.loss = {algorithm.loss!r} with algorithm.old_policy: learner always has a"
            " ratio of 1, so it equals REINFORCE; set algorithm.old_policy: behavior, or"
            " algorithm.loss: reinforce"
        )


def _check_dual_clip(config: Settings) -> None:
    algorithm = config.algorithm
    if algorithm.dual_clip is not None and (
        algorithm.loss != "ppo" or algorithm.old_policy == "learner"
    ):
        raise ValueError(
            f"algorithm.dual_clip = {algorithm.dual_clip:g} only has an effect with loss: ppo and"
            " an old_policy other than learner; leave it out"
        )
    if algorithm.dual_clip is not None and algorithm.dual_clip <= 1 + algorithm.eps_clip_high:
        raise ValueError(
            f"algorithm.dual_clip = {algorithm.dual_clip:g} is not above the upper clip, 1 +"
            f" eps_clip_high = {1 + algorithm.eps_clip_high:g}; raise it (3 is usual)"
        )


def _check_loss(config: Settings) -> None:
    algorithm = config.algorithm
    if algorithm.needs_one_advantage and algorithm.advantage == "gae":
        raise ValueError(
            f"algorithm.loss = {algorithm.loss!r} needs one advantage per trajectory, and"
            " advantage: gae has one per token; set algorithm.loss: ppo, or another advantage"
        )
    if algorithm.clip_cov_low >= algorithm.clip_cov_high:
        raise ValueError(
            f"algorithm.clip_cov_low = {algorithm.clip_cov_low:g} is not below"
            f" algorithm.clip_cov_high = {algorithm.clip_cov_high:g}, so no token can be selected;"
            " lower it"
        )


def _check_pass_at_k(config: Settings) -> None:
    algorithm, samples = config.algorithm, config.rollout.n_samples_per_prompt
    if algorithm.advantage != "pass_at_k":
        return
    if algorithm.pass_k >= samples:
        raise ValueError(
            f"algorithm.pass_k = {algorithm.pass_k} is not below rollout.n_samples_per_prompt ="
            f" {samples}. Then a group has only one subset, with an advantage of 0; lower it"
        )
    if config.reward.overlong_buffer or algorithm.kl_coef:
        raise ValueError(
            "algorithm.advantage: pass_at_k compares the reward with pass_threshold."
            f" reward.overlong_buffer = {config.reward.overlong_buffer} and kl_coef ="
            f" {algorithm.kl_coef:g} lower it; set both to 0, or use kl_loss_coef"
        )


def _check_gdpo(config: Settings) -> None:
    algorithm = config.algorithm
    if algorithm.advantage != "gdpo":
        return
    if config.reward.overlong_buffer or algorithm.kl_coef:
        raise ValueError(
            "algorithm.advantage: gdpo normalizes the rewards of each function."
            f" reward.overlong_buffer = {config.reward.overlong_buffer} and kl_coef ="
            f" {algorithm.kl_coef:g} belong to none; set both to 0, or use kl_loss_coef and a"
            " reward function for the length"
        )
    if config.reward.shuffle:
        raise ValueError(
            "reward.shuffle: true permutes total rewards, and advantage: gdpo has one for each"
            " function; leave one of them out"
        )


def _check_advantage(config: Settings) -> None:
    algorithm = config.algorithm
    if algorithm.correction.sequence_mask_above is not None and algorithm.advantage == "gae":
        raise ValueError(
            "algorithm.correction.sequence_mask_above needs one advantage per trajectory, and"
            " advantage: gae has one per token; leave it out"
        )
    learns_from_equal = ("reinforce_plus_plus", "gae", "gdpo")
    if algorithm.filter_zero_variance and algorithm.advantage in learns_from_equal:
        raise ValueError(
            f"algorithm.filter_zero_variance drops groups that advantage: {algorithm.advantage}"
            " learns from; leave one of them out"
        )
    if config.reward.shuffle and config.reward.per_token and algorithm.advantage == "gae":
        raise ValueError(
            "reward.shuffle permutes rewards between trajectories, but per_token rewards belong to"
            " specific tokens; leave one of them out, or use an advantage other than gae"
        )
    compares = [
        name
        for name, function in config.reward.functions.items()
        if function.weight and function.compares_completions
    ]
    if algorithm.needs_baseline and compares:
        raise ValueError(
            f"reward.functions: {compares[0]} compares the completions of a group, so the baseline"
            " of algorithm.advantage: remax would depend on the sampled ones; use a reward of"
            " single completions, or advantage: rloo"
        )
    negative = [name for name, function in config.reward.functions.items() if function.weight < 0]
    if algorithm.advantage == "maxrl" and (
        negative or config.reward.overlong_buffer or algorithm.kl_coef
    ):
        raise ValueError(
            "algorithm.advantage: maxrl needs rewards of at least 0. reward.overlong_buffer,"
            f" kl_coef and negative weights ({negative}) can make them negative; leave those out,"
            " or use grpo or rloo"
        )
    if config.reward.overlong_buffer > config.rollout.max_completion_length:
        raise ValueError(
            f"reward.overlong_buffer = {config.reward.overlong_buffer} is above"
            f" rollout.max_completion_length = {config.rollout.max_completion_length}; lower it"
        )


def _check_correction(config: Settings) -> None:
    algorithm = config.algorithm
    if algorithm.preference is not None:
        return  # see check_preference
    if (
        not algorithm.corrected
        and config.staleness.max_staleness > 0
        and not algorithm.allow_uncorrected
    ):
        raise ValueError(
            f"algorithm.loss = {algorithm.loss!r} with old_policy: {algorithm.old_policy} and"
            " correction.truncation: none is uncorrected, and staleness.max_staleness ="
            f" {config.staleness.max_staleness} trains stale tokens; set"
            " algorithm.correction.truncation: token, or algorithm.allow_uncorrected: true"
        )


def check_lora(config: Settings) -> None:
    interval = config.algorithm.ref_update_interval
    if config.lora is not None and interval is not None:
        raise ValueError(
            f"algorithm.ref_update_interval = {interval} does not work with lora, whose versions"
            " are adapters and not whole weights; leave one of them out"
        )
    if config.lora is not None and config.lora.use_dora:
        raise ValueError(
            "lora.use_dora: true does not work with generators, since vLLM takes no DoRA adapters;"
            " leave it out, or use it in asyncrl sft, dpo or reward_model"
        )
    if config.lora is not None and config.generator.nnodes > 1:
        raise ValueError(
            f"lora does not work with generator.nnodes = {config.generator.nnodes}, since vLLM"
            " reads an adapter's files on every node; use engines on one node"
        )
    if config.lora is not None and config.lora.r > HIGHEST_RANK:
        raise ValueError(
            f"lora.r = {config.lora.r} is above {HIGHEST_RANK}, the highest rank that vLLM takes;"
            " lower it"
        )


def _check_kl(config: Settings) -> None:
    """Check that the KL divergence is in one place, the reward or the loss, with a correct
    gradient."""
    algorithm = config.algorithm
    if algorithm.kl_coef and algorithm.kl_loss_coef:
        raise ValueError(
            f"algorithm.kl_coef = {algorithm.kl_coef:g} (in the reward) and algorithm.kl_loss_coef"
            f" = {algorithm.kl_loss_coef:g} (in the loss) add the same term twice; set one of them"
            " to 0"
        )
    if algorithm.kl_coef and algorithm.advantage in ("grpo", "grpo_batch_std"):
        raise ValueError(
            f"algorithm.kl_coef = {algorithm.kl_coef:g} does not work with advantage:"
            f" {algorithm.advantage}. In a group with equal rewards, dividing by their std makes"
            " the KL term's noise as large as a reward; use dr_grpo, rloo or kl_loss_coef"
        )
    if algorithm.kl_coef and algorithm.advantage in ("reinforce_plus_plus", "gae"):
        raise ValueError(
            f"algorithm.kl_coef = {algorithm.kl_coef:g} subtracts one sum from the trajectory's"
            f" reward, and advantage: {algorithm.advantage} needs one KL value per token; use"
            " kl_loss_coef instead"
        )
    if algorithm.kl_coef and algorithm.needs_baseline:
        raise ValueError(
            f"algorithm.kl_coef = {algorithm.kl_coef:g} lowers the reward of each trajectory, and"
            " the baseline of advantage: remax has no log-probs of the reference policy to lower"
            " its own; use kl_loss_coef instead"
        )
    if algorithm.kl_coef and algorithm.filter_zero_variance:
        raise ValueError(
            "algorithm.filter_zero_variance has no effect with kl_coef, which makes all rewards"
            " different; use kl_loss_coef, or leave one of them out"
        )
    if algorithm.ref_load is not None and not algorithm.has_reference:
        raise ValueError(
            f"algorithm.ref_load = {algorithm.ref_load!r} has no effect without a KL term; set"
            " algorithm.kl_coef or kl_loss_coef, or leave it out"
        )
    if (
        algorithm.has_reference
        and algorithm.ref_load is None
        and algorithm.distillation is None
        and config.lora is not None
        and config.lora.load is not None
    ):
        raise ValueError(
            "a KL term with lora.load would pull the policy back to model.path, as it was without"
            " that adapter; name the reference policy in algorithm.ref_load"
        )
    if (
        algorithm.has_reference
        and algorithm.ref_load is None
        and algorithm.distillation is None
        and config.warm_start.data is not None
    ):
        raise ValueError(
            "a KL term with warm_start would pull the policy back to model.path, as it was before"
            " the warm start; name the reference policy in algorithm.ref_load"
        )
    if algorithm.kl_coef and algorithm.kl_estimator != "k1":
        raise ValueError(
            f"algorithm.kl_coef = {algorithm.kl_coef:g} does not work with kl_estimator:"
            f" {algorithm.kl_estimator}. In the reward, only k1 has the gradient of the divergence"
            " (k3's vanishes near the reference); set algorithm.kl_estimator: k1, or use"
            " kl_loss_coef"
        )
