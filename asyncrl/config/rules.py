"""What has to hold between settings: a combination that cannot be meant is refused with its reason
and the way out."""

from __future__ import annotations

import re
from operator import attrgetter
from typing import Any

from asyncrl.config.derived import push_timeout_s, stall_timeout_s
from asyncrl.config.settings import Settings

__all__ = ["check_rules", "length_text"]

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
"""Settings of a warm start besides its data."""

SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
OWN_SETS = ("greedy", "sampled")
"""The evaluation sets that eval.data means."""
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
"""What is reported of every set, beside its rewards."""
OVER_ALL_SETS = ("failed_ratio", "newest_version")
"""Metrics of an evaluation as a whole whose names a set's could have."""

ACTS_WITH: tuple[tuple[str, str, tuple[Any, ...], str], ...] = (
    (
        "algorithm.eps_clip",
        "algorithm.clips",
        (True,),
        "algorithm.loss: ppo, gspo or cispo and an old_policy other than learner",
    ),
    (
        "algorithm.eps_clip_high",
        "algorithm.clips",
        (True,),
        "algorithm.loss: ppo, gspo or cispo and an old_policy other than learner",
    ),
    (
        "algorithm.correction.cap",
        "algorithm.caps",
        (True,),
        "algorithm.correction.truncation or kl_loss_coef",
    ),
    ("algorithm.tau_positive", "algorithm.loss", ("sapo",), "algorithm.loss: sapo"),
    ("algorithm.tau_negative", "algorithm.loss", ("sapo",), "algorithm.loss: sapo"),
    ("algorithm.dppo_threshold", "algorithm.loss", ("dppo",), "algorithm.loss: dppo"),
    ("algorithm.allow_uncorrected", "algorithm.corrected", (False,), "an uncorrected loss"),
    ("algorithm.gamma", "algorithm.advantage", ("gae",), "algorithm.advantage: gae"),
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
            "generators of the run's own; those of generator.attach have their settings already",
        )
        for name in (
            "num_replicas",
            "min_replicas",
            "device",
            "num_cpus",
            "max_num_seqs",
            "kv_cache_memory_bytes",
            "gpu_memory_utilization",
            "in_flight",
            "stall_timeout_s",
        )
    ),
    ("generator.gpu_memory_utilization", "generator.device", ("cuda",), "generator.device: cuda"),
    ("generator.kv_cache_memory_bytes", "generator.device", ("cpu",), "generator.device: cpu"),
    ("eval.max_prompts", "eval.evaluates", (True,), "eval.data or eval.sets"),
    ("eval.in_flight", "eval.evaluates", (True,), "eval.data or eval.sets"),
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
            "reward.sandbox.level and without a service, which has its own",
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
"""A setting, another, the values of that with which the first has an effect, and how to say so."""


def check_rules(config: Settings) -> None:
    """Raise ValueError for the first rule that does not hold."""
    _sources_hold(config)
    _batches_divide(config)
    _lengths_and_timeouts_fit(config)
    _evaluation_holds(config)
    _old_policy_suits_the_loss(config)
    _dual_clip_acts(config)
    _advantage_suits_the_rewards(config)
    _stale_tokens_are_corrected(config)
    _kl_holds(config)
    _kept_tokens_fit(config)
    _everything_acts(config)


def _sources_hold(config: Settings) -> None:
    """Weights are for all sources of data.train or none, and names differ."""
    settings = {
        "data.train": config.data.train,
        "eval.data": config.eval.data,
        "warm_start.data": config.warm_start.data,
    }
    settings |= {f"eval.sets.{name}.data": one.data for name, one in config.eval.sets.items()}
    for setting, value in settings.items():
        sources = value if isinstance(value, tuple) else ()
        if isinstance(value, tuple) and not value:
            raise ValueError(f"{setting} is an empty list; name a path")
        for number, source in enumerate(sources):
            if source.weight is not None and (setting != "data.train" or len(sources) == 1):
                raise ValueError(
                    f"{setting}.{number}.weight = {source.weight:g} acts only with several sources"
                    " in data.train; leave it out"
                )
            if source.revision is not None and not source.on_hub:
                raise ValueError(
                    f"{setting}.{number}.revision = {source.revision!r} acts only with a dataset on"
                    " the hub; leave it out"
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
                f"{setting}: several sources are called {twice[0]!r}; give each a name of its own"
            )


def length_text(config: Settings) -> str:
    """What bounds the longest trajectory, and its tokens."""
    if config.longest_trajectory == config.data.max_length:
        return f"data.max_length = {config.data.max_length}"
    lengths = (
        f"data.max_prompt_length {config.data.max_prompt_length} + rollout.max_completion_length"
        f" {config.rollout.max_completion_length}"
    )
    return f"{lengths} = {config.longest_trajectory}"


def _batches_divide(config: Settings) -> None:
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
            f"staleness.max_staleness = {staleness.max_staleness} cannot hold with"
            f" rollout.num_steps_per_rollout = {rollout.num_steps_per_rollout}: a round's last step"
            f" is {rollout.num_steps_per_rollout - 1} versions behind its generation; set"
            f" staleness.max_staleness: {rollout.num_steps_per_rollout - 1}"
        )
    if staleness.over_sampling and staleness.on_stale == "wait":
        raise ValueError(
            f"staleness.over_sampling = {staleness.over_sampling} needs staleness.on_stale: drop;"
            " under `wait` every group is trained, so leave it at 0"
        )
    if rollout.n_samples_per_prompt == 1 and config.algorithm.compares_siblings:
        raise ValueError(
            f"rollout.n_samples_per_prompt = 1 leaves advantage: {config.algorithm.advantage}"
            " nothing to compare a trajectory with (a group of one has no std, and its own mean):"
            " set 2 or more, or algorithm.advantage: reinforce_plus_plus or gae"
        )


def _lengths_and_timeouts_fit(config: Settings) -> None:
    if config.data.max_length is not None and config.data.max_length > (
        longest := config.data.max_prompt_length + config.rollout.max_completion_length
    ):
        raise ValueError(
            f"data.max_length = {config.data.max_length} is above data.max_prompt_length +"
            f" rollout.max_completion_length = {longest}, so it bounds nothing; lower it, or leave"
            " it out"
        )
    if config.generator.own and push_timeout_s(config) <= stall_timeout_s(config):
        raise ValueError(
            f"weights.push_timeout_s = {push_timeout_s(config):g} is not above"
            f" generator.stall_timeout_s = {stall_timeout_s(config):g}: a generator that stands"
            " still would end the run before it is replaced; raise the first, or lower the second"
        )
    _trajectories_fit(config)
    _pieces_are_cut(config)


def _evaluation_holds(config: Settings) -> None:
    if config.warm_start.data is not None and config.eval.data is None:
        raise ValueError(
            f"warm_start.data = {config.warm_start.data!r} needs eval.data: its accuracy there ends"
            " the warm start; name a held-out file"
        )
    _code_has_a_sandbox(config)
    if config.eval.every_steps and not config.eval.evaluates:
        raise ValueError(
            f"eval.every_steps = {config.eval.every_steps} has nothing to evaluate on; set"
            " eval.data or eval.sets, or leave it out"
        )
    _sets_can_be_evaluated(config)
    _evaluation_metrics_differ(config)
    if config.eval.accuracy is not None and config.eval.accuracy not in config.reward.functions:
        raise ValueError(
            f"eval.accuracy = {config.eval.accuracy!r} is not one of reward.functions"
            f" {sorted(config.reward.functions)}; name one"
        )


def _code_has_a_sandbox(config: Settings) -> None:
    """What runs a model's code has a sandbox, which ends before the reward's deadline."""
    sandbox, deadline_s = config.reward.sandbox, config.reward.deadline_s
    for name, reward in config.reward.functions.items():
        if not reward.runs_code:
            continue
        if sandbox.level is None:
            raise ValueError(
                f"reward.functions.{name}.function = {reward.function!r} runs code that the model"
                " wrote: set reward.sandbox.level to namespaces, landlock or container"
                " (docs/sandbox.md)"
            )
        if sandbox.wall_s >= deadline_s:
            raise ValueError(
                f"reward.sandbox.wall_s = {sandbox.wall_s:g} is not below reward.deadline_s ="
                f" {deadline_s:g}; raise the deadline, or lower it"
            )
    if sandbox.level == "container" and sandbox.service is None:
        raise ValueError(
            "reward.sandbox.level = 'container' is what an outside service gives; set"
            " reward.sandbox.service, or ask for namespaces or landlock"
        )


def _sets_can_be_evaluated(config: Settings) -> None:
    for name, one in config.eval.sets.items():
        field = f"eval.sets.{name}"
        if not SET_NAME.fullmatch(name) or name in OWN_SETS:
            raise ValueError(
                f"{field}: a set's name is 1 to 32 letters, digits, '_' or '-', starting with a"
                f" letter or digit, and not one of eval.data's own sets {', '.join(OWN_SETS)};"
                " choose another"
            )
        if one.data is None and config.eval.data is None:
            raise ValueError(f"{field} has no prompts; set {field}.data, or eval.data")
        if one.temperature == 0 and (
            cut := [name for name in ("top_p", "top_k", "min_p") if getattr(one, name) is not None]
        ):
            raise ValueError(
                f"{field}.{cut[0]} acts on nothing at temperature 0, which takes the most probable"
                " token; leave one of them out"
            )
        if one.temperature == 0 and one.n > 1:
            raise ValueError(
                f"{field}.n = {one.n} at temperature 0 would give the same completion {one.n}"
                " times; set n: 1, or a temperature above 0"
            )


def _evaluation_metrics_differ(config: Settings) -> None:
    """No two metrics of an evaluation have one name: one would hide the other."""
    known = dict.fromkeys(OVER_ALL_SETS, "all sets")
    for one in [*(OWN_SETS if config.eval.data is not None else ()), *config.eval.sets]:
        for measured in [
            *MEASURED,
            *(
                name
                for name in config.reward.functions
                if name != config.accuracy or name not in MEASURED
            ),
        ]:
            metric = f"{one}_{measured}"
            if metric in known:
                reward = (
                    f"reward.functions.{measured}"
                    if measured in config.reward.functions
                    else f"eval.sets.{one}"
                )
                raise ValueError(
                    f"{reward}: two metrics would be called eval/{metric} (the other one is of"
                    f" {known[metric]}); choose another name"
                )
            known[metric] = f"set {one}"


def _pieces_are_cut(config: Settings) -> None:
    """A strategy that cuts longer rows has longer rows to cut, and the other way round."""
    warm_start = config.warm_start
    if warm_start.packing_strategy == "bfd_split" and not warm_start.splits:
        raise ValueError(
            "warm_start.packing_strategy = 'bfd_split' has nothing to cut under completion_policy:"
            f" {warm_start.completion_policy}, as no supervised row is then above"
            " learner.max_tokens_per_gpu; set warm_start.completion_policy: split, or"
            " packing_strategy: bfd"
        )
    if warm_start.splits and warm_start.packing_strategy == "bfd":
        raise ValueError(
            "warm_start.completion_policy = 'split' needs a strategy that cuts; set"
            " warm_start.packing_strategy: bfd_split or wrapped"
        )


def _trajectories_fit(config: Settings) -> None:
    """The longest possible trajectory, found before the run and not in the middle of it."""
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
            f"{length_text(config)} is above learner.max_tokens_per_gpu ="
            f" {learner.max_tokens_per_gpu}{shared}; raise that or learner.sequence_parallel_size,"
            " or set a lower data.max_length"
        )
    if config.algorithm.has_reference and longest > learner.max_tokens_per_gpu:
        raise ValueError(
            f"the reference policy is one process, which shares no rows: {length_text(config)} is"
            f" above its learner.max_tokens_per_gpu = {learner.max_tokens_per_gpu}; raise that, or"
            " set algorithm.kl_coef and kl_loss_coef to 0"
        )


def _everything_acts(config: Settings) -> None:
    """Nothing is set, other than to its default, that has no effect beside the rest."""
    for setting, other, values, how in ACTS_WITH:
        section, _, name = setting.rpartition(".")
        owner = attrgetter(section)(config)
        value = getattr(owner, name)
        if (
            value != type(owner).model_fields[name].default
            and attrgetter(other)(config) not in values
        ):
            raise ValueError(
                f"{setting} = {value!r} acts only with {how}; leave it out, or set that"
            )


def _kept_tokens_fit(config: Settings) -> None:
    """Log-probs over the kept tokens meet none over all of them."""
    compares = config.algorithm.compares_behavior
    for name, value in config.rollout.kept_tokens.items():
        if compares is not None and value != type(config.rollout).model_fields[name].default:
            raise ValueError(
                f"rollout.{name} = {value:g}: the generator's log-probs are then renormalized over"
                f" the kept tokens, the learner's are over all, and {compares} compares the two;"
                " leave it out, or set algorithm.loss: reinforce and old_policy: learner, without"
                " correction and KL"
            )


def _old_policy_suits_the_loss(config: Settings) -> None:
    algorithm = config.algorithm
    if algorithm.correction.truncation != "none" and algorithm.old_policy == "behavior":
        raise ValueError(
            f"algorithm.correction.truncation = {algorithm.correction.truncation!r} would count the"
            " behavior policy twice under algorithm.old_policy: behavior; set"
            " algorithm.old_policy: learner, or correction.truncation: none"
        )
    if algorithm.correction.normalize and algorithm.correction.truncation == "none":
        raise ValueError(
            "algorithm.correction.normalize: true has no weights to divide; set"
            " correction.truncation: token or sequence, or leave it out"
        )
    if algorithm.loss in ("reinforce", "dppo") and algorithm.old_policy != (
        wanted := "learner" if algorithm.loss == "reinforce" else "behavior"
    ):
        raise ValueError(
            f"algorithm.loss = {algorithm.loss!r} is defined for algorithm.old_policy: {wanted},"
            f" not {algorithm.old_policy}; set that"
        )
    if algorithm.loss in ("gspo", "cispo", "sapo") and algorithm.old_policy == "learner":
        raise ValueError(
            f"algorithm.loss = {algorithm.loss!r} with algorithm.old_policy: learner has a ratio of"
            " 1 everywhere, so it would be REINFORCE; set algorithm.old_policy: behavior, or"
            " algorithm.loss: reinforce"
        )


def _dual_clip_acts(config: Settings) -> None:
    algorithm = config.algorithm
    if algorithm.dual_clip is not None and (
        algorithm.loss != "ppo" or algorithm.old_policy == "learner"
    ):
        raise ValueError(
            f"algorithm.dual_clip = {algorithm.dual_clip:g} acts only on loss: ppo with a ratio"
            " other than 1; leave it out"
        )
    if algorithm.dual_clip is not None and algorithm.dual_clip <= 1 + algorithm.eps_clip_high:
        raise ValueError(
            f"algorithm.dual_clip = {algorithm.dual_clip:g} is within the clip itself, 1 +"
            f" eps_clip_high = {1 + algorithm.eps_clip_high:g}; it bounds ratios beyond it: 3 is"
            " usual"
        )


def _advantage_suits_the_rewards(config: Settings) -> None:
    algorithm = config.algorithm
    if algorithm.correction.sequence_mask_above is not None and algorithm.advantage == "gae":
        raise ValueError(
            "algorithm.correction.sequence_mask_above judges a trajectory by its one advantage, and"
            " advantage: gae has one for each token; leave it out"
        )
    if algorithm.filter_zero_variance and algorithm.advantage in ("reinforce_plus_plus", "gae"):
        raise ValueError(
            f"algorithm.filter_zero_variance drops groups that advantage: {algorithm.advantage}"
            " learns from; leave one of them out"
        )
    if config.reward.shuffle and config.reward.per_token and algorithm.advantage == "gae":
        raise ValueError(
            "reward.shuffle permutes rewards between trajectories, and those of a function with"
            " per_token: true belong to the tokens of theirs; leave one of them out, or use another"
            " advantage than gae"
        )
    negative = [name for name, function in config.reward.functions.items() if function.weight < 0]
    if algorithm.advantage == "maxrl" and (
        negative or config.reward.overlong_buffer or algorithm.kl_coef
    ):
        raise ValueError(
            "algorithm.advantage: maxrl is defined for rewards of 0 and above;"
            f" reward.overlong_buffer, kl_coef or a negative weight ({negative}) can make them"
            " negative: leave those out, or use grpo or rloo"
        )
    if config.reward.overlong_buffer > config.rollout.max_completion_length:
        raise ValueError(
            f"reward.overlong_buffer = {config.reward.overlong_buffer} is above"
            f" rollout.max_completion_length = {config.rollout.max_completion_length}; it is a part"
            " of it"
        )


def _stale_tokens_are_corrected(config: Settings) -> None:
    algorithm = config.algorithm
    if (
        not algorithm.corrected
        and config.staleness.max_staleness > 0
        and not algorithm.allow_uncorrected
    ):
        raise ValueError(
            f"algorithm.loss = {algorithm.loss!r} with old_policy: {algorithm.old_policy} and"
            " correction.truncation: none is uncorrected, and staleness.max_staleness ="
            f" {config.staleness.max_staleness} trains stale tokens; set"
            " algorithm.correction.truncation: token, or algorithm.allow_uncorrected: true if you"
            " mean it"
        )


def _kl_holds(config: Settings) -> None:
    """The KL divergence from the reference is in one place, where its gradient is right."""
    algorithm = config.algorithm
    if algorithm.kl_coef and algorithm.kl_loss_coef:
        raise ValueError(
            f"algorithm.kl_coef = {algorithm.kl_coef:g} (in the reward) and algorithm.kl_loss_coef"
            f" = {algorithm.kl_loss_coef:g} (in the loss) are two places for one term; set one of"
            " them to 0"
        )
    if algorithm.kl_coef and algorithm.advantage == "grpo":
        raise ValueError(
            f"algorithm.kl_coef = {algorithm.kl_coef:g} with advantage: grpo: where a group's"
            " rewards are equal, dividing by their std makes the KL term's noise as large as any"
            " reward; use dr_grpo or rloo, or kl_loss_coef in place of kl_coef"
        )
    if algorithm.kl_coef and algorithm.advantage in ("reinforce_plus_plus", "gae"):
        raise ValueError(
            f"algorithm.kl_coef = {algorithm.kl_coef:g} takes the divergence from the trajectory's"
            f" reward as one sum, and advantage: {algorithm.advantage} is defined with each token's"
            " own part; use kl_loss_coef in its place"
        )
    if algorithm.kl_coef and algorithm.filter_zero_variance:
        raise ValueError(
            "algorithm.filter_zero_variance looks at rewards that kl_coef makes all different; use"
            " kl_loss_coef, or leave one of them out"
        )
    if algorithm.ref_load is not None and not algorithm.has_reference:
        raise ValueError(
            f"algorithm.ref_load = {algorithm.ref_load!r} has no KL term to serve; set"
            " algorithm.kl_coef or kl_loss_coef, or leave it out"
        )
    if (
        algorithm.has_reference
        and algorithm.ref_load is None
        and config.warm_start.data is not None
    ):
        raise ValueError(
            "a KL term with warm_start would hold the policy to model.path as it was before the"
            " warm start; name the reference in algorithm.ref_load"
        )
    if algorithm.kl_coef and algorithm.kl_estimator != "k1":
        raise ValueError(
            f"algorithm.kl_coef = {algorithm.kl_coef:g} with kl_estimator:"
            f" {algorithm.kl_estimator}: as a reward only k1 has the gradient of the divergence"
            " (k3's vanishes near the reference); set algorithm.kl_estimator: k1, or use"
            " kl_loss_coef in place of kl_coef"
        )
