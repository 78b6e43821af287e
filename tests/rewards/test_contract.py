import pytest

from asyncrl.rewards.builtin import exact_match, reasoning_gym_score
from asyncrl.rewards.contract import (
    ContractError,
    GroupCall,
    RewardError,
    call_reward,
    find_reward,
    import_reward,
)


def call(name, columns=None, arguments=None, per_token=False):
    group = GroupCall(
        ["p", "p"], ["a", "bcd"], [[1, 2], [1, 2]], columns or {}, ["stop", "length"], [False, True]
    )
    return call_reward(f"tests.rewards.rewards_under_test:{name}", group, arguments, per_token)


@pytest.mark.parametrize(
    ("name", "rewards"),
    [("by_length", [1.0, 3.0]), ("async_half", [0.5, 0.5]), ("some_none", [None, 1.0])],
)
def test_plain_async_and_none(name, rewards):
    assert call(name).rewards == rewards


def test_columns_are_repeated_as_keyword_arguments() -> None:
    assert call("all_columns", {"answer": "x", "extra": 7}).rewards == [1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("not_a_number", "returned nan at index 0"),
        ("infinite", "returned inf at index 0"),
        ("too_few", "returned 1 rewards for 2 completions"),
        ("text", r"returned '1.0' \(str\) at index 0"),
        ("one_number", "returned float; return a list of 2"),
        ("short_part", "part a' returned 1 rewards for 2 completions"),
        ("no_part", r"returned a dict with the keys \[\]"),
        ("part_with_a_slash", "returned a dict with the keys"),
    ],
)
def test_a_broken_contract_names_the_function(name, message):
    with pytest.raises(ContractError, match=f"rewards_under_test:{name}.*{message}"):
        call(name)


@pytest.mark.parametrize("name", ["array", "tensor", "tensors"])
def test_arrays_tensors_and_their_numbers_are_rewards(name):
    assert call(name).rewards == [0.25, 0.25]


def test_a_returned_or_raised_text_is_short_in_a_message_and_fits_a_text_column() -> None:
    for name in ("long_text", "raises_half_a_character"):
        with pytest.raises(RewardError) as raised:
            call(name)
        assert len(str(raised.value).encode()) < 2000
    assert r"ValueError: \ud800xx" in str(raised.value) and "rewards_under_test.py:" in str(
        raised.value
    )


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(
        RewardError,
        match=(
            "it takes solution, which no column of the data and no entry of its arguments"
            " provides; available: answer, "
        ),
    ):
        call("asks_for_an_unknown_argument", {"answer": "x"})


def test_a_reward_gets_finish_reasons_messages_and_its_own_arguments() -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "p"}]
    given = call("told", {"messages": chat}, {"bonus": 0.25})
    assert given.parts == {
        "cut": [0.0, 1.0],
        "truncated": [0.0, 1.0],
        "asked": [2.0, 2.0],
        "bonus": [0.25, 0.25],
    }
    assert given.rewards == [2.25, 4.25]


def test_a_function_without_kwargs_gets_the_arguments_that_it_names() -> None:
    assert call("names_what_it_wants", {"answer": "bcd", "extra": 7}).rewards == [0.0, 1.0]


def test_the_parts_of_a_dict_are_summed_unless_one_is_the_reward() -> None:
    assert call("parts_with_a_total").rewards == [2.0, 2.0] and call(
        "parts_with_a_total"
    ).parts == {"length": [1.0, 3.0]}
    assert call("a_part_is_none").rewards == [1.5, None]


def test_token_rewards_sum_to_the_trajectory_reward() -> None:
    given = call("of_each_token", per_token=True)
    assert (given.tokens, given.rewards) == ([[1.0, 2.0], [1.0, 2.0]], [3.0, 3.0])
    given = call("none_for_one", per_token=True)
    assert (given.tokens, given.rewards) == ([None, [0.5, 0.5]], [None, 1.0])


@pytest.mark.parametrize(
    ("name", "per_token", "message"),
    [
        ("one_token_short", True, "trajectory 0' returned 1 rewards for 2 tokens"),
        ("a_token_is_none", True, "returned None for a token of trajectory 0"),
        (
            "by_length",
            True,
            "trajectory 0' returned float; return a list of 2 floats, one per token",
        ),
        ("too_few", True, "returned 1 rewards for 2 completions"),
        (
            "of_each_token",
            False,
            r"at index 0; return a float or None \(one per token needs per_token: true\)",
        ),
    ],
)
def test_token_rewards_need_one_value_per_token_and_per_token_true(name, per_token, message):
    with pytest.raises(ContractError, match=message):
        call(name, per_token=per_token)


def test_an_exception_is_reported_under_the_functions_name() -> None:
    with pytest.raises(
        RewardError, match="rewards_under_test:raises' raised KeyError: 'no such thing'"
    ):
        call("raises")


@pytest.mark.parametrize(
    "function", ["no_such_module:f", "tests.rewards.rewards_under_test:no_such_function", "math:pi"]
)
def test_a_missing_function_is_named(function):
    with pytest.raises(RewardError, match=function):
        import_reward(function)


def test_exact_match() -> None:
    assert exact_match(
        completions=[" 12 ", "13", ""], answer=["12", "12", "12"], ordinal=[0] * 3
    ) == [1.0, 0.0, 0.0]


def test_reasoning_gym_score() -> None:
    columns = {
        "answer": ["3"] * 2,
        "question": ["1 + 2 = ?"] * 2,
        "task": ["chain_sum"] * 2,
        "metadata": ["{}"] * 2,
    }
    right, wrong = reasoning_gym_score(completions=["3", "4"], **columns)
    assert right == 1.0 and wrong < 0.5


def test_looking_for_a_package_does_not_run_it(tmp_path, monkeypatch):
    (tmp_path / "costly_package").mkdir()
    (tmp_path / "costly_package" / "__init__.py").write_text("raise RuntimeError('it was run')")
    monkeypatch.syspath_prepend(str(tmp_path))
    find_reward("costly_package.rewards:mine")
    with pytest.raises(
        RewardError,
        match=(
            r"'no_such_package\.rewards:f': there is no module 'no_such_package'; start in its"
            r" folder"
        ),
    ):
        find_reward("no_such_package.rewards:f")
