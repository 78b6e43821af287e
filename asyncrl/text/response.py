"""Reads a sampled turn as an assistant's message: text, reasoning and tool calls.

transformers parses it by the model's own response template (`response_template` in
tokenizer_config.json). A model without one gets that of the first format whose marks its chat
template has. Any other answer is text.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from asyncrl.text.call_texts import Calls, Raw, Reads, call_of, json_value, some_calls
from asyncrl.text.chat_messages import REASONING_FIELDS, Message, Schema
from asyncrl.text.reasoning import (
    MARKS,
    OPENED,
    has_reasoning_marks,
    only_names_reasoning,
    opens_reasoning,
)
from asyncrl.text.schemas import property_schema, typed
from asyncrl.text.tokenizer import decode, decode_prompt, special_tokens
from asyncrl.text.turn_formats import (
    ARGUMENT_PARSERS,
    REASONING_ONLY,
    REST_NAME,
    THINK,
    TurnFormat,
    starts_of,
    turn_format,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PREFIX_TOKENS = 64
"""Tokens before the turn that the parser sees: some templates write the turn's first ones."""
PREFIX_CHARACTERS = 4096
"""The same in characters, for a prompt that is a text."""
SHORT_ID = re.compile("[A-Za-z0-9]{9}")
OWN = "its own response_template"
MOST_CALLS = 256
"""Calls of a turn. A turn with more is text."""
SEARCH_S = 2.0
"""Seconds of searching in a turn, after which it is text. Only the patterns of a model's own
response template can take so long."""


class ResponseReader:
    """Reads the turns of one model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        # Imported here because only rollout workers read turns, and it imports transformers.
        from transformers.utils.chat_parsing.content_parsers import CONTENT_PARSERS
        from transformers.utils.chat_parsing.response_templates import load_response_template

        CONTENT_PARSERS.update(ARGUMENT_PARSERS)

        self._tokenizer = tokenizer
        own = getattr(tokenizer, "response_template", None)
        special = special_tokens(tokenizer)
        known = None if own is not None else _format(tokenizer)
        if own is None and known is None and THINK["open"] in special:
            known = REASONING_ONLY
        self._format = known
        self._starts = starts_of(str(getattr(tokenizer, "chat_template", None)))
        """What may come before a turn. A model's own response template says that itself."""
        spec = own if known is None else {**known.response_template, "start_anchor": self._starts}
        # Loaded once: to compile its patterns takes longer than to parse a turn.
        self._template: Any = None if spec is None else load_response_template(dict(spec))
        calls = None if self._template is None else self._template.fields.get("tool_calls")
        own_json = calls is not None and calls.content == "json"
        reads_calls = known is not None and "tool_calls" in known.fields
        self._body = known.body if known and reads_calls else json_value if own_json else None
        """Reads a call up to its end. None: its first mark ends it."""
        kept = "" if known is None else known.closing + known.last + known.before
        self._ends = frozenset(token for text, token in special.items() if text not in kept)
        """Special tokens that are no part of a turn, if they end it."""
        self._seen = {
            tools: spec is None or (known is not None and _is_seen(known, special, tools))
            for tools in (False, True)
        }

    @property
    def text_begins_content(self) -> bool:
        """Whether the content of a message begins with the turn's text, up to the first marker of
        reasoning or of a tool call. With a model's own response template, it need not. Nor if a
        special token is such a marker, because the text is without it."""
        return self._seen[True]

    def begins_content(self, tools: bool) -> bool:
        """`text_begins_content`, for a turn with or without tools. Without them, calls are text."""
        return self._seen[tools]

    @property
    def reads_turns(self) -> bool:
        """Whether it reads anything but text."""
        return self._template is not None

    def _without_end(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The tokens without the special ones at their end."""
        last = len(token_ids)
        while last and token_ids[last - 1] in self._ends:
            last -= 1
        return token_ids[:last]

    def read(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        text: str,
        tools: Sequence[Schema] | None,
    ) -> tuple[Message, bool]:
        """The assistant's message of a turn.

        Args:
            text: the turn without special tokens, up to its stop string. It is the message's text
                if the turn cannot be parsed.

        Returns:
            The message, and whether all of the turn could be parsed. Otherwise marks of tool calls
            may be left in the message's text.
        """
        prompt = decode_prompt(self._tokenizer, prompt_ids[-PREFIX_TOKENS:])
        return self.read_after(prompt, token_ids, text, tools, len(prompt_ids))

    def read_after(
        self,
        prompt: str,
        token_ids: Sequence[int],
        text: str,
        tools: Sequence[Schema] | None,
        prompt_length: int = 0,
    ) -> tuple[Message, bool]:
        """As `read`, after the text of a prompt, or after its end.

        Args:
            prompt_length: tokens of the prompt. It makes the ids of a chat's tool calls differ.
        """
        if self._template is None:
            return _said(text), True
        try:
            kept = self._without_end(token_ids)
            turn = decode_prompt(self._tokenizer, kept)
            parsed: object = self._tokenizer.parse_response(
                turn, self._searching(), prefix=self._start(prompt)
            )
            if not isinstance(parsed, Mapping):
                raise ValueError("no message")
            whole = text if turn == text else decode(self._tokenizer, token_ids)
            stop = whole[len(text) :] if whole.startswith(text) else ""
            ended = len(kept) < len(token_ids)
            message = self._message(parsed, turn, text, stop, prompt_length, tools, ended)
            if self._outside(parsed) or (tools and self._thought(message, turn)):
                return _said(text), False
            if self._only_names_reasoning(message, prompt, turn):
                return _said(text), True
            if not tools:
                return message, True
            left = self._left(message, parsed, turn, text)
            # No call is run if another one of its turn cannot be.
            return (_said(text) if left and "tool_calls" in message else message), not left
        except Exception:  # a model can write anything, and parsers raise anything
            return _said(text), False

    def _only_names_reasoning(self, message: Message, prompt: str, turn: str) -> bool:
        """Whether the format took words of a text without calls for marks of reasoning."""
        if self._format is None or "reasoning" not in message or "tool_calls" in message:
            return False
        return not opens_reasoning(prompt) and only_names_reasoning(turn)

    def _start(self, prompt: str) -> str:
        """The end of the prompt, from before the start of the turn on."""
        prefix = prompt[-PREFIX_CHARACTERS:]
        if self._format is None or any(start in prefix for start in self._starts):
            return prefix
        # Without a start, transformers would take all of it for the turn.
        # Marks before the end may be those of a user's message.
        opened = OPENED.search(prefix)
        return "" if opened is None else opened.group()

    def _message(
        self,
        parsed: Mapping[str, Any],
        turn: str,
        text: str,
        stop: str,
        prompt_length: int,
        tools: Sequence[Schema] | None,
        ended: bool,
    ) -> dict[str, object]:
        """The message of what the template found. Raises ValueError for an unusable tool call.

        Args:
            turn: with special tokens.
            text: without them, and without `stop`.
            stop: what a stop string cut off the text. Empty: none did.
            prompt_length: tokens before the turn. It makes the ids of a chat's tool calls differ.
            ended: whether a special token ended the turn.
        """
        calls = parsed.get("tool_calls") or []
        if calls and not tools:
            return _said(text)  # no tool was offered
        reasoning = next((parsed[name] for name in REASONING_FIELDS if parsed.get(name)), None)
        content = parsed.get("content") or ""
        # A turn may go on with text after a tool call.
        parts = [str(part) for part in content] if isinstance(content, list) else [str(content)]
        if parts and turn.rstrip().endswith(parts[-1].rstrip()):
            # A template may leave out the spaces around a content.
            ends = (stop, stop.rstrip(), stop.strip())
            parts[-1] = parts[-1].removesuffix(next(filter(parts[-1].endswith, ends), ""))
        content = "\n".join(part for part in parts if part)
        if not calls and reasoning is None and not (content and self._marks_content(turn)):
            return _said(text)
        message = _said(content)
        if reasoning is not None:
            message["reasoning"] = str(reasoning)
        if calls:
            short = self._format is not None and self._format.short_ids
            found = self._calls(calls, turn, ended, tools)
            message["tool_calls"] = _identified(found, prompt_length, short)
        return message

    def _outside(self, parsed: Mapping[str, Any]) -> bool:
        """Whether a turn with marked content has text outside all marks, which would be lost."""
        if self._format is None or not {"reasoning", "tool_calls", "content"} & set(parsed):
            return False
        return bool(re.sub(self._format.between, "", "".join(parsed.get(REST_NAME, ()))).strip())

    def _thought(self, message: Message, turn: str) -> bool:
        """Whether a call is in reasoning that has no end, or with nothing after it."""
        thought = str(message.get("reasoning", "")).rstrip()
        silent = not message["content"] and not message.get("tool_calls")
        return (silent or turn.rstrip().endswith(thought)) and self._has_call(thought)

    def _has_call(self, text: str) -> bool:
        """Whether a text has a mark that only a call has."""
        if self._format is not None:
            return any(mark in text for mark in self._format.attempts)
        calls = self._template.fields.get("tool_calls")
        opens = None if calls is None else calls.open_re
        return opens is not None and opens.search(text, timeout=SEARCH_S) is not None

    def _left(self, message: Message, parsed: Mapping[str, Any], turn: str, text: str) -> bool:
        """Whether marks are left that nothing was read from."""
        if self._format is None:
            return False
        if self._format.marked_content:
            marks = (*self._format.marks, *self._format.attempts)
            return message == _said(text) and any(mark in turn for mark in marks)
        said = "\n".join(parsed.get("content", ()))  # the text has no special tokens
        ends = "tool_calls" not in message and self._format.closing
        return self._has_call(said) or bool(ends and ends in said)

    def _marks_content(self, turn: str) -> bool:
        """Whether a turn has marks beside its content, even without calls and reasoning."""
        return self._format is not None and (
            self._format.marked_content or has_reasoning_marks(turn)
        )

    def _calls(self, found: Any, turn: str, ended: bool, tools: Sequence[Schema] | None) -> Calls:
        """The calls of a turn. Raises ValueError, for example if the last one was cut."""
        known = self._format
        if known and known.before and not ended and turn.rstrip().endswith(known.before):
            raise ValueError("the tool call was cut")
        if known is not None and known.calls is not None:
            calls = [call for text in found for call in some_calls(known.calls, text)]
        else:
            calls = [call_of(call) for call in found]
        if len(calls) > MOST_CALLS:
            raise ValueError(f"more than {MOST_CALLS} tool calls")
        bare = turn.lstrip().startswith(("{", "["))
        for call in calls:
            function = call["function"]
            if bare and not function["arguments"] and not _is_offered(tools, function["name"]):
                raise ValueError("JSON with a name that may be an answer")
            given = function["arguments"] if self._body else _raw(function["arguments"])
            parameters = _parameters(tools or (), function["name"])
            function["arguments"] = {
                name: typed(value, property_schema(parameters, name))
                for name, value in given.items()
            }
        return calls

    def _searching(self) -> Any:
        """The response template, whose patterns search a turn once, for a time that begins now."""
        until = time.monotonic() + SEARCH_S

        def searches(pattern: Any) -> Any:
            return None if pattern is None else _Searches(pattern, until)

        fields = {
            name: replace(one, open_re=searches(one.open_re), close_re=searches(one.close_re))
            for name, one in self._template.fields.items()
        }
        calls = fields.get("tool_calls")
        if calls is not None and calls.close_re is not None and self._body is not None:
            needed = self._format is not None and bool(self._format.closing)
            close = _Ends(self._body, calls.close_re, needed)
            fields["tool_calls"] = replace(calls, close_re=close)
        return replace(self._template, fields=fields)


@dataclass(frozen=True, slots=True)
class _Later:
    """What a search finds while more text may come: nothing before `offset` can change."""

    offset: int
    partial: bool = True

    def start(self) -> int:
        return self.offset


class _Searches:
    """A pattern of a response template in one turn. transformers searches the rest of the turn for
    every pattern after each mark that it finds. This searches again only behind the last match, and
    only once the whole turn is known."""

    def __init__(self, pattern: Any, until: float) -> None:
        self._pattern, self._until = pattern, until
        self._last: tuple[str, int, Any] | None = None
        """The text, where the last search began, and what it found."""

    def search(self, text: str, offset: int, partial: bool = False) -> Any:
        """As `regex.Pattern.search`. Raises TimeoutError after the turn's time."""
        if partial:
            return _Later(offset)
        if self._last is not None:
            known, begin, found = self._last
            if known is text and begin <= offset and (found is None or found.start() >= offset):
                return found
        left = max(self._until - time.monotonic(), 1e-3)
        found = self._pattern.search(text, offset, timeout=left)
        self._last = text, offset, found
        return found


class _Ends:
    """What ends a call: the first mark behind its arguments, which may have such marks, too."""

    def __init__(self, body: Reads, marks: _Searches, needed: bool) -> None:
        self._body, self._marks, self._needed = body, marks, needed

    def search(self, text: str, offset: int, partial: bool = False) -> Any:
        """As `regex.Pattern.search`. Raises ValueError for a call that cannot be read, or that has
        no end and needs one."""
        if partial:
            return _Later(offset)
        found = self._marks.search(text, self._body(text, offset)[1])
        if found is None and self._needed:
            raise ValueError("the tool call was cut")
        return found


def _is_offered(tools: Sequence[Schema] | None, name: object) -> bool:
    functions = [tool.get("function", tool) for tool in tools or ()]
    return any(isinstance(one, Mapping) and one.get("name") == name for one in functions)


def _parameters(tools: Sequence[Schema], name: object) -> object:
    """The schema of a tool's arguments. None: there is no such tool, or it has none."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            return function.get("parameters")
    return None


def _raw(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call in tags, of a model's own format."""
    return {
        name: Raw(value) if isinstance(value, str) else value for name, value in arguments.items()
    }


def in_reasoning(text: str) -> bool:
    """Whether a text ends within reasoning. Some templates begin it for the model, whose first text
    is then no content."""
    marks = [str(mark.lastgroup) for mark in MARKS.finditer(text)]
    return bool(marks) and marks[-1].startswith("open")


def format_name(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """What the model's turns are parsed by. None: they are only text."""
    if getattr(tokenizer, "response_template", None) is not None:
        return OWN
    known = _format(tokenizer)
    return None if known is None else f"the format of {known.name}"


def _format(tokenizer: PreTrainedTokenizerBase) -> TurnFormat | None:
    added = map(str, tokenizer.added_tokens_decoder.values())
    return turn_format(str(getattr(tokenizer, "chat_template", None)), added)


def _is_seen(known: TurnFormat, special: Mapping[str, int], tools: bool) -> bool:
    """Whether all marks of a format are in a turn's text, which has no special tokens. Without
    tools, calls are text."""
    thought = known.fields["reasoning"].get("open")
    if known.marked_content or not isinstance(thought, str) or thought in special:
        return False
    return not tools or (
        not known.begins_with_word
        and not any(token in special for token in (known.opening, known.closing) if token)
    )


def _said(text: str) -> dict[str, object]:
    return {"role": "assistant", "content": text}


def _identified(calls: Calls, prompt_length: int, short: bool) -> list[dict[str, object]]:
    """Tool calls as clients get them, each with an id of its own in the chat. The model's own id
    stays if it is new in the turn, and if the chat template takes it.

    Args:
        prompt_length: tokens before the turn.
        short: see `TurnFormat.short_ids`.
    """
    name = f"{prompt_length % 10**6:06d}{{:03d}}" if short else f"call_{prompt_length}_{{}}"
    ours = [name.format(number) for number in range(len(calls))]
    used, found = set(ours), []
    for call, identity in zip(calls, ours, strict=True):
        own = call.get("id")
        usable = isinstance(own, str) and own.isprintable() and own.strip() and own not in used
        if usable and (not short or SHORT_ID.fullmatch(str(own))):
            identity = str(own)
        used.add(identity)
        found.append(_call(call, identity))
    return found


def _call(call: Any, identity: str) -> dict[str, object]:
    """A tool call as clients get it, with its arguments as JSON text. Raises ValueError for one
    that no client could use."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if not isinstance(name, str):
        raise ValueError("a tool call without a name")
    if not name.strip() or not name.isprintable():
        raise ValueError("a tool call whose name cannot be written")
    written = json.dumps(arguments, allow_nan=False)
    # Half a surrogate pair is no text.
    json.dumps([name, arguments], ensure_ascii=False).encode()
    return {
        "id": identity,
        "type": "function",
        "function": {"name": name, "arguments": written},
    }
