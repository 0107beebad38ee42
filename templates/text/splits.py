# Finds a word such as train, training, valid or test, with no letter right before or after it.
SPLIT = re.compile("(?<![a-z])(train(ing)?|val(id(ation)?)?|test)(?![a-z])", re.I)
# The first three letters of a match, and the split that they mean.
SPLIT_NAMES = {"tra": "train", "val": "val", "tes": "test"}


def splits_of(names: Sequence[Path]) -> list[str]:
    """Return "train", "val" or "test" for each file, by the first component of its path.

    For example, valid/a.txt is in "val", wiki.test.txt in "test", and other.txt in "train". If no
    file is named for training, or none for validation, return "" for all files: then the caller
    splits them.
    """
    splits: list[str] = []
    for name in names:
        first_component = name.as_posix().partition("/")[0]
        match = SPLIT.search(first_component)
        splits.append(SPLIT_NAMES[match[0][:3].lower()] if match else "")
    if "train" not in splits or "val" not in splits:
        return [""] * len(splits)
    test_files = [name for name, split in zip(names, splits, strict=True) if split == "test"]
    warn_left_out(test_files, "test files")
    return [split or "train" for split in splits]
