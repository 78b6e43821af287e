"""Two ranks that reach each other only through a cable, as on two machines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cable import Cable, may_cable

TESTS = Path(__file__).parents[1]
MEET = """
import sys
from dataclasses import replace
import torch
import torch.distributed as dist
from small_config import small_config
from asyncrl.learning.engine.state import Meeting, join_ranks
from asyncrl.preflight.specs import learner_spec

rank, addresses = int(sys.argv[1]), sys.argv[2:]
spec = learner_spec(small_config())
two = {"world_size": 2, "call_timeout_s": 60.0}
spec = replace(spec, learner=spec.learner.model_copy(update=two))
if rank == 0:
    meeting = Meeting.at(addresses[0])
    print("SAYS", meeting.port, flush=True)
else:
    meeting = Meeting(addresses[0], int(input()))
join_ranks(rank, spec, meeting, addresses[rank])
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print("SAYS", total.item(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_meet_although_the_name_of_their_host_is_on_the_loopback_interface() -> None:
    """By default, gloo would take the address of that name, where the other rank meets nobody."""
    if not may_cable():
        pytest.skip("this machine does not allow a virtual cable to a network namespace")
    cable, ranks = Cable(), []
    environment = os.environ | {"PYTHONPATH": str(TESTS), "DS_ACCELERATOR": "cpu"}

    def says(rank: subprocess.Popen[str]) -> float:
        return float(next(line for line in rank.stdout if line.startswith("SAYS"))[5:])

    try:
        networked = ["unshare", "-n", "sh", "-c", 'read cabled && exec "$@"', "sh"]
        for prefix, number in ((networked, 1), ([], 0)):
            command = [*prefix, sys.executable, "-c", MEET, str(number), *cable.addresses]
            ranks.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        far, near = ranks
        port = int(says(near))
        cable.plug_in(far.pid)
        far.stdin.write(f"cabled\n{port}\n")
        far.stdin.flush()
        assert (says(near), says(far)) == (3.0, 3.0)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        cable.remove()
