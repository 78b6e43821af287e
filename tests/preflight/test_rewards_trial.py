"""The user's own reward is tried before anything starts. Errors are reported with their line,
within seconds."""

import contextlib
import re
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl import commands
from asyncrl.config import Config, ConfigError, load_config
from asyncrl.data.prompts import PromptReport, check_prompts
from asyncrl.preflight.specs import data_spec
from asyncrl.preflight.trials.rewards import Tried, reward_trial, rewards_text

REWARD = """
def fine(prompts, completions, answer, **_):
    assert set(prompts) == {"1 + 2 ="} and set(answer) == {"3"}
    assert len(completions) > 1 or completions == ["0"]
    return {"reward": [0.5 + len(one) for one in completions], "format": [1] * len(completions)}

def exact(completions, answer, **_):
    return [float(text == one) for text, one in zip(completions, answer)]

def constant(completions, **_):
    return [1.0] * len(completions)

def wrong_column(completions, **columns):
    return [float(text == one) for text, one in zip(completions, columns["anwser"])]

def wants_one(completions, anwser):
    return [0.0] * len(completions)

def short(completions, **_):
    return [1.0 / len(one) for one in completions]

def nested(completions, **columns):
    return [inner(columns) for _ in completions]

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

def hidden_column(completions, **columns):
    try:
        gold = columns["anwser"]
    except KeyError as error:
        raise ValueError("no gold") from error

def in_a_row(completions, **columns):
    rows = [dict(zip(columns, row)) for row in zip(*columns.values())]
    return [row[
        "anwser"
    ] for row in rows]

def by_format(completions, **columns):
    return ["{anwser}".format(**columns)]

class Rows:
    def __init__(self, columns):
        self.columns = columns

    def gold(self):
        return self.columns["anwser"]

def of_an_object(completions, **columns):
    return Rows(columns).gold()

def from_a_column(completions, **columns):
    value = columns["reward_model" if "reward_model" in columns else "gold"][0]
    return [value["anwser"] if isinstance(value, dict) else columns["anwser"]]

def needs_a_variable(completions, **columns):
    import os
    return [os.environ["NO_SUCH_VARIABLE"]]

PRICES = {"answer": 1}

def needs_a_price(completions, **columns):
    prices = {"a": 1}
    return [PRICES["anwser"] if len(prompts) else prices for prompts in completions]

def needs_a_local_price(completions, **columns):
    prices = {"a": 1}
    return [prices["anwser"]]

def combined(completions, **_):
    return {"length": [len(one) for one in completions], "format": [1] * len(completions)}

def half_unscored(completions, **_):
    return {"length": [len(one) for one in completions], "b": [None] * len(completions)}

def gold(completions, reward_model, **_):
    truths = [one["ground_truth"] for one in reward_model]
    return [float(text == one) for text, one in zip(completions, truths)]

def golds(completions, gold, **_):
    return [float(text in one) for text, one in zip(completions, gold)]

def unscored(completions, **_):
    return [None] * len(completions)
"""


class Trial(NamedTuple):
    config: Config
    report: PromptReport
    path: Path


@pytest.fixture
def trial(tmp_path, tiny_model, monkeypatch):
    """`trial("fine", **reward_settings)`: a run with that reward, and the report of its prompts."""
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
        return Trial(config, check_prompts(data_spec(config)), path)

    return made


def tried(config, report):
    """What the rewards return for the first prompt."""
    with reward_trial(config) as try_rewards:
        return try_rewards(report)


def test_rewards_get_the_first_used_prompt_and_its_columns(trial):
    one = trial("fine")
    given = tried(one.config, one.report)
    assert given == Tried({"mine": 1.5, "mine/format": 1.0}, [])
    assert rewards_text(given).splitlines()[2:] == [
        f"  {'mine':<24} 1.5",
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


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("unscored", "mine is always None: it scores none of 8 made-up completions"),
        (
            "constant",
            "mine is always 1: 8 made-up completions .*, some with its answer get the",
        ),
        ("short", "other completions of that prompt end the run under reward.policy: fail: .*Zero"),
        ("exact", None),
    ],
)
def test_a_reward_that_treats_all_completions_alike_gets_a_line(trial, name, note):
    one = trial(name)
    given = tried(one.config, one.report)
    text = rewards_text(given)
    assert "None: not scored" in text or name != "unscored"
    assert given.notes == [] if note is None else re.match(note, *given.notes)
    assert [line for line in text.splitlines() if "note:" in line] == [
        f"  note: {line}" for line in given.notes
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "wrong_column",
            r"KeyError: 'anwser' at .*; columns of the data: answer; all arguments: answer, "
            r".*; did you mean 'answer'\?\nTraceback",
        ),
        (
            "hidden_column",
            r"ValueError: no gold at .*; it looked for 'anwser'; columns of the data",
        ),
        ("in_a_row", r"KeyError: 'anwser' at .*; columns of the data: answer; all"),
        ("of_an_object", r"KeyError: 'anwser' at .*; columns of the data: answer; all"),
        ("by_format", r"KeyError: 'anwser' at .*; columns of the data: answer; all"),
        ("wants_one", r"it takes anwser, which .*; did you mean 'answer'\?; available: answer, "),
        ("exat", r"has no attribute 'exat'\); check its name; did you mean 'exact'\?"),
    ],
)
def test_a_misspelled_name_gets_the_near_one(trial, name, message):
    one = trial(name)
    with pytest.raises(ConfigError, match=message):
        tried(one.config, one.report)


@pytest.mark.parametrize("name", ["needs_a_variable", "needs_a_price", "needs_a_local_price"])
def test_a_key_of_something_else_gets_no_columns(trial, name):
    one = trial(name)
    with pytest.raises(ConfigError, match=r"raised KeyError: .* at .*trial_rewards\.py") as raised:
        tried(one.config, one.report)
    assert "columns of the data" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("gold", {"reward_model": [{"style": "rule", "ground_truth": "3"}]}),
        ("golds", {"gold": [["3"]]}),
    ],
)
def test_right_answers_are_found_in_the_columns_of_public_sets(trial, tmp_path, name, column):
    others = {name: ["x"] for name in ("source", "id", "split", "level")}
    pq.write_table(
        pa.table({"prompt": ["1 + 2 ="], **others, **column}), tmp_path / "train.parquet"
    )
    one = trial(name)
    assert tried(one.config, one.report).notes == []
    one = trial("from_a_column")
    with pytest.raises(ConfigError, match=r"KeyError: 'anwser' at .*; columns of the data: "):
        tried(one.config, one.report)


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        ("combined", [r"mine/format is always 1: 8 made-up completions"]),
        ("half_unscored", ["mine is always None: ", "mine/b is always None: it scores none of 8"]),
    ],
)
def test_each_part_of_a_combined_reward_gets_a_line(trial, name, notes):
    one = trial(name)
    found = tried(one.config, one.report).notes
    assert len(found) == len(notes)
    for note, line in zip(notes, found, strict=True):
        assert re.match(note, line)


def test_a_column_with_the_name_of_an_argument_is_refused(trial, tmp_path):
    table = pa.table({"prompt": ["1 + 2 ="], "answer_texts": ["3"]})
    pq.write_table(table, tmp_path / "train.parquet")
    one = trial("exact")
    with pytest.raises(ConfigError, match="the column answer_texts has the name of an argument"):
        tried(one.config, one.report)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nested",
            (
                r"raised KeyError: 'reward' at .*trial_rewards\.py:\d+, in inner;.*\n"
                r"(.*\n)*.*line \d+, in nested"
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
    assert commands.run(command, str(one.path), []) == 2
    error = capsys.readouterr().err
    assert error.startswith("asyncrl: the first prompt of data.train") and re.search(
        r"trial_rewards.py:\d+, in inner; columns of the data: .*\nTraceback", error
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
