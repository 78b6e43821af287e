"""Which tokens end a completion, and why. Shown at launch, since a missing stop token only shows up as answers that never end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["chat_end_token", "load_stop_set", "stop_set"]


def load_stop_set(
    model: str | Path, tokenizer: Any, rollout_stop: Sequence[str] = (), rollout_stop_token_ids: Sequence[int] = ()
) -> dict[int, tuple[str, ...]]:
    """`stop_set` with the EOS ids of the checkpoint's generation_config.json, if it has one."""
    path = Path(model) / "generation_config.json"
    eos = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return stop_set(tokenizer, eos_ids, rollout_stop, rollout_stop_token_ids)


def stop_set(
    tokenizer: Any, generation_eos: Sequence[int], rollout_stop: Sequence[str] = (), rollout_stop_token_ids: Sequence[int] = ()
) -> dict[int, tuple[str, ...]]:
    """Stop token id → the sources that name it, in order of id.

    Raises:
        ValueError: a stop string is not exactly one token, or an id is outside the vocabulary.
    """
    found: list[tuple[int | None, str]] = [(token, "generation config") for token in generation_eos]
    found += [(tokenizer.eos_token_id, "tokenizer EOS"), (chat_end_token(tokenizer), "chat end token")]
    found += [(_single_token(tokenizer, text), f"rollout_stop {text!r}") for text in rollout_stop]
    found += [(token, "rollout_stop_token_ids") for token in rollout_stop_token_ids]
    sources: dict[int, tuple[str, ...]] = {}
    for token, source in sorted((t, s) for t, s in found if t is not None):
        if not 0 <= token < len(tokenizer):
            raise ValueError(f"stop token id {token} ({source}) is outside the vocabulary of {len(tokenizer)} tokens; remove it")
        sources[token] = (*sources.get(token, ()), source)
    return sources


def chat_end_token(tokenizer: Any) -> int | None:
    """The special token that ends an assistant's turn in the chat template; None without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    marker = "x"
    turns = [{"role": "user", "content": marker}, {"role": "assistant", "content": marker}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    tail = tokenizer.encode(text[text.rindex(marker) + len(marker) :], add_special_tokens=False)
    return next((token for token in tail if token in tokenizer.all_special_ids), None)


def _single_token(tokenizer: Any, text: str) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        raise ValueError(f"rollout.rollout_stop {text!r} is {len(ids)} tokens ({list(ids)}) of this tokenizer; each must be one known token")
    return int(ids[0])
