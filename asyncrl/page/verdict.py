"""Three sentences about a run: whether it learns, whether something is wrong, and who waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.rundir.reader import Status

ENDS = 10
"""Steps at each end of a run whose mean reward is compared, at most a quarter of its steps."""
BUSY = 0.1
"""A side that waits for less than this share of the time does not wait."""


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence and how good it is."""

    level: Literal["good", "bad", "note"]
    text: str


def verdict(
    status: Status, records: Sequence[Mapping[str, Any]], outcomes: Counter[str]
) -> list[Sentence]:
    """The sentences, health before speed.

    Args:
        records: of metrics.jsonl.
        outcomes: outcome → groups.
    """
    return [_health(status, records, outcomes), _learning(records), _waits(records)]


def _health(
    status: Status, records: Sequence[Mapping[str, Any]], outcomes: Counter[str]
) -> Sentence:
    if status.state == "failed":
        return Sentence("bad", f"The run failed at step {status.step}: {status.cause}.")
    alarms = [record for record in records if record["event"] == "alarm"]
    skipped = sum(1 for one in records if one["event"] == "step" and not one.get("applied", 1))
    lost = outcomes["dropped"] + outcomes["failed"]
    wrong = []
    if alarms:
        first = alarms[0]
        wrong.append(
            f"{_many(len(alarms), 'alarm')}, first at step {first['step']}: {first['alarm']}"
        )
    if skipped:
        wrong.append(f"{_many(skipped, 'step')} of the learner {_were(skipped)} skipped")
    total = sum(outcomes.values())
    if lost and total:
        wrong.append(f"{lost:,} of {total:,} groups were lost ({lost / total:.1%})")
    end = {
        "interrupted": f"The run was interrupted at step {status.step}: {status.cause}. ",
        "running": f"The run is at step {status.step} of {status.max_steps}. ",
    }.get(status.state, "")
    if wrong:
        return Sentence("bad", f"{end}{_joined(wrong)}.")
    return Sentence(
        "bad" if status.state == "interrupted" else "good",
        f"{end}Nothing went wrong: no alarm, no skipped step, no lost group.",
    )


def _learning(records: Sequence[Mapping[str, Any]]) -> Sentence:
    steps = [record for record in records if record["event"] == "step"]
    evaluations = [record for record in records if record["event"] == "evaluation"]
    if not steps:
        accuracy = [one["eval/accuracy"] for one in evaluations if "eval/accuracy" in one]
        measured = f" Held-out accuracy is {accuracy[-1]:.1%}." if accuracy else ""
        return Sentence("note", f"It has not taken a step yet.{measured}")
    said, gains = [], []
    for name, title, better in (
        ("eval/accuracy", "held-out accuracy", 1),
        ("eval/exact_match", "held-out exact match", 1),
        ("eval/loss", "held-out loss", -1),
    ):
        found = [record[name] for record in evaluations if name in record]
        if len(found) > 1:
            said.append(
                f"{title} went from {_number(found[0], name)} to {_number(found[-1], name)}"
            )
            gains.append(better * (found[-1] - found[0]))
    many = max(1, min(ENDS, len(steps) // 4))
    for name, title, better in (("reward/mean", "the mean reward", 1), ("loss", "the loss", -1)):
        found = [record[name] for record in steps if isinstance(record.get(name), float)]
        if len(found) >= 2 * many and (name != "loss" or not _rewarded(steps)):
            before, after = (sum(part) / many for part in (found[:many], found[-many:]))
            said.append(f"{title} went from {before:.3g} to {after:.3g}")
            gains.append(better * (after - before))
    if not said:
        return Sentence("note", "It has taken too few steps to tell whether it learns.")
    text = " and ".join(said)
    if gains[0] > 0:
        return Sentence("good", f"It learns: {text}.")
    return Sentence("bad", f"It does not learn: {text}.")


def _waits(records: Sequence[Mapping[str, Any]]) -> Sentence:
    steps = [record for record in records if record["event"] == "step"]
    work, waited, held = (
        sum(record.get(name) or 0.0 for record in steps)
        for name in ("time/step_s", "time/learner_waited_s", "time/generators_waited_s")
    )
    if not work or not _rewarded(steps):
        return Sentence("note", "Nothing waits: the run trains on a dataset.")
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
