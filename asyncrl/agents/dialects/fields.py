"""What the dialects share: validation of bodies, fields of answers, and numbers."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from asyncrl.sessions.answers import Answer
from asyncrl.sessions.requests import LABELS
from asyncrl.text.template import Schema
from asyncrl.web.answers import MOST_CHOICES, end_reason
from asyncrl.web.bodies import whole
from asyncrl.web.errors import ApiError, printable

JSON_OBJECT: Schema = {"type": "object"}


AtLeastOne = Annotated[int, Field(ge=1), BeforeValidator(whole)]
"""A number of tokens. Like all whole numbers, a client may write it as 1.0."""
Choices = Annotated[int, Field(ge=1, le=MOST_CHOICES), BeforeValidator(whole)]
"""A number of answers."""
TopLogprobs = Annotated[int, Field(ge=0, le=20), BeforeValidator(whole)]
"""How many log-probs a client wants of each place."""


class Open(BaseModel):
    """A part of a body. Clients may send more fields than it lists."""

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Body(Open):
    """Fields of all bodies. Fields that are not listed are accepted, have no effect, and are
    counted."""

    model: str | None = None
    """Any name. The answers come from the policy."""
    stream: bool | None = None
    """Whether the answer comes as server-sent events."""


class ErrorDetail(Open):
    """An error of OpenAI's API."""

    message: str
    type: str
    param: str | None
    code: str
    """For programs, such as `context_length_exceeded` or `session_closed`."""
    session_end: str | None = None
    """With `session_closed`: how the session has ended, such as `done` or `deadline`."""


class ErrorBody(BaseModel):
    """The body of an error answer."""

    error: ErrorDetail


Kind = TypeVar("Kind", bound=BaseModel)


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """The error of a body that cannot be followed."""
    return ApiError(400, message, code, param)


def check(kind: type[Kind], tree: object) -> Kind:
    """Validate a body. Raises ApiError, 400, for the first invalid field."""
    if not isinstance(tree, dict):
        raise invalid(
            f"the body is a JSON {type(tree).__name__}; send an object", code="invalid_body"
        )
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        # Of the types of a union, the one that the client meant has the deepest error.
        items = error.errors(include_url=False, include_context=False)
        item = max(items, key=lambda item: len(item["loc"]))
    place = _place(item["loc"], tree)
    field = place.partition(".")[0] or None
    if item["type"] == "missing":
        raise invalid(f"{place} is missing; set it", field, "missing_parameter")
    message = item["msg"].removeprefix("Value error, ")
    raise invalid(f"{place}: {message[:1].lower()}{message[1:]}", field)


def _place(location: Sequence[int | str], tree: object) -> str:
    """Where a field is in the body. pydantic's location also names the types of a union."""
    names: list[str] = []
    for number, part in enumerate(location):
        known = isinstance(tree, dict) and part in tree
        if isinstance(tree, list):
            known = isinstance(part, int) and part < len(tree)
        if known:
            tree = tree[part]  # type: ignore[index]
        elif not isinstance(tree, dict) or number < len(location) - 1:
            continue
        names.append(printable(str(part)))
    return ".".join(names) or "the body"


def overridden_of(body: Open, known: Mapping[str, bool]) -> tuple[str, ...]:
    """The fields of a body that have no effect.

    Args:
        known: fields that the dialect knows, and whether they have none.
    """
    extra = body.model_extra or {}
    unknown = [
        printable(name) for name, value in extra.items() if value is not None and name not in LABELS
    ]
    return (*unknown, *(name for name, given in known.items() if given))


def schema_of(form: str, schema: Schema | None, problem: ApiError) -> Schema | None:
    """The JSON schema that the text must follow. None: any text.

    Args:
        form: `text`, `json_object` or `json_schema`.
        schema: what the client gave for the last of them.
        problem: raised if it gave none.
    """
    if form != "json_schema":
        return JSON_OBJECT if form == "json_object" else None
    if schema is None:
        raise problem
    return schema


def new_id(prefix: str) -> str:
    """An identifier that no other answer has."""
    return f"{prefix}{uuid.uuid4().hex}"


def content_of(answer: Answer) -> str:
    """The text of an answer."""
    return str(answer.message.get("content") or "")


def calls_of(answer: Answer) -> list[dict[str, Any]]:
    """The tool calls of an answer, in the form of chat completions."""
    calls = answer.message.get("tool_calls")
    return list(calls) if isinstance(calls, list) else []


def finish_reason(answer: Answer) -> str:
    """Why an answer ended: `tool_calls`, `stop` or `length`."""
    reason = end_reason(answer.finish_reason)
    return "tool_calls" if reason == "stop" and calls_of(answer) else reason


def rest_of(content: str, sent: str) -> str:
    """What is left of a message's content.

    Raises:
        ApiError: 500 if the content does not begin with what was sent.
    """
    if not content.startswith(sent):
        raise ApiError(
            500,
            "the text that was streamed is not the beginning of the message; ask without stream",
            "stream_differs",
        )
    return content[len(sent) :]
