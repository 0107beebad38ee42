"""Tables of results: a row for each thing measured, and columns with their units."""

import re
from dataclasses import dataclass, field
from typing import Any

Series = dict[str, dict[str, Any]]
UNITS = {"us": "µs", "us a step": "µs per step", "x": "ratio"}
# Names in the results, and plainer ones for the page.
WORDS = {
    "as rendered": "this template",
    "none": "eager",
    "whole on each rank": "whole model on each rank",
    "values built first": "values built before reading",
    "together": "all ranks",
    "the largest": "largest rank",
    "seconds": "time",
    "linear_cross_entropy": "torch's linear_cross_entropy",
    "blocked": "training blocked",
    "lost": "training time lost",
    "quiet step": "step before the save",
    "slowdown": "step during the upload / step before the save",
    "slowdown without a save": "the same without a save (noise)",
    "held up by a save": "blocked by a save",
    "slower by the bound": "slowdown by the limit",
    "without a bound": "libgomp's default (300,000)",
    "a rank is killed": "from a kill to the next step",
    "a plain start resumes": "from a start to the next step",
    "from kill to the next step": "from a kill to the next step",
    "profiler between its windows, of a step": "part of a step that the idle profiler takes",
    "to the last million": "to the start of the last million",
}
# Per topic, the part of a name that is a column: a prefix ("1 rank: …") or a suffix ("…: seek").
PREFIXES = {
    "save": ("1 rank", "2 ranks"),
    "restore": ("1 rank", "2 ranks"),
    "sharded_start": ("1 rank", "2 ranks", "4 ranks"),
    "workflow": ("language_model", "image_classifier"),
    "sft": ("ours", "SFTTrainer"),
}
SUFFIXES = {
    "loop": {"more": "difference from hand-written"},
    "sampler": {"seek": "seek", "an id": "each id", "memory": "memory"},
    "optimizer": {
        "bits per byte": "bits per byte",
        "training": "training",
        "bits per byte over AdamW's": "bits per byte minus AdamW's",
        "training, of AdamW's": "training / AdamW's",
    },
    "busy": {"alone": "without busy processes", "beside others": "with busy processes"},
    "loss": {"memory": "memory"},
    "startup": {"packages": "packages", "size": "size"},
    "gpu": {"tokens/s": "speed", "MFU": "MFU"},
}
FIRST = {"loop": "time", "loss": "time"}
# Saves took turns in a random order. The page groups them.
METHODS = ("dcp_async", "dcp", "dcp, again", "torch_save")
METHODS += ("plain torch.save", "Accelerate", "Lightning Fabric")


@dataclass
class Table:
    """One table: its columns with their units, and its rows."""

    units: dict[str, str] = field(default_factory=dict)
    rows: dict[str, Series] = field(default_factory=dict)

    def takes(self, cells: Series) -> bool:
        """Whether a row with these cells has columns of this table, in the same units."""
        shared = [name for name in cells if name in self.units]
        same = all(self.units[name] == cells[name]["unit"] for name in shared)
        return same and (bool(shared) or not self.units)

    def add(self, row: str, cells: Series) -> None:
        """Add a row."""
        for name, cell in cells.items():
            self.units[name] = cell["unit"]
        self.rows[row] = cells

    def lines(self, low: str, high: str) -> list[str]:
        """The table in Markdown; each cell with the interval from `low` to `high`."""
        counted = any(cell["n"] > 1 for cells in self.rows.values() for cell in cells.values())
        heads = ["what", *(self.head(name) for name in self.units)]
        if counted:
            heads.append("n")
        lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
        for row, cells in self.rows.items():
            shown = [plain(row), *(cell_text(cells.get(name), low, high) for name in self.units)]
            if counted:
                counts = dict.fromkeys(str(cell["n"]) for cell in cells.values())
                shown.append(", ".join(counts))
            lines.append(f"| {' | '.join(shown)} |")
        return lines

    def head(self, name: str) -> str:
        """The name of a column with its unit."""
        unit = UNITS.get(self.units[name], self.units[name])
        return f"{name}, {unit}" if unit and unit != name and unit != "bits" else name


def tables(topic: str, series: Series, low: str = "low", high: str = "high") -> list[str]:
    """All series of a topic in as few tables as their units allow."""
    merged: dict[tuple[str, int], Series] = {}
    names = sorted(series, key=by_method) if topic in ("save", "gpu") else [*series]
    for name in names:
        one = series[name]
        row, column = split(topic, name)
        # Series of one name but different units are in different tables.
        number = 0
        while column in merged.get((row, number), {}):
            number += 1
        merged.setdefault((row, number), {})[column] = one
    found: list[Table] = []
    for (row, _), cells in merged.items():
        fitting = [table for table in found if table.takes(cells)]
        if not fitting:
            fitting = [Table()]
            found += fitting
        fitting[0].add(row, cells)
    found = with_units_in_rows(found)
    lines: list[str] = []
    for table in found:
        lines += ["", *table.lines(low, high)] if lines else table.lines(low, high)
    return lines


def with_units_in_rows(found: list[Table]) -> list[Table]:
    """Put tables of a single number into one, whose rows name their units."""
    single = [table for table in found if len(table.rows) == 1 and [*table.units] == ["median"]]
    if len(single) < 2:
        return found
    together = Table({"median": ""})
    for table in single:
        for row, cells in table.rows.items():
            unit = table.units["median"]
            together.rows[f"{row}, {unit}" if unit else row] = cells
    return [*(table for table in found if table not in single), together]


def split(topic: str, name: str) -> tuple[str, str]:
    """The row and the column of a series."""
    for prefix in PREFIXES.get(topic, ()):
        if match := re.fullmatch(rf"{prefix}[:,] (.*)", name):
            return match[1], prefix
    for suffix, column in SUFFIXES.get(topic, {}).items():
        if match := re.fullmatch(rf"(.*)[:,] {re.escape(suffix)}", name):
            return match[1], column
    return name, FIRST.get(topic, "median")


def by_method(name: str) -> int:
    """The place of a series among those of saves; before them for any other one."""
    longest_first = "|".join(sorted(METHODS, key=len, reverse=True))
    found = re.search(rf"(?:^|: )({longest_first}), ", name)
    return METHODS.index(found[1]) if found else -1


def cell_text(one: dict[str, Any] | None, low: str, high: str) -> str:
    """The median, and its interval if there were several measurements."""
    if one is None:
        return ""
    text = number(one["median"])
    if number(one[low]) == number(one[high]):
        return text
    return f"{text} ({number(one[low])} … {number(one[high])})"


def plain(row: str) -> str:
    """A row's name in plain words."""
    if row in WORDS:
        return WORDS[row]
    # The longest names first: some contain others.
    for name in sorted(WORDS, key=len, reverse=True):
        row = re.sub(rf"(^|[:,] ){re.escape(name)}(?=$|[:,] )", rf"\1{WORDS[name]}", row)
    return row


def number(value: float) -> str:
    """Three digits, no exponents."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{float(f'{value:.3g}'):.6f}".rstrip("0").rstrip(".")
