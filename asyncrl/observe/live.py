"""Feeds a run's records to the metrics, and its counters to the live table."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import pairwise

from asyncrl.contracts.messages import ReplicaStatus
from asyncrl.contracts.outcomes import Outcome
from asyncrl.contracts.protocols import TableRow
from asyncrl.control.bookkeeping import BatchExample
from asyncrl.control.coordinator import Coordinator
from asyncrl.observe.alarms import Alarms
from asyncrl.observe.failed_sessions import FailureNotes
from asyncrl.observe.log_lines import record_line
from asyncrl.observe.metric_values import number
from asyncrl.observe.progress import Alarm, Progress, ProgressView, share, time_left
from asyncrl.observe.shared_text import SharedText
from asyncrl.observe.spec import ObserveSpec
from asyncrl.rundir.metrics import MetricsWriter
from asyncrl.rundir.outcomes import OutcomesWriter
from asyncrl.runtime.processes.resident import resident_bytes, used_ratio
from asyncrl.runtime.redact import redact_all, shown

logger = logging.getLogger(__name__)

SHOW_EVERY_S = 0.5
"""Seconds between two updates of the live table."""

MOST_NOTES = 10
"""Notes that are kept until the next line of a log."""

MOST_ROWS, MOST_CHARACTERS = 16, 4096
"""Limits of a table of completions in a sink: its rows, and the characters of each text."""

RATE_WINDOW_S, ASK_EVERY_S = 15.0, 3.0
"""Shortest window of the tokens per second, and time between two questions to the generators. In
seconds."""

Statuses = Callable[[], Awaitable[Sequence[ReplicaStatus]]]
"""Asks the generators for their states."""


class RunRecorder:
    """A `Recorder` that writes to files."""

    def __init__(
        self,
        writer: MetricsWriter,
        outcomes: OutcomesWriter,
        live: Live,
        entropies: Sequence[float] = (),
        epoch: int | None = None,
    ) -> None:
        """
        Args:
            entropies: as in `Alarms`.
            epoch: prompts of an epoch.
        """
        self._epoch = epoch
        self.writer, self.outcomes_writer, self.live = writer, outcomes, live
        self._alarms = Alarms(live.spec.rollout.cuts_distribution, entropies, live.spec.train_ends)
        self._failures = FailureNotes()

    def record(self, event: str, step: int, version: int, metrics: Mapping[str, object]) -> None:
        """Write the record, update the live table, and raise the alarms of a step or an
        evaluation. The first step also gets the record `first_step`."""
        if event == "step":
            metrics = {
                **metrics,
                **self._alarms.entropy_ratio(metrics.get("entropy")),
                "time/event_loop_lag_s": self.live.take_lag(),
                **self.live.memory(),
                **self._epochs(number(metrics, "data/prompts_seen")),
            }
        self.writer.write(event, step, version, metrics)
        if (
            line := record_line(event, step, version, metrics, self.live.spec.max_steps)
        ) is not None:
            logger.info("%s", line)
        if event == "step" and (timeline := self.live.first_step()):
            self.record("first_step", step, version, timeline)
        self.live.recorded(event, version, metrics)
        every = self.live.spec.observe.completions_every
        if event == "step" and every and step % every == 0:
            self.writer.show_batch(step, self.live.distributions(), self.live.rows())
        if event in ("step", "evaluation"):
            self._raise_alarms(step, version, metrics)
        if event == "kept_batch":
            self.live.note(f"step {step}: {metrics['note']}")
        if event == "failed_sessions" and (note := self._failures.note(metrics)) is not None:
            logger.warning("step %d: %s", step, note)
            self.live.pin(f"step {step}: {note}")

    def _epochs(self, seen: float | None) -> dict[str, float]:
        return {"data/epoch": seen / self._epoch} if self._epoch and seen is not None else {}

    def _raise_alarms(self, step: int, version: int, metrics: Mapping[str, object]) -> None:
        """Record every alarm, and show it. A new one also goes to the log."""
        for name, (line, begins) in self._alarms.check(metrics).items():
            self.writer.write("alarm", step, version, {"alarm": line})
            if begins:
                logger.warning("step %d: %s", step, line)
            self.live.alarm(name, step, line)

    def outcomes(self, outcomes: list[Outcome], outstanding: list[int]) -> None:
        """Write the outcomes, and the ordinals that are still outstanding."""
        self.outcomes_writer.write(outcomes, outstanding)

    async def flushed(self) -> None:
        """Return once all outcomes so far are on the disk."""
        await asyncio.to_thread(self.outcomes_writer.flush)

    def close(self) -> None:
        """Merge the files of outcomes into one."""
        self.outcomes_writer.compact()


class Live:
    """Turns the coordinator's counters into a `Progress`, which the live table shows."""

    def __init__(self, spec: ObserveSpec, started: float, asked: float | None = None) -> None:
        """
        Args:
            asked: when the user's command began, or the last attempt ended, on the monotonic clock.
                None: with `started`.
        """
        self.spec, self.started = spec, started
        self._asked = started if asked is None else asked
        self._stepped = False
        self.progress = Progress(
            phase="connecting to Ray",
            max_steps=spec.max_steps,
            max_staleness=spec.staleness.max_staleness,
        )
        self.phases: dict[str, float] = {}
        """Phase that has ended → its seconds."""
        self._phase_began = started
        self._coordinator: Coordinator | None = None
        self._notes: list[str] = []
        self._pinned: list[str] = []
        self._lag = 0.0
        self._training_began = started
        self._generated: list[tuple[float, int]] = []
        self._trained: list[tuple[float, int]] = []
        """Times, and the tokens until then. The learner's are from the ends of steps."""
        self._engine_tokens: dict[str, int] = {}
        """Replica → tokens that its engine has generated."""
        self._replica_bytes = 0
        self._shared = SharedText()
        self._shown: Sequence[BatchExample] = ()

    def phase(self, name: str) -> None:
        """Begin a phase, and add the seconds of the previous one to `phases`."""
        now = time.monotonic()
        previous = self.progress.phase
        self.phases[previous] = self.phases.get(previous, 0.0) + now - self._phase_began
        self.progress.phase, self._phase_began = name, now
        logger.info("%s (%s took %.0f s)", name, previous, self.phases[previous])

    def first_step(self) -> dict[str, float]:
        """The record `first_step`: seconds from the command to the end of the first step, and in
        each phase until then. Empty after the first call."""
        if self._stepped:
            return {}
        self._stepped = True
        now = time.monotonic()
        phases, phase = dict(self.phases), self.progress.phase
        phases[phase] = phases.get(phase, 0.0) + now - self._phase_began
        return {
            "startup/first_step_s": now - self._asked,
            "startup/phase/preparation_s": self.started - self._asked,
            **{
                f"startup/phase/{name.replace(' ', '_')}_s": seconds
                for name, seconds in phases.items()
            },
        }

    def note(self, text: str) -> None:
        """Add a line below the table, which shows the last three. A log gets all of them. A line
        that is there already moves to the end."""
        self._notes = [*(note for note in self._notes if note != text), text][-MOST_NOTES:]
        self._show_notes()

    def alarm(self, metric: str, step: int, text: str) -> None:
        """Show the alarm of a metric, with the number of steps that had it."""
        known = self.progress.alarms.get(metric)
        steps = 1 if known is None else known.steps + 1
        self.progress.alarms = {**self.progress.alarms, metric: Alarm(text, step, steps)}

    def pin(self, text: str) -> None:
        """Show a line below all others, until another one replaces it."""
        self._pinned = [text]
        self._show_notes()

    def _show_notes(self) -> None:
        self.progress.notes = (*self._notes, *self._pinned)

    def follow(self, coordinator: Coordinator) -> None:
        """Begin training: show this coordinator's counters from now on."""
        self.phase("training")
        self._coordinator = coordinator
        self._training_began = time.monotonic()
        self.progress.step = coordinator.first_version
        self._notes, self._pinned = [], []
        self._show_notes()

    def recorded(self, event: str, version: int, metrics: Mapping[str, object]) -> None:
        """Take from a record what the table shows. All values of a step come from its record, so
        that they are of the same step."""
        progress = self.progress
        if event == "evaluation":
            progress.held_out = held_out(self.spec, number(metrics, "eval/accuracy"))
        if event == "step":
            progress.step = version
            progress.reward = number(metrics, "reward/mean")
            progress.staleness_mean = number(metrics, "staleness/mean")
            stalest = number(metrics, "staleness/max")
            progress.staleness_max = None if stalest is None else round(stalest)
            if self.spec.is_accuracy:
                progress.accuracy = number(metrics, f"reward/{self.spec.accuracy}")
            progress.reward_parts = {
                name: value
                for name in self.spec.reward.functions
                if (value := number(metrics, f"reward/{name}")) is not None
            }
        if event == "startup" and any(
            value for name, value in metrics.items() if name.endswith("caches_removed")
        ):
            self.note("a damaged compile cache was removed; it is rebuilt automatically")
        if event == "logprob_check":
            progress.logprob_difference = number(metrics, "check/logprob_max_diff")
            progress.logprob_checks += 1

    async def show(self, view: ProgressView) -> None:
        """Update the table every SHOW_EVERY_S until canceled, and measure how late the event loop
        wakes this task."""
        while True:
            self._update()
            view.show(self.progress)
            slept = time.monotonic()
            await asyncio.sleep(SHOW_EVERY_S)
            self._lag = max(self._lag, time.monotonic() - slept - SHOW_EVERY_S)

    async def count_tokens(self, statuses: Statuses) -> None:
        """Count the tokens of the engines every ASK_EVERY_S until canceled. The counters of the
        coordinator have those of finished groups only."""
        while True:
            try:
                known = await statuses()
            except Exception as error:
                # A rate on a screen is not worth a run, whose own calls find out what is wrong.
                logger.info("the generators' tokens were not counted: %s", error)
                known = []
            now = time.monotonic()
            for status in known:
                self._engine_tokens[status.replica] = status.tokens_generated
            self._replica_bytes = max((status.memory_bytes for status in known), default=0)
            if known:
                made = (now, sum(self._engine_tokens.values()))
                self._generated = _since(self._rates_since(now), [*self._generated, made])
                self.progress.generated_tokens_per_s = _rate(self._generated)
            await asyncio.sleep(ASK_EVERY_S)

    def _rates_since(self, now: float) -> float:
        """The start of the period of rates: the last two steps, and at least RATE_WINDOW_S. In a
        shorter one, the rate of a large model would mostly be 0."""
        return min([now - RATE_WINDOW_S, *(at for at, _ in self._trained[-3:])])

    def memory(self) -> dict[str, float]:
        """Memory of the driver, of the largest replica when it was last asked, and of this node."""
        found = {"memory/driver_bytes": resident_bytes(), "memory/node_ratio": used_ratio()}
        replica = {"memory/replica_bytes": self._replica_bytes} if self._replica_bytes else {}
        return found | replica

    def take_lag(self) -> float:
        """The longest delay of the event loop since the last call, in seconds."""
        lag, self._lag = self._lag, 0.0
        return lag

    def distributions(self) -> Mapping[str, Sequence[float]]:
        """Values of the last batch, for the sinks' histograms."""
        return self._coordinator.progress.distributions if self._coordinator is not None else {}

    def rows(self) -> list[TableRow]:
        """Some trajectories of the last batch, for the sinks."""
        examples = self._coordinator.progress.examples if self._coordinator is not None else ()
        return [self._row(example) for example in examples[:MOST_ROWS]]

    def _row(self, example: BatchExample) -> TableRow:
        text = example.text
        parts = {
            f"reward/{name}": text.reward_parts.get(name) for name in self.spec.reward.functions
        }
        return {
            "prompt": shown(text.prompt)[:MOST_CHARACTERS],
            "completion": shown(text.completion)[:MOST_CHARACTERS],
            "reward": text.reward,
            **parts,
            "version": text.version,
            "staleness": example.staleness,
            "group": example.ordinal,
        }

    def _show_sample(self, examples: Sequence[BatchExample]) -> None:
        """Show the first trajectory of a new batch."""
        if not examples or examples is self._shown:
            return
        self._shown = examples
        # Redacted before the shared text is cut off: half a secret is not recognized.
        prompts = redact_all([example.text.prompt for example in examples])
        for prompt in prompts:
            self._shared.add(prompt)
        sample, progress = examples[0].text, self.progress
        progress.prompt, progress.completion = self._shared.without(prompts[0]), sample.completion
        progress.sample_reward, progress.sample_parts = sample.reward, sample.reward_parts

    def _update(self) -> None:
        progress, now = self.progress, time.monotonic()
        progress.elapsed_s = now - self.started
        if self._coordinator is None:
            return
        counters = self._coordinator.progress
        progress.learner_version = counters.version
        progress.committed_version = counters.committed if counters.committed >= 0 else None
        self._show_sample(counters.examples)
        progress.learner_waited_s, progress.generators_waited_s = (
            counters.learner_waited_s,
            counters.generators_waited_s,
        )
        if not self._trained or self._trained[-1][1] != counters.trained_tokens:
            self._trained.append((now, counters.trained_tokens))
            self._trained = _since(self._rates_since(now), self._trained)
        progress.trained_tokens_per_s = _rate(self._trained, now)
        first = self._coordinator.first_version
        progress.left_s = time_left(
            counters.version - first, self.spec.max_steps - first, now - self._training_began
        )


def held_out(spec: ObserveSpec, value: float | None) -> str | None:
    """What the last evaluation found, with the reward's name if it is no accuracy."""
    if value is None:
        return None
    return share(value) if spec.is_accuracy else f"{spec.accuracy} {value:.4g}"


def _since(moment: float, counts: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """The counts from this moment on."""
    return [count for count in counts if count[0] >= moment]


def _rate(counts: Sequence[tuple[float, int]], now: float | None = None) -> float | None:
    """Tokens per second; None for a single count. A replaced replica counts from 0 again.

    Args:
        now: with it, the rate falls once nothing was counted for longer than between any two
            counts.
    """
    (began, before), (ended, after) = counts[0], counts[-1]
    if ended <= began:
        return None
    longest = max(later[0] - earlier[0] for earlier, later in pairwise(counts))
    if now is not None and now - ended > longest:
        ended = now
    return max(0, after - before) / (ended - began)
