"""Where the time of traced steps went, according to the file that torch.profiler writes.

It is JSON in Chrome's trace event format: complete events ("ph": "X") have a category, a name, a
thread, a start and a duration in microseconds. Those that are used, as torch 2.13 writes them:

- `ProfilerStep#n` (user_annotation): a step, on the thread that trains.
- `waiting for data` (user_annotation): the loader at work, or waiting for its workers.
- kernel, gpu_memcpy, gpu_memset: what a GPU did and when. NCCL's collectives are kernels.
- cpu_op: an operator or a node of autograd, on the thread that called it. Compiled code is an
  annotation, `## Call CompiledFxGraph …`.
- `gloo:all_reduce` and the like, on a thread of gloo's from the call to the end of the collective.
  The training thread waits for it inside no operator, or inside `_c10d_functional::wait_tensor`.
- `_compile.compile_inner (dynamo_timed)`: the compiler compiled something.

Each moment of a step belongs to one part: of all events that cover it, the one that comes first in
ON_GPU or ON_CPU decides; a moment without any is the host's. So the parts add up to the step, and
communication is only what no kernel hides.
"""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..sampling import WAITING

PARTS = ("data", "host", "kernels", "communication", "copies")
HOST = PARTS.index("host")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
ELSEWHERE = re.compile(r"(kernel|gpu_memcpy|gpu_memset) |\w+ (gloo|mpi|ucc):")  # any thread
COMPILED = "## Call CompiledFxGraph"
COMPILATION = "_compile.compile_inner (dynamo_timed)"
# Parts, and the category and name of the events that belong to them.
ON_GPU = (
    ("kernels", "kernel (?!.*(?i:nccl|nvshmem|multimem))|gpu_memset |gpu_memcpy .*DtoD"),
    ("communication", "kernel "),
    ("copies", "gpu_memcpy "),
    ("data", f"user_annotation {WAITING}$"),
)
ON_CPU = (
    ("data", f"user_annotation {WAITING}$"),
    # Also inside an operator, as on sharded tensors.
    ("communication", r"cpu_op _?c10d(_functional)?(_autograd)?::"),
    # Nodes of autograd run operators, and hooks that may wait.
    ("kernels", rf"cpu_op (?!(torch::)?autograd::).*::|\w+ {COMPILED}"),
    ("communication", r"\w+ (gloo|mpi|ucc):"),
)

Event = dict[str, Any]


class Breakdown(NamedTuple):
    """Where the time of the traced steps went."""

    seconds: np.ndarray
    """Of each step and part, [steps, parts] in the order of `PARTS`."""
    compilations: int
    device: bool
    """Whether the trace shows a GPU at work."""
    longest_gap: tuple[float, str, str]
    """Seconds in which the host kept everything waiting, and the operators before and after."""
    operators: list[dict[str, Any]]
    """Name, self_seconds, calls and share of each, the largest first. The time is that on the GPU
    if there is one, else on the CPU, without the operators that it called."""

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the parts in all steps together; they add up to 1."""
        parts = self.seconds.sum(axis=0)
        return dict(zip(PARTS, (parts / parts.sum()).tolist(), strict=True))


def read_trace(path: Path) -> list[Event]:
    """The events of a .json.gz that torch.profiler wrote."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def breakdown(events: list[Event]) -> Breakdown:
    """Divide the steps of a trace into `PARTS`; ValueError if it holds no step."""
    events = [
        event
        | {"end": event["ts"] + event["dur"], "text": f"{event['cat']} {event['name']}"}
        | {"id": event.get("args", {}).get("External id")}
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"]))
    ]
    steps = [e for e in events if e["text"].startswith("user_annotation ProfilerStep#")]
    if not steps:
        raise ValueError("it holds no step")
    start, end = steps[0]["ts"], max(event["end"] for event in steps)
    events = [event for event in events if event["end"] > start and event["ts"] < end]
    thread = steps[0]["pid"], steps[0]["tid"]
    on_thread = [event for event in events if (event["pid"], event["tid"]) == thread]
    seen = on_thread + [event for event in events if ELSEWHERE.match(event["text"])]
    device = any(event["cat"] in DEVICE for event in events)
    claims = [  # the weakest first; an event may be there more than once
        (part, event)
        for part, pattern in reversed(ON_GPU if device else ON_CPU)
        for event in seen
        if re.match(pattern, event["text"])
    ]
    seconds, gaps = divide(steps, claims)
    calls: dict[str, list[float]] = defaultdict(list)
    for name, own in device_calls(events) if device else host_calls(on_thread):
        calls[name].append(own / 1e6)
    operators = [
        {"name": name, "self_seconds": (total := sum(own)), "calls": len(own)}
        | {"share": float(total / seconds.sum())}
        for name, own in calls.items()
    ]
    return Breakdown(
        seconds,
        sum(event["name"] == COMPILATION for event in events),
        device,
        typical_gap(gaps, [event for part, event in claims if part != "data"]),
        sorted(operators, key=itemgetter("self_seconds"), reverse=True),
    )


def divide(
    steps: list[Event], claims: list[tuple[str, Event]]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The seconds of each step and part; of each step the host's intervals, in microseconds."""
    claimed = spans(event for _, event in claims)
    edges = np.unique(np.append(spans(steps), claimed))
    owner = np.full(len(edges) - 1, HOST)  # of the time from each edge to the next
    for (part, _), (first, last) in zip(claims, np.searchsorted(edges, claimed), strict=True):
        owner[first:last] = PARTS.index(part)
    seconds, gaps = np.zeros((len(steps), len(PARTS))), []
    for row, (first, last) in zip(seconds, np.searchsorted(edges, spans(steps)), strict=True):
        lengths = np.diff(edges[first : last + 1])
        row += np.bincount(owner[first:last], lengths, minlength=len(PARTS)) / 1e6
        idle = np.concatenate([[False], owner[first:last] == HOST, [False]])
        gaps.append(edges[first + np.flatnonzero(np.diff(idle))].reshape(-1, 2))
    return seconds, gaps


def typical_gap(gaps: list[np.ndarray], work: list[Event]) -> tuple[float, str, str]:
    """The median of the steps' longest gaps: what happened only once says nothing."""
    lengths = ([(end - start, start, end) for start, end in step.tolist()] for step in gaps)
    longest = sorted(max(step, default=(0.0, 0.0, 0.0)) for step in lengths)
    length, start, end = longest[len(longest) // 2]
    earlier = [event for event in work if event["end"] <= start + 1e-3]
    later = [event for event in work if event["ts"] >= end - 1e-3]
    after = max(earlier, key=itemgetter("end"))["name"] if earlier else "the first step's start"
    before = min(later, key=itemgetter("ts"))["name"] if later else "the last step's end"
    return length / 1e6, after, before


def device_calls(events: list[Event]) -> Iterator[tuple[str, float]]:
    """Operators and the microseconds of each kernel that they launched, found by "External id"."""
    launchers = {event["id"]: event["name"] for event in events if event["cat"] == "cpu_op"}
    for event in events:
        if event["cat"] in DEVICE:  # without a launcher: of a CUDA graph
            yield launchers.get(event["id"], event["name"]), event["dur"]


def host_calls(on_thread: list[Event]) -> Iterator[tuple[str, float]]:
    """Operators and the microseconds of each call, without what it called."""
    nested = [e for e in on_thread if e["cat"] in ("cpu_op", "user_annotation")]
    own = [event["dur"] for event in nested]
    callers: list[int] = []
    for i, event in enumerate(nested):
        while callers and nested[callers[-1]]["end"] <= event["ts"]:
            callers.pop()
        if callers:
            own[callers[-1]] -= event["dur"]
        callers.append(i)
    for event, microseconds in zip(nested, own, strict=True):
        if event["cat"] == "cpu_op" or event["name"].startswith(COMPILED):
            yield event["name"], microseconds


def spans(events: Iterable[Event]) -> np.ndarray:
    """Starts and ends, [events, 2], in microseconds."""
    return np.array([(e["ts"], e["end"]) for e in events], dtype=float).reshape(-1, 2)
