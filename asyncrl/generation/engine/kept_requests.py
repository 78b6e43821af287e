"""Requests under `in_flight: keep`, where the KV cache outlives an update.

Siblings share the KV of their prompt, and a session's turns that of the turns before. A request
that waits in vLLM's queue finds its blocks only when it is scheduled. So every request has the
number of updates in its salt, and one without a token at an update is submitted again with the new
salt. After an update, only requests that already run have an older salt. They go on with old KV, as
`keep` says, and nobody finds what they add to the cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.generation.engine.outputs import tokens_so_far

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM


@dataclass(slots=True)
class _Request:
    """A request that may have no token yet."""

    coming: asyncio.Future[RequestOutput | None] | None = None
    """The next output of the request. None before the request is submitted."""
    has_tokens: bool = False
    again: bool = False
    """Whether the request must be submitted again."""


class KeptRequests:
    """The requests that are under way, by name. Use it on one event loop."""

    def __init__(self, opened: asyncio.Event) -> None:
        """
        Args:
            opened: set while the engine takes requests.
        """
        self._opened = opened
        self._requests: dict[str, _Request] = {}

    async def outputs(
        self, name: str, submit: Callable[[], AsyncGenerator[RequestOutput]]
    ) -> AsyncGenerator[RequestOutput]:
        """vLLM's outputs of a request. Closing the generator aborts the request. Raises as vLLM's
        generator and `submit` do.

        Args:
            submit: submits the request under this name, with the salt of this moment.
        """
        request = _Request()
        self._requests[name] = request
        outputs: AsyncGenerator[RequestOutput] | None = None
        try:
            while outputs is None or request.again:
                while not self._opened.is_set():
                    await self._opened.wait()
                request.again, outputs = False, submit()
                while (output := await _next(request, outputs)) is not None:
                    yield output
        finally:
            del self._requests[name]
            if request.coming is not None:
                request.coming.cancel()
                await asyncio.gather(request.coming, return_exceptions=True)
            if outputs is not None:
                await outputs.aclose()

    async def submit_again(self, llm: AsyncLLM) -> int:
        """After an update and before vLLM resumes: abort the requests without a token. They are
        submitted again once the engine takes requests. Returns how many they are."""
        processor = llm.output_processor
        again = [
            (name, request)
            for name, request in self._requests.items()
            if request.coming is not None
            and not request.coming.done()
            and not request.has_tokens
            and not any(
                tokens_so_far(processor.request_states[id])
                for id in processor.external_req_ids.get(name, ())
            )
        ]
        for name, request in again:
            request.again = True
            if name in processor.external_req_ids:
                await llm.abort(name)
            else:  # vLLM has not taken it yet
                assert request.coming is not None
                request.coming.cancel()
        ending = [request.coming for _, request in again if request.coming is not None]
        await asyncio.gather(*ending, return_exceptions=True)
        return len(again)


async def _next(request: _Request, outputs: AsyncGenerator[RequestOutput]) -> RequestOutput | None:
    """The next output; None if there is none, or the request must be submitted again."""
    request.coming = asyncio.ensure_future(anext(outputs, None))
    await asyncio.wait([request.coming])
    if request.again:
        await outputs.aclose()
        return None
    output = request.coming.result()
    request.has_tokens = output is not None
    return output
