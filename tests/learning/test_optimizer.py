"""Which parameters have weight decay, and which have their own learning rate. Both survive a
checkpoint on two real ZeRO-3 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plain_ranks import on_ranks
from pydantic import ValidationError
from recorded import learner_config, recorded_group

from asyncrl.algorithms.optimizers import AdamW
from asyncrl.config import Config, LearnerConfig, explain
from asyncrl.contracts.group_table import groups_to_table
from asyncrl.contracts.offline_rows import token_table
from asyncrl.learning.engine import zero
from asyncrl.learning.engine.optimizer import decays, make_optimizer, set_learning_rates
from asyncrl.preflight.specs import learner_spec
from benchmarks.families import family

ROWS = [(tuple(range(3, 6 + index)), tuple(range(8, 11 + 6 * index))) for index in range(6)]
RATE, VALUE_RATE, DECAY = 1e-2, 5e-2, 0.5


class WithHead(torch.nn.Module):
    """A module with a policy's parameter names."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.value_head = model, torch.nn.Linear(64, 1)


@pytest.mark.parametrize(
    ("name", "decayed", "kept"),
    [
        (
            "stablelm",
            ["layers.0.self_attn.q_proj.weight", "embed_tokens.weight"],
            ["layers.0.input_layernorm.weight", "q_proj.bias"],
        ),
        (
            "gpt_oss",
            ["experts.gate_up_proj", "lm_head.weight"],
            ["experts.gate_up_proj_bias", "self_attn.sinks", "router.bias"],
        ),
        (
            "jamba",
            ["mamba.in_proj.weight"],
            ["mamba.D", "mamba.conv1d.bias", "mamba.dt_layernorm.weight"],
        ),
        ("qwen3", ["q_proj.weight"], ["q_norm.weight"]),
    ],
)
def test_matrices_decay_and_norms_and_biases_do_not(
    name: str, decayed: list[str], kept: list[str]
) -> None:
    found = {
        key: decays(key, parameter) for key, parameter in family(name).build().named_parameters()
    }
    for endings, expected in ((decayed, True), (kept, False)):
        for ending in endings:
            observed = {value for key, value in found.items() if key.endswith(ending)}
            assert observed == {expected}, ending


def test_every_parameter_is_in_one_group_and_the_head_has_its_own_rate() -> None:
    policy = WithHead(family("llama").build())
    optimizer = make_optimizer(policy, LearnerConfig(weight_decay=DECAY))
    groups = optimizer.param_groups
    assert sorted(map(id, policy.parameters())) == sorted(
        id(p) for group in groups for p in group["params"]
    )
    assert [(group["weight_decay"], group["value_head"]) for group in groups] == [
        (DECAY, False),
        (0.0, False),
        (DECAY, True),
        (0.0, True),
    ]
    set_learning_rates(optimizer, RATE, VALUE_RATE)
    assert [group["lr"] for group in groups] == [RATE, RATE, VALUE_RATE, VALUE_RATE]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_step_equals_that_of_torchs_plain_optimizer(kind: str) -> None:
    """The expected values come from torch's optimizer without foreach and fused kernels."""
    models = [WithHead(family("llama").build()) for _ in range(2)]
    config = LearnerConfig.model_validate({"optimizer": kind, "weight_decay": DECAY})
    ours = make_optimizer(models[0], config)
    plain: list[dict[str, Any]] = [
        {"params": [parameter], "weight_decay": DECAY if parameter.ndim > 1 else 0.0}
        for parameter in models[1].parameters()
    ]
    settings = (
        {"betas": adam.betas, "eps": adam.eps, "foreach": False, "fused": False}
        if isinstance(adam := config.optimizer, AdamW)
        else {"foreach": False}
    )
    theirs = getattr(torch.optim, {"adamw": "AdamW", "sgd": "SGD"}[kind])(
        plain, lr=RATE, **settings
    )
    assert kind == "sgd" or ours.defaults["fused"]
    draw = torch.Generator().manual_seed(0)
    for _ in range(4):
        set_learning_rates(ours, RATE, RATE)
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            one.grad = other.grad = torch.randn(one.shape, generator=draw)
        ours.step()
        theirs.step()
    for (key, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(
            one, other, atol=1e-6, rtol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )


def test_a_value_learning_rate_without_a_value_head_is_refused(model_path: Path) -> None:
    advantage = {"name": "grpo", "value_learning_rate": VALUE_RATE}
    with pytest.raises(ValidationError) as refused:
        learner_config(model_path, algorithm={"advantage": advantage})
    assert explain(refused.value) == (
        "algorithm.advantage.value_learning_rate has no effect with advantage: grpo; leave it out,"
        " or use it with advantage: gae"
    )


@pytest.mark.slow
def test_groups_work_under_zero3_and_survive_a_checkpoint(model_path: Path, tmp_path: Path) -> None:
    for observed in on_ranks(2, observe_steps, model_path, tmp_path):
        for name, moved in observed.by_decay.items():
            expected = (
                -RATE * DECAY * observed.before[name]
                if observed.before[name].ndim > 1
                else torch.zeros_like(moved)
            )
            torch.testing.assert_close(
                moved, expected, atol=2e-7, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )
        assert observed.fused and observed.rates == {False: {RATE}, True: {VALUE_RATE}}
        # The size of AdamW's first step is the learning rate, for any gradient.
        assert float(observed.head_moved.abs().max()) == pytest.approx(VALUE_RATE, rel=1e-3)
        assert observed.after_load == pytest.approx(observed.continued, rel=1e-6)
        assert observed.groups_after_load == observed.groups


class Observed:
    """What a rank sees of its optimizer; parameters by name."""

    before: dict[str, torch.Tensor]
    by_decay: dict[str, torch.Tensor]
    """How much further weight decay moves a parameter."""
    head_moved: torch.Tensor
    rates: dict[bool, set[float]]
    """Whether it is the value head's → learning rates."""
    fused: bool
    groups: list[dict[str, Any]]
    groups_after_load: list[dict[str, Any]]
    continued: list[float]
    after_load: list[float]


def observe_steps(rank: int, world_size: int, path: Path, folder: Path) -> Observed:
    observed = Observed()
    after: dict[float, dict[str, torch.Tensor]] = {}
    for decay in (0.0, DECAY):
        learner = started(
            rank,
            learner_config(path, world_size=world_size, learning_rate=RATE, weight_decay=decay),
        )
        observed.before = whole(learner)
        learner.supervised_step(token_table(ROWS))
        after[decay] = whole(learner)
        learner.state.engine.destroy()
        del learner  # while it exists, transformers shards the next model
    observed.by_decay = {name: after[DECAY][name] - after[0.0][name] for name in observed.before}

    advantage = {"name": "gae", "value_coef": 1.0, "value_learning_rate": VALUE_RATE}
    learner = started(
        rank,
        learner_config(
            path,
            world_size,
            128,
            {"advantage": advantage},
            learning_rate=RATE,
            weight_decay=DECAY,
        ),
    )
    batches = [
        [groups_to_table([recorded_group(4 * step + place)]) for place in range(4)]
        for step in range(3)
    ]
    head = zero.policy_of(learner.state.engine).value_head.weight
    learner.step(batches[0])
    groups = learner.state.engine.optimizer.param_groups
    observed.rates = {
        value: {group["lr"] for group in groups if group["value_head"] == value}
        for value in (False, True)
    }
    observed.fused = all(group["fused"] for group in groups)
    observed.head_moved = full(head)
    observed.groups = [
        {name: value for name, value in group.items() if name != "params"} for group in groups
    ]
    learner.save(folder)
    observed.continued = [
        learner.step(batch).metrics[name]
        for batch in batches[1:]
        for name in ("loss", "value_loss", "grad_norm")
    ]
    learner.load(folder)
    observed.groups_after_load = [
        {name: value for name, value in group.items() if name != "params"}
        for group in learner.state.engine.optimizer.param_groups
    ]
    observed.after_load = [
        learner.step(batch).metrics[name]
        for batch in batches[1:]
        for name in ("loss", "value_loss", "grad_norm")
    ]
    learner.state.engine.destroy()
    return observed


def started(rank: int, config: Config) -> Any:
    from asyncrl.learning.engine.state import load_state
    from asyncrl.learning.rank import LearnerRank

    return LearnerRank(load_state(rank, learner_spec(config)), "run", 1)


def whole(learner: Any) -> dict[str, torch.Tensor]:
    return {name: full(parameter) for name, parameter in learner.state.parameters.items()}


def full(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The parameter's fp32 master weights, from all ranks (a collective)."""
    from deepspeed.utils import safe_get_full_fp32_param

    return safe_get_full_fp32_param(parameter).detach().clone()
