"""Loads a model's tokenizer, encodes prompts and decodes completions. Every process uses this
module, so all of them read and write the same tokens.

`tokenizer.json` defines the tokenizer. The class that a checkpoint names may build a different one.
For example, a byte-level BPE whose `tokenizer_class` is `LlamaTokenizerFast` would be decoded like
a SentencePiece model.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from asyncrl.runtime.paths import meant

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
"""Files of a fast tokenizer that a checkpoint directory may contain."""
MORE_TEMPLATES = "additional_chat_templates"

LINE_END = "\n"
"""Put before a text to encode it as a continuation. It does not merge with what follows."""

ROUND_TRIP_TEXTS = (
    "3 + 40 =",
    "What is 2 plus 40?",
    "a , b . c ! isn 't",
    " two  spaces\n\tand a tab\n",
    "Grüße, 日本語, 🙂 и всё",
)
"""Texts that expose a wrong decoder: digits, spaces, punctuation, line ends and multi-byte
characters."""


class TokenizerError(ValueError):
    """The tokenizer cannot be used. The message is one line and names the model."""


@functools.lru_cache(maxsize=4)
def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face checkpoint directory. The result is cached and shared;
    callers must not change it.

    Raises:
        TokenizerError: there is no such directory, or it has no tokenizer, or an unreadable one.
    """
    if not Path(path).is_dir():
        raise TokenizerError(
            f"model.path = {path!r}: there is no such directory; give a Hugging Face checkpoint"
            f" directory{meant(Path(path))}"
        )
    try:
        if (Path(path) / "tokenizer.json").exists():
            # tokenizer.json is complete. AutoTokenizer would import torch, which costs seconds in
            # every process that reads or writes text.
            from transformers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast.from_pretrained(path, trust_remote_code=False)
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        return cast("PreTrainedTokenizerBase", tokenizer)
    except Exception as error:  # the tokenizers library raises Exception itself
        why = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise TokenizerError(
            f"model.path = {path!r}: its tokenizer cannot be loaded ({why}); put the files of its"
            " tokenizer there"
        ) from error


def save_tokenizer(path: str, directory: Path) -> None:
    """Copy the tokenizer of the checkpoint at `path` into `directory`. A tokenizer.json is copied
    with its companions, because loading and saving could change it."""
    source = Path(path)
    if not (source / "tokenizer.json").exists():
        load_tokenizer(path).save_pretrained(directory)
        return
    for name in FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, directory / name)
    if (source / MORE_TEMPLATES).is_dir():
        (directory / MORE_TEMPLATES).mkdir()
        for template in (source / MORE_TEMPLATES).iterdir():
            shutil.copyfile(template, directory / MORE_TEMPLATES / template.name)


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Decode a completion, without special tokens and with all spaces that the model wrote."""
    return _decoded(tokenizer, ids, skip_special_tokens=True)


def decode_prompt(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Decode a prompt, with its special tokens."""
    return _decoded(tokenizer, ids, skip_special_tokens=False)


def _decoded(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], skip_special_tokens: bool
) -> str:
    text = tokenizer.decode(
        list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    return cast(str, text)  # transformers returns a list only for several sequences


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, object]],
    /,
    **options: object,
) -> str:
    """Render a chat with the tokenizer's template. Raises whatever exception the template raises.

    Args:
        options: arguments of `apply_chat_template`, and variables of the template.
    """
    # transformers' annotations are too narrow for `messages`, and too wide for the result.
    apply = cast("Callable[..., str]", tokenizer.apply_chat_template)
    return apply(messages, tokenize=False, **options)


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], rendered: bool = False
) -> tuple[list[list[int]], int]:
    """Encode prompts. Returns their token ids, and how many of the texts already began with BOS.

    The tokenizer's leading special tokens are added to a plain text. A text that already begins
    with BOS does not get a second one. An EOS that the tokenizer appends is removed, since a model
    generates nothing after EOS.

    Args:
        rendered: the texts come from a chat template, which writes every special token.

    Raises:
        TokenizerError: the tokenizer has no token for a part of a text, and none for what it lacks.
    """
    ids = _all_encoded(tokenizer, texts, not rendered)
    if rendered:
        return ids, 0
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    doubled = [row for row, its in enumerate(ids) if bos is not None and its[:2] == [bos, bos]]
    for row in doubled:
        del ids[row][0]
    for row, text in enumerate(texts):
        if (
            eos not in (None, bos)
            and ids[row][-1:] == [eos]
            and not text.endswith(tokenizer.eos_token)
        ):
            del ids[row][-1]
    return ids, len(doubled)


def _all_encoded(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], add_special_tokens: bool
) -> list[list[int]]:
    if not texts:
        return []
    try:
        found = tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"]
    except Exception as error:  # the tokenizers library raises Exception itself
        why = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        bad = next((text for text in texts if text and not encoded(tokenizer, text)), texts[0])
        raise TokenizerError(
            f"model.path = {tokenizer.name_or_path!r}: its tokenizer cannot encode {bad!r} ({why});"
            " use texts of its vocabulary, or give it an unknown token"
        ) from error
    return [list(row) for row in found]


def encode_continuations(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> list[list[int]]:
    """Encode texts that continue another text, without special tokens. A tokenizer that puts a
    space before every text would otherwise put one between the two texts."""
    plain, marked, mark = (
        [list(row) for row in tokenizer(given, add_special_tokens=False)["input_ids"]]
        for given in (list(texts), [LINE_END + text for text in texts], [LINE_END])
    )
    letter = tokenizer.encode("x", add_special_tokens=False)
    if decode_prompt(tokenizer, mark[0] + letter) == f"{LINE_END}x":
        return plain
    start = len(mark[0])
    return [
        whole[start:] if whole[:start] == mark[0] else alone
        for whole, alone in zip(marked, plain, strict=True)
    ]


def encoded(
    tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = False
) -> list[int]:
    """The tokens of a text. None where the vocabulary lacks a part of it and has no token for
    that, which is an error in some tokenizers."""
    try:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except Exception:  # the tokenizers library raises Exception itself
        return []


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Special token → id, including tokens that only tokenizer.json marks as special."""
    added = {
        str(token): int(number)
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }
    return added | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the vocabulary, the special tokens, and ROUND_TRIP_TEXTS encoded and decoded. Two
    processes with the same hash read and write the same tokens."""
    ids = [encoded(tokenizer, text, True) for text in ROUND_TRIP_TEXTS]
    facts = [
        sorted(tokenizer.get_vocab().items()),
        ids,
        [decode(tokenizer, row) for row in ids],
        sorted(tokenizer.all_special_ids),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def refuse_another_tokenizer(path: str, digest: str) -> None:
    """Raise TokenizerError if `digest`, the hash of a generator's tokenizer, differs from that of
    the tokenizer at `path`."""
    if digest != tokenizer_hash(load_tokenizer(path)):
        raise TokenizerError(
            f"model.path = {path!r}: the generators' tokenizer differs from that of the prompts;"
            " give every node the same files and the same version of transformers"
        )
