"""Measures the way of a version from the learner into an engine, in plain copies of its bytes.

    python -m benchmarks.weights [--layers 12] [--rounds 7]

- publish: a rank gathers its parameters into buckets, computes their checksums, and puts them into
  the object store.
- fetch: a replica copies the buckets into shared memory, and checks them.
- pause: an engine without requests pauses, loads the version and resumes. An empty update pauses
  and resumes only.

The copy is of the same bytes, in the same process, into memory that was touched before. Medians.

Ray frees objects that nobody refers to once a second. A version that is published sooner gets new
memory, which takes several times as long to write. The benchmark waits between versions, because
steps of a model of this size take seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.adapter_updates import save_model

MOST_PUBLISH_AND_FETCH, MOST_PAUSE = 10.0, 4.0
"""Copies."""

BETWEEN_VERSIONS_S = 2.5
"""Seconds between two versions, so that Ray has freed the one before the last."""


def main(arguments: list[str]) -> int:
    """Measure and print. The exit code is 0 if both bars are met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights")
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs=2, metavar=("PART", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.only:
        part, model = options.only
        print(json.dumps({"publish": publish, "pause": pause}[part](model, options.rounds)))
        return 0
    from asyncrl.generation import engine_environment

    with tempfile.TemporaryDirectory(prefix="asyncrl_bench_") as folder:
        parameters = save_model(Path(folder), options.layers)
        print(f"{parameters / 1e6:.1f} M parameters, {4 * parameters / 1e6:.0f} MB in float32")
        way = _part("publish", folder, arguments, {"DS_ACCELERATOR": "cpu"})
        stop = _part("pause", folder, arguments, dict(engine_environment("cpu")))
    both = (way["gather_s"] + way["fetch_s"]) / way["copy_s"]
    more = (stop["pause_s"] - stop["empty_s"]) / stop["copy_s"]
    print(
        f"a copy takes {1e3 * way['copy_s']:.1f} ms, a checksum"
        f" {way['checksum_s'] / way['copy_s']:.2f} copies\n"
        f"publish {way['gather_s'] / way['copy_s']:.1f} copies, fetch"
        f" {way['fetch_s'] / way['copy_s']:.1f}: together {both:.1f} (at most"
        f" {MOST_PUBLISH_AND_FETCH:g})\n"
        f"pause {1e3 * stop['pause_s']:.1f} ms: an empty update's {1e3 * stop['empty_s']:.1f} ms"
        f" and {more:.1f} copies (at most {MOST_PAUSE:g})"
    )
    return 0 if both <= MOST_PUBLISH_AND_FETCH and more <= MOST_PAUSE else 1


def _part(name: str, folder: str, arguments: list[str], environment: dict[str, str]):
    command = [sys.executable, "-m", __spec__.name, *arguments, "--only", name, folder]
    made = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    if made.returncode:
        sys.exit(f"{name} failed:\n{made.stderr[-3000:]}")
    return json.loads(made.stdout.splitlines()[-1])


def seconds(work: Callable[[], object], rounds: int) -> float:
    """The median of some rounds, after one that is not counted."""
    found = []
    for _ in range(rounds + 1):
        began = time.monotonic()
        work()
        found.append(time.monotonic() - began)
    return statistics.median(found[1:])


def copy_seconds(nbytes: int, rounds: int) -> float:
    """Seconds of a plain copy."""
    import numpy as np

    source = np.full(nbytes, 7, np.uint8)
    target = np.zeros(nbytes, np.uint8)
    return seconds(lambda: np.copyto(target, source), rounds)


def publish(model: str, rounds: int) -> dict[str, float]:
    """Seconds of gathering, of fetching, of a checksum and of a copy."""
    import numpy as np

    from asyncrl.config import Config
    from asyncrl.learning import Meeting, start_rank
    from asyncrl.preflight import learner_spec
    from asyncrl.run import shut_down_ray, start_local_ray
    from asyncrl.weights import bucket_checksum, expected_tensors, fetch_version

    start_local_ray(2, configure_logging=False)
    tree = {
        "name": "weights",
        "max_steps": 1,
        "model": {"path": model},
        "data": {"train": "none", "max_prompt_length": 8},
        "rollout": {"max_completion_length": 32},
        "reward": {"functions": {"none": {"function": "none:none"}}},
    }
    spec = learner_spec(Config.model_validate(tree))
    rank, _ = start_rank(0, spec, "bench", 0, Meeting.at("127.0.0.1"), "127.0.0.1")
    expected = expected_tensors(model, "float32")
    gathers, fetches = [], []
    for version in range(rounds + 1):
        began = time.monotonic()
        manifest = rank.gather(version)
        gathers.append(time.monotonic() - began)
        staged = fetch_version(manifest, expected, 100.0)
        fetches.append(staged.fetch_s)
        staged.remove()
        time.sleep(BETWEEN_VERSIONS_S)
    nbytes = sum(manifest.sizes)
    content = np.full(nbytes, 7, np.uint8)
    found = {
        "gather_s": statistics.median(gathers[1:]),
        "fetch_s": statistics.median(fetches[1:]),
        "checksum_s": seconds(lambda: bucket_checksum(content.data), rounds),
        "copy_s": copy_seconds(nbytes, rounds),
    }
    shut_down_ray()
    return found


def pause(model: str, rounds: int) -> dict[str, float]:
    """Seconds for which an engine pauses, for a version and for none, and of a copy."""
    return asyncio.run(_pause(Path(model), rounds))


async def _pause(model: Path, rounds: int) -> dict[str, float]:
    from asyncrl.config import GeneratorConfig
    from asyncrl.generation import GeneratorApp, start_engine
    from benchmarks.staged_versions import staged_weights

    engine = await start_engine(
        GeneratorApp(model=str(model), generator=GeneratorConfig(kv_cache_memory_bytes=64 << 20))
    )
    place = Path(tempfile.mkdtemp(prefix="staged_", dir=model)) / "version"
    staged = staged_weights(model, "float32", place)
    empty, whole = [], []
    for version in range(1, rounds + 2):
        empty.append((await engine.updates.pause_empty())["pause_s"])
        whole.append((await engine.updates.apply(staged.update_info(), version))["pause_s"])
    await engine.stop()
    return {
        "empty_s": statistics.median(empty[1:]),
        "pause_s": statistics.median(whole[1:]),
        "copy_s": copy_seconds(staged.nbytes, rounds),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
