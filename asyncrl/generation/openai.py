"""OpenAI's form of a completion: a checked body becomes a request, what was generated becomes an answer. Knows neither Serve nor FastAPI."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from asyncrl.generation.protocol import Generated, GenerateRequest, Standing
from asyncrl.types import Completion

__all__ = ["ApiError", "CompletionBody", "ServedModel", "answer", "model_list", "parse", "printable", "to_request"]

MOST_COMPLETIONS = 128
"""Completions of one HTTP request."""

OTHER_FIELDS = 64 << 10
"""Bytes of a body beside the prompt."""

LARGEST_SEED = 1 << 53
"""JSON numbers above it lose digits in some clients."""

WHOLE = "the model's whole distribution is sampled, so that log-probs are those of the policy; use temperature"
HINTS = {
    "stream": "answers come whole; leave it out",
    "logprobs": "every answer has those of its tokens; leave it out",
    "max_completion_tokens": "max_tokens says something else; send one of them",
    **dict.fromkeys(("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"), WHOLE),
}
"""Fields of OpenAI's and vLLM's that there are not → why, and what to do."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False, None),
    "stream_options": (None,),
    "logprobs": (0, False, None),
    "echo": (False, None),
    "suffix": ("", None),
    "top_p": (1, 1.0, None),
    "top_k": (0, -1, None),
    "min_p": (0, 0.0, None),
    "frequency_penalty": (0, 0.0, None),
    "presence_penalty": (0, 0.0, None),
    "repetition_penalty": (1, 1.0, None),
    "logit_bias": ({}, None),
    "best_of": (1, None),
}
"""Fields that there are not → values that change nothing, and are taken: clients send them as they are by default."""

KINDS = {"prompt": "send a text, or one list of token ids", "stop": "send a text, or a list of at most 4 texts"}
"""Fields of two kinds → what they may be. pydantic would name the first kind alone."""


class ApiError(Exception):
    """An answer other than 200: HTTP status, one line for people, OpenAI's type and code, and the field that it is about."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        """OpenAI's form of it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are checked against."""

    name: str
    max_model_len: int
    """Longest prompt plus completion, in tokens."""
    vocabulary: int
    """Token ids are below this."""
    longest_token: int
    """Characters of the longest token."""

    @property
    def most_characters(self) -> int:
        """Characters that `max_model_len` tokens can stand for. A longer text is refused before it is tokenized."""
        return self.max_model_len * self.longest_token

    @property
    def largest_body(self) -> int:
        """Bytes of a request with the longest text in JSON, six for each character, or with the longest list of token ids."""
        return OTHER_FIELDS + max(6 * self.most_characters, (len(str(self.vocabulary)) + 2) * self.max_model_len)


class CompletionBody(BaseModel):
    """The body of POST /v1/completions, without `NEUTRAL` fields. Unknown fields and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    model: str
    """Name of the model, as /v1/models gives it."""
    prompt: str | list[int]
    """Text, or token ids."""
    n: int = Field(default=1, ge=1, le=MOST_COMPLETIONS)
    """Completions."""
    max_tokens: int = Field(default=16, ge=1)
    """Longest completion, in tokens."""
    temperature: float = Field(default=1.0, ge=0, le=2)
    """0 = greedy. Else at least 0.01."""
    seed: int | None = Field(default=None, ge=0, lt=LARGEST_SEED)
    """Of the first completion; each further one has the next."""
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    """Strings that end a completion, beside the model's own stop tokens."""

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

    @model_validator(mode="after")
    def greedy_is_one_answer(self) -> Self:
        if self.temperature == 0 and self.n > 1:
            raise ValueError("n: temperature 0 gives one answer only; ask for n = 1, or sample")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def parse(tree: Any, model: ServedModel) -> CompletionBody:
    """The body, checked. What no model of this length takes is refused before anything works through it.

    Raises:
        ApiError: 400, with the first field that is wrong.
    """
    if not isinstance(tree, dict):
        raise ApiError(400, f"the body is a JSON {type(tree).__name__}; send an object with model and prompt", "invalid_body")
    _refuse_long(tree.get("prompt"), model)
    try:
        json.dumps(tree, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the body has half of a surrogate pair, which no tokenizer takes; send whole characters", "invalid_body") from None
    try:
        return CompletionBody.model_validate(_without_neutral(tree))
    except ValidationError as error:
        raise _explain(dict(error.errors(include_url=False)[0])) from None


def _without_neutral(tree: dict[str, Any]) -> dict[str, Any]:
    """The body without fields whose values change nothing, and with OpenAI's newer name of max_tokens under the older one."""
    kept = {name: value for name, value in tree.items() if not any(type(value) is type(same) and value == same for same in NEUTRAL.get(name, ()))}
    if isinstance(kept.get("user"), str):  # whom the client serves; nothing here asks
        del kept["user"]
    if "max_completion_tokens" in kept and kept.setdefault("max_tokens", kept["max_completion_tokens"]) == kept["max_completion_tokens"]:
        del kept["max_completion_tokens"]
    return kept


def _refuse_long(prompt: Any, model: ServedModel) -> None:
    if isinstance(prompt, str) and len(prompt) > model.most_characters:
        held = f"the {model.most_characters:,} that {model.max_model_len} tokens of {model.name!r} can hold"
        raise ApiError(400, f"prompt has {len(prompt):,} characters, above {held}; shorten it", "context_length_exceeded", "prompt")
    if isinstance(prompt, list) and len(prompt) >= model.max_model_len:
        text = f"prompt of {len(prompt):,} tokens leaves no room in the {model.max_model_len} that {model.name!r} takes; shorten it"
        raise ApiError(400, text, "context_length_exceeded", "prompt")


def to_request(body: CompletionBody, prompt_ids: Sequence[int], model: ServedModel) -> GenerateRequest:
    """What the engine is asked.

    Raises:
        ApiError: 404 for another model's name, 400 for a prompt that is empty, too long, or has ids that the model does not know.
    """
    check_name(body, model)
    if not prompt_ids:
        raise ApiError(400, "prompt is empty; give at least one token", "invalid_value", "prompt")
    if not all(0 <= token < model.vocabulary for token in prompt_ids):
        raise ApiError(400, f"prompt has token ids outside 0 to {model.vocabulary - 1}; use the tokenizer of {model.name!r}", "invalid_value", "prompt")
    if len(prompt_ids) + body.max_tokens > model.max_model_len:
        text = f"prompt of {len(prompt_ids)} tokens and max_tokens {body.max_tokens} are above the {model.max_model_len} that {model.name!r} takes; shorten one"
        raise ApiError(400, text, "context_length_exceeded", "prompt")
    return GenerateRequest(tuple(prompt_ids), body.n, body.max_tokens, body.temperature, body.seed, stop=body.stops)


def check_name(body: CompletionBody, model: ServedModel) -> None:
    """Raise ApiError, 404, unless the body asks for this model."""
    if body.model != model.name:
        raise ApiError(404, f"model {body.model[:64]!r} is not served here; use {model.name!r}", "model_not_found", "model")


def answer(generated: Generated, request: GenerateRequest, model: ServedModel, standing: Standing, name: str, created: int) -> dict[str, Any]:
    """OpenAI's answer, with token ids, and the weights.

    Args:
        name: of the answer, unique.
        created: Unix seconds.
    """
    made = sum(len(completion.token_ids) for completion in generated.completions)
    prompt = len(request.prompt_ids)
    return {
        "id": name,
        "object": "text_completion",
        "created": created,
        "model": model.name,
        "choices": [_choice(index, completion) for index, completion in enumerate(generated.completions)],
        "usage": {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made},
        **weights(standing),
    }


def model_list(model: ServedModel, standing: Standing, created: int) -> dict[str, Any]:
    """The answer of /v1/models: the one model, and its weights."""
    entry = {"id": model.name, "object": "model", "created": created, "owned_by": "asyncrl", "max_model_len": model.max_model_len, **weights(standing)}
    return {"object": "list", "data": [entry]}


def weights(standing: Standing) -> dict[str, Any]:
    """Whose weights answer, as every answer says it: identity (null: the checkpoint's), the job that has the lease (null: none), and both in words."""
    return {"weights": asdict(standing.weights) if standing.weights is not None else None, "lease": standing.lease, "serving": standing.text}


def _choice(index: int, completion: Completion) -> dict[str, Any]:
    """Version spans are per token, since weights may change under way: half-open, over the completion's tokens."""
    finish: Literal["stop", "length"] = "stop" if completion.finish_reason == "stop" else "length"
    return {
        "index": index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "logprobs": {"token_logprobs": list(completion.logprobs), "tokens": None, "top_logprobs": None, "text_offset": None},
        "finish_reason": finish,
        "versions": [{"version": span.version, "start": span.start, "end": span.end} for span in completion.versions],
    }


def printable(name: str) -> str:
    """The beginning of a name that a client gave, without what moves a terminal."""
    return "".join(character if character.isprintable() else "\ufffd" for character in name[:64])


def _explain(item: dict[str, Any]) -> ApiError:
    """The first wrong field in one line. Its value is not repeated: it may be long, or not for a log."""
    field = printable(str(item["loc"][0])) if item["loc"] else None
    if item["type"] == "extra_forbidden":
        return ApiError(400, f"{field} is unknown; {HINTS.get(str(field), 'leave it out')}", "unknown_parameter", field)
    if item["type"] == "missing":
        return ApiError(400, f"{field} is missing; set it", "missing_parameter", field)
    if field in KINDS and item["type"] != "value_error":
        return ApiError(400, f"{field}: {KINDS[field]}", "invalid_value", field)
    message = item["msg"].removeprefix("Value error, ")
    if field is None:  # of several fields together: it names the first itself
        return ApiError(400, message, "invalid_value", message.partition(":")[0])
    return ApiError(400, f"{field}: {message[0].lower()}{message[1:]}", "invalid_value", field)
