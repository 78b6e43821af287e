"""The answer part of completions, as their text shows it or by the model's own turn format."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import llama_checkpoint
import pytest
from chat_families import CHATML, FORCES_THINKING

from asyncrl.text.answer import AnswerFormat, AnswerReader, answer_format
from asyncrl.text.reasoning import opens_reasoning, text_after_reasoning
from asyncrl.text.response import ResponseReader
from asyncrl.text.tokenizer import decode, load_tokenizer

GPT_OSS = "{# <|start|> <|channel|> <|call|> #}" + CHATML
MISTRAL = "{# [TOOL_CALLS] #}" + CHATML
HERMES = CHATML + "{# <tool_call> #}"
COMMAND = "{# <|START_ACTION|> #}" + CHATML


def saved_model(directory: Path, template: str, special: list[str]) -> None:
    """Write a tokenizer with this chat template and these special tokens."""
    tokenizer: Any = llama_checkpoint.tokenizer()
    tokens = ["<|im_start|>", "<|im_end|>", *special]
    tokenizer.add_special_tokens({"extra_special_tokens": tokens})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("4", "4"),
        ("", ""),
        ("<think>\\boxed{5}</think> $7$", " $7$"),
        ("<think>\n\n</think>\n\n42", "\n\n42"),
        ("the template opened it</think>42", "42"),
        ("<think>a <think> b</think>42", "42"),
        ("<thinking>a</thinking>42", "42"),
        ("<seed:think>a</seed:think>42", "42"),
        ("[THINK]a[/THINK]42", "42"),
        ("◁think▷a◁/think▷42", "42"),
        ("<reasoning>a</reasoning><answer>42</answer>", "<answer>42</answer>"),
        ("<|begin_of_thought|>a<|end_of_thought|><|begin_of_solution|>42<|end_of_solution|>", "42"),
        ("<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>42<|END_RESPONSE|>", "42"),
        ("<think>a</think>\n<response>42</response>", "42"),
        ("<think>a</think><response>42", "42"),
        ("<response>42</response>", "<response>42</response>"),
        ("<|inner_prefix|>a<|inner_suffix|>42", "42"),
        ("<analysis>a</analysis>42", "42"),
        ("<scratchpad>a</scratchpad>42", "42"),
        ("Sure. <think>a</think>42", "Sure. \n42"),
        (
            "<|channel|>analysis<|message|>5<|end|><|start|>assistant<|channel|>final<|message|>"
            "42<|return|>",
            "42",
        ),
        ("<think>open ```</think>```python\nx\n```", "```python\nx\n```"),
        ("<think>a</think>42</think>", "42"),
        ("a </think> b </think>42", "42"),
        ("<think>a</think>4<think>b</think>2", "4\n2"),
        ("<think>a</think>42<think>or not", "42"),
        ('<think>A 5" screen. </think>A 6" screen', 'A 6" screen'),
        ("<think>It is `x.</think>Use `y` now", "Use `y` now"),
        # Marks that code reads, or that a sentence names, are text.
        ('x.split("</think>")[-1]', 'x.split("</think>")[-1]'),
        ('re.sub(r"<think>.*?</think>", "", x)', 're.sub(r"<think>.*?</think>", "", x)'),
        ("x.split('</think>')", "x.split('</think>')"),
        ("The tag `<think>` opens it.", "The tag `<think>` opens it."),
        ("The tag <think> is used. Answer 5", "The tag <think> is used. Answer 5"),
        ("<think>a</think>The tag <think> is used. 5", "The tag <think> is used. 5"),
        ("Do your <analysis> first.\n5", "Do your <analysis> first.\n5"),
        ("First this.\n  <think>a", "First this.\n  "),
        # No answer.
        ('<think>Cut: "</think>" is not', None),
        ("<think>a so \\boxed{5}", None),
        ("<think>a</think>", None),
        ("<think>a</think>\n ", None),
        ("<|channel|>analysis<|message|>it is 5", None),
        ("[THINK]a", None),
        ("<|inner_prefix|>a", None),
        ("\n <reasoning>a", None),
    ],
)
def test_the_text_without_its_reasoning(text: str, answer: str | None) -> None:
    assert text_after_reasoning(text) == answer


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<｜Assistant｜><think>", True),
        ("[/INST][THINK]", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("What does <think> mean?", False),
        ("3 + 4 =", False),
    ],
)
def test_a_prompt_may_open_the_reasoning(prompt: str, opens: bool) -> None:
    assert opens_reasoning(prompt) is opens


def test_reasoning_that_the_prompt_opened_and_nothing_ended_has_no_answer() -> None:
    reader = AnswerReader(AnswerFormat())
    assert reader.of_completion("q<think>\n", [], "so it is 42") is None
    assert reader.of_completion("q<think>\n", [], "</think>42") == "42"
    assert reader.of_completion("q", [], "so it is 42") == "so it is 42"


@pytest.mark.parametrize(
    ("template", "special", "completion", "answer"),
    [
        (
            GPT_OSS,
            ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"],
            "<|channel|>analysis<|message|>\\boxed{5}<|end|><|start|>assistant<|channel|>final"
            "<|message|>It is 7.<|return|>",
            "It is 7.",
        ),
        (
            GPT_OSS,
            ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"],
            "<|channel|>analysis<|message|>\\boxed{5}",
            None,
        ),
        (MISTRAL, ["[THINK]", "[/THINK]"], "[THINK]\\boxed{5}[/THINK]It is 7.", "It is 7."),
        (MISTRAL, ["[THINK]", "[/THINK]"], "[THINK]\\boxed{5}", None),
        (
            COMMAND,
            [f"<|{end}_{of}|>" for end in ("START", "END") for of in ("THINKING", "RESPONSE")],
            "<|START_THINKING|>5<|END_THINKING|><|START_RESPONSE|>It is 7.<|END_RESPONSE|>",
            "It is 7.",
        ),
        # A chat template that shows no format.
        (CHATML, ["<think>", "</think>"], "<think>\\boxed{5}</think>It is 7.", "It is 7."),
        (FORCES_THINKING, ["<think>", "</think>"], "\\boxed{5}</think>It is 7.", "It is 7."),
        (FORCES_THINKING, ["<think>", "</think>"], "\\boxed{5}", None),
        (FORCES_THINKING, ["<think>", "</think>"], "</think>It is 7.", "It is 7."),
    ],
)
def test_special_tokens_show_where_an_answer_begins(
    template: str, special: list[str], completion: str, answer: str | None, tmp_path: Path
) -> None:
    saved_model(tmp_path, template, special)
    known = answer_format(str(tmp_path))
    assert known.model == str(tmp_path)
    tokenizer: Any = load_tokenizer(str(tmp_path))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "q"}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer.encode(completion, add_special_tokens=False)
    reader = AnswerReader(known)
    assert reader.of_completion(prompt, ids, decode(tokenizer, ids)) == answer
    # A stop string is no part of the text.
    ids = tokenizer.encode(completion + " STOP", add_special_tokens=False)
    seen = decode(tokenizer, ids).removesuffix(" STOP")
    found = reader.of_completion(prompt, ids, seen)
    assert found is None if answer is None else found == answer


def test_a_model_whose_text_shows_its_marks_needs_no_tokenizer(tmp_path: Path) -> None:
    saved_model(tmp_path, CHATML, [])
    assert answer_format(str(tmp_path)) == AnswerFormat(None, parsed=False)


TEXTS = [
    "<think>5</think>7",
    "7",
    "<think>5",
    "5</think>7",
    "<think></think>7",
    "</think>7",
    "<think>5</think>7</think>",
    "<think>5</think>4<think>6",
    "<think>5</think><answer>7</answer>",
    "The tag <think> is used. Answer 7",
    "The tag `<think>` opens it.",
    "",
]


@pytest.mark.parametrize("special", [[], ["<think>", "</think>"]])
@pytest.mark.parametrize(
    "template", [CHATML, FORCES_THINKING, HERMES, FORCES_THINKING + "{# <tool_call> #}"]
)
def test_a_session_is_read_as_a_single_turn_is(
    template: str, special: list[str], tmp_path: Path
) -> None:
    saved_model(tmp_path, template, special)
    tokenizer: Any = load_tokenizer(str(tmp_path))
    reader, turns = AnswerReader(answer_format(str(tmp_path))), ResponseReader(tokenizer)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "q"}], add_generation_prompt=True, tokenize=False
    )
    # A special token that nothing opened is lost in a session's message.
    for text in [*TEXTS, *([] if special else ["5</think>"])]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        seen = decode(tokenizer, ids)
        message, _ = turns.read(tokenizer.encode(prompt, add_special_tokens=False), ids, seen, None)
        alone = reader.of_completion(prompt, ids, seen)
        assert reader.of_session(prompt, str(message["content"]), message) == (alone or None), text


@pytest.mark.parametrize(
    "part", ["<think>", "</think>", "<think></think>", '"<think>', "</think>x", "[think", "<|"]
)
def test_a_degenerate_text_costs_little(part: str) -> None:
    began = time.process_time()
    text_after_reasoning(part * 20_000)
    assert time.process_time() - began < 20  # quadratic work would take minutes
