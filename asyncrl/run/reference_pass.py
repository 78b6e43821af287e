"""Scores the pairs of a dataset with the frozen reference policy, once, into an Arrow file that
every epoch and every later attempt reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import ray

from asyncrl.config import OfflineConfig
from asyncrl.contracts.offline_rows import (
    REFERENCE,
    REFERENCE_COLUMNS,
    SIDES,
    TokenRow,
    list_arrays,
)
from asyncrl.data.token_file import TokenFile, open_token_file
from asyncrl.frozen.reference import start_reference
from asyncrl.preflight.model_snapshot import read_snapshot
from asyncrl.preflight.offline_plan import OfflinePlan
from asyncrl.preflight.specs import offline_reference_spec
from asyncrl.rundir.resume import hash_of
from asyncrl.runtime.arrow_files import batch_writer
from asyncrl.runtime.files import read_text, replace_text
from asyncrl.runtime.ray_objects import Actor

__all__ = ["score_pairs", "with_reference"]

Note = Callable[[str], None]


async def with_reference(
    config: OfflineConfig,
    plan: OfflinePlan,
    train: TokenFile,
    held_out: TokenFile | None,
    note: Note,
) -> tuple[TokenFile, TokenFile | None]:
    """The pairs with the columns REFERENCE_COLUMNS. Reads the files of an earlier attempt if they
    are of the same rows and reference, and else scores every row once.

    The process of the reference policy ends before training, so it uses memory only here.
    """
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
                note(f"the reference policy scores {file.rows:,} pairs of {file.path.stem}")
                known = await score_pairs(reference, file, path, config.dpo.reference_batch)
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


async def score_pairs(reference: Actor, file: TokenFile, path: Path, batch: int) -> TokenFile:
    """Score the pairs batch by batch. The file appears when it is complete."""
    schema = file.schema
    for name in REFERENCE_COLUMNS:
        schema = schema.append(pa.field(name, REFERENCE))
    with batch_writer(path, schema) as writer:
        for start in range(0, file.rows, batch):
            table = file.take(range(start, min(start + batch, file.rows)))
            for side, name in zip(SIDES, REFERENCE_COLUMNS, strict=True):
                masks = list_arrays(table[f"{side}_mask"])
                rows = list(_rows(list_arrays(table[f"{side}_ids"]), masks))
                found: list[np.ndarray] = await reference.logprobs.remote(rows)
                values = [
                    logprobs[mask[len(prompt) :]]
                    for logprobs, mask, (prompt, _) in zip(found, masks, rows, strict=True)
                ]
                table = table.append_column(name, pa.array(values, REFERENCE))
            writer.write_table(table)
    scored = open_token_file(path)
    assert scored is not None
    return scored


def reference_key(config: OfflineConfig, file: TokenFile) -> str:
    """What the log-probs of a file depend on: the rows, the reference's weights, its precision."""
    snapshot = read_snapshot(Path(config.reference_path))
    parts = (
        file.content_hash,
        snapshot.hash,
        sorted(snapshot.weights.items()),
        config.learner.bf16,
    )
    return hash_of(repr(parts))


def _rows(ids: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> Iterator[TokenRow]:
    """Each sequence as the tokens before its first target, and the others."""
    for tokens, mask in zip(ids, masks, strict=True):
        first = int(mask.argmax())
        yield tokens[:first].tolist(), tokens[first:].tolist()
