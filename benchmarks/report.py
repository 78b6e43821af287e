"""What the page of a run costs: to write, and to open and filter in a browser.

    python -m benchmarks.report runs/quickstart [--groups 200 2000 20000]

The groups are the run's own; if it has fewer, they are repeated under other ordinals. Each page is
written by a process of its own. Playwright with Chromium measures the browser (`pip install
playwright`); without them, those columns are dashes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import asyncrl
from asyncrl.rundir import Run

WRITE = """
import json, resource, sys, time
import asyncrl
from asyncrl.rundir.reader import Run
from asyncrl.page.report import write_report
from pathlib import Path
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began, used = time.perf_counter(), time.process_time()
size = write_report(asyncrl.open_run(sys.argv[1]), Path(sys.argv[1], "report.html"))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([time.perf_counter() - began, size, (after - before) / 1024]))
"""
CHROMIUM = next(
    (path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None
)
COLUMNS = ("groups", "seconds to write", "MB of memory", "MB", "ms to open", "ms to filter")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", help="directory of a run with generators")
    parser.add_argument("--groups", type=int, nargs="+", default=[200, 2_000, 20_000])
    options = parser.parse_args()
    run = asyncrl.open_run(options.run)
    print("  ".join(f"{name:>16}" for name in COLUMNS))
    with tempfile.TemporaryDirectory(prefix="asyncrl_bench_") as folder:
        for count in options.groups:
            directory = _with_groups(run, count, Path(folder) / str(count))
            done = subprocess.run(
                [sys.executable, "-c", WRITE, str(directory)],
                check=True,
                capture_output=True,
                text=True,
            )
            seconds, size, memory = json.loads(done.stdout)
            opened, filtered = _in_browser(directory / "report.html")
            values = (
                f"{count:,}",
                f"{seconds:.1f}",
                f"{memory:.0f}",
                f"{size / 1e6:.2f}",
                opened,
                filtered,
            )
            print("  ".join(f"{value:>16}" for value in values), flush=True)


def _with_groups(run: Run, count: int, directory: Path) -> Path:
    """A run directory with this many groups of the run."""
    groups, outcomes, trained = run.groups(), run.outcomes(), run.trained()
    if not len(groups):
        raise SystemExit(f"benchmarks.report: {run.directory} has no groups yet; name another run")
    directory.mkdir()
    for name in ("config.yaml", "run.json", "metrics.jsonl"):
        shutil.copy(run.directory / name, directory / name)
    for name, table in (("groups", groups), ("outcomes", outcomes), ("trained", trained)):
        (directory / name).mkdir()
        pq.write_table(
            _repeated(table, groups, count), directory / name / "attempt_0000-00000000.parquet"
        )
    return directory


def _repeated(table: pa.Table, groups: pa.Table, count: int) -> pa.Table:
    """The rows of the first `count` groups, which are repeated if there are fewer. The ordinals are
    new: a group has several rows in some tables."""
    rows: dict[tuple[int, int], list[int]] = {}
    keys = zip(table["attempt"].to_pylist(), table["ordinal"].to_pylist(), strict=True)
    for index, key in enumerate(keys):
        rows.setdefault(key, []).append(index)
    known = [*zip(groups["attempt"].to_pylist(), groups["ordinal"].to_pylist(), strict=True)]
    taken, ordinals = list[int](), list[int]()
    for number in range(count):
        mine = rows.get(known[number % len(known)], [])
        taken += mine
        ordinals += [number] * len(mine)
    found = table.take(pa.array(taken, pa.int64()))
    for name, values in (("ordinal", ordinals), ("attempt", [0] * len(ordinals))):
        at = found.schema.get_field_index(name)
        found = found.set_column(at, name, pa.array(values, found.schema.field(name).type))
    return found


def _in_browser(page: Path) -> tuple[str, str]:
    """Milliseconds until the page shows its groups, and until a filter for a text has its rows."""
    if CHROMIUM is None or find_spec("playwright") is None:
        return "–", "–"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        tab = browser.new_page(viewport={"width": 1200, "height": 800})
        began = time.perf_counter()
        tab.goto(f"{page.as_uri()}#/groups")
        tab.wait_for_selector(".list .row")
        opened = time.perf_counter() - began
        filtered = tab.evaluate(
            """async () => {
              const box = document.querySelector('input[type=search]');
              const began = performance.now();
              box.value = '7';
              box.dispatchEvent(new Event('input', { bubbles: true }));
              await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
              return performance.now() - began;
            }"""
        )
        browser.close()
    return f"{1000 * opened:.0f}", f"{filtered:.0f}"


if __name__ == "__main__":
    main()
