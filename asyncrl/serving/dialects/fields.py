"""The fields that the bodies of OpenAI's requests share, and validation with errors that name a
field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from asyncrl.config.derived import request_deadline_s
from asyncrl.contracts.messages import GenerateRequest
from asyncrl.serving.identity import ServedModel
from asyncrl.sessions.requests import LABELS
from asyncrl.web.answers import MOST_CHOICES
from asyncrl.web.bodies import Whole
from asyncrl.web.errors import ApiError, printable

MOST_LOGPROBS = 20
"""Upper limit of the most probable tokens at one position, as in vLLM."""

SEED_LIMIT = 1 << 53
"""Seeds are below this. Some clients lose digits of larger JSON numbers."""

NEWER = "max_completion_tokens"
"""OpenAI's newer name of max_tokens."""

WHOLE = (
    "completions are sampled from the whole distribution, so that log-probs are those of the"
    " policy; use temperature"
)
HINTS = {
    **dict.fromkeys(
        (
            "top_p",
            "top_k",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "logit_bias",
        ),
        WHOLE,
    ),
    **dict.fromkeys(
        ("tools", "tool_choice", "functions", "function_call"),
        "tool calls are not implemented; leave it out",
    ),
    "response_format": "only text output is supported; leave it out",
    "best_of": "use n",
}
"""Unsupported fields of OpenAI's and vLLM's APIs → why, and what to do."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "logprobs": (False,),
    "return_token_ids": (True, False, None),
    "suffix": ("", None),
    "top_p": (1, 1.0, None),
    "top_k": (0, -1, None),
    "min_p": (0, 0.0, None),
    "frequency_penalty": (0, 0.0, None),
    "presence_penalty": (0, 0.0, None),
    "repetition_penalty": (1, 1.0, None),
    "logit_bias": ({}, None),
    "best_of": (1, None),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "parallel_tool_calls": (True, False, None),
    "functions": ([], None),
    "function_call": ("none", "auto", None),
    "response_format": ({"type": "text"}, None),
    "modalities": (["text"], None),
    "prediction": (None,),
    "audio": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
}
"""Unsupported fields → values that have no effect, and are accepted. Clients send these by
default."""

IGNORED = LABELS - {"model", "stream", "stream_options"}
"""Fields that change no answer, such as `metadata`. They are accepted and ignored."""

KINDS = {
    "prompt": "send a string, a list of token ids, or a list of such prompts",
    "stop": "send a string, or a list of at most 4 strings",
    "messages": (
        "send a list of messages with a role (system, developer, user, assistant) and a content: a"
        " string, or parts of type text"
    ),
    "chat_template_kwargs": "send an object of strings, numbers and booleans",
}
"""Fields of several types → the valid ones. pydantic would only name the first type."""


class StreamOptions(BaseModel):
    """What a stream sends in addition to the pieces."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    include_usage: bool = False
    """Send the numbers of tokens in a separate last event."""
    include_obfuscation: Literal[False] = False
    """OpenAI's padding of events, which is not supported."""


class Sampling(BaseModel):
    """The fields that both bodies share. Unknown fields and wrong types are refused."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    model: str
    """Name of the model, as listed by /v1/models."""
    n: Whole = Field(default=1, ge=1, le=MOST_CHOICES)
    """Number of completions for each prompt."""
    temperature: float = Field(default=1.0, ge=0, le=2)
    """0 is greedy. Other values are at least 0.01."""
    seed: Whole | None = Field(default=None, ge=0, lt=SEED_LIMIT)
    """Seed of the first completion of each prompt. Each further completion gets the next seed."""
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    """Strings that end a completion, in addition to the generator's own stops."""
    stream: bool = False
    """Send the answer in pieces, as server-sent events."""
    stream_options: StreamOptions = StreamOptions()
    """Requires `stream`."""

    @field_validator("temperature")
    @classmethod
    def engine_uses_it_unchanged(cls, temperature: float) -> float:
        if 0 < temperature < 0.01:
            raise ValueError(
                "the engine would use 0.01 for values between 0 and 0.01; use 0 for greedy"
            )
        return temperature

    @field_validator("stop")
    @classmethod
    def stops_are_not_empty(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if "" in ([stop] if isinstance(stop, str) else stop or []):
            raise ValueError("an empty string would stop at once; leave it out")
        return stop

    def refuse_contradictions(self) -> None:
        """Raise ValueError for fields that cannot be combined. The message begins with a field."""
        if self.temperature == 0 and self.n > 1:
            raise ValueError(
                "n: temperature 0 gives only one answer; use n = 1, or a higher temperature"
            )
        if self.stream_options.include_usage and not self.stream:
            raise ValueError(
                "stream_options: only valid with stream: true; remove it, or set stream"
            )

    def request(self, prompt_ids: list[int], max_tokens: int) -> GenerateRequest:
        """The engine's request for one prompt."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return GenerateRequest(
            tuple(prompt_ids),
            1,
            max_tokens,
            self.temperature,
            self.seed,
            request_deadline_s(max_tokens),
            stop=stops,
        )


Body = TypeVar("Body", bound=Sampling)


def check(kind: type[Body], tree: object, needs: str) -> Body:
    """Validate a body. The caller has already checked its lengths.

    Args:
        needs: the required fields, for an error message.

    Raises:
        ApiError: 400, for the first invalid field.
    """
    if not isinstance(tree, dict):
        raise ApiError(
            400,
            f"the body is a JSON {type(tree).__name__}; send an object with {needs}",
            "invalid_body",
        )
    try:
        json.dumps(tree, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(
            400,
            "the body contains half of a surrogate pair, which tokenizers reject; send whole"
            " characters",
            "invalid_body",
        ) from None
    try:
        return kind.model_validate(_without_neutral(tree, kind))
    except ValidationError as error:
        item = error.errors(include_url=False)[0]
    if item["loc"][:1] == ("max_tokens",) and tree.get("max_tokens") is None:
        item["loc"] = (NEWER,)  # as the client calls it
    raise _explain(item)


def check_name(body: Sampling, model: ServedModel) -> None:
    """Raise ApiError, 404, unless the body names this model."""
    if body.model != model.name:
        raise ApiError(
            404,
            f"model {body.model[:64]!r} is not served here; use {model.name!r}",
            "model_not_found",
            "model",
        )


def check_top(top: int | None, model: ServedModel, field: str) -> None:
    """Raise ApiError, 400, if `top` is above the size of the vocabulary."""
    if top is not None and top > model.vocabulary:
        raise ApiError(
            400,
            f"{field}: {model.name!r} has {model.vocabulary} tokens; use at most that many",
            "invalid_value",
            field,
        )


def refuse_long_text(text: str, model: ServedModel, field: str) -> None:
    """Raise ApiError, 400, for a text that is too long for any prompt of this model. Tokenizing it
    would take much memory."""
    if len(text) > model.most_characters:
        raise ApiError(
            400,
            f"{field} has {len(text):,} characters, above the {model.most_characters:,} that"
            f" {model.max_model_len} tokens of {model.name!r} can represent; shorten it",
            "context_length_exceeded",
            field,
        )


def refuse_long_prompt(tokens: int, model: ServedModel, field: str) -> None:
    """Raise ApiError, 400, for a prompt that leaves no room for a completion."""
    if tokens >= model.max_model_len:
        raise ApiError(
            400,
            f"{field} of {tokens:,} tokens leaves no room in the {model.max_model_len} tokens of"
            f" {model.name!r}; shorten it",
            "context_length_exceeded",
            field,
        )


def check_prompt(ids: list[int], max_tokens: int | None, model: ServedModel, field: str) -> int:
    """The longest completion of a prompt: `max_tokens`, or by default the rest of the context.

    Raises:
        ApiError: 400, for a prompt that is empty, too long, or has ids outside the vocabulary.
    """
    if not ids:
        raise ApiError(400, f"{field} is empty; send at least one token", "invalid_value", field)
    if not all(0 <= token < model.vocabulary for token in ids):
        raise ApiError(
            400,
            f"{field} has token ids outside 0 to {model.vocabulary - 1}; use the tokenizer of"
            f" {model.name!r}",
            "invalid_value",
            field,
        )
    refuse_long_prompt(len(ids), model, field)
    longest = model.max_model_len - len(ids) if max_tokens is None else max_tokens
    if len(ids) + longest > model.max_model_len:
        text = (
            f"{field} of {len(ids)} tokens and max_tokens {longest} exceed the"
            f" {model.max_model_len} tokens of {model.name!r}; shorten one"
        )
        raise ApiError(400, text, "context_length_exceeded", field)
    return longest


def _without_neutral(tree: Mapping[str, object], kind: type[Sampling]) -> dict[str, object]:
    """Drop fields whose values have no effect, and rename max_completion_tokens to its older name,
    max_tokens. Raises ApiError if the two differ."""
    kept = {
        name: value
        for name, value in tree.items()
        if not any(type(value) is type(same) and value == same for same in NEUTRAL.get(name, ()))
    }
    kept = {
        name: value
        for name, value in kept.items()
        if value is not None
        or name not in kind.model_fields
        or kind.model_fields[name].is_required()
    }
    for name in IGNORED:
        kept.pop(name, None)
    newer = kept.pop(NEWER, None)
    if newer is not None and kept.setdefault("max_tokens", newer) != newer:
        raise ApiError(
            400,
            f"{NEWER} and max_tokens differ; send one of them",
            "invalid_value",
            NEWER,
        )
    return kept


def _explain(item: ErrorDetails) -> ApiError:
    """Describe the first invalid field in one line, without its value, which may be long or
    private."""
    field = printable(str(item["loc"][0])) if item["loc"] else None
    if (
        field in KINDS
        and item["type"] not in ("value_error", "extra_forbidden")
        and (len(item["loc"]) > 1 or item["type"] != "missing")
    ):
        return ApiError(400, f"{field}: {KINDS[field]}", "invalid_value", field)
    if item["type"] == "extra_forbidden":
        place = ".".join(printable(str(part)) for part in item["loc"])
        known = place in HINTS or place in NEUTRAL
        problem = "is not supported" if known else "is unknown"
        fix = HINTS.get(place, "leave it out")
        return ApiError(400, f"{place} {problem}; {fix}", "unknown_parameter", field)
    if item["type"] == "missing":
        return ApiError(400, f"{field} is missing; set it", "missing_parameter", field)
    message = item["msg"].removeprefix("Value error, ")
    if field is None:  # several fields together: the message begins with the first
        return ApiError(400, message, "invalid_value", message.partition(":")[0])
    return ApiError(400, f"{field}: {message[0].lower()}{message[1:]}", "invalid_value", field)
