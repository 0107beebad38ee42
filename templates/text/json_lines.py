# Names of files with JSON lines. A .json file may have them, and so may a file named x.jsonl.txt.
LINES = (".jsonl", ".ndjson")
# Bytes of a line that are read to see what a file is: a JSON list may be one line in all.
LONGEST_LINE = 1 << 26


def is_json(path: Path) -> bool:
    """Tell whether a file has JSON by its name, such as a.json, a.JSONL or a.jsonl.txt."""
    suffixes = {suffix.lower() for suffix in path.suffixes}
    return not suffixes.isdisjoint((".json", *LINES))


def has_json_lines(path: Path, field: str) -> bool:
    """Tell whether a file has JSON lines, by its name and, if that leaves it open, its first lines.

    UserError for one list of objects with that field: its brackets would be tokens.
    """
    if path.suffix.lower() in LINES:
        return True
    if not is_json(path):
        return False
    with open(path, "rb") as file:
        start = file.read(1 << 20).removeprefix(codecs.BOM_UTF8)
        file.seek(0)
        first = next_object(file)
        second = next_object(file)
    # One object on one line may be any JSON file, but not if it has the text.
    if first is not None and (second is not None or field in first):
        return True
    if re.match(rb"\s*\[\s*\{", start) and json.dumps(field).encode() in start:
        raise UserError(
            f"{path} is one JSON list, not JSON lines: write an object a line, as by "
            f"jq -c '.[]' {path.name} > {path.stem}.jsonl"
        )
    return False


def next_object(file: BinaryIO) -> dict[str, Any] | None:
    """Parse the next line that is not empty as a JSON object; None if it is none."""
    line = b"\n"
    while line and not line.strip():
        line = file.readline(LONGEST_LINE)
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def texts_in(file: BinaryIO, field: str, stop: int) -> Iterator[bytes]:
    """Yield the text, in UTF-8, of each JSON line that begins before byte `stop`; UserError."""
    while True:
        offset = file.tell()
        line = file.readline()
        if offset >= stop or not line:
            return
        if not line.strip():
            continue
        try:
            # JSON can hold half of a surrogate pair, which UTF-8 cannot: it becomes "?".
            text = json.loads(line)[field].encode(errors="replace")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            where = f"{file.name}, the line at byte {offset:,}"
            raise UserError(f"{where}: wanted JSON with a text in {field!r}") from None
        yield text


def warn_of_json_as_text(files: Sequence[Path]) -> None:
    """Say in one line of the log how many JSON files are read as plain text."""
    if files:
        text = "%d JSON files are read as plain text, braces and all: no JSON lines, such as %s"
        logging.getLogger(__name__).warning(text, len(files), files[0])
