"""Which text of a turn certainly is content, while the turn is sampled."""

from __future__ import annotations

import re

from asyncrl.text.reasoning import WORDS

MARKER = re.compile(r"(?P<unfinished>[<\[]\Z)|<[^\s\d=<]|\[[A-Z]")
"""Where tool calls and reasoning may begin: <tool_call>, <think>, <|channel|>, [TOOL_CALLS]. What
is unfinished may become one."""
REASONING_MARKER = re.compile(
    rf"(?P<unfinished>(?:<[\w:/]{{0,50}}|\[[\w/]{{0,7}}|◁[\w/]{{0,7}})\Z)"
    rf"|</?{WORDS}>|<\||\[/?think\]|◁/?think▷",
    re.IGNORECASE,
)
"""Where reasoning may begin or end."""
BARE_CALLS = ("{", "[", "`")
"""How tool calls without a marker begin."""


class StreamedContent:
    """Releases the text of a turn, as far as it certainly begins the content of its message.

    Reasoning and calls of offered tools are no content, and the text around them loses its outer
    spaces. So nothing is released from the first possible marker on, nor spaces that may be outer
    ones.

    Args:
        tools: whether tools were offered.
    """

    def __init__(self, tools: bool) -> None:
        self._tools = tools
        self._held = ""
        self._started = self._over = False

    def add(self, text: str) -> str:
        """What has become certain with this new text."""
        if self._over or not text:
            return ""
        self._held += text
        if not self._started:
            self._started = True
            bare = self._tools and self._held.startswith(BARE_CALLS)
            if bare or self._held[0].isspace():
                self._over = True
                return ""
        found = (MARKER if self._tools else REASONING_MARKER).search(self._held)
        self._over = found is not None and found["unfinished"] is None
        certain = self._held[: found.start() if found else len(self._held)].rstrip()
        self._held = self._held[len(certain) :]
        return certain
