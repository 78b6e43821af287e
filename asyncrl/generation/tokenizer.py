"""The run's tokenizer as vLLM's: it looks for stop strings in the text that this one decodes. vLLM
would load its own idea of the class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.text.tokenizer import load_tokenizer

__all__ = ["EngineTokenizer"]


class EngineTokenizer:
    """What vLLM's registry loads for `asyncrl.weights.engine.TOKENIZER_MODE`."""

    @classmethod
    def from_pretrained(cls, path: str | Path, *args: Any, **options: Any) -> Any:
        """The tokenizer of `load_tokenizer`, with vLLM's cache of its facts around it."""
        from vllm.tokenizers.hf import get_cached_tokenizer

        return get_cached_tokenizer(load_tokenizer(str(path)))
