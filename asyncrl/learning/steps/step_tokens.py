"""What a policy step computed at each of its loss tokens, as rows of `<run>/trained/`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from asyncrl.algorithms.loss_metrics import LossSums
from asyncrl.contracts.rows import TRAINED_COLUMNS
from asyncrl.models.micro_batches import Example, MicroBatch


class StepTokens:
    """The loss tokens of one step on one rank. They stay on the device until `table`."""

    def __init__(self) -> None:
        self._order: list[int] = []
        self._counts: list[int] = []
        self._tokens: list[tuple[Tensor, ...]] = []

    def add(self, batch: MicroBatch, sums: LossSums) -> None:
        """Add a micro-batch with the sums of its policy loss."""
        if not batch.counts or sums.tokens is None:
            return
        self._order += batch.order
        self._counts += batch.counts
        logprobs, weights, clipped, masked = sums.tokens
        # The log-probs may be a view of a larger tensor, which has those of a teacher's tokens.
        self._tokens.append((logprobs.clone(), weights, batch.advantages, clipped, masked))

    def table(
        self, examples: Sequence[Example], tables: Sequence[pa.Table], version: int
    ) -> pa.Table:
        """Return a row for each example, with TRAINED_COLUMNS except `trained_in`.

        Args:
            examples: of the whole step, as the micro-batches number them.
            tables: the groups of the step.
            version: of the learner before the step.
        """
        rows = [examples[index] for index in self._order]
        made_in = {
            ordinal: attempt
            for table in tables
            for ordinal, attempt in zip(
                table["ordinal"].to_pylist(), table["attempt"].to_pylist(), strict=True
            )
        }
        offsets = pa.array(np.cumsum([0, *self._counts]), pa.int32())
        names = ("logprobs", "weights", "advantages", "clipped", "masked")
        columns = [torch.cat(parts).cpu().numpy() for parts in zip(*self._tokens, strict=True)]
        lists = {
            name: pa.ListArray.from_arrays(
                offsets, pa.array(values, TRAINED_COLUMNS[name].value_type)
            )
            for name, values in zip(names, columns or [np.zeros(0)] * len(names), strict=True)
        }
        fields = {
            "attempt": [made_in[row.group] for row in rows],
            "ordinal": [row.group for row in rows],
            "index": [row.trajectory for row in rows],
            "version": [version] * len(rows),
            "positions": [_positions(row) for row in rows],
        }
        return pa.table(
            {
                name: lists[name] if name in lists else pa.array(fields[name], kind)
                for name, kind in TRAINED_COLUMNS.items()
                if name != "trained_in"
            }
        )


def _positions(example: Example) -> np.ndarray | None:
    """The index of each loss token among the trajectory's sampled tokens; None: 0, 1, 2, …"""
    if example.positions is not None:
        return np.asarray(example.positions[example.loss_mask])
    return None if bool(example.loss_mask.all()) else np.flatnonzero(example.loss_mask)
