"""Configs with an environment: defaults, and what is refused with a reason."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from asyncrl.config import Config, explain

TREE: dict[str, Any] = {
    "name": "agent",
    "max_steps": 1,
    "model": {"path": "m"},
    "data": {"train": "t", "max_prompt_length": 8, "max_length": 1024},
    "environment": {"function": "my_env:solve"},
    "rollout": {"max_completion_length": 8},
}


TURNS = {"advantage": {"name": "grpo", "turns": {"coef": 1}}}


def config(**changes: Any) -> Config:
    tree = {**TREE}
    for name, value in changes.items():
        known = tree.get(name)
        tree[name] = {**known, **value} if isinstance(known, dict) else value
    return Config.model_validate(tree)


def test_the_environments_own_reward_is_the_only_one_by_default() -> None:
    found = config()
    (reward,) = found.reward.functions.values()
    assert reward.function == "asyncrl.rewards.builtin:environment"
    assert list(found.reward.functions) == ["environment"] == [found.accuracy]
    own = config(reward={"functions": {"mine": {"function": "m:f"}}})
    assert list(own.reward.functions) == ["mine"]
    assert list(config(reward={"processes": 3}).reward.functions) == ["environment"]


def test_the_ends_that_are_trained_are_recorded_for_an_audit() -> None:
    found = config(environment={"train_ends": ["done", "env_error"]})
    assert found.limits.train_ends == ("done", "env_error")


def test_a_row_of_a_session_may_have_max_length_tokens() -> None:
    assert config().longest_trajectory == 1024  # a single turn has at most 8 + 8
    assert config().longest_request == 1024


def test_the_deadline_of_a_group_follows_from_that_of_its_sessions() -> None:
    wide = config(environment={"deadline_s": 500, "concurrency": 512})
    assert wide.deadline_s == 1000
    waves = config(environment={"deadline_s": 500})  # 384 sessions, and 128 at once
    assert waves.deadline_s == 3000


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"data": {"max_length": None}}, "environment needs data.max_length"),
        ({"environment": {"train_ends": ["turns"]}}, r"train_ends = \['turns'\] has no done"),
        ({"environment": {"train_ends": ["won"]}}, "train_ends"),
        ({"environment": {"function": "my_env"}}, "function"),
        ({"environment": {"block_s": 0.2}}, "block_s"),
        ({"rollout": {"deadline_s": 60}}, "is not above environment.deadline_s = 300"),
        ({"rollout": {"ignore_eos": True}}, "rollout.ignore_eos does not work with an environment"),
        ({"algorithm": {"advantage": "remax"}}, "algorithm.advantage: remax does not work"),
        ({"algorithm": {"preference": {}}}, "algorithm.preference does not work"),
        ({"data": {"system_prompt": "x"}}, "data.system_prompt does not work"),
        (
            {"reward": {"functions": {"f": {"function": "m:f", "per_token": True}}}},
            "rewards with per_token does not work",
        ),
        ({"reward": {"overlong": 4}}, "reward.overlong does not work"),
        ({"algorithm": {"advantage": "gae"}}, "algorithm.advantage: gae does not work"),
        (
            {"algorithm": {"advantage": {"name": "opo", "turns": {"coef": 1}}}},
            r"turns\.coef has no effect with advantage: opo; .* advantage: grpo, dr_grpo or rloo$",
        ),
        (
            {"algorithm": {**TURNS, "loss": "gmpo"}},
            r"algorithm\.advantage\.turns gives each token an advantage of its own, and loss: gmpo"
            " needs one per trajectory; leave one of them out",
        ),
        (
            {"algorithm": {**TURNS, "correction": {"sequence_mask": {"above": 0.1}}}},
            "correction.sequence_mask needs one per trajectory",
        ),
        (
            {"algorithm": {**TURNS, "filter_zero_variance": True}},
            "filter_zero_variance drops groups in which only the turns of advantage.turns differ",
        ),
        ({"algorithm": TURNS, "reward": {"shuffle": True}}, "reward.shuffle permutes"),
        (
            {"algorithm": {"advantage": {"turns": {"gamma": 0.5}}}},
            r"turns\.coef is missing; set it",
        ),
        (
            {"algorithm": {"advantage": {"turns": {"coef": -1}}}},
            r"turns\.coef = -1: input should be",
        ),
        ({"algorithm": {"turn_coef": 1}}, r"turn_coef has moved; write algorithm: {advantage: {na"),
        (
            {"algorithm": {"loss": "gspo"}, "learner": {"packing": "none"}},
            "compares whole trajectories, and a session may have several rows",
        ),
    ],
)
def test_what_does_not_work_is_refused_with_its_reason(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError) as refused:
        config(**changes)
    assert re.search(why, explain(refused.value))


@pytest.mark.parametrize(
    "algorithm",
    [
        {"reference": {"kl_loss_coef": 0.1, "update_interval": 4}},
        {"advantage": "rloo", "reference": {"kl_coef": 0.1, "ref_load": "other"}},
        {
            "advantage": {"name": "rloo", "turns": {"coef": 1}},
            "reference": {"kl_coef": 0.1},
        },
        {"distillation": {"teacher": "other"}},
        {"distillation": {"teacher": "other", "use": {"name": "top_k", "top_k": 4}}},
        {"distillation": {"teacher": "http://there/v1", "reward_weight": 1.0}, **TURNS},
        {
            "distillation": {
                "teacher": "other",
                "use": {"name": "ref_kl", "kl": {"kl_loss_coef": 0.1}},
            }
        },
    ],
)
def test_sessions_take_a_reference_policy_and_a_teacher(algorithm: dict[str, Any]) -> None:
    assert config(algorithm=algorithm).algorithm.has_reference


PROGRAM = {"command": ["agent", "{prompt}"]}
PRINTED = {"functions": {"mine": {"function": "asyncrl.rewards.builtin:printed_reward"}}}


def agent(given: dict[str, Any], **changes: Any) -> Config:
    return Config.model_validate({**TREE, "environment": given, **changes})


def test_an_agent_program_is_an_environment_with_a_url() -> None:
    found = agent({**PROGRAM, "max_turns": 3}, reward=PRINTED)
    assert found.environment is not None and found.environment.at_url
    assert found.environment.entry == "asyncrl.environments.agent:play"
    assert found.environment.max_turns == 3
    assert found.environment.entry_arguments == {**PROGRAM, "variables": {}, "stdin": None}
    # A run saves its config, and reads it again.
    assert Config.model_validate(found.model_dump(mode="json")).environment == found.environment


def test_the_reward_of_an_agent_function_is_what_it_returns() -> None:
    found = agent({"agent": "my_agent:solve", "arguments": {"steps": 2}})
    assert list(found.reward.functions) == ["environment"]
    assert found.environment is not None and found.environment.at_url
    assert found.environment.entry_arguments == {
        "function": "my_agent:solve",
        "arguments": {"steps": 2},
    }


@pytest.mark.parametrize(
    ("given", "changes", "why"),
    [
        ({}, {}, "environment: give one of function, agent, command"),
        ({**PROGRAM, "agent": "m:f"}, {}, "environment: give only one of agent, command"),
        ({**PROGRAM, "function": "m:f"}, {}, "environment: give only one of function, command"),
        (
            {**PROGRAM, "arguments": {"a": 1}},
            {},
            r"environment\.arguments\.a has no effect with environment\.command; leave one of them",
        ),
        ({**PROGRAM, "url": True}, {}, r"environment\.url has no effect with environment\.command"),
        ({"agent": "m:f", "stdin": "task"}, {}, r"stdin has no effect with environment\.agent"),
        (PROGRAM, {}, "environment.command gives no reward; set reward.functions to"),
        (
            PROGRAM,
            {"agent": {"function": "m:f"}},
            r"agent\.function has moved; write environment: {",
        ),
        (PROGRAM, {"agent": {}}, r"agent has moved; write environment: {agent: …}, or"),
        ({"command": []}, {}, r"environment\.command = \[\]: "),
        ({"command": "agent --task"}, {}, "environment.command = 'agent --task': write a list"),
        ({"agent": "solve"}, {}, "environment.agent = 'solve': name a function as package.module"),
    ],
)
def test_agents_that_are_refused(given: dict[str, Any], changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError) as refused:
        agent(given, **changes)
    assert re.search(why, explain(refused.value))


def test_rewards_of_turns_need_an_environment() -> None:
    turns = {"name": "grpo", "turns": {"coef": 0.5, "gamma": 0.9}}
    found = config(algorithm={"advantage": turns}).algorithm
    assert found.token_advantages == "advantage.turns"
    tree = {name: value for name, value in TREE.items() if name != "environment"}
    tree |= {"reward": {"functions": {"f": {"function": "m:f"}}}, "algorithm": TURNS}
    tree["data"] = {"train": "t", "max_prompt_length": 8}
    with pytest.raises(ValueError, match=r"advantage\.turns has no effect without an environment"):
        Config.model_validate(tree)
