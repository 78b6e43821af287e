"""The final answer that graders read, and the rewards that they give for it."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import llama_checkpoint
import pytest
from chat_families import CHATML

from asyncrl.config import RewardConfig
from asyncrl.environments.ready.graded import graded
from asyncrl.environments.ready.puzzles import final_answer
from asyncrl.rewards.builtin import exact_match
from asyncrl.rewards.contract import GroupCall, ScoredSession, call_reward
from asyncrl.rewards.final_answer import code_blocks, final_expression, tagged_answer
from asyncrl.rewards.pool import RewardPool
from asyncrl.text.answer import AnswerReader, answer_format
from asyncrl.text.tokenizer import load_tokenizer

MATH = "asyncrl.rewards.builtin:math_verify"
EXACT = "asyncrl.rewards.builtin:exact_match"


@pytest.mark.parametrize(
    ("answer", "final"),
    [
        ("first \\boxed{1}, no: \\boxed{2}", "\\boxed{2}"),
        ("\\boxed{\\frac{1}{2}} it is", "\\boxed{\\frac{1}{2}}"),
        ("\\boxed{\\left\\{1, 2\\right\\}}", "\\boxed{\\left\\{1, 2\\right\\}}"),
        ("\\boxed{\\boxed{5}}", "\\boxed{5}"),
        ("\\boxed{5}, as \\boxed{} asks", "\\boxed{5}"),
        ("\\fbox{5}", "\\boxed{5}"),
        ("\\boxed 5", "\\boxed{5}"),
        ("\\boxed{5}\n```python\nprint('\\\\boxed{6}')\n```", "\\boxed{5}"),
        ("```\n\\boxed{5}\n```", "\\boxed{5}"),
        ("so\n#### 1,234\nIt took 7 steps.", "1,234"),
        ("so\n#### $18", "$18"),
        ("#### **42**", "42"),
        ("#### 42 red apples.\nThat is 3 more.", "42"),
        ("#### Step 2\nso 7", "#### Step 2\nso 7"),
        ("#### 2 Cases\nso 7", "#### 2 Cases\nso 7"),
        ("\\boxed{3}\n#### 4", "4"),
        ("#### 3\nno: \\boxed{4}", "\\boxed{4}"),
        ("<answer>42</answer> (see $7$)", "42"),
        ("<answer>1</answer> or <answer>42</answer>", "42"),
        ("<answer>42", "42"),
        ("42</answer>", "42"),
        ("<Answer>so \\boxed{42}</Answer>", "\\boxed{42}"),
        ("It is 7.", "It is 7."),
    ],
)
def test_the_final_expression(answer: str, final: str) -> None:
    assert final_expression(answer) == final


@pytest.mark.parametrize(
    ("answer", "final"),
    [
        ("It is \\boxed{7} and", "\\boxed{7}"),
        ("<answer>7</answer> and", "7"),
        ("#### 7\nand", "7"),
        ("#### 7", None),
        ("It is 7", None),
        ("It is \\boxed{7", None),
        ("\\boxed{7}, no: \\boxed{8", None),
        ("<answer>7", None),
    ],
)
def test_what_was_cut_before_its_answer_has_none(answer: str, final: str | None) -> None:
    assert final_expression(answer, ended=False) == final


def test_the_text_in_an_answer_tag() -> None:
    assert tagged_answer("a <answer> 4\n2 </answer>") == " 4\n2 "
    assert tagged_answer("a") == "a"
    assert final_answer("<think>3</think><answer>4</answer>.") == "4"
    assert final_answer("<think>3") == ""


@pytest.mark.parametrize("part", ["\\boxed{", "\\boxed{}", "<answer>", "#### 1", "\\boxed{{"])
def test_a_degenerate_answer_costs_little(part: str) -> None:
    began = time.process_time()
    final_expression(part * 20_000, ended=False)
    assert time.process_time() - began < 20  # quadratic work would take minutes


TURNS = [
    ("<think>\\boxed{5}</think> So $7$.", "stop", 1.0),
    ("\\boxed{5}</think> So $7$.", "stop", 1.0),
    ("<think>a</think>\\boxed{5}, no: \\boxed{7}", "stop", 1.0),
    ("<think>a</think>\\boxed{7}, no: \\boxed{5}", "stop", 0.0),
    ("<think>\\boxed{7}", "length", 0.0),
    ("<think>\\boxed{7}", "stop", 0.0),
    ("It is \\boxed{7}, as", "length", 1.0),
    ("It is 7", "length", 0.0),
    ("It is 7", "stop", 1.0),
    ("<think>5</think><answer>7</answer>", "stop", 1.0),
    ("<|begin_of_thought|>5<|end_of_thought|>\n7", "stop", 1.0),
]


def scored(function: str, turns: list[tuple[str, str, float]], sessions: bool) -> list[Any]:
    texts, reasons, _ = zip(*turns, strict=True)
    call = GroupCall(
        ["q"] * len(texts),
        texts,
        [[1]] * len(texts),
        {"answer": "7"},
        reasons,
        [reason != "stop" for reason in reasons],
        [ScoredSession()] * len(texts) if sessions else None,
    )
    return call_reward(function, call).rewards


@pytest.mark.parametrize("sessions", [False, True])
def test_mathematics_is_graded_in_the_answer_part(sessions: bool) -> None:
    assert scored(MATH, TURNS, sessions) == [reward for _, _, reward in TURNS]


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("3 + 39 = <<3+39=42>>42.\n#### 42", "\\boxed{42}", 1.0),
        ("3 + 39 = 42.\n#### 42", "\\boxed{3}", 0.0),
        ("(1, 2)", "<answer> (1, 2) </answer>", 1.0),
        ("(1, 2)", "<answer>2</answer>", 0.0),
        ("1/2", "<answer>\\frac{1}{2}</answer>", 1.0),
    ],
)
def test_mathematics_reads_marks_on_both_sides(answer: str, text: str, reward: float) -> None:
    call = GroupCall(["q"], [text], [[1]], {"answer": answer}, ["stop"], [False])
    assert call_reward(MATH, call).rewards == [reward]


def test_an_exact_answer_is_the_answer_part() -> None:
    turns = [
        ("<think>5</think>\n\n7", "stop", 1.0),
        ("<think>5</think><answer> 7 </answer>", "stop", 1.0),
        ("<think>7", "length", 0.0),
        ("7", "stop", 1.0),
        ("5", "stop", 0.0),
    ]
    for sessions in (False, True):
        assert scored(EXACT, turns, sessions) == [reward for _, _, reward in turns]
    assert exact_match(["", "<answer>7</answer>"], ["", "<answer>7</answer>"]) == [1.0, 1.0]


def test_programs_are_taken_from_the_answer_part() -> None:
    completions = [
        "<think>```python\nx = 1\n",
        "<think>```python\nx = 1\n</think>```python\nx = 2\n```",
        "```python\nx = 1",
    ]
    assert code_blocks(completions, None, [True, True, False]) == [None, "x = 2\n", None]


def test_a_column_cannot_take_the_place_of_an_answer() -> None:
    columns = {"answer": "7", "answer_texts": "7", "answer_ended": True}
    call = GroupCall(["q"], ["<think>5</think>6"], [[1]], columns, ["stop"], [False])
    assert call_reward(EXACT, call).rewards == [0.0]


@pytest.mark.parametrize("grade", ["math", "exact"])
def test_environments_grade_the_answer_part(grade: Any) -> None:
    def given(text: str, ended: bool = True) -> dict[str, float]:
        return asyncio.run(graded({"answer": "7"}, text, grade, ended))

    assert given("<think>5</think>7") == {"reward": 1.0}
    assert given("<think>7") == {"reward": 0.0}
    assert given("<answer>7", ended=False) == {"reward": 0.0}


def test_a_reward_process_reads_special_tokens(tmp_path: Path) -> None:
    tokenizer: Any = llama_checkpoint.tokenizer()
    special = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
    tokenizer.add_special_tokens({"extra_special_tokens": special})
    tokenizer.chat_template = "{# <|start|> <|channel|> <|call|> #}" + CHATML
    tokenizer.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    text = (
        "<|channel|>analysis<|message|>5<|end|><|start|>assistant<|channel|>final<|message|>7"
        "<|return|>"
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    plain = tokenizer.decode(ids, skip_special_tokens=True)
    call = GroupCall(["<|start|>assistant"], [plain], [ids], {"answer": "7"}, ["stop"], [False])
    known = answer_format(str(tmp_path))
    assert call_reward(EXACT, call, answers=AnswerReader(known)).rewards == [1.0]
    config = RewardConfig.model_validate({"functions": {"exact": {"function": EXACT}}})
    with RewardPool(config, answers=known) as pool:
        assert pool.submit(call).result(timeout=120).parts == {"exact": [1.0]}


def test_reasoning_gym_scores_the_answer_part() -> None:
    name = "asyncrl.rewards.builtin:reasoning_gym_score"
    columns = {"answer": "7", "question": "3 + 4", "task": "chain_sum", "metadata": json.dumps({})}
    texts = ["<think>5</think>7", "<think>5</think>so <answer>7</answer>", "<think>7"]
    call = GroupCall(["q"] * 3, texts, [[1]] * 3, columns, ["stop"] * 3, [False] * 3)
    assert call_reward(name, call).rewards == [1.0, 1.0, 0.0]
