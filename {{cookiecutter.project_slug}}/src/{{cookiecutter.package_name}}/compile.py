"""Activation checkpointing and torch.compile, applied to a model before it is placed on ranks.

Both work in place: no wrapper module, so no parameter changes its name.
"""

import contextlib
import logging
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.utils import stateless
from torch.utils.checkpoint import checkpoint

from .distributed import parallel
from .errors import STOP_SIGNALS

log = logging.getLogger(__name__)
BLOCKED = {*STOP_SIGNALS} - {signal.SIGINT}  # a person types Ctrl-C: it may end a compiler


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile."""

    mode: Literal["none", "blocks", "full"] = "none"
    """What to compile: nothing, each of blocks(model) (alike ones once), or the whole model."""
    dynamic: bool | None = None
    """Dynamic shapes: from the start (true), never (false), or once they vary (default)."""
    autotune: bool = False
    """With a mode: time kernels of matrix products, for minutes; a resume may choose others."""
    backend: str = "inductor"
    """Backend of torch.compile; "eager" and "aot_eager" help to debug the compiler."""


def checkpoint_activations(blocks: Iterable[nn.Module]) -> None:
    """Keep only each block's input, and compute the rest again in backward (Chen et al., 2016)."""
    for block in (each for each in blocks if getattr(each, "recompute", True)):
        names = block.state_dict().keys() & dict(block.named_buffers()).keys()
        block.forward = as_function(partial(_recomputed, block, block.forward, names))


def _recomputed(block: nn.Module, forward: Any, names: set[str], *given: Any, **named: Any) -> Any:
    if names and not torch.compiler.is_compiling():  # compiled, a forward writes its buffers once
        # The second forward must see the buffers of the first one, and not change them again.
        before = {name: block.get_buffer(name).clone() for name in names}
        second = partial(stateless._reparametrize_module, block, before)
        named["context_fn"] = lambda: (contextlib.nullcontext(), second())
    return checkpoint(forward, *given, use_reentrant=False, **named)


def compile_model(model: nn.Module, blocks: Iterable[nn.Module], config: CompileConfig) -> None:
    """Compile in place, by `config.mode`; the compiler runs at the first forward."""
    mode = config.mode
    if mode == "full" and parallel.SHARDED and torch.distributed.is_initialized():
        log.warning("--compile.mode full means blocks: FSDP's hooks break the graph of a model")
        mode = "blocks"
    targets = {"none": [], "blocks": list(blocks), "full": [model]}[mode]
    if targets:
        torch._dynamo.utils.set_compilation_metrics_limit(4096)  # else all but 64 are forgotten
        # DDP would cut compiled blocks at the bounds of its buckets.
        torch._dynamo.config.optimize_ddp = mode == "full"
    options = {"dynamic": config.dynamic, "backend": config.backend}
    kernels = "max-autotune-no-cudagraphs" if config.autotune else None
    for target in targets:
        if type(target).forward.__module__.startswith("torch."):
            # compile() passes over torch's own functions, so it would compile nothing of a bare
            # nn.Sequential or nn.TransformerEncoderLayer.
            target.forward = torch.compile(as_function(target.forward), mode=kernels, **options)
        else:
            target.compile(mode=kernels, **options)


def as_function(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` as a plain function: the compiler passes over partials and torch's own functions."""
    return lambda *arguments, **named: call(*arguments, **named)


class Compiling:
    """A callback for runs that compile: keeps stop signals from compilers, sums up at the end."""

    # A stop signal to the process group would end the processes that compile, and the step with
    # them. So it is blocked while the compiler works, which its processes inherit, and comes later.
    def __enter__(self) -> "Compiling":
        torch._dynamo.callback_handler.register_start_callback(self._block)
        torch._dynamo.callback_handler.register_end_callback(self._unblock)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        torch._dynamo.callback_handler.remove_start_callback(self._block)
        torch._dynamo.callback_handler.remove_end_callback(self._unblock)
        if kind is None:
            log.log(logging.INFO if graphs() else logging.WARNING, "%s", compile_summary())

    def _block(self, compilation: object) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)

    def _unblock(self, compilation: object) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)


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
