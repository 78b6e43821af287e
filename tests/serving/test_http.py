"""The HTTP routes over a fake replica: their answers, their errors, and that no others exist."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from typing import Any

import pytest
from asgi import call, scope_of
from fake_actors import replica_context

from asyncrl.api.http import parsed
from asyncrl.contracts.errors import GenerationTimeoutError, InvalidRequestError, StaleReplicaError
from asyncrl.contracts.messages import ServedWeights, WeightsId
from asyncrl.serving.http import (
    LARGEST_BODY,
    PATHS,
    api_key,
    close_own_routes,
    is_loopback,
    refuse_open_host,
    routes,
)
from asyncrl.serving.identity import ServedModel
from asyncrl.serving.requests import Asked
from asyncrl.testing import FakeServed
from asyncrl.web.errors import ApiError

KEY = "correct-horse-battery"
MODEL = ServedModel("tiny", max_model_len=64, vocabulary=200, longest_token=4)
BODY = {"model": "tiny", "prompt": [5, 6, 14], "max_tokens": 8, "seed": 1}


def served() -> FakeServed:
    return FakeServed(MODEL)


def ask(
    app: Any,
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    raw: bytes | None = None,
) -> tuple[int, Any, dict[str, str]]:
    """Status, JSON body and headers of one request, through the ASGI interface."""
    content = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
    given = {"host": "127.0.0.1:8000", "content-type": "application/json", **(headers or {})}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (name.encode(), value.encode("latin-1"))
            for name, value in given.items()
            if value is not None
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    sent: list[dict[str, Any]] = []

    parts = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return parts.pop() if parts else await asyncio.Event().wait()  # the client stays

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def answered() -> None:
        try:
            await app(scope, receive, send)
        except Exception:
            if not sent:  # FastAPI answers an error, then raises it for the server's log
                raise

    asyncio.run(answered())
    text = b"".join(message.get("body", b"") for message in sent[1:])
    return (
        sent[0]["status"],
        json.loads(text),
        {name.decode(): value.decode() for name, value in sent[0]["headers"]},
    )


def test_a_completion_has_token_ids_logprobs_and_weights() -> None:
    replica = served()
    replica.version = 7
    replica.held = ServedWeights(WeightsId("abc", 1, 7), "run 'first'")
    status, answer, _ = ask(
        routes(replica, None),
        "POST",
        "/v1/completions",
        {**BODY, "n": 3, "temperature": 0.5, "stop": ["\n", "."]},
    )
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice in answer["choices"]:
        tokens = len(choice["token_ids"])
        assert (
            tokens == len(choice["logprobs"]["token_logprobs"]) > 0
            and len(choice["text"]) == tokens
        )
        assert choice["finish_reason"] == ("length" if tokens == 8 else "stop")
        assert choice["versions"] == [{"version": 7, "start": 0, "end": tokens}]
    made = sum(len(choice["token_ids"]) for choice in answer["choices"])
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": made,
        "total_tokens": 3 + made,
    }
    assert (
        answer["weights"] == {"run_id": "abc", "attempt": 1, "version": 7}
        and answer["lease"] == "run 'first'"
    )
    for seed, request in enumerate(replica.requests, 1):
        assert (
            request.prompt_ids,
            request.n,
            request.max_tokens,
            request.temperature,
            request.seed,
        ) == ((5, 6, 14), 1, 8, 0.5, seed)
        assert request.stop == ("\n", ".") and request.min_weights is None
    assert len(replica.requests) == 3


def test_a_text_prompt_is_encoded() -> None:
    replica = served()
    assert (
        ask(
            routes(replica, None),
            "POST",
            "/v1/completions",
            {"model": "tiny", "prompt": "ab", "stop": "x"},
        )[0]
        == 200
    )
    assert (
        replica.requests[0].prompt_ids,
        replica.requests[0].stop,
        replica.requests[0].max_tokens,
    ) == ((97, 98), ("x",), 16)


def test_models_and_health_describe_the_weights() -> None:
    replica, words = served(), []
    last = WeightsId("abc", 1, 7)
    for held in (
        ServedWeights(None, None),
        ServedWeights(None, "run 'first'"),
        ServedWeights(last, "run 'first'"),
        ServedWeights(last, None),
    ):
        replica.held = held
        (model,) = ask(routes(replica, None), "GET", "/v1/models")[1]["data"]
        status, health, _ = ask(routes(replica, None), "GET", "/health")
        assert status == 200 and health["status"] == "ok" and health["serving"] == model["serving"]
        assert (model["id"], model["max_model_len"], model["lease"]) == ("tiny", 64, held.lease)
        words.append(model["serving"])
    assert words == [
        "serving the checkpoint's own weights; no lease",
        "serving the checkpoint's own weights; leased by run 'first'",
        "serving version 7 of run abc, attempt 1; leased by run 'first'",
        "serving version 7 of run abc, attempt 1, the last of an ended lease",
    ]


@pytest.mark.parametrize(
    ("change", "status", "code", "text"),
    [
        ({"model": "other"}, 404, "model_not_found", "use 'tiny'"),
        (
            {"prompt": list(range(60))},
            400,
            "context_length_exceeded",
            "prompt of 60 tokens and max_tokens 8 exceed the 64",
        ),
        ({"prompt": "x" * 60}, 400, "context_length_exceeded", "shorten one"),
        (
            {"prompt": "x" * 257},
            400,
            "context_length_exceeded",
            "257 characters, above the 256 that 64 tokens of 'tiny' can represent",
        ),
        ({"prompt": [5] * 64}, 400, "context_length_exceeded", "leaves no room in the 64"),
        ({"n": 2, "temperature": 0}, 400, "invalid_value", "temperature 0 gives only one answer"),
        ({"temperature": 2.1}, 400, "invalid_value", "temperature: "),
        ({"prompt": []}, 400, "invalid_value", "prompt is empty"),
        ({"prompt": ""}, 400, "invalid_value", "prompt is empty"),
        ({"prompt": [5, 200]}, 400, "invalid_value", "outside 0 to 199"),
        ({"prompt": [-1]}, 400, "invalid_value", "outside 0 to 199"),
        ({"prompt": [True]}, 400, "invalid_value", "prompt"),
        (
            {"prompt": [[5], "a"]},
            400,
            "invalid_value",
            "prompt: send a string, a list of token ids, or a list of such prompts",
        ),
        ({"prompt": [[5], [200]]}, 400, "invalid_value", "outside 0 to 199"),
        ({"prompt": [[5], []]}, 400, "invalid_value", "prompt is empty"),
        ({"prompt": ["a", ""]}, 400, "invalid_value", "prompt is empty"),
        ({"prompt": ["a", "x" * 257]}, 400, "context_length_exceeded", "257 characters"),
        ({"prompt": [[5], [5] * 64]}, 400, "context_length_exceeded", "leaves no room"),
        (
            {"prompt": ["a"] * 129},
            400,
            "invalid_value",
            "129 prompts, above 128; send several requests",
        ),
        (
            {"prompt": ["a"] * 65, "n": 2},
            400,
            "invalid_value",
            "65 prompts with n = 2 are above 128",
        ),
        ({"prompt": None}, 400, "invalid_value", "prompt"),
        ({"n": 0}, 400, "invalid_value", "n: "),
        ({"n": 10**9}, 400, "invalid_value", "n: "),
        ({"n": "2"}, 400, "invalid_value", "n: "),
        ({"max_tokens": 0}, 400, "invalid_value", "max_tokens: 0 generates nothing"),
        (
            {"max_tokens": 0, "echo": True, "prompt": [5] * 64},
            400,
            "context_length_exceeded",
            "leaves no room",
        ),
        ({"max_tokens": 10**30}, 400, "context_length_exceeded", "shorten one"),
        ({"temperature": -1}, 400, "invalid_value", "temperature: "),
        ({"temperature": 0.001}, 400, "invalid_value", "use 0 for greedy"),
        ({"temperature": float("nan")}, 400, "invalid_body", "the body is not JSON"),
        ({"seed": 2**60}, 400, "invalid_value", "seed: "),
        ({"stop": ""}, 400, "invalid_value", "would stop at once"),
        ({"stop": ["a"] * 5}, 400, "invalid_value", "stop: "),
        (
            {"stream_options": {"include_usage": True}},
            400,
            "invalid_value",
            "stream_options: only valid with stream: true",
        ),
        (
            {"stream": True, "stream_options": {"x": 1}},
            400,
            "unknown_parameter",
            "stream_options.x is unknown",
        ),
        ({"echo": 1}, 400, "invalid_value", "echo: "),
        (
            {"logprobs": 21},
            400,
            "invalid_value",
            "logprobs: input should be less than or equal to 20",
        ),
        ({"logprobs": True}, 400, "invalid_value", "logprobs: "),
        ({"best_of": 3}, 400, "unknown_parameter", "use n"),
        ({"top_p": 0.5}, 400, "unknown_parameter", "use temperature"),
        ({"stream": 0}, 400, "invalid_value", "stream: input should be a valid boolean"),
        ({"top_p": True}, 400, "unknown_parameter", "use temperature"),
        ({"frequency_penalty": 0.1}, 400, "unknown_parameter", "use temperature"),
        ({"suffix": "x"}, 400, "unsupported_parameter", "suffix is not supported; leave it out"),
        ({"seed": 1.5}, 400, "invalid_value", "seed: "),
        (
            {"max_tokens": None, "max_completion_tokens": 1.5},
            400,
            "invalid_value",
            "max_completion_tokens: input should be a valid integer",
        ),
        (
            {"max_tokens": 8, "max_completion_tokens": 9},
            400,
            "invalid_value",
            "max_completion_tokens and max_tokens differ",
        ),
        ({"weights": "/tmp/x"}, 400, "unknown_parameter", "weights is unknown; leave it out"),
        ({"prompt": "\ud800"}, 400, "invalid_body", "surrogate"),
        ({"\ud800": 1}, 400, "invalid_body", "surrogate"),
    ],
)
def test_invalid_input_is_refused_in_openais_format(
    change: dict[str, Any], status: int, code: str, text: str
) -> None:
    replica = served()
    got, answer, _ = ask(routes(replica, None), "POST", "/v1/completions", {**BODY, **change})
    error = answer["error"]
    assert (got, error["code"], error["type"]) == (status, code, "invalid_request_error")
    assert text in error["message"] and "\n" not in error["message"] and len(error["message"]) < 300
    assert replica.requests == []


def test_fields_without_effect_are_accepted() -> None:
    neutral: dict[str, Any] = {
        "stream": False,
        "top_p": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logprobs": None,
        "echo": False,
    }
    neutral |= {
        "user": "me",
        "best_of": 1,
        "logit_bias": {},
        "stream_options": None,
        "suffix": None,
        "top_k": -1,
        "min_p": 0.0,
        "metadata": {"task": "a"},
        "store": True,
        "service_tier": "flex",
        "prompt_cache_key": "k",
    }
    neutral |= {name: float(value) for name, value in BODY.items() if type(value) is int}
    neutral["prompt"] = [float(token) for token in BODY["prompt"]]
    replica = served()
    plain = ask(routes(replica, None), "POST", "/v1/completions", BODY)
    accepted = ask(routes(replica, None), "POST", "/v1/completions", {**BODY, **neutral})
    assert plain[0] == accepted[0] == 200 and replica.requests[0] == replica.requests[1]
    named = {
        **{name: value for name, value in BODY.items() if name != "max_tokens"},
        "max_completion_tokens": BODY["max_tokens"],
    }
    assert (
        ask(routes(replica, None), "POST", "/v1/completions", named)[0] == 200
        and replica.requests[2] == replica.requests[0]
    )


@pytest.mark.parametrize(
    ("raw", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"[1]", {}, 400),
        (b"\xff\xfe", {}, 400),
        (b"[" * 50_000, {}, 400),
        (b'{"model": "tiny"}', {}, 400),
        (json.dumps(BODY).encode(), {"content-type": "text/plain"}, 415),
        (b" " * (LARGEST_BODY + 1), {}, 413),
    ],
    ids=["cut", "list", "bytes", "deep", "no prompt", "a page's form", "large"],
)
def test_invalid_bodies_are_refused(raw: bytes, headers: dict[str, str], status: int) -> None:
    got, answer, _ = ask(
        routes(served(), None), "POST", "/v1/completions", raw=raw, headers=headers
    )
    assert got == status and answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/docs",
        "/redoc",
        "/openapi.json",
        "/v1/weights",
        "/update_weights",
        "/v1/completions/",
        "/metrics/",
        "/pause",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
def test_there_are_no_other_paths(method: str, path: str) -> None:
    status, answer, _ = ask(routes(served(), None), method, path, BODY)
    assert (status, answer["error"]["message"]) == (
        404,
        (
            "no such path; the paths are /v1/completions, /v1/chat/completions, /v1/responses,"
            " /v1/messages, /v1/models, /health, /metrics"
        ),
    )


def test_other_methods_are_refused() -> None:
    for method, path in (
        ("GET", "/v1/completions"),
        ("GET", "/v1/chat/completions"),
        ("POST", "/metrics"),
        ("POST", "/v1/models"),
        ("OPTIONS", "/v1/completions"),
        ("DELETE", "/health"),
    ):
        assert ask(routes(served(), None), method, path)[0] == 405


@pytest.mark.parametrize("path", [*PATHS, "/docs", "/nothing"])
@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Basic {KEY}",
        KEY,
        f"Bearer{KEY}",
        "Bearer \xff",
    ],
)
def test_no_path_answers_without_the_key(path: str, authorization: str | None) -> None:
    replica = served()
    status, answer, headers = ask(
        routes(replica, KEY),
        "POST",
        path,
        BODY,
        {"authorization": authorization} if authorization is not None else {},
    )
    assert (status, answer["error"]["code"], headers["www-authenticate"]) == (
        401,
        "invalid_api_key",
        "Bearer",
    )
    assert KEY not in json.dumps(answer) and replica.requests == []


def test_with_the_key_all_hosts_are_answered() -> None:
    headers = {"authorization": f"bearer {KEY}", "host": "generators.example"}
    app = routes(served(), KEY)
    assert [
        ask(app, *call, headers=headers)[0]
        for call in (("POST", "/v1/completions", BODY), ("GET", "/v1/models"), ("GET", "/health"))
    ] == [200] * 3
    assert ask(app, "GET", "/docs", headers=headers)[0] == 404


def test_without_a_key_other_host_names_are_refused() -> None:
    """Otherwise a web page whose name resolves to 127.0.0.1 could reach the generators from a
    browser."""
    app = routes(served(), None)
    for host in ("127.0.0.1:8000", "localhost", "[::1]:8000"):
        assert ask(app, "GET", "/health", headers={"host": host})[0] == 200, host
    for host in (
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost@evil.example",
        "",
        "[::1]evil.com",
        "[::1].evil.com:80",
        "[::1",
        "127.0.0.1:80x",
    ):
        assert ask(app, "GET", "/health", headers={"host": host})[0] == 403, host


def test_serves_own_routes_can_be_closed() -> None:
    (middleware,) = close_own_routes()
    app = middleware.cls(routes(served(), None))
    assert [ask(app, "GET", path)[0] for path in ("/-/routes", "/-/healthz", "/health")] == [
        404,
        404,
        200,
    ]


async def test_a_websocket_is_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await routes(served(), KEY)(
        {"type": "websocket", "path": "/v1/completions", "headers": []}, None, send
    )
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (StaleReplicaError("at 3"), 503),
        (GenerationTimeoutError("late"), 504),
        (ValueError("secret inside"), 500),
    ],
    ids=str,
)
def test_failures_of_the_generator(failure: Exception, status: int) -> None:
    replica = served()
    replica.failure = failure
    got, answer, _ = ask(routes(replica, None), "POST", "/v1/completions", BODY)
    assert (got, answer["error"]["type"]) == (
        status,
        "server_error",
    ) and "secret inside" not in json.dumps(answer)


def test_a_refusal_of_the_engine_keeps_its_message() -> None:
    replica = served()
    replica.failure = InvalidRequestError("temperature must be at most 2")
    got, answer, _ = ask(routes(replica, None), "POST", "/v1/completions", BODY)
    assert (got, answer["error"]["type"], answer["error"]["message"]) == (
        400,
        "invalid_request_error",
        "temperature must be at most 2",
    )


async def status_of(*arguments: Any) -> int:
    """The status of one request, which may run concurrently with others."""
    return (await call(*arguments))[0]


async def test_a_large_body_is_refused_by_its_content_length() -> None:
    """It is refused before the body is read, since a client may send that slowly, or never."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        raise AssertionError("the body was read")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await routes(served(), None)(
        scope_of("POST", "/v1/completions", content_length=str(64 << 30)), receive, send
    )
    assert sent[0]["status"] == 413


async def test_long_texts_do_not_fill_the_memory_or_block_health() -> None:
    """Texts too long for the model are refused before tokenization. At most two others are
    tokenized at once."""
    model = ServedModel("tiny", max_model_len=4096, vocabulary=200, longest_token=8)
    body = {"model": "tiny", "max_tokens": 8}

    class Slow(FakeServed):
        def __init__(self) -> None:
            super().__init__(model)
            self.tokenizer = self  # type: ignore[assignment]
            self.go_on, self.encoding, self.most, self.encoded = asyncio.Event(), 0, 0, 0

        async def encode(self, text: str, rendered: bool = False) -> list[int]:
            self.encoding += 1
            self.most = max(self.most, self.encoding)
            await self.go_on.wait()
            self.encoding -= 1
            self.encoded += 1
            return [5]

    tracemalloc.start()
    try:
        replica = Slow()
        app = routes(replica, None)
        too_long = [
            status_of(app, "POST", "/v1/completions", {**body, "prompt": "x" * size})
            for size in [1 << 17] * 6 + [4_000_000] * 6
        ]
        assert await asyncio.gather(*too_long) == [400] * 6 + [413] * 6 and replica.most == 0
        long = [
            asyncio.create_task(
                status_of(app, "POST", "/v1/completions", {**body, "prompt": "x" * 32_000})
            )
            for _ in range(12)
        ]
        while replica.encoding < 2:  # noqa: ASYNC110  # polls while the requests run
            await asyncio.sleep(0)
        assert await status_of(app, "GET", "/health") == 200 and replica.encoded == 0
        replica.go_on.set()
        assert await asyncio.gather(*long) == [200] * 12 and (replica.most, replica.encoded) == (
            2,
            12,
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20, f"{peak:,} bytes, of which the requests are 27 MB"


async def test_a_disconnect_ends_the_generation() -> None:
    class Endless(FakeServed):
        ended = False

        async def stream(self, request: Any, details: Any) -> Any:
            left.set()
            try:
                yield await asyncio.Event().wait()
            finally:
                self.ended = True

    left = asyncio.Event()
    replica = Endless(MODEL)
    assert (
        await asyncio.wait_for(
            status_of(routes(replica, None), "POST", "/v1/completions", BODY, left), 10
        )
        == 499
    )
    assert replica.ended


@pytest.mark.parametrize("fails", [False, True])
async def test_a_stream_that_waits_for_its_first_token_sends_its_headers(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    class Slow(FakeServed):
        async def stream(self, request: Any, details: Any) -> Any:
            await headers.wait()
            if fails:
                raise InvalidRequestError("too late for a status code")
            async for piece in super().stream(request, details):
                yield piece

    async def send(message: Any) -> None:
        sent.append(message)
        headers.set()

    monkeypatch.setattr("asyncrl.serving.http.HEADERS_S", 0.01)
    headers, sent = asyncio.Event(), []
    app, body = routes(Slow(MODEL), None), json.dumps({**BODY, "stream": True}).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    requests = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return requests.pop() if requests else await asyncio.Event().wait()

    await asyncio.wait_for(app(scope, receive, send), 10)
    text = b"".join(message.get("body", b"") for message in sent).decode()
    assert sent[0]["status"] == 200
    assert ("too late for a status code" in text) == fails == (not text.endswith("[DONE]\n\n"))


def test_a_broken_generator_is_not_healthy() -> None:
    replica = served()
    replica.failure = RuntimeError("the update of version 3 failed")
    assert ask(routes(replica, None), "GET", "/health")[0] == 503


def test_a_host_other_than_loopback_needs_a_key() -> None:
    for host in ("127.0.0.1", "127.8.0.1", "localhost", "::1", "[::1]"):
        assert is_loopback(host)
        refuse_open_host(host, None)
    for host in ("0.0.0.0", "::", "10.0.0.3", "generators.example", "localhost.example", ""):
        assert not is_loopback(host)
        with pytest.raises(
            RuntimeError,
            match=r"is not loopback and ASYNCRL_API_KEY is not set.*set http_options.host",
        ):
            refuse_open_host(host, None)
        refuse_open_host(host, KEY)
    refuse_open_host(None, None)
    refuse_open_host(None, None, nodes=2)
    refuse_open_host("127.0.0.1", KEY, nodes=2)
    with pytest.raises(
        RuntimeError, match="this node has no ASYNCRL_API_KEY, and the cluster has 2 nodes"
    ):
        refuse_open_host("127.0.0.1", None, nodes=2)


async def test_a_replica_refuses_an_open_host_before_it_starts_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from asyncrl.serving import standing

    monkeypatch.setattr(standing, "bound_host", lambda: "0.0.0.0")
    monkeypatch.setattr(standing, "nodes", lambda: 1)
    monkeypatch.setattr(standing.Generator, "__init__", None)
    monkeypatch.delenv("ASYNCRL_API_KEY", raising=False)
    with pytest.raises(RuntimeError, match="is not loopback"):
        await standing.HttpGenerator.__init__(
            object.__new__(standing.HttpGenerator), {"model": "m"}
        )


def test_a_replica_serves_the_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds the replica as Serve does, with a stub engine. Serve's wrapper class must not override
    our attributes."""
    from asyncrl.generation import replica
    from asyncrl.serving import standing

    async def nothing(*arguments: Any) -> None:
        return None

    made = FakeServed(MODEL)

    class StubEngine:
        """It is its own requests and rest."""

        max_model_len, vocabulary, longest_token, tokenizer_hash = 64, 200, 4, "hash"
        rests = False
        stream, check, stop = made.stream, nothing, nothing

        def __init__(self) -> None:
            self.requests = self.rest = self

    async def start_engine(app: Any) -> StubEngine:
        return StubEngine()

    context = replica_context("standing")
    monkeypatch.setenv("ASYNCRL_API_KEY", KEY)
    monkeypatch.setattr(standing, "bound_host", lambda: "0.0.0.0")
    monkeypatch.setattr(standing, "nodes", lambda: 2)
    monkeypatch.setattr(standing, "check_app", lambda app: app)
    monkeypatch.setattr(replica, "start_engine", start_engine)
    monkeypatch.setattr(replica, "expected_tensors", lambda model, dtype: {})
    monkeypatch.setattr(replica, "find_registry", lambda name: None)
    monkeypatch.setattr(replica.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(replica, "lease_holder", nothing)
    replica_ = object.__new__(standing.HttpGenerator)
    asyncio.run(standing.HttpGenerator.__init__(replica_, {"model": "/models/tiny", "http": True}))
    replica_.tokenizer = made.tokenizer  # the test has no checkpoint
    replica_._set_asgi_app(replica_.__serve_build_asgi_app__())
    headers = {"authorization": f"Bearer {KEY}"}
    status, answer, _ = ask(
        replica_.app, "POST", "/v1/completions", {"model": "tiny", "prompt": "ab"}, headers
    )
    assert (
        status == 200
        and answer["usage"]["prompt_tokens"] == 2
        and answer["serving"] == "serving the checkpoint's own weights; no lease"
    )
    assert ask(replica_.app, "GET", "/health", headers=headers)[0] == 200
    assert ask(replica_.app, "GET", "/v1/models")[0] == 401
    assert ask(replica_.app, "GET", "/v1/models", headers=headers)[1]["data"][0]["tokenizer"] == (
        "hash"
    )


def test_invalid_keys_are_refused() -> None:
    assert api_key({}) is None and api_key({"ASYNCRL_API_KEY": KEY}) == KEY
    for wrong in ("", " ", " key", "key\n", "schlüssel"):
        with pytest.raises(ValueError, match="ASYNCRL_API_KEY is empty, has spaces"):
            api_key({"ASYNCRL_API_KEY": wrong})


@pytest.mark.parametrize(
    ("raw", "headers", "status", "words"),
    [
        (b'{"model": "tiny", "prompt": [1], "prompt": [2]}', {}, 400, "prompt appears twice"),
        (
            b'{"model": "tiny", "prompt": [1], "x": {"a\x1b": 1, "a\x1b": 2}}',
            {},
            400,
            "the body is not JSON",
        ),
        (
            b'{"model": "tiny", "prompt": [1], "a\\u009b2J": 1, "a\\u009b2J": 2}',
            {},
            400,
            "a\ufffd2J appears twice",
        ),
        (b'{"model": "tiny", "prompt": [1], "a\\u202e": 1}', {}, 400, "a\ufffd is unknown"),
        (
            b'{"model": "tiny", "prompt": [[1.5]]}',
            {},
            400,
            "prompt: send a string, a list of token ids, or a list of such prompts",
        ),
        (
            b'{"model": "tiny", "prompt": [true]}',
            {},
            400,
            "prompt: send a string, a list of token ids, or a list of such prompts",
        ),
        (
            b'{"model": "tiny", "prompt": [1], "stop": ["a", "b", "c", "d", "e"]}',
            {},
            400,
            "stop: send a list of at most 4 strings",
        ),
        (
            b'{"model": "tiny", "prompt": [1], "stop": ""}',
            {},
            400,
            "is empty, which would stop at once",
        ),
        (
            json.dumps(BODY).encode(),
            {"content-encoding": "gzip"},
            415,
            "send the body uncompressed",
        ),
    ],
)
def test_ambiguous_or_unreadable_bodies_are_refused(
    raw: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    found, body, _ = ask(
        routes(served(), None), "POST", "/v1/completions", headers=headers, raw=raw
    )
    assert found == status and words in body["error"]["message"], body


@pytest.mark.timeout(60)
def test_a_repeated_field_of_a_large_body_is_found_at_once() -> None:
    fields = ", ".join(f'"a{number}": 1' for number in range(50_000))
    with pytest.raises(ApiError, match="a49999 appears twice"):
        parsed(f'{{{fields}, "a49999": 1}}'.encode())


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("options", ["x", [1], 3])
def test_options_of_a_stream_that_are_no_object_are_refused(path: str, options: Any) -> None:
    body = {"model": "tiny", "input": "hi", "stream_options": options}
    if path == "/v1/messages":
        body = {
            "model": "tiny",
            "max_tokens": 4,
            "messages": [{"role": "user", "content": "hi"}],
            "stream_options": options,
        }
    replica_ = FakeServed(MODEL)
    status, answer, _ = ask(routes(replica_, None), "POST", path, body)
    assert status == 400 and "stream_options: send an object" in answer["error"]["message"]


def test_a_list_of_wrong_items_is_refused_at_the_first_one() -> None:
    tracemalloc.start()
    with pytest.raises(ApiError, match=r"include\.0: input should be a valid string"):
        Asked("/v1/responses", {"model": "tiny", "input": "q", "include": [1] * 100_000}, MODEL)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20, "an error for each item would be 40 MB"


async def test_others_are_answered_while_a_body_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read, began = threading.Event(), threading.Event()

    class Slow(Asked):
        def __init__(self, *given: Any) -> None:
            began.set()
            assert read.wait(30)
            super().__init__(*given)

    monkeypatch.setattr("asyncrl.serving.http.Asked", Slow)
    app = routes(served(), None)
    slow = asyncio.create_task(call(app, "POST", "/v1/completions", BODY))
    assert await asyncio.to_thread(began.wait, 30)
    assert (await call(app, "GET", "/health"))[0] == 200 and not slow.done()
    read.set()
    assert (await slow)[0] == 200
