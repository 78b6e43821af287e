"""The rows of training data as values: strings, and chats with a prompt. A row that cannot be
trained is malformed, for one of the REASONS."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from asyncrl.contracts.columns import column_values, without_absent
from asyncrl.data.forms import VARIABLES, Form, FormName
from asyncrl.data.offline_spec import OfflineDataSpec, RowsFor
from asyncrl.text.template import Message, MessagesError, Schema, are_messages, tool_schemas

__all__ = ["REASONS", "Chat", "MalformedError", "ParsedRow", "Side", "Text", "rows_of"]

REASONS: Final[Mapping[str, str]] = {
    "missing": "a value is missing",
    "type": "a value has the wrong type",
    "lengths": "lists have different lengths",
    "turns": "recorded turns do not fit together",
    "branched": "a session has several rows, and a pair compares whole sessions",
    "reward": "a reward is not finite",
    "vocabulary": "a token id is not in the vocabulary",
    "template": "the chat template refuses the chat",
    "not_a_prefix": "the prompt is no prefix of its conversation",
    "rewritten": "the chat template changes an earlier turn when the chat continues",
    "no_prompt": "the prompt is empty",
    "no_completion": "a completion is empty",
    "no_turn": "no turn of the assistant",
    "equal": "both sides are equal",
    "no_target": "no token to train",
    "cut_away": "no token to train is left within data.max_length",
}
"""Name of each reason for which a row cannot be trained → the reason in words."""
SHAREGPT_ROLES: Final = {"human": "user", "gpt": "assistant"}
"""Role in `from` → role of the message. Other roles stay."""


class MalformedError(ValueError):
    """A row cannot be trained. `reason` is a key of REASONS. The message says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or REASONS[reason])
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and its completion as plain strings. Without a prompt, the completion is the whole
    text."""

    prompt: str | None
    completion: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A whole conversation, with the system prompt of the settings."""

    messages: Sequence[Message]
    prompt: int
    """Number of messages that are the prompt; 0 = there is no prompt."""
    tools: Sequence[Schema] | None = None
    variables: Mapping[str, object] = field(default_factory=dict)
    """Variables of the template."""


Side = Text | Chat
Value = str | list[Message]


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """The values of one row: two sides of a pair (chosen first), or one."""

    sides: tuple[Side, ...]
    label: bool | None = None


def rows_of(
    table: pa.Table, form: Form, spec: OfflineDataSpec, objective: RowsFor
) -> Iterator[ParsedRow | MalformedError]:
    """The rows of a table in a form other than recorded groups. A column that these rows lack is
    missing in each."""
    values = [_values(table, name) for name in form.columns]
    tools, variables = (_values(table, name) for name in (form.tools, form.variables))
    read = READERS[form.name]
    for row in range(table.num_rows):
        sides = _Sides(spec, tools[row], variables[row], compared=objective != "sft")
        try:
            yield read(sides, [column[row] for column in values], form)
        except MalformedError as error:
            yield error


def _values(table: pa.Table, column: str | None) -> list[object]:
    """The values of a column. A Parquet struct has every key in every row, so None there means that
    the key is absent."""
    if column is None or column not in table.column_names:
        return [None] * table.num_rows
    field = table.schema.field(column)
    values = column_values(table[column], field)
    return [without_absent(value) for value in values] if pa.types.is_nested(field.type) else values


@dataclass(frozen=True, slots=True)
class _Sides:
    """Makes the sides of one row."""

    spec: OfflineDataSpec
    own_tools: object
    own_variables: object
    compared: bool
    """Whether completions are compared, so that an empty one is refused."""

    def text(self, value: object) -> Text:
        if not isinstance(value, str):
            raise _wrong_type("text", value, "a string")
        if not value:
            raise MalformedError("no_completion", "its text is empty")
        return Text(None, value)

    def chat(self, value: object, prompt: int = 0) -> Chat:
        """A conversation whose first `prompt` messages are the prompt."""
        messages = _parsed(value)
        if not are_messages(messages):
            raise _wrong_type("chat", value, "a list of messages with role and content")
        system = self.spec.system_prompt
        if system is not None and messages[0]["role"] == "system":
            raise MalformedError(
                "template", "it has its own system message, and data.system_prompt is set"
            )
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
            prompt += bool(prompt)
        return Chat(messages, prompt, self._tools(), self._variables())

    def completed(self, prompt: object, completion: object) -> Side:
        """A prompt with its completion, each a string or messages."""
        if prompt == []:
            raise MalformedError("no_prompt")
        if completion == []:
            raise MalformedError("no_completion")
        before, after = _value(prompt, "prompt"), _value(completion, "completion")
        if isinstance(before, str) and isinstance(after, str) and not self.spec.apply_chat_template:
            if self.compared and not after:
                raise MalformedError("no_completion")
            return Text(before, after)
        messages, count = _joined(before, after)
        if self.compared:
            _refuse_empty(messages[count:])
        return self.chat(messages, count)

    def pair(self, prompt: object, chosen: object, rejected: object) -> ParsedRow:
        """Two sides with the same prompt. Without a prompt, it is what the sides have in common."""
        sides = [
            _value(value, name) for value, name in ((chosen, "chosen"), (rejected, "rejected"))
        ]
        if chosen == rejected:
            raise MalformedError("equal")
        whole = [isinstance(side, list) and side[0]["role"] != "assistant" for side in sides]
        if prompt is None or (isinstance(prompt, str) and any(whole)):
            return self._implicit(prompt, sides)
        made = tuple(self.completed(prompt, side) for side in sides)
        if len({*map(type, made)}) > 1:
            raise MalformedError("type", "one side is a string, the other a list of messages")
        return ParsedRow(made)

    def _implicit(self, prompt: str | None, sides: Sequence[Value]) -> ParsedRow:
        chosen, rejected = sides
        if isinstance(chosen, str) and isinstance(rejected, str):
            if self.spec.apply_chat_template:
                raise MalformedError(
                    "type",
                    "without a prompt, its strings cannot become messages; leave out"
                    " data.apply_chat_template",
                )
            if chosen.startswith(rejected) or rejected.startswith(chosen):
                raise MalformedError("no_completion", "one side is the start of the other")
            return ParsedRow((self.text(chosen), self.text(rejected)))
        if isinstance(chosen, str) or isinstance(rejected, str):
            raise MalformedError("type", "one side is a string, the other a list of messages")
        count = _common_length(chosen, rejected)
        if not count or (
            prompt is not None and all(m.get("content") != prompt for m in chosen[:count])
        ):
            raise MalformedError(
                "not_a_prefix",
                "its sides do not begin with the same messages"
                + (", or its prompt is none of these" if prompt is not None else ""),
            )
        for side in (chosen, rejected):
            _refuse_empty(side[count:])
        return ParsedRow((self.chat(chosen, count), self.chat(rejected, count)))

    def _tools(self) -> list[Schema] | None:
        try:
            return tool_schemas(self.own_tools) or tool_schemas(self.spec.tools) or None
        except MessagesError as error:
            raise MalformedError("type", str(error)) from None

    def _variables(self) -> dict[str, object]:
        own = _parsed(self.own_variables)
        if own is not None and not isinstance(own, dict):
            raise _wrong_type(VARIABLES, own, "an object")
        return {**self.spec.chat_template_kwargs, **(own or {})}


def _from_messages(sides: _Sides, values: Sequence[object], form: Form) -> ParsedRow:
    (value,) = values
    if value is None:
        raise MalformedError("missing", f"its column {form.columns[0]!r} is null")
    return ParsedRow((sides.chat(_as_messages(_parsed(value))),))


def _from_prompt_completion(sides: _Sides, values: Sequence[object], form: Form) -> ParsedRow:
    _refuse_nulls(values, form)
    prompt, completion = values
    return ParsedRow((sides.completed(prompt, completion),))


def _from_preference(sides: _Sides, values: Sequence[object], form: Form) -> ParsedRow:
    _refuse_nulls(values[:2], form)
    chosen, rejected, prompt = values
    return sides.pair(prompt, chosen, rejected)


def _from_unpaired(sides: _Sides, values: Sequence[object], form: Form) -> ParsedRow:
    _refuse_nulls(values, form)
    prompt, completion, label = values
    if label not in (True, False):  # 0 and 1 count as well
        raise _wrong_type("label", label, "true or false")
    return ParsedRow((sides.completed(prompt, completion),), bool(label))


def _from_text(sides: _Sides, values: Sequence[object], form: Form) -> ParsedRow:
    _refuse_nulls(values, form)
    return ParsedRow((sides.text(values[0]),))


READERS: Final[Mapping[FormName, Callable[[_Sides, Sequence[object], Form], ParsedRow]]] = {
    "text": _from_text,
    "messages": _from_messages,
    "prompt-completion": _from_prompt_completion,
    "preference": _from_preference,
    "unpaired preference": _from_unpaired,
}


def _refuse_nulls(values: Sequence[object], form: Form) -> None:
    for value, name in zip(values, form.columns, strict=False):
        if value is None:
            raise MalformedError("missing", f"its column {name!r} is null")


def _wrong_type(what: str, value: object, wanted: str) -> MalformedError:
    return MalformedError("type", f"its {what} is {repr(value)[:80]}; give {wanted}")


def _value(value: object, what: str) -> Value:
    """A prompt or completion: a string, or messages."""
    if isinstance(value, str) or are_messages(value):
        return value
    raise _wrong_type(what, value, "a string, or a list of messages with role and content")


def _parsed(value: object) -> object:
    """The value of JSON text, or the value itself."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _as_messages(value: object) -> object:
    """Messages with `from` and `value` as messages with `role` and `content`."""
    if not (
        isinstance(value, list)
        and all(isinstance(m, dict) and {"from", "value"} <= set(m) for m in value)
    ):
        return value
    names = {"from": "role", "value": "content"}
    messages = [{names.get(key, key): item for key, item in m.items()} for m in value]
    return [{**m, "role": SHAREGPT_ROLES.get(str(m["role"]), m["role"])} for m in messages]


def _joined(prompt: Value, completion: Value) -> tuple[list[Message], int]:
    """The whole conversation, and how many of its messages are the prompt.

    A completion may repeat the prompt: then it is the whole conversation.

    Raises:
        MalformedError: the completion is another conversation.
    """
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    first = completion[0]["role"]
    if isinstance(prompt, str):
        asked = {"role": "user", "content": prompt}
        if first == "assistant":
            return [asked, *completion], 1
        count = next(
            (
                place
                for place, message in enumerate(completion, 1)
                if (message["role"], message.get("content")) == ("user", prompt)
            ),
            0,
        )
    elif completion[: len(prompt)] == prompt:
        count = len(prompt)
    elif first == "system" or (first == "user" and prompt[-1]["role"] == "user"):
        count = 0
    else:
        return [*prompt, *completion], len(prompt)
    if not count:
        raise MalformedError("not_a_prefix")
    if count == len(completion):
        raise MalformedError("no_completion")
    return completion, count


def _refuse_empty(completion: Sequence[Message]) -> None:
    """Raise MalformedError unless the completion of a compared side starts with the assistant, who
    says something."""
    if not completion:
        raise MalformedError("no_completion", "one side is the start of the other")
    if completion[0]["role"] != "assistant":
        raise MalformedError(
            "not_a_prefix", f"its completion starts with the role {completion[0]['role']!r}"
        )
    if not any(_says_something(m) for m in completion if m["role"] == "assistant"):
        raise MalformedError("no_completion")


def _says_something(message: Message) -> bool:
    content = message.get("content")
    if isinstance(content, list):
        content = any(part.get("text", part) for part in content if isinstance(part, dict))
    others = {key: item for key, item in message.items() if key not in ("role", "content", "name")}
    return bool(content) or any(others.values())


def _common_length(left: Sequence[object], right: Sequence[object]) -> int:
    """Number of leading items that two sequences have in common."""
    equal = (a == b for a, b in zip(left, right, strict=False))
    return sum(1 for _ in itertools.takewhile(bool, equal))
