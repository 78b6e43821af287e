"""Compares the speed of SFT and DPO with TRL's, and with a bare loop in plain torch.

    python -m benchmarks.objectives [--trl PYTHON] [--objectives sft,dpo] [--rounds 5]
    [--rows 192] [--batch 64] [--cap 4096] [--threads N] [--device cpu|cuda] [--by wall|cpu]
    [--quick]

PYTHON is the interpreter of an environment with TRL (`pip install 'asyncrl[bench]'`, or see
`benchmarks.trl_baseline`). Without it, TRL is left out.

Rows have lognormal lengths (median 64, at most 768, seeded); a pair has two of them and a shared
prompt. The model is a random Qwen3 of 7 million parameters in float32. Learning rates are 0, which
costs the same and keeps the losses comparable: they must agree to 1e-4.

Every contestant has its own process, which waits while another one is measured. First, each setting
of TRL takes one pass over the rows. Those within 10% of the fastest take part in the rounds. In a
round, every contestant takes one pass over all rows, and every second round has the reverse order.
A ratio is the median of the rounds' ratios. Wall time counts; on a busy machine, `--by cpu` counts
the CPU time of the contestant's processes instead, Ray's included. Use it with `--threads 1`,
because threads spin while they wait. The bars:

- asyncrl's step loop has at least the tokens per second of TRL's best setting.
- It has at least 90% of those of the bare loop, on the same packed rows.
- The reference pass of DPO takes at most the time of one bare forward pass over the same tokens,
  within the noise of this run: the median difference of two forward passes of the same round.

Tokens are those of the rows and of both sides of a pair, without padding. A pass of DPO does not
include the reference pass; a further line adds it on both sides. `--quick` is a smoke test: a tiny
model, one round, no TRL, no bars. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa

from benchmarks.objective_passes import Task

IDS, MASK = pa.list_(pa.int32()), pa.list_(pa.bool_())
MEDIAN, SIGMA, LONGEST, PROMPT, SEED = 64, 0.9, 768, 8, 0
MODEL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QUICK_MODEL = {**MODEL, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
NOISE = 0.01
"""Standard deviation of what distinguishes the reference from the trained model."""
CLOSE = 1.1
"""Settings of TRL whose time is within this factor of the fastest take part in the rounds."""
FEWEST = 1.0
"""Bar: asyncrl's tokens per second, relative to those of TRL's best setting."""
OF_CEILING = 0.9
"""Bar: asyncrl's tokens per second, relative to those of the bare loop."""
FORWARDS = 1.0
"""Bar: the time of the reference pass, relative to that of a bare forward pass."""
LOSS_TOLERANCE = 1e-4
"""Relative. All contestants compute the same loss of the same rows, in float32."""
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "TOKENIZERS_PARALLELISM": "false",
}
"""Of every contestant. asyncrl sets the same for its own learner."""


class Contestant:
    """A process that takes passes. Ends with `close()`."""

    def __init__(self, name: str, command: Sequence[str], log: Path, threads: int) -> None:
        self.name, self.log = name, log
        environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )

    def take(self, name: str) -> dict[str, float]:
        """Take the pass of this name, and return its figures: `seconds`, which the contestant
        measures, `cpu_seconds` of all its processes unless it measures them, and further ones.

        Raises:
            SystemExit: the process ended.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        before = cpu_seconds(self.process.pid)
        with contextlib.suppress(BrokenPipeError):  # then the answer is missing as well
            self.process.stdin.write(f"{name}\n")
            self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            sys.exit(f"{self.name} failed:\n{self.log.read_text()[-4000:]}")
        found: dict[str, float] = json.loads(line)
        return {"cpu_seconds": cpu_seconds(self.process.pid) - before} | found

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and its living descendants."""
    process = psutil.Process(pid)
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total += times.user + times.system
    return total


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a table: a contestant with a pass."""

    name: str
    contestant: Contestant
    taken: str
    """The name of its pass."""

    def take(self, by: str) -> dict[str, float]:
        """Take the pass. Its figures `seconds` and `reference_seconds` are wall or CPU time."""
        found = self.contestant.take(self.taken)
        if by == "wall":
            return found
        ahead = found.get("reference_cpu_seconds", 0.0)
        return found | {"seconds": found["cpu_seconds"], "reference_seconds": ahead}


def main(arguments: Sequence[str]) -> int:
    """Measure and print. The exit code is 0 if all bars are met."""
    options = parse(arguments)
    os.environ |= ENVIRONMENT  # torch and DeepSpeed are imported later
    missed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="asyncrl_bench_") as folder:
        model = QUICK_MODEL if options.quick else MODEL
        save_models(Path(folder), model)
        for objective in options.objectives.split(","):
            task = Task(
                objective,
                folder,
                options.batch // (1 if objective == "sft" else 2),
                LONGEST,
                options.cap,
                options.threads,
                options.device,
            )
            tokens = save_rows(task, options.rows, model["vocab_size"])
            missed += compare(task, tokens, options)
    if options.quick:
        print("quick: no bar was checked")
        return 0
    print(f"bars missed: {', '.join(missed)}" if missed else "all bars that were measured are met")
    return 1 if missed else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.objectives")
    parser.add_argument("--trl", help="Python of an environment with TRL")
    for objective in ("sft", "dpo"):
        parser.add_argument(f"--{objective}_settings", help="TRL's settings to try; default: all")
    parser.add_argument("--objectives", default="sft,dpo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=192, help="a multiple of --batch")
    parser.add_argument("--batch", type=int, default=64, help="sequences of a step")
    parser.add_argument("--cap", type=int, default=4096, help="tokens of asyncrl's micro-batch")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--by", choices=("wall", "cpu"), default="wall", help="time that counts")
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    options = parser.parse_args(arguments)
    if options.rows % options.batch or options.batch % 2:
        parser.error("--rows must be a multiple of --batch, and --batch even")
    if options.quick:
        options.rows, options.batch, options.rounds, options.trl = 16, 8, 1, None
    ENVIRONMENT["DS_ACCELERATOR"] = options.device
    return options


def compare(task: Task, tokens: int, options: argparse.Namespace) -> list[str]:
    """Print one objective's tables. Returns the bars that are missed."""
    python = [sys.executable, "-m", "benchmarks.objective_passes"]
    logs, started = Path(task.folder), list[Contestant]()

    def start(name: str, command: Sequence[str]) -> Contestant:
        log = logs / f"{task.objective}_{name}.log"
        started.append(Contestant(name, command, log, task.threads))
        return started[-1]

    try:
        bare = Entry("bare loop", start("bare", [*python, "bare", task.text()]), "train")
        learner = Entry("asyncrl", start("asyncrl", [*python, "learner", task.text()]), "train")
        trl = chosen_settings(start, task, tokens, options) if options.trl else []
        entries = [learner, bare, *trl]
        for entry in (learner, bare):
            entry.take(options.by)  # the first pass warms up
        found = rounds_of(entries, options.rounds, options.by)
        report(task, tokens, entries, found, options.by)
        missed = bars(task, learner, bare, trl, found)
        if task.objective == "dpo":
            missed += reference_pass(learner, bare, trl, found, options)
    finally:
        for contestant in started:
            contestant.close()
    return [f"{task.objective}: {name}" for name in missed]


def chosen_settings(
    start: Callable[[str, Sequence[str]], Contestant],
    task: Task,
    tokens: int,
    options: argparse.Namespace,
) -> list[Entry]:
    """TRL's settings that are close to the fastest. Prints all."""
    from benchmarks.trl_baseline import SETTINGS

    folder = Path(task.folder)
    command = [
        options.trl,
        str(Path(__file__).with_name("trl_baseline.py")),
        str(folder / "model"),
        str(task.rows.with_suffix(".parquet")),
        task.objective,
        *("--batch", str(task.batch), "--threads", str(task.threads), "--device", task.device),
        *("--reference", str(folder / "reference"), "--serve"),
    ]
    contestant = start("TRL", command)
    names = (getattr(options, f"{task.objective}_settings") or SETTINGS[task.objective]).split(",")
    seconds = {}
    print(f"\n{task.objective}: settings of TRL, one pass each")
    for name in names:
        taken = Entry(name, contestant, name).take(options.by)
        seconds[name] = taken["seconds"]
        print(
            f"  {name:<18}{tokens / taken['seconds']:>10,.0f} tokens/s,"
            f" {taken['padding_fraction']:.0%} padding"
        )
    best = min(seconds.values())
    return [
        Entry(f"TRL {name}", contestant, name)
        for name in sorted(seconds, key=lambda name: seconds[name])
        if seconds[name] <= CLOSE * best
    ]


Rounds = list[dict[str, dict[str, float]]]
"""For each round: name of an entry → figures of its pass."""


def rounds_of(entries: Sequence[Entry], count: int, by: str) -> Rounds:
    """Let all entries take a pass in turn, in the reverse order every second time."""
    return [
        {entry.name: entry.take(by) for entry in in_turn(entries, number)}
        for number in range(count)
    ]


def in_turn(entries: Sequence[Entry], number: int) -> Sequence[Entry]:
    """The entries in the order of this round."""
    return entries[:: -1 if number % 2 else 1]


def ratios(found: Rounds, above: str, below: str, figure: str = "seconds") -> list[float]:
    """The ratio of two entries' figures in each round."""
    return [taken[above][figure] / taken[below][figure] for taken in found]


def shown(values: Sequence[float]) -> str:
    """The median of some ratios, and their range."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def report(task: Task, tokens: int, entries: Sequence[Entry], found: Rounds, by: str) -> None:
    """Print the table of the rounds.

    Raises:
        SystemExit: the losses differ.
    """
    first = entries[0].name
    print(
        f"\n{task.objective}: {tokens:,} tokens a pass, steps of {task.batch}"
        f" {'rows' if task.objective == 'sft' else 'pairs'}, {task.threads} threads, {task.device},"
        f" {by} time, medians of {len(found)} rounds"
    )
    print(f"  {'':<22}{'tokens/s':>10}{'loss':>11}  {first} relative to it")
    for entry in entries:
        speed = statistics.median(tokens / taken[entry.name]["seconds"] for taken in found)
        relative = shown(ratios(found, entry.name, first)) if entry is not entries[0] else ""
        print(f"  {entry.name:<22}{speed:>10,.0f}{found[0][entry.name]['loss']:>11.6f}  {relative}")
    losses = [figures["loss"] for taken in found for figures in taken.values()]
    if max(losses) - min(losses) > LOSS_TOLERANCE * abs(losses[0]):
        sys.exit(f"the losses differ, so these are not the same steps: {losses}")


def bars(task: Task, learner: Entry, bare: Entry, trl: Sequence[Entry], found: Rounds) -> list[str]:
    """Print the bars of the step loop. Returns those that are missed."""
    missed = []
    ceiling = statistics.median(ratios(found, bare.name, learner.name))
    print(f"  {ceiling:.1%} of the bare loop's tokens/s (bar {OF_CEILING:.0%})")
    if ceiling < OF_CEILING:
        missed.append("the bare loop")
    if trl:
        best = min(statistics.median(ratios(found, entry.name, learner.name)) for entry in trl)
        print(f"  {best:.2f} times TRL's best setting (bar {FEWEST:.1f})")
        if best < FEWEST:
            missed.append("TRL")
    return missed


def reference_pass(
    learner: Entry,
    bare: Entry,
    trl: Sequence[Entry],
    trained: Rounds,
    options: argparse.Namespace,
) -> list[str]:
    """Measure the reference pass against a bare forward pass. Prints and returns missed bars."""
    names = ("forward before", "reference pass", "forward after")
    of = dict(zip(names, (bare, learner, bare), strict=True))
    entries = [Entry(name, of[name].contestant, "forward") for name in names]
    rounds_of(entries, 1, options.by)  # warms up
    found = rounds_of(entries, options.rounds, options.by)
    forward = [(taken[names[0]]["seconds"] + taken[names[2]]["seconds"]) / 2 for taken in found]
    cost = [
        taken[names[1]]["seconds"] / bare_s for taken, bare_s in zip(found, forward, strict=True)
    ]
    noise = statistics.median(abs(one - 1) for one in ratios(found, names[0], names[2]))
    print(
        f"  reference pass: {shown(cost)} of a bare forward pass (bar {FORWARDS:.1f}, noise"
        f" {noise:.3f})"
    )
    reference_s = statistics.median(taken[names[1]]["seconds"] for taken in found)
    step_s = statistics.median(taken[learner.name]["seconds"] for taken in trained)
    print(f"  reference pass: {reference_s / step_s:.2f} of the time of the steps of one pass")
    for entry in trl:
        both = [
            (taken[entry.name]["seconds"] + taken[entry.name]["reference_seconds"])
            / (taken[learner.name]["seconds"] + reference_s)
            for taken in trained
        ]
        print(f"  with the reference pass of one epoch: {shown(both)} times {entry.name}")
    return ["the reference pass"] if statistics.median(cost) > FORWARDS + noise else []


def save_models(folder: Path, shape: dict[str, int]) -> None:
    """Save a seeded random Qwen3 with a tokenizer as `model`, and one close to it as
    `reference`."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    config = Qwen3Config(
        **shape,
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=1,
    )
    words = {f"w{number}": number for number in range(shape["vocab_size"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w2")),
        eos_token="w0",
        pad_token="w1",
    )
    model = Qwen3ForCausalLM(config)
    for name in ("model", "reference"):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += NOISE * torch.randn_like(parameter)


def save_rows(task: Task, sequences: int, vocabulary: int) -> int:
    """Save the rows for asyncrl (Arrow) and TRL (Parquet). Returns their number of tokens."""
    import pyarrow.parquet as pq

    rows = sequences if task.objective == "sft" else sequences // 2
    table = sft_rows(rows, vocabulary) if task.objective == "sft" else pairs(rows, vocabulary)
    with pa.OSFile(str(task.rows), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    pq.write_table(table, task.rows.with_suffix(".parquet"))
    ids = [name for name in table.column_names if name.endswith("_ids")]
    return sum(len(row) for name in ids for row in table[name])


def seeded(count: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Token lists of lognormal length. Ids below 3 are special."""
    generator = np.random.default_rng(seed)
    lengths = np.clip(generator.lognormal(np.log(MEDIAN), SIGMA, count), PROMPT + 1, LONGEST)
    return [generator.integers(3, vocabulary, length).tolist() for length in lengths.astype(int)]


def masked(ids: Sequence[list[int]]) -> list[list[bool]]:
    """The targets: every token after the prompt."""
    return [[False] * PROMPT + [True] * (len(row) - PROMPT) for row in ids]


def sft_rows(count: int, vocabulary: int) -> pa.Table:
    """The token rows of SFT."""
    ids = seeded(count, vocabulary, SEED)
    return pa.table({"input_ids": pa.array(ids, IDS), "loss_mask": pa.array(masked(ids), MASK)})


def pairs(count: int, vocabulary: int) -> pa.Table:
    """The token rows of DPO."""
    chosen, rejected = (seeded(count, vocabulary, SEED + side) for side in (1, 2))
    rejected = [one[:PROMPT] + other[PROMPT:] for one, other in zip(chosen, rejected, strict=True)]
    columns = {}
    for side, ids in (("chosen", chosen), ("rejected", rejected)):
        columns[f"{side}_ids"] = pa.array(ids, IDS)
        columns[f"{side}_mask"] = pa.array(masked(ids), MASK)
    return pa.table(columns)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
