"""Text to tokens and back, as the data has it: by the tokenizer beside it, in bytes, or in numbers.

A tokenizer is a tokenizer.json of the package of that name, which the command `tokens` leaves.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from .errors import UserError
from .mixture import parse

if TYPE_CHECKING:
    from .config import Config
    from .data import Spec


def encode(text: str, spec: "Spec", config: "Config") -> list[int]:
    """The tokens of a text; without a tokenizer a text like "15496 11 995"; UserError."""
    if spec.encoding == "bytes":
        return list(text.encode() or b"\n")
    if tokenizer := tokenizer_of(spec, config):
        tokenizer.encode_special_tokens = True  # what reads like a special token is text
        return tokenizer.encode(text, add_special_tokens=False).ids or [spec.end_of_text]
    words = text.split()
    if not words or not all(w.isdecimal() and int(w) < spec.vocabulary for w in words):
        raise UserError(f'--prompt: wanted tokens below {spec.vocabulary}, as in --prompt "1 2 3"')
    return [int(word) for word in words]


def decode(tokens: Iterable[int], spec: "Spec", config: "Config") -> Iterator[bytes]:
    """The text of tokens, UTF-8, as they come; without a tokenizer their numbers."""
    if spec.encoding == "bytes":
        yield from (bytes([token]) for token in tokens)
    elif tokenizer := tokenizer_of(spec, config):
        stream = DecodeStream(skip_special_tokens=False)
        for token in tokens:  # several may be one letter
            yield (stream.step(tokenizer, token) or "").encode()
    else:
        yield from (f"{token} ".encode() for token in tokens)


def tokenizer_of(spec: "Spec", config: "Config") -> Tokenizer | None:
    """The tokenizer of a run's data, if it has one; UserError for another one."""
    if not spec.encoding or not (path := config.data.path):
        return None
    folder = path if path.is_dir() else path.parent
    tokenizer = read_tokenizer(folder / next(iter(parse(config.data.mix or ".=1"))) / NAME)
    if digest_of(tokenizer) != spec.encoding:
        raise UserError(f"the {NAME} in {folder} is not the one that made the tokens beside it")
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
