"""A stand-in: what the compiler did, until the compile stage has it."""

import contextlib
import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..compile import compile_seconds as compile_seconds
from ..compile import graphs as graphs


@contextlib.contextmanager
def eagerly(model: nn.Module) -> Iterator[None]:
    """Call a model that was compiled in place as if it had not been."""
    compiled = {m: call for m in model.modules() if (call := m._compiled_call_impl) is not None}
    through = {
        m: f for m in model.modules() if hasattr(f := m.forward, "_torchdynamo_orig_callable")
    }
    try:
        for module in compiled:
            module._compiled_call_impl = None
        for module, forward in through.items():
            module.forward = forward._torchdynamo_orig_callable
        yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call
        for module, forward in through.items():
            module.forward = forward


class Finding(NamedTuple):
    """Something the compiler could not do as hoped: at which file:line, and why."""

    where: str
    reason: str

    def __str__(self) -> str:
        """As people write it."""
        return f"{self.where or 'place unknown'}: {self.reason}"


def graph_breaks() -> list[Finding]:
    """Where a graph had to end early, each place once."""
    from torch._dynamo.utils import get_compilation_metrics, graph_break_reasons

    found = [Finding(_place(it.user_stack), _first_line(it.reason)) for it in graph_break_reasons]
    for entry in get_compilation_metrics():  # a whole function given up, as for a break in a loop
        if entry.fail_type and not _limited(entry):
            place = entry.fail_user_frame_filename or entry.co_filename
            line = entry.fail_user_frame_lineno or entry.co_firstlineno
            found.append(Finding(_short(place, line), _first_line(entry.fail_reason or "")))
    seen: dict[str, Finding] = {}
    for finding in found:
        seen.setdefault(finding.where or finding.reason, finding)
    return list(seen.values())


def recompiles() -> list[Finding]:
    """What was compiled again, and the guard that no longer held; one for each time."""
    from torch._dynamo.utils import get_compilation_metrics

    entries = get_compilation_metrics()
    return [_recompile(e) for e in entries if e.recompile_reason and not _limited(e)]


def limits_hit() -> list[Finding]:
    """What is left to run eagerly since it was compiled too often, with the last failed guard."""
    from torch._dynamo.utils import get_compilation_metrics

    return [_recompile(entry) for entry in get_compilation_metrics() if _limited(entry)]


def forget_compiling() -> None:
    """Throw away all that was compiled in this process and what was noted of it."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()


def _limited(entry: "torch._dynamo.utils.CompilationMetrics") -> bool:
    return "recompile limit exceeded" in (entry.fail_reason or "")


def _recompile(entry: "torch._dynamo.utils.CompilationMetrics") -> Finding:
    # "0/1: GUARD    # line of code # file:line", then the stack of the user's code, newest last.
    text = entry.recompile_reason or ""
    guard = re.sub(r"^\d+/\d+: ", "", text.splitlines()[0] if text else "").split("  # ")[0]
    stack = re.findall(r'File "(.+?)", line (\d+)', text)
    path, line = stack[-1] if stack else (entry.co_filename, entry.co_firstlineno)
    return Finding(_short(path, line), guard.strip())


def _first_line(reason: str) -> str:
    if reason.startswith("generic_jump"):  # what the compiler calls it where it can go on behind it
        return "Data-dependent branching"
    return reason.strip().split("\n")[0]


def _place(stack: list[traceback.FrameSummary]) -> str:
    """The innermost place in a stack that is not torch's own."""
    torch_itself = str(Path(torch.__file__).parent)
    own = [frame for frame in stack if not frame.filename.startswith(torch_itself)] or stack
    return _short(own[-1].filename, own[-1].lineno) if own else ""


def _short(path: str | None, line: int | str | None) -> str:
    if not path:
        return ""
    near = os.path.relpath(path)
    return f"{path if near.startswith('..') else near}:{line}"


class CompileCache:
    """A stand-in."""

    def __init__(self, *arguments: Any) -> None:
        self.loaded: dict[str, Any] = {}

    def __enter__(self) -> "CompileCache":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def __call__(self, *arguments: Any) -> None:
        """A stand-in."""
        pass

    def seconds_saved(self) -> None:
        """A stand-in."""
        return None


def lookups() -> tuple[int, int]:
    """A stand-in."""
    return 0, 0
