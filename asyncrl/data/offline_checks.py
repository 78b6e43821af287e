"""Settings that decide what is trained, checked against the kind of the rows: strings or chats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final

from asyncrl.config import ConfigError, OfflineDataConfig
from asyncrl.data.conversations import Target
from asyncrl.data.form_rows import Chat, Side
from asyncrl.data.forms import FormName
from asyncrl.data.offline_report import OfflineReport
from asyncrl.data.spec import OfflineDataSpec, RowsFor
from asyncrl.text.template import Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPTED: Final[frozenset[FormName]] = frozenset(
    ("prompt-completion", "preference", "unpaired preference")
)
CHATS: Final[frozenset[FormName]] = PROMPTED | {"messages"}
ACTS_ON: Final[Mapping[str, frozenset[FormName]]] = {
    "least_reward": frozenset(("recorded groups",)),
    "target_column": frozenset(("prompt-completion",)),
    "prompt_column": PROMPTED,
    "apply_chat_template": PROMPTED,
    "tools_column": CHATS,
    "tools": CHATS,
    "system_prompt": CHATS,
    "chat_template_kwargs": CHATS,
}
"""Setting → the forms that it can act on."""

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


def target_of(side: Side, loss_on: str, objective: RowsFor, form: FormName) -> Target:
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


def idle_settings(spec: OfflineDataSpec, forms: Collection[FormName]) -> tuple[str, ...]:
    """The settings that are given, and act on none of the forms."""
    return tuple(
        name
        for name, fits in ACTS_ON.items()
        if getattr(spec.data, name) != OfflineDataConfig.model_fields[name].default
        and fits.isdisjoint(forms)
    )


def refuse_idle(spec: OfflineDataSpec, reports: Mapping[str, OfflineReport]) -> None:
    """Refuse a setting that acts on no data of a run. Training and held-out rows may have different
    forms, so a setting needs only one of them.

    Args:
        reports: setting that names data → the report of this data.

    Raises:
        ConfigError: there is such a setting.
    """
    idle = [set(report.idle) for report in reports.values()]
    for name in ACTS_ON:
        if all(name in found for found in idle):
            forms = "; ".join(
                f"{field}: {', '.join(dict.fromkeys(report.forms))}"
                for field, report in reports.items()
            )
            raise ConfigError(
                f"data.{name} = {getattr(spec.data, name)!r} has no effect on data of these forms"
                f" ({forms}); leave it out"
            )


def check_settings(side: Side, spec: OfflineDataSpec, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check what the tokenizer and the settings must have for chats, or for strings.

    Raises:
        ValueError: there is no chat template for chats, or no EOS or a chat's setting for strings.
    """
    if isinstance(side, Chat):
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of model.path = {spec.model.path!r} has no chat template, which its"
                " messages need; use a chat model, or rows of strings"
            )
        return
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of model.path = {spec.model.path!r} has no EOS token, which ends every"
            " text; set one there"
        )
    given = {
        "data.system_prompt": spec.data.system_prompt,
        "data.chat_template_kwargs": spec.data.chat_template_kwargs,
        "data.tools": spec.data.tools,
        "data.tools_column": spec.data.tools_column,
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
    own = list(chat.messages[spec.data.system_prompt is not None : asked])
    template = Template(
        spec.model.path,
        True,
        spec.data.chat_template_kwargs,
        spec.data.system_prompt,
        spec.data.tools,
        Counter() if spec.data.unused_keys == "drop" else None,
    )
    return template.check([own or list(chat.messages)], [chat.tools if chat.own_tools else None])
