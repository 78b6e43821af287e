"""Sections of the printed plan that depend only on the config and the data."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config import AlgorithmConfig, Config, EnvironmentConfig
from asyncrl.config.derived import derived_settings, session_waves
from asyncrl.config.schema import OnlinePreferenceConfig
from asyncrl.environments.pool import GUARD_S
from asyncrl.models.supported import chosen_packing, support
from asyncrl.preflight.specs import data_spec

if TYPE_CHECKING:
    from asyncrl.data.prompts import PromptReport

__all__ = [
    "algorithm_text",
    "arithmetic",
    "derived_text",
    "rows_text",
    "sources_text",
]

SHOWN = {
    ("ppo", "behavior", "none"),
    ("ppo", "learner", "token"),
    ("ppo", "log_linear", "token"),
    ("gspo", "behavior", "none"),
    ("cispo", "behavior", "none"),
    ("reinforce", "learner", "token"),
}
"""(loss, old policy, truncation) of the complete runs in docs/evidence.md."""
SHOWN_WITH = ("grpo", "token_mean")
"""Advantage and aggregation of those runs. None of them has masks, a KL term, a dual clip or an
entropy bonus. One, of `jobs/guess`, has rewards of turns."""


def arithmetic(config: Config) -> str:
    """The batch arithmetic, with the name of every number."""
    rollout, staleness, learner = config.rollout, config.staleness, config.learner
    bound = (
        f", at most max_length {config.data.max_length},"
        if config.data.max_length is not None
        else ""
    )
    extra = f" + over_sampling {staleness.over_sampling}" if staleness.over_sampling else ""
    return (
        "# batch arithmetic\n  groups per step     = rollout_batch_size"
        f" {rollout.rollout_batch_size} / num_steps_per_rollout {rollout.num_steps_per_rollout} ="
        f" {config.groups_per_step}\n  global_batch_size   = groups per step * n_samples_per_prompt"
        f" {rollout.n_samples_per_prompt} = {config.global_batch_size} trajectories\n  outstanding,"
        f" at most = (max_staleness {staleness.max_staleness} + 1) * groups per step{extra} ="
        f" {config.max_outstanding} groups\n  longest trajectory  = max_prompt_length"
        f" {config.data.max_prompt_length} + max_completion_length"
        f" {rollout.max_completion_length}{bound} = {config.longest_trajectory} tokens\n "
        f" micro-batch, at most = max_tokens_per_gpu {learner.max_tokens_per_gpu} *"
        f" sequence_parallel_size {learner.sequence_parallel_size} = {learner.max_tokens_per_row}"
        f" tokens\n  data-parallel size  = world_size {learner.world_size} / sequence_parallel_size"
        f" {learner.sequence_parallel_size} = {learner.data_parallel_size}"
    )


def derived_text(config: Config) -> str:
    """The value and reason of each setting that the user did not set, one per line."""
    lines = [f"  {derived.text()}" for derived in derived_settings(config)] or [
        "  none: the config sets all of them"
    ]
    return "\n".join(["# derived settings (the config can set each one)", *lines])


def rows_text(config: Config) -> str:
    """How the learner batches trajectories, and why."""
    tree = json.loads((Path(config.model.path) / "config.json").read_text())
    if chosen_packing(tree, config.learner.packing) == "rows":
        return (
            "# learner rows\n  packed: many trajectories share a row of tokens, and each attends"
            " only to itself"
        )
    requested = "learner.packing: none is set, although this model allows packing, which is faster"
    reason = support(tree).reason
    why = f"this model (model_type {tree.get('model_type')!r}) {reason}" if reason else requested
    return (
        "# learner rows\n  unpacked: one trajectory per forward pass, with the model's own"
        f" attention, because {why}"
    )


DEFAULT_PREFERENCE = OnlinePreferenceConfig()
"""The pairs of the runs in docs/evidence.md, with any beta."""
EXPERIMENTAL = (
    "\n  experimental: no complete run has shown that this combination learns (docs/evidence.md"
    " lists those that have)"
)


def algorithm_text(config: Config) -> str:
    """The objective in one line: pairs, or advantage, loss and correction. Marked as experimental
    unless a complete run in the evidence has shown that this combination learns."""
    shuffled = (
        "\n  rewards are shuffled over each step's batch (reward.shuffle): a control run that must"
        " not learn"
        if config.reward.shuffle
        else ""
    )
    objective = (
        _policy_gradient_text(config)
        if config.algorithm.preference is None
        else _online_preference_text(config, config.algorithm.preference)
    )
    return f"# algorithm\n  {objective}{_refreshes_text(config)}{shuffled}"


def environment_text(config: Config) -> list[str]:
    """What a session is; nothing without an environment."""
    environment = config.environment
    if environment is None:
        return []
    workers, seconds = config.rollout.num_workers, f"{environment.deadline_s:g} s"
    lines = [
        "# environment",
        f"{_player_text(config)}: at most {environment.max_turns} turns and {seconds}, its tools"
        f" included{_limits_text(environment)}",
        f"a row has at most {config.longest_trajectory} tokens, and a turn"
        f" {config.rollout.max_completion_length}",
        f"trained ends: {', '.join(environment.train_ends)}; history: {environment.history}",
        f"{workers} rollout worker(s) x {environment.processes} process(es) x"
        f" {environment.concurrency} sessions at once",
    ]
    if config.staleness.on_stale == "wait":
        lines += _longest_wait(config, environment)
    return ["\n  ".join(lines)]


def _limits_text(environment: EnvironmentConfig) -> str:
    """The limits of a turn and of the tools after it, if there are any."""
    limits = {"turn": environment.turn_s, "tools after an answer": environment.tool_s}
    return "".join(f"; {name}: {most:g} s" for name, most in limits.items() if most is not None)


def _player_text(config: Config) -> str:
    """What plays the sessions."""
    agent = config.agent
    if agent is None:
        assert config.environment is not None
        return config.environment.function
    return agent.function or f"the program {shlex.join(agent.command or [])}"


def _longest_wait(config: Config, environment: EnvironmentConfig) -> list[str]:
    """What the time of sessions can cost under on_stale: wait, in words and seconds."""
    waves, steps = session_waves(config), config.staleness.max_staleness
    most = waves * (environment.deadline_s + environment.block_s + GUARD_S)
    lines = [
        "on_stale: wait: a step waits for its oldest session, for at most",
        f"  waves {waves} x (deadline_s {environment.deadline_s:g} + block_s"
        f" {environment.block_s:g} + {GUARD_S:g} to end it) = {most:g} s",
    ]
    if steps:
        lines.append(f"  less the time of max_staleness {steps} step(s), which are taken meanwhile")
    lines.append(
        "  a session begins again if another one ends its process; turns end after"
        f" rollout.deadline_s = {config.deadline_s:g} s"
    )
    if waves > 1:
        lines.append(
            f"  {waves} waves: more sessions may start than run at once; raise"
            " environment.concurrency or processes"
        )
    return lines


def _refreshes_text(config: Config) -> str:
    """When the reference policy takes the policy's weights; "" if it is frozen."""
    every = config.algorithm.ref_update_interval
    if every is None:
        return ""
    return (
        f"\n  reference policy: {config.reference_path}, then the policy's version {every},"
        f" {2 * every}, {3 * every}, …; each checkpoint has a copy of it"
    )


def _online_preference_text(config: Config, preference: OnlinePreferenceConfig) -> str:
    """The loss and the pairs of online DPO."""
    samples = config.rollout.n_samples_per_prompt
    pairs = (
        "the best against the worst"
        if preference.pairs == "best_worst"
        else f"at most {preference.max_pairs} pairs"
    )
    penalty = (
        f"; a completion that was cut off loses {preference.missing_eos_penalty:g} reward"
        if preference.missing_eos_penalty
        else ""
    )
    weight = (
        "none (uncorrected)" if preference.weight_cap is None else f"<= {preference.weight_cap:g}"
    )
    ce = f" + {preference.ce_coef:g} x next-token loss" if preference.ce_coef else ""
    plain = preference.model_copy(update={"beta": DEFAULT_PREFERENCE.beta}) == DEFAULT_PREFERENCE
    frozen = config.algorithm.ref_update_interval is None
    return (
        f"online DPO: loss {preference.loss}{ce}, beta {preference.beta:g} against"
        f" {config.reference_path}; of each group's {samples} completions {pairs}, with rewards at"
        f" least {preference.min_margin:g} apart{penalty}; off-policy weight of a pair: {weight}"
        f"{'' if plain and frozen else EXPERIMENTAL}"
    )


def _policy_gradient_text(config: Config) -> str:
    """Advantage, loss and correction."""
    algorithm = config.algorithm
    correction = [
        f"{name} {value}"
        for name, value in algorithm.correction.model_dump().items()
        if value not in (None, "none", False)
    ]
    if not algorithm.caps:
        correction = [item for item in correction if not item.startswith("cap ")]
    if algorithm.correction.reject_above is None:
        correction = [item for item in correction if not item.startswith("reject_")]
    shown = (algorithm.loss, algorithm.old_policy, algorithm.correction.truncation)
    extras = (
        algorithm.correction.masks,
        algorithm.correction.normalize,
        algorithm.correction.floor,
        algorithm.has_reference,  # a teacher included
        algorithm.dual_clip,
        algorithm.entropy_coef,
        algorithm.ce_coef,
        # The run of jobs/guess: PPO, and each turn has only its own reward.
        algorithm.turn_coef and (algorithm.turn_gamma or algorithm.loss != "ppo"),
        # The cispo run in docs/evidence.md had a lower clip.
        algorithm.loss == "cispo" and algorithm.eps_clip is None,
    )
    plain = (algorithm.advantage, algorithm.loss_aggregation) == SHOWN_WITH and not any(extras)
    distilled = (
        algorithm.distillation is not None
        and algorithm.distillation.uses_top_k
        and not any((algorithm.distillation.reward_weight, algorithm.entropy_coef))
        and not algorithm.ce_coef
    )
    note = "" if distilled or (shown in SHOWN and plain) else EXPERIMENTAL
    kind = "corrected" if algorithm.corrected else "uncorrected"
    correction_text = ", ".join(correction) or ("only the ratio" if algorithm.corrected else "none")
    places = {"the reward": algorithm.kl_coef, "the loss": algorithm.kl_loss_coef}
    kl = "".join(
        f"; {value:g} x KL ({algorithm.kl_estimator}) from {config.reference_path} in {place}"
        for place, value in places.items()
        if value
    )
    text = (
        f"; {algorithm.ce_coef:g} x next-token loss on completions with a reward of at least"
        f" {algorithm.ce_min_reward:g}"
        if algorithm.ce_coef
        else ""
    )
    return (
        f"{_advantage_text(algorithm)}, loss {algorithm.loss} against old policy"
        f" {algorithm.old_policy}, {algorithm.loss_aggregation}; {kind};"
        f" correction: {correction_text}{kl}{text}{note}"
    )


def _advantage_text(algorithm: AlgorithmConfig) -> str:
    """Where the advantages come from. The plan's line about the teacher has the formula."""
    distillation = algorithm.distillation
    baseline = (
        " against one greedy completion per group, which is generated and scored too, and not"
        " trained"
        if algorithm.needs_baseline
        else ""
    )
    if distillation is None:
        turns = f" + {algorithm.turn_coef:g} x that of each turn" if algorithm.turn_coef else ""
        return f"advantage {algorithm.advantage}{turns}{baseline}"
    sources = ["from the teacher's log-probs"] if distillation.adds_advantage else []
    term = "the teacher's divergence" if distillation.uses_top_k else "the KL term"
    if distillation.reward_weight:
        sources.append(f"{distillation.reward_weight:g} x {algorithm.advantage}{baseline}")
    return f"on-policy distillation: advantage {' + '.join(sources) or f'none, only {term}'}"


def sources_text(report: PromptReport, config: Config) -> str:
    """Each source of data.train with its rows and its share of the prompts, one per line."""
    from asyncrl.data.prompts import order_of

    lines = []
    for source, share in zip(
        report.sources, order_of(report, data_spec(config)).shares, strict=True
    ):
        files = "1 file" if source.files == 1 else f"{source.files} files"
        lines.append(
            f"  source {source.name}: {source.rows} rows used from {files}; {share:.1%} of the"
            " prompts\n"
        )
    return "".join(lines)
