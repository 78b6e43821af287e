"""What answers over HTTP: the one model, its limits, and whose weights it holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from asyncrl.contracts.messages import ServedWeights

__all__ = ["ServedModel", "model_list", "weights"]

OTHER_FIELDS = 64 << 10
"""Bytes of a body beside the prompt."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are checked against."""

    name: str
    max_model_len: int
    """Longest prompt plus completion, in tokens."""
    vocabulary: int
    """Token ids are below this."""
    longest_token: int
    """Characters of the longest token."""

    @property
    def most_characters(self) -> int:
        """Characters that `max_model_len` tokens can stand for. A longer text is refused before it
        is tokenized."""
        return self.max_model_len * self.longest_token

    @property
    def largest_body(self) -> int:
        """Bytes of a request with the longest text in JSON, six for each character, or with the
        longest list of token ids."""
        return OTHER_FIELDS + max(
            6 * self.most_characters, (len(str(self.vocabulary)) + 2) * self.max_model_len
        )


def model_list(model: ServedModel, served: ServedWeights, created: int) -> dict[str, Any]:
    """The answer of /v1/models: the one model, and its weights."""
    entry = {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "asyncrl",
        "max_model_len": model.max_model_len,
        **weights(served),
    }
    return {"object": "list", "data": [entry]}


def weights(served: ServedWeights) -> dict[str, Any]:
    """Whose weights answer, as every answer says it: identity (null: the checkpoint's), the job
    that has the lease (null: none), and both in words."""
    return {
        "weights": asdict(served.weights) if served.weights is not None else None,
        "lease": served.lease,
        "serving": served.text,
    }
