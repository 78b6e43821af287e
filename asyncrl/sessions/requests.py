"""What a session can follow in a request, alike at a URL and in process. Imports nothing heavy:
environment processes need it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from asyncrl.text.chat_messages import TEXT_PARTS, Schema
from asyncrl.text.schema_references import PartsLeft, SchemaError, resolved_tool

LABELS = frozenset(
    {
        "cache_control",
        "metadata",
        "model",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream",
        "stream_options",
        "user",
        "user_profile_id",
        "workspace_id",
    }
)
"""Fields that change no answer, so they are not counted."""
ROLES = ("system", "developer", "user", "assistant", "tool")
UNREADABLE = "the model reads text only; leave it out"
MOST_STOPS = 16
REFUSED = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "the model writes text only; leave it out",
    "web_search_options": "the policy cannot search; leave it out",
}
"""Fields without which the answer would not be what the agent asked for → what to do."""


class UnsupportedError(ValueError):
    """A request asks for what a session does not do. The message is one line and names the field.

    Args:
        param: the field.
        code: for programs.
    """

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param, self.code = param, code


def refuse_fields(given: Mapping[str, object]) -> None:
    """Raise UnsupportedError for a field without which the answer would be another one."""
    for name, fix in REFUSED.items():
        if given.get(name) not in (None, [], "none", "auto"):
            raise UnsupportedError(f"{name} is not supported; {fix}", name, "unsupported_parameter")
    if given.get("modalities") not in (None, [], ["text"]):
        raise UnsupportedError("modalities: the model writes text only; use ['text']", "modalities")


def chat_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A message of a chat with a text as its content. `developer` is a `system` for the template.

    Raises:
        UnsupportedError: its role, a part of its content or a tool call is unknown.
    """
    at, role = f"messages.{index}", message.get("role")
    if role not in ROLES:
        raise UnsupportedError(
            f"{at}.role: input should be {', '.join(map(repr, ROLES[:-1]))} or {ROLES[-1]!r}",
            "messages",
        )
    read = {**message, "role": "system" if role == "developer" else role}
    if (content := message.get("content")) is not None:
        read["content"] = text_of(content, f"{at}.content")
    if calls := message.get("tool_calls"):
        _refuse_odd_calls(calls, f"{at}.tool_calls")
        if role != "assistant":
            raise UnsupportedError(
                f"{at} has tool calls and the role {role!r}; use 'assistant'", "messages"
            )
    return read


def _refuse_odd_calls(calls: object, param: str) -> None:
    if not isinstance(calls, list | tuple):
        raise UnsupportedError(f"{param}: input should be a valid list", "messages")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UnsupportedError(f"{param}.{index}.function.name is missing; set it", "messages")


def text_of(content: object, param: str) -> str:
    """The text of a content: a text, or text parts joined with line breaks.

    Raises:
        UnsupportedError: a part is no text, such as an image.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise UnsupportedError(f"{param} is neither a text nor a list of parts", param)
    return "\n".join(part_text(part, f"{param}.{index}") for index, part in enumerate(content))


def part_text(part: object, param: str) -> str:
    """The text of a part. Raises UnsupportedError if it is something else."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text: object = None
    if isinstance(part, Mapping):
        text = part.get("refusal" if kind == "refusal" else "text")
    if kind not in (*TEXT_PARTS, "refusal"):
        raise UnsupportedError(f"{param} has the type {str(kind)[:64]!r}; {UNREADABLE}", param)
    if not isinstance(text, str):
        raise UnsupportedError(f"{param} has no text; set it", param)
    return text


def functions_of(tools: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Where each function is in a request's tools, and what the request says of it.

    Raises:
        UnsupportedError: the tools are no list of functions.
    """
    if not isinstance(tools, list | tuple):
        raise UnsupportedError("tools: input should be a valid list", "tools")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise UnsupportedError(f"tools.{index}.type: input should be 'function'", "tools")
        if not isinstance(function := tool.get("function"), Mapping):
            raise UnsupportedError(f"tools.{index}.function is missing; set it", "tools")
        yield f"tools.{index}.function", function


def function_tools(
    tools: Iterable[tuple[str, Mapping[str, Any]]], parameters: str
) -> tuple[list[Schema], list[str]]:
    """The tools as sessions take them, and those of their fields that have no effect.

    Args:
        tools: where each tool is in the body, and what it says of its function.
        parameters: the name of the JSON schema of its arguments.

    Raises:
        UnsupportedError: a tool has no name, or its arguments have no schema that can be read.
    """
    parts = PartsLeft()
    found = [_function_tool(tool, parameters, param, parts) for param, tool in tools]
    return [tool for tool, _ in found], [name for _, names in found for name in names]


def _function_tool(
    given: Mapping[str, Any], parameters: str, param: str, parts: PartsLeft
) -> tuple[Schema, list[str]]:
    """A tool in the form of chat completions, and those of its fields that have no effect.

    Args:
        given: its `name`, `description` and `strict`, and the JSON schema of its arguments. The
            order of the fields is kept, because templates write it.
        parameters: the name of that schema.
    """
    unused = unused_of(given, parameters, param)
    function = {
        "parameters" if field == parameters else field: value
        for field, value in given.items()
        if field in ("name", "description", parameters) and value is not None
    }
    where = f"{param}.{parameters}"
    return resolved({"type": "function", "function": function}, where, parts), unused


def unused_of(given: Mapping[str, Any], parameters: str, param: str) -> list[str]:
    """The fields of a tool that have no effect: `strict` would force tokens. Raises
    UnsupportedError if the tool has no name, or no JSON schema for its arguments."""
    if not isinstance(name := given.get("name"), str) or not name:
        raise UnsupportedError(f"{param} has no name; set it", param)
    schema = given.get(parameters)
    if schema is not None and not isinstance(schema, Mapping):
        raise UnsupportedError(f"{param}.{parameters} is no JSON schema; send an object", param)
    return ["strict"] if given.get("strict") else []


def resolved(tool: Schema, param: str, parts: PartsLeft) -> Schema:
    """The tool without references in its schema. Raises UnsupportedError if it cannot be read."""
    try:
        return resolved_tool(tool, parts)
    except SchemaError as error:
        raise UnsupportedError(str(error), param) from None


def chosen(choice: object) -> tuple[bool, bool]:
    """Whether tool calls are read, and whether the client wants a forced call. That would not be
    the policy's, so it has no effect. Raises UnsupportedError for an unknown choice."""
    if choice is None or choice == "auto":
        return True, False
    if choice == "none":
        return False, False
    if choice in ("required", "any") or isinstance(choice, Mapping):
        return True, True
    raise UnsupportedError(
        f"tool_choice = {str(choice)[:40]!r} is unknown; use 'auto' or 'none'", "tool_choice"
    )


def schema_of(form: object, param: str) -> Schema | None:
    """The JSON schema that an answer's text must follow. None: any text.

    Args:
        form: `response_format` of chat completions, or `text.format` of responses.

    Raises:
        UnsupportedError: it is another form, or has no schema.
    """
    kind = form.get("type") if isinstance(form, Mapping) else None
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    named = form.get("json_schema", form) if isinstance(form, Mapping) else None
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if kind != "json_schema" or not isinstance(schema, Mapping):
        raise UnsupportedError(
            f"{param} = {str(form)[:80]!r} is not supported; use text, json_object, or"
            " json_schema with a schema",
            param,
        )
    return schema


def stops_of(stop: object, param: str) -> tuple[str, ...]:
    """Stop strings, from one or a list of them. Raises UnsupportedError for something else."""
    if stop is None:
        return ()
    stops: object = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or not all(
        isinstance(one, str) and one for one in stops
    ):
        raise UnsupportedError(
            f"{param} has a stop that is no text or is empty, which would stop at once; leave it"
            " out",
            param,
        )
    if len(stops) > MOST_STOPS:
        raise UnsupportedError(f"{param} has {len(stops)} stops; send at most {MOST_STOPS}", param)
    return tuple(stops)
