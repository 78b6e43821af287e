"""Run inside the sandbox: each function tries one way out and returns what it got, or None.

They also run outside, as a control: an escape that fails everywhere proves nothing. Uses only the
standard library, since a sandboxed interpreter has no more. Targets come on standard input.
"""

import ctypes
import json
import mmap
import os
import platform
import resource
import signal
import socket
import stat
import subprocess
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
NUMBERS = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "io_uring_setup": (425, 425),
    "add_key": (248, 217),
    "keyctl": (250, 219),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "memfd_create": (319, 279),
    "unshare": (272, 97),
    "clone3": (435, 435),
    "pidfd_open": (434, 434),
    "shmget": (29, 194),
    "personality": (135, 92),
    "inotify_init1": (294, 26),
}
AT = 0 if platform.machine() == "x86_64" else 1


def call(name, *arguments):
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(NUMBERS[name][AT]), *converted)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return f"{name} gave {result}"


def read_host_file(t):
    return open(t["canary"]).read()


def read_system_file(t):
    return open("/etc/passwd").read()


def read_through_a_symlink(t):
    os.symlink(t["canary"], "link")
    return open("link").read()


def read_through_a_hard_link(t):
    os.link(t["canary"], "hard")
    return open("hard").read()


def read_through_the_parent_folder(t):
    return open("/".join([".."] * 12) + t["canary"]).read()


def list_host_folder(t):
    return os.listdir(os.path.dirname(t["canary"]))


def write_outside(t):
    with open(t["folder"] + "/written", "w") as file:
        return f"{file.write('x')} bytes"


def make_folder_outside(t):
    os.mkdir(t["folder"] + "/made")
    return "made"


def remove_outside(t):
    os.unlink(t["folder"] + "/removable")
    return "removed"


def change_mode_outside(t):
    os.chmod(t["owned"], 0o777)
    return "changed"


def change_times_outside(t):
    os.utime(t["owned"], (1, 1))
    return "changed"


def truncate_outside(t):
    os.truncate(t["owned"], 0)
    return "cut"


def write_system_folder(t):
    for folder in ("/usr", "/dev", "/", "/etc", "/var/tmp"):
        path = folder + "/asyncrl-escape-" + t["token"]
        if os.path.realpath(folder) == os.getcwd():
            continue  # a link to the program's own folder
        try:
            open(path, "x").close()
        except OSError:
            continue
        os.unlink(path)
        return folder
    return None


def read_other_process(t):
    return open(f"/proc/{t['victim']}/environ").read()


def list_processes(t):
    return [
        name
        for name in os.listdir("/proc")
        if name == str(t["victim"]) and open(f"/proc/{name}/cmdline").read()
    ]


def read_parent_memory(t):
    return open(f"/proc/{os.getppid()}/mem", "rb") and "opened"


def tcp_over_ipv4(t):
    return socket.create_connection(("127.0.0.1", t["tcp4"]), timeout=2).recv(9)


def tcp_over_ipv6(t):
    return socket.create_connection(("::1", t["tcp6"]), timeout=2).recv(9)


def udp(t):
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9))


def listen(t):
    made = socket.socket()
    made.bind(("127.0.0.1", 0))
    return made.getsockname()


def netlink(t):
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) and "opened"


def unix_socket(t):
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(2)
    made.connect(t["unix"])
    return made.recv(9)


def abstract_socket(t):
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(2)
    made.connect(t["abstract"])
    return made.recv(9)


def datagram_pair_to_abstract(t):
    one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return one.sendto(b"escaped", t["datagrams"])


def trace(t):
    call("ptrace", 16, t["victim"], 0, 0)
    os.waitpid(t["victim"], 0x40000000)
    return call("ptrace", 17, t["victim"], 0, 0)


def trace_child(t):
    child = os.fork()
    if child == 0:
        time.sleep(5)
        os._exit(0)
    try:
        return call("ptrace", 0x4206, child, 0, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def read_other_memory(t):
    buffer = ctypes.create_string_buffer(8)
    at = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
    child = os.fork()
    if child == 0:
        time.sleep(5)
        os._exit(0)
    try:
        return call("process_vm_readv", child, ctypes.byref(at), 1, ctypes.byref(at), 1, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def signal_other(t):
    os.kill(t["victim"], signal.SIGCONT)
    return "signaled"


def signal_supervisor(t):
    """Signal 0 tests for permission."""
    may = [p for p in (os.getppid(), t["caller"]) if p > 1 and may_signal(p)]
    return may or None


def may_signal(process):
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True


def limit_other(t):
    return resource.prlimit(t["victim"], resource.RLIMIT_NOFILE, (900, 1024)) and "limited"


def slow_other(t):
    os.setpriority(os.PRIO_PROCESS, t["victim"], 5)
    return "slowed"


def open_pidfd(t):
    return call("pidfd_open", t["victim"], 0)


def mount_memory(t):
    os.makedirs("mounted", exist_ok=True)
    if libc.mount(b"tmpfs", b"mounted", b"tmpfs", 0, None) == 0:
        libc.umount2(b"mounted", 2)
        return "mounted"
    return None


def new_user_namespace(t):
    child = os.fork()
    if child == 0:
        try:
            call("unshare", 0x10000000)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def new_namespace_by_clone(t):
    number = (56, 220)[AT]
    child = libc.syscall(
        ctypes.c_long(number), ctypes.c_long(0x10000000 | 17), None, None, None, None
    )
    if child == 0:
        os._exit(0)
    if child > 0:
        os.waitpid(child, 0)
        return "cloned"
    return None


def leave_root(t):
    os.makedirs("jail", exist_ok=True)
    child = os.fork()
    if child == 0:
        try:
            here = os.open("/", os.O_RDONLY)
            os.chroot("jail")
            os.fchdir(here)
            for _ in range(20):
                os.chdir("..")
            os.chroot(".")
            os._exit(0 if read_host_file(t) else 1)
        except OSError:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def environment_secret(t):
    return os.environ.get("CANARY_SECRET")


def inherited_descriptors(t):
    if sys.stdin.isatty():
        return "a terminal"
    return [n for n in range(3, 1024) if is_open(n)] or None


def is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def input_is_writable(t):
    return os.write(0, b"x")


def shared_memory_left(t):
    """Whether the file could be made outside. The test looks for the file afterwards."""
    with open("/dev/shm/" + t["token"], "w") as file:
        file.write("left")


def shared_memory_segment(t):
    return call("shmget", int(t["token"][:6], 16), 4096, 0o1600)


def ring(t):
    return call("io_uring_setup", 1, ctypes.create_string_buffer(256))


def keyring_add(t):
    return call(
        "add_key",
        ctypes.c_char_p(b"user"),
        ctypes.c_char_p(t["token"].encode()),
        ctypes.c_char_p(b"x"),
        1,
        -3,
    )


def keyring_read(t):
    return call("keyctl", 0, -3, 1)


def page_faults(t):
    return call("userfaultfd", 1)


def load_bpf(t):
    attributes = (ctypes.c_uint32 * 32)(2, 4, 4, 1)
    return call("bpf", 0, ctypes.byref(attributes), 128)


def performance_counters(t):
    attributes = (ctypes.c_uint32 * 32)(1, 128)
    return call("perf_event_open", ctypes.byref(attributes), 0, -1, -1, 0)


def anonymous_file(t):
    return call("memfd_create", ctypes.c_char_p(b"x"), 0)


def watch_files(t):
    return call("inotify_init1", 0)


def change_personality(t):
    return call("personality", 0x0040000)


def privileged_program(t):
    """A set-user-id program: the one that the test has made, else su."""
    done = subprocess.run([t["setuid"], "-u"], capture_output=True, text=True, timeout=10)
    return done.stdout.strip() == "0" or None


def become_root(t):
    os.setuid(0)
    os.seteuid(0)
    return os.getuid() == 0 and open(t["canary"]).read()


def device_file(t):
    os.mknod("device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    return open("device", "rb") and "opened"


def kernel_memory(t):
    return open("/dev/kmsg", "rb") and "opened"


def core_dump(t):
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return "allowed"


def raise_limits(t):
    _, most = resource.getrlimit(resource.RLIMIT_NPROC)
    if most == resource.RLIM_INFINITY:
        return "there is none"
    resource.setrlimit(resource.RLIMIT_NPROC, (most + 1, most + 1))
    return "raised"


def survive_the_supervisor(t):
    """PR_SET_PDEATHSIG 0."""
    return libc.prctl(1, 0, 0, 0, 0) == 0


def change_hostname(t):
    socket.sethostname(socket.gethostname())
    return "changed"


def old_calling_convention(t):
    """A 32-bit system call, which a filter of 64-bit numbers takes for another call."""
    if platform.machine() != "x86_64":
        return None
    child = os.fork()
    if child == 0:
        code = mmap.mmap(
            -1,
            4096,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC,
        )
        code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, getpid; int 0x80; ret
        address = ctypes.addressof(ctypes.c_char.from_buffer(code))
        os._exit(0 if ctypes.CFUNCTYPE(ctypes.c_int)(address)() == os.getpid() else 1)
    return os.waitpid(child, 0)[1] == 0


ESCAPES = {
    name: act
    for name, act in list(globals().items())
    if callable(act)
    and getattr(act, "__module__", None) == __name__
    and name not in ("call", "may_signal", "is_open")
}


def main():
    targets = json.loads(sys.stdin.read())
    found = {}
    for name, act in ESCAPES.items():
        try:
            got = act(targets)
        except Exception as error:
            found[name] = [False, f"{type(error).__name__}: {error}"]
            continue
        found[name] = [bool(got), repr(got)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
