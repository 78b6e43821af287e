"""The caller's side of `Generator.generate_many`. Requests that come at the same moment share a
Serve call, and each is answered as soon as it is done."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from asyncrl.contracts.errors import StaleReplicaError
from asyncrl.contracts.messages import Generated, GenerateRequest
from asyncrl.runtime.ray.many_calls import settle
from asyncrl.runtime.ray.serve_calls import Handle, ask_all

MOST_IN_CALL = 8
"""Requests of one Serve call, all of which go to one replica. Serve balances calls."""
GIVE_UP_S = 5.0
"""Seconds that replicas get to drop requests without a caller."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A request without an answer."""

    key: str
    request: GenerateRequest
    answer: asyncio.Future[Generated]


class SharedCalls:
    """Sends requests to the replicas of a Serve application. Use it on one event loop."""

    def __init__(
        self,
        handle: Handle,
        prefers: Callable[[GenerateRequest], str | None] = lambda request: None,
    ) -> None:
        """
        Args:
            prefers: the replica that a request should go to; None: any. Requests with different
                ones do not share a call.
        """
        self._prefers = prefers
        self._handle, self._streaming = handle, handle.options(stream=True)
        self._name, self._numbers = uuid.uuid4().hex, itertools.count()
        self._waiting: list[_Pending] = []
        self._given_up: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerateRequest) -> Generated:
        """The answer of one replica. Canceling the call drops the request there.

        Raises:
            StaleReplicaError: the replica has ended, or cannot answer now.
            GenerationTimeoutError: the replica did not answer within `request.deadline_s`.
            InvalidRequestError: the engine rejected the request.
            RuntimeError: the replica raised another error.
            Exception: what Serve or Ray raised.
        """
        loop = asyncio.get_running_loop()
        pending = _Pending(f"{self._name}-{next(self._numbers)}", request, loop.create_future())
        if not self._waiting:
            loop.call_soon(self._send)
        self._waiting.append(pending)
        return await pending.answer

    def _send(self) -> None:
        """Send what waits. The requests of a call have the same demands on a replica, so that the
        router can choose one for all of them."""
        waiting, self._waiting = self._waiting, []
        alike: dict[object, list[_Pending]] = {}
        for pending in waiting:
            if not pending.answer.done():
                request = pending.request
                demands = request.replica, request.min_weights, self._prefers(request)
                alike.setdefault(demands, []).append(pending)
        for some in alike.values():
            for first in range(0, len(some), MOST_IN_CALL):
                self._keep(asyncio.create_task(self._ask(some[first : first + MOST_IN_CALL])))

    async def _ask(self, requests: Sequence[_Pending]) -> None:
        """Call a replica, and give each request its answer."""
        left = {pending.key: pending for pending in requests}
        response: Any = None

        def drop(answer: asyncio.Future[Generated]) -> None:
            """Drop a request whose caller has gone, or the call if it was the last one."""
            if not answer.cancelled():
                return
            if response is not None and all(other.answer.done() for other in left.values()):
                _cancel(response)
            else:
                self._give_up([key for key, other in left.items() if other.answer is answer])

        for pending in requests:
            pending.answer.add_done_callback(drop)
        error: BaseException = StaleReplicaError("a replica ended before its answer")
        try:
            response = self._streaming.generate_many.remote(
                {pending.key: pending.request for pending in requests}
            )
            async for answers in response:
                for key, answer in answers:
                    settle(left.pop(key).answer, answer)
                # The replica may not have had the call yet when a request was given up.
                if gone := [key for key, other in left.items() if other.answer.done()]:
                    if len(gone) == len(left):
                        _cancel(response)
                        break
                    self._give_up(gone)
        except asyncio.CancelledError:
            # The replica is ending, and cancels its requests; or nobody waits for them any more.
            error = StaleReplicaError("a replica canceled the request")
        except Exception as raised:
            error = raised
            if response is not None:
                _cancel(response)
        for pending in left.values():
            settle(pending.answer, error)

    def _give_up(self, keys: Sequence[str]) -> None:
        if not self._given_up:
            asyncio.get_running_loop().call_soon(self._send_given_up)
        self._given_up += keys

    def _send_given_up(self) -> None:
        keys, self._given_up = self._given_up, []
        self._keep(asyncio.create_task(self._drop(keys)))

    async def _drop(self, keys: Sequence[str]) -> None:
        """Drop requests at whichever replica has them. One that cannot be told continues them until
        their deadlines."""
        with contextlib.suppress(RayError, RayServeException, TimeoutError):
            await ask_all(self._handle, "drop_requests", keys, timeout_s=GIVE_UP_S)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _cancel(response: Any) -> None:
    """Cancel a call. Ray raises an error of the call here again."""
    with contextlib.suppress(Exception):
        response.cancel()
