"""vLLM's outputs as asyncrl's messages: weight labels become integer versions."""

from __future__ import annotations

from types import SimpleNamespace

from asyncrl.contracts.rows import VersionSpan
from asyncrl.generation.engine.outputs import version_spans


def label(version: str, start: int, end: int) -> SimpleNamespace:
    return SimpleNamespace(version=version, start=start, end=end)


def test_labels_become_versions() -> None:
    assert version_spans([label("3", 0, 55), label("4", 55, 200)], 200) == (
        VersionSpan(3, 0, 55),
        VersionSpan(4, 55, 200),
    )
    assert version_spans([label("default", 0, 5), label("0", 5, 9), label("2", 9, 10)], 10) == (
        VersionSpan(0, 0, 9),
        VersionSpan(2, 9, 10),
    )
    assert version_spans([label("1", 0, 0), label("2", 0, 4)], 4) == (VersionSpan(2, 0, 4),)
    assert version_spans([], 3) == (VersionSpan(0, 0, 3),)
    assert version_spans([], 0) == ()
