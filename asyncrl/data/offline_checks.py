"""Settings that decide what is trained, checked against the kind of the rows: strings or chats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from asyncrl.data.conversations import Target
from asyncrl.data.form_rows import Chat, Side
from asyncrl.data.forms import FormName
from asyncrl.data.offline_spec import LossOn, Objective, OfflineDataSpec
from asyncrl.text.template import Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["check_settings", "target_of", "template_notes"]

TARGETS: Final[Mapping[tuple[str, bool, bool], Mapping[str, Target]]] = {
    ("text", False, False): {"auto": "all", "all": "all"},
    ("text", True, False): {"auto": "completion", "completion": "completion", "all": "all"},
    ("text", False, True): {"auto": "completion", "completion": "completion"},
    ("text", True, True): {"auto": "completion", "completion": "completion"},
    ("chat", False, False): {"auto": "turns", "assistant": "turns", "all": "all"},
    ("chat", True, False): {
        "auto": "completion turns",
        "completion": "completion",
        "assistant": "turns",
        "all": "all",
    },
    ("chat", True, True): {
        "auto": "completion turns",
        "completion": "completion",
        "assistant": "completion turns",
    },
}
"""(Kind, whether there is a prompt, whether completions are compared) → what each value of
data.loss_on trains. Values that are left out are refused."""


def target_of(side: Side, loss_on: LossOn, objective: Objective, form: FormName) -> Target:
    """The tokens of a side to train.

    Raises:
        ValueError: such rows have no such tokens.
    """
    chat = isinstance(side, Chat)
    prompt = side.prompt > 0 if isinstance(side, Chat) else side.prompt is not None
    fits = TARGETS["chat" if chat else "text", prompt, objective != "sft"]
    if loss_on not in fits:
        raise ValueError(
            f"data.loss_on = {loss_on!r} does not fit {objective} on {form} rows with"
            f" {'chats' if chat else 'strings'}; use one of {[*fits]}"
        )
    return fits[loss_on]


def check_settings(side: Side, spec: OfflineDataSpec, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check what the tokenizer and the settings must have for chats, or for strings.

    Raises:
        ValueError: there is no chat template for chats, or no EOS or a chat's setting for strings.
    """
    if isinstance(side, Chat):
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of model.path = {spec.model_path!r} has no chat template, which its"
                " messages need; use a chat model, or rows of strings"
            )
        return
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of model.path = {spec.model_path!r} has no EOS token, which ends every"
            " text; set one there"
        )
    given = {
        "data.system_prompt": spec.system_prompt,
        "data.chat_template_kwargs": spec.chat_template_kwargs,
        "data.tools": spec.tools,
        "data.tools_column": spec.tools_column,
    }
    if names := [name for name, value in given.items() if value]:
        raise ValueError(
            f"{names[0]} applies to chats, and its rows are plain strings; leave it out, or set"
            " data.apply_chat_template: true for prompts and completions"
        )


def template_notes(chat: Chat, spec: OfflineDataSpec) -> list[str]:
    """What the settings do to a chat, up to the assistant's first turn.

    Raises:
        TemplateError: a setting has no effect, because the template ignores it.
    """
    roles = [message["role"] for message in chat.messages]
    asked = roles.index("assistant") if "assistant" in roles[1:] else len(roles)
    own = list(chat.messages[spec.system_prompt is not None : asked])
    template = Template(
        spec.model_path, True, spec.chat_template_kwargs, spec.system_prompt, spec.tools
    )
    return template.check([own or list(chat.messages)], [chat.tools])
