"""The tree of a session while it runs. It finds the turn that a request continues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from asyncrl.contracts.nodes import Node

__all__ = ["Place", "SessionTree"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request belongs in the tree."""

    node: int | None
    """The node that it continues. None: it continues none."""
    messages: int
    """How many of its messages the node's path has. All of them: the node is the context of exactly
    this request, which asks for one more turn."""


class SessionTree:
    """The nodes of one session in the order in which they came, with the chats that led to them.
    The nodes of a request are its context and one turn for each completion.

    A chat is given by the digests of its beginnings (`chat_digests`). Finding a place takes time
    proportional to the messages of the request, however large the tree is.
    """

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._contexts: dict[bytes, int] = {}
        self._turns: dict[bytes, int] = {}

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._nodes)

    def path_ids(self, node: int | None) -> list[int]:
        """The token ids from the first node to this one."""
        parts: list[tuple[int, ...]] = []
        while node is not None:
            parts.append(self._nodes[node].token_ids)
            node = self._nodes[node].parent
        return [token for part in reversed(parts) for token in part]

    def newest_version(self, node: int | None) -> int | None:
        """The newest version that sampled a token from the first node to this one. None: no
        token was sampled."""
        newest: int | None = None
        while node is not None:
            for span in self._nodes[node].versions:
                newest = span.version if newest is None else max(newest, span.version)
            node = self._nodes[node].parent
        return newest

    def find(self, chat: Sequence[bytes]) -> Place:
        """Where a request with this chat belongs: at the context of the same chat, else at the
        deepest turn whose chat it begins with. Of several equal answers, the last one counts."""
        if not chat:
            raise ValueError("a request needs at least one message")
        if (node := self._contexts.get(chat[-1])) is not None:
            return Place(node, len(chat))
        for count in range(len(chat) - 1, 0, -1):
            if (node := self._turns.get(chat[count - 1])) is not None:
                return Place(node, count)
        return Place(None, 0)

    def add_context(self, node: Node, chat: bytes) -> int:
        """Add the context of a request, and return its index.

        Args:
            chat: digest of the request's whole chat.

        Raises:
            ValueError: the node was sampled, or its parent is not in the tree.
        """
        if node.sampled:
            raise ValueError("a turn was given as a context")
        index = self._add(node)
        self._contexts[chat] = index
        return index

    def add_turn(self, node: Node, chat: bytes) -> int:
        """Add a turn, and return its index.

        Args:
            chat: digest of the request's chat with the answer.

        Raises:
            ValueError: the node was not sampled, or its parent is not a context of the tree.
        """
        if not node.sampled:
            raise ValueError("a context was given as a turn")
        if node.parent is None or self._nodes[node.parent].sampled:
            raise ValueError("the parent of a turn is the context of its request")
        index = self._add(node)
        self._turns[chat] = index
        return index

    def set_status(self, index: int, status: str) -> None:
        """Give a turn another status, such as `orphan`."""
        self._nodes[index] = replace(self._nodes[index], status=status)

    def _add(self, node: Node) -> int:
        if node.parent is not None and not 0 <= node.parent < len(self._nodes):
            raise ValueError(f"parent {node.parent} is not one of {len(self._nodes)} nodes")
        self._nodes.append(node)
        return len(self._nodes) - 1
