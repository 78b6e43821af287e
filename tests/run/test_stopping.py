"""Signals to a run, and what it says and records at its end. The attempts are stand-ins."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_config import small_config

from asyncrl import commands
from asyncrl.contracts.errors import PartDiedError, RunStoppedError
from asyncrl.run import across_attempts as attempts, ray_watch
from asyncrl.run.cluster.cluster import RayEndedError
from asyncrl.run.stopping import CAUSES, Stop, handling_signals
from asyncrl.run.supervise import run_job
from asyncrl.rundir.reader import open_run
from asyncrl.rundir.record import read_record

Work = Callable[["StandIn"], Awaitable[None]]


class StandIn:
    """A job whose attempts do `work`. It is its own attempts, and their live state."""

    progress = None

    def __init__(self, tmp_path: Path, work: Work, saves: bool = True, **settings: Any) -> None:
        self.config = small_config(runs_root=str(tmp_path / "runs"), **settings)
        self.work, self.saves, self.stops = work, saves, 0
        self.stopped = asyncio.Event()
        self.live, self.phases = self, dict[str, float]()

    def phase(self, name: str) -> None: ...

    def resumed(self, update: Any) -> StandIn:
        self.config = self.config.model_copy(update=update)
        return self

    def description(self) -> tuple[str, ...]:
        return ()

    def attempt(self, directory: Any, across: Any, writer: Any) -> StandIn:
        return self

    async def run(self, view: Any) -> None:
        view.show = lambda progress: None
        await self.work(self)

    def stop(self) -> bool:
        self.stops += 1
        self.stopped.set()
        return self.saves

    def changes(self, records: Any) -> list[str]:
        return []

    def results(self, directory: Path) -> tuple[str, ...]:
        return ()


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def cluster(config: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(attempts, "ray_cluster", cluster)
    monkeypatch.setattr(ray_watch, "KNOWN_S", 0.3)
    monkeypatch.setattr(ray_watch, "CANCEL_EVERY_S", 0.1)


def ended(job: StandIn) -> tuple[int, str, str]:
    """Run the job. Returns the exit code, and the state and cause that its directory has."""
    job_: Any = job
    code = run_job(job_, ["asyncrl", "train", "c.yaml"])
    status = open_run(job.config.run_directory).status()
    return code, status.state, status.cause


def send(*numbers: signal.Signals, every_s: float = 0.0) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


async def step_then_stop(job: StandIn) -> None:
    send(signal.SIGTERM, signal.SIGTERM)  # `timeout` sends it twice
    await asyncio.wait_for(job.stopped.wait(), 10)
    await asyncio.sleep(0.05)
    raise RunStoppedError


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGINT, "Ctrl-C"),
        (signal.SIGHUP, "SIGHUP, because the terminal was closed"),
    ],
)
def test_a_signal_lets_the_step_finish_and_is_recorded(tmp_path, capfd, number, cause):
    before = signal.getsignal(signal.SIGTERM)

    async def work(job: StandIn) -> None:
        assert open_run(job.config.run_directory).status().state == "running"
        send(number)
        await asyncio.wait_for(job.stopped.wait(), 10)
        raise RunStoppedError

    job = StandIn(tmp_path, work)
    assert ended(job) == (130, "interrupted", cause) and job.stops == 1
    log = (job.config.run_directory / "logs" / "attempt_0" / "driver.log").read_text()
    for text in (capfd.readouterr().err, log):
        assert f"interrupted ({cause}); no checkpoint was written yet; start again with: " in text
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_repeated_sigterm_is_one_request_and_a_second_ctrl_c_does_not_wait(tmp_path, capfd):
    assert ended(StandIn(tmp_path / "first", step_then_stop))[0] == 130

    async def twice(job: StandIn) -> None:
        send(signal.SIGINT)
        await asyncio.wait_for(job.stopped.wait(), 10)
        send(signal.SIGINT)
        await asyncio.sleep(60)

    assert ended(StandIn(tmp_path / "second", twice)) == (130, "interrupted", "Ctrl-C")
    assert "at most 120 s (checkpoint.on_stop_s); a second signal does" in capfd.readouterr().err


def test_a_stop_ends_at_its_time_limit_and_at_once_if_there_is_nothing_to_save(tmp_path):
    async def never(job: StandIn) -> None:
        send(signal.SIGTERM)
        await asyncio.sleep(60)

    late = StandIn(tmp_path / "late", never, checkpoint={"on_stop_s": 0.2})
    assert ended(late)[:2] == (130, "interrupted") and late.stops == 1
    log = late.config.run_directory / "logs" / "attempt_0" / "driver.log"
    assert "took longer than checkpoint.on_stop_s = 0.2 s" in log.read_text()
    assert ended(StandIn(tmp_path / "nothing", never, saves=False))[0] == 130
    unasked = StandIn(tmp_path / "unasked", never, checkpoint={"on_stop_s": 0})
    assert ended(unasked)[0] == 130 and unasked.stops == 0


def test_whatever_fails_while_the_run_stops_it_is_interrupted(tmp_path, capfd):
    """A signal to all processes of a run ends its parts, too. No new attempt starts."""

    async def work(job: StandIn) -> None:
        send(signal.SIGTERM)
        await asyncio.wait_for(job.stopped.wait(), 10)
        raise PartDiedError("learner rank 0 died")

    job = StandIn(tmp_path, work)
    assert ended(job) == (130, "interrupted", "SIGTERM")
    assert "\n  the last step is not saved: learner rank 0 died" in capfd.readouterr().err
    log = (job.config.run_directory / "logs" / "attempt_0" / "driver.log").read_text()
    assert "PartDiedError: learner rank 0 died" in log


def test_the_end_of_ray_is_named_instead_of_what_failed_with_it(tmp_path, monkeypatch, capfd):
    def ends(over: threading.Event) -> RayEndedError:
        time.sleep(0.1)
        return RayEndedError("Ray's processes ended")

    monkeypatch.setattr(ray_watch, "wait_until_ray_ends", ends)

    async def hangs(job: StandIn) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(60)  # a part that closes waits for the cluster, too

    async def fails(job: StandIn) -> None:
        raise PartDiedError("learner rank 0 died")

    for name, work in (("hangs", hangs), ("fails", fails)):
        found = ended(StandIn(tmp_path / name, work))
        assert found == (1, "failed", "Ray's processes ended")
        assert "  no checkpoint was written yet; start again" in capfd.readouterr().err


def test_the_end_of_ray_is_said_before_a_shutdown_that_ends_the_process(tmp_path, monkeypatch):
    """In a child. Ray ends its process without a word if it cannot shut down."""

    @contextlib.contextmanager
    def cluster(config: Any) -> Iterator[None]:
        try:
            yield
        finally:
            os._exit(1)

    async def fails(job: StandIn) -> None:
        raise PartDiedError("learner rank 0 died")

    monkeypatch.setattr(attempts, "ray_cluster", cluster)
    monkeypatch.setattr(
        ray_watch, "wait_until_ray_ends", lambda over: RayEndedError("Ray's processes ended")
    )
    job = StandIn(tmp_path, fails)
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            error = os.open(tmp_path / "printed", os.O_CREAT | os.O_WRONLY)
            sys.stderr = os.fdopen(error, "w")
            ended(job)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert "\nasyncrl: Ray's processes ended\n" in (tmp_path / "printed").read_text()
    status = open_run(job.config.run_directory).status()
    assert (status.state, status.cause) == ("failed", "Ray's processes ended")


def test_the_end_of_ray_while_the_run_closes_is_named(tmp_path, monkeypatch, capfd):
    """The watch cancels what waits for the cluster, which is no interruption by the user."""
    closing = threading.Event()

    @contextlib.asynccontextmanager
    async def slow(self: Any, *arguments: Any) -> AsyncIterator[None]:
        try:
            yield
        finally:
            closing.set()
            await asyncio.sleep(60)

    def ends(over: threading.Event) -> RayEndedError:
        closing.wait(30)
        return RayEndedError("Ray's processes ended")

    async def fails(job: StandIn) -> None:
        raise ValueError("something else")

    monkeypatch.setattr(attempts.AcrossAttempts, "attempt", slow)
    monkeypatch.setattr(ray_watch, "wait_until_ray_ends", ends)
    assert ended(StandIn(tmp_path, fails)) == (1, "failed", "Ray's processes ended")
    assert "\nasyncrl: Ray's processes ended\n" in capfd.readouterr().err


def test_a_call_of_ray_that_blocks_the_event_loop_does_not_hold_the_run(tmp_path, monkeypatch):
    """In a child, because the process ends at once."""

    async def blocks(job: StandIn) -> None:
        await asyncio.to_thread(time.sleep, 60)

    monkeypatch.setattr(ray_watch, "GIVE_UP_S", 0.3)
    monkeypatch.setattr(
        ray_watch, "wait_until_ray_ends", lambda over: RayEndedError("Ray's processes ended")
    )
    job = StandIn(tmp_path, blocks)
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            ended(job)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    status = open_run(job.config.run_directory).status()
    assert (status.state, status.cause) == ("failed", "Ray's processes ended")


def test_other_ends_are_recorded_and_a_killed_run_is_interrupted(tmp_path):
    async def done(job: StandIn) -> None:
        await asyncio.sleep(0)

    async def fails(job: StandIn) -> None:
        raise ValueError("token=verysecret123 is wrong")

    assert ended(StandIn(tmp_path / "done", done)) == (0, "finished", "")
    failed = StandIn(tmp_path / "fails", fails)
    assert ended(failed) == (1, "failed", "ValueError: token=[redacted] is wrong")
    died = iter([PartDiedError("a part died")])

    async def dies_once(job: StandIn) -> None:
        for error in died:
            raise error

    again = StandIn(tmp_path / "again", dies_once)
    assert ended(again) == (0, "finished", "")
    found = read_record(again.config.run_directory)["attempts"]
    assert [attempt["outcome"] for attempt in found] == ["failed", "finished"]
    assert found[0]["command"] == ["asyncrl", "train", "c.yaml"]

    async def killed(job: StandIn) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    gone = StandIn(tmp_path / "killed", killed)
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            ended(gone)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    status = open_run(gone.config.run_directory).status()
    assert (status.state, status.cause) == (
        "interrupted",
        "the driver was killed, or its machine failed",
    )


def test_an_ignored_signal_stays_ignored_and_threads_receive_none():
    seen: list[str] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under `nohup`
    try:
        with handling_signals(seen.append):
            send(signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
        thread = threading.Thread(target=lambda: handling_signals(seen.append).__enter__())
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert seen == ["SIGTERM"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_before_the_run_begins_is_named(tmp_path, monkeypatch, capfd, number):
    def load(path: str, overrides: list[str]) -> None:
        send(number)
        raise AssertionError("the signal was lost")

    monkeypatch.setattr(commands, "load_any", load)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert commands.run("train", "config.yaml", []) == 130
    assert capfd.readouterr().err == (
        f"\nasyncrl: interrupted ({CAUSES[number]}); nothing was started\n"
    )


@pytest.mark.parametrize("place", ["loading", "telling"])
def test_a_signal_that_timeout_sends_twice_is_named_once(tmp_path, monkeypatch, capfd, place):
    """The second one comes while the first is being reported."""

    def load(path: str, overrides: list[str]) -> None:
        try:
            send(signal.SIGTERM)
        finally:
            send(signal.SIGTERM)

    def tell(text: str = "", file: Any = None) -> None:
        send(signal.SIGTERM)
        print(text, file=file, flush=True)

    monkeypatch.setattr(commands, "load_any", load)
    if place == "telling":
        monkeypatch.setattr(commands, "print_shown", tell)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert commands.run("train", "config.yaml", []) == 130
    assert capfd.readouterr().err == "\nasyncrl: interrupted (SIGTERM); nothing was started\n"


def test_a_repeated_sigterm_between_attempts_is_one_request():
    stop = Stop()
    with pytest.raises(KeyboardInterrupt):
        stop.ask("SIGTERM")
    stop.ask("SIGTERM")
    with pytest.raises(KeyboardInterrupt):
        stop.ask("Ctrl-C")
    assert stop.cause == "SIGTERM"
