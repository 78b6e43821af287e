"""What ends a completion, and why. `asyncrl plan` shows it, since a missing stop only shows up as
answers that never end.

A completion ends at a stop token, or as soon as its text holds a stop string. All tokens that were
sampled stay in it, with their log-probs, and are trained on: those that spell a stop string as
well, so that the policy learns to write it. The text, which rewards read, goes up to the stop
string.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.text.tokenizer import decode, special_tokens

__all__ = ["Stops", "chat_end_token", "load_stops", "make_stops", "special_token", "text_before"]

MARKER = "x"
"""Stands before a stop string, whose first space a tokenizer would drop at a text's beginning."""
ANSWER = "42, of course"
"""Stands for an assistant's turn: in no template's own text."""


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends a completion. The engine holds it for every request: rollouts, evaluation and HTTP
    alike."""

    tokens: dict[int, tuple[str, ...]]
    """Stop token id → the sources that name it, in order of id."""
    strings: tuple[str, ...] = ()
    """Stop strings: looked for in the text, however many tokens spell them."""


def load_stops(
    model: str | Path,
    tokenizer: Any,
    rollout_stop: Sequence[str] = (),
    rollout_stop_token_ids: Sequence[int] = (),
) -> Stops:
    """`make_stops` with the EOS ids of the checkpoint's generation_config.json, if it has one."""
    path = Path(model) / "generation_config.json"
    eos = _eos_of(path) if path.exists() else None
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in eos_ids):
        raise ValueError(f"{path} has eos_token_id = {eos!r}; give a token id, or a list of them")
    return make_stops(tokenizer, eos_ids, rollout_stop, rollout_stop_token_ids)


def _eos_of(path: Path) -> Any:
    try:
        return json.loads(path.read_text()).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no JSON object ({error}); repair it, or remove it") from None


def make_stops(
    tokenizer: Any,
    generation_eos: Sequence[int],
    rollout_stop: Sequence[str] = (),
    rollout_stop_token_ids: Sequence[int] = (),
) -> Stops:
    """The stop tokens of model and settings, and the stop strings. A string that is one special
    token becomes that token, since no text shows it.

    Raises:
        ValueError: a stop string is empty, one that the tokenizer cannot write, or holds a special
            token among others; or an id is outside the vocabulary.
    """
    special = {text: special_token(tokenizer, text) for text in dict.fromkeys(rollout_stop)}
    for text, token in special.items():
        if token is None:
            _refuse_unseen(tokenizer, text)
    found: list[tuple[int | None, str]] = [(token, "generation config") for token in generation_eos]
    found += [
        (tokenizer.eos_token_id, "tokenizer EOS"),
        (chat_end_token(tokenizer), "chat end token"),
    ]
    found += [(token, f"rollout_stop {text!r}") for text, token in special.items()]
    found += [(token, "rollout_stop_token_ids") for token in rollout_stop_token_ids]
    sources: dict[int, tuple[str, ...]] = {}
    for token, source in sorted((t, s) for t, s in found if t is not None):
        if not 0 <= token < len(tokenizer):
            raise ValueError(
                f"stop token id {token} ({source}) is outside the vocabulary of {len(tokenizer)}"
                " tokens; remove it"
            )
        sources[token] = (*sources.get(token, ()), source)
    return Stops(sources, tuple(text for text, token in special.items() if token is None))


def chat_end_token(tokenizer: Any) -> int | None:
    """The special token that ends an assistant's turn in the chat template; None without a
    template, or if it renders no such turn."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    turns = [{"role": "user", "content": ANSWER}, {"role": "assistant", "content": ANSWER}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # one that wants more than two turns have: whatever its expressions raise
        return None
    _, found, tail = text.rpartition(ANSWER)
    ids = tokenizer.encode(tail, add_special_tokens=False) if found else []
    special = set(special_tokens(tokenizer).values())
    return next((token for token in ids if token in special), None)


def text_before(text: str, strings: Sequence[str]) -> str:
    """The text up to the first of the stop strings; the whole of it without one."""
    return text[
        : min((place for one in strings if (place := text.find(one)) >= 0), default=len(text))
    ]


def special_token(tokenizer: Any, text: str) -> int | None:
    """The special token that a stop string is; None for any other string. A text shows no special
    token, so this one has to end a completion itself."""
    token = special_tokens(tokenizer).get(text)
    return None if token == tokenizer.unk_token_id else token


def _refuse_unseen(tokenizer: Any, text: str) -> None:
    if not text:
        raise ValueError(
            "rollout.rollout_stop holds an empty string, which would stop at once; remove it"
        )
    if text not in decode(tokenizer, tokenizer.encode(MARKER + text, add_special_tokens=False)):
        tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))
        raise ValueError(
            f"rollout.rollout_stop {text!r} never shows in a text of this tokenizer (its tokens:"
            f" {tokens}); name a special token alone, or another string"
        )
