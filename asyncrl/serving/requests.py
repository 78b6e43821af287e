"""Requests to the endpoint: a dialect, and how its answers are sampled.

The dialects follow what sessions can follow, and name the fields that they do not follow. Here the
client decides about sampling, so each of those fields is either read here or refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import Field, field_validator

from asyncrl.api.chat import MESSAGE_FIELDS, Chat
from asyncrl.api.completions import Completions
from asyncrl.api.contract import Dialect
from asyncrl.api.fields import Open, Whole, check, invalid, not_an_object
from asyncrl.api.messages import Messages
from asyncrl.api.responses import LOGPROBS, Responses
from asyncrl.config.config import request_deadline_s
from asyncrl.contracts.messages import Details, GenerateRequest
from asyncrl.serving.answers import ChatTokenizer, siblings
from asyncrl.serving.identity import ServedModel
from asyncrl.text.chat_messages import Message, MessagesError
from asyncrl.web.errors import ApiError


class Api(NamedTuple):
    """One of the APIs."""

    dialect: Callable[[object, dict[str, list[Message]]], Dialect]
    texts: str
    """The field with the texts."""
    form: str
    """The field with the form of the answer."""


APIS = {
    "/v1/completions": Api(Completions, "prompt", ""),
    "/v1/chat/completions": Api(Chat, "messages", "response_format"),
    "/v1/responses": Api(Responses, "input", "text"),
    "/v1/messages": Api(Messages, "messages", "output_config"),
}

OF_MESSAGE = re.compile(rf"messages\.\d+\.({'|'.join(MESSAGE_FIELDS)})")
TOP_NEEDS: dict[type[Dialect], str] = {
    Chat: "logprobs: true",
    Responses: f"include: ['{LOGPROBS}']",
}
"""Dialect → what gives log-probs in the answer, where `top_logprobs` is another field."""

MOST_STOPS = 4
DEFAULT_TOKENS = 16
"""Longest answer of completions, in tokens, as in OpenAI's API."""

SEED_LIMIT = 1 << 53
"""Seeds are below this. Some clients lose digits of larger JSON numbers."""

SAMPLED = ("temperature", "seed")
"""Fields of all bodies that decide about sampling."""
NEWER = "max_completion_tokens"
"""OpenAI's newer name of max_tokens."""

WHOLE = (
    "completions are sampled from the whole distribution, so that log-probs are those of the"
    " policy; use temperature"
)
FORCED = "a forced tool call would not be the model's own; use 'auto' or 'none'"
TOOLS = "the model decides how it calls tools, and is trained so; leave it out"
THINKING = "the chat template decides about reasoning; use chat_template_kwargs"
HINTS = {
    **dict.fromkeys(("top_p", "top_k", "min_p", "logit_bias"), WHOLE),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"), WHOLE),
    **dict.fromkeys(("reasoning", "reasoning_effort", "thinking", "effort"), THINKING),
    **dict.fromkeys(("parallel_tool_calls", "disable_parallel_tool_use", "strict"), TOOLS),
    "tool_choice": FORCED,
    "best_of": "use n",
    "include": f"use {LOGPROBS} only",
    "truncation": "shorten the input, and use 'disabled'",
    **dict.fromkeys(("prediction", "verbosity"), "leave it out"),
}
"""Fields that are not supported → why, and what to do."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "logprobs": (False,),
    "return_token_ids": (True, False),
    "top_p": (1, 1.0),
    "top_k": (0, -1),
    "min_p": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "logit_bias": ({},),
    "best_of": (1,),
}
"""Fields → values that have no effect, and are accepted. Clients send these by default."""


class Sampling(Open):
    """How the client wants its answers sampled."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    """0 is greedy. Other values are at least 0.01. Default: 1."""
    seed: Whole | None = Field(default=None, ge=0, lt=SEED_LIMIT)
    """Seed of the first completion of each prompt. Each further completion gets the next seed."""
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    """Variables of the chat template, such as enable_thinking."""

    @field_validator("temperature")
    @classmethod
    def engine_uses_it_unchanged(cls, temperature: float | None) -> float | None:
        if temperature is not None and 0 < temperature < 0.01:
            raise ValueError(
                "the engine would use 0.01 for values between 0 and 0.01; use 0 for greedy"
            )
        return temperature

    def request(
        self, prompt_ids: Sequence[int], max_tokens: int, stop: tuple[str, ...] = ()
    ) -> GenerateRequest:
        """The engine's request for one prompt."""
        return GenerateRequest(
            tuple(prompt_ids),
            1,
            max_tokens,
            1.0 if self.temperature is None else self.temperature,
            self.seed,
            request_deadline_s(max_tokens),
            stop=stop,
        )


class Asked:
    """One request to the endpoint."""

    def __init__(self, path: str, tree: object, model: ServedModel) -> None:
        """Validate the body. Raises ApiError and UnsupportedError, 400, or ApiError, 404, for
        another model."""
        if not isinstance(tree, dict):
            raise not_an_object(tree)
        given = {name: value for name, value in tree.items() if not _is_neutral(name, value)}
        names = SAMPLED if path == "/v1/completions" else (*SAMPLED, "chat_template_kwargs")
        own = {name: given.pop(name) for name in names if name in given}
        self.sampling = check(Sampling, own)
        api = APIS[path]
        self._model, self._field = model, api.texts
        self.dialect = api.dialect({**given, "store": False}, {})  # no answer is kept
        if self.dialect.request.schema is not None:
            raise invalid(f"{api.form}: only text output is supported; leave it out", api.form)
        self._refuse_unread()
        self._refuse_contradictions(given)
        self._refuse_many()

    @property
    def echoes(self) -> bool:
        """Whether each answer begins with its prompt."""
        return isinstance(self.dialect, Completions) and self.dialect.echo

    @property
    def details(self) -> Details:
        """What the engine reports."""
        dialect, asked = self.dialect, self.dialect.request
        top = dialect.top if asked.logprobs else 0
        return Details(not dialect.streams, top, self.echoes and asked.logprobs)

    async def content_filter(
        self, tokenizer: ChatTokenizer, prompt_ids: Sequence[int]
    ) -> Callable[[str], str]:
        """What releases the text of a choice. A continued text is content only."""
        asked = self.dialect.request
        if asked.prompt is not None or not self.dialect.streams:
            return str
        return await tokenizer.content_filter(prompt_ids, bool(asked.tools))

    async def prompts(self, tokenizer: ChatTokenizer) -> list[tuple[str, list[int]]]:
        """The prompts, as texts and tokens. Without `echo`, token ids have no text. Raises
        ApiError."""
        if not isinstance(self.dialect, Completions):
            return [await self._rendered(tokenizer)]
        prompts: list[tuple[str, list[int]]] = []
        for prompt in self.dialect.prompts:
            if isinstance(prompt, str):
                prompts.append((prompt, await tokenizer.encode(prompt)))
            else:
                check_ids(prompt, self._model, self._field)
                echoed = await tokenizer.decode(prompt) if self.echoes else ""
                prompts.append((echoed, prompt))
        return prompts

    def requests(self, prompts: Sequence[Sequence[int]]) -> list[GenerateRequest]:
        """One request for each choice. Raises ApiError."""
        asked, longest = self.dialect.request, self.dialect.request.max_tokens
        if longest is None and isinstance(self.dialect, Completions):
            longest = DEFAULT_TOKENS
        return [
            choice
            for ids in prompts
            for choice in siblings(
                self.sampling.request(
                    ids, longest_answer(ids, longest, self._model, self._field), asked.stop
                ),
                asked.n,
            )
        ]

    async def _rendered(self, tokenizer: ChatTokenizer) -> tuple[str, list[int]]:
        """The chat's prompt."""
        asked, variables = self.dialect.request, self.sampling.chat_template_kwargs or {}
        try:
            text = await tokenizer.render(asked.messages, variables, asked.tools)
        except MessagesError as error:
            raise invalid(
                f"the chat template of {self._model.name!r} refuses the messages ({error}); correct"
                " them, or use /v1/completions",
                self._field,
            ) from None
        refuse_long_text(text, self._model, self._field)
        return text, await tokenizer.encode(text, rendered=True)

    def _refuse_unread(self) -> None:
        """Raise ApiError for another model, and for what would have no effect."""
        dialect = self.dialect
        if dialect.model is None:
            raise invalid("model is missing; set it", "model", "missing_parameter")
        if dialect.model != self._model.name:
            raise ApiError(
                404,
                f"model {dialect.model[:64]!r} is not served here; use {self._model.name!r}",
                "model_not_found",
                "model",
            )
        for name in (*dialect.overridden, *dialect.unread):
            if name in ("logprobs", "top_logprobs"):
                continue
            leaf = name.rpartition(".")[2]
            problem = "is not supported" if leaf in HINTS else "is unknown"
            fix = HINTS.get(leaf, "leave it out")
            if isinstance(dialect, Chat) and OF_MESSAGE.fullmatch(name):
                problem, fix = "is no string", "send one"
            raise invalid(f"{name} {problem}; {fix}", name.partition(".")[0], "unknown_parameter")

    def _refuse_contradictions(self, given: Mapping[str, Any]) -> None:
        """Raise ApiError for fields that cannot be combined, and for too many stops."""
        asked = self.dialect.request
        longest = given.get("max_tokens")
        if longest is not None and given.get(NEWER) not in (None, longest):
            raise invalid(f"{NEWER} and max_tokens differ; send one of them", NEWER)
        if self.sampling.temperature == 0 and asked.n > 1:
            raise invalid(
                "n: temperature 0 gives only one answer; use n = 1, or a higher temperature", "n"
            )
        options = given.get("stream_options") or {}
        if options.get("include_usage") and not self.dialect.streams:
            raise invalid(
                "stream_options: only valid with stream: true; remove it, or set stream",
                "stream_options",
            )
        wanted = TOP_NEEDS.get(type(self.dialect))
        if wanted is not None and self.dialect.top and not asked.logprobs:
            raise invalid(
                f"top_logprobs: only valid with {wanted}; remove it, or set {wanted.split(':')[0]}",
                "top_logprobs",
            )
        if len(asked.stop) > MOST_STOPS:
            name = "stop_sequences" if "stop_sequences" in given else "stop"
            raise invalid(f"{name}: send a list of at most {MOST_STOPS} strings", name)

    def _refuse_many(self) -> None:
        """Raise ApiError for what is certainly too long. To tokenize it would take much memory."""
        model, messages = self._model, self.dialect.request.messages
        if len(messages) > model.max_model_len:  # each takes at least one token
            raise _too_long(
                f"{self._field} has {len(messages):,} messages, above the {model.max_model_len}"
                f" tokens that {model.name!r} accepts; send fewer",
                self._field,
            )
        texts = self.dialect.prompts if isinstance(self.dialect, Completions) else ()
        said = "".join(str(message.get("content", "")) for message in messages)
        for text in (said, *(text for text in texts if isinstance(text, str))):
            refuse_long_text(text, model, self._field)
        if self.dialect.top > model.vocabulary:
            named = "top_logprobs" if messages else "logprobs"
            raise invalid(
                f"{named}: {model.name!r} has {model.vocabulary} tokens; use at most that many",
                named,
            )


def refuse_long_text(text: str, model: ServedModel, field: str) -> None:
    """Raise ApiError, 400, for a text that is too long for any prompt of this model."""
    if len(text) > model.most_characters:
        raise _too_long(
            f"{field} has {len(text):,} characters, above the {model.most_characters:,} that"
            f" {model.max_model_len} tokens of {model.name!r} can represent; shorten it",
            field,
        )


def check_ids(ids: Sequence[int], model: ServedModel, field: str) -> None:
    """Raise ApiError, 400, for a prompt that is empty, or has ids outside the vocabulary."""
    if not ids:
        raise invalid(f"{field} is empty; send at least one token", field)
    if not all(0 <= token < model.vocabulary for token in ids):
        raise invalid(
            f"{field} has token ids outside 0 to {model.vocabulary - 1}; use the tokenizer of"
            f" {model.name!r}",
            field,
        )


def longest_answer(
    ids: Sequence[int], max_tokens: int | None, model: ServedModel, field: str
) -> int:
    """The longest completion of a prompt: `max_tokens`, or by default the rest of the context.

    Raises:
        ApiError: 400, for a prompt that is empty or too long.
    """
    check_ids(ids, model, field)
    if len(ids) >= model.max_model_len:
        raise _too_long(
            f"{field} of {len(ids):,} tokens leaves no room in the {model.max_model_len} tokens of"
            f" {model.name!r}; shorten it",
            field,
        )
    longest = model.max_model_len - len(ids) if max_tokens is None else max_tokens
    if len(ids) + max(longest, 1) > model.max_model_len:
        raise _too_long(
            f"{field} of {len(ids)} tokens and max_tokens {longest} exceed the"
            f" {model.max_model_len} tokens of {model.name!r}; shorten one",
            field,
        )
    return longest


def _too_long(message: str, field: str) -> ApiError:
    return invalid(message, field, "context_length_exceeded")


def _is_neutral(name: str, value: object) -> bool:
    """Whether the field asks for nothing."""
    return any(type(value) is type(same) and value == same for same in NEUTRAL.get(name, ()))
