"""Where the time of traced steps went, according to the file that torch.profiler writes.

The file is JSON in Chrome's trace event format: complete events ("ph": "X") have a category, a
name, a thread, a start and a duration in microseconds. Each moment of a step belongs to one part:
of all events that cover it, the one that comes first in ON_GPU or ON_CPU decides; a moment without
any is the host's. So the parts add up to the step, and communication is only what no kernel hides.
"""

import gzip
import json
import re
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..sampling import WAITING

PARTS = ("data", "host", "kernels", "communication", "copies")
HOST = PARTS.index("host")
# Events, as torch 2.13 names them: category, name.
STEP = "user_annotation ProfilerStep#"  # a step, on the thread that trains
COMPILATION = "_compile.compile_inner (dynamo_timed)"  # the compiler compiled something
COMPILED = "## Call CompiledFxGraph"  # compiled code, an annotation
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # what a GPU did and when
ELSEWHERE = re.compile(r"(kernel|gpu_memcpy|gpu_memset) |\w+ (gloo|mpi|ucc):")  # on any thread
# Parts, and the category and name of the events that belong to them.
ON_GPU = (
    # NCCL's collectives are kernels, too.
    ("kernels", "kernel (?!.*(?i:nccl|nvshmem|multimem))|gpu_memset |gpu_memcpy .*DtoD"),
    ("communication", "kernel "),
    ("copies", "gpu_memcpy "),
    ("data", f"user_annotation {WAITING}$"),  # the loader at work, or waiting for its workers
)
ON_CPU = (
    ("data", f"user_annotation {WAITING}$"),
    # Also inside an operator: sharded tensors wait in `_c10d_functional::wait_tensor`.
    ("communication", r"cpu_op _?c10d(_functional)?(_autograd)?::"),
    # Nodes of autograd run operators, and hooks that may wait.
    ("kernels", rf"cpu_op (?!(torch::)?autograd::).*::|\w+ {COMPILED}"),
    # `gloo:all_reduce` is on a thread of gloo's, from the call to the end of the collective. The
    # training thread waits for it inside no operator.
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
    operators: Sequence[dict[str, Any]] = ()
    """Name, self_seconds, calls and share of each, the largest first, by torch's own account."""

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
    events = [e | {"end": e["ts"] + e["dur"], "text": f"{e['cat']} {e['name']}"} for e in events]
    steps = sorted((e for e in events if e["text"].startswith(STEP)), key=itemgetter("ts"))
    if not steps:
        raise ValueError("it holds no step")
    start, end = steps[0]["ts"], max(step["end"] for step in steps)
    events = [event for event in events if event["end"] > start and event["ts"] < end]
    thread = steps[0]["pid"], steps[0]["tid"]
    seen = [e for e in events if (e["pid"], e["tid"]) == thread or ELSEWHERE.match(e["text"])]
    device = any(event["cat"] in DEVICE for event in events)
    claims = [  # the weakest first; an event may be there more than once
        (part, event)
        for part, pattern in reversed(ON_GPU if device else ON_CPU)
        for event in seen
        if re.match(pattern, event["text"])
    ]
    seconds, gaps = divide(steps, claims)
    compilations = sum(event["name"] == COMPILATION for event in events)
    gap = typical_gap(gaps, [event for part, event in claims if part != "data"])
    return Breakdown(seconds, compilations, device, gap)


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


def spans(events: Iterable[Event]) -> np.ndarray:
    """Starts and ends, [events, 2], in microseconds."""
    return np.array([(e["ts"], e["end"]) for e in events], dtype=float).reshape(-1, 2)
