"""Training prompts, streamed endlessly by Ray Data in the order of their ordinals.

Ordinals are attached before rows are streamed. So neither a retried read task nor a resume can
change which row an ordinal means.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow as pa

from asyncrl.contracts.rows import Prompt
from asyncrl.data.prompts import PromptReport, order_of
from asyncrl.data.rendering import Data, prompts_of, read_prompt_rows, render_table, with_ordinals
from asyncrl.data.sources import RowsByNumber
from asyncrl.data.spec import DataSpec
from asyncrl.runtime.ray.objects import broken_stream

ROWS_PER_BLOCK = 32
STREAM_BYTES = 512 << 10
"""Object store for unread prompts. The stream runs ahead only this far."""
WAITING_PROMPTS = 128
"""Most prompts that wait in this process."""
WAITING_BYTES = 256 << 20
"""Memory limit for waiting prompts, if all have the size of the largest row."""


def stream_ordinals(lowest: int, finished: frozenset[int]) -> Iterator[int]:
    """The ordinals from the frontier on: from `lowest`, the lowest unfinished one, without those in
    `finished`."""
    ordinal = lowest
    while True:
        if ordinal not in finished:
            yield ordinal
        ordinal += 1


def _stream_tables(
    data: Data, spec: DataSpec, report: PromptReport, lowest: int, finished: frozenset[int]
) -> Iterator[pa.Table]:
    """Raw rows with ordinal and epoch, in endless blocks. Runs in the read task, which keeps all
    rows in memory. Large rows make shorter blocks."""
    rows = RowsByNumber(read_prompt_rows(data, spec, "data.train").table)
    order = order_of(report, spec)
    block: list[tuple[int, int, pa.RecordBatch]] = []
    size = 0
    for ordinal in stream_ordinals(lowest, finished):
        epoch, row = order.epoch_and_row(ordinal)
        block.append(
            (ordinal, epoch, rows.row(report.kept[row] if report.kept is not None else row))
        )
        size += block[-1][2].nbytes
        if len(block) == ROWS_PER_BLOCK or size >= STREAM_BYTES:
            ordinals, epochs, taken = zip(*block, strict=True)
            yield with_ordinals(rows.table(taken), ordinals, epochs)
            block, size = [], 0


class ReorderWindow:
    """Returns each prompt exactly once, in the order of ordinals. Prompts may arrive in any order
    and repeatedly."""

    def __init__(self, lowest: int, finished: frozenset[int]) -> None:
        self._ordinals = stream_ordinals(lowest, finished)
        self._next = next(self._ordinals)
        self._early: dict[int, Prompt] = {}

    @property
    def lowest(self) -> int:
        """The ordinal of the next prompt to return."""
        return self._next

    def put(self, prompt: Prompt) -> list[Prompt]:
        """Add one prompt; return the prompts that are next in order."""
        if prompt.ordinal >= self._next:
            self._early[prompt.ordinal] = prompt
        ready = []
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next = next(self._ordinals)
        return ready


class RayPromptSource:
    """`PromptSource`: one endless Ray Data execution that a thread consumes. `next()` waits without
    blocking the event loop."""

    def __init__(
        self,
        spec: DataSpec,
        report: PromptReport,
        lowest: int = 0,
        finished: Iterable[int] = (),
        stacks: Path | None = None,
    ) -> None:
        """Start streaming.

        Args:
            report: from `check_prompts(spec)`.
            lowest: the lowest unfinished ordinal (the frontier).
            finished: finished ordinals above it, which are skipped.
            stacks: see `stream_blocks`.
        """
        self._stacks = stacks
        self._frontier = lowest, frozenset(finished)
        self._schema = report.schema
        most = max(1, min(WAITING_PROMPTS, WAITING_BYTES // max(1, report.largest_row)))
        self._waiting: queue.Queue[Prompt | BaseException] = queue.Queue(most)
        self._started, self._closed = threading.Event(), threading.Event()
        tables = functools.partial(_stream_tables, spec.data.train, spec, report)
        self._thread = threading.Thread(
            target=self._consume,
            args=(tables, functools.partial(render_table, spec=spec)),
            name="prompts",
            daemon=True,
        )
        self._thread.start()

    async def next(self) -> Prompt:
        """The next prompt in the order of ordinals. Raises RuntimeError if the stream broke, or
        PartDiedError if a process died."""
        item: Prompt | BaseException | None
        while True:
            try:
                item = self._waiting.get_nowait()
            except queue.Empty:
                item = await asyncio.to_thread(self._get_within, 1.0)
            if isinstance(item, BaseException):
                raise broken_stream("prompt", item) from item
            if item is not None:
                return item

    async def started(self) -> bool:
        """Whether the first block has arrived, so the execution's task runs. Also true for a broken
        stream: `next` raises its error."""
        return self._started.is_set()

    async def close(self) -> None:
        """End the execution and its tasks."""
        self._closed.set()
        await asyncio.to_thread(self._thread.join, 30.0)

    def _get_within(self, seconds: float) -> Prompt | BaseException | None:
        try:
            return self._waiting.get(timeout=seconds)
        except queue.Empty:
            return None

    def _consume(
        self,
        tables: Callable[[int, frozenset[int]], Iterator[pa.Table]],
        stage: Callable[[pa.Table], pa.Table],
    ) -> None:
        """Stream prompts into the queue. If the task's process dies, start a new execution at the
        first missing prompt."""
        from asyncrl.runtime.ray.stream import Deaths, stream_blocks

        window, deaths = ReorderWindow(*self._frontier), Deaths("prompt")
        while not self._closed.is_set():
            source = functools.partial(tables, window.lowest, self._frontier[1])
            try:
                for block in stream_blocks(source, stage, STREAM_BYTES, "prompts", self._stacks):
                    self._started.set()
                    for prompt in prompts_of(block, self._schema):
                        for ready in window.put(prompt):
                            if not self._put(ready):
                                return
                raise RuntimeError("it ended, although it should be endless")
            except Exception as error:
                if not deaths.survived(error):
                    # next() raises this in its caller. A thread cannot report it otherwise.
                    self._started.set()
                    self._put(error)
                    return

    def _put(self, item: Prompt | BaseException) -> bool:
        """Wait for space in the queue. False if the source was closed."""
        while not self._closed.is_set():
            try:
                self._waiting.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False
