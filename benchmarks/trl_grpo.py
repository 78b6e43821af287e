"""Measures how many trajectories per second TRL's GRPO trainer generates and trains: the other side
of `benchmarks.against_trl`, which makes its environment and starts it.

TRL has an environment of its own. Nothing of asyncrl is imported here.

    PYTHON benchmarks/trl_grpo.py '{"model": …, "rows": …, "backend": "transformers", …}'

The last line of the output is JSON: trajectories per second, CPU seconds of a step, tokens.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}


def main(settings: dict[str, Any]) -> None:
    """Train `steps` steps, and print the figures of those after the first `skip`.

    Settings: model (directory), rows (Parquet with prompt and answer), backend ("transformers" or
    "continuous"), micro (trajectories of a micro-batch), batch (trajectories of a step), samples
    (of a prompt), max_tokens, ignore_eos, steps, skip, threads.
    """
    import psutil
    import pyarrow.parquet as pq
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(settings["threads"])
    lengths: list[int] = []
    stamps: list[tuple[float, float, int]] = []
    process = psutil.Process()

    def exact_match(completions: Any, completion_ids: Any, answer: Any, **_: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return [
            float(text.strip() == right) for text, right in zip(completions, answer, strict=True)
        ]

    class Stamps(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            used = process.cpu_times()
            stamps.append((time.monotonic(), used.user + used.system, len(lengths)))

    table = pq.read_table(settings["rows"], columns=["prompt", "answer"]).to_pylist()
    micro, batch = settings["micro"], settings["batch"]
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
            reward_funcs=exact_match,
            train_dataset=Dataset.from_list(table),
            processing_class=tokenizer,
            callbacks=[Stamps()],
            args=GRPOConfig(
                output_dir=str(Path(folder)),
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=micro,
                gradient_accumulation_steps=batch // micro,
                num_generations=settings["samples"],
                max_completion_length=settings["max_tokens"],
                temperature=1.0,
                learning_rate=1e-7,
                beta=0.0,
                max_steps=settings["steps"],
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                lr_scheduler_type="constant",
                adam_beta2=0.95,
                generation_kwargs=(
                    {"suppress_tokens": [tokenizer.eos_token_id]}
                    if settings["ignore_eos"]
                    else None
                ),
                use_transformers_continuous_batching=settings["backend"] == "continuous",
                seed=0,
            ),
        )
        trainer.train()
    (began, cpu_before, before), (ended, cpu_after, after) = (
        stamps[settings["skip"] - 1],
        stamps[-1],
    )
    steps = settings["steps"] - settings["skip"]
    seen = lengths[before:after]
    print(
        json.dumps(
            {
                "trajectories_per_s": batch * steps / (ended - began),
                "cpu_s_per_step": (cpu_after - cpu_before) / steps,
                "mean_tokens": sum(seen) / len(seen),
                "longest": max(seen),
            }
        )
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
