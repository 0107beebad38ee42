"""Follow CUDA code on a CPU: fake CUDA tensors have shapes, dtypes and devices, and no data.

`following()` gives a block an H100 as far as a program can see. In it
- what makes the host wait for the device is an error, or counted where it is allowed;
- what two streams, or a stream and the host, do to one tensor without an order is an error;
- mixed devices are an error, as always.
Kernels, Triton, NCCL, the allocators and what the compiler makes of a model are not followed.

Load the guard (`load`) before torch is imported: torch keeps the hooks that it finds first.
"""

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    import torch

SOURCE = Path(__file__).with_name("guard.cpp")


class NotHere(Exception):
    """CUDA code cannot be followed on this machine, or with this release of torch."""


def torch_folder() -> Path:
    """Where torch is installed, without importing it."""
    return Path(str(importlib.util.find_spec("torch").origin)).parent  # type: ignore[union-attr]


def build(folder: Path) -> Path:
    """Compile the guard into a folder, unless it is there; NotHere with the reason."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NotHere("no C++ compiler: install g++, or set CXX")
    version = importlib.metadata.version("torch")
    if (torch_folder() / "lib/libtorch_cuda.so").exists():
        cpu = "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
        raise NotHere(f"torch {version} is built for CUDA: install the one for CPUs, with {cpu}")
    name = hashlib.sha256(SOURCE.read_bytes() + version.encode()).hexdigest()[:16]
    library, torch = folder / f"guard_{name}.so", torch_folder()
    if library.exists():
        return library
    temporary = library.with_suffix(f".{os.getpid()}")
    command = [compiler, "-O0", "-shared", "-fPIC", "-std=c++20", f"-I{torch / 'include'}"]
    command += [str(SOURCE), "-o", str(temporary), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    outcome = subprocess.run(command, capture_output=True, text=True)
    if outcome.returncode:
        raise NotHere(f"guard.cpp does not compile with torch {version}: {outcome.stderr[:2000]}")
    temporary.rename(library)
    return library


def load(library: Path) -> None:
    """Load the guard into this process, which has not imported torch yet; NotHere if it fails."""
    try:
        for name in ("libc10.so", "libtorch_cpu.so"):
            ctypes.CDLL(str(torch_folder() / "lib" / name), ctypes.RTLD_GLOBAL)
        taken = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL).install()
    except (OSError, AttributeError) as error:
        raise NotHere(f"torch does not load the guard: {error}") from None
    if not taken:
        raise NotHere("torch has not taken the guard")


class Waits(Exception):
    """The host waits for the device where it must not."""


class Race(Exception):
    """Two streams, or a stream and the host, use a tensor in no order."""


class Timeline:
    """A stream, or the host: what it has done, and what of the others had been done before."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        import torch

        self.device = torch.device("cuda", 0)
        self.seen: dict[Timeline, int] = {self: 0}

    def after(self, seen: "dict[Timeline, int]") -> None:
        """What follows here comes after all that is `seen`."""
        for other, count in seen.items():
            self.seen[other] = max(count, self.seen.get(other, 0))


class Stream(Timeline):
    """As `torch.cuda.Stream`."""

    def wait_stream(self, other: "Stream") -> None:
        self.after(other.seen)

    def wait_event(self, event: "Event") -> None:
        device.events += 1
        self.after(event.seen)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        device.wait("Stream.synchronize", self.seen)

    def query(self) -> bool:
        return True

    def __enter__(self) -> "Stream":
        self.outer, device.current = device.current, self
        return self

    def __exit__(self, *exception: object) -> None:
        device.current = self.outer


class Event:
    """As `torch.cuda.Event`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: dict[Timeline, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        self.seen = dict((stream or device.current).seen)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or device.current).wait_event(self)

    def synchronize(self) -> None:
        device.wait("Event.synchronize", self.seen)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "Event") -> float:
        if any(device.host.seen.get(stream, 0) < count for stream, count in other.seen.items()):
            raise RuntimeError("elapsed_time: the device may not have come to the event")
        return 1.0


class Generator:
    """The device's random numbers: the state is on the host."""

    def manual_seed(self, seed: int) -> "Generator":
        return self

    def get_state(self) -> Any:
        import torch

        return torch.zeros(16, dtype=torch.uint8)

    def set_state(self, state: Any) -> None:
        pass


class Device:
    """What is noted of the one device, and whether the host may wait for it."""

    def __init__(self) -> None:
        self.allowed = True
        self.clear()

    def clear(self) -> None:
        """Forget what was noted."""
        self.host, self.default = Timeline(), Stream()
        self.current = self.default
        self.streams = [self.default]
        self.waits: list[str] = []
        self.events = 0  # that streams wait for
        # By storage, which is kept so that no other one gets its address.
        self.kept: dict[int, Any] = {}
        self.pinned: set[int] = set()
        self.written: dict[int, tuple[Timeline, int]] = {}
        self.read: dict[int, dict[Timeline, int]] = {}

    def stream(self, *args: Any, **kwargs: Any) -> Stream:
        """A new stream."""
        self.streams.append(Stream())
        return self.streams[-1]

    def wait(self, what: str, seen: dict[Timeline, int] | None = None) -> None:
        """The host waits for what is `seen`, or for all that the device was given."""
        if not self.allowed:
            raise Waits(f"{what}: the host waits for the device")
        self.waits.append(what)
        for each in [seen] if seen is not None else [stream.seen for stream in self.streams]:
            self.host.after(each)

    def key(self, tensor: "torch.Tensor") -> int:
        """A number of the tensor's storage."""
        storage = tensor.untyped_storage()
        self.kept.setdefault(storage._cdata, storage)
        return storage._cdata

    def pin(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Note that a tensor is in pinned memory."""
        self.pinned.add(self.key(tensor))
        return tensor

    def is_pinned(self, tensor: "torch.Tensor") -> bool:
        """Whether a tensor is in pinned memory."""
        return self.key(tensor) in self.pinned

    def use(self, where: Timeline, read: set[int], written: set[int], what: Any = "") -> None:
        """A timeline reads and writes storages; Race if another one may do so at this time."""
        if where is not self.host:
            where.after(self.host.seen)  # it was launched after what the host did before
        where.seen[where] += 1
        now = where.seen[where]
        for key in read | written:
            others = [self.written[key]] if key in self.written else []
            if key in written:
                others += self.read.get(key, {}).items()
            if any(where.seen.get(other, 0) < count for other, count in others):
                who = "the host" if where is self.host else "a stream"
                does = "writes" if key in written else "reads"
                raise Race(f"{what}: {who} {does} what another stream or the host still uses")
            if key in written:
                self.written[key] = where, now
                self.read.pop(key, None)
            else:
                self.read.setdefault(key, {})[where] = now

    def host_reads(self, tensors: "list[torch.Tensor]") -> None:
        """The host reads tensors past torch, as by numpy."""
        self.use(self.host, {self.key(tensor) for tensor in tensors}, set(), "a read by numpy")


device: Device


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """In the block the host must not wait for the device."""
    before, device.allowed = device.allowed, False
    try:
        yield
    finally:
        device.allowed = before


def waits_of(action: Callable[[], Any]) -> list[str]:
    """What the host waits for in an action."""
    before = len(device.waits)
    action()
    return device.waits[before:]


def to_device(module: Any, target: Any) -> Any:
    """`Module.to`, which cannot swap fake tensors: replaces parameters and buffers."""
    import torch

    moved: dict[Any, Any] = {}
    for each in module.modules():
        for name, p in each._parameters.items():
            if p is not None and p not in moved:
                moved[p] = torch.nn.Parameter(p.detach().to(target), p.requires_grad)
            each._parameters[name] = moved.get(p)
        for name, buffer in each._buffers.items():
            each._buffers[name] = None if buffer is None else buffer.to(target)
    return module


def read_tensor(tensor: Any, what: str = "tolist") -> Any:
    """The values of a fake tensor on the host: on a device one wait, whatever its size."""
    import numpy as np

    if tensor.is_cuda:
        device.wait(what)
    kind = "float" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
    return np.full(tensor.shape, kind == "float", kind).tolist()  # ones, zeros, and false


def modes() -> tuple[Any, Any]:
    """The mode that makes tensors fake, and the one that watches."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    aten = torch.ops.aten

    def flat(values: Any) -> list[Any]:
        return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]

    class Following(TorchDispatchMode):
        """Notes what each operator does, and where."""

        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # it comes again, by its local parts
            if f is aten._local_scalar_dense.default:
                return read_tensor(args[0], "item")
            pinned = kwargs.pop("pin_memory", None)
            out = f(*args, **kwargs)
            inputs, outputs = flat((args, kwargs)), flat(out)
            if pinned:
                device.pin(out)
            if not any(t.is_cuda for t in inputs + outputs) and not device.pinned:
                return out
            self.order(f, args, kwargs, inputs, outputs)
            self.copies(f, args, kwargs, out)
            return out

        def copies(self, f: Any, args: Any, kwargs: Any, out: Any) -> None:
            """The host waits for copies that are not asynchronous, and of pageable memory."""
            if f is aten._to_copy.default:
                pairs = [(args[0], out)]
            elif f is aten.copy_.default:
                pairs = [(args[1], args[0])]
            elif f is aten._foreach_copy_.default:
                pairs = [*zip(args[1], args[0], strict=True)]
            else:
                return
            asynchronous = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            for source, target in pairs:
                if source.is_cuda == target.is_cuda:
                    continue
                if f is aten._to_copy.default and asynchronous and source.is_cuda:
                    device.pin(target)  # as torch does
                on_host = target if source.is_cuda else source
                if not asynchronous:
                    device.wait(f"a blocking copy ({source.device} to {target.device})")
                elif not device.is_pinned(on_host):
                    device.wait(f"a copy of pageable memory ({source.device} to {target.device})")

        def order(self, f: Any, args: Any, kwargs: Any, inputs: list, outputs: list) -> None:
            """Note what is read and written, by the current stream or by the host."""
            written = set()
            for place, argument in enumerate(f._schema.arguments):
                given = kwargs.get(argument.name, args[place] if place < len(args) else None)
                collective = f.namespace == "c10d"  # their schemas do not say
                if collective or (argument.alias_info and argument.alias_info.is_write):
                    written |= {device.key(t) for t in flat(given)}
            used = {device.key(t) for t in inputs}
            written |= {device.key(t) for t in outputs} - used
            where = device.current if any(t.is_cuda for t in inputs + outputs) else device.host
            device.use(where, used, written, f)

    mock.patch.object(FakeTensor, "tolist", read_tensor).start()
    return FakeTensorMode(allow_non_fake_inputs=True), Following()


@contextlib.contextmanager
def following(name: str = "NVIDIA H100 80GB HBM3", devices: int = 8) -> Iterator[Device]:
    """An H100 for the block, which may run on fake tensors only."""
    global device
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    device, memory = Device(), 80 << 30
    values: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: devices,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "set_device": lambda *a: None,
        "_lazy_init": lambda: None,
        "is_bf16_supported": lambda *a, **k: True,
        "get_device_name": lambda *a: name,
        "get_device_capability": lambda *a: (9, 0),
        # On a bus that no machine has.
        "get_device_properties": lambda *a: SimpleNamespace(
            name=name, pci_domain_id=0xFFFF, pci_bus_id=0, pci_device_id=0
        ),
        "mem_get_info": lambda *a: (memory, memory),
        "default_generators": tuple(Generator() for _ in range(devices)),
        "get_rng_state": lambda *a: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *a: None,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda *a: device.wait("torch.cuda.synchronize"),
        "Stream": device.stream,
        "Event": Event,
        "current_stream": lambda *a: device.current,
        "default_stream": lambda *a: device.default,
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "reset_peak_memory_stats": lambda *a: None,
        "empty_cache": lambda *a: None,
    }
    for figure in ("memory_allocated", "memory_reserved"):
        values |= {figure: lambda *a: 0, f"max_{figure}": lambda *a: 0}
    replaced = [(torch.cuda, key, value) for key, value in values.items()]
    replaced += [
        (torch, "Event", Event),
        (torch, "Stream", device.stream),
        (torch.nn.Module, "to", to_device),
        (torch.Tensor, "pin_memory", lambda tensor, *a: device.pin(tensor.clone())),
        (torch.Tensor, "is_pinned", lambda tensor, *a: device.is_pinned(tensor)),
        (torch.Tensor, "record_stream", lambda *a: None),
        (FakeTensorMode, "avoid_device_init", True),
    ]
    with contextlib.ExitStack() as stack:
        for owner, key, value in replaced:
            stack.enter_context(mock.patch.object(owner, key, value))
        for mode in modes():
            stack.enter_context(mode)
        yield device


@contextlib.contextmanager
def one_rank_of(size: int, rank: int) -> Iterator[None]:
    """A process group in which the other ranks are not there, and each collective succeeds."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
