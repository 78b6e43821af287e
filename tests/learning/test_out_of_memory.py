"""The messages of a learner that runs out of memory."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import ActorDiedError, OutOfMemoryError
from recorded import learner_config, state_without_model

from asyncrl.config import DpoConfig, SftConfig
from asyncrl.learning.driver import _cause
from asyncrl.learning.engine.out_of_memory import LearnerOutOfMemoryError, advice, explained
from asyncrl.learning.steps import passes
from asyncrl.models.micro_batches import micro_batch, token_example
from asyncrl.preflight.specs import learner_spec

EXAMPLES = [token_example((range(3, 3 + prompt), range(20))) for prompt in (4, 10)]
BATCH = micro_batch(EXAMPLES, [0, 1], "cpu")


def host() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def numpy_host() -> None:
    np.empty(1 << 60, dtype=np.uint8)


def gpu() -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of …"
    )


@pytest.mark.parametrize("fill", [host, numpy_host, gpu])
def test_the_message_names_the_micro_batch_and_the_setting(tmp_path: Path, fill: Any) -> None:
    with (
        pytest.raises(LearnerOutOfMemoryError) as error,
        explained(BATCH, learner_spec(learner_config(tmp_path, max_tokens=512))),
    ):
        fill()
    text = str(error.value)
    assert (
        "micro-batch of 48 tokens, 2 trajectories, the longest of 29, and 40 loss tokens;"
        " learner.max_tokens_per_gpu cannot be below 64" in text
    )
    assert "\n" not in text and re.search("allocat", text, re.IGNORECASE)


def test_another_error_is_unchanged(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"^shapes differ$") as error,
        explained(BATCH, learner_spec(learner_config(tmp_path))),
    ):
        raise RuntimeError("shapes differ")
    assert type(error.value) is RuntimeError


@pytest.mark.parametrize(
    ("settings", "tokens", "advised"),
    [
        ({"max_tokens": 512}, 500, "set learner.max_tokens_per_gpu: 250"),
        ({"max_tokens": 512}, 100, "set learner.max_tokens_per_gpu: 64"),
        (
            {"max_tokens": 512, "world_size": 2, "sequence_parallel_size": 2},
            1000,
            "set learner.max_tokens_per_gpu: 250",
        ),
        (
            {"max_tokens": 64},
            64,
            (
                "cannot be below 64, as the longest trajectory has 64 tokens, so set"
                " learner.gradient_checkpointing: true"
            ),
        ),
        (
            {"max_tokens": 64, "gradient_checkpointing": True},
            64,
            (
                "so raise learner.sequence_parallel_size above 1, or lower"
                " rollout.max_completion_length"
            ),
        ),
        (
            {
                "max_tokens": 512,
                "world_size": 2,
                "sequence_parallel_size": 2,
                "algorithm": {"reference": {"kl_loss_coef": 0.1}},
            },
            150,
            "set learner.max_tokens_per_gpu: 64",
        ),
    ],
)
def test_the_advised_setting_is_valid(
    tmp_path: Path, settings: dict[str, Any], tokens: int, advised: str
) -> None:
    config = learner_config(tmp_path, **settings)
    assert advised in advice(learner_spec(config), tokens)
    if cap := re.match(
        r"set learner.max_tokens_per_gpu: (\d+)", advice(learner_spec(config), tokens)
    ):
        learner_config(tmp_path, **{**settings, "max_tokens": int(cap[1])})


def test_a_run_on_a_dataset_gets_advice_about_its_own_settings(tmp_path: Path) -> None:
    """A reference policy does not split rows, so the cap stays at the longest row."""
    config = learner_config(tmp_path, 2, 64, sequence_parallel_size=2, gradient_checkpointing=True)
    spec = replace(learner_spec(config), objective=SftConfig())
    assert "or lower data.max_length" in advice(spec, 64, 1)
    assert "cannot be below 32," in advice(spec, 64, 1)
    spec = replace(spec, objective=DpoConfig())
    assert "cannot be below 64," in advice(spec, 64, 1)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_forward_and_backward_pass_explain_the_error(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_without_model(learner_config(tmp_path, max_tokens=100))
    nothing = torch.zeros(0)

    class Engine:
        def set_gradient_accumulation_boundary(self, last: bool) -> None: ...

        def __call__(self, *_: Any) -> Any:
            return gpu() if where == "forward" else (nothing, nothing, nothing)

        def backward(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None:
            gpu()

    state.engine = Engine()
    monkeypatch.setattr(passes, "_quadratic_cost", lambda state: 0.0)
    with pytest.raises(LearnerOutOfMemoryError, match="40 loss tokens"):
        passes.backward(state, EXAMPLES, [0.1, 0.1], lambda *_: (torch.zeros(()), {}))


def test_the_driver_explains_a_killed_process() -> None:
    assert "the machine ran out of memory; lower learner.max_tokens_per_gpu" in _cause(
        OutOfMemoryError("long\ntext"), "gather"
    )
    assert "often the machine's memory: lower learner.max_tokens_per_gpu" in _cause(
        ActorDiedError(), "step"
    )
    assert "memory" not in _cause(ActorDiedError(), "save")
    assert "\n" not in _cause(OutOfMemoryError("long\ntext"), "step")


def test_a_rank_with_a_limit_is_told_of_it(tmp_path: Path) -> None:
    config = learner_config(tmp_path, device="cuda", gpu_memory_utilization=0.5)
    with (
        pytest.raises(
            LearnerOutOfMemoryError, match=r"or raise learner\.gpu_memory_utiliz.* = 0\.5"
        ),
        explained(BATCH, learner_spec(config)),
    ):
        gpu()
