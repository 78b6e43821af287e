"""reasoning-gym's scorers: a model's text is scored 0 where they raise or would take very long."""

from __future__ import annotations

import json
import time

import pytest

from asyncrl.rewards.reasoning import MOST_CHARACTERS, own_score, reasoning_gym_score


def row(task: str) -> dict[str, str]:
    """The columns of a task of the package."""
    import reasoning_gym

    entry = reasoning_gym.create_dataset(task, size=1, seed=0)[0]
    metadata = json.dumps(entry["metadata"], default=str)
    return {
        "answer": str(entry["answer"]),
        "question": entry["question"],
        "task": task,
        "metadata": metadata,
    }


@pytest.mark.parametrize(
    ("task", "text"),
    [
        ("prime_factorization", "I do not know."),
        ("boxnet", "1"),
        ("boxnet", "null"),
        ("boxnet", '"x"'),
        ("game_of_life", "{}"),
        ("coin_flip", "1e400"),
    ],
)
def test_a_text_for_which_the_scorer_raises_scores_0(task: str, text: str) -> None:
    columns = {name: [value, value] for name, value in row(task).items()}
    wrong, right = reasoning_gym_score([text, columns["answer"][0]], **columns)
    assert wrong == 0.0
    assert right == 1.0 or task == "boxnet", "its entries have no right answer"


@pytest.mark.parametrize(
    ("task", "text"),
    [
        ("coin_flip", "1e999999999"),
        ("coin_flip", "1E-9_99,9999999"),
        ("codeio", json.dumps({"a": list(range(5000))})),
        ("propositional_logic", "→" * 9000),
        ("chain_sum", "1" + " " * MOST_CHARACTERS + "1"),
    ],
)
def test_a_costly_text_scores_0_at_once(task: str, text: str) -> None:
    columns = row(task)
    own_score("x", **columns)  # the package is imported, and the task is made
    began = time.process_time()
    assert own_score(text, **columns) == 0.0
    assert time.process_time() - began < 0.5


def test_numbers_with_small_exponents_and_long_right_answers_are_scored() -> None:
    columns = row("coin_flip")
    assert columns["answer"] == "1" and own_score("1000e-003", **columns) == 1.0
    columns = {**row("chain_sum"), "answer": "1" * MOST_CHARACTERS}
    assert own_score(columns["answer"], **columns) == 1.0


def test_a_row_whose_own_answer_raises_is_an_error() -> None:
    columns = {**row("prime_factorization"), "answer": "two times two"}
    with pytest.raises(ValueError, match="two times two"):
        own_score("I do not know.", **columns)
