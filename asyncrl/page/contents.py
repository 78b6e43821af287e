"""What a page shows of a run, as plain values. The page's code only draws them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from asyncrl.charts import asynchrony, learning
from asyncrl.charts.drawing import Chart, theme
from asyncrl.charts.moments import Moments
from asyncrl.charts.timeline import ROWS, WINDOW, specification, windows
from asyncrl.config import ConfigError, OfflineConfig
from asyncrl.contracts.rows import SCORED_COLUMNS
from asyncrl.page.chosen import Row, choose
from asyncrl.page.pieces import Pieces
from asyncrl.page.sessions import session_of
from asyncrl.page.verdict import verdict
from asyncrl.rundir.reader import Run
from asyncrl.rundir.record import read_record
from asyncrl.rundir.tokens import Rows, at_tokens, of_trajectories

SPIKE = 5.0
"""A step is notable if its gradient's norm is this many times the usual one."""
MOST_REASONS = 200
ASKED = (
    ("Does it learn?", "#/charts/accuracy"),
    ("Who waits for whom?", "#/charts/waits"),
    ("How stale is what it trains?", "#/charts/staleness"),
    ("What happened when?", "#/timeline"),
    ("What does the model write?", "#/groups"),
    ("Which groups were lost, and why?", "#/lost"),
    ("With which settings, and how do I go on?", "#/settings"),
)
WITHOUT_GENERATORS = ("#/timeline", "#/groups", "#/lost", "#/charts/waits", "#/charts/staleness")


def contents(run: Run) -> dict[str, Any]:
    """All values of the page."""
    status, records, metrics = run.status(), run.records(), run.metrics
    damaged = list[str]()
    groups, outcomes = run.groups(damaged), run.outcomes(damaged)
    counted = Counter(outcomes["outcome"].to_pylist())
    generates = not isinstance(run.settings, OfflineConfig)
    notable = [
        {"step": record["step"], "why": why}
        for record in records
        if record["event"] == "step" and (why := _notable(record))
    ]
    rows, details, note = _groups(run, groups, outcomes, damaged)
    return {
        "title": run.settings.name,
        "state": status.state,
        "step": status.step,
        "max_steps": status.max_steps,
        "verdict": [
            {"level": one.level, "text": one.text}
            for one in verdict(status, records, counted, generates)
        ],
        "damaged": damaged,
        "asked": [one for one in ASKED if generates or one[1] not in WITHOUT_GENERATORS],
        "charts": [
            {"id": name, "spec": chart.to_dict()}
            for name, chart in _charts(metrics, outcomes, generates).items()
        ],
        "themes": {"light": theme(), "dark": theme(dark=True)},
        "timelines": _timelines(run, groups, outcomes, metrics, notable) if generates else [],
        "groups": rows,
        "details": details,
        "chosen": note,
        "stale_above": _stale_above(run) if generates else None,
        "lost": _lost(outcomes, set(zip(rows["attempt"], rows["ordinal"], strict=True))),
        "notable": notable,
        "settings": (run.directory / "config.yaml").read_text(errors="replace"),
        "attempts": _attempts(run.directory),
    }


def _charts(metrics: pa.Table, outcomes: pa.Table, generates: bool) -> dict[str, Chart]:
    found = {"accuracy": learning.accuracy(metrics)}
    if generates:
        found |= {
            "reward": learning.reward(metrics),
            "reward_parts": learning.reward_parts(metrics),
            "staleness": asynchrony.staleness(outcomes),
            "waits": asynchrony.waits(metrics),
            "throughput": asynchrony.throughput(metrics),
            "lengths": learning.lengths(metrics),
            "policy": learning.policy(metrics),
            "versions": asynchrony.versions(outcomes),
            "publication": asynchrony.publication(metrics),
        }
    else:
        found |= {
            "losses": learning.losses(metrics),
            "preferences": learning.preferences(metrics),
        }
    return found | {"memory": asynchrony.memory(metrics)}


def _timelines(
    run: Run,
    groups: pa.Table,
    outcomes: pa.Table,
    metrics: pa.Table,
    notable: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Windows over the run and at its notable steps, each with its chart."""
    moments = Moments(groups, outcomes, metrics, run.taken_over())
    found = []
    for last in windows(moments, [one["step"] for one in notable]):
        window = moments.window(last - WINDOW + 1, last, ROWS)
        first = max(1, window.first_step)
        found.append({"first": first, "last": last, "spec": specification(window)})
    return found


def _groups(
    run: Run, groups: pa.Table, outcomes: pa.Table, damaged: list[str]
) -> tuple[dict[str, list[Any]], list[dict[str, Any]], str]:
    """One list for each column of the groups, the groups that are shown whole, and how they were
    chosen."""
    ended = {
        (row["attempt"], row["ordinal"]): row
        for row in outcomes.select(
            ["attempt", "ordinal", "outcome", "reason", "step", "trained_at_version", "staleness"]
        ).to_pylist()
    }
    for name in ("reward", "advantage", "status"):  # a run whose every group failed lacks them
        if name not in groups.column_names:
            groups = groups.append_column(name, pa.nulls(len(groups), SCORED_COLUMNS[name]))
    keys = list(zip(groups["attempt"].to_pylist(), groups["ordinal"].to_pylist(), strict=True))
    ends = [ended.get(key, {}) for key in keys]
    rewards = groups["reward"].to_pylist()
    tokens = [sum(map(len, group)) for group in groups["completion_ids"].to_pylist()]
    context = _context_tokens(groups)
    states = groups["status"].to_pylist()
    chosen = choose(
        [
            Row(
                tokens[i] + context[i],
                _mean(rewards[i]),
                ends[i].get("outcome"),
                ends[i].get("step"),
                any(state != "ok" for state in states[i] or ()),
            )
            for i in range(len(keys))
        ],
        {record["step"] for record in run.records("step") if _notable(record)},
    )
    at = {index: number for number, index in enumerate(chosen)}
    columns: dict[str, list[Any]] = {
        "attempt": [attempt for attempt, _ in keys],
        "ordinal": [ordinal for _, ordinal in keys],
        "step": [end.get("step") for end in ends],
        "version": [end.get("trained_at_version") for end in ends],
        "staleness": [end.get("staleness") for end in ends],
        "outcome": [end.get("outcome") or "waiting" for end in ends],
        "reason": [end.get("reason") or "" for end in ends],
        "reward": [_rounded(_mean(one)) for one in rewards],
        "best": [_rounded(max(_numbers(one), default=None)) for one in rewards],
        "worst": [_rounded(min(_numbers(one), default=None)) for one in rewards],
        "tokens": tokens,
        "masked": [sum(one != "ok" for one in state or ()) for state in states],
        "detail": [at.get(index, -1) for index in range(len(keys))],
    }
    pieces = Pieces(_tokenizer(run))
    ordinals = [keys[index][1] for index in chosen]
    trained = of_trajectories(run.trained(damaged, ordinals, skipped=True))
    details = [
        _detail(row, pieces, trained)
        for row in groups.take(pa.array(chosen, pa.int64())).to_pylist()
    ]
    note = f"All {len(keys):,} groups have their texts here."
    if len(chosen) < len(keys):
        note = (
            f"{len(chosen):,} of {len(keys):,} groups have their texts here: those that were lost"
            " or masked, those of notable steps, the best and the worst, and others evenly over"
            " the run, as far as the page has room. open_run reads all."
        )
    if not pieces.known and keys:
        note += " The model's tokenizer was not found, so tokens are shown by their numbers."
    return columns, details, note


def _context_tokens(groups: pa.Table) -> list[int]:
    """Tokens of each group's prompt, and of the context of its turns if they are sessions'."""
    prompts = [len(ids or ()) for ids in groups["prompt_ids"].to_pylist()]
    if "turn_context" not in groups.column_names:
        return prompts
    of_turns = groups["turn_context"].to_pylist()
    return [
        prompt + sum(map(len, turns or ())) for prompt, turns in zip(prompts, of_turns, strict=True)
    ]


def _detail(row: dict[str, Any], pieces: Pieces, trained: Rows) -> dict[str, Any]:
    parts = row.get("reward_parts") or []
    return {
        "prompt": row["prompt_text"] or "",
        "replica": row["replica"],
        "seconds": _rounded(row["finished_at"] - row["started_at"]),
        "columns": {
            name: str(value)
            for name, value in row.items()
            if name in ("question", "answer", "task", "source") and value is not None
        },
        "trajectories": [
            {
                "text": row["completion_text"][index] or "",
                "session": session_of(row, index, pieces),
                "pieces": pieces.of(ids),
                "logprobs": [_written(one) for one in row["logprobs"][index]],
                "learner": _learner(
                    trained.get((row["attempt"], row["ordinal"], index), []), len(ids)
                ),
                "mask": _mask(row["loss_mask"][index]),
                "versions": [
                    [span["version"], span["start"], span["end"]] for span in row["versions"][index]
                ],
                "reward": _rounded(_item(row["reward"], index)),
                "advantage": _rounded(_item(row["advantage"], index)),
                "status": _item(row["status"], index) or "",
                "finish": _item(row["finish_reason"], index) or "",
                "parts": {
                    name: _rounded(value)
                    for name, value in (parts[index] if index < len(parts) else {}).items()
                    if value is not None
                },
            }
            for index, ids in enumerate(row["completion_ids"])
        ],
    }


def _stale_above(run: Run) -> int | None:
    """The staleness above which a step masks tokens; None if it masks none."""
    limits = run.settings.limits
    return limits.max_staleness if limits.masks_stale else None


def _learner(rows: Sequence[dict[str, Any]], tokens: int) -> dict[str, list[Any]] | None:
    """What the learner computed at each token; None if it computed or recorded none. A list whose
    values are all equal has one, and the flags are the indices of their tokens."""
    if not rows:
        return None
    found = at_tokens(rows, tokens)
    return {
        "logprobs": [_written(one) for one in found["logprobs"]],
        **{
            name: _once([_written(one) for one in found[name]])
            for name in ("weights", "advantages")
        },
        **{
            name: [index for index, flag in enumerate(found[name]) if flag]
            for name in ("clipped", "masked")
        },
    }


def _once(values: list[Any]) -> list[Any]:
    """One of them, if all that are there are equal."""
    known = {one for one in values if one is not None}
    return [*known] if len(known) == 1 else values


def _written(value: float | None) -> float | str | None:
    """With five decimals, so that ratios are exact to 1e-5; what JSON cannot hold as text."""
    if value is None:
        return None
    return round(value, 5) if math.isfinite(value) else str(value)


def _lost(outcomes: pa.Table, keys: Collection[tuple[int, int]]) -> list[dict[str, Any]]:
    """Each outcome with its reason, most frequent first, and its first group. The last row has all
    further reasons.

    Args:
        keys: (attempt, ordinal) of the groups that the page can open.
    """
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    columns = (outcomes[name].to_pylist() for name in ("outcome", "reason", "attempt", "ordinal"))
    for outcome, reason, attempt, ordinal in zip(*columns, strict=True):
        found.setdefault((outcome, reason or ""), []).append((attempt, ordinal))
    ranked = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    rows = []
    for (outcome, reason), groups in ranked[:MOST_REASONS]:
        first = next((key for key in groups if key in keys), None)
        rows.append({"outcome": outcome, "reason": reason, "groups": len(groups), "first": first})
    if rest := ranked[MOST_REASONS:]:
        count = sum(len(groups) for _, groups in rest)
        reason = f"{len(rest):,} further reasons, which open_run(…).outcomes() has"
        rows.append({"outcome": "others", "reason": reason, "groups": count, "first": None})
    return rows


def _notable(record: dict[str, Any]) -> str:
    """Why a step is worth a look; "" if it is not."""
    if not record.get("applied", 1):
        return "skipped: its loss or gradient was not finite"
    ratio = record.get("grad_norm_ratio") or 0.0
    return f"gradient {ratio:.1f} times its usual norm" if ratio >= SPIKE else ""


def _attempts(directory: Path) -> list[dict[str, Any]]:
    """What is recorded of each attempt; nothing if the record is damaged."""
    try:
        attempts = read_record(directory)["attempts"]
    except (ConfigError, OSError):
        return []
    shown = ("attempt", "start", "end", "outcome", "cause", "command", "host", "versions")
    return [
        {
            name: " ".join(value) if isinstance(value, list) else value
            for name, value in attempt.items()
            if name in shown
        }
        for attempt in attempts
    ]


def _tokenizer(run: Run) -> Path:
    """A directory with the run's tokenizer: of its exported model, or else of its first one."""
    exported = run.directory / "hf"
    there = (exported / "tokenizer.json").is_file()
    return exported if there else Path(run.settings.model.path)


def _mask(values: Sequence[int]) -> list[int]:
    """The mask, or nothing if every token is trained."""
    return [] if all(values) else list(values)


def _item(values: Sequence[Any] | None, index: int) -> Any:
    return values[index] if values is not None and index < len(values) else None


def _numbers(values: Sequence[float | None] | None) -> list[float]:
    return [one for one in values or () if one is not None and one == one]


def _mean(values: Sequence[float | None] | None) -> float | None:
    found = _numbers(values)
    return sum(found) / len(found) if found else None


def _rounded(value: float | None) -> float | None:
    """Five significant digits, or None for what JSON cannot hold."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.5g}")
