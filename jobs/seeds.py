"""Runs of one job that differ in a few settings."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl.config import Config, ConfigError, load_config
from asyncrl.rundir import Run, open_run


def finished(job: Sequence[str], config: Path, arguments: Sequence[str]) -> Config:
    """Run a job, or continue its run, unless it is finished. Returns its config.

    Args:
        job: what follows `python -m`.
        config: the YAML file that the job reads.
        arguments: settings, the run's name among them.

    Raises:
        ConfigError: the run is there with other settings.
        subprocess.CalledProcessError: the job failed.
    """
    command = [*arguments, "--resume", "auto"]
    wanted = load_config(config, command)
    directory = wanted.run_directory
    there = (directory / "config.yaml").exists()
    if there and _settings(open_run(directory).config) != _settings(wanted):
        raise ConfigError(
            f"{directory} was made with other settings; remove it, or set another runs_root"
        )
    if not (directory / "hf").exists():
        subprocess.run([sys.executable, "-m", *job, *command], check=True)
    return wanted


def evaluated(run: Run, metric: str) -> tuple[float, float]:
    """A figure of the first and of the last evaluation."""
    evaluations = run.records("evaluation")
    return evaluations[0][metric], evaluations[-1][metric]


def trained_staleness(run: Run) -> list[int]:
    """The staleness of each trained group."""
    outcomes = run.outcomes().to_pylist()
    return [one["staleness"] for one in outcomes if one["outcome"] == "trained"]


def _settings(config: Config) -> Mapping[str, object]:
    return config.model_dump(exclude={"resume"})
