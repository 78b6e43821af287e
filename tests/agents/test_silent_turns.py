"""A streamed turn of which nothing can be heard yet: its client knows that the server lives."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from agent_server import ADD_TOOL, KEY, Server, call

from asyncrl.agents import streamed_text as heard
from asyncrl.agents.app import agent_app
from asyncrl.serving.http import routes
from asyncrl.serving.identity import ServedModel
from asyncrl.testing import FakeAgentSessions, FakeServed
from asyncrl.web import events

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "q"}], "tools": [ADD_TOOL]},
    "/v1/responses": {
        "input": "q",
        "tools": [{"type": "function", **ADD_TOOL["function"]}],  # type: ignore[dict-item]
    },
    "/v1/messages": {"messages": [{"role": "user", "content": "q"}], "max_tokens": 900},
    "/v1/completions": {"prompt": "q"},
}


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads and comments come sooner than in a run."""
    monkeypatch.setattr(heard, "BEGIN_S", 0.01)
    monkeypatch.setattr(events, "FIRST_COMMENT_S", 0.01)
    monkeypatch.setattr(events, "COMMENT_S", 0.01)


@pytest.mark.parametrize("path", BODIES)
async def test_the_head_and_comments_come_while_a_turn_is_silent(
    tmp_path: Path, path: str, soon: None
) -> None:
    server = Server(tmp_path, lambda number: call(1, 2), latency=lambda number: 60.0)

    async def listen() -> str:
        got = ""
        async with server.http() as client:
            body = {**BODIES[path], "stream": True}
            async with client.stream("POST", path, json=body) as answer:
                assert answer.status_code == 200
                assert answer.headers["content-type"].startswith("text/event-stream")
                async for text in answer.aiter_text():
                    got += text
                    if got.count(": sampling\n\n") == 3:
                        return got
        raise AssertionError(got)

    await asyncio.wait_for(listen(), 30)


async def test_clients_pass_over_comments(tmp_path: Path, soon: None) -> None:
    server = Server(tmp_path, lambda number: call(1, 2), latency=lambda number: 0.1)
    chat: Any = [{"role": "user", "content": "q"}]
    anthropics: Any = {
        "name": "add",
        "input_schema": ADD_TOOL["function"]["parameters"],  # type: ignore[index]
    }

    async with server.openai() as client, server.anthropic() as other:
        async with client.chat.completions.stream(
            model="m", messages=chat, tools=[ADD_TOOL]
        ) as stream:  # type: ignore[list-item]
            done = await stream.get_final_completion()
        (made,) = done.choices[0].message.tool_calls or ()
        assert made.function.name == "add"  # type: ignore[union-attr]
        body = BODIES["/v1/responses"]
        async with client.responses.stream(model="m", **body) as answer:
            kinds = [item.type for item in (await answer.get_final_response()).output]
        assert kinds == ["function_call"]
        async with other.messages.stream(
            model="m", max_tokens=900, messages=chat, tools=[anthropics]
        ) as blocks:
            last = await blocks.get_final_message()
        assert [block.type for block in last.content] == ["tool_use"]


@pytest.mark.parametrize("path", BODIES)
async def test_what_is_wrong_with_a_request_keeps_its_status(
    tmp_path: Path, path: str, soon: None
) -> None:
    server = Server(tmp_path, ["a"], max_length=1)

    async with server.http() as client:
        answer = await client.post(path, json={**BODIES[path], "stream": True})
    found = answer.status_code, answer.json()["error"]["code"]
    assert found == (400, "context_length_exceeded")


async def test_a_request_that_joins_another_begins_at_once(tmp_path: Path, soon: None) -> None:
    server = Server(tmp_path, lambda number: call(1, 2), latency=lambda number: 60.0)
    path = "/v1/chat/completions"
    body = {**BODIES[path], "stream": True}

    async with asyncio.timeout(30):
        async with server.http() as client:
            for count in ("0", "1"):
                headers = {"x-stainless-retry-count": count}
                async with client.stream("POST", path, json=body, headers=headers) as answer:
                    assert answer.status_code == 200
        assert len(server.generator.requests) == 1


def apps() -> dict[str, Any]:
    served = FakeServed(ServedModel("tiny", max_model_len=64, vocabulary=200, longest_token=4))
    return {
        "/v1/chat/completions": routes(served, None),
        "/v1/messages": agent_app(FakeAgentSessions({KEY: _NoSession()})),  # type: ignore[dict-item]
    }


class _NoSession:
    def close(self, reason: str) -> None:
        pass


@pytest.mark.parametrize("path", apps())
async def test_a_client_that_leaves_while_it_sends_is_no_failure(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    parts = iter(
        [
            {"type": "http.request", "body": b'{"messages": [', "more_body": True},
            {"type": "http.disconnect"},
        ]
    )
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return next(parts)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = {"content-type": "application/json", "content-length": "500", "host": "127.0.0.1"}
    headers["authorization"] = f"Bearer {KEY}"
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    with caplog.at_level(logging.INFO):
        await apps()[path](scope, receive, send)
    assert [message["status"] for message in sent if "status" in message] in ([], [499])
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
