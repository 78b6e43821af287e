"""Training computes the same log-probs as generation, because no step uses dropout. Activation
checkpointing works in eval mode, with real ZeRO-3."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from plain_ranks import on_ranks
from recorded import VOCABULARY, learner_config, recorded_group
from transformers import (
    AutoModelForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    SeedOssConfig,
    SeedOssForCausalLM,
)

from asyncrl.contracts.group_table import groups_to_table
from asyncrl.contracts.offline_rows import token_table
from asyncrl.contracts.rows import Group
from asyncrl.learning.engine import zero
from asyncrl.learning.engine.state import load_state
from asyncrl.learning.rank import LearnerRank
from asyncrl.models.micro_batches import micro_batch, token_example
from asyncrl.models.policy import Policy, load_policy
from asyncrl.preflight.specs import learner_spec

LAYERS, HIDDEN = 6, 64
FAMILIES = ("opt", "seed_oss")
ROWS = [
    ((3, 4), tuple(range(5, 45))),
    ((7,), tuple(range(8, 30))),
    ((9, 10, 11), tuple(range(12, 40))),
]
LONG = [((first, 4), tuple(3 + at % 40 for at in range(1400))) for first in (3, 5)]


def save(family: str, directory: Path) -> Path:
    """Save a checkpoint whose config sets all dropouts of the model to 0.3."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
    }
    model: PreTrainedModel
    if family == "opt":
        model = OPTForCausalLM(
            OPTConfig(
                **sizes,
                ffn_dim=256,
                word_embed_proj_dim=HIDDEN,
                dropout=0.3,
                attention_dropout=0.3,
                layerdrop=0.3,
                init_std=0.2,
            )
        )
    else:
        more = {
            "intermediate_size": 256,
            "head_dim": 16,
            "num_key_value_heads": 2,
            "attention_dropout": 0.3,
            "residual_dropout": 0.3,
        }
        model = SeedOssForCausalLM(SeedOssConfig(**sizes, **more, initializer_range=0.2))
    model.save_pretrained(directory / family)
    return directory / family


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dropout")
    return {family: save(family, folder) for family in FAMILIES}


def logprobs(policy: Policy) -> torch.Tensor:
    return policy(micro_batch([token_example(row) for row in ROWS], range(len(ROWS)), "cpu"))[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_in_train_mode_computes_the_same_log_probs(
    models: dict[str, Path], family: str
) -> None:
    policy = load_policy(str(models[family]), torch.float32, 1.0)
    with torch.no_grad():
        evaluated, again = logprobs(policy.eval()), logprobs(policy.train())
    assert torch.equal(evaluated, again) and not any(module.training for module in policy.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_dropout_of_these_models_would_change_log_probs(
    models: dict[str, Path], family: str
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(models[family])
    ids = torch.tensor([ROWS[0][1]])
    with torch.no_grad():
        evaluated, trained = (
            plain.train(mode)(input_ids=ids, use_cache=False).logits.log_softmax(-1)
            for mode in (False, True)
        )
    assert float((evaluated - trained).abs().mean()) > 0.1


def test_a_policy_sets_its_model_to_eval_mode() -> None:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "ffn_dim": 16,
        "word_embed_proj_dim": 16,
    }
    model = OPTForCausalLM(OPTConfig(**sizes)).train()
    assert model.training and not Policy(model, 1.0).model.training


@cache
def learned(world_size: int, folder: Path) -> list[dict[tuple[str, bool], dict[str, Any]]]:
    return on_ranks(world_size, steps_of_both, {family: folder / family for family in FAMILIES})


@pytest.mark.parametrize(
    "world_size",
    [pytest.param(1, marks=pytest.mark.faults), pytest.param(2, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_computed_again_give_the_same_gradients_with_less_memory(
    models: dict[str, Path], family: str, world_size: int
) -> None:
    for rank in learned(world_size, models[family].parent):
        kept, again = rank[family, False], rank[family, True]
        assert not kept["training"] and not again["training"]
        assert (kept["forwards"], again["forwards"]) == (1, 2), "of a layer for each micro-batch"
        assert float(kept["gradients"].abs().max()) > 1e-3
        torch.testing.assert_close(
            again["gradients"],
            kept["gradients"],
            rtol=1e-5,
            atol=1e-6 * float(kept["gradients"].abs().max()),
        )
        # At staleness 0 the ratio is 1, because the step computes the log-probs that the check
        # before it computed.
        for metrics in (kept["metrics"], again["metrics"]):
            assert (
                metrics["applied"]
                and metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
                and metrics["ess"] == pytest.approx(1, abs=1e-5)
            )
        assert again["peak"] < 0.6 * kept["peak"], (again["peak"], kept["peak"])


def steps_of_both(
    rank: int, world_size: int, paths: dict[str, Path]
) -> dict[tuple[str, bool], dict[str, Any]]:
    return {
        (family, again): steps(rank, world_size, path, again)
        for family, path in paths.items()
        for again in (False, True)
    }


def steps(rank: int, world_size: int, path: Path, again: bool) -> dict[str, Any]:
    """Return the gradients and memory of a supervised step, and the metrics of a policy step on the
    learner's own log-probs. `again` sets gradient_checkpointing."""
    config = learner_config(
        path, world_size, 1600, gradient_checkpointing=again, optimizer="sgd", learning_rate=1e-3
    )
    learner = LearnerRank(load_state(rank, learner_spec(config)), "run", 1)
    policy = zero.policy_of(learner.state.engine)
    taken: list[torch.Tensor] = []
    finite = zero.gradients_finite

    def watched(engine: Any) -> bool:
        taken.append(
            torch.cat([shard.detach().flatten().clone() for shard in zero.gradient_shards(engine)])
        )
        return finite(engine)

    inner = next(
        module
        for name, module in policy.model.named_modules()
        if name.endswith(("layers.1.fc1", "layers.1.mlp"))
    )
    forwards: list[int] = []
    hook = inner.register_forward_pre_hook(lambda *_: forwards.append(1))
    zero.gradients_finite = watched
    try:
        metrics = learner.supervised_step(token_table(ROWS))
    finally:
        zero.gradients_finite = finite
        hook.remove()
    learner.supervised_step(token_table(LONG))  # makes the allocations that stay
    before, highest = psutil.Process().memory_info().rss, [0]
    backward = learner.state.engine.backward

    def measured(*arguments: Any, **settings: Any) -> None:
        highest[0] = max(highest[0], psutil.Process(os.getpid()).memory_info().rss - before)
        backward(*arguments, **settings)

    learner.state.engine.backward = measured
    learner.supervised_step(token_table(LONG))
    learner.state.engine.backward = backward
    result = learner.step([groups_to_table([with_own_logprobs(recorded_group(1), learner)])])
    found = {
        "training": any(module.training for module in policy.modules()),
        "forwards": len(forwards) * world_size / metrics["micro_batches"],
        "gradients": taken[0],
        "metrics": result.metrics,
        "peak": highest[0],
    }
    learner.state.engine.destroy()
    return found


def with_own_logprobs(group: Group, learner: LearnerRank) -> Group:
    """Replace the group's log-probs with those of the learner's policy."""
    rows = [(group.prompt.token_ids, member.completion.token_ids) for member in group.trajectories]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, learner.logprobs(rows))
    found = {index: tuple(values.tolist()) for part in parts for index, values in part.items()}
    members = [
        replace(member, completion=replace(member.completion, logprobs=found[index]))
        for index, member in enumerate(group.trajectories)
    ]
    return replace(group, trajectories=tuple(members))
