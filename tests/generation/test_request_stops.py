"""What ends a request's completions: the generator's stops and the request's own."""

from __future__ import annotations

from pathlib import Path

from engines import engine_around

from asyncrl.contracts.messages import GenerateRequest
from asyncrl.generation.settings import GeneratorApp
from asyncrl.text.stops import Stops


def test_a_request_ends_at_the_generators_stops_and_at_its_own(llama_model: Path) -> None:
    stops = Stops({2: ("tokenizer EOS",)}, (" plus",))
    engine = engine_around(None, GeneratorApp(model=str(llama_model)), stops).requests
    assert engine._stops(GenerateRequest((1,), 1, 8, 1.0)) == engine.stops
    own = engine._stops(GenerateRequest((1,), 1, 8, 1.0, stop=(" plus", "<|user|>", "\n\n")))
    assert set(own.tokens) == {2, 3} and own.strings == (
        " plus",
        "\n\n",
    ), "the text does not contain special tokens"
    assert engine._stops(GenerateRequest((1,), 1, 8, 1.0, ignore_eos=True)) == Stops({})
    assert engine._stops(GenerateRequest((1,), 1, 8, 1.0, ignore_eos=True, stop=("x",))) == Stops(
        {}, ("x",)
    )
