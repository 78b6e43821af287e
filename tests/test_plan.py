"""`asyncrl plan`: what it shows, and what it refuses with exit code 2, before anything is allocated."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from asyncrl.config import ConfigError, load_config
from asyncrl.plan import make_plan


@pytest.fixture
def write(tmp_path, tiny_model):
    def write(changes=None, rows=("1 + 2 =", "30 - 4 =")):
        train = tmp_path / "train.parquet"
        pq.write_table(pa.table({"prompt": pa.array(rows, pa.string()), "answer": pa.array(["3"] * len(rows), pa.string())}), train)
        tree = {
            "name": "run",
            "runs_root": str(tmp_path / "runs"),
            "max_steps": 3,
            "model": {"path": str(tiny_model)},
            "data": {"train": str(train), "max_prompt_length": 20},
            "rollout": {"max_completion_length": 8},
            "reward": {"functions": {"exact": {"function": "asyncrl.rewards.builtin:exact_match"}}},
        }
        for name, value in (changes or {}).items():
            *parents, leaf = name.split(".")
            at = tree
            for parent in parents:
                at = at.setdefault(parent, {})
            at[leaf] = value.replace("HERE", str(tmp_path)) if isinstance(value, str) else value
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return write


def test_shows_arithmetic_cpus_memory_prompts_and_stops(write):
    text = make_plan(load_config(write())).text()
    for part in ("global_batch_size   = groups per step", "learner ranks", "free in /dev/shm", "first prompt '1 + 2 ='", "stop token ids", "temperature: 1.0"):
        assert part in text


def test_two_ranks_and_two_replicas_fit_two_cpus(write):
    plan = make_plan(load_config(write({"learner.world_size": 2, "generator.num_replicas": 2})))
    assert sum(part.count * part.cpus for part in plan.parts) <= 2.0 + 1e-9


@pytest.mark.parametrize(
    ("changes", "rows", "message"),
    [
        ({"data.train": "nowhere.parquet"}, None, "data.train = '/.*nowhere.parquet': no such file"),
        ({}, [], "has no rows"),
        ({"data.prompt_column": "question"}, None, "is not a column of"),
        ({}, ["1 + 2 =", "1" * 30], r"row 1 has 30 tokens, above data.max_prompt_length = 20"),
        ({"model.path": "nowhere"}, None, "model.path = '/.*nowhere'"),
        ({"rollout.max_completion_length": 4000}, None, "above the model's context"),
        ({"rollout.rollout_stop": ["12"]}, None, "rollout.rollout_stop '12' is 2 tokens"),
        ({"name": "../up"}, None, "name = '../up'"),
        ({"rollout.num_steps_per_rollout": 3}, None, "does not divide"),
        ({"warm_start.data": "nowhere.parquet"}, None, "needs eval.data"),
        ({"warm_start.data": "nowhere.parquet", "eval.data": "HERE/train.parquet"}, None, "warm_start.data = '/.*nowhere.parquet': no such file"),
        (
            {"warm_start.data": "HERE/train.parquet", "eval.data": "HERE/train.parquet", "warm_start.target_column": "reply"},
            None,
            "warm_start.target_column = 'reply' is not a column of warm_start.data",
        ),
        ({"reward.functions": {"mine": {"function": "nowhere_to_be_found:score"}}}, None, "reward.functions.mine.function: .*'nowhere_to_be_found'"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(write, tmp_path, changes, rows, message):
    with pytest.raises(ConfigError, match=message) as error:
        make_plan(load_config(write(changes) if rows is None else write(changes, rows)))
    assert "\n" not in str(error.value) and not (tmp_path / "runs").exists()


def test_a_loss_that_no_run_has_shown_is_called_experimental(write):
    assert "experimental" not in make_plan(load_config(write({}))).text()
    text = make_plan(load_config(write({"algorithm": {"loss": "sapo", "correction": {"reject_above": 0.5}}}))).text()
    assert "loss sapo against old policy behaviour, token_mean; corrected; correction: reject_above 0.5" in text and "experimental: no whole run" in text


def test_the_command_exits_with_2_and_one_line(write):
    command = [sys.executable, "-m", "asyncrl.cli", "plan", str(write({"rollout.num_steps_per_rollout": 3}))]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and result.stdout == "" and len(result.stderr.strip().splitlines()) == 1


def test_the_command_finds_rewards_in_the_current_directory(write, tmp_path):
    (tmp_path / "my_rewards.py").write_text("def score(prompts, **columns):\n    return [1.0] * len(prompts)\n")
    config = write({"reward.functions": {"mine": {"function": "my_rewards:score"}}})
    command = [Path(sys.executable).with_name("asyncrl"), "plan", config]
    assert subprocess.run(command, capture_output=True, cwd=tmp_path).returncode == 0
    assert b"'my_rewards'" in subprocess.run(command, capture_output=True, cwd=tmp_path.parent).stderr


def test_weights_of_a_version_are_counted_in_the_published_type(write, tiny_model):
    stored = sum(file.stat().st_size for file in tiny_model.glob("*.safetensors"))
    assert json.loads((tiny_model / "config.json").read_text()).get("dtype") == "float32"
    assert make_plan(load_config(write({"model.dtype": "bfloat16"}))).weights_bytes == stored // 2
