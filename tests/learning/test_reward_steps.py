"""Steps of a reward model under real ZeRO-3: however pairs are packed, and over however many ranks,
scores, loss and gradient are those of transformers' sequence classifier on the exported model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from plain_ranks import on_ranks
from recorded import learner_config
from test_preference_steps import MIXED, ROUTES, ROWS, Watched, assert_same, drawn, use, watched
from transformers import AutoModelForSequenceClassification

from asyncrl.algorithms.reward_model import bradley_terry
from asyncrl.config import LoraConfig, RewardModelConfig
from asyncrl.contracts.offline_rows import PREFERENCE_SCHEMA, SIDES
from asyncrl.observe.metric_catalog import known_names
from asyncrl.preflight.specs import learner_spec

CENTER_COEF = 0.05
STEPS = 8


@dataclass(frozen=True)
class Observed:
    """What a rank computes."""

    learned: list[dict[str, float]]
    steps: dict[str, Watched]
    """By route."""
    held_out: dict[str, float]


@pytest.fixture(scope="module")
def pairs() -> pa.Table:
    columns: dict[str, Any] = {}
    for number, side in enumerate(SIDES):
        columns[f"{side}_ids"], columns[f"{side}_mask"] = drawn(ROWS, number)
    return pa.table(columns, schema=PREFERENCE_SCHEMA)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reward_models")


@pytest.fixture(scope="module")
def one_rank(model_path: Path, pairs: pa.Table, folder: Path) -> Observed:
    return on_ranks(1, observed, model_path, pairs, folder / "one", 1, None)[0]


@pytest.fixture(scope="module")
def two_ranks(model_path: Path, pairs: pa.Table, folder: Path) -> list[Observed]:
    return on_ranks(2, observed, model_path, pairs, folder / "two", 2, None)


@pytest.fixture(scope="module")
def classifier(one_rank: Observed, folder: Path) -> Any:
    """The exported model. Nothing of it may be missing or left over."""
    model, report = AutoModelForSequenceClassification.from_pretrained(
        folder / "one", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def plain_scores(model: Any, table: pa.Table) -> list[torch.Tensor]:
    """The scores of both sides by transformers alone, one sequence up to its last target at a
    time."""
    found = []
    for side in SIDES:
        ids, masks = (table[f"{side}_{what}"].to_pylist() for what in ("ids", "mask"))
        read = [row[: np.flatnonzero(mask)[-1] + 1] for row, mask in zip(ids, masks, strict=True)]
        assert read != ids, "some sides end with tokens that are no targets"
        found.append(torch.stack([model(torch.tensor([row])).logits[0, 0] for row in read]))
    return found


@pytest.mark.parametrize("route", ROUTES)
def test_packing_changes_neither_loss_nor_gradient(
    one_rank: Observed, classifier: Any, pairs: pa.Table, route: str
) -> None:
    loss = bradley_terry(*plain_scores(classifier, pairs), CENTER_COEF).mean()
    names, parameters = zip(*classifier.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    expected = loss.item(), dict(zip(names, gradients, strict=True))
    found = one_rank.steps[route]
    assert set(found.metrics) <= known_names()
    assert_same(found, expected, 2e-6)


def test_a_step_separates_the_sides(one_rank: Observed, classifier: Any, pairs: Any) -> None:
    first, last = one_rank.learned[0], one_rank.learned[-1]
    assert first["pref/accuracy"] == 0.0 and first["pref/loss"] == pytest.approx(np.log(2))
    assert last["pref/accuracy"] > 0.7 and last["pref/loss"] < first["pref/loss"]
    with torch.no_grad():
        chosen, rejected = plain_scores(classifier, pairs)
    step = one_rank.steps["together"].metrics
    assert step["pref/margin"] == pytest.approx(float((chosen - rejected).mean()), rel=1e-5)
    assert step["pref/chosen_reward"] == pytest.approx(float(chosen.mean()), rel=1e-5)
    assert step["pairs"] == ROWS and step["tokens"] == 2 * ROWS


@pytest.mark.slow
def test_two_ranks_that_share_rows_agree_with_one(
    one_rank: Observed, two_ranks: list[Observed]
) -> None:
    for found in (one_rank, *two_ranks):
        metrics = found.steps[MIXED].metrics
        assert 0 < metrics["long_pairs"] < ROWS
        for name, value in one_rank.held_out.items():
            assert found.held_out[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    for name, gradient in one_rank.steps[MIXED].gradients.items():
        for found in two_ranks:
            np.testing.assert_allclose(found.steps[MIXED].gradients[name], gradient, atol=2e-5)


@pytest.mark.slow
def test_an_adapter_is_merged_into_the_classifier(
    model_path: Path, pairs: pa.Table, folder: Path
) -> None:
    lora = LoraConfig(r=4)
    found = on_ranks(1, observed, model_path, pairs, folder / "adapter", 1, lora)[0]
    model = AutoModelForSequenceClassification.from_pretrained(
        folder / "adapter", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        chosen, rejected = plain_scores(model, pairs)
    assert abs(found.held_out["pref/margin"]) > 1e-3
    assert found.held_out["pref/margin"] == pytest.approx(
        float((chosen - rejected).mean()), abs=1e-5
    )
    assert not (folder / "adapter" / "adapter").exists()


def observed(
    rank: int, world_size: int, path: Path, table: pa.Table, target: Path, size: int, lora: Any
) -> Observed:
    """What a learner computes on the pairs before and after some steps. `size` ranks share rows."""
    from asyncrl.learning.engine.state import load_state
    from asyncrl.learning.rank import LearnerRank

    config = learner_config(
        path,
        world_size,
        1024,
        optimizer="sgd",
        learning_rate=0.1,
        sequence_parallel_size=size,
        max_grad_norm=1e6,
    )
    reward_model = RewardModelConfig(center_coef=CENTER_COEF)
    spec = replace(learner_spec(config), objective=reward_model, lora=lora)
    learner = LearnerRank(load_state(rank, spec), "run", 1)
    use(learner, 1024 // size, "rows")
    learned = [learner.reward_step(table) for _ in range(STEPS)]
    learner.export_hf(target, str(path))
    learner.reset_optimizer(0.0)
    steps = {}
    for route, (cap, packing) in ROUTES.items():
        if lora is None and (size == 1 or packing == "rows"):
            use(learner, cap // size, packing)
            steps[route] = watched(learner, partial(learner.reward_step, table))
    use(learner, 40 // size, "rows")
    held_out = learner.held_out_scores(table)
    learner.state.engine.destroy()
    return Observed(learned, steps, held_out)
