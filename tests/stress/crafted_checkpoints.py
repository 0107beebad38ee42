"""Checkpoints and files as somebody would craft them, sealed again, so that they verify.

A case is a function that changes the files of a whole checkpoint (or makes a file to read weights
from); whoever uses it seals the manifest afterwards, unless the manifest is what is crafted.
"""

import copy
import io
import json
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata

from .mutations import random_entry
from .pickle_payloads import payloads

INDEX, SHARD, WHOLE, MANIFEST = ".metadata", "__0_0.distcp", "state.pt", "manifest.json"
HARMLESS = ("identity", "parameters", "lists 500 deep", "many")  # for some ways of reading
Change = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """One crafted thing."""

    name: str
    answer: str
    """The checkpoint answer whose run it is put into."""
    change: Change
    kind: str = "checkpoint"
    """"checkpoint": files to seal; "manifest": sealed already; "file", "folder": one to read."""
    refused: bool = True
    """Whether it must not be read as good (else either will do: it may be harmless as data)."""


def cases(tell_tale: str, bounded: bool) -> Iterator[Case]:
    """All of them."""
    for number, (name, content) in enumerate(payloads(tell_tale, bounded)):
        places = list(hosts(name, content))
        # Each call by each way in one place; one call, and what is no call, in all places.
        everywhere = not bounded and (name.startswith("os.system") or " by " not in name)
        yield from places if everywhere else [places[number % len(places)]]
    for name, change in list(manifests())[:: 2 if bounded else 1]:
        yield Case(f"manifest: {name}", "dcp", change, "manifest", not name.startswith(HARMLESS))
    for name, change in indices():
        # Only that it names other files must be refused: what else it says may be read as data.
        yield Case(f"index: {name}", "dcp", change, refused=name.startswith("a part in"))
    for name, change in archives():
        yield Case(f"archive: {name}", "torch_save", change)
    yield from files()


def hosts(name: str, content: bytes) -> Iterator[Case]:
    """The places where a pickle is read."""

    def into(place: str, make: Callable[[], bytes]) -> Change:
        return lambda folder: (folder / place).write_bytes(make())

    yield Case(f"{INDEX}: {name}", "dcp", into(INDEX, lambda: content))
    yield Case(f"{WHOLE}: {name}", "torch_save", into(WHOLE, lambda: zipped(content)))
    yield Case(f"part: {name}", "dcp", lambda folder: parts(folder, content))
    yield Case(f"bare pickle: {name}", "torch_save", into(WHOLE, lambda: content))
    legacy = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({}, 2)
    yield Case(f"legacy: {name}", "torch_save", into(WHOLE, lambda: legacy + content))
    yield Case(f"--init-from: {name}", "dcp", into("x.pt", lambda: zipped(content)), "file")
    yield Case(f"byte entry: {name}", "dcp", lambda f: byte_entry(f, content), refused=False)


def zipped(content: bytes, compression: int = zipfile.ZIP_STORED, **more: bytes) -> bytes:
    """An archive as of `torch.save`, with this as what is pickled."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/byteorder", "little")
        for name, record in more.items():
            archive.writestr(f"archive/{name.replace('__', '/')}", record)
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


def index_of(folder: Path) -> Any:
    """The index of our own checkpoint, as DCP reads it."""
    return pickle.loads((folder / INDEX).read_bytes())


def reindexed(change: Callable[[Any], object]) -> Change:
    """Change the index as an object."""

    def apply(folder: Path) -> None:
        index = index_of(folder)
        (folder / INDEX).write_bytes(pickle.dumps(change(index) or index))

    return apply


def parts(folder: Path, content: bytes) -> None:
    """Put this behind a shard, and let a stored part point there."""
    index = index_of(folder)
    of_the_model = (item for item in index.storage_data.items() if item[0].fqn[:6] == "model.")
    key, info = min(of_the_model, key=lambda item: item[1].length)
    content = zipped(content, data__0=bytes(info.length))
    offset = (folder / SHARD).stat().st_size
    index.storage_data[key] = replace(info, offset=offset, length=len(content))
    with open(folder / SHARD, "ab") as file:
        file.write(content)
    (folder / INDEX).write_bytes(pickle.dumps(index))


def byte_entry(folder: Path, content: bytes) -> None:
    """Add an entry that is no tensor, as DCP stores other objects."""
    index = index_of(folder)
    key = metadata.MetadataIndex("optimizer.extra")
    info = next(iter(index.storage_data.values()))
    offset = (folder / SHARD).stat().st_size
    index.state_dict_metadata["optimizer.extra"] = metadata.BytesStorageMetadata()
    index.storage_data[key] = replace(info, offset=offset, length=len(content))
    with open(folder / SHARD, "ab") as file:
        file.write(content)
    (folder / INDEX).write_bytes(pickle.dumps(index))


def seal(folder: Path, sealed: Callable[[dict[str, Any]], bytes], content: Any = None) -> None:
    """Make the manifest right for what the files are by now."""
    import hashlib

    if content is None:
        content = json.loads((folder / MANIFEST).read_text("utf-8"))
        del content["digest"]
        for name in content["files"]:
            found = (folder / name).read_bytes()
            entry = {"size": len(found), "sha256": hashlib.sha256(found).hexdigest()}
            content["files"][name] = entry
    (folder / MANIFEST).write_bytes(sealed(content))


def manifests() -> Iterator[tuple[str, Change]]:
    """Manifests that are sealed, and something else than they seem."""
    import hashlib

    def raw(make: Callable[[dict[str, Any], str], str | bytes]) -> Change:
        def apply(folder: Path) -> None:
            content = json.loads((folder / MANIFEST).read_text("utf-8"))
            del content["digest"]
            text = make(content, json.dumps(content)[:-1])
            text = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
            text += b',\n "digest": "'
            digest = hashlib.sha256(text).hexdigest().encode()
            (folder / MANIFEST).write_bytes(text + digest + b'"\n}')

        return apply

    def edited(**fields: Any) -> Change:
        return raw(lambda content, _: json.dumps({**content, **fields})[:-1])

    def named(name: str) -> Change:
        return raw(
            lambda content, _: json.dumps(
                {**content, "files": {**content["files"], name: content["files"][INDEX]}}
            )[:-1]
        )

    odd: tuple[Any, ...] = (
        *(None, True, -1, 0.5, 1e999, float("nan"), 10**400, "3", "x" * 9999, [], [[]], {}),
        *({"a": {}}, "\ud800", "\x1b[2J", 2**63),
    )
    for number, value in enumerate(odd):
        what = f"{value!r:.30}"
        for field in ("step", "format_version", "files"):
            yield f"{field} is {what}", edited(**{field: value})
        entry = {INDEX: value} if number % 2 else {INDEX: {"size": value, "sha256": "0" * 64}}
        yield f"an entry is {what}", edited(files=entry)
        yield f"a size is {what}", edited(files={INDEX: {"size": value, "sha256": "0" * 64}})
        yield f"a hash is {what}", edited(files={INDEX: {"size": 1, "sha256": value}})
        if value is not None and not isinstance(value, int | float):
            yield f"validation_loss is {what}", edited(validation_loss=value)
            yield f"a score is {what}", edited(score=["min validation_loss", value])
        yield f"the rule of a score is {what}", edited(score=[[value], None])
        yield f"identity is {what}", edited(identity=value)
        yield f"parameters are {what}", edited(identity={"parameters": value})
    names = (
        *("../x", "/etc/hostname", "..", ".", "", "a/b", "a\\b", "a\0b", "x\n", "\x1b[31mred"),
        *("\ud800", "é", "x" * 300, "C:x", "../step_00000002/.metadata", MANIFEST, "a b"),
        *("/dev/zero", "/proc/self/mem", "~", "$HOME", "%s", "\u202ex", "-rf", "NUL\r"),
    )
    for name in names:
        if name != "-rf":
            yield f"a name is {name!a:.30}", named(name)
    for depth in (500, 5000, 500_000):
        deep = "[" * depth + "]" * depth
        yield f"lists {depth:,} deep", raw(lambda _, text, d=deep: f'{text}, "x": {d}')
        maps = '{"a":' * depth + "1" + "}" * depth
        yield f"objects {depth:,} deep", raw(lambda _, text, d=maps: f'{text}, "files": {d}')
    yield "digits", raw(lambda _, text: f'{text}, "step": {"9" * 100_000}')
    yield "not text", raw(lambda _, text: text.encode() + b', "x": "\xff\xfe"')
    yield "UTF-16", raw(lambda _, text: text.encode("utf-16"))
    yield "many objects", raw(lambda _, text: f'{text}, "x": [{chr(123)}"":1{chr(125)}]')
    yield "two keys of one name", raw(lambda _, text: f'{text}, "step": 2, "step": 1')
    yield "a pickle", lambda folder: (folder / MANIFEST).write_bytes(pickle.dumps({"step": 3}))
    yield "nothing", lambda folder: (folder / MANIFEST).write_bytes(b"")
    yield "a pipe", lambda folder: ((folder / MANIFEST).unlink(), os.mkfifo(folder / MANIFEST))
    yield "a link", lambda f: ((f / MANIFEST).unlink(), (f / MANIFEST).symlink_to("/etc/hostname"))
    yield "a file is a pipe", lambda f: ((f / SHARD).unlink(), os.mkfifo(f / SHARD))
    yield "a file is a link", lambda f: ((f / SHARD).unlink(), (f / SHARD).symlink_to("/dev/zero"))


def indices() -> Iterator[tuple[str, Change]]:
    """Indices of DCP that point, or promise, too far."""

    def place(**fields: Any) -> Change:
        def change(index: Any) -> None:
            for key, info in index.storage_data.items():
                index.storage_data[key] = replace(info, **fields)

        return reindexed(change)

    outside = ("/etc/hostname", "../x", "../step_00000002/__0_0.distcp", MANIFEST, "x", "", "a\0b")
    for name in (*outside, "\x1b[2J", "\ud800", None, 3, (), Path("/etc/hostname")):
        yield f"a part in {name!r:.30}", place(relative_path=name)
    for value in (-1, 1 << 40, 1 << 62, 1 << 100, None, 1.5, "1", True, ()):
        yield f"offset {value!r}", place(offset=value)
        if value != 1:
            yield f"length {value!r}", place(length=value)
    yield "all parts in one place", place(offset=0)
    yield "transformed", place(transform_descriptors=["zstd"])

    def tensors(change: Callable[[Any], Any]) -> Change:
        def apply(index: Any) -> None:
            for name, entry in index.state_dict_metadata.items():
                index.state_dict_metadata[name] = change(entry) or entry

        return reindexed(apply)

    for value in ((1 << 40,), (1 << 61, 8), (-5, 3), (3,) * 70, (), (0,), 7, None, ("a",), (1.5,)):
        yield f"size {value!r:.30}", tensors(lambda e, v=value: replace(e, size=v))
        chunk = metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))
        one = replace(chunk, sizes=value)
        yield (
            f"parts of size {value!r:.30}",
            tensors(lambda e, c=one: replace(e, size=c.sizes, chunks=[c])),
        )
        moved = replace(chunk, offsets=value)
        yield f"parts at {value!r:.30}", tensors(lambda e, c=moved: replace(e, chunks=[c]))
    yield "no parts", tensors(lambda e: replace(e, chunks=[]))
    yield "each part twice", tensors(lambda e: replace(e, chunks=e.chunks * 2))
    yield "parts of none", tensors(lambda e: replace(e, chunks=None))
    yield "no properties", tensors(lambda e: replace(e, properties=None))
    yield "no tensors", tensors(lambda e: metadata.BytesStorageMetadata())
    yield "nothing stored", reindexed(lambda i: i.storage_data.clear())
    yield "no storage", reindexed(lambda i: replace(i, storage_data=None))
    yield "no entries", reindexed(lambda i: replace(i, state_dict_metadata=None))
    yield "a list", reindexed(lambda i: [i])


def archives() -> Iterator[tuple[str, Change]]:
    """Files of torch.save that reach beyond themselves."""
    rebuild = "ctorch._utils\n_rebuild_tensor_v2\n"

    def tensor(offset: int, size: int, stride: int, numel: int = 4) -> bytes:
        def number(n: int) -> bytes:
            content = n.to_bytes(16, "little", signed=True)
            return b"\x8a" + bytes([len(content)]) + content

        storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0" + b"0X\x03\0\0\0cpu"
        storage += number(numel) + b"tQ"
        sizes = number(size) + b"\x85" + number(stride) + b"\x85"
        made = rebuild.encode() + b"(" + storage + number(offset) + sizes + b"\x89)tR"
        return b"\x80\x02}X\x05\0\0\0model}X\x0b\0\0\0norm.weight" + made + b"ss."

    def put(content: bytes) -> Change:
        return lambda folder: (folder / WHOLE).write_bytes(content)

    numbers = {"data__0": bytes(16)}
    for name, content in {
        "a tensor beyond its memory": tensor(0, 5, 1),
        "a tensor behind its memory": tensor(1 << 40, 1, 1),
        "a tensor before its memory": tensor(-8, 4, 1),
        "a tensor that goes backwards": tensor(3, 4, -1),
        "a tensor of negative size": tensor(0, -4, 1),
        "a tensor of one number, repeated": tensor(0, 1 << 50, 0),
        "a tensor of one number, repeated beyond counting": tensor(0, 1 << 62, 0),
        "a tensor of numbers too large": tensor(1 << 100, 1, 1),
        "memory that says to be larger": tensor(0, 1 << 20, 1, 1 << 20),
    }.items():
        yield name, put(zipped(content, **numbers))
    yield "no memory", put(zipped(tensor(0, 4, 1)))
    script = {"constants.pkl": b"\x80\x02).", "code__x.py": b"1"}
    code = zipped(tensor(0, 4, 1), **numbers, **script)
    yield "of TorchScript", put(code)
    yield "named twice", put(zipped(tensor(0, 4, 1), **numbers) + zipped(b"\x80\x02}."))
    yield "big-endian", put(zipped(tensor(0, 4, 1), **numbers, byteorder=b"big"))
    yield "end of an archive alone", put(b"PK\5\6" + bytes(18))
    yield "an archive of nothing", put(b"PK\3\4" + bytes(100))
    whole = zipped(tensor(0, 4, 1), **numbers)
    far = whole[:-6] + struct.pack("<I", 1 << 31) + whole[-2:]
    yield "its list is far away", put(far)


def files() -> Iterator[Case]:
    """Files and folders that somebody is asked to take weights from."""
    import tarfile

    def put(name: str, content: bytes, length: int | None = None) -> Change:
        def apply(folder: Path) -> None:
            (folder / name).write_bytes(content)
            if length is not None:
                os.truncate(folder / name, length)

        return apply

    def header(text: str, claimed: int | None = None) -> bytes:
        return struct.pack("<Q", len(text) if claimed is None else claimed) + text.encode()

    escape = '{"\\u001b[2J": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    one = '{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [%s]}}'
    for name, content, length in (
        ("a header of 2^63 bytes", header("{}", 1 << 63), None),
        ("a header of deep lists", header('{"a":' + "[" * 100_000), None),
        ("a huge tensor", header(one % ("1000000000000", "0, 4000000000000")), None),
        ("a tensor beyond the end", header(one % ("4", "0, 16")), None),
        ("a tensor of negative size", header(one % ("-4", "0, 16")) + bytes(16), None),
        ("offsets that do not fit", header(one % ("4", "16, 0")) + bytes(16), None),
        ("a size that overflows", header(one % ("4294967296, 4294967296", "0, 0")), None),
        ("nothing", b"", None),
        ("a name to print", header(escape), None),
    ):
        yield Case(f".safetensors: {name}", "dcp", put("x.safetensors", content, length), "file")

    def tar(folder: Path) -> None:
        with tarfile.open(folder / "x.pt", "w") as archive:
            for name in ("storages", "tensors", "pickle"):
                member = tarfile.TarInfo(name)
                member.type, member.linkname = tarfile.SYMTYPE, "/etc/hostname"
                archive.addfile(member)

    yield Case(".pt: the oldest format, with links", "dcp", tar, "file")
    yield Case(".pt: noise", "dcp", put("x.pt", random.Random(1).randbytes(9999)), "file")
    yield Case(".pt: a pipe", "dcp", lambda f: os.mkfifo(f / "x.pt"), "file")
    yield Case(".pt: a folder", "dcp", lambda f: (f / "x.pt").mkdir(), "file")

    def linked(name: str, to: str) -> Change:
        return lambda f: ((f / name).unlink(missing_ok=True), (f / name).symlink_to(to))

    for name in (INDEX, SHARD):
        yield Case(f"a folder: {name} is a link", "dcp", linked(name, "/etc/hostname"), "folder")
        pipe: Change = lambda f, n=name: ((f / n).unlink(), os.mkfifo(f / n))  # noqa: E731
        yield Case(f"a folder: {name} is a pipe", "dcp", pipe, "folder")


def mutated(rng: random.Random, answer: str) -> Case:
    """Any one file of a checkpoint, changed at random, and sealed."""
    name = rng.choice([WHOLE] if answer == "torch_save" else [INDEX, INDEX, SHARD])
    seed = rng.random()

    def change(folder: Path) -> None:
        local = random.Random(seed)
        content = bytearray((folder / name).read_bytes())
        for _ in range(local.choice((1, 1, 2, 5, 30))):
            at = local.randrange(max(1, len(content)))
            if name == WHOLE and local.random() < 0.7:  # where it is not only numbers
                at = local.randrange(3000) if local.random() < 0.5 else len(content) - 1 - at % 5000
            match local.randrange(6):
                case 0:
                    content[at : at + 1] = bytes([local.randrange(256)])
                case 1:
                    del content[at : at + local.choice((1, 4, 100))]
                case 2:
                    content[at:at] = local.randbytes(local.choice((1, 8, 100)))
                case 3:
                    content[at : at + 8] = struct.pack("<q", local.choice((-1, 0, 1 << 40, 2**62)))
                case 4:
                    other = local.randrange(max(1, len(content)))
                    content[at : at + 64] = content[other : other + 64]
                case 5:
                    content[at : at + 1] = local.choice(b"RbcQq}]().\x81\x93\x94ustr0").to_bytes()
        (folder / name).write_bytes(content)

    return Case(f"{name} mutated by {seed}", answer, change, refused=False)


def mutated_manifest(rng: random.Random) -> Case:
    """A manifest with values changed for others at random, and sealed."""
    seed = rng.random()

    def change(folder: Path) -> None:
        local = random.Random(seed)
        content = json.loads((folder / MANIFEST).read_text("utf-8"))
        del content["digest"]
        from importlib import import_module

        values = (None, True, -1, 1e300, "", "x", [], {}, [1], {"a": 1}, 10**30, "é\x00", "3")
        for _ in range(local.choice((1, 1, 2, 4))):
            node, key = random_entry(content, local, deeper=0.7)
            node[key] = copy.deepcopy(local.choice(values))
        sealed = import_module("hostile_dcp.checkpoint.manifest").sealed
        (folder / MANIFEST).write_bytes(sealed(content))

    return Case(f"manifest mutated by {seed}", "dcp", change, "manifest", refused=False)
