"""The timeline: when each trajectory waited, was generated, scored and trained, beside what the run
did meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

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
    TRAINED,
    WAITS,
    Bar,
    Key,
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
END = {"field": "end"}
TOOLTIP = (
    {"field": "kind", "type": "nominal", "title": "does"},
    {"field": "version", "type": "quantitative", "title": "version"},
    {"field": "seconds", "type": "quantitative", "title": "seconds", "format": ",.3f"},
    {"field": "note", "type": "nominal", "title": "note"},
)
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
    taken_over: Collection[Key] = (),
) -> Chart:
    """Some trajectories, one in each row, from their admission until a step trains them, below the
    learner's steps, publications, pauses, evaluations and events.

    A trajectory's color changes when its replica had the next version.

    Args:
        groups, outcomes, metrics, taken_over: of `asyncrl.open_run`.
        step: the last step of the window; default: the last one of the run.
        steps: how many steps the window has.
        rows: trajectories at most.
    """
    moments = Moments(groups, outcomes, metrics, taken_over)
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
    chart: Chart = alt.VConcatChart.from_dict(specification(window))
    return chart


def specification(window: Window) -> dict[str, Any]:
    """A window's chart in Vega-Lite, without a theme. Altair's own objects would take a quarter of
    a second for each window of a page."""
    lanes = [name for name in LANES if any(bar.row == name for bar in window.lanes)]
    parts = [_lanes(window, lanes)]
    if window.bars:
        parts.append(_trajectories(window))
    said = f"{window.shown} of {window.groups} groups" if window.bars else "no group"
    return {
        "$schema": alt.SCHEMA_URL,
        "title": {
            "text": f"{TITLE}: steps {max(1, window.first_step)} to {window.last_step}",
            "subtitle": f"{said}, a row for each trajectory; a color for each version",
        },
        "vconcat": parts,
        "spacing": 4,
        "resolve": {"scale": {"x": "shared", "color": "independent"}},
    }


def _lanes(window: Window, lanes: Sequence[str]) -> dict[str, Any]:
    axis = {"title": None, "domain": False, "ticks": False, "labelPadding": 6, "grid": False}
    y = {"field": "row", "type": "nominal", "scale": {"domain": list(lanes)}, "axis": axis}
    lasting = [bar for bar in window.lanes if bar.end > bar.start]
    moments = [bar for bar in window.lanes if bar.end == bar.start]
    steps = [bar for bar in window.lanes if bar.row == STEPS]
    height = LANE_PX - 6
    bar = {"type": "bar", "height": height, "color": BLUE, "stroke": "white", "strokeWidth": 0.4}
    layers = [_layer(lasting, bar, y, x=_x(labeled=False), x2=END)]
    if moments:
        point = {"type": "point", "color": RED, "filled": True, "size": 40}
        layers.append(_layer(moments, point, y, x=_x(labeled=False)))
    if len(steps) <= MOST_LABELS:
        text = {"type": "text", "align": "left", "dx": 3, "fontSize": 10, "color": "white"}
        label = {"field": "label", "type": "nominal"}
        layers.append(_layer(steps, text, y, x=_x(labeled=False), text=label))
    return {"width": WIDTH, "height": LANE_PX * len(lanes), "layer": layers}


def _trajectories(window: Window) -> dict[str, Any]:
    names = window.names
    scale = {"domain": [len(names) - 0.5, -0.5], "nice": False, "zero": False}
    y = {"field": "row", "type": "quantitative", "axis": None, "scale": scale}
    lasting = [bar for bar in window.bars if bar.end > bar.start]
    thick = ROW_PX - 2
    starts = [bar for bar in window.lanes if bar.row == STEPS]
    rule = {"type": "rule", "strokeDash": [2, 3], "color": BLUE, "opacity": 0.7}
    layers = [
        {"data": {"values": [_row(bar) for bar in starts]}, "mark": rule, "encoding": {"x": _x()}}
    ]
    if waiting := [bar for bar in lasting if bar.kind in THIN]:
        line = {"type": "rule", "strokeWidth": 1, "color": GRAY}
        layers.append(_layer(waiting, line, y, names, x2=END))
    if made := [bar for bar in lasting if bar.kind == GENERATES]:
        block = {"type": "bar", "height": thick}
        layers.append(_layer(made, block, y, names, x2=END, color=_version_color(made)))
    if working := [bar for bar in lasting if bar.kind in THICK]:
        block = {"type": "bar", "height": thick - 1}
        layers.append(_layer(working, block, y, names, x2=END, color=_kind_color(working)))
    if trained := [bar for bar in window.bars if bar.note.startswith(TRAINED)]:
        mark = {"type": "point", "shape": "circle", "color": BLUE, "filled": True, "size": 16}
        layers.append(_layer(trained, mark | {"opacity": 1}, y, names, x=_x("end")))
    known = {*THIN, *THICK, GENERATES}
    if lost := [bar for bar in window.bars if bar.kind not in known]:
        mark = {
            "type": "point",
            "shape": "cross",
            "angle": 45,
            "color": RED,
            "filled": True,
            "size": 40,
        }
        layers.append(_layer(lost, mark, y, names))
    return {
        "width": WIDTH,
        "height": max(40, ROW_PX * len(names)),
        "layer": layers,
        "resolve": {"scale": {"color": "independent"}},
    }


def _layer(
    bars: Iterable[Bar],
    mark: Mapping[str, Any],
    y: Mapping[str, Any],
    names: Sequence[str] | None = None,
    **channels: Any,
) -> dict[str, Any]:
    """One mark of the chart with its bars.

    Args:
        names: of the rows, if they are trajectories.
    """
    rows = [_row(bar, None if names is None else names[int(bar.row)]) for bar in bars]
    which = [] if names is None else [{"field": "name", "type": "nominal", "title": "which"}]
    encoding = {"x": _x(), "y": y, "tooltip": [*which, *TOOLTIP], **channels}
    return {"data": {"values": rows}, "mark": mark, "encoding": encoding}


def _version_color(bars: Sequence[Bar]) -> dict[str, Any]:
    """A color for each version. Neighbors differ, and colors repeat if there are many."""
    versions = sorted({bar.version for bar in bars if bar.version is not None})
    legend = {"title": "version", "orient": "right", "symbolType": "square", "symbolLimit": 16}
    scale = {"domain": versions}
    return {"field": "version", "type": "nominal", "scale": scale, "legend": legend}


def _kind_color(bars: Sequence[Bar]) -> dict[str, Any]:
    kinds = [kind for kind in THICK if any(bar.kind == kind for bar in bars)]
    legend = {"title": None, "orient": "right", "symbolType": "square"}
    scale = {"domain": kinds, "range": [THICK[kind] for kind in kinds]}
    return {"field": "kind", "type": "nominal", "scale": scale, "legend": legend}


def _x(field: str = "start", labeled: bool = True) -> dict[str, Any]:
    axis = {"format": "%H:%M:%S", "title": "time of day (UTC)", "tickCount": 6}
    return {
        "field": field,
        "type": "temporal",
        "scale": {"type": "utc", "nice": False},
        "axis": axis if labeled else None,
    }


def _row(bar: Bar, name: str | None = None) -> dict[str, object]:
    named = {} if name is None else {"name": name}
    return named | {
        "row": bar.row,
        "kind": bar.kind,
        "start": round(1000 * bar.start, 1),
        "end": round(1000 * bar.end, 1),
        "seconds": round(bar.end - bar.start, 4),
        "version": bar.version,
        "note": bar.note,
        "label": bar.note.removeprefix("step "),
    }
