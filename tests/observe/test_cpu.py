"""CPU time of processes, those that have ended included."""

import subprocess
import sys

import psutil
import pytest

from asyncrl.observe import cpu_seconds, cpu_seconds_between

BURN = "import time\nwhile time.process_time() < 0.3: pass\n"


def test_a_process_that_ends_between_two_calls_is_counted():
    me = psutil.Process()
    before = cpu_seconds(me)
    subprocess.run([sys.executable, "-c", BURN], check=True)
    used = cpu_seconds_between(before, cpu_seconds(me))
    assert sum(used.values()) > 0.25  # the kernel counts in ticks of 0.01 s, for user and system


def test_a_process_that_runs_has_its_own_name():
    with subprocess.Popen([sys.executable, "-c", BURN + "input()"], stdin=subprocess.PIPE) as child:
        me = psutil.Process()
        while not (named := {name for name in cpu_seconds(me) if name != "driver"}):
            pass
        child.communicate(b"\n")
    assert len(named) >= 1 and "driver" in cpu_seconds(me)


def test_the_sum_is_right_when_a_name_goes():
    assert cpu_seconds_between({"driver": 1.0, "gone": 2.0}, {"driver": 4.0}) == {
        "driver": 3.0,
        "gone": -2.0,
    }


def test_a_root_that_has_ended_has_used_nothing():
    child = subprocess.Popen([sys.executable, "-c", ""])
    process = psutil.Process(child.pid)
    child.wait()
    assert cpu_seconds(process) == pytest.approx({})
