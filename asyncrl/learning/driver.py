"""The learner as the driver sees it: ZeRO ranks that run one call at a time together.
Does not import torch or DeepSpeed."""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, ParamSpec, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.contracts.errors import PartDiedError, PlacementLostError
from asyncrl.contracts.group_table import table_from_ipc, table_to_ipc
from asyncrl.contracts.messages import Manifest, Scored, StepResult
from asyncrl.learning.spec import LearnerSpec
from asyncrl.runtime.files.opening import make_directory
from asyncrl.runtime.files.shared import NotSharedError, Probe, Written, wait_until_seen
from asyncrl.runtime.imports import hidden
from asyncrl.runtime.processes.environment import claim_caches, passed_on
from asyncrl.runtime.processes.stacks import register_stacks, stack_of
from asyncrl.runtime.ray.objects import DEATHS, Actor

P = ParamSpec("P")
T = TypeVar("T")

if TYPE_CHECKING:  # the driver does not import torch
    from asyncrl.learning.engine.state import Meeting
    from asyncrl.learning.rank import LearnerRank

    Method: TypeAlias = Callable[Concatenate[LearnerRank, P], T]
else:

    class _Names:
        def __getattr__(self, name: str) -> str:
            return name

    LearnerRank = _Names()
    """Stands for the class: each method is its name."""

logger = logging.getLogger(__name__)

STEPS = ("step", "supervised_step", "preference_step", "reward_step")
SNAPSHOT = ".snapshot_"
LOOPBACK = "127.0.0.1"
DEATH_KNOWN_S = 5.0
"""Seconds that Ray needs to report the death of an actor."""
NODE_DEATH_KNOWN_S = 60.0
"""Seconds that Ray needs to report the death of a node."""
PEER_LOST = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")
"""Parts of the messages of gloo and NCCL about a lost connection to another rank."""
WATCH_EVERY_S = 5.0
"""Seconds between two looks at the ranks while no call needs them."""
LESS_MEMORY = (
    "lower learner.max_tokens_per_gpu, or set learner.gradient_checkpointing: true (`asyncrl plan`"
    " shows the estimate per rank)"
)


class LearnerError(RuntimeError):
    """A rank failed or died, and all ranks have been ended. The message is one line that names the
    rank and the cause."""


class LearnerDiedError(LearnerError, PartDiedError):
    """The process of a rank died."""


class RankProcess:
    """The Ray actor of one rank. It imports the learner in its own process, so the driver does not
    import torch or DeepSpeed."""

    def __init__(self, rank: int, spec: LearnerSpec, run_id: str, attempt: int) -> None:
        import logging
        import warnings

        self.caches = claim_caches("learner")
        warnings.filterwarnings("ignore", module=r"deepspeed|torch")
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        from transformers.utils import logging as transformers_logging

        # Where mlflow is installed, DeepSpeed's tuner imports it, for a second of CPU time.
        with hidden("mlflow"):
            # It is slow, so the process imports it while the actor starts.
            importlib.import_module("asyncrl.learning.rank")

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        # DeepSpeed sets its level on import.
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        self.number, self.spec, self.run_id, self.attempt = rank, spec, run_id, attempt
        self.meeting: Meeting | None = None
        self.rank: LearnerRank | None = None
        self.stacks_in = stacks_path(spec, attempt, rank)

    def register_stacks(self) -> tuple[str, int]:
        """See `asyncrl.runtime.processes.stacks`."""
        return register_stacks(self.stacks_in)

    def caches_removed(self) -> bool:
        """Whether this process's compile caches had a damaged file and were removed."""
        return self.caches.damaged is not None

    def node_address(self) -> str:
        """Address of this rank's node."""
        return str(ray.util.get_node_ip_address())

    def listen(self, address: str) -> int:
        """Reserve a port where the ranks will meet (rank 0 only)."""
        from asyncrl.learning.engine.state import Meeting

        self.meeting = Meeting.at(address)
        return self.meeting.port

    def start(self, addresses: Sequence[str], port: int) -> dict[str, float]:
        """Join the other ranks and load the model (a collective). Returns the seconds of each part.

        Args:
            addresses: of all ranks. They meet at the first one.
        """
        from asyncrl.learning.engine.state import Meeting
        from asyncrl.learning.rank import start_rank

        meeting = self.meeting or Meeting(addresses[0], port)
        self.rank, seconds = start_rank(
            self.number, self.spec, self.run_id, self.attempt, meeting, addresses[self.number]
        )
        self.meeting = None
        return seconds

    def call(self, method: str, *arguments: object, **named: object) -> object:
        """Call a method of `LearnerRank`. A table may come as its Arrow IPC stream."""
        tables = [
            table_from_ipc(value) if isinstance(value, pa.Buffer) else value for value in arguments
        ]
        return getattr(self.rank, method)(*tables, **named)


class OnRanks(Generic[P, T]):
    """A method of `LearnerRank` as a method of the learner: all ranks run it together, and it
    returns what rank 0 returns. Raises LearnerError if a rank fails."""

    def __init__(self, method: Method[P, T]) -> None:
        self._method = method

    def __get__(self, learner: RayLearner, owner: type) -> Callable[P, Coroutine[Any, Any, T]]:
        async def call(*arguments: P.args, **named: P.kwargs) -> T:
            return (await learner._all(self._method, *arguments, **named))[0]

        return call


class RayLearner:
    """`Learner` on Ray actors. Create it with `RayLearner.create(spec, run_id, attempt)` and end
    it with `close()`."""

    take_device = OnRanks(LearnerRank.take_device)
    leave_device = OnRanks(LearnerRank.leave_device)
    supervised_step = OnRanks(LearnerRank.supervised_step)
    preference_step = OnRanks(LearnerRank.preference_step)
    reward_step = OnRanks(LearnerRank.reward_step)
    held_out_loss = OnRanks(LearnerRank.held_out_loss)
    held_out_preferences = OnRanks(LearnerRank.held_out_preferences)
    held_out_scores = OnRanks(LearnerRank.held_out_scores)
    exact_match = OnRanks(LearnerRank.exact_match)
    reset_optimizer = OnRanks(LearnerRank.reset_optimizer)
    set_learning_rate = OnRanks(LearnerRank.set_learning_rate)

    def __init__(
        self, spec: LearnerSpec, placement: PlacementGroup, ranks: list[Actor], attempt: int = 0
    ) -> None:
        self.spec = spec
        self.placement = placement
        self.ranks = ranks
        self.startup: dict[str, float] = {}
        """Seconds of each part of the start. `caches_removed` counts ranks whose compile caches
        were damaged."""
        self.attempt = attempt
        self._processes: list[tuple[str, int]] = []
        """Node and process id of each rank."""
        self._one_call = asyncio.Lock()
        self._snapshot: tempfile.TemporaryDirectory[str] | None = None
        self._failed: LearnerError | None = None
        """The failure that ended the ranks."""
        self.answered = 0
        """Number of calls that all ranks have answered."""

    @classmethod
    async def create(cls, spec: LearnerSpec, run_id: str, attempt: int) -> RayLearner:
        """Place the ranks, load the model, build the engine.

        Raises:
            PlacementLostError: the resources were not available within `placement_timeout_s`.
            LearnerError: a rank failed.
        """
        placement = await _place_ranks(spec)
        ranks = [
            _start_actor(spec, placement, rank, run_id, attempt)
            for rank in range(spec.learner.world_size)
        ]
        learner = cls(spec, placement, ranks, attempt)
        learner._processes = await learner._results(
            "register_stacks", [rank.register_stacks.remote() for rank in ranks]
        )
        addresses = await learner._addresses()
        if len(set(addresses)) == 1:
            addresses = [LOOPBACK] * len(addresses)
        [port] = await learner._results("listen", [ranks[0].listen.remote(addresses[0])])
        starts = [rank.start.remote(addresses, port) for rank in ranks]
        learner.startup = (await learner._results("start", starts))[0]
        learner.startup["caches_removed"] = float(
            sum([await rank.caches_removed.remote() for rank in ranks])
        )
        return learner

    async def stacks(self) -> list[str]:
        """The current stack of each rank, also during a call."""
        paths = [stacks_path(self.spec, self.attempt, rank) for rank in range(len(self._processes))]
        return list(
            await asyncio.gather(
                *(
                    stack_of(*process, path)
                    for process, path in zip(self._processes, paths, strict=True)
                )
            )
        )

    async def describe(self) -> tuple[None, str]:
        """For the watchdog: no progress figure, because a call shows none, and the ranks'
        stacks."""
        return None, "; ".join(
            f"rank {rank}: {stack}" for rank, stack in enumerate(await self.stacks())
        )

    async def step(self, batch: Sequence[Scored]) -> StepResult:
        """Take one step on these groups: a policy step, or one of online DPO."""
        return (await self._all(LearnerRank.step, [scored.ref for scored in batch]))[0]

    async def gather(self, version: int) -> Manifest:
        """Put the weights in the object store as `version`."""
        manifest = (await self._all(LearnerRank.gather, version))[0]
        assert manifest is not None  # rank 0 has it
        return manifest

    async def save(self, directory: Path) -> dict[str, Written]:
        """Write the learner's state under `directory`. Returns the files of all ranks: name
        relative to `directory` → size and checksum."""
        return {
            name: written
            for files in await self._all(LearnerRank.save, Path(directory).absolute())
            for name, written in files.items()
        }

    async def check_shared(self, directory: Path) -> None:
        """Check that each rank's node and this one see the same existing `directory`.

        Raises:
            NotSharedError: a node does not. The message names it.
        """
        with Probe(Path(directory).absolute()) as probe:
            answers = await self._all(LearnerRank.answer_probe, probe.folder)
            for rank, answered in enumerate(answers):
                if not answered or not await asyncio.to_thread(probe.seen, f"rank_{rank}"):
                    address = (await self._addresses())[rank]
                    raise NotSharedError(
                        f"{probe.directory} is not the same directory here and on node {address}"
                        f" (learner rank {rank}), so a checkpoint would lack that rank's files;"
                        " set runs_root (and checkpoint.save) to storage that every node mounts at"
                        " the same path"
                    )

    async def load(self, directory: Path) -> None:
        """Restore the state of `save(directory)`. Raises LearnerError if it cannot be read."""
        await self._all(LearnerRank.load, Path(directory).absolute())

    async def export_hf(self, directory: Path, tokenizer_source: str | None = None) -> None:
        """Write a Hugging Face directory with the tokenizer of `tokenizer_source` (default:
        model.path). Raises NotSharedError if this process does not see the files."""
        source = tokenizer_source or self.spec.model.path
        target = Path(directory).absolute()
        files = (await self._all(LearnerRank.export_hf, target, source))[0]
        fix = "put it on storage that every node mounts at the same path"
        await asyncio.to_thread(wait_until_seen, target, files, fix)

    async def target_logprobs(self, table: pa.Table) -> list[np.ndarray]:
        """Log-probs float32 of the targets of each row with SFT_SCHEMA, one array for each row."""
        parts = await self._all(LearnerRank.target_logprobs, table)
        merged = {index: values for part in parts for index, values in part.items()}
        return [merged.get(index, np.zeros(0, dtype=np.float32)) for index in range(table.num_rows)]

    async def logprobs(
        self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float = 1.0
    ) -> list[np.ndarray]:
        """Log-probs [C] float32 of each row's second ids, one array for each row."""
        parts = await self._all(LearnerRank.logprobs, rows, temperature)
        merged = {index: values for part in parts for index, values in part.items()}
        return [merged[index] for index in range(len(rows))]

    async def snapshot(self) -> None:
        """Take a snapshot of weights and optimizer. It replaces the previous one."""
        make_directory(self.spec.run_directory)
        # In the run directory, which every rank's node can see.
        directory = tempfile.TemporaryDirectory(prefix=SNAPSHOT, dir=self.spec.run_directory)
        await self.save(Path(directory.name))
        self._forget_snapshot()
        self._snapshot = directory

    async def restore(self) -> None:
        """Restore the last snapshot. Raises LearnerError without one."""
        if self._snapshot is None:
            raise LearnerError("the learner has no snapshot to restore; call snapshot() first")
        await self.load(Path(self._snapshot.name))

    async def watch(self) -> None:
        """Raise LearnerDiedError soon after a rank has died, also between two calls. Otherwise run
        until canceled.

        Without this, a death is found only by the next call. The driver could first wait minutes
        for groups, or for generators that cannot fetch the dead rank's weights.
        """
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            async with self._one_call:
                self._refuse_if_ended("watch")
                await self._answers(
                    "a look between two calls", [rank.node_address.remote() for rank in self.ranks]
                )

    async def close(self) -> None:
        """End all ranks and free their resources. May be called twice."""
        self._end()

    async def _addresses(self) -> list[str]:
        """Address of each rank's node."""
        async with self._one_call:
            calls = [rank.node_address.remote() for rank in self.ranks]
            return await self._results("node_address", calls)

    async def _all(self, method: Method[P, T], *arguments: P.args, **named: P.kwargs) -> list[T]:
        """Call a method on every rank and wait for all of them. The first failure ends all
        ranks."""
        name = str(method)
        # Ray does not resolve references inside a list: each rank fetches the rows itself.
        stored = [_stored(value) if isinstance(value, pa.Table) else value for value in arguments]
        async with self._one_call:
            self._refuse_if_ended(name)
            return await self._results(
                name, [rank.call.remote(name, *stored, **named) for rank in self.ranks]
            )

    def _refuse_if_ended(self, method: str) -> None:
        if not self.ranks:
            failed = self._failed or LearnerError(
                f"the learner is closed, so {method} cannot run; make a new one"
            )
            raise type(failed)(*failed.args)

    async def _results(self, method: str, calls: Sequence[Awaitable[T]]) -> list[T]:
        """The results of a call on several ranks. A cancellation ends all ranks."""
        try:
            results = await self._answers(method, calls)
        except asyncio.CancelledError:
            # Ranks inside a collective cannot be interrupted one by one.
            self._failed = LearnerError(
                f"the learner was ended in {method}: its caller was canceled"
            )
            self._end()
            raise
        self.answered += 1
        return results

    async def _answers(self, method: str, calls: Sequence[Awaitable[T]]) -> list[T]:
        """The answer of each rank. A rank that fails, dies or does not answer in time ends all
        ranks."""
        waiting = [asyncio.ensure_future(_result(call)) for call in calls]
        try:
            _, silent = await asyncio.wait(
                waiting,
                timeout=self.spec.learner.call_timeout_s,
                return_when=asyncio.FIRST_EXCEPTION,
            )
            if silent and not any(task.done() and task.exception() for task in waiting):
                await self._give_up(
                    [rank for rank, task in enumerate(waiting) if task in silent], method
                )
            return [await task for task in waiting]
        except RayError:
            self._fail(*await _first_failure(waiting), method)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    def _fail(self, rank: int, error: BaseException, method: str) -> NoReturn:
        """End all ranks because one failed. Raises an error that names it."""
        kind = LearnerDiedError if isinstance(error, DEATHS) else LearnerError
        self._failed = kind(f"learner rank {rank} failed in {method}: {_cause(error, method)}")
        self._end()
        raise self._failed from error

    async def _give_up(self, silent: list[int], method: str) -> None:
        """End all ranks because some did not answer in time. Raises LearnerDiedError with the stack
        of each rank."""
        names = f"learner rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
        limit = f"learner.call_timeout_s = {self.spec.learner.call_timeout_s:g} s"
        _, stacks = await self.describe()
        self._failed = LearnerDiedError(
            f"{names} did not answer {method} within {limit}, so all ranks were ended; raise the"
            f" limit if the call takes longer ({stacks})"
        )
        self._end()
        raise self._failed

    def _end(self) -> None:
        ranks, self.ranks = self.ranks, []
        ends = [functools.partial(ray.kill, rank, no_restart=True) for rank in ranks]
        if ranks:
            ends.append(functools.partial(remove_placement_group, self.placement))
        for end in ends:
            try:
                end()
            except RayError as error:  # it must not hide why the ranks end
                logger.warning("Ray did not confirm the end of the learner: %s", error)
        self._forget_snapshot()

    def _forget_snapshot(self) -> None:
        if self._snapshot is not None:
            self._snapshot.cleanup()
            self._snapshot = None


async def _result(call: Awaitable[T]) -> T:
    return await call


async def _first_failure(waiting: Sequence[asyncio.Future[T]]) -> tuple[int, BaseException]:
    """The rank that failed, and its error. At least one rank has failed.

    When a rank dies in a collective, its peers fail too, often before Ray reports the death. So
    wait a moment for a death, and prefer it to the other failures. A peer that has lost its
    connection may have lost it with a node, whose death Ray reports later.
    """
    began = time.monotonic()
    while True:
        failures = [
            (rank, error)
            for rank, task in enumerate(waiting)
            if task.done() and (error := task.exception()) is not None
        ]
        deaths = [failure for failure in failures if isinstance(failure[1], DEATHS)]
        unfinished = [task for task in waiting if not task.done()]
        lost = any(_lost_peer(error) for _, error in failures)
        left = began + (NODE_DEATH_KNOWN_S if lost else DEATH_KNOWN_S) - time.monotonic()
        if deaths or not unfinished or left <= 0:
            return (deaths or failures)[0]
        await asyncio.wait(unfinished, timeout=left, return_when=asyncio.FIRST_COMPLETED)


def _lost_peer(error: BaseException) -> bool:
    """Whether a rank failed because it lost its connection to another rank."""
    message = str(error.cause if isinstance(error, RayTaskError) else error)
    return any(part in message for part in PEER_LOST)


def _cause(error: BaseException, method: str) -> str:
    """The cause of a failure, in one line."""
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    if isinstance(error, OutOfMemoryError):
        return f"Ray ended it because the machine ran out of memory; {LESS_MEMORY}"
    if isinstance(error, RayActorError):
        hint = (
            f"; in a step that is often the machine's memory: {LESS_MEMORY}"
            if method in STEPS
            else ""
        )
        return f"its process died; its log is in the Ray session's folder{hint}"
    return " ".join(str(error).split())


def _stored(table: pa.Table) -> ray.ObjectRef[pa.Buffer]:
    """The table in the object store, once for all ranks. Ray gives each rank the stream itself."""
    return ray.put(table_to_ipc(table))


def stacks_path(spec: LearnerSpec, attempt: int, rank: int) -> Path:
    """The file to which a rank writes its stacks on request."""
    return spec.run_directory / "logs" / f"attempt_{attempt}" / "stacks" / f"rank_{rank}.txt"


def _bundle(spec: LearnerSpec) -> dict[str, float]:
    """Resources of one rank."""
    bundle = {"CPU": float(spec.learner.num_cpus)} if spec.learner.num_cpus else {}
    if spec.rank_gpus:
        bundle["GPU"] = spec.rank_gpus
    return bundle


async def _place_ranks(spec: LearnerSpec) -> PlacementGroup:
    bundle, world_size = _bundle(spec), spec.learner.world_size
    # Ray refuses an empty bundle.
    placement: PlacementGroup = placement_group(
        [dict(bundle) or {"CPU": 0.001}] * world_size, strategy="PACK"
    )
    try:
        await asyncio.wait_for(_result(placement.ready()), spec.placement_wait_s)
    except TimeoutError:
        table = resource_table({name: amount * world_size for name, amount in bundle.items()})
        remove_placement_group(placement)
        raise PlacementLostError(
            f"{world_size} learner ranks were not placed within placement_timeout_s ="
            f" {spec.placement_wait_s:g} s; free or add resources, or lower learner.world_size or"
            f" learner.num_cpus\n{table}"
        ) from None
    return placement


def resource_table(needed: dict[str, float]) -> str:
    """Needed, registered and free resources of the cluster, as a text table."""
    registered, free = ray.cluster_resources(), ray.available_resources()
    rows = [f"{'resource':<10} {'needed':>8} {'registered':>11} {'free':>8}"]
    rows += [
        f"{name:<10} {amount:>8g} {registered.get(name, 0):>11g} {free.get(name, 0):>8g}"
        for name, amount in needed.items()
    ]
    return "\n".join(rows)


def rank_environment(spec: LearnerSpec) -> dict[str, str]:
    """Environment variables of a rank's process: those of the user that concern it
    (`asyncrl.runtime.processes.environment`), and those that asyncrl sets."""
    return passed_on(os.environ) | {
        "DS_ACCELERATOR": spec.learner.device,
        "OMP_NUM_THREADS": str(spec.learner.least_threads),
        "TOKENIZERS_PARALLELISM": "false",
        # By default, glibc returns large blocks to the system at once. Every step would then fault
        # its activations in again.
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
        # On the CPU, idle threads must not take a core from the generators.
        **({"OMP_WAIT_POLICY": "passive"} if spec.learner.device == "cpu" else {}),
    }


def _start_actor(
    spec: LearnerSpec, placement: PlacementGroup, rank: int, run_id: str, attempt: int
) -> Actor:
    environment = rank_environment(spec)
    strategy = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=rank)
    options = {
        "num_cpus": _bundle(spec).get("CPU", 0.0),
        "num_gpus": _bundle(spec).get("GPU", 0.0),
    }
    actor = ray.remote(RankProcess).options(
        **options,
        scheduling_strategy=strategy,
        runtime_env={"env_vars": environment},
        max_restarts=0,
    )
    return actor.remote(rank, spec, run_id, attempt)
