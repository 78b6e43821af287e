"""A teacher at a URL: an OpenAI-compatible server that returns the log-probs of given token ids.

The request is the same for asyncrl's own HTTP endpoint and for vLLM's server: `/completions` with
the ids as prompt, `echo`, `logprobs: 0` and no new tokens. Both then return their prompt_logprobs,
which are at temperature 1. Texts are never sent, because a server could tokenize them differently.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import httpx2
import numpy as np
import ray

from asyncrl.config.distillation import TeacherServer
from asyncrl.contracts.errors import TeacherError
from asyncrl.runtime.ray.objects import Actor

if TYPE_CHECKING:
    from asyncrl.contracts.offline_rows import Scored, TokenRow

logger = logging.getLogger(__name__)

RETRIED = (408, 409, 425, 429)
"""Statuses below 500 after which the same request may succeed."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
CALLS_AT_ONCE = 10_000
"""Calls that the actor accepts at once. `at_once` limits the requests to the server."""


def request_headers(server: TeacherServer) -> dict[str, str]:
    """The headers with the API key, if there is one.

    Raises:
        TeacherError: this process has no such environment variable.
    """
    if server.key_env is None:
        return {}
    if not (key := os.environ.get(server.key_env)):
        raise TeacherError(
            f"algorithm.distillation.teacher.key_env = {server.key_env!r}: this process has no such"
            " variable; set it on every node, or leave key_env out"
        )
    return {"Authorization": f"Bearer {key}"}


def scored_ids(answer: object, ids: Sequence[int]) -> list[float]:
    """Log-probs of ids[1:], in nats, from a server's answer to a request with echo.

    Raises:
        TeacherError: the answer has another number of log-probs than ids, or one that is NaN, Inf
            or above 0.
    """
    try:
        choices = answer["choices"] if isinstance(answer, Mapping) else None
        values = choices[0]["logprobs"]["token_logprobs"] if isinstance(choices, list) else None
    except (KeyError, IndexError, TypeError):
        values = None
    if not isinstance(values, list) or len(values) != len(ids):
        found = len(values) if isinstance(values, list) else "no"
        raise TeacherError(f"it returned {found} log-probs of {len(ids)} token ids")
    known = values[1:]
    if not all(isinstance(value, int | float) and _is_logprob(value) for value in known):
        raise TeacherError("it returned a log-prob that is missing, NaN, Inf or above 0")
    return [float(value) for value in known]


def _is_logprob(value: float) -> bool:
    return math.isfinite(value) and value <= 1e-3  # rounding may exceed 0


class UrlTeacher:
    """Scores rows at a server. It has the methods of
    `asyncrl.learning.frozen.reference.Reference`."""

    def __init__(self, server: TeacherServer) -> None:
        """
        Raises:
            TeacherError: the environment has no key.
        """
        self._settings = server
        at_once = server.at_once
        self._client = httpx2.AsyncClient(
            base_url=server.url.rstrip("/"),
            headers=request_headers(server),
            limits=httpx2.Limits(max_connections=at_once, max_keepalive_connections=at_once),
            timeout=None,
            # A proxy from the environment, or a redirect, could send the key elsewhere.
            trust_env=False,
            follow_redirects=False,
        )
        self._room = asyncio.Semaphore(at_once)
        self._model = server.model

    async def ready(self) -> None:
        """Return once the server has named its model.

        Raises:
            TeacherError: it does not answer in time.
        """
        await self._named()

    async def logprobs(
        self, rows: Sequence[TokenRow], scored: Scored | None = None
    ) -> list[np.ndarray]:
        """Log-probs [C] float32 of each row's C second ids, given its first, in nats at temperature
        1. They are NaN for a row that the server did not score.

        Args:
            scored: which of each row's second ids get one. None: all of them.

        Raises:
            TeacherError: the server scored no row that has second ids. The message says why.
        """
        found = await asyncio.gather(*(self._row(row) for row in rows))
        reasons = [reason for _, reason in found if reason is not None]
        if reasons and len(reasons) == sum(bool(len(second)) for _, second in rows):
            raise TeacherError(reasons[-1])
        if reasons:
            logger.warning(
                "the teacher at %s scored %d of %d rows: %s",
                self._settings.url,
                len(rows) - len(reasons),
                len(rows),
                reasons[-1],
            )
        values = [of_row for of_row, _ in found]
        if scored is None:
            return values
        return [
            of_row[np.asarray(mask, dtype=bool)]
            for of_row, mask in zip(values, scored, strict=True)
        ]

    async def _row(self, row: TokenRow) -> tuple[np.ndarray, str | None]:
        """The log-probs of a row, and why there are none."""
        first, second = ([int(token) for token in ids] for ids in row)
        if not second:
            return np.zeros(0, np.float32), None
        try:
            async with self._room:  # its time begins with its request, not in the queue
                values = await self._score([*first, *second])
            return np.asarray(values[len(first) - 1 :], np.float32), None
        except TeacherError as error:
            return np.full(len(second), np.nan, np.float32), str(error)

    async def _score(self, ids: list[int]) -> list[float]:
        settings, reason = self._settings, "no answer"
        try:
            async with asyncio.timeout(settings.timeout_s):
                for retry in range(settings.retries + 1):
                    if retry:
                        pause = min(FIRST_PAUSE_S * 2 ** (retry - 1), LONGEST_PAUSE_S)
                        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                    try:
                        return scored_ids(await self._ask(ids), ids)
                    except (httpx2.RequestError, ValueError, RecursionError, _BusyError) as error:
                        reason = f"{type(error).__name__}: {error}"
        except TimeoutError:
            reason = f"more than timeout_s = {settings.timeout_s:g} s (last: {reason})"
        raise TeacherError(reason)

    async def _ask(self, ids: list[int]) -> object:
        body = {"model": await self._named(), "prompt": ids, "max_tokens": 0}
        response = await self._client.post(
            "/completions", json={**body, "echo": True, "logprobs": 0}
        )
        if response.status_code >= 500 or response.status_code in RETRIED:
            raise _BusyError(f"status {response.status_code}")
        if response.status_code != 200:
            raise TeacherError(
                f"it refuses requests with status {response.status_code}: {response.text[:200]!r}"
            )
        answer: object = response.json()
        return answer

    async def _named(self) -> str:
        """The model's name in requests."""
        if self._model is None:
            try:
                async with asyncio.timeout(self._settings.timeout_s):
                    answer = (await self._client.get("/models")).json()
                self._model = str(answer["data"][0]["id"])
            except (
                httpx2.HTTPError,
                TimeoutError,
                KeyError,
                IndexError,
                TypeError,
                ValueError,
            ) as error:
                raise TeacherError(
                    f"its /models cannot be read ({type(error).__name__}: {error}); set"
                    " algorithm.distillation.teacher.model"
                ) from None
        return self._model


class _BusyError(Exception):
    """The server cannot answer now; the request may be sent again."""


def start_teacher(server: TeacherServer) -> Actor:
    """Start a Ray actor of `UrlTeacher`. If it dies, Ray restarts it and repeats the calls."""
    remote: Actor = ray.remote(UrlTeacher)
    options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    return remote.options(**options, max_concurrency=CALLS_AT_ONCE).remote(server)
