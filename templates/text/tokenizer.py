"""Convert text to tokens and back, with the data's tokenizer, as bytes, or as numbers.

If the data are text, tokens are bytes. Token files may come with a tokenizer: a tokenizer.json of
the package `tokenizers`, as the command `tokens` writes it. Without one, tokens are numbers.
"""

import codecs
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from .errors import UserError
from .files import fingerprint, read_json, warn_left_out

if TYPE_CHECKING:
    from .data import DataConfig, Spec

NAME = "tokenizer.json"


@dataclass(frozen=True)
class TextConfig:
    """Settings of documents."""

    end_of_text: int = -1
    """Token that ends a document in .bin files without tokens.json (GPT-2: 50256; -1: none)."""
    documents: Literal["together", "separate"] = "together"
    """separate: mask attention across documents; together: do not."""


def described(folder: Path, data: "DataConfig") -> tuple["DataConfig", str]:
    """Complete the settings of token files from the tokens.json in their folder.

    Returns the settings and the encoding, such as "0123abcd 0": the digest of the tokenizer, and
    the token that ends a document. Without a tokens.json, the encoding is "".
    """
    # `folder` is --data.path, which may also be a single .bin file.
    if not folder.is_dir():
        folder = folder.parent
    path = folder / "tokens.json"
    if not path.exists():
        return data, ""
    note = read_json(path)
    try:
        # The user may give a larger --data.vocabulary: a round number makes the embedding faster.
        vocabulary = max(note["vocabulary"], data.vocabulary)
        token_type = note["token_type"]
    except (KeyError, TypeError):
        raise UserError(
            f"{path} has no vocabulary or token_type: write the folder again with `tokens`"
        ) from None
    encoding = f"{note.get('tokenizer')} {note.get('end_of_text')}"
    return replace(data, vocabulary=vocabulary, token_type=token_type), encoding


def end_of_text(config: TextConfig, spec: "Spec") -> int:
    """Return the token that ends a document; UserError if it is unknown."""
    end = config.end_of_text
    if spec.encoding == "bytes":
        # In data that are text, a zero byte ends a document.
        end = 0
    elif spec.encoding:
        end = read_json(spec.folder / "tokens.json").get("end_of_text")
    if type(end) is not int or not 0 <= end < spec.vocabulary:
        raise UserError(
            "--data.documents separate needs the token that ends a document: give "
            "--data.end-of-text (GPT-2: 50256)"
        )
    return end


def fingerprint_of_text(config: TextConfig, spec: "Spec") -> str:
    """Return the fingerprint of the data; it changes if documents are separate."""
    if config.documents == "together":
        return spec.fingerprint
    return fingerprint(spec.fingerprint, end_of_text(config, spec))


def encode(text: str, spec: "Spec") -> list[int]:
    """Convert a text to tokens; UserError if that is impossible.

    Without a tokenizer, the text must be the numbers of the tokens, as in "15496 11 995".
    """
    if spec.encoding == "bytes":
        # A model needs at least one token, so an empty text becomes a line break.
        return list(encode_bytes(text) or b"\n")
    tokenizer = tokenizer_of(spec)
    if tokenizer:
        # If the text contains a special token such as "<|endoftext|>", encode it as ordinary text.
        tokenizer.encode_special_tokens = True
        # Invalid bytes become U+FFFD, as in files that `tokens` reads.
        readable = encode_bytes(text).decode(errors="replace")
        tokens = tokenizer.encode(readable, add_special_tokens=False).ids
        # A model needs at least one token, so an empty text becomes the token that ends a document.
        # With a tokenizer, `end_of_text` reads that token from tokens.json, whatever the settings.
        return tokens or [end_of_text(TextConfig(), spec)]
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
    """Yield the bytes of each token; without a tokenizer, yield its number and a space."""
    if spec.encoding == "bytes":
        for token in tokens:
            yield bytes([token])
        return
    tokenizer = tokenizer_of(spec)
    if tokenizer:
        # A character may consist of several tokens; until it is complete, `step` returns None.
        stream = DecodeStream(skip_special_tokens=False)
        for token in tokens:
            text = stream.step(tokenizer, token) or ""
            yield text.encode()
        return
    for token in tokens:
        yield f"{token} ".encode()


def tokenizer_of(spec: "Spec") -> Tokenizer | None:
    """Return the tokenizer of token files, None if unknown; UserError if its file was replaced."""
    if not spec.encoding:
        return None
    path = spec.folder / NAME
    tokenizer = read_tokenizer(path)
    # The encoding begins with the digest of the tokenizer (see `described`).
    digest = spec.encoding.split()[0]
    if digest_of(tokenizer) != digest:
        raise UserError(
            f"{path} is not the tokenizer that made the tokens in its folder: restore the original"
        )
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer from its file; UserError if that fails."""
    try:
        tokenizer = Tokenizer.from_str(path.read_text("utf-8"))
    # The package `tokenizers` raises plain exceptions.
    except Exception as error:
        raise UserError(f"{path} cannot be read as a tokenizer: {error}") from None
    # transformers may have saved settings of truncation and padding in the file. Remove them, since
    # they would cut or pad each document.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def digest_of(tokenizer: Tokenizer) -> str:
    """Return a digest of a tokenizer (16 hex digits)."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()[:16]


# {% include "text/json_lines.py" %}


# {% include "text/splits.py" %}
