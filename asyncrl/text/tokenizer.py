"""The one tokenizer of a model: prompts are encoded and completions decoded with the same object,
on every side.

`tokenizer.json` is the truth. transformers' own classes may build another tokenizer beside it: a
byte-level BPE whose `tokenizer_class` is `LlamaTokenizerFast` would be decoded as if it were a
sentencepiece model.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "ROUND_TRIP_TEXTS",
    "TokenizerError",
    "decode",
    "decode_prompt",
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
"""What a checkpoint directory may hold of a fast tokenizer."""
MORE_TEMPLATES = "additional_chat_templates"

ROUND_TRIP_TEXTS = (
    "3 + 40 =",
    "What is 2 plus 40?",
    "a , b . c ! isn 't",
    " two  spaces\n\tand a tab\n",
    "Grüße, 日本語, 🙂 и всё",
)
"""Texts that show a wrong decoder: figures, spaces, punctuation, line ends, characters of several
bytes."""


class TokenizerError(ValueError):
    """The tokenizer cannot be used. The message is one line that names the model."""


@functools.lru_cache(maxsize=4)
def load_tokenizer(path: str) -> Any:
    """The tokenizer of a Hugging Face checkpoint directory. It is shared: nobody changes it.

    Raises:
        TokenizerError: there is none that can be read.
    """
    try:
        if (Path(path) / "tokenizer.json").exists():
            # Holds all that a fast tokenizer does. AutoTokenizer would import torch: seconds, in
            # every process that reads or writes text.
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path, trust_remote_code=False)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises Exception itself
        why = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise TokenizerError(
            f"model.path = {path!r}: its tokenizer cannot be loaded ({why}); put the files of its"
            " tokenizer there"
        ) from error


def save_tokenizer(path: str, directory: Path) -> None:
    """Put the tokenizer of the checkpoint at `path` into `directory`: its own files where it has a
    tokenizer.json, which saving could change."""
    source = Path(path)
    if not (source / "tokenizer.json").exists():
        load_tokenizer(path).save_pretrained(directory)
        return
    for name in FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, directory / name)
    if (source / MORE_TEMPLATES).is_dir():
        shutil.copytree(source / MORE_TEMPLATES, directory / MORE_TEMPLATES)


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """A completion's text: without special tokens, and every space where the model wrote it."""
    text: str = tokenizer.decode(
        list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


def decode_prompt(tokenizer: Any, ids: Sequence[int]) -> str:
    """A prompt's text, with its special tokens."""
    text: str = tokenizer.decode(
        list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


def encode_prompts(
    tokenizer: Any, texts: Sequence[str], rendered: bool = False
) -> tuple[list[list[int]], int]:
    """Token ids of prompts, and how many of them began with BOS already.

    A plain text gets the special tokens that the tokenizer puts before it; one that begins with BOS
    keeps that one alone. A tokenizer that puts EOS after a text does not here: nothing is generated
    after an end.

    Args:
        rendered: the texts come from a chat template, which wrote every special token itself.
    """
    ids: list[list[int]] = (
        [list(one) for one in tokenizer(list(texts), add_special_tokens=not rendered)["input_ids"]]
        if texts
        else []
    )
    if rendered:
        return ids, 0
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    doubled = [row for row, one in enumerate(ids) if bos is not None and one[:2] == [bos, bos]]
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


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Special token → id: those that no text shows, also where the checkpoint's config does not
    list them."""
    added = {
        str(token): int(number)
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }
    return added | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))


def refuse_lossy(
    tokenizer: Any, model: str, other: Any = None, texts: Sequence[str] = ROUND_TRIP_TEXTS
) -> None:
    """Raise TokenizerError unless texts survive the way through the tokenizer, or through this one
    and the `other` side's.

    What a tokenizer normalizes (case, accents, spaces) may change a text once. It must not write
    other characters, and the same tokens must come back. A text with unknown characters proves
    nothing.
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
                "the engine's tokenizer decodes what the prompts' encodes"
                if other is not None
                else "its tokenizer does not decode what it encodes"
            )
            raise TokenizerError(
                f"model.path = {model!r}: {sides}: {text!r} comes back as {back!r}; check"
                " pre_tokenizer and decoder in its tokenizer.json"
            )


def _characters(text: str) -> set[str]:
    """Of a text without case and accents."""
    return set(unicodedata.normalize("NFKD", text.casefold()))


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 of the vocabulary and of what both ways make of ROUND_TRIP_TEXTS: equal on two sides
    that read and write the same tokens."""
    ids = [tokenizer.encode(text) for text in ROUND_TRIP_TEXTS]
    facts = [
        sorted(tokenizer.get_vocab().items()),
        ids,
        [decode(tokenizer, one) for one in ids],
        sorted(tokenizer.all_special_ids),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def refuse_another_tokenizer(path: str, digest: str) -> None:
    """Raise TokenizerError if a generator's tokenizer has another digest than the one at
    `path`."""
    if digest != tokenizer_hash(load_tokenizer(path)):
        raise TokenizerError(
            f"model.path = {path!r}: the generators read and write text with another tokenizer than"
            " prompts are encoded with; give every node the same files and the same version of"
            " transformers"
        )
