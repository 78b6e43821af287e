"""The generator application: built the same way for `serve deploy` and for a job that starts its
own."""

# No postponed annotations here: Serve reads the builder's annotation, and validates YAML arguments
# against it only if it is a class.

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ray import serve
from ray.serve import context
from ray.serve.config import ProxyLocation, RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import ApplicationStatus

from asyncrl.contracts.errors import EngineDiedError, GenerationTimeoutError, StaleReplicaError
from asyncrl.contracts.messages import Generated, GenerateRequest, ReplicaStatus, WeightsId
from asyncrl.generation.engine import engine_environment
from asyncrl.generation.replica import Generator
from asyncrl.generation.router import VersionRouter
from asyncrl.generation.settings import GeneratorApp
from asyncrl.runtime.ray_objects import DEATHS
from asyncrl.runtime.serve_calls import ask_all

__all__ = [
    "ServeGenerate",
    "application",
    "begin_generators",
    "build_app",
    "end_generators",
    "forget_controller",
    "start_generators",
    "stop_generators",
    "wait_for_generators",
]

logger = logging.getLogger("asyncrl")

DEPLOYMENT = "Generator"

MAX_ONGOING_REQUESTS = 100_000
"""Requests that one replica accepts: vLLM queues them, and admission bounds them."""

FIRST_RETRY_S, LONGEST_RETRY_S = 0.05, 2.0
"""Seconds between two tries of a request that no replica could take: doubled from the first to the
longest."""

ROUTING_S = 1.0
"""Seconds after which Serve asks a replica again whether it is held. Until then it may still get
requests, and refuses those for newer weights."""

LOGPROBS_DEADLINE_S = 300.0
"""Seconds that scoring the probes may take. A replica that has not answered after half of them is
left out."""

STATUS_S = 5.0
"""Seconds that a replica gets to say where it is: less than the watchdog waits for all of them."""

UNABLE = (StaleReplicaError, *DEATHS, DeploymentUnavailableError)
"""What a replica raises that cannot answer now, and Serve when there is none: ask another, or
later."""
DIED = (EngineDiedError, *DEATHS)
"""Those of a request under which its engine or replica ended."""


def build_app(args: GeneratorApp, replica: type[Generator] | None = None) -> serve.Application:
    """The Serve application of replicas of this class (default: `Generator`). Weights have no HTTP
    route."""
    generator = args.generator
    options: dict[str, Any] = {
        "num_cpus": generator.num_cpus,
        "runtime_env": {"env_vars": engine_environment(generator.device)},
    }
    if generator.device == "cuda":
        options["num_gpus"] = 1
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
        # An event loop on a starved machine answers late: Serve replaces a replica after three
        # checks in a row without an answer.
        health_check_period_s=5,
        health_check_timeout_s=args.stall_timeout_s / 3,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=20,
        max_constructor_retry_count=2,
    )(replica or Generator)
    return deployment.bind(args.model_dump())


def begin_generators(args: GeneratorApp, name: str) -> Any:
    """Ask Serve for the application and return its handle at once; no HTTP port is opened. See
    `wait_for_generators`."""
    serve.start(proxy_location=ProxyLocation.Disabled)
    target = serve.RunTarget(target=build_app(args), name=name, route_prefix=None)
    return serve.run_many([target], wait_for_applications_running=False)[0]


def application(name: str) -> Any:
    """Handle of an application that is already deployed."""
    return serve.get_app_handle(name)


async def wait_for_generators(name: str, timeout_s: float) -> None:
    """Wait until all replicas answer.

    Raises:
        RuntimeError: a replica failed to start, or was not done in time. The message is Serve's.
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
    """The last line of what Serve says: of a traceback, the error."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else "Serve does not say why"


def start_generators(args: GeneratorApp, name: str) -> Any:
    """Start the application, wait until it answers, and return its handle. Raises RuntimeError if
    it does not come up."""
    handle = begin_generators(args, name)
    asyncio.run(wait_for_generators(name, args.start_timeout_s))
    return handle


def stop_generators(name: str) -> None:
    """End the application and its engines; wait for it."""
    asyncio.run(end_generators(name))


async def end_generators(name: str) -> None:
    """End the application and its engines; wait for it. Whoever gives up the wait leaves no thread
    behind that still asks Serve."""
    await asyncio.to_thread(serve.delete, name, _blocking=False)
    while name in (await asyncio.to_thread(serve.status)).applications:  # noqa: ASYNC110
        await asyncio.sleep(0.2)


def forget_controller() -> None:
    """To be called after `ray.shutdown`. Serve would take its controller for that of the next
    cluster this process starts: both count jobs from 1."""
    context._disconnect()


class ServeGenerate:
    """`Generate` over a Serve handle: what a replica cannot answer goes to another, until the
    request's deadline."""

    def __init__(
        self,
        handle: Any,
        lost: Callable[[GenerateRequest, BaseException], None] = lambda request, error: None,
    ) -> None:
        """
        Args:
            lost: called for each request during which an engine or a replica ended. The request is
                still repeated.
        """
        self._handle, self._lost = handle, lost

    async def generate(self, request: GenerateRequest) -> Generated:
        """Raises GenerationTimeoutError when no replica has answered after `request.deadline_s`
        seconds, and StaleReplicaError if the one that the request names cannot answer it any
        more."""

        async def once(left: float) -> Generated:
            response = self._handle.generate.remote(replace(request, deadline_s=left))
            try:
                answer: Generated = await response
                return answer
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if (
                    task is None or not task.cancelling()
                ):  # Serve raises it where a replica that ends cancels its requests
                    raise StaleReplicaError("a replica has cancelled the request") from None
                response.cancel()  # else the engine would go on for nobody
                raise
            except DIED as error:
                self._lost(request, error)
                raise

        try:
            generated: Generated = await self._ask(
                request.deadline_s, once, UNABLE if request.replica is None else ()
            )
        except UNABLE as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            raise StaleReplicaError(
                f"replica {request.replica} cannot answer any more: {why}"
            ) from None
        return generated

    async def logprobs(
        self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], min_weights: WeightsId | None
    ) -> dict[str, list[tuple[float, ...]]]:
        """Of every replica that has the weights and lives; after `LOGPROBS_GRACE_S`, of at least
        half of them. Raises GenerationTimeoutError when none has answered after
        `LOGPROBS_DEADLINE_S`.
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

        answer: dict[str, list[tuple[float, ...]]] = await self._ask(
            LOGPROBS_DEADLINE_S, everywhere
        )
        return answer

    async def statuses(self) -> list[ReplicaStatus]:
        """The status of each replica. A dead or hanging replica gives none."""
        answers = await ask_all(self._handle, "status", timeout_s=STATUS_S)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def stacks(self) -> list[tuple[str, list[str]]]:
        """Replica id and what its engine's processes do just now, of each replica that answers."""
        answers = await ask_all(self._handle, "stacks", timeout_s=STATUS_S)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _ask(
        self,
        deadline_s: float,
        call: Callable[[float], Any],
        retried: tuple[type[BaseException], ...] = UNABLE,
    ) -> Any:
        """The first answer to `call(seconds left)`; what it raises of `retried` makes it try
        again."""
        deadline = time.monotonic() + deadline_s
        pause, reason = FIRST_RETRY_S, ""
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(remaining):
                    return await call(remaining)
            except retried as error:
                reason = f"; last answer: {type(error).__name__}: {error}".splitlines()[0]
            except TimeoutError as error:
                if (
                    time.monotonic() < deadline
                ):  # not ours: Serve does not say which replicas there are
                    reason = f"; last answer: {type(error).__name__}: {error}".splitlines()[0]
            await asyncio.sleep(min(pause, max(deadline - time.monotonic(), 0)))
            pause = min(2 * pause, LONGEST_RETRY_S)
        raise GenerationTimeoutError(f"no replica answered within {deadline_s:g} s{reason}")


LOGPROBS_GRACE_S = 20.0
"""Seconds after which the check of log-probs waits for no single replica: half of them are enough.
"""
