"""Compares the throughput of generation through Serve with that of a bare vLLM engine.

    python -m benchmarks.serving [--turns 5] [--layers 0] [--groups 8] [--tokens 240]

- plain: vLLM's own engine in one process, without seeds and log-probs.
- bare: the same, with a seed for each group and the log-prob of each token.
- blocks: the same, with the seeds of tokens drawn in blocks (`asyncrl.generation.seeds`).
- engine: asyncrl's engine without Serve. vLLM's front end and its engine are two processes.
- serve: a Serve replica with such an engine. The requests come from another process.

Every side generates the same groups of 8 completions, all of the same length, with one torch
thread. All are started first; then they take turns. A turn is one batch of all groups. Ratios
compare the turns of one round, and CPU seconds are those of the side's processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

SIDES = ("plain", "bare", "blocks", "engine", "serve")
BARE = ("plain", "bare", "blocks")
"""Sides that are vLLM in one process."""
SAMPLES, WARM_UP_TURNS, BAR = 8, 1, 0.92


def main(arguments: list[str]) -> int:
    """Measure and print. The exit code is 0 if the bar is met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=240)
    parser.add_argument("--layers", type=int, default=0, help="0: the model of the demo")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.side:
        serve_turns(options)
        return 0
    with tempfile.TemporaryDirectory(prefix="asyncrl_bench_") as folder:
        _make_model(Path(folder), options.layers)
        rounds = _rounds(arguments, Path(folder), options.turns)
    tokens = options.groups * SAMPLES * options.tokens
    for side in SIDES:
        if made := {one[side]["tokens"] for one in rounds} - {tokens}:
            raise SystemExit(f"{side} made {made} tokens in a turn instead of {tokens}")
    print(f"{options.groups} groups of {SAMPLES} completions of {options.tokens} tokens")
    print("side     tokens/s   of bare, lowest and highest      CPU s a turn")
    for side in SIDES:
        ratios = sorted(one["bare"]["seconds"] / one[side]["seconds"] for one in rounds)
        seconds = statistics.median(one[side]["seconds"] for one in rounds)
        cpu = statistics.median(one[side]["cpu_s"] for one in rounds)
        print(
            f"{side:<8} {tokens / seconds:8.0f}   {statistics.median(ratios):.2f} ({ratios[0]:.2f}"
            f" to {ratios[-1]:.2f}){cpu:24.2f}"
        )
    met = statistics.median(one["bare"]["seconds"] / one["serve"]["seconds"] for one in rounds)
    print(f"serve of bare: {met:.2f} (at least {BAR:g})")
    return 0 if met >= BAR else 1


def _make_model(folder: Path, layers: int) -> None:
    from benchmarks.adapter_updates import save_model
    from jobs.quickstart.task import make_model

    if layers:
        save_model(folder, layers)
    else:
        make_model(folder, seed=0)


def _rounds(arguments: list[str], model: Path, turns: int) -> list[dict[str, dict[str, float]]]:
    """Side → its figures, of each round after the first."""
    logs = {side: model / f"{side}.log" for side in SIDES}
    processes = {side: _start(side, arguments, model, logs[side]) for side in SIDES}
    try:
        for side in SIDES:
            _answer(processes[side], logs[side])  # it is ready
        found = [
            {side: _turn(processes[side], logs[side]) for side in SIDES}
            for _ in range(WARM_UP_TURNS + turns)
        ]
    finally:
        for process in processes.values():
            assert process.stdin is not None
            process.stdin.close()
        for process in processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
    return found[WARM_UP_TURNS:]


def _start(side: str, arguments: list[str], model: Path, log: Path) -> subprocess.Popen[str]:
    from asyncrl.generation import engine_environment

    bare = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "none"}
    environment = engine_environment("cpu") | (bare if side in BARE else {})
    command = [
        sys.executable,
        "-m",
        __spec__.name,
        *arguments,
        "--side",
        side,
        "--model",
        str(model),
    ]
    with log.open("w") as errors:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | environment,
        )


def _answer(process: subprocess.Popen[str], log: Path) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise SystemExit(f"a side ended with {process.wait()}:\n{log.read_text()[-3000:]}")


def _turn(process: subprocess.Popen[str], log: Path) -> dict[str, float]:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    return _answer(process, log)


def serve_turns(options: argparse.Namespace) -> None:
    """Start one side, and generate one batch for each line of the standard input."""
    if options.side in BARE:
        _answer_lines(_bare(options))
        return
    loop = asyncio.new_event_loop()
    try:
        batch, close = loop.run_until_complete(
            (_engine if options.side == "engine" else _served)(options)
        )
        _answer_lines(lambda turn: loop.run_until_complete(batch(turn)))
        loop.run_until_complete(close())
    finally:
        loop.close()


def _answer_lines(batch: Callable[[int], int]) -> None:
    import psutil

    from asyncrl.observe import cpu_seconds

    root = psutil.Process()
    print(json.dumps({"ready": True}), flush=True)
    for turn, _ in enumerate(sys.stdin):
        before, began = sum(cpu_seconds(root).values()), time.monotonic()
        tokens = batch(turn)
        seconds = time.monotonic() - began
        used = sum(cpu_seconds(root).values()) - before
        print(json.dumps({"seconds": seconds, "cpu_s": used, "tokens": tokens}), flush=True)


def _prompt(turn: int, group: int) -> tuple[int, ...]:
    """Ids of a short prompt, another one for each group of a turn."""
    return (5, 6, 14, 7 + group % 4, 8 + turn % 4, 16)


def _seed(turn: int, group: int) -> int:
    return 1000 * (100 * turn + group)


def _bare(options: argparse.Namespace) -> Callable[[int], int]:
    """A call that generates one batch in vLLM's own engine, in this process."""
    from transformers import AutoConfig
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from asyncrl.generation import draw_in_blocks

    if options.side == "blocks":
        draw_in_blocks()
    detailed = options.side != "plain"
    engine = LLM(
        model=options.model,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=256,
        kv_cache_memory_bytes=256 << 20,
        max_model_len=AutoConfig.from_pretrained(options.model).max_position_embeddings,
        enable_chunked_prefill=False,
        load_format="safetensors",
        disable_log_stats=True,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
    ).llm_engine

    def batch(turn: int) -> int:
        for group in range(options.groups):
            params = SamplingParams(
                n=SAMPLES,
                max_tokens=options.tokens,
                temperature=1.0,
                seed=_seed(turn, group) if detailed else None,
                ignore_eos=True,
                logprobs=0 if detailed else None,
                flat_logprobs=detailed,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = {"prompt_token_ids": list(_prompt(turn, group))}
            engine.add_request(f"{turn}-{group}", prompt, params)
        tokens = 0
        while engine.has_unfinished_requests():
            tokens += sum(
                len(one.token_ids)
                for output in engine.step()
                if output.finished
                for one in output.outputs
            )
        return tokens

    return batch


Batch = Callable[[int], Awaitable[int]]
Close = Callable[[], Awaitable[None]]


def _app(options: argparse.Namespace) -> Any:
    from asyncrl.config import GeneratorConfig
    from asyncrl.generation import GeneratorApp

    return GeneratorApp(
        model=options.model, generator=GeneratorConfig(num_cpus=1.0, max_num_seqs=256)
    )


def _batch(generate: Callable[[Any], Awaitable[Any]], options: argparse.Namespace) -> Batch:
    """A call that generates one batch: all groups at once."""
    from asyncrl.contracts import GenerateRequest

    async def batch(turn: int) -> int:
        requests = [
            GenerateRequest(
                _prompt(turn, group),
                SAMPLES,
                options.tokens,
                1.0,
                _seed(turn, group),
                ignore_eos=True,
            )
            for group in range(options.groups)
        ]
        answers = await asyncio.gather(*(generate(request) for request in requests))
        return sum(
            len(one.token_ids)
            for answer in answers
            for one in (answer if isinstance(answer, (list, tuple)) else answer.completions)
        )

    return batch


async def _engine(options: argparse.Namespace) -> tuple[Batch, Close]:
    """asyncrl's engine, whose front end is in this process."""
    from asyncrl.generation import start_engine

    engine = await start_engine(_app(options))
    return _batch(engine.requests.generate, options), engine.stop


async def _served(options: argparse.Namespace) -> tuple[Batch, Close]:
    """A replica of Serve, called from this process."""
    from asyncrl.generation import ServeGenerate, begin_generators, wait_for_generators
    from asyncrl.run import shut_down_ray, start_local_ray

    start_local_ray(2, configure_logging=False)
    handle = await asyncio.to_thread(begin_generators, _app(options), "benchmark")
    await wait_for_generators("benchmark", 300)
    generate = ServeGenerate(handle)

    async def close() -> None:
        shut_down_ray()

    return _batch(generate.generate, options), close


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
