"""A bounded kill storm: each parallelism, each way to save; breakages of promises found out."""

import json
from pathlib import Path

from tests.conftest import run_module
from tests.stress.kill_storm import FORKED
from tests.stress.kill_storm_mutants import BREAKS, IN_FULL, NOTICED
from tests.stress.kill_storm_pruning import KEPT
from tests.stress.storm import ENDS, LOST, NEWEST, ORPHANS, STOPPED, WHOLE


def test_killed_runs_end_as_if_nothing_had_been(tmp_path: Path) -> None:
    run_module("tests.stress.kill_storm", "--bounded", "--out", str(tmp_path))
    found = json.loads((tmp_path / "kill_storm.json").read_text("utf-8"))
    tried = {tally["promise"]: tally["tried"] for tally in found["tallies"]}
    assert not [problem for tally in found["tallies"] for problem in tally["violations"]]
    assert tried.keys() == {ENDS, LOST, NEWEST, ORPHANS, STOPPED, WHOLE, FORKED, KEPT, NOTICED}
    assert all(tried.values())
    assert tried[ORPHANS] == found["figures"]["kills"] >= 3
    assert tried[NOTICED] == len(BREAKS) - len(IN_FULL)
