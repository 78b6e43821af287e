"""math-verify through the pool: it judges answers correctly, and no expression fails a group or
kills a process."""

import subprocess
import sys

import pytest

from asyncrl.config import RewardConfig
from asyncrl.rewards.contract import GroupCall
from asyncrl.rewards.mathematics import math_verify
from asyncrl.rewards.pool import RewardPool
from tests.rewards.math_cases import CASES


def pool(**settings):
    function = {"function": "asyncrl.rewards.builtin:math_verify", "arguments": settings}
    return RewardPool(
        RewardConfig.model_validate(
            {"functions": {"math": function}, "processes": 1, "deadline_s": 240.0}
        )
    )


@pytest.fixture(scope="module")
def judged():
    """The reward of each of CASES, scored in one group per expected answer, as in a run."""
    with pool(seconds=20.0) as rewards:
        answers = dict.fromkeys(answer for answer, _, _ in CASES)
        asked = {
            answer: [completion for other, completion, _ in CASES if other == answer]
            for answer in answers
        }
        groups = {
            answer: rewards.submit(
                GroupCall([""] * len(some), some, [[]] * len(some), {"answer": answer})
            )
            for answer, some in asked.items()
        }
        scores = {
            answer: dict(zip(asked[answer], group.result(timeout=400).parts["math"], strict=True))
            for answer, group in groups.items()
        }
    return [scores[answer][completion] for answer, completion, _ in CASES]


def test_every_answer_is_judged_rightly(judged):
    assert len(CASES) == 178
    assert [
        case for case, score in zip(CASES, judged, strict=True) if score != float(case[2])
    ] == []


def test_an_endless_expression_is_wrong_and_the_others_are_judged() -> None:
    with pool(seconds=1.0) as rewards:
        completions = ["$4$", "$9^{9^{9^{9}}}$", "\\boxed{2^2}", "$5$"]
        assert rewards.submit(GroupCall([""] * 4, completions, [[]] * 4, {"answer": "4"})).result(
            timeout=200
        ).parts == {"math": [1.0, 0.0, 1.0, 0.0]}


def test_an_answer_that_cannot_be_parsed_scores_nothing() -> None:
    with pool() as rewards:
        assert rewards.submit(GroupCall([""], ["$4$"], [[]], {"answer": ""})).result(
            timeout=200
        ).parts == {"math": [None]}


def test_the_child_ends_with_its_process() -> None:
    script = (
        "from asyncrl.rewards.mathematics import math_verify; import os; print(math_verify(['$5$'],"
        " ['5'])); os._exit(0)"
    )
    # The child inherits this output, which closes only when both processes have ended.
    assert (
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
        ).stdout
        == "[1.0]\n"
    )


def run_script(script: str) -> str:
    """What a script prints in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    ).stdout.strip()


def test_a_child_keeps_no_pipe_of_its_process_open() -> None:
    script = """
import os, select
from asyncrl.rewards.builtin import math_verify
read, write = os.pipe()
assert math_verify(["$4$"], ["4"]) == [1.0]
os.close(write)
print(bool(select.select([read], [], [], 5)[0]) and os.read(read, 1) == b"")
"""
    assert run_script(script) == "True"


def test_many_threads_share_few_children() -> None:
    script = """
import os, psutil
from concurrent.futures import ThreadPoolExecutor
from asyncrl.rewards.builtin import math_verify
with ThreadPoolExecutor(40) as threads:
    scores = list(threads.map(lambda one: math_verify([f"${one}$"], [str(one)]), range(80)))
print(scores == [[1.0]] * 80, 1 <= len(psutil.Process().children()) <= os.cpu_count())
"""
    assert run_script(script) == "True True"


def test_a_child_does_not_wait_for_an_import_of_another_thread() -> None:
    script = """
import sys
from asyncrl.rewards import mathematics
mathematics._warm_up()
known = set(sys.modules)
for answer, completion in (("4", "$4$"), ("1/2", "boxed{0.5}"), ("(1, 2)", "$(1,2)$")):
    mathematics._judge(answer, completion)
print(sorted(set(sys.modules) - known))
"""
    assert run_script(script) == "[]"


@pytest.mark.parametrize(
    ("answer", "reward"), [(None, None), (float("nan"), None), ("", None), (["5"], 1.0), (5.0, 1.0)]
)
def test_a_missing_answer_gives_no_reward(answer: object, reward: float | None) -> None:
    assert math_verify([r"\boxed{5}"], [answer]) == [reward]


@pytest.mark.parametrize("answer", [{"ground_truth": "5"}, ["5", "7"], True])
def test_an_answer_that_is_no_expression_is_refused(answer: object) -> None:
    with pytest.raises(ValueError, match=r"column answer contains .*; give one"):
        math_verify([r"\boxed{5}"], [answer])
