"""The number of ranks does not change the result. Tested: the same steps on one rank and on two,
and two ranks with trajectories of very different lengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from llama_checkpoint import save_llama
from recorded import learner_config, recorded_batch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from asyncrl.algorithms.logprobs import CHUNK_ELEMENTS
from asyncrl.config import Config
from asyncrl.contracts.offline_rows import token_table
from asyncrl.learning.driver import RayLearner
from asyncrl.preflight.specs import learner_spec

Run = Callable[[Any], Any]

STEPS = 20


def gathered(group: RayLearner, run: Run, version: int) -> dict[str, np.ndarray]:
    """Every published parameter, by its Hugging Face name."""
    manifest = run(group.gather(version))
    contents = ray.get(list(manifest.buckets))
    return {
        entry.name: (
            contents[entry.bucket][entry.offset : entry.offset + entry.nbytes]
            .view(np.float32)
            .reshape(entry.shape)
            .astype(np.float64)
        )
        for entry in manifest.tensors
    }


def trained(config: Config, run: Run) -> tuple[list[float], np.ndarray]:
    """Gradient norm of each step, and the change of all parameters."""
    group = run(RayLearner.create(learner_spec(config), "run", 1))
    try:
        before = gathered(group, run, 0)
        results = [run(group.step(recorded_batch(step))) for step in range(STEPS)]
        after = gathered(group, run, 1)
    finally:
        run(group.close())
    assert all(result.applied for result in results)
    return [result.metrics["grad_norm"] for result in results], np.concatenate(
        [(after[name] - before[name]).ravel() for name in sorted(before)]
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "optimizer", "learning_rate"),
    [
        pytest.param("qwen3", "sgd", 0.1, marks=pytest.mark.slow),
        pytest.param("llama", "adamw", 1e-3, marks=pytest.mark.faults),
    ],
)
def test_one_rank_and_two_agree_over_twenty_steps(
    ray_cluster: Any,
    run: Run,
    model_path: Path,
    llama_model: Path,
    family: str,
    optimizer: str,
    learning_rate: float,
) -> None:
    path = {"qwen3": model_path, "llama": llama_model}[family]
    (norms, change), (other_norms, other_change) = (
        trained(
            learner_config(
                path,
                world_size=ranks,
                max_tokens=tokens,
                optimizer=optimizer,
                learning_rate=learning_rate,
            ),
            run,
        )
        for ranks, tokens in ((1, 4096), (2, 128))
    )
    apart = np.linalg.norm(change - other_change) / np.linalg.norm(change)
    of_norms = max(abs(one - other) / one for one, other in zip(norms, other_norms, strict=True))
    print(
        f"{family}, {optimizer}: gradient norms within {of_norms:.1e}, parameter change"
        f" {np.linalg.norm(change):.3g} within {apart:.1e}"
    )
    assert np.linalg.norm(change) > 0.1 and min(norms) > 1e-2
    assert of_norms <= 1e-4 and apart <= 1e-3


LONG_VOCABULARY = 65_536
"""Large enough that 128 log-probs fill a chunk."""


def long_model(directory: Path, tied: bool) -> Path:
    sizes = {
        "vocab_size": LONG_VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
    }
    if not tied:
        return save_llama(directory, **sizes)
    torch.manual_seed(0)
    config = Qwen3Config(
        **sizes,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def one_by_one(model: PreTrainedModel, rows: list[tuple[list[int], list[int]]]) -> float:
    """The mean negative log-likelihood of the second ids, one row at a time with transformers. The
    gradients are in the model."""
    count, total = sum(len(following) for _, following in rows), 0.0
    for prompt, following in rows:
        logits = model(input_ids=torch.tensor([[*prompt, *following]]), use_cache=False).logits[
            0, len(prompt) - 1 : -1
        ]
        loss = (
            torch.nn.functional.cross_entropy(logits, torch.tensor(following), reduction="sum")
            / count
        )
        loss.backward()
        total += float(loss.detach())
    return total


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "tied",
    [pytest.param(True, marks=pytest.mark.faults), pytest.param(False, marks=pytest.mark.slow)],
)
def test_ranks_with_different_numbers_of_chunks_do_not_wait_for_each_other(
    ray_cluster: Any, run: Run, tmp_path: Path, tied: bool
) -> None:
    """One rank has a trajectory with four chunks of log-probs, the other twelve short ones in one
    chunk. The head is not gathered for each chunk."""
    draw = np.random.default_rng(0)
    rows = [
        (
            draw.integers(3, LONG_VOCABULARY, 2).tolist(),
            draw.integers(3, LONG_VOCABULARY, length).tolist(),
        )
        for length in (400, *[3] * 12)
    ]
    assert 36 <= CHUNK_ELEMENTS // LONG_VOCABULARY < 400 / 3
    path = long_model(tmp_path, tied)
    config = learner_config(
        path, world_size=2, max_tokens=402, optimizer="sgd", learning_rate=1.0, max_grad_norm=1e6
    )
    group = run(RayLearner.create(learner_spec(config), "run", 1))
    try:
        before = gathered(group, run, 0)
        metrics = run(group.supervised_step(token_table(rows)))
        after = gathered(group, run, 1)
        logprobs = run(group.logprobs(rows))
    finally:
        run(group.close())
    assert metrics["micro_batches"] == 2 and ("lm_head.weight" in before) != tied
    assert [len(values) for values in logprobs] == [400, *[3] * 12]

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    loss = one_by_one(model, rows)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = (
        sum(
            float(gradient.double().square().sum())
            for gradient in gradients.values()
            if gradient is not None
        )
        ** 0.5
    )
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5) and metrics[
        "grad_norm"
    ] == pytest.approx(norm, rel=1e-5)
    assert gradients.keys() == before.keys()
    for name, gradient in gradients.items():
        assert gradient is not None and bool(gradient.any()), name
        np.testing.assert_allclose(
            before[name] - after[name], gradient.double(), atol=1e-5, rtol=1e-4, err_msg=name
        )
