"""Changes at random to the content of a file, and things that may stand in the place of a file."""

import copy
import json
import os
import random
import struct
from pathlib import Path
from typing import Any

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**30, 10**400, -0.5, 1e300, 1e999),
    *(float("nan"), "", "x", "3", "a\nb", "a\0b", "\x1b[2J", "\ud800", "é", "x" * 9999, "auto"),
    *("/dev/zero", "..", "../victim", "reference://::/x", "file:///x", "memory://x", "nowhere:/x"),
    *([], {}, [[]], [1], [None, "x"], {"a": 1}, {"step": {}}, {"": None}),
)
"""Values that stand nowhere in a file of ours, or only elsewhere."""
ENCODINGS = ("utf-16", "utf-8-sig", "utf-32", "cp037", "utf-7")
SPECIAL = (
    "a pipe",
    "a folder",
    "a link to nothing",
    "a link elsewhere",
    "nothing",
    "zeros",
    "gone",
)


def put(path: Path, content: bytes, number: int, rng: random.Random, victim: Path) -> str:
    """Leave the mutant of that number at `path`; says what it is."""
    if number < len(SPECIAL):
        put_special(path, SPECIAL[number], victim)
        return SPECIAL[number]
    if path.suffix == ".json" and rng.random() < 0.75:
        path.write_bytes(changed_json(content, rng))
    elif path.suffix == ".jsonl" and rng.random() < 0.75:
        whole = content.splitlines()
        lines = [*whole]
        for _ in range(rng.choice((1, 1, 3))):
            lines[rng.randrange(len(lines))] = changed_json(rng.choice(whole), rng)
        path.write_bytes(b"\n".join(lines) + rng.choice((b"\n", b"")))
    else:
        path.write_bytes(changed_bytes(content, rng))
    return "changed at random"


def put_special(path: Path, what: str, victim: Path) -> None:
    """Put something else there than a file of this kind."""
    path.unlink()
    match what:
        case "a pipe":
            os.mkfifo(path)
        case "a folder":
            path.mkdir()
        case "a link to nothing":
            path.symlink_to("nowhere")
        case "a link elsewhere":
            path.symlink_to(victim)
        case "nothing":
            path.touch()
        case "zeros":
            path.write_bytes(bytes(4096))


def changed_json(content: bytes, rng: random.Random) -> bytes:
    """JSON with other values, keys, depths or another encoding; not always JSON any more."""
    tree = json.loads(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if tree:
            node, key = random_entry(tree, rng, deeper=0.8)
            change_entry(node, key, rng)
    if rng.random() < 0.05:
        tree = rng.choice((*copy.deepcopy(ODD), [tree], {"x": tree}))
    text = json.dumps(tree, ensure_ascii=rng.random() < 0.5)
    match rng.randrange(20):
        case 0:  # deeper than a parser goes, or than what reads it then
            deep = rng.choice((300, 900, 5000, 100_000))
            opened, closed = rng.choice((("[", "]"), ('{"a": ', "}")))
            value = opened * deep + "1" + closed * deep
            text = text.replace(": ", f": {value}, " + '"x": ', 1)
        case 1:
            return text.encode(rng.choice(ENCODINGS), "replace")
        case 2:
            return text.encode("latin-1", "backslashreplace").replace(b'"', b'"\xe9', 1)
        case 3:
            text = text.replace(", ", ', "step": 7, ', 1)  # a name twice
        case 4:
            text = text[: rng.randrange(len(text) + 1)]
    return text.encode("utf-8", "surrogatepass")


def random_entry(tree: Any, rng: random.Random, deeper: float) -> tuple[Any, Any]:
    """Choose an object or a list of a tree that is not empty, and a key or an index in it.

    Where the entry is itself an object or a list, `deeper` is the probability of going into it.
    """
    node = tree
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = rng.choice(keys)
        entry = node[key]
        has_entries = isinstance(entry, dict | list) and len(entry) > 0
        if not has_entries or rng.random() >= deeper:
            return node, key
        node = entry


def change_entry(node: Any, key: Any, rng: random.Random) -> None:
    """Change one entry of an object or a list."""
    match rng.randrange(8):
        case 0:
            del node[key]
        case 1 if isinstance(node, dict):
            node[rng.choice(("other", "", "é", "\ud800", "a.b", "\x1b[2J", "url"))] = node.pop(key)
        case 2:
            node[key] = rng.choice(([node[key]], {"a": node[key]}, str(node[key])))
        case _:
            node[key] = copy.deepcopy(rng.choice(ODD))


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, removed, inserted and moved; more often near both ends, where headers are."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5, 30))):
        size = max(1, len(changed))
        at = rng.randrange(size)
        if rng.random() < 0.6:
            at = min(size - 1, rng.randrange(3000))
            at = at if rng.random() < 0.5 else size - 1 - at
        match rng.randrange(8):
            case 0:
                changed[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                changed[at : at + 1] = (
                    bytes([changed[at] ^ 1 << rng.randrange(8)]) if changed else b""
                )
            case 2:
                del changed[at : at + rng.choice((1, 4, 100))]
            case 3:
                changed[at:at] = rng.randbytes(rng.choice((1, 8, 100)))
            case 4:
                size_in_it = rng.choice((-1, 0, 1 << 31, 1 << 40, 2**62))
                changed[at : at + 8] = struct.pack("<q", size_in_it)
            case 5:
                other = rng.randrange(size)
                changed[at : at + 64] = changed[other : other + 64]
            case 6:
                changed[at : at + 1] = rng.choice(b"RbcQq}]().\x81\x93\x94ustr0").to_bytes()
            case 7 if rng.random() < 0.3:
                del changed[at:]
    return bytes(changed)
