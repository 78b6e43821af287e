"""Temporary folders of processes that were killed go when the next one is made; those of living ones stay."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from asyncrl.runtime.temporary import temporary_folder

MAKES = "from asyncrl.runtime.temporary import temporary_folder as f; folder = f('test'); print(folder.name, flush=True); input()"


def test_a_killed_process_leaves_none_behind(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    makers = [subprocess.Popen([sys.executable, "-c", MAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
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
