"""Renders prompts: plain strings as they are, and chats through the model's chat template with a
system prompt, tools and template variables."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from asyncrl.text.chat_messages import Message, MessagesError, Schema, are_messages
from asyncrl.text.row_chats import (
    RowChat,
    RowChats,
    refusal,
    render,
    reserved_names,
    template_variables,
)
from asyncrl.text.row_messages import UnusedError, chat_value, row_messages, without_marks
from asyncrl.text.schema_references import PartsLeft, SchemaError, resolved_tool
from asyncrl.text.tokenizer import encode_prompts, load_tokenizer, special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""The tag that a template puts before what the model writes."""


class TemplateError(ValueError):
    """A prompt cannot be rendered, or a setting has no effect on the template. The message is one
    line and names the setting or the row."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Rendered prompts, as texts and token ids."""

    texts: list[str]
    ids: list[list[int]]
    own_bos: int = 0
    """Number of plain prompts that already began with BOS, and did not get a second one."""
    continued: int = 0
    """Number of chats that end with the start of the assistant's turn."""


@dataclass(frozen=True, slots=True)
class Template:
    """Turns the values of the prompt column into text and tokens. The fields are settings of the
    section `data`."""

    model: str
    """Checkpoint directory."""
    apply: bool = False
    """Render each string prompt as one user message. Chats are always rendered."""
    kwargs: Mapping[str, object] = field(default_factory=dict)
    """Variables of the template, such as enable_thinking."""
    system_prompt: str | None = None
    """Added as a system message to every chat."""
    tools: Sequence[Schema] | None = None
    """JSON schemas of functions, for prompts without their own tools."""
    dropped: Counter[str] | None = field(default=None, compare=False)
    """Counts the parts of chats that do not reach the text and are left out. None: such a part is
    refused."""

    def render(
        self,
        values: Sequence[object],
        tools: Sequence[object] | None = None,
        first_row: int = 0,
        variables: Sequence[object] | None = None,
    ) -> Rendered:
        """Render and encode prompts. A chat that ends with the assistant's message is continued
        there.

        Args:
            values: strings, lists of chat messages, or such a list as JSON text.
            tools: for each prompt, a list of JSON schemas, such a list as JSON text, or None.
            first_row: row number of the first value, for error messages.
            variables: for each prompt, variables of the template, or such an object as JSON text,
                or None. They come on top of those of the settings.

        Raises:
            TemplateError: a value is not a string or a chat, the tokenizer has no template, or
                the template refuses a chat.
        """
        tokenizer = load_tokenizer(self.model)
        each = tools or [None] * len(values)
        own = variables or [None] * len(values)
        values = [self._value(value, row) for row, value in enumerate(values, first_row)]
        chats = [self._is_chat(value) for value in values]
        if any(chats) and not tokenizer.chat_template:
            for row, value in enumerate(values):
                if chats[row]:
                    self._messages(value, first_row + row, Counter())
            raise TemplateError(
                f"model.path = {self.model!r}: its tokenizer has no chat template; use string"
                " prompts and data.apply_chat_template: false, without data.system_prompt,"
                " chat_template_kwargs and tools"
            )
        if not all(chats):
            self._refuse_without_chat(each, own)
        self._refuse_rendered(tokenizer, values, first_row)
        texts = [
            value
            if isinstance(value, str) and not self.apply
            else self._text(tokenizer, value, its_tools, row, its_variables)
            for row, (value, its_tools, its_variables) in enumerate(
                zip(values, each, own, strict=True), first_row
            )
        ]
        ids: list[list[int]] = [[] for _ in texts]
        own_bos = 0
        for rendered in (True, False):  # a template writes BOS
            rows = [row for row, chat in enumerate(chats) if chat is rendered]
            encoded, doubled = encode_prompts(tokenizer, [texts[row] for row in rows], rendered)
            own_bos += doubled
            for row, tokens in zip(rows, encoded, strict=True):
                ids[row] = tokens
        continued = sum(_continues(value) for value in values)
        return Rendered(texts, ids, own_bos, continued)

    def check(
        self,
        values: Sequence[object],
        tools: Sequence[object] | None = None,
        variables: Sequence[object] | None = None,
    ) -> list[str]:
        """Describe the effect of each setting on a sample: the first chat with tools, or the first.
        Chats without variables of their own come first.

        Raises:
            TemplateError: a setting has no effect, because the template ignores it.
        """
        each = tools or [None] * len(values)
        ours = variables or [None] * len(values)
        values = [self._value(value, row) for row, value in enumerate(values)]
        chats = [
            (value, own)
            for _, value, own in sorted(
                zip(map(bool, ours), values, each, strict=True), key=lambda chat: chat[0]
            )
            if self._is_chat(value)
        ]
        if not chats:
            return []
        tokenizer = load_tokenizer(self.model)
        value, own = next(((value, own) for value, own in chats if own), chats[0])
        if taken := reserved_names(tokenizer, self.kwargs):
            raise TemplateError(
                f"data.chat_template_kwargs = {dict(self.kwargs)!r}: {taken[0]} is not a variable"
                " of a template; leave it out"
            )
        sample = _Sample(
            tokenizer, value, own, self._text(tokenizer, value, own, 0), self._tools(own, 0)
        )
        return [
            *self._system_prompt_note(sample),
            *self._tools_note(sample),
            *self._variable_notes(sample),
            *self._date_note(sample),
        ]

    def _system_prompt_note(self, sample: _Sample) -> list[str]:
        if self.system_prompt is None:
            return []
        if sample.is_unchanged_by(replace(self, system_prompt=None)):
            raise TemplateError(
                f"data.system_prompt: the chat template of model.path = {self.model!r} leaves"
                " system messages out; remove it"
            )
        return [f"system prompt of {len(self.system_prompt)} characters"]

    def _tools_note(self, sample: _Sample) -> list[str]:
        schemas = sample.schemas
        if not schemas:
            return []
        if replace(sample, own_tools=None).is_unchanged_by(replace(self, tools=None)):
            raise TemplateError(
                "data.tools or data.tools_column: the chat template of model.path ="
                f" {self.model!r} leaves tools out; remove them, or use a model whose template"
                " has them"
            )
        return [f"{len(schemas)} {'tool' if len(schemas) == 1 else 'tools'}"]

    def _variable_notes(self, sample: _Sample) -> list[str]:
        notes = []
        for name, setting in self.kwargs.items():
            others = {key: kept for key, kept in self.kwargs.items() if key != name}
            acts = not sample.is_unchanged_by(replace(self, kwargs=others))
            if not acts and not sample.template_mentions(name):
                raise TemplateError(
                    f"data.chat_template_kwargs: the chat template of model.path = {self.model!r}"
                    f" does not use {name}, so it has no effect; remove it"
                )
            notes.append(f"{name} = {setting!r}" + ("" if acts else " (no effect on this prompt)"))
        return notes

    def _date_note(self, sample: _Sample) -> list[str]:
        another_day = replace(self, kwargs={**self.kwargs, "strftime_now": lambda form: form})
        if sample.is_unchanged_by(another_day):
            return []
        return [
            "the template writes today's date, so prompts change from day to day; set a fixed date"
            " with data.chat_template_kwargs (such as date_string) or data.system_prompt"
        ]

    def _is_chat(self, value: object) -> bool:
        return self.apply or not isinstance(value, str)

    def _value(self, value: object, row: int) -> object:
        """A row's value, or the chat whose JSON text it is."""
        try:
            return chat_value(value)
        except MessagesError as error:
            raise TemplateError(f"row {row}: its prompt {error}") from None

    def _refuse_without_chat(self, tools: Sequence[object], variables: Sequence[object]) -> None:
        settings = {
            "data.system_prompt": self.system_prompt,
            "data.chat_template_kwargs": self.kwargs,
            "data.tools": self.tools,
            "data.tools_column": any(tools),
            "the column chat_template_kwargs": any(variables),
        }
        if given := [name for name, setting in settings.items() if setting]:
            raise TemplateError(
                f"{given[0]} applies to chats, and these prompts are plain strings; set"
                " data.apply_chat_template: true, or remove it"
            )

    def _refuse_rendered(
        self, tokenizer: PreTrainedTokenizerBase, values: Sequence[object], first_row: int
    ) -> None:
        """Raise TemplateError for string prompts that a template has already rendered. They begin
        with the special token that the template writes first."""
        if not (self.apply and any(isinstance(value, str) for value in values)):
            return
        whole = self._text(tokenizer, "x", None, first_row)
        token = next(filter(whole.startswith, special_tokens(tokenizer)), None)
        if token is None:
            return
        for row, value in enumerate(values, first_row):
            if isinstance(value, str) and value.startswith(token):
                raise TemplateError(
                    f"row {row} begins with {token!r}, as a rendered template does, and would be"
                    " rendered twice; set data.apply_chat_template: false"
                )

    def _text(
        self,
        tokenizer: PreTrainedTokenizerBase,
        value: object,
        own_tools: object,
        row: int,
        own_variables: object = None,
    ) -> str:
        messages = self._messages(value, row, self.dropped)
        variables = self._variables(own_variables, row)
        chat = RowChat(
            messages,
            {**self.kwargs, **variables},
            self._tools(own_tools, row),
            bool(own_tools),
            tuple(variables),
            int(self.system_prompt is not None),
        )
        continued = messages[-1]["role"] == "assistant"
        try:
            return _row_chats(self.model).settled(chat, self.dropped, True, continued)[1]
        except UnusedError as error:
            raise TemplateError(f"row {row}: {error}") from None
        except MessagesError as error:
            way_out = "correct the messages" + (
                ", or leave out data.system_prompt" if self.system_prompt is not None else ""
            )
            raise TemplateError(
                f"row {row}: the chat template of model.path = {self.model!r} refuses the chat"
                f" ({error}); {way_out}"
            ) from None

    def _messages(self, value: object, row: int, dropped: Counter[str] | None) -> list[Message]:
        given: object = [{"role": "user", "content": value}] if isinstance(value, str) else value
        try:
            found = row_messages(given, dropped if self.dropped is not None else None)
            if not are_messages(found):
                raise TemplateError(
                    f"row {row}: the prompt is {str(value)[:80]!r}; give a string, or a list of"
                    " messages with role and content"
                )
            messages, marks = without_marks(found)
        except MessagesError as error:
            raise TemplateError(f"row {row}: {error}") from None
        for index, (key, trained) in marks.items():
            if trained:
                raise TemplateError(
                    f"row {row}: message {index} is marked as trained by {key!r}, and no token of a"
                    " prompt is trained; remove the mark"
                )
        if self.system_prompt is None:
            return messages
        if messages[0]["role"] in ("system", "developer"):
            raise TemplateError(
                f"row {row} has its own system message, and data.system_prompt is set; remove one"
                " of them"
            )
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def _variables(self, own: object, row: int) -> dict[str, object]:
        """The prompt's own variables."""
        try:
            return own_variables(own)
        except MessagesError as error:
            raise TemplateError(f"row {row}: {error}") from None

    def _tools(self, own: object, row: int) -> list[Schema] | None:
        """The prompt's own tools, or those of the settings. None if there are none."""
        try:
            schemas = tool_schemas(own) or tool_schemas(self.tools)
        except MessagesError as error:
            raise TemplateError(f"row {row}: {error}") from None
        return schemas or None


@dataclass(frozen=True, slots=True)
class _Sample:
    """One chat of the data, and its text with all settings."""

    tokenizer: PreTrainedTokenizerBase
    value: object
    own_tools: object
    text: str
    schemas: list[Schema] | None
    """The chat's own tools, or those of the settings."""

    def template_mentions(self, name: str) -> bool:
        tools = cast("list[dict[str, object]] | None", self.schemas)
        jinja = self.tokenizer.get_chat_template(tools=tools)
        return name in template_variables(jinja)

    def is_unchanged_by(self, other: Template) -> bool:
        """Whether a template with these other settings renders the same text. One that refuses the
        chat without a setting needs it."""
        try:
            return other._text(self.tokenizer, self.value, self.own_tools, 0) == self.text
        except (TemplateError, MessagesError):
            return False


def render_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    variables: Mapping[str, object],
    tools: Sequence[Schema] | None = None,
    generation_prompt: bool = True,
) -> str:
    """Render one chat.

    Args:
        generation_prompt: whether the text ends with the start of the assistant's turn.

    Raises:
        MessagesError: the tokenizer has no chat template, the template refuses the chat, or a
            variable has the name of one of the tokenizer's own arguments.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise MessagesError("there is no chat template")
    if taken := reserved_names(tokenizer, variables):
        raise MessagesError(f"{taken[0]} is not a variable of a template")
    return render(tokenizer, messages, variables, tools, generation_prompt)


def marks_turns(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Schema] | None = None) -> bool:
    """Whether the chat template marks what the model writes, with `{% generation %}`."""
    if not getattr(tokenizer, "chat_template", None):
        return False
    try:
        # The annotation of `tools` there is a list of dicts.
        jinja = tokenizer.get_chat_template(tools=cast("list[dict[str, object]] | None", tools))
    except ValueError:  # there are several templates, and none is the default
        return False
    return GENERATION_TAG.search(jinja) is not None


def marked_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    variables: Mapping[str, object],
    tools: Sequence[Schema] | None = None,
) -> tuple[str, list[tuple[int, int]]]:
    """Render a whole chat with a template that `marks_turns`.

    `apply_chat_template(return_assistant_tokens_mask=True)` would also return a mask. It needs a
    fast tokenizer, and marks the rest of the chat if the last character of a turn has no token.

    Returns:
        The text, and the ranges [start, end) of characters that the model writes.

    Raises:
        MessagesError: the template refuses the chat.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    render = cast(
        "Callable[..., tuple[list[str], list[list[tuple[int, int]]]]]", render_jinja_template
    )
    try:
        texts, spans = render(
            conversations=[messages],
            tools=tools,
            chat_template=tokenizer.get_chat_template(
                tools=cast("list[dict[str, object]] | None", tools)
            ),
            return_assistant_tokens_mask=True,
            **{**tokenizer.special_tokens_map, **variables},
        )
    except Exception as error:  # as in `render`
        raise refusal(error) from None
    return texts[0], spans[0]


def _continues(value: object) -> bool:
    """Whether a chat, or its last message, is the start of the assistant's turn."""
    found = row_messages(value[-1:] if isinstance(value, list) else value, Counter())
    return are_messages(found) and found[-1]["role"] == "assistant"


@functools.lru_cache(maxsize=4)
def _row_chats(model: str) -> RowChats:
    return RowChats(load_tokenizer(model))


def own_variables(given: object) -> dict[str, object]:
    """A row's variables of the template: an object, or its JSON text. Empty for None.

    Raises:
        MessagesError: they are something else.
    """
    try:
        value: object = json.loads(given or "null") if isinstance(given, str) else given
    except ValueError:
        value = given
    if value is None or isinstance(value, dict):
        return value or {}
    raise MessagesError(f"its chat_template_kwargs are {str(given)[:80]!r}; give an object")


def tool_schemas(given: object) -> list[Schema]:
    """Tools as JSON schemas without references: from a list of them, or from such a list as JSON
    text. Empty for None.

    Raises:
        MessagesError: the tools are something else, or a schema cannot be read.
    """
    try:
        schemas: object = json.loads(given or "null") if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise MessagesError(
            f"its tools are not JSON ({error}); give a list of JSON schemas"
        ) from None
    if schemas is None or (
        isinstance(schemas, Sequence) and all(isinstance(schema, Mapping) for schema in schemas)
    ):
        try:
            parts = PartsLeft()
            return [resolved_tool(schema, parts) for schema in schemas or ()]
        except SchemaError as error:
            raise MessagesError(str(error)) from None
    raise MessagesError(f"its tools are {str(schemas)[:80]!r}; give a list of JSON schemas")
