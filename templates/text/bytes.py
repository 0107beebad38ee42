"""Convert text to tokens, which are bytes, and back; show tokens of .bin files as numbers."""

import codecs
import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from .errors import UserError
from .files import warn_left_out

if TYPE_CHECKING:
    from .data import DataConfig, Spec


@dataclass(frozen=True)
class TextConfig:
    """Settings of text: there are none, since a token is a byte."""


def described(folder: Path, data: "DataConfig") -> tuple["DataConfig", str]:
    """Return the settings unchanged, and "" (unknown) as the encoding of the .bin files.

    This project does not look in `folder` for a file that describes them.
    """
    return data, ""


def fingerprint_of_text(config: TextConfig, spec: "Spec") -> str:
    """Return the fingerprint of the data unchanged, since `TextConfig` has no settings."""
    return spec.fingerprint


def encode(text: str, spec: "Spec") -> list[int]:
    """Convert a text to tokens; UserError if that is impossible.

    If the data are token files, the text must be the numbers of tokens, as in "15496 11 995".
    """
    if spec.encoding == "bytes":
        # A model needs at least one token, so an empty text becomes a line break.
        return list(encode_bytes(text) or b"\n")
    words = text.split()
    if not words or not all(w.isdecimal() and int(w) < spec.vocabulary for w in words):
        raise UserError(
            f"--prompt: give tokens as numbers below {spec.vocabulary}, as in --prompt '1 2 3'"
        )
    return [int(word) for word in words]


def encode_bytes(text: str) -> bytes:
    """Encode a text as UTF-8; invalid bytes that came from the shell are kept."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise UserError(f"--prompt is not valid UTF-8: {error}") from None


def decode(tokens: Iterable[int], spec: "Spec") -> Iterator[bytes]:
    """Yield the byte of each token; for token files, yield its number and a space."""
    for token in tokens:
        if spec.encoding == "bytes":
            yield bytes([token])
        else:
            yield f"{token} ".encode()


# {% include "text/json_lines.py" %}


# {% include "text/splits.py" %}
