"""The timeline: when each trajectory waited, was generated, scored and trained, beside what the run
did meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import altair as alt
import pyarrow as pa

from asyncrl.charts.drawing import WIDTH, Chart, missing
from asyncrl.charts.moments import (
    BUFFER,
    GENERATES,
    LANES,
    SCORING,
    SIBLINGS,
    STEPS,
    TOOLS,
    WAITS,
    Bar,
    Moments,
    Window,
)

TITLE = "Timeline"
BLUE, GRAY, RED = "#5b8db8", "#8a8a8a", "#d55e00"
ROWS = 48
"""Trajectories of a timeline."""
WINDOW = 3
"""Steps of a timeline."""
MOST_WINDOWS, MOST_NOTABLE = 40, 10
"""Windows of a page: of its whole run, and of notable steps."""
ROW_PX, LANE_PX = 8, 18
MOST_LABELS = 12
"""Steps of a lane that have their number."""
THIN = (WAITS, SIBLINGS, BUFFER)
"""Kinds of waiting, drawn as lines."""
THICK = {TOOLS: "#b07aa1", SCORING: "#9c755f"}
NOT_RECORDED = (
    "This run has no times of its steps. Runs record them since the timeline exists; those of"
    " earlier versions, and runs without generators, have none."
)


def timeline(
    groups: pa.Table,
    outcomes: pa.Table,
    metrics: pa.Table,
    step: int | None = None,
    steps: int = WINDOW,
    rows: int = ROWS,
) -> Chart:
    """Some trajectories, one in each row, from their admission until a step trains them, below the
    learner's steps, publications, pauses, evaluations and events.

    A trajectory's color changes when its replica had the next version.

    Args:
        groups, outcomes, metrics: of `asyncrl.open_run`.
        step: the last step of the window; default: the last one of the run.
        steps: how many steps the window has.
        rows: trajectories at most.
    """
    moments = Moments(groups, outcomes, metrics)
    if not moments.steps:
        return missing(TITLE, NOT_RECORDED)
    last = moments.steps[-1] if step is None else step
    return drawn(moments.window(last - steps + 1, last, rows))


def windows(moments: Moments, notable: Sequence[int] = (), most: int = MOST_WINDOWS) -> list[int]:
    """Last steps of windows that lie evenly over the run, the first and the last one included, and
    those of notable steps."""
    steps = moments.steps
    if not steps:
        return []
    ends = [*steps[WINDOW - 1 :: WINDOW]]
    if steps[-1] not in ends:
        ends.append(steps[-1])
    if len(ends) > most:
        ends = [ends[number * (len(ends) - 1) // (most - 1)] for number in range(most)]
    known = set(steps)
    return sorted({*ends, *[step for step in notable if step in known][:MOST_NOTABLE]})


def drawn(window: Window) -> Chart:
    """The chart of a window."""
    if not window.lanes and not window.bars:
        return missing(TITLE, f"Nothing is recorded of step {window.last_step}.")
    lanes = [name for name in LANES if any(bar.row == name for bar in window.lanes)]
    above = _lanes(window, lanes).properties(width=WIDTH, height=LANE_PX * len(lanes))
    parts = [above]
    if window.bars:
        height = max(40, ROW_PX * len(window.names))
        parts.append(_trajectories(window).properties(width=WIDTH, height=height))
    said = f"{window.shown} of {window.groups} groups" if window.bars else "no group"
    title = alt.Title(
        f"{TITLE}: steps {max(1, window.first_step)} to {window.last_step}",
        subtitle=f"{said}, a row for each trajectory; a color for each version of the weights",
    )
    together: Chart = alt.vconcat(*parts, title=title, spacing=4).resolve_scale(
        x="shared", color="independent"
    )
    return together


def _lanes(window: Window, lanes: Sequence[str]) -> Chart:
    rows = [_row(bar) | {"label": bar.note.removeprefix("step ")} for bar in window.lanes]
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        x=_x(labeled=False),
        y=alt.Y("row:N", sort=list(lanes), scale=alt.Scale(domain=list(lanes)), axis=_names_axis()),
        tooltip=_tooltip("what"),
    )
    layers: list[alt.Chart] = [
        base.mark_bar(height=LANE_PX - 6, color=BLUE, stroke="white", strokeWidth=0.4)
        .encode(x2="end:T")
        .transform_filter("datum.end > datum.start")
    ]
    if any(bar.end == bar.start for bar in window.lanes):
        marks = base.mark_point(color=RED, filled=True, size=40)
        layers.append(marks.transform_filter("datum.end == datum.start"))
    if sum(bar.row == STEPS for bar in window.lanes) <= MOST_LABELS:
        steps = base.transform_filter(f"datum.row == '{STEPS}'")
        layers.append(
            steps.mark_text(align="left", dx=3, fontSize=10, color="white").encode(text="label:N")
        )
    return alt.layer(*layers)


def _trajectories(window: Window) -> Chart:
    y = alt.Y(
        "row:Q",
        axis=None,
        scale=alt.Scale(domain=[len(window.names) - 0.5, -0.5], nice=False, zero=False),
    )
    known = {*THIN, *THICK, GENERATES}
    lasting = [bar for bar in window.bars if bar.end > bar.start]
    versions = sorted({bar.version for bar in lasting if bar.version is not None})
    thick = ROW_PX - 2

    def of(bars: Iterable[Bar], x: str = "start") -> alt.Chart:
        rows = [_row(bar) | {"name": window.names[int(bar.row)]} for bar in bars]
        return alt.Chart(alt.InlineData(values=rows)).encode(x=_x(x), y=y, tooltip=_tooltip("name"))

    starts = [_row(bar) for bar in window.lanes if bar.row == STEPS]
    rules = alt.Chart(alt.InlineData(values=starts)).encode(x=_x())
    layers = [rules.mark_rule(strokeDash=[2, 3], color=BLUE, opacity=0.7)]
    if waiting := [bar for bar in lasting if bar.kind in THIN]:
        layers.append(of(waiting).mark_rule(strokeWidth=1, color=GRAY).encode(x2="end:T"))
    if generating := [bar for bar in lasting if bar.kind == GENERATES]:
        made = of(generating).mark_bar(height=thick)
        layers.append(made.encode(x2="end:T", color=_version_color(versions)))
    if working := [bar for bar in lasting if bar.kind in THICK]:
        done = of(working).mark_bar(height=thick - 1)
        layers.append(done.encode(x2="end:T", color=_kind_color(working)))
    if trained := [bar for bar in window.bars if bar.kind == BUFFER]:
        mark = of(trained, "end").mark_point(shape="circle", color=BLUE, filled=True, size=16)
        layers.append(mark.encode(opacity=alt.value(1)))
    if lost := [bar for bar in window.bars if bar.kind not in known]:
        layers.append(of(lost).mark_point(shape="cross", angle=45, color=RED, filled=True, size=40))
    drawn: Chart = alt.layer(*layers).resolve_scale(color="independent")
    return drawn


def _version_color(versions: Sequence[int]) -> alt.Color:
    """A color for each version. Neighbors differ, and colors repeat if there are many."""
    legend = alt.Legend(title="version", orient="right", symbolType="square", symbolLimit=16)
    return alt.Color("version:N", scale=alt.Scale(domain=list(versions)), legend=legend)


def _kind_color(bars: Sequence[Bar]) -> alt.Color:
    kinds = [kind for kind in THICK if any(bar.kind == kind for bar in bars)]
    legend = alt.Legend(title=None, orient="right", symbolType="square")
    scale = alt.Scale(domain=kinds, range=[THICK[kind] for kind in kinds])
    return alt.Color("kind:N", scale=scale, legend=legend)


def _x(field: str = "start", labeled: bool = True) -> alt.X:
    axis = alt.Axis(format="%H:%M:%S", title="time of day (UTC)", tickCount=6)
    return alt.X(
        f"{field}:T",
        scale=alt.Scale(type="utc", nice=False),
        axis=axis if labeled else None,
    )


def _names_axis() -> alt.Axis:
    return alt.Axis(title=None, domain=False, ticks=False, labelPadding=6, grid=False)


def _tooltip(name: str) -> list[alt.Tooltip]:
    return [
        alt.Tooltip(f"{name}:N", title="what" if name == "what" else "which"),
        alt.Tooltip("kind:N", title="does"),
        alt.Tooltip("version:Q", title="version"),
        alt.Tooltip("seconds:Q", title="seconds", format=",.3f"),
        alt.Tooltip("note:N", title="note"),
    ]


def _row(bar: Bar) -> dict[str, object]:
    return {
        "row": bar.row,
        "kind": bar.kind,
        "start": round(1000 * bar.start, 1),
        "end": round(1000 * bar.end, 1),
        "seconds": round(bar.end - bar.start, 4),
        "version": bar.version,
        "note": bar.note,
        "what": bar.note,
    }
