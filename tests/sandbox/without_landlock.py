"""`python without_landlock.py COMMAND…`: run the command where the kernel answers Landlock's calls
with ENOSYS."""

import os
import struct
import sys

from asyncrl.sandbox import kernel

RETURN_ENOSYS, ALLOW = 0x50026, 0x7FFF0000
FILTER = [
    (0x20, 0, 0, 0),  # the call's number
    (0x35, 0, 2, 444),
    (0x25, 1, 0, 446),
    (0x06, 0, 0, RETURN_ENOSYS),
    (0x06, 0, 0, ALLOW),
]

if __name__ == "__main__":
    kernel.install_filter(b"".join(struct.pack("=HBBI", *instruction) for instruction in FILTER))
    os.execvp(sys.argv[1], sys.argv[1:])
