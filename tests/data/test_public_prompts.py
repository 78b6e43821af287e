"""Prompts of a run with generators, and targets of its warm start, as public sets write them."""

import json
from dataclasses import replace

import pytest
from chat_families import CHATML, TOOLS

from asyncrl.config import ConfigError, WarmStartConfig
from asyncrl.data.prompts import check_prompts, read_prompts
from asyncrl.data.supervised import read_supervised
from asyncrl.preflight.specs import data_spec

MOOD = "{{ mood | default('') }}" + CHATML
ASK = {"role": "user", "content": "3+4?"}
SAID = {"role": "assistant", "content": "7"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
START = "<|im_start|>assistant\n"


@pytest.fixture
def spec(prompt_config, chat_model):
    """`spec(rows, template, **data)`: the spec of a run with these prompts."""

    def make(rows, template=CHATML, **data):
        sections = {"model": {"path": chat_model(template)}}
        return data_spec(prompt_config(rows, sections, max_prompt_length=400, **data))

    return make


@pytest.fixture
def texts(spec):
    """`texts(rows, template, **data)`: the prompts as the model sees them."""

    def read(rows, template=CHATML, **data):
        made = spec(rows, template, **data)
        return [prompt.text for prompt in read_prompts(made.data.train, made)]

    return read


def test_a_prompt_that_begins_the_answer_is_continued(texts, spec):
    rows = [{"prompt": [ASK, {"role": "assistant", "content": "The sum is"}]}]
    (text,) = texts(rows)
    assert check_prompts(spec(rows)).notes == (
        "1 of 1 prompts end with a message of the assistant: the model continues it",
    )
    assert text == f"<|im_start|>user\n3+4?<|im_end|>\n{START}The sum is"


@pytest.mark.parametrize("column", ["instruction", "input"])
def test_the_other_half_of_an_alpaca_prompt_is_not_left_out_in_silence(spec, tmp_path, column):
    row = {"instruction": "Add", "input": "3 and 4", "answer": "7"}
    other = {"instruction": "input", "input": "instruction"}[column]
    with pytest.raises(ConfigError, match=f"has a column '{other}', and no prompt shows it"):
        check_prompts(spec([row], prompt_column=column))
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    source = [{"path": str(tmp_path / "a.jsonl"), "prompt_column": column}]
    with pytest.raises(ConfigError, match=f"has a column '{other}', and no prompt shows it"):
        check_prompts(spec([row], train=source))
    for rows, more in ([row], {"unused_keys": "drop"}), ([{**row, other: ""}], {}):
        report = check_prompts(spec(rows, prompt_column=column, **more))
        assert report.columns == tuple(name for name in row if name != column)


def test_chats_as_json_text_are_chats_for_the_model_and_the_reward(texts, spec):
    chats = [[ASK], [{"from": "human", "value": "3+4?"}], [{"role": "Human", "content": "3+4?"}]]
    rows = [{"prompt": json.dumps(chat)} for chat in chats] + [{"prompt": "3+4?"}]
    asked = f"<|im_start|>user\n3+4?<|im_end|>\n{START}"
    assert texts(rows) == [asked] * 3 + ["3+4?"]
    made = spec(rows)
    prompts = read_prompts(made.data.train, made)
    assert [prompt.columns["messages"] for prompt in prompts] == [*chats, None]
    with pytest.raises(ConfigError, match=r"row 1: its prompt .* begins like a chat, and is not"):
        check_prompts(spec([{"prompt": "3+4?"}, {"prompt": str([ASK])}]))


@pytest.mark.parametrize(
    "encode",
    [
        lambda chat: json.dumps(json.dumps(chat)),
        lambda chat: json.dumps(json.dumps(json.dumps(chat, indent=1))),
        lambda chat: json.dumps([json.dumps(one) for one in chat]),
        lambda chat: f"\ufeff{json.dumps(chat)}",
        lambda chat: f"\n\u00a0 {json.dumps(chat)}\u3000",
    ],
    ids=["twice", "three times", "each message", "byte order mark", "spaces"],
)
def test_a_chat_is_a_chat_however_its_json_is_wrapped(texts, encode):
    assert texts([{"prompt": encode([ASK])}]) == texts([{"prompt": [ASK]}])


@pytest.mark.parametrize(
    "text",
    [
        '{"role": "user", "content": "hi"} What is this JSON?',
        '{"from": "user", "to": "bot"\nComplete the object.',
        '[{"role": "user", "content": "hi"}]\nSummarize this chat.',
        "[{'role': 'user', 'content': 'it]'}] is a list of Python.",
        '[{"name": "Ann", "role": "user"}, {"name": ',
        '"{\\"role\\": \\"admin\\"}"',
        '"Quoted" {"role": "user"}',
    ],
)
def test_a_text_about_json_is_a_text(texts, text):
    assert texts([{"prompt": text}]) == [text]


@pytest.mark.parametrize("encoded", [json.dumps, lambda chat: json.dumps(json.dumps(chat))])
@pytest.mark.parametrize("cut", [-1, -2, -4, 40])
def test_a_chat_that_was_cut_is_refused(spec, cut, encoded):
    text = encoded([ASK, SAID])[:cut]
    with pytest.raises(ConfigError, match=r"row 0: its prompt .* begins like a chat, and is not"):
        check_prompts(spec([{"prompt": text}]))


def test_a_rows_own_variables_and_tools_reach_the_text(texts, spec):
    rows = [{"prompt": [ASK]}, {"prompt": [ASK], "chat_template_kwargs": {"mood": "glad"}}]
    plain, glad = texts(rows, MOOD)
    assert glad == f"glad{plain}"
    with pytest.raises(ConfigError, match="row 1: its chat_template_kwargs have 'mood', which"):
        check_prompts(spec(rows))
    rows = [{"prompt": [ASK]}, {"prompt": [ASK], "tools": [ADD]}]
    with pytest.raises(ConfigError, match=r"a column .tools., which no prompt shows; set data"):
        check_prompts(spec(rows, TOOLS))
    assert '"name": "add"' in texts(rows, TOOLS, tools_column="tools")[1]
    with pytest.raises(ConfigError, match=r"row 1: its tools have 'tools' \('add'\), which the"):
        check_prompts(spec(rows, tools_column="tools"))


@pytest.mark.parametrize("column", ["images", "image", "audio", "videos"])
def test_a_column_of_media_is_refused(spec, column):
    rows = [{"prompt": "a <image>"}, {"prompt": "b", column: ["x.png"]}]
    with pytest.raises(ConfigError, match=f"has a column '{column}', and only text reaches the"):
        check_prompts(spec(rows))
    assert check_prompts(spec(rows, unused_keys="drop")).rows == 2


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([ASK, {**SAID, "weight": 1}, ASK], "message 1 is marked as trained by 'weight', and no"),
        ([ASK, {**SAID, "weight": 0.5}, ASK], "message 1 has weight = 0.5; a turn is trained or"),
        ([{**ASK, "name": "Ann"}], "message 0 has 'name', which the chat template does not write"),
        ([ASK, {**SAID, "reasoning_content": "x"}, ASK], "message 1 has 'reasoning_content'"),
        ([{"role": "critic", "content": "x"}], "message 0 has the role 'critic', which the chat"),
        (
            [ASK, {**SAID, "content": "", "tool_calls": [{"function": {"name": "add"}}]}],
            "message 1 has 'tool_calls'",
        ),
    ],
)
def test_what_no_prompt_can_keep_is_refused_with_its_row(spec, chat, message):
    with pytest.raises(ConfigError, match=f"row 1: .*{message}"):
        check_prompts(spec([{"prompt": [ASK]}, {"prompt": chat}]))


def test_turns_of_a_prompt_that_are_marked_as_not_trained_are_as_said(texts):
    marked = [ASK, {**SAID, "weight": 0}, ASK]
    assert texts([{"prompt": marked}]) == texts([{"prompt": [ASK, SAID, ASK]}])


def test_dropped_keys_are_counted_once(spec):
    rows = [{"prompt": [{**ASK, "name": "Ann"}]}] * 3
    report = check_prompts(spec(rows, unused_keys="drop"))
    assert "left out of chats: 'name' (3 times)" in report.notes


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("3+4=7", "row 1 has a target that begins with its prompt, which would be trained twice"),
        (json.dumps([SAID]), "row 1 has the target .*, which is no text"),
        ([SAID], "row 1 has the target .*, which is no text"),
    ],
)
def test_targets_that_would_train_something_else_are_refused(spec, tmp_path, target, message):
    rows = [{"prompt": "3+4=", "answer": "7"}, {"prompt": "3+4=", "answer": target}]
    (tmp_path / "w.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = str(tmp_path / "w.jsonl")
    with pytest.raises(ConfigError, match=message):
        read_supervised(
            replace(spec(rows), warm_start=WarmStartConfig(data=path)), path, "warm_start.data"
        )
