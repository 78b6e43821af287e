"""Which replicas can answer a request, and which of them has its session's prefix."""

from __future__ import annotations

import hashlib
from typing import TypeAlias
from weakref import WeakValueDictionary

from ray.serve.request_router import RequestRouter, RunningReplica

from asyncrl.contracts.messages import GenerateRequest, WeightsId
from asyncrl.runtime.ray.serve_calls import Handle

HELD, WEIGHTS, FULL = "held", "weights", "full"
"""Keys of a replica's routing stats: whether an evaluation holds it, its weights, and whether as
many completions wait in its engine's queue as the engine runs at once."""

Weights: TypeAlias = tuple[str, int, int]
"""(run, attempt, version)"""

_routers: WeakValueDictionary[str, RequestRouter] = WeakValueDictionary()
"""Application → the router of this process for its replicas, of the newest handle."""


def note_router(application: str, router: RequestRouter) -> None:
    """Note the router of this process for an application's replicas."""
    _routers[application] = router


def session_replica(handle: Handle, request: GenerateRequest) -> str | None:
    """Id of the replica to which this process sends a request of a session. None: the request has
    no session, or no replica is known yet."""
    if request.session is None or (router := _routers.get(handle.app_name)) is None:
        return None
    known = list(router.curr_replicas.values())  # at once: the router is in another thread
    if not known:
        return None
    return of_session(
        able_replicas(known, request), request.session, request.tries
    ).replica_id.unique_id


def able_replicas(
    candidates: list[RunningReplica], request: GenerateRequest | None
) -> list[RunningReplica]:
    """The replicas that can answer the request now, or all if none is known to."""
    free = [replica for replica in candidates if not replica.routing_stats.get(HELD)] or candidates
    if request is None:
        return free
    return [
        replica
        for replica in free
        if not _is_behind(replica.routing_stats.get(WEIGHTS), request.min_weights)
    ] or free


def of_session(able: list[RunningReplica], session: str, tries: int) -> RunningReplica:
    """A session's replica: the first one without a full queue, in the session's own order, which
    stays when other replicas come and go. After each failed try the next one comes first."""
    ordered = sorted(able, key=lambda replica: _weight(session, replica.replica_id.unique_id))
    first = tries % len(ordered)
    ordered = ordered[first:] + ordered[:first]
    return next((one for one in ordered if not one.routing_stats.get(FULL)), ordered[0])


def _weight(session: str, replica: str) -> bytes:
    """Rendezvous hashing: the replica with the least of these digests has the session."""
    return hashlib.blake2b(f"{session} {replica}".encode(), digest_size=8).digest()


def _is_behind(known: Weights | None, wanted: WeightsId | None) -> bool:
    """Whether a replica's weights were older than wanted when it last reported, at most a second
    ago. A replica with unknown weights does not count as behind."""
    if wanted is None or known is None:
        return False
    return (known[0], known[1]) != (wanted.run_id, wanted.attempt) or known[2] < wanted.version
