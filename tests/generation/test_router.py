"""The choice of a replica for a request, on Serve's types."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from asyncrl.contracts.messages import GenerateRequest, WeightsId
from asyncrl.generation.router import VersionRouter


def replica(
    name: str, held: bool = False, stats: bool = True, weights: tuple[str, int, int] | None = None
) -> Any:
    return SimpleNamespace(
        replica_id=SimpleNamespace(unique_id=name),
        routing_stats={"held": held, "weights": weights} if stats else {},
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
