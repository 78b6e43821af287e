"""The choice of a replica for a request: the replica that it names, the one that has its session's
prefix, or one that no evaluation holds.

Serve pickles this module's class with its globals, so state of the process must be elsewhere.
"""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from asyncrl.contracts.messages import GenerateRequest
from asyncrl.generation.affinity import able_replicas, note_router, of_session


class VersionRouter(RequestRouter):
    """Sends a call whose requests name a replica to that replica, and one of a session to the
    session's (`asyncrl.generation.affinity`). Every other call goes to the one of two random
    replicas that has fewer calls. Replicas that are held, or known to be behind the version that is
    needed, are left out.

    Serve's own routers are not enough. One with a filter assigns a replica to the oldest waiting
    request, which may not be the request that names it. `ConsistentHashRouter` sends a retry to the
    replica that has just failed, and knows no versions.
    """

    def initialize_state(self, **kwargs: object) -> None:
        """Called by Serve once the router can be used."""
        note_router(self.app_name, self)

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
        request = _request(pending_request)
        if request is not None and request.replica is not None:
            return [
                [
                    replica
                    for replica in candidate_replicas
                    if replica.replica_id.unique_id == request.replica
                ]
                or candidate_replicas
            ]
        able = able_replicas(candidate_replicas, request)
        two = random.sample(able, min(2, len(able)))
        if request is None or request.session is None:
            return [two]
        return [[of_session(able, request.session, request.tries)], two]


def _request(pending: PendingRequest | None) -> GenerateRequest | None:
    """The request, if it is one of ours. The requests of one call have the same demands."""
    request = pending.args[0] if pending is not None and pending.args else None
    if isinstance(request, dict):
        request = next(iter(request.values()), None)
    return request if isinstance(request, GenerateRequest) else None
