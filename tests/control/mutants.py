"""`make mutants`: breaks the control code in one named way at a time. The tests in this folder must
notice each one."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = [
    "tests/control/test_staleness.py",
    "tests/control/test_coordinator.py",
    "tests/control/test_concurrency.py::test_engine_load_during_an_evaluation_does_not_move_the_limit",
    "tests/control/test_coordinator_properties.py",
]
"""Fast files first, because a run ends at the first test that notices the mutant."""


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str


COORDINATOR, BUFFER, STALENESS = (
    "asyncrl/control/coordinator.py",
    "asyncrl/control/buffer.py",
    "asyncrl/control/staleness.py",
)
CONCURRENCY = "asyncrl/control/concurrency.py"
MUTANTS = [
    Mutant("bound off by one", STALENESS, "> self.max_staleness\n", "> self.max_staleness + 1\n"),
    Mutant(
        "pace off by one version",
        STALENESS,
        "< (self.max_staleness + 1 - lag)",
        "< (self.max_staleness + 2 - lag)",
    ),
    Mutant("pace off by one group", STALENESS, "< (self.max_staleness", "<= (self.max_staleness"),
    Mutant("pace ignores the lag", STALENESS, "+ 1 - lag) * self", "+ 1) * self"),
    Mutant(
        "cut off by one",
        STALENESS,
        "if version <= oldest + j",
        "if version < oldest + j",
    ),
    Mutant("cut never waits", STALENESS, 'if self.on_stale != "wait":', "if True:"),
    Mutant(
        "masked tokens count in the staleness",
        STALENESS,
        "if not self.is_stale(one, learner_version))",
        "if True)",
    ),
    Mutant(
        "a group without a fresh token is trained",
        BUFFER,
        "return [self._expiring]",
        "return []",
    ),
    Mutant(
        "slot lost on filter",
        COORDINATOR,
        'self._end(scored.ordinal, "filtered", "zero variance")',
        "pass",
    ),
    Mutant(
        "slot lost on skip",
        COORDINATOR,
        'self._end(scored.ordinal, "skipped", result.reason)',
        "pass",
    ),
    Mutant(
        "a stop saves nothing", COORDINATOR, "last = self.stopping or version", "last = version"
    ),
    Mutant(
        "a stop waits for the next batch",
        COORDINATOR,
        "lambda: self.stopping or self._gather_due()",
        "lambda: self._gather_due()",
    ),
    Mutant(
        "a stop waits for an evaluation",
        COORDINATOR,
        "and (self.stopping or self.evaluation is None)",
        "and self.evaluation is None",
    ),
    Mutant(
        "a stopped run goes on",
        COORDINATOR,
        "            if self.stopping:\n                raise RunStoppedError\n",
        "",
    ),
    Mutant(
        "the learner's shift begins during an evaluation",
        COORDINATOR,
        "and (self.stopping or self.evaluation is None)\n"
        "                and (self.stopping or not self._evaluation_due())\n",
        "",
    ),
    Mutant(
        "the learner's shift begins before the generators rest",
        COORDINATOR,
        '            self.shift = "going to rest"\n        await self._rest_generators()\n',
        '            self.shift = "going to rest"\n',
    ),
    Mutant(
        "a group is admitted in the learner's shift",
        COORDINATOR,
        'if self.shift != "generators":',
        "if False:",
    ),
    Mutant(
        "publishing does not wait for the end of the learner's shift",
        COORDINATOR,
        'return self.shift == "publishing"',
        "return True",
    ),
    Mutant(
        "generators rest on after a skipped step",
        COORDINATOR,
        "if self.in_publication is None:\n            await self._wake_generators()\n        else:",
        "if True:",
    ),
    Mutant(
        "the first log-prob check does not rest the generators",
        COORDINATOR,
        "if self.schedule.colocate:\n            await self._rest_generators()\n        yield",
        "yield",
    ),
    Mutant(
        "the learner stays on the device in the generators' shift",
        COORDINATOR,
        "await self._leave_device()\n        if self.in_publication",
        "if self.in_publication",
    ),
    Mutant(
        "the learner stays on the device after the first log-prob check",
        COORDINATOR,
        "yield\n        await self._leave_device()",
        "yield",
    ),
    Mutant(
        "the learner takes the device before the generators rest",
        COORDINATOR,
        "await self.parts.weights.rest()\n        if self.parts.device is not None:\n",
        "if self.parts.device is not None:\n            await self.parts.device.take_device()\n"
        "        await self.parts.weights.rest()\n        if self.parts.device is not None:\n",
    ),
    Mutant("slot lost on failure", COORDINATOR, "self._fail(ordinal, reason)", "pass"),
    Mutant(
        "slot lost on drop",
        COORDINATOR,
        'self._end(scored.ordinal, "dropped", scored.failure)',
        "pass",
    ),
    Mutant(
        "newest first",
        BUFFER,
        "for version in sorted(self._ready):\n            if missing",
        "for version in sorted(self._ready, reverse=True):\n            if missing",
    ),
    Mutant(
        "asks for the learner's version",
        COORDINATOR,
        "rollouts.rollout(prompt, self.progress.committed)",
        "rollouts.rollout(prompt, self.progress.version)",
    ),
    Mutant(
        "admits at the learner's version",
        COORDINATOR,
        "admit(prompt.ordinal, self.progress.committed)",
        "admit(prompt.ordinal, self.progress.version)",
    ),
    Mutant(
        "admits before the first commit",
        COORDINATOR,
        "progress.committed < self.first_version or ",
        "",
    ),
    Mutant(
        "acknowledges before the buffer has the group",
        COORDINATOR,
        "arrived = await self.parts.scores.next()\n",
        "arrived = await self.parts.scores.next()\n            await"
        " self.parts.rollouts.ack([scored.ordinal for scored in arrived])\n",
    ),
    Mutant(
        "gathers during a publication",
        COORDINATOR,
        "return self.in_publication is None and ",
        "return ",
    ),
    Mutant(
        "a skipped step counts as a version",
        COORDINATOR,
        "if result.applied:\n            progress.version",
        "if True:\n            progress.version",
    ),
    Mutant(
        "a filtered group is trained",
        COORDINATOR,
        "elif self.schedule.filter_zero_variance and",
        "elif False and",
    ),
    Mutant("over-sampling is not used", STALENESS, " + self.over_sampling", ""),
    Mutant(
        "a dropped rollout continues",
        COORDINATOR,
        "            task.cancel()\n        self.books.running(self.buffer.running)",
        "            pass\n        self.books.running(self.buffer.running)",
    ),
    Mutant(
        "nothing is acknowledged",
        COORDINATOR,
        "await self.parts.rollouts.ack([scored.ordinal for scored in arrived])",
        "pass",
    ),
    Mutant(
        "a group that is scored may still fail",
        COORDINATOR,
        "if group is not None and group.scored is None:",
        "if group is not None:",
    ),
    Mutant(
        "the limit on running groups is ignored",
        COORDINATOR,
        "and not limit.may_run(self.buffer.running)",
        "and False",
    ),
    Mutant(
        "one group more than the limit runs",
        CONCURRENCY,
        "return running < int(self.limit)",
        "return running <= int(self.limit)",
    ),
    Mutant(
        "publishes during an evaluation",
        COORDINATOR,
        "return not self.publishing_blocked",
        "return True",
    ),
    Mutant(
        "an evaluation reserves no replica",
        COORDINATOR,
        "else await self.parts.weights.hold(version)",
        "else None",
    ),
    Mutant(
        "the last evaluation reserves a replica",
        COORDINATOR,
        "if in_flight or last or",
        "if in_flight or",
    ),
    Mutant(
        "publishing waits although a replica is held",
        COORDINATOR,
        "blocks_publishing=replica is None and not in_flight",
        "blocks_publishing=not in_flight",
    ),
    Mutant(
        "publishing waits for an evaluation in flight",
        COORDINATOR,
        "blocks_publishing=replica is None and not in_flight",
        "blocks_publishing=replica is None",
    ),
    Mutant(
        "the replica of an evaluation is never released",
        COORDINATOR,
        "await self.parts.weights.release(replica)",
        "pass",
    ),
    Mutant(
        "a running evaluation is not due",
        COORDINATOR,
        "                self.evaluation = UnderEvaluation(version)\n",
        "                self.evaluation = UnderEvaluation(version)\n               "
        " self.evaluations_due = set()\n",
    ),
    Mutant(
        "a lost evaluation is not repeated",
        COORDINATOR,
        "if due > version or lost",
        "if due > version",
    ),
    Mutant(
        "a lost evaluation reserves a replica again",
        COORDINATOR,
        "or last or self.evaluation_lost",
        "or last",
    ),
    Mutant(
        "an evaluation's load moves the limit on groups",
        COORDINATOR,
        "and not self._shared(finished.load.replica)",
        "and True",
    ),
    Mutant(
        "a second copy is scored again",
        COORDINATOR,
        "if scored.ordinal not in self.buffer:\n            return",
        "if False:\n            return",
    ),
    Mutant(
        "a second copy changes a scored group",
        BUFFER,
        "if group is not None and group.scored is None:",
        "if group is not None:",
    ),
    Mutant(
        "a scored group stays where it was filed",
        BUFFER,
        "self._unfile(group)\n        group.running",
        "group.running",
    ),
    Mutant(
        "a checkpoint counts on unwritten outcomes",
        COORDINATOR,
        "self._flush_outcomes()\n        await self.parts.recorder.flushed()\n        await",
        "await self.parts.recorder.flushed()\n        await",
    ),
    Mutant(
        "running groups are not dropped",
        BUFFER,
        "return [self._ready, self._unready]",
        "return [self._ready]",
    ),
]


def survives(mutant: Mutant, folder: Path) -> bool:
    """Apply the mutant to a copy of the project, and return whether the tests pass there."""
    for name in ("asyncrl", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    file = folder / mutant.file
    text = file.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(
            f"mutant {mutant.name!r}: {mutant.old!r} occurs {text.count(mutant.old)} times in"
            f" {mutant.file}; it must occur once"
        )
    file.write_text(text.replace(mutant.old, mutant.new))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-m",
        "",
        "--hypothesis-profile=mutants",
        "--timeout=120",
        "-p",
        "no:cacheprovider",
        *TESTS,
    ]
    code = subprocess.run(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ).returncode
    if code not in (0, 1):
        raise SystemExit(f"mutant {mutant.name!r}: pytest did not run the tests (exit code {code})")
    return code == 0


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="asyncrl_mutant_") as folder:
        if not survives(
            Mutant("nothing", STALENESS, '"""The staleness rule', '"""The staleness rule'),
            Path(folder),
        ):
            raise SystemExit("the tests fail without a mutant; repair them first")
    survivors = []
    for mutant in MUTANTS:
        with tempfile.TemporaryDirectory(prefix="asyncrl_mutant_") as folder:
            alive = survives(mutant, Path(folder))
        print(f"{'SURVIVED' if alive else 'killed':<9} {mutant.name}", flush=True)
        survivors += [mutant.name] * alive
    print(f"{len(MUTANTS) - len(survivors)} of {len(MUTANTS)} killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
