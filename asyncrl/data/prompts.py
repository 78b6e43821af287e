"""Prompts: streamed by Ray Data as Arrow blocks, and the checks before a run starts.

A prompt is known for ever by its ordinal. `asyncrl.data.mixture` says which row that is, and
`asyncrl.data.sources` reads the rows. Ordinals are attached before rows stream, so neither a
retried read task nor a resume can change which row an ordinal means.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from asyncrl.config import ConfigError, Source, sources_of
from asyncrl.contracts.columns import (
    column_values,
    encode_column,
    is_json,
    json_field,
    row_values,
    without_absent,
)
from asyncrl.contracts.rows import (
    COLUMNS,
    REFERENCE_COLUMN,
    SCORED_COLUMNS,
    TOKEN_REWARDS_COLUMN,
    TRAJECTORY_COLUMNS,
    Prompt,
)
from asyncrl.data.length_limits import (
    LengthReport,
    Limit,
    Limits,
    TooLongError,
    Truncated,
    truncate,
)
from asyncrl.data.mixture import Order
from asyncrl.data.sources import Rows, RowsByNumber, SourceRows, read_sources
from asyncrl.data.spec import DataSpec
from asyncrl.runtime.ray_objects import broken_stream
from asyncrl.text.template import Rendered, Template, TemplateError
from asyncrl.text.tokenizer import decode_prompt, load_tokenizer

__all__ = [
    "PromptReport",
    "RayPromptSource",
    "check_prompts",
    "first_prompt",
    "in_turn",
    "limits",
    "order_of",
    "prompt_ids_of",
    "prompt_values",
    "read_prompt_rows",
    "read_prompts",
    "render_rows",
    "stream_ordinals",
]

TOKENS = pa.list_(pa.int32())
ROWS_PER_BLOCK = 32
ROWS_PER_CHECK = 1024
"""Rows that a check before the run has in memory, tokenized, at once."""
BLOCK_BYTES = 16 << 10
STREAM_BYTES = 512 << 10
"""Object store that unread prompts may take: the stream runs ahead this far and no further."""
WAITING_PROMPTS = 128
"""Prompts that wait in this process, at most."""
WAITING_BYTES = 256 << 20
"""Memory that they may take if all have the size of the largest row."""
MESSAGES = "messages"
"""Column with the chat that a template rendered; rewards get it."""
Data = str | tuple[Source, ...]
"""A setting that names rows."""
TAKEN_COLUMNS = {
    *COLUMNS,
    *SCORED_COLUMNS,
    REFERENCE_COLUMN,
    TOKEN_REWARDS_COLUMN,
    "reward_parts",
    "prompts",
    "completions",
    *TRAJECTORY_COLUMNS,
}
"""Names of our own columns and of the reward's arguments."""


@dataclass(frozen=True, slots=True)
class PromptReport:
    """What the check of a prompt file found."""

    rows: int
    """Rows that are used."""
    truncation: LengthReport
    """What the limits cut and left out."""
    longest: int
    """Tokens of the longest prompt that is used, as it is used."""
    first_text: str
    """The first prompt that is used, as the model sees it."""
    first_ids: tuple[int, ...]
    columns: tuple[str, ...]
    """Other columns, which reach the reward."""
    kept: tuple[int, ...] | None
    """Row indices that are used; None = all."""
    schema: pa.Schema
    """Arrow fields of the other columns, as `asyncrl.contracts.columns` describes them."""
    sources: tuple[SourceRows, ...]
    """Where the rows come from, with the rows that are used of each."""
    largest_row: int
    """Bytes of a large row in Arrow's memory."""
    notes: tuple[str, ...] = ()
    """What template, system prompt, tools and BOS did to them, in words."""


def stream_ordinals(lowest: int, finished: frozenset[int]) -> Iterator[int]:
    """The ordinals from a frontier on: `lowest` is the lowest unfinished one, `finished` those
    above it to leave out."""
    ordinal = lowest
    while True:
        if ordinal not in finished:
            yield ordinal
        ordinal += 1


def read_prompt_rows(data: Data, spec: DataSpec, field: str) -> Rows:
    """The rows of a setting that names prompts, with columns that may travel beside ours.

    Raises:
        ConfigError: as `read_sources`, the column of tools is missing, or a column has a name of
            ours.
    """
    found = read_sources(data, field, spec.data.prompt_column)
    if spec.data.tools_column not in (None, *found.table.column_names):
        raise ConfigError(
            f"data.tools_column = {spec.data.tools_column!r} is not a column of"
            f" {named(data, field)}, which has {found.table.column_names}; name one of them"
        )
    names = {*found.table.column_names} - {spec.data.prompt_column}
    if taken := sorted(TAKEN_COLUMNS & names):
        raise ConfigError(
            f"{named(data, field)} has columns {taken}, names that asyncrl uses; rename them"
        )
    return found


def named(data: Data, field: str) -> str:
    """A setting and its paths, for messages."""
    paths = [source.path for source in sources_of(data)]
    return f"{field} = {paths[0]!r}" if len(paths) == 1 else f"{field} = {paths}"


def prompt_values(table: pa.Table, column: str) -> list[Any]:
    """The prompts of a table, or its tools: strings, or chats with the keys that they were given.

    A Parquet struct has every key in every row, so None there means an absent key.
    """
    field = table.schema.field(column)
    values = column_values(table[column], field)
    return [without_absent(value) for value in values] if pa.types.is_nested(field.type) else values


def template_of(spec: DataSpec) -> Template:
    """How the run's prompts become text and tokens."""
    data = spec.data
    return Template(
        spec.model_path,
        data.apply_chat_template,
        data.chat_template_kwargs,
        data.system_prompt,
        data.tools,
    )


def render_rows(table: pa.Table, spec: DataSpec, first_row: int = 0) -> Rendered:
    """The prompts of a table as the model sees them.

    Raises:
        TemplateError: a prompt cannot be rendered.
    """
    return template_of(spec).render(*_values(table, spec), first_row=first_row)


def _values(table: pa.Table, spec: DataSpec) -> tuple[list[Any], list[Any] | None]:
    """The prompts of a table, and their tools if it has any."""
    column = spec.data.tools_column
    return prompt_values(table, spec.data.prompt_column), (
        prompt_values(table, column) if column is not None else None
    )


def check_prompts(
    spec: DataSpec, data: Data | None = None, field: str = "data.train"
) -> PromptReport:
    """Read and tokenize all prompts before anything is allocated.

    Raises:
        ConfigError: a file, a column or a prompt cannot be used.
    """
    data = data if data is not None else spec.data.train
    found = read_prompt_rows(data, spec, field)
    table = found.table
    kept: list[int] = []
    longest, first, own_bos, truncation = 0, None, 0, LengthReport()
    notes: list[str] = []
    for start in range(0, table.num_rows, ROWS_PER_CHECK):
        block = table.slice(start, ROWS_PER_CHECK)
        try:
            rendered = render_rows(block, spec, start)
            notes = notes or template_of(spec).check(*_values(block, spec))
            refuse_empty(rendered.ids, start, data, field)
            texts, truncated = truncate_prompts(rendered.texts, rendered.ids, spec, start)
        except (TooLongError, TemplateError) as error:
            raise ConfigError(f"{named(data, field)}: {error}") from None
        own_bos += rendered.own_bos
        truncation += truncated.report
        if texts:
            kept += (truncated.kept + start).tolist()
            longest = max(longest, int(np.diff(truncated.prompts.offsets).max()))
            first = first or (texts[0], tuple(truncated.prompts[0].as_py()))
    if first is None:
        cut_away = truncation.no_completion and spec.data.length_side == "keep_start"
        way_out = (
            "set data.length_side: keep_end, which cuts prompts at their start"
            if cut_away
            else "set its policy to truncate"
        )
        raise ConfigError(
            f"{named(data, field)}: no prompt is left ({truncation.text()}); raise the limit, or"
            f" {way_out}"
        )
    schema = _reward_schema(table, spec)
    if own_bos:
        notes.append(
            f"{own_bos} of {table.num_rows} prompts begin with BOS themselves: it is not added"
            " again"
        )
    return PromptReport(
        rows=len(kept),
        truncation=truncation,
        longest=longest,
        first_text=first[0],
        first_ids=first[1],
        columns=tuple(schema.names),
        kept=tuple(kept) if len(kept) < table.num_rows else None,
        schema=schema,
        sources=_used_of_sources(found.sources, kept, named(data, field)),
        largest_row=_largest_row(table),
        notes=tuple(notes),
    )


def _used_of_sources(
    sources: Sequence[SourceRows], kept: Sequence[int], where: str
) -> tuple[SourceRows, ...]:
    """The sources with the rows that are used of them.

    Raises ConfigError if a source has a weight and none of its rows is used.
    """
    ends = np.cumsum([source.rows for source in sources])
    used = np.diff(np.searchsorted(np.asarray(kept), [0, *ends]))
    for source, rows in zip(sources, used, strict=True):
        if source.weight is not None and not rows:
            raise ConfigError(
                f"{where}: no row of source {source.name!r} is left; raise the limit, or take the"
                " source out"
            )
    return tuple(
        replace(source, rows=int(rows)) for source, rows in zip(sources, used, strict=True)
    )


def _largest_row(table: pa.Table) -> int:
    """Bytes of a row at most: those of the largest row in the largest of some blocks."""
    batches = table.to_batches(max_chunksize=ROWS_PER_CHECK)
    largest = max(batches, key=lambda batch: batch.nbytes)
    return max(int(largest.slice(row, 1).nbytes) for row in range(largest.num_rows))


def refuse_empty(ids: Sequence[Sequence[int]], first_row: int, data: Data, field: str) -> None:
    """Raise ConfigError if a prompt has no tokens: the first completion token needs a token before
    it."""
    empty = [row for row, tokens in enumerate(ids, first_row) if not tokens]
    if empty:
        raise ConfigError(
            f"{named(data, field)}: row {empty[0]} has an empty prompt, one of {len(empty)} such"
            " rows; remove them"
        )


def limits(spec: DataSpec, targets: bool = False, split: bool = False) -> Limits:
    """The limits of prompts, or of supervised rows, which have targets; `split`: of rows that
    packing will cut, whose prompt alone is bounded."""
    data = spec.data
    prompt = Limit(
        data.max_prompt_length,
        data.prompt_policy,
        "keep_end",
        "data.max_prompt_length",
        "data.prompt_policy",
    )
    if split:
        return Limits(prompt)
    chosen = spec.warm_start.completion_policy
    policy = "error" if spec.warm_start.splits or chosen == "split" else chosen
    completion = Limit(
        spec.max_completion_length,
        policy,
        "keep_start",
        "rollout.max_completion_length",
        "warm_start.completion_policy",
    )
    whole = (
        None
        if data.max_length is None
        else Limit(
            data.max_length,
            data.length_policy,
            data.length_side,
            "data.max_length",
            "data.length_policy",
            "data.length_side",
        )
    )
    return Limits(prompt, completion if targets else None, whole)


def truncate_prompts(
    texts: Sequence[str], ids: Sequence[Sequence[int]], spec: DataSpec, first_row: int = 0
) -> tuple[list[str], Truncated]:
    """The prompts that are used, within the limits, and their texts: a prompt that was cut is
    decoded from the tokens that are left of it.

    Raises:
        TooLongError: as `truncate`.
    """
    truncated = truncate(pa.array(ids, TOKENS), {}, limits(spec), first_row)
    used = [texts[row] for row in truncated.kept]
    for place in np.flatnonzero(truncated.cut):
        used[place] = decode_prompt(
            load_tokenizer(spec.model_path), truncated.prompts[place].as_py()
        )
    return used, truncated


def read_prompts(
    data: Data, spec: DataSpec, limit: int | None = None, field: str = "eval.data"
) -> list[Prompt]:
    """The first `limit` prompts of small data, in its order, with their row index as ordinal and
    epoch 0. Several sources take turns.

    Raises:
        ConfigError: as `check_prompts`.
    """
    report = check_prompts(spec, data, field)
    found = read_prompt_rows(data, spec, field)
    table = found.table
    kept = report.kept if report.kept is not None else range(table.num_rows)
    rows = [kept[place] for place in in_turn(kept, found.sources)][:limit]
    by_number = RowsByNumber(table)
    chosen = by_number.table([by_number.row(row) for row in rows])
    rendered = _render_table(_with_ordinals(chosen, rows, [0] * len(rows)), spec)
    return list(_prompts(rendered, report.schema))


def first_prompt(spec: DataSpec, report: PromptReport) -> Prompt:
    """The first prompt of `data.train` that `report`, which `check_prompts` made of it, says is
    used."""
    table = read_prompt_rows(spec.data.train, spec, "data.train").table
    row = report.kept[0] if report.kept is not None else 0
    return next(
        _prompts(
            _render_table(_with_ordinals(table.slice(row, 1), [row], [0]), spec), report.schema
        )
    )


def in_turn(rows: Sequence[int], sources: Sequence[SourceRows]) -> list[int]:
    """Places of row numbers, in an order in which the sources take turns: any number of first ones
    has as many of each source, until it has no more."""
    numbers = np.asarray(rows, np.int64)
    source = np.searchsorted(np.cumsum([one.rows for one in sources]), numbers, side="right")
    turn = np.empty(len(numbers), np.int64)
    for one in range(len(sources)):
        turn[source == one] = np.arange(int((source == one).sum()))
    order: list[int] = np.lexsort((source, turn)).tolist()
    return order


def prompt_ids_of(spec: DataSpec, ordinals: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(ordinal, prompt's token ids) of ordinals of `data.train`, made again from the files.

    Raises:
        ConfigError: as `check_prompts`.
    """
    report = check_prompts(spec)
    order, rows = (
        order_of(report, spec),
        RowsByNumber(read_prompt_rows(spec.data.train, spec, "data.train").table),
    )
    for start in range(0, len(ordinals), ROWS_PER_CHECK):
        block = list(ordinals[start : start + ROWS_PER_CHECK])
        places = [order.place(ordinal)[1] for ordinal in block]
        taken = rows.table(
            [rows.row(report.kept[place] if report.kept is not None else place) for place in places]
        )
        rendered = _render_table(_with_ordinals(taken, block, [0] * len(block)), spec)
        yield from zip(block, map(tuple, rendered["prompt_ids"].to_pylist()), strict=True)


def _with_ordinals(table: pa.Table, ordinals: Sequence[int], epochs: Sequence[int]) -> pa.Table:
    return table.append_column("ordinal", pa.array(ordinals, pa.int64())).append_column(
        "epoch", pa.array(epochs, pa.int32())
    )


def _render_table(table: pa.Table, spec: DataSpec) -> pa.Table:
    """Replace the prompt column by prompt_text and prompt_ids, within the limits. Only rows that
    `check_prompts` kept come here.

    Raises:
        ConfigError: a row is not used after all, so that its ordinal would be missing.
    """
    rendered = render_rows(table, spec)
    texts, truncated = truncate_prompts(rendered.texts, rendered.ids, spec)
    if truncated.report.used < table.num_rows:
        raise ConfigError(
            "prompts are no longer those that were checked before the run"
            f" ({truncated.report.text()}); give the file as it was, or start again"
        )
    table = _with_messages(table, spec)
    return table.append_column("prompt_text", pa.array(texts, pa.string())).append_column(
        "prompt_ids", truncated.prompts
    )


def _gives_messages(table: pa.Table, spec: DataSpec) -> bool:
    """Whether rewards get the chats of the prompts, as MESSAGES: there are some, and no other
    column has that name."""
    column = spec.data.prompt_column
    field = table.schema.field(column)
    chats = spec.data.apply_chat_template or is_json(field) or pa.types.is_nested(field.type)
    return chats and MESSAGES not in {*table.column_names} - {column}


def _reward_schema(table: pa.Table, spec: DataSpec) -> pa.Schema:
    """The columns that rewards get, of a dataset's table."""
    column = spec.data.prompt_column
    fields = [field for field in table.schema if field.name != column]
    return pa.schema([*fields, json_field(MESSAGES)] if _gives_messages(table, spec) else fields)


def _with_messages(table: pa.Table, spec: DataSpec) -> pa.Table:
    """The table with the chats of its prompts, as the dataset has them, in place of the prompts;
    null for a prompt that is no chat."""
    column = spec.data.prompt_column
    rest = table.drop_columns([column])
    if not _gives_messages(table, spec):
        return rest
    of_string = (
        (lambda text: [{"role": "user", "content": text}])
        if spec.data.apply_chat_template
        else (lambda text: None)
    )
    chats = [
        of_string(value) if isinstance(value, str) else value
        for value in prompt_values(table, column)
    ]
    field = json_field(MESSAGES)
    return rest.append_column(field, encode_column(chats, field))


def _prompts(table: pa.Table, schema: pa.Schema) -> Iterator[Prompt]:
    """`schema`: of the dataset's columns."""
    ours = (table[name].to_pylist() for name in ("ordinal", "epoch", "prompt_text", "prompt_ids"))
    rows = (
        row_values(table.select(schema.names).cast(schema))
        if schema.names
        else [{} for _ in range(table.num_rows)]
    )
    for ordinal, epoch, text, ids, columns in zip(*ours, rows, strict=True):
        yield Prompt(ordinal, epoch, text, tuple(ids), columns, schema)


def order_of(report: PromptReport, spec: DataSpec) -> Order:
    """Which row an ordinal means, among the rows that are used."""
    weights = tuple(source.weight for source in report.sources if source.weight is not None)
    rows = tuple(source.rows for source in report.sources)
    return Order(rows, weights or None, spec.seed, spec.data.shuffle)


def _stream_tables(
    data: Data, spec: DataSpec, report: PromptReport, lowest: int, finished: frozenset[int]
) -> Iterator[pa.Table]:
    """Raw rows with ordinal and epoch, block after block, without end. Runs in the read task, which
    holds the rows. A block ends early if its rows are large."""
    rows = RowsByNumber(read_prompt_rows(data, spec, "data.train").table)
    order = order_of(report, spec)
    block: list[tuple[int, int, pa.RecordBatch]] = []
    size = 0
    for ordinal in stream_ordinals(lowest, finished):
        epoch, place = order.place(ordinal)
        block.append(
            (ordinal, epoch, rows.row(report.kept[place] if report.kept is not None else place))
        )
        size += block[-1][2].nbytes
        if len(block) == ROWS_PER_BLOCK or size >= STREAM_BYTES:
            ordinals, epochs, taken = zip(*block, strict=True)
            yield _with_ordinals(rows.table(taken), ordinals, epochs)
            block, size = [], 0


class ReorderWindow:
    """Gives prompts back in ordinal order, each once, in whatever order and however often they
    come."""

    def __init__(self, lowest: int, finished: frozenset[int]) -> None:
        self._ordinals = stream_ordinals(lowest, finished)
        self._next = next(self._ordinals)
        self._early: dict[int, Prompt] = {}

    @property
    def lowest(self) -> int:
        """The ordinal of the next prompt to give."""
        return self._next

    def put(self, prompt: Prompt) -> list[Prompt]:
        """Take one prompt; return those that are now in order."""
        if prompt.ordinal >= self._next:
            self._early[prompt.ordinal] = prompt
        ready = []
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next = next(self._ordinals)
        return ready


class RayPromptSource:
    """`PromptSource`: one endless Ray Data execution, consumed by a thread; `next()` waits on the
    event loop without blocking it."""

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
            report: of `check_prompts(spec)`.
            lowest: the lowest unfinished ordinal (the frontier).
            finished: ordinals above it that are finished; they are left out.
            stacks: as of `stream_blocks`.
        """
        self._stacks = stacks
        self._frontier = lowest, frozenset(finished)
        self._schema = report.schema
        most = max(1, min(WAITING_PROMPTS, WAITING_BYTES // max(1, report.largest_row)))
        self._waiting: queue.Queue[Prompt | BaseException] = queue.Queue(most)
        self._begun, self._closed = threading.Event(), threading.Event()
        tables = functools.partial(_stream_tables, spec.data.train, spec, report)
        self._thread = threading.Thread(
            target=self._consume,
            args=(tables, functools.partial(_render_table, spec=spec)),
            name="prompts",
            daemon=True,
        )
        self._thread.start()

    async def next(self) -> Prompt:
        """The next prompt in ordinal order. Raises RuntimeError if the stream broke, PartDiedError
        if a process died."""
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
        """Whether the execution's task runs: its first block has come. A stream that broke has
        begun: `next` raises its error."""
        return self._begun.is_set()

    async def close(self) -> None:
        """End the execution and its tasks."""
        self._closed.set()
        await asyncio.to_thread(self._thread.join, 30.0)

    def _get_within(self, seconds: float) -> Prompt | BaseException | None:
        try:
            return self._waiting.get(timeout=seconds)
        except queue.Empty:
            return None

    def _consume(self, tables: Any, stage: Any) -> None:
        """Where the task's process dies, a new execution begins at the first prompt that has not
        come."""
        from asyncrl.runtime.ray_stream import Deaths, stream_blocks

        window, deaths = ReorderWindow(*self._frontier), Deaths("prompt")
        while not self._closed.is_set():
            source = functools.partial(tables, window.lowest, self._frontier[1])
            try:
                for block in stream_blocks(
                    source, stage, BLOCK_BYTES, STREAM_BYTES, "prompts", self._stacks
                ):
                    self._begun.set()
                    for prompt in _prompts(block, self._schema):
                        for ready in window.put(prompt):
                            if not self._put(ready):
                                return
                raise RuntimeError("it ended, though it has no end")
            except Exception as error:
                if not deaths.survived(error):
                    # The caller that waits in next() raises it: this thread has no other way.
                    self._begun.set()
                    self._put(error)
                    return

    def _put(self, item: Prompt | BaseException) -> bool:
        """Wait for room; False if the source was closed."""
        while not self._closed.is_set():
            try:
                self._waiting.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False
