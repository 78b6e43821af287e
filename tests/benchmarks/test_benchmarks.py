"""Properties of the benchmarks that need no measurement."""

from __future__ import annotations

import importlib
import sys

import pytest


def test_a_group_costs_control_no_more_than_before_and_no_more_among_many() -> None:
    """A gate: twice the figures of 2026-11-27 fail. A group took 787 Python calls among 9
    outstanding ones, 556 among 900, and 134 bytes in the buffer."""
    bench = importlib.import_module("benchmarks.control")
    few, many = (bench.calls_per_group(outstanding, 900) for outstanding in (9, 900))
    assert few < 2 * 787 and many < 2 * 556 and many < 1.5 * few
    assert bench.bytes_per_group(2000) < 2 * 134


def test_the_policies_of_stale_groups_differ_in_what_they_lose() -> None:
    bench = importlib.import_module("benchmarks.stale_policies")
    wait, drop, mask = (bench.measure(policy, 2, 1.0, 40) for policy in ("wait", "drop", "mask"))
    assert wait.lost == mask.lost == wait.masked == drop.masked == 0 and drop.lost > 0.1
    assert 0.1 < mask.masked < 0.4 and mask.step_s < drop.step_s < wait.step_s
    assert mask.by_position[0] < mask.by_position[3] and wait.by_position == (1, 1, 1, 1)


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
            "tokens_per_s": speed if variant in ("packed", "learner") else 1.0,
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
