"""Every reward is called once, on the first prompt and a made-up completion, before anything is
allocated."""

from __future__ import annotations

from asyncrl.config import Config, ConfigError
from asyncrl.data.prompts import PromptReport, first_prompt
from asyncrl.preflight.specs import data_spec
from asyncrl.rewards.code import share_settings
from asyncrl.rewards.contract import GroupCall, RewardError, with_notes
from asyncrl.rewards.pool import RewardPool
from asyncrl.text.tokenizer import load_tokenizer

__all__ = ["COMPLETION", "rewards_text", "try_rewards"]

COMPLETION = "0"
"""What the model is made to have said. A reward has to live with any text, this one included."""


def try_rewards(config: Config, report: PromptReport) -> dict[str, float | None] | None:
    """What each reward gives for `COMPLETION` as the answer to the first prompt that `report` says
    is used. Values that a reward tells of as well are there under NAME/PART. None: rewards that ask
    for a GPU are not tried.

    Raises:
        ConfigError: a reward raised, hung, died or broke its contract. The message has the
            traceback of what it raised.
    """
    if config.reward.num_gpus:
        return None
    prompt = first_prompt(data_spec(config), report)
    ids = load_tokenizer(config.model.path).encode(COMPLETION, add_special_tokens=False)
    call = GroupCall([prompt.text], [COMPLETION], [ids], prompt.columns, ["stop"], [False])
    once = config.reward.model_copy(
        update={"processes": 1, "concurrency": 1, "policy": "fail", "retries": 0}
    )
    share_settings(config.reward.sandbox)
    try:
        with RewardPool(once) as pool:
            given = pool.submit(call).result()
    except RewardError as error:
        raise ConfigError(
            f"the first prompt of data.train with the completion {COMPLETION!r}:"
            f" {with_notes(error)}"
        ) from None
    return {name: values[0] for name, values in given.parts.items()}


def rewards_text(given: dict[str, float | None] | None) -> str:
    """A line for each reward."""
    if given is None:
        return "# rewards\n  not tried: they ask for a GPU (reward.num_gpus)"
    lines = [
        f"  {name:<24} {'None: not scored' if value is None else format(value, 'g')}"
        for name, value in given.items()
    ]
    return "\n".join(
        [
            f"# rewards\n  what each gives for the first prompt and the completion {COMPLETION!r}",
            *lines,
        ]
    )
