"""Faults in each shift of `colocate`, faults with `share`, and resumes with another placement.
Prints the recovery time of each."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from audited_runs import audited

import asyncrl
from asyncrl.rewards.scoring import scored_block
from asyncrl.rundir.record import read_record

STEPS_AFTER = 3
"""Steps that a run must take after a fault, with a commit of the last of them."""
START_S = 900
"""Seconds in which a run trains after its start or a fault, also on a busy machine."""

RANK, ENGINE = "ray::RankProcess", "VLLM::EngineCore"
SCORING = f"MapBatches({scored_block.__name__})"

GENERATING = "groups that are being generated"
SCORED = "the rewards of"
GOING_TO_REST = "the replicas to rest"
STEPPING = "a step on"
PUBLISHING = "the replicas to apply version"


class Faults:
    """One run directory, its attempts, and the faults that they meet."""

    def __init__(self, start_run: Callable[..., Any], directory: Path, capsys: Any) -> None:
        self.start_run, self.directory, self.capsys = start_run, directory, capsys
        self.attempts = 0
        self.run: Any = None

    def start(self, placement: str, max_staleness: int = 0) -> None:
        """Start the run, or resume it, and wait until it has trained."""
        self.start_attempt(placement, max_staleness, 100_000)
        began = time.monotonic()
        self.until_it_trains()
        self.row(f"{placement}: started as attempt {self.attempts - 1}", began)

    def start_attempt(self, placement: str, max_staleness: int, max_steps: int) -> None:
        self.run = self.start_run(
            {
                "max_steps": max_steps,
                "placement": placement,
                "staleness.max_staleness": max_staleness,
                # Long enough to stop an engine while it generates.
                "rollout.max_completion_length": 64,
                "rollout.ignore_eos": True,
                "checkpoint.every_steps": 2,
                "observe.stall_s": 2.0,
                "eval": {},
                "resume": "must" if self.attempts else "never",
            }
        )
        self.attempts += 1

    def records(self, event: str) -> list[dict[str, Any]]:
        there = (self.directory / "metrics.jsonl").exists()
        return asyncrl.open_run(self.directory).records(event) if there else []

    def committed(self) -> int:
        """The newest version that the newest attempt has committed, or -1."""
        found = [one for one in self.records("commit") if one["attempt"] == self.attempts - 1]
        return found[-1]["version"] if found else -1

    def until_it_trains(self) -> None:
        def first() -> int:
            there = (self.directory / "run.json").exists()
            attempts = read_record(self.directory)["attempts"] if there else []
            return attempts[-1]["version"] if len(attempts) == self.attempts else 1 << 30

        known = self.committed()
        self.run.until(
            lambda: self.committed() >= (first() if known < 0 else known) + STEPS_AFTER, START_S
        )

    def process(self, name: str) -> psutil.Process:
        """The newest process of this name."""
        return self.run.until(lambda: self.run.having(name))[-1]

    def stopped(self, name: str, waits_for: str) -> psutil.Process:
        """Stop a process in the moment in which the run then waits for this, and return it."""
        while True:
            process, known = self.process(name), len(self.records("stall"))
            process.suspend()
            self.run.until(lambda known=known: len(self.records("stall")) > known)
            if waits_for in self.records("stall")[-1]["waits_for"]:
                return process
            process.resume()
            self.until_it_trains()

    def generating(self) -> psutil.Process:
        """Stop an engine that has requests of the run, and return it."""
        return self.stopped(ENGINE, GENERATING)

    def waits_for(self, what: str) -> None:
        """Wait until a stopped process makes the run wait for this."""
        known = len(self.records("stall"))
        self.run.until(
            lambda: any(what in stall["waits_for"] for stall in self.records("stall")[known:])
        )

    def recover(self, fault: str, began: float, new_attempt: bool = False) -> None:
        self.attempts += new_attempt
        self.until_it_trains()
        self.row(fault, began)

    def interrupt(self, fault: str) -> None:
        """SIGTERM ends the run. A process that the test has stopped must end too."""
        began = time.monotonic()
        self.run.stop(signal.SIGTERM)
        assert self.run.wait(60) == 130, self.run.output
        self.row(f"SIGTERM {fault}", began)
        self.check()

    def check(self) -> None:
        """No process is left, and the books agree."""
        assert self.run.gone() == [] and self.run.left_in_shared_memory() == []
        audited(self.directory)
        assert len(read_record(self.directory)["attempts"]) == self.attempts

    def finish(self, placement: str, max_staleness: int) -> None:
        """Resume for a few last steps, to the end of the run."""
        last = self.records("step")[-1]["version"] + STEPS_AFTER
        self.start_attempt(placement, max_staleness, last)
        began = time.monotonic()
        assert self.run.wait(START_S) == 0, self.run.output
        self.row(f"{placement}: resumed to the end", began)
        self.check()
        assert self.committed() == last

    def row(self, name: str, began: float) -> None:
        with self.capsys.disabled():
            print(f"{name:<60} {time.monotonic() - began:6.1f} s", flush=True)


@pytest.fixture
def faults(
    start_run: Callable[..., Any],
    tmp_path: Path,
    capsys: Any,
) -> Iterator[Faults]:
    yield Faults(start_run, tmp_path / "runs" / "run", capsys)


@pytest.mark.faults
@pytest.mark.timeout(2400)
def test_deaths_in_each_shift(faults: Faults) -> None:
    """A process that is stopped in the intended shift cannot end it, so each fault hits it."""
    faults.start("colocate")

    engine = faults.generating()
    began = time.monotonic()
    engine.kill()
    faults.recover("engine killed in the generators' shift", began)

    rank, engine = faults.stopped(RANK, STEPPING), faults.process(ENGINE)
    began = time.monotonic()
    engine.kill()
    rank.resume()
    faults.recover("engine killed at rest, in the learner's shift", began)
    successor = faults.process(ENGINE)
    assert successor != engine

    scoring, rank = faults.stopped(SCORING, SCORED), faults.process(RANK)
    began = time.monotonic()
    rank.kill()
    scoring.resume()
    faults.recover("rank killed in the generators' shift", began, new_attempt=True)

    rank = faults.stopped(RANK, STEPPING)
    began = time.monotonic()
    rank.kill()
    faults.recover("rank killed in the learner's shift", began, new_attempt=True)
    assert faults.run.having(ENGINE) == [successor], "the engine that rested serves on"

    faults.stopped(RANK, STEPPING)
    faults.interrupt("in the learner's shift")
    faults.finish("decoupled", max_staleness=0)


@pytest.mark.faults
@pytest.mark.timeout(2400)
def test_signals_in_each_shift_and_resumes_between_placements(faults: Faults) -> None:
    faults.start("decoupled")
    faults.interrupt("with decoupled")

    faults.start("colocate")
    faults.generating()
    faults.interrupt("in the generators' shift")

    faults.start("colocate")
    scoring = faults.stopped(SCORING, SCORED)
    faults.process(ENGINE).suspend()
    scoring.resume()
    faults.waits_for(GOING_TO_REST)
    faults.interrupt("while the generators go to rest")

    faults.start("colocate")
    rank = faults.stopped(RANK, STEPPING)
    faults.process(ENGINE).suspend()
    rank.resume()
    faults.waits_for(PUBLISHING)
    faults.interrupt("in a publication to generators at rest")

    faults.finish("decoupled", max_staleness=0)


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_deaths_and_a_signal_with_shared_devices(faults: Faults) -> None:
    faults.start("share", max_staleness=2)

    engine = faults.process(ENGINE)
    began = time.monotonic()
    engine.kill()
    faults.recover("engine killed with share", began)

    rank, engine = faults.process(RANK), faults.process(ENGINE)
    began = time.monotonic()
    rank.kill()
    faults.recover("rank killed with share", began, new_attempt=True)
    assert faults.run.having(ENGINE) == [engine]

    faults.interrupt("with share")
    faults.finish("decoupled", max_staleness=2)
