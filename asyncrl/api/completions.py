"""OpenAI's /v1/completions: continues texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from asyncrl.api.choices import ChoicesAnswer, ChoicesBody, ChoicesDialect
from asyncrl.api.contract import Part
from asyncrl.api.fields import (
    AtLeastOne,
    Items,
    Open,
    TopLogprobs,
    Whole,
    check,
    invalid,
    overridden_of,
)
from asyncrl.sessions.answers import Answer, ChatRequest, Token
from asyncrl.sessions.requests import stops_of
from asyncrl.text.chat_messages import Message
from asyncrl.web.answers import MOST_CHOICES, end_reason, finite


class PromptsBody(ChoicesBody):
    """The body of POST /v1/completions, with texts and token ids."""

    prompt: str | Items[Whole] | Items[str] | Items[Items[Whole]]
    """A text, token ids, or a list of either."""
    max_tokens: Annotated[Whole, Field(ge=0)] | None = None
    """Most tokens of an answer. 0 is valid with `echo`, and returns the prompt alone."""
    logprobs: TopLogprobs | None = None
    """Whether the answer has its tokens, and how many of the most probable ones. A session lists
    the sampled one."""
    echo: bool | None = None
    """Return the prompt before each answer, in the text and in the log-probs."""

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, also if there is only one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [part for part in self.prompt if isinstance(part, int)]
        several = [part for part in self.prompt if not isinstance(part, int)]
        return [*several] or [ids]


class CompletionsBody(PromptsBody):
    """The body of POST /v1/completions for a session."""

    prompt: str | list[str]
    """One text. Its tokens, if a turn or an earlier prompt has them, are not encoded again."""
    max_tokens: AtLeastOne | None = None
    """Most tokens of an answer. Default: as many as fit."""
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None


class CompletionsChoice(Open):
    """One answer."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"]


class CompletionsAnswer(ChoicesAnswer):
    """The answer of POST /v1/completions."""

    choices: list[CompletionsChoice]


class Completions(ChoicesDialect):
    """One request, and its answer."""

    prefix, kind, event_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, tree: object, notes: Mapping[str, list[Message]]) -> None:
        """Raises ApiError, 400, and UnsupportedError."""
        if isinstance(tree, dict) and tree.get("suffix"):
            raise invalid(
                "suffix is not supported; leave it out", "suffix", "unsupported_parameter"
            )
        body = check(PromptsBody, tree)
        self.prompts, self.echo = body.prompts, bool(body.echo)
        first = self.prompts[0]
        if len(self.prompts) > MOST_CHOICES:
            raise invalid(
                f"prompt has {len(self.prompts):,} prompts, above {MOST_CHOICES}; send several"
                " requests",
                "prompt",
            )
        if len(self.prompts) * (n := body.n or 1) > MOST_CHOICES:
            raise invalid(
                f"prompt: {len(self.prompts)} prompts with n = {n} are above {MOST_CHOICES}"
                " completions; send several requests",
                "prompt",
            )
        if body.max_tokens == 0 and not self.echo:
            raise invalid(
                "max_tokens: 0 generates nothing; use 1 or more, or set echo: true", "max_tokens"
            )
        top = body.logprobs or 0
        request = ChatRequest(
            n=n,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            stop=stops_of(body.stop, "stop"),
            logprobs=body.logprobs is not None,
            prompt=first if isinstance(first, str) else "",
        )
        super().__init__(body, request, overridden_of(body, {"logprobs": top > 1}), top)
        self._written: dict[int, int] = {}
        """Choice → characters of its tokens that were sent."""

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """A choice of the answer."""
        return {
            "index": index,
            "text": answer.text,
            "logprobs": self._logprobs(index, answer.tokens),
            "finish_reason": end_reason(answer.finish_reason),
            **answer.more,
        }

    def deltas(self, part: Part, text: str, is_first: bool) -> list[dict[str, Any]]:
        """What a part adds to its choice, one for each event."""
        choice = {
            "index": part.choice,
            "text": text,
            "logprobs": self._logprobs(part.choice, part.tokens),
            "finish_reason": part.answer and end_reason(part.answer.finish_reason),
        }
        return [{**choice, **part.more}]

    def _logprobs(self, choice: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """The log-probs of new tokens. The texts of the tokens are listed if they are wanted."""
        values = [finite(token.logprob) for token in tokens]
        if not tokens:
            return None
        if not self.request.logprobs:
            others = dict.fromkeys(("tokens", "top_logprobs", "text_offset"))
            return {"token_logprobs": values, **others}
        offsets = [self._written.get(choice, 0)]
        for token in tokens:
            offsets.append(offsets[-1] + len(token.text))
        self._written[choice] = offsets.pop()
        return {
            "tokens": [token.name for token in tokens],
            "token_logprobs": values,
            "top_logprobs": [_top(token) for token in tokens] if self.top else None,
            "text_offset": offsets,
        }


class TextCompletions(Completions):
    """A request that a session can follow: it continues one text."""

    def __init__(self, tree: object, notes: Mapping[str, list[Message]]) -> None:
        """Raises ApiError, 400, and UnsupportedError."""
        super().__init__(tree, notes)
        if len(self.prompts) != 1 or not self.prompts[0] or not isinstance(self.prompts[0], str):
            raise invalid("prompt is not one text; send one request for each text", "prompt")
        if self.echo:
            raise invalid("echo: a session gives no prompts; leave it out", "echo")


def _top(token: Token) -> dict[str, float | None] | None:
    """The most probable tokens at one position, and the sampled token. If two tokens have the same
    name, the more probable one is listed."""
    if token.logprob is None:
        return None
    named: dict[str, float | None] = {}
    for candidate in (*token.top, token):
        named.setdefault(candidate.name, finite(candidate.logprob))
    return named
