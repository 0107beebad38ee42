"""Saves go wrong in many ways and runs go on or stop as asked; what would break this is noticed."""

import json
import warnings
from pathlib import Path

import pytest

from tests.conftest import run_module
from tests.stress import fault_cases, fault_injection
from tests.stress.faulty_saves import COSTLESS, GOES_ON, SAID, TIDY, WHOLE
from tests.stress.mutants import NOTICED
from tests.stress.resource_mutants import BREAKS


def test_troubles_of_saves_are_told_and_survived(tmp_path: Path) -> None:
    if reason := fault_injection.cannot():
        warnings.warn(f"FAULTS ARE NOT TRIED: {reason}", stacklevel=1)
        pytest.skip(f"FAULTS ARE NOT TRIED: {reason}")
    run_module("tests.stress.resources", "--bounded", "--out", str(tmp_path))
    found = json.loads((tmp_path / "resources.json").read_text("utf-8"))
    tried = {tally["promise"]: tally["tried"] for tally in found["tallies"]}
    assert not [problem for tally in found["tallies"] for problem in tally["violations"]]
    more = {
        fault_cases.STOPS,
        fault_cases.STARTS,
        fault_cases.LOGS,
        fault_cases.SLOW,
        fault_cases.SAID_SLOW,
        fault_cases.LEVEL,
        fault_cases.FILLED,  # where file systems may be mounted
        COSTLESS,
    }
    more |= {WHOLE, SAID, TIDY, GOES_ON, NOTICED, fault_cases.FLAT}
    assert tried.keys() | {fault_cases.FILLED} == more
    assert all(tried.values())
    assert tried[NOTICED] == len(range(0, len(BREAKS), 4))
    for name in (figure for figure in found["figures"] if "not tried" in figure):
        warnings.warn(name, stacklevel=1)
