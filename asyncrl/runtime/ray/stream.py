"""Long-lived Ray Data executions: an endless source that streams its blocks in bounded memory."""

from __future__ import annotations

import functools
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import ray.data
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data._internal.execution.metadata_fetcher import InlineMetadataFetcher
from ray.data._internal.execution.operators.map_operator import MapOperator
from ray.data._internal.output_buffer import OutputBlockSizeOption
from ray.data.block import BlockMetadata
from ray.data.context import DataContext
from ray.data.datasource import Datasource, ReadTask

from asyncrl.runtime.pace import Pace
from asyncrl.runtime.processes.stacks import register_stacks_as
from asyncrl.runtime.ray.defaults import TASK_CPUS
from asyncrl.runtime.ray.objects import DEATHS

if TYPE_CHECKING:
    from ray.data._internal.execution.streaming_executor import StreamingExecutor

logger = logging.getLogger(__name__)

_MAKING = threading.Lock()
"""Serializes the creation of streams. Ray Data's current context belongs to the process, so two
threads would get each other's limits."""

PLAIN_ARROW = {"env_vars": {"RAY_DISABLE_CUSTOM_ARROW_DATA_SERIALIZATION": "1"}}
"""Runtime environment of the tasks: pyarrow pickles their blocks. Ray's own way trims slices, and
takes seven times as long for one nested row. A stage should not return a slice of a large table."""

MOST_DEATHS, DEATHS_WITHIN_S = 5, 600.0
"""A stream restarts after at most this many deaths of its process within this many seconds. A cause
that repeats must end the run."""

HELD_BACK_PAUSE_S = 0.2
"""Seconds to sleep while the consumer has no room."""
STEP_EVERY_S = 0.1
"""Least seconds from the beginning of a scheduling step to the next one. Blocks that come fast
share a step."""
LONGEST_WAIT_S = 0.5
"""Longest time without a scheduling step, and so the longest that the end of a stream is noticed
late."""


@dataclass(frozen=True, slots=True)
class Tasks:
    """The tasks of a stream. Ray places them by the resources that each one declares."""

    count: int = 1
    num_cpus: float = TASK_CPUS
    num_gpus: float = 0.0

    @property
    def resources(self) -> dict[str, float]:
        """Ray Data arguments. Stages fuse only if these are equal."""
        return {"num_cpus": self.num_cpus} | ({"num_gpus": self.num_gpus} if self.num_gpus else {})


class Deaths:
    """Counts the deaths of a stream's process and decides whether a new execution follows."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._times: list[float] = []

    def survived(self, error: Exception) -> bool:
        """Whether the error is a death of the process and a new execution should follow."""
        now = time.monotonic()
        self._times = [*(then for then in self._times if now - then < DEATHS_WITHIN_S), now]
        if not isinstance(error, DEATHS) or len(self._times) > MOST_DEATHS:
            return False
        logger.warning(
            "the %s stream's process died (%s); a new one continues",
            self._name,
            type(error).__name__,
        )
        return True


class EndlessExecution(ExecutionCallback):
    """Changes how Ray Data runs a stream. Both methods use Ray Data's internals, as no other module
    does."""

    def __init__(self) -> None:
        self._pace = Pace(STEP_EVERY_S)

    def before_execution_starts(self, executor: StreamingExecutor) -> None:
        """Keep every table of the source as one block, and read a block in one step.

        Ray Data cuts tables into blocks of one size, or collects them until a block is full. With
        `target_max_block_size: None` it collects until the task ends. Only this internal option
        keeps blocks as they are. The tasks get the transformers later, with their first input.

        By default a thread fetches the metadata of each block. The loop spins meanwhile, if another
        block waits. Here the metadata are in this node's store when the block arrives."""
        executor._metadata_fetcher = InlineMetadataFetcher()
        for operator in executor._topology or ():
            if isinstance(operator, MapOperator):
                for transform in operator._map_transformer._transform_fns:
                    transform._output_block_size_option = OutputBlockSizeOption(
                        disable_block_shaping=True
                    )

    def on_execution_step(self, executor: StreamingExecutor) -> None:
        """Wait until the next scheduling step has something to do. A step costs milliseconds,
        however many blocks it reads, and Ray Data's loop takes ten a second or more.

        While the consumer holds a stage back, the loop would spin and use a core of the driver."""
        topology = executor._topology or ()
        if any(operator._in_task_output_backpressure for operator in topology):
            time.sleep(HELD_BACK_PAUSE_S)
        else:
            time.sleep(self._pace.left_s())
            running = [
                task.get_waitable() for operator in topology for task in operator.get_active_tasks()
            ]
            if running:
                ray.wait(running, timeout=LONGEST_WAIT_S, fetch_local=False)
        self._pace.sent()


class EndlessSource(Datasource):
    """A datasource whose read tasks yield Arrow tables until their generator returns."""

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
    memory_bytes: int,
    name: str,
    stacks: Path | None = None,
    tasks: Tasks | None = None,
) -> Iterator[pa.Table]:
    """Run one endless source and one stage, fused by Ray Data, and yield blocks as they arrive.
    Each table of the source is one block.

    Closing the generator ends the execution. `iter_batches` registers a consumer with Ray Data.
    Without a consumer, as in `iter_internal_ref_bundles`, Ray Data waives its memory limit and the
    source runs ahead.

    Args:
        tables: makes the source's generator, in the task.
        stage: Arrow table in, Arrow table out.
        memory_bytes: object store bytes of unread blocks at which the source is held back.
        stacks: folder for the task's stack dumps (`asyncrl.runtime.processes.stacks.stacks_as`, by
            `name`).
        tasks: number of tasks, each with its own generator, and their resources. Default: one.

    Raises:
        ray.exceptions.RayError: the task failed, or its process died (see `Deaths`). Ray does not
            retry the task: a retry would skip as many blocks as before, but they would be others.
    """
    quiet_ray_data()
    if stacks is not None:
        tables = functools.partial(_with_stacks, tables, stacks, name)
    with _MAKING, DataContext.current(_context(memory_bytes)):
        dataset = _dataset(tables, stage, tasks or Tasks())
        dataset.set_name(name)
    yield from dataset.iter_batches(batch_format="pyarrow", batch_size=None, prefetch_batches=0)


def _dataset(
    tables: Callable[[], Iterable[pa.Table]], stage: Callable[[pa.Table], pa.Table], tasks: Tasks
) -> ray.data.Dataset:
    """The source and the stage. Ray Data fuses them because they have the same options."""
    life = {"max_retries": 0}
    source = ray.data.read_datasource(
        EndlessSource(tables, tasks.count),
        override_num_blocks=tasks.count,
        **tasks.resources,
        # read_datasource has no named parameter for `max_retries`.
        ray_remote_args=life,
        runtime_env=PLAIN_ARROW,
    )
    dataset: ray.data.Dataset = source.map_batches(
        stage,
        batch_format="pyarrow",
        batch_size=None,
        **tasks.resources,
        **life,
        runtime_env=PLAIN_ARROW,
    )
    return dataset


def _context(memory_bytes: int) -> DataContext:
    """A copy of Ray Data's current context with the settings of an endless execution."""
    context = DataContext.get_current().copy()
    context.execution_options.preserve_order = False
    context.execution_options.resource_limits = context.execution_options.resource_limits.copy(
        object_store_memory=memory_bytes
    )
    context.execution_no_progress_timeout_s = -1
    # Ray Data's guess of the size of the first blocks. With a guess above `memory_bytes` the task
    # would not start.
    context.target_max_block_size = context.target_min_block_size = 1
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.custom_execution_callback_classes = [
        *context.custom_execution_callback_classes,
        EndlessExecution,
    ]
    return context


def _with_stacks(
    tables: Callable[[], Iterable[pa.Table]], folder: Path, name: str
) -> Iterator[pa.Table]:
    register_stacks_as(folder, name)
    yield from tables()


def quiet_ray_data() -> None:
    """Keep Ray Data's log lines off the terminal; they stay in its log file. Also silence its
    advice to use a named parameter where none exists."""
    warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
    for logger in (logging.getLogger("ray.data"), logging.getLogger("ray.data.dataset")):
        for handler in [
            h
            for h in logger.handlers
            if not isinstance(h, logging.FileHandler) and "console" in (h.get_name() or "").lower()
        ]:
            logger.removeHandler(handler)
