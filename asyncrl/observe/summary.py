"""Summarizes what a run changed: every evaluation set and every reward, before and after."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from asyncrl.observe.metric_values import number
from asyncrl.observe.spec import ObserveSpec

MOST_STEPS = 10
"""Rewards are averaged over this many steps at each end of a run, at most a quarter of its steps.
"""

Row = tuple[str, str, str, str]
"""What is measured, the value before, the value after, and a remark."""


def before_and_after(spec: ObserveSpec, records: Sequence[Mapping[str, object]]) -> list[str]:
    """Aligned lines. First the accuracy and rewards of each set in the first and last evaluation,
    then the rewards of the first and last steps."""
    evaluations = [record for record in records if record["event"] == "evaluation"]
    steps = [record for record in records if record["event"] == "step"]
    rows: list[Row] = []
    if evaluations:
        for title in spec.evaluation_sets:
            rows += _set_rows(spec, title, evaluations[0], evaluations[-1])
    if steps:
        rows += _step_rows(spec, steps)
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}} → {row[2]:>{widths[2]}}   {row[3]}".rstrip()
        for row in rows
    ]


def _set_rows(
    spec: ObserveSpec, title: str, first: Mapping[str, object], last: Mapping[str, object]
) -> list[Row]:
    start = f"eval/{title}_"
    before, after = number(first, f"{start}accuracy"), number(last, f"{start}accuracy")
    prompts = number(last, f"{start}prompts") or 0
    # A mean that is no share, such as that of a reward of 10, has no percentage.
    shares = spec.is_accuracy and all(0 <= value <= 1 for value in (before, after) if value)
    form = ".1%" if shares else ".3f"
    change = "" if before is None or after is None else f"{after - before:+{form}} "
    rows: list[Row] = []
    if before is not None or after is not None:
        rows.append(
            (
                f"held-out {title} {'accuracy' if spec.is_accuracy else spec.accuracy}",
                _text(before, form),
                _text(after, form),
                f"({change}on {prompts:,.0f} prompts)",
            )
        )
    for name in last:
        key = name.removeprefix(start)
        if name.startswith(start) and (
            (_of_a_reward(spec, key) and (spec.is_accuracy or key != spec.accuracy))
            or key.startswith(("avg_at_", "pass_at_"))
        ):
            rows.append(
                (
                    f"held-out {title} {key}",
                    _text(number(first, name), ".3f"),
                    _text(number(last, name), ".3f"),
                    "",
                )
            )
    return rows


def _step_rows(spec: ObserveSpec, steps: Sequence[Mapping[str, object]]) -> list[Row]:
    many = max(1, min(MOST_STEPS, len(steps) // 4))
    first, last = steps[:many], steps[-many:]
    where = f"(mean of steps {_span(first)} and {_span(last)})"
    rows: list[Row] = []
    for name in dict.fromkeys(
        name for record in steps for name in record if name.startswith("reward/")
    ):
        key = name.removeprefix("reward/")
        if key == "mean" or _of_a_reward(spec, key):
            rows.append(
                (f"reward {key}", _mean(first, name), _mean(last, name), where if not rows else "")
            )
    return rows


def _of_a_reward(spec: ObserveSpec, key: str) -> bool:
    """Whether the metric is the reward of a function, or a part of that reward."""
    name, _, part = key.partition("/")
    return name in spec.reward.functions and not part.startswith("unscored_")


def _mean(records: Sequence[Mapping[str, object]], name: str) -> str:
    known = [value for record in records if (value := number(record, name)) is not None]
    return _text(math.fsum(known) / len(known) if known else None, ".3f")


def _span(records: Sequence[Mapping[str, object]]) -> str:
    first, last = records[0]["step"], records[-1]["step"]
    return f"{first}-{last}" if first != last else f"{first}"


def _text(value: float | None, form: str) -> str:
    return "none" if value is None else f"{value:{form}}"
