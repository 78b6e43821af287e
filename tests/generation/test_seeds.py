"""Seeds that are drawn in blocks are those that vLLM draws one by one."""

import itertools
from importlib.metadata import entry_points

import pytest
import torch

ROWS, VOCABULARY, STEPS = 5, 40, 150  # more steps than a block has numbers


@pytest.fixture
def samplers(monkeypatch):
    """(vLLM's sampler, ours)."""
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    from asyncrl.generation.seeds import draw_in_blocks

    current_platform.import_kernels()
    theirs = TopKTopPSampler.forward_cpu
    monkeypatch.setattr(TopKTopPSampler, "forward_cpu", theirs)  # undone at the end
    draw_in_blocks()
    ours = TopKTopPSampler.forward_cpu
    assert ours is not theirs
    draw_in_blocks()
    assert TopKTopPSampler.forward_cpu is ours, "a second call has no effect"
    sampler = TopKTopPSampler("processed_logprobs")
    return (lambda *args: theirs(sampler, *args)), (lambda *args: ours(sampler, *args))


def generators(seeds):
    return {row: torch.Generator().manual_seed(seed) for row, seed in seeds.items()}


@pytest.mark.parametrize("top_k", [None, 3])
def test_every_token_and_logprob_is_the_same(samplers, top_k):
    seeds = {row: 11 * row for row in range(ROWS)}
    k = None if top_k is None else torch.full((ROWS,), top_k)
    runs = []
    for sample in samplers:
        own, tokens, logprobs = generators(seeds), [], []
        for step in range(STEPS):
            logits = torch.randn(
                ROWS, VOCABULARY, generator=torch.Generator().manual_seed(1000 + step)
            )
            token, logprob = sample(logits, own, k, None)
            tokens.append(token)
            logprobs.append(logprob)
        runs.append((torch.stack(tokens), torch.stack(logprobs)))
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
    assert len(set(runs[0][0].flatten().tolist())) > 3


def test_a_request_keeps_its_numbers_whoever_shares_its_batch(samplers):
    """The row moves, and requests with and without seeds come and go."""
    found = []
    for sample, moves in itertools.product(samplers, (False, True)):
        mine, tokens = torch.Generator().manual_seed(3), []
        for step in range(STEPS):
            rows = 1 + step % 4 if moves else 1
            row = step % rows
            own = {row: mine}
            if step % 3 == 0:
                own |= {at: torch.Generator().manual_seed(at) for at in range(rows) if at != row}
            token, _ = sample(torch.zeros(rows, VOCABULARY), own, None, None)
            tokens.append(int(token[row]))
        found.append(tokens)
    assert found[0] == found[1] == found[2] == found[3]


def test_requests_without_seeds_get_the_numbers_of_vllm(samplers):
    found = []
    for sample in samplers:
        torch.manual_seed(7)
        own, tokens = torch.Generator().manual_seed(3), []
        for step in range(40):
            row = {0: own} if step % 2 else {0: own, 1: torch.Generator().manual_seed(step)}
            tokens += sample(torch.zeros(2, VOCABULARY), row, None, None)[0].tolist()
        found.append(tokens)
    assert found[0] == found[1]


def test_an_empty_batch_gives_no_token(samplers):
    for sample in samplers:
        assert sample(torch.zeros(0, VOCABULARY), {}, None, None)[0].numel() == 0


def test_requests_without_seeds_differ(samplers):
    _, sample = samplers
    logits = torch.zeros(64, VOCABULARY)
    assert not torch.equal(sample(logits, {}, None, None)[0], sample(logits, {}, None, None)[0])


def test_an_engine_on_the_cpu_loads_the_plugin():
    from asyncrl.generation import engine_environment
    from asyncrl.generation.seeds import draw_in_blocks

    (plugin,) = entry_points(group="vllm.general_plugins", name="asyncrl_seeds")
    assert plugin.load() is draw_in_blocks
    assert plugin.name in engine_environment("cpu")["VLLM_PLUGINS"].split(",")
    assert plugin.name not in engine_environment("cuda")["VLLM_PLUGINS"]
