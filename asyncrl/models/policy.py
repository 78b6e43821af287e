"""The policy that ZeRO-3 trains: a Hugging Face causal LM whose forward gives log-probs of chosen
tokens instead of logits of all."""

from __future__ import annotations

from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.algorithms.logprobs import (
    PLAIN_HEAD,
    HeadSettings,
    LogitMap,
    chunk_elements,
    greedy_tokens,
    token_logprobs,
)
from asyncrl.config import LearnerConfig
from asyncrl.models.attention import Segments, register_attention
from asyncrl.models.micro_batches import MicroBatch
from asyncrl.models.supported import (
    NO_SHARES,
    WAY_OUT,
    Packing,
    caps_attention,
    chosen_packing,
    logit_change,
)
from asyncrl.models.ulysses import SequenceGroup

__all__ = ["Policy", "checkpoint_activations", "head_settings", "load_policy"]


class Policy(nn.Module):
    """Backbone and head of a causal LM. The head's weight is used here and not in its own module:
    gathered once for each micro-batch, whatever the number of chunks, so that ranks never wait for
    each other inside the head. In a sequence group each rank computes for its share of the row, and
    all have the whole row's results, with the gradient of their own share.

    With `packing: none` a micro-batch holds one trajectory at most, and the model attends as
    transformers made it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float,
        entropy_gradient: bool = False,
        values: bool = False,
        sequence_group: SequenceGroup | None = None,
        packing: Packing = "rows",
        head: HeadSettings = PLAIN_HEAD,
    ) -> None:
        super().__init__()
        self.model = model
        self.value_head = _value_head(model) if values else None
        """Beside the model, so that it is neither published nor exported."""
        self.temperature, self.entropy_gradient, self.sequence_group, self.packing = (
            temperature,
            entropy_gradient,
            sequence_group,
            packing,
        )
        self.head = head
        # Llama 4's text model has the prefix of its multimodal sibling.
        self.backbone_name = (
            model.base_model_prefix if hasattr(model, model.base_model_prefix) else "model"
        )
        self.logit_map = LogitMap(*logit_change(model.config.to_dict()))
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode, whatever `mode` is: the log-probs that are trained must be those that
        generators and checks compute. Dropout, noise in a router and layers left out at random are
        not part of the policy."""
        return super().train(False)

    def forward(
        self,
        batch: MicroBatch,
        temperature: float | None = None,
        greedy: bool = False,
        plain: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probs [N] with gradient, entropy [N], with gradient if `entropy_gradient`, values
        [N] of the value head, or nothing) of the batch's targets; with `greedy`, (is the target the
        argmax [N] bool, nothing, nothing); with `plain`, (log-probs [N] as transformers computes
        them for a batch of one trajectory, nothing, nothing)."""
        if plain:
            logprobs = self._plain(batch, temperature or self.temperature)
            return logprobs, logprobs.new_zeros(0), logprobs.new_zeros(0)
        group = self.sequence_group
        if group is None:
            return self._forward(batch, temperature, greedy)
        batch = batch.at_least(group.size)
        share, first = batch.share(*group.bounds(batch.input_ids.shape[1]))
        found = self._forward(share, temperature, greedy)
        if greedy:
            matches = group.whole([found[0].float()], first, len(batch.targets))[0].bool()
            return matches, found[1], found[2]
        if self.value_head is None:
            logprobs, entropy = group.whole(found[:2], first, len(batch.targets))
            return logprobs, entropy, found[2]
        logprobs, entropy, values = group.whole(found, first, len(batch.targets))
        return logprobs, entropy, values

    def _forward(
        self, batch: MicroBatch, temperature: float | None, greedy: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same for the tokens that this rank has of the row."""
        output = self._hidden_states(batch)
        hidden = output[0, batch.select]
        scored, weight, bias = self._of_head(hidden)
        chosen: dict[str, Any] = {
            "chunk_elements": self.head.chunk_elements,
            "logit_map": self.logit_map,
        }
        if greedy:
            return (
                greedy_tokens(scored, weight, bias, **chosen) == batch.targets,
                hidden.new_zeros(0),
                hidden.new_zeros(0),
            )
        logprobs, entropy = token_logprobs(
            scored,
            weight,
            batch.targets,
            temperature or self.temperature,
            bias,
            entropy_gradient=self.entropy_gradient,
            **chosen,
        )
        if not len(batch.targets):
            # An empty micro-batch, or a share without loss tokens, must still reach every parameter
            # in the backward pass: its gradients take part in the reductions.
            logprobs = logprobs + 0.0 * output.sum()
        if self.value_head is None:
            return logprobs, entropy, hidden.new_zeros(0)
        values = self.value_head(hidden)[:, 0].float()
        # A step that has no use for the values (a supervised one) reaches the head's parameters all
        # the same, as every rank must.
        return logprobs + 0.0 * values, entropy, values

    def _of_head(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states [N, H] and the head's weight and bias, in the type that the logits are
        computed in."""
        head = self.model.get_output_embeddings()
        if not self.head.fp32:
            return hidden, head.weight, head.bias
        return hidden.float(), head.weight.float(), None if head.bias is None else head.bias.float()

    def _hidden_states(self, batch: MicroBatch) -> Tensor:
        """The last layer's output [1, T, H]."""
        backbone = getattr(self.model, self.backbone_name)
        if self.packing == "none":
            if len(batch.segments.lengths) > 1:
                raise ValueError(
                    "learner.packing: none takes one trajectory a forward, not"
                    f" {len(batch.segments.lengths)}; give each one alone"
                )
            hidden: Tensor = backbone(input_ids=batch.input_ids, use_cache=False).last_hidden_state
            return hidden
        batch.segments.attended.clear()
        output = backbone(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            segments=batch.segments,
            sequence_group=self.sequence_group,
        )
        _check_attended(self.model, batch.segments)
        found: Tensor = output.last_hidden_state
        return found

    def _plain(self, batch: MicroBatch, temperature: float) -> Tensor:
        """Log-probs [N] by the whole model as transformers has it, in its eager attention, for a
        batch of one trajectory."""
        chosen = self.model.config._attn_implementation
        if eager := self.model._can_set_attn_implementation():
            self.model.set_attn_implementation("eager")
        try:
            logits = self.model(input_ids=batch.input_ids, use_cache=False).logits[0, batch.select]
        finally:
            if eager:
                self.model.set_attn_implementation(chosen)
        logprobs: Tensor = (logits.float() / temperature).log_softmax(-1)
        return logprobs.gather(-1, batch.targets[:, None])[:, 0]


def _value_head(model: PreTrainedModel) -> nn.Linear:
    """A linear map from a hidden state to its value, 0 at first."""
    head = nn.Linear(model.config.get_text_config().hidden_size, 1, dtype=model.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def head_settings(config: LearnerConfig) -> HeadSettings:
    """How a policy of this learner computes log-probs."""
    return HeadSettings(chunk_elements(config.logprob_bytes), config.cast_lm_head_to_fp32)


def load_policy(
    path: str,
    dtype: torch.dtype,
    temperature: float,
    entropy_gradient: bool = False,
    values: bool = False,
    sequence_group: SequenceGroup | None = None,
    packing: Packing | None = None,
    head: HeadSettings = PLAIN_HEAD,
) -> Policy:
    """Load a checkpoint directory; sharded as it loads while an HfDeepSpeedConfig is alive.

    Args:
        packing: how it is to be trained; None = on packed rows if that is possible.

    Raises:
        ValueError: the model cannot be trained so, or its log-probs would be wrong.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    tree = config.to_dict()
    try:
        chosen = chosen_packing(tree, packing)
    except ValueError as error:
        raise ValueError(f"model.path = {path!r}: {error}") from None
    if sequence_group is not None and chosen == "none":
        raise ValueError(f"model.path = {path!r}: {NO_SHARES.format(size=sequence_group.size)}")
    safe = {"trust_remote_code": False, "use_safetensors": True}
    own = "eager" if caps_attention(tree) else None
    attention = register_attention() if chosen == "rows" else own
    model = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=dtype, attn_implementation=attention, **safe
    )
    if chosen == "rows" and (model._is_stateful or not model._supports_attention_backend):
        raise ValueError(
            f"model.path = {path!r}: {type(model).__name__} carries a state or an attention of its"
            f" own along the row; {WAY_OUT}"
        )
    return Policy(model, temperature, entropy_gradient, values, sequence_group, chosen, head)


def _check_attended(model: PreTrainedModel, segments: Segments) -> None:
    """Raise ValueError unless every layer attended once within the segments: what went another way
    saw the whole row."""
    layers, calls = model.config.get_text_config().num_hidden_layers, segments.attended
    if not len(calls) == len(set(calls)) == layers:
        raise ValueError(
            f"{type(model).__name__} has {layers} layers, of which {len(set(calls))} attended"
            f" within segments ({len(calls)} times), so packed trajectories would leak into one"
            f" another; {WAY_OUT}"
        )


def checkpoint_activations(policy: Policy) -> None:
    """Keep only each layer's input and compute the layer again in the backward pass. transformers
    does so in train mode alone, where a policy never is.

    Raises:
        ValueError: transformers names no layers of this model that can be computed again.
    """
    found = {
        name: module
        for name, module in policy.model.named_modules()
        if isinstance(module, GradientCheckpointingLayer)
    }
    layers = [
        module
        for name, module in found.items()
        if not any(name.startswith(f"{other}.") for other in found)
    ]
    if not layers or not policy.model.supports_gradient_checkpointing:
        raise ValueError(
            "learner.gradient_checkpointing: true is not possible with"
            f" {type(policy.model).__name__}; set it to false"
        )
    for layer in layers:
        # The reentrant kind passes no keyword tensors, and needs an input with a gradient: the
        # embeddings of token ids have none.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
