"""Whether a trained model still has its other abilities: its loss on plain text, and its answers to
ordinary questions, before and after.

    python -m jobs.smollm.other_abilities RUN_DIRECTORY

The text is Python's own help (`pydoc_data.topics`), which no prompt is about. The exit code is 1 if
the loss rose by more than MOST_WORSE.
"""

import os
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from asyncrl.config import ConfigError
from asyncrl.rundir import RunNotFoundError, open_run

PIECES, PIECE_TOKENS = 96, 256
MOST_WORSE = 0.05
ANSWER_TOKENS = 48
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three animals that live in the sea.",
    "How do I boil an egg?",
    "What is 2 + 3?",
    "Who wrote Romeo and Juliet?",
    "What do plants need to grow?",
    "Translate 'good morning' into Spanish.",
    "Give me a tip for better sleep.",
    "What is a computer?",
)


def main(directory: str) -> int:
    """Print losses and answers, and return the exit code."""
    run = open_run(directory)
    trained = run.directory / "hf"
    if not trained.exists():
        raise RunNotFoundError(
            f"{directory!r} has no hf folder; give the directory of a finished run"
        )
    before, after = (_abilities(Path(path)) for path in (run.settings.model.path, trained))
    rise = after[0] / before[0] - 1
    print(
        f"loss on {PIECES} pieces of {PIECE_TOKENS} tokens of plain text: {before[0]:.4f} →"
        f" {after[0]:.4f} nats a token ({rise:+.2%}, at most {MOST_WORSE:+.0%})"
    )
    for question, *answers in zip(QUESTIONS, before[1], after[1], strict=True):
        print(f"\n{question}")
        for when, answer in zip(("before", "after"), answers, strict=True):
            print(f"  {when:<7}{' '.join(answer.split())!r}")
    return int(rise > MOST_WORSE)


def _abilities(path: Path) -> tuple[float, list[str]]:
    """Nats per token of plain text, and the greedy answers."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    with torch.no_grad():
        losses = [model(ids, labels=ids).loss.item() for ids in _pieces(tokenizer).split(8)]
        answers = [_answer(model, tokenizer, question) for question in QUESTIONS]
    return sum(losses) / len(losses), answers


def _pieces(tokenizer: Any) -> Any:
    """Token ids [PIECES, PIECE_TOKENS]."""
    import torch

    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text)["input_ids"][: PIECES * PIECE_TOKENS]
    return torch.tensor(ids).view(PIECES, PIECE_TOKENS)


def _answer(model: Any, tokenizer: Any, question: str) -> str:
    chat = [{"role": "user", "content": question}]
    given = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    found = model.generate(**given, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    text: str = tokenizer.decode(found[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m jobs.smollm.other_abilities RUN_DIRECTORY")
    try:
        sys.exit(main(sys.argv[1]))
    except (RunNotFoundError, ConfigError) as error:
        print(f"other_abilities: {error}", file=sys.stderr)
        sys.exit(2)
