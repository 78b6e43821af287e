"""asyncrl's learner computes what TRL's trainers compute: losses, gradient norms and rewards of the
steps that `trl_fixtures.py` recorded, under real ZeRO-3.

A plain loop without either shows what the records contain.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from agreement_cases import (
    ADAM_BETAS,
    ADAM_EPS,
    BATCH,
    CASES,
    STEPS,
    Case,
    digest,
    make_model,
    pairs,
    sft_rows,
    unpaired,
)
from plain_ranks import on_ranks
from recorded import learner_config

from asyncrl.contracts.offline_rows import (
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

RECORDED = json.loads((Path(__file__).parent / "trl.json").read_text())
TOLERANCE = 1e-4
"""Largest difference of a number x, relative to max(1, |x|)."""
NAMES = {
    "rewards/accuracies": "pref/accuracy",
    "rewards/chosen": "pref/chosen_reward",
    "rewards/rejected": "pref/rejected_reward",
    "rewards/margins": "pref/margin",
    "logps/chosen": "pref/chosen_logprob",
    "logps/rejected": "pref/rejected_logprob",
    "kl": "pref/kl",
}
"""TRL's metric → asyncrl's."""
UNLIKE = {
    "dpo_ipo": ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    "dpo_normalized": (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margins",
        "rewards/accuracies",
    ),
    "simpo": ("logps/chosen", "logps/rejected"),
}
"""Case → TRL's metrics that mean something else. Its rewards are of sums where the loss uses means,
and its log-probs of SimPO are means."""


@dataclass(frozen=True)
class Run:
    """One way to train the same steps, and the cases that train so."""

    name: str
    world_size: int
    settings: dict[str, Any]
    micro_batches: tuple[int, int]
    """Fewest and most micro-batches of a step, over all ranks."""
    long_pairs: int
    """Pairs, of all steps, that are longer than a micro-batch and take two passes."""
    cases: tuple[str, ...]
    marks: tuple[pytest.MarkDecorator, ...] = ()


PACKED = Run(
    "packed",
    1,
    {"max_tokens": 4096},
    (1, 1),
    0,
    ("sft_turns", "dpo_ipo", "dpo_hinge", "dpo_with_sft", "simpo", "kto"),
)
TWO_RANKS = Run(
    "two ranks", 2, {"max_tokens": 100}, (2, 12), 2, ("sft", "dpo_sigmoid"), (pytest.mark.slow,)
)
ONE_BY_ONE = Run(
    "one by one",
    1,
    {"packing": "none"},
    (BATCH, 2 * BATCH),
    STEPS * BATCH,
    ("sft", "dpo_with_sft", "kto"),
    marks=(pytest.mark.faults,),
)
RUNS = (
    PACKED,
    TWO_RANKS,
    replace(
        PACKED,
        cases=tuple(name for name in CASES if name not in PACKED.cases),
        marks=(pytest.mark.slow,),
    ),
    # One case of each trainer: the losses differ in the same way on one rank.
    replace(
        TWO_RANKS, cases=("sft_turns", "dpo_with_sft", "simpo", "kto"), marks=(pytest.mark.slow,)
    ),
    ONE_BY_ONE,
)
PARAMETERS = [
    pytest.param(
        run,
        case,
        id=f"{run.name}-{case}",
        marks=run.marks,
    )
    for run in RUNS
    for case in run.cases
]
PLAIN = ("sft", "dpo_sigmoid", "simpo", "kto")
"""Cases of the plain loop in the default tests: one for each trainer."""
Trained = dict[str, list[dict[str, float]]]
"""Case → the metrics of each step."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agreement") / "model"
    make_model(path)
    return path


@pytest.fixture(scope="module")
def trained(model_path: Path) -> Callable[[Run], Trained]:
    """Run → what its first rank found. Its ranks train all cases one after the other, once."""
    found: dict[tuple[str, tuple[str, ...]], Trained | AssertionError] = {}

    def train(run: Run) -> Trained:
        key = run.name, run.cases
        if key not in found:
            try:
                found[key] = on_ranks(
                    run.world_size, train_cases, model_path, run.settings, run.cases
                )[0]
            except AssertionError as error:
                found[key] = error
        known = found[key]
        if isinstance(known, AssertionError):
            raise known
        return known

    return train


def test_the_records_are_of_this_model_and_these_rows() -> None:
    assert RECORDED["task"] == digest() and set(RECORDED["cases"]) == set(CASES)
    for name, record in RECORDED["cases"].items():
        case, settings = CASES[name], record["settings"]
        assert settings == {field: getattr(case, field) for field in settings}
        norms = record["columns"]["grad_norm"]
        assert len(norms) == STEPS
        assert min(norms) < case.max_grad_norm < max(norms), "clips some steps, and not others"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in PLAIN else [pytest.mark.slow]) for name in CASES],
)
def test_a_plain_loop_computes_what_trl_recorded(name: str, model_path: Path) -> None:
    import torch
    from plain_loop import plain_loop

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = plain_loop(CASES[name], model_path)
    finally:
        torch.set_num_threads(threads)
    expected = RECORDED["cases"][name]["columns"]
    assert set(found) == set(expected)
    for column, values in expected.items():
        assert difference(found[column], values) < TOLERANCE, column


@pytest.mark.parametrize(("run", "name"), PARAMETERS)
def test_the_learner_computes_what_trl_recorded(
    trained: Callable[[Run], Trained], run: Run, name: str
) -> None:
    case, expected, steps = CASES[name], RECORDED["cases"][name]["columns"], trained(run)[name]
    fewest, most = run.micro_batches
    assert all(step["applied"] and fewest <= step["micro_batches"] <= most for step in steps)
    if case.trainer in ("dpo", "cpo"):
        assert sum(step["long_pairs"] for step in steps) == run.long_pairs
    apart = {}
    for column, values in expected.items():
        if column in UNLIKE.get(name, ()):
            continue
        # At the first step all rewards are 0, and rounding decides which is larger.
        start = 1 if column == "rewards/accuracies" and case.trainer != "cpo" else 0
        found = [step[NAMES.get(column, column)] for step in steps]
        apart[column] = difference(found[start:], values[start:])
    print(f"{run.name}, {name}: largest differences {apart}")
    assert max(apart.values()) < TOLERANCE, apart


def difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Largest difference relative to max(1, |x|), over the steps."""
    assert len(found) == len(expected) and all(map(math.isfinite, found))
    return max(abs(own - x) / max(1.0, abs(x)) for own, x in zip(found, expected, strict=True))


def train_cases(
    rank: int, world_size: int, path: Path, settings: dict[str, Any], names: Sequence[str]
) -> Trained:
    """Train cases with a fresh learner each."""
    return {
        name: train_case(rank, learner_spec_of(CASES[name], world_size, path, settings), name)
        for name in names
    }


def learner_spec_of(case: Case, world_size: int, path: Path, settings: dict[str, Any]) -> Any:
    from asyncrl.config import DpoConfig
    from asyncrl.preflight.specs import learner_spec

    only_adam = {"betas": ADAM_BETAS, "eps": ADAM_EPS}
    config = learner_config(
        path,
        world_size=world_size,
        **settings,
        optimizer={
            "name": case.optimizer,
            **(only_adam if case.optimizer == "adamw" else {}),
        },
        learning_rate=case.learning_rate,
        max_grad_norm=case.max_grad_norm,
        weight_decay=case.weight_decay,
        schedule=case.schedule,
    )
    spec = replace(learner_spec(config), max_steps=STEPS)
    if not case.preference:
        return spec
    return replace(spec, objective=DpoConfig.model_validate(case.preference))


def train_case(rank: int, spec: Any, name: str) -> list[dict[str, float]]:
    """The metrics of each step of a case."""
    from asyncrl.learning.engine.state import load_state
    from asyncrl.learning.rank import LearnerRank

    learner, case = LearnerRank(load_state(rank, spec), "run", 1), CASES[name]
    steps = [
        learner.supervised_step(table, scheduled=True)
        if case.trainer == "sft"
        else learner.preference_step(table)
        for table in tables(case, learner)
    ]
    learner.state.engine.destroy()
    return steps


def tables(case: Case, learner: Any) -> list[pa.Table]:
    """The table of each step, with the reference's log-probs where the loss needs them: those of
    the learner before its first step."""
    if case.trainer == "sft":
        rows = [(row.ids, row.mask) for row in sft_rows(case.rows)]
        return steps_of(sequences(rows))
    if case.trainer == "kto":
        return [with_mismatched(learner, table) for table in steps_of(unpaired_table(learner))]
    sides = {
        side: sequences([marked(pair.prompt, getattr(pair, side)) for pair in pairs()])
        for side in SIDES
    }
    table = pa.table([column for side in SIDES for column in sides[side]], schema=PREFERENCE_SCHEMA)
    if case.trainer == "dpo":
        for name, side in zip(REFERENCE_COLUMNS, SIDES, strict=True):
            table = table.append_column(name, reference(learner, sides[side]))
    return steps_of(table)


def unpaired_table(learner: Any) -> pa.Table:
    rows = sequences([marked(row.prompt, row.completion) for row in unpaired()])
    labels = pa.array([row.label for row in unpaired()])
    return pa.table([*rows, labels], schema=UNPAIRED_SCHEMA).append_column(
        UNPAIRED_REFERENCE_COLUMN, reference(learner, rows)
    )


def with_mismatched(learner: Any, table: pa.Table) -> pa.Table:
    """The rows of a step with those of KTO's baseline."""
    rows = mismatched_rows(table)
    columns = (*rows, reference(learner, rows))
    for name, column in zip(MISMATCHED_COLUMNS, columns, strict=True):
        table = table.append_column(name, column)
    return table


def steps_of(table: pa.Table) -> list[pa.Table]:
    return [table.slice(step * BATCH, BATCH) for step in range(STEPS)]


def marked(prompt: Sequence[int], ids: Sequence[int]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """A sequence whose targets are the completion."""
    return (*prompt, *ids), (False,) * len(prompt) + (True,) * len(ids)


def sequences(rows: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> pa.Table:
    columns = zip(*rows, strict=True)
    return pa.table(
        [
            pa.array([list(row) for row in column], field.type)
            for column, field in zip(columns, SFT_SCHEMA, strict=True)
        ],
        schema=SFT_SCHEMA,
    )


def reference(learner: Any, rows: pa.Table) -> pa.Array:
    """The log-probs of the targets of all rows (a collective)."""
    import torch.distributed as dist

    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, learner.target_logprobs(rows))
    found: dict[int, np.ndarray] = {
        row: values for share in shares for row, values in share.items()
    }
    return pa.array([found[row] for row in range(rows.num_rows)], REFERENCE)
