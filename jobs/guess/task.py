"""Makes the inputs of the game: a tiny Qwen3 with a tokenizer of its own, tasks with ranges that
training never sees held out, and games of a mediocre player for the warm start."""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.guess.game import WIDTH, call, question

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOWS = range(10, 37)
"""First numbers of the ranges. All numbers have two digits."""
HELD_OUT_LOWS = (13, 18, 24, 29, 33)
GAMES = 24_000
UNEVEN = (0.05, 0.25)
"""Shares of the range that is left which mediocre players cut off."""
LONGEST_GAME = 8
"""Most guesses of a game of a mediocre player."""
NUMBERS = range(LOWS.start, LOWS.stop + WIDTH - 1)
SPECIAL_TOKENS = ("<pad>", "<unk>", "<|im_end|>")
WORDS = (
    *(f"<|im_start|>{role}\n" for role in ("user", "assistant", "tool")),
    "higher",
    "lower",
    "right",
    "..",
    '<tool_call>{"name": "guess", "arguments": {"number": ',
    "}}</tool_call>",
    "\n",
    " ",
    *"0123456789",
    *map(str, NUMBERS),
)
"""A guess has four tokens: one for all before its number, the number, one for all after it, and
the end."""
WAVES = 16
"""Of the numbers' first embeddings."""
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


def make_model(directory: Path, seed: int) -> int:
    """Write a tiny Qwen3 (random weights from `seed`) and its tokenizer as a Hugging Face
    checkpoint, and return its number of parameters.

    The embeddings of numbers begin as waves of different lengths, so that near numbers are alike.
    A model that was trained on text knows that, too."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    end = SPECIAL_TOKENS.index("<|im_end|>")
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=256,
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
    embed_as_waves(model, NUMBERS, len(SPECIAL_TOKENS) + WORDS.index(str(NUMBERS[0])), longest=300)
    model.generation_config = GenerationConfig(
        eos_token_id=end, pad_token_id=config.pad_token_id, do_sample=True
    )
    model.save_pretrained(directory)
    _tokenizer().save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def embed_as_waves(
    model: PreTrainedModel, numbers: Sequence[int], first: int, longest: float
) -> None:
    """Make the embeddings of numbers begin as waves of several lengths, so that near numbers are
    alike.

    Args:
        first: the token id of the first number. The others follow.
        longest: wave length. The shortest is 4.
    """
    import torch

    lengths = torch.logspace(math.log10(4), math.log10(longest), WAVES)
    angles = torch.tensor(numbers)[:, None] * (2 * math.pi / lengths)
    waves = torch.cat([angles.cos(), angles.sin()], dim=1) * 2 * model.config.initializer_range
    embeddings = model.get_input_embeddings().weight.data[first : first + len(numbers)]
    embeddings *= 0.1
    embeddings[:, : waves.shape[1]] += waves


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
    lows = [low for low in LOWS if low not in HELD_OUT_LOWS]
    games = [{"messages": _game(draw.choice(lows), draw)} for _ in range(GAMES)]
    (directory / "games.jsonl").write_text("".join(f"{json.dumps(game)}\n" for game in games))
    for name, rows in (("train", train), ("held_out", held_out)):
        unfinished = directory / f".{name}.parquet"
        pq.write_table(_tasks(rows), unfinished)
        unfinished.rename(directory / f"{name}.parquet")
    return len(train), len(held_out)


def _tasks(tasks: list[tuple[int, int]]) -> pa.Table:
    rows = [{"prompt": question(low), "low": low, "hidden": hidden} for low, hidden in tasks]
    return pa.Table.from_pylist(rows)


def _game(low: int, draw: random.Random) -> list[dict[str, Any]]:
    """The messages of a game of a mediocre player. Each of its guesses is near one end of the range
    that is left, and never in the middle. No number is hidden: the answers are drawn, so that short
    ranges come early enough. They fit together, until only one number is left."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question(low)}]
    first, last = low, low + WIDTH - 1
    share = draw.uniform(*UNEVEN)
    for _ in range(LONGEST_GAME):
        number = round(first + draw.choice((share, 1 - share)) * (last - first))
        messages.append({"role": "assistant", "content": "", "tool_calls": [call(number)]})
        if first == last:
            return messages
        said = draw.choice(["higher"] * (number < last) + ["lower"] * (number > first))
        messages.append({"role": "tool", "content": said})
        first, last = (number + 1, last) if said == "higher" else (first, number - 1)
    return messages[:-1]


def _tokenizer() -> Any:
    """One token for each number and for each word of the game."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
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
    found.chat_template = CHAT_TEMPLATE
    return found


def _escaped(word: str) -> str:
    return "".join(f"\\{one}" if one in '.{}"|' else one for one in word)


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
