"""A process that starts before its target is known. Here it runs a shell; in `test_engine` it runs
vLLM's engine."""

import logging
import os
import signal
import subprocess
import sys
from functools import partial
from types import ModuleType

import psutil
import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from asyncrl.generation.engine.arguments import engine_environment
from asyncrl.generation.engine.early_process import (
    EarlyProcess,
    fatal_error,
    handed_to_vllm,
    keep_fatal_error,
)
from asyncrl.generation.served import CPU_HEAD_SIZES

PREPARE = partial(os.chdir, "/")


def shell(command):
    return {
        "target": subprocess.check_call,
        "name": "Shell",
        "kwargs": {"args": ["sh", "-c", command]},
    }


def test_it_runs_its_target_in_the_current_environment(tmp_path, monkeypatch):
    with EarlyProcess(PREPARE) as process:
        monkeypatch.setenv("ASYNCRL_TEST_LATER", "set after it was started")
        made = process.Process(
            **shell(f'printf %s "$ASYNCRL_TEST_LATER, in $PWD" > {tmp_path}/said')
        )
        made.start()
        made.join(30)
    assert made.exitcode == 0 and made.name == "Shell"
    assert (tmp_path / "said").read_text() == "set after it was started, in /"


def test_an_error_of_its_target_is_its_exit_code():
    with EarlyProcess(PREPARE) as process:
        process.Process(**shell("exit 3")).start()
        process.join(30)
    assert process.exitcode == 1


class Unreadable:
    def __reduce__(self):
        return os.stat, ("/no/such/file",)


def test_a_target_that_cannot_be_unpickled_is_an_error():
    with EarlyProcess(PREPARE) as process:
        process.Process(target=print, name="Shell", kwargs={"file": Unreadable()}).start()
        process.join(30)
    assert process.exitcode == 1


def test_it_ends_without_a_target():
    with EarlyProcess(PREPARE) as process:
        pass
    assert process.exitcode == -signal.SIGKILL


def test_it_ends_with_a_block_that_fails():
    with pytest.raises(OSError, match="no such model"), EarlyProcess(PREPARE) as process:
        raise OSError("no such model")
    assert process.exitcode == -signal.SIGKILL


def test_a_process_that_has_ended_keeps_its_exit_code():
    with EarlyProcess(partial(os._exit, 7)) as process:
        process.join(30)
        process.Process(**shell("true")).start()
    assert process.exitcode == 7


def test_it_takes_one_target():
    with EarlyProcess(PREPARE) as process:
        process.Process(**shell("true"))
        with pytest.raises(RuntimeError, match="a second process"):
            process.Process(**shell("true"))
        process.start()
        process.join(30)


OWNER = """
import os, sys, threading, time
from functools import partial
from asyncrl.generation.engine.early_process import EarlyProcess

def own():
    with EarlyProcess(partial(os.write, 1, b"ready\\n")) as process:
        print(process.pid, flush=True)
        time.sleep(600)

if __name__ == "__main__":
    owner = threading.Thread(target=own, daemon=True)
    owner.start()
    sys.stdin.readline()
"""


def owned(tmp_path):
    """A process that owns a prepared process, and waits for a line."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    owner = subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process = psutil.Process(int(owner.stdout.readline()))
    assert owner.stdout.readline() == b"ready\n"
    return owner, process


def test_it_ends_when_its_parent_is_killed(tmp_path):
    owner, process = owned(tmp_path)
    with owner:
        owner.kill()
    process.wait(30)


def test_it_ends_when_its_parent_ends(tmp_path):
    owner, process = owned(tmp_path)
    with owner:
        owner.communicate(b"end\n", timeout=30)
    process.wait(30)


@pytest.fixture
def utils(monkeypatch):
    """The part of vLLM's module that makes the engine's process."""
    module = ModuleType("vllm.v1.engine.utils")
    module.get_mp_context = lambda: "spawn"
    parents = {name: ModuleType(name) for name in ("vllm", "vllm.v1", "vllm.v1.engine")}
    parents["vllm.v1.engine"].utils = module
    for name, loaded in (parents | {module.__name__: module}).items():
        monkeypatch.setitem(sys.modules, name, loaded)
    return module


def test_vllm_uses_it_inside_the_block_only(utils):
    spawned = utils.get_mp_context
    with EarlyProcess(PREPARE) as process:
        with handed_to_vllm(process):
            utils.get_mp_context().Process(**shell("true")).start()
        process.join(30)
    assert process.exitcode == 0 and utils.get_mp_context is spawned
    with (
        pytest.raises(OSError, match="no memory"),
        EarlyProcess(PREPARE) as process,
        handed_to_vllm(process),
    ):
        raise OSError("no memory")
    assert utils.get_mp_context is spawned


def test_a_vllm_that_spawns_its_own_process_is_refused(utils):
    with (
        pytest.raises(RuntimeError, match="is this the version of vLLM"),
        EarlyProcess(PREPARE) as process,
        handed_to_vllm(process),
    ):
        pass
    assert process.exitcode == -signal.SIGKILL


FAILING = """
import asyncio, psutil
from asyncrl.generation.engine.engine import start_engine
from asyncrl.generation.settings import GeneratorApp

if __name__ == "__main__":
    try:
        asyncio.run(start_engine(GeneratorApp(model="/no/model")))
    except Exception as error:
        left = [p.cmdline() for p in psutil.Process().children(recursive=True)
            if "resource_tracker" not in str(p.cmdline())]
        print("FAILED", type(error).__name__, left)
"""


@pytest.mark.slow
def test_an_engine_that_cannot_start_leaves_no_process(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    ended = subprocess.run(
        [sys.executable, script],
        env=os.environ | engine_environment("cpu"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.stdout.splitlines()[-1].startswith("FAILED") and ended.stdout.splitlines()[
        -1
    ].endswith("[]"), ended.stdout + ended.stderr


def test_the_last_error_of_an_engine_is_kept_as_one_line(tmp_path):
    log = logging.Logger("engine")
    log.addFilter(partial(keep_fatal_error, str(tmp_path)))
    log.error("nothing has died yet")
    assert fatal_error(tmp_path) is None
    try:
        raise RuntimeError("Unsupported configuration:\n  head_dim=16")
    except RuntimeError:
        log.exception("EngineCore encountered a fatal error.")
    assert fatal_error(tmp_path) == "RuntimeError: Unsupported configuration: head_dim=16"


@pytest.mark.slow
def test_the_error_of_a_start_contains_the_cause(tmp_path, tiny_model):
    """vLLM does not support attention heads of 16 elements on CPU; `plan` would refuse them."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.save_pretrained(tmp_path)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(tmp_path)
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == CPU_HEAD_SIZES, (
        "of the installed version"
    )
    start = (
        "import asyncio\nfrom asyncrl.generation.engine.engine import start_engine\nfrom"
        " asyncrl.generation.settings import GeneratorApp\n"
    )
    start += "if __name__ == '__main__':\n"
    start += f"    app = GeneratorApp(model={str(tmp_path)!r}, max_model_len=32)\n"
    start += "    asyncio.run(start_engine(app))\n"
    (tmp_path / "start.py").write_text(start)
    done = subprocess.run(
        [sys.executable, tmp_path / "start.py"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (
        done.returncode
        and "EngineDiedError: the vLLM engine's process has died: RuntimeError: Unsupported CPU"
        in done.stderr
    ), done.stderr[-2000:]
