"""Completions whose text is heard as it comes: over fake replicas that die, and a real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from asyncrl.contracts.errors import GenerationTimeoutError, StaleReplicaError
from asyncrl.contracts.messages import Accepted, Generated, GenerateRequest, StreamPiece, Tokens
from asyncrl.contracts.rows import Completion, VersionSpan
from asyncrl.generation.app import ServeGenerate
from asyncrl.text.tokenizer import decode, load_tokenizer

pytestmark = pytest.mark.timeout(300)

REQUEST = GenerateRequest((4, 5), 1, 6, 1.0, seed=7, deadline_s=20, session="s")


def piece(*ids: int) -> StreamPiece:
    """Its tokens are the letters of its text."""
    return StreamPiece(Tokens(ids, tuple(-token / 8 for token in ids)), "".join(map(chr, ids)))


@dataclass(frozen=True)
class Response:
    """What Serve returns: it can be iterated and canceled."""

    answer: AsyncIterator[Any]
    cancel: Callable[[], None]

    def __aiter__(self) -> AsyncIterator[Any]:
        return self.answer


class Replicas:
    """Each call gets the next script: an acceptance, pieces, and an end, which may be an error."""

    def __init__(self, *scripts: Sequence[Any]) -> None:
        self.scripts, self.requests, self.cancelled = list(scripts), list[GenerateRequest](), 0
        self.stream_turn = self
        self.app_name = "fakes"

    def options(self, stream: bool) -> Any:
        assert stream
        return self

    def remote(self, request: GenerateRequest) -> Response:
        self.requests.append(request)
        return Response(self.answer(request, self.scripts.pop(0)), self.cancel)

    def cancel(self) -> None:
        self.cancelled += 1

    async def answer(
        self, request: GenerateRequest, script: Sequence[Any]
    ) -> AsyncIterator[Accepted | StreamPiece | Generated]:
        ids: list[int] = []
        for item in script:
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, asyncio.Event):
                item.set()
                await asyncio.Event().wait()
            if isinstance(item, StreamPiece):
                ids += item.tokens.ids
                if len(ids) == len(item.tokens.ids) and request.continued:
                    before = request.prompt_ids[-request.continued :]
                    item = replace(item, text="".join(map(chr, before)) + item.text)
            if isinstance(item, VersionSpan):  # the end of an answer
                whole = (*request.prompt_ids[2:], *ids)
                completion = Completion(
                    tuple(ids),
                    tuple(-token / 8 for token in ids),
                    (replace(item, end=len(ids)),),
                    "length",
                    "".join(map(chr, whole)),
                )
                yield Generated((completion,), "b", 5.0, 6.0, cached_tokens=(3,), cache_block=2)
                return
            yield item


def generate_with(replicas: Replicas, lost: list[Any] | None = None) -> ServeGenerate:
    return ServeGenerate(
        replicas, lambda request, error: None if lost is None else lost.append(error)
    )


def spans(completion: Completion) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in completion.versions]


async def test_a_completion_continues_elsewhere_from_the_tokens_that_came() -> None:
    replicas = Replicas(
        [Accepted("a", 3, 1.0), piece(97), piece(98, 99), ActorDiedError()],
        [StaleReplicaError("not yet")],
        [Accepted("b", 4, 4.0), piece(100), piece(101, 102), VersionSpan(4, 0, 0)],
    )
    heard, lost = list[tuple[int, str]](), list[Any]()
    generated = await generate_with(replicas, lost).generate(
        REQUEST, lambda *text: heard.append(text)
    )
    assert heard == [(0, "a"), (0, "bc"), (0, "d"), (0, "ef")]
    (completion,) = generated.completions
    assert completion.token_ids == (97, 98, 99, 100, 101, 102)
    assert completion.logprobs == tuple(-token / 8 for token in completion.token_ids)
    assert spans(completion) == [(3, 0, 3), (4, 3, 6)]
    assert (completion.text, completion.finish_reason) == ("abcdef", "length")
    assert (generated.replica, generated.started_at, generated.finished_at) == ("b", 1.0, 6.0)
    first, refused, rest = replicas.requests
    assert (first.prompt_ids, first.max_tokens, first.continued) == ((4, 5), 6, 0)
    assert refused.prompt_ids == rest.prompt_ids == (4, 5, 97, 98, 99)
    assert rest.max_tokens == rest.continued == 3 and rest.seed != REQUEST.seed
    assert [request.tries for request in replicas.requests] == [0, 1, 2]
    assert [type(error) for error in lost] == [ActorDiedError]


async def test_tokens_of_one_version_are_one_span() -> None:
    replicas = Replicas(
        [Accepted("a", 3, 1.0), piece(97), ActorDiedError()],
        [Accepted("b", 3, 4.0), piece(98), VersionSpan(3, 0, 0)],
    )
    generated = await generate_with(replicas).generate(REQUEST, lambda *text: None)
    (completion,) = generated.completions
    assert spans(completion) == [(3, 0, 2)]


@pytest.mark.parametrize("how", ["canceled", "late"])
async def test_a_caller_that_leaves_drops_the_request(how: str) -> None:
    async with asyncio.timeout(20):
        here = asyncio.Event()
        replicas = Replicas([Accepted("a", 3, 1.0), piece(97), here])
        request = replace(REQUEST, deadline_s=0.2) if how == "late" else REQUEST
        task = asyncio.create_task(generate_with(replicas).generate(request, lambda *text: None))
        await here.wait()
        if how == "canceled":
            task.cancel()
        with pytest.raises(asyncio.CancelledError if how == "canceled" else GenerationTimeoutError):
            await task
    assert replicas.cancelled == 1


async def test_a_stream_that_a_replica_cancels_continues() -> None:
    replicas = Replicas(
        [Accepted("a", 3, 1.0), piece(97), asyncio.CancelledError()],
        [Accepted("b", 3, 4.0), piece(98), VersionSpan(3, 0, 0)],
    )
    heard: list[str] = []
    await generate_with(replicas).generate(REQUEST, lambda _, text: heard.append(text))
    assert heard == ["a", "b"]


async def test_a_heard_completion_is_the_same_as_a_whole_one(generators: Any) -> None:
    """With a real engine."""
    request = GenerateRequest((5, 6, 14, 7), 2, 60, 1.0, seed=5, ignore_eos=True, session="s")
    heard: list[list[str]] = [[], []]

    async with asyncio.timeout(120):
        generate = ServeGenerate(generators.handle)
        whole = await generate.generate(request)
        streamed = await generate.generate(request, lambda index, text: heard[index].append(text))
        ids = whole.completions[0].token_ids
        continues = replace(
            request,
            n=1,
            prompt_ids=(*request.prompt_ids, *ids[:25]),
            max_tokens=35,
            continued=25,
        )
        rest = await generate.generate(continues, lambda *text: None)
    for index, (one, other) in enumerate(zip(whole.completions, streamed.completions, strict=True)):
        assert replace(other, logprobs=one.logprobs) == one
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert "".join(heard[index]) == one.text and len(heard[index]) > 1
    assert streamed.replica == whole.replica and streamed.cache_block == whole.cache_block > 0
    assert len(streamed.cached_tokens) == 2 and streamed.load is not None
    assert streamed.finished_at > streamed.started_at > whole.finished_at
    (continued,) = rest.completions
    assert len(continued.token_ids) == 35 and spans(continued)[-1][2] == 35
    tokenizer = load_tokenizer(generators.app.model)
    begin = decode(tokenizer, whole.completions[0].token_ids[:25])
    assert begin and continued.text == begin + decode(tokenizer, continued.token_ids)
