"""Rules of online DPO (algorithm.preference)."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.schema import OnlinePreferenceConfig, Section
from asyncrl.config.settings import Settings

__all__ = ["check_preference"]

KEPT = (
    "preference",
    "ref_load",
    "ref_update_interval",
    "ref_num_cpus",
    "filter_zero_variance",
    "group_filter",
    "allow_uncorrected",
)
"""Settings of `algorithm` that have an effect with `algorithm.preference`."""


def check_preference(config: Settings) -> None:
    """Raise ValueError for the first rule of online DPO that does not hold."""
    preference = config.algorithm.preference
    if preference is None:
        return
    for name, value in _changed(config.algorithm, "algorithm", KEPT):
        raise ValueError(
            f"{name} = {value!r} has no effect with algorithm.preference, which trains pairs and"
            " uses no advantages; leave it out"
        )
    if preference.pairs != "margin":
        for name, value in _changed(preference, "algorithm.preference", ()):
            if name.endswith(".max_pairs"):
                raise ValueError(
                    f"{name} = {value} only has an effect with algorithm.preference.pairs: margin;"
                    " leave it out, or set that"
                )
    _check_groups(config, preference)
    _check_sampling(config, preference)
    _check_reference(config)


def _changed(section: Section, prefix: str, kept: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    """(Dotted name, value) of each setting that differs from its default."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if name in kept:
            continue
        if isinstance(value, Section):
            yield from _changed(value, f"{prefix}.{name}", ())
        elif value != field.default:
            yield f"{prefix}.{name}", value


def _check_groups(config: Settings, preference: OnlinePreferenceConfig) -> None:
    samples = config.rollout.n_samples_per_prompt
    if samples == 1:
        raise ValueError(
            "rollout.n_samples_per_prompt = 1 is too low for algorithm.preference, which compares"
            " the completions of a prompt; set 2 or more"
        )
    if preference.missing_eos_penalty and config.algorithm.filter_zero_variance:
        raise ValueError(
            "algorithm.filter_zero_variance compares rewards without missing_eos_penalty ="
            f" {preference.missing_eos_penalty:g}, so it would filter groups that give a pair;"
            " leave one of them out"
        )


def _check_sampling(config: Settings, preference: OnlinePreferenceConfig) -> None:
    """Check that the off-policy weight is there where it is needed, and compares the same
    distributions."""
    if preference.weight_cap is None:
        bound = config.staleness.max_staleness
        if bound > 1 and not config.algorithm.allow_uncorrected:
            raise ValueError(
                "algorithm.preference.weight_cap = null trains pairs without off-policy weights,"
                f" and staleness.max_staleness = {bound} is above 1; set weight_cap: 2, or"
                " algorithm.allow_uncorrected: true"
            )
        return
    for name, value in config.rollout.kept_tokens.items():
        if value != type(config.rollout).model_fields[name].default:
            raise ValueError(
                f"rollout.{name} = {value:g} renormalizes the generator's log-probs over the kept"
                " tokens, and the off-policy weight compares them with the learner's; leave it"
                " out, or set algorithm.preference.weight_cap: null"
            )


def _check_reference(config: Settings) -> None:
    longest, cap = config.longest_trajectory, config.learner.max_tokens_per_gpu
    if longest > cap:
        raise ValueError(
            f"{config.longest_text} is above learner.max_tokens_per_gpu = {cap}, and the reference"
            " policy cannot split a row over ranks; raise that, or lower data.max_length"
        )
    if config.algorithm.ref_load is None and config.warm_start.data is not None:
        raise ValueError(
            "algorithm.preference with warm_start would compare the policy with model.path, as it"
            " was before the warm start; name the reference policy in algorithm.ref_load, or train"
            " it with `asyncrl sft` and use it as model.path"
        )
