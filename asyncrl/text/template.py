"""Prompts as the model sees them: plain strings, or chats through the model's template with a
system prompt, tools and its own switches."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl.text.tokenizer import encode_prompts, load_tokenizer, special_tokens

__all__ = ["MessagesError", "Rendered", "Template", "TemplateError", "render_messages"]

Tools = Sequence[Mapping[str, Any]]


class TemplateError(ValueError):
    """A prompt cannot be rendered, or a setting has no effect on the template. One line with the
    setting or the row."""


class MessagesError(ValueError):
    """The template refuses a chat; the message is what it says, in one line. Or it is given
    variables that are none of a template's."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Prompts as the model sees them."""

    texts: list[str]
    ids: list[list[int]]
    own_bos: int = 0
    """Plain prompts that began with BOS already, and did not get a second one."""


@dataclass(frozen=True, slots=True)
class Template:
    """How a run turns a value of its prompt column into text and tokens. Settings are those of the
    section `data`."""

    model: str
    """Checkpoint directory."""
    apply: bool = False
    """Render string prompts as one user message. Chat messages always are."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template, such as enable_thinking."""
    system_prompt: str | None = None
    """Put before the messages of every prompt."""
    tools: Tools | None = None
    """JSON schemas of functions, for every prompt that brings none."""

    def render(
        self, values: Sequence[Any], tools: Sequence[Any] | None = None, first_row: int = 0
    ) -> Rendered:
        """Texts and token ids of prompts.

        Args:
            values: strings, or lists of chat messages.
            tools: of each prompt: a list of JSON schemas, the same as JSON text, or None.
            first_row: number of the first value, for messages.

        Raises:
            TemplateError: a value is neither, the tokenizer has no template, or the template
                refuses a chat.
        """
        tokenizer = load_tokenizer(self.model)
        each = tools or [None] * len(values)
        chats = [self._is_chat(value) for value in values]
        for row, value in enumerate(values):
            if chats[row]:
                self._messages(value, first_row + row)
        if any(chats) and not tokenizer.chat_template:
            raise TemplateError(
                f"model.path = {self.model!r}: its tokenizer has no chat template; use string"
                " prompts and data.apply_chat_template: false, without data.system_prompt,"
                " chat_template_kwargs and tools"
            )
        if not all(chats):
            self._refuse_without_chat(each)
        self._refuse_rendered(tokenizer, values, first_row)
        texts = [
            self._text(tokenizer, value, own, row) if chat else value
            for row, (value, own, chat) in enumerate(
                zip(values, each, chats, strict=True), first_row
            )
        ]
        ids: list[list[int]] = [[] for _ in texts]
        own_bos = 0
        for rendered in (True, False):  # a template writes its own BOS
            rows = [row for row, chat in enumerate(chats) if chat is rendered]
            encoded, begun = encode_prompts(tokenizer, [texts[row] for row in rows], rendered)
            own_bos += begun
            for row, one in zip(rows, encoded, strict=True):
                ids[row] = one
        return Rendered(texts, ids, own_bos)

    def check(self, values: Sequence[Any], tools: Sequence[Any] | None = None) -> list[str]:
        """What the settings do to the first chat among these prompts (the first with tools, if any
        has), in words.

        Raises:
            TemplateError: the template ignores one of them, so that it would do nothing.
        """
        each = tools or [None] * len(values)
        chats = [
            (value, own) for value, own in zip(values, each, strict=True) if self._is_chat(value)
        ]
        if not chats:
            return []
        tokenizer = load_tokenizer(self.model)
        value, own = next(((value, own) for value, own in chats if own), chats[0])
        if taken := _not_of_a_template(tokenizer, self.kwargs):
            raise TemplateError(
                f"data.chat_template_kwargs = {dict(self.kwargs)!r}: {taken[0]} is not a variable"
                " of a template; leave it out"
            )
        whole = self._text(tokenizer, value, own, 0)
        notes = []
        if self.system_prompt is not None:
            if whole == replace(self, system_prompt=None)._text(tokenizer, value, own, 0):
                raise TemplateError(
                    f"data.system_prompt: the chat template of model.path = {self.model!r} leaves"
                    " system messages out; remove it"
                )
            notes.append(f"system prompt of {len(self.system_prompt)} characters")
        schemas = self._tools(own, 0)
        if schemas:
            if whole == replace(self, tools=None)._text(tokenizer, value, None, 0):
                raise TemplateError(
                    "data.tools or data.tools_column: the chat template of model.path ="
                    f" {self.model!r} leaves tools out; remove them, or use a model whose template"
                    " has them"
                )
            notes.append(f"{len(schemas)} {'tool' if len(schemas) == 1 else 'tools'}")
        for name, setting in self.kwargs.items():
            alone = replace(
                self, kwargs={key: kept for key, kept in self.kwargs.items() if key != name}
            )
            acts = whole != alone._text(tokenizer, value, own, 0)
            if not acts and not re.search(
                rf"\b{re.escape(name)}\b", tokenizer.get_chat_template(tools=schemas)
            ):
                raise TemplateError(
                    f"data.chat_template_kwargs: the chat template of model.path = {self.model!r}"
                    f" knows no {name}, so it would do nothing; remove it"
                )
            notes.append(
                f"{name} = {setting!r}"
                + ("" if acts else " (which changes nothing in this prompt)")
            )
        another_day = replace(self, kwargs={**self.kwargs, "strftime_now": lambda form: form})
        if whole != another_day._text(tokenizer, value, own, 0):
            notes.append(
                "the template writes today's date, so prompts change from day to day: fix it by"
                " data.chat_template_kwargs (such as date_string) or data.system_prompt"
            )
        return notes

    def _is_chat(self, value: Any) -> bool:
        return self.apply or not isinstance(value, str)

    def _refuse_without_chat(self, tools: Sequence[Any]) -> None:
        settings = {
            "data.system_prompt": self.system_prompt,
            "data.chat_template_kwargs": self.kwargs,
            "data.tools": self.tools,
            "data.tools_column": any(tools),
        }
        if given := [name for name, setting in settings.items() if setting]:
            raise TemplateError(
                f"{given[0]} acts on chats, and these prompts are plain strings; set"
                " data.apply_chat_template: true, or leave it out"
            )

    def _refuse_rendered(self, tokenizer: Any, values: Sequence[Any], first_row: int) -> None:
        """Refuse string prompts that a template has rendered already: they begin with the special
        token that a rendering begins with."""
        if not (self.apply and any(isinstance(value, str) for value in values)):
            return
        whole = self._text(tokenizer, "x", None, first_row)
        token = next((one for one in special_tokens(tokenizer) if whole.startswith(one)), None)
        if token is None:
            return
        for row, value in enumerate(values, first_row):
            if isinstance(value, str) and value.startswith(token):
                raise TemplateError(
                    f"row {row} begins with {token!r}, as a rendered template does, and would be"
                    " rendered twice; set data.apply_chat_template: false"
                )

    def _text(self, tokenizer: Any, value: Any, own_tools: Any, row: int) -> str:
        messages = self._messages(value, row)
        try:
            return _rendered(tokenizer, messages, self.kwargs, self._tools(own_tools, row))
        except MessagesError as error:
            way_out = "correct the messages" + (
                ", or leave out data.system_prompt" if self.system_prompt is not None else ""
            )
            raise TemplateError(
                f"row {row}: the chat template of model.path = {self.model!r} refuses the chat"
                f" ({error}); {way_out}"
            ) from None

    def _messages(self, value: Any, row: int) -> list[dict[str, Any]]:
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
        if (
            not isinstance(messages, list)
            or not messages
            or not all(_is_message(message) for message in messages)
        ):
            raise TemplateError(
                f"row {row} holds {str(value)[:80]!r}: neither a string nor chat messages with role"
                " and content"
            )
        if self.system_prompt is None:
            return messages
        if messages[0]["role"] == "system":
            raise TemplateError(
                f"row {row} has a system message of its own, and data.system_prompt is set; remove"
                " one of them"
            )
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def _tools(self, own: Any, row: int) -> list[Any] | None:
        """The prompt's own tools, else those of the settings; None without any."""
        try:
            schemas = json.loads(own) if isinstance(own, str) else own
        except ValueError as error:
            raise TemplateError(
                f"row {row}: its tools are no JSON ({error}); give a list of JSON schemas"
            ) from None
        schemas = schemas or self.tools
        if schemas is not None and not (
            isinstance(schemas, Sequence) and all(isinstance(schema, Mapping) for schema in schemas)
        ):
            raise TemplateError(
                f"row {row}: its tools are {str(schemas)[:80]!r}; give a list of JSON schemas"
            )
        return list(schemas) if schemas else None


def render_messages(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str:
    """The prompt of one chat, up to where the assistant's turn begins. For chats that do not come
    from a run's data.

    Raises:
        MessagesError: the tokenizer has no chat template, the template refuses the chat, or a name
            is none of a template's variables.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise MessagesError("there is no chat template")
    if taken := _not_of_a_template(tokenizer, variables):
        raise MessagesError(f"{taken[0]} is not a variable of a template")
    return _rendered(tokenizer, messages, variables, None)


def _not_of_a_template(tokenizer: Any, variables: Mapping[str, Any]) -> list[str]:
    """Names that would not reach the template: those of the tokenizer's own arguments, another
    template among them."""
    return sorted(
        set(variables)
        & set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"documents"}
    )


def _rendered(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    tools: Sequence[Any] | None,
) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, **variables
        )
    except (
        Exception
    ) as error:  # a template may divide, index, recurse: whatever its expressions raise
        raise MessagesError(" ".join(str(error).split())[:200] or type(error).__name__) from None
    return text


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and ("content" in message or "tool_calls" in message)
    )
