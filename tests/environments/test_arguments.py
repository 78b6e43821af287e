"""Arguments of a config that do not fit their function are refused before any session."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from asyncrl.environments.process import imported
from asyncrl.runtime.functions import FunctionError

HERE = __name__
PLAY = "asyncrl.environments.agent:play"


async def solve(task: Any, model: Any, worth: float, tries: int = 1) -> float:
    return worth


def blocking(task: Any, model: Any, **more: float) -> float:
    return 1.0


async def takes_no_model(task: Any) -> float:
    return 1.0


def with_store(function: Any) -> Any:
    """Gives a function its store."""

    @functools.wraps(function)
    async def given(task: Any, model: Any, **more: Any) -> float:
        return float(await function(task, model, "store", **more))

    return given


@with_store
async def stored(task: Any, model: Any, store: str, level: int = 1) -> float:
    return level


class Odd:
    __signature__ = "nonsense"

    async def __call__(self, task: Any, model: Any) -> float:
        return 1.0


odd = Odd()


class Game:
    def __init__(self, most: int = 4) -> None: ...

    def reset(self, task: Any) -> str:
        return ""

    def step(self, message: Any) -> Any: ...


def agent(name: str, arguments: dict[str, object]) -> object:
    return imported(PLAY, {"function": f"{HERE}:{name}", "arguments": arguments, "command": None})


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"worth": 1, "trys": 2}, "got an unexpected keyword argument 'trys'"),
        ({"tries": 2}, "missing a required argument: 'worth'"),
        ({"worth": 1, "task": 2}, "multiple values for argument 'task'"),
    ],
)
def test_arguments_that_do_not_fit_are_named_with_those_that_do(
    arguments: dict[str, object], why: str
) -> None:
    fix = "it gets the task and the model, and takes of environment.arguments: worth, tries"
    for setting, refused in (
        ("agent", lambda: agent("solve", arguments)),
        ("function", lambda: imported(f"{HERE}:solve", arguments)),
    ):
        with pytest.raises(FunctionError) as error:
            refused()
        assert str(error.value) == (
            f"environment.{setting} '{HERE}:solve' cannot be called with environment.arguments ="
            f" {arguments}: {why}; {fix}"
        )


def test_a_function_without_room_for_the_model_is_named() -> None:
    with pytest.raises(FunctionError, match=r"too many positional arguments; it gets the task"):
        agent("takes_no_model", {})


def test_a_game_and_its_arguments() -> None:
    with pytest.raises(FunctionError, match=r"'least'; it takes of environment\.arguments: most$"):
        imported(f"{HERE}:Game", {"least": 1})


def test_arguments_that_fit_are_taken() -> None:
    assert agent("solve", {"worth": 1.0, "tries": 3}) is not None
    assert agent("blocking", {"anything": 1.0}) is not None
    assert imported(f"{HERE}:Game", {"most": 2}) is not None
    assert imported(f"{HERE}:stored", {}) is not None
    assert imported(f"{HERE}:stored", {"level": 2}) is not None
    assert imported(f"{HERE}:odd", {"anything": 1}) is not None
    assert imported(PLAY, {"command": ["echo"], "arguments": {}, "function": None}) is not None
