"""The HTML page of a run: its values, its safety, and what it chooses and says."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from page_values import values_of
from small_run import small_group, write_small_run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import asyncrl
from asyncrl.cli import main
from asyncrl.contracts.group_table import groups_to_table
from asyncrl.page.chosen import EXTREMES, Row, choose
from asyncrl.page.contents import MOST_REASONS, _learner, _lost
from asyncrl.page.pieces import Pieces
from asyncrl.page.report import MODULES, STATIC, html, script, write_report
from asyncrl.page.verdict import verdict
from asyncrl.rundir.reader import Status

HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\x00\ud83d"


@pytest.fixture
def small_run(tmp_path: Path) -> Path:
    return write_small_run(tmp_path / "runs" / "small")


def page_of(run: Path) -> str:
    write_report(asyncrl.open_run(run), run / "page.html")
    return (run / "page.html").read_text()


def test_the_page_has_the_numbers_of_the_files(small_run: Path) -> None:
    """Compared with the Parquet files themselves."""
    found = values_of(page_of(small_run))
    groups = found["groups"]
    rows = {
        row["ordinal"]: row
        for path in (small_run / "groups").glob("*.parquet")
        for row in pq.read_table(path).to_pylist()
    }
    ends = {
        row["ordinal"]: row
        for path in (small_run / "outcomes").glob("*.parquet")
        for row in pq.read_table(path).to_pylist()
    }
    trained = {
        (row["ordinal"], row["index"]): row
        for path in (small_run / "trained").glob("*.parquet")
        for row in pq.read_table(path).to_pylist()
    }
    assert sorted(groups["ordinal"]) == sorted(rows)
    for place, ordinal in enumerate(groups["ordinal"]):
        row, end = rows[ordinal], ends.get(ordinal, {})
        assert groups["reward"][place] == pytest.approx(sum(row["reward"]) / len(row["reward"]))
        assert groups["tokens"][place] == sum(map(len, row["completion_ids"]))
        assert groups["staleness"][place] == end.get("staleness")
        assert groups["step"][place] == end.get("step")
        assert groups["outcome"][place] == end.get("outcome", "waiting")
        detail = found["details"][groups["detail"][place]]
        assert detail["prompt"] == row["prompt_text"]
        for index, trajectory in enumerate(detail["trajectories"]):
            assert trajectory["text"] == row["completion_text"][index]
            assert len(trajectory["pieces"]) == len(row["completion_ids"][index])
            assert trajectory["logprobs"] == pytest.approx(row["logprobs"][index], abs=1e-4)
            assert trajectory["versions"] == [
                [span["version"], span["start"], span["end"]] for span in row["versions"][index]
            ]
            learner, mine = trajectory["learner"], trained.get((ordinal, index))
            assert (learner is None) == (mine is None) == (end.get("outcome") != "trained")
            if learner is not None and mine is not None:
                assert learner["logprobs"] == pytest.approx(mine["logprobs"], abs=1e-4)
                assert (learner["weights"], learner["advantages"]) == (
                    [1.25],
                    [row["advantage"][index]],
                )
                assert learner["clipped"] == [len(mine["logprobs"]) - 1] and learner["masked"] == []
    lost = {(one["outcome"], one["reason"]): one["groups"] for one in found["lost"]}
    assert sum(lost.values()) == len(ends)
    assert Counter(end["outcome"] for end in ends.values())["dropped"] == sum(
        count for (outcome, _), count in lost.items() if outcome == "dropped"
    )


def test_only_the_scripts_of_the_page_may_run(small_run: Path) -> None:
    page = page_of(small_run)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy and "http" not in policy
    scripts = re.findall(r"<script(?: type=\"module\")?>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 2
    for text in scripts:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_text_of_a_run_never_becomes_html(small_run: Path, tmp_path: Path) -> None:
    group = small_group(200, version=1)
    group = replace(group, prompt=replace(group.prompt, text=HOSTILE.replace("\ud83d", "")))
    path = small_run / "groups" / "hostile.parquet"
    known = pq.read_table(next((small_run / "groups").glob("*.parquet"))).schema
    table = groups_to_table([group])
    for name in known.names:
        if name not in table.column_names:
            table = table.append_column(name, pa.nulls(1, known.field(name).type))
    pq.write_table(table, path)
    page = page_of(small_run)
    assert "<img src=x" not in page
    found = values_of(page)
    place = found["groups"]["ordinal"].index(200)
    assert found["details"][found["groups"]["detail"][place]]["prompt"].startswith("</script>")
    code = script()
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "http"):
        assert way not in code, way


def test_text_that_is_no_unicode_can_be_written() -> None:
    assert values_of(html({"title": HOSTILE}))["title"].startswith("</script>")


def test_the_names_of_the_modules_do_not_collide() -> None:
    """They are one script."""
    defined: Counter[str] = Counter()
    for name in MODULES:
        text = (STATIC / f"{name}.js").read_text()
        defined.update(
            re.findall(r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", text, re.M)
        )
        for imported in re.findall(r"^import .* from \"\./(\w+)\.js\"", text, re.M):
            assert MODULES.index(imported) < MODULES.index(name)
    assert [name for name, count in defined.items() if count > 1] == []
    assert {path.stem for path in STATIC.glob("*.js")} == set(MODULES)
    assert not re.search(r"^(import|export) ", script(), re.M)


def test_a_run_without_groups_has_a_page(tmp_path: Path) -> None:
    run = write_small_run(tmp_path / "run")
    for folder in ("groups", "outcomes"):
        for path in (run / folder).glob("*.parquet"):
            path.unlink()
    found = values_of(page_of(run))
    assert found["groups"]["ordinal"] == [] and found["lost"] == []


def test_a_damaged_file_is_named_and_the_rest_is_shown(small_run: Path) -> None:
    whole = values_of(page_of(small_run))["groups"]["ordinal"]
    (small_run / "groups" / "torn.parquet").write_bytes(b"PAR1 torn")
    (small_run / "outcomes" / "empty.parquet").write_bytes(b"")
    with (small_run / "metrics.jsonl").open("a") as file:
        file.write('{"event": "st')
    found = values_of(page_of(small_run))
    assert found["groups"]["ordinal"] == whole
    assert [one.partition(":")[0] for one in found["damaged"]] == [
        "groups/torn.parquet",
        "outcomes/empty.parquet",
    ]


def test_the_command_writes_the_page(
    small_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, target in (([], small_run / "report.html"), (["--out"], tmp_path / "a" / "b.html")):
        with pytest.raises(SystemExit) as ended:
            main(["report", str(small_run), *more, *([str(target)] if more else [])])
        assert ended.value.code == 0
        assert str(target) in capsys.readouterr().out
        assert target.read_text().startswith("<!doctype html>")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "nothing")])
    assert ended.value.code == 2 and "is not a directory" in capsys.readouterr().err


def test_further_reasons_are_counted_and_a_group_is_named_with_its_attempt() -> None:
    table = pa.table(
        {
            "outcome": ["failed"] * (MOST_REASONS + 5) + ["trained"] * 9,
            "reason": [f"reason {n:03}" for n in range(MOST_REASONS + 5)] + [None] * 9,
            "attempt": [1] * (MOST_REASONS + 5) + [0] * 9,
            "ordinal": [*range(MOST_REASONS + 5), *range(9)],
        }
    )
    found = _lost(table, {(0, 3), (1, 2)})
    assert sum(one["groups"] for one in found) == MOST_REASONS + 14
    assert found[0] == {"outcome": "trained", "reason": "", "groups": 9, "first": (0, 3)}
    assert found[3]["first"] == (1, 2) and found[4]["first"] is None
    assert found[-1]["reason"].startswith("6 further reasons") and found[-1]["groups"] == 6


def test_a_damaged_tokenizer_leaves_numbers(small_run: Path) -> None:
    (small_run / "hf").mkdir()
    (small_run / "hf" / "tokenizer.json").write_text("{")
    found = values_of(page_of(small_run))
    assert "tokenizer was not found" in found["chosen"]
    assert found["details"][0]["trajectories"][0]["pieces"][0].startswith("[")


def test_groups_that_were_never_scored_are_shown(small_run: Path) -> None:
    for path in (small_run / "groups").glob("*.parquet"):
        table = pq.read_table(path)
        pq.write_table(table.drop_columns(["reward", "advantage", "status", "reward_parts"]), path)
    found = values_of(page_of(small_run))["groups"]
    assert set(found["reward"]) == {None} and len(found["ordinal"]) == 14


def rows(count: int, **changes: Any) -> list[Row]:
    row = Row(tokens=10, reward=0.5, outcome="trained", step=1, masked=False)
    return [replace(row, **changes) for _ in range(count)]


def test_what_matters_is_chosen_first_and_the_rest_evenly() -> None:
    many = rows(1000)
    many[7] = replace(many[7], outcome="dropped")
    many[13] = replace(many[13], masked=True)
    many[21] = replace(many[21], step=99)
    many[34] = replace(many[34], reward=2.0)
    many[55] = replace(many[55], reward=-1.0)
    found = choose(many, {99}, most_tokens=1000)
    assert {7, 13, 21, 34, 55} <= set(found)
    assert len(found) == 100 and found == sorted(found)
    others = [index for index in found if index >= 2 * EXTREMES]
    gaps = [after - before for before, after in pairwise(others)]
    assert max(gaps) < 60, "the others are spread over the run"
    assert choose(many[:50], set()) == [*range(50)]
    assert choose([], set()) == []


def test_pieces_of_tokens_join_to_the_text(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: index for index, one in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "a 🙂é b"
    ids = tokenizer.encode(text).ids
    pieces = Pieces(tmp_path)
    found = pieces.of(ids)
    assert len(found) == len(ids) and "".join(found) == text
    assert len(pieces.of([*ids[:1], 9_999, *ids[:1]])) == 3, "an id that the tokenizer lacks"
    unknown = Pieces(tmp_path / "missing")
    assert not unknown.known and unknown.of([3, 4]) == ["[3]", "[4]"]


def status(state: Any = "finished", cause: str = "") -> Status:
    return Status("step", 8, 8, 8, 8, 0.0, {}, state, cause)


def steps(count: int = 8, **changes: float) -> list[dict[str, Any]]:
    return [
        {
            "event": "step",
            "step": step,
            "reward/mean": 0.1 * step,
            "time/step_s": 1.0,
            "time/learner_waited_s": 0.0,
            "time/generators_waited_s": 0.0,
            **changes,
        }
        for step in range(1, count + 1)
    ]


@pytest.mark.parametrize(
    ("state", "records", "outcomes", "said"),
    [
        (status(), steps(), {"trained": 9}, ("Nothing went wrong", "It learns:", "Both sides are")),
        (
            status("failed", "out of memory"),
            steps(),
            {"trained": 9},
            ("The run failed at step 8: out of memory.", "It learns:", "Both"),
        ),
        (
            status("interrupted", "Ctrl-C"),
            steps(),
            {"trained": 9},
            ("The run was interrupted at step 8: Ctrl-C. Nothing went wrong", "It", "Both"),
        ),
        (
            status(),
            steps(**{"reward/mean": 1.0}),
            {"trained": 9},
            (
                "Nothing",
                "It does not learn: the mean reward went from 1 to 1, which is within the noise.",
                "Both",
            ),
        ),
        (
            status(),
            steps(**{"time/learner_waited_s": 3.0}),
            {"trained": 9},
            ("Nothing", "It", "The generators set the pace: the learner waits for them 75%"),
        ),
        (
            status(),
            [*steps(applied=0.0), {"event": "alarm", "step": 3, "alarm": "entropy is 0"}],
            {"trained": 6, "dropped": 2, "failed": 2},
            ("1 alarm, first at step 3: entropy is 0; 8 steps of the", "It", "Both"),
        ),
        (status("running"), [], {}, ("The run is at step 8 of 8. Nothing", "It has not")),
        (
            replace(status(), max_steps=0),
            [{"event": "evaluation", "step": 0, "eval/accuracy": 0.25}],
            {},
            ("Nothing", "It only evaluates. Held-out accuracy is 25.0%."),
        ),
        (
            status(),
            [*steps(**{"reward/mean": 1.0}), {"event": "evaluation", "eval/accuracy": 1.0}],
            {"trained": 9},
            ("Nothing", "It had nothing to learn: held-out accuracy was 100.0% before", "Both"),
        ),
        (
            status("interrupted"),
            [*steps(), *steps(2, applied=0.0), *steps(2)],
            {"trained": 9},
            ("The run was interrupted at step 8. Nothing went wrong", "It", "Both"),
        ),
        (
            status(),
            [*steps(), *({"event": "evaluation", "eval/loss": at} for at in (2.0, None))],
            {"trained": 9},
            ("Nothing", "It does not learn: the held-out loss was not a finite number.", "Both"),
        ),
        (
            status(),
            [*steps(4), *steps(**{"reward/mean": math.nan})],
            {"trained": 9},
            ("Nothing", "It has taken too few steps to tell", "Both"),
        ),
    ],
)
def test_three_sentences_say_how_a_run_is(
    state: Status,
    records: list[dict[str, Any]],
    outcomes: dict[str, int],
    said: tuple[str, ...],
) -> None:
    found = verdict(state, records, Counter(outcomes))
    for sentence, beginning in zip(found, said, strict=True):
        assert sentence.text.startswith(beginning), sentence
        assert sentence.text.endswith(".")


def test_what_is_no_number_is_no_neighbors_number() -> None:
    row = {
        "positions": None,
        "logprobs": [-1.0, math.nan, -3.0],
        "weights": [1.25, math.inf, 1.25],
        "advantages": [0.5, 0.5, 0.5],
        "clipped": [False] * 3,
        "masked": [False, True, False],
    }
    found = _learner([row], 3)
    assert found is not None and found["logprobs"] == [-1.0, "nan", -3.0]
    assert found["weights"] == [1.25, "inf", 1.25] and found["advantages"] == [0.5]
    assert (found["clipped"], found["masked"]) == ([], [1])


def test_the_page_knows_which_tokens_were_masked_as_stale(small_run: Path) -> None:
    assert values_of(page_of(small_run))["stale_above"] is None
    config = small_run / "config.yaml"
    config.write_text(config.read_text() + "staleness: {max_staleness: 1, on_stale: mask}\n")
    assert values_of(page_of(small_run))["stale_above"] == 1


def evaluations(*accuracies: float, prompts: int = 1000) -> list[dict[str, Any]]:
    return [
        {"event": "evaluation", "eval/accuracy": value, "eval/prompts": prompts}
        for value in accuracies
    ]


def rewards(*values: float) -> list[dict[str, Any]]:
    return [
        record | {"reward/mean": value}
        for record, value in zip(steps(len(values)), values, strict=True)
    ]


@pytest.mark.parametrize(
    ("records", "level", "said"),
    [
        (rewards(0.426, 0.406), "note", "It has taken too few steps to tell"),
        (rewards(0.40, 0.41), "note", "It has taken too few steps to tell"),
        (
            rewards(*[0.4, 0.5] * 20),
            "bad",
            "It does not learn: the mean reward went from 0.45 to 0.45, which is within the noise.",
        ),
        (
            rewards(*[0.6] * 10, *[0.3] * 10),
            "bad",
            "It does not learn: the mean reward went from 0.6 to 0.3.",
        ),
        (
            [*rewards(*[0.68] * 20, *[0.05] * 20), *evaluations(0.569, 0.92, 0.57)],
            "bad",
            "It learned at first, and then fell back: held-out accuracy went from 56.9% over 92.0%"
            " to 57.0% and the mean reward went from 0.68 to 0.05.",
        ),
        (
            [*rewards(*[0.2] * 20, *[0.9] * 20), *evaluations(0.5, 0.3)],
            "bad",
            "Its measures contradict each other: held-out accuracy went from 50.0% to 30.0%",
        ),
        (
            [*rewards(*[0.2] * 20, *[0.9] * 20), *evaluations(0.50, 0.52, prompts=60)],
            "good",
            "It learns: held-out accuracy went from 50.0% to 52.0% and the mean reward went",
        ),
        (
            evaluations(0.50, 0.52, prompts=60) + rewards(0.5),
            "bad",
            "It does not learn: held-out accuracy went from 50.0% to 52.0%, which is within",
        ),
        (
            rewards(*[0.1 + 0.02 * step for step in range(40)]),
            "good",
            "It learns: the mean reward went from 0.19 to 0.79.",
        ),
        (
            rewards(*[0.3] * 10, *[0.9] * 10, *[0.4] * 20),
            "bad",
            "It learned at first, and then fell back: the mean reward went from 0.3 over 0.9 to",
        ),
    ],
)
def test_noise_and_a_fall_are_no_progress(
    records: list[dict[str, Any]], level: str, said: str
) -> None:
    found = verdict(status(), records, Counter({"trained": 9}))[1]
    assert found.text.startswith(said) and found.level == level, found
