"""Three sentences about a run: whether it learns, whether something is wrong, and who waits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import pvariance
from typing import Any, Literal

from asyncrl.rundir.reader import Status

ENDS = 10
"""Steps over which a run's reward is averaged, at most a quarter of its steps."""
FEWEST_STEPS = 8
"""Steps from which on their rewards say something."""
NOISE = 2.0
"""Standard errors by which a figure must change."""
HELD_OUT = (
    ("eval/accuracy", "held-out accuracy", 1),
    ("eval/exact_match", "held-out exact match", 1),
    ("eval/loss", "held-out loss", -1),
)
"""Figure of evaluations, its title, and 1 if more is better, or else -1."""
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
        "note" if status.state == "interrupted" else "good",
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
    measures = [found for one in HELD_OUT if (found := _held_out(evaluations, *one)) is not None]
    if any(one.broken for one in measures):
        title = next(one.title for one in measures if one.broken)
        return Sentence("bad", f"It does not learn: the {title} was not a finite number.")
    name, title, better = (
        ("reward/mean", "the mean reward", 1) if _rewarded(steps) else ("loss", "the loss", -1)
    )
    if (training := _of_steps(_finite(steps, name), title, better)) is not None:
        measures.append(training)
    measures = [one for one in measures if one.said]
    if not measures:
        return Sentence("note", "It has taken too few steps to tell whether it learns.")
    accuracy = _finite(evaluations, "eval/accuracy")
    if accuracy and accuracy[0] >= SOLVED <= accuracy[-1]:
        known = f"held-out accuracy was {accuracy[0]:.1%} before the first step"
        return Sentence("note", f"It had nothing to learn: {known}.")
    return _judged(measures)


def _judged(measures: Sequence[_Measure]) -> Sentence:
    """What measures with a change say together."""
    text = " and ".join(one.said for one in measures)
    rose, fell = (any(one.change == way for one in measures) for way in ("better", "worse"))
    if any(one.fell_back for one in measures):
        return Sentence("bad", f"It learned at first, and then fell back: {text}.")
    if rose and fell:
        return Sentence("bad", f"Its measures contradict each other: {text}.")
    if rose:
        return Sentence("good", f"It learns: {text}.")
    noise = "" if fell else ", which is within the noise"
    return Sentence("bad", f"It does not learn: {text}{noise}.")


@dataclass(frozen=True, slots=True)
class _Measure:
    """How one figure changed over the run."""

    title: str
    said: str = ""
    """Empty if it has too few values."""
    change: Literal["better", "worse", "none"] = "none"
    """`none`: within the noise."""
    fell_back: bool = False
    """Whether its last value is worse than its best one, beyond the noise, and no better than
    midway between its first and its best one."""
    broken: bool = False
    """Whether a value was not finite."""


def _held_out(
    evaluations: Sequence[Mapping[str, Any]], name: str, title: str, better: int
) -> _Measure | None:
    """A figure of evaluations; None if they lack it."""
    if any(name in one and one[name] is None for one in evaluations):
        return _Measure(title, broken=True)
    found = _finite(evaluations, name)
    if len(found) < 2:
        return None
    prompts = _finite(evaluations, "eval/prompts")
    noise = _share_noise(found, min(prompts)) if prompts and name != "eval/loss" else 0.0
    return _compared(found, noise, title, better, lambda value: _number(value, name))


def _of_steps(values: Sequence[float], title: str, better: int) -> _Measure | None:
    """A figure of steps, averaged over parts of the run; None if there are too few."""
    many = min(ENDS, len(values) // 4)
    if len(values) < FEWEST_STEPS:
        return None
    parts = [values[at : at + many] for at in range(0, len(values) - many + 1, many)]
    parts[-1] = values[-many:]
    means = [sum(part) / many for part in parts]
    spread = max(pvariance(parts[0]), pvariance(parts[-1]))
    noise = NOISE * math.sqrt(2 * spread / many)
    return _compared(means, noise, title, better, lambda value: f"{value:.3g}")


def _compared(
    values: Sequence[float], noise: float, title: str, better: int, text: Callable[[float], str]
) -> _Measure:
    first, last = values[0], values[-1]
    best = max(values, key=lambda value: better * value)
    gain, lost = better * (last - first), better * (best - last)
    fell_back = lost > noise and gain < better * (best - first) / 2 and best != first
    over = f" over {text(best)}" if fell_back else ""
    change: Literal["better", "worse", "none"] = (
        "better" if gain > noise else "worse" if -gain > noise else "none"
    )
    return _Measure(
        title, f"{title} went from {text(first)}{over} to {text(last)}", change, fell_back
    )


def _share_noise(shares: Sequence[float], prompts: float) -> float:
    """Standard errors of the difference of two shares of this many prompts."""
    variance = max(share * (1 - share) for share in (shares[0], shares[-1]))
    return NOISE * math.sqrt(2 * max(0.0, variance) / prompts)


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
