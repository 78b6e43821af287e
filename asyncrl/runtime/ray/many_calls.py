"""Many calls in one message: a process runs them as tasks, and hands out what has ended, many
answers at once. So a remote call's cost is shared, and no short call waits for a long one."""

from __future__ import annotations

import asyncio
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Generic, TypeAlias, TypeVar

Key = TypeVar("Key")
Answer = TypeVar("Answer")
Answers: TypeAlias = "list[tuple[Key, Answer | Exception]]"
"""The key of a call that has ended, and its result or its exception."""


def settle(future: asyncio.Future[Answer], answer: Answer | BaseException) -> None:
    """Give a future its result or its exception, unless it is done."""
    if future.done():
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)


class Calls(Generic[Key, Answer]):
    """Calls under way, by key, and answers that have not been handed over. Use it on one event
    loop."""

    def __init__(self) -> None:
        self.life = uuid.uuid4().hex
        """Differs in a restarted process."""
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._ended: Answers[Key, Answer] = []
        self._handed_over = 0
        """Answers that the reader has received."""
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Calls under way."""
        return len(self._tasks)

    def start(self, key: Key, call: Callable[[], Awaitable[Answer]]) -> None:
        """Run a call. One under the same key is canceled."""
        self.cancel([key])
        task = asyncio.create_task(self._run(key, call))
        self._tasks[key] = task

    def cancel(self, keys: Iterable[Key]) -> None:
        """Cancel calls, which then have no answer. Unknown keys are ignored."""
        for key in keys:
            if (task := self._tasks.pop(key, None)) is not None:
                task.cancel()
        self._changed.set()

    async def close(self) -> None:
        """Cancel all calls and wait for their ends."""
        tasks = list(self._tasks.values())
        self.cancel(list(self._tasks))
        await asyncio.gather(*tasks, return_exceptions=True)

    async def ended(
        self, life: str = "", received: int = 0
    ) -> tuple[str, int, Answers[Key, Answer]]:
        """Wait for answers. Does not raise: an exception of a call is its answer.

        A reader passes what the last call returned. Answers are kept until then, so none is lost
        with a message.

        Returns:
            `life`, the number of answers so far, and all answers that the reader has not received.
            A reader that does not know this `life` gets it at once, without answers. So a reader
            learns of a restart.
        """
        if life != self.life:
            return self.life, self._handed_over, []
        del self._ended[: max(0, received - self._handed_over)]
        self._handed_over = max(self._handed_over, received)
        while not self._ended:
            self._changed.clear()
            await self._changed.wait()
        return self.life, self._handed_over + len(self._ended), list(self._ended)

    async def until_all_ended(self) -> AsyncIterator[Answers[Key, Answer]]:
        """Yield answers as they come, until no call is under way. Does not raise."""
        while self._tasks or self._ended:
            if self._ended:
                answers, self._ended = self._ended, []
                yield answers
            else:
                self._changed.clear()
                await self._changed.wait()

    async def _run(self, key: Key, call: Callable[[], Awaitable[Answer]]) -> None:
        answer: Answer | Exception
        try:
            answer = await call()
        except asyncio.CancelledError:
            if self._tasks.get(key) is not asyncio.current_task():
                raise
            # Something that the call awaited was canceled. The reader still needs an answer.
            answer = RuntimeError("a part of the call was canceled")
        except Exception as error:
            # Another process raises it, without this one's stack.
            error.add_note("".join(traceback.format_exception(error)))
            answer = error.with_traceback(None)
        if self._tasks.get(key) is asyncio.current_task():
            del self._tasks[key]
            self._ended.append((key, answer))
            self._changed.set()
