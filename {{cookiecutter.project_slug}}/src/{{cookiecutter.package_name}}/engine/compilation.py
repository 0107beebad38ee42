"""What is done to a model before it is placed on ranks: activation checkpointing, torch.compile.

The order matters: checkpointing first, so that the compiler sees what is recomputed; compiling
before sharding or wrapping, whose hooks would break the graph. Both work in place: no wrapper
module, so no parameter changes its name.
"""

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


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


def checkpoint_activations(blocks: Iterable[nn.Module]) -> None:
    """Keep only each block's input, and compute the rest again in backward (Chen et al., 2016)."""
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def compile_model(model: nn.Module, blocks: Iterable[nn.Module], config: CompileConfig) -> None:
    """Compile in place, as `config.mode` says; the work is done at the first forward."""
    targets = {"none": [], "blocks": list(blocks), "full": [model]}[config.mode]
    for target in targets:
        target.compile(fullgraph=config.fullgraph, dynamic=config.dynamic, backend=config.backend)


def compile_summary() -> str:
    """One line on what the compiler did in this process: graphs, graph breaks, recompiles."""
    from torch._dynamo.utils import counters, get_compilation_metrics

    graphs = [entry for entry in get_compilation_metrics() if entry.co_name]
    seconds = sum(entry.entire_frame_compile_time_s or 0.0 for entry in graphs)
    reasons = Counter(e.recompile_reason.strip() for e in graphs if e.recompile_reason)
    # A data-dependent `if` is counted as unimplemented, not as a graph break.
    breaks = Counter(counters["graph_break"]) + Counter(counters["unimplemented"])
    line = (
        f"compiled {len(graphs)} graphs in {seconds:.1f} s; "
        f"graph breaks: {sum(breaks.values())}; recompiles: {sum(reasons.values())}"
    )
    for name, counts in (("break", breaks), ("recompile", reasons)):
        if counts:
            line += f"; most frequent {name}: {counts.most_common(1)[0][0].splitlines()[0]}"
    if (limit := torch._dynamo.config.recompile_limit) and sum(reasons.values()) >= limit:
        line += f"; the recompile limit ({limit}) may have been hit: then the rest ran eagerly"
    return line
