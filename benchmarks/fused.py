"""Bytes that the fused kernels of a compiled step move, by inductor's own count.

python -m benchmarks.fused SOURCE TOKENS BATCH LAYERS

Prints those of a forward and a backward of the preset gpt2_124m, compiled as a whole for the CPU,
of BATCH samples and so many layers. Which operators inductor fuses hardly depends on the device.
Its C++ is not compiled, so the values mean nothing: only the counts count.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from .common import PACKAGE


def moved(tokens: Path, batch: int, layers: int) -> int:
    """The bytes; those of products and of attention, which are no fused kernels, do not count."""
    import torch
    from torch._inductor import metrics
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.scheduler import ExternKernelSchedulerNode

    torch._logging.set_logs(inductor_metrics=True)  # else it counts nothing
    torch._inductor.config.force_disable_caches = True  # nor what it finds there
    AsyncCompile.cpp_pybinding = lambda self, *_, **__: lambda *_: None
    loop, config, distributed = (
        importlib.import_module(f"{PACKAGE}.{name}") for name in ("train", "config", "distributed")
    )
    changes: dict[str, Any] = {"data.path": tokens, "device": "cpu"}
    changes |= {"train.global_batch_size": batch, "train.micro_batch_size": batch}
    changes |= {"train.precision": "bf16", "model.layers": layers}
    changes |= {"compile.mode": "full", "compile.dynamic": False}
    settings = config.override(config.preset("gpt2_124m"), changes)
    state = loop.setup(settings, distributed.World(0, 1, torch.device("cpu")))
    loop.train_step(state, state.loader.next())
    nodes = metrics.nodes_num_elem  # of 4 bytes each
    return sum(4 * n for node, n in nodes if not isinstance(node, ExternKernelSchedulerNode))


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    print(moved(Path(sys.argv[2]), *map(int, sys.argv[3:])))
