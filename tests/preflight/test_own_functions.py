"""The user's loss, advantage and group filter are tried on made-up numbers before anything
starts."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl import commands
from asyncrl.config import ConfigError, load_config
from asyncrl.preflight.trials.user_functions import own_text, try_own

OWN = """
def rewarded(completions):
    return [0.0 for _ in completions]

def half(logprobs, old_logprobs, advantages):
    return (-(logprobs - old_logprobs).exp() * advantages)[:6]

def unprotected(rewards):
    return (rewards - rewards.mean()) / rewards.std()

def hangs(rewards):
    import time
    while True:
        time.sleep(0.1)

def leaves(rewards):
    raise SystemExit(3)

def prints(rewards):
    import os, threading
    print("own words")
    os.write(1, b"own bytes")
    threading.Thread(target=threading.Event().wait).start()
    return rewards
"""


@pytest.fixture
def made(tmp_path, tiny_model, monkeypatch):
    """`made(**algorithm)`: writes a config file with these functions and returns its path."""
    (tmp_path / "trial_own.py").write_text(OWN)
    for folder in (tmp_path, Path(__file__).parents[2]):
        monkeypatch.syspath_prepend(str(folder))
    pq.write_table(pa.table({"prompt": ["1 + 2 ="]}), tmp_path / "train.parquet")

    def made(**algorithm):
        tree = {
            "name": "run",
            "runs_root": str(tmp_path / "runs"),
            "max_steps": 3,
            "model": {"path": str(tiny_model)},
            "data": {"train": str(tmp_path / "train.parquet"), "max_prompt_length": 8},
            "rollout": {"max_completion_length": 8},
            "algorithm": algorithm,
            "reward": {"functions": {"mine": {"function": "trial_own:rewarded"}}},
        }
        (tmp_path / "config.yaml").write_text(
            str(tree)
        )  # a Python dict of strings and numbers is valid YAML
        return tmp_path / "config.yaml"

    return made


def test_the_example_functions_are_tried_and_reported(made):
    names = {"loss": "clipped", "advantage": "standardized", "group_filter": "mixed"}
    lines = try_own(
        load_config(
            made(**{name: f"jobs.own_algorithm:{function}" for name, function in names.items()})
        )
    )
    assert lines[0].endswith("a loss and a gradient for 12 tokens; metrics: ratio_below_half")
    assert lines[1].endswith("[1.0, 0.0, 0.5, 0.0] gives [1.5076, -0.9045, 0.3015, -0.9045]")
    assert lines[2].endswith(
        "[1.0, 0.0, 0.5, 0.0] trained; [1.0, 1.0] left out; [0.0, 0.0, 0.0] left out"
    )
    assert own_text(lines).startswith("# your functions") and own_text([]) == "" == own_text(
        try_own(load_config(made()))
    )


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            {"loss": "trial_own:half"},
            (
                r"algorithm\.loss = 'trial_own:half' \(.*trial_own\.py:5\) returned loss of shape"
                r" \[6\]; return shape \[12\]"
            ),
        ),
        (
            {"advantage": "trial_own:unprotected"},
            r"\(.*trial_own\.py:8\) returned \[nan, nan\] for the rewards \[1\.0, 1\.0\]",
        ),
        (
            {"group_filter": "trial_own:missing"},
            r"algorithm\.group_filter = 'trial_own:missing' cannot be imported .*check its name",
        ),
        ({"loss": "no_such_module:f"}, "No module named 'no_such_module'"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_an_error_is_reported_with_file_and_line(made, algorithm, message):
    with pytest.raises(ConfigError, match="^on made-up numbers: .*" + message):
        try_own(load_config(made(**algorithm)))


@pytest.mark.parametrize("name", ["advantage", "group_filter"])
def test_a_function_that_hangs_or_exits_is_ended_and_named(made, name):
    with pytest.raises(
        ConfigError,
        match=(
            rf"^on made-up numbers: algorithm\.{name} = 'trial_own:hangs' was killed after 3 s;"
            r" .*endless loop"
        ),
    ):
        try_own(load_config(made(**{name: "trial_own:hangs"})), limit_s=3)
    with pytest.raises(
        ConfigError,
        match=rf"algorithm\.{name} = 'trial_own:leaves' ended its process \(exit code 3\)",
    ):
        try_own(load_config(made(**{name: "trial_own:leaves"})))


def test_a_module_that_hangs_while_it_is_imported_is_ended(made, tmp_path):
    (tmp_path / "never_there.py").write_text("import threading\nthreading.Event().wait()\n")
    with pytest.raises(ConfigError, match="'never_there:loss' was killed after 3 s"):
        try_own(load_config(made(loss="never_there:loss")), limit_s=3)


def test_output_of_a_function_is_ignored_and_its_threads_do_not_block(made, capfd):
    [line] = try_own(load_config(made(advantage="trial_own:prints")))
    assert line.endswith("[1.0, 0.0, 0.5, 0.0] gives [1.0, 0.0, 0.5, 0.0]")
    output = capfd.readouterr()
    assert not output.out and "own words" in output.err and "own bytes" in output.err


@pytest.mark.parametrize("command", ["plan", "train"])
def test_the_command_ends_with_the_error_and_leaves_nothing(
    made, command, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert commands.run(command, str(made(loss="trial_own:half")), []) == 2
    output = capsys.readouterr().err
    assert (
        output.startswith("asyncrl: on made-up numbers: algorithm.loss = 'trial_own:half' (")
        and output.count("\n") == 1
    )
    assert not (tmp_path / "runs").exists()
