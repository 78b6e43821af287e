"""The text of each token of a completion."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Pieces:
    """Splits token ids into their texts, by the `tokenizer.json` of a model's directory."""

    def __init__(self, directory: Path) -> None:
        """Without that file, or if it is damaged, each token is shown by its number."""
        path = directory / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None
        if path.is_file():
            with contextlib.suppress(Exception):  # all that the library raises for a damaged file
                self._tokenizer = Tokenizer.from_file(str(path))

    @property
    def known(self) -> bool:
        return self._tokenizer is not None

    def of(self, ids: Sequence[int]) -> list[str]:
        """One text for each id. A character of several tokens is the text of its last one, and the
        others have none."""
        if self._tokenizer is None:
            return [f"[{one}]" for one in ids]
        stream = DecodeStream(skip_special_tokens=False)
        texts = []
        for one in ids:
            try:
                texts.append(stream.step(self._tokenizer, one) or "")
            except Exception:  # an id that the tokenizer does not have
                texts.append(f"[{one}]")
                stream = DecodeStream(skip_special_tokens=False)
        return texts
