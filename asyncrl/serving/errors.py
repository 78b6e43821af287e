"""The errors of generation as error answers."""

from __future__ import annotations

import logging

from asyncrl.contracts.errors import GenerationTimeoutError, InvalidRequestError, StaleReplicaError
from asyncrl.web.errors import ApiError, server_failed

logger = logging.getLogger(__name__)


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
    return server_failed()
