"""What all charts share: curves, bands, stacked areas and heat maps of plain rows, in one theme."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import altair as alt
from altair.typing import ChartType

Chart = ChartType
if alt.renderers.active == "default":  # it would load scripts from the network
    alt.renderers.enable("svg")

Points = Sequence[tuple[float, float]]
"""(x, y), in the order of x."""

WIDTH, HEIGHT = 640, 200
WHOLE = ",d"
"""d3's format of a whole number."""
MOST_POINTS = 600
"""Points of a curve. More of them are averaged, since a picture has about as many columns."""
FEW_POINTS = 40
"""A curve with at most this many points marks each. One with more is pale, behind its mean over
neighbors."""
MOST_BARS = 120
SMALL_COLUMNS = 3
MOST_COLORS = 5
"""Series of one chart that can be told apart."""
FONT = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif"
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#b2609a", "#8a6d00", "#56b4e9", "#6e6e6e", "#e69f00")
DARK = ("#56b4e9", "#f08a4b", "#2fc79a", "#e39ccb", "#e6c84f", "#9ad5f5", "#b5b5b5", "#ffc658")
"""The colors of Okabe and Ito, which people with color-blindness can tell apart: darker on white,
lighter on a dark page."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: its title with the unit, and how its numbers are written (a format of d3)."""

    title: str
    format: str = ""
    zero: bool = True
    domain: tuple[float, float] | None = None

    def y(self, field: str = "y") -> alt.Y:
        return alt.Y(f"{field}:Q", title=self.title, axis=self._axis(), scale=self._scale())

    def x(self, field: str = "x") -> alt.X:
        return alt.X(f"{field}:Q", title=self.title, axis=self._axis(), scale=self._scale())

    def tooltip(self, field: str) -> alt.Tooltip:
        return alt.Tooltip(f"{field}:Q", title=self.title, format=self.format or ",.4~g")

    def _axis(self) -> alt.Axis:
        if self.format == WHOLE:
            return alt.Axis(format=WHOLE, tickMinStep=1)
        return alt.Axis(format=self.format) if self.format else alt.Axis()

    def _scale(self) -> alt.Scale:
        if self.domain is not None:
            return alt.Scale(domain=list(self.domain), nice=False, clamp=True)
        return alt.Scale(zero=self.zero, nice=self.zero)


STEP = Axis("step", WHOLE, zero=False)
VERSION = Axis("version", WHOLE, zero=False)
SHARE = Axis("share", ".0%", domain=(0, 1))


def curves(
    title: str,
    x: Axis,
    y: Axis,
    series: Mapping[str, Points],
    band: Sequence[tuple[float, float, float]] = (),
    height: int = HEIGHT,
) -> Chart:
    """A line for each series. `band` has (x, low, high) of an area behind them."""
    names = [name for name, points in series.items() if points]
    few = all(len(series[name]) <= FEW_POINTS for name in names)
    rows = [
        {"x": at, "y": value, "mean": mean, "series": name}
        for name in names
        for (at, value), mean in _with_means(averaged(series[name], MOST_POINTS))
    ]
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        x=x.x(),
        color=_colors(names),
        tooltip=[*_named(names), x.tooltip("x"), y.tooltip("y")],
    )
    layers: list[alt.Chart] = []
    if band:
        area = [{"x": at, "low": low, "high": high} for at, low, high in _thinned(band)]
        layers.append(
            alt.Chart(alt.InlineData(values=area))
            .mark_area(opacity=0.15)
            .encode(x=x.x(), y=y.y("low"), y2="high:Q", color=alt.datum(names[0]))
        )
    if few:
        layers.append(base.mark_line(point=True).encode(y=y.y()))
    else:
        layers.append(base.mark_line(opacity=0.3, strokeWidth=1).encode(y=y.y()))
        layers.append(base.mark_line().encode(y=y.y("mean")))
        layers.append(base.mark_point(opacity=0, size=80).encode(y=y.y()))  # for the pointer
    return _sized(alt.layer(*layers), title, height)


def small_curves(title: str, x: Axis, y: Axis, series: Mapping[str, Points]) -> Chart:
    """A small chart for each series, SMALL_COLUMNS beside one another, with the same axes."""
    width = (WIDTH - 60 * SMALL_COLUMNS) // SMALL_COLUMNS + 40
    drawn = [
        curves(name, x, y, {name: points}, height=90).properties(
            width=width, title=alt.Title(name, fontSize=11, fontWeight="normal")
        )
        for name, points in series.items()
    ]
    grid = alt.concat(*drawn, columns=SMALL_COLUMNS, title=title)
    together: Chart = grid.resolve_scale(y="shared", color="independent")
    return together


def stacked(title: str, x: Axis, y: Axis, series: Mapping[str, Points]) -> Chart:
    """A bar for each x, in which the series are on top of one another, the first one at the bottom.
    Neighbors share a bar if there are more than MOST_BARS."""
    names = [name for name, points in series.items() if points]
    parts = {name: dict(averaged(series[name], MOST_BARS)) for name in names}
    positions = sorted({at for part in parts.values() for at in part})
    wide = min((after - before for before, after in pairwise(positions)), default=1.0)
    rows = []
    for at in positions:
        top = 0.0
        for name in names:
            value = parts[name].get(at, 0.0)
            ends = {"x": at - wide / 2, "x2": at + wide / 2, "low": top, "high": top + value}
            rows.append({**ends, "at": at, "value": value, "series": name})
            top += value
    chart = alt.Chart(alt.InlineData(values=rows)).mark_rect()
    chart = chart.encode(
        x=x.x(),
        x2="x2:Q",
        y=y.y("high"),
        y2="low:Q",
        color=_colors(names),
        tooltip=[*_named(names), x.tooltip("at"), y.tooltip("value")],
    )
    return _sized(chart, title)


def heat_map(
    title: str,
    x: Axis,
    y: Axis,
    cells: Sequence[tuple[float, float, float]],
    value: Axis,
    width: int = 1,
) -> Chart:
    """A colored field for each (x, y, value), where x and y are whole numbers. A field is one unit
    high, and `width` units wide from x on."""
    rows = [
        {"x": at - 0.5, "x2": at + width - 0.5, "y": up - 0.5, "y2": up + 0.5, "value": amount}
        for at, up, amount in cells
    ]
    ends = (min(row["y"] for row in rows), max(row["y2"] for row in rows))
    y = replace(y, domain=ends)
    legend = alt.Legend(format=value.format, tickMinStep=1)
    chart = alt.Chart(alt.InlineData(values=rows)).mark_rect()
    chart = chart.encode(
        x=x.x(),
        x2="x2:Q",
        y=y.y(),
        y2="y2:Q",
        color=alt.Color("value:Q", title=value.title, legend=legend, scale=alt.Scale(domainMin=0)),
        tooltip=[value.tooltip("value")],
    )
    return _sized(chart, title)


def missing(title: str, why: str) -> Chart:
    """What stands in a chart's place when its data are not there. `why` says how to get them."""
    said = "\n".join(textwrap.wrap(why, 80))
    chart = alt.Chart(alt.InlineData(values=[{"why": said}]))
    marked = chart.mark_text(fontSize=13, lineBreak="\n").encode(text="why:N")
    return _sized(marked, title, HEIGHT // 2)


def under_one_another(*charts: Chart) -> Chart:
    """Charts with their own colors in one picture."""
    below: Chart = alt.vconcat(*charts).resolve_scale(color="independent")
    return below


def averaged(points: Points, most: int) -> list[tuple[float, float]]:
    """At most `most` points: the means of neighbors if there are more."""
    share = max(1, -(-len(points) // most))
    parts = (points[first : first + share] for first in range(0, len(points), share))
    return [(_mean(at for at, _ in part), _mean(value for _, value in part)) for part in parts]


def themed(chart: Chart, dark: bool = False) -> Chart:
    """A chart with its theme and a background of its own."""
    dressed: Chart = chart.configure(**theme(dark) | {"background": _page(dark)})
    return dressed


def theme(dark: bool = False) -> dict[str, Any]:
    """The `config` of a Vega-Lite specification."""
    text, quiet, grid = (
        ("#e8e8e8", "#a8a8a8", "#3a3a3a") if dark else ("#202020", "#5c5c5c", "#e4e4e4")
    )
    axis = {
        "labelColor": quiet,
        "titleColor": quiet,
        "titleFontWeight": "normal",
        "gridColor": grid,
        "domainColor": grid,
        "tickColor": grid,
        "labelFontSize": 11,
        "titleFontSize": 11,
    }
    return {
        "background": None,
        "font": FONT,
        "view": {"stroke": None},
        "title": {
            "color": text,
            "anchor": "start",
            "fontSize": 14,
            "fontWeight": 600,
            "offset": 8,
            "subtitleColor": quiet,
            "subtitleFontSize": 11,
        },
        "axis": axis,
        "axisY": {"minExtent": 44},
        "legend": {"labelColor": text, "titleColor": quiet, "titleFontWeight": "normal"},
        "line": {"strokeWidth": 1.8},
        "point": {"size": 30, "filled": True},
        "text": {"color": quiet},
        "range": {
            "category": list(DARK if dark else LIGHT),
            "heatmap": {"scheme": "viridis" if dark else "blues"},
            "ramp": {"scheme": "viridis" if dark else "blues"},
        },
    }


def picture(chart: Chart, form: Literal["svg", "png"] = "svg", dark: bool = False) -> bytes:
    """A chart as a file's content, drawn without a browser and without the network."""
    import vl_convert

    drawn = chart.to_dict() | {"config": theme(dark)}
    version = alt.SCHEMA_VERSION.rsplit(".", 1)[0]
    if form == "svg":
        return vl_convert.vegalite_to_svg(drawn, vl_version=version).encode()
    drawn["config"]["background"] = _page(dark)
    return vl_convert.vegalite_to_png(drawn, vl_version=version, scale=2.0)


def _sized(chart: Chart, title: str, height: int = HEIGHT) -> Chart:
    sized: Chart = chart.properties(title=title, width=WIDTH, height=height)
    return sized


def _page(dark: bool) -> str:
    return "#1e1e1e" if dark else "#ffffff"


def _colors(names: Sequence[str]) -> alt.Color:
    legend = (
        alt.Legend(title=None, orient="top", labelLimit=400, symbolOpacity=1)
        if len(names) > 1
        else None
    )
    return alt.Color(
        "series:N", sort=list(names), scale=alt.Scale(domain=list(names)), legend=legend
    )


def _named(names: Sequence[str]) -> list[alt.Tooltip]:
    return [alt.Tooltip("series:N", title="what")] if len(names) > 1 else []


def _thinned(rows: Sequence[tuple[float, float, float]]) -> Sequence[tuple[float, float, float]]:
    """At most MOST_POINTS rows, evenly chosen."""
    return rows[:: -(-len(rows) // MOST_POINTS) or 1]


def _with_means(points: Points) -> Iterator[tuple[tuple[float, float], float]]:
    """Each point with the mean of its neighborhood, which is a fifteenth of the curve."""
    reach = max(2, len(points) // 30)
    for number, point in enumerate(points):
        near = points[max(0, number - reach) : number + reach + 1]
        yield point, _mean(value for _, value in near)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
