"""Rendered prompts: chats, a system prompt, tools and template variables; and settings that a
template ignores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
from llama_checkpoint import BOS, END

from asyncrl.text.chat_messages import MessagesError
from asyncrl.text.row_chats import reserved_names
from asyncrl.text.stops import chat_end_token
from asyncrl.text.template import (
    Template,
    TemplateError,
    marked_messages,
    marks_turns,
    render_messages,
    tool_schemas,
)
from asyncrl.text.tokenizer import load_tokenizer

FULL = (
    "{{ bos_token }}{% if tools %}<|user|>tools: {{ tools | tojson }}<|end|>{% endif %}{% for m in"
    " messages %}{{ '<|' + m.role + '|>' + (m.content or '') + '<|end|>' }}{% if m.tool_calls %}{%"
    " for c in m.tool_calls %}call {{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endif %}{% endfor %}{% if"
    " add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking"
    " %}<think></think>{% endif %}{% endif %}"
)
NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages if m.role != 'system' %}{{ '<|' + m.role + '|>' +"
    " m.content }}{% endfor %}<|assistant|>"
)
STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{%"
    " endif %}" + NO_SYSTEM
)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
CHAT = [{"role": "user", "content": "3+4="}]


@pytest.fixture
def model(llama_model: Path, tmp_path: Path) -> Any:
    """`model(template)` makes a checkpoint with this chat template; None for no template."""

    def make(template: str | None = FULL) -> str:
        directory = shutil.copytree(
            llama_model, tmp_path / f"model_{len(list(tmp_path.iterdir()))}"
        )
        file = directory / "tokenizer_config.json"
        tree = json.loads(file.read_text())
        tree.pop("chat_template", None)
        file.write_text(json.dumps(tree))
        (directory / "chat_template.jinja").unlink(missing_ok=True)
        if template is not None:
            (directory / "chat_template.jinja").write_text(template)
        return str(directory)

    return make


def test_settings_apply_to_every_prompt_and_are_described(model: Any) -> None:
    template = Template(model(), True, {"enable_thinking": False}, "Be brief.", [ADD])
    rendered = template.render(["3+4=", CHAT])
    schema = json.dumps([ADD])
    assert (
        rendered.texts
        == [
            f"{BOS}<|user|>tools: {schema}{END}<|system|>Be"
            f" brief.{END}<|user|>3+4={END}<|assistant|><think></think>"
        ]
        * 2
    )
    assert all(ids.count(1) == 1 for ids in rendered.ids)
    assert template.check(["3+4="]) == [
        "system prompt of 9 characters",
        "1 tool",
        "enable_thinking = False",
    ]
    assert Template(model(), True).check(["3+4="]) == []


def test_a_variable_may_have_the_default_value(model: Any) -> None:
    notes = Template(model(), True, {"enable_thinking": True}).check(["3+4="])
    assert notes == ["enable_thinking = True (no effect on this prompt)"]


def test_a_variable_that_the_template_requires_acts(model):
    jinja = "{{ (date | default(none)).strip() }}{% for m in messages %}{{ m.content }}{% endfor %}"
    template = Template(model(jinja), True, {"date": " today "})
    assert template.check(["3+4="])[0] == "date = ' today '"


def test_a_template_that_writes_todays_date_is_noted(model: Any) -> None:
    """Llama 3.2's template does. A run that crosses midnight would train on prompts that differ
    from those it checked."""
    dated = (
        "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{%"
        " endif %}Today Date: {{ date_string }}" + FULL
    )
    path = model(dated)
    [note] = Template(path, True).check(["3+4="])
    assert note.startswith("the template writes today's date, so prompts change from day to day")
    fixed = Template(path, True, {"date_string": "26 Jul 2024"})
    assert fixed.check(["3+4="]) == ["date_string = '26 Jul 2024'"] and fixed.render(
        ["3+4="]
    ).texts[0].startswith("Today Date: 26 Jul 2024")


def test_a_prompts_own_tools_replace_those_of_the_settings(model: Any) -> None:
    double = {"type": "function", "function": {"name": "double", "parameters": {"default": None}}}
    template = Template(model(), tools=[ADD])
    own, text, none, empty = template.render(
        [CHAT] * 4, [[double], json.dumps([double]), None, []]
    ).texts
    assert '"name": "double"' in own and '"default": null' in own, "a null inside a schema is kept"
    assert '"name": "double"' in text and '"name": "add"' not in own + text
    assert none == empty and '"name": "add"' in none
    without = Template(template.model)
    assert without.check([CHAT, CHAT], [None, [double]]) == ["1 tool"] and without.render(
        [CHAT], [None]
    ).texts[0].startswith(f"{BOS}<|user|>3")


def test_a_chat_with_tool_calls_keeps_its_shape(model: Any) -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 3}}}],
    }
    [text] = Template(model()).render([[*CHAT, call, {"role": "tool", "content": "7"}]]).texts
    called = f'{END}call add{{"a": 3}}'
    assert text == f"{BOS}<|user|>3+4={END}<|assistant|>{called}<|tool|>7{END}<|assistant|>"


def test_strings_and_chats_may_be_mixed(model: Any) -> None:
    """The rendering of a prompt must not depend on the other prompts of its block."""
    template = Template(model())
    alone = [template.render([value]) for value in ("3+4=", CHAT, f"{BOS}3+4=")]
    together = template.render(["3+4=", CHAT, f"{BOS}3+4="])
    assert together.texts == [single.texts[0] for single in alone] and together.ids == [
        single.ids[0] for single in alone
    ]
    assert together.own_bos == 1 and [ids.count(1) for ids in together.ids] == [1, 1, 1]


@pytest.mark.parametrize(
    ("jinja", "settings", "message"),
    [
        (
            NO_SYSTEM,
            {"system_prompt": "Be brief."},
            "data.system_prompt: the chat template of model.path = .* leaves system messages out",
        ),
        (
            STRICT,
            {"system_prompt": "Be brief."},
            r"row 0: the chat template of .* refuses the chat \(System role not supported\)",
        ),
        (
            NO_SYSTEM,
            {"tools": [ADD]},
            "data.tools or data.tools_column: the chat template of .* leaves tools out",
        ),
        (
            NO_SYSTEM,
            {"kwargs": {"enable_thinking": False}},
            "data.chat_template_kwargs: the chat template of .* does not use enable_thinking",
        ),
        (
            FULL,
            {"kwargs": {"add_generation_prompt": False}},
            "add_generation_prompt is not a variable of a template",
        ),
        (
            FULL,
            {"kwargs": {"thinking": 1}},
            "does not use thinking, so it has no effect; remove it",
        ),
    ],
)
def test_settings_that_the_template_ignores_are_refused(
    model: Any, jinja: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(TemplateError, match=message) as error:
        Template(model(jinja), True, **settings).check(["3+4="])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "values", "message"),
    [
        (
            {"system_prompt": "Be brief."},
            ["3+4="],
            (
                "data.system_prompt applies to chats, and these prompts are plain strings; set"
                " data.apply_chat_template: true"
            ),
        ),
        ({"tools": [ADD]}, ["3+4=", CHAT], "data.tools applies to chats"),
        (
            {"kwargs": {"enable_thinking": False}},
            ["3+4="],
            "data.chat_template_kwargs applies to chats",
        ),
        (
            {"system_prompt": "Be brief."},
            [CHAT, [{"role": "system", "content": "Be long."}, *CHAT]],
            "row 8 has its own system message",
        ),
        (
            {"apply": True},
            ["3+4=", f"{BOS}<|user|>3+4={END}"],
            "row 8 begins with '<s>', as a rendered template does, and would be rendered twice",
        ),
        ({}, [CHAT, []], r"row 8: the prompt is '\[\]'; give a string, or a list of messages"),
        (
            {},
            [CHAT, [{"role": "user"}]],
            "row 8: the prompt is .*; give a string, or a list of messages",
        ),
        ({}, [CHAT, None], "row 8: the prompt is 'None'; give a string, or a list of messages"),
    ],
)
def test_prompts_that_contradict_the_settings_are_refused(
    model: Any, settings: dict[str, Any], values: list[Any], message: str
) -> None:
    with pytest.raises(TemplateError, match=message):
        Template(model(), **settings).render(values, first_row=7)


@pytest.mark.parametrize("tools", ["no json", "{}1", '"add"', 7, ["add"]])
def test_invalid_tools_are_refused(model: Any, tools: Any) -> None:
    with pytest.raises(TemplateError, match="row 3: its tools are"):
        Template(model()).render([CHAT], [tools], first_row=3)


def test_a_model_without_a_template(model: Any) -> None:
    bare = model(None)
    assert load_tokenizer(bare).chat_template is None
    assert Template(bare).render(["3+4="]).texts == ["3+4="]
    with pytest.raises(
        TemplateError, match="its tokenizer has no chat template; use string prompts"
    ):
        Template(bare, system_prompt="Be brief.").render([CHAT])


@pytest.mark.parametrize(
    "expression",
    [
        "m.content.index('</think>')",
        "1 // (messages | length - 1)",
        "'%d' | format(m.content)",
        "range(10**9)",
    ],
)
def test_a_template_may_raise_anything(model: Any, expression: str) -> None:
    path = model("{% for m in messages %}{{ " + expression + " }}{% endfor %}")
    with pytest.raises(TemplateError, match=r"row 0: the chat template of .* refuses the chat"):
        Template(path, True).render(["3+4="])
    assert (
        chat_end_token(
            load_tokenizer(
                model("{% for m in messages %}{{ m.content.index('</think>') }}{% endfor %}")
            )
        )
        is None
    )


MARKED = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{%- generation -%}"
    "{{ m.content }}{{ eos_token }}{%- endgeneration -%}{% else %}{{ m.content }}{% endif %}|"
    "{% endfor %}"
)
TURNS = [{"role": "user", "content": "3"}, {"role": "assistant", "content": "🙂 4"}]


def test_generation_tags_give_the_characters_of_turns(model: Any) -> None:
    tokenizer = load_tokenizer(model(MARKED))
    text, spans = marked_messages(tokenizer, TURNS * 2, {})
    assert [text[start:end] for start, end in spans] == ["🙂 4</s>", "🙂 4</s>"]
    assert text == render_messages(tokenizer, TURNS * 2, {}, generation_prompt=False)
    assert marks_turns(tokenizer) and not marks_turns(load_tokenizer(model(FULL)))
    assert not marks_turns(load_tokenizer(model(None)))
    refusing = "{{ raise_exception('No.\n More.') }}{% generation %}{% endgeneration %}"
    with pytest.raises(MessagesError, match=r"^No\. More\.$"):
        marked_messages(load_tokenizer(model(refusing)), TURNS, {})


def test_a_whole_chat_is_rendered_without_the_start_of_a_turn(model: Any) -> None:
    tokenizer = load_tokenizer(model())
    asked = render_messages(tokenizer, TURNS[:1], {}, [ADD])
    whole = render_messages(tokenizer, TURNS, {}, [ADD], generation_prompt=False)
    assert asked.endswith("<|assistant|>") and whole.startswith(asked) and whole.endswith(END)
    assert "tools:" in whole


@pytest.mark.parametrize("given", ["{", "7", 7, ["add"], {"name": "add"}])
def test_tools_are_lists_of_schemas(given: object) -> None:
    assert tool_schemas(None) == tool_schemas([]) == tool_schemas("[]") == []
    assert tool_schemas(json.dumps([ADD])) == tool_schemas([ADD]) == [ADD]
    with pytest.raises(MessagesError, match="its tools are"):
        tool_schemas(given)


def test_tools_of_prompts_have_no_references(model: Any) -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}}}
    parameters = {"$defs": {"P": point}, "properties": {"at": {"$ref": "#/$defs/P"}}}
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    plain = {**tool, "function": {"name": "go", "parameters": {"properties": {"at": point}}}}
    for given in (
        Template(model()).render([CHAT], [[tool]]),
        Template(model(), tools=[tool]).render([CHAT]),
    ):
        assert given == Template(model()).render([CHAT], [[plain]])
        assert "$ref" not in given.texts[0]
    parameters["properties"] = {"at": {"$ref": "#/$defs/Q"}}
    with pytest.raises(TemplateError, match="row 3: the schema of the tool 'go' refers to"):
        Template(model()).render([CHAT], [[tool]], first_row=3)


def test_the_names_that_a_template_cannot_have_are_those_of_its_own_tokenizer() -> None:
    class Plain:
        def apply_chat_template(self, conversation: object, documents: object = None) -> str:
            return ""

    class Own:
        def apply_chat_template(self, conversation: object, reasoning: bool = True) -> str:
            return ""

    given = {"conversation": 1, "reasoning": True, "documents": [], "self": 2}
    for _ in range(2):
        assert reserved_names(cast(Any, Plain()), given) == ["conversation", "self"]
        assert reserved_names(cast(Any, Own()), given) == ["conversation", "reasoning", "self"]
