"""The HTTP routes of a standing generator, listed in `PATHS`. No route changes weights.

    count → guard (key, host) → body → `Asked` (a dialect of `asyncrl.api`, and sampling) → core
    (`asyncrl.serving.answers`) → a replica

This module does not depend on Serve. It calls the small protocol `Served`, so tests can run the
routes without an engine.
"""

# No postponed annotations here: FastAPI evaluates those of the routes.

import asyncio
import contextlib
import hmac
import ipaddress
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from asyncrl.api.answering import answered
from asyncrl.api.contract import Part
from asyncrl.api.http import (
    answer_unknown,
    body_of,
    model_entry,
    model_list,
    parsed,
    path_of,
    refusal,
    safely,
)
from asyncrl.contracts.messages import Details, GenerateRequest, ServedWeights, StreamPiece
from asyncrl.serving.answers import ChatTokenizer, Choice, ChoicePiece, ask
from asyncrl.serving.identity import ServedModel, weights
from asyncrl.serving.metrics import CONTENT_TYPE, HttpStatus, Traffic, TrafficCounter, exposition
from asyncrl.serving.requests import APIS, Asked
from asyncrl.web.errors import ApiError

PATHS = (*APIS, "/v1/models", "/health", "/metrics")

KEY_VARIABLE = "ASYNCRL_API_KEY"
"""Environment variable that contains the bearer key, read by each replica."""

HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[^\s\[\]:@/]+)(?::[0-9]{1,5})?")
"""A Host header: a name or address, and optionally a port. Only a port may follow the brackets of
an IPv6 address."""

LARGEST_BODY = 4 << 20
"""Upper limit of a request body, in bytes. A model with a short context has a lower one."""

METHODS = "use POST to generate or score, and GET for other paths"

HEADERS_S = 2.0
"""Seconds after which a stream without a token sends its headers, and then comments. A client with
an idle timeout would leave. A failure up to then gets a status code; a later one is an event."""
ENCODES_AT_ONCE = 2
"""Number of requests tokenized at once. Each occupies a core, and many times its size in memory."""


class Served(Protocol):
    """The backend of the routes: a replica, or a fake (`asyncrl.testing.FakeServed`)."""

    @property
    def model(self) -> ServedModel: ...

    @property
    def tokenizer(self) -> ChatTokenizer: ...

    @property
    def traffic(self) -> Traffic:
        """Counts of its HTTP requests."""
        ...

    def stream(self, request: GenerateRequest, details: Details) -> AsyncIterator[StreamPiece]:
        """Generate one completion in pieces.

        Raises:
            StaleReplicaError, InvalidRequestError, GenerationTimeoutError: before or between
                pieces.
        """
        ...

    async def served_weights(self) -> ServedWeights: ...

    async def http_statuses(self) -> Sequence[HttpStatus]:
        """The status of every replica of the application."""
        ...

    async def check_health(self) -> None:
        """Raise RuntimeError if the engine is dead or broken."""
        ...


def api_key(environment: dict[str, str]) -> str | None:
    """The bearer key, or None if the environment has none.

    Raises:
        ValueError: the key is empty, or has characters that a header cannot contain.
    """
    key = environment.get(KEY_VARIABLE)
    if key is None:
        return None
    if not key.isascii() or not key.isprintable() or not key.strip() or key != key.strip():
        raise ValueError(
            f"{KEY_VARIABLE} is empty, has spaces around it, or has characters other than printable"
            " ASCII; set a valid key, or unset it"
        )
    return key


def is_loopback(host: str) -> bool:
    """Whether an address or name is a loopback one: `localhost`, 127.0.0.0/8 or ::1."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def refuse_open_host(host: str | None, key: str | None, nodes: int = 1) -> None:
    """Raise RuntimeError if HTTP listens on a host that other machines can reach, without a key.

    Args:
        host: the host that Serve's proxies bind. None if they bind none.
        nodes: number of nodes in the cluster. With several nodes every one needs the key, or only
            some replicas would check it.
    """
    if key is None and host is not None and nodes > 1:
        raise RuntimeError(
            f"this node has no {KEY_VARIABLE}, and the cluster has {nodes} nodes; set the same key"
            " on every node before Ray starts there"
        )
    if key is None and host is not None and not is_loopback(host):
        raise RuntimeError(
            f"http_options.host = {host!r} is not loopback and {KEY_VARIABLE} is not set, so"
            " anyone could use the model; set http_options.host: 127.0.0.1, or set"
            f" {KEY_VARIABLE} before Ray starts"
        )


def routes(served: Served, key: str | None) -> FastAPI:
    """Build the application. With a key, every path requires it, including unknown ones. Without a
    key, the application only answers requests addressed to loopback."""
    app = new_app()
    started = int(time.time())
    endpoint = _Endpoint(served)

    def route(path: str) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def answer(request: Request) -> Response:
            return await safely(request, endpoint.answer(request, path))

        return answer

    for path in APIS:
        app.post(path)(route(path))

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        return await safely(request, endpoint.models(started))

    @app.get("/health")
    async def health(request: Request) -> Response:
        return await safely(request, endpoint.health())

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(
            exposition(served.model.name, await served.http_statuses()), media_type=CONTENT_TYPE
        )

    answer_unknown(app, PATHS, METHODS)
    app.add_middleware(Guard, key=key)
    app.add_middleware(TrafficCounter, traffic=served.traffic, paths=PATHS)
    return app


class _Endpoint:
    """Answers requests with a served model."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._encoding = asyncio.Semaphore(ENCODES_AT_ONCE)

    async def models(self, started: int) -> Response:
        """The model, its tokenizer's hash and the origin of its weights."""
        model, identity = self._served.model, weights(await self._served.served_weights())
        more = {"max_model_len": model.max_model_len, "tokenizer": model.tokenizer, **identity}
        return JSONResponse(model_list(model_entry(model.name, started, **more)))

    async def health(self) -> Response:
        """The origin of the weights. Raises ApiError if nothing can be generated."""
        try:
            await self._served.check_health()
        except RuntimeError:
            raise ApiError(
                503, "the generator is broken and will be replaced; try again", "unavailable"
            ) from None
        identity = weights(await self._served.served_weights())
        return JSONResponse({"status": "ok", "model": self._served.model.name, **identity})

    async def answer(self, request: Request, path: str) -> Response:
        """Answer one request with all its completions, or as a stream."""
        served, tokenizer, model = self._served, self._served.tokenizer, self._served.model
        body = await body_of(request, min(LARGEST_BODY, model.largest_body))
        async with self._encoding:
            # In a thread: a large body takes long, and other requests go on meanwhile.
            asked = await asyncio.to_thread(lambda: Asked(path, parsed(body), model))
            prompts = await asked.prompts(tokenizer)
        dialect = asked.dialect
        requests = asked.requests([ids for _, ids in prompts])
        identity = weights(await served.served_weights())
        is_chat = dialect.request.prompt is None
        shown = {"prompt_token_ids": prompts[0][1]} if is_chat else {}
        choices = [
            Choice(
                tokenizer,
                dialect.request,
                one,
                await asked.content_filter(tokenizer, one.prompt_ids),
                prompts[number // dialect.request.n][0] if asked.echoes else "",
                {} if number else shown,
                identity,
            )
            for number, one in enumerate(requests)
        ]
        parts = _parts(ask(served, requests, asked.details), choices)
        return await answered(request, dialect, parts, lambda: asyncio.sleep(HEADERS_S))


def new_app() -> FastAPI:
    """An application without routes."""
    return FastAPI(
        title="asyncrl", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )


async def _parts(
    pieces: AsyncGenerator[ChoicePiece, None], choices: Sequence[Choice]
) -> AsyncGenerator[Part, None]:
    async with contextlib.aclosing(pieces):
        async for told in pieces:
            yield await choices[told.choice].part(told)


class Guard:
    """Middleware that checks the key, or without a key the Host header."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self.app, self.key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif (error := self._refuse(scope["headers"])) is not None:
            await refusal(path_of(scope), error)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _refuse(self, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
        if self.key is None:
            # A web page can make its own domain name resolve to 127.0.0.1 (DNS rebinding), and then
            # reach this server from a browser on this machine.
            hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
            if (
                len(hosts) == 1
                and (named := HOST.fullmatch(hosts[0])) is not None
                and is_loopback(named["name"])
            ):
                return None
            return ApiError(
                403,
                f"without {KEY_VARIABLE}, only requests to a loopback address are answered; set"
                " a key",
                "forbidden_host",
            )
        keys = list(_keys(headers))
        if keys and all(hmac.compare_digest(key, self.key.encode()) for key in keys):
            return None
        return ApiError(
            401,
            "the key is missing or wrong; send the header Authorization: Bearer KEY",
            "invalid_api_key",
        )


def _keys(headers: list[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """The keys that a request gives. Anthropic's client sends its key as `x-api-key`."""
    for name, value in headers:
        if name == b"x-api-key":
            yield value
        elif name == b"authorization":
            scheme, _, token = value.partition(b" ")
            yield token.strip() if scheme.lower() == b"bearer" else b""


class OwnRoutesClosed:
    """Middleware that hides `/-/healthz` and `/-/routes`. Serve's proxies answer them without a
    key, and the second lists the applications."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path", "").startswith("/-/"):
            await refusal("", ApiError(404, "no such path", "not_found"))(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def close_own_routes() -> list[Middleware]:
    """The middleware that closes Serve's own routes. To use it, run `ray start` with
    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=asyncrl.serving.http.close_own_routes."""
    return [Middleware(OwnRoutesClosed)]
