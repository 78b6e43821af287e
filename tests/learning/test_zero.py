"""The learner's memory settings under real ZeRO-3, on ranks that are plain processes: the gradients
are the same, and a skipped step leaves no state."""

from __future__ import annotations

import math
import threading
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from plain_ranks import on_ranks
from recorded import learner_config

from asyncrl.config import LearnerConfig
from asyncrl.contracts.offline_rows import token_table
from asyncrl.learning.engine import zero
from asyncrl.preflight.specs import learner_spec

ROWS = [(tuple(range(3, 6 + index)), tuple(range(8, 11 + 6 * index))) for index in range(6)]
"""Rows of very different lengths, so two ranks have different numbers of loss tokens in each
micro-batch."""

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


@pytest.mark.parametrize(("backend", "device"), [("nccl", torch.device("cuda:0")), ("gloo", None)])
def test_nccl_is_told_which_gpu_is_the_ranks(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: torch.device | None
) -> None:
    """Ray shows each rank one GPU only, whatever its number."""
    given: dict[str, Any] = {}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(zero.dist, "TCPStore", lambda *_, **__: "store")
    monkeypatch.setattr(zero.dist, "init_process_group", lambda backend, **rest: given.update(rest))
    monkeypatch.setattr(zero.deepspeed, "init_distributed", lambda **_: None)
    zero.join_process_group(3, 8, "127.0.0.1", 1, backend, None)
    assert given["device_id"] == device and (given["rank"], given["world_size"]) == (3, 8)


def test_settings_offload_as_configured_and_sum_gradients_in_fp32() -> None:
    plain = zero.settings(LearnerConfig(bf16=True))
    assert (
        plain["data_types"] == {"grad_accum_dtype": "fp32"}
        and plain["communication_data_type"] == "fp32"
    )
    assert not [name for name in plain["zero_optimization"] if name.startswith("offload")]
    for device in ("cpu", "cuda"):
        chosen = zero.settings(
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
            "a parameter that is never released would never return to host memory"
        )
    kept = {
        size: zero.settings(LearnerConfig(world_size=size))["zero_optimization"][
            "stage3_param_persistence_threshold"
        ]
        for size in (1, 2)
    }
    assert kept == {1: zero.EVERYTHING, 2: 4_096}
    assert (
        "offload_param"
        not in zero.settings(LearnerConfig(offload_optimizer="cpu"))["zero_optimization"]
    )


class Observed:
    """What a rank sees of a variant."""

    summed_in: torch.dtype
    gradients: torch.Tensor
    recomputed: bool
    skipped: dict[str, tuple[float, int]]
    """What is not finite → (applied, calls of the engine's step)."""
    unchanged: bool
    after_skip: list[float]
    after_restore: list[float]
    master_types: set[torch.dtype]
    published: int
    published_equal_masters: bool
    optimizer_steps: tuple[int, int]
    moved_by_one_step: float
    moved_by_all_steps: float
    masters_moved: float


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, marks=pytest.mark.faults), pytest.param(2, marks=pytest.mark.slow)],
    ids=["one rank", "two ranks"],
)
def found(
    request: pytest.FixtureRequest, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Observed]]:
    """For each rank: variant → observations."""
    return on_ranks(request.param, all_variants, model_path, tmp_path_factory.mktemp("snapshots"))


@pytest.mark.parametrize("variant", ["checkpointed", "chunked", "offload"])
def test_gradients_are_the_same_to_one_in_a_million(
    found: list[dict[str, Observed]], variant: str
) -> None:
    for rank in found:
        expected, observed = rank["fp32"].gradients, rank[variant].gradients
        assert observed.shape == expected.shape and float(expected.abs().max()) > 0.1
        torch.testing.assert_close(observed, expected, rtol=1e-6, atol=1e-6)
    assert found[0][variant].recomputed == (variant == "checkpointed")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_bad_step_is_skipped_before_the_engines_step_and_leaves_no_state(
    found: list[dict[str, Observed]], variant: str
) -> None:
    for rank in found:
        observed = rank[variant]
        assert observed.summed_in == torch.float32, "gradients of all ranks"
        assert observed.skipped == {
            "nonfinite_loss": (0.0, 0),
            "nonfinite_gradient": (0.0, 0),
        }, "(applied, calls of the engine's step)"
        assert observed.unchanged
        assert (
            observed.after_skip == pytest.approx(observed.after_restore, rel=1e-6)
            and observed.after_restore[0] > 0.01
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_published_weights_are_the_masters_rounded(
    found: list[dict[str, Observed]], variant: str
) -> None:
    assert all(rank[variant].master_types == {torch.float32} for rank in found)
    assert found[0][variant].published_equal_masters and found[0][variant].published == 2 * 24


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_fresh_optimizer_has_no_state(found: list[dict[str, Observed]], variant: str) -> None:
    assert all(rank[variant].optimizer_steps == (0, 1) for rank in found)


@pytest.mark.parametrize("variant", ["bf16", "bf16 offload"])
def test_updates_below_bfloat16s_resolution_add_up(
    found: list[dict[str, Observed]], variant: str
) -> None:
    """In bfloat16, the values next to 0.2 are 0.0005 away. A step of 1.6e-5 changes hardly any
    bfloat16 weight, but 25 such steps add up in the fp32 masters."""
    observed = found[0][variant]
    assert observed.moved_by_one_step < 0.1 < 0.4 < observed.moved_by_all_steps
    assert observed.masters_moved > 0.5 * TINY_STEPS * TINY_RATE


def all_variants(rank: int, world_size: int, path: Path, folder: Path) -> dict[str, Observed]:
    return {
        name: one_variant(rank, world_size, path, folder / name.replace(" ", "_"), name)
        for name in VARIANTS
    }


def one_variant(rank: int, world_size: int, path: Path, folder: Path, name: str) -> Observed:
    from asyncrl.learning.engine.state import load_state
    from asyncrl.learning.rank import LearnerRank
    from asyncrl.learning.steps import supervised_step

    config = learner_config(path, world_size=world_size, max_tokens=64, **VARIANTS[name])
    learner = LearnerRank(load_state(rank, learner_spec(config)), "run", 1)
    observed = Observed()
    observed.summed_in = learner.state.engine.optimizer.communication_data_type

    taken: list[torch.Tensor] = []
    finite, step, calls = zero.gradients_finite, learner.state.engine.step, []

    def recording_finite(engine: Any) -> bool:
        taken.append(
            torch.cat([shard.detach().flatten().clone() for shard in zero.gradient_shards(engine)])
        )
        return finite(engine)

    def counting_step() -> None:
        calls.append(1)
        step()

    learner.state.engine.step = counting_step
    zero.gradients_finite = recording_finite
    forwards: list[int] = []
    layer = zero.policy_of(learner.state.engine).model.model.layers[0].mlp
    hook = layer.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        metrics = learner.supervised_step(token_table(ROWS))
    finally:
        zero.gradients_finite = finite
        hook.remove()
    observed.gradients, observed.recomputed = (
        taken[0],
        len(forwards) == 2 * metrics["micro_batches"] / world_size,
    )
    assert metrics["micro_batches"] / world_size >= 2, "gradients add up over micro-batches"

    learner.save(folder)
    before = [parameter.ds_tensor.clone() for parameter in learner.state.parameters.values()]
    observed.skipped = {}
    for kind in ("nonfinite_loss", "nonfinite_gradient"):
        calls.clear()
        supervised_loss = supervised_step.supervised_loss
        supervised_step.supervised_loss = partial(poisoned, supervised_loss, kind, rank == 0)
        try:
            metrics = learner.supervised_step(token_table(ROWS))
        finally:
            supervised_step.supervised_loss = supervised_loss
        observed.skipped[kind] = (metrics["applied"], len(calls))
        assert all(
            bool(torch.isfinite(shard).all())
            for shard in zero.gradient_shards(learner.state.engine)
        ), "a gradient of the skipped step remains"
    observed.unchanged = all(
        torch.equal(old, parameter.ds_tensor)
        for old, parameter in zip(before, learner.state.parameters.values(), strict=True)
    )
    observed.after_skip = [
        learner.supervised_step(token_table(ROWS))[key]
        for key in ("grad_norm", "loss")
        for _ in range(2)
    ]
    decay = learner.state.engine.optimizer.param_groups[0]["weight_decay"]
    learner.state.engine.optimizer.param_groups[0]["weight_decay"] = decay + 0.125
    learner.load(folder)
    assert learner.state.engine.optimizer.param_groups[0]["weight_decay"] == decay + 0.125, (
        "the optimizer's settings are those of this run"
    )
    learner.state.engine.optimizer.param_groups[0]["weight_decay"] = decay
    observed.after_restore = [
        learner.supervised_step(token_table(ROWS))[key]
        for key in ("grad_norm", "loss")
        for _ in range(2)
    ]

    masters = [
        torch.cat(
            [
                group.detach().flatten()
                for group in learner.state.engine.optimizer.fp32_partitioned_groups_flat
            ]
        )
    ]
    observed.master_types = {
        group.dtype for group in learner.state.engine.optimizer.fp32_partitioned_groups_flat
    }
    observed.published, observed.published_equal_masters = compare_published(
        learner, config.learner.bf16
    )

    state = learner.state.engine.optimizer.optimizer.state
    learner.reset_optimizer(TINY_RATE)
    fresh = len(state)
    weights = [
        torch.cat(
            [parameter.ds_tensor.flatten() for parameter in learner.state.parameters.values()]
        )
    ]
    for number in range(TINY_STEPS if config.learner.bf16 else 1):
        learner.supervised_step(token_table(ROWS))
        if number == 0:
            observed.optimizer_steps = (fresh, int(next(iter(state.values()))["step"]))
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
    observed.moved_by_one_step, observed.moved_by_all_steps = (
        float((later != weights[0]).float().mean()) for later in weights[1:]
    )
    observed.masters_moved = float((masters[1] - masters[0]).abs().median())
    learner.state.engine.destroy()
    return observed


def poisoned(
    loss_of: Any, kind: str, here: bool, logprobs: torch.Tensor, weights: torch.Tensor
) -> Any:
    """Make one rank's loss NaN, or its gradient (a root at 0 has an infinite slope, and 0 times
    that is NaN)."""
    loss, sums = loss_of(logprobs, weights)
    if not here:
        return loss, sums
    if kind == "nonfinite_gradient":
        return loss + (logprobs * 0.0).abs().sqrt().sum(), sums
    return loss_of(logprobs * float("nan"), weights)


def compare_published(learner: Any, bf16: bool) -> tuple[int, bool]:
    """Gather all parameters in each dtype (a collective). Returns their number, and whether each
    equals its fp32 master, rounded to the learner's dtype and then to the published one."""
    from deepspeed.utils import safe_get_full_fp32_param

    from asyncrl.weights.gather import TORCH_DTYPES, gather_buckets, weight_layout

    learner_dtype = torch.bfloat16 if bf16 else torch.float32
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
                equal = equal and torch.equal(found, full.to(learner_dtype).to(TORCH_DTYPES[dtype]))
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
    """Load a checkpoint sharded. Returns the largest increase of anonymous memory, that of private
    memory with mapped files, and whether the weights equal the checkpoint's."""
    import deepspeed
    from safetensors import safe_open
    from transformers.integrations import HfDeepSpeedConfig

    from asyncrl.models.policy import load_policy

    sharded = HfDeepSpeedConfig(zero.settings(LearnerConfig(world_size=world_size)))
    load_policy(str(small), torch.float32, 1.0)  # so that all modules are imported
    before, samples, done = private(), [(0, 0)], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            samples.append(private())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        policy = load_policy(str(large), torch.float32, 1.0)
    finally:
        done.set()
        watcher.join()
    del sharded
    peak, unshared = (max(sample[at] for sample in samples) - before[at] for at in (0, 1))
    parameters = dict(policy.model.named_parameters())
    names, equal = set(), True
    for file in sorted(large.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (not a mapping)
                names.add(name)
                with deepspeed.zero.GatheredParameters([parameters[name]]):
                    equal = equal and torch.equal(parameters[name], stored.get_tensor(name))
    return peak, unshared, equal and names == set(parameters)


def private() -> tuple[int, int]:
    """(anonymous, private) bytes of this process. Private memory includes the pages of a mapped
    file that no other process maps. These are in the page cache, and the kernel can reclaim
    them."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines}
    return sizes["Anonymous:"], sizes["Private_Clean:"] + sizes["Private_Dirty:"]


class Shard(NamedTuple):
    """A parameter of which each rank has a part."""

    ds_tensor: torch.Tensor
    ds_numel: int


def test_the_padding_of_a_shard_is_ignored():
    """Five elements over two ranks: the last element of the second shard is uninitialized."""
    shards = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, math.nan])]
    own = [zero._own_part(Shard(shard, 5), rank).tolist() for rank, shard in enumerate(shards)]
    assert own == [[1.0, 2.0, 3.0], [4.0, 5.0]]
    assert zero._own_part(Shard(torch.tensor([math.nan]), 1), 1).numel() == 0
