"""The keys of sessions at a URL, and what their agents may do."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from asyncrl.agents import served
from asyncrl.agents.served import ServedSession, ServedSessions
from asyncrl.agents.server import AgentServer
from asyncrl.api.errors import as_api_error
from asyncrl.contracts.text_listener import Heard
from asyncrl.sessions.answers import (
    Answer,
    ChatRequest,
    ContextTooLongError,
    SessionClosedError,
    TurnDeadlineError,
    TurnsExceededError,
)
from asyncrl.testing import FakeAgentSessions
from asyncrl.text.chat_messages import MessagesError
from asyncrl.web.errors import ApiError

CHAT = ChatRequest([{"role": "user", "content": "q"}])


async def answers(request: ChatRequest, heard: Heard | None) -> list[Answer]:
    return [Answer({"role": "assistant", "content": "a"}, "stop", 1, 1, 0)]


def test_each_session_has_a_key_of_its_own_which_is_void_at_its_end() -> None:
    sessions = ServedSessions()
    one, two = ServedSession(answers, 5), ServedSession(answers, 5)
    first, second = sessions.open(one), sessions.open(two)
    assert first != second and sessions.of(first) is one and sessions.of(second) is two
    one.end = "deadline"
    sessions.close(first)
    with pytest.raises(ApiError, match="the session has ended: deadline") as refused:
        sessions.of(first)
    assert (refused.value.status, refused.value.code) == (409, "session_closed")
    assert refused.value.more == {"session_end": "deadline"}
    assert sessions.of(second) is two
    for unknown in ("", "EMPTY", f"{second} ", second[:-1], "\udce9"):
        with pytest.raises(ApiError) as refused:
            sessions.of(unknown)
        assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")


def test_the_fake_refuses_as_the_server_does() -> None:
    served, fake = ServedSessions(), FakeAgentSessions({"known": _NoSession()})  # type: ignore[dict-item]
    session = ServedSession(answers, 5)
    key = served.open(session)
    session.end = "turns"
    served.close(key)
    fake.end("known", "turns")
    for production, tested in ((key, "known"), ("unknown", "unknown")):
        with pytest.raises(ApiError) as expected:
            served.of(production)
        with pytest.raises(ApiError) as found:
            fake.of(tested)
        assert found.value.body() == expected.value.body()
        assert found.value.status == expected.value.status


class _NoSession:
    def close(self, reason: str) -> None:
        pass


def test_keys_are_kept_only_hashed() -> None:
    sessions = ServedSessions()
    key = sessions.open(ServedSession(answers, 5))
    sessions.close(key)
    other = sessions.open(ServedSession(answers, 5))
    for kept in (key, other):
        assert kept.removeprefix("sk-asyncrl-") not in repr(vars(sessions))


def test_the_oldest_ended_sessions_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "MOST_ENDED", 2)
    sessions = ServedSessions()
    keys = [sessions.open(ServedSession(answers, 5)) for _ in range(3)]
    for key in keys:
        sessions.close(key)
    statuses = []
    for key in keys:
        with pytest.raises(ApiError) as refused:
            sessions.of(key)
        statuses.append(refused.value.status)
    assert statuses == [401, 409, 409]


async def test_an_agent_takes_only_the_turns_that_it_may() -> None:
    session = ServedSession(answers, 2)

    with pytest.raises(TurnsExceededError, match="has taken its 2 turns") as refused:
        await session.chat(CHAT)
        await session.chat(CHAT)
        await session.chat(CHAT)
    shown = as_api_error(refused.value)
    assert (shown.status, shown.code) == (409, "turns_exceeded")
    assert session.turns == 2 and session.ended is not None


@pytest.mark.parametrize(
    ("error", "status", "code", "final"),
    [
        (ContextTooLongError("too long"), 400, "context_length_exceeded", True),
        (MessagesError("no roles"), 400, "invalid_value", False),
        (TurnDeadlineError("too slow"), 409, "turn_deadline", True),
        (SessionClosedError("over"), 409, "session_closed", True),
    ],
)
async def test_an_agent_learns_why_it_is_refused(
    error: Exception, status: int, code: str, final: bool
) -> None:
    async def refuses(request: ChatRequest, heard: Heard | None) -> list[Answer]:
        raise error

    session = ServedSession(refuses, 5)
    with pytest.raises(type(error)) as refused:
        await session.chat(CHAT)
    shown = as_api_error(refused.value)
    assert (shown.status, shown.code, str(shown)) == (status, code, str(error))
    assert (session.ended is error) == final and session.failed is None


async def test_an_error_of_the_model_is_kept_until_a_later_request_succeeds() -> None:
    failing = True

    async def sometimes(request: ChatRequest, heard: Heard | None) -> list[Answer]:
        if failing:
            raise RuntimeError("the engine died")
        return await answers(request, heard)

    session = ServedSession(sometimes, 5)
    with pytest.raises(RuntimeError, match="the engine died"):
        await session.chat(CHAT)
    assert isinstance(session.failed, RuntimeError) and session.ended is None
    failing = False
    await session.chat(CHAT)
    assert session.failed is None


async def test_a_retry_is_no_further_turn() -> None:
    session = ServedSession(answers, 1)
    named = replace(CHAT, key="k")

    with pytest.raises(TurnsExceededError):
        await session.chat(named)
        await session.chat(named)  # its client lost the first answer
        await session.chat(replace(CHAT, key="other"))
    assert session.turns == 1


async def test_answers_do_not_wait_for_acknowledgments() -> None:
    server = AgentServer()
    await server.start()
    try:
        assert server._socket is not None  # accepted connections inherit its options
        assert server._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
    finally:
        await server.close()
