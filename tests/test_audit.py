"""The audit passes on runs that were killed and resumed, and fails for each way in which the books can be wrong."""

import asyncio
import contextlib
import json
import random
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import asyncrl
from asyncrl.audit import audit, audit_text
from asyncrl.cli import main
from asyncrl.config import Config
from asyncrl.control.coordinator import Coordinator, Parts, Schedule
from asyncrl.control.fates import FatesWriter
from asyncrl.control.staleness import Staleness
from asyncrl.directory import RunDirectory
from asyncrl.testing import FakeLearner, FakePrompts, FakeRecorder, FakeRollouts, FakeScores, FakeWeightSync, VirtualTimeLoop
from asyncrl.types import Completion, Group, Prompt, Trajectory, VersionSpan, groups_to_table

GROUPS, SAMPLES, MAX_STALENESS = 4, 2, 2
LENGTHS = [3, 5, 8, 9, 20]


def config(root, steps, **changes):
    tree = {
        "name": "run",
        "runs_root": str(root),
        "max_steps": steps,
        "model": {"path": "model"},
        "data": {"train": "train.parquet", "max_prompt_length": 20},
        "rollout": {"max_completion_length": 32, "rollout_batch_size": GROUPS, "n_samples_per_prompt": SAMPLES},
        "reward": {"functions": {"exact": {"function": "package.module:function"}}},
        "staleness": {"max_staleness": MAX_STALENESS},
    }
    return Config.model_validate(tree | changes)


def tokens(ordinal):
    return LENGTHS[ordinal * 7 % len(LENGTHS)]


class Files(FakeScores):
    """Writes each scored group's row, as the scoring stage does."""

    def __init__(self, rollouts, directory, attempt):
        super().__init__(rollouts)
        self.directory, self.attempt = directory, attempt
        directory.mkdir(exist_ok=True)

    async def next(self):
        arrived = await super().next()
        now = asyncio.get_running_loop().time() + 1e6 * self.attempt
        for scored in arrived:
            length = tokens(scored.ordinal)
            completion = Completion((7,) * length, (-0.5,) * length, (VersionSpan(scored.begun, 0, length),), "stop")
            trajectories = (Trajectory(completion, (1,) * length, 1.0, {"exact": 1.0}, 0.5), Trajectory(completion, (1,) * length, 0.0, {"exact": 0.0}, -0.5))
            group = Group(self.attempt, Prompt(scored.ordinal, 0, "p", (1,)), trajectories, f"replica-{self.attempt}", now - 5, now, scored_at=now)
            pq.write_table(groups_to_table([group]), self.directory / f"attempt_{self.attempt:04d}-{scored.ordinal:08d}.parquet")
        return arrived


class Recorder(FakeRecorder):
    def __init__(self, directory, attempt):
        super().__init__()
        self.writer = FatesWriter(directory, attempt)

    def fates(self, fates, outstanding):
        super().fates(fates, outstanding)
        self.writer.write(fates, outstanding)


class Learner(FakeLearner):
    """Counts the tokens that it trains, as the real one does."""

    trained_tokens = 0

    async def step(self, batch):
        result = await super().step(batch)
        self.trained_tokens += sum(scored.tokens for scored in batch) if result.applied else 0
        return result

    async def save(self, directory):
        await super().save(directory)
        (directory / "counters.json").write_text(json.dumps({"trained_tokens": self.trained_tokens}))


async def at_once(function, *arguments):
    """In place of `asyncio.to_thread`: a virtual clock does not see threads."""
    return function(*arguments)


@pytest.fixture
def no_threads(monkeypatch):
    monkeypatch.setattr(asyncio, "to_thread", at_once)


def attempt(root, steps, after, graceful=True, **changes):
    """One attempt of the run, ended after so many virtual seconds (None: not at all)."""
    with RunDirectory(config(root, steps, resume="auto", **changes)) as directory:
        state = directory.state
        rollouts = FakeRollouts(
            latency=lambda ordinal: 0.1 * tokens(ordinal), fails=lambda ordinal: "broken" if ordinal % 11 == 3 else None, tokens=lambda o: SAMPLES * tokens(o)
        )
        scores = Files(rollouts, directory.path / "groups", state.attempt)
        learner = Learner(GROUPS, latency=0.3, version=state.version, skips=lambda step: step % 5 == 4)
        recorder = Recorder(directory.path / "fates", state.attempt)
        restored = []
        if directory.checkpoint is not None:
            learner.trained_tokens = json.loads((directory.checkpoint / "learner" / "counters.json").read_text())["trained_tokens"]
            restored = asyncio.run(scores.load(directory.checkpoint / "buffer.parquet")) if state.waiting else []
        prompts = FakePrompts(state.frontier, [*state.finished_above, *(ordinal for _, ordinal in state.waiting)])
        parts = Parts(prompts, rollouts, scores, learner, FakeWeightSync(), recorder, directory.checkpoints)
        bound = changes.get("staleness", {}).get("max_staleness", MAX_STALENESS)
        schedule = Schedule(steps, Staleness(bound, GROUPS), checkpoint_every=3)
        coordinator = Coordinator(parts, schedule, state, restored)

        async def bounded():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(after):
                    await coordinator.run()
            return coordinator.progress.version

        async def killed():
            task = asyncio.ensure_future(coordinator.run())
            await asyncio.wait([task], timeout=after)
            recorder.fates = lambda *_: None  # a process that was killed writes nothing more
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return coordinator.progress.version

        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            return runner.run(bounded() if graceful else killed())


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run of 24 steps that was interrupted twice and killed three times."""
    root = tmp_path_factory.mktemp("audited")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "to_thread", at_once)
        for after, graceful in ((4.0, True), (6.5, False), (2.0, False), (5.0, True), (5.1, False)):
            assert attempt(root, 24, after, graceful) < 24
        assert attempt(root, 24, None) == 24
    return root / "run"


@pytest.fixture
def run(whole_run, tmp_path):
    """A copy of it, to be spoilt."""
    shutil.copytree(whole_run, tmp_path / "run")
    config_file = tmp_path / "run" / "config.yaml"
    config_file.write_text(config_file.read_text().replace(str(whole_run.parent), str(tmp_path)))
    return tmp_path / "run"


def said(directory):
    return {check.name: check for check in audit(asyncrl.open_run(directory))}


def test_a_run_that_was_killed_and_resumed_passes(run, capsys):
    checks = said(run)
    assert all(check.passed for check in checks.values()), audit_text(list(checks.values()))
    accounted = checks["every admitted group is accounted for"].said
    assert "96 trained" in accounted and "abandoned by a restart" in accounted
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run)])
    assert ended.value.code == 0 and capsys.readouterr().out.count("pass  ") == 10


def test_a_run_that_lies_elsewhere_now_has_its_checkpoints_with_it(whole_run, tmp_path):
    """Its config still names the old place, as that of a run under another ASYNCRL_RUNS does."""
    shutil.copytree(whole_run, tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved" / "checkpoints")
    assert said(tmp_path / "moved")["trained tokens equal the learner's count"].said == "no checkpoint yet"
    shutil.copytree(whole_run / "checkpoints", tmp_path / "moved" / "checkpoints")
    assert "no checkpoint" not in said(tmp_path / "moved")["trained tokens equal the learner's count"].said


def test_a_run_just_killed_passes_as_well(tmp_path, no_threads):
    attempt(tmp_path, 30, 6.5, graceful=False)
    assert all(check.passed for check in said(tmp_path / "run").values())
    assert "waiting" in said(tmp_path / "run")["every admitted group is accounted for"].said


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_moments(tmp_path, no_threads, seed):
    random_ = random.Random(seed)
    for _ in range(6):
        if attempt(tmp_path, 15, random_.uniform(0, 5), random_.random() < 0.3) == 15:
            break
        checks = said(tmp_path / "run").values()
        assert all(check.passed for check in checks), audit_text(list(checks))
    assert attempt(tmp_path, 15, None) == 15
    checks = said(tmp_path / "run").values()
    assert all(check.passed for check in checks), audit_text(list(checks))


def change(directory, which, edit):
    """Rewrite the rows of one kind of file; `edit(rows)` gives the new ones."""
    for path in sorted((directory / which).glob("*.parquet")):
        table = pq.read_table(path)
        rows = table.to_pylist()
        new = edit(rows)
        pq.write_table(pa.Table.from_pylist(new, table.schema), path)


def surviving_trained(directory):
    from asyncrl.audit import Books

    return [fate for fate, _ in Books(asyncrl.open_run(directory)).trained()]


def test_a_fate_that_vanished(run):
    fate = surviving_trained(run)[5]
    change(run, "fates", lambda rows: [row for row in rows if row["ordinal"] != fate["ordinal"]])
    checks = said(run)
    assert not checks["no gap below the frontier"].passed
    assert not checks["trained tokens equal the learner's count"].passed


def test_a_group_lost_without_a_trace(run):
    lost = next(fate for fate in surviving_trained(run) if fate["attempt"] == 0)
    for which in ("fates", "groups"):
        change(run, which, lambda rows: [row for row in rows if row["ordinal"] != lost["ordinal"]])
    check = said(run)["every admitted group is accounted for"]
    assert not check.passed and f"without any trace: (0, {lost['ordinal']})" in check.said


def test_an_ordinal_trained_twice(run):
    last = len(json.loads((run / "run.json").read_text())["attempts"]) - 1
    one = next(fate for fate in surviving_trained(run) if fate["attempt"] < last)
    again = {**one, "attempt": last, "ended_in": last}
    change(run, "fates", lambda rows: [*rows, again] if any(row["ended_in"] == last for row in rows) else rows)
    checks = said(run)
    assert not checks["each ordinal has one outcome"].passed and not checks["trained ordinals are distinct"].passed


def test_an_ordinal_with_two_outcomes_in_one_attempt(run):
    one = surviving_trained(run)[-1]
    other = {**one, "trained_at_version": one["trained_at_version"] + 1}
    change(run, "fates", lambda rows: [row for old in rows for row in ([old, other] if old == one else [old])])
    checks = said(run)
    assert not checks["each ordinal has one outcome"].passed and not checks["trained ordinals are distinct"].passed


def test_a_group_that_was_scored_and_forgotten(run):
    """It has its row, and nothing says what became of it."""
    last = len(json.loads((run / "run.json").read_text())["attempts"]) - 1
    one = next(fate for fate in surviving_trained(run) if fate["attempt"] == fate["ended_in"] == last)
    change(run, "fates", lambda rows: [row for row in rows if row != one])
    check = said(run)["every admitted group is accounted for"]
    assert not check.passed and f"nobody counts as under way, and without an outcome: ({last}, {one['ordinal']})" in check.said


def test_a_trajectory_beyond_the_bound(run):
    fate = surviving_trained(run)[-1]
    change(run, "fates", lambda rows: [{**row, "trained_at_version": row["trained_at_version"] + 9} if row == fate else row for row in rows])
    check = said(run)["staleness stays within the bound"]
    assert not check.passed and f"beyond it: {fate['ordinal']}" in check.said and "another than its fate says" in check.said


def test_a_trajectory_that_is_missing_from_its_group(run):
    fate = surviving_trained(run)[3]
    lists = ("completion_ids", "completion_text", "loss_mask", "logprobs", "versions", "finish_reason", "reward", "advantage", "status", "reward_parts")

    def cut(rows):
        return [{**row, **{name: row[name][:1] for name in lists}} if row["ordinal"] == fate["ordinal"] else row for row in rows]

    change(run, "groups", cut)
    checks = said(run)
    assert not checks["trained groups are whole"].passed and not checks["trained tokens equal the learner's count"].passed


def test_a_token_without_its_version(run):
    fate = surviving_trained(run)[3]

    def cut(rows):
        return [{**row, "versions": [[{**span, "end": span["end"] - 1} for span in spans] for spans in row["versions"]]} for row in rows]

    change(run, "groups", lambda rows: cut(rows) if rows[0]["ordinal"] == fate["ordinal"] else rows)
    assert not said(run)["trained groups are whole"].passed


def test_a_row_that_vanished(run):
    fate = surviving_trained(run)[3]
    change(run, "groups", lambda rows: [row for row in rows if row["ordinal"] != fate["ordinal"]])
    assert "without a row" in said(run)["trained groups are whole"].said


def test_a_learner_that_counted_otherwise(run):
    path = max((run / "checkpoints").glob("step_*")) / "learner" / "counters.json"
    path.write_text(json.dumps({"trained_tokens": 1}))
    manifest = path.parent.parent / "MANIFEST"
    from asyncrl.control.checkpoint import _checksum_of_text, _size_and_checksum

    text = json.dumps(json.loads(manifest.read_text()) | {"learner/counters.json": _size_and_checksum(path)})
    manifest.write_text(text)
    (manifest.parent / "COMMITTED").write_text(str(_checksum_of_text(text)))
    assert not said(run)["trained tokens equal the learner's count"].passed


def test_a_damaged_checkpoint_is_no_missing_one(run):
    paths = sorted((run / "checkpoints").glob("step_*"))
    (paths[-1] / "COMMITTED").write_text("1")
    check = said(run)["the newest checkpoint is whole"]
    assert not check.passed and f"{paths[-1].name} is damaged" in check.said
    for path in paths:
        (path / "COMMITTED").write_text("1")
    checks = said(run)
    assert not checks["the newest checkpoint is whole"].passed
    assert (
        not checks["trained tokens equal the learner's count"].passed and "no checkpoint can be read" in checks["trained tokens equal the learner's count"].said
    )


def test_a_replica_that_went_back(run):
    last = max(row["ordinal"] for row in surviving_trained(run))
    change(run, "groups", lambda rows: [{**row, "finished_at": 1e6 * row["attempt"] - 9} if row["ordinal"] == last else row for row in rows])
    check = said(run)["versions of a replica never go back"]
    assert not check.passed and "went back for" in check.said


def test_training_that_prefers_short_completions(run):
    short = {fate["ordinal"] for fate in surviving_trained(run) if tokens(fate["ordinal"]) < 9}
    change(run, "fates", lambda rows: [row if row["ordinal"] in short or row["outcome"] != "trained" else {**row, "outcome": "dropped"} for row in rows])
    assert not said(run)["lengths trained are those generated"].passed


def test_a_run_without_a_record_is_refused(tmp_path, capsys, no_threads):
    attempt(tmp_path, 3, None)
    (tmp_path / "run" / "run.json").write_text('{"run_id": "x", "attempts": 2}')
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(tmp_path / "run")])
    assert ended.value.code == 2 and "older asyncrl" in capsys.readouterr().err


def test_a_smaller_bound_on_resume(tmp_path, no_threads):
    attempt(tmp_path, 12, 3.0)
    assert attempt(tmp_path, 12, None, staleness={"max_staleness": 1}) == 12
    checks = list(said(tmp_path / "run").values())
    assert all(check.passed for check in checks), audit_text(checks)
