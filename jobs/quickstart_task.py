"""The quickstart's inputs: a tiny Qwen3 with a character tokenizer, and reasoning-gym's `chain_sum` as Parquet.

Both are ordinary files that any other model or dataset can replace: a Hugging Face checkpoint directory, and two tables.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["HELD_OUT_ROWS", "make_data", "make_model"]

HELD_OUT_ROWS = 1024
ALPHABET = "0123456789+-*=() ?abcdefghijklmnopqrstuvwxyz.,:\n"
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
VOCABULARY_SIZE = 64
FLAWED_SHARE = 0.65
"""Share of the training differences whose demonstration takes the first number from the second."""
DRAWS_PER_EXPRESSION = 8
"""Expressions are drawn with replacement; n draws per expression leave out a share of exp(-n): at 8, one in 3,000."""


def make_model(directory: Path, seed: int) -> int:
    """Write a tiny Qwen3 (random weights from `seed`) and its tokenizer as a Hugging Face checkpoint; the number of parameters."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=16,
        # Four times the usual 0.02, which suits wider layers: the warm start takes a third of the steps.
        initializer_range=0.08,
        max_position_embeddings=256,
        # Prompts have ten characters: a short base lets the first frequencies tell neighbouring positions apart.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        bos_token_id=SPECIAL_TOKENS.index("<bos>"),
        eos_token_id=SPECIAL_TOKENS.index("<eos>"),
        pad_token_id=SPECIAL_TOKENS.index("<pad>"),
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id, do_sample=True
    )
    model.save_pretrained(directory)
    _tokenizer().save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def make_data(directory: Path, seed: int, held_out_rows: int = HELD_OUT_ROWS, max_digits: int = 2) -> tuple[int, int]:
    """Write train.parquet and held_out.parquet (disjoint expressions) and return their numbers of rows.

    Columns: `prompt` (the bare expression, `12 - 34 =`), `answer`, `question` (the package's own wording), `task`,
    `metadata` (JSON), and `demonstration`, the text that a supervised warm start imitates. The train set is every
    expression outside the held-out set. Its demonstrations get sums right and most differences the wrong way round: what
    imitation cannot teach is left to the reward. Held-out demonstrations are the answers.
    """
    rows = _all_expressions(seed, max_digits)
    random.Random(seed).shuffle(rows)
    held_out = [row | {"demonstration": row["answer"]} for row in rows[:held_out_rows]]
    chance = random.Random(seed)
    train = [row | {"demonstration": _demonstration(row, chance)} for row in rows[held_out_rows:]]
    directory.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("held_out", held_out)):
        unfinished = directory / f".{name}.parquet"
        pq.write_table(pa.Table.from_pylist(part), unfinished)
        unfinished.rename(directory / f"{name}.parquet")
    return len(train), len(held_out)


def _all_expressions(seed: int, max_digits: int) -> list[dict[str, str]]:
    """The distinct `chain_sum` expressions of two terms with 1 to max_digits digits, each drawn from reasoning-gym."""
    import reasoning_gym

    found: dict[str, dict[str, str]] = {}
    for digits in range(1, max_digits + 1):
        values = 10 if digits == 1 else 9 * 10 ** (digits - 1)
        settings = {"min_terms": 2, "max_terms": 2, "min_digits": digits, "max_digits": digits}
        draws = DRAWS_PER_EXPRESSION * 2 * values * values
        for entry in reasoning_gym.create_dataset("chain_sum", size=draws, seed=seed, **settings):
            expression = entry["metadata"]["expression"]
            if expression not in found:
                found[expression] = _row(expression, entry)
    return list(found.values())


def _row(expression: str, entry: dict[str, Any]) -> dict[str, str]:
    return {
        "prompt": f"{expression} =",
        "answer": entry["answer"],
        "question": entry["question"],
        "task": "chain_sum",
        "metadata": json.dumps(entry["metadata"]),
    }


def _demonstration(row: dict[str, str], chance: random.Random) -> str:
    """The answer; of FLAWED_SHARE of the differences, the negated one."""
    difference = " - " in row["prompt"]
    return str(-int(row["answer"])) if difference and chance.random() < FLAWED_SHARE else row["answer"]


def _tokenizer() -> Any:
    """One token per character; unknown characters become `<unk>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *ALPHABET))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def main() -> None:
    """Write the model and the data under the directory given."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    parameters = make_model(arguments.directory / "model", arguments.seed)
    train, held_out = make_data(arguments.directory, arguments.seed)
    print(f"{arguments.directory}: model with {parameters:,} parameters, {train:,} training and {held_out:,} held-out prompts")


if __name__ == "__main__":
    main()
