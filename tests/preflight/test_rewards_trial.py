"""The user's own reward is tried before anything starts. Errors are reported with their line,
within seconds."""

import contextlib
import textwrap
import time
from types import SimpleNamespace

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl import cli
from asyncrl.config import ConfigError, load_config
from asyncrl.data.prompts import check_prompts
from asyncrl.preflight.rewards import reward_trial, rewards_text
from asyncrl.preflight.specs import data_spec

REWARD = """
def fine(prompts, completions, answer, **_):
    assert (prompts, completions, answer) == (["1 + 2 ="], ["0"], ["3"])
    return {"reward": [0.5], "format": [1]}

def nested(completions, **_):
    return [inner({}) for _ in completions]

def inner(row):
    return row["reward"]

def wants(completions, solution):
    return [0.0]

def no_list(completions, **_):
    return 1.0

def ends(completions, **_):
    import os
    os._exit(3)

def hangs(completions, **_):
    import time
    time.sleep(100)

def unscored(completions, **_):
    return [None]
"""


@pytest.fixture
def trial(tmp_path, tiny_model, monkeypatch):
    """`trial("fine", **reward_settings)`: the config of a run with that reward, and the report of
    its prompts."""
    (tmp_path / "trial_rewards.py").write_text(textwrap.dedent(REWARD))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    pq.write_table(
        pa.table({"prompt": ["30 - 40 - 50 - 60 =", "1 + 2 ="], "answer": ["-70", "3"]}),
        tmp_path / "train.parquet",
    )
    path = tmp_path / "config.yaml"

    def made(name, **reward):
        tree = {
            "name": "run",
            "runs_root": str(tmp_path / "runs"),
            "max_steps": 3,
            "model": {"path": str(tiny_model)},
            "data": {
                "train": str(tmp_path / "train.parquet"),
                "max_prompt_length": 8,
                "prompt_policy": "drop",
            },
            "rollout": {"max_completion_length": 8},
            "reward": {"functions": {"mine": {"function": f"trial_rewards:{name}"}}, **reward},
        }
        path.write_text(str(tree))  # a Python dict of strings and numbers is valid YAML
        config = load_config(path)
        return SimpleNamespace(config=config, report=check_prompts(data_spec(config)), path=path)

    return made


def tried(config, report):
    """What the rewards return for the first prompt."""
    with reward_trial(config) as try_rewards:
        return try_rewards(report)


def test_rewards_get_the_first_used_prompt_and_its_columns(trial):
    one = trial("fine")
    given = tried(one.config, one.report)
    assert given == {"mine": 0.5, "mine/format": 1.0}
    assert rewards_text(given).splitlines()[2:] == [
        f"  {'mine':<24} 0.5",
        f"  {'mine/format':<24} 1",
    ]
    assert (
        tried(
            one.config.model_copy(
                update={"reward": one.config.reward.model_copy(update={"num_gpus": 1.0})}
            ),
            one.report,
        )
        is None
    )


def test_none_is_reported_as_not_scored(trial):
    one = trial("unscored")
    assert "None: not scored" in rewards_text(tried(one.config, one.report))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nested",
            (
                r"raised KeyError: 'reward' at .*trial_rewards\.py:10, in inner\n(.*\n)*.*line 7,"
                r" in nested"
            ),
        ),
        (
            "wants",
            (
                "TypeError: it takes solution, which no column of the data and no entry of its"
                " arguments provides; available: answer, [a-z_, ]*$"
            ),
        ),
        ("no_list", "'trial_rewards:no_list' returned float; return a list of 1 floats or None"),
        ("nowhere", "'trial_rewards:nowhere' cannot be imported .*check its name"),
        ("ends", r"reward mine \(trial_rewards:ends\) ended its process \(exit code 3\)"),
        ("hangs", "was killed after reward.deadline_s = 1 s"),
    ],
)
@pytest.mark.parametrize("policy", ["fail", "drop_group"])
def test_an_error_is_reported_under_every_policy(trial, name, message, policy):
    one = trial(name, policy=policy, deadline_s=1.0)
    with pytest.raises(
        ConfigError, match="the first prompt of data.train with the completion '0': .*" + message
    ):
        tried(one.config, one.report)


@pytest.mark.parametrize("command", ["plan", "train"])
def test_the_command_ends_with_the_error_and_leaves_nothing(trial, command, capsys, tmp_path):
    one = trial("nested")
    assert cli.run(command, str(one.path), []) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("asyncrl: the first prompt of data.train")
        and "trial_rewards.py:10, in inner\nTraceback" in error
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["fine", "hangs"])
def test_a_plan_that_fails_ends_the_process_that_imports_the_rewards(trial, name):
    one = trial(name)
    with pytest.raises(ConfigError, match="the plan failed"), reward_trial(one.config):
        started = wait_for_supervisors()
        raise ConfigError("the plan failed")
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive


def wait_for_supervisors():
    """The supervisors of reward processes that this process started, and their children."""
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if any("supervisor" in part for part in child.cmdline()):
                    return [child, *child.children(recursive=True)]
    raise AssertionError("no reward process has started")
