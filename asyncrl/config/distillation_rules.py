"""Rules of on-policy distillation (algorithm.distillation)."""

from __future__ import annotations

from asyncrl.config.schema import AlgorithmConfig, DistillationConfig
from asyncrl.config.settings import Settings
from asyncrl.runtime.urls import sends_in_the_clear

__all__ = ["check_distillation"]

OF_URLS = ("model", "key_env", "timeout_s", "retries", "at_once")
"""Settings of `algorithm.distillation` that only requests to a server use."""


OF_POLICY_LOSS = ("loss", "old_policy", "eps_clip", "eps_clip_high", "correction")
"""Settings of `algorithm` that only act on advantages."""


def check_distillation(config: Settings) -> None:
    """Raise ValueError for the first rule of distillation that does not hold."""
    distillation = config.algorithm.distillation
    if distillation is None:
        return
    _check_other_objectives(config.algorithm, distillation)
    _check_top_k(config.algorithm, distillation)
    _check_reward_weight(config, distillation)
    if distillation.is_url:
        _check_url(config, distillation)
        return
    for name in OF_URLS:
        value = getattr(distillation, name)
        if value != DistillationConfig.model_fields[name].default:
            raise ValueError(
                f"algorithm.distillation.{name} = {value} only has an effect with the URL of a"
                " server as teacher; leave it out"
            )


def _check_other_objectives(algorithm: AlgorithmConfig, distillation: DistillationConfig) -> None:
    if algorithm.ref_update_interval is not None:
        raise ValueError(
            f"algorithm.ref_update_interval = {algorithm.ref_update_interval} would replace the"
            " teacher of algorithm.distillation by the policy; leave one of them out"
        )
    if algorithm.ref_load is not None:
        raise ValueError(
            f"algorithm.ref_load = {algorithm.ref_load!r} has no effect with"
            " algorithm.distillation, whose teacher takes the reference policy's place; leave one"
            " of them out"
        )
    has_kl = algorithm.kl_coef > 0 or algorithm.kl_loss_coef > 0
    if has_kl and distillation.use != "ref_kl":
        raise ValueError(
            "algorithm.kl_coef and kl_loss_coef would add the teacher's divergence a second"
            " time; leave them out, or set algorithm.distillation.use: ref_kl"
        )
    if distillation.uses_top_k:
        return
    if distillation.adds_advantage:
        if algorithm.needs_one_advantage or algorithm.correction.sequence_mask_above is not None:
            raise ValueError(
                "algorithm.distillation.use: advantage gives one advantage per token, and"
                f" algorithm.loss = {algorithm.loss!r} or correction.sequence_mask_above needs one"
                " per trajectory; set algorithm.loss: ppo without that mask"
            )
        return
    if not has_kl:
        raise ValueError(
            "algorithm.distillation.use: ref_kl learns by the KL term; set algorithm.kl_loss_coef"
            " above 0, or use: advantage"
        )
    if distillation.coef != DistillationConfig.model_fields["coef"].default:
        raise ValueError(
            f"algorithm.distillation.coef = {distillation.coef:g} has no effect with use: ref_kl;"
            " set algorithm.kl_loss_coef instead"
        )


def _check_top_k(algorithm: AlgorithmConfig, distillation: DistillationConfig) -> None:
    default = DistillationConfig.model_fields["top_k"].default
    if not distillation.uses_top_k:
        if distillation.top_k != default:
            raise ValueError(
                f"algorithm.distillation.top_k = {distillation.top_k} has no effect with use:"
                f" {distillation.use}; set use: top_k, or leave it out"
            )
        return
    if distillation.is_url:
        raise ValueError(
            "algorithm.distillation.use: top_k does not work with the teacher at"
            f" {distillation.teacher}: a server only scores the sampled tokens; give the teacher's"
            " checkpoint, or set use: advantage"
        )
    if distillation.reward_weight:
        return
    for name in OF_POLICY_LOSS:
        if getattr(algorithm, name) != AlgorithmConfig.model_fields[name].default:
            raise ValueError(
                f"algorithm.{name} has no effect with algorithm.distillation.use: top_k and"
                " reward_weight: 0, because the divergence is no policy loss; leave it out, or set"
                " reward_weight above 0"
            )


def _check_reward_weight(config: Settings, distillation: DistillationConfig) -> None:
    """Without weight, rewards are only measured, so settings of their advantage do nothing."""
    algorithm = config.algorithm
    if distillation.reward_weight:
        return
    for name, given in (
        ("algorithm.advantage", algorithm.advantage != "grpo"),
        ("algorithm.filter_zero_variance", algorithm.filter_zero_variance),
        ("algorithm.kl_coef", algorithm.kl_coef > 0),
        ("reward.shuffle", config.reward.shuffle),
    ):
        if given:
            raise ValueError(
                f"{name} has no effect with algorithm.distillation.reward_weight = 0, which only"
                " measures rewards; leave it out, or set reward_weight: 1"
            )


def _check_url(config: Settings, distillation: DistillationConfig) -> None:
    if config.rollout.temperature != 1.0:
        raise ValueError(
            f"rollout.temperature = {config.rollout.temperature:g} does not work with the teacher"
            f" at {distillation.teacher}: a server's prompt_logprobs are at temperature 1; set"
            " rollout.temperature: 1, or give the teacher's checkpoint, which is scored at the"
            " rollouts' temperature"
        )
    if config.algorithm.ref_num_cpus != AlgorithmConfig.model_fields["ref_num_cpus"].default:
        raise ValueError(
            f"algorithm.ref_num_cpus = {config.algorithm.ref_num_cpus:g} has no effect with a"
            " teacher at a URL; leave it out"
        )
    if distillation.key_env is not None and sends_in_the_clear(distillation.teacher):
        raise ValueError(
            f"algorithm.distillation.teacher = {distillation.teacher!r} would send the key of"
            f" {distillation.key_env} in the clear; use https, or leave key_env out"
        )
