"""The system calls that sandboxed code may make, as a seccomp filter for x86-64 and arm64.

The filter lists what is allowed. Everything else fails, so calls that later kernels add are denied
until they are listed here. Pure: this module only computes the filter.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterable, Sequence


def _parse(text: str) -> dict[str, tuple[int | None, int | None]]:
    rows = (row.split() for row in text.replace("\n", " ").split(","))
    return {name: (_number(x86_64), _number(aarch64)) for name, x86_64, aarch64 in rows}


def _number(text: str) -> int | None:
    return None if text == "-" else int(text)


# Each entry: name, number on x86-64, number on arm64 ("-": the machine has no such call).
ALLOWED = _parse("""
access 21 -, alarm 37 -, arch_prctl 158 -, brk 12 214, capget 125 90, chdir 80 49,
clock_getres 229 114, clock_gettime 228 113, clock_nanosleep 230 115, close 3 57,
close_range 436 436, copy_file_range 326 285, creat 85 -, dup 32 23, dup2 33 -, dup3 292 24,
epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_pwait 281 22,
epoll_pwait2 441 441, epoll_wait 232 -, eventfd 284 -, eventfd2 290 19, execve 59 221,
execveat 322 281, exit 60 93, exit_group 231 94, faccessat 269 48, faccessat2 439 439,
fadvise64 221 223, fallocate 285 47, fchdir 81 50, fcntl 72 25, fdatasync 75 83, flock 73 32,
fork 57 -, fstat 5 80, fstatfs 138 44, fsync 74 82, ftruncate 77 46, futex 202 98,
futex_waitv 449 449, getcpu 309 168, getcwd 79 17, getdents 78 -, getdents64 217 61,
getegid 108 177, geteuid 107 175, getgid 104 176, getgroups 115 158, getitimer 36 102,
getpeername 52 205, getpgid 121 155, getpgrp 111 -, getpid 39 172, getppid 110 173,
getpriority 140 141, getrandom 318 278, getresgid 120 150, getresuid 118 148, getrlimit 97 163,
getrusage 98 165, getsid 124 156, getsockname 51 204, getsockopt 55 209, gettid 186 178,
gettimeofday 96 169, getuid 102 174, kill 62 129, link 86 -, linkat 265 37, lseek 8 62,
lstat 6 -, madvise 28 233, membarrier 324 283, mkdir 83 -, mkdirat 258 34, mknod 133 -,
mknodat 259 33, mprotect 10 226, mremap 25 216, msync 26 227, munmap 11 215,
nanosleep 35 101, newfstatat 262 79, open 2 -, openat 257 56, openat2 437 437, pause 34 -,
pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73, pread64 17 67, preadv 295 69, preadv2 327 286,
pselect6 270 72, pwrite64 18 68, pwritev 296 70, pwritev2 328 287, read 0 63, readahead 187 213,
readlink 89 -, readlinkat 267 78, readv 19 65, recvfrom 45 207, recvmsg 47 212, rename 82 -,
renameat 264 38, renameat2 316 276, restart_syscall 219 128, rmdir 84 -, rseq 334 293,
rt_sigaction 13 134, rt_sigpending 127 136, rt_sigprocmask 14 135, rt_sigreturn 15 139,
rt_sigsuspend 130 133, rt_sigtimedwait 128 137, rt_tgsigqueueinfo 297 240,
sched_get_priority_max 146 125, sched_get_priority_min 147 126, sched_getaffinity 204 123,
sched_getparam 143 121, sched_getscheduler 145 120, sched_rr_get_interval 148 127,
sched_yield 24 124, select 23 -, sendfile 40 71, set_robust_list 273 99, set_tid_address 218 96,
setitimer 38 103, setpgid 109 154, setrlimit 160 164, setsid 112 157, shutdown 48 210,
sigaltstack 131 132, signalfd4 289 74, stat 4 -, statfs 137 43, statx 332 291, symlink 88 -,
symlinkat 266 36, sync_file_range 277 84, sysinfo 99 179, tgkill 234 131, time 201 -,
timer_create 222 107, timer_delete 226 111, timer_getoverrun 225 109, timer_gettime 224 108,
timer_settime 223 110, timerfd_create 283 85, timerfd_gettime 287 87, timerfd_settime 286 86,
times 100 153, tkill 200 130, truncate 76 45, umask 95 166, uname 63 160, unlink 87 -,
unlinkat 263 35, vfork 58 -, wait4 61 260, waitid 247 95, write 1 64, writev 20 66
""")
"""Allowed with any arguments."""

CHECKED = _parse("""
clone 56 220, ioctl 16 29, mmap 9 222, prctl 157 167, prlimit64 302 261, sendto 44 206,
socketpair 53 199
""")
"""Allowed with some arguments only: `_checks` has the rules."""

MODES = _parse("""
chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452
""")
"""Change a file's mode. Landlock does not control them. So they are allowed only if every reachable
file that the user owns is in the sandbox."""

TIMES = _parse("""
futimesat 261 -, utime 132 -, utimensat 280 88, utimes 235 -
""")
"""Change a file's times, for which write permission is enough. So they are allowed only if no file
outside is reachable."""

ATTRIBUTES = _parse("""
fgetxattr 193 10, flistxattr 196 13, getxattr 191 8, lgetxattr 192 9, listxattr 194 11,
llistxattr 195 12
""")
"""Read extended attributes. The filter answers that the file system does not support them."""

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine → its column in the tables, and its AUDIT_ARCH number."""

CLONE_NAMESPACES = 0x7E020080
"""All CLONE_NEW* flags, time namespaces included."""
AF_UNIX, SOCK_STREAM, SOCK_TYPES = 1, 1, 0xF
MAP_KIND_OR_ANONYMOUS, SHARED_ANONYMOUS = 0x2F, (0x21, 0x23)
"""mmap flags: the mask to compare, and MAP_SHARED or MAP_SHARED_VALIDATE with MAP_ANONYMOUS."""
TERMINAL_QUESTIONS = (0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)
"""ioctl: TCGETS, TIOCGPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, TCGETS2."""
PRCTL_OPTIONS = (3, 15, 16, 21, 23, 39, 0x53564D41)
"""prctl: GET_DUMPABLE, SET_NAME, GET_NAME, GET_SECCOMP, CAPBSET_READ, GET_NO_NEW_PRIVS, SET_VMA.
No SET_PDEATHSIG: a program must die with its supervisor. No SET_DUMPABLE: the supervisor must be
able to inspect it."""

# Classic BPF over struct seccomp_data: int nr; u32 arch; u64 instruction_pointer; u64 args[6].
LOAD, AND, JUMP_EQUAL, JUMP_GREATER, JUMP_AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x25, 0x35, 0x06
NUMBER_AT, ARCH_AT, ARGUMENTS_AT = 0, 4, 16
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOTTY, ENOSYS, EOPNOTSUPP = 1, 25, 38, 95
CLONE3 = 435
NEWEST = 462
"""Highest number known here. Above it, the answer is ENOSYS, on which libraries fall back."""

Instruction = tuple[int, int, int, int]


class UnknownMachineError(OSError):
    """The tables have no numbers for this machine."""


def numbers(table: dict[str, tuple[int | None, int | None]], machine: str) -> dict[str, int]:
    """Name → number of the calls of the table that `machine` (as of `platform.machine()`) has."""
    if machine not in MACHINES:
        known = " and ".join(MACHINES)
        raise UnknownMachineError(f"no system-call numbers for machine {machine!r}; known: {known}")
    column = MACHINES[machine][0]
    return {name: row[column] for name, row in table.items() if row[column] is not None}  # type: ignore[misc]


def seccomp_filter(modes: bool, times: bool, machine: str | None = None) -> bytes:
    """The filter, as an array of struct sock_filter.

    Args:
        modes, times: Whether programs may change file modes and times.
        machine: As in `platform.machine()`; default: this one.

    Raises:
        UnknownMachineError: The machine is not x86-64 or arm64.
    """
    machine = machine or platform.machine()
    always = ALLOWED | (MODES if modes else {}) | (TIMES if times else {})
    allowed = sorted(numbers(always, machine).values())
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCH_AT),
        (JUMP_EQUAL, 1, 0, MACHINES[machine][1]),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, NUMBER_AT),
    ]
    for first, last in _ranges(allowed):
        program += [(JUMP_AT_LEAST, 0, 2, first), (JUMP_GREATER, 1, 0, last), (RETURN, 0, 0, ALLOW)]
    for name, number in numbers(CHECKED, machine).items():
        body = _checks(name)
        program += [(JUMP_EQUAL, 0, len(body), number), *body]
    for number in numbers(ATTRIBUTES, machine).values():
        program += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | EOPNOTSUPP)]
    # clone3 passes its flags in memory, which a filter cannot read. Libraries fall back to clone.
    program += [(JUMP_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, ERRNO | ENOSYS)]
    program += [(JUMP_GREATER, 0, 1, NEWEST), (RETURN, 0, 0, ERRNO | ENOSYS)]
    program += [(RETURN, 0, 0, ERRNO | EPERM)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _ranges(sorted_numbers: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Runs of consecutive numbers, as (first, last)."""
    first = last = sorted_numbers[0]
    for number in sorted_numbers[1:]:
        if number > last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def _checks(name: str) -> list[Instruction]:
    """The instructions for a call of `name`. Every path ends in a return."""
    if name == "clone":
        return [*_argument(0, AND, CLONE_NAMESPACES), *_allow_if_one_of((0,), EPERM)]
    if name == "socketpair":
        # asyncio needs a pair. Streams only: a datagram socket could send to any address.
        domain = [*_argument(0), (JUMP_EQUAL, 1, 0, AF_UNIX), (RETURN, 0, 0, ERRNO | EPERM)]
        return [*domain, *_argument(1, AND, SOCK_TYPES), *_allow_if_one_of((SOCK_STREAM,), EPERM)]
    if name == "sendto":
        # Without an address, this is send(). Both halves of the pointer must be zero.
        low = [*_argument(4), (JUMP_EQUAL, 1, 0, 0), (RETURN, 0, 0, ERRNO | EPERM)]
        return [*low, (LOAD, 0, 0, ARGUMENTS_AT + 8 * 4 + 4), *_allow_if_one_of((0,), EPERM)]
    if name == "mmap":
        # Shared memory stays allocated after a part is unmapped, and no process's count includes
        # it. Pages of a file count for the folder.
        denied: list[Instruction] = []
        for flags in SHARED_ANONYMOUS:
            denied += [(JUMP_EQUAL, 0, 1, flags), (RETURN, 0, 0, ERRNO | EPERM)]
        return [*_argument(3, AND, MAP_KIND_OR_ANONYMOUS), *denied, (RETURN, 0, 0, ALLOW)]
    if name == "prlimit64":
        return [*_argument(0), *_allow_if_one_of((0,), EPERM)]
    if name == "ioctl":
        return [*_argument(1), *_allow_if_one_of(TERMINAL_QUESTIONS, ENOTTY)]
    assert name == "prctl", name
    return [*_argument(0), *_allow_if_one_of(PRCTL_OPTIONS, EPERM)]


def _argument(index: int, operation: int | None = None, mask: int = 0) -> list[Instruction]:
    """Load the low half of an argument, and mask it."""
    load: list[Instruction] = [(LOAD, 0, 0, ARGUMENTS_AT + 8 * index)]
    return load if operation is None else [*load, (operation, 0, 0, mask)]


def _allow_if_one_of(values: Sequence[int], error: int) -> list[Instruction]:
    tests = [(JUMP_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
    return [*tests, (RETURN, 0, 0, ERRNO | error), (RETURN, 0, 0, ALLOW)]
