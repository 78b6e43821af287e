"""The pairwise judge: both orders must agree, and what they do not decide is counted."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator, Sequence

import pytest
from pydantic import ValidationError
from test_judge import Judge

from asyncrl.algorithms.pairs import BestWorst, Candidates, choose_pairs
from asyncrl.config import RewardConfig
from asyncrl.rewards import pairwise
from asyncrl.rewards.builtin import check_builtin
from asyncrl.rewards.contract import GroupCall, check_rewards
from asyncrl.rewards.judge import Judgment
from asyncrl.rewards.pairwise import PairwiseSettings, pairwise_judge
from asyncrl.rewards.pool import RewardPool

SETTINGS = {"url": "http://127.0.0.1:1/v1", "model": "judge-1", "template": "{first}|{second}"}
TIE, FIRST, SECOND = 0.0, 0.5, 1.0


def judged(
    monkeypatch: pytest.MonkeyPatch,
    completions: Sequence[str],
    replies: dict[str, float | Judgment | None],
) -> tuple[dict[str, list[float | None]], list[str]]:
    """The rewards, where the judge's score of a question is in `replies`, and the questions."""
    asked: list[str] = []

    async def answers(_: object, questions: list[str]) -> list[Judgment]:
        asked.extend(questions)
        given = [replies[question] for question in questions]
        return [one if isinstance(one, Judgment) else Judgment(one) for one in given]

    monkeypatch.setattr(pairwise, "answers", answers)
    found = asyncio.run(pairwise_judge(["p"] * len(completions), completions, SETTINGS))
    count = len(completions)
    check_rewards("judge", found, GroupCall(["p"] * count, completions, [[1]] * count))
    return found, asked


@pytest.mark.parametrize(
    ("one", "other", "rewards", "tie", "contradiction"),
    [
        (FIRST, SECOND, [1.0, 0.0], 0.0, 0.0),
        (SECOND, FIRST, [0.0, 1.0], 0.0, 0.0),
        (TIE, TIE, [0.5, 0.5], 1.0, 0.0),
        (FIRST, FIRST, [0.5, 0.5], 0.0, 1.0),
        (SECOND, SECOND, [0.5, 0.5], 0.0, 1.0),
        (FIRST, TIE, [0.5, 0.5], 0.0, 1.0),
        (None, SECOND, [None, None], None, None),
        (FIRST, None, [None, None], None, None),
    ],
)
def test_two_completions_in_both_orders(
    monkeypatch: pytest.MonkeyPatch,
    one: float | None,
    other: float | None,
    rewards: list[float | None],
    tie: float | None,
    contradiction: float | None,
) -> None:
    found, asked = judged(monkeypatch, ["a", "b"], {"a|b": one, "b|a": other})
    assert asked == ["a|b", "b|a"]
    assert found["reward"] == rewards
    assert found["tie"] == [tie] * 2 and found["contradiction"] == [contradiction] * 2
    usable = [reward is not None for reward in rewards]
    pairs = choose_pairs(Candidates(rewards, usable, [False, False], ["a", "b"]), BestWorst())
    assert len(pairs) == (1 if set(rewards) == {0.0, 1.0} else 0)


def test_each_pair_of_a_group_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """a beats b and c. b and c are a contradiction, and d, which equals c, is not compared to c."""
    won = {f"a|{other}": FIRST for other in "bc"} | {f"{other}|a": SECOND for other in "bc"}
    replies = won | {"b|c": FIRST, "c|b": FIRST}
    found, asked = judged(monkeypatch, ["a", "b", "c", "c"], replies)
    assert len(asked) == 10 and len(set(asked)) == 6
    third = pytest.approx(1 / 3)
    assert found["reward"] == [1.0, third, third, third]
    assert found["tie"] == [0.0, 0.0, third, third]
    assert found["contradiction"] == [0.0, pytest.approx(2 / 3), third, third]


def test_a_comparison_without_an_answer_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = {"a|b": FIRST, "b|a": SECOND, "a|c": None, "c|a": None, "b|c": None, "c|b": TIE}
    found, _ = judged(monkeypatch, ["a", "b", "c"], replies)
    assert found["reward"] == [1.0, 0.0, None]


def test_a_completion_alone_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = judged(monkeypatch, ["a"], {})
    assert (found["reward"], found["tie"], found["contradiction"]) == ([0.5], [0.0], [0.0])
    assert not asked


def test_refused_and_cut_comparisons_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    refused, cut = Judgment(None, "refused"), Judgment(None, "cut")
    replies = {"a|b": FIRST, "b|a": SECOND, "a|c": refused, "c|a": FIRST, "b|c": TIE, "c|b": cut}
    found, _ = judged(monkeypatch, ["a", "b", "c"], replies)
    assert found["reward"] == [1.0, 0.0, None]
    assert found["unscored_refused"] == [0.5, 0.0, 0.5]
    assert found["unscored_cut"] == [0.0, 0.5, 0.5]


def test_the_answer_parts_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A completion without an answer loses without a question."""
    completions = ["<think>x</think>a", "<think>b", "<think>", "a"]
    found, asked = judged(monkeypatch, completions, {})
    high, low = pytest.approx(5 / 6), pytest.approx(1 / 6)
    assert asked == [] and found["reward"] == [high, low, low, high]


@pytest.fixture
def server() -> Iterator[Judge]:
    with Judge() as judge:
        thread = threading.Thread(target=judge.serve_forever, args=(0.01,))
        thread.start()
        yield judge
        judge.shutdown()
        thread.join()


def test_a_judge_that_prefers_the_longer_answer(server: Judge) -> None:
    def reply(question: str) -> str:
        first, second = (
            re.search(rf"\[answer {number}\]\n(.*)\n\[end", question)[1] for number in (1, 2)
        )
        better = 0 if len(first) == len(second) else 1 if len(first) > len(second) else 2
        return f"Better: 2 at first sight. Better: **{better}**"

    server.reply_to = reply
    function = {
        "function": "asyncrl.rewards.builtin:pairwise_judge",
        "arguments": {"judge": {"url": server.url, "model": "judge-1"}},
    }
    config = RewardConfig.model_validate({"functions": {"judge": function}, "processes": 1})
    completions = ["bb", "a", "ccc", "dd"]
    call = GroupCall(["p"] * 4, completions, [[1]] * 4, {})
    with RewardPool(config) as pool:
        given = pool.submit(call).result(timeout=60)
    assert given.parts["judge"] == [0.5, 0.0, 1.0, 0.5]
    assert given.parts["judge/tie"] == [pytest.approx(1 / 3), 0.0, 0.0, pytest.approx(1 / 3)]
    assert given.parts["judge/contradiction"] == [0.0] * 4
    assert len(server.requests) == 12


@pytest.mark.parametrize(
    ("reply", "number"),
    [("Better: 1", "1"), ("better = **2**", "2"), ("Better: 10", None), ("Better: 1.5", None)],
)
def test_the_number_in_a_reply(reply: str, number: str | None) -> None:
    found = re.findall(PairwiseSettings(**SETTINGS).score, reply)
    assert found == ([] if number is None else [number])


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"template has no \{second\}; add it"):
        PairwiseSettings(**SETTINGS | {"template": "{first} {completion}"})
    name = "asyncrl.rewards.builtin:pairwise_judge"
    with pytest.raises(ValueError, match=r"timeout_s = 25 is not below reward\.deadline_s = 20"):
        check_builtin(name, {"judge": SETTINGS}, 20)
    check_builtin(name, {"judge": SETTINGS}, 30)
