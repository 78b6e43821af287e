"""Models that vLLM does not serve as transformers computes them: a run with one would end at its first log-prob check, or before.

What was tried, and how far each differs, is in docs/models.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.config import Config

__all__ = ["NOT_SERVED_ON_CPU", "refusal"]

NOT_SERVED_ON_CPU: Mapping[str, str] = {
    "deepseek_v3": "gives other log-probs for it than transformers (0.7 nats apart at published head sizes; why is not known)",
    "ernie4_5": "turns other pairs of dimensions in its rotary embedding than transformers",
    "ernie4_5_moe": "gives other log-probs for it than transformers (0.5 nats apart; why is not known)",
    "jamba": "has no selective scan",
    "lfm2": "gives other log-probs for the first token of a completion than transformers (0.9 nats apart; why is not known)",
    "minimax_m2": "fails in its normalization of queries and keys",
    "phimoe": "gives other log-probs for it than transformers (0.3 nats apart; why is not known)",
}
"""`model_type` → what vLLM 0.32.0 does on CPU, after "vLLM on CPU". On a GPU none of them has been tried."""


def refusal(tree: Mapping[str, Any], config: Config) -> str | None:
    """Why the generators of a run would not agree with its learner, and the way out, in a sentence; None: nothing is known against it.

    Args:
        tree: the model's config.json.
    """
    text = tree.get("text_config", tree)
    kind, on_cpu = text.get("model_type"), config.generator.device == "cpu"
    if on_cpu and kind in NOT_SERVED_ON_CPU:
        return f"vLLM on CPU {NOT_SERVED_ON_CPU[kind]}; use generator.device: cuda, where nobody has tried it yet, or another model"
    if on_cpu and kind == "qwen3_next" and config.model.dtype == "float32":
        return "vLLM on CPU computes its linear attention in bfloat16 alone; set model.dtype: bfloat16"
    if kind == "apertus" and config.model.dtype == "float32":
        return "vLLM keeps the parameters of its activation (xIELU) in bfloat16, 0.004 nats away from float32; set model.dtype: bfloat16"
    window = text.get("sliding_window")
    if kind == "cohere2" and window and config.longest_trajectory > window:
        return (
            f"vLLM attends to one token more than transformers in its sliding window of {window} tokens, and a trajectory may have "
            f"{config.longest_trajectory}; set data.max_length: {window} or less"
        )
    return None
