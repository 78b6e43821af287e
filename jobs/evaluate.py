"""Evaluates a finished run's model in a fresh vLLM engine. Compares its greedy accuracy on the
held-out prompts with the run's own figure.

    python -m jobs.evaluate runs/quickstart

It uses only the files in `hf/`: no Ray, no Serve, no published weights. The exit code is 1 if the
two accuracies differ.
"""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.config import Config
from asyncrl.contracts import Prompt
from asyncrl.data import read_prompts
from asyncrl.generation import engine_environment
from asyncrl.preflight import data_spec, model_context
from asyncrl.rewards import GroupCall, RewardError, call_reward
from asyncrl.rundir import RunNotFoundError, open_run
from asyncrl.text import decode, load_stops, load_tokenizer, text_before
from asyncrl.weights import TOKENIZER_MODE

ALLOWED_DIFFERENCE = 0.002
"""Two engines in float32 may occasionally break a tie of two tokens differently."""


def main(directory: str) -> int:
    """Print both accuracies and return the exit code."""
    run = open_run(directory)
    config = run.config
    evaluations = run.records("evaluation")
    if not (run.directory / "hf").exists() or not evaluations or config.eval.data is None:
        raise RunNotFoundError(
            f"{directory!r} is not a finished run with an evaluation; give the directory of one,"
            " such as runs/quickstart"
        )
    prompts = read_prompts(config.eval.data, data_spec(config), config.eval.max_prompts)
    with output_in_file(run.directory / "logs" / "evaluate.log"):
        found = answers(config, run.directory / "hf", prompts)
    fresh, recorded = accuracy(config, prompts, found), evaluations[-1]["eval/greedy_accuracy"]
    print(
        f"held-out greedy accuracy on {len(prompts)} prompts: {fresh:.2%} in a fresh vLLM engine"
        f" from {run.directory / 'hf'}, {recorded:.2%} in the run"
    )
    return int(abs(fresh - recorded) > ALLOWED_DIFFERENCE)


@contextmanager
def output_in_file(path: Path) -> Iterator[None]:
    """Redirect the output of this process and its children to the file."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    with path.open("w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            for number, before in zip((1, 2), kept, strict=True):
                os.dup2(before, number)


def answers(
    config: Config, model: Path, prompts: list[Prompt], temperature: float = 0.0
) -> list[tuple[str, list[int]]]:
    """Text and token ids of one completion per prompt; temperature 0 = greedy."""
    os.environ.update(engine_environment(config.engines.device))
    from vllm import LLM, SamplingParams

    context = min(config.longest_request + 1, model_context(config))
    tokenizer = load_tokenizer(str(model))
    stops = load_stops(
        str(model), tokenizer, config.rollout.rollout_stop, config.rollout.rollout_stop_token_ids
    )
    cache = (
        {"kv_cache_memory_bytes": config.engines.kv_cache_memory_bytes}
        if config.engines.device == "cpu"
        else {}
    )
    settings = {
        "dtype": config.model.dtype,
        "max_model_len": context,
        "max_num_seqs": config.max_num_seqs,
        "enforce_eager": True,
    }
    engine = LLM(str(model), tokenizer_mode=TOKENIZER_MODE, **settings, **cache)
    rooms = [config.completion_room(len(prompt.token_ids)) for prompt in prompts]
    sampling = [
        SamplingParams(
            temperature=temperature,
            seed=config.seed * 1_000_003 + index,
            max_tokens=room,
            stop_token_ids=list(stops.tokens),
            stop=list(stops.strings),
        )
        for index, room in enumerate(rooms)
    ]
    outputs = engine.generate(
        [{"prompt_token_ids": list(prompt.token_ids)} for prompt in prompts],
        sampling,
        use_tqdm=False,
    )
    engine.llm_engine.engine_core.shutdown()
    found = [list(output.outputs[0].token_ids) for output in outputs]
    return [(text_before(decode(tokenizer, ids), stops.strings), ids) for ids in found]


def accuracy(config: Config, prompts: list[Prompt], answers: list[tuple[str, list[int]]]) -> float:
    """Mean of the reward named by `eval.accuracy`, over the answers that it scores."""
    reward = config.reward.functions[config.accuracy]
    calls = [
        GroupCall([prompt.text], [text], [ids], prompt.columns)
        for prompt, (text, ids) in zip(prompts, answers, strict=True)
    ]
    rewards = [
        call_reward(reward.function, call, reward.arguments, reward.per_token).rewards[0]
        for call in calls
    ]
    scored = [value for value in rewards if value is not None]
    return sum(scored) / len(scored) if scored else math.nan


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {Path(sys.argv[0]).name} RUN_DIRECTORY")
    try:
        sys.exit(main(sys.argv[1]))
    except (RunNotFoundError, RewardError) as error:
        sys.exit(f"evaluate: {error}")
