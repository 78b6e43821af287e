"""The HTTP routes of a standing generator: `PATHS`, and nothing else. Weights have none.

    count → guard (key, host, size) → FastAPI → dialect → core (`asyncrl.serving.answers`) → a
    replica

Knows no Serve: what answers is a small protocol, so that the routes can be tried without an engine.
"""

# No postponed annotations here: FastAPI reads those of the routes.

import asyncio
import contextlib
import hmac
import ipaddress
import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware import Middleware

from asyncrl.contracts.errors import GenerationTimeoutError, InvalidRequestError, StaleReplicaError
from asyncrl.contracts.messages import Details, GenerateRequest, Piece, ServedWeights
from asyncrl.serving.answers import Dialect, Head, Told, Words, ask
from asyncrl.serving.dialects.chat import Chat
from asyncrl.serving.dialects.completions import Completions
from asyncrl.serving.errors import ApiError, as_api_error, printable
from asyncrl.serving.events import ClientLeftError, EventStream, while_connected
from asyncrl.serving.identity import ServedModel, model_list, weights
from asyncrl.serving.metrics import CONTENT_TYPE, Counted, HttpStatus, Traffic, exposition

__all__ = [
    "KEY_VARIABLE",
    "Served",
    "api_key",
    "close_own_routes",
    "is_loopback",
    "refuse_open_host",
    "routes",
]

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics")

KEY_VARIABLE = "ASYNCRL_API_KEY"
"""Environment variable with the bearer key, in the process that answers."""

HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[^\s\[\]:@/]+)(?::[0-9]{1,5})?")
"""A Host header: a name or address, and perhaps a port. Nothing may follow the brackets of an IPv6
address."""

LARGEST_BODY = 4 << 20
"""Bytes of a request's body; less for a model that takes less."""

ENCODES_AT_ONCE = 2
"""Texts that are tokenized at once: each takes a core, and many times its size in memory."""
CLIENT_LEFT = 499
"""Status of an answer that nobody reads, as nginx logs it."""


class Served(Protocol):
    """What answers: a replica, or a fake (`asyncrl.testing.FakeServed`)."""

    @property
    def model(self) -> ServedModel: ...

    @property
    def words(self) -> Words: ...

    @property
    def traffic(self) -> Traffic:
        """Where its requests are counted."""
        ...

    def stream(self, request: GenerateRequest, details: Details) -> AsyncIterator[Piece]:
        """One completion in pieces. Raises StaleReplicaError, InvalidRequestError or
        GenerationTimeoutError, also between two pieces."""
        ...

    async def served_weights(self) -> ServedWeights: ...

    async def http_statuses(self) -> Sequence[HttpStatus]:
        """Of every replica of the application (`asyncrl.serving.metrics.exposition`)."""
        ...

    async def check_health(self) -> None:
        """Raises RuntimeError if the engine is dead or broken."""
        ...


def api_key(environment: dict[str, str]) -> str | None:
    """The bearer key, or None without one.

    Raises:
        ValueError: it is set and empty, or has characters that no header can carry.
    """
    key = environment.get(KEY_VARIABLE)
    if key is None:
        return None
    if not key.isascii() or not key.isprintable() or not key.strip() or key != key.strip():
        raise ValueError(
            f"{KEY_VARIABLE} is set, and is empty or has spaces around it or characters other than"
            " printable ASCII; set a key, or unset it"
        )
    return key


def is_loopback(host: str) -> bool:
    """Whether an address or name is this machine's alone: `localhost`, 127.0.0.0/8, ::1."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def refuse_open_host(host: str | None, key: str | None, nodes: int = 1) -> None:
    """Raise RuntimeError if HTTP is bound to a host that others reach, without a key. `host` None:
    nothing is bound.

    Args:
        nodes: of the cluster. On several, a key that only some of them know would be one that half
            of the requests need.
    """
    if key is None and host is not None and nodes > 1:
        raise RuntimeError(
            f"this node has no {KEY_VARIABLE}, and the cluster has {nodes} nodes; set the same one"
            " on every node, where Ray is started"
        )
    if key is None and host is not None and not is_loopback(host):
        raise RuntimeError(
            f"http_options.host = {host!r} is not loopback and {KEY_VARIABLE} is not set, so"
            " anybody could use the generators; set http_options.host: 127.0.0.1, or set"
            f" {KEY_VARIABLE} where Ray is started"
        )


def routes(served: Served, key: str | None) -> FastAPI:
    """The application. With a key every path wants it, unknown ones too; without, only requests
    addressed to loopback are answered."""
    app = FastAPI(
        title="asyncrl", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    started = int(time.time())
    encoding = asyncio.Semaphore(ENCODES_AT_ONCE)

    async def answered(request: Request, dialect: Dialect) -> Response:
        async with encoding:
            requests = await dialect.requests(served.words, served.model)
        pieces = ask(served, served.words, requests, dialect.details)
        head = Head(f"{dialect.prefix}-{uuid.uuid4().hex}", int(time.time()), served.model)
        if not dialect.streams:
            choices = await while_connected(request.receive, _all(pieces))
            return JSONResponse(
                dialect.answer(head, choices) | weights(await served.served_weights())
            )
        identity = weights(await served.served_weights())
        # What is refused, or fails, before there is anything to send has a status of its own.
        first = await while_connected(request.receive, anext(pieces))
        return EventStream(
            _events(dialect, head, identity, first, pieces),
            pieces,
            lambda error: as_api_error(error).body(),
        )

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answered(request, Completions(await _json(request), served.model))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answered(request, Chat(await _json(request), served.model))

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

    _handle_errors(app)
    app.add_middleware(Guard, key=key, largest_body=min(LARGEST_BODY, served.model.largest_body))
    app.add_middleware(Counted, traffic=served.traffic, paths=PATHS)
    return app


def _handle_errors(app: FastAPI) -> None:
    """Answer every error in the API's format."""
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
        StarletteHTTPException, lambda request, error: _refusal(_refused_by_fastapi(error))
    )


async def _all(pieces: AsyncGenerator[Told, None]) -> list[Told]:
    """One whole piece for each choice, in their order."""
    async with contextlib.aclosing(pieces):
        return sorted([told async for told in pieces], key=lambda told: told.choice)


async def _events(
    dialect: Dialect,
    head: Head,
    identity: dict[str, Any],
    first: Told,
    pieces: AsyncGenerator[Told, None],
) -> AsyncGenerator[dict[str, Any], None]:
    """What a stream sends, from its first piece on. A choice names its weights where it
    ends."""
    yield dialect.event(head, first) | (identity if first.piece.finish_reason else {})
    async for told in pieces:
        yield dialect.event(head, told) | (identity if told.piece.finish_reason else {})
    if (last := dialect.last_event(head)) is not None:
        yield last


class Guard:
    """In front of everything: the key, or without one the host that a request is addressed to; and
    the size of its body."""

    def __init__(
        self, app: Callable[..., Awaitable[None]], key: str | None, largest_body: int = LARGEST_BODY
    ) -> None:
        self.app, self.key, self.largest_body = app, key, largest_body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
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
            # A page in a browser on this machine could reach us under a name of its own that it
            # points here.
            hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
            if (
                len(hosts) == 1
                and (named := HOST.fullmatch(hosts[0])) is not None
                and is_loopback(named["name"])
            ):
                return None
            return ApiError(
                403,
                f"without {KEY_VARIABLE} only requests to a loopback address are answered; set"
                " a key",
                "forbidden_host",
            )
        given = [value for name, value in headers if name == b"authorization"]
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        right = hmac.compare_digest(token.strip(), self.key.encode())
        return (
            None
            if right and scheme.lower() == b"bearer"
            else ApiError(
                401, "a bearer key is needed: Authorization: Bearer KEY", "invalid_api_key"
            )
        )

    def _refuse_large(self, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
        """By what the client says of the body's size, before any of it is read."""
        sizes = [value for name, value in headers if name == b"content-length"]
        if any(size.isdigit() and int(size[:20]) > self.largest_body for size in sizes):
            return ApiError(
                413, f"the body is above {self.largest_body:,} bytes; send less", "refused"
            )
        return None


class OwnRoutesClosed:
    """Serve's proxies answer `/-/healthz` and `/-/routes` (the applications' names) to anybody.
    Behind this they do not."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path", "").startswith("/-/"):
            await _refusal(ApiError(404, "no such path", "not_found"))(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def close_own_routes() -> list[Middleware]:
    """For RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=asyncrl.serving.http.close_own_routes, in
    the environment of `ray start`."""
    return [Middleware(OwnRoutesClosed)]


def _bounded(receive: Callable[[], Awaitable[Any]], largest: int) -> Callable[[], Awaitable[Any]]:
    """`receive`, up to the largest body."""
    size = 0

    async def counted() -> Any:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > largest:
            raise HTTPException(413, f"the body is above {largest:,} bytes; send less")
        return message

    return counted


async def _json(request: Request) -> Any:
    """The body. A page in a browser may send other types than JSON to any address unasked."""
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
        return json.loads(await request.body(), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError):
        raise ApiError(
            400, "the body is not JSON; send an object in JSON", "invalid_body"
        ) from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. A repeated field is refused: readers disagree about which one counts."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        name = next(name for place, (name, _) in enumerate(pairs) if name in dict(pairs[:place]))
        raise ApiError(
            400, f"{printable(name)} appears twice in one object; send it once", "invalid_body"
        )
    return tree


def _refused_by_fastapi(error: Any) -> ApiError:
    """An unknown path, another method, a large body."""
    if error.status_code == 404:
        return ApiError(404, f"no such path; there are {', '.join(PATHS)}", "not_found")
    if error.status_code == 405:
        return ApiError(
            405,
            "another method is needed: POST for completions, GET for the others",
            "method_not_allowed",
        )
    return ApiError(error.status_code, str(error.detail), "refused")


def _refusal(error: ApiError) -> JSONResponse:
    return JSONResponse(
        error.body(),
        error.status,
        headers={"WWW-Authenticate": "Bearer"} if error.status == 401 else None,
    )
