"""What a frozen policy scores of a group: the rows, and where their log-probs belong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from asyncrl.contracts.offline_rows import Scored, TokenRow
from asyncrl.contracts.rows import TopLogprobs
from asyncrl.contracts.session_table import NODE_COLUMNS, SessionsRow, nodes_of_group
from asyncrl.sessions.session_rows import session_rows

Logprobs: TypeAlias = "NDArray[np.float32] | NDArray[np.float64]"
"""[T], of one trajectory's tokens."""
Answer: TypeAlias = "Logprobs | TopLogprobs"


@dataclass(frozen=True, slots=True)
class ReferenceRows:
    """R rows of a group, which a reference policy or a teacher scores.

    A completion is one row: its prompt, and its tokens. A session has the learner's rows, so each
    of its trained tokens is scored once, after the tokens that the generator saw before it.
    """

    rows: list[TokenRow]
    scored: Scored | None = None
    """Which of each row's second ids get a log-prob. None: all second ids get one."""
    positions: list[tuple[int, np.ndarray]] | None = None
    """Each row's trajectory, and where its scored tokens are among the trajectory's tokens. None:
    row i has all tokens of trajectory i."""
    lengths: Sequence[int] = ()
    """Tokens of each trajectory, with `positions`."""

    def of_trajectories(
        self, answers: Sequence[Answer]
    ) -> tuple[list[Logprobs], list[TopLogprobs]]:
        """The log-probs of each trajectory's tokens, from the answers for the R rows. Tokens of a
        session that are never trained have 0. A session with a row whose answer has another number
        of tokens gets NaN.

        Returns:
            The log-probs of each trajectory, and the answers of a teacher that also gave other
            tokens.

        Raises:
            ValueError: there is another number of answers for rows of sessions than rows.
        """
        flat = list(answers)
        if self.positions is not None:
            if len(answers) != len(self.rows):
                raise ValueError(f"{len(self.rows)} rows of sessions got {len(answers)} answers")
            found: list[list[tuple[np.ndarray, Answer]]] = [[] for _ in self.lengths]
            for (trajectory, positions), answer in zip(self.positions, answers, strict=True):
                found[trajectory].append((positions, answer))
            counts = [one.other_ids.shape[-1] for one in answers if isinstance(one, TopLogprobs)]
            others = max(counts, default=None)
            flat = [
                _flat(parts, length, others)
                for parts, length in zip(found, self.lengths, strict=True)
            ]
        top = [answer for answer in flat if isinstance(answer, TopLogprobs)]
        return [_logprobs(answer) for answer in flat], top


def reference_rows(group: pa.Table) -> ReferenceRows:
    """The rows of one group's one-row table.

    Raises:
        ValueError: the columns of its sessions do not agree.
    """
    if "turn_parent" not in group.column_names:
        prompt = group["prompt_ids"][0].as_py()
        return ReferenceRows([(prompt, ids) for ids in group["completion_ids"][0].as_py()])
    rows: list[TokenRow] = []
    scored: list[list[bool]] = []
    positions: list[tuple[int, np.ndarray]] = []
    columns = cast("SessionsRow", group.select(list(NODE_COLUMNS)).to_pylist()[0])
    for trajectory, nodes in enumerate(nodes_of_group(columns)):
        for row in session_rows(nodes).rows:
            begin = row.prompt_length
            rows.append((row.token_ids[:begin].tolist(), row.token_ids[begin:].tolist()))
            scored.append(row.trained[begin:].tolist())
            positions.append((trajectory, row.positions[row.trained]))
    return ReferenceRows(rows, scored, positions, [len(ids) for ids in columns["completion_ids"]])


def _flat(parts: Sequence[tuple[np.ndarray, Answer]], length: int, others: int | None) -> Answer:
    """The answers for a session's rows as one for its T tokens.

    Args:
        others: how many other tokens the answers have at each token. None: they have no others.
    """
    positions = [at for at, _ in parts]
    logprobs = _spread([_logprobs(answer) for _, answer in parts], positions, (length,), np.float32)
    if others is None:
        return logprobs
    top = [answer for _, answer in parts if isinstance(answer, TopLogprobs)]
    shape = (length, others)
    return TopLogprobs(
        logprobs,
        _spread([answer.other_ids for answer in top], positions, shape, np.int32),
        _spread([answer.other_logprobs for answer in top], positions, shape, np.float32),
    )


def _logprobs(answer: Answer) -> np.ndarray:
    return answer.logprobs if isinstance(answer, TopLogprobs) else answer


def _spread(
    parts: Sequence[np.ndarray],
    positions: Sequence[np.ndarray],
    shape: tuple[int, ...],
    dtype: type[np.generic],
) -> np.ndarray:
    """The values of the parts at their positions of an array, 0 elsewhere. All are NaN if a part
    has another number of values than of positions."""
    fits = [part.shape == (len(at), *shape[1:]) for part, at in zip(parts, positions, strict=True)]
    if not all(fits):
        return np.full(shape, math.nan)
    whole = np.zeros(shape, dtype)
    for part, at in zip(parts, positions, strict=True):
        whole[at] = part
    return whole
