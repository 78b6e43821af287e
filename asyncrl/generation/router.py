"""The choice of a replica for a request: the replica that it names, or one that no evaluation
holds."""

from __future__ import annotations

import random
from typing import TypeAlias

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from asyncrl.contracts.messages import GenerateRequest, WeightsId

__all__ = ["HELD", "WEIGHTS", "VersionRouter"]

HELD, WEIGHTS = "held", "weights"
"""Keys of a replica's routing stats: whether an evaluation holds it, and its weights."""

Weights: TypeAlias = tuple[str, int, int]
"""(run, attempt, version)"""


class VersionRouter(RequestRouter):
    """Sends a call whose requests name a replica to that replica. Every other call goes to the one
    of two random replicas that has fewer calls. Replicas that are held, or known to be behind the
    version that is needed, are left out.

    Serve's own router with a filter is not enough. It assigns a replica to the oldest waiting
    request, which may not be the request that names it.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replicas from which Serve chooses by load.

        If the named replica is not up, these are all replicas. Each of them would refuse the
        request with an error that explains why.
        """
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
    """The request, if it is one of ours. The requests of one call have the same demands."""
    request = pending.args[0] if pending is not None and pending.args else None
    if isinstance(request, dict):
        request = next(iter(request.values()), None)
    return request if isinstance(request, GenerateRequest) else None


def _named(pending: PendingRequest | None) -> str | None:
    """The replica that the request names, if it names one."""
    request = _request(pending)
    return None if request is None else request.replica


def _is_behind(known: Weights | None, wanted: WeightsId | None) -> bool:
    """Whether a replica's weights were older than wanted when it last reported, at most a second
    ago. A replica with unknown weights does not count as behind."""
    if wanted is None or known is None:
        return False
    return (known[0], known[1]) != (wanted.run_id, wanted.attempt) or known[2] < wanted.version
