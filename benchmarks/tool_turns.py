"""Which chat templates can train a tool agent: a table for a folder of templates.

    python -m benchmarks.tool_turns --templates FOLDER

Each `*.jinja` gets a byte-level tokenizer with the special tokens that the template writes. A
chat with a tool call, the tool's answer and a text is then sampled as the template writes it. The
table says whether the call is read, whether the chat goes on with exactly the sampled tokens, and
where the template itself would write other ones.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.preflight import ToolTurns, tool_turns
from asyncrl.text import load_stops
from benchmarks.families import byte_tokenizer

SPECIAL = re.compile(
    r"<\|[^|<>\s{}]+\|?>|<[a-z_]+\|>|<｜[^｜<>{}\s]+｜>|\[/?[A-Z_]{3,}\]|<\|\"\|>|\]~b\]|\[e~\["
    r"|<(?:start|end)_(?:of_turn|function_\w+)>|<escape>|</?s>|<seed:\w+>|<SPECIAL_\d+>|<end_of_sentence>|<sep>|</assistant>"
)
"""Special tokens in the text of a template."""
ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eot|>",
    "<|eom_id|>",
    "<|call|>",
    "<|return|>",
    "<turn|>",
    "<|tool_response>",
    "<end_of_turn>",
    "<start_function_response>",
    "<｜end▁of▁sentence｜>",
    "<|user|>",
    "<|observation|>",
    "<|end_of_text|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|endoftext|>",
    "</s>",
    "[e~[",
    "<seed:eos>",
    "<|tools_suffix|>",
    "<|calls|>",
)
"""Tokens that end turns, as in the generation configs of these models."""
NOWHERE = Path("/")
"""Has no generation config."""
PHI_END = "<|end|>"
"""Ends a turn, except where <|call|> does: gpt-oss ends each part of a turn with it."""


def tokenizer_of(template: str) -> Any:
    """A byte-level tokenizer with a chat template and its special tokens."""
    tokenizer: Any = byte_tokenizer()
    found = list(dict.fromkeys(SPECIAL.findall(template)))
    begin = next((token for token in found if "begin" in token and "sentence" in token), "<s>")
    end = next((token for token in found if token in ENDS and "of" in token), "</s>")
    names = {"bos_token": begin, "eos_token": end}
    tokenizer.add_special_tokens({"extra_special_tokens": found, **names})
    tokenizer.chat_template = template
    return tokenizer


def ends_of(tokenizer: Any) -> list[int]:
    """The tokens of a template that end turns."""
    names = ENDS if "<|call|>" in tokenizer.chat_template else (*ENDS, PHI_END)
    known = tokenizer.get_vocab()
    written = [name for name in names if name in tokenizer.chat_template]
    found = load_stops(NOWHERE, tokenizer).tokens
    return sorted({*found, *(known[name] for name in written if name in known)})


def measure(template: str) -> ToolTurns:
    """What becomes of a tool call with this template."""
    tokenizer = tokenizer_of(template)
    return tool_turns(tokenizer, ends_of(tokenizer))


def table(rows: Sequence[tuple[str, ToolTurns]]) -> str:
    """A Markdown table of templates."""
    lines = ["| template | format | call | answer | text | as the template |", "|---" * 6 + "|"]
    for name, turns in rows:
        cells = [name, turns.format, turns.call, turns.result, turns.text, turns.template]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--templates", type=Path, required=True, help="folder of *.jinja files")
    folder = parser.parse_args().templates
    paths = sorted(path for path in folder.glob("**/*.jinja") if "tool" in path.read_text())
    if not paths:
        parser.error(f"{folder} has no *.jinja file with tools; give a folder of chat templates")
    print(table([(path.stem, measure(path.read_text())) for path in paths]))


if __name__ == "__main__":
    main()
