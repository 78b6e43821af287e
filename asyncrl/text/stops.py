"""Stop tokens and stop strings of a model, with the source of each. `asyncrl plan` prints them,
because a missing stop only shows as completions that never end.

A completion ends at a stop token, or as soon as its text contains a stop string. It keeps all
sampled tokens with their log-probs, and the learner trains on them. That includes the tokens of
the stop string, so the policy learns to write it. Rewards read the text before the stop string.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.text.tokenizer import chat_text, decode, special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Stops", "chat_end_token", "load_stops", "make_stops", "special_token", "text_before"]

MARKER = "x"
"""Put before a stop string, since some tokenizers drop a space at the start of a text."""
ANSWER = "42, of course"
"""Content of a sample assistant turn. No chat template contains this text."""


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends a completion. The engine applies it to every request: rollouts, evaluations and
    HTTP."""

    tokens: dict[int, tuple[str, ...]]
    """Stop token id → the sources that name it, ordered by id."""
    strings: tuple[str, ...] = ()
    """Strings to find in the text, however many tokens they span."""


def load_stops(
    model: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    rollout_stop: Sequence[str] = (),
    rollout_stop_token_ids: Sequence[int] = (),
) -> Stops:
    """`make_stops` with the EOS ids of the checkpoint's generation_config.json, if it has one.

    Raises:
        ValueError: that file is not valid, or as in `make_stops`.
    """
    path = Path(model) / "generation_config.json"
    eos_ids = _eos_ids(path) if path.exists() else []
    return make_stops(tokenizer, eos_ids, rollout_stop, rollout_stop_token_ids)


def _eos_ids(path: Path) -> list[int]:
    try:
        eos: object = json.loads(path.read_text()).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a JSON object ({error}); repair it, or remove it"
        ) from None
    listed = eos if isinstance(eos, list) else [] if eos is None else [eos]
    ids = [token for token in listed if isinstance(token, int) and not isinstance(token, bool)]
    if len(ids) < len(listed):
        raise ValueError(f"{path} has eos_token_id = {eos!r}; give a token id, or a list of them")
    return ids


def make_stops(
    tokenizer: PreTrainedTokenizerBase,
    generation_eos: Sequence[int],
    rollout_stop: Sequence[str] = (),
    rollout_stop_token_ids: Sequence[int] = (),
) -> Stops:
    """Combine the stops of the model and of the settings. A string that is one special token
    becomes a stop token, because decoding drops special tokens.

    Raises:
        ValueError: a token id is outside the vocabulary. Or a stop string is empty, cannot be
            written by the tokenizer, or contains a special token and other text.
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


def chat_end_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that ends an assistant's turn in the chat template. None without a
    template or such a token."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    turns = [{"role": "user", "content": ANSWER}, {"role": "assistant", "content": ANSWER}]
    try:
        text = chat_text(tokenizer, turns)
    except Exception:  # a template may raise anything for these two turns
        return None
    _, found, tail = text.rpartition(ANSWER)
    ids = tokenizer.encode(tail, add_special_tokens=False) if found else []
    special = set(special_tokens(tokenizer).values())
    return next((token for token in ids if token in special), None)


def text_before(text: str, strings: Sequence[str]) -> str:
    """The text before the first stop string, or all of it if there is none."""
    return text[
        : min((place for stop in strings if (place := text.find(stop)) >= 0), default=len(text))
    ]


def special_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """The id of a stop string that is a special token; None for any other string. Decoded text
    never contains a special token, so its id must end the completion."""
    token = special_tokens(tokenizer).get(text)
    return None if token == tokenizer.unk_token_id else token


def _refuse_unseen(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    if not text:
        raise ValueError(
            "rollout.rollout_stop contains an empty string, which would stop at once; remove it"
        )
    if text not in decode(tokenizer, tokenizer.encode(MARKER + text, add_special_tokens=False)):
        tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))
        raise ValueError(
            f"rollout.rollout_stop {text!r} never occurs in text of this tokenizer (its tokens:"
            f" {tokens}); use a special token alone, or another string"
        )
