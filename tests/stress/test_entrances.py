"""A few mutants of each file that commands read, and code that is broken on purpose found out."""

import json
from pathlib import Path

from tests.conftest import run_module
from tests.stress.entrances import BREAKS, ENTRANCES, FEW, NOTICED, OUTSIDE, PROMISE


def test_no_file_that_is_read_brings_a_command_down(tmp_path: Path) -> None:
    run_module("tests.stress.entrances", "--bounded", "--out", str(tmp_path))
    found = json.loads((tmp_path / "entrances.json").read_text("utf-8"))
    tried = {tally["promise"]: tally["tried"] for tally in found["tallies"]}
    assert not [problem for tally in found["tallies"] for problem in tally["violations"]]
    assert tried == {
        **{PROMISE.format(entrance.name): FEW for entrance in ENTRANCES},
        OUTSIDE: FEW * len(ENTRANCES),
        NOTICED: len(BREAKS),
    }
    assert found["figures"]["commands: refused"] and found["figures"]["commands: done"]
