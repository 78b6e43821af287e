"""The HTTP routes of a standing generator: `/v1/completions`, `/v1/models`, `/health`, and nothing else. Weights have none.

    guard (key, host, size) → FastAPI → a replica

Knows no Serve: what answers is a small protocol, so that the routes can be tried without an engine.
"""

# No postponed annotations here: FastAPI reads those of the routes.

import asyncio
import hmac
import ipaddress
import json
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware import Middleware

from asyncrl.generation.openai import ApiError, ServedModel, answer, check_name, model_list, parse, printable, to_request, weights
from asyncrl.generation.protocol import Generated, GenerateRequest, GenerationTimeout, InvalidRequest, StaleReplica, Standing

__all__ = ["KEY_VARIABLE", "Served", "api_key", "close_own_routes", "is_loopback", "refuse_open_host", "routes"]

KEY_VARIABLE = "ASYNCRL_API_KEY"
"""Environment variable with the bearer key, in the process that answers."""

HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[^\s\[\]:@/]+)(?::[0-9]{1,5})?")
"""A Host header: a name or address, and perhaps a port. Nothing may follow the brackets of an IPv6 address."""

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

    async def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    async def generate(self, request: GenerateRequest) -> Generated:
        """Raises StaleReplica or GenerationTimeout."""
        ...

    async def standing(self) -> Standing: ...

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
        raise ValueError(f"{KEY_VARIABLE} is set, and is empty or has spaces around it or characters other than printable ASCII; set a key, or unset it")
    return key


def is_loopback(host: str) -> bool:
    """Whether an address or name is this machine's alone: `localhost`, 127.0.0.0/8, ::1."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def refuse_open_host(host: str | None, key: str | None, nodes: int = 1) -> None:
    """Raise RuntimeError if HTTP is bound to a host that others reach, without a key. `host` None: nothing is bound.

    Args:
        nodes: of the cluster. On several, a key that only some of them know would be one that half of the requests need.
    """
    if key is None and host is not None and nodes > 1:
        raise RuntimeError(f"this node has no {KEY_VARIABLE}, and the cluster has {nodes} nodes; set the same one on every node, where Ray is started")
    if key is None and host is not None and not is_loopback(host):
        raise RuntimeError(
            f"http_options.host = {host!r} is not loopback and {KEY_VARIABLE} is not set, so anybody could use the generators; set http_options.host: "
            f"127.0.0.1, or set {KEY_VARIABLE} where Ray is started"
        )


def routes(served: Served, key: str | None) -> FastAPI:
    """The application. With a key every path wants it, unknown ones too; without, only requests addressed to loopback are answered."""
    app = FastAPI(title="asyncrl", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    started = int(time.time())
    encoding = asyncio.Semaphore(ENCODES_AT_ONCE)

    @app.post("/v1/completions")
    async def completions(request: Request) -> JSONResponse:
        body = parse(await _json(request), served.model)
        check_name(body, served.model)
        if isinstance(body.prompt, str):
            async with encoding:
                ids = await served.encode(body.prompt)
        else:
            ids = body.prompt
        asked = to_request(body, ids, served.model)
        generated = await _while_connected(request, served.generate(asked))
        return JSONResponse(answer(generated, asked, served.model, await served.standing(), f"cmpl-{uuid.uuid4().hex}", int(time.time())))

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse(model_list(served.model, await served.standing(), started))

    @app.get("/health")
    async def health() -> JSONResponse:
        try:
            await served.check_health()
        except RuntimeError:
            raise ApiError(503, "the generator is broken and will be replaced; try again", "unavailable") from None
        return JSONResponse({"status": "ok", "model": served.model.name, **weights(await served.standing())})

    app.add_exception_handler(ApiError, lambda request, error: _refusal(error))
    app.add_exception_handler(StarletteHTTPException, lambda request, error: _refusal(_as_api_error(error)))
    app.add_exception_handler(StaleReplica, lambda request, error: _refusal(ApiError(503, "no replica can answer now; try again", "unavailable")))
    app.add_exception_handler(InvalidRequest, lambda request, error: _refusal(ApiError(400, str(error), "invalid_value")))
    app.add_exception_handler(GenerationTimeout, lambda request, error: _refusal(ApiError(504, f"{error}; ask for less", "timeout")))
    app.add_exception_handler(Exception, lambda request, error: _refusal(ApiError(500, "the generator failed; see its log", "internal_error")))
    app.add_middleware(Guard, key=key, largest_body=min(LARGEST_BODY, served.model.largest_body))
    return app


class Guard:
    """In front of everything: the key, or without one the host that a request is addressed to; and the size of its body."""

    def __init__(self, app: Callable[..., Awaitable[None]], key: str | None, largest_body: int = LARGEST_BODY) -> None:
        self.app, self.key, self.largest_body = app, key, largest_body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif (refusal := self._refuse(scope["headers"]) or self._refuse_large(scope["headers"])) is not None:
            await _refusal(refusal)(scope, receive, send)
        else:
            await self.app(scope, _bounded(receive, self.largest_body), send)

    def _refuse(self, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
        if self.key is None:
            # A page in a browser on this machine could reach us under a name of its own that it points here.
            hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
            if len(hosts) == 1 and (named := HOST.fullmatch(hosts[0])) is not None and is_loopback(named["name"]):
                return None
            return ApiError(403, f"without {KEY_VARIABLE} only requests to a loopback address are answered; set a key", "forbidden_host")
        given = [value for name, value in headers if name == b"authorization"]
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        right = hmac.compare_digest(token.strip(), self.key.encode())
        return None if right and scheme.lower() == b"bearer" else ApiError(401, "a bearer key is needed: Authorization: Bearer KEY", "invalid_api_key")

    def _refuse_large(self, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
        """By what the client says of the body's size, before any of it is read."""
        sizes = [value for name, value in headers if name == b"content-length"]
        if any(size.isdigit() and int(size[:20]) > self.largest_body for size in sizes):
            return ApiError(413, f"the body is above {self.largest_body:,} bytes; send less", "refused")
        return None


class OwnRoutesClosed:
    """Serve's proxies answer `/-/healthz` and `/-/routes` (the applications' names) to anybody. Behind this they do not."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path", "").startswith("/-/"):
            await _refusal(ApiError(404, "no such path", "not_found"))(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def close_own_routes() -> list[Middleware]:
    """For RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=asyncrl.generation.http.close_own_routes, in the environment of `ray start`."""
    return [Middleware(OwnRoutesClosed)]


async def _while_connected(request: Request, work: Awaitable[Generated]) -> Generated:
    """The work's result. It is cancelled as soon as the client is gone, so that its KV cache is free for others."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(CLIENT_LEFT, "the client has left", "client_left")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    message = await request.receive()
    while message["type"] != "http.disconnect":
        message = await request.receive()


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
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "Content-Type is not application/json; set it", "invalid_content_type")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "Content-Encoding is not identity; send the body uncompressed", "invalid_content_encoding")
    try:
        return json.loads(await request.body(), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON; send an object with model and prompt", "invalid_body") from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Of a field that stands twice some readers take the first and some the last."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        name = next(name for place, (name, _) in enumerate(pairs) if name in dict(pairs[:place]))
        raise ApiError(400, f"{printable(name)} stands twice in one object; send it once", "invalid_body")
    return tree


def _as_api_error(error: Any) -> ApiError:
    """FastAPI's own refusals: an unknown path, another method, a large body."""
    if error.status_code == 404:
        return ApiError(404, "no such path; there are /v1/completions, /v1/models and /health", "not_found")
    if error.status_code == 405:
        return ApiError(405, "another method is needed: POST for /v1/completions, GET for the others", "method_not_allowed")
    return ApiError(error.status_code, str(error.detail), "refused")


def _refusal(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, headers={"WWW-Authenticate": "Bearer"} if error.status == 401 else None)
