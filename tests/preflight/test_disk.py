"""Disk space for a run: needs computed by hand, separate file systems, and the refusal."""

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from small_config import SMALL, small_config

from asyncrl.config import ConfigError
from asyncrl.preflight.resources import disk
from asyncrl.preflight.resources.disk import checkpoint_bytes, disks, refuse_full

MIB = 1 << 20
VERSION = 400 * MIB
"""Bytes of a version of 100 Mi parameters in float32."""
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def config(tmp_path):
    def config(**more):
        return small_config(runs_root=str(tmp_path / "runs"), max_steps=500, **more)

    return config


def free(monkeypatch, count):
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: Usage(1 << 60, 0, count))


def test_needs_hand_computed(config):
    """AdamW: 12 bytes per parameter. Two checkpoints are kept while a third is written."""
    assert checkpoint_bytes(config(), VERSION) == 1200 * MIB
    assert (
        checkpoint_bytes(config(model={**SMALL["model"], "dtype": "bfloat16"}), VERSION)
        == 2400 * MIB
    )
    assert checkpoint_bytes(config(learner={"optimizer": "sgd"}), VERSION) == 400 * MIB
    [found] = disks(config(), VERSION)
    assert found.needed == (3 * 1200 + 400) * MIB
    assert disks(config(checkpoint={"every_steps": 0}), VERSION)[0].needed == (1200 + 400) * MIB
    refreshed = config(algorithm={"reference": {"kl_loss_coef": 0.1, "update_interval": 8}})
    assert disks(refreshed, VERSION)[0].needed == (3 * (1200 + 400) + (1 + 2) * 400) * MIB
    assert (
        disks(config(checkpoint={"every_steps": 250}), VERSION)[0].needed == (2 * 1200 + 400) * MIB
    )
    assert (
        disks(config(checkpoint={"keep": 100, "every_steps": 100}), VERSION)[0].needed
        == (5 * 1200 + 400) * MIB
    )


def test_checkpoints_of_an_earlier_attempt_reduce_the_needed_space(config):
    step = Path(config().checkpoints_directory, "step_000050", "learner")
    step.mkdir(parents=True)
    with open(step / "states.pt", "wb") as file:
        os.truncate(file.fileno(), 1000 * MIB)
    [found] = disks(config(), VERSION)
    assert found.needed == (3 * 1200 - 1000 + 400) * MIB
    with open(step / "states.pt", "r+b") as file:
        os.truncate(file.fileno(), 9000 * MIB)
    assert disks(config(), VERSION)[0].needed == 400 * MIB


def test_a_checkpoint_deleted_during_the_check_counts_zero(config, monkeypatch):
    directory = Path(config().checkpoints_directory)
    directory.mkdir(parents=True)
    monkeypatch.setattr(disk.os, "walk", lambda place: [(str(directory), [], ["gone"])])
    assert disks(config(), VERSION)[0].needed == (3 * 1200 + 400) * MIB


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no second file system")
def test_checkpoints_on_another_file_system_are_counted_there(config, tmp_path):
    if os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("one file system")
    apart = config(checkpoint={"save": f"/dev/shm/asyncrl-{os.getpid()}-none/checkpoints"})
    models, checkpoints = disks(apart, VERSION)
    assert (models.needed, checkpoints.needed) == (400 * MIB, 3600 * MIB)
    assert (models.free, checkpoints.free) == (
        pytest.approx(shutil.disk_usage(tmp_path).free, abs=1 << 30),
        pytest.approx(shutil.disk_usage("/dev/shm").free, abs=1 << 30),
    )


def test_a_disk_with_too_little_space_is_refused_with_both_numbers(config, tmp_path, monkeypatch):
    free(monkeypatch, 4000 * MIB)
    refuse_full(config(), disks(config(), VERSION))
    free(monkeypatch, 4000 * MIB - 1)
    with pytest.raises(ConfigError) as refusal:
        refuse_full(config(), disks(config(), VERSION))
    assert (
        str(refusal.value) == f"{tmp_path}/runs/{config().name} has 3,999 MiB free, but up to 3"
        " checkpoints and the exported model need 4,000.0 MiB; free some space, lower"
        " checkpoint.keep = 2, or set runs_root to a larger disk"
    )
    assert not (tmp_path / "runs").exists()
