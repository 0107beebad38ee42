"""Files of `torch.save`, of both its formats: the tensors in them by name, nothing called.

`torch.load(weights_only=True)` calls less than it used to, but unpacks compressed records of any
size, and makes arrays as large as a file of a hundred bytes asks for. Here a file costs
memory and time in proportion to its size.
"""

import contextlib
import io
import math
import mmap
import pickle
import shutil
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import torch

from .decoding import DTYPES, Decoder, Global, Made
from .remote import PART, Place, RemotePath

KINDS = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
    "Untyped": torch.uint8,
}
STORAGES = {
    f"{module}.{kind}Storage": dtype
    for module in ("torch", "torch.cuda", "torch.storage")
    for kind, dtype in KINDS.items()
}
TENSOR, TENSOR_WITH_DTYPE = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
OTHERS = (
    "torch.Size torch.device torch.serialization._get_layout torch.nn.parameter.Parameter "
    "collections.OrderedDict collections.Counter _codecs.encode builtins.set __builtin__.set "
    "builtins.complex builtins.bytearray"
)
ALLOWED = {*STORAGES, *DTYPES, TENSOR, TENSOR_WITH_DTYPE, *PARAMETERS, *OTHERS.split()}
MAGIC = 0x1950A86A20F9469CFC6C
GROWTH = 64  # what is made of a file may be this many times larger: tensors of several names
TOO_LARGE = "what it describes is far larger than the file itself"
Content = bytes | mmap.mmap
Storages = Callable[[Made], torch.Tensor]
# It would have us copy what is read: nobody writes there.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


def load_tensors(path: Place) -> dict[str, torch.Tensor]:
    """The tensors in a file, by names as in "model.norm.weight", mapped into memory, not read.

    What lies in a store is fetched first, into a temporary file.
    """
    with fetched(path) as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tree, storages = decode(content)
    found, budget = {}, GROWTH * len(content) + (1 << 20)
    todo = [("", tree)]
    while todo:
        name, value = todo.pop()
        if type(value) is dict:
            for key, inner in reversed(value.items()):
                full = f"{name}.{key}" if name else f"{key}"
                budget -= len(full) + 8
                if budget < 0:
                    raise pickle.UnpicklingError(TOO_LARGE)
                todo.append((full, inner))
        elif type(value) is Made and value.of in (TENSOR, TENSOR_WITH_DTYPE, *PARAMETERS):
            found[name] = build(value, storages)
            budget -= found[name].nbytes
        if budget < 0:
            raise pickle.UnpicklingError(TOO_LARGE)
    return found


@contextlib.contextmanager
def fetched(path: Place) -> Iterator[BinaryIO]:
    """A file on disk: the same, or a copy that is gone afterwards."""
    if not isinstance(path, RemotePath):
        with open(path, "rb") as file:
            yield file
        return
    with tempfile.NamedTemporaryFile() as copy, path.open() as file:
        shutil.copyfileobj(file, copy, PART)
        copy.flush()
        yield copy


def load_tensor(file: BinaryIO, offset: int, length: int) -> torch.Tensor:
    """The one tensor in what was saved to a part of a file."""
    file.seek(offset)
    content = file.read(length)
    tree, storages = decode(content)
    if type(tree) is not Made:
        raise pickle.UnpicklingError("it is no tensor")
    return build(tree, storages)


def decode(content: Content) -> tuple[Any, Storages]:
    """What was pickled, and what finds the memory that it refers to."""
    return (decode_zip if content[:4] == b"PK\3\4" else decode_legacy)(content)


def decode_zip(content: Content) -> tuple[Any, Storages]:
    """The format since torch 1.6: a zip archive, nothing compressed, of data.pkl and data/*."""
    records = {}
    file = io.BytesIO(content) if type(content) is bytes else content
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            at = entry.header_offset
            lengths = struct.unpack("<HH", content[at + 26 : at + 30])
            start = at + 30 + sum(lengths)
            if entry.compress_type or entry.flag_bits & 1:
                raise pickle.UnpicklingError("it is compressed or encrypted")
            if not 0 <= at <= start <= start + entry.file_size <= len(content):
                raise pickle.UnpicklingError("a record lies outside of the file")
            records[entry.filename.partition("/")[2]] = (start, entry.file_size)
    if sum(size for _, size in records.values()) > len(content):
        raise pickle.UnpicklingError("its records lie over each other")
    start, size = records.get("byteorder", (0, 0))
    if size and content[start : start + min(size, 9)] != b"little":
        raise pickle.UnpicklingError("its numbers are not little-endian")
    file.seek(records["data.pkl"][0])
    tree = Decoder(file, ALLOWED).load()
    return tree, memory_in(content, {n[5:]: at for n, at in records.items() if n[:5] == "data/"})


def decode_legacy(content: Content) -> tuple[Any, Storages]:
    """The format before: pickles of a header, of the content, of keys, then each key's memory."""
    file = io.BytesIO(content) if type(content) is bytes else content
    if Decoder(file, ALLOWED).load() != MAGIC:
        raise pickle.UnpicklingError("it is not a file of torch.save")
    for _ in ("protocol", "system"):
        Decoder(file, ALLOWED).load()
    decoder = Decoder(file, ALLOWED)
    tree, keys, records = decoder.load(), Decoder(file, ALLOWED).load(), {}
    start = file.tell()
    for key in keys:
        if type(key) is not str:
            raise pickle.UnpicklingError("a key is no text")
        (count,) = struct.unpack("<q", content[start : start + 8])
        start, size = start + 8, count * STORAGES[decoder.storages[key].of].itemsize
        if not 0 <= size <= len(content) - start:
            raise pickle.UnpicklingError("it ends before its last tensor")
        records[key] = (start, size)
        start += size
    return tree, memory_in(content, records)


def memory_in(content: Content, records: dict[str, tuple[int, int]]) -> Storages:
    """What gives the part of a file that is one storage, as bytes: the same for the same key."""
    made: dict[str, torch.Tensor] = {}

    def find(storage: Made) -> torch.Tensor:
        key, _ = storage.arguments
        if key not in made:
            start, size = records[key]
            made[key] = torch.empty(0, dtype=torch.uint8)
            if size:
                part = torch.frombuffer(content, dtype=torch.uint8, count=size, offset=start)
                made[key] = part.clone() if part.data_ptr() % 16 else part  # legacy: not aligned
        return made[key]

    return find


def build(made: Made, storages: Storages) -> torch.Tensor:
    """The tensor that a call of torch._utils stands for; UnpicklingError if it is not sound."""
    if made.of in PARAMETERS and type(made.arguments[0]) is Made:
        made = made.arguments[0]
    match made.of, made.arguments:
        case str(of), (Made() as storage, int(offset), tuple(size), tuple(stride), _, _, *rest) if (
            of in (TENSOR, TENSOR_WITH_DTYPE) and storage.of in STORAGES
        ):
            dtype = STORAGES[storage.of]
            if of == TENSOR_WITH_DTYPE and type(rest[0]) is Global:
                dtype = DTYPES[rest.pop(0)]
        case _:
            raise pickle.UnpicklingError(f"{made.of} is not of a plain tensor")
    numbers = (offset, *size, *stride)
    sound = all(type(n) is int and 0 <= n < 1 << 62 for n in numbers) and not any(rest)
    sound &= len(size) == len(stride) <= 64
    sound &= math.prod(size if sound else ()) * dtype.itemsize < 1 << 62
    memory = storages(storage)
    if sound and math.prod(size):
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        sound = (last + 1) * dtype.itemsize <= memory.nbytes
        sound &= memory.nbytes % dtype.itemsize == 0
    elif sound:
        return torch.empty(size, dtype=dtype)
    if not sound:
        raise pickle.UnpicklingError("a tensor reaches beyond its own memory")
    return memory.view(dtype).as_strided(size, stride, offset)
