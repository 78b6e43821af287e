"""Updates of vLLM's own layers on CPU, without an engine: an update renews the weights packed for
their kernels."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

EXPERTS, HIDDEN, WIDTH = 4, 64, 48


class ModelConfig(NamedTuple):
    """What vLLM reads of its `ModelConfig` in an update."""

    dtype: torch.dtype


@contextlib.contextmanager
def single_process_groups() -> Iterator[None]:
    """vLLM's process groups for a single process."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        initialize_model_parallel()
        try:
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def mixture(name: str) -> Any:
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory

    model = torch.nn.Module()
    model.experts = FusedMoEFactory(
        num_experts=EXPERTS,
        top_k=2,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        params_dtype=torch.float32,
        prefix=f"{name}.experts",
    )
    return model


def load(model: Any, seed: int) -> None:
    """Load three tensors for each expert, like a model's `load_weights`."""
    from vllm.model_executor.layers.fused_moe import fused_moe_make_expert_params_mapping

    generator = torch.Generator().manual_seed(seed)
    mapping = fused_moe_make_expert_params_mapping(
        model,
        ckpt_gate_proj_name="gate_proj",
        ckpt_down_proj_name="down_proj",
        ckpt_up_proj_name="up_proj",
        num_experts=EXPERTS,
    )
    parameters = dict(model.named_parameters())
    for weight, name, expert, shard in mapping:
        shape = (HIDDEN, WIDTH) if "down_proj" in name else (WIDTH, HIDDEN)
        parameter = parameters[f"{weight}weight"]
        parameter.weight_loader(
            parameter,
            torch.randn(shape, generator=generator),
            f"{weight}weight",
            shard_id=shard,
            expert_id=expert,
        )


def processed(model: Any) -> None:
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and isinstance(
            getattr(module, "w13_weight", None), torch.nn.Parameter
        ):
            method.process_weights_after_loading(module)


def backend_around(model: Any) -> Any:
    """asyncrl's weight backend for a model, as an engine creates it."""
    from asyncrl.weights.apply import StagedWeights

    made = StagedWeights.__new__(StagedWeights)
    made.model, made.device, made.model_config = model, "cpu", ModelConfig(torch.float32)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_the_head_of_a_vision_model_is_packed_again(tied: bool) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, HIDDEN, generator=generator)
    with single_process_groups():
        model, inner = torch.nn.Module(), torch.nn.Module()
        model.language_model = inner
        inner.embed_tokens = VocabParallelEmbedding(64, HIDDEN, params_dtype=torch.float32)
        inner.lm_head = ParallelLMHead(64, HIDDEN, params_dtype=torch.float32)
        if tied:
            inner.lm_head = inner.lm_head.tie_weights(inner.embed_tokens)
        owners = [inner.embed_tokens] if tied else [inner.embed_tokens, inner.lm_head]
        record_metadata_for_reloading(model)

        def load_new() -> torch.Tensor:
            for owner in owners:
                new = torch.randn(64, HIDDEN, generator=generator)
                owner.weight.weight_loader(owner.weight, new)
            return new

        def logits() -> torch.Tensor:
            return inner.lm_head.quant_method.apply(inner.lm_head, hidden)

        old = load_new()
        for module in (inner.embed_tokens, inner.lm_head):
            module.quant_method.process_weights_after_loading(module)
        torch.testing.assert_close(logits(), hidden @ old.T)
        weights = backend_around(model)
        weights.start_weight_update()
        new = load_new()
        weights.finish_weight_update()
        torch.testing.assert_close(logits(), hidden @ new.T)


@pytest.mark.slow
def test_experts_are_packed_again() -> None:
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    with single_process_groups():
        first, fresh = mixture("first"), mixture("fresh")
        record_metadata_for_reloading(first)
        load(first, seed=1)
        processed(first)
        load(fresh, seed=2)
        processed(fresh)
        held, wanted = (dict(model.named_parameters()) for model in (first, fresh))
        assert any(not torch.equal(held[name], wanted[name]) for name in held)

        weights = backend_around(first)
        weights.start_weight_update()
        load(first, seed=2)
        weights.finish_weight_update()
        for name, parameter in first.named_parameters():
            assert parameter.data_ptr() == held[name].data_ptr() and torch.equal(
                parameter, wanted[name]
            ), name
