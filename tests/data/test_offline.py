"""Token rows of a dataset: EOS and BOS, pairs, limits, policies, reports, sources, and bounded
memory."""

import gc
import json
import os
import random
import re
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_families import CHATML, CHATML_TAGS, FINAL_EOS, HEADERS, NO_SYSTEM, STRIPS_THINKING
from small_config import offline_spec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from asyncrl.config import ConfigError, Source
from asyncrl.contracts.offline_rows import SFT_SCHEMA
from asyncrl.data import offline_rows as offline_module
from asyncrl.data.conversations import Encoder
from asyncrl.data.form_rows import Text
from asyncrl.data.length_limits import Cuts
from asyncrl.data.offline_checks import refuse_idle
from asyncrl.data.offline_rows import (
    OfflineRows,
    check_offline_rows,
    write_offline_rows,
)
from asyncrl.data.sources import RowsByNumber
from asyncrl.runtime.files.arrow_files import map_table
from asyncrl.text.tokenizer import load_tokenizer

BOS, EOS = 1, 2
ASK = {"role": "user", "content": "3+4"}


def assistant(content):
    return {"role": "assistant", "content": content}


@pytest.fixture
def ids(chat_model):
    """`ids(text)`: token ids without BOS and EOS."""
    tokenizer = load_tokenizer(chat_model(None))
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def sft_rows(table):
    return [
        (
            row["input_ids"],
            [i for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m],
        )
        for row in table.to_pylist()
    ]


def sides(table):
    """(Prompt ids, chosen completion, rejected completion) of each pair."""
    found = []
    for row in table.to_pylist():
        prompt = row["chosen_mask"].index(True)
        assert row["rejected_mask"].index(True) == prompt
        assert row["chosen_ids"][:prompt] == row["rejected_ids"][:prompt]
        found.append(
            (row["chosen_ids"][:prompt], row["chosen_ids"][prompt:], row["rejected_ids"][prompt:])
        )
    return found


def test_texts_begin_with_bos_and_end_with_eos_once(offline, ids):
    texts = ["3+4=7", "<s>3+4=7", "3+4=7</s>", "<s>3+4=7</s>"]
    table, report = offline([{"text": text} for text in texts])
    assert sft_rows(table) == [([BOS, *ids("3+4=7"), EOS], [*ids("3+4=7"), EOS])] * 4
    assert report.first == ("<s>⟦3+4=7</s>⟧",)
    assert "2 texts already begin with BOS, which is not added again" in report.notes
    assert (report.rows, report.tokens, report.targets) == (4, 28, 24) and report.longest == 7
    assert report.forms == ("text (strings)",)


def test_a_tokenizer_that_adds_eos_itself_adds_no_second_one(chat_model, tmp_path, ids):
    tokenizer = load_tokenizer(chat_model(None))
    other = type(tokenizer).from_pretrained(chat_model(None))
    other.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    other.save_pretrained(tmp_path / "model")
    rows = [{"prompt": "3+4", "completion": "=7"}, {"prompt": "3+4", "completion": "=7</s>"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = offline_spec(str(tmp_path / "model"))
    write_offline_rows(tmp_path / "t.arrow", spec, str(path), "data.train", "sft")
    table = map_table(tmp_path / "t.arrow")
    assert sft_rows(table) == [([BOS, *ids("3+4=7"), EOS], [*ids("=7"), EOS])] * 2


@pytest.mark.parametrize(
    ("loss_on", "trained"), [("auto", "=7"), ("completion", "=7"), ("all", "3+4=7")]
)
def test_the_completion_is_trained_after_a_prompt(offline, ids, loss_on, trained):
    table, _ = offline([{"prompt": "3+4", "completion": "=7"}], loss_on=loss_on)
    assert sft_rows(table) == [([BOS, *ids("3+4=7"), EOS], [*ids(trained), EOS])]


def test_a_prompt_keeps_its_own_tokens(offline, ids):
    """ "What is " and "plus" would merge across the prompt's end, and generation would start from
    other tokens than training."""
    assert ids("What is plus") != ids("What is ") + ids("plus")
    table, report = offline([{"prompt": "What is ", "completion": "plus"}])
    assert sft_rows(table) == [([BOS, *ids("What is "), *ids("plus"), EOS], [*ids("plus"), EOS])]
    assert any(note.startswith("1 completions were encoded apart") for note in report.notes)


def test_a_tokenizer_that_puts_a_space_before_texts_puts_none_before_a_completion(tmp_path):
    """As those of Llama 2 and Mistral do."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    bpe.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    bpe.train_from_iterator(["abc ab abc: c abc: 7"] * 9, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    encoder = Encoder(tokenizer)
    for prompt, completion in (("ab", "c"), ("abc: ", "7"), ("ab", "c abc"), ("abc:", " 7")):
        [tokens] = encoder.texts([Text(prompt, completion)], "completion")
        assert tokenizer.decode(tokens.ids[:-1]) == prompt + completion
    assert encoder.counts["apart"] == 3


def test_a_prompt_without_tokens_is_malformed(chat_model, tmp_path):
    """With BOS, an empty prompt has a token."""
    tokenizer = type(load_tokenizer(chat_model(None))).from_pretrained(chat_model(None))
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel()
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text('{"prompt": "", "completion": "3"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "", "chosen": "3", "rejected": "4"}\n')
    with_bos, without = offline_spec(chat_model(None)), offline_spec(str(tmp_path / "model"))
    for name, objective in (("a.jsonl", "sft"), ("b.jsonl", "dpo")):
        data = str(tmp_path / name)
        assert check_offline_rows(with_bos, data, "data.train", objective).rows == 1
        with pytest.raises(ConfigError, match="row 0: the prompt is empty; correct it"):
            check_offline_rows(without, data, "data.train", objective)


def test_an_empty_completion_teaches_to_stop(offline, ids):
    table, _ = offline([{"prompt": "3+4", "completion": ""}])
    assert sft_rows(table) == [([BOS, *ids("3+4"), EOS], [EOS])]


def test_another_column_may_be_the_target(offline, ids):
    rows = [{"question": "3+4=", "answer": "7"}]
    table, report = offline(rows, prompt_column="question", target_column="answer")
    assert sft_rows(table) == [([BOS, *ids("3+4=7"), EOS], [*ids("7"), EOS])]
    rendered, _ = offline(
        rows,
        template=CHATML,
        prompt_column="question",
        target_column="answer",
        apply_chat_template=True,
    )
    tokenizer_ids = rendered["input_ids"][0].as_py()
    assert len(tokenizer_ids) > 20 and report.forms == ("prompt-completion (strings)",)


@pytest.mark.parametrize(
    ("loss_on", "shown"),
    [
        ("auto", "⟦7<|im_end|>\n⟧"),
        ("assistant", "⟦7<|im_end|>\n⟧"),
        ("all", None),
    ],
)
def test_messages_train_the_assistant_unless_all_is_asked_for(offline, loss_on, shown):
    table, report = offline([{"messages": [ASK, assistant("7")]}], template=CHATML, loss_on=loss_on)
    if shown:
        assert report.first[0].endswith("<|im_start|>assistant\n" + shown)
    else:
        assert table["loss_mask"].to_pylist() == [[False] + [True] * (report.tokens - 1)]
    assert report.forms == ("messages (chats)",)


def test_pairs_of_strings_share_their_prompt(offline, ids):
    rows = [
        {"prompt": "3+4", "chosen": "=7", "rejected": "=8 ?"},
        {"prompt": "3+4", "chosen": "=7</s>", "rejected": "=8 ?"},
    ]
    table, report = offline(rows, "dpo")
    pair = ([BOS, *ids("3+4")], [*ids("=7"), EOS], [*ids("=8 ?"), EOS])
    assert sides(table) == [pair] * 2 and len(report.first) == 2


def test_the_implicit_prompt_of_strings_is_the_tokens_they_share(offline, ids):
    """A character prefix would end inside of a token: "plus" and "please" share "pl"."""
    rows = [{"chosen": "What is 3 plus", "rejected": "What is 3 please"}]
    table, _ = offline(rows, "dpo")
    ((prompt, chosen, rejected),) = sides(table)
    assert prompt + chosen == [BOS, *ids("What is 3 plus"), EOS]
    assert prompt + rejected == [BOS, *ids("What is 3 please"), EOS]
    assert prompt == [BOS, *ids("What is 3")] and chosen[0] != rejected[0]


def test_pairs_of_chats_train_the_assistants_turns(offline):
    rows = [
        {"prompt": [ASK], "chosen": [assistant("7"), ASK, assistant("7!")], "rejected": "8"},
        {"chosen": [ASK, assistant("7")], "rejected": [ASK, assistant("8")]},
    ]
    table, report = offline(rows, "dpo", CHATML)
    asked, answer = "<|im_start|>user\n3+4<|im_end|>\n", "<|im_start|>assistant\n"
    assert report.first == (
        f"{asked}{answer}⟦7<|im_end|>\n⟧{asked}{answer}⟦7!<|im_end|>\n⟧",
        f"{asked}{answer}⟦8<|im_end|>\n⟧",
    )
    everything, _ = offline(rows, "dpo", CHATML, loss_on="completion")
    assert everything["chosen_ids"] == table["chosen_ids"]
    first = everything["chosen_mask"].to_pylist()[0]
    assert first == sorted(first), "with completion, all tokens after the prompt are trained"


@pytest.mark.parametrize("template", [CHATML, FINAL_EOS, CHATML_TAGS, HEADERS])
def test_a_reward_model_scores_a_chat_at_the_end_of_its_turn(offline, template):
    """The served model reads a completion up to there, and no line end or EOS after it."""
    rows = [{"prompt": [ASK], "chosen": [assistant("7")], "rejected": [assistant("8")]}]
    end = "<|eot|>" if template == HEADERS else "<|im_end|>"
    for loss_on in ("auto", "completion"):
        _, report = offline(rows, "reward_model", template, loss_on=loss_on)
        assert [shown.partition("⟦")[2].partition("⟧")[0] for shown in report.first] == [
            f"{answer}{end}" for answer in "78"
        ]
    last = "('' if loop.last and m.role == 'assistant' else '<|im_end|>\\n')"
    without_end = CHATML.replace("'<|im_end|>\\n'", last)
    _, report = offline(rows, "reward_model", without_end)
    assert report.first[0].endswith("⟦7⟧")


def test_unpaired_rows_have_labels_and_pairs_give_two(offline, ids):
    rows = [
        {"prompt": "3+4", "completion": "=7", "label": True},
        {"prompt": "3+4", "completion": "=8", "label": False},
    ]
    table, _ = offline(rows, "kto")
    from_pairs, report = offline([{"prompt": "3+4", "chosen": "=7", "rejected": "=8"}], "kto")
    assert table == from_pairs and table["label"].to_pylist() == [True, False]
    assert sft_rows(table.drop_columns("label"))[0][1] == [*ids("=7"), EOS]
    assert (report.read, report.rows) == (1, 2)
    assert report.notes == ("labels: 1 true, 1 false",)
    _, report = offline(rows[:1], "kto")
    assert report.notes == ("labels: 1 true, 0 false; with one label, nothing is compared",)


LONG = [
    {"text": "3+4=7"},
    {"text": "What is 3 plus 4? 3 + 4 = 7. " * 3},
    {"prompt": "x", "text": "4+4=8"},
]


@pytest.mark.parametrize("side", ["keep_start", "keep_end"])
def test_long_rows_are_cut_with_their_masks(offline, side):
    whole, _ = offline(LONG)
    table, report = offline(LONG, max_length=10, length_policy={"name": "truncate", "side": side})
    ids, masks = whole["input_ids"].to_pylist(), whole["loss_mask"].to_pylist()
    kept = slice(None, 10) if side == "keep_start" else slice(-10, None)
    assert table["input_ids"].to_pylist() == [row[kept] for row in ids]
    assert table["loss_mask"].to_pylist() == [[False, *row[kept][1:]] for row in masks]
    assert report.cuts == Cuts(1, len(ids[1]) - 10) and report.longest == 10


def test_long_rows_are_dropped_split_or_refused(offline):
    whole, unlimited = offline(LONG, max_length=10, length_policy="split")
    assert unlimited.rows == 3 and unlimited.longest > 10
    table, report = offline(LONG, max_length=10, length_policy="drop")
    assert table["input_ids"].to_pylist() == whole["input_ids"].to_pylist()[::2]
    assert report.cuts == Cuts(dropped=1) and report.dropped == 1
    assert "max_length: 1 dropped" in report.text()
    assert report.metrics()["too_long"] == 1
    message = (
        r"rows.jsonl': row 1: a sequence has \d+ tokens, above data.max_length = 10; raise that, or"
        " set data.length_policy: drop or truncate"
    )
    with pytest.raises(ConfigError, match=message):
        offline(LONG, max_length=10)


@pytest.mark.parametrize("side", ["keep_start", "keep_end"])
def test_both_sides_of_a_long_pair_keep_the_same_prompt(offline, side):
    draw = random.Random(0)
    words = ["12", "What is", " plus", "=", "?"]
    text = lambda most: "".join(draw.choice(words) for _ in range(draw.randint(1, most)))  # noqa: E731
    rows = [{"prompt": text(9), "chosen": text(9), "rejected": text(9)} for _ in range(60)]
    settings = {"malformed": "drop", "length_policy": {"name": "truncate", "side": side}}
    whole, _ = offline(rows, "dpo", malformed="drop")
    table, report = offline(rows, "dpo", max_length=9, **settings)
    expected, seen = [], 0
    for prompt, chosen, rejected in sides(whole):
        if side == "keep_start":
            room = max(0, 9 - len(prompt))
            cut = (prompt[:9], chosen[:room], rejected[:room])
        else:
            room = 9 - max(len(chosen[-9:]), len(rejected[-9:]))
            cut = (prompt[max(0, len(prompt) - room) :] if room else [], chosen[-9:], rejected[-9:])
        if all(cut) and cut[1] != cut[2]:
            expected.append(cut)
            seen += cut != (prompt, chosen, rejected)
    assert sides(table) == expected and report.cuts.rows == seen > 5
    assert report.malformed["cut_away"].rows > 0
    assert report.longest <= 9


def test_pairs_that_become_equal_by_truncation_are_malformed(offline):
    rows = [
        {"prompt": "3", "chosen": "+4+5", "rejected": "+4+6"},
        {"prompt": "3", "chosen": "=", "rejected": "+"},
    ]
    cut = {"max_length": 4, "length_policy": "truncate"}
    _, report = offline(rows, "dpo", malformed="drop", **cut)
    assert {reason: found.rows for reason, found in report.malformed.items()} == {"equal": 1}
    assert report.rows == 1 and report.cuts == Cuts()
    with pytest.raises(ConfigError, match="row 0: both sides are equal; correct it"):
        offline(rows, "dpo", **cut)


MALFORMED = [
    {"prompt": "3", "chosen": "4", "rejected": "5"},
    {"prompt": "3", "chosen": "4", "rejected": "4"},
    {"prompt": "3", "chosen": "", "rejected": "4"},
    {"prompt": "3", "chosen": "5", "rejected": "5"},
    {"prompt": "3", "chosen": None, "rejected": "5"},
]


def test_malformed_rows_are_counted_by_reason_and_the_first_is_named(offline):
    table, report = offline(MALFORMED, "dpo", malformed="drop")
    assert table.num_rows == 1 and report.dropped == 4
    assert report.malformed["equal"].rows == 2
    assert re.fullmatch(
        r"row 1 of .*rows.jsonl': both sides are equal", report.malformed["equal"].first
    )
    assert "1 dropped because a completion is empty (first: row 2 of" in report.text()
    assert report.metrics()["malformed_missing"] == 1
    with pytest.raises(
        ConfigError,
        match=(
            r"^data.train = '.*rows.jsonl': row 1: both sides are equal; correct it, or set"
            r" data.malformed: drop$"
        ),
    ):
        offline(MALFORMED, "dpo")
    with pytest.raises(ConfigError, match=r"no row is left .*2 dropped because both sides are"):
        offline([MALFORMED[1], MALFORMED[3]], "dpo", malformed="drop")


def test_a_template_that_rewrites_turns_says_so(offline):
    thinking = assistant("<think>3</think>7")
    rows = [{"messages": [ASK, thinking]}, {"messages": [ASK, thinking, ASK, assistant("7")]}]
    _, report = offline(rows, template=STRIPS_THINKING, malformed="drop")
    assert report.rows == 1 and report.malformed["rewritten"].rows == 1
    with pytest.raises(
        ConfigError,
        match=r"row 1: the chat template changes an earlier turn when the chat continues \(message",
    ):
        offline(rows, template=STRIPS_THINKING)


@pytest.mark.parametrize(
    ("row", "objective", "template", "fields", "message"),
    [
        ({"messages": [ASK]}, "sft", None, {}, "has no chat template, which its messages need"),
        ({"text": "3"}, "sft", CHATML, {"system_prompt": "x"}, "data.system_prompt applies to ch"),
        ({"text": "3"}, "sft", CHATML, {"loss_on": "assistant"}, "data.loss_on = 'assistant' does"),
        (MALFORMED[0], "dpo", None, {"loss_on": "all"}, r"use one of \['auto', 'completion'\]"),
        (
            {"messages": [ASK, assistant("7")]}, "sft", CHATML,
            {"chat_template_kwargs": {"mood": 1}}, "does not use mood, so it has no effect",
        ),
        (
            {"messages": [ASK, assistant("7")]}, "sft", NO_SYSTEM, {"system_prompt": "x"},
            r"the chat template refuses the chat \(System role not supported\)",
        ),
        (
            {"text": "3"}, "sft", None, {"least_reward": 0.5},
            r"least_reward = 0.5 has no effect on .*\(data.train: text \(strings\)\); leave it",
        ),
        ({"text": "3"}, "sft", CHATML, {"apply_chat_template": True}, "template = True has no"),
        (
            {"messages": [ASK, assistant("7")], "x": "3"}, "sft", CHATML, {"prompt_column": "x"},
            "data.prompt_column = 'x' has no effect",
        ),
    ],
)  # fmt: skip
def test_settings_without_an_effect_are_refused(offline, row, objective, template, fields, message):
    with pytest.raises(ConfigError, match=message) as error:
        offline([row], objective, template, **fields)
    assert "\n" not in str(error.value)


def test_a_system_prompt_and_tools_are_described(offline):
    _, report = offline([{"messages": [ASK, assistant("7")]}], template=CHATML, system_prompt="Hi")
    assert "system prompt of 2 characters" in report.notes
    assert report.first[0].startswith("<|im_start|>system\nHi<|im_end|>\n")


def test_sources_are_contiguous_and_may_have_other_forms(chat_model, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "3"}\n{"text": null}\n{"text": "4"}\n')
    messages = pa.array([[ASK, assistant("7")], [ASK, {**assistant("8"), "name": "x"}]])
    pq.write_table(pa.table({"messages": messages, "id": [1, 2]}), tmp_path / "b.parquet")
    data = tuple(Source(path=str(tmp_path / name)) for name in ("a.jsonl", "b.parquet"))
    spec = offline_spec(chat_model(CHATML), malformed="drop", unused_keys="drop")
    report = write_offline_rows(tmp_path / "t.arrow", spec, data, "data.train", "sft")
    assert [(source.name, source.rows) for source in report.sources] == [("a", 2), ("b", 2)]
    assert report.forms == ("text (strings)", "messages (chats)")
    assert "unused columns of b: 'id'" in report.notes
    table = map_table(tmp_path / "t.arrow")
    assert [len(row) for row in table["input_ids"].to_pylist()] == [3, 3, 24, 24]
    bad = offline_spec(chat_model(CHATML), unused_keys="drop")
    with pytest.raises(ConfigError, match=r"a.jsonl': row 1: a value is missing \(its column 'te"):
        check_offline_rows(bad, data, "data.train", "sft")
    (tmp_path / "c.jsonl").write_text('{"text": "3"}\n{"text": ""}\n')
    data = tuple(Source(path=str(tmp_path / name)) for name in ("b.parquet", "c.jsonl"))
    with pytest.raises(ConfigError, match=r"c.jsonl': row 1: a completion is empty"):
        check_offline_rows(bad, data, "data.train", "sft")


def test_a_setting_needs_an_effect_on_training_or_held_out_rows(chat_model, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "3"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "3", "completion": "4"}\n')
    spec = offline_spec(chat_model(CHATML), apply_chat_template=True)
    text, prompted = (
        check_offline_rows(spec, str(tmp_path / name), "x", "sft")
        for name in ("a.jsonl", "b.jsonl")
    )
    refuse_idle(spec, {"data.train": text, "eval.data": prompted})
    with pytest.raises(ConfigError, match=r"data.train: text \(strings\); eval.data: text"):
        refuse_idle(spec, {"data.train": text, "eval.data": text})


def test_a_row_is_named_with_its_file(chat_model, tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text('{"text": "3"}\n{"text": "4"}\n')
    (tmp_path / "rows" / "b.jsonl").write_text('{"text": "5"}\n{"text": ""}\n')
    spec, data = offline_spec(chat_model(None)), str(tmp_path / "rows")
    with pytest.raises(ConfigError, match=r"rows/b.jsonl': row 1: a completion is empty"):
        check_offline_rows(spec, data, "data.train", "sft")
    spec = offline_spec(chat_model(None), malformed="drop")
    report = check_offline_rows(spec, data, "data.train", "sft")
    assert report.malformed["no_completion"].first.startswith(f"row 1 of '{data}/b.jsonl': ")


def test_a_name_of_a_column_cannot_add_a_line_to_the_plan(offline):
    _, report = offline([{"text": "3", "\x1b[31mevil\nloss 0": 1}])
    assert report.notes == ("unused columns of rows: '\\x1b[31mevil\\nloss 0'",)


def test_a_weighted_source_must_have_rows(chat_model, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "3"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n')
    data = tuple(Source(path=str(tmp_path / f"{name}.jsonl"), weight=1.0) for name in "ab")
    with pytest.raises(ConfigError, match="no row of source 'b' is left"):
        check_offline_rows(
            offline_spec(chat_model(None), malformed="drop"), data, "data.train", "sft"
        )


def test_columns_may_appear_later_in_a_jsonl_file(offline, monkeypatch):
    monkeypatch.setattr(offline_module, "ROWS_PER_CHECK", 1)
    rows = [
        {"chosen": "3+4=7", "rejected": "3+4=8"},
        {"prompt": "3", "chosen": "4", "rejected": "5"},
    ]
    table, report = offline(rows, "dpo")
    assert table.num_rows == 2 and report.read == 2


def test_blocks_do_not_change_the_rows(offline, monkeypatch):
    rows = [{"text": f"{number} + 4 = {number + 4}"} for number in range(50)]
    table, report = offline(rows)
    monkeypatch.setattr(offline_module, "ROWS_PER_CHECK", 7)
    other, again = offline(rows)
    assert table == other and report == again and len(other.to_batches()) == 8
    other_token = offline([*rows[:-1], {"text": "49 + 4 = 54"}])[1]
    other_mask = offline([{"prompt": "49", "completion": " + 4 = 53"}])[1]
    assert other_token.tokens == report.tokens
    assert len({found.digest for found in (report, other_token, other_mask)}) == 3
    assert other_mask.digest != offline(rows[-1:])[1].digest


def test_rows_are_read_by_number_without_loading_the_table(offline, tmp_path):
    offline([{"text": f"{number} + 4"} for number in range(5000)])
    before = pa.total_allocated_bytes()
    table = map_table(tmp_path / "rows.arrow")
    by_number = RowsByNumber(table)
    chosen = by_number.table([by_number.row(number) for number in (4999, 0, 1500)])
    assert pa.total_allocated_bytes() - before < 10_000 < table.nbytes / 10
    assert chosen["input_ids"].to_pylist() == [
        table["input_ids"][number].as_py() for number in (4999, 0, 1500)
    ]


def test_a_failed_write_leaves_no_file(chat_model, tmp_path):
    path = tmp_path / "t.arrow"
    (tmp_path / "a.jsonl").write_text('{"text": "3"}\n' * 2000 + '{"text": ""}\n')
    spec = offline_spec(chat_model(None))
    with pytest.raises(ConfigError, match="row 2000: a completion is empty"):
        write_offline_rows(path, spec, str(tmp_path / "a.jsonl"), "data.train", "sft")
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_a_report_needs_all_rows(chat_model, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "3"}\n')
    rows = OfflineRows(offline_spec(chat_model(None)), str(tmp_path / "a.jsonl"), "d", "sft")
    with pytest.raises(ValueError, match="not been read"):
        rows.report()
    assert [batch.schema for batch in rows] == [SFT_SCHEMA] and rows.report().rows == 1


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data(chat_model, tmp_path):
    """Keeping anything of a row would keep some objects for each of them."""
    path = tmp_path / "big.jsonl"
    with path.open("w") as file:
        for number in range(20_000):
            file.write(json.dumps({"prompt": f"{number} + 4", "completion": f"= {number + 4}"}))
            file.write("\n")
    rows = OfflineRows(offline_spec(chat_model(None)), str(path), "data.train", "sft")
    kept = []
    for number, _ in enumerate(rows):
        if number in (3, 18):
            gc.collect()
            kept.append((sys.getallocatedblocks(), pa.total_allocated_bytes()))
    (blocks, size), (later_blocks, later_size) = kept
    assert rows.report().rows == 20_000
    assert later_blocks - blocks < 5_000 and later_size - size < 100_000


def test_a_file_without_a_form_is_refused_with_all_its_columns(chat_model, tmp_path):
    pq.write_table(pa.table({"question": ["3"], "reply": ["4"]}), tmp_path / "a.parquet")
    spec = offline_spec(chat_model(None))
    with pytest.raises(ConfigError, match=r"has the columns \['question', 'reply'\], which are no"):
        check_offline_rows(spec, str(tmp_path / "a.parquet"), "data.train", "sft")


def test_reading_may_stop_after_some_rows(chat_model, tmp_path):
    rows = [{"text": "3"}, {"text": ""}, {"text": "4"}, {"text": "5"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = tuple(Source(path=str(tmp_path / "a.jsonl"), name=n, weight=1.0) for n in ("a", "b"))
    spec = offline_spec(chat_model(None), malformed="drop")
    report = check_offline_rows(spec, data, "eval.data", "sft", most_rows=2)
    assert report.rows == 2 and [source.rows for source in report.sources] == [2, 0]
    assert check_offline_rows(spec, data, "eval.data", "sft", most_rows=5).rows == 5
    assert check_offline_rows(spec, data, "eval.data", "sft", most_rows=50).rows == 6


def test_pairs_are_never_split(offline):
    with pytest.raises(ConfigError, match=r"data.length_policy: split would cut the completions"):
        offline(MALFORMED, "dpo", length_policy="split")


def test_variables_that_every_row_sets_itself_are_not_needed_in_the_settings(offline):
    template = "{% if not mood %}{{ raise_exception('no mood') }}{% endif %}" + CHATML
    row = {"messages": [ASK, assistant("7")], "chat_template_kwargs": {"mood": "glad"}}
    table, report = offline([row], template=template)
    assert table.num_rows == 1 and report.first[0].endswith("⟦7<|im_end|>\n⟧")
