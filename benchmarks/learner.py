"""Compares training steps on packed and padded rows, and with and without DeepSpeed, on the same
rows, model and optimizer.

    python -m benchmarks.learner [--models tiny,medium] [--rows 512] [--variants
    packed,unpacked,learner,learner_unpacked]

- padded: a plain training loop with transformers and torch. Rows are in the data set's order, in
  micro-batches of 16, padded to the longest, with an attention mask and full logits.
- packed: asyncrl's policy and packing in the same plain loop.
- learner: the learner's own rank, with DeepSpeed ZeRO-3 at world size 1.
- learner_stage1, learner_stage2: the same with ZeRO-1 or ZeRO-2.
- unpacked, learner_unpacked: the same with `learner.packing: none`. Each trajectory has its own
  forward in transformers' attention, on the same model.

Rows have lognormal lengths (median 64, at most 768, seeded). A step is one pass over all rows with
one AdamW step at its end.

`--prompts 32,128,512` compares groups that share a prompt instead (`benchmarks.long_prompts`).

Each measurement has its own process, with a warm-up step on a few rows and a timed step, both at
learning rate 0. A trial on a few rows chooses one or two threads for each variant. Then the
variants take turns, and the fastest step of each counts. Their losses must agree to 1e-4.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from asyncrl.preflight import learner_spec

MEDIAN, SIGMA, LONGEST, PROMPT, SEED = 64, 0.9, 768, 8, 0
PADDED_ROWS, CAP = 16, 8192
BAR = 2.5
LEAST_OF_PACKED = 0.9
"""The learner's tokens per second, of those of the bare packed loop."""
STAGES = {"learner_stage1": 1, "learner_stage2": 2}
"""Variant of the learner → its learner.zero_stage."""
LEAST_OF_STAGES = 0.92
"""The same as LEAST_OF_PACKED, for the faster of these variants at `tiny`."""
IDS, MASK = pa.list_(pa.int32()), pa.list_(pa.bool_())
MODELS = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 32,
    },
    "medium": {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 11,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 16384,
    },
}
"""Qwen3 shapes; medium has 50 million parameters."""
LOSS_TOLERANCE = 1e-4
"""Relative. All variants compute the same loss of the same rows, in float32."""
TURNS = {"tiny": 3, "medium": 1}
WARM_UP_ROWS = 16
TRIAL_ROWS = {"tiny": 512, "medium": 32}
"""Rows with which one thread is compared with two."""
VARIANTS = ("padded", "packed", "learner")
"""The variants that are measured by default. The bar compares the first two."""
UNPACKED = {"unpacked": "packed", "learner_unpacked": "learner"}
"""Variant with one trajectory per forward → the same variant on packed rows."""


def main(arguments: list[str]) -> int:
    """Measure and print. The exit code is 0 if packed trains at least 2.5 times the tokens per
    second of padded, the learner at least 0.9 times those of packed, and the losses agree."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learner")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--prompts", help="compare groups with prompts of these tokens instead")
    parser.add_argument(
        "--only", nargs=4, metavar=("VARIANT", "PATH", "THREADS", "ROWS"), help=argparse.SUPPRESS
    )
    options = parser.parse_args(arguments)
    if options.only:
        variant, path, threads, rows = options.only
        print(
            json.dumps(
                measure(variant, path, int(threads), seeded_rows(int(rows), _vocabulary(path)))
            )
        )
        return 0
    if options.prompts:
        from benchmarks.long_prompts import compare_prompts

        prompts = [int(tokens) for tokens in options.prompts.split(",")]
        return 0 if compare_prompts(options.models.split(","), prompts) else 1
    lengths = [len(prompt) + len(following) for prompt, following in seeded_rows(options.rows, 32)]
    padded = sum(
        max(lengths[at : at + PADDED_ROWS]) * len(lengths[at : at + PADDED_ROWS])
        for at in range(0, len(lengths), PADDED_ROWS)
    )
    print(
        f"{len(lengths)} rows, {sum(lengths):,} tokens: median {statistics.median(lengths):g}, mean"
        f" {statistics.mean(lengths):.0f}, largest {max(lengths)}, seed {SEED}; padded in order by"
        f" {PADDED_ROWS}: {padded:,} tokens, {padded / sum(lengths):.2f} times as many"
    )
    missed = []
    with tempfile.TemporaryDirectory(prefix="asyncrl_bench_") as folder:
        for model in options.models.split(","):
            if not compare(
                model,
                save_model(model, Path(folder) / model),
                options.rows,
                tuple(options.variants.split(",")),
            ):
                missed.append(model)
    print(
        f"bar missed by {', '.join(missed)}"
        if missed
        else (
            f"bars met: the same loss and, where both were measured, packed at least {BAR:g} times"
            f" padded, and the learner at least {LEAST_OF_PACKED:g} times packed"
        )
    )
    return 1 if missed else 0


def compare(model: str, path: str, rows: int, variants: tuple[str, ...] = VARIANTS) -> bool:
    """Print one model's table, and return whether the bars are met."""
    threads = {}
    for variant in variants:
        trials = {
            count: run(variant, path, count, min(TRIAL_ROWS[model], rows))["tokens_per_s"]
            for count in (1, 2)
        }
        threads[variant] = max(trials, key=lambda count: trials[count])
    turns = [
        {variant: run(variant, path, threads[variant], rows) for variant in variants}
        for _ in range(TURNS[model])
    ]
    found = {
        variant: max((turn[variant] for turn in turns), key=lambda result: result["tokens_per_s"])
        for variant in variants
    }
    print(
        f"\n{model}: {found[variants[0]]['parameters'] / 1e6:.1f} M parameters, best of"
        f" {TURNS[model]}"
    )
    print(f"{'':<17}{'trained tokens/s':>18}{'of ' + variants[0]:>12}{'threads':>9}{'loss':>9}")
    for variant, result in found.items():
        ratio = result["tokens_per_s"] / found[variants[0]]["tokens_per_s"]
        print(
            f"{variant:<17}{result['tokens_per_s']:>18,.0f}{ratio:>11.2f}x{threads[variant]:>9}{result['loss']:>9.4f}"
        )
    speed = {variant: result["tokens_per_s"] for variant, result in found.items()}
    if speed.keys() >= {"packed", "learner"}:
        print(
            f"DeepSpeed ZeRO-3 at world size 1 costs {speed['packed'] / speed['learner'] - 1:+.0%}"
            " of the time of the same packed step without it:"
            f" {speed['learner'] / speed['packed']:.2f} of its speed (bar {LEAST_OF_PACKED:g})"
        )
    for alone, together in UNPACKED.items():
        if speed.keys() >= {alone, together}:
            cpu = max(turn[alone]["tokens_per_cpu_s"] for turn in turns) / max(
                turn[together]["tokens_per_cpu_s"] for turn in turns
            )
            print(
                f"{alone}: {speed[alone] / speed[together]:.2f} of the tokens per second of"
                f" {together}, {cpu:.2f} of those per second of CPU"
            )
    same = losses_agree([result["loss"] for turn in turns for result in turn.values()])
    if not same:
        print(
            f"the variants' losses differ by more than {LOSS_TOLERANCE:g}: they do not compute the"
            " same function"
        )
    held = same
    if speed.keys() >= {"padded", "packed"}:
        held = held and speed["packed"] >= BAR * speed["padded"]
    if speed.keys() >= {"packed", "learner"}:
        held = held and speed["learner"] >= LEAST_OF_PACKED * speed["packed"]
    if "packed" in speed and (staged := {name: speed[name] for name in STAGES if name in speed}):
        for name, of_stage in staged.items():
            print(f"{name}: {of_stage / speed['packed']:.2f} of packed")
        held = held and (
            model != "tiny" or max(staged.values()) >= LEAST_OF_STAGES * speed["packed"]
        )
    return held


def losses_agree(losses: list[float]) -> bool:
    """Whether all losses equal the first one to LOSS_TOLERANCE. NaN never does."""
    return all(abs(loss - losses[0]) <= LOSS_TOLERANCE * abs(losses[0]) for loss in losses)


def run(variant: str, path: str, threads: int, rows: int) -> dict[str, float]:
    """Call `measure` in a separate process."""
    command = [
        sys.executable,
        "-m",
        __spec__.name,
        "--only",
        variant,
        path,
        str(threads),
        str(rows),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "DS_ACCELERATOR": "cpu",
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    }
    return json.loads(
        subprocess.run(
            command, check=True, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ).stdout.splitlines()[-1]
    )


def measure(variant: str, path: str, threads: int, rows: list) -> dict[str, float]:
    """Trained tokens per second, and per CPU second, of one step after a warm-up step. Both steps
    have learning rate 0, which costs the same and leaves the model, and so its loss, unchanged."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    packing = "none" if variant in UNPACKED else "rows"
    made = {
        "padded": padded_step,
        "packed": packed_step,
        "learner": learner_step,
        **{name: partial(learner_step, zero_stage=stage) for name, stage in STAGES.items()},
    }[UNPACKED.get(variant, variant)]
    step, parameters = made(path, threads) if made is padded_step else made(path, threads, packing)
    step(rows[:WARM_UP_ROWS], 0.0)
    began, spent = time.perf_counter(), time.process_time()
    loss = step(rows, 0.0)
    seconds, spent = time.perf_counter() - began, time.process_time() - spent
    trained = sum(len(following) for _, following in rows)
    return {
        "tokens_per_s": trained / seconds,
        "tokens_per_cpu_s": trained / spent,
        "loss": loss,
        "parameters": parameters,
    }


def padded_step(path: str, threads: int):
    """The step of a plain loop, (rows, learning rate) → loss, and the number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    optimizer = _adamw(model)

    def step(rows: list, learning_rate: float) -> float:
        targets, total = sum(len(following) for _, following in rows), 0.0
        for at in range(0, len(rows), PADDED_ROWS):
            chosen = rows[at : at + PADDED_ROWS]
            longest = max(len(prompt) + len(following) for prompt, following in chosen)
            ids, labels, mask = (
                torch.zeros(len(chosen), longest, dtype=torch.long),
                torch.full((len(chosen), longest), -100),
                torch.zeros(len(chosen), longest),
            )
            for place, (prompt, following) in enumerate(chosen):
                length = len(prompt) + len(following)
                ids[place, :length] = torch.tensor([*prompt, *following])
                labels[place, len(prompt) : length] = torch.tensor(following)
                mask[place, :length] = 1
            logits = (
                model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
            )
            loss = (
                torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
                )
                / targets
            )
            loss.backward()
            total += loss.item()
        _apply(model, optimizer, learning_rate)
        return total

    return step, sum(parameter.numel() for parameter in model.parameters())


def packed_step(path: str, threads: int, packing: str):
    """The same with asyncrl's policy, on packed rows or with one trajectory per forward."""
    import torch

    from asyncrl.algorithms import supervised_loss, token_weights
    from asyncrl.learning import pack, pack_shared
    from asyncrl.models import load_policy, micro_batch, token_example

    policy = load_policy(path, torch.float32, 1.0, packing=packing)
    optimizer = _adamw(policy)

    def step(rows: list, learning_rate: float) -> float:
        examples, total = [token_example(row) for row in rows], 0.0
        weights = token_weights([example.loss_tokens for example in examples], "token_mean", 1)
        tokens = [example.tokens for example in examples]
        alone = packing == "none"
        plan = (
            pack(list(map(len, tokens)), CAP, one_each=True) if alone else pack_shared(tokens, CAP)
        )
        for indices in plan.micro_batches[0]:
            batch = micro_batch(examples, indices, "cpu", weights)
            loss, _ = supervised_loss(policy(batch)[0], batch.weights)
            loss.backward()
            total += loss.item()
        _apply(policy, optimizer, learning_rate)
        return total

    return step, sum(parameter.numel() for parameter in policy.parameters())


def token_table(rows: list) -> pa.Table:
    """The rows of (prompt ids, target ids) as the learner takes them."""
    masks = [[False] * len(prompt) + [True] * len(target) for prompt, target in rows]
    return pa.table(
        {
            "input_ids": pa.array([[*prompt, *target] for prompt, target in rows], IDS),
            "loss_mask": pa.array(masks, MASK),
        }
    )


def learner_step(path: str, threads: int, packing: str, zero_stage: int = 3):
    """The same with the learner's rank."""
    from asyncrl.config import Config
    from asyncrl.learning import Meeting, start_rank

    tree = {
        "name": "bench",
        "max_steps": 1,
        "model": {"path": path},
        "data": {"train": "none", "max_prompt_length": PROMPT},
        "rollout": {"max_completion_length": LONGEST},
        "reward": {"functions": {"none": {"function": "none:none"}}},
        "learner": {
            "packing": packing,
            "zero_stage": zero_stage,
            "max_tokens_per_gpu": CAP,
            "num_threads": threads,
            "optimizer": {"name": "adamw", "betas": [0.9, 0.95]},
        },
    }
    spec = learner_spec(Config.model_validate(tree))
    rank, _ = start_rank(0, spec, "bench", 0, Meeting.at("127.0.0.1"), "127.0.0.1")

    def step(rows: list, learning_rate: float) -> float:
        rank.set_learning_rate(learning_rate)
        return rank.supervised_step(token_table(rows))["loss"]

    return step, sum(int(parameter.ds_numel) for parameter in rank.state.parameters.values())


def _adamw(model):
    import torch

    return torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)


def _apply(model, optimizer, learning_rate: float) -> None:
    import torch

    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.param_groups[0]["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()


def seeded_rows(count: int, vocabulary: int) -> list:
    """(prompt ids, following ids) of each row; the prompt has PROMPT tokens."""
    generator = np.random.default_rng(SEED)
    lengths = np.clip(
        generator.lognormal(np.log(MEDIAN), SIGMA, count), PROMPT + 1, LONGEST
    ).astype(int)
    rows = [generator.integers(0, vocabulary, length).tolist() for length in lengths]
    return [(row[:PROMPT], row[PROMPT:]) for row in rows]


def save_model(name: str, path: Path) -> str:
    """Save a seeded random Qwen3, and return its path."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    shape = MODELS[name]
    config = Qwen3Config(
        **shape,
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return str(path)


def _vocabulary(path: str) -> int:
    return json.loads((Path(path) / "config.json").read_text())["vocab_size"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
