"""What an agent asks of a session, and what the session answers. Imports nothing heavy: environment
processes need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from asyncrl.text.chat_messages import Message, Schema
from asyncrl.web.answers import end_reason


class SessionClosedError(RuntimeError):
    """A request came after the end of its session. The message says why it ended."""


class TurnDeadlineError(SessionClosedError):
    """A turn took longer than it may."""


class ContextTooLongError(ValueError):
    """A request leaves no room for a token of its answer."""


class TurnsExceededError(RuntimeError):
    """A request came after the last turn that its session may take."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request of an agent, in whatever API it came."""

    messages: Sequence[Message] = ()
    """The chat so far. Empty with `prompt`."""
    tools: Sequence[Schema] | None = None
    """Functions that the model may call, in the form of OpenAI's chat completions."""
    n: int = 1
    """Answers, each a turn."""
    max_tokens: int | None = None
    """Most tokens of an answer. None: as many as fit."""
    key: str | None = None
    """Names a request that a client may send again. The second one gets the answers of the first,
    also while they are sampled. Without a key, it is another request."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, in addition to the run's. The message ends before the string."""
    logprobs: bool = False
    """Whether `Answer.tokens` is wanted."""
    schema: Mapping[str, Any] | None = None
    """JSON schema that the answer's text follows. A grammar then forces tokens, so the turn is not
    trained."""
    calls: bool = True
    """Whether tool calls are read from the answer. If not, they stay in its text."""
    prompt: str | None = None
    """A text to continue, as of OpenAI's completions, instead of messages."""
    overridden: int = 0
    """Arguments without effect that the session's requests in process have had up to this one."""


class Token(NamedTuple):
    """A token of an answer."""

    id: int
    text: str
    """With U+FFFD if the token is a part of a character."""
    logprob: float | None
    """In nats. None for the first token of a prompt, which has no prediction."""
    top: tuple[Token, ...] = ()
    """The most probable tokens at its position, best first, if a server gives them."""

    @property
    def name(self) -> str:
        """Its text, or its id if the text is empty or a part of a character."""
        is_whole = self.text and "\ufffd" not in self.text
        return self.text if is_whole else f"token_id:{self.id}"


@dataclass(frozen=True, slots=True)
class Answer:
    """A turn, as the agent gets it."""

    message: Message
    finish_reason: str
    completion_tokens: int
    prompt_tokens: int
    """Tokens before it."""
    node: int = 0
    """Its index among the session's nodes. 0 without a session."""
    tokens: tuple[Token, ...] = ()
    """Its tokens, if wanted."""
    stop: str | None = None
    """The string of its request's `stop` that ended it."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further fields that its server shows."""

    @property
    def text(self) -> str:
        """The content of its message."""
        return str(self.message.get("content") or "")

    @property
    def reasoning(self) -> str:
        """The reasoning of its message."""
        return str(self.message.get("reasoning") or "")

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Its tool calls, in the form of chat completions."""
        calls = self.message.get("tool_calls")
        return list(calls) if isinstance(calls, list) else []

    @property
    def chat_reason(self) -> str:
        """Why it ended, in OpenAI's words: `tool_calls`, `stop` or `length`."""
        reason = end_reason(self.finish_reason)
        return "tool_calls" if reason == "stop" and self.calls else reason

    def cut_by_run(self, request: ChatRequest) -> bool:
        """Whether a limit of the run ended it, and not `max_tokens` of its request."""
        asked = request.max_tokens
        return self.finish_reason != "stop" and (asked is None or self.completion_tokens < asked)
