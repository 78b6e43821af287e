"""Groups that a run recorded (groups/*.parquet) as training data. Token ids are used as they are:
decoding and encoding again could give others.

The trajectories of a run with an environment are sessions. A session is one row for each leaf of
its tree, as in the run itself: `asyncrl.sessions.session_rows.session_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pyarrow as pa

from asyncrl.contracts.nodes import Node
from asyncrl.contracts.rows import COLUMNS, SCORED_COLUMNS, TURN_COLUMNS
from asyncrl.contracts.session_table import NODE_COLUMNS, SessionsRow, nodes_of_group
from asyncrl.data.conversations import Tokens
from asyncrl.data.encoded_rows import paired
from asyncrl.data.form_rows import MalformedError
from asyncrl.data.forms import RECORDED, RECORDED_TEXTS
from asyncrl.data.spec import OfflineDataSpec, RowsFor
from asyncrl.sessions.session_rows import SessionRow, session_rows
from asyncrl.text.tokenizer import decode, decode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PER_TRAJECTORY = ("completion_ids", "loss_mask", "reward", "status")
"""Columns with one item for each trajectory of a group."""
SESSIONS = NODE_COLUMNS[0]
"""A column that only groups of sessions have."""


class RecordedGroups:
    """Reads the trajectories of recorded groups, once for each (attempt, ordinal) of a directory.

    Args:
        tokenizer: the tokenizer of `spec.model.path`.
    """

    def __init__(
        self, spec: OfflineDataSpec, objective: RowsFor, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._objective, self._least, self._tokenizer = objective, spec.data.least_reward, tokenizer
        self._vocabulary = spec.vocabulary or max(tokenizer.get_vocab().values()) + 1
        self._file: Path | None = None
        self._met: set[int] = set()
        """Groups of the file's directory so far, as one number each."""

    def sides(
        self, table: pa.Table, file: Path
    ) -> Iterator[list[tuple[Tokens, ...]] | MalformedError | None]:
        """For each row of a table, the sides of its token rows: none if no reward is high enough,
        or if no two rewards of a pair differ. None for a group that was met before.

        Only scored trajectories with status `ok` count. Of equal rewards, the first one counts.

        Raises:
            ValueError: a column has another type than a run writes, or another tokenizer made the
                tokens.
        """
        types = {**COLUMNS, **SCORED_COLUMNS, **TURN_COLUMNS}
        sessions = NODE_COLUMNS if SESSIONS in table.column_names else ()
        read = dict.fromkeys((*RECORDED, *sessions))
        for name in (*read, *(text for text in RECORDED_TEXTS if text in table.column_names)):
            if table.schema.field(name).type != types[name]:
                raise ValueError(
                    f"column {name!r} has type {table.schema.field(name).type}, where a run writes"
                    f" {types[name]}"
                )
        if file != self._file:
            self._refuse_another_tokenizer(table)
            if self._file is None or file.parent != self._file.parent:
                self._met = set()
            self._file = file
        columns = {name: table[name].combine_chunks() for name in read}
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
        sizes = [len(group[name]) for name in PER_TRAJECTORY]
        if len(set(sizes)) > 1:
            raise MalformedError(
                "lengths", f"its columns {', '.join(PER_TRAJECTORY)} have {sizes} items"
            )
        scored = [
            (index, reward)
            for index, (reward, status) in enumerate(
                zip(group["reward"].as_py(), group["status"].as_py(), strict=True)
            )
            if status == "ok" and reward is not None
        ]
        for index, reward in scored:
            if not math.isfinite(reward):
                raise MalformedError("reward", f"the reward of trajectory {index} is {reward}")
        least = self._least
        good = [index for index, reward in scored if least is None or reward >= least]
        if not good:
            return []
        best = max(scored, key=lambda item: item[1])
        if self._objective == "sft":
            kept = good if least is not None else [best[0]]
            return [(tokens,) for tokens in self._rows(group, kept)]
        worst = min(scored, key=lambda item: item[1])
        if best[1] == worst[1]:
            return []
        if SESSIONS in group:
            return [self._compared(group, best[0], worst[0])]
        return [(self._tokens(group, best[0]), self._tokens(group, worst[0]))]

    def _rows(self, group: dict[str, pa.Scalar], indices: Sequence[int]) -> list[Tokens]:
        """The rows of these trajectories: one of each, or all of each session."""
        if SESSIONS not in group:
            return [self._tokens(group, index) for index in indices]
        sessions = _sessions(group)
        return [
            self._session_tokens(row, index, int(row.trained.argmax()))
            for index in indices
            for row in _trained_rows(sessions[index])
        ]

    def _compared(self, group: dict[str, pa.Scalar], best: int, worst: int) -> tuple[Tokens, ...]:
        """Two sessions as the sides of a pair. Their prompt is what comes before the first turn."""
        sessions = _sessions(group)
        chosen, rejected = (self._only_row(sessions[index], index) for index in (best, worst))
        return paired(chosen, rejected, implicit=False)

    def _only_row(self, nodes: Sequence[Node], index: int) -> Tokens:
        """The row of a session that has one, after a prompt of everything before its first turn."""
        row, *others = _trained_rows(nodes)
        if others:
            raise MalformedError("branched", f"session {index} has {1 + len(others)} rows")
        return self._session_tokens(row, index, int((row.nodes == row.nodes[0]).sum()))

    def _session_tokens(self, row: SessionRow, index: int, prompt: int) -> Tokens:
        """A row of a session, whose first `prompt` tokens are its prompt."""
        self._check_vocabulary(row.token_ids, index)
        return Tokens(row.token_ids.astype(np.int32), row.trained, prompt)

    def _tokens(self, group: dict[str, pa.Scalar], index: int) -> Tokens:
        """Prompt and completion of one trajectory, with its own mask."""
        prompt = group["prompt_ids"].values
        completion, own = (
            group[name].values[index].values for name in ("completion_ids", "loss_mask")
        )
        if any(part is None or part.null_count for part in (prompt, completion, own)):
            raise MalformedError("missing", f"trajectory {index} has nulls among its tokens")
        if len(own) != len(completion):
            raise MalformedError(
                "lengths",
                f"trajectory {index} has {len(own)} values of loss_mask for {len(completion)}"
                " token ids",
            )
        ids = np.concatenate([prompt.to_numpy(), completion.to_numpy()])
        self._check_vocabulary(ids, index)
        mask = np.concatenate([np.zeros(len(prompt), bool), own.to_numpy().astype(bool)])
        return Tokens(ids, mask, len(prompt))

    def _check_vocabulary(self, ids: np.ndarray, index: int) -> None:
        """Raise MalformedError for a token of a trajectory that the model does not have."""
        if (unknown := ids[(ids < 0) | (ids >= self._vocabulary)]).size:
            raise MalformedError(
                "vocabulary",
                f"trajectory {index} has the id {unknown[0]}, and the model has ids from 0 to"
                f" {self._vocabulary - 1}",
            )

    def _refuse_another_tokenizer(self, table: pa.Table) -> None:
        """Check the recorded tokens of a file's first group against its texts. The files name no
        tokenizer.

        Raises:
            ValueError: this tokenizer neither encodes the prompt to its tokens, nor decodes them to
                it, or it decodes no completion to its text.
        """
        if not set(RECORDED_TEXTS) <= set(table.column_names):
            return
        names = ("prompt_ids", "completion_ids", *RECORDED_TEXTS)
        row = {name: table[name][0].as_py() for name in names}
        ids, text = row["prompt_ids"], row["prompt_text"]
        if text and _are_ids(ids) and not self._makes_prompt(ids, text):
            raise ValueError(_another_tokenizer(f"prompt {text[:60]!r}"))
        pairs = zip(row["completion_ids"] or (), row["completion_text"] or (), strict=False)
        told = [(own, text) for own, text in pairs if text and _are_ids(own)]
        # The text of a session is that of its last turn alone.
        fits = str.__contains__ if SESSIONS in table.column_names else str.startswith
        if told and not any(fits(decode(self._tokenizer, own), text) for own, text in told):
            raise ValueError(_another_tokenizer(f"completion {told[0][1][:60]!r}"))

    def _makes_prompt(self, ids: Sequence[int], text: str) -> bool:
        encoded = (
            self._tokenizer.encode(text, add_special_tokens=special) for special in (True, False)
        )
        return list(ids) in encoded or text in decode_prompt(self._tokenizer, ids)


def _sessions(group: dict[str, pa.Scalar]) -> list[list[Node]]:
    """The nodes of each session of a group.

    Raises:
        MalformedError: the columns do not fit together.
    """
    row = cast("SessionsRow", {name: group[name].as_py() for name in NODE_COLUMNS})
    try:
        return nodes_of_group(row)
    except (TypeError, ValueError) as error:  # nulls raise TypeError
        raise MalformedError("turns", str(error)) from None


def _trained_rows(nodes: Sequence[Node]) -> tuple[SessionRow, ...]:
    """The rows of a session.

    Raises:
        MalformedError: no token of it is trained, or its nodes are no tree.
    """
    try:
        rows = session_rows(nodes).rows
    except (TypeError, ValueError) as error:
        raise MalformedError("turns", str(error)) from None
    if not rows:
        raise MalformedError("no_target")
    return rows


def _are_ids(ids: Sequence[int | None] | None) -> bool:
    """Whether the values can be token ids. `_tokens` refuses the others."""
    return bool(ids) and all(token is not None and token >= 0 for token in ids or ())


def _another_tokenizer(what: str) -> str:
    return (
        f"another tokenizer made the recorded tokens, since the {what} has others here; set"
        " model.path to the model of that run"
    )
