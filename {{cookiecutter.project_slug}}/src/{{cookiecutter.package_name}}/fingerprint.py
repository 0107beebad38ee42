"""Fingerprints of data, in 16 letters: a run resumes on the data it was started with."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROBES = 256
PROBE_BYTES = 4096


def of_bytes(*parts: Any) -> str:
    """Of data in memory: every byte of arrays, and numbers and text as they are."""
    digest = hashlib.sha256()
    for part in parts:
        content = repr(part).encode() if isinstance(part, int | str) else memoryview(part).cast("B")
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()[:16]


def of_files(root: Path, files: Sequence[Path], *stated: int | str) -> str:
    """Of files too large to read: their names below `root`, their sizes, and probes of the content.

    At most a megabyte is read, spread evenly, whatever the data's size. A change that keeps every
    size and every probed range is not noticed.
    """
    names = [file.relative_to(root).as_posix() for file in files]
    sizes = [file.stat().st_size for file in files]
    probes = []
    for file, size in list(zip(files, sizes, strict=True))[:: -(-len(files) // PROBES)]:
        with open(file, "rb", buffering=0) as opened:
            places = max(1, PROBES // len(files))
            for place in range(places):
                opened.seek(max(0, size - PROBE_BYTES) * place // max(1, places - 1))
                probes.append(opened.read(PROBE_BYTES))
    listing = "\n".join(f"{n} {s}" for n, s in zip(names, sizes, strict=True))
    return of_bytes(listing, b"".join(probes), *stated)
