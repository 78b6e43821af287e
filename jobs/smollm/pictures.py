"""Draws the pictures of the docs from finished runs.

    python -m jobs.smollm.pictures RUNS_ROOT FOLDER

Each picture is an SVG for light and one for dark pages.
"""

import sys
from pathlib import Path

from asyncrl.charts import Chart, compared, picture
from asyncrl.rundir import RunNotFoundError, open_run
from jobs.smollm.seeds import RUNS

FIRST, TOOLS = "smollm-seed-0", "smollm-tools"
TIMELINE = "look_into_a_run_timeline"


def main(runs_root: str, folder: str) -> None:
    """Write the pictures of the runs that are there."""
    root = Path(runs_root)
    found = {name: root / f"smollm-{name}" for name in RUNS}
    runs = {name: open_run(path).metrics for name, path in found.items() if (path / "hf").exists()}
    first = open_run(root / FIRST)
    drawn: dict[str, Chart] = {
        "real_model_accuracy": compared(
            "Held-out prompts of which every instruction is followed",
            runs,
            "eval/greedy_accuracy",
            "evaluation",
        ),
        "real_model_parts": first.charts.reward_parts(),
        "real_model_waits": first.charts.waits(),
        "real_model_staleness": first.charts.staleness(),
    }
    if (root / TOOLS / "hf").exists():
        drawn[TIMELINE] = open_run(root / TOOLS).charts.timeline(step=4)
    for name, chart in drawn.items():
        for suffix, dark in (("", False), ("_dark", True)):
            path = Path(folder) / f"{name}{suffix}.svg"
            path.write_bytes(picture(chart, "svg", dark))
            print(path)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m jobs.smollm.pictures RUNS_ROOT FOLDER")
    try:
        main(*sys.argv[1:])
    except RunNotFoundError as error:
        sys.exit(f"pictures: {error}")
