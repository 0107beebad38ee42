SPLIT = re.compile("(?<![a-z])(train(ing)?|val(id(ation)?)?|test)(?![a-z])", re.I)


def splits_of(names: Sequence[Path]) -> list[str]:
    """What files are for, "train", "val" or "test", by the first names in their paths.

    As in valid/a.txt or wiki.test.txt; "train" by any other name. All are "" unless some are named
    "train" and some "val".
    """
    matches = [SPLIT.search(name.as_posix().partition("/")[0]) for name in names]
    splits = [match[0][:3].lower() if match else "" for match in matches]
    if not {"tra", "val"} <= {*splits}:
        return [""] * len(splits)
    tests = [name for name, split in zip(names, splits, strict=True) if split == "tes"]
    warn_left_out(tests, "named test, neither train nor val")
    return [{"val": "val", "tes": "test"}.get(split, "train") for split in splits]
