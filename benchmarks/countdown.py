"""The task of `benchmarks.stale_learning`: count down, with a letter beside each number.

The prompt `bgCF57=` asks for `57b56b…20b19C…1C`: beside a number of at least SWITCH stands the
first of the two small letters, and beside one below it the first of the two capitals. Starts are
lognormal, so most completions are short and have no small letter. Only long ones teach which one is
right, and only in their first part, which is what `staleness.on_stale: mask` leaves out. In the
warm start, the letter is a random one of the two.
"""

from __future__ import annotations

import argparse
import math
import random
import re
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.guess.task import embed_as_waves

SMALL, CAPITAL = ("abcd", "efgh"), ("ABCD", "EFGH")
"""Right and wrong letters, of which a prompt has one each."""
LONGEST, SWITCH = 150, 20
"""Largest start; least number with a small letter."""
MEDIAN, SIGMA = 14, 1.0
"""Of the lognormal starts. A completion has two tokens for each number, and its end."""
TRAIN_ROWS, HELD_OUT_ROWS, WARM_START_ROWS = 6000, 512, 12_800
HELD_OUT_LETTERS = 32
"""Combinations of letters that training never sees, of 256."""
SPECIAL_TOKENS = ("<pad>", "<unk>", "<eos>")
NUMBERS = range(1, LONGEST + 1)
WORDS = ("=", *"".join(SMALL + CAPITAL), *map(str, NUMBERS))
ITEM = re.compile(r"(\d+)([a-hA-H])")


def answer(letters: str, start: int) -> str:
    """The right completion."""
    return "".join(f"{number}{right_letter(letters, number)}" for number in range(start, 0, -1))


def right_letter(letters: str, number: int) -> str:
    """The letter beside a number, of a prompt's four."""
    return letters[0 if number >= SWITCH else 2]


def letters_right(
    completions: Sequence[str], letters: Sequence[str], start: Sequence[int], **_: object
) -> dict[str, list[float | None]]:
    """The reward: share of the numbers that have the right letter where they first appear. Numbers
    that should not be there, or appear again, count as wrong ones. Parts: the same over the numbers
    from SWITCH (`first_part`), and below it (`last_part`), without those that should not be there;
    None where the start has no such number."""
    found: dict[str, list[float | None]] = {"reward": [], "first_part": [], "last_part": []}
    for text, of_prompt, first in zip(completions, letters, start, strict=True):
        items = ITEM.findall(text)
        given = dict(reversed(items))
        right = [
            given.get(str(number)) == right_letter(of_prompt, number)
            for number in range(first, 0, -1)
        ]
        above = max(0, first - SWITCH + 1)
        found["reward"].append(sum(right) / max(first, len(items)))
        found["first_part"].append(_mean(right[:above]))
        found["last_part"].append(_mean(right[above:]))
    return found


def _mean(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None


def make_model(directory: Path, seed: int) -> None:
    """Write a tiny Qwen3 (random weights from `seed`) and its tokenizer as a Hugging Face
    checkpoint. The embeddings of near numbers begin alike, as those of a trained model are."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    end = SPECIAL_TOKENS.index("<eos>")
    config = Qwen3Config(
        vocab_size=192,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        initializer_range=0.08,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=SPECIAL_TOKENS.index("<pad>"),
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    embed_as_waves(model, NUMBERS, len(SPECIAL_TOKENS) + WORDS.index(str(NUMBERS[0])), longest=600)
    model.generation_config = GenerationConfig(
        eos_token_id=end, pad_token_id=config.pad_token_id, do_sample=True
    )
    model.save_pretrained(directory)
    _tokenizer().save_pretrained(directory)


def _tokenizer() -> Any:
    """One token for each number and letter."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d+|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def make_data(directory: Path, seed: int) -> None:
    """Write train.parquet and warm_start.parquet, and the held-out prompts: all.parquet, and its
    quarters with the shortest and the longest answers as short.parquet and long.parquet.

    Columns: `prompt`, `letters`, `start`, and `answer` in warm_start.parquet."""
    draw = random.Random(seed)
    combinations = ["".join(letters) for letters in product(*SMALL, *CAPITAL)]
    draw.shuffle(combinations)
    held_out, train = combinations[:HELD_OUT_LETTERS], combinations[HELD_OUT_LETTERS:]
    rows = [_row(draw.choice(held_out), _long_tailed(draw)) for _ in range(HELD_OUT_ROWS)]
    short, long = quarters_by_length(rows)
    tables = {
        "train": [_row(draw.choice(train), _long_tailed(draw)) for _ in range(TRAIN_ROWS)],
        "warm_start": [_noisy_row(draw.choice(train), draw) for _ in range(WARM_START_ROWS)],
        "all": rows,
        "short": short,
        "long": long,
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        unfinished = directory / f".{name}.parquet"
        pq.write_table(pa.Table.from_pylist(table), unfinished)
        unfinished.rename(directory / f"{name}.parquet")


def quarters_by_length(rows: Iterable[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """The quarters of the rows with the smallest and the largest starts."""
    ordered = sorted(rows, key=lambda row: row["start"])
    quarter = len(ordered) // 4
    return ordered[:quarter], ordered[-quarter:]


def _long_tailed(draw: random.Random) -> int:
    return max(1, min(LONGEST, round(draw.lognormvariate(math.log(MEDIAN), SIGMA))))


def _row(letters: str, start: int) -> dict[str, Any]:
    return {"prompt": f"{letters}{start}=", "letters": letters, "start": start}


def _noisy_row(letters: str, draw: random.Random) -> dict[str, Any]:
    """A row of the warm start: the right numbers, each with a random one of the two letters."""
    start = draw.choice((draw.choice(NUMBERS), _long_tailed(draw)))
    text = "".join(
        f"{number}{draw.choice(letters[:2] if number >= SWITCH else letters[2:])}"
        for number in range(start, 0, -1)
    )
    return {**_row(letters, start), "answer": text}


def main() -> None:
    """Write the model and the data to a directory."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_model(arguments.directory / "model", arguments.seed)
    make_data(arguments.directory, arguments.seed)


if __name__ == "__main__":
    main()
