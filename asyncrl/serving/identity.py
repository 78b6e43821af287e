"""The model that the endpoint serves, its limits, and the origin of its weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from asyncrl.contracts.messages import ServedWeights

OTHER_FIELDS = 64 << 10
"""Bytes of a body for all fields except the prompt."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The limits that requests are checked against."""

    name: str
    max_model_len: int
    """Longest prompt plus completion, in tokens."""
    vocabulary: int
    """Token ids are below this."""
    longest_token: int
    """Length of the longest token, in characters."""
    tokenizer: str | None = None
    """Hash of the tokenizer (`asyncrl.text.tokenizer.tokenizer_hash`); None = unknown."""

    @property
    def most_characters(self) -> int:
        """Upper limit of the characters in `max_model_len` tokens. A longer text is refused before
        tokenization."""
        return self.max_model_len * self.longest_token

    @property
    def largest_body(self) -> int:
        """Bytes of a request with the longest text, at six bytes of JSON for each character, or
        with the longest list of token ids."""
        return OTHER_FIELDS + max(
            6 * self.most_characters, (len(str(self.vocabulary)) + 2) * self.max_model_len
        )


def weights(served: ServedWeights) -> dict[str, object]:
    """The origin of the weights, which every answer contains.

    `weights` is their identity (null: the checkpoint's own), `lease` the job that has the lease
    (null: none), and `serving` describes both.
    """
    return {
        "weights": asdict(served.weights) if served.weights is not None else None,
        "lease": served.lease,
        "serving": served.text,
    }
