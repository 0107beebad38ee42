"""Pickles read as data: what a pickle asks to be called is noted, and never called.

A pickle is a program. Python's own unpickler with an allow-list still runs what is on the list, can
be made to change allowed classes for the whole process, and some ten bytes make it fill the memory
(an index of its memo) or crash (the hash of a deep tuple). Here nothing outside the pickle is
touched, and time and memory stay in proportion to its length (some 150 bytes for each byte).
"""

import pickle
from collections.abc import Callable, Set
from mmap import mmap
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch

LONGEST = 1 << 18  # bytes of a text: what a short file with a hole says is long is not read
DTYPES = {f"torch.{n}": value for n, value in vars(torch).items() if type(value) is torch.dtype}
PLAIN = (
    "PROTO STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG "
    "LONG1 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES UNICODE "
    "BINUNICODE SHORT_BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST "
    "LIST APPEND APPENDS EMPTY_DICT GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT MEMOIZE "
    "GLOBAL STACK_GLOBAL BINPERSID"
)


class Global(str):
    """The full name of what a pickle refers to, as in "torch.float32"; not the thing itself."""

    __slots__ = ()


class Made:
    """What a pickle wants made by calling `of`; it was not called."""

    __slots__ = ("arguments", "of", "state")

    def __init__(self, of: Global, arguments: tuple[Any, ...]) -> None:
        self.of, self.arguments, self.state = of, arguments, None


class Opcodes(dict[int, Callable[[Any], None]]):
    """The instructions that are followed, by their codes; any other ends the reading."""

    def __missing__(self, code: int) -> Callable[[Any], None]:
        raise pickle.UnpicklingError(f"it has an instruction {bytes([code])!r}")


class Decoder(pickle._Unpickler):  # the one in Python: that in C cannot be told what to follow
    """Decodes a pickle that refers to nothing but `allowed`; UnpicklingError for any other."""

    dispatch = Opcodes(
        (code, pickle._Unpickler.dispatch[code])
        for code in (getattr(pickle, name)[0] for name in PLAIN.split())
    )

    def __init__(self, file: BinaryIO | mmap, allowed: Set[str]) -> None:
        self.file, self.allowed = file, allowed
        super().__init__(SimpleNamespace(read=self.take, readline=self.line), encoding="utf-8")
        self.storages: dict[str, Made] = {}

    def take(self, count: int) -> bytes:
        """The next bytes."""
        if count > LONGEST:
            raise pickle.UnpicklingError(f"it has a text of {count:,} bytes")
        return self.file.read(count)

    def line(self) -> bytes:
        """The next bytes up to the end of the line."""
        start = self.file.tell()
        line, end, _ = self.file.read(4096).partition(b"\n")
        self.file.seek(start + len(line + end))
        if not end:
            raise pickle.UnpicklingError("it has a line without an end")
        return line + end

    def find_class(self, module: str, name: str) -> Global:
        """The name itself, if it is allowed."""
        full = f"{module}.{name}"
        if full not in self.allowed:
            raise pickle.UnpicklingError(f"it asks for {full!a:.200}")
        return Global(full)

    def persistent_load(self, pid: Any) -> Made:
        """What `torch.save` writes for the memory of a tensor: kind, key and number of elements."""
        match pid:
            case ("storage", Global() as kind, str(key), str(), int(count), *rest) if rest in (
                [],
                [None],
            ):
                return self.storages.setdefault(key, Made(kind, (key, count)))
        raise pickle.UnpicklingError("it refers to something outside that is no memory")

    def make(self) -> None:
        """Note a call; what makes plain data of plain data is that data."""
        arguments, of = self.stack.pop(), self.stack.pop()
        if type(of) is not Global or type(arguments) is not tuple:
            raise pickle.UnpicklingError("it calls what has no name")
        match of, arguments:
            case "collections.OrderedDict", ():
                self.stack.append({})
            case "collections.OrderedDict", (list(pairs),):
                self.stack.append(put({}, [part for key, value in pairs for part in (key, value)]))
            case "torch.Size", (tuple(size),):
                self.stack.append(size)
            case _:
                self.stack.append(Made(of, arguments))

    def build(self) -> None:
        """Note a state; that of a dictionary (attributes that somebody gave it) is left out."""
        state = self.stack.pop()
        if type(self.stack[-1]) is Made:
            self.stack[-1].state = state

    def put_one(self) -> None:
        """Put one entry into a dictionary."""
        value, key = self.stack.pop(), self.stack.pop()
        put(self.stack[-1], [key, value])

    def put_many(self) -> None:
        """Put entries into a dictionary."""
        items = self.pop_mark()
        put(self.stack[-1], items)

    dispatch |= {
        pickle.FRAME[0]: lambda self: self.read(8),  # how much to read ahead: never mind
        pickle.REDUCE[0]: make,
        pickle.NEWOBJ[0]: make,
        pickle.BUILD[0]: build,
        pickle.SETITEM[0]: put_one,
        pickle.SETITEMS[0]: put_many,
        pickle.DICT[0]: lambda self: self.append(put({}, self.pop_mark())),
        # Sets are of no use to us, and hashing what a stranger has nested is not safe.
        pickle.EMPTY_SET[0]: lambda self: self.append([]),
        pickle.ADDITEMS[0]: pickle._Unpickler.dispatch[pickle.APPENDS[0]],
        pickle.FROZENSET[0]: lambda self: self.append(self.pop_mark()),
    }


def put(target: Any, items: list[Any]) -> dict[Any, Any]:
    """Put keys and values, in turns, into a dictionary, whose keys are of the harmless kinds."""
    if type(target) is not dict or len(items) % 2:
        raise pickle.UnpicklingError("it puts entries into what is no dictionary")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not (type(key) in (str, Made) or (type(key) is int and abs(key) < 1 << 60)):
            raise pickle.UnpicklingError(f"a key is of type {type(key).__name__}")
        target[key] = value
    return target
