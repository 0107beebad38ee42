"""Text to tokens and back: a token is a byte. Tokens of your own files are numbers here."""

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import UserError
from .files import warn_left_out

if TYPE_CHECKING:
    from .data import Spec

SPLIT = re.compile("(?<![a-z])(train(ing)?|val(id(ation)?)?|test)(?![a-z])", re.I)


@dataclass(frozen=True)
class TextConfig:
    """Settings of text: none, as a token is a byte."""


def fingerprint_of_text(config: TextConfig, spec: "Spec") -> str:
    """The fingerprint of the data, which `TextConfig` does not change."""
    return spec.fingerprint


def encode(text: str, spec: "Spec") -> list[int]:
    """The tokens of a text; of files of tokens a text like "15496 11 995"; UserError."""
    if spec.encoding == "bytes":
        return list(text.encode() or b"\n")
    words = text.split()
    if not words or not all(w.isdecimal() and int(w) < spec.vocabulary for w in words):
        raise UserError(f'--prompt: wanted tokens below {spec.vocabulary}, as in --prompt "1 2 3"')
    return [int(word) for word in words]


def decode(tokens: Iterable[int], spec: "Spec") -> Iterator[bytes]:
    """The text of tokens, UTF-8, as they come; of files of tokens their numbers."""
    for token in tokens:
        yield bytes([token]) if spec.encoding == "bytes" else f"{token} ".encode()


def encoding_of(start: bytes) -> str:
    """The encoding of text by its byte order mark, which UTF-16 and UTF-32 have; or UTF-8."""
    if start.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):  # begins as UTF-16's does
        return "utf-32"
    return "utf-16" if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8"


def splits_of(names: Sequence[Path]) -> list[str]:
    """What files are for, "train", "val" or "test", by the first names in their paths.

    As in valid/a.txt or wiki.test.txt; "train" by any other name. All are "" unless some are named
    "train" and some "val".
    """
    found = [SPLIT.search(name.as_posix().partition("/")[0]) for name in names]
    splits = [match[0][:3].lower() if match else "" for match in found]
    if not {"tra", "val"} <= {*splits}:
        return [""] * len(splits)
    tests = [name for name, split in zip(names, splits, strict=True) if split == "tes"]
    warn_left_out(tests, "named test, neither train nor val")
    return [{"val": "val", "tes": "test"}.get(split, "train") for split in splits]
