"""Sections of the printed plan that depend only on the config and the data."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.algorithms.corrections import Correction
from asyncrl.algorithms.losses.cispo import Cispo
from asyncrl.algorithms.losses.ppo import Ppo
from asyncrl.algorithms.pairs import BestWorst
from asyncrl.algorithms.preference_losses import Sigmoid
from asyncrl.algorithms.references import KlInLoss
from asyncrl.config import (
    AgentCommand,
    AgentFunction,
    Config,
    EnvironmentConfig,
    FunctionEnvironment,
    PolicyGradient,
)
from asyncrl.config.algorithm import OnlinePreferenceConfig
from asyncrl.config.config import derived_settings, session_waves
from asyncrl.config.schema import Wait
from asyncrl.contracts.section import Section
from asyncrl.environments.pool import GUARD_S
from asyncrl.models.supported import chosen_packing, support
from asyncrl.preflight.specs import data_spec

if TYPE_CHECKING:
    from asyncrl.data.prompts import PromptReport

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
            f" only to itself{_shared_text(config)}"
        )
    requested = "learner.packing: none is set, although this model allows packing, which is faster"
    reason = support(tree).reason
    why = f"this model (model_type {tree.get('model_type')!r}) {reason}" if reason else requested
    return (
        "# learner rows\n  unpacked: one trajectory per forward pass, with the model's own"
        f" attention, because {why}"
    )


def _shared_text(config: Config) -> str:
    """What the learner saves by computing a group's prompt once, as a line; empty for groups of
    one."""
    count, prompt = config.rollout.n_samples_per_prompt, config.data.max_prompt_length
    if count == 1:
        return ""
    completion, limit = config.longest_trajectory - prompt, config.learner.max_tokens_per_row
    once = prompt + count * completion
    text = (
        "\n  a common prefix is computed once: the longest group has max_prompt_length"
        f" {prompt} + n_samples_per_prompt {count} * {completion} = {once} tokens,"
        f" {once / (count * config.longest_trajectory):.2f} of those of separate trajectories"
    )
    if once > limit:
        text += f". It does not fit into {limit} tokens, so each part of it has the prompt"
    return text


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
    if isinstance(config.staleness.on_stale, Wait):
        lines += _longest_wait(config, environment)
    return ["\n  ".join(lines)]


def _limits_text(environment: EnvironmentConfig) -> str:
    """The limits of a turn and of the tools after it, if there are any."""
    limits = {"turn": environment.turn_s, "tools after an answer": environment.tool_s}
    return "".join(f"; {name}: {most:g} s" for name, most in limits.items() if most is not None)


def _player_text(config: Config) -> str:
    """What plays the sessions."""
    match config.environment:
        case AgentCommand(command=command):
            return f"the program {shlex.join(command)}"
        case AgentFunction(agent=agent):
            return agent
        case FunctionEnvironment(function=function):
            return function
    raise AssertionError


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
    every = config.algorithm.update_interval
    if every is None:
        return ""
    return (
        f"\n  reference policy: {config.reference_path}, then the policy's version {every},"
        f" {2 * every}, {3 * every}, …; each checkpoint has a copy of it"
    )


def _online_preference_text(config: Config, preference: OnlinePreferenceConfig) -> str:
    """The loss and the pairs of online DPO."""
    samples, pairs = config.rollout.n_samples_per_prompt, preference.pairs
    chosen = (
        "the best against the worst"
        if isinstance(pairs, BestWorst)
        else f"at most {pairs.max_pairs} pairs"
    )
    penalty = (
        f"; a completion that was cut off loses {pairs.missing_eos_penalty:g} reward"
        if pairs.missing_eos_penalty
        else ""
    )
    weight = (
        "none (uncorrected)" if preference.weight_cap is None else f"<= {preference.weight_cap:g}"
    )
    ce = f" + {preference.ce_coef:g} x next-token loss" if preference.ce_coef else ""
    # The runs in docs/evidence.md had several values of beta.
    plain = preference.model_copy(update={"loss": Sigmoid()}) == OnlinePreferenceConfig()
    sigmoid = preference.loss.model_copy(update={"beta": Sigmoid().beta}) == Sigmoid()
    frozen = config.algorithm.update_interval is None
    return (
        f"online DPO: loss {_named(preference.loss, without=('beta',))}{ce}, beta"
        f" {preference.loss.beta:g} against {config.reference_path}; of each group's {samples}"
        f" completions {chosen}, with rewards at least {pairs.min_margin:g} apart{penalty};"
        f" off-policy weight of a pair: {weight}"
        f"{'' if plain and sigmoid and frozen else EXPERIMENTAL}"
    )


def _named(choice: Section, without: tuple[str, ...] = ()) -> str:
    """The name of a choice, and in parentheses its settings that are not its defaults."""
    changed = _changed(choice, ("name", *without))
    settings = f" ({', '.join(changed)})" if changed else ""
    return f"{getattr(choice, 'name', '')}{settings}"


def _changed(section: Section, without: tuple[str, ...] = ()) -> list[str]:
    """Name and value of each setting that is not its default."""
    return [
        f"{name} {getattr(section, name)}"
        for name, field in type(section).model_fields.items()
        if name not in without and getattr(section, name) != field.default
    ]


def _policy_gradient_text(config: Config) -> str:
    """Advantage, loss and correction."""
    algorithm = config.algorithm
    assert isinstance(algorithm, PolicyGradient)
    kind = "corrected" if algorithm.corrected else "uncorrected"
    correction = _correction_text(algorithm.correction) or (
        "only the ratio" if algorithm.corrected else "none"
    )
    kl = ""
    if algorithm.kl is not None:
        term = "the loss" if isinstance(algorithm.kl, KlInLoss) else "the reward"
        source = algorithm.distillation.teacher_text if algorithm.distillation else None
        kl = (
            f"; {algorithm.kl.coef:g} x KL ({algorithm.kl.estimator}) from"
            f" {source or config.reference_path} in {term}"
        )
    text = (
        f"; {algorithm.ce.coef:g} x next-token loss on completions with a reward of at least"
        f" {algorithm.ce.min_reward:g}"
        if algorithm.ce is not None
        else ""
    )
    note = "" if _shown(algorithm) else EXPERIMENTAL
    loss = algorithm.loss
    return (
        f"{_advantage_text(algorithm)}, loss {_named(loss, without=('old_policy',))} against old"
        f" policy {loss.old_policy}, {algorithm.loss_aggregation}; {kind}; correction:"
        f" {correction}{kl}{text}{note}"
    )


def _correction_text(correction: Correction) -> str:
    """The parts of a correction, with their settings."""
    parts = []
    if (truncation := correction.truncation) is not None:
        settings = [f"cap {truncation.cap}", *_changed(truncation, ("level", "cap"))]
        parts.append(f"truncation {', '.join([truncation.level, *settings])}")
    for name in ("band", "rejection", "sequence_mask"):
        if (part := getattr(correction, name)) is not None:
            parts.append(f"{name} {', '.join(_changed(part))}")
    return " and ".join(parts)


def _shown(algorithm: PolicyGradient) -> bool:
    """Whether a complete run in docs/evidence.md has shown that this combination learns."""
    distillation, loss, truncation = (
        algorithm.distillation,
        algorithm.loss,
        algorithm.correction.truncation,
    )
    if algorithm.entropy_coef or algorithm.ce is not None:
        return False
    if distillation is not None:
        return bool(distillation.top_k) and not distillation.reward_weight
    turns = algorithm.turn_rewards
    return (
        (loss.name, loss.old_policy, truncation.level if truncation else "none") in SHOWN
        and (algorithm.advantage.name, algorithm.loss_aggregation) == SHOWN_WITH
        and algorithm.correction.model_copy(update={"truncation": None}) == Correction()
        and (truncation is None or not (truncation.normalize or truncation.floor))
        and algorithm.reference is None
        and not (isinstance(loss, Ppo) and loss.dual_clip)
        # The run of jobs/guess: PPO, and each turn has only its own reward.
        and (turns is None or (not turns.gamma and isinstance(loss, Ppo)))
        # The cispo run in docs/evidence.md had a lower clip.
        and not (isinstance(loss, Cispo) and loss.eps_clip == 1)
    )


def _advantage_text(algorithm: PolicyGradient) -> str:
    """Where the advantages come from. The plan's line about the teacher has the formula."""
    distillation, advantage = algorithm.distillation, algorithm.advantage
    baseline = (
        " against one greedy completion per group, which is generated and scored too, and not"
        " trained"
        if algorithm.needs_baseline
        else ""
    )
    name = _named(advantage, without=("turns",))
    if distillation is None:
        turns = algorithm.turn_rewards
        of_turns = f" + {turns.coef:g} x that of each turn" if turns is not None else ""
        return f"advantage {name}{of_turns}{baseline}"
    sources = ["from the teacher's log-probs"] if distillation.adds_advantage else []
    term = "the teacher's divergence" if distillation.top_k else "the KL term"
    if distillation.reward_weight:
        sources.append(f"{distillation.reward_weight:g} x {name}{baseline}")
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
