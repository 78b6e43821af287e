"""What ends a completion."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from asyncrl.generation.engine import text_before
from asyncrl.generation.stops import chat_end_token, load_stop_set, stop_set


@pytest.fixture
def tokenizer(tiny_model: Path) -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(tiny_model)


def test_union_with_sources(tokenizer: AutoTokenizer, tiny_model: Path) -> None:
    assert load_stop_set(tiny_model, tokenizer) == {2: ("generation config", "tokenizer EOS")}
    newline = tokenizer.convert_tokens_to_ids("\n")
    assert stop_set(tokenizer, [1, 2], ["\n"], [5, newline]) == {
        1: ("generation config",),
        2: ("generation config", "tokenizer EOS"),
        5: ("rollout_stop_token_ids",),
        newline: (r"rollout_stop '\n'", "rollout_stop_token_ids"),
    }


def test_chat_end_token(tokenizer: AutoTokenizer) -> None:
    assert chat_end_token(tokenizer) is None
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}"
    assert stop_set(tokenizer, [])[chat_end_token(tokenizer)] == ("chat end token",)


def test_what_cannot_stop(tokenizer: AutoTokenizer) -> None:
    with pytest.raises(ValueError, match="rollout_stop 'ab' is 2 tokens"):
        stop_set(tokenizer, [], ["ab"])
    with pytest.raises(ValueError, match="'Ä' is 1 tokens"):
        stop_set(tokenizer, [], ["Ä"])
    with pytest.raises(ValueError, match=r"id 999 .* outside the vocabulary"):
        stop_set(tokenizer, [], [], [999])


def test_a_text_ends_before_the_first_stop_string() -> None:
    assert text_before("1+2=3\nab", ["ab", "\n", "x"]) == "1+2=3"
    assert text_before("1+2=3", ["x"]) == text_before("1+2=3", []) == "1+2=3"
