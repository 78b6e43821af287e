"""Token ids and masks of texts and chats.

A chat's mask marks what the model writes: by the template's `{% generation %}` tags, or else by a
proof. For each turn of the assistant, the tokens before it, with the start of the turn, must be
the first tokens of the whole chat. So must the tokens up to its end. A template that strips the
thinking of earlier turns fails this proof, and the row is malformed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from asyncrl.data.form_rows import Chat, MalformedError, Text
from asyncrl.text.chat_messages import Message, MessagesError
from asyncrl.text.round_trip import Coverage
from asyncrl.text.row_chats import RowChat, RowChats, render
from asyncrl.text.row_messages import UnusedError
from asyncrl.text.stops import chat_end_token
from asyncrl.text.template import marked_messages, marks_turns
from asyncrl.text.tokenizer import decode, decode_prompt, encode_continuations, encode_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Target = Literal["all", "completion", "turns", "completion turns"]
"""The tokens to train: all; those after the prompt; the assistant's turns; or its turns after the
prompt."""
CHARACTERS_AT_ONCE = 1 << 20
"""Characters that are encoded at a time. A fast tokenizer takes about 200 bytes for each token."""
YES = ("", True)
"""Stands for the mark of a turn without one."""
SHOWN = 6
"""Tokens that a message shows where two texts differ."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """One sequence of T tokens."""

    ids: np.ndarray
    """[T] int32."""
    mask: np.ndarray
    """[T] bool: the tokens to train."""
    prompt: int
    """Number of tokens before the completion; 0 without a prompt."""


@dataclass(frozen=True, slots=True)
class _Rendered:
    """The texts of a chat that the proof needs."""

    whole: str
    spans: list[tuple[int, int]] | None
    """Ranges of characters between generation tags; None without tags."""
    prompt: str
    """The prompt with the start of the assistant's turn; empty without a prompt."""
    turns: list[tuple[int, str, str]]
    """For each turn: its message, the text before what the model writes, and the text up to its
    end."""
    started: bool = False
    """Whether the prompt ends within a turn."""

    @property
    def prefixes(self) -> Iterable[str]:
        """All texts that must be the beginning of the whole."""
        yield from filter(None, [self.prompt])
        for _, before, after in self.turns:
            yield before
            yield after

    @property
    def size(self) -> int:
        """Characters of all texts."""
        return len(self.whole) + sum(map(len, self.prefixes))


@dataclass
class Encoder:
    """Encodes the sides of rows, and counts what it met."""

    tokenizer: PreTrainedTokenizerBase
    counts: dict[str, int] = field(default_factory=dict)
    """Number of rows with each of: `tags`, `proof` (chats by the way their mask was found),
    `end_added` (the tags leave the end of the turn out), `apart` (tokens would merge across the
    end of a prompt), `own_bos` (texts that begin with BOS), `started` (chats whose prompt ends
    within a turn), `marked` (chats with a turn that its
    row marks as not trained)."""
    coverage: Coverage = field(init=False)
    """What the tokenizer makes of the texts."""
    dropped: Counter[str] | None = None
    """Counts the keys of chats that do not reach the text. None: they are refused."""
    variables: Mapping[str, object] = field(default_factory=dict)
    """The settings' variables of the template."""

    def __post_init__(self) -> None:
        self.coverage = Coverage(self.tokenizer, self.tokenizer.name_or_path)

    @functools.cached_property
    def _chats(self) -> RowChats:
        return RowChats(self.tokenizer)

    def texts(self, texts: Sequence[Text], target: Target) -> list[Tokens]:
        """Encode texts. BOS comes first if the tokenizer adds it, and EOS ends each text, both
        once.

        A prompt keeps the tokens that it has alone, since generation starts from them.
        """
        sizes = [2 * len(text.prompt or "") + len(text.completion) for text in texts]
        return [
            tokens for part in _parts(sizes) for tokens in self._some_texts(texts[part], target)
        ]

    def _some_texts(self, texts: Sequence[Text], target: Target) -> Iterator[Tokens]:
        whole_texts = [(text.prompt or "") + text.completion for text in texts]
        wholes = self._ended(whole_texts)
        self.coverage.add(whole_texts, wholes)
        prompts, _ = encode_prompts(self.tokenizer, [text.prompt or "" for text in texts])
        for text, whole, prompt in zip(texts, wholes, prompts, strict=True):
            if text.prompt is None:
                yield _tokens(whole, 0, target)
            elif whole[: len(prompt)] == prompt:
                yield _tokens(whole, len(prompt), target)
            else:
                self._count("apart")
                yield _tokens(prompt + self._apart(text.completion), len(prompt), target)

    def _ended(self, texts: Sequence[str]) -> list[list[int]]:
        ids, own_bos = encode_prompts(self.tokenizer, texts)
        self._count("own_bos", own_bos)
        return [self._with_end(tokens) for tokens in ids]

    def _apart(self, completion: str) -> list[int]:
        """A completion as if it had been generated, token by token, after its prompt."""
        return self._with_end(encode_continuations(self.tokenizer, [completion])[0])

    def _with_end(self, ids: list[int]) -> list[int]:
        """The tokens with exactly one EOS at the end."""
        end = self.tokenizer.eos_token_id
        if ids[-2:] == [end, end]:  # the text ends with EOS, and the tokenizer adds another one
            return ids[:-1]
        return ids if ids[-1:] == [end] else [*ids, end]

    def chats(self, chats: Sequence[Chat], target: Target) -> list[Tokens | MalformedError]:
        """Encode chats. A chat whose mask cannot be found is malformed."""
        found: list[Tokens | MalformedError] = []
        waiting: list[_Rendered | MalformedError] = []
        size = 0
        for chat in chats:
            try:
                texts = self._rendered(chat, target)
                waiting.append(texts)
                size += texts.size
            except MalformedError as error:
                waiting.append(error)
            if size >= CHARACTERS_AT_ONCE:
                found += self._some(waiting, target)
                waiting, size = [], 0
        return [*found, *self._some(waiting, target)]

    def _some(
        self, rendered: Sequence[_Rendered | MalformedError], target: Target
    ) -> Iterator[Tokens | MalformedError]:
        whole_texts = [r.whole for r in rendered if isinstance(r, _Rendered)]
        ids, offsets = self._encoded([r for r in rendered if isinstance(r, _Rendered)])
        self.coverage.add(whole_texts, [ids[text] for text in whole_texts])
        for texts in rendered:
            if isinstance(texts, MalformedError):
                yield texts
                continue
            try:
                yield self._marked(texts, ids, offsets, target)
            except MalformedError as error:
                yield error

    def _rendered(self, chat: Chat, target: Target) -> _Rendered:
        """Render a chat, and those of its beginnings that the mask depends on."""
        masked = target in ("turns", "completion turns")
        first = chat.prompt if target == "completion turns" else 0
        written = [
            index for index, message in enumerate(chat.messages) if message["role"] == "assistant"
        ]
        if masked and not any(index >= first for index in written):
            raise MalformedError("no_turn")
        turns = [index for index in written if index >= first and chat.marks.get(index, YES)[1]]
        _check_marks(chat, target, turns if masked else None)
        tagged = masked and self.tokenizer.is_fast and marks_turns(self.tokenizer, chat.tools)
        try:
            chat, whole = self._settled(chat)
            spans = None
            if tagged:
                whole, spans = marked_messages(
                    self.tokenizer, chat.messages, chat.variables, chat.tools
                )
            if spans is not None and chat.marks:
                spans = _spans_of(turns, written, spans)
            begins = chat.messages[chat.prompt]["role"] == "assistant"
            after_prompt = target in ("completion", "completion turns")
            chat = chat if after_prompt else replace(chat, started=None)
            prompt = self._text(chat, chat.prompt, begins) if after_prompt else ""
            proofs = []
            if masked and spans is None:
                proofs = [self._turn(chat, index, whole) for index in turns]
        except UnusedError as error:
            raise MalformedError("unused", str(error)) from None
        except MessagesError as error:
            raise MalformedError("template", str(error)) from None
        if masked:
            self._count("proof" if spans is None else "tags")
            self._count("started", chat.started is not None)
            self._count("marked", any(not trained for _, trained in chat.marks.values()))
        for index in turns if spans is not None else ():
            _refuse_lost_thought(chat.messages[index], index, whole)
        return _Rendered(whole, spans, prompt, proofs, bool(chat.started))

    def _settled(self, chat: Chat) -> tuple[Chat, str]:
        """The chat as the template takes it, and its text."""
        row = RowChat(
            chat.messages, chat.variables, chat.tools, chat.own_tools, chat.own_variables,
            chat.added,
        )  # fmt: skip
        settled, text = self._chats.settled(row, self.dropped)
        return replace(chat, messages=settled.messages), text

    def _turn(self, chat: Chat, index: int, whole: str) -> tuple[int, str, str]:
        if not index:
            raise MalformedError(
                "no_prompt", "it begins with the assistant, so nothing tells where its turn begins"
            )
        last = index + 1 == len(chat.messages)
        after = whole if last else self._text(chat, index + 1, False)
        return index, self._text(chat, index, True), after

    def _text(self, chat: Chat, count: int, generation_prompt: bool) -> str:
        """The first messages as text. With the start of the assistant's turn, as far as the prompt
        contains it."""
        if not count:
            return ""
        messages, continued = chat.messages[:count], False
        if generation_prompt and count == chat.prompt and chat.started:
            inner = chat.messages[count]["content"]
            parts = [{"type": "text", "text": chat.started}]
            turn = {
                **chat.messages[count],
                "content": parts if isinstance(inner, list) else chat.started,
            }
            turn.pop("tool_calls", None)
            messages, continued = [*messages, turn], True
        begins = generation_prompt and not continued
        return render(self.tokenizer, messages, chat.variables, chat.tools, begins, continued)

    def _encoded(
        self, rendered: Sequence[_Rendered]
    ) -> tuple[Mapping[str, list[int]], Mapping[str, list[tuple[int, int]]]]:
        """Token ids of each text, and the characters of each token of the tagged ones."""
        tagged = dict.fromkeys(texts.whole for texts in rendered if texts.spans is not None)
        plain = dict.fromkeys(
            text
            for texts in rendered
            for text in (texts.whole, *texts.prefixes)
            if text not in tagged
        )
        ids: dict[str, list[int]] = {}
        offsets: dict[str, list[tuple[int, int]]] = {}
        if plain:
            ids.update(zip(plain, encode_prompts(self.tokenizer, [*plain], True)[0], strict=True))
        if tagged:
            found = self.tokenizer([*tagged], add_special_tokens=False, return_offsets_mapping=True)
            ids.update(zip(tagged, found["input_ids"], strict=True))
            offsets.update(zip(tagged, found["offset_mapping"], strict=True))
        return ids, offsets

    def _marked(
        self,
        texts: _Rendered,
        ids: Mapping[str, list[int]],
        offsets: Mapping[str, list[tuple[int, int]]],
        target: Target,
    ) -> Tokens:
        whole = ids[texts.whole]
        prompt = len(ids[texts.prompt]) if texts.prompt else 0
        if texts.started and whole[:prompt] != ids[texts.prompt]:
            return self._within_turn(texts, ids[texts.prompt])
        if texts.prompt:
            self._prove(ids[texts.prompt], whole, "not_a_prefix", "its prompt")
        if target in ("all", "completion"):
            return _tokens(whole, prompt, target)
        mask = np.zeros(len(whole), bool)
        if texts.spans is not None:
            self._mark_spans(mask, texts.spans, whole, offsets[texts.whole])
            mask[:prompt] &= target != "completion turns"
            if not mask.any():
                raise MalformedError(
                    "no_turn", "the template's generation tags mark nothing in the completion"
                )
        for index, before, after in texts.turns:
            self._prove(ids[before], whole, "not_a_prefix", f"what precedes message {index}")
            turn = self._without_last_end(ids[after], whole)
            self._prove(turn, whole, "rewritten", f"message {index}")
            mask[len(ids[before]) : len(turn)] = True
        return Tokens(np.array(whole, np.int32), mask, prompt)

    def _within_turn(self, texts: _Rendered, prompt: list[int]) -> Tokens:
        """A chat whose prompt ends within a turn, where tokens would merge. The rest is encoded as
        if it had been generated after the prompt's own tokens."""
        if not texts.whole.startswith(texts.prompt) or len(texts.turns) > 1:
            raise MalformedError(
                "not_a_prefix", "its prompt ends within a turn that the template writes otherwise"
            )
        self._count("apart")
        rest = encode_continuations(self.tokenizer, [texts.whole[len(texts.prompt) :]])[0]
        tokens = _tokens([*prompt, *rest], len(prompt), "completion")
        return tokens if texts.spans is None else self.until_end(tokens)

    def _mark_spans(
        self,
        mask: np.ndarray,
        spans: Sequence[tuple[int, int]],
        ids: Sequence[int],
        offsets: Sequence[tuple[int, int]],
    ) -> None:
        """Mark the tokens with a character between generation tags, and the end of the turn that
        follows."""
        starts, ends = np.array(offsets, np.int64).T if len(offsets) else np.zeros((2, 0), np.int64)
        open_ended = []
        for first, last in spans:
            inside = np.flatnonzero((starts < last) & (ends > first))
            # A turn without content is followed by its end, too.
            stop = int(inside[-1]) + 1 if len(inside) else int((starts < last).sum())
            turn = slice(int(inside[0]) if len(inside) else stop, stop)
            mask[turn] = True
            if not set(ids[turn]) & self._ends:
                open_ended.append(stop)
        added = [
            at
            for at in open_ended
            if not mask[at : at + 1].any() and {*ids[at : at + 1]} & self._ends
        ]
        mask[added] = True
        self._count("end_added", bool(added))

    def until_end(self, tokens: Tokens) -> Tokens:
        """A chat without targets after the end of its last turn. A policy's own completions lack
        the line end or EOS that some templates write there."""
        if self._turn_end is None:
            return tokens
        ends = np.flatnonzero((tokens.ids == self._turn_end) & tokens.mask)
        after = int(ends[-1]) + 1 if len(ends) else len(tokens.ids)
        if decode(self.tokenizer, tokens.ids[after:].tolist()).strip():
            return tokens  # the template writes no end of the last turn
        return replace(tokens, mask=tokens.mask & (np.arange(len(tokens.ids)) < after))

    @functools.cached_property
    def _ends(self) -> set[int | None]:
        """Tokens that end a turn."""
        return {self.tokenizer.eos_token_id, self._turn_end}

    @functools.cached_property
    def _turn_end(self) -> int | None:
        return chat_end_token(self.tokenizer, self.variables)

    def _without_last_end(self, part: list[int], whole: Sequence[int]) -> list[int]:
        """A beginning of a chat without the EOS with which some templates end every chat."""
        if len(part) > len(whole) or part[-1:] != [self.tokenizer.eos_token_id]:
            return part
        return part if whole[len(part) - 1] == part[-1] else part[:-1]

    def _prove(self, part: Sequence[int], whole: Sequence[int], reason: str, what: str) -> None:
        """Raise MalformedError unless the tokens of a part are the first tokens of the whole."""
        if whole[: len(part)] == part:
            return
        at = next(
            (index for index, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b),
            min(len(part), len(whole)),
        )
        alone, there = (
            decode_prompt(self.tokenizer, ids[at : at + SHOWN]) for ids in (part, whole)
        )
        raise MalformedError(
            reason,
            f"{what} is rendered as {alone!r} alone, but as {there!r} in the whole chat (token"
            f" {at})",
        )

    def _count(self, name: str, number: int = 1) -> None:
        if number:
            self.counts[name] = self.counts.get(name, 0) + number


def _check_marks(chat: Chat, target: Target, turns: Sequence[int] | None) -> None:
    """Refuse marks that the target cannot keep.

    Args:
        turns: indices of the messages that are trained; None: every token of the target is.

    Raises:
        MalformedError: there is such a mark, or no turn is left.
    """
    for index, (key, wanted) in chat.marks.items():
        trained = target == "all" or index >= chat.prompt if turns is None else index in turns
        if trained != wanted:
            role = chat.messages[index]["role"]
            way = (
                "remove the mark, or set data.loss_on: assistant"
                if turns is None or role == "assistant"
                else "remove the mark: only turns of the assistant can be trained"
            )
            raise MalformedError(
                "marks",
                f"message {index} ({role}) is marked as {'' if wanted else 'not '}trained by"
                f" {key!r}, and it is{'' if trained else ' not'}; {way}",
            )
    if turns is not None and not turns:
        raise MalformedError("no_turn", "its marks leave no turn to train")


def _refuse_lost_thought(message: Message, index: int, whole: str) -> None:
    """Refuse a tagged turn whose text has reasoning that the template leaves out. Without tags, the
    proof of the turn finds it."""
    thought, closed, _ = str(message["content"]).rpartition("</think>")
    if closed and thought.split("<think>")[-1].strip() not in whole:
        raise MalformedError(
            "rewritten", f"the template leaves out the reasoning in the text of message {index}"
        )


def _spans_of(
    turns: Sequence[int], written: Sequence[int], spans: Sequence[tuple[int, int]]
) -> list[tuple[int, int]] | None:
    """The ranges of the turns that are trained. None: it is not clear which range belongs to which
    turn.

    Args:
        written: indices of all turns of the assistant.
    """
    if len(spans) != len(written):
        return None
    return [span for index, span in zip(written, spans, strict=True) if index in turns]


def _tokens(ids: Sequence[int], prompt: int, target: Target) -> Tokens:
    mask = np.ones(len(ids), bool)
    if target != "all":
        mask[:prompt] = False
    return Tokens(np.array(ids, np.int32), mask, prompt)


def _parts(sizes: Sequence[int]) -> Iterator[slice]:
    """Slices of items with these sizes, each with CHARACTERS_AT_ONCE, or with one item."""
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > CHARACTERS_AT_ONCE:
            yield slice(start, index)
            start, total = index, 0
        total += size
    yield slice(start, len(sizes))
