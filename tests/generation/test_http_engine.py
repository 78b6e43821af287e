"""The HTTP routes over a real vLLM engine: what the schema lets through the engine takes, what the engine refuses is a 400, and a client that leaves
frees what it held."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from asgi import call

from asyncrl.generation.app import ServeGenerate
from asyncrl.generation.http import routes
from asyncrl.generation.openai import ServedModel
from asyncrl.generation.protocol import Generated, GenerateRequest, InvalidRequest, Standing

MODEL = ServedModel("tiny", max_model_len=256, vocabulary=64, longest_token=5)


class OverEngine:
    """`asyncrl.generation.http.Served` over the session's one replica."""

    model = MODEL

    def __init__(self, handle: Any) -> None:
        self._generate = ServeGenerate(handle)

    async def encode(self, text: str) -> list[int]:
        return [5] * len(text)

    async def generate(self, request: GenerateRequest) -> Generated:
        return await self._generate.generate(request)

    async def standing(self) -> Standing:
        return Standing(None, None)

    async def check_health(self) -> None: ...


async def post(app: Any, body: Any, left: asyncio.Event | None = None) -> tuple[int, Any]:
    """Status and answer. The client leaves when `left` is set."""
    return await call(app, "POST", "/v1/completions", body, left)


@pytest.mark.timeout(300)
def test_whatever_the_schema_takes_the_engine_takes(generators: Any) -> None:
    async def scenario() -> None:
        app = routes(OverEngine(generators.handle), None)
        values = {"temperature": (0, 0.01, 2), "n": (1, 2), "seed": (None, 0, (1 << 53) - 1), "stop": (None, ["\n", "+="]), "max_tokens": (1, 4)}
        bodies = [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]
        answers = await asyncio.gather(*(post(app, {"model": "tiny", "prompt": [5, 6, 14], **body}) for body in bodies))
        for body, (status, answer) in zip(bodies, answers, strict=True):
            greedy_twice = body["temperature"] == 0 and body["n"] > 1
            assert status == (400 if greedy_twice else 200), (body, answer)

    asyncio.run(scenario())


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (GenerateRequest((5, 6), 2, 4, 0.0), "greedy"),
        (GenerateRequest((5, 6), 1, 4, -1.0), "temperature"),
        (GenerateRequest((5, 6), 1, 300, 1.0), "above max_model_len = 256"),
        (GenerateRequest((5, 6), 0, 4, 1.0), "n must be"),
    ],
    ids=["greedy twice", "negative", "long", "none"],
)
def test_what_the_engine_refuses_comes_as_an_invalid_request(generators: Any, request_: GenerateRequest, words: str) -> None:
    """Our schema catches these; whatever it does not catch becomes a 400 with the engine's words."""
    with pytest.raises(InvalidRequest, match=f"(?i){words}"):
        asyncio.run(ServeGenerate(generators.handle).generate(request_))


@pytest.mark.timeout(300)
def test_a_client_that_leaves_in_mid_answer_frees_its_kv_cache(generators: Any) -> None:
    async def status() -> dict[str, Any]:
        return await generators.handle.status.remote()

    async def scenario() -> None:
        before, left = await status(), asyncio.Event()
        body = {"model": "tiny", "prompt": [5, 6, 14], "n": 64, "max_tokens": 250, "temperature": 2, "seed": 1}
        asked = asyncio.create_task(post(routes(OverEngine(generators.handle), None), body, left))
        async with asyncio.timeout(120):
            while (await status())["tokens_generated"] == before["tokens_generated"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            left.set()
            assert (await asked)[0] == 499
            while (await generators.handle.pause_empty.remote())["in_flight"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        after = await status()
        assert sum(after["aborted"]) > sum(before["aborted"]) and after["tokens_generated"] - before["tokens_generated"] < 64 * 250
        load = (await ServeGenerate(generators.handle).generate(GenerateRequest((7, 8), 1, 1, 1.0))).load
        assert load is not None and load.kv_use < 0.1

    asyncio.run(scenario())
