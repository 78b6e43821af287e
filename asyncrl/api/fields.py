"""What the dialects share: validation of bodies, and fields of answers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
)

from asyncrl.sessions.answers import Answer
from asyncrl.sessions.requests import LABELS
from asyncrl.text.chat_messages import CACHE_MARKS
from asyncrl.web.answers import MOST_CHOICES
from asyncrl.web.errors import ApiError, printable


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list in a body. An error for each of a million wrong items would take minutes."""
Whole = Annotated[int, BeforeValidator(_whole)]
"""A whole number, which a client may write as 1.0."""
AtLeastOne = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
"""A number of tokens."""
Choices = Annotated[int, Field(ge=1, le=MOST_CHOICES), BeforeValidator(_whole)]
"""A number of answers."""
TopLogprobs = Annotated[int, Field(ge=0, le=20), BeforeValidator(_whole)]
"""How many log-probs a client wants of each token."""
KINDS = {
    "prompt": "send a string, a list of token ids, or a list of such prompts",
    "chat_template_kwargs": "send an object of strings, numbers and booleans",
}
"""Fields of several types → the valid ones. pydantic would name the first type only."""
NOTHING: Sequence[object] = (None, False, [], ["direct"], {"type": "direct"})
"""Values of a field that has no effect. `direct` says that the model itself calls a tool,
which is always so."""


class Open(BaseModel):
    """A part of a body. Clients may send more fields than it lists."""

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    texts_read: ClassVar[Sequence[str]] = ()
    """Fields that are not listed, and are read if they are texts."""


class Body(Open):
    """Fields of all bodies. Fields that are not listed are accepted, have no effect, and are
    counted."""

    model: str | None = None
    """Any name. The answers come from the policy."""
    stream: bool | None = None
    """Whether the answer comes as server-sent events."""
    stream_options: Open | None = None


Harmless: TypeAlias = Any
"""The type of a field that clients send and that asks for nothing, such as the id of an answer that
is sent back."""


class ContentPart(Open):
    """A part of a message. Only text can be read."""

    type: str
    text: str | None = None
    refusal: Any = None
    annotations: Harmless = None
    logprobs: Harmless = None


class AnyPart(ContentPart):
    """A part whose type is checked when it is read."""

    type: Any = None
    text: Any = None


def by_type(kinds: Mapping[str, type[Open]], default: str) -> Any:
    """A part of one of several types.

    Args:
        kinds: its `type` → what it has.
        default: the type of a part that has none, or one that is not in `kinds`. The caller refuses
            an unknown one later.
    """

    def tag(part: object) -> str:
        kind = part.get("type") if isinstance(part, dict) else None
        return f"({kind if isinstance(kind, str) and kind in kinds else default})"

    tagged: list[Any] = [Annotated[one, Tag(f"({kind})")] for kind, one in kinds.items()]
    return Annotated[reduce(or_, tagged), Discriminator(tag)]


FIRST = Field(union_mode="left_to_right")
"""Marks a union whose first fitting type is taken."""
Content: TypeAlias = Annotated[Items[Annotated[AnyPart | Any, FIRST]] | Any, FIRST]
"""A text or parts, which are checked when they are read."""


class StreamOptions(Open):
    """What a stream has in addition."""

    include_usage: bool | None = None
    """Send the numbers of tokens in an event of their own, the last one."""


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


def not_an_object(tree: object) -> ApiError:
    """The error of a body that is no JSON object."""
    message = f"the body is a JSON {type(tree).__name__}; send an object"
    return invalid(message, code="invalid_body")


def check(kind: type[Kind], tree: object) -> Kind:
    """Validate a body. Raises ApiError, 400, for the first invalid field."""
    if not isinstance(tree, dict):
        raise not_an_object(tree)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        # Of the types of a union, the one that the client meant has the deepest error.
        items = error.errors(include_url=False, include_context=False)
        item = max(items, key=lambda item: len(item["loc"]))
    path = _path(item["loc"], tree)
    field = path.partition(".")[0] or None
    if item["type"] == "missing":
        raise invalid(f"{path} is missing; set it", field, "missing_parameter")
    if field in KINDS:
        raise invalid(f"{field}: {KINDS[field]}", field)
    is_object = item["type"] == "model_type"
    message = "send an object" if is_object else item["msg"].removeprefix("Value error, ")
    raise invalid(f"{path}: {message[:1].lower()}{message[1:]}", field)


def _path(location: Sequence[int | str], tree: object) -> str:
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
        printable(name)
        for name, value in extra.items()
        if name not in LABELS and value not in NOTHING
    ]
    return (*unknown, *(name for name, given in known.items() if given))


def extras_in(body: Open) -> Iterator[str]:
    """The paths of unknown fields that ask for something, inside the fields of a body."""
    for name in type(body).model_fields:
        yield from _extras(getattr(body, name), name)


def _extras(value: object, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for index, one in enumerate(value):
            yield from _extras(one, f"{path}.{index}")
    elif isinstance(value, Open):
        for name, asked in (value.model_extra or {}).items():
            is_read = name in CACHE_MARKS or (name in value.texts_read and isinstance(asked, str))
            if not is_read and asked not in NOTHING:
                yield f"{path}.{printable(name)}"
        for name in type(value).model_fields:
            yield from _extras(getattr(value, name), f"{path}.{name}")


def new_id(prefix: str) -> str:
    """An identifier that no other answer has."""
    return f"{prefix}{uuid.uuid4().hex}"


def rest_of(answer: Answer, sent: str) -> str:
    """What is left of an answer's text.

    Raises:
        ApiError: 500 if the content does not begin with what was sent.
    """
    if not answer.text.startswith(sent):
        raise ApiError(
            500,
            "the text that was streamed is not the beginning of the message; ask without stream",
            "stream_differs",
        )
    return answer.text[len(sent) :]
