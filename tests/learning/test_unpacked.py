"""One trajectory in a forward pass, for models that cannot be packed: the learner computes the same
as transformers, and all ranks step together."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_ranks import on_ranks
from recorded import learner_config
from test_families import TEMPERATURE, alone, off, packed, rows
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.algorithms.logprobs import LogitMap
from asyncrl.contracts.offline_rows import token_table
from asyncrl.learning.engine import zero
from asyncrl.learning.engine.state import load_state
from asyncrl.learning.frozen.reference import Reference
from asyncrl.learning.packing.strategies import pack
from asyncrl.learning.rank import LearnerRank
from asyncrl.models.isolation import check_isolation
from asyncrl.models.micro_batches import micro_batch
from asyncrl.models.policy import Policy, checkpoint_activations, load_policy
from asyncrl.preflight.specs import learner_spec, reference_spec
from benchmarks.families import VOCABULARY, family

UNPACKED = (
    "qwen3_next",
    "qwen3_5_text",
    "lfm2",
    "nemotron_h",
    "falcon_h1",
    "granitemoehybrid",
    "gpt_oss",
    "gemma2",
    "nemotron",
)
PACKED = ("granite", "cohere", "gemma4_text")
"""Families with packed rows whose logits are scaled or soft-capped after the head."""
EXAMPLES = rows(VOCABULARY, (3, 5, 17, 17, 40))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`saved(name)` returns the checkpoint of that family, which is written once."""
    folder = tmp_path_factory.mktemp("families")

    @cache
    def save(name: str) -> Path:
        return family(name).save(folder / name)

    return save


def plain(path: Path) -> PreTrainedModel:
    """transformers' model with its reference attention."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@pytest.mark.parametrize(
    "checkpointing",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["kept", "computed again"],
)
@pytest.mark.parametrize("name", [*UNPACKED, *PACKED])
def test_log_probs_and_gradients_equal_those_of_transformers(
    saved: Callable[[str], Path], name: str, checkpointing: bool
) -> None:
    model, policy = plain(saved(name)), load_policy(str(saved(name)), torch.float32, TEMPERATURE)
    assert policy.packing == ("none" if name in UNPACKED else "rows")
    if checkpointing:
        checkpoint_activations(policy)
    weights = [0.01 * (index + 1) for index in range(len(EXAMPLES))]
    plan = pack([len(row.tokens) for row in EXAMPLES], 64, 2, one_each=policy.packing == "none")
    loss = packed(policy, list(EXAMPLES), weights, None, plan.micro_batches)
    expected = [alone(model, row)[0] for row in EXAMPLES]
    wanted = -sum(
        weight * logprobs.sum() for weight, logprobs in zip(weights, expected, strict=True)
    )
    torch.testing.assert_close(loss, wanted.detach(), atol=1e-4, rtol=1e-5)
    wanted.backward()
    gradients = dict(policy.model.named_parameters())
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is not None and float(parameter.grad.abs().max()) > 1e-5:
            assert off(gradients[parameter_name].grad, parameter.grad) <= 2e-4, parameter_name
    for index, row in enumerate(EXAMPLES):
        with torch.no_grad():
            found = policy(micro_batch(EXAMPLES, [index], "cpu"))[0]
        torch.testing.assert_close(found, alone(model, row)[0].detach(), atol=2e-5, rtol=0)


def test_two_trajectories_in_one_forward_are_an_error(saved: Callable[[str], Path]) -> None:
    policy = load_policy(str(saved("gemma2")), torch.float32, 1.0)
    with pytest.raises(
        ValueError, match=r"learner\.packing: none takes one trajectory in a forward pass, not 2"
    ):
        policy(micro_batch(EXAMPLES, [0, 1], "cpu"))


def test_a_model_that_can_be_packed_computes_the_same_either_way(
    saved: Callable[[str], Path],
) -> None:
    either = [
        load_policy(str(saved("qwen3")), torch.float32, 1.0, packing=packing)
        for packing in ("rows", "none")
    ]
    assert [policy.packing for policy in either] == ["rows", "none"]
    for index in range(len(EXAMPLES)):
        one, other = (policy(micro_batch(EXAMPLES, [index], "cpu"))[0] for policy in either)
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def sdpa(path: Path) -> Policy:
    return Policy(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa"),
        1.0,
        packing="none",
    )


def unmapped(path: Path) -> Policy:
    policy = load_policy(str(path), torch.float32, 1.0)
    policy.logit_map = LogitMap()
    return policy


def looking_ahead(path: Path) -> Policy:
    policy = load_policy(str(path), torch.float32, 1.0)
    policy.model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: output + 0.1 * output.roll(-1, dims=1)
    )
    return policy


WRONG = "log-probs are .* nats from those of the model as transformers runs it"


@pytest.mark.parametrize(
    ("name", "made", "reason"),
    [
        ("gemma2", sdpa, WRONG),
        ("gemma2", unmapped, WRONG),
        ("cohere", unmapped, WRONG),
        ("granite", unmapped, WRONG),
        ("lfm2", looking_ahead, "looks ahead: log-probs change by"),
    ],
)
def test_a_wrong_policy_is_detected_before_the_first_step(
    saved: Callable[[str], Path], name: str, made: Any, reason: str
) -> None:
    policy = load_policy(str(saved(name)), torch.float32, 1.0)
    check_isolation(policy, VOCABULARY, "cpu", torch.float32, "fine", policy.packing)
    with pytest.raises(ValueError, match=f"model.path = 'wrong'.*{reason}"):
        check_isolation(
            made(saved(name)), VOCABULARY, "cpu", torch.float32, "wrong", policy.packing
        )


def test_the_reference_policy_also_takes_one_trajectory_in_a_forward_pass(
    saved: Callable[[str], Path],
) -> None:
    path = saved("gemma2")
    config = learner_config(path, algorithm={"reference": {"kl_loss_coef": 0.1}})
    reference, model = Reference(reference_spec(config)), plain(path)
    requested = [((5, 6), (7, 8, 9)), ((5,), ()), ((10, 11, 12), tuple(range(13, 40)))]
    found = reference.logprobs(requested)
    for (prompt, following), logprobs in zip(requested, found, strict=True):
        tokens = torch.tensor([[*prompt, *following]])
        with torch.no_grad():
            expected = (
                model(input_ids=tokens)
                .logits[0]
                .log_softmax(-1)[:-1]
                .gather(1, tokens[0, 1:, None])[len(prompt) - 1 :, 0]
            )
        np.testing.assert_allclose(logprobs, expected[: len(following)], atol=1e-5)


UNEVEN = [((5, 6), tuple(range(7, 37))), ((8,), (9, 10, 11)), ((12, 13), (14,))]
"""Three trajectories. Two ranks make four forward passes, one of them with only a filler token."""
TWO_RANKS = {"gpt_oss": {}, "nemotron_h": {"gradient_checkpointing": True}}
STEPS = 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_with_uneven_work_learn_the_same_as_one(
    saved: Callable[[str], Path],
) -> None:
    paths = {name: saved(name) for name in TWO_RANKS}
    alone_found, together = on_ranks(1, learned, paths)[0], on_ranks(2, learned, paths)
    for name in TWO_RANKS:
        one = alone_found[name]
        assert one["forwards"] == STEPS * 3 and one["metrics"]["micro_batches"] == 3
        for found in (rank[name] for rank in together):
            assert found["forwards"] == STEPS * 2 and found["metrics"]["micro_batches"] == 4
            assert found["metrics"]["loss"] == pytest.approx(one["metrics"]["loss"], rel=1e-5)
            assert found["metrics"]["grad_norm"] == pytest.approx(
                one["metrics"]["grad_norm"], rel=1e-4
            )
            for parameter, value in one["parameters"].items():
                np.testing.assert_allclose(
                    found["parameters"][parameter], value, atol=2e-5, err_msg=f"{name}: {parameter}"
                )
    reached = [rank[name]["experts"] for rank in together for name in TWO_RANKS]
    assert any(len(experts) < 4 for forwards in reached for experts in forwards), (
        "the test needs a forward pass that leaves an expert out"
    )


def learned(rank: int, world_size: int, paths: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Supervised steps of a real LearnerRank: the last metrics, the number of forward passes, the
    experts that each of them reached, and the parameters."""
    import deepspeed

    found = {}
    for name, settings in TWO_RANKS.items():
        config = learner_config(paths[name], world_size, 64, optimizer="sgd", **settings)
        learner = LearnerRank(load_state(rank, learner_spec(config)), "run", 1)
        policy = zero.policy_of(learner.state.engine)
        forwards: list[int] = []
        experts: list[set[int]] = []
        hooks = [policy.register_forward_pre_hook(lambda *_, seen=forwards: seen.append(1))]
        for module in policy.model.modules():
            if type(module).__name__.endswith("Experts"):
                hooks.append(
                    module.register_forward_pre_hook(
                        lambda module, inputs, seen=experts: seen.append(
                            set(inputs[1].flatten().tolist())
                        )
                    )
                )
        metrics = [learner.supervised_step(token_table(UNEVEN)) for _ in range(STEPS)]
        for hook in hooks:
            hook.remove()
        with deepspeed.zero.GatheredParameters(list(learner.state.parameters.values())):
            whole = {
                key: parameter.detach().numpy().copy()
                for key, parameter in learner.state.parameters.items()
            }
        assert metrics[-1]["applied"]
        found[name] = {
            "metrics": metrics[-1],
            "forwards": len(forwards),
            "experts": experts,
            "parameters": whole,
        }
        learner.state.engine.destroy()
        del learner  # while it exists, transformers shards the next model
    return found
