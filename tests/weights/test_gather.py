"""Memory of the gather, with random models of over 150 MB. A bucket has at most 1/8 of the model,
or the size of its largest parameter."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import ray

from asyncrl.config import Config
from asyncrl.learning.driver import rank_environment
from asyncrl.preflight.specs import learner_spec
from asyncrl.weights.layout import ITEM_BYTES

BUCKET_BYTES = 24 << 20


class Gatherer:
    """A rank in its own process that measures its private memory during a gather."""

    def __init__(self, rank: int, config: Config) -> None:
        from asyncrl.learning.driver import RankProcess

        self.process = RankProcess(rank, learner_spec(config), "run", 1)

    def listen(self) -> int:
        return self.process.listen("127.0.0.1")

    def start(self, port: int) -> None:
        addresses = ["127.0.0.1"] * self.process.spec.learner.world_size
        self.process.start(addresses, port)
        self.rank = self.process.rank

    def greedy(self) -> None:
        """Make `gather` collect all parameters before it fills the first bucket: the wrong way,
        which the test must detect."""
        import deepspeed

        import asyncrl.learning.rank as rank_module

        bounded = rank_module.gather_buckets

        def all_at_once(parameters: dict[str, Any], *arguments: Any) -> None:
            with deepspeed.zero.GatheredParameters(list(parameters.values())):
                bounded(parameters, *arguments)

        rank_module.gather_buckets = all_at_once

    def rise(self, version: int) -> tuple[int, int]:
        """(largest increase of private memory, bytes published) during one gather."""
        before, highest, done = private_bytes(), [0], threading.Event()

        def watch() -> None:
            while not done.wait(0.001):
                highest[0] = max(highest[0], private_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            manifest = self.rank.gather(version)
        finally:
            done.set()
            watcher.join()
        return highest[0] - before, sum(manifest.sizes) if manifest is not None else 0


def private_bytes() -> int:
    """Anonymous resident memory of this process, without shared memory."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )
    return int(line.split()[1]) * 1024


def save_model(path: Path, vocabulary: int) -> Path:
    """A Qwen3 with 54 M parameters, plus 640 for each token of the vocabulary."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=640,
        intermediate_size=2560,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=80,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def save_mixture(path: Path, vocabulary: int) -> Path:
    """A Qwen3-MoE with 48 M parameters. A layer's experts are one parameter in the learner, larger
    than two buckets."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=640,
        intermediate_size=1280,
        moe_intermediate_size=640,
        num_hidden_layers=2,
        num_experts=18,
        num_experts_per_tok=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=80,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    model = Qwen3MoeForCausalLM(config)
    assert 4 * model.model.layers[0].mlp.experts.gate_up_proj.numel() > 2 * BUCKET_BYTES
    model.save_pretrained(path)
    return path


CASES = {
    "one rank": (1, "float32", 1000, save_model),
    "two ranks": (2, "float32", 1000, save_model),
    "two ranks, a parameter of two buckets, published in half of the learner's bytes": (
        2,
        "bfloat16",
        40_000,
        save_model,
    ),
    "two ranks, split experts": (2, "float32", 1000, save_mixture),
}


SHORTER = ("two ranks, split experts",)
"""Cases of `make test-all`; `make faults` runs the others."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SHORTER else pytest.mark.faults)
        for name in CASES
    ],
)
def test_private_memory_rises_by_at_most_two_buckets(
    ray_cluster: Any, tmp_path: Path, case: str
) -> None:
    world_size, dtype, vocabulary, save = CASES[case]
    bucket = max(BUCKET_BYTES, 640 * vocabulary * ITEM_BYTES[dtype])
    assert (bucket > 2 * BUCKET_BYTES) == (vocabulary == 40_000)
    config = Config.model_validate(
        {
            "name": "gather-test",
            "max_steps": 1,
            "model": {"path": str(save(tmp_path, vocabulary)), "dtype": dtype},
            "data": {"train": "none.parquet", "max_prompt_length": 32},
            "rollout": {"max_completion_length": 32},
            "reward": {"functions": {"none": {"function": "none:none"}}},
            "weights": {"bucket_bytes": BUCKET_BYTES},
            "learner": {"world_size": world_size},
        }
    )
    # Blocks of 64 KiB and more get their own mapping, which ends when they are freed, so resident
    # memory is memory in use. Otherwise the result depends on which free pages glibc reuses.
    environment = {
        **rank_environment(learner_spec(config)),
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "MALLOC_MMAP_MAX_": "1000000",
    }
    actor = ray.remote(Gatherer).options(num_cpus=0.25, runtime_env={"env_vars": environment})
    ranks = [actor.remote(rank, config) for rank in range(world_size)]
    try:
        port = ray.get(ranks[0].listen.remote(), timeout=240)
        ray.get([rank.start.remote(port) for rank in ranks], timeout=240)
        ray.get([rank.rise.remote(1) for rank in ranks], timeout=240)
        rises = ray.get([rank.rise.remote(2) for rank in ranks], timeout=120)
        published = rises[0][1]
        print(
            f"{case}: private memory rose by {[round(rise / bucket, 2) for rise, _ in rises]}"
            f" buckets while {published >> 20} MiB were published"
        )
        assert published >= 150e6 and published / 3 >= bucket
        assert max(rise for rise, _ in rises) <= 2 * bucket
        if world_size > 1:
            ray.get([rank.greedy.remote() for rank in ranks], timeout=60)
            greedy = ray.get([rank.rise.remote(3) for rank in ranks], timeout=120)
            print(
                f"{case}: {[round(rise / bucket, 2) for rise, _ in greedy]} buckets when every"
                " parameter is gathered at once"
            )
            assert max(rise for rise, _ in greedy) > 2 * bucket, (
                "the measurement must detect a gather of all parameters"
            )
    finally:
        for rank in ranks:
            ray.kill(rank)
