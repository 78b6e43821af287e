"""Compares the start of a generator's engine with a naive one. Whole processes take turns, timed
from their start to the first token.

    python -m benchmarks.startup [--rounds 3]

- naive: `AsyncLLM.from_engine_args` with the same model, dtype, `enforce_eager` and KV size, and
  otherwise vLLM's defaults.
- asyncrl: `asyncrl.generation.engine.engine.start_engine` in the environment of a replica.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KV_BYTES = 64 << 20
BAR = 0.65
PROMPT = [5, 6, 7]


def main(arguments: list[str]) -> int:
    """Start both in turns, and print the medians and their ratio. The exit code is 0 if the bar is
    met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", nargs=3, metavar=("NAME", "MODEL", "FIRST"), help=argparse.SUPPRESS
    )
    options = parser.parse_args(arguments)
    if options.only:
        name, model, first = options.only
        asyncio.run({"naive": naive, "asyncrl": ours}[name](model, Path(first)))
        return 0
    from asyncrl.generation import engine_environment
    from jobs.quickstart.task import make_model

    seconds: dict[str, list[float]] = {"naive": [], "asyncrl": []}
    with tempfile.TemporaryDirectory(prefix="asyncrl_bench_") as folder:
        make_model(Path(folder), seed=0)
        for turn in range(options.rounds):
            for name in seconds:
                environment, first = (
                    os.environ | (engine_environment("cpu") if name == "asyncrl" else {}),
                    Path(folder) / f"first_{name}_{turn}",
                )
                command = [sys.executable, "-m", __spec__.name, "--only", name, folder, str(first)]
                started = time.monotonic()
                subprocess.run(
                    command,
                    check=True,
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                seconds[name].append(float(first.read_text()) - started)
                print(f"round {turn + 1}  {name:<8}{seconds[name][-1]:7.1f} s", flush=True)
    naive_s, ours_s = statistics.median(seconds["naive"]), statistics.median(seconds["asyncrl"])
    print(
        f"medians: naive {naive_s:.1f} s, asyncrl {ours_s:.1f} s = {ours_s / naive_s:.2f} of naive"
        f" (bar {BAR:g})"
    )
    return 0 if ours_s <= BAR * naive_s else 1


async def naive(model: str, first: Path) -> None:
    """Start vLLM as in its documentation, and write the time of the first token (monotonic clock).
    The shutdown does not count."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=KV_BYTES
        )
    )
    async for _ in llm.generate(
        {"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=1), "first"
    ):
        break
    first.write_text(str(time.monotonic()))
    llm.shutdown()


async def ours(model: str, first: Path) -> None:
    """Start the engine of a replica, and write the time of the first token, which ends its
    start."""
    from asyncrl.config import GeneratorConfig
    from asyncrl.generation import GeneratorApp, start_engine

    engine = await start_engine(
        GeneratorApp(model=model, generator=GeneratorConfig(kv_cache_memory_bytes=KV_BYTES))
    )
    first.write_text(str(time.monotonic()))
    await engine.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
