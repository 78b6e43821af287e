"""The plan checks a teacher's tokenizer and vocabulary before anything starts."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from served_http import listening

from asyncrl.config import ConfigError, load_config
from asyncrl.preflight.plan.plan import make_plan
from asyncrl.preflight.resources.needs import logical_cpus, run_needs
from asyncrl.preflight.trials.teacher import check_teacher
from asyncrl.text.tokenizer import load_tokenizer

TEACHER = "algorithm.distillation.teacher"


def refusal(path: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        check_teacher(load_config(path))
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_the_plan_shows_the_teacher_its_memory_and_the_rule(write: Any, tiny_model: Any) -> None:
    config = load_config(write({TEACHER: str(tiny_model), "algorithm.distillation.use.coef": 0.5}))
    plan = make_plan(config)
    text = plan.text()
    assert f"teacher: {tiny_model}, a process on cpu with " in text
    assert "same tokenizer (" in text and "scored at the rollouts' temperature 1" in text
    assert "advantage of a token = 0.5 x (log π_teacher - log π_behavior)" in text
    assert "experimental: no complete run" in text
    assert "teacher" in [part.name for part in logical_cpus(config)]
    [need] = [need for need in run_needs(config, plan.weights_bytes) if need.part == "teacher"]
    assert need.amounts["memory"] > 0


def test_the_plan_names_the_tokens_of_top_k(write: Any, tiny_model: Any) -> None:
    use = {"algorithm.distillation.use": {"name": "top_k", "top_k": 8}}
    text = make_plan(load_config(write({TEACHER: str(tiny_model), **use}))).text()
    assert "experimental" not in text
    assert (
        "loss 1 x KL(π ‖ π_teacher) over the sampled token, the teacher's 8 most probable others,"
        " and the rest as one (64 bytes per completion token in the rows); rewards only measured"
    ) in text
    assert "advantage none, only the teacher's divergence" in text


def test_another_tokenizer_is_refused(write: Any, llama_model: Any) -> None:
    assert "has a different tokenizer from model.path" in refusal(
        write({TEACHER: str(llama_model)})
    )


def test_a_smaller_vocabulary_is_refused(write: Any, tiny_model: Any, tmp_path: Any) -> None:
    smaller = shutil.copytree(tiny_model, tmp_path / "smaller")
    tree = json.loads((smaller / "config.json").read_text())
    (smaller / "config.json").write_text(json.dumps(tree | {"vocab_size": 3}))
    assert "has vocab_size = 3, and the tokenizer has ids up to" in refusal(
        write({TEACHER: str(smaller)})
    )


def server(
    tokenizer: Any, shift: int | None, scores: bool = True, context: int | None = None
) -> FastAPI:
    """A server in vLLM's form. It encodes with ids that are `shift` too high; None: it has no
    /tokenize."""
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> Any:
        return {"data": [{"id": "big"} | ({} if context is None else {"max_model_len": context})]}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        ids = (await request.json())["prompt"]
        if not scores:
            return JSONResponse({"error": "Token id 63 is out of vocabulary"}, 400)
        values = [None, *[-1.0] * (len(ids) - 1)]
        return {"choices": [{"logprobs": {"token_logprobs": values}}]}

    if shift is not None:

        @app.post("/tokenize")
        async def tokenize(request: Request) -> Any:
            text = (await request.json())["prompt"]
            ids = tokenizer.encode(text, add_special_tokens=False)
            return {"tokens": [token + shift for token in ids]}

    return app


@pytest.mark.parametrize(
    ("shift", "line"),
    [(0, "the same token ids in 5 texts"), (None, "its tokenizer is unknown")],
)
def test_a_server_is_asked_what_it_tells(
    write: Any, tiny_model: Any, shift: int | None, line: str
) -> None:
    with listening(server(load_tokenizer(str(tiny_model)), shift)) as address:
        text = check_teacher(load_config(write({TEACHER: f"{address}/v1"})))
    assert text is not None and line in text and "a server with model 'big'" in text
    assert "scored at temperature 1" in text
    assert "its context is unknown: it must take 29 tokens" in text


def test_the_context_of_a_server_has_room_for_the_longest_trajectory(
    write: Any, tiny_model: Any
) -> None:
    """20 tokens of a prompt, 8 of a completion, and one that the server generates."""
    tokenizer = load_tokenizer(str(tiny_model))
    with listening(server(tokenizer, 0, context=29)) as address:
        text = check_teacher(load_config(write({TEACHER: f"{address}/v1"})))
        assert text is not None and "model 'big'; context of 29 tokens; the same token" in text
    with listening(server(tokenizer, 0, context=28)) as address:
        words = refusal(write({TEACHER: f"{address}/v1"}))
    assert "its max_model_len = 28, and a trajectory may have 28 tokens (" in words
    assert "data.max_prompt_length 20 + " in words and "raise its max_model_len" in words


def test_a_server_with_another_tokenizer_or_vocabulary_is_refused(
    write: Any, tiny_model: Any
) -> None:
    tokenizer = load_tokenizer(str(tiny_model))
    with listening(server(tokenizer, 1)) as address:
        assert "it encodes '3 + 40 =' with other ids" in refusal(write({TEACHER: f"{address}/v1"}))
    with listening(server(tokenizer, 0, scores=False)) as address:
        assert "with status 400" in refusal(write({TEACHER: f"{address}/v1"}))
        assert "it has no model 'small'; it lists big" in refusal(
            write({TEACHER: {"url": f"{address}/v1", "model": "small"}})
        )
    assert "start it first, and give its base URL" in refusal(write({TEACHER: f"{address}/v1"}))
