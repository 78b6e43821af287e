"""Where metrics go beside metrics.jsonl: TensorBoard always; Weights & Biases, MLflow and trackio if asked for and installed."""

from __future__ import annotations

import importlib.util
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from asyncrl.config import Config

__all__ = ["PACKAGES", "Background", "MLflowSink", "Sink", "TensorBoardSink", "TrackioSink", "WandbSink", "missing_packages", "open_sinks"]

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
"""Seconds that the external sinks get at the end to bring away what they still have."""


class Sink(Protocol):
    """Takes numbers against the step. Names are those of metrics.jsonl; of events other than `step` they begin with `<event>/`."""

    def add(self, step: int, now: float, scalars: Mapping[str, float]) -> None:
        """`now` is in Unix seconds."""
        ...

    def close(self) -> None: ...


class TensorBoardSink:
    """Event files under a directory. Imports no torch: TensorBoard's own writer is enough."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(directory), flush_secs=5)

    def add(self, step: int, now: float, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._writer.add_event(Event(wall_time=now, step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases. Its own variables (WANDB_MODE=offline, WANDB_API_KEY, …) hold; files lie in <run>/wandb."""

    def __init__(self, project: str, name: str, directory: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        quiet = wandb.Settings(silent=True, console="off")
        self._run = wandb.init(project=project, name=name, id=name, resume="allow", dir=str(directory), config=dict(settings), settings=quiet)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def add(self, step: int, now: float, scalars: Mapping[str, float]) -> None:
        self._run.log({**scalars, "step": step})

    def close(self) -> None:
        self._run.finish()


class MLflowSink:
    """MLflow. MLFLOW_TRACKING_URI holds; without it <run>/mlflow.db."""

    def __init__(self, project: str, name: str, directory: Path, settings: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory / 'mlflow.db'}")
        experiment = self._client.get_experiment_by_name(project)
        number = experiment.experiment_id if experiment is not None else self._client.create_experiment(project)
        self._run_id = self._client.create_run(number, run_name=name).info.run_id
        self._client.log_dict(self._run_id, dict(settings), "config.yaml")

    def add(self, step: int, now: float, scalars: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        self._client.log_batch(self._run_id, metrics=[Metric(name, value, int(now * 1000), step) for name, value in scalars.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class TrackioSink:
    """trackio, on this machine (TRACKIO_DIR) or wherever its variables say."""

    def __init__(self, project: str, name: str, directory: Path, settings: Mapping[str, Any]) -> None:
        import trackio

        self._run = trackio.init(project=project, name=name, resume="allow", config=dict(settings), embed=False, auto_log_cpu=False, auto_log_gpu=False)

    def add(self, step: int, now: float, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


PACKAGES: dict[str, Callable[[str, str, Path, Mapping[str, Any]], Sink]] = {"wandb": WandbSink, "mlflow": MLflowSink, "trackio": TrackioSink}
"""`observe.sinks` → its class; each is a package and an extra of the same name."""


class Background:
    """Sinks in a thread of their own, so that none of them can hold the run up. One that fails is named in the log and gets nothing more."""

    def __init__(self, makers: Mapping[str, Callable[[], Sink]]) -> None:
        self._items: queue.Queue[tuple[int, float, Mapping[str, float]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, args=(dict(makers),), name="sinks", daemon=True)
        self._thread.start()

    def add(self, step: int, now: float, scalars: Mapping[str, float]) -> None:
        self._items.put((step, now, scalars))

    def close(self) -> None:
        self._items.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("the sinks were not done within %g s; what they still had is in metrics.jsonl", CLOSE_TIMEOUT_S)

    def _work(self, makers: dict[str, Callable[[], Sink]]) -> None:
        sinks: dict[str, Sink] = {}
        for name, make in makers.items():
            self._try(name, sinks, lambda make=make, name=name: sinks.__setitem__(name, make()))
        while (item := self._items.get()) is not None:
            for name, sink in list(sinks.items()):
                self._try(name, sinks, lambda sink=sink, item=item: sink.add(*item))
        for name, sink in list(sinks.items()):
            self._try(name, sinks, sink.close)

    def _try(self, name: str, sinks: dict[str, Sink], call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            # Somebody else's server: metrics.jsonl has everything, and the run goes on.
            sinks.pop(name, None)
            logger.warning("the sink %s failed and gets nothing more: %s: %s", name, type(error).__name__, error)


def missing_packages(config: Config) -> list[str]:
    """Sinks asked for whose package is not installed."""
    return [name for name in config.observe.sinks if importlib.util.find_spec(name) is None]


def open_sinks(config: Config, directory: Path) -> list[Sink]:
    """TensorBoard, and what `observe.sinks` asks for."""
    sinks: list[Sink] = [TensorBoardSink(directory / "tensorboard")]
    settings = config.model_dump(mode="json")
    makers = {name: _maker(PACKAGES[name], config, directory, settings) for name in config.observe.sinks}
    return [*sinks, Background(makers)] if makers else sinks


def _maker(kind: Callable[[str, str, Path, Mapping[str, Any]], Sink], config: Config, directory: Path, settings: Mapping[str, Any]) -> Callable[[], Sink]:
    return lambda: kind(config.observe.project, config.name, directory, settings)
