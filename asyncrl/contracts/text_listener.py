"""What gets the text of completions while they are sampled. Imports nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Heard: TypeAlias = Callable[[int, str], None]
"""Called with the index of a completion, or of a choice, and its new text. The texts of one, in
their order, begin its text without special tokens. An empty one says that sampling begins."""
