"""Supervised rows: the token ids of a prompt and its target, within their length limits."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from asyncrl.config import ConfigError
from asyncrl.contracts.columns import column_values
from asyncrl.contracts.offline_rows import TokenRow
from asyncrl.data.form_rows import repeats_prompt
from asyncrl.data.length_limits import LengthReport, TooLongError, truncate
from asyncrl.data.prompts import ROWS_PER_CHECK, in_turn
from asyncrl.data.rendering import (
    TOKENS,
    Data,
    limits,
    named,
    prompt_values,
    read_prompt_rows,
    refuse_empty,
    render_rows,
)
from asyncrl.data.spec import DataSpec
from asyncrl.text.chat_messages import MessagesError
from asyncrl.text.round_trip import Coverage
from asyncrl.text.row_messages import chat_value
from asyncrl.text.stops import chat_end_token
from asyncrl.text.template import TemplateError
from asyncrl.text.tokenizer import TokenizerError, encode_prompts, load_tokenizer


def read_supervised(spec: DataSpec, data: Data, field: str) -> tuple[list[TokenRow], LengthReport]:
    """Read the rows of a file with prompts and warm_start.target_column, in file order. Several
    sources take turns. Returns the rows, and what the limits did.

    Rows of warm_start.data may have any length with `completion_policy: split` of
    warm_start.packing_strategy. EOS is appended before truncation. So a target that loses its end
    has no EOS, and the model does not learn to stop in the middle. A row without a target (null) is
    refused.

    Raises:
        ConfigError: the file, a column or a row cannot be used, or no row is left.
    """
    found = read_prompt_rows(data, spec, field)
    table, kept = found.table, list[int]()
    assert spec.warm_start is not None
    column = spec.warm_start.target_column
    if column not in table.column_names:
        others = sorted(set(table.column_names) - {spec.data.prompt_column})
        raise ConfigError(
            f"warm_start.target_column = {column!r} is not a column of {named(data, field)}, which"
            f" has {others}; name one of them"
        )
    split = spec.warm_start.splits and field == "warm_start.data"
    rows: list[TokenRow] = []
    report = LengthReport()
    for start in range(0, table.num_rows, ROWS_PER_CHECK):
        block = table.slice(start, ROWS_PER_CHECK)
        try:
            prompts = render_rows(block, spec, start).ids
            refuse_empty(prompts, start, data, field)
            values = column_values(block[column], block.schema.field(column))
            _refuse_no_text(values, prompt_values(block, spec.data.prompt_column), start)
            targets = _targets(values, spec)
            truncated = truncate(
                pa.array(prompts, TOKENS),
                {"completion": pa.array(targets, TOKENS)},
                limits(spec, targets=True, split=split),
                start,
            )
        except (TooLongError, MessagesError, TemplateError, TokenizerError) as error:
            raise ConfigError(f"{named(data, field)}: {error}") from None
        rows += zip(
            truncated.prompts.to_pylist(),
            truncated.completions["completion"].to_pylist(),
            strict=True,
        )
        kept += (truncated.kept + start).tolist()
        report += truncated.report
    if not rows:
        raise ConfigError(
            f"{named(data, field)}: no row is left ({report.text()}); raise the limits, or put"
            f" targets into column {column!r}"
        )
    return [rows[index] for index in in_turn(kept, found.sources)], report


def supervised_rows(spec: DataSpec) -> tuple[list[TokenRow], list[TokenRow]]:
    """The warm start's rows, and the first eval.max_prompts held-out rows. `make_plan` has checked
    both files."""
    assert spec.warm_start is not None and spec.eval.data is not None
    train, _ = read_supervised(spec, spec.warm_start.data, "warm_start.data")
    held_out, _ = read_supervised(spec, spec.eval.data, "eval.data")
    return train, held_out[: spec.eval.max_prompts]


def _refuse_no_text(values: Sequence[object], prompts: Sequence[object], first: int) -> None:
    """Refuse targets that are chats, and targets that begin with their prompt.

    Args:
        first: row number of the first value.

    Raises:
        TemplateError: there is such a target.
    """
    for row, (value, prompt) in enumerate(zip(values, prompts, strict=True), first):
        if isinstance(value, list | dict) or chat_value(value) is not value:
            raise TemplateError(
                f"row {row} has the target {str(value)[:60]!r}, which is no text; write what the"
                " model should answer as a string"
            )
        if isinstance(value, str) and repeats_prompt(value, prompt):
            raise TemplateError(
                f"row {row} has a target that begins with its prompt, which would be trained twice;"
                " leave it out of the target"
            )


def _targets(values: Sequence[object], spec: DataSpec) -> list[list[int]]:
    """Token ids of the targets with the token that ends them: the template's end of turn if it
    renders the prompts, else EOS. Empty for null."""
    tokenizer = load_tokenizer(spec.model.path)
    data = spec.data
    end = chat_end_token(tokenizer, data.chat_template_kwargs) if data.apply_chat_template else None
    end = tokenizer.eos_token_id if end is None else end
    if end is None:
        raise ConfigError(
            f"model.path = {spec.model.path!r}: its tokenizer has no EOS token, which supervised"
            " rows need; set one there"
        )
    texts = ["" if value is None else str(value) for value in values]
    ids, _ = encode_prompts(tokenizer, texts, rendered=True)
    Coverage(tokenizer, spec.model.path).add(texts, ids)
    return [
        [] if value is None else [*target, end] for value, target in zip(values, ids, strict=True)
    ]
