"""A tool call through chat templates of several families. The templates are our own, and write
turns as each family does."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

YES = "yes"
CHAT = (
    "{% if tools %}{{ '@SYS@' + (tools | tojson) + '@END@' }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}@BEFORE@{% if m.tool_calls %}@TEXT@{% for c in m.tool_calls %}"
    "{% set f = c.function %}@CALL@{% endfor %}{% else %}@TEXT@{% endif %}@AFTER@"
    "{% elif m.role == 'tool' %}@TOOL@{% else %}{{ '@USER@' + m.content + '@END@' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '@BEGIN@' }}{% endif %}"
)
TEXT = "{{ m.content or '' }}"


def chat(**parts: str) -> str:
    """A template of `CHAT` with these parts."""
    text = CHAT
    for name, part in {"TEXT": TEXT, "SYS": "<|system|>", "USER": "<|user|>", **parts}.items():
        text = text.replace(f"@{name}@", part)
    return text


ARGUMENT = "<arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson }}</arg_value>"
PARAMETER = "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n"
PYTHON = (
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})"
)
LAST = "{% if loop.last and not add_generation_prompt %}LAST{% else %}MIDDLE{% endif %}"
TEMPLATES = {
    "gpt-oss": chat(
        BEFORE="<|start|>assistant",
        TEXT="{% if m.tool_calls %}{% if m.content %}<|channel|>analysis<|message|>{{ m.content }}"
        "<|end|><|start|>assistant{% endif %}{% else %}<|channel|>final<|message|>"
        "{{ m.content }}{% endif %}",
        CALL=" to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
        "{{ f.arguments | tojson }}",
        AFTER="{% if m.tool_calls %}<|call|>{% else %}"
        + LAST.replace("LAST", "<|return|>").replace("MIDDLE", "<|end|>")
        + "{% endif %}",
        TOOL="<|start|>functions to=assistant<|message|>{{ m.content | tojson }}<|end|>",
        SYS="<|start|>developer<|message|>",
        USER="<|start|>user<|message|>",
        END="<|end|>",
        BEGIN="<|start|>assistant",
    ),
    # The answers of tools come before the text of the turn that called them, and go on with it.
    "Gemma 4": (
        "{{ '<|turn>system\n' + (tools | tojson) + '<turn|>\n' }}{% for m in messages %}"
        "{% if m.role == 'user' %}{{ '<|turn>user\n' + m.content + '<turn|>\n' }}"
        "{% elif m.role == 'assistant' %}{% if not loop.previtem or loop.previtem.role == 'user' %}"
        "{{ '<|turn>model\n' }}{% endif %}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
        "<|tool_call>call:{{ f.name }}{{ '{' }}{% for k, v in f.arguments.items() %}{{ k }}:"
        '{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}'
        "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}<tool_call|>{% endfor %}"
        "{% if m.tool_calls %}<|tool_response>{% if loop.nextitem %}response:"
        "{{ loop.nextitem.content }}<tool_response|>{% endif %}{% endif %}{{ m.content or '' }}"
        "{% if not m.tool_calls %}{{ '<turn|>\n' }}{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role == 'user' %}{{ '<|turn>model\n' }}"
        "{% endif %}"
    ),
    # The arguments are JSON text.
    "DeepSeek V3 and R1": chat(
        BEFORE="{% if not loop.previtem or loop.previtem.role == 'user' %}"
        "<｜Assistant｜>{% endif %}",
        CALL="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        "{{ f.name + '\n```json\n' + f.arguments + '\n```' }}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        AFTER="<｜end▁of▁sentence｜>",
        TOOL="<｜tool▁outputs▁begin｜>{{ m.content }}<｜tool▁outputs▁end｜>",
        USER="<｜User｜>",
        END="",
    ).replace("{{ '@BEGIN@' }}", "{{ '<｜Assistant｜>' if messages[-1].role == 'user' else '' }}"),
    "Qwen3-Coder, Qwen3.5 and Nemotron 3": chat(
        BEFORE="{{ '<|im_start|>assistant\n' }}",
        CALL="{{ '<tool_call>\n<function=' + f.name + '>\n' }}{% for k, v in f.arguments.items() %}"
        f"{PARAMETER}{{% endfor %}}{{{{ '</function>\n</tool_call>' }}}}",
        AFTER="{{ '<|im_end|>\n' }}",
        TOOL="{{ '<|im_start|>tool\n' + m.content + '<|im_end|>\n' }}",
        SYS="<|im_start|>system\n",
        USER="<|im_start|>user\n",
        END="<|im_end|>\n",
        BEGIN="<|im_start|>assistant\n",
    ),
    # The next message ends a turn.
    "GLM-4.5 and later": chat(
        BEFORE="<|assistant|>",
        CALL="{{ '<tool_call>' + f.name + '\n' }}{% for k, v in f.arguments.items() %}"
        f"{ARGUMENT}{{% endfor %}}</tool_call>",
        AFTER="",
        TOOL="<|observation|>{{ m.content }}",
        END="",
        BEGIN="<|assistant|>",
    ),
    "Llama 3": chat(
        BEFORE="{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
        CALL="""{{ '{"name": "' + f.name + '", "parameters": ' + (f.arguments | tojson) + '}' }}""",
        AFTER="<|eot_id|>",
        TOOL="{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content }}<|eot_id|>",
        USER="<|start_header_id|>user<|end_header_id|>\n\n",
        END="<|eot_id|>",
        BEGIN="<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    # Ids of calls have nine letters and digits.
    "Mistral": chat(
        BEFORE="",
        CALL="{% if c.id | length != 9 %}{{ raise_exception('an id of nine characters') }}"
        "{% endif %}[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}",
        AFTER="</s>",
        TOOL="[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]",
        USER="[INST]",
        END="[/INST]",
        BEGIN="",
    ),
    "LFM2": chat(
        BEFORE="{{ '<|im_start|>assistant\n' }}",
        CALL=f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>",
        AFTER="{{ '<|im_end|>\n' }}",
        TOOL="{{ '<|im_start|>tool\n' + m.content + '<|im_end|>\n' }}",
        USER="<|im_start|>user\n",
        END="<|im_end|>\n",
        BEGIN="<|im_start|>assistant\n",
    ),
    "OLMo 3": chat(
        BEFORE="{{ '<|im_start|>assistant\n' }}",
        CALL=f"<function_calls>{PYTHON}</function_calls>",
        AFTER="{{ '<|im_end|>\n' }}",
        TOOL="{{ '<|im_start|>environment\n' + m.content + '<|im_end|>\n' }}",
        USER="<|im_start|>user\n",
        END="<|im_end|>\n",
        BEGIN="<|im_start|>assistant\n",
    ),
    "Kimi K2": chat(
        BEFORE="<|im_assistant|>assistant<|im_middle|>",
        CALL="<|tool_calls_section_begin|><|tool_call_begin|>functions.{{ f.name }}:0"
        "<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        AFTER="<|im_end|>",
        TOOL="<|im_system|>tool<|im_middle|>{{ m.tool_call_id + ': ' + m.content }}<|im_end|>",
        USER="<|im_user|>user<|im_middle|>",
        END="<|im_end|>",
        BEGIN="<|im_assistant|>assistant<|im_middle|>",
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_comes_back_and_its_answer_continues_the_sampled_tokens(name: str) -> None:
    turns = importlib.import_module("benchmarks.tool_turns").measure(TEMPLATES[name])
    assert turns.format == f"the format of {name}"
    assert (turns.call, turns.result, turns.text) == (YES, YES, YES)
    # gpt-oss ends only the last turn of a chat as it is sampled.
    assert (turns.template == YES) is (name != "gpt-oss"), turns.template


def test_what_does_not_work_has_a_reason() -> None:
    bench = importlib.import_module("benchmarks.tool_turns")
    qwen = TEMPLATES["Qwen3-Coder, Qwen3.5 and Nemotron 3"]
    other = bench.measure(qwen.replace("parameter=", "argument="))
    assert "comes back as" in other.call and other.result == "no"
    hidden = bench.measure(qwen.replace("{% for c in m.tool_calls %}", "{% for c in [] %}"))
    assert hidden.call == "the template does not write tool calls"
    none = bench.measure("{{ tools }}")
    assert none.format == "no format is known for this template" and none.call == "no"
    moved = TEMPLATES["Mistral"].replace("{{ '[INST]", "{{ loop.length ~ '[INST]")
    assert "the messages before the turn in another way" in bench.measure(moved).result
    refused = bench.measure(TEMPLATES["Mistral"].replace("length != 9", "length != 8"))
    assert refused.call == "the template refuses the chat: an id of nine characters"


def test_the_table_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = importlib.import_module("benchmarks.tool_turns")
    monkeypatch.setattr("sys.argv", ["tool_turns", "--templates", str(tmp_path)])
    with pytest.raises(SystemExit):
        bench.main()
    assert "has no *.jinja file with tools" in capsys.readouterr().err
    (tmp_path / "lfm.jinja").write_text(TEMPLATES["LFM2"])
    (tmp_path / "plain.jinja").write_text("{{ messages }}")
    bench.main()
    rows = capsys.readouterr().out.splitlines()
    assert rows[2:] == ["| lfm | the format of LFM2 | yes | yes | yes | yes |"]
