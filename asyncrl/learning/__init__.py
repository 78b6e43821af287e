"""The learner: DeepSpeed ZeRO ranks that train policy and supervised steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.learning.driver import RayLearner as RayLearner
    from asyncrl.learning.engine.shifts import DeviceShifts as DeviceShifts
    from asyncrl.learning.engine.state import Meeting as Meeting
    from asyncrl.learning.examples.offline_examples import (
        examples_with as examples_with,
        pairs_of as pairs_of,
    )
    from asyncrl.learning.frozen.reference import start_reference as start_reference
    from asyncrl.learning.packing.blocks import pack_blocks as pack_blocks
    from asyncrl.learning.packing.prefixes import pack_shared as pack_shared
    from asyncrl.learning.packing.strategies import pack as pack, pack_rows as pack_rows
    from asyncrl.learning.rank import LearnerRank as LearnerRank, start_rank as start_rank

__getattr__ = lazy_exports(
    __name__,
    DeviceShifts="engine.shifts",
    examples_with="examples.offline_examples",
    RayLearner="driver",
    LearnerRank="rank",
    Meeting="engine.state",
    pack="packing.strategies",
    pack_blocks="packing.blocks",
    pack_rows="packing.strategies",
    pack_shared="packing.prefixes",
    pairs_of="examples.offline_examples",
    start_rank="rank",
    start_reference="frozen.reference",
)
