"""The user's own loss, advantage and group filter. The examples give the built-in numbers. An error
names the function that broke its contract, and its line."""

import importlib
import math
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from asyncrl.algorithms.advantages import group_advantages
from asyncrl.algorithms.advantages.grpo import Grpo
from asyncrl.algorithms.advantages.own_advantage import OwnAdvantage
from asyncrl.algorithms.losses.own_loss import OwnLoss
from asyncrl.algorithms.losses.ppo import Ppo
from asyncrl.algorithms.objective import own_metrics, policy_loss, trial_tokens
from asyncrl.algorithms.user_functions import own_verdict
from asyncrl.config import PolicyGradient, explain
from asyncrl.rewards.contract import RewardError, find_reward
from asyncrl.runtime.functions import FunctionError

EXAMPLES = Path(__file__).parents[2]

WRONG = """
import torch

def summed(logprobs): return logprobs.sum()
def detached(logprobs): return logprobs.detach()
def number(logprobs): return 1.0
def other(logprobs, rewards): return logprobs
def raises(logprobs):
    return {}["loss"]
def infinite(logprobs, advantages): return logprobs / (advantages - advantages)
def constant(logprobs): return 0 * logprobs
def column(logprobs): return logprobs[:, None]
def metric(logprobs): return logprobs, {"mean": logprobs.mean()}
def slashed(logprobs): return logprobs, {"a/b": logprobs}
def elsewhere(logprobs): return logprobs.to("meta")
def in_place(logprobs, old_logprobs, behavior_logprobs, advantages, ages, sequence):
    loss = -logprobs * advantages
    for tensor in (old_logprobs, behavior_logprobs, advantages, ages, sequence):
        tensor.zero_()
    return loss

def scaled(logprobs, scale): return -scale * logprobs
def scalar(rewards): return 1.0
def shifted(rewards, by): return rewards + by
def divides(rewards): return rewards / rewards.std()
def words(rewards): return ["a"] * len(rewards)
def tensor(rewards): return torch.tensor(rewards, requires_grad=True)
def huge(rewards): return [10**400] * len(rewards)
def imaginary(rewards): return rewards * 1j
def digits(rewards): return ["1"] * len(rewards)
class Odd(Exception):
    def __str__(self): raise ValueError
def odd(rewards): raise Odd
def sorts(rewards):
    rewards.sort()
    return rewards

def one(rewards): return 1
def listed(rewards): return [True]
def above(rewards, least): return bool(rewards.max() >= least)
def by_all(rewards, advantages, lengths, truncated):
    assert rewards.dtype == advantages.dtype == float
    assert lengths.dtype == int and truncated.dtype == bool
    return bool(lengths.max() < 9 and not truncated.any())
"""


@pytest.fixture(autouse=True)
def importable(tmp_path, monkeypatch):
    (tmp_path / "wrong_own.py").write_text(textwrap.dedent(WRONG))
    for folder in (tmp_path, EXAMPLES):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "wrong_own", raising=False)


def objective(**settings) -> PolicyGradient:
    return PolicyGradient.model_validate(settings)


@pytest.mark.parametrize("old_policy", ["behavior", "log_linear"])
def test_the_examples_loss_is_the_built_in_one(old_policy):
    losses, gradients, clipped = [], [], []
    for name in ("ppo", "jobs.own_algorithm:clipped"):
        tokens = trial_tokens()
        loss, sums = policy_loss(tokens, objective(loss={"name": name, "old_policy": old_policy}))
        losses.append(loss.item())
        gradients.append(torch.autograd.grad(loss, tokens.logprobs)[0])
        clipped.append(int(sums.clipped))
    assert losses[0] == losses[1] and torch.equal(*gradients) and clipped[0] == clipped[1]
    assert clipped[0] > 0
    assert own_metrics(OwnLoss(name="jobs.own_algorithm:clipped")) == ("ratio_below_half",)
    assert own_metrics(Ppo()) == ()


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.5], [1.0, 1.0], [3.0, None, -2.0, 7.5]])
def test_the_examples_advantage_is_the_built_in_one(rewards):
    usable = [reward is not None for reward in rewards]
    own = OwnAdvantage(name="jobs.own_algorithm:standardized")
    assert group_advantages(rewards, usable, own) == group_advantages(rewards, usable, Grpo())
    scalar = OwnAdvantage(name="wrong_own:scalar")
    one = group_advantages([1.0, None], [True, False], scalar)
    assert one == [0.0, None], "one has nothing to compare with"


def test_the_example_filter_and_the_arguments_of_a_filter():
    assert own_verdict(
        "jobs.own_algorithm:mixed", {}, [0.0, 1.0], [-1.0, 1.0], [2, 2], [False, False]
    )
    assert not own_verdict(
        "jobs.own_algorithm:mixed", {}, [1.0, 1.0], [0.0, 0.0], [2, 2], [False, False]
    )
    assert own_verdict("wrong_own:by_all", {}, [0.0, 1.0], [-1.0, 1.0], [2, 8], [False, False])
    assert not own_verdict("wrong_own:by_all", {}, [0.0, 1.0], [-1.0, 1.0], [2, 8], [False, True])


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        (
            "summed",
            4,
            r"returned loss of shape \[\]; return shape \[12\], one value for each token",
        ),
        ("column", 12, r"returned loss of shape \[12, 1\]; return shape \[12\]"),
        ("detached", 5, "returned a loss without a gradient"),
        ("number", 6, "returned loss as float; return a tensor"),
        (
            "other",
            7,
            "raised TypeError: it takes rewards, which asyncrl does not provide; available:"
            " advantages, ",
        ),
        ("raises", 8, r"raised KeyError: 'loss' at .*wrong_own\.py:9, in raises"),
        ("infinite", 10, "as loss of token 0 from finite arguments"),
        ("constant", 11, "has the gradient"),
        ("metric", 13, r"returned metric mean of shape \[\]"),
        ("slashed", 14, "short names without '/'"),
        ("elsewhere", 15, "returned loss on meta; return it on cpu, where its arguments are"),
    ],
)
def test_a_wrong_loss_is_named_with_its_line(name, line, message):
    with pytest.raises(
        FunctionError,
        match=rf"^algorithm\.loss = 'wrong_own:{name}' \(.*wrong_own\.py:{line}\).*{message}",
    ):
        own_metrics(OwnLoss(name=f"wrong_own:{name}"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scalar", r"returned shape \[\]; return shape \[2\]"),
        ("divides", r"returned \[inf, inf\] for the rewards"),
        ("words", "returned list of <U1; return 2 floats"),
        ("imaginary", "returned ndarray of complex128; return 2 floats"),
        ("digits", "returned list of <U1; return 2 floats"),
        (
            "odd",
            r"raised Odd: \(a Odd without a text: ValueError\) at .*, in odd; repair it",
        ),
        ("tensor", "returned Tensor; return 2 floats"),
        ("huge", "returned list of object; return 2 floats"),
        ("nowhere", "cannot be imported"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_a_wrong_advantage_is_named(name, message):
    with pytest.raises(
        FunctionError, match=rf"algorithm\.advantage = 'wrong_own:{name}'.*{message}"
    ):
        group_advantages([2.0, 2.0], [True, True], OwnAdvantage(name=f"wrong_own:{name}"))


def test_functions_get_the_arguments_of_the_settings():
    loss = OwnLoss(name="wrong_own:scaled", arguments={"scale": 3.0})
    tokens = trial_tokens()
    found = loss.terms(tokens, tokens.log_ratio("behavior"))
    assert torch.equal(found.loss, -3.0 * tokens.logprobs)
    assert own_metrics(loss) == ()
    advantage = OwnAdvantage(name="wrong_own:shifted", arguments={"by": 0.5})
    assert group_advantages([1.0, 2.0], [True, True], advantage) == [1.5, 2.5]
    given = [0.0, 1.0], [-1.0, 1.0], [2, 2], [False, False]
    assert own_verdict("wrong_own:above", {"least": 1.0}, *given)
    assert not own_verdict("wrong_own:above", {"least": 1.5}, *given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"by": 0.5, "bz": 1}, "it takes no bz of its arguments"),
        ({"rewards": [1.0], "by": 0.5}, "asyncrl provides rewards, so its arguments cannot"),
    ],
)
def test_arguments_that_a_function_cannot_take_are_refused(arguments, message):
    advantage = OwnAdvantage(name="wrong_own:shifted", arguments=arguments)
    with pytest.raises(FunctionError, match=message):
        group_advantages([1.0, 2.0], [True, True], advantage)


def test_a_function_cannot_change_its_rewards():
    rewards = np.array([3.0, 1.0])
    group_advantages(rewards, [True, True], OwnAdvantage(name="wrong_own:sorts"))
    assert rewards.tolist() == [3.0, 1.0]


def test_a_loss_cannot_change_its_tensors():
    expected = policy_loss(trial_tokens(), objective(loss="reinforce"))
    changed = policy_loss(trial_tokens(), objective(loss="wrong_own:in_place"))
    for name in ("ratio", "ratio_max", "kl_k3", "drift", "drift_tokens"):
        assert getattr(expected[1], name) == getattr(changed[1], name), name


def test_a_function_of_a_script_or_notebook_is_refused_with_advice():
    with pytest.raises(
        FunctionError,
        match=(r"'__main__:mine' is in a script or notebook, .*; move it to a module"),
    ):
        own_metrics(OwnLoss(name="__main__:mine"))
    with pytest.raises(
        RewardError, match="reward function '__main__:mine' is in a script or notebook"
    ):
        find_reward("__main__:mine")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "def f(:",
            r"\(SyntaxError: invalid syntax \(broken_own\.py, line 1\)\); repair its module",
        ),
        (
            "\nimport no_such_package",
            (
                r"\(No module named 'no_such_package' at .*broken_own\.py:2, in <module>\); check"
                r" its name"
            ),
        ),
        (
            "\nimport sys\nsys.nothing",
            r".*has no attribute 'nothing' at .*broken_own\.py:3, in <module>\); check its name",
        ),
        (
            "\n1 / 0",
            (
                r"\(ZeroDivisionError: division by zero at .*broken_own\.py:2, in <module>\);"
                r" repair its module"
            ),
        ),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_its_own_line(
    tmp_path, monkeypatch, code, message
):
    (tmp_path / "broken_own.py").write_text(code)
    monkeypatch.delitem(sys.modules, "broken_own", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(
        FunctionError, match=rf"algorithm\.loss = 'broken_own:f' cannot be imported {message}"
    ):
        own_metrics(OwnLoss(name="broken_own:f"))


@pytest.mark.parametrize("name", ["one", "listed"])
def test_a_filter_must_return_a_bool(name):
    with pytest.raises(
        FunctionError,
        match=rf"algorithm\.group_filter = 'wrong_own:{name}' .*; return True to train the group",
    ):
        own_verdict(f"wrong_own:{name}", {}, [1.0, 0.0], [0.5, -0.5], [1, 1], [False, False])


def test_non_finite_log_probs_are_left_to_the_step():
    tokens = trial_tokens()
    tokens.behavior_logprobs[0] = math.nan
    loss, sums = policy_loss(tokens, objective(loss="jobs.own_algorithm:clipped"))
    assert math.isnan(loss.item()) and int(sums.nonfinite) == 1


@pytest.mark.parametrize("setting", [{"loss": "ppoo"}, {"advantage": "a2c"}])
def test_an_unknown_name_is_refused_with_the_known_ones(setting):
    with pytest.raises(
        ValueError, match=r"use one of .*, or your own function as package\.module:function"
    ):
        objective(**setting)


def test_a_name_that_no_function_can_have_is_refused():
    with pytest.raises(ValidationError) as caught:
        objective(loss="mine:f.g")
    known = "loss.name = 'mine:f.g': name a function as package.module:function"
    assert explain(caught.value, PolicyGradient) == known
