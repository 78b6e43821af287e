"""The guessing game of `make demo-agent`: its rewards, its tokens, and its warm start's games."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from asyncrl.environments.model import Reply
from asyncrl.text.tokenizer import load_tokenizer
from jobs.guess.game import WIDTH, answer, call, even, play, question
from jobs.guess.task import HELD_OUT_LOWS, LOWS, UNEVEN, _game, make_data, make_model


class Plays:
    """A model that makes these guesses; None is a text instead of a tool call."""

    def __init__(self, guesses: list[int | None]) -> None:
        self.guesses = iter(guesses)
        self.chat = self.completions = self

    async def create(self, **_: Any) -> Reply:
        number = next(self.guesses)
        calls = None
        if number is not None:
            function = Reply(name="guess", arguments=json.dumps({"number": number}))
            calls = [Reply(id="call_0", type="function", function=function)]
        message = Reply(role="assistant", content="", tool_calls=calls)
        return Reply(choices=[Reply(message=message)])


@pytest.mark.parametrize(
    ("guesses", "turns", "won"),
    [
        ([41], [1.0], 1.0),
        ([72, 41], [0.0, 1.0], 1.0),
        ([25, 41], [15 / 31, 15 / 23], 1.0),
        ([25, 24, 41], [15 / 31, -1.0, 15 / 23], 1.0),
        ([25, None], [15 / 31, -1.0], 0.0),
        ([10, 11, 12, 13, 14, 15], [0.0] * 6, 0.0),
    ],
)
async def test_each_guess_has_a_reward(
    guesses: list[int | None], turns: list[float], won: float
) -> None:
    found = await play({"low": 10, "hidden": 41}, Plays(guesses))
    assert found["turns"] == pytest.approx(turns)
    assert found["reward"] == pytest.approx(sum(turns) / len(turns)) and found["won"] == won


async def test_a_perfect_player_wins_with_the_highest_reward() -> None:
    for hidden in range(20, 20 + WIDTH):
        first, last, guesses = 20, 19 + WIDTH, list[int]()
        while not guesses or guesses[-1] != hidden:
            guesses.append((first + last) // 2)
            said = answer(guesses[-1], hidden)
            first = guesses[-1] + 1 if said == "higher" else first
            last = guesses[-1] - 1 if said == "lower" else last
        found = await play({"low": 20, "hidden": hidden}, Plays([*guesses]))
        assert found == {"reward": 1.0, "turns": [1.0] * len(guesses), "won": 1.0}
    assert [even(number, 3, 3) for number in (2, 3, 4)] == [-1.0, 1.0, -1.0]


def test_mediocre_players_keep_to_the_rules_and_never_guess_the_middle() -> None:
    draw, lengths = random.Random(1), set[int]()
    for _ in range(500):
        user, *rest = _game(20, draw)
        assert user == {"role": "user", "content": question(20)}
        first, last = 20, 19 + WIDTH
        for message in rest:
            if message["role"] == "assistant":
                number = message["tool_calls"][0]["function"]["arguments"]["number"]
                assert first <= number <= last
                # A short range has hardly a place that is neither its end nor its middle.
                place = min(number - first, last - number)
                assert place <= UNEVEN[1] * (last - first) + 0.5
            else:
                first = number + 1 if message["content"] == "higher" else first
                last = number - 1 if message["content"] == "lower" else last
                assert first <= last
        assert rest[-1]["role"] == "assistant"
        lengths.add(first - last if first == last else 1)
    assert lengths == {0, 1}  # some games come to one number, and some do not


def test_the_inputs_hold_ranges_out_and_have_four_tokens_a_guess(tmp_path: Path) -> None:
    make_model(tmp_path / "model", 0)
    train, held_out = make_data(tmp_path, 0)
    lows = {
        name: set(pq.read_table(tmp_path / f"{name}.parquet")["low"].to_pylist())
        for name in ("train", "held_out")
    }
    assert lows["held_out"] == set(HELD_OUT_LOWS) and lows["train"] == set(LOWS) - set(
        HELD_OUT_LOWS
    )
    assert (train, held_out) == (WIDTH * len(lows["train"]), WIDTH * len(lows["held_out"]))
    games = [json.loads(line)["messages"] for line in (tmp_path / "games.jsonl").open()]
    assert not {game[0]["content"] for game in games} & {question(low) for low in HELD_OUT_LOWS}
    tokenizer: Any = load_tokenizer(str(tmp_path / "model"))
    for number in (10, 44, 98):
        messages = [{"role": "assistant", "content": "", "tool_calls": [call(number)]}]
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        assert len(ids) == 6 and tokenizer.unk_token_id not in ids  # four, the role and the gap
        assert tokenizer.decode(ids[2]) == str(number)
