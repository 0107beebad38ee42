"""What bounds a step of GPT-2's size on a GPU, by bytes and FLOPs: eager, and compiled as a whole.

python -m benchmarks.roofline [--smoke]

Needs no GPU: the step runs on fake CUDA tensors, which have no data. An operator takes the longest
of its FLOPs at 70 % of the peak (60 % of TF32's in float32), its bytes at 85 % of the bandwidth,
and 2.5 us. Views are free; attention is the flash kernel, and RMSNorm is counted as LayerNorm, one
kernel. Compiled, products and optimizer take as long, and all else the bytes that inductor counts
of its fused kernels (fused.py), at 85 % of the bandwidth. Real kernels do less well.
"""

import importlib
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.gpu_dry import dry

from .common import PACKAGE, ROOT, benchmark, render, series

PEAK, TF32 = 0.7 * 989e12, 0.6 * 494e12  # FLOP/s of both devices
BANDWIDTHS = {"H100": 3.35e12, "H200": 4.8e12}  # bytes/s
LEAST = 2.5e-6  # seconds of a kernel
# They touch a few values of their largest tensor, or only its shape.
SPARSE = ("embedding", "gather", "scatter_", "nll_loss_forward", "new_zeros")


def counted(vocabulary: int) -> Any:
    """A mode that adds up what operators cost, by their kind."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import flop_registry

    class Counted(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seconds = {name: Counter[str]() for name in BANDWIDTHS}
            self.kernels = 0

        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            out = f(*args, **kwargs)
            leaves = tree_leaves((args, kwargs, out))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            free = f.is_view or f.namespace == "prim" or f is torch.ops.aten._unsafe_view.default
            if free or not any(tensor.is_cuda for tensor in tensors):
                return out
            flops = 0
            if f._overloadpacket in flop_registry:
                flops = flop_registry[f._overloadpacket](*args, **kwargs, out_val=out)
            # An argument that is given twice, or returned, is counted once.
            sizes = {id(tensor): tensor.nbytes for tensor in tensors}
            moved = sum(sizes.values())
            if f._overloadpacket.__name__ in SPARSE:
                moved -= max(sizes.values())
            peak = PEAK if any(t.dtype == torch.bfloat16 for t in tensors) else TF32
            kind = self.kind(str(f), flops, [tensor.shape for tensor in tensors])
            for name, bandwidth in BANDWIDTHS.items():
                cost = max(flops / peak, moved / (0.85 * bandwidth), LEAST)
                self.seconds[name][kind] += cost
            self.kernels += 1
            return out

        def kind(self, name: str, flops: int, shapes: list[Any]) -> str:
            large = any(vocabulary in shape for shape in shapes if len(shape) > 1)
            if flops:
                return "the output layer's products" if large else "products of the blocks"
            if "foreach" in name or "fused_adam" in name:
                return "optimizer"
            return "cross entropy, output weight" if large else "elementwise, norms"

    return Counted()


def fused_bytes(source: Path, tokens: Path, batch: int, layers: int) -> tuple[float, float]:
    """Bytes that fused kernels move in a step of `batch` samples, and an error, relative.

    They go up evenly with samples and layers, and so follow from small steps. The error is that for
    another step, which is counted, too.
    """

    def count(samples: int, depth: int) -> int:
        words = [str(word) for word in (source, tokens, samples, depth)]
        command = [sys.executable, "-m", "benchmarks.fused", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return int(done.stdout.split()[-1])

    a, b, c, d = (count(samples, depth) for samples in (2, 4) for depth in (1, 2))

    def expected(samples: int, depth: int) -> float:
        sizes, depths = samples / 2 - 1, depth - 1
        return a + depths * (b - a) + sizes * (c - a + depths * (d - c - b + a))

    other = count(6, 3)
    return expected(batch, layers), abs(expected(6, 3) / other - 1)


def measure(folder: Path, smoke: bool) -> dict[str, Any]:
    """The second step of a default render."""
    dry.load(dry.build(folder))  # before torch is imported
    import torch
    import torch.nn.functional as F

    from . import gpt2

    source = render(folder)  # which gives sys.path another list
    sys.path.insert(0, str(source))
    loop, config = (importlib.import_module(f"{PACKAGE}.{name}") for name in ("train", "config"))
    distributed = importlib.import_module(f"{PACKAGE}.distributed")
    batch, tokens = 1 if smoke else 32, gpt2.random_tokens(folder / "tokens", gpt2.VOCABULARY)
    changes = {"data.path": tokens, "train.global_batch_size": batch}
    changes |= {"train.micro_batch_size": batch, "device": "cuda"}
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    F.scaled_dot_product_attention = lambda q, k, v, dropout_p, is_causal: flash(
        q, k, v, dropout_p, is_causal
    )[0]
    torch.nn.RMSNorm.forward = lambda self, x: F.layer_norm(x, x.shape[-1:], self.weight)
    with dry.following():
        world = distributed.World(0, 1, torch.device("cuda", 0))
        state = loop.setup(config.override(config.preset("gpt2_124m"), changes), world)
        loop.train_step(state, state.loader.next())
        batches = state.loader.next()
        with counted(gpt2.VOCABULARY) as found:
            loop.train_step(state, batches)
        state.loader.close()
    fused, error = (0.0, 0.0) if smoke else fused_bytes(source, tokens, batch, gpt2.LAYERS)
    figures = {}
    for device, seconds in found.seconds.items():
        for kind, value in seconds.most_common():
            figures[f"{device}: {kind}"] = series([1000 * value], "ms")
        compiled = sum(value for kind, value in seconds.items() if "," not in kind)
        compiled += fused / (0.85 * BANDWIDTHS[device])
        totals = {"an eager step": sum(seconds.values()), "a compiled step": compiled}
        for way, total in totals.items():
            figures[f"{device}: {way}"] = series([1000 * total], "ms")
            mfu = gpt2.flops_per_token() * batch * gpt2.CONTEXT / total / 989e12
            figures[f"{device}: {way}, MFU at most"] = series([100 * mfu], "%")
    figures["kernels of an eager step"] = series([found.kernels], "")
    figures["fused kernels of a compiled step"] = series([fused / 1e9], "GB")
    figures["error of the bytes foretold for 6 samples and 3 layers"] = series([100 * error], "%")
    return {"settings": {"micro_batch": batch}, "series": figures}


if __name__ == "__main__":
    benchmark("roofline", measure, ("torch",))
