"""Real replicas around stub engines in the learner's shift: they rest, take versions, and wake. One
that starts in that shift rests too."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.serve.exceptions import DeploymentUnavailableError
from stub_replicas import SLOW, Application, stub_application

from asyncrl.contracts.messages import GenerateRequest, Manifest, WeightsId
from asyncrl.generation.app import ServeGenerate
from asyncrl.weights.push import ServeWeightSync

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def two(ray_cluster: Any) -> Iterator[Application]:
    """Two replicas: their `handle` and their version `registry`."""
    with stub_application(ray_cluster, "stubs-that-rest", replicas=2) as application:
        yield application


def request(version: int) -> GenerateRequest:
    return GenerateRequest((1,), 1, 2, 1.0, min_weights=WeightsId("r", 0, version), deadline_s=60)


def manifest(version: int, run: str = "r") -> Manifest:
    return Manifest(run, 0, version, (), (), (), ())


async def rests(generate: ServeGenerate) -> list[bool]:
    return sorted(status.rests for status in await generate.statuses())


async def until(condition: Callable[[], Any]) -> None:
    while not await condition():  # noqa: ASYNC110
        await asyncio.sleep(0.1)


async def test_replicas_rest_take_a_version_and_wake(two: Application) -> None:
    sync, generate = ServeWeightSync(two.handle, two.registry, 60), ServeGenerate(two.handle)

    await sync.push(manifest(1))
    for version in (2, 3):
        await sync.rest()
        await sync.rest()
        waiting = asyncio.create_task(generate.generate(request(version - 1)))
        report = await sync.push(manifest(version))
        assert len(report.replicas) == 2 and not waiting.done()
        await sync.wake()
        answer = await waiting
        assert [span.version for span in answer.completions[0].versions] == [version]
        await sync.wake()


async def test_a_replica_that_starts_in_the_learners_shift_rests(two: Application) -> None:
    sync, generate = ServeWeightSync(two.handle, two.registry, 60), ServeGenerate(two.handle)

    before = await generate.statuses()
    await sync.rest()
    os.kill(before[0].pid, signal.SIGKILL)

    async def replaced() -> bool:
        with contextlib.suppress(DeploymentUnavailableError):  # before the successor is up
            names = {status.replica for status in await generate.statuses()}
            return len(names) == 2 and bool(names - {status.replica for status in before})
        return False

    await until(replaced)
    assert await rests(generate) == [True, True]
    await sync.wake()
    assert await rests(generate) == [False, False]


async def test_a_replica_that_missed_the_end_of_the_turn_wakes_by_itself(
    two: Application,
) -> None:
    sync, generate = ServeWeightSync(two.handle, two.registry, 60), ServeGenerate(two.handle)

    await sync.rest()
    await two.registry.set_learner_shift.remote(False)

    async def awake() -> bool:
        return await rests(generate) == [False, False]

    await until(awake)


async def test_a_replica_that_fetches_a_version_does_not_hold_up_the_shifts(
    two: Application, tmp_path: Path
) -> None:
    """Half of the replicas commit a version and wake. The other one still rests, so the learner
    need not wait for it."""
    sync = ServeWeightSync(two.handle, two.registry, 20, commit_grace_s=0.1)
    generate, run = ServeGenerate(two.handle), str(tmp_path)

    await sync.push(manifest(1, run))
    await sync.rest()
    (tmp_path / SLOW).write_text("")
    report = await sync.push(manifest(2, run))
    assert len(report.replicas) == len(report.unroutable) == 1
    await sync.wake()
    assert await rests(generate) == [False, True]
    await sync.rest()
    assert await rests(generate) == [True, True]
    for file in tmp_path.iterdir():
        file.unlink()
    await sync.wake()

    async def both() -> bool:
        statuses = await generate.statuses()
        return {status.weights for status in statuses} == {WeightsId(run, 0, 2)}

    await until(both)

    async def awake() -> bool:
        return await rests(generate) == [False, False]

    await until(awake)


async def test_all_replicas_must_rest_and_half_of_them_must_wake(
    two: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, answers = ServeWeightSync(two.handle, two.registry, 0.5), list[Any]()

    async def answer(handle: Any, method: str, *arguments: Any, **settings: Any) -> list[Any]:
        assert method == "apply_shift"
        return answers

    monkeypatch.setattr("asyncrl.weights.push.ask_all", answer)
    for answers in ([True, False], [True, TimeoutError()], [True, None]):  # noqa: B007
        with pytest.raises(RuntimeError, match="did not all rest"):
            await sync.rest()
    for answers in ([True, True, False], [TimeoutError(), TimeoutError(), False], []):  # noqa: B007
        with pytest.raises(RuntimeError, match="did not all wake"):
            await sync.wake()
    answers = [True, True]
    await sync.rest()
    answers = [False, TimeoutError()]
    await sync.wake()


async def test_generators_that_do_not_rest_end_the_run(
    two: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = ServeWeightSync(two.handle, two.registry, 0.5)

    async def refuses(handle: Any, method: str, *arguments: Any, **settings: Any) -> list[Any]:
        return [RuntimeError("the engine hangs")]

    monkeypatch.setattr("asyncrl.weights.push.ask_all", refuses)
    with pytest.raises(
        RuntimeError,
        match=r"did not all rest within weights\.push_timeout_s = 0\.5: RuntimeError: the engine",
    ):
        await sync.rest()
