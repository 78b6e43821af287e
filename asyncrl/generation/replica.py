"""The Serve replica: a thin deployment over `Engine` that keeps its weights as new as its requests
need."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from ray import serve

import asyncrl
from asyncrl.contracts.errors import (
    GenerationTimeoutError,
    InvalidRequestError,
    StaleReplicaError,
)
from asyncrl.contracts.messages import (
    Accepted,
    Details,
    Generated,
    GenerateRequest,
    Manifest,
    ReplicaStatus,
    ServedWeights,
    StreamPiece,
    WeightsId,
)
from asyncrl.contracts.rows import Completion
from asyncrl.generation.affinity import FULL, HELD, WEIGHTS
from asyncrl.generation.engine.engine import Engine, start_engine
from asyncrl.generation.engine.processes import EngineProcesses
from asyncrl.generation.engine.updates import Update
from asyncrl.generation.follower_actors import Followers
from asyncrl.generation.rendezvous import Meeting, use_own_address
from asyncrl.generation.settings import GeneratorApp, registry_name
from asyncrl.runtime.clock import steady_time
from asyncrl.runtime.processes.resident import resident_bytes
from asyncrl.runtime.ray.many_calls import Answers, Calls
from asyncrl.runtime.ray.objects import DEATHS
from asyncrl.weights.manifest import (
    ManifestError,
    expected_tensors,
    layout_hash,
    tensors_of,
)
from asyncrl.weights.staging import Staged, StagingError, fetch_version, sweep
from asyncrl.weights.stored import weights_hash
from asyncrl.weights.version_registry import find_registry, lease_holder

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

SHIFT_EVERY_S = 0.5
"""Seconds between two questions whether the learner has left the GPU."""

REGISTRY_S = 5.0
"""Seconds that the version registry gets to answer."""


class Generator:
    """One replica. Serve runs all its methods on one event loop. Only `apply_version` and catching
    up with the version registry change its weights."""

    # Serve awaits a replica's constructor.
    async def __init__(self, app: dict[str, object]) -> None:  # type: ignore[misc]
        self.settings = GeneratorApp.model_validate(app)
        context = serve.get_replica_context()
        self.replica = context.replica_id.unique_id
        self.application = context.app_name
        self._registry_name = registry_name(self.application)
        self.weights: WeightsId | None = None
        self.held = False
        """Whether an evaluation holds this replica, which then takes no newer weights of the same
        run and attempt."""
        self._expected = expected_tensors(self.settings.model, self.settings.dtype)
        adapters = self.settings.max_lora_rank is not None
        # Before the engine reads the files, which another program may replace later.
        self._base_weights = weights_hash(self.settings.model) if adapters else ""
        self._applied: dict[str, float] = {}
        self._behind_at: tuple[WeightsId | None, int] | None = None
        self._behind_since = 0.0
        """Since when the version registry has had newer weights while `_behind_at` has not
        changed."""
        self._lock = asyncio.Lock()
        self._taking = False
        """Whether a version is being fetched and applied in a rest."""
        self._changes: set[asyncio.Future[Any]] = set()
        self._calls: set[Calls[str, Generated]] = set()
        self._pending: dict[asyncio.Task[object], WeightsId] = {}
        """Runs' requests in progress, and the weights that each needs."""
        sweep()
        self._followers = Followers(self.settings)
        self._watching: asyncio.Future[str] | None = None
        """Ends when a follower is lost."""
        if self.settings.sleeps:
            await self._wait_for_device()
        self.engine = await self._start_engine()
        try:
            await self._catch_up()
        except StagingError as error:
            # Requests that need a newer version make the replica try again.
            logger.warning(
                "replica %s starts with the checkpoint's weights: %s", self.replica, error
            )
        await self.apply_shift()

    async def _start_engine(self) -> Engine:
        """Start the engine on all its nodes.

        Raises:
            RuntimeError: it did not start, or another node was lost first.
        """
        if self.settings.generator.nnodes == 1:
            return await start_engine(self.settings)
        meeting = Meeting(use_own_address())
        watching = asyncio.ensure_future(self._followers.run(meeting))
        await asyncio.sleep(0)  # the followers start now: this process imports vLLM next
        self._watching = watching
        processes = EngineProcesses()

        def kill(watching: asyncio.Future[str]) -> None:
            if not watching.cancelled():
                processes.kill()

        watching.add_done_callback(kill)
        try:
            engine = await start_engine(self.settings, processes, meeting.node(0))
        except Exception as error:
            lost = watching.result() if watching.done() else None
            await self._stop_followers()
            if lost is None:
                raise
            raise RuntimeError(lost) from error

        def lose(watching: asyncio.Future[str]) -> None:
            if not watching.cancelled():
                engine.lose(watching.result())

        watching.add_done_callback(lose)
        return engine

    async def _stop_followers(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self._followers.stop()

    async def generate(self, request: GenerateRequest) -> Generated:
        """Answer with weights at least as new as the request needs.

        Raises:
            StaleReplicaError: this replica cannot get such weights now, the request names another
                replica, or the request's attempt has ended.
            GenerationTimeoutError: not done by the request's deadline.
        """
        if request.replica is not None:
            self._refuse_unless_exact(request)
        elif not self._has(request.min_weights):
            await self._catch_up_for(request.min_weights)
        started_at = steady_time()
        completions, cached, times = await self._under_way(
            self.engine.requests.answer(request), request.min_weights
        )
        load = self.engine.stats.load(self.replica)
        return Generated(
            completions[: request.n],
            self.replica,
            started_at,
            steady_time(),
            load,
            baseline=completions[request.n] if request.baseline else None,
            cached_tokens=cached[: request.n],
            cache_block=self.engine.cache_block,
            times=times[: request.n],
        )

    async def generate_many(
        self, requests: Mapping[str, GenerateRequest]
    ) -> AsyncIterator[Answers[str, Generated]]:
        """Answer requests by key. Yields each answer as soon as it is done: the completions, or an
        exception. An error that `generate` does not list becomes a RuntimeError."""
        calls: Calls[str, Generated] = Calls()
        self._calls.add(calls)
        try:
            for key, request in requests.items():
                calls.start(key, partial(self._generate, request))
            async for answers in calls.until_all_ended():
                yield answers
        finally:
            self._calls.discard(calls)
            await calls.close()

    async def drop_requests(self, keys: Sequence[str]) -> None:
        """Drop these requests of `generate_many`, whose callers have gone. Ignores the keys of
        another replica's requests."""
        for calls in self._calls:
            calls.cancel(keys)

    async def _generate(self, request: GenerateRequest) -> Generated:
        try:
            return await self.generate(request)
        except (StaleReplicaError, GenerationTimeoutError, InvalidRequestError):
            raise
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise StaleReplicaError(f"replica {self.replica} canceled the request") from None
        except (*DEATHS, ConnectionError, TimeoutError) as error:
            raise StaleReplicaError(f"{type(error).__name__}: {error}") from error
        except Exception as error:
            logger.exception("replica %s could not answer a request", self.replica)
            # The caller's process may not be able to import another class.
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    async def stream(
        self, request: GenerateRequest, details: Details
    ) -> AsyncIterator[StreamPiece]:
        """One completion in pieces, with the weights that are loaded. Raises as
        `EngineRequests.stream` does."""
        async with contextlib.aclosing(self.engine.requests.stream(request, details)) as pieces:
            async for piece in pieces:
                yield piece

    async def stream_turn(
        self, request: GenerateRequest
    ) -> AsyncIterator[Accepted | StreamPiece | Generated]:
        """One completion (`request.n` is 1) in pieces, with weights as for `generate`. The last
        item is what `generate` returns, with the tokens and the text of all pieces and the last
        ones.

        Raises:
            The errors of `generate`, also between two pieces.
        """
        if request.replica is not None:
            self._refuse_unless_exact(request)
        elif not self._has(request.min_weights):
            await self._catch_up_for(request.min_weights)
        accepted = Accepted(self.replica, self.engine.version, steady_time())
        yield accepted
        ids, logprobs, texts = list[int](), list[float](), list[str]()
        pieces_of = self.engine.requests.stream(request, Details())
        async with contextlib.aclosing(pieces_of) as pieces, self._dropped_with(request):
            async for piece in pieces:
                ids += piece.tokens.ids
                # Only a prompt's first token has none.
                logprobs += [one for one in piece.tokens.logprobs if one is not None]
                texts.append(piece.text)
                if piece.finish_reason is None:
                    yield piece
        yield Generated(
            (
                Completion(
                    tuple(ids),
                    tuple(logprobs),
                    piece.versions,
                    piece.finish_reason or "",
                    "".join(texts),
                ),
            ),
            self.replica,
            accepted.at,
            steady_time(),
            self.engine.stats.load(self.replica),
            cached_tokens=(piece.cached_tokens,),
            cache_block=self.engine.cache_block,
        )

    async def logprobs(
        self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], min_weights: WeightsId | None
    ) -> tuple[str, list[tuple[float, ...]]]:
        """This replica's id, and log-probs of each row's second ids, given its first. The weights
        are at least as new as `min_weights`. Raises StaleReplicaError."""
        if not self._has(min_weights):
            await self._catch_up_for(min_weights)
        return self.replica, await self._under_way(self.engine.requests.logprobs(rows), min_weights)

    async def apply_version(self, manifest: Manifest, held: str | None = None) -> ReplicaStatus:
        """Fetch and apply a version, and return `status`.

        Nothing changes if this replica is held, or has this version or a newer one of the same
        attempt. Once an update has started, it continues even if the caller is canceled.

        Args:
            held: id of the replica that an evaluation holds, or None. This replica is released if
                it has another id.

        Raises:
            ManifestError, StagingError: the version cannot be fetched; nothing has changed.
            RuntimeError: the weights are lost; the replica reports itself unhealthy and is
                replaced.
        """
        if held != self.replica:
            self.held = False
        await self._take(manifest)
        return await self.status()

    async def hold(self, replica: str, weights: WeightsId) -> bool:
        """Keep these weights until `release`. Returns False if this is another replica, has other
        weights, or is changing them."""
        if replica != self.replica or self.weights != weights or self._lock.locked():
            return False
        self.held = True
        return True

    async def release(self, replica: str) -> None:
        """End `hold` and take the newest version. Does nothing on another replica."""
        if replica == self.replica and self.held:
            self.held = False
            await self._catch_up()

    def record_routing_stats(self) -> dict[str, object]:
        """What Serve passes to every router (see `VersionRouter`)."""
        weights = self.weights
        return {
            HELD: self.held,
            FULL: self.engine.stats.waiting >= self.settings.max_num_seqs,
            WEIGHTS: (
                None if weights is None else (weights.run_id, weights.attempt, weights.version)
            ),
        }

    async def abandon(self, run_id: str, attempt: int) -> None:
        """Drop an attempt's requests, whose caller has ended, and end its rest."""
        self._give_up(lambda weights: (weights.run_id, weights.attempt) == (run_id, attempt))
        if self.engine.rest.rests:
            await self.apply_shift()

    async def apply_shift(self) -> bool:
        """Rest if the version registry says that it is the learner's shift, and wake if it says
        that it is not. Returns whether the engine rests."""

        async def follow() -> bool:
            # A replica that still takes a version must not hold up the learner's shift.
            if self._taking and await self._ask_registry("learner_shift"):
                return self.engine.rest.rests
            async with self._lock:
                shift = await self._ask_registry("learner_shift")
                if shift is not None:
                    await (self.engine.rest.begin() if shift else self.engine.rest.end())
                return self.engine.rest.rests

        return await self._to_the_end(follow())

    async def _wait_for_device(self) -> None:
        """Wait until the learner has left the GPU, whose memory an engine needs to start. A version
        registry that does not answer, or does not know since its restart, is asked again."""
        while True:
            on_device = await self._ask_registry("learner_on_device", absent=False)
            if on_device is False:
                return
            if on_device is None:
                logger.warning("the version registry does not say who has the GPU; asking again")
            await asyncio.sleep(SHIFT_EVERY_S)

    async def status(self) -> ReplicaStatus:
        """The state of this replica, its weights and its engine."""
        engine = self.engine
        return ReplicaStatus(
            replica=self.replica,
            weights=self.weights,
            held=self.held,
            rests=engine.rest.rests,
            pid=os.getpid(),
            package=os.path.dirname(asyncrl.__file__),
            broken=engine.broken,
            start_times=asdict(engine.load),
            applied=dict(self._applied),
            tokens_at_pause=engine.stats.tokens_at_pause,
            tokens_generated=engine.stats.tokens_generated,
            load=engine.stats.load(self.replica),
            kv_cache_tokens=engine.kv_cache_tokens,
            memory_bytes=resident_bytes(*engine.processes.alive()),
            stop_token_ids=tuple(sorted(engine.requests.stops.tokens)),
            stop_strings=tuple(sorted(engine.requests.stops.strings)),
            tokenizer=engine.requests.tokenizer_hash,
            max_model_len=engine.requests.max_model_len,
            app=self.settings.model_dump(),
            parameters=layout_hash(self._expected),
            base_weights=self._base_weights,
        )

    async def fingerprints(self) -> tuple[str, dict[str, Sequence[float]]]:
        """This replica's id, and the fingerprints of its weights by published name."""
        async with self._lock:
            return self.replica, await self.engine.updates.fingerprints()

    async def stacks(self) -> tuple[str, list[str]]:
        """This replica's id, and the stacks of its engine's processes."""
        return self.replica, await self.engine.processes.stacks()

    async def served_weights(self) -> ServedWeights:
        """Which weights answer now, and which job holds the lease on the application."""
        return ServedWeights(self.weights, await lease_holder(self._registry_name))

    async def pause_empty(self) -> dict[str, float]:
        """Pause and resume without an update, to measure the least that an update costs."""
        async with self._lock:
            return await self.engine.updates.pause_empty()

    async def check_health(self) -> None:
        """Called by Serve, which replaces the replica if this raises."""
        await self.engine.check()
        await self._refuse_to_stay_behind()
        await self._apply_missed_shift()
        if self.held and await asyncio.to_thread(find_registry, self._registry_name) is None:
            self.held = False  # the job that held it has ended without `release`

    async def _refuse_to_stay_behind(self) -> None:
        """Raise RuntimeError when the version registry has had newer weights for `replace_within_s`
        and this replica has made no progress in that time."""
        newest = None if self.held else await self._newest_published()
        adapters = self.settings.max_lora_rank is not None  # loaded without waiting for requests
        drains = self.settings.in_flight == "drain" and not adapters
        limit_s = self.settings.replace_within_s
        progress = (self.weights, self.engine.stats.tokens_generated if drains else 0)
        if newest is None or self._has(newest) or progress != self._behind_at:
            self._behind_at, self._behind_since = progress, steady_time()
        elif steady_time() - self._behind_since > limit_s:
            raise RuntimeError(
                f"replica {self.replica} has stayed at {self.weights} for {limit_s:g} s,"
                f" although {newest} is published; Serve will replace it"
            )

    async def _apply_missed_shift(self) -> None:
        """Follow a shift whose announcement this replica missed, because Serve did not list it yet.
        Does not wait for the engine."""
        shift = await self._ask_registry("learner_shift")
        if shift not in (None, self.engine.rest.rests) and not self._lock.locked():
            following = asyncio.ensure_future(self.apply_shift())
            self._changes.add(following)
            following.add_done_callback(self._followed)

    def _followed(self, following: asyncio.Future[bool]) -> None:
        self._changes.discard(following)
        if not following.cancelled() and (error := following.exception()) is not None:
            logger.warning("replica %s did not follow the shift: %s", self.replica, error)

    async def _newest_published(self) -> WeightsId | None:
        """The version registry's newest weights; None if it has none or does not answer."""
        newest = await self._ask_registry("newest")
        return None if newest is None else WeightsId(*newest)

    async def _ask_registry(self, method: str, absent: Any = None) -> Any:
        """The version registry's answer; None if there is none within REGISTRY_S; `absent` without
        a version registry."""
        registry = await asyncio.to_thread(find_registry, self._registry_name)
        if registry is None:
            return absent
        with contextlib.suppress(*DEATHS, TimeoutError):
            return await asyncio.wait_for(getattr(registry, method).remote(), REGISTRY_S)
        return None

    async def __del__(self) -> None:
        # Serve awaits this once, before the replica's process ends.
        ends = [self._stop_followers()]
        if hasattr(self, "engine"):  # it has started
            ends.append(self.engine.stop())
        await asyncio.gather(*ends)

    def _has(self, wanted: WeightsId | None) -> bool:
        if wanted is None:
            return True
        have = self.weights
        return (
            have is not None
            and (have.run_id, have.attempt) == (wanted.run_id, wanted.attempt)
            and have.version >= wanted.version
        )

    def _refuse_unless_exact(self, request: GenerateRequest) -> None:
        if request.replica != self.replica or request.min_weights != self.weights:
            raise StaleReplicaError(
                f"replica {request.replica} should have answered with {request.min_weights}, but it"
                f" is gone or has other weights (here: {self.weights})"
            )

    async def _under_way(
        self, work: Coroutine[object, None, Answer], weights: WeightsId | None
    ) -> Answer:
        """The result of work that needs these weights. Raises StaleReplicaError if their attempt
        ends first."""
        if weights is None:
            return await work
        task = asyncio.ensure_future(work)
        self._pending[task] = weights
        try:
            await asyncio.wait([task])
        finally:
            del self._pending[task]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if task.cancelled():
            raise StaleReplicaError(
                f"replica {self.replica} dropped the request for {weights}: that attempt has ended"
            )
        return task.result()

    @contextlib.asynccontextmanager
    async def _dropped_with(self, request: GenerateRequest) -> AsyncIterator[None]:
        """Cancel this task if the attempt of the request ends in the meantime."""
        task = asyncio.current_task()
        if task is None or request.min_weights is None:
            yield
            return
        self._pending[task] = request.min_weights
        try:
            yield
        finally:
            del self._pending[task]

    def _give_up(self, ended: Callable[[WeightsId], bool]) -> None:
        for task in [task for task, weights in self._pending.items() if ended(weights)]:
            task.cancel()

    async def _take(self, manifest: Manifest) -> None:
        await self._to_the_end(self._change(manifest))

    async def _to_the_end(self, work: Coroutine[object, None, Answer]) -> Answer:
        """The result of work on the engine that a cancellation must not stop halfway."""
        change = asyncio.ensure_future(work)
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)
        return await asyncio.shield(change)

    async def _change(self, manifest: Manifest) -> None:
        async with self._lock:
            ours = self.weights is not None and (self.weights.run_id, self.weights.attempt) == (
                manifest.run_id,
                manifest.attempt,
            )
            if self.held and ours:
                return
            self.held = False
            self._give_up(
                lambda weights: (
                    (weights.run_id, weights.attempt) != (manifest.run_id, manifest.attempt)
                )
            )
            if not self._has(WeightsId(manifest.run_id, manifest.attempt, manifest.version)):
                self._taking = self.engine.rest.rests
                try:
                    await self._apply(manifest)
                finally:
                    self._taking = False

    async def _apply(self, manifest: Manifest) -> None:
        tokens = self.engine.stats.tokens_generated
        async with self._staged(manifest) as (staged, update, fetch_s):
            during = self.engine.stats.tokens_generated - tokens
            updates, version = self.engine.updates, manifest.version
            timings = (
                await updates.apply(update, version)
                if manifest.adapter is None
                else await updates.apply_adapter(staged, manifest.adapter, version)
            )
        self.weights = WeightsId(manifest.run_id, manifest.attempt, manifest.version)
        self._applied = {
            "fetch_s": fetch_s,
            "tokens_during_fetch": float(during),
            "longest_gap_s": self.engine.stats.take_longest_gap(),
            **timings,
        }

    @contextlib.asynccontextmanager
    async def _staged(self, manifest: Manifest) -> AsyncIterator[tuple[Staged, Update, float]]:
        """A version in the shared memory of every node of the engine, checked there: this node's
        copy, what `EngineUpdates.apply` takes, and the seconds of the slowest node."""
        expected = tensors_of(manifest, self._expected, self.settings.max_lora_rank)
        staged, there = await asyncio.gather(
            asyncio.to_thread(fetch_version, manifest, expected, self.settings.fetch_within_s),
            self._followers.stage(manifest),
            return_exceptions=True,
        )
        try:
            if isinstance(staged, BaseException):
                raise staged
            if isinstance(there, BaseException):
                raise there
            nodes = [staged.update_info(), *(info for info, _ in there)]
            workers = self.settings.generator.workers_per_node
            update = nodes[0] if len(nodes) == 1 else [of for of in nodes for _ in range(workers)]
            yield staged, update, max(staged.fetch_s, *(seconds for _, seconds in there), 0.0)
        finally:
            if not isinstance(staged, BaseException):
                staged.remove()
            await self._followers.unstage()

    async def _catch_up(self) -> None:
        """Apply the version registry's version, if it has one that is newer than this replica's."""
        registry = await asyncio.to_thread(find_registry, self._registry_name)
        try:
            manifest = await registry.current.remote() if registry is not None else None
        except DEATHS:  # the registry's job has just ended
            return
        if manifest is not None:
            await self._take(manifest)

    async def _catch_up_for(self, wanted: WeightsId | None) -> None:
        if self.held:
            raise StaleReplicaError(
                f"replica {self.replica} is held at {self.weights} for an evaluation, and the"
                f" request needs {wanted}"
            )
        if self.engine.rest.asleep:
            raise StaleReplicaError(
                f"replica {self.replica} rests at {self.weights}, and the learner uses its GPU; the"
                f" request needs {wanted}"
            )
        try:
            await self._catch_up()
        except (ManifestError, OSError, RuntimeError) as error:
            raise StaleReplicaError(
                f"replica {self.replica} at {self.weights} cannot apply the version registry's"
                f" version: {type(error).__name__}: {error}"
            ) from error
        if not self._has(wanted):
            raise StaleReplicaError(
                f"replica {self.replica} is at {self.weights}, the request needs {wanted}, and the"
                " version registry has nothing newer"
            )
