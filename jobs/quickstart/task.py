"""Makes the quickstart's inputs: a tiny Qwen3 with a character tokenizer, and reasoning-gym's
`chain_sum` as Parquet.

Both are ordinary files that any other model or dataset can replace: a Hugging Face checkpoint
directory, and two tables.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.config import Config, ConfigError

HELD_OUT_ROWS = 1024
ALPHABET = "0123456789+-*=() ?abcdefghijklmnopqrstuvwxyz.,:\n"
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
VOCABULARY_SIZE = 64
DRAWS_PER_SUM = 6
"""Expressions are drawn with replacement, half of them differences: 6 draws per sum leave out one
in twenty."""


def make_inputs(config: Config) -> None:
    """Make the model and data that the config names, unless they exist. A separate process makes
    them, because the driver does not load torch.

    Raises:
        ConfigError: they could not be made. The message includes the errors of that process.
    """
    directory = Path(config.data.train).parent
    if (directory / "held_out.parquet").exists() and Path(config.model.path).exists():
        return
    command = [sys.executable, "-m", __spec__.name, str(directory), "--seed", str(config.seed)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        raise ConfigError(
            f"the quickstart's inputs could not be made in {directory}:\n{made.stderr}"
        )
    print(made.stdout.strip().splitlines()[-1])


def make_model(directory: Path, seed: int) -> int:
    """Write a tiny Qwen3 (random weights from `seed`) and its tokenizer as a Hugging Face
    checkpoint, and return its number of parameters."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        # Four times the usual 0.02, which suits wider layers.
        initializer_range=0.08,
        max_position_embeddings=256,
        # Prompts have six characters, and a small base makes the first frequencies distinguish
        # neighboring positions.
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
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        do_sample=True,
    )
    model.save_pretrained(directory)
    _tokenizer().save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def make_data(
    directory: Path,
    seed: int,
    held_out_rows: int = HELD_OUT_ROWS,
    max_digits: int = 2,
    operator: Literal["+", "-"] = "+",
) -> tuple[int, int]:
    """Write train.parquet and held_out.parquet (disjoint expressions) and return their numbers of
    rows.

    Columns: `prompt` (the bare expression, `12+34=`), `answer`, `question` (the package's own
    wording), `task` and `metadata` (JSON). The train set is every expression drawn outside the
    held-out set.
    """
    rows = _expressions(seed, max_digits, operator)
    random.Random(seed).shuffle(rows)
    held_out, train = rows[:held_out_rows], rows[held_out_rows:]
    directory.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("held_out", held_out)):
        unfinished = directory / f".{name}.parquet"
        pq.write_table(pa.Table.from_pylist(part), unfinished)
        unfinished.rename(directory / f"{name}.parquet")
    return len(train), len(held_out)


def _expressions(seed: int, max_digits: int, operator: str) -> list[dict[str, str]]:
    """Distinct expressions of two terms with 1 to max_digits digits and this operator, drawn from
    reasoning-gym's `chain_sum`.

    One operator suffices: a model of this size then needs fewer steps, and the demo less than an
    hour.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of a package that it imports
        import reasoning_gym

    found: dict[str, dict[str, str]] = {}
    for digits in range(1, max_digits + 1):
        values = 10 if digits == 1 else 9 * 10 ** (digits - 1)
        settings = {"min_terms": 2, "max_terms": 2, "min_digits": digits, "max_digits": digits}
        for entry in reasoning_gym.create_dataset(
            "chain_sum", size=DRAWS_PER_SUM * values * values, seed=seed, **settings
        ):
            expression = entry["metadata"]["expression"]
            if operator in expression and expression not in found:
                found[expression] = _row(expression, entry)
    return list(found.values())


def _row(expression: str, entry: dict[str, Any]) -> dict[str, str]:
    return {
        "prompt": expression.replace(" ", "") + "=",
        "answer": entry["answer"],
        "question": entry["question"],
        "task": "chain_sum",
        "metadata": json.dumps(entry["metadata"]),
    }


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
    """Write the model and the data to a directory."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    parameters = make_model(arguments.directory / "model", arguments.seed)
    train, held_out = make_data(arguments.directory, arguments.seed)
    print(
        f"{arguments.directory}: model with {parameters:,} parameters, {train:,} training and"
        f" {held_out:,} held-out prompts"
    )


if __name__ == "__main__":
    main()
