"""Tools, responses and messages at the endpoint, with the official clients over a fake replica that
writes given texts."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import openai
import pytest
from served_http import listening
from tools_model import ADD_TOOL, QWEN, call, tokenizer

from asyncrl.contracts.messages import (
    Details,
    GenerateRequest,
    ServedWeights,
    StreamPiece,
    Tokens,
    WeightsId,
)
from asyncrl.contracts.rows import VersionSpan
from asyncrl.serving.chat_tokenizer import ModelTokenizer
from asyncrl.serving.http import routes
from asyncrl.serving.identity import ServedModel
from asyncrl.serving.requests import HINTS, NEUTRAL, SAMPLED
from asyncrl.testing import FakeServed
from asyncrl.text.continuation import render_chat

KEY = "correct-horse-battery"
QUESTION: Any = {"role": "user", "content": "1 + 2?"}
TEXTS = ["Let me add.\n" + call(1, 2), "<think>3 is right</think>The sum is 3."]
FUNCTION: Any = ADD_TOOL["function"]
RESPONSES_TOOL: Any = {"type": "function", **FUNCTION}
MESSAGES_TOOL: Any = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": FUNCTION["parameters"],
}
WEIGHTS = {"run_id": "abc", "attempt": 1, "version": 7}


class TextServed(FakeServed):
    """Answers with the next of some texts, two tokens at a time."""

    def __init__(self, folder: Path, texts: Sequence[str], template: str = QWEN) -> None:
        self.library = tokenizer(folder, template)
        super().__init__(ServedModel("tiny", 2000, len(self.library), 12))
        self.tokenizer = ModelTokenizer(str(folder))  # type: ignore[assignment]
        self.texts = list(texts)
        self.held = ServedWeights(WeightsId("abc", 1, 7), None)

    async def stream(
        self, request: GenerateRequest, details: Details
    ) -> AsyncIterator[StreamPiece]:
        self.requests.append(request)
        text = self.texts[(len(self.requests) - 1) % len(self.texts)]
        written = text.partition(request.stop[0])[0] if request.stop else text
        ids = self.library.encode(text + "<|im_end|>", add_special_tokens=False)
        if written != text:
            ids = self.library.encode(written + request.stop[0], add_special_tokens=False)
        reason = "stop" if len(ids) <= request.max_tokens else "length"
        ids = ids[: request.max_tokens]
        shown, size = "", len(ids) if details.whole else 2
        for start in range(0, len(ids), size):
            last = start + size >= len(ids)
            so_far = self.library.decode(ids[: start + size], skip_special_tokens=True)
            so_far = written if last and reason == "stop" else so_far[: len(written)]
            new, shown = so_far[len(shown) :], so_far
            yield StreamPiece(
                self._tokens(ids[start : start + size], details, first=False),
                new,
                reason if last else None,
                (VersionSpan(7, 0, len(ids)),) if last else (),
            )
            await asyncio.sleep(0)

    def _tokens(self, ids: Sequence[int], details: Details, first: bool) -> Tokens:
        best = tuple(((token, -0.5), (5, -2.0))[: details.top] for token in ids)
        return Tokens(tuple(ids), (-0.5,) * len(ids), best if details.top else ())

    def prompt(self, number: int) -> str:
        """The text of a request's prompt."""
        return str(self.library.decode(self.requests[number].prompt_ids))


class Endpoint(NamedTuple):
    replica: TextServed
    openai: openai.OpenAI
    anthropic: anthropic.Anthropic
    address: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """One server for all tests, because starts and clients take most of their time."""
    replica = TextServed(tmp_path_factory.mktemp("endpoint") / "model", TEXTS)
    with (
        listening(routes(replica, KEY)) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client,
        anthropic.Anthropic(base_url=address, api_key=KEY, max_retries=0) as other,
    ):
        yield Endpoint(replica, client, other, address)


@pytest.fixture
def endpoint(served: Endpoint) -> Iterator[Endpoint]:
    """The endpoint of a replica that has had no request."""
    fresh = dict(vars(served.replica))
    served.replica.requests, served.replica.texts = [], list(TEXTS)
    yield served
    vars(served.replica).clear()
    vars(served.replica).update(fresh)


def rendered(replica: TextServed, messages: list[Any], tools: Any) -> str:
    return render_chat(replica.library, messages, {}, tools)


def chat_completion(client: openai.OpenAI, stream: bool, **body: Any) -> Any:
    if not stream:
        return client.chat.completions.create(**body)
    with client.chat.completions.stream(**body) as events:
        return events.get_final_completion()


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_calls_a_tool_and_reads_its_result(endpoint: Endpoint, stream: bool) -> None:
    body: dict[str, Any] = {"model": "tiny", "tools": [ADD_TOOL], "seed": 1}
    first = chat_completion(endpoint.openai, stream, messages=[QUESTION], **body).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.content == "Let me add."
    (asked,) = first.message.tool_calls
    assert asked.function.name == "add" and json.loads(asked.function.arguments) == {"a": 1, "b": 2}
    result: Any = {"role": "tool", "tool_call_id": asked.id, "content": "3"}
    chat = [QUESTION, first.message, result]
    second = chat_completion(endpoint.openai, stream, messages=chat, **body).choices[0]
    assert (second.finish_reason, second.message.content) == ("stop", "The sum is 3.")
    assert second.message.reasoning == "3 is right" and not second.message.tool_calls
    called = {"id": asked.id, "type": "function", "function": {"name": "add"}}
    called["function"]["arguments"] = '{"a": 1, "b": 2}'  # type: ignore[index]
    said = {"role": "assistant", "content": "Let me add.", "tool_calls": [called]}
    replica = endpoint.replica
    assert replica.prompt(0) == rendered(replica, [QUESTION], [ADD_TOOL])
    assert replica.prompt(1) == rendered(replica, [QUESTION, said, result], [ADD_TOOL])


def test_a_streamed_call_has_all_tokens_and_the_versions(endpoint: Endpoint) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": [QUESTION], "tools": [ADD_TOOL], "n": 2}
    endpoint.replica.texts = [TEXTS[0]]
    whole = endpoint.openai.chat.completions.create(**body, logprobs=True)
    chunks = list(endpoint.openai.chat.completions.create(**body, logprobs=True, stream=True))
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    for choice in whole.choices:
        own = [chunk for chunk in chunks if chunk.choices[0].index == choice.index]
        parts = [chunk.choices[0] for chunk in own]
        assert [t for part in parts for t in getattr(part, "token_ids", ())] == choice.token_ids
        assert parts[-1].finish_reason == "tool_calls" and parts[-1].versions == choice.versions
        assert own[-1].weights == whole.weights == WEIGHTS
        logprobs = [one for part in parts if part.logprobs for one in part.logprobs.content]
        assert logprobs == choice.logprobs.content and len(logprobs) == len(choice.token_ids)
        assert "".join(part.delta.content or "" for part in parts) == "Let me add."


def test_calls_stay_text_without_tools_or_with_none_chosen(endpoint: Endpoint) -> None:
    endpoint.replica.texts = [call(1, 2)]
    for more in ({}, {"tools": [ADD_TOOL], "tool_choice": "none"}):
        done: Any = endpoint.openai.chat.completions.create(
            model="tiny", messages=[QUESTION], **more
        )
        assert done.choices[0].message.content == call(1, 2)
        assert done.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_responses(endpoint: Endpoint, stream: bool) -> None:
    items: list[Any] = [QUESTION]
    deltas: list[list[Any]] = []

    def ask() -> Any:
        body: dict[str, Any] = {
            "model": "tiny",
            "input": items,
            "instructions": "Add.",
            "tools": [RESPONSES_TOOL],
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
        }
        if not stream:
            return endpoint.openai.responses.create(**body)
        with endpoint.openai.responses.stream(**body) as events:
            deltas[:] = [
                [one.to_dict() for one in event.logprobs]
                for event in events
                if event.type == "response.output_text.delta"
            ]
            return events.get_final_response()

    first = ask()
    message, asked = first.output
    assert [one for delta in deltas for one in delta] == (
        [one.to_dict() for one in message.content[0].logprobs] if stream else []
    )
    assert not stream or deltas[0]
    assert first.status == "completed" and message.content[0].text == "Let me add."
    assert asked.name == "add" and json.loads(asked.arguments) == {"a": 1, "b": 2}
    items += [*first.output, {"type": "function_call_output", "call_id": asked.call_id}]
    items[-1]["output"] = "3"
    second = ask()
    assert second.output_text == "The sum is 3."
    assert [item.type for item in second.output] in (
        ["reasoning", "message"],
        ["message", "reasoning"],
    )
    (text,) = [item for item in second.output if item.type == "message"]
    tokens = text.content[0].logprobs
    assert len(tokens) == second.usage.output_tokens == len(second.token_ids)
    assert [top.logprob for top in tokens[0].top_logprobs] == [-0.5, -2.0]
    assert second.weights == WEIGHTS and second.versions[0]["version"] == 7
    assert tuple(second.prompt_token_ids) == endpoint.replica.requests[1].prompt_ids
    assert "system\nAdd.<|im_end|>" in endpoint.replica.prompt(1)


def test_responses_are_not_kept(endpoint: Endpoint) -> None:
    first: Any = endpoint.openai.responses.create(model="tiny", input="q", store=True)
    assert first.store is False
    with pytest.raises(openai.NotFoundError, match="send all items"):
        endpoint.openai.responses.create(model="tiny", input="q", previous_response_id=first.id)


@pytest.mark.parametrize("stream", [False, True])
def test_messages(endpoint: Endpoint, stream: bool) -> None:
    chat: list[Any] = [QUESTION]

    def ask(**more: Any) -> Any:
        body: dict[str, Any] = {
            "model": "tiny",
            "max_tokens": 500,
            "system": "Add.",
            "messages": chat,
            "tools": [MESSAGES_TOOL],
            **more,
        }
        if not stream:
            return endpoint.anthropic.messages.create(**body)
        with endpoint.anthropic.messages.stream(**body) as events:
            return events.get_final_message()

    first = ask(extra_body={"temperature": 0.5})
    text, used = first.content
    assert first.stop_reason == "tool_use" and text.text == "Let me add."
    assert used.input == {"a": 1, "b": 2}
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "3"}
    chat += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = ask()
    assert second.stop_reason == "end_turn"
    found = {block.type: block for block in second.content}
    assert found["text"].text == "The sum is 3." and found["thinking"].thinking == "3 is right"
    requests = endpoint.replica.requests
    assert second.usage.input_tokens == len(requests[1].prompt_ids)
    assert [request.temperature for request in requests] == [0.5, 1.0]
    if not stream:
        assert second.weights == WEIGHTS
        assert tuple(second.prompt_token_ids) == requests[1].prompt_ids
        assert len(second.token_ids) == second.usage.output_tokens
    chat[:], endpoint.replica.texts = [QUESTION], ["one STOP two"]
    stopped = ask(stop_sequences=["STOP"], tools=[])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
    assert stopped.content[0].text == "one "


def test_a_stream_of_messages_names_the_weights(endpoint: Endpoint) -> None:
    body = {"model": "tiny", "max_tokens": 99, "messages": [QUESTION], "stream": True}
    headers = {"x-api-key": KEY, "Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{endpoint.address}/v1/messages", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        events = [line[6:] for line in answer.read().decode().split("\n") if line[:6] == "data: "]
    (delta,) = [one for one in map(json.loads, events) if one["type"] == "message_delta"]
    assert delta["weights"] == WEIGHTS and delta["versions"][0]["version"] == 7
    assert len(delta["token_ids"]) == delta["usage"]["output_tokens"]


def test_a_cut_answer_says_so(endpoint: Endpoint) -> None:
    endpoint.replica.texts = ["a long answer"]
    cut: Any = endpoint.anthropic.messages.create(model="tiny", max_tokens=2, messages=[QUESTION])
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 2
    response = endpoint.openai.responses.create(model="tiny", input="q", max_output_tokens=2)
    assert response.status == "incomplete"


def test_a_model_without_a_format_streams_all_text(tmp_path: Path) -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    replica = TextServed(tmp_path / "plain", ["<b>one</b> <i>two</i>"], plain)
    with (
        listening(routes(replica, None)) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        chunks = list(
            client.chat.completions.create(model="tiny", messages=[QUESTION], stream=True)
        )
    deltas = [chunk.choices[0].delta.content for chunk in chunks]
    assert "".join(map(str, deltas)) == "<b>one</b> <i>two</i>"
    assert len([delta for delta in deltas[:-1] if delta]) > 2


TOOLS = {"tools": [MESSAGES_TOOL]}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/messages", {"top_p": 0.5}, "top_p is not supported; completions are sampled"),
    ("/v1/messages", {"top_k": 5}, "top_k is not supported; completions are sampled"),
    ("/v1/messages", {"thinking": {"type": "enabled"}}, "thinking is not supported; the chat"),
    ("/v1/messages", {"tool_choice": {"type": "any"}, **TOOLS}, "tool_choice is not supported"),
    ("/v1/messages", {"weights": "x"}, "weights is unknown; leave it out"),
    ("/v1/messages", {"mcp_servers": [{}]}, "mcp_servers is not supported; connect the agent"),
    (
        "/v1/messages",
        {"output_format": {"type": "json_schema", "schema": {}}},
        "output_config: only text output is supported",
    ),
    ("/v1/responses", {"top_p": 0.5}, "top_p is not supported; completions are sampled"),
    ("/v1/responses", {"reasoning": {"effort": "low"}}, "reasoning is not supported; the chat"),
    ("/v1/responses", {"background": True}, "background is not supported; ask without it"),
    ("/v1/responses", {"truncation": "auto"}, "truncation is not supported; shorten the input"),
    ("/v1/responses", {"priority": 1}, "priority is unknown; leave it out"),
    (
        "/v1/responses",
        {"text": {"format": {"type": "json_object"}}},
        "text: only text output is supported",
    ),
    ("/v1/responses", {"input": "x" * 25_000}, "input has 25,000 characters, above the 24,000"),
    (
        "/v1/responses",
        {"top_logprobs": 2},
        "top_logprobs: only valid with include: ['message.output_text.logprobs']; remove it, or set"
        " include",
    ),
    ("/v1/responses", {"text": {"verbosity": "low"}}, "text.verbosity is not supported; leave it"),
    ("/v1/chat/completions", {"tools": [ADD_TOOL], "parallel_tool_calls": False}, "parallel_tool"),
    ("/v1/chat/completions", {"chat_template": "{{ 1 }}"}, "chat_template is unknown"),
]
"""Bodies that the session server would take, or that vLLM's own server would."""


@pytest.mark.parametrize(("path", "more", "words"), REFUSED)
def test_what_would_have_no_effect_is_refused(
    endpoint: Endpoint, path: str, more: dict[str, Any], words: str
) -> None:
    text = {"input": "q"} if path == "/v1/responses" else {"messages": [QUESTION]}
    status, error = post(endpoint.address, path, {"model": "tiny", **text, **more})
    assert status == 400 and words in error["error"]["message"]
    assert "\n" not in error["error"]["message"] and endpoint.replica.requests == []
    assert ("type" in error) == (path == "/v1/messages")


TEXT = {"type": "text", "text": "q"}
CALL: Any = {"name": "add", "id": "c"}
USE = {"type": "tool_use", "input": {}, **CALL}
RESULT = {"type": "tool_result", "tool_use_id": "c"}
CALLED = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
NESTED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/responses", {"input": [{**QUESTION, "a": 1}]}, "input.0.a"),
    (
        "/v1/responses",
        {"input": [QUESTION, {"role": "user", "content": [{**TEXT, "role": "a"}]}]},
        "input.1.content.0.role",
    ),
    ("/v1/responses", {"input": [{**CALLED, "namespace": "a"}]}, "input.0.namespace"),
    (
        "/v1/responses",
        {"input": [{"type": "reasoning", "encrypted_content": "a", "summary": []}]},
        "input.0.encrypted_content",
    ),
    (
        "/v1/responses",
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [{**TEXT, "a": 1}]}]},
        "input.0.output.0.a",
    ),
    ("/v1/responses", {"tools": [{**RESPONSES_TOOL, "a": 1}]}, "tools.0.a"),
    ("/v1/responses", {"text": {"format": {"type": "text", "a": 1}}}, "text.format.a"),
    ("/v1/responses", {"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    ("/v1/messages", {"messages": [{**QUESTION, "name": "a"}]}, "messages.0.name"),
    ("/v1/messages", {"system": [{**TEXT, "a": 1}]}, "system.0.a"),
    ("/v1/messages", {"tools": [{**MESSAGES_TOOL, "input_examples": [{}]}]}, "tools.0.input_"),
    ("/v1/messages", {"tool_choice": {"type": "auto", "a": 1}}, "tool_choice.a"),
    ("/v1/messages", {"output_config": {"task_budget": {}}}, "output_config.task_budget"),
    *(
        ("/v1/messages", {"messages": [{"role": role, "content": [block]}, QUESTION]}, name)
        for role, block, name in (
            ("user", {**TEXT, "citations": [{}]}, "messages.0.content.0.citations"),
            ("assistant", {**USE, "toolset_name": "a"}, "messages.0.content.0.toolset_name"),
            ("assistant", {"type": "thinking", "text": "a"}, "messages.0.content.0.text"),
            ("user", {**RESULT, "content": [{**TEXT, "a": 1}]}, "messages.0.content.0.content.0.a"),
        )
    ),
    ("/v1/chat/completions", {"tools": [{**ADD_TOOL, "a": 1}]}, "tools.0.a"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{**TEXT, "a": 1}]}]},
        "messages.0.content.0.a",
    ),
]


@pytest.mark.parametrize(("path", "more", "name"), NESTED, ids=[one[2] for one in NESTED])
def test_unknown_fields_inside_others_are_refused_by_their_path(
    endpoint: Endpoint, path: str, more: dict[str, Any], name: str
) -> None:
    text = {"input": "q"} if path == "/v1/responses" else {"messages": [QUESTION]}
    status, error = post(endpoint.address, path, {"model": "tiny", **text, **more})
    assert status == 400 and error["error"]["message"].startswith(name)
    assert error["error"]["message"].endswith(" is unknown; leave it out")


MESSAGE_ITEM = {"type": "message", "role": "assistant", "id": "m", "phase": "commentary"}
CACHED = {"cache_control": {"type": "ephemeral"}}
HARMLESS: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/responses",
        {
            "input": [
                {"type": "message", "status": "completed", **QUESTION},
                {"type": "reasoning", "id": "r", "status": "completed", "summary": []},
                {
                    **MESSAGE_ITEM,
                    "content": [
                        {"type": "output_text", "text": "a", "annotations": [{}], "logprobs": [{}]}
                    ],
                },
                {**CALLED, "id": "f", "status": "completed", "caller": {"type": "direct"}},
                {"type": "function_call_output", "call_id": "c", "output": "3", "id": None},
                {
                    "role": "user",
                    "content": [{**TEXT, "prompt_cache_breakpoint": {"mode": "explicit"}}],
                },
            ],
            "tools": [{**RESPONSES_TOOL, "strict": None, "defer_loading": False}],
        },
    ),
    (
        "/v1/messages",
        {
            "system": [{**TEXT, **CACHED}],
            "messages": [
                QUESTION,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "a", "signature": "b"},
                        {**TEXT, "citations": None},
                        {**USE, **CACHED, "caller": {"type": "direct"}},
                    ],
                },
                {"role": "user", "content": [{**RESULT, "content": "3", "is_error": True}]},
            ],
            "tools": [{**MESSAGES_TOOL, **CACHED, "allowed_callers": ["direct"]}],
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), HARMLESS)
def test_nested_fields_that_ask_for_nothing_are_accepted(
    endpoint: Endpoint, path: str, body: dict[str, Any]
) -> None:
    assert post(endpoint.address, path, {"model": "tiny", **body})[0] == 200


TEXTS_OF = {
    "/v1/completions": {"prompt": "q"},
    "/v1/chat/completions": {"messages": [QUESTION]},
    "/v1/responses": {"input": "q"},
    "/v1/messages": {"messages": [QUESTION]},
}


@pytest.mark.parametrize("path", TEXTS_OF)
def test_null_is_the_same_as_an_absent_field(endpoint: Endpoint, path: str) -> None:
    body = {"model": "tiny", **TEXTS_OF[path]}
    names = {*SAMPLED, *NEUTRAL, *HINTS, "n", "stop", "max_tokens", "stream", "stream_options"}
    assert post(endpoint.address, path, {**body, **dict.fromkeys(names)})[0] == 200
    assert post(endpoint.address, path, body)[0] == 200
    first, second = endpoint.replica.requests
    assert first == second and (first.temperature, first.seed) == (1.0, None)


def post(address: str, path: str, body: Any, key: str = KEY) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}{path}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


HALF = '{"a": "\\ud800"}'


def test_text_that_no_tokenizer_reads_is_refused(endpoint: Endpoint) -> None:
    """JSON in the arguments of a call can hide half of a surrogate pair."""
    called = {"id": "c", "type": "function", "function": {"name": "add", "arguments": HALF}}
    chat = [QUESTION, {"role": "assistant", "tool_calls": [called]}, QUESTION]
    status, error = post(
        endpoint.address, "/v1/chat/completions", {"model": "tiny", "messages": chat}
    )
    assert status == 400 and "the messages are no text" in error["error"]["message"]


def test_a_nested_schema_does_not_end_the_server(endpoint: Endpoint) -> None:
    schema: Any = {}
    for _ in range(400):
        schema = {"type": "object", "properties": {"a": schema}}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    body = {"model": "tiny", "messages": [QUESTION], "tools": [tool]}
    assert post(endpoint.address, "/v1/chat/completions", body)[0] in (200, 400)
    assert post(endpoint.address, "/v1/chat/completions", {**body, "tools": []})[0] == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_the_key_is_checked_in_the_form_of_the_api(endpoint: Endpoint, path: str) -> None:
    status, error = post(endpoint.address, path, {}, key="wrong")
    assert status == 401 and error["error"]["code"] == "invalid_api_key"
    assert ("type" in error) == (path == "/v1/messages")
    with pytest.raises(anthropic.AuthenticationError):
        endpoint.anthropic.with_options(api_key="wrong").models.list()
    assert [model.id for model in endpoint.anthropic.models.list()] == ["tiny"]
