"""Masks of chats, compared with a slow reference for several families of templates; and templates
whose masks cannot be proved."""

import json
import random

import pytest
from chat_families import (
    CHATML,
    CHATML_TAGS,
    CONTENT_TAGS,
    DATED,
    FAMILIES,
    FORCES_THINKING,
    NO_SYSTEM,
    STRIPS_THINKING,
    TOOLS,
    slow_mask,
)

from asyncrl.config import ConfigError
from asyncrl.data import conversations
from asyncrl.data.conversations import Encoder
from asyncrl.data.form_rows import Chat, MalformedError, Text
from asyncrl.text.tokenizer import load_tokenizer

WORDS = ["What is 3 plus 40?", "Grüße, 日本語 🙂", "  two  spaces ", "line\nend\n", "", "🙂", "7"]


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def random_chats(count, seed=0):
    """Chats with one to four turns, with and without a system message."""
    draw = random.Random(seed)
    for _ in range(count):
        chat = [{"role": "system", "content": draw.choice(WORDS)}] if draw.random() < 0.5 else []
        for _ in range(draw.randint(1, 4)):
            chat += [user(draw.choice(WORDS)), assistant(draw.choice(WORDS) + draw.choice(WORDS))]
        yield chat


@pytest.fixture
def encode(chat_model):
    """`encode(template, chats, target)`: what an encoder makes of them, and the encoder."""

    def make(template, chats, target="turns"):
        encoder = Encoder(load_tokenizer(chat_model(template)))
        return encoder.chats(chats, target), encoder

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_assistant_turns_are_trained_with_their_end_and_without_headers(encode, name):
    family, chats = FAMILIES[name], list(random_chats(30))
    found, encoder = encode(family.template, [Chat(chat, 0) for chat in chats])
    for chat, tokens in zip(chats, found, strict=True):
        parts = family.parts(chat)
        text = "".join(text for text, _ in parts)
        whole = encoder.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokens.ids.tolist() == whole
        assert tokens.mask.tolist() == slow_mask(encoder.tokenizer, parts, whole)
    way = "tags" if "tags" in name else "proof"
    assert encoder.counts[way] == 30
    assert encoder.counts.get("end_added", 0) == (30 if name == "tags around contents" else 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_after_a_prompt_only_the_completions_turns_are_trained(encode, name):
    family, chats = FAMILIES[name], [chat for chat in random_chats(30, 1) if len(chat) >= 4]
    completed = [Chat(chat, len(chat) - 3) for chat in chats]
    found, encoder = encode(family.template, completed, "completion turns")
    everything, _ = encode(family.template, completed, "completion")
    for chat, tokens, after in zip(chats, found, everything, strict=True):
        parts = family.parts(chat)
        ids = tokens.ids.tolist()
        mask = slow_mask(encoder.tokenizer, parts, ids)
        mask[: tokens.prompt] = [False] * tokens.prompt
        assert tokens.mask.tolist() == mask
        assert after.mask.tolist() == [place >= tokens.prompt for place in range(len(ids))]


def test_prompts_end_with_the_start_of_the_turn(encode):
    chat = Chat([user("3"), assistant("4"), user("5"), assistant("6")], 3)
    (tokens,), encoder = encode(CHATML, [chat], "completion turns")
    prompt = encoder.tokenizer.decode(tokens.ids[: tokens.prompt])
    assert prompt.endswith("<|im_start|>user\n5<|im_end|>\n<|im_start|>assistant\n")


def test_small_parts_give_the_same_tokens(encode, monkeypatch):
    chats = [Chat(chat, 0) for chat in random_chats(20)]
    texts = [Text(word, word) for word in WORDS]
    whole, encoder = encode(CHATML, chats)
    whole_texts = encoder.texts(texts, "completion")
    monkeypatch.setattr(conversations, "CHARACTERS_AT_ONCE", 50)
    parts, encoder = encode(CHATML, chats)
    for a, b in zip(
        [*whole, *whole_texts], [*parts, *encoder.texts(texts, "completion")], strict=True
    ):
        assert a.ids.tolist() == b.ids.tolist() and a.mask.tolist() == b.mask.tolist()


def test_tags_agree_with_transformers_where_tokens_are_whole_characters(encode):
    chats = [chat for chat in random_chats(30) if all("🙂" not in m["content"] for m in chat)]
    found, encoder = encode(CHATML_TAGS, [Chat(chat, 0) for chat in chats])
    for chat, tokens in zip(chats, found, strict=True):
        theirs = encoder.tokenizer.apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True
        )
        assert tokens.ids.tolist() == theirs["input_ids"]
        assert tokens.mask.astype(int).tolist() == theirs["assistant_masks"]


def test_every_byte_of_a_last_character_is_trained(encode):
    """transformers' own mask ends at the first of a character's tokens."""
    chat = [user("3"), assistant("🙂"), user("4"), assistant("5")]
    (tokens,), encoder = encode(CONTENT_TAGS, [Chat(chat, 0)])
    trained = encoder.tokenizer.decode(tokens.ids[tokens.mask])
    assert trained == "🙂<|im_end|>5<|im_end|>"


def test_a_tokenizer_without_offsets_falls_back_to_the_proof(encode, chat_model, monkeypatch):
    chats = [Chat(chat, 0) for chat in random_chats(10)]
    tagged, _ = encode(CHATML_TAGS, chats)
    monkeypatch.setattr(type(load_tokenizer(chat_model(CHATML_TAGS))), "is_fast", False)
    proved, encoder = encode(CHATML_TAGS, chats)
    assert encoder.counts == {"proof": 10}
    newline = encoder.tokenizer.encode("\n", add_special_tokens=False)[0]
    for a, b in zip(tagged, proved, strict=True):
        assert a.ids.tolist() == b.ids.tolist()
        more = b.mask & ~a.mask  # the template's newline after the turn
        assert not (a.mask & ~b.mask).any() and set(b.ids[more].tolist()) == {newline}


THINKING = [user("3"), assistant("<think>three</think>4"), user("5"), assistant("6")]


@pytest.mark.parametrize(
    ("template", "chat", "target", "reason", "message"),
    [
        (
            STRIPS_THINKING, Chat(THINKING, 0), "turns", "rewritten",
            "message 1 is rendered as '<think>three' alone, but as '4<|im_end|>",
        ),
        (
            FORCES_THINKING, Chat(THINKING, 0), "turns", "not_a_prefix",
            "what precedes message 3 is rendered as '<think>' alone, but as '6<|im_end|>",
        ),
        (
            FORCES_THINKING, Chat([user("3"), assistant("4")], 1), "completion turns",
            "not_a_prefix", "its prompt is rendered as '<think>' alone, but as '4<|im_end|>",
        ),
        (
            NO_SYSTEM, Chat([{"role": "system", "content": "x"}, *THINKING], 0), "turns",
            "template", "System role not supported",
        ),
        (CHATML, Chat([user("3")], 0), "turns", "no_turn", "no turn of the assistant"),
        (CHATML, Chat([assistant("3"), *THINKING], 0), "turns", "no_prompt", "begins with the"),
        (
            CHATML_TAGS, Chat([user("3"), assistant("4"), user("5")], 2), "completion turns",
            "no_turn", "no turn",
        ),
    ],
)  # fmt: skip
def test_a_mask_without_a_proof_is_malformed(encode, template, chat, target, reason, message):
    (error,), _ = encode(template, [chat], target)
    assert isinstance(error, MalformedError) and error.reason == reason
    assert message in str(error) and "\n" not in str(error)


def test_a_template_that_strips_thinking_is_fine_where_nothing_is_stripped(encode):
    chats = [Chat(THINKING[:2], 0), Chat(THINKING, 3)]
    found, encoder = encode(STRIPS_THINKING, chats, "completion turns")
    shown = [encoder.tokenizer.decode(tokens.ids[tokens.mask]) for tokens in found]
    assert shown == ["<think>three</think>4<|im_end|>\n", "6<|im_end|>\n"]


def test_an_earlier_turn_may_be_longer_alone_than_the_whole_chat(encode):
    """With its thinking, and an EOS that the template writes last."""
    template = STRIPS_THINKING + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    long = [user("3"), assistant("<think>" + "three " * 40 + "</think>4"), *THINKING[2:]]
    (error,), _ = encode(template, [Chat(long, 0)])
    assert isinstance(error, MalformedError) and error.reason == "rewritten"


def test_tags_may_begin_with_the_assistant(encode):
    (tokens,), encoder = encode(CHATML_TAGS, [Chat([assistant("3"), *THINKING], 0)])
    assert encoder.tokenizer.decode(tokens.ids[tokens.mask]).startswith("3<|im_end|>")


def test_tool_calls_are_trained_and_results_are_not(offline):
    call = {"function": {"name": "add", "arguments": {"a": 3}}}
    chat = [
        user("3+4"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7"},
        assistant("It is 7."),
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    rows = [
        {"messages": chat, "tools": tools},
        {"messages": chat, "tools": json.dumps(tools)},
        {"messages": chat, "tools": None},
    ]
    table, report = offline(rows, template=TOOLS)
    with_tools, as_text, without = table["input_ids"].to_pylist()
    assert with_tools == as_text != without
    start = "<|im_start|>assistant\n"
    assert report.first[0].endswith(
        f'{start}⟦call add{{"a": 3}}<|im_end|>\n⟧<|im_start|>tool\n7<|im_end|>\n'
        f"{start}⟦It is 7.<|im_end|>\n⟧"
    )
    assert "1 tool" in report.notes


def test_template_variables_of_a_row_come_on_top(offline, chat_model):
    template = CHATML + "{{ mood }}{{ tone }}"
    chat = [user("3"), assistant("4")]
    rows = [
        {"prompt": chat[:1], "completion": chat[1:], "chat_template_kwargs": {"mood": "sad"}},
        {"prompt": chat[:1], "completion": chat[1:], "chat_template_kwargs": None},
        {"prompt": chat[:1], "completion": chat[1:], "chat_template_kwargs": '{"mood": "odd"}'},
    ]
    kwargs = {"mood": "glad", "tone": "low"}
    table, _ = offline(rows, template=template, chat_template_kwargs=kwargs, loss_on="all")
    tokenizer = load_tokenizer(chat_model(template))
    ends = [tokenizer.decode(ids).rpartition("\n")[2] for ids in table["input_ids"].to_pylist()]
    assert ends == ["sadlow", "gladlow", "oddlow"]
    with pytest.raises(ConfigError, match="tokenize is not a variable of a template"):
        offline(rows, template=template, chat_template_kwargs={"tokenize": False}, loss_on="all")


def test_a_template_that_writes_the_date_is_noted(offline):
    table, report = offline([{"messages": THINKING}], template=DATED)
    assert any("writes today's date" in note for note in report.notes)
    assert report.first[0].endswith("⟦6<|im_end|>\n⟧") and table.num_rows == 1
