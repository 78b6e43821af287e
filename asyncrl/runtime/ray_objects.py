"""Groups in Ray's object store, and the type of an actor's handle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import pyarrow as pa
import ray
import ray.exceptions

from asyncrl.contracts.errors import PartDiedError
from asyncrl.contracts.rows import table_from_ipc

__all__ = ["DEATHS", "Actor", "broken_stream", "groups_at"]

Actor: TypeAlias = Any
"""The handle of a Ray actor. Ray does not type remote methods."""

DEATHS = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.ObjectLostError,
)
"""What a call raises whose process died, with its node or by Ray's memory monitor, or whose answer
went with its node."""


def broken_stream(name: str, error: BaseException) -> RuntimeError:
    """What to raise for a stream that broke: PartDiedError if a process died; an error of the code
    would only come again in a new attempt."""
    return (PartDiedError if isinstance(error, DEATHS) else RuntimeError)(
        f"the {name} stream broke: {type(error).__name__}: {error}"
    )


def groups_at(references: Sequence[Any]) -> list[pa.Table]:
    """One-row tables, in the order given, of groups in Ray's object store: (reference to the IPC
    stream of a table, row) each. Each object is fetched once, however many of its rows are wanted.
    What is a table already stays one."""
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
