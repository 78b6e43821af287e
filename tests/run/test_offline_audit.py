"""The audit of runs on a dataset, whose learner only counts: what it passes, and what it notices in
damaged or changed files."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from asyncrl.config import OfflineConfig
from asyncrl.contracts.messages import HeldOutLoss
from asyncrl.preflight.plan.offline import make_offline_plan
from asyncrl.run.across_attempts import AcrossAttempts
from asyncrl.run.audit import audit
from asyncrl.run.offline.run import OfflineJob
from asyncrl.run.supervise import open_writer
from asyncrl.rundir.directory import RunDirectory
from asyncrl.rundir.reader import open_run
from asyncrl.runtime.files.shared import size_and_checksum

FILES, NUMBERS = (
    "token rows are as they were written",
    "records have attempt, step and version",
)
STEPS, ROWS = "steps and versions are contiguous", "every step took its rows"
TOKENS, METRICS = "tokens match the rows of each step", "metrics are finite"
EVALUATIONS, COUNTERS = "evaluations are complete", "the learner's counters match the steps"
OBJECTIVES = ("sft", "dpo", "reward_model")
Records = list[dict[str, Any]]
Change = Callable[[Records], Any]


class CountingLearner:
    """Counts tokens and steps, as the learner does in a checkpoint. Skips the attempted steps
    `skips` (from 1)."""

    def __init__(self, state: Any, tokens: int, skips: Sequence[int] = ()) -> None:
        self.applied, self.attempted, self.tokens = state.version, state.steps_attempted, tokens
        self.skips = skips

    async def supervised_step(self, table: pa.Table, scheduled: bool) -> dict[str, float]:
        return self._step(table, ["loss_mask"], {"ce/loss": 2.0})

    async def preference_step(self, table: pa.Table) -> dict[str, float]:
        parts = {"pref/loss": 1.5, "ce/loss": 1.0}
        return self._step(table, ["chosen_mask", "rejected_mask"], parts)

    async def reward_step(self, table: pa.Table) -> dict[str, float]:
        return self._step(table, [], {"pref/loss": 2.0}, tokens=2 * table.num_rows)

    def _step(
        self, table: pa.Table, masks: list[str], parts: dict[str, float], tokens: int = 0
    ) -> dict[str, float]:
        self.attempted += 1
        if self.attempted in self.skips:
            return {"applied": 0.0, "loss": float("nan")}
        tokens += sum(pc.sum(pc.list_flatten(table[name])).as_py() for name in masks)
        self.applied, self.tokens = self.applied + 1, self.tokens + tokens
        return {"applied": 1.0, "loss": 2.0, "grad_norm": 1.0, "tokens": float(tokens), **parts}

    async def held_out_loss(self, table: pa.Table) -> HeldOutLoss:
        tokens = pc.sum(pc.list_flatten(table["loss_mask"])).as_py()
        return HeldOutLoss(2.0 * tokens, tokens, 0.5)

    async def held_out_preferences(self, table: pa.Table) -> dict[str, float]:
        return {"pref/loss": 0.7, "pairs": float(table.num_rows)}

    async def held_out_scores(self, table: pa.Table) -> dict[str, float]:
        return {"pref/loss": 0.7, "pairs": float(table.num_rows)}

    async def save(self, directory: Path) -> dict[str, tuple[int, int]]:
        counters = {"applied": self.applied, "trained_tokens": self.tokens}
        path = directory / "counters.json"
        path.write_text(json.dumps(counters))
        return {"counters.json": size_and_checksum(path)}


def attempt(
    folder: Path, model: Path, objective: str = "sft", skips: Sequence[int] = (), **changes: Any
) -> Path:
    """One attempt of a run on 36 rows; its directory."""
    settings = settings_of(folder, model, objective, **changes)
    plan = make_offline_plan(OfflineConfig.model_validate(settings))
    with RunDirectory(plan.config) as directory, open_writer(plan.config, directory) as writer:
        made = OfflineJob(plan.config, plan).attempt(directory, AcrossAttempts(), writer)
        rows = directory.path / "rows"
        train, held_out = plan.write_rows(rows)
        if objective == "dpo":
            for file in filter(None, (train, held_out)):
                name = f"{file.path.stem}_reference"
                shutil.copy(file.path, rows / f"{name}.arrow")
                seal = {"key": "", "sha256": file.content_hash}
                (rows / f"{name}.json").write_text(json.dumps(seal))
        record = json.loads((directory.path / "run.json").read_text())
        learner: Any = CountingLearner(made.state, record["attempts"][-1]["trained_tokens"], skips)
        asyncio.run(made._train(learner, train, held_out))
    return plan.config.run_directory


def settings_of(
    folder: Path, model: Path, objective: str = "sft", **changes: Any
) -> dict[str, Any]:
    """The settings of a run on 36 rows."""
    data = folder / f"{objective}.parquet"
    if not data.exists():
        answers = [f"{number}" for number in range(36)]
        columns = (
            {"completion": answers}
            if objective == "sft"
            else {"chosen": answers, "rejected": [f"{answer}1" for answer in answers]}
        )
        pq.write_table(pa.table({"prompt": ["1+1="] * 36, **columns}), data)
    return {
        "name": objective,
        "runs_root": str(folder / "runs"),
        "objective": {"name": "dpo", "ce_coef": 0.5} if objective == "dpo" else objective,
        "max_steps": 6,
        "batch_size": 10,
        "model": {"path": str(model)},
        "data": {"train": str(data), "max_length": 12},
        "eval": {"data": str(data), "max_rows": 20, "every_steps": 4},
        "checkpoint": {"every_steps": 3},
        **changes,
    }


def rows_taken(directory: Path) -> list[float]:
    return [step["rows_taken"] for step in open_run(directory).records("step")]


def failed(directory: Path) -> set[str]:
    return {check.name for check in audit(open_run(directory)) if not check.passed}


def rewrite(directory: Path, change: Change) -> None:
    """Change the records of metrics.jsonl in place, or replace them by what `change` returns."""
    path = directory / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    changed = change(records)
    records = changed if isinstance(changed, list) else records
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def whole(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Objective → a run of six applied steps and a skipped one, which the audit passes."""
    folder = tmp_path_factory.mktemp("whole")
    found = {name: attempt(folder, tiny_model, name, skips=[3]) for name in OBJECTIVES}
    assert [failed(directory) for directory in found.values()] == [set()] * 3
    return found


@pytest.fixture
def damaged(whole: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    return {name: Path(shutil.copytree(path, tmp_path / name)) for name, path in whole.items()}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_resume_may_change_the_rows_of_a_step(
    tiny_model: Path, tmp_path: Path, objective: str
) -> None:
    attempt(tmp_path, tiny_model, objective, max_steps=3)
    found = attempt(tmp_path, tiny_model, objective, batch_size=12, resume="must")
    assert [step["rows_taken"] for step in open_run(found).records("step")] == [10] * 3 + [12] * 3
    versions = [one["version"] for one in open_run(found).records("evaluation")]
    assert versions == [0, 3, 4, 6]
    assert failed(found) == set()
    rewrite(found, lambda records: [one for one in records if one["step"] != 5])
    assert {STEPS, ROWS, TOKENS} <= failed(found)


def test_a_resume_with_another_batch_size_keeps_the_epochs(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Four epochs of 36 rows: 3 steps of 10 rows, one of which was skipped before, then 12, then
    30."""
    epochs = {"num_epochs": 4.0, "max_steps": None}
    attempt(tmp_path, tiny_model, skips=[2], max_steps=3)
    found = attempt(tmp_path, tiny_model, resume="must", batch_size=12, **epochs | {"max_steps": 6})
    assert rows_taken(found) == [10] * 4 + [12] * 3
    for batch_size, steps in ((12, 13), (30, 9), (10, 14)):
        config = settings_of(tmp_path, tiny_model, resume="must", batch_size=batch_size, **epochs)
        plan = make_offline_plan(OfflineConfig.model_validate(config))
        assert (batch_size, plan.steps) == (batch_size, steps)
        assert plan.config.max_steps == steps
    attempt(tmp_path, tiny_model, resume="must", batch_size=30, **epochs)
    taken = rows_taken(found)
    assert taken == [10] * 4 + [12] * 3 + [30] * 3
    assert 4 * 36 <= sum(taken) - 10 < 4 * 36 + 30, "without the skipped step"
    assert failed(found) == set()
    # A finished run stays finished, and another run goes on from its checkpoint.
    again = settings_of(tmp_path, tiny_model, resume="must", batch_size=5, **epochs)
    assert make_offline_plan(OfflineConfig.model_validate(again)).steps == 9
    load = {"name": "other", "checkpoint": {"load": str(found), "ckpt_step": 6}}
    other = settings_of(tmp_path, tiny_model, batch_size=26, **epochs | load)
    plan = make_offline_plan(OfflineConfig.model_validate(other))
    assert plan.batch_sizes == ((0, 10), (3, 12), (6, 26)) and plan.steps == 6 + 3
    assert "4.00 epochs" in plan.arithmetic()


def test_only_steps_skipped_in_a_row_end_a_run(tiny_model: Path, tmp_path: Path) -> None:
    learner = {"max_skipped_steps": 2}
    found = open_run(attempt(tmp_path, tiny_model, skips=[2, 4, 6], learner=learner))
    assert [step["version"] for step in found.records("step")] == [1, 1, 2, 2, 3, 3, 4, 5, 6]
    assert failed(found.directory) == set()


def step(number: int = 4, **changes: Any) -> Change:
    """Change the record of an applied step."""

    def change(records: Records) -> None:
        place = [one for one in records if (one["event"], one["step"]) == ("step", number)]
        place[0].update(changes)

    return change


def evaluation(at: int = 4, **changes: Any) -> Change:
    """Change the record of the evaluation at a version."""

    def change(records: Records) -> None:
        key = ("evaluation", at)
        place = [one for one in records if (one["event"], one["version"]) == key]
        place[0].update(changes)

    return change


def without(event: str, field: str) -> Change:
    def change(records: Records) -> None:
        for record in records:
            if record["event"] == event:
                record.pop(field, None)

    return change


@pytest.mark.parametrize(
    ("change", "check"),
    [
        *((without("step", name), NUMBERS) for name in ("attempt", "step", "version", "applied")),
        *(
            (step(**{name: value}), NUMBERS)
            for name in ("attempt", "step", "version", "applied")
            for value in (None, [1], -1)
        ),
        (step(attempt=9), NUMBERS),
        (evaluation(version=[1]), NUMBERS),
        (without("step", "rows_taken"), ROWS),
        (without("step", "tokens"), TOKENS),
        (step(rows_taken=8.0), ROWS),
        (step(tokens=3.0), TOKENS),
        (step(tokens_left_out=1.0), TOKENS),
        (step(epoch=0.5), TOKENS),
        (step(tokens="many"), TOKENS),
        (step(loss=None), METRICS),
        (step(loss=float("nan")), METRICS),
        (step(grad_norm="x"), METRICS),
        (step(loss=1.0), METRICS),
        (step(number=3, applied=1.0), STEPS),
        (lambda records: records + [one for one in records if one["event"] == "step"], STEPS),
        (lambda records: [one for one in records if one["event"] != "step"], COUNTERS),
        (evaluation(**{"eval/evaluation_s": float("nan")}), EVALUATIONS),
        (
            lambda records: records + [one for one in records if one["event"] == "evaluation"],
            EVALUATIONS,
        ),
        *(
            (
                lambda records, version=version: [
                    one
                    for one in records
                    if (one["event"], one["version"]) != ("evaluation", version)
                ],
                EVALUATIONS,
            )
            for version in (0, 4, 6)
        ),
        (evaluation(**{"eval/tokens": 3.0, "eval/pairs": 3.0}), EVALUATIONS),
    ],
)
def test_changed_records_fail_their_check(
    damaged: dict[str, Path], change: Change, check: str
) -> None:
    directory = damaged["dpo" if check in (METRICS, EVALUATIONS) else "sft"]
    rewrite(directory, change)
    assert check in failed(directory)


def test_a_wrong_byte_in_any_file_of_rows_is_noticed(damaged: dict[str, Path]) -> None:
    for directory in damaged.values():
        for path in (directory / "rows").glob("*.arrow"):
            content = path.read_bytes()
            for place in (9, len(content) // 2, len(content) - 9):
                flipped = bytes([content[place] ^ 255])
                path.write_bytes(content[:place] + flipped + content[place + 1 :])
                assert FILES in failed(directory), (path.name, place)
            path.write_bytes(b"")
            assert FILES in failed(directory)
            path.unlink()
            path.mkdir()
            assert FILES in failed(directory)
            path.rmdir()
            path.write_bytes(content)
        assert failed(directory) == set()


@pytest.mark.parametrize(
    "change",
    [
        {"rows": [0, 36]},
        {"rows": [-36]},
        {"rows": [float("inf")]},
        {"rows": "36"},
        {"rows": [7]},
        {"weights": [0.0]},
        {"weights": 3},
        {"seed": -1},
        {"seed": float("inf")},
        {"shuffle": "no"},
        {"sha256": None},
        {"held_out_sha256": "0"},
    ],
)
def test_a_changed_order_is_noticed(damaged: dict[str, Path], change: dict[str, Any]) -> None:
    path = damaged["sft"] / "rows" / "order.json"
    fields = json.loads(path.read_text())
    assert fields.keys() >= change.keys()
    path.write_text(json.dumps({**fields, **change}))
    assert {FILES, TOKENS} & failed(damaged["sft"])
    path.write_text("[]")
    assert {FILES, TOKENS} <= failed(damaged["sft"])


def test_a_step_that_was_skipped_after_the_checkpoint_is_taken_again() -> None:
    """The first attempt saved at step 2, skipped step 3, and died. The second one takes step 3."""
    from asyncrl.run.offline.books import _last_line

    def record(attempt: int, step: int, version: int) -> dict[str, Any]:
        return {"event": "step", "attempt": attempt, "step": step, "version": version}

    first = [record(0, 1, 1), record(0, 2, 2), record(0, 3, 2)]
    second = [record(1, 3, 3), record(1, 4, 4)]
    attempts: Any = [{"from_attempt": None, "version": 0}, {"from_attempt": 0, "version": 2}]
    assert _last_line([*first, *second], attempts) == [*first[:2], *second]
