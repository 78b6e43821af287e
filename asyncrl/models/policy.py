"""The policy that ZeRO trains: a Hugging Face causal LM whose forward pass returns log-probs of
chosen tokens."""

from __future__ import annotations

from functools import partial
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.algorithms.logit_chunks import chunk_elements
from asyncrl.algorithms.logprobs import (
    PLAIN_HEAD,
    HeadSettings,
    LogitMap,
    greedy_tokens,
    token_logprobs,
    top_logprobs,
)
from asyncrl.config import LearnerConfig
from asyncrl.models.attention import register_attention
from asyncrl.models.micro_batches import MicroBatch
from asyncrl.models.segments import Segments
from asyncrl.models.supported import (
    NO_SHARES,
    WAY_OUT,
    Packing,
    caps_attention,
    chosen_packing,
    logit_change,
)
from asyncrl.models.ulysses import SequenceRanks


class Policy(nn.Module):
    """Backbone and head of a causal LM.

    The head's weight is used here and not in its own module. So ZeRO-3 gathers it once for each
    micro-batch, whatever the number of chunks, and ranks never wait for each other inside the head.

    In a sequence group, each rank computes its share of the row. Every rank returns the results of
    the whole row, with the gradient of its own share.

    With `packing: none`, a micro-batch has at most one trajectory, and the model uses transformers'
    own attention.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float,
        entropy_gradient: bool = False,
        values: bool = False,
        sequence_group: SequenceRanks | None = None,
        packing: Packing = "rows",
        head: HeadSettings = PLAIN_HEAD,
        value_bias: bool = True,
    ) -> None:
        super().__init__()
        self.model = model
        self.value_head = _value_head(model, value_bias) if values else None
        """Outside the model, so that it is not published or exported."""
        self.temperature, self.entropy_gradient, self.sequence_group, self.packing = (
            temperature,
            entropy_gradient,
            sequence_group,
            packing,
        )
        self.head = head
        # Llama 4's text model has the `base_model_prefix` of the multimodal model.
        self.backbone_name = (
            model.base_model_prefix if hasattr(model, model.base_model_prefix) else "model"
        )
        self.logit_map = LogitMap(*logit_change(model.config.to_dict()))
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode, whatever `mode` is. The trained log-probs must equal those that
        generators and checks compute. Dropout, router noise and randomly skipped layers are not
        part of the policy."""
        return super().train(False)

    def forward(
        self,
        batch: MicroBatch,
        temperature: float | None = None,
        greedy: bool = False,
        plain: bool = False,
        with_entropy: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate the batch's targets.

        Args:
            temperature: default: the policy's own.
            greedy: return whether each target is the most probable token.
            plain: return the log-probs of transformers' own forward pass, for a batch of one
                trajectory.
            with_entropy: false = return an empty tensor instead of entropies. Only without gradient
                and without a sequence group.

        Returns:
            Log-probs [N] with gradient, or [N, 1 + K] if the batch has `teacher_ids`: of each
            target, then of those tokens; entropies [N], with gradient if `entropy_gradient`; values
            [N], or an empty tensor without a value head. With `greedy`, [N] bool and two empty
            tensors. With `plain`, log-probs [N] and two empty tensors.
        """
        if plain:
            logprobs = self._plain(batch, temperature or self.temperature)
            return logprobs, logprobs.new_zeros(0), logprobs.new_zeros(0)
        group = self.sequence_group
        if group is None:
            return self._forward(batch, temperature, greedy, with_entropy)
        batch = batch.at_least(group.size)
        share, chosen = batch.share(*group.bounds(batch.input_ids.shape[1]))
        found = self._forward(share, temperature, greedy)
        if greedy:
            matches = group.whole([found[0].float()], chosen, len(batch.targets))[0].bool()
            return matches, found[1], found[2]
        logprobs, *others = found if self.value_head is not None else found[:2]
        several = logprobs.dim() == 2
        columns = logprobs.unbind(1) if several else [logprobs]
        whole = group.whole([*columns, *others], chosen, len(batch.targets))
        logprobs = torch.stack(whole[: len(columns)], 1) if several else whole[0]
        entropy, *values = whole[len(columns) :]
        return logprobs, entropy, values[0] if values else found[2]

    def _forward(
        self,
        batch: MicroBatch,
        temperature: float | None,
        greedy: bool,
        with_entropy: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate the targets in this rank's share of the row."""
        output = self._hidden_states(batch)
        hidden = output[0, batch.select]
        scored, weight, bias = self._of_head(hidden)
        if greedy:
            likeliest = greedy_tokens(
                scored, weight, bias, self.head.chunk_elements, self.logit_map
            )
            return likeliest == batch.targets, hidden.new_zeros(0), hidden.new_zeros(0)
        targets = batch.targets
        if batch.teacher_ids is not None:
            targets = torch.cat([targets[:, None], batch.teacher_ids], dim=1)
        logprobs, entropy = token_logprobs(
            scored,
            weight,
            targets,
            temperature or self.temperature,
            bias,
            self.head.chunk_elements,
            self.entropy_gradient,
            self.logit_map,
            with_entropy,
        )
        if not len(batch.targets):
            # Without loss tokens, the backward pass must still reach every parameter, because its
            # gradients take part in the reductions.
            logprobs = logprobs + 0.0 * output.sum()
        if self.value_head is None:
            return logprobs, entropy, hidden.new_zeros(0)
        values = self.value_head(hidden)[:, 0].float()
        # A supervised step does not use the values. Its backward pass must still reach the value
        # head's parameters, as on every rank.
        unused = 0.0 * values
        return logprobs + (unused if logprobs.dim() == 1 else unused[:, None]), entropy, values

    @torch.no_grad()
    def top_logprobs(
        self, batch: MicroBatch, top_k: int, vocabulary: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `algorithms.logprobs.top_logprobs` does for the batch's targets, at the
        policy's temperature. Only without a sequence group."""
        scored, weight, bias = self._of_head(self._hidden_states(batch)[0, batch.select])
        return top_logprobs(
            scored,
            weight,
            batch.targets,
            self.temperature,
            top_k,
            vocabulary,
            bias,
            self.head.chunk_elements,
            self.logit_map,
        )

    def _of_head(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the hidden states [N, H] and the head's weight and bias, in the dtype of the
        logits."""
        head = self.model.get_output_embeddings()
        if not self.head.fp32:
            return hidden, head.weight, head.bias
        return hidden.float(), head.weight.float(), None if head.bias is None else head.bias.float()

    def _hidden_states(self, batch: MicroBatch) -> Tensor:
        """Return the last layer's output [1, T, H]."""
        backbone = getattr(self.model, self.backbone_name)
        if self.packing == "none":
            if len(batch.segments.lengths) > 1:
                raise ValueError(
                    "learner.packing: none takes one trajectory in a forward pass, not"
                    f" {len(batch.segments.lengths)}; pass them one at a time"
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
        """Return the log-probs [N] of transformers' own forward pass with eager attention, for a
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


def _value_head(model: PreTrainedModel, bias: bool) -> nn.Linear:
    """Make a linear map from a hidden state to its value. It starts at 0."""
    head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias, dtype=model.dtype)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return head


def head_settings(config: LearnerConfig) -> HeadSettings:
    """Return the settings with which a policy of this learner computes log-probs."""
    return HeadSettings(chunk_elements(config.logprob_bytes), config.cast_lm_head_to_fp32)


def load_policy(
    path: str,
    dtype: torch.dtype,
    temperature: float,
    entropy_gradient: bool = False,
    values: bool = False,
    sequence_group: SequenceRanks | None = None,
    packing: Packing | None = None,
    head: HeadSettings = PLAIN_HEAD,
    value_bias: bool = True,
) -> Policy:
    """Load a checkpoint directory. The weights are sharded while they load if an HfDeepSpeedConfig
    exists.

    Args:
        packing: how to train the model; None = on packed rows if possible.
        value_bias: false = the value head has no bias, as the score of a reward model, which
            transformers' sequence classifiers load.

    Raises:
        ValueError: the model cannot be trained this way, or its log-probs would be wrong.
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
            f"model.path = {path!r}: {type(model).__name__} has a recurrent state or its own"
            f" attention, so packed trajectories would affect one another; {WAY_OUT}"
        )
    return Policy(
        model, temperature, entropy_gradient, values, sequence_group, chosen, head, value_bias
    )


def _check_attended(model: PreTrainedModel, segments: Segments) -> None:
    """Raise ValueError unless every layer attended exactly once within the segments. A layer that
    did not has attended over the whole row."""
    layers, calls = model.config.get_text_config().num_hidden_layers, segments.attended
    if not len(calls) == len(set(calls)) == layers:
        raise ValueError(
            f"{type(model).__name__} has {layers} layers, of which {len(set(calls))} attended"
            f" within segments ({len(calls)} times), so packed trajectories would leak into one"
            f" another; {WAY_OUT}"
        )


def checkpoint_activations(policy: Policy) -> None:
    """Keep only each layer's input, and compute the layer again in the backward pass.

    transformers can do this only in train mode, which a policy never uses.

    Raises:
        ValueError: transformers does not support this for the model.
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
        # The reentrant variant passes no keyword tensors. It also needs an input that requires a
        # gradient, which the embeddings of token ids do not.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
