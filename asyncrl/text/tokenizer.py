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
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from asyncrl.runtime.paths import meant

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "ROUND_TRIP_TEXTS",
    "TokenizerError",
    "chat_text",
    "decode",
    "decode_prompt",
    "encode_continuations",
    "encode_prompts",
    "load_tokenizer",
    "refuse_another_tokenizer",
    "refuse_lossy",
    "save_tokenizer",
    "special_tokens",
    "tokenizer_hash",
]

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
    """
    ids: list[list[int]] = (
        [list(row) for row in tokenizer(list(texts), add_special_tokens=not rendered)["input_ids"]]
        if texts
        else []
    )
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


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Special token → id, including tokens that only tokenizer.json marks as special."""
    added = {
        str(token): int(number)
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }
    return added | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))


def refuse_lossy(
    tokenizer: PreTrainedTokenizerBase,
    model: str,
    other: PreTrainedTokenizerBase | None = None,
    texts: Sequence[str] = ROUND_TRIP_TEXTS,
) -> None:
    """Raise TokenizerError unless `texts` survive encoding and decoding. With `other`, this
    tokenizer encodes and the other one decodes.

    Normalization may change case, accents and spaces. A decoded text must not contain new
    characters, and must encode to the same tokens. Texts with unknown tokens are skipped, because
    they prove nothing.
    """
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.unk_token_id in ids:
            continue
        back = decode_prompt(other or tokenizer, ids)
        if (
            _characters(back) - _characters(text)
            or tokenizer.encode(back, add_special_tokens=False) != ids
        ):
            sides = (
                "the engine's tokenizer does not decode what the prompts' tokenizer encodes"
                if other is not None
                else "its tokenizer does not decode what it encodes"
            )
            raise TokenizerError(
                f"model.path = {model!r}: {sides}: {text!r} comes back as {back!r}; check"
                " pre_tokenizer and decoder in its tokenizer.json"
            )


def _characters(text: str) -> set[str]:
    """The set of characters, ignoring case and accents."""
    return set(unicodedata.normalize("NFKD", text.casefold()))


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the vocabulary, the special tokens, and ROUND_TRIP_TEXTS encoded and decoded. Two
    processes with the same hash read and write the same tokens."""
    ids = [tokenizer.encode(text) for text in ROUND_TRIP_TEXTS]
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
