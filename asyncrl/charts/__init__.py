"""Charts of a run, the same in the page, in notebooks and in the docs: pure functions from Arrow
tables to Altair charts. `Run.charts` calls them with a run's own tables."""

from asyncrl.charts.drawing import Axis, Chart, curves, picture, themed
from asyncrl.charts.learning import compared

__all__ = ["Axis", "Chart", "compared", "curves", "picture", "themed"]
