"""What the learner's memory settings do under real ZeRO-3, on ranks that are plain processes: the
same gradients, and nothing left of a skipped step."""

from __future__ import annotations

import math
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_ranks import on_ranks
from recorded import learner_config

from asyncrl.config import LearnerConfig
from asyncrl.learning import zero3
from asyncrl.preflight.specs import learner_spec

ROWS = [(tuple(range(3, 6 + index)), tuple(range(8, 11 + 6 * index))) for index in range(6)]
"""Of very different lengths: two ranks have different numbers of loss tokens in each micro-batch.
"""

VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "checkpointed": {"gradient_checkpointing": True},
    "chunked": {"logprob_memory_bytes": 250 * 4 * 7},
    "offload": {"offload_optimizer": "cpu", "offload_param": "cpu"},
    "bf16": {"bf16": True},
    "bf16 offload": {
        "bf16": True,
        "cast_lm_head_to_fp32": True,
        "offload_optimizer": "cpu",
        "offload_param": "cpu",
        "gradient_checkpointing": True,
    },
}
TINY_RATE, TINY_STEPS = 1.6e-5, 25


def test_settings_say_what_is_offloaded_and_that_gradients_add_up_in_fp32() -> None:
    plain = zero3.settings(LearnerConfig(bf16=True))
    assert (
        plain["data_types"] == {"grad_accum_dtype": "fp32"}
        and plain["communication_data_type"] == "fp32"
    )
    assert not [name for name in plain["zero_optimization"] if name.startswith("offload")]
    for device in ("cpu", "cuda"):
        chosen = zero3.settings(
            LearnerConfig(device=device, offload_optimizer="cpu", offload_param="cpu")
        )["zero_optimization"]
        assert (
            chosen["offload_optimizer"]
            == chosen["offload_param"]
            == {
                "device": "cpu",
                "pin_memory": device == "cuda",
            }
        )
        assert chosen["stage3_param_persistence_threshold"] == 4_096, (
            "what is never released would never go back to the host"
        )
    kept = {
        size: zero3.settings(LearnerConfig(world_size=size))["zero_optimization"][
            "stage3_param_persistence_threshold"
        ]
        for size in (1, 2)
    }
    assert kept == {1: zero3.EVERYTHING, 2: 4_096}
    assert (
        "offload_param"
        not in zero3.settings(LearnerConfig(offload_optimizer="cpu"))["zero_optimization"]
    )


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, marks=pytest.mark.slow), 2],
    ids=["one rank", "two ranks"],
)
def found(
    request: pytest.FixtureRequest, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, SimpleNamespace]]:
    """By rank: variant → what was seen."""
    return on_ranks(request.param, all_variants, model_path, tmp_path_factory.mktemp("snapshots"))


@pytest.mark.parametrize("variant", ["checkpointed", "chunked", "offload"])
def test_gradients_are_the_same_to_one_in_a_million(
    found: list[dict[str, SimpleNamespace]], variant: str
) -> None:
    for rank in found:
        expected, seen = rank["fp32"].gradients, rank[variant].gradients
        assert seen.shape == expected.shape and float(expected.abs().max()) > 0.1
        torch.testing.assert_close(seen, expected, rtol=1e-6, atol=1e-6)
    assert found[0][variant].recomputed == (variant == "checkpointed")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_bad_step_is_skipped_before_the_engines_step_and_leaves_nothing(
    found: list[dict[str, SimpleNamespace]], variant: str
) -> None:
    for rank in found:
        seen = rank[variant]
        assert seen.summed_in == torch.float32, "gradients of all ranks"
        assert seen.skipped == {
            "nonfinite_loss": (0.0, 0),
            "nonfinite_gradient": (0.0, 0),
        }, "(applied, calls of the engine's step)"
        assert seen.unchanged
        assert (
            seen.after_skip == pytest.approx(seen.after_restore, rel=1e-6)
            and seen.after_restore[0] > 0.01
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_published_weights_are_the_masters_rounded(
    found: list[dict[str, SimpleNamespace]], variant: str
) -> None:
    assert all(rank[variant].master_types == {torch.float32} for rank in found)
    assert found[0][variant].published_equal_masters and found[0][variant].published == 2 * 24


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_fresh_optimizer_has_no_memory(
    found: list[dict[str, SimpleNamespace]], variant: str
) -> None:
    assert all(rank[variant].optimizer_steps == (0, 1) for rank in found)


@pytest.mark.parametrize("variant", ["bf16", "bf16 offload"])
def test_updates_below_bfloat16s_resolution_add_up(
    found: list[dict[str, SimpleNamespace]], variant: str
) -> None:
    """A weight of 0.2 has neighbors 0.0005 away in bfloat16: a step of 1.6e-5 moves hardly any of
    them there, and 25 move the masters all the way."""
    seen = found[0][variant]
    assert seen.moved_by_one_step < 0.1 < 0.4 < seen.moved_by_all_steps
    assert seen.masters_moved > 0.5 * TINY_STEPS * TINY_RATE


def all_variants(
    rank: int, world_size: int, path: Path, folder: Path
) -> dict[str, SimpleNamespace]:
    return {
        name: one_variant(rank, world_size, path, folder / name.replace(" ", "_"), name)
        for name in VARIANTS
    }


def one_variant(rank: int, world_size: int, path: Path, folder: Path, name: str) -> SimpleNamespace:
    from asyncrl.learning import supervised_step
    from asyncrl.learning.rank import LearnerRank
    from asyncrl.learning.state import load_state

    config = learner_config(path, world_size=world_size, max_tokens=64, **VARIANTS[name])
    learner = LearnerRank(load_state(rank, learner_spec(config)), "run", 1)
    seen = SimpleNamespace(summed_in=learner.state.engine.optimizer.communication_data_type)

    taken: list[torch.Tensor] = []
    finite, step, calls = zero3.gradients_finite, learner.state.engine.step, []

    def watched(engine: Any) -> bool:
        taken.append(
            torch.cat([shard.detach().flatten().clone() for shard in zero3.gradient_shards(engine)])
        )
        return finite(engine)

    def counted() -> None:
        calls.append(1)
        step()

    learner.state.engine.step = counted
    zero3.gradients_finite = watched
    forwards: list[int] = []
    layer = zero3.policy_of(learner.state.engine).model.model.layers[0].mlp
    hook = layer.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        metrics = learner.supervised_step(ROWS)
    finally:
        zero3.gradients_finite = finite
        hook.remove()
    seen.gradients, seen.recomputed = (
        taken[0],
        len(forwards) == 2 * metrics["micro_batches"] / world_size,
    )
    assert metrics["micro_batches"] / world_size >= 2, "gradients add up over micro-batches"

    learner.save(folder)
    before = [parameter.ds_tensor.clone() for parameter in learner.state.parameters.values()]
    seen.skipped = {}
    for kind in ("nonfinite_loss", "nonfinite_gradient"):
        calls.clear()
        supervised_loss = supervised_step.supervised_loss
        supervised_step.supervised_loss = partial(poisoned, supervised_loss, kind, rank == 0)
        try:
            metrics = learner.supervised_step(ROWS)
        finally:
            supervised_step.supervised_loss = supervised_loss
        seen.skipped[kind] = (metrics["applied"], len(calls))
        assert all(
            bool(torch.isfinite(shard).all())
            for shard in zero3.gradient_shards(learner.state.engine)
        ), "a gradient of the skipped step is left"
    seen.unchanged = all(
        torch.equal(old, parameter.ds_tensor)
        for old, parameter in zip(before, learner.state.parameters.values(), strict=True)
    )
    seen.after_skip = [
        learner.supervised_step(ROWS)[key] for key in ("grad_norm", "loss") for _ in range(2)
    ]
    decay = learner.state.engine.optimizer.param_groups[0]["weight_decay"]
    learner.state.engine.optimizer.param_groups[0]["weight_decay"] = decay + 0.125
    learner.load(folder)
    assert learner.state.engine.optimizer.param_groups[0]["weight_decay"] == decay + 0.125, (
        "the optimizer's settings are this run's, not the checkpoint's"
    )
    learner.state.engine.optimizer.param_groups[0]["weight_decay"] = decay
    seen.after_restore = [
        learner.supervised_step(ROWS)[key] for key in ("grad_norm", "loss") for _ in range(2)
    ]

    masters = [
        torch.cat(
            [
                group.detach().flatten()
                for group in learner.state.engine.optimizer.fp32_partitioned_groups_flat
            ]
        )
    ]
    seen.master_types = {
        group.dtype for group in learner.state.engine.optimizer.fp32_partitioned_groups_flat
    }
    seen.published, seen.published_equal_masters = compare_published(learner, config.learner.bf16)

    state = learner.state.engine.optimizer.optimizer.state
    learner.reset_optimizer(TINY_RATE)
    fresh = len(state)
    weights = [
        torch.cat(
            [parameter.ds_tensor.flatten() for parameter in learner.state.parameters.values()]
        )
    ]
    for number in range(TINY_STEPS if config.learner.bf16 else 1):
        learner.supervised_step(ROWS)
        if number == 0:
            seen.optimizer_steps = (fresh, int(next(iter(state.values()))["step"]))
            weights.append(
                torch.cat(
                    [
                        parameter.ds_tensor.flatten()
                        for parameter in learner.state.parameters.values()
                    ]
                )
            )
    weights.append(
        torch.cat(
            [parameter.ds_tensor.flatten() for parameter in learner.state.parameters.values()]
        )
    )
    masters.append(
        torch.cat(
            [
                group.detach().flatten()
                for group in learner.state.engine.optimizer.fp32_partitioned_groups_flat
            ]
        )
    )
    seen.moved_by_one_step, seen.moved_by_all_steps = (
        float((later != weights[0]).float().mean()) for later in weights[1:]
    )
    seen.masters_moved = float((masters[1] - masters[0]).abs().median())
    learner.state.engine.destroy()
    return seen


def poisoned(
    loss_of: Any, kind: str, here: bool, logprobs: torch.Tensor, weights: torch.Tensor
) -> Any:
    """On one rank alone: a loss that is NaN, or one that is finite and has a gradient of NaN (0
    times the infinite slope of a root at 0)."""
    loss, sums = loss_of(logprobs, weights)
    if not here:
        return loss, sums
    if kind == "nonfinite_gradient":
        return loss + (logprobs * 0.0).abs().sqrt().sum(), sums
    return loss_of(logprobs * float("nan"), weights)


def compare_published(learner: Any, bf16: bool) -> tuple[int, bool]:
    """Parameters gathered for publishing in each type, and whether each equals its fp32 masters as
    the learner rounds them, in that type (a collective)."""
    from deepspeed.utils import safe_get_full_fp32_param

    from asyncrl.weights.gather import TORCH_DTYPES, gather_buckets, weight_layout

    held = torch.bfloat16 if bf16 else torch.float32
    published, equal = 0, True
    for dtype in ("float32", "bfloat16"):
        entries, sizes = weight_layout(learner.state.table, dtype, 20_000)
        contents: dict[int, torch.Tensor] = {}
        gather_buckets(
            learner.state.parameters,
            learner.state.table,
            entries,
            sizes,
            learner.state.rank,
            lambda number, content, to=contents: to.update(
                {number: torch.from_numpy(content.copy())}
            ),
        )
        for entry in entries:
            full = safe_get_full_fp32_param(learner.state.parameters[entry.name])
            if learner.state.rank == 0:
                found = (
                    contents[entry.bucket][entry.offset : entry.offset + entry.nbytes]
                    .view(TORCH_DTYPES[dtype])
                    .view(entry.shape)
                )
                equal = equal and torch.equal(found, full.to(held).to(TORCH_DTYPES[dtype]))
                published += 1
    return published, equal


@pytest.mark.slow
def test_no_rank_holds_the_checkpoint_whole_while_it_loads(
    model_path: Path, tmp_path: Path
) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1000,
        hidden_size=640,
        intermediate_size=2560,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=80,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    model.save_pretrained(tmp_path, max_shard_size="30MB")
    del model
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 5 and whole > 200e6
    for rank, (peak, unshared, equal) in enumerate(on_ranks(2, load_watched, model_path, tmp_path)):
        print(
            f"rank {rank}: while it loaded, its own memory rose by {peak / whole:.2f} of the model;"
            f" with pages of the mapped files {unshared / whole:.2f}"
        )
        assert 0.4 * whole < peak < 0.75 * whole
        assert equal
    for file in files:
        file.unlink()


def load_watched(rank: int, world_size: int, small: Path, large: Path) -> tuple[int, int, bool]:
    """(highest rise of anonymous memory, of private memory with mapped files, weights equal the
    checkpoint's) over one sharded load."""
    import deepspeed
    from safetensors import safe_open
    from transformers.integrations import HfDeepSpeedConfig

    from asyncrl.models.policy import load_policy

    sharded = HfDeepSpeedConfig(zero3.settings(LearnerConfig(world_size=world_size)))
    load_policy(str(small), torch.float32, 1.0)  # whatever loading imports is there
    before, seen, done = private(), [(0, 0)], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            seen.append(private())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        policy = load_policy(str(large), torch.float32, 1.0)
    finally:
        done.set()
        watcher.join()
    del sharded
    peak, unshared = (max(sample[at] for sample in seen) - before[at] for at in (0, 1))
    parameters = dict(policy.model.named_parameters())
    names, equal = set(), True
    for file in sorted(large.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (it is no mapping)
                names.add(name)
                with deepspeed.zero.GatheredParameters([parameters[name]]):
                    equal = equal and torch.equal(parameters[name], stored.get_tensor(name))
    return peak, unshared, equal and names == set(parameters)


def private() -> tuple[int, int]:
    """(anonymous, private) bytes of this process. Private are also the pages of a mapped file that
    nobody else maps: the kernel takes those back when it needs room, and they are in the page cache
    whoever reads the file."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines}
    return sizes["Anonymous:"], sizes["Private_Clean:"] + sizes["Private_Dirty:"]


def test_padding_of_a_shard_is_not_looked_at():
    """Five elements over two ranks: the last of the second shard is whatever was there."""
    shards = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, math.nan])]
    own = [
        zero3._own_part(SimpleNamespace(ds_tensor=shard, ds_numel=5), rank).tolist()
        for rank, shard in enumerate(shards)
    ]
    assert own == [[1.0, 2.0, 3.0], [4.0, 5.0]]
    assert (
        zero3._own_part(SimpleNamespace(ds_tensor=torch.tensor([math.nan]), ds_numel=1), 1).numel()
        == 0
    )
