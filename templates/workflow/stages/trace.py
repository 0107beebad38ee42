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

Each moment of a step belongs to one part: of all events that cover it, the first in a fixed order
decides, and if none covers it, it is the host's. So the parts add up to the step, and communication
is only what no kernel hides.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..sampling import WAITING

PARTS = ("data", "host", "kernels", "communication", "copies")
HOST = PARTS.index("host")
STEP = re.compile("ProfilerStep#")
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
COLLECTIVE_KERNEL = re.compile("nccl|nvshmem|multimem", re.IGNORECASE)
COLLECTIVE = re.compile("(gloo|mpi|ucc):")  # on a thread of the backend's own
COLLECTIVE_CALL = re.compile("_?c10d(_functional)?(_autograd)?::")
WRAPPER = re.compile("autograd::|torch::autograd::")  # operators run inside, and hooks
COMPILED = "## Call CompiledFxGraph"
COMPILATION = "_compile.compile_inner (dynamo_timed)"

Event = dict[str, Any]
Claim = tuple[int, str, Event]
"""A rank, a part and an event: of all that cover a moment, the lowest rank decides its part."""


class TraceError(ValueError):
    """A file that is not a whole trace of steps."""


class Gap(NamedTuple):
    """A time in which the host kept everything waiting, and the operators around it."""

    seconds: float
    after: str
    before: str


class Operator(NamedTuple):
    """All calls of one operator within the traced steps."""

    name: str
    self_seconds: float
    """On the GPU if there is one, else on the CPU, without the operators that it called."""
    share: float
    calls: int


class Breakdown(NamedTuple):
    """Where the time of the traced steps went."""

    seconds: np.ndarray
    """Of each step and part, [steps, parts] in the order of `PARTS`."""
    compilations: int
    device: bool
    """Whether the trace shows a GPU at work."""
    longest_gap: Gap
    operators: list[Operator]
    """Those with the most self time first."""

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the parts in all steps together; they add up to 1."""
        parts = self.seconds.sum(axis=0)
        return dict(zip(PARTS, (parts / parts.sum()).tolist(), strict=True))


def read_trace(path: Path) -> list[Event]:
    """The events of a .json.gz that torch.profiler wrote; TraceError if it cannot be read."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        return [event for event in events if event.get("ph") == "X"]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as why:
        raise TraceError(f"{path} is not a whole trace: {why}") from None


def breakdown(events: list[Event]) -> Breakdown:
    """Divide the steps of a trace into `PARTS`; TraceError if it holds no step."""
    steps = [e for e in events if e["cat"] == "user_annotation" and STEP.match(e["name"])]
    if not steps:
        raise TraceError("it holds no step")
    steps.sort(key=lambda event: event["ts"])
    start, end = steps[0]["ts"], max(map(_end, steps))
    events = [event for event in events if _end(event) > start and event["ts"] < end]
    thread = steps[0]["pid"], steps[0]["tid"]
    on_thread = [event for event in events if (event["pid"], event["tid"]) == thread]
    device = any(event["cat"] in DEVICE for event in events)
    claims = on_device(events, on_thread) if device else on_host(events, on_thread)
    seconds, gaps = divide(steps, claims)
    totals: dict[str, list[float]] = {}
    for name, own in device_calls(events) if device else host_calls(on_thread):
        totals.setdefault(name, []).append(own / 1e6)
    operators = [
        Operator(name, sum(own), float(sum(own) / seconds.sum()), len(own))
        for name, own in totals.items()
    ]
    return Breakdown(
        seconds,
        sum(event["name"] == COMPILATION for event in events),
        device,
        typical_gap(gaps, [event for _, part, event in claims if part != "data"]),
        sorted(operators, key=lambda operator: -operator.self_seconds),
    )


def on_device(events: list[Event], on_thread: list[Event]) -> list[Claim]:
    """What the time of a step on a GPU belongs to; a copy within the GPU is as good as a kernel."""
    claims = [(3, "data", event) for event in on_thread if event["name"] == WAITING]
    for event in events:
        if event["cat"] == "kernel" and COLLECTIVE_KERNEL.search(event["name"]):
            claims.append((1, "communication", event))
        elif event["cat"] == "gpu_memcpy" and "DtoD" not in event["name"]:
            claims.append((2, "copies", event))
        elif event["cat"] in DEVICE:
            claims.append((0, "kernels", event))
    return claims


def on_host(events: list[Event], on_thread: list[Event]) -> list[Claim]:
    """What the time of a step on a CPU belongs to, whose operators run on the training thread.

    Waiting for a collective is communication inside an operator too, as those on sharded tensors.
    """
    claims = [(3, "communication", e) for e in events if COLLECTIVE.match(e["name"])]
    for event in on_thread:
        operator = event["cat"] == "cpu_op" and "::" in event["name"]
        if event["name"] == WAITING:
            claims.append((0, "data", event))
        elif operator and COLLECTIVE_CALL.match(event["name"]):
            claims.append((1, "communication", event))
        elif event["name"].startswith(COMPILED) or (operator and not WRAPPER.match(event["name"])):
            claims.append((2, "kernels", event))
    return claims


def divide(steps: list[Event], claims: list[Claim]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The seconds of each step and part; of each step the host's intervals, in microseconds."""
    claims = sorted(claims, key=lambda claim: -claim[0])
    claimed = _spans(event for _, _, event in claims)
    edges = np.unique(np.append(_spans(steps), claimed))
    owner = np.full(len(edges) - 1, HOST)  # of the time from each edge to the next
    for (_, part, _), (first, last) in zip(claims, np.searchsorted(edges, claimed), strict=True):
        owner[first:last] = PARTS.index(part)
    seconds, gaps = np.zeros((len(steps), len(PARTS))), []
    for row, (first, last) in zip(seconds, np.searchsorted(edges, _spans(steps)), strict=True):
        lengths = np.diff(edges[first : last + 1])
        row += np.bincount(owner[first:last], lengths, minlength=len(PARTS)) / 1e6
        idle = np.concatenate([[False], owner[first:last] == HOST, [False]])
        gaps.append(edges[first + np.flatnonzero(np.diff(idle))].reshape(-1, 2))
    return seconds, gaps


def typical_gap(gaps: list[np.ndarray], work: list[Event]) -> Gap:
    """The median of the steps' longest gaps: what happened only once says nothing."""
    longest = [max(step.tolist(), key=_length, default=[0.0, 0.0]) for step in gaps]
    start, end = sorted(longest, key=_length)[len(longest) // 2]
    earlier = [event for event in work if _end(event) <= start + 1e-3]
    later = [event for event in work if event["ts"] >= end - 1e-3]
    after = max(earlier, key=_end)["name"] if earlier else "the first step's start"
    before = min(later, key=lambda e: e["ts"])["name"] if later else "the last step's end"
    return Gap((end - start) / 1e6, after, before)


def device_calls(events: list[Event]) -> Iterator[tuple[str, float]]:
    """Operators and the microseconds of each kernel that they launched, found by "External id"."""
    launchers = {_id(event): event["name"] for event in events if event["cat"] == "cpu_op"}
    for event in events:
        if event["cat"] in DEVICE:  # without a launcher: of a CUDA graph
            yield launchers.get(_id(event), event["name"]), event["dur"]


def host_calls(on_thread: list[Event]) -> Iterator[tuple[str, float]]:
    """Operators and the microseconds of each call, less those of what it called."""
    nested = [e for e in on_thread if e["cat"] in ("cpu_op", "user_annotation")]
    callers: list[list[Any]] = []
    finished = []
    for event in sorted(nested, key=lambda e: (e["ts"], -e["dur"])):
        while callers and _end(callers[-1][0]) <= event["ts"]:
            finished.append(callers.pop())
        if callers:
            callers[-1][1] -= event["dur"]
        callers.append([event, event["dur"]])
    for event, own in finished + callers:
        if event["cat"] == "cpu_op" or event["name"].startswith(COMPILED):
            yield event["name"], own


def _spans(events: Iterable[Event]) -> np.ndarray:
    """Starts and ends, [events, 2], in microseconds."""
    return np.array([(e["ts"], _end(e)) for e in events], dtype=float).reshape(-1, 2)


def _end(event: Event) -> float:
    return event["ts"] + event["dur"]


def _length(interval: list[float]) -> float:
    return interval[1] - interval[0]


def _id(event: Event) -> int | None:
    return event.get("args", {}).get("External id")
