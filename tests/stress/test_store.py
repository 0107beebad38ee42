"""A store that loses an answer or does not answer a read; what would not hold is found."""

import json
from pathlib import Path

from tests.conftest import run_module
from tests.stress import store_cases as cases
from tests.stress.mutants import NOTICED


def test_runs_survive_their_store(tmp_path: Path) -> None:
    run_module("tests.stress.store", "--bounded", "--out", str(tmp_path))
    found = json.loads((tmp_path / "store.json").read_text("utf-8"))
    tried = {tally["promise"]: tally["tried"] for tally in found["tallies"]}
    assert not [problem for tally in found["tallies"] for problem in tally["violations"]]
    ours = {cases.PASSED, cases.ENDED, cases.THERE, cases.TIDY, cases.IN_TIME, NOTICED}
    assert tried.keys() == ours
    assert all(tried.values())
