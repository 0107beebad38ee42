"""The index of a checkpoint in parts is made once, kept while it holds, and covers each tensor."""

import itertools
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from tests.conftest import Project, project_fixture

project = project_fixture("in_parts", parallelism="single", checkpoint="dcp")


def tiled(size: list[int], cuts: list[set[int]]) -> list[ChunkStorageMetadata]:
    """A tensor cut at these places of each dimension."""
    edges = [sorted({0, n, *(c % n for c in at)}) for n, at in zip(size, cuts, strict=True)]
    boxes = itertools.product(*(itertools.pairwise(at) for at in edges))
    return [
        ChunkStorageMetadata(
            torch.Size(low for low, _ in box), torch.Size(high - low for low, high in box)
        )
        for box in boxes
    ]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sets(st.integers(0, 8), max_size=4)), max_size=3),
    st.randoms(use_true_random=False),
)
def test_parts_cover_a_tensor_or_are_refused(
    project: Project, dimensions: list[tuple[int, set[int]]], chance: Any
) -> None:
    make_up = project.module("checkpoint.dcp_writer").make_up
    size = torch.Size(n for n, _ in dimensions)
    parts = tiled([*size], [cuts for _, cuts in dimensions])
    chance.shuffle(parts)
    assert make_up(size, parts)
    empty = ChunkStorageMetadata(size, torch.Size(0 for _ in size))
    assert not dimensions or make_up(size, [*parts, empty, empty])  # of ranks with no part
    assert not make_up(size, parts[1:])
    assert not make_up(size, [*parts, parts[0]])
    assert not make_up(size, [*parts[1:], parts[1]] if len(parts) > 1 else [])
    if dimensions:  # of the right size, and beside its place
        moved = torch.Size((parts[0].offsets[0] + 1, *parts[0].offsets[1:]))
        assert not make_up(size, [ChunkStorageMetadata(moved, parts[0].sizes), *parts[1:]])


class Counting:
    """A group of one, which says of another rank what it is told to."""

    rank, size, process_group = 0, 1, None

    def __init__(self) -> None:
        self.gathered, self.elsewhere = 0, False

    def any(self, flag: bool) -> bool:
        return flag or self.elsewhere

    def agree(self, action: Any) -> list[Any]:
        self.gathered += 1
        return [action()]


def read(project: Project, folder: Path) -> dict[str, torch.Tensor]:
    reader = project.module("checkpoint.dcp_reader")
    source = reader.DcpDirectory(folder, [path.name for path in folder.iterdir()])
    found = {name: torch.empty(f.shape, dtype=f.dtype) for name, f in source.forms.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a run that resumes would print it
        source.read(found, project.module("distributed").Group())
    return found


def test_the_index_is_gathered_when_something_has_changed(project: Project, tmp_path: Path) -> None:
    writing, group = project.module("checkpoint.dcp_writer"), Counting()
    saver, number = writing.PartsSaver(group, 2), iter(range(100))

    def saved(gathers: bool, **tensors: torch.Tensor) -> bytes:
        before, folder = group.gathered, tmp_path / str(next(number))
        folder.mkdir()
        tree = {"model": tensors, "optimizer": {"w": {"step": torch.tensor(3.0)}}}
        names = saver.write(folder, tree)
        assert sorted(names) == sorted(path.name for path in folder.iterdir())
        assert group.gathered == before + gathers
        found = read(project, folder)
        assert found.keys() == {f"model.{name}" for name in tensors} | {"optimizer.w.step"}
        assert all(torch.equal(found[f"model.{name}"], t) for name, t in tensors.items())
        plain = {"model": {n: torch.empty_like(t) for n, t in tensors.items()}}
        dcp.load(plain, checkpoint_id=folder, no_dist=True)  # torch's own reader
        assert all(torch.equal(plain["model"][name], t) for name, t in tensors.items())
        return (folder / ".metadata").read_bytes()

    w, b = torch.randn(5, 3), torch.randn(4)
    first = saved(True, w=w, b=b)
    assert saved(False, w=w + 1, b=b) == first
    saved(True, w=w.bfloat16(), b=b)
    saved(True, w=w.T.contiguous(), b=b)
    saved(True, w=w.T.contiguous())
    group.elsewhere = True
    saved(True, w=w.T.contiguous())
    group.elsewhere = False
    saved(False, w=w.T.contiguous())


def test_what_is_large_is_divided_among_files(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many bytes in each; but no more files than tensors, or than a manifest can name."""
    writing = project.module("checkpoint.dcp_writer")
    tensors = {"model": {f"{n}": torch.randn(100) for n in range(8)}, "optimizer": {}}

    def files(tensors: Any, ranks: int = 1) -> list[list[Any]]:
        planner = dcp.DefaultSavePlanner()
        planner.set_up_planner(tensors, is_coordinator=True)
        return writing.divided(planner.create_local_plan().items, ranks)

    assert len(files(tensors)) == 1  # a few bytes
    monkeypatch.setattr(writing, "LARGE", 400)
    assert [len(files(tensors, ranks)) for ranks in (1, 20_000, 10**6)] == [4, 3, 1]
    alone = {"model": {"0": torch.randn(800), "1": torch.empty(0), "2": torch.empty(0)}}
    assert [len(items) for items in files(alone)] == [1, 2] and files({}) == [[]]
    folder = tmp_path / "four"
    folder.mkdir()
    *names, index = writing.PartsSaver(Counting()).write(folder, tensors)
    assert index == ".metadata" and len({*names}) == 4
    (tmp_path / "two").mkdir()  # as many as are asked for, at the same time
    assert len(writing.PartsSaver(Counting(), 2).write(tmp_path / "two", tensors)) == 2 + 1
    assert len({(folder / name).stat().st_size for name in names}) == 1
    found = read(project, folder)
    assert all(torch.equal(found[f"model.{n}"], t) for n, t in tensors["model"].items())
    plain = {"model": {n: torch.empty_like(t) for n, t in tensors["model"].items()}}
    dcp.load(plain, checkpoint_id=folder, no_dist=True)  # torch's own reader
    assert all(torch.equal(plain["model"][n], t) for n, t in tensors["model"].items())


def test_a_save_that_failed_is_no_pattern_for_the_next(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, group = project.module("checkpoint.dcp_writer"), Counting()
    saver, tensors = writing.PartsSaver(group), {"model": {"w": torch.ones(3)}, "optimizer": {}}
    folders = [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir()
    saver.write(folders[0], tensors)

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writing.PartsWriter, "write_data", full)
        with pytest.raises(project.module("errors").RankError, match="No space left"):
            saver.write(folders[1], tensors)
    assert group.gathered == 2
    saver.write(folders[2], tensors)
    assert group.gathered == 3 and torch.equal(read(project, folders[2])["model.w"], torch.ones(3))


def test_ranks_that_do_not_write_all_of_it_are_found_out(project: Project, tmp_path: Path) -> None:
    writing = project.module("checkpoint.dcp_writer")
    folder = tmp_path / "parts"
    folder.mkdir()
    tensors = {"model": {"w": torch.arange(6.0)}, "optimizer": {}}
    saver = writing.PartsSaver(Counting())
    saver.write(folder, tensors)
    (part,) = saver.last
    halves = [
        part._replace(offsets=(at,), sizes=(3,), file=f"__{rank}_0.distcp")
        for rank, at in enumerate((0, 3))
    ]
    index = writing.index_of([writing.packed([half]) for half in halves])
    assert len(index.state_dict_metadata["model.w"].chunks) == 2
    assert pickle.loads(pickle.dumps(index)).storage_data == index.storage_data
    for wrong in (halves[:1], [*halves, halves[1]], [part, halves[0]]):
        with pytest.raises(project.module("checkpoint").CheckpointError, match=r"model\.w"):
            writing.index_of([writing.packed([each]) for each in wrong])
