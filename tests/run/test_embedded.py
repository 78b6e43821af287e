"""`asyncrl.train` from Python: it blocks, or is awaited if an event loop is running. It leaves
nothing behind when it refuses the config."""

import asyncio
import threading

import pytest
from small_config import SMALL, small_config

import asyncrl
from asyncrl.config import ConfigError
from asyncrl.run import supervise, train as run
from asyncrl.run.embedded import RunFailedError


@pytest.fixture
def settings(tmp_path):
    return {
        **SMALL,
        "runs_root": str(tmp_path / "runs"),
        "model": {"path": str(tmp_path / "nowhere")},
    }


def fake(monkeypatch, code, calls=None, works=None):
    """Replace the real run with one that calls `works(on_start)` and returns `code`."""

    def train(config, resume_command, after=None, on_start=None):
        if calls is not None:
            calls.append((config, list(resume_command), threading.current_thread()))
        if works is not None:
            works(on_start)
        config.run_directory.mkdir(parents=True, exist_ok=True)
        (config.run_directory / "config.yaml").write_text("name: small\n")
        return code

    monkeypatch.setattr(run, "run_training", train)


def test_a_config_that_is_refused_leaves_nothing(settings, tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        asyncrl.train(settings)

    async def in_a_loop():
        with pytest.raises(ConfigError, match="nowhere"):
            await asyncrl.train(settings)
        with pytest.raises(ConfigError, match="max_stepz is unknown"):
            await asyncrl.train({**settings, "max_stepz": 1})

    asyncio.run(in_a_loop())
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ConfigError, match=r"overrides = .* work only with the path of a YAML file"):
        asyncrl.train(settings, ["--seed", "1"])


def test_arguments_of_other_kinds_are_named(tmp_path, settings):
    (tmp_path / "mine.yaml").write_text(str(settings))
    (tmp_path / "empty.yaml").touch()
    for config, overrides, message in (
        (
            None,
            [],
            (
                "config is of type NoneType; give a Config, nested mappings, or the path of a YAML"
                " file"
            ),
        ),
        (
            tmp_path / "mine.yaml",
            "--seed 3",
            "overrides = '--seed 3' is a string; give a list of words",
        ),
        (tmp_path / "mine.yaml", ["--seed", -3], "seed = -3: "),
        (tmp_path, [], r"is a directory; give the path of a YAML file, such as '.*config\.yaml'"),
        (tmp_path / "empty.yaml", [], r"empty\.yaml' is empty, not a mapping of settings"),
        (
            {**settings, "model.path": "x"},
            [],
            r"model\.path is one key; write model: \{path: …\}",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            asyncrl.train(config, overrides)


def test_it_blocks_without_a_loop_and_is_awaited_in_one(settings, monkeypatch, tmp_path):
    calls = []
    fake(monkeypatch, 0, calls)
    config = small_config(runs_root=str(tmp_path / "runs"))
    assert asyncrl.train(config).directory == config.run_directory

    async def in_a_loop():
        return await asyncrl.train({**settings, "name": "second"})

    assert asyncio.run(in_a_loop()).directory == config.run_directory.with_name("second")
    assert [thread is threading.main_thread() for *_, thread in calls] == [True, False]
    assert calls[0][1][1:] == ["train", str(config.run_directory / "config.yaml")]


def test_a_run_that_fails_or_is_interrupted_raises(settings, monkeypatch):
    fake(monkeypatch, 1)
    with pytest.raises(RunFailedError, match="run 'small' failed"):
        asyncrl.train(settings)
    fake(monkeypatch, 130)
    with pytest.raises(KeyboardInterrupt):
        asyncrl.train({**settings, "name": "second"})


@pytest.mark.parametrize("early", [False, True], ids=["while it works", "before it began"])
async def test_cancelling_stops_the_run_and_waits_for_its_end(settings, monkeypatch, early):
    started, stopped, cancelled = threading.Event(), threading.Event(), threading.Event()

    def works(on_start):
        started.set()
        if early:
            assert cancelled.wait(10)
        on_start(stopped.set)
        assert stopped.wait(10)

    fake(monkeypatch, 130, works=works)

    task = asyncio.ensure_future(asyncrl.train(settings))
    await asyncio.to_thread(started.wait, 10)
    task.cancel()
    await asyncio.sleep(0)
    cancelled.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stopped.is_set()


async def test_a_second_interrupt_does_not_wait_for_the_checkpoint(settings, monkeypatch):
    started, asked, ended = threading.Event(), threading.Semaphore(0), threading.Event()

    def works(on_start):
        on_start(asked.release)
        started.set()
        for _ in range(2):
            assert asked.acquire(timeout=10)
        ended.set()

    fake(monkeypatch, 130, works=works)

    task = asyncio.ensure_future(asyncrl.train(settings))
    await asyncio.to_thread(started.wait, 10)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.05)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "MemoryError"),
        (MemoryError(" full "), "MemoryError: full"),
        (KeyError("a"), "KeyError: 'a'"),
        (RuntimeError("a part failed"), "a part failed"),
        (ConfigError("name = '' is empty"), "name = '' is empty"),
    ],
)
def test_the_end_of_a_run_names_the_type_of_a_library_error_once(error, line):
    assert supervise._one_line(error) == line
