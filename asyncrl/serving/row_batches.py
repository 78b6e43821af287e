"""Batches the rows of concurrent requests, so that a forward pass is full and has little
padding."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

Row = Sequence[int]

MOST_PADDING = 0.25
"""Padding of a batch, as a share of its tokens, up to which a longer row joins it."""
FREE_PADDING = 512
"""Tokens of padding that cost less than another forward pass."""
WINDOW = 8
"""Full batches' worth of waiting rows that are sorted together. Later rows wait for these."""


def batches_of(lengths: Sequence[int], most: int, most_tokens: int) -> list[list[int]]:
    """The numbers of rows with these lengths, in batches of at most `most` rows, shortest rows
    first. Rows are padded to the longest of their batch, which has at most `most_tokens` tokens
    with its padding, or a single row."""
    batches: list[list[int]] = []
    tokens = 0
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[number]
        tokens += length
        padded = (len(batches[-1]) + 1) * length if batches else length
        padding = padded - tokens
        if (
            not batches
            or len(batches[-1]) == most
            or padded > most_tokens
            or padding > max(FREE_PADDING, MOST_PADDING * tokens)
        ):
            batches.append([])
            tokens = length
        batches[-1].append(number)
    return batches


class RowBatches:
    """Computes a score for each row of concurrent requests, in one thread. Use it on one event
    loop."""

    def __init__(
        self,
        compute: Callable[[Sequence[Row]], list[float]],
        most: int,
        most_tokens: int,
        wait_s: float,
    ) -> None:
        """
        Args:
            compute: returns the scores of at most `most` rows.
            most_tokens: see `batches_of`.
            wait_s: seconds that the first row waits for others.
        """
        self._compute, self._most, self._wait_s = compute, most, wait_s
        self._most_tokens = most_tokens
        self._waiting: deque[tuple[Row, asyncio.Future[float]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scores")
        self._work: asyncio.Task[None] | None = None

    async def scores(self, rows: Sequence[Row]) -> list[float]:
        """The scores of these rows. Rows that wait for their batch are dropped if the caller is
        canceled. Raises whatever `compute` raises for one of their batches."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in rows]
        self._waiting.extend(zip(rows, futures, strict=True))
        if self._work is None or self._work.done():
            self._work = loop.create_task(self._run())
        return list(await asyncio.gather(*futures))

    async def _run(self) -> None:
        """Compute until no row waits."""
        if len(self._waiting) < self._most:
            await asyncio.sleep(self._wait_s)
        while self._waiting:
            count = min(len(self._waiting), WINDOW * self._most)
            taken = [self._waiting.popleft() for _ in range(count)]
            lengths = [len(row) for row, _ in taken]
            for batch in batches_of(lengths, self._most, self._most_tokens):
                await self._some([taken[number] for number in batch])

    async def _some(self, batch: Sequence[tuple[Row, asyncio.Future[float]]]) -> None:
        wanted = [(row, future) for row, future in batch if not future.done()]
        if not wanted:
            return
        loop = asyncio.get_running_loop()
        try:
            scores = await loop.run_in_executor(
                self._thread, self._compute, [row for row, _ in wanted]
            )
        except Exception as error:
            for _, future in wanted:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), score in zip(wanted, scores, strict=True):
            if not future.done():
                future.set_result(score)
