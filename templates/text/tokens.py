"""The command `tokens`: text into files of tokens, with their tokenizer, for `--data.path`.

The text is cut into shards by its size. Each is written whole or not at all, into a folder
`….partial` until everything is there: the same command continues where it was stopped. The package
`tokenizers` encodes on all cores (RAYON_NUM_THREADS bounds them).
"""

import codecs
import contextlib
import fcntl
import json
import logging
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from .errors import UserError
from .files import (
    check_regular,
    fingerprint_files,
    open_to_write,
    read_json,
    replacing,
    sync_directory,
    warn_left_out,
    write_json,
)
from .text import NAME, digest_of, read_tokenizer, splits_of

log = logging.getLogger(__name__)
SHARD = 1 << 26  # bytes of text in one, or a thousandth of all, if that is more
SAMPLE = 100_000_000  # bytes of text that a tokenizer is trained on
BATCH = 1 << 24  # letters that are encoded at the same time
# Without names that say what files are for one document in so many, by a hash of the name of its
# file or, in JSON lines, its text.
VALIDATION_SHARE = 20


@dataclass(frozen=True)
class TokensConfig:
    """What to encode, and how."""

    text: Path
    """A folder of text files (a document each) and JSON lines (.jsonl), or one such file."""
    to: Path
    """Folder to create, with token files, tokenizer.json and tokens.json, which describes them."""
    field: str = "text"
    """Field of a JSON line with the text; each line is a document."""
    tokenizer: Path | None = None
    """tokenizer.json to use (default: train byte-level BPE on the text)."""
    vocabulary: int = 8192
    """Vocabulary size of a trained tokenizer."""
    end_of_text: str = "<|endoftext|>"
    """The token that ends each document."""

    def __post_init__(self) -> None:
        """Check the values (UserError)."""
        if not 257 <= self.vocabulary < 2**31:
            raise UserError("--vocabulary must be at least 257: all bytes, and the end of text")


class Piece(NamedTuple):
    """A text file, or the JSON lines that begin in a range of its bytes."""

    path: Path
    start: int
    stop: int
    validation: bool | None  # what it is for (None: JSON lines, each by its text)


class Part(NamedTuple):
    """A stretch of a document."""

    validation: bool
    text: str
    last: bool


def write_tokens(options: TokensConfig) -> str:
    """Make the folder of tokens, or continue; a line that says what is in it. UserError."""
    folder, partial = options.to, options.to.with_name(f"{options.to.name}.partial")
    if not options.text.exists():
        raise UserError(f"--text: there is nothing at {options.text.absolute()}")
    if folder.resolve().is_relative_to(options.text.resolve()):
        raise UserError(f"--to {folder} is inside the text: choose another place")
    if os.path.lexists(folder):
        raise UserError(f"--to {folder} is there already: remove it, or choose another place")
    root, pieces = divide(options.text)
    files = list(dict.fromkeys(piece.path for piece in pieces))
    given = options.tokenizer and read_tokenizer(options.tokenizer)
    if given and given.token_to_id(options.end_of_text) is None:
        raise UserError(f"the tokenizer has no token {options.end_of_text!r}: give --end-of-text")
    plan = {
        "text": fingerprint_files(root, files, options.field, options.end_of_text),
        "made_by": digest_of(given) if given else options.vocabulary,
    }
    partial.mkdir(parents=True, exist_ok=True)
    with open_to_write(partial / "lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another process is at work in {partial}") from None
        note = plan | dict.fromkeys(("shards", "documents", "bytes", "train", "val"), 0)
        if (partial / "tokens.json").exists():
            note = read_json(partial / "tokens.json")
            if not note.items() >= plan.items():
                raise UserError(f"{partial} was begun with other text or settings: remove it")
        else:
            with replacing(partial / NAME) as temporary:
                (given or train_tokenizer(pieces, options)).save(str(temporary))
        note = encode_all(partial, pieces, options, note)
        sync_directory(partial)
        partial.rename(folder)
        sync_directory(folder.resolve().parent)
    (folder / "lock").unlink()
    return (
        f"{note['train']:,} tokens to train on and {note['val']:,} to validate with, of "
        f"{note['vocabulary']:,} kinds; {note['bytes']:,} bytes of text in {note['documents']:,} "
        f"documents. Train with --data.path {folder}"
    )


def divide(text: Path) -> tuple[Path, list[Piece]]:
    """The folder of the text, and its pieces in a fixed order; UserError for no text."""
    root = text if text.is_dir() else text.parent
    texts: list[Path] = []
    left_out: list[Path] = []
    for path in [text] if text.is_file() else sorted(text.rglob("*")):
        if path.is_dir() or any(part[0] == "." for part in path.relative_to(text).parts):
            continue
        check_regular([path])
        with open(path, "rb") as file:
            (left_out if b"\0" in file.read(8192) else texts).append(path)
    warn_left_out(left_out, "not UTF-8 text (NUL bytes, as UTF-16 has)")
    names = [path.relative_to(root) for path in texts]
    pieces: list[Piece] = []
    for name, split in zip(names, splits_of(names), strict=True):
        path = root / name
        lines, size = path.suffix == ".jsonl", path.stat().st_size
        hashed = bool(pieces) and zlib.crc32(name.as_posix().encode()) % VALIDATION_SHARE == 0
        chosen = split == "val" if split else None if lines else hashed
        step = SHARD if lines else max(size, 1)
        if split != "test":
            bounds = ((at, min(at + step, size)) for at in range(0, size, step))
            pieces += [Piece(path, *ends, chosen) for ends in bounds]
    if not pieces:
        raise UserError(f"--text {text}: there is no text in it")
    return root, pieces


def train_tokenizer(pieces: list[Piece], options: TokensConfig) -> Tokenizer:
    """Byte pairs, merged as they are frequent (BPE: Sennrich et al., 2016), over all 256 bytes."""
    log.info("training a tokenizer of %d tokens", options.vocabulary)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocabulary,
        special_tokens=[options.end_of_text],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(pieces, options.field), trainer)
    return tokenizer


def sample(pieces: list[Piece], field: str) -> Iterator[str]:
    """Text from all over the pieces, SAMPLE bytes in all."""
    left, total = SAMPLE, sum(piece.stop - piece.start for piece in pieces)
    for piece in pieces[:: -(-total // SAMPLE)]:
        for part in parts(piece, field):
            yield part.text
            if (left := left - len(part.text)) <= 0:
                return


def parts(piece: Piece, field: str) -> Iterator[Part]:
    """The documents of a piece, about a megabyte at a time; UserError for a line without text."""
    with open(piece.path, "rb") as file:
        if piece.path.suffix != ".jsonl":
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            while content := file.read(1 << 20) + file.readline(1 << 16):  # to the end of a line
                yield Part(bool(piece.validation), decoder.decode(content), last=False)
            yield Part(bool(piece.validation), decoder.decode(b"", final=True), last=True)
            return
        if piece.start:
            file.seek(piece.start - 1)
            file.readline()  # of a line that begins in the piece before
        while (place := file.tell()) < piece.stop:
            if not (line := file.readline()).strip():
                continue
            try:
                content = json.loads(line)[field].encode(errors="replace")  # half a letter is none
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                where = f"{piece.path}, the line at byte {place:,}"
                raise UserError(f"{where}: wanted JSON with a text in {field!r}") from None
            chosen = piece.validation
            if chosen is None:
                chosen = zlib.crc32(content) % VALIDATION_SHARE == 0
            yield Part(chosen, content.decode(), last=True)


def encode_all(
    folder: Path, pieces: list[Piece], options: TokensConfig, note: dict[str, Any]
) -> dict[str, Any]:
    """Encode the shards that `note` does not count yet; what tokens.json says in the end."""
    sizes = [piece.stop - piece.start for piece in pieces]
    shard = max(SHARD, sum(sizes) // 1000)
    numbers = np.cumsum([0, *sizes[:-1]]) // shard  # of the shard that a piece begins in
    tokenizer = read_tokenizer(folder / NAME)
    tokenizer.encode_special_tokens = True  # what reads like a special token is text
    vocabulary = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    note |= {
        "vocabulary": vocabulary,
        "token_type": "uint16" if vocabulary <= 2**16 else "uint32",
        "end_of_text": tokenizer.token_to_id(options.end_of_text),
        "tokenizer": digest_of(tokenizer),
    }
    with tqdm(total=sum(sizes), unit="B", unit_scale=True) as bar:
        for number in range(numbers[-1] + 1):
            own = [piece for piece, n in zip(pieces, numbers, strict=True) if n == number]
            if own and number >= note["shards"]:
                counts = encode(folder, number, own, tokenizer, options.field, note)
                note |= {name: note[name] + count for name, count in counts.items()}
                write_json(folder / "tokens.json", note | {"shards": int(number) + 1})
            bar.update(sum(piece.stop - piece.start for piece in own))
    return note


def encode(
    folder: Path, shard: int, pieces: list[Piece], tokenizer: Tokenizer, field: str, note: Any
) -> dict[str, int]:
    """Write the token files of a shard, for training and for validation; counts of what is in."""
    counts: Counter[str] = Counter()
    paths = {name: folder / f"{name}_{shard:05}.bin" for name in ("train", "val")}
    with contextlib.ExitStack() as stack:
        names = {name: stack.enter_context(replacing(path)) for name, path in paths.items()}
        files = {
            name: stack.enter_context(open_to_write(path, "wb")) for name, path in names.items()
        }
        for batch in batches(pieces, field):
            texts = [part.text for part in batch]
            encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for part, encoding in zip(batch, encoded, strict=True):
                tokens = encoding.ids + [note["end_of_text"]] * part.last
                name = "val" if part.validation else "train"
                files[name].write(np.array(tokens, note["token_type"]).tobytes())
                counts[name] += len(tokens)
                counts["documents"] += part.last
                counts["bytes"] += len(part.text.encode())
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    for name, path in paths.items():
        if not counts[name]:
            path.unlink()
    return counts


def batches(pieces: list[Piece], field: str) -> Iterator[list[Part]]:
    """The parts of some pieces, as many together as BATCH says."""
    batch, length = [], 0
    for part in (part for piece in pieces for part in parts(piece, field)):
        batch.append(part)
        if (length := length + len(part.text)) >= BATCH:
            yield batch
            batch, length = [], 0
    yield batch
