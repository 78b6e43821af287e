"""Recorded sessions are replayed against their environment, in a real environment process."""

from __future__ import annotations

import asyncio
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from chat_families import CHATML, save_chat_model
from scripted_sessions import scored_table

from asyncrl.cli import main
from asyncrl.config import Config, ConfigError
from asyncrl.contracts.messages import Generated
from asyncrl.contracts.rows import Completion, Group, Prompt, VersionSpan
from asyncrl.preflight.specs import sessions_spec
from asyncrl.rewards.files import write_groups
from asyncrl.rollout.session_groups import Played, Sessions
from asyncrl.run.replay import replay_sessions
from asyncrl.rundir.reader import Run, open_run
from asyncrl.sessions.session import TurnRequest
from asyncrl.text.tokenizer import load_tokenizer
from jobs.guess.task import make_model

ORDINAL = 7
COLUMNS = {"question": "what is 3+4", "sleeps": 60.0}
TALK = """
    async def solve(task, model):
        messages = [{"role": "user", "content": task["question"]}]
        for word in ("higher", "lower"):
            answer = await model.chat.completions.create(messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": word}]
        answer = await model.chat.completions.create(messages=messages)
        return {"reward": float(len(answer.choices[0].message.content)), "asked": 3}
"""
BRANCHES = """
    import asyncio

    async def solve(task, model):
        messages = [{"role": "user", "content": task["question"]}]
        first = await model.chat.completions.create(messages=messages, n=3)
        again = await model.chat.completions.create(messages=messages)
        texts = [choice.message.content for choice in (*first.choices, *again.choices)]
        assert len(set(texts)) == 4, texts
        chosen = [*messages, first.choices[1].message, {"role": "user", "content": "why"}]
        forgotten = [{"role": "user", "content": "anew"}]
        both = await asyncio.gather(
            model.chat.completions.create(messages=chosen),
            model.chat.completions.create(messages=forgotten),
        )
        texts += [one.choices[0].message.content for one in both]
        return float(sum(map(int, texts)))
"""
RAISES = """
    async def solve(task, model):
        messages = [{"role": "user", "content": task["question"]}]
        await model.chat.completions.create(messages=messages)
        raise KeyError("no such thing")
"""
HANGS = """
    import asyncio

    async def solve(task, model):
        messages = [{"role": "user", "content": task["question"]}]
        await model.chat.completions.create(messages=messages)
        await asyncio.sleep(task["sleeps"])
        await model.chat.completions.create(messages=messages)
        return 1.0
"""


RECORDS: dict[tuple[str, int, str, str], bytes] = {}
"""Source of an environment, samples, columns and settings → the file of its group."""


class Recorded:
    """A run directory whose environment is a module in a folder of its own."""

    def __init__(self, folder: Path, model: str | None = None) -> None:
        self.folder, self.model = folder, model or save_chat_model(folder / "model", CHATML)
        self.directory = folder / "runs" / "run"
        self.tokenizer: Any = load_tokenizer(self.model)
        self.answers = 0
        self.text: Callable[[int], str] = str
        """The text of the answer with this number."""

    def write(self, source: str) -> None:
        (self.folder / "recorded_env.py").write_text(textwrap.dedent(source))

    def config(self, **environment: Any) -> Config:
        return Config.model_validate(
            {
                "name": "run",
                "max_steps": 1,
                "runs_root": str(self.folder / "runs"),
                "model": {"path": self.model},
                "data": {"train": "unused", "max_length": 400},
                "environment": {"function": "recorded_env:solve", "processes": 1, **environment},
                "rollout": {"n_samples_per_prompt": 2, "max_completion_length": 12},
            }
        )

    async def generate(self, request: TurnRequest, seed: int, *_: object) -> Generated:
        """Another number in each answer."""
        end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        completions = []
        for _ in range(request.n):
            self.answers += 1
            text = self.text(self.answers)
            ids = (*self.tokenizer.encode(text, add_special_tokens=False), end)
            spans = (VersionSpan(self.answers, 0, len(ids)),)
            completions.append(Completion(ids, (-0.5,) * len(ids), spans, "stop", text))
        return Generated(tuple(completions), "fake", 1.0, 2.0)

    def record(
        self,
        source: str,
        samples: int = 2,
        columns: Mapping[str, object] = COLUMNS,
        **environment: Any,
    ) -> Run:
        """Record one group of sessions of this environment. Equal ones are recorded once."""
        self.write(source)
        config = self.config(**environment)
        self.directory.mkdir(parents=True)
        (self.directory / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        path = self.directory / "groups" / "a.parquet"
        key = (source, samples, str(columns), str(environment))
        if key in RECORDS:
            path.parent.mkdir()
            path.write_bytes(RECORDS[key])
            return open_run(self.directory)
        spec = sessions_spec(config)
        assert spec is not None
        text = "what is 3+4"
        prompt = Prompt(ORDINAL, 0, text, tuple(self.tokenizer.encode(text)), columns)

        async def scenario() -> list[Played]:
            sessions = Sessions(spec, 0)
            try:
                return await sessions.play_all(prompt, range(samples), self.generate)
            finally:
                await sessions.close()

        played = asyncio.run(scenario())
        group = Group(2, prompt, tuple(one.trajectory() for one in played), "fake", 1.0, 2.0)
        write_groups(path, [scored_table(group, played)])
        RECORDS[key] = path.read_bytes()
        return open_run(self.directory)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return Recorded(tmp_path)


def test_a_session_is_replayed_with_the_recorded_answers(recorded: Recorded) -> None:
    sessions = replay_sessions(recorded.record(TALK), ORDINAL)
    assert [one.difference for one in sessions] == ["", ""]
    assert [(one.sample, one.turns, one.asked, one.attempt) for one in sessions] == [
        (0, 3, 3, 2),
        (1, 3, 3, 2),
    ]
    for one in sessions:
        assert one.replayed is not None and one.replayed.end == "done"
        assert one.replayed.reward == one.recorded.reward == 1.0
        assert one.replayed.parts == {"asked": 3.0}


def test_choices_branches_and_repeated_requests_are_replayed(recorded: Recorded) -> None:
    (one,) = replay_sessions(recorded.record(BRANCHES, samples=1), ORDINAL, 0)
    assert one.difference == "" and (one.turns, one.asked) == (6, 6)
    assert one.replayed is not None and one.replayed.reward == sum(range(1, 7))


LAST = "        return {"
CALL = "messages=messages)\n            mess"
CHANGES = {
    "a message": (
        '"higher", "lower"',
        '"higher", "right"',
        r"turn 3: the messages differ at token \d+: the record has '.*lower.*', and the .*right",
    ),
    "the reward": (
        "content)), ",
        "content)) + 1, ",
        "ends with done, reward 1.0, asked 3.0, and the replay with done, reward 2.0, asked 3.0",
    ),
    "a part": ('"asked": 3', '"asked": 4', "reward 1.0, asked 3.0, and .*reward 1.0, asked 4.0"),
    "fewer turns": ('"higher", "lower"', '"higher",', "did not ask for 1 of 3 recorded turns"),
    "more turns": (
        LAST,
        f"        await model.chat.completions.create(messages=messages)\n{LAST}",
        "turn 3: the environment asks for 1 more answers to the same messages|asks for turn 4, and",
    ),
    "more choices": (
        CALL,
        CALL.replace(")", ", n=2)"),
        "turn 1: the environment asks for 2 more answers to the same messages, and .* has 1",
    ),
    "a limit": (
        CALL,
        CALL.replace(")", ", max_tokens=1)"),
        "turn 1: the request allows 1 tokens, and the recorded answer has 2",
    ),
    "an error": (
        LAST,
        f"        raise ValueError('odd')\n{LAST}",
        "and the replay with env_error, no reward, ValueError: odd",
    ),
}
"""What changes in the environment → the old text, the new text, and what a replay says."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_environment_is_found(recorded: Recorded, change: str) -> None:
    old, new, difference = CHANGES[change]
    run = recorded.record(TALK, samples=1)
    changed = TALK.replace(old, new)
    assert changed != TALK
    recorded.write(changed)
    (one,) = replay_sessions(run, ORDINAL)
    assert re.search(difference, one.difference), one.difference


def test_a_game_with_tool_calls_is_replayed(tmp_path: Path) -> None:
    make_model(tmp_path / "model", 0)
    recorded = Recorded(tmp_path, str(tmp_path / "model"))

    call = '<tool_call>{"name": "guess", "arguments": {"number": %d}}</tool_call>'
    recorded.text = lambda number: call % (20 + number)
    run = recorded.record("", 1, {"low": 20, "hidden": 24}, function="jobs.guess.game:play")
    (one,) = replay_sessions(run, ORDINAL)
    assert one.difference == "" and one.turns == one.asked == 4
    assert one.replayed is not None and one.replayed.parts == {"won": 1.0}


def test_an_error_is_replayed_and_its_repair_is_found(recorded: Recorded) -> None:
    run = recorded.record(RAISES, samples=1)
    (one,) = replay_sessions(run, ORDINAL)
    assert one.recorded.end == "env_error" and one.difference == ""
    assert one.replayed is not None and "KeyError: 'no such thing'" in one.replayed.note
    recorded.write(RAISES.replace('raise KeyError("no such thing")', "return 1.0"))
    (one,) = replay_sessions(run, ORDINAL)
    assert "the record ends with env_error" in one.difference
    assert "and the replay with done, reward 1.0" in one.difference


def test_a_record_that_a_deadline_cut_off_is_replayed_as_far_as_it_goes(recorded: Recorded) -> None:
    run = recorded.record(HANGS, samples=1, deadline_s=1.5)
    (one,) = replay_sessions(run, ORDINAL)
    assert one.recorded.end == "deadline" and one.difference == "" and one.asked == 1
    recorded.write(HANGS.replace('task["sleeps"]', "0.0"))
    (one,) = replay_sessions(run, ORDINAL)
    assert one.difference == "" and one.replayed is None


def test_the_command_prints_each_session_and_fails_at_a_difference(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded.record(TALK)

    def command(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as left:
            main(["replay", str(recorded.directory), *arguments])
        out = capsys.readouterr()
        assert isinstance(left.value.code, int)
        return left.value.code, out.out + out.err

    code, text = command(str(ORDINAL))
    assert code == 0, text
    assert text.splitlines() == [
        *(
            f"prompt 7 (attempt 2), session {sample}: 3 turns as recorded, ends with done, reward"
            " 1.0, asked 3.0"
            for sample in (0, 1)
        ),
        "2 replayed, 0 differ from the record",
    ]
    recorded.write(TALK.replace("higher", "\x1b[1mhigh"))
    code, text = command(str(ORDINAL), "--sample", "1")
    assert code == 1 and "session 1: DIFFERS: turn 2: the messages differ at token" in text
    assert "1 replayed, 1 differ" in text and "\x1b" not in text
    for arguments, message in (
        (("8",), "has no group 8; groups/ has 7 to 7"),
        ((str(2**63),), "give a whole number from 0 to 2**63 - 1"),
        (("7", "--attempt", str(2**63)), "give a whole number from 0 to 2**63 - 1"),
        ((str(ORDINAL), "--attempt", "1"), "no group 7 of attempt 1"),
        ((str(ORDINAL), "--sample", "2"), "--sample = 2: group 7 has the sessions 0 to 1"),
    ):
        code, text = command(*arguments)
        assert code == 2 and message in text
    recorded.write("import no_such_module")
    code, text = command(str(ORDINAL))
    assert code == 2 and "no_such_module" in text


def test_a_run_without_sessions_is_refused(recorded: Recorded) -> None:
    run = recorded.record(TALK)
    path = run.directory / "config.yaml"
    tree = yaml.safe_load(path.read_text())
    path.write_text(
        yaml.safe_dump(
            {
                **tree,
                "environment": None,
                "reward": {"functions": {"f": {"function": "m:f"}}},
            }
        )
    )
    with pytest.raises(ConfigError, match="is a run without an environment"):
        replay_sessions(open_run(run.directory), ORDINAL)


def without(run: Run, *columns: str) -> Run:
    """The run, as if these columns had never been written."""
    path = run.directory / "groups" / "a.parquet"
    pq.write_table(pq.read_table(path).drop_columns(list(columns)), path)
    return open_run(run.directory)


def test_a_run_of_an_earlier_version_is_named_as_such(recorded: Recorded) -> None:
    run = without(recorded.record(TALK), "turn_request_hash", "session_parts")
    with pytest.raises(ConfigError) as refused:
        replay_sessions(run, ORDINAL)
    assert str(refused.value).endswith(
        "group 7 was recorded by an earlier version of asyncrl, and lacks the column"
        " turn_request_hash, session_parts; replay it with that version, or a session of a newer"
        " run"
    )
    with pytest.raises(ConfigError, match="no column session_end, so its trajectories are no sess"):
        replay_sessions(without(run, "session_end"), ORDINAL)


def test_columns_that_a_replay_does_not_read_may_be_missing(recorded: Recorded) -> None:
    unread = (
        "turn_reward",
        "session_cached",
        "session_reusable",
        "session_output",
        "session_model_s",
    )
    run = without(recorded.record(TALK), *unread)
    assert [one.difference for one in replay_sessions(run, ORDINAL)] == ["", ""]


DAMAGE: Mapping[str, tuple[str, object, str]] = {
    "parts no JSON": ("session_parts", ["{nope"], "Expecting property name"),
    "parts a list": ("session_parts", ["[1]"], "session_parts is no JSON object for session 0"),
    "parts null": ("session_parts", [None], "JSON object must be str"),
    "end null": ("session_end", [None], "session_end is None for session 0"),
    "no end": ("session_end", [], "list index out of range"),
    "many tokens": ("turn_tokens", [10**6, 1, 1], "turns of 1000002 tokens have"),
    "negative tokens": ("turn_tokens", [-1, 1, 1], "turns of 1 tokens have"),
    "null tokens": ("turn_tokens", [None, 1, 1], ""),
    "null context": ("turn_context", [None, [1], [1]], "turn_context is null for a turn"),
    "null in context": ("turn_context", [[None], [1], [1]], "a turn has the token None"),
    "negative context": ("turn_context", [[-1], [1], [1]], "a turn has the token -1"),
    "null finish": ("turn_finish_reason", ["stop", None, "stop"], "turn_finish_reason is null"),
    "a turn's parent": ("turn_parent", [0, 0, 1], "turn 0 continues turn 0, which is not an"),
}
"""What is damaged → the column, its value, and what is said."""


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_row_is_refused_in_one_line(recorded: Recorded, damage: str) -> None:
    column, value, why = DAMAGE[damage]
    run = recorded.record(TALK, samples=1)
    path = run.directory / "groups" / "a.parquet"
    table = pq.read_table(path)
    index = table.column_names.index(column)
    field = table.schema.field(index)
    pq.write_table(table.set_column(index, field, pa.array([value], field.type)), path)
    with pytest.raises(ConfigError) as refused:
        replay_sessions(open_run(run.directory), ORDINAL)
    text = str(refused.value)
    assert text.startswith("group 7: its columns are damaged (") and why in text
    assert text.endswith("); restore the file") and "\n" not in text
