"""The rows of training data as values: strings, and chats with a prompt. A row that cannot be
trained is malformed, for one of the REASONS."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from asyncrl.contracts.columns import column_values, without_absent
from asyncrl.data.forms import TOOLS, VARIABLES, Form, FormName
from asyncrl.data.spec import OfflineDataSpec, RowsFor
from asyncrl.text.chat_messages import Message, MessagesError, Schema, are_messages
from asyncrl.text.row_messages import (
    MARKS,
    Mark,
    MarkError,
    UnusedError,
    chat_value,
    row_messages,
    without_marks,
)
from asyncrl.text.template import own_variables, tool_schemas

REASONS: Final[Mapping[str, str]] = {
    "missing": "a value is missing",
    "type": "a value has the wrong type",
    "lengths": "lists have different lengths",
    "turns": "recorded turns do not fit together",
    "branched": "a session has several rows, and a pair compares whole sessions",
    "reward": "a reward is not finite",
    "vocabulary": "a token id is not in the vocabulary",
    "template": "the chat template refuses the chat",
    "unused": "a key or a part does not reach the text",
    "marks": "a mark of what is trained cannot be kept",
    "repeated": "a completion repeats its prompt",
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
    marks: Mapping[int, Mark] = field(default_factory=dict)
    """Index of a message → the key that says whether its turn is trained, and what it says."""
    started: str | None = None
    """Start of the first turn after the prompt, which the prompt contains."""
    own_tools: bool = field(default=False, compare=False)
    """Whether the row has its tools, and not the settings."""
    own_variables: tuple[str, ...] = field(default=(), compare=False)
    """Names of the variables that the row has."""
    added: int = field(default=0, compare=False)
    """Number of first messages that the settings add."""


Side = Text | Chat
Value = str | list[Message]


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """The values of one row: two sides of a pair (chosen first), or one."""

    sides: tuple[Side, ...]
    label: bool | None = None
    repeated: bool = field(default=False, compare=False)
    """Whether both sides of a pair repeated the prompt, which was left out of them."""


def rows_of(
    table: pa.Table,
    form: Form,
    spec: OfflineDataSpec,
    objective: RowsFor,
    dropped: Counter[str] | None = None,
) -> Iterator[ParsedRow | MalformedError]:
    """The rows of a table in a form other than recorded groups. A column that these rows lack is
    missing in each.

    Args:
        dropped: counts the parts of chats that are left out; None: they are refused.
    """
    values = [_values(table, name) for name in form.columns]
    tools, variables = (_values(table, name) for name in (form.tools, form.variables))
    read = READERS[form.name]
    for row in range(table.num_rows):
        sides = _Sides(spec, tools[row], variables[row], objective, dropped)
        try:
            yield read(sides, [column[row] for column in values], form)
        except MalformedError as error:
            yield error
        except UnusedError as error:
            yield MalformedError("unused", str(error))
        except MarkError as error:
            yield MalformedError("marks", str(error))
        except MessagesError as error:
            yield MalformedError("type", str(error))


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
    objective: RowsFor
    dropped: Counter[str] | None

    @property
    def compared(self) -> bool:
        """Whether completions are compared, so that an empty one is refused."""
        return self.objective != "sft"

    def text(self, value: object, prompt: str | None = None) -> Text:
        """A text, or a prompt with its completion."""
        if not isinstance(value, str):
            raise _wrong_type("text", value, "a string")
        if not value and prompt is None:
            raise MalformedError("no_completion", "its text is empty")
        for column, given in (
            (self.spec.data.tools_column or TOOLS, self._tools(own=True)),
            (VARIABLES, own_variables(self.own_variables)),
        ):
            if given and self.dropped is None:
                raise UnusedError(
                    f"its column {column!r} applies to chats, and it is a plain string; remove it,"
                    " or set data.unused_keys: drop"
                )
            if given and self.dropped is not None:
                self.dropped[f"column {column!r} of strings"] += 1
        return Text(prompt, value)

    def value(self, value: object, what: str) -> Value:
        """A prompt or completion: a string, or messages."""
        if value == []:
            raise MalformedError("no_prompt" if what == "prompt" else "no_completion")
        try:
            found = row_messages(chat_value(value), self.dropped)
        except UnusedError:
            raise
        except MessagesError as error:
            raise MalformedError("type", f"its {what}: {error}") from None
        if isinstance(found, str) or are_messages(found):
            return found
        raise _wrong_type(what, value, "a string, or a list of messages with role and content")

    def chat(
        self, messages: Sequence[Message], prompt: int = 0, started: str | None = None
    ) -> Chat:
        """A conversation whose first `prompt` messages are the prompt."""
        system = self.spec.data.system_prompt
        if system is not None and messages[0]["role"] in ("system", "developer"):
            raise MalformedError(
                "template", "it has its own system message, and data.system_prompt is set"
            )
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
            prompt += bool(prompt)
        plain, marks = without_marks(messages)
        if self.objective == "reward_model":
            _refuse_unscored(marks, prompt)
        own = own_variables(self.own_variables)
        return Chat(
            plain,
            prompt,
            self._tools(),
            {**self.spec.data.chat_template_kwargs, **own},
            marks,
            started,
            bool(self._tools(own=True)),
            tuple(own),
            int(system is not None),
        )

    def completed(self, prompt: Value, completion: Value) -> Side:
        """A prompt with its completion, each a string or messages."""
        if isinstance(completion, str) and repeats_prompt(completion, prompt):
            raise MalformedError(
                "repeated",
                f"its completion begins with its prompt {_asked(prompt)[:40]!r}, which would be"
                " trained twice; leave it out of the completion",
            )
        if (
            isinstance(prompt, str)
            and isinstance(completion, str)
            and not self.spec.data.apply_chat_template
        ):
            if self.compared and not completion:
                raise MalformedError("no_completion")
            return self.text(completion, prompt)
        messages, count, started = _joined(prompt, completion)
        if self.compared:
            _refuse_empty(messages[count:], started)
        return self.chat(messages, count, started)

    def pair(self, prompt: object, chosen: object, rejected: object) -> ParsedRow:
        """Two sides with the same prompt. Without a prompt, it is what the sides have in common."""
        asked = None if prompt is None else self.value(prompt, "prompt")
        sides = [
            self.value(value, name) for value, name in ((chosen, "chosen"), (rejected, "rejected"))
        ]
        if sides[0] == sides[1]:
            raise MalformedError("equal")
        whole = [isinstance(side, list) and side[0]["role"] != "assistant" for side in sides]
        if asked is None or (isinstance(asked, str) and any(whole)):
            return self._implicit(asked, sides)
        repeated = all(isinstance(side, str) and repeats_prompt(side, asked) for side in sides)
        if repeated:
            sides = [str(side).partition(_asked(asked).strip())[2] for side in sides]
        made = tuple(self.completed(asked, side) for side in sides)
        if len({*map(type, made)}) > 1:
            raise MalformedError("type", "one side is a string, the other a list of messages")
        return ParsedRow(made, repeated=repeated)

    def _implicit(self, prompt: str | None, sides: Sequence[Value]) -> ParsedRow:
        chosen, rejected = sides
        if isinstance(chosen, str) and isinstance(rejected, str):
            if self.spec.data.apply_chat_template:
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

    def _tools(self, own: bool = False) -> list[Schema] | None:
        """The row's tools, or else those of the settings."""
        try:
            its = tool_schemas(self.own_tools) or None
            return its if own else its or tool_schemas(self.spec.data.tools) or None
        except MessagesError as error:
            raise MalformedError("type", str(error)) from None


def _from_messages(sides: _Sides, values: Sequence[object], form: Form) -> ParsedRow:
    (value,) = values
    if value is None:
        raise MalformedError("missing", f"its column {form.columns[0]!r} is null")
    messages = sides.value(value, "chat")
    if isinstance(messages, str):
        raise _wrong_type("chat", value, "a list of messages with role and content")
    return ParsedRow((sides.chat(messages),))


def _from_prompt_completion(sides: _Sides, values: Sequence[object], form: Form) -> ParsedRow:
    return ParsedRow((sides.completed(*_prompted(sides, values, form)),))


def _from_preference(sides: _Sides, values: Sequence[object], form: Form) -> ParsedRow:
    _refuse_nulls(values[:2], form)
    chosen, rejected, prompt = values
    return sides.pair(prompt, chosen, rejected)


def _from_unpaired(sides: _Sides, values: Sequence[object], form: Form) -> ParsedRow:
    label = values[2]
    asked, completion = _prompted(sides, values, form)
    if label not in (True, False):  # 0 and 1 count as well
        raise _wrong_type("label", label, "true or false")
    return ParsedRow((sides.completed(asked, completion),), bool(label))


def _prompted(sides: _Sides, values: Sequence[object], form: Form) -> tuple[Value, Value]:
    """The prompt and the completion of a row."""
    _refuse_nulls(values, form)
    prompt, completion = values[:2]
    return sides.value(prompt, "prompt"), sides.value(completion, "completion")


def _from_text(sides: _Sides, values: Sequence[object], form: Form) -> ParsedRow:
    _refuse_nulls(values, form)
    if chat_value(values[0]) is not values[0]:
        raise MalformedError(
            "type", "its text is a chat as JSON; name its column 'messages' to train it as a chat"
        )
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


def _asked(prompt: object) -> str:
    """The text of a prompt, or of its last message."""
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    text = last.get("content") if isinstance(last, Mapping) else prompt
    return text if isinstance(text, str) else ""


def repeats_prompt(completion: str, prompt: object) -> bool:
    """Whether a completion begins with its prompt."""
    asked = _asked(prompt).strip()
    return bool(asked) and completion.lstrip().startswith(asked)


def _refuse_unscored(marks: Mapping[int, Mark], prompt: int) -> None:
    """Refuse turns of a completion that are marked as not trained: a reward model scores the end of
    the whole completion."""
    for index, (key, trained) in marks.items():
        if not trained and index >= prompt:
            raise MalformedError(
                "marks",
                f"message {index} is marked as not trained by {key!r}, and a reward model scores"
                " whole completions; remove the mark",
            )


def _joined(prompt: Value, completion: Value) -> tuple[list[Message], int, str | None]:
    """The whole conversation, how many of its messages are the prompt, and the start of the turn
    after these that the prompt contains.

    A completion may repeat the prompt: then it is the whole conversation. A prompt that ends with a
    message of the assistant, before a completion that starts with one, ends within a turn.

    Raises:
        MalformedError: the completion is another conversation.
    """
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    first = completion[0]["role"]
    if isinstance(prompt, str):
        asked = {"role": "user", "content": prompt}
        if first == "assistant":
            return [asked, *completion], 1, None
        count = next(
            (
                index
                for index, message in enumerate(completion, 1)
                if (message["role"], message.get("content")) == ("user", prompt)
            ),
            0,
        )
    elif completion[: len(prompt)] == prompt:
        count = len(prompt)
    elif first in ("system", "developer") or (first == "user" and prompt[-1]["role"] == "user"):
        count = 0
    elif first == "assistant" and prompt[-1]["role"] == "assistant":
        turn, started = _continued(prompt[-1], completion[0])
        return [*prompt[:-1], turn, *completion[1:]], len(prompt) - 1, started
    else:
        return [*prompt, *completion], len(prompt), None
    if not count:
        raise MalformedError("not_a_prefix")
    if count == len(completion):
        raise MalformedError("no_completion")
    return completion, count, None


def _continued(start: Message, rest: Message) -> tuple[Message, str]:
    """A turn from its start, which the prompt contains, and the rest of it; and the start's
    text."""
    first, more = start.get("content") or "", rest.get("content") or ""
    twice = {*start} & {*rest} - {"role", "content", *MARKS}
    if start.get("tool_calls") or twice or not (isinstance(first, str) and isinstance(more, str)):
        raise MalformedError(
            "not_a_prefix",
            "its prompt ends with a turn of the assistant that its completion cannot continue",
        )
    unmarked = {key: item for key, item in start.items() if key not in MARKS}
    return {**unmarked, **rest, "content": first + more}, first


def _refuse_empty(completion: Sequence[Message], started: str | None = None) -> None:
    """Raise MalformedError unless the completion of a compared side starts with the assistant, who
    says something."""
    if not completion:
        raise MalformedError("no_completion", "one side is the start of the other")
    if completion[0]["role"] != "assistant":
        raise MalformedError(
            "not_a_prefix", f"its completion starts with the role {completion[0]['role']!r}"
        )
    said = [m for m in completion if m["role"] == "assistant"]
    if not any(map(_says_something, said)) or (started and said[0].get("content") == started):
        raise MalformedError("no_completion")


def _says_something(message: Message) -> bool:
    content = message.get("content")
    if isinstance(content, list):
        content = any(part.get("text", part) for part in content if isinstance(part, dict))
    silent = ("role", "content", "name", *MARKS)
    others = {key: item for key, item in message.items() if key not in silent}
    return bool(content) or any(others.values())


def _common_length(left: Sequence[object], right: Sequence[object]) -> int:
    """Number of leading items that two sequences have in common."""
    equal = (a == b for a, b in zip(left, right, strict=False))
    return sum(1 for _ in itertools.takewhile(bool, equal))
