"""The HTTP routes over a real vLLM engine. The engine accepts every body that the schema accepts,
its refusals are a 400, and a disconnect frees the KV cache."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from asgi import call
from openai import AsyncOpenAI, OpenAI
from ray.exceptions import RayTaskError
from served_http import listening

from asyncrl.contracts.errors import GenerationTimeoutError, InvalidRequestError
from asyncrl.contracts.messages import Details, GenerateRequest, StreamPiece
from asyncrl.generation.app import ServeGenerate
from asyncrl.serving.chat_tokenizer import ModelTokenizer
from asyncrl.serving.http import routes
from asyncrl.serving.identity import ServedModel
from asyncrl.testing import FakeServed
from asyncrl.text.tokenizer import load_tokenizer

MODEL = ServedModel("tiny", max_model_len=256, vocabulary=64, longest_token=5)


class EngineServed(FakeServed):
    """`asyncrl.serving.http.Served` over the session's only replica."""

    def __init__(self, generators: Any) -> None:
        super().__init__(MODEL)
        self.tokenizer = ModelTokenizer(generators.app.model)
        self._handle = generators.handle.options(stream=True)

    async def stream(
        self, request: GenerateRequest, details: Details
    ) -> AsyncIterator[StreamPiece]:
        pieces = self._handle.stream.remote(request, details)
        try:
            async for piece in pieces:
                yield piece
        except RayTaskError as error:
            raise error.cause from None
        finally:
            pieces.cancel()


async def post(app: Any, body: Any, left: asyncio.Event | None = None) -> tuple[int, Any]:
    """The status and the answer. The client disconnects when `left` is set."""
    return await call(app, "POST", "/v1/completions", body, left)


@pytest.mark.timeout(300)
async def test_the_engine_accepts_what_the_schema_accepts(generators: Any) -> None:
    app = routes(EngineServed(generators), None)
    values = {
        "temperature": (0, 0.01, 2),
        "n": (1, 2),
        "seed": (None, 0, (1 << 53) - 1),
        "stop": (None, ["\n", "+="]),
        "max_tokens": (1, 4),
    }
    bodies = [
        dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())
    ]
    answers = await asyncio.gather(
        *(post(app, {"model": "tiny", "prompt": [5, 6, 14], **body}) for body in bodies)
    )
    for body, (status, answer) in zip(bodies, answers, strict=True):
        greedy_twice = body["temperature"] == 0 and body["n"] > 1
        assert status == (400 if greedy_twice else 200), (body, answer)


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
async def test_a_refusal_of_the_engine_is_an_invalid_request(
    generators: Any, request_: GenerateRequest, words: str
) -> None:
    """The schema catches these requests. Any that it misses become a 400 with the engine's
    message."""
    with pytest.raises(InvalidRequestError, match=f"(?i){words}"):
        await ServeGenerate(generators.handle).generate(request_)


@pytest.mark.timeout(300)
async def test_a_disconnect_frees_the_kv_cache(generators: Any) -> None:
    async def status() -> dict[str, Any]:
        return await generators.handle.status.remote()

    before, left = await status(), asyncio.Event()
    body = {
        "model": "tiny",
        "prompt": [5, 6, 14],
        "n": 64,
        "max_tokens": 250,
        "temperature": 2,
        "seed": 1,
    }
    request = asyncio.create_task(post(routes(EngineServed(generators), None), body, left))
    async with asyncio.timeout(120):
        while (await status()).tokens_generated == before.tokens_generated:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        left.set()
        assert (await request)[0] == 499
        while (await generators.handle.pause_empty.remote())["in_flight"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    after = await status()
    assert (
        sum(after.load.aborted) > sum(before.load.aborted)
        and after.tokens_generated - before.tokens_generated < 64 * 250
    )
    load = (
        await ServeGenerate(generators.handle).generate(GenerateRequest((7, 8), 1, 1, 1.0))
    ).load
    assert load is not None and load.kv_use < 0.1


TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}{%"
    " if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def chats(generators: Any, tmp_path: Path) -> EngineServed:
    """The session's replica, whose tokenizer has a chat template."""
    tokenizer = copy.deepcopy(load_tokenizer(generators.app.model))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "chats")
    served = EngineServed(generators)
    served.tokenizer = ModelTokenizer(str(tmp_path / "chats"))  # type: ignore[assignment]
    return served


@pytest.mark.timeout(300)
async def test_the_official_client_against_a_real_engine(
    chats: EngineServed, generators: Any
) -> None:
    """A stream has the same tokens, text, log-probs and versions as the engine's whole answer."""
    tokenizer = load_tokenizer(generators.app.model)
    prompt = tokenizer.encode("user: 3+4\nassistant: ", add_special_tokens=False)
    first, second = (
        await ServeGenerate(generators.handle).generate(
            GenerateRequest(tuple(prompt), 2, 40, 1.5, seed=7)
        )
    ).completions
    body: dict[str, Any] = {
        "model": "tiny",
        "n": 2,
        "seed": 7,
        "temperature": 1.5,
        "max_tokens": 40,
    }
    with (
        listening(routes(chats, None)) as address,
        OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        chat: dict[str, Any] = {
            **body,
            "messages": [{"role": "user", "content": "3+4"}],
            "logprobs": True,
            "top_logprobs": 20,
        }
        whole = client.chat.completions.create(**chat)
        chunks = list(
            client.chat.completions.create(
                **chat, stream=True, stream_options={"include_usage": True}
            )
        )
        assert whole.prompt_token_ids == prompt and chunks[-1].usage == whole.usage
        for choice, made in zip(whole.choices, (first, second), strict=True):
            parts = [
                chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == choice.index
            ]
            assert (
                tuple(choice.token_ids)
                == made.token_ids
                == tuple(token for part in parts for token in part.token_ids)
            )
            assert (
                choice.message.content == made.text == "".join(part.delta.content for part in parts)
            )
            assert (
                choice.finish_reason
                == parts[-1].finish_reason
                == ("stop" if made.finish_reason == "stop" else "length")
            )
            assert choice.versions == parts[-1].versions and choice.versions[-1]["end"] == len(
                made.token_ids
            )
            streamed = [token for part in parts for token in part.logprobs.content]
            for tokens in (choice.logprobs.content, streamed):
                assert [token.logprob for token in tokens] == pytest.approx(made.logprobs, abs=1e-5)
            best = choice.logprobs.content[0].top_logprobs
            assert len(best) == 20 and [token.logprob for token in best] == sorted(
                (token.logprob for token in best), reverse=True
            )
        assert len(chunks) > 10

        stop = first.text[5:8]
        cut = client.completions.create(**{**body, "n": 1}, prompt=prompt, stop=stop, stream=True)
        assert "".join(chunk.choices[0].text for chunk in cut) == first.text.partition(stop)[0]

        rows = [(prompt[:1], prompt[1:])]
        scored = await handle_logprobs(generators, rows)
        for extra in ({"max_tokens": 0}, {"max_tokens": 1, "stream": True}):
            answer = client.completions.create(
                model="tiny",
                prompt=[prompt, prompt[:4]],
                echo=True,
                logprobs=2,
                temperature=0,
                **extra,
            )  # type: ignore[call-overload]
            choices = (
                [chunk.choices[0] for chunk in answer] if "stream" in extra else answer.choices
            )
            echoed = next(choice for choice in choices if choice.index == 0).logprobs
            assert echoed.token_logprobs[0] is None and echoed.token_logprobs[
                1 : len(prompt)
            ] == pytest.approx(scored, abs=1e-4)
            assert "".join(echoed.tokens[: len(prompt)]) == "user: 3+4\nassistant: " and len(
                echoed.top_logprobs[1]
            ) in (2, 3)


async def handle_logprobs(generators: Any, rows: Any) -> Any:
    """Log-probs of the only row, from the only replica."""
    (scored,) = (await ServeGenerate(generators.handle).logprobs(rows, None)).values()
    return scored[0]


@pytest.mark.timeout(300)
async def test_closing_a_stream_frees_the_kv_cache(generators: Any) -> None:
    async def status() -> dict[str, Any]:
        return await generators.handle.status.remote()

    before = await status()
    with listening(routes(EngineServed(generators), None)) as address:
        async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            stream = await client.completions.create(
                model="tiny",
                prompt=[5, 6, 14],
                n=32,
                max_tokens=250,
                temperature=2,
                seed=1,
                stream=True,
            )
            assert (await anext(aiter(stream))).choices[0].token_ids
            await stream.close()
        async with asyncio.timeout(120):
            while (await generators.handle.pause_empty.remote())["in_flight"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    after = await status()
    assert (
        sum(after.load.aborted) > sum(before.load.aborted)
        and after.tokens_generated - before.tokens_generated < 32 * 250
    )


@pytest.mark.timeout(300)
async def test_late_and_refused_streams_raise(generators: Any) -> None:
    async def pieces(request: GenerateRequest) -> list[StreamPiece]:
        return [piece async for piece in EngineServed(generators).stream(request, Details())]

    with pytest.raises(GenerationTimeoutError, match=r"were not done in 0\.02 s"):
        await pieces(GenerateRequest((5, 6), 1, 250, 1.0, ignore_eos=True, deadline_s=0.02))
    with pytest.raises(InvalidRequestError, match="above max_model_len = 256"):
        await pieces(GenerateRequest((5, 6), 1, 255, 1.0))
    with pytest.raises(InvalidRequestError, match="temperature"):
        await pieces(GenerateRequest((5, 6), 1, 4, -1.0))
