"""Locking a run directory, and where an attempt begins."""

import asyncio
import errno
import json
import os
import stat
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml
from unprivileged import without_permission

from asyncrl.config import Config, ConfigError
from asyncrl.contracts.messages import Scored
from asyncrl.rundir.directory import (
    LockLostError,
    RunDirectory,
    refuse_early,
    replace_directory,
)
from asyncrl.runtime.files.shared import size_and_checksum
from asyncrl.testing import FakeLearner, FakeRollouts, FakeScores


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


class Learner(FakeLearner):
    async def save(self, directory):
        (directory / "weights").write_text("1")
        return {"weights": size_and_checksum(directory / "weights")}


class Trained(Learner):
    """Has taken a step before it is saved."""

    async def save(self, directory):
        written = await super().save(directory)
        counters = directory / "counters.json"
        counters.write_text('{"applied": 1, "trained_tokens": 5}')
        return {**written, counters.name: size_and_checksum(counters)}


def write(directory, state=None, waiting=(), learner=None):
    scores = FakeScores(FakeRollouts())
    return asyncio.run(
        directory.checkpoints.write(
            state or directory.state, waiting, learner or Learner(1), scores
        )
    )


def test_a_new_run_begins_at_version_0(tmp_path):
    with RunDirectory(config(tmp_path)) as directory:
        assert (directory.state.version, directory.state.attempt, directory.checkpoint) == (
            0,
            0,
            None,
        )
        assert (directory.path / "config.yaml").exists() and directory.logs.is_dir()


def test_resume_never_refuses_an_existing_directory(tmp_path):
    with RunDirectory(config(tmp_path)):
        pass
    with pytest.raises(ConfigError, match="exists; resume it"):
        RunDirectory(config(tmp_path))


@pytest.mark.parametrize("resume", ["never", "auto", "must"])
def test_a_directory_in_use_refuses_a_second_driver(tmp_path, resume):
    with RunDirectory(config(tmp_path)) as directory:
        write(directory)
        with pytest.raises(ConfigError, match="in use by process"):
            RunDirectory(config(tmp_path, resume=resume))


def test_resume_must_needs_a_checkpoint_and_auto_does_not(tmp_path):
    with pytest.raises(ConfigError, match="no committed checkpoint"):
        RunDirectory(config(tmp_path, resume="must"))
    assert not (tmp_path / "run").exists()
    with RunDirectory(config(tmp_path, resume="auto")) as directory:
        assert directory.state.version == 0


def test_a_resumed_attempt_continues_from_the_checkpoints_state(tmp_path):
    with RunDirectory(config(tmp_path)) as directory:
        run_id = directory.state.run_id
        group = Scored(17, 1, None, 4, (0.0, 1.0), {}, 2, 0)
        write(
            directory,
            replace(
                directory.state,
                version=2,
                steps_attempted=3,
                frontier=16,
                finished_above=(18,),
                waiting=((0, 17),),
            ),
            [group],
        )
    with RunDirectory(config(tmp_path, resume="must")) as directory:
        state = directory.state
        assert (
            state.run_id,
            state.attempt,
            state.version,
            state.frontier,
            state.finished_above,
        ) == (run_id, 1, 2, 16, (18,))
        assert state.waiting == ((0, 17),)
        assert directory.checkpoint == tmp_path / "run" / "checkpoints" / "step_000002"
        assert "step_000002 (version 2, 1 groups waiting)" in directory.notes[0]
    attempts = json.loads((tmp_path / "run" / "run.json").read_text())["attempts"]
    assert [
        (record["attempt"], record["version"], record["frontier"], record["waiting"])
        for record in attempts
    ] == [(0, 0, 0, []), (1, 2, 16, [[0, 17]])]


def test_an_unreadable_checkpoint_never_means_a_new_start(tmp_path):
    with RunDirectory(config(tmp_path)) as directory:
        path = write(directory)
    (path / "learner" / "weights").write_text("2")
    for resume in ("auto", "must"):
        with pytest.raises(ConfigError, match="is damaged"):
            RunDirectory(config(tmp_path, resume=resume))


def test_an_unreadable_checkpoint_falls_back_to_the_previous_one_with_a_note(tmp_path):
    with RunDirectory(config(tmp_path)) as directory:
        write(directory, replace(directory.state, version=1))
        path = write(directory, replace(directory.state, version=2))
    (path / "learner" / "weights").write_text("2")
    with RunDirectory(config(tmp_path, resume="must")) as directory:
        assert directory.state.version == 1
        assert (
            "passed over: checkpoint" in directory.notes[0]
            and "step_000002 is damaged: learner/weights" in directory.notes[0]
        )


def test_a_requested_step_is_resumed_and_stays_the_newest(tmp_path):
    with RunDirectory(config(tmp_path)) as directory:
        for version in (1, 2):
            write(directory, replace(directory.state, version=version))
    with RunDirectory(config(tmp_path, resume="must", checkpoint={"ckpt_step": 1})) as directory:
        assert directory.state.version == 1
    with RunDirectory(config(tmp_path, resume="must")) as directory:
        assert directory.state.version == 1
    with pytest.raises(ConfigError, match=r"no committed checkpoint of step 7 \(there are: 1, 2\)"):
        RunDirectory(config(tmp_path, resume="must", checkpoint={"ckpt_step": 7}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 4}, r"seed = 4, but .*step_000000 was made with 0, and data order"),
        (
            {"rollout": {"max_completion_length": 8, "temperature": 0.5}},
            r"rollout.temperature = 0.5, .* the waiting groups in the checkpoint",
        ),
        (
            {"learner": {"world_size": 2}},
            "learner.world_size = 2, but .* was made with 1, and shards from before the first step",
        ),
        (
            {"learner": {"zero_stage": 1}},
            "learner.zero_stage = 1, but .* was made with 3, and shards from before the first step"
            " cannot be converted to another ZeRO stage",
        ),
        ({"algorithm": {"advantage": "gae"}}, "only one of them has a value head"),
        (
            {"algorithm": {"preference": {}}},
            r"algorithm.preference = .*, but .* was made without it, and the steps so far trained",
        ),
        (
            {"reward": {"functions": {"exact": {"function": "m:f"}}, "shuffle": True}},
            "reward.shuffle = True, .* a control run shuffles the rewards of every step",
        ),
        (
            {"data": {"train": "train.parquet", "max_prompt_length": 21}},
            "ordinals count only those",
        ),
        *(
            (
                {"data": {"train": "train.parquet", "max_prompt_length": 20, **changed}},
                f"data.{name} = .*prompts that were read",
            )
            for name, changed in (
                ("system_prompt", {"system_prompt": "Be brief."}),
                (
                    "chat_template_kwargs.enable_thinking",
                    {"chat_template_kwargs": {"enable_thinking": False}},
                ),
                ("tools", {"tools": [{"type": "function"}]}),
                ("tools_column", {"tools_column": "tools"}),
            )
        ),
    ],
)
def test_changes_that_would_falsify_the_run_are_refused(tmp_path, changes, message):
    with RunDirectory(config(tmp_path)) as directory:
        write(directory)
    with pytest.raises(ConfigError, match=f"{message}.*; set it back, or start a new run"):
        RunDirectory(config(tmp_path, resume="must", **changes))


@pytest.mark.parametrize("more", [{}, {"lora": {}}], ids=["weights", "adapter"])
def test_a_checkpoint_from_before_the_zero_stages_has_stage_three(tmp_path, more):
    with RunDirectory(config(tmp_path, **more)) as directory:
        tree = yaml.safe_load(directory.checkpoints.config)
        del tree["learner"]["zero_stage"]
        directory.checkpoints.config = yaml.safe_dump(tree)
        write(directory)
    with RunDirectory(config(tmp_path, resume="must", **more)) as directory:
        assert directory.state.version == 0
    with pytest.raises(ConfigError, match=r"learner.zero_stage = 2, but .* was made with 3, and"):
        RunDirectory(config(tmp_path, resume="must", learner={"zero_stage": 2}, **more))


def test_another_number_of_ranks_needs_states_that_can_be_converted(tmp_path):
    def began(number, **more):
        with RunDirectory(config(tmp_path / number, **more)) as directory:
            write(directory, learner=Trained(1))

    def resumed(number, **more):
        settings = {**more, "learner": {**more.get("learner", {}), "world_size": 2}}
        return RunDirectory(config(tmp_path / number, resume="must", **settings))

    began("adamw")
    with resumed("adamw") as directory:
        assert "changed since: learner.world_size 1 → 2" in directory.notes
    for number, more, why in (
        (
            "sgd",
            {"learner": {"optimizer": "sgd"}},
            "only AdamW's states can be converted to another",
        ),
        ("lora", {"lora": {}}, "an adapter's shards cannot be converted to"),
    ):
        began(number, **more)
        with pytest.raises(ConfigError, match=f"was made with 1, and {why}.*; set it back"):
            resumed(number, **more)


def test_other_changes_are_shown(tmp_path):
    with RunDirectory(config(tmp_path)) as directory:
        write(directory)
    with RunDirectory(
        config(tmp_path, resume="must", max_steps=9, learner={"learning_rate": 0.5})
    ) as directory:
        assert [line for line in directory.notes if "changed" in line] == [
            "changed since: learner.learning_rate unset → 0.5",
            "changed since: max_steps 3 → 9",
        ]


def test_changed_data_under_the_same_name_is_refused(tmp_path):
    data = {"train": str(tmp_path / "train.parquet"), "max_prompt_length": 20}
    (tmp_path / "train.parquet").write_bytes(b"rows")
    with RunDirectory(config(tmp_path, data=data)) as directory:
        write(directory)
    (tmp_path / "train.parquet").write_bytes(b"other rows")
    with pytest.raises(
        ConfigError, match=r"data.train: its content .* ordinals identify its rows; restore it"
    ):
        RunDirectory(config(tmp_path, data=data, resume="must"))


def test_sources_may_move_and_keep_their_rows_weights_and_order(tmp_path):
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        for name in ("a", "b"):
            (tmp_path / place / f"{name}.jsonl").write_text(json.dumps({"prompt": name}))

    def data(place="here", weights=(1, 3), names="ab"):
        sources = [
            {"path": str(tmp_path / place / f"{name}.jsonl"), "weight": weight}
            for name, weight in zip(names, weights, strict=True)
        ]
        return {"train": sources, "max_prompt_length": 20}

    with RunDirectory(config(tmp_path, data=data())) as directory:
        write(directory)
    with RunDirectory(config(tmp_path, data=data("there"), resume="must")) as directory:
        assert [line[:27] for line in directory.notes if "changed" in line] == [
            "changed since: data.train ["
        ]
    (tmp_path / "there" / "b.jsonl").write_text(json.dumps({"prompt": "c"}))
    for changed in (data(weights=(1, 2)), data(names="ba", weights=(3, 1)), data("there")):
        with pytest.raises(
            ConfigError,
            match=r"data.train: its content .* ordinals identify its rows; restore it",
        ):
            RunDirectory(config(tmp_path, data=changed, resume="must"))


def test_another_model_under_the_same_name_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with RunDirectory(config(tmp_path, model={"path": str(tmp_path / "model")})) as directory:
        write(directory)
    (tmp_path / "model" / "config.json").write_text('{"hidden_size": 1}')
    with pytest.raises(ConfigError, match=r"model.path: its content has changed"):
        RunDirectory(config(tmp_path, model={"path": str(tmp_path / "model")}, resume="must"))


def test_a_run_from_another_runs_checkpoint_may_train_preferences(tmp_path):
    with RunDirectory(config(tmp_path, name="old")) as directory:
        write(directory)
    with RunDirectory(
        config(
            tmp_path,
            name="new",
            checkpoint={"load": str(tmp_path / "old")},
            algorithm={"preference": {}},
        )
    ) as directory:
        assert "changed since: algorithm.preference unset → " in "\n".join(directory.notes)


def test_load_starts_a_new_run_from_another_runs_checkpoint(tmp_path):
    with RunDirectory(config(tmp_path, name="old")) as directory:
        state = replace(directory.state, version=2, frontier=16, waiting=((0, 17),))
        write(directory, state, [Scored(17, 1, None, 4, (0.0, 1.0), {}, 2, 0)])
    with pytest.raises(
        ConfigError,
        match=r"checkpoint.load: no committed checkpoint in .*nowhere; give a run's directory",
    ):
        RunDirectory(config(tmp_path, name="new", checkpoint={"load": str(tmp_path / "nowhere")}))
    assert not (tmp_path / "new").exists()
    with RunDirectory(
        config(tmp_path, name="new", checkpoint={"load": str(tmp_path / "old")})
    ) as directory:
        assert (
            directory.state.version,
            directory.state.frontier,
            directory.state.waiting,
            directory.state.attempt,
        ) == (2, 16, (), 0)
        assert directory.state.run_id != state.run_id and directory.checkpoint.is_relative_to(
            tmp_path / "old"
        )
        assert "its waiting groups are generated again" in directory.notes[-1]
    with RunDirectory(
        config(tmp_path, name="new", resume="auto", checkpoint={"load": str(tmp_path / "old")})
    ) as directory:
        assert (
            directory.notes[0]
            == f"resume auto: no checkpoint in {tmp_path / 'new' / 'checkpoints'}"
        )


def test_a_loaded_run_resumes_from_its_own_checkpoints(tmp_path):
    with RunDirectory(config(tmp_path, name="old")) as directory:
        for version in (1, 2):
            write(directory, replace(directory.state, version=version))
    load = {"load": str(tmp_path / "old"), "ckpt_step": 1}
    with pytest.raises(ConfigError, match=r"no committed checkpoint in .*new/checkpoints"):
        RunDirectory(config(tmp_path, name="new", checkpoint=load, resume="must"))
    with RunDirectory(config(tmp_path, name="new", checkpoint=load)) as directory:
        assert directory.state.version == 1
        write(directory, replace(directory.state, version=4))
        write(directory, replace(directory.state, version=5))
    for resume in ("auto", "must"):
        with RunDirectory(
            config(tmp_path, name="new", checkpoint=load, resume=resume)
        ) as directory:
            assert directory.state.version == 5 and directory.checkpoint.is_relative_to(
                tmp_path / "new"
            )
    with RunDirectory(
        config(tmp_path, name="new", checkpoint={**load, "ckpt_step": 4}, resume="must")
    ) as directory:
        assert directory.state.version == 4


def test_a_missing_step_never_means_a_new_start(tmp_path):
    with RunDirectory(config(tmp_path)) as directory:
        write(directory, replace(directory.state, version=1))
    with pytest.raises(ConfigError, match=r"no committed checkpoint of step 7 \(there are: 1\)"):
        RunDirectory(config(tmp_path, resume="auto", checkpoint={"ckpt_step": 7}))


@pytest.mark.parametrize(
    "changes",
    [
        {
            "reward": {
                "functions": {
                    "exact": {"function": "asyncrl.rewards.builtin:exact_match", "weight": 0.5}
                }
            }
        },
        {"algorithm": {"advantage": "rloo"}},
    ],
)
def test_waiting_groups_scored_with_old_settings_are_generated_again(tmp_path, changes):
    with RunDirectory(config(tmp_path)) as directory:
        write(
            directory,
            replace(directory.state, version=1, waiting=((0, 17),)),
            [Scored(17, 1, None, 4, (0.0, 1.0), {}, 2, 0)],
        )
    with RunDirectory(config(tmp_path, resume="must")) as directory:
        assert directory.state.waiting == ((0, 17),)
    with RunDirectory(config(tmp_path, resume="must", **changes)) as directory:
        assert (
            directory.state.waiting == ()
            and "the 1 waiting groups are generated again" in directory.notes[-1]
        )


@pytest.mark.parametrize("name", ["turn_s", "tool_s"])
def test_waiting_groups_of_sessions_with_another_limit_are_generated_again(tmp_path, name):
    def limited(seconds, **changes):
        environment = {"function": "package.module:solve", name: seconds}
        data = {"train": "train.parquet", "max_length": 40}
        return config(tmp_path, environment=environment, data=data, **changes)

    with RunDirectory(limited(5.0)) as directory:
        write(
            directory,
            replace(directory.state, version=1, waiting=((0, 17),)),
            [Scored(17, 1, None, 4, (0.0, 1.0), {}, 2, 0)],
        )
    with RunDirectory(limited(5.0, resume="must")) as directory:
        assert directory.state.waiting == ((0, 17),)
    with RunDirectory(limited(6.0, resume="must")) as directory:
        assert directory.state.waiting == ()
        assert directory.notes[-1].endswith(f"depend on the old environment.{name}")


AGENTS = [{"agent": "my.module:play"}, {"agent": "my.module:other"}, {"command": ["play"]}]


@pytest.mark.parametrize("after", AGENTS[1:])
def test_another_agent_generates_the_waiting_groups_again(tmp_path, after):
    def played(environment, **changes):
        data = {"train": "train.parquet", "max_length": 40}
        return config(tmp_path, environment=environment, data=data, **changes)

    with RunDirectory(played(AGENTS[0])) as directory:
        write(
            directory,
            replace(directory.state, version=1, waiting=((0, 17),)),
            [Scored(17, 1, None, 4, (0.0, 1.0), {}, 2, 0)],
        )
    with RunDirectory(played(after, resume="must")) as directory:
        assert directory.state.waiting == ()
        assert "the 1 waiting groups are generated again" in directory.notes[-1]


@pytest.mark.parametrize("after", [None, *AGENTS, {"function": "my.module:other"}])
def test_another_environment_is_refused(tmp_path, after):
    data = {"train": "train.parquet", "max_length": 40}
    before = {"function": "my.module:solve"} if after else AGENTS[0]
    with RunDirectory(config(tmp_path, environment=before, data=data)) as directory:
        write(directory, replace(directory.state, version=1))
    with pytest.raises(ConfigError, match="the groups so far are of that environment, or of none"):
        RunDirectory(config(tmp_path, environment=after, data=data, resume="must"))


def test_a_faster_driver_is_noticed(tmp_path, monkeypatch):
    """Another driver runs a whole attempt between this one's check of the directory and its
    lock."""
    from asyncrl.rundir import directory as module

    find = module.find_beginning

    def slow(*arguments):
        found = find(*arguments)
        monkeypatch.setattr(module, "find_beginning", find)
        with RunDirectory(config(tmp_path)) as other:
            write(other, replace(other.state, version=3))
        return found

    monkeypatch.setattr(module, "find_beginning", slow)
    with pytest.raises(ConfigError, match="another driver has started a run there"):
        RunDirectory(config(tmp_path))


def test_a_directory_is_locked_before_it_is_read(tmp_path, monkeypatch):
    from asyncrl.rundir import directory as module

    with RunDirectory(config(tmp_path)) as directory:
        write(directory)
    find = module.find_beginning

    def second_driver(*arguments):
        with pytest.raises(ConfigError, match="in use by process"):
            RunDirectory(config(tmp_path, resume="must"))
        return find(*arguments)

    monkeypatch.setattr(module, "find_beginning", second_driver)
    with RunDirectory(config(tmp_path, resume="must")) as directory:
        assert directory.state.attempt == 1


def test_auto_never_restarts_a_run_whose_checkpoints_are_gone(tmp_path):
    with RunDirectory(config(tmp_path)) as directory:
        path = write(directory)
    (path / "COMMITTED").unlink()
    with pytest.raises(
        ConfigError,
        match=(
            r"auto would start at version 0 again: .*checkpoints has no committed one; restore them"
        ),
    ):
        RunDirectory(config(tmp_path, resume="auto"))
    (path.parent / "LATEST").unlink()
    # As if the run had been killed before its first checkpoint.
    with RunDirectory(config(tmp_path, resume="auto")) as directory:
        assert directory.state.version == 0
    (tmp_path / "run" / "metrics.jsonl").write_text(
        '{"event": "checkpoint", "attempt": 0, "step": 1, "version": 1, "time": 0.0}\n'
    )
    for save in ({}, {"save": str(tmp_path / "mistyped")}):
        with pytest.raises(ConfigError, match="auto would start at version 0 again"):
            RunDirectory(config(tmp_path, resume="auto", checkpoint=save))
    assert not (tmp_path / "mistyped").exists()


def test_abandoned_checkpoints_come_last_until_the_run_returns_to_them(tmp_path):
    def resumed_from(step, *versions):
        with RunDirectory(
            config(tmp_path, resume="must", checkpoint={"ckpt_step": step, "keep": 9})
        ) as directory:
            for version in versions:
                write(directory, replace(directory.state, version=version))
            return directory.checkpoints.versions()

    with RunDirectory(config(tmp_path, checkpoint={"keep": 9})) as directory:
        for version in (10, 20, 30, 40):
            write(directory, replace(directory.state, version=version))
    assert resumed_from(10, 15, 30, 45) == [45, 30, 15, 10, 40, 20]
    damaged = tmp_path / "run" / "checkpoints" / "step_000045" / "learner" / "weights"
    damaged.write_text("2")
    with RunDirectory(config(tmp_path, resume="must", checkpoint={"keep": 9})) as directory:
        assert directory.state.version == 30, "the run has gone back from 40"
    assert resumed_from(40, 41) == [41, 40, 20, 10, 45, 30, 15]


def test_checkpoints_elsewhere_belong_to_one_run_at_a_time(tmp_path):
    elsewhere = {"save": str(tmp_path / "elsewhere")}
    with RunDirectory(config(tmp_path, checkpoint=elsewhere)) as directory:
        with pytest.raises(
            ConfigError,
            match=r"checkpoint.save = .*elsewhere' is in use by process .* name another directory",
        ):
            RunDirectory(config(tmp_path, name="other", checkpoint=elsewhere))
        write(directory)
    with pytest.raises(ConfigError, match=r"belongs to another run .* not this new one"):
        RunDirectory(config(tmp_path, name="third", checkpoint=elsewhere, resume="auto"))
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(ConfigError, match=r"belongs to another run .* set checkpoint.load"):
        RunDirectory(config(tmp_path, checkpoint=elsewhere, resume="must"))


def test_checkpoints_elsewhere(tmp_path):
    elsewhere = {"save": str(tmp_path / "elsewhere")}
    with RunDirectory(config(tmp_path, checkpoint=elsewhere)) as directory:
        assert write(directory).parent == tmp_path / "elsewhere"
    with RunDirectory(config(tmp_path, checkpoint=elsewhere, resume="must")) as directory:
        assert directory.checkpoint is not None
    with pytest.raises(ConfigError, match="has checkpoints of another run"):
        RunDirectory(config(tmp_path, name="other", checkpoint=elsewhere))
    with RunDirectory(config(tmp_path, name="third")):
        pass
    with pytest.raises(ConfigError, match=r"belongs to another run .* set checkpoint.load"):
        RunDirectory(config(tmp_path, name="third", checkpoint=elsewhere, resume="auto"))


def test_a_removed_lock_file_keeps_others_out_and_is_noticed(tmp_path):
    with RunDirectory(config(tmp_path)) as directory:
        write(directory)
        (directory.path / ".lock").unlink()
        with pytest.raises(ConfigError, match="in use by another process"):
            RunDirectory(config(tmp_path, resume="auto"))
        with pytest.raises(LockLostError, match=r"\.lock was removed or replaced"):
            write(directory, replace(directory.state, version=1))
        assert directory.checkpoints.versions() == [0]


@pytest.mark.parametrize("name", [".lock", "run.json"])
def test_a_pipe_in_the_run_directory_is_an_error_and_does_not_block(tmp_path, name):
    with RunDirectory(config(tmp_path)) as directory:
        write(directory)
    (tmp_path / "run" / name).unlink()
    os.mkfifo(tmp_path / "run" / name)
    with pytest.raises(ConfigError, match=f"{name}.* is a named pipe"):
        RunDirectory(config(tmp_path, resume="auto"))


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.EROFS, "Read-only file system"),
        (errno.ENOSPC, "No space left on device"),
        (errno.EACCES, "Permission denied"),
    ],
)
@pytest.mark.parametrize("there", [False, True], ids=["new", "existing"])
def test_a_directory_that_cannot_be_written_is_named_with_the_fix(
    tmp_path, monkeypatch, number, why, there
):
    def refuse(path):
        raise OSError(number, why, ".lock")

    if there:
        (tmp_path / "run").mkdir()
    monkeypatch.setattr("asyncrl.rundir.directory.append_to", refuse)
    with pytest.raises(
        ConfigError,
        match=(
            f"run directory {tmp_path / 'run'} cannot be written: {why}; set runs_root or"
            " ASYNCRL_RUNS"
        ),
    ):
        RunDirectory(config(tmp_path, resume="auto"))


def test_a_refused_run_does_not_take_its_name(tmp_path, monkeypatch):
    def fail(number, within):
        def failing(*arguments):
            if within in str(arguments):
                raise OSError(number, os.strerror(number))
            return

        return failing

    with monkeypatch.context() as patched:
        patched.setattr("fcntl.flock", fail(errno.ENOLCK, ""))
        with pytest.raises(ConfigError, match="its file system has no locks"):
            RunDirectory(config(tmp_path))
    with monkeypatch.context() as patched:
        full = fail(errno.ENOSPC, "config.yaml")
        patched.setattr("asyncrl.rundir.directory.replace_text", full)
        patched.setattr("asyncrl.rundir.directory.read_record", lambda path: None)
        with pytest.raises(ConfigError, match="cannot be written: No space left"):
            RunDirectory(config(tmp_path))
    assert not (tmp_path / "run").exists()
    with RunDirectory(config(tmp_path)) as directory:
        assert directory.state.attempt == 0


@pytest.mark.parametrize(
    "line",
    [b'{"event"', b"5", b"{}", b"null", b"\x80", b"[" * 100_000],
    ids=["cut", "number", "empty", "null", "bytes", "deep"],
)
def test_a_damaged_line_of_metrics_is_named(tmp_path, line):
    with RunDirectory(config(tmp_path, resume="auto")) as directory:
        (directory.path / "metrics.jsonl").write_bytes(line + b"\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 1 is .*; remove that line"):
        RunDirectory(config(tmp_path, resume="auto"))


def test_an_export_replaces_the_old_one_only_when_complete(tmp_path, monkeypatch):
    """If the process is killed between the two renames, the next attempt restores the old
    export."""
    with RunDirectory(config(tmp_path)) as directory:
        write(directory)
        (directory.path / "hf").mkdir()
        (directory.path / "hf" / "model").write_text("old")
        (directory.path / ".hf").mkdir()
        (directory.path / ".hf" / "model").write_text("new")
        rename = os.replace

        def killed(source, target):
            if target == directory.path / "hf":
                raise SystemExit
            rename(source, target)

        monkeypatch.setattr(os, "replace", killed)
        with pytest.raises(SystemExit):
            replace_directory(directory.path / ".hf", directory.path / "hf")
        monkeypatch.undo()
        assert not (directory.path / "hf").exists()
        (directory.path / ".snapshot_abc").mkdir()
        (directory.checkpoints.directory / ".probe_abc").mkdir(parents=True)
    with RunDirectory(config(tmp_path, resume="auto")) as directory:
        assert (directory.path / "hf" / "model").read_text() == "old"
        assert not [
            path.name
            for path in directory.path.iterdir()
            if path.name in (".hf", ".replaced.hf", ".snapshot_abc")
        ]
        assert not list(directory.checkpoints.directory.glob(".probe_*"))
        (directory.path / ".hf").mkdir()
        (directory.path / ".hf" / "model").write_text("newer")
        replace_directory(directory.path / ".hf", directory.path / "hf")
        assert (directory.path / "hf" / "model").read_text() == "newer" and not (
            directory.path / ".replaced.hf"
        ).exists()


@pytest.mark.parametrize("name", ["", "step_000001", "LATEST"])
@pytest.mark.parametrize("resume", ["auto", "must"])
def test_checkpoints_without_permission_are_not_called_missing(tmp_path, name, resume):
    with RunDirectory(config(tmp_path)) as directory:
        for version in (0, 1):
            write(directory, replace(directory.state, version=version))
        place = directory.checkpoints.directory / name
    with (
        without_permission(place),
        pytest.raises(ConfigError, match=r"checkpoints.* cannot be read \(Permission denied\)"),
    ):
        RunDirectory(config(tmp_path, resume=resume))


@pytest.mark.parametrize("umask", [0o002, 0o027])
def test_the_files_of_a_run_follow_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        with RunDirectory(config(tmp_path)) as directory:
            write(directory)
    finally:
        os.umask(before)
    for path in [directory.path, *directory.path.rglob("*")]:
        wanted = (0o777 if path.is_dir() else 0o666) & ~umask
        assert (path.name, stat.S_IMODE(path.stat().st_mode)) == (path.name, wanted)


def test_what_is_cheap_is_refused_before_anything_is_imported(tmp_path):
    """A taken name, no checkpoint, and a changed setting: without torch, and without the parts of a
    run."""
    first = config(tmp_path)
    with RunDirectory(first) as directory:
        write(directory, replace(directory.state, version=1))
        with pytest.raises(ConfigError, match="is in use by process"):
            refuse_early(config(tmp_path, resume="must"))
    script = """if True:
        import sys
        from asyncrl.commands import run
        codes = [run("train", sys.argv[1], words.split()) for words in sys.argv[2:]]
        print(codes, {"torch", "deepspeed", "asyncrl.preflight.plan.plan"} & {*sys.modules})
    """
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(first.model_dump(mode="json")))
    words = ["--name run", "--resume must --seed 7", "--resume must --name other"]
    found = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "run.yaml", *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.stdout == "[2, 2, 2] set()\n", found.stderr
    for message in ("exists; resume it", "seed = 7, but", "no committed checkpoint in"):
        assert message in found.stderr
    assert not (tmp_path / "other").exists()


def test_a_finished_run_has_nothing_left_to_train(tmp_path):
    again = config(tmp_path, resume="must")
    with RunDirectory(config(tmp_path)) as directory:
        write(directory, replace(directory.state, version=3))
        (directory.path / "hf").mkdir()
    assert refuse_early(again) is None, "its attempt was killed"
    with RunDirectory(again) as directory:
        directory.end("finished")
    text = refuse_early(again)
    assert text is not None and text.startswith("run run is finished: step 3 of 3; the model is in")
    assert refuse_early(again.model_copy(update={"resume": "auto"})) == text
    assert refuse_early(again.model_copy(update={"max_steps": 4})) is None
    fewer = refuse_early(again.model_copy(update={"max_steps": 2}))
    assert fewer is not None and "step 3, and max_steps = 2; the model is in" in fewer
    (directory.path / "hf").rmdir()
    assert refuse_early(again) is None


def test_a_finished_run_without_steps_is_finished(tmp_path):
    again = config(tmp_path, resume="auto", max_steps=0, eval={"data": "held_out.parquet"})
    with RunDirectory(again) as directory:
        (directory.path / "hf").mkdir()
    assert refuse_early(again) is None, "its attempt was killed"
    with RunDirectory(again) as directory:
        directory.end("finished")
    text = refuse_early(again)
    assert text is not None and text.startswith("run run is finished: step 0 of 0; the model is in")
    assert refuse_early(again.model_copy(update={"max_steps": 4})) is None
