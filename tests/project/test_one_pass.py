"""A restore reads each byte once; what it has loaded of a damaged checkpoint does no harm."""

import ast
import hashlib
import itertools
import logging
import random
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Project, bake, drill, project_fixture

whole = project_fixture("in_one_file", parallelism="single", checkpoint="torch_save")
parts = project_fixture("in_many_parts", parallelism="single", checkpoint="dcp")


@pytest.fixture(params=["whole", "parts", "large parts", "hurried whole"])
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator["Trained"]:
    """Large parts are read right into the live tensors, from several files at once."""
    project = request.getfixturevalue(request.param.split()[-1])
    with pytest.MonkeyPatch.context() as patch:
        if " " in request.param:
            patch.setattr(torch, "get_num_threads", lambda: 4)
        if request.param == "large parts":
            patch.setattr(project.module("checkpoint.dcp_reader"), "SMALL", 0)
            patch.setattr(project.module("checkpoint.dcp_writer"), "LARGE", 1024)
        yield Trained(project, tmp_path / "run")


class Trained:
    """A run with checkpoints of steps 2 and 4, to go on from in this process."""

    def __init__(self, project: Project, run_dir: Path) -> None:
        self.project, self.run_dir = project, run_dir
        self.training = project.module("train")
        changes = {"train__steps": 4, "checkpoint__every": 2, "run_dir": run_dir}
        self.config = project.config(**changes)
        self.training.run(self.config)
        self.older, self.newest = (run_dir / f"checkpoints/step_0000000{n}" for n in (2, 4))
        reading = project.module("checkpoint.manifest")
        self.identity = reading.read_manifest(self.newest)["identity"]

    def checkpointer(self) -> Any:
        """Of a new state, before it is restored."""
        state = self.training.setup(self.config)
        module = self.project.module("checkpoint.checkpointer")
        config, facts = self.config.checkpoint, {"identity": self.identity, "schedule": {}}
        arguments = (state.world, state.model, state.optimizer, facts)
        return module.Checkpointer(self.run_dir, config, *arguments)

    def assert_holds(self, checkpointer: Any, step: int) -> None:
        flat = dict(self.project.module("checkpoint.tensors").flat(checkpointer.tensors()))
        saved = self.project.tensors(self.run_dir, step)
        assert flat.keys() == saved.keys()
        assert all(torch.equal(flat[name], saved[name]) for name in saved)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 16
    path.write_bytes(content)


class Counting:
    """A file that counts what is read of it."""

    def __init__(self, file: Any, counts: dict[str, int], name: str) -> None:
        self.file, self.counts, self.name = file, counts, name

    def __enter__(self) -> "Counting":
        return self

    def __exit__(self, *rest: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def readinto(self, target: Any) -> int:
        length = self.file.readinto(target)
        self.counts[self.name] = self.counts.get(self.name, 0) + length
        return length

    def read(self, length: int = -1) -> bytes:
        content = self.file.read(length)
        self.counts[self.name] = self.counts.get(self.name, 0) + len(content)
        return content


def test_each_byte_is_read_once(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, int] = {}
    project, checkpointer = trained.project, trained.checkpointer()
    names = ["reader", "manifest", *(["dcp_reader"] if "many" in project.name else [])]
    for module in [project.module(f"checkpoint.{name}") for name in names]:
        opened: Callable[[Path], Any] = module.open_regular
        monkeypatch.setattr(
            module,
            "open_regular",
            lambda path, opened=opened: Counting(opened(path), counts, path.name),
        )
    assert checkpointer.restore() == 4
    sizes = {path.name: path.stat().st_size for path in trained.newest.iterdir()}
    assert counts.keys() == sizes.keys()
    for name, size in sizes.items():
        looked_up = name == "state.pt" or name.endswith(".distcp")  # where the data of parts begins
        assert size <= counts[name] <= (2 if looked_up else 1) * size, name
    trained.assert_holds(checkpointer, 4)


@pytest.mark.parametrize("place", [0, 0.3, 0.5, 0.9, 1])
def test_after_a_damaged_one_the_one_before_it_is_whole(
    trained: Trained, place: float, caplog: pytest.LogCaptureFixture
) -> None:
    for path in sorted(trained.newest.iterdir()):
        keep = trained.newest.with_name("keep")
        shutil.copytree(trained.newest, keep)
        flip(path, int(place * (path.stat().st_size - 1)))
        caplog.clear()
        checkpointer = trained.checkpointer()
        assert checkpointer.restore() == 2, path
        assert f"DAMAGED CHECKPOINT {trained.newest}: {path.name}" in caplog.text
        trained.assert_holds(checkpointer, 2)
        assert not trained.newest.exists(), "it was set aside"
        keep.rename(trained.newest)


def test_no_step_is_taken_with_what_a_damaged_one_left(trained: Trained) -> None:
    file = max(trained.newest.iterdir(), key=lambda path: path.stat().st_size)
    flip(file, file.stat().st_size - 1)  # when all is loaded
    checkpointer, steps = trained.checkpointer(), []
    checkpointer.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    assert checkpointer.restore() == 2
    assert steps == [1], "the one that allocates the state"
    trained.assert_holds(checkpointer, 2)


def test_damage_that_no_tensor_shows_is_found(trained: Trained) -> None:
    """Between the tensors, in what nobody wanted, and with nothing but size to tell."""
    file = max(trained.newest.iterdir(), key=lambda path: path.stat().st_size)
    with file.open("ab") as end:
        end.write(b"\0")
    assert trained.checkpointer().restore() == 2
    file = max(trained.older.iterdir(), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])
    error = trained.project.module("checkpoint").CheckpointError
    with pytest.raises(error, match="no good checkpoint is left"):
        trained.checkpointer().restore()


@pytest.mark.parametrize("times", [1, 2])
def test_an_error_that_is_no_damage_costs_no_checkpoint(
    trained: Trained, times: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Loading that fails on a checkpoint that verifies is tried once more."""
    module, checkpointer = trained.project.module("checkpoint.manifest"), trained.checkpointer()
    readinto, opened, load = Counting.readinto, module.open_regular, checkpointer._load
    loading: list[bool] = []

    def read_wrong(self: Counting, target: Any) -> int:
        length = readinto(self, target)
        if loading and loading.pop():
            target[length // 2] ^= 1
        return length

    def load_wrong(*arguments: Any) -> Any:
        nonlocal times
        loading.append(times > 0)
        times -= 1
        return load(*arguments)

    monkeypatch.setattr(Counting, "readinto", read_wrong)
    monkeypatch.setattr(module, "open_regular", lambda p: Counting(opened(p), {}, p.name))
    monkeypatch.setattr(checkpointer, "_load", load_wrong)
    if times == 1:
        assert checkpointer.restore() == 4
        trained.assert_holds(checkpointer, 4)
        assert "though every byte is as it was saved" in caplog.text
    else:
        with pytest.raises(RuntimeError, match="has other content than was saved"):
            checkpointer.restore()
    assert trained.newest.exists() and not list(trained.run_dir.glob("checkpoints/*damaged*"))
    monkeypatch.undo()
    assert trained.checkpointer().restore() == 4


def test_a_damaged_one_that_is_tried_last_is_not_what_is_restored(
    trained: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a run that uploads finds a newer one in the store."""
    caplog.set_level(logging.INFO)
    checkpointer = trained.checkpointer()
    publisher = checkpointer.publisher
    file = max(trained.newest.iterdir(), key=lambda path: path.stat().st_size)
    flip(file, file.stat().st_size // 2)

    def newest_good(check: Any) -> Any:
        manifest, problems = check(trained.older, publisher.group)
        assert not problems and check(trained.newest, publisher.group)[1]
        return trained.older, manifest

    publisher.newest_good = newest_good
    assert checkpointer.restore() == 2
    trained.assert_holds(checkpointer, 2)


def test_the_optimizers_state_is_allocated_with_one_gradient(parts: Project) -> None:
    """Memory that is touched for the first time takes longer than the step."""
    parameters = [torch.nn.Parameter(torch.randn(n, 3)) for n in (1, 5, 4)]
    parameters.append(torch.nn.Parameter(torch.randn(3, 7).T))  # needs one of its own
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=0.5, weight_decay=0.1)
    seen: list[int] = []

    def look(*arguments: Any) -> None:
        gradients = [parameter.grad for parameter in parameters]
        assert all(gradient is not None and not gradient.any() for gradient in gradients)
        seen.extend(gradient.untyped_storage().data_ptr() for gradient in gradients)

    optimizer.register_step_pre_hook(look)
    parts.module("checkpoint.tensors").create_optimizer_state(optimizer)
    assert len(seen) == 4 and len({*seen[:3]}) == 1 and seen[3] != seen[0]
    assert all(torch.equal(now, then) for now, then in zip(parameters, before, strict=True))
    assert all(parameter.grad is None for parameter in parameters)
    assert optimizer.param_groups[0]["lr"] == 0.5
    for parameter in parameters:
        state = optimizer.state[parameter]
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == parameter.shape
        assert not state["exp_avg"].any()


class Late:
    """A pool of one thread that does all as late as it may: when it is waited for."""

    def __init__(self, threads: int) -> None:
        self.left: list[Callable[[], object]] = []
        self.given = 0

    def __enter__(self) -> "Late":
        return self

    def __exit__(self, *exception: object) -> None:
        self.do(self.given)

    def submit(self, call: Callable[..., object], *arguments: Any) -> SimpleNamespace:
        self.left.append(partial(call, *arguments))
        self.given += 1
        return SimpleNamespace(result=partial(self.do, self.given))

    def do(self, up_to: int) -> None:
        while self.given - len(self.left) < up_to:
            self.left.pop(0)()


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from(["left", "handed on", "into memory"])),
        max_size=12,
    ),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_a_file_is_read_in_order_and_every_flip_is_found(
    parts: Project,
    tmp_path_factory: Any,
    pieces: list[tuple[int, str]],
    ahead: bool,
    seed: int,
) -> None:
    chance = random.Random(seed)
    module = parts.module("checkpoint.manifest")
    path = tmp_path_factory.getbasetemp() / "one_pass.bin"
    content = chance.randbytes(sum(length for length, _ in pieces))
    entry = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    ends = [*itertools.accumulate(length for length, _ in pieces)]
    wanted = {
        end - length: (length, use)
        for end, (length, use) in zip(ends, pieces, strict=True)
        if use != "left"
    }
    found: dict[int, bytes | bytearray] = {}

    def part(start: int, length: int, use: str) -> Any:
        if use == "handed on":
            return module.Part(start, length, lambda part: found.update({start: bytes(part)}))
        found[start] = bytearray(length)
        return module.Part(start, length, memoryview(found[start]))

    def read() -> None:
        found.clear()
        takes = [part(start, *what) for start, what in wanted.items()]
        chance.shuffle(takes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "CHUNK", 16)
            patch.setattr(module, "AHEAD", 8)
            patch.setattr(module, "ThreadPoolExecutor", Late)
            module.read_once(path, entry, takes, ahead)

    path.write_bytes(content)
    read()
    assert found == {start: content[start : start + n] for start, (n, _) in wanted.items()}
    error = parts.module("checkpoint").CheckpointError
    for changed in (content + b"x", content[:-1] if content else b"y"):
        path.write_bytes(changed)
        with pytest.raises(error):
            read()
    if content:
        path.write_bytes(content)
        flip(path, chance.randrange(len(content)))
        with pytest.raises(error, match="sha256"):
            read()


def test_a_part_is_any_tensor(parts: Project, tmp_path: Path) -> None:
    for tensor in (
        torch.arange(10.0)[2:5],
        torch.randn(3, 4).T,
        torch.tensor(7),
        torch.empty(0, 3),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(3, dtype=torch.bool),
        torch.randn(5, dtype=torch.complex64),
        torch.randn(5, dtype=torch.complex64).conj(),
        torch.randn(5, dtype=torch.complex64).conj().imag,
        torch.randn(1000).bfloat16(),
        torch.randn(9).to(torch.float8_e4m3fn),
    ):
        torch.save(tensor, tmp_path / "part")
        content = (tmp_path / "part").read_bytes()
        (tmp_path / "parts").write_bytes(b"before" + content + b"after")
        with (tmp_path / "parts").open("rb") as file:
            reader = parts.module("checkpoint.dcp_reader")
            form, start = reader.saved_form(reader.FilePart(file, 6, len(content)))
        length = form.untyped_storage().nbytes()
        part = memoryview(bytearray(content))[start : start + length]
        if length:
            plain = torch.empty(tensor.shape, dtype=tensor.dtype)
            for live in (plain, plain.conj(), torch.empty_like(tensor)):
                if memory := reader.memory_for([(form, live)]):
                    memory[:] = part
                    assert live.tolist() == tensor.tolist()
        found = reader.with_data(form, part) if length else form
        assert found.dtype == tensor.dtype and found.stride() == tensor.stride()
        assert found.shape == tensor.shape and found.tolist() == tensor.tolist()


@pytest.mark.parametrize("small", [0, 1 << 20])
def test_a_part_that_is_smaller_than_its_index_says_is_refused(
    parts: Project, tmp_path: Path, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be repeated to fill the tensor."""
    reader, path, live = parts.module("checkpoint.dcp_reader"), tmp_path / "part", torch.zeros(4)
    monkeypatch.setattr(reader, "SMALL", small)
    torch.save(torch.ones(1), path)
    item = SimpleNamespace(
        storage_offsets=(0,), lengths=(4,), dest_index=SimpleNamespace(fqn="model.weight")
    )
    planner = SimpleNamespace(resolve_tensor=lambda item: live)
    wanted = reader.parts_of(path, {(0, path.stat().st_size): [item]}, planner, set())
    error = parts.module("checkpoint").CheckpointError
    with pytest.raises(error, match="weight is of another shape than saved"):
        reader.read_once(path, None, wanted)
    assert not live.any()


@given(st.lists(st.sets(st.sampled_from("abcdefgh")), min_size=1, max_size=5), st.data())
def test_a_file_is_hashed_by_a_rank_that_wants_it(
    parts: Project, wanted: list[set[str]], data: st.DataObject
) -> None:
    sizes = {name: data.draw(st.integers(1, 100)) for name in "abcdefgh"}
    entries = {name: {"size": size} for name, size in sizes.items()}
    divided = parts.module("checkpoint.dcp_reader").divided
    owners = divided([sorted(names) for names in wanted], entries)
    assert owners.keys() == set().union(*wanted)
    assert all(name in wanted[rank] for name, rank in owners.items())
    if all(names == {*"abcdefgh"} for names in wanted):  # as of DDP
        loads = [
            sum(sizes[n] for n, r in owners.items() if r == rank) for rank in range(len(wanted))
        ]
        assert max(loads) - min(loads) <= max(sizes.values())


def test_two_ranks_hash_each_file_once_and_read_what_they_need(tmp_path: Path) -> None:
    answers = {
        "once_ddp": {"parallelism": "ddp", "checkpoint": "dcp"},
        "once_fsdp": {"parallelism": "fsdp", "checkpoint": "dcp"},
        "once_whole": {"parallelism": "ddp", "checkpoint": "torch_save"},
    }
    sources = {n: bake(tmp_path / n, package_name=n, **a) / "src" for n, a in answers.items()}
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 100)
    output = drill("one_pass.py", (2, str(tmp_path), *sources), sources=sources)
    found = {
        (name, int(rank)): (ast.literal_eval(files), float(part))
        for name, rank, files, part in re.findall(
            r"(\w+) rank (\d) step 2 verified (\[.*?\]) read ([\d.]+)", output
        )
    }
    own = [["__0_0.distcp"], ["__1_0.distcp"]]
    assert [found["once_fsdp", rank][0] for rank in (0, 1)] == own
    assert all(0.4 < found["once_fsdp", rank][1] < 0.6 for rank in (0, 1))
    assert found["once_whole", 0] == (["state.pt"], 1.0)
    for rank in (0, 1):  # both need all of it
        assert found["once_ddp", rank][1] > 0.9 and found["once_whole", rank][1] > 0.8
