"""Error answers in the forms of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import logging
from typing import Any

from asyncrl.contracts.errors import GenerationTimeoutError, InvalidRequestError, StaleReplicaError
from asyncrl.sessions.answers import (
    ContextTooLongError,
    SessionClosedError,
    TurnDeadlineError,
    TurnsExceededError,
)
from asyncrl.sessions.requests import UnsupportedError
from asyncrl.text.chat_messages import MessagesError
from asyncrl.web.connection import ClientLeftError
from asyncrl.web.errors import CLIENT_LEFT, ApiError, server_failed
from asyncrl.web.events import Event

logger = logging.getLogger(__name__)

ANTHROPIC = "/v1/messages"
"""Where the paths of Anthropic's API begin."""
RESPONSES = "/v1/responses"
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""HTTP status → the type of an error of Anthropic's API."""
TOO_LONG = "context_length_exceeded"
TOO_LONG_ANTHROPIC = "prompt is too long: "
TOO_LONG_OPENAI = "this model's maximum context length is exceeded, the prompt is too long: "
"""Agents find a context that is too long by these words. They do not all read the code."""
OTHERS: tuple[tuple[type[Exception], int, str], ...] = (
    (TurnDeadlineError, 409, "turn_deadline"),
    (SessionClosedError, 409, "session_closed"),
    (TurnsExceededError, 409, "turns_exceeded"),
    (ContextTooLongError, 400, TOO_LONG),
    (MessagesError, 400, "invalid_value"),
    (InvalidRequestError, 400, "invalid_value"),
)
"""Errors of a model, their HTTP status and their code."""


def as_api_error(error: Exception) -> ApiError:
    """Convert the exception of a failed request. The message of an unexpected exception only goes
    to the log, because it may contain private data."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UnsupportedError):
        return ApiError(400, str(error), error.code, error.param)
    for kind, status, code in OTHERS:
        if isinstance(error, kind):
            return ApiError(status, " ".join(str(error).split()), code)
    if isinstance(error, ClientLeftError):
        return ApiError(CLIENT_LEFT, "the client has left", "client_left")
    if isinstance(error, StaleReplicaError):
        return ApiError(503, "no replica can answer now; try again", "unavailable")
    if isinstance(error, GenerationTimeoutError):
        return ApiError(504, f"{error}; request fewer tokens", "timeout")
    if isinstance(error, RecursionError):
        return ApiError(400, "the body is nested too deep; flatten it", "invalid_body")
    logger.error("a request failed", exc_info=error)
    return server_failed()


def error_body(path: str, error: ApiError) -> dict[str, Any]:
    """The body of an error answer in the form of this path's API."""
    if path.startswith(ANTHROPIC):
        default = "invalid_request_error" if error.status < 500 else "api_error"
        before = TOO_LONG_ANTHROPIC if error.code == TOO_LONG else ""
        kind = ANTHROPIC_TYPES.get(error.status, default)
        shown = {"type": kind, "message": f"{before}{error}", "code": error.code, **error.more}
        return {"type": "error", "error": shown}
    before = TOO_LONG_OPENAI if error.code == TOO_LONG else ""
    message = f"{before}{error}"
    return ApiError(error.status, message, error.code, error.param, error.more).body()


def error_event(path: str, error: ApiError, sent: int) -> Event:
    """The last event of a stream that failed.

    Args:
        sent: events before it.
    """
    body = error_body(path, error)
    if path.startswith(ANTHROPIC):
        return Event(body, "error")
    if path.startswith(RESPONSES):
        parts = {"code": error.code, "message": str(error), "param": error.param}
        return Event({"type": "error", "sequence_number": sent, **parts, **body}, "error")
    return Event(body)
