"""`asyncrl plan` tries the code reward with a right, a wrong and an empty program of the data."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl import commands
from asyncrl.config import ConfigError, load_config
from asyncrl.preflight.trials.code import try_code
from asyncrl.sandbox import probe

ADD = "def add(a, b):\n    return a + b\n"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n"


@pytest.fixture
def trial(tmp_path, tiny_model, monkeypatch):
    """`trial({"tests": …})`: what the plan says about the code reward on one row with these
    columns."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"

    def write(*rows):
        pq.write_table(
            pa.Table.from_pylist([{"prompt": "1 + 2 =", **row} for row in rows]),
            tmp_path / "train.parquet",
        )
        tree = {
            "name": "run",
            "runs_root": str(tmp_path / "runs"),
            "max_steps": 3,
            "model": {"path": str(tiny_model)},
            "data": {"train": str(tmp_path / "train.parquet"), "max_prompt_length": 8},
            "rollout": {"max_completion_length": 8},
            "reward": {
                "functions": {"code": {"function": "asyncrl.rewards.builtin:code_tests"}},
                "sandbox": {"level": probe().best.value, "wall_s": 20.0},
            },
        }
        path.write_text(str(tree))  # a Python dict of strings and numbers is valid YAML
        return path

    def tried(*rows):
        return try_code(load_config(write(*rows)))

    tried.write = write
    return tried


def test_right_wrong_and_empty_programs_are_tried(trial):
    row = {"tests": CHECK, "entry_point": "add", "canonical_solution": ADD}
    assert trial(row).splitlines() == [
        "# code_tests",
        "  tests of the first 1 rows: all can be run",
        "  rewards of programs for 1 rows: right 1.0, wrong 0.0, empty 0.0",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        {"tests": "assert add(1, 2) == 3", "solutions": f'["{ADD!r}"]'.replace("'", "")},
        {"tests": "assert add(1, 2) == 3", "solution": f"Thus:\n```python\n{ADD}```"},
        {
            "tests": CHECK,
            "entry_point": "add",
            "canonical_solution": "    return a + b\n",
            "code_prompt": "def add(a, b):\n",
        },
        {"tests": '[{"input": "1", "output": "2"}]', "code": "print(int(input()) + 1)"},
    ],
    ids=["solutions", "fenced", "body", "printed"],
)
def test_solutions_of_public_sets_are_found(trial, row):
    assert "right 1.0, wrong 0.0, empty 0.0" in trial(row)


def test_without_a_solution_the_plan_says_that_no_right_program_was_tried(trial):
    text = trial({"tests": "assert add(1, 2) == 3"})
    assert "no right program could be tried: no row has a column of ('canonical_solution'" in text


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"tests": "assert add(1, 2) == 3"}, {"tests": "add(1, 2) == 3"}],
            "row 1: column tests asserts nothing on line 1",
        ),
        ([{"tests": CHECK}], "row 0: .* add the column entry_point"),
        ([{"test_list": CHECK}], "there is no column tests; the columns are test_list. Rename"),
        (
            [{"tests": "try:\n    add\nexcept NameError:\n    pass\nassert len('a') == 1"}],
            "row 0: an empty program passes the tests .try:",
        ),
        (
            [{"tests": "assert add(1, 2) == 4", "solution": ADD}],
            r"the solution of row 0 gets 0\.0 \(.*AssertionError.*line 1\)",
        ),
        pytest.param(
            [{"tests": "assert add(1, 2) is not None", "solution": ADD}],
            "row 0: a program that returns and prints 'a wrong answer",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_tests_that_tell_nothing_are_refused_by_row(trial, rows, message):
    with pytest.raises(ConfigError, match=f"code_tests on data.train: {message}"):
        trial(*rows)


def test_the_command_prints_it_and_ends_with_the_refusal(trial, capsys, tmp_path):
    assert commands.run("plan", str(trial.write({"tests": "add(1, 2) == 3"})), []) == 2
    assert "is an expression whose value is lost" in capsys.readouterr().err
    assert commands.run("plan", str(trial.write({"tests": "assert add(1, 2) == 3"})), []) == 0
    assert "# code_tests\n  tests of the first 1 rows" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
