"""A fake for the protocol that sessions use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from asyncrl.contracts.nodes import CONSTRAINED
from asyncrl.contracts.rows import Completion, VersionSpan
from asyncrl.contracts.text_listener import Heard
from asyncrl.sessions.session import Sampled, TurnRequest
from asyncrl.text.tokenizer import decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class FakeTurnGenerator:
    """Answers with the tokens of a text and an end token. A text that does not fit is cut.

    Args:
        texts: the text of the answer with this number, counted over all requests.
        end: the token that ends a turn.
        latency: seconds of an answer, by its number.
        constrained: whether a grammar restricts the answers.
        fails: whether a request raises RuntimeError, by the number of its first answer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        texts: Callable[[int], str],
        end: int,
        latency: Callable[[int], float] = lambda number: 0.0,
        fails: Callable[[int], bool] = lambda number: False,
        constrained: bool = False,
    ) -> None:
        self._tokenizer, self._texts, self._end = tokenizer, texts, end
        self._latency, self._fails = latency, fails
        self._status = CONSTRAINED if constrained else "ok"
        self.version = 0
        """The version of the next answers."""
        self.requests: list[TurnRequest] = []
        self._answers = 0

    async def generate(self, request: TurnRequest, heard: Heard | None = None) -> Sequence[Sampled]:
        self.requests.append(request)
        if request.min_version is not None and self.version < request.min_version:
            raise AssertionError(
                f"version {request.min_version} was asked for, and {self.version} answers"
            )
        first, self._answers = self._answers, self._answers + request.n
        answers = [self._sampled(first + index, request.max_tokens) for index in range(request.n)]
        for index, answer in enumerate(answers if heard is not None else ()):
            for character in answer.completion.text:
                assert heard is not None
                heard(index, character)
                await asyncio.sleep(0)
        await asyncio.sleep(self._latency(first))
        if self._fails(first):
            raise RuntimeError(f"answer {first} failed")
        return answers

    def _sampled(self, number: int, max_tokens: int) -> Sampled:
        ids = (*self._tokenizer.encode(self._texts(number), add_special_tokens=False), self._end)
        kept = ids[:max_tokens]
        completion = Completion(
            kept,
            tuple(-0.1 - index / 8 for index in range(len(kept))),
            (VersionSpan(self.version, 0, len(kept)),) if kept else (),
            "stop" if len(kept) == len(ids) else "length",
            decode(self._tokenizer, kept),
        )
        return Sampled(completion, "fake 0", float(number), float(number) + 1, self._status)
