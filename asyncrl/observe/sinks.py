"""Metric sinks in addition to metrics.jsonl: TensorBoard and Ray's metrics always; Weights &
Biases, MLflow and trackio if they are configured and installed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import netrc
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from asyncrl.contracts.protocols import Sink, TableRow
from asyncrl.observe.metric_catalog import meaning_of
from asyncrl.runtime.files.temporary import temporary_within

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary
logger = logging.getLogger(__name__)
ALWAYS_PLOTTED = ("reward/", "eval/")
"""Groups of metrics that TensorBoard plots even while they are constant, except for COUNTS."""
COUNTS = ("_ratio", "_prompts", "_scored", "/prompts", "/errors", "/newest_version")
"""Endings of metrics that are counts and shares."""
GROUPS = (
    "reward",
    "eval",
    "train",
    "pref",
    "distill",
    "rollout",
    "staleness",
    "stale",
    "session",
    "data",
    "source",
    "time",
    "control",
    "weights",
    "memory",
)
"""Groups of metrics by importance. Others come after them."""
CLOSE_TIMEOUT_S = 30.0
"""Seconds that the external sinks get at the end of a run to write what is still queued."""


@dataclass(frozen=True, slots=True)
class SinkRun:
    """Identifies a run to a sink. All attempts of a run share one id; two runs of the same name
    have different ids."""

    project: str
    name: str
    run_id: str
    directory: Path
    settings: Mapping[str, object]


class TensorBoardSink:
    """Writes TensorBoard event files with TensorBoard's own writer, so torch is not needed.

    A metric is plotted once its value has changed; rewards and evaluations always are. TensorBoard
    sorts groups by name, so each gets the number of its position in GROUPS. The first value of a
    metric carries its meaning.
    """

    def __init__(self, directory: Path) -> None:
        # Imported here, before the run: an import takes half a second and would block the driver's
        # event loop.
        from tensorboard.plugins.histogram.summary_v2 import histogram_pb
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._histogram, self._text = histogram_pb, text_pb
        self._writer = EventFileWriter(str(directory), flush_secs=5)
        self._constant: dict[str, list[tuple[int, float, float]]] = {}
        """Metric whose value has not changed → its first and last records (step, time, value)."""
        self._varying: set[str] = set()
        self._described: set[str] = set()

    def add(self, step: int, now: float, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for name, value in scalars.items():
            for at, when, known in self._plotted(name, step, now, value):
                self._writer.add_event(
                    Event(
                        wall_time=when,
                        step=at,
                        summary=Summary(value=[self._value(name, known)]),
                    )
                )

    def _value(self, name: str, value: float) -> Summary.Value:
        """A scalar, the first of its name with a description."""
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

        scalar = Summary.Value(tag=numbered(name), simple_value=value)
        if name not in self._described:
            self._described.add(name)
            scalar.metadata.CopyFrom(SummaryMetadata(summary_description=meaning_of(name)))
        return scalar

    def add_histogram(self, step: int, now: float, name: str, values: Sequence[float]) -> None:
        self._add_summary(step, now, self._histogram(name, list(values)))

    def add_table(self, step: int, now: float, name: str, rows: Sequence[TableRow]) -> None:
        self._add_summary(step, now, self._text(name, _code_block(rows)))

    def _add_summary(self, step: int, now: float, summary: Summary) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=now, step=step, summary=summary))

    def _plotted(
        self, name: str, step: int, now: float, value: float
    ) -> list[tuple[int, float, float]]:
        """The records to write for a new value: none while the metric is constant, and then also
        the ones that were held back."""
        new = (step, now, value)
        if name in self._varying or (name.startswith(ALWAYS_PLOTTED) and not name.endswith(COUNTS)):
            return [new]
        held = self._constant.setdefault(name, [])
        if not held or held[0][2] == value:
            self._constant[name] = [*held[:1], new]
            return []
        self._varying.add(name)
        return [*self._constant.pop(name), new]

    def close(self, failed: bool = False) -> None:
        self._writer.close()


class WandbSink:
    """Logs to Weights & Biases. Its own environment variables (WANDB_MODE=offline, WANDB_API_KEY,
    …) apply; its files are in <run>/wandb."""

    def __init__(self, run: SinkRun) -> None:
        import wandb

        quiet = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume="allow",
            dir=str(run.directory),
            config=dict(run.settings),
            settings=quiet,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._tables: dict[str, wandb.Table] = {}
        """The tables so far. W&B shows the last table of a name, so each grows and keeps all
        rows."""

    def add(self, step: int, now: float, scalars: Mapping[str, float]) -> None:
        self._run.log({**scalars, "step": step})

    def add_histogram(self, step: int, now: float, name: str, values: Sequence[float]) -> None:
        import wandb

        self._run.log({name: wandb.Histogram(list(values)), "step": step})

    def add_table(self, step: int, now: float, name: str, rows: Sequence[TableRow]) -> None:
        import wandb

        if name not in self._tables:
            self._tables[name] = wandb.Table(
                columns=list(rows[0]), allow_mixed_types=True, log_mode="INCREMENTAL"
            )
        table = self._tables[name]
        for row in rows:
            table.add_data(*row.values())
        self._run.log({name: table, "step": step})

    def close(self, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


class MLflowSink:
    """Logs to MLflow: to MLFLOW_TRACKING_URI, or else to <run>/mlflow.db and <run>/mlartifacts."""

    def __init__(self, run: SinkRun) -> None:
        from mlflow import MlflowClient

        server = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(server or f"sqlite:///{run.directory / 'mlflow.db'}")
        experiment = self._client.get_experiment_by_name(run.project)
        # Without a server, MLflow would write artifacts to the working directory.
        artifacts = None if server else (run.directory / "mlartifacts").as_uri()
        number = (
            experiment.experiment_id
            if experiment is not None
            else self._client.create_experiment(run.project, artifact_location=artifacts)
        )
        earlier = self._client.search_runs([number], f"tags.asyncrl_run_id = '{run.run_id}'")
        self._run_id = earlier[0].info.run_id if earlier else self._new(number, run)
        self._client.update_run(self._run_id, status="RUNNING")

    def _new(self, experiment: str, run: SinkRun) -> str:
        run_id = str(
            self._client.create_run(
                experiment, run_name=run.name, tags={"asyncrl_run_id": run.run_id}
            ).info.run_id
        )
        self._client.log_dict(run_id, dict(run.settings), "config.yaml")
        return run_id

    def add(self, step: int, now: float, scalars: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        self._client.log_batch(
            self._run_id,
            metrics=[Metric(name, value, int(now * 1000), step) for name, value in scalars.items()],
        )

    def add_histogram(self, step: int, now: float, name: str, values: Sequence[float]) -> None:
        """Log the values as an artifact, because MLflow draws no histograms."""
        self._client.log_dict(
            self._run_id, {"values": list(values)}, f"{name}/step_{step:06d}.json"
        )

    def add_table(self, step: int, now: float, name: str, rows: Sequence[TableRow]) -> None:
        columns = list(rows[0])  # the layout of MLflow's own tables
        self._client.log_dict(
            self._run_id,
            {"columns": columns, "data": [list(row.values()) for row in rows]},
            f"{name}/step_{step:06d}.json",
        )

    def close(self, failed: bool = False) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


class TrackioSink:
    """Logs to trackio, on this machine (TRACKIO_DIR) or where its environment variables point.

    trackio identifies a run by its name, so the name includes the run's id.
    """

    def __init__(self, run: SinkRun) -> None:
        import trackio

        name, settings = f"{run.name}-{run.run_id[:8]}", dict(run.settings)
        self._run = trackio.init(
            project=run.project,
            name=name,
            resume="allow",
            config=settings,
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def add(self, step: int, now: float, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def add_histogram(self, step: int, now: float, name: str, values: Sequence[float]) -> None:
        import trackio

        self._run.log({name: trackio.Histogram(list(values))}, step=step)

    def add_table(self, step: int, now: float, name: str, rows: Sequence[TableRow]) -> None:
        import trackio

        self._run.log(
            {
                name: trackio.Table(
                    columns=list(rows[0]),
                    data=[list(row.values()) for row in rows],
                    allow_mixed_types=True,
                )
            },
            step=step,
        )

    def close(self, failed: bool = False) -> None:
        self._run.finish()


PACKAGES: dict[str, Callable[[SinkRun], Sink]] = {
    "wandb": WandbSink,
    "mlflow": MLflowSink,
    "trackio": TrackioSink,
}
"""Name in `observe.sinks` → its class. A package and an extra have the same name."""


class Background:
    """Runs sinks in a thread, so that none of them can hold the run up. A sink that fails is logged
    and dropped."""

    def __init__(self, makers: Mapping[str, Callable[[], Sink]]) -> None:
        self._items: queue.Queue[Callable[[Sink], None] | None] = queue.Queue()
        self._failed = False
        self._thread = threading.Thread(
            target=self._work, args=(dict(makers),), name="sinks", daemon=True
        )
        self._thread.start()

    def add(self, step: int, now: float, scalars: Mapping[str, float]) -> None:
        self._items.put(lambda sink: sink.add(step, now, scalars))

    def add_histogram(self, step: int, now: float, name: str, values: Sequence[float]) -> None:
        self._items.put(lambda sink: sink.add_histogram(step, now, name, values))

    def add_table(self, step: int, now: float, name: str, rows: Sequence[TableRow]) -> None:
        self._items.put(lambda sink: sink.add_table(step, now, name, rows))

    def close(self, failed: bool = False) -> None:
        self._failed = failed
        self._items.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning(
                "the sinks did not finish within %g s; what they lack is in metrics.jsonl",
                CLOSE_TIMEOUT_S,
            )

    def _work(self, makers: dict[str, Callable[[], Sink]]) -> None:
        sinks: dict[str, Sink] = {}
        for name, make in makers.items():
            self._try(name, sinks, partial(_make, name, make, sinks))
        while (item := self._items.get()) is not None:
            for name, sink in list(sinks.items()):
                self._try(name, sinks, partial(item, sink))
        for name, sink in list(sinks.items()):
            self._try(name, sinks, partial(sink.close, self._failed))

    def _try(self, name: str, sinks: dict[str, Sink], call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            # The failure of an external service must not end the run; metrics.jsonl is complete.
            sinks.pop(name, None)
            logger.warning(
                "the sink %s failed and gets no more metrics: %s: %s",
                name,
                type(error).__name__,
                error,
            )


def missing_packages(names: Sequence[str]) -> list[str]:
    """The sinks among `names` whose package is not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def wandb_asks_for_a_key(names: Sequence[str], variables: Mapping[str, str]) -> str | None:
    """The host whose API key wandb would ask for on the terminal. None if wandb is not among the
    sinks, has a key, or is offline."""
    if (
        "wandb" not in names
        or variables.get("WANDB_MODE", "online") not in ("online", "run", "shared")
        or variables.get("WANDB_API_KEY")
    ):
        return None
    host = (
        urlsplit(variables.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or "api.wandb.ai"
    )
    home = Path(variables.get("HOME", "~")).expanduser()
    for path in (
        [Path(variables["NETRC"])] if variables.get("NETRC") else [home / ".netrc", home / "_netrc"]
    ):
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(path).authenticators(host):
                return None
    return host


def open_sinks(names: Sequence[str], run: SinkRun) -> list[Sink]:
    """TensorBoard, Ray's metrics, and the sinks in `names`."""
    makers: dict[str, Callable[[], Sink]] = {"ray": partial(_ray_metrics, run.name)}
    makers |= {name: partial(PACKAGES[name], run) for name in names}
    if "wandb" in makers and "wandb" not in sys.modules:
        # Importing wandb creates temporary folders. It is imported here and not in the thread, so
        # that no other code uses the temporary directory at the same time. The thread reports an
        # error.
        with temporary_within("wandb"), contextlib.suppress(Exception):
            importlib.import_module("wandb")
    return [
        TensorBoardSink(run.directory / "tensorboard" / run.name),
        Background(makers),
    ]


def numbered(name: str) -> str:
    """A metric with the number of its group, such as `01 reward/mean`."""
    group = name.partition("/")[0]
    number = GROUPS.index(group) + 1 if group in GROUPS else len(GROUPS) + 1
    return f"{number:02d} {name}"


def _ray_metrics(run: str) -> Sink:
    from asyncrl.observe.ray_metrics import RayMetricsSink  # Ray takes a second to import

    return RayMetricsSink(run)


def _make(name: str, make: Callable[[], Sink], sinks: dict[str, Sink]) -> None:
    sinks[name] = make()


def _code_block(rows: Sequence[TableRow]) -> str:
    """The rows as a Markdown code block, in which nothing is markup. Further lines of a value are
    indented, so that none can look like a column."""
    lines = []
    for row in rows:
        for name, value in row.items():
            text = (
                "none"
                if value is None
                else f"{value:.4g}"
                if isinstance(value, float | int)
                else value
            )
            lines.append(f"{name}: " + text.replace("\n", "\n  | "))
        lines.append("")
    return "\n".join(f"    {line}" for line in "\n".join(lines).split("\n"))
