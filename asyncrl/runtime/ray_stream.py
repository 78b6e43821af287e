"""Settings of a long-lived Ray Data execution: an endless source that streams small blocks,
quietly, in bounded memory."""

from __future__ import annotations

import functools
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray.data
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data.block import BlockMetadata
from ray.data.context import DataContext
from ray.data.datasource import Datasource, ReadTask

from asyncrl.runtime.ray_defaults import TASK_CPUS
from asyncrl.runtime.ray_objects import DEATHS
from asyncrl.runtime.stacks import register_stacks_as

__all__ = ["Deaths", "EndlessSource", "Tasks", "quiet_ray_data", "stream_blocks"]

logger = logging.getLogger(__name__)

_MAKING = threading.Lock()
"""The current context belongs to the process, not to a thread: two streams made at once would take
each other's block sizes."""

PLAIN_ARROW: dict[str, Any] = {
    "runtime_env": {"env_vars": {"RAY_DISABLE_CUSTOM_ARROW_DATA_SERIALIZATION": "1"}}
}
"""Blocks are pickled by pyarrow. Ray's own way, which trims slices, takes seven times as long for
one nested row; what the stage gives should not be a slice of something large."""

MOST_DEATHS, DEATHS_WITHIN_S = 5, 600.0
"""Deaths of a stream's process that are survived within so many seconds: what ends it each time
must not do so for ever."""

HELD_BACK_PAUSE_S = 0.05
"""Seconds between two looks at whether the consumer has room again."""


@dataclass(frozen=True, slots=True)
class Tasks:
    """The tasks of a stream, spread over the nodes by what each declares to Ray."""

    count: int = 1
    num_cpus: float = TASK_CPUS
    num_gpus: float = 0.0

    @property
    def resources(self) -> dict[str, float]:
        """Arguments of Ray Data. The same for every stage, or they would not be fused."""
        return {"num_cpus": self.num_cpus} | ({"num_gpus": self.num_gpus} if self.num_gpus else {})


class Deaths:
    """Deaths of a stream's process. A new execution follows each, but for one that comes again and
    again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._times: list[float] = []

    def survived(self, error: Exception) -> bool:
        """Whether this is a death, and not one too many within a while."""
        now = time.monotonic()
        self._times = [*(then for then in self._times if now - then < DEATHS_WITHIN_S), now]
        if not isinstance(error, DEATHS) or len(self._times) > MOST_DEATHS:
            return False
        logger.warning(
            "the %s stream's process died (%s); a new one goes on", self._name, type(error).__name__
        )
        return True


class HeldBackPause(ExecutionCallback):
    """Rests after a scheduling step in which a stage was held back by its consumer: Ray Data's loop
    would spin, and take a core of the driver."""

    def on_execution_step(self, executor: Any) -> None:
        if any(operator._in_task_output_backpressure for operator in executor._topology):
            time.sleep(HELD_BACK_PAUSE_S)


class EndlessSource(Datasource):
    """A datasource whose read tasks each yield Arrow tables until their generator returns."""

    def __init__(self, tables: Callable[[], Iterable[pa.Table]], tasks: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tables, self._tasks = tables, tasks

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: DataContext | None = None,
    ) -> list[ReadTask]:
        metadata = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(self._tables, metadata) for _ in range(self._tasks)]


def stream_blocks(
    tables: Callable[[], Iterable[pa.Table]],
    stage: Callable[[pa.Table], pa.Table],
    block_bytes: int,
    memory_bytes: int,
    name: str,
    stacks: Path | None = None,
    tasks: Tasks | None = None,
) -> Iterator[pa.Table]:
    """Run one endless source and one stage, which Ray Data fuses into one task (or several), and
    give its blocks as they come.

    Closing the generator ends the execution and its task. It is `iter_batches` that tells Ray Data
    of a consumer outside; without one (`iter_internal_ref_bundles`) the memory limit is waived
    whenever it is reached, and the source runs ahead for ever.

    Args:
        tables: makes the source's generator, in the task.
        stage: Arrow table in, Arrow table out.
        block_bytes: a block leaves as soon as it is larger; 1 = every row at once.
        memory_bytes: object store that unread blocks may take before the source is held back.
        stacks: folder where the task says what it does when it is asked
            (`asyncrl.runtime.stacks.stacks_as`, by `name`).
        tasks: how many tasks run the source, each with a generator of its own, and what each
            declares to Ray. Default: one.

    Raises:
        ray.exceptions.RayError: the task failed, or its process died (`Deaths` tells). Ray does not
            run it again: it would pass over as many blocks as it has had, which after a new start
            are others.
    """
    context = DataContext.get_current().copy()
    context.execution_options.preserve_order = False
    context.execution_options.resource_limits = context.execution_options.resource_limits.copy(
        object_store_memory=memory_bytes
    )
    context.execution_no_progress_timeout_s = -1
    context.target_max_block_size = block_bytes
    context.target_min_block_size = 1
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.custom_execution_callback_classes = [
        *context.custom_execution_callback_classes,
        HeldBackPause,
    ]
    quiet_ray_data()
    tasks = tasks or Tasks()
    life = {"max_retries": 0}
    if stacks is not None:
        tables = functools.partial(_with_stacks, tables, stacks, name)
    with _MAKING, DataContext.current(context):
        # The same options for both, or they would not be fused. Ray has no name of its own for the
        # read's `max_retries`.
        reader = EndlessSource(tables, tasks.count)
        source = ray.data.read_datasource(
            reader,
            override_num_blocks=tasks.count,
            **tasks.resources,
            ray_remote_args=life,
            **PLAIN_ARROW,
        )
        dataset: ray.data.Dataset = source.map_batches(
            stage, batch_format="pyarrow", batch_size=None, **tasks.resources, **life, **PLAIN_ARROW
        )
        dataset.set_name(name)
    yield from dataset.iter_batches(batch_format="pyarrow", batch_size=None, prefetch_batches=0)


def _with_stacks(
    tables: Callable[[], Iterable[pa.Table]], folder: Path, name: str
) -> Iterator[pa.Table]:
    register_stacks_as(folder, name)
    yield from tables()


def quiet_ray_data() -> None:
    """Keep Ray Data's own log lines off the terminal. They stay in its log file. And its advice to
    use a named parameter where it has none."""
    warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
    for logger in (logging.getLogger("ray.data"), logging.getLogger("ray.data.dataset")):
        for handler in [
            h
            for h in logger.handlers
            if not isinstance(h, logging.FileHandler) and "console" in (h.get_name() or "").lower()
        ]:
            logger.removeHandler(handler)
