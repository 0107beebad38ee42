# A name such as train, training, valid or test between characters that are no letters.
SPLIT = re.compile("(?<![a-z])(train(ing)?|val(id(ation)?)?|test)(?![a-z])", re.I)
# By the first three letters of a match.
SPLIT_NAMES = {"tra": "train", "val": "val", "tes": "test"}


def splits_of(names: Sequence[Path]) -> list[str]:
    """Tell what files are for, "train", "val" or "test", by the first names in their paths.

    Examples: valid/a.txt, wiki.test.txt. Any other name means "train". All are "" unless some files
    are named for training and some for validation.
    """
    splits: list[str] = []
    for name in names:
        first = name.as_posix().partition("/")[0]
        match = SPLIT.search(first)
        splits.append(SPLIT_NAMES[match[0][:3].lower()] if match else "")
    if not ("train" in splits and "val" in splits):
        return [""] * len(splits)
    tests = [name for name, split in zip(names, splits, strict=True) if split == "test"]
    warn_left_out(tests, "named test, neither train nor val")
    return [split or "train" for split in splits]
