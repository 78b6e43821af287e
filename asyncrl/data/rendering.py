"""Rows as prompts: text and token ids as the model sees them, within the length limits.

Training, evaluation and the warm start share these functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from asyncrl.config import ConfigError, Source, sources_of
from asyncrl.config.schema import side_of
from asyncrl.contracts.columns import (
    column_values,
    encode_column,
    is_empty,
    is_json,
    json_field,
    row_values,
    without_absent,
)
from asyncrl.contracts.rows import (
    ADDED_COLUMNS,
    TRAJECTORY_COLUMNS,
    Prompt,
)
from asyncrl.data.forms import TOOLS, VARIABLES
from asyncrl.data.length_limits import LengthLimits, Limit, Truncated, truncate
from asyncrl.data.sources import Rows, read_sources
from asyncrl.data.spec import DataSpec
from asyncrl.text.chat_messages import MessagesError
from asyncrl.text.row_messages import ALPACA, CHAT_START, MEDIA_COLUMNS, TEXT_COLUMNS, chat_value
from asyncrl.text.template import Rendered, Template
from asyncrl.text.tokenizer import decode_prompt, load_tokenizer

TOKENS = pa.list_(pa.int32())
MESSAGES = "messages"
"""Column with the chat that a template rendered. Rewards receive it."""
Data = str | tuple[Source, ...]
"""A setting that names rows."""
TAKEN_COLUMNS = {
    *ADDED_COLUMNS,
    "prompts",
    "completions",
    *TRAJECTORY_COLUMNS,
}
"""Column names of asyncrl, and argument names of rewards."""


def read_prompt_rows(data: Data, spec: DataSpec, field: str) -> Rows:
    """Read the rows of a setting that names prompts, and check their columns.

    Raises:
        ConfigError: see `read_sources`; or the tools column is missing, or asyncrl uses the name of
            a column.
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
            f"{named(data, field)} has columns {taken}, which asyncrl uses itself; rename them"
        )
    if spec.data.unused_keys == "error":
        _refuse_unread(found.table, spec, data, named(data, field))
    return replace(found, table=_with_chats(found.table, spec, named(data, field)))


UNREAD_COLUMNS = {*MEDIA_COLUMNS, *TEXT_COLUMNS, *ALPACA, TOOLS, VARIABLES}
"""Columns that belong to the text. One without a value in any row has no effect to lose."""


def _refuse_unread(table: pa.Table, spec: DataSpec, data: Data, where: str) -> None:
    """Refuse columns that belong to the text, and that nothing writes there.

    Raises:
        ConfigError: there is such a column.
    """
    prompts = [source.prompt_column or spec.data.prompt_column for source in sources_of(data)]
    parts = {*MEDIA_COLUMNS, *TEXT_COLUMNS, *map(ALPACA.get, prompts)}
    for name in table.column_names:
        if name in UNREAD_COLUMNS and is_empty(table[name]):
            continue
        if name in parts and name != spec.data.tools_column:
            why = "only text reaches the model" if name in MEDIA_COLUMNS else "no prompt shows it"
            raise ConfigError(
                f"{where} has a column {name!r}, and {why}; rename it if only the reward reads it,"
                " put it into the prompt, or set data.unused_keys: drop"
            )
        if name == TOOLS and spec.data.tools_column is None:
            raise ConfigError(
                f"{where} has a column {TOOLS!r}, which no prompt shows; set data.tools_column:"
                f" {TOOLS}, rename it if only the reward reads it, or set data.unused_keys: drop"
            )
        if name == VARIABLES and spec.environment is not None:
            raise ConfigError(
                f"{where} has a column {VARIABLES!r}, which the sessions of an environment do not"
                " read; set data.chat_template_kwargs for all rows, or data.unused_keys: drop"
            )


def _with_chats(table: pa.Table, spec: DataSpec, where: str) -> pa.Table:
    """The table with chats instead of prompts that are JSON text of chats.

    Raises:
        ConfigError: a text begins like a chat, and is none.
    """
    column = spec.data.prompt_column
    if not (pa.types.is_string(table[column].type) or pa.types.is_large_string(table[column].type)):
        return table
    if is_json(table.schema.field(column)):
        return table  # its strings are JSON inside JSON, which the template reads
    begins = pc.match_substring_regex(table[column], CHAT_START.pattern)
    if not pc.any(begins).as_py():
        return table
    values: list[object] = []
    for row, value in enumerate(table[column].to_pylist()):
        try:
            values.append(chat_value(value))
        except MessagesError as error:
            raise ConfigError(f"{where}: row {row}: its prompt {error}") from None
    if all(isinstance(value, str) or value is None for value in values):
        return table
    field = json_field(column)
    return table.set_column(table.column_names.index(column), field, encode_column(values, field))


def named(data: Data, field: str) -> str:
    """A setting and its paths, for messages."""
    paths = [source.path for source in sources_of(data)]
    return f"{field} = {paths[0]!r}" if len(paths) == 1 else f"{field} = {paths}"


def prompt_values(table: pa.Table, column: str) -> list[object]:
    """The prompts of a table, or its tools: strings, or lists of messages with the keys of the
    file.

    A Parquet struct has every key in every row, so None there means that the key is absent.
    """
    field = table.schema.field(column)
    values = column_values(table[column], field)
    return [without_absent(value) for value in values] if pa.types.is_nested(field.type) else values


def template_of(spec: DataSpec) -> Template:
    """The template that turns the run's prompts into text and tokens."""
    data = spec.data
    return Template(
        spec.model.path,
        data.apply_chat_template,
        data.chat_template_kwargs,
        data.system_prompt,
        data.tools,
        Counter() if data.unused_keys == "drop" else None,
    )


def prompt_columns(table: pa.Table, spec: DataSpec) -> dict[str, list[object]]:
    """The prompts of a table, with their tools and variables of the template if it has them, as
    arguments of `Template.render`."""
    columns = {
        "values": spec.data.prompt_column,
        "tools": spec.data.tools_column,
        "variables": VARIABLES,
    }
    return {
        name: prompt_values(table, column)
        for name, column in columns.items()
        if column is not None and column in table.column_names
    }


def render_rows(
    table: pa.Table, spec: DataSpec, first_row: int = 0, template: Template | None = None
) -> Rendered:
    """The prompts of a table as the model sees them.

    Args:
        template: renders the prompts, and counts what it leaves out. None: a new template
            with the settings of `spec`.

    Raises:
        TemplateError: a prompt cannot be rendered.
    """
    template = template or template_of(spec)
    return template.render(**prompt_columns(table, spec), first_row=first_row)


def limits(spec: DataSpec, targets: bool = False, split: bool = False) -> LengthLimits:
    """The length limits of prompts, or of supervised rows if there are `targets`. `split`: packing
    will cut the rows, so only the prompt is bounded."""
    data = spec.data
    prompt = Limit(
        data.max_prompt_length,
        data.prompt_policy,
        "keep_end",
        "data.max_prompt_length",
        "data.prompt_policy",
    )
    if split:
        return LengthLimits(prompt)
    chosen = spec.warm_start.packing_strategy.completion_policy if spec.warm_start else "error"
    policy = "error" if chosen == "split" else chosen
    completion = Limit(
        spec.rollout.max_completion_length,
        policy,
        "keep_start",
        "rollout.max_completion_length",
        "warm_start.packing_strategy.completion_policy",
    )
    whole = (
        None
        if data.max_length is None
        else Limit(
            data.max_length,
            data.length_policy.name,
            side_of(data.length_policy),
            "data.max_length",
            "data.length_policy",
            "data.length_policy.side",
        )
    )
    return LengthLimits(prompt, completion if targets else None, whole)


def truncate_prompts(
    texts: Sequence[str], ids: Sequence[Sequence[int]], spec: DataSpec, first_row: int = 0
) -> tuple[list[str], Truncated]:
    """The used prompts within the limits, and their texts. A truncated prompt's text is decoded
    from its remaining tokens.

    Raises:
        TooLongError: see `truncate`.
    """
    truncated = truncate(pa.array(ids, TOKENS), {}, limits(spec), first_row)
    used = [texts[row] for row in truncated.kept]
    for index in np.flatnonzero(truncated.cut):
        used[index] = decode_prompt(
            load_tokenizer(spec.model.path), truncated.prompts[index].as_py()
        )
    return used, truncated


def refuse_empty(ids: Sequence[Sequence[int]], first_row: int, data: Data, field: str) -> None:
    """Raise ConfigError if a prompt has no tokens, because the first completion token needs a token
    before it."""
    empty = [row for row, tokens in enumerate(ids, first_row) if not tokens]
    if empty:
        raise ConfigError(
            f"{named(data, field)}: row {empty[0]} has an empty prompt (one of {len(empty)} such"
            " rows); remove them"
        )


def with_ordinals(table: pa.Table, ordinals: Sequence[int], epochs: Sequence[int]) -> pa.Table:
    """The table with the columns `ordinal` and `epoch`."""
    return table.append_column("ordinal", pa.array(ordinals, pa.int64())).append_column(
        "epoch", pa.array(epochs, pa.int32())
    )


def render_table(table: pa.Table, spec: DataSpec) -> pa.Table:
    """Replace the prompt column by prompt_text and prompt_ids within the limits. Every row must
    have passed `check_prompts`.

    Raises:
        ConfigError: a row is not used after all, so its ordinal would be missing.
    """
    rendered = render_rows(table, spec)
    texts, truncated = truncate_prompts(rendered.texts, rendered.ids, spec)
    if truncated.report.used < table.num_rows:
        raise ConfigError(
            "the prompts have changed since the check before the run"
            f" ({truncated.report.text()}); restore the file, or start a new run"
        )
    table = _with_messages(table, spec)
    return table.append_column("prompt_text", pa.array(texts, pa.string())).append_column(
        "prompt_ids", truncated.prompts
    )


def _gives_messages(table: pa.Table, spec: DataSpec) -> bool:
    """Whether rewards receive the chats of the prompts as MESSAGES: there are chats, and no other
    column has that name."""
    column = spec.data.prompt_column
    field = table.schema.field(column)
    chats = spec.data.apply_chat_template or is_json(field) or pa.types.is_nested(field.type)
    return chats and MESSAGES not in {*table.column_names} - {column}


def reward_schema(table: pa.Table, spec: DataSpec) -> pa.Schema:
    """The columns of a dataset's table that rewards receive."""
    column = spec.data.prompt_column
    fields = [field for field in table.schema if field.name != column]
    return pa.schema([*fields, json_field(MESSAGES)] if _gives_messages(table, spec) else fields)


def _with_messages(table: pa.Table, spec: DataSpec) -> pa.Table:
    """The table with the chats of its prompts, as in the dataset, instead of the prompts. Null for
    a prompt that is not a chat."""
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


def prompts_of(table: pa.Table, schema: pa.Schema) -> Iterator[Prompt]:
    """The prompts of a rendered table. `schema` has the dataset's columns."""
    ours = (table[name].to_pylist() for name in ("ordinal", "epoch", "prompt_text", "prompt_ids"))
    # Arrow cannot cast a slice of a struct in a struct whose values are all null (pyarrow 26).
    given = [
        table[field.name]
        if table[field.name].type == field.type
        else table[field.name].cast(field.type)
        for field in schema
    ]
    rows = (
        row_values(pa.table(given, schema=schema)) if given else [{} for _ in range(table.num_rows)]
    )
    for ordinal, epoch, text, ids, columns in zip(*ours, rows, strict=True):
        yield Prompt(ordinal, epoch, text, tuple(ids), columns, schema)
