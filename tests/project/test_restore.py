"""A restore verifies the newest checkpoint, then loads it; of a damaged one it loads nothing."""

import ast
import contextlib
import io
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from tests.conftest import Project, bake, drill, project_fixture

whole = project_fixture("in_one_file", parallelism="single", checkpoint="torch_save")
parts = project_fixture("in_many_parts", parallelism="single", checkpoint="dcp")


@pytest.fixture(params=["whole", "parts", "large parts"])
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator["Trained"]:
    """Large parts lie in several files, which are hashed at once."""
    project = request.getfixturevalue(request.param.split()[-1])
    with pytest.MonkeyPatch.context() as patch:
        if " " in request.param:
            patch.setattr(torch, "get_num_threads", lambda: 4)
            patch.setattr(project.module("checkpoint.dcp"), "BYTES_PER_FILE", 1024)
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


def test_names_in_a_crafted_file_command_no_terminal(parts: Project, tmp_path: Path) -> None:
    """Nor does what is refused put them into a log as they are."""
    checkpointer = parts.module("checkpoint.checkpointer").Checkpointer
    ours = SimpleNamespace(run_dir=tmp_path)
    text = checkpointer._other_run(ours, tmp_path, ["it would lose a\0b\x1b[2J"], "or not")
    assert r"a\x00b\x1b[2J" in text and "\0" not in text and "\x1b" not in text


def test_nothing_is_loaded_before_all_is_verified(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, checkpointer, done = trained.project, trained.checkpointer(), []
    manifests, module = (project.module(f"checkpoint.{n}") for n in ("manifest", "checkpointer"))
    check, opened = manifests.check_file, module.open_tensors

    def check_file(path: Path, entry: Any) -> str | None:
        problem = check(path, entry)
        done.append(path.name)
        return problem

    monkeypatch.setattr(manifests, "check_file", check_file)
    monkeypatch.setattr(
        module, "open_tensors", lambda *words: (done.append("opened"), opened(*words))[1]
    )
    assert checkpointer.restore() == 4
    files = manifests.read_manifest(trained.newest)["files"]
    assert sorted(done[:-1]) == sorted(files) and done[-1] == "opened"
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


def test_nothing_of_a_damaged_one_is_loaded(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = max(trained.newest.iterdir(), key=lambda path: path.stat().st_size)
    flip(file, file.stat().st_size - 1)
    checkpointer, steps, loaded = trained.checkpointer(), [], []
    checkpointer.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    module = trained.project.module("checkpoint.checkpointer")
    opened = module.open_tensors
    monkeypatch.setattr(
        module, "open_tensors", lambda path, m: (loaded.append(path), opened(path, m))[1]
    )
    assert checkpointer.restore() == 2
    assert steps == [1], "the one that allocates the state"
    assert loaded == [trained.older]
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


def test_a_wrong_read_is_no_damage(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any file, the manifest and the index too: it is read a second time before it counts."""
    module = trained.project.module("checkpoint.manifest")
    opened, wrong, reads = module.open_regular, {}, []

    def misread(path: Path) -> Any:
        if wrong.setdefault(path.name, 0):
            return opened(path)
        wrong[path.name] += 1
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        return io.BytesIO(content)

    def misread_index(path: Path) -> Any:
        if path.name != ".metadata" or reads:
            return opened(path)
        reads.append(path)
        return io.BytesIO(path.read_bytes()[:100])

    monkeypatch.setattr(module, "open_regular", misread)
    with contextlib.suppress(ModuleNotFoundError):  # of torch_save
        monkeypatch.setattr(trained.project.module("checkpoint.dcp"), "open_regular", misread_index)
    monkeypatch.setattr(
        module.hashlib,
        "file_digest",
        lambda file, name: module.hashlib.new(name, file.read()),
    )
    checkpointer = trained.checkpointer()
    assert checkpointer.restore() == 4
    manifest = module.read_manifest(trained.newest)
    assert sorted(wrong) == sorted([*manifest["files"], "manifest.json"])
    assert bool(reads) == (".metadata" in wrong)
    trained.assert_holds(checkpointer, 4)
    assert not list(trained.run_dir.glob("checkpoints/*damaged*"))


def test_an_error_of_reading_is_no_damage(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = trained.project.module("checkpoint.manifest")
    opened = module.open_regular

    def fail(path: Path) -> Any:
        if path.name != "manifest.json":
            raise OSError(5, "Input/output error", str(path))
        return opened(path)

    with monkeypatch.context() as patch:
        patch.setattr(module, "open_regular", fail)
        with pytest.raises(RuntimeError, match=r"cannot be read: Input/output error"):
            trained.checkpointer().restore()
    assert trained.newest.exists() and not list(trained.run_dir.glob("checkpoints/*damaged*"))
    assert trained.checkpointer().restore() == 4


def test_an_error_of_loading_costs_no_checkpoint(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It verifies, so the run ends, and what it has loaded of it is used for nothing."""
    module = trained.project.module("checkpoint.checkpointer")

    def fail(*words: Any) -> Any:
        raise module.CheckpointError("bad day")

    with monkeypatch.context() as patch:
        patch.setattr(module, "open_tensors", fail)
        with pytest.raises(RuntimeError, match="bad day"):
            trained.checkpointer().restore()
    assert trained.newest.exists() and not list(trained.run_dir.glob("checkpoints/*damaged*"))
    assert trained.checkpointer().restore() == 4


def test_an_incompatible_newest_is_refused_by_name(trained: Trained) -> None:
    checkpointer = trained.checkpointer()
    checkpointer.facts["identity"] = {**trained.identity, "seed": 7}
    before = [tensor.clone() for tensor in checkpointer.model.state_dict().values()]
    error = trained.project.module("errors").UserError
    with pytest.raises(
        error, match=rf"cannot resume from {trained.newest}[^$]*\nOr add --name NEW"
    ):
        checkpointer.restore()
    # Without saved settings there is only one way out, so the sentence does not begin with "Or".
    checkpointer.run_dir = trained.newest
    with pytest.raises(error, match=rf"cannot resume from {trained.newest}[^$]*\nAdd --name NEW"):
        checkpointer.restore()
    now = checkpointer.model.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(now, before, strict=True))
    assert trained.newest.exists() and trained.older.exists()


def test_the_optimizers_state_is_allocated_with_one_gradient(parts: Project) -> None:
    """Of parameters that are alike: new memory takes longer to touch than the step takes."""
    parameters = [torch.nn.Parameter(torch.randn(7, 3)) for n in range(3)]
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


def test_a_part_that_is_smaller_than_its_index_says_is_refused(
    parts: Project, tmp_path: Path
) -> None:
    """It would be repeated to fill the tensor."""
    tensors, folder = {"model.w": torch.ones(4)}, tmp_path / "parts"
    folder.mkdir()
    group = parts.module("distributed").Group()
    names = parts.module("checkpoint.writer").write_tensors(folder, tensors, group)
    source = parts.module("checkpoint.dcp").DcpDirectory(folder, names)
    (file,) = folder.glob("*.distcp")
    smaller = io.BytesIO()
    torch.save(torch.ones(1), smaller)
    (place,) = source.index.storage_data.values()
    place.length = len(smaller.getvalue())
    file.write_bytes(smaller.getvalue())
    live = torch.zeros(4)
    with pytest.raises(parts.module("checkpoint").CheckpointError):
        source.read({"model.w": live}, group)
    assert not live.any()


def test_what_is_no_tensor_is_not_unpickled(parts: Project, tmp_path: Path) -> None:
    """Though an index says that it is where a tensor is wanted."""
    tensors, folder = {"model.w": torch.ones(4)}, tmp_path / "parts"
    folder.mkdir()
    group = parts.module("distributed").Group()
    names = parts.module("checkpoint.writer").write_tensors(folder, tensors, group)
    source = parts.module("checkpoint.dcp").DcpDirectory(folder, names)
    source.index.state_dict_metadata["model.w"] = BytesStorageMetadata()
    (index,) = source.index.storage_data
    source.index.storage_data[MetadataIndex("model.w")] = source.index.storage_data[index]
    with pytest.raises(parts.module("errors").RankError, match=r"model\.w is not a tensor"):
        source.read({"model.w": torch.zeros(4)}, group)


def test_two_ranks_share_the_hashing(tmp_path: Path) -> None:
    answers = {
        "shared_ddp": {"parallelism": "ddp", "checkpoint": "dcp"},
        "shared_fsdp": {"parallelism": "fsdp", "checkpoint": "dcp"},
        "shared_whole": {"parallelism": "ddp", "checkpoint": "torch_save"},
    }
    sources = {n: bake(tmp_path / n, package_name=n, **a) / "src" for n, a in answers.items()}
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 100)
    output = drill("restore.py", (2, str(tmp_path), *sources), sources=sources)
    found = re.findall(r"(\w+) rank (\d) step 2 verified (\[.*?\])", output)
    assert len(found) == 6
    for name in sources:
        by_rank = [ast.literal_eval(files) for package, _, files in found if package == name]
        folder = tmp_path / name / "checkpoints/step_00000002"
        files = {path.name for path in folder.iterdir()} - {"manifest.json"}
        assert sorted(by_rank[0] + by_rank[1]) == sorted(files), "each by one rank"
        parts = [[file for file in each if file.endswith("distcp")] for each in by_rank]
        assert name == "shared_whole" or all(parts), "both have some to hash"


def test_checkpoints_that_were_set_aside_are_listed(trained: Trained) -> None:
    """Also when there is no other one."""
    project = trained.project
    group = project.module("distributed").Group()
    publish = project.module("checkpoint.publish")
    publisher = publish.Publisher(trained.newest.parent, publish.RetentionConfig(), group)
    for path in (trained.older, trained.newest):
        publisher.set_aside(path)
    listing = project.module("checkpoint.verify").list_checkpoints(trained.run_dir)
    assert [line.split("  ")[1] for line in listing.lines] == ["set aside"] * 2
