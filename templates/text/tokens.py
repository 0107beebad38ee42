"""Convert text to token files with a tokenizer, for `--data.path`: the command `tokens`.

The text is split into shards by size. Each shard is written atomically to a folder `….partial`,
which is renamed when all shards are done. After an interruption, the same command continues with
the first shard that is missing. The package `tokenizers` encodes on all cores (RAYON_NUM_THREADS
limits them).
"""

import codecs
import contextlib
import fcntl
import logging
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from .errors import UserError
from .files import (
    check_regular,
    fingerprint_files,
    goes_without_lock,
    open_to_write,
    read_json,
    replacing,
    sync_directory,
    walk_folders,
    warn_left_out,
    write_json,
)
from .text import (
    NAME,
    digest_of,
    has_json_lines,
    is_json,
    read_tokenizer,
    splits_of,
    texts_in,
    warn_of_json_as_text,
)

log = logging.getLogger(__name__)
# The size of a shard in bytes of text (64 MiB). If this would make more than a thousand shards, a
# shard is a thousandth of the text. Files with JSON lines are read in pieces of SHARD bytes.
SHARD = 1 << 26
# A tokenizer is trained on about this many bytes of text.
SAMPLE = 100_000_000
# About this many characters are encoded at once.
BATCH = 1 << 24
# If files are named for training and validation, the names decide. Otherwise about one document in
# this many is for validation, chosen by a hash of the file's name or, for JSON lines, of the text.
VALIDATE_ONE_IN = 20


@dataclass(frozen=True)
class TokensConfig:
    """Settings of `tokens`."""

    text: Path
    """A folder of text files (a document each) and JSON lines (.jsonl, .ndjson; .json if its first
    line is an object), or one such file."""
    to: Path
    """Folder to create, with token files, tokenizer.json and tokens.json, which describes them."""
    field: str = "text"
    """Field of each JSON line that contains the text; each line is a document."""
    tokenizer: Path | None = None
    """tokenizer.json to use; if not given, a byte-level BPE tokenizer is trained on the text."""
    vocabulary: int = 8192
    """Vocabulary size of a trained tokenizer."""
    end_of_text: str = "<|endoftext|>"
    """Token that ends each document."""

    def __post_init__(self) -> None:
        """Check the values (UserError)."""
        if not 257 <= self.vocabulary < 2**31:
            raise UserError(
                "--vocabulary must be at least 257 (256 bytes and the end of text), below 2^31"
            )


class Piece(NamedTuple):
    """A whole text file, or the JSON lines of a file that begin in a range of its bytes."""

    path: Path
    # The first byte of the range, and the byte after its last one.
    start: int
    stop: int
    # Whether the piece is for validation. None: it has JSON lines, and a hash of each text decides.
    validation: bool | None
    # Whether the piece has JSON lines, each of them a document.
    has_json_lines: bool = False


class Chunk(NamedTuple):
    """Consecutive text of a document; `last` is true at the end of the document."""

    validation: bool
    text: str
    last: bool


def write_tokens(options: TokensConfig) -> str:
    """Write the folder of tokens, or continue an interrupted command; return a summary line.

    Raises UserError if the text or a path cannot be used.
    """
    folder = options.to
    if not options.text.exists():
        raise UserError(f"--text: {options.text.absolute()} does not exist")
    if folder.resolve().is_relative_to(options.text.resolve()):
        raise UserError(f"--to {folder} is inside the folder of the text: choose another folder")
    if os.path.lexists(folder):
        raise UserError(f"--to {folder} exists already: remove it, or choose another folder")
    partial = folder.with_name(f"{folder.name}.partial")
    root, pieces = divide(options.text, options.field)
    given_tokenizer = None
    if options.tokenizer:
        given_tokenizer = read_tokenizer(options.tokenizer)
        if given_tokenizer.token_to_id(options.end_of_text) is None:
            message = f"the tokenizer has no token {options.end_of_text!r}: set --end-of-text"
            raise UserError(message)
    # Each file once, in order, although a file may have several pieces.
    files = list(dict.fromkeys(piece.path for piece in pieces))
    # Everything that the tokens depend on: only a command with the same plan may continue.
    plan = {
        "text": fingerprint_files(root, files, options.field, options.end_of_text),
        # The given tokenizer, or the vocabulary size of the one to train on this text.
        "made_by": digest_of(given_tokenizer) if given_tokenizer else options.vocabulary,
    }
    partial.mkdir(parents=True, exist_ok=True)
    with open_to_write(partial / "lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # On a file system without locks, the command continues only if the user allows it.
            if not goes_without_lock(error, partial):
                raise UserError(f"another process is writing to {partial}: wait for it") from None
        note = read_progress(partial, plan)
        if note is None:
            with replacing(partial / NAME) as temporary:
                tokenizer = given_tokenizer or train_tokenizer(pieces, options)
                tokenizer.save(str(temporary))
            # tokens.json will contain the plan, the number of finished shards, and counts of
            # documents, bytes of text, and tokens for training and validation.
            counts = dict.fromkeys(("shards", "documents", "bytes", "train", "val"), 0)
            note = plan | counts
        note = encode_all(partial, pieces, options, note)
        sync_directory(partial)
        partial.rename(folder)
        sync_directory(folder.resolve().parent)
    # The lock file is still in the folder that was renamed.
    (folder / "lock").unlink()
    return (
        f"{note['train']:,} training and {note['val']:,} validation tokens, vocabulary "
        f"{note['vocabulary']:,}, from {note['bytes']:,} bytes of text in {note['documents']:,} "
        f"documents. Train with --data.path {folder}"
    )


def read_progress(partial: Path, plan: dict[str, Any]) -> dict[str, Any] | None:
    """Return the content of an interrupted command's tokens.json; None if there is none.

    Raises UserError if that command had another plan.
    """
    if not (partial / "tokens.json").exists():
        return None
    note = read_json(partial / "tokens.json")
    # tokens.json must contain every item of the plan; it also has counts.
    if not note.items() >= plan.items():
        raise UserError(f"{partial} was started with other text or settings: remove it")
    return note


def divide(text: Path, field: str) -> tuple[Path, list[Piece]]:
    """Return the folder of the text, and the pieces of the text in a fixed order.

    In JSON lines, `field` is the field with the text. Raises UserError if there is no text.
    """
    root = text if text.is_dir() else text.parent
    paths = text_files(text)
    names = [path.relative_to(root) for path in paths]
    pieces: list[Piece] = []
    json_as_text: list[Path] = []
    for path, name, split in zip(paths, names, splits_of(names), strict=True):
        if split == "test":
            continue
        size = path.stat().st_size
        are_lines = has_json_lines(path, field)
        if is_json(path) and not are_lines:
            json_as_text.append(path)
        if split:
            validation = split == "val"
        elif are_lines:
            # A hash of each text decides, in `read_chunks`.
            validation = None
        else:
            # Hash the bytes of the name, since a name need not be UTF-8.
            hash_of_name = zlib.crc32(os.fsencode(name.as_posix()))
            # If this is the first piece, use it for training, so that there is training data.
            validation = bool(pieces) and hash_of_name % VALIDATE_ONE_IN == 0
        # A text file is one document and therefore one piece. `max` is for an empty file, which has
        # no piece: `range` does not accept a step of 0.
        piece_size = SHARD if are_lines else max(size, 1)
        for start in range(0, size, piece_size):
            stop = min(start + piece_size, size)
            pieces.append(Piece(path, start, stop, validation, are_lines))
    warn_of_json_as_text(json_as_text)
    if not pieces:
        raise UserError(f"--text {text} has no text: give a folder of UTF-8 files or JSON lines")
    return root, pieces


def text_files(text: Path) -> list[Path]:
    """List the text files in a fixed order, without hidden and binary ones."""
    texts: list[Path] = []
    left_out: list[Path] = []
    not_utf8: list[Path] = []
    paths: list[Path] = []
    if text.is_file():
        paths.append(text)
    else:
        for parent, folders, names in walk_folders(text):
            # The walk visits only the folders that remain in this list.
            folders[:] = [name for name in folders if not name.startswith(".")]
            paths += [parent / name for name in names if not name.startswith(".")]
    for path in sorted(paths):
        check_regular([path])
        with open(path, "rb") as file:
            beginning = file.read(1 << 20)
        # A NUL byte near the start means a binary file, as in git.
        if b"\0" in beginning[:8192]:
            left_out.append(path)
            continue
        texts.append(path)
        if not is_utf8(beginning):
            not_utf8.append(path)
    warn_left_out(left_out, "not UTF-8 text (NUL bytes, as UTF-16 has)")
    if not_utf8:
        log.warning(
            "%d files are not UTF-8, such as %s: what cannot be decoded becomes U+FFFD. "
            "Convert them first, for example with iconv",
            len(not_utf8),
            not_utf8[0],
        )
    return texts


def is_utf8(beginning: bytes) -> bool:
    """Return whether the beginning of a file is UTF-8; its last character may be cut off."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(beginning)
    except UnicodeDecodeError:
        return False
    return True


def train_tokenizer(pieces: list[Piece], options: TokensConfig) -> Tokenizer:
    """Train a byte-level BPE tokenizer (Sennrich et al., 2016) on a sample of the text."""
    log.info("training a tokenizer of %d tokens", options.vocabulary)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocabulary,
        special_tokens=[options.end_of_text],
        # Every byte is a token, so that any text can be encoded.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(pieces, options.field), trainer)
    return tokenizer


def sample(pieces: list[Piece], field: str) -> Iterator[str]:
    """Yield about SAMPLE bytes of text, spread over all pieces in proportion to their sizes."""
    total = sum(piece.stop - piece.start for piece in pieces)
    fraction = min(1.0, SAMPLE / total)
    # The number of bytes that are still to be taken. Each piece adds its share, and each chunk that
    # is taken subtracts its size. A large chunk makes `due` negative. Then pieces are skipped until
    # their shares make it positive again.
    due = 0.0
    for piece in pieces:
        due += fraction * (piece.stop - piece.start)
        if due <= 0:
            continue
        for chunk in read_chunks(piece, field):
            yield chunk.text
            due -= len(chunk.text.encode(errors="replace"))
            if due <= 0:
                break


def read_chunks(piece: Piece, field: str) -> Iterator[Chunk]:
    """Yield the text of a piece: whole JSON lines, or a text file about a megabyte at a time.

    Raises UserError for a bad JSON line.
    """
    with open(piece.path, "rb") as file:
        if piece.has_json_lines:
            # A line that began in the previous piece belongs to that piece, so skip the rest of the
            # line. Start one byte early: if that byte is a line break, the skip ends there, and the
            # line that begins exactly at `piece.start` is read.
            if piece.start:
                file.seek(piece.start - 1)
                file.readline()
            for content in texts_in(file, field, piece.stop):
                validation = piece.validation
                if validation is None:
                    validation = zlib.crc32(content) % VALIDATE_ONE_IN == 0
                yield Chunk(validation, content.decode(), last=True)
            return
        # `piece.validation` is None only for JSON lines.
        for_validation = bool(piece.validation)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while True:
            # Read up to the end of a line, so that a chunk does not end inside a word.
            content = file.read(1 << 20) + file.readline(1 << 16)
            if not content:
                break
            yield Chunk(for_validation, decoder.decode(content), last=False)
        # The last chunk ends the document. Its text is "", or U+FFFD if the file ends in the middle
        # of a character.
        yield Chunk(for_validation, decoder.decode(b"", final=True), last=True)


def encode_all(
    folder: Path, pieces: list[Piece], options: TokensConfig, note: dict[str, Any]
) -> dict[str, Any]:
    """Encode the shards that are not in `note` yet; return the content of tokens.json."""
    sizes = [piece.stop - piece.start for piece in pieces]
    shard_size = max(SHARD, sum(sizes) // 1000)
    # Number the bytes of all pieces from 0. A piece belongs to the shard of its first byte.
    first_bytes = np.cumsum([0, *sizes[:-1]])
    shard_of_piece = (first_bytes // shard_size).tolist()
    tokenizer = read_tokenizer(folder / NAME)
    # If the text contains the name of a special token, encode it as ordinary text.
    tokenizer.encode_special_tokens = True
    # The ids of a given tokenizer may have gaps, so use the largest id, not the number of tokens.
    vocabulary = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    note |= {
        "vocabulary": vocabulary,
        "token_type": "uint16" if vocabulary <= 2**16 else "uint32",
        "end_of_text": tokenizer.token_to_id(options.end_of_text),
        "tokenizer": digest_of(tokenizer),
    }
    with tqdm(total=sum(sizes), unit="B", unit_scale=True) as bar:
        for shard in range(shard_of_piece[-1] + 1):
            in_shard = [p for p, n in zip(pieces, shard_of_piece, strict=True) if n == shard]
            # A shard has no pieces if a text file from an earlier shard covers all of it. Shards
            # below note["shards"] were written before an interruption.
            if in_shard and shard >= note["shards"]:
                counts = encode(folder, shard, in_shard, tokenizer, options.field, note)
                for name, count in counts.items():
                    note[name] += count
                write_json(folder / "tokens.json", note | {"shards": shard + 1})
            bar.update(sum(piece.stop - piece.start for piece in in_shard))
    return note


def encode(
    folder: Path, shard: int, pieces: list[Piece], tokenizer: Tokenizer, field: str, note: Any
) -> dict[str, int]:
    """Write the training and validation token files of a shard; return its counts for `note`."""
    counts: Counter[str] = Counter()
    paths = {name: folder / f"{name}_{shard:05}.bin" for name in ("train", "val")}
    files: dict[str, IO[Any]] = {}
    with contextlib.ExitStack() as stack:
        # The stack exits in reverse order: it closes all temporary files, then renames them.
        temporaries = {name: stack.enter_context(replacing(path)) for name, path in paths.items()}
        for name, temporary in temporaries.items():
            files[name] = stack.enter_context(open_to_write(temporary, "wb"))
        for batch in batches(pieces, field):
            texts = [chunk.text for chunk in batch]
            encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for chunk, encoding in zip(batch, encoded, strict=True):
                tokens = encoding.ids
                if chunk.last:
                    tokens = [*tokens, note["end_of_text"]]
                    counts["documents"] += 1
                name = "val" if chunk.validation else "train"
                files[name].write(np.array(tokens, note["token_type"]).tobytes())
                counts[name] += len(tokens)
                counts["bytes"] += len(chunk.text.encode())
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    # Remove a file without tokens, since data.py refuses empty files. For example, a shard may have
    # no text for validation.
    for name, path in paths.items():
        if not counts[name]:
            path.unlink()
    return counts


def batches(pieces: list[Piece], field: str) -> Iterator[list[Chunk]]:
    """Yield the chunks of these pieces in lists of about BATCH characters."""
    batch: list[Chunk] = []
    length = 0
    for piece in pieces:
        for chunk in read_chunks(piece, field):
            batch.append(chunk)
            length += len(chunk.text)
            if length >= BATCH:
                yield batch
                batch = []
                length = 0
    yield batch
