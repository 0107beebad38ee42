"""Hostile files do nothing, and the program that says so would notice if they did."""

from pathlib import Path

from tests.stress import hostile_files
from tests.stress.common import Findings


def test_hostile_files_do_nothing_and_would_be_noticed(tmp_path: Path) -> None:
    paths = hostile_files.saved(tmp_path)
    findings = Findings(True, tmp_path)
    hostile_files.probe(findings, paths, mutants=4)
    for tally in findings.tallies:
        assert tally.tried and not tally.violations, tally.promise

    safe = "IndexUnpickler(file).load()"
    (module,) = (module for path in paths for module in path.glob("*/checkpoint/dcp.py"))
    # As DCP itself reads its index.
    module.write_text(module.read_text().replace(safe, "pickle.load(file)"))
    broken = Findings(True, tmp_path)
    hostile_files.probe(broken, paths, mutants=0, stop=120)
    executed = next(it for it in broken.tallies if it.promise == hostile_files.EXECUTED).violations
    assert executed
