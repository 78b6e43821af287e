"""The memory estimate of `asyncrl plan`, from headers only, by DeepSpeed's own formula."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil
import pytest
import torch
from recorded import learner_config
from transformers import AutoModelForCausalLM

from asyncrl.config import Config
from asyncrl.models.micro_batches import micro_batch, token_example
from asyncrl.models.policy import checkpoint_activations, load_policy
from asyncrl.preflight.resources.memory_estimate import (
    estimate,
    limit_text,
    memory_text,
    parameter_counts,
)
from benchmarks.families import VOCABULARY, family


@pytest.mark.parametrize("model", ["tiny_model", "untied_model"])
def test_counts_from_headers_equal_deepspeeds_counts_of_the_model(
    model: str, request: pytest.FixtureRequest
) -> None:
    from deepspeed.runtime.zero.stage3 import model_to_params

    path = request.getfixturevalue(model)
    needs = estimate(learner_config(path))
    assert (needs.parameters, needs.largest_layer) == model_to_params(
        AutoModelForCausalLM.from_pretrained(path)
    )


def test_largest_layer_is_that_of_one_module() -> None:
    assert parameter_counts(
        {"a.weight": (3, 4), "a.bias": (4,), "a.b.weight": (15,), "norm": (2,)}
    ) == (33, 16)


def test_offload_moves_states_to_the_host_and_ranks_share_them(tiny_model: Path) -> None:
    one = estimate(learner_config(tiny_model))
    layer = 4 * one.largest_layer
    assert (one.on_device, one.on_host) == (layer + 18 * one.parameters, int(1.5 * layer))
    two = estimate(learner_config(tiny_model, world_size=2))
    assert two.on_device == layer + 9 * two.parameters
    optimizer = estimate(learner_config(tiny_model, world_size=2, offload_optimizer="cpu"))
    assert (optimizer.on_device, optimizer.on_host) == (
        layer + two.parameters,
        int(1.5 * 16 * two.parameters) // 2,
    )
    both = estimate(learner_config(tiny_model, offload_optimizer="cpu", offload_param="cpu"))
    assert (both.on_device, both.on_host) == (layer, int(1.5 * 18 * one.parameters))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("offload", [(), ("optimizer",), ("optimizer", "param")])
def test_the_formula_is_deepspeeds(tiny_model: Path, ranks: int, offload: tuple[str, ...]) -> None:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    settings = {f"offload_{states}": "cpu" for states in offload}
    needs = estimate(learner_config(tiny_model, world_size=ranks, **settings))
    host, device, _ = estimate_zero3_model_states_mem_needs(
        needs.parameters,
        needs.largest_layer,
        num_gpus_per_node=ranks,
        cpu_offload="optimizer" in offload,
        cpu_offload_params="param" in offload,
    )
    assert (needs.on_device, needs.on_host) == (device, host // ranks)


def test_a_stage_that_keeps_weights_whole_takes_more_memory_on_several_ranks(
    tiny_model: Path,
) -> None:
    by_stage = {
        stage: estimate(learner_config(tiny_model, world_size=4, zero_stage=stage))
        for stage in (1, 2, 3)
    }
    each = by_stage[3].parameters
    assert by_stage[1].on_device == each * 4 + each * 12 // 4 + each * 4 + each * 4 // 4
    assert by_stage[2].on_device == each * 4 + each * 12 // 4 + each * 4 + each * 8 // 4
    assert by_stage[1].on_host == by_stage[2].on_host == 0
    assert by_stage[3].other_stages == {stage: by_stage[stage].on_device for stage in (1, 2)}
    text = memory_text(learner_config(tiny_model, world_size=4))
    assert "zero_stage 3, offload" in text and "learner.zero_stage: 1 would take" in text
    assert "DeepSpeed's own estimate" not in memory_text(learner_config(tiny_model, zero_stage=2))


def test_the_plan_names_only_stages_that_the_settings_allow(tiny_model: Path) -> None:
    assert list(estimate(learner_config(tiny_model, bf16=True)).other_stages) == [2]
    offloaded = learner_config(tiny_model, offload_optimizer="cpu")
    assert not estimate(offloaded).other_stages
    assert "learner.zero_stage:" not in memory_text(offloaded)


def test_publishing_needs_two_buckets_of_at_least_the_largest_parameter(
    tiny_model: Path,
) -> None:
    config = learner_config(tiny_model)
    assert estimate(config).buckets == 2 * max(
        config.weights.bucket_bytes, 4 * estimate(config).largest_layer
    )
    large = config.model_copy(
        update={"weights": config.weights.model_copy(update={"bucket_bytes": 1 << 40})}
    )
    assert estimate(large).buckets == 2 * 4 * estimate(config).parameters, (
        "a bucket is no larger than the version"
    )


def test_log_probs_need_four_chunks_and_two_gradients_of_the_head(untied_model: Path) -> None:
    head = AutoModelForCausalLM.from_pretrained(untied_model).lm_head.weight
    few, many = (
        learner_config(untied_model, max_tokens=64),
        learner_config(untied_model, max_tokens=1 << 24),
    )
    assert estimate(few).logits == 4 * (4 * 64 * len(head) + 2 * head.numel())
    assert estimate(many).logits == 4 * (4 * ((224 << 20) // 16) + 2 * head.numel())


def test_the_text_names_excluded_memory_and_this_machine(tiny_model: Path) -> None:
    text = memory_text(learner_config(tiny_model, world_size=2))
    assert f"{psutil.virtual_memory().total / 2**30:.2f} GiB of memory" in text
    needs = estimate(learner_config(tiny_model, world_size=2))
    assert needs.activations > needs.other_activations > 0 and "saves nothing" not in text
    assert "  activations of 128 tokens" in text and "  total, without libraries" in text
    less = (
        f"with gradient_checkpointing: true they would take {needs.other_activations / 2**20:.1f}"
    )
    assert less in text
    assert ("no GPU" in text) != torch.cuda.is_available()
    offloaded = memory_text(
        learner_config(tiny_model, gradient_checkpointing=True, offload_optimizer="cpu")
    )
    assert (
        "with gradient_checkpointing: false they would take" in offloaded
        and "offloading saves nothing with learner.device: cpu" in offloaded
    )


@pytest.mark.parametrize(
    "checkpointing",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["kept", "computed again"],
)
def test_attention_scores_are_estimated_at_their_peak(tmp_path: Path, checkpointing: bool) -> None:
    """Gemma 2 uses eager attention. Compares the resident memory of a trajectory's forward and
    backward pass with the estimate."""
    tokens = 1700
    path = family("gemma2").save(tmp_path, max_position_embeddings=4096, num_attention_heads=4)
    config = learner_config(path, max_tokens=tokens, gradient_checkpointing=checkpointing)
    lengths = {"max_prompt_length": 100}, {"max_completion_length": tokens - 100}
    config = Config.model_validate(
        config.model_dump()
        | {
            "data": config.data.model_dump() | lengths[0],
            "rollout": config.rollout.model_dump() | lengths[1],
        }
    )
    needed = estimate(config).scores
    assert needed == 4 * 4 * tokens**2 * (
        2 * (1 if checkpointing else 2) + 3
    ) and "tokens squared" in memory_text(config)
    policy = load_policy(str(path), torch.float32, 1.0)
    if checkpointing:
        checkpoint_activations(policy)
    batch = micro_batch(
        [token_example(([5], [7 + at % 200 for at in range(tokens - 1)]))], [0], "cpu"
    )
    process, highest, done = psutil.Process(), [0], threading.Event()
    before = process.memory_info().rss

    def watch() -> None:
        while not done.wait(0.002):
            highest[0] = max(highest[0], process.memory_info().rss - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    policy(batch)[0].sum().backward()
    done.set()
    watcher.join()
    assert 0.6 * needed < highest[0] < 1.25 * needed


def test_models_that_store_no_scores_need_none(tiny_model: Path, tmp_path: Path) -> None:
    assert estimate(learner_config(tiny_model)).scores == 0
    assert estimate(learner_config(family("qwen3_next").save(tmp_path / "hybrid"))).scores == 0
    assert "tokens squared" not in memory_text(learner_config(tiny_model))


@pytest.mark.parametrize("name", ["gpt2", "mamba2"])
def test_older_names_of_sizes_are_read(tmp_path: Path, name: str) -> None:
    """GPT-2 has n_embd, and a Mamba has no attention heads."""
    needs = estimate(learner_config(family(name).save(tmp_path / name)))
    assert needs.logits > 4 * 2 * VOCABULARY * 64


def test_a_limit_on_gpu_memory_is_compared_with_the_estimate() -> None:
    gpus = {"0: large": 80 << 30, "1: small": 40 << 30}
    assert limit_text(1.0, 1, gpus) == ""
    assert limit_text(0.5, 1, {}).endswith(
        "may allocate 0.5 of its GPU (learner.gpu_memory_utilization)"
    )
    assert limit_text(0.5, 20 << 30, gpus).endswith(", 20.00 GiB here")
    assert "20.00 GiB here, less than this total: raise it" in limit_text(0.5, 21 << 30, gpus)


def test_the_share_of_a_rank_is_compared_with_the_estimate(tiny_model: Path) -> None:
    shares = learner_config(tiny_model, device="cuda").model_copy(update={"placement": "share"})
    assert "a rank may allocate 0.5 of its GPU" in memory_text(shares)


def test_second_copies_of_the_weights_are_counted(tiny_model: Path) -> None:
    plain, second = (
        estimate(learner_config(tiny_model, world_size=4, zero_hpz_partition_size=size))
        for size in (1, 2)
    )
    assert second.on_device == plain.on_device + plain.parameters * 4 // 2
