"""A real model on real tasks: SmolLM2-135M-Instruct, from the package index, on two CPU cores.

    python -m jobs.smollm [RUN] [--section.field value …]

RUN is `smollm` (RL on instructions that a program can check), `lora`, `sft`, `dpo`, `tools` or
`human_eval`: the YAML file of that name. The inputs that it needs are made first, and so is the run
that it begins with.
"""

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from asyncrl.config import ConfigError, load_config, load_offline
from asyncrl.run import Summary, command_name, run_training
from asyncrl.rundir import open_run
from jobs.runs import finish, module
from jobs.smollm.inputs import inputs_of, make_inputs

HERE = Path(__file__).parent
CHECKED = ("model", "checkers", "data")
NEEDED: Mapping[str, tuple[str, ...]] = {
    "smollm": CHECKED,
    "lora": CHECKED,
    "sft": ("model", "data"),
    "dpo": CHECKED,
    "tools": ("model", "data"),
    "human_eval": ("model", "human_eval"),
}
"""Run → the inputs that it needs."""
BEFORE = {"dpo": ("train", "samples"), "tools": ("sft", "sft")}
"""Run → the command and the file of the run that makes its data or its model."""


def main(arguments: list[str]) -> int:
    """Run the job and return its exit code."""
    named = bool(arguments) and not arguments[0].startswith("-")
    name, overrides = (arguments[0], arguments[1:]) if named else ("smollm", arguments)
    try:
        if name not in NEEDED:
            raise ConfigError(f"{name!r} is no run; choose from {', '.join(NEEDED)}")
        return _run(name, overrides)
    except ConfigError as error:
        print(f"smollm: {error}", file=sys.stderr)
        return 2


def _run(name: str, overrides: list[str]) -> int:
    config = HERE / f"{name}.yaml"
    offline = name in ("sft", "dpo")
    loaded = load_offline(config, overrides) if offline else load_config(config, overrides)
    if name == "tools" and find_spec("openai") is None:
        raise ConfigError("the agent of tools.yaml uses the package openai; install openai==3.54.0")
    runs = loaded.run_directory.parent
    make_inputs(inputs_of(runs), NEEDED[name])
    if name in BEFORE:
        command, before = BEFORE[name]
        finish(
            command, HERE / f"{before}.yaml", runs / f"smollm-{before}", ["--runs_root", str(runs)]
        )
    if offline:
        module("asyncrl.cli", name, str(config), *overrides)
        return 0
    typed = [command_name(), "train", os.path.relpath(config), *overrides]
    return run_training(loaded, typed, after=lambda _, summary: print_accuracies(summary))


def print_accuracies(summary: Summary) -> None:
    """Print each evaluated figure before and after training, or the only one."""
    evaluations = open_run(summary.directory).records("evaluation")
    first, last = evaluations[0], evaluations[-1]
    for metric, before in first.items():
        shown = metric.startswith("eval/") and ("accuracy" in metric or "pass" in metric)
        if shown and isinstance(before, float) and metric in last:
            after = f" → {last[metric]:.1%}" if last is not first else ""
            print(f"  {metric.removeprefix('eval/'):<40}{before:7.1%}{after}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
