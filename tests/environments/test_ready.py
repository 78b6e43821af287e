"""The ready environments, with fakes of the model. The Python tool runs in a real sandbox."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest

from asyncrl.environments.process import imported
from asyncrl.environments.ready import calculator, python, reasoning_gym
from asyncrl.environments.ready.arithmetic import CalculationError, calculate
from asyncrl.environments.ready.puzzles import COLUMNS, final_answer
from asyncrl.environments.ready.sandboxed import result_text
from asyncrl.environments.running import Ended, Limits, run_session
from asyncrl.sandbox import Level, Program, Result, SandboxError, probe
from asyncrl.testing import FakeChatSession, FakeSandbox, tool_call

SUM = {"prompt": "What is 20 + 22?", "answer": "42"}


def play(
    environment: Any, task: dict[str, Any], answers: Sequence[object], **arguments: Any
) -> tuple[Ended, FakeChatSession]:
    session = FakeChatSession(answers)
    return asyncio.run(run_session(environment, task, session, Limits(), arguments)), session


def test_names_and_arguments_are_those_of_a_config() -> None:
    for name, arguments in (
        ("calculator", {"grade": "exact", "most_turns": 3}),
        ("python", {"level": "landlock", "limits": {"wall_s": 2}}),
        ("reasoning_gym", {"tries": 2}),
    ):
        assert imported(f"asyncrl.environments.ready:{name}", arguments) is not None


def test_imports_stay_light() -> None:
    """Every environment process imports them."""
    script = (
        "import sys; from asyncrl.environments.ready import calculator, python, reasoning_gym\n"
        "import asyncrl.environments.process\n"
        "heavy = {'transformers', 'torch', 'ray', 'reasoning_gym', 'math_verify', 'pyarrow'}\n"
        "heavy |= {'numpy', 'jinja2', 'pydantic'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("20 + 22", "42"),
        (" (3 + 4) * 2.5 ", "17.5"),
        ("-7 // 2", "-4"),
        ("7 % 4 - +1", "2"),
        ("2 ** 100", str(2**100)),
        ("2 ** -1", "0.5"),
        ("6 / 3", "2"),
        ("1e400 ** 0", None),
        ("1 / 3", "0.3333333333333333"),
        ("(-8) ** 3", "-512"),
        ("1 ** 99999999999", "1"),
    ],
)
def test_expressions_are_calculated(expression: str, value: str | None) -> None:
    if value is None:
        with pytest.raises(CalculationError):
            calculate(expression)
    else:
        assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("", "no arithmetic expression"),
        ("1 +", "no arithmetic expression"),
        ("(" * 300, "no arithmetic expression"),
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("2.0 ** 99999", "too large"),
        ("2 ** 4000 * 2 ** 4000", "too large"),
        ("2 ** 4090 / 0.1", "too large"),
        ("1e308 * 10", "not a finite number"),
        ("(-2) ** 0.5", "root of a negative"),
        ("2 ^ 3", "write [*][*] for powers"),
        ("__import__('os')", "only numbers"),
        ("(1).real", "only numbers"),
        ("'a' * 9", "only numbers"),
        ("True + 1", "only numbers"),
        ("1j", "only numbers"),
        ("1 << 9", "only numbers"),
        ("[1 for _ in (1,)]", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("1" * 401, "more than 400 characters"),
        (7, "not a text"),
    ],
)
def test_anything_else_is_refused(expression: Any, why: str) -> None:
    with pytest.raises(CalculationError, match=why):
        calculate(expression)


def test_no_expression_takes_long() -> None:
    """Each is refused before it is calculated."""
    worst = ["9**" * 130 + "9", "(9**1200)**3", "(2**4000)*" * 30 + "1", "7**(7**(7**7))"]
    began = time.process_time()
    for expression in worst:
        with pytest.raises(CalculationError):
            calculate(expression)
    assert time.process_time() - began < 2  # Python would need hours


def test_the_calculator_is_called_and_the_answer_graded() -> None:
    call = tool_call("calculate", {"expression": "20 + 22"})
    ended, session = play(calculator, SUM, [call, "The answer is $42$."])
    assert (ended.end, ended.reward) == ("done", 1.0)
    assert ended.parts == {"calls": 1.0, "failed_calls": 0.0}
    (chat, tools) = session.requests[1]
    assert chat[0] == {"role": "user", "content": SUM["prompt"]}
    assert chat[-1]["content"] == "42" and tools is not None
    bad = tool_call("calculate", {"expression": "open('x')"})
    ended, session = play(calculator, SUM, [bad, "41"], system="Use the calculator.")
    assert (ended.reward, ended.parts["failed_calls"]) == (0.0, 1.0)
    chat, _ = session.requests[1]
    assert chat[0] == {"role": "system", "content": "Use the calculator."}
    assert "error: CalculationError: use only numbers" in str(chat[-1]["content"])


def test_grades() -> None:
    assert play(calculator, SUM, ["42 "], grade="exact")[0].reward == 1.0
    assert play(calculator, SUM, ["It is 42"], grade="exact")[0].reward == 0.0
    assert play(calculator, SUM, ["42"], grade="none")[0].reward is None
    assert play(calculator, SUM, [tool_call("x", {})] * 2, most_turns=2)[0].reward == 0.0
    ended, _ = play(calculator, {"prompt": "q"}, ["42"])
    assert ended.end == "env_error" and "no column answer; add it" in ended.note
    ended, _ = play(calculator, SUM, ["42"], grade="close")
    assert ended.end == "env_error" and "choose math, exact or none" in ended.note


def test_a_prompt_that_is_a_chat_stays_one() -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    task = {"prompt": "rendered", "messages": chat, "answer": "42"}
    _, session = play(calculator, task, ["42"], system="another")
    assert session.requests[0][0] == chat


def fake_result(program: Program) -> Result:
    if b"broken" in program.files["main.py"]:
        raise SandboxError("the supervisor is gone")
    return Result("exited", 0, "42\n", "", 0.1, 0.1, 1, Level.NAMESPACES)


def test_programs_run_in_the_sandbox() -> None:
    sandbox = FakeSandbox(fake_result)
    call = tool_call("run_python", {"code": "print(20 + 22)"})
    ended, session = play(
        python, SUM, [call, "42"], sandbox=sandbox, limits={"wall_s": 3, "memory_bytes": 1 << 28}
    )
    assert (ended.end, ended.reward) == ("done", 1.0)
    assert session.requests[1][0][-1]["content"] == "42"
    assert sandbox.programs[0].files["main.py"] == b"print(20 + 22)"
    assert (sandbox.limits[0].wall_s, sandbox.limits[0].memory_bytes) == (3, 1 << 28)


def test_a_broken_sandbox_is_no_fault_of_the_model() -> None:
    call = tool_call("run_python", {"code": "broken"})
    ended, _ = play(python, SUM, [call, "42"], sandbox=FakeSandbox(fake_result))
    assert ended.end == "env_error" and "the supervisor is gone" in ended.note


def test_a_missing_sandbox_is_named() -> None:
    ended, session = play(python, SUM, ["42"], level="container")
    assert ended.end == "env_error" and not session.requests
    assert "sandbox level 'container' is not available here" in ended.note


def test_programs_in_a_real_sandbox() -> None:
    """A program prints, fails, takes too long, prints too much, and sees no environment."""
    level = probe().best
    assert level is not None, probe().text()
    programs = {
        "print(6 * 7)": "42",
        "print(1); 1 / 0": "1\nstandard error:\n(",
        "while True: pass": "the program was ended: it took too long",
        "print('x' * 500)": "x" * 100 + "… (401 more characters)",
        "import os; print(os.environ.get('CANARY'))": "None",
        "pass": "the program printed nothing",
    }
    calls = [tool_call("run_python", {"code": code}) for code in programs]
    ended, session = play(
        python,
        SUM,
        [*calls, "42"],
        level=level.value,
        limits={"wall_s": 2},
        output_characters=100,
    )
    assert ended.reward == 1.0 and ended.parts["calls"] == len(programs)
    chat = session.requests[-1][0]
    told = [str(message["content"]) for message in chat if message["role"] == "tool"]
    for text, wanted in zip(told, programs.values(), strict=True):
        assert text.startswith(wanted), text
    assert told[1].endswith("ZeroDivisionError: division by zero\nexit code 1")


def test_the_end_of_a_program_is_in_words() -> None:
    def result(status: Any, code: int | None = None) -> Result:
        return Result(status, code, "", "", 0.1, 0.1, 1, Level.NAMESPACES)

    assert result_text(result("exited", 3), 9) == "exit code 3"
    assert result_text(result("memory"), 9) == "the program was ended: it used too much memory"


def puzzle(name: str = "chain_sum", seed: int = 0) -> dict[str, Any]:
    import reasoning_gym as package

    entry = package.create_dataset(name, size=1, seed=seed)[0]
    metadata = json.dumps(entry["metadata"], default=str)
    row = {"question": entry["question"], "answer": entry["answer"], "metadata": metadata}
    return {"prompt": entry["question"], "task": name, **row}


def test_a_puzzle_has_the_packages_own_score() -> None:
    task = puzzle()
    assert play(reasoning_gym, task, [task["answer"]])[0].reward == 1.0
    ended, session = play(reasoning_gym, task, [f"So <answer>{task['answer']}</answer>!"])
    assert (ended.reward, len(session.requests)) == (1.0, 1)
    ended, _ = play(reasoning_gym, task, ["no idea"])
    assert ended.reward is not None and ended.reward < 1
    assert ended.parts == {"tries": 1.0, "first_score": ended.reward}


def test_an_answer_for_which_the_scorer_raises_is_wrong() -> None:
    ended, _ = play(reasoning_gym, puzzle("prime_factorization"), ["I do not know."])
    assert (ended.end, ended.reward) == ("done", 0.0)


def test_a_wrong_answer_may_be_tried_again() -> None:
    task = puzzle()
    ended, session = play(reasoning_gym, task, ["x", "y", task["answer"], "z"], tries=4)
    assert ended.reward == 1.0 and ended.parts["tries"] == 3 and ended.parts["first_score"] < 1
    assert session.requests[2][0][-1] == {"role": "user", "content": "That is wrong. Try again."}
    ended, session = play(reasoning_gym, task, ["x", "y", "z"], tries=2, again="No.")
    assert len(session.requests) == 2 and ended.parts["tries"] == 2
    assert session.requests[1][0][-1]["content"] == "No."


async def test_the_last_answer_counts_if_there_is_no_room_for_another() -> None:
    session = FakeChatSession(["x"], most_messages=1)
    ended = await run_session(reasoning_gym, puzzle(), session, Limits(), {"tries": 3})
    assert ended.end == "length" and ended.reward is not None and ended.parts["tries"] == 1


@pytest.mark.parametrize(
    ("task", "arguments", "why"),
    [
        ({"prompt": "q"}, {}, "no column task; rows of reasoning-gym have task, question"),
        (dict.fromkeys(COLUMNS, "{}"), {"tries": 0}, "tries = 0: give at least 1"),
        ({**dict.fromkeys(COLUMNS, "{}"), "task": "n_queens"}, {}, "evaluates the model's answer"),
    ],
)
def test_what_cannot_be_scored_is_named(task: Any, arguments: Any, why: str) -> None:
    ended, _ = play(reasoning_gym, {"prompt": "q", **task}, ["x"], **arguments)
    assert ended.end == "env_error" and why in ended.note


def test_a_task_that_evaluates_answers_runs_if_asked_for() -> None:
    task = puzzle("countdown")
    ended, _ = play(reasoning_gym, task, ["1"], evaluate_answers=True)
    assert ended.end == "done" and ended.reward is not None


def test_the_last_marked_answer_is_the_final_one() -> None:
    assert final_answer(" plain ") == "plain"
    assert final_answer("<answer>1</answer> or <answer> 2\n</answer>") == "2"
