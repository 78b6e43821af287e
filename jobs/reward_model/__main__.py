"""A reward model that chooses among a model's own completions, end to end, with controls.

    python -m jobs.reward_model [--seeds 0,1,2] [--runs rewards,…] [--section.field value …]

The start model and its scored groups are those of jobs.dpo. For each seed, the reward model learns
the best against the worst of each group. It then chooses one of eight completions of each held-out
prompt. The table compares it with a random choice, with the completion of the highest log-prob, and
with the best choice that was possible. The controls train the same groups with rewards shuffled
within each group, and with the shorter completion as the better one. An untrained reward model
gives every completion the same score, so its choice is the random one. Finished runs are read, not
repeated.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from asyncrl.rundir import Run, open_run
from jobs.dpo.__main__ import CONTROLS, SAMPLES, data_of, groups_for, samples_of, start_of
from jobs.runs import finish, job_parser
from jobs.sft.__main__ import inputs

CONFIG = Path(__file__).parent / "reward_model.yaml"
KINDS = ("rewards", *CONTROLS)
CANDIDATES = ["--rollout.rollout_batch_size", "64", "--max_steps", "16"]
"""A run of this length samples each of the 1,024 held-out prompts once."""
ROWS = 512
"""Sequences that are scored at once."""


def main() -> int:
    """Run what is missing, print a table, and return the exit code."""
    parser = job_parser(main.__doc__, KINDS)
    known, overrides = parser.parse_known_args()
    lines = [f"{'choice of one in eight':<30}{'accuracy':>12}{'ties':>10}"]
    for seed in known.seeds:
        start, samples = start_of(seed), samples_of(seed)
        candidates = samples.parent / f"reward-model-candidates-{seed}"
        held_out = ["--data.train", str(inputs(seed) / "held_out.parquet"), *CANDIDATES]
        sampling = ["--model.path", str(start), *data_of(seed), *held_out]
        finish("train", SAMPLES, candidates, sampling)
        groups = open_run(candidates)
        lines += _without_model(groups, seed)
        for kind in known.runs:
            run = samples.parent / f"reward-model-{kind}-{seed}"
            arguments = ["--seed", str(seed), "--model.path", str(start)]
            arguments += ["--data.train", groups_for(samples, kind, seed)]
            # Shuffled rewards and equal lengths may choose two equal completions.
            arguments += ["--data.malformed", "drop", *overrides]
            finish("reward_model", CONFIG, run, arguments)
            lines.append(_line(run.name, groups, scores(run / "hf", groups)))
    print("\n" + "\n".join(lines))
    return 0


def scores(model: Path, groups: Run) -> list[list[float]]:
    """The reward model's score of each completion of each group."""
    scorer = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    table = groups.groups()
    sequences = [
        [*prompt, *completion]
        for prompt, completions in zip(
            table["prompt_ids"].to_pylist(), table["completion_ids"].to_pylist(), strict=True
        )
        for completion in completions
    ]
    found: list[float] = []
    for start in range(0, len(sequences), ROWS):
        part = sequences[start : start + ROWS]
        longest, padding = max(map(len, part)), scorer.config.pad_token_id
        ids = torch.tensor([[*row, *[padding] * (longest - len(row))] for row in part])
        mask = torch.arange(longest) < torch.tensor([[len(row)] for row in part])
        with torch.no_grad():
            found += scorer(ids, attention_mask=mask.long()).logits[:, 0].tolist()
    values = iter(found)
    return [[next(values) for _ in group] for group in table["completion_ids"].to_pylist()]


def _without_model(groups: Run, seed: int) -> list[str]:
    """The choices without a reward model."""
    rewards = groups.groups()["reward"].to_pylist()
    logprobs = [
        [sum(values) for values in group] for group in groups.groups()["logprobs"].to_pylist()
    ]
    return [
        _line(f"random-{seed}", groups, [[0.0] * len(group) for group in rewards]),
        _line(f"log-prob-{seed}", groups, logprobs),
        _line(f"best possible-{seed}", groups, rewards),
    ]


def _line(name: str, groups: Run, values: list[list[float]]) -> str:
    """The mean reward of the completions with the highest value. Ties share their choice."""
    chosen, ties = [], 0
    for rewards, group in zip(groups.groups()["reward"].to_pylist(), values, strict=True):
        best = [reward for reward, value in zip(rewards, group, strict=True) if value == max(group)]
        chosen.append(sum(best) / len(best))
        ties += len(best) > 1
    return f"{name:<30}{sum(chosen) / len(chosen):>12.1%}{ties / len(chosen):>10.1%}"


if __name__ == "__main__":
    sys.exit(main())
