"""`--watch`: the process beside a run that serves its page."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from small_run import write_small_run

import asyncrl.run.train
from asyncrl.cli import main
from asyncrl.page.browser import has_screen, open_page
from asyncrl.run.watching import PageProcess

PARENT = """
import sys, time
from pathlib import Path
from asyncrl.run.watching import PageProcess
page = PageProcess(lambda line: print(page._process.pid, line, flush=True))
page.begin(Path(sys.argv[1]))
time.sleep(600)
"""


def test_the_page_is_served_until_the_run_ends(tmp_path: Path) -> None:
    said, told = list[str](), threading.Event()

    def say(line: str) -> None:
        said.append(line)
        told.set()

    page = PageProcess(say)
    page.end()  # nothing was started
    run = write_small_run(tmp_path / "run")
    for _ in range(2):
        page.begin(run)  # the second call starts nothing
        assert told.wait(60)
    process = page._process
    assert process is not None and process.poll() is None
    assert said[0].startswith("http://127.0.0.1:") and len(said) == 1
    with urllib.request.urlopen(said[0], timeout=30) as answer:
        assert answer.status == 200 and b"<title>" in answer.read()
    page.end()
    assert process.poll() == 0 and len(said) == 1


def test_the_page_ends_with_a_killed_run(tmp_path: Path) -> None:
    run = write_small_run(tmp_path / "run")
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(run)], stdout=subprocess.PIPE, text=True
    ) as parent:
        try:
            assert parent.stdout is not None
            pid, address = parent.stdout.readline().split()
            server = psutil.Process(int(pid))
            assert address.startswith("http://")
            parent.send_signal(signal.SIGKILL)
            server.wait(30)
        finally:
            parent.kill()


def test_an_error_of_the_page_is_said_and_the_run_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    page = PageProcess(said.append)
    page.begin(tmp_path / "nothing")
    page.end()
    assert (
        len(said) == 1 and said[0].startswith("asyncrl: run ") and "is not a directory" in said[0]
    )


@pytest.mark.parametrize("watch", [True, False])
def test_the_option_reaches_the_run(
    watch: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def run_training(config: object, command: list[str], **named: object) -> int:
        asked.append((command[1:], named["watch"]))
        return 0

    monkeypatch.setattr(asyncrl.run.train, "run_training", run_training)
    config = str(Path("jobs/quickstart/quickstart.yaml").absolute())
    words = ["train", config, *(["--watch"] if watch else []), "--runs_root", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0 and asked == [(words, watch)]


def test_a_page_that_cannot_start_is_said_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("sys.executable", str(tmp_path / "nothing"))
    page = PageProcess(said.append)
    page.begin(tmp_path)
    page.end()
    assert len(said) == 1 and said[0].startswith("it could not be started: ")


def test_a_browser_opens_a_private_file_that_leads_to_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho noise; echo noise >&2; echo "$1" > {opened}; sleep 60\n')
    browser.chmod(0o700)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    if sys.platform != "darwin":
        assert not has_screen()
        with open_page("http://127.0.0.1:1/secret/"):
            assert not opened.exists()
    monkeypatch.setenv("BROWSER", f"{browser} %s &")
    said: list[str] = []
    page = PageProcess(said.append)
    page.begin(write_small_run(tmp_path / "run"))
    end = time.monotonic() + 60
    while not opened.exists() or not opened.read_text().endswith("\n"):
        assert time.monotonic() < end
        time.sleep(0.1)
    file = Path(opened.read_text().strip().removeprefix("file://"))
    assert "url=http://127.0.0.1:" in file.read_text()
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    began = time.monotonic()
    page.end()  # although the browser goes on
    assert time.monotonic() - began < 8 and not file.exists()
    assert len(said) == 1 and said[0].startswith("http://")
