"""What agents and their clients get wrong: bodies, keys, retries, and lost connections."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from agent_server import ADD_TOOL, KEY, Server

from asyncrl.agents.retries import RequestNames
from asyncrl.contracts.nodes import ORPHAN
from asyncrl.environments.model import Model
from asyncrl.sessions.requests import UnsupportedError
from asyncrl.sessions.session_rows import session_rows
from asyncrl.web.errors import ApiError

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PATHS = (CHAT, TEXT, RESPONSES, MESSAGES)
USER = {"role": "user", "content": "q"}
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    TEXT: {"prompt": "q"},
    RESPONSES: {"input": "q"},
    MESSAGES: {"messages": [USER], "max_tokens": 500},
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
NESTED = {"type": "function", "function": {"name": "add", "parameters": {"$ref": "#/none"}}}
ANTHROPIC_IMAGE = {"type": "image", "source": {"type": "base64", "data": ""}}


def answers(number: int) -> str:
    return f"answer {number}"


def error_of(path: str, answer: Any) -> dict[str, Any]:
    """The error of an answer, which has the form of its API."""
    body = answer.json()
    error: dict[str, Any] = body["error"]
    fields = {"type", "message", "code"}
    if error["code"] == "session_closed":
        fields.add("session_end")
    if path == MESSAGES:
        assert body["type"] == "error" and fields == set(error)
    else:
        assert set(body) == {"error"} and {*fields, "param"} == set(error)
    assert "\n" not in error["message"]
    return error


def post(server: Server, path: str, body: Any, **options: Any) -> Any:
    async def send() -> Any:
        async with server.http() as client:
            return await client.post(path, json=body, **options)

    return asyncio.run(send())


BAD = [
    (CHAT, {"messages": [{"role": "wizard", "content": "q"}]}, "messages.0.role"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {}, "messages is missing"),
    (CHAT, [], "the body is a JSON list"),
    (
        CHAT,
        {"messages": [{**USER, "content": [IMAGE]}]},
        "messages.0.content.0 has the type 'image",
    ),
    (CHAT, {"messages": [{**USER, "content": 5}]}, "messages.0.content"),
    (
        CHAT,
        {"messages": [{**USER, "tool_calls": [{"id": "a", "function": {}}]}]},
        "messages.0.tool",
    ),
    (CHAT, {"messages": [USER], "functions": [{}]}, "functions is not supported; use tools"),
    (CHAT, {"messages": [USER], "n": 0}, "n: "),
    (CHAT, {"messages": [USER], "n": 1000}, "n: "),
    (CHAT, {"messages": [USER], "max_tokens": 0}, "max_tokens: "),
    (CHAT, {"messages": [USER], "stop": [""]}, "stop "),
    (CHAT, {"messages": [USER], "tool_choice": "perhaps"}, "tool_choice"),
    (CHAT, {"messages": [USER], "tools": [{"type": "web_search"}]}, "tools.0.type"),
    (
        CHAT,
        {"messages": [USER], "tools": [NESTED]},
        "the schema of the tool 'add' refers",
    ),
    (CHAT, {"messages": [USER], "modalities": ["audio"]}, "modalities"),
    (CHAT, {"messages": [USER], "response_format": {"type": "json_schema"}}, "response_format"),
    (TEXT, {"prompt": ["a", "b"]}, "prompt is not one text"),
    (TEXT, {"prompt": [1, 2]}, "prompt"),
    (TEXT, {"prompt": "q", "echo": True}, "echo"),
    (RESPONSES, {}, "input has no item"),
    (
        RESPONSES,
        {"input": [{"type": "item_reference", "id": "x"}]},
        "input.0.type: input should be 'message', ",
    ),
    (
        RESPONSES,
        {"input": [{"role": "wizard", "content": "q"}]},
        "input.0.role: input should be 'system'",
    ),
    (RESPONSES, {"input": [{"content": "q"}]}, "input.0 has no role"),
    (
        RESPONSES,
        {"input": [{**USER, "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.0.content.0 has the type 'input_image'",
    ),
    (RESPONSES, {"input": "q", "tools": [{"type": "web_search"}]}, "tools.0.type"),
    (RESPONSES, {"input": "q", "conversation": "c"}, "conversation is not supported"),
    (RESPONSES, {"input": [{"type": "function_call", "name": "x"}]}, "input.0 needs texts"),
    (MESSAGES, {"messages": [{**USER, "content": [ANTHROPIC_IMAGE]}]}, "messages.0.content.0 has"),
    (MESSAGES, {"messages": [{"role": "tool", "content": "q"}]}, "messages.0.role"),
    (MESSAGES, {"messages": [USER, {"role": "assistant", "content": "so"}]}, "the last message"),
    (
        MESSAGES,
        {"messages": [USER], "tools": [{"type": "bash_20250124", "name": "bash"}]},
        "tools.0 has the type 'bash_20250124'",
    ),
    (
        MESSAGES,
        {"messages": [{**USER, "content": [{"type": "tool_result", "content": "3"}]}]},
        "messages.0.content.0 needs a text as tool_use_id",
    ),
]


@pytest.mark.parametrize(("path", "body", "says"), BAD)
def test_a_bad_body_is_named(tmp_path: Path, path: str, body: Any, says: str) -> None:
    server = Server(tmp_path, answers)
    answer = post(server, path, body)
    error = error_of(path, answer)
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["message"].startswith(says) and len(error["message"]) < 300
    assert not server.session.nodes and not server.generator.requests


@pytest.mark.parametrize(
    ("body", "says"),
    [(body, says) for path, body, says in BAD if path == CHAT and "messages" in body],
)
async def test_a_bad_request_is_named_alike_in_process(
    tmp_path: Path, body: Any, says: str
) -> None:
    server = Server(tmp_path, answers)
    with pytest.raises(UnsupportedError) as found:
        await Model(server.session).chat.completions.create(**body)
    assert str(found.value).startswith(says)
    assert not server.session.nodes and not server.generator.requests


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"{", {}, 400, "invalid_body"),
        (b'{"a": NaN}', {}, 400, "invalid_body"),
        (b'{"a": 1e999}', {}, 400, "invalid_body"),
        (b'{"a": "\\ud800"}', {}, 400, "invalid_body"),
        (b"[" * 200_000, {}, 400, "invalid_body"),
        (b"{}", {"content-type": "text/plain"}, 415, "invalid_type"),
        (b"{}", {"content-encoding": "gzip"}, 415, "invalid_encoding"),
        (b'"' + b"a" * (1 << 20) + b'"', {}, 413, "request_too_large"),
        (b"{}", {"authorization": "Bearer other"}, 401, "invalid_api_key"),
        (b"{}", {"authorization": ""}, 401, "invalid_api_key"),
    ],
)
def test_what_is_no_request(
    tmp_path: Path, path: str, content: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    server = Server(tmp_path, answers)
    sent = {"content-type": "application/json", **headers}
    answer = post_raw(server, path, content, sent)
    assert (answer.status_code, error_of(path, answer)["code"]) == (status, code)


def post_raw(server: Server, path: str, content: bytes, headers: dict[str, str]) -> Any:
    async def send() -> Any:
        async with server.http() as client:
            return await client.post(path, content=content, headers=headers)

    return asyncio.run(send())


def test_unknown_paths_and_methods(tmp_path: Path) -> None:
    server = Server(tmp_path, answers)
    for path in ("/v1/messages/count_tokens", "/v1/embeddings"):
        answer = post(server, path, {})
        assert answer.status_code == 404
        assert error_of(MESSAGES if "messages" in path else path, answer)["code"] == "not_found"

    async def get() -> Any:
        async with server.http() as client:
            return await client.get(MESSAGES), await client.get("/openapi.json")

    refused, schema = asyncio.run(get())
    assert refused.status_code == 405 and "GET" in error_of(MESSAGES, refused)["message"]
    assert set(PATHS) < set(schema.json()["paths"])


async def test_a_context_that_is_too_long_has_its_code(tmp_path: Path) -> None:
    server = Server(tmp_path, answers, max_length=10)

    async with server.openai() as client, server.anthropic() as other:
        with pytest.raises(openai.BadRequestError) as found:
            await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
        assert found.value.code == "context_length_exceeded"
        # The words by which litellm and LangChain find it.
        assert "this model's maximum context length is" in found.value.message
        assert "prompt is too long" in found.value.message
        with pytest.raises(openai.BadRequestError) as found:
            await client.responses.create(model="m", input="q" * 20, stream=True)
        assert found.value.code == "context_length_exceeded"
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await other.messages.create(model="m", max_tokens=5, messages=[USER])  # type: ignore[list-item]


async def test_others_are_answered_while_a_body_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, began = threading.Event(), threading.Event()

    def parsed(body: bytes) -> object:
        began.set()
        assert read.wait(30)
        return json.loads(body)

    monkeypatch.setattr("asyncrl.agents.app.parsed", parsed)
    async with Server(tmp_path, answers).http() as client:
        slow = asyncio.create_task(client.post(CHAT, json=GOOD[CHAT]))
        assert await asyncio.to_thread(began.wait, 30)
        assert (await client.get("/v1/models")).status_code == 200 and not slow.done()
        read.set()
        assert (await slow).status_code == 200


async def test_models_have_any_name(tmp_path: Path) -> None:
    server = Server(tmp_path, answers)

    async with server.openai() as client, server.anthropic() as other:
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert (await client.models.retrieve("org/any")).id == "org/any"
        assert [model.id async for model in other.models.list()] == ["policy"]
        done = await client.chat.completions.create(model="gpt-9", messages=[USER])  # type: ignore[list-item]
        assert done.model == "gpt-9"


def test_what_has_no_effect_is_counted(tmp_path: Path) -> None:
    server = Server(tmp_path, answers)
    common = {"model": "m", "temperature": 0.2, "top_p": 0.9, "metadata": {}, "unheard_of": 1}
    tool = {**ADD_TOOL["function"], "strict": True}  # type: ignore[dict-item]
    forced = {"type": "function", "function": {"name": "add"}}
    bodies = {
        CHAT: {
            "reasoning_effort": "low",
            "tools": [{"type": "function", "function": tool}],
            "tool_choice": forced,
            "parallel_tool_calls": False,
        },
        TEXT: {"best_of": 3, "seed": 1},
        RESPONSES: {"reasoning": {"effort": "low"}, "tool_choice": "required", "include": ["x"]},
        MESSAGES: {"top_k": 5, "thinking": {"type": "enabled"}, "tool_choice": {"type": "any"}},
    }
    for path in PATHS:
        assert post(server, path, {**GOOD[path], **common, **bodies[path]}).status_code == 200
    assert server.agent.overridden == {
        "temperature": 4,
        "top_p": 4,
        "unheard_of": 4,
        "reasoning_effort": 1,
        "strict": 1,
        "tool_choice": 3,
        "parallel_tool_calls": 1,
        "best_of": 1,
        "seed": 1,
        "reasoning": 1,
        "include": 1,
        "top_k": 1,
        "thinking": 1,
    }
    assert "strict" not in json.dumps(server.agent.requests[0].tools)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_a_forced_call_of_anthropics_api_is_counted(tmp_path: Path, choice: Any) -> None:
    server = Server(tmp_path, answers)
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    body = {**GOOD[MESSAGES], "tools": tools, "tool_choice": choice}
    assert post(server, MESSAGES, body).status_code == 200
    assert server.agent.overridden == {"tool_choice": 1}


def test_calls_stay_text_without_tools_or_with_none_chosen(tmp_path: Path) -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    server = Server(tmp_path, lambda number: text)
    tool = {"name": "add", "input_schema": {"type": "object"}}
    for path, more in (
        (CHAT, {"tools": [ADD_TOOL], "tool_choice": "none"}),
        (CHAT, {}),
        (MESSAGES, {"tools": [tool], "tool_choice": {"type": "none"}}),
    ):
        body = post(server, path, {**GOOD[path], **more}).json()
        said = body["content"][0] if path == MESSAGES else body["choices"][0]["message"]
        assert said.get("text", said.get("content")) == text
    assert not server.agent.overridden


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_after_the_end_is_not_sent_again(tmp_path: Path, path: str, stream: bool) -> None:
    server = Server(tmp_path, answers)
    server.sessions.end(KEY, "deadline")
    answer = post(server, path, {**GOOD[path], "stream": stream})
    error = error_of(path, answer)
    assert (answer.status_code, error["code"]) == (409, "session_closed")
    assert error["session_end"] == "deadline"
    assert error["message"] == "the session has ended: deadline"
    assert answer.headers["x-should-retry"] == "false"

    async def ask() -> None:
        async with server.openai(max_retries=3) as client:
            with pytest.raises(openai.ConflictError) as found:
                await client.responses.create(model="m", input="q")
            assert found.value.code == "session_closed"
            assert found.value.body["session_end"] == "deadline"  # type: ignore[index,call-overload]
        async with server.anthropic(max_retries=3) as other:
            with pytest.raises(anthropic.ConflictError) as late:
                await other.messages.create(model="m", max_tokens=5, messages=[USER])  # type: ignore[list-item]
            error = late.value.body["error"]  # type: ignore[index,call-overload]
            assert (error["code"], error["session_end"]) == ("session_closed", "deadline")

    asyncio.run(ask())


class Gate:
    """Holds the answers of a generator until it is opened."""

    def __init__(self, server: Server) -> None:
        self.asked, self.opened = asyncio.Semaphore(0), asyncio.Event()
        self.canceled = 0
        self._generate = server.generator.generate
        server.generator.generate = self._held  # type: ignore[method-assign]

    async def _held(self, request: Any, heard: Any = None) -> Any:
        answers = await self._generate(request, heard)
        self.asked.release()
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.canceled += 1
            raise
        return answers


def gated(tmp_path: Path, test: Callable[[Server, Gate], Awaitable[None]]) -> Server:
    server = Server(tmp_path, answers)

    async def run() -> None:
        await test(server, Gate(server))

    asyncio.run(asyncio.wait_for(run(), 30))
    return server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("retries", [False, True])
def test_the_end_of_a_session_ends_its_requests(
    tmp_path: Path, stream: bool, retries: bool
) -> None:
    async def test(server: Server, gate: Gate) -> None:
        async with server.openai() as client:
            asked = asyncio.ensure_future(
                client.chat.completions.create(
                    model="m",
                    messages=[{"role": "user", "content": "<"}],
                    stream=stream,
                    extra_headers={} if retries else {"x-stainless-retry-count": openai.Omit()},
                )
            )
            await gate.asked.acquire()
            if stream:
                events = await asked  # its text has come
                server.sessions.end(KEY, "deadline")
                gate.opened.set()
                with pytest.raises(openai.APIError, match="has ended: deadline") as ended:
                    async for _ in events:
                        pass
            else:
                server.sessions.end(KEY, "deadline")
                gate.opened.set()
                with pytest.raises(openai.ConflictError, match="has ended: deadline") as ended:
                    await asked
            assert ended.value.code == "session_closed"
            assert ended.value.body["session_end"] == "deadline"  # type: ignore[index,call-overload]
            assert gate.canceled == retries

    server = gated(tmp_path, test)
    assert not any(node.sampled for node in server.session.nodes)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(tmp_path: Path, path: str, stream: bool) -> None:
    """It sends no retries, so nobody would get the answer."""

    async def test(server: Server, gate: Gate) -> None:
        async with server.http() as client:
            body = {**GOOD[path], "stream": stream}
            request = client.build_request("POST", path, json=body)
            sending = asyncio.ensure_future(client.send(request, stream=True))
            await gate.asked.acquire()
            if stream:
                await (await sending).aclose()
            else:
                sending.cancel()
                await asyncio.wait([sending])
        assert gate.canceled == 1

    server = gated(tmp_path, test)
    assert not any(node.sampled for node in server.session.nodes)


@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_joins_the_answer_under_way(tmp_path: Path, stream: bool) -> None:
    async def test(server: Server, gate: Gate) -> None:
        async def ask(retries: int) -> str:
            async with server.openai() as client:
                done: Any = await client.chat.completions.create(
                    model="m",
                    messages=[USER],  # type: ignore[list-item]
                    stream=stream,
                    extra_headers={"x-stainless-retry-count": str(retries)},
                )
                if not stream:
                    return str(done.choices[0].message.content)
                return "".join([event.choices[0].delta.content or "" async for event in done])

        first = asyncio.ensure_future(ask(0))
        await gate.asked.acquire()
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.ensure_future(ask(0))  # another request with an equal body
        await gate.asked.acquire()
        retry = asyncio.ensure_future(ask(1))
        assert gate.canceled == 0
        gate.opened.set()
        assert await retry == "answer 0"
        assert await second == "answer 1"
        assert await ask(1) == "answer 1"

    server = gated(tmp_path, test)
    assert len(server.sampled) == 2
    server.session.close("done")
    assert [node.status for node in server.session.nodes if node.sampled] == ["ok", "ok"]


def test_an_answer_whose_client_left_for_good_is_an_orphan(tmp_path: Path) -> None:
    async def test(server: Server, gate: Gate) -> None:
        async with server.openai(timeout=60) as client:
            asked = asyncio.ensure_future(
                client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
            )
            await gate.asked.acquire()
            asked.cancel()
            await asyncio.wait([asked])
            gate.opened.set()
            again = await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
            assert again.choices[0].message.content == "answer 1"
            server.session.close("done")

    server = gated(tmp_path, test)
    assert [node.status for node in server.session.nodes if node.sampled] == [ORPHAN, "ok"]
    counts = session_rows(server.session.nodes).counts
    assert counts.masked == {ORPHAN: server.tokens[0]}


async def test_an_idempotency_key_names_a_request(tmp_path: Path) -> None:
    server = Server(tmp_path, answers)

    async with server.http() as client:
        texts = []
        for key, content in (("a", "q"), ("a", "q"), ("b", "q"), ("a", "other")):
            body = {"messages": [{"role": "user", "content": content}]}
            answer = await client.post(CHAT, json=body, headers={"Idempotency-Key": key})
            texts.append(answer.json()["choices"][0]["message"]["content"])
        assert texts == ["answer 0", "answer 0", "answer 1", "answer 2"]


async def test_the_clients_own_retries_repeat_what_failed(tmp_path: Path) -> None:
    server = Server(tmp_path, answers, fails=lambda number: number == 0)

    async with server.openai(max_retries=1) as client:
        done = await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
        assert done.choices[0].message.content == "answer 1"
    first, second = (request.key for request in server.agent.requests)
    assert first == second and first is not None


def test_requests_with_one_body_are_told_apart() -> None:
    names = RequestNames(most=2)

    def key(retries: str | None, body: bytes = b"x", session: str = "s") -> str | None:
        headers = {} if retries is None else {"x-stainless-retry-count": retries}
        return names.key(session, CHAT, headers, body)

    first, second = key("0"), key("0")
    assert first != second and key("1") == key("2") == second
    names.left(first)
    assert key("1") == first and key("1") == second
    assert key(None) is None and key("x") is None
    assert key("0", session="other") != first
    key("0", b"y"), key("0", b"z")
    assert len(names) == 2
    assert key("1") not in (first, second)


def test_the_message_of_an_unforeseen_error_is_private(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path, answers, fails=lambda number: True)
    with caplog.at_level(logging.ERROR):
        for path in PATHS:
            answer = post(server, path, GOOD[path])
            error = error_of(path, answer)
            assert answer.status_code == 500 and error["code"] == "internal_error"
            assert "answer 0 failed" not in error["message"]
    assert "answer 0 failed" in caplog.text


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_fails_ends_with_an_error(tmp_path: Path, path: str) -> None:
    server = Server(tmp_path, answers, fails=lambda number: True)
    answer = post(server, path, {**GOOD[path], "stream": True})
    assert answer.status_code == 200
    *_, last, _ = answer.text.split("\n\n")
    data = json.loads(last.partition("data: ")[2])
    assert data["error"]["message"] == "the server failed; see its log"
    assert last.startswith("event: error\n") == (path in (RESPONSES, MESSAGES))
    assert "[DONE]" not in answer.text

    async def ask() -> None:
        async with server.openai() as client, server.anthropic() as other:
            with pytest.raises(openai.APIError):
                async with client.responses.stream(model="m", input="q") as events:
                    async for _ in events:
                        pass
            with pytest.raises(anthropic.APIStatusError):
                async with other.messages.stream(
                    model="m",
                    max_tokens=9,
                    messages=[USER],  # type: ignore[list-item]
                ) as found:
                    async for _ in found:
                        pass

    asyncio.run(ask())


def test_a_stream_that_began_otherwise_ends_with_an_error(tmp_path: Path) -> None:
    server = Server(tmp_path, answers)
    read = server.session._read
    server.session._read = lambda *given: {**read(*given), "content": "other"}
    for path in (CHAT, RESPONSES, MESSAGES):
        answer = post(server, path, {**GOOD[path], "stream": True})
        assert '"code": "stream_differs"' in answer.text


def test_two_turns_at_once_are_branches(tmp_path: Path) -> None:
    async def test(server: Server, gate: Gate) -> None:
        async with server.openai() as client:
            both = [
                asyncio.ensure_future(
                    client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
                )
                for _ in range(2)
            ]
            for _ in both:
                await gate.asked.acquire()
            gate.opened.set()
            texts = {(await one).choices[0].message.content for one in both}
            assert texts == {"answer 0", "answer 1"}

    server = gated(tmp_path, test)
    assert len(session_rows(server.session.nodes).rows) == 2


def test_an_error_of_the_session_keeps_its_status(tmp_path: Path) -> None:
    server = Server(tmp_path, answers)

    async def refused(*_: Any) -> Any:
        raise ApiError(409, "the turns are used up", "turns")

    server.agent.chat = refused  # type: ignore[method-assign]
    for path in PATHS:
        answer = post(server, path, {**GOOD[path], "stream": True})
        assert (answer.status_code, error_of(path, answer)["code"]) == (409, "turns")
