"""Parts of the ready jobs that their runs have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import jobs.start
from jobs.start import start_model

SFT = Path(__file__).parents[2] / "jobs" / "sft" / "sft.yaml"


@dataclass(frozen=True)
class FakeRun:
    """A run that has reached this accuracy."""

    accuracy: float

    def records(self, kind: str) -> list[dict[str, float]]:
        return [{"eval/exact_match": accuracy} for accuracy in (0.0, self.accuracy)]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> dict[str, Sequence[str]]:
    """The arguments of each SFT run by its name. A run of n steps reaches n / 10 %."""
    runs: dict[str, Sequence[str]] = {}

    def finish(command: str, config: Path, run: Path, arguments: Sequence[str]) -> None:
        assert (command, config) == ("sft", SFT)
        runs[run.name] = arguments

    def open_run(run: Path) -> FakeRun:
        return FakeRun(int(run.name.rsplit("-", 1)[1]) / 1000)

    monkeypatch.setattr(jobs.start, "finish", finish)
    monkeypatch.setattr(jobs.start, "open_run", open_run)
    return runs


def test_a_start_model_is_the_first_that_is_accurate_enough(tried, tmp_path):
    found = start_model("start", SFT, tmp_path / "model", tmp_path, seed=3, steps=505)
    assert list(tried) == ["start-3-505", "start-3-525", "start-3-545"]
    assert found.parts[-2:] == ("start-3-545", "hf")
    for name, arguments in tried.items():
        given = dict(zip(arguments[::2], arguments[1::2], strict=True))
        assert given["--max_steps"] == name.rsplit("-", 1)[1] and given["--seed"] == "3"
        assert given["--model.path"] == str(tmp_path / "model")


def test_a_task_that_no_start_model_learns_ends_the_job(tried, tmp_path):
    with pytest.raises(SystemExit, match="start-0-390 solves less than 54%"):
        start_model("start", SFT, tmp_path / "model", tmp_path, seed=0, steps=10)
    assert len(tried) == 20
