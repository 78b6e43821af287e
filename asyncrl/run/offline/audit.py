"""The audit of a run on a dataset: recomputes each step's rows and tokens from the token rows and
the order of the data. It cannot see a loss or a held-out figure that was changed together with its
parts, because only the model of that version could compute them again."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from asyncrl.config import DpoConfig, OfflineConfig, SftConfig
from asyncrl.preflight.plan.offline import ORDER_FILE
from asyncrl.run.audit.check import SHOWN, Check, close, listed
from asyncrl.run.offline.books import MASKS, Books, Record, read_books, targets
from asyncrl.rundir.reader import Run
from asyncrl.rundir.record import AttemptRecord
from asyncrl.runtime.files.opening import read_text


def audit_offline(run: Run) -> list[Check]:
    """Recompute and check every invariant.

    Raises:
        ConfigError: the directory has no record of its attempts.
    """
    books = read_books(run)
    return [
        check(books)
        for check in (
            _check_files,
            _check_records,
            _check_steps,
            _check_rows,
            _check_tokens,
            _check_metrics,
            _check_evaluations,
            _check_checkpoint,
            _check_counters,
            _check_record,
        )
    ]


def _check_files(books: Books) -> Check:
    """The token rows and the log-probs of the reference policy are what the run wrote. Before its
    first step, a run may still be writing them."""
    stepped = any(True for _ in books.steps)
    wrong = [f"rows/{name} {why}" for name, why in books.changed.items()] if stepped else []
    summary = f"{'; '.join(wrong)}; restore it" if wrong else "rows/*.arrow"
    return Check("token rows are as they were written", not wrong, summary)


def _check_records(books: Books) -> Check:
    """Every record has its attempt, step and version."""
    summary = listed(books.unreadable) or f"{len(books.records)} records"
    return Check("records have attempt, step and version", not books.unreadable, summary)


def _check_steps(books: Books) -> Check:
    """Every step has the next number, and an applied step makes the next version."""
    wrong: list[str] = []
    before: Record | None = None
    for record in books.steps:
        if before is not None and record["attempt"] == before["attempt"]:
            step, version = before["step"] + 1, before["version"] + bool(record["applied"])
        else:
            version = books.attempts[record["attempt"]]["version"] + bool(record["applied"])
            step = record["step"]
        if (record["step"], record["version"]) != (step, version):
            wrong.append(f"step {record['step']} made version {record['version']}, not {version}")
        before = record
    last = before["version"] if before is not None else 0
    return Check(
        "steps and versions are contiguous",
        not wrong,
        listed(wrong) or f"{sum(1 for _ in books.steps)} steps to version {last}",
    )


def _check_rows(books: Books) -> Check:
    """Every step took the batch_size of its attempt, and the position in the data is their sum."""
    wrong, position = [], books.attempts[_first_of_line(books.attempts)]["frontier"]
    last = books.checkpoint[1].steps_attempted if books.checkpoint is not None else 0
    for step in books.steps:
        size = books.attempts[step["attempt"]]["groups_per_step"]
        if step.get("rows_taken") != size:
            wrong.append(f"step {step['step']}: {step.get('rows_taken')}, not {size}")
        position += size if step["step"] <= last else 0
    frontier = books.checkpoint[1].frontier if books.checkpoint is not None else None
    if frontier is not None and frontier != position:
        wrong.append(f"the checkpoint is at row {frontier}, not {position}, after {last} steps")
    return Check("every step took its rows", not wrong, listed(wrong) or f"position {frontier}")


def _check_tokens(books: Books) -> Check:
    """The loss tokens of each step are those of its rows, in the order of the data."""
    name = "tokens match the rows of each step"
    if books.rows is None:
        return Check(name, False, "rows/train.arrow is missing or has changed; restore it")
    if not set(MASKS) & set(books.rows.table.column_names):
        return Check(name, False, "rows/train.arrow has no masks; restore it")
    if books.order is None:
        why = "is missing, or does not match config.yaml and train.arrow; restore it"
        return Check(name, False, f"rows/{ORDER_FILE} {why}")
    order = books.order
    wrong, total = [], 0
    for attempt, steps in _by_attempt(books.steps).items():
        at = books.attempts[attempt]["frontier"]
        size = books.attempts[attempt]["groups_per_step"]
        for step in steps:
            taken = range(at, at + size)
            table = books.rows.take([order.epoch_and_row(ordinal)[1] for ordinal in taken])
            left_out = int(_number(step, "tokens_left_out") or 0)
            tokens, at = _trained(books.config, table) - left_out, taken.stop
            total += tokens
            recorded = _number(step, "tokens")
            if step["applied"] and not close(recorded, tokens):
                wrong.append(f"step {step['step']} recorded {recorded}, its rows {tokens}")
            if not close(step.get("epoch"), at / order.epoch):
                wrong.append(f"step {step['step']} recorded epoch {step.get('epoch')}")
    return Check(name, not wrong, listed(wrong) or f"{total:,} tokens")


def _trained(config: OfflineConfig, table: pa.Table) -> int:
    """Loss tokens of the rows. A reward model has one score for each side of a pair."""
    return 2 * table.num_rows if config.trains_reward_model else targets(table)


def _by_attempt(steps: Iterator[Record]) -> dict[int, list[Record]]:
    found: dict[int, list[Record]] = {}
    for step in steps:
        found.setdefault(step["attempt"], []).append(step)
    return found


def _number(record: Record, name: str) -> float | None:
    """A finite number of a record; None for anything else."""
    value = record.get(name)
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return value if is_number else None


def _check_metrics(books: Books) -> Check:
    """An applied step has a finite loss and gradient norm, and an evaluation finite figures. Their
    values cannot be recomputed without the model."""
    wrong = [
        f"step {step['step']}: {name} {step.get(name)}"
        for step in books.steps
        if step["applied"]
        for name in ("loss", "grad_norm")
        if _number(step, name) is None
    ]
    wrong += [
        f"step {step['step']}: loss {step['loss']}, its parts give {parts:g}"
        for step in books.steps
        if step["attempt"] == len(books.attempts) - 1
        and (parts := _parts(step, books.config)) is not None
        and not close(step.get("loss"), parts)
    ]
    return Check("metrics are finite", not wrong, listed(wrong) or "loss and gradient norm")


def _parts(step: Record, config: OfflineConfig) -> float | None:
    """The loss of an applied step as the sum of its parts; None if one is missing."""
    weights = {"pref/loss": 1.0}
    if isinstance(config.objective, DpoConfig):
        weights["ce/loss"] = config.objective.ce_coef
    elif isinstance(config.objective, SftConfig):
        weights = {"ce/loss": 1.0}
    found = [(weight, _number(step, name)) for name, weight in weights.items() if weight]
    known = [weight * value for weight, value in found if value is not None]
    return math.fsum(known) if step["applied"] and len(known) == len(found) else None


def _check_evaluations(books: Books) -> Check:
    """Every evaluation that was due is recorded once, with finite figures of all held-out rows. The
    figures themselves cannot be recomputed without the model of their version."""
    evaluations = [record for record in books.records if record["event"] == "evaluation"]
    wrong = [
        f"version {record['version']}: {name} {record[name]}"
        for record in evaluations
        for name in record
        if name.startswith("eval/") and _number(record, name) is None
    ]
    seen = Counter((record["attempt"], record["version"]) for record in evaluations)
    wrong += [f"version {version} {many} times" for (_, version), many in seen.items() if many > 1]
    last = len(books.attempts) - 1
    made = [step["version"] for step in books.steps if step["attempt"] == last and step["applied"]]
    every, until = books.config.eval.every_steps, books.config.max_steps
    # An attempt may be killed between its last step and the evaluation, which precedes the save.
    saved = [entry["version"] for entry in books.records if entry["event"] == "checkpoint"]
    due = {
        version
        for version in made
        if (version < made[-1] or version in saved)
        and (version == until or (every and version % every == 0))
    }
    if made and books.config.eval.data is not None and books.attempts[last]["version"] == 0:
        due.add(0)
    without = due - {version for attempt, version in seen if attempt == last}
    if books.config.eval.data is not None:
        wrong += [f"version {version} has none" for version in sorted(without)]
    size = "eval/pairs" if books.config.has_pairs else "eval/tokens"
    if books.config.is_kto:
        size = "eval/completions"
    wrong += [
        f"version {record['version']}: {size} {record.get(size)}, not {books.held_out}"
        for record in evaluations
        if record["attempt"] == last and books.held_out is not None
        if not close(record.get(size), books.held_out)
    ]
    summary = listed(wrong) or f"{len(evaluations)} evaluations"
    return Check("evaluations are complete", not wrong, summary)


def _check_checkpoint(books: Books) -> Check:
    """The checkpoint that a resume would take is the newest, and its files are what was
    committed."""
    newest = books.checkpoint[0].name if books.checkpoint is not None else "no checkpoint yet"
    return Check("the newest checkpoint is whole", not books.damage, books.damage or newest)


def _check_counters(books: Books) -> Check:
    """The learner's own counters in the checkpoint match the steps before it."""
    name = "the learner's counters match the steps"
    if books.checkpoint is None:
        return Check(name, True, "no checkpoint yet")
    path, state = books.checkpoint
    counters: Mapping[str, int] = json.loads(read_text(path / "learner" / "counters.json"))
    before = books.attempts[_first_of_line(books.attempts)]["trained_tokens"]
    tokens = before + sum(
        int(_number(step, "tokens") or 0)
        for step in books.steps
        if step["applied"] and step["version"] <= state.version
    )
    found = {"applied": counters["applied"], "trained_tokens": counters["trained_tokens"]}
    expected = {"applied": state.version, "trained_tokens": tokens}
    return Check(name, found == expected, f"{found}" + f", not {expected}" * (found != expected))


def _first_of_line(attempts: Sequence[AttemptRecord]) -> int:
    at = len(attempts) - 1
    while (before := attempts[at]["from_attempt"]) is not None:
        at = before
    return at


def _check_record(books: Books) -> Check:
    """run.json, config.yaml and the checkpoint belong to one run."""
    last, wrong = books.attempts[-1], []
    if last["groups_per_step"] != books.config.batch_size:
        wrong.append(
            f"the last attempt began with batch_size {last['groups_per_step']}, but config.yaml has"
            f" {books.config.batch_size}"
        )
    if books.checkpoint is not None and books.checkpoint[1].run_id != books.run_id:
        wrong.append(f"{books.checkpoint[0].name} belongs to another run")
    saved = any(record["event"] == "checkpoint" for record in books.records)
    if books.checkpoint is None and not books.damage and saved:
        wrong.append("the metrics record checkpoints, and there is none")
    return Check(
        "record, config and checkpoints agree",
        not wrong,
        "; ".join(wrong[:SHOWN]) or f"{len(books.attempts)} attempts",
    )
