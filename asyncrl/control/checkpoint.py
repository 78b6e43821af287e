"""Checkpoints: a directory that is either committed and checked, or does not count.

checkpoints/step_000120/{learner/…, state.json, MANIFEST, COMMITTED}, checkpoints/LATEST
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncrl.confined import refuse_links

__all__ = ["Checkpoints", "NoCheckpoint", "State", "UnreadableCheckpoint"]


class NoCheckpoint(RuntimeError):
    """There is no committed checkpoint where one is needed."""


class UnreadableCheckpoint(RuntimeError):
    """A committed checkpoint is there and cannot be read. The run never starts from zero instead."""


@dataclass(frozen=True, slots=True)
class State:
    """Control's part of a checkpoint. `version` is the policy version, which counts applied steps."""

    run_id: str
    attempt: int
    version: int
    steps_attempted: int
    frontier: int
    """Lowest ordinal without an outcome."""
    finished_above: tuple[int, ...]
    """Ordinals above the frontier that have one."""
    seed: int = 0
    """Of data order and sampling: with the ordinals, the whole random state of control. The ranks' own is in learner/rank_N.pt."""


class Checkpoints:
    """The checkpoints of one run; the last `keep` stay."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self.keep = keep

    async def write(self, state: State, save_learner: Callable[[Path], Awaitable[None]]) -> Path:
        """Write a checkpoint under a temporary name, mark it committed, rename it, and point LATEST at it."""
        final = self.directory / f"step_{state.version:06d}"
        temporary = self.directory / f".{final.name}.{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "learner").mkdir(parents=True)
        await save_learner(temporary / "learner")
        _write_synced(temporary / "state.json", json.dumps(asdict(state)))
        _write_synced(temporary / "MANIFEST", json.dumps({name: _size_and_checksum(temporary / name) for name in _files(temporary)}, indent=0))
        _write_synced(temporary / "COMMITTED", "")
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        _write_synced(self.directory / ".LATEST", final.name)
        os.replace(self.directory / ".LATEST", self.directory / "LATEST")
        for old in self._committed()[: -self.keep]:
            shutil.rmtree(old)
        return final

    def latest(self) -> tuple[Path, State]:
        """The newest committed checkpoint, every file of it checked against its manifest.

        Raises:
            NoCheckpoint: there is none.
            UnreadableCheckpoint: it does not match its manifest, or its state cannot be read.
        """
        committed = self._committed()
        if not committed:
            raise NoCheckpoint(f"no committed checkpoint in {self.directory}; start with --resume never or auto")
        path = committed[-1]
        try:
            refuse_links(path, whole=True)
            manifest = json.loads((path / "MANIFEST").read_text())
            if unlisted := sorted(set(_files(path)) - set(manifest) - {"MANIFEST", "COMMITTED"}):
                raise UnreadableCheckpoint(f"checkpoint {path} has files that its MANIFEST does not list, first {unlisted[0]}; remove what we did not write")
            for name, expected in manifest.items():
                if _size_and_checksum(path / name) != expected:
                    raise UnreadableCheckpoint(f"checkpoint {path} is damaged: {name} is not what its MANIFEST says; remove the directory to use an older one")
            tree = json.loads((path / "state.json").read_text())
            return path, State(**{**tree, "finished_above": tuple(tree["finished_above"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UnreadableCheckpoint(f"checkpoint {path} cannot be read ({error}); remove the directory to use an older one") from error

    def _committed(self) -> list[Path]:
        return sorted(path.parent for path in self.directory.glob("step_*/COMMITTED"))


def _files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def _size_and_checksum(path: Path) -> list[int]:
    checksum = size = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
            size += len(block)
    return [size, checksum]


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
