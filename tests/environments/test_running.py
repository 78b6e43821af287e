"""Sessions of functions and games: how each ends, and what it returns."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.environments.running import (
    AgentFailedError,
    Ended,
    Limits,
    run_session,
)
from asyncrl.sessions.answers import Answer, ChatRequest, ContextTooLongError, SessionClosedError
from asyncrl.testing import VirtualTimeLoop
from asyncrl.text.chat_messages import MessagesError

TASK = {"start": 3}
PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "environments.md"


class FakeSession:
    """Says the number of the turn, after `seconds`. Raises `error` at turn `fails_at`."""

    def __init__(
        self, seconds: float = 0.0, fails_at: int | None = None, error: Exception | None = None
    ) -> None:
        self.seconds, self.fails_at, self.error = seconds, fails_at, error
        self.chats: list[list[Mapping[str, object]]] = []

    async def chat(self, request: ChatRequest) -> list[Answer]:
        self.chats.append(list(request.messages))
        await asyncio.sleep(self.seconds)
        if self.error is not None and len(self.chats) == self.fails_at:
            raise self.error
        message = {"role": "assistant", "content": str(len(self.chats))}
        return [Answer(message, "stop", 1, 1, 0)]


def run(environment: Any, session: Any = None, **limits: Any) -> Ended:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(
            run_session(environment, TASK, session or FakeSession(), Limits(**limits))
        )


async def ask(model: Any, content: str = "q") -> Any:
    return await model.chat.completions.create(messages=[{"role": "user", "content": content}])


class Count:
    """A game of `start` turns. Each answer is worth its number."""

    def reset(self, task: Mapping[str, Any]) -> str:
        self.left, self.total = task["start"], 0
        return "count"

    def step(self, message: Mapping[str, Any]) -> tuple[str, float, bool]:
        self.left -= 1
        self.total += int(message["content"])
        return "more", self.total, self.left == 0


@pytest.mark.parametrize(
    ("session", "turns", "end", "reward"),
    [
        (FakeSession(), 2, "turns", 2 / 3),
        (FakeSession(fails_at=2, error=ContextTooLongError("full")), 9, "length", 1 / 3),
    ],
)
async def test_the_docs_show_how_to_give_a_reward_at_a_limit(
    session: FakeSession, turns: int, end: str, reward: float
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "TurnsExceededError" in block]
    module: dict[str, Any] = {}
    exec(code, module)
    task = {"prompt": "q", "words": ["1", "2", "none"]}
    ended = await run_session(module["solve"], task, session, Limits(turns=turns))
    assert (ended.end, ended.reward) == (end, reward)


class AsyncCount(Count):
    async def reset(self, task: Mapping[str, Any]) -> Any:  # type: ignore[override]
        return [
            {"role": "system", "content": "s"},
            {"role": "user", "content": super().reset(task)},
        ]

    async def step(self, message: Mapping[str, Any]) -> Any:  # type: ignore[override]
        return super().step(message)


@pytest.mark.parametrize(
    ("returned", "reward", "parts"),
    [
        (None, None, {}),
        (1, 1.0, {}),
        (True, 1.0, {}),
        (0.5, 0.5, {}),
        ({"reward": 0.5, "format": 1}, 0.5, {"format": 1.0}),
        ({"format": 1}, None, {"format": 1.0}),
    ],
)
def test_a_function_returns_its_reward(returned: Any, reward: Any, parts: Any) -> None:
    async def solve(task: Mapping[str, Any], model: Any) -> Any:
        assert task == TASK
        await ask(model)
        await ask(model)
        return returned

    ended = run(solve)
    assert (ended.end, ended.reward, ended.parts, ended.turns) == ("done", reward, parts, 2)


@pytest.mark.parametrize("name", ["", "a/b", "a\nb", "a\x1b[31mb", 3, "x" * 600])
def test_a_part_has_a_plain_name(name: object) -> None:
    async def solve(task: Mapping[str, Any], model: Any) -> Any:
        return {"reward": 1.0, name: 2.0}

    ended = run(solve)
    assert (ended.end, ended.parts) == ("reward_error", {})
    assert "is no name of a reward: a short line without '/'" in ended.note
    assert ended.note.isprintable()


class NumberedSession(FakeSession):
    """Its answers are nodes 1, 3, 5, …. A request with a key that it knows gets its answer again,
    and one with several choices gets two nodes."""

    def __init__(self, fails_at: int | None = None, error: Exception | None = None) -> None:
        super().__init__(fails_at=fails_at, error=error)
        self.known: dict[str, list[Answer]] = {}
        self.node = -1

    async def chat(self, request: ChatRequest) -> list[Answer]:
        if request.key in self.known:
            return self.known[request.key]
        (answer,) = await super().chat(request)
        answers = []
        for _ in range(request.n):
            self.node += 2
            answers.append(replace(answer, node=self.node))
        if request.key is not None:
            self.known[request.key] = answers
        return answers


class Scores(Count):
    """Each turn is worth its answer, and the game their sum."""

    def reset(self, task: Mapping[str, Any]) -> str:
        self.turns: list[float] = []
        return super().reset(task)

    def step(self, message: Mapping[str, Any]) -> Any:  # type: ignore[override]
        self.turns.append(int(message["content"]))
        more, total, over = super().step(message)
        return more, {"reward": total, "turns": self.turns}, over


def test_rewards_of_turns_belong_to_the_nodes_of_their_answers() -> None:
    async def solve(task: Any, model: Any) -> Any:
        for _ in range(3):
            await ask(model)
        return {"reward": 1, "turns": [0.5, None, True]}

    ended = run(solve, NumberedSession())
    assert (ended.end, ended.reward, dict(ended.parts)) == ("done", 1.0, {})
    assert ended.turn_rewards == [(1, 0.5), (5, 1.0)]
    assert run(Scores, NumberedSession()).turn_rewards == [(1, 1.0), (3, 2.0), (5, 3.0)]
    # A game keeps the rewards of the turns that it had when a limit ended it.
    cut = run(Scores, NumberedSession(), turns=2)
    assert (cut.end, cut.reward, cut.turn_rewards) == ("turns", 3.0, [(1, 1.0), (3, 2.0)])


def test_a_turn_is_a_request_with_an_answer() -> None:
    """One that failed or was canceled is none, nor is one that was asked again. All choices of a
    turn have its reward, and turns come in the order of their requests."""

    async def solve(task: Any, model: Any) -> Any:
        create, chat = model.chat.completions.create, [{"role": "user", "content": "q"}]
        with contextlib.suppress(ContextTooLongError):
            await create(messages=chat)
        for _ in range(2):
            await create(messages=chat, extra_headers={"Idempotency-Key": "a"})
        await create(messages=chat, n=2)
        late = asyncio.create_task(create(messages=chat))
        await asyncio.sleep(0)
        late.cancel()
        return {"turns": [1, 2]}

    session = NumberedSession(fails_at=1, error=ContextTooLongError("full"))
    assert run(solve, session).turn_rewards == [(1, 1.0), (3, 2.0), (5, 2.0)]


@pytest.mark.parametrize(
    ("turns", "note"),
    [
        ([1.0], "turns has 1 rewards, and the session took 2 turns; give a number or None for"),
        ([1, 2, 3], "turns has 3 rewards, and the session took 2 turns"),
        (2, "turns is '2' (int), not a list with a number or None for each turn"),
        ("ab", "turns is 'ab' (str), not a list"),
        ([1.0, float("nan")], "turns[1] is 'nan' (float), not a finite number"),
        ([1.0, "2"], "turns[1] is '2' (str), not a finite number"),
    ],
)
def test_rewards_of_turns_that_do_not_fit_fail_their_session(turns: Any, note: str) -> None:
    async def solve(task: Any, model: Any) -> Any:
        await ask(model)
        await ask(model)
        return {"reward": 1.0, "turns": turns}

    ended = run(solve, NumberedSession())
    assert (ended.end, ended.reward, ended.turn_rewards) == ("reward_error", None, ())
    assert note in ended.note


@pytest.mark.parametrize("game", [Count, AsyncCount])
def test_a_game_is_played_to_its_end(game: Any) -> None:
    session = FakeSession()
    ended = run(game, session)
    assert (ended.end, ended.reward, ended.turns) == ("done", 6.0, 3)
    assert [message["content"] for message in session.chats[-1]][-4:] == ["1", "more", "2", "more"]


def test_time_of_the_model_and_of_tools_is_told_apart() -> None:
    async def solve(task: Any, model: Any) -> None:
        await ask(model)
        await asyncio.sleep(5)
        await ask(model)

    ended = run(solve, FakeSession(seconds=2))
    assert (ended.model_s, ended.other_s) == pytest.approx((4, 5))


def test_limits_end_a_session() -> None:
    assert (run(Count, turns=2).end, run(Count, turns=3).end) == ("turns", "done")
    late = run(Count, FakeSession(seconds=2), deadline_s=5)
    assert (late.end, late.turns, late.reward) == ("deadline", 3, None)
    assert late.note == "it was not over after 5 s" and late.model_s == pytest.approx(5)


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (ContextTooLongError("full"), "length"),
        (SessionClosedError("the run ended"), "closed"),
        (MessagesError("the template refuses the chat"), "env_error"),
    ],
)
def test_the_models_refusals_end_a_session(error: Exception, end: str) -> None:
    ended = run(Count, FakeSession(fails_at=2, error=error))
    # A game keeps the reward that it had reached.
    # A request that the template refuses is no turn.
    turns, reward = (1, None) if end == "env_error" else (2, 1.0)
    assert (ended.end, ended.turns, ended.reward) == (end, turns, reward)
    assert str(error) in ended.note


@pytest.mark.parametrize("error", [RuntimeError("the engine died"), TimeoutError("no answer")])
def test_an_error_of_the_models_side_is_not_the_environments(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        run(Count, FakeSession(fails_at=2, error=error), deadline_s=60)

    async def asks_again(task: Any, model: Any) -> float:
        try:
            await ask(model)
        except Exception:
            await ask(model)
        return 1.0

    assert run(asks_again, FakeSession(fails_at=1, error=error)).end == "done"


def test_an_environment_may_reward_what_was_reached_before_a_limit() -> None:
    async def solve(task: Any, model: Any) -> float:
        try:
            while True:
                await ask(model)
        except Exception:
            return 0.25

    ended = run(solve, turns=2)
    assert (ended.end, ended.reward, ended.turns) == ("turns", 0.25, 2)


async def raises(task: Any, model: Any) -> None:
    await ask(model)
    raise KeyError("answer\nmissing")


async def times_out(task: Any, model: Any) -> None:
    raise TimeoutError("its own")


async def gives_nonsense(task: Any, model: Any) -> Any:
    return {"reward": float("nan")}


async def gives_text(task: Any, model: Any) -> Any:
    return "good"


class OddStep(Count):
    def step(self, message: Mapping[str, Any]) -> Any:
        return "more"


class OddReset(Count):
    def reset(self, task: Mapping[str, Any]) -> Any:
        return 7


def not_async(task: Any, model: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("environment", "note"),
    [
        (raises, "KeyError: 'answer\\nmissing' ("),
        (times_out, "TimeoutError: its own ("),
        (gives_nonsense, "TypeError: reward is 'nan' (float), not a finite number"),
        (gives_text, "TypeError: reward is 'good' (str), not a finite number"),
        (OddStep, "TypeError: step returned 'more', not (messages, reward, over)"),
        (OddReset, "TypeError: '7' is neither a text nor a list of messages"),
        (not_async, "TypeError: "),
    ],
)
def test_errors_of_the_environment_are_its_own(environment: Any, note: str) -> None:
    ended = run(environment, deadline_s=60)
    nonsense = environment in (gives_nonsense, gives_text)
    assert ended.end == ("reward_error" if nonsense else "env_error") and ended.reward is None
    assert ended.note.startswith(note) and "\n" not in ended.note
    assert environment is not raises or "test_running.py:" in ended.note


def test_canceling_a_session_cancels_it() -> None:
    async def cancel() -> None:
        async def solve(task: Any, model: Any) -> None:
            await asyncio.sleep(100)

        task = asyncio.create_task(run_session(solve, TASK, FakeSession(), Limits()))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(cancel())


async def asks_many(task: Any, model: Any) -> float:
    async with asyncio.TaskGroup() as group:
        for _ in range(5):
            group.create_task(ask(model))
    return 1.0


async def wraps(task: Any, model: Any) -> float:
    for _ in range(5):
        try:
            await ask(model)
        except Exception as error:
            raise RuntimeError("my own") from error
    return 1.0


@pytest.mark.parametrize("environment", [asks_many, wraps])
def test_a_limit_is_the_end_however_the_environment_raises_it(environment: Any) -> None:
    assert run(environment, turns=2).end == "turns"


def test_a_chat_that_is_made_shorter_goes_on() -> None:
    async def compacts(task: Any, model: Any) -> float:
        with contextlib.suppress(ContextTooLongError):
            await ask(model)
        await ask(model)
        return 1.0

    session = FakeSession(fails_at=1, error=ContextTooLongError("full"))
    assert run(compacts, session).end == "done"


def test_an_error_of_a_parallel_request_is_not_hidden_by_one_that_began_before_it() -> None:
    class FailsFirst(FakeSession):
        failed = False

        async def chat(self, request: ChatRequest) -> list[Answer]:
            self.chats.append([])
            await asyncio.sleep(len(self.chats))
            if len(self.chats) == 2 and not self.failed:
                self.failed = True
                raise RuntimeError("the engine died")
            return [Answer({"role": "assistant", "content": "1"}, "stop", 1, 1, 0)]

    async def gathers(task: Any, model: Any) -> float:
        await asyncio.gather(ask(model), ask(model), return_exceptions=True)
        return 0.5

    with pytest.raises(RuntimeError, match="the engine died"):
        run(gathers, FailsFirst())


@pytest.mark.parametrize("reward", [1e39, -1e39, 10**400])
def test_a_reward_that_single_precision_does_not_hold_is_nonsense(reward: float) -> None:
    async def gives(task: Any, model: Any) -> float:
        return reward

    assert run(gives).end == "reward_error"


def test_a_game_may_use_one_dict_for_all_its_messages() -> None:
    class Reuses:
        def __init__(self) -> None:
            self.message = {"role": "user", "content": "0"}

        def reset(self, task: Any) -> list[Any]:
            return [self.message]

        def step(self, message: Any) -> Any:
            self.message["content"] = "1"
            return [self.message], 0.0, message["content"] == "2"

    session = FakeSession()
    assert run(Reuses, session).end == "done"
    assert session.chats[0][0]["content"] == "0"


class Odd:
    """A value whose conversion fails, as that of a tensor with two elements."""

    def item(self) -> float:
        raise RuntimeError("it has 2 elements")

    def __repr__(self) -> str:
        raise RuntimeError("it cannot be shown")


@pytest.mark.parametrize("given", [Odd(), {"reward": Odd()}, {"output": Odd()}, {"turns": Odd()}])
def test_odd_values_are_nonsense_and_not_an_error_of_the_model(given: object) -> None:
    async def gives(task: Any, model: Any) -> object:
        return given

    assert run(gives).end == "reward_error"


def test_an_output_is_text() -> None:
    async def gives(task: Any, model: Any) -> object:
        return {"reward": 1.0, "output": "caf\udce9"}

    assert run(gives).output.encode() == b"caf\\udce9"


def test_an_error_of_the_agent_in_a_group_is_the_agents() -> None:
    async def gives(task: Any, model: Any) -> None:
        raise ExceptionGroup("of tasks", [AgentFailedError("no idea")])

    assert run(gives).end == "agent_error"
