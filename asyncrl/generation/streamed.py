"""One completion whose text is heard while a replica samples it. If the replica dies, another one
continues from the tokens that have come."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from asyncrl.contracts.errors import StaleReplicaError
from asyncrl.contracts.messages import Accepted, Generated, GenerateRequest, StreamPiece
from asyncrl.contracts.rows import Completion, VersionSpan
from asyncrl.runtime.ray.serve_calls import Handle


class StreamedCompletion:
    """A completion of a request with n = 1, as far as it has come."""

    def __init__(
        self, handle: Handle, request: GenerateRequest, heard: Callable[[str], None]
    ) -> None:
        """
        Args:
            heard: called with each new text.
        """
        self._streaming = handle.options(stream=True)
        self._request, self._heard = request, heard
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] = []
        self._text = ""
        self._started_at: float | None = None

    async def ask(self, left_s: float, tries: int) -> Generated:
        """Sample the rest at one replica, and return the whole. After an error, what has come is
        kept and the next call continues from there. Canceling the call drops the request.

        Args:
            left_s: seconds until the request's deadline.
            tries: see `GenerateRequest.tries`.

        Raises:
            StaleReplicaError: the replica has ended, or cannot answer now.
            Exception: what the replica, Serve or Ray raised.
        """
        began, version = len(self._ids), 0
        response: Any = self._streaming.stream_turn.remote(self._rest(left_s, tries))
        said = ""
        try:
            async for item in response:
                if isinstance(item, Accepted):
                    version = item.version
                    self._started_at = self._started_at or item.at
                elif isinstance(item, StreamPiece):
                    self._ids += item.tokens.ids
                    self._logprobs += [one for one in item.tokens.logprobs if one is not None]
                    said += item.text
                    self._say(said)
                else:
                    self._say(item.completions[0].text)
                    return self._joined(began, item)
            raise StaleReplicaError("a replica ended before its answer")
        except BaseException as error:
            # vLLM tells the versions of tokens only at the end. The version at the start is the
            # oldest that they can have.
            if len(self._ids) > began:
                self._spans.append(VersionSpan(version, began, len(self._ids)))
            with contextlib.suppress(Exception):
                response.cancel()
            if isinstance(error, asyncio.CancelledError) and not _is_canceled():
                raise StaleReplicaError("a replica canceled the request") from None
            raise

    def _rest(self, left_s: float, tries: int) -> GenerateRequest:
        """The request for the tokens that have not come."""
        request, had = self._request, len(self._ids)
        seed = request.seed
        if had and seed is not None:
            # The draws of the first tokens must not repeat.
            digest = hashlib.blake2b(f"{seed}:{had}".encode(), digest_size=6).digest()
            seed = int.from_bytes(digest, "big")
        least = request.min_weights
        if least is not None and self._spans:
            # A completion never goes back to older weights.
            least = replace(least, version=max(least.version, self._spans[-1].version))
        return replace(
            request,
            min_weights=least,
            prompt_ids=(*request.prompt_ids, *self._ids),
            max_tokens=request.max_tokens - had,
            seed=seed,
            deadline_s=left_s,
            tries=tries,
            continued=request.continued + had,
        )

    def _say(self, whole: str) -> None:
        """Pass on what is new of the completion's text so far."""
        new = whole[len(self._text) :]
        if new:
            self._text += new
            self._heard(new)

    def _joined(self, began: int, last: Generated) -> Generated:
        """The whole completion, whose tokens from `began` on the last replica made."""
        (rest,) = last.completions
        spans = list(self._spans)
        for span in rest.versions:
            moved = VersionSpan(span.version, span.start + began, span.end + began)
            if spans and spans[-1].version == moved.version:
                moved = replace(moved, start=spans.pop().start)
            spans.append(moved)
        completion = Completion(
            (*self._ids[:began], *rest.token_ids),
            (*self._logprobs[:began], *rest.logprobs),
            tuple(spans),
            rest.finish_reason,
            self._text,
        )
        return replace(
            last,
            completions=(completion,),
            started_at=last.started_at if self._started_at is None else self._started_at,
        )


def _is_canceled() -> bool:
    """Whether the caller has canceled the task, and not the replica its answer."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
