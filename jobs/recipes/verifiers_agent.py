"""Plays one task of a verifiers taskset against OPENAI_BASE_URL, and prints its reward as JSON.

It runs with the interpreter of an environment that has verifiers, and needs nothing of asyncrl:

    /opt/verifiers/bin/python jobs/recipes/verifiers_agent.py glossary 3

The last line that it prints has `reward`, and each reward and metric of the task by its name. If
the task cannot be played or scored, the last line of its standard error says why, and the exit code
is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

TaskT = TypeVar("TaskT")
HARNESS = "null"
"""The program of an agent that names none: a chat with the task's tools. verifiers' own choice is
`bash`, which lets the model run any command on this machine."""


def share(variables: MutableMapping[str, str]) -> str:
    """Let uv be found beside this interpreter. Returns the folder for verifiers' scripts.

    uv keeps an environment for each path of a script, and a session has a home of its own. So the
    scripts are in a cache, which asyncrl lets all sessions share."""
    beside = os.path.dirname(sys.executable)
    variables["PATH"] = os.pathsep.join((beside, variables.get("PATH", os.defpath)))
    cache = variables.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "verifiers", "scripts")


def environment_settings(
    taskset: str, given: Mapping[str, Any], agents: Mapping[str, str | None]
) -> dict[str, Any]:
    """The settings of an environment, in verifiers' own form.

    Args:
        given: settings of the user, which win.
        agents: the environment's agents, and the harness of each that names one.
    """
    settings: dict[str, Any] = {**given, "taskset": {**given.get("taskset", {}), "id": taskset}}
    for name, harness in agents.items():
        usual = {"runtime": {"type": "subprocess"}, "harness": {"id": harness or HARNESS}}
        settings[name] = {**usual, **given.get(name, {})}
    return settings


def task_at(tasks: Iterable[TaskT], index: int) -> TaskT:
    """The task with this number. Raises ValueError if there are fewer."""
    if index < 0:
        raise ValueError(f"there is no task {index}; tasks are counted from 0")
    known = 0
    for place, task in enumerate(tasks):
        if place == index:
            return task
        known = place + 1
    raise ValueError(f"there is no task {index}; the taskset has {known}, counted from 0")


def chosen(names: Sequence[str], agent: str | None) -> int:
    """Which trace has the session's reward.

    Args:
        names: the agent of each trace.
        agent: the agent that is asked for. None: the only one.

    Raises:
        ValueError: it is not exactly one.
    """
    places = [place for place, name in enumerate(names) if agent in (None, name)]
    if len(places) == 1:
        return places[0]
    if agent is not None:
        raise ValueError(f"--agent {agent} has {len(places)} of the traces of {', '.join(names)}")
    raise ValueError(
        f"{', '.join(names)} have traces, and a session has one reward; choose its agent with"
        " --agent, and give the others a model of their own with --env"
    )


def last_line(
    reward: float, rewards: Mapping[str, float | None], metrics: Mapping[str, float | None]
) -> str:
    """What is printed last: the weighted reward, and the parts that have a value."""
    parts = {**metrics, **rewards, "reward": reward}
    return json.dumps({name: value for name, value in parts.items() if value is not None})


async def play(taskset: str, index: int, given: Mapping[str, Any], agent: str | None) -> str:
    """Play one task to its end. Returns the last line.

    Raises:
        RuntimeError: an agent, the environment or its scoring failed.
        ValueError: the settings do not fit the taskset.
    """
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime
    from verifiers.v1.utils import loaders

    SubprocessRuntime.scripts_dir = share(os.environ)
    kind = loaders.env_config_type(taskset, str(given.get("id", "")))
    own = loaders.default_harness_id(taskset)
    agents = {
        name: field.harness.id if field.harness else own if own == taskset else None
        for name, field in agent_config_fields(kind()).items()
    }
    settings = environment_settings(taskset, given, agents)
    environment = loaders.load_environment(loaders.resolve_env_config(settings))
    task = task_at(environment.taskset, index)
    client = vf.EvalClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
    )
    async with environment.serving():
        (slot,) = environment.slots(task)
        played = await environment.run_slot(slot, vf.ModelContext("policy", client))
    if not played.ok:
        errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
        raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}" if errors else "not finished")
    trace = played.traces[chosen([one.agent.name for one in played.traces], agent)]
    scores = {name: found and found.score for name, found in trace.rewards.items()}
    return last_line(trace.reward, scores, trace.metrics)


def main() -> None:
    """Play the task that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("taskset", help="its id, such as glossary")
    parser.add_argument("index", type=int, help="the number of the task, from 0")
    parser.add_argument("--env", type=json.loads, default={}, help="verifiers' settings, as JSON")
    parser.add_argument("--agent", help="the agent whose reward counts, if there are several")
    arguments = parser.parse_args()
    try:
        line = asyncio.run(play(arguments.taskset, arguments.index, arguments.env, arguments.agent))
    except Exception as error:
        message = " ".join(str(error).split())
        sys.exit(f"{arguments.taskset} {arguments.index}: {type(error).__name__}: {message}")
    print(line)


if __name__ == "__main__":
    main()
