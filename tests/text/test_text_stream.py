"""Streamed text: the parts equal the whole text, for several kinds of tokenizers, and never contain
a stop string."""

from __future__ import annotations

from functools import cache
from typing import Any

import llama_checkpoint
from hypothesis import example, given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.text.stops import text_before
from asyncrl.text.streaming import TextStream
from asyncrl.text.tokenizer import decode


@cache
def byte_level() -> Any:
    return llama_checkpoint.tokenizer()


@cache
def with_word_marks() -> Any:
    """A tokenizer like Llama 2's. Each word begins with a mark that decodes to a space, except at
    the start of a text. Other characters are bytes."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁the",
        "▁cat",
        "cat",
        "s",
        "▁sat",
        ".",
        "a",
        "t",
    ]
    unigram = models.Unigram(
        [(piece, -float(len(pieces) - len(piece))) for piece in pieces],
        unk_id=0,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(unigram)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def parts_of(tokenizer: Any, ids: list[int], sizes: list[int], stops: list[str]) -> list[str]:
    stream, parts, start = TextStream(tokenizer, stops), [], 0
    for size in sizes:
        parts.append(stream.add(ids[start : start + size]))
        start += size
    return [*parts, stream.add(ids[start:], last=True)]


SIZES = st.lists(st.integers(0, 4), max_size=60)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.integers(0, 349), max_size=60),
    SIZES,
    st.lists(st.text(st.characters(codec="ascii"), min_size=1, max_size=4), max_size=3),
)
def test_byte_level_tokens(ids: list[int], sizes: list[int], stops: list[str]) -> None:
    whole = text_before(decode(byte_level(), ids), stops)
    assert "".join(parts_of(byte_level(), ids, sizes, stops)) == whole


@settings(deadline=None, max_examples=300)
@given(
    st.text(st.sampled_from("the cats sat. äß日🙂\n"), max_size=40),
    SIZES,
    st.lists(st.sampled_from([".", " sat", "s s", "日🙂"]), max_size=2),
)
@example(" the cat", [1, 1, 1], [])
def test_tokens_with_word_marks(text: str, sizes: list[int], stops: list[str]) -> None:
    ids = with_word_marks().encode(text, add_special_tokens=False)
    assert "".join(parts_of(with_word_marks(), ids, sizes, stops)) == text_before(
        decode(with_word_marks(), ids), stops
    )


def test_text_is_returned_as_early_as_possible() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("ab 日c", add_special_tokens=False)
    parts = parts_of(tokenizer, ids, [1] * len(ids), [])
    assert parts[:2] == ["a", "b"] and "" in parts and "日" in parts and parts[-1] == ""
    stopped = parts_of(
        tokenizer, tokenizer.encode("a<b<e!x", add_special_tokens=False), [1] * 7, ["<e!"]
    )
    assert stopped == [
        "a",
        "",
        "<b",
        "",
        "",
        "",
        "",
        "",
    ], "the possible start of a stop string is held back, and no text follows a stop string"
