"""Compile caches per process and set of versions, and the user's variables in ranks and
replicas."""

import logging
import os
import signal
import subprocess
import sys

import pytest

from asyncrl.config import Config
from asyncrl.generation.engine.arguments import engine_environment
from asyncrl.learning.driver import rank_environment
from asyncrl.preflight.specs import learner_spec
from asyncrl.runtime.processes import environment
from asyncrl.runtime.processes.environment import (
    CACHES,
    _private,
    claim_caches,
    damaged_file,
    passed_on,
    preload_openmp,
)


@pytest.fixture
def unset(monkeypatch):
    """Unset all cache variables, and restore them and the list of locks after the test."""
    for name in CACHES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(environment, "_held", [])


def release_locks():
    """Release the locks, as the end of a process does."""
    while environment._held:
        environment._held.pop().close()


def test_two_processes_share_no_cache_and_a_new_one_reuses_that_of_a_dead_one(tmp_path):
    script = (
        "import sys, time; from pathlib import Path\n"
        "from asyncrl.runtime.processes.environment import claim_caches\n"
        "print(claim_caches('generator', Path(sys.argv[1])).path.name, flush=True); time.sleep(600)"
    )

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        return process, process.stdout.readline().strip()

    processes = [start(), start()]
    try:
        assert [name for _, name in processes] == ["generator-0", "generator-1"]
        processes[0][0].send_signal(signal.SIGKILL)
        processes[0][0].wait(timeout=30)
        processes.append(start())
        assert processes[2][1] == "generator-0"
    finally:
        for process, _ in processes:
            process.kill()
            process.wait(timeout=30)
            process.stdout.close()


def test_variables_name_the_processs_caches_unless_the_user_has_set_them(
    tmp_path, monkeypatch, unset
):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere/else")
    caches = claim_caches("learner", tmp_path)
    assert (
        caches.damaged is None
        and caches.path.is_relative_to(tmp_path)
        and caches.path.name == "learner-0"
    )
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(caches.path / "inductor") and os.environ[
        "VLLM_CACHE_ROOT"
    ] == str(caches.path / "vllm")
    assert os.environ["TRITON_CACHE_DIR"] == "/somewhere/else"


def test_other_versions_have_other_caches(tmp_path, monkeypatch, unset):
    before = claim_caches("learner", tmp_path).path
    assert "torch-2" in str(before) and "vllm" in str(before)
    monkeypatch.setattr(environment, "version", lambda name: "9.9")
    assert claim_caches("learner", tmp_path).path.parents[1] != before.parents[1]


def test_a_damaged_cache_is_emptied_once_with_a_warning(tmp_path, monkeypatch, unset, caplog):
    path = claim_caches("generator", tmp_path).path
    whole, cut = path / "vllm" / "modelinfos" / "a.json", path / "inductor" / "fx" / "b.best_config"
    for file, content in (
        (whole, '{"a": 1}'),
        (cut, '{"a": '),
        (path / "triton" / "kernel.so", "\x7fELF"),
    ):
        file.parent.mkdir(parents=True)
        file.write_text(content)
    release_locks()
    caplog.set_level(logging.WARNING, logger="asyncrl")
    again = claim_caches("generator", tmp_path)
    assert (
        again.path == path
        and again.damaged == cut
        and [file.name for file in path.iterdir()] == ["lock"]
    )
    assert "was damaged (inductor/fx/b.best_config is not JSON) and was emptied" in caplog.text
    caplog.clear()
    release_locks()
    assert claim_caches("generator", tmp_path).damaged is None and not caplog.records


def test_an_intact_cache_is_kept(tmp_path):
    (tmp_path / "a.json").write_text("[]")
    (tmp_path / "b.py").write_text("{")
    assert damaged_file(tmp_path) is None
    (tmp_path / "c.json").write_bytes(b"")
    assert damaged_file(tmp_path) == tmp_path / "c.json"


def test_a_folder_that_cannot_be_written_is_not_used(tmp_path, monkeypatch, unset):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(environment.tempfile, "tempdir", None)
    assert claim_caches("learner").path.is_relative_to(tmp_path / "temporary")


def test_the_users_variables_pass_through_except_secrets(monkeypatch):
    given = {
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "NCCL_DEBUG": "INFO",
        "CUDA_LAUNCH_BLOCKING": "1",
    }
    kept = {
        "HF_TOKEN": "x",
        "VLLM_API_KEY": "x",
        "CUDA_VISIBLE_DEVICES": "0",
        "HOME": "/h",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    assert passed_on(given | kept) == given
    for name, value in {
        **given,
        "TORCH_COMPILE_DISABLE": "0",
        "VLLM_PLUGINS": "other",
        "DS_ACCELERATOR": "cuda",
    }.items():
        monkeypatch.setenv(name, value)
    tree = {
        "name": "n",
        "max_steps": 1,
        "model": {"path": "m"},
        "data": {"train": "t"},
        "rollout": {"max_completion_length": 8},
    }
    ranks = rank_environment(
        learner_spec(
            Config.model_validate({**tree, "reward": {"functions": {"f": {"function": "m:f"}}}})
        )
    )
    replicas = engine_environment("cpu")
    assert given.items() <= ranks.items() and given.items() <= replicas.items()
    assert replicas["TORCH_COMPILE_DISABLE"] == "0", "the user's value overrides a default"
    assert (
        replicas["VLLM_PLUGINS"] == "asyncrl_weights,asyncrl_outputs,asyncrl_seeds,asyncrl_adapters"
        and ranks["DS_ACCELERATOR"] == "cpu"
    ), "but not a value that asyncrl needs"


def test_a_folder_that_others_can_write_to_is_not_used_for_caches(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "mine").mkdir(mode=0o700)
    assert (
        _private(tmp_path / "mine") == tmp_path / "mine"
        and _private(tmp_path / "new").stat().st_mode & 0o777 == 0o700
    )
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("open", "link", "dangling"):
        found = _private(tmp_path / name)
        assert (
            found.name.startswith("asyncrl-cache-")
            and found.parent == tmp_path
            and found.stat().st_mode & 0o777 == 0o700
        )


def test_torchs_openmp_is_preloaded_unless_another_is():
    ours = preload_openmp("")
    assert os.path.isfile(ours) and "libgomp" in ours
    assert preload_openmp("/lib/libtcmalloc.so") == f"/lib/libtcmalloc.so:{ours}"
    assert preload_openmp("/opt/intel/libiomp5.so") == "/opt/intel/libiomp5.so"
