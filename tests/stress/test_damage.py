"""Damage is found, and the program that says so would notice if it were not."""

import shutil
from pathlib import Path

import pytest

from tests.stress import damage
from tests.stress.common import Findings


def test_damage_is_found_and_so_would_be_its_oversight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = damage.saved(tmp_path)
    findings = Findings(True, tmp_path)
    damage.probe(findings, targets)
    damage.damage_base(findings)
    for tally in findings.tallies:
        assert tally.tried and not tally.violations, tally.promise

    def broken(*names: str) -> set[str]:
        found = Findings(True, tmp_path)
        damage.probe(found, targets[:1])
        return {tally.promise for tally in found.tallies if tally.violations}

    manifest = targets[0].manifest
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "check_file", lambda path, entry: None)
        assert {damage.FOUND, damage.FOUND + ": a flipped bit"} <= broken()
    with monkeypatch.context() as patch:
        patch.setattr(
            "damage_torch_save.checkpoint.publish.Publisher.set_aside", lambda self, path: path
        )
        assert {damage.RESUMED, damage.NO_FRESH_START} <= broken()
    with monkeypatch.context() as patch:
        patch.setattr(
            "damage_torch_save.checkpoint.base.check_base",
            lambda manifest, given, run_dir, group: manifest,
        )
        shutil.rmtree(tmp_path / "with_base")
        found = Findings(True, tmp_path)
        damage.damage_base(found)
        assert [tally.promise for tally in found.tallies if tally.violations] == [damage.BASE]
