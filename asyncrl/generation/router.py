"""Which replica a request goes to: the one that it names, or one that no evaluation holds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from asyncrl.contracts.messages import GenerateRequest, WeightsId

__all__ = ["HELD", "WEIGHTS", "VersionRouter"]

HELD, WEIGHTS = "held", "weights"
"""What a replica's routing stats say of it: whether an evaluation holds it, and its weights as
(run, attempt, version), or None."""


class VersionRouter(RequestRouter):
    """A request that names a replica goes there. Every other goes to the less loaded of two
    replicas drawn among those that are not held, and have the version that it asks for as far as is
    known.

    Not Serve's own router with a filter: that hands a replica to the oldest request that waits,
    which may not be the one that names it.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replicas to choose from by load; of those that are up, all of them if the wanted one
        is not; the replica that gets the request then says so."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        name = _named(pending_request)
        if name is not None:
            return [
                [replica for replica in candidate_replicas if replica.replica_id.unique_id == name]
                or candidate_replicas
            ]
        free = [
            replica for replica in candidate_replicas if not replica.routing_stats.get(HELD)
        ] or candidate_replicas
        request = _request(pending_request)
        able = [
            replica
            for replica in free
            if request is None
            or not _is_behind(replica.routing_stats.get(WEIGHTS), request.min_weights)
        ] or free
        return [random.sample(able, min(2, len(able)))]


def _request(pending: PendingRequest | None) -> GenerateRequest | None:
    """The request, if it is one of ours."""
    request = pending.args[0] if pending is not None and pending.args else None
    return request if isinstance(request, GenerateRequest) else None


def _named(pending: PendingRequest | None) -> str | None:
    """The replica that the request names, if it names one."""
    request = _request(pending)
    return None if request is None else request.replica


def _is_behind(known: Sequence[Any] | None, wanted: WeightsId | None) -> bool:
    """Whether a replica had older weights when it spoke last, a second ago at most. What is not
    known is no reason to pass over it."""
    if wanted is None or known is None:
        return False
    return (known[0], known[1]) != (wanted.run_id, wanted.attempt) or known[2] < wanted.version
