"""The tree of a session while it runs. It finds the turn that a request continues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from asyncrl.contracts.nodes import CONSTRAINED, ORPHAN, Node


@dataclass(frozen=True, slots=True)
class Continued:
    """What a request continues in the tree."""

    node: int | None
    """The node that the request continues. None if the request begins the session."""
    messages: int
    """How many messages of the request the node's path has. If it has all, the node is the context
    of exactly this request, which asks for one more turn."""


class SessionTree:
    """The nodes of one session in the order in which they came, with the chats that led to them.
    The nodes of a request are its context and one turn for each completion.

    A chat is given by the digests of its beginnings (`chat_digests`). Finding the node takes time
    proportional to the messages of the request, however large the tree is.
    """

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._contexts: dict[bytes, int] = {}
        self._turns: dict[bytes, list[int]] = {}
        self._thoughts: dict[int, str] = {}
        """Turn → the reasoning of its answer."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._nodes)

    def path_ids(self, node: int | None) -> list[int]:
        """The token ids from the first node to this one."""
        path = list(self._path_back(node))
        return [token for one in reversed(path) for token in one.token_ids]

    def beside(self, context: int) -> int | None:
        """The turn beside which another one after this context is a branch: the last one after the
        same context, or after the same turn. If the context follows no turn, it is the last one of
        the session. None: another turn after the context is no branch."""
        parent = self._known(context).parent
        if parent is not None and parent == context - 1 == len(self._nodes) - 2:
            return None  # the last turn goes on, as most do
        turns = [index for index, node in enumerate(self._nodes) if node.sampled]
        same = [turn for turn in turns if self._nodes[turn].parent == context]
        others = [turn for turn in turns if parent in (None, self._turn_before(turn))]
        return next(reversed(same or others), None)

    def _turn_before(self, turn: int) -> int | None:
        context = self._nodes[turn].parent
        return None if context is None else self._nodes[context].parent

    def turns_to(self, node: int | None) -> int:
        """The number of turns from the first node to this one."""
        return sum(one.sampled for one in self._path_back(node))

    def newest_version(self, node: int | None) -> int | None:
        """The newest version that sampled a token from the first node to this one. None: no
        token was sampled."""
        spans = (span for one in self._path_back(node) for span in one.versions)
        return max((span.version for span in spans), default=None)

    def _path_back(self, node: int | None) -> Iterator[Node]:
        """This node, its parent, and so on."""
        while node is not None:
            yield self._nodes[node]
            node = self._nodes[node].parent

    def find(
        self,
        chat: Sequence[bytes],
        exact: bytes | None = None,
        thoughts: Sequence[str] | None = None,
    ) -> Continued:
        """Where a request with this chat belongs: at the context of the same chat, else at the
        deepest turn whose chat it begins with. Of several equal answers, those with the same
        reasoning count before others, then those that are no orphans, then the last one.

        Args:
            thoughts: the reasoning of each message.
            exact: digest of the whole chat with everything that it renders, by which contexts are
                known. None: chat[-1].
        """
        if not chat:
            raise ValueError("a request needs at least one message")
        if (node := self._contexts.get(exact or chat[-1])) is not None:
            return Continued(node, len(chat))
        for count in range(len(chat) - 1, 0, -1):
            if turns := self._turns.get(chat[count - 1]):
                thought = thoughts[count - 1] if thoughts else ""
                same = [turn for turn in turns if self._thoughts[turn] == thought]
                among = same if thought and same else turns
                known = [turn for turn in among if self._nodes[turn].status != ORPHAN]
                return Continued((known or among)[-1], count)
        return Continued(None, 0)

    def add_context(self, node: Node, chat: bytes) -> int:
        """Add the context of a request, and return its index.

        Args:
            chat: digest of the request's whole chat, as `find` gets it.

        Raises:
            ValueError: the node was sampled, or its parent is not in the tree.
        """
        if node.sampled:
            raise ValueError("a turn was given as a context")
        if node.parent is not None and not self._known(node.parent).sampled:
            raise ValueError("the parent of a context is a turn")
        index = self._add(node)
        if node.parent is not None and self._nodes[node.parent].status == ORPHAN:
            self.set_status(node.parent, "ok")  # its agent got it after all
        self._contexts[chat] = index
        return index

    def add_turn(self, node: Node, chat: bytes, thought: str = "") -> int:
        """Add a turn, and return its index.

        Args:
            thought: the reasoning of its answer.
            chat: digest of the request's chat with the answer.

        Raises:
            ValueError: the node was not sampled, or its parent is not a context of the tree.
        """
        if not node.sampled:
            raise ValueError("a context was given as a turn")
        if node.parent is None or self._known(node.parent).sampled:
            raise ValueError("the parent of a turn is the context of its request")
        index = self._add(node)
        self._turns.setdefault(chat, []).append(index)
        self._thoughts[index] = thought
        return index

    def set_status(self, index: int, status: str) -> None:
        """Give a turn another status, such as `orphan`. A turn that a grammar restricted keeps its
        own: its tokens are not the policy's, whoever got them."""
        if self._known(index).status == CONSTRAINED:
            return
        self._nodes[index] = replace(self._known(index), status=status)

    def _known(self, index: int) -> Node:
        if not 0 <= index < len(self._nodes):
            raise ValueError(f"node {index} is not one of {len(self._nodes)}")
        return self._nodes[index]

    def _add(self, node: Node) -> int:
        self._nodes.append(node)
        return len(self._nodes) - 1
