"""`make mutants` breaks what it says: each place once, each in another way."""

import ast

from scripts.mutants import edits, mutate

MODULE = """
class SomeConfig:
    size: int = 3

def mean(values: list[int], least: int = 1) -> float:
    total = 0
    for value in values:
        if value >= least and not value % 2:
            total += value
            values.clear()
    log.info("%d", 3 + 4)
    if total < 0:
        raise ValueError(1 + 1)
    return total / len(values)
"""


def test_each_place_is_broken_once() -> None:
    count = len(list(edits(ast.parse(MODULE))))
    mutants = [mutate(MODULE, number) for number in range(count)]
    texts = {text for text, _ in mutants}
    assert len(texts) == count and ast.unparse(ast.parse(MODULE)) + "\n" not in texts
    for text in texts:
        compile(text, "mutant", "exec")
        assert "size: int = 3" in text and "log.info('%d', 3 + 4)" in text
    lines = MODULE.splitlines()
    assert all(facts["before"] == lines[facts["line"] - 1].strip() for _, facts in mutants)
    kinds = {facts["kind"] for _, facts in mutants}
    assert kinds == {"comparison", "operator", "constant", "condition", "removed"}
