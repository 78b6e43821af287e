"""Scores the pairs of a dataset, or its single completions with a label, with the frozen reference
policy. It does so once, into an Arrow file that every epoch and every later attempt reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import ray

from asyncrl.config import OfflineConfig
from asyncrl.contracts.offline_rows import (
    MISMATCHED_COLUMNS,
    MISMATCHED_WITHIN,
    REFERENCE,
    REFERENCE_COLUMNS,
    SFT_SCHEMA,
    SIDES,
    UNPAIRED_REFERENCE_COLUMN,
    TokenRow,
    list_arrays,
    mismatched_rows,
)
from asyncrl.data.token_file import TokenFile, open_token_file
from asyncrl.learning.frozen.reference import start_reference
from asyncrl.preflight.model_snapshot import read_snapshot
from asyncrl.preflight.plan.offline import OfflinePlan
from asyncrl.preflight.specs import offline_reference_spec
from asyncrl.rundir.resume import hash_of
from asyncrl.runtime.files.arrow_files import batch_writer
from asyncrl.runtime.files.opening import read_text, replace_text
from asyncrl.runtime.ray.objects import Actor

Note = Callable[[str], None]
PAIRED_FIELDS = tuple(pa.field(name, REFERENCE) for name in REFERENCE_COLUMNS)
UNPAIRED_FIELDS = (
    pa.field(UNPAIRED_REFERENCE_COLUMN, REFERENCE),
    *(
        pa.field(name, kind)
        for name, kind in zip(MISMATCHED_COLUMNS, (*SFT_SCHEMA.types, REFERENCE), strict=True)
    ),
)
"""The columns that the reference policy adds to pairs, and to single completions."""


async def with_reference(
    config: OfflineConfig,
    plan: OfflinePlan,
    train: TokenFile,
    held_out: TokenFile | None,
    note: Note,
) -> tuple[TokenFile, TokenFile | None]:
    """The rows with the reference policy's columns. Reads the files of an earlier attempt if they
    are of the same rows and reference, and else scores every row once.

    The process of the reference policy ends before training, so it uses memory only here.
    """
    compared = config.compared
    assert compared is not None
    reference: Actor | None = None
    done: list[TokenFile] = []
    try:
        for file in filter(None, (train, held_out)):
            path = file.path.with_name(f"{file.path.stem}_reference.arrow")
            key = reference_key(config, file)
            known = scored_before(path, key)
            if known is None:
                if reference is None:
                    reference = start_reference(offline_reference_spec(config))
                    await reference.ready.remote()
                note(f"the reference policy scores {file.rows:,} {plan.unit} of {file.path.stem}")
                longest = config.data.max_length
                known = await score_rows(reference, file, path, compared.reference_batch, longest)
                replace_text(_seal(path), json.dumps({"key": key, "sha256": known.content_hash}))
            done.append(known)
    finally:
        if reference is not None:
            ray.kill(reference)
    return done[0], done[1] if held_out is not None else None


def scored_before(path: Path, key: str) -> TokenFile | None:
    """The scored pairs of an earlier attempt; None if there are none, if they depend on something
    else than `key`, or if the file has changed since it was written."""
    try:
        sealed = json.loads(read_text(_seal(path)))
    except (OSError, ValueError):
        return None
    file = open_token_file(path)
    same = file is not None and sealed == {"key": key, "sha256": file.content_hash}
    return file if same else None


def _seal(path: Path) -> Path:
    """The file with the key and the checksum of a file of scored pairs."""
    return path.with_suffix(".json")


async def score_rows(
    reference: Actor, file: TokenFile, path: Path, batch: int, longest: int
) -> TokenFile:
    """Score the rows batch by batch. The file appears when it is complete.

    Unpaired rows also get each prompt with the completion of another one, for KTO's baseline.

    Args:
        batch: rows in one call of the reference policy.
        longest: tokens at which such a mismatched row is cut.
    """
    paired = "label" not in file.schema.names
    schema = file.schema
    for field in PAIRED_FIELDS if paired else UNPAIRED_FIELDS:
        schema = schema.append(field)
    with batch_writer(path, schema) as writer:
        for start in range(0, file.rows, batch):
            table = file.take(range(start, min(start + batch, file.rows)))
            if paired:
                for side, name in zip(SIDES, REFERENCE_COLUMNS, strict=True):
                    values = await _scored(reference, table[f"{side}_ids"], table[f"{side}_mask"])
                    table = table.append_column(name, values)
            else:
                near = range(start - MISMATCHED_WITHIN, start)
                before = file.take([row % file.rows for row in near])
                table = await _with_mismatched(reference, table, before, longest)
            writer.write_table(table)
    scored = open_token_file(path)
    assert scored is not None
    return scored


async def _with_mismatched(
    reference: Actor, table: pa.Table, before: pa.Table, longest: int
) -> pa.Table:
    """Unpaired rows with the reference policy's columns. `before` are the rows before the first."""
    other = mismatched_rows(pa.concat_tables([before, table]))[before.num_rows :]
    cut = {
        name: pa.array([values[:longest] for values in list_arrays(other[name])], field.type)
        for name, field in zip(other.column_names, SFT_SCHEMA, strict=True)
    }
    own = await _scored(reference, table["input_ids"], table["loss_mask"])
    found = await _scored(reference, *(pa.chunked_array([values]) for values in cut.values()))
    columns = (own, *cut.values(), found)
    for field, values in zip(UNPAIRED_FIELDS, columns, strict=True):
        table = table.append_column(field, values)
    return table


async def _scored(reference: Actor, ids: pa.ChunkedArray, mask: pa.ChunkedArray) -> pa.Array:
    """The reference policy's log-probs of the targets of each sequence."""
    masks = list_arrays(mask)
    rows = list(_rows(list_arrays(ids), masks))
    found: list[np.ndarray] = await reference.logprobs.remote(rows)
    values = [
        logprobs[targets[len(prompt) :]]
        for logprobs, targets, (prompt, _) in zip(found, masks, rows, strict=True)
    ]
    return pa.array(values, REFERENCE)


def reference_key(config: OfflineConfig, file: TokenFile) -> str:
    """What the log-probs of a file depend on: the rows, the reference's weights, its precision, and
    for unpaired rows the length at which a mismatched row is cut."""
    snapshot = read_snapshot(Path(config.reference_path))
    parts = (
        file.content_hash,
        snapshot.hash,
        sorted(snapshot.weights.items()),
        config.learner.bf16,
        *((config.data.max_length,) if "label" in file.schema.names else ()),
    )
    return hash_of(repr(parts))


def _rows(ids: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> Iterator[TokenRow]:
    """Each sequence as the tokens before its first target, and the others."""
    for tokens, mask in zip(ids, masks, strict=True):
        first = int(mask.argmax())
        yield tokens[:first].tolist(), tokens[first:].tolist()
