"""The HTTP routes that agents use. They speak the APIs of OpenAI and Anthropic.

key → session → body → dialect → `AgentSession.chat` → answer or events
"""

# No postponed annotations here: FastAPI evaluates those of the routes.

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from asyncrl.agents.contract import AgentSession, AgentSessions
from asyncrl.agents.retries import RequestNames
from asyncrl.agents.served import session_closed
from asyncrl.agents.streamed_text import HeardParts
from asyncrl.api.answering import answered
from asyncrl.api.chat import Chat, ChatAnswer, ChatBody
from asyncrl.api.completions import CompletionsAnswer, CompletionsBody, TextCompletions
from asyncrl.api.contract import Dialect
from asyncrl.api.fields import ErrorBody
from asyncrl.api.http import answer_unknown, body_of, model_entry, model_list, parsed, safely
from asyncrl.api.messages import AnthropicErrorBody, Messages, MessagesAnswer, MessagesBody
from asyncrl.api.responses import Responses, ResponsesAnswer, ResponsesBody
from asyncrl.contracts.text_listener import Heard
from asyncrl.runtime.clock import steady_time
from asyncrl.sessions.answers import Answer, ChatRequest, SessionClosedError
from asyncrl.text.chat_messages import Message

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
    "/v1/completions": Api(TextCompletions, CompletionsBody, CompletionsAnswer),
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

    def route(api: Api) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def answer(request: Request) -> Response:
            return await safely(request, server.answer(request, api))

        return answer

    for path, api in APIS.items():
        name = path.removeprefix("/v1/").replace("/", "_")
        app.post(path, name=name, operation_id=name, **_described(api))(route(api))

    @app.get(MODELS, operation_id="models", responses=_errors(ErrorBody, MODEL_ERRORS))
    async def models(request: Request) -> Response:
        return await safely(request, server.models(request, None))

    @app.get(
        MODELS + "/{name:path}", operation_id="model", responses=_errors(ErrorBody, MODEL_ERRORS)
    )
    async def model(request: Request, name: str) -> Response:
        return await safely(request, server.models(request, name))

    answer_unknown(app, (*APIS, MODELS), f"use GET for {MODELS}, and POST for other paths")
    app.openapi = lambda: _schema(app)  # type: ignore[method-assign]
    return app


class _Server:
    """Answers requests from the sessions of their keys."""

    def __init__(self, sessions: AgentSessions, largest_body: int) -> None:
        self._sessions, self._largest_body = sessions, largest_body
        self._names = RequestNames()

    async def models(self, request: Request, name: str | None) -> Response:
        """One model of any name, or the list of models, for clients of both companies."""
        self._sessions.of(_key(request.headers))
        entry = model_entry(name or "policy", int(steady_time()))
        return JSONResponse(entry if name is not None else model_list(entry))

    async def answer(self, request: Request, api: Api) -> Response:
        """Answer one request with a body."""
        key = _key(request.headers)
        session = self._sessions.of(key)
        body = await body_of(request, self._largest_body)
        name = self._names.key(key, request.url.path, request.headers, body)
        # In a thread: a large body takes long, and other requests go on meanwhile.
        dialect = await asyncio.to_thread(lambda: api.dialect(parsed(body), session.notes))
        session.override((*dialect.overridden, *dialect.unread))
        asked = replace(dialect.request, key=name)

        async def chat(heard: Heard | None) -> list[Answer]:
            return await self._chat(key, session, asked, heard)

        heard = HeardParts(chat, asked, dialect.streams)
        return await answered(
            request, dialect, heard.parts(), heard.head, lambda: self._names.left(name)
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


def _key(headers: Mapping[str, str]) -> str:
    """The API key of a request. Empty if it has none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


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
