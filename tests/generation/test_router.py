"""The choice of a replica for a request, on Serve's types."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from asyncrl.contracts.messages import GenerateRequest, WeightsId
from asyncrl.generation.affinity import session_replica
from asyncrl.generation.router import VersionRouter


def replica(
    name: str,
    held: bool = False,
    stats: bool = True,
    weights: tuple[str, int, int] | None = None,
    full: bool = False,
) -> Any:
    return SimpleNamespace(
        replica_id=SimpleNamespace(unique_id=name),
        routing_stats={"held": held, "weights": weights, "full": full} if stats else {},
    )


def pending(*arguments: Any) -> Any:
    return SimpleNamespace(
        args=list(arguments), routing_context=SimpleNamespace(should_backoff=False)
    )


def chosen(replicas: list[Any], *arguments: Any) -> set[str]:
    """Ids of all replicas that a request can go to."""

    async def draw() -> list[list[Any]]:
        return await VersionRouter.choose_replicas(
            object.__new__(VersionRouter), replicas, pending(*arguments)
        )

    drawn = [asyncio.run(draw()) for _ in range(50)]
    assert all(len(ranks) == 1 and 1 <= len(ranks[0]) <= 2 for ranks in drawn)
    return {replica.replica_id.unique_id for ranks in drawn for replica in ranks[0]}


def request(name: str | None) -> GenerateRequest:
    return GenerateRequest((1,), 1, 4, 1.0, replica=name)


def test_only_requests_that_name_a_held_replica_go_to_it() -> None:
    replicas = [replica("a"), replica("b", held=True), replica("c", stats=False)]
    assert chosen(replicas, request("b")) == {"b"}
    assert chosen(replicas, request(None)) == {"a", "c"}
    assert chosen(replicas, "an HTTP request") == {"a", "c"}
    assert chosen(replicas) == {"a", "c"}


def test_a_request_without_a_suitable_replica_goes_to_any() -> None:
    assert chosen([replica("a", held=True)], request(None)) == {"a"}
    assert chosen([replica("a"), replica("b")], request("gone")) == {"a", "b"}
    assert (
        asyncio.run(
            VersionRouter.choose_replicas(object.__new__(VersionRouter), [replica("a")], None)
        )[0][0].replica_id.unique_id
        == "a"
    )


def test_a_replica_that_is_behind_gets_no_request_for_newer_weights() -> None:
    replicas = [
        replica("a", weights=("r", 1, 4)),
        replica("b", weights=("r", 1, 3)),
        replica("c", weights=("r", 0, 9)),
        replica("d"),
    ]
    newest = GenerateRequest((1,), 1, 4, 1.0, min_weights=WeightsId("r", 1, 4))
    assert chosen(replicas, newest) == {"a", "d"}, "the weights of d are unknown"
    assert chosen(replicas, request(None)) == {"a", "b", "c", "d"}
    assert chosen(replicas[1:3], newest) == {"b", "c"}, "no replica has reported it yet"


def first(replicas: list[Any], session: str, tries: int = 0, version: int = 0) -> str:
    """The replica that a turn of a session goes to, unless Serve finds its queue full. Then it goes
    to one that any request can go to."""
    turn = GenerateRequest(
        (1,), 1, 4, 1.0, session=session, tries=tries, min_weights=WeightsId("r", 1, version)
    )
    ranks = asyncio.run(
        VersionRouter.choose_replicas(object.__new__(VersionRouter), replicas, pending({0: turn}))
    )
    (mine,), others = ranks
    assert 1 <= len(others) <= 2
    return str(mine.replica_id.unique_id)


SESSIONS = [f"1a2b-{ordinal}-0-0" for ordinal in range(400)]


def test_a_session_stays_with_its_replica_when_others_come_and_go() -> None:
    four = [replica(name) for name in "abcd"]
    of = {session: first(four, session) for session in SESSIONS}
    assert all(60 < list(of.values()).count(name) < 140 for name in "abcd"), "they spread evenly"
    for session, mine in of.items():
        assert first(four[::-1], session) == mine
        without_d, with_e = first(four[:3], session), first([*four, replica("e")], session)
        assert without_d == mine or mine == "d"
        assert with_e in (mine, "e")
    assert 40 < sum(first([*four, replica("e")], one) == "e" for one in SESSIONS) < 120


def test_a_session_leaves_a_replica_that_cannot_take_it() -> None:
    for session in SESSIONS[:40]:
        mine = first([replica("a"), replica("b"), replica("c")], session)
        others = [replica(name) for name in "abc" if name != mine]
        for state in ({"held": True}, {"full": True}, {"weights": ("r", 1, 3)}):
            replicas = [*others, replica(mine, **state)]
            assert first(replicas, session, version=4) == first(others, session)
        everywhere = [replica(name, full=True) for name in "abc"]
        assert first(everywhere, session) == mine, "all are full, and this one has its prefix"


def test_each_try_makes_another_replica_the_first() -> None:
    """An engine that has died refuses requests until Serve replaces it."""
    replicas = [replica(name) for name in "abc"]
    for session in SESSIONS[:40]:
        tried = [first(replicas, session, tries) for tries in range(4)]
        assert set(tried[:3]) == {"a", "b", "c"} and tried[3] == tried[0]
    of_a = [session for session in SESSIONS if first(replicas, session) == "a"]
    second = {first(replicas, session, 1) for session in of_a}
    assert second == {"b", "c"}, "the sessions of one replica spread over the others"


def test_a_client_knows_where_its_router_sends_a_session() -> None:
    router: Any = object.__new__(VersionRouter)
    router._deployment_id = SimpleNamespace(app_name="app of this test", name="Generator")
    handle: Any = SimpleNamespace(app_name="app of this test")
    turn = GenerateRequest((1,), 1, 4, 1.0, session="s")
    assert session_replica(handle, turn) is None
    router._replicas = {}
    router.initialize_state()
    assert session_replica(handle, turn) is None, "no replica is up"
    router._replicas = {name: replica(name) for name in "abc"}
    mine = first(list(router._replicas.values()), "s")
    assert session_replica(handle, turn) == mine
    assert session_replica(handle, request(None)) is None
    router._replicas[mine].routing_stats["full"] = True
    assert session_replica(handle, turn) == first(list(router._replicas.values()), "s")
