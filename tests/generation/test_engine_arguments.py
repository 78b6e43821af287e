"""The arguments that vLLM gets for an engine on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import GeneratorConfig
from asyncrl.generation.engine.arguments import engine_config
from asyncrl.generation.settings import GeneratorApp


def test_an_engine_on_a_gpu_reads_many_prompt_tokens_in_a_step(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's limit without a usage context is 2,048 tokens."""
    from vllm.config.scheduler import SchedulerConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    most, _ = AsyncEngineArgs.get_batch_defaults(1)
    given: list[Any] = []
    monkeypatch.setattr("vllm.plugins.load_general_plugins", lambda: None)  # of this process

    class EnoughError(Exception):
        """Ends the call before vLLM looks for a GPU."""

    def create(self: AsyncEngineArgs, usage_context: Any = None) -> None:
        given.append(usage_context)
        raise EnoughError

    monkeypatch.setattr(AsyncEngineArgs, "create_engine_config", create)
    app = GeneratorApp(model=str(tiny_model), generator=GeneratorConfig(device="cuda"))
    with pytest.raises(EnoughError):
        engine_config(app)
    assert most[given[0]] > SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS == 2048
