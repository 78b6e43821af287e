"""Measures how fast TRL's trainers take SFT or DPO steps on given rows: the baseline of asyncrl's
runs on a dataset. `benchmarks.objectives` uses it.

TRL has an environment of its own. Nothing of asyncrl is imported here.

    uv venv trl --python 3.11
    uv pip install --python trl/bin/python --torch-backend cpu trl==1.16.0 torch==2.13.0 \\
        transformers==5.19.0 accelerate==1.15.0
    trl/bin/python benchmarks/trl_baseline.py MODEL ROWS.parquet sft [--batch 64] [--threads 2]

MODEL is a Hugging Face checkpoint directory with a tokenizer. The rows are token tables as asyncrl
trains them: `input_ids` and `loss_mask`, or `chosen_ids`, `chosen_mask`, `rejected_ids` and
`rejected_mask`.

Each setting of TRL has its own process and takes one pass over all rows in float32, with AdamW at
learning rate 0. A pass over the rows of one step comes before it and is not timed. With `--serve`,
one process takes passes until its input ends: each line of the input is a setting, and each line of
the output is the result of one pass.

- sft: padded to the longest row of a micro-batch (`padded`), the same with rows grouped by length
  (`grouped`), without padding (`padding_free`), or best-fit packed rows (`packed`).
- dpo: `padded` or `grouped`, each with the reference scored in every step or once before
  (`_ahead`). TRL 1.16 has no DPO without padding.

A name ends with the number of rows, or of tokens of a packed row, in a micro-batch: `grouped:16`.
Prints JSON: for each setting its tokens per second, without padding, and the fastest. The losses
must agree, which also shows that packed rows do not see each other.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

SETTINGS = {
    "sft": "padded:8,padded:16,grouped:8,grouped:16,grouped:32,padding_free:8,packed:1024",
    "dpo": "padded:8,grouped:8,grouped_ahead:4,grouped_ahead:8,grouped_ahead:16",
}
LOSS_TOLERANCE = 1e-4
PACKAGES = ("trl", "transformers", "torch", "accelerate")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure TRL's speed on the rows of a file.")
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("objective", choices=("sft", "dpo"))
    parser.add_argument("--settings", help="names, separated by commas")
    parser.add_argument("--batch", type=int, default=64, help="rows or pairs of a step")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--reference", type=Path, help="reference model of DPO; default: MODEL")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--one", help="measure this setting in this process")
    parser.add_argument("--serve", action="store_true", help="measure the settings on stdin")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments)
        return
    if arguments.one:
        print(json.dumps(measured(arguments)))
        return
    names = (arguments.settings or SETTINGS[arguments.objective]).split(",")
    found = [measured_apart(name) for name in names]
    losses = [one["loss"] for one in found]
    if max(losses) - min(losses) > LOSS_TOLERANCE * max(1.0, abs(max(losses))):
        sys.exit(f"the settings {names} have different losses: {losses}")
    best = max(found, key=lambda one: one["tokens_per_s"])
    print(
        json.dumps(
            {
                "objective": arguments.objective,
                "packages": {name: version(name) for name in PACKAGES},
                "threads": arguments.threads,
                "batch": arguments.batch,
                "settings": found,
                "best": best["setting"],
                "tokens_per_s": best["tokens_per_s"],
            },
            indent=2,
        )
    )


def serve(arguments: argparse.Namespace) -> None:
    """Take one pass with each setting that stdin gives, one a line, and answer with JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    warm: set[str] = set()
    for line in sys.stdin:
        arguments.one = line.strip()
        print(json.dumps(measured(arguments, arguments.one in warm)), file=answers, flush=True)
        warm.add(arguments.one)


def measured_apart(name: str) -> dict[str, Any]:
    """Measure a setting in a process of its own."""
    command = [sys.executable, *sys.argv, "--one", name]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        sys.exit(f"the setting {name} failed:\n{made.stderr}")
    found: dict[str, Any] = json.loads(made.stdout.strip().splitlines()[-1])
    print(f"{name}: {found['tokens_per_s']:.0f} tokens/s", file=sys.stderr)
    return found


def measured(arguments: argparse.Namespace, warm: bool = False) -> dict[str, Any]:
    """Train one pass with one setting. Returns its figures.

    `tokens_per_s` counts the tokens of the rows, and of both sides of a pair, without padding. It
    includes the time in which the reference scores the rows ahead of training, and `seconds` does
    not.

    Args:
        warm: whether this process has already trained with the setting.
    """
    import torch

    torch.set_num_threads(arguments.threads)
    rows = rows_of(arguments.rows, arguments.objective)
    with tempfile.TemporaryDirectory() as folder:
        if not warm:
            make_trainer(arguments, rows[: arguments.batch], folder).train()
        trainer = make_trainer(arguments, rows, folder)
        trainer.train()
    first, last = trainer.stamps[0], trainer.stamps[-1]
    seconds = last["at"] - first["at"]
    return {
        "setting": arguments.one,
        "tokens_per_s": last["tokens"] / (seconds + trainer.reference_s),
        "steps_timed": len(trainer.stamps) - 1,
        "seconds": seconds,
        "reference_seconds": trainer.reference_s,
        "cpu_seconds": last["cpu"] - first["cpu"],
        "reference_cpu_seconds": trainer.reference_cpu_s,
        "tokens": last["tokens"],
        "padding_fraction": 1 - last["tokens"] / last["padded"],
        "loss": trainer.loss_sum / trainer.loss_weight,
    }


def rows_of(path: Path, objective: str) -> list[dict[str, Any]]:
    """The rows as TRL's trainers take them after their own preparation, with their `length`."""
    import pyarrow.parquet as pq

    table = pq.read_table(path).to_pylist()
    if objective == "sft":
        return [
            {
                "input_ids": row["input_ids"],
                "labels": [
                    token if target else -100
                    for token, target in zip(row["input_ids"], row["loss_mask"], strict=True)
                ],
                "length": len(row["input_ids"]),
            }
            for row in table
        ]
    return [
        {
            "prompt_ids": row["chosen_ids"][:prompt],
            "chosen_ids": row["chosen_ids"][prompt:],
            "rejected_ids": row["rejected_ids"][prompt:],
            "length": max(len(row["chosen_ids"]), len(row["rejected_ids"])),
        }
        for row in table
        for prompt in [row["chosen_mask"].index(True)]
    ]


def make_trainer(arguments: argparse.Namespace, rows: list[dict[str, Any]], folder: str) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    sft = arguments.objective == "sft"
    base, config = (SFTTrainer, SFTConfig) if sft else (DPOTrainer, DPOConfig)
    trainer_class = type("Timed", (Timed, base), {})
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    settings = settings_of(arguments.one, rows, arguments.batch, arguments.device)
    reference = {}
    if not sft and arguments.reference:
        reference["ref_model"] = AutoModelForCausalLM.from_pretrained(
            arguments.reference, dtype=torch.float32
        )
    columns = ("length",) if "group_by_length" in settings.values() or not sft else ()
    data = Dataset.from_list(rows)
    return trainer_class(
        model=model,
        args=config(output_dir=folder, **settings),
        train_dataset=data if columns else data.remove_columns("length"),
        processing_class=tokenizer,
        **reference,
    )


def settings_of(name: str, rows: list[dict[str, Any]], batch: int, device: str) -> dict[str, Any]:
    """The trainer's settings. Packed rows have about `batch` rows per step."""
    kind, number = name.split(":")
    size = int(number)
    steps = max(1, batch // size)
    own: dict[str, Any] = {"max_length": None}
    if kind == "packed":
        mean = sum(row["length"] for row in rows) / len(rows)
        steps = max(1, round(batch * mean / size))
        own = {"packing": True, "packing_strategy": "bfd", "max_length": size}
        size = 1
    elif kind == "padding_free":
        own["padding_free"] = True
    elif kind.endswith("_ahead"):
        own |= {"precompute_ref_log_probs": True, "precompute_ref_batch_size": size}
    return {
        "use_cpu": device == "cpu",
        "bf16": False,
        "gradient_checkpointing": False,
        "num_train_epochs": 1,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": steps,
        "train_sampling_strategy": (
            "group_by_length" if kind.startswith("grouped") else "sequential"
        ),
        "remove_unused_columns": False,
        "learning_rate": 0.0,
        "lr_scheduler_type": "constant",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
        **own,
    }


class Timed:
    """A part of a trainer class: notes when training begins and when each step ends, and what was
    trained by then."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.stamps: list[dict[str, float]] = []
        self.tokens = self.padded = 0
        self.reference_s = self.reference_cpu_s = self.loss_sum = self.loss_weight = 0.0
        super().__init__(*arguments, **settings)
        from transformers import TrainerCallback

        class Stamps(TrainerCallback):
            def on_train_begin(callback, *_: Any, **__: Any) -> None:
                self.stamp()

            def on_step_end(callback, *_: Any, **__: Any) -> None:
                self.stamp()

        self.add_callback(Stamps())

    def stamp(self) -> None:
        if not self.args.use_cpu:
            import torch

            torch.cuda.synchronize()
        self.stamps.append(
            {
                "at": time.monotonic(),
                "cpu": time.process_time(),
                "tokens": self.tokens,
                "padded": self.padded,
            }
        )

    def _prepare_dataset(self, dataset: Any, *arguments: Any, **settings: Any) -> Any:
        """DPO tokenizes texts. These rows are tokens already."""
        if "prompt_ids" in dataset.column_names:
            return dataset
        return super()._prepare_dataset(dataset, *arguments, **settings)

    def _precompute_ref_logps(self, *arguments: Any) -> Any:
        began, cpu = time.monotonic(), time.process_time()
        found = super()._precompute_ref_logps(*arguments)
        self.reference_s += time.monotonic() - began
        self.reference_cpu_s += time.process_time() - cpu
        return found

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        mask = inputs.get("attention_mask")
        self.padded += inputs["input_ids"].numel()
        self.tokens += int(mask.sum()) if mask is not None else inputs["input_ids"].numel()
        loss = super().training_step(model, inputs, num_items_in_batch)
        # SFT divides by the step's targets, and DPO by its micro-batches.
        weight = math.nan if num_items_in_batch is None else float(num_items_in_batch)
        self.loss_sum += float(loss) * (1.0 if math.isnan(weight) else weight)
        self.loss_weight += (
            1.0 / self.args.gradient_accumulation_steps
            if math.isnan(weight)
            else float((inputs["labels"] != -100).sum())
        )
        return loss


if __name__ == "__main__":
    main()
