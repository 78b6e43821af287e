"""Checks of the files: readable, and in agreement about the run."""

from __future__ import annotations

from pathlib import Path

from asyncrl.run.audit.books import Books
from asyncrl.run.audit.check import SHOWN, Check
from asyncrl.rundir.metrics import METRICS_FILE
from asyncrl.rundir.record import AttemptRecord


def check_files(books: Books) -> Check:
    """Every file can be read, and contains what was written."""
    summary = f"{len(books.outcomes)} outcomes, {len(books.rows)} groups"
    return Check(
        "every file can be read",
        not books.unreadable,
        "; ".join(books.unreadable[:SHOWN]) or summary,
    )


def check_record(books: Books) -> Check:
    """run.json, config.yaml and the checkpoints belong to one run and have the same bounds."""
    wrong = [
        *_other_bounds(books),
        *(fault for attempt in books.attempts for fault in _start_faults(attempt)),
    ]
    if books.checkpoint is not None and books.checkpoint[1].run_id != books.run_id:
        path, state = books.checkpoint
        wrong.append(
            f"{path.name} belongs to run {state.run_id!r}, and run.json to run {books.run_id!r}"
        )
    if (
        books.checkpoint is None
        and not books.damage
        and any(record.event == "checkpoint" for record in books.records)
    ):
        wrong.append(
            f"{books.run.checkpoints_directory} contains no checkpoint, but {METRICS_FILE} records"
            " some"
        )
    return Check(
        "record, config and checkpoints agree",
        not wrong,
        "; ".join(wrong[:SHOWN]) or f"{len(books.attempts)} attempts",
    )


def _other_bounds(books: Books) -> list[str]:
    """Bounds of the last attempt that differ from config.yaml."""
    last, config = books.attempts[books.last], books.run.config
    train_ends = list(config.limits.train_ends)
    recorded_and_configured = {
        "max_staleness": (last["max_staleness"], config.staleness.max_staleness),
        "masks_stale": (last.get("masks_stale", False), config.limits.masks_stale),
        "train_ends": (last.get("train_ends", train_ends), train_ends),
        "n_samples_per_prompt": (
            last["n_samples_per_prompt"],
            config.rollout.n_samples_per_prompt,
        ),
        "groups_per_step": (last["groups_per_step"], config.groups_per_step),
    }
    return [
        f"attempt {books.last} began with {name} {recorded}, but config.yaml has {configured}"
        for name, (recorded, configured) in recorded_and_configured.items()
        if recorded != configured
    ]


def _start_faults(attempt: AttemptRecord) -> list[str]:
    """Contradictions in where an attempt began."""
    found = []
    step = Path(attempt["checkpoint"] or "").name.removeprefix("step_")
    if (int(step) if step.isdecimal() else 0) != attempt["version"]:
        found.append(
            f"attempt {attempt['attempt']} began at version {attempt['version']}, but from"
            f" {attempt['checkpoint'] or 'no checkpoint'}"
        )
    if attempt["checkpoint"] is None and (
        attempt["frontier"]
        or attempt["finished_above"]
        or attempt["waiting"]
        or attempt["trained_tokens"]
    ):
        found.append(
            f"attempt {attempt['attempt']} began from no checkpoint, but at frontier"
            f" {attempt['frontier']} with {attempt['trained_tokens']} tokens trained"
        )
    return found


def check_checkpoint(books: Books) -> Check:
    """The checkpoint that a resume would take is the newest, and its files are what was
    committed."""
    summary = "; ".join(books.damage) or (
        f"newest: {books.checkpoint[0].name}" if books.checkpoint else "no checkpoint yet"
    )
    return Check("the newest checkpoint is whole", not books.damage, summary)
