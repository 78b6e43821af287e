"""A dataset on the hub: the files of one split, downloaded once per node, and usable without the
network. The hub is a small server on loopback."""

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlparse

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_config import small_config

from asyncrl.config import ConfigError, Source, sources_of
from asyncrl.data import hub
from asyncrl.data.hub import download_dataset
from asyncrl.data.sources import read_sources
from asyncrl.preflight import dataset_snapshot
from asyncrl.preflight.dataset_snapshot import resolve_data
from asyncrl.preflight.model_snapshot import resolve_models

COMMIT = "0123456789abcdef0123456789abcdef01234567"
README = (
    "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: main/train-*}\n  -"
    " {split: test, path: main/test-*}\n---\n"
)
FETCH = """
import os, sys
from asyncrl.config import ConfigError
from asyncrl.data.hub import download_dataset
from asyncrl.data.sources import read_sources
from asyncrl.config import Source
for split in sys.argv[1:]:
    try:
        folder = download_dataset("someone/sums", split)
        print(folder, read_sources((Source(path=str(folder),
            split=split),)).table["prompt"].to_pylist())
    except ConfigError as error:
        print(error)
sys.stdout.flush()
os._exit(0)  # under load, a pyarrow thread can abort a normal exit of the interpreter
"""


@pytest.fixture
def served(tmp_path):
    """The files of `someone/sums`, and how often each was downloaded."""
    files = {"README.md": README.encode(), "load.py": b"raise SystemExit", ".gitattributes": b""}
    for split in ("train", "test"):
        for shard in range(2):
            place = tmp_path / "shard.parquet"
            pq.write_table(pa.table({"prompt": [f"{split} {shard}"]}), place)
            files[f"main/{split}-{shard:05d}-of-00002.parquet"] = place.read_bytes()
    server = Hub(("127.0.0.1", 0), Handler)
    server.files, server.got = files, Counter()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


class Hub(ThreadingHTTPServer):
    daemon_threads = True


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer(True)

    def do_HEAD(self):
        self.answer(False)

    def answer(self, with_body):
        path, files = urlparse(self.path).path, self.server.files
        api = "/api/datasets/someone/sums"
        if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            return self.send(
                json.dumps(
                    {
                        "id": "someone/sums",
                        "sha": COMMIT,
                        "siblings": [{"rfilename": name} for name in files],
                        "tags": [],
                    }
                ).encode()
            )
        if path == f"{api}/tree/{COMMIT}":
            return self.send(
                json.dumps(
                    [
                        {"type": "file", "path": name, "size": len(body), "oid": name}
                        for name, body in files.items()
                    ]
                ).encode()
            )
        name = path.removeprefix(f"/datasets/someone/sums/resolve/{COMMIT}/")
        if name not in files:
            return self.send(
                b'{"error": "Repository not found"}',
                404,
                with_body,
                {"X-Error-Code": "RepoNotFound"},
            )
        self.server.got[name] += with_body
        return self.send(
            files[name], 200, with_body, {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT}
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


def fetch(served, home, *splits, offline=False):
    """The output of a process that downloads these splits, with a line for each."""
    endpoint = f"http://127.0.0.1:{served.server_port}"
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": str(int(offline)),
        "HF_HUB_DISABLE_XET": "1",
    }
    for name in ("HF_HUB_CACHE", "HF_TOKEN"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", FETCH, *splits],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


def test_only_the_files_of_the_split_are_downloaded_once(served, tmp_path):
    home = tmp_path / "home"
    (train,) = fetch(served, home, "train")
    assert train.endswith(f"datasets--someone--sums/snapshots/{COMMIT} ['train 0', 'train 1']")
    assert set(served.got) == {
        "README.md",
        "main/train-00000-of-00002.parquet",
        "main/train-00001-of-00002.parquet",
    }
    before = served.got.copy()
    again, test = fetch(served, home, "train", "test", offline=True)
    assert again == train and served.got == before
    assert (
        "main/test-00000-of-00002.parquet" in test
        and "hf download --repo-type dataset someone/sums" in test
    )


def cached(cache, files, name="someone--sums"):
    """A hub cache as a download leaves it: blobs, links to them, and the commit of the branch."""
    repository = cache / f"datasets--{name}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "blobs").mkdir()
    for number, (path, body) in enumerate(files.items()):
        (repository / "blobs" / str(number)).write_bytes(body)
        link = repository / "snapshots" / COMMIT / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(repository / "blobs" / str(number))
    return repository / "snapshots" / COMMIT


@pytest.fixture
def offline(monkeypatch):
    """A hub that cannot be reached."""

    def unreachable(*_, **__):
        raise ConnectionError("offline")

    monkeypatch.setattr(hub.HfApi, "dataset_info", unreachable)


def test_without_the_hub_the_cache_is_used(tmp_path, offline):
    folder = cached(
        tmp_path, {"test.jsonl": b'{"prompt": "1"}\n', "train.jsonl": b'{"prompt": "2"}\n'}
    )
    assert download_dataset("someone/sums", "test", cache=tmp_path) == folder
    assert read_sources((Source(path=str(folder), split="test"),)).table["prompt"].to_pylist() == [
        "1"
    ]
    with pytest.raises(
        ConfigError,
        match=r"data.train = 'someone/sums' contains no split 'dev'; it has \['test', 'train'\]",
    ):
        download_dataset("someone/sums", "dev", cache=tmp_path)
    with pytest.raises(
        ConfigError,
        match=(
            r"no dataset on the hub at revision 'v2' that can be downloaded .*hf download"
            r" --repo-type dataset someone/sums"
        ),
    ):
        download_dataset("someone/sums", "test", revision="v2", cache=tmp_path)
    with pytest.raises(
        ConfigError,
        match=(
            r"eval.data = 'someone/other': no such file or folder, and no dataset on the hub that"
            r" can be downloaded"
        ),
    ):
        download_dataset("someone/other", "test", cache=tmp_path, field="eval.data")


def test_a_cache_that_lacks_a_shard_is_refused(tmp_path, offline):
    cached(tmp_path, {"train-00000-of-00002.parquet": b""})
    with pytest.raises(ConfigError, match=r"lacks train-00001-of-00002.parquet; download it again"):
        download_dataset("someone/sums", "train", cache=tmp_path)


def test_every_data_setting_may_name_a_hub_dataset_and_a_resumed_run_keeps_its_commits(
    tmp_path, offline, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    folder = str(
        cached(tmp_path, {"test.jsonl": b'{"prompt": "1"}\n', "train.jsonl": b'{"prompt": "2"}\n'})
    )
    named = {"path": "someone/sums", "split": "test"}
    sections = {
        "data": {"train": ["mine.jsonl", "someone/sums"], "max_prompt_length": 8},
        "eval": {"data": named, "sets": {"more": {"data": named}}},
        "warm_start": {"data": "someone/sums"},
    }
    config = small_config(runs_root=str(tmp_path / "runs"), **sections)
    found = resolve_data(config)
    assert [(one.path, one.split) for one in found.data.train] == [
        (str(tmp_path / "mine.jsonl"), None),
        (folder, "train"),
    ]
    assert [one.label for one in found.data.train] == ["mine", "sums.train"]
    for value, split in (
        (found.eval.data, "test"),
        (found.eval.sets["more"].data, "test"),
        (found.warm_start.data, "train"),
    ):
        assert [(one.path, one.split) for one in sources_of(value)] == [(folder, split)]
    revisions = []
    monkeypatch.setattr(
        dataset_snapshot,
        "download_dataset",
        lambda name, split, subset, revision, field: revisions.append(revision) or tmp_path,
    )
    config.run_directory.mkdir(parents=True)
    (config.run_directory / "config.yaml").write_text(json.dumps(found.dump()))
    for resume in ("must", "never"):
        resolve_data(config.model_copy(update={"resume": resume}))
    assert revisions == [COMMIT] * 4 + [None] * 4


def test_a_damaged_config_of_the_earlier_attempt_only_matters_for_hub_names(tmp_path, monkeypatch):
    monkeypatch.setattr(
        dataset_snapshot, "download_dataset", lambda name, split, subset, revision, field: tmp_path
    )
    local, named = (
        small_config(
            runs_root=str(tmp_path), resume="auto", data={"train": data, "max_prompt_length": 8}
        )
        for data in ("a.jsonl", "someone/sums")
    )
    local.run_directory.mkdir()
    (local.run_directory / "config.yaml").write_text("data: [")
    assert resolve_models(local).data == local.data
    with pytest.raises(
        ConfigError,
        match=r"config.yaml cannot be read \(.*it is the only record of the run's hub commits",
    ):
        resolve_data(named)
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read"):
        resolve_models(
            local.model_copy(
                update={"model": local.model.model_copy(update={"path": "someone/model"})}
            )
        )
    (local.run_directory / "config.yaml").write_text("[model]")
    resolve_data(named)
