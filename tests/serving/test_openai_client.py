"""The official `openai` client, used as in its documentation, against the routes over a fake
replica."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from prometheus_client.parser import text_string_to_metric_families
from served_http import listening

from asyncrl.api.chat import Chat
from asyncrl.contracts.errors import StaleReplicaError
from asyncrl.contracts.messages import Details, GenerateRequest, ServedWeights, WeightsId
from asyncrl.serving.http import routes
from asyncrl.serving.identity import ServedModel
from asyncrl.serving.metrics import Traffic, TrafficCounter
from asyncrl.testing import FakeServed

EXPOSED = (
    "completions_aborted_total",
    "http_request_seconds",
    "http_requests_total",
    "kv_cache_tokens",
    "kv_use",
    "max_model_len",
    "preemptions_total",
    "tokens_generated_total",
    "update_fetch_seconds",
    "update_pause_seconds",
    "waiting",
    "weights_info",
    "weights_version",
)
"""Prometheus metrics that dashboards rely on."""
KEY = "correct-horse-battery"
MODEL = ServedModel("tiny", max_model_len=256, vocabulary=128, longest_token=4)
WHO = {"role": "user", "content": "Say this is a test"}


class Endpoint(NamedTuple):
    replica: FakeServed
    client: OpenAI
    address: str


@contextlib.contextmanager
def serving() -> Iterator[Endpoint]:
    replica = FakeServed(MODEL)
    with (
        listening(routes(replica, KEY)) as address,
        OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client,
    ):
        yield Endpoint(replica, client, address)


@pytest.fixture(scope="module")
def served() -> Iterator[Endpoint]:
    """One server for most tests, because starts and clients take most of their time."""
    with serving() as endpoint:
        yield endpoint


@pytest.fixture
def endpoint(served: Endpoint) -> Endpoint:
    """The endpoint of a replica that has had no request. The server counts those of all tests."""
    vars(served.replica).clear()
    vars(served.replica).update(vars(FakeServed(MODEL)))
    return served


def test_chat_as_in_the_clients_readme(endpoint: Endpoint) -> None:
    endpoint.replica.held = ServedWeights(WeightsId("abc", 1, 7), None)
    messages: Any = [
        {"role": "developer", "content": "Talk like a pirate."},
        {"role": "user", "content": "How do I check?"},
    ]
    completion = endpoint.client.chat.completions.create(
        model="tiny", messages=messages, n=2, seed=5, max_completion_tokens=20
    )
    assert (
        completion.object == "chat.completion"
        and completion.id.startswith("chatcmpl-")
        and completion.model == "tiny"
    )
    assert [choice.index for choice in completion.choices] == [0, 1]
    prompt = "s:Talk like a pirate.;u:How do I check?;a:"
    for choice, request in zip(completion.choices, endpoint.replica.requests, strict=True):
        assert (
            choice.message.role == "assistant"
            and choice.logprobs is None
            and choice.finish_reason in ("stop", "length")
        )
        assert choice.message.content == "".join(map(chr, choice.token_ids)) and choice.versions[0][
            "end"
        ] == len(choice.token_ids)
        assert (
            request.prompt_ids == tuple(map(ord, prompt)) == tuple(completion.prompt_token_ids)
            and request.max_tokens == 20
        )
    assert [request.seed for request in endpoint.replica.requests] == [5, 6]
    assert completion.usage.prompt_tokens == len(prompt)
    assert completion.usage.completion_tokens == sum(
        len(choice.token_ids) for choice in completion.choices
    )
    assert (
        completion.serving == "serving version 7 of run abc, attempt 1, the last of an ended lease"
    )


def test_an_answer_can_be_sent_back_as_a_message(endpoint: Endpoint) -> None:
    """Multi-turn examples send the client's own message object, which has fields that are null."""
    create = endpoint.client.chat.completions.create
    answer = create(model="tiny", messages=[WHO], max_tokens=4, seed=1).choices[0].message
    create(
        model="tiny",
        messages=[
            WHO,
            answer,
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
        ],
        max_tokens=4,
    )
    assert endpoint.replica.requests[1].prompt_ids == tuple(
        map(ord, f"u:Say this is a test;a:{answer.content};u:a\nb;a:")
    )


def test_a_chat_without_a_limit_may_fill_the_context(endpoint: Endpoint) -> None:
    endpoint.client.chat.completions.create(model="tiny", messages=[WHO], temperature=0)
    (request,) = endpoint.replica.requests
    assert len(request.prompt_ids) + request.max_tokens == MODEL.max_model_len


def test_a_streamed_chat_equals_the_whole_answer(endpoint: Endpoint) -> None:
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [WHO],
        "n": 3,
        "seed": 9,
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = endpoint.client.chat.completions.create(**body)
    chunks = list(
        endpoint.client.chat.completions.create(
            **body, stream=True, stream_options={"include_usage": True}
        )
    )
    assert all(
        chunk.object == "chat.completion.chunk" and chunk.id == chunks[0].id for chunk in chunks
    )
    assert (
        chunks[-1].choices == []
        and chunks[-1].usage == whole.usage
        and all(chunk.usage is None for chunk in chunks[:-1])
    )
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    for choice in whole.choices:
        own = [chunk for chunk in chunks[:-1] if chunk.choices[0].index == choice.index]
        parts = [chunk.choices[0] for chunk in own]
        assert [part.delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert "".join(part.delta.content for part in parts) == choice.message.content
        assert [token for part in parts for token in part.token_ids] == choice.token_ids
        assert [
            token for part in parts for token in part.logprobs.content
        ] == choice.logprobs.content
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [
            choice.finish_reason
        ]
        assert parts[-1].versions == choice.versions and own[-1].serving == whole.serving
    assert len(chunks) > 4, "the answer did not arrive in pieces"


def test_logprobs_of_chats(endpoint: Endpoint) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": [WHO], "seed": 2, "max_tokens": 6}
    choice = endpoint.client.chat.completions.create(**body, logprobs=True, top_logprobs=2).choices[
        0
    ]
    for token, written in zip(choice.token_ids, choice.logprobs.content, strict=True):
        assert (written.token, written.bytes, written.logprob) == (
            chr(token),
            list(chr(token).encode()),
            -token / 100,
        )
        assert [(top.token, top.logprob) for top in written.top_logprobs] == [
            ("\x03", -0.03),
            ("\x04", -0.04),
        ]
    alone = endpoint.client.chat.completions.create(**body, logprobs=True).choices[0]
    assert [token.top_logprobs for token in alone.logprobs.content] == [[]] * len(alone.token_ids)


def test_completions_as_in_the_documentation(endpoint: Endpoint) -> None:
    completion = endpoint.client.completions.create(
        model="tiny", prompt="Say this is a test", max_tokens=7, temperature=0
    )
    assert completion.object == "text_completion" and completion.choices[0].text == "".join(
        map(chr, completion.choices[0].token_ids)
    )
    assert completion.choices[0].logprobs.token_logprobs == [
        -token / 100 for token in completion.choices[0].token_ids
    ]


@pytest.mark.parametrize(
    "prompts", [["ab", "cde"], [[97, 98], [99, 100, 101]]], ids=["texts", "tokens"]
)
def test_a_list_of_prompts(endpoint: Endpoint, prompts: Any) -> None:
    completion = endpoint.client.completions.create(
        model="tiny", prompt=prompts, n=2, seed=3, max_tokens=5
    )
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    prompts_and_seeds = [
        (request.prompt_ids, request.seed) for request in endpoint.replica.requests
    ]
    assert prompts_and_seeds == [
        ((97, 98), 3),
        ((97, 98), 4),
        ((99, 100, 101), 3),
        ((99, 100, 101), 4),
    ]
    assert completion.usage.prompt_tokens == 5
    for choice, request in zip(completion.choices, endpoint.replica.requests, strict=True):
        assert tuple(choice.token_ids) == endpoint.replica._completion(request, 0).token_ids


def test_echo_and_logprobs(endpoint: Endpoint) -> None:
    """Evaluation harnesses score texts this way, by the tokens of prompt and completion."""
    choice = endpoint.client.completions.create(
        model="tiny", prompt=[[97, 98]], max_tokens=2, echo=True, logprobs=1, temperature=0, seed=1
    ).choices[0]
    tokens = [97, 98, *choice.token_ids]
    assert choice.text == "".join(map(chr, tokens)) and choice.logprobs.tokens == [
        chr(token) for token in tokens
    ]
    assert choice.logprobs.token_logprobs == [None, *(-token / 100 for token in tokens[1:])]
    assert choice.logprobs.text_offset == list(range(len(tokens)))
    assert choice.logprobs.top_logprobs == [
        None,
        *({"\x03": -0.03, chr(token): -token / 100} for token in tokens[1:]),
    ]
    alone = endpoint.client.completions.create(
        model="tiny", prompt="ab", max_tokens=0, echo=True, logprobs=0
    ).choices[0]
    assert (alone.text, alone.logprobs.token_logprobs, alone.logprobs.top_logprobs) == (
        "ab",
        [None, -0.98],
        None,
    )
    plain = endpoint.client.completions.create(
        model="tiny", prompt=[97], max_tokens=2, echo=True, n=2, seed=1
    )
    assert [one.text[0] for one in plain.choices] == ["a", "a"]


def test_streamed_completions_equal_the_whole_answer(endpoint: Endpoint) -> None:
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": ["ab", "cd"],
        "n": 2,
        "seed": 4,
        "max_tokens": 9,
        "echo": True,
        "logprobs": 2,
    }
    whole = endpoint.client.completions.create(**body)
    chunks = list(endpoint.client.completions.create(**body, stream=True))
    for choice in whole.choices:
        parts = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [one for part in parts for one in getattr(part.logprobs, name)] == getattr(
                choice.logprobs, name
            ), name
        assert (
            parts[-1].finish_reason == choice.finish_reason
            and parts[-1].versions == choice.versions
        )


async def test_the_async_client_and_its_stream_helper(endpoint: Endpoint) -> None:
    whole = endpoint.client.chat.completions.create(
        model="tiny", messages=[WHO], max_tokens=6, seed=1
    )
    async with AsyncOpenAI(base_url=f"{endpoint.address}/v1", api_key=KEY) as client:
        async with client.chat.completions.stream(
            model="tiny", messages=[WHO], max_tokens=6, seed=1
        ) as stream:  # type: ignore[list-item]
            deltas = [event.delta async for event in stream if event.type == "content.delta"]
        final = (await stream.get_final_completion()).choices[0].message.content
        assert "".join(deltas) == final
    assert final == whole.choices[0].message.content


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"model": "other"}, openai.NotFoundError, "use 'tiny'"),
        ({"messages": []}, openai.BadRequestError, "messages: "),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            openai.BadRequestError,
            "messages.0.tool_calls.0.function is missing; set it",
        ),
        (
            {"messages": [{"role": "function", "name": "f", "content": "x"}]},
            openai.BadRequestError,
            "messages.0.role: input should be 'system', 'developer', 'user', 'assistant' or 'tool'",
        ),
        (
            {"messages": [{**WHO, "name": 5}]},
            openai.BadRequestError,
            "messages.0.name is no string",
        ),
        ({"messages": ["x"]}, openai.BadRequestError, "messages.0: send an object"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            openai.BadRequestError,
            "messages.0.content.0 has the type 'image_url'; the model reads text only",
        ),
        (
            {"messages": [{**WHO, "weights": {}}]},
            openai.BadRequestError,
            "messages.0.weights is unknown; leave it out",
        ),
        ({"messages": [{"role": "user"}]}, openai.BadRequestError, "messages.0.content is missing"),
        (
            {"messages": [WHO, WHO]},
            openai.BadRequestError,
            "the chat template of 'tiny' refuses the messages (roles must alternate)",
        ),
        (
            {"messages": [{"role": "user", "content": "x" * 1025}]},
            openai.BadRequestError,
            "messages has 1,025 characters, above the 1,024",
        ),
        (
            {"messages": [WHO] * 257},
            openai.BadRequestError,
            "messages has 257 messages, above the 256 tokens",
        ),
        (
            {"messages": [{"role": "user", "content": "x" * 300}]},
            openai.BadRequestError,
            "messages of 305 tokens leaves no room in the 256",
        ),
        ({"max_tokens": 250}, openai.BadRequestError, "shorten one"),
        (
            {"tools": [{"type": "web_search"}]},
            openai.BadRequestError,
            "tools.0.type: input should be 'function'",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            openai.BadRequestError,
            "strict is not supported; the model decides how it calls tools",
        ),
        (
            {"tool_choice": "required"},
            openai.BadRequestError,
            "tool_choice is not supported; a forced tool call",
        ),
        (
            {"response_format": {"type": "json_object"}},
            openai.BadRequestError,
            "only text output is supported",
        ),
        ({"top_logprobs": 3}, openai.BadRequestError, "only valid with logprobs: true"),
        (
            {"logprobs": True, "top_logprobs": 21},
            openai.BadRequestError,
            "less than or equal to 20",
        ),
        ({"logprobs": 3}, openai.BadRequestError, "logprobs: input should be a valid boolean"),
        ({"top_p": 0.5}, openai.BadRequestError, "use temperature"),
        (
            {"extra_body": {"chat_template": "{{ 1 }}"}},
            openai.BadRequestError,
            "chat_template is unknown",
        ),
        (
            {"extra_body": {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}},
            openai.BadRequestError,
            "chat_template is not a variable",
        ),
        (
            {"extra_body": {"chat_template_kwargs": {"a": ["x"]}}},
            openai.BadRequestError,
            "chat_template_kwargs: ",
        ),
        ({"extra_body": {"prompt": "a"}}, openai.BadRequestError, "prompt is unknown"),
    ],
    ids=lambda value: "",
)
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_chats_are_refused(
    endpoint: Endpoint,
    change: dict[str, Any],
    kind: type[Exception],
    words: str,
    stream: bool,
) -> None:
    with pytest.raises(kind) as refused:
        endpoint.client.chat.completions.create(
            **{"model": "tiny", "messages": [WHO], "max_tokens": 4, "stream": stream, **change}
        )
    assert words in str(refused.value) and endpoint.replica.requests == []


def test_chats_accept_fields_without_effect(endpoint: Endpoint) -> None:
    neutral: dict[str, Any] = {
        "frequency_penalty": 0,
        "logit_bias": None,
        "logprobs": None,
        "metadata": {"run": "one"},
        "parallel_tool_calls": True,
        "presence_penalty": 0,
    }
    neutral |= {
        "response_format": {"type": "text"},
        "service_tier": "flex",
        "store": True,
        "stop": None,
        "tool_choice": "none",
        "tools": None,
        "top_p": 1,
    }
    neutral |= {
        "user": "me",
        "safety_identifier": "me",
        "modalities": ["text"],
        "stream": None,
        "seed": None,
        "stream_options": None,
        "max_tokens": None,
    }
    endpoint.client.chat.completions.create(
        model="tiny", messages=[WHO], max_completion_tokens=4, **neutral
    )
    endpoint.client.chat.completions.create(model="tiny", messages=[WHO], max_tokens=4)
    raw = {"max_tokens": 4.0, "n": 1.0, "top_logprobs": 0.0, "stream_options": {}}
    endpoint.client.chat.completions.create(model="tiny", messages=[WHO], extra_body=raw)
    first, *others = endpoint.replica.requests
    assert others == [first, first]


def test_chats_take_messages_as_clients_keep_them(endpoint: Endpoint) -> None:
    create = endpoint.client.chat.completions.create
    plain = [WHO, {"role": "assistant", "content": ""}, WHO]
    for answer in (
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None},
        {"role": "assistant"},
        {"role": "assistant", "content": [], "name": "bot", "reasoning": "hm"},
        {"role": "assistant", "content": None, "cache_control": {"type": "ephemeral"}},
    ):
        create(model="tiny", messages=[WHO, answer, {**WHO, "name": "me"}], max_tokens=4)
    create(model="tiny", messages=plain, max_tokens=4)
    assert all(one == endpoint.replica.requests[0] for one in endpoint.replica.requests)


def test_a_template_gets_the_name_of_a_message() -> None:
    body = {"model": "tiny", "messages": [{**WHO, "name": "me", "reasoning_content": "hm"}]}
    chat = Chat(body, {})
    assert chat.request.messages == [{**WHO, "name": "me", "reasoning_content": "hm"}]


def test_a_failure_before_the_first_piece_has_a_status_code(endpoint: Endpoint) -> None:
    endpoint.replica.failure = StaleReplicaError("at 3")
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="no replica can answer now") as failed:
            endpoint.client.chat.completions.create(model="tiny", messages=[WHO], stream=stream)
        assert failed.value.status_code == 503


@pytest.mark.parametrize(
    "failure", [StaleReplicaError("at 3"), ValueError("secret inside")], ids=str
)
def test_a_failure_in_a_stream_is_the_last_event(endpoint: Endpoint, failure: Exception) -> None:
    endpoint.replica.failure, endpoint.replica.fails_after = failure, 2
    for create in (
        lambda: endpoint.client.chat.completions.create(
            model="tiny", messages=[WHO], seed=1, stream=True
        ),
        lambda: endpoint.client.completions.create(
            model="tiny", prompt="a", max_tokens=90, seed=1, stream=True
        ),
    ):
        pieces = []
        with pytest.raises(openai.APIError) as failed:
            pieces.extend(create())
        message = json.dumps(failed.value.body)
        assert (
            "no replica" if isinstance(failure, StaleReplicaError) else "the server failed"
        ) in message and "secret" not in message
    sent = raw(
        endpoint, {"model": "tiny", "prompt": "a", "max_tokens": 90, "seed": 1, "stream": True}
    )
    assert (
        sent.count("data: ") == 3
        and sent.rstrip().rpartition("data: ")[2].startswith('{"error"')
        and "[DONE]" not in sent
    )


def raw(endpoint: Endpoint, body: dict[str, Any]) -> str:
    """The raw text of a stream."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{endpoint.address}/v1/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert (
            answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            and answer.headers["content-length"] is None
        )
        return str(answer.read().decode())


def test_model_text_cannot_forge_an_event(endpoint: Endpoint) -> None:
    """Line ends in a text are escaped in the JSON of their event."""
    sent = raw(
        endpoint,
        {
            "model": "tiny",
            "prompt": "data: x\n\ndata: [DONE]\n\n\r\u2028",
            "max_tokens": 1,
            "echo": True,
            "stream": True,
        },
    )
    assert [line[:7] for line in sent.split("\n\n")] == ["data: {", "data: [", ""]


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completions"])
def test_closing_a_stream_ends_all_its_generations(endpoint: Endpoint, chat: bool) -> None:
    ended, running = threading.Semaphore(0), endpoint.replica.stream

    async def endless(request: GenerateRequest, details: Details) -> Any:
        try:
            async for piece in running(request, details):
                yield piece
                await asyncio.Event().wait()
        finally:
            ended.release()

    endpoint.replica.stream = endless
    body: dict[str, Any] = {"model": "tiny", "n": 3, "seed": 1, "max_tokens": 90, "stream": True}
    create = endpoint.client.chat.completions.create if chat else endpoint.client.completions.create
    stream = create(**body, **({"messages": [WHO]} if chat else {"prompt": "a"}))
    assert next(iter(stream)).choices
    stream.close()
    assert all(ended.acquire(timeout=30) for _ in range(3))


@pytest.fixture
def own_endpoint() -> Iterator[Endpoint]:
    with serving() as endpoint:
        yield endpoint


def test_metrics_have_prometheus_text_format(own_endpoint: Endpoint) -> None:
    endpoint = own_endpoint
    endpoint.client.completions.create(model="tiny", prompt="a")
    with pytest.raises(openai.NotFoundError):
        endpoint.client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        endpoint.client.with_options(api_key="wrong").models.list()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{endpoint.address}/metrics", timeout=30)
    endpoint.replica.held = ServedWeights(WeightsId("abc", 1, 7), None)
    request = urllib.request.Request(
        f"{endpoint.address}/metrics", headers={"Authorization": f"Bearer {KEY}"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=")
        text = answer.read().decode()
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")}
    assert names == {f"asyncrl_generator_{name}" for name in EXPOSED}
    samples = {
        (one.name, *sorted(one.labels.items())): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }
    replica = ("replica", "fake")
    assert (
        samples["asyncrl_generator_tokens_generated_total", replica] == 12
        and samples["asyncrl_generator_kv_use", replica] == 0.5
    )
    assert (
        samples["asyncrl_generator_weights_version", replica] == 7
        and samples["asyncrl_generator_update_pause_seconds", replica] == 0.04
    )
    info = (
        "asyncrl_generator_weights_info",
        ("attempt", "1"),
        ("model", "tiny"),
        replica,
        ("run_id", "abc"),
    )
    assert samples[info] == 1
    counts = {
        key[1:]: value
        for key, value in samples.items()
        if key[0] == "asyncrl_generator_http_requests_total"
    }
    expected = {
        ("/v1/completions", 200): 1,
        ("/v1/completions", 404): 1,
        ("/v1/models", 401): 1,
        ("/metrics", 401): 1,
    }
    assert counts == {
        (("path", path), replica, ("status", str(status))): times
        for (path, status), times in expected.items()
    }
    assert (
        samples[
            "asyncrl_generator_http_request_seconds_count", ("path", "/v1/completions"), replica
        ]
        == 2
    )


async def test_paths_are_counted_without_the_prefix_and_unknown_ones_together() -> None:
    """Serve puts an application's route_prefix before its paths. With a label for each unknown
    path, clients could fill Prometheus."""
    traffic = Traffic()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None: ...

    counted = TrafficCounter(app, traffic, ["/health"])
    for path in ("/gen/health", "/gen/x", "/gen/y"):
        await counted({"type": "http", "path": path, "root_path": "/gen"}, None, send)
    assert traffic.requests == {("/health", 200): 1, ("other", 200): 2}


def test_models_through_the_client(endpoint: Endpoint) -> None:
    assert [model.id for model in endpoint.client.models.list()] == ["tiny"]
