"""Scoring fixed tokens returns the log-probs that sampling them returned."""

import numpy as np

from asyncrl.contracts.messages import GenerateRequest
from asyncrl.generation.app import ServeGenerate


async def test_fixed_tokens_have_the_log_probs_that_sampling_gave(generators):
    generate = ServeGenerate(generators.handle)

    rows, sampled = [], []
    for seed in range(4):
        prompt = (5 + seed, 6, 14, 7)
        completion = (
            await generate.generate(GenerateRequest(prompt, 1, 24, 1.0, seed=seed, ignore_eos=True))
        ).completions[0]
        rows.append((prompt, completion.token_ids))
        sampled.append(completion.logprobs)
    sampled, by_replica = sampled, await generate.logprobs(rows, None)
    assert by_replica
    for scored in by_replica.values():
        assert [len(row) for row in scored] == [24] * 4
        assert np.abs(np.concatenate(sampled) - np.concatenate(scored)).max() <= 1e-4
