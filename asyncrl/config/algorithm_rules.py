"""Rules between the section `algorithm` and other sections."""

from __future__ import annotations

from asyncrl.algorithms.advantages.gae import Gae
from asyncrl.algorithms.advantages.gdpo import Gdpo
from asyncrl.algorithms.advantages.pass_at_k import PassAtK
from asyncrl.config.algorithm import PolicyGradient, PreferenceTraining
from asyncrl.config.distillation import TeacherServer
from asyncrl.config.settings import Settings


def check_algorithm(config: Settings) -> None:
    """Raise ValueError for the first rule that does not hold."""
    algorithm = config.algorithm
    if isinstance(algorithm, PolicyGradient):
        _check_rewards(config, algorithm)
        _check_group_size(config, algorithm)
        _check_teacher(config, algorithm)
        _check_turns(config, algorithm)
    _check_reference(config)
    _check_corrected(config, algorithm)
    _check_kept_tokens(config)


def _check_rewards(config: Settings, algorithm: PolicyGradient) -> None:
    """Check the rewards that an advantage takes."""
    reward, advantage = config.reward, algorithm.advantage
    setting = f"algorithm.advantage: {advantage.name}"
    if advantage.no_penalties and reward.overlong is not None:
        raise ValueError(
            f"reward.overlong.buffer = {reward.overlong.buffer} lowers rewards, and {setting}"
            f" {advantage.no_penalties}; leave it out, or use a reward function for the length"
        )
    for name, function in reward.functions.items():
        if advantage.least_reward is not None and function.weight < 0:
            raise ValueError(
                f"reward.functions.{name}.weight = {function.weight:g} makes rewards negative, and"
                f" {setting} needs rewards of at least {advantage.least_reward:g}; use grpo or rloo"
            )
        if advantage.needs_baseline and function.weight and function.compares_completions:
            raise ValueError(
                f"reward.functions: {name} compares the completions of a group, so the baseline of"
                f" {setting} would depend on the sampled ones; use a reward of single completions,"
                " or advantage: rloo"
            )
    if not reward.shuffle:
        return
    if not algorithm.uses_rewards:
        raise ValueError(
            "reward.shuffle has no effect with algorithm.distillation.reward_weight = 0, which only"
            " measures rewards; leave it out, or set reward_weight: 1"
        )
    if isinstance(advantage, Gdpo):
        raise ValueError(
            f"reward.shuffle: true permutes total rewards, and {setting} has one for each function;"
            " leave one of them out"
        )
    if reward.per_token and advantage.of_each_token:
        raise ValueError(
            "reward.shuffle permutes rewards between trajectories, but per_token rewards belong to"
            f" specific tokens; leave one of them out, or use an advantage other than"
            f" {advantage.name}"
        )


def _check_group_size(config: Settings, algorithm: PolicyGradient) -> None:
    samples, advantage = config.rollout.n_samples_per_prompt, algorithm.advantage
    if isinstance(advantage, PassAtK) and advantage.pass_k >= samples:
        raise ValueError(
            f"algorithm.advantage.pass_k = {advantage.pass_k} is not below"
            f" rollout.n_samples_per_prompt = {samples}. Then a group has only one subset, with an"
            " advantage of 0; lower it"
        )
    longest, room = config.longest_trajectory, config.learner.max_tokens_per_row
    if isinstance(advantage, Gae) and advantage.bootstrap_truncated and longest >= room:
        raise ValueError(
            "algorithm.advantage.bootstrap_truncated: true needs one token more than the longest"
            f" trajectory: {config.longest_text} leaves none of learner.max_tokens_per_gpu *"
            f" sequence_parallel_size = {room}; raise max_tokens_per_gpu"
        )


def _check_teacher(config: Settings, algorithm: PolicyGradient) -> None:
    distillation = algorithm.distillation
    if distillation is None or not isinstance(distillation.teacher, TeacherServer):
        return
    if config.rollout.temperature != 1.0:
        raise ValueError(
            f"rollout.temperature = {config.rollout.temperature:g} does not work with the teacher"
            f" at {distillation.teacher.url}: a server's prompt_logprobs are at temperature 1; set"
            " rollout.temperature: 1, or give the teacher's checkpoint, which is scored at the"
            " rollouts' temperature"
        )


def _check_turns(config: Settings, algorithm: PolicyGradient) -> None:
    if algorithm.turn_rewards is None:
        return
    if config.environment is None:
        raise ValueError(
            "algorithm.advantage.turns has no effect without an environment, which rewards turns;"
            " leave it out"
        )
    if config.reward.shuffle:
        raise ValueError(
            "reward.shuffle permutes rewards of whole sessions, and algorithm.advantage.turns"
            " compares turns; leave one of them out"
        )


def _check_reference(config: Settings) -> None:
    """Check that the frozen policy is the one that is meant, and fits."""
    algorithm, frozen = config.algorithm, config.algorithm.frozen
    if frozen is None:
        return
    longest, cap = config.longest_trajectory, config.learner.max_tokens_per_gpu
    if longest > cap:
        raise ValueError(
            f"{config.longest_text} is above learner.max_tokens_per_gpu = {cap}, and the reference"
            " policy or teacher cannot split a row over ranks; raise that, or lower data.max_length"
        )
    if frozen.gpu_memory_utilization is not None and not config.shares_gpus:
        raise ValueError(
            f"{config.frozen_setting}.gpu_memory_utilization = {frozen.gpu_memory_utilization:g}"
            " only has an effect with placement: share and learner.device: cuda; leave it out, or"
            " set that"
        )
    if algorithm.distillation is not None:
        return
    if algorithm.update_interval is not None and config.lora is not None:
        raise ValueError(
            f"algorithm.reference.update_interval = {algorithm.update_interval} does not work with"
            " lora, whose versions are adapters and not whole weights; leave one of them out"
        )
    if algorithm.reference is None or algorithm.reference.ref_load is not None:
        return
    before = "before the warm start" if config.warm_start is not None else ""
    if config.lora is not None and config.lora.load is not None:
        before = "without the adapter of lora.load"
    if before:
        raise ValueError(
            f"the reference policy would be model.path, as it was {before}; name it in"
            " algorithm.reference.ref_load"
        )


def _check_corrected(config: Settings, algorithm: PolicyGradient | PreferenceTraining) -> None:
    """Check that stale tokens are corrected. Pairs may be one version old without."""
    bound = config.staleness.max_staleness
    if algorithm.corrected or algorithm.allow_uncorrected:
        return
    if isinstance(algorithm, PolicyGradient) and bound > 0:
        raise ValueError(
            f"algorithm.loss = {algorithm.loss.name!r} with old_policy:"
            f" {algorithm.loss.old_policy} and without correction.truncation is uncorrected, and"
            f" staleness.max_staleness = {bound} trains stale tokens; set"
            " algorithm.correction.truncation: token, or algorithm.allow_uncorrected: true"
        )
    if isinstance(algorithm, PreferenceTraining) and bound > 1:
        raise ValueError(
            "algorithm.preference.weight_cap = null trains pairs without off-policy weights, and"
            f" staleness.max_staleness = {bound} is above 1; set weight_cap: 2, or"
            " algorithm.allow_uncorrected: true"
        )


def _check_kept_tokens(config: Settings) -> None:
    """Refuse to compare log-probs over the kept tokens with log-probs over all tokens."""
    compares = config.algorithm.compares_behavior
    way = "algorithm.loss: reinforce, without correction and KL"
    if config.algorithm.preference is not None:
        way = "algorithm.preference.weight_cap: null"
    for name, value in config.rollout.kept_tokens.items():
        if compares is not None and value != type(config.rollout).model_fields[name].default:
            raise ValueError(
                f"rollout.{name} = {value:g} renormalizes the generator's log-probs over the kept"
                f" tokens, and {compares} compares them with the learner's. Leave it out, or set"
                f" {way}"
            )
