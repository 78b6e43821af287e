"""How the nodes of one engine meet, in vLLM's words. An engine on one node needs none of this."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

import ray

from asyncrl.runtime.processes.interfaces import interface_of, interface_variables

BACKLOG = 128
"""Connections that wait to be accepted at a meeting."""


@dataclass(frozen=True, slots=True)
class NodeRank:
    """The rank of one node of an engine, and where its workers meet those of the others."""

    node_rank: int
    """0 is the node of the replica, which schedules."""
    master_addr: str
    master_port: int


class Meeting:
    """The store at which an engine's workers find one another. Keep it as long as the engine.

    vLLM would let its first worker open the store, on every address of the node. This one listens
    on one address, and its port cannot be taken before the workers start.
    """

    def __init__(self, address: str) -> None:
        """
        Args:
            address: of this node, and reachable from the others.
        """
        import torch.distributed

        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=BACKLOG)
        self.address, self.port = address, int(listener.getsockname()[1])
        tcp_store: Any = torch.distributed.TCPStore  # type: ignore[attr-defined]  # not in __all__
        self._store = tcp_store(
            address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            use_libuv=True,
        )

    def node(self, node_rank: int) -> NodeRank:
        """The rank of one node, with the address of this meeting."""
        return NodeRank(node_rank, self.address, self.port)


def use_own_address() -> str:
    """Let the processes that this one starts listen on Ray's address of this node only, and meet at
    a `Meeting`. Returns the address.

    Raises:
        ValueError: no network interface has the address.
    """
    address = str(ray.util.get_node_ip_address())
    interface = interface_of(address)
    if interface is None:
        raise ValueError(
            f"no network interface has this node's address {address}; start Ray with"
            " --node-ip-address set to an address of this machine"
        )
    os.environ.update(interface_variables(interface) | {"VLLM_HOST_IP": address})
    # torch's name for a store that a process outside the group has opened already.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(True)
    return address
