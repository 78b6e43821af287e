"""Stop tokens and stop strings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig

from asyncrl.text.stops import (
    Stops,
    chat_end_token,
    generation_settings,
    load_stops,
    make_stops,
    text_before,
)
from asyncrl.text.tokenizer import decode, load_tokenizer


@pytest.fixture
def tokenizer(tiny_model: Path) -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(tiny_model)


def test_union_with_sources(tokenizer: AutoTokenizer, tiny_model: Path) -> None:
    assert load_stops(tiny_model, tokenizer) == Stops({2: ("generation config", "tokenizer EOS")})
    assert make_stops(tokenizer, [1, 2], ["<bos>"], [5]).tokens == {
        1: ("generation config", "rollout_stop '<bos>'"),
        2: ("generation config", "tokenizer EOS"),
        5: ("rollout_stop_token_ids",),
    }


def test_a_stop_string_may_be_any_number_of_tokens(tokenizer: AutoTokenizer) -> None:
    """Decoded text never contains a special token, so its id becomes a stop token. Any other string
    is looked for in the text."""
    stops = make_stops(tokenizer, [], ["\n", "ab c", "<pad>", "ab c"])
    assert stops.strings == ("\n", "ab c")
    assert stops.tokens == {0: ("rollout_stop '<pad>'",), 2: ("tokenizer EOS",)}


def test_spaces_at_the_edges_of_a_stop_string_are_kept(llama_model: Path) -> None:
    """A tokenizer may drop a space at the start of a text, but not inside it."""
    assert make_stops(
        AutoTokenizer.from_pretrained(llama_model), [], [" plus", ".\n\n", "日本"]
    ).strings == (" plus", ".\n\n", "日本")


def test_chat_end_token(tokenizer: AutoTokenizer) -> None:
    assert chat_end_token(tokenizer) is None
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}"
    assert make_stops(tokenizer, []).tokens[chat_end_token(tokenizer)] == ("chat end token",)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{% for m in messages %}{{ m.content }}<|context_end|>{% endfor %}", "<|context_end|>"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", None),
        ("{{ raise_exception('three turns are wanted') }}", None),
        ("{% for m in messages %}{{ m.content }}<|no_token|>{% endfor %}", None),
    ],
    ids=["an x in the end token", "no end token", "a template that refuses", "an unknown token"],
)
def test_chat_end_token_of_unusual_templates(
    tokenizer: AutoTokenizer, template: str, end: str | None
) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|context_end|>"]})
    tokenizer.chat_template = template
    assert chat_end_token(tokenizer) == (
        None if end is None else tokenizer.convert_tokens_to_ids(end)
    )


@pytest.mark.parametrize(
    "chat_template",
    [
        "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}<pad>{% endfor %}",
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}<pad>"
        "{% endfor %}",
    ],
    ids=["needs a system message", "reads parts"],
)
def test_the_chat_end_token_of_templates_that_ask_for_more(
    tokenizer: AutoTokenizer, chat_template: str
) -> None:
    tokenizer.chat_template = chat_template
    assert chat_end_token(tokenizer) == tokenizer.pad_token_id


STRICT = (
    "{% if mode is not defined %}{{ raise_exception('set mode') }}{% endif %}",
    "{% if mode is not boolean %}{{ raise_exception('set mode') }}{% endif %}",
    "{{ mode.upper() }}",
    "{{ mode + 1 }}",
    "{% for name in tools %}{{ name.function.name }}{% endfor %}",
    "{% if not tools %}{{ raise_exception('tools are wanted') }}{% endif %}",
)
"""Beginnings of templates that need a variable."""


@pytest.mark.parametrize("strict", STRICT)
def test_the_chat_end_token_of_a_template_that_needs_a_variable(
    tokenizer: AutoTokenizer, strict: str
) -> None:
    tokenizer.chat_template = strict + "{% for m in messages %}{{ m.content }}<pad>{% endfor %}"
    assert chat_end_token(tokenizer) == tokenizer.pad_token_id


@pytest.mark.parametrize(
    "written", ["(m.role ~ m.content) | upper", "m.content | title", "m.content | tojson"]
)
def test_a_filter_does_not_hide_the_chat_end_token(tokenizer: AutoTokenizer, written: str) -> None:
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ {written} }}}}<pad>{{% endfor %}}"
    assert chat_end_token(tokenizer) == tokenizer.pad_token_id


def test_the_runs_variables_may_choose_the_chat_end_token(
    tokenizer: AutoTokenizer, tmp_path: Path
) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ end }}{% endfor %}"
    assert chat_end_token(tokenizer) is None
    stops = load_stops(tmp_path, tokenizer, variables={"end": "<pad>"})
    assert stops.tokens == {0: ("chat end token",), 2: ("tokenizer EOS",)}


def test_a_chat_end_token_may_be_an_ordinary_one(tokenizer: AutoTokenizer) -> None:
    """Decoding keeps it, so the text must end before it."""
    tokenizer.add_tokens(["<|im_end|>"])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    stops = make_stops(tokenizer, [], ["\n"])
    assert stops.tokens == {2: ("tokenizer EOS",), end: ("chat end token",)}
    assert stops.strings == ("\n", "<|im_end|>")
    settings = generation_settings(Path("nowhere"), stops)
    assert settings == {"eos_token_id": [2, end], "stop_strings": ["\n"]}


def test_special_tokens_that_only_tokenizer_json_lists(llama_model: Path, tmp_path: Path) -> None:
    """For example Phi-3's `<|end|>`. Decoding drops it, although the config does not list it."""
    model = shutil.copytree(llama_model, tmp_path / "unlisted")
    file = model / "tokenizer_config.json"
    file.write_text(
        json.dumps(
            {
                key: value
                for key, value in json.loads(file.read_text()).items()
                if key != "extra_special_tokens"
            }
        )
    )
    unlisted = load_tokenizer(str(model))
    end = unlisted.convert_tokens_to_ids("<|end|>")
    assert end not in unlisted.all_special_ids and decode(unlisted, [end]) == ""
    assert make_stops(unlisted, [], ["<|user|>"]) == Stops(
        {2: ("tokenizer EOS",), 3: ("rollout_stop '<|user|>'",), end: ("chat end token",)}
    )


def test_invalid_stops_are_refused(tokenizer: AutoTokenizer) -> None:
    with pytest.raises(ValueError, match="'Ä' never occurs in text"):
        make_stops(tokenizer, [], ["Ä"])
    with pytest.raises(
        ValueError,
        match=(
            r"'<eos>\\n' never occurs in text of this tokenizer \(its tokens: \['<eos>',"
            r" '\\n'\]\); use a special token alone"
        ),
    ):
        make_stops(tokenizer, [], ["<eos>\n"])
    with pytest.raises(ValueError, match="empty string, which would stop at once"):
        make_stops(tokenizer, [], [""])
    with pytest.raises(ValueError, match=r"id 999 .* outside the vocabulary"):
        make_stops(tokenizer, [], [], [999])


def test_a_text_ends_before_the_first_stop_string() -> None:
    assert text_before("1+2=3\nab", ["ab", "\n", "x"]) == "1+2=3"
    assert text_before("1+2=3", ["x"]) == text_before("1+2=3", []) == "1+2=3"


def test_the_stops_of_a_run_become_those_of_its_exports(llama_model: Path, tmp_path: Path) -> None:
    """A base model's file names EOS only, and training taught the end of the template's turns."""
    model = shutil.copytree(llama_model, tmp_path / "base")
    file = model / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": 2, "do_sample": True}))
    tokenizer = load_tokenizer(str(model))
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    stops = load_stops(model, tokenizer, ["</answer>"], [7])
    assert sorted(stops.tokens) == sorted([2, end, 7])
    settings = generation_settings(model, stops)
    assert settings == {
        "eos_token_id": sorted([2, end, 7]),
        "do_sample": True,
        "stop_strings": ["</answer>"],
    }
    file.write_text(json.dumps(settings))
    again = load_stops(model, tokenizer)
    assert set(again.tokens) == set(stops.tokens) and again.strings == stops.strings
    GenerationConfig.from_pretrained(model).validate(strict=True)


def test_a_checkpoint_without_settings_of_generation_gets_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"bos_token_id": 1, "eos_token_id": 9, "vocab_size": 9}')
    assert generation_settings(tmp_path, Stops({2: ("tokenizer EOS",)})) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a JSON object"),
        ("[]", "is not a JSON object"),
        ('{"eos_token_id": "2"}', "has eos_token_id = '2'"),
        ('{"stop_strings": [2]}', r"has stop_strings = \[2\]"),
    ],
)
def test_an_invalid_generation_config_is_refused(
    tmp_path: Path, tokenizer: AutoTokenizer, text: str, message: str
) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=f"generation_config.json {message}"):
        load_stops(tmp_path, tokenizer)
