"""A teacher at a URL that fails in every way, over real HTTP."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from served_http import listening
from starlette.datastructures import Headers

from asyncrl.config.distillation import TeacherServer
from asyncrl.contracts.errors import TeacherError
from asyncrl.learning.frozen.teacher import UrlTeacher

ROWS = [([7, 8], [3, 4, 5]), ([7], []), ([9], [6])]


class Server:
    address: str

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        """The requests so far."""
        self.headers: list[Headers] = []
        self.answers: list[Callable[[Any], Awaitable[Response]]] = [good]
        """Called in turn, the last one again."""


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> Any:
        return {"data": [{"id": "listed"}]}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await request.json()
        state.bodies.append(body)
        state.headers.append(request.headers)
        answer = state.answers.pop(0) if len(state.answers) > 1 else state.answers[0]
        return await answer(body)

    with listening(app) as address:
        state.address = f"{address}/v1"
        yield state


def echoed(values: list[float | None]) -> Response:
    # Not JSONResponse, which refuses NaN.
    text = ", ".join("null" if value is None else str(value) for value in values)
    body = f'{{"choices": [{{"logprobs": {{"token_logprobs": [{text}]}}}}]}}'
    return Response(body.replace("nan", "NaN"), media_type="application/json")


async def good(body: Any) -> Response:
    """The log-prob of a token is minus its id."""
    return echoed([None, *(-float(token) for token in body["prompt"][1:])])


async def short(body: Any) -> Response:
    return echoed([None, *[-1.0] * (len(body["prompt"]) - 2)])


async def nan(body: Any) -> Response:
    return echoed([None, *[math.nan] * (len(body["prompt"]) - 1)])


async def positive(body: Any) -> Response:
    return echoed([None, *[0.5] * (len(body["prompt"]) - 1)])


async def nothing(body: Any) -> Response:
    return JSONResponse({"choices": []})


async def busy(body: Any) -> Response:
    return JSONResponse({}, 503)


async def refused(body: Any) -> Response:
    return JSONResponse({"error": "too long"}, 400)


async def slow(body: Any) -> Response:
    await asyncio.sleep(2)
    return await good(body)


def ask(server: Server, rows: Any = ROWS, scored: Any = None, **settings: Any) -> list[np.ndarray]:
    teacher = TeacherServer(url=server.address, retries=1, **settings)
    return asyncio.run(UrlTeacher(teacher).logprobs(rows, scored))


def test_the_exact_ids_are_sent_and_the_completions_log_probs_come_back(
    server: Server,
) -> None:
    found = ask(server)
    assert [values.tolist() for values in found] == [[-3.0, -4.0, -5.0], [], [-6.0]]
    assert all(values.dtype == np.float32 for values in found)
    assert sorted(body["prompt"] for body in server.bodies) == [[7, 8, 3, 4, 5], [9, 6]]
    assert {
        (body["model"], body["max_tokens"], body["echo"], body["logprobs"])
        for body in server.bodies
    } == {("listed", 0, True, 0)}


def test_of_a_session_only_the_scored_tokens_come_back(server: Server) -> None:
    scored = [[True, False, True], [], [True]]
    assert [values.tolist() for values in ask(server, scored=scored)] == [[-3.0, -5.0], [], [-6.0]]
    assert sorted(body["prompt"] for body in server.bodies) == [[7, 8, 3, 4, 5], [9, 6]]
    server.answers = [good, refused]
    found = ask(server, [([7], [3]), ([9], [6, 8])], [[True], [False, True]], at_once=1)
    assert [len(values) for values in found] == [1, 1]
    assert sorted(math.isnan(values[0]) for values in found) == [False, True]


def test_the_key_comes_from_the_environment(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TeacherError, match="this process has no such variable"):
        ask(server, key_env="A_TEACHERS_KEY")
    monkeypatch.setenv("A_TEACHERS_KEY", "secret")
    ask(server, key_env="A_TEACHERS_KEY")
    assert server.headers[0]["authorization"] == "Bearer secret"


def test_a_busy_server_is_asked_again(server: Server) -> None:
    server.answers = [busy, good]
    [found] = ask(server, [([7], [3])])
    assert found.tolist() == [-3.0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (short, "it returned 1 log-probs of 2 token ids"),
        (nan, "missing, NaN, Inf or above 0"),
        (positive, "missing, NaN, Inf or above 0"),
        (nothing, "it returned no log-probs of 2 token ids"),
        (busy, "status 503"),
        (refused, "it refuses requests with status 400"),
        (slow, "more than timeout_s = 0.5 s"),
    ],
)
def test_an_unusable_answer_is_a_failure_with_a_reason(
    server: Server, answer: Callable[[Any], Any], message: str
) -> None:
    server.answers = [answer]
    timeout = 0.5 if answer is slow else 20.0
    with pytest.raises(TeacherError, match=message):
        ask(server, [([7], [3])], model="named", timeout_s=timeout)


def test_one_failed_row_costs_only_that_row(server: Server) -> None:
    async def not_the_longest(body: Any) -> Response:
        return await (refused if len(body["prompt"]) == 5 else good)(body)

    server.answers = [not_the_longest]
    found = ask(server)
    assert np.isnan(found[0]).all() and len(found[0]) == 3
    assert found[2].tolist() == [-6.0]
