"""The name that a misspelled one may mean, in the messages about functions of the user."""

from pathlib import Path

import pytest

from asyncrl.rewards.builtin import check_builtin
from asyncrl.rewards.contract import RewardError, find_reward
from asyncrl.runtime.functions import FunctionError, did_you_mean, import_function


def test_the_nearest_name() -> None:
    known = ["exact_match", "math_verify", "prompts"]
    assert did_you_mean("math_verfiy", known) == "; did you mean 'math_verify'?"
    assert did_you_mean("exact", known) == "; did you mean 'exact_match'?"
    assert did_you_mean("solution", known) == did_you_mean("ex", known) == ""


def test_a_misspelled_function_or_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "near_rewards.py").write_text("def exact(**_): ...\n")
    with pytest.raises(FunctionError, match=r"check its name; did you mean 'exact'\?"):
        import_function("reward function", "near_rewards:exakt")
    with pytest.raises(FunctionError, match=r"installed; did you mean 'near_rewards'\?"):
        import_function("reward function", "near_reward:exact")
    with pytest.raises(FunctionError, match=r"did you mean 'asyncrl.rewards.builtin'\?"):
        import_function("reward function", "asyncrl.rewards.builtins:exact_match")
    with pytest.raises(RewardError, match=r"its package; did you mean 'near_rewards'\?"):
        find_reward("near_reward:exact")
    with pytest.raises(ValueError, match=r"did you mean 'math_verify'\?"):
        check_builtin("asyncrl.rewards.builtin:math_verfy", {}, 30.0)
