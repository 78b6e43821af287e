"""`asyncrl check-env`: what it finds in templates, environments, rewards and variables."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from chat_families import CHATML, STRIPS_THINKING, save_chat_model

from asyncrl import cli
from asyncrl.config import AgentCommand, Config, ConfigError
from asyncrl.contracts.nodes import Node
from asyncrl.preflight.check_env.agent_checks import AgentChecks
from asyncrl.preflight.check_env.command import Checked, check_environment
from asyncrl.preflight.check_env.findings import Finding
from asyncrl.preflight.check_env.tool_examples import example_arguments
from asyncrl.preflight.trials.environment import try_environment
from asyncrl.sessions.session_rows import SessionRows, session_rows
from jobs.guess.game import question
from jobs.guess.task import make_model

HERE = "tests.preflight.environments_to_check"
HERMES = (
    "{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
    '{% for c in m.tool_calls or [] %}{{ \'<tool_call>\\n{"name": "\' + c.function.name +'
    " '\", \"arguments\": ' + (c.function.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Tools and calls as Qwen and Hermes write them."""
COUNTS = HERMES.replace("{% for m in", "{{ '(' ~ (messages | length) ~ ')' }}{% for m in", 1)
"""Writes at its start how many messages the chat has, so earlier tokens change."""
OTHER_CALLS = HERMES.replace("</tool_call>", "</call>")
"""Calls that the Hermes parser does not find."""
PLAIN_CALLS = HERMES.replace("<tool_call>", "call").replace("</tool_call>", "end")
LEAVES_CALLS_OUT = HERMES.replace("in m.tool_calls or []", "in []")
SAYS_QUOTES = HERMES.replace("| tojson) + '}", "| tojson | replace('say', 'tell')) + '}")
HIDES_TOOLS = HERMES.replace("{% if tools %}", "{% if false %}")
NO_END = HERMES.replace("{{ '<|im_end|>\\n' }}{% endfor %}{% if", "{{ '\\n' }}{% endfor %}{% if")
ENDS_EARLY = HERMES.replace(
    "{% for c in m.tool_calls or [] %}{{ '", "{% for c in m.tool_calls or [] %}{{ '<|im_end|>"
)
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}{% endfor %}" + HERMES
)
REFUSES_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no role tool') }}"
    "{% endif %}{% endfor %}" + HERMES
)


ASKS = """
import json, os, sys, urllib.request
body = {"messages": [{"role": "user", "content": sys.argv[1]}]}
key = "Bearer " + os.environ["OPENAI_API_KEY"]
headers = {"Content-Type": "application/json", "Authorization": key}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print(float(said == sys.argv[2]))
"""
"""A program that asks once, and prints its reward."""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow agent waits, and the cost is measured, for less time than in use."""
    monkeypatch.setattr("asyncrl.preflight.check_env.agent_checks.DEADLINE_S", 0.3)
    monkeypatch.setattr("asyncrl.preflight.check_env.agent_checks.COSTED", 3)


@pytest.fixture
def without_slow_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the other findings. The slow agent has a process of its own, and waits."""

    async def nothing(checks: AgentChecks) -> list[Finding]:
        return []

    monkeypatch.setattr(AgentChecks, "_slow", nothing)


@pytest.fixture
def config_of(tmp_path: Path) -> Callable[..., Config]:
    """`config_of("sound", template, **sections)`: the config of a run with that environment."""

    numbers = count()

    def make(function: str, template: str = HERMES, **changes: Any) -> Config:
        # A folder of its own, because tokenizers are cached by their path.
        model = save_chat_model(tmp_path / f"model-{next(numbers)}", template)
        rows = [{"prompt": f"{n} + {n} =", "answer": f"{2 * n}"} for n in (3, 21, 40)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
        tree: dict[str, Any] = {
            "name": "checked",
            "runs_root": str(tmp_path / "runs"),
            "max_steps": 1,
            "model": {"path": model},
            "data": {"train": str(tmp_path / "train.parquet"), "max_length": 2048},
            "environment": {"function": f"{HERE}:{function}"},
            "rollout": {"max_completion_length": 256},
        }
        for name, values in changes.items():
            tree[name] = {**tree.get(name, {}), **values}
        return Config.model_validate(tree)

    return make


def agent_of(config_of: Callable[..., Config], code: str) -> Config:
    """The config of a run with an agent program."""
    tree = config_of("silent").model_dump(mode="json", exclude={"environment", "reward"})
    printed = {"function": "asyncrl.rewards.builtin:printed_reward"}
    agent = {"command": [sys.executable, "-c", code, "{prompt}", "{answer}"]}
    return Config.model_validate(
        {**tree, "environment": agent, "reward": {"functions": {"printed": printed}}}
    )


def found(checked: Checked, verdict: str, check: str) -> str:
    """The texts of the findings of a check, which must all have this verdict."""
    mine = [one for one in checked.findings if one.check == check]
    assert mine and {one.verdict for one in mine} == {verdict}, checked.text()
    return "\n".join(one.text for one in mine)


def some(checked: Checked, verdict: str, check: str) -> str:
    """The text of the one finding of a check with this verdict."""
    mine = [one for one in checked.findings if (one.check, one.verdict) == (check, verdict)]
    assert len(mine) == 1, checked.text()
    return mine[0].text


def test_a_sound_environment_with_a_tool(config_of: Callable[..., Config]) -> None:
    checked = check_environment(config_of("with_tool"))
    assert not checked.failed, checked.text()
    assert "sampled tokens (text, a cut turn, tool calls), so a session is one row" in found(
        checked, "ok", "template"
    )
    calls = found(checked, "ok", "tool calls")
    for case in ("note: plain", "note: quotes", "note: unicode", "note: two calls"):
        assert case in calls
    for case in ("quotes", "nested", "unicode", "no arguments", "two calls"):
        assert f"made-up: {case}" in calls
    masks = found(checked, "ok", "masks")
    assert masks.startswith("8 turns have ") and "exactly what the model said" in masks
    assert "'<|im_end|>' ends a turn (text, a tool call)" in found(checked, "ok", "stops")
    assert "reward 0 to 1" in found(checked, "ok", "agent: right")
    assert "10 sessions (5 forms of the answer): done; at most 1 turn; reward 0" in found(
        checked, "ok", "agent: wrong"
    )
    assert "2 sessions: done; at most 3 turns" in found(checked, "ok", "agent: unknown tool")
    assert "at most 3 turns; reward 0" in found(checked, "ok", "agent: odd arguments")
    assert "1 turn; reward 0" in found(checked, "ok", "agent: broken tool call")
    for agent in ("empty", "injection", "special tokens", "spelled tokens", "very long"):
        assert "reward 0" in found(checked, "ok", f"agent: {agent}")
    assert "with a deadline of 0.3 s here" in found(checked, "ok", "agent: slow")
    assert "right answers get 1, and all other agents less" in found(checked, "ok", "reward")
    assert "ms of CPU a turn: rendering " in found(checked, "ok", "cost")


@pytest.mark.usefixtures("without_slow_agent")
def test_without_tools_the_parser_is_still_tried(config_of: Callable[..., Config]) -> None:
    checked = check_environment(config_of("sound", SAYS_QUOTES))
    assert not checked.failed
    assert "made-up: quotes" in some(checked, "warn", "tool calls")
    checked = check_environment(config_of("sound", CHATML))
    assert "offers no tools" in found(checked, "ok", "tool calls")


@pytest.mark.usefixtures("without_slow_agent")
def test_earlier_reasoning_that_the_template_strips(config_of: Callable[..., Config]) -> None:
    """The template still allows one row. `history` decides."""
    for history, effect in (
        ("verbatim", "verbatim keeps the sampled tokens."),
        ("template", "each such turn is a row of its own"),
    ):
        changes = {"environment": {"function": f"{HERE}:sound", "history": history}}
        checked = check_environment(config_of("sound", STRIPS_THINKING, **changes))
        assert not checked.failed, checked.text()
        text = found(checked, "warn", "history")
        assert text.startswith("reasoning: history: the template writes") and effect in text
        assert "('<think>')" in text
        kinds = "text, a cut turn" + (", reasoning" if history == "verbatim" else "")
        assert f"tokens ({kinds})" in found(checked, "ok", "template")
        assert "8 turns have" in found(checked, "ok", "masks")  # also of turns with reasoning


@pytest.mark.usefixtures("without_slow_agent")
@pytest.mark.parametrize("fault", ["a context token", "half of the rows"])
def test_wrong_masks_are_noticed(
    config_of: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def broken(nodes: Sequence[Node]) -> SessionRows:
        derived = session_rows(nodes)
        if fault == "half of the rows":
            return replace(derived, rows=derived.rows[: len(derived.rows) // 2])
        first = derived.rows[0]
        trained = first.trained.copy()
        trained[1] = True
        return replace(derived, rows=(replace(first, trained=trained), *derived.rows[1:]))

    monkeypatch.setattr("asyncrl.preflight.check_env.template_checks.session_rows", broken)
    checked = check_environment(config_of("sound"))
    assert checked.failed
    wanted = "other tokens are trained" if fault == "a context token" else "and [] are trained"
    assert wanted in found(checked, "FAIL", "masks")


@pytest.mark.usefixtures("without_slow_agent")
def test_the_game_of_the_demo(config_of: Callable[..., Config], tmp_path: Path) -> None:
    """Its tokenizer can write calls of its own tool, and no others."""
    make_model(tmp_path / "guess", seed=0)
    rows = [{"prompt": question(20), "low": 20, "hidden": 30}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "guess.parquet")
    changes: Any = {
        "model": {"path": str(tmp_path / "guess")},
        "data": {"train": str(tmp_path / "guess.parquet"), "max_length": 160},
        "environment": {"function": "jobs.guess.game:play"},
        "rollout": {"max_completion_length": 12},
    }
    checked = check_environment(config_of("sound", **changes))
    assert not checked.failed, checked.text()
    calls = some(checked, "ok", "tool calls")
    how = "by the format of Hermes, Qwen 2.5 and Qwen3"
    assert f"as they were written, {how} (guess: plain, guess: two calls)" in calls
    warned = some(checked, "warn", "tool calls")
    assert "cannot write them: made-up: quotes, made-up: nested" in warned
    assert "the data has no column answer" in found(checked, "warn", "agent: right")
    assert "its columns: low, hidden" in found(checked, "warn", "agent: right")


@pytest.mark.usefixtures("without_slow_agent")
def test_a_template_that_drifts(config_of: Callable[..., Config]) -> None:
    """The first other token is shown, and the drift is all that is wrong."""
    checked = check_environment(config_of("with_tool", COUNTS))
    drifts = [one for one in checked.findings if one.verdict == "FAIL"]
    assert [one.text.partition(":")[0] for one in drifts] == ["text", "tool calls"], checked.text()
    for one in drifts:
        assert (
            one.check == "template" and "it drifts. 2 of 2 later turns do not continue" in one.text
        )
        assert re.search(r"drift: .*; token \d+ is \d+ \('3'\), and was \d+ \('1'\)$", one.text)


@pytest.mark.usefixtures("without_slow_agent")
@pytest.mark.parametrize(
    ("template", "check", "text"),
    [
        (OTHER_CALLS, "tool calls", "stays text: it cannot be parsed"),
        (PLAIN_CALLS, "tool calls", "every call stays text, and no tool runs"),
        (SAYS_QUOTES, "tool calls", "note: quotes: "),
        (NO_END, "stops", "none of its tokens is a stop ('</s>')"),
        (ENDS_EARLY, "stops", "a tool call: generation stops at '<|im_end|>'"),
        (REFUSES_TOOLS, "template", "tool calls: it refuses the chat: no role tool"),
    ],
)
def test_a_template_with_which_tools_do_not_work(
    config_of: Callable[..., Config], template: str, check: str, text: str
) -> None:
    checked = check_environment(config_of("with_tool", template))
    mine = [one.text for one in checked.findings if (one.verdict, one.check) == ("FAIL", check)]
    assert any(text in one for one in mine), checked.text()


@pytest.mark.usefixtures("without_slow_agent")
def test_a_template_that_takes_one_call_at_a_time(config_of: Callable[..., Config]) -> None:
    checked = check_environment(config_of("with_tool", ONE_CALL))
    assert not checked.failed, checked.text()
    warned = [one.text for one in checked.findings if one.verdict == "warn"]
    refused = "two calls: the template refuses it: one call at a time"
    assert warned == [f"note: {refused}", f"made-up: {refused}"]


@pytest.mark.usefixtures("without_slow_agent")
def test_a_template_whose_calls_cannot_be_read(config_of: Callable[..., Config]) -> None:
    """Without tools in the environment, that is only a warning."""
    checked = check_environment(config_of("sound", PLAIN_CALLS))
    warned = found(checked, "warn", "tool calls")
    assert "the template takes tools, but asyncrl cannot read its tool calls" in warned
    assert "give response_template in the model's tokenizer_config.json" in warned
    assert not checked.failed, checked.text()


@pytest.mark.usefixtures("without_slow_agent")
def test_a_template_that_writes_one_call_of_a_turn(config_of: Callable[..., Config]) -> None:
    first = HERMES.replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]")
    checked = check_environment(config_of("with_tool", first))
    assert not checked.failed, checked.text()
    warned = [one.text for one in checked.findings if one.verdict == "warn"]
    only = "two calls: the template writes only the first call of a turn, as gpt-oss's"
    assert warned == [f"note: {only}", f"made-up: {only}"]


@pytest.mark.usefixtures("without_slow_agent")
def test_a_template_that_leaves_calls_out(config_of: Callable[..., Config]) -> None:
    checked = check_environment(config_of("with_tool", LEAVES_CALLS_OUT))
    warned = found(checked, "warn", "tool calls")
    assert "the template leaves the calls of earlier turns out: note: plain, " in warned
    assert not checked.failed, checked.text()


@pytest.mark.usefixtures("without_slow_agent")
def test_a_template_that_hides_the_tools(config_of: Callable[..., Config]) -> None:
    checked = check_environment(config_of("with_tool", HIDES_TOOLS))
    assert not checked.failed
    assert "the model does not see them" in found(checked, "warn", "tools")


@pytest.mark.parametrize(
    ("function", "verdict", "check", "text"),
    [
        ("raises", "FAIL", "agent: wrong", "10 of 10 sessions end with env_error, for the same"),
        ("raises", "FAIL", "agent: right", "KeyError: 'no such table' ("),
        ("upside_down", "FAIL", "reward", "more than the right one: 1 and 0 for answers of the"),
        ("rewards_length", "FAIL", "reward", "get more: "),
        ("believes", "warn", "reward", "these agents get as much: "),
        ("gives_nothing", "FAIL", "agent: right", "reward none; some sessions have no reward"),
        ("fails_on_empty", "warn", "agent: empty", "2 of 2 sessions end with env_error"),
        ("blocks", "warn", "agent: slow", "ends env_error instead of deadline"),
        ("silent", "FAIL", "agent: wrong", "done; the model was asked for no turn; nothing is"),
        ("asks_at_times", "warn", "agent: right", "; 5 took no turn, and are not trained"),
        ("too_long_at_times", "warn", "first chat", "1 of 2 tasks begin with a chat that leaves"),
    ],
)
def test_an_environment_with_a_fault(
    config_of: Callable[..., Config],
    request: pytest.FixtureRequest,
    function: str,
    verdict: str,
    check: str,
    text: str,
) -> None:
    if check != "agent: slow":
        request.getfixturevalue("without_slow_agent")
    checked = check_environment(config_of(function))
    assert text in found(checked, verdict, check)
    assert checked.failed == (verdict == "FAIL"), checked.text()


def test_an_environment_that_blocks_is_given_up(
    config_of: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = psutil.Process().children(recursive=True)  # an earlier test may have left some
    monkeypatch.setattr("asyncrl.preflight.check_env.agent_checks.BLOCKED_S", 2.0)
    checked = check_environment(config_of("always_blocks", environment={"block_s": 1}))
    text = found(checked, "FAIL", "agents")
    assert "2 sessions blocked their process, so the other" in text
    assert "it kept its process for over environment.block_s = 1 s" in text
    assert not [one for one in checked.findings if one.check in ("agent: slow", "cost")]
    assert not {*psutil.Process().children(recursive=True)} - {*before}


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("raise SystemExit('no such task')", "ended with exit code 1: no such task"),
        ("print(1)", "10 sessions: done; the model was asked for no turn; nothing"),
    ],
)
def test_a_program_that_cannot_be_trained(
    config_of: Callable[..., Config], code: str, text: str
) -> None:
    checked = check_environment(agent_of(config_of, code))
    assert text in "\n".join(
        found(checked, "FAIL", f"agent: {name}") for name in ("right", "wrong")
    )
    assert "asked the model for no turn" in found(checked, "warn", "agent: slow")


@pytest.mark.parametrize("check", [check_environment, try_environment])
def test_arguments_that_do_not_fit_the_agents_function_are_refused(
    config_of: Callable[..., Config], check: Callable[[Config], object]
) -> None:
    """By check-env, and before a run starts anything."""
    tree = config_of("silent").model_dump(mode="json", exclude={"environment"})
    agent = {"agent": f"{HERE}:sound", "arguments": {"most": 3}}
    with pytest.raises(ConfigError) as refused:
        check(Config.model_validate({**tree, "environment": agent}))
    text = str(refused.value)
    assert f"environment.agent '{HERE}:sound' cannot be called with environment.arguments" in text
    assert (
        "unexpected keyword argument 'most'" in text and "takes of environment.arguments:" in text
    )
    assert "\n" not in text


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["no_such_agent", "{prompt}"], "'no_such_agent' is no program on this machine that may"),
        (
            ["{here}/not_executable"],
            "not_executable' is no program on this machine that may be run",
        ),
        (["echo", "{no_such_column}"], "names the columns ['no_such_column'], and the tasks have"),
    ],
)
def test_a_program_that_cannot_start_is_one_line(
    config_of: Callable[..., Config], tmp_path: Path, command: list[str], text: str
) -> None:
    """As at a run's start, and not one line for each scripted agent."""
    (tmp_path / "not_executable").write_text("#!/bin/sh\n")
    config = agent_of(config_of, "")
    command = [part.replace("{here}", str(tmp_path)) for part in command]
    agent = AgentCommand(command=command)
    with pytest.raises(ConfigError) as refused:
        check_environment(config.model_copy(update={"environment": agent}))
    assert text in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.usefixtures("without_slow_agent")
def test_what_a_program_prints_cannot_act_on_the_terminal(
    config_of: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import os; os.write(1, bytes(range(256)) * 99);"
        "os.write(2, b'\\xff\\x00 \\x1b[31mred\\x1b[0m ' + b'x' * 5000); raise SystemExit(1)"
    )
    path = tmp_path / "config.yaml"
    config = agent_of(config_of, code)
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    with pytest.raises(SystemExit) as ended:
        cli.main(["check-env", str(path)])
    printed = capsys.readouterr()
    assert ended.value.code == 2 and not printed.err
    assert "agent_error and are not trained: " in printed.out and "[31mred" in printed.out
    assert not {"\x1b", "\x00"} & set(printed.out)
    assert max(map(len, printed.out.splitlines())) < 600


def test_a_program_gets_the_time_that_it_needs_to_start(config_of: Callable[..., Config]) -> None:
    """It takes longer than the deadline of slow agents here."""
    checked = check_environment(agent_of(config_of, "import time; time.sleep(0.4)\n" + ASKS))
    assert not checked.failed, checked.text()
    assert "done; at most 1 turn; reward 0 to 1" in found(checked, "ok", "agent: right")
    assert "done; at most 1 turn; reward 0" in found(checked, "ok", "agent: wrong")
    assert found(checked, "ok", "agent: slow").startswith("ends deadline after ")


@pytest.mark.usefixtures("without_slow_agent")
@pytest.mark.slow
def test_an_agent_that_gives_up_after_a_cut_turn(config_of: Callable[..., Config]) -> None:
    """As `openai-agents` does with chat completions, if no visible text came."""
    cut = ASKS.replace(
        'said = json.load(urllib.request.urlopen(request))["choices"][0]',
        'choice = json.load(urllib.request.urlopen(request))["choices"][0]\n'
        "if choice['finish_reason'] == 'length': sys.exit('no visible output')\n"
        "said = choice",
    )
    checked = check_environment(agent_of(config_of, cut))
    assert not checked.failed, checked.text()
    text = found(checked, "warn", "agent: very long")
    assert "2 sessions: length; at most 1 turn; reward none; some sessions have no reward" in text
    assert "the run cut the last turn" in text and "exit code 1: no visible output" in text
    assert text.endswith("Let the agent go on with a cut turn, so that length can cost")


@pytest.mark.usefixtures("without_slow_agent")
def test_one_reason_is_given_once(config_of: Callable[..., Config]) -> None:
    checked = check_environment(config_of("raises"))
    assert checked.text().count("no such table") == 1
    assert "2 of 2 sessions end with env_error, for the same reason" in found(
        checked, "warn", "agent: empty"
    )


@pytest.mark.usefixtures("without_slow_agent")
def test_a_first_chat_beyond_every_limit_is_a_finding(
    config_of: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.preflight.check_env.template_checks.LONGEST", 4096)
    checked = check_environment(config_of("too_long"))
    text = found(checked, "FAIL", "first chat")
    assert text.startswith("2 of 2 tasks begin with a chat that leaves no room for an answer")
    assert "more than 2048 tokens; shorten the messages); raise data.max_length = 2048" in text
    assert "so a session is one row" in found(checked, "ok", "template")


@pytest.mark.usefixtures("without_slow_agent")
def test_the_tools_of_a_later_agent_are_checked(config_of: Callable[..., Config]) -> None:
    checked = check_environment(config_of("hands_over"))
    assert checked.failed
    texts = [one.text for one in checked.findings if one.check == "tool calls"]
    (bad,) = [text for text in texts if 'kept": plain' in text]
    assert "come back as they were written" in texts[0] and "note: plain" in texts[0]
    assert sum("note: plain" in text for text in texts) == 1, "each tool is checked once"
    assert bad in [one.text for one in checked.findings if one.verdict == "FAIL"]


@pytest.mark.usefixtures("without_slow_agent")
def test_findings_come_while_it_works(config_of: Callable[..., Config]) -> None:
    """Those of the template come before the session of a slow task has ended."""
    came: list[Finding] = []
    at: dict[str, float] = {}

    def tell(finding: Finding) -> None:
        came.append(finding)
        at.setdefault(finding.check, time.monotonic())

    checked = check_environment(config_of("slow_at_times"), tell)
    assert tuple(came) == checked.findings
    order = list(at)
    assert order.index("stops") < order.index("agent: right") < order.index("cost")
    assert at["agent: right"] - at["stops"] > 0.5, "it did not wait for the slow task"


@pytest.mark.usefixtures("without_slow_agent")
def test_what_an_environment_prints_is_bounded(
    config_of: Callable[..., Config], capfd: pytest.CaptureFixture[str]
) -> None:
    checked = check_environment(config_of("prints_much"))
    assert " bytes here, and 4,096 of them are shown" in found(checked, "warn", "output")
    printed = capfd.readouterr()
    assert 1000 < (printed.out + printed.err).count("x") < 8192


@pytest.mark.usefixtures("without_slow_agent")
def test_reward_functions_are_the_reward(config_of: Callable[..., Config]) -> None:
    function = "asyncrl.rewards.builtin:exact_match"
    changes: Any = {"reward": {"functions": {"exact": {"function": function, "weight": 2.0}}}}
    checked = check_environment(config_of("gives_nothing", **changes))
    assert not checked.failed, checked.text()
    assert "right answers get 2, and all" in found(checked, "ok", "reward")
    changes["reward"]["functions"]["exact"]["function"] = f"{HERE}:wants_column"
    checked = check_environment(config_of("gives_nothing", **changes))
    assert "it takes solution, which" in some(checked, "FAIL", "reward")


@pytest.mark.usefixtures("without_slow_agent")
def test_secrets_are_named_and_not_shown(
    config_of: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "value-of-the-key")
    checked = check_environment(config_of("sound"))
    text = found(checked, "warn", "secrets")
    assert "OPENAI_API_KEY" in text and "value-of-the-key" not in checked.text()
    assert not checked.failed


def test_the_command(
    config_of: Callable[..., Config],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 0 if all is well, and 2 after a failed check or for a config without an
    environment."""

    def run(config: Config) -> tuple[int, str]:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
        with pytest.raises(SystemExit) as ended:
            cli.main(["check-env", str(path)])
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out + printed.err

    code, printed = run(config_of("sound"))
    assert code == 0, printed
    assert f"{HERE}:sound: at most 16 turns" in printed
    assert printed.rstrip().endswith(" warn, 0 FAIL")
    code, printed = run(config_of("upside_down"))
    assert code == 2 and "\nFAIL  reward" in printed and printed.rstrip().endswith(" 1 FAIL")
    code, printed = run(config_of("no_such_function"))
    assert code == 2 and printed.startswith("asyncrl: environment.function"), printed
    one = config_of("sound").model_copy(update={"environment": None})
    with pytest.raises(ConfigError, match="check-env checks an environment"):
        check_environment(one)


def test_arguments_follow_the_schema_of_a_tool() -> None:
    properties = {
        "number": {"type": "integer"},
        "share": {"type": "number"},
        "kind": {"enum": ["b", "c"]},
        "flags": {"type": "array", "items": {"type": "boolean"}},
        "inner": {"type": "object", "properties": {"text": {"type": "string"}}},
        "free": {"type": "object"},
        "either": {"anyOf": [{"type": "null"}, {"type": "string"}]},
        "text": {"type": ["string", "null"]},
    }
    tool: Any = {"function": {"parameters": {"type": "object", "properties": properties}}}
    assert example_arguments(tool, "plain") == {
        "number": 42,
        "share": 1.5,
        "kind": "b",
        "flags": [True],
        "inner": {"text": "a"},
        "free": {"a": [1, {"b": "a"}]},
        "either": None,
        "text": "a",
    }
    assert example_arguments({"name": "bare"}, "plain") == {}
