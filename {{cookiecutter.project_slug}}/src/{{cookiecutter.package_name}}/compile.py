"""What is done to a model before it is placed on ranks: activation checkpointing, torch.compile.

The order matters: checkpointing first, so that the compiler sees what is recomputed; compiling
before sharding or wrapping, whose hooks would break the graph. Both work in place: no wrapper
module, so no parameter changes its name. What the compiler then did is told by functions below.
"""

import contextlib
import functools
import os
import re
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

FORWARDED = (signal.SIGTERM, signal.SIGUSR1)  # Ctrl-C may end a compiler: it is typed by a person


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile."""

    mode: Literal["none", "blocks", "full"] = "none"
    """Nothing, each repeated block (compiles once for all of them), or the whole model."""
    fullgraph: bool = False
    """Treat a graph break as an error."""
    dynamic: bool | None = None
    """Shapes: dynamic from the start (true), never (false), or once they are seen to vary."""
    backend: str = "inductor"
    """"eager" and "aot_eager" help to find out which part of the compiler is at fault."""
    cache: bool = True
    """Carry what was compiled in the run directory, so that a restart need not compile it again."""


def checkpoint_activations(blocks: Iterable[nn.Module]) -> None:
    """Keep only each block's input, and compute the rest again in backward (Chen et al., 2016)."""
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def compile_model(model: nn.Module, blocks: Iterable[nn.Module], config: CompileConfig) -> None:
    """Compile in place, as `config.mode` says; the work is done at the first forward."""
    targets = {"none": [], "blocks": list(blocks), "full": [model]}[config.mode]
    if targets:
        torch._dynamo.utils.set_compilation_metrics_limit(4096)  # else all but 64 are forgotten
    how = {"fullgraph": config.fullgraph, "dynamic": config.dynamic, "backend": config.backend}
    for target in targets:
        if type(target).forward.__module__.startswith("torch."):
            # compile() passes over functions of torch's own, so that of a bare nn.Sequential or
            # nn.TransformerEncoderLayer it would compile nothing.
            target.forward = torch.compile(_through(target.forward), **how)
        else:
            target.compile(**how)


class ShelteredCompilers:
    """Keeps a stop signal from the processes that compile; a companion of a run.

    torchrun, and whoever signals the group, send it to them as well. They would die of it, and the
    step with them. While the compiler works the signal is blocked here, which they inherit; nothing
    is missed: another thread takes it, or else it waits.
    """

    def __enter__(self) -> "ShelteredCompilers":
        """Have the compiler tell when it works."""
        torch._dynamo.callback_handler.register_start_callback(self._block)
        torch._dynamo.callback_handler.register_end_callback(self._unblock)
        return self

    def __exit__(self, *exception: object) -> None:
        """No longer."""
        torch._dynamo.callback_handler.remove_start_callback(self._block)
        torch._dynamo.callback_handler.remove_end_callback(self._unblock)

    def __call__(self, state: Any, record: dict[str, Any] | None) -> None:
        """Steps are nothing to it."""

    @staticmethod
    def _block(compilation: object) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)

    @staticmethod
    def _unblock(compilation: object) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)


def _through(call: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*arguments: Any, **named: Any) -> Any:
        return call(*arguments, **named)

    return forward


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


def graphs() -> int:
    """How many graphs were compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def compile_seconds() -> float:
    """How long compiling took in this process, backward graphs included."""
    entries = torch._dynamo.utils.get_compilation_metrics()
    return sum(entry.duration_us or 0 for entry in entries) / 1e6


def forget_compiling() -> None:
    """Throw away all that was compiled in this process and what was noted of it."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()


def compile_summary() -> str:
    """One line on what the compiler did in this process: graphs, graph breaks, recompiles."""
    breaks, again, limits = graph_breaks(), recompiles(), limits_hit()
    line = (
        f"compiled {graphs()} graphs in {compile_seconds():.1f} s; "
        f"graph breaks: {len(breaks)}; recompiles: {len(again)}"
    )
    for name, found in (("break", breaks), ("recompile", again)):
        if found:
            line += f"; most frequent {name}: {Counter(found).most_common(1)[0][0]}"
    if limits:
        line += f"; recompile limit hit, so this now runs eagerly: {limits[0]}"
    return line


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
