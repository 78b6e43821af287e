"""Rules for runs with an environment: what sessions support, and what they need."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.config.schema import AgentConfig
from asyncrl.config.settings import BUILTIN, Settings

__all__ = ["check_environment", "check_turn_rewards"]

COMPARES_TURNS = ("grpo", "dr_grpo", "rloo")
"""Values of `algorithm.advantage` that compare the turns of a group as they compare its rewards."""


def _check_agent(agent: AgentConfig, rewards: Sequence[str]) -> None:
    if (agent.command is None) == (agent.function is None):
        raise ValueError("agent needs either a command or a function; give one of them")
    if agent.command is not None and agent.arguments:
        raise ValueError(
            "agent.arguments are those of agent.function; write a program's into agent.command"
        )
    if agent.command is not None and all(name == BUILTIN for name in rewards):
        raise ValueError(
            "agent.command gives no reward; set reward.functions to"
            " asyncrl.rewards.builtin:printed_reward, or to a function of session_messages"
        )


def check_environment(config: Settings) -> None:
    """Raise ValueError for the first rule that does not hold."""
    environment, algorithm, reward = config.environment, config.algorithm, config.reward
    if environment is None:
        return
    if config.agent is not None:
        _check_agent(config.agent, [function.function for function in reward.functions.values()])
    if config.data.max_length is None:
        raise ValueError(
            "environment needs data.max_length: the most tokens of a session's longest row, such as"
            " 1024"
        )
    if "done" not in environment.train_ends:
        raise ValueError(
            f"environment.train_ends = {environment.train_ends} has no done, so sessions that end"
            " as they should would not be trained; add it"
        )
    if config.rollout.deadline_s is not None and (
        config.rollout.deadline_s <= environment.deadline_s
    ):
        raise ValueError(
            f"rollout.deadline_s = {config.rollout.deadline_s:g} is not above"
            f" environment.deadline_s = {environment.deadline_s:g}, so a slow session would fail"
            " its group; raise it, or leave it out"
        )
    if environment.tool_s is not None and environment.tool_s >= environment.deadline_s:
        raise ValueError(
            f"environment.tool_s = {environment.tool_s:g} is not below environment.deadline_s ="
            f" {environment.deadline_s:g}, so it has no effect; lower it, or leave it out"
        )
    for refused, setting, fix in (
        (algorithm.preference is not None, "algorithm.preference", "leave it out"),
        (algorithm.needs_baseline, "algorithm.advantage: remax", "use grpo or rloo"),
        (algorithm.advantage == "gae", "algorithm.advantage: gae", "use grpo or rloo"),
        (reward.per_token, "rewards with per_token", "return one reward per trajectory"),
        (reward.penalizes_length, "reward.overlong_buffer", "set it to 0"),
        (config.data.system_prompt is not None, "data.system_prompt", "write it as a message"),
        (config.data.tools_column is not None, "data.tools_column", "give tools with requests"),
        (config.data.tools is not None, "data.tools", "give tools with each request"),
        (config.rollout.ignore_eos, "rollout.ignore_eos", "set it to false"),
    ):
        if refused:
            raise ValueError(f"{setting} does not work with an environment yet; {fix}")
    if algorithm.compares_sequences and config.learner.packing == "none":
        raise ValueError(
            f"algorithm.loss = {algorithm.loss} compares whole trajectories, and a session may have"
            " several rows, which learner.packing: none separates; set learner.packing: rows"
        )


def check_turn_rewards(config: Settings) -> None:
    """Raise ValueError if rewards of turns cannot act, or something else needs one advantage per
    session."""
    algorithm = config.algorithm
    if not algorithm.turn_coef:
        return
    setting = f"algorithm.turn_coef = {algorithm.turn_coef:g}"
    if config.environment is None:
        raise ValueError(
            f"{setting} has no effect without an environment, which rewards turns; leave it out"
        )
    if algorithm.advantage not in COMPARES_TURNS:
        raise ValueError(
            f"{setting} does not work with advantage: {algorithm.advantage}; use"
            f" {', '.join(COMPARES_TURNS[:-1])} or {COMPARES_TURNS[-1]}"
        )
    for refused, reason in (
        (algorithm.needs_one_advantage, f"algorithm.loss = {algorithm.loss!r} needs one for each"),
        (
            algorithm.correction.sequence_mask_above is not None,
            "algorithm.correction.sequence_mask_above needs one for each",
        ),
        (config.reward.shuffle, "reward.shuffle permutes rewards of whole sessions"),
        (
            algorithm.filter_zero_variance,
            "algorithm.filter_zero_variance drops groups in which only those differ",
        ),
    ):
        if refused:
            raise ValueError(
                f"{setting} gives the turns of a session advantages of their own, and {reason};"
                " leave one of them out"
            )
