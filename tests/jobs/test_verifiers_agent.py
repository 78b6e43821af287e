"""The program that plays tasks of verifiers. verifiers needs an environment of its own, which the
slow test makes. The others are of the parts that need none."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from audited_runs import audited

from asyncrl.rewards.builtin import printed_reward
from jobs.recipes.verifiers_agent import chosen, environment_settings, last_line, share, task_at

PROGRAM = Path(__file__).parents[2] / "jobs" / "recipes" / "verifiers_agent.py"
VERIFIERS = "verifiers==0.4.0"
STEPS, GROUPS, SAMPLES = 2, 2, 2
CALL = '<tool_call>{"name": "echo_back", "arguments": {"message": "hello world"}}</tool_call>'
WORDS = ("<pad>", "<unk>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>", CALL)
TEMPLATE = """\
{%- if tools %}{{ '<|tools|>' + (tools | tojson) + '<|end|>' }}{% endif %}
{%- for message in messages %}
{{- '<|' + message.role + '|>' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}</tool_call>' }}
{%- endfor %}{{ '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


@pytest.mark.parametrize(
    ("given", "agents", "expected"),
    [
        ({}, {"agent": None}, {"agent": {"harness": {"id": "null"}}}),
        ({}, {"agent": "compact"}, {"agent": {"harness": {"id": "compact"}}}),
        ({}, {"a": None, "b": None}, {name: {"harness": {"id": "null"}} for name in "ab"}),
        (
            {"agent": {"harness": {"id": "bash"}}, "max_concurrent_agents": 2},
            {"agent": None},
            {"agent": {"harness": {"id": "bash"}}, "max_concurrent_agents": 2},
        ),
    ],
)
def test_agents_run_here_and_cannot_run_commands_unless_that_is_asked_for(
    given: dict[str, Any], agents: dict[str, str | None], expected: dict[str, Any]
) -> None:
    found = environment_settings("glossary", given, agents)
    assert found.pop("taskset") == {"id": "glossary"}
    assert [found[name].pop("runtime") for name in agents] == [{"type": "subprocess"}] * len(agents)
    assert found == expected


def test_settings_of_the_user_win() -> None:
    given = {"taskset": {"size": 3}, "agent": {"runtime": {"type": "docker"}}}
    found = environment_settings("glossary", given, {"agent": None})
    assert found == {
        "taskset": {"size": 3, "id": "glossary"},
        "agent": {"runtime": {"type": "docker"}, "harness": {"id": "null"}},
    }


def test_a_task_is_found_by_its_number_also_where_they_never_end() -> None:
    assert task_at(count(10), 3) == 13
    with pytest.raises(ValueError, match="no task 2; the taskset has 2, counted from 0"):
        task_at("ab", 2)
    with pytest.raises(ValueError, match="no task -1; tasks are counted from 0"):
        task_at(count(), -1)


def test_one_agent_has_the_reward_of_the_session() -> None:
    assert chosen(["agent"], None) == 0
    assert chosen(["player0", "player1"], "player1") == 1
    with pytest.raises(ValueError, match=r"player0, player1 have traces.*with --agent"):
        chosen(["player0", "player1"], None)
    with pytest.raises(ValueError, match="--agent judge has 0 of the traces of player0"):
        chosen(["player0"], "judge")
    with pytest.raises(ValueError, match="--agent solver has 2 of the traces"):
        chosen(["solver", "solver"], "solver")


def test_the_last_line_is_a_reward_with_its_parts() -> None:
    line = last_line(0.75, {"right": 1.0, "short": 0.5, "judged": None}, {"turns": 3.0})
    assert printed_reward(session_output=["log\n" + line + "\n"], session_end=["done"]) == {
        "reward": [0.75],
        "right": [1.0],
        "short": [0.5],
        "turns": [3.0],
    }


def test_a_failure_is_the_last_line_of_the_errors() -> None:
    done = subprocess.run(
        [sys.executable, "-S", PROGRAM, "glossary", "0"],  # -S: no installed packages
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "glossary 0: ModuleNotFoundError: No module named 'verifiers'\n"


def test_sessions_share_the_scripts_of_verifiers_and_find_uv() -> None:
    variables = {"PATH": "/usr/bin", "HOME": "/tmp/session", "XDG_CACHE_HOME": "/home/me/.cache"}
    assert share(variables) == "/home/me/.cache/verifiers/scripts"
    assert variables["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}/usr/bin"
    assert share({}) == str(Path("~/.cache/verifiers/scripts").expanduser())


def run(*command: object) -> None:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def verifiers_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with verifiers and `echo-tool-v1`, a taskset with a tool
    that is in verifiers' source distribution. Without a package registry this fails and does not
    skip, because `.ci/setup` needs one, too."""
    folder = tmp_path_factory.mktemp("verifiers")
    download = ("pip", "download", "--quiet", "--no-deps", "--no-binary", "verifiers", VERIFIERS)
    run(sys.executable, "-m", *download, "--dest", folder)
    with tarfile.open(next(folder.glob("verifiers-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    (tasksets,) = folder.glob("verifiers-*/tests/v1/fixtures")
    uv = Path(sys.executable).with_name("uv")
    run(uv, "venv", "--quiet", "--python", sys.executable, folder / "own")
    python = folder / "own" / "bin" / "python"
    run(uv, "pip", "install", "--quiet", "--python", python, VERIFIERS, "uv", tasksets)
    return python


def save_tokenizer(directory: Path) -> None:
    """One token for each of WORDS, and one for any other text between them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    pattern = "|".join(word.translate({ord(one): f"\\{one}" for one in "|{}"}) for word in words)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|end|>",
        chat_template=TEMPLATE,
    ).save_pretrained(directory)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_tasks_of_verifiers_are_trained(
    start_run: Callable[..., Any],
    save_qwen3: Callable[..., Path],
    verifiers_python: Path,
    tmp_path: Path,
) -> None:
    """The model is random, and one of its eight tokens is a call of the tool."""
    model = save_qwen3(tmp_path / "model", tied=True, vocab_size=len(WORDS), bos_token_id=None)
    save_tokenizer(model)
    rows = [{"prompt": "echo-tool-v1 0", "number": 0}] * 4
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "tasks.parquet")
    started = start_run(
        {
            "max_steps": STEPS,
            "model.path": str(model),
            "data": {
                "train": str(tmp_path / "tasks.parquet"),
                "max_prompt_length": 16,
                "max_length": 256,
            },
            "environment": {
                "command": [str(verifiers_python), str(PROGRAM), "echo-tool-v1", "{number}"],
                "processes": 1,
                "concurrency": 2,
                "max_turns": 6,
                "deadline_s": 300,
            },
            "rollout": {
                "rollout_batch_size": GROUPS,
                "n_samples_per_prompt": SAMPLES,
                "max_completion_length": 8,
            },
            "reward": {
                "functions": {"task": {"function": "asyncrl.rewards.builtin:printed_reward"}},
                "processes": 1,
            },
            "eval": {},
            "checkpoint.every_steps": 0,
        }
    )
    assert started.wait(600) == 0, started.output
    trained = audited(tmp_path / "runs" / "run")
    steps = [record for record in trained.records("step") if record["applied"]]
    assert len(steps) == STEPS
    sessions = []
    for group in trained.groups().to_pylist():
        turns = Counter(group["turn_trajectory"])
        ends = zip(group["session_end"], group["reward"], strict=True)
        sessions += [(end, reward, turns[place]) for place, (end, reward) in enumerate(ends)]
    tokens = [
        sum(step[f"session/tokens_{one}"] for step in steps) for one in ("sampled", "trained")
    ]
    print(Counter(sessions), "of (end, reward, turns); tokens sampled and trained:", tokens)
    # Whoever takes a further turn has called the tool, and verifiers rewards that.
    for end, reward, taken in sessions:
        assert (end, reward) in {("done", float(taken > 1)), ("turns", None)}
    assert {reward for _, reward, _ in sessions} >= {0.0, 1.0}
    assert tokens[0] >= tokens[1] > 0  # a session without a reward is not trained
