"""Which replica a request goes to: the one that it names, or one that no evaluation holds."""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from asyncrl.generation.protocol import GenerateRequest

__all__ = ["HELD", "VersionRouter"]

HELD = "held"
"""What a replica's routing stats say of it: whether an evaluation holds it."""


class VersionRouter(RequestRouter):
    """A request that names a replica goes there. Every other goes to the less loaded of two replicas drawn among those that are not held.

    Not Serve's own router with a filter: that hands a replica to the oldest request that waits, which may not be the one that names it.
    """

    async def choose_replicas(self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None) -> list[list[RunningReplica]]:
        """The replicas to choose from by load; of those that are up, all of them if the wanted one is not: whoever gets the request then says so."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        name = _named(pending_request)
        if name is not None:
            return [[replica for replica in candidate_replicas if replica.replica_id.unique_id == name] or candidate_replicas]
        free = [replica for replica in candidate_replicas if not replica.routing_stats.get(HELD)] or candidate_replicas
        return [random.sample(free, min(2, len(free)))]


def _named(pending: PendingRequest | None) -> str | None:
    """The replica that the request names, if it is one of ours and names one."""
    request = pending.args[0] if pending is not None and pending.args else None
    return request.replica if isinstance(request, GenerateRequest) else None
