"""Measures asyncrl's training on two cores, in turns with TRL's GRPO trainer. Both have the same
model, prompts, lengths of completions, and groups of a step.

    python -m benchmarks.against_trl [--cases short,fixed,tail] [--turns 3] [--trl FOLDER]
        [--plot FILE]

First it makes an environment with TRL in FOLDER (default: .venv-trl), unless it exists, and the
models. For each case it prints

- the ceiling: the cores, divided by the CPU time that a bare vLLM engine and a bare loop on packed
  rows need for a trajectory. They get the same prompts, and the loop gets the engine's tokens. The
  loop has a next-token loss, which is cheaper than the policy's;
- each of TRL's settings, in one trial. The fastest one then takes turns with asyncrl;
- the medians of the turns, the ratio to TRL and to the ceiling;
- the time from asyncrl's command to its first step;
- asyncrl's CPU time of a group by process, and what is left of it besides the bare engine and loop.
  The replica's process contains vLLM's own front end.

TRL generates with transformers, with and without continuous batching. Its vLLM backend is not
measured. Every figure is from steps after a warm-up, with the pipeline full at both ends. All
processes share the first two cores, and none is pinned to one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from asyncrl.config import load_config
from asyncrl.observe import cpu_seconds, cpu_seconds_between
from asyncrl.rundir import open_run
from jobs.quickstart.task import make_inputs

PACKAGES = ("trl==1.16.0", "torch==2.13.0", "transformers==5.19.0", "accelerate==1.15.0", "psutil")
CONFIG = Path(__file__).parent / "placements.yaml"
SAMPLES, THREADS, MAX_STALENESS = 8, 2, 2
CONTEXT = 1024
LEAST_OF_CEILING = 0.75
MOST_UNEQUAL = 0.1
"""Of the mean length of completions that end by themselves: few steps have few long ones."""
ENVIRONMENT = {
    # glibc would return the pages of every large tensor and fault them in again. It reads these
    # variables when a process starts.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "OMP_WAIT_POLICY": "passive",
}
LEAST_SHOWN = 0.02
"""Least share of a group's CPU time of a process with a color of its own in the plot."""
MOST_OUTSIDE_MS = {"short": 3.0, "fixed": 5.0}
MOST_GROUPS = 40
"""Groups in the bare engine, more than its 256 slots hold."""
ENGINE, LEARNER = ("VLLM::",), ("ray::RankProcess",)


@dataclass(frozen=True)
class Case:
    """A model, and what a step generates and trains."""

    name: str
    model: str
    max_tokens: int
    ignore_eos: bool
    groups: int
    """Groups of a step."""
    steps: int
    trl_steps: int
    bar: float
    """Least ratio to TRL's trajectories per second."""
    num_threads: int | str = 1
    """`learner.num_threads`. TRL has all cores for each of its phases."""

    @property
    def trajectories(self) -> int:
        return self.groups * SAMPLES


CASES = {
    case.name: case
    for case in (
        Case("short", "small", 6, False, 64, 60, 16, 0.75),
        Case("fixed", "small", 64, True, 64, 14, 8, 0.75),
        Case("tail", "small-uniform", 512, False, 64, 9, 4, 3.0),
        Case("fixed-50m", "large", 64, True, 8, 9, 5, 1.2, "auto"),
        Case("tail-50m", "large-uniform", 512, False, 8, 9, 4, 3.0, "auto"),
    )
}
SKIPPED = {"ours": 4, "trl": 2}
TRL_SETTINGS = (
    "transformers:16",
    "transformers:32",
    "transformers:64",
    "transformers:128",
    "transformers:512",
    "continuous:128",
)
"""Backend and trajectories of a micro-batch."""


def main(arguments: list[str]) -> int:
    """Measure and print. The exit code is 0 if every bar is met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against_trl")
    parser.add_argument("--cases", default="short,fixed,tail")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--trl", type=Path, default=Path(".venv-trl"))
    parser.add_argument("--settings", default=",".join(TRL_SETTINGS))
    parser.add_argument("--plot", type=Path, help="draw the CPU time of a group, by process")
    parser.add_argument("--part", nargs=2, metavar=("NAME", "SETTINGS"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        name, settings = options.part
        print(json.dumps(PARTS[name](json.loads(settings))))
        return 0
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    make_environment(options.trl)
    missed: list[str] = []
    drawn: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="asyncrl_bench_") as folder:
        work = Path(folder)
        config = load_config(CONFIG, [])
        make_inputs(config)
        for name in options.cases.split(","):
            case = CASES[name]
            part("model", model=case.model, base=str(config.model.path), folder=str(work))
            of_case, drawn[name] = measure(case, work, str(config.data.train), options)
            missed += of_case
    if options.plot is not None:
        from benchmarks.plots import Axes, draw_bars

        axes = Axes("CPU time of a group of 8 completions", "case", "ms of CPU a group")
        draw_bars(options.plot, axes, drawn)
    print("\nevery bar is met" if not missed else "\nmissed: " + "; ".join(missed))
    return 1 if missed else 0


def make_environment(folder: Path) -> None:
    """Install TRL and what it needs, with torch's CPU build."""
    if (folder / "bin" / "trl").exists():
        return
    uv = str(Path(sys.executable).with_name("uv"))
    found = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    environment = os.environ | ({"UV_FIND_LINKS": found} if found else {})
    torch = [] if found else ["--torch-backend", "cpu"]
    subprocess.run(
        [uv, "venv", "--quiet", str(folder), "--python", os.path.realpath(sys.executable)],
        check=True,
    )
    python = str(folder / "bin" / "python")
    subprocess.run(
        [uv, "pip", "install", "--quiet", "--python", python, *torch, *PACKAGES],
        check=True,
        env=environment,
    )


def measure(
    case: Case, work: Path, rows: str, options: argparse.Namespace
) -> tuple[list[str], dict[str, float]]:
    """Measure one case and print it.

    Returns:
        The bars that it missed, and ms of CPU a group by process.
    """
    settings: dict[str, Any] = {
        "model": str(work / case.model),
        "rows": rows,
        "samples": SAMPLES,
        "batch": case.trajectories,
        "max_tokens": case.max_tokens,
        "ignore_eos": case.ignore_eos,
        "threads": THREADS,
    }
    ceiling = measure_ceiling(case, settings, str(work / f"{case.name}.parquet"))
    best = fastest_setting(case, settings, options)
    ours, theirs = [], []
    for turn in range(options.turns):
        if turn % 2:
            theirs.append(trl(case, settings, best, options.trl))
        ours.append(asyncrl(case, work, f"{case.name}-{turn}", rows))
        if not turn % 2:
            theirs.append(trl(case, settings, best, options.trl))
    if unequal := _unequal_lengths(case, ours, theirs):
        sys.exit(unequal)
    return report(case, ceiling, best, ours, theirs)


def measure_ceiling(case: Case, settings: dict[str, Any], tokens: str) -> float:
    """Trajectories per second that the cores allow. Prints it with its parts."""
    engine = part("engine", **settings, groups=case.groups, tokens=tokens)
    loop = part("loop", **settings, tokens=tokens)
    ceiling = THREADS / (engine["cpu_s"] + loop["cpu_s"])
    print(
        f"\n{case.name}: {loop['parameters'] / 1e6:.1f} M parameters, {case.groups} groups of"
        f" {SAMPLES} a step, {engine['mean_tokens']:.1f} tokens each (longest"
        f" {engine['longest']:.0f})\n"
        f"  ceiling {ceiling:8.1f} trajectories/s: {1e3 * engine['cpu_s']:.2f} ms of CPU a"
        f" trajectory in a bare engine, {1e3 * loop['cpu_s']:.2f} in a bare loop",
        flush=True,
    )
    return ceiling


def fastest_setting(case: Case, settings: dict[str, Any], options: argparse.Namespace) -> str:
    """Try TRL's settings, print them, and return the fastest one."""
    speeds = {}
    for name in options.settings.split(","):
        if int(name.split(":")[1]) <= case.trajectories:
            speeds[name] = trl(case, settings, name, options.trl)["trajectories_per_s"]
            print(f"  TRL, {name:<18} {speeds[name]:8.1f} trajectories/s (trial)", flush=True)
    return max(speeds, key=lambda name: speeds[name])


def report(
    case: Case,
    ceiling: float,
    setting: str,
    ours: Sequence[Mapping[str, Any]],
    theirs: Sequence[Mapping[str, Any]],
) -> tuple[list[str], dict[str, float]]:
    """Print the medians of the turns. Returns what `measure` does."""
    speed = median(ours, "trajectories_per_s")
    ratios = sorted(
        mine["trajectories_per_s"] / their["trajectories_per_s"]
        for mine, their in zip(ours, theirs, strict=True)
    )
    ratio, outside = statistics.median(ratios), median(ours, "outside_ms")
    whole = 1e3 * median(ours, "cpu_s_per_step") / case.groups
    bare = 1e3 * THREADS / ceiling * SAMPLES
    print(
        f"  TRL     {median(theirs, 'trajectories_per_s'):8.1f} trajectories/s, {setting},"
        f" {median(theirs, 'cpu_s_per_step'):.2f} s of CPU a step,"
        f" {median(theirs, 'mean_tokens'):.1f} tokens each\n"
        f"  asyncrl {speed:8.1f} trajectories/s,"
        f" {median(ours, 'cpu_s_per_step'):.2f} s of CPU a step,"
        f" {median(ours, 'mean_tokens'):.1f} tokens each:"
        f" {ratio:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) of TRL,"
        f" {speed / ceiling:.2f} of the ceiling\n"
        f"  first step {median(ours, 'first_step_s'):.1f} s after the command\n"
        f"  {speed / case.trajectories * median(ours, 'cpu_s_per_step'):.2f} cores busy\n"
        f"  {whole:.2f} ms of CPU a group: {bare:.2f} in the bare engine and loop,"
        f" {outside:.2f} outside engine and learner, and {whole - bare - outside:.2f} more in"
        " these than in the bare ones"
    )
    processes = {name for one in ours for name in one["by_process"]}
    by_process = {
        name: statistics.median(one["by_process"].get(name, 0.0) for one in ours)
        for name in processes
    }
    for name, ms in sorted(by_process.items(), key=lambda item: -item[1]):
        if ms >= 0.05:
            inside = " (not outside)" if name.startswith(ENGINE + LEARNER) else ""
            print(f"    {ms:8.2f} ms  {name}{inside}")
    sys.stdout.flush()
    missed = []
    if speed / ceiling < LEAST_OF_CEILING:
        missed.append(f"{case.name} at {speed / ceiling:.2f} of its ceiling ({LEAST_OF_CEILING})")
    if ratio < case.bar:
        missed.append(f"{case.name} at {ratio:.2f} of TRL ({case.bar:g})")
    if outside > MOST_OUTSIDE_MS.get(case.name, float("inf")):
        most = MOST_OUTSIDE_MS[case.name]
        missed.append(f"{case.name} with {outside:.1f} ms outside engine and learner ({most:g})")
    shown = {name: ms for name, ms in by_process.items() if ms >= LEAST_SHOWN * whole}
    return missed, shown | {"others": sum(by_process.values()) - sum(shown.values())}


def median(found: Sequence[Mapping[str, Any]], name: str) -> float:
    """The median of one figure over the turns."""
    return statistics.median(one[name] for one in found)


def _unequal_lengths(
    case: Case, ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]
) -> str | None:
    """Why the two sides did not do the same work; None if they did."""
    lengths = [median(side, "mean_tokens") for side in (ours, theirs)]
    most = 1e-6 if case.ignore_eos else MOST_UNEQUAL
    if abs(lengths[0] - lengths[1]) <= most * lengths[1]:
        return None
    return f"{case.name}: completions of {lengths[0]:.2f} tokens here and {lengths[1]:.2f} in TRL"


def trl(case: Case, settings: dict[str, Any], name: str, environment: Path) -> dict[str, Any]:
    """One run of TRL."""
    backend, micro = name.split(":")
    whole = settings | {
        "backend": backend,
        "micro": int(micro),
        "steps": case.trl_steps,
        "skip": SKIPPED["trl"],
    }
    script = str(Path(__file__).with_name("trl_grpo.py"))
    command = [str(environment / "bin" / "python"), script, json.dumps(whole)]
    return _json_of(command, THREADS)


def asyncrl(case: Case, work: Path, name: str, rows: str) -> dict[str, Any]:
    """One run of `asyncrl train`, with the CPU time of its processes."""
    tree = yaml.safe_load(CONFIG.read_text())
    tree |= {
        "name": name,
        # Otherwise the run would drain within the window.
        "max_steps": case.steps + MAX_STALENESS + 1,
        "runs_root": str(work / "runs"),
        "model": {"path": str(work / case.model)},
        "checkpoint": {"every_steps": 0},
        "weights": {"check_every_versions": 0},
        "generator": {"max_num_seqs": 256},
        "staleness": {"max_staleness": MAX_STALENESS},
    }
    tree["data"]["train"] = rows
    tree["rollout"] |= {
        "rollout_batch_size": case.groups,
        "n_samples_per_prompt": SAMPLES,
        "max_completion_length": case.max_tokens,
        "ignore_eos": case.ignore_eos,
    }
    tree["learner"] |= {"learning_rate": 1e-7, "num_threads": case.num_threads}
    config = work / f"{name}.yaml"
    config.write_text(yaml.safe_dump(tree))
    metrics = work / "runs" / name / "metrics.jsonl"
    command = [sys.executable, "-m", "asyncrl.cli", "train", str(config)]
    log = work / f"{name}.log"
    first = last = None
    began = time.time()
    with (
        log.open("w") as out,
        subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as run,
    ):
        while run.poll() is None:
            time.sleep(0.05)
            steps = metrics.read_text().count('"event": "step"') if metrics.exists() else 0
            if first is None and steps >= SKIPPED["ours"]:
                first = steps, time.monotonic(), cpu_seconds(psutil.Process(run.pid))
            if first and (last is None or steps > last[0]) and steps <= case.steps:
                last = steps, time.monotonic(), cpu_seconds(psutil.Process(run.pid))
    if run.returncode or first is None or last is None:
        sys.exit(f"asyncrl failed:\n{log.read_text()[-3000:]}")
    steps, seconds = last[0] - first[0], last[1] - first[1]
    whole = open_run(work / "runs" / name).records("step")
    by_process = cpu_seconds_between(first[2], last[2])
    records = whole[first[0] : last[0]]
    per_group = {
        process: 1e3 * used / (steps * case.groups) for process, used in by_process.items()
    }
    return {
        "trajectories_per_s": steps * case.trajectories / seconds,
        "cpu_s_per_step": sum(by_process.values()) / steps,
        "mean_tokens": statistics.mean(step["rollout/completion_tokens"] for step in records),
        "by_process": per_group,
        "first_step_s": whole[0]["time"] - began,
        "outside_ms": sum(
            ms for process, ms in per_group.items() if not process.startswith(ENGINE + LEARNER)
        ),
    }


def part(name: str, **settings: Any) -> dict[str, Any]:
    """Run a part in a process of its own, and return its figures."""
    command = [sys.executable, "-m", __spec__.name, "--part", name, json.dumps(settings)]
    return _json_of(command, 1)


def _json_of(command: list[str], threads: int) -> dict[str, Any]:
    environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
    made = subprocess.run(command, capture_output=True, text=True, env=environment)
    if made.returncode:
        sys.exit(f"{command[:4]} failed:\n{made.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(made.stdout.strip().splitlines()[-1])
    return found


def make_model(settings: dict[str, Any]) -> dict[str, Any]:
    """Write a model: the quickstart's (`small`), one of 50 M parameters (`large`), or one of them
    that ends a completion with the same probability after every token (`-uniform`)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    size, _, uniform = settings["model"].partition("-")
    path = Path(settings["folder"]) / settings["model"]
    if path.exists():
        return {}
    shape = AutoConfig.from_pretrained(settings["base"])
    shape.max_position_embeddings = CONTEXT
    if size == "large":
        tree = shape.to_dict() | {
            "hidden_size": 768,
            "intermediate_size": 2304,
            "num_hidden_layers": 7,
            "num_attention_heads": 12,
            "num_key_value_heads": 12,
            "head_dim": 64,
            "initializer_range": 0.02,
        }
        tree.pop("layer_types", None)
        shape = type(shape)(**tree)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    if size == "small":
        before = AutoModelForCausalLM.from_pretrained(settings["base"], dtype=torch.float32)
        model.load_state_dict(before.state_dict())
    if uniform:
        with torch.no_grad():
            model.model.norm.weight.mul_(0.003)
    model.save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(settings["base"])
    tokenizer.model_max_length = CONTEXT
    tokenizer.save_pretrained(path)
    return {}


def bare_engine(settings: dict[str, Any]) -> dict[str, Any]:
    """CPU seconds of a trajectory in vLLM's own engine, without a server, with seeds and log-probs.
    A new group follows each one that finishes, so the engine is always full. Writes the tokens."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from transformers import AutoConfig, AutoTokenizer

    from asyncrl.generation import engine_environment

    os.environ.update(engine_environment("cpu"))
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "none"}
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    rows = pq.read_table(settings["rows"], columns=["prompt"]).to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    prompts = [tokenizer.encode(row["prompt"], add_special_tokens=False) for row in rows]
    model = AutoConfig.from_pretrained(settings["model"])
    llm = LLM(
        model=settings["model"],
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=256,
        kv_cache_memory_bytes=256 << 20,
        max_model_len=model.max_position_embeddings,
        enable_chunked_prefill=False,
        load_format="safetensors",
        disable_log_stats=True,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
    )
    engine = llm.llm_engine
    assert torch.get_num_threads() == 1

    def submit(number: int, max_tokens: int) -> None:
        params = SamplingParams(
            n=settings["samples"],
            max_tokens=max_tokens,
            temperature=1.0,
            seed=1000 * number,
            ignore_eos=settings["ignore_eos"],
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": prompts[number % len(prompts)]}
        engine.add_request(str(number), prompt, params)

    running = min(MOST_GROUPS, 3 * settings["groups"])
    total = 2 * running + 2 * settings["groups"]
    for number in range(running):
        submit(number, settings["max_tokens"])
    submitted, done, began, used = running, 0, 0.0, 0.0
    found: list[Any] = []
    while done < total - running:
        for output in engine.step():
            if not output.finished:
                continue
            done += 1
            if done == running:
                began = time.process_time()
            elif running < done <= total - running:
                found += [[output.prompt_token_ids, list(one.token_ids)] for one in output.outputs]
            submit(submitted, settings["max_tokens"])
            submitted += 1
    used = time.process_time() - began
    completions = [completion for _, completion in found]
    table = {"prompt": [prompt for prompt, _ in found], "completion": completions}
    pq.write_table(pa.table(table), settings["tokens"])
    lengths = [len(completion) for completion in completions]
    return {
        "cpu_s": used / len(found),
        "mean_tokens": statistics.mean(lengths),
        "longest": float(max(lengths)),
    }


def bare_loop(settings: dict[str, Any]) -> dict[str, Any]:
    """CPU seconds of a trajectory in a plain training loop on packed rows of the engine's tokens,
    after a first step that is not counted."""
    import pyarrow.parquet as pq
    import torch

    from benchmarks.learner import packed_step

    torch.set_num_threads(1)
    table = pq.read_table(settings["tokens"]).to_pylist()
    rows = [(row["prompt"], row["completion"]) for row in table if row["completion"]]
    step, parameters = packed_step(settings["model"], 1, "rows")
    step(rows[: settings["batch"]], 0.0)
    began = time.process_time()
    for first in range(0, len(rows), settings["batch"]):
        step(rows[first : first + settings["batch"]], 0.0)
    return {"cpu_s": (time.process_time() - began) / len(rows), "parameters": parameters}


PARTS = {"model": make_model, "engine": bare_engine, "loop": bare_loop}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
