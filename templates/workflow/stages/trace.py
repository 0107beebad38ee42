"""Read a trace of torch.profiler, and divide each step's time into categories (`PARTS`).

Traces are JSON in Chrome's trace event format. Each moment of a step belongs to one category.
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

# In a trace, complete events ("ph": "X") have a category, a name, a thread, a start and a duration
# in microseconds. Of all events that cover a moment of a step, the one that comes first in ON_GPU
# or ON_CPU decides; a moment without any event belongs to the host. So the parts add up to the
# step. On a GPU, communication counts only while no kernel runs.

# Names of events in torch 2.13: a compilation, and the annotation around compiled code.
COMPILATION = "_compile.compile_inner (dynamo_timed)"
COMPILED = "## Call CompiledFxGraph"

# The following patterns match an event's label, "CATEGORY NAME".
# A step, on the training thread.
STEP = "user_annotation ProfilerStep#"
# Events that count on any thread; all others count only on the training thread.
ON_ANY_THREAD = re.compile(r"(kernel|gpu_memcpy|gpu_memset) |\w+ (gloo|mpi|ucc):")
# Parts and the patterns of their events, in order of precedence.
ON_GPU = (
    # All kernels except those of collectives (NCCL's collectives are kernels, too), and memory
    # operations within the device.
    ("kernels", "kernel (?!.*(?i:nccl|nvshmem|multimem))|gpu_memset |gpu_memcpy .*DtoD"),
    ("communication", "kernel "),
    ("copies", "gpu_memcpy "),
    # The loader reads, or waits for its workers.
    ("data", f"user_annotation {WAITING}$"),
)
ON_CPU = (
    ("data", f"user_annotation {WAITING}$"),
    # This may be inside an operator: sharded tensors wait in `_c10d_functional::wait_tensor`.
    ("communication", r"cpu_op _?c10d(_functional)?(_autograd)?::"),
    # Operators have a namespace, as in "aten::mm". Autograd nodes are excluded, since they also
    # run hooks that may wait.
    ("kernels", rf"cpu_op (?!(torch::)?autograd::).*::|\w+ {COMPILED}"),
    # `gloo:all_reduce` is on a thread of gloo, from the call to the end of the collective. The
    # training thread waits for it outside any operator.
    ("communication", r"\w+ (gloo|mpi|ucc):"),
)


class Event(NamedTuple):
    """A complete event of a trace, with times in microseconds."""

    name: str
    # "CATEGORY NAME", for the patterns above.
    label: str
    # Process and thread; for an event on a GPU, device and stream.
    thread: tuple[int | str, int | str]
    start: float
    end: float


class Claim(NamedTuple):
    """An event and the part to which its time is assigned."""

    part: str
    event: Event


class HostGap(NamedTuple):
    """An interval in microseconds in which only the host works; longer gaps compare as larger."""

    length: float
    start: float
    end: float


class NamedGap(NamedTuple):
    """A gap in which only the host works, in seconds, and the events before and after it."""

    seconds: float
    # The last event that ended before the gap: the gap comes after it.
    after: str
    # The first event that starts after the gap.
    before: str


class Operator(TypedDict):
    """An operator of the traced steps, according to torch's averages."""

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
        """The fraction of time of each part over all steps; fractions add up to 1."""
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
    """Divide the time of the steps of a trace into `PARTS`; ValueError if it has no steps.

    `trace` has events from `read_trace`; `averages` are torch's averages of the same steps.
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
    # Use the median of the steps' longest gaps, since a gap that occurs only once is not typical.
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
    """Match events with the rules, lowest precedence first; an event may match several rules."""
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
    claimed = times_of([claim.event for claim in claims])
    step_times = times_of(steps)
    # No event starts or ends between two adjacent edges, so each such interval has one owner.
    edges = np.unique(np.append(step_times, claimed))
    owners = np.full(len(edges) - 1, HOST)
    # For each claim, the indices of the edges where it starts and ends, shape [claims, 2].
    indices = np.searchsorted(edges, claimed)
    for claim, (first, last) in zip(claims, indices, strict=True):
        owners[first:last] = PARTS.index(claim.part)
    seconds = np.zeros((len(steps), len(PARTS)))
    gaps: list[HostGap] = []
    for step, (first, last) in enumerate(np.searchsorted(edges, step_times)):
        step_edges = edges[first : last + 1]
        step_owners = owners[first:last]
        lengths = np.diff(step_edges)
        seconds[step] = np.bincount(step_owners, lengths, minlength=len(PARTS)) / 1e6
        gaps.append(longest_gap(step_edges, step_owners))
    return seconds, gaps


def longest_gap(edges: np.ndarray, owners: np.ndarray) -> HostGap:
    """Find the longest run of intervals of a step that the host owns; without one, its length is 0.

    Interval i is between edges i and i + 1.
    """
    longest = HostGap(0.0, 0.0, 0.0)
    # With False added at both ends, each run has one change before it and one after it.
    idle = np.concatenate([[False], owners == HOST, [False]])
    changes = np.flatnonzero(np.diff(idle))
    for start, end in edges[changes].reshape(-1, 2).tolist():
        longest = max(longest, HostGap(end - start, start, end))
    return longest


def name_gap(gap: HostGap, claims: list[Claim]) -> NamedGap:
    """Name the last event before a gap, and the first one after it."""
    # Name operators and kernels, not the annotation around the wait for data.
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
    """List the operators of traced steps, which took `seconds`, sorted by self time.

    The time is that on the GPU if the trace has a `device`, else that on the CPU.
    """
    operators: list[Operator] = []
    for average in averages:
        if average.device_type != torch.autograd.DeviceType.CPU:
            # A kernel's time is counted for the operator that launched it.
            continue
        if average.is_user_annotation and not average.key.startswith(COMPILED):
            # Only the annotation around compiled code stands for work that has no operators.
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
