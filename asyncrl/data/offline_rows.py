"""Token rows of a fixed dataset, for SFT, DPO and KTO: read, encoded, limited and written in
blocks, so memory does not grow with the data.

    report = write_offline_rows(path, spec, "train.jsonl", "data.train", "sft")
    rows = open_token_file(path)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

import pyarrow as pa

from asyncrl.config import ConfigError, sources_of
from asyncrl.config.schema import side_of
from asyncrl.contracts.columns import is_empty
from asyncrl.contracts.offline_rows import MASK, PREFERENCE_SCHEMA, SFT_SCHEMA, UNPAIRED_SCHEMA
from asyncrl.data.conversations import Encoder, Target, Tokens
from asyncrl.data.encoded_rows import EncodedRow, checked, lists, paired, truncated
from asyncrl.data.form_rows import REASONS, Chat, MalformedError, ParsedRow, Side, Text, rows_of
from asyncrl.data.forms import Form, form_of, refuse_silent, wanted_columns
from asyncrl.data.length_limits import Cuts
from asyncrl.data.offline_checks import check_settings, idle_settings, target_of, template_notes
from asyncrl.data.offline_report import (
    OfflineReport,
    Tally,
    count_notes,
    dropped_notes,
    label_note,
    marked_text,
)
from asyncrl.data.prompts import ROWS_PER_CHECK
from asyncrl.data.recorded import RecordedGroups
from asyncrl.data.rendering import Data, named
from asyncrl.data.sources import Block, SourceRows, files_of, stream_sources
from asyncrl.data.spec import OfflineDataSpec, RowsFor
from asyncrl.runtime.files.arrow_files import write_batches
from asyncrl.text.template import TemplateError
from asyncrl.text.tokenizer import TokenizerError, decode_prompt, load_tokenizer

SCHEMAS: Final[Mapping[RowsFor, pa.Schema]] = {
    "sft": SFT_SCHEMA,
    "dpo": PREFERENCE_SCHEMA,
    "reward_model": PREFERENCE_SCHEMA,
    "kto": UNPAIRED_SCHEMA,
}


def write_offline_rows(
    path: Path,
    spec: OfflineDataSpec,
    data: Data,
    field: str,
    objective: RowsFor,
    most_rows: int | None = None,
) -> OfflineReport:
    """Write the token rows of a dataset to an Arrow IPC file, which is complete or absent.

    Args:
        data: the value of the setting `field`, such as data.train.
        most_rows: stop after this many table rows; None = all.

    Raises:
        ConfigError: see `OfflineRows`.
        EscapesDirectoryError, NotAFileError, DiskFullError: see `runtime.files.replacing`.
    """
    rows = OfflineRows(spec, data, field, objective, most_rows)
    write_batches(path, rows.schema, rows)
    return rows.report()


def check_offline_rows(
    spec: OfflineDataSpec,
    data: Data,
    field: str,
    objective: RowsFor,
    most_rows: int | None = None,
) -> OfflineReport:
    """Read and encode the rows before anything is allocated. Raises like `OfflineRows`."""
    rows = OfflineRows(spec, data, field, objective, most_rows)
    for _ in rows:
        pass
    return rows.report()


class OfflineRows:
    """The token rows of a dataset: record batches, to be iterated once, and then a report.

    Iterating raises:
        ConfigError: a file or column cannot be used; a row is malformed or too long, and the policy
            is `error`; a setting has no effect; or no row is left.
    """

    def __init__(
        self,
        spec: OfflineDataSpec,
        data: Data,
        field: str,
        objective: RowsFor,
        most_rows: int | None = None,
    ) -> None:
        if spec.data.length_policy.name == "split" and objective != "sft":
            raise ConfigError(
                f"data.length_policy: split would cut the completions that {objective} compares;"
                " use truncate or drop"
            )
        self.schema = SCHEMAS[objective]
        self._most_rows = most_rows
        self._spec, self._data, self._field, self._objective = spec, data, field, objective
        self._sources = sources_of(data)
        self._dropped = Counter[str]() if spec.data.unused_keys == "drop" else None
        self._unused: dict[tuple[int, str], None] = {}
        """(Source, column) of the columns that are not used."""
        self._encoder = Encoder(
            load_tokenizer(spec.model.path),
            dropped=self._dropped,
            variables=spec.data.chat_template_kwargs,
        )
        self._groups = RecordedGroups(spec, objective, self._encoder.tokenizer)
        self._tally = Tally()
        self._forms: list[Form] = []
        self._kinds: set[tuple[int, str]] = set()
        """(Source, "text" or "chat") of the rows met."""
        self._files: list[tuple[int, Path]] = []
        """Each file that was met, after the rows of the data before it."""
        self._repeated = 0
        """Pairs whose strings both repeated the prompt."""
        self._notes: list[str] | None = None
        """Notes of the template; None until a chat was encoded."""
        self._report: OfflineReport | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        wanted = {name for source in self._sources for name in wanted_columns(self._spec, source)}
        for block in stream_sources(self._data, wanted, self._field, ROWS_PER_CHECK):
            form = self._form(block)
            recorded = form.name == "recorded groups"
            examples = self._recorded(block) if recorded else self._encoded(block, form)
            kept = self._within_limit(list(examples))
            if self._most_rows is not None:
                kept = kept[: self._most_rows - self._tally.rows]
            self._tally.read += block.table.num_rows
            self._tally.add(kept, block.source, self._shown)
            if kept:
                yield self._batch(kept)
            if self._tally.rows == self._most_rows:
                break
        self._report = self._finished()

    def report(self) -> OfflineReport:
        """The report, once all rows have been iterated."""
        if self._report is None:
            raise ValueError("the rows have not been read to their end")
        return self._report

    def _form(self, block: Block) -> Form:
        """The form of the block's source, by its first rows."""
        new = block.source == len(self._forms)
        if new or block.file != self._files[-1][1]:
            self._files.append((block.first_row, block.file))
        if new:
            source = self._sources[block.source]
            self._forms.append(
                form_of(block.columns, self._spec, source, self._objective, self._field)
            )
        form = self._forms[block.source]
        unused = form.unused_of(block.columns)
        self._unused |= dict.fromkeys((block.source, name) for name in unused)
        if self._dropped is None:
            empty = [name for name in block.table.column_names if is_empty(block.table[name])]
            said = [name for name in unused if name not in empty]
            refuse_silent(form, said, f"{self._field} = {str(block.file)!r}")
        return form

    def _encoded(self, block: Block, form: Form) -> Iterator[EncodedRow]:
        rows = list(rows_of(block.table, form, self._spec, self._objective, self._dropped))
        for found in rows:
            if isinstance(found, ParsedRow):
                self._meet(found.sides[0], block.source)
                self._repeated += found.repeated
        try:
            encoded = self._tokens(rows, form)
        except TokenizerError as error:
            self._stop(str(error))
        self._describe(rows, encoded)
        for index, (found, sides) in enumerate(zip(rows, encoded, strict=True)):
            try:
                if isinstance(found, MalformedError):
                    raise found
                yield from self._examples(block.first_row + index, found, sides)
            except MalformedError as error:
                self._refuse(error, block.first_row + index)

    def _tokens(
        self, rows: Sequence[ParsedRow | MalformedError], form: Form
    ) -> list[list[Tokens | MalformedError]]:
        """The tokens of each side of each row; empty for a malformed row."""
        alike: dict[tuple[bool, Target], list[tuple[int, Side]]] = {}
        for index, row in enumerate(rows):
            for side in row.sides if isinstance(row, ParsedRow) else ():
                key = isinstance(side, Chat), self._target(side, form)
                alike.setdefault(key, []).append((index, side))
        found: list[list[Tokens | MalformedError]] = [[] for _ in rows]
        for (_, target), members in alike.items():
            texts = [side for _, side in members if isinstance(side, Text)]
            chats = [side for _, side in members if isinstance(side, Chat)]
            tokens = [*self._encoder.texts(texts, target), *self._encoder.chats(chats, target)]
            for (index, _), one in zip(members, tokens, strict=True):
                found[index].append(one)
        return found

    def _examples(
        self, number: int, row: ParsedRow, sides: Sequence[Tokens | MalformedError]
    ) -> Iterator[EncodedRow]:
        """One table row, or two where KTO takes a pair."""
        good = []
        for side, found in zip(row.sides, sides, strict=True):
            if isinstance(found, MalformedError):
                raise found
            if isinstance(side, Text) and side.prompt is not None and not found.prompt:
                raise MalformedError("no_prompt")
            scored = isinstance(side, Chat) and self._objective == "reward_model"
            self._check_vocabulary(found)
            good.append(self._encoder.until_end(found) if scored else found)
        if len(good) == 2:
            first = row.sides[0]
            implicit = isinstance(first, Text) and first.prompt is None
            good = [*paired(good[0], good[1], implicit)]
        yield from self._rows(EncodedRow(number, tuple(good), row.label))

    def _rows(self, example: EncodedRow) -> Iterator[EncodedRow]:
        """The example once it is checked, or its two sides where KTO takes a pair."""
        example = checked(example)
        if self._objective == "kto" and len(example.sides) == 2:
            for tokens, label in zip(example.sides, (True, False), strict=True):
                yield EncodedRow(example.row, (tokens,), label)
        else:
            yield example

    def _check_vocabulary(self, tokens: Tokens) -> None:
        """Raise MalformedError for a token that the model has no embedding of."""
        size, highest = self._spec.vocabulary, int(tokens.ids.max(initial=0))
        if size is not None and highest >= size:
            raise MalformedError(
                "vocabulary",
                f"{decode_prompt(self._encoder.tokenizer, [highest])!r} has the id {highest}, and"
                f" the model has ids from 0 to {size - 1}",
            )

    def _recorded(self, block: Block) -> Iterator[EncodedRow]:
        if self._spec.data.loss_on not in ("auto", "completion"):
            self._stop(
                f"data.loss_on = {self._spec.data.loss_on!r} does not fit recorded groups; use auto"
            )
        try:
            groups = list(self._groups.sides(block.table, block.file))
        except ValueError as error:
            self._stop(str(error))
        for number, found in enumerate(groups, block.first_row):
            self._tally.unsuitable += found == []
            try:
                if isinstance(found, MalformedError):
                    raise found
                for sides in found or []:
                    yield from self._rows(EncodedRow(number, sides))
            except MalformedError as error:
                self._refuse(error, number)

    def _within_limit(self, examples: Sequence[EncodedRow]) -> list[EncodedRow]:
        """The examples within data.max_length, in order."""
        spec, tally = self._spec, self._tally
        long = [example for example in examples if example.length > spec.data.max_length]
        if not long or spec.data.length_policy.name == "split":
            return [*examples]
        if spec.data.length_policy.name == "error":
            self._stop(
                f"a sequence has {long[0].length} tokens, above data.max_length ="
                f" {spec.data.max_length}; raise that, or set data.length_policy: drop or truncate",
                long[0].row,
            )
        if spec.data.length_policy.name == "drop":
            tally.cuts += Cuts(dropped=len(long))
            return [example for example in examples if example.length <= spec.data.max_length]
        cut, kept = (
            iter(truncated(long, spec.data.max_length, side_of(spec.data.length_policy))),
            [],
        )
        for example in examples:
            if example.length <= spec.data.max_length:
                kept.append(example)
                continue
            try:
                shorter = next(cut)
                if shorter is None:
                    raise MalformedError("cut_away")
                kept.append(checked(shorter, "cut_away"))
                tally.cuts += Cuts(1, example.tokens - shorter.tokens)
            except MalformedError as error:
                self._refuse(error, example.row)
        return kept

    def _batch(self, examples: Sequence[EncodedRow]) -> pa.RecordBatch:
        columns: list[pa.Array] = []
        for sides in zip(*(example.sides for example in examples), strict=True):
            columns.append(lists([side.ids for side in sides]))
            columns.append(lists([side.mask for side in sides], MASK))
        if self._objective == "kto":
            columns.append(pa.array([example.label for example in examples], pa.bool_()))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _target(self, side: Side, form: Form) -> Target:
        try:
            return target_of(side, self._spec.data.loss_on, self._objective, form.name)
        except ValueError as error:
            self._stop(str(error))

    def _meet(self, side: Side, source: int) -> None:
        """Check the settings and the tokenizer once for texts, and once for chats."""
        kind = "chat" if isinstance(side, Chat) else "text"
        known = any(kind == other for _, other in self._kinds)
        self._kinds.add((source, kind))
        try:
            if not known:
                check_settings(side, self._spec, self._encoder.tokenizer)
        except ValueError as error:
            self._stop(str(error))

    def _describe(
        self,
        rows: Sequence[ParsedRow | MalformedError],
        encoded: Sequence[Sequence[Tokens | MalformedError]],
    ) -> None:
        """Describe what the settings do to the first chat without template variables of its own."""
        if self._notes is not None:
            return
        sides = (
            row.sides[0]
            for row, tokens in zip(rows, encoded, strict=True)
            if isinstance(row, ParsedRow) and isinstance(tokens[0], Tokens)
        )
        variables = self._spec.data.chat_template_kwargs
        chats = (side for side in sides if isinstance(side, Chat) and side.variables == variables)
        try:
            if (sample := next(chats, None)) is not None:
                self._notes = template_notes(sample, self._spec)
        except TemplateError as error:
            self._stop(str(error))

    def _refuse(self, error: MalformedError, row: int) -> None:
        """Count a malformed row, or stop at it: data.malformed decides."""
        detail = str(error)
        why = REASONS[error.reason]
        if self._spec.data.malformed == "error":
            more = f" ({detail})" if detail != why else ""
            self._stop(f"{why}{more}; correct it, or set data.malformed: drop", row)
        file, number = self._file_and_number(row)
        self._tally.refuse(error, f"row {number} of {str(file)!r}")

    def _stop(self, message: str, row: int | None = None) -> NoReturn:
        if row is None:
            raise ConfigError(
                f"{self._field} = {self._sources[len(self._forms) - 1].path!r}: {message}"
            )
        file, number = self._file_and_number(row)
        raise ConfigError(f"{self._field} = {str(file)!r}: row {number}: {message}")

    def _file_and_number(self, row: int) -> tuple[Path, int]:
        """The file of a row of the data, and the row's number there."""
        start, file = next(found for found in reversed(self._files) if found[0] <= row)
        return file, row - start

    def _shown(self, tokens: Tokens) -> str:
        return marked_text(tokens, lambda ids: decode_prompt(self._encoder.tokenizer, ids))

    def _finished(self) -> OfflineReport:
        tally, where = self._tally, named(self._data, self._field)
        sources = [
            SourceRows(
                source.label,
                tally.rows_of_source.get(index, 0),
                len(files_of(source, self._field)),
                source.weight,
            )
            for index, source in enumerate(self._sources)
        ]
        notes = [*(self._notes or ()), *count_notes(self._encoder.counts)]
        notes += dropped_notes(self._dropped or {})
        if self._repeated:
            notes.append(
                f"{self._repeated} pairs: both sides repeat the prompt, which is taken once"
            )
        notes += label_note(tally.labels) + self._encoder.coverage.notes()
        forms = []
        for index, (form, source) in enumerate(zip(self._forms, sources, strict=False)):
            kinds = {"text": "strings", "chat": "chats"}
            met = [name for kind, name in kinds.items() if (index, kind) in self._kinds]
            forms.append(form.name + (f" ({' and '.join(met)})" if met else ""))
            if found := [name for number, name in self._unused if number == index]:
                unused = ", ".join(map(repr, found))  # a name may contain anything
                notes.append(f"unused columns of {source.name}: {unused}")
        idle = idle_settings(self._spec, [form.name for form in self._forms])
        report = tally.report(sources, forms, idle, notes)
        if not report.rows:
            raise ConfigError(f"{where}: no row is left ({report.text()}); correct the data")
        for source in sources:
            if source.weight is not None and not source.rows and report.rows != self._most_rows:
                raise ConfigError(
                    f"{where}: no row of source {source.name!r} is left; correct it, or remove it"
                )
        return report
