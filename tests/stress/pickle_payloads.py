"""Pickles that would do something if they were followed, by every way of calling there is.

Each gets the path of a file to create, which is the tell-tale; none would do real harm. They are
assembled from opcodes: no pickler would write most of them.
"""

import pickle
import struct
from collections.abc import Iterator

PROTOCOLS = range(6)
# What is called, with which arguments ("FILE" is the tell-tale's path).
CALLS = (
    ("os", "system", "touch FILE"),
    ("posix", "system", "touch FILE"),
    ("nt", "system", "touch FILE"),
    ("os", "popen", "touch FILE"),
    ("os", "mkdir", "FILE"),
    ("builtins", "exec", "open('FILE', 'w')"),
    ("builtins", "eval", "open('FILE', 'w')"),
    ("__builtin__", "eval", "open('FILE', 'w')"),
    ("builtins", "open", "FILE", "w"),
    ("builtins", "__import__", "antigravity"),
    ("builtins", "breakpoint"),
    ("io", "open", "FILE", "w"),
    ("_io", "FileIO", "FILE", "w"),
    ("subprocess", "getoutput", "touch FILE"),
    ("subprocess", "Popen", "touch FILE"),
    ("pty", "spawn", "touch FILE"),
    ("runpy", "run_path", "FILE"),
    ("timeit", "timeit", "open('FILE', 'w')"),
    ("code", "interact"),
    ("pdb", "run", "open('FILE', 'w')"),
    ("bdb", "Bdb"),
    ("cProfile", "run", "open('FILE', 'w')"),
    ("shutil", "copyfile", "/etc/hostname", "FILE"),
    ("shutil", "rmtree", "FILE"),
    ("pathlib", "Path", "FILE"),
    ("pathlib", "PosixPath.touch", "FILE"),
    ("socket", "create_connection", "127.0.0.1"),
    ("urllib.request", "urlopen", "http://127.0.0.1:9/"),
    ("webbrowser", "open", "http://127.0.0.1:9/"),
    ("importlib", "import_module", "antigravity"),
    ("pydoc", "locate", "antigravity"),
    ("pydoc", "pipepager", "x", "touch FILE"),
    ("ctypes", "CDLL", "FILE"),
    ("multiprocessing.util", "spawnv_passfds", "/bin/touch"),
    ("pickle", "loads", "cos\nsystem\n(S'touch FILE'\ntR."),
    ("marshal", "loads", "FILE"),
    ("dill", "loads", "FILE"),
    ("functools", "partial", "FILE"),
    ("operator", "methodcaller", "system"),
    ("operator", "attrgetter", "system"),
    ("types", "FunctionType", "FILE"),
    ("sys", "setrecursionlimit", "1"),
    ("os", "_exit", "0"),
    ("numpy", "load", "FILE"),
    ("numpy.testing._private.utils", "runstring", "open('FILE', 'w')", "x"),
    ("torch", "load", "FILE"),
    ("torch", "save", "x", "FILE"),
    ("torch", "_dynamo", "x"),
    ("torch", "empty", "9"),
    ("torch.hub", "load_state_dict_from_url", "http://127.0.0.1:9/"),
    ("torch.ops", "load_library", "FILE"),
    ("torch.classes", "load_library", "FILE"),
    ("torch.jit", "load", "FILE"),
    ("torch._C", "PyTorchFileReader", "FILE"),
    ("torch", "UntypedStorage.from_file", "FILE"),
    ("torch.storage", "_load_from_bytes", "FILE"),
    ("torch.distributed.rpc", "init_rpc", "x"),
    ("torch.utils.cpp_extension", "load_inline", "FILE", "x"),
    ("torch.utils.collect_env", "run", "touch FILE"),
    ("torch._inductor.codecache", "PyCodeCache.load", "FILE"),
    ("torch.serialization", "_get_layout.__globals__", "x"),
    ("torch.serialization", "load", "FILE"),
    ("torch.distributed.checkpoint.metadata", "os.system", "touch FILE"),
    ("torch.distributed.checkpoint.filesystem", "os.system", "touch FILE"),
    ("collections", "OrderedDict.__init__.__globals__", "x"),
    ("collections", "namedtuple", "x", "y"),
)
ALLOWED = (
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("collections", "OrderedDict"),
    ("torch", "Size"),
)


def text(value: str) -> bytes:
    """A string, by an opcode that all protocols know."""
    return pickle.BINUNICODE + struct.pack("<I", len(value.encode())) + value.encode()


def name(module: str, attribute: str) -> bytes:
    """A global, as protocols before 4 have it."""
    return f"c{module}\n{attribute}\n".encode()


def payloads(file: str, bounded: bool) -> Iterator[tuple[str, bytes]]:
    """Name and content of each; in part, each call once and each way once."""
    for number, (module, attribute, *arguments) in enumerate(CALLS):
        given = b"".join(text(each.replace("FILE", file)) for each in arguments)
        ways = list(calls(module, attribute, given, file))
        if bounded and number >= len(ways):
            ways = ways[number % len(ways) :][:1]
        elif number:
            ways = ways[:1] if bounded else ways[number % 3 :: 3]
        for way, content in ways:
            yield f"{module}.{attribute} by {way}", content
    yield from changes(file)


def calls(module: str, attribute: str, given: bytes, file: str) -> Iterator[tuple[str, bytes]]:
    """All the ways of calling one thing."""
    target, tail = name(module, attribute), pickle.STOP
    by_stack = text(module) + text(attribute) + pickle.STACK_GLOBAL
    arguments = b"(" + given + b"t"
    for protocol in PROTOCOLS:
        start = pickle.PROTO + bytes([protocol]) if protocol > 1 else b""
        yield f"REDUCE, protocol {protocol}", start + target + arguments + pickle.REDUCE + tail
        nested = target + arguments + pickle.REDUCE
        inside = name("collections", "OrderedDict") + b"((" + text("x") + nested
        yield f"REDUCE inside, protocol {protocol}", start + inside + b"lttR" + tail
    start = b"\x80\x04"
    yield "STACK_GLOBAL", start + by_stack + arguments + pickle.REDUCE + tail
    yield "NEWOBJ", start + by_stack + arguments + pickle.NEWOBJ + tail
    yield "NEWOBJ_EX", start + by_stack + arguments + b"}" + pickle.NEWOBJ_EX + tail
    yield "INST", b"(" + given + f"i{module}\n{attribute}\n".encode() + tail
    yield "OBJ", b"(" + target + given + pickle.OBJ + tail
    yield "EXT1", start + pickle.EXT1 + b"\x01" + arguments + pickle.REDUCE + tail
    yield "EXT4", start + pickle.EXT4 + struct.pack("<i", 1) + arguments + pickle.REDUCE + tail
    yield "PERSID", f"P{file}\n".encode() + tail
    yield "BINPERSID", text(file) + pickle.BINPERSID + tail
    storage = text("storage") + target + text("0") + text(file) + b"K\x01"
    yield "BINPERSID of a storage", b"(" + storage + b"t" + pickle.BINPERSID + tail
    yield "a key", start + b"}" + target + arguments + b"RNs" + tail
    yield "a name alone", start + target + tail
    yield "the memo", start + target + b"q\x000h\x00" + arguments + b"R" + tail
    yield "FRAME", start + pickle.FRAME + struct.pack("<Q", 1 << 60) + target + arguments + b"R."
    yield "behind the end", start + b"}." + target + arguments + b"R."
    for other in ALLOWED:
        made = name(*other) + b")" + pickle.NEWOBJ
        state = b"}" + text("__class__") + target + b"s"
        yield f"BUILD of {other[1]}", start + made + b"N" + state + b"\x86b" + tail
        setter = b"}" + text("__setstate__") + target + b"s"
        then = arguments + pickle.BUILD
        yield f"__setstate__ of {other[1]}", start + made + setter + b"b" + then + tail
        reduce = name(*other) + b"(" + target + arguments + b"Rt" + pickle.REDUCE
        yield f"an argument of {other[1]}", start + reduce + tail


def changes(file: str) -> Iterator[tuple[str, bytes]]:
    """Changes to what is allowed, which would stay for the whole process."""
    for module, attribute in ALLOWED:
        state = b"N}" + text("harmed") + text(file) + b"s\x86"
        content = b"\x80\x04" + name(module, attribute) + state + b"b."
        yield f"BUILD on {attribute} itself", content
    path = name("pathlib", "PosixPath") + b"N}" + text("exists") + name("torch", "Size") + b"s\x86"
    yield "BUILD on PosixPath itself", b"\x80\x04" + path + b"b."
