"""`python without_namespaces.py COMMAND…`: run it where no more user namespaces can be made."""

import ctypes
import os
import sys

if __name__ == "__main__":
    entered, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        assert ctypes.CDLL(None, use_errno=True).unshare(0x10000000) == 0
        os.write(entered[1], b"x")
        os.read(go[0], 1)
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")
        os.execvp(sys.argv[1], sys.argv[1:])
    os.read(entered[0], 1)
    everybody = os.geteuid() == 0
    if not everybody:
        with open(f"/proc/{child}/setgroups", "w") as file:
            file.write("deny")
    for name, own in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
        with open(f"/proc/{child}/{name}", "w") as file:
            file.write("0 0 4294967295" if everybody else f"{own} {own} 1")
    os.write(go[1], b"x")
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
