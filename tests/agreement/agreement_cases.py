"""What TRL and asyncrl train in the tests of agreement: a tiny model, token rows, and the settings
of each case.

Both sides make the same model and rows from numpy's `RandomState`, whose streams are frozen. So no
weights are stored, and no version of torch matters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

STEPS, BATCH = 20, 8
"""Optimizer steps of each case, and rows (or pairs) of each step. Rows are in a fixed order, and
none is used twice."""
VOCABULARY, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 32, 64, 2, 4, 2, 8
PAD, UNKNOWN, EOS, FIRST = 0, 1, 2, 3
"""Ids of the special tokens, and of the first ordinary one. There is no BOS token."""
WEIGHT_SCALE = 0.2
"""Standard deviation of the initial weights."""
MEDIAN, SIGMA, LONGEST = 8, 1.1, 90
"""Lognormal lengths of completions, without their EOS."""
ADAM_BETAS, ADAM_EPS = (0.9, 0.95), 1e-8


@dataclass(frozen=True, slots=True)
class SftRow:
    """A text: ids, and whether each is a target. The first is not."""

    ids: tuple[int, ...]
    mask: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt with a preferred and a rejected completion."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unpaired:
    """A prompt with a completion that is desirable or not."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    label: bool


@dataclass(frozen=True, slots=True)
class Case:
    """One run of `STEPS` steps."""

    name: str
    trainer: str
    """TRL's trainer: sft, dpo, cpo or kto."""
    optimizer: str
    learning_rate: float
    max_grad_norm: float
    """Below the gradient norm of some steps, and above that of others."""
    schedule: str = "constant"
    """constant, or linear: from the learning rate in the first step down to a twentieth of it in
    the last."""
    micro_batches: int = 1
    """TRL's gradient accumulation: micro-batches of a step, with equal numbers of rows."""
    weight_decay: float = 0.0
    rows: str = "completions"
    """SFT rows: completions (a prompt and its completion), turns (several turns, some masked), or
    all (all tokens are targets)."""
    trl: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the loss, as TRL names them."""
    preference: Mapping[str, Any] = field(default_factory=dict)
    """The same for asyncrl's `DpoConfig`."""


CASES = {
    case.name: case
    for case in (
        Case("sft", "sft", "adamw", 1e-2, 2.2, "linear", 2, 0.1),
        Case("sft_sgd", "sft", "sgd", 0.2, 2.8),
        Case("sft_turns", "sft", "adamw", 1e-2, 1.9, micro_batches=4, rows="turns"),
        Case("sft_all_tokens", "sft", "sgd", 0.2, 2.0, micro_batches=4, rows="all"),
        Case(
            "dpo_sigmoid",
            "dpo",
            "adamw",
            5e-3,
            2.4,
            "linear",
            2,
            0.1,
            trl={"loss_type": ["sigmoid"], "beta": 0.1},
            preference={"loss": {"name": "sigmoid", "beta": 0.1}},
        ),
        Case(
            "dpo_sigmoid_sgd",
            "dpo",
            "sgd",
            0.03,
            7.0,
            trl={"loss_type": ["sigmoid"], "beta": 0.3},
            preference={"loss": {"name": "sigmoid", "beta": 0.3}},
        ),
        Case(
            # TRL has no label smoothing of the sigmoid loss. Its `aot` is that loss over sorted log
            # ratios, and one pair is always sorted.
            "dpo_smoothed",
            "dpo",
            "adamw",
            5e-3,
            1.9,
            micro_batches=BATCH,
            trl={"loss_type": ["aot"], "beta": 0.1, "label_smoothing": 0.1},
            preference={"loss": {"name": "sigmoid", "beta": 0.1, "label_smoothing": 0.1}},
        ),
        Case(
            "dpo_ipo",
            "dpo",
            "adamw",
            3e-3,
            50.0,
            trl={"loss_type": ["ipo"], "beta": 0.1},
            preference={"loss": {"name": "ipo", "beta": 0.1}},
        ),
        Case(
            "dpo_hinge",
            "dpo",
            "sgd",
            0.01,
            20.0,
            micro_batches=2,
            trl={"loss_type": ["hinge"], "beta": 0.5},
            preference={"loss": {"name": "hinge", "beta": 0.5}},
        ),
        Case(
            "dpo_normalized",
            "dpo",
            "adamw",
            3e-3,
            5.0,
            micro_batches=4,
            trl={"loss_type": ["sigmoid_norm"], "beta": 2.0},
            preference={"loss": {"name": "sigmoid", "beta": 2.0, "length_normalized": True}},
        ),
        Case(
            # TRL averages the chosen tokens of each micro-batch, so here a step is one.
            "dpo_with_sft",
            "dpo",
            "adamw",
            5e-3,
            3.6,
            trl={"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "beta": 0.1},
            preference={"loss": {"name": "sigmoid", "beta": 0.1}, "ce_coef": 0.5},
        ),
        Case(
            "simpo",
            "cpo",
            "adamw",
            3e-3,
            6.5,
            "linear",
            2,
            trl={"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0},
            preference={"loss": {"name": "simpo", "beta": 2.0, "simpo_margin": 0.5}},
        ),
        Case(
            # TRL pairs the prompts and completions of a micro-batch for its estimate of the KL
            # divergence, so here a step is one.
            "kto",
            "kto",
            "adamw",
            3e-3,
            2.7,
            trl={"beta": 0.3, "desirable_weight": 1.0, "undesirable_weight": 1.3},
            preference={
                "loss": {
                    "name": "kto",
                    "beta": 0.3,
                    "desirable_weight": 1.0,
                    "undesirable_weight": 1.3,
                }
            },
        ),
    )
}


def make_model(directory: Path) -> None:
    """Write the model, a tied Qwen3 in float32 with a tokenizer of single characters, as a Hugging
    Face checkpoint."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

    tokens = {"eos_token_id": EOS, "pad_token_id": PAD}
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
        bos_token_id=None,
        **tokens,
    )
    config.save_pretrained(directory)
    GenerationConfig(**tokens).save_pretrained(directory)
    save_file(make_weights(), directory / "model.safetensors", {"format": "pt"})
    vocabulary = {character(index): index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=character(UNKNOWN)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=character(EOS), pad_token=character(PAD)
    ).save_pretrained(directory)


def character(token: int) -> str:
    """The text of a token."""
    return chr(33 + token)


def text(ids: tuple[int, ...]) -> str:
    """The text of tokens."""
    return "".join(map(character, ids))


def make_weights() -> dict[str, np.ndarray]:
    """Parameter → initial weights, float32. Uniform numbers need no function of the C library, so
    they are the same everywhere."""
    stream = np.random.RandomState(0)

    def uniform(*shape: int) -> np.ndarray:
        values = (2 * stream.random_sample(shape) - 1) * WEIGHT_SCALE * 3**0.5
        return values.astype(np.float32)

    weights = {"model.embed_tokens.weight": uniform(VOCABULARY, HIDDEN)}
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (queries, HIDDEN),
            "self_attn.k_proj": (keys, HIDDEN),
            "self_attn.v_proj": (keys, HIDDEN),
            "self_attn.o_proj": (HIDDEN, queries),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
        norms = {
            "input_layernorm": HIDDEN,
            "post_attention_layernorm": HIDDEN,
            "self_attn.q_norm": HEAD_DIM,
            "self_attn.k_norm": HEAD_DIM,
        }
        prefix = f"model.layers.{layer}"
        weights |= {f"{prefix}.{name}.weight": uniform(*shape) for name, shape in shapes.items()}
        weights |= {f"{prefix}.{name}.weight": 1 + uniform(size) for name, size in norms.items()}
    return weights | {"model.norm.weight": 1 + uniform(HIDDEN)}


@cache
def sft_rows(kind: str) -> tuple[SftRow, ...]:
    """The rows of an SFT case, in the order of training."""
    if kind == "turns":
        return _turns()
    rows = []
    for pair in pairs():
        ids = pair.prompt + pair.chosen
        start = 1 if kind == "all" else len(pair.prompt)
        rows.append(SftRow(ids, tuple(place >= start for place in range(len(ids)))))
    return tuple(rows)


def _turns() -> tuple[SftRow, ...]:
    """Each row is a prompt and one to four pairs of an answer and a tool's output. Only the answers
    are targets."""
    stream = np.random.RandomState(2)
    rows = []
    for _ in range(STEPS * BATCH):
        ids, mask = list(_prompt(stream)), []
        mask += [False] * len(ids)
        for _ in range(stream.randint(1, 5)):
            answer = (*_chain(stream, ids[-1], _length(stream) // 2 + 1), EOS)
            output = tuple(stream.randint(FIRST, VOCABULARY, stream.randint(1, 9)).tolist())
            ids += [*answer, *output]
            mask += [True] * len(answer) + [False] * len(output)
        rows.append(SftRow(tuple(ids), tuple(mask)))
    return tuple(rows)


@cache
def pairs() -> tuple[Pair, ...]:
    """Pairs in the order of training. A chosen completion mostly follows a rule, so that there is
    something to learn. A rejected one is random. Both end with EOS."""
    stream = np.random.RandomState(1)
    rows = []
    for _ in range(STEPS * BATCH):
        prompt = _prompt(stream)
        chosen = _chain(stream, prompt[-1], _length(stream))
        rejected = tuple(stream.randint(FIRST, VOCABULARY, _length(stream)).tolist())
        rows.append(Pair(prompt, (*chosen, EOS), (*rejected, EOS)))
    return tuple(rows)


@cache
def unpaired() -> tuple[Unpaired, ...]:
    """One side of each pair. A step has three to five desirable ones."""
    stream = np.random.RandomState(3)
    drawn = [stream.permutation(BATCH) < stream.randint(3, 6) for _ in range(STEPS)]
    return tuple(
        Unpaired(pair.prompt, pair.chosen if label else pair.rejected, label)
        for pair, label in zip(pairs(), np.concatenate(drawn).tolist(), strict=True)
    )


def _prompt(stream: np.random.RandomState) -> tuple[int, ...]:
    return tuple(stream.randint(FIRST, VOCABULARY, stream.randint(2, 9)).tolist())


def _length(stream: np.random.RandomState) -> int:
    return int(min(LONGEST, max(1, round(stream.lognormal(np.log(MEDIAN), SIGMA)))))


def _chain(stream: np.random.RandomState, token: int, length: int) -> tuple[int, ...]:
    """Tokens after `token`: four of five follow from the one before, and the others are random."""
    ids = []
    for _ in range(length):
        follows = (5 * token + 7) % (VOCABULARY - FIRST) + FIRST
        token = follows if stream.random_sample() < 0.8 else stream.randint(FIRST, VOCABULARY)
        ids.append(int(token))
    return tuple(ids)


def digest() -> str:
    """A hash of the initial weights and of all rows. Records of another hash are of another
    task."""
    found = hashlib.sha256()
    for name, values in make_weights().items():
        found.update(name.encode() + values.tobytes())
    rows = [*(sft_rows(kind) for kind in ("completions", "turns", "all")), pairs(), unpaired()]
    found.update(json.dumps(rows, default=_fields).encode())
    return found.hexdigest()[:16]


def _fields(row: SftRow | Pair | Unpaired) -> list[Any]:
    return [getattr(row, name) for name in row.__slots__]
