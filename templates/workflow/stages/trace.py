"""Read a trace of torch.profiler, and divide each step's time into parts (`PARTS`).

A trace is JSON in Chrome's trace event format. Each moment of a step belongs to exactly one part.
"""

import gzip
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch

from ..sampling import WAITING

PARTS = ("data", "host", "kernels", "communication", "copies")
HOST = PARTS.index("host")
COMMUNICATION = PARTS.index("communication")

# In a trace, complete events ("ph": "X") have a category such as "kernel", a name, a thread, a
# start and a duration in microseconds. ON_GPU and ON_CPU below list parts with patterns of events.
# If several events cover a moment of a step, the moment belongs to the part that is listed first;
# without such an event, it belongs to the host. So the parts add up to the step. On a GPU, for
# example, communication counts only while no other kernel runs.

# The name of a compilation's event in torch 2.13.
COMPILATION = "_compile.compile_inner (dynamo_timed)"
# The start of the name of the annotation around compiled code in torch 2.13.
COMPILED = "## Call CompiledFxGraph"

# The following patterns match the start of an event's label, which is "CATEGORY NAME".
# A step, on the training thread.
STEP = "user_annotation ProfilerStep#"
# Events that count on any thread; all others count only on the training thread.
ON_ANY_THREAD = re.compile(r"(kernel|gpu_memcpy|gpu_memset) |\w+ (gloo|mpi|ucc):")
# The parts and the patterns of their events if the trace has events of a GPU, in order of
# precedence. An event may match several patterns; the first one decides.
ON_GPU = (
    # Kernels other than those of collectives (such as NCCL's), and also memory operations within
    # the device.
    ("kernels", "kernel (?!.*(?i:nccl|nvshmem|multimem))|gpu_memset |gpu_memcpy .*DtoD"),
    # The remaining kernels are those of collectives.
    ("communication", "kernel "),
    # The remaining copies are to or from the host or another device.
    ("copies", "gpu_memcpy "),
    # The loader reads, or waits for its workers.
    ("data", f"user_annotation {WAITING}$"),
)
# The same if the trace has no events of a GPU.
ON_CPU = (
    ("data", f"user_annotation {WAITING}$"),
    # A collective precedes "kernels", since it may run inside another operator: an operator on
    # sharded tensors calls `_c10d_functional::wait_tensor`, for example.
    ("communication", r"cpu_op _?c10d(_functional)?(_autograd)?::"),
    # Operators have a namespace, as in "aten::mm". The events of autograd nodes are excluded, since
    # they include hooks, which may wait for other ranks. Compiled code has events of its own.
    ("kernels", rf"cpu_op (?!(torch::)?autograd::).*::|\w+ {COMPILED}"),
    # An event such as `gloo:all_reduce` is on a thread of gloo, and lasts from the call to the end
    # of the collective. Meanwhile the training thread may compute. Since this pattern comes last,
    # the event counts only while that thread runs no operator.
    ("communication", r"\w+ (gloo|mpi|ucc):"),
)


class Event(NamedTuple):
    """A complete event of a trace, with times in microseconds."""

    name: str
    # "CATEGORY NAME", such as "cpu_op aten::mm", for the patterns above.
    label: str
    # Process and thread; for an event on a GPU, device and stream.
    thread: tuple[int | str, int | str]
    start: float
    end: float


class Claim(NamedTuple):
    """An event, and the part that gets the event's time unless another claim takes precedence."""

    part: str
    event: Event


class HostGap(NamedTuple):
    """An interval in microseconds in which only the host works."""

    # The length comes first, so that `max` and `sorted` compare gaps by length.
    length: float
    start: float
    end: float


class NamedGap(NamedTuple):
    """A gap in which only the host works, in seconds, and the events before and after it."""

    seconds: float
    # The name of the last event before the gap: the gap comes after this event.
    after: str
    # The name of the first event after the gap: the gap comes before this event.
    before: str


class Operator(TypedDict):
    """The time of an operator in all traced steps, from torch's averages."""

    name: str
    self_seconds: float
    calls: int
    # `self_seconds` as a fraction of the traced time. "share" is also the key in the stage's JSON.
    share: float


class Breakdown(NamedTuple):
    """The time of the traced steps by part, with compilations, gaps and operators."""

    # The shape is [steps, parts], in the order of `PARTS`.
    seconds: np.ndarray
    compilations: int
    # Whether the trace has events on a GPU.
    device: bool
    longest_gap: NamedGap
    # Sorted by time, the largest first.
    operators: list[Operator]

    @property
    def fractions(self) -> dict[str, float]:
        """Each part's fraction of the time of all steps; the fractions add up to 1."""
        seconds = self.seconds.sum(axis=0)
        fractions = (seconds / seconds.sum()).tolist()
        return dict(zip(PARTS, fractions, strict=True))

    @property
    def step_seconds(self) -> float:
        """The mean duration of a traced step."""
        return float(self.seconds.sum()) / len(self.seconds)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Read the complete events of a .json.gz trace of torch.profiler."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def breakdown(trace: list[dict[str, Any]], averages: Iterable[Any] = ()) -> Breakdown:
    """Divide the time of the steps of a trace into `PARTS`.

    `trace` has events from `read_trace`; `averages` are torch's averages of the same steps. Raises
    ValueError if the trace has no steps.
    """
    events = [parse_event(event) for event in trace]
    steps = [event for event in events if event.label.startswith(STEP)]
    if not steps:
        raise ValueError("it has no steps")
    steps.sort(key=lambda step: step.start)
    counted: list[Event] = []
    for event in events:
        if event.thread == steps[0].thread or ON_ANY_THREAD.match(event.label):
            counted.append(event)
    device = any(event.label.startswith(("kernel ", "gpu_mem")) for event in counted)
    claims = claim_time(counted, ON_GPU if device else ON_CPU)
    seconds, gaps = divide(steps, claims)
    # `gaps` has the longest gap of each step. Use their median, since a gap that is long in only
    # one step is not typical.
    typical = sorted(gaps)[len(gaps) // 2]
    return Breakdown(
        seconds=seconds,
        compilations=sum(event.name == COMPILATION for event in events),
        device=device,
        longest_gap=name_gap(typical, claims),
        operators=operators_of(averages, device, float(seconds.sum())),
    )


def parse_event(event: dict[str, Any]) -> Event:
    """Convert an event from the JSON of a trace."""
    return Event(
        name=event["name"],
        label=f"{event['cat']} {event['name']}",
        thread=(event["pid"], event["tid"]),
        start=event["ts"],
        end=event["ts"] + event["dur"],
    )


def claim_time(events: list[Event], rules: tuple[tuple[str, str], ...]) -> list[Claim]:
    """Match events with the rules, and list the claims with the lowest precedence first.

    `rules` is ON_GPU or ON_CPU. An event that matches several rules has several claims.
    """
    claims: list[Claim] = []
    for part, pattern in reversed(rules):
        for event in events:
            if re.match(pattern, event.label):
                claims.append(Claim(part, event))
    return claims


def divide(steps: list[Event], claims: list[Claim]) -> tuple[np.ndarray, list[HostGap]]:
    """Return the seconds of each step and part, and the longest gap of each step.

    If claims overlap, the later one in the list wins.
    """
    step_times = times_of(steps)
    claim_times = times_of([claim.event for claim in claims])
    # The sorted times at which a step or a claim starts or ends. Interval i, from edge i to edge
    # i + 1, belongs to one part as a whole. `owners` has the index of this part in `PARTS`.
    edges = np.unique(np.append(step_times, claim_times))
    owners = np.full(len(edges) - 1, HOST)
    # For each claim, the indices of the edges where it starts and ends, shape [claims, 2].
    indices = np.searchsorted(edges, claim_times)
    for claim, (first, last) in zip(claims, indices, strict=True):
        owners[first:last] = PARTS.index(claim.part)
    seconds = np.zeros((len(steps), len(PARTS)))
    gaps: list[HostGap] = []
    # Likewise, find the indices of the edges where each step starts and ends.
    for step, (first, last) in enumerate(np.searchsorted(edges, step_times)):
        step_edges = edges[first : last + 1]
        step_owners = owners[first:last]
        lengths = np.diff(step_edges)
        # Add up the lengths of each owner's intervals.
        seconds[step] = np.bincount(step_owners, lengths, minlength=len(PARTS)) / 1e6
        gaps.append(longest_gap(step_edges, step_owners))
    return seconds, gaps


def longest_gap(edges: np.ndarray, owners: np.ndarray) -> HostGap:
    """Find the longest gap of a step: adjacent intervals that all belong to the host.

    Interval i is from edge i to edge i + 1, and `owners[i]` is the index of its part in `PARTS`. If
    no interval belongs to the host, the gap has the length 0.
    """
    longest = HostGap(0.0, 0.0, 0.0)
    # With a False at both ends, `of_host[i]` and `of_host[i + 1]` tell whether the intervals before
    # and after edge i belong to the host. Where they differ, a gap starts or ends.
    of_host = np.concatenate([[False], owners == HOST, [False]])
    borders = edges[of_host[:-1] != of_host[1:]]
    for start, end in borders.reshape(-1, 2).tolist():
        longest = max(longest, HostGap(end - start, start, end))
    return longest


def name_gap(gap: HostGap, claims: list[Claim]) -> NamedGap:
    """Name the last event before a gap, and the first event after it."""
    # Name events that do work, not the annotation around the wait for data.
    work = [claim.event for claim in claims if claim.part != "data"]
    earlier = [event for event in work if event.end <= gap.start]
    later = [event for event in work if event.start >= gap.end]
    after = "the first step's start"
    if earlier:
        after = max(earlier, key=lambda event: event.end).name
    before = "the last step's end"
    if later:
        before = min(later, key=lambda event: event.start).name
    return NamedGap(seconds=gap.length / 1e6, after=after, before=before)


def times_of(events: list[Event]) -> np.ndarray:
    """Return the starts and ends of events in microseconds, shape [events, 2]."""
    times = [(event.start, event.end) for event in events]
    return np.array(times, dtype=float).reshape(-1, 2)


def operators_of(averages: Iterable[Any], device: bool, seconds: float) -> list[Operator]:
    """List the operators of the traced steps, the one with the most self time first.

    `seconds` is the time of all traced steps. Self time is measured on the GPU if the trace has
    events on one (`device`), otherwise on the CPU.
    """
    operators: list[Operator] = []
    for average in averages:
        if average.device_type != torch.autograd.DeviceType.CPU:
            # Skip kernels: the operator that launched a kernel already has the kernel's time.
            continue
        if average.is_user_annotation and not average.key.startswith(COMPILED):
            # Skip annotations, except the one around compiled code, which has no operators inside.
            continue
        if device:
            microseconds = average.self_device_time_total
        else:
            microseconds = average.self_cpu_time_total
        self_seconds = microseconds / 1e6
        if self_seconds:
            operator = Operator(
                name=average.key,
                self_seconds=self_seconds,
                calls=average.count,
                share=self_seconds / seconds,
            )
            operators.append(operator)
    return sorted(operators, key=lambda operator: operator["self_seconds"], reverse=True)
