"""Error answers in OpenAI's format, as the body of an HTTP answer or an event of a stream."""

from __future__ import annotations

import logging

from asyncrl.contracts.errors import GenerationTimeoutError, InvalidRequestError, StaleReplicaError

__all__ = ["ApiError", "as_api_error", "printable"]

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """An error answer: HTTP status, a one-line message, OpenAI's code, and the invalid field."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, object]:
        """The error in OpenAI's format."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


def as_api_error(error: Exception) -> ApiError:
    """Convert the exception of a failed request. The message of an unexpected exception only goes
    to the log, because it may contain private data."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, StaleReplicaError):
        return ApiError(503, "no replica can answer now; try again", "unavailable")
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), "invalid_value")
    if isinstance(error, GenerationTimeoutError):
        return ApiError(504, f"{error}; request fewer tokens", "timeout")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed; see its log", "internal_error")


def printable(name: str) -> str:
    """The first 64 characters of a client's name, without control characters."""
    return "".join(character if character.isprintable() else "\ufffd" for character in name[:64])
