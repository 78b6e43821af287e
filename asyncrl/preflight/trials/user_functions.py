"""Try the user's loss, advantage and group filter on made-up numbers before anything is
allocated.

Each function runs in its own process, which is killed at a time limit. A function may hang in its
import, in a loop, or in C code that holds the interpreter lock.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile

import numpy as np
from pydantic import TypeAdapter

from asyncrl.algorithms.advantages import GroupInputs
from asyncrl.algorithms.advantages.own_advantage import OwnAdvantage
from asyncrl.algorithms.losses.own_loss import OwnLoss
from asyncrl.algorithms.user_functions import own_verdict
from asyncrl.config import AlgorithmConfig, Config, ConfigError, PolicyGradient
from asyncrl.config.algorithm import GroupFilter
from asyncrl.runtime.functions import FunctionError
from asyncrl.runtime.imports import for_users_programs, import_path

ALGORITHM: TypeAdapter[AlgorithmConfig] = TypeAdapter(AlgorithmConfig)
REWARDS = ([1.0, 0.0, 0.5, 0.0], [1.0, 1.0], [0.0, 0.0, 0.0])
"""A group of four rewards, and two groups of equal rewards, whose std is 0."""
LIMIT_S = 60.0
"""Seconds for a function on made-up numbers, including the import of its module."""
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from asyncrl.preflight.trials.user_functions import main; main(*sys.argv[2:])"
)


def try_own(config: Config, limit_s: float = LIMIT_S) -> list[str]:
    """What each of the user's functions returned for made-up numbers, one line each.

    Raises:
        ConfigError: a function cannot be imported, raised, broke its contract, hung or ended its
            process. The message gives its file and line.
    """
    algorithm = config.algorithm
    settings = ("loss", "advantage", "group_filter")
    named = {name: getattr(algorithm, name, None) for name in settings}
    return [
        _try_in_process(algorithm, name, function.name, limit_s)
        for name, function in named.items()
        if isinstance(function, OwnLoss | OwnAdvantage | GroupFilter)
    ]


def _try_in_process(algorithm: AlgorithmConfig, name: str, function: str, limit_s: float) -> str:
    """The line of one function, from its own process. The function's output goes to stderr."""
    title = f"on made-up numbers: algorithm.{name} = {function!r}"
    with tempfile.TemporaryFile() as answer:
        command = [
            sys.executable,
            "-P",
            "-c",
            START,
            json.dumps(import_path()),
            name,
            algorithm.model_dump_json(),
        ]
        try:
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=answer, timeout=limit_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            fix = "check the function and its module for an endless loop, a wait or a download"
            raise ConfigError(f"{title} was killed after {limit_s:g} s; {fix}") from None
        answer.seek(0)
        given: dict[str, str] = json.loads(answer.read() or "{}")
    if "error" in given:
        raise ConfigError(f"on made-up numbers: {given['error']}")
    if "line" not in given:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise ConfigError(f"{title} ended its process ({how}); return a value or raise an error")
    return f"algorithm.{name} {function}: {given['line']}"


def main(name: str, algorithm: str) -> None:
    """Entry point of the process: try one function, and write the result to the parent. The
    function's output goes to stderr."""
    for_users_programs()
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Ctrl-C reaches this process too. It should end without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        given = {"line": _try_function(ALGORITHM.validate_json(algorithm), name)}
    except FunctionError as error:
        given = {"error": str(error)}
    json.dump(given, answer)
    answer.flush()
    sys.stdout.flush()
    os._exit(0)  # threads of the function may still run


def _try_function(algorithm: AlgorithmConfig, name: str) -> str:
    """What one function returned. Raises FunctionError."""
    if name == "loss":
        from asyncrl.algorithms.objective import own_metrics

        assert isinstance(algorithm, PolicyGradient)
        return (
            "a loss and a gradient for 12 tokens; metrics:"
            f" {', '.join(own_metrics(algorithm.loss)) or 'none'}"
        )
    if name == "advantage":
        assert isinstance(algorithm, PolicyGradient)
        given = [
            algorithm.advantage.of_group(np.array(rewards), GroupInputs()).tolist()
            for rewards in REWARDS
        ]
        return f"{REWARDS[0]} gives {[round(value, 4) for value in given[0]]}"
    assert algorithm.group_filter is not None
    verdicts = [
        own_verdict(
            algorithm.group_filter.name,
            algorithm.group_filter.arguments,
            rewards,
            (np.array(rewards) - np.mean(rewards)).tolist(),
            [8] * len(rewards),
            [False] * len(rewards),
        )
        for rewards in REWARDS
    ]
    return "; ".join(
        f"{rewards} {'trained' if verdict else 'left out'}"
        for rewards, verdict in zip(REWARDS, verdicts, strict=True)
    )


def own_text(lines: list[str]) -> str:
    """The lines with a heading; empty if there are none."""
    return (
        "\n".join(["# your functions, tried on made-up numbers", *(f"  {line}" for line in lines)])
        if lines
        else ""
    )
