"""Groups in Ray's object store, and the errors of Ray processes that die."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import pyarrow as pa
import ray
import ray.exceptions

from asyncrl.contracts.errors import PartDiedError
from asyncrl.contracts.group_table import table_from_ipc
from asyncrl.contracts.messages import RowRef

Actor: TypeAlias = Any
"""The handle of a Ray actor. Ray does not type remote methods."""

DEATHS = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.RpcError,
)
"""Exceptions of a call whose process or node died, or whose result was lost with a node. Ray's
memory monitor may be the cause. An RpcError is how Ray reports a node whose connections broke
before it knew of the node's death."""


def broken_stream(name: str, error: BaseException) -> RuntimeError:
    """The exception for a broken stream: PartDiedError if a process died, else RuntimeError. A new
    attempt would only repeat an error in the code."""
    return (PartDiedError if isinstance(error, DEATHS) else RuntimeError)(
        f"the {name} stream broke: {type(error).__name__}: {error}"
    )


def groups_at(references: Sequence[RowRef | pa.Table]) -> list[pa.Table]:
    """The one-row tables of groups in Ray's object store, in the given order. Each object is
    fetched only once. Items that are tables already are returned unchanged."""
    wanted = list(
        dict.fromkeys(reference[0] for reference in references if isinstance(reference, tuple))
    )
    tables = {
        reference: table_from_ipc(stream)
        for reference, stream in zip(wanted, ray.get(wanted) if wanted else (), strict=True)
    }
    return [
        tables[reference[0]].slice(reference[1], 1) if isinstance(reference, tuple) else reference
        for reference in references
    ]
