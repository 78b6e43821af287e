"""The board: where a replica that started late, was restarted or missed a broadcast finds the newest version."""

from __future__ import annotations

from typing import Any

import ray

from asyncrl.control.protocols import Manifest

__all__ = ["BOARD_NAMESPACE", "VersionBoard", "find_board", "open_board"]

BOARD_NAMESPACE = "asyncrl"


class VersionBoard:
    """Holds the newest manifest of the job. A manifest's buckets belong to the learner; the board only borrows them."""

    def __init__(self) -> None:
        self._manifest: Manifest | None = None

    def announce(self, manifest: Manifest) -> None:
        """From now on this is the current version.

        Raises:
            ValueError: an older version of the same run and attempt.
        """
        before = self._manifest
        if before is not None and (before.run_id, before.attempt) == (manifest.run_id, manifest.attempt) and manifest.version < before.version:
            raise ValueError(f"version {manifest.version} was announced after version {before.version} of the same attempt")
        self._manifest = manifest

    def current(self) -> Manifest | None:
        """The newest manifest, or None before the first."""
        return self._manifest


def open_board(name: str) -> Any:
    """Start the job's board and return its actor handle. It ends with the job.

    Raises:
        ValueError: a board of that name is there already.
    """
    actor = ray.remote(VersionBoard)
    return actor.options(name=name, namespace=BOARD_NAMESPACE, num_cpus=0, max_restarts=0).remote()


def find_board(name: str) -> Any | None:
    """Actor handle of a job's board, or None if there is none."""
    try:
        return ray.get_actor(name, namespace=BOARD_NAMESPACE)
    except ValueError:
        return None
