"""A world that changes leaves samples and losses as they are; what would not is found out."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stress import elastic
from tests.stress.common import Findings


def judged(tmp_path: Path, *trials: elastic.Trial) -> Findings:
    """What is found in a trial, beside a run in peace."""
    findings = Findings(True, tmp_path)
    elastic.judge(findings, *trials)
    return findings


def broken(findings: Findings) -> set[str]:
    return {tally.promise for tally in findings.tallies if tally.violations}


def test_machines_come_and_go_and_a_wrong_order_would_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = elastic.prepare(tmp_path, "fsdp_dcp", elastic.TASKS[0])
    peace, trial = elastic.variant(source, "fsdp_dcp", elastic.BOUNDED, 140, {})
    findings = judged(tmp_path, trial, peace)
    assert {tally.promise for tally in findings.tallies} == {
        *(elastic.SAME, elastic.ONCE, elastic.WORLD, elastic.LOST, elastic.FREE),
        *(elastic.LOSSES, elastic.ORPHANS, elastic.FROZEN),
    }
    assert all(tally.tried for tally in findings.tallies) and not broken(findings)
    assert [start.size for start in elastic.starts(trial.records)] == [1, 2, 1]

    # One more step than was saved, of the first start; many more, of the second.
    first, second = (file_of(trial, size) for size in (1, 2))
    for file, further, promise in ((first, 1, elastic.FREE), (second, 30, elastic.LOST)):
        with undone(file):
            last = json.loads(file.read_text().splitlines()[-1])
            last["step"] += further
            with file.open("a") as more:
                print(json.dumps(last), file=more)
            assert promise in broken(judged(tmp_path, trial, peace))
    with undone(first):  # one sample for another
        lines = list(map(json.loads, first.read_text().splitlines()))
        lines[2]["ids"][0] = lines[3]["ids"][0]
        first.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert broken(judged(tmp_path, trial, peace)) == {elastic.SAME, elastic.ONCE}

    # The order of samples depends on how many ranks there are said to be.
    sampling = trial.source / trial.name / "sampling.py"
    sound, text = "stream_key(self.seed, *self.purpose, epoch)", sampling.read_text()
    assert sound in text
    worse = sound.replace("seed,", 'seed + int(os.environ.get("WORLD_SIZE", 1)) - 1,')
    sampling.write_text(text.replace(sound, worse).replace("import", "import os\nimport", 1))
    other = elastic.Trial(trial.name, trial.source, tmp_path / "other", 140)
    monkeypatch.setenv("WORLD_SIZE", "2")
    other.run(elastic.PEACE)
    assert broken(judged(tmp_path, other, peace)) == {elastic.SAME, elastic.LOSSES}


def file_of(trial: elastic.Trial, size: int) -> Path:
    """What rank 0 wrote down in the first start on so many ranks."""
    files = {path: json.loads(path.read_text().splitlines()[0]) for path in trial.records.iterdir()}
    of_size = [path for path in files if files[path]["size"] == size and "-0-" in path.name]
    return min(of_size, key=lambda path: files[path]["step"])


@contextlib.contextmanager
def undone(file: Path) -> Iterator[None]:
    """Put a file back as it was."""
    content = file.read_bytes()
    yield
    file.write_bytes(content)
