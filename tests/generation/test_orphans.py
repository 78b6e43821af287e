"""Generators whose driver was killed: a watcher or the next attempt ends them. Serve is real; the
engines are stubs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ray import serve

from asyncrl.generation import orphans
from asyncrl.generation.app import stop_generators
from asyncrl.generation.orphans import application_name, end_orphans
from asyncrl.generation.settings import registry_name
from asyncrl.weights.version_registry import REGISTRY_NAMESPACE, LeaseHeldError, find_registry

pytestmark = pytest.mark.timeout(240)

DRIVER = """
import asyncio, sys, ray
from stub_replicas import StubGenerator
from asyncrl.config import Config
from asyncrl.generation import app, orphans
from asyncrl.generation.run_generators import RunGenerators, lease_generators
from asyncrl.preflight.specs import generator_app
from small_config import SMALL

address, name, grace_s = sys.argv[1:]
app.Generator = StubGenerator
# The cluster is that of all tests: no port, and Serve stays.
app.start_serve = lambda shared, start=app.start_serve: start(shared=False)
orphans.watch_application.__defaults__ = (float(grace_s),)
ray.init(address=address, log_to_driver=False, configure_logging=False)

async def main():
    config = Config.model_validate({**SMALL, "generator": {"num_cpus": 0.1}})
    generators = RunGenerators(name, await lease_generators(name, "'first'"),
        generator_app(config))
    await generators.begin(watched=True)
    await generators.watcher.ready.remote()
    await app.wait_for_generators(name, 120)
    print("up", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await generators.end()
    print("closed", flush=True)

asyncio.run(main())
"""


@pytest.fixture
def start_driver(ray_cluster: Any) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`start_driver(application, grace_s)`: a driver whose generators are up. The fixture ends
    the driver and its application after the test."""
    started: list[tuple[str, subprocess.Popen[str]]] = []

    def start(name: str, grace_s: float) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-c",
            DRIVER,
            ray_cluster.get_runtime_context().gcs_address,
            name,
            str(grace_s),
        ]
        driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append((name, driver))
        assert driver.stdout is not None and driver.stdout.readline() == "up\n"
        return driver

    yield start
    for name, driver in started:
        driver.kill()
        driver.wait()
        if watcher(name, ray_cluster) is not None:
            ray_cluster.kill(watcher(name, ray_cluster))
        if name in serve.status().applications:
            stop_generators(name)


def watcher(name: str, ray_cluster: Any) -> Any | None:
    try:
        return ray_cluster.get_actor(f"{name}-watcher", namespace=REGISTRY_NAMESPACE)
    except ValueError:
        return None


def until(condition: Callable[[], bool]) -> None:
    while not condition():  # the test's timeout bounds it
        time.sleep(0.1)


def unique(attempt: int) -> tuple[str, str, str]:
    """The run's name and id, and the name of an attempt's application."""
    run_id = f"{os.getpid():08x}"
    return "orphaned", run_id, application_name("orphaned", run_id, attempt)


@pytest.mark.slow
def test_the_watcher_ends_the_generators_of_a_killed_driver_and_itself(
    start_driver: Any, ray_cluster: Any
) -> None:
    name, free = unique(0)[2], ray_cluster.available_resources()["CPU"]
    driver = start_driver(name, 0.5)
    assert name in serve.status().applications and watcher(name, ray_cluster) is not None
    driver.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    until(lambda: name not in serve.status().applications)
    print(f"the application ended {time.monotonic() - killed:.1f} s after its driver was killed")
    until(lambda: watcher(name, ray_cluster) is None)
    until(lambda: ray_cluster.available_resources()["CPU"] > free - 1e-6)


@pytest.mark.slow
def test_a_driver_that_ends_normally_leaves_no_watcher(start_driver: Any, ray_cluster: Any) -> None:
    name = unique(1)[2]
    driver = start_driver(name, 600)
    assert driver.communicate("\n")[0] == "closed\n"
    assert name not in serve.status().applications
    until(lambda: watcher(name, ray_cluster) is None)


@pytest.mark.slow
def test_a_watcher_whose_process_dies_is_restarted(start_driver: Any, ray_cluster: Any) -> None:
    """Its process dies as if its node, which is also the driver's, were lost."""
    name = unique(2)[2]
    driver = start_driver(name, 0.5)
    ray_cluster.kill(watcher(name, ray_cluster), no_restart=False)
    driver.send_signal(signal.SIGKILL)
    until(lambda: name not in serve.status().applications)
    until(lambda: watcher(name, ray_cluster) is None)


@pytest.mark.slow
async def test_the_next_attempt_ends_only_the_generators_of_its_run(
    start_driver: Any, ray_cluster: Any
) -> None:
    run, run_id, name = unique(3)
    driver = start_driver(name, 600)  # its watcher waits longer than this test
    other = "orphaned-standing"
    serve.start()
    standing = serve.deployment(num_replicas=1, ray_actor_options={"num_cpus": 0})(
        type("ServedWeights", (), {"__call__": lambda self: 1})
    ).bind()
    serve.run(standing, name=other, route_prefix=None)
    lines: list[str] = []
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(LeaseHeldError, match="leased by run 'first'"),
    ):
        patch.setattr(orphans, "NODE_LOST_S", 0.0)
        await end_orphans(run, run_id, lines.append)
    assert (
        len(lines) == 1
        and lines[0].startswith("waiting up to 0 s for the end of run 'first'")
        and name in serve.status().applications
    )
    driver.send_signal(signal.SIGKILL)
    await end_orphans(run, "another run's", lines.append)
    assert name in serve.status().applications
    await end_orphans(run, run_id, lines.append)
    assert lines[-1] == f"ending {name}, left by an earlier attempt"
    assert set(serve.status().applications) >= {other} and name not in serve.status().applications
    until(lambda: find_registry(registry_name(name)) is None)
    serve.delete(other)


class Lease:
    """A fake `find_registry` that returns or raises these answers in turn."""

    def __init__(self, *answers: Any) -> None:
        self.answers = iter(answers)

    def __call__(self, name: str) -> Any:
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_the_watcher_survives_errors_and_a_new_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's control service is unreachable, the lease is renewed in the grace period, and finally
    it ends."""
    ended: list[str] = []

    async def end(name: str) -> None:
        ended.append(name)

    async def end_serve(name: str) -> None:
        ended.append(f"Serve of {name}")

    async def applications() -> set[str]:
        return {"one", "two"}

    monkeypatch.setattr(orphans, "LOOK_EVERY_S", 0)
    monkeypatch.setattr(orphans, "_end", end)
    monkeypatch.setattr(orphans, "end_shared_serve", end_serve)
    monkeypatch.setattr(orphans, "_applications", applications)
    monkeypatch.setattr(
        orphans,
        "find_registry",
        Lease(
            "lease",
            ConnectionError("away"),
            None,
            "lease",
            None,
            ConnectionError("away"),
            None,
            None,
        ),
    )
    done = asyncio.Event()
    monkeypatch.setattr(
        orphans.ray, "get_runtime_context", lambda: type("Context", (), {"current_actor": None})
    )
    monkeypatch.setattr(orphans.ray, "kill", lambda actor: done.set())
    watching = orphans.ApplicationWatcher.__new__(orphans.ApplicationWatcher)
    await watching.__init__("one", 0.0)  # type: ignore[misc]
    await done.wait()
    assert ended == ["one", "Serve of one"]


async def test_the_next_attempt_waits_until_ray_notices_the_loss_of_a_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray shows the lease of a driver on a lost node for up to 65 s, and an attempt that did not
    wait would fail."""
    lines: list[str] = []
    waits_s: list[float] = []

    async def held(registry: str) -> str | None:
        return "run 'r', process 7"

    async def take(registry: str, holder: str, application: str, release_s: float = 10.0) -> str:
        waits_s.append(release_s)
        return "lease"

    async def applications() -> set[str]:
        return {application_name("r", "0123456789", 0), "asyncrl-other"}

    async def end(name: str) -> None:
        lines.append(f"ended {name}")

    monkeypatch.setattr(orphans, "lease_holder", held)
    monkeypatch.setattr(orphans, "take_lease", take)
    monkeypatch.setattr(orphans, "_applications", applications)
    monkeypatch.setattr(orphans, "_end", end)
    monkeypatch.setattr(orphans.ray, "kill", lambda actor: lines.append(f"ended the {actor}"))
    await end_orphans("r", "0123456789", lines.append)
    assert (
        waits_s[0] > 65
        and lines[0]
        == "waiting up to 75 s for the end of run 'r', process 7, which has asyncrl-r-01234567-0"
    )
    assert lines[-2:] == ["ended asyncrl-r-01234567-0", "ended the lease"]
