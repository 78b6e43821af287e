"""OpenAI's /v1/responses."""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, Literal

from pydantic import Field

from asyncrl.api.contract import Dialect, Part
from asyncrl.api.fields import (
    AtLeastOne,
    Body,
    Content,
    Harmless,
    Items,
    Open,
    TopLogprobs,
    by_type,
    check,
    invalid,
    new_id,
    overridden_of,
    rest_of,
)
from asyncrl.runtime.clock import steady_time
from asyncrl.sessions.answers import Answer, ChatRequest, Token
from asyncrl.sessions.chat_answers import shown_token
from asyncrl.sessions.requests import chosen, function_tools, schema_of, text_of
from asyncrl.text.chat_messages import Message
from asyncrl.web.errors import ApiError
from asyncrl.web.events import Event

REFUSED = {
    "background": "ask without it, and wait for the answer",
    "conversation": "use previous_response_id, or send all items",
    "prompt": "send instructions and input",
}
"""Fields without which the answer would not be what the agent asked for → what to do."""
LOGPROBS = "message.output_text.logprobs"
"""What `include` says for log-probs."""
MOST_NOTES = 256
"""Answers of one session that a request may continue by their ids."""


class InputItem(Open):
    """An item of the input."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    id: Harmless = None
    status: Harmless = None


class MessageItem(InputItem):
    """A message."""

    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content = None
    phase: Harmless = None


class CallItem(InputItem):
    """A function's call. `arguments` is JSON text."""

    call_id: Any = None
    name: Any = None
    arguments: Any = None


class CallOutputItem(InputItem):
    """What a function returned."""

    call_id: Any = None
    output: Content = None


class ReasoningItem(InputItem):
    """Reasoning. The summary counts if there is no content."""

    summary: Content = None
    content: Content = None


Item = by_type(
    {
        "message": MessageItem,
        "function_call": CallItem,
        "function_call_output": CallOutputItem,
        "reasoning": ReasoningItem,
    },
    "message",
)


class FunctionTool(Open):
    """A function that the model may call. `parameters` is a JSON schema."""

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Any = None


class TextFormat(Open):
    """What the text must be. A grammar forces tokens, so such a turn is not trained."""

    type: Literal["text", "json_object", "json_schema"]
    name: Harmless = None
    description: Harmless = None
    strict: Harmless = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextSettings(Open):
    """Settings of the text."""

    format: TextFormat | None = None


class ResponsesBody(Body):
    """The body of POST /v1/responses."""

    input: str | Items[Item] | None = None  # type: ignore[valid-type]
    instructions: str | None = None
    """The system message. It is not kept for requests that continue this one."""
    previous_response_id: str | None = None
    """An earlier answer of the session, whose chat this request continues."""
    tools: Items[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    """`auto`, or `none`: tool calls stay text. Others count as `auto`."""
    parallel_tool_calls: bool | None = None
    max_output_tokens: AtLeastOne | None = None
    text: TextSettings | None = None
    include: Items[str] | None = None
    top_logprobs: TopLogprobs | None = None
    truncation: Literal["disabled", "auto"] | None = None


class OutputItem(Open):
    """A message, a function call or reasoning."""

    id: str
    type: Literal["message", "function_call", "reasoning"]


class ResponsesAnswer(Open):
    """The answer of POST /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: float
    model: str
    status: Literal["completed", "incomplete"]
    output: list[OutputItem]


class Responses(Dialect):
    """One request, and its answer."""

    def __init__(self, tree: object, notes: MutableMapping[str, list[Message]]) -> None:
        """Raises ApiError: 400, or 404 for an unknown previous answer."""
        for name, fix in REFUSED.items():
            if isinstance(tree, dict) and tree.get(name):
                raise invalid(f"{name} is not supported; {fix}", name, "unsupported_parameter")
        body = self._body = check(ResponsesBody, tree)
        given: Mapping[str, Any] = tree  # type: ignore[assignment]  # it was checked
        self._given, self._notes = given, notes
        functions = enumerate(given.get("tools") or ())
        tools, unused = function_tools(
            [(f"tools.{index}", tool) for index, tool in functions], "parameters"
        )
        calls, forced = chosen(body.tool_choice)
        self._chat = [*self._before(), *_messages(given.get("input"))]
        instructions: list[Message] = [{"role": "system", "content": body.instructions}]
        named = {
            **dict.fromkeys(unused, True),
            "tool_choice": forced,
            "parallel_tool_calls": body.parallel_tool_calls is False and bool(tools),
            "top_logprobs": bool(body.top_logprobs),
            "include": bool(set(body.include or ()) - {LOGPROBS}),
            "truncation": body.truncation == "auto",
        }
        request = ChatRequest(
            [*(instructions if body.instructions else []), *self._chat],
            tools or None,
            max_tokens=body.max_output_tokens,
            logprobs=LOGPROBS in (body.include or ()),
            schema=schema_of((given.get("text") or {}).get("format"), "text.format"),
            calls=calls,
        )
        overridden = overridden_of(body, named)
        super().__init__(body, request, overridden, top=body.top_logprobs or 0)
        if not self._chat:
            raise invalid("input has no item; send at least one message", "input")
        self._id, self._began = new_id("resp_"), steady_time()

    def _before(self) -> list[Message]:
        previous = self._body.previous_response_id
        if previous is None:
            return []
        # Another request may remove it meanwhile.
        if (before := self._notes.get(previous)) is None:
            raise ApiError(
                404,
                "previous_response_id is not one of the last answers here; send all items",
                "previous_response_not_found",
                "previous_response_id",
            )
        return before

    def _note(self, answer: Answer) -> None:
        """Keep the chat for requests that continue it."""
        if self._given.get("store") is False:
            return
        chat = [*self._chat, answer.message]
        last = self._notes[list(self._notes)[-1]] if self._notes else []
        # The same messages as those that are kept, so that they are in memory once.
        same = last if chat[: len(last)] == last else []
        self._notes[self._id] = [*same, *chat[len(same) :]]
        while len(self._notes) > MOST_NOTES:
            del self._notes[next(iter(self._notes))]

    def answer(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of the answer."""
        answer = answers[0]
        self._note(answer)
        return {**self._response(answer, [item for item, _ in self._items(answer)]), **answer.more}

    def _items(self, answer: Answer) -> Iterator[tuple[dict[str, Any], str]]:
        """The output, and the text of each item."""
        status = "completed" if answer.finish_reason == "stop" else "incomplete"
        if reasoning := answer.reasoning:
            yield _reasoning_item(reasoning), reasoning
        calls, text = answer.calls, answer.text
        if text or not calls:
            part = _text_part(text, self._logprobs(answer.tokens))
            yield _message_item(new_id("msg_"), status, [part]), text
        for call in calls:
            function = call["function"]
            arguments = str(function["arguments"])
            yield _call_item(str(call["id"]), str(function["name"]), arguments), arguments

    def _logprobs(self, tokens: Sequence[Token]) -> list[dict[str, Any]]:
        if not self.request.logprobs:
            return []
        return [
            {**shown_token(token), "top_logprobs": [shown_token(top) for top in token.top]}
            for token in tokens
        ]

    def _response(self, answer: Answer | None, output: list[dict[str, Any]]) -> dict[str, Any]:
        """The response. Without an answer, it is one in progress."""
        body, given = self._body, self._given
        status, details, usage = "in_progress", None, None
        if answer is not None:
            cut = answer.finish_reason != "stop"
            status = "completed" if self._is_complete(answer) else "incomplete"
            details = {"reason": "max_output_tokens"} if cut else None
            usage = _usage(answer)
        return {
            "id": self._id,
            "object": "response",
            "created_at": int(self._began),
            "completed_at": int(steady_time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": details,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": given.get("metadata") or {},
            "model": body.model or "policy",
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": given.get("store") is not False,
            "temperature": None,
            "text": given.get("text") or {"format": {"type": "text"}},
            "tool_choice": "auto" if self.request.calls else "none",
            "tools": given.get("tools") or [],
            "top_p": None,
            "truncation": "disabled",
            "usage": usage,
        }

    def _is_complete(self, answer: Answer) -> bool:
        """Whether its status is `completed`. Agents take `incomplete` as an error, and give up. So
        only an answer that their own max_output_tokens cut has it. `incomplete_details` tells of
        every cut."""
        return answer.finish_reason == "stop" or answer.cut_by_run(self.request)

    async def events(self, parts: AsyncIterator[Part]) -> AsyncGenerator[Event, None]:
        """The events of a streamed answer."""
        events = _Events()
        yield events.next("response.created", response=self._response(None, []))
        yield events.next("response.in_progress", response=self._response(None, []))
        sent, item_id, more = "", new_id("msg_"), dict[str, Any]()
        tokens: list[Token] = []  # that no event has told of
        async for part in parts:
            more |= part.of_body
            tokens += part.tokens
            if (answer := part.answer) is None:
                if part.text and not sent:
                    for event in events.begin_message(item_id, 0):
                        yield event
                sent += part.text
                if part.text:
                    yield events.delta(item_id, 0, part.text, self._logprobs(tokens))
                    tokens.clear()
                continue
            rest = rest_of(answer, sent)
            items = list(self._items(answer))
            if sent:  # its item is first, because it was sent first
                first = next(n for n, (item, _) in enumerate(items) if item["type"] == "message")
                items.insert(0, items.pop(first))
                items[0][0]["id"] = item_id
            for index, (item, text) in enumerate(items):
                started, left = bool(sent) and index == 0, self._logprobs(tokens)
                for event in events.of_item(item, index, text, rest, left, started):
                    yield event
            self._note(answer)
            whole = {**self._response(answer, [item for item, _ in items]), **answer.more, **more}
            yield events.next(f"response.{whole['status']}", response=whole)


class _Events:
    """Numbers the events of one stream."""

    def __init__(self) -> None:
        self._sent = 0

    def next(self, kind: str, **fields: Any) -> Event:
        self._sent += 1
        return Event({"type": kind, "sequence_number": self._sent - 1, **fields}, kind)

    def begin_message(self, item_id: str, index: int) -> list[Event]:
        """An item, and its empty part."""
        address = {"item_id": item_id, "output_index": index, "content_index": 0}
        return [
            self.next(
                "response.output_item.added",
                output_index=index,
                item=_message_item(item_id, "in_progress", []),
            ),
            self.next("response.content_part.added", **address, part=_text_part("", [])),
        ]

    def delta(self, item_id: str, index: int, text: str, logprobs: list[dict[str, Any]]) -> Event:
        """New text of a message, and its tokens if they are wanted."""
        address = {"item_id": item_id, "output_index": index, "content_index": 0}
        return self.next("response.output_text.delta", **address, delta=text, logprobs=logprobs)

    def of_item(
        self,
        item: dict[str, Any],
        index: int,
        text: str,
        rest: str,
        logprobs: list[dict[str, Any]],
        started: bool,
    ) -> Iterator[Event]:
        """The events of one item, up to its end.

        Args:
            text: of the whole item.
            rest: what a message has after the text that was sent.
            logprobs: those of its tokens that were not sent.
            started: whether the message has been started.
        """
        address = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            begin = {**item, "arguments": "", "status": "in_progress"}
            yield self.next("response.output_item.added", output_index=index, item=begin)
            delta = "response.function_call_arguments.delta"
            yield self.next(delta, **address, delta=text)
            done = "response.function_call_arguments.done"
            yield self.next(done, **address, arguments=text, name=item["name"])
        elif item["type"] == "reasoning":
            begin = {**item, "content": [], "status": "in_progress"}
            yield self.next("response.output_item.added", output_index=index, item=begin)
            address["content_index"] = 0
            yield self.next("response.reasoning_text.delta", **address, delta=text)
            yield self.next("response.reasoning_text.done", **address, text=text)
        else:
            if not started:
                yield from self.begin_message(item["id"], index)
            if rest or logprobs:
                yield self.delta(item["id"], index, rest, logprobs)
            (part,) = item["content"]
            address["content_index"] = 0
            yield self.next(
                "response.output_text.done", **address, text=text, logprobs=part["logprobs"]
            )
            yield self.next("response.content_part.done", **address, part=part)
        yield self.next("response.output_item.done", output_index=index, item=item)


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _message_item(item_id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _call_item(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": new_id("fc_"),
        "type": "function_call",
        "status": "completed",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def _reasoning_item(text: str) -> dict[str, Any]:
    return {
        "id": new_id("rs_"),
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
    }


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _messages(given: object) -> list[Message]:
    """The messages of an input. Items of one answer become one message."""
    if given is None or isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    chat: list[dict[str, Any]] = []
    open_turn: dict[str, Any] | None = None
    assert isinstance(given, list)  # it was checked
    for index, item in enumerate(given):
        part = _part_of_turn(item, f"input.{index}")
        if part is None:
            chat.append(_other_message(item, f"input.{index}"))
            open_turn = None
        elif open_turn is None or not _goes_on(open_turn, part):
            open_turn = {"role": "assistant", "content": "", **part}
            chat.append(open_turn)
        else:
            # Copying the list for each call would make the time quadratic.
            open_turn.setdefault("tool_calls", []).extend(part.pop("tool_calls", ()))
            open_turn.update(part)
    return [
        {name: value for name, value in message.items() if name != "tool_calls" or value}
        for message in chat
    ]


def _goes_on(turn: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Whether an item belongs to the same answer as those before it. An answer has at most one
    text and one reasoning, and its calls are last."""
    if "tool_calls" in part or not part:
        return True
    name = "content" if "content" in part else "reasoning"
    return not turn.get(name) and not turn.get("tool_calls")


def _part_of_turn(item: Mapping[str, Any], param: str) -> dict[str, Any] | None:
    """What an item says of an assistant's message. None: it belongs to none."""
    kind = item.get("type") or "message"
    if kind == "message" and item.get("role") == "assistant":
        return {"content": text_of(item.get("content"), f"{param}.content")}
    if kind == "function_call":
        name, arguments, call_id = (item.get(one) for one in ("name", "arguments", "call_id"))
        if not (isinstance(name, str) and isinstance(arguments, str) and isinstance(call_id, str)):
            raise invalid(f"{param} needs texts as name, arguments and call_id", "input")
        function = {"name": name, "arguments": arguments}
        return {"tool_calls": [{"id": call_id, "type": "function", "function": function}]}
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list):
            raise invalid(f"{param} has no list as content or summary", "input")
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
        reasoning = "\n".join(text for text in texts if isinstance(text, str))
        return {"reasoning": reasoning} if reasoning else {}
    return None


def _other_message(item: Mapping[str, Any], param: str) -> dict[str, Any]:
    kind, role = item.get("type") or "message", item.get("role")
    if kind == "message" and role is not None:
        content = text_of(item.get("content"), f"{param}.content")
        return {"role": "system" if role == "developer" else role, "content": content}
    if kind == "function_call_output":
        if not isinstance(call_id := item.get("call_id"), str):
            raise invalid(f"{param} needs a text as call_id", "input")
        output = text_of(item.get("output"), f"{param}.output")
        return {"role": "tool", "tool_call_id": call_id, "content": output}
    raise invalid(f"{param} has no role; set it", "input")
