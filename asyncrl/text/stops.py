"""Stop tokens and stop strings of a model, with the source of each. `asyncrl plan` prints them,
because a missing stop only shows as completions that never end.

A completion ends at a stop token, or as soon as its text contains a stop string. It keeps all
sampled tokens with their log-probs, and the learner trains on them. That includes the tokens of
the stop string, so the policy learns to write it. Rewards read the text before the stop string.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from jinja2.sandbox import ImmutableSandboxedEnvironment

from asyncrl.text.row_chats import template_variables
from asyncrl.text.tokenizer import chat_text, decode, special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_CONFIG = "generation_config.json"
"""File of a checkpoint with the settings of generation, which transformers and vLLM read."""
FROM_CONFIG = ("bos_token_id", "pad_token_id")
"""Settings that transformers takes from config.json if a checkpoint lacks that file."""

MARKER = "x"
"""Put before a stop string, since some tokenizers drop a space at the start of a text."""
ANSWER = "4207159"
"""Content of a sample assistant turn. No chat template contains it, and no filter changes it."""
PARTS = [{"type": "text", "text": ANSWER}]
CHATS: tuple[list[dict[str, object]], ...] = (
    [{"role": "user", "content": ANSWER}, {"role": "assistant", "content": ANSWER}],
    [
        {"role": "system", "content": ANSWER},
        {"role": "user", "content": ANSWER},
        {"role": "assistant", "content": ANSWER},
    ],
    [{"role": "user", "content": PARTS}, {"role": "assistant", "content": PARTS}],
)
"""Chats of which a template takes one: some ask for a system message, others for parts."""
GUESSES: tuple[object, ...] = (True, False, "x", 1, ["x"])
"""Values of variables that a template may ask for."""
TOOL = {"type": "function", "function": {"name": "x", "description": "x", "parameters": {}}}
GIVEN = {
    *("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"),
    *ImmutableSandboxedEnvironment().globals,
}
"""Variables that every template gets, or that transformers does not pass on."""
NONE: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends a completion. The engine applies it to every request: rollouts, evaluations and
    HTTP."""

    tokens: dict[int, tuple[str, ...]]
    """Stop token id → the sources that name it, ordered by id."""
    strings: tuple[str, ...] = ()
    """Strings to find in the text, however many tokens they span."""
    token_texts: tuple[str, ...] = ()
    """Those of the strings that are the text of a stop token, which ends the completion anyway."""


def load_stops(
    model: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    rollout_stop: Sequence[str] = (),
    rollout_stop_token_ids: Sequence[int] = (),
    variables: Mapping[str, object] = NONE,
) -> Stops:
    """`make_stops` with the EOS ids and stop strings of the checkpoint's generation_config.json, if
    it has one.

    Raises:
        ValueError: that file is not valid, or as in `make_stops`.
    """
    path = Path(model) / GENERATION_CONFIG
    settings = _settings(path)
    strings = [*_stop_strings(path, settings), *rollout_stop]
    eos = _eos_ids(path, settings)
    return make_stops(tokenizer, eos, strings, rollout_stop_token_ids, variables)


def generation_settings(model: str | Path, stops: Stops) -> dict[str, object]:
    """The content of generation_config.json for weights that were trained from the checkpoint
    `model` with these stops. Its other settings are those of the checkpoint.

    Raises:
        ValueError: a file of the checkpoint is not a JSON object.
    """
    path = Path(model) / GENERATION_CONFIG
    settings = _settings(path)
    if not path.exists():
        tree = _settings(Path(model) / "config.json")
        settings = {name: tree[name] for name in FROM_CONFIG if tree.get(name) is not None}
    ids = list(stops.tokens)
    found: dict[str, object] = {"eos_token_id": ids[0] if len(ids) == 1 else ids} if ids else {}
    if strings := [text for text in stops.strings if text not in stops.token_texts]:
        found["stop_strings"] = strings
    return {**settings, **found}


def _settings(path: Path) -> dict[str, object]:
    """The content of a JSON file; empty if it is missing. Raises ValueError."""
    if not path.exists():
        return {}
    try:
        settings = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path} is not a JSON object ({error}); repair it, or remove it"
        ) from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is not a JSON object; repair it, or remove it")
    return settings


def _eos_ids(path: Path, settings: Mapping[str, object]) -> list[int]:
    eos = settings.get("eos_token_id")
    listed = eos if isinstance(eos, list) else [] if eos is None else [eos]
    ids = [token for token in listed if isinstance(token, int) and not isinstance(token, bool)]
    if len(ids) < len(listed):
        raise ValueError(f"{path} has eos_token_id = {eos!r}; give a token id, or a list of them")
    return ids


def _stop_strings(path: Path, settings: Mapping[str, object]) -> list[str]:
    given = settings.get("stop_strings")
    listed = given if isinstance(given, list) else [] if given is None else [given]
    strings = [text for text in listed if isinstance(text, str)]
    if len(strings) < len(listed):
        raise ValueError(f"{path} has stop_strings = {given!r}; give a string, or a list of them")
    return strings


def make_stops(
    tokenizer: PreTrainedTokenizerBase,
    generation_eos: Sequence[int],
    rollout_stop: Sequence[str] = (),
    rollout_stop_token_ids: Sequence[int] = (),
    variables: Mapping[str, object] = NONE,
) -> Stops:
    """Combine the stops of the model and of the settings. A string that is one special token
    becomes a stop token, because decoding drops special tokens. A chat end token that is not
    special is a stop string too, so that rewards do not read it.

    Args:
        variables: the run's variables of the chat template.

    Raises:
        ValueError: a token id is outside the vocabulary. Or a stop string is empty, cannot be
            written by the tokenizer, or contains a special token and other text.
    """
    end = chat_end_token(tokenizer, variables)
    special = {text: special_token(tokenizer, text) for text in dict.fromkeys(rollout_stop)}
    for text, token in special.items():
        if token is None:
            _refuse_unseen(tokenizer, text)
    found: list[tuple[int | None, str]] = [(token, "generation config") for token in generation_eos]
    found += [
        (tokenizer.eos_token_id, "tokenizer EOS"),
        (end, "chat end token"),
    ]
    found += [(token, f"rollout_stop {text!r}") for text, token in special.items()]
    found += [(token, "rollout_stop_token_ids") for token in rollout_stop_token_ids]
    sources: dict[int, tuple[str, ...]] = {}
    for token, source in sorted((t, s) for t, s in found if t is not None):
        if not 0 <= token < len(tokenizer):
            raise ValueError(
                f"stop token id {token} ({source}) is outside the vocabulary of {len(tokenizer)}"
                " tokens; remove it"
            )
        sources[token] = (*sources.get(token, ()), source)
    strings = [text for text, token in special.items() if token is None]
    text = "" if end is None else decode(tokenizer, [end])  # empty if the token is special
    texts = (text,) if text else ()
    return Stops(sources, tuple(dict.fromkeys([*strings, *texts])), texts)


def chat_end_token(
    tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, object] = NONE
) -> int | None:
    """The token that ends an assistant's turn in the chat template: a special one, or else one that
    was added to the vocabulary. None without a template or such a token.

    Args:
        variables: of the template. If it refuses every chat with them, its others are guessed.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    for options in _options(tokenizer, variables):
        tails = [_after_answer(tokenizer, chat, options) for chat in CHATS]
        if any(tail is not None for tail in tails):
            ends = (_first_end(tokenizer, tail) for tail in filter(None, tails))
            return next((end for end in ends if end is not None), None)
    return None


def _options(
    tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, object]
) -> Iterator[Mapping[str, object]]:
    """What a template may need to render a chat, the run's own variables first."""
    yield variables
    yield {"tools": [TOOL], **variables}
    source = tokenizer.chat_template
    names = template_variables(source if isinstance(source, str) else str(source))
    missing = names - GIVEN - set(tokenizer.special_tokens_map)
    for guess in GUESSES if missing else ():
        yield {"tools": [TOOL], **dict.fromkeys(sorted(missing), guess), **variables}


def _first_end(tokenizer: PreTrainedTokenizerBase, tail: str) -> int | None:
    ids = tokenizer.encode(tail, add_special_tokens=False)
    # A template may end turns with a text that the vocabulary lacks.
    unknown = {tokenizer.unk_token_id} - {tokenizer.eos_token_id}
    special = set(special_tokens(tokenizer).values()) - unknown
    added = set(tokenizer.added_tokens_decoder) - unknown
    ends = [*filter(special.__contains__, ids), *filter(added.__contains__, ids)]
    return ends[0] if ends else None


def _after_answer(
    tokenizer: PreTrainedTokenizerBase,
    chat: Sequence[Mapping[str, object]],
    options: Mapping[str, object],
) -> str | None:
    """What the template writes after the last message of a chat; None if it refuses the chat, or
    does not write that message."""
    try:
        text = chat_text(tokenizer, chat, **options)
    except Exception:  # a template may raise anything for a chat
        return None
    _, found, tail = text.rpartition(ANSWER)
    return tail if found else None


def text_before(text: str, strings: Sequence[str]) -> str:
    """The text before the first stop string, or all of it if there is none."""
    return text[
        : min((offset for stop in strings if (offset := text.find(stop)) >= 0), default=len(text))
    ]


def first_stop(text: str, strings: Sequence[str]) -> str | None:
    """The stop string that is first in the text. None: there is none."""
    found = [(text.find(stop), stop) for stop in strings if stop in text]
    return min(found)[1] if found else None


def special_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """The id of a stop string that is a special token; None for any other string. Decoded text
    never contains a special token, so its id must end the completion."""
    token = special_tokens(tokenizer).get(text)
    return None if token == tokenizer.unk_token_id else token


def _refuse_unseen(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    if not text:
        raise ValueError(
            "rollout.rollout_stop contains an empty string, which would stop at once; remove it"
        )
    if text not in decode(tokenizer, tokenizer.encode(MARKER + text, add_special_tokens=False)):
        tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))
        raise ValueError(
            f"rollout.rollout_stop {text!r} never occurs in text of this tokenizer (its tokens:"
            f" {tokens}); use a special token alone, or another string"
        )
