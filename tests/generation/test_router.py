"""The choice of a replica for a request, on Serve's types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.request_router import PendingRequest

from asyncrl.contracts.messages import GenerateRequest, WeightsId
from asyncrl.generation.affinity import session_replica
from asyncrl.generation.router import VersionRouter

GENERATOR = DeploymentID("Generator", "app of this test")


@dataclass(frozen=True)
class Replica:
    """What the router reads of a replica."""

    replica_id: ReplicaID
    routing_stats: dict[str, Any]


def replica(
    name: str,
    held: bool = False,
    known: bool = True,
    weights: tuple[str, int, int] | None = None,
    full: bool = False,
) -> Replica:
    stats = {"held": held, "weights": weights, "full": full} if known else {}
    return Replica(ReplicaID(name, GENERATOR), stats)


def pending(*arguments: Any) -> PendingRequest:
    metadata: Any = None
    return PendingRequest(list(arguments), {}, metadata)


async def draw(replicas: list[Any], *arguments: Any) -> list[list[Any]]:
    router = object.__new__(VersionRouter)
    return await router.choose_replicas(replicas, pending(*arguments))


async def chosen(replicas: list[Any], *arguments: Any) -> set[str]:
    """Ids of all replicas that a request can go to."""
    drawn = [await draw(replicas, *arguments) for _ in range(50)]
    assert all(len(ranks) == 1 and 1 <= len(ranks[0]) <= 2 for ranks in drawn)
    return {replica.replica_id.unique_id for ranks in drawn for replica in ranks[0]}


def request(name: str | None) -> GenerateRequest:
    return GenerateRequest((1,), 1, 4, 1.0, replica=name)


async def test_only_requests_that_name_a_held_replica_go_to_it() -> None:
    replicas = [replica("a"), replica("b", held=True), replica("c", known=False)]
    assert await chosen(replicas, request("b")) == {"b"}
    assert await chosen(replicas, request(None)) == {"a", "c"}
    assert await chosen(replicas, "an HTTP request") == {"a", "c"}
    assert await chosen(replicas) == {"a", "c"}


async def test_a_request_without_a_suitable_replica_goes_to_any() -> None:
    assert await chosen([replica("a", held=True)], request(None)) == {"a"}
    assert await chosen([replica("a"), replica("b")], request("gone")) == {"a", "b"}
    only: list[Any] = [replica("a")]
    assert await object.__new__(VersionRouter).choose_replicas(only, None) == [only]


async def test_a_replica_that_is_behind_gets_no_request_for_newer_weights() -> None:
    replicas = [
        replica("a", weights=("r", 1, 4)),
        replica("b", weights=("r", 1, 3)),
        replica("c", weights=("r", 0, 9)),
        replica("d"),
    ]
    newest = GenerateRequest((1,), 1, 4, 1.0, min_weights=WeightsId("r", 1, 4))
    assert await chosen(replicas, newest) == {"a", "d"}, "the weights of d are unknown"
    assert await chosen(replicas, request(None)) == {"a", "b", "c", "d"}
    assert await chosen(replicas[1:3], newest) == {"b", "c"}, "no replica has reported it yet"


async def first(replicas: list[Any], session: str, tries: int = 0, version: int = 0) -> str:
    """The replica that a turn of a session goes to, unless Serve finds its queue full. Then it goes
    to one that any request can go to."""
    turn = GenerateRequest(
        (1,), 1, 4, 1.0, session=session, tries=tries, min_weights=WeightsId("r", 1, version)
    )
    (mine,), others = await draw(replicas, {0: turn})
    assert 1 <= len(others) <= 2
    return str(mine.replica_id.unique_id)


SESSIONS = [f"1a2b-{ordinal}-0-0" for ordinal in range(400)]


async def test_a_session_stays_with_its_replica_when_others_come_and_go() -> None:
    four = [replica(name) for name in "abcd"]
    of = {session: await first(four, session) for session in SESSIONS}
    assert all(60 < list(of.values()).count(name) < 140 for name in "abcd"), "they spread evenly"
    for session, mine in of.items():
        assert await first(four[::-1], session) == mine
        without_d = await first(four[:3], session)
        with_e = await first([*four, replica("e")], session)
        assert without_d == mine or mine == "d"
        assert with_e in (mine, "e")
    found = [await first([*four, replica("e")], session) for session in SESSIONS]
    assert 40 < found.count("e") < 120


async def test_a_session_leaves_a_replica_that_cannot_take_it() -> None:
    for session in SESSIONS[:40]:
        mine = await first([replica("a"), replica("b"), replica("c")], session)
        others = [replica(name) for name in "abc" if name != mine]
        for state in ({"held": True}, {"full": True}, {"weights": ("r", 1, 3)}):
            replicas = [*others, replica(mine, **state)]
            assert await first(replicas, session, version=4) == await first(others, session)
        everywhere = [replica(name, full=True) for name in "abc"]
        assert await first(everywhere, session) == mine, "all are full, and this one has its prefix"


async def test_each_try_makes_another_replica_the_first() -> None:
    """An engine that has died refuses requests until Serve replaces it."""
    replicas = [replica(name) for name in "abc"]
    for session in SESSIONS[:40]:
        tried = [await first(replicas, session, tries) for tries in range(4)]
        assert set(tried[:3]) == {"a", "b", "c"} and tried[3] == tried[0]
    of_a = [session for session in SESSIONS if await first(replicas, session) == "a"]
    second = {await first(replicas, session, 1) for session in of_a}
    assert second == {"b", "c"}, "the sessions of one replica spread over the others"


async def test_a_client_knows_where_its_router_sends_a_session() -> None:
    router: Any = object.__new__(VersionRouter)
    handle: Any = GENERATOR  # it has the application's name, too
    router._deployment_id = GENERATOR
    turn = GenerateRequest((1,), 1, 4, 1.0, session="s")
    assert session_replica(handle, turn) is None
    router._replicas = {}
    router.initialize_state()
    assert session_replica(handle, turn) is None, "no replica is up"
    router._replicas = {name: replica(name) for name in "abc"}
    mine = await first(list(router._replicas.values()), "s")
    assert session_replica(handle, turn) == mine
    assert session_replica(handle, request(None)) is None
    router._replicas[mine].routing_stats["full"] = True
    assert session_replica(handle, turn) == await first(list(router._replicas.values()), "s")
