"""Groups that a run recorded (groups/*.parquet) as training data. Token ids are used as they are:
decoding and encoding again could give others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from asyncrl.contracts.rows import COLUMNS, SCORED_COLUMNS
from asyncrl.data.conversations import Tokens
from asyncrl.data.form_rows import MalformedError
from asyncrl.data.forms import RECORDED
from asyncrl.data.offline_spec import Objective
from asyncrl.text.tokenizer import decode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RecordedGroups", "refuse_another_vocabulary"]


class RecordedGroups:
    """Reads the examples of recorded groups, once for each (attempt, ordinal) of a directory.

    Args:
        least_reward: see `OfflineDataSpec`.
    """

    def __init__(self, objective: Objective, least_reward: float | None) -> None:
        self._objective, self._least = objective, least_reward
        self._directory: Path | None = None
        self._met: set[int] = set()
        """Groups of the directory so far, as one number each."""

    def examples(
        self, table: pa.Table, file: Path
    ) -> Iterator[list[tuple[Tokens, ...]] | MalformedError | None]:
        """For each row of a table, the sides of its examples: none if no reward is high enough, or
        if no two rewards of a pair differ. None for a group that was met before.

        Only scored trajectories with status `ok` count. Of equal rewards, the first one counts.

        Raises:
            ValueError: a column has another type than a run writes.
        """
        types = {**COLUMNS, **SCORED_COLUMNS}
        for name in RECORDED:
            if table.schema.field(name).type != types[name]:
                raise ValueError(
                    f"column {name!r} has type {table.schema.field(name).type}, where a run writes"
                    f" {types[name]}"
                )
        if file.parent != self._directory:
            self._directory, self._met = file.parent, set()
        columns = {name: table[name].combine_chunks() for name in RECORDED}
        for row in range(table.num_rows):
            group = {name: column[row] for name, column in columns.items()}
            try:
                yield self._of_group(group)
            except MalformedError as error:
                yield error

    def _of_group(self, group: dict[str, pa.Scalar]) -> list[tuple[Tokens, ...]] | None:
        if not all(value.is_valid for value in group.values()):
            raise MalformedError("missing")
        number = group["attempt"].as_py() << 48 | group["ordinal"].as_py()
        if number in self._met:
            return None
        self._met.add(number)
        rewards, statuses = group["reward"].as_py(), group["status"].as_py()
        scored = [
            (place, reward)
            for place, (reward, status) in enumerate(zip(rewards, statuses, strict=False))
            if status == "ok" and reward is not None
        ]
        least = self._least
        good = [place for place, reward in scored if least is None or reward >= least]
        if not good:
            return []
        best = max(scored, key=lambda item: item[1])
        if self._objective == "sft":
            kept = good if least is not None else [best[0]]
            return [(_tokens(group, place),) for place in kept]
        worst = min(scored, key=lambda item: item[1])
        if best[1] == worst[1]:
            return []
        return [(_tokens(group, best[0]), _tokens(group, worst[0]))]


def _tokens(group: dict[str, pa.Scalar], place: int) -> Tokens:
    """Prompt and completion of one trajectory, with its own mask."""
    prompt = group["prompt_ids"].values.to_numpy()
    completion, own = (group[name].values[place].values for name in ("completion_ids", "loss_mask"))
    if len(own) != len(completion):
        raise MalformedError("type", "its loss masks and completions have different lengths")
    mask = np.concatenate([np.zeros(len(prompt), bool), own.to_numpy().astype(bool)])
    return Tokens(np.concatenate([prompt, completion.to_numpy()]), mask, len(prompt))


def refuse_another_vocabulary(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str
) -> None:
    """Check the tokens of a recorded prompt against its text.

    Raises:
        ValueError: this tokenizer neither encodes the text to these tokens, nor decodes them to it.
    """
    if max(ids, default=0) < len(tokenizer):
        encoded = (tokenizer.encode(text, add_special_tokens=special) for special in (True, False))
        if list(ids) in encoded or text in decode_prompt(tokenizer, ids):
            return
    raise ValueError(
        f"another tokenizer made the recorded tokens, since the prompt {text[:60]!r} has others"
        " here; set model.path to the model of that run"
    )
