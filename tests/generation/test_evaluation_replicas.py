"""An evaluation on one of several replicas. Serve, its routers, pushes and the version registry are
real; the engines are stubs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from small_config import SMALL
from stub_replicas import Application, stub_application

from asyncrl.config import Config
from asyncrl.contracts.errors import StaleReplicaError
from asyncrl.contracts.messages import GenerateRequest, Manifest, WeightsId
from asyncrl.contracts.rows import Completion, Prompt
from asyncrl.generation.app import ServeGenerate
from asyncrl.run.evaluation import Evaluator
from asyncrl.rundir.reader import open_run
from asyncrl.weights.push import ServeWeightSync

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def two(ray_cluster: Any) -> Iterator[Application]:
    """Two replicas: their `handle` and their version `registry`."""
    with stub_application(ray_cluster, "two-stubs", replicas=2) as application:
        yield application


def manifest(run: str, version: int) -> Manifest:
    return Manifest(run, 0, version, (), (), (), ())


def request(run: str, version: int, replica: str | None = None) -> GenerateRequest:
    return GenerateRequest(
        (1,), 1, 2, 1.0, min_weights=WeightsId(run, 0, version), replica=replica, deadline_s=60
    )


async def answers_of(
    generate: ServeGenerate, wanted: GenerateRequest, times: int = 20
) -> Counter[tuple[str, int]]:
    """Answers to a request that is sent `times` times, by (replica, version)."""
    answers = await asyncio.gather(*(generate.generate(wanted) for _ in range(times)))
    return Counter(
        (answer.replica, answer.completions[0].versions[-1].version) for answer in answers
    )


async def until(condition: Callable[[], Any]) -> None:
    while not await condition():  # noqa: ASYNC110
        await asyncio.sleep(0.1)


async def test_only_requests_that_name_the_held_replica_go_to_it(
    two: Application,
) -> None:
    sync, generate = (
        ServeWeightSync(two.handle, two.registry, push_timeout_s=60),
        ServeGenerate(two.handle),
    )

    async with asyncio.timeout(200):
        await sync.push(manifest("a", 1))
        held = await sync.hold(1)
        assert held is not None
        assert await answers_of(generate, request("a", 1, held)) == {(held, 1): 20}
        report = await sync.push(manifest("a", 2))
        [other] = report.replicas
        assert other != held
        # Routers may not know yet that it is held. It refuses requests for newer weights, which
        # then go to the other replica.
        assert await answers_of(generate, request("a", 2)) == {(other, 2): 20}
        assert await answers_of(generate, request("a", 1, held)) == {(held, 1): 20}

        async def avoided() -> bool:  # even by requests that it could answer
            return set(await answers_of(generate, request("a", 1))) == {(other, 2)}

        await until(avoided)
        for wanted in (request("a", 2, held), request("a", 1, "gone")):
            with pytest.raises(StaleReplicaError):
                await generate.generate(wanted)
        await sync.release(held)

        async def both() -> bool:
            answers = await answers_of(generate, request("a", 2), 60)
            return {name for name, _ in answers} == {held, other}

        await until(both)
        assert set((await sync.push(manifest("a", 3))).replicas) == {held, other}


async def test_an_evaluation_in_flight_keeps_the_spans_of_changing_versions(
    two: Application, tmp_path: Any
) -> None:
    sync, generate = (
        ServeWeightSync(two.handle, two.registry, push_timeout_s=60),
        ServeGenerate(two.handle),
    )
    settings = {"in_flight": True, "sets": {"long": {"data": "d", "max_completion_length": 2000}}}
    config = Config.model_validate({**SMALL, "eval": settings, "generator": {"num_replicas": 2}})

    async def score(
        prompt: Prompt, completions: Sequence[Completion]
    ) -> dict[str, list[float | None]]:
        return {"f": [1.0] * len(completions)}

    data = config.evaluation_sets["long"].data
    assert data is not None
    evaluator = Evaluator(
        config,
        generate,
        score,
        {data: [Prompt(place, 0, "p", (1,)) for place in range(8)]},
        "c",
        0,
        tmp_path / "evaluations",
    )

    async with asyncio.timeout(100):
        await sync.push(manifest("c", 1))
        evaluation = asyncio.create_task(evaluator(1))

        async def under_way() -> bool:
            return any(status.tokens_generated for status in await generate.statuses())

        await until(under_way)
        await sync.push(manifest("c", 2))
    metrics = await evaluation
    assert (metrics["eval/failed_ratio"], metrics["eval/newest_version"]) == (0.0, 2.0)
    (tmp_path / "config.yaml").write_text("")
    spans = [
        [span["version"] for span in row["versions"]]
        for row in open_run(tmp_path).evaluations().to_pylist()
    ]
    assert [1, 2] in spans
    assert all(versions == sorted(versions) for versions in spans)
