"""Models that vLLM does not serve as transformers computes them are refused before anything starts."""

import pytest
from small_config import small_config

from asyncrl.preflight.served import NOT_SERVED_ON_CPU, refusal

BF16 = {"model": {"path": "m", "dtype": "bfloat16"}}
CUDA = {"generator": {"device": "cuda"}, "learner": {"device": "cuda"}}


@pytest.mark.parametrize("kind", NOT_SERVED_ON_CPU)
def test_what_differs_on_cpu_alone_is_refused_there_alone(kind):
    assert "vLLM on CPU" in refusal({"model_type": kind}, small_config())
    assert "generator.device: cuda" in refusal({"model_type": "outer", "text_config": {"model_type": kind}}, small_config())
    assert refusal({"model_type": kind}, small_config(**CUDA)) is None


def test_apertus_and_qwen3_next_want_bfloat16():
    for kind in ("apertus", "qwen3_next"):
        assert "set model.dtype: bfloat16" in refusal({"model_type": kind}, small_config())
        assert refusal({"model_type": kind}, small_config(**BF16)) is None


def test_cohere2_is_served_within_its_window():
    longest = small_config().longest_trajectory
    assert refusal({"model_type": "cohere2", "sliding_window": longest}, small_config()) is None
    assert refusal({"model_type": "cohere2"}, small_config()) is None
    assert f"set data.max_length: {longest - 1} or less" in refusal({"model_type": "cohere2", "sliding_window": longest - 1}, small_config())


def test_others_are_served():
    for kind in ("llama", "gpt_oss", "qwen3_moe", "gemma3_text", "falcon_h1", "granitemoehybrid"):
        assert refusal({"model_type": kind}, small_config()) is None
