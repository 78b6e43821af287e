"""A run from Python in a running event loop, as in Jupyter: first a refused config, then the
corrected one under the same name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_variables import PYTHON_PATH, ROOT, run_variables

SCRIPT = """
import asyncio, sys
import asyncrl
from asyncrl.config import ConfigError

async def cell():
    try:
        await asyncrl.train(sys.argv[1], ["--learner.max_tokens_per_gpu", "3"])
    except ConfigError as error:
        print("REFUSED", error)
    beats = 0
    async def beat():
        nonlocal beats
        while True:
            await asyncio.sleep(0.1)
            beats += 1
    beating = asyncio.ensure_future(beat())
    run = await asyncrl.train(sys.argv[1], ["--max_steps", "2"])
    beating.cancel()
    print("STEPS", len(run.records("step")), "BEATS", beats > 20)

asyncio.run(cell())
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_is_awaited_where_an_event_loop_runs(
    task: dict[str, Any], tmp_path: Path, engine_starts: list[str]
) -> None:
    engine_starts.append("a run from Python")
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({**task, "name": "cell", "runs_root": str(tmp_path / "runs")}))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, config],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
        env=run_variables() | {"PYTHONPATH": PYTHON_PATH},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "REFUSED " in done.stdout and "is above learner.max_tokens_per_gpu = 3" in done.stdout
    assert "STEPS 2 BEATS True" in done.stdout
