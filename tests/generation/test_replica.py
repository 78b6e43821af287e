"""The replica's logic, with a stub engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from fake_actors import FakeActor, replica_context
from stub_replicas import StubEngine

from asyncrl.contracts.errors import StaleReplicaError
from asyncrl.contracts.messages import GenerateRequest, Manifest, WeightsId
from asyncrl.contracts.rows import Completion, VersionSpan
from asyncrl.generation import replica
from asyncrl.generation.engine.requests import Answered
from asyncrl.generation.follower_actors import Followers
from asyncrl.generation.replica import Generator
from asyncrl.generation.settings import GeneratorApp
from asyncrl.weights.staging import StagingError


async def nothing(*arguments: Any) -> None:
    return None


class FakeStaged(NamedTuple):
    """A staged version without a file, which is noted when it is removed."""

    version: int
    removed: list[int]
    fetch_s: float = 0.0

    def update_info(self) -> dict[str, object]:
        return {}

    def remove(self) -> None:
        self.removed.append(self.version)


async def started(
    monkeypatch: pytest.MonkeyPatch,
    apply: Callable[[Any, int], Any],
    fetched: list[int],
    removed: list[int] | None = None,
) -> Generator:
    """A replica with id "a" around a stub engine, which applies versions with `apply`. Versions
    that the replica fetches are added to `fetched`."""

    def fetch_version(manifest: Manifest, *arguments: Any) -> Any:
        fetched.append(manifest.version)
        return FakeStaged(manifest.version, [] if removed is None else removed)

    engine = StubEngine()
    monkeypatch.setattr(engine, "apply", apply)

    async def start_engine(app: GeneratorApp) -> Any:
        return engine

    context = replica_context("app")
    monkeypatch.setattr(replica, "start_engine", start_engine)
    monkeypatch.setattr(replica, "expected_tensors", lambda model, dtype: {})
    monkeypatch.setattr(replica, "find_registry", lambda name: None)
    monkeypatch.setattr(replica, "fetch_version", fetch_version)
    monkeypatch.setattr(replica.serve, "get_replica_context", lambda: context)
    made = object.__new__(Generator)
    await Generator.__init__(made, {"model": "m"})
    monkeypatch.setattr(made, "status", nothing)
    return made


async def test_an_update_continues_when_its_caller_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with asyncio.timeout(20):
        started_apply, proceed = asyncio.Event(), asyncio.Event()
        fetched: list[int] = []
        removed: list[int] = []

        async def apply(update: Any, version: int) -> dict[str, float]:
            started_apply.set()
            await proceed.wait()
            return {}

        made = await started(monkeypatch, apply, fetched, removed)
        manifest = Manifest("run", 0, 3, (), (), (), ())
        caller = asyncio.create_task(made.apply_version(manifest))
        await started_apply.wait()
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        second = asyncio.create_task(made.apply_version(manifest))
        proceed.set()
        await second
    assert (made.weights, fetched, removed) == (WeightsId("run", 0, 3), [3], [3])


async def test_the_end_stops_the_followers_and_the_engine_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = asyncio.Barrier(2)

    async def stop() -> None:
        await both.wait()

    async with asyncio.timeout(20):
        made = await started(monkeypatch, nothing, [])
        monkeypatch.setattr(made._followers, "stop", stop)
        monkeypatch.setattr(made.engine, "stop", stop, raising=False)
        await made.__del__()


def request(version: int, name: str | None = None) -> GenerateRequest:
    return GenerateRequest((1,), 1, 4, 1.0, min_weights=WeightsId("run", 0, version), replica=name)


async def test_a_held_replica_keeps_its_weights_and_answers_only_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def apply(update: Any, version: int) -> dict[str, float]:
        return {}

    async with asyncio.timeout(20):
        fetched: list[int] = []
        made = await started(monkeypatch, apply, fetched)
        manifests = {version: Manifest("run", 0, version, (), (), (), ()) for version in (3, 4, 5)}
        await made.apply_version(manifests[3])
        assert (
            not await made.hold("b", WeightsId("run", 0, 3))
            and not await made.hold("a", WeightsId("run", 0, 2))
            and not made.held
        )
        assert await made.hold("a", WeightsId("run", 0, 3)) and made.record_routing_stats() == {
            "held": True,
            "full": False,
            "weights": ("run", 0, 3),
        }
        await made.apply_version(manifests[4], "a")
        assert made.weights == WeightsId("run", 0, 3) and fetched == [3]
        await made.generate(request(3, "a"))
        await made.generate(request(2))
        for refused in (request(2, "a"), request(3, "b"), request(4)):
            with pytest.raises(StaleReplicaError):
                await made.generate(refused)

        async def current() -> Manifest:
            return manifests[4]

        monkeypatch.setattr(replica, "find_registry", lambda name: FakeActor(current=current))
        await made.release("b")
        assert made.held
        await made.release("a")
        assert made.weights == WeightsId("run", 0, 4) and made.record_routing_stats() == {
            "held": False,
            "full": False,
            "weights": ("run", 0, 4),
        }
        assert await made.hold("a", WeightsId("run", 0, 4))
        await made.apply_version(manifests[5])
        assert made.weights == WeightsId("run", 0, 5), (
            "a push that names no held replica ends a hold whose release was lost"
        )


async def test_a_hold_ends_with_its_attempt_or_its_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def apply(update: Any, version: int) -> dict[str, float]:
        return {}

    async with asyncio.timeout(20):
        made = await started(monkeypatch, apply, [])
        await made.apply_version(Manifest("run", 0, 3, (), (), (), ()))
        assert await made.hold("a", WeightsId("run", 0, 3))
        await made.apply_version(Manifest("run", 1, 2, (), (), (), ()), "a")
        assert made.weights == WeightsId("run", 1, 2) and not made.held
        assert await made.hold("a", WeightsId("run", 1, 2))
        await made.check_health()
        assert not made.held, "without a version registry, its job has ended"


@pytest.mark.parametrize(
    ("in_flight", "makes_tokens", "replaced"),
    [("recompute", False, True), ("recompute", True, True), ("drain", True, False)],
)
async def test_a_replica_that_stays_behind_too_long_is_replaced(
    monkeypatch: pytest.MonkeyPatch, in_flight: str, makes_tokens: bool, replaced: bool
) -> None:
    now = 0.0
    monkeypatch.setattr(replica, "steady_time", lambda: now)

    async with asyncio.timeout(20):
        made = await started(monkeypatch, nothing, [])
        generator = made.settings.generator.model_copy(update={"in_flight": in_flight})
        made.settings = made.settings.model_copy(
            update={"generator": generator, "replace_after_s": 300.0}
        )
        made.weights, newest = WeightsId("run", 0, 3), ("run", 0, 3)

        async def in_registry() -> tuple[str, int, int]:
            return newest

        registry = FakeActor(newest=in_registry, learner_shift=nothing)
        monkeypatch.setattr(replica, "find_registry", lambda name: registry)
        for later in range(0, 1000, 100):
            now = float(later)
            await made.check_health()
        newest = ("run", 0, 4)
        for later in range(1000, 1400, 100):
            now = float(later)
            made.engine.stats.tokens_generated += makes_tokens
            if replaced and later == 1300:
                with pytest.raises(
                    RuntimeError,
                    match=(
                        r"stayed at WeightsId.*version=3.* for 300 s, although WeightsId.*version=4"
                        r".* is published; Serve will replace it"
                    ),
                ):
                    await made.check_health()
            else:
                await made.check_health()
        made.weights = WeightsId("run", 0, 4)
        await made.check_health()


async def test_a_replica_gives_up_the_requests_of_an_ended_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does so when the driver calls `abandon`, or when the next attempt's first version comes.
    Other requests continue."""

    async def apply(update: Any, version: int) -> dict[str, float]:
        return {}

    async with asyncio.timeout(20):
        made = await started(monkeypatch, apply, [])
        answer, arrived, ended = made.engine.requests.answer, asyncio.Semaphore(0), []
        proceed = asyncio.Event()

        async def long(request: GenerateRequest) -> Any:
            arrived.release()
            try:
                await proceed.wait()
            except asyncio.CancelledError:
                ended.append(request.min_weights)
                raise
            return await answer(request)

        monkeypatch.setattr(made.engine.requests, "answer", long)
        await made.apply_version(Manifest("run", 0, 3, (), (), (), ()))
        without_run = asyncio.create_task(made.generate(GenerateRequest((1,), 1, 4, 1.0)))
        abandoned = asyncio.create_task(made.generate(request(3)))
        for _ in range(2):
            await arrived.acquire()
        await made.abandon("run", 1)
        await made.abandon("another", 0)
        assert not ended
        await made.abandon("run", 0)
        with pytest.raises(
            StaleReplicaError,
            match=r"dropped the request for .*attempt=0, version=3\): that attempt has ended",
        ):
            await abandoned
        late = asyncio.create_task(made.generate(request(2)))
        await arrived.acquire()
        await made.apply_version(Manifest("run", 1, 2, (), (), (), ()))
        with pytest.raises(StaleReplicaError, match="that attempt has ended"):
            await late
        assert ended == [WeightsId("run", 0, 3), WeightsId("run", 0, 2)]
        current = asyncio.create_task(
            made.generate(GenerateRequest((1,), 1, 4, 1.0, min_weights=WeightsId("run", 1, 2)))
        )
        await arrived.acquire()
        await made.apply_version(Manifest("run", 1, 3, (), (), (), ()))
        proceed.set()
        assert (await current).completions and (await without_run).completions
        assert not made._pending

        cancelled = asyncio.create_task(
            made.generate(GenerateRequest((1,), 1, 4, 1.0, min_weights=WeightsId("run", 1, 2)))
        )
        proceed.clear()
        await arrived.acquire()
        cancelled.cancel()
        (error,) = await asyncio.gather(cancelled, return_exceptions=True)
        assert isinstance(error, asyncio.CancelledError) and not made._pending


async def test_a_baseline_is_apart_from_the_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    async def apply(update: Any, version: int) -> dict[str, float]:
        return {}

    def completion(token: int) -> Completion:
        return Completion((token,), (0.0,), (VersionSpan(0, 0, 1),), "stop")

    async with asyncio.timeout(20):
        made = await started(monkeypatch, apply, [])

        async def answer(asked: GenerateRequest) -> Answered:
            count = asked.n + asked.baseline
            return Answered(tuple(map(completion, range(count))), tuple(range(count)))

        monkeypatch.setattr(made.engine.requests, "answer", answer)
        for baseline in (False, True):
            given = await made.generate(GenerateRequest((1,), 2, 4, 1.0, baseline=baseline))
            assert given.completions == (completion(0), completion(1))
            assert given.baseline == (completion(2) if baseline else None)
            assert given.cached_tokens == (0, 1)


@pytest.mark.parametrize("failing", ["here", "there", "nowhere"])
async def test_a_version_is_applied_only_if_every_node_has_it(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    applied: list[Any] = []
    removed: list[Any] = []

    async def scenario() -> None:
        async def apply(update: Any, version: int) -> dict[str, float]:
            applied.append(update)
            return {}

        made = await started(monkeypatch, apply, [], removed)
        engine = {"tensor_parallel_size": 4, "nnodes": 2}
        made.settings = GeneratorApp.model_validate({"model": "m", "generator": engine})

        class There(Followers):
            async def stage(self, manifest: Manifest) -> list[tuple[dict[str, object], float]]:
                if failing == "there":
                    raise StagingError("no room")
                return [({"path": "there"}, 2.0)]

            async def unstage(self) -> None:
                removed.append("there")

        made._followers = object.__new__(There)
        if failing == "here":
            monkeypatch.setattr(replica, "fetch_version", refuse)
        try:
            await made.apply_version(Manifest("run", 0, 3, (), (), (), ()))
        finally:
            assert made.weights == (WeightsId("run", 0, 3) if applied else None)
            assert not applied or made._applied["fetch_s"] == 2.0

    def refuse(*arguments: Any) -> None:
        raise StagingError("no room")

    if failing == "nowhere":
        await scenario()
        assert applied == [[{}, {}, {"path": "there"}, {"path": "there"}]]
    else:
        with pytest.raises(StagingError):
            await scenario()
        assert not applied
    assert removed == ["there"] if failing == "here" else removed == [3, "there"]
