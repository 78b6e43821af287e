"""Accuracy of a model directory on a config's held-out prompts, in a fresh vLLM engine.

    python -m jobs.accuracy CONFIG MODEL_DIRECTORY [--temperature T] [--section.field value …]

The config is one of a run with generators: it names the prompts, the limits and the reward. Prints
one number between 0 and 1.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from asyncrl.config import ConfigError, load_config
from asyncrl.data import read_prompts
from asyncrl.preflight import data_spec
from jobs.evaluate import accuracy, answers, output_in_file


def main() -> int:
    """Print the accuracy and return the exit code."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--temperature", type=float, default=0.0)
    known, overrides = parser.parse_known_args()
    try:
        config = load_config(known.config, [*overrides, "--model.path", str(known.model)])
        if config.eval.data is None:
            raise ConfigError(f"{known.config} has no eval.data; set it")
        if not known.model.is_dir():
            raise ConfigError(f"{known.model} is not a directory; name a model, such as runs/x/hf")
    except ConfigError as error:
        print(f"accuracy: {error}", file=sys.stderr)
        return 2
    prompts = read_prompts(config.eval.data, data_spec(config), config.eval.max_prompts)
    with tempfile.TemporaryDirectory() as folder, output_in_file(Path(folder) / "engine.log"):
        os.environ["VLLM_RPC_BASE_PATH"] = folder  # vLLM leaves its sockets behind
        found = answers(config, known.model, prompts, known.temperature)
    print(accuracy(config, prompts, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
