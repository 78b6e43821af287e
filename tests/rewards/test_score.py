import math
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from asyncrl.algorithms.advantages.gdpo import Gdpo
from asyncrl.algorithms.advantages.opo import Opo
from asyncrl.algorithms.advantages.pass_at_k import PassAtK
from asyncrl.algorithms.advantages.reinforce_plus_plus import ReinforcePlusPlus
from asyncrl.algorithms.advantages.remax import ReMax
from asyncrl.config import Config
from asyncrl.contracts.group_table import groups_from_table, groups_to_table
from asyncrl.contracts.messages import Scored, ScoredBaseline
from asyncrl.contracts.outcomes import NO_BASELINE
from asyncrl.contracts.rows import Baseline, Completion, Group, Prompt, Trajectory, VersionSpan
from asyncrl.learning.examples.batches import examples_of
from asyncrl.preflight.specs import scoring_spec
from asyncrl.rewards.contract import RewardError
from asyncrl.rewards.pool import GroupRewards, RewardPool
from asyncrl.rewards.score import (
    attach_reference,
    attach_reference_version,
    attach_rewards,
    group_call,
    score_completions,
    score_table,
)
from asyncrl.rewards.source import _result
from asyncrl.rewards.summary import (
    examples,
    scored_from_text,
    scored_to_text,
    summaries,
)


@pytest.fixture
def config():
    return Config.model_validate(
        {
            "name": "score",
            "max_steps": 1,
            "model": {"path": "unused"},
            "data": {"train": "unused", "max_prompt_length": 2},
            "rollout": {"n_samples_per_prompt": 5, "max_completion_length": 4},
            "algorithm": {"advantage": "dr_grpo"},
            "reward": {
                "functions": {"a": {"function": "m:a"}, "b": {"function": "m:b", "weight": 0}}
            },
        }
    )


EMPTY = Trajectory(Completion((), (), (), "stop", ""), ())


def trajectory(tokens, logprob=-1.0, version=2, reason="stop", text=""):
    return Trajectory(
        Completion(
            (1,) * tokens, (logprob,) * tokens, (VersionSpan(version, 0, tokens),), reason, text
        ),
        (1,) * tokens,
    )


def test_masked_trajectories_take_no_part_in_the_statistics(config):
    trajectories = (
        trajectory(4, reason="length"),
        trajectory(2, version=1),
        trajectory(2, math.nan),
        trajectory(5),
        trajectory(2),
    )
    group = Group(1, Prompt(3, 0, "p", (1, 2), {"answer": "x"}), trajectories, "replica", 1.0, 2.0)
    rewards = GroupRewards({"a": [1.0, 0.0, 1.0, 1.0, None], "b": [None, 4.0, 1.0, 1.0, 1.0]})
    row = score_table(attach_rewards(groups_to_table([group]), rewards), scoring_spec(config))
    [scored] = groups_from_table(row)
    assert [t.status for t in scored.trajectories] == [
        "ok",
        "ok",
        "bad_logprob",
        "over_long",
        "unscored",
    ]
    assert [t.advantage for t in scored.trajectories] == [0.5, -0.5, None, None, None]
    assert [t.reward for t in scored.trajectories] == [1.0, 0.0, 1.0, 1.0, None]
    assert dict(scored.trajectories[1].reward_parts) == {"a": 0.0, "b": 4.0}
    assert scored.prompt == group.prompt and scored.failure is None

    summary = summaries(row)[0]
    assert sum(summary.lengths) == summary.tokens and len(summary.lengths) == len(
        row["status"][0].as_py()
    )
    assert (
        summary.ordinal,
        summary.oldest_version,
        summary.tokens,
        summary.usable,
        summary.truncated,
    ) == (
        3,
        1,
        15,
        2,
        1,
    )
    assert summary.unscored == {"a": 1, "b": 1}
    assert summary.rewards == (1.0, 0.0) and summary.reward_parts == {"a": 0.5, "b": 4.0}
    # The reason why there is no reward counts for those without one, and is no part.
    reason = {"a/unscored_cut": [0.0, 0.0, 0.0, 0.0, 1.0]}
    said = attach_rewards(groups_to_table([group]), GroupRewards({**rewards.parts, **reason}))
    [summary] = summaries(score_table(said, scoring_spec(config)))
    assert summary.unscored == {"a": 1, "b": 1, "a/unscored_cut": 1.0}
    assert summary.reward_parts == {"a": 0.5, "b": 4.0}


def test_an_empty_completion_is_masked_and_counted(config):
    group = Group(
        1, Prompt(3, 0, "p", (1, 2)), (trajectory(4), EMPTY, trajectory(2)), "replica", 1.0, 2.0
    )
    row = score_table(
        attach_rewards(
            groups_to_table([group]), GroupRewards({"a": [1.0, 1.0, 0.0], "b": [0.0] * 3})
        ),
        scoring_spec(config),
    )
    summary = summaries(row)[0]
    assert row["status"][0].as_py() == ["ok", "no_token", "ok"] and row["advantage"][0].as_py() == [
        0.5,
        None,
        -0.5,
    ]
    assert (summary.usable, dict(summary.masked), summary.oldest_version) == (2, {"no_token": 1}, 2)


def test_a_group_with_every_trajectory_masked_has_no_advantage_and_says_why(config):
    group = Group(
        1,
        Prompt(3, 0, "p", (1, 2)),
        (trajectory(2, math.nan), trajectory(5), EMPTY),
        "replica",
        1.0,
        2.0,
    )
    row = score_table(
        attach_rewards(
            groups_to_table([group]), GroupRewards({"a": [1.0, 0.0, 1.0], "b": [0.0] * 3})
        ),
        scoring_spec(config),
    )
    summary = summaries(row)[0]
    assert row["advantage"][0].as_py() == [None] * 3
    assert (summary.usable, summary.rewards, dict(summary.masked)) == (
        0,
        (),
        {"bad_logprob": 1, "over_long": 1, "no_token": 1},
    )


def test_a_long_example_loses_its_secrets_before_its_middle(config, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "correct-horse-battery-staple")
    text = f"{'x' * 490}correct-horse-battery-staple{'y' * 800}"
    group = Group(1, Prompt(3, 0, text, (1, 2)), (trajectory(2, text=text),), "replica", 1.0, 2.0)
    row = attach_rewards(groups_to_table([group]), GroupRewards({"a": [1.0], "b": [0.0]}))
    example = examples(score_table(row, scoring_spec(config)))[0]
    assert "correct" not in example.prompt + example.completion and len(example.prompt) < 1100


def test_a_group_of_one_learns_from_what_does_not_compare(config):
    group = Group(1, Prompt(3, 0, "p", (1, 2)), (trajectory(2),), "replica", 1.0, 2.0)
    alone = config.model_copy(
        update={"algorithm": config.algorithm.model_copy(update={"advantage": ReinforcePlusPlus()})}
    )
    row = score_table(
        attach_rewards(groups_to_table([group]), GroupRewards({"a": [1.0], "b": [0.0]})),
        scoring_spec(alone),
    )
    assert (row["status"][0].as_py(), row["advantage"][0].as_py()) == (["ok"], [1.0])


def test_a_group_given_up_has_a_failure_and_nothing_usable(config):
    group = Group(1, Prompt(3, 0, "p", (1, 2)), (trajectory(1), trajectory(1)), "replica", 1.0, 2.0)
    row = score_table(
        attach_rewards(
            groups_to_table([group]),
            GroupRewards({"a": [None, None], "b": [None, None]}, "too slow"),
        ),
        scoring_spec(config),
    )
    summary = summaries(row)[0]
    assert (summary.failure, summary.usable, summary.rewards, summary.reward_parts) == (
        "too slow",
        0,
        (),
        {},
    )


def test_two_groups_in_one_block_score_like_one_each(config):
    groups = [
        Group(1, Prompt(i, 0, "p", (1, 2)), (trajectory(1), trajectory(2)), "replica", 1.0, 2.0)
        for i in range(2)
    ]
    tables = [
        attach_rewards(
            groups_to_table([group]), GroupRewards({"a": [float(i), 1.0], "b": [0.0, 0.0]})
        )
        for i, group in enumerate(groups)
    ]
    scored = score_table(pa.concat_tables(tables), scoring_spec(config))
    assert scored["advantage"].to_pylist() == [[-0.5, 0.5], [0.0, 0.0]]


async def test_completions_are_scored_outside_the_stream(reward_config):
    with RewardPool(reward_config("by_length", "all_columns")) as pool:
        spans = (VersionSpan(0, 0, 2),)
        completions = [
            Completion((1, 2), (-1.0, -1.0), spans, "stop", text) for text in ("a", "bc")
        ]
        scores = [
            await score_completions(
                pool, Prompt(0, 0, "p", (1,), {"answer": answer, "extra": 7}), completions
            )
            for answer in "xy"
        ]
    assert scores == [
        {"by_length": [1.0, 2.0], "all_columns": [1.0, 1.0]},
        {"by_length": [1.0, 2.0], "all_columns": [0.0, 0.0]},
    ]


def test_the_last_tokens_before_the_limit_cost_reward(config):
    tree = config.model_dump()
    tree["reward"] |= {"overlong": {"buffer": 2, "penalty": 0.5}}
    group = Group(
        1,
        Prompt(3, 0, "p", (1, 2), {}),
        (trajectory(1), trajectory(3), trajectory(4, reason="length")),
        "replica",
        1.0,
        2.0,
    )
    rewards = GroupRewards({"a": [1.0, 1.0, None], "b": [1.0, 1.0, 1.0]})
    [scored] = groups_from_table(
        score_table(
            attach_rewards(groups_to_table([group]), rewards),
            scoring_spec(Config.model_validate(tree)),
        )
    )
    assert [t.reward for t in scored.trajectories] == [1.0, 0.75, None]
    assert [t.advantage for t in scored.trajectories] == [0.125, -0.125, None]


def test_the_overlong_penalty_counts_from_where_max_length_ends_a_completion(config):
    tree = config.model_dump()
    tree["reward"] |= {"overlong": {"buffer": 2, "penalty": 0.5}}
    tree["data"] |= {"max_length": 5}
    group = Group(
        1,
        Prompt(3, 0, "p", (1, 2), {}),
        (trajectory(1), trajectory(2), trajectory(3, reason="length"), trajectory(4)),
        "replica",
        1.0,
        2.0,
    )
    rewards = GroupRewards({"a": [1.0] * 4, "b": [1.0] * 4})
    [scored] = groups_from_table(
        score_table(
            attach_rewards(groups_to_table([group]), rewards),
            scoring_spec(Config.model_validate(tree)),
        )
    )
    assert [t.reward for t in scored.trajectories] == [1.0, 0.75, 0.5, 0.5]
    assert [t.status for t in scored.trajectories] == ["ok", "ok", "ok", "over_long"]


def test_kl_from_the_reference_is_taken_from_the_reward(config):
    config = Config.model_validate(
        config.model_dump() | {"algorithm": {"advantage": "dr_grpo", "reference": {"kl_coef": 0.5}}}
    )
    group = Group(
        1,
        Prompt(3, 0, "p", (1, 2)),
        (trajectory(2), trajectory(4), trajectory(2, math.nan)),
        "replica",
        1.0,
        2.0,
    )
    rewarded = attach_rewards(
        groups_to_table([group]), GroupRewards({"a": [1.0, 1.0, 1.0], "b": [0.0, 0.0, 0.0]})
    )
    referred = attach_reference(
        rewarded, [np.float32([-1.5, -1.0]), np.float32([-1.0] * 4), np.float32([-1.0, -1.0])]
    )
    referred = attach_reference_version(referred, 8)
    [scored] = groups_from_table(score_table(referred, scoring_spec(config)))
    # the first: -1.0 - -1.5 = 0.5 nats, multiplied by kl_coef = 0.5
    assert [t.reward for t in scored.trajectories] == [0.75, 1.0, 1.0]
    assert [t.status for t in scored.trajectories] == ["ok", "ok", "bad_logprob"]
    assert [t.advantage for t in scored.trajectories] == [-0.125, 0.125, None]
    assert scored.trajectories[0].reference_logprobs == (-1.5, -1.0)
    assert [
        t.reference_logprobs for t in groups_from_table(groups_to_table([scored]))[0].trajectories
    ] == [t.reference_logprobs for t in scored.trajectories]
    assert groups_from_table(groups_to_table([scored]))[0].reference_version == 8


def test_reference_log_probs_that_are_not_finite_mask_their_trajectory(config):
    """They must not count as a KL of 0 or put NaN into the loss."""
    tree = config.model_dump() | {
        "algorithm": {"advantage": "dr_grpo", "reference": {"kl_loss_coef": 0.1}}
    }
    group = Group(
        1,
        Prompt(3, 0, "p", (1, 2)),
        (trajectory(2), trajectory(2), trajectory(1)),
        "replica",
        1.0,
        2.0,
    )
    rewards = GroupRewards({"a": [1.0, 0.0, 0.0], "b": [0.0] * 3})
    reference = [np.array([-1.0, -2.0]), np.array([-1.0, math.nan]), np.array([-1.0])]
    row = score_table(
        attach_reference(attach_rewards(groups_to_table([group]), rewards), reference),
        scoring_spec(Config.model_validate(tree)),
    )
    assert row["status"][0].as_py() == ["ok", "bad_logprob", "ok"] and row["advantage"][
        0
    ].as_py() == [0.5, None, -0.5]


def test_a_completion_ended_in_a_loop_counts_as_truncated_and_as_long_as_it_could_have_been(config):
    tree = config.model_dump()
    tree["reward"] |= {"overlong": {"buffer": 2, "penalty": 0.5}}
    group = Group(
        1,
        Prompt(3, 0, "p", (1, 2), {}),
        (trajectory(2), trajectory(2, reason="repetition"), trajectory(4, reason="length")),
        "replica",
        1.0,
        2.0,
    )
    row = score_table(
        attach_rewards(groups_to_table([group]), GroupRewards({"a": [1.0] * 3, "b": [1.0] * 3})),
        scoring_spec(Config.model_validate(tree)),
    )
    assert row["reward"].to_pylist() == [[1.0, 0.5, 0.5]] and row["status"].to_pylist() == [
        ["ok"] * 3
    ]
    assert summaries(row)[0].truncated == 2


def test_signs_of_gibberish_are_counted(config):
    trajectories = (
        trajectory(4, -0.5, text="1+2\n"),
        trajectory(40, math.nan),
        trajectory(31, -2.0, text="\ufffd\x00ab"),
    )
    group = Group(1, Prompt(3, 0, "p", (1, 2), {}), trajectories, "replica", 1.0, 2.0)
    row = score_table(
        attach_rewards(groups_to_table([group]), GroupRewards({"a": [1.0] * 3, "b": [1.0] * 3})),
        scoring_spec(config),
    )
    summary = summaries(row)[0]
    assert (summary.logprob_sum, summary.looping, summary.characters, summary.unprintable) == (
        -64.0,
        1,
        8,
        2,
    )


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        # Lengths 4, 1, 3 and rewards 1, 0, 2: the baseline is 10 / 8.
        (Opo(), [1 - 1.25, -1.25, 2 - 1.25]),
        # Only the last one passes. Of its subsets of two, both do; of the others', one of two.
        (
            PassAtK(pass_k=2, pass_threshold=2.0),
            [(0.5 - 2 / 3) / math.sqrt(2 / 9)] * 2 + [(1 - 2 / 3) / math.sqrt(2 / 9)],
        ),
        # a: mean 1, std sqrt(2 / 3). b: mean 2, std sqrt(8 / 3), with a weight of -3.
        (
            Gdpo(),
            [-6 / math.sqrt(8 / 3), 6 / math.sqrt(8 / 3) - math.sqrt(1.5), math.sqrt(1.5)],
        ),
    ],
)
def test_advantages_of_more_than_the_total_reward(config, advantage, expected):
    functions = {name: function.model_copy() for name, function in config.reward.functions.items()}
    if isinstance(advantage, Gdpo):
        functions["b"] = functions["b"].model_copy(update={"weight": -3.0})
    changed = config.model_copy(
        update={
            "algorithm": config.algorithm.model_copy(update={"advantage": advantage}),
            "reward": config.reward.model_copy(update={"functions": functions}),
        }
    )
    members = (trajectory(4), trajectory(1), trajectory(2, math.nan), trajectory(3))
    group = Group(1, Prompt(3, 0, "p", (1, 2)), members, "replica", 1.0, 2.0)
    rewards = GroupRewards({"a": [1.0, 0.0, 9.0, 2.0], "b": [4.0, 0.0, 9.0, 2.0]})
    row = score_table(attach_rewards(groups_to_table([group]), rewards), scoring_spec(changed))
    found = row["advantage"][0].as_py()
    assert found.pop(2) is None and found == pytest.approx(expected, rel=1e-4)


def test_rewards_of_tokens_are_a_column_that_the_learner_reads(config):
    group = Group(
        1,
        Prompt(3, 0, "p", (1, 2)),
        (trajectory(3), trajectory(2), trajectory(2)),
        "replica",
        1.0,
        2.0,
    )
    rewards = GroupRewards(
        {"a": [1.5, 1.0, None], "b": [0.0] * 3}, tokens=[[0.5, 0.0, 1.0], [0.0, 1.0], None]
    )
    row = score_table(attach_rewards(groups_to_table([group]), rewards), scoring_spec(config))
    assert row["token_rewards"].to_pylist() == [[[0.5, 0.0, 1.0], [0.0, 1.0], None]]
    [scored] = groups_from_table(row)
    assert [t.token_rewards for t in scored.trajectories] == [(0.5, 0.0, 1.0), (0.0, 1.0), None]
    assert groups_from_table(groups_to_table([scored])) == [scored]
    assert [example.token_rewards.tolist() for example in examples_of(row)] == [
        [0.5, 0.0, 1.0],
        [0.0, 1.0],
    ]
    without = score_table(
        attach_rewards(
            groups_to_table([group]), GroupRewards({"a": [1.5, 1.0, None], "b": [0.0] * 3})
        ),
        scoring_spec(config),
    )
    assert (
        "token_rewards" not in without.column_names
        and examples_of(without)[0].token_rewards is None
    )


async def test_saving_groups_reads_the_object_store_off_the_event_loop(monkeypatch, tmp_path):
    import threading

    from asyncrl.rewards import scoring

    asked = []
    monkeypatch.setattr(
        scoring,
        "groups_at",
        lambda references: asked.append((references, threading.current_thread())) or references,
    )
    monkeypatch.setattr(scoring, "write_groups", lambda path, groups: asked.append((path, groups)))
    scores = scoring.RayScores.__new__(scoring.RayScores)
    await scores.save([Scored(0, 0, ref, 0, (), {}, 0, 0) for ref in "ab"], tmp_path / "x")
    assert (
        asked[0][0] == ["a", "b"]
        and asked[0][1] is not threading.main_thread()
        and asked[1] == (tmp_path / "x", ["a", "b"])
    )


OWN = """
def keep(rewards, truncated):
    return bool(rewards.max() > 0 and not truncated.any())

def halves(rewards):
    return rewards / 2

def broken(rewards):
    return rewards[:-1]
"""


@pytest.fixture
def own(tmp_path, monkeypatch, config):
    """`own(rewards, advantage=…, group_filter=…)`: a group of two, scored with the user's own
    functions."""
    (tmp_path / "own_in_scoring.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))

    def score(rewards, reason="stop", **algorithm):
        named = {name: f"own_in_scoring:{function}" for name, function in algorithm.items()}
        group = Group(
            1,
            Prompt(3, 0, "p", (1, 2)),
            (trajectory(2), trajectory(2, reason=reason)),
            "replica",
            1.0,
            2.0,
        )
        tree = config.model_dump()
        tree["algorithm"] = named
        row = score_table(
            attach_rewards(groups_to_table([group]), GroupRewards({"a": rewards, "b": [0.0, 0.0]})),
            scoring_spec(Config.model_validate(tree)),
        )
        return row, summaries(row)[0]

    return score


def test_an_own_filter_says_which_groups_are_trained(own):
    assert own([1.0, 0.0], group_filter="keep")[1].failure is None
    assert (
        own([0.0, 0.0], group_filter="keep")[1].failure
        == "filtered: own_in_scoring:keep returned False"
    )
    assert (
        own([1.0, 0.0], "length", group_filter="keep")[1].failure
        == "filtered: own_in_scoring:keep returned False"
    )
    masked = own([1.0, None], group_filter="keep")[1]
    assert masked.failure is None and masked.usable == 1, (
        "too few usable trajectories: dropped, and no filter asked"
    )


def test_an_own_advantage_is_the_rows_and_one_that_fails_costs_its_group(own):
    assert own([1.0, 0.5], advantage="halves")[0]["advantage"][0].as_py() == [0.5, 0.25]
    failure = own([1.0, 0.5], advantage="broken")[1].failure
    assert (
        failure.startswith("not foreseen: ")
        and "own_in_scoring.py:8) returned shape [1]; return shape [2]" in failure
    )


def test_preferences_have_rewards_and_no_advantages(config):
    tree = config.model_dump()
    tree["algorithm"] = {"preference": {"pairs": {"missing_eos_penalty": 0.5}}}
    trajectories = (trajectory(2, reason="length"), trajectory(2), trajectory(2))
    group = Group(1, Prompt(3, 0, "p", (1, 2)), trajectories, "replica", 1.0, 2.0)
    rewarded = attach_rewards(
        groups_to_table([group]), GroupRewards({"a": [1.0, 0.0, None], "b": [0.0] * 3})
    )
    referred = attach_reference(rewarded, [np.zeros(2, np.float32) for _ in range(3)])
    row = score_table(referred, scoring_spec(Config.model_validate(tree)))
    assert row["advantage"][0].as_py() == [None, None, None]
    assert row["reward"][0].as_py() == [1.0, 0.0, None], "the penalty belongs to the pairs"
    assert row["status"][0].as_py() == ["ok", "ok", "unscored"]
    assert row["reference_logprobs"][0].as_py() == [[0.0, 0.0]] * 3


def remax_row(config, baseline, rewards, **reward):
    """The scored one-row table of a group of two, with a baseline, and what its rewards got."""
    tree = config.model_dump()
    tree["algorithm"] |= {"advantage": "remax"}
    tree["reward"] |= reward
    tree["reward"]["functions"]["b"]["weight"] = 0.5
    members = (trajectory(1, text="x"), trajectory(2, text="y"))
    prompt = Prompt(3, 0, "p", (1, 2), {"answer": "z"})
    group = Group(1, prompt, members, "replica", 1.0, 2.0, baseline=Baseline(baseline))
    table = groups_to_table([group])
    scored = score_table(attach_rewards(table, rewards), scoring_spec(Config.model_validate(tree)))
    return scored, group_call(table)


def test_remax_compares_with_the_greedy_completion_under_the_same_rewards(config):
    """Totals are a + b / 2 less the overlong penalty: 1.0 and 2.0, and 0.5 + 1.0 - 0.25 of the
    greedy completion."""
    greedy = trajectory(3, version=1, text="g").completion
    rewards = GroupRewards({"a": [0.0, 1.0, 0.5], "b": [2.0, 2.0, 2.0], "b/part": [1.0, 2.0, 3.0]})
    table, call = remax_row(config, greedy, rewards, overlong={"buffer": 2, "penalty": 0.5})
    assert call.completions == ["x", "y", "g"] and call.prompts == ["p"] * 3
    assert [len(ids) for ids in call.completion_ids] == [1, 2, 3]
    assert (call.finish_reasons, call.columns) == (["stop"] * 3, {"answer": "z"})
    [group] = groups_from_table(table)
    assert [t.reward for t in group.trajectories] == [1.0, 2.0] and group.baseline.reward == 1.25
    assert [t.advantage for t in group.trajectories] == [-0.25, 0.75]
    assert dict(group.baseline.reward_parts) == {"a": 0.5, "b": 2.0, "b/part": 3.0}
    assert dict(group.trajectories[1].reward_parts) == {"a": 1.0, "b": 2.0, "b/part": 2.0}
    assert groups_from_table(groups_to_table([group])) == [group]
    examples = examples_of(table)
    assert [example.advantage for example in examples] == [-0.25, 0.75], "it is not trained"
    summary = summaries(table)[0]
    assert (summary.usable, summary.rewards, summary.tokens) == (2, (1.0, 2.0), 3)
    assert (summary.oldest_version, summary.newest) == (1, 2), "its version is one of the group"
    assert summary.baseline == ScoredBaseline(1.25, 3, truncated=False)
    assert summary.failure is None and not summary.masked and not summary.unscored["a"]


@pytest.mark.parametrize(
    ("completion", "of_baseline", "reason"),
    [
        (trajectory(3).completion, None, "the greedy completion could not be scored"),
        (EMPTY.completion, 1.0, "the greedy completion has no token"),
    ],
)
def test_a_group_whose_baseline_has_no_reward_is_dropped(config, completion, of_baseline, reason):
    rewards = GroupRewards({"a": [0.0, 1.0, of_baseline], "b": [0.0] * 3})
    table, _ = remax_row(config, completion, rewards)
    summary = summaries(table)[0]
    assert summary.failure == NO_BASELINE + reason
    assert summary.usable == 2 and summary.baseline.reward is None
    assert table["advantage"][0].as_py() == [None, None], "never a baseline of zero"


def test_a_greedy_completion_that_was_cut_off_is_a_baseline_like_its_siblings(config):
    """One that was ended in a loop counts as the longest, 4 tokens, for the overlong penalty."""
    looped = trajectory(2, reason="repetition").completion
    rewards = GroupRewards({"a": [0.0, 1.0, 0.0], "b": [0.0] * 3})
    table, call = remax_row(config, looped, rewards, overlong={"buffer": 2, "penalty": 0.5})
    assert call.truncated == [False, False, True]
    summary = summaries(table)[0]
    assert summary.baseline == ScoredBaseline(-0.5, 2, truncated=True) and summary.truncated == 0
    assert table["advantage"][0].as_py() == [0.5, 1.5]


def test_token_rewards_of_a_baseline_are_not_those_of_a_trajectory(config):
    rewards = GroupRewards(
        {"a": [1.0, 3.0, 1.0], "b": [0.0] * 3}, tokens=[[1.0], [1.0, 2.0], [1.0, 0.0, 0.0]]
    )
    table, _ = remax_row(config, trajectory(3).completion, rewards)
    assert table["token_rewards"][0].as_py() == [[1.0], [1.0, 2.0]]
    assert table["advantage"][0].as_py() == [0.0, 2.0]


def test_rewards_that_failed_are_missing_for_the_baseline_too(config):
    raised = Future()
    raised.set_exception(RewardError("it raised"))
    baseline = Baseline(trajectory(3).completion)
    members = (trajectory(1), trajectory(2))
    group = Group(1, Prompt(3, 0, "p", (1, 2)), members, "replica", 1.0, 2.0, baseline=baseline)
    table = groups_to_table([group])
    table = attach_rewards(table, _result(config.reward, table, raised))
    remax = config.model_copy(
        update={"algorithm": config.algorithm.model_copy(update={"advantage": ReMax()})}
    )
    summary = summaries(score_table(table, scoring_spec(remax)))[0]
    assert summary.failure == "it raised" and summary.baseline.reward is None
    assert summary.usable == 0 and summary.unscored == {"a": 2, "b": 2}


def test_the_summaries_of_a_block_are_those_of_its_rows(config):
    """Nothing leaks from one group into the next: empty completions, unequal sizes, nulls."""
    loop = trajectory(40)
    loop = replace(loop, completion=replace(loop.completion, token_ids=(7,) * 40, text="\x00" * 9))
    members = [
        (trajectory(4, version=3), trajectory(2, math.nan)),
        (loop, trajectory(31)),
        (EMPTY, EMPTY),
        (trajectory(33), trajectory(1), trajectory(5, version=1)),
    ]
    rows = []
    for ordinal, some in enumerate(members):
        group = Group(1, Prompt(ordinal, 0, f"p{ordinal}", (1,), {}), some, "replica", 1.0, 2.0)
        parts: list[float | None] = [float(place) for place in range(len(some))]
        parts[-1] = None if ordinal == 3 else 1.0
        rewards = GroupRewards({"a": parts, "b": [0.5] * len(some)})
        rows.append(
            score_table(attach_rewards(groups_to_table([group]), rewards), scoring_spec(config))
        )
    block = pa.concat_tables(rows)
    assert summaries(block) == [summaries(row)[0] for row in rows]
    assert summaries(block.slice(1, 2)) == summaries(block)[1:3]
    for scored in summaries(block):
        whole = replace(
            scored,
            content="0a",
            failure='a "reason"\n\ud800',
            baseline=ScoredBaseline(0.1, 3, True),
            logprob_sum=-1 / 3,
        )
        for one in (scored, whole, replace(whole, rewards=(math.inf,), masked={"unscored": 2})):
            assert scored_from_text(scored_to_text(one)) == one
    assert examples(block) == [examples(row)[0] for row in rows]
    assert [example.version for example in examples(block)] == [3, 2, 0, 2]
    # A trajectory that is not trained has no say: over-long, unscored, or with a NaN log-prob.
    assert [found.versions for found in summaries(block)] == [(3,), (), (), (2,)]
    assert [found.oldest_version for found in summaries(block)] == [2, 2, 0, 1]
    assert [found.looping for found in summaries(block)] == [0, 1, 0, 1]
    assert [found.unprintable for found in summaries(block)] == [0, 9, 0, 0]
    assert summaries(block.slice(0, 0)) == examples(block.slice(0, 0)) == []
