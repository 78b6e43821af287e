"""What a run says while it goes on: its records to the metrics, its counters to the live table."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from asyncrl.config import Config
from asyncrl.contracts.messages import Example
from asyncrl.contracts.outcomes import Outcome
from asyncrl.contracts.protocols import TableRow
from asyncrl.control.coordinator import Coordinator
from asyncrl.observe.alarms import Alarms
from asyncrl.observe.log_lines import record_line
from asyncrl.observe.progress import Progress, ProgressView, time_left
from asyncrl.observe.shared_text import SharedText
from asyncrl.rundir.metrics import MetricsWriter
from asyncrl.rundir.outcomes import OutcomesWriter
from asyncrl.runtime.redact import redact, shown

__all__ = ["Live", "RunRecorder"]

logger = logging.getLogger(__name__)

SHOW_EVERY_S = 0.5
"""Seconds between two pictures of the live table."""

MOST_ROWS, MOST_CHARACTERS = 16, 4096
"""Rows of a table of completions in a sink, and characters of each of its texts."""

RATE_WINDOW_S = 10.0
"""Seconds over which tokens per second are counted."""


class RunRecorder:
    """`Recorder` on files."""

    def __init__(
        self,
        writer: MetricsWriter,
        outcomes: OutcomesWriter,
        live: Live,
        entropies: Sequence[float] = (),
    ) -> None:
        """`entropies`: as in `Alarms`."""
        self.writer, self.outcomes_writer, self.live = writer, outcomes, live
        self._alarms = Alarms(live.config.rollout.cuts_distribution, entropies)
        self._told: set[str] = set()

    def record(self, event: str, step: int, version: int, metrics: Any) -> None:
        """Write the record, show what the table has of it, raise the alarms of a step or an
        evaluation."""
        if event == "step":
            metrics = {
                **metrics,
                **self._alarms.entropy_ratio(metrics.get("entropy")),
                "time/event_loop_lag_s": self.live.take_lag(),
            }
        self.writer.write(event, step, version, metrics)
        if (
            line := record_line(event, step, version, metrics, self.live.config.max_steps)
        ) is not None:
            logger.info("%s", line)
        self.live.recorded(event, metrics)
        every = self.live.config.observe.completions_every
        if event == "step" and every and step % every == 0:
            self.writer.show_batch(step, self.live.rewards(), self.live.rows())
        if event in ("step", "evaluation"):
            self._raise_alarms(step, version, metrics)
        if event == "kept_batch":
            self.live.note(f"step {step}: {metrics['note']}")

    def _raise_alarms(self, step: int, version: int, metrics: Any) -> None:
        """Every alarm goes to the metrics, to the log when it begins, and to the terminal once for
        each metric."""
        for name, (line, begins) in self._alarms.check(metrics).items():
            self.writer.write("alarm", step, version, {"alarm": line})
            if begins:
                logger.warning("step %d: %s", step, line)
            if name not in self._told:
                self._told.add(name)
                self.live.note(f"step {step}: {line}")

    def outcomes(self, outcomes: list[Outcome], outstanding: list[int]) -> None:
        """Write how ordinals ended, and which have not."""
        self.outcomes_writer.write(outcomes, outstanding)

    async def flushed(self) -> None:
        """All outcomes given so far are on the disk."""
        await asyncio.to_thread(self.outcomes_writer.flush)

    def close(self) -> None:
        """One file of outcomes in place of many."""
        self.outcomes_writer.compact()


class Live:
    """Turns the coordinator's counters into what the live table shows."""

    def __init__(self, config: Config, started: float) -> None:
        self.config, self.started = config, started
        self.progress = Progress(
            phase="starting",
            max_steps=config.max_steps,
            max_staleness=config.staleness.max_staleness,
        )
        self.phases: dict[str, float] = {}
        self._phase_began = started
        self._coordinator: Coordinator | None = None
        self._lag = 0.0
        self._training_began = started
        self._counts: list[tuple[float, int, int]] = []
        self._shared = SharedText()
        self._shown: Sequence[tuple[Example, int]] = ()

    def phase(self, name: str) -> None:
        """The run is in this phase from now on; the one before has its seconds in `phases`."""
        now = time.monotonic()
        previous = self.progress.phase
        self.phases[previous] = self.phases.get(previous, 0.0) + now - self._phase_began
        self.progress.phase, self._phase_began = name, now
        logger.info("%s (%s took %.0f s)", name, previous, self.phases[previous])

    def note(self, text: str) -> None:
        """One more line below the table; the last three stand."""
        self.progress.notes = (*self.progress.notes[-2:], text)

    def follow(self, coordinator: Coordinator) -> None:
        """Training begins: show this coordinator's counters."""
        self.phase("training")
        self._coordinator = coordinator
        self._training_began = time.monotonic()
        self.progress.notes = ()

    def recorded(self, event: str, metrics: Any) -> None:
        """Take from a record what the table shows."""
        if event == "evaluation":
            self.progress.held_out_accuracy = metrics.get("eval/accuracy")
        if event == "step":
            self.progress.accuracy = metrics.get(f"reward/{self.config.accuracy}")
            self.progress.reward_parts = {
                name: value
                for name in self.config.reward.functions
                if (value := metrics.get(f"reward/{name}")) is not None
            }
        if event == "startup" and any(
            value for name, value in metrics.items() if name.endswith("caches_removed")
        ):
            self.note("a damaged compile cache was removed; it is made again")
        if event == "logprob_check":
            self.note(
                "generator and learner log-probs differ by at most"
                f" {metrics['check/logprob_max_diff']:.1e} over {metrics['check/tokens']:.0f}"
                " tokens"
            )

    async def show(self, view: ProgressView) -> None:
        """Show the table again and again, until cancelled; how late the event loop was with it is
        measured on the way."""
        while True:
            self._update()
            view.show(self.progress)
            slept = time.monotonic()
            await asyncio.sleep(SHOW_EVERY_S)
            self._lag = max(self._lag, time.monotonic() - slept - SHOW_EVERY_S)

    def take_lag(self) -> float:
        """Seconds by which the event loop was late at most, since the last call."""
        lag, self._lag = self._lag, 0.0
        return lag

    def rewards(self) -> Sequence[float]:
        """Those of the last batch."""
        return self._coordinator.progress.rewards if self._coordinator is not None else ()

    def rows(self) -> list[TableRow]:
        """Some of the last batch's trajectories, for the sinks."""
        examples = self._coordinator.progress.examples if self._coordinator is not None else ()
        return [self._row(example, stale) for example, stale in examples[:MOST_ROWS]]

    def _row(self, example: Example, stale: int) -> TableRow:
        parts = {
            f"reward/{name}": example.reward_parts.get(name)
            for name in self.config.reward.functions
        }
        texts = {
            "prompt": shown(example.prompt)[:MOST_CHARACTERS],
            "completion": shown(example.completion)[:MOST_CHARACTERS],
        }
        return {
            **texts,
            "reward": example.reward,
            **parts,
            "version": example.version,
            "staleness": stale,
        }

    def _show_sample(self, examples: Sequence[tuple[Example, int]]) -> None:
        """The first trajectory of a new batch."""
        if not examples or examples is self._shown:
            return
        self._shown = examples
        for example, _ in examples:
            self._shared.add(
                redact(example.prompt)
            )  # before the cut: half a secret is not recognized
        sample, progress = examples[0][0], self.progress
        progress.prompt, progress.completion = (
            self._shared.without(redact(sample.prompt)),
            sample.completion,
        )
        progress.sample_reward, progress.sample_parts = sample.reward, sample.reward_parts

    def _update(self) -> None:
        progress, now = self.progress, time.monotonic()
        progress.elapsed_s = now - self.started
        if self._coordinator is None:
            return
        seen = self._coordinator.progress
        progress.step, progress.learner_version = seen.version, seen.version
        progress.committed_version = seen.committed if seen.committed >= 0 else None
        progress.reward = seen.reward
        self._show_sample(seen.examples)
        if seen.reward is not None:
            progress.staleness_mean, progress.staleness_max = (
                seen.staleness_mean,
                seen.staleness_max,
            )
        progress.learner_waited_s, progress.generators_waited_s = (
            seen.learner_waited_s,
            seen.generators_waited_s,
        )
        self._counts = [count for count in self._counts if now - count[0] <= RATE_WINDOW_S] + [
            (now, seen.generated_tokens, seen.trained_tokens)
        ]
        began, generated, trained = self._counts[0]
        if now > began:
            progress.generated_tokens_per_s = (seen.generated_tokens - generated) / (now - began)
            progress.trained_tokens_per_s = (seen.trained_tokens - trained) / (now - began)
        first = self._coordinator.first_version
        progress.left_s = time_left(
            seen.version - first, self.config.max_steps - first, now - self._training_began
        )
