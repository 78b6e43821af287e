"""A Ray node that does not start within Ray's 30 seconds is started once more. The failed start
leaves no process behind."""

import subprocess
import sys

SCRIPT = """
import psutil, ray
from asyncrl.preflight import cluster

real, tries = ray.init, []

def slow_at_first(*arguments, **options):
    tries.append(real(*arguments, **options))
    if len(tries) == 1:
        raise Exception("The current node timed out during startup")

cluster.ray.init = slow_at_first
cluster.start_local_ray(1, object_store_memory=128 << 20)
nodes = sum("gcs_server" in " ".join(child.cmdline())
    for child in psutil.Process().children(recursive=True))
print("ANSWER", len(tries), nodes, ray.get(ray.remote(lambda: 5).options(num_cpus=0.1).remote()))
ray.shutdown()
"""


def test_a_node_that_starts_too_slowly_is_started_once_more():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300
    )
    assert "ANSWER 2 1 5" in done.stdout, done.stderr[-2000:]
