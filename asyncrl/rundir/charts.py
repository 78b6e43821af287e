"""The charts of one run."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import pyarrow as pa

from asyncrl.charts import Chart, asynchrony, learning, themed
from asyncrl.charts.timeline import ROWS, WINDOW, timeline


class Recorded(Protocol):
    """What charts read of a run: `asyncrl.rundir.reader.Run`."""

    @property
    def metrics(self) -> pa.Table: ...

    def groups(self) -> pa.Table: ...

    def outcomes(self) -> pa.Table: ...

    def taken_over(self) -> Collection[tuple[int, int]]: ...


class RunCharts:
    """Altair charts of a run's files as they are now. A chart whose data are missing says so.

    A notebook shows them as pictures, without the network. For tooltips, choose another renderer of
    Altair first, such as `altair.renderers.enable("html")`.
    """

    def __init__(self, run: Recorded, dark: bool = False) -> None:
        self._run, self._dark = run, dark

    def __repr__(self) -> str:
        return f"{self._run!r}.charts"

    @property
    def dark(self) -> RunCharts:
        """The same charts for a dark page."""
        return RunCharts(self._run, dark=True)

    def reward(self) -> Chart:
        """Mean reward of each step's batch, with one standard deviation."""
        return self._themed(learning.reward(self._run.metrics))

    def reward_parts(self) -> Chart:
        """Mean of each reward function and of its parts, by step."""
        return self._themed(learning.reward_parts(self._run.metrics))

    def accuracy(self) -> Chart:
        """Held-out accuracy and pass@k of each set, by step."""
        return self._themed(learning.accuracy(self._run.metrics))

    def lengths(self) -> Chart:
        """Tokens of a completion, and the share of completions that were cut, by step."""
        return self._themed(learning.lengths(self._run.metrics))

    def policy(self) -> Chart:
        """Entropy, KL divergence, clipped tokens and the gradient's norm, by step."""
        return self._themed(learning.policy(self._run.metrics))

    def losses(self) -> Chart:
        """Loss of training, and of held-out rows, by step."""
        return self._themed(learning.losses(self._run.metrics))

    def preferences(self) -> Chart:
        """How well the policy tells chosen from rejected completions, by step."""
        return self._themed(learning.preferences(self._run.metrics))

    def staleness(self) -> Chart:
        """Number of trained groups by step and staleness."""
        return self._themed(asynchrony.staleness(self._run.outcomes()))

    def versions(self, last: int = 40) -> Chart:
        """Number of groups by the version that trained them and their oldest version."""
        return self._themed(asynchrony.versions(self._run.outcomes(), last))

    def waits(self) -> Chart:
        """Seconds of each step in which the learner works and waits, and the generators wait."""
        return self._themed(asynchrony.waits(self._run.metrics))

    def publication(self) -> Chart:
        """Seconds of each part of a version's publication."""
        return self._themed(asynchrony.publication(self._run.metrics))

    def throughput(self) -> Chart:
        """Tokens per second that are generated and trained, by step."""
        return self._themed(asynchrony.throughput(self._run.metrics))

    def memory(self) -> Chart:
        """Memory of the run's parts, and of the driver's machine, by step."""
        return self._themed(asynchrony.memory(self._run.metrics))

    def timeline(self, step: int | None = None, steps: int = WINDOW, rows: int = ROWS) -> Chart:
        """When trajectories waited, were generated, scored and trained, beside what the run did.

        Args:
            step: the last step of the window; default: the last one of the run.
            steps: how many steps the window has.
            rows: trajectories at most.
        """
        run = self._run
        tables = (run.groups(), run.outcomes(), run.metrics)
        drawn = timeline(*tables, step=step, steps=steps, rows=rows, taken_over=run.taken_over())
        return self._themed(drawn)

    def _themed(self, chart: Chart) -> Chart:
        return themed(chart, self._dark)
