def rows_of(dataset: Any) -> np.ndarray:
    """Return all samples, one per row; skip the test if the data is not tokens."""
    batch = read(dataset, list(range(len(dataset))))
    if not isinstance(batch, dict) or [*batch] != ["tokens"]:
        pytest.skip("not applicable: other data")
    return batch["tokens"].numpy().astype(np.int64)


def stretches(tokens: np.ndarray, context: int) -> np.ndarray:
    """Cut tokens into rows of `context`, each with the next token, which is its last target."""
    starts = range(0, len(tokens) - context, context)
    return np.array([tokens[start : start + context + 1] for start in starts], np.int64)


def test_a_text_is_cut_into_stretches_whose_end_is_validated(tmp_path: Path) -> None:
    """4005 bytes are 500 samples of 8; the last twentieth, 25 samples, is for validation."""
    # Printable ASCII characters, so that it is a text file.
    text = np.random.default_rng(0).integers(33, 126, 4005).astype(np.uint8)
    (tmp_path / "text.txt").write_bytes(text.tobytes())
    training, validation, _ = own_data(path=tmp_path / "text.txt", context=8)
    expected = stretches(text, 8)
    assert np.array_equal(np.concatenate([rows_of(training), rows_of(validation)]), expected)
    assert len(validation) == 25


def test_files_of_tokens_are_read_as_their_names_say(tmp_path: Path) -> None:
    """val.bin is for validation, the other .bin files for training, in the order of their names.

    Tokens are below 300, so they need two bytes each.
    """
    generator = np.random.default_rng(0)
    parts = {name: generator.integers(0, 300, n) for name, n in (("train", 405), ("val", 90))}
    parts["train_2"] = generator.integers(0, 300, 101)
    for name, tokens in parts.items():
        (tmp_path / f"{name}.bin").write_bytes(tokens.astype("<u2").tobytes())
    training, validation, spec = own_data(path=tmp_path, context=8, vocabulary=300)
    # No chunk crosses from one file to the next.
    both = [stretches(parts[name], 8) for name in ("train", "train_2")]
    assert np.array_equal(rows_of(training), np.concatenate(both))
    assert np.array_equal(rows_of(validation), stretches(parts["val"], 8))
    assert spec.vocabulary == 300


def test_each_text_file_is_for_training_or_for_validation(tmp_path: Path) -> None:
    """A hash of their names splits them; files named train and valid are split by these names."""
    generator = np.random.default_rng(0)
    texts = [generator.integers(33, 126, 200).astype(np.uint8).tobytes() for _ in range(60)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text)
    training, validation, _ = own_data(path=tmp_path, context=8)
    # The last token of a row is also the first of the next row.
    joined = [rows_of(part)[:, :-1].astype(np.uint8).tobytes() for part in (training, validation)]
    validated = 0
    for text in texts:
        # The last bytes of the data may not fill a sample. They are left out, so look for the
        # middle of each text.
        middle = text[20:-20]
        assert (middle in joined[0]) != (middle in joined[1])
        validated += middle in joined[1]
    # About one file in twenty: 3 of 60 are expected.
    assert 0 < validated < 15

    (tmp_path / "valid.txt").write_bytes(texts[0])
    (tmp_path / "train.txt").write_bytes(texts[1])
    for number in range(60):
        (tmp_path / f"{number}.txt").unlink()
    training, validation, _ = own_data(path=tmp_path, context=8)
    for part, text in ((training, texts[1]), (validation, texts[0])):
        assert np.array_equal(rows_of(part), stretches(np.frombuffer(text, np.uint8), 8))


def test_a_change_of_the_data_changes_its_fingerprint(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    seen = set()
    # Three texts, with two context lengths each.
    for text in (b"a" * 900, b"a" * 899 + b"b", b"a" * 901):
        file.write_bytes(text)
        for context in (8, 9):
            seen.add(own_data(path=file, context=context)[2].fingerprint)
    assert len(seen) == 6

    # Two texts for validation, with the same one for training.
    (tmp_path / "train.txt").write_bytes(b"a" * 900)
    for text in (b"b" * 900, b"c" * 900):
        (tmp_path / "valid.txt").write_bytes(text)
        seen.add(own_data(path=tmp_path, context=8)[2].fingerprint)
    assert len(seen) == 8


def test_a_token_that_is_not_in_the_vocabulary_is_refused(tmp_path: Path) -> None:
    # Tokens from 0 to 100, but a vocabulary of 100.
    tokens = np.arange(400, dtype="<u2") % 101
    for name in ("train", "val"):
        (tmp_path / f"{name}.bin").write_bytes(tokens.tobytes())
    training, _, _ = own_data(path=tmp_path, context=8, vocabulary=100)
    with pytest.raises(UserError, match="has a token 100"):
        rows_of(training)
