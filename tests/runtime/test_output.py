"""Standard output that is gone, full or closed never ends the program."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

PROGRAM = """
import sys, time
from asyncrl.runtime import output
from asyncrl.runtime.output import lasting_output, open_missing_streams

output.END_S = 0.3
open_missing_streams()
with lasting_output():
    for line in range({lines}):
        print("line", line, {text!r}, flush=True)
    print("at the end", file=sys.stderr, flush=True)
print("after", flush=True)
with open({done!r}, "w") as file:
    file.write("done")
"""


def program(done: object, lines: int = 3, text: str = "") -> list[str]:
    source = PROGRAM.format(done=str(done), lines=lines, text=text)
    return [sys.executable, "-c", source]


def started(command: Sequence[str], **streams: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, **streams)


@pytest.mark.parametrize("opened", [os.pipe, os.openpty], ids=["pipe", "terminal"])
def test_a_reader_that_leaves_does_not_end_the_program(tmp_path, opened):
    reader, writer = opened()
    os.close(reader)
    process = started(program(tmp_path / "done", 2000), stdout=writer, stderr=writer)
    os.close(writer)
    assert process.wait(30) == 0 and (tmp_path / "done").exists()


@pytest.mark.parametrize("blocking", [True, False])
def test_a_full_pipe_does_not_block_the_program(tmp_path, blocking):
    """Nobody reads. At the end, what could not be written is left out."""
    reader, writer = os.pipe()
    os.set_blocking(writer, blocking)
    source = program(tmp_path / "done", 2000, "x" * 1000)
    source[-1] = source[-1].replace('print("after", flush=True)\n', "")  # it would wait
    process = started(source, stdout=writer, stderr=subprocess.DEVNULL)
    try:
        assert process.wait(30) == 0 and (tmp_path / "done").exists()
    finally:
        process.kill()
        os.close(writer)
    with os.fdopen(reader, "rb") as file:
        assert file.readline().startswith(b"line 0 x")


def test_what_is_read_is_whole_and_in_order(tmp_path):
    command = program(tmp_path / "done", 2000)
    printed = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=30, check=True
    )
    lines = [f"line {line} " for line in range(2000)]
    assert printed.stdout.decode().splitlines() == [*lines, "at the end", "after"]


def test_a_file_on_a_disk_that_stalls_gets_every_line(tmp_path):
    """A pipe that stalls for END_S is given up; a disk goes on."""
    source = program(tmp_path / "done")
    slow = "write = output.os.write\noutput.os.write = lambda *a: time.sleep(0.5) or write(*a)\n"
    source[-1] = source[-1].replace("with lasting", f"{slow}with lasting")
    with open(tmp_path / "log", "wb") as log:
        assert started(source, stdout=log.fileno(), stderr=log.fileno()).wait(30) == 0
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == ["line 0 ", "line 1 ", "line 2 ", "at the end", "after"]


def test_a_full_disk_and_closed_streams_do_not_end_the_program(tmp_path):
    source = program(tmp_path / "first")
    source[-1] = source[-1].replace('print("after", flush=True)\n', "")  # it would fail
    with open("/dev/full", "wb") as full:
        assert started(source, stdout=full.fileno()).wait(30) == 0
    assert (tmp_path / "first").exists()
    shell = 'exec "$@" <&- >&- 2>&-'
    command = ["sh", "-c", shell, "sh", *program(tmp_path / "second")]
    assert subprocess.run(command, timeout=30).returncode == 0
    assert (tmp_path / "second").exists()


def test_streams_that_are_no_files_stay():
    import io

    from asyncrl.runtime.output import lasting_output

    before, sys.stdout = sys.stdout, io.StringIO()
    try:
        with lasting_output():
            print("kept")
        assert sys.stdout.getvalue() == "kept\n"
    finally:
        sys.stdout = before


def test_a_users_function_may_print_to_a_reader_that_has_left(tmp_path):
    source = f"""
from asyncrl.runtime.output import forgive_output
forgive_output()
for line in range(20_000):
    print("line", line, "\\ud800", flush=line % 2)
open({str(tmp_path / "done")!r}, "w").close()
import os
os._exit(0)  # as the process of a user's function does
"""
    reader, writer = os.pipe()
    os.close(reader)
    process = started([sys.executable, "-c", source], stdout=writer, stderr=writer)
    os.close(writer)
    assert process.wait(30) == 0 and (tmp_path / "done").exists()


COMMAND = [sys.executable, "-m", "asyncrl.cli"]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("/dev/full", "asyncrl: standard output cannot be written (No space left on device)\n"),
        ("terminal", ""),
        ("pipe", ""),
    ],
)
def test_a_command_whose_output_cannot_be_written_ends_without_a_traceback(target, said):
    if target == "/dev/full":
        writer = os.open(target, os.O_WRONLY)
    else:
        reader, writer = os.openpty() if target == "terminal" else os.pipe()
        os.close(reader)
    with os.fdopen(writer, "w") as output:
        done = subprocess.run(
            [*COMMAND, "plan", "--help"], stdout=output, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize("words", [["plan", "/run.yaml"], ["samples", "runs/run"]])
def test_a_command_in_a_removed_folder_is_refused(tmp_path, words):
    (tmp_path / "gone").mkdir()
    script = 'cd "$1" && rmdir "$1" && shift && exec "$@"'
    place = str(tmp_path / "gone")
    done = subprocess.run(
        ["sh", "-c", script, "sh", place, *COMMAND, *words],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("asyncrl: the current folder was removed"), done.stderr
