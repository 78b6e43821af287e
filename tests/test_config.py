"""Every refusal names the field, the value and the fix; every shipped YAML is a valid config."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from asyncrl.config import Config, ConfigError, field_names, load_config
from asyncrl.names import NOT_IMPLEMENTED, RENAMED

ROOT = Path(__file__).parents[1]
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
    config = load(tmp_path, {"rollout.rollout_batch_size": 12, "rollout.n_samples_per_prompt": 4, "rollout.num_steps_per_rollout": 3})
    assert (config.groups_per_step, config.global_batch_size, config.max_outstanding, config.longest_trajectory) == (4, 16, 12, 28)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"loss": "grpo"}, "algorithm.loss"),
        ({"advantage": "a2c"}, "algorithm.advantage"),
        ({"old_policy": "learner"}, r"uncorrected, and staleness.max_staleness = 2 .*allow_uncorrected"),
        ({"loss": "reinforce", "old_policy": "learner"}, "uncorrected"),
        ({"correction": {"truncation": "token"}}, "count the behaviour policy twice"),
        ({"loss": "reinforce"}, "defined for algorithm.old_policy: learner"),
        ({"loss": "dppo", "old_policy": "learner", "correction": {"truncation": "token"}}, "defined for algorithm.old_policy: behaviour"),
        ({"loss": "gspo", "dual_clip": 3.0}, "acts only on loss: ppo"),
        ({"loss": "gspo", "old_policy": "learner", "correction": {"truncation": "token"}}, "has a ratio of 1 everywhere"),
        ({"filter_zero_variance": True, "advantage": "reinforce_plus_plus"}, "learns from"),
        ({"kl_coef": 0.1}, "with advantage: grpo: where a group's rewards are equal"),
        ({"kl_coef": 0.1, "advantage": "rloo", "filter_zero_variance": True}, "kl_coef makes all different"),
        ({"advantage": "gae", "correction": {"sequence_mask_above": 0.1}}, "has one for each token"),
        ({"correction": {"cap": 3.0}}, r"acts only with algorithm\.correction\.truncation or kl_loss_coef"),
        ({"old_policy": "learner", "correction": {"truncation": "token"}, "eps_clip": 0.1}, "an old_policy other than learner"),
        ({"kl_coef": 0.1, "kl_loss_coef": 0.1}, "two places for one term; set one of them to 0"),
        ({"ref_load": "somewhere"}, "has no KL term to serve"),
        ({"advantage": "maxrl", "kl_coef": 0.1}, "maxrl is defined for rewards of 0 and above"),
        ({"correction": {"normalise": True}}, "no weights to divide"),
        ({"tau_positive": 2.0}, r"algorithm\.tau_positive = 2\.0 acts only with algorithm\.loss: sapo; leave it out"),
        ({"loss": "reinforce", "old_policy": "learner", "correction": {"truncation": "token"}, "eps_clip": 0.1}, "loss: ppo, gspo or cispo and an old_policy"),
        ({"gae_lambda": 0.5}, "acts only with algorithm.advantage: gae"),
        ({"kl_estimator": "k1"}, "kl_coef or kl_loss_coef above 0"),
        ({"correction": {"reject_level": "sequence_sum"}}, "acts only with algorithm.correction.reject_above"),
    ],
)
def test_contradictory_algorithms_are_refused(tmp_path, algorithm, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, {"algorithm": algorithm})


def test_an_uncorrected_loss_is_allowed_by_name_or_when_synchronous(tmp_path):
    for changes in ({"staleness.max_staleness": 0}, {"algorithm.allow_uncorrected": True}):
        assert not load(tmp_path, {"algorithm.old_policy": "learner", **changes}).algorithm.corrected


def test_the_overlong_penalty_fits_the_completion_and_the_advantage(tmp_path):
    with pytest.raises(ConfigError, match=r"overlong_buffer = 9 is above rollout.max_completion_length = 8"):
        load(tmp_path, {"reward.overlong_buffer": 9})
    with pytest.raises(ConfigError, match="maxrl is defined for rewards of 0 and above"):
        load(tmp_path, {"reward.overlong_buffer": 4, "algorithm.advantage": "maxrl"})


def test_over_sampling_needs_drop(tmp_path):
    with pytest.raises(ConfigError, match=r"over_sampling = 4 needs staleness.on_stale: drop"):
        load(tmp_path, {"staleness.over_sampling": 4})


def test_command_line_wins_over_yaml(tmp_path):
    config = load(tmp_path, {"rollout.temperature": 0.7}, ["--rollout.temperature", "0.5", "--rollout.rollout_stop_token_ids", "[3,4]", "--resume", "auto"])
    assert (config.rollout.temperature, config.rollout.rollout_stop_token_ids, config.resume) == (0.5, [3, 4], "auto")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout.rollout_batch_size": 10, "rollout.num_steps_per_rollout": 3}, "num_steps_per_rollout = 3 does not divide rollout.rollout_batch_size = 10"),
        ({"rollout.global_batch_size": 100}, "rollout.global_batch_size = 100, but .* = 128; set that"),
        ({"staleness.max_staleness": 0, "rollout.num_steps_per_rollout": 2}, "set staleness.max_staleness: 1"),
        ({"learner.max_tokens_per_gpu": 20}, "= 28 is above learner.max_tokens_per_gpu = 20"),
        ({"name": "../up"}, "name = '../up'.*choose another"),
        ({"name": ".hidden"}, "name = '.hidden'"),
        ({"rollout.temprature": 1}, "rollout.temprature is unknown; did you mean rollout.temperature"),
        ({"rollout.rollout_max_response_len": 5}, "here it is rollout.max_completion_length"),
        ({"learner.context_parallel_size": 2}, "learner.context_parallel_size is not implemented"),
        ({"generator.sglang_mem_fraction_static": 0.8}, "here it is generator.gpu_memory_utilization"),
        ({"use_dynamic_batch_size": True}, "dynamic batching is always on"),
        ({"learner.temperature": 1}, "did you mean rollout.temperature"),
        ({"colocate": True}, "colocate is not implemented"),
        ({"rollout.temperature": 0}, r"rollout.temperature = 0: input should be greater than 0"),
        ({"reward.functions.exact.function": "no colon"}, "reward.functions.exact.function = 'no colon'"),
        ({"eval.accuracy": "wrong"}, r"eval.accuracy = 'wrong' is not one of reward.functions \['exact'\]"),
        ({"model": {}}, "model.path is missing; set it"),
    ],
)
def test_refusals_name_the_field_and_the_fix(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        load(tmp_path, changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--rollout.temprature", "1"], "did you mean rollout.temperature"),
        (["--lr", "1"], "here it is learner.learning_rate"),
        (["--colocate", "true"], "not implemented"),
        (["--rollout.temperature"], "expected one argument"),
        (["--rollout.temperature", "warm"], "rollout.temperature = 'warm'"),
    ],
)
def test_bad_overrides(tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, (), overrides)


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="not a mapping"):
        load_config(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    with pytest.raises(ConfigError, match="is not YAML"):
        load_config(tmp_path / "broken.yaml")


def test_paths_are_absolute_and_may_lie_under_the_runs_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASYNCRL_RUNS", "/somewhere/runs")
    config = load(tmp_path, {"model.path": "{runs_root}/inputs/model", "data.train": "train.jsonl"})
    assert (config.model.path, config.data.train) == ("/somewhere/runs/inputs/model", str(tmp_path / "train.jsonl"))


def test_runs_never_lie_in_rays_working_directory(tmp_path, monkeypatch):
    config = load(tmp_path)
    monkeypatch.setenv("ASYNCRL_RUNS", str(tmp_path))
    assert config.run_directory == tmp_path / "run"
    monkeypatch.setenv("ASYNCRL_RUNS", str(tmp_path / "runtime_resources" / "working_dir_files"))
    with pytest.raises(ConfigError, match="ASYNCRL_RUNS"):
        _ = config.run_directory


def test_renamed_names_point_to_fields_or_say_why_not():
    known = {*field_names(), "learner.sequence_parallel_size"}
    assert all(target in known or target.startswith("nothing: ") for target in RENAMED.values())
    assert not {name.rsplit(".", 1)[-1] for name in field_names()} & {*RENAMED, *NOT_IMPLEMENTED}


def test_every_field_says_what_it_is():
    def undocumented(section, prefix=""):
        for name, field in section.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                yield from undocumented(field.annotation, f"{prefix}{name}.")
            elif not field.description:
                yield prefix + name

    assert list(undocumented(Config)) == []


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_are_valid(path):
    load_config(path)


def test_help_imports_nothing_heavy():
    program = "import sys, asyncrl.cli, asyncrl.config; print([m for m in ('torch', 'ray', 'vllm', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    result = subprocess.run([sys.executable, "-m", "asyncrl.cli", "--help"], capture_output=True, text=True)
    assert result.returncode == 0 and "train" in result.stdout


def test_the_log_prob_bound_is_of_the_largest_difference_or_in_bfloat16_of_the_mean(tmp_path):
    config, lower = load(tmp_path), load(tmp_path, {"model.dtype": "bfloat16"})
    assert (config.logprob_statistic, config.logprob_tolerance) == ("max", 1e-4)
    assert (lower.logprob_statistic, lower.logprob_tolerance) == ("mean", 0.03)


def test_a_kl_term_after_a_warm_start_names_its_reference(tmp_path):
    changes = {"warm_start.data": "t", "eval.data": "t", "algorithm.kl_loss_coef": 0.1}
    with pytest.raises(ConfigError, match=r"name the reference in algorithm\.ref_load"):
        load(tmp_path, changes)
    assert load(tmp_path, changes | {"algorithm.ref_load": "/other"}).reference_path == "/other"
