"""A tiny reward model: a sequence classifier with one label, and its scores by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def save_reward_model(
    directory: Path, like: Path, chat_end: str | None = None, **changes: Any
) -> Path:
    """Write a seeded Qwen3ForSequenceClassification.

    Args:
        like: checkpoint of a Qwen3 with the tokenizer and the shape.
        chat_end: a character that becomes a special token, and ends the turns of a chat template.
        changes: settings of the Qwen3Config.
    """
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification

    config = Qwen3Config.from_pretrained(like, num_labels=1, **changes)
    torch.manual_seed(1)
    model = Qwen3ForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(directory)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(like)
    if chat_end is not None:
        tokenizer.add_special_tokens({"additional_special_tokens": [chat_end]})
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.content }}" + chat_end + "{% endfor %}"
        )
    tokenizer.save_pretrained(directory)
    return directory


def score_of(directory: Path, rows: Sequence[Sequence[int]]) -> list[float]:
    """The score of each row by transformers, one row at a time, so that none is padded. The padding
    token is unset: transformers would look for it in the row."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    model.eval().config.pad_token_id = None
    with torch.inference_mode():
        return [float(model(input_ids=torch.tensor([list(row)])).logits) for row in rows]
