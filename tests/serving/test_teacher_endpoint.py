"""A teacher at asyncrl's own HTTP endpoint, over a real vLLM engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from served_http import listening
from test_http_engine import MODEL, EngineServed
from transformers import AutoModelForCausalLM

from asyncrl.config import ConfigError
from asyncrl.config.distillation import TeacherServer
from asyncrl.learning.frozen.teacher import UrlTeacher
from asyncrl.preflight.trials.teacher import _check_server
from asyncrl.serving.http import routes
from asyncrl.text.tokenizer import load_tokenizer, tokenizer_hash
from asyncrl.weights.push import ServeWeightSync

ROWS = [([5, 6, 14], [7, 8, 9, 2]), ([10], [11]), ([4, 5], [])]


@pytest.mark.timeout(300)
async def test_its_log_probs_are_those_of_transformers(
    generators: Any, publish: Any, tiny_model: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    # The generators are shared: the tests before this one left other weights in them.
    weights = ServeWeightSync(generators.handle, generators.registry, push_timeout_s=60)
    manifest = publish(dict(model.named_parameters()), version=generators.next_version())
    await weights.push(manifest)
    tokenizer = load_tokenizer(str(tiny_model))
    served = EngineServed(generators)
    served._model = replace(MODEL, tokenizer=tokenizer_hash(tokenizer))
    with listening(routes(served, None)) as address:
        teacher = TeacherServer(url=f"{address}/v1")

        async def scenario() -> list[np.ndarray]:
            return await UrlTeacher(teacher).logprobs(ROWS)

        found = await scenario()
        longest = MODEL.max_model_len - 1  # the engine generates one more token
        text = _check_server(teacher, tokenizer, longest, "settings")
        assert f"context of {longest + 1} tokens; same tokenizer (" in text
        with pytest.raises(ConfigError, match=f"a trajectory may have {longest + 1} tokens"):
            _check_server(teacher, tokenizer, longest + 1, "settings")
        served._model = replace(MODEL, tokenizer="another")
    with listening(routes(served, None)) as address:
        other = TeacherServer(url=f"{address}/v1")
        with pytest.raises(ConfigError, match="it has a different tokenizer"):
            _check_server(other, tokenizer, longest, "settings")
    for (prompt, completion), values in zip(ROWS, found, strict=True):
        if not completion:
            assert not len(values)
            continue
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        wanted = torch.log_softmax(logits, -1)[range(len(completion)), completion]
        assert values.tolist() == pytest.approx(wanted.tolist(), abs=1e-4)
