"""Draws the figures of benchmarks, as SVG or PNG by the name of the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

COLORS = ("#4878a8", "#d1783a", "#6a9f58", "#a8586f", "#8c7bb0", "#9a9a9a", "#c9a227", "#5aa7a7")
SIZE = (7.2, 4.0)


@dataclass(frozen=True)
class Axes:
    """Title and labels of a figure, with units."""

    title: str
    x: str
    y: str
    log_x: bool = False


def draw_lines(
    path: Path,
    axes: Axes,
    series: Mapping[str, Sequence[tuple[float, float]]],
    bar: tuple[str, float] | None = None,
) -> None:
    """Draw each series as a line with a mark at each (x, y), and a bar to reach as a dashed line.
    Every x gets a tick."""
    figure, plot = plt.subplots(figsize=SIZE, layout="constrained")
    for (name, points), color in zip(series.items(), COLORS, strict=False):
        plot.plot(*zip(*points, strict=True), marker="o", color=color, label=name)
    if bar is not None:
        plot.axhline(bar[1], color="black", linestyle="--", linewidth=1, label=bar[0])
    if axes.log_x:
        plot.set_xscale("log")
    ticks = sorted({x for points in series.values() for x, _ in points})
    plot.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
    plot.minorticks_off()
    _finish(figure, plot, axes, path)


def draw_bars(path: Path, axes: Axes, bars: Mapping[str, Mapping[str, float]]) -> None:
    """Draw a stacked bar for each item: part → height. A part has one color in all bars, and the
    sum stands above each bar."""
    figure, plot = plt.subplots(figsize=SIZE, layout="constrained")
    parts = list(dict.fromkeys(part for heights in bars.values() for part in heights))
    below = [0.0] * len(bars)
    for number, part in enumerate(parts):
        heights = [one.get(part, 0.0) for one in bars.values()]
        color = COLORS[number % len(COLORS)]
        plot.bar(list(bars), heights, bottom=below, label=part, color=color, width=0.6)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    for place, total in enumerate(below):
        plot.text(place, total, f"{total:.1f}", ha="center", va="bottom")
    plot.margins(y=0.1)
    _finish(figure, plot, axes, path)


def _finish(figure: plt.Figure, plot: plt.Axes, axes: Axes, path: Path) -> None:
    plot.set_title(axes.title, fontsize=10)
    plot.set_xlabel(axes.x)
    plot.set_ylabel(axes.y)
    plot.set_ylim(bottom=0)
    plot.spines[["top", "right"]].set_visible(False)
    plot.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"plot: {path}", flush=True)
