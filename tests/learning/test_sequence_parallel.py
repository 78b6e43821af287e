"""Ranks that share rows by tokens compute the same as one rank: log-probs, losses, gradients,
parameters. On gloo, without Ray."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from plain_ranks import on_ranks
from recorded import VOCABULARY, learner_config, recorded_group

from asyncrl.config import Config
from asyncrl.contracts.group_table import groups_to_table
from asyncrl.models.ulysses import SequenceRanks
from asyncrl.preflight.specs import learner_spec

STEPS = 3
LONG = ((5, 6), tuple(range(3, 48)))
"""Longer than one rank's cap of 32 tokens, with an odd number of tokens."""

OVER_WHOLE_TRAJECTORIES = {
    "advantage": "reinforce_plus_plus",
    "loss_aggregation": "sequence_mean_token_mean",
    "entropy_coef": 0.01,
    "loss": {"name": "gspo", "old_policy": "log_linear"},
    "correction": {"truncation": {"level": "sequence", "normalize": True}},
}
WITH_VALUES = {"advantage": {"name": "gae", "value_coef": 10.0}}

SAME = (
    "loss",
    "grad_norm",
    "tokens",
    "trajectories",
    "ratio_mean",
    "ratio_max",
    "clip_fraction",
    "weight_mean",
    "kl_k3",
    "entropy",
    "value_loss",
)

MODELS: dict[str, dict[str, Any]] = {
    "one key-value head for two ranks": {"num_key_value_heads": 1},
    "three key-value heads for two ranks": {"num_attention_heads": 6, "num_key_value_heads": 3},
    "a key-value head for each rank": {"num_key_value_heads": 2},
    "sliding window": {
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "activations computed again": {"num_key_value_heads": 2, "checkpointing": True},
    "llama": {"num_key_value_heads": 4, "llama": True},
    "tokens of a teacher": {"num_key_value_heads": 2, "top_k": 3},
}

LENGTHS: dict[str, tuple[int, ...]] = {
    "uneven trajectories": (3, 9, 14, 2, 7, 7, 4),
    "as many tokens as heads": (5,),
    "fewer tokens than ranks": (2,),
    "nothing": (),
}
"""Number of tokens of each trajectory of a micro-batch. All tokens except its last are inputs."""


def test_shares_cover_the_row_and_are_even() -> None:
    for tokens, size in ((7, 3), (4, 4), (5, 2), (8, 4)):
        groups = [SequenceRanks(None, rank, size) for rank in range(size)]
        bounds = [group.bounds(tokens) for group in groups]
        assert (
            bounds[0][0] == 0
            and bounds[-1][1] == tokens
            and all(left[1] == right[0] for left, right in pairwise(bounds))
        )
        assert max(groups[0].shares(tokens)) - min(groups[0].shares(tokens)) <= 1


def test_wrong_shapes_are_refused() -> None:
    group = SequenceRanks(None, 0, 2)
    with pytest.raises(
        ValueError, match="sequence_parallel_size = 2 does not divide the 3 attention heads"
    ):
        group.to_heads(*[torch.zeros(1, 3, 4, 8)] * 3, tokens=8)
    with pytest.raises(ValueError, match="has 4 tokens of a row of 9, not its share of 5"):
        group.to_heads(*[torch.zeros(1, 2, 4, 8)] * 3, tokens=9)


def test_a_shared_row_has_the_results_and_gradients_of_a_whole_row() -> None:
    for rank, differences in enumerate(on_ranks(2, shared_against_whole)):
        assert set(differences) == {(model, lengths) for model in MODELS for lengths in LENGTHS}
        for case, found in differences.items():
            assert found["greedy"] and found["shape"], (rank, case)
            assert max(found["results"], found["gradient"]) < 1e-5, (rank, case, found)
            assert (found["size"] > 0.01) == (case[1] != "nothing"), (rank, case, found)


def shared_against_whole(rank: int, world_size: int) -> dict[tuple[str, str], dict[str, Any]]:
    """On each rank: largest differences between a policy whose rows the ranks share and the same
    policy on one rank. Those of gradients are relative to the largest gradient."""
    from asyncrl.models.micro_batches import micro_batch
    from asyncrl.models.policy import Policy, checkpoint_activations

    group = SequenceRanks.join(world_size)
    found = {}
    for model, chosen in MODELS.items():
        settings = {
            name: value for name, value in chosen.items() if name not in ("checkpointing", "top_k")
        }
        for name, lengths in LENGTHS.items():
            rows = examples(lengths, chosen.get("top_k"))
            batch = micro_batch(rows, range(len(lengths)), "cpu")
            one_rank, shared = (
                Policy(
                    small_model(**settings),
                    0.9,
                    entropy_gradient=True,
                    values=True,
                    sequence_group=sequence_group,
                )
                for sequence_group in (None, group)
            )
            if "checkpointing" in chosen:
                checkpoint_activations(shared)
            outcomes = []
            for policy in (one_rank, shared):
                torch.nn.init.ones_(policy.value_head.weight)
                logprobs, *others = policy(batch)
                several = logprobs.dim() == 2
                results = [*(logprobs.unbind(1) if several else [logprobs]), *others]
                # A loss that depends on all tokens jointly.
                (
                    torch.tanh(torch.cat(results).sum())
                    + (torch.linspace(-1, 1, len(results[0])) * torch.stack(results)).sum()
                ).backward()
                outcomes.append(
                    (
                        torch.stack(results).detach(),
                        torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]),
                    )
                )
            (expected, gradient), (results, part) = outcomes
            dist.all_reduce(part)
            found[model, name] = {
                "shape": results.shape == expected.shape,
                "results": (results - expected).abs().max().item() if results.numel() else 0.0,
                "gradient": (
                    (part - gradient).abs().max().item() / max(1.0, gradient.abs().max().item())
                ),
                "size": gradient.abs().max().item(),
                "greedy": torch.equal(
                    one_rank(batch, greedy=True)[0], shared(batch, greedy=True)[0]
                ),
            }
    return found


def examples(lengths: tuple[int, ...], top_k: int | None = None) -> list[Any]:
    """Trajectories with these numbers of tokens, and prompts of one or two tokens. With `top_k`,
    each token has this many tokens of a teacher."""
    from asyncrl.models.micro_batches import Example

    generator = np.random.default_rng(0)
    made = []
    for length in lengths:
        prompt = 1 + (length > 3)
        completion = length - prompt
        tokens = generator.integers(0, VOCABULARY, length)
        made.append(
            Example(
                tokens,
                prompt,
                np.ones(completion, bool),
                np.zeros(completion, np.float32),
                1.0,
                np.zeros(completion, np.int32),
                teacher_ids=top_k and generator.integers(0, VOCABULARY, (completion, top_k)),
            )
        )
    return made


def small_model(llama: bool = False, **settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    from asyncrl.models.attention import register_attention

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "num_attention_heads": 4,
    }
    config, kind = (LlamaConfig, LlamaForCausalLM) if llama else (Qwen3Config, Qwen3ForCausalLM)
    return kind(
        config(**sizes | settings, initializer_range=0.2, attn_implementation=register_attention())
    )


@pytest.fixture(scope="module")
def config_of(model_path: Path) -> Callable[..., Config]:
    """A config for this algorithm with `world_size` ranks, where `size` ranks share each row. It
    uses SGD, which does not amplify rounding."""

    def make(algorithm: dict[str, Any], world_size: int = 1, size: int = 1) -> Config:
        cap = 1024 if world_size == 1 else 32
        return learner_config(
            model_path,
            world_size,
            cap,
            algorithm,
            optimizer="sgd",
            sequence_parallel_size=size,
            find_nonfinite=True,
        )

    return make


@pytest.fixture(scope="module")
def one_rank(config_of: Callable[..., Config]) -> list[dict[str, Any]]:
    """The results of one rank, for each of the two algorithms."""
    return on_ranks(1, learned, [config_of(OVER_WHOLE_TRAJECTORIES), config_of(WITH_VALUES)])[0]


@pytest.mark.parametrize(
    "world_size",
    [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.faults)],
)
@pytest.mark.timeout(900)
def test_ranks_that_share_rows_learn_the_same_as_one_rank(
    config_of: Callable[..., Config], one_rank: list[dict[str, Any]], world_size: int
) -> None:
    configs = [
        config_of(algorithm, world_size, 2) for algorithm in (OVER_WHOLE_TRAJECTORIES, WITH_VALUES)
    ]
    by_rank = on_ranks(world_size, learned, configs)
    for one, *together in zip(one_rank, *by_rank, strict=True):
        for found in together:
            assert_same_learning(found, one, world_size)
        logprobs = {
            index: values for found in together for index, values in found["logprobs"].items()
        }
        assert logprobs.keys() == one["logprobs"].keys()
        for index, values in one["logprobs"].items():
            np.testing.assert_allclose(logprobs[index], values, atol=1e-5)
        assert len(logprobs[0]) == len(LONG[1]) > configs[0].learner.max_tokens_per_gpu


def assert_same_learning(found: dict[str, Any], expected: dict[str, Any], world_size: int) -> None:
    for metrics, wanted in zip(found["metrics"], expected["metrics"], strict=True):
        assert metrics["applied"] == 1.0 and metrics["micro_batches"] >= world_size
        for name in SAME:
            assert metrics[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-5), name
    assert not found["skipped"]["applied"] and found["skipped"]["nonfinite_loss"] >= 1
    assert "from group 60, trajectory 0" in found["note"], found["note"]
    assert found["exact_match"] == expected["exact_match"] == 1 / VOCABULARY
    for name, parameter in expected["parameters"].items():
        np.testing.assert_allclose(found["parameters"][name], parameter, atol=1e-5, err_msg=name)


def learned(rank: int, world_size: int, configs: list[Config]) -> list[dict[str, Any]]:
    """Steps of a real LearnerRank for each config: metrics, log-probs, parameters."""
    import deepspeed

    from asyncrl.learning.engine.state import load_state
    from asyncrl.learning.rank import LearnerRank

    found = []
    for config in configs:
        learner = LearnerRank(load_state(rank, learner_spec(config)), "run", 1)
        metrics = [
            learner.step(
                [groups_to_table([recorded_group(step * 8 + number)]) for number in range(8)]
            ).metrics
            for step in range(STEPS)
        ]
        skipped = learner.step(
            [
                groups_to_table([recorded_group(60 + number, poison=number == 0)])
                for number in range(4)
            ]
        )
        parameters = list(learner.state.parameters.values())
        with deepspeed.zero.GatheredParameters(parameters):
            whole = {
                name: parameter.detach().numpy().copy()
                for name, parameter in learner.state.parameters.items()
            }
        found.append(
            {
                "metrics": metrics,
                "skipped": skipped.metrics,
                "note": skipped.note,
                "parameters": whole,
                "logprobs": learner.logprobs(
                    [LONG, ((5, 6, 7), (8, 9)), ((10,), (11, 12, 13))], 0.8
                ),
                "exact_match": learner.exact_match(
                    [((5, 6, 7), (token,)) for token in range(VOCABULARY)]
                ),
            }
        )
        del learner  # while it exists, transformers shards the next model
    return found
