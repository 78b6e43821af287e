"""An agent that was written before asyncrl existed, in an environment of its own, as the docs have
it."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from agent_server import Server, call

from asyncrl.agents.served import ServedSession
from asyncrl.agents.server import AgentServer
from asyncrl.environments.agent import play
from asyncrl.environments.model import SessionUrl
from asyncrl.environments.running import Ended, Limits, run_session

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "agents.md"
TASK = {"prompt": "What is 3 + 4?", "answer": "7"}


@pytest.mark.slow
def test_the_agent_of_the_docs_is_one_row(tmp_path: Path) -> None:
    """Without a package registry this fails and does not skip: `.ci/setup` needs one, too."""
    page = PAGE.read_text()
    (program,) = re.findall(r"```python\n# adder\.py\n(.*?)```", page, re.DOTALL)
    (package,) = re.findall(r'pip install "(pydantic-ai-slim\S+)"', page)
    (tmp_path / "adder.py").write_text(program)
    uv, own = Path(sys.executable).with_name("uv"), tmp_path / "own"
    for command in (
        ["venv", "--quiet", "--python", sys.executable, own],
        ["pip", "install", "--quiet", "--python", own / "bin" / "python", package],
    ):
        subprocess.run([uv, *command], check=True, timeout=300)
    server = Server(tmp_path, [call(3, 4), "It is 7."])

    async def session() -> Ended:
        at_url = AgentServer()
        await at_url.start()
        with at_url.serving(ServedSession(server.session.chat, 5)) as key:
            url = SessionUrl(at_url.address, key)
            python = str(own / "bin" / "python")
            agent = {"command": [python, str(tmp_path / "adder.py"), "{prompt}", "{answer}"]}
            ended = await run_session(play, TASK, server.session, Limits(5, 60), agent, url)
        await at_url.close()
        return ended

    ended = asyncio.run(session())
    assert (ended.end, ended.output) == ("done", '{"reward": 1.0}\n'), ended.note
    row = server.row()
    assert row.index(call(3, 4)) < row.index("7<|im_end|>") < row.index("It is 7.")
