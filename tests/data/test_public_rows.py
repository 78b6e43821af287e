"""Rows as public sets write them: marks of what is trained, keys and parts that a template may
leave out, names of roles, chats as JSON text, repeated prompts, and started answers."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_families import CHATML, CHATML_TAGS, CONTENT_TAGS, FORCES_THINKING, TOOLS
from small_config import offline_spec

from asyncrl.config import ConfigError
from asyncrl.data.offline_rows import write_offline_rows
from asyncrl.runtime.files.arrow_files import map_table
from asyncrl.text.tokenizer import load_tokenizer

THINKS = CHATML.replace(
    "m.role + '\\n' + m.content",
    "m.role + '\\n' + ('<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '')"
    " + m.content",
)
MOOD = "{{ mood | default('') }}" + CHATML
ONE_CALL = TOOLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
NAMES_ONLY = TOOLS.replace(" + (c.function.arguments | tojson)", "")
DEEPSEEK = TOOLS.replace("{% for c in m.tool_calls or [] %}", "{% for c in (m.tool_calls if"
    " m.content is none else []) or [] %}")  # fmt: skip
ASK = {"role": "user", "content": "3+4?"}
SAID = {"role": "assistant", "content": "7"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "7"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


@pytest.fixture
def trained(offline, chat_model):
    """`trained(row, template, objective, **fields)`: for each side, the whole text and the texts
    that are trained."""

    def read(row, template=CHATML, objective="sft", **fields):
        table, _ = offline([row], objective, template, **fields)
        decode = load_tokenizer(chat_model(template)).decode
        found = []
        for ids, mask in zip(table.column_names[::2], table.column_names[1::2], strict=True):
            tokens, trains = table[ids][0].as_py(), table[mask][0].as_py()
            runs, last = [], False
            for token, trains_it in zip(tokens, trains, strict=True):
                if trains_it:
                    runs = [*runs[:-1], [*runs[-1], token]] if last else [*runs, [token]]
                last = trains_it
            found.append((decode(tokens), [decode(run) for run in runs]))
        return found[0] if len(found) == 1 else found

    return read


MARKS_OFF = [
    {"weight": 0}, {"weight": 0.0}, {"weight": "0"}, {"weight": False}, {"train": False},
    {"training": False}, {"loss_mask": 0}, {"step_loss_mask": 0}, {"trainable": False},
    {"trainable": "false"}, {"train_on_turn": False}, {"masked": True}, {"masked": 1},
    {"loss": False},
]  # fmt: skip


@pytest.mark.parametrize("template", [CHATML, CHATML_TAGS, CONTENT_TAGS])
@pytest.mark.parametrize("mark", MARKS_OFF, ids=str)
def test_a_turn_marked_as_not_trained_is_context(trained, template, mark):
    chat = [ASK, assistant("wrong", **mark), {"role": "user", "content": "no"}, SAID]
    text, runs = trained({"messages": chat}, template)
    assert "wrong" in text, "it stays in the context"
    assert [run.strip() for run in runs] == ["7<|im_end|>"]


def test_marks_apply_in_every_form_whose_turns_they_name(trained):
    off, on = assistant("wrong", weight=0), assistant("7", weight=1)
    again = {"role": "user", "content": "no"}
    rows = {
        "messages": {"messages": [ASK, off, again, on]},
        "conversations": {
            "conversations": [
                {"from": "human", "value": "3+4?"},
                {"from": "gpt", "value": "wrong", "weight": 0},
                {"from": "human", "value": "no"},
                {"from": "gpt", "value": "7", "weight": 1},
            ]
        },
        "completion": {"prompt": [ASK], "completion": [off, again, on]},
        "prompt": {"prompt": [ASK, off, again], "completion": [on]},
        "json": {"messages": json.dumps([ASK, off, again, on])},
    }
    for name, row in rows.items():
        assert [run.strip() for run in trained(row)[1]] == ["7<|im_end|>"], name
    sides = {"prompt": [ASK], "chosen": [off, again, on], "rejected": [off, again, assistant("8")]}
    assert [run for _, run in trained(sides, objective="dpo")] == [
        ["7<|im_end|>\n"],
        ["8<|im_end|>\n"],
    ]


@pytest.mark.parametrize(
    ("chat", "fields", "message"),
    [
        ([ASK, assistant("7", weight=0)], {}, "its marks leave no turn to train"),
        ([ASK, assistant("7", weight=0.5)], {}, "message 1 has weight = 0.5; a turn is trained or"),
        ([ASK, assistant("7", loss_mask=[0, 1])], {}, r"loss_mask = \[0, 1\]; a turn is trained"),
        ([ASK, assistant("7", weight=-1)], {}, "weight = -1; a turn is trained or not"),
        (
            [ASK, assistant("7", train_detail=[{"begin_offset": 0, "end_offset": 1}])], {},
            "'train_detail', which marks characters",
        ),
        ([ASK, assistant("7", weight=0, train=True)], {}, "weight and train, which contradict"),
        (
            [{**ASK, "train": True}, SAID], {},
            r"message 0 \(user\) is marked as trained by 'train', and it is not; remove the mark",
        ),
        (
            [ASK, assistant("7", weight=0), ASK, SAID], {"loss_on": "all"},
            r"message 1 \(assistant\) is marked as not trained by 'weight', and it is; .*loss_on:",
        ),
    ],
)  # fmt: skip
def test_marks_that_cannot_be_kept_are_refused_by_name(offline, chat, fields, message):
    with pytest.raises(ConfigError, match=f"row 0: .*{message}"):
        offline([{"messages": chat}], template=CHATML, **fields)


def test_a_reward_model_scores_whole_completions(offline):
    row = {"prompt": [ASK], "chosen": [assistant("7", weight=0)], "rejected": [assistant("8")]}
    with pytest.raises(ConfigError, match=r"'weight', and a reward model scores whole completions"):
        offline([row], "reward_model", CHATML)


@pytest.mark.parametrize(
    "column", ["weight", "loss_mask", "train", "images", "system", "history", "thinking"]
)
def test_a_column_of_marks_or_of_a_part_of_the_chat_is_refused_also_where_later_rows_bring_it(
    offline, column
):
    rows = [{"messages": [ASK, SAID]}] * 1500 + [{"messages": [ASK, SAID], column: [0]}]
    with pytest.raises(ConfigError, match=f"has a column '{column}'"):
        offline(rows, template=CHATML)
    _, report = offline(rows, template=CHATML, unused_keys="drop")
    assert f"unused columns of rows: '{column}'" in report.notes


@pytest.mark.parametrize("value", ["", None, []])
def test_a_column_that_is_empty_in_every_row_says_nothing(offline, value):
    empty = dict.fromkeys(("system", "history", "images", "weight"), value)
    rows = [{"messages": [ASK, SAID], **empty}] * 3
    assert offline(rows, template=CHATML)[1].rows == 3
    alpaca = {"instruction": "Add", "input": "", "output": "7"}
    columns = {"prompt_column": "instruction", "target_column": "output"}
    assert offline([alpaca], **columns)[1].rows == 1


def test_the_input_of_alpaca_rows_is_not_left_out_in_silence(offline):
    row = {"instruction": "Add", "input": "3 and 4", "output": "7"}
    columns = {"prompt_column": "instruction", "target_column": "output"}
    with pytest.raises(ConfigError, match=r"a column 'input', which is no part of prompt-compl"):
        offline([row], **columns)
    assert offline([{**row, "input": ""}], unused_keys="drop", **columns)[1].rows == 1
    with pytest.raises(ConfigError, match=r"a column 'instruction', which is no part of prompt-c"):
        offline([row], prompt_column="input", target_column="output")


def test_a_message_that_says_nothing_is_refused(offline):
    """A model that learns it ends its turn at once."""
    with pytest.raises(ConfigError, match=r"row 0: .*message 1 has no content; write its text"):
        offline([{"messages": [ASK, {"role": "assistant", "content": None}]}], template=CHATML)


UNUSED = {
    "reasoning_content": ([ASK, assistant("7", reasoning_content="add")], CHATML),
    "thinking": ([ASK, assistant("7", thinking="add")], CHATML),
    "reasoning_content', which": (
        [ASK, assistant("7", reasoning_content="add"), ASK, SAID],
        "{# m.thinking #}" + CHATML,
    ),
    "reasoning": ([ASK, assistant("7", reasoning="add")], CHATML),
    "tool_calls": ([ASK, CALLS, RESULT, SAID], CHATML),
    "tool_calls' (arguments of call 0)": ([ASK, CALLS, RESULT, SAID], NAMES_ONLY),
    "tool_calls' (name of call 1)": (
        [ASK, {**CALLS, "tool_calls": [CALL, {**CALL, "function": {"name": "sub"}}]}, SAID],
        ONE_CALL,
    ),
    "function_call": ([ASK, {**CALLS, "tool_calls": None, "function_call": CALL["function"]}], 0),
    "name": ([{**ASK, "name": "Ann"}, SAID], CHATML),
    "refusal": ([ASK, assistant("", refusal="I cannot")], CHATML),
    "audio": ([ASK, assistant("7", audio={"id": "a"})], CHATML),
    "annotations": ([ASK, assistant("7", annotations=[{"url": "x"}])], CHATML),
    "tool_call_id": ([ASK, CALLS, {**RESULT, "tool_call_id": "c9"}, SAID], TOOLS),
    "images": ([{**ASK, "images": ["x.png"]}, SAID], CHATML),
    "score": ([ASK, assistant("7", score=0)], CHATML),
}


@pytest.mark.parametrize("key", UNUSED)
def test_a_key_that_does_not_reach_the_text_is_refused_with_its_row(offline, key):
    """The first row is fine, so a look at the first row alone finds nothing."""
    chat, template = UNUSED[key]
    rows = [{"messages": [ASK, SAID]}, {"messages": chat}]
    with pytest.raises(ConfigError, match=r"row 1: a key or a part does not reach") as refused:
        offline(rows, template=template or CHATML)
    assert (key if key != "function_call" else "tool_calls") in str(refused.value)
    with pytest.raises(ConfigError, match=r"row 1: .*does not reach"):
        pair = {"prompt": chat[:1], "chosen": chat[1:], "rejected": [assistant("8")]}
        fine = {"prompt": [ASK], "chosen": [SAID], "rejected": [assistant("8")]}
        offline([fine, pair], "dpo", template or CHATML)


@pytest.mark.parametrize(
    "part",
    [
        IMAGE,
        {"type": "image"},
        {"type": "image", "image": "x.png"},
        {"type": "input_image", "image_url": "x"},
        {"image": "x.png"},
        {"type": "audio", "audio": "x.wav"},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "x"}},
        {"type": "video", "video": "x.mp4"},
        {"type": "video_url", "video_url": {"url": "x"}},
        {"type": "file", "file": {"file_id": "x"}},
        {"type": "document", "source": {}},
        {"type": "thinking", "thinking": "hm"},
        {"type": "tool_use", "id": "c", "name": "add", "input": {}},
        {"type": "tool_result", "tool_use_id": "c", "content": "7"},
        {"type": "refusal", "refusal": "no"},
    ],
    ids=str,
)
def test_a_part_that_is_no_text_is_refused_in_every_kind_of_run(offline, prompt_config, part):
    from asyncrl.data.prompts import check_prompts
    from asyncrl.preflight.specs import data_spec

    asked = {"role": "user", "content": [{"type": "text", "text": "3+4?"}, part]}
    kind = part.get("type", next(iter(part)))
    message = f"message 0 has a part of type '{kind}', and only text reaches the model"
    with pytest.raises(ConfigError, match=message):
        offline([{"messages": [asked, SAID]}], template=CHATML)
    with pytest.raises(ConfigError, match=message):
        offline([{"chosen": [asked, SAID], "rejected": [asked, assistant("8")]}], "dpo", CHATML)
    with pytest.raises(ConfigError, match=f"row 0: {message}"):
        check_prompts(data_spec(prompt_config([{"prompt": [asked]}])))
    _, report = offline([{"messages": [asked, SAID]}], template=CHATML, unused_keys="drop")
    assert f"left out of chats: a part of type '{kind}' (1 times)" in report.notes
    assert "3+4?<|im_end|>" in report.first[0]
    only = {"role": "user", "content": [part]}
    with pytest.raises(ConfigError, match=r"message 0 has no part that is text"):
        offline([{"messages": [only, SAID]}], template=CHATML, unused_keys="drop")


def test_parts_that_are_text_become_one_text(trained):
    parts = [
        {"type": "text", "text": "3+4", "cache_control": {"type": "ephemeral"}, "annotations": []},
        {"type": "input_text", "text": "?", "image": None},
    ]
    text, _ = trained({"messages": [{"role": "user", "content": parts}, SAID]})
    assert "<|im_start|>user\n3+4\n?<|im_end|>" in text


def test_dropped_keys_are_counted_and_never_empty_a_turn(offline):
    rows = [{"messages": [{**ASK, "name": "Ann"}, assistant("7", score=2)]}] * 3
    _, report = offline(rows, template=CHATML, unused_keys="drop")
    assert {note for note in report.notes if "left out" in note} == {
        "left out of chats: 'name' (3 times)",
        "left out of chats: 'score' (3 times)",
    }
    with pytest.raises(ConfigError, match=r"nothing of message 1 \(assistant\) reaches the text"):
        offline([{"messages": [ASK, CALLS, RESULT, SAID]}], template=CHATML, unused_keys="drop")


def test_keys_that_a_template_writes_are_trained(trained):
    text, runs = trained({"messages": [ASK, CALLS, RESULT, SAID]}, TOOLS)
    assert 'call add{"a": 3}' in text, "arguments that are JSON text are not quoted again"
    assert runs[0].startswith('call add{"a": 3}')
    for key in ("reasoning_content", "reasoning", "thinking"):
        _, runs = trained({"messages": [ASK, assistant("7", **{key: "add"})]}, THINKS)
        assert runs == ["<think>add</think>7<|im_end|>\n"]
    _, runs = trained({"messages": [ASK, CALLS, RESULT, SAID]}, DEEPSEEK)
    assert "call add" in runs[0], "some templates write calls only if the content is null"


def test_absent_keys_of_parquet_structs_are_not_keys(chat_model, tmp_path):
    chats = [[ASK, SAID], [ASK, assistant("7", reasoning_content="add")]]
    pq.write_table(pa.table({"messages": pa.array([chats[0], chats[0]])}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"messages": pa.array(chats)}), tmp_path / "b.parquet")
    spec = offline_spec(chat_model(CHATML))
    rows = write_offline_rows(tmp_path / "t", spec, str(tmp_path / "a.parquet"), "x", "sft").rows
    assert rows == 2
    with pytest.raises(ConfigError, match=r"row 1: .*'reasoning_content'"):
        write_offline_rows(tmp_path / "t", spec, str(tmp_path / "b.parquet"), "x", "sft")
    thinks = offline_spec(chat_model(THINKS))
    write_offline_rows(tmp_path / "t", thinks, str(tmp_path / "b.parquet"), "x", "sft")
    assert map_table(tmp_path / "t").num_rows == 2


def test_a_text_that_also_stands_elsewhere_is_no_proof(offline):
    """A template that leaves system messages out: the system's text is the user's, too."""
    no_system = CHATML.replace("for m in messages", "for m in messages if m.role != 'system'")
    chat = [{"role": "system", "content": "user"}, ASK, SAID]
    with pytest.raises(ConfigError, match=r"row 0: .*message 0 has 'content'"):
        offline([{"messages": chat}], template=no_system)
    with pytest.raises(ConfigError, match=r"data.system_prompt.*leaves system messages out"):
        offline([{"messages": chat[1:]}], template=no_system, system_prompt="user")


def test_tools_and_variables_of_every_row_must_reach_the_text(offline, trained):
    plain, row = {"messages": [ASK, SAID]}, {"messages": [ASK, SAID], "tools": [ADD]}
    assert '"name": "add"' in trained(row, TOOLS)[0]
    assert trained({**row, "tools": ""}, TOOLS) == trained(plain, TOOLS)
    with pytest.raises(ConfigError, match=r"data.tools or data.tools_column: .* leaves tools out"):
        offline([plain], template=CHATML, tools=[ADD])
    with pytest.raises(ConfigError, match=r"row 1: .*its tools have 'tools' .'add'."):
        offline([plain, row], template=CHATML)
    glad = {**plain, "chat_template_kwargs": {"mood": "glad"}}
    assert trained(glad, MOOD)[0].startswith("glad")
    with pytest.raises(ConfigError, match=r"row 1: .*chat_template_kwargs have 'mood'"):
        offline([plain, glad], template=CHATML)
    with pytest.raises(ConfigError, match=r"chat_template_kwargs have 'content'"):
        offline([{**plain, "chat_template_kwargs": {"content": "x"}}], template=CHATML)
    with pytest.raises(ConfigError, match=r"row 0: .*its column 'tools' applies to chats"):
        offline([{"prompt": "3+4=", "completion": "7", "tools": [ADD]}])


@pytest.mark.parametrize(
    ("given", "role"),
    [
        ("human", "user"), ("Human", "user"), ("prompter", "user"), ("gpt", "assistant"),
        ("chatgpt", "assistant"), ("model", "assistant"), ("bot", "assistant"),
        ("CHATBOT", "assistant"), ("observation", "tool"), ("tool_response", "tool"),
        ("function", "tool"), ("developer", "system"), ("User", "user"),
    ],
)  # fmt: skip
def test_roles_of_public_sets_are_those_of_the_template(trained, given, role):
    pair = [{"from": given, "value": "x"}, {"from": "gpt", "value": "7"}]
    text, runs = trained({"conversations": [{"from": "human", "value": "3"}, *pair]})
    assert f"<|im_start|>{role}\nx<|im_end|>" in text and runs[-1] == "7<|im_end|>\n"
    renamed = [{"role": given, "content": "x"}, SAID]
    assert f"<|im_start|>{role}\nx" in trained({"messages": [ASK, *renamed]})[0]


def test_a_role_that_the_template_knows_stays_and_unknown_ones_are_refused(trained, offline):
    knows = CHATML.replace("m.role", "('see' if m.role == 'observation' else m.role)")
    seen = {"role": "observation", "content": "x"}
    assert "<|im_start|>see\nx" in trained({"messages": [ASK, seen, SAID]}, knows)[0]
    for row in ({"messages": [ASK, {"role": "critic", "content": "x"}, SAID]},):
        with pytest.raises(ConfigError, match=r"row 0: .*message 1 has the role 'critic', which"):
            offline([row], template=CHATML)


def test_calls_of_sharegpt_and_old_openai_sets_become_tool_calls(trained, offline):
    call = {"name": "add", "arguments": {"a": 3}}
    shared = [
        {"from": "human", "value": "3+4?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "7"},
        {"from": "gpt", "value": "It is 7."},
    ]
    old = [
        ASK,
        {"role": "assistant", "content": None, "function_call": {**call, "arguments": '{"a": 3}'}},
        {"role": "function", "name": "add", "content": "7"},
        assistant("It is 7."),
    ]
    for row in ({"conversations": shared}, {"messages": old}):
        text, runs = trained(row, TOOLS)
        assert runs[0].startswith('call add{"a": 3}') and "<|im_start|>tool\n7" in text
    shared[1]["value"] = "add(3)"
    with pytest.raises(ConfigError, match=r"message 1 has the function call 'add\(3\)'; give JSON"):
        offline([{"conversations": shared}], template=TOOLS)


def test_chats_as_json_text_are_chats_in_every_form(trained, offline):
    asked, said, other = (json.dumps([one]) for one in (ASK, SAID, assistant("8")))
    chat = trained({"messages": [ASK, SAID]})
    assert trained({"prompt": asked, "completion": said}) == chat
    assert trained({"prompt": [ASK], "completion": json.dumps(SAID)}) == chat
    shared = json.dumps([{"from": "human", "value": "3+4?"}])
    assert trained({"prompt": shared, "completion": [{"from": "gpt", "value": "7"}]}) == chat
    pair = trained({"prompt": asked, "chosen": said, "rejected": other}, objective="dpo")
    assert pair[0] == chat and pair[1][1] == ["8<|im_end|>\n"]
    whole = {"chosen": json.dumps([ASK, SAID]), "rejected": json.dumps([ASK, assistant("8")])}
    assert trained(whole, objective="dpo") == pair
    with pytest.raises(
        ConfigError, match=r"its text is a chat as JSON; name its column 'messages'"
    ):
        offline([{"text": json.dumps([ASK, SAID])}], template=CHATML)
    for broken in (str([ASK]), asked[:-2]):
        with pytest.raises(ConfigError, match=r"begins like a chat, and is not JSON"):
            offline([{"prompt": broken, "completion": said}], template=CHATML)
    inside = json.dumps({"messages": [ASK]})
    with pytest.raises(ConfigError, match=r"JSON with a chat under 'messages'"):
        offline([{"prompt": inside, "completion": said}], template=CHATML)
    data = '{"role": "admin", "value": 3}'
    assert trained({"prompt": "Who?", "completion": data})[1][0].startswith(data), "plain JSON"


@pytest.mark.parametrize(
    ("objective", "row", "fields"),
    [
        ("sft", {"prompt": "3+4=", "completion": "3+4=7"}, {}),
        ("sft", {"prompt": "3+4=", "completion": " 3+4= 7"}, {}),
        ("sft", {"prompt": "3+4=", "completion": "3+4=7"}, {"apply_chat_template": True}),
        ("sft", {"prompt": [ASK], "completion": "3+4? 7"}, {}),
        ("kto", {"prompt": "3+4=", "completion": "3+4=7", "label": True}, {}),
        ("dpo", {"prompt": "3+4=", "chosen": "3+4=7", "rejected": "8"}, {}),
    ],
)
def test_a_completion_that_repeats_its_prompt_is_refused(offline, objective, row, fields):
    with pytest.raises(
        ConfigError, match=r"row 0: a completion repeats its prompt .its completion"
    ):
        offline([row], objective, CHATML, **fields)


def test_pairs_whose_strings_both_repeat_the_prompt_take_it_once(trained, offline):
    row = {"prompt": "3+4=", "chosen": "3+4=7", "rejected": "3+4=8"}
    once = {"prompt": "3+4=", "chosen": "7", "rejected": "8"}
    for fields in ({}, {"apply_chat_template": True}):
        found = trained(row, CHATML, "dpo", **fields)
        assert found == trained(once, CHATML, "dpo", **fields)
    _, report = offline([row, once], "dpo")
    assert "1 pairs: both sides repeat the prompt, which is taken once" in report.notes


@pytest.mark.parametrize("template", [CHATML, CHATML_TAGS, FORCES_THINKING])
def test_a_prompt_that_begins_the_answer_is_continued(trained, template):
    started = [ASK, assistant("The sum")]
    for completion in (" is 7", [assistant(" is 7")]):
        text, runs = trained({"prompt": started, "completion": completion}, template)
        assert text.count("<|im_start|>assistant") == 1 and "The sum is 7<|im_end|>" in text
        assert [run.strip() for run in runs] == ["is 7<|im_end|>"]
    pair = {"prompt": started, "chosen": " is 7", "rejected": [assistant(" is 8")]}
    sides = trained(pair, template, "dpo")
    assert [runs[0].strip() for _, runs in sides] == ["is 7<|im_end|>", "is 8<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, FORCES_THINKING])
def test_a_prompt_that_begins_the_reasoning_is_continued_within_it(trained, template):
    row = {"prompt": [ASK, assistant("<think>3 and")], "completion": " 4</think>7"}
    text, runs = trained(row, template)
    assert "<|im_start|>assistant\n<think>3 and 4</think>7<|im_end|>" in text
    assert [run.strip() for run in runs] == ["4</think>7<|im_end|>"]


def test_templates_that_read_parts_get_parts(trained):
    parts = CHATML.replace(
        "m.content", "(m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') |"
        " join)",
    )  # fmt: skip
    reads = "{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}" + parts
    text, runs = trained({"messages": [ASK, SAID]}, reads)
    assert "user\n3+4?<|im_end|>" in text and runs == ["7<|im_end|>\n"]
    text, runs = trained({"prompt": [ASK, assistant("The")], "completion": " sum"}, reads)
    assert "The sum" in text and [run.strip() for run in runs] == ["sum<|im_end|>"]


def test_tokens_that_would_merge_at_the_end_of_a_started_answer_stay_apart(trained):
    for template in (CHATML, CHATML_TAGS):
        text, runs = trained({"prompt": [ASK, assistant("th")], "completion": "e sum"}, template)
        assert "the sum<|im_end|>" in text and runs[0].strip() == "e sum<|im_end|>"


def test_tool_calls_as_json_text_are_calls(trained):
    chat = [ASK, {**CALLS, "tool_calls": json.dumps([CALL])}, RESULT, SAID]
    assert trained({"messages": chat}, TOOLS) == trained(
        {"messages": [ASK, CALLS, RESULT, SAID]}, TOOLS
    )
    assert trained({"messages": [ASK, {**SAID, "tool_calls": "[]"}]})[1] == ["7<|im_end|>\n"]


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("add(3)", r"message 1 has the tool_calls 'add\(3\)'; give a list of calls"),
        (
            [{"function": {"name": "add", "arguments": "{a: 3"}}],
            "'{a: 3', which are no JSON object",
        ),
        ([{"function": {"name": "add", "arguments": "[3]"}}], "which are no JSON object"),
    ],
)
def test_calls_that_are_no_calls_are_refused(offline, calls, message):
    with pytest.raises(ConfigError, match=f"row 0: .*{message}"):
        offline([{"messages": [ASK, {**CALLS, "tool_calls": calls}, RESULT, SAID]}], template=TOOLS)


def test_a_mark_of_another_name_is_refused(offline):
    chat = [ASK, assistant("wrong", train_this=False), ASK, SAID]
    with pytest.raises(ConfigError, match="message 1 has 'train_this', which the chat template"):
        offline([{"messages": chat}], template=CHATML)
    offline([{"messages": [{**ASK, "toxic": False}, SAID]}], template=CHATML)


def test_chats_as_json_text_may_begin_with_any_key(trained):
    chat = [{"id": None, **ASK}, {"weight": 1, **SAID}]
    whole, runs = trained({"messages": json.dumps(chat)})
    assert runs == ["7<|im_end|>\n"]
    row = {"prompt": json.dumps(chat[:1]), "completion": json.dumps(chat[1:])}
    assert trained(row)[0] == whole
    said = '{"id": 3, "role": "user"}'
    assert trained({"prompt": "Who?", "completion": said})[1] == [said + "</s>"], (
        "an answer in JSON"
    )
