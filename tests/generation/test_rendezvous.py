"""Where the nodes of one engine meet."""

from __future__ import annotations

import os

import psutil
import pytest
import ray
from torch.distributed.rendezvous import rendezvous

from asyncrl.generation.rendezvous import Meeting, use_own_address


def test_processes_listen_on_the_nodes_address_and_meet_at_the_open_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interfaces = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in ("VLLM_HOST_IP", *interfaces, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "another")
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    assert use_own_address() == "127.0.0.1" == os.environ["VLLM_HOST_IP"]
    assert [os.environ[name] for name in interfaces] == ["lo", "=lo"]

    meeting = Meeting("127.0.0.1")
    node = meeting.node(1)
    assert (node.node_rank, node.master_addr) == (1, "127.0.0.1")
    listening = {
        connection.laddr
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == node.master_port
    }
    assert listening == {("127.0.0.1", node.master_port)}, "on no other address"
    url = f"tcp://127.0.0.1:{node.master_port}"
    # Without `use_own_address`, rank 0 would try to open the store itself.
    first, second = (next(rendezvous(url, rank, 2))[0] for rank in (0, 1))
    first.set("key", "value")
    assert second.get("key") == b"value"


def test_an_address_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "192.0.2.1")
    with pytest.raises(ValueError, match=r"this node's address 192\.0\.2\.1; start Ray with"):
        use_own_address()
