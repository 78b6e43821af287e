"""A process that is started before its work is known. Here it runs a shell; in `test_engine` it is vLLM's engine."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from asyncrl.generation.ahead import AheadProcess

PREPARE = partial(os.chdir, "/")


def shell(command):
    return {"target": subprocess.check_call, "name": "Shell", "kwargs": {"args": ["sh", "-c", command]}}


def test_it_runs_what_it_is_given_in_the_environment_of_that_moment(tmp_path, monkeypatch):
    with AheadProcess(PREPARE) as process:
        monkeypatch.setenv("ASYNCRL_TEST_LATER", "set after it was started")
        made = process.Process(**shell(f'printf %s "$ASYNCRL_TEST_LATER, in $PWD" > {tmp_path}/said'))
        assert made is process and not (tmp_path / "said").exists()
        made.start()
        made.join(30)
    assert made.exitcode == 0 and made.name == "Shell"
    assert (tmp_path / "said").read_text() == "set after it was started, in /"


def test_an_error_of_what_it_runs_is_its_exit_code():
    with AheadProcess(PREPARE) as process:
        process.Process(**shell("exit 3")).start()
        process.join(30)
    assert process.exitcode == 1


def test_without_work_it_ends():
    with AheadProcess(PREPARE) as process:
        pass
    assert process.exitcode == -signal.SIGKILL


def test_it_ends_with_a_block_that_fails():
    with pytest.raises(OSError, match="no such model"), AheadProcess(PREPARE) as process:
        raise OSError("no such model")
    assert process.exitcode == -signal.SIGKILL


def test_one_that_has_ended_is_found_by_its_exit_code():
    with AheadProcess(partial(os._exit, 7)) as process:
        process.join(30)
        process.Process(**shell("true")).start()
    assert process.exitcode == 7


def test_it_is_one_process():
    with AheadProcess(PREPARE) as process:
        process.Process(**shell("true"))
        with pytest.raises(RuntimeError, match="a second process"):
            process.Process(**shell("true"))
        process.start()
        process.join(30)


SCRIPT = """
import json, os, sys, time
from functools import partial
from asyncrl.generation.ahead import AheadProcess

if __name__ == "__main__":
    process = AheadProcess(partial(os.chdir, "/"))
    print(json.dumps(process.pid), flush=True)
    time.sleep(600)
"""


def test_it_ends_when_the_one_that_started_it_is_killed(tmp_path):
    script = tmp_path / "owner.py"
    script.write_text(SCRIPT)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as owner:
        process = psutil.Process(json.loads(owner.stdout.readline()))
        owner.kill()
    process.wait(30)
