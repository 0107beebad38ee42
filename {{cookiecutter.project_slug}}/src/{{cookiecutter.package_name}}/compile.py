"""Apply activation checkpointing and torch.compile to a model, before DDP or FSDP wraps it.

Both change the model in place. They add no wrapper modules, so parameters keep their names.
"""

import contextlib
import logging
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import stateless
from torch.utils.checkpoint import checkpoint

from .distributed import parallel
from .errors import STOP_SIGNALS

log = logging.getLogger(__name__)
# Signals to hold back while the compiler works. Ctrl-C is not one, since a person is waiting.
BLOCKED = {*STOP_SIGNALS} - {signal.SIGINT}


@dataclass(frozen=True)
class CompileConfig:
    """Settings of torch.compile."""

    mode: Literal["none", "blocks", "full"] = "none"
    """none; blocks: blocks(model) one by one, each kind once; full: the model as a whole."""
    dynamic: bool | None = None
    """Dynamic shapes: from the start (True), never (False), or once shapes vary (None)."""
    autotune: bool = False
    """Benchmark kernels of matrix products while compiling (minutes); a resume may pick others."""
    backend: str = "inductor"
    """Backend of torch.compile; "eager" and "aot_eager" help to debug the compiler."""


def checkpoint_activations(blocks: Iterable[nn.Module]) -> None:
    """Keep only the input of each block; backward recomputes the rest (Chen et al., 2016)."""
    for block in blocks:
        # `recompute = False` in a block's class excludes it.
        if getattr(block, "recompute", True):
            block.forward = recomputed_forward(block)


def recomputed_forward(block: nn.Module) -> Callable[..., Any]:
    """Wrap a block's forward so that backward recomputes its activations."""
    forward = block.forward
    # A forward may change persistent buffers, such as batch statistics. Backward must recompute the
    # forward with their earlier values, and must not change them a second time. Only persistent
    # buffers are both in the state dictionary and in `named_buffers`.
    buffer_names = block.state_dict().keys() & dict(block.named_buffers()).keys()

    def recomputed(*arguments: Any, **named: Any) -> Any:
        # Compiled code does both by itself: it recomputes with the earlier values, and changes a
        # buffer only once.
        if buffer_names and not torch.compiler.is_compiling():
            before = {name: block.get_buffer(name).clone() for name in buffer_names}

            # torch runs the forward in the first context, and recomputes it in the second one.
            def contexts() -> tuple[Any, Any]:
                return contextlib.nullcontext(), EarlierBuffers(block, before)

            named["context_fn"] = contexts
        return checkpoint(forward, *arguments, use_reentrant=False, **named)

    return recomputed


class EarlierBuffers:
    """Context in which a block has its buffers from before a forward, to recompute the forward.

    The block gets its own buffers back at the end, so changes made in the context are lost. Each
    backward through the block enters the context: with `retain_graph`, that may be several times.
    """

    def __init__(self, block: nn.Module, before: dict[str, Tensor]) -> None:
        self.block = block
        self.before = before
        self.swapped = contextlib.ExitStack()

    def __enter__(self) -> None:
        copies = {name: buffer.clone() for name, buffer in self.before.items()}
        self.swapped.enter_context(stateless._reparametrize_module(self.block, copies))

    def __exit__(self, *error: object) -> None:
        self.swapped.close()


def compile_model(model: nn.Module, blocks: Iterable[nn.Module], config: CompileConfig) -> None:
    """Compile in place according to `config.mode`; the compiler runs at the first forward."""
    mode = config.mode
    if mode == "full" and parallel.SHARDED and torch.distributed.is_initialized():
        log.warning(
            "--compile.mode full: FSDP's hooks break the graph of a whole model; compiling blocks"
        )
        mode = "blocks"
    if mode == "none":
        return
    targets = [model] if mode == "full" else list(blocks)
    if targets:
        # By default torch keeps only the metrics of the last 64 compilations. `compile_summary`
        # needs all of them, and few runs have more than 4096.
        torch._dynamo.utils.set_compilation_metrics_limit(4096)
        # DDP can split a compiled graph at the boundaries of its buckets. For a whole model, this
        # lets communication overlap with backward. Blocks are separate graphs already.
        torch._dynamo.config.optimize_ddp = mode == "full"
    torch_mode = "max-autotune-no-cudagraphs" if config.autotune else None
    options: dict[str, Any] = {
        "mode": torch_mode,
        "dynamic": config.dynamic,
        "backend": config.backend,
    }
    for target in targets:
        if type(target).forward.__module__.startswith("torch."):
            # The compiler skips torch's own functions. So for a plain nn.Sequential or
            # nn.TransformerEncoderLayer, `target.compile()` would compile nothing.
            target.forward = torch.compile(as_function(target.forward), **options)
        else:
            target.compile(**options)


def as_function(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `call` in a function of this package, which the compiler does not skip."""

    def function(*arguments: Any, **named: Any) -> Any:
        return call(*arguments, **named)

    return function


class Compiling:
    """Callback for runs that compile: holds back stop signals and logs a summary at the end."""

    # A stop signal often goes to all processes of a job. It would kill the compiler's subprocesses,
    # and the step would fail. So the training thread blocks the signal while the compiler works,
    # and subprocesses inherit the block. This process gets the signal once the compiler is done.
    def __enter__(self) -> "Compiling":
        handler = torch._dynamo.callback_handler
        handler.register_start_callback(self._block)
        handler.register_end_callback(self._unblock)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        handler = torch._dynamo.callback_handler
        handler.remove_start_callback(self._block)
        handler.remove_end_callback(self._unblock)
        if kind is None:
            # Warn if there is no compiled graph: then --compile.mode had no effect.
            level = logging.INFO if graphs() else logging.WARNING
            log.log(level, "%s", compile_summary())

    def _block(self, compilation: object) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)

    def _unblock(self, compilation: object) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)


def graphs() -> int:
    """Count the graphs that were compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def compile_seconds() -> float:
    """Return the total seconds spent on compiling in this process, backward graphs included."""
    entries = torch._dynamo.utils.get_compilation_metrics()
    return sum(entry.duration_us or 0 for entry in entries) / 1e6


def compile_summary() -> str:
    """Summarize in one line what the compiler did in this process."""
    entries = torch._dynamo.utils.get_compilation_metrics()
    breaks = len(torch._dynamo.utils.graph_break_reasons)
    recompiles = sum(1 for entry in entries if entry.recompile_reason)
    parts = [
        f"compiled {graphs()} graphs in {compile_seconds():.1f} s",
        f"graph breaks: {breaks}",
        f"recompiles: {recompiles}",
    ]
    failures = [entry.fail_reason for entry in entries if entry.fail_reason]
    if failures:
        reason = failures[0].splitlines()[0]
        parts.append(f"functions that run eagerly: {len(failures)}, such as: {reason}")
    return "; ".join(parts)
