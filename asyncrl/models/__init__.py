"""The policy network on packed rows: attention, log-probs, and the supported model families."""

from __future__ import annotations

from asyncrl.runtime.exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    MicroBatch="micro_batches",
    Policy="policy",
    Segments="attention",
    check_isolation="isolation",
    checkpoint_activations="policy",
    load_policy="policy",
    micro_batch="micro_batches",
    register_attention="attention",
    support="supported",
    token_example="micro_batches",
)
