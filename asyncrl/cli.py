"""The `asyncrl` command. Heavy imports come after the arguments are understood."""

from __future__ import annotations

import argparse
import os
import sys

from asyncrl.config import ConfigError, command_line, load_config
from asyncrl.redact import shown

__all__ = ["main"]

TRAIN, PLAN = "train a model as a YAML file says", "check a config and show what it asks for; allocates nothing"


def main(arguments: list[str] | None = None) -> None:
    """Run one subcommand and exit: 0 done, 1 failed, 2 a setting cannot be used, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="asyncrl", description="Asynchronous reinforcement-learning post-training for language models, on Ray.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{train,plan}")
    for name, text in (("train", TRAIN), ("plan", PLAN)):
        command = commands.add_parser(name, help=text, description=text, add_help=False, allow_abbrev=False)
        command.add_argument("config", nargs="?", metavar="CONFIG")
        command.add_argument("-h", "--help", action="store_true")
    known, overrides = parser.parse_known_args(arguments)
    if known.help or known.config is None:
        if not known.help:
            print("asyncrl: CONFIG is missing: give the path of a YAML file, such as jobs/quickstart.yaml", file=sys.stderr)
            sys.exit(2)
        command_line(["--help"], {}, exit_on_error=True)
    sys.exit(run(known.command, known.config, overrides))


def run(command: str, path: str, overrides: list[str]) -> int:
    """The exit code of one subcommand."""
    # As `python -m` does, and as Ray does for its workers: reward functions may lie in the current directory.
    sys.path.insert(0, os.getcwd())
    try:
        config = load_config(path, overrides)
        if command == "plan":
            from asyncrl.plan import make_plan

            print(make_plan(config).text(), flush=True)
            # It imports DeepSpeed, which takes seconds: the rest can be read meanwhile.
            from asyncrl.learning.estimate import memory_text

            print(f"\n{memory_text(config)}")
            return 0
        from asyncrl.run import command_name, train

        return train(config, resume_command=[command_name(), "train", path, *overrides])
    except ConfigError as error:
        print(f"asyncrl: {shown(str(error))}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    main()
