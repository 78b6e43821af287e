"""Who counts as committed and who as unroutable, on scripted answers of replicas."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from asyncrl.contracts.messages import Manifest, ReplicaStatus, WeightsId
from asyncrl.testing.generators import fake_status
from asyncrl.weights import push as push_module
from asyncrl.weights.manifest import ManifestError
from asyncrl.weights.push import SILENT, ServeWeightSync

MANIFEST = Manifest("r", 1, 4, (), (), (), ())


def at(replica: str, version: int, attempt: int = 1) -> ReplicaStatus:
    return fake_status(replica, weights=WeightsId("r", attempt, version), applied={"pause_s": 0.1})


def sync(
    status: Callable[[], list[Any]], applied: Callable[[], list[Any]] = list, timeout_s: float = 0.5
) -> tuple[ServeWeightSync, list[Manifest]]:
    """A push against a handle that answers so; and what was announced."""
    announced: list[Manifest] = []

    class Call:
        def __init__(self, answers: Callable[[], list[Any]]) -> None:
            self.answers = answers

        async def _fetch_replica_results_async(self) -> list[Any]:
            return [
                SimpleNamespace(get_async=lambda answer=answer: given(answer))
                for answer in self.answers()
            ]

    async def given(answer: Any) -> Any:
        if answer is SILENT:
            await asyncio.Event().wait()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def announce(manifest: Manifest) -> None:
        announced.append(manifest)

    handle = SimpleNamespace(
        broadcast=lambda method, *args: Call(status if method == "status" else applied)
    )
    registry = SimpleNamespace(announce=SimpleNamespace(remote=announce))
    return ServeWeightSync(handle, registry, timeout_s), announced


def test_all_have_it() -> None:
    push, announced = sync(lambda: [at("a", 4), at("b", 5)])
    report = asyncio.run(push.push(MANIFEST))
    assert report.version == 4
    assert set(report.replicas) == {"a", "b"}
    assert report.unroutable == ()
    assert announced == [MANIFEST]


def test_the_late_one_is_asked_again() -> None:
    rounds = iter([[at("a", 4), at("b", 3)], [at("a", 4), at("b", 3)], [at("a", 4), at("b", 4)]])
    push, _ = sync(lambda: next(rounds), timeout_s=30)
    assert set(asyncio.run(push.push(MANIFEST)).replicas) == {"a", "b"}


def test_one_that_stays_behind_is_unroutable() -> None:
    push, _ = sync(lambda: [at("a", 4), at("b", 3), at("d", 4), at("c", 9, attempt=0)])
    report = asyncio.run(push.push(MANIFEST))
    assert set(report.replicas) == {"a", "d"}
    assert report.unroutable == ("b", "c")


@pytest.mark.parametrize(
    "others",
    [[at("b", 3), at("c", 3)], [SILENT, SILENT], [at("b", 3), SILENT]],
    ids=["behind", "silent", "both"],
)
def test_fewer_than_half_are_not_enough(monkeypatch: pytest.MonkeyPatch, others: list[Any]) -> None:
    monkeypatch.setattr(push_module, "STATUS_S", 0.05)
    push, _ = sync(lambda: [at("a", 4), *others], lambda: [OSError("no room")])
    with pytest.raises(
        RuntimeError,
        match=(
            r"1 replica of 3 applied version 4 within weights.push_timeout_s = 0.5: OSError: no"
            r" room"
        ),
    ):
        asyncio.run(push.push(MANIFEST))


def test_after_the_grace_half_are_enough_and_nobody_waits_for_the_timeout() -> None:
    push, _ = sync(lambda: [at("a", 4), at("b", 3)], timeout_s=3600)
    push._grace_s = 0.5
    assert asyncio.run(asyncio.wait_for(push.push(MANIFEST), 20)).unroutable == ("b",)


def test_before_the_grace_all_live_ones_are_waited_for() -> None:
    rounds = iter([[at("a", 4), at("b", 3)]] * 3 + [[at("a", 4), at("b", 4)]])
    push, _ = sync(lambda: next(rounds), timeout_s=30)
    assert asyncio.run(push.push(MANIFEST)).unroutable == ()


def test_one_silent_replica_excuses_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_module, "STATUS_S", 0.05)
    answers: list[Any] = [at("a", 4), at("b", 4), SILENT]
    push, _ = sync(lambda: answers, timeout_s=3600)
    push._grace_s = 0.3
    assert asyncio.run(asyncio.wait_for(push.push(MANIFEST), 20)).unroutable == (SILENT,)
    answers[1], push._grace_s = SILENT, 3600
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(push.push(MANIFEST), 1.5))


def test_a_known_silent_one_delays_neither_the_broadcast_nor_the_survey() -> None:
    """Each would wait for its own time, 15 and 10 s."""
    push, _ = sync(lambda: [at("a", 4), SILENT], lambda: [at("a", 4), SILENT], timeout_s=3600)
    push._behind = Counter([SILENT])
    assert asyncio.run(asyncio.wait_for(push.push(MANIFEST), 5)).unroutable == (SILENT,)


@pytest.mark.parametrize("other", [at("b", 3), SILENT], ids=["slow", "silent"])
def test_the_grace_ends_a_round_that_is_under_way(other: Any) -> None:
    """A round of its own would take 15 s, and asking where the replicas are 10 s."""
    push, _ = sync(lambda: [at("a", 4), other], lambda: [at("a", 4), SILENT], timeout_s=3600)
    push._grace_s = 0.3
    assert asyncio.run(asyncio.wait_for(push.push(MANIFEST), 5)).unroutable in (("b",), (SILENT,))


@pytest.mark.parametrize("late", [at("b", 3), SILENT], ids=["behind", "silent"])
def test_one_that_has_caught_up_is_waited_for_again(late: Any) -> None:
    """Even if another one always answers first."""
    rounds: list[list[Any]] = [[at("a", 4), late]]
    push, _ = sync(lambda: rounds[0] if len(rounds) == 1 else rounds.pop(0), timeout_s=3600)
    push._grace_s = 0.0
    assert len(asyncio.run(asyncio.wait_for(push.push(MANIFEST), 5)).unroutable) == 1
    push._grace_s = 3600.0
    rounds[:] = [[at("a", 4), at("b", 4)], [at("a", 5), at("b", 4)], [at("a", 5), at("b", 5)]]
    report = asyncio.run(asyncio.wait_for(push.push(replace(MANIFEST, version=5)), 20))
    assert set(report.replicas) == {"a", "b"} and report.unroutable == ()


def test_a_drain_that_goes_on_is_no_timeout() -> None:
    """Generations longer than the timeout end before the version is applied; one that makes no
    token any more ends the wait."""
    tokens = iter(range(100))
    answers = [[replace(at("a", 3), tokens_generated=next(tokens))] for _ in range(12)] + [
        [at("a", 4)]
    ]
    rounds = iter(answers)
    push, _ = sync(lambda: next(rounds), timeout_s=0.7)
    push._drains = True
    assert set(asyncio.run(push.push(MANIFEST)).replicas) == {"a"}
    push, _ = sync(lambda: [replace(at("a", 3), tokens_generated=7)], timeout_s=0.7)
    push._drains = True
    with pytest.raises(RuntimeError, match="no replica of 1 applied version 4"):
        asyncio.run(push.push(MANIFEST))


def test_one_that_comes_back_is_waited_for() -> None:
    answers = iter([None, TimeoutError(), [at("a", 4)]])

    def status() -> list[Any]:
        answer = next(answers)
        if answer is None:
            raise DeploymentUnavailableError(DeploymentID("Generator", "app"))
        if isinstance(answer, TimeoutError):
            raise answer
        return answer

    push, _ = sync(status, timeout_s=30)
    assert set(asyncio.run(push.push(MANIFEST)).replicas) == {"a"}


def test_nobody_has_it() -> None:
    push, _ = sync(lambda: [at("a", 3), ValueError("gone")], lambda: [OSError("no room")])
    with pytest.raises(
        RuntimeError, match=r"no replica of 1 applied version 4 within .* OSError: no room"
    ):
        asyncio.run(push.push(MANIFEST))


def test_a_manifest_that_does_not_fit_ends_at_once() -> None:
    push, _ = sync(lambda: [at("a", 3)], lambda: [ManifestError("lacks 'x'")], timeout_s=600)
    with pytest.raises(RuntimeError, match="was refused: lacks 'x'"):
        asyncio.run(push.push(MANIFEST))


def test_one_that_stands_still_does_not_silence_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_module, "STATUS_S", 0.05)
    push, _ = sync(lambda: [at("a", 4), SILENT], timeout_s=0.3)
    report = asyncio.run(push.push(MANIFEST))
    assert set(report.replicas) == {"a"}
    assert report.unroutable == (SILENT,)
    push._timeout_s = 3600
    assert asyncio.run(push.push(MANIFEST)).unroutable == (SILENT,)  # once is enough


def test_the_replica_that_is_held_keeps_its_version_and_is_not_counted() -> None:
    versions = {"a": 4, "b": 4, "c": 4}
    told: list[tuple[Any, ...]] = []
    push, _ = sync(lambda: [at(name, version) for name, version in versions.items()])

    def answer(method: str, *arguments: Any) -> Any:
        told.append((method, *arguments))
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

    def asked(method: str, *arguments: Any) -> Any:
        call = broadcast("status")
        call.answers = lambda: answer(method, *arguments)
        return call

    push._handle = SimpleNamespace(broadcast=asked)

    async def scenario() -> None:
        await push.push(MANIFEST)
        assert await push.hold(3) is None, "not the version that was pushed last"
        assert await push.hold(4) == "c"
        report = await push.push(replace(MANIFEST, version=5))
        assert set(report.replicas) == {"a", "b"}
        assert report.unroutable == ()
        assert versions == {"a": 5, "b": 5, "c": 4}
        await push.release("c")
        assert told[-1] == ("release", "c")
        report = await push.push(replace(MANIFEST, version=6))
        assert set(report.replicas) == {"a", "b", "c"}

    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.parametrize(
    "answers",
    [[at("a", 4), at("b", 3)], [at("a", 4), TimeoutError()], [at("a", 4), at("b", 4, attempt=0)]],
    ids=["behind", "silent", "another attempt's"],
)
def test_the_only_replica_with_the_version_is_not_held(answers: list[Any]) -> None:
    push, _ = sync(lambda: answers)
    asyncio.run(push.push(MANIFEST))
    assert asyncio.run(push.hold(4)) is None


def test_a_replica_that_will_not_be_held_is_not() -> None:
    """It has begun to take another version, or died: nobody says yes."""
    push, _ = sync(lambda: [at("a", 4), at("b", 4)], lambda: [False, False])
    asyncio.run(push.push(MANIFEST))
    assert asyncio.run(push.hold(4)) is None
    assert set(asyncio.run(push.push(MANIFEST)).replicas) == {"a", "b"}
