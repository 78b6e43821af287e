"""Tables of fixed rows as examples: what each column becomes, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from recorded import learner_config, state_without_model

from asyncrl.algorithms.loss_metrics import supervised_sums
from asyncrl.algorithms.preference_losses import Kto
from asyncrl.config import DpoConfig
from asyncrl.contracts.offline_rows import (
    BEHAVIOR_COLUMNS,
    MISMATCHED_COLUMNS,
    PREFERENCE_SCHEMA,
    REFERENCE,
    REFERENCE_COLUMNS,
    SFT_SCHEMA,
    UNPAIRED_REFERENCE_COLUMN,
    UNPAIRED_SCHEMA,
    mismatched_rows,
    token_table,
)
from asyncrl.learning.examples.offline_examples import examples_with, pairs_of, unpaired_of
from asyncrl.learning.steps import preference_step
from asyncrl.learning.steps.components import CE, Component, ce_loss, weighted_sum, with_token_mean
from asyncrl.models.micro_batches import Example, micro_batch, token_example

PAIRS = pa.table(
    {
        "chosen_ids": [[1, 2, 3, 4, 5], [6, 7]],
        "chosen_mask": [[False, False, True, False, True], [False, True]],
        "rejected_ids": [[1, 2, 8], [6, 9, 9]],
        "rejected_mask": [[False, False, True], [False, True, True]],
    },
    schema=PREFERENCE_SCHEMA,
)
UNPAIRED = pa.table(
    {
        "input_ids": [[1, 2, 3], [4, 5, 6, 7]],
        "loss_mask": [[False, False, True], [False, True, False, True]],
        "label": [True, False],
    },
    schema=UNPAIRED_SCHEMA,
)


def with_column(table: pa.Table, name: str, values: Any, kind: Any = REFERENCE) -> pa.Table:
    return table.append_column(name, pa.array(values, kind))


def scored_pairs() -> pa.Table:
    table = with_column(PAIRS, REFERENCE_COLUMNS[0], [[-1.0, -2.0], [-3.0]])
    return with_column(table, REFERENCE_COLUMNS[1], [[-4.0], [-5.0, -6.0]])


def test_log_probs_stand_at_the_targets_of_their_side() -> None:
    (first, _), (second, third) = pairs_of(scored_pairs(), reference=True, behavior=False)
    assert first.reference_logprobs is not None and third.reference_logprobs is not None
    assert first.tokens.tolist() == [1, 2, 3, 4, 5] and first.prompt_length == 1
    assert first.loss_mask.tolist() == [False, True, False, True]
    assert first.reference_logprobs.tolist() == [0.0, -1.0, 0.0, -2.0]
    assert third.reference_logprobs.tolist() == [-5.0, -6.0]
    assert (second.chosen, third.chosen) == (True, False)


def test_a_slice_has_the_rows_of_the_slice() -> None:
    ((chosen, rejected),) = pairs_of(scored_pairs().slice(1), reference=True, behavior=False)
    assert chosen.tokens.tolist() == [6, 7] and rejected.tokens.tolist() == [6, 9, 9]
    assert rejected.reference_logprobs is not None
    assert rejected.reference_logprobs.tolist() == [-5.0, -6.0]


def test_rows_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ValueError, match="column 'chosen_reference' is missing"):
        pairs_of(PAIRS, reference=True, behavior=False)
    wrong = with_column(PAIRS, BEHAVIOR_COLUMNS[0], [[-1.0], [-3.0]])
    with pytest.raises(ValueError, match="row 0: 'chosen_behavior' has 1 values for 2 targets"):
        pairs_of(wrong, reference=False, behavior=True)
    empty = PAIRS.set_column(
        3, PREFERENCE_SCHEMA.field(3), pa.array([[False, False, True], [False] * 3])
    )
    with pytest.raises(ValueError, match="row 1: 'rejected_mask' marks no token"):
        pairs_of(empty, reference=False, behavior=False)
    with pytest.raises(ValueError, match="no token rows"):
        pairs_of(pa.table({"prompt": ["a"]}), reference=False, behavior=False)


def test_a_step_refuses_what_it_cannot_train(tmp_path: Path) -> None:
    state = state_without_model(learner_config(tmp_path / "model"))
    objective = DpoConfig()
    with pytest.raises(ValueError, match="got no rows"):
        preference_step.preference_step(state, PAIRS.slice(0, 0), objective)
    with pytest.raises(ValueError, match="column 'chosen_reference' is missing"):
        preference_step.preference_step(state, PAIRS, objective)
    with pytest.raises(ValueError, match="no held-out pairs"):
        preference_step.held_out_preferences(state, scored_pairs().slice(0, 0), objective)
    with pytest.raises(ValueError, match="column 'mismatched_ids' is missing"):
        scored = with_column(UNPAIRED, UNPAIRED_REFERENCE_COLUMN, [[-1.0], [-2.0, -3.0]])
        preference_step.preference_step(state, scored, DpoConfig(loss=Kto()))


def test_mismatched_rows_have_the_completion_of_the_next_row() -> None:
    found = mismatched_rows(UNPAIRED)
    assert found.schema == SFT_SCHEMA
    assert found.to_pydict() == {
        "input_ids": [[1, 2, 5, 6, 7], [4, 3]],
        "loss_mask": [[False, False, True, False, True], [False, True]],
    }
    assert mismatched_rows(found.slice(1)).to_pydict() == found.slice(1).to_pydict()
    with pytest.raises(ValueError, match="row 0 has no target"):
        mismatched_rows(pa.table({"input_ids": [[1]], "loss_mask": [[False]]}, schema=SFT_SCHEMA))


def test_mismatched_rows_have_the_completion_of_another_prompt() -> None:
    """Both completions of a pair follow one another, and are of the same prompt."""
    ids = [[1, 10], [1, 11], [2, 12], [2, 13]]
    table = pa.table({"input_ids": ids, "loss_mask": [[False, True]] * 4}, schema=SFT_SCHEMA)
    found = mismatched_rows(table)
    assert found["input_ids"].to_pylist() == [[1, 13], [1, 13], [2, 11], [2, 11]]
    alike = mismatched_rows(table.slice(0, 2))
    assert alike["input_ids"].to_pylist() == [[1, 11], [1, 10]], "there is no other prompt"


def kto_rows(labels: list[bool]) -> pa.Table:
    table = UNPAIRED.set_column(2, UNPAIRED_SCHEMA.field(2), pa.array(labels))
    other = mismatched_rows(UNPAIRED)
    table = with_column(table, UNPAIRED_REFERENCE_COLUMN, [[-1.0], [-2.0, -3.0]])
    for name, column in zip(MISMATCHED_COLUMNS, other.columns, strict=False):
        table = table.append_column(name, column)
    return with_column(table, MISMATCHED_COLUMNS[2], [[-4.0, -4.0], [-4.0]])


def test_unpaired_rows_have_their_labels_and_other_completions() -> None:
    rows = unpaired_of(kto_rows([True, False]))
    assert [row.chosen for row in rows.completions] == [True, False]
    assert [row.tokens.tolist() for row in rows.mismatched] == [[1, 2, 5, 6, 7], [4, 3]]
    assert rows.mismatched[1].reference_logprobs is not None
    assert rows.mismatched[1].reference_logprobs.tolist() == [-4.0]


@pytest.mark.parametrize("mean", [-3.5, -4.5, float("nan")])
def test_ktos_baseline_and_the_metrics_of_an_absent_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mean: float
) -> None:
    """The reference is at -4 nats for each of the three mismatched tokens, in two completions."""
    state = state_without_model(learner_config(tmp_path / "model"))

    def sums(state: Any, examples: list[Example], temperature: float) -> torch.Tensor:
        return torch.tensor([mean * example.loss_tokens for example in examples])

    monkeypatch.setattr(preference_step, "side_sums", sums)
    found = preference_step._unpaired(state, kto_rows([True, True]), Kto(), 1.0)
    expected = max(3 * (mean + 4) / 2, 0.0)
    assert found.added["pref/kl"] == pytest.approx(expected, nan_ok=True)
    absent = {name for name, value in found.added.items() if math.isnan(value)} - {"pref/kl"}
    assert absent == {"pref/margin", "pref/rejected_reward", "pref/rejected_logprob"}


def test_token_tables_have_the_rows_of_a_warm_start() -> None:
    table = token_table([((1, 2), (3,)), ((4,), (5, 6))])
    assert table.schema == SFT_SCHEMA
    examples = examples_with(table, "input_ids", "loss_mask")
    for found, row in zip(examples, [((1, 2), (3,)), ((4,), (5, 6))], strict=True):
        batch = micro_batch([found], [0], "cpu")
        expected = micro_batch([token_example(row)], [0], "cpu")
        assert batch.targets.tolist() == expected.targets.tolist()
        assert batch.select.tolist() == expected.select.tolist()


def test_components_are_summed_with_their_weights_and_have_their_own_denominators() -> None:
    """Component `ce` is a mean over the three targets of the chosen sides of the step, here in two
    micro-batches. The first component is the sum over all targets."""
    sides = [side for pair in pairs_of(PAIRS, reference=False, behavior=False) for side in pair]
    examples = with_token_mean(sides, CE, lambda example: bool(example.chosen))

    def total(logprobs: torch.Tensor, *_: Any) -> Any:
        found = logprobs.sum()
        return found, supervised_sums(found, logprobs, {"pref/loss": found})

    loss = weighted_sum([Component(1.0, total), Component(0.5, ce_loss)])
    sums = []
    for indices in ((0, 1), (2, 3)):
        batch = micro_batch(examples, indices, "cpu")
        logprobs = -torch.arange(1.0, 1 + len(batch.targets))
        found, reported = loss(logprobs, logprobs, logprobs, batch)
        assert found == reported.loss
        sums.append((float(found), {name: float(part) for name, part in reported.parts.items()}))
    # (0, 1): targets of the chosen side first, -1 and -2, then -3. (2, 3): -1 and -2 of the
    # rejected side, then -3 of the chosen side.
    assert sums[0][0] == pytest.approx(-6 + 0.5 * (1 + 2) / 3)
    assert sums[0][1] == pytest.approx({"pref/loss": -6.0, "ce/loss": 1.0})
    assert sums[1][0] == pytest.approx(-6 + 0.5 * 3 / 3)
    assert sums[1][1] == pytest.approx({"pref/loss": -6.0, "ce/loss": 1.0})
    stand_in = micro_batch(examples, [], "cpu")
    none = torch.zeros(0)
    assert loss(none, none, none, stand_in)[0] == 0
    assert np.isclose(sum(example.components[CE].sum() for example in examples[::2]), 1.0)
