"""Compares two ways to take a new version: loading an adapter (LoRA), and an update of all weights.

    python -m benchmarks.adapter_updates [--rounds 9] [--layers 8] [--rank 16]

Both engines have the same model and the same completions in flight, and take their versions while
these continue. An update of all weights uses `in_flight: keep`, which pauses the shortest time.
The gap is the longest time between two steps of the engine. `no version` measures it over the same
time without a version.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncrl.generation import Engine

KV_BYTES = 256 << 20
IN_FLIGHT, TOKENS = 16, 220
QUIET_S = 0.5
"""Seconds before and after each version in which nothing happens."""


def main(arguments: list[str]) -> int:
    """Measure both engines, one after the other, and print the medians and their ratio. The exit
    code is 0 if an adapter's gap is the shorter one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapter_updates")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--only", nargs=2, metavar=("KIND", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.only:
        kind, model = options.only
        measured = asyncio.run(measure(kind, Path(model), options.rounds, options.rank))
        print(json.dumps(measured))
        return 0
    from asyncrl.generation import engine_environment

    found = {}
    with tempfile.TemporaryDirectory(prefix="asyncrl_bench_") as folder:
        print(f"model: {save_model(Path(folder), options.layers) / 1e6:.1f} M parameters, float32")
        for kind in ("adapter", "all weights"):
            command = [sys.executable, "-m", __spec__.name, *arguments, "--only", kind, folder]
            environment = os.environ | engine_environment("cpu")
            # The plugin asyncrl_outputs would hold tokens for longer than many gaps.
            environment["VLLM_PLUGINS"] = "asyncrl_weights,asyncrl_seeds,asyncrl_adapters"
            output = subprocess.run(
                command, check=True, env=environment, stdout=subprocess.PIPE, text=True
            ).stdout
            found[kind] = json.loads(output.splitlines()[-1])
            print(_line(kind, found[kind]), flush=True)
    adapter, whole = (statistics.median(found[kind]["gap_s"]) for kind in found)
    lowest = [min(found[kind]["gap_s"]) for kind in found]
    print(
        f"longest gap, adapter / all weights: {adapter / whole:.3f} of the medians,"
        f" {lowest[0] / lowest[1]:.3f} of the lowest, which a busy machine disturbs least"
    )
    return 0 if adapter < whole else 1


def _line(kind: str, found: dict[str, list[float]]) -> str:
    gap, quiet, apply = (
        1000 * statistics.median(found[name]) for name in ("gap_s", "quiet_s", "apply_s")
    )
    return (
        f"{kind:<12}{found['bytes'][0] / (1 << 20):8.1f} MiB  longest gap {gap:6.1f} ms"
        f" (no version {quiet:.1f} ms), apply {apply:.1f} ms, median of {len(found['gap_s'])}"
    )


def save_model(directory: Path, layers: int) -> int:
    """Write a random model, large enough that an update takes time. Returns its parameters."""
    from transformers import AutoConfig, Qwen3ForCausalLM

    from jobs.quickstart.task import make_model

    make_model(directory, seed=0)
    config = AutoConfig.from_pretrained(directory)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 512, 1536, layers
    config.layer_types = ["full_attention"] * layers
    config.num_attention_heads = config.num_key_value_heads = 8
    config.head_dim = 64
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    return model.num_parameters()


async def measure(kind: str, model: Path, rounds: int, rank: int) -> dict[str, list[float]]:
    """Seconds of each round, by name."""
    from asyncrl.config import GeneratorConfig
    from asyncrl.generation import GeneratorApp, start_engine
    from benchmarks.staged_versions import adapter_settings, staged_adapter, staged_weights

    adapter = kind == "adapter"
    app = GeneratorApp(
        model=str(model),
        generator=GeneratorConfig(
            in_flight="keep", kv_cache_memory_bytes=KV_BYTES, max_num_seqs=IN_FLIGHT
        ),
        **({"max_lora_rank": rank} if adapter else {}),
    )
    engine = await start_engine(app)
    found: dict[str, list[float]] = {"gap_s": [], "quiet_s": [], "apply_s": [], "bytes": []}
    place = Path(tempfile.mkdtemp(prefix="staged_", dir=model)) / "version"
    staged = (
        staged_adapter(model, app.dtype, place, rank)
        if adapter
        else staged_weights(model, app.dtype, place)
    )
    found["bytes"].append(float(staged.nbytes))
    load = [asyncio.ensure_future(_keep_busy(engine, seed)) for seed in range(IN_FLIGHT)]
    for version in range(1, rounds + 2):
        await asyncio.sleep(QUIET_S)
        engine.stats.take_longest_gap()
        began = time.monotonic()
        await asyncio.sleep(2 * QUIET_S)
        quiet = engine.stats.take_longest_gap()
        if adapter:
            timings = await engine.updates.apply_adapter(staged, adapter_settings(rank), version)
        else:
            timings = await engine.updates.apply(staged.update_info(), version)
        await asyncio.sleep(max(0.0, 4 * QUIET_S - (time.monotonic() - began)))
        if version > 1:  # the first load of each kind warms up
            found["gap_s"].append(engine.stats.take_longest_gap())
            found["quiet_s"].append(quiet)
            found["apply_s"].append(timings["apply_s"])
    for task in load:
        task.cancel()
    await asyncio.gather(*load, return_exceptions=True)
    await engine.stop()
    return found


async def _keep_busy(engine: "Engine", seed: int) -> None:
    """One completion after the other."""
    from benchmarks.staged_versions import any_request

    while True:
        await engine.requests.generate(any_request(seed, TOKENS - 11 * seed % 40))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
