"""The spec for turning a fixed dataset into token rows.

Every field except `model_path` and `vocabulary` is the setting of the same name in the section
`data` of an offline run, with the same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

RowsFor = Literal["sft", "dpo", "reward_model", "kto"]
"""What the rows are for: `sft` gives rows of SFT_SCHEMA, `dpo` and `reward_model` of
PREFERENCE_SCHEMA, `kto` of UNPAIRED_SCHEMA (see `asyncrl.contracts.offline_rows`)."""
LossOn = Literal["auto", "completion", "assistant", "all"]
LengthPolicy = Literal["truncate", "drop", "error", "split"]
MalformedPolicy = Literal["error", "drop"]


@dataclass(frozen=True, slots=True)
class OfflineDataSpec:
    """How rows become tokens and masks."""

    model_path: str
    """Hugging Face checkpoint directory, for its tokenizer and chat template."""
    vocabulary: int | None = None
    """Token ids of the model. They may be more than its tokenizer has. None = as many."""
    max_length: int = 1024
    """Longest sequence in tokens: a row of SFT, or one side of a pair."""
    length_policy: LengthPolicy = "error"
    """What happens to a longer sequence. `split` keeps it whole, for packing to cut (SFT only)."""
    length_side: Literal["keep_start", "keep_end"] = "keep_start"
    """Which tokens remain when a sequence is truncated."""
    malformed: MalformedPolicy = "error"
    """What happens to a row that cannot be trained. `drop`: leave it out, and count the reason."""
    loss_on: LossOn = "auto"
    """The tokens to train. `auto`: all tokens of texts, the assistant's turns of chats, and the
    completion where there is a prompt (in a chat, the assistant's turns of the completion)."""
    apply_chat_template: bool = False
    """Render each string prompt as a user message, and its completion as the assistant's turn.
    Chats are always rendered."""
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)
    """Variables of the chat template. A row's own column `chat_template_kwargs` comes on top."""
    system_prompt: str | None = None
    """Added as a system message to every chat. Refused for a chat that has one."""
    tools: Sequence[Mapping[str, object]] | None = None
    """JSON schemas of functions, for chats without their own tools."""
    tools_column: str | None = None
    """Column with each chat's tools. None: `tools`, if the data has it."""
    prompt_column: str = "prompt"
    """Column with the prompt, in forms that have one. A source may name its own."""
    target_column: str | None = None
    """Column with the completion of each prompt, instead of `completion` (SFT only)."""
    unused_keys: Literal["error", "drop"] = "error"
    """What happens to a key or a part of a chat that does not reach the text. `drop`: leave it out,
    and count it."""
    least_reward: float | None = None
    """For rows that a run recorded. SFT: every trajectory with at least this reward; None = the
    best one of each group. DPO: the least reward of a chosen side."""
