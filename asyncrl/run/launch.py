"""Starts the stations of an attempt, connects them, and ends them.

The cluster and the run's own generators may outlive an attempt: see `asyncrl.run.across_attempts`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import ray

import asyncrl
from asyncrl.config import Config
from asyncrl.config.distillation import TeacherServer
from asyncrl.config.schema import AttachedGenerators
from asyncrl.contracts.errors import TeacherError
from asyncrl.contracts.messages import ReplicaStatus
from asyncrl.contracts.rows import Completion, Prompt
from asyncrl.contracts.state import State
from asyncrl.data.prompt_stream import RayPromptSource
from asyncrl.data.prompts import PromptReport, read_prompts
from asyncrl.data.rendering import Data
from asyncrl.generation.app import (
    ServeGenerate,
    application,
    wait_for_generators,
)
from asyncrl.generation.orphans import application_name
from asyncrl.generation.run_generators import RunGenerators, end_lease, lease_generators
from asyncrl.learning.driver import RayLearner
from asyncrl.learning.frozen.reference import RayReference, start_reference
from asyncrl.learning.frozen.teacher import start_teacher
from asyncrl.observe.watchdog import Description
from asyncrl.preflight.specs import (
    data_spec,
    generator_app,
    learner_spec,
    reference_spec,
    scoring_spec,
    sessions_spec,
    worker_spec,
)
from asyncrl.rewards.code import share_settings
from asyncrl.rewards.contract import ScoredSession
from asyncrl.rewards.pool import RewardPool
from asyncrl.rewards.remote import RemoteRewardPool
from asyncrl.rewards.score import score_completions
from asyncrl.rewards.scoring import RayScores
from asyncrl.rollout.driver import RayRollouts, start_rollouts
from asyncrl.rollout.lost_requests import LostRequests
from asyncrl.run.across_attempts import AcrossAttempts
from asyncrl.run.closing import Closing, cancel
from asyncrl.run.cluster.attach import attached_config
from asyncrl.run.cluster.placement import (
    generators_lost,
    own_cluster,
    wait_for_actors,
    wait_for_placement,
    wait_for_resources,
)
from asyncrl.rundir.directory import RunDirectory
from asyncrl.runtime.files.opening import make_directory
from asyncrl.runtime.processes.stacks import stacks_as
from asyncrl.runtime.ray.objects import Actor
from asyncrl.runtime.ray.serve_calls import Handle
from asyncrl.text.answer import answer_format
from asyncrl.text.tokenizer import refuse_another_tokenizer
from asyncrl.weights.push import ServeWeightSync

if TYPE_CHECKING:
    from asyncrl.rollout.session_groups import Sessions

logger = logging.getLogger("asyncrl")


@dataclass(slots=True)
class Stations:
    """The running stations of an attempt."""

    config: Config
    context: int
    learner: RayLearner
    generate: ServeGenerate
    weights: ServeWeightSync
    prompts: RayPromptSource
    rollouts: RayRollouts
    scores: RayScores
    reference: RayReference | None
    """The reference policy, if it is refreshed."""
    pool: RewardPool | RemoteRewardPool
    evaluation_prompts: dict[Data, list[Prompt]]
    """Data file of an evaluation set → its prompts."""
    sessions: Sessions | None
    """Plays the sessions of evaluations; None without an environment."""
    kv_cache_tokens: int
    """Capacity of one replica's KV cache, in tokens."""
    startup: dict[str, float | str]
    """Seconds that the stations took to start, and the locations of the package."""
    stacks: Path
    """Folder where processes write their stacks on request."""
    application: str
    """Name of the generators' Serve application."""
    placed: Config | None
    """The config with which the run placed its own generators; None: it attached to others."""

    async def while_placed(self, work: Coroutine[object, None, object]) -> None:
        """Run a coroutine for as long as the run's own generators have room on the cluster.

        Raises:
            PlacementLostError: the last of them lost its room. The coroutine was canceled.
        """
        if self.placed is None:
            await work
            return
        working = asyncio.create_task(work)
        lost = asyncio.create_task(generators_lost(self.placed, self.application))
        try:
            await asyncio.wait((working, lost), return_when=asyncio.FIRST_COMPLETED)
            await (working if working.done() else lost)
        finally:
            await asyncio.gather(cancel(working), cancel(lost))

    @property
    def probe_tokens(self) -> int:
        """Tokens sampled for each probe: as configured, limited by the model's context."""
        return max(1, min(self.config.probe_tokens, self.context - self.config.longest_prompt - 1))

    @property
    def probe_prompts(self) -> list[Sequence[int]]:
        """Prompts of the log-prob check, the same in every attempt."""
        held_out = next(iter(self.evaluation_prompts.values()), None)
        prompts = held_out or read_prompts(
            self.config.data.train,
            data_spec(self.config),
            self.config.weights.probe_prompts,
            "data.train",
        )
        return [prompt.token_ids for prompt in prompts[: self.config.weights.probe_prompts]]

    async def describe(self, stage: str) -> Description:
        """Describe a stage for the watchdog."""
        if stage == "learning":
            return await self.learner.describe()
        if stage in ("generation", "publishing", "evaluation"):
            return await self._describe_generators(stage)
        stacks = await stacks_as(self.stacks, stage)
        return (
            None,
            "; ".join(stacks)
            or f"no process of the {stage} stream is left; see {self.stacks.parent}",
        )

    async def _describe_generators(self, stage: str) -> Description:
        statuses, stacks, scoring = await asyncio.gather(
            self.generate.statuses(), self.generate.stacks(), stacks_as(self.stacks, "scoring")
        )
        lines = [
            f"replica {status.replica} has version"
            f" {status.weights.version if status.weights else None},"
            f" {status.tokens_generated} tokens"
            for status in statuses
        ]
        lines += [f"engine of {replica}: {stack}" for replica, engine in stacks for stack in engine]
        lines += scoring if stage == "generation" else []
        return (
            tuple(status.tokens_generated for status in statuses),
            "; ".join(lines) or "no replica answers",
        )

    async def score(
        self,
        prompt: Prompt,
        completions: Sequence[Completion],
        sessions: Sequence[ScoredSession] | None = None,
    ) -> dict[str, list[float | None]]:
        """Raw rewards of the completions of one prompt, by reward function."""
        return await score_completions(self.pool, prompt, completions, sessions)


def _evaluation_prompts(config: Config) -> dict[Data, list[Prompt]]:
    """The prompts of each data file of the evaluation sets: as many as the largest of its sets
    needs."""
    most: dict[Data, int] = {}
    for settings in config.evaluation_sets.values():
        assert settings.data is not None and settings.max_prompts is not None
        most[settings.data] = max(most.get(settings.data, 0), settings.max_prompts)
    return {path: read_prompts(path, data_spec(config), limit) for path, limit in most.items()}


def _evaluation_sessions(config: Config, stack: Closing) -> Sessions | None:
    """What plays the sessions of evaluations. Its processes start at the first evaluation."""
    spec = sessions_spec(config)
    if spec is None or not config.evaluation_sets:
        return None
    # Imported here because it loads a tokenizer, which runs without an environment do not need.
    from asyncrl.rollout.session_groups import Sessions

    sessions = Sessions(spec, config.seed)
    stack.add("environment processes", sessions.close)
    return sessions


@asynccontextmanager
async def launch_stations(
    config: Config,
    directory: RunDirectory,
    report: PromptReport,
    context: int,
    prepare: Callable[[RayLearner], Awaitable[None]],
    across: AcrossAttempts,
) -> AsyncIterator[Stations]:
    """Start every station, and end all of them on exit. The run's own generators end with `across`.

    Args:
        prepare: brings the learner to its first version while the generators start.

    Raises:
        PlacementError: the cluster has no room.
        AttachError, LeaseHeldError: the standing generators do not fit, or another run uses them.
        RuntimeError: a station failed to start; the message names it.
    """
    state = directory.state
    config, _ = await wait_for_resources(config)
    async with Closing(across.failed) as stack:
        own_name = application_name(config.name, state.run_id, state.attempt)
        generator = config.generator
        app_name = generator.attach if isinstance(generator, AttachedGenerators) else own_name
        longest = _longest_request(config, context)
        config, registry = await _lease(config, app_name, longest, state.run_id, across, stack)
        # The learner's placement group comes first, then the generators, whose start takes longest.
        learner_start = asyncio.create_task(_start_learner(config, state, stack, prepare))
        stack.add("start of the learner", functools.partial(cancel, learner_start))
        await asyncio.sleep(0)  # the task asks for its group before another actor
        reference = _start_reference(config, directory.reference, stack)
        if config.replicas_share_gpus:
            # An engine measures the free memory of its GPU while it starts. The others must not
            # allocate theirs meanwhile, and a learner that takes shifts has left the GPU.
            await _started_alone(config, app_name, learner_start, reference)
        handle, watcher = await _generator_handle(config, app_name, across)
        kept = directory.path / "kept"
        generate = functools.partial(_keeping_generate, handle, kept, state.attempt)
        streams = _start_streams(config, directory, report, generate, reference, stack)
        started = await _wait_until_started(
            config, app_name, handle, watcher, learner_start, streams, stack
        )
        yield Stations(
            config,
            context,
            started.learner,
            generate(),
            _start_weight_sync(config, handle, registry, stack),
            streams.prompts,
            streams.rollouts,
            streams.scores,
            streams.refreshed,
            started.pool,
            _evaluation_prompts(config),
            _evaluation_sessions(config, stack),
            started.status.kv_cache_tokens,
            started.startup,
            directory.logs / "stacks",
            app_name,
            across.placed,
        )


@dataclass(frozen=True, slots=True)
class _Streams:
    """The streams from prompts to scored groups."""

    rollouts: RayRollouts
    scores: RayScores
    prompts: RayPromptSource
    reference: Actor | None
    refreshed: RayReference | None

    @property
    def started(self) -> dict[str, Callable[[], Awaitable[bool]]]:
        """Name of a stream → a call that returns once it has started."""
        return {"prompt stream": self.prompts.started, "scoring stream": self.scores.started}


def _start_streams(
    config: Config,
    directory: RunDirectory,
    report: PromptReport,
    generate: Callable[[], ServeGenerate],
    reference: Actor | None,
    stack: Closing,
) -> _Streams:
    state, stacks = directory.state, directory.logs / "stacks"
    rollouts = start_rollouts(worker_spec(config, state.run_id, state.attempt, generate))
    stack.add("rollout workers", rollouts.close)
    scores = RayScores(
        replace(scoring_spec(config), answers=answer_format(config.model.path)),
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
    prompts = RayPromptSource(data_spec(config), report, state.frontier, finished, stacks)
    stack.add("prompts", prompts.close)
    refreshed = None
    if reference is not None and config.reference_interval is not None:
        refresh = reference_spec(config, directory.reference).refresh
        refreshed = None if refresh is None else RayReference(reference, refresh)
    return _Streams(rollouts, scores, prompts, reference, refreshed)


@dataclass(frozen=True, slots=True)
class _Started:
    """What is known once every station has started."""

    learner: RayLearner
    pool: RewardPool | RemoteRewardPool
    status: ReplicaStatus
    """The status of one replica."""
    startup: dict[str, float | str]


async def _wait_until_started(
    config: Config,
    app_name: str,
    handle: Handle,
    watcher: Actor | None,
    learner_start: asyncio.Task[tuple[RayLearner, float]],
    streams: _Streams,
    stack: Closing,
) -> _Started:
    """Wait until every station has started. The first failure cancels the other starts."""
    generators_start = asyncio.ensure_future(
        _timed(wait_for_generators(app_name, config.start_timeout_s))
    )
    rewards_start = asyncio.ensure_future(_start_rewards(config, stack))
    await _together(
        generators_start,
        learner_start,
        rewards_start,
        streams.rollouts.ready(),
        _ready(streams.reference),
        _ready(watcher),
        wait_for_placement(config, app_name, streams.started),
    )
    learner, learner_s = learner_start.result()
    status: ReplicaStatus = await handle.status.remote()
    refuse_another_tokenizer(config.model.path, status.tokenizer)
    startup = await _startup_facts(handle, status, generators_start.result(), learner, learner_s)
    return _Started(learner, rewards_start.result(), status, startup)


async def _generator_handle(
    config: Config, app_name: str, across: AcrossAttempts
) -> tuple[Handle, Actor | None]:
    """The handle of the generators, and the watcher that ends the run's own generators after a
    crash."""
    if config.owns_generators and across.generators is not None:
        handle = await across.generators.begin(not own_cluster())
        return handle, across.generators.watcher
    return application(app_name), None


def _start_weight_sync(
    config: Config, handle: Handle, registry: Actor, stack: Closing
) -> ServeWeightSync:
    weights = ServeWeightSync(
        handle, registry, config.push_timeout_s, config.commit_grace_s, config.updates_drain
    )
    announcing = asyncio.create_task(weights.keep_announced())
    stack.add("announcements", functools.partial(cancel, announcing))
    return weights


async def _lease(
    config: Config, name: str, tokens: int, run_id: str, across: AcrossAttempts, stack: Closing
) -> tuple[Config, Actor]:
    """The config with the generators' settings, and the actor of the lease on them. The generators
    were left by an earlier attempt, belong to a standing endpoint, or are about to start."""
    if across.generators is not None:
        return config, across.generators.registry
    if not config.owns_generators:
        config = await attached_config(config, name, tokens)
    registry = await lease_generators(name, f"{config.name!r} ({run_id})")
    if config.owns_generators:
        settings = generator_app(config).model_copy(update={"max_model_len": tokens})
        across.generators, across.placed = RunGenerators(name, registry, settings), config
    else:
        stack.add("lease", functools.partial(asyncio.to_thread, end_lease, registry, name))
    return config, registry


def _keeping_generate(handle: Handle, kept: Path, attempt: int) -> ServeGenerate:
    """Called in the process that sends the requests, a rollout worker or the driver, because the
    file of lost requests is named after the process."""
    return ServeGenerate(handle, LostRequests(kept, attempt))


def _longest_request(config: Config, context: int) -> int:
    """Tokens that an engine must accept. To score tokens, vLLM always generates one more."""
    return min(config.longest_request + 1, context)


def _start_reference(config: Config, folder: Path | None, stack: Closing) -> Actor | None:
    """The actor of the reference policy or of the teacher; None in a run that uses neither."""
    if not config.algorithm.has_reference:
        return None
    distillation = config.algorithm.distillation
    server = None if distillation is None else distillation.teacher
    reference = (
        start_teacher(server)
        if isinstance(server, TeacherServer)
        else start_reference(reference_spec(config, folder))
    )

    async def close() -> None:
        ray.kill(reference)

    stack.add("reference policy", close)
    return reference


async def _started_alone(
    config: Config,
    app_name: str,
    learner_start: asyncio.Task[tuple[RayLearner, float]],
    reference: Actor | None,
) -> None:
    """Wait until the learner and the reference policy have started, before the generators do."""
    ready = asyncio.ensure_future(_ready(reference))
    await _together(learner_start, ready, wait_for_actors(config, app_name, ready.done))


async def _ready(actor: Actor | None) -> None:
    if actor is None:
        return
    try:
        await actor.ready.remote()
    except TeacherError as error:
        # The original message, without the traceback that Ray adds.
        raise TeacherError(str(getattr(error, "cause", None) or error)) from None


async def _start_rewards(config: Config, stack: Closing) -> RewardPool | RemoteRewardPool:
    """The reward processes of evaluation, after they have imported every function."""
    share_settings(config.reward.sandbox)
    answers = answer_format(config.model.path)
    pool = (
        RemoteRewardPool(config.reward, answers)
        if config.scores_evaluation_apart
        else RewardPool(config.reward, None, answers)
    )
    stack.add("reward processes", functools.partial(asyncio.to_thread, pool.close))
    await pool.check()
    return pool


async def _timed(work: Awaitable[object]) -> float:
    """The seconds that a call takes."""
    started = time.monotonic()
    await work
    return time.monotonic() - started


async def _startup_facts(
    handle: Handle,
    status: ReplicaStatus,
    generators_s: float,
    learner: RayLearner,
    learner_s: float,
) -> dict[str, float | str]:
    """The record `startup`: seconds that the stations took to start, seconds of an empty pause, and
    the location of the asyncrl package on both sides."""
    pauses = [(await handle.pause_empty.remote())["pause_s"] for _ in range(5)]
    return {
        "startup/generators_s": generators_s,
        "startup/learner_s": learner_s,
        **{f"startup/learner_{name}": value for name, value in learner.startup.items()},
        **{f"startup/generator_{name}": value for name, value in status.start_times.items()},
        "startup/pause_empty_s": sorted(pauses)[2],
        "package/driver": os.path.dirname(asyncrl.__file__),
        "package/replica": status.package,
    }


async def _start_learner(
    config: Config,
    state: State,
    stack: Closing,
    prepare: Callable[[RayLearner], Awaitable[None]],
) -> tuple[RayLearner, float]:
    started = time.monotonic()
    learner = await RayLearner.create(learner_spec(config), state.run_id, state.attempt)
    seconds = time.monotonic() - started
    stack.add("learner", learner.close)
    for directory in dict.fromkeys((config.run_directory, config.checkpoints_directory)):
        make_directory(directory)
        await learner.check_shared(directory)
    await prepare(learner)
    if config.takes_shifts_on_gpus:
        await learner.leave_device()
    return learner, seconds


async def _together(*works: Awaitable[object]) -> None:
    """Wait for all; if one fails or the caller is canceled, cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
