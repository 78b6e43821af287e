"""How often two ZeRO-3 ranks with rows of very different lengths gather the head.

For each micro-batch, it is gathered once in the forward pass, and at most once in the backward
pass. (In a small model, DeepSpeed keeps parameters that are used again soon.) The number of chunks
of log-probs does not matter. With a gather for each chunk, the rank with more chunks would wait
forever for the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_ranks import on_ranks
from recorded import learner_config

from asyncrl.contracts.offline_rows import token_table
from asyncrl.learning.engine import zero
from asyncrl.preflight.specs import learner_spec

VOCABULARY = 128
"""Gives a head of 8,192 parameters. Parameters of up to 4,096 elements are never released, and so
never gathered."""
CHUNK_ROWS = {"chunks": 4, "whole": 1000}
ROWS = [(tuple(range(3, 6)), tuple(range(10, 70))), ((3,), (4, 5))] * 2
"""Rows with 60 targets in 15 chunks, and with 2 targets in one chunk."""
STEPS = 2


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_head_is_gathered_once_forward_and_at_most_once_backward(
    tmp_path: Path, save_qwen3: Callable[..., Path], tied: bool
) -> None:
    path = save_qwen3(tmp_path / "model", tied=tied, vocab_size=VOCABULARY)
    found = on_ranks(2, count_gathers, path)
    for rank in found:
        for micro_batches, chunks, gathers in (step for steps in rank.values() for step in steps):
            assert micro_batches == 2 <= chunks
            assert (
                gathers["forward"] == micro_batches
                and gathers["backward"] <= micro_batches
                and gathers["on access"] == 0
            )
    assert [found[rank]["chunks"][0][1] for rank in (0, 1)] == [30, 2] and found[0]["whole"][0][
        1
    ] == 2
    for step in range(STEPS):
        gathers = [rank[variant][step][2] for rank in found for variant in CHUNK_ROWS]
        assert gathers == [gathers[0]] * 4, "on both ranks, in chunks and whole"


def count_gathers(
    rank: int, world_size: int, path: Path
) -> dict[str, list[tuple[int, int, dict[str, int]]]]:
    """Variant → (this rank's micro-batches, chunks of log-probs in their forward passes, gathers of
    the head by pass) of each step."""
    from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus
    from deepspeed.runtime.zero.partitioned_param_coordinator import (
        PartitionedParameterCoordinator as Coordinator,
    )

    import asyncrl.algorithms.logprobs as logprobs_module
    from asyncrl.learning.engine.state import load_state
    from asyncrl.learning.rank import LearnerRank
    from asyncrl.learning.steps import passes

    config = learner_config(path, world_size=world_size, max_tokens=64)
    learner = LearnerRank(load_state(rank, learner_spec(config)), "run", 1)
    head = zero.policy_of(learner.state.engine).model.get_output_embeddings().weight
    assert (
        head.ds_numel == VOCABULARY * 64
        and not head.ds_persist
        and head.ds_status == ZeroParamStatus.NOT_AVAILABLE
    )
    gathers: Counter[str] = Counter()
    chunks = [0]

    def count_head(parameters: Any, kind: str) -> None:
        gathers[kind] += sum(
            parameter is head and parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE
            for parameter in parameters
        )

    fetch, gather, plan = (
        Coordinator._PartitionedParameterCoordinator__all_gather_params_,
        Init._all_gather,
        passes.plan_micro_batches,
    )

    def counting_fetch(self: Any, parameters: Any, forward: bool, quantize: bool = False) -> Any:
        count_head(parameters, "forward" if forward else "backward")
        return fetch(self, parameters, forward, quantize)

    def counting_gather(self: Any, parameters: Any, *arguments: Any, **settings: Any) -> Any:
        count_head(parameters, "on access")
        return gather(self, parameters, *arguments, **settings)

    def long_rows_on_rank_0(state: Any, examples: Any) -> Any:
        packing = plan(state, examples)
        lengths = [len(example.tokens) for example in examples]
        longest = tuple((index,) for index in range(len(lengths)) if lengths[index] > 10)
        shortest = tuple((index,) for index in range(len(lengths)) if lengths[index] <= 10)
        return replace(packing, micro_batches=(longest, shortest))

    chunk = logprobs_module._chunk

    def counting_chunk(*arguments: Any, **settings: Any) -> Any:
        chunks[0] += torch._C._current_graph_task_id() == -1  # only in the forward pass
        return chunk(*arguments, **settings)

    Coordinator._PartitionedParameterCoordinator__all_gather_params_, Init._all_gather = (
        counting_fetch,
        counting_gather,
    )
    logprobs_module._chunk, passes.plan_micro_batches = counting_chunk, long_rows_on_rank_0
    found: dict[str, list[tuple[int, int, dict[str, int]]]] = {}
    learner.supervised_step(token_table(ROWS))  # DeepSpeed records the order of the modules
    for variant, rows in CHUNK_ROWS.items():
        zero.policy_of(learner.state.engine).head = logprobs_module.HeadSettings(
            chunk_elements=rows * VOCABULARY
        )
        found[variant] = []
        for _ in range(STEPS):
            gathers.clear()
            chunks[0] = 0
            metrics = learner.supervised_step(token_table(ROWS))
            assert metrics["applied"]
            found[variant].append(
                (
                    int(metrics["micro_batches"]) // world_size,
                    chunks[0],
                    {kind: gathers[kind] for kind in ("forward", "backward", "on access")},
                )
            )
    return found
