"""Who starts Serve on a shared cluster, and who ends it, over a fake cluster.
`tests/jobs/test_ways_in.py` has the same on a real one."""

from __future__ import annotations

from typing import Any

import pytest
from fake_actors import FakeActor
from ray.serve.config import ProxyLocation

from asyncrl.generation import shared_serve
from asyncrl.generation.shared_serve import MARK, end_shared_serve, start_serve


class FakeCluster:
    """Ray's key-value store, its named leases, and Serve's controller."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stored: dict[str, bytes] = {}
        self.controller: str | None = None
        self.leases: list[str] = []
        self.applications: list[str] = []
        self.port_is_free = True
        self.started: list[dict[str, Any]] = []
        self.asked = 0
        replaced = {
            "_internal_kv_get": self.stored.get,
            "_internal_kv_put": self.stored.__setitem__,
            "_controller": self.running,
            "_leases": lambda: self.leases,
            "_port_is_free": lambda: self.port_is_free,
            "find_registry": lambda name: None,
            "LOOK_EVERY_S": 0.001,
        }
        for name, value in replaced.items():
            monkeypatch.setattr(shared_serve, name, value)
        monkeypatch.setattr(shared_serve.serve, "start", self.start)
        # It is its own status, and its own client.
        self._controller = FakeActor(graceful_shutdown=self.end)
        monkeypatch.setattr(shared_serve.serve, "status", lambda: self)
        monkeypatch.setattr(shared_serve.context, "_get_global_client", lambda: self)

    def running(self) -> str | None:
        self.asked += 1
        if self.asked > 5 and self.stored.get(MARK) == f"ending {self.controller}".encode():
            self.controller = None  # another run has ended it meanwhile
        return self.controller

    def start(self, **options: Any) -> None:
        self.started.append(options)
        self.controller = f"controller {len(self.started)}"

    async def end(self, wait: bool) -> None:
        assert not wait
        self.controller = None


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    return FakeCluster(monkeypatch)


def test_a_run_on_its_own_cluster_opens_no_port_and_leaves_no_mark(cluster: FakeCluster) -> None:
    start_serve(shared=False)
    assert cluster.started == [{"proxy_location": ProxyLocation.Disabled}] and not cluster.stored


@pytest.mark.parametrize(
    ("free", "where"), [(True, ProxyLocation.HeadOnly), (False, ProxyLocation.Disabled)]
)
def test_who_comes_during_a_run_finds_the_shipped_files_port(
    cluster: FakeCluster, free: bool, where: ProxyLocation
) -> None:
    cluster.port_is_free = free
    start_serve(shared=True)
    (options,) = cluster.started
    assert options["proxy_location"] == where
    assert (options["http_options"].host, options["http_options"].port) == ("127.0.0.1", 8000)


async def test_the_last_run_ends_a_serve_that_a_run_started(cluster: FakeCluster) -> None:
    start_serve(shared=True)
    start_serve(shared=True)
    assert len(cluster.started) == 1
    for cluster.leases, cluster.applications in ((["second-versions"], []), ([], ["standing"])):
        await end_shared_serve("first")
        assert cluster.controller and cluster.stored[MARK] == b"started controller 1"
    cluster.applications = []
    await end_shared_serve("second")
    assert cluster.controller is None


@pytest.mark.parametrize("mark", [None, b"started controller 0"])
async def test_a_serve_that_no_run_started_stays(cluster: FakeCluster, mark: bytes | None) -> None:
    cluster.start()
    cluster.stored |= {} if mark is None else {MARK: mark}
    start_serve(shared=True)
    await end_shared_serve("run")
    assert cluster.controller == "controller 1" and len(cluster.started) == 1


def test_a_run_that_starts_waits_for_the_end_that_another_run_began(cluster: FakeCluster) -> None:
    start_serve(shared=True)
    cluster.stored[MARK], cluster.asked = b"ending controller 1", 0
    start_serve(shared=True)
    assert cluster.asked > 5 and cluster.stored[MARK] == b"started controller 2"


def test_an_end_that_nobody_finishes_is_not_waited_for_forever(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_serve(shared=True)
    cluster.stored[MARK], cluster.asked = b"ending controller 1", -(10**6)
    monkeypatch.setattr(shared_serve, "END_S", 0.01)
    start_serve(shared=True)
    assert cluster.controller == "controller 1" and len(cluster.started) == 1
    assert cluster.stored[MARK] == b"started controller 1"
