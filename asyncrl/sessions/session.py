"""One session: serves the requests of an agent, and keeps exactly the tokens that were sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from asyncrl.contracts.nodes import ORPHAN, Node
from asyncrl.contracts.rows import Completion
from asyncrl.sessions.messages import chat_digests
from asyncrl.sessions.tree import Place, SessionTree
from asyncrl.text.continuation import (
    ContinuationError,
    continuation,
    first_difference,
    render_chat,
)
from asyncrl.text.template import Message, Schema
from asyncrl.text.tokenizer import decode_prompt, encode_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Answer",
    "ContextTooLongError",
    "Sampled",
    "Session",
    "SessionClosedError",
    "SessionTemplate",
    "TurnGenerator",
    "TurnRequest",
]


class SessionClosedError(RuntimeError):
    """A request came after the end of its session. The message says why it ended."""


class ContextTooLongError(ValueError):
    """A request leaves no room for a token of its answer."""


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

    def render(self, messages: Sequence[Message], tools: Sequence[Schema] | None) -> list[int]:
        """The tokens of a whole chat, up to the start of the next turn.

        Raises:
            MessagesError: the template refuses the chat.
        """
        text = render_chat(self.tokenizer, messages, self.variables or {}, tools)
        (ids,), _ = encode_prompts(self.tokenizer, [text], rendered=True)
        return ids

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
        end = path[-1] if path and path[-1] in self.ends else None
        ids = continuation(
            self.tokenizer, messages[:known], messages[known:], end, self.variables or {}, tools
        )
        if self.history == "template":
            sampled, rendered = [*path, *ids], self.render(messages, tools)
            place = first_difference(sampled, rendered)
            if place is not None:
                found, written = (
                    repr(decode_prompt(self.tokenizer, one[place : place + 1]))
                    for one in (sampled, rendered)
                )
                raise ContinuationError(
                    f"the template writes {written} as token {place}, and {found} was there"
                )
        return ids


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What a session asks of a generator."""

    prompt_ids: list[int]
    n: int
    max_tokens: int
    turn: int
    """Turns before it on its path."""
    attempt: int
    """Answers that the same request has already. With `turn`, it makes seeds that differ."""
    min_version: int | None
    """The newest version that sampled a token before it. The answer's must not be older."""


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

    async def generate(self, request: TurnRequest) -> Sequence[Sampled]: ...


ReadMessage = Callable[[Completion, "Sequence[Schema] | None"], Message]
"""The assistant's message of a completion: text, reasoning and tool calls."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A turn, as the agent gets it."""

    message: Message
    sampled: Sampled
    node: int
    prompt_tokens: int
    """Tokens before it."""


class Session:
    """Serves the requests of one agent's attempt at one prompt."""

    def __init__(
        self, template: SessionTemplate, generator: TurnGenerator, read: ReadMessage
    ) -> None:
        self.tree = SessionTree()
        self._template, self._generator, self._read = template, generator, read
        self._closed: str | None = None
        self._answers: dict[str, asyncio.Future[list[Answer]]] = {}
        """Answers by the key of their request, to repeat them."""
        self._attempts: dict[int, int] = {}
        """Context → answers that were asked of it."""
        self._depths: dict[int, int] = {}
        """Turn → turns up to it on its path."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.tree.nodes

    def close(self, reason: str) -> None:
        """End the session. Later requests are refused with this reason."""
        self._closed = self._closed or reason

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema] | None = None,
        n: int = 1,
        max_tokens: int | None = None,
        key: str | None = None,
    ) -> list[Answer]:
        """Answer a chat with n turns.

        Args:
            max_tokens: most tokens of an answer; None: as many as fit.
            key: names a request that a client may send again. The second one gets the answers of
                the first, also while they are sampled. Without a key, it is another attempt.

        Raises:
            SessionClosedError: the session has ended.
            ContextTooLongError: the chat leaves no room for an answer.
            MessagesError: the template refuses the chat.
            Any error of the generator. A request with the same key then begins again.
        """
        if self._closed is not None:
            raise SessionClosedError(self._closed)
        if key is None:
            return await self._answer(messages, tools, n, max_tokens)
        if key not in self._answers:
            task = asyncio.ensure_future(self._answer(messages, tools, n, max_tokens))
            task.add_done_callback(lambda done: self._forget_failed(key, done))
            self._answers[key] = task
        # A client that leaves does not end what its retry will ask for.
        return await asyncio.shield(self._answers[key])

    def _forget_failed(self, key: str, done: asyncio.Future[list[Answer]]) -> None:
        if done.cancelled() or done.exception() is not None:
            del self._answers[key]

    def choose(self, answers: Sequence[Answer], chosen: int) -> None:
        """Note which of several answers the agent goes on with. The others become orphans."""
        for index, answer in enumerate(answers):
            if index != chosen:
                self.tree.set_status(answer.node, ORPHAN)

    async def _answer(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema] | None,
        n: int,
        max_tokens: int | None,
    ) -> list[Answer]:
        chat = chat_digests(messages, tools)
        place = self.tree.find(chat)
        context = self._context(place, messages, tools, chat[-1])
        prompt_ids = self.tree.path_ids(context)
        room = self._template.max_length - len(prompt_ids)
        if room < 1:
            raise ContextTooLongError(
                f"the request has {len(prompt_ids)} tokens, and {self._template.max_length} are"
                " allowed with its answer; shorten the messages"
            )
        attempt = self._attempts.get(context, 0)
        self._attempts[context] = attempt + n
        before = self.tree.nodes[context].parent
        depth = 0 if before is None else self._depths[before]
        sampled = await self._generator.generate(
            TurnRequest(
                prompt_ids,
                n,
                room if max_tokens is None else min(room, max_tokens),
                depth,
                attempt,
                self.tree.newest_version(before),
            )
        )
        return [self._add(context, depth, one, messages, tools, len(prompt_ids)) for one in sampled]

    def _context(
        self,
        place: Place,
        messages: Sequence[Message],
        tools: Sequence[Schema] | None,
        chat: bytes,
    ) -> int:
        """The node of the request's context. A new one continues a turn if the template allows
        it."""
        if place.node is not None and place.messages == len(messages):
            return place.node
        reason = "" if not self.tree.nodes else "no turn has the beginning of the chat"
        if place.node is not None:
            path = self.tree.path_ids(place.node)
            try:
                ids = self._template.continued(path, messages, place.messages, tools)
                return self.tree.add_context(Node(place.node, tuple(ids)), chat)
            except ContinuationError as error:
                reason = str(error)
        ids = self._template.render(messages, tools)
        return self.tree.add_context(Node(None, tuple(ids), branch_reason=reason), chat)

    def _add(
        self,
        context: int,
        depth: int,
        sampled: Sampled,
        messages: Sequence[Message],
        tools: Sequence[Schema] | None,
        prompt_tokens: int,
    ) -> Answer:
        completion = sampled.completion
        message = self._read(completion, tools)
        node = self.tree.add_turn(
            Node(
                context,
                completion.token_ids,
                sampled=True,
                logprobs=completion.logprobs,
                versions=completion.versions,
                status=sampled.status,
                finish_reason=completion.finish_reason,
                replica=sampled.replica,
                started_at=sampled.started_at,
                finished_at=sampled.finished_at,
            ),
            chat_digests([*messages, message], tools)[-1],
        )
        self._depths[node] = depth + 1
        return Answer(message, sampled, node, prompt_tokens)
