"""Checkpoints travel: between renders, as one file and back; weights come from anywhere."""

import errno
import importlib
import json
import random
import resource
import runpy
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.conftest import Project, bake, drill, recipe

SIX_STEPS = ("--train.steps", "6", "--checkpoint.every", "3")
PARALLELISM, CHECKPOINT = ("single", "ddp", "fsdp"), ("torch_save", "dcp", "dcp_async")


def test_every_pair_of_variants_reads_each_other(tmp_path: Path) -> None:
    """Nine writers, nine readers, model and optimizer to the bit, on one process and on two.

    A project that saves whole refuses what another one has saved in parts; it reads it from a file.
    """
    names = {}
    for parallelism in PARALLELISM:
        for checkpoint in CHECKPOINT:
            name = f"{parallelism}_{checkpoint}"
            answers = {"parallelism": parallelism, "checkpoint": checkpoint}
            project = bake(tmp_path / name, package_name=name, **answers)
            names[name] = project / "src"
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "text.txt").write_text("To be, or not to be, that is the question. " * 100)
    alone = [name for name in names if name.startswith("single")]
    many = [name for name in names if not name.startswith("single")]
    jobs = (
        (0, "write", alone),
        (2, "write", many),
        (0, "convert", ["single_dcp", "single_torch_save"]),
        (2, "read", many),
        (0, "read", list(names)),
    )
    arguments = [(ranks, task, str(runs), *packages) for ranks, task, packages in jobs]
    output = drill("cross_load.py", *arguments, sources=names)
    for found, (ranks, _, packages) in zip((0, 0, 6, 54, 81), jobs, strict=True):
        done = f"{found} checkpoints read by {len(packages)} projects on {max(1, ranks)} ranks"
        assert done in output, output


@pytest.fixture(scope="module", params=[pytest.param(c, id=c) for c in CHECKPOINT[:2]])
def project(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Project]:
    """A render whose package is imported here, with a run of six steps, saved at three and six."""
    name = f"travel_{request.param}"
    answers = {"parallelism": "single", "checkpoint": request.param}
    with Project.imported(tmp_path_factory.mktemp("travel"), name, **answers) as project:
        project("train", *project.settings, *SIX_STEPS)
        project.trained = project.tensors(project.folder / "runs/default")
        yield project


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_a_checkpoint_leaves_and_comes_back(project: Project, tmp_path: Path) -> None:
    """As one file, and from that as a run: it ends where it would."""
    run, whole = project.folder / "runs/default", tmp_path / "whole.pt"
    project("export", "--step", "3", "--to", str(whole))
    back = tmp_path / "back"
    project("export", "--source", str(whole), "--to", str(back))
    project("verify", "--run-dir", str(back))
    assert same(project.tensors(back), project.tensors(run, 3))
    project("train", *project.settings, *SIX_STEPS, "--run-dir", str(back))
    assert same(project.tensors(back), project.trained)
    line = project.refuses("export", "--source", str(whole), "--to", str(back))
    assert "exists and is not overwritten" in line
    content = whole.read_bytes()
    assert "exists and is not overwritten" in project.refuses("export", "--to", str(whole))
    assert whole.read_bytes() == content
    assert not list(tmp_path.glob(".*"))


def test_a_run_that_cannot_be_written_whole_is_not_begun(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, back = tmp_path / "new folder/whole.pt", tmp_path / "back"
    project("export", "--step", "3", "--to", str(whole))
    publisher = project.module("checkpoint.publish").Publisher

    def full(self: Any, *arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(publisher, "commit", full)
        line = project.refuses("export", "--source", str(whole), "--to", str(back))
    assert "No space left on device" in line
    assert not back.exists()
    project("export", "--source", str(whole), "--to", str(back))


def test_what_is_no_good_checkpoint_is_told_apart(project: Project, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(project.folder / "runs/default", run)
    saved = run / "checkpoints"
    ways = ("export", "--to", str(tmp_path / "new.pt"), "--source")
    line = project.refuses(*ways, str(saved))
    assert line == f"{saved} holds the checkpoints of a run: give the run, {run}"
    line = project.refuses(*ways, str(run), "--step", "4")
    assert line == f"there is no good checkpoint of step 4 in {run}: there are steps 3, 6"
    for path in saved.iterdir():
        next(file for file in path.iterdir() if file.name != "manifest.json").write_bytes(b"")
    line = project.refuses(*ways, str(run))
    assert line == f"no checkpoint in {run} is good: those of steps 3, 6 are damaged"
    newest = saved / "step_00000006"
    assert project.refuses(*ways, str(newest)).endswith(f"{newest} is damaged: give another")
    shutil.rmtree(saved)
    assert project.refuses(*ways, str(run), "--step", "best").endswith("train first")


def test_infer_needs_no_training_data(
    project: Project, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = shutil.copy(project.folder / "text.txt", tmp_path)
    run, file, back = (tmp_path / name for name in ("run", "whole.pt", "back"))
    project("train", *project.settings[:-1], text, *SIX_STEPS, "--run-dir", str(run))
    Path(text).unlink()
    project("export", "--run-dir", str(run), "--to", str(file))
    project("export", "--source", str(file), "--to", str(back))
    for place in (run, back):
        capfd.readouterr()
        project("infer", "--run-dir", str(place), "--prompt", "Was ever", "--tokens", "9")
        assert capfd.readouterr().out.startswith("Was ever")
        (place / "spec.json").unlink()  # as of an earlier release
        line = project.refuses("infer", "--run-dir", str(place))
        assert line == f"--data.path: {text} does not exist"


def test_a_random_split_is_that_of_training(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What loads a model draws next what training drew to split its data."""
    training = project.module("train")
    build, drawn = training.build_datasets, []

    def draw() -> list[float]:
        return [float(torch.rand(())), float(np.random.rand()), random.random()]

    def build_and_draw(config: Any) -> Any:
        drawn.append(draw())
        return build(config)

    monkeypatch.setattr(training, "build_datasets", build_and_draw)
    training.run(project.config(run_dir=tmp_path / "run", train__seed=7, train__steps=1))
    importlib.import_module(project.name).load_trained(tmp_path / "run", "cpu")
    assert draw() == drawn[0]


PLAIN = {"path": Path("a/b"), "names": ("a", "b"), "size": None, "scale": 0.5, "counts": {"a": 1}}


def test_a_trained_model_is_loaded_as_the_readme_says(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, in evaluation, with the weights that were saved last, or with their average."""
    load_trained = importlib.import_module(project.name).load_trained
    config = project.config(run_dir=tmp_path / "runs/default", optim__ema=0.9)
    project.module("train").run(config)
    readme = (project.folder / "README.md").read_text("utf-8")
    code = next(block for block in readme.split("```python\n")[1:] if "load_trained(" in block)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code.split("```")[0], names)
    assert recipe("python", "load_trained(").replace("my_training_run", project.name) in code
    model, config = names["model"], names["config"]
    saved = project.tensors(tmp_path / "runs/default", config.train.steps)
    own = dict(model.named_parameters())
    assert own and not model.training
    for name, value in own.items():
        assert value.device.type == "cpu" and torch.equal(value, saved[f"model.{name}"])
    averaged, _, _ = load_trained("runs/default", "cpu", weights="ema")
    for name, value in averaged.named_parameters():
        assert torch.equal(value, saved[f"optimizer.{name}.ema"])
    loss = project.module("model").compute_loss(averaged, batch_of(project, config))
    assert torch.isfinite(loss.total)
    with pytest.raises(project.module("errors").UserError, match="nowhere"):
        load_trained("nowhere")


def batch_of(project: Project, config: Any) -> Any:
    """The first two samples for validation."""
    _, validation, _ = project.module("data").build_datasets(config)
    return project.module("sampling").fetch(validation, np.array([0, 1]))


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"scale": torch.ones(2)},
        {"names": (Path("a"),)},
        {"counts": {1: 1}},
        {"size": (1, (2,))},
    ],
    ids=("plain", "tensor", "paths", "numbers as keys", "nested"),
)
def test_a_spec_that_would_come_back_another_is_not_saved(
    project: Project, other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass
    class Spec:
        path: Path | None
        names: tuple[str, ...]
        size: int | None
        scale: float
        counts: dict[str, int]

    settings, spec = project.module("config"), Spec(**PLAIN | other)
    monkeypatch.setattr(project.module("data"), "Spec", Spec)
    values = json.loads(json.dumps(settings.spec_to_json(spec)))
    assert values == {} if other else settings.spec_from_json(values) == spec


def convert(mode: str, source: Path, target: Path) -> None:
    """`python -m torch.distributed.checkpoint.format_utils`, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["format_utils", mode, str(source), str(target)])
        patch.delitem(sys.modules, "torch.distributed.checkpoint.format_utils", raising=False)
        runpy.run_module("torch.distributed.checkpoint.format_utils", run_name="__main__")


def test_exported_weights_have_the_names_of_the_model(project: Project, tmp_path: Path) -> None:
    project("export", "--to", str(tmp_path / "weights.safetensors"))
    spec = project.module("data").build_datasets(project.config())[2]
    model = project.module("model").build_model(project.config(), spec)
    exported = load_file(tmp_path / "weights.safetensors")
    model.load_state_dict(exported, strict=True)
    saved = {k: v for k, v in project.trained.items() if k.startswith("model.")}
    assert same({f"model.{name}": tensor for name, tensor in exported.items()}, saved)


def test_weights_come_from_anywhere(project: Project, tmp_path: Path) -> None:
    weights = {k.removeprefix("model."): v for k, v in project.trained.items() if k[0] == "m"}
    torch.save(weights, tmp_path / "plain.pt")
    torch.save(weights, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"state_dict": {f"module.{k}": v for k, v in weights.items()}}, tmp_path / "ddp.pt")
    compiled = {k.replace("blocks.0.", "blocks.0._orig_mod."): v for k, v in weights.items()}
    torch.save(compiled, tmp_path / "compiled.pt")
    project("export", "--to", str(tmp_path / "ours.safetensors"))
    project("export", "--to", str(tmp_path / "ours.pt"))
    convert("torch_to_dcp", tmp_path / "ours.pt", tmp_path / "dcp")
    run = project.folder / "runs/default"
    in_parts = (run / "checkpoints/step_00000003/.metadata").exists()
    if not in_parts:
        words = ("--name", "other", "--init-from", str(tmp_path / "dcp"))
        line = project.refuses("train", *project.settings, *words)
        assert "is a sharded checkpoint" in line and "`export` it to a .pt file" in line
        shutil.rmtree(tmp_path / "dcp")
    else:
        convert("dcp_to_torch", run / "checkpoints/step_00000006", tmp_path / "torch.pt")
    origins = [*tmp_path.iterdir(), run, sorted(run.glob("checkpoints/step_*"))[-1]]
    assert len(origins) == (10 if in_parts else 8)
    model = project.module("train").setup(project.config()).model
    load = project.module("checkpoint.transfer").load_weights
    group = project.module("distributed").Group()
    for origin in origins:
        for tensor in model.state_dict().values():
            tensor.fill_(7)
        assert load(origin, model, None, group, True).startswith(f"{len(weights)} tensors from")
        assert same(dict(model.state_dict()), weights), origin
    still = ("--optim.learning-rate", "1e-30", "--optim.weight-decay", "0", "--name", "from")
    project("train", *project.settings, *SIX_STEPS, *still, "--init-from", str(origins[0]))
    found = project.tensors(project.folder / "runs/from")
    assert found["optimizer.norm.weight.step"] == 6
    assert all(torch.equal(found[f"model.{name}"], tensor) for name, tensor in weights.items())


def test_a_tied_weight_may_stand_in_a_file_once(project: Project, tmp_path: Path) -> None:
    weights = {k.removeprefix("model."): v for k, v in project.trained.items() if k[0] == "m"}
    torch.save(weights, tmp_path / "once.pt")
    model = project.module("train").setup(project.config()).model
    model.head = torch.nn.Linear(1, 1, bias=False)
    model.head.weight = model.embedding.weight
    load = project.module("checkpoint.transfer").load_weights
    load(tmp_path / "once.pt", model, None, project.module("distributed").Group(), True)
    assert torch.equal(model.state_dict()["head.weight"], weights["embedding.weight"])


def test_weights_that_do_not_fit_are_named(project: Project, tmp_path: Path) -> None:
    weights = {k.removeprefix("model."): v for k, v in project.trained.items() if k[0] == "m"}
    model = project.module("train").setup(project.config()).model
    load = project.module("checkpoint.transfer").load_weights
    group, user_error = (
        project.module("distributed").Group(),
        project.module("errors").UserError,
    )
    name = "norm.weight"
    other = {k: v for k, v in weights.items() if k != name} | {"extra.weight": torch.ones(3)}
    torch.save(other, tmp_path / "other.pt")
    text = load(tmp_path / "other.pt", model, None, group)
    assert name in text and "extra.weight" in text
    with pytest.raises(user_error, match=rf"{name}.*extra\.weight"):
        load(tmp_path / "other.pt", model, None, group, strict=True)
    torch.save({**weights, name: torch.ones(5)}, tmp_path / "shape.pt")
    with pytest.raises(user_error, match=rf"{name} has shape \[5\]"):
        load(tmp_path / "shape.pt", model, None, group)
    torch.save({"foreign": torch.ones(3)}, tmp_path / "foreign.pt")
    with pytest.raises(user_error, match="no parameter name in common"):
        load(tmp_path / "foreign.pt", model, None, group)


def test_nothing_is_taken_for_what_it_is_not(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these would lose something, or claim something, without a word."""
    whole, weights, run = tmp_path / "whole.pt", tmp_path / "weights.safetensors", tmp_path / "run"
    project("export", "--to", str(whole))
    project("export", "--to", str(weights))
    (tmp_path / "any").touch()
    modes = {path.stat().st_mode for path in (whole, weights, tmp_path / "any")}
    assert len(modes) == 1, "others can read it as they can read any file"
    line = project.refuses("export", "--source", str(whole), "--step", "3", "--to", str(run))
    assert "of step 6, not 3" in line
    line = project.refuses("export", "--source", str(weights), "--to", str(run))
    assert "--init-from" in line
    assert not run.exists()
    with safe_open(weights, "pt") as file:
        assert "text.txt" not in str(file.metadata())  # no settings, and no paths
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text("{}")
    for taken in (theirs, theirs / "config.json"):
        assert "exists and is not overwritten" in project.refuses("export", "--to", str(taken))
    assert [path.name for path in theirs.iterdir()] == ["config.json"]
    line = project.refuses("export", "--to", str(weights / "w.pt"))
    assert f"{weights / 'w.pt'} cannot be written: [Errno " in line
    assert "a plain name for a run's directory" in project.refuses(
        "export", "--to", str(tmp_path / "w.bin")
    )
    monkeypatch.chdir(project.folder / "runs/default/checkpoints")
    travel = project.module("checkpoint.transfer")
    options = travel.ExportConfig(to=tmp_path / "b.pt", source=Path("step_00000006"))
    assert "step 6 from step_00000006" in travel.export(Path("nowhere"), options)


def test_a_full_disk_leaves_nothing(project: Project, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name in ("state.pt", "weights.safetensors"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        try:
            assert "cannot be written" in project.refuses("export", "--to", str(tmp_path / name))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("note", ["[" * 99_999, "{}", "null", '{"manifest": {"step": 1}}'], ids=len)
def test_a_crafted_note_is_none(project: Project, tmp_path: Path, note: str) -> None:
    weights = {k.removeprefix("model."): v for k, v in project.trained.items() if k[0] == "m"}
    content = torch.frombuffer(bytearray(note.encode()), dtype=torch.uint8)
    torch.save({"model": weights, "note": content}, tmp_path / "file.pt")
    source, target = str(tmp_path / "file.pt"), str(tmp_path / "run")
    assert "does not say which run" in project.refuses("export", "--source", source, "--to", target)


def test_another_model_is_not_used_with_old_weights(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = project.module("model").build_model

    def larger(*arguments: Any) -> torch.nn.Module:
        model = build(*arguments)
        model.register_parameter("extra", torch.nn.Parameter(torch.ones(3)))
        return model

    monkeypatch.setattr(project.module("model"), "build_model", larger)
    assert "not in the file, kept as initialized: extra" in project.refuses("infer")


def test_settings_of_another_answer_are_left_out(
    project: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    saved = json.loads((project.folder / "runs/default/config.json").read_text())
    saved["parallel"] |= {"replicate": 2}
    saved["checkpoint"] |= {"keep": 7, "no_such": 3}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    config = project.module("config").load(tmp_path / "config.json")
    assert config.checkpoint.keep == 7 and config.train.steps == 6
    assert (
        "ignored settings that this project does not have: " in caplog.text
        and "checkpoint.no_such" in caplog.text
    )


def test_ranks_with_other_data_weights_or_settings_stop(tmp_path: Path) -> None:
    """Each machine could have a copy of its own: every rank says so, and the run is not begun."""
    project = bake(tmp_path / "project", package_name="seeing", checkpoint="dcp")
    (tmp_path / "text.txt").write_text("Now is the winter of our discontent. " * 100)
    sources = {"seeing": project / "src"}
    output = drill("disagree.py", (2, str(tmp_path), "seeing"), sources=sources)
    assert "6 disagreements were told on 2 ranks" in output


def test_a_hostile_or_broken_file_is_refused(project: Project, tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "executed",))

    torch.save({"model": {"norm.weight": Attack()}}, tmp_path / "attack.pt")
    (tmp_path / "empty.pt").touch()
    (tmp_path / "noise.pt").write_bytes(bytes(range(256)) * 9)
    (tmp_path / "noise.safetensors").write_bytes(b"\xff" * 99)
    for source in list(tmp_path.iterdir()):
        options = ("--name", "refused", "--init-from", str(source))
        line = project.refuses("train", *project.settings, *SIX_STEPS, *options)
        assert str(source) in line and "\n" not in line
        line = project.refuses("export", "--source", str(source), "--to", str(tmp_path / "run"))
        assert str(source) in line and "\n" not in line
    assert not (tmp_path / "executed").exists() and not (tmp_path / "run").exists()
    assert not (project.folder / "runs/refused").exists()
