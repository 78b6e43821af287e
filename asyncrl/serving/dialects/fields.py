"""What OpenAI's bodies have in common: fields that sample, fields that change nothing, and errors
that name a field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from asyncrl.config.derived import request_deadline_s
from asyncrl.contracts.messages import GenerateRequest
from asyncrl.serving.errors import ApiError, printable
from asyncrl.serving.identity import ServedModel

__all__ = [
    "LONGEST_SEED",
    "MOST_CHOICES",
    "MOST_LOGPROBS",
    "Sampling",
    "check",
    "check_name",
    "check_prompt",
    "check_top",
    "refuse_long_text",
]

MOST_CHOICES = 128
"""Completions of one HTTP request."""

MOST_LOGPROBS = 20
"""Most probable tokens at one place: as many as vLLM gives."""

LONGEST_SEED = 1 << 53
"""JSON numbers above it lose digits in some clients."""

WHOLE = (
    "the model's whole distribution is sampled, so that log-probs are those of the policy; use"
    " temperature"
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
    "response_format": "only text is written; leave it out",
    "best_of": "ask for n completions",
}
"""Fields of OpenAI's and vLLM's that there are not → why, and what to do."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
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
    "service_tier": ("auto", "default", None),
    "store": (False, None),
    "metadata": ({}, None),
    "prediction": (None,),
    "audio": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
}
"""Fields that there are not → values that change nothing, and are taken: clients send them as they
are by default."""

LABELS = ("user", "safety_identifier", "prompt_cache_key")
"""Texts by which a client's own provider tells its users apart. Nothing here asks."""

KINDS = {
    "prompt": "send a text, a list of token ids, or a list of such prompts",
    "stop": "send a text, or a list of at most 4 texts",
    "messages": (
        "send a list of messages with a role (system, developer, user, assistant) and a content: a"
        " text, or parts of type text"
    ),
}
"""Fields of several kinds → what they may be. pydantic would name the first kind alone."""


class StreamOptions(BaseModel):
    """What a stream tells beside the pieces."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    include_usage: bool = False
    """Numbers of tokens in an event of its own, at the end."""
    include_obfuscation: Literal[False] = False
    """OpenAI's padding of events, which there is not."""


class Sampling(BaseModel):
    """How a body asks for completions. Unknown fields and wrong types are refused."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    model: str
    """Name of the model, as /v1/models gives it."""
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    """Completions of each prompt."""
    temperature: float = Field(default=1.0, ge=0, le=2)
    """0 = greedy. Else at least 0.01."""
    seed: int | None = Field(default=None, ge=0, lt=LONGEST_SEED)
    """Of the first completion of each prompt; each further one has the next."""
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    """Strings that end a completion, beside the model's own stop tokens."""
    stream: bool = False
    """Send the answer in pieces, as server-sent events."""
    stream_options: StreamOptions = StreamOptions()
    """Only with `stream`."""

    @field_validator("temperature")
    @classmethod
    def engine_takes_it(cls, temperature: float) -> float:
        if 0 < temperature < 0.01:
            raise ValueError("between 0 and 0.01 the engine would take 0.01; use 0 for greedy")
        return temperature

    @field_validator("stop")
    @classmethod
    def stops_are_texts(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if "" in ([stop] if isinstance(stop, str) else stop or []):
            raise ValueError("an empty string would stop at once; leave it out")
        return stop

    def refuse_contradictions(self) -> None:
        """Raise ValueError, naming a field, for two that cannot be combined."""
        if self.temperature == 0 and self.n > 1:
            raise ValueError("n: temperature 0 gives one answer only; ask for n = 1, or sample")
        if "stream_options" in self.model_fields_set and not self.stream:
            raise ValueError(
                "stream_options: it acts only with stream: true; leave it out, or set that"
            )

    def request(self, prompt_ids: list[int], max_tokens: int) -> GenerateRequest:
        """What the engine is asked for one prompt."""
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


def check(kind: type[Body], tree: Any, needs: str) -> Body:
    """A body of this kind, checked; its lengths must have been.

    Raises:
        ApiError: 400, with the first field that is wrong.
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
            "the body has half of a surrogate pair, which no tokenizer takes; send whole"
            " characters",
            "invalid_body",
        ) from None
    try:
        return kind.model_validate(_without_neutral(tree, kind))
    except ValidationError as error:
        raise _explain(dict(error.errors(include_url=False)[0])) from None


def check_name(body: Sampling, model: ServedModel) -> None:
    """Raise ApiError, 404, unless the body asks for this model."""
    if body.model != model.name:
        raise ApiError(
            404,
            f"model {body.model[:64]!r} is not served here; use {model.name!r}",
            "model_not_found",
            "model",
        )


def check_top(top: int | None, model: ServedModel, field: str) -> None:
    """Raise ApiError, 400, for more of the most probable tokens than the model has."""
    if top is not None and top > model.vocabulary:
        raise ApiError(
            400,
            f"{field}: {model.name!r} has {model.vocabulary} tokens; ask for no more",
            "invalid_value",
            field,
        )


def refuse_long_text(text: str, model: ServedModel, field: str) -> None:
    """Raise ApiError, 400, for a text that no prompt of this model can hold. Before anything works
    through it."""
    if len(text) > model.most_characters:
        held = (
            f"the {model.most_characters:,} that {model.max_model_len} tokens of {model.name!r} can"
            " hold"
        )
        raise ApiError(
            400,
            f"{field} has {len(text):,} characters, above {held}; shorten it",
            "context_length_exceeded",
            field,
        )


def check_prompt(ids: list[int], max_tokens: int | None, model: ServedModel, field: str) -> int:
    """Longest completion of a prompt: `max_tokens`, or what the context has left.

    Raises:
        ApiError: 400, for a prompt that is empty, too long, or has ids that the model does not
            know.
    """
    if not ids:
        raise ApiError(400, f"{field} is empty; give at least one token", "invalid_value", field)
    if not all(0 <= token < model.vocabulary for token in ids):
        raise ApiError(
            400,
            f"{field} has token ids outside 0 to {model.vocabulary - 1}; use the tokenizer of"
            f" {model.name!r}",
            "invalid_value",
            field,
        )
    if len(ids) >= model.max_model_len:
        text = (
            f"{field} of {len(ids):,} tokens leaves no room in the {model.max_model_len} that"
            f" {model.name!r} takes; shorten it"
        )
        raise ApiError(400, text, "context_length_exceeded", field)
    longest = model.max_model_len - len(ids) if max_tokens is None else max_tokens
    if len(ids) + longest > model.max_model_len:
        text = (
            f"{field} of {len(ids)} tokens and max_tokens {longest} are above the"
            f" {model.max_model_len} that {model.name!r} takes; shorten one"
        )
        raise ApiError(400, text, "context_length_exceeded", field)
    return longest


def _without_neutral(tree: Mapping[str, Any], kind: type[Sampling]) -> dict[str, Any]:
    """The body without fields whose values change nothing, and with OpenAI's newer name of
    max_tokens under the older one. Raises ApiError if both differ."""
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
    for name in LABELS:
        if isinstance(kept.get(name), str | None):
            kept.pop(name, None)
    newer = kept.pop("max_completion_tokens", None)
    if newer is not None and kept.setdefault("max_tokens", newer) != newer:
        raise ApiError(
            400,
            "max_completion_tokens and max_tokens differ; send one of them",
            "invalid_value",
            "max_completion_tokens",
        )
    return kept


def _explain(item: dict[str, Any]) -> ApiError:
    """The first wrong field in one line. Its value is not repeated: it may be long, or not for a
    log."""
    field = printable(str(item["loc"][0])) if item["loc"] else None
    if (
        field in KINDS
        and item["type"] not in ("value_error", "extra_forbidden")
        and (len(item["loc"]) > 1 or item["type"] != "missing")
    ):
        return ApiError(400, f"{field}: {KINDS[field]}", "invalid_value", field)
    if item["type"] == "extra_forbidden":
        place = ".".join(printable(str(part)) for part in item["loc"])
        return ApiError(
            400,
            f"{place} is unknown; {HINTS.get(place, 'leave it out')}",
            "unknown_parameter",
            field,
        )
    if item["type"] == "missing":
        return ApiError(400, f"{field} is missing; set it", "missing_parameter", field)
    message = item["msg"].removeprefix("Value error, ")
    if field is None:  # of several fields together: it names the first itself
        return ApiError(400, message, "invalid_value", message.partition(":")[0])
    return ApiError(400, f"{field}: {message[0].lower()}{message[1:]}", "invalid_value", field)
