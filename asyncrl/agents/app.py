"""The HTTP routes that agents use. They speak the APIs of OpenAI and Anthropic.

key → session → body → dialect → `AgentSession.chat` → answer or events
"""

# No postponed annotations here: FastAPI evaluates those of the routes.

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from asyncrl.agents.contract import AgentSession, AgentSessions, Dialect, Part, Silent
from asyncrl.agents.dialects.chat import Chat, ChatAnswer, ChatBody
from asyncrl.agents.dialects.completions import (
    Completions,
    CompletionsAnswer,
    CompletionsBody,
)
from asyncrl.agents.dialects.fields import ErrorBody
from asyncrl.agents.dialects.messages import (
    AnthropicErrorBody,
    Messages,
    MessagesAnswer,
    MessagesBody,
)
from asyncrl.agents.dialects.responses import Responses, ResponsesAnswer, ResponsesBody
from asyncrl.agents.errors import as_api_error, error_body, error_event
from asyncrl.agents.heard import CertainText, parts_of
from asyncrl.agents.retries import RequestNames
from asyncrl.agents.served import session_closed
from asyncrl.contracts.heard import Heard
from asyncrl.runtime.clock import steady_time
from asyncrl.sessions.answers import Answer, ChatRequest, SessionClosedError
from asyncrl.text.template import Message
from asyncrl.web.connection import ClientLeftError, while_connected
from asyncrl.web.errors import CLIENT_LEFT, ApiError, refused
from asyncrl.web.events import EventStream

LARGEST_BODY = 16 << 20
"""Upper limit of a request body, in bytes."""
MODELS = "/v1/models"
ERRORS = (400, 401, 404, 409, 413, 415, 500)
MODEL_ERRORS = (401, 404, 409, 500)
REFS = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Api:
    """One of the APIs: its converter, and what the schema says of it."""

    dialect: Callable[[object, dict[str, list[Message]]], Dialect]
    body: type[BaseModel]
    answer: type[BaseModel]
    error: type[BaseModel] = ErrorBody


APIS = {
    "/v1/chat/completions": Api(Chat, ChatBody, ChatAnswer),
    "/v1/completions": Api(Completions, CompletionsBody, CompletionsAnswer),
    "/v1/responses": Api(Responses, ResponsesBody, ResponsesAnswer),
    "/v1/messages": Api(Messages, MessagesBody, MessagesAnswer, AnthropicErrorBody),
}


def agent_app(sessions: AgentSessions, largest_body: int = LARGEST_BODY) -> FastAPI:
    """The application that serves sessions to agents.

    Args:
        largest_body: bytes of a request. A larger one gets 413.
    """
    app = FastAPI(title="asyncrl", docs_url=None, redoc_url=None, redirect_slashes=False)
    server = _Server(sessions, largest_body)

    def answered(api: Api) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def answer(request: Request) -> Response:
            return await server.safely(request, server.answer(request, api))

        return answer

    for path, api in APIS.items():
        name = path.removeprefix("/v1/").replace("/", "_")
        app.post(path, name=name, operation_id=name, **_described(api))(answered(api))

    @app.get(MODELS, operation_id="models", responses=_errors(ErrorBody, MODEL_ERRORS))
    async def models(request: Request) -> Response:
        return await server.safely(request, server.models(request, None))

    @app.get(
        MODELS + "/{name:path}", operation_id="model", responses=_errors(ErrorBody, MODEL_ERRORS)
    )
    async def model(request: Request, name: str) -> Response:
        return await server.safely(request, server.models(request, name))

    app.add_exception_handler(StarletteHTTPException, _refused_by_fastapi)
    app.openapi = lambda: _schema(app)  # type: ignore[method-assign]
    return app


class _Server:
    """Answers requests from the sessions of their keys."""

    def __init__(self, sessions: AgentSessions, largest_body: int) -> None:
        self._sessions, self._largest_body = sessions, largest_body
        self._names = RequestNames()

    async def safely(self, request: Request, work: Awaitable[Response]) -> Response:
        """An error as an answer in the form of its API."""
        try:
            return await work
        except ClientLeftError:
            return Response(status_code=CLIENT_LEFT)
        except Exception as error:
            return _refusal(request.url.path, as_api_error(error))

    async def models(self, request: Request, name: str | None) -> Response:
        """One model of any name, or the list of models, for clients of both companies."""
        self._sessions.of(_key(request.headers))
        entry = _model(name or "policy")
        return JSONResponse(
            entry
            if name is not None
            else {
                "object": "list",
                "data": [entry],
                "has_more": False,
                "first_id": entry["id"],
                "last_id": entry["id"],
            }
        )

    async def answer(self, request: Request, api: Api) -> Response:
        """Answer one request with a body."""
        key = _key(request.headers)
        session = self._sessions.of(key)
        body = await _body(request, self._largest_body)
        dialect = api.dialect(_parsed(body), session.notes)
        session.override(dialect.overridden)
        name = self._names.key(key, request.url.path, request.headers, body)
        asked = replace(dialect.request, key=name)

        async def chat(heard: Heard | None) -> list[Answer]:
            return await self._chat(key, session, asked, heard)

        try:
            if not dialect.streams:
                answers = await while_connected(request.receive, chat(None))
                return JSONResponse(dialect.answer(answers))
            parts = parts_of(chat, _text_filters(asked))
            # What is wrong with the request still gets its own status code.
            first = await while_connected(request.receive, anext(parts))
        except ClientLeftError:
            self._names.left(name)
            raise
        path = request.url.path
        return EventStream(
            dialect.events(_again(first, parts)),
            parts,
            lambda error, sent: error_event(path, as_api_error(error), sent),
            lambda: self._names.left(name),
        )

    async def _chat(
        self, key: str, session: AgentSession, asked: ChatRequest, heard: Heard | None
    ) -> list[Answer]:
        """The answers. Raises ApiError, 409, if the session ends meanwhile."""
        try:
            return await session.chat(asked, heard)
        except (asyncio.CancelledError, SessionClosedError) as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the client has left
            self._sessions.of(key)  # raises ApiError with the session's end
            if isinstance(error, SessionClosedError):  # it goes on, but a turn took too long
                raise
        raise session_closed("closed")


def _text_filters(request: ChatRequest) -> list[CertainText] | None:
    """What holds back the text of each choice. A continued text is content only."""
    if request.prompt is not None:
        return None
    return [CertainText(bool(request.tools)) for _ in range(request.n)]


async def _again(
    first: Part | Silent, rest: AsyncGenerator[Part | Silent, None]
) -> AsyncIterator[Part]:
    if not isinstance(first, Silent):
        yield first
    async for part in rest:
        if not isinstance(part, Silent):
            yield part


def _key(headers: Mapping[str, str]) -> str:
    """The API key of a request. Empty if it has none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


async def _body(request: Request, largest: int) -> bytes:
    """The body of a request. Raises ApiError: 413, or 415; and ClientLeftError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "Content-Type is not application/json; set it", "invalid_type")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "the body is compressed; send it uncompressed", "invalid_encoding")
    size = request.headers.get("content-length", "")
    parts, total = [], int(size[:20]) if size.isascii() and size.isdigit() else 0
    too_large = ApiError(
        413, f"the body is above {largest:,} bytes; send fewer messages", "request_too_large"
    )
    if total > largest:
        raise too_large
    total = 0
    try:
        async for part in request.stream():
            total += len(part)
            if total > largest:
                raise too_large
            parts.append(part)
    except ClientDisconnect:  # while it sent the body
        raise ClientLeftError from None
    return b"".join(parts)


def _parsed(body: bytes) -> object:
    """The JSON of a body. Raises ApiError, 400."""
    try:
        tree: object = json.loads(body.decode(), parse_constant=_no_number)
        if b"\\ud" in body.lower():  # half of a surrogate pair is no text
            json.dumps(tree, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        problem = "has half of a surrogate pair" if "surrogates" in str(error) else "is not JSON"
        raise ApiError(400, f"the body {problem}; send a JSON object", "invalid_body") from None
    return tree


def _no_number(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _model(name: str) -> dict[str, Any]:
    """A model, as both companies describe one."""
    now = int(steady_time())
    return {
        "id": name,
        "object": "model",
        "created": now,
        "owned_by": "asyncrl",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }


def _refusal(path: str, error: ApiError) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.status == 409:
        headers["x-should-retry"] = "false"  # the official clients would retry it
    return JSONResponse(error_body(path, error), error.status, headers)


async def _refused_by_fastapi(request: Request, error: Exception) -> Response:
    """The answer to an unknown path or a wrong method."""
    methods = f"use GET for {MODELS}, and POST for other paths"
    response = _refusal(request.url.path, refused(error, (*APIS, MODELS), methods))
    allowed = getattr(error, "headers", None) or {}
    response.headers.update(allowed)
    return response


def _errors(kind: type[BaseModel], statuses: tuple[int, ...] = ERRORS) -> dict[int | str, Any]:
    return {status: {"model": kind} for status in statuses}


def _described(api: Api) -> dict[str, Any]:
    """What the schema says of a route. The route itself reads the body, because clients get errors
    in the form of their API."""
    body = {"schema": {"$ref": REFS.format(model=api.body.__name__)}}
    return {
        "responses": {
            200: {"model": api.answer, "content": {"text/event-stream": {}}},
            **_errors(api.error),
        },
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"application/json": body}},
            "security": [{"bearer": []}, {"key": []}],
        },
    }


def _schema(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI schema with the bodies of all routes."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version="1", routes=app.routes)
        _, bodies = models_json_schema(
            [(api.body, "validation") for api in APIS.values()], ref_template=REFS
        )
        components = schema.setdefault("components", {})
        known = components.setdefault("schemas", {})
        known.update({name: one for name, one in bodies["$defs"].items() if name not in known})
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        app.openapi_schema = schema
    return app.openapi_schema
