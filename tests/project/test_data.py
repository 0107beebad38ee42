"""Data of one's own: token files, arrays and folders of images; what grew, what is no such data."""

import codecs
import gzip
import itertools
import os
import pickle
import resource
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.conftest import Project, project_fixture

text = project_fixture("data_text", parallelism="single", checkpoint="dcp")


image = project_fixture(
    "data_image", task="image_classifier", parallelism="single", checkpoint="torch_save"
)


def datasets(project: Project, **changes: object) -> tuple:
    return project.module("data").build_datasets(project.config(**changes))


def token_file(path: Path, count: int, kind: str = "<u2", vocabulary: int = 300) -> np.ndarray:
    tokens = (np.arange(count, dtype=np.int64) ** 2 % vocabulary).astype(kind)
    path.write_bytes(tokens.tobytes())
    return tokens


def of_tokens(path: Path, **more: object) -> dict[str, object]:
    return {"data__path": path, "data__vocabulary": 300, "data__context": 8} | more


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    context=st.integers(1, 12),
    kind=st.sampled_from(["uint16", "uint32"]),
)
@settings(max_examples=60)
def test_samples_are_all_stretches_of_all_shards(
    text: Project, lengths: list[int], context: int, kind: str
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards = [
            token_file(folder / f"shard_{i:02}.bin", length, np.dtype(kind).newbyteorder("<").str)
            for i, length in enumerate(lengths)
        ]
        wanted = [
            shard[start : start + context + 1].tolist()
            for shard in shards
            for start in range(0, len(shard) - context, context)
        ]
        changes = of_tokens(folder, data__context=context, data__token_type=kind)
        if len(wanted) < 2:
            with pytest.raises(text.module("errors").UserError, match="too few tokens"):
                datasets(text, **changes)
            return
        training, validation, spec = datasets(text, **changes)
        found = [
            part.__getitems__(list(range(len(part))))["tokens"] for part in (training, validation)
        ]
    assert [row for part in found for row in part.tolist()] == wanted
    assert len(validation) == -(-len(wanted) // 20)
    assert (spec.vocabulary, spec.tokens_per_sample) == (300, context)


def test_nanogpts_own_files_train_resume_and_generate(
    text: Project, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    token_file(tmp_path / "train.bin", 4000)
    token_file(tmp_path / "val.bin", 500)
    training, validation, _ = datasets(text, **of_tokens(tmp_path))
    assert (len(training), len(validation)) == (3999 // 8, 499 // 8)
    options = ["--preset", "tiny", "--device", "cpu", "--data.path", str(tmp_path)]
    options += ["--data.vocabulary", "300", "--run-dir", str(tmp_path / "run")]
    text("train", *options, "--train.steps", "3")
    text("train", *options, "--train.steps", "6", "--train.loader-workers", "1")
    text("infer", "--run-dir", str(tmp_path / "run"), "--prompt", "1 4 9", "--tokens", "5")
    words = capfd.readouterr().out.split()
    assert words[:3] == ["1", "4", "9"] and len(words) == 8
    line = text.refuses("infer", "--run-dir", str(tmp_path / "run"), "--prompt", "def ")
    assert "numbers below 300" in line


def test_terabytes_are_neither_read_nor_held(text: Project, tmp_path: Path) -> None:
    """A sparse file of four terabytes: built, fingerprinted and read at its end at once."""
    with open(tmp_path / "train.bin", "wb") as file:
        file.truncate(4 << 40)
    token_file(tmp_path / "val.bin", 100)
    training, _, spec = datasets(text, **of_tokens(tmp_path))
    assert len(training) == ((4 << 40) // 2 - 1) // 8
    assert training.__getitems__([len(training) - 1])["tokens"].tolist() == [[0] * 9]
    assert len(pickle.dumps(training)) < 10_000  # what a loader worker may be sent
    with open(tmp_path / "train.bin", "r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\1\0")
    assert datasets(text, **of_tokens(tmp_path))[2].fingerprint != spec.fingerprint


def test_there_may_be_more_shards_than_files_a_process_may_open(
    text: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two thousand, of which sixteen are kept open: every sample is where it should be."""
    for shard in range(2000):
        with open(tmp_path / f"train_{shard:04}.bin", "wb") as file:
            file.write(shard.to_bytes(2, "little"))
            file.truncate(1 << 30)  # sparse
    token_file(tmp_path / "val.bin", 100)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit[0], 1024), limit[1]))
        before = len(os.listdir("/proc/self/fd"))
        training, _, _ = datasets(text, **of_tokens(tmp_path, data__vocabulary=2000))
        assert not training.files, "files are opened where they are read"
        each = ((1 << 29) - 1) // 8
        assert len(training) == 2000 * each
        monkeypatch.setattr(text.module("data"), "MOST_OPEN", 16)
        for ids in np.random.default_rng(0).permutation(2000).reshape(-1, 100):
            rows = training.__getitems__((ids * each).tolist())["tokens"]
            assert rows[:, 0].tolist() == ids.tolist() and not rows[:, 1:].any()
        assert len(os.listdir("/proc/self/fd")) <= before + 16
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_a_fingerprint_is_of_names_sizes_and_content(text: Project, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    for i in range(3):
        token_file(here / f"{i}.bin", 20_000 + i)

    def found(folder: Path) -> str:
        return datasets(text, **of_tokens(folder))[2].fingerprint

    original = found(here)
    shutil.copytree(here, there)
    assert found(there) == original  # wherever it lies
    different = {original}
    os.rename(there / "2.bin", there / "3.bin")
    different.add(found(there))
    os.rename(there / "3.bin", there / "2.bin")
    assert found(there) == original
    with open(there / "1.bin", "r+b") as file:
        file.write(b"\7")
    different.add(found(there))
    token_file(there / "9.bin", 50)
    different.add(found(there))
    assert len(different) == 4


def words_of(part: Any) -> set[str]:
    """The words in some samples of text."""
    tokens = part.__getitems__(list(range(len(part))))["tokens"][:, :-1]
    return {*bytes(tokens.flatten().tolist()).decode(errors="replace").split()}


def test_what_is_not_text_in_utf_8_is_left_out_and_named(
    text: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "plain.txt").write_text("naïve " * 50)
    (tmp_path / "marked.txt").write_text("marked " * 50, "utf-8-sig")
    (tmp_path / ".hidden").write_bytes(b"\0")
    training, validation, _ = datasets(text, data__path=tmp_path, data__context=8)
    assert words_of(training) | words_of(validation) >= {"naïve", "marked"}
    assert not caplog.text
    (tmp_path / "packed.gz").write_bytes(gzip.compress(b"text " * 1000, mtime=0))
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        (tmp_path / f"{encoding}.txt").write_text(f"other_{encoding} ", encoding)
    training, validation, _ = datasets(text, data__path=tmp_path, data__context=8)
    assert not any("other" in word for word in words_of(training) | words_of(validation))
    (line,) = caplog.messages
    start = "4 files left out: not UTF-8 text (NUL bytes, as UTF-16 has), such as "
    assert line.startswith(start) and line.endswith("packed.gz")
    caplog.clear()
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone/a.txt").write_text("alone " * 100, "utf-16")
    for path in (tmp_path / "alone", tmp_path / "alone/a.txt"):
        with pytest.raises(text.module("errors").UserError, match="has neither text nor"):
            datasets(text, data__path=path, data__context=8)
    assert len(caplog.messages) == 2 and "not UTF-8 text" in caplog.text


@pytest.mark.parametrize(
    "files",
    [
        "train.txt val.txt test.txt",
        "train/a.txt valid/a.txt test/a.txt",
        "training_00.txt Validation_00.txt test_00.txt",
        "wiki.train.raw wiki.valid.raw wiki.test.raw",
    ],
)
def test_text_may_be_divided_already(
    text: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture, files: str
) -> None:
    training_file, validation_file, test_file = files.split()
    others = ("trainer.txt", "validators.py", "contest.txt", "docs/val.txt")
    names = {"a": training_file, "b": validation_file, "c": test_file}
    names |= {f"other{i}": name for i, name in enumerate(others)}
    for word, name in names.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{word} " * 100)

    def read() -> list[set[str]]:
        parts = datasets(text, data__path=tmp_path, data__context=10)[:2]
        return [words_of(part) & {*names} for part in parts]

    assert read() == [{*names} - {"b", "c"}, {"b"}]
    (line,) = caplog.messages
    assert line.startswith("1 files left out: test files")
    assert line.endswith(test_file)
    (tmp_path / training_file).unlink()
    assert set.union(*read()) >= {"b", "c"}, "one of the names alone says nothing"


@pytest.mark.parametrize("kind", ["tokens", "images"])
def test_data_that_grew_is_another_run(
    text: Project, image: Project, tmp_path: Path, kind: str
) -> None:
    """Refused with the old and the new size and the ways out, one of which is then taken."""
    project, options = (text, []) if kind == "tokens" else (image, [])
    path = tmp_path / "data"
    path.mkdir()
    if kind == "tokens":
        token_file(path / "train.bin", 4000)
        token_file(path / "val.bin", 500)
        options += ["--data.vocabulary", "300", "--data.context", "8"]
    else:
        images(path, 30)
    words = ["train", "--preset", "tiny", "--device", "cpu", "--data.path", str(path), *options]
    run = tmp_path / "run"
    project(*words, "--train.steps", "3", "--run-dir", str(run))
    before = sorted(run.rglob("*"))
    if kind == "tokens":
        token_file(path / "train.bin", 4800)
    else:
        images(path, 60)
    line = project.refuses(*words, "--train.steps", "6", "--run-dir", str(run))
    assert "training_samples: " in line and "data: " in line
    for way_out in ("--name", "--fresh", "--init-from"):
        assert way_out in line
    assert sorted(run.rglob("*")) == before
    longer = ["--train.steps", "3", "--run-dir", str(tmp_path / "next"), "--init-from", str(run)]
    project(*words, *longer)


def test_unusable_tokens_are_told_in_one_line(text: Project, tmp_path: Path) -> None:
    token_file(tmp_path / "train.bin", 4000)
    error = text.module("errors").UserError
    with pytest.raises(error, match=r"--data\.vocabulary"):
        datasets(text, **of_tokens(tmp_path, data__vocabulary=0))
    training, _, _ = datasets(text, **of_tokens(tmp_path, data__vocabulary=200))
    with pytest.raises(error, match=r"train\.bin has a token \d+.*--data\.vocabulary 200"):
        training.__getitems__(list(range(len(training))))
    words = ("train", "--preset", "tiny", "--device", "cpu", "--data.path", str(tmp_path))
    words += ("--data.vocabulary", "200", "--run-dir", str(tmp_path / "run"))
    line = text.refuses(*words, "--train.loader-workers", "1")
    assert line.startswith(str(tmp_path)) and "\n" not in line
    (tmp_path / "val.bin").write_bytes(b"odd")
    with pytest.raises(error, match=r"val\.bin has 3 bytes"):
        datasets(text, **of_tokens(tmp_path))


def images(folder: Path, count: int, size: int = 8) -> np.ndarray:
    """Coloured images of two classes in a folder for each; returns them by name."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    for i, array in enumerate(pixels):
        name = folder / ("cat", "dog")[i % 2]
        name.mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(name / f"{i:03}.png")
    return pixels


def all_of(dataset) -> list[tuple[bytes, int]]:
    batch = dataset.__getitems__(list(range(len(dataset))))
    pixels = (batch["images"] * 255).round().byte().permute(0, 2, 3, 1).contiguous().numpy()
    return [
        (image.tobytes(), int(label)) for image, label in zip(pixels, batch["labels"], strict=True)
    ]


def test_a_folder_and_an_array_hold_the_same_images(image: Project, tmp_path: Path) -> None:
    pixels = images(tmp_path / "folder", 40)
    np.savez(tmp_path / "array.npz", images=pixels, labels=np.arange(40) % 2)
    found = []
    for name in ("folder", "array.npz"):
        training, validation, spec = datasets(image, data__path=tmp_path / name, data__max_shift=0)
        parts = all_of(training), all_of(validation)
        assert not set(parts[0]) & set(parts[1]) and parts[0] and parts[1]
        assert spec.channels == 3 and len(spec.classes) == 2
        found.append(sorted(itertools.chain(*parts)))
    assert found[0] == found[1] and len(found[0]) == 40


def test_a_folder_may_be_divided_already(image: Project, tmp_path: Path) -> None:
    images(tmp_path / "train", 10)
    images(tmp_path / "val", 4)
    training, validation, spec = datasets(image, data__path=tmp_path)
    assert (len(training), len(validation)) == (10, 4)
    assert spec.classes == ("cat", "dog")


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_what_is_no_image_of_a_class_is_passed_over(
    image: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Hidden names in silence, other files with one line."""
    for folder, count in (("train", 10), (name, 4), (".ipynb_checkpoints", 4), ("__MACOSX", 4)):
        images(tmp_path / folder, count)
    images(tmp_path / "train/.ipynb_checkpoints", 2)
    shutil.copytree(tmp_path / "train/cat", tmp_path / "train/__MACOSX")
    (tmp_path / "train/cat/._000.png").write_bytes(b"a Mac's")
    training, validation, spec = datasets(image, data__path=tmp_path)
    assert (len(training), len(validation)) == (10, 4) and spec.classes == ("cat", "dog")
    assert not caplog.text
    images(tmp_path / "test", 4)
    (tmp_path / "train/cat/notes.txt").touch()
    (tmp_path / "train/cat/deeper").mkdir()
    assert len(datasets(image, data__path=tmp_path)[0]) == 10
    (line,) = caplog.messages
    assert line.startswith("6 files left out: not images in a folder of their class, such as ")


@pytest.mark.parametrize("divided", [False, True])
def test_links_to_folders_of_images_are_followed(
    image: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture, divided: bool
) -> None:
    """To a class, and to a part; circles are named, and so is a link that is broken."""
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    images(elsewhere / "train", 20)
    images(elsewhere / "val", 4)
    if divided:
        data.mkdir()
        (data / "train").symlink_to(elsewhere / "train")
        images(data / "val", 4)
        shutil.rmtree(data / "val/dog")
        (data / "val/dog").symlink_to(elsewhere / "val/dog")
    else:
        images(data, 20)
        shutil.rmtree(data / "dog")
        (data / "dog").symlink_to(elsewhere / "train/dog")
    training, validation, spec = datasets(image, data__path=data)
    assert len(training) + len(validation) == (24 if divided else 20)
    assert spec.classes == ("cat", "dog") and not caplog.messages

    cat = data / ("train/cat" if divided else "cat")
    (cat / "above").symlink_to(tmp_path)
    (data / "again").symlink_to(data)
    assert datasets(image, data__path=data)[2] == spec
    (line,) = caplog.messages
    assert "files left out: not images in a folder of their class, such as " in line
    # A hidden one, as Emacs leaves it beside a file that is edited, is no class.
    (cat.parent / ".#notes").symlink_to("somebody@somewhere")
    assert datasets(image, data__path=data)[2] == spec
    link = cat.with_name("bird")
    link.symlink_to(tmp_path / "unmounted")
    with pytest.raises(image.module("errors").UserError) as refused:
        datasets(image, data__path=data)
    assert str(refused.value) == f"{link} is a broken link: repair it, or remove it"


def test_images_of_phones_and_browsers_are_read(image: Project, tmp_path: Path) -> None:
    """Upright, as their EXIF tag says, and under all names that a JPEG has."""
    images(tmp_path, 20)
    stored = np.zeros((16, 24, 3), np.uint8)
    stored[:4] = 255  # the upper side, which is the right one
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in ("a.jfif", "b.png"):
        Image.fromarray(stored).save(tmp_path / "cat" / name, exif=exif, format="PNG")
    training, validation, _ = datasets(image, data__path=tmp_path)
    files = [*training.files, *validation.files]
    assert {"a.jfif", "b.png"} < {file.name for file in files}
    for file in files:
        if file.name in ("a.jfif", "b.png"):
            pixels = np.array(training.decode(file))
            assert pixels.shape == (24, 16, 3)
            assert pixels[:, -4:].min() == 255 and not pixels[:, :-4].any()


def test_a_name_need_not_be_utf_8(text: Project, image: Project, tmp_path: Path) -> None:
    """Of a text or an image, as one of an old system in Latin-1."""
    name = os.fsdecode(b"z\xfcrich")
    images(tmp_path / "images", 20)
    (tmp_path / "images/cat/000.png").rename(tmp_path / f"images/cat/{name}.png")
    training, validation, _ = datasets(image, data__path=tmp_path / "images")
    assert len(training) + len(validation) == 20
    (tmp_path / "texts").mkdir()
    (tmp_path / f"texts/{name}.txt").write_text("Was ever woman in this humour wooed? " * 100)
    assert datasets(text, data__path=tmp_path / "texts")


def test_arrays_with_their_channels_first_are_refused(image: Project, tmp_path: Path) -> None:
    pixels = images(tmp_path, 20)
    path, labels = tmp_path / "array.npz", np.arange(20) % 2
    np.savez(path, images=pixels.transpose(0, 3, 1, 2), labels=labels)
    with pytest.raises(image.module("errors").UserError, match=r"transpose\(0, 2, 3, 1\)"):
        datasets(image, data__path=path)
    for channels in (1, 2, 4):
        np.savez(path, images=np.zeros((20, 8, 8, channels), np.uint8), labels=labels)
        assert datasets(image, data__path=path)[2].channels == channels


def test_settings_of_a_windows_editor_are_read(text: Project, tmp_path: Path) -> None:
    load = text.module("config").load
    (tmp_path / "a.toml").write_bytes(codecs.BOM_UTF8 + b"[train]\r\nsteps = 3\r\n")
    (tmp_path / "config.json").write_bytes(codecs.BOM_UTF8 + b'{"train": {"steps": 3}}')
    for path in (tmp_path / "a.toml", tmp_path):
        assert load(path).train.steps == 3


def test_images_in_files_train_resume_and_are_named(
    image: Project, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    images(tmp_path / "data", 40)
    images(tmp_path / "data/other", 1, size=50)  # one level too deep: not part of it
    options = ["--preset", "tiny", "--device", "cpu", "--data.path", str(tmp_path / "data")]
    options += ["--run-dir", str(tmp_path / "run")]
    image("train", *options, "--train.steps", "3")
    image("train", *options, "--train.steps", "6", "--train.loader-workers", "1")
    image("infer", "--run-dir", str(tmp_path / "run"))
    out = capfd.readouterr().out
    assert "accuracy" in out and ("cat" in out or "dog" in out)


def test_unusable_images_are_told_in_one_line(image: Project, tmp_path: Path) -> None:
    error = image.module("errors").UserError
    images(tmp_path, 20)
    Image.fromarray(np.zeros((30, 20, 3), np.uint8)).save(tmp_path / "cat/large.png")
    training, validation, _ = datasets(image, data__path=tmp_path)
    with pytest.raises(error, match=r"--data\.size"):
        all_of(training), all_of(validation)
    scaled = datasets(image, data__path=tmp_path, data__size=6)[:2]
    shapes = {tuple(part.__getitems__([0])["images"].shape[1:]) for part in scaled}
    assert shapes == {(3, 6, 6)} and sum(map(len, map(all_of, scaled))) == 21
    Image.fromarray(np.zeros((30, 20), np.uint16)).save(tmp_path / "cat/large.png")
    training, validation, _ = datasets(image, data__path=tmp_path, data__size=6)
    with pytest.raises(error, match=r"large\.png has pixels of mode I;16"):
        all_of(training), all_of(validation)
    (tmp_path / "cat/large.png").write_bytes(b"no image")
    training, validation, _ = datasets(image, data__path=tmp_path, data__size=6)
    with pytest.raises(error, match=r"large\.png cannot be read as an image"):
        all_of(training), all_of(validation)
    (tmp_path / "cat/large.png").unlink()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "cat/0.png")
    training, validation, _ = datasets(image, data__path=tmp_path)
    with pytest.raises(error, match=r"--data\.channels 3"):  # the first one by name is grey
        all_of(training), all_of(validation)
    for channels in (1, 3):
        parts = datasets(image, data__path=tmp_path, data__channels=channels)
        assert parts[2].channels == channels
        assert sum(len(part.read(list(range(len(part))))) for part in parts[:2]) == 21
    for content in (
        {"images": np.zeros((4, 8, 8), np.float32), "labels": np.arange(4)},
        {"images": np.zeros((4, 8, 8), np.uint8), "labels": np.arange(3)},
        {"images": np.zeros((4, 8, 8), np.uint8), "labels": np.arange(4.0)},
        {"images": np.zeros((4, 8, 8), np.uint8), "labels": np.arange(4) - 1},
        {"images": np.zeros((4, 8, 8), np.uint8)},
        {"images": np.array([None] * 4), "labels": np.arange(4)},
    ):
        np.savez(tmp_path / "wrong.npz", **content)
        with pytest.raises(error, match=r"wrong\.npz"):
            datasets(image, data__path=tmp_path / "wrong.npz")
