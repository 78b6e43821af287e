"""The policy that ZeRO-3 trains: a Hugging Face causal LM whose forward gives log-probs of chosen tokens instead of logits of all."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from asyncrl.algorithms.logprobs import greedy_tokens, token_logprobs
from asyncrl.learning.attention import register_attention
from asyncrl.learning.batches import MicroBatch

__all__ = ["Policy", "load_policy"]

LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings with which a model changes its logits after the head; the log-probs here would miss that."""


class Policy(nn.Module):
    """Backbone and head of a causal LM. The head's weight is used here and not in its own module: gathered once for each micro-batch,
    whatever the number of chunks, so that ranks never wait for each other inside the head."""

    def __init__(self, model: PreTrainedModel, temperature: float, entropy_gradient: bool = False, values: bool = False) -> None:
        super().__init__()
        self.model = model
        self.value_head = _value_head(model) if values else None
        """Beside the model, so that it is neither published nor exported."""
        self.temperature, self.entropy_gradient = temperature, entropy_gradient
        self.backbone_name = model.base_model_prefix

    def forward(self, batch: MicroBatch, temperature: float | None = None, greedy: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probs [N] with gradient, entropy [N], with gradient if `entropy_gradient`, values [N] of the value head, or nothing) of the batch's
        targets; with `greedy`, (is the target the argmax [N] bool, nothing, nothing)."""
        backbone = getattr(self.model, self.backbone_name)
        output = backbone(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, segments=batch.segments)
        hidden = output.last_hidden_state[0, batch.select]
        head = self.model.get_output_embeddings()
        if greedy:
            return greedy_tokens(hidden, head.weight, head.bias) == batch.targets, hidden.new_zeros(0), hidden.new_zeros(0)
        logprobs, entropy = token_logprobs(
            hidden, head.weight, batch.targets, temperature or self.temperature, head.bias, entropy_gradient=self.entropy_gradient
        )
        if not len(batch.targets):
            # An empty micro-batch must still reach every parameter in the backward pass: its gradients take part in the reductions.
            logprobs = logprobs + 0.0 * output.last_hidden_state.sum()
        if self.value_head is None:
            return logprobs, entropy, hidden.new_zeros(0)
        values = self.value_head(hidden)[:, 0].float()
        # A step that has no use for the values (a supervised one) reaches the head's parameters all the same, as every rank must.
        return logprobs + 0.0 * values, entropy, values


def _value_head(model: PreTrainedModel) -> nn.Linear:
    """A linear map from a hidden state to its value, 0 at first."""
    head = nn.Linear(model.config.get_text_config().hidden_size, 1, dtype=model.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def load_policy(path: str, dtype: torch.dtype, temperature: float, entropy_gradient: bool = False, values: bool = False) -> Policy:
    """Load a checkpoint directory; sharded as it loads while an HfDeepSpeedConfig is alive.

    Raises:
        ValueError: the model changes its logits after the head.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    changes = [name for name in LOGIT_CHANGES if getattr(config, name, None) not in (None, 1, 1.0)]
    if changes:
        raise ValueError(
            f"model.path = {path!r} changes its logits after the head ({', '.join(changes)}), which the learner does not compute; use another model"
        )
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, attn_implementation=register_attention(), trust_remote_code=False)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return Policy(model, temperature, entropy_gradient, values)
