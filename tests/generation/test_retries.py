"""Requests that get a CancelledError or TimeoutError, which may end the request or be a replica's
answer. The replicas are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_actors import FakeActor

from asyncrl.contracts.errors import GenerationTimeoutError, StaleReplicaError
from asyncrl.contracts.messages import Generated, GenerateRequest
from asyncrl.generation.app import ServeGenerate

GENERATED = Generated((), "b", 0.0, 0.0)


class Response:
    """Serve's answer to one call."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def to(self, requests: dict[str, GenerateRequest]) -> Response:
        [self.key] = requests
        return self

    async def __aiter__(self) -> AsyncIterator[Any]:
        yield [(self.key, await self.result())]

    async def result(self) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        if self.answer is None:
            await asyncio.Event().wait()
        return self.answer


def generate_with(*responses: Response) -> ServeGenerate:
    remaining = iter(responses)
    handle: Any = FakeActor(generate_many=lambda requests: next(remaining).to(requests))
    handle.options = lambda stream: handle
    return ServeGenerate(handle)


async def test_a_request_that_a_replica_cancels_goes_to_another() -> None:
    generate = generate_with(Response(asyncio.CancelledError()), Response(GENERATED))
    request = GenerateRequest((1,), 1, 1, 1.0, deadline_s=20)
    assert await generate.generate(request) is GENERATED


async def test_a_request_that_names_a_replica_fails_when_that_one_cancels_it() -> None:
    with pytest.raises(
        StaleReplicaError,
        match=(
            "replica a cannot answer any more: StaleReplicaError: a replica canceled the request"
        ),
    ):
        await generate_with(Response(asyncio.CancelledError())).generate(
            GenerateRequest((1,), 1, 1, 1.0, deadline_s=20, replica="a")
        )


async def test_a_cancelled_request_is_cancelled_in_the_engine_too() -> None:
    response = Response(None)

    task = asyncio.create_task(
        generate_with(response).generate(GenerateRequest((1,), 1, 1, 1.0, deadline_s=20))
    )
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert response.cancelled


async def test_only_the_requests_own_timeout_ends_it() -> None:
    generate = generate_with(
        Response(TimeoutError("Serve's controller restarts")), Response(GENERATED)
    )
    request = GenerateRequest((1,), 1, 1, 1.0, deadline_s=20)
    assert await generate.generate(request) is GENERATED
    with pytest.raises(GenerationTimeoutError, match=r"no replica answered within 0\.2 s$"):
        await generate_with(Response(None)).generate(
            GenerateRequest((1,), 1, 1, 1.0, deadline_s=0.2)
        )
