"""Prompts: the one source of a run, streamed by Ray Data as Arrow blocks, and the checks before a run starts.

A prompt is known for ever by its ordinal = epoch * rows + position in that epoch's seeded permutation. Ordinals are attached
before rows stream, so neither a retried read task nor a resume can change which row an ordinal means.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json

from asyncrl.config import Config, ConfigError
from asyncrl.data.groups import broken_stream
from asyncrl.data.truncation import Limit, Limits, TooLong, Truncated, TruncationReport, truncate
from asyncrl.runtime import parquet
from asyncrl.text.template import Rendered, Template, TemplateError
from asyncrl.text.tokenizer import decode_prompt, load_tokenizer
from asyncrl.types import COLUMNS, REFERENCE_COLUMN, SCORED_COLUMNS, TRAJECTORY_COLUMNS, Prompt

__all__ = ["PromptReport", "RayPromptSource", "check_prompts", "limits", "ordinal_to_row", "read_prompts", "read_rows", "render_rows", "stream_ordinals"]

TOKENS = pa.list_(pa.int32())
ROWS_PER_BLOCK = 32
ROWS_PER_CHECK = 1024
"""Rows that a check before the run has in memory, tokenized, at once."""
BLOCK_BYTES = 16 << 10
STREAM_BYTES = 512 << 10
"""Object store that unread prompts may take: the stream runs ahead this far and no further."""
WAITING_PROMPTS = 128
"""Prompts that wait in this process."""
TAKEN_COLUMNS = {*COLUMNS, *SCORED_COLUMNS, REFERENCE_COLUMN, "reward_parts", "prompts", "completions", *TRAJECTORY_COLUMNS}
"""Names of our own columns and of the reward's arguments."""


@dataclass(frozen=True, slots=True)
class PromptReport:
    """What the check of a prompt file found."""

    rows: int
    """Rows that are used."""
    truncation: TruncationReport
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
    notes: tuple[str, ...] = ()
    """What template, system prompt, tools and BOS did to them, in words."""


@functools.lru_cache(maxsize=4)
def _permutation(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(rows)


def ordinal_to_row(ordinal: int, rows: int, seed: int, shuffle: bool = True) -> tuple[int, int]:
    """(epoch, row index) of an ordinal, for a dataset of `rows` rows."""
    epoch, position = divmod(ordinal, rows)
    return epoch, int(_permutation(rows, seed, epoch)[position]) if shuffle else position


def stream_ordinals(lowest: int, finished: frozenset[int]) -> Iterator[int]:
    """The ordinals from a frontier on: `lowest` is the lowest unfinished one, `finished` those above it to leave out."""
    ordinal = lowest
    while True:
        if ordinal not in finished:
            yield ordinal
        ordinal += 1


def read_rows(path: str, field: str = "data.train") -> pa.Table:
    """The rows of a Parquet or JSONL file.

    Raises:
        ConfigError: the file is missing, cannot be read, or has no rows.
    """
    if not Path(path).is_file():
        raise ConfigError(f"{field} = {path!r}: no such file; give the path of a Parquet or JSONL file")
    try:
        table = parquet.read_table(path) if path.endswith((".parquet", ".pq")) else _read_jsonl(path)
    except parquet.ExtensionTypeError as error:
        raise ConfigError(f"{field}: {error}") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{field} = {path!r} is neither Parquet (*.parquet) nor JSONL: {' '.join(str(error).split())}") from None
    if not table.num_rows:
        raise ConfigError(f"{field} = {path!r} has no rows; give a file with at least one prompt")
    return table


def _read_jsonl(path: str) -> pa.Table:
    if not Path(path).read_text().strip():
        return pa.table({})
    return pyarrow.json.read_json(path)


def check_columns(table: pa.Table, config: Config, path: str, field: str) -> None:
    """Raise ConfigError if the prompt column is missing or another column has a name of ours."""
    column = config.data.prompt_column
    if column not in table.column_names:
        raise ConfigError(f"data.prompt_column = {column!r} is not a column of {path!r}, which has {table.column_names}; name one of them")
    if config.data.tools_column not in (None, *table.column_names):
        raise ConfigError(
            f"data.tools_column = {config.data.tools_column!r} is not a column of {field} = {path!r}, which has {table.column_names}; name one of them"
        )
    taken = sorted(TAKEN_COLUMNS & set(table.column_names) - {column})
    if taken:
        raise ConfigError(f"{field} = {path!r} has columns {taken}, names that asyncrl uses; rename them")


def template_of(config: Config) -> Template:
    """How the run's prompts become text and tokens."""
    data = config.data
    return Template(config.model.path, data.apply_chat_template, data.chat_template_kwargs, data.system_prompt, data.tools)


def render_rows(table: pa.Table, config: Config, first_row: int = 0) -> Rendered:
    """The prompts of a table as the model sees them.

    Raises:
        TemplateError: a prompt cannot be rendered.
    """
    return template_of(config).render(*_values(table, config), first_row=first_row)


def _values(table: pa.Table, config: Config) -> tuple[list[Any], list[Any] | None]:
    """The prompts of a table, and their tools if it has any."""
    column = config.data.tools_column
    return table[config.data.prompt_column].to_pylist(), table[column].to_pylist() if column is not None else None


def check_prompts(config: Config, path: str | None = None, field: str = "data.train") -> PromptReport:
    """Read and tokenize a whole prompt file before anything is allocated.

    Raises:
        ConfigError: the file, a column or a prompt cannot be used.
    """
    path = path or config.data.train
    table = read_rows(path, field)
    check_columns(table, config, path, field)
    column = config.data.prompt_column
    kept: list[int] = []
    longest, first, own_bos, truncation = 0, None, 0, TruncationReport()
    notes: list[str] = []
    for start in range(0, table.num_rows, ROWS_PER_CHECK):
        block = table.slice(start, ROWS_PER_CHECK)
        try:
            rendered = render_rows(block, config, start)
            notes = notes or template_of(config).check(*_values(block, config))
            refuse_empty(rendered.ids, start, path, field)
            texts, truncated = truncate_prompts(rendered.texts, rendered.ids, config, start)
        except (TooLong, TemplateError) as error:
            raise ConfigError(f"{field} = {path!r}: {error}") from None
        own_bos += rendered.own_bos
        truncation += truncated.report
        if texts:
            kept += (truncated.kept + start).tolist()
            longest = max(longest, int(np.diff(truncated.prompts.offsets).max()))
            first = first or (texts[0], tuple(truncated.prompts[0].as_py()))
    if first is None:
        cut_away = truncation.no_completion and config.data.length_side == "keep_start"
        way_out = "set data.length_side: keep_end, which cuts prompts at their start" if cut_away else "set its policy to truncate"
        raise ConfigError(f"{field} = {path!r}: no prompt is left ({truncation.text()}); raise the limit, or {way_out}")
    others = tuple(name for name in table.column_names if name != column)
    if own_bos:
        notes.append(f"{own_bos} of {table.num_rows} prompts begin with BOS themselves: it is not added again")
    return PromptReport(len(kept), truncation, longest, *first, others, tuple(kept) if len(kept) < table.num_rows else None, tuple(notes))


def refuse_empty(ids: Sequence[Sequence[int]], first_row: int, path: str, field: str) -> None:
    """Raise ConfigError if a prompt has no tokens: the first completion token needs a token before it."""
    empty = [row for row, tokens in enumerate(ids, first_row) if not tokens]
    if empty:
        raise ConfigError(f"{field} = {path!r}: row {empty[0]} has an empty prompt, one of {len(empty)} such rows; remove them")


def limits(config: Config, targets: bool = False, split: bool = False) -> Limits:
    """The limits of prompts, or of supervised rows, which have targets; `split`: of rows that packing will cut, whose prompt alone is bounded."""
    data = config.data
    prompt = Limit(data.max_prompt_length, data.prompt_policy, "keep_end", "data.max_prompt_length", "data.prompt_policy")
    if split:
        return Limits(prompt)
    policy = "error" if config.warm_start.splits else config.warm_start.completion_policy
    completion = Limit(config.rollout.max_completion_length, policy, "keep_start", "rollout.max_completion_length", "warm_start.completion_policy")
    whole = (
        None
        if data.max_length is None
        else Limit(data.max_length, data.length_policy, data.length_side, "data.max_length", "data.length_policy", "data.length_side")
    )
    return Limits(prompt, completion if targets else None, whole)


def truncate_prompts(texts: Sequence[str], ids: Sequence[Sequence[int]], config: Config, first_row: int = 0) -> tuple[list[str], Truncated]:
    """The prompts that are used, within the limits, and their texts: a prompt that was cut is decoded from the tokens that are left of it.

    Raises:
        TooLong: as `truncate`.
    """
    truncated = truncate(pa.array(ids, TOKENS), {}, limits(config), first_row)
    used = [texts[row] for row in truncated.kept]
    for place in np.flatnonzero(truncated.cut):
        used[place] = decode_prompt(load_tokenizer(config.model.path), truncated.prompts[place].as_py())
    return used, truncated


def read_prompts(path: str, config: Config, limit: int | None = None, field: str = "eval.data") -> list[Prompt]:
    """The first `limit` prompts of a small file, in the file's order, with their row index as ordinal and epoch 0.

    Raises:
        ConfigError: as `check_prompts`.
    """
    report = check_prompts(config, path, field)
    table = read_rows(path, field)
    rows = list(report.kept if report.kept is not None else range(table.num_rows))[:limit]
    rendered = _render_table(_with_ordinals(table.take(rows), rows, [0] * len(rows)), config)
    return list(_prompts(rendered))


def _with_ordinals(table: pa.Table, ordinals: Sequence[int], epochs: Sequence[int]) -> pa.Table:
    return table.append_column("ordinal", pa.array(ordinals, pa.int64())).append_column("epoch", pa.array(epochs, pa.int32()))


def _render_table(table: pa.Table, config: Config) -> pa.Table:
    """Replace the prompt column by prompt_text and prompt_ids, within the limits. Only rows that `check_prompts` kept come here.

    Raises:
        ConfigError: a row is not used after all, so that its ordinal would be missing.
    """
    rendered = render_rows(table, config)
    texts, truncated = truncate_prompts(rendered.texts, rendered.ids, config)
    if truncated.report.used < table.num_rows:
        raise ConfigError(f"prompts are no longer those that were checked before the run ({truncated.report.text()}); give the file as it was, or start again")
    table = table.drop_columns([config.data.prompt_column])
    return table.append_column("prompt_text", pa.array(texts, pa.string())).append_column("prompt_ids", truncated.prompts)


def _prompts(table: pa.Table) -> Iterator[Prompt]:
    for row in table.to_pylist():
        ordinal, epoch, text, ids = (row.pop(name) for name in ("ordinal", "epoch", "prompt_text", "prompt_ids"))
        yield Prompt(ordinal, epoch, text, tuple(ids), row)


def _stream_tables(path: str, config: Config, report: PromptReport, lowest: int, finished: frozenset[int]) -> Iterable[pa.Table]:
    """Raw rows with ordinal and epoch, block after block, without end. Runs in the read task, which holds the file's rows."""
    table = read_rows(path)
    kept = report.kept if report.kept is not None else range(table.num_rows)
    ordinals = stream_ordinals(lowest, finished)
    while True:
        block = [next(ordinals) for _ in range(ROWS_PER_BLOCK)]
        places = [ordinal_to_row(ordinal, len(kept), config.seed, config.data.shuffle) for ordinal in block]
        yield _with_ordinals(table.take([kept[row] for _, row in places]), block, [epoch for epoch, _ in places])


class ReorderWindow:
    """Gives prompts back in ordinal order, each once, in whatever order and however often they come."""

    def __init__(self, lowest: int, finished: frozenset[int]) -> None:
        self._ordinals = stream_ordinals(lowest, finished)
        self._next = next(self._ordinals)
        self._early: dict[int, Prompt] = {}

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
    """`PromptSource`: one endless Ray Data execution, consumed by a thread; `next()` waits on the event loop without blocking it."""

    def __init__(self, config: Config, report: PromptReport, lowest: int = 0, finished: Iterable[int] = (), stacks: Path | None = None) -> None:
        """Start streaming.

        Args:
            report: of `check_prompts(config)`.
            lowest: the lowest unfinished ordinal (the frontier).
            finished: ordinals above it that are finished; they are left out.
            stacks: as of `stream_blocks`.
        """
        self._stacks = stacks
        self._frontier = lowest, frozenset(finished)
        self._waiting: queue.Queue[Prompt | BaseException] = queue.Queue(WAITING_PROMPTS)
        self._begun, self._closed = threading.Event(), threading.Event()
        path = str(Path(config.data.train).resolve())
        tables = functools.partial(_stream_tables, path, config, report, *self._frontier)
        self._thread = threading.Thread(target=self._consume, args=(tables, functools.partial(_render_table, config=config)), name="prompts", daemon=True)
        self._thread.start()

    async def next(self) -> Prompt:
        """The next prompt in ordinal order. Raises RuntimeError if the stream broke, PartDied if a process died."""
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

    async def begun(self) -> bool:
        """Whether the execution's task runs: its first block has come. A stream that broke has begun: `next` raises its error."""
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
        from asyncrl.data.stream import stream_blocks

        window = ReorderWindow(*self._frontier)
        try:
            for block in stream_blocks(tables, stage, BLOCK_BYTES, STREAM_BYTES, "prompts", True, self._stacks):
                self._begun.set()
                for prompt in _prompts(block):
                    for ready in window.put(prompt):
                        if not self._put(ready):
                            return
            raise RuntimeError("it ended, though it has no end")
        except Exception as error:
            # Handed to whoever waits in next(): this thread has no other way to be heard.
            self._begun.set()
            self._put(error)

    def _put(self, item: Prompt | BaseException) -> bool:
        """Wait for room; False if the source was closed."""
        while not self._closed.is_set():
            try:
                self._waiting.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False
