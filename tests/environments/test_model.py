"""The model of a session answers as openai's client does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from asyncrl.environments.model import Model, Reply
from asyncrl.sessions.answers import Answer, ChatRequest, Token
from asyncrl.sessions.requests import UnsupportedError

CALLED = {"role": "assistant", "content": None}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
Body = dict[str, Any]


class FakeSession:
    """Answers with given messages, and keeps the requests."""

    def __init__(self, answer: Callable[[int], Mapping[str, object]], finish: str = "stop") -> None:
        self._answer, self._finish = answer, finish
        self.requests: list[tuple[Any, ...]] = []

    async def chat(self, request: ChatRequest) -> list[Answer]:
        asked = request.tools, request.n, request.max_tokens, request.key
        self.requests.append((list(request.messages), *asked))
        return [
            Answer(self._answer(index), self._finish, 2, 7, index) for index in range(request.n)
        ]


def said(index: int) -> Mapping[str, object]:
    return {"role": "assistant", "content": f"answer {index}"}


def called(index: int) -> Mapping[str, object]:
    return {"role": "assistant", "content": None, "tool_calls": [CALL]}


def create(session: FakeSession, **body: Any) -> Any:
    async def ask() -> Any:
        async with Model(session) as model:
            return await model.chat.completions.create(**body)

    return asyncio.run(ask())


USER = [{"role": "user", "content": "q"}]


@pytest.mark.parametrize("answer", [said, called])
@pytest.mark.parametrize("n", [1, 3])
def test_an_answer_is_a_chat_completion(answer: Any, n: int) -> None:
    found = create(FakeSession(answer), messages=USER, n=n, model="gpt-5")
    checked = ChatCompletion.model_validate(found.model_dump())
    assert len(checked.choices) == n and checked.model == "gpt-5"
    assert found.choices[0].message.content == checked.choices[0].message.content
    assert found.choices[0].finish_reason == ("stop" if answer is said else "tool_calls")
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (7, 2 * n)
    if answer is called:
        call = found.choices[0].message.tool_calls[0]
        assert (call.function.name, call.function.arguments, call.id) == ("add", '{"a": 1}', "c1")


async def test_options_of_a_client_have_no_effect() -> None:
    session = FakeSession(said)
    model = Model(session)
    client = model.with_options(timeout=5, max_retries=0).copy(default_headers={"a": "b"})
    await client.chat.completions.create(messages=USER, temperature=1)
    assert len(session.requests) == 1 and model.overridden == {"temperature": 1}
    with pytest.raises(TypeError, match="base_url"):
        model.with_options(base_url="http://other")  # type: ignore[call-arg]


async def test_messages_go_back_as_they_came() -> None:
    session = FakeSession(called)

    model = Model(session)
    answer = await model.chat.completions.create(messages=USER)
    message = answer.choices[0].message
    chat = [*USER, message, {"role": "tool", "tool_call_id": "c1", "content": "3"}]
    await model.chat.completions.create(messages=chat)
    dumped = message.model_dump(exclude_none=True)
    await model.chat.completions.create(messages=[*USER, dumped])
    again, dumped = session.requests[1][0][1], session.requests[2][0][1]
    assert type(again) is dict and again["tool_calls"] == [CALL] == dumped["tool_calls"]
    assert "content" not in dumped and again["content"] is None


def test_content_in_parts_is_one_text() -> None:
    session = FakeSession(said)
    parts = [{"type": "text", "text": "a"}, "b"]
    create(session, messages=[{"role": "developer", "content": parts}, *USER])
    assert session.requests[0][0] == [{"role": "system", "content": "a\nb"}, *USER]


def test_arguments_reach_the_session() -> None:
    session = FakeSession(said)
    tools = [{"type": "function", "function": {"name": "add"}}]
    body: Body = {"tools": tools, "n": 2, "max_tokens": 5}
    create(session, messages=USER, **body, extra_headers={"Idempotency-Key": "k"})
    create(session, messages=USER, max_completion_tokens=4, tools=[])
    (*first, key), second = session.requests
    assert first == [USER, tools, 2, 5] and key is not None
    assert second == (USER, None, 1, 4, None)
    create(session, messages=USER, n=2.0, max_tokens=5.0)
    assert session.requests[2] == (USER, None, 2, 5, None)
    assert [type(one) for one in session.requests[2][2:4]] == [int, int]


async def test_sampling_of_the_agents_own_is_counted_and_has_no_effect() -> None:
    model = Model(FakeSession(said))
    for temperature in (0.0, 1.0):
        await model.chat.completions.create(
            messages=USER, temperature=temperature, top_p=0.9, seed=1, model="x", stop=None
        )
    assert model.overridden == {"temperature": 2, "top_p": 2, "seed": 2}


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"response_format": {"type": "xml"}}, r"response_format = .* is not supported"),
        ({"response_format": {"type": "json_schema"}}, r"response_format = .* is not supported"),
        ({"stop": [""]}, "stop has a stop that is no text or is empty"),
        ({"stop": 5}, "stop has a stop that is no text or is empty"),
        ({"functions": [{}]}, "functions is not supported"),
        ({"n": 129}, "n: 129 is not a whole number from 1 to 128"),
        ({"max_completion_tokens": 0}, "max_completion_tokens: 0 is not a whole number above 0"),
        ({"max_tokens": 5.5}, "max_tokens: 5.5 is not a whole number above 0"),
        ({"n": True}, "n: True is not a whole number"),
        ({"tools": "x"}, "tools: input should be a valid list"),
        ({"tools": [5]}, r"tools\.0\.type: input should be 'function'"),
        ({"tools": [{"type": "function"}]}, r"tools\.0\.function is missing"),
        ({"tools": [{"type": "function", "function": {}}]}, r"tools\.0\.function has no name"),
        ({"messages": []}, r"messages = '\[\]' is not a list of messages"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, r"messages\.0\.content is neither"),
        ({"messages": [{**CALLED, "tool_calls": 5}]}, r"messages\.0\.tool_calls: input should be"),
        ({"messages": [{**CALLED, "tool_calls": [5]}]}, r"messages\.0\.tool_calls\.0\.function"),
    ],
)
def test_what_a_session_cannot_follow_is_refused(body: Body, error: str) -> None:
    session = FakeSession(said)
    with pytest.raises(UnsupportedError, match=error):
        create(session, **{"messages": USER, **body})
    assert session.requests == []


@pytest.mark.parametrize("answer", [said, called])
async def test_a_stream_has_the_whole_answer(answer: Any) -> None:
    model = Model(FakeSession(answer, "length"))
    stream = await model.chat.completions.create(messages=USER, stream=True, n=2)
    found = [chunk async for chunk in stream]
    chunks = [ChatCompletionChunk.model_validate(one.model_dump()) for one in found]
    calls = 0 if answer is said else 1
    each = 2 + calls
    assert [chunk.choices[0].index for chunk in chunks] == [0] * each + [1] * each
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [
        *[None] * (each - 1),
        "length",
    ] * 2
    first, second = (chunk.choices[0].delta for chunk in chunks[:2])
    assert first.tool_calls is None
    assert second.tool_calls[0].id == "c1" if calls else first.content == "answer 0"


async def test_a_stream_has_each_tool_call_in_a_chunk_of_its_own() -> None:
    """Some libraries read only the first call of a chunk."""

    def twice(index: int) -> Mapping[str, object]:
        return {**called(index), "tool_calls": [CALL, {**CALL, "id": "c2"}]}

    model = Model(FakeSession(twice))
    stream = await model.chat.completions.create(messages=USER, stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    found = [[(call.index, call.id) for call in delta.tool_calls or ()] for delta in deltas]
    assert found == [[], [(0, "c1")], [(1, "c2")], []]


def test_a_missing_field_is_named() -> None:
    with pytest.raises(AttributeError, match="the answer has no field 'text'"):
        _ = Reply(a=1).text


async def test_streaming_code_of_users_reads_every_chunk() -> None:
    text, tokens = "", 0
    model = Model(FakeSession(said))
    stream = await model.chat.completions.create(
        messages=USER, stream=True, stream_options={"include_usage": True}
    )
    async with stream:
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                assert choice.delta.tool_calls is None
            tokens += chunk.usage.completion_tokens if chunk.usage else 0
    await stream.close()
    assert text and tokens == 2


async def test_answers_can_be_changed_as_openais_can() -> None:
    completion = await Model(FakeSession(said)).chat.completions.create(messages=USER)
    message = completion.choices[0].message
    message.content = "changed"
    assert message.model_dump(exclude={"refusal"}, exclude_none=True) == {
        "role": "assistant",
        "content": "changed",
    }
    assert completion.system_fingerprint is None
    with pytest.raises(AttributeError):
        _ = completion.no_such_field


def test_a_request_says_how_its_answer_must_be() -> None:
    class Keeps(FakeSession):
        async def chat(self, request: ChatRequest) -> list[Answer]:
            self.asked = request
            (answer,) = await super().chat(request)
            return [replace(answer, tokens=(Token(1, "a", -0.5),))]

    session = Keeps(said)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {"messages": USER, "tool_choice": "none", "logprobs": True}
    answer = create(session, stop="END", response_format=form, **body)
    assert (session.asked.stop, session.asked.schema) == (("END",), schema)
    assert not session.asked.calls and session.asked.logprobs
    (token,) = answer.choices[0].logprobs.content
    assert (token.token, token.logprob) == ("a", -0.5)
    create(session, stop=["a", "b"], response_format={"type": "json_object"}, **body)
    assert (session.asked.stop, session.asked.schema) == (("a", "b"), {"type": "object"})


async def test_a_forced_tool_call_is_overridden() -> None:
    session = FakeSession(called)
    model = Model(session)
    tools = [{"type": "function", "function": {"name": "add"}}]
    await model.chat.completions.create(messages=USER, tools=tools, tool_choice="required")
    assert model.overridden == {"tool_choice": 1}


async def test_an_idempotency_key_names_only_one_request() -> None:
    session = FakeSession(said)

    create = Model(session).chat.completions.create
    for content in ("a", "a", "b"):
        messages = [{"role": "user", "content": content}]
        await create(messages=messages, extra_headers={"Idempotency-Key": "k"})
    keys = [request[-1] for request in session.requests]
    assert keys[0] == keys[1] != keys[2] and None not in keys


def nested(ref: str) -> dict[str, Any]:
    parameters = {"$defs": {"A": {"type": "integer"}}, "properties": {"a": {"$ref": ref}}}
    return {"type": "function", "function": {"name": "add", "parameters": parameters}}


def test_tools_have_no_references() -> None:
    session = FakeSession(said)
    create = Model(session).chat.completions.create
    asyncio.run(create(messages=USER, tools=[nested("#/$defs/A")]))
    (tool,) = session.requests[0][1]
    assert tool["function"]["parameters"] == {"properties": {"a": {"type": "integer"}}}
    with pytest.raises(UnsupportedError, match="the tool 'add' refers to '#/none', which it does"):
        asyncio.run(create(messages=USER, tools=[nested("#/none")]))


async def test_strict_tools_are_as_they_are_at_a_url() -> None:
    session = FakeSession(said)
    model = Model(session)
    tool = {"type": "function", "function": {"name": "add", "strict": True}}
    await model.chat.completions.create(messages=USER, tools=[tool])
    assert session.requests[0][1] == [{"type": "function", "function": {"name": "add"}}]
    assert model.overridden == {"strict": 1}
