"""Text and sampling of a real engine: a tokenizer with a misleading class, stop strings of several
tokens, and truncated sampling."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import EngineActor
from llama_checkpoint import claim_llama_class

from asyncrl.config import GeneratorConfig
from asyncrl.contracts.messages import GenerateRequest
from asyncrl.generation.engine.arguments import engine_environment
from asyncrl.generation.settings import GeneratorApp
from asyncrl.text.stops import Stops
from asyncrl.text.tokenizer import decode, load_tokenizer, tokenizer_hash

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = (1, 40, 41, 42)


@pytest.fixture(scope="module")
def model(llama_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return claim_llama_class(
        shutil.copytree(llama_model, tmp_path_factory.mktemp("models") / "misnamed")
    )


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return load_tokenizer(str(model))


@pytest.fixture(scope="module")
def ask(ray_cluster: Any, model: Path, engine_starts: list[str]) -> Iterator[Any]:
    """`ask(method, *arguments)` calls a method of an engine and returns the answer."""

    class TextActor(EngineActor):
        async def stop_at(self, strings: tuple[str, ...]) -> None:
            requests = self.engine.requests
            requests.stops = Stops(requests.stops.tokens, strings)

        async def facts(self) -> tuple[str, str]:
            requests = self.engine.requests
            return requests.tokenizer_hash, requests._state.llm.get_tokenizer().decode(
                load_tokenizer(self.app.model).encode("What is 2")
            )

    app = GeneratorApp(
        model=str(model),
        max_model_len=256,
        generator=GeneratorConfig(max_num_seqs=32, kv_cache_memory_bytes=16 << 20),
    )
    engine_starts.append("engine of text")
    actor = (
        ray_cluster.remote(TextActor)
        .options(num_cpus=0, runtime_env={"env_vars": engine_environment("cpu")})
        .remote(app)
    )
    ray_cluster.get(actor.start.remote(), timeout=500)
    yield lambda method, *arguments: ray_cluster.get(
        getattr(actor, method).remote(*arguments), timeout=120
    )
    ray_cluster.kill(actor)


def test_the_engine_decodes_with_the_tokenizer_that_encodes(ask: Any, tokenizer: Any) -> None:
    fingerprint, text = ask("facts")
    assert fingerprint == tokenizer_hash(tokenizer) and text == "<s>What is 2"
    for seed in range(4):
        [completion] = ask(
            "generate", GenerateRequest(PROMPT, 1, 60, 1.0, seed=seed, ignore_eos=True)
        )
        assert (
            completion.text == decode(tokenizer, completion.token_ids)
            and "Ġ" not in completion.text
            and " " in completion.text
        )


@pytest.mark.parametrize("whose", ["the engine's", "the request's"])
def test_a_stop_string_of_several_tokens_ends_a_completion_at_the_token_that_completes_it(
    ask: Any, tokenizer: Any, whose: str
) -> None:
    """The tokens of the stop string stay, with their log-probs and versions. The text ends before
    it."""
    for seed in range(6):
        request = GenerateRequest(PROMPT, 2, 80, 1.0, seed=seed)
        ask("stop_at", ())
        plain = ask("generate", request)
        # Printable characters only: a random model also writes incomplete ones, and vLLM waits for
        # their other bytes.
        stop = next(
            found[0]
            for completion in plain
            for found in re.finditer("[ -~]{4}", completion.text)
            if found.start() > 20
        )
        if whose == "the engine's":
            ask("stop_at", (stop, "never to be seen"))
        ended = ask(
            "generate",
            (
                request
                if whose == "the engine's"
                else GenerateRequest(PROMPT, 2, 80, 1.0, seed=seed, stop=(stop,))
            ),
        )
        assert any(stop in whole.text for whole in plain)
        for whole, cut in zip(plain, ended, strict=True):
            size = next(
                (
                    k
                    for k in range(len(whole.token_ids) + 1)
                    if stop in decode(tokenizer, whole.token_ids[:k])
                ),
                len(whole.token_ids),
            )
            assert cut.token_ids == whole.token_ids[:size] and len(cut.logprobs) == size
            assert cut.logprobs == pytest.approx(whole.logprobs[:size], abs=1e-5)
            assert [(span.start, span.end) for span in cut.versions] == [(0, size)]
            assert cut.text == whole.text.partition(stop)[0] and cut.finish_reason == (
                "stop" if stop in whole.text else whole.finish_reason
            )
        assert len(tokenizer.encode(stop, add_special_tokens=False)) > 1
    ask("stop_at", (stop,))
    [measured] = ask("generate", GenerateRequest(PROMPT, 1, 80, 1.0, seed=seed, ignore_eos=True))
    assert len(measured.token_ids) == 80, "ignore_eos also ignores stop strings"


def test_a_stop_string_that_is_a_special_token_ends_a_completion_as_that_token(
    ask: Any, tokenizer: Any
) -> None:
    """The text does not contain it."""
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    ask("stop_at", ())
    ended = 0
    for seed in range(8):
        whole, cut = (
            ask(
                "generate",
                GenerateRequest(PROMPT, 1, 200, 1.3, seed=seed, ignore_eos=True, stop=stop),
            )[0]
            for stop in ((), ("<|user|>",))
        )
        size = whole.token_ids.index(user) + 1 if user in whole.token_ids else 200
        assert cut.token_ids == whole.token_ids[:size] and cut.finish_reason == (
            "stop" if user in whole.token_ids else "length"
        )
        ended += cut.finish_reason == "stop"
    assert ended, "no completion contained the token, so nothing was tested"


@pytest.mark.parametrize("kept", [{"top_k": 5}, {"top_p": 0.3}, {"min_p": 0.6}])
def test_log_probs_are_renormalized_over_the_kept_tokens(
    ask: Any, model: Path, load_reference: Any, reference: Any, kept: dict[str, Any]
) -> None:
    """So they cannot be compared with the learner's, which are over all tokens."""
    ask("stop_at", ())
    policy, temperature = load_reference(model), 0.7
    [completion] = ask(
        "generate", GenerateRequest(PROMPT, 1, 40, temperature, seed=3, ignore_eos=True, **kept)
    )
    with torch.no_grad():
        logits = (
            policy(torch.tensor([[*PROMPT, *completion.token_ids]]), use_cache=False)
            .logits[0]
            .float()[len(PROMPT) - 1 : -1]
        )
    probabilities = torch.softmax(logits / temperature, -1)
    descending, order = probabilities.sort(-1, descending=True)
    keep = torch.ones_like(descending, dtype=torch.bool)
    keep[:, kept.get("top_k", descending.shape[1]) :] = False
    keep &= descending.cumsum(-1) - descending < kept.get("top_p", 1.0)
    keep &= descending >= kept.get("min_p", 0.0) * descending[:, :1]
    mass = (descending * keep).sum(-1)
    chosen = torch.tensor(completion.token_ids)[:, None]
    assert keep.gather(1, (order == chosen).int().argmax(-1, keepdim=True)).all(), (
        "a truncated token was sampled"
    )
    assert mass.max() < 0.95
    full = reference(policy, PROMPT, completion.token_ids, temperature)
    ours = torch.tensor(completion.logprobs)
    assert (ours - (full - mass.log())).abs().max() < 1e-4
    assert (ours - full).abs().min() > -math.log(0.95)


def test_without_truncation_log_probs_are_those_of_the_whole_distribution(
    ask: Any, model: Path, load_reference: Any, reference: Any
) -> None:
    [completion] = ask("generate", GenerateRequest(PROMPT, 1, 40, 0.7, seed=3, ignore_eos=True))
    full = reference(load_reference(model), PROMPT, completion.token_ids, 0.7)
    assert (torch.tensor(completion.logprobs) - full).abs().max() < 1e-4
