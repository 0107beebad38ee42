"""Where the time of traced steps went, worked out from the file that torch.profiler writes.

The file is JSON in Chrome's trace event format: complete events ("ph": "X") have a category, a
name, a thread, a start and a duration in microseconds. What is read of it, as torch 2.13 writes it:

- `ProfilerStep#n` (user_annotation): a step, on the thread that trains.
- `waiting for data` (user_annotation): the loader at work, or waiting for its workers.
- kernel, gpu_memcpy, gpu_memset: what a GPU did and when. NCCL's collectives are kernels.
- cpu_op: an operator or a node of autograd, on the thread that called it. Compiled code is an
  annotation, `## Call CompiledFxGraph …`.
- `gloo:all_reduce` and the like, on a thread of gloo's from the call to the end of the collective.
  The training thread waits for it inside no operator, or inside `_c10d_functional::wait_tensor`.
- `_compile.compile_inner (dynamo_timed)`: the compiler compiled something.

A step is divided like this: each moment goes to the first of several layers that covers it, and to
the host when none does. So the parts add up to the step, and communication is only the part
that no kernel hides.
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

STEP = re.compile("ProfilerStep#")
PARTS = ("data", "host", "kernels", "communication", "copies")
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
COLLECTIVE_KERNEL = re.compile("nccl|nvshmem|multimem", re.IGNORECASE)
COLLECTIVE = re.compile("(gloo|mpi|ucc):")  # on a thread of the backend's own
COLLECTIVE_CALL = re.compile("_?c10d(_functional)?(_autograd)?::")
# What has a namespace but only wraps other things: hooks and Python functions run inside.
WRAPPER = re.compile("autograd::|torch::autograd::")
COMPILED = "## Call CompiledFxGraph"
COMPILATION = "_compile.compile_inner (dynamo_timed)"

Event = dict[str, Any]
Spans = np.ndarray  # [n, 2], starts and ends in microseconds; sorted and disjoint after `union`


class TraceError(ValueError):
    """A file that is no whole trace of steps."""


class Gap(NamedTuple):
    """A time in which the host kept everything else waiting, and between what."""

    seconds: float
    after: str
    before: str


class Operator(NamedTuple):
    """All calls of one operator within the traced steps."""

    name: str
    self_seconds: float
    """On the GPU where there is one, else on the CPU, without the operators that it called."""
    share: float
    calls: int


class Breakdown(NamedTuple):
    """What a trace says about its steps."""

    seconds: np.ndarray
    """Of each step and part, [steps, parts] in the order of `PARTS`."""
    compilations: int
    device: bool
    """Whether a GPU was seen at work."""
    longest_gap: Gap
    operators: list[Operator]
    """Those with the most time of their own first."""

    @property
    def shares(self) -> dict[str, float]:
        """Of all steps together; they add up to 1."""
        parts = self.seconds.sum(axis=0)
        return dict(zip(PARTS, (parts / parts.sum()).tolist(), strict=True))


def read_trace(path: Path) -> list[Event]:
    """The events of a .json.gz that torch.profiler wrote; TraceError when it cannot be read."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        return [event for event in events if event.get("ph") == "X"]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as why:
        raise TraceError(f"{path} is not a whole trace: {why}") from None


def breakdown(events: list[Event]) -> Breakdown:
    """Divide the steps of a trace; TraceError when it holds none."""
    steps = [e for e in events if e["cat"] == "user_annotation" and STEP.match(e["name"])]
    if not steps:
        raise TraceError("it holds no step")
    place = steps[0]["pid"], steps[0]["tid"]
    start, end = spans(steps).min(), spans(steps).max()
    events = [event for event in events if _end(event) > start and event["ts"] < end]
    on_thread = [event for event in events if (event["pid"], event["tid"]) == place]
    device = any(event["cat"] in DEVICE for event in events)
    layers = device_layers(events, on_thread) if device else host_layers(events, on_thread)
    seconds, left = np.zeros((len(steps), len(PARTS))), []
    for row, step in zip(seconds, np.sort(spans(steps), axis=0), strict=True):
        rest = step[None]
        for part, covered in layers:
            before, rest = rest, minus(rest, covered)
            row[PARTS.index(part)] += (length(before) - length(rest)) / 1e6
        row[PARTS.index("host")] = length(rest) / 1e6
        left.append(rest)
    found = [
        Operator(name, sum(own) / 1e6, float(sum(own) / 1e6 / seconds.sum()), len(own))
        for name, own in operators(events, on_thread, device).items()
    ]
    return Breakdown(
        seconds,
        sum(event["name"] == COMPILATION for event in events),
        device,
        longest_gap(left, work(events, on_thread, device)),
        sorted(found, key=lambda operator: -operator.self_seconds),
    )


def device_layers(events: list[Event], on_thread: list[Event]) -> list[tuple[str, Spans]]:
    """What covers a moment of a step on a GPU, the first one that does.

    Copies are those between host and device; a copy within the device is as good as a kernel.
    """
    kernels, collectives, copies = [], [], []
    for event in events:
        if event["cat"] == "kernel" and COLLECTIVE_KERNEL.search(event["name"]):
            collectives.append(event)
        elif event["cat"] == "gpu_memcpy" and "DtoD" not in event["name"]:
            copies.append(event)
        elif event["cat"] in DEVICE:
            kernels.append(event)
    return [
        ("kernels", union(spans(kernels))),
        ("communication", union(spans(collectives))),
        ("copies", union(spans(copies))),
        ("data", union(spans(e for e in on_thread if e["name"] == WAITING))),
    ]


def host_layers(events: list[Event], on_thread: list[Event]) -> list[tuple[str, Spans]]:
    """What covers a moment of a step on a CPU, where operators run on the thread that trains.

    A gap between operators while a collective is under way counts as communication.
    """
    calls = [e for e in on_thread if e["cat"] == "cpu_op" and COLLECTIVE_CALL.match(e["name"])]
    return [
        ("data", union(spans(e for e in on_thread if e["name"] == WAITING))),
        ("communication", union(spans(calls))),  # an operator on sharded tensors calls and waits
        ("kernels", union(spans(work(events, on_thread, device=False)))),
        ("communication", union(spans(e for e in events if COLLECTIVE.match(e["name"])))),
    ]


def work(events: list[Event], on_thread: list[Event], device: bool) -> list[Event]:
    """The events that compute something: kernels of a GPU, operators on a CPU."""
    if device:
        return [event for event in events if event["cat"] in DEVICE]
    return [
        event
        for event in on_thread
        if (event["cat"] == "cpu_op" and "::" in event["name"] and not WRAPPER.match(event["name"]))
        or event["name"].startswith(COMPILED)
    ]


def operators(events: list[Event], on_thread: list[Event], device: bool) -> dict[str, list[float]]:
    """Microseconds of each call of an operator that were its own, by the operator's name.

    On a GPU those of the kernels that it launched, which name it by an "External id".
    """
    if device:
        launchers = {_id(e): e["name"] for e in events if e["cat"] == "cpu_op"}
        # Without a launcher: a graph that was replayed.
        pairs = [(launchers.get(_id(e), e["name"]), e["dur"]) for e in work(events, [], device)]
    else:
        nested = [e for e in on_thread if e["cat"] in ("cpu_op", "user_annotation")]
        pairs = [
            (e["name"], own)
            for e, own in self_times(nested)
            if e["cat"] == "cpu_op" or e["name"].startswith(COMPILED)
        ]
    totals: dict[str, list[float]] = {}
    for name, own in pairs:
        totals.setdefault(name, []).append(own)
    return totals


def self_times(events: list[Event]) -> Iterator[tuple[Event, float]]:
    """Events of one thread with their durations less those of what they called."""
    within: list[list[Any]] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while within and _end(within[-1][0]) <= event["ts"]:
            yield tuple(within.pop())
        if within:
            within[-1][1] -= event["dur"]
        within.append([event, event["dur"]])
    yield from map(tuple, within)


def longest_gap(left: list[Spans], work: list[Event]) -> Gap:
    """Of the longest gaps of all steps the middle one: what happened but once tells nothing."""
    longest = [max(rest.tolist(), key=lambda it: it[1] - it[0], default=[0, 0]) for rest in left]
    start, end = sorted(longest, key=lambda it: it[1] - it[0])[len(longest) // 2]
    earlier = [event for event in work if _end(event) <= start + 1e-3]
    later = [event for event in work if event["ts"] >= end - 1e-3]
    after = max(earlier, key=_end)["name"] if earlier else "the first step's start"
    before = min(later, key=lambda e: e["ts"])["name"] if later else "the last step's end"
    return Gap((end - start) / 1e6, after, before)


def _end(event: Event) -> float:
    return event["ts"] + event["dur"]


def _id(event: Event) -> int | None:
    return event.get("args", {}).get("External id")


def spans(events: Iterable[Event]) -> Spans:
    """Starts and ends of events, as they come."""
    found = [(event["ts"], _end(event)) for event in events]
    return np.array(found, dtype=float).reshape(-1, 2)


def union(intervals: Spans) -> Spans:
    """The same moments as sorted intervals that do not touch."""
    intervals = intervals[intervals[:, 1] > intervals[:, 0]]
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    if not len(intervals):
        return intervals
    reach = np.maximum.accumulate(intervals[:, 1])
    first = np.flatnonzero(np.append(True, intervals[1:, 0] > reach[:-1]))
    return np.column_stack([intervals[first, 0], reach[np.append(first[1:], len(reach)) - 1]])


def minus(intervals: Spans, covered: Spans) -> Spans:
    """The moments of `intervals` that are not in `covered`; both sorted and disjoint."""
    times = np.concatenate([intervals.ravel(), covered.ravel()])
    order = np.argsort(times, kind="stable")
    changes = np.concatenate([np.tile([1, -1], len(intervals)), np.tile([-2, 2], len(covered))])
    state, times = np.cumsum(changes[order]), times[order]  # 1 where it is in `intervals` alone
    kept = (state[:-1] == 1) & (times[1:] > times[:-1])
    return np.column_stack([times[:-1], times[1:]])[kept]


def length(intervals: Spans) -> float:
    """All of them together, in microseconds."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())
