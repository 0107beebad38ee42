"""The part on what breaks first of the page of scaling, as `planning` and `meeting` measured it."""

import json
from pathlib import Path
from typing import Any

from .planning import WHOLE, extrapolated, growth

Rows = list[dict[str, Any]]
SHOWN = (64, 1024, 10_240)
CPU = "_cpu_seconds"
STATE = {  # what grows with ranks and with tensors
    "plan" + CPU: "rank 0 merges the plans of all ranks, s",
    "plan_again" + CPU: "each rank checks that its plan has not changed, s",
    "check" + CPU: "rank 0 checks that the shards cover each tensor, s",
    "gather_bytes": "size of the plans that rank 0 gathers, MB",
    "index" + CPU: "rank 0 pickles and writes the index (`.metadata`), s",
    "index_bytes": "size of the index, MB",
    "peak_bytes": "peak memory of rank 0, MB",
    "index_read" + CPU: "each rank reads and checks the index, s",
    "load" + CPU: "each rank plans its reads, s",
}
FILES = {  # what grows with files alone
    "manifest_bytes": "size of the manifest, MB",
    "manifest_write" + CPU: "rank 0 writes the manifest, s",
    "manifest_read" + CPU: "a rank reads and checks the manifest, s",
    "create" + CPU: "all ranks together create the files, s",
    "list" + CPU: "one process lists the directory, s",
    "verify" + CPU: "one process opens and verifies all files (64 bytes each), s",
    "prune" + CPU: "rank 0 looks up the sizes of the files, s",
}
UNEVEN = ("create" + CPU,)  # the file system's doing more than ours
OWN = 4  # files that a group keeps open beside its connections
MEETING = {
    "server" + CPU: "the store serves the creation of two process groups, s",
    "group" + CPU: "a rank creates a `Group`, s",
    "connections": "connections of a rank per `Group`",
    "first_connections": "connections of rank 0 per `Group`",
    "gather" + CPU: "`gather` of 100 bytes from each rank, s",
    "broadcast" + CPU: "`broadcast`, s",
    "together" + CPU: "end of a `together` block, s",
    "word" + CPU: "control word of a step, s",
}
WAYS = {
    "all at once": "If gloo connects all ranks at once:",
    "as needed": "If gloo connects ranks as needed, as a project does from 128 ranks on:",
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
    block = [
        "One block with FSDP, measured:",
        "",
        f"| what | {' | '.join(f'{n:,} ranks' for n in SHOWN)} | growth |",
        f"|{'---|' * 5}",
    ]
    model = [
        "The whole model, extrapolated:",
        "",
        f"| what | {' | '.join(f'FSDP, {n:,} ranks' for n in SHOWN[1:])} "
        f"| HSDP, {SHOWN[-1]:,} ranks |",
        f"|{'---|' * 4}",
    ]
    for key, name in STATE.items():
        measured = [figure(at(sharded, ranks)[key], key) for ranks in SHOWN]
        had = [row for row in planning["ways"]["FSDP"] if key in row]
        if len(had) < len(sharded):
            measured[-1] = f"*{measured[-1]}*"
        law = f"ranks^{growth(had, key):.2f}" if key != "peak_bytes" else ""
        far = [f"*{figure(whole(planning, at(sharded, n), key), key)}*" for n in SHOWN[1:]]
        copies = f"*{figure(replicated_whole(planning, key), key)}*"
        block.append(f"| {' | '.join([name, *measured, law])} |")
        model.append(f"| {' | '.join([name, *far, copies])} |")
    return [*block, "", *model]


def files_table(planning: dict[str, Any]) -> list[str]:
    """What depends on the number of files alone."""
    rows = planning["ways"]["FSDP"]
    lines = [
        f"| what | {' | '.join(f'{n:,} ranks' for n in SHOWN)} | growth |",
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
    lines: list[str] = []
    for way, found in meeting["groups"].items():
        heads = [f"{n:,} ranks" for n in sizes], [f"{n:,} ranks" for n in SHOWN[1:]]
        lines += [
            *([""] if lines else []),
            WAYS[way],
            "",
            f"| what | {' | '.join(heads[0])} | growth | {' | '.join(heads[1])} |",
            f"|{'---|' * 6}",
        ]
        for key, name in MEETING.items():
            own = OWN if "connections" in key else 0
            rows = [{**row, key: row[key] - own} for row in found]
            measured = [figure(at(rows, ranks)[key], key) for ranks in sizes]
            far = [f"*{figure(extrapolated(rows, key, ranks), key)}*" for ranks in SHOWN[1:]]
            law = f"ranks^{growth(rows, key):.2f}"
            lines.append(f"| {' | '.join([name, *measured, law, *far])} |")
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
        "planning_date": planning["date"],
        "meeting_command": meeting["command"],
        "meeting_date": meeting["date"],
        "tensors": str(planning["settings"]["tensors"]),
        "repeats": str(planning["settings"]["repeats"]),
        "whole": str(WHOLE),
        "cpu": planning["machine"]["cpu"],
        "cores": str(planning["machine"]["cores"]),
        "load": figure(planning["machine"]["load_before"], ""),
        "system": planning["machine"]["file_system"],
        "torch": planning["versions"]["torch"],
        "variation": f"{100 * variation(planning):.0f} %",
        "clients": f"{store[-1]['ranks']:,}",
        "store": figure(store[-1]["server" + CPU], ""),
        "store_law": f"{growth(store, 'server' + CPU):.2f}",
        "file_bytes": figure(far[SHOWN[-1]]["manifest_bytes"] / SHOWN[-1], ""),
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
