"""The fused kernels of a transformer block for a GPU that is not there, forward and backward.

python -m tests.gpu_dry.kernels SOURCE

SOURCE is the folder `src` of a rendered language model. The block has the size of gpt2_124m's, with
a micro-batch of 32 in bfloat16 autocast. Inductor lowers its graphs for fake CUDA tensors and fuses
them; no kernel is written, so neither Triton nor a GPU is needed. Products and attention are no
fused kernels. Each line is a kernel: the bytes that it moves, the sizes of its loops, and how many
of its addresses need a division, which breaks up what is contiguous.
"""

import contextlib
import importlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from . import dry

BATCH, CONTEXT, WIDTH, HEADS = 32, 1024, 768, 12


@dataclass
class Kernel:
    """A fused kernel."""

    is_backward: bool
    bytes: int
    loops: list[int]
    divisions: int
    operators: list[str]


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """Make inductor believe in an H100 with Triton."""
    import torch
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import scheduler
    from torch._subclasses.fake_tensor import FakeTensorMode

    properties = SimpleNamespace(
        name="NVIDIA H100",
        major=9,
        minor=0,
        multi_processor_count=132,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=80 << 30,
        shared_memory_per_block_optin=232448,
        gcnArchName="",
    )

    def get_properties(*device: Any) -> Any:
        return properties

    def zero(*device: Any) -> int:
        return 0

    def yes(*device: Any) -> bool:
        return True

    def state(*device: Any) -> Any:
        return torch.zeros(16, dtype=torch.uint8)

    def nothing(*given: Any) -> None:
        pass

    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "_get_device_properties", get_properties),
        (torch.cuda, "get_device_properties", get_properties),
        (torch.cuda, "current_device", zero),
        (torch.cuda, "is_available", yes),
        (torch.cuda, "is_initialized", yes),
        (torch.cuda, "is_bf16_supported", yes),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "get_device_capability", lambda *device: (9, 0)),
        (torch.cuda, "get_rng_state", state),
        (torch.cuda, "set_rng_state", nothing),
        (torch.cuda, "synchronize", nothing),
        (torch.cuda, "_lazy_init", nothing),
        (CudaInterface, "get_device_properties", staticmethod(get_properties)),
        (CudaInterface, "current_device", staticmethod(zero)),
        (CudaInterface, "is_available", staticmethod(yes)),
        (CudaInterface, "get_compute_capability", staticmethod(lambda *device: 90)),
        (CudaInterface.Worker, "get_device_properties", staticmethod(get_properties)),
        (CudaInterface.Worker, "current_device", staticmethod(zero)),
        (scheduler, "has_triton", yes),
        (FakeTensorMode, "avoid_device_init", True),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        yield


def fused(graph: Any, inputs: Any, is_backward: bool) -> list[Kernel]:
    """Lower a graph as inductor does, and list the kernels that it makes of it."""
    from torch._guards import detect_fake_mode
    from torch._inductor import compile_fx, scheduler
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    compile_fx.view_to_reshape(graph)
    kernels: list[Kernel] = []
    with V.set_fake_mode(detect_fake_mode(inputs)):
        compile_fx._recursive_post_grad_passes(graph)
        lowering = GraphLowering(graph, example_inputs=inputs)
        with (
            V.set_graph_handler(lowering),
            V.set_extern_kernel_nodes([]),
            V.set_debug_handler(DebugContext()),
        ):
            lowering.run(*inputs)
            lowering.init_wrapper_code()
            lowering._update_scheduler()
            for node in lowering.scheduler.nodes:
                if not isinstance(node, scheduler.SchedulerNode | scheduler.FusedSchedulerNode):
                    continue
                analysis = node.get_coalesce_analysis().norm_read_writes
                addresses = [str(address) for address in (*analysis.reads, *analysis.writes)]
                origins = {origin.name for each in node.get_nodes() for origin in each.node.origins}
                kernel = Kernel(
                    is_backward=is_backward,
                    bytes=node.get_read_write_buffers_sizes(),
                    loops=[int(size) for size in analysis.var_ranges.values()],
                    divisions=sum("//" in each or "Modular" in each for each in addresses),
                    operators=sorted(origins),
                )
                kernels.append(kernel)
    return kernels


def kernels_of_a_block(source: Path, package: str) -> list[Kernel]:
    """List the fused kernels of a block's forward and backward; `dry.load` comes before."""
    import torch
    import torch.nn.functional as F
    from torch._functorch.aot_autograd import aot_function, make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode

    sys.path.insert(0, str(source))
    model = importlib.import_module(f"{package}.model")
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    kernels: list[Kernel] = []

    def attention(q: Any, k: Any, v: Any, dropout_p: float, is_causal: bool) -> Any:
        return flash(q, k, v, dropout_p, is_causal)[0]

    def forward_compiler(graph: Any, inputs: Any) -> Any:
        kernels.extend(fused(graph, inputs, False))
        return make_boxed_func(graph.forward)

    def backward_compiler(graph: Any, inputs: Any) -> Any:
        kernels.extend(fused(graph, inputs, True))
        return make_boxed_func(graph.forward)

    with (
        mock.patch.object(F, "scaled_dot_product_attention", attention),
        pretended_gpu(),
        FakeTensorMode(),
    ):
        with torch.device("cuda"):
            config = model.ModelConfig(layers=1, heads=HEADS, width=WIDTH)
            block = model.Block(config, model.Attention)
            table = model.rotary(CONTEXT, WIDTH // HEADS)
            x = torch.randn(BATCH, CONTEXT, WIDTH, requires_grad=True)
        weights = dict(block.named_parameters())

        def forward(x: Any, table: Any, *values: Any) -> Any:
            named = dict(zip(weights, values, strict=True))
            return torch.func.functional_call(block, named, (x, table))

        compiled = aot_function(
            forward,
            fw_compiler=forward_compiler,
            bw_compiler=backward_compiler,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
        with torch.autocast("cuda", torch.bfloat16):
            y = compiled(x, table, *weights.values())
        y.sum().backward()
    return kernels


def main() -> None:
    """Print the kernels, and their sum."""
    source = Path(sys.argv[1])
    (package,) = [folder.parent.name for folder in source.glob("*/model.py")]
    with tempfile.TemporaryDirectory() as folder:
        dry.load(dry.build(Path(folder)))
    kernels = kernels_of_a_block(source, package)
    for kernel in kernels:
        way = "backward" if kernel.is_backward else "forward"
        size = f"{kernel.bytes / 1e6:6.1f} MB"
        loops = " x ".join(str(size) for size in kernel.loops)
        print(f"{way:8} {size}  {loops}, {kernel.divisions} divisions: {kernel.operators[:6]}")
    total = sum(kernel.bytes for kernel in kernels) / 1e6
    print(f"{len(kernels)} fused kernels move {total:.1f} MB")


if __name__ == "__main__":
    main()
