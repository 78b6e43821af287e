"""How model output is shown: without the shared text, as whole samples, and without control
characters."""

import io
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from small_run import write_small_run
from unprivileged import without_permission

from asyncrl.cli import main
from asyncrl.contracts.group_table import groups_from_table, groups_to_table
from asyncrl.contracts.messages import TrajectoryText
from asyncrl.contracts.rows import Baseline, Completion, VersionSpan
from asyncrl.control.bookkeeping import BatchExample
from asyncrl.observe.live import Live
from asyncrl.observe.progress import Progress, ProgressView, table
from asyncrl.observe.samples import samples_text
from asyncrl.observe.shared_text import SharedText
from asyncrl.preflight.specs import observe_spec
from asyncrl.rundir.reader import open_run
from asyncrl.runtime.files.parquet import read_table, write_table

ADVICE = (
    "step 7: kl_k3 = 3.2 is outside 0 to 0.1: lower staleness.max_staleness or"
    " learner.learning_rate, then look at the run again, and begin a new one"
)


def shared(*prompts):
    found = SharedText()
    for prompt in prompts:
        found.add(prompt)
    return [found.without(prompt) for prompt in prompts]


def test_a_prompt_is_shown_without_what_all_prompts_share():
    assert shared("Solve: 12 + 3 = ?\nAnswer:", "Solve: 14 + 5 = ?\nAnswer:") == [
        "…12 + 3…",
        "…14 + 5…",
    ]
    assert shared("<|user|>-12<|end|>", "<|user|>-15<|end|>") == [
        "…-12…",
        "…-15…",
    ], "numbers are not cut"
    assert shared("only one") == ["only one"]
    assert shared("one", "one") == ["one", "one"]
    assert shared("nothing", "alike") == ["nothing", "alike"]
    assert shared("", "a") == ["", "a"]
    assert shared("a b", "a b c") == ["…b", "…b c"]


def screen(progress, width, height):
    from rich.console import Console

    console = Console(width=width, height=height, file=io.StringIO(), record=True)
    console.print(table(progress))
    return console.export_text().splitlines()


@pytest.mark.parametrize(("width", "height"), [(60, 24), (80, 24), (120, 40), (200, 50)])
def test_the_table_is_as_wide_as_the_terminal_and_shows_whole_notes(width, height):
    sample = {
        "prompt": "\N{CJK UNIFIED IDEOGRAPH-4F60}" * 400,
        "completion": "x\x1b[2J\u202e\n" * 400,
        "sample_reward": 1.5,
        "sample_parts": {"f": 1.0, "g": None},
    }
    progress = Progress(
        "training",
        step=3,
        max_steps=9,
        reward=0.5,
        reward_parts={"f": 0.25, "g": 0.75},
        notes=(ADVICE, ADVICE),
        **sample,
    )
    lines = screen(progress, width, height)
    assert max(map(len, lines)) <= width and len(lines[0]) == width and len(lines) < height
    text = " ".join(" ".join(line.strip("│ ") for line in lines).split())
    assert (
        text.count(ADVICE) == 2
        and "0.500 (f 0.25, g 0.75)" in text
        and "1.500 (f 1, g none)" in text
    )
    assert "\x1b" not in text and "\u202e" not in text
    assert screen(Progress("starting", elapsed_s=3), width, height)[1].strip("│ ") == "elapsed  3s"


def test_a_log_shows_samples_at_intervals_and_every_note_once():
    stream, sample = (
        io.StringIO(),
        {
            "prompt": "…1 + 1…",
            "completion": "2\x1b[2J\nok",
            "sample_reward": 1.0,
        },
    )
    with ProgressView(interval_s=0.0, sample_every_s=3600, stream=stream) as view:
        view.show(Progress("training", notes=(ADVICE,), **sample))
        view.show(Progress("training", notes=(ADVICE, "another"), **sample))
    assert stream.getvalue().splitlines() == [
        "0s | training",
        f"  note: {ADVICE}",
        "  sample: …1 + 1… → 2�[2J⏎ok   reward 1.000",
        "0s | training",
        "  note: another",
    ]


def test_the_live_table_shows_the_last_batch():
    from small_config import small_config

    live = Live(observe_spec(small_config()), 0.0)
    batch = (
        BatchExample(TrajectoryText("Add 1 now", "2", 0.5, {"f": 0.5}, 3), 1, 0),
        BatchExample(TrajectoryText("Add 7 now", "9", 1.0, {"f": 1.0}, 3), 1, 1),
    )
    live._show_sample(batch)
    live.recorded("step", 4, {"reward/f": 0.75})
    shown = live.progress
    assert (shown.prompt, shown.completion, shown.sample_reward, shown.reward_parts) == (
        "…1…",
        "2",
        0.5,
        {"f": 0.75},
    )


def test_no_part_of_a_secret_counts_as_shared_text(monkeypatch):
    from small_config import small_config

    monkeypatch.setenv("JUDGE_API_KEY", "correct horse battery")
    live = Live(observe_spec(small_config()), 0.0)
    live._show_sample(
        [
            BatchExample(TrajectoryText(f"say correct horse {end}", "2", 0.5, {}, 3), 1, 0)
            for end in ("battery", "radish")
        ]
    )
    assert "battery" not in live.progress.prompt and "redacted" in live.progress.prompt


def test_the_command_shows_whole_samples(tmp_path, capsys):
    run = write_small_run(tmp_path / "run")

    def command(*options):
        with pytest.raises(SystemExit) as ended:
            main(["samples", str(run), *options])
        return ended.value.code, capsys.readouterr()

    code, out = command("-n", "2", "--order", "worst")
    assert (
        code == 0
        and out.out.count("completion:") == 2
        and "reward 0 (exact 0, scorer 0.25)" in out.out
        and "  │ 99" in out.out
    )
    assert "versions 0 to 1" in out.out and "staleness" in out.out
    assert "trained by step 1\n" in out.out and "advantage -1\n" in out.out
    assert "report.html#/step/1/group/2/1\n" in out.out
    code, out = command("-n", "1", "--version", "3")
    assert code == 0 and "version 3," in out.out and "not trained yet" in out.out
    code, out = command("--version", "77")
    assert code == 2 and "no completions of version 77" in out.err
    assert command("-n", "0")[0] == 2


def test_a_run_without_groups_is_refused(tmp_path, capsys):
    run = write_small_run(tmp_path / "run")
    for path in (run / "groups").iterdir():
        path.unlink()
    with pytest.raises(SystemExit) as ended:
        main(["samples", str(run)])
    assert ended.value.code == 2 and "contains no completions yet" in capsys.readouterr().err


def test_model_output_cannot_look_like_lines_of_asyncrl(tmp_path):
    row = open_run(write_small_run(tmp_path / "run")).trajectories().slice(0, 1).to_pylist()[0]
    text = samples_text(
        [
            {
                **row,
                "completion": "a\n── prompt 1\x1b]0;t\x07\r\u202e",
                "reward": None,
                "staleness": None,
                "outcome": None,
            }
        ]
    )
    assert "\n  │ ── prompt 1�]0;t���" in text and not set(text) & set("\x1b\x07\r\u202e")


def test_a_sample_shows_the_reward_of_the_greedy_completion(tmp_path):
    """Of each trajectory of a group with a baseline, whose own columns stay out of the way."""
    greedy = Completion((8, 2), (-0.1, -0.2), (VersionSpan(0, 0, 2),), "stop", "5")
    path, rows = write_small_run(tmp_path / "run") / "groups", []
    for file in sorted(path.glob("*.parquet")):
        rows += groups_from_table(read_table(file))
        file.unlink()
    baseline = Baseline(greedy, 0.25, {"exact": 0.25, "scorer": 0.0})
    table = groups_to_table([replace(row, baseline=baseline) for row in rows])
    write_table(table, path / "attempt_0000-00000000.parquet")
    shown = open_run(tmp_path / "run").trajectories()
    assert len(shown) == 2 * len(rows) and set(shown["baseline_reward"].to_pylist()) == {0.25}
    text = samples_text(shown.slice(0, 1).to_pylist())
    assert "── reward 1 (exact 1, scorer 1), greedy completion 0.25, advantage 1\n" in text


def damage(file):
    file.write_bytes(file.read_bytes()[:100])


def replace_by_directory(file):
    file.unlink()
    file.mkdir()


def replace_by_loop(file):
    file.unlink()
    file.symlink_to(file)


@pytest.mark.parametrize(
    ("spoil", "end"),
    [
        (damage, "; restore the file, or move it away\n"),
        (replace_by_directory, " is a directory, not a file; remove it\n"),
        (replace_by_loop, ": Too many levels of symbolic links\n"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(tmp_path, capsys, spoil, end):
    run = write_small_run(tmp_path / "run")
    damaged = next((run / "groups").iterdir())
    spoil(damaged)
    with pytest.raises(SystemExit) as ended:
        main(["samples", str(run)])
    error = capsys.readouterr().err
    assert (
        ended.value.code == 2
        and error.startswith(f"asyncrl: {damaged}")
        and error.endswith(end)
        and error.count("\n") == 1
    )


def test_a_reader_that_leaves_early_costs_no_traceback(tmp_path):
    run = write_small_run(tmp_path / "run")
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl.cli", "samples", run],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_session_is_shown_with_all_its_messages():
    row = {
        "ordinal": 3,
        "index": 0,
        "oldest_version": 1,
        "newest_version": 2,
        "staleness": 1,
        "tokens": 14,
        "finish_reason": "stop",
        "status": "env_error",
        "outcome": None,
        "reward": None,
        "prompt_text": "1..9",
        "completion": "",
        "session_messages": '[{"role": "user", "content": "1..9"}, {"role": "assistant",'
        ' "content": "\\u001b[31m5"}]',
        "session_end": "env_error",
        "session_note": "KeyError: 'x'",
    }
    text = samples_text([row])
    assert "session, which ended: env_error\n  │ user: 1..9\n  │ assistant: " in text
    assert "note:\n  │ KeyError: 'x'" in text
    assert "\x1b" not in text


def test_a_run_without_permission_is_named(tmp_path, capsys):
    run = write_small_run(tmp_path / "run")
    with without_permission(run), pytest.raises(SystemExit) as ended:
        main(["samples", str(run)])
    message = capsys.readouterr().err
    assert ended.value.code == 2 and f"asyncrl: {run}" in message
    assert "Permission denied; give this user permission" in message
