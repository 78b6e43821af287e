"""One session: serves the requests of an agent, and keeps exactly the tokens that were sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from asyncrl.contracts.nodes import FORKED, HISTORY, ORPHAN, REPEATED, REWRITTEN, SEPARATE, Node
from asyncrl.contracts.rows import Completion
from asyncrl.contracts.text_listener import Heard
from asyncrl.sessions.answers import (
    Answer,
    ChatRequest,
    ContextTooLongError,
    SessionClosedError,
    Token,
)
from asyncrl.sessions.beginnings import Beginnings
from asyncrl.sessions.chat_digests import ChatDigests, prompt_digest, request_hash
from asyncrl.sessions.tree import Continued, SessionTree
from asyncrl.text.chat_messages import Message, MessagesError, Schema, refuse_unencodable
from asyncrl.text.continuation import (
    ContinuationError,
    continuation,
    first_difference,
    render_chat,
)
from asyncrl.text.response import PREFIX_TOKENS, in_reasoning
from asyncrl.text.stops import first_stop
from asyncrl.text.tokenizer import decode_prompt, encode_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class SessionTemplate:
    """How the chats of a session become tokens."""

    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]
    """Tokens that end a turn."""
    max_length: int
    """Most tokens of a turn with everything before it."""
    history: Literal["verbatim", "template"] = "verbatim"
    """`verbatim`: a turn continues from the tokens that were sampled before it. `template`: it does
    so only where the template would write the same tokens. A template that strips earlier reasoning
    does not."""
    variables: Mapping[str, object] | None = None
    """Of the chat template."""
    most_characters: int | None = None
    """No text with more characters has max_length tokens or fewer. None: not known."""

    def render(self, messages: Sequence[Message], tools: Sequence[Schema] | None) -> list[int]:
        """The tokens of a whole chat, up to the start of the next turn.

        Raises:
            MessagesError: the template refuses the chat.
        """
        refuse_unencodable(messages, tools)
        text = render_chat(self.tokenizer, messages, self.variables or {}, tools)
        if self.most_characters is not None and len(text) > self.most_characters:
            raise ContextTooLongError(
                f"the request has {len(text)} characters, which are more than {self.max_length}"
                " tokens; shorten the messages"
            )
        (ids,), _ = encode_prompts(self.tokenizer, [text], rendered=True)
        return ids

    def hides(self, tools: Sequence[Schema], messages: Sequence[Message]) -> bool:
        """Whether a chat is the same text without its tools, so that the model sees none."""
        variables = self.variables or {}
        try:
            texts = [render_chat(self.tokenizer, messages, variables, t) for t in (tools, None)]
        except MessagesError:  # without tools, so the template writes them
            return False
        return texts[0] == texts[1]

    def continued(
        self,
        path: Sequence[int],
        messages: Sequence[Message],
        known: int,
        tools: Sequence[Schema] | None,
    ) -> list[int]:
        """The tokens after `path`, which has the first `known` messages, up to the next turn.

        Raises:
            ContinuationError: the template does not prove what follows, or `history` is `template`
                and it would write other tokens before.
            MessagesError: the template refuses the chat.
        """
        refuse_unencodable(messages[known:], tools)
        added = sum(len(str(message.get("content") or "")) for message in messages[known:])
        if self.most_characters is not None and added > self.most_characters:
            raise ContextTooLongError(
                f"the new messages have {added} characters, which are more than {self.max_length}"
                " tokens; shorten them"
            )
        end = path[-1] if path and path[-1] in self.ends else None
        ids = continuation(
            self.tokenizer, messages[:known], messages[known:], end, self.variables or {}, tools
        )
        if self.history == "template":
            sampled, rendered = [*path, *ids], self.render(messages, tools)
            if sampled != rendered:
                raise ContinuationError(
                    "the template writes earlier turns in another way;"
                    f" {self.difference(sampled, rendered)}",
                    HISTORY,
                )
        return ids

    def difference(self, before: Sequence[int], now: Sequence[int]) -> str:
        """Where tokens first differ from those before, in words."""
        index = first_difference(before, now)
        if index is None:
            return "all tokens are the same"
        was, found = (
            f"{ids[index]} ({decode_prompt(self.tokenizer, ids[index : index + 1])!r})"
            if index < len(ids)
            else "none"
            for ids in (before, now)
        )
        return f"token {index} is {found}, and was {was}"


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What a session asks of a generator."""

    prompt_ids: list[int]
    n: int
    max_tokens: int
    turn: int
    """Turns before it on its path."""
    answered: int
    """Answers that the same tokens have already. With `turn`, it makes seeds that differ."""
    min_version: int | None
    """The newest version that sampled a token before it. The answer's must not be older."""
    stop: tuple[str, ...] = ()
    """Strings that end it, in addition to the run's."""
    schema: Mapping[str, Any] | None = None
    """JSON schema that its text must follow."""

    @property
    def schema_text(self) -> str | None:
        """The schema as JSON."""
        return None if self.schema is None else json.dumps(self.schema)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A completion of a turn, and where and when it was sampled."""

    completion: Completion
    replica: str
    started_at: float
    finished_at: float
    status: str = "ok"
    """Of the node: `constrained` if a grammar restricted its tokens."""


class TurnGenerator(Protocol):
    """Samples the completions of a turn."""

    async def generate(self, request: TurnRequest, heard: Heard | None = None) -> Sequence[Sampled]:
        """The turn's completions. `heard` gets their texts while they are sampled, if it is
        given."""
        ...


WithAnswer = Callable[[Message], tuple[bytes, str]]
"""The digest of a request with this answer, and the answer's reasoning."""
ReadMessage = Callable[[Sequence[int], Completion, "Sequence[Schema] | None"], Message]
"""The assistant's message of a completion after these tokens: text, reasoning and tool calls."""


class _Placed(NamedTuple):
    """A request in the tree."""

    context: int
    chat: bytes
    """The digest of its chat, or of its text."""
    with_answer: WithAnswer


class Session:
    """Serves the requests of an agent in one session."""

    def __init__(
        self, template: SessionTemplate, generator: TurnGenerator, read: ReadMessage
    ) -> None:
        self.tree = SessionTree()
        self._template, self._generator, self._read = template, generator, read
        self._closed: str | None = None
        self._answers: dict[str, asyncio.Future[list[Answer]]] = {}
        """Answers by the key of their request, to repeat them."""
        self._received: set[str] = set()
        """Keys of requests whose answers a client got."""
        self._asked: dict[int, int] = {}
        """Hash of a prompt's tokens → answers that were asked of it."""
        self._digests = ChatDigests()
        self._beginnings = Beginnings()
        self._separate: set[int] = set()
        """Contexts that begin a chat of its own."""
        self._last: tuple[Sequence[Message], Message] | None = None
        """The messages of the last answered request, and its answer."""
        self._choices: dict[int, list[Answer]] = {}
        """Turn → all choices of its request, if there are several."""
        self._continued: set[int] = set()
        self.unseen_tools = 0
        """Requests with tools that the chat template does not write."""
        self._hides_tools: bool | None = None
        """Whether it does not. The first request with tools decides."""
        self._texts: dict[int, str] = {}
        """Turn → the text of its path, for requests that continue a text."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.tree.nodes

    @property
    def chat_so_far(self) -> list[Message]:
        """The messages of the last answered request, and its answer."""
        return [] if self._last is None else [*self._last[0], self._last[1]]

    def close(self, reason: str) -> None:
        """End the session. Later requests are refused with this reason, and those under way are
        canceled."""
        self._closed = self._closed or reason
        for key, answers in self._answers.items():
            if answers.cancel() or answers.cancelled() or answers.exception() is not None:
                continue
            if key not in self._received:
                self.abandon([answer.node for answer in answers.result()])

    async def chat(self, request: ChatRequest, heard: Heard | None = None) -> list[Answer]:
        """Answer a request with n turns.

        Args:
            heard: gets the text of the turns while they are sampled, after an empty text at their
                beginning. It gets no more of a request that joins an earlier one with its key.

        Raises:
            SessionClosedError: the session has ended.
            ContextTooLongError: the chat leaves no room for an answer.
            MessagesError: the template refuses the chat.
            Any error of the generator. A request with the same key then begins again.
        """
        if self._closed is not None:
            raise SessionClosedError(self._closed)
        if (key := request.key) is None:
            answers = await self._answer(request, heard)
            self._last = _chat_of(request), answers[0].message
            return answers
        if key not in self._answers:
            task = asyncio.ensure_future(self._answer(request, heard))
            task.add_done_callback(lambda done: self._forget_failed(key, done))
            self._answers[key] = task
        elif heard is not None:
            heard(0, "")
        # A client that leaves does not end what its retry will ask for.
        answers = await asyncio.shield(self._answers[key])
        if self._closed is not None:  # before this request could go on
            raise SessionClosedError(self._closed)
        self._received.add(key)
        self._last = _chat_of(request), answers[0].message
        chosen = self._continued & {answer.node for answer in answers}
        if self.tree.nodes[answers[0].node].status == ORPHAN and not chosen:
            self.tree.set_status(answers[0].node, "ok")  # an earlier client had left
        return answers

    def abandon(self, nodes: Sequence[int]) -> None:
        """Note that the agent did not get these answers, unless it has gone on with them."""
        continued = {node.parent for node in self.tree.nodes if not node.sampled}
        for node in nodes:
            if node not in continued and self.tree.nodes[node].status == "ok":
                self.tree.set_status(node, ORPHAN)

    def _forget_failed(self, key: str, done: asyncio.Future[list[Answer]]) -> None:
        if done.cancelled() or done.exception() is not None:
            del self._answers[key]

    async def _answer(self, request: ChatRequest, heard: Heard | None) -> list[Answer]:
        asked = self._chat_context if request.prompt is None else self._prompt_context
        placed = asked(request)
        prompt_ids = self.tree.path_ids(placed.context)
        room = self._template.max_length - len(prompt_ids)
        if room < 1:
            raise ContextTooLongError(
                f"the request has {len(prompt_ids)} tokens, and {self._template.max_length} are"
                " allowed with its answer; shorten the messages"
            )
        # Equal tokens need other seeds, also where they come from other messages.
        same = hash(tuple(prompt_ids))
        answered = self._asked.get(same, 0)
        self._asked[same] = answered + request.n
        before = self.tree.nodes[placed.context].parent
        if heard is not None:
            heard(0, "")  # whatever is wrong with the request was found before
        if heard is not None and request.prompt is None and self._begins_in_reasoning(prompt_ids):
            heard = None  # what comes first is no content
        sampled = await self._generator.generate(
            TurnRequest(
                prompt_ids,
                request.n,
                room if request.max_tokens is None else min(room, request.max_tokens),
                self.tree.turns_to(before),
                answered,
                self.tree.newest_version(before),
                request.stop,
                request.schema,
            ),
            heard,
        )
        if self._closed is not None:  # meanwhile
            raise SessionClosedError(self._closed)
        branch = self._branch(placed.context, prompt_ids)
        answers = [
            self._add(placed, one, request, prompt_ids, "" if index else branch)
            for index, one in enumerate(sampled)
        ]
        # Most clients go on with the first choice. Another one counts once a request continues it.
        for answer in answers[1:]:
            self.tree.set_status(answer.node, ORPHAN)
        self._choices |= {answer.node: answers for answer in answers if request.n > 1}
        return answers

    def _branch(self, context: int, prompt_ids: Sequence[int]) -> str:
        """Why the next turn after this context is a branch. Empty: it is none, or the context says
        why."""
        nodes, beside = self.tree.nodes, self.tree.beside(context)
        if beside is None:
            return ""
        if nodes[beside].parent == context:
            return f"{REPEATED}: the request has an answer already"
        if nodes[context].branch_reason:
            return ""
        if nodes[context].parent is not None:
            why = f"{FORKED}: another turn follows the turn before it"
        elif context in self._separate:
            why = f"{SEPARATE}: a chat of its own, such as another agent's"
        else:
            why = f"{REWRITTEN}: no turn has the beginning of the chat"
        return f"{why}; {self._template.difference(self.tree.path_ids(beside), prompt_ids)}"

    def _begins_in_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        last = prompt_ids[-PREFIX_TOKENS:]
        return in_reasoning(decode_prompt(self._template.tokenizer, last))

    def _chat_context(self, request: ChatRequest) -> _Placed:
        """The context of a chat."""
        if not request.messages:
            raise MessagesError("a request needs at least one message")
        chat = self._digests.of(request.messages, request.tools)
        continued = self.tree.find(chat.digests, chat.exact, chat.thoughts)
        context = self._context(continued, request.messages, request.tools, chat.exact)
        if request.tools:
            if self._hides_tools is None:
                self._hides_tools = self._template.hides(request.tools, request.messages)
            self.unseen_tools += self._hides_tools
        return _Placed(context, chat.exact, chat.with_answer)

    def _prompt_context(self, request: ChatRequest) -> _Placed:
        """The context of a text. It continues the longest path whose text begins it."""
        prompt = str(request.prompt)
        refuse_unencodable([{"content": prompt}], None)
        digest = prompt_digest(prompt)
        context = self.tree.find([digest]).node
        if context is None:
            turn, known = self._path_of(prompt)
            if turn is not None:
                self._prefer(turn)
            (ids,), _ = encode_prompts(self._template.tokenizer, [prompt[known:]], rendered=True)
            context = self.tree.add_context(Node(turn, tuple(ids)), digest)
            if turn is None and self._beginnings.is_separate_text(prompt):
                self._separate.add(context)
        return _Placed(
            context,
            digest,
            lambda message: (prompt_digest(f"{prompt}{message.get('content')}"), ""),
        )

    def _path_of(self, prompt: str) -> tuple[int | None, int]:
        """The turn whose path has the longest text that begins the prompt, and that text's length.
        None: there is no such turn."""
        longest: tuple[int | None, int] = (None, 0)
        for index, node in enumerate(self.tree.nodes):
            if node.sampled:
                if (text := self._texts.get(index)) is None:
                    text = decode_prompt(self._template.tokenizer, self.tree.path_ids(index))
                    self._texts[index] = text
                if len(text) > longest[1] and prompt.startswith(text):
                    longest = index, len(text)
        return longest

    def _prefer(self, node: int) -> None:
        """Note that a request continues this turn. Of several choices, those that no request
        continues become orphans."""
        choices = self._choices.get(node, ())
        if choices:
            self._continued.add(node)
        if self.tree.nodes[node].status == ORPHAN:
            self.tree.set_status(node, "ok")
        for choice in choices:
            if choice.node not in self._continued:
                self.tree.set_status(choice.node, ORPHAN)

    def _context(
        self,
        continued: Continued,
        messages: Sequence[Message],
        tools: Sequence[Schema] | None,
        chat: bytes,
    ) -> int:
        """The node of the request's context. A new one continues a turn if the template allows
        it."""
        if continued.node is not None and continued.messages == len(messages):
            return continued.node
        if continued.node is None:
            ids = self._template.render(messages, tools)
            context = self.tree.add_context(Node(None, tuple(ids)), chat)
            if self._beginnings.is_separate(messages, tools):
                self._separate.add(context)
            return context
        self._prefer(continued.node)
        path = self.tree.path_ids(continued.node)
        try:
            ids = self._template.continued(path, messages, continued.messages, tools)
            return self.tree.add_context(Node(continued.node, tuple(ids)), chat)
        except ContinuationError as error:
            ids = self._template.render(messages, tools)
            reason = f"{error.branch}: {error}"
            if error.branch != HISTORY:  # which names the token
                reason += f"; {self._template.difference(path, ids)}"
            return self.tree.add_context(Node(None, tuple(ids), branch_reason=reason), chat)

    def _add(
        self,
        placed: _Placed,
        sampled: Sampled,
        request: ChatRequest,
        prompt_ids: Sequence[int],
        branch: str,
    ) -> Answer:
        completion = sampled.completion
        message: Message = (
            self._read(prompt_ids, completion, request.tools if request.calls else None)
            if request.prompt is None
            else {"role": "assistant", "content": completion.text}
        )
        self._beginnings.said(message)
        node = self.tree.add_turn(
            Node(
                placed.context,
                completion.token_ids,
                sampled=True,
                logprobs=completion.logprobs,
                versions=completion.versions,
                status=sampled.status,
                finish_reason=completion.finish_reason,
                replica=sampled.replica,
                branch_reason=branch,
                request_hash=request_hash(placed.chat, request),
                started_at=sampled.started_at,
                finished_at=sampled.finished_at,
            ),
            *placed.with_answer(message),
        )
        return Answer(
            message,
            completion.finish_reason,
            len(completion.token_ids),
            len(prompt_ids),
            node,
            self._spelled(completion) if request.logprobs else (),
            self._stop(completion, request.stop),
        )

    def _stop(self, completion: Completion, stops: Sequence[str]) -> str | None:
        """Which of a request's stop strings ended a completion."""
        ids = completion.token_ids
        if (
            not stops
            or completion.finish_reason != "stop"
            or ids[-1:] == ()
            or (ids[-1] in self._template.ends)
        ):
            return None
        return first_stop(decode_prompt(self._template.tokenizer, ids), stops)

    def _spelled(self, completion: Completion) -> tuple[Token, ...]:
        return tuple(
            Token(token, decode_prompt(self._template.tokenizer, [token]), logprob)
            for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
        )


def _chat_of(request: ChatRequest) -> Sequence[Message]:
    """The messages of a request; a prompt is a user's message."""
    if request.prompt is None:
        return request.messages
    return [{"role": "user", "content": request.prompt}]
