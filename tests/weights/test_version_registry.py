"""The lease on an application: one job has it at a time, and it ends with the job's driver."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from asyncrl.contracts.messages import Manifest
from asyncrl.weights import version_registry as registry
from asyncrl.weights.version_registry import (
    LeaseHeldError,
    VersionRegistry,
    find_registry,
    lease_holder,
    take_lease,
)

DRIVER = """
import asyncio, sys, ray
from asyncrl.weights.version_registry import take_lease
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
lease = asyncio.run(take_lease(sys.argv[2], "run 'first'", "standing"))
print(ray.get(lease.holder.remote()), flush=True)
sys.stdin.read()
"""


class Scripted:
    """A version registry that only answers `holder`."""

    def __init__(self, answer: Any) -> None:
        self.holder = self
        self.answer = answer

    async def remote(self) -> str:
        if self.answer is None:
            await asyncio.Event().wait()
        return str(self.answer)


def name_taken(*args: Any) -> Any:
    raise ValueError("the name is name_taken")


async def test_a_second_job_is_refused_with_the_name_of_the_holder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "open_registry", name_taken)
    monkeypatch.setattr(
        registry, "find_registry", lambda name: Scripted("run 'first' (abc, attempt 0, process 7)")
    )
    with pytest.raises(
        LeaseHeldError,
        match=(
            r"generators 'standing' are leased by run 'first' \(abc, attempt 0, process 7\); wait"
            r" for its end"
        ),
    ):
        await take_lease("standing-versions", "run 'second'", "standing", release_s=0)


async def test_a_holder_that_does_not_answer_does_not_hang_the_second_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "open_registry", name_taken)
    monkeypatch.setattr(registry, "find_registry", lambda name: Scripted(None))
    monkeypatch.setattr(registry, "ANSWER_S", 0.01)
    with pytest.raises(
        LeaseHeldError, match="leased by a job whose version registry does not answer yet"
    ):
        await take_lease("standing-versions", "run 'second'", "standing", release_s=0)


async def test_a_lease_that_ends_while_waiting_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([name_taken, name_taken, lambda *args: "the lease"])
    monkeypatch.setattr(registry, "open_registry", lambda *args: next(answers)(*args))
    monkeypatch.setattr(registry, "find_registry", lambda name: None)
    monkeypatch.setattr(registry, "LOOK_EVERY_S", 0)
    assert (
        await take_lease("standing-versions", "run 'second'", "standing", release_s=60)
        == "the lease"
    )


def test_a_killed_driver_frees_its_lease(ray_cluster: Any) -> None:
    address = ray_cluster.get_runtime_context().gcs_address
    name = f"leased-{os.getpid()}"
    first = subprocess.Popen(
        [sys.executable, "-c", DRIVER, address, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert first.stdout is not None and first.stdout.readline() == "run 'first'\n"
        assert asyncio.run(lease_holder(name)) == "run 'first'"
        with pytest.raises(LeaseHeldError, match="leased by run 'first'"):
            asyncio.run(take_lease(name, "run 'second'", "standing", release_s=0))
        first.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        lease = asyncio.run(take_lease(name, "run 'second'", "standing", release_s=60))
        print(f"a lease was free {time.monotonic() - killed:.1f} s after its driver was killed")
        assert ray_cluster.get(lease.holder.remote()) == "run 'second'"
        ray_cluster.kill(lease)
        while find_registry(name) is not None:
            pass
    finally:
        first.kill()
        first.wait()


def test_a_withdrawn_version_is_not_current() -> None:
    """Its learner has ended, so a replica that starts now could not fetch it."""
    versions = VersionRegistry()
    versions.announce(Manifest("run", 0, 7, (), (), (), ()))
    versions.withdraw()
    assert versions.current() is None and versions.newest() is None
    versions.announce(Manifest("run", 1, 5, (), (), (), ()))
    assert versions.newest() == ("run", 1, 5)
