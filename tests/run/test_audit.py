"""The audit passes on runs that were killed and resumed, and fails on each kind of wrong books."""

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from independent_audit import wrong
from transformers import PreTrainedTokenizerFast

import asyncrl
from asyncrl.cli import main
from asyncrl.config import Config
from asyncrl.contracts.content_hash import content_hashes
from asyncrl.contracts.group_table import groups_to_table
from asyncrl.contracts.rows import (
    ANSWER_COLUMNS,
    Baseline,
    Completion,
    Group,
    Prompt,
    Trajectory,
    VersionSpan,
)
from asyncrl.control.coordinator import Coordinator, Parts, Schedule
from asyncrl.control.staleness import Staleness
from asyncrl.rewards.files import compact
from asyncrl.run.audit import UNREADABLE, audit, audit_text
from asyncrl.rundir.audited_rows import read_rows
from asyncrl.rundir.directory import RunDirectory
from asyncrl.rundir.outcomes import OUTSTANDING, OutcomesWriter, _sealed, read_outcomes
from asyncrl.rundir.record import _checksum
from asyncrl.runtime.files.parquet import write_table
from asyncrl.runtime.files.shared import size_and_checksum
from asyncrl.testing import (
    FakeLearner,
    FakePrompts,
    FakeRecorder,
    FakeRollouts,
    FakeScores,
    FakeWeightSync,
    VirtualTimeLoop,
)

GROUPS, SAMPLES, MAX_STALENESS = 4, 2, 2
LENGTHS = [3, 5, 8, 9, 20]


def config(root, steps, **changes):
    tree = {
        "name": "run",
        "runs_root": str(root),
        "max_steps": steps,
        "model": {"path": "model"},
        "data": {"train": "train.parquet", "max_prompt_length": 20},
        "rollout": {
            "max_completion_length": 32,
            "rollout_batch_size": GROUPS,
            "n_samples_per_prompt": SAMPLES,
        },
        "reward": {"functions": {"exact": {"function": "package.module:function"}}},
        "staleness": {"max_staleness": MAX_STALENESS},
    }
    return Config.model_validate(tree | changes)


def tokens(ordinal):
    return LENGTHS[ordinal * 7 % len(LENGTHS)]


class Files(FakeScores):
    """Writes the row of each scored group, as the scoring stage does."""

    def __init__(self, rollouts, directory, attempt, prompt_ids=lambda ordinal: (1,), greedy=False):
        super().__init__(rollouts)
        self.greedy = greedy
        self.directory, self.attempt, self.prompt_ids = directory, attempt, prompt_ids
        self.spans = {}
        """Ordinal → the version spans of each of its completions."""
        directory.mkdir(exist_ok=True)

    async def next(self):
        arrived = []
        now = asyncio.get_running_loop().time() + 1e6 * self.attempt
        for scored in await super().next():
            length = tokens(scored.ordinal)
            versions = scored.versions[-length:]
            scored = replace(scored, versions=versions, oldest_version=versions[0])
            edges = [length * place // len(versions) for place in range(len(versions) + 1)]
            spans = tuple(map(VersionSpan, versions, edges, edges[1:]))
            self.spans[scored.ordinal] = spans
            completion = Completion(
                (7,) * length, (-0.5 - scored.ordinal / 1024,) * length, spans, "stop"
            )
            trajectories = (
                Trajectory(completion, (1,) * length, 1.0, {"exact": 1.0}, 0.5),
                Trajectory(completion, (1,) * length, 0.0, {"exact": 0.0}, -0.5),
            )
            group = Group(
                self.attempt,
                Prompt(scored.ordinal, 0, "p", self.prompt_ids(scored.ordinal)),
                trajectories,
                f"replica-{self.attempt}",
                now - 5,
                now,
                scored_at=now,
                baseline=Baseline(completion, 0.5, {"exact": 0.5}) if self.greedy else None,
                admitted_at=now - 6,
                generated=((now - 5, now - 1), (now - 4, now)),
            )
            table = groups_to_table([group])
            arrived.append(replace(scored, content=content_hashes(table)[0]))
            pq.write_table(
                table, self.directory / f"attempt_{self.attempt:04d}-{scored.ordinal:08d}.parquet"
            )
        return arrived


class Recorder(FakeRecorder):
    def __init__(self, directory, attempt):
        super().__init__()
        self.writer = OutcomesWriter(directory, attempt)

    def outcomes(self, outcomes, outstanding):
        super().outcomes(outcomes, outstanding)
        self.writer.write(outcomes, outstanding)

    async def flushed(self):
        self.writer.flush()


class Learner(FakeLearner):
    """Counts the tokens that it trains, as the real one does."""

    trained_tokens = 0
    spans = None
    """With `mask`: ordinal → version spans, of which it trains the fresh ones."""

    async def step(self, batch):
        version = self.version
        result = await super().step(batch)
        for scored in batch if result.applied else ():
            self.trained_tokens += (
                scored.tokens
                if self.spans is None
                else SAMPLES
                * sum(
                    span.end - span.start
                    for span in self.spans[scored.ordinal]
                    if version - span.version <= self.max_staleness
                )
            )
        return result

    async def save(self, directory):
        (directory / "counters.json").write_text(
            json.dumps({"trained_tokens": self.trained_tokens})
        )
        return {
            **await super().save(directory),
            "counters.json": size_and_checksum(directory / "counters.json"),
        }


async def at_once(function, *arguments):
    """Replaces `asyncio.to_thread`, because a virtual clock cannot wait for threads."""
    return function(*arguments)


@pytest.fixture
def no_threads(monkeypatch):
    monkeypatch.setattr(asyncio, "to_thread", at_once)


def attempt(root, steps, after, graceful=True, prompt_ids=lambda ordinal: (1,), **changes):
    """Run one attempt and end it after `after` virtual seconds (None: let it finish)."""
    with RunDirectory(config(root, steps, resume="auto", **changes)) as directory:
        state = directory.state
        rule = {"max_staleness": MAX_STALENESS, "on_stale": "wait", **changes.get("staleness", {})}
        bound, masks = rule["max_staleness"], rule["on_stale"] == "mask"
        rollouts = FakeRollouts(
            latency=lambda ordinal: 0.1 * tokens(ordinal),
            fails=lambda ordinal: "broken" if ordinal % 11 == 3 else None,
            tokens=lambda o: SAMPLES * tokens(o),
            updates_in_flight=masks,
        )
        greedy = changes.get("algorithm", {}).get("advantage") == "remax"
        scores = Files(rollouts, directory.path / "groups", state.attempt, prompt_ids, greedy)
        learner = Learner(
            GROUPS, latency=0.3, version=state.version, skips=lambda step: step % 5 == 4
        )
        recorder = Recorder(directory.path / "outcomes", state.attempt)
        restored = []
        if directory.checkpoint is not None:
            learner.trained_tokens = json.loads(
                (directory.checkpoint / "learner" / "counters.json").read_text()
            )["trained_tokens"]
            restored = (
                asyncio.run(scores.load(directory.checkpoint / "buffer.parquet"))
                if state.waiting
                else []
            )
        prompts = FakePrompts(
            state.frontier, [*state.finished_above, *(ordinal for _, ordinal in state.waiting)]
        )
        parts = Parts(
            prompts, rollouts, scores, learner, FakeWeightSync(), recorder, directory.checkpoints
        )
        if masks:
            learner.spans, learner.max_staleness = scores.spans, bound
        schedule = Schedule(steps, Staleness(bound, GROUPS, rule["on_stale"]), checkpoint_every=3)
        coordinator = Coordinator(parts, schedule, state, restored)

        async def bounded():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(after):
                    await coordinator.run()
            return coordinator.progress.version

        async def killed():
            task = asyncio.ensure_future(coordinator.run())
            await asyncio.wait([task], timeout=after)
            recorder.outcomes = lambda *_: None  # a killed process writes nothing
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
    compact(root / "run" / "groups")
    for number in range(6):
        OutcomesWriter(root / "run" / "outcomes", number).compact()
    return root / "run"


@pytest.fixture
def run(whole_run, tmp_path):
    """A copy of that run, for the test to damage."""
    shutil.copytree(whole_run, tmp_path / "run")
    config_file = tmp_path / "run" / "config.yaml"
    config_file.write_text(config_file.read_text().replace(str(whole_run.parent), str(tmp_path)))
    return tmp_path / "run"


def checks_of(directory):
    return {check.name: check for check in audit(asyncrl.open_run(directory))}


def test_a_run_that_was_killed_and_resumed_passes(run, capsys):
    checks = checks_of(run)
    assert all(check.passed for check in checks.values()), audit_text(list(checks.values()))
    accounted = checks["every admitted group is accounted for"].summary
    assert "96 trained" in accounted and "abandoned by a restart" in accounted
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run)])
    assert ended.value.code == 0 and capsys.readouterr().out.count("pass  ") == len(checks)


def test_a_run_that_was_moved_has_its_checkpoints_with_it(whole_run, tmp_path):
    """Its config still names the old place, as after a change of ASYNCRL_RUNS."""
    shutil.copytree(whole_run, tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved" / "checkpoints")
    assert (
        checks_of(tmp_path / "moved")["trained tokens equal the learner's count"].summary
        == "no checkpoint yet"
    )
    shutil.copytree(whole_run / "checkpoints", tmp_path / "moved" / "checkpoints")
    assert (
        "no checkpoint"
        not in checks_of(tmp_path / "moved")["trained tokens equal the learner's count"].summary
    )


def test_a_run_that_was_just_killed_passes(tmp_path, no_threads):
    attempt(tmp_path, 30, 6.5, graceful=False)
    assert all(check.passed for check in checks_of(tmp_path / "run").values())
    assert "waiting" in checks_of(tmp_path / "run")["every admitted group is accounted for"].summary


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_a_run_killed_at_random_moments_passes(tmp_path, no_threads, seed):
    random_ = random.Random(seed)
    for _ in range(6):
        if attempt(tmp_path, 15, random_.uniform(0, 5), random_.random() < 0.3) == 15:
            break
        checks = checks_of(tmp_path / "run").values()
        assert all(check.passed for check in checks), audit_text(list(checks))
    assert attempt(tmp_path, 15, None) == 15
    checks = checks_of(tmp_path / "run").values()
    assert all(check.passed for check in checks), audit_text(list(checks))


MASK = {"max_staleness": 1, "on_stale": "mask"}


def test_masked_tokens_are_checked_one_by_one(tmp_path, no_threads):
    assert attempt(tmp_path, 24, None, staleness=MASK) == 24
    run = asyncrl.open_run(tmp_path / "run")
    assert all(check.passed for check in audit(run)), audit_text(audit(run))
    counts = checks_of(tmp_path / "run")["trained tokens equal the learner's count"].summary
    trained_groups = surviving_trained(tmp_path / "run")
    ordinals = {ended["ordinal"] for ended in trained_groups}
    whole = sum(
        sum(map(len, row["completion_ids"]))
        for row in run.groups().to_pylist()
        if row["ordinal"] in ordinals
    )
    trained = int(counts.split()[0])
    assert 0.3 * whole < trained < 0.9 * whole, "some tokens are masked, and others are not"
    ages = {ended["staleness"] for ended in trained_groups}
    assert ages == {0, 1}


def test_a_run_that_stops_masking_is_still_checked_by_the_rule_of_each_attempt(
    tmp_path, no_threads
):
    attempt(tmp_path, 24, 6.0, staleness=MASK)
    assert attempt(tmp_path, 24, None, staleness={"max_staleness": 2}) == 24
    checks = checks_of(tmp_path / "run")
    failed = [name for name, check in checks.items() if not check.passed]
    assert failed == [], audit_text(list(checks.values()))


def test_tokens_beyond_the_bound_without_mask_fail_the_audit(tmp_path, no_threads):
    attempt(tmp_path, 24, None, staleness=MASK)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    for one in record["attempts"]:
        one["masks_stale"] = False
    del record["checksum"]
    (tmp_path / "run" / "run.json").write_text(
        json.dumps({**record, "checksum": _checksum(record)})
    )
    checks = checks_of(tmp_path / "run")
    assert not checks["staleness stays within the bound"].passed
    assert not checks["trained tokens equal the learner's count"].passed
    assert not checks["record, config and checkpoints agree"].passed


def change(directory, which, edit):
    """Rewrite the rows of one kind of file as `edit(rows)`. The checksum of a file of outcomes is
    updated."""
    for path in sorted((directory / which).glob("*.parquet")):
        table = pq.read_table(path)
        before = table.to_pylist()
        after = edit(before)
        if after == before:
            continue
        new = pa.Table.from_pylist(after, table.schema)
        if which == "outcomes":
            new = _sealed(new, table.schema.metadata[OUTSTANDING])
        pq.write_table(new, path)


def surviving_trained(directory):
    from asyncrl.run.audit import Books

    return [ended for ended, _ in Books(asyncrl.open_run(directory)).trained()]


def in_row(ordinal, **changes):
    """An edit of one ordinal's rows. Each change is a function of the old value."""

    def edit(rows):
        return [
            (
                {**row, **{name: new(row[name]) for name, new in changes.items()}}
                if row["ordinal"] == ordinal
                else row
            )
            for row in rows
        ]

    return edit


def first_token(new):
    """Replace the value of the first token of the first trajectory."""
    return lambda lists: [[new(lists[0][0]), *lists[0][1:]], *lists[1:]]


def first_value(new):
    return lambda values: [new(values[0]), *values[1:]]


def spans(change):
    return lambda versions: [change(versions[0]), *versions[1:]]


POSSIBLE, CONTENT = "masks, version spans and times are possible", "rows are what was scored"
FALSIFIED_ROWS = {
    "token": (CONTENT, {"completion_ids": first_token(lambda token: token + 1)}),
    "logprob": (CONTENT, {"logprobs": first_token(lambda logprob: logprob - 1e-3)}),
    "reward": (CONTENT, {"reward": first_value(lambda reward: reward + 1)}),
    "reward part": (CONTENT, {"reward_parts": first_value(lambda parts: {"exact": 0.5})}),
    "advantage": (CONTENT, {"advantage": first_value(lambda advantage: -advantage)}),
    "status": (CONTENT, {"status": first_value(lambda status: "unscored")}),
    "unscored with a reward": (POSSIBLE, {"status": first_value(lambda status: "unscored")}),
    "no token with tokens": (POSSIBLE, {"status": first_value(lambda status: "no_token")}),
    "finite log-probs": (POSSIBLE, {"status": first_value(lambda status: "bad_logprob")}),
    "text": (CONTENT, {"completion_text": first_value(lambda text: text + "!")}),
    "prompt": (
        CONTENT,
        {"prompt_ids": lambda ids: [*ids, 9], "prompt_text": lambda text: "another"},
    ),
    "scored before": (CONTENT, {"scored_at": lambda time: time - 1e6}),
    "mask of 2": (POSSIBLE, {"loss_mask": first_token(lambda mask: 2)}),
    "negative mask": (POSSIBLE, {"loss_mask": first_token(lambda mask: -1)}),
    "times": (POSSIBLE, {"finished_at": lambda time: time - 60}),
    "NaN time": (POSSIBLE, {"finished_at": lambda time: float("nan")}),
    "span cut short": (
        POSSIBLE,
        {"versions": spans(lambda one: [{**one[0], "end": one[0]["end"] - 1}])},
    ),
    "spans overlap": (
        POSSIBLE,
        {"versions": spans(lambda one: [one[0], {**one[0], "version": one[0]["version"] + 1}])},
    ),
    "span too long": (
        POSSIBLE,
        {"versions": spans(lambda one: [{**one[0], "end": one[0]["end"] + 1}])},
    ),
    "span of no token": (POSSIBLE, {"versions": spans(lambda one: [{**one[0], "end": 0}, one[0]])}),
    "negative version": (POSSIBLE, {"versions": spans(lambda one: [{**one[0], "version": -1}])}),
    "no span": (POSSIBLE, {"versions": spans(lambda one: [])}),
    "version to come": (
        "no token is from a future version",
        {"versions": spans(lambda one: [{**one[0], "version": 10_000}])},
    ),
    "missing trajectory in one list": (POSSIBLE, {"status": lambda values: values[:1]}),
}


@pytest.mark.parametrize("what", FALSIFIED_ROWS)
def test_a_row_that_was_falsified_is_named(run, what):
    check, changes = FALSIFIED_ROWS[what]
    ordinal = surviving_trained(run)[7]["ordinal"]
    change(run, "groups", in_row(ordinal, **changes))
    found = checks_of(run)[check]
    assert not found.passed and f", {ordinal})" in found.summary, found.summary
    if check != CONTENT:
        assert any(line.startswith(f"{ordinal}: ") for line in wrong(run)) or what in (
            "missing trajectory in one list",
            "finite log-probs",
        )


def add_copy(directory, ordinal, **changes):
    """Write a second row of the group to a separate file."""
    for path in sorted((directory / "groups").glob("*.parquet")):
        table = pq.read_table(path)
        for row in (row for row in table.to_pylist() if row["ordinal"] == ordinal):
            pq.write_table(
                pa.Table.from_pylist([{**row, **changes}], table.schema),
                path.with_name(path.stem.split("-")[0] + "-09999999.parquet"),
            )


def test_two_rows_of_one_group(run):
    ended = surviving_trained(run)[7]
    add_copy(run, ended["ordinal"], replica="another")
    check = checks_of(run)["each group has exactly one row"]
    assert (
        not check.passed
        and f"two rows that differ: ({ended['attempt']}, {ended['ordinal']})" in check.summary
    )
    assert f"{ended['ordinal']}: two rows" in wrong(run)


def test_a_merged_row_whose_old_file_still_exists_is_fine(run):
    """A crash after the merge and before the deletion leaves this."""
    add_copy(run, surviving_trained(run)[7]["ordinal"])
    assert all(check.passed for check in checks_of(run).values()) and not wrong(run)


def test_content_trained_again_under_another_ordinal(run):
    """The hash in the other outcome is updated too, as a careful forger would."""
    one, other = surviving_trained(run)[7:9]
    rows = {
        row["ordinal"]: row
        for row in pq.ParquetDataset(run / "groups").read().to_pylist()
        if row["attempt"] == one["attempt"]
    }
    copy = {**rows[one["ordinal"]], "ordinal": other["ordinal"], "attempt": other["attempt"]}
    change(
        run,
        "groups",
        lambda old: [copy if row["ordinal"] == other["ordinal"] else row for row in old],
    )
    table = pa.Table.from_pylist([copy], pq.read_schema(next((run / "groups").glob("*.parquet"))))
    sealed = {"content": content_hashes(table)[0], "completion_tokens": one["completion_tokens"]}
    change(
        run,
        "outcomes",
        lambda old: [
            {**row, **sealed} if row["ordinal"] == other["ordinal"] and row["content"] else row
            for row in old
        ],
    )
    check = checks_of(run)["each group has exactly one row"]
    assert (
        not check.passed
        and f"trained again under another ordinal: {other['ordinal']} (as {one['ordinal']})"
        in check.summary
    )
    assert f"{other['ordinal']}: the same as {one['ordinal']}" in wrong(run)


@pytest.mark.parametrize(
    ("change_of", "text"),
    [
        (lambda ended: {"step": ended["step"] + 1}, "of several steps: version"),
        (
            lambda ended: {
                "trained_at_version": ended["trained_at_version"] + 1,
                "staleness": ended["staleness"] + 1,
            },
            "not a full batch: version",
        ),
        (lambda ended: {"outcome": "dropped"}, "not a full batch: version"),
    ],
    ids=["step", "version", "one too few"],
)
def test_a_step_that_is_not_a_full_batch(run, change_of, text):
    ended = surviving_trained(run)[9]
    change(
        run,
        "outcomes",
        lambda rows: [{**row, **change_of(row)} if row == ended else row for row in rows],
    )
    check = checks_of(run)["every step trained one batch"]
    assert not check.passed and text in check.summary
    assert wrong(run)


def test_an_outcome_with_other_tokens_or_without_a_hash(run):
    ended = surviving_trained(run)[9]
    change(
        run,
        "outcomes",
        lambda rows: [{**row, "completion_tokens": 1} if row == ended else row for row in rows],
    )
    check = checks_of(run)[CONTENT]
    assert (
        not check.passed
        and f"token count differs from the outcome: ({ended['attempt']}, {ended['ordinal']})"
        in check.summary
    )
    assert f"{ended['ordinal']}: 1 tokens in its outcome" in wrong(run)
    change(
        run,
        "outcomes",
        lambda rows: [
            {**row, "content": None} if row["ordinal"] == ended["ordinal"] else row for row in rows
        ],
    )
    check = checks_of(run)[CONTENT]
    assert (
        not check.passed
        and f"trained, but the outcome has no hash: ({ended['attempt']}, {ended['ordinal']})"
        in check.summary
    )


def test_an_outcome_that_was_changed_without_its_files_checksum(run):
    path = sorted((run / "outcomes").glob("*.parquet"))[0]
    table = pq.read_table(path)
    rows = [{**row, "reason": "because"} for row in table.to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)
    check = checks_of(run)["every file can be read"]
    assert not check.passed and f"{path} was changed after it was written" in check.summary


def test_a_record_that_was_changed(run, capsys):
    path = run / "run.json"
    path.write_text(path.read_text().replace('"max_staleness": 2', '"max_staleness": 3'))
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run)])
    assert ended.value.code == 2 and "was edited" in capsys.readouterr().err


def test_whole_numbers_that_another_tool_wrote_as_floats(run):
    write_metrics(run)
    path = run / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(
        "".join(json.dumps({**one, "step": float(one["step"])}) + "\n" for one in records)
    )
    assert all(check.passed for check in checks_of(run).values())


def reseal(run, ordinal):
    """Write the changed row's hash into its outcomes, as a careful forger would."""
    hashes = {}
    for path in (run / "groups").glob("*.parquet"):
        table = pq.read_table(path)
        hashes |= dict(
            zip(
                zip(table["attempt"].to_pylist(), table["ordinal"].to_pylist(), strict=True),
                content_hashes(table),
                strict=True,
            )
        )
    change(
        run,
        "outcomes",
        lambda rows: [
            (
                {**row, "content": row["content"] and hashes[row["attempt"], row["ordinal"]]}
                if row["ordinal"] == ordinal
                else row
            )
            for row in rows
        ],
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ended_in": 99}, "was made in attempt 0 and decided in attempt 99"),
        ({"ended_in": None}, "lacks a value"),
        ({"attempt": -1}, "was made in attempt -1"),
        ({"ordinal": None}, "lacks a value"),
        ({"ordinal": -5}, "has step"),
        ({"outcome": "lost"}, "is 'lost', which is none of"),
        ({"trained_at_version": None}, "was trained at version None"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_an_impossible_outcome(run, changes, text):
    ended = surviving_trained(run)[5]
    change(
        run, "outcomes", lambda rows: [{**row, **changes} if row == ended else row for row in rows]
    )
    check = checks_of(run)["every file can be read"]
    assert (
        not check.passed
        and f"the outcome of ordinal {changes.get('ordinal', ended['ordinal'])} {text}"
        in check.summary
    )


@pytest.mark.parametrize("text", [b'["a"]', b"7", b"[[1]]", b"[" * 100000, b"[-1]"])
def test_outstanding_ordinals_that_are_not_ordinals(run, text):
    path = sorted((run / "outcomes").glob("*.parquet"))[-1]
    pq.write_table(_sealed(pq.read_table(path), text), path)
    check = checks_of(run)["every file can be read"]
    assert not check.passed and f"{path} is damaged: its outstanding ordinals" in check.summary


def test_huge_ordinals_do_not_slow_the_audit(run):
    path = sorted((run / "outcomes").glob("*.parquet"))[-1]
    pq.write_table(_sealed(pq.read_table(path), b"[1000000000000]"), path)
    assert not checks_of(run)["every admitted group is accounted for"].passed


@pytest.mark.parametrize("folder", ["groups", "outcomes", "evaluations"])
@pytest.mark.parametrize(
    "name", ["zz.parquet", "attempt_0077-00000001.parquet", "notes.txt", "folder", "link"]
)
def test_what_asyncrl_did_not_write_is_named(run, folder, name):
    (run / folder).mkdir(exist_ok=True)
    path = run / folder / name
    if name == "folder":
        path.mkdir()
    elif name == "link":
        path = sorted((run / "groups").glob("*.parquet"))[0] if folder != "evaluations" else path
        if path.exists():
            path.rename(run / "moved")
        path.symlink_to(run / "moved")
    else:
        path.write_bytes(sorted((run / "groups").glob("*.parquet"))[0].read_bytes())
    check = checks_of(run)["every file can be read"]
    assert not check.passed and str(path) in check.summary


REMAX = {"algorithm": {"advantage": "remax"}}
BASELINE, ODD = "an impossible baseline", "advantages other than the reward less the baseline's"


def test_a_run_with_baselines_passes_until_they_are_falsified(tmp_path, no_threads):
    """Baselines are no trajectories: every group has its two, and their tokens are those of its
    outcome. But the version of a baseline counts in the staleness of its group."""
    assert attempt(tmp_path, 8, 3.0, False, **REMAX) < 8 == attempt(tmp_path, 8, None, **REMAX)
    run = tmp_path / "run"
    checks = checks_of(run)
    assert all(check.passed for check in checks.values()), audit_text(list(checks.values()))
    assert wrong(run) == []
    falsified = [
        ("baseline_ids", BASELINE, lambda ids: [*ids, 7]),
        ("baseline_text", BASELINE, lambda text: None),
        ("baseline_logprobs", BASELINE, lambda logprobs: logprobs[1:]),
        ("baseline_versions", BASELINE, lambda spans: [{**spans[0], "start": 1}]),
        ("baseline_finish_reason", BASELINE, lambda reason: "fine"),
        ("baseline_reward", ODD, lambda reward: None),
        ("advantage", ODD, lambda values: [0.75, *values[1:]]),
    ]
    *changed, old = surviving_trained(run)[-len(falsified) - 1 :]
    for ended, (name, _, new) in zip(changed, falsified, strict=True):
        change(run, "groups", in_row(ended["ordinal"], **{name: new}))
    older = old["trained_at_version"] - old["staleness"] - 1
    version = in_row(
        old["ordinal"], baseline_versions=lambda spans: [{**spans[0], "version": older}]
    )
    change(run, "groups", version)
    checks = checks_of(run)
    for fault in (BASELINE, ODD):
        ordinals = [
            ended["ordinal"]
            for ended, (_, named, _) in zip(changed, falsified, strict=True)
            if named == fault
        ]
        found = checks[POSSIBLE].summary.split(f"{fault}: ")[1].split("; ")[0]
        assert {int(ordinal) for ordinal in re.findall(r", (\d+)\)", found)} == set(ordinals)
    bound = checks["staleness stays within the bound"]
    assert not bound.passed and str(old["ordinal"]) in bound.summary
    assert any(f"{old['ordinal']}: staleness" in line for line in wrong(run))


@pytest.mark.parametrize(
    ("name", "new", "fault"),
    [
        (
            "reward",
            lambda values: [float("nan"), *values[1:]],
            "rewards or advantages that are not numbers",
        ),
        (
            "advantage",
            lambda values: [float("inf"), *values[1:]],
            "rewards or advantages that are not numbers",
        ),
        ("logprobs", first_token(lambda value: 3.0), "invalid log-probs"),
        ("logprobs", first_token(lambda value: float("nan")), "invalid log-probs"),
        ("completion_ids", first_token(lambda value: -7), "negative or missing token ids"),
        ("completion_ids", first_token(lambda value: None), "negative or missing token ids"),
        ("status", lambda values: ["fine", *values[1:]], "an unknown status or finish reason"),
        ("finish_reason", lambda values: [None, *values[1:]], "an unknown status or finish reason"),
        ("finished_at", lambda value: float("inf"), "times that go back"),
        ("generated_to", lambda values: [values[0] + 9, *values[1:]], "times that go back"),
        ("generated_from", lambda values: [values[0] - 9, *values[1:]], "times that go back"),
        ("generated_from", lambda values: values[1:], "times that go back"),
        ("generated_to", lambda values: None, "times that go back"),
        ("admitted_at", lambda value: value + 90, "times that go back"),
        ("admitted_at", lambda value: float("nan"), "times that go back"),
        ("scored_at", lambda value: value - 90, "times that go back"),
    ],
)
def test_values_that_asyncrl_cannot_have_written(run, name, new, fault):
    """The audit notices, even if the outcome has the hash of the changed row."""
    ended = surviving_trained(run)[5]
    change(run, "groups", in_row(ended["ordinal"], **{name: new}))
    reseal(run, ended["ordinal"])
    checks = checks_of(run)
    assert (
        not checks[POSSIBLE].passed
        and f"{fault}: ({ended['attempt']}, {ended['ordinal']})" in checks[POSSIBLE].summary
    )
    assert checks[CONTENT].passed


def test_two_outcomes_of_one_group_in_one_attempt(run):
    ended = surviving_trained(run)[-5]
    other = {**ended, "outcome": "waiting", "trained_at_version": None, "staleness": None}
    change(
        run,
        "outcomes",
        lambda rows: [one for row in rows for one in ([row, other] if row == ended else [row])],
    )
    check = checks_of(run)["each ordinal has one outcome"]
    assert (
        not check.passed
        and f"with two outcomes in one attempt: ({ended['attempt']}, {ended['ordinal']})"
        in check.summary
    )


@pytest.mark.parametrize(
    ("outcome", "text"),
    [("failed", "not a full batch: skipped step"), ("every", "steps without any group")],
)
def test_a_skipped_step_must_be_a_full_batch_too(run, outcome, text):
    """One of its groups, or all of them, are recorded as failed."""
    skipped = [
        ended
        for path in sorted((run / "outcomes").glob("*.parquet"))
        for ended in pq.read_table(path).to_pylist()
        if ended["outcome"] == "skipped"
    ]
    chosen = skipped[:1] if outcome == "failed" else skipped
    change(
        run,
        "outcomes",
        lambda rows: [{**row, "outcome": "failed"} if row in chosen else row for row in rows],
    )
    check = checks_of(run)["every step trained one batch"]
    assert not check.passed and text in check.summary


def rewrite_record(run, edit):
    """Edit run.json and update its checksum, as a careful forger would."""
    tree = json.loads((run / "run.json").read_text())
    del tree["checksum"]
    edit(tree)
    (run / "run.json").write_text(json.dumps({**tree, "checksum": _checksum(tree)}))


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (
            lambda tree: tree["attempts"][0].update(from_attempt=5),
            "attempt 0 is called 0 and continues from 5",
        ),
        (lambda tree: tree["attempts"][3].update(from_attempt=3), "continues from 3"),
        (lambda tree: tree["attempts"][5].pop("frontier"), "attempts, 5 frontier: field required"),
        (lambda tree: tree["attempts"][5].update(waiting=[3]), "attempts, 5 waiting 0"),
        (lambda tree: tree.update(attempts=[]), "at least 1 item"),
        (lambda tree: tree["attempts"].reverse(), "attempt 0 is called 5"),
    ],
)
def test_an_impossible_record(run, edit, text, capsys):
    rewrite_record(run, edit)
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run)])
    assert ended.value.code == 2 and text in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "[" * 100000, "{", "3"])
def test_a_record_that_is_not_a_record(run, text, capsys):
    (run / "run.json").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run)])
    assert ended.value.code == 2 and "run.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (
            lambda tree: [one.update(max_staleness=50) for one in tree["attempts"]],
            "began with max_staleness 50, but config.yaml has 2",
        ),
        (
            lambda tree: [one.update(train_ends=["done"]) for one in tree["attempts"]],
            "began with train_ends ['done'], but config.yaml has []",
        ),
        (
            lambda tree: tree["attempts"][5].update(version=3),
            "attempt 5 began at version 3, but from",
        ),
        (
            lambda tree: tree["attempts"][0].update(frontier=10**12),
            "began from no checkpoint, but at frontier 1000000000000",
        ),
        (lambda tree: tree.update(run_id="another"), "belongs to run"),
    ],
)
def test_a_record_that_contradicts_the_other_files(run, edit, text):
    rewrite_record(run, edit)
    check = checks_of(run)["record, config and checkpoints agree"]
    assert not check.passed and text in check.summary


def write_metrics(run):
    """Write the records of the steps, computed with plain loops over the files."""
    rows = {
        (row["attempt"], row["ordinal"]): row
        for path in (run / "groups").glob("*.parquet")
        for row in pq.read_table(path).to_pylist()
    }
    steps = {}
    for path in sorted((run / "outcomes").glob("*.parquet")):
        for ended in pq.read_table(path).to_pylist():
            if ended["outcome"] in ("trained", "skipped"):
                steps.setdefault((ended["ended_in"], ended["step"]), []).append(ended)
    lines = []
    for (attempt_, step), outcomes in sorted(steps.items()):
        mine = [rows[ended["attempt"], ended["ordinal"]] for ended in outcomes]
        lengths = [len(ids) for row in mine for ids in row["completion_ids"]]
        applied = outcomes[0]["outcome"] == "trained"
        record = {
            "schema": 1,
            "event": "step",
            "attempt": attempt_,
            "step": step,
            "version": outcomes[0]["trained_at_version"] + 1 if applied else 0,
            "time": 1.0,
        }
        if applied:
            record |= {
                "staleness/mean": sum(ended["staleness"] for ended in outcomes) / len(outcomes),
                "reward/mean": 0.5,
                "tokens": float(sum(lengths)),
            }
        lines.append(
            json.dumps(record | {"rollout/completion_tokens": sum(lengths) / len(lengths)}) + "\n"
        )
    (run / "metrics.jsonl").write_text("".join(lines))


METRICS = "metrics match their groups"


def test_metrics_show_a_group_that_was_moved_to_another_step(run):
    """Moving a group to the next step with its staleness keeps all other files consistent, so only
    the metrics show it."""
    write_metrics(run)
    checks = checks_of(run)
    assert all(check.passed for check in checks.values()), audit_text(list(checks.values()))
    trained = [ended for ended in surviving_trained(run) if ended["ended_in"] == 5]
    pairs = (
        (a, b)
        for a in trained
        for b in trained
        if b["trained_at_version"] == a["trained_at_version"] + 1
    )
    one, other = next(
        (a, b)
        for a, b in pairs
        if a["staleness"] < 2
        and b["staleness"]
        and a["completion_tokens"] != b["completion_tokens"]
    )
    moved = {
        one["ordinal"]: {
            "trained_at_version": other["trained_at_version"],
            "step": other["step"],
            "staleness": one["staleness"] + 1,
        },
        other["ordinal"]: {
            "trained_at_version": one["trained_at_version"],
            "step": one["step"],
            "staleness": other["staleness"] - 1,
        },
    }
    change(
        run,
        "outcomes",
        lambda rows: [
            {**row, **moved[row["ordinal"]]} if row in (one, other) else row for row in rows
        ],
    )
    failed = {name: check.summary for name, check in checks_of(run).items() if not check.passed}
    assert list(failed) == [METRICS] and f"step {one['step']} of attempt 5" in failed[METRICS], (
        failed
    )


def test_a_reward_that_was_changed_with_its_hash(run):
    write_metrics(run)
    ended = surviving_trained(run)[5]
    change(run, "groups", in_row(ended["ordinal"], reward=lambda values: [5.0, *values[1:]]))
    reseal(run, ended["ordinal"])
    failed = {name: check.summary for name, check in checks_of(run).items() if not check.passed}
    assert (
        list(failed) == [METRICS]
        and "reward/mean 0.5, its groups give" in failed[METRICS]
        and str(ended["ordinal"]) in failed[METRICS]
    )


@pytest.mark.parametrize("how", ["edited", "gone", "garbage", "pipe", "link"])
def test_metrics_that_were_changed(run, how):
    write_metrics(run)
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    if how == "edited":
        path.write_text(
            "".join(
                [
                    *lines[:3],
                    lines[3].replace('"staleness/mean": ', '"staleness/mean": 9'),
                    *lines[4:],
                ]
            )
        )
    elif how == "gone":
        path.write_text("".join([*lines[:1], *lines[2:]]))
    elif how == "garbage":
        path.write_text("{bad\n")
    else:
        path.unlink()
        os.mkfifo(path) if how == "pipe" else path.symlink_to(run / "config.yaml")
    check = checks_of(run)[METRICS if how in ("edited", "gone") else "every file can be read"]
    assert not check.passed and (
        "step" in check.summary if how in ("edited", "gone") else str(path) in check.summary
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, ""),
        ({"stale": 3}, "its parts give"),
        ({"trained": -3, "stale": 3}, "session/tokens_trained"),
        ({"sampled": 3, "stale": 3}, "session/tokens_sampled"),
    ],
)
def test_every_sampled_token_of_a_step_is_trained_or_has_a_reason(run, changes, text):
    """As a run of sessions records it. Here every token is trained."""
    write_metrics(run)
    path = run / "metrics.jsonl"
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    for step in steps:
        count = round(GROUPS * SAMPLES * step["rollout/completion_tokens"])
        step |= {"session/tokens_sampled": count, "session/tokens_trained": count}
    step = next(step for step in steps if "tokens" in step)
    for name, change in changes.items():
        step[f"session/tokens_{name}"] = step.get(f"session/tokens_{name}", 0) + change
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    check = checks_of(run)[METRICS]
    assert check.passed == (not changes) and text in check.summary


def test_an_evaluation_must_match_its_completions(run):
    rows = {
        "set": ["a"] * 4,
        "attempt": [5] * 4,
        "version": [24] * 4,
        "ordinal": [0, 1, 2, 3],
        "index": [0] * 4,
    }
    rows |= {"status": ["ok", "late", "unscored", "ok"], "accuracy": [1.0, None, None, 0.5]}
    kinds = {name: ANSWER_COLUMNS[name] for name in rows}
    (run / "evaluations").mkdir()
    path = run / "evaluations" / "attempt_0005-version_00000024-a.parquet"
    pq.write_table(
        pa.table({name: pa.array(rows[name], kind) for name, kind in kinds.items()}), path
    )
    record = {
        "schema": 1,
        "event": "evaluation",
        "attempt": 5,
        "step": 30,
        "version": 24,
        "time": 1.0,
        "eval/a_accuracy": 0.5,
    }
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    name = "evaluations match their completions"
    assert all(check.passed for check in checks_of(run).values())
    (run / "metrics.jsonl").write_text(json.dumps(record | {"eval/a_accuracy": 0.75}) + "\n")
    assert (
        "set a at version 24 of attempt 5: accuracy 0.75, its completions give 0.5"
        in checks_of(run)[name].summary
    )
    path.rename(path.with_name("attempt_0005-version_00000023-a.parquet"))
    assert (
        "a row has set 'a', attempt 5, version 24"
        in checks_of(run)["every file can be read"].summary
    )
    assert "without completions (attempt, version): (5, 24)" in checks_of(run)[name].summary


@pytest.mark.parametrize("content", ["[]", "{}", '{"trained_tokens": null}', "[" * 100000])
def test_counters_that_are_not_counters(run, content):
    path = max((run / "checkpoints").glob("step_*")) / "learner" / "counters.json"
    path.write_text(content)
    from asyncrl.rundir.checkpoint import _checksum_of_text

    manifest = path.parent.parent / "MANIFEST"
    text = json.dumps(
        json.loads(manifest.read_text()) | {"learner/counters.json": size_and_checksum(path)}
    )
    manifest.write_text(text)
    (manifest.parent / "COMMITTED").write_text(str(_checksum_of_text(text)))
    check = checks_of(run)["trained tokens equal the learner's count"]
    assert not check.passed and f"{path} cannot be read" in check.summary


@pytest.mark.parametrize("folder", ["groups", "outcomes"])
@pytest.mark.parametrize("how", ["empty", "cut", "text", "pipe", "directory", "other columns"])
def test_a_file_that_cannot_be_read_is_named(run, folder, how):
    path = sorted((run / folder).glob("*.parquet"))[1]
    content = path.read_bytes()
    path.unlink()
    if how == "pipe":
        os.mkfifo(path)
    elif how == "directory":
        path.mkdir()
    elif how == "other columns":
        pq.write_table(pa.table({"a": [1]}), path)
    else:
        path.write_bytes(
            {"empty": b"", "cut": content[: len(content) // 2], "text": b"hello " * 100}[how]
        )
    check = checks_of(run)["every file can be read"]
    assert not check.passed and str(path) in check.summary


@pytest.mark.parametrize("folder", ["groups", "outcomes"])
def test_any_flipped_byte_that_changes_what_is_read_is_found(run, folder):
    """Pages have checksums, but footers do not."""
    path = sorted((run / folder).glob("*.parquet"))[1]
    write_table(pq.read_table(path), path)
    assert all(check.passed for check in checks_of(run).values())
    whole, seen, random_ = path.read_bytes(), 0, random.Random(0)
    read = read_outcomes if folder == "outcomes" else read_rows
    before = read(path)
    for place in random_.sample(range(len(whole)), 400):
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ (1 << random_.randrange(8))]) + whole[place + 1 :]
        )
        try:
            after = read(path)
        except UNREADABLE:
            seen += 1
            continue
        if after == before:
            continue
        assert folder == "groups", f"byte {place} changed the outcomes that are read"
        assert not all(check.passed for check in checks_of(run).values()), (
            f"byte {place} changed what is read"
        )
        seen += 1
    assert seen > 100


@pytest.fixture
def with_data(tmp_path, tiny_model, no_threads):
    """A short run with the prompts of a file, in the file's order."""
    rows = [f"{number}+{number}=" for number in range(40)]
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in rows)
    )
    encode = PreTrainedTokenizerFast.from_pretrained(tiny_model).encode
    data = {"train": str(tmp_path / "train.jsonl"), "max_prompt_length": 20, "shuffle": False}
    attempt(
        tmp_path,
        6,
        None,
        prompt_ids=lambda ordinal: tuple(encode(rows[ordinal % 40])),
        data=data,
        model={"path": str(tiny_model)},
    )
    return tmp_path / "run"


def test_the_prompts_are_recomputed_from_the_data(with_data):
    check = checks_of(with_data)["each prompt is its ordinal's"]
    assert check.passed and re.fullmatch(r"\d+ ordinals", check.summary), check.summary


def test_another_prompt_than_the_ordinals(with_data):
    """The hash in the outcome is updated too, as a careful forger would."""
    ordinal = surviving_trained(with_data)[3]["ordinal"]
    change(with_data, "groups", in_row(ordinal, prompt_ids=lambda ids: [*ids[:-1], ids[-1] + 1]))
    rows = {
        row["ordinal"]: row for row in pq.ParquetDataset(with_data / "groups").read().to_pylist()
    }
    table = pa.Table.from_pylist(
        [rows[ordinal]], pq.read_schema(next((with_data / "groups").glob("*.parquet")))
    )
    change(
        with_data,
        "outcomes",
        lambda old: [
            {**row, "content": content_hashes(table)[0]} if row["ordinal"] == ordinal else row
            for row in old
        ],
    )
    failed = {
        name: check.summary for name, check in checks_of(with_data).items() if not check.passed
    }
    assert (
        list(failed) == ["each prompt is its ordinal's"]
        and f"another prompt: (0, {ordinal})" in failed["each prompt is its ordinal's"]
    )


def test_prompts_of_changed_data_are_reported_as_not_checked(with_data):
    path = with_data.parent / "train.jsonl"
    path.write_text(path.read_text() + '{"prompt": "1+1="}\n')
    check = checks_of(with_data)["each prompt is its ordinal's"]
    assert check.passed and check.summary.startswith("not checked: the run's data or tokenizer")


def test_an_outcome_that_vanished(run):
    ended = surviving_trained(run)[5]
    change(
        run, "outcomes", lambda rows: [row for row in rows if row["ordinal"] != ended["ordinal"]]
    )
    checks = checks_of(run)
    assert not checks["no gap below the frontier"].passed
    assert not checks["trained tokens equal the learner's count"].passed


def test_a_group_lost_without_a_trace(run):
    lost = next(ended for ended in surviving_trained(run) if ended["attempt"] == 0)
    for which in ("outcomes", "groups"):
        change(run, which, lambda rows: [row for row in rows if row["ordinal"] != lost["ordinal"]])
    check = checks_of(run)["every admitted group is accounted for"]
    assert not check.passed and f"without any trace: (0, {lost['ordinal']})" in check.summary


def test_an_ordinal_trained_twice(run):
    last = len(json.loads((run / "run.json").read_text())["attempts"]) - 1
    one = next(ended for ended in surviving_trained(run) if ended["attempt"] < last)
    again = {**one, "attempt": last, "ended_in": last}
    change(
        run,
        "outcomes",
        lambda rows: [*rows, again] if any(row["ended_in"] == last for row in rows) else rows,
    )
    checks = checks_of(run)
    assert (
        not checks["each ordinal has one outcome"].passed
        and not checks["trained ordinals are distinct"].passed
    )


def test_an_ordinal_with_two_outcomes_in_one_attempt(run):
    one = surviving_trained(run)[-1]
    other = {**one, "trained_at_version": one["trained_at_version"] + 1}
    change(
        run,
        "outcomes",
        lambda rows: [row for old in rows for row in ([old, other] if old == one else [old])],
    )
    checks = checks_of(run)
    assert (
        not checks["each ordinal has one outcome"].passed
        and not checks["trained ordinals are distinct"].passed
    )


def test_a_group_that_was_scored_and_forgotten(run):
    """The group has a row, but no record of its outcome."""
    last = len(json.loads((run / "run.json").read_text())["attempts"]) - 1
    one = next(
        ended for ended in surviving_trained(run) if ended["attempt"] == ended["ended_in"] == last
    )
    change(run, "outcomes", lambda rows: [row for row in rows if row != one])
    check = checks_of(run)["every admitted group is accounted for"]
    assert (
        not check.passed
        and f"not outstanding and without an outcome: ({last}, {one['ordinal']})" in check.summary
    )


def test_a_trajectory_beyond_the_bound(run):
    ended = surviving_trained(run)[-1]
    change(
        run,
        "outcomes",
        lambda rows: [
            {**row, "trained_at_version": row["trained_at_version"] + 9} if row == ended else row
            for row in rows
        ],
    )
    check = checks_of(run)["staleness stays within the bound"]
    assert (
        not check.passed
        and f"beyond it: {ended['ordinal']}" in check.summary
        and "not the value in their outcome" in check.summary
    )


def test_a_trajectory_that_is_missing_from_its_group(run):
    ended = surviving_trained(run)[3]
    lists = (
        "completion_ids",
        "completion_text",
        "loss_mask",
        "logprobs",
        "versions",
        "finish_reason",
        "reward",
        "advantage",
        "status",
        "reward_parts",
    )

    def cut(rows):
        return [
            (
                {**row, **{name: row[name][:1] for name in lists}}
                if row["ordinal"] == ended["ordinal"]
                else row
            )
            for row in rows
        ]

    change(run, "groups", cut)
    checks = checks_of(run)
    assert (
        not checks["trained groups are whole"].passed
        and not checks["trained tokens equal the learner's count"].passed
    )


def test_a_token_without_its_version(run):
    ended = surviving_trained(run)[3]

    change(
        run,
        "groups",
        in_row(
            ended["ordinal"],
            versions=lambda all_: [
                [{**span, "end": span["end"] - 1} for span in spans] for spans in all_
            ],
        ),
    )
    assert not checks_of(run)["trained groups are whole"].passed


def test_a_row_that_vanished(run):
    ended = surviving_trained(run)[3]
    change(run, "groups", lambda rows: [row for row in rows if row["ordinal"] != ended["ordinal"]])
    assert "without a row" in checks_of(run)["trained groups are whole"].summary


def test_a_learner_with_another_token_count(run):
    path = max((run / "checkpoints").glob("step_*")) / "learner" / "counters.json"
    path.write_text(json.dumps({"trained_tokens": 1}))
    manifest = path.parent.parent / "MANIFEST"
    from asyncrl.rundir.checkpoint import _checksum_of_text

    text = json.dumps(
        json.loads(manifest.read_text()) | {"learner/counters.json": size_and_checksum(path)}
    )
    manifest.write_text(text)
    (manifest.parent / "COMMITTED").write_text(str(_checksum_of_text(text)))
    assert not checks_of(run)["trained tokens equal the learner's count"].passed


def test_a_damaged_checkpoint_is_not_reported_as_missing(run):
    paths = sorted((run / "checkpoints").glob("step_*"))
    (paths[-1] / "COMMITTED").write_text("1")
    check = checks_of(run)["the newest checkpoint is whole"]
    assert not check.passed and f"{paths[-1].name} is damaged" in check.summary
    for path in paths:
        (path / "COMMITTED").write_text("1")
    checks = checks_of(run)
    assert not checks["the newest checkpoint is whole"].passed
    assert (
        not checks["trained tokens equal the learner's count"].passed
        and "no checkpoint can be read"
        in checks["trained tokens equal the learner's count"].summary
    )


def test_a_replica_that_went_back(run):
    last = max(row["ordinal"] for row in surviving_trained(run))
    change(
        run,
        "groups",
        lambda rows: [
            {**row, "finished_at": 1e6 * row["attempt"] - 9} if row["ordinal"] == last else row
            for row in rows
        ],
    )
    check = checks_of(run)["versions of a replica never go back"]
    assert not check.passed and "went back for" in check.summary


def test_training_that_prefers_short_completions(run):
    short = {ended["ordinal"] for ended in surviving_trained(run) if tokens(ended["ordinal"]) < 9}
    change(
        run,
        "outcomes",
        lambda rows: [
            (
                row
                if row["ordinal"] in short or row["outcome"] != "trained"
                else {**row, "outcome": "dropped"}
            )
            for row in rows
        ],
    )
    assert not checks_of(run)["trained lengths match generated lengths"].passed


def test_sessions_that_sampled_nothing_have_no_length(run):
    """As those of an agent that could not start, whose groups are dropped."""
    empty = {ended["ordinal"] for ended in surviving_trained(run) if ended["ordinal"] % 3}
    change(
        run,
        "outcomes",
        lambda rows: [
            {**row, "outcome": "dropped"} if row["ordinal"] in empty else row for row in rows
        ],
    )
    columns = ("completion_ids", "loss_mask", "logprobs", "versions")
    for ordinal in empty:
        change(
            run,
            "groups",
            in_row(ordinal, **dict.fromkeys(columns, lambda lists: [[] for _ in lists])),
        )
    check = checks_of(run)["trained lengths match generated lengths"]
    assert check.passed and ", 0, " not in check.summary, check.summary


def test_a_run_without_a_record_is_refused(tmp_path, capsys, no_threads):
    attempt(tmp_path, 3, None)
    (tmp_path / "run" / "run.json").write_text('{"run_id": "x", "attempts": 2}')
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(tmp_path / "run")])
    assert ended.value.code == 2 and "older asyncrl" in capsys.readouterr().err


def test_a_smaller_bound_on_resume(tmp_path, no_threads):
    attempt(tmp_path, 12, 3.0)
    assert attempt(tmp_path, 12, None, staleness={"max_staleness": 1}) == 12
    checks = list(checks_of(tmp_path / "run").values())
    assert all(check.passed for check in checks), audit_text(checks)
