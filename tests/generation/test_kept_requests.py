"""Which requests an update submits again, with a fake vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from engines import StubOutputs

from asyncrl.generation.engine.kept_requests import KeptRequests

pytestmark = pytest.mark.timeout(20)


class FakeState:
    """vLLM's state of a request with so many tokens. It is its own detokenizer."""

    def __init__(self, tokens: int) -> None:
        self.detokenizer, self.tokens = self, tokens

    def num_output_tokens(self) -> int:
        return self.tokens


class FakeLLM:
    """Knows a request from its first step on. `tokens` and `finish` act on the last one."""

    def __init__(self) -> None:
        self.output_processor = StubOutputs()
        self.salts: list[int] = []
        self.aborted: list[str] = []
        self.takes = asyncio.Event()
        """Set while vLLM takes requests."""
        self.takes.set()
        self._ends: dict[str, asyncio.Queue[str]] = {}

    async def generate(self, name: str, salt: int) -> AsyncGenerator[Any]:
        self.salts.append(salt)
        await self.takes.wait()
        self.output_processor.request_states[name] = FakeState(0)
        self.output_processor.external_req_ids[name] = [name]
        self._ends[name] = asyncio.Queue()
        try:
            yield await self._ends[name].get()
        finally:
            self.output_processor.external_req_ids.pop(name, None)

    async def abort(self, name: str) -> None:
        self.aborted.append(name)
        del self.output_processor.external_req_ids[name]
        self._ends[name].put_nowait("abort")

    def tokens(self, name: str, count: int) -> None:
        self.output_processor.request_states[name] = FakeState(count)

    def finish(self, name: str) -> None:
        self._ends[name].put_nowait("answer")


class Scene:
    def __init__(self) -> None:
        self.opened, self.llm, self.updates = asyncio.Event(), FakeLLM(), 0
        self.opened.set()
        self.requests = KeptRequests(self.opened)

    async def ask(self, name: str) -> list[Any]:
        outputs = self.requests.outputs(name, lambda: self.llm.generate(name, self.updates))
        return [output async for output in outputs]

    async def update(self) -> int:
        self.opened.clear()
        self.updates += 1
        again = await self.requests.submit_again(self.llm)  # type: ignore[arg-type]
        await turns()
        self.opened.set()
        return again


async def turns() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def test_a_request_without_a_token_is_submitted_again_after_the_update() -> None:
    scene = Scene()
    asked = asyncio.create_task(scene.ask("a"))
    await turns()
    assert await scene.update() == 1
    assert scene.llm.aborted == ["a"] and not asked.done()
    await turns()
    assert scene.llm.salts == [0, 1]
    scene.llm.finish("a")
    assert await asked == ["answer"]


async def test_nothing_is_submitted_before_the_engine_takes_requests() -> None:
    scene = Scene()
    asked = asyncio.create_task(scene.ask("a"))
    await turns()
    scene.opened.clear()
    for count in (1, 0):  # the second update finds it waiting
        scene.updates += 1
        assert await scene.requests.submit_again(scene.llm) == count  # type: ignore[arg-type]
        await turns()
    assert scene.llm.salts == [0]
    scene.opened.set()
    await turns()
    assert scene.llm.salts == [0, 2]
    scene.llm.finish("a")
    assert await asked == ["answer"]


async def test_a_request_with_tokens_continues() -> None:
    scene = Scene()
    asked = asyncio.create_task(scene.ask("a"))
    await turns()
    scene.llm.tokens("a", 3)
    assert await scene.update() == 0
    scene.llm.finish("a")
    assert await asked == ["answer"] and scene.llm.salts == [0]


async def test_a_request_that_has_just_ended_is_answered() -> None:
    scene = Scene()
    asked = asyncio.create_task(scene.ask("a"))
    await turns()
    scene.llm.finish("a")
    await asyncio.sleep(0)  # vLLM's generator has the answer, and its reader not yet
    await scene.update()
    await turns()
    if not asked.done():  # submitted again: it had no token
        scene.llm.finish("a")
    assert await asked == ["answer"]


async def test_a_request_that_vllm_has_not_taken_yet_is_submitted_again() -> None:
    """vLLM would take it after the update, with the salt of before."""

    scene = Scene()
    scene.llm.takes.clear()
    asked = asyncio.create_task(scene.ask("a"))
    await turns()
    assert scene.llm.salts == [0] and not scene.llm.output_processor.external_req_ids
    assert await scene.update() == 1
    assert scene.llm.aborted == []
    scene.llm.takes.set()
    await turns()
    assert scene.llm.salts == [0, 1]
    scene.llm.finish("a")
    assert await asked == ["answer"]


async def test_a_caller_that_leaves_ends_the_request() -> None:
    scene = Scene()
    asked = asyncio.create_task(scene.ask("a"))
    await turns()
    assert scene.llm.output_processor.external_req_ids
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert not scene.llm.output_processor.external_req_ids
    assert await scene.update() == 0
