"""Error answers in OpenAI's format, as the body of an HTTP answer or an event of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from starlette.exceptions import HTTPException

CLIENT_LEFT = 499
"""Status code when the client disconnects before the answer, as in nginx."""


class ApiError(Exception):
    """An error answer.

    Args:
        status: of HTTP. 409: a session has ended, or may take no more turns.
        message: one line.
        code: for programs, such as `context_length_exceeded` or `session_closed`.
        param: the field of the body that is wrong.
        more: further fields for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.more = status, code, param, more

    def body(self) -> dict[str, object]:
        """The error in OpenAI's format."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        shown = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": {**shown, **self.more}}


def server_failed() -> ApiError:
    """The answer to a request that failed unexpectedly. It does not say how, because the message
    of an exception may contain private data."""
    return ApiError(500, "the server failed; see its log", "internal_error")


def refused(error: Exception, paths: Sequence[str], methods: str) -> ApiError:
    """The answer to what Starlette or FastAPI refuses: an unknown path, a wrong method or a large
    body.

    Args:
        paths: those of the application.
        methods: which HTTP methods to use.
    """
    assert isinstance(error, HTTPException)  # registered for no other class
    if error.status_code == 404:
        return ApiError(404, f"no such path; the paths are {', '.join(paths)}", "not_found")
    if error.status_code == 405:
        return ApiError(405, f"method not allowed; {methods}", "method_not_allowed")
    return ApiError(error.status_code, str(error.detail), "refused")


def printable(name: str) -> str:
    """The first 64 characters of a client's name, without control characters."""
    return "".join(character if character.isprintable() else "\ufffd" for character in name[:64])
