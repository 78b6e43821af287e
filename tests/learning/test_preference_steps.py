"""Preference and supervised steps under real ZeRO-3: however rows are packed, and over however many
ranks, loss and gradient are those of a plain loop over whole rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from plain_ranks import on_ranks
from recorded import VOCABULARY, learner_config
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.algorithms.preference import Completions, kto_baseline, kto_loss, pair_loss
from asyncrl.algorithms.preference_losses import Hinge, Ipo, Kto, Sigmoid, Simpo
from asyncrl.config import DpoConfig, RewardConfig, RolloutConfig, SftConfig, StalenessConfig
from asyncrl.config.algorithm import OnlinePreferenceConfig, PreferenceTraining
from asyncrl.contracts.messages import HeldOutLoss
from asyncrl.contracts.offline_rows import (
    BEHAVIOR_COLUMNS,
    MISMATCHED_COLUMNS,
    PREFERENCE_SCHEMA,
    REFERENCE,
    REFERENCE_COLUMNS,
    SFT_SCHEMA,
    SIDES,
    UNPAIRED_REFERENCE_COLUMN,
    UNPAIRED_SCHEMA,
    mismatched_rows,
)
from asyncrl.learning.spec import LearnerSpec, OnlineObjective
from asyncrl.observe.metric_catalog import known_names
from asyncrl.preflight.specs import learner_spec

OBJECTIVES: dict[str, DpoConfig | OnlinePreferenceConfig] = {
    "sigmoid": DpoConfig(loss=Sigmoid(beta=0.2)),
    "smoothed, with ce": DpoConfig(loss=Sigmoid(beta=0.2, label_smoothing=0.1), ce_coef=0.5),
    "sigmoid of means": DpoConfig(loss=Sigmoid(beta=2.0, length_normalized=True)),
    "ipo": DpoConfig(loss=Ipo(beta=0.5)),
    "hinge": DpoConfig(loss=Hinge(beta=0.2)),
    "simpo": DpoConfig(loss=Simpo(beta=2.0, simpo_margin=0.3)),
    "weighted": OnlinePreferenceConfig(loss=Sigmoid(beta=0.2), weight_cap=1.5),
    "kto": DpoConfig(loss=Kto(beta=0.2, desirable_weight=1.2, undesirable_weight=0.7)),
}
ROUTES: dict[str, tuple[int, str]] = {
    "together": (1024, "rows"),
    "some pairs apart": (40, "rows"),
    "one row each": (40, "none"),
}
"""Cap of a packed row, and packing. A side has at most 38 tokens, a pair at most 73."""
MIXED = "some pairs apart"

ROWS = 8
Lists = list[list[int]]
Expected = tuple[float, dict[str, torch.Tensor]]
"""Loss, and gradient by parameter."""
Metrics = dict[str, float]


@dataclass(frozen=True)
class Watched:
    """Metrics of a step, and its gradients over all ranks."""

    metrics: Metrics
    gradients: dict[str, torch.Tensor]


class Observed:
    """What a rank computes."""

    steps: dict[tuple[str, str], Watched]
    """By case and route."""
    held_out_preferences: Metrics
    held_out_unpaired: Metrics
    held_out: HeldOutLoss
    greedy: HeldOutLoss
    cut: HeldOutLoss
    lost: int
    """Targets that `cut` has not."""
    target_logprobs: dict[int, np.ndarray]
    skipped: list[tuple[str, Metrics, str]]
    """What has NaN, the step's metrics, and its note."""
    unchanged: bool
    learned: list[Metrics]
    """Of one rank alone."""


def drawn(rows: int, seed: int) -> tuple[Lists, list[list[bool]]]:
    """Token ids, and masks with several turns: a third of the completion is no target."""
    generator = np.random.default_rng(seed)
    ids, masks = [], []
    for _ in range(rows):
        prompt, length = int(generator.integers(1, 6)), int(generator.integers(2, 33))
        ids.append(generator.integers(3, VOCABULARY, prompt + length).tolist())
        turn = generator.random(length) < 0.7
        turn[0] = True
        masks.append([False] * prompt + turn.tolist())
    return ids, masks


def near(
    model: PreTrainedModel, table: pa.Table, ids: str, mask: str, seed: int, noise: float
) -> pa.Array:
    """The log-probs of a policy like this model, one for each target."""
    generator = np.random.default_rng(seed)
    rows = zip(table[ids].to_pylist(), table[mask].to_pylist(), strict=True)
    with torch.no_grad():
        found = [target_logprobs(model, *row).numpy() for row in rows]
    return pa.array(
        [(values + noise * generator.standard_normal(len(values))).tolist() for values in found],
        REFERENCE,
    )


def pairs_table(model: PreTrainedModel) -> pa.Table:
    """Every second pair has one context, which is computed once for both sides."""
    (chosen, chosen_mask), (rejected, rejected_mask) = drawn(ROWS, 0), drawn(ROWS, 1)
    for row in range(0, ROWS, 2):
        context = chosen[row][: chosen_mask[row].index(True)]
        old = rejected_mask[row].index(True)
        rejected[row][:old] = context
        rejected_mask[row][:old] = [False] * len(context)
    columns = [chosen, chosen_mask, rejected, rejected_mask]
    table = pa.table(columns, schema=PREFERENCE_SCHEMA)
    for number, side in enumerate(SIDES):
        for name, noise in ((REFERENCE_COLUMNS[number], 0.5), (BEHAVIOR_COLUMNS[number], 0.1)):
            values = near(model, table, f"{side}_ids", f"{side}_mask", 10 + number, noise)
            table = table.append_column(name, values)
    return table


def unpaired_table(model: PreTrainedModel) -> pa.Table:
    ids, masks = drawn(ROWS, 3)
    labels = [row % 3 != 0 for row in range(ROWS)]
    table = pa.table(
        {"input_ids": ids, "loss_mask": masks, "label": labels}, schema=UNPAIRED_SCHEMA
    )
    other = mismatched_rows(table)
    reference = near(model, table, "input_ids", "loss_mask", 30, 0.5)
    of_other = near(model, other, "input_ids", "loss_mask", 31, 0.5)
    added = (reference, other["input_ids"], other["loss_mask"], of_other)
    for name, column in zip((UNPAIRED_REFERENCE_COLUMN, *MISMATCHED_COLUMNS), added, strict=True):
        table = table.append_column(name, column)
    return table


def sft_table() -> pa.Table:
    ids, masks = drawn(ROWS, 5)
    return pa.table({"input_ids": ids, "loss_mask": masks}, schema=SFT_SCHEMA)


def greedy_table(model: PreTrainedModel) -> pa.Table:
    """A row of the model's likeliest tokens, and one that differs from it in a token."""
    ids = [5, 6]
    for _ in range(4):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    wrong = [*ids[:-1], (ids[-1] + 1) % VOCABULARY, 7]
    return pa.table(
        {
            "input_ids": [ids, wrong],
            "loss_mask": [[False, False] + [True] * 4, [False, False] + [True] * 5],
        },
        schema=SFT_SCHEMA,
    )


Tables = dict[str, pa.Table]
SAMPLED = RolloutConfig(max_completion_length=8)
CASES = (*OBJECTIVES, "sft")


@pytest.fixture(scope="module")
def plain_model(model_path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def tables(plain_model: PreTrainedModel) -> Tables:
    """The rows of each case."""
    return dict.fromkeys(OBJECTIVES, pairs_table(plain_model)) | {
        "kto": unpaired_table(plain_model),
        "sft": sft_table(),
        "greedy": greedy_table(plain_model),
    }


# The plain loop


def target_logprobs(model: PreTrainedModel, ids: list[int], mask: list[bool]) -> torch.Tensor:
    """The log-probs of a row's targets, by transformers alone."""
    tokens = torch.tensor([ids])
    logprobs = model(input_ids=tokens, use_cache=False).logits[0, :-1].double().log_softmax(-1)
    return logprobs.gather(1, tokens[0, 1:, None])[:, 0][torch.tensor(mask[1:])]


def plain_sums(model: PreTrainedModel, table: pa.Table, ids: str, mask: str) -> torch.Tensor:
    rows = zip(table[ids].to_pylist(), table[mask].to_pylist(), strict=True)
    return torch.stack([target_logprobs(model, *row).sum() for row in rows])


def of_column(table: pa.Table, name: str) -> torch.Tensor:
    return torch.tensor([math.fsum(row) for row in table[name].to_pylist()], dtype=torch.float64)


def plain_loss(model: PreTrainedModel, name: str, table: pa.Table) -> torch.Tensor:
    """The loss of a whole step."""
    if name == "sft":
        rows = zip(table["input_ids"].to_pylist(), table["loss_mask"].to_pylist(), strict=True)
        return -torch.cat([target_logprobs(model, *row) for row in rows]).mean()
    objective = OBJECTIVES[name]
    if isinstance(objective.loss, Kto):
        with torch.no_grad():
            mismatched = plain_sums(model, table, *MISMATCHED_COLUMNS[:2])
        ratios = mismatched - of_column(table, MISMATCHED_COLUMNS[2])
        baseline = kto_baseline(float(ratios.sum()), len(ratios))
        assert baseline > 0.1
        completions = Completions(
            plain_sums(model, table, "input_ids", "loss_mask"),
            torch.tensor([sum(mask) for mask in table["loss_mask"].to_pylist()]),
            of_column(table, UNPAIRED_REFERENCE_COLUMN),
        )
        labels = torch.tensor(table["label"].to_pylist())
        return kto_loss(completions, labels, baseline, objective.loss).loss.mean()
    sides = [
        Completions(
            plain_sums(model, table, f"{side}_ids", f"{side}_mask"),
            torch.tensor([sum(mask) for mask in table[f"{side}_mask"].to_pylist()]),
            of_column(table, REFERENCE_COLUMNS[number]),
            of_column(table, BEHAVIOR_COLUMNS[number]),
        )
        for number, side in enumerate(SIDES)
    ]
    loss = pair_loss(sides[0], sides[1], objective.loss, objective.weight_cap).loss.mean()
    if objective.ce_coef:
        loss = loss - objective.ce_coef * sides[0].logprobs.sum() / sides[0].tokens.sum()
    return loss


@pytest.fixture(scope="module")
def plain(plain_model: PreTrainedModel, tables: Tables) -> dict[str, Expected]:
    """Loss and gradient of each case, one whole row at a time."""
    found = {}
    for name in CASES:
        loss = plain_loss(plain_model, name, tables[name])
        names, parameters = zip(*plain_model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(loss, parameters)
        found[name] = loss.item(), dict(zip(names, gradients, strict=True))
    return found


def assert_same(found: Watched, expected: Expected, within: float) -> None:
    loss, gradients = expected
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert largest > 0.01 and found.metrics["applied"] == 1.0
    assert found.metrics["loss"] == pytest.approx(loss, abs=within, rel=within)
    assert found.gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        apart = float((found.gradients[name] - gradient).abs().max())
        assert apart <= within * max(1.0, largest), (name, apart, largest)


@pytest.fixture(scope="module")
def one_rank(model_path: Path, tables: Tables) -> Observed:
    return on_ranks(1, observed, model_path, tables, 1, list(product(CASES, ROUTES)))[0]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, 1, ("sigmoid", "weighted", "kto", "sft")), marks=pytest.mark.slow),
        pytest.param((2, 2, ("smoothed, with ce", "kto", "sft")), marks=pytest.mark.slow),
        pytest.param((4, 2, CASES), marks=pytest.mark.faults),
    ],
    ids=["two ranks", "two ranks that share rows", "two pairs of ranks"],
)
def ranks(request: pytest.FixtureRequest, model_path: Path, tables: Tables) -> list[Observed]:
    world_size, size, cases = request.param
    wanted = [(case, MIXED) for case in cases]
    return on_ranks(world_size, observed, model_path, tables, size, wanted)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", CASES)
def test_packing_changes_neither_loss_nor_gradient(
    one_rank: Observed,
    plain: dict[str, Expected],
    case: str,
    route: str,
) -> None:
    assert_same(one_rank.steps[case, route], plain[case], 2e-6)


def test_several_ranks_compute_the_same_as_one(
    ranks: list[Observed], plain: dict[str, Expected]
) -> None:
    for rank in ranks:
        assert len(rank.steps) >= 3
        for step, found in rank.steps.items():
            assert_same(found, plain[step[0]], 2e-6)
            for name, value in ranks[0].steps[step].metrics.items():
                same = found.metrics[name] == value
                assert same or name in ("step_s", "tokens_per_s"), (step, name)


@pytest.mark.parametrize("case", [name for name in OBJECTIVES if name != "kto"])
def test_pairs_stay_together_where_they_fit(one_rank: Observed, case: str) -> None:
    longs = [one_rank.steps[case, route].metrics["long_pairs"] for route in ROUTES]
    assert longs[0] == 0 and 0 < longs[1] < ROWS and longs[2] == ROWS
    together, some = (one_rank.steps[case, route] for route in list(ROUTES)[:2])
    assert together.metrics["micro_batches"] == 1 and some.metrics["micro_batches"] > 4
    assert set(together.metrics) <= known_names()
    for name in together.metrics:
        if name.startswith(("pref/", "ce/")):
            for route in ROUTES:
                found = one_rank.steps[case, route].metrics[name]
                assert found == pytest.approx(together.metrics[name], rel=1e-5, abs=1e-6), name


def test_metrics_are_means_over_pairs(one_rank: Observed, tables: Tables) -> None:
    metrics = one_rank.steps["smoothed, with ce", "together"].metrics
    assert metrics["pref/margin"] == pytest.approx(
        metrics["pref/chosen_reward"] - metrics["pref/rejected_reward"]
    )
    assert metrics["loss"] == pytest.approx(metrics["pref/loss"] + 0.5 * metrics["ce/loss"])
    targets = sum(map(sum, tables["sigmoid"]["chosen_mask"].to_pylist()))
    assert metrics["ce/loss"] == pytest.approx(-metrics["pref/chosen_logprob"] * ROWS / targets)
    assert 0 < metrics["pref/accuracy"] < 1 and metrics["pairs"] == ROWS
    weighted = one_rank.steps["weighted", "together"].metrics
    assert 0 < weighted["pref/capped_fraction"] < 1 and weighted["pref/weight_mean"] < 1.5
    kto = one_rank.steps["kto", "together"].metrics
    assert kto["pref/kl"] > 0.1 and 0 < kto["pref/accuracy"] < 1 and kto["completions"] == ROWS
    assert kto["pref/margin"] == pytest.approx(
        kto["pref/chosen_reward"] - kto["pref/rejected_reward"]
    )


def test_evaluation_has_the_metrics_of_a_step(one_rank: Observed, ranks: list[Observed]) -> None:
    step = one_rank.steps["ipo", "together"].metrics
    for found in (one_rank, *ranks):
        assert found.held_out_preferences["pairs"] == ROWS
        for name, value in found.held_out_preferences.items():
            assert value == pytest.approx(step[name], rel=1e-5, abs=1e-6), name


def test_held_out_completions_have_the_metrics_of_a_kto_step(
    one_rank: Observed, ranks: list[Observed]
) -> None:
    step = one_rank.steps["kto", "together"].metrics
    for found in (one_rank, *ranks):
        assert found.held_out_unpaired["completions"] == ROWS
        assert {"pref/kl", "pref/margin", "pref/accuracy"} <= set(found.held_out_unpaired)
        for name, value in found.held_out_unpaired.items():
            assert value == pytest.approx(step[name], rel=1e-5, abs=1e-6), name


def test_held_out_rows_have_the_loss_of_a_plain_loop(
    one_rank: Observed, ranks: list[Observed], plain_model: PreTrainedModel
) -> None:
    """The model's own likeliest tokens make one row exact."""
    table = sft_table()
    rows = list(zip(table["input_ids"].to_pylist(), table["loss_mask"].to_pylist(), strict=True))
    with torch.no_grad():
        expected = [target_logprobs(plain_model, *row).numpy() for row in rows]
    tokens = sum(map(len, expected))
    for found in (one_rank, *ranks):
        assert found.held_out.tokens == tokens and found.held_out.exact == 0.0
        assert found.held_out.loss == pytest.approx(-np.concatenate(expected).mean(), rel=1e-6)
        assert found.greedy.exact == 0.5 and found.greedy.tokens == 9
        assert found.cut.tokens == tokens - found.lost < tokens
    merged = {index: values for found in ranks for index, values in found.target_logprobs.items()}
    assert sorted(merged) == sorted(one_rank.target_logprobs) == list(range(ROWS))
    for index, values in enumerate(expected):
        for logprobs in (merged, one_rank.target_logprobs):
            np.testing.assert_allclose(logprobs[index], values, atol=1e-5)


def test_a_pair_with_nan_is_skipped_by_all_ranks_and_named(
    ranks: list[Observed],
) -> None:
    """The NaN is a reference log-prob of a pair that stays together, and of one that does not."""
    for rank in ranks:
        for what, metrics, note in rank.skipped:
            assert metrics["applied"] == 0.0 and metrics["nonfinite_loss"] >= 1
            assert f"from the {what} with the tokens [3, 4, " in note, note
        assert rank.unchanged


def test_steps_separate_the_sides(one_rank: Observed) -> None:
    first, last = one_rank.learned[0], one_rank.learned[-1]
    assert last["pref/accuracy"] == 1.0 and last["pref/loss"] < first["pref/loss"] / 2
    assert [metrics["learning_rate"] for metrics in one_rank.learned[:3]] == pytest.approx(
        [0.005, 0.01, 0.01]
    ), "the schedule's warm-up of two steps"


def observed(
    rank: int,
    world_size: int,
    path: Path,
    tables: Tables,
    size: int,
    wanted: list[tuple[str, str]],
) -> Observed:
    """What a learner computes in the wanted cases and routes. `size` ranks share rows. Its learning
    rate is 0 until the last steps, so all steps see the same weights."""
    from asyncrl.learning.engine.state import load_state
    from asyncrl.learning.rank import LearnerRank

    config = learner_config(
        path,
        world_size,
        1024,
        optimizer="sgd",
        learning_rate=0.0,
        sequence_parallel_size=size,
        find_nonfinite=True,
        max_grad_norm=1e6,
    )
    learner = LearnerRank(load_state(rank, learner_spec(config)), "run", 1)
    found, found.steps = Observed(), {}
    for case, route in wanted:
        cap, packing = ROUTES[route]
        use(learner, cap // size, packing)
        learner.state.spec = training(learner.state.spec, case)
        step = learner.supervised_step if case == "sft" else learner.preference_step
        found.steps[case, route] = watched(learner, partial(step, tables[case]))
    evaluate(learner, tables, found, size)
    skip(learner, tables["sigmoid"], found, size)
    if world_size == 1:
        use(learner, 1024, "rows")
        learner.reset_optimizer(0.01, warmup_steps=2)
        found.learned = [learner.preference_step(tables["sigmoid"]) for _ in range(20)]
    learner.state.engine.destroy()
    return found


def training(spec: LearnerSpec, case: str) -> LearnerSpec:
    """The settings of a learner that trains this case."""
    objective = OBJECTIVES.get(case, SftConfig())
    if not isinstance(objective, OnlinePreferenceConfig):
        return replace(spec, objective=objective)
    algorithm = PreferenceTraining(preference=objective)
    online = OnlineObjective(algorithm, SAMPLED, RewardConfig(), StalenessConfig())
    return replace(spec, objective=online)


def use(learner: Any, cap: int, packing: Any) -> None:
    """Change the cap of a micro-batch, and how rows are packed."""
    state = learner.state
    changed = state.spec.learner.model_copy(update={"max_tokens_per_gpu": cap})
    state.spec = replace(state.spec, learner=changed)
    state.packing = packing


def watched(learner: Any, step: Callable[[], dict[str, float]]) -> Watched:
    """Metrics of a step, and its gradients over all ranks."""
    from deepspeed.utils import safe_get_full_grad

    from asyncrl.learning.engine import zero

    gradients: dict[str, torch.Tensor] = {}
    finite = zero.gradients_finite

    def recording(engine: Any) -> bool:
        for name, parameter in learner.state.parameters.items():
            gradients[name] = safe_get_full_grad(parameter).detach().clone()
        return finite(engine)

    zero.gradients_finite = recording
    try:
        metrics = step()
    finally:
        zero.gradients_finite = finite
    return Watched(metrics, gradients)


def evaluate(learner: Any, tables: Tables, found: Observed, size: int) -> None:
    use(learner, 40 // size, "rows")
    learner.state.spec = training(learner.state.spec, "ipo")
    found.held_out_preferences = learner.held_out_preferences(tables["ipo"])
    learner.state.spec = training(learner.state.spec, "kto")
    found.held_out_unpaired = learner.held_out_preferences(tables["kto"])
    found.held_out = learner.held_out_loss(tables["sft"])
    found.target_logprobs = learner.target_logprobs(tables["sft"])
    found.greedy = learner.held_out_loss(tables["greedy"])
    use(learner, 16 // size, "rows")
    found.cut = learner.held_out_loss(tables["sft"])
    # Nothing predicts the tokens at multiples of the cap.
    found.lost = sum(sum(mask[16::16]) for mask in tables["sft"]["loss_mask"].to_pylist())


def skip(learner: Any, table: pa.Table, found: Observed, size: int) -> None:
    """Steps with NaN in one pair."""
    import logging

    state, notes = learner.state, list[str]()

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            notes.append(record.getMessage())

    logger, handler = logging.getLogger("asyncrl.learning.steps.preference_step"), Notes()
    logger.addHandler(handler)
    state.spec = training(state.spec, "sigmoid")
    learner.reset_optimizer(0.5)
    before = [parameter.ds_tensor.clone() for parameter in state.parameters.values()]
    column = table[REFERENCE_COLUMNS[0]].to_pylist()
    column[4][0] = float("nan")
    ids = table["chosen_ids"].to_pylist()
    ids[4][:2] = [3, 4]
    bad = table.set_column(
        table.column_names.index(REFERENCE_COLUMNS[0]),
        REFERENCE_COLUMNS[0],
        pa.array(column, REFERENCE),
    ).set_column(0, "chosen_ids", pa.array(ids, PREFERENCE_SCHEMA.field("chosen_ids").type))
    found.skipped = []
    for what, cap, packing in (("pair", 1024, "rows"), ("row", 40, "none")):
        use(learner, cap // size, packing)
        metrics = learner.preference_step(bad)
        found.skipped.append((what, metrics, notes[-1]))
    found.unchanged = all(
        torch.equal(old, parameter.ds_tensor)
        for old, parameter in zip(before, state.parameters.values(), strict=True)
    )
    logger.removeHandler(handler)
