"""The forms of training data, recognized from their columns, and the values of their rows.

| form | columns |
|---|---|
| text | `text` |
| messages | `messages`, or `conversations` with `from` and `value` |
| prompt-completion | `prompt` and `completion`, or data.target_column |
| preference | `chosen` and `rejected`, with or without `prompt` |
| unpaired preference | `prompt`, `completion` and `label` |
| recorded groups | the columns of a run's groups/*.parquet |

These are the forms that TRL documents, and asyncrl's own. A prompt or a completion is a string, or
a list of messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from asyncrl.config import ConfigError, OfflineDataConfig, Source
from asyncrl.contracts.rows import TURN_COLUMNS
from asyncrl.contracts.session_table import NODE_COLUMNS
from asyncrl.data.spec import OfflineDataSpec, RowsFor
from asyncrl.text.chat_messages import REASONING_FIELDS
from asyncrl.text.row_messages import ALPACA, MARKS, MEDIA_COLUMNS, TEXT_COLUMNS

FormName = Literal[
    "text", "messages", "prompt-completion", "preference", "unpaired preference", "recorded groups"
]
RECORDED: Final = (
    "attempt",
    "ordinal",
    "prompt_ids",
    "completion_ids",
    "loss_mask",
    "reward",
    "status",
)
"""Columns that identify rows recorded by a run, and all that is read of each of them. Groups of
sessions also have NODE_COLUMNS, which are read as well."""
RECORDED_TEXTS: Final = ("prompt_text", "completion_text")
"""Columns of recorded rows that only show which tokenizer made the tokens."""
VARIABLES: Final = "chat_template_kwargs"
TOOLS: Final = "tools"
PAIRS = "chosen and rejected, with or without prompt; or a run's groups/*.parquet"
WANTED: Final[Mapping[RowsFor, str]] = {
    "sft": (
        "text; messages; prompt and completion (or data.target_column); or a run's groups/*.parquet"
    ),
    "dpo": PAIRS,
    "reward_model": PAIRS,
    "kto": f"prompt, completion and label; or {PAIRS}",
}
"""What the rows are for → the columns that it takes, for messages."""


@dataclass(frozen=True, slots=True)
class Form:
    """A form, and the columns that it uses."""

    name: FormName
    columns: tuple[str, ...]
    """In the order in which the form names them."""
    unused: tuple[str, ...]
    """Columns of the data that are not used."""
    tools: str | None = None
    variables: str | None = None

    def unused_of(self, columns: Iterable[str]) -> tuple[str, ...]:
        """The columns among these that are not used. Later rows of a file may have others."""
        if self.name == "recorded groups":
            return ()
        return tuple(sorted({*columns} - {*self.columns, self.tools, self.variables}))


def wanted_columns(spec: OfflineDataSpec, source: Source) -> set[str]:
    """All columns that a form of this source may use, or whose values must be empty."""
    names = {
        "text", "messages", "conversations", "completion", "chosen", "rejected", "label",
        VARIABLES, spec.data.tools_column or TOOLS, source.prompt_column or spec.data.prompt_column,
        *RECORDED, *RECORDED_TEXTS, *NODE_COLUMNS, *TEXT_COLUMNS, *REASONING_FIELDS, *ALPACA,
    }  # fmt: skip
    if spec.data.unused_keys == "error":
        names |= {*MARKS, *MEDIA_COLUMNS}
    return names | {spec.data.target_column} if spec.data.target_column else names


def form_of(
    columns: Sequence[str], spec: OfflineDataSpec, source: Source, objective: RowsFor, field: str
) -> Form:
    """The form of a source with these columns, for an objective.

    If several fit, recorded groups come first, since a dataset's own columns may be among theirs.
    Then comes the first one of the module's table that has more than one column, then `messages`,
    then `text`. Settings that name columns do not apply to recorded groups.

    Raises:
        ConfigError: none fits, or a setting names a column that is missing.
    """
    there = set(columns)
    where = f"{field} = {source.path!r}"
    prompt = source.prompt_column or spec.data.prompt_column
    if spec.data.target_column is not None and objective != "sft":
        raise ConfigError(
            f"data.target_column = {spec.data.target_column!r} has no effect on {objective}; leave"
            " it out"
        )
    if there.issuperset(RECORDED):
        if source.prompt_column is not None:
            raise ConfigError(
                f"prompt_column of the source = {source.prompt_column!r} has no effect on the"
                f" recorded groups of {where}; leave it out"
            )
        if there & TURN_COLUMNS.keys() and not there.issuperset(NODE_COLUMNS):
            raise ConfigError(
                f"{where} has groups of sessions without the columns"
                f" {sorted({*NODE_COLUMNS} - there)}; give the files as the run wrote them"
            )
        return Form("recorded groups", RECORDED, ())
    _refuse_missing(spec, source, there, where)
    found: tuple[FormName, tuple[str, ...]] | None = next(
        (
            (name, used)
            for name, used in _candidates(spec, prompt, objective)
            if there.issuperset(used)
        ),
        None,
    )
    if found is None:
        raise ConfigError(
            f"{where} has the columns {sorted(columns)}, which are no form for {objective}; it"
            f" takes {WANTED[objective]}"
        )
    name, used = found
    # Optional columns are named even if they are missing: later rows of a JSONL file may have them.
    if name == "preference":
        used = (*used, prompt)
    chats = name != "text"
    tools, variables = (spec.data.tools_column or TOOLS, VARIABLES) if chats else (None, None)
    found_form = Form(name, used, (), tools, variables)
    return replace(found_form, unused=found_form.unused_of(there))


def refuse_silent(form: Form, unused: Iterable[str], where: str) -> None:
    """Refuse unused columns that say what is trained, or that hold a part of the chat.

    Raises:
        ConfigError: there is such a column.
    """
    for name in unused:
        alpaca = ALPACA.get(name) in form.columns
        if name in (*TEXT_COLUMNS, *REASONING_FIELDS) or alpaca:
            raise ConfigError(
                f"{where} has a column {name!r}, which is no part of {form.name} rows; put it into"
                " the messages or the prompt, name a column of tools in data.tools_column, or set"
                " data.unused_keys: drop"
            )
        if name in MARKS:
            raise ConfigError(
                f"{where} has a column {name!r}, which marks rows or turns that are trained, and"
                " nothing reads it; put the marks into the messages, or set data.unused_keys: drop"
            )
        if name in MEDIA_COLUMNS:
            raise ConfigError(
                f"{where} has a column {name!r}, and only text reaches the model; remove it, or set"
                " data.unused_keys: drop"
            )


def _candidates(
    spec: OfflineDataSpec, prompt: str, objective: RowsFor
) -> Iterator[tuple[FormName, tuple[str, ...]]]:
    """The other forms that an objective takes, with the columns that each needs."""
    pair = ("chosen", "rejected")
    match objective:
        case "sft":
            yield "prompt-completion", (prompt, spec.data.target_column or "completion")
            if spec.data.target_column is None:
                yield "messages", ("messages",)
                yield "messages", ("conversations",)
                yield "text", ("text",)
        case "dpo" | "reward_model":
            yield "preference", pair
        case "kto":
            yield "unpaired preference", (prompt, "completion", "label")
            yield "preference", pair


def _refuse_missing(spec: OfflineDataSpec, source: Source, there: set[str], where: str) -> None:
    """Raise ConfigError for a named column that is not there."""
    default = OfflineDataConfig.model_fields["prompt_column"].default
    named = {
        "prompt_column of the source": source.prompt_column,
        "data.prompt_column": None
        if source.prompt_column or spec.data.prompt_column == default
        else spec.data.prompt_column,
        "data.target_column": spec.data.target_column,
        "data.tools_column": spec.data.tools_column,
    }
    for setting, name in named.items():
        if name is not None and name not in there:
            raise ConfigError(
                f"{setting} = {name!r} is not a column of {where}, which has {sorted(there)}; name"
                " one of them"
            )
