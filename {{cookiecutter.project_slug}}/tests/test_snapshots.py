"""Checkpoints are published whole or not at all, and damage is found."""

import json
import random
from pathlib import Path

import pytest

from {{ cookiecutter.package_name }}.checkpoint.manifest import CheckpointError, published, verify
from {{ cookiecutter.package_name }}.checkpoint.publish import RetentionConfig, Snapshots
from {{ cookiecutter.package_name }}.distributed import Group


def write(directory: Path) -> list[str]:
    """Two files, as a rank would write them."""
    (directory / "a.bin").write_bytes(bytes(range(256)) * 9)
    (directory / "b.bin").write_bytes(b"weights")
    return ["a.bin", "b.bin"]


@pytest.fixture
def snapshots(tmp_path: Path) -> Snapshots:
    return Snapshots(tmp_path / "checkpoints", RetentionConfig(keep=2), Group())


def names(snapshots: Snapshots) -> list[str]:
    return sorted(path.name for path in snapshots.directory.iterdir())


def test_what_is_published_verifies(snapshots: Snapshots) -> None:
    path = snapshots.publish(7, write, {"samples": 56})
    manifest, problems = verify(path)
    assert not problems
    assert (manifest["step"], manifest["samples"]) == (7, 56)
    assert snapshots.newest_good()[0] == path


def test_a_save_that_fails_leaves_nothing(snapshots: Snapshots) -> None:
    snapshots.publish(1, write, {})

    def fail(directory: Path) -> list[str]:
        write(directory)
        raise OSError("disk full")

    with pytest.raises(CheckpointError, match="disk full"):
        snapshots.publish(2, fail, {})
    assert names(snapshots) == ["step_00000001"]


def test_the_newest_are_kept_and_the_best(snapshots: Snapshots) -> None:
    for step, loss in [(1, 0.9), (2, 0.1), (3, 0.5), (4, None), (5, None)]:
        snapshots.publish(step, write, {"validation_loss": loss})
    assert names(snapshots) == ["step_00000002", "step_00000004", "step_00000005"]


def test_some_are_kept_for_good(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, RetentionConfig(keep=1, keep_every=2), Group())
    for step in range(1, 6):
        snapshots.publish(step, write, {})
    assert [path.name for path in published(tmp_path)] == [
        "step_00000002",
        "step_00000004",
        "step_00000005",
    ]


@pytest.mark.parametrize("name", ["a.bin", "b.bin", "manifest.json"])
def test_every_kind_of_damage_is_found(snapshots: Snapshots, name: str) -> None:
    path = snapshots.publish(1, write, {}) / name
    good = path.read_bytes()
    bits = random.Random(0).sample(range(len(good) * 8), 40)
    for bit in bits:
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert verify(path.parent)[1], f"bit {bit} of {name}"
    for damaged in (good[:-1], good + b"\0", b""):
        path.write_bytes(damaged)
        assert verify(path.parent)[1]
    path.unlink()
    assert verify(path.parent)[1]
    path.write_bytes(good)
    assert not verify(path.parent)[1]


def test_a_damaged_newest_is_set_aside(snapshots: Snapshots) -> None:
    good = snapshots.publish(1, write, {})
    bad = snapshots.publish(2, write, {})
    (bad / "b.bin").write_bytes(b"weighty")
    assert snapshots.newest_good()[0] == good
    assert names(snapshots) == ["step_00000001", "step_00000002.damaged-1"]
    snapshots.publish(2, write, {})
    assert snapshots.newest_good()[0] == bad


def test_only_damaged_ones_are_no_fresh_start(snapshots: Snapshots) -> None:
    (snapshots.publish(1, write, {}) / "a.bin").unlink()
    for _ in range(2):
        with pytest.raises(CheckpointError, match="--fresh"):
            snapshots.newest_good()


def test_a_manifest_cannot_point_outside(snapshots: Snapshots, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    path = snapshots.publish(1, write, {})
    (path / "a.bin").unlink()
    (path / "a.bin").symlink_to(secret)
    assert "not a regular file" in verify(path)[1][0]
    text = (path / "manifest.json").read_text().replace("b.bin", "../secret")
    (path / "manifest.json").write_text(text)
    assert verify(path)[1]


def test_leftovers_of_a_crash_go_with_the_next_save(snapshots: Snapshots) -> None:
    snapshots.publish(1, write, {})
    (snapshots.directory / ".saving-step_00000002-dead").mkdir()
    snapshots.publish(2, write, {})
    assert names(snapshots) == ["step_00000001", "step_00000002"]
    assert json.loads((snapshots.directory / "step_00000002/manifest.json").read_text())["files"]
