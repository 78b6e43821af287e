"""Makes the inputs of the game: a tiny Qwen3 with a tokenizer of its own, tasks with ranges that
training never sees held out, and games of a mediocre player for the warm start."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.guess.game import GUESSES, WIDTH, answer, call, question

__all__ = ["make_data", "make_model"]

LOWS = range(10, 37)
"""First numbers of the ranges. All numbers have two digits."""
HELD_OUT_LOWS = (13, 18, 24, 29, 33)
GAMES = 16_000
PLACE, SPREAD = 0.25, 0.12
"""Where the mediocre player guesses, as shares of the range that is left: mean and deviation."""
SPECIAL_TOKENS = (
    "<pad>",
    "<unk>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
)
WORDS = (
    "user\n",
    "assistant\n",
    "tool\n",
    "higher",
    "lower",
    "right",
    "..",
    '{"name": "guess", "arguments": {"number": ',
    "}}",
    "\n",
    " ",
    *"0123456789",
)
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
LONGEST = 160
"""Tokens of a game with six guesses, and some to spare."""


def make_model(directory: Path, seed: int) -> int:
    """Write a tiny Qwen3 (random weights from `seed`) and its tokenizer as a Hugging Face
    checkpoint, and return its number of parameters."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    end = SPECIAL_TOKENS.index("<|im_end|>")
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        initializer_range=0.08,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=SPECIAL_TOKENS.index("<pad>"),
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=end, pad_token_id=config.pad_token_id, do_sample=True
    )
    model.save_pretrained(directory)
    _tokenizer().save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def make_data(directory: Path, seed: int) -> tuple[int, int]:
    """Write train.parquet and held_out.parquet, the tasks, and games.jsonl, which a mediocre
    player played. Returns the numbers of training and held-out tasks.

    A task has `prompt`, `low` and `hidden`. The held-out ones have ranges of their own.
    """
    draw = random.Random(seed)
    tasks = [(low, low + place) for low in LOWS for place in range(WIDTH)]
    draw.shuffle(tasks)
    held_out = [task for task in tasks if task[0] in HELD_OUT_LOWS]
    train = [task for task in tasks if task[0] not in HELD_OUT_LOWS]
    directory.mkdir(parents=True, exist_ok=True)
    games = [{"messages": _game(*draw.choice(train), draw)} for _ in range(GAMES)]
    (directory / "games.jsonl").write_text("".join(f"{json.dumps(game)}\n" for game in games))
    for name, rows in (("train", train), ("held_out", held_out)):
        unfinished = directory / f".{name}.parquet"
        pq.write_table(_tasks(rows), unfinished)
        unfinished.rename(directory / f"{name}.parquet")
    return len(train), len(held_out)


def _tasks(tasks: list[tuple[int, int]]) -> pa.Table:
    rows = [{"prompt": question(low), "low": low, "hidden": hidden} for low, hidden in tasks]
    return pa.Table.from_pylist(rows)


def _game(low: int, hidden: int, draw: random.Random) -> list[dict[str, Any]]:
    """The messages of a game of a mediocre player. It guesses about a quarter into the range that
    is left, instead of in its middle, and wins about half of its games."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question(low)}]
    first, last = low, low + WIDTH - 1
    for _ in range(GUESSES):
        wide = last - first
        number = round(draw.gauss(first + PLACE * wide, SPREAD * (wide + 1)))
        number = min(last, max(first, number))
        messages.append({"role": "assistant", "content": "", "tool_calls": [call(number)]})
        said = answer(number, hidden)
        if said == "right":
            break
        messages.append({"role": "tool", "content": said})
        first, last = (number + 1, last) if said == "higher" else (first, number - 1)
    if messages[-1]["role"] == "tool":
        messages.pop()
    return messages


def _tokenizer() -> Any:
    """One token for each digit and for each word of the game."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words = "|".join(_escaped(word) for word in sorted(WORDS, key=len, reverse=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{words}|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )
    marks = [AddedToken(mark, special=True) for mark in SPECIAL_TOKENS[2:]]
    found.add_special_tokens({"additional_special_tokens": marks})
    found.chat_template = CHAT_TEMPLATE
    return found


def _escaped(word: str) -> str:
    return "".join(f"\\{one}" if one in '.{}"' else one for one in word)


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
        f" {held_out:,} held-out tasks, {GAMES:,} games"
    )


if __name__ == "__main__":
    main()
