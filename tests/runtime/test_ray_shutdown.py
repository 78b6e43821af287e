"""Garbage that holds references to Ray's objects does not end a process that shuts Ray down."""

import gc
import subprocess
import sys
import threading

import pytest

from asyncrl.runtime.ray import shutdown as ray_shutdown

SCRIPT = """
import gc, sys, threading
import ray
from asyncrl.run.cluster.cluster import start_local_ray
from asyncrl.runtime.ray.shutdown import shut_down_ray

class Node:
    def __init__(self):
        self.itself, self.reference = self, ray.put(1)

ended = threading.Event()

def make_garbage():
    # Ray disconnects this process first, then shuts down.
    while ray.is_initialized():
        pass
    while not ended.is_set() and nodes:
        nodes.pop()
        [[] for _ in range(20_000)]

start_local_ray(1, object_store_memory=128 << 20)
gc.freeze()  # collections of what comes later are short, and so there are many
if "unprotected" in sys.argv:
    gc.disable = lambda: None
nodes = [Node() for _ in range(3000)]
thread = threading.Thread(target=make_garbage)
thread.start()
shut_down_ray()
ended.set()
thread.join()
print("ENDED")
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        pytest.param([], 0, marks=pytest.mark.slow),
        pytest.param(["unprotected"], 1, marks=pytest.mark.faults),
    ],
)
def test_garbage_with_references_does_not_end_the_process(arguments: list[str], code: int) -> None:
    """Where garbage is collected during the shutdown, Ray ends the process."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stderr[-2000:]
    assert done.stdout.endswith("ENDED\n") == (code == 0)
    # Ray says why it ends a process, unless the process is gone before the text is written.
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_as_it_was(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    seen = []

    def fails() -> None:
        seen.append(gc.isenabled())
        raise OSError

    monkeypatch.setattr(ray_shutdown.ray, "shutdown", fails)
    if not enabled:
        gc.disable()
    try:
        with pytest.raises(OSError):
            ray_shutdown.shut_down_ray()
        assert (seen, gc.isenabled()) == ([False], enabled)
    finally:
        gc.enable()


def test_a_collection_of_another_thread_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    started, proceed, freed = threading.Event(), threading.Event(), []

    class Slow:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            started.set()
            proceed.wait(60)
            freed.append(self)

    def pauses(seconds: float) -> None:
        proceed.set()
        thread.join(60)

    monkeypatch.setattr(ray_shutdown.ray, "shutdown", lambda: freed.append("shutdown"))
    monkeypatch.setattr(ray_shutdown.time, "sleep", pauses)
    Slow()
    thread = threading.Thread(target=gc.collect)
    thread.start()
    assert started.wait(60)
    ray_shutdown.shut_down_ray()
    thread.join(60)
    assert len(freed) == 2 and freed[1] == "shutdown"
