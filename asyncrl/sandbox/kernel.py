"""Linux calls that Python 3.11 lacks, by ctypes: namespaces, mounts, Landlock, seccomp, privileges.

Each raises OSError with the call's name. The Landlock and seccomp packages on PyPI cannot replace
this file: they need a system library, or are only a few months old.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping

NAMESPACES = {
    "mount": 0x00020000,
    "cgroup": 0x02000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
"""CLONE_NEW* flags."""

MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL, SECCOMP_MODE_FILTER = 4, 2
CAPABILITY_VERSION_3 = 0x20080522
SIGKILL = 9
CLOSE_RANGE_CLOEXEC, ALL_DESCRIPTORS = 4, 0xFFFFFFFF

CLOSE_RANGE, MOUNT_SETATTR = 436, 442
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
"""System call numbers that are the same on every machine."""
OTHER_NUMBERS = {
    "x86_64": {"pivot_root": 155, "capset": 126},
    "aarch64": {"pivot_root": 41, "capset": 91},
}

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_REG, MAKE_FIFO = 16, 32, 128, 256, 1024
MAKE_SYM, REFER, TRUNCATE = 4096, 8192, 16384
FILE_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}
"""Landlock version → all file rights that it controls."""
TCP_RIGHTS, SCOPES = 3, 3
"""bind and connect (version 4); abstract Unix sockets and signals (version 6)."""

READ = EXECUTE | READ_FILE | READ_DIR
USE_DEVICE = READ_FILE | WRITE_FILE
OWN = (
    READ
    | WRITE_FILE
    | REMOVE_DIR
    | REMOVE_FILE
    | MAKE_DIR
    | MAKE_REG
    | MAKE_FIFO
    | MAKE_SYM
    | REFER
    | TRUNCATE
)
"""Rights in the sandbox's folder: everything except devices and sockets."""
ON_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
"""Rights that a rule for a file may have; a rule for a folder may have more."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns_fd")]


class _RulesetAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("handled_fs", "handled_net", "scoped")]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32)]


class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(number: int, what: str, *arguments: object) -> int:
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *converted), what)


def _other(name: str) -> int:
    try:
        return OTHER_NUMBERS[platform.machine()][name]
    except KeyError:
        raise OSError(f"{name}: no number for machine {platform.machine()!r}") from None


def _prctl(what: str, *arguments: int) -> None:
    padded = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:5]]
    _checked(_libc.prctl(*padded), what)


def unshare() -> None:
    """Enter new namespaces of every kind in NAMESPACES. The next child is process 1 of the new PID
    namespace."""
    _checked(_libc.unshare(ctypes.c_int(sum(NAMESPACES.values()))), "unshare")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    arguments = [os.fsencode(source), os.fsencode(target), kind.encode() if kind else None]
    result = _libc.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None)
    _checked(result, f"mount {target}")


def mount_private() -> None:
    """Make later mounts here invisible outside, and later mounts outside invisible here."""
    _mount("none", "/", None, MS_REC | MS_PRIVATE)


def mount_tmpfs(target: str, options: str) -> None:
    """Mount an in-memory file system. `options` are, for example,
    "size=1048576,nr_inodes=64,mode=0700"."""
    _mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, options)


def bind(source: str, target: str) -> None:
    """Bind-mount `source`, with the mounts below it, at `target`."""
    _mount(source, target, None, MS_BIND | MS_REC)


def protect(target: str, *, devices: bool = False, whole: bool = True) -> None:
    """Make a mount read-only, without set-user-id, and without device files unless `devices`."""
    attributes = _MountAttr(ATTR_RDONLY | ATTR_NOSUID | (0 if devices else ATTR_NODEV), 0, 0, 0)
    _syscall(
        MOUNT_SETATTR,
        f"mount_setattr {target}",
        AT_FDCWD,
        ctypes.c_char_p(os.fsencode(target)),
        AT_RECURSIVE if whole else 0,
        ctypes.byref(attributes),
        ctypes.sizeof(attributes),
    )


def switch_root(new: str, old: str) -> None:
    """Make the mount `new` the root. The old root is at `old`, a folder in `new`."""
    paths = [ctypes.c_char_p(os.fsencode(path)) for path in (new, old)]
    _syscall(_other("pivot_root"), "pivot_root", *paths)
    os.chdir("/")


def detach(target: str) -> None:
    """Unmount lazily: hide a mount now, and release it when it is no longer used."""
    _checked(_libc.umount2(os.fsencode(target), ctypes.c_int(MNT_DETACH)), f"umount {target}")


def set_hostname(name: str) -> None:
    """Set the hostname of this UTS namespace."""
    _checked(_libc.sethostname(name.encode(), ctypes.c_size_t(len(name))), "sethostname")


def keep_orphans() -> None:
    """Make orphaned descendants children of this process, even those in another session."""
    _prctl("PR_SET_CHILD_SUBREAPER", PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """SIGKILL this process when its parent ends. Call it after the last change of user."""
    _prctl("PR_SET_PDEATHSIG", PR_SET_PDEATHSIG, SIGKILL)


def close_others_on_exec() -> None:
    """Close all descriptors except 0, 1 and 2 when this process executes a program."""
    _syscall(CLOSE_RANGE, "close_range", 3, ALL_DESCRIPTORS, CLOSE_RANGE_CLOEXEC)


def drop_privileges() -> None:
    """Drop all capabilities for good, and let no other process inspect this one."""
    _prctl("PR_CAP_AMBIENT", PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break  # the kernel has no more capabilities, or this process may not drop any
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    _syscall(_other("capset"), "capset", ctypes.byref(header), ctypes.byref(none))
    _prctl("PR_SET_DUMPABLE", PR_SET_DUMPABLE, 0)
    _prctl("PR_SET_NO_NEW_PRIVS", PR_SET_NO_NEW_PRIVS, 1)


def install_filter(instructions: bytes) -> None:
    """Apply a seccomp filter to this process and its descendants. Call `drop_privileges` first."""
    memory = ctypes.create_string_buffer(instructions, len(instructions))
    program = _FilterProgram(len(instructions) // 8, ctypes.addressof(memory))
    result = _libc.prctl(
        PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.byref(program), 0, 0
    )
    _checked(result, "seccomp")


def landlock_version() -> int:
    """Version of the kernel's Landlock; 0 = not available, or switched off."""
    try:
        return _syscall(LANDLOCK_CREATE, "landlock_create_ruleset", None, 0, 1)
    except OSError:
        return 0


def restrict_signals() -> None:
    """Let this process and its descendants signal only one another (Landlock version 6)."""
    _restrict(_ruleset(0, 0, SCOPES))


def restrict_paths(paths: Mapping[str, int]) -> None:
    """Allow only these paths and what is below them, with the given rights, and no TCP."""
    version = landlock_version()
    handled = FILE_RIGHTS[min(version, max(FILE_RIGHTS))]
    ruleset = _ruleset(handled, TCP_RIGHTS if version >= 4 else 0, SCOPES if version >= 6 else 0)
    for path, rights in paths.items():
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = rights & handled & (-1 if os.path.isdir(path) else ON_FILES)
        rule = _PathBeneath(allowed, descriptor)
        _syscall(LANDLOCK_ADD, f"landlock_add_rule {path}", ruleset, 1, ctypes.byref(rule), 0)
        os.close(descriptor)
    _restrict(ruleset)


def _ruleset(files: int, network: int, scoped: int) -> int:
    attributes = _RulesetAttr(files, network, scoped)
    size = ctypes.sizeof(attributes)
    return _syscall(LANDLOCK_CREATE, "landlock_create_ruleset", ctypes.byref(attributes), size, 0)


def _restrict(ruleset: int) -> None:
    _syscall(LANDLOCK_RESTRICT, "landlock_restrict_self", ruleset, 0)
    os.close(ruleset)
