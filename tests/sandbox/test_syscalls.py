"""The filter for both machines, run by a small interpreter of its instructions, and its numbers."""

import re
import struct
from pathlib import Path

import pytest

from asyncrl.sandbox.syscalls import (
    ALLOWED,
    ATTRIBUTES,
    CHECKED,
    MACHINES,
    MODES,
    TIMES,
    UnknownMachineError,
    numbers,
    seccomp_filter,
)

ALLOW, KILL, EPERM, ENOTTY, ENOSYS, EOPNOTSUPP = (
    0x7FFF0000,
    0x80000000,
    0x50001,
    0x50019,
    0x50026,
    0x5005F,
)
HEADERS = {
    "x86_64": (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), r"#define __NR_(\w+) (\d+)"),
    "aarch64": (Path("/usr/include/asm-generic/unistd.h"), r"#define __NR(?:3264)?_(\w+) (\d+)"),
}
OTHER = {"x86_64": "aarch64", "aarch64": "x86_64"}
DENIED = {  # name: (x86-64, arm64)
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "sendmsg": (46, 211),
    "ptrace": (101, 117),
    "mount": (165, 40),
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "process_vm_writev": (311, 271),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
    "setuid": (105, 146),
    "seccomp": (317, 277),
    "shmget": (29, 194),
    "pidfd_getfd": (438, 438),
    "mount_setattr": (442, 442),
}


def judge(program, machine, number, arguments=(), arch=None):
    """What the kernel would return: the filter on one struct seccomp_data."""
    words = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("=iIQ6Q", number, MACHINES[machine][1] if arch is None else arch, 0, *words)
    at = accumulator = 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        if code == 0x20:
            accumulator = struct.unpack_from("=I", data, value)[0]
        elif code == 0x54:
            accumulator &= value
        elif code == 0x06:
            return value
        else:
            holds = {
                0x15: accumulator == value,
                0x25: accumulator > value,
                0x35: accumulator >= value,
            }[code]
            at += if_true if holds else if_false


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("modes", "times"), [(True, True), (True, False), (False, False)])
def test_allows_its_table_and_nothing_else(machine, modes, times):
    program = seccomp_filter(modes, times, machine)
    known = set(
        numbers(ALLOWED | (MODES if modes else {}) | (TIMES if times else {}), machine).values()
    )
    absent = set(numbers(ATTRIBUTES, machine).values())
    checked = set(numbers(CHECKED, machine).values())
    for number in set(range(600)) - checked:
        denied = (
            EOPNOTSUPP if number in absent else ENOSYS if number == 435 or number > 462 else EPERM
        )
        expected = ALLOW if number in known else denied
        assert judge(program, machine, number) == expected, number
    assert judge(program, machine, 1 << 30) == ENOSYS  # the x32 calls of x86-64
    column = list(MACHINES).index(machine)
    assert {
        name for name, row in DENIED.items() if judge(program, machine, row[column]) != EPERM
    } == set()
    for number in (0, 1, 59, 221):
        assert judge(program, machine, number, arch=MACHINES[OTHER[machine]][1]) == KILL
        assert judge(program, machine, number, arch=0x40000003) == KILL  # 32-bit x86


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("clone", (0x01200011,), ALLOW),
        ("clone", (0x3D0F00,), ALLOW),
        *(("clone", (1 << bit | 17,), EPERM) for bit in (7, 17, 25, 26, 27, 28, 29, 30)),
        ("socketpair", (1, 1), ALLOW),
        ("socketpair", (1, 1 | 0x80800), ALLOW),
        ("socketpair", (1, 2), EPERM),
        ("socketpair", (2, 1), EPERM),
        ("sendto", (3, 0, 0, 0, 0), ALLOW),
        ("sendto", (3, 0, 0, 0, 0x1000), EPERM),
        ("sendto", (3, 0, 0, 0, 1 << 32), EPERM),
        ("mmap", (0, 1, 3, 0x22), ALLOW),
        ("mmap", (0, 1, 3, 0x01), ALLOW),
        ("mmap", (0, 1, 3, 0x21), EPERM),
        ("mmap", (0, 1, 3, 0x23), EPERM),
        ("mmap", (0, 1, 3, 0x8021), EPERM),
        ("mmap", (0, 1, 3, 1 << 32 | 0x21), EPERM),
        ("prlimit64", (0, 7), ALLOW),
        ("prlimit64", (1, 7), EPERM),
        ("ioctl", (0, 0x5401), ALLOW),
        ("ioctl", (0, 0x802C542A), ALLOW),
        ("ioctl", (0, 0x5412), ENOTTY),
        ("ioctl", (0, 0xAE01), ENOTTY),
        ("prctl", (15,), ALLOW),
        ("prctl", (0x53564D41,), ALLOW),
        ("prctl", (1,), EPERM),
        ("prctl", (4,), EPERM),
        ("prctl", (22,), EPERM),
    ],
)
def test_looks_at_arguments(machine, name, arguments, expected):
    assert (
        judge(
            seccomp_filter(False, False, machine),
            machine,
            numbers(CHECKED, machine)[name],
            arguments,
        )
        == expected
    )


@pytest.mark.parametrize(
    "machine", [machine for machine, (path, _) in HEADERS.items() if path.exists()]
)
def test_numbers_are_those_of_the_headers(machine):
    path, pattern = HEADERS[machine]
    header = {name: int(number) for name, number in re.findall(pattern, path.read_text())}
    renamed = {"newfstatat": "fstatat"} if machine == "aarch64" else {}
    ours = numbers(ALLOWED | ATTRIBUTES | CHECKED | MODES | TIMES, machine)
    assert len(ours) > 150
    new = {"fchmodat2"}  # newer than many headers
    assert {
        name: number
        for name, number in ours.items()
        if name not in new and header.get(renamed.get(name, name)) != number
    } == {}


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(UnknownMachineError, match="riscv64"):
        seccomp_filter(True, True, "riscv64")
