"""The part on what breaks first of the page of scaling, as `planning` and `meeting` measured it."""

import json
from pathlib import Path
from typing import Any

from .planning import WHOLE, extrapolated, growth

Rows = list[dict[str, Any]]
SHOWN = (64, 1024, 10_240)
CPU = "_cpu_seconds"
STATE = {  # what grows with ranks and with tensors
    "plan" + CPU: "index made of what all ranks wrote, on rank 0, s",
    "plan_again" + CPU: "… when nothing has changed, on every rank, s",
    "check" + CPU: "check that parts make up each tensor, on rank 0, s",
    "gather_bytes": "plans, gathered on rank 0, MB",
    "index" + CPU: "index (`.metadata`) pickled and written, on rank 0, s",
    "index_bytes": "index, MB",
    "peak_bytes": "memory of rank 0's process at most, MB",
    "index_read" + CPU: "index read and checked, on every rank, s",
    "load" + CPU: "what to read from where, on every rank, s",
}
FILES = {  # what grows with files alone
    "manifest_bytes": "manifest, MB",
    "manifest_write" + CPU: "manifest composed and sealed, on rank 0, s",
    "manifest_read" + CPU: "manifest read and checked, s",
    "create" + CPU: "files made, by all ranks together, s",
    "list" + CPU: "their directory listed, once, s",
    "verify" + CPU: "files opened and checked (64 bytes each), by one process, s",
    "prune" + CPU: "sizes of one checkpoint's files looked up, on rank 0, s",
}
UNEVEN = ("create" + CPU,)  # the file system's doing more than ours
OWN = 4  # files that a group keeps open beside its connections
MEETING = {
    "server" + CPU: "store, for the job's group and one `Group`, s",
    "group" + CPU: "`Group` made, each rank, s",
    "connections": "connections of a `Group`, each rank",
    "first_connections": "… rank 0",
    "gather" + CPU: "`gather` of 100 bytes from each, each rank, s",
    "broadcast" + CPU: "`broadcast`, each rank, s",
    "together" + CPU: "end of a `together` block, each rank, s",
    "word" + CPU: "control word, each rank, s",
}


def load(results: Path, name: str) -> dict[str, Any]:
    """A result."""
    return json.loads((results / f"{name}.json").read_text("utf-8"))


def figure(value: float, key: str) -> str:
    """Two digits; bytes as MB."""
    value = value / 1e6 if key.endswith("_bytes") else value
    if value >= 99.5:
        return f"{float(f'{value:.2g}'):,.0f}"
    return f"{float(f'{value:.2g}'):.6f}".rstrip("0").rstrip(".")


def at(rows: Rows, ranks: int) -> dict[str, Any]:
    """What was measured at so many ranks."""
    return next(row for row in rows if row["ranks"] == ranks)


def whole(planning: dict[str, Any], row: dict[str, Any], key: str) -> float:
    """A figure of the block that was measured, for the whole model: by the law of the blocks."""
    rows = planning["blocks"]
    if key == "peak_bytes":  # most of a small one is torch itself
        base = planning["ways"]["FSDP"][0][key]
        above = [{**it, key: max(it[key] - base, 1)} for it in rows]
        return base + (row[key] - base) * WHOLE ** growth(above, key, "blocks")
    return row[key] * WHOLE ** growth(rows, key, "blocks")


def replicated_whole(planning: dict[str, Any], key: str, ranks: int = SHOWN[-1]) -> float:
    """The same under HSDP, where tensors are cut as on one group alone."""
    sharded, replicated = rows_of(planning)
    group = at(sharded, planning["settings"]["group"])
    return extrapolated(replicated, key, ranks) + whole(planning, group, key) - group[key]


def rows_of(planning: dict[str, Any]) -> tuple[Rows, Rows]:
    """FSDP's and HSDP's; what was left out with the most ranks, as its law gives it from fewer."""
    ways = []
    for rows in planning["ways"].values():
        key = "check" + CPU
        had = [row for row in rows if key in row]
        ways.append([{key: extrapolated(had, key, row["ranks"]), **row} for row in rows])
    return ways[0], ways[1]


def state_table(planning: dict[str, Any]) -> list[str]:
    """Saving and restoring, by ranks; and how HSDP changes it."""
    sharded, _ = rows_of(planning)
    lines = [
        f"| FSDP, one block | {' | '.join(f'{n:,} ranks' for n in SHOWN)} | grows as | the whole "
        f"model: {' | '.join(f'{n:,} ranks' for n in SHOWN[1:])} | HSDP, {SHOWN[-1]:,} ranks |",
        f"|{'---|' * 8}",
    ]
    for key, name in STATE.items():
        measured = [figure(at(sharded, ranks)[key], key) for ranks in SHOWN]
        had = [row for row in planning["ways"]["FSDP"] if key in row]
        if len(had) < len(sharded):
            measured[-1] = f"*{measured[-1]}*"
        law = f"ranks^{growth(had, key):.2f}" if key != "peak_bytes" else ""
        far = [f"*{figure(whole(planning, at(sharded, n), key), key)}*" for n in SHOWN[1:]]
        copies = f"*{figure(replicated_whole(planning, key), key)}*"
        lines.append(f"| {' | '.join([name, *measured, law, *far, copies])} |")
    return lines


def files_table(planning: dict[str, Any]) -> list[str]:
    """What depends on the number of files alone."""
    rows = planning["ways"]["FSDP"]
    lines = [
        f"| one file of each rank | {' | '.join(f'{n:,} ranks' for n in SHOWN)} | grows as |",
        f"|{'---|' * 5}",
    ]
    for key, name in FILES.items():
        measured = [figure(at(rows, ranks)[key], key) for ranks in SHOWN]
        law = f"ranks^{growth(rows, key):.2f}" if key not in UNEVEN else ""
        lines.append(f"| {' | '.join([name, *measured, law])} |")
    return lines


def meeting_table(meeting: dict[str, Any]) -> list[str]:
    """Both ways that gloo can connect, and what they would take with more ranks."""
    sizes = (64, 256)
    lines = [
        f"| gloo | connects | {' | '.join(f'{n:,} ranks' for n in sizes)} | grows as "
        f"| {' | '.join(f'{n:,} ranks' for n in SHOWN[1:])} |",
        f"|{'---|' * 7}",
    ]
    for key, name in MEETING.items():
        for way, found in meeting["groups"].items():
            own = OWN if "connections" in key else 0
            rows = [{**row, key: row[key] - own} for row in found]
            measured = [figure(at(rows, ranks)[key], key) for ranks in sizes]
            far = [f"*{figure(extrapolated(rows, key, ranks), key)}*" for ranks in SHOWN[1:]]
            law = f"ranks^{growth(rows, key):.2f}"
            lines.append(f"| {' | '.join([name, way, *measured, law, *far])} |")
    return lines


def limits(results: Path) -> dict[str, str]:
    """What the page's text asks for, by the names it has there."""
    planning, meeting = load(results, "planning"), load(results, "meeting")
    sharded, _ = rows_of(planning)
    far = {n: at(sharded, n) for n in SHOWN[1:]}
    groups, store = meeting["groups"], meeting["store"]
    found = {
        "state": "\n".join(state_table(planning)),
        "files": "\n".join(files_table(planning)),
        "meeting": "\n".join(meeting_table(meeting)),
        "planning_command": planning["command"],
        "meeting_command": meeting["command"],
        "tensors": str(planning["settings"]["tensors"]),
        "repeats": str(planning["settings"]["repeats"]),
        "whole": str(WHOLE),
        "cpu": planning["machine"]["cpu"],
        "cores": str(planning["machine"]["cores"]),
        "load": figure(planning["machine"]["load_before"], ""),
        "system": planning["machine"]["file_system"],
        "torch": planning["versions"]["torch"],
        "variation": f"{variation(planning):.0%}",
        "clients": f"{store[-1]['ranks']:,}",
        "store": figure(store[-1]["server" + CPU], ""),
        "store_law": f"{growth(store, 'server' + CPU):.2f}",
        "file_bytes": figure(far[SHOWN[-1]]["manifest_bytes"] / SHOWN[-1], ""),
        "list_all": figure(SHOWN[-1] * far[SHOWN[-1]]["list" + CPU], ""),
        "hsdp_plan": figure(replicated_whole(planning, "plan" + CPU), ""),
    }
    costs = (("plan", "plan" + CPU), ("check", "check" + CPU), ("index", "index" + CPU))
    for name, key in (*costs, ("bytes", "index_bytes")):
        for n, label in zip(SHOWN[1:], ("1", "10"), strict=True):
            found[f"{name}_{label}"] = figure(whole(planning, far[n], key), key)
    for n, label in zip(SHOWN[1:], ("1", "10"), strict=True):
        found[f"read_{label}"] = figure(whole(planning, far[n], "index_read" + CPU), "")
        found[f"memory_{label}"] = figure(whole(planning, far[n], "peak_bytes") / 1e9, "")
        for way, word in (("all at once", "mesh"), ("as needed", "lazy")):
            seconds = extrapolated(groups[way], "server" + CPU, n)
            found[f"{word}_{label}"] = figure(seconds, "")
    return found


def variation(planning: dict[str, Any]) -> float:
    """The largest (most - least) / median of CPU times that matter, at SHOWN's larger sizes."""
    rows = [row for row in planning["ways"]["FSDP"] if row["ranks"] in SHOWN[1:]]
    spreads = (
        (row["range"][key][1] - row["range"][key][0]) / row[key]
        for row in rows
        for key in (*STATE, *FILES)
        if key.endswith(CPU) and key not in UNEVEN and row.get(key, 0) > 0.01
    )
    return max(spreads)
