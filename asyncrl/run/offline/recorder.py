"""Feeds the records of a run on a dataset to the metrics, and its counters to the live table."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

from asyncrl.observe.log_lines import record_line
from asyncrl.observe.metric_values import number
from asyncrl.observe.progress import Progress, ProgressView, time_left
from asyncrl.rundir.metrics import MetricsWriter

logger = logging.getLogger(__name__)

SHOW_EVERY_S = 0.5
"""Seconds between two updates of the live table."""
OFF_POLICY = frozenset(
    {
        "capped_fraction",
        "chi2",
        "clip_fraction",
        "ess",
        "in_flight_drift",
        "in_flight_drift_tokens",
        "kl_k1",
        "kl_k3",
        "kl_reference",
        "mask_fraction",
        "mask_fraction/band",
        "mask_fraction/rejected",
        "mask_fraction/sequence",
        "ratio_max",
        "ratio_mean",
        "value_loss",
        "weight_mean",
    }
)
"""Metrics of a step that compare two policies. A dataset has no policy to compare with."""
HELD_OUT_LOSS = "eval/loss"
NOT_COMPARED = ("eval/tokens", "eval/pairs", "eval/completions", "eval/evaluation_s")
"""Figures of an evaluation that training does not change."""
MOST_STEPS = 10
"""Steps at each end of a run over which its summary averages, at most a quarter of them."""


class OfflineRecorder:
    """Writes records and shows the progress. No alarm applies: they are about sampled data."""

    def __init__(self, writer: MetricsWriter, max_steps: int, first_version: int) -> None:
        self.writer = writer
        self.progress = Progress(phase="starting", max_steps=max_steps, step=first_version)
        self.phases: dict[str, float] = {}
        """Phase that has ended → its seconds."""
        self._started = self._phase_began = time.monotonic()
        self._first_version = first_version
        self._training_began: float | None = None

    def phase(self, name: str) -> None:
        """Begin a phase, and add the seconds of the previous one to `phases`."""
        now, previous = time.monotonic(), self.progress.phase
        self.phases[previous] = self.phases.get(previous, 0.0) + now - self._phase_began
        self.progress.phase, self._phase_began = name, now
        if name == "training" and self._training_began is None:
            self._training_began = now
        logger.info("%s (%s took %.0f s)", name, previous, self.phases[previous])

    def note(self, text: str) -> None:
        """Add a line below the table, which shows the last three."""
        self.progress.notes = (*self.progress.notes[-2:], text)

    def record(self, event: str, step: int, version: int, metrics: Mapping[str, object]) -> None:
        """Write the record and update the live table."""
        kept = {name: value for name, value in metrics.items() if name not in OFF_POLICY}
        self.writer.write(event, step, version, kept)
        line = record_line(event, step, version, kept, self.progress.max_steps)
        if line is not None:
            logger.info("%s", line)
        if event == "step":
            self.progress.step = version
            self.progress.loss = number(kept, "loss")
            self.progress.trained_tokens_per_s = number(kept, "tokens_per_s")
        if event == "evaluation":
            self.progress.held_out_loss = number(kept, HELD_OUT_LOSS)

    async def show(self, view: ProgressView) -> None:
        """Update the table every SHOW_EVERY_S until canceled."""
        while True:
            now, progress = time.monotonic(), self.progress
            progress.elapsed_s = now - self._started
            if self._training_began is not None:
                progress.left_s = time_left(
                    progress.step - self._first_version,
                    progress.max_steps - self._first_version,
                    now - self._training_began,
                )
            view.show(progress)
            await asyncio.sleep(SHOW_EVERY_S)


def loss_changes(records: Sequence[Mapping[str, object]]) -> list[str]:
    """Aligned lines: each held-out metric in the first and last evaluation, and the training loss
    of the first and last steps."""
    evaluations = [record for record in records if record["event"] == "evaluation"]
    steps = [record for record in records if record["event"] == "step"]
    rows: list[tuple[str, float | None, float | None]] = []
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        rows += [
            (f"held-out {name.removeprefix('eval/')}", number(first, name), number(last, name))
            for name in last
            if name.startswith("eval/")
            and name not in NOT_COMPARED
            and number(last, name) is not None
        ]
    if steps:
        many = max(1, min(MOST_STEPS, len(steps) // 4))
        rows.append(("training loss", _mean(steps[:many]), _mean(steps[-many:])))
    width = max((len(name) for name, _, _ in rows), default=0)
    return [f"{name:<{width}}  {_text(before)} → {_text(after)}" for name, before, after in rows]


def _mean(steps: Sequence[Mapping[str, object]]) -> float | None:
    known = [value for step in steps if (value := number(step, "loss")) is not None]
    return sum(known) / len(known) if known else None


def _text(value: float | None) -> str:
    return f"{'none':>9}" if value is None else f"{value:>9.4g}"
