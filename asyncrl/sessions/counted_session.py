"""Counts the requests of a session, and keeps why it refused one. Imports nothing heavy."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from asyncrl.sessions.answers import (
    Answer,
    ChatRequest,
    ContextTooLongError,
    SessionClosedError,
    TurnsExceededError,
)
from asyncrl.text.chat_messages import MessagesError

if TYPE_CHECKING:
    from asyncrl.contracts.text_listener import Heard  # whose package imports pyarrow

Ask = Callable[[ChatRequest, "Heard | None"], Awaitable[list[Answer]]]
"""Answers a request, as `Session.chat` does."""


class CountedSession:
    """The requests of one session, which may take at most `most` turns."""

    def __init__(self, ask: Ask, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._ask, self._most, self._clock = ask, most, clock
        self.turns, self.model_s = 0, 0.0
        self.ended: BaseException | None = None
        """Why the model refused a request for good. An environment may catch the exception."""
        self.failed: Exception | None = None
        """The error of the model's side at the last request. An environment may catch it, too."""
        self.cut = False
        """Whether a limit of the run cut the last answer. Some clients then raise an error."""
        self._failed_after = 0
        """Requests that were made when that error came. Only a later one shows that it is over."""
        self._requests = 0
        self._keys: set[str] = set()
        """Keys of the requests so far."""
        self._answered: dict[int, tuple[int, ...]] = {}
        """Number of each request with an answer → the nodes of its choices."""

    @property
    def taken(self) -> list[tuple[int, ...]]:
        """The nodes of each turn that the agent got, in the order of its requests. An answer that
        it got twice, because it asked again, is one turn."""
        return list(dict.fromkeys(nodes for _, nodes in sorted(self._answered.items())))

    async def chat(self, request: ChatRequest, heard: Heard | None = None) -> list[Answer]:
        """Answer a request.

        Raises:
            TurnsExceededError: the session has taken its turns.
            Any error of `ask`.
        """
        began = self._clock()
        try:
            again = request.key is not None and request.key in self._keys
            if self.turns >= self._most and not again:
                raise TurnsExceededError(f"the session has taken its {self._most} turns")
            self.turns += not again  # a retry is no further turn
            if request.key is not None:
                self._keys.add(request.key)
            self._requests += 1
            began_as = self._requests
            # A copy: games may use one dict for all their messages.
            chat = [dict(message) for message in request.messages]
            answers = await self._ask(replace(request, messages=chat), heard)
            self._answered[began_as] = tuple(answer.node for answer in answers)
            self.cut = any(answer.cut_by_run(request) for answer in answers)
            if began_as > self._failed_after:
                self.failed = None
            if isinstance(self.ended, ContextTooLongError):
                self.ended = None  # it has made its chat shorter
            return answers
        except (TurnsExceededError, ContextTooLongError, SessionClosedError) as error:
            self.ended = error
            raise
        except MessagesError:  # what the environment asked
            self.turns -= not again
            raise
        except Exception as error:
            self.failed, self._failed_after = error, self._requests
            raise
        finally:
            self.model_s += self._clock() - began
