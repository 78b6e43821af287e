"""What the turns of a session could find in a prefix cache, and what they found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncrl.contracts.messages import Generated

KEPT_VERSIONS = 2
"""Newest versions whose turns a later turn may continue: a replica may be one behind another."""


class PrefixCounter:
    """Counts the prompt tokens of one session that an engine can take from its prefix cache: the
    whole blocks that earlier turns read or sampled with the same weights. Where those turns ran
    does not matter, so a turn on another replica counts as a miss."""

    def __init__(self) -> None:
        self.reusable = 0
        """Tokens of blocks that an earlier turn had, over all turns."""
        self.cached = 0
        """Reusable tokens that the engines had in their cache."""
        self._block = 0
        """Tokens of a block; 0 before the first answer."""
        self._known: dict[int, set[int]] = {}
        """Version → hashes of the beginnings that its turns have, by whole blocks."""

    def expected(self, prompt_ids: Sequence[int]) -> dict[int, int]:
        """Version → the prompt's reusable tokens, if it is sent now and this version reads it. The
        engine computes the last token of a prompt in any case."""
        if not self._known:
            return {}
        blocks = _blocks(prompt_ids[:-1], self._block)
        return {
            version: self._block
            * next((index for index, block in enumerate(blocks) if block not in known), len(blocks))
            for version, known in self._known.items()
        }

    def count(
        self, expected: Mapping[int, int], prompt_ids: Sequence[int], generated: Generated
    ) -> None:
        """Count the answer to a prompt.

        Args:
            expected: of the moment in which the prompt was sent.
        """
        if not generated.cache_block:
            return
        self._block = generated.cache_block
        answers = zip(generated.completions, generated.cached_tokens, strict=True)
        for completion, cached in answers:
            if not completion.versions:
                continue
            version = completion.versions[0].version
            reusable = expected.get(version, 0)
            self.reusable += reusable
            self.cached += min(reusable, cached)
            # The last token has been sampled and not read.
            ids = [*prompt_ids, *completion.token_ids[:-1]]
            self._known.setdefault(version, set()).update(_blocks(ids, self._block))
        for version in sorted(self._known)[:-KEPT_VERSIONS]:
            del self._known[version]


def _blocks(ids: Sequence[int], size: int) -> list[int]:
    """A hash of the tokens up to the end of each whole block."""
    hashes, last = list[int](), 0
    for start in range(0, len(ids) - size + 1, size):
        last = hash((last, *ids[start : start + size]))
        hashes.append(last)
    return hashes
