"""What became of a dataset on its way to token rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from asyncrl.data.conversations import Tokens
from asyncrl.data.encoded_rows import EncodedRow
from asyncrl.data.form_rows import REASONS, MalformedError
from asyncrl.data.length_limits import Cuts
from asyncrl.data.sources import SourceRows

MARKS = ("⟦", "⟧")
"""Put around the trained tokens where a row is shown."""
COUNTED: Mapping[str, str] = {
    "tags": "chats: the template's generation tags mark what is trained",
    "proof": "chats: what is trained follows from the tokens before and after each turn",
    "end_added": "chats: the generation tags leave out the end of a turn, which is trained as well",
    "marked": "chats have turns that their rows mark as not trained",
    "started": "prompts end within the model's turn, which the completion continues",
    "apart": "completions were encoded apart, because tokens would merge across the prompt's end",
    "own_bos": "texts already begin with BOS, which is not added again",
}
"""Count of `Encoder.counts` → its meaning, after the number."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The rows that were left out for one reason."""

    rows: int
    first: str
    """The first of them: its source and row, and what is wrong."""


@dataclass(frozen=True, slots=True)
class OfflineReport:
    """What became of a dataset."""

    read: int
    """Rows of the data."""
    rows: int
    """Rows of the token table."""
    cuts: Cuts
    """What data.max_length did: table rows cut and dropped, and tokens lost on all sides."""
    malformed: Mapping[str, LeftOut]
    """Reason → rows left out. The reasons are the keys of `form_rows.REASONS`."""
    unsuitable: int
    """Recorded groups left out, because no reward is high enough, or all are equal."""
    tokens: int
    """Tokens of all sides."""
    targets: int
    """Tokens that are trained."""
    longest: int
    """Tokens of the longest sequence."""
    sources: tuple[SourceRows, ...]
    """The sources, each with its number of table rows. These are contiguous."""
    forms: tuple[str, ...]
    """The form of each source."""
    idle: tuple[str, ...]
    """Settings of the section `data` that are given, and act on none of these forms."""
    notes: tuple[str, ...]
    """What the template and the settings did, in words."""
    first: tuple[str, ...]
    """The sides of the first table row as text, with the trained tokens between ⟦ and ⟧."""
    digest: str
    """SHA-256 of all token ids, masks and labels, in order."""

    @property
    def dropped(self) -> int:
        """Rows left out as too long or malformed."""
        return self.cuts.dropped + sum(found.rows for found in self.malformed.values())

    def metrics(self) -> dict[str, int]:
        """The counts by name: `read`, `rows`, `tokens`, `targets`, `longest`, `cut_rows`,
        `cut_tokens`, `too_long`, `unsuitable`, and `malformed_<reason>` for each reason met."""
        return {
            "read": self.read,
            "rows": self.rows,
            "tokens": self.tokens,
            "targets": self.targets,
            "longest": self.longest,
            "cut_rows": self.cuts.rows,
            "cut_tokens": self.cuts.tokens,
            "too_long": self.cuts.dropped,
            "unsuitable": self.unsuitable,
            **{f"malformed_{reason}": found.rows for reason, found in self.malformed.items()},
        }

    def text(self) -> str:
        """One line: rows, tokens, and what was cut or left out."""
        parts = [
            f"{self.rows} rows from {self.read}, with {self.tokens} tokens ({self.targets} trained,"
            f" longest sequence {self.longest})"
        ]
        if self.cuts.rows:
            parts.append(f"max_length: {self.cuts.rows} cut by {self.cuts.tokens} tokens")
        if self.cuts.dropped:
            parts.append(f"max_length: {self.cuts.dropped} dropped")
        parts += [
            f"{found.rows} dropped because {REASONS[reason]} (first: {found.first})"
            for reason, found in self.malformed.items()
        ]
        if self.unsuitable:
            parts.append(f"{self.unsuitable} groups left out for their rewards")
        return "; ".join(parts)


@dataclass(slots=True)
class Tally:
    """The counts of a report while the data is read."""

    read: int = 0
    rows: int = 0
    cuts: Cuts = field(default_factory=Cuts)
    malformed: dict[str, LeftOut] = field(default_factory=dict)
    unsuitable: int = 0
    tokens: int = 0
    targets: int = 0
    longest: int = 0
    rows_of_source: dict[int, int] = field(default_factory=dict)
    labels: dict[bool, int] = field(default_factory=dict)
    """Label → rows with it (KTO)."""
    first: tuple[str, ...] = ()
    _hash: hashlib._Hash = field(default_factory=hashlib.sha256)

    def add(self, rows: Sequence[EncodedRow], source: int, show: Callable[[Tokens], str]) -> None:
        """Count table rows of a source."""
        if not rows:
            return
        self.first = self.first or tuple(show(side) for side in rows[0].sides)
        self.rows += len(rows)
        self.rows_of_source[source] = self.rows_of_source.get(source, 0) + len(rows)
        for row in rows:
            self.longest = max(self.longest, row.length)
            self._hash.update(repr(row.label).encode())
            if row.label is not None:
                self.labels[row.label] = self.labels.get(row.label, 0) + 1
            for side in row.sides:
                self.tokens += len(side.ids)
                self.targets += int(side.mask.sum())
                self._hash.update(len(side.ids).to_bytes(8, "little"))
                self._hash.update(side.ids.tobytes() + side.mask.tobytes())

    def refuse(self, error: MalformedError, where: str) -> None:
        """Count a malformed row."""
        before = self.malformed.get(error.reason)
        self.malformed[error.reason] = LeftOut(
            1 + (before.rows if before else 0), before.first if before else f"{where}: {error}"
        )

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def report(
        self,
        sources: Iterable[SourceRows],
        forms: Iterable[str],
        idle: Iterable[str],
        notes: Iterable[str],
    ) -> OfflineReport:
        return OfflineReport(
            read=self.read,
            rows=self.rows,
            cuts=self.cuts,
            malformed=dict(self.malformed),
            unsuitable=self.unsuitable,
            tokens=self.tokens,
            targets=self.targets,
            longest=self.longest,
            sources=tuple(sources),
            forms=tuple(forms),
            idle=tuple(idle),
            notes=tuple(notes),
            first=self.first,
            digest=self.digest,
        )


def label_note(labels: Mapping[bool, int]) -> list[str]:
    """The counts of KTO's labels in words."""
    if not labels:
        return []
    text = f"labels: {labels.get(True, 0)} true, {labels.get(False, 0)} false"
    return [text if len(labels) == 2 else f"{text}; with one label, nothing is compared"]


def marked_text(tokens: Tokens, decode: Callable[[Sequence[int]], str]) -> str:
    """A sequence as text, with its trained tokens between MARKS."""
    edges = np.flatnonzero(np.diff(tokens.mask)) + 1
    runs = zip(np.split(tokens.ids, edges), np.split(tokens.mask, edges), strict=True)
    before, after = MARKS
    return "".join(
        f"{before}{decode(ids.tolist())}{after}" if mask[:1].any() else decode(ids.tolist())
        for ids, mask in runs
    )


def count_notes(counts: Mapping[str, int]) -> list[str]:
    """The counts of an `Encoder` in words."""
    return [f"{counts[name]} {meaning}" for name, meaning in COUNTED.items() if name in counts]


def dropped_notes(dropped: Mapping[str, int]) -> list[str]:
    """The keys and parts of chats that were left out, in words."""
    return [f"left out of chats: {name} ({count} times)" for name, count in dropped.items()]
