"""Which resources outlive an attempt. Cluster and generators are stand-ins."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_config import SMALL

from asyncrl.config import Config
from asyncrl.contracts.errors import PartDiedError, PlacementLostError
from asyncrl.contracts.state import State
from asyncrl.learning.driver import LearnerDiedError
from asyncrl.run import across_attempts as attempts, closing
from asyncrl.run.across_attempts import AcrossAttempts

CONFIG = Config.model_validate(SMALL)


class StandIn:
    """Generators that record their calls."""

    def __init__(self, calls: list[str], able: bool = True, hangs: bool = False) -> None:
        self._calls, self._able, self._hangs = calls, able, hangs
        self.attached = CONFIG.generator.model_copy(update={"attach": "the application"})

    async def release(self, run_id: str, attempt: int) -> bool:
        self._calls.append(f"release {run_id} {attempt}")
        return self._able

    async def end(self) -> None:
        self._calls.append("end")
        if self._hangs:
            await asyncio.Event().wait()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list of what was started and ended."""
    noted: list[str] = []

    @contextlib.contextmanager
    def cluster(config: Config) -> Iterator[None]:
        noted.append("cluster")
        yield
        noted.append("no cluster")

    monkeypatch.setattr(attempts, "ray_cluster", cluster)
    return noted


def attempt(
    across: AcrossAttempts,
    generators: Any,
    error: BaseException | None,
    number: int = 0,
    left: int = 1,
    hung: str = "",
) -> BaseException | None:
    """Run an attempt that starts these generators and ends with `error`; return what it raises."""
    state = State("run", number, 0, 0, 0, ())

    async def work() -> None:
        async with across.attempt(CONFIG, state, Path(), lambda: left):
            across.generators = across.generators or generators
            if hung:
                across.failed.append(hung)
            if error is not None:
                raise error

    try:
        asyncio.run(work())
    except BaseException as raised:
        return raised
    return None


def test_a_learner_dies_and_the_next_attempt_attaches_to_the_generators(calls: list[str]) -> None:
    across, died = AcrossAttempts(), LearnerDiedError("rank 0")
    assert across.config(CONFIG) is CONFIG
    assert attempt(across, StandIn(calls), died) is died
    assert calls == ["cluster", "release run 0"]
    assert across.config(CONFIG).generator.attach == "the application"
    assert attempt(across, None, None, 1) is None
    assert calls == ["cluster", "release run 0", "end", "no cluster"]
    across.end()
    assert calls[4:] == [] and across.config(CONFIG) is CONFIG


def test_engines_that_take_turns_on_a_gpu_end_with_the_attempt(calls: list[str]) -> None:
    """Awake, they would hold the memory with which the next attempt's learner starts."""
    across = AcrossAttempts()
    gpu = CONFIG.learner.model_copy(update={"device": "cuda"})
    across.placed = CONFIG.model_copy(update={"placement": "colocate", "learner": gpu})
    assert across.placed.takes_shifts_on_gpus
    assert isinstance(attempt(across, StandIn(calls), LearnerDiedError("rank 0")), PartDiedError)
    assert calls == ["cluster", "end", "no cluster"]


@pytest.mark.parametrize(
    ("error", "left", "able", "hung"),
    [
        pytest.param(None, 1, True, "", id="done"),
        pytest.param(RuntimeError("no death"), 1, True, "", id="an error"),
        pytest.param(asyncio.CancelledError(), 1, True, "", id="interrupted"),
        pytest.param(LearnerDiedError("rank 0"), 0, True, "", id="no attempt left"),
        pytest.param(
            PlacementLostError("no replica has had room"),
            1,
            True,
            "",
            id="the generators' own room is lost",
        ),
        pytest.param(PartDiedError("a stream"), 1, False, "", id="the generators died as well"),
        pytest.param(
            PartDiedError("a stream"),
            1,
            True,
            "scoring",
            id="a station that does not close holds resources",
        ),
    ],
)
def test_any_other_end_ends_the_generators_and_the_cluster(
    calls: list[str], error: BaseException | None, left: int, able: bool, hung: str
) -> None:
    across = AcrossAttempts()
    raised = attempt(across, StandIn(calls, able), error, left=left, hung=hung)
    assert type(raised) is type(error)
    assert (
        calls[0] == "cluster" and calls[-2:] == ["end", "no cluster"] and across.generators is None
    )
    assert attempt(across, StandIn(calls), None, 1) is None
    assert calls.count("cluster") == calls.count("no cluster") == 2, (
        "the next attempt has its own cluster"
    )


def test_generators_kept_for_an_attempt_that_does_not_start_are_ended(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing, "CLOSE_TIMEOUT_S", 0.05)
    across = AcrossAttempts()
    attempt(across, StandIn(calls, hangs=True), LearnerDiedError("rank 0"))
    across.end()
    assert calls == ["cluster", "release run 0", "end", "no cluster"]


@pytest.mark.parametrize("ours", [True, False])
async def test_the_session_of_an_ended_cluster_leaves_its_logs_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ours: bool
) -> None:
    """Ray keeps the folder of each session, and a link to the latest one."""
    session = tmp_path / "ray" / "session_1"
    (session / "logs").mkdir(parents=True)
    (session / "logs" / "large.log").write_text("first\n" + "x" * attempts.LARGEST_LOG + "\nlast\n")
    latest = session.with_name("session_latest")
    latest.symlink_to(session if ours else session.with_name("session_2"))

    @contextlib.contextmanager
    def cluster(config: Config) -> Iterator[Path]:
        yield session / "logs"

    monkeypatch.setattr(attempts, "ray_cluster", cluster)
    across = AcrossAttempts()
    state = State("run", 0, 0, 0, 0, (), 0)

    async with across.attempt(CONFIG, state, tmp_path / "kept", lambda: 0):
        pass
    kept = (tmp_path / "kept" / "ray" / "large.log").read_text()
    assert kept.endswith("last\n") and "first" not in kept
    assert not session.exists() and latest.is_symlink() != ours
