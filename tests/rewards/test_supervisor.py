"""The supervisor tells how its process ended, also when the pool saw the end before the kernel had
the code."""

import os
import socket
import subprocess

from asyncrl.rewards.supervisor import command


def started():
    """A supervisor, its lifeline and our end of its process's connection."""
    reading, lifeline = os.pipe()
    ours, theirs = socket.socketpair()
    with theirs:
        supervisor = subprocess.Popen(
            command(reading, theirs.fileno()),
            pass_fds=(reading, theirs.fileno()),
            stderr=subprocess.DEVNULL,
        )
    os.close(reading)
    return supervisor, lifeline, ours


def test_a_process_that_is_no_longer_wanted_was_killed():
    supervisor, lifeline, ours = started()
    with ours:
        os.close(lifeline)
        assert supervisor.wait(60) == 128 + 9


def test_a_process_that_ends_by_itself_has_its_own_code():
    supervisor, lifeline, ours = started()
    ours.close()
    assert supervisor.wait(60) == 1  # nobody told it what to import
    os.close(lifeline)
