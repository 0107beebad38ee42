# Suffixes of files that have JSON lines. Files such as x.json and x.jsonl.txt may have JSON lines,
# too: `has_json_lines` looks into them.
LINES = (".jsonl", ".ndjson")
# To detect the format, at most this many bytes of a line are read (64 MiB): a file with a JSON list
# may be one very long line.
LONGEST_LINE = 1 << 26


def is_json(path: Path) -> bool:
    """Return whether the name of a file suggests JSON, as in a.json, a.JSONL or a.jsonl.txt."""
    suffixes = {suffix.lower() for suffix in path.suffixes}
    return not suffixes.isdisjoint((".json", *LINES))


def has_json_lines(path: Path, field: str) -> bool:
    """Return whether a file has JSON lines, by its name or, if need be, by its first lines.

    Raises UserError if the file is one JSON list of objects with this field. As plain text, the
    brackets of the list would become tokens.
    """
    if path.suffix.lower() in LINES:
        return True
    if not is_json(path):
        return False
    with open(path, "rb") as file:
        first_megabyte = file.read(1 << 20).removeprefix(codecs.BOM_UTF8)
        file.seek(0)
        first = next_object(file)
        second = next_object(file)
    # Two lines with an object each mean JSON Lines. A file with a single object may be any JSON
    # file, so require that the object has the field.
    if first is not None and (second is not None or field in first):
        return True
    is_list_of_objects = re.match(rb"\s*\[\s*\{", first_megabyte) is not None
    # JSON may write the field's name as it is, or with escapes such as \u00e9.
    forms = (json.dumps(field), json.dumps(field, ensure_ascii=False))
    has_field = any(form.encode(errors="surrogateescape") in first_megabyte for form in forms)
    if is_list_of_objects and has_field:
        raise UserError(
            f"{path} is one JSON list, not JSON lines: convert it with "
            f"jq -c '.[]' {path.name} > {path.stem}.jsonl"
        )
    return False


def next_object(file: BinaryIO) -> dict[str, Any] | None:
    """Parse the next non-empty line as a JSON object; None if the line is something else."""
    # Skip empty lines. At the end of the file `readline` returns b"", which ends the loop and is
    # not JSON.
    line = b"\n"
    while line and not line.strip():
        line = file.readline(LONGEST_LINE)
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def texts_in(file: BinaryIO, field: str, stop: int) -> Iterator[bytes]:
    """Yield the UTF-8 text of each JSON line that begins before byte `stop`.

    Raises UserError for a line that is not JSON, or lacks the field.
    """
    while True:
        offset = file.tell()
        line = file.readline()
        if offset >= stop or not line:
            return
        if not line.strip():
            continue
        try:
            # JSON can contain half of a surrogate pair. UTF-8 cannot encode it: it becomes "?".
            text = json.loads(line)[field].encode(errors="replace")
        # The line is not JSON, lacks the field, is not an object, has no text in the field, or is
        # nested too deeply.
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            where = f"{file.name}, the line at byte {offset:,}"
            raise UserError(f"{where}: expected a JSON object with text in {field!r}") from None
        yield text


def warn_of_json_as_text(files: Sequence[Path]) -> None:
    """Log one warning with the number of JSON files that are read as plain text."""
    if files:
        text = "%d JSON files do not have JSON lines and are read as plain text, such as %s"
        logging.getLogger(__name__).warning(text, len(files), files[0])
