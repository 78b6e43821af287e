"""The HTTP routes of a standing generator, listed in `PATHS`. No route changes weights.

    count → guard (key, host, size) → FastAPI → dialect → core (`asyncrl.serving.answers`) → a
    replica

This module does not depend on Serve. It calls the small protocol `Served`, so tests can run the
routes without an engine.
"""

# No postponed annotations here: FastAPI evaluates those of the routes.

import asyncio
import contextlib
import hmac
import ipaddress
import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from typing import Protocol

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asyncrl.contracts.errors import GenerationTimeoutError, InvalidRequestError, StaleReplicaError
from asyncrl.contracts.messages import Details, GenerateRequest, ServedWeights, StreamPiece
from asyncrl.serving.answers import ChoicePiece, Dialect, Head, Words, ask
from asyncrl.serving.dialects.chat import Chat
from asyncrl.serving.dialects.completions import Completions
from asyncrl.serving.errors import as_api_error
from asyncrl.serving.identity import ServedModel, model_list, weights
from asyncrl.serving.metrics import CONTENT_TYPE, HttpStatus, Traffic, TrafficCounter, exposition
from asyncrl.web.connection import ClientLeftError, while_connected
from asyncrl.web.errors import CLIENT_LEFT, ApiError, printable, refused
from asyncrl.web.events import DONE, Event, EventStream

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics")

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
    def words(self) -> Words: ...

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
    encoding = asyncio.Semaphore(ENCODES_AT_ONCE)

    async def answer(request: Request, dialect: Dialect) -> Response:
        async with encoding:
            requests = await dialect.requests(served.words, served.model)
        return await _generate(served, dialect, requests, request.receive)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, Completions(await json_body(request), served.model))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(request, Chat(await json_body(request), served.model))

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse(model_list(served.model, await served.served_weights(), started))

    @app.get("/health")
    async def health() -> JSONResponse:
        try:
            await served.check_health()
        except RuntimeError:
            raise ApiError(
                503, "the generator is broken and will be replaced; try again", "unavailable"
            ) from None
        identity = weights(await served.served_weights())
        return JSONResponse({"status": "ok", "model": served.model.name, **identity})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(
            exposition(served.model.name, await served.http_statuses()), media_type=CONTENT_TYPE
        )

    handle_errors(app, PATHS)
    app.add_middleware(Guard, key=key, largest_body=min(LARGEST_BODY, served.model.largest_body))
    app.add_middleware(TrafficCounter, traffic=served.traffic, paths=PATHS)
    return app


async def _generate(
    served: Served, dialect: Dialect, requests: Sequence[GenerateRequest], receive: Receive
) -> Response:
    """Generate the completions, and answer with all of them or as a stream."""
    pieces = ask(served, served.words, requests, dialect.details)
    head = Head(f"{dialect.prefix}-{uuid.uuid4().hex}", int(time.time()), served.model)
    if not dialect.streams:
        choices = await while_connected(receive, _all(pieces))
        return JSONResponse(dialect.answer(head, choices) | weights(await served.served_weights()))
    identity = weights(await served.served_weights())
    first = asyncio.ensure_future(anext(pieces))
    opened = contextlib.AsyncExitStack()
    opened.push_async_callback(pieces.aclose)
    opened.push_async_callback(_canceled, first)
    try:
        await while_connected(receive, asyncio.wait([first], timeout=HEADERS_S))
        if first.done():
            first.result()  # raises a failure, which gets its own status code
    except BaseException:
        await opened.aclose()
        raise
    return EventStream(
        _events(dialect, head, identity, first, pieces),
        opened,
        lambda error, _: Event(as_api_error(error).body()),
    )


def new_app() -> FastAPI:
    """An application without routes."""
    return FastAPI(
        title="asyncrl", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )


def handle_errors(app: FastAPI, paths: Sequence[str]) -> None:
    """Answer every error in OpenAI's format. `paths` are those of the application's routes."""
    for kind in (
        ApiError,
        StaleReplicaError,
        InvalidRequestError,
        GenerationTimeoutError,
        Exception,
    ):
        app.add_exception_handler(kind, lambda request, error: _refusal(as_api_error(error)))
    client_left = ApiError(CLIENT_LEFT, "the client has left", "client_left")
    app.add_exception_handler(ClientLeftError, lambda request, error: _refusal(client_left))
    app.add_exception_handler(
        StarletteHTTPException, lambda request, error: _refusal(refused(error, paths, METHODS))
    )


async def _all(pieces: AsyncGenerator[ChoicePiece, None]) -> list[ChoicePiece]:
    """One whole piece for each choice, ordered by choice."""
    async with contextlib.aclosing(pieces):
        return sorted([part async for part in pieces], key=lambda part: part.choice)


async def _canceled(task: asyncio.Future[ChoicePiece]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _events(
    dialect: Dialect,
    head: Head,
    identity: dict[str, object],
    first: Awaitable[ChoicePiece],
    pieces: AsyncGenerator[ChoicePiece, None],
) -> AsyncGenerator[Event, None]:
    """The events of a stream, including that of `first`. The last event of a choice names the
    weights."""
    part = await first
    yield Event(dialect.event(head, part) | (identity if part.piece.finish_reason else {}))
    async for part in pieces:
        yield Event(dialect.event(head, part) | (identity if part.piece.finish_reason else {}))
    if (last := dialect.last_event(head)) is not None:
        yield Event(last)
    yield DONE


class Guard:
    """Middleware that checks the key, or without a key the Host header; and the size of the
    body."""

    def __init__(self, app: ASGIApp, key: str | None, largest_body: int = LARGEST_BODY) -> None:
        self.app, self.key, self.largest_body = app, key, largest_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif (
            refusal := self._refuse(scope["headers"]) or self._refuse_large(scope["headers"])
        ) is not None:
            await _refusal(refusal)(scope, receive, send)
        else:
            await self.app(scope, _bounded(receive, self.largest_body), send)

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
        given = [value for name, value in headers if name == b"authorization"]
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        matches = hmac.compare_digest(token.strip(), self.key.encode())
        if matches and scheme.lower() == b"bearer":
            return None
        return ApiError(
            401,
            "the key is missing or wrong; send the header Authorization: Bearer KEY",
            "invalid_api_key",
        )

    def _refuse_large(self, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
        """Check the Content-Length header, before any of the body is read."""
        sizes = [value for name, value in headers if name == b"content-length"]
        if any(size.isdigit() and int(size[:20]) > self.largest_body for size in sizes):
            return ApiError(
                413,
                f"the body is above {self.largest_body:,} bytes; send a smaller one",
                "refused",
            )
        return None


class OwnRoutesClosed:
    """Middleware that hides `/-/healthz` and `/-/routes`. Serve's proxies answer them without a
    key, and the second lists the applications."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path", "").startswith("/-/"):
            await _refusal(ApiError(404, "no such path", "not_found"))(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def close_own_routes() -> list[Middleware]:
    """The middleware that closes Serve's own routes. To use it, run `ray start` with
    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=asyncrl.serving.http.close_own_routes."""
    return [Middleware(OwnRoutesClosed)]


def _bounded(receive: Receive, largest: int) -> Receive:
    """Wrap `receive` to refuse a body above the limit, even if its headers claim a smaller size."""
    size = 0

    async def counted() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > largest:
            raise HTTPException(413, f"the body is above {largest:,} bytes; send a smaller one")
        return message

    return counted


async def json_body(request: Request) -> object:
    """Parse the body. Other content types are refused, because a browser lets any web page send
    them to this server. Raises ApiError, and ClientLeftError."""
    if (
        request.headers.get("content-type", "").partition(";")[0].strip().lower()
        != "application/json"
    ):
        raise ApiError(415, "Content-Type is not application/json; set it", "invalid_content_type")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(
            415,
            "Content-Encoding is not identity; send the body uncompressed",
            "invalid_content_encoding",
        )
    try:
        body = await request.body()
    except ClientDisconnect:  # while it sent the body
        raise ClientLeftError from None
    try:
        return json.loads(body, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON; send a JSON object", "invalid_body") from None


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object. A repeated field is refused, because parsers disagree on which one wins."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        name = next(name for place, (name, _) in enumerate(pairs) if name in dict(pairs[:place]))
        raise ApiError(
            400, f"{printable(name)} appears twice in one object; send it once", "invalid_body"
        )
    return tree


def _refusal(error: ApiError) -> JSONResponse:
    return JSONResponse(
        error.body(),
        error.status,
        headers={"WWW-Authenticate": "Bearer"} if error.status == 401 else None,
    )
