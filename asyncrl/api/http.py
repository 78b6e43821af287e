"""Requests and errors of the HTTP servers."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Awaitable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from asyncrl.api.errors import as_api_error, error_body
from asyncrl.web.connection import ClientLeftError
from asyncrl.web.errors import ApiError, printable, refused


def path_of(scope: Scope) -> str:
    """The path of a request, without the prefix that Serve puts before an application's paths."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def safely(request: Request, work: Awaitable[Response]) -> Response:
    """An error as an answer in the form of its API."""
    try:
        return await work
    except Exception as error:
        return refusal(path_of(request.scope), as_api_error(error))


def refusal(path: str, error: ApiError) -> JSONResponse:
    """An error as the answer of this path."""
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.status == 409:
        headers["x-should-retry"] = "false"  # the official clients would retry it
    return JSONResponse(error_body(path, error), error.status, headers)


def answer_unknown(app: Starlette, paths: Sequence[str], methods: str) -> None:
    """Answer unknown paths and wrong methods in the form of their API.

    Args:
        paths: those of the application.
        methods: which HTTP methods to use.
    """

    async def answer(request: Request, error: Exception) -> Response:
        response = refusal(path_of(request.scope), refused(error, paths, methods))
        response.headers.update(getattr(error, "headers", None) or {})
        return response

    app.add_exception_handler(HTTPException, answer)


async def json_body(request: Request, largest: int) -> object:
    """The parsed body. Raises ApiError, and ClientLeftError."""
    return parsed(await body_of(request, largest))


async def body_of(request: Request, largest: int) -> bytes:
    """The body. Other content types than JSON are refused, because a browser lets any web page send
    them to this server. Raises ApiError: 413, or 415; and ClientLeftError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "Content-Type is not application/json; set it", "invalid_type")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(
            415, "Content-Encoding is not identity; send the body uncompressed", "invalid_encoding"
        )
    too_large = ApiError(
        413, f"the body is above {largest:,} bytes; send a smaller one", "request_too_large"
    )
    size = request.headers.get("content-length", "")
    if size.isascii() and size.isdigit() and int(size[:20]) > largest:
        raise too_large
    parts, total = [], 0
    try:
        async for part in request.stream():
            total += len(part)
            if total > largest:
                raise too_large
            parts.append(part)
    except ClientDisconnect:  # while it sent the body
        raise ClientLeftError from None
    return b"".join(parts)


def parsed(body: bytes) -> object:
    """The JSON of a body. Raises ApiError, 400."""
    try:
        tree: object = json.loads(
            body.decode(),
            parse_constant=_no_number,
            parse_float=_finite,
            object_pairs_hook=_without_repetition,
        )
        if b"\\ud" in body.lower():  # half of a surrogate pair is no text
            json.dumps(tree, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        problem = "has half of a surrogate pair" if "surrogates" in str(error) else "is not JSON"
        raise ApiError(400, f"the body {problem}; send a JSON object", "invalid_body") from None
    return tree


def _no_number(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:40]} is too large")
    return number


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, Any]:
    """A JSON object. A repeated field is refused, because parsers disagree on which one wins."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ApiError(
            400, f"{printable(name)} appears twice in one object; send it once", "invalid_body"
        )
    return tree


def model_entry(name: str, created: int, **more: object) -> dict[str, Any]:
    """A model, as both companies describe one.

    Args:
        created: Unix time, in seconds.
    """
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "asyncrl",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
        **more,
    }


def model_list(entry: dict[str, Any]) -> dict[str, Any]:
    """The list of one model, for clients of both companies."""
    ends = {"first_id": entry["id"], "last_id": entry["id"]}
    return {"object": "list", "data": [entry], "has_more": False, **ends}
