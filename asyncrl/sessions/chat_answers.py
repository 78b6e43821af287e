"""Answers in the form of OpenAI's chat completions. Imports nothing heavy: environment processes
need it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.sessions.answers import Answer, Token
from asyncrl.web.answers import finite, usage


def chat_choice(index: int, answer: Answer, logprobs: bool, top: int = 0) -> dict[str, Any]:
    """One choice of an answer.

    Args:
        top: see `chat_logprobs`.
    """
    text, calls = answer.text, answer.calls
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text or (None if calls else ""),
        "refusal": None,
    }
    if reasoning := answer.reasoning:
        message["reasoning"] = reasoning
    return {
        "index": index,
        "message": message | ({"tool_calls": calls} if calls else {}),
        "logprobs": chat_logprobs(answer.tokens, top) if logprobs else None,
        "finish_reason": answer.chat_reason,
        **answer.more,
    }


def chat_logprobs(tokens: Sequence[Token], top: int) -> dict[str, Any] | None:
    """The log-probs of tokens. None: there are no tokens.

    Args:
        top: most probable tokens that are wanted at each position. Without them, the sampled token
            stands for them.
    """
    if not tokens:
        return None
    content = [
        {
            **shown_token(token),
            "top_logprobs": [shown_token(one) for one in (token.top or (token,) if top else ())],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def shown_token(token: Token) -> dict[str, Any]:
    """A token with its log-prob. `bytes` is null for a part of a character, because the tokenizer
    does not say which part."""
    return {
        "token": token.text,
        "logprob": finite(token.logprob),
        "bytes": None if "\ufffd" in token.text else list(token.text.encode()),
    }


def usage_of(answers: Sequence[Answer], n: int) -> dict[str, int]:
    """The numbers of tokens. The n answers of a prompt share its tokens."""
    prompt = sum(answer.prompt_tokens for answer in answers[::n])
    return usage(prompt, sum(answer.completion_tokens for answer in answers))
