"""Three sentences about a run: whether it learns, whether something is wrong, and who waits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.rundir.reader import Status

ENDS = 10
"""Steps at each end of a run whose mean reward is compared, at most a quarter of its steps."""
ON_DATA = "Nothing waits: the run trains on a dataset."
SOLVED = 0.99
"""Held-out accuracy from which on a run cannot learn more from such prompts."""
BUSY = 0.1
"""A side that waits for less than this share of the time does not wait."""


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence and how good it is."""

    level: Literal["good", "bad", "note"]
    text: str


def verdict(
    status: Status,
    records: Sequence[Mapping[str, Any]],
    outcomes: Counter[str],
    generates: bool = True,
) -> list[Sentence]:
    """The sentences, health before speed. A run without steps has no third one.

    Args:
        records: of metrics.jsonl. Of a step that an attempt repeated, the newest record counts.
        outcomes: outcome → groups.
        generates: whether it has generators, and not a dataset.
    """
    newest = {record["step"]: record for record in records if record["event"] == "step"}
    steps = [newest[step] for step in sorted(newest)]
    evaluations = [record for record in records if record["event"] == "evaluation"]
    alarms = [record for record in records if record["event"] == "alarm"]
    found = [_health(status, steps, alarms, outcomes), _learning(status, steps, evaluations)]
    if steps:
        found.append(_waits(steps) if generates else Sentence("note", ON_DATA))
    return found


def _health(
    status: Status,
    steps: Sequence[Mapping[str, Any]],
    alarms: Sequence[Mapping[str, Any]],
    outcomes: Counter[str],
) -> Sentence:
    cause = f": {status.cause}" if status.cause else ""
    if status.state == "failed":
        return Sentence("bad", f"The run failed at step {status.step}{cause}.")
    skipped = sum(1 for one in steps if not one.get("applied", 1))
    lost = outcomes["dropped"] + outcomes["failed"]
    wrong = []
    if alarms:
        step, text = alarms[0]["step"], alarms[0].get("alarm", "")
        wrong.append(f"{_many(len(alarms), 'alarm')}, first at step {step}: {text}")
    if skipped:
        wrong.append(f"{_many(skipped, 'step')} of the learner {_were(skipped)} skipped")
    total = sum(outcomes.values())
    if lost:
        wrong.append(f"{lost:,} of {total:,} groups were lost ({lost / total:.1%})")
    end = {
        "interrupted": f"The run was interrupted at step {status.step}{cause}. ",
        "running": f"The run is at step {status.step} of {status.max_steps}. ",
    }.get(status.state, "")
    if wrong:
        return Sentence("bad", f"{end}{_joined(wrong)}.")
    return Sentence(
        "bad" if status.state == "interrupted" else "good",
        f"{end}Nothing went wrong: no alarm, no skipped step, no lost group.",
    )


def _learning(
    status: Status,
    steps: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
) -> Sentence:
    if not steps:
        accuracy = _finite(evaluations, "eval/accuracy")
        measured = f" Held-out accuracy is {accuracy[-1]:.1%}." if accuracy else ""
        does = "It only evaluates." if status.max_steps == 0 else "It has not taken a step yet."
        return Sentence("note", f"{does}{measured}")
    said, gains = [], []
    for name, title, better in (
        ("eval/accuracy", "held-out accuracy", 1),
        ("eval/exact_match", "held-out exact match", 1),
        ("eval/loss", "held-out loss", -1),
    ):
        found = _finite(evaluations, name)
        if any(name in one and one[name] is None for one in evaluations):
            return Sentence("bad", f"It does not learn: the {title} was not a finite number.")
        if len(found) > 1:
            before, after = (_number(found[at], name) for at in (0, -1))
            said.append(f"{title} went from {before} to {after}")
            gains.append(better * (found[-1] - found[0]))
    many = max(1, min(ENDS, len(steps) // 4))
    name, title, better = (
        ("reward/mean", "the mean reward", 1) if _rewarded(steps) else ("loss", "the loss", -1)
    )
    found = _finite(steps, name)
    if len(found) >= 2 * many:
        low, high = (sum(part) / many for part in (found[:many], found[-many:]))
        said.append(f"{title} went from {low:.3g} to {high:.3g}")
        gains.append(better * (high - low))
    if not said:
        return Sentence("note", "It has taken too few steps to tell whether it learns.")
    text = " and ".join(said)
    accuracy = _finite(evaluations, "eval/accuracy")
    if accuracy and accuracy[0] >= SOLVED <= accuracy[-1]:
        known = f"held-out accuracy was {accuracy[0]:.1%} before the first step"
        return Sentence("note", f"It had nothing to learn: {known}.")
    if gains[0] > 0:
        return Sentence("good", f"It learns: {text}.")
    return Sentence("bad", f"It does not learn: {text}.")


def _waits(steps: Sequence[Mapping[str, Any]]) -> Sentence:
    work, waited, held = (
        sum(_finite(steps, name))
        for name in ("time/step_s", "time/learner_waited_s", "time/generators_waited_s")
    )
    if not work:
        return Sentence("note", "The run did not record who waits.")
    total = work + waited
    learner, generators = waited / total, held / total
    if learner < BUSY and generators < BUSY:
        return Sentence("good", "Both sides are busy: each waits less than 10% of the time.")
    if learner >= generators:
        return Sentence(
            "note",
            f"The generators set the pace: the learner waits for them {learner:.0%} of the time.",
        )
    return Sentence(
        "note",
        f"The learner sets the pace: the generators wait for it {generators:.0%} of the time.",
    )


def _finite(records: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """The values of a metric that are numbers."""
    values = (record.get(name) for record in records)
    return [one for one in values if isinstance(one, int | float) and math.isfinite(one)]


def _rewarded(steps: Sequence[Mapping[str, Any]]) -> bool:
    return any("reward/mean" in step for step in steps)


def _number(value: float, name: str) -> str:
    return f"{value:.3g}" if name.endswith("loss") else f"{value:.1%}"


def _joined(parts: Sequence[str]) -> str:
    text = "; ".join(parts)
    return text[:1].upper() + text[1:]


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _were(count: int) -> str:
    return "was" if count == 1 else "were"
