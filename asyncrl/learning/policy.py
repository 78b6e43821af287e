"""The policy that ZeRO-3 trains: a Hugging Face causal LM whose forward gives log-probs of chosen tokens instead of logits of all."""

from __future__ import annotations

from functools import partial
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.algorithms.logprobs import greedy_tokens, token_logprobs
from asyncrl.learning.attention import Segments, register_attention
from asyncrl.learning.batches import MicroBatch
from asyncrl.learning.supported import WAY_OUT, refusal
from asyncrl.learning.ulysses import SequenceGroup

__all__ = ["Policy", "checkpoint_activations", "load_policy"]


class Policy(nn.Module):
    """Backbone and head of a causal LM. The head's weight is used here and not in its own module: gathered once for each micro-batch,
    whatever the number of chunks, so that ranks never wait for each other inside the head. In a sequence group each rank computes for its share
    of the row, and all have the whole row's results, with the gradient of their own share."""

    def __init__(
        self, model: PreTrainedModel, temperature: float, entropy_gradient: bool = False, values: bool = False, sequence_group: SequenceGroup | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.value_head = _value_head(model) if values else None
        """Beside the model, so that it is neither published nor exported."""
        self.temperature, self.entropy_gradient, self.sequence_group = temperature, entropy_gradient, sequence_group
        self.backbone_name = model.base_model_prefix
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode, whatever `mode` is: the log-probs that are trained must be those that generators and checks compute. Dropout, noise in a
        router and layers left out at random are not part of the policy."""
        return super().train(False)

    def forward(self, batch: MicroBatch, temperature: float | None = None, greedy: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probs [N] with gradient, entropy [N], with gradient if `entropy_gradient`, values [N] of the value head, or nothing) of the batch's
        targets; with `greedy`, (is the target the argmax [N] bool, nothing, nothing)."""
        group = self.sequence_group
        if group is None:
            return self._forward(batch, temperature, greedy)
        batch = batch.at_least(group.size)
        share, first = batch.share(*group.bounds(batch.input_ids.shape[1]))
        found = self._forward(share, temperature, greedy)
        if greedy:
            return group.whole([found[0].float()], first, len(batch.targets))[0].bool(), *found[1:]
        if self.value_head is None:
            return *group.whole(found[:2], first, len(batch.targets)), found[2]
        return tuple(group.whole(found, first, len(batch.targets)))

    def _forward(self, batch: MicroBatch, temperature: float | None, greedy: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The same for the tokens that this rank has of the row."""
        backbone = getattr(self.model, self.backbone_name)
        batch.segments.attended.clear()
        output = backbone(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, segments=batch.segments, sequence_group=self.sequence_group
        )
        _check_attended(self.model, batch.segments)
        hidden = output.last_hidden_state[0, batch.select]
        head = self.model.get_output_embeddings()
        if greedy:
            return greedy_tokens(hidden, head.weight, head.bias) == batch.targets, hidden.new_zeros(0), hidden.new_zeros(0)
        logprobs, entropy = token_logprobs(
            hidden, head.weight, batch.targets, temperature or self.temperature, head.bias, entropy_gradient=self.entropy_gradient
        )
        if not len(batch.targets):
            # An empty micro-batch, or a share without loss tokens, must still reach every parameter in the backward pass: its gradients take
            # part in the reductions.
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


def load_policy(
    path: str,
    dtype: torch.dtype,
    temperature: float,
    entropy_gradient: bool = False,
    values: bool = False,
    sequence_group: SequenceGroup | None = None,
) -> Policy:
    """Load a checkpoint directory; sharded as it loads while an HfDeepSpeedConfig is alive.

    Raises:
        ValueError: packed trajectories could not be kept apart in the model, or its log-probs would be wrong.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    if reason := refusal(config.to_dict()):
        raise ValueError(f"model.path = {path!r}: {reason}")
    safe = {"trust_remote_code": False, "use_safetensors": True}
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, attn_implementation=register_attention(), **safe)
    if model._is_stateful or not model._supports_attention_backend:
        raise ValueError(f"model.path = {path!r}: {type(model).__name__} carries a state or an attention of its own along the row; {WAY_OUT}")
    return Policy(model, temperature, entropy_gradient, values, sequence_group)


def _check_attended(model: PreTrainedModel, segments: Segments) -> None:
    """Raise ValueError unless every layer attended once within the segments: what went another way saw the whole row."""
    layers, calls = model.config.get_text_config().num_hidden_layers, segments.attended
    if not len(calls) == len(set(calls)) == layers:
        raise ValueError(
            f"{type(model).__name__} has {layers} layers, of which {len(set(calls))} attended within segments ({len(calls)} times), so packed trajectories "
            f"would leak into one another; {WAY_OUT}"
        )


def checkpoint_activations(policy: Policy) -> None:
    """Keep only each layer's input and compute the layer again in the backward pass. transformers does so in train mode alone, where a policy never is.

    Raises:
        ValueError: transformers names no layers of this model that can be computed again.
    """
    found = {name: module for name, module in policy.model.named_modules() if isinstance(module, GradientCheckpointingLayer)}
    layers = [module for name, module in found.items() if not any(name.startswith(f"{other}.") for other in found)]
    if not layers or not policy.model.supports_gradient_checkpointing:
        raise ValueError(f"learner.gradient_checkpointing: true is not possible with {type(policy.model).__name__}; set it to false")
    for layer in layers:
        # The reentrant kind passes no keyword tensors, and needs an input with a gradient: the embeddings of token ids have none.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
