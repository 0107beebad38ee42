"""DCP plans once for a run, while its plans hold; what is large goes into several files."""

import errno
import itertools
import threading
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.planner import SavePlanner

from tests.conftest import Project, project_fixture

project = project_fixture("in_parts", parallelism="single", checkpoint="dcp")
staged = project_fixture("staged", parallelism="single", checkpoint="dcp_async")


class Group:
    """A group of one, which says of another rank what it is told to."""

    rank, size, process_group, elsewhere = 0, 1, None, False

    def any(self, flag: bool) -> bool:
        return flag or self.elsewhere


def read(project: Project, folder: Path) -> dict[str, torch.Tensor]:
    reader = project.module("checkpoint.dcp")
    source = reader.DcpDirectory(folder, [path.name for path in folder.iterdir()])
    found = {name: torch.empty(f.shape, dtype=f.dtype) for name, f in source.forms.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a run that resumes would print it
        source.read(found, project.module("distributed").Group())
    return found


def test_plans_are_kept_while_nothing_has_changed(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, group = project.module("checkpoint.dcp"), Group()
    saver, number, planned = writing.DcpSaver(group, 2), iter(range(100)), []
    create = dcp.DefaultSavePlanner._create_global_plan
    monkeypatch.setattr(
        dcp.DefaultSavePlanner,
        "_create_global_plan",
        lambda self, plans: (planned.append(1), create(self, plans))[1],
    )

    def saved(plans: bool, by: Any = saver, **tensors: torch.Tensor) -> None:
        before, folder = len(planned), tmp_path / str(next(number))
        folder.mkdir()
        named = {f"model.{name}": tensor for name, tensor in tensors.items()}
        names = by.write(folder, {**named, "optimizer.w.step": torch.tensor(3.0)})
        assert sorted(names) == sorted(path.name for path in folder.iterdir())
        assert len(planned) == before + plans
        found = read(project, folder)
        assert found.keys() == {f"model.{name}" for name in tensors} | {"optimizer.w.step"}
        assert all(torch.equal(found[f"model.{name}"], t) for name, t in tensors.items())
        plain = {"model": {n: torch.empty_like(t) for n, t in tensors.items()}}
        dcp.load(plain, checkpoint_id=folder, no_dist=True)  # torch's own reader
        assert all(torch.equal(plain["model"][name], t) for name, t in tensors.items())

    w, b = torch.randn(5, 3), torch.randn(4)
    saved(True, w=w, b=b)
    saved(False, w=w + 1, b=b)
    saved(True, w=w.bfloat16(), b=b)
    saved(True, w=w.T.contiguous(), b=b)
    saved(True, w=w.T.contiguous())
    group.elsewhere = True
    saved(True, w=w.T.contiguous())
    group.elsewhere = False
    saved(False, w=w.T.contiguous())
    # Another run in this process, with other tensors of these names.
    saved(True, writing.DcpSaver(Group()), w=w.T.contiguous().double())
    saved(False, w=w.T.contiguous())


def test_what_is_large_is_divided_among_files(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many bytes in each; but no more files than tensors."""
    writing = project.module("checkpoint.dcp")
    tensors = {f"model.{n}": torch.randn(100) for n in range(8)}

    def files(name: str, tensors: Any, threads: int = 0) -> list[str]:
        (tmp_path / name).mkdir()
        *names, index = writing.DcpSaver(Group(), threads).write(tmp_path / name, tensors)
        assert index == ".metadata" and len({*names}) == len(names)
        return names

    assert len(files("few bytes", tensors)) == 1
    monkeypatch.setattr(writing, "BYTES_PER_FILE", 400)
    names, folder = files("four", tensors), tmp_path / "four"
    assert len(names) == 4 and len({(folder / name).stat().st_size for name in names}) == 1
    alone = {"model.0": torch.randn(800), "model.1": torch.empty(0)}
    assert len(files("alone", alone)) == 2
    assert len(files("two", tensors, 2)) == 2  # as many as are asked for
    found = read(project, folder)
    assert all(torch.equal(found[n], t) for n, t in tensors.items())
    plain = {"model": {f"{n}": torch.empty(100) for n in range(8)}}
    dcp.load(plain, checkpoint_id=folder, no_dist=True)  # torch's own reader
    assert all(torch.equal(plain["model"][f"{n}"], tensors[f"model.{n}"]) for n in range(8))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_any_thread_fails_the_save(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that a thread meets outside of its file: DCP loses both."""
    writing = project.module("checkpoint.dcp")
    monkeypatch.setattr(writing, "BYTES_PER_FILE", 400)
    tensors = {f"model.{n}": torch.randn(100) for n in range(8)}
    error, opened = project.module("errors").RankError, Path.open
    for name in ("__0_0.distcp", "__0_3.distcp", ".metadata.tmp"):

        def full(path: Path, mode: str, name: str = name) -> Any:
            if path.name == name:
                raise OSError(28, "No space left on device")
            return opened(path, mode)

        (tmp_path / name).mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", full)
            with pytest.raises(error, match="No space left"):
                writing.DcpSaver(Group()).write(tmp_path / name, tensors)
    resolve = dcp.DefaultSavePlanner.resolve_data

    def stumble(self: Any, item: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise SystemExit  # ends the thread
        return resolve(self, item)

    (tmp_path / "stumble").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(dcp.DefaultSavePlanner, "resolve_data", stumble)
        with pytest.raises(error, match="a writer thread of DCP did not finish its file"):
            writing.DcpSaver(Group()).write(tmp_path / "stumble", tensors)


def test_a_file_that_fails_is_an_error_whether_it_was_open_or_not(
    project: Project, tmp_path: Path
) -> None:
    """DCP goes on after both, without a name for either."""
    writer = project.module("checkpoint.dcp").DcpWriter(tmp_path, 1)
    with writer.create(tmp_path / "no folder/a.distcp", "wb") as stream:
        stream.write(b"x")
    with writer.create(tmp_path / "b.distcp", "wb") as stream:
        raise OSError(errno.ENOSPC, "full")
    missing, full = writer.errors
    assert isinstance(missing, FileNotFoundError) and full.errno == errno.ENOSPC
    assert writer.names == []


def test_a_save_that_failed_is_no_pattern_for_the_next(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = project.module("checkpoint.dcp")
    saver, tensors = writing.DcpSaver(Group()), {"model.w": torch.ones(3)}
    folders = [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir()
    saver.write(folders[0], tensors)

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writing.DcpWriter, "write_data", full)
        with pytest.raises(project.module("errors").RankError, match="No space left"):
            saver.write(folders[1], tensors)
    assert saver.cache not in SavePlanner._cached_metadata or saver.forms is None
    saver.write(folders[2], tensors)
    assert torch.equal(read(project, folders[2])["model.w"], torch.ones(3))


SHAPES = st.lists(st.integers(0, 300), max_size=2).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])


@given(forms=st.lists(st.tuples(SHAPES, DTYPES), max_size=30))
def test_host_buffers_share_blocks_and_nothing_else(staged: Project, forms: list[Any]) -> None:
    """Each has the form of its tensor and a storage of that size; no two have a byte in common."""
    likes = {str(n): torch.empty(shape, dtype=dtype) for n, (shape, dtype) in enumerate(forms)}
    buffers = staged.module("checkpoint.staging").in_blocks(likes, pinned=False)
    assert buffers.keys() == likes.keys()
    for name, like in likes.items():
        assert (buffers[name].shape, buffers[name].dtype) == (like.shape, like.dtype)
        assert buffers[name].untyped_storage().size() == like.nbytes
        assert buffers[name].is_contiguous()
    ends = sorted((b.data_ptr(), b.data_ptr() + b.nbytes) for b in buffers.values() if b.nbytes)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))


def blocks_for(project: Project, likes: dict[str, torch.Tensor]) -> list[int]:
    """The sizes of the blocks that would be allocated."""
    writing, blocks = project.module("checkpoint.staging"), list[int]()

    def empty(size: int, **how: Any) -> torch.Tensor:
        blocks.append(size)
        return torch.empty(size, dtype=torch.uint8, device="meta")

    with mock.patch.multiple(writing, torch=mock.Mock(empty=empty), part_of=mock.Mock()):
        writing.in_blocks(likes, pinned=True)
    return blocks


def alone(sizes: list[int]) -> int:
    """The bytes of pinned memory that tensors of so many bytes take, each by itself."""
    return sum(1 << (size - 1).bit_length() for size in sizes)


@given(sizes=st.lists(st.integers(0, 200), max_size=50).map(lambda each: [n << 17 for n in each]))
def test_blocks_of_host_buffers_are_few_and_full(staged: Project, sizes: list[int]) -> None:
    likes = {str(n): torch.empty(size, dtype=torch.uint8) for n, size in enumerate(sizes)}
    blocks = blocks_for(staged, likes)
    assert alone(blocks) == sum(blocks) <= alone(sizes) + (2 << 20)
    if sizes and max(sizes) < sum(sizes) / 16:
        assert sum(blocks) <= 1.15 * sum(sizes) + (2 << 20)
        assert len(blocks) <= 12


def test_host_buffers_of_gpt2_take_what_is_saved(staged: Project) -> None:
    """Weights and two moments of AdamW."""
    config = staged.module("config").preset("gpt2_124m")
    spec = mock.Mock(vocabulary=50257, context=1024)
    with torch.device("meta"):
        model = staged.module("model").build_model(config, spec)
    likes = {f"{n}{i}": p for i in range(3) for n, p in model.named_parameters()}
    sizes = [like.nbytes for like in likes.values()]
    blocks = blocks_for(staged, likes)
    assert sum(blocks) <= 1.01 * sum(sizes) and len(blocks) <= 8
    assert alone(sizes) > 1.6 * sum(sizes)


def test_buffers_are_made_when_the_optimizer_has_its_state(staged: Project, tmp_path: Path) -> None:
    """Of all that is saved; an entry without values, as some optimizers make, is no state yet."""
    loop, config = staged.module("train"), staged.config(run_dir=tmp_path)
    state = loop.setup(config)
    saves = loop.resume(state, tmp_path, staged.module("distributed").Group(state.world))
    assert [state.optimizer.state[parameter] for parameter in state.model.parameters()]
    saves.before_optimizer_step()
    assert not saves.writer.staged_bytes
    loop.train_step(state, state.loader.next())
    saves.before_optimizer_step()
    assert saves.writer.buffers.buffers.keys() == saves.tensors().keys()
    saves.close()
