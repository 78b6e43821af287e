import pytest

from asyncrl.rewards.builtin import exact_match, reasoning_gym_score
from asyncrl.rewards.contract import ContractError, RewardError, call_reward, import_reward


def call(name, columns=None):
    return call_reward(f"tests.rewards.rewards_under_test:{name}", ["p", "p"], ["a", "bcd"], [[1, 2], [1, 2]], columns or {})


@pytest.mark.parametrize(("name", "rewards"), [("by_length", [1.0, 3.0]), ("async_half", [0.5, 0.5]), ("some_none", [None, 1.0])])
def test_plain_async_and_none(name, rewards):
    assert call(name) == rewards


def test_columns_are_repeated_as_keyword_arguments():
    assert call("all_columns", {"answer": "x", "extra": 7}) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("not_a_number", "returned nan at index 0"),
        ("infinite", "returned inf at index 0"),
        ("too_few", "returned 1 rewards for 2 completions"),
        ("text", r"returned '1.0' \(str\) at index 0"),
        ("one_number", "returned float; return a list of 2"),
    ],
)
def test_a_broken_contract_names_the_function(name, message):
    with pytest.raises(ContractError, match=f"rewards_under_test:{name}.*{message}"):
        call(name)


def test_an_exception_is_reported_under_the_functions_name():
    with pytest.raises(RewardError, match="rewards_under_test:raises' raised KeyError: 'no such thing'"):
        call("raises")


@pytest.mark.parametrize("function", ["no_such_module:f", "tests.rewards.rewards_under_test:no_such_function", "math:pi"])
def test_a_function_that_is_not_there(function):
    with pytest.raises(RewardError, match=function):
        import_reward(function)


def test_exact_match():
    assert exact_match(completions=[" 12 ", "13", ""], answer=["12", "12", "12"], ordinal=[0] * 3) == [1.0, 0.0, 0.0]


def test_reasoning_gym_score():
    columns = {"answer": ["3"] * 2, "question": ["1 + 2 = ?"] * 2, "task": ["chain_sum"] * 2, "metadata": ["{}"] * 2}
    right, wrong = reasoning_gym_score(completions=["3", "4"], **columns)
    assert right == 1.0 and wrong < 0.5
