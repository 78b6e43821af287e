"""The policy network on packed rows: attention, log-probs, and the supported model families."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.models.attention import (
        register_attention as register_attention,
        segment_attention as segment_attention,
    )
    from asyncrl.models.isolation import check_isolation as check_isolation
    from asyncrl.models.micro_batches import (
        Example as Example,
        MicroBatch as MicroBatch,
        micro_batch as micro_batch,
        packing_units as packing_units,
        token_example as token_example,
    )
    from asyncrl.models.policy import (
        Policy as Policy,
        checkpoint_activations as checkpoint_activations,
        head_settings as head_settings,
        load_policy as load_policy,
    )
    from asyncrl.models.segments import Segments as Segments
    from asyncrl.models.supported import support as support

__getattr__ = lazy_exports(
    __name__,
    check_isolation="isolation",
    checkpoint_activations="policy",
    Example="micro_batches",
    head_settings="policy",
    load_policy="policy",
    micro_batch="micro_batches",
    MicroBatch="micro_batches",
    packing_units="micro_batches",
    Policy="policy",
    register_attention="attention",
    segment_attention="attention",
    Segments="segments",
    support="supported",
    token_example="micro_batches",
)
