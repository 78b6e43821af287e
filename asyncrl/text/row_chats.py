"""Chats of dataset rows as a chat template takes them, with a proof that all of each chat reaches
the text."""

from __future__ import annotations

import functools
import inspect
import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, cast

from jinja2 import TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from asyncrl.text.chat_messages import REASONING_FIELDS, MessagesError, template_messages
from asyncrl.text.row_messages import UnusedError
from asyncrl.text.tokenizer import chat_text, special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, object]
PROBE: Final = f"asyncrlprobe{secrets.token_hex(6)}"
"""Added to each value of a chat. No row contains it."""
ROLES: Final = ("system", "user", "assistant", "tool")
"""Roles that chat templates take."""
STANDS_FOR: Final[Mapping[str, str]] = {
    "developer": "system",
    "observation": "tool",
    "function": "tool",
    "ipython": "tool",
    "tools": "tool",
}
"""Role → the role that it becomes under a template that does not know it."""
GENERATION_TAGS: Final = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")
PARTS: Final = re.compile(r"\bin\s+\w+(\.content|\[['\"]content['\"]\])")
"""How a template reads a content as parts."""
MARK: Final = re.compile("train|loss|mask|weight|learn")
"""Keys whose false may say that a turn is not trained."""
MOST_SHAPES: Final = 4096
"""Shapes of chats whose effect is remembered."""
ABSENT: Final = object()
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class RowChat:
    """A chat of a row, with what the settings add."""

    messages: Sequence[Message]
    variables: Mapping[str, object] = field(default_factory=dict)
    tools: Sequence[Mapping[str, object]] | None = None
    own_tools: bool = False
    """Whether the row has its tools, and not the settings."""
    own_variables: tuple[str, ...] = ()
    """Names of the variables that the row has."""
    added: int = 0
    """Number of first messages that the settings add."""


@dataclass(frozen=True, slots=True)
class _Ending:
    """How the text of a chat ends."""

    begins: bool
    """With the start of the assistant's turn."""
    continued: bool
    """Within the last message, which is the start of the assistant's turn."""


@dataclass(frozen=True, slots=True)
class _Value:
    """A value of a chat that must reach the text."""

    name: str
    message: int | None
    paths: tuple[Path, ...]
    """Where it is in `{"messages": …, "tools": …}`."""


class RowChats:
    """Settles chats for one template: see `settled`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._written: set[object] = set()
        """Shapes of chats of roles and texts whose template writes every text."""
        source = getattr(tokenizer, "chat_template", None) or ""
        self._source = "\n".join(source.values()) if isinstance(source, dict) else str(source)
        self._thoughts = [
            name for name in REASONING_FIELDS if re.search(rf"[.'\"]{name}\b", self._source)
        ]
        """Names under which the template reads a message's reasoning."""
        self._role = functools.cache(self._known_role)

    def settled(
        self,
        chat: RowChat,
        dropped: Counter[str] | None = None,
        begins: bool = False,
        continued: bool = False,
    ) -> tuple[RowChat, str]:
        """The chat as the template takes it, and its text.

        Reasoning gets the name that the template reads, and the arguments of tool calls are values,
        or JSON text if the template refuses values. The proof renders the chat again, with a probe
        at the end of each value. A value without its probe in the text must change the text by its
        absence. Chats of roles and texts need no second rendering if their shape is known.

        Args:
            dropped: counts the keys that do not reach the text; None: they are refused.
            begins: whether the text ends with the start of the assistant's turn.
            continued: whether the last message is the start of the assistant's turn.

        Raises:
            UnusedError: a key does not reach the text, or no key of a turn of the assistant does.
            MessagesError: the template refuses the chat.
        """
        ending = _Ending(begins, continued)
        chat = self._with_variables(self._with_roles(chat), dropped)
        first: tuple[RowChat, str, list[_Value]] | None = None
        refused: MessagesError | None = None
        for messages in self._readings(chat.messages):
            read = replace(chat, messages=messages)
            try:
                text = self._text(read, ending)
            except MessagesError as error:
                refused = refused or error
                continue
            unused = self._unused(read, text, ending)
            if not unused:
                return read, text
            first = first or (read, text, unused)
        if first is None:
            assert refused is not None
            raise refused
        read, text, unused = first
        if dropped is None:
            raise _unused_error(_as_given(unused[0], chat.messages))
        self._refuse_emptied(read, unused)
        dropped.update(_as_given(value, chat.messages).name for value in unused)
        return read, text

    def _readings(self, messages: Sequence[Message]) -> Iterator[list[dict[str, object]]]:
        """The messages in the ways in which templates read them. After the first way, a few
        templates need arguments as JSON text, null for an absent content, or contents in parts."""
        names = self._thoughts
        _refuse_two_thoughts(messages)
        values = template_messages(messages, True, names)
        yield values
        if any(message.get("tool_calls") for message in messages):
            yield template_messages(messages, False, names)
            yield [
                {**one, "content": one["content"] or None} if one.get("tool_calls") else one
                for one in values
            ]
        if PARTS.search(self._source):
            yield [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in values]

    def _with_roles(self, chat: RowChat) -> RowChat:
        messages = chat.messages
        if all(message["role"] in ROLES for message in messages):
            return chat
        changed = [
            {**message, "role": self._role(str(message["role"]), index)}
            for index, message in enumerate(messages)
        ]
        return replace(chat, messages=changed)

    def _known_role(self, role: str, index: int) -> str:
        """The role under which the template takes a message."""
        known = role in ROLES or re.search(rf"['\"]{re.escape(role)}['\"]", self._source)
        if known or f"<|{role}|>" in special_tokens(self._tokenizer):
            return role
        if role not in STANDS_FOR:
            raise MessagesError(
                f"message {index} has the role {role!r}, which the chat template does not know;"
                f" use one of {', '.join(ROLES)}"
            )
        return STANDS_FOR[role]

    def _with_variables(self, chat: RowChat, dropped: Counter[str] | None) -> RowChat:
        """The chat after a check that the template reads the row's own variables."""
        if taken := reserved_names(self._tokenizer, chat.variables):
            raise MessagesError(f"{taken[0]} is not a variable of a template")
        known = template_variables(self._source) if chat.own_variables else ()
        for name in chat.own_variables:
            if name in known:
                continue
            if dropped is None:
                raise UnusedError(
                    f"its chat_template_kwargs have {name!r}, which the chat template does not use;"
                    " remove it, or set data.unused_keys: drop"
                )
            dropped[f"chat_template_kwargs.{name}"] += 1
        return chat

    def _text(self, chat: RowChat, ending: _Ending) -> str:
        return render(
            self._tokenizer,
            chat.messages,
            chat.variables,
            chat.tools,
            ending.begins and not ending.continued,
            ending.continued,
        )

    def _unused(self, chat: RowChat, text: str, ending: _Ending) -> list[_Value]:
        """The values of a chat that do not reach the text."""
        shape = _shape(chat, ending)
        if shape in self._written and all(
            str(message["content"]).strip() in text for message in chat.messages
        ):
            return []
        tree = {"messages": list(chat.messages), "tools": list(chat.tools or [])}
        values = [*_values(chat)]
        probed = tree
        for number, value in enumerate(values):
            for path in value.paths:
                probed = _edited(probed, path, functools.partial(_with_probe, number))
        try:
            written = self._text(_of_tree(chat, probed), ending)
        except MessagesError:
            written = ""
        unused = [
            value
            for number, value in enumerate(values)
            if f"{PROBE}x{number}x" not in written and self._idle(chat, tree, value, text, ending)
        ]
        if shape is not None and not unused:
            if len(self._written) >= MOST_SHAPES:
                self._written.clear()
            self._written.add(shape)
        return unused

    def _idle(
        self, chat: RowChat, tree: dict[str, Any], value: _Value, text: str, ending: _Ending
    ) -> bool:
        """Whether the chat's text stays the same without the value."""
        for path in value.paths:
            tree = _edited(tree, path, _removed)
        try:
            return self._text(_of_tree(chat, tree), ending) == text
        except MessagesError:
            return False

    def _refuse_emptied(self, chat: RowChat, unused: Sequence[_Value]) -> None:
        """Refuse a turn of the assistant of which nothing reaches the text: it would teach the
        model to end its turn at once."""
        left = {value.message for value in _values(chat)} - {None}
        written = {value.message for value in _values(chat) if value not in unused}
        for index in sorted(cast("set[int]", left - written)):
            if chat.messages[index]["role"] == "assistant":
                raise UnusedError(
                    f"nothing of message {index} (assistant) reaches the text; leave the row out"
                )


def _as_given(value: _Value, messages: Sequence[Message]) -> _Value:
    """The value with the row's own name of reasoning, which the template may call otherwise."""
    if value.message is None or value.name.strip("'") not in REASONING_FIELDS:
        return value
    given = (repr(name) for name in REASONING_FIELDS if messages[value.message].get(name))
    return replace(value, name=next(given, value.name))


def _unused_error(value: _Value) -> UnusedError:
    where = "its tools have" if value.message is None else f"message {value.message} has"
    return UnusedError(
        f"{where} {value.name}, which the chat template does not write; remove it, use a model"
        " whose template writes it, or set data.unused_keys: drop"
    )


def _shape(chat: RowChat, ending: _Ending) -> object:
    """What decides the text of a chat besides its texts, for chats of roles and texts without tools
    of their own. None for others."""
    if chat.own_tools or any(
        len(message) != 2 or not isinstance(message.get("content"), str)
        for message in chat.messages
    ):
        return None
    roles = tuple((one["role"], not str(one["content"]).strip()) for one in chat.messages)
    return roles, ending, repr(chat.variables) if chat.variables else ""


def _values(chat: RowChat) -> Iterator[_Value]:
    """The values of a chat that must reach the text. Empty ones say nothing."""
    for index, message in enumerate(chat.messages):
        if index < chat.added:
            continue
        thoughts: list[Path] = []
        linked = _links(chat.messages, index)
        for key, item in message.items():
            path: Path = ("messages", index, key)
            if key == "role" or key in linked or item is None:
                continue
            if item is False and not MARK.search(key):
                continue
            if item in ("", [], {}) or (isinstance(item, str) and not item.strip()):
                continue
            if key == "content" and isinstance(item, list):
                if str(item[0]["text"]).strip():
                    yield _Value("'content'", index, ((*path, 0, "text"),))
                continue
            if key in REASONING_FIELDS:
                thoughts.append(path)
            elif key == "tool_calls" and isinstance(item, list):
                yield from _calls(item, index)
            else:
                yield _Value(repr(key), index, (path,))
        if thoughts:
            yield _Value(repr(thoughts[0][-1]), index, tuple(thoughts))
    for number, tool in enumerate((chat.tools or []) if chat.own_tools else []):
        inner = isinstance(tool.get("function"), Mapping)
        path = ("tools", number, *(("function",) if inner else ()))
        named = cast("Mapping[str, object]", tool["function"] if inner else tool)
        name = named.get("name")
        if isinstance(name, str):
            yield _Value(f"'tools' ({name!r})", None, ((*path, "name"),))
        else:
            yield _Value(f"'tools' (tool {number})", None, (("tools", number),))


def _calls(calls: Sequence[object], index: int) -> Iterator[_Value]:
    """The name and the arguments of each tool call."""
    for number, call in enumerate(calls):
        path: Path = ("messages", index, "tool_calls", number)
        inner = isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)
        function = cast("Any", call)["function"] if inner else call
        if not isinstance(function, Mapping):
            yield _Value(f"'tool_calls' (call {number})", index, (path,))
            continue
        path = (*path, "function") if inner else path
        for key in ("name", "arguments"):
            if function.get(key):
                yield _Value(f"'tool_calls' ({key} of call {number})", index, ((*path, key),))


def _links(messages: Sequence[Message], index: int) -> set[str]:
    """Keys of a tool's message that only say which call it answers, as the order of the messages
    does."""
    if messages[index]["role"] != "tool":
        return set()
    first = index
    while first and messages[first - 1]["role"] == "tool":
        first -= 1
    calls = messages[first - 1].get("tool_calls") if first else None
    if not isinstance(calls, list) or index - first >= len(calls):
        return set()
    call = calls[index - first]
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    said = {
        "tool_call_id": call.get("id") if isinstance(call, Mapping) else None,
        "name": function.get("name") if isinstance(function, Mapping) else None,
    }
    return {key for key, item in said.items() if item in (None, messages[index].get(key))}


def _refuse_two_thoughts(messages: Sequence[Message]) -> None:
    for index, message in enumerate(messages):
        if len(message) <= 2:
            continue
        found = [name for name in REASONING_FIELDS if message.get(name)]
        if len({str(message[name]).strip() for name in found}) > 1:
            raise MessagesError(
                f"message {index} has {' and '.join(found)}, which differ; leave one out"
            )


def _edited(tree: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """A copy of nested lists and dicts with another value at a path, or without it."""
    key, rest = path[0], path[1:]
    copy: Any = list(tree) if isinstance(tree, list) else dict(tree)
    value = _edited(copy[key], rest, change) if rest else change(copy[key])
    if value is ABSENT:
        del copy[key]
    else:
        copy[key] = value
    return copy


def _with_probe(number: int, value: Any) -> Any:
    """The value with a probe at its end. A value that cannot have one stays."""
    probe = f"{PROBE}x{number}x"
    if isinstance(value, dict):
        return {**value, probe: probe}
    if not isinstance(value, str):
        return value
    try:
        inner = json.loads(value) if value.startswith("{") else None
    except (ValueError, RecursionError):
        inner = None
    return json.dumps({**inner, probe: probe}) if isinstance(inner, dict) else value + probe


def _removed(value: Any) -> Any:
    """What stands for an absent value: the empty text, no arguments, or no key."""
    return {} if isinstance(value, dict) else "" if isinstance(value, str) else ABSENT


def _of_tree(chat: RowChat, tree: Mapping[str, Any]) -> RowChat:
    return replace(chat, messages=tree["messages"], tools=tree["tools"] or None)


@functools.lru_cache(maxsize=16)
def template_variables(source: str) -> frozenset[str]:
    """Names of the variables that a template reads, or of all words if it cannot be parsed."""
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(GENERATION_TAGS.sub("", source))
    except TemplateSyntaxError:
        return frozenset(re.findall(r"\w+", source))
    return frozenset(meta.find_undeclared_variables(tree))


def reserved_names(
    tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, object]
) -> list[str]:
    """Names that would not reach the template, because they are arguments of `apply_chat_template`.
    One of those replaces the template, which no client may do."""
    if not variables:
        return []
    apply = tokenizer.apply_chat_template
    taken = _parameters(getattr(apply, "__func__", apply)) - {"documents"}
    return sorted(taken.intersection(variables))


@functools.lru_cache(maxsize=8)
def _parameters(function: Callable[..., object]) -> frozenset[str]:
    """The names of a function's parameters. They are kept, because every rendering needs them."""
    return frozenset(inspect.signature(function).parameters)


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    variables: Mapping[str, object],
    tools: Sequence[Mapping[str, object]] | None,
    begins: bool = True,
    continued: bool = False,
) -> str:
    """The text of a chat. See `RowChats.settled`.

    Raises:
        MessagesError: the template refuses the chat.
    """
    start = str(messages[-1].get("content")) if continued else ""
    if "<think>" in start and "</think>" not in start:  # templates take it for no reasoning yet
        before = render(tokenizer, messages[:-1], variables, tools)
        rest = start.lstrip()
        if before.rstrip().endswith("<think>"):
            rest = rest.removeprefix("<think>")
            rest = rest.removeprefix("\n") if before.endswith("\n") else rest
        return before + rest
    options: dict[str, object] = {"continue_final_message": True} if continued else {}
    try:
        return chat_text(
            tokenizer, messages, tools=tools, add_generation_prompt=begins, **options, **variables
        )
    except Exception as error:  # a template may divide, index or recurse, so it may raise anything
        raise refusal(error) from None


def refusal(error: Exception) -> MessagesError:
    """The error of a template as one line."""
    return MessagesError(" ".join(str(error).split())[:200] or type(error).__name__)
