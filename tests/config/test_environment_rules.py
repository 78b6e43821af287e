"""Configs with an environment: defaults, and what is refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config import Config

TREE: dict[str, Any] = {
    "name": "agent",
    "max_steps": 1,
    "model": {"path": "m"},
    "data": {"train": "t", "max_prompt_length": 8, "max_length": 1024},
    "environment": {"function": "my_env:solve"},
    "rollout": {"max_completion_length": 8},
}


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
        ({"reward": {"overlong_buffer": 4}}, "reward.overlong_buffer does not work"),
        (
            {"algorithm": {"turn_coef": 1, "advantage": "opo"}},
            "turn_coef = 1 does not work with advantage: opo; use grpo, dr_grpo or rloo",
        ),
        (
            {"algorithm": {"turn_coef": 0.5, "loss": "gmpo"}},
            "algorithm.loss = 'gmpo' needs one for each; leave one of them out",
        ),
        (
            {"algorithm": {"turn_coef": 1, "correction": {"sequence_mask_above": 0.1}}},
            "sequence_mask_above needs one for each",
        ),
        (
            {"algorithm": {"turn_coef": 1, "filter_zero_variance": True}},
            "filter_zero_variance drops groups in which only those differ",
        ),
        ({"algorithm": {"turn_coef": 1}, "reward": {"shuffle": True}}, "reward.shuffle permutes"),
        ({"algorithm": {"turn_gamma": 0.5}}, "turn_gamma"),
        ({"algorithm": {"turn_coef": -1}}, "turn_coef"),
        (
            {"algorithm": {"loss": "gspo"}, "learner": {"packing": "none"}},
            "compares whole trajectories, and a session may have several rows",
        ),
    ],
)
def test_what_does_not_work_is_refused_with_its_reason(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        config(**changes)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"kl_loss_coef": 0.1, "ref_update_interval": 4},
        {"advantage": "rloo", "kl_coef": 0.1, "kl_estimator": "k1", "ref_load": "other"},
        {"advantage": "rloo", "kl_coef": 0.1, "kl_estimator": "k1", "turn_coef": 1},
        {"distillation": {"teacher": "other"}},
        {"distillation": {"teacher": "other", "use": "top_k", "top_k": 4}},
        {"distillation": {"teacher": "http://there/v1"}, "turn_coef": 1},
        {"distillation": {"teacher": "other", "use": "ref_kl"}, "kl_loss_coef": 0.1},
    ],
)
def test_sessions_take_a_reference_policy_and_a_teacher(algorithm: dict[str, Any]) -> None:
    assert config(algorithm=algorithm).algorithm.has_reference


PROGRAM = {"command": ["agent", "{prompt}"]}
PRINTED = {"functions": {"mine": {"function": "asyncrl.rewards.builtin:printed_reward"}}}


def agent(given: dict[str, Any], **changes: Any) -> Config:
    tree = {name: value for name, value in TREE.items() if name != "environment"}
    return Config.model_validate({**tree, "agent": given, **changes})


def test_an_agent_program_is_an_environment_with_a_url() -> None:
    found = agent(PROGRAM, reward=PRINTED, environment={"max_turns": 3})
    assert found.environment is not None and found.environment.url
    assert found.environment.function == "asyncrl.environments.agent:play"
    assert found.environment.max_turns == 3
    assert {"function": None, "stdin": None, **PROGRAM}.items() <= (
        found.environment.arguments.items()
    )
    # A run saves its config, and reads it again.
    assert Config.model_validate(found.model_dump(mode="json")).environment == found.environment


def test_the_reward_of_an_agent_function_is_what_it_returns() -> None:
    found = agent({"function": "my_agent:solve"})
    assert list(found.reward.functions) == ["environment"]


@pytest.mark.parametrize(
    ("given", "changes", "why"),
    [
        ({}, {}, "agent needs either a command or a function"),
        ({**PROGRAM, "function": "m:f"}, {}, "agent needs either a command or a function"),
        ({**PROGRAM, "arguments": {"a": 1}}, {}, "write a program's into agent.command"),
        (PROGRAM, {}, "agent.command gives no reward; set reward.functions to"),
        (PROGRAM, {"environment": {"function": "m:f"}}, "environment.function = 'm:f' and the"),
        ({"command": []}, {}, "command"),
        ({"command": "agent --task"}, {}, "command"),
    ],
)
def test_agents_that_are_refused(given: dict[str, Any], changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        agent(given, **changes)


def test_rewards_of_turns_need_an_environment() -> None:
    found = config(algorithm={"turn_coef": 0.5, "turn_gamma": 0.9}).algorithm
    assert found.token_advantages == "turn_coef"
    tree = {name: value for name, value in TREE.items() if name != "environment"}
    tree |= {"reward": {"functions": {"f": {"function": "m:f"}}}, "algorithm": {"turn_coef": 1}}
    with pytest.raises(ValueError, match="turn_coef = 1 has no effect without an environment"):
        Config.model_validate(tree)
