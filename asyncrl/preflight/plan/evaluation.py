"""What an evaluation will cost, and how long training may wait for it. An estimate from lengths and
sizes, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.config import Config
from asyncrl.weights.layout import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Speed:
    """Cost of one engine step: `step_s` seconds, plus reading the weights at `bytes_per_s`, plus
    for each sequence `token_s` seconds and 2 operations for each parameter."""

    step_s: float
    token_s: float
    bytes_per_s: float
    operations_per_s: float


SPEEDS = {"cpu": Speed(0.005, 1.6e-4, 1e10, 2e10), "cuda": Speed(0.01, 1e-5, 2e12, 2e14)}
"""On CPU as measured with the quickstart's model (4,200 tokens/s on one core) and with one of 135 M
parameters (70 tokens/s). On a GPU, a typical order of magnitude."""


def evaluation_seconds(config: Config, prompts: Mapping[str, int], weights_bytes: int) -> float:
    """Seconds for one replica to evaluate all sets, if every completion has its maximum length. The
    engine runs max_num_seqs completions at once.

    Args:
        prompts: set → number of prompts used from its file.
        weights_bytes: bytes of one version.
    """
    speed, at_once = SPEEDS[config.engines.device], config.max_num_seqs
    operations = 2 * weights_bytes / ITEM_BYTES[config.model.dtype]
    token_s = speed.token_s + operations / speed.operations_per_s
    seconds = 0.0
    for name, eval_set in config.evaluation_sets.items():
        completions = eval_set.n * min(prompts[name], eval_set.max_prompts or prompts[name])
        longest = eval_set.max_completion_length or config.rollout.max_completion_length
        steps = -(-completions // at_once) * longest
        seconds += (
            steps * (speed.step_s + weights_bytes / speed.bytes_per_s)
            + completions * longest * token_s
        )
    return seconds


def evaluation_text(config: Config, prompts: Mapping[str, int], weights_bytes: int) -> str:
    """The sets, and how an evaluation affects training."""
    if not config.eval.evaluates:
        return "# evaluation\n  none (eval.data)"
    lines = []
    for name, eval_set in config.evaluation_sets.items():
        used = min(prompts[name], eval_set.max_prompts or prompts[name])
        longest = eval_set.max_completion_length or config.rollout.max_completion_length
        lines.append(
            f"  {name}: {used} prompts x {eval_set.n} at temperature {eval_set.temperature:g}, up"
            f" to {longest} tokens each ({eval_set.data})"
        )
    when = (
        f"before, every {config.eval.every_steps} steps and after"
        if config.eval.every_steps
        else "before and after training"
    )
    seconds = evaluation_seconds(config, prompts, weights_bytes)
    estimate = (
        f"about {seconds:.0f} s on one replica if every completion has its maximum length"
        if seconds >= 1
        else "under a second"
    )
    return "\n".join(["# evaluation", *lines, f"  {when}; {estimate}", f"  {_effect(config)}"])


def _effect(config: Config) -> str:
    replicas = config.engines.num_replicas
    if config.placement == "colocate":
        return (
            "placement: colocate: an evaluation is part of the generators' shift, on all replicas,"
            " and the learner waits for it"
        )
    if config.eval.in_flight:
        return (
            "eval.in_flight: updates continue during an evaluation, and a completion may have"
            " tokens of several versions"
        )
    reserved = "an evaluation reserves one replica, and training continues with the others"
    alone = (
        "with one replica, updates wait for the evaluation, and so does the learner once it is"
        " max_staleness versions ahead"
    )
    if not config.owns_generators:
        return f"generator.attach: if the application has several replicas, {reserved}; {alone}"
    if replicas > 1:
        return f"generator.num_replicas = {replicas}: {reserved}"
    return f"{alone}; if that is too long, set generator.num_replicas: 2 or eval.in_flight: true"
