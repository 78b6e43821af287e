"""A Ray cluster of several nodes on this machine. A test starts each node, with one CPU. A node may
have a disk or a network of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
from cable import Cable
from free_ports import free_port

BIN = Path(sys.executable).parent
START_S, END_S = 240, 10
LOOPBACK = "127.0.0.1"
UNSHARED = "unshared"


class Nodes:
    """The nodes of one cluster. All but the first one join it."""

    def __init__(self, logs: Path, cable: bool = False) -> None:
        """
        Args:
            cable: the second node has a network namespace, and a virtual cable leads to the first
                one. Neither sees the other's loopback interface, as on two machines.
        """
        # Ray's sockets need a short path.
        self.logs, self.temporary = logs, Path(f"/tmp/asyncrl-n{os.getpid()}")
        self.cable = Cable() if cable else None
        first = self.cable.addresses[0] if self.cable else LOOPBACK
        self.port = free_port()
        self.address = f"{first}:{self.port}"
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RAY_", "ASYNCRL_"))
        } | {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            # On a busy machine, a node's agent may need more than Ray's 30 s.
            "RAY_raylet_start_wait_time_s": str(START_S),
            "RAY_agent_register_timeout_ms": str(1000 * START_S),
        }
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, private: Path | None = None) -> None:
        """Start one more node, and wait until it runs. Only this node sees what it writes to the
        folder `private`."""
        number = len(self.started)
        place = [f"--address={self.address}"]
        if number == 0:
            place = ["--head", f"--port={self.port}", "--include-dashboard=false"]
            place.append(f"--temp-dir={self.temporary}")
        address = self.cable.addresses[number] if self.cable else LOOPBACK
        start = "exec ray start --block --num-cpus=1 --disable-usage-stats"
        start = " ".join([start, f"--node-ip-address={address}", *place])
        if private is not None:
            start = f"mount -t tmpfs none {private} && {start}"
        cabled = self.cable is not None and number == 1
        if cabled:
            start = f"echo {UNSHARED} && read cabled && {start}"
        namespaces = [*(["-m"] if private else []), *(["-n"] if cabled else [])]
        log = self.logs / f"node_{number}.log"
        node = subprocess.Popen(
            [*(["unshare", *namespaces] if namespaces else []), "sh", "-c", start],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
        )
        self.started.append(node)
        if cabled:
            self._until_says(node, log, UNSHARED)
            self.cable.plug_in(node.pid)
            node.stdin.write(b"\n")
            node.stdin.flush()
        self._until_says(node, log, "--block")

    def _until_says(self, node: subprocess.Popen[bytes], log: Path, word: str) -> None:
        deadline = time.monotonic() + START_S
        while word not in log.read_text():
            assert node.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)

    def processes(self, number: int) -> list[psutil.Process]:
        """The living processes of a node."""
        return _tree(self.started[number].pid)

    def lose(self, number: int) -> list[psutil.Process]:
        """Kill all processes of a node at once, and return them."""
        lost = self.processes(number)
        for process in lost:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return lost

    def end(self) -> None:
        """End all nodes."""
        processes = [process for root in self.started for process in _tree(root.pid)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        for process in psutil.wait_procs(processes, END_S)[1]:
            process.kill()
        for root in self.started:
            root.wait()
        if self.cable is not None:
            self.cable.remove()
        shutil.rmtree(self.temporary, ignore_errors=True)


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return []
