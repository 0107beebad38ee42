"""A part of the crash points of a save, and of the code that is robbed of its precautions."""

import warnings
from pathlib import Path

import pytest

from tests.stress.common import Findings
from tests.stress.crash_points import BREAKAGES, NOTICED, attempt, cannot
from tests.stress.restoring import PROMISES


@pytest.fixture(scope="module", autouse=True)
def _recordable() -> None:
    if reason := cannot():
        warnings.warn(f"CRASH POINTS ARE NOT TRIED: {reason}", stacklevel=1)
        pytest.skip(f"CRASH POINTS ARE NOT TRIED: {reason}")


def test_restores_from_every_kind_of_crash_and_notices_what_is_missing(tmp_path: Path) -> None:
    findings = Findings(bounded=True, folder=tmp_path)
    attempt(findings)
    tallies = {tally.promise: tally for tally in findings.tallies}
    assert {*PROMISES, NOTICED} == tallies.keys()
    assert not [problem for tally in tallies.values() for problem in tally.violations]
    assert all(tallies[promise].tried > 200 for promise in PROMISES)
    assert tallies[NOTICED].tried == len(BREAKAGES)
