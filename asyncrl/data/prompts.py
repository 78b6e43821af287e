"""Read prompts, and check them before a run starts.

The ordinal of a prompt identifies it permanently. `asyncrl.data.mixture` maps ordinals to rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from asyncrl.config import ConfigError
from asyncrl.config.schema import side_of
from asyncrl.contracts.rows import Prompt
from asyncrl.data.length_limits import LengthReport, TooLongError, Truncated
from asyncrl.data.mixture import Order
from asyncrl.data.offline_report import dropped_notes
from asyncrl.data.rendering import (
    Data,
    named,
    prompt_columns,
    prompts_of,
    read_prompt_rows,
    refuse_empty,
    render_rows,
    render_table,
    reward_schema,
    template_of,
    truncate_prompts,
    with_ordinals,
)
from asyncrl.data.sources import RowsByNumber, SourceRows
from asyncrl.data.spec import DataSpec
from asyncrl.text.round_trip import Coverage
from asyncrl.text.template import Rendered, TemplateError
from asyncrl.text.tokenizer import TokenizerError, load_tokenizer

ROWS_PER_CHECK = 1024
"""Rows that a check tokenizes and keeps in memory at a time."""


@dataclass(frozen=True, slots=True)
class PromptReport:
    """The result of checking a prompt file."""

    rows: int
    """Number of rows that are used."""
    truncation: LengthReport
    """What the length limits did."""
    longest: int
    """Tokens of the longest used prompt, after truncation."""
    first_text: str
    """The first used prompt, as the model sees it."""
    first_ids: tuple[int, ...]
    columns: tuple[str, ...]
    """The other columns, which rewards receive."""
    kept: tuple[int, ...] | None
    """Indices of the rows that are used; None = all."""
    schema: pa.Schema
    """Arrow fields of the other columns, as described in `asyncrl.contracts.columns`."""
    sources: tuple[SourceRows, ...]
    """The sources, with the number of used rows of each."""
    largest_row: int
    """Bytes of a large row in Arrow's memory."""
    notes: tuple[str, ...] = ()
    """What the template, system prompt, tools and BOS did to the prompts, in words."""


@dataclass(slots=True)
class _Checked:
    """What the check has found in the blocks so far."""

    kept: list[int] = dataclasses.field(default_factory=list)
    """Indices of the rows that are used."""
    longest: int = 0
    first: tuple[str, tuple[int, ...]] | None = None
    """Text and token ids of the first prompt that is used."""
    own_bos: int = 0
    continued: int = 0
    truncation: LengthReport = dataclasses.field(default_factory=LengthReport)

    def add(self, rendered: Rendered, texts: list[str], truncated: Truncated, start: int) -> None:
        """Count a block whose first row has the index `start`."""
        self.own_bos += rendered.own_bos
        self.continued += rendered.continued
        self.truncation += truncated.report
        if texts:
            self.kept += (truncated.kept + start).tolist()
            self.longest = max(self.longest, int(np.diff(truncated.prompts.offsets).max()))
            self.first = self.first or (texts[0], tuple(truncated.prompts[0].as_py()))


def check_prompts(
    spec: DataSpec, data: Data | None = None, field: str = "data.train"
) -> PromptReport:
    """Read and tokenize all prompts before anything is allocated.

    Raises:
        ConfigError: a file, a column or a prompt cannot be used.
    """
    data = data if data is not None else spec.data.train
    found = read_prompt_rows(data, spec, field)
    table, checked, notes = found.table, _Checked(), list[str]()
    template = template_of(spec)
    coverage = Coverage(load_tokenizer(spec.model.path), spec.model.path)
    for start in range(0, table.num_rows, ROWS_PER_CHECK):
        block = table.slice(start, ROWS_PER_CHECK)
        try:
            rendered = render_rows(block, spec, start, template)
            notes = notes or template_of(spec).check(**prompt_columns(block, spec))
            refuse_empty(rendered.ids, start, data, field)
            coverage.add(rendered.texts, rendered.ids)
            texts, truncated = truncate_prompts(rendered.texts, rendered.ids, spec, start)
        except (TooLongError, TemplateError, TokenizerError) as error:
            raise ConfigError(f"{named(data, field)}: {error}") from None
        checked.add(rendered, texts, truncated, start)
    if checked.first is None:
        raise ConfigError(f"{named(data, field)}: {_none_left(checked.truncation, spec)}")
    if checked.own_bos:
        notes.append(
            f"{checked.own_bos} of {table.num_rows} prompts already begin with BOS: it is not added"
            " again"
        )
    if checked.continued:
        notes.append(
            f"{checked.continued} of {table.num_rows} prompts end with a message of the assistant:"
            " the model continues it"
        )
    notes += dropped_notes(template.dropped or {})
    notes += coverage.notes()
    schema = reward_schema(table, spec)
    return PromptReport(
        rows=len(checked.kept),
        truncation=checked.truncation,
        longest=checked.longest,
        first_text=checked.first[0],
        first_ids=checked.first[1],
        columns=tuple(schema.names),
        kept=tuple(checked.kept) if len(checked.kept) < table.num_rows else None,
        schema=schema,
        sources=_used_of_sources(found.sources, checked.kept, named(data, field)),
        largest_row=_largest_row(table),
        notes=tuple(notes),
    )


def _none_left(truncation: LengthReport, spec: DataSpec) -> str:
    cut_away = truncation.no_completion and side_of(spec.data.length_policy) == "keep_start"
    fix = (
        "set data.length_policy.side: keep_end, which cuts prompts at their start"
        if cut_away
        else "set its policy to truncate"
    )
    return f"no prompt is left ({truncation.text()}); raise the limit, or {fix}"


def _used_of_sources(
    sources: Sequence[SourceRows], kept: Sequence[int], where: str
) -> tuple[SourceRows, ...]:
    """The sources with the number of used rows of each.

    Raises ConfigError if no row of a weighted source is used.
    """
    ends = np.cumsum([source.rows for source in sources])
    used = np.diff(np.searchsorted(np.asarray(kept), [0, *ends]))
    for source, rows in zip(sources, used, strict=True):
        if source.weight is not None and not rows:
            raise ConfigError(
                f"{where}: no row of source {source.name!r} is left; raise the limit, or remove the"
                " source"
            )
    return tuple(
        replace(source, rows=int(rows)) for source, rows in zip(sources, used, strict=True)
    )


def _largest_row(table: pa.Table) -> int:
    """Bytes of a large row: the largest one in the largest of several blocks."""
    batches = table.to_batches(max_chunksize=ROWS_PER_CHECK)
    largest = max(batches, key=lambda batch: batch.nbytes)
    return max(int(largest.slice(row, 1).nbytes) for row in range(largest.num_rows))


def read_prompts(
    data: Data, spec: DataSpec, limit: int | None = None, field: str = "eval.data"
) -> list[Prompt]:
    """The first `limit` prompts of small data in its order, with the row index as ordinal and epoch
    0. Several sources take turns.

    Raises:
        ConfigError: see `check_prompts`.
    """
    report = check_prompts(spec, data, field)
    found = read_prompt_rows(data, spec, field)
    table = found.table
    kept = report.kept if report.kept is not None else range(table.num_rows)
    rows = [kept[index] for index in in_turn(kept, found.sources)][:limit]
    by_number = RowsByNumber(table)
    chosen = by_number.table([by_number.row(row) for row in rows])
    rendered = render_table(with_ordinals(chosen, rows, [0] * len(rows)), spec)
    return list(prompts_of(rendered, report.schema))


def first_prompt(spec: DataSpec, report: PromptReport) -> Prompt:
    """The first used prompt of `data.train`, by the report of `check_prompts`."""
    table = read_prompt_rows(spec.data.train, spec, "data.train").table
    row = report.kept[0] if report.kept is not None else 0
    return next(
        prompts_of(
            render_table(with_ordinals(table.slice(row, 1), [row], [0]), spec), report.schema
        )
    )


def first_prompts(spec: DataSpec, count: int) -> list[Prompt]:
    """The first used prompts of `data.train`, at most `count`. It renders only a few rows, so it
    proves nothing about the others.

    Raises:
        ConfigError: a file, a column or one of the first prompts cannot be used, or none of the
            first ROWS_PER_CHECK is used.
    """
    field, data = "data.train", spec.data.train
    table = read_prompt_rows(data, spec, field).table.slice(0, ROWS_PER_CHECK)
    rows: list[int] = []
    for start in range(0, table.num_rows, max(count, 1)):
        try:
            rendered = render_rows(table.slice(start, count), spec, start)
            refuse_empty(rendered.ids, start, data, field)
            _, truncated = truncate_prompts(rendered.texts, rendered.ids, spec, start)
        except (TooLongError, TemplateError) as error:
            raise ConfigError(f"{named(data, field)}: {error}") from None
        rows += (truncated.kept + start).tolist()
        if len(rows) >= count:
            break
    if not rows:
        raise ConfigError(
            f"{named(data, field)}: no prompt of the first {table.num_rows} rows is left by the"
            " length limits; raise them, or correct the data"
        )
    chosen = table.take(rows[:count])
    rendered_rows = render_table(with_ordinals(chosen, rows[:count], [0] * chosen.num_rows), spec)
    return list(prompts_of(rendered_rows, reward_schema(table, spec)))


def in_turn(rows: Sequence[int], sources: Sequence[SourceRows]) -> list[int]:
    """Positions of row numbers in an order in which sources take turns.

    Every prefix has the same number of rows from each source, until a source has no more.
    """
    numbers = np.asarray(rows, np.int64)
    ends = np.cumsum([source.rows for source in sources])
    source_of = np.searchsorted(ends, numbers, side="right")
    turn = np.empty(len(numbers), np.int64)
    for source in range(len(sources)):
        turn[source_of == source] = np.arange(int((source_of == source).sum()))
    order: list[int] = np.lexsort((source_of, turn)).tolist()
    return order


def prompt_ids_of(spec: DataSpec, ordinals: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(Ordinal, token ids of the prompt) for ordinals of `data.train`, computed from the files
    again.

    Raises:
        ConfigError: see `check_prompts`.
    """
    report = check_prompts(spec)
    order, rows = (
        order_of(report, spec),
        RowsByNumber(read_prompt_rows(spec.data.train, spec, "data.train").table),
    )
    for start in range(0, len(ordinals), ROWS_PER_CHECK):
        block = list(ordinals[start : start + ROWS_PER_CHECK])
        drawn = [order.epoch_and_row(ordinal)[1] for ordinal in block]
        taken = rows.table(
            [rows.row(report.kept[row] if report.kept is not None else row) for row in drawn]
        )
        rendered = render_table(with_ordinals(taken, block, [0] * len(block)), spec)
        yield from zip(block, map(tuple, rendered["prompt_ids"].to_pylist()), strict=True)


def order_of(report: PromptReport, spec: DataSpec) -> Order:
    """The order that maps ordinals to rows, among the used rows."""
    weights = tuple(source.weight for source in report.sources if source.weight is not None)
    rows = tuple(source.rows for source in report.sources)
    return Order(rows, weights or None, spec.seed, spec.data.shuffle)
