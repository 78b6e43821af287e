"""A model on the hub is downloaded once per node, even by concurrent processes, and then needs no
network. The hub is a small server on loopback."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlparse

import pytest
from small_config import small_config

from asyncrl.preflight import model_snapshot as snapshot
from asyncrl.preflight.model_snapshot import (
    Snapshot,
    difference,
    look,
    read_snapshot,
    resolve_models,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SAY = "from asyncrl.preflight.model_snapshot import download; print(download('someone/tiny', None))"


class Hub(ThreadingHTTPServer):
    """Serves one directory as the model `someone/tiny` at COMMIT."""

    daemon_threads = True

    def __init__(self, directory):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {file.name: file.read_bytes() for file in directory.iterdir()}
        self.got: Counter[str] = Counter()
        self.trees = 0
        self.there = True
        self.requested = threading.Event()
        self.open = threading.Event()
        self.open.set()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer(True)

    def do_HEAD(self):
        self.answer(False)

    def answer(self, with_body):
        path = urlparse(self.path).path
        if not self.server.there:
            return self.send(
                b'{"error": "Repository not found"}',
                404,
                with_body,
                {"X-Error-Code": "RepoNotFound"},
            )
        if path in (
            "/api/models/someone/tiny/revision/main",
            f"/api/models/someone/tiny/revision/{COMMIT}",
        ):
            files = [{"rfilename": name} for name in self.server.files]
            return self.send(
                json.dumps(
                    {
                        "id": "someone/tiny",
                        "sha": COMMIT,
                        "siblings": files,
                        "private": False,
                        "tags": [],
                    }
                ).encode()
            )
        if path == f"/api/models/someone/tiny/tree/{COMMIT}":
            self.server.trees += 1
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": name}
                for name, body in self.server.files.items()
            ]
            return self.send(json.dumps(tree).encode())
        name = path.removeprefix(f"/someone/tiny/resolve/{COMMIT}/")
        if name not in self.server.files:
            return self.send(
                b'{"error": "Repository not found"}',
                404,
                with_body,
                {"X-Error-Code": "RepoNotFound"},
            )
        if with_body:
            self.server.got[name] += 1
            if name.endswith(".safetensors"):
                self.server.requested.set()
                self.server.open.wait(60)
        return self.send(
            self.server.files[name], 200, with_body, {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT}
        )

    def send(self, body, code=200, with_body=True, headers=None):
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tiny_model, tmp_path):
    served = tmp_path / "served"
    shutil.copytree(tiny_model, served)
    (served / "pytorch_model.bin").write_bytes(b"a pickle")
    (served / "consolidated.safetensors").write_bytes(b"the weights once more")
    server = Hub(served)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.open.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def ask(hub, tmp_path):
    """Starts a process that downloads the model; `offline`: without the network."""
    started = []

    def start(offline=False):
        endpoint = f"http://127.0.0.1:{hub.server_port}"
        environment = {
            **os.environ,
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": str(int(offline)),
            "HF_HUB_DISABLE_XET": "1",
        }
        for name in ("HF_HUB_CACHE", "HF_TOKEN"):
            environment.pop(name, None)
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", SAY],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def output_of(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip().splitlines()[-1]


@pytest.mark.slow
def test_eight_concurrent_processes_download_a_model_once(hub, ask, tiny_model):
    places = {output_of(process) for process in [ask() for _ in range(8)]}
    (place,) = places
    assert place.endswith(f"models--someone--tiny/snapshots/{COMMIT}")
    assert hub.trees == 1, "the others found it complete"
    assert set(hub.got.values()) == {1} and "model.safetensors" in hub.got
    assert not {"pytorch_model.bin", "consolidated.safetensors"} & set(hub.got)
    assert read_snapshot(type(tiny_model)(place)) == read_snapshot(tiny_model)


def test_a_downloaded_model_needs_no_network(hub, ask):
    place = output_of(ask())
    before = hub.got.copy()
    assert output_of(ask(offline=True)) == place
    assert hub.got == before


def test_a_process_that_dies_during_a_download_leaves_no_partial_model(hub, ask, tiny_model):
    hub.open.clear()
    first = ask()
    assert hub.requested.wait(60)
    waiting = ask()
    first.kill()
    first.wait()
    hub.open.set()
    place = output_of(waiting)
    assert look(place) == read_snapshot(tiny_model)


@pytest.mark.parametrize("offline", [False, True])
def test_a_name_that_is_not_on_the_hub_is_refused_in_one_line(hub, ask, offline):
    hub.there = False
    process = ask(offline)
    _, err = process.communicate(timeout=120)
    last = err.strip().splitlines()[-1]
    assert (
        "model.path = 'someone/tiny': no such directory, and no model on the hub that can be"
        " downloaded"
        in last
        and "hf download someone/tiny" in last
    )


def test_a_directory_is_used_as_it_is(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine").symlink_to(tiny_model)
    config = small_config(model={"path": "models/mine"})
    assert config.model.path == str(tmp_path / "models" / "mine")
    assert resolve_models(config) == config
    with pytest.raises(
        ValueError,
        match=r"model.revision = 'main' only has an effect with the name of a model on the hub",
    ):
        small_config(model={"path": "models/mine", "revision": "main"})
    assert (
        small_config(model={"path": "someone/tiny", "revision": "main"}).model.path
        == "someone/tiny"
    )


def test_a_node_with_a_different_model_is_recognized(tiny_model, tmp_path):
    here = read_snapshot(tiny_model)
    assert look(str(tiny_model)) == here
    assert "none' has no model.safetensors and no" in difference(look(str(tmp_path / "none")), here)
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    (other / "tokenizer_config.json").write_text("{}")
    assert difference(look(str(other)), here) == "has a different config or tokenizer"
    assert difference(Snapshot(here.hash, {"model.safetensors": (1, "")}), here).startswith(
        "has different weights (1 files, 1 bytes; here 1 files, "
    )
    shutil.copy(tiny_model / "tokenizer_config.json", other)
    with (other / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    assert difference(look(str(other)), here).startswith("has different weights")


def test_a_resumed_run_keeps_its_commit(tmp_path, monkeypatch):
    downloads = []
    monkeypatch.setattr(
        snapshot,
        "download",
        lambda name, revision, **more: downloads.append((name, revision)) or tmp_path,
    )
    cached = f"/cache/models--someone--tiny/snapshots/{COMMIT}"
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.yaml").write_text(f"model: {{path: {cached}}}")
    for name, resume in (
        ("someone/tiny", "must"),
        ("someone/tiny", "never"),
        ("someone/other", "auto"),
    ):
        resolve_models(small_config(model={"path": name}, resume=resume, runs_root=str(tmp_path)))
    assert downloads == [("someone/tiny", COMMIT), ("someone/tiny", None), ("someone/other", None)]
