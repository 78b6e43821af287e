"""Real replicas around stub engines in the learner's turn: they rest, take versions, and wake. One
that starts in that turn rests too."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.exceptions import DeploymentUnavailableError
from stub_replicas import stub_application

from asyncrl.contracts.messages import GenerateRequest, Manifest, WeightsId
from asyncrl.generation.app import ServeGenerate
from asyncrl.weights.push import ServeWeightSync

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def one(ray_cluster: Any) -> Iterator[SimpleNamespace]:
    """One replica: its `handle` and its version `registry`."""
    with stub_application(ray_cluster, "stub-that-rests", replicas=1) as application:
        yield application


def request(version: int) -> GenerateRequest:
    return GenerateRequest((1,), 1, 2, 1.0, min_weights=WeightsId("r", 0, version), deadline_s=60)


def manifest(version: int) -> Manifest:
    return Manifest("r", 0, version, (), (), (), ())


async def until(condition: Callable[[], Any]) -> None:
    while not await condition():  # noqa: ASYNC110
        await asyncio.sleep(0.1)


def test_a_replica_rests_takes_a_version_and_wakes(one: SimpleNamespace) -> None:
    sync, generate = ServeWeightSync(one.handle, one.registry, 60), ServeGenerate(one.handle)

    async def scenario() -> None:
        await sync.push(manifest(1))
        for version in (2, 3):
            await sync.rest()
            await sync.rest()
            waiting = asyncio.create_task(generate.generate(request(version - 1)))
            report = await sync.push(manifest(version))
            assert len(report.replicas) == 1 and not waiting.done()
            await sync.wake()
            answer = await waiting
            assert [span.version for span in answer.completions[0].versions] == [version]
            await sync.wake()

    asyncio.run(scenario())


def test_a_replica_that_starts_in_the_learners_turn_rests(one: SimpleNamespace) -> None:
    sync, generate = ServeWeightSync(one.handle, one.registry, 60), ServeGenerate(one.handle)

    async def scenario() -> None:
        (before,) = await generate.statuses()
        await sync.rest()
        os.kill(before.pid, signal.SIGKILL)

        async def replaced() -> bool:
            with contextlib.suppress(DeploymentUnavailableError):  # before the successor is up
                names = {status.replica for status in await generate.statuses()}
                return bool(names - {before.replica})
            return False

        await until(replaced)
        (rests,) = [status.rests for status in await generate.statuses()]
        assert rests
        await sync.wake()
        (rests,) = [status.rests for status in await generate.statuses()]
        assert not rests

    asyncio.run(scenario())


def test_a_replica_that_missed_the_end_of_the_turn_wakes_by_itself(one: SimpleNamespace) -> None:
    sync, generate = ServeWeightSync(one.handle, one.registry, 60), ServeGenerate(one.handle)

    async def scenario() -> None:
        await sync.rest()
        await one.registry.set_learner_turn.remote(False)

        async def awake() -> bool:
            return not any(status.rests for status in await generate.statuses())

        await until(awake)

    asyncio.run(scenario())


def test_generators_that_do_not_rest_end_the_run(
    one: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = ServeWeightSync(one.handle, one.registry, 0.5)

    async def refuses(handle: Any, method: str, *arguments: Any, **settings: Any) -> list[Any]:
        return [RuntimeError("the engine hangs")]

    monkeypatch.setattr("asyncrl.weights.push.ask_all", refuses)
    with pytest.raises(
        RuntimeError,
        match=r"did not all rest within weights\.push_timeout_s = 0\.5: RuntimeError: the engine",
    ):
        asyncio.run(sync.rest())
