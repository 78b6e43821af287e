"""Creating a temporary folder removes those of killed processes and keeps those of living ones."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from asyncrl.generation.engine import engine as engine_module
from asyncrl.generation.engine.engine import start_engine
from asyncrl.generation.engine.processes import EngineProcesses
from asyncrl.generation.settings import GeneratorApp
from asyncrl.runtime.files.temporary import (
    ProcessTemporaryFolder,
    remove_left_behind,
    temporary_folder,
)

MAKES = (
    "from asyncrl.runtime.files.temporary import temporary_folder as f; folder = f('test');"
    " print(folder.name, flush=True); input()"
)


def test_the_folder_of_a_killed_process_is_removed(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    makers = [
        subprocess.Popen(
            [sys.executable, "-c", MAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    killed, living = (Path(maker.stdout.readline().strip()) for maker in makers)
    makers[0].send_signal(signal.SIGKILL)
    makers[0].wait()
    assert killed.exists() and living.exists()
    (tmp_path / "asyncrl_test_of_somebody_else").mkdir()
    with temporary_folder("test") as mine:
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {living.name, Path(mine).name, "asyncrl_test_of_somebody_else"}
    makers[1].communicate("\n")
    assert {path.name for path in tmp_path.iterdir()} == {"asyncrl_test_of_somebody_else"}


LISTENS = """
import multiprocessing, multiprocessing.reduction, tempfile, sys
from asyncrl.runtime.files.temporary import ProcessTemporaryFolder

place = ProcessTemporaryFolder("engine")
mine, other = multiprocessing.Pipe()
multiprocessing.reduction.ForkingPickler.dumps(mine)  # makes a listener in a folder pymp-…
open(tempfile.mkstemp()[1], "w").close()
print(place.path, flush=True)
input()
place.close()
mine, other = multiprocessing.Pipe()
multiprocessing.reduction.ForkingPickler.dumps(mine)
print(multiprocessing.util.get_temp_dir(), flush=True)
"""


@pytest.fixture
def short(monkeypatch):
    """A temporary directory with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def test_files_of_libraries_do_not_outlive_the_process(short):
    """Libraries create pymp-…, vllm_dist_… and sockets, and leave them if the process is killed."""
    makers = [
        subprocess.Popen(
            [sys.executable, "-c", LISTENS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    killed, stopped = (Path(maker.stdout.readline().strip()) for maker in makers)
    assert {path.name for path in short.iterdir()} == {killed.name, stopped.name}
    assert (
        len(list(killed.iterdir())) == 2 == len([*killed.glob("listener-*"), *killed.glob("tmp*")])
    )
    makers[0].send_signal(signal.SIGKILL)
    makers[0].wait()
    output, _ = makers[1].communicate("\n")
    assert Path(output.strip()).parent == short, (
        "the temporary directory is restored, for multiprocessing too"
    )
    remove_left_behind(short)
    assert list(short.iterdir()) == []


@pytest.mark.parametrize(("length", "kept"), [(20, True), (40, False)])
def test_the_folders_path_is_short_enough_for_sockets(monkeypatch, length, kept):
    """The path of a socket has at most 107 characters."""
    directory = "/" + "t" * (length - 1)
    monkeypatch.setattr(tempfile, "tempdir", directory)
    assert ProcessTemporaryFolder.where() == Path(directory if kept else "/tmp")
    longest = len("asyncrl_engine_4194304_1795455045_abcdefgh")
    assert len(str(ProcessTemporaryFolder.where())) + 1 + longest + 1 + 36 <= 107


WANDB = """
import os, signal, sys
from pathlib import Path
from asyncrl.observe.sinks import SinkRun, open_sinks

run = Path(sys.argv[1])
open_sinks(["wandb"], SinkRun("asyncrl", "run", "abcd1234", run, {}))
import tempfile
print(tempfile.gettempdir(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_driver_leaves_no_folders_of_a_sink(short, tmp_path):
    """wandb creates folders on import, and removes them only at a clean exit."""
    folders = [Path(__file__).parents[1], *sys.path]
    environment = {
        **os.environ,
        "WANDB_MODE": "disabled",
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
    }
    done = subprocess.run(
        [sys.executable, "-c", WANDB, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == str(short), done.stderr
    [left] = short.glob("asyncrl_wandb_*")
    assert len(list(left.glob("tmp*wandb*"))) >= 2
    remove_left_behind(short)
    assert list(short.iterdir()) == []


async def test_files_of_an_engine_whose_start_was_cancelled_are_removed(short, monkeypatch):
    """If a replica is stopped while it loads, the thread that creates vLLM's engine and its sockets
    continues."""

    async def hangs(app, caches, processes, node):
        await asyncio.Event().wait()

    monkeypatch.setattr(engine_module, "_load", hangs)
    processes = EngineProcesses()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(start_engine(GeneratorApp(model="unused"), processes), 0.05)
    place = processes._folder
    assert (
        Path(tempfile.gettempdir()) == place.path
        and place.path.parent == short
        and os.environ["TMPDIR"] == str(place.path)
    )
    place.close()
    assert list(short.iterdir()) == []
