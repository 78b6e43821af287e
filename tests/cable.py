"""A virtual cable to a network namespace, which stands for another machine."""

from __future__ import annotations

import os
import shutil
import subprocess

HELD_S = 3600
"""Longest life of a namespace whose test was killed."""


def may_unshare(*namespaces: str) -> bool:
    """Whether a process may have these namespaces of its own: `-m` (mounts), `-n` (network)."""
    return not subprocess.run(["unshare", *namespaces, "true"], capture_output=True).returncode


def may_cable() -> bool:
    """Whether this machine allows a virtual cable to a network namespace."""
    name = f"try{os.getpid()}"
    add = ["ip", "link", "add", name, "type", "veth"]
    made = shutil.which("ip") and not subprocess.run(add, capture_output=True).returncode
    if made:
        subprocess.run(["ip", "link", "delete", name], check=True)
    return bool(made) and may_unshare("-n")


class Cable:
    """A virtual cable between this network namespace and another."""

    def __init__(self) -> None:
        # 198.18.0.0/15 is reserved for tests of networks.
        subnet = f"198.18.{os.getpid() % 251}"
        self.addresses = (f"{subnet}.1", f"{subnet}.2")
        self.ends = (f"near{os.getpid()}", f"far{os.getpid()}")
        _ip("link", "add", self.ends[0], "type", "veth", "peer", self.ends[1])
        _ip("address", "add", f"{self.addresses[0]}/24", "dev", self.ends[0])
        _ip("link", "set", self.ends[0], "up")
        self.holder: subprocess.Popen[bytes] | None = None
        self.inside: tuple[str, ...] = ()
        """Beginning of a command in the other namespace."""

    def plug_in(self, process: int) -> None:
        """Connect the network namespace of a process."""
        # A namespace ends with its last process, and takes both ends of the cable along.
        hold = ["nsenter", "-t", str(process), "-n", "sleep", str(HELD_S)]
        self.holder = subprocess.Popen(hold, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _ip("link", "set", self.ends[1], "netns", str(process))
        self.inside = inside = ("nsenter", "-t", str(process), "-n")
        _ip("link", "set", "lo", "up", inside=inside)
        _ip("address", "add", f"{self.addresses[1]}/24", "dev", self.ends[1], inside=inside)
        _ip("link", "set", self.ends[1], "up", inside=inside)

    def cut(self) -> None:
        """Nothing arrives any more, and no connection is closed. The near end stays up, because
        processes here also reach one another by its address."""
        _ip("link", "set", self.ends[1], "down", inside=self.inside)

    def remove(self) -> None:
        """Remove both ends, and let the namespace end."""
        if self.holder is not None:
            self.holder.kill()
            self.holder.wait()
        # The ends may have vanished with the namespace.
        subprocess.run(["ip", "link", "delete", self.ends[0]], capture_output=True)


def _ip(*words: str, inside: tuple[str, ...] = ()) -> None:
    subprocess.run([*inside, "ip", *words], check=True)
