"""Rules for runs with an environment: what sessions support, and what they need."""

from __future__ import annotations

from asyncrl.config.algorithm import PolicyGradient
from asyncrl.config.schema import AgentCommand
from asyncrl.config.settings import BUILTIN, Settings


def check_environment(config: Settings) -> None:
    """Raise ValueError for the first rule that does not hold."""
    environment, algorithm, reward = config.environment, config.algorithm, config.reward
    if environment is None:
        return
    own = [function.function for function in reward.functions.values()]
    if isinstance(environment, AgentCommand) and all(name == BUILTIN for name in own):
        raise ValueError(
            "environment.command gives no reward; set reward.functions to"
            " asyncrl.rewards.builtin:printed_reward, or to a function of session_messages"
        )
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
    of_tokens = isinstance(algorithm, PolicyGradient) and algorithm.advantage.of_each_token
    for refused, setting, fix in (
        (algorithm.preference is not None, "algorithm.preference", "leave it out"),
        (algorithm.needs_baseline, "algorithm.advantage: remax", "use grpo or rloo"),
        (of_tokens, "algorithm.advantage: gae", "use grpo or rloo"),
        (reward.per_token, "rewards with per_token", "return one reward per trajectory"),
        (reward.overlong is not None, "reward.overlong", "leave it out"),
        (config.data.system_prompt is not None, "data.system_prompt", "write it as a message"),
        (config.data.tools_column is not None, "data.tools_column", "give tools with requests"),
        (config.data.tools is not None, "data.tools", "give tools with each request"),
        (config.rollout.ignore_eos, "rollout.ignore_eos", "set it to false"),
    ):
        if refused:
            raise ValueError(f"{setting} does not work with an environment yet; {fix}")
    if algorithm.compares_sequences and config.learner.packing == "none":
        assert isinstance(algorithm, PolicyGradient)
        loss = algorithm.loss
        comparing = f"loss: {loss.name}" if loss.compares_sequences else "correction"
        raise ValueError(
            f"algorithm.{comparing} compares whole trajectories, and a session may have several"
            " rows, which learner.packing: none separates; set learner.packing: rows"
        )
