"""A loss, an advantage and a group filter of the user's own are tried on made-up numbers before
anything is allocated.

Each is tried in a process of its own, which ends at its time limit whatever the function does: it
may hang in its module, in a loop, or in C code with the interpreter locked.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile

import numpy as np

from asyncrl.algorithms.own import is_own, own_advantages, own_verdict
from asyncrl.config import AlgorithmConfig, Config, ConfigError
from asyncrl.runtime.functions import FunctionError

__all__ = ["LIMIT_S", "main", "own_text", "try_own"]

REWARDS = ([1.0, 0.0, 0.5, 0.0], [1.0, 1.0], [0.0, 0.0, 0.0])
"""A group of four rewards, and two whose rewards are equal: a std of 0."""
LIMIT_S = 60.0
"""Seconds that a function of the user's own gets on made-up numbers, with the import of its module.
"""
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from asyncrl.preflight.own_functions import main; main(*sys.argv[2:])"
)


def try_own(config: Config, limit_s: float = LIMIT_S) -> list[str]:
    """What each function of the user's own gave for made-up numbers: a line each.

    Raises:
        ConfigError: one cannot be imported, raised, broke its contract, hung or ended its process.
            The message names its file and line.
    """
    algorithm = config.algorithm
    named = {name: getattr(algorithm, name) for name in ("loss", "advantage", "group_filter")}
    return [
        _tried_apart(algorithm, name, function, limit_s)
        for name, function in named.items()
        if function is not None and is_own(function)
    ]


def _tried_apart(algorithm: AlgorithmConfig, name: str, function: str, limit_s: float) -> str:
    """The line of one function, from a process of its own. What the function prints goes to
    stderr."""
    said = f"on made-up numbers: algorithm.{name} = {function!r}"
    with tempfile.TemporaryFile() as answer:
        command = [
            sys.executable,
            "-c",
            START,
            json.dumps(sys.path),
            name,
            algorithm.model_dump_json(),
        ]
        try:
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=answer, timeout=limit_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            fix = (
                "it and its module must end within that: look for an endless loop, a wait or a"
                " download"
            )
            raise ConfigError(f"{said} was killed after {limit_s:g} s; {fix}") from None
        answer.seek(0)
        given: dict[str, str] = json.loads(answer.read() or "{}")
    if "error" in given:
        raise ConfigError(f"on made-up numbers: {given['error']}")
    if "line" not in given:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise ConfigError(f"{said} ended its process ({how}); return a value or raise an error")
    return f"algorithm.{name} {function}: {given['line']}"


def main(name: str, algorithm: str) -> None:
    """In the process of its own: try one function, and write what came of it where the parent reads
    it. What the function prints goes to stderr."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # Ctrl-C reaches this process too, which has nothing to say
    try:
        given = {"line": _tried(AlgorithmConfig.model_validate_json(algorithm), name)}
    except FunctionError as error:
        given = {"error": str(error)}
    json.dump(given, answer)
    answer.flush()
    sys.stdout.flush()
    os._exit(0)  # threads of the function may still run


def _tried(algorithm: AlgorithmConfig, name: str) -> str:
    """What one function gave. Raises FunctionError."""
    if name == "loss":
        from asyncrl.algorithms.objective import own_metrics

        return (
            "a loss and a gradient for each of 12 tokens; metrics:"
            f" {', '.join(own_metrics(algorithm.loss)) or 'none'}"
        )
    if name == "advantage":
        given = [
            own_advantages(algorithm.advantage, np.array(rewards)).tolist() for rewards in REWARDS
        ]
        return f"{REWARDS[0]} gives {[round(value, 4) for value in given[0]]}"
    assert algorithm.group_filter is not None
    verdicts = [
        own_verdict(
            algorithm.group_filter,
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
    """The lines under a heading; nothing without any."""
    return (
        "\n".join(["# own functions, on made-up numbers", *(f"  {line}" for line in lines)])
        if lines
        else ""
    )
