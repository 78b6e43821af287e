"""vLLM's outputs as asyncrl's messages: weight labels become integer versions."""

from __future__ import annotations

from vllm.outputs import WeightVersionSpan as Label

from asyncrl.contracts.rows import VersionSpan
from asyncrl.generation.engine.outputs import version_spans


def test_labels_become_versions() -> None:
    assert version_spans([Label("3", 0, 55), Label("4", 55, 200)], 200) == (
        VersionSpan(3, 0, 55),
        VersionSpan(4, 55, 200),
    )
    assert version_spans(
        [
            Label("default", 0, 5),
            Label("0", 5, 9),
            Label("2", 9, 10),
        ],
        10,
    ) == (
        VersionSpan(0, 0, 9),
        VersionSpan(2, 9, 10),
    )
    assert version_spans([Label("1", 0, 0), Label("2", 0, 4)], 4) == (VersionSpan(2, 0, 4),)
    assert version_spans([], 3) == (VersionSpan(0, 0, 3),)
    assert version_spans([], 0) == ()
