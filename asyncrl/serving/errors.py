"""Answers other than 200, in OpenAI's form: the body of an HTTP answer, or an event of a stream."""

from __future__ import annotations

import logging
from typing import Any

from asyncrl.contracts.errors import GenerationTimeoutError, InvalidRequestError, StaleReplicaError

__all__ = ["ApiError", "as_api_error", "printable"]

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """An answer other than 200: HTTP status, one line for people, OpenAI's type and code, and the
    field that it is about."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        """OpenAI's form of it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of a failed generation. An unforeseen failure goes to the log, and its
    words to nobody else."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, StaleReplicaError):
        return ApiError(503, "no replica can answer now; try again", "unavailable")
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), "invalid_value")
    if isinstance(error, GenerationTimeoutError):
        return ApiError(504, f"{error}; ask for less", "timeout")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the generator failed; see its log", "internal_error")


def printable(name: str) -> str:
    """The beginning of a name that a client gave, without what moves a terminal."""
    return "".join(character if character.isprintable() else "\ufffd" for character in name[:64])
