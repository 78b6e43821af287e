"""The forms of training data: recognized from columns, and what is refused."""

import json

import pyarrow as pa
import pytest
from small_config import offline_spec

from asyncrl.config import ConfigError, Source
from asyncrl.data.form_rows import Chat, MalformedError, ParsedRow, Text, rows_of
from asyncrl.data.forms import RECORDED, form_of

SPEC = offline_spec("unused")
SOURCE = Source(path="rows.jsonl")
ASK = {"role": "user", "content": "3+4"}
GOOD = {"role": "assistant", "content": "7"}
BAD = {"role": "assistant", "content": "8"}
TOOL = {"role": "tool", "content": "7"}
EMPTY = {"role": "assistant", "content": ""}


def form(columns, objective="sft", source=SOURCE, **fields):
    spec = offline_spec("unused", **fields)
    return form_of(columns, spec, source, objective, "data.train")


def first(objective="sft", spec=SPEC, **row):
    """The first row of a table with this row, or its reason for being malformed."""
    columns = {name: pa.array([value]) for name, value in row.items()}
    table = pa.table(columns)
    found = form_of(table.column_names, spec, SOURCE, objective, "data.train")
    (made,) = rows_of(table, found, spec, objective)
    return made.reason if isinstance(made, MalformedError) else made


@pytest.mark.parametrize(
    ("columns", "objective", "name", "used"),
    [
        (["text", "id"], "sft", "text", ["text"]),
        (["messages", "text"], "sft", "messages", ["messages"]),
        (["conversations"], "sft", "messages", ["conversations"]),
        (["prompt", "messages"], "sft", "messages", ["messages"]),
        (
            ["completion", "messages", "prompt"],
            "sft",
            "prompt-completion",
            ["prompt", "completion"],
        ),
        (["prompt", "completion", *RECORDED], "sft", "recorded groups", [*RECORDED]),
        (["label", *RECORDED], "kto", "recorded groups", [*RECORDED]),
        (["chosen", "rejected"], "dpo", "preference", ["chosen", "rejected", "prompt"]),
        (["prompt", "chosen", "rejected"], "kto", "preference", ["chosen", "rejected", "prompt"]),
        (
            ["prompt", "completion", "label"],
            "kto",
            "unpaired preference",
            ["prompt", "completion", "label"],
        ),
    ],
)
def test_a_form_is_recognized_from_its_columns(columns, objective, name, used):
    found = form(columns, objective)
    assert (found.name, list(found.columns)) == (name, used)


def test_columns_that_are_not_used_are_listed():
    found = form(["prompt", "completion", "tools", "id", "chat_template_kwargs"])
    assert found.unused == ("id",) and found.tools == "tools"
    assert form(["text", "tools"]).unused == ("tools",)


@pytest.mark.parametrize(
    ("columns", "objective", "fields", "message"),
    [
        (
            ["question", "answer"], "sft", {},
            r"data.train = '.*/rows.jsonl' has the columns \['answer', 'question'\], which are no"
            " form for sft; it takes text; messages; prompt and completion",
        ),
        (["prompt", "completion"], "dpo", {}, "no form for dpo; it takes chosen and rejected"),
        (["prompt", "chosen", "rejected"], "sft", {}, "no form for sft"),
        (["messages"], "kto", {}, "no form for kto; it takes prompt, completion and label"),
        (["text"], "sft", {"target_column": "answer"}, "data.target_column = 'answer' is not a"),
        (["text"], "sft", {"prompt_column": "question"}, "data.prompt_column = 'question' is not"),
        (["messages"], "sft", {"tools_column": "functions"}, "data.tools_column = 'functions'"),
        (
            ["chosen", "rejected", "answer"], "dpo", {"target_column": "answer"},
            "data.target_column = 'answer' has no effect on dpo",
        ),
    ],
)  # fmt: skip
def test_columns_without_a_form_are_refused(columns, objective, fields, message):
    with pytest.raises(ConfigError, match=message) as error:
        form(columns, objective, **fields)
    assert "\n" not in str(error.value)


def test_columns_of_other_names_are_found():
    found = form(["question", "answer"], prompt_column="question", target_column="answer")
    assert found.columns == ("question", "answer")
    groups = form([*RECORDED, "answer"], prompt_column="question", target_column="answer")
    assert groups.name == "recorded groups", "its columns have their own names"
    own = Source(path="x", prompt_column="query")
    with pytest.raises(ConfigError, match="= 'query' has no effect on the recorded groups"):
        form(RECORDED, source=own)
    assert form(["query", "completion"], source=own).columns == ("query", "completion")
    with pytest.raises(ConfigError, match="prompt_column of the source = 'query' is not a column"):
        form(["prompt", "completion"], source=own)


def test_strings_and_messages_become_texts_and_chats():
    assert first(text="3+4=7") == ParsedRow((Text(None, "3+4=7"),))
    assert first(prompt="3+4", completion="7") == ParsedRow((Text("3+4", "7"),))
    assert first(prompt=[ASK], completion=[GOOD]) == ParsedRow((Chat([ASK, GOOD], 1),))
    assert first(messages=[ASK, GOOD]) == ParsedRow((Chat([ASK, GOOD], 0),))
    assert first(messages=json.dumps([ASK, GOOD])) == first(messages=[ASK, GOOD])
    assert first(prompt="3+4", completion="") == ParsedRow((Text("3+4", ""),))


def test_a_prompt_and_a_completion_may_be_of_different_kinds():
    asked = ParsedRow((Chat([ASK, GOOD], 1),))
    assert first(prompt=[ASK], completion="7") == asked
    assert first(prompt="3+4", completion=[GOOD]) == asked
    assert first(prompt="3+4", completion=[ASK, GOOD]) == asked
    assert first(prompt=[ASK], completion=[ASK, GOOD]) == asked, "the whole conversation again"
    spec = offline_spec("unused", apply_chat_template=True)
    assert first(spec=spec, prompt="3+4", completion="7") == asked


def test_from_and_value_become_role_and_content():
    shared = [{"from": "human", "value": "3+4"}, {"from": "gpt", "value": "7"}]
    assert first(conversations=shared) == first(messages=[ASK, GOOD])
    assert first(conversations=[ASK, GOOD]) == first(messages=[ASK, GOOD])


def test_a_system_prompt_belongs_to_the_prompt():
    spec = offline_spec("unused", system_prompt="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert first(spec=spec, prompt=[ASK], completion=[GOOD]).sides[0] == Chat(
        [system, ASK, GOOD], 2
    )
    assert first(spec=spec, messages=[ASK, GOOD]).sides[0] == Chat([system, ASK, GOOD], 0)
    assert first(spec=spec, messages=[system, ASK, GOOD]) == "template"


def test_absent_keys_of_a_struct_stay_absent():
    tool = {"role": "tool", "content": "7", "name": "add"}
    (chat,) = first(messages=[ASK, tool, GOOD]).sides
    assert [sorted(message) for message in chat.messages] == [
        ["content", "role"],
        ["content", "name", "role"],
        ["content", "role"],
    ]


PAIR = ParsedRow((Chat([ASK, GOOD], 1), Chat([ASK, BAD], 1)))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [ASK], "chosen": "7", "rejected": "8"},
        {"prompt": "3+4", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "3+4", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [ASK, BAD]},
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": None, "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
    ],
)
def test_pairs_have_the_same_prompt(row):
    assert first("dpo", **row) == PAIR


def test_the_implicit_prompt_of_chats_is_all_that_they_share():
    chat = [ASK, GOOD, ASK]
    found = first("dpo", chosen=[*chat, GOOD], rejected=[*chat, BAD])
    assert [side.prompt for side in found.sides] == [3, 3]


def test_pairs_of_strings():
    assert first("dpo", prompt="3+4=", chosen="7", rejected="8") == ParsedRow(
        (Text("3+4=", "7"), Text("3+4=", "8"))
    )
    assert first("dpo", chosen="3+4=7", rejected="3+4=8") == ParsedRow(
        (Text(None, "3+4=7"), Text(None, "3+4=8"))
    )


def test_labels_may_be_numbers():
    assert first("kto", prompt="3", completion="4", label=True) == ParsedRow(
        (Text("3", "4"),), True
    )
    assert first("kto", prompt="3", completion="4", label=0) == ParsedRow((Text("3", "4"),), False)


@pytest.mark.parametrize(
    ("objective", "row", "reason"),
    [
        ("sft", {"text": None}, "missing"),
        ("sft", {"text": ""}, "no_completion"),
        ("sft", {"text": 7}, "type"),
        ("sft", {"prompt": "3", "completion": 7}, "type"),
        ("sft", {"prompt": "3", "completion": True}, "type"),
        ("sft", {"prompt": "3", "completion": float("nan")}, "type"),
        ("dpo", {"prompt": "3", "chosen": 7, "rejected": 8}, "type"),
        ("sft", {"messages": "no chat"}, "type"),
        ("sft", {"messages": [{"role": "user"}]}, "type"),
        ("sft", {"messages": None}, "missing"),
        ("sft", {"prompt": "3", "completion": None}, "missing"),
        ("sft", {"prompt": None, "completion": "3"}, "missing"),
        ("sft", {"prompt": [ASK], "completion": pa.array([], pa.null())}, "no_completion"),
        ("sft", {"prompt": [ASK], "completion": [{**ASK, "content": "x"}, GOOD]}, "not_a_prefix"),
        ("sft", {"prompt": "other", "completion": [ASK, GOOD]}, "not_a_prefix"),
        ("sft", {"prompt": [ASK], "completion": [ASK]}, "no_completion"),
        ("sft", {"messages": [ASK, GOOD], "tools": "{"}, "type"),
        ("sft", {"messages": [ASK, GOOD], "chat_template_kwargs": "3"}, "type"),
        ("dpo", {"prompt": "3", "chosen": "4", "rejected": "4"}, "equal"),
        ("dpo", {"prompt": "3", "chosen": "4", "rejected": ""}, "no_completion"),
        ("dpo", {"prompt": "3", "chosen": "4", "rejected": None}, "missing"),
        ("dpo", {"prompt": [ASK], "chosen": [GOOD], "rejected": [EMPTY]}, "no_completion"),
        ("dpo", {"prompt": [ASK], "chosen": [GOOD], "rejected": [TOOL, BAD]}, "not_a_prefix"),
        ("dpo", {"chosen": "3+4=7", "rejected": "3+4="}, "no_completion"),
        ("dpo", {"chosen": [ASK, GOOD], "rejected": [ASK]}, "no_completion"),
        ("dpo", {"chosen": [ASK, GOOD], "rejected": [{**ASK, "content": "x"}]}, "not_a_prefix"),
        ("dpo", {"chosen": [ASK, GOOD], "rejected": [ASK, EMPTY]}, "no_completion"),
        ("dpo", {"prompt": "x", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "not_a_prefix"),
        ("dpo", {"chosen": [ASK, GOOD, ASK], "rejected": [ASK, GOOD, BAD]}, "not_a_prefix"),
        ("kto", {"prompt": "3", "completion": "4", "label": "yes"}, "type"),
        ("kto", {"prompt": "3", "completion": "", "label": True}, "no_completion"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_trained_are_malformed(objective, row, reason):
    values = {name: v.to_pylist() if isinstance(v, pa.Array) else v for name, v in row.items()}
    assert first(objective, **values) == reason
