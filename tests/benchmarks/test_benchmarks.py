"""Properties of the benchmarks that need no measurement."""

from __future__ import annotations

import importlib
import sys

import pytest


def test_few_rows_are_the_first_of_many() -> None:
    bench = importlib.import_module("benchmarks.learner")
    many, few = (bench.seeded_rows(count, 32) for count in (1000, 512))
    assert (len(many), len(few)) == (1000, 512)
    assert [len(following) for _, following in many[:512]] == [
        len(following) for _, following in few
    ]


@pytest.mark.parametrize(
    ("learner_loss", "speed", "held"),
    [(2.0001, 3.0, True), (2.001, 3.0, False), (float("nan"), 3.0, False), (2.0, 2.0, False)],
)
def test_the_variants_take_turns_and_must_have_one_loss(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    learner_loss: float,
    speed: float,
    held: bool,
) -> None:
    bench = importlib.import_module("benchmarks.learner")
    order: list[str] = []

    def run(variant: str, path: str, threads: int, rows: int) -> dict[str, float]:
        order.append(variant)
        loss = learner_loss if variant == "learner" else 2.0
        return {
            "tokens_per_s": speed if variant == "packed" else 1.0,
            "loss": loss,
            "parameters": 1e6,
        }

    monkeypatch.setattr(bench, "run", run)
    assert bench.compare("tiny", "path", 512) is held
    assert order[-9:] == ["padded", "packed", "learner"] * 3
    assert ("losses differ" in capsys.readouterr().out) == (learner_loss != 2.0001 and speed == 3.0)


def test_without_trl_the_packing_benchmark_says_so_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = importlib.import_module("benchmarks.packing")
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.setitem(sys.modules, "trl.data_utils", None)
    monkeypatch.setattr(bench, "seeded_lengths", lambda *_: pytest.fail("it measured"))
    assert bench.main() == 2
    error = capsys.readouterr().err
    assert "pip install 'asyncrl[bench]'" in error and error.count("\n") == 1
