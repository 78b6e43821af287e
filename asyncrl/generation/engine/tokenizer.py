"""The run's tokenizer for vLLM, which searches its decoded text for stop strings. vLLM alone might
load another class."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from asyncrl.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.tokenizers.hf import HfTokenizer


class EngineTokenizer:
    """What vLLM's registry loads for `asyncrl.weights.engine.TOKENIZER_MODE`."""

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *args: object, **options: object
    ) -> PreTrainedTokenizerBase:
        """The tokenizer of `load_tokenizer`, wrapped in vLLM's cache of its properties."""
        from vllm.tokenizers.hf import get_cached_tokenizer

        return get_cached_tokenizer(cast("HfTokenizer", load_tokenizer(str(path))))
