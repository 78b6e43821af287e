"""Scores the pairs of a dataset with the frozen reference policy, once, into an Arrow file that
every epoch and every later attempt reads."""

from __future__ import annotations

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
from asyncrl.runtime.ray_objects import Actor

__all__ = ["score_pairs", "with_reference"]

Note = Callable[[str], None]
KEY = b"asyncrl.reference"
"""Metadata of the file: what its log-probs depend on."""


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
            known = open_token_file(path)
            if known is None or known.metadata.get(KEY) != key:
                if reference is None:
                    reference = start_reference(offline_reference_spec(config))
                    await reference.ready.remote()
                note(f"the reference policy scores {file.rows:,} pairs of {file.path.stem}")
                known = await score_pairs(reference, file, path, key, config.dpo.reference_batch)
            done.append(known)
    finally:
        if reference is not None:
            ray.kill(reference)
    return done[0], done[1] if held_out is not None else None


async def score_pairs(
    reference: Actor, file: TokenFile, path: Path, key: bytes, batch: int
) -> TokenFile:
    """Score the pairs batch by batch. The file appears when it is complete."""
    schema = file.schema
    for name in REFERENCE_COLUMNS:
        schema = schema.append(pa.field(name, REFERENCE))
    with batch_writer(path, schema.with_metadata({KEY: key})) as writer:
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
            writer.write_table(table.replace_schema_metadata({KEY: key}))
    scored = open_token_file(path)
    assert scored is not None
    return scored


def reference_key(config: OfflineConfig, file: TokenFile) -> bytes:
    """What the log-probs of a file depend on: the rows, the reference's weights, its precision."""
    snapshot = read_snapshot(Path(config.reference_path))
    parts = (
        file.content_hash,
        snapshot.hash,
        sorted(snapshot.weights.items()),
        config.learner.bf16,
    )
    return hash_of(repr(parts)).encode()


def _rows(ids: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> Iterator[TokenRow]:
    """Each sequence as the tokens before its first target, and the others."""
    for tokens, mask in zip(ids, masks, strict=True):
        first = int(mask.argmax())
        yield tokens[:first].tolist(), tokens[first:].tolist()
