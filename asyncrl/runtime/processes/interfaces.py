"""The network interfaces on which the processes of several nodes meet."""

from __future__ import annotations

import psutil


def interface_of(address: str) -> str | None:
    """Name of this machine's network interface that has the address; None if none has."""
    return next(
        (
            name
            for name, known in psutil.net_if_addrs().items()
            if any(entry.address.partition("%")[0] == address for entry in known)
        ),
        None,
    )


def interface_variables(interface: str) -> dict[str, str]:
    """Environment variables that keep gloo and NCCL on one interface."""
    # "=" asks NCCL for this name, and not for all names that begin with it.
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
