"""Ray actors and Serve replicas without Ray: functions of the test are their methods."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FakeMethod:
    """A method of an actor or of a Serve handle."""

    remote: Callable[..., Any]


class FakeActor:
    """An actor with these methods: `actor.name.remote(…)` calls the function of that name."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        for name, method in methods.items():
            setattr(self, name, FakeMethod(method))


@dataclass(frozen=True)
class FakeHandle:
    """A Serve handle that only broadcasts."""

    broadcast: Callable[..., Any]


@dataclass(frozen=True)
class FakeReply:
    """A replica's answer to a broadcast of a Serve handle."""

    get_async: Callable[[], Awaitable[Any]]


def replica_context(app_name: str) -> Any:
    """What Serve tells a replica "a" of an application about itself."""
    from ray.serve._private.common import DeploymentID, ReplicaID
    from ray.serve.context import ReplicaContext

    where: Any = None
    replica = ReplicaID("a", DeploymentID("Generator", app_name))
    return ReplicaContext(replica, where, where, where, world_size=1)
