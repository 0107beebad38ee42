"""Recorded file-system calls, replayed in memory, and what a crash may leave of them.

A directory is recorded with strace and rebuilt here, call by call. The model of a crash follows
POSIX, which promises least (as in ALICE: Pillai et al., "All File Systems Are Not Created Equal",
OSDI 2014):

- What is written to a file is safe once an fsync of that file that began later has returned. Until
  then each write may be there, be missing, be there in part, or have left zeros.
- A name made, moved or removed is safe once an fsync of its directory that began later has
  returned. Until then each such change may have been kept or lost, whatever became of those before
  and after it (an unordered file system; keeping only the first few is what an ordered one does).
- A rename happens wholly or not at all. A directory whose name is lost is lost with all in it.

So an fsync of a file does not save its name, and a name can be safe though its file is empty.
"""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from .strace import BYTES, FILE, Call, data, text

EXHAUSTIVE = 4  # of up to so many changes of names in doubt, every subset is tried

ROOT = 0  # number of the recorded directory among the nodes
Tree = tuple[tuple[str, bytes | None], ...]  # path and content (None: a directory), sorted


@dataclass
class Node:
    """A file or a directory: as programs see it, and as it is on the disk for certain."""

    directory: bool
    names: dict[str, int] = field(default_factory=dict)
    safe_names: dict[str, int] = field(default_factory=dict)
    content: bytes = b""
    safe: bytes = b""
    writes: list[tuple[int, int, bytes]] = field(default_factory=list)  # when, where, what


class Change(NamedTuple):
    """A change of the names in a directory that is not yet safe."""

    when: int
    directory: int
    removed: str | None
    added: str | None
    node: int


class Disk:
    """The recorded directory at one point of the recording."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.nodes = [Node(directory=True)]
        self.changes: list[Change] = []
        self.positions: dict[tuple[str, int], int] = {}  # of each open file that may be written

    def apply(self, call: Call) -> bool:
        """Do what a program did; whether it can make a difference to what a crash leaves."""
        name, words = call.name, call.words
        if name in ("open", "openat", "creat"):
            return self._open(call)
        elif name in ("write", "pwrite64", "writev"):
            self._write(call)
        elif name in ("fsync", "fdatasync"):
            self._sync(self._find(self._path(words[0])), call.began)
        elif name in ("mkdir", "mkdirat"):
            path = self._path(*words[:-1])
            self._change(call, path, added=path.name, node=self._new(directory=True))
        elif name in ("rmdir", "unlink", "unlinkat"):
            path = self._path(*words[: 2 if name == "unlinkat" else 1])
            self._change(call, path, removed=path.name)
        elif name in ("rename", "renameat", "renameat2"):
            old, new = (words[:1], words[1:2]) if name == "rename" else (words[:2], words[2:4])
            old, new = self._path(*old), self._path(*new)
            assert old.parent == new.parent, f"{old} was moved to {new}: between directories"
            self._change(call, old, removed=old.name, added=new.name, node=self._find(old))
        elif name == "close":
            self.positions.pop(self._handle(words[0]), None)
            return False
        elif name == "lseek":
            if (handle := self._handle(words[0])) in self.positions:
                self.positions[handle] = call.result
            return False
        else:
            raise AssertionError(f"the model does not know {name}({', '.join(words)[:200]})")
        return True

    def inherited(self, root: Path) -> "Disk":
        """The same at another place, for a process that begins now."""
        disk = Disk(root)
        disk.nodes = copy.deepcopy(self.nodes)
        for node in disk.nodes:
            node.writes = [(-1, at, what) for _, at, what in node.writes]
        disk.changes = [change._replace(when=-1) for change in self.changes]
        return disk

    def tree(self) -> Tree:
        """All that programs see."""
        return self._walk([node.names for node in self.nodes], {})

    def crashes(self) -> Iterator[Tree]:
        """Trees that a crash at this point may leave; not all there can be, but of every kind."""
        alive = set(self._reachable())
        changes = [change for change in self.changes if change.directory in alive]
        doubtful = [n for n in alive if self.nodes[n].writes]
        kinds = {n: self._contents(self.nodes[n]) for n in doubtful}
        number = max((len(kind) for kind in kinds.values()), default=1)
        for kept in self._subsets(changes):
            names = self._names(kept)
            for i in range(number):  # all files in the same way
                yield self._walk(names, {n: kinds[n][min(i, len(kinds[n]) - 1)] for n in doubtful})
        for kept in (changes, []) if len(doubtful) > 1 else ():
            names = self._names(kept)
            for n in doubtful:  # one file, the others being whole
                whole = {m: kinds[m][0] for m in doubtful}
                for content in kinds[n][1:]:
                    yield self._walk(names, whole | {n: content})

    def _subsets(self, changes: list[Change]) -> Iterator[list[Change]]:
        if len(changes) <= EXHAUSTIVE:
            for kept in itertools.product((True, False), repeat=len(changes)):
                yield list(itertools.compress(changes, kept))
            return
        yield changes
        for i in range(len(changes)):
            yield changes[:i]
            yield changes[:i] + changes[i + 1 :]
            yield [changes[i]]
            yield changes[i:]

    @staticmethod
    def _contents(node: Node) -> list[bytes]:
        """What may be in a file: all of it first, then as it was synced, then worse."""

        def replayed(zeroed: set[int]) -> bytes:
            content = bytearray(node.safe)
            for i, (_, at, what) in enumerate(node.writes):
                content.extend(bytes(max(0, at + len(what) - len(content))))
                content[at : at + len(what)] = bytes(len(what)) if i in zeroed else what
            return bytes(content)

        whole, every = node.content, set(range(len(node.writes)))
        assert replayed(set()) == whole
        last_at, last = node.writes[-1][1:]
        middle = last_at + len(last) // 2
        found = [
            whole,
            node.safe,
            whole[: (len(node.safe) + len(whole)) // 2],
            whole[:-1],
            replayed(every),
            replayed({0}),
            replayed(every - {0}),
            whole[:middle] + bytes(len(whole) - middle),
            whole[:middle],
            b"",
        ]
        return list(dict.fromkeys(found))

    def _names(self, kept: list[Change]) -> list[dict[str, int]]:
        names = [dict(node.safe_names) for node in self.nodes]
        for change in kept:
            apply_change(names[change.directory], change)
        return names

    def _walk(self, names: list[dict[str, int]], contents: dict[int, bytes]) -> Tree:
        found: list[tuple[str, bytes | None]] = []

        def walk(number: int, prefix: str) -> None:
            for name, child in sorted(names[number].items()):
                node = self.nodes[child]
                content = None if node.directory else contents.get(child, node.content)
                found.append((prefix + name, content))
                if node.directory:
                    walk(child, f"{prefix}{name}/")

        walk(ROOT, "")
        return tuple(found)

    def _reachable(self) -> Iterator[int]:
        """Nodes that some crash may leave."""
        names: list[set[int]] = [
            {*node.names.values(), *node.safe_names.values()} for node in self.nodes
        ]
        for change in self.changes:
            if change.added:
                names[change.directory].add(change.node)
        seen, left = {ROOT}, [ROOT]
        while left:
            yield (number := left.pop())
            left += names[number] - seen
            seen |= names[number]

    def _open(self, call: Call) -> bool:
        path = Path(call.opened)
        flags = "O_CREAT|O_WRONLY" if call.name == "creat" else " ".join(call.words)
        number, new = self._find(path, missing_ok=True), False
        if number is None:
            assert "O_CREAT" in flags, f"{path} is not known"
            number, new = self._new(directory=False), True
            self._change(call, path, added=path.name, node=number)
        if "O_WRONLY" in flags or "O_RDWR" in flags:
            assert new, f"{path}, which was written before, is written again"
            self.positions[str(call.result), number] = 0
        return new

    def _write(self, call: Call) -> None:
        handle = self._handle(call.words[0])
        pieces = BYTES.findall(" ".join(call.words[1:]))  # one, or of writev any number
        node, what = self.nodes[handle[1]], data("".join(pieces))[: call.result]
        at = int(call.words[3]) if call.name == "pwrite64" else self.positions[handle]
        if call.name != "pwrite64":
            self.positions[handle] += len(what)
        content = bytearray(node.content)
        content.extend(bytes(max(0, at - len(content))))
        content[at : at + len(what)] = what
        node.content = bytes(content)
        node.writes.append((call.ended, at, what))

    def _sync(self, number: int, began: int) -> None:
        node = self.nodes[number]
        for change in [c for c in self.changes if c.directory == number and c.when < began]:
            apply_change(node.safe_names, change)
            self.changes.remove(change)
        if not node.directory:
            late = [write for write in node.writes if write[0] >= began]
            assert not late, "written while it was synced"
            node.safe, node.writes = node.content, []

    def _change(
        self,
        call: Call,
        path: Path,
        removed: str | None = None,
        added: str | None = None,
        node: int = ROOT,
    ) -> None:
        directory = self._find(path.parent)
        change = Change(call.ended, directory, removed, added, node)
        apply_change(self.nodes[directory].names, change)
        self.changes.append(change)

    def _new(self, directory: bool) -> int:
        self.nodes.append(Node(directory))
        return len(self.nodes) - 1

    def _path(self, *words: str) -> Path:
        """The place that a descriptor, a path, or both together name."""
        path = Path()
        for word in words:
            if file := FILE.fullmatch(word):
                path /= text(file[2] or "")
            else:
                path /= text(word)
        return path

    def _handle(self, word: str) -> tuple[str, int | None]:
        file = FILE.fullmatch(word)
        return file[1], self._find(Path(text(file[2])), missing_ok=True)

    def _find(self, path: Path, missing_ok: bool = False) -> int | None:
        number = ROOT
        for name in path.relative_to(self.root).parts:
            number = self.nodes[number].names.get(name)
            if number is None:
                assert missing_ok, f"{path} is not known"
                return None
        return number


def apply_change(names: dict[str, int], change: Change) -> None:
    """Change the names of a directory."""
    if change.removed:
        names.pop(change.removed, None)
    if change.added:
        names[change.added] = change.node
