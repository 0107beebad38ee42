"""Text to tokens and back, as the data has it: by the tokenizer beside it, in bytes, or in numbers.

A tokenizer is a tokenizer.json of the package of that name, which the command `tokens` leaves.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from .errors import UserError
from .files import fingerprint, read_json, warn_left_out

if TYPE_CHECKING:
    from .data import DataConfig, Spec


@dataclass(frozen=True)
class TextConfig:
    """Settings of documents."""

    end_of_text: int = -1
    """Token that ends a document in .bin files (GPT-2: 50256). Text files end with a zero byte."""
    documents: Literal["together", "separate"] = "together"
    """separate: mask attention across documents."""


def described(folder: Path, data: "DataConfig") -> tuple["DataConfig", str]:
    """The settings, with what a tokens.json beside token files says of these; their encoding."""
    path = (folder if folder.is_dir() else folder.parent) / "tokens.json"
    if not path.exists():
        return data, ""
    note = read_json(path)
    try:
        count = max(note["vocabulary"], data.vocabulary)  # for a round number, which is faster
        kind = note["token_type"]
    except (KeyError, TypeError):
        raise UserError(f"{path} does not describe tokens: it has no vocabulary") from None
    encoding = f"{note.get('tokenizer')} {note.get('end_of_text')}"
    return replace(data, vocabulary=count, token_type=kind), encoding


def end_of_text(config: TextConfig, spec: "Spec") -> int:
    """The token that ends a document; UserError if it is not known."""
    end, note = config.end_of_text, spec.folder / "tokens.json"
    if spec.encoding == "bytes":
        end = 0
    elif spec.encoding:
        end = read_json(note).get("end_of_text")
    if type(end) is not int or not 0 <= end < spec.vocabulary:
        raise UserError(
            "--data.documents separate needs the token that ends a document: give "
            "--data.end-of-text (GPT-2: 50256)"
        )
    return end


def fingerprint_of_text(config: TextConfig, spec: "Spec") -> str:
    """The fingerprint of the data, another one with separate documents."""
    if config.documents == "together":
        return spec.fingerprint
    return fingerprint(spec.fingerprint, end_of_text(config, spec))


def encode(text: str, spec: "Spec") -> list[int]:
    """The tokens of a text; without a tokenizer a text like "15496 11 995"; UserError."""
    if spec.encoding == "bytes":
        return list(text.encode() or b"\n")
    if tokenizer := tokenizer_of(spec):
        tokenizer.encode_special_tokens = True  # what reads like a special token is text
        return tokenizer.encode(text, add_special_tokens=False).ids or [
            end_of_text(TextConfig(), spec)
        ]
    words = text.split()
    if not words or not all(w.isdecimal() and int(w) < spec.vocabulary for w in words):
        raise UserError(f'--prompt: wanted tokens below {spec.vocabulary}, as in --prompt "1 2 3"')
    return [int(word) for word in words]


def decode(tokens: Iterable[int], spec: "Spec") -> Iterator[bytes]:
    """The text of tokens, UTF-8, as they come; without a tokenizer their numbers."""
    if spec.encoding == "bytes":
        yield from (bytes([token]) for token in tokens)
    elif tokenizer := tokenizer_of(spec):
        stream = DecodeStream(skip_special_tokens=False)
        for token in tokens:  # several may be one letter
            yield (stream.step(tokenizer, token) or "").encode()
    else:
        yield from (f"{token} ".encode() for token in tokens)


def tokenizer_of(spec: "Spec") -> Tokenizer | None:
    """The tokenizer of a run's data, if it has one; UserError for another one."""
    if not spec.encoding:
        return None
    tokenizer = read_tokenizer(path := spec.folder / NAME)
    if digest_of(tokenizer) != spec.encoding.split()[0]:
        raise UserError(f"{path} is not the one that made the tokens beside it")
    return tokenizer


NAME = "tokenizer.json"


def read_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer from its file; UserError."""
    try:
        return Tokenizer.from_str(path.read_text("utf-8"))
    except Exception as error:  # the package raises plain ones
        raise UserError(f"{path} cannot be read as a tokenizer: {error}") from None


def digest_of(tokenizer: Tokenizer) -> str:
    """What tells a tokenizer from another one, in 16 letters."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()[:16]


# {% include "text/splits.py" %}
