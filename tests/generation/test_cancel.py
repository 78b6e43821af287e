"""The engine stops generating for a request that its caller cancels."""

import asyncio

import pytest

from asyncrl.contracts.messages import GenerateRequest
from asyncrl.generation.app import ServeGenerate


@pytest.mark.timeout(300)
async def test_a_cancelled_request_is_aborted_in_the_engine(generators):
    n, length = 8, 240

    async def aborted():
        return sum((await generators.handle.status.remote()).load.aborted)

    async def tokens():
        return (await generators.handle.status.remote()).tokens_generated

    before, aborted_before = await tokens(), await aborted()
    request = asyncio.create_task(
        ServeGenerate(generators.handle).generate(
            GenerateRequest((5, 6, 14), n, length, 1.0, seed=1, ignore_eos=True, baseline=True)
        )
    )
    async with asyncio.timeout(120):
        while await tokens() == before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        while (await generators.handle.pause_empty.remote())["in_flight"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    generated, counted = await tokens() - before, await aborted() - aborted_before
    assert request.cancelled() and 0 < generated < (n + 1) * length
    assert counted == n + 1, "every completion is counted, by its length; the baseline is one"


@pytest.mark.timeout(300)
async def test_one_of_the_requests_in_a_call_can_be_cancelled(generators, monkeypatch):
    """A request that shares a Serve call and is given up leaves the engine. The other is
    answered."""

    def request(length):
        return GenerateRequest((5, 6, 14), 4, length, 1.0, seed=1, ignore_eos=True)

    async def counts():
        status = await generators.handle.status.remote()
        return status.tokens_generated, sum(status.load.aborted)

    tokens, aborted = await counts()
    generate, calls = ServeGenerate(generators.handle), []
    ask = generate._calls._ask
    monkeypatch.setattr(
        generate._calls, "_ask", lambda requests: calls.append(len(requests)) or ask(requests)
    )
    given_up, kept = (
        asyncio.create_task(generate.generate(request(length))) for length in (240, 60)
    )
    async with asyncio.timeout(120):
        while (await counts())[0] < tokens + 80:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        given_up.cancel()
        answer = await kept
        while (await counts())[1] < aborted + 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert calls == [2], "both share a call"
    assert given_up.cancelled() and [len(c.token_ids) for c in answer.completions] == [60] * 4
