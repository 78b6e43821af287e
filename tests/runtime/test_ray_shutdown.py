"""A process survives the shutdown of Ray, whatever its other threads do."""

import gc
import subprocess
import sys

import pytest

from asyncrl.runtime import ray_shutdown

SCRIPT = """
import threading
import ray
from asyncrl.preflight.cluster import start_local_ray
from asyncrl.runtime.ray_shutdown import shut_down_ray

class Node:
    def __init__(self):
        self.itself, self.reference = self, ray.put(1)

ended = threading.Event()

def allocate():
    # Enough lists for a full collection. Ray disconnects this process first, then shuts down.
    while ray.is_initialized():
        pass
    lists = []
    while not ended.is_set() and len(lists) < 2_000_000:
        lists.append([])

start_local_ray(1, object_store_memory=128 << 20)
[Node() for _ in range(100)]
thread = threading.Thread(target=allocate)
thread.start()
shut_down_ray()
ended.set()
thread.join()
print("ENDED")
"""


def test_garbage_with_references_does_not_end_the_process():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout[-6:]) == (0, "ENDED\n"), done.stderr[-2000:]


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_as_it_was(monkeypatch: pytest.MonkeyPatch, enabled: bool):
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
