"""/metrics in Prometheus' text form: what every replica's engine does, and what was asked over
HTTP."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from asyncrl.contracts.messages import ReplicaStatus

__all__ = ["CONTENT_TYPE", "Counted", "HttpStatus", "Traffic", "exposition"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "asyncrl_generator"

COUNTERS: dict[str, tuple[str, Callable[[ReplicaStatus], float]]] = {
    "tokens_generated": (
        "Completion tokens made since the replica's start, a run's included.",
        lambda status: status.tokens_generated,
    ),
    "preemptions": (
        "Completions that lost their KV cache because it was full.",
        lambda status: status.load.preemptions,
    ),
    "completions_aborted": (
        "Completions that were given up under way, such as those of clients that left.",
        lambda status: sum(status.load.aborted),
    ),
}
GAUGES: dict[str, tuple[str, Callable[[ReplicaStatus], float]]] = {
    "kv_use": ("Share of the KV cache in use, 0 to 1.", lambda status: status.load.kv_use),
    "kv_cache_tokens": (
        "Tokens that the KV cache holds.",
        lambda status: status.kv_cache_tokens,
    ),
    "waiting": ("Completions in the engine's queue.", lambda status: status.load.waiting),
    "max_model_len": (
        "Longest prompt plus completion, in tokens.",
        lambda status: status.max_model_len,
    ),
}
"""Metric → what it means, and where a replica's status has it."""
UPDATES = {
    "fetch_s": (
        "Seconds in which the last version of the weights was fetched, while generation went on."
    ),
    "pause_s": "Seconds for which the last update of the weights stopped generation.",
}
"""Timing of a replica's last update → what it means."""


class Traffic:
    """HTTP requests of one replica, by path and status."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.seconds: Counter[str] = Counter()

    def add(self, path: str, status: int, seconds: float) -> None:
        """Count one answer."""
        self.requests[path, status] += 1
        # typeshed's counters count whole things
        self.seconds[path] += seconds  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class HttpStatus:
    """One replica with an HTTP endpoint."""

    replica: ReplicaStatus
    traffic: Traffic


class Counted:
    """In front of the routes: counts what they answer. Other paths are one: clients may make up any
    number of them."""

    def __init__(
        self, app: Callable[..., Awaitable[None]], traffic: Traffic, paths: Sequence[str]
    ) -> None:
        self.app, self.traffic, self.paths = app, traffic, paths

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status = time.monotonic(), 0

        async def watched(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            path = scope["path"].removeprefix(
                scope.get("root_path", "")
            )  # of the application, where Serve has it below others
            self.traffic.add(
                path if path in self.paths else "other", status, time.monotonic() - begun
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
        self, kind: type[Any], name: str, text: str, read: Callable[[ReplicaStatus], float]
    ) -> Metric:
        family: Metric = kind(f"{PREFIX}_{name}", text, labels=["replica"])
        for status in self.replicas:
            family.add_metric([status.replica], read(status))  # type: ignore[attr-defined]
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
            "Whose weights a replica holds. Without a run they are the checkpoint's own.",
            labels=["replica"],
        )
        version = GaugeMetricFamily(
            f"{PREFIX}_weights_version",
            "Version of the weights in its run and attempt; 0: the checkpoint's own.",
            labels=["replica"],
        )
        for status in self.replicas:
            held = status.weights
            run = (
                {"run_id": held.run_id, "attempt": str(held.attempt)}
                if held is not None
                else {"run_id": "", "attempt": ""}
            )
            info.add_metric([status.replica], {"model": self.model, **run})
            version.add_metric([status.replica], held.version if held is not None else 0)
        return info, version

    def _http(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            f"{PREFIX}_http_requests",
            "HTTP requests. Status 499: the client left first.",
            labels=["replica", "path", "status"],
        )
        seconds = SummaryMetricFamily(
            f"{PREFIX}_http_request_seconds",
            "Seconds from a request to the end of its answer.",
            labels=["replica", "path"],
        )
        for status in self.statuses:
            replica, traffic = status.replica.replica, status.traffic
            for (path, code), times in sorted(traffic.requests.items()):
                requests.add_metric([replica, path, str(code)], times)
            for path, spent in sorted(traffic.seconds.items()):
                answered = sum(times for (one, _), times in traffic.requests.items() if one == path)
                seconds.add_metric([replica, path], answered, spent)
        return requests, seconds


def exposition(model: str, statuses: Sequence[HttpStatus]) -> bytes:
    """The text for Prometheus.

    Args:
        statuses: of every replica.
    """
    registry = CollectorRegistry()
    registry.register(_Collector(model, statuses))
    return generate_latest(registry)
