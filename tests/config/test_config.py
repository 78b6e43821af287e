"""Each refusal names the field, the value and the fix, and every shipped YAML is a valid config."""

import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
import yaml

from asyncrl.config import (
    Config,
    ConfigError,
    OfflineConfig,
    Source,
    field_names,
    load_any,
    load_config,
)
from asyncrl.config.aliases import explain_unknown, other_names
from asyncrl.config.fields import settings_of
from asyncrl.contracts.section import kinds_of

ROOT = Path(__file__).parents[2]
TREE = {
    "name": "run",
    "max_steps": 3,
    "model": {"path": "model"},
    "data": {"train": "train.parquet", "max_prompt_length": 20},
    "rollout": {"max_completion_length": 8},
    "reward": {"functions": {"exact": {"function": "package.module:function"}}},
}


def merged(changes):
    tree = yaml.safe_load(yaml.safe_dump(TREE))
    for name, value in changes.items():
        *parents, leaf = name.split(".")
        at = tree
        for parent in parents:
            at = at.setdefault(parent, {})
        at[leaf] = value
    return tree


def load(tmp_path, changes=(), overrides=None):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(merged(dict(changes))))
    return load_config(path, overrides)


def test_batch_arithmetic(tmp_path):
    config = load(
        tmp_path,
        {
            "rollout.rollout_batch_size": 12,
            "rollout.n_samples_per_prompt": 4,
            "rollout.num_steps_per_rollout": 3,
        },
    )
    assert (
        config.groups_per_step,
        config.global_batch_size,
        config.max_outstanding,
        config.longest_trajectory,
    ) == (4, 16, 12, 28)


def test_max_length_bounds_prompt_plus_completion(tmp_path):
    config = load(tmp_path, {"data.max_length": 24, "learner.max_tokens_per_gpu": 24})
    assert (config.longest_trajectory, config.longest_prompt, config.longest_request) == (
        24,
        20,
        24,
    )
    assert [config.completion_room(tokens) for tokens in (1, 16, 17, 20)] == [8, 8, 7, 4]
    # A prompt that may fill max_length alone leaves one token for the completion, and one for a
    # probe of the log-prob check.
    config = load(tmp_path, {"data.max_length": 10, "learner.max_tokens_per_gpu": 10})
    assert (
        config.longest_trajectory,
        config.longest_prompt,
        config.longest_request,
        config.probe_tokens,
    ) == (10, 9, 10, 1)
    config = load(tmp_path, {"data.max_length": 10})
    assert (config.probe_tokens, config.longest_request) == (64, 73)
    config = load(tmp_path)
    assert (
        config.longest_trajectory,
        config.longest_prompt,
        config.completion_room(20),
        config.longest_request,
    ) == (28, 20, 8, 84)


def test_evaluation_sets_default_to_the_rollout_and_eval_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load(tmp_path).evaluation_sets == {}
    sets = {
        "long": {"n": 4, "max_completion_length": 90},
        "other": {"data": "{runs_root}/o.parquet", "temperature": 0.6, "max_prompts": 7},
    }
    config = load(
        tmp_path,
        {
            "eval": {"data": "e.parquet", "sets": sets},
            "rollout.temperature": 0.8,
            "runs_root": str(tmp_path / "all"),
        },
    )
    found = {
        name: (one.data, one.n, one.temperature, one.max_completion_length, one.max_prompts)
        for name, one in config.evaluation_sets.items()
    }
    held_out = str(tmp_path / "e.parquet")
    assert found == {
        "greedy": (held_out, 1, 0.0, None, 1024),
        "sampled": (held_out, 1, 0.8, None, 1024),
        "long": (held_out, 4, 0.8, 90, 1024),
        "other": (str(tmp_path / "all" / "o.parquet"), 1, 0.6, None, 7),
    }
    assert list(found) == ["greedy", "sampled", "long", "other"]
    assert config.longest_request == 20 + 90, (
        "the engines must take the longest completion of any set"
    )
    assert [*load(tmp_path, {"eval.sets": {"other": {"data": "o"}}}).evaluation_sets] == ["other"]
    given = load(tmp_path, {"eval.data": "e"}, ["--eval.sets", '{"long": {"n": 4}}'])
    assert given.eval.sets["long"].n == 4


ON_ONE_GPU = {
    "placement": "share",
    "learner.device": "cuda",
    "generator.device": "cuda",
}
IN_TURNS = {**ON_ONE_GPU, "placement": "colocate"}
REINFORCE = {
    "algorithm.loss": "reinforce",
    "staleness.max_staleness": 0,
}
"""An objective that asks for no log-prob of the generator's."""
WARM = {"warm_start.data": "w", "eval.data": "e"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"generator.min_replicas": 3, "generator.num_replicas": 2},
            r"generator.min_replicas = 3 is above generator.num_replicas = 2; lower it",
        ),
        (
            {"generator.attach": "standing", "generator.min_replicas": 1},
            r"^generator\.min_replicas has no effect with generator\.attach; leave one of them",
        ),
        (
            {"generator.attach": "standing", "generator.num_replicas": 2},
            r"^generator\.num_replicas has no effect with generator\.attach; leave one of them",
        ),
        (
            {"generator.attach": "standing", "generator.in_flight": "keep"},
            r"^generator\.in_flight has no effect with generator\.attach; leave one of them out$",
        ),
        (
            {"generator.attach": "standing", "generator.nnodes": 2},
            r"^generator\.nnodes has no effect with generator\.attach; leave one of them out$",
        ),
        (
            {"placement": "colocate", "generator.nnodes": 2},
            r"^generator\.nnodes = 2 does not divide tensor_parallel_size",
        ),
        (
            {"generator.attach": "standing", "generator.max_num_seqs": 64},
            r"^generator\.max_num_seqs has no effect with generator\.attach; leave one of them",
        ),
        (
            {"data.max_length": 29},
            (
                "data.max_length = 29 is above data.max_prompt_length \\+"
                " rollout.max_completion_length = 28, so it has no effect"
            ),
        ),
        ({"data.max_length": 1}, "data.max_length = 1: input should be greater than 1"),
        (
            {"data.max_length": 24, "learner.max_tokens_per_gpu": 23},
            (
                "data.max_length = 24 is above learner.max_tokens_per_gpu = 23; .*lower"
                " data.max_length"
            ),
        ),
        (
            {"data.length_policy": "drop"},
            "data.length_policy = 'drop' only has an effect with warm_start.data and",
        ),
        (
            {"data.length_policy": "drop", "data.max_length": 21},
            "data.length_policy = 'drop' only has an effect with",
        ),
        (
            {"data.length_side": "keep_end", "data.max_length": 20},
            r"^data.length_side has moved; write data: {length_policy: {name: truncate, side: …}}$",
        ),
        (
            {"data.length_policy": {"name": "drop", "side": "keep_end"}, "data.max_length": 20},
            "data.length_policy.side has no effect with length_policy: drop; .* truncate$",
        ),
        (
            {"warm_start.completion_policy": "drop", **WARM},
            "warm_start.completion_policy has moved; write warm_start: {packing_strategy: {name: …",
        ),
        *(
            ({f"warm_start.{name}": value}, r"^warm_start\.data is missing; set it$")
            for name, value in (
                ("target_column", "text"),
                ("packing_strategy", "wrapped"),
                ("packing_strategy", {"name": "bfd", "completion_policy": "drop"}),
                ("min_accuracy", 0.1),
                ("max_accuracy", 0.9),
                ("learning_rate", 1e-4),
                ("batch_size", 8),
                ("check_every_steps", 5),
                ("max_steps", 9),
            )
        ),
        (
            {"rollout.repetition_ngram": 4},
            "rollout.repetition_ngram has moved; write rollout: {repetition_stop: {times: …, ngram",
        ),
        (
            {"rollout.repetition_stop": {"ngram": 4}},
            "rollout.repetition_stop.times is missing; set it",
        ),
        (
            {"rollout.repetition_stop": 20, "rollout.ignore_eos": True},
            "rollout.repetition_stop = 20 only has an effect with rollout.ignore_eos: false",
        ),
        (
            {
                **WARM,
                "warm_start.packing_strategy": {"name": "bfd_split", "completion_policy": "drop"},
            },
            "packing_strategy.completion_policy has no effect with packing_strategy: bfd_split;"
            " leave it out, or use it with packing_strategy: bfd or wrapped",
        ),
        (
            {**WARM, "warm_start.packing_strategy": {"completion_policy": "split"}},
            "packing_strategy.completion_policy = 'split': input should be 'truncate', 'drop' or",
        ),
        ({"data.truncation_mode": "keep_end"}, "asyncrl calls it data.length_policy.side"),
        ({"rollout.rollout_max_context_len": 100}, "asyncrl calls it data.max_length"),
        ({"max_length": 100}, "did you mean data.max_length"),
    ],
)
def test_contradictory_lengths_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, changes)


def test_length_policy_applies_to_prompts_that_fill_max_length_and_to_supervised_rows(tmp_path):
    policy = {"data.length_policy": {"name": "truncate", "side": "keep_end"}}
    assert load(tmp_path, {**policy, "data.max_length": 20}).judges_length
    dropped = {"warm_start.packing_strategy.completion_policy": "drop"}
    rows = load(tmp_path, {**policy, **WARM, **dropped, "data.max_length": 21})
    assert rows.judges_length and not rows.warm_start.splits
    for strategy in ("bfd_split", {"name": "wrapped", "completion_policy": "split"}):
        assert load(tmp_path, {**WARM, "warm_start.packing_strategy": strategy}).warm_start.splits


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"loss": "grpo"}, "algorithm.loss = 'grpo': use one of ppo, clip_cov, .* or your own fun"),
        ({"advantage": "a2c"}, "algorithm.advantage = 'a2c': use one of grpo"),
        (
            {"loss": {"old_policy": "learner"}},
            r"uncorrected, and staleness.max_staleness = 2 .*allow_uncorrected",
        ),
        ({"loss": "reinforce"}, "'reinforce' with old_policy: learner .* is uncorrected, and"),
        ({"correction": {"truncation": "token"}}, "count the behavior policy twice"),
        (
            {"loss": {"name": "gspo", "old_policy": "behavior"}, "correction": {"truncation": {}}},
            "correction.truncation: token with old_policy: behavior of loss: gspo would count",
        ),
        (
            {"loss": {"name": "reinforce", "old_policy": "behavior"}},
            "loss.old_policy has no effect with loss: reinforce; leave it out, or use it with loss",
        ),
        (
            {"loss": {"name": "dppo", "old_policy": "learner"}},
            "loss.old_policy has no effect with loss: dppo; leave it out",
        ),
        (
            {"loss": {"name": "gspo", "dual_clip": 3.0}},
            r"loss\.dual_clip has no effect with loss: gspo; leave it out, or use .* loss: ppo$",
        ),
        *(
            (
                {"loss": {"name": name, "old_policy": "learner"}},
                r"loss\.old_policy = 'learner': input should be 'behavior' or 'log_linear'",
            )
            for name in ("gspo", "gmpo", "cispo", "sapo", "kl_cov")
        ),
        ({"filter_zero_variance": True, "advantage": "reinforce_plus_plus"}, "learns from"),
        (
            {"reference": {"kl_coef": 0.1}},
            r"algorithm\.reference\.kl_coef = 0.1 does not work with advantage: grpo. In a group"
            " with equal rewards",
        ),
        (
            {
                "reference": {"kl_coef": 0.1},
                "advantage": "rloo",
                "filter_zero_variance": True,
            },
            r"algorithm\.filter_zero_variance has no effect with reference\.kl_coef, which makes"
            " all rewards different",
        ),
        (
            {"advantage": "gae", "correction": {"sequence_mask": {"above": 0.1}}},
            r"algorithm\.advantage: gae gives each token .*correction\.sequence_mask needs one per"
            " trajectory; leave one of them out",
        ),
        ({"correction": {"cap": 3.0}}, "cap has moved; write algorithm: {correction: {truncation"),
        ({"advantage": "gae", "reference": {"kl_coef": 0.1}}, "gae.*; use kl_loss_coef"),
        (
            {"advantage": "remax", "reference": {"kl_coef": 0.1}},
            r"kl_coef = 0.1 does not work with advantage: remax.* no log-probs .*; use kl_loss",
        ),
        (
            {"advantage": "remax", "distillation": {"teacher": "m"}},
            r"algorithm.advantage has no effect with .*reward_weight = 0",
        ),
        (
            {"advantage": "remax", "preference": {}},
            r"algorithm\.advantage has no effect with algorithm\.preference; leave one of them out",
        ),
        (
            {"advantage": "reinforce_plus_plus", "reference": {"kl_coef": 0.1}},
            "reinforce_plus_plus.*; use kl_loss_coef",
        ),
        ({"loss": {"dual_clip": 1.1}}, "loss.dual_clip = 1.1 is not above the upper clip"),
        ({"allow_uncorrected": True}, "only has an effect with an uncorrected loss"),
        *(
            (
                {
                    "loss": {"name": loss, "old_policy": "learner", name: value},
                    "correction": {"truncation": "token"},
                },
                rf"algorithm\.loss\.{name} = {value} has no effect with old_policy: learner, .* set"
                " old_policy: behavior",
            )
            for loss, name, value in (
                ("ppo", "eps_clip", 0.1),
                ("ppo", "eps_clip_high", 0.4),
                ("ppo", "dual_clip", 2.5),
                ("clip_cov", "eps_clip", 0.1),
            )
        ),
        (
            {"reference": {"kl_coef": 0.1, "kl_loss_coef": 0.1}},
            r"^algorithm\.reference: give only one of kl_loss_coef, kl_coef$",
        ),
        (
            {"reference": {"ref_load": "somewhere"}},
            r"^algorithm\.reference: give one of kl_loss_coef, kl_coef$",
        ),
        *(
            (
                {"advantage": "rloo", "reference": {"kl_coef": 0.1, "estimator": estimator}},
                r"reference\.estimator has no effect with algorithm\.reference\.kl_coef; leave one",
            )
            for estimator in ("k2", "k3")
        ),
        (
            {"advantage": "maxrl", "reference": {"kl_coef": 0.1}},
            r"kl_coef = 0.1 lowers rewards, and advantage: maxrl needs rewards of at least 0; use",
        ),
        ({"correction": {"normalize": True}}, r"write algorithm: {correction: {truncation: {lev"),
        (
            {"loss": {"tau_positive": 2.0}},
            r"algorithm\.loss\.tau_positive has no effect with loss: ppo; .* loss: sapo$",
        ),
        (
            {"loss": {"name": "reinforce", "eps_clip": 0.1}, "correction": {"truncation": "token"}},
            "with loss: ppo, clip_cov, gspo, gmpo or cispo$",
        ),
        (
            {"advantage": {"gae_lambda": 0.5}},
            r"gae_lambda has no effect with advantage: grpo; .* advantage: gae$",
        ),
        (
            {"loss": {"name": "vespo", "old_policy": "log_linear"}},
            "loss.old_policy has no effect with loss: vespo",
        ),
        *(
            (
                {"loss": loss, "advantage": "gae"},
                f"gae gives each token .* loss: {loss} needs one per trajectory; leave one of them",
            )
            for loss in ("gmpo", "vespo")
        ),
        (
            {"loss": {"name": "clip_cov", "clip_cov_low": 5.0}},
            r"loss\.clip_cov_low = 5 is not below clip_cov_high = 5, .* lower it",
        ),
        ({"loss": {"cov_share": 0.1}}, "no effect with loss: ppo; .* loss: clip_cov or kl_cov$"),
        (
            {"loss": {"name": "kl_cov", "clip_cov_low": 0.5}},
            "no effect with loss: kl_cov; .* loss: clip_cov$",
        ),
        ({"loss": {"name": "kl_cov", "eps_clip": 0.5}}, "eps_clip has no effect with loss: kl_cov"),
        ({"loss": {"kl_cov_coef": 0.1}}, "no effect with loss: ppo; .* loss: kl_cov$"),
        ({"loss": {"k_positive": 1.0}}, "no effect with loss: ppo; .* loss: vespo$"),
        ({"loss": {"threshold": 0.1}}, "no effect with loss: ppo; .* loss: dppo$"),
        ({"correction": {"floor": 0.5}}, r"write algorithm: {correction: {truncation: {level: tok"),
        ({"advantage": {"pass_k": 2}}, "no effect with advantage: grpo; .* advantage: pass_at_k$"),
        ({"advantage": {"pass_threshold": 0.5}}, "effect with .* advantage: pass_at_k$"),
        ({"advantage": {"bootstrap_truncated": True}}, "effect with .* advantage: gae$"),
        ({"ce": {"min_reward": 0.5}}, r"^algorithm\.ce\.coef is missing; set it$"),
        (
            {"advantage": {"name": "pass_at_k", "pass_k": 8}},
            r"pass_k = 8 is not below rollout\.n_samples_per_prompt = 8.* lower it",
        ),
        (
            {"advantage": "pass_at_k", "reference": {"kl_coef": 0.1}},
            "kl_coef = 0.1 lowers rewards, and advantage: pass_at_k compares .*; use kl_loss_coef",
        ),
        (
            {"advantage": "gdpo", "reference": {"kl_coef": 0.1}},
            "kl_coef = 0.1 lowers rewards, and advantage: gdpo normalizes .*; use kl_loss_coef",
        ),
        ({"advantage": "gdpo", "filter_zero_variance": True}, "gdpo learns from"),
        (
            {"advantage": "grpo_batch_std", "reference": {"kl_coef": 0.1}},
            "does not work with advantage: grpo_batch_std",
        ),
        ({"reference": {"estimator": "k1"}}, "reference: give one of kl_loss_coef, kl_coef"),
        (
            {"correction": {"rejection": {"level": "sequence_sum"}}},
            r"^algorithm\.correction\.rejection\.above is missing; set it$",
        ),
        ({"correction": {"band": {}}}, r"^algorithm\.correction\.band: give below, above or both$"),
    ],
)
def test_contradictory_algorithms_are_refused(tmp_path, algorithm, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, {"algorithm": algorithm})


@pytest.mark.parametrize(
    "algorithm",
    [
        {"loss": {"name": "gmpo", "eps_clip": 0.33, "eps_clip_high": 0.49}},
        {
            "loss": {"name": "gmpo", "old_policy": "log_linear"},
            "correction": {"truncation": "geometric"},
        },
        {"loss": {"name": "vespo", "k_negative": 4.0}},
        {
            "loss": {
                "name": "clip_cov",
                "cov_share": 1e-3,
                "clip_cov_high": 9.0,
                "eps_clip_high": 0.2,
            }
        },
        {
            "loss": {"name": "clip_cov", "old_policy": "learner"},
            "correction": {"truncation": "token"},
        },
        {"loss": {"name": "kl_cov", "kl_cov_coef": 0.1}, "advantage": "gae"},
        {"advantage": "opo", "reference": {"kl_coef": 0.1}},
        {"advantage": {"name": "pass_at_k", "pass_k": 7, "pass_threshold": 0.5}},
        {"advantage": "grpo_batch_std", "filter_zero_variance": True},
        {"advantage": "gdpo"},
        {"advantage": {"name": "gae", "bootstrap_truncated": True}},
        {"advantage": "remax", "reference": {"kl_loss_coef": 0.1}, "filter_zero_variance": True},
        {
            "loss": {"old_policy": "learner"},
            "correction": {"truncation": {"level": "geometric", "floor": 0.5}},
        },
    ],
)
def test_formulas_that_go_together_are_allowed(tmp_path, algorithm):
    found = load(tmp_path, {"algorithm": algorithm}).algorithm
    alone = found.advantage.name in ("gae", "remax")
    assert found.corrected and found.compares_siblings == (not alone)


def test_rewards_that_a_formula_cannot_use_are_refused(tmp_path):
    for advantage, reason in (("pass_at_k", "compares"), ("gdpo", "normalizes")):
        with pytest.raises(
            ConfigError,
            match=rf"reward\.overlong\.buffer = 4 lowers rewards, and .*{advantage} {reason}.*;"
            " leave it out",
        ):
            load(tmp_path, {"reward.overlong": 4, "algorithm.advantage": advantage})
    with pytest.raises(ConfigError, match=r"reward\.shuffle: true permutes total rewards"):
        load(tmp_path, {"reward.shuffle": True, "algorithm.advantage": "gdpo"})
    pairwise = {"duel": {"function": "asyncrl.rewards.builtin:pairwise_judge"}}
    with pytest.raises(ConfigError, match=r"duel compares the completions .* remax would depend"):
        load(tmp_path, {"reward.functions": pairwise, "algorithm.advantage": "remax"})
    negative = {"reward.functions.exact.weight": -1.0, "algorithm.advantage": "maxrl"}
    with pytest.raises(
        ConfigError, match=r"exact\.weight = -1 makes rewards negative, and .*maxrl"
    ):
        load(tmp_path, negative)


def test_a_greedy_completion_is_one_more_for_each_group(tmp_path):
    """Also of groups of one, which remax allows. The most sequences of a generator on a GPU follow
    from it."""
    changes = {"rollout.n_samples_per_prompt": 1, "generator.device": "cuda"}
    alone = {**changes, "algorithm.advantage": "reinforce_plus_plus"}
    for given, completions in ((alone, 1), ({**changes, "algorithm.advantage": "remax"}, 2)):
        found = load(tmp_path, {**given, "rollout.rollout_batch_size": 256})
        assert found.completions_per_group == completions
        assert found.max_num_seqs == min(found.groups_at_once * completions, 512)
    with pytest.raises(ConfigError, match=r"or algorithm\.advantage: remax, reinforce_plus_plus"):
        load(tmp_path, changes)


def test_the_value_after_a_cut_answer_needs_room_for_one_more_token(tmp_path):
    settings = {"algorithm.advantage": {"name": "gae", "bootstrap_truncated": True}}
    with pytest.raises(ConfigError, match=r"one token more .* = 28 .* raise max_tokens_per_gpu"):
        load(tmp_path, {**settings, "learner.max_tokens_per_gpu": 28})
    load(tmp_path, {**settings, "learner.max_tokens_per_gpu": 29})
    load(tmp_path, {"algorithm.advantage": "gae", "learner.max_tokens_per_gpu": 28})


def test_an_uncorrected_loss_is_allowed_by_name_or_when_synchronous(tmp_path):
    for changes in ({"staleness.max_staleness": 0}, {"algorithm.allow_uncorrected": True}):
        assert not load(
            tmp_path, {"algorithm.loss.old_policy": "learner", **changes}
        ).algorithm.corrected


def test_the_overlong_penalty_fits_the_completion_and_the_advantage(tmp_path):
    with pytest.raises(
        ConfigError, match=r"overlong\.buffer = 9 is above rollout.max_completion_length = 8"
    ):
        load(tmp_path, {"reward.overlong": 9})
    with pytest.raises(ConfigError, match="maxrl needs rewards of at least 0"):
        load(tmp_path, {"reward.overlong": 4, "algorithm.advantage": "maxrl"})
    with pytest.raises(ConfigError, match=r"^reward\.overlong\.buffer is missing; set it$"):
        load(tmp_path, {"reward.overlong": {"penalty": 2.0}})


def test_push_timeout_is_longer_than_stall_timeout(tmp_path):
    with pytest.raises(
        ConfigError,
        match=(r"push_timeout_s = 60 is not above generator.stall_timeout_s = 120: .* raise push"),
    ):
        load(tmp_path, {"weights.push_timeout_s": 60})
    load(tmp_path, {"weights.push_timeout_s": 60, "generator.stall_timeout_s": 20})


def test_turns_have_no_staleness_unless_it_is_given(tmp_path):
    assert load(tmp_path, {}).staleness.max_staleness == 2
    turns = load(tmp_path, {"placement": "colocate", "staleness.on_stale": "drop"})
    assert (turns.staleness.max_staleness, turns.staleness.on_stale.name) == (0, "drop")
    path = tmp_path / "config.yaml"
    assert load_config(path, ["--placement", "decoupled"]).staleness.max_staleness == 2


def test_sides_that_take_turns_on_gpus_may_each_use_most_of_the_memory(tmp_path):
    config = load(tmp_path, IN_TURNS)
    assert (config.rank_share, config.engine_share) == (1.0, 0.85)
    assert config.takes_shifts_on_gpus and config.replicas_share_gpus and not config.shares_gpus
    rank, replica = config.rank_gpus, config.replica_gpus
    assert 2 * rank > 1 >= rank + replica > 1 - replica, "one rank and one replica fit on a GPU"
    given = {"learner.gpu_memory_utilization": 0.9, "generator.gpu_memory_utilization": 0.9}
    both = load(tmp_path, IN_TURNS | given)
    assert (both.rank_share, both.engine_share) == (0.9, 0.9)
    assert (both.rank_gpus, both.replica_gpus) == (rank, replica)
    on_cpu = load(tmp_path, {"placement": "colocate", "generator.in_flight": "keep"})
    assert not on_cpu.takes_shifts_on_gpus and on_cpu.rank_gpus == on_cpu.replica_gpus == 0


def test_over_sampling_needs_drop(tmp_path):
    with pytest.raises(ConfigError, match=r"write staleness: {on_stale: {name: drop, over_samplin"):
        load(tmp_path, {"staleness.over_sampling": 4})
    for name in ("wait", "mask"):
        with pytest.raises(ConfigError, match=f"no effect with on_stale: {name}; .*: drop$"):
            load(tmp_path, {"staleness.on_stale": {"name": name, "over_sampling": 4}})
    drop = {"staleness.on_stale": {"name": "drop", "over_sampling": 4}}
    assert load(tmp_path, drop).max_outstanding == load(tmp_path).max_outstanding + 4


def test_mask_needs_completions_whose_tokens_can_be_left_out(tmp_path):
    mask = {"staleness.on_stale": "mask"}
    assert load(tmp_path, mask).limits.masks_stale and not load(tmp_path, {}).limits.masks_stale
    for changes, error in (
        ({"lora.r": 8}, r"mask does not work with lora: a completion keeps its adapter"),
        ({"algorithm.advantage": "remax"}, r"algorithm.advantage: remax compares whole"),
        ({"algorithm.preference": {}}, r"algorithm.preference compares whole"),
        ({"generator.in_flight": "drain"}, r"mask has no effect with generator.in_flight: drain"),
    ):
        with pytest.raises(ConfigError, match=error):
            load(tmp_path, mask | changes)


def test_top_p_top_k_and_min_p_need_an_objective_that_does_not_compare_log_probs(tmp_path):
    config = load(
        tmp_path, {**REINFORCE, "rollout.top_p": 0.9, "rollout.top_k": 50, "rollout.min_p": 0.05}
    )
    assert config.algorithm.compares_behavior is None and config.rollout.kept_tokens == {
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.05,
    }
    load(
        tmp_path,
        {
            **REINFORCE,
            "algorithm.loss": {"name": "ppo", "old_policy": "learner"},
            "algorithm.allow_uncorrected": True,
            "staleness.max_staleness": 2,
            "rollout.top_p": 0.9,
        },
    )


def test_chat_template_variables_can_come_from_the_command_line(tmp_path):
    config = load(
        tmp_path,
        {"data.apply_chat_template": True},
        ["--data.chat_template_kwargs", '{"enable_thinking": false}'],
    )
    assert config.data.chat_template_kwargs == {"enable_thinking": False}
    config = load(
        tmp_path,
        {"data.apply_chat_template": True},
        ["--data.chat_template_kwargs.enable_thinking", "false"],
    )
    assert config.data.chat_template_kwargs == {"enable_thinking": False}


def test_command_line_takes_precedence_over_yaml(tmp_path):
    config = load(
        tmp_path,
        {"rollout.temperature": 0.7},
        [
            "--rollout.temperature",
            "0.5",
            "--rollout.rollout_stop_token_ids",
            "[3,4]",
            "--resume",
            "auto",
        ],
    )
    assert (config.rollout.temperature, config.rollout.rollout_stop_token_ids, config.resume) == (
        0.5,
        [3, 4],
        "auto",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rollout.rollout_batch_size": 10, "rollout.num_steps_per_rollout": 3},
            "num_steps_per_rollout = 3 does not divide rollout.rollout_batch_size = 10",
        ),
        (
            {"rollout.global_batch_size": 100},
            "rollout.global_batch_size = 100, but .* = 128; set that",
        ),
        (
            {"staleness.max_staleness": 0, "rollout.num_steps_per_rollout": 2},
            "set staleness.max_staleness: 1",
        ),
        ({"learner.max_tokens_per_gpu": 20}, "= 28 is above learner.max_tokens_per_gpu = 20"),
        ({"name": "../up"}, "name = '../up'.*choose another"),
        ({"name": ".hidden"}, "name = '.hidden'"),
        (
            {"rollout.temprature": 1},
            "rollout.temprature is unknown; did you mean rollout.temperature",
        ),
        ({"rollout.rollout_max_response_len": 5}, "asyncrl calls it rollout.max_completion_length"),
        (
            {"learner.context_parallel_size": 2},
            "learner.context_parallel_size is unknown; asyncrl calls it"
            " learner.sequence_parallel_size",
        ),
        (
            {"learner.sequence_parallel_size": 2, "learner.world_size": 3},
            "sequence_parallel_size = 2 does not divide learner.world_size = 3",
        ),
        (
            {
                "learner.max_tokens_per_gpu": 13,
                "learner.sequence_parallel_size": 2,
                "learner.world_size": 2,
            },
            (
                r"= 28 is above learner.max_tokens_per_gpu = 13 \* sequence_parallel_size = 26;"
                r" raise that"
            ),
        ),
        (
            {
                "learner.max_tokens_per_gpu": 14,
                "learner.sequence_parallel_size": 2,
                "learner.world_size": 2,
                "algorithm.reference.kl_loss_coef": 0.1,
            },
            (
                "= 28 is above learner.max_tokens_per_gpu = 14, and the reference policy or teacher"
                " cannot split .*; raise that, or lower data.max_length"
            ),
        ),
        (
            {"generator.sglang_mem_fraction_static": 0.8},
            "asyncrl calls it generator.gpu_memory_utilization",
        ),
        ({"use_dynamic_batch_size": True}, "dynamic batching is always on"),
        ({"learner.temperature": 1}, "did you mean rollout.temperature"),
        ({"colocate": True}, "asyncrl calls it placement: colocate"),
        ({"offload_rollout": True}, "offload_rollout is not implemented: placement: colocate"),
        (
            {"placement": "colocate", "staleness.max_staleness": 1},
            "placement: colocate needs staleness.max_staleness: 0, not 1: nothing is generated",
        ),
        (
            {"placement": "colocate", "generator.device": "cuda"},
            "colocate needs one device for both sides, but learner.device = cpu and generator",
        ),
        (
            {**IN_TURNS, "reward.num_gpus": 0.4},
            "placement: colocate does not work with reward.num_gpus = 0.4 on GPUs: a reward could",
        ),
        (
            {**IN_TURNS, "generator.tensor_parallel_size": 2},
            r"colocate does not work with generator.tensor_parallel_size \* pipeline_parallel_size"
            " = 2 on GPUs: Ray gives a process fractions of one GPU only",
        ),
        (
            {**IN_TURNS, "generator.num_replicas": 3, "learner.world_size": 2},
            "puts one rank and at most one replica on a GPU, but generator.num_replicas = 3 is",
        ),
        (
            {**IN_TURNS, "generator.in_flight": "keep"},
            "does not work with generator.in_flight = 'keep' on GPUs: a rest frees the KV cache",
        ),
        (
            {"placement": "colocate", "generator.in_flight": "drain"},
            "placement: colocate does not work with generator.in_flight = 'drain': generators rest",
        ),
        (
            {"placement": "colocate", "generator.attach": "standing"},
            "placement: colocate does not work with generator.attach = 'standing'",
        ),
        (
            {"placement": "colocate", "rollout.num_steps_per_rollout": 2},
            "placement: colocate needs rollout.num_steps_per_rollout: 1, not 2: the later steps",
        ),
        (
            {"placement": "colocate", "eval.in_flight": True, "eval.data": "held_out.parquet"},
            "eval.in_flight = True only has an effect with placement: decoupled or share",
        ),
        ({"placement": "together"}, "placement = 'together': .*'decoupled', 'colocate' or 'share'"),
        (
            {"placement": "share", "generator.attach": "standing"},
            "placement: share does not work with generator.attach = 'standing'",
        ),
        (
            {"placement": "share", "generator.device": "cuda"},
            "learner.device = cpu and generator.device = cuda; use placement: decoupled",
        ),
        (
            {**ON_ONE_GPU, "generator.tensor_parallel_size": 2},
            r"generator.tensor_parallel_size \* pipeline_parallel_size = 2 on GPUs: Ray gives",
        ),
        (
            {"generator.tensor_parallel_size": 4, "generator.nnodes": 3},
            r"^generator\.nnodes = 3 does not divide tensor_parallel_size \*"
            r" pipeline_parallel_size = 4, the devices",
        ),
        (
            {"generator.tensor_parallel_size": 2, "generator.nnodes": 2, "generator.num_cpus": 0},
            r"^generator\.num_cpus = 0 does not work with generator\.nnodes = 2, since Ray",
        ),
        (
            {"generator.expert_parallel": True, "generator.tensor_parallel_size": 2},
            "generator.expert_parallel = True only has an effect with generator.device: cuda",
        ),
        (
            {
                "generator.device": "cuda",
                "generator.pipeline_parallel_size": 2,
                "generator.expert_parallel": True,
            },
            "expert_parallel = True only has an effect with generator.tensor_parallel_size above 1",
        ),
        (
            {**ON_ONE_GPU, "learner.world_size": 2},
            "needs learner.gpu_memory_utilization above 0.5 with several ranks, not 0.5: Ray would",
        ),
        (
            {
                **ON_ONE_GPU,
                "learner.world_size": 2,
                "learner.gpu_memory_utilization": 0.6,
                "generator.num_replicas": 2,
                "algorithm.reference.kl_loss_coef": 0.1,
            },
            r"learner.gpu_memory_utilization 0.6 \+ generator.gpu_memory_utilization 0.35 \+"
            r" algorithm.reference.gpu_memory_utilization 0.1 = 1.05 of its memory, more than 1",
        ),
        (
            {
                **ON_ONE_GPU,
                "learner.world_size": 2,
                "learner.gpu_memory_utilization": 0.6,
                "generator.num_replicas": 2,
                "generator.gpu_memory_utilization": 0.2,
            },
            "gpu_memory_utilization above 0.2 with several replicas, not 0.2: Ray would put two",
        ),
        (
            {**ON_ONE_GPU, "generator.num_replicas": 2},
            "generator.num_replicas = 2 is above learner.world_size = 1; lower it",
        ),
        (
            {**ON_ONE_GPU, "reward.num_gpus": 0.2},
            r"gpu_memory_utilization 0.35 \+ reward.num_gpus x 1 0.2 = 1.05 of its memory",
        ),
        *(
            (
                {"learner.world_size": ranks, "learner.zero_hpz_partition_size": size},
                f"hpz_partition_size = {size} must divide world_size = {ranks} and be below it",
            )
            for ranks, size in ((1, 2), (2, 2), (4, 3))
        ),
        (
            {"learner.gpu_memory_utilization": 0.5},
            "learner.gpu_memory_utilization = 0.5 only has an effect with learner.device: cuda",
        ),
        (
            {"algorithm.reference": {"kl_loss_coef": 0.1, "gpu_memory_utilization": 0.2}},
            r"algorithm\.reference\.gpu_memory_utilization = 0.2 only has an effect with placement:"
            " share and learner.device: cuda",
        ),
        (
            {"algorithm.distillation.teacher": {"path": "m", "gpu_memory_utilization": 0.2}},
            r"distillation\.teacher\.gpu_memory_utilization = 0.2 only has an effect with placeme",
        ),
        (
            {**ON_ONE_GPU, "algorithm.reference.gpu_memory_utilization": 0.2},
            "algorithm.reference: give one of kl_loss_coef, kl_coef",
        ),
        (
            {"generator.num_threads": 2, "generator.device": "cuda"},
            "generator.num_threads = 2 only has an effect with generator.device: cpu",
        ),
        (
            {"learner.num_threads": "auto", "learner.device": "cuda"},
            "num_threads = 'auto' needs device: cpu and world_size: 1",
        ),
        (
            {"learner.num_threads": "auto", "learner.world_size": 2},
            "num_threads = 'auto' needs device: cpu and world_size: 1",
        ),
        (
            {"learner.num_threads": "many"},
            "learner.num_threads = 'many': use 1 or more, or auto",
        ),
        ({"learner.num_threads": 0}, "learner.num_threads = 0: use 1 or more, or auto"),
        (
            {"rollout.temperature": 0},
            r"rollout.temperature = 0: input should be greater than or equal to 0.01",
        ),
        (
            {"rollout.temperature": float("inf")},
            "rollout.temperature = inf: input should be a finite number",
        ),
        (
            {"reward.functions.exact.weight": float("nan")},
            "weight = nan: input should be a finite number",
        ),
        (
            {"rollout.top_p": 0.9},
            (
                "rollout.top_p = 0.9 renormalizes .* over the kept tokens, and the ratio of loss:"
                " ppo against old_policy: behavior compares"
            ),
        ),
        ({"rollout_top_k": 5}, r"did you mean rollout\.top_k\?"),
        (
            {"rollout.top_k": 5, **REINFORCE, "algorithm.correction.truncation": "token"},
            "rollout.top_k = 5 renormalizes .*, and the correction compares",
        ),
        (
            {"rollout.top_k": 5, **REINFORCE, "algorithm.correction.band.above": 4.0},
            "the correction compares them",
        ),
        (
            {"rollout.min_p": 0.1, **REINFORCE, "algorithm.reference.kl_loss_coef": 0.1},
            "rollout.min_p = 0.1 renormalizes .*, and the KL term compares them .* Leave it out",
        ),
        ({"rollout.top_p": 0}, "rollout.top_p = 0: input should be greater than 0"),
        (
            {"eval.sets": {"cut": {"data": "o", "temperature": 0, "top_k": 5}}},
            "eval.sets.cut.top_k has no effect at temperature 0",
        ),
        ({"eval_top_p": 0.9}, "asyncrl calls it eval.sets"),
        ({"stop": ["x"]}, "asyncrl calls it rollout.rollout_stop"),
        ({"data.apply_chat_template_kwargs": {}}, "asyncrl calls it data.chat_template_kwargs"),
        ({"tool_key": "tools"}, "asyncrl calls it data.tools_column"),
        (
            {"rollout.n_samples_per_prompt": 1},
            "n_samples_per_prompt = 1 is too low for algorithm.advantage: grpo",
        ),
        *(
            (
                {name: value},
                r"ds3_gather_for_generation is unknown and not needed: .*buckets of"
                r" weights\.bucket_bytes.*; remove it",
            )
            for name in ("learner.ds3_gather_for_generation", "ds3_gather_for_generation")
            for value in (True, False)
        ),
        (
            {"learner.offload_param": "cpu"},
            "learner.offload_param = 'cpu' only has an effect with learner.offload_optimizer: cpu",
        ),
        (
            {"learner.offload_optimizer": "nvme"},
            "learner.offload_optimizer = 'nvme': input should be 'none' or 'cpu'",
        ),
        (
            {"reward.functions.exact.function": "no colon"},
            "reward.functions.exact.function = 'no colon'",
        ),
        (
            {
                "reward.functions": {"steps": {"function": "m:f", "per_token": True}},
                "reward.shuffle": True,
                "algorithm.advantage": "gae",
                "eval.accuracy": "steps",
            },
            ("reward.shuffle permutes rewards between trajectories, but per_token rewards belong"),
        ),
        ({"reward.functions": {"a/b": {"function": "m:f"}}}, "reward.functions.a/b"),
        (
            {"eval.accuracy": "wrong"},
            r"eval.accuracy = 'wrong' is not one of reward.functions \['exact'\]",
        ),
        (
            {"eval.sets": {"greedy": {"data": "d"}}},
            (
                "eval.sets.greedy: a set's name is .* greedy and sampled are the sets of"
                " eval.data; choose another name"
            ),
        ),
        ({"eval.sets": {"a/b": {"data": "d"}}}, "eval.sets.a/b: a set's name is 1 to 32 letters"),
        (
            {"eval.sets": {"math": {"n": 4}}},
            "eval.sets.math has no prompts; set eval.sets.math.data, or eval.data",
        ),
        (
            {"eval.sets": {"math": {"data": "d", "n": 4, "temperature": 0}}},
            "eval.sets.math.n = 4 at temperature 0 .* set n: 1, or a temperature above 0",
        ),
        ({"eval.sets": {"math": {"data": "d", "k": 4}}}, "eval.sets.math.k is unknown"),
        (
            {"eval.data": "d", "eval.pass_threshold": 0.5},
            "eval.pass_threshold = 0.5 only has an effect with a set of eval.sets with n above 1",
        ),
        (
            {"max_steps": 0},
            "max_steps = 0 only evaluates, and there are no held-out prompts; set eval.data or",
        ),
        (
            {"eval.every_steps": 5},
            "eval.every_steps = 5 has nothing to evaluate on; set eval.data or eval.sets",
        ),
        ({"model": {}}, "model.path is missing; set it"),
        ({"data.train": []}, "data.train is an empty list; name a path"),
        (
            {"data.train": [{"path": "a", "weigth": 1}]},
            "data.train.0.weigth is unknown; did you mean data.train.0.weight",
        ),
        ({"data.train": [{"weight": 1}]}, "data.train.0.path is missing; set it"),
        (
            {"data.train": [{"path": "a", "weight": 0}, "b"]},
            r"data.train.0.weight = 0: input should be greater than 0",
        ),
        (
            {"data.train": [{"path": "a", "weight": 2}, "b"]},
            "data.train: source 'b' has no weight, and others have one; give all of them",
        ),
        (
            {"data.train": {"path": "a", "weight": 2}},
            "data.train.0.weight = 2 only has an effect with several sources in data.train",
        ),
        (
            {"eval.data": [{"path": "a", "weight": 2}, "b"]},
            "eval.data.0.weight = 2 only has an effect with several sources in data.train",
        ),
        (
            {"data.train": {"path": "a.jsonl", "revision": "v2"}},
            "data.train.0.revision = 'v2' only has an effect with a dataset on the hub",
        ),
        (
            {"data.train": ["x/a.jsonl", "y/a.parquet"]},
            "data.train: several sources have the name 'a'; give each its own name",
        ),
        ({"dataset_name": "x/y"}, "asyncrl calls it data.train"),
    ],
)
def test_refusals_name_the_field_and_the_fix(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        load(tmp_path, changes)
    assert "\n" not in str(error.value)


def test_ranks_that_share_rows_allow_longer_trajectories(tmp_path):
    config = load(
        tmp_path,
        {
            "learner.max_tokens_per_gpu": 14,
            "learner.sequence_parallel_size": 2,
            "learner.world_size": 4,
        },
    )
    assert (
        config.longest_trajectory,
        config.learner.max_tokens_per_row,
        config.learner.data_parallel_size,
        config.probe_tokens,
    ) == (28, 28, 2, 8)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--rollout.temprature", "1"], "did you mean rollout.temperature"),
        (["--lr", "1"], "asyncrl calls it learner.learning_rate"),
        (["--colocate", "true"], "asyncrl calls it placement: colocate"),
        (
            ["--ds3_gather_for_generation", "true"],
            "is unknown and not needed: .*no rank gathers the whole model; remove it",
        ),
        (
            ["--rollout.temperature"],
            "--rollout.temperature has no value; write --rollout.temperature VALUE",
        ),
        (
            ["0.5", "--rollout.temperature", "1"],
            "command line: '0.5' belongs to no option; options look like --",
        ),
        (["--rollout.temperature", "warm"], "rollout.temperature = 'warm'"),
    ],
)
def test_bad_overrides(tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, (), overrides)


def test_entries_of_mappings_can_be_overridden(tmp_path):
    overrides = [
        "--reward.functions.exact.weight",
        "2",
        "--rollout.temperature=0.5",
        "--reward.functions.fmt.function=m:f",
        "--eval.sets.math.n",
        "4",
    ]
    overrides += [
        "--eval.sets.math.data",
        "held.parquet",
        "--reward.functions.exact.arguments",
        "{strict: true, eps: 1.0e-3}",
    ]
    config = load(tmp_path, (), overrides)
    assert (
        config.reward.functions["exact"].weight == 2
        and config.reward.functions["exact"].function == "package.module:function"
    )
    assert config.reward.functions["exact"].arguments == {"strict": True, "eps": 0.001}
    assert config.reward.functions["fmt"].function == "m:f" and config.rollout.temperature == 0.5
    assert config.eval.sets["math"].n == 4 and str(config.eval.sets["math"].data).endswith(
        "held.parquet"
    )
    assert (
        load(tmp_path, (), ["--reward.functions.exact.weight", "-1"])
        .reward.functions["exact"]
        .weight
        == -1
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--reward.functions.exact.weight"],
            (
                "--reward.functions.exact.weight has no value; write"
                " --reward.functions.exact.weight VALUE"
            ),
        ),
        (
            ["--reward.functions.exact.weight", "--seed", "1"],
            "--reward.functions.exact.weight has no value",
        ),
        (
            ["--reward.functions.exact.weight", "[1"],
            r"--reward.functions.exact.weight = '\[1' cannot be used as YAML",
        ),
        (
            ["--reward.functions.exact.wieght", "1"],
            (
                r"reward.functions.exact.wieght is unknown; did you mean"
                r" reward.functions.exact.weight\?"
            ),
        ),
        (["--eval.sets.math.temprature", "1"], r"did you mean eval.sets.math.temperature\?"),
        (
            ["--reward.functions.exact", "m:f"],
            (
                r"reward.functions.exact = 'm:f': write its settings below it, each as `name:"
                r" value`, or leave it out"
            ),
        ),
        (["--reward.functions", "m:f"], r"reward.functions = 'm:f': write its settings below it"),
        (
            ["--reward.functions.exact.function", "f"],
            r"exact.function = 'f': name a function as package.module:function",
        ),
        (
            ["--reward.functions.a/b.function", "m:f"],
            r"reward.functions.a/b = 'a/b': its name is empty or has a '/'; choose another",
        ),
        (
            ["--reward.functions.exact.function.name", "1"],
            (
                "reward.functions.exact.function.name is unknown: reward.functions.exact.function"
                " is a single value; write --reward.functions.exact.function VALUE"
            ),
        ),
        (["--reward.functions.exact.weight", "heavy"], "reward.functions.exact.weight = 'heavy'"),
    ],
)
def test_bad_overrides_inside_a_mapping(tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, (), overrides)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--data.max_length", "7", "--data.max_length", "null"], None),
        (["--data.max_length=7", "--data.max_length=null"], None),
        (["--data.max_length", "null", "--data.max_length", "7"], 7),
        (["--data.max_length=null", "--seed", "3", "--data.max_length=7"], 7),
    ],
)
def test_the_last_value_of_an_override_counts_where_one_is_null(tmp_path, words, expected):
    assert load(tmp_path, {"data.max_length": 100}, words).data.max_length == expected


def test_null_resets_a_setting_and_a_whole_mapping_is_replaced(tmp_path):
    assert (
        load(tmp_path, {"data.max_length": 100}, ["--data.max_length", "null"]).data.max_length
        is None
    )
    config = load(tmp_path, (), ["--reward.functions", "{fmt: {function: m:f}}"])
    assert list(config.reward.functions) == ["fmt"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"learner": "cuda"},
            "learner = 'cuda': write its settings below it, each as `name: value`, or leave it out",
        ),
        ({"observe.sinks": "wandb"}, "observe.sinks = 'wandb': write a list, in brackets"),
        (
            {"algorithm.group_filter": "mine.py"},
            "algorithm.group_filter.name = 'mine.py': name a function as package.module:function",
        ),
        ({"name": 7}, "name = 7: put it in quotes, so that YAML reads it as text"),
        ({"name": date(2026, 1, 2)}, "name = datetime.date(2026, 1, 2): put it in quotes"),
        ({"model.path": True}, "model.path = True: put it in quotes"),
        ({"seed": -1}, "seed = -1: "),
        ({"lora": {"alpha": "x"}}, "lora.alpha = 'x': input should be a valid "),
        (
            {"lora": {"target_modules": {"q": 1}}},
            "lora.target_modules = {'q': 1}: input should be 'all-linear'; lora.target_modules ="
            " {'q': 1}: write a list, in brackets",
        ),
        ({"seed": 2**70}, f"seed = {2**70}: "),
        ({"seed": "s" * 300}, f"seed = '{'s' * 199}…: input should be a valid integer"),
        ({"learner": {1: 2}}, "learner.1 is no name of a setting; leave it out"),
    ],
)
def test_a_value_of_the_wrong_kind_is_explained_in_yaml_terms(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(tmp_path, changes)


def test_files_that_are_not_a_config(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="not a mapping"):
        load_config(tmp_path / "list.yaml")
    (tmp_path / "twice.yaml").write_text(
        "learner: {learning_rate: 1.0e-3}\nrollout:\n  temperature: 1\n\nlearner:\n "
        " world_size: 2\n"
    )
    with pytest.raises(ConfigError, match="'learner' appears twice, on lines 1 and 5; keep one"):
        load_config(tmp_path / "twice.yaml")
    (tmp_path / "inner.yaml").write_text("rollout:\n  temperature: 1\n  'temperature': 0.5\n")
    with pytest.raises(ConfigError, match="'temperature' appears twice, on lines 2 and 3"):
        load_config(tmp_path / "inner.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    with pytest.raises(ConfigError, match="cannot be used as YAML"):
        load_config(tmp_path / "broken.yaml")


def test_paths_are_absolute_and_may_be_under_the_runs_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASYNCRL_RUNS", "/somewhere/runs")
    config = load(tmp_path, {"model.path": "{runs_root}/inputs/model", "data.train": "train.jsonl"})
    assert (config.model.path, config.data.train) == (
        "/somewhere/runs/inputs/model",
        str(tmp_path / "train.jsonl"),
    )


@pytest.mark.parametrize("option", [[], ["--runs_root", "/r"], ["--runs_root=/r"]])
def test_the_runs_root_is_replaced_in_overrides(tmp_path, monkeypatch, option):
    """Also in settings that take a list, whose braces the command line's parser reads as JSON."""
    monkeypatch.setenv("ASYNCRL_RUNS", "/r")
    config = load(
        tmp_path,
        overrides=["--data.train", "{runs_root}/a.parquet", "--model.path={runs_root}/m", *option],
    )
    assert (config.data.train, config.model.path) == ("/r/a.parquet", "/r/m")


def test_an_argument_of_a_reward_may_be_a_path_under_the_runs_root(tmp_path, monkeypatch):
    monkeypatch.setenv("ASYNCRL_RUNS", "/r")
    given = {"packages": "{runs_root}/side", "text": "in {runs_root}/side", "number": 3}
    function = {"function": "package:function", "arguments": given}
    config = load(tmp_path, {"reward.functions.mine": function})
    found = config.reward.functions["mine"].arguments
    assert found == {**given, "packages": "/r/side"}


TEXTS = ["007", "1e3", "true", "{question}", "[a", "{a: 1}", "a: b", "a # b", " x ", "'x'", "~"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_of_the_command_line_is_kept_as_it_is(tmp_path, text):
    overrides = [f"--data.system_prompt={text}", "--data.apply_chat_template", "true"]
    assert load(tmp_path, overrides=overrides).data.system_prompt == text


def test_data_may_be_a_path_a_source_or_several(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "folder").mkdir()
    gsm8k = {"path": "openai/gsm8k", "subset": "main", "split": "test"}
    train = [
        "here/folder",
        "{runs_root}/*.jsonl",
        {"path": "a/b.parquet", "prompt_column": "question"},
        "openai/gsm8k",
    ]
    config = load(
        tmp_path,
        {
            "data.train": train,
            "eval.data": gsm8k,
            "eval.sets": {"more": {"data": [gsm8k]}},
            "runs_root": "/runs",
        },
    )
    paths = [f"{tmp_path}/here/folder", "/runs/*.jsonl", f"{tmp_path}/a/b.parquet", "openai/gsm8k"]
    assert [source.path for source in config.data.train] == paths
    assert [source.label for source in config.data.train] == ["folder", "runs", "b", "gsm8k"]
    assert (
        config.eval.data == config.eval.sets["more"].data == (Source(**gsm8k),)
        and config.eval.data[0].on_hub
    )
    assert Config.model_validate(config.dump()) == config
    assert load(tmp_path, (), ["--data.train", "x.jsonl"]).data.train == str(tmp_path / "x.jsonl")
    two = load(tmp_path, (), ["--data.train", "x.jsonl,y.jsonl"]).data.train
    assert [source.path for source in two] == [str(tmp_path / "x.jsonl"), str(tmp_path / "y.jsonl")]


def test_a_run_directory_inside_rays_working_directory_is_refused(tmp_path, monkeypatch):
    config = load(tmp_path)
    monkeypatch.setenv("ASYNCRL_RUNS", str(tmp_path))
    assert config.run_directory == tmp_path / "run"
    monkeypatch.setenv("ASYNCRL_RUNS", str(tmp_path / "runtime_resources" / "working_dir_files"))
    with pytest.raises(ConfigError, match="ASYNCRL_RUNS"):
        _ = config.run_directory


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        (
            "check_for_nan_in_loss_and_grad",
            "is unknown and not needed: .*learner.max_skipped_steps",
        ),
        ("micro_batch_size", "is unknown and not needed: .*learner.max_tokens_per_gpu"),
        ("gradient_accumulation_steps", "is unknown and not needed: .*learner.max_tokens_per_gpu"),
        ("balance_data", "is unknown and not needed: .*balanced"),
        ("padding_free", "is unknown and not needed: .*never padded"),
        ("cp_size", "learner.sequence_parallel_size"),
        ("optimizer_cpu_offload", "learner.offload_optimizer"),
        ("recompute_granularity", "learner.gradient_checkpointing"),
        ("activation_offloading", "is not implemented: .*learner.gradient_checkpointing"),
    ],
)
def test_learner_settings_under_other_systems_names(tmp_path, name, answer):
    with pytest.raises(
        ConfigError, match=rf"learner.{name} (is unknown; asyncrl calls it )?{answer}"
    ):
        load(tmp_path, {f"learner.{name}": 1})


VERL = """
data: {train_files: train.parquet, max_response_length: 64, train_batch_size: 32}
actor_rollout_ref:
  model: {path: tiny}
  actor: {ppo_mini_batch_size: 16, optim: {lr: 1.0e-6}, ppo_epochs: 2}
  rollout: {n: 8, tensor_model_parallel_size: 2, log_prob_micro_batch_size_per_gpu: 4}
algorithm: {adv_estimator: grpo, use_kl_in_reward: false}
trainer: {total_epochs: 15, test_freq: 5, n_gpus_per_node: 8, logger: [console]}
"""


def test_every_setting_of_a_verl_config_is_explained(tmp_path):
    (tmp_path / "verl.yaml").write_text(VERL)
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "verl.yaml")
    expected = {
        "data.train_files": "data.train",
        "data.max_response_length": "rollout.max_completion_length",
        "data.train_batch_size": "rollout.rollout_batch_size, in prompts",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "rollout.global_batch_size, in trajectories",
        "actor_rollout_ref.actor.optim.lr": "learner.learning_rate",
        "actor_rollout_ref.rollout.n": "rollout.n_samples_per_prompt",
        "algorithm.adv_estimator": "algorithm.advantage",
        "algorithm.use_kl_in_reward": "algorithm.reference.kl_coef",
        "trainer.total_epochs": "max_steps",
        "trainer.test_freq": "eval.every_steps",
        "trainer.n_gpus_per_node": "learner.world_size",
        "trainer.logger": "observe.sinks",
    }
    text = str(raised.value)
    for name, here in expected.items():
        assert f"{name} is unknown; asyncrl calls it {here}" in text, name
    for name in (
        "actor_rollout_ref.actor.ppo_epochs",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
    ):
        assert f"{name} is not implemented: " in text, name


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("num_train_epochs", "asyncrl calls it max_steps"),
        ("num_generations", "asyncrl calls it rollout.n_samples_per_prompt"),
        ("rollout.batch_size", "asyncrl calls it rollout.rollout_batch_size"),
        ("train.batch_size", "asyncrl calls it rollout.global_batch_size"),
        ("algo.kl.init_coef", "asyncrl calls it algorithm.reference.kl_coef"),
        ("init_kl_coef", "asyncrl calls it algorithm.reference.kl_coef"),
        ("async-queue-size", "asyncrl calls it staleness.max_staleness"),
        ("ds.lora.rank", "asyncrl calls it lora.r"),
        ("lora_rank", "asyncrl calls it lora.r"),
        ("use_dora", "did you mean lora.use_dora"),
        ("tensor_parallel_size", "did you mean generator.tensor_parallel_size?"),
        ("rollout_num_gpus_per_engine", "asyncrl calls it generator.tensor_parallel_size"),
        ("tensor_model_parallel_size", r"a learner rank computes whole layers; remove it, or set"),
        ("modle.path", "did you mean model.path?"),
        ("learner.learning-rate", "did you mean learner.learning_rate?"),
        ("train.lerning_rate", "did you mean learner.learning_rate?"),
        ("algorithm.kl", "see asyncrl train --help"),
        ("evals", "see asyncrl train --help"),
        ("temper", "see asyncrl train --help"),
        ("foo", "see asyncrl train --help"),
        *(
            (name, "is not implemented: placement: colocate decides it")
            for name in (
                *("offload", "enable_sleep_mode", "sleep_level"),
                *("ds.enable_sleep", "deepspeed_enable_sleep", "vllm_sleep_level"),
            )
        ),
        ("actor_rollout_ref.hybrid_engine", "asyncrl calls it placement: colocate"),
        (
            "train.colocate_actor_ref",
            "asyncrl calls it placement: share, with algorithm.reference.gpu_mem",
        ),
        ("trainer.nnodes", "asyncrl calls it learner.world_size, over all nodes"),
        ("actor_rollout_ref.rollout.nnodes", "asyncrl calls it generator.num_replicas, over all"),
        ("rollout.n_gpus_per_node", "asyncrl calls it generator.num_replicas, over all nodes"),
        ("critic.optim.lr", "asyncrl calls it algorithm.advantage.value_learning_rate"),
        ("critic.model.path", "is unknown and not needed: the value head"),
        ("custom_reward_function.path", "asyncrl calls it reward.functions"),
        ("custom_reward_function.name", "asyncrl calls it reward.functions"),
        ("reward_model.model.path", "asyncrl calls it reward.functions"),
        ("actor_rollout_ref.rollout.name", "is unknown and not needed: vLLM always generates"),
        ("sequence_parallel", "is not implemented: a learner rank computes whole layers"),
        ("warmup_ratio", "asyncrl calls it learner.schedule.warmup_steps, in steps"),
        ("lora_dropout", "is not implemented: the learner uses no dropout"),
        ("scale_rewards", "grpo_batch_std for batch"),
        ("multi_objective_aggregation", "algorithm.advantage: gdpo for normalize_then_sum"),
        ("vespo_lambda_neg", "asyncrl calls it algorithm.loss.lambda_negative"),
        ("actor.policy_loss.vespo.k_pos", "asyncrl calls it algorithm.loss.k_positive"),
        ("policy_loss.kl_cov_ratio", "asyncrl calls it algorithm.loss.cov_share"),
        ("critic.cliprange_value", "is not implemented: a batch is trained once, so a clip"),
    ],
)
def test_an_unknown_name_gets_a_correct_suggestion_or_none(name, answer):
    assert answer in explain_unknown(name, field_names(Config))


def test_the_tables_of_foreign_names_point_at_settings_that_exist():
    known = set(field_names(Config))
    names = other_names()
    ours = {name.rsplit(".", 1)[-1] for name in known}
    same = {"beta", "betas", "estimator", "nnodes"}
    assert ours & {*names.renamed, *names.not_implemented} == same, (
        "GRPO's beta; betas of the learner; an estimator of advantages; verl's nnodes of the job"
    )
    sections = {name.partition(".")[0] for name in known if "." in name}
    for foreign, here in names.renamed.items():
        named = re.findall(rf"\b(?:{'|'.join(sections)})\.[a-z0-9_.]+[a-z0-9_]", here)
        assert set(named) <= known, foreign
        assert named or here.startswith("nothing: ") or re.split("[:, ]", here)[0] in known, foreign


@pytest.mark.parametrize("kind", [Config, OfflineConfig])
def test_every_field_has_a_description(kind):
    for setting in settings_of(kind):
        meaning = setting.field.description or any(
            one.__doc__ for one in kinds_of(setting.field.annotation)
        )
        assert meaning, setting.name


SHIPPED = sorted((ROOT / "jobs").rglob("*.yaml"))


def test_every_shipped_yaml_is_found():
    names = {path.relative_to(ROOT / "jobs").as_posix() for path in SHIPPED}
    assert {"quickstart/quickstart.yaml", "recipes/math.yaml"} <= names


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configs_are_valid(path):
    """As they are; `tests/jobs/test_recipes.py` plans the recipes with small models."""
    load_any(path)


def test_help_imports_nothing_heavy():
    program = (
        "import sys, asyncrl.cli; print([m for m in ('pydantic', 'pyarrow') if m in sys.modules]);"
        "import asyncrl.config; print([m for m in ('torch', 'ray', 'vllm', 'transformers') if m in"
        " sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]\n[]"
    )
    result = subprocess.run(
        [sys.executable, "-m", "asyncrl.cli", "--help"], capture_output=True, text=True
    )
    assert result.returncode == 0 and "train" in result.stdout


def test_logprob_tolerance_bounds_the_maximum_or_in_bfloat16_the_mean(tmp_path):
    config, lower = load(tmp_path), load(tmp_path, {"model.dtype": "bfloat16"})
    assert (config.logprob_statistic, config.logprob_tolerance) == ("max", 1e-4)
    assert (lower.logprob_statistic, lower.logprob_tolerance) == ("mean", 0.03)


def test_a_kl_term_after_a_warm_start_needs_ref_load(tmp_path):
    changes = {**WARM, "algorithm.reference": {"kl_loss_coef": 0.1}}
    message = r"as it was before the warm start; name it in algorithm\.reference\.ref_load"
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, changes)
    changes["algorithm.reference"]["ref_load"] = "/other"
    assert load(tmp_path, changes).reference_path == "/other"


def test_a_kl_term_with_a_loaded_adapter_needs_ref_load(tmp_path):
    changes = {"lora.load": "/adapter", "algorithm.reference": {"kl_loss_coef": 0.1}}
    message = r"without the adapter of lora\.load; name it in algorithm\.reference\.ref_load"
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, changes)
    changes["algorithm.reference"]["ref_load"] = "/other"
    assert load(tmp_path, changes).reference_path == "/other"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"lora": {"use_dora": True}},
            r"lora\.use_dora: true does not work with generators, since vLLM takes no DoRA",
        ),
        ({"lora": {"r": 513}}, r"lora\.r = 513 is above 512, the highest rank that vLLM takes"),
        (
            {"lora": {"r": 8}, "generator": {"tensor_parallel_size": 2, "nnodes": 2}},
            r"lora does not work with generator\.nnodes = 2, since vLLM reads an adapter's files",
        ),
        (
            {"lora": {"r": 8}, "generator": {"in_flight": "keep"}},
            r"generator\.in_flight = 'keep' only has an effect with lora: null",
        ),
        ({"lora": {"target_modules": []}}, "at least 1 item"),
    ],
)
def test_settings_of_an_adapter_that_cannot_act_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, changes)


@pytest.mark.parametrize("name", ["mean", "std", "median", "unscored_ratio"])
def test_a_reward_with_the_name_of_a_metric_is_refused(tmp_path, name):
    """Its mean would replace the metric of all rewards."""
    with pytest.raises(ConfigError, match=rf"reward.functions.{name}: reward/{name} is a metric"):
        load(tmp_path, {"reward.functions": {name: {"function": "m:f"}}})
