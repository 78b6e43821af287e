"""/metrics in Prometheus' text format: the state of every replica's engine, and counts of HTTP
requests."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asyncrl.api.http import path_of
from asyncrl.contracts.messages import ReplicaStatus

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "asyncrl_generator"

COUNTERS: dict[str, tuple[str, Callable[[ReplicaStatus], float]]] = {
    "tokens_generated": (
        "Completion tokens generated since the replica started, including those of a run. The"
        " tokens of the last 0.1 s before an abort do not count.",
        lambda status: status.tokens_generated,
    ),
    "preemptions": (
        "Completions that lost their KV cache because the cache was full.",
        lambda status: status.load.preemptions,
    ),
    "completions_aborted": (
        "Completions that were aborted, for example because the client disconnected.",
        lambda status: sum(status.load.aborted),
    ),
}
GAUGES: dict[str, tuple[str, Callable[[ReplicaStatus], float]]] = {
    "kv_use": ("Share of the KV cache in use, 0 to 1.", lambda status: status.load.kv_use),
    "kv_cache_tokens": (
        "Capacity of the KV cache, in tokens.",
        lambda status: status.kv_cache_tokens,
    ),
    "waiting": ("Completions in the engine's queue.", lambda status: status.load.waiting),
    "max_model_len": (
        "Longest prompt plus completion, in tokens.",
        lambda status: status.max_model_len,
    ),
}
"""Metric → its description, and how to read it from a replica's status."""
UPDATES = {
    "fetch_s": "Seconds that fetching the last version of the weights took, during generation.",
    "pause_s": "Seconds that the last update of the weights paused generation.",
}
"""Timing of a replica's last update → its description."""


class Traffic:
    """HTTP requests of one replica, by path and status."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.seconds: Counter[str] = Counter()

    def add(self, path: str, status: int, seconds: float) -> None:
        """Count one answer."""
        self.requests[path, status] += 1
        # typeshed only allows integers in a Counter
        self.seconds[path] += seconds  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class HttpStatus:
    """The status and HTTP traffic of one replica."""

    replica: ReplicaStatus
    traffic: Traffic


class TrafficCounter:
    """Middleware that counts answers. All unknown paths share one label, because clients can invent
    any number of them."""

    def __init__(self, app: ASGIApp, traffic: Traffic, paths: Sequence[str]) -> None:
        self.app, self.traffic, self.paths = app, traffic, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.monotonic(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            path = path_of(scope)
            self.traffic.add(
                path if path in self.paths else "other", status, time.monotonic() - started
            )


class _Collector:
    def __init__(self, model: str, statuses: Sequence[HttpStatus]) -> None:
        self.model, self.statuses = model, statuses
        self.replicas = [status.replica for status in statuses]

    def collect(self) -> Iterable[Metric]:
        for name, (text, read) in COUNTERS.items():
            yield self._family(CounterMetricFamily, name, text, read)
        for name, (text, read) in GAUGES.items():
            yield self._family(GaugeMetricFamily, name, text, read)
        yield from self._updates()
        yield from self._weights()
        yield from self._http()

    def _family(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        text: str,
        read: Callable[[ReplicaStatus], float],
    ) -> Metric:
        family = kind(f"{PREFIX}_{name}", text, labels=["replica"])
        for status in self.replicas:
            family.add_metric([status.replica], read(status))
        return family

    def _updates(self) -> Iterable[Metric]:
        for name, text in UPDATES.items():
            family = GaugeMetricFamily(f"{PREFIX}_update_{name}econds", text, labels=["replica"])
            for status in self.replicas:
                if name in status.applied:
                    family.add_metric([status.replica], status.applied[name])
            yield family

    def _weights(self) -> Iterable[Metric]:
        info = InfoMetricFamily(
            f"{PREFIX}_weights",
            "The run and attempt of a replica's weights; empty for the checkpoint's own weights.",
            labels=["replica"],
        )
        version = GaugeMetricFamily(
            f"{PREFIX}_weights_version",
            "Version of the weights in its run and attempt; 0: the checkpoint's own.",
            labels=["replica"],
        )
        for status in self.replicas:
            weights = status.weights
            run = (
                {"run_id": weights.run_id, "attempt": str(weights.attempt)}
                if weights is not None
                else {"run_id": "", "attempt": ""}
            )
            info.add_metric([status.replica], {"model": self.model, **run})
            version.add_metric([status.replica], weights.version if weights is not None else 0)
        return info, version

    def _http(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            f"{PREFIX}_http_requests",
            "HTTP requests. Status 499: the client disconnected first.",
            labels=["replica", "path", "status"],
        )
        seconds = SummaryMetricFamily(
            f"{PREFIX}_http_request_seconds",
            "Seconds from an HTTP request to the end of its answer.",
            labels=["replica", "path"],
        )
        for status in self.statuses:
            replica, traffic = status.replica.replica, status.traffic
            for (path, code), times in sorted(traffic.requests.items()):
                requests.add_metric([replica, path, str(code)], times)
            for path, spent in sorted(traffic.seconds.items()):
                answered = sum(
                    times for (counted, _), times in traffic.requests.items() if counted == path
                )
                seconds.add_metric([replica, path], answered, spent)
        return requests, seconds


def exposition(model: str, statuses: Sequence[HttpStatus]) -> bytes:
    """Format the metrics for Prometheus.

    Args:
        statuses: the status of every replica.
    """
    registry = CollectorRegistry()
    registry.register(_Collector(model, statuses))
    return generate_latest(registry)
