"""Makes prompts with instructions that a program can check, and grades answers to them.

    python -m jobs.smollm.task FOLDER [--seed 0]

An answer passes if it follows every instruction of its prompt: the strict accuracy of IFEval. Every
prompt also asks for at least eight words and for the name of its subject. Both are checked, because
an answer such as "no" would otherwise follow most instructions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.smollm.answers import answer
from jobs.smollm.instructions import KINDS, LEAST_WORDS, follows
from jobs.smollm.subjects import HELD_OUT_SUBJECTS, SUBJECTS

Instruction = dict[str, Any]
"""`kind`, `id` (the checker) and `kwargs` (its parameters)."""
ALWAYS = ("words", "subject")
"""Kinds of instructions that every prompt has."""
NOT_TOGETHER = frozenset(
    (
        frozenset(("ending", "postscript")),  # both are the end
        frozenset(("bullets", "highlight")),  # both are asterisks
        frozenset(("bullets", "few_words")),
    )
)
HELD_OUT_PAIRS = frozenset(
    (
        frozenset(("no_comma", "ending")),
        frozenset(("no_comma", "title")),
        frozenset(("title", "keyword")),
        frozenset(("bullets", "postscript")),
        frozenset(("few_words", "placeholder")),
        frozenset(("keyword", "highlight")),
    )
)
"""Pairs of kinds that training never sees together. It sees each of the kinds."""
SETS = ("train", "held_out", "held_out_pairs")
MANY_WORDS = 40
PAIRS = 4
"""Pairs of kinds of each subject, at most. Each subject has all single kinds."""


def make_data(directory: Path, seed: int) -> dict[str, int]:
    """Write train.parquet, held_out.parquet (subjects of their own) and held_out_pairs.parquet
    (subjects and pairs of kinds of their own). Returns their numbers of rows.

    Columns: `prompt` (a chat), `instructions` (JSON text: a list of `kind`, `id` and `kwargs`),
    `kinds` (their names, with +), `subject`, and `reference_answer`, which follows all of them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    counts = {}
    for name in SETS:
        rows = rows_of(name, seed)
        unfinished = directory / f".{name}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), unfinished)
        unfinished.rename(directory / f"{name}.parquet")
        counts[name] = len(rows)
    return counts


def rows_of(name: str, seed: int) -> list[dict[str, Any]]:
    """The rows of one of SETS, shuffled."""
    draw = Random(f"{seed} {name}")
    rows = [
        _row(subject, kinds, draw)
        for subject in SUBJECTS
        if (subject in HELD_OUT_SUBJECTS) == (name != "train")
        for kinds in _combinations(name, draw)
    ]
    draw.shuffle(rows)
    return rows


def _combinations(name: str, draw: Random) -> list[tuple[str, ...]]:
    """The combinations of kinds of one subject: all single kinds and some pairs, or held-out
    pairs."""
    pairs = [pair for pair in combinations(KINDS, 2) if frozenset(pair) not in NOT_TOGETHER]
    if name == "held_out_pairs":
        return [pair for pair in pairs if frozenset(pair) in HELD_OUT_PAIRS]
    trained = [pair for pair in pairs if frozenset(pair) not in HELD_OUT_PAIRS]
    return [*((kind,) for kind in KINDS), *draw.sample(trained, PAIRS)]


def _row(subject: str, kinds: Sequence[str], draw: Random) -> dict[str, Any]:
    text = [f"Write two short sentences about {subject}, with at least {LEAST_WORDS} words."]
    instructions = always(subject)
    for kind in kinds:
        kwargs = KINDS[kind].parameters(draw)
        text.append(KINDS[kind].text.format(**kwargs))
        instructions.append({"kind": kind, "id": KINDS[kind].checker, "kwargs": kwargs})
    return {
        "prompt": [{"role": "user", "content": " ".join(text)}],
        "instructions": json.dumps(instructions),
        "kinds": "+".join(kinds),
        "subject": subject,
        "reference_answer": answer(subject, instructions, draw),
    }


def always(subject: str) -> list[Instruction]:
    """The instructions of every prompt about this subject."""
    words = {"num_words": LEAST_WORDS, "relation": "at least"}
    named = {"keywords": [SUBJECTS[subject]]}
    return [
        {"kind": "words", "id": "length_constraints:number_words", "kwargs": words},
        {"kind": "subject", "id": "keywords:existence", "kwargs": named},
    ]


def strict(
    completions: Sequence[str], instructions: Sequence[str], packages: str, **_: object
) -> dict[str, list[float | None]]:
    """1.0 where an answer follows all instructions of its prompt, else 0.0. Each kind is a part:
    whether the answer follows it, and None where the prompt does not ask for it.

    Args:
        packages: the folder with the checkers.
    """
    judged = [
        judge(text, json.loads(given), packages)
        for text, given in zip(completions, instructions, strict=True)
    ]
    parts = {kind: [one.get(kind) for one in judged] for kind in (*ALWAYS, *KINDS)}
    return {"reward": [float(all(one.values())) for one in judged], **parts}


def length(completions: Sequence[str], **_: object) -> list[float]:
    """A control: the number of words, up to MANY_WORDS, whatever the prompt asks for."""
    return [min(len(text.split()) / MANY_WORDS, 1.0) for text in completions]


def judge(answer: str, instructions: Sequence[Instruction], packages: str) -> dict[str, float]:
    """Whether an answer follows each instruction, by its kind."""
    return {
        one["kind"]: float(follows(packages, one["id"], one["kwargs"], answer))
        for one in instructions
    }


def main() -> None:
    """Write the data to a folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    counts = make_data(arguments.folder, arguments.seed)
    print(f"{arguments.folder}: " + ", ".join(f"{name} {rows:,}" for name, rows in counts.items()))


if __name__ == "__main__":
    main()
