"""Checks of a chat template with scripted turns: whether it only appends, whether tool calls come
back as they were written, what is trained, and what ends a turn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.preflight.check_env.findings import Finding
from asyncrl.preflight.check_env.scripted_model import (
    CALL_ID,
    Said,
    ScriptedModel,
    ScriptedSession,
    call_message,
    next_end,
    turn_text,
    writes,
)
from asyncrl.preflight.check_env.tool_examples import (
    MADE_UP,
    PROBE,
    example_arguments,
    own_cases,
    refused_examples,
    tool_name,
)
from asyncrl.sessions.answers import ChatRequest
from asyncrl.sessions.session import SessionTemplate
from asyncrl.sessions.session_rows import session_rows
from asyncrl.text.chat_messages import Message, MessagesError, Schema
from asyncrl.text.continuation import render_chat
from asyncrl.text.response import ResponseReader, format_name
from asyncrl.text.tokenizer import decode_prompt, encode_continuations
from asyncrl.text.turn_formats import TAKES_TOOLS

WORDS = ("fine", "so it is", "yes", "7", "a", "right")
"""Texts for turns. The first that the tokenizer can write is taken."""
TURNS = 3
"""Turns of a scripted chat."""
LONGEST = 1 << 20
"""Tokens of a chat here. The run's own limit does not matter for its template."""


@dataclass(frozen=True, slots=True)
class _Played:
    """A scripted chat of several turns."""

    session: ScriptedSession

    def branches(self) -> list[str]:
        return [node.branch_reason for node in self.session.session.nodes if node.branch_reason]

    @property
    def turns(self) -> int:
        return sum(node.sampled for node in self.session.session.nodes)


class TemplateChecks:
    """Checks of one model's template and parser.

    Args:
        first: the first messages of a session.
        tools: what the environment offers to the model; None or empty: nothing.
    """

    def __init__(
        self,
        template: SessionTemplate,
        reader: ResponseReader,
        first: Sequence[Message],
        tools: Sequence[Schema] | None,
    ) -> None:
        self._template = replace(template, max_length=LONGEST, most_characters=None)
        self._reader, self._first = reader, list(first)
        self._tools = list(tools or [])
        self._word = next((word for word in WORDS if writes(template.tokenizer, word)), WORDS[0])
        self._played: dict[str, _Played] = {}

    def all(self) -> Iterator[Finding]:
        """Run all checks."""
        for check in (self.append_only, self.tool_calls, self.masks, self.stops):
            yield from check()

    def append_only(self) -> list[Finding]:
        """Whether a later turn continues the tokens of the earlier ones."""
        found: list[Finding] = []
        same: list[str] = []
        rewritten: dict[str, str] = {}
        for kind, turns in self._scripts().items():
            needed = kind != "tool calls" or bool(self._tools)
            try:
                played = self._play(turns, "verbatim", cut=kind == "a cut turn")
                branches = played.branches()
                by_template = self._play(turns, "template", cut=kind == "a cut turn").branches()
            except MessagesError as error:
                found.append(
                    Finding(
                        "FAIL" if needed else "warn",
                        "template",
                        f"{kind}: it refuses the chat: {error}",
                    )
                )
                continue
            self._played[kind] = played
            if branches:
                found.append(
                    Finding(
                        "FAIL" if needed and kind != "a cut turn" else "warn",
                        "template",
                        f"{kind}: it drifts. {len(branches)} of {played.turns - 1} later turns do"
                        f" not continue what was sampled, and begin a new row: {branches[0]}",
                    )
                )
            elif by_template:
                rewritten[kind] = by_template[0]
            else:
                same.append(kind)
        verbatim = self._template.history == "verbatim"
        if one_row := [*same, *(rewritten if verbatim else ())]:
            text = f"{TURNS} turns continue the sampled tokens ({', '.join(one_row)})" + (
                "" if found else ", so a session is one row"
            )
            found.insert(0, Finding("ok", "template", text))
        return [*found, *([self._history(rewritten)] if rewritten else [])]

    def _history(self, rewritten: Mapping[str, str]) -> Finding:
        """What the run does where the template writes earlier turns in another way.

        Args:
            rewritten: kind of chat → how.
        """
        effect = (
            "environment.history: verbatim keeps the sampled tokens. A model that is used with its"
            " template sees other earlier turns than in training"
            if self._template.history == "verbatim"
            else "environment.history: template follows the template: each such turn is a row of"
            " its own, whose context is computed again"
        )
        kinds, why = ", ".join(rewritten), next(iter(rewritten.values()))
        return Finding("warn", "history", f"{kinds}: {why}. {effect}")

    def _scripts(self) -> dict[str, list[tuple[Said, list[Message]]]]:
        """Kind → what the model says in each turn, and the messages that follow."""
        word = self._word
        said = {"role": "assistant", "content": word}
        user: Message = {"role": "user", "content": word}
        scripts = {
            "text": [(Said(said), [user])] * TURNS,
            "a cut turn": [(Said(said), [user])] * 2,
        }
        if (thought := self._reasoning()) is not None:
            scripts["reasoning"] = [(Said(thought), [user])] * TURNS
        parsed = format_name(self._template.tokenizer) is not None
        if parsed and (call := self._own_call()) is not None:
            reply: Message = {"role": "tool", "tool_call_id": CALL_ID.format(0), "content": word}
            scripts["tool calls"] = [*[(Said(call), [reply])] * (TURNS - 1), (Said(said), [user])]
        return scripts

    def _reasoning(self) -> Message | None:
        """A message with reasoning, in the form that the template writes. None: it has no such
        form."""
        word, text = self._word, self._word
        if "think" not in str(getattr(self._template.tokenizer, "chat_template", "")):
            return None
        forms: list[dict[str, object]] = [
            {"reasoning_content": f"{text} {text}", "content": word},
            {"reasoning": f"{text} {text}", "content": word},
            {"content": f"<think>\n{text} {text}\n</think>\n\n{word}"},
        ]
        for form in forms:
            message = {"role": "assistant", **form}
            try:
                written = turn_text(self._template, self._first, message, self._offered)
            except MessagesError:
                continue
            if f"{text} {text}" in written and writes(self._template.tokenizer, written):
                return message
        return None

    @property
    def _offered(self) -> list[Schema] | None:
        return self._tools or None

    def _own_call(self) -> Message | None:
        """A call of the environment's first tool, or of a made-up one."""
        tool = (self._tools or [PROBE])[0]
        name, arguments = tool_name(tool), example_arguments(tool, "plain")
        message = call_message((name, arguments))
        if self._tools:
            return message
        # Without tools, a template that cannot write the made-up call does not matter.
        try:
            text = turn_text(self._template, self._first, message, [PROBE])
        except MessagesError:
            return None
        return message if name in text and writes(self._template.tokenizer, text) else None

    def _play(
        self, turns: Sequence[tuple[Said, list[Message]]], history: Any, cut: bool = False
    ) -> _Played:
        """Play scripted turns through a session.

        Args:
            cut: whether each turn ends at the token limit, before its end token.
        """
        template = replace(self._template, history=history)
        says = iter([said for said, _ in turns])
        model = ScriptedModel(template, lambda *_: next(says), 1 if cut else LONGEST)
        session = ScriptedSession(template, self._reader, model)

        async def play() -> None:
            chat = list(self._first)
            calls = any((said.message or {}).get("tool_calls") for said, _ in turns)
            tools = self._offered or ([PROBE] if calls else None)
            for _, added in turns:
                (answer,) = await session.chat(ChatRequest(chat, tools))
                chat = [*chat, answer.message, *_answering(added, answer.message)]

        asyncio.run(play())
        return _Played(session)

    def tool_calls(self, made_up: bool = True) -> list[Finding]:
        """Whether calls that the template writes are parsed to the same calls.

        Args:
            made_up: whether those of a made-up tool are tried, too.
        """
        tokenizer = self._template.tokenizer
        found: list[Finding] = []
        if self._tools:
            found += self._shown_tools()
        if format_name(tokenizer) is None:
            return [*found, self._unreadable()]
        for tool in self._tools:
            if why := refused_examples(tool):
                text = (
                    f"{tool_name(tool)}: {why}, so they are not checked; correct the schema, or"
                    " give it an example"
                )
                found.append(Finding("warn", "tool calls", text))
        own = {
            f"{tool_name(tool)}: {kind}": [(tool_name(tool), arguments) for arguments in given]
            for tool in self._tools
            for kind, given in own_cases(tool).items()
        }
        others = {
            f"made-up: {kind}": [("probe", arguments) for arguments in given]
            for kind, given in MADE_UP.items()
        }
        return [
            *found,
            *self._round_trips(own, self._tools, "FAIL"),
            *self._round_trips(others if made_up else {}, [*self._tools, PROBE], "warn"),
        ]

    def _unreadable(self) -> Finding:
        """What follows if no format of the model's tool calls is known."""
        takes = TAKES_TOOLS.search(str(getattr(self._template.tokenizer, "chat_template", "")))
        if not self._tools and not takes:
            return Finding("ok", "tool calls", "the environment offers no tools")
        shows = "takes tools, but" if takes else "shows no tools, and"
        text = (
            f"the template {shows} asyncrl cannot read its tool calls: every call stays text, and"
            " no tool runs; give response_template in the model's tokenizer_config.json"
        )
        return Finding("FAIL" if self._tools else "warn", "tool calls", text)

    def _shown_tools(self) -> list[Finding]:
        """Whether the template writes the schemas of the tools."""
        variables, tokenizer = self._template.variables or {}, self._template.tokenizer
        try:
            texts = [render_chat(tokenizer, self._first, variables, t) for t in (self._tools, None)]
        except MessagesError as error:
            return [Finding("FAIL", "tools", f"the template refuses them: {error}")]
        if texts[0] != texts[1]:
            return []
        text = "the template does not write their schemas, so the model does not see them"
        return [Finding("warn", "tools", text)]

    def _round_trips(
        self,
        cases: Mapping[str, Sequence[tuple[str, Mapping[str, object]]]],
        tools: Sequence[Schema],
        verdict: Any,
    ) -> list[Finding]:
        came: list[str] = []
        unwritten: list[str] = []
        missing: list[str] = []
        found: list[Finding] = []
        for case, calls in cases.items():
            try:
                back, text = self._round_trip(calls, tools)
            except MessagesError as error:
                # Many templates take one call at a time. Their models then write no second one.
                found.append(
                    Finding(
                        "warn" if len(calls) > 1 else verdict,
                        "tool calls",
                        f"{case}: the template refuses it: {error}",
                    )
                )
                continue
            given = [[name, arguments] for name, arguments in calls]
            if back is None:
                unwritten.append(case)
            elif _same(back, given):
                came.append(case)
            elif _same(back, given[:1]) and text.count(calls[0][0]) == 1:
                only = f"{case}: the template writes only the first call of a turn, as gpt-oss's"
                found.append(Finding("warn", "tool calls", only))
            elif not back and calls[0][0] not in text:
                missing.append(case)
            else:
                what = f"comes back as {json.dumps(back, ensure_ascii=False)[:120]}"
                problem = what if back else "stays text: it cannot be parsed"
                found.append(Finding(verdict, "tool calls", f"{case}: {text[:160]!r} {problem}"))
        if came:
            how = format_name(self._template.tokenizer)
            text = f"come back as they were written, by {how} ({', '.join(came)})"
            found.insert(0, Finding("ok", "tool calls", text))
        if missing:
            text = (
                "not checked, because the template leaves the calls of earlier turns out:"
                f" {', '.join(missing)}. The model sees its own only with environment.history:"
                " verbatim"
            )
            found.append(Finding("warn", "tool calls", text))
        if unwritten:
            text = f"not checked, because the tokenizer cannot write them: {', '.join(unwritten)}"
            found.append(Finding("warn", "tool calls", text))
        return found

    def _round_trip(
        self, calls: Sequence[tuple[str, Mapping[str, object]]], tools: Sequence[Schema]
    ) -> tuple[list[object] | None, str]:
        """The calls as they come back, or None if the tokenizer cannot write them; and the text of
        the turn."""
        tokenizer = self._template.tokenizer
        text = turn_text(self._template, self._first, call_message(*calls), tools)
        if not writes(tokenizer, text):
            return None, text
        ids = encode_continuations(tokenizer, [text])[0]
        stop = next((stop for stop, one in enumerate(ids) if one in self._template.ends), None)
        ids = ids if stop is None else ids[: stop + 1]
        prompt_ids = self._template.render(self._first, tools)
        message, _ = self._reader.read(prompt_ids, ids, text, tools)
        given: Any = message.get("tool_calls") or []
        functions = [call["function"] for call in given]
        return [[one["name"], json.loads(one["arguments"])] for one in functions], text

    def masks(self) -> list[Finding]:
        """Whether exactly the tokens that the model sampled are trained, each once."""
        turns = trained = context = 0
        for kind, played in self._played.items():
            nodes, texts = played.session.session.nodes, played.session.model.texts
            sampled = [index for index, node in enumerate(nodes) if node.sampled]
            for index, text in zip(sampled, texts, strict=True):
                decoded = decode_prompt(self._template.tokenizer, nodes[index].token_ids)
                again = encode_continuations(self._template.tokenizer, [decoded])[0]
                if decoded != text and again != list(nodes[index].token_ids):
                    why = f"{kind}: the model said {text[:80]!r}, and {decoded[:80]!r} is trained"
                    return [Finding("FAIL", "masks", why)]
            derived = session_rows(nodes)
            once: list[int] = []
            for row in derived.rows:
                mine = row.nodes[row.trained].tolist()
                once += list(dict.fromkeys(mine))
                said = [one for index in dict.fromkeys(mine) for one in nodes[index].token_ids]
                if row.token_ids[row.trained].tolist() != said:
                    why = f"{kind}: other tokens are trained than the model sampled"
                    return [Finding("FAIL", "masks", why)]
                context += int((~row.trained).sum())
            if sorted(once) != sampled:
                why = f"{kind}: turns {sampled} were sampled, and {sorted(once)} are trained"
                return [Finding("FAIL", "masks", why)]
            turns, trained = turns + len(sampled), trained + derived.counts.trained
        if not turns:
            return []
        text = (
            f"{turns} turns have {trained} tokens: exactly what the model said, with the token that"
            f" ends it. {context} context tokens are not trained"
        )
        return [Finding("ok", "masks", text)]

    def stops(self) -> list[Finding]:
        """Whether a turn ends where the template ends it, and not before."""
        kinds: dict[str, Message] = {"text": {"role": "assistant", "content": self._word}}
        if self._tools and (call := self._own_call()) is not None:
            kinds["a tool call"] = call
        found: list[Finding] = []
        ends: dict[str, list[str]] = {}
        for kind, message in kinds.items():
            try:
                problem, end = self._end_of(message)
            except MessagesError:
                continue  # `append_only` or `tool_calls` says so
            if problem:
                found.append(Finding("FAIL", "stops", f"{kind}: {problem}"))
            else:
                ends.setdefault(end, []).append(kind)
        for end, of in ends.items():
            text = f"{end!r} ends a turn ({', '.join(of)}), and generation stops there"
            found.append(Finding("ok", "stops", text))
        return found

    def _end_of(self, message: Message) -> tuple[str, str]:
        """Why the end of this turn is wrong, or ""; and the token that ends it."""
        tokenizer, ends = self._template.tokenizer, self._template.ends
        text = turn_text(self._template, self._first, message, self._offered)
        names = ", ".join(repr(decode_prompt(tokenizer, [token])) for token in sorted(ends))
        ids = encode_continuations(tokenizer, [text])[0]
        stop = next((stop for stop, token in enumerate(ids) if token in ends), None)
        if stop is None:
            after = next_end(self._template, self._first, message, self._offered)
            if after is not None:
                return "", decode_prompt(tokenizer, [after])
            return (
                f"the template writes {text[-60:]!r}, and none of its tokens is a stop ({names}):"
                " generation would go on after the turn; add the token that ends it to"
                " rollout.rollout_stop_token_ids, or to generation_config.json"
            ), ""
        end = decode_prompt(tokenizer, ids[stop : stop + 1])
        more = decode_prompt(tokenizer, ids[stop + 1 :])
        if more.strip():
            return (
                f"generation stops at {end!r}, and the template writes {more[:60]!r} after it in"
                " the same turn, which the model could never say"
            ), ""
        return "", end


def _same(some: object, others: object) -> bool:
    """Whether values are the same in JSON, where true is not 1."""
    return json.dumps(some, sort_keys=True) == json.dumps(others, sort_keys=True)


def _answering(added: Sequence[Message], message: Message) -> list[Message]:
    """The added messages, with a tool's answer naming the call that it answers."""
    calls: Any = message.get("tool_calls")
    if not calls:  # it was not parsed, so no tool runs
        return [one if one["role"] != "tool" else {**one, "role": "user"} for one in added]
    return [
        {**one, "tool_call_id": calls[0]["id"]} if one["role"] == "tool" else one for one in added
    ]
