"""Records the requests that were in flight when an engine died, to help find the cause. Their
groups are generated again."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from asyncrl.contracts.errors import EscapesDirectoryError
from asyncrl.contracts.messages import GenerateRequest
from asyncrl.runtime.files.opening import append_to

MOST = 256
"""Requests that one process records. An engine that dies repeatedly must not fill the disk."""


class LostRequests:
    """Appends each request that was lost with its engine, and the error, to
    `lost_requests_<attempt>_<process>.jsonl`. A repeated request is recorded once."""

    def __init__(self, directory: Path, attempt: int) -> None:
        """
        Args:
            directory: <run>/kept; created with the first record.
        """
        self._path = directory / f"lost_requests_{attempt}_{os.getpid()}.jsonl"
        self._kept: set[tuple[tuple[int, ...], int | None]] = set()

    def __call__(self, request: GenerateRequest, error: BaseException) -> None:
        """Record a request. A file that cannot be written does not raise: a diagnosis must not end
        a run."""
        key = (tuple(request.prompt_ids), request.seed)
        if key in self._kept or len(self._kept) >= MOST:
            return
        self._kept.add(key)
        # The last line of an error from another process is its cause.
        cause = (str(error).strip().splitlines() or [""])[-1]
        row = {
            "time": time.time(),
            "error": f"{type(error).__name__}: {cause}",
            "prompt_ids": list(request.prompt_ids),
            "n": request.n,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "ignore_eos": request.ignore_eos,
            "repetition": request.repetition,
            "stop": request.stop,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "min_p": request.min_p,
            "baseline": request.baseline,
            "min_version": None if request.min_weights is None else request.min_weights.version,
        }
        try:
            with append_to(self._path) as file:
                file.write(json.dumps(row) + "\n")
        except (OSError, EscapesDirectoryError):
            return
