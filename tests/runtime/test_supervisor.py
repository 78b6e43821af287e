"""The supervisor reports how its process ended, even if the pool noticed before the kernel had the
exit code."""

import os
import socket
import subprocess

from asyncrl.runtime.processes.supervisor import command


def started():
    """A supervisor, its lifeline and our end of its process's connection."""
    reading, lifeline = os.pipe()
    ours, theirs = socket.socketpair()
    with theirs:
        supervisor = subprocess.Popen(
            command(reading, theirs.fileno(), "asyncrl.rewards.process:serve"),
            pass_fds=(reading, theirs.fileno()),
            stderr=subprocess.DEVNULL,
        )
    os.close(reading)
    return supervisor, lifeline, ours


def test_closing_the_lifeline_kills_the_process() -> None:
    supervisor, lifeline, ours = started()
    with ours:
        os.close(lifeline)
        assert supervisor.wait(60) == 128 + 9


def test_the_supervisor_exits_with_the_code_of_its_process() -> None:
    supervisor, lifeline, ours = started()
    ours.close()
    assert supervisor.wait(60) == 1  # it got no setup
    os.close(lifeline)
