"""Turns the arguments of a score request into token ids: prompts with completions, or token ids
themselves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypeGuard

from asyncrl.contracts.errors import InvalidRequestError
from asyncrl.text.stops import chat_end_token
from asyncrl.text.tokenizer import (
    encode_prompts,
    load_tokenizer,
    special_tokens,
    tokenizer_hash,
)

FIELDS = ("prompts", "completions", "complete", "token_ids")
"""Arguments of a score request, and fields of its HTTP body."""
MOST_ROWS = 1024
"""Most sequences of one request."""


class ScoreRows:
    """Encodes the sequences of requests to a reward model."""

    def __init__(self, path: str, vocabulary: int, most_tokens: int) -> None:
        """
        Args:
            path: directory with the tokenizer.
            vocabulary: token ids are below this.
            most_tokens: tokens of the longest sequence.

        Raises:
            ValueError: the directory has no tokenizer, or one without EOS.
        """
        self._tokenizer = load_tokenizer(path)
        self._vocabulary, self._most_tokens = vocabulary, most_tokens
        if self._tokenizer.eos_token_id is None:
            raise ValueError(
                f"model = {path!r}: its tokenizer has no EOS token, which ends a complete sequence;"
                " set one there"
            )
        self._end: int = self._tokenizer.eos_token_id
        self._chat_end = chat_end_token(self._tokenizer)
        self._special = tuple(special_tokens(self._tokenizer))
        self._longest_token = max(map(len, self._tokenizer.get_vocab()))

    @cached_property
    def tokenizer_hash(self) -> str:
        """Hash of the tokenizer (`asyncrl.text.tokenizer.tokenizer_hash`)."""
        return tokenizer_hash(self._tokenizer)

    def rows(
        self, prompts: object, completions: object, complete: object, token_ids: object
    ) -> list[list[int]]:
        """The token ids of each sequence.

        Args:
            prompts: texts, with the special tokens that the model saw.
            completions: texts, one for each prompt. A special token in them is ordinary text.
            complete: whether each completion ended by itself. The end of turn of the chat template
                follows it if the prompt has one, else EOS. None = all did.
            token_ids: whole sequences, instead of the other three.

        Raises:
            InvalidRequestError: one line with the argument and the fix.
        """
        rows = (
            self._encoded(prompts, completions, complete)
            if token_ids is None
            else self._checked(token_ids, (prompts, completions, complete))
        )
        for number, row in enumerate(rows):
            if not row:
                raise InvalidRequestError(f"sequence {number} has no token; leave it out")
            if max(row) >= self._vocabulary:
                raise InvalidRequestError(
                    f"sequence {number} has the token id {max(row)}, and the model's ids are below"
                    f" {self._vocabulary}; leave out that special token"
                )
            if len(row) > self._most_tokens:
                raise InvalidRequestError(
                    f"sequence {number} has {len(row):,} tokens, above max_tokens ="
                    f" {self._most_tokens:,}; shorten it"
                )
        return rows

    def _encoded(self, prompts: object, completions: object, complete: object) -> list[list[int]]:
        if not are_texts(prompts) or not are_texts(completions):
            raise InvalidRequestError(
                "prompts and completions are not two lists of texts; send both, or token_ids"
            )
        ended = [True] * len(completions) if complete is None else complete
        if not isinstance(ended, list) or not all(isinstance(value, bool) for value in ended):
            raise InvalidRequestError("complete is not a list of true and false; send one")
        if not len(prompts) == len(completions) == len(ended):
            raise InvalidRequestError(
                f"there are {len(prompts)} prompts, {len(completions)} completions and"
                f" {len(ended)} values of complete; send the same number of each"
            )
        _refuse_many(len(prompts))
        self._refuse_long(prompts, completions)
        if not prompts:  # a tokenizer refuses an empty list
            return []
        starts = [self._prompt_ids(prompt) for prompt in prompts]
        # The policy wrote the completions, and may spell a special token in ordinary ones.
        rests = self._tokenizer(completions, add_special_tokens=False, split_special_tokens=True)[
            "input_ids"
        ]
        return [
            [*start, *(self._ended(start, rest) if whole else rest)]
            for start, rest, whole in zip(starts, rests, ended, strict=True)
        ]

    def _prompt_ids(self, prompt: str) -> list[int]:
        """The tokens of a prompt. One that a chat template has rendered begins with a special
        token, and gets no BOS: the policy saw none before it."""
        (ids,), _ = encode_prompts(self._tokenizer, [prompt], prompt.startswith(self._special))
        return ids

    def _ended(self, prompt: Sequence[int], completion: list[int]) -> list[int]:
        """A completion with exactly one end. A chat's prompt contains the ends of earlier turns."""
        chat_end = self._chat_end
        end = self._end if chat_end is None or chat_end not in prompt else chat_end
        return completion if completion[-1:] == [end] else [*completion, end]

    def _refuse_long(self, prompts: Sequence[str], completions: Sequence[str]) -> None:
        """Refuse a text that is too long for any sequence, before its tokenization takes much
        memory."""
        most = self._most_tokens * self._longest_token
        for number, texts in enumerate(zip(prompts, completions, strict=True)):
            if (length := sum(map(len, texts))) > most:
                raise InvalidRequestError(
                    f"sequence {number} has {length:,} characters, above the {most:,} that"
                    f" max_tokens = {self._most_tokens:,} can represent; shorten it"
                )

    def _checked(self, token_ids: object, others: Sequence[object]) -> list[list[int]]:
        if any(other is not None for other in others):
            raise InvalidRequestError(
                "token_ids are whole sequences; leave out prompts, completions and complete"
            )
        if not isinstance(token_ids, list) or not all(isinstance(row, list) for row in token_ids):
            raise InvalidRequestError("token_ids is not a list of lists of token ids; send one")
        _refuse_many(len(token_ids))
        for number, row in enumerate(token_ids):
            if not all(type(token) is int and 0 <= token < self._vocabulary for token in row):
                raise InvalidRequestError(
                    f"sequence {number} of token_ids has a value that is no token id below"
                    f" {self._vocabulary}; correct it"
                )
        return token_ids


def are_texts(value: object) -> TypeGuard[list[str]]:
    """Whether the value is a list of texts that a tokenizer accepts."""
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        return False
    try:
        for text in value:
            text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _refuse_many(rows: int) -> None:
    if rows > MOST_ROWS:
        raise InvalidRequestError(
            f"there are {rows:,} sequences, above {MOST_ROWS:,}; send several requests"
        )
