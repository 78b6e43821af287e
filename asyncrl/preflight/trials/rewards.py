"""Call every reward on the first prompt and made-up completions, before anything is allocated."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from asyncrl.config import Config, ConfigError
from asyncrl.config.schema import FailRun
from asyncrl.contracts.rows import Prompt
from asyncrl.data.prompts import PromptReport, first_prompt
from asyncrl.preflight.specs import data_spec
from asyncrl.preflight.trials.environment import check_agent, try_environment
from asyncrl.rewards.code import share_settings
from asyncrl.rewards.contract import (
    ON_REQUEST,
    UNSCORED_REASON,
    GroupCall,
    RewardError,
    ScoredSession,
    with_notes,
)
from asyncrl.rewards.pool import GroupRewards, RewardPool
from asyncrl.text.answer import answer_format
from asyncrl.text.tokenizer import load_tokenizer

Trial: TypeAlias = "Callable[[PromptReport], Tried | None]"

COMPLETION = "0"
"""The made-up completion of the first call. A reward must accept any text."""
WRONG = ("", "1", "I do not know.")
"""Other completions."""
FORMS = (
    "{}",
    "\\boxed{{{}}}",
    "<think>\nSo it is.\n</think>\n<answer>{}</answer>",
    "```python\n{}\n```",
)
"""How completions contain a value of the prompt's row."""
LIKELY = (
    "answer", "ground_truth", "gold", "final_answer", "correct_answer", "expected_answer",
    "reference_answer", "gold_answer", "answers", "target", "label", "solution",
    "canonical_solution", "output",
)  # fmt: skip
"""Columns, and keys in them, that most likely contain a right answer."""
MOST_VALUES = 4
"""Values of the row that completions are made of."""
MOST_CHARACTERS = 20_000
"""Characters of such a value."""
ASK_SERVERS = ("llm_judge", "pairwise_judge")
"""Built-in rewards that get few completions, because each one costs requests."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What the rewards returned for made-up completions of the first prompt."""

    values: dict[str, float | None]
    """For `COMPLETION`, by NAME and NAME/PART."""
    notes: list[str] = field(default_factory=list)
    """What the user should look at, one line each."""


@contextlib.contextmanager
def reward_trial(config: Config) -> Iterator[Trial]:
    """Start a process that imports the rewards, while the caller makes the plan. The process ends
    with the context.

    Yields a function of the report on the prompts: what each reward returns for `COMPLETION` as the
    completion of the first prompt, and notes on other completions, some of which contain the values
    of the prompt's columns. The function returns None for rewards that need a GPU, which are not
    tried. It raises ConfigError if a reward raised, hung, died or broke its contract. The message
    contains the traceback of its exception.
    """
    if config.reward.num_gpus:
        yield lambda report: try_environment(config)
        return
    once = config.reward.model_copy(update={"processes": 1, "concurrency": 1, "policy": FailRun()})
    share_settings(config.reward.sandbox)
    with RewardPool(once, answers=answer_format(config.model.path)) as pool:
        yield partial(_try_rewards, config, pool)


def _try_rewards(config: Config, pool: RewardPool, report: PromptReport) -> Tried:
    try_environment(config)
    prompt = first_prompt(data_spec(config), report)
    check_agent(config.environment, prompt.columns)
    if taken := sorted({*ON_REQUEST} & prompt.columns.keys()):
        raise ConfigError(
            f"data.train: the column {taken[0]} has the name of an argument that rewards get;"
            " rename it"
        )
    call = _call(config, prompt, [COMPLETION])
    try:
        asyncio.run(pool.check())  # the reason why a first start failed
        given = pool.submit(call).result()
    except RewardError as error:
        raise ConfigError(
            f"the first prompt of data.train with the completion {COMPLETION!r}:"
            f" {with_notes(error)}"
        ) from None
    values = {name: values[0] for name, values in given.parts.items()}
    return Tried(values, _notes(config, pool, prompt, given))


def _call(config: Config, prompt: Prompt, completions: Sequence[str]) -> GroupCall:
    """The group of a prompt with these completions."""
    tokenizer, n = load_tokenizer(config.model.path), len(completions)
    sessions = [
        ScoredSession(
            [{"role": "assistant", "content": text}], "done", float(index), output=str(index)
        )
        for index, text in enumerate(completions)
    ]
    return GroupCall(
        [prompt.text] * n,
        completions,
        [tokenizer.encode(text, add_special_tokens=False) for text in completions],
        prompt.columns,
        ["stop"] * n,
        [False] * n,
        None if config.environment is None else sessions,
    )


def _notes(config: Config, pool: RewardPool, prompt: Prompt, first: GroupRewards) -> list[str]:
    """A line for each reward that treats all completions alike."""
    known = _values(prompt)
    completions = [*WRONG, *(form.format(value) for value in known.values() for form in FORMS)]
    functions = [reward.function for reward in config.reward.functions.values()]
    if any(function.endswith(f":{name}") for function in functions for name in ASK_SERVERS):
        completions = [WRONG[-1], *list(known.values())[:1]]
    try:
        given = pool.submit(_call(config, prompt, completions)).result()
    except RewardError as error:
        line = str(error).splitlines()[0]
        return [f"other completions of that prompt end the run under reward.policy: fail: {line}"]
    notes = []
    for name in _judged(config, given):
        values = [*first.parts.get(name, ()), *given.parts[name]]
        count = f"{len(values)} made-up completions of that prompt"
        if set(values) == {None}:
            notes.append(
                f"{name} is always None: it scores none of {count}, and what is not scored is not"
                " trained"
            )
        elif len(set(values)) == 1:
            among = f", some with its {' and '.join(known)}" if known else ""
            notes.append(
                f"{name} is always {values[0]:g}: {count}{among} get the same, and equal rewards"
                " teach nothing; check that a right answer gets another one"
            )
    return notes


def _judged(config: Config, given: GroupRewards) -> list[str]:
    """The rewards, and after each one the parts that it is the sum of."""
    names = []
    for name in config.reward.functions:
        parts = {one: some for one, some in given.parts.items() if one.startswith(f"{name}/")}
        sums = [None if None in row else sum(row) for row in zip(*parts.values(), strict=True)]
        names.append(name)
        if len(parts) > 1 and sums == given.parts[name]:
            names += [one for one in parts if not one.startswith(f"{name}/{UNSCORED_REASON}")]
    return names


def _values(prompt: Prompt) -> dict[str, str]:
    """Texts of the prompt's row that may be right answers, by name; at most MOST_VALUES."""
    found = dict(_texts("", prompt.columns))
    likely = sorted(found, key=lambda name: _order(name.rpartition(".")[2]))
    return {name: found[name] for name in likely[:MOST_VALUES]}


def _texts(name: str, value: object) -> Iterator[tuple[str, str]]:
    """The texts and numbers in a value, by name. Of a list, the first item."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list) and value:
        yield from _texts(name, value[0])
    elif isinstance(value, str | int | float) and len(text := str(value)) <= MOST_CHARACTERS:
        yield name, text


def _order(name: str) -> int:
    return LIKELY.index(name.lower()) if name.lower() in LIKELY else len(LIKELY)


def rewards_text(tried: Tried | None) -> str:
    """A line for each reward, and the notes."""
    if tried is None:
        return "# rewards\n  not tried: they need a GPU (reward.num_gpus)"
    lines = [
        f"  {name:<24} {'None: not scored' if value is None else format(value, 'g')}"
        for name, value in tried.values.items()
    ]
    return "\n".join(
        [
            f"# rewards\n  for the first prompt and the completion {COMPLETION!r}",
            *lines,
            *(f"  note: {note}" for note in tried.notes),
        ]
    )
