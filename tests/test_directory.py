"""Who may write to a run directory, and where an attempt begins."""

import asyncio

import pytest

from asyncrl.config import Config, ConfigError
from asyncrl.control.checkpoint import State
from asyncrl.directory import RunDirectory


def config(root, **changes):
    tree = {
        "name": "run",
        "runs_root": str(root),
        "max_steps": 3,
        "model": {"path": "model"},
        "data": {"train": "train.parquet", "max_prompt_length": 20},
        "rollout": {"max_completion_length": 8},
        "reward": {"functions": {"exact": {"function": "package.module:function"}}},
    }
    return Config.model_validate({**tree, **changes})


async def save(directory):
    (directory / "weights").write_text("1")


def test_a_new_run_begins_at_version_0(tmp_path):
    with RunDirectory(config(tmp_path)) as directory:
        assert (directory.state.version, directory.state.attempt, directory.checkpoint) == (0, 0, None)
        assert (directory.path / "config.yaml").exists() and directory.logs.is_dir()


def test_never_refuses_a_directory_that_exists(tmp_path):
    with RunDirectory(config(tmp_path)):
        pass
    with pytest.raises(ConfigError, match="exists; go on with it"):
        RunDirectory(config(tmp_path))


@pytest.mark.parametrize("resume", ["never", "auto", "must"])
def test_a_directory_in_use_refuses_a_second_driver(tmp_path, resume):
    with RunDirectory(config(tmp_path)) as directory:
        asyncio.run(directory.checkpoints.write(directory.state, save))
        with pytest.raises(ConfigError, match="in use by process"):
            RunDirectory(config(tmp_path, resume=resume))


def test_must_needs_a_checkpoint_and_auto_does_not(tmp_path):
    with pytest.raises(ConfigError, match="no committed checkpoint"):
        RunDirectory(config(tmp_path, resume="must"))
    assert not (tmp_path / "run").exists()
    with RunDirectory(config(tmp_path, resume="auto")) as directory:
        assert directory.state.version == 0


def test_a_resumed_attempt_goes_on_counting(tmp_path):
    with RunDirectory(config(tmp_path)) as directory:
        run_id = directory.state.run_id
        asyncio.run(directory.checkpoints.write(State(run_id, 0, 2, 3, 16, (18,)), save))
    with RunDirectory(config(tmp_path, resume="must")) as directory:
        assert directory.state == State(run_id, 1, 2, 3, 16, (18,))
        assert directory.checkpoint == tmp_path / "run" / "checkpoints" / "step_000002"


def test_an_unreadable_checkpoint_never_means_a_new_start(tmp_path):
    with RunDirectory(config(tmp_path)) as directory:
        path = asyncio.run(directory.checkpoints.write(directory.state, save))
    (path / "learner" / "weights").write_text("2")
    for resume in ("auto", "must"):
        with pytest.raises(ConfigError, match="is damaged"):
            RunDirectory(config(tmp_path, resume=resume))


def test_a_resume_keeps_the_seed(tmp_path):
    with RunDirectory(config(tmp_path, seed=3)) as directory:
        assert directory.state.seed == 3
        asyncio.run(directory.checkpoints.write(directory.state, save))
    with pytest.raises(ConfigError, match=r"seed = 4, but .*step_000000 was made with 3.*set seed: 3"):
        RunDirectory(config(tmp_path, seed=4, resume="must"))
    with RunDirectory(config(tmp_path, seed=3, resume="must")) as directory:
        assert (directory.state.seed, directory.state.attempt) == (3, 1)
