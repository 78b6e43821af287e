"""The Serve application of the generators. `serve deploy` and a job that starts its own generators
build it the same way."""

# No postponed annotations here: Serve reads the builder's annotation, and validates YAML arguments
# against it only if it is a class.

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import ApplicationStatus

from asyncrl.contracts.errors import EngineDiedError, GenerationTimeoutError, StaleReplicaError
from asyncrl.contracts.messages import Generated, GenerateRequest, ReplicaStatus, WeightsId
from asyncrl.contracts.text_listener import Heard
from asyncrl.generation.affinity import session_replica
from asyncrl.generation.engine.arguments import engine_environment
from asyncrl.generation.follower_actors import bundle
from asyncrl.generation.replica import Generator
from asyncrl.generation.router import VersionRouter
from asyncrl.generation.settings import GeneratorApp
from asyncrl.generation.shared_calls import SharedCalls
from asyncrl.generation.shared_serve import start_serve
from asyncrl.generation.streamed import StreamedCompletion
from asyncrl.runtime.all_or_nothing import all_or_nothing
from asyncrl.runtime.ray.objects import DEATHS
from asyncrl.runtime.ray.serve_calls import Handle, ask_all

logger = logging.getLogger("asyncrl")

Answer = TypeVar("Answer")

DEPLOYMENT = "Generator"

MAX_ONGOING_REQUESTS = 100_000
"""Calls that one replica accepts, each with up to MOST_IN_CALL requests. vLLM queues these, and
admission bounds their number."""

FIRST_RETRY_S, LONGEST_RETRY_S = 0.05, 2.0
"""Seconds between two tries of a request that no replica could answer: the first pause, doubled
with each try up to the longest."""

ROUTING_S = 1.0
"""Seconds between Serve's calls of `record_routing_stats`. Until the next call, a replica that has
just been held may still get requests; it refuses those for newer weights."""

LOGPROBS_DEADLINE_S = 300.0
"""Seconds that scoring the probes may take. A replica without an answer after half of this time is
left out."""

LOGPROBS_GRACE_S = 20.0
"""Seconds after which answers from half of the replicas are enough for the log-prob check."""

STATUS_S = 5.0
"""Seconds that a replica gets to report its status: less than the watchdog waits for all."""

UNABLE = (StaleReplicaError, *DEATHS, DeploymentUnavailableError)
"""Errors of a replica that cannot answer now, or of Serve without a replica. The request is tried
again, perhaps on another replica."""
DIED = (EngineDiedError, *DEATHS)
"""Errors of a request whose engine or replica died."""


def build_app(args: GeneratorApp, replica: type[Generator] | None = None) -> serve.Application:
    """The Serve application of replicas of this class (default: `Generator`). No HTTP route takes
    weights."""
    generator = args.generator
    environment = engine_environment(generator.device, generator.num_threads, generator.nnodes)
    options: dict[str, object] = {
        "num_cpus": generator.num_cpus,
        "runtime_env": {"env_vars": environment},
    }
    if generator.device == "cuda":
        options["num_gpus"] = args.num_gpus or generator.workers_per_node
    nodes: dict[str, Any] = {}
    if generator.nnodes > 1:
        # Serve places a replica in the first bundle, and removes all of them with it.
        nodes["placement_group_bundles"] = [bundle(generator)] * generator.nnodes
        nodes["placement_group_strategy"] = "STRICT_SPREAD"
    routing: dict[str, Any] = {
        "request_router_class": VersionRouter,
        "request_routing_stats_period_s": ROUTING_S,
    }
    deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=generator.num_replicas,
        ray_actor_options=options,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        request_router_config=RequestRouterConfig(**routing),
        # An event loop on an overloaded machine answers late. Serve replaces a replica after three
        # consecutive checks without an answer.
        health_check_period_s=5,
        health_check_timeout_s=args.stall_timeout_s / 3,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=20,
        max_constructor_retry_count=2,
        **nodes,
    )(replica or Generator)
    return deployment.bind(args.model_dump())


def begin_generators(args: GeneratorApp, name: str, shared: bool = False) -> Handle:
    """Deploy the application and return its handle without waiting (see `wait_for_generators`). It
    has no HTTP route.

    Args:
        shared: others may use this cluster after the run (see `asyncrl.generation.shared_serve`).
    """
    start_serve(shared)
    target = serve.RunTarget(target=build_app(args), name=name, route_prefix=None)
    return serve.run_many([target], wait_for_applications_running=False)[0]


def application(name: str) -> Handle:
    """Handle of an application that is already deployed."""
    return serve.get_app_handle(name)


async def wait_for_generators(name: str, timeout_s: float) -> None:
    """Wait until all replicas answer.

    Raises:
        RuntimeError: a replica failed to start, or not in time. The message quotes Serve's.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        app = (await asyncio.to_thread(serve.status)).applications.get(name)
        if app is not None and app.status == ApplicationStatus.RUNNING:
            return
        message = (
            " ".join(
                part
                for part in (app.message, *(d.message for d in app.deployments.values()))
                if part
            )
            if app is not None
            else "not known to Serve"
        )
        if app is not None and app.status in (
            ApplicationStatus.DEPLOY_FAILED,
            ApplicationStatus.UNHEALTHY,
        ):
            logger.error("generators %r failed to start: %s", name, message)
            raise RuntimeError(f"generators {name!r} failed to start: {_cause(message)}")
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"generators {name!r} were not up after generator.start_timeout_s = {timeout_s:g}:"
                f" {message}"
            )
        await asyncio.sleep(0.2)


def _cause(message: str) -> str:
    """The last line of Serve's message, which is the error if the message is a traceback."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else "Serve does not say why"


def start_generators(args: GeneratorApp, name: str) -> Handle:
    """Start the application, wait until it answers, and return its handle.

    Raises:
        RuntimeError: a replica failed to start, or not in time.
    """
    handle = begin_generators(args, name)
    asyncio.run(wait_for_generators(name, args.start_timeout_s))
    return handle


def stop_generators(name: str) -> None:
    """End the application and its engines, and wait until they have ended."""
    asyncio.run(end_generators(name))


async def end_generators(name: str) -> None:
    """End the application and its engines, and wait until they have ended. Canceling the wait
    leaves no thread behind that still polls Serve."""
    await asyncio.to_thread(serve.delete, name, _blocking=False)
    while name in (await asyncio.to_thread(serve.status)).applications:  # noqa: ASYNC110
        await asyncio.sleep(0.2)


class ServeGenerate:
    """`Generate` over a Serve handle. A request that a replica cannot answer is retried on others
    until its deadline."""

    def __init__(
        self,
        handle: Handle,
        lost: Callable[[GenerateRequest, BaseException], None] = lambda request, error: None,
    ) -> None:
        """
        Args:
            lost: called for each request during which an engine or a replica died. The request is
                still retried.
        """
        self._handle, self._lost = handle, lost
        self._calls = SharedCalls(handle, lambda request: session_replica(handle, request))

    async def generate(self, request: GenerateRequest, heard: Heard | None = None) -> Generated:
        """Return the request's completions.

        Args:
            heard: called with the index of a completion and its new text, as text comes. A request
                without a baseline is sent as one for each completion. If a replica dies, another
                one continues from the tokens that have come.

        Raises:
            GenerationTimeoutError: no replica answered within `request.deadline_s` seconds.
            StaleReplicaError: the replica that the request names cannot answer it any more.
        """
        if heard is not None:
            return await self._stream(request, heard)

        tries = itertools.count(request.tries)

        async def once(left: float) -> Generated:
            asked = replace(request, deadline_s=left, tries=next(tries))
            try:
                return await self._calls.generate(asked)
            except DIED as error:
                self._lost(request, error)
                raise

        try:
            return await self._ask(
                request.deadline_s, once, UNABLE if request.replica is None else ()
            )
        except UNABLE as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            raise StaleReplicaError(
                f"replica {request.replica} cannot answer any more: {why}"
            ) from None

    async def _stream(self, request: GenerateRequest, heard: Heard) -> Generated:
        """The completions of a request without a baseline. Raises as `generate` does."""

        async def choice(index: int) -> Generated:
            seed = None if request.seed is None else request.seed + index
            streamed = StreamedCompletion(
                self._handle, replace(request, n=1, seed=seed), partial(heard, index)
            )
            tries = itertools.count(request.tries)

            async def once(left: float) -> Generated:
                try:
                    return await streamed.ask(left, next(tries))
                except DIED as error:
                    self._lost(request, error)
                    raise

            retried = (*UNABLE, ConnectionError) if request.replica is None else ()
            return await self._ask(request.deadline_s, once, retried)

        answers = await all_or_nothing(choice(index) for index in range(request.n))
        return replace(
            answers[-1],
            completions=tuple(answer.completions[0] for answer in answers),
            started_at=min(answer.started_at for answer in answers),
            finished_at=max(answer.finished_at for answer in answers),
            cached_tokens=tuple(answer.cached_tokens[0] for answer in answers),
        )

    async def logprobs(
        self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], min_weights: WeightsId | None
    ) -> dict[str, list[tuple[float, ...]]]:
        """Log-probs of each row's second ids, given its first, from every live replica that has the
        weights. After `LOGPROBS_GRACE_S`, answers from half of them are enough.

        Raises:
            GenerationTimeoutError: no replica answered within `LOGPROBS_DEADLINE_S`.
        """

        async def everywhere(left: float) -> dict[str, list[tuple[float, ...]]]:
            answers = await ask_all(
                self._handle,
                "logprobs",
                rows,
                min_weights,
                timeout_s=left / 2,
                grace_s=LOGPROBS_GRACE_S,
            )
            answered = [
                answer for answer in answers if not isinstance(answer, (*UNABLE, TimeoutError))
            ]
            for failed in [answer for answer in answered if isinstance(answer, BaseException)]:
                raise failed
            if not answered:
                raise StaleReplicaError(
                    "; ".join(
                        f"{type(answer).__name__}: {answer}".splitlines()[0] for answer in answers
                    )
                )
            return dict(answered)

        return await self._ask(LOGPROBS_DEADLINE_S, everywhere)

    async def statuses(self) -> list[ReplicaStatus]:
        """The status of each replica that answers."""
        answers = await ask_all(self._handle, "status", timeout_s=STATUS_S)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def stacks(self) -> list[tuple[str, list[str]]]:
        """The id of each replica that answers, with the stacks of its engine's processes."""
        answers = await ask_all(self._handle, "stacks", timeout_s=STATUS_S)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _ask(
        self,
        deadline_s: float,
        call: Callable[[float], Awaitable[Answer]],
        retried: tuple[type[BaseException], ...] = UNABLE,
    ) -> Answer:
        """The first answer to `call(seconds left)`, which is tried again after the errors in
        `retried`."""
        deadline = time.monotonic() + deadline_s
        pause, reason = FIRST_RETRY_S, ""
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(remaining):
                    return await call(remaining)
            except retried as error:
                reason = f"; last answer: {type(error).__name__}: {error}".splitlines()[0]
            except TimeoutError as error:
                if time.monotonic() < deadline:
                    # Not this method's timeout: Serve did not list its replicas in time.
                    reason = f"; last answer: {type(error).__name__}: {error}".splitlines()[0]
            await asyncio.sleep(min(pause, max(deadline - time.monotonic(), 0)))
            pause = min(2 * pause, LONGEST_RETRY_S)
        raise GenerationTimeoutError(f"no replica answered within {deadline_s:g} s{reason}")
