"""Checkpoints are published completely or not at all, and damage is detected."""

import json
import random
from pathlib import Path

import pytest
import torch

from {{ cookiecutter.package_name }}.checkpoint.manifest import CheckpointError, verify
from {{ cookiecutter.package_name }}.checkpoint.publish import Publisher, RetentionConfig
from {{ cookiecutter.package_name }}.checkpoint.reader import OneFile
from {{ cookiecutter.package_name }}.distributed import Group


def write(directory: Path) -> list[str]:
    """Write two files, as a rank does, and return their names."""
    (directory / "a.bin").write_bytes(bytes(range(256)) * 9)
    (directory / "b.bin").write_bytes(b"weights")
    return ["a.bin", "b.bin"]


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(tmp_path / "checkpoints", RetentionConfig(keep=2, keep_every=5), Group())


def names(publisher: Publisher) -> list[str]:
    return sorted(path.name for path in publisher.directory.iterdir())


def test_what_is_published_verifies(publisher: Publisher) -> None:
    """The manifest has the step and the given facts, and a restore finds the checkpoint."""
    path = publisher.publish(7, write, {"samples": 56})
    manifest, problems = verify(path)
    assert not problems
    assert (manifest["step"], manifest["samples"]) == (7, 56)
    assert publisher.newest_good()[0] == path


def test_a_save_that_fails_leaves_nothing(publisher: Publisher) -> None:
    """The files of the failed save are removed, and the checkpoint of step 1 stays."""
    publisher.publish(1, write, {})

    def fail(directory: Path) -> list[str]:
        write(directory)
        raise OSError("disk full")

    with pytest.raises(CheckpointError, match="disk full"):
        publisher.publish(2, fail, {})
    assert names(publisher) == ["step_00000001"]


def test_the_newest_the_best_and_some_for_good_are_kept(publisher: Publisher) -> None:
    """Steps 6 and 7 are the newest two, step 2 has the lowest loss, step 5 is a multiple of 5."""
    for step, loss in [(1, 0.9), (2, 0.1), (5, 0.5), (6, None), (7, None)]:
        publisher.publish(step, write, {"validation_loss": loss})
    assert names(publisher) == [f"step_0000000{step}" for step in (2, 5, 6, 7)]


@pytest.mark.parametrize("name", ["a.bin", "b.bin", "manifest.json"])
def test_every_kind_of_damage_is_found(publisher: Publisher, name: str) -> None:
    """A file may be too short, too long, empty or missing, or differ in any single bit."""
    path = publisher.publish(1, write, {}) / name
    good = path.read_bytes()
    kinds = [good[:-1], good + b"\0", b""]
    # Flip 40 bits of the file, one at a time.
    for bit in random.Random(0).sample(range(len(good) * 8), 40):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        kinds.append(flipped)
    for damaged in kinds:
        path.write_bytes(damaged)
        assert verify(path.parent)[1], damaged
    path.unlink()
    assert verify(path.parent)[1]
    # The original file is accepted again.
    path.write_bytes(good)
    assert not verify(path.parent)[1]


def test_a_damaged_newest_is_set_aside(publisher: Publisher) -> None:
    """A restore renames it and returns the checkpoint before; its step can be saved again."""
    good, bad = publisher.publish(1, write, {}), publisher.publish(2, write, {})
    # The size is that of "weights", so only the hash differs.
    (bad / "b.bin").write_bytes(b"weighty")
    assert publisher.newest_good()[0] == good
    assert names(publisher) == ["step_00000001", "step_00000002.damaged-1"]
    publisher.publish(2, write, {})
    assert publisher.newest_good()[0] == bad


def test_only_damaged_ones_are_no_fresh_start(publisher: Publisher) -> None:
    """If all checkpoints are damaged, a restore asks for --fresh and does not start at step 0."""
    (publisher.publish(1, write, {}) / "a.bin").unlink()
    # The first restore has renamed the damaged checkpoint, but the second one must not forget it.
    for _ in range(2):
        with pytest.raises(CheckpointError, match="--fresh"):
            publisher.newest_good()


def test_a_manifest_cannot_point_outside(publisher: Publisher, tmp_path: Path) -> None:
    """Neither a link nor a path in the manifest leads to files outside of the checkpoint."""
    secret = tmp_path / "secret"
    secret.write_text("x")
    path = publisher.publish(1, write, {})
    (path / "a.bin").unlink()
    (path / "a.bin").symlink_to(secret)
    assert "not a regular file" in verify(path)[1][0]
    text = (path / "manifest.json").read_text().replace("b.bin", "../secret")
    (path / "manifest.json").write_text(text)
    assert verify(path)[1]


def test_a_checkpoint_has_the_name_of_its_step(publisher: Publisher) -> None:
    """A checkpoint of step 1 that is renamed to step 2 is damaged, and the problem says so."""
    path = publisher.publish(1, write, {})
    assert "step_00000001" in verify(path.rename(path.with_name("step_00000002")))[1][0]


def test_leftovers_of_a_crash_go_with_the_next_save(publisher: Publisher) -> None:
    """The next save removes the folder of a save that a crash has interrupted."""
    publisher.publish(1, write, {})
    (publisher.directory / ".saving-step_00000002-dead").mkdir()
    publisher.publish(2, write, {})
    assert names(publisher) == ["step_00000001", "step_00000002"]
    assert json.loads((publisher.directory / "step_00000002/manifest.json").read_text())["files"]


def test_no_code_from_a_file_runs(tmp_path: Path) -> None:
    """A pickle can name any function to call when it is loaded: here one that creates a file."""

    class Attack:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    torch.save({"weight": Attack()}, tmp_path / "attack.pt")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        OneFile(tmp_path / "attack.pt")
    assert not (tmp_path / "executed").exists()
