"""The one place that joins the stations: a Ray cluster, generators and learner started in parallel, streams, and their end.

The cluster and the run's own generators last from the first attempt to the last one (`AcrossAttempts`); all else lasts one attempt (`launch`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import sys
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import auto_init_hook
from ray._private.authentication.authentication_utils import is_token_auth_enabled

import asyncrl
from asyncrl.config import Config
from asyncrl.control.checkpoint import State
from asyncrl.control.protocols import PartDied
from asyncrl.data.prompts import Data, PromptReport, RayPromptSource, read_prompts
from asyncrl.directory import RunDirectory
from asyncrl.generation.app import (
    ServeGenerate,
    application,
    forget_controller,
    wait_for_generators,
)
from asyncrl.generation.attach import attached_config
from asyncrl.generation.orphans import application_name
from asyncrl.generation.owned import OwnGenerators, end_lease, lease_generators
from asyncrl.generation.settings import GeneratorApp
from asyncrl.learning.group import LearnerGroup, PlacementLost
from asyncrl.learning.reference import start_reference
from asyncrl.placement import (
    generators_lost,
    needed,
    own_cluster,
    wait_for_placement,
    wait_for_room,
)
from asyncrl.preflight.cluster_address import answering_cluster
from asyncrl.redact import print_shown, redact
from asyncrl.rewards.code import share_settings
from asyncrl.rewards.pool import RewardPool
from asyncrl.rewards.remote import RemoteRewardPool
from asyncrl.rewards.score import score_completions
from asyncrl.rewards.scoring import RayScores
from asyncrl.rollout.group import RayRollouts, start_rollouts
from asyncrl.rollout.lost import LostRequests
from asyncrl.rollout.worker import WorkerSpec
from asyncrl.runtime.files import make_directory, replace_text
from asyncrl.runtime.temporary import TemporaryPlace, remove_left_behind
from asyncrl.stacks import stacks_as
from asyncrl.text.tokenizer import refuse_another_tokenizer
from asyncrl.types import Completion, Prompt
from asyncrl.weights.push import ServeWeightSync

__all__ = ["AcrossAttempts", "Stations", "cluster", "launch", "start_local_ray"]

logger = logging.getLogger("asyncrl")

CLOSE_TIMEOUT_S = 10.0
"""Seconds that one station gets to close before it is left to the end of its cluster."""
THREADS_END_S = 10.0
"""Seconds that calls under way in threads get to come back."""
LARGEST_LOG = 10 << 20


@dataclass(slots=True)
class Stations:
    """The running parts of one run."""

    config: Config
    context: int
    learner: LearnerGroup
    generate: ServeGenerate
    weights: ServeWeightSync
    prompts: RayPromptSource
    rollouts: RayRollouts
    scores: RayScores
    pool: RewardPool | RemoteRewardPool
    evaluation_prompts: dict[Data, list[Prompt]]
    """Of each file that an evaluation set names."""
    kv_cache_tokens: int
    """Tokens that one replica's KV cache holds."""
    startup: dict[str, Any]
    """Seconds that the parts took to start."""
    stacks: Path
    """Where processes say what they do when they are asked."""
    application: str
    """Name of the generators' Serve application."""
    placed: Config | None
    """The config by which the run placed generators of its own."""

    async def while_placed(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work. Raises PlacementLost, and cancels it, when the room for all generators of the run's own is lost meanwhile."""
        if self.placed is None:
            return await work
        working = asyncio.create_task(work)
        lost = asyncio.create_task(generators_lost(self.placed, self.application))
        try:
            await asyncio.wait((working, lost), return_when=asyncio.FIRST_COMPLETED)
            await (working if working.done() else lost)
        finally:
            await asyncio.gather(_cancel(working), _cancel(lost))

    @property
    def probe_tokens(self) -> int:
        """Tokens sampled for each probe: what the config asks for, as far as the model's context goes."""
        return max(1, min(self.config.probe_tokens, self.context - self.config.longest_prompt - 1))

    @property
    def probe_prompts(self) -> list[Sequence[int]]:
        """Prompts of the log-prob check, the same ones in every attempt."""
        held_out = next(iter(self.evaluation_prompts.values()), None)
        prompts = held_out or read_prompts(
            self.config.data.train, self.config, self.config.weights.probe_prompts, "data.train"
        )
        return [prompt.token_ids for prompt in prompts[: self.config.weights.probe_prompts]]

    async def say(self, stage: str) -> tuple[Any, str]:
        """For the watchdog: what moves inside a stage that does not come to its end (None: nothing that could be seen), and what its workers say."""
        if stage == "learning":
            return await self.learner.say()
        if stage in ("generation", "publishing", "evaluation"):
            found, stacks, scoring = await asyncio.gather(
                self.generate.statuses(), self.generate.stacks(), stacks_as(self.stacks, "scoring")
            )
            versions = [one["weights"].version if one["weights"] else None for one in found]
            said = [
                f"replica {one['replica']} has version {version}, {one['tokens_generated']} tokens"
                for one, version in zip(found, versions, strict=True)
            ]
            said += [
                f"engine of {replica}: {stack}"
                for replica, found_there in stacks
                for stack in found_there
            ]
            said += scoring if stage == "generation" else []
            return tuple(one["tokens_generated"] for one in found), "; ".join(
                said
            ) or "no replica answers"
        return None, "; ".join(
            await stacks_as(self.stacks, stage)
        ) or f"no process of the {stage} stream is left; see {self.stacks.parent}"

    async def score(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> dict[str, list[float | None]]:
        """Raw rewards of completions of one prompt, name by name."""
        return await score_completions(self.pool, prompt, completions)


def _evaluation_prompts(config: Config) -> dict[Data, list[Prompt]]:
    """The prompts of all data that is evaluated on, as many as any of its sets takes."""
    most: dict[Data, int] = {}
    for one in config.evaluation_sets.values():
        assert one.data is not None and one.max_prompts is not None
        most[one.data] = max(most.get(one.data, 0), one.max_prompts)
    return {path: read_prompts(path, config, limit) for path, limit in most.items()}


class AcrossAttempts:
    """What the attempts of a run share: the Ray cluster, and the generators that the run started."""

    def __init__(self) -> None:
        self.generators: OwnGenerators | None = None
        self.placed: Config | None = None
        """The config by which `generators` were placed."""
        self.failed: list[str] = []
        """Stations of the attempt that did not close in time: only the end of the cluster frees what they hold."""
        self._cluster: ExitStack | None = None
        self._session_logs: Path | None = None

    @asynccontextmanager
    async def attempt(
        self, config: Config, state: State, logs: Path, restarts_left: Callable[[], int]
    ) -> AsyncIterator[None]:
        """The cluster is there inside. On the way out it ends, and the generators before it, unless a part died that is none of them, and all others closed.

        Args:
            restarts_left: attempts that may begin by themselves after this one.

        Raises:
            Whatever `cluster` does.
        """
        keep = False
        self.failed.clear()
        try:
            if self._cluster is None:
                with ExitStack() as stack:
                    self._session_logs = stack.enter_context(cluster(config))
                    self._cluster = stack.pop_all()
            yield
        except PartDied as error:
            keep = restarts_left() > 0 and not isinstance(error, PlacementLost)
            raise
        finally:
            keep = (
                keep
                and not self.failed
                and self.generators is not None
                and await self.generators.release(state.run_id, state.attempt)
            )
            if not keep:
                await self._end_generators()
            # A thread that asks Ray after its end takes the process with it.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    asyncio.get_running_loop().shutdown_default_executor(), THREADS_END_S
                )
            if not keep:
                self._end_cluster()
            if self._session_logs is not None:
                _keep_logs(self._session_logs, logs / "ray")

    def end(self) -> None:
        """End what an attempt has left for one that did not begin."""
        if self._cluster is not None:
            asyncio.run(self._end_generators())
            self._end_cluster()

    def config(self, config: Config) -> Config:
        """An attempt's config: it attaches to the generators that an earlier one has left."""
        return (
            config
            if self.generators is None
            else config.model_copy(update={"generator": self.generators.attached})
        )

    async def _end_generators(self) -> None:
        generators, self.generators, self.placed = self.generators, None, None
        if generators is not None:
            await _close("generators", generators.end, self.failed)

    def _end_cluster(self) -> None:
        stack, self._cluster = self._cluster, None
        if stack is not None:
            stack.close()


@contextmanager
def cluster(config: Config) -> Iterator[Path | None]:
    """A Ray cluster: the one that RAY_ADDRESS names (in a submitted job, the job's), else a local one that ends with the run. Of that one, gives the folder
    of its logs.

    Raises:
        ConfigError: no cluster answers at RAY_ADDRESS.
        RuntimeError: the cluster takes work without a token.
    """
    # A thread that calls Ray after its end would start a second cluster, which nobody ends.
    auto_init_hook.enable_auto_connect = False
    address = answering_cluster()
    if address:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    else:
        start_local_ray(
            max(os.cpu_count() or 1, math.ceil(needed(config)["CPU"])), configure_logging=False
        )
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    try:
        _refuse_open_ray(config.ray_without_token)
        yield None if address else session / "logs"
    finally:
        ray.shutdown()
        forget_controller()
        remove_left_behind(TemporaryPlace.where())


def _refuse_open_ray(allowed: bool = False) -> None:
    """Raise RuntimeError unless this process speaks to Ray with a token: without one, whoever reaches its ports can run code. `allowed`: say so instead."""
    if is_token_auth_enabled():
        return
    if not allowed:
        raise RuntimeError(
            "Ray's token authentication is off; unset RAY_AUTH_MODE, or on a cluster that stands start it with RAY_AUTH_MODE=token and a token of "
            "`ray get-auth-token --generate`; ray_without_token: true uses it as it is, open to everyone who reaches its ports"
        )
    print_shown(
        "asyncrl: ray_without_token: everyone who reaches this cluster's ports can run code on its machines, and read or change runs",
        file=sys.stderr,
    )


def start_local_ray(num_cpus: int, tries: int = 4, **options: Any) -> None:
    """A Ray cluster of this process's own. Ray gives a node 30 seconds to start, which a busy machine may not keep: then once more, after the processes
    that the try has left are ended."""
    for tries_left in reversed(range(tries)):
        before = set(psutil.Process().children(recursive=True))
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                **options,
            )
            return
        except Exception as error:  # Ray raises no narrower class
            ray.shutdown()
            left = [
                process
                for process in psutil.Process().children(recursive=True)
                if process not in before
            ]
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, CLOSE_TIMEOUT_S)
            if "timed out during startup" not in str(error) or not tries_left:
                raise
            logger.warning("Ray's node timed out while it started; trying once more")


@asynccontextmanager
async def launch(
    config: Config,
    directory: RunDirectory,
    report: PromptReport,
    context: int,
    prepare: Callable[[LearnerGroup], Awaitable[None]],
    across: AcrossAttempts,
) -> AsyncIterator[Stations]:
    """Start every station; end them all on the way out, whatever happened. `prepare` has the learner while the generators still start. Generators of the
    run's own end with `across`.

    Raises:
        PlacementError: no room on the cluster.
        AttachError, LeaseHeld: the standing generators do not fit, or another run has them.
        RuntimeError: a part failed to start; the message names it.
    """
    state = directory.state
    config, _ = await wait_for_room(config)
    async with _Closing(across.failed) as stack:
        app_name = config.generator.attach or application_name(
            config.name, state.run_id, state.attempt
        )
        config, board = await _lease(
            config, app_name, _longest_request(config, context), state.run_id, across, stack
        )
        # The learner's placement group first. Then the generators: an engine takes longest to start, and its handle is there at once.
        learner_start = asyncio.create_task(_start_learner(config, state, stack, prepare))
        stack.add("start of the learner", functools.partial(_cancel, learner_start))
        if config.generator.own and across.generators is not None:
            handle, watcher = (
                await across.generators.begin(not own_cluster()),
                across.generators.watcher,
            )
        else:
            handle, watcher = application(app_name), None
        generate = functools.partial(
            _keeping_generate, handle, directory.path / "kept", state.attempt
        )
        rollouts = start_rollouts(WorkerSpec(config, state.run_id, state.attempt, generate))
        stack.add("rollout workers", rollouts.close)
        reference = _begin_reference(config, stack)
        stacks = directory.logs / "stacks"
        scores = RayScores(
            config,
            state.attempt,
            rollouts.workers,
            rollouts,
            directory.path / "groups",
            reference,
            stacks,
        )
        stack.add("scoring", scores.close)
        rollouts.when_lost = scores.lost
        finished = [*state.finished_above, *(ordinal for _, ordinal in state.waiting)]
        prompts = RayPromptSource(config, report, state.frontier, finished, stacks)
        stack.add("prompts", prompts.close)
        generators_s, (learner, learner_s), pool, *_ = await _together(
            _timed(wait_for_generators(app_name, config.start_timeout_s)),
            learner_start,
            _start_rewards(config, stack),
            rollouts.ready(),
            _ready(reference),
            _ready(watcher),
            wait_for_placement(
                config, app_name, {"prompt stream": prompts.begun, "scoring stream": scores.begun}
            ),
        )
        startup = {"startup/generators_s": generators_s, "startup/learner_s": learner_s}
        startup |= {f"startup/learner_{name}": seconds for name, seconds in learner.startup.items()}
        status = await handle.status.remote()
        refuse_another_tokenizer(config.model.path, status["tokenizer"])
        startup |= await _generator_facts(handle, status)
        drains = config.generator.in_flight == "drain"
        weights = ServeWeightSync(
            handle, board, config.push_timeout_s, config.commit_grace_s, drains
        )
        stack.add(
            "announcements",
            functools.partial(_cancel, asyncio.create_task(weights.keep_announced())),
        )
        held_out, kv_cache_tokens = _evaluation_prompts(config), status["kv_cache_tokens"]
        yield Stations(
            config,
            context,
            learner,
            generate(),
            weights,
            prompts,
            rollouts,
            scores,
            pool,
            held_out,
            kv_cache_tokens,
            startup,
            stacks,
            app_name,
            across.placed,
        )


async def _lease(
    config: Config, name: str, tokens: int, run_id: str, across: AcrossAttempts, stack: _Closing
) -> tuple[Config, Any]:
    """The config with the generators' settings, and the lease on them: generators that an earlier attempt has left, that stand already, or that are about
    to begin."""
    if across.generators is not None:
        return config, across.generators.board
    if not config.generator.own:
        config = await attached_config(config, name, tokens)
    board = await lease_generators(name, f"{config.name!r} ({run_id})")
    if config.generator.own:
        settings = GeneratorApp.from_config(config).model_copy(update={"max_model_len": tokens})
        across.generators, across.placed = OwnGenerators(name, board, settings), config
    else:
        stack.add("lease", functools.partial(asyncio.to_thread, end_lease, board, name))
    return config, board


def _keeping_generate(handle: Any, kept: Path, attempt: int) -> ServeGenerate:
    """Made in the process that asks, a rollout worker or the driver: the file of lost requests is named after it."""
    return ServeGenerate(handle, LostRequests(kept, attempt))


def _longest_request(config: Config, context: int) -> int:
    """Tokens that an engine must take: vLLM always generates one more than it is asked to score."""
    return min(config.longest_request + 1, context)


def _begin_reference(config: Config, stack: _Closing) -> Any:
    """The actor of the reference policy, or None: it is asked only for a KL term."""
    if not config.algorithm.has_reference:
        return None
    reference = start_reference(config)

    async def close() -> None:
        ray.kill(reference)

    stack.add("reference policy", close)
    return reference


async def _ready(actor: Any) -> None:
    if actor is not None:
        await actor.ready.remote()


async def _start_rewards(config: Config, stack: _Closing) -> RewardPool | RemoteRewardPool:
    """Evaluation's reward processes, every function imported."""
    share_settings(config.reward.sandbox)
    pool = (
        RemoteRewardPool(config.reward)
        if config.scores_evaluation_apart
        else RewardPool(config.reward)
    )
    stack.add("reward processes", functools.partial(asyncio.to_thread, pool.close))
    await pool.check()
    return pool


async def _timed(work: Awaitable[Any]) -> float:
    started = time.monotonic()
    await work
    return time.monotonic() - started


async def _generator_facts(handle: Any, status: Mapping[str, Any]) -> dict[str, Any]:
    """Where a replica's start went, what a pause costs at least, and which asyncrl each side runs."""
    pauses = [(await handle.pause_empty.remote())["pause_s"] for _ in range(5)]
    packages = {
        "package/driver": os.path.dirname(asyncrl.__file__),
        "package/replica": status["package"],
    }
    return (
        {f"startup/generator_{name}": seconds for name, seconds in status["load"].items()}
        | {"startup/pause_empty_s": sorted(pauses)[2]}
        | packages
    )


async def _start_learner(
    config: Config,
    state: State,
    stack: _Closing,
    prepare: Callable[[LearnerGroup], Awaitable[None]],
) -> tuple[LearnerGroup, float]:
    started = time.monotonic()
    learner = await LearnerGroup.create(config, state.run_id, state.attempt)
    seconds = time.monotonic() - started
    stack.add("learner", learner.close)
    for directory in dict.fromkeys((config.run_directory, config.checkpoints_directory)):
        make_directory(directory)
        await learner.check_shared(directory)
    await prepare(learner)
    return learner, seconds


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _together(*works: Awaitable[Any]) -> list[Any]:
    """All results; if one fails or we are cancelled, the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class _Closing(AsyncExitStack):
    """Closes stations in reverse order. What fails to close is named in `failed`."""

    def __init__(self, failed: list[str]) -> None:
        super().__init__()
        self._failed = failed

    def add(self, name: str, close: Callable[[], Awaitable[Any]]) -> None:
        self.push_async_callback(_close, name, close, self._failed)


async def _close(name: str, close: Callable[[], Awaitable[Any]], failed: list[str]) -> None:
    """Within the time for one station: one that hangs must not keep the others."""
    try:
        await asyncio.wait_for(close(), CLOSE_TIMEOUT_S)
    except Exception as error:
        failed.append(name)
        logger.warning("closing %s: %s: %s", name, type(error).__name__, error)


def _keep_logs(session: Path, target: Path) -> None:
    """The Ray session's logs stay with the run, without secrets: vLLM's, DeepSpeed's and Ray's own."""
    for file in session.rglob("*"):
        with contextlib.suppress(OSError):
            if file.is_file() and 0 < file.stat().st_size <= LARGEST_LOG:
                copy = target / file.relative_to(session)
                replace_text(copy, redact(file.read_text(errors="replace")))
