"""Records what TRL's trainers compute in each step of the cases of `agreement_cases.py`.

TRL has an environment of its own. The tests do not import this file.

    uv venv trl --python 3.11
    uv pip install --python trl/bin/python --torch-backend cpu trl==1.16.0 torch==2.13.0 \\
        transformers==5.19.0 accelerate==1.15.0 numpy==2.3.5
    trl/bin/python tests/agreement/trl_fixtures.py [CASE...]

It writes `trl.json` beside this file: package versions, a hash of the model and the rows, and for
each case its settings and columns of one number per step. `loss`, `grad_norm` (before clipping) and
`learning_rate` are those of the step; the others are TRL's own metrics. No number is rounded.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}

import torch
from agreement_cases import (
    ADAM_BETAS,
    ADAM_EPS,
    BATCH,
    CASES,
    STEPS,
    Case,
    digest,
    make_model,
    pairs,
    sft_rows,
    text,
    unpaired,
)
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer

FIXTURE = Path(__file__).parent / "trl.json"
PACKAGES = ("trl", "transformers", "torch", "accelerate", "datasets", "tokenizers", "numpy")
TRAINERS = {
    "sft": (SFTConfig, SFTTrainer),
    "dpo": (DPOConfig, DPOTrainer),
    "cpo": (CPOConfig, CPOTrainer),
    "kto": (KTOConfig, KTOTrainer),
}
COLUMNS = (
    "loss",
    "grad_norm",
    "learning_rate",
    "rewards/accuracies",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
    "kl",
)


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model")
        found = {name: record(CASES[name], Path(folder)) for name in names or CASES}
    before = json.loads(FIXTURE.read_text())["cases"] if names and FIXTURE.exists() else {}
    known = before | found
    FIXTURE.write_text(
        lines(
            {
                "packages": {name: version(name) for name in PACKAGES},
                "task": digest(),
                "steps": STEPS,
                "batch": BATCH,
                "cases": {name: known[name] for name in CASES if name in known},
            }
        )
    )


def record(case: Case, folder: Path) -> dict[str, Any]:
    """Train the case. Returns its settings and columns."""
    config, trainer_class = TRAINERS[case.trainer]
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        args=config(output_dir=str(folder / "out"), **settings(case)),
        train_dataset=dataset(case),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    check_tokens(case, trainer)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == STEPS
    columns = {name: [entry[name] for entry in logs] for name in COLUMNS if name in logs[0]}
    clipped = sum(norm > case.max_grad_norm for norm in columns["grad_norm"])
    print(
        f"{case.name:16} loss {columns['loss'][0]:.4f} to {columns['loss'][-1]:.4f}, norm"
        f" {min(columns['grad_norm']):.3f} to {max(columns['grad_norm']):.3f}, {clipped} of"
        f" {STEPS} steps clipped"
    )
    kept = {name: value for name, value in asdict(case).items() if name != "preference"}
    return {"settings": kept, "columns": columns}


def settings(case: Case) -> dict[str, Any]:
    """Settings of TRL's trainer."""
    own = {"completion_only_loss": case.rows != "all"} if case.trainer == "sft" else {}
    return {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH // case.micro_batches,
        "gradient_accumulation_steps": case.micro_batches,
        "train_sampling_strategy": "sequential",
        "max_length": None,
        "optim": {"adamw": "adamw_torch", "sgd": "sgd"}[case.optimizer],
        "learning_rate": case.learning_rate,
        "lr_scheduler_type": case.schedule,
        "warmup_steps": 0,
        "weight_decay": case.weight_decay,
        "adam_beta1": ADAM_BETAS[0],
        "adam_beta2": ADAM_BETAS[1],
        "adam_epsilon": ADAM_EPS,
        "max_grad_norm": case.max_grad_norm,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
        **own,
        **case.trl,
    }


def dataset(case: Case) -> Dataset:
    """The case's rows as TRL takes them: texts where it tokenizes, else tokens and masks."""
    if case.trainer == "sft" and case.rows == "completions":
        rows: list[dict[str, Any]] = [
            {"prompt": text(pair.prompt), "completion": text(pair.chosen)} for pair in pairs()
        ]
    elif case.trainer == "sft" and case.rows == "all":
        rows = [{"text": text(row.ids)} for row in sft_rows("all")]
    elif case.trainer == "sft":
        rows = [
            {"input_ids": list(row.ids), "completion_mask": list(map(int, row.mask))}
            for row in sft_rows("turns")
        ]
    elif case.trainer == "kto":
        rows = [
            {"prompt": text(row.prompt), "completion": text(row.completion), "label": row.label}
            for row in unpaired()
        ]
    else:
        rows = [
            {
                "prompt": text(pair.prompt),
                "chosen": text(pair.chosen),
                "rejected": text(pair.rejected),
            }
            for pair in pairs()
        ]
    return Dataset.from_list(rows)


def check_tokens(case: Case, trainer: Any) -> None:
    """Fail unless TRL's tokens are those of the rows: no BOS before, and one EOS at the end."""
    rows = trainer.train_dataset
    assert len(rows) == STEPS * BATCH
    if case.trainer == "sft":
        for row, own in zip(rows, sft_rows(case.rows), strict=True):
            targets = [label != -100 for label in row["labels"]]
            assert tuple(row["input_ids"]) == own.ids and tuple(targets[1:]) == own.mask[1:]
    elif case.trainer == "cpo":
        for row, pair in zip(rows, pairs(), strict=True):
            for side, own in (("chosen", pair.chosen), ("rejected", pair.rejected)):
                assert tuple(row[f"{side}_input_ids"]) == pair.prompt + own
                assert row[f"{side}_labels"].count(-100) == len(pair.prompt)
    elif case.trainer == "kto":
        for row, one in zip(rows, unpaired(), strict=True):
            assert (tuple(row["prompt_ids"]), tuple(row["completion_ids"]), row["label"]) == (
                one.prompt,
                one.completion,
                one.label,
            )
    else:
        for row, pair in zip(rows, pairs(), strict=True):
            names = ("prompt_ids", "chosen_ids", "rejected_ids")
            assert tuple(tuple(row[name]) for name in names) == (
                pair.prompt,
                pair.chosen,
                pair.rejected,
            )


def lines(tree: Any, depth: int = 0) -> str:
    """JSON with one line for each list."""
    if not isinstance(tree, dict) or not tree:
        return json.dumps(tree)
    inner = [
        "  " * (depth + 1) + json.dumps(name) + ": " + lines(value, depth + 1)
        for name, value in tree.items()
    ]
    end = "\n" if depth == 0 else ""
    return "{\n" + ",\n".join(inner) + "\n" + "  " * depth + "}" + end


if __name__ == "__main__":
    main(sys.argv[1:])
