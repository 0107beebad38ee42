"""Activation checkpointing and torch.compile, applied to a model before it is placed on ranks.

The order matters: checkpointing first, so that the compiler sees what is recomputed; compiling
before sharding or wrapping, whose hooks would break the graph. Both work in place: no wrapper
module, so no parameter changes its name.
"""

import functools
import hashlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .run.hardware import cpu_name

log = logging.getLogger(__name__)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # Ctrl-C may end a compiler: a person types it
CACHE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile."""

    mode: Literal["none", "blocks", "full"] = "none"
    """What to compile: nothing, each repeated block (once for all of them), or the whole model."""
    fullgraph: bool = False
    """Treat a graph break as an error."""
    dynamic: bool | None = None
    """Dynamic shapes: from the start (true), never (false), or once they vary (default)."""
    backend: str = "inductor"
    """Backend of torch.compile; "eager" and "aot_eager" help to debug the compiler."""


def checkpoint_activations(blocks: Iterable[nn.Module]) -> None:
    """Keep only each block's input, and compute the rest again in backward (Chen et al., 2016)."""
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def compile_model(model: nn.Module, blocks: Iterable[nn.Module], config: CompileConfig) -> None:
    """Compile in place, by `config.mode`; the compiler runs at the first forward."""
    targets = {"none": [], "blocks": list(blocks), "full": [model]}[config.mode]
    if targets:
        use_compile_cache()
        torch._dynamo.utils.set_compilation_metrics_limit(4096)  # else all but 64 are forgotten
    options = {"fullgraph": config.fullgraph, "dynamic": config.dynamic, "backend": config.backend}
    for target in targets:
        if type(target).forward.__module__.startswith("torch."):
            # compile() passes over torch's own functions, so it would compile nothing of a bare
            # nn.Sequential or nn.TransformerEncoderLayer.
            target.forward = torch.compile(_call(target.forward), **options)
        else:
            target.compile(**options)


def use_compile_cache() -> None:
    """Keep compiled code in one folder per project and kind of machine: restarts start warm.

    The folder holds code that runs, so only its owner can open it, and no run directory, which
    people copy and send, has it. A folder that the user has set stays. Its name tells CPUs and GPUs
    apart, for nodes that share a home directory: inductor's own key does not tell CPUs apart.
    """
    if CACHE in os.environ:
        return
    project = Path(__file__).resolve().parent
    kind = [project, sys.version, torch.__version__, torch.version.cuda]
    kind += [cpu_name(), torch.backends.cpu.get_cpu_capability()]
    kind += [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    key = hashlib.sha256(repr(kind).encode()).hexdigest()[:12]
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    folder = home / project.name / f"compiled-torch-{torch.__version__}-{key}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)  # OSError if it belongs to another user
    except OSError as error:
        log.warning("compiled code is not kept for the next start: %s", error)
    else:
        os.environ[CACHE] = str(folder)


class Compiling:
    """A callback for runs that compile: keeps stop signals from compilers, and sums up at the end.

    A stop signal to the process group would end the processes that compile, and the step with them.
    So it is blocked while the compiler works, which its processes inherit, and handled afterwards.
    """

    def __enter__(self) -> "Compiling":
        torch._dynamo.callback_handler.register_start_callback(self._block)
        torch._dynamo.callback_handler.register_end_callback(self._unblock)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        torch._dynamo.callback_handler.remove_start_callback(self._block)
        torch._dynamo.callback_handler.remove_end_callback(self._unblock)
        if kind is None:
            log.info("%s", compile_summary())

    def _block(self, compilation: object) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def _unblock(self, compilation: object) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def graphs() -> int:
    """How many graphs were compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def compile_seconds() -> float:
    """How long compiling took in this process, backward graphs included."""
    entries = torch._dynamo.utils.get_compilation_metrics()
    return sum(entry.duration_us or 0 for entry in entries) / 1e6


def compile_summary() -> str:
    """One line on the compiler's work in this process."""
    entries = torch._dynamo.utils.get_compilation_metrics()
    parts = [
        f"compiled {graphs()} graphs in {compile_seconds():.1f} s",
        f"graph breaks: {len(torch._dynamo.utils.graph_break_reasons)}",
        f"recompiles: {sum(bool(entry.recompile_reason) for entry in entries)}",
    ]
    failed = [entry.fail_reason.splitlines()[0] for entry in entries if entry.fail_reason]
    return "; ".join(parts + [f"runs eagerly: {reason}" for reason in failed[:1]])


def _call(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **named: function(*arguments, **named)
