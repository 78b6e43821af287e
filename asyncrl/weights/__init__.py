"""Weight synchronization: gather, publish, fetch, check and apply a version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.weights.engine import BACKEND as BACKEND, TOKENIZER_MODE as TOKENIZER_MODE
    from asyncrl.weights.gather import (
        gather_buckets as gather_buckets,
        weight_layout as weight_layout,
    )
    from asyncrl.weights.layout import (
        bucket_checksum as bucket_checksum,
        plan_buckets as plan_buckets,
    )
    from asyncrl.weights.manifest import expected_tensors as expected_tensors
    from asyncrl.weights.published import (
        CannotPublishError as CannotPublishError,
        version_table as version_table,
    )
    from asyncrl.weights.staging import Staged as Staged, fetch_version as fetch_version

__getattr__ = lazy_exports(
    __name__,
    BACKEND="engine",
    bucket_checksum="layout",
    CannotPublishError="published",
    expected_tensors="manifest",
    fetch_version="staging",
    gather_buckets="gather",
    plan_buckets="layout",
    Staged="staging",
    TOKENIZER_MODE="engine",
    version_table="published",
    weight_layout="gather",
)
