"""Ports that a test may hand to a server that it starts itself."""

import os
import random
import socket

_PORTS = iter(random.Random(os.getpid()).sample(range(20_000, 32_000), 12_000))


def free_port() -> int:
    """A free port on loopback, other than those that this process got before.

    The kernel gives `bind(0)` and outgoing connections ports of 32768 or more. Another process may
    thus take such a port before the server binds it. Ray's workers use 10002 to 19999.
    """
    for port in _PORTS:
        with socket.socket() as held:
            try:
                held.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("all ports between 20000 and 32000 were used")
