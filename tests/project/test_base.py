"""Frozen weights that checkpoints leave out, and a start that builds no values that it reads."""

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.conftest import Project, bake, drill, project_fixture

project = project_fixture("with_base", parallelism="single", checkpoint="torch_save")
STEPS = ("--preset", "tiny", "--device", "cpu", "--data.path", "text.txt", "--train.steps")
LEFT_OUT = ("--init-from", "base.safetensors", "--checkpoint.frozen", "no")


def freeze(model: nn.Module) -> nn.Module:
    """Leave the last block and the norms to be trained."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("blocks.1.") or "norm" in name)
    return model


@contextlib.contextmanager
def built(project: Project, change: Any) -> Iterator[None]:
    """Let `build_model` be followed by a change, in runs and in what reads their checkpoints."""
    build = project.module("model").build_model
    with pytest.MonkeyPatch.context() as patch:

        def build_changed(*arguments: Any) -> nn.Module:
            return change(build(*arguments))

        patch.setattr(project.module("train"), "build_model", build_changed)
        patch.setattr(project.module("model"), "build_model", build_changed)
        yield


@pytest.fixture(scope="module")
def runs(project: Project) -> Iterator[Path]:
    """Runs on a base, the model frozen in part: "all" and "no" by what their checkpoints have."""
    project("train", *STEPS, "4", "--name", "pretrained", "--train.seed", "1")
    project("export", "--name", "pretrained", "--to", "base.safetensors")
    with built(project, freeze):
        project("train", *STEPS, "4", "--name", "all", "--init-from", "base.safetensors")
        project("train", *STEPS, "4", "--name", "no", *LEFT_OUT)
        yield project.folder / "runs"


def weights(project: Project, where: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint has of the model and its optimizer, with what its base has."""
    return project.tensors(where)


def require_same_bits(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


def size_of(checkpoint: Path) -> int:
    return sum(file.stat().st_size for file in checkpoint.iterdir())


def test_a_checkpoint_has_only_what_is_trained(project: Project, runs: Path) -> None:
    """The same run, in fewer bytes; its manifest names the files that have the rest."""
    everything = weights(project, runs / "all")
    require_same_bits(everything, weights(project, runs / "no"))
    path = runs / "no/checkpoints/step_00000004"
    saved = torch.load(path / "state.pt", weights_only=True)
    trained = [name for name in saved["model"] if name.startswith("blocks.1.") or "norm" in name]
    assert sorted(saved["model"]) == sorted(trained)
    needed = sum(tensor.nbytes for tensor in saved["model"].values())
    for state in saved["optimizer"].values():
        needed += sum(tensor.nbytes for tensor in state.values())
    assert needed <= size_of(path) <= needed + (64 << 10)
    base = json.loads((path / "manifest.json").read_text())["base"]
    assert base["path"] == str(project.folder / "base.safetensors")
    content = hashlib.sha256((project.folder / "base.safetensors").read_bytes()).hexdigest()
    assert base["digest"] == hashlib.sha256(json.dumps([content]).encode()).hexdigest()


def test_a_resume_reads_the_base_again(project: Project, runs: Path, tmp_path: Path) -> None:
    """Without naming it: to the bits of a run that saves everything."""
    for name in ("all", "no"):
        shutil.copytree(runs / name, tmp_path / name)
        # From another directory, too: the relative path was of the first start.
        words = ("train", "--run-dir", str(tmp_path / name), "--train.steps", "7")
        words += ("--data.path", str(project.folder / "text.txt"))
        with contextlib.chdir(tmp_path):
            assert project.module("__main__").dispatch(list(words)) == 0
    require_same_bits(weights(project, tmp_path / "all"), weights(project, tmp_path / "no"))


def test_a_base_is_hashed_once(
    project: Project, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each version of its files, since a large one takes minutes."""
    module = project.module("checkpoint.base")
    hashed: list[str] = []

    class Hashlib:
        sha256 = staticmethod(hashlib.sha256)

        @staticmethod
        def file_digest(file: Any, name: str) -> Any:
            hashed.append(file.name)
            return hashlib.file_digest(file, name)

    monkeypatch.setattr(module, "hashlib", Hashlib)
    base = tmp_path / "base.safetensors"
    shutil.copy(project.folder / "base.safetensors", base)
    shutil.copytree(runs / "no", tmp_path / "run")
    words = ("train", "--run-dir", str(tmp_path / "run"), "--init-from", str(base))
    project(*words, "--train.steps", "5")
    project(*words, "--train.steps", "6")
    assert hashed == [str(base)]

    # A copy with another time is hashed again, once: no rank sends its old entry of the cache.
    os.utime(base, (1, 1))
    cache = tmp_path / "run/base.json"
    sent: list[Any] = []

    def gather(value: Any) -> list[Any]:
        sent.insert(0, value)
        return sent

    for rank in (1, 0):
        group = SimpleNamespace(size=2, is_first=rank == 0, together=contextlib.nullcontext)
        group.gather, group.broadcast = gather, lambda value: value
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        digest_of = module.digest_of(base, cache, group)
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    project(*words, "--train.steps", "6")
    assert digest_of and hashed == [str(base)] * 2

    # Files of other contents, even of the same size, are not taken for it.
    content = bytearray(base.read_bytes())
    content[-1] ^= 1
    base.write_bytes(content)
    problem = project.refuses(*words, "--train.steps", "7")
    assert f"those in {base} are not the ones it was trained with" in problem
    assert "\n" not in problem and len(hashed) == 3
    # `words` are of a new run, too, which would overwrite nothing of this one.
    assert (tmp_path / "run/checkpoints/step_00000006").is_dir()


def test_a_base_may_move(project: Project, runs: Path, tmp_path: Path) -> None:
    """What needs it says in one line how to name its new place, and works with it."""
    shutil.copytree(runs / "no", tmp_path / "run")
    run = str(tmp_path / "run")
    old, new = project.folder / "base.safetensors", tmp_path / "moved.safetensors"
    before = weights(project, runs / "no")
    shutil.move(old, new)
    try:
        for words in (
            ("train", "--run-dir", run, "--train.steps", "6"),
            ("export", "--run-dir", run, "--to", str(tmp_path / "w.pt")),
            ("infer", "--run-dir", run),
        ):
            problem = project.refuses(*words)
            assert "base.safetensors is gone: give their path" in problem
            assert "--init-from (train) or --base (export, infer)" in problem
            assert "\n" not in problem
        listing = project.module("checkpoint.verify").list_checkpoints(tmp_path / "run")
        assert listing.any_damaged and "frozen weights  MISSING" in listing.lines[-1]

        moved = ("--base", str(new))
        for target in ("w.pt", "w.safetensors", "again"):
            project("export", "--run-dir", run, "--to", str(tmp_path / target), *moved)
        project("infer", "--run-dir", run, *moved)
        load_trained = __import__(project.name).load_trained
        model = load_trained(tmp_path / "run", "cpu", base=new)[0].state_dict()
        project("train", "--run-dir", run, "--train.steps", "6", "--init-from", str(new))
        # Older checkpoints still name the old place.
        listing = project.module("checkpoint.verify").list_checkpoints(tmp_path / "run")
        assert not listing.any_damaged and listing.lines[-1] == f"frozen weights  good  {new}"
    finally:
        shutil.move(new, old)
    # What was exported has all weights, and needs no base.
    of_model = {name: t for name, t in before.items() if name.startswith("model.")}
    require_same_bits(of_model, {f"model.{name}": tensor for name, tensor in model.items()})
    from safetensors.torch import load_file

    in_file = {f"model.{n}": t for n, t in load_file(tmp_path / "w.safetensors").items()}
    require_same_bits(of_model, in_file)
    require_same_bits(before, weights(project, tmp_path / "again"))
    project("train", "--run-dir", str(tmp_path / "again"), "--train.steps", "6")


def test_a_run_may_save_everything_later(project: Project, runs: Path, tmp_path: Path) -> None:
    """Its next checkpoints need no base; the other way round could lose weights."""
    shutil.copytree(runs / "no", tmp_path / "run")
    words = ("train", "--run-dir", str(tmp_path / "run"))
    project(*words, "--train.steps", "6", "--checkpoint.frozen", "all")
    manifest = tmp_path / "run/checkpoints/step_00000006/manifest.json"
    assert "base" not in json.loads(manifest.read_text())
    problem = project.refuses(*words, "--train.steps", "8", *LEFT_OUT)
    assert "this run has saved its frozen weights so far" in problem


def test_a_resume_from_a_folder_without_weights_is_refused(
    project: Project, runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "no", tmp_path / "run")
    (tmp_path / "empty").mkdir()
    words = ("--run-dir", str(tmp_path / "run"), "--init-from", str(tmp_path / "empty"))
    problem = project.refuses("train", *words, "--train.steps", "6")
    assert "is not a file or a complete folder of weights: give their path" in problem


def test_what_cannot_be_a_base_is_refused(project: Project, runs: Path) -> None:
    """In one line each, before the run has a checkpoint."""
    new = ("train", *STEPS, "2", "--name", "refused")
    assert "needs --init-from" in project.refuses(*new, "--checkpoint.frozen", "no")
    of_run = ("--init-from", "runs/pretrained", "--checkpoint.frozen", "no")
    assert "runs/pretrained --to base.safetensors" in project.refuses(*new, *of_run)

    from safetensors.torch import load_file, save_file

    theirs = load_file(project.folder / "base.safetensors")
    save_file({n.upper(): t for n, t in theirs.items()}, project.folder / "theirs.safetensors")

    def rename(model: Any) -> nn.Module:
        model.from_transformers = lambda tensors: {n.lower(): t for n, t in tensors.items()}
        return model

    with built(project, rename):
        named = ("--init-from", "theirs.safetensors", "--checkpoint.frozen", "no")
        assert "have the names of transformers" in project.refuses(*new, *named)
    with built(project, lambda model: model.requires_grad_(True)):
        assert "no frozen parameter is in" in project.refuses(*new, *LEFT_OUT)
    assert not [*(project.folder / "runs").glob("refused/checkpoints/step*")]


def test_a_frozen_weight_that_changes_is_not_lost(
    project: Project, runs: Path, tmp_path: Path
) -> None:
    """As those of a teacher that follows its student: the first save refuses it by name."""

    class Teacher:
        def after_step(self, state: Any, record: Any) -> None:
            with torch.no_grad():
                state.model.blocks[0].up.weight.mul_(0.99)

    base = project.folder / "base.safetensors"
    config = project.config(run_dir=tmp_path / "run", init_from=base, train__steps=3)
    config = project.module("config").override(config, {"checkpoint.frozen": "no"})
    with pytest.raises(project.module("errors").UserError, match="is frozen, but its values") as no:
        project.module("train").run(config, [Teacher()])
    assert "blocks.0.up.weight" in str(no.value)


def test_a_trained_weight_that_is_frozen_later_is_not_lost(
    project: Project, runs: Path, tmp_path: Path
) -> None:
    """The base has it, too, but with the values from before it was trained."""

    def freeze_more(model: nn.Module) -> nn.Module:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
        return model

    run, name = tmp_path / "run", "model.blocks.1.up.weight"
    shutil.copytree(runs / "no", run)
    before = weights(project, run)[name]
    words = ("train", "--run-dir", str(run), "--train.steps")
    with built(project, freeze_more):
        project(*words, "5", "--reset-optimizer")
        project(*words, "6")
        assert torch.equal(weights(project, run)[name], before)
    saved = torch.load(run / "checkpoints/step_00000006/state.pt", weights_only=True)
    assert name.removeprefix("model.") in saved["model"]


def test_a_frozen_weight_that_the_base_lacks_is_saved(
    project: Project, runs: Path, tmp_path: Path
) -> None:
    """As a projection that build_model draws: no file but the checkpoint has it."""
    from safetensors.torch import load_file, save_file

    part = load_file(project.folder / "base.safetensors")
    lacking = part.pop("blocks.0.up.weight")
    save_file(part, tmp_path / "part.safetensors")
    left_out = ("--init-from", str(tmp_path / "part.safetensors"), "--checkpoint.frozen", "no")
    project("train", *STEPS, "2", "--run-dir", str(tmp_path / "run"), *left_out)
    path = tmp_path / "run/checkpoints/step_00000002/state.pt"
    saved = torch.load(path, weights_only=True)["model"]
    assert saved["blocks.0.up.weight"].shape == lacking.shape
    assert "blocks.0.down.weight" not in saved
    project("train", "--run-dir", str(tmp_path / "run"), "--train.steps", "4")


class Headed(nn.Module):
    """A GPT under a head of some classes; both have names of their own."""

    def __init__(self, body: nn.Module, classes: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(body.embedding.embedding_dim, classes)

    def forward(self, *given: Any) -> Any:
        return self.body(*given) + 0 * self.head.weight.sum()

    @property
    def blocks(self) -> Any:
        return self.body.blocks

    @property
    def output(self) -> Any:
        return self.body.output


def test_a_head_of_another_size_begins_anew(project: Project, tmp_path: Path) -> None:
    """It is named with both shapes and the option; without it nothing is loaded."""
    new = ("train", *STEPS, "2", "--run-dir")
    with built(project, lambda model: Headed(model, 10)):
        project(*new, str(tmp_path / "ten"))
    from_ten = ("--init-from", str(tmp_path / "ten"))
    with built(project, lambda model: Headed(model, 7)):
        problem = project.refuses(*new, str(tmp_path / "seven"), *from_ten)
        assert "[10, 32] in the file and [7, 32] in this model" in problem
        assert "--init-new head.weight" in problem and "\n" not in problem
        assert "more rows" not in problem
        # A module names all that it has.
        project(*new, str(tmp_path / "seven"), *from_ten, "--init-new", "head", "--init-strict")
        unknown = (*from_ten, "--init-new", "haed")
        assert "no tensor or module of that name" in project.refuses(
            *new, str(tmp_path / "none"), *unknown
        )
    with built(project, lambda model: Headed(model, 12)):
        problem = project.refuses(*new, str(tmp_path / "twelve"), *from_ten)
        assert "2 more rows (classes, a vocabulary, or positions)" in problem
    assert weights(project, tmp_path / "seven")["model.head.weight"].shape == (7, 32)


def start(project: Project, change: Any, run_dir: Path, **settings: Any) -> Any:
    """The state of a run after its start from the base, without a step."""
    base = project.folder / "base.safetensors"
    given = {"init_from": base, "run_dir": run_dir} | settings
    training = project.module("train")
    with built(project, change):
        world = training.join(project.config().parallel, "cpu")
        return training.setup(project.config(**given), world, weights_follow=True)


def test_a_start_builds_no_values_that_it_reads(
    project: Project, runs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No random number is drawn for them; hooks, ties and attributes are as they were built."""
    caplog.set_level(logging.INFO)
    drawn: list[str] = []
    calls: list[Any] = []
    late_calls: list[Any] = []

    def change(model: Any) -> nn.Module:
        for name, parameter in model.named_parameters():
            if not parameter.is_meta:
                drawn.append(name)
        model.extra = nn.Linear(5, 3)
        model.tied = nn.Module()
        model.tied.weight = model.embedding.weight
        model.listed = [model.blocks[0].up.weight]
        model.listed[0].note = "kept"
        model.listed[0].requires_grad_(True).register_hook(calls.append)
        model.blocks[1].up.weight.register_post_accumulate_grad_hook(late_calls.append)
        return model

    state = start(project, change, tmp_path)
    model = state.model
    # Vectors are small: they are built.
    assert drawn and all("norm" in name for name in drawn)
    assert model.tied.weight is model.embedding.weight
    assert model.listed[0] is model.blocks[0].up.weight
    assert model.listed[0].note == "kept"
    assert not any(p.is_meta for p in model.parameters())
    assert "the model is initialized before" not in caplog.text
    project.module("checkpoint.transfer").load_weights(
        project.folder / "base.safetensors", model, None, project.module("distributed").Group()
    )
    project.module("train").train_step(state, state.loader.next())
    assert calls and late_calls


@pytest.mark.parametrize("kind", ["computed", "same_shape", "fails"])
def test_a_model_that_needs_its_values_is_built_whole(
    project: Project, runs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """A line says why, and the weights are those of a plain start."""
    caplog.set_level(logging.INFO)

    def change(model: Any) -> nn.Module:
        # Draws random numbers, which the second attempt must draw again.
        model.extra = nn.Linear(5, 3)
        weight = model.blocks[0].up.weight
        if kind == "computed":
            model.register_buffer("norms", weight.detach().norm(dim=1))
        elif kind == "same_shape":
            model.another = nn.Linear(*reversed(weight.shape), bias=False)
        else:
            model.scale = weight.abs().max().item()
        return model

    state = start(project, change, tmp_path)
    assert "the model is initialized before" in caplog.text
    settings = project.config(run_dir=tmp_path)
    with built(project, change):
        plain = project.module("train").setup(settings).model.state_dict()
    require_same_bits(plain, state.model.state_dict())


@pytest.mark.parametrize("number", [1, 2])
def test_a_folder_is_read_by_its_index(project: Project, tmp_path: Path, number: int) -> None:
    """Beside the named files there may be the same weights again, in another layout."""
    from safetensors.torch import save_file

    module = project.module("checkpoint.tensors")
    tensors = {"a": torch.ones(2), "b": torch.zeros(3)}
    save_file(tensors, tmp_path / "consolidated.safetensors")
    names = ["model.safetensors"]
    if number == 1:
        save_file(tensors, tmp_path / names[0])
    else:
        names = ["model-1.safetensors", "model-2.safetensors"]
        for file, name in zip(names, tensors, strict=True):
            save_file({name: tensors[name]}, tmp_path / file)
        index = {"weight_map": dict(zip(tensors, names, strict=True))}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [file.name for file in module.weight_files(tmp_path)] == names
    assert sorted(module.OneFile(tmp_path).forms) == ["a", "b"]
    # A folder that lacks a named file cannot be a base, which `verify` lists as missing.
    is_plain_weights = project.module("checkpoint.base").is_plain_weights
    assert is_plain_weights(tmp_path)
    (tmp_path / names[-1]).unlink()
    if number == 2:
        assert not is_plain_weights(tmp_path)


def test_names_of_adapters(project: Project) -> None:
    """The weights of a layer that peft adapts have the names of the model's files."""
    find = project.module("checkpoint.tensors").weight_names
    stored = ["model.q.weight", "model.q.bias", "head.weight"]
    peft = "base_model.model."
    ours = [
        f"{peft}model.q.base_layer.weight",
        f"{peft}model.q.base_layer.bias",
        f"{peft}model.q.lora_A.default.weight",
        f"{peft}head.original_module.weight",
        f"{peft}head.modules_to_save.default.weight",
    ]
    assert find(stored, ours) == {
        **{name: name for name in stored},
        ours[0]: "model.q.weight",
        ours[1]: "model.q.bias",
        ours[3]: "head.weight",
        ours[4]: "head.weight",
    }
    # In a checkpoint of such a model each name is its own.
    saved = [f"model.{name}" for name in ours]
    assert find(saved, ours) == {name: f"model.{name}" for name in ours}


class Adapted(nn.Module):
    """A head that an adapter has copied, as peft does with `modules_to_save`."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Module()
        self.head.original_module = nn.Linear(2, 3)
        self.head.modules_to_save = nn.ModuleDict({"default": nn.Linear(2, 3)})


def test_a_layer_that_an_adapter_copies_is_read_twice(project: Project, tmp_path: Path) -> None:
    file = tmp_path / "head.safetensors"
    saved = {"head.weight": torch.randn(3, 2), "head.bias": torch.randn(3)}
    save_file(saved, file)
    model = Adapted()
    group = project.module("distributed").Group()
    project.module("checkpoint.transfer").load_weights(file, model, None, group)
    for layer in (model.head.original_module, model.head.modules_to_save["default"]):
        assert torch.equal(layer.weight, saved["head.weight"])
        assert torch.equal(layer.bias, saved["head.bias"])


def test_only_files_of_weights_have_to_be_equal(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A README beside them may differ between machines."""
    transfer = project.module("checkpoint.transfer")
    compared: list[dict[str, str]] = []
    monkeypatch.setattr(transfer, "require_same_identity", lambda it, group: compared.append(it))
    group = project.module("distributed").Group()
    for readme in ("one", "another"):
        save_file({"weight": torch.ones(1, 1)}, tmp_path / "model.safetensors")
        (tmp_path / "README.md").write_text(readme)
        transfer.load_weights(tmp_path, nn.Linear(1, 1, bias=False), None, group)
    assert compared[0] == compared[1]


def test_a_weight_may_begin_with_the_name_of_our_note(project: Project) -> None:
    tensors = project.module("checkpoint.tensors")
    name = f"{tensors.NOTE}_embedding.weight"
    assert tensors.weight_names([f"model.{name}", tensors.NOTE], [name]) == {name: f"model.{name}"}
    assert tensors.weight_names([name], [f"base_model.model.{name}"]) == {
        name: name,
        f"base_model.model.{name}": name,
    }


def test_the_same_bits_on_one_process_and_on_two(tmp_path: Path) -> None:
    """In every parallelism; a run goes from one to the other and back, and to one process."""
    sources: dict[str, Path] = {}
    for parallelism in ("ddp", "fsdp"):
        name = f"base_{parallelism}"
        folder = bake(tmp_path / name, parallelism=parallelism, package_name=name)
        sources[name] = folder / "src"
    (tmp_path / "text.txt").write_text("Was ever woman in this humour wooed? " * 100)
    jobs = ((0, str(tmp_path), *sources), (2, str(tmp_path), *sources))
    output = drill("base.py", *jobs, (0, str(tmp_path), "base_ddp"), sources=sources)
    assert output.count("the same bits") == 7


def test_a_message_lists_ten_names_and_counts_the_others(project: Project) -> None:
    listed = project.module("checkpoint.transfer")._listed
    names = [f"w{number}" for number in range(12)]
    assert listed(names[:10]) == ", ".join(names[:10])
    for more in (1, 2):
        assert listed(names[: 10 + more]) == f"{', '.join(names[:10])}, and {more} more"
