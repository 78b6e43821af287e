"""Which replicas count as committed and which as unroutable, with scripted answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from fake_actors import FakeActor, FakeHandle, FakeReply
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from asyncrl.contracts.messages import Manifest, ReplicaStatus, WeightsId
from asyncrl.runtime.ray import serve_calls
from asyncrl.testing import VirtualTimeLoop
from asyncrl.testing.generators import fake_status
from asyncrl.weights import push as push_module
from asyncrl.weights.manifest import ManifestError
from asyncrl.weights.push import SILENT, ServeWeightSync
from asyncrl.weights.version_registry import VersionRegistry

MANIFEST = Manifest("r", 1, 4, (), (), (), ())


@pytest.fixture
def anyio_backend(monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any]]:
    """All that the push waits for is in its event loop, so it waits in virtual time."""
    for module in (push_module, serve_calls):
        monkeypatch.setattr(module, "time", LoopTime())
    return "asyncio", {"loop_factory": VirtualTimeLoop}


class LoopTime:
    """The time of the running event loop, in the place of a module's `time`."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()


def at(replica: str, version: int, attempt: int = 1) -> ReplicaStatus:
    return replace(
        fake_status(replica),
        weights=WeightsId("r", attempt, version),
        applied={"pause_s": 0.1},
    )


def sync(
    status: Callable[[], list[Any]], applied: Callable[[], list[Any]] = list, timeout_s: float = 0.5
) -> tuple[ServeWeightSync, list[Manifest]]:
    """A `ServeWeightSync` over a handle with these answers, and the list of announcements."""
    announced: list[Manifest] = []

    class Call:
        def __init__(self, answers: Callable[[], list[Any]]) -> None:
            self.answers = answers

        async def _fetch_replica_results_async(self) -> list[Any]:
            return [FakeReply(partial(reply, answer)) for answer in self.answers()]

    async def reply(answer: Any) -> Any:
        if answer is SILENT:
            await asyncio.Event().wait()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def announce(manifest: Manifest) -> None:
        announced.append(manifest)

    handle: Any = FakeHandle(lambda method, *args: Call(status if method == "status" else applied))
    return ServeWeightSync(handle, FakeActor(announce=announce), timeout_s), announced


async def test_all_replicas_have_the_version() -> None:
    push, announced = sync(lambda: [at("a", 4), at("b", 5)])
    report = await push.push(MANIFEST)
    assert report.version == 4
    assert set(report.replicas) == {"a", "b"}
    assert report.unroutable == ()
    assert announced == [MANIFEST]


async def test_a_late_replica_gets_the_broadcast_again() -> None:
    rounds = iter([[at("a", 4), at("b", 3)], [at("a", 4), at("b", 3)], [at("a", 4), at("b", 4)]])
    push, _ = sync(lambda: next(rounds), timeout_s=30)
    assert set((await push.push(MANIFEST)).replicas) == {"a", "b"}


async def test_a_replica_that_stays_behind_is_unroutable() -> None:
    push, _ = sync(lambda: [at("a", 4), at("b", 3), at("d", 4), at("c", 9, attempt=0)])
    report = await push.push(MANIFEST)
    assert set(report.replicas) == {"a", "d"}
    assert report.unroutable == ("b", "c")


@pytest.mark.parametrize(
    "others",
    [[at("b", 3), at("c", 3)], [SILENT, SILENT], [at("b", 3), SILENT]],
    ids=["behind", "silent", "both"],
)
async def test_fewer_than_half_are_not_enough(
    monkeypatch: pytest.MonkeyPatch, others: list[Any]
) -> None:
    monkeypatch.setattr(push_module, "STATUS_S", 0.05)
    push, _ = sync(lambda: [at("a", 4), *others], lambda: [OSError("no room")])
    with pytest.raises(
        RuntimeError,
        match=(
            r"1 replica of 3 applied version 4 within weights.push_timeout_s = 0.5: OSError: no"
            r" room"
        ),
    ):
        await push.push(MANIFEST)


async def test_half_the_replicas_are_enough_after_the_grace_period() -> None:
    push, _ = sync(lambda: [at("a", 4), at("b", 3)], timeout_s=3600)
    push._grace_s = 0.5
    assert (await asyncio.wait_for(push.push(MANIFEST), 20)).unroutable == ("b",)


async def test_the_push_waits_for_all_live_replicas_during_the_grace_period() -> None:
    rounds = iter([[at("a", 4), at("b", 3)]] * 3 + [[at("a", 4), at("b", 4)]])
    push, _ = sync(lambda: next(rounds), timeout_s=30)
    assert (await push.push(MANIFEST)).unroutable == ()


async def test_one_silent_replica_does_not_excuse_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_module, "STATUS_S", 0.05)
    answers: list[Any] = [at("a", 4), at("b", 4), SILENT]
    push, _ = sync(lambda: answers, timeout_s=3600)
    push._grace_s = 0.3
    assert (await asyncio.wait_for(push.push(MANIFEST), 20)).unroutable == (SILENT,)
    answers[1], push._grace_s = SILENT, 3600
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(push.push(MANIFEST), 1.5)


async def test_a_known_silent_replica_does_not_delay_broadcast_or_survey() -> None:
    """Without this, the broadcast would wait for 15 s and the survey for 10 s."""
    push, _ = sync(lambda: [at("a", 4), SILENT], lambda: [at("a", 4), SILENT], timeout_s=3600)
    push._behind = Counter([SILENT])
    assert (await asyncio.wait_for(push.push(MANIFEST), 5)).unroutable == (SILENT,)


@pytest.mark.parametrize("other", [at("b", 3), SILENT], ids=["slow", "silent"])
async def test_the_end_of_the_grace_period_ends_a_running_round(other: Any) -> None:
    """A full round would take 15 s, and a survey 10 s."""
    push, _ = sync(lambda: [at("a", 4), other], lambda: [at("a", 4), SILENT], timeout_s=3600)
    push._grace_s = 0.3
    assert (await asyncio.wait_for(push.push(MANIFEST), 5)).unroutable in (("b",), (SILENT,))


@pytest.mark.parametrize("late", [at("b", 3), SILENT], ids=["behind", "silent"])
async def test_the_push_waits_again_for_a_replica_that_caught_up(late: Any) -> None:
    """Also if another replica always answers first."""
    rounds: list[list[Any]] = [[at("a", 4), late]]
    push, _ = sync(lambda: rounds[0] if len(rounds) == 1 else rounds.pop(0), timeout_s=3600)
    push._grace_s = 0.0
    assert len((await asyncio.wait_for(push.push(MANIFEST), 5)).unroutable) == 1
    push._grace_s = 3600.0
    rounds[:] = [[at("a", 4), at("b", 4)], [at("a", 5), at("b", 4)], [at("a", 5), at("b", 5)]]
    report = await asyncio.wait_for(push.push(replace(MANIFEST, version=5)), 20)
    assert set(report.replicas) == {"a", "b"} and report.unroutable == ()


async def test_a_drain_with_progress_extends_the_timeout() -> None:
    """The push waits for generations longer than the timeout, as long as they produce tokens."""
    tokens = iter(range(100))
    answers = [[replace(at("a", 3), tokens_generated=next(tokens))] for _ in range(12)] + [
        [at("a", 4)]
    ]
    rounds = iter(answers)
    push, _ = sync(lambda: next(rounds), timeout_s=0.7)
    push._drains = True
    assert set((await push.push(MANIFEST)).replicas) == {"a"}
    push, _ = sync(lambda: [replace(at("a", 3), tokens_generated=7)], timeout_s=0.7)
    push._drains = True
    with pytest.raises(RuntimeError, match="no replica of 1 applied version 4"):
        await push.push(MANIFEST)


async def test_the_push_waits_for_a_replica_that_comes_back() -> None:
    answers = iter([None, TimeoutError(), [at("a", 4)]])

    def status() -> list[Any]:
        answer = next(answers)
        if answer is None:
            raise DeploymentUnavailableError(DeploymentID("Generator", "app"))
        if isinstance(answer, TimeoutError):
            raise answer
        return answer

    push, _ = sync(status, timeout_s=30)
    assert set((await push.push(MANIFEST)).replicas) == {"a"}


async def test_no_replica_has_the_version() -> None:
    push, _ = sync(lambda: [at("a", 3), ValueError("gone")], lambda: [OSError("no room")])
    with pytest.raises(
        RuntimeError, match=r"no replica of 1 applied version 4 within .* OSError: no room"
    ):
        await push.push(MANIFEST)


async def test_a_manifest_that_does_not_fit_ends_at_once() -> None:
    push, _ = sync(lambda: [at("a", 3)], lambda: [ManifestError("lacks 'x'")], timeout_s=600)
    with pytest.raises(RuntimeError, match="was refused: lacks 'x'"):
        await push.push(MANIFEST)


async def test_a_silent_replica_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_module, "STATUS_S", 0.05)
    push, _ = sync(lambda: [at("a", 4), SILENT], timeout_s=0.3)
    report = await push.push(MANIFEST)
    assert set(report.replicas) == {"a"}
    assert report.unroutable == (SILENT,)
    push._timeout_s = 3600
    assert (await push.push(MANIFEST)).unroutable == (SILENT,)  # no second wait


async def test_a_held_replica_keeps_its_version_and_is_not_counted() -> None:
    versions = {"a": 4, "b": 4, "c": 4}
    calls: list[tuple[Any, ...]] = []
    push, _ = sync(lambda: [at(name, version) for name, version in versions.items()])

    def answer(method: str, *arguments: Any) -> Any:
        calls.append((method, *arguments))
        if method == "hold":
            return [name == arguments[0] for name in versions]
        if method == "apply_version":
            versions.update(
                {name: arguments[0].version for name in versions if name != arguments[1]}
            )
        return (
            [at(name, version) for name, version in versions.items()] if method == "status" else []
        )

    broadcast = push._handle.broadcast

    def recording_broadcast(method: str, *arguments: Any) -> Any:
        call = broadcast("status")
        call.answers = lambda: answer(method, *arguments)
        return call

    push._handle = FakeHandle(recording_broadcast)

    async with asyncio.timeout(20):
        await push.push(MANIFEST)
        assert await push.hold(3) is None, "not the version that was pushed last"
        assert await push.hold(4) == "c"
        report = await push.push(replace(MANIFEST, version=5))
        assert set(report.replicas) == {"a", "b"}
        assert report.unroutable == ()
        assert versions == {"a": 5, "b": 5, "c": 4}
        await push.release("c")
        assert calls[-1] == ("release", "c")
        report = await push.push(replace(MANIFEST, version=6))
        assert set(report.replicas) == {"a", "b", "c"}


@pytest.mark.parametrize(
    "answers",
    [[at("a", 4), at("b", 3)], [at("a", 4), TimeoutError()], [at("a", 4), at("b", 4, attempt=0)]],
    ids=["behind", "silent", "another attempt's"],
)
async def test_the_only_replica_with_the_version_is_not_held(answers: list[Any]) -> None:
    push, _ = sync(lambda: answers)
    await push.push(MANIFEST)
    assert await push.hold(4) is None


async def test_hold_returns_none_if_the_replica_refuses() -> None:
    """The replica has started to take another version, or died."""
    push, _ = sync(lambda: [at("a", 4), at("b", 4)], lambda: [False, False])
    await push.push(MANIFEST)
    assert await push.hold(4) is None
    assert set((await push.push(MANIFEST)).replicas) == {"a", "b"}


async def test_a_successor_that_needs_the_gpu_may_start_in_a_rest_a_push_and_a_wake() -> None:
    """The only replica has died. Its successor starts unless the learner is on the device, and
    rests, pushes and wakes need it."""
    registry = VersionRegistry()

    def answers() -> list[Any]:
        if registry.learner_on_device():
            raise DeploymentUnavailableError(DeploymentID("Generator", "app"))
        return [registry.learner_shift()]

    push, _ = sync(lambda: [at("b", 4)] if answers() else [], answers, timeout_s=0.5)
    push._registry = FakeActor(
        **{
            name: asynchronous(getattr(registry, name))
            for name in ("announce", "set_learner_shift", "set_learner_on_device")
        }
    )
    await push.rest()
    assert registry.learner_on_device()
    assert (await push.push(MANIFEST)).replicas.keys() == {"b"}
    assert registry.learner_shift()
    await push.rest()
    await push.wake()
    assert not registry.learner_on_device()


def asynchronous(method: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*arguments: Any) -> Any:
        return method(*arguments)

    return call
