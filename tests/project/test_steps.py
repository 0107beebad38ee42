"""What the loop must not leave undone around a step, a save and a stop, one thing at a time."""

import contextlib
import errno
import json
import logging
import math
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import Project, bake, drill, project_fixture, records

image = project_fixture(
    "steps_of_images", task="image_classifier", parallelism="single", checkpoint="torch_save"
)
text = project_fixture("steps_of_text", parallelism="single", checkpoint="dcp_async")
ddp = project_fixture("steps_of_ddp", task="image_classifier", parallelism="ddp", tracker="none")


def with_statistics(project: Project) -> Any:
    """A state whose model has batch statistics."""
    training = project.module("train")
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "build_model", lambda config, spec: model)
        patch.setattr(training, "blocks", lambda model: [])
        return training.setup(project.config(data__path=None))


@pytest.mark.parametrize("first", [False, True])
def test_a_bad_step_leaves_batch_statistics_alone(image: Project, first: bool) -> None:
    state, step = with_statistics(image), image.module("train").train_step
    if not first:
        step(state, state.loader.next())
    kept = {name: buffer.clone() for name, buffer in state.model.named_buffers()}
    bad = state.loader.next()
    for batch in bad:
        batch["images"][0] = torch.nan
    step(state, bad)
    now = dict(state.model.named_buffers())
    assert all(torch.equal(now[name], kept[name]) for name in kept)
    step(state, state.loader.next())
    assert not torch.equal(now["1.running_mean"], kept["1.running_mean"])
    assert state.bad_steps == 1


def test_ranks_agree_on_running_buffers_after_each_step(tmp_path: Path) -> None:
    """Of every sort, with a batch of NaN; a stop between two saves leaves no trace."""
    answers = {"task": "image_classifier", "tracker": "none"}
    kinds = {"ddp": "dcp_async", "fsdp": "dcp"}
    sources = {
        f"buffers_{kind}": bake(
            tmp_path / kind,
            package_name=f"buffers_{kind}",
            parallelism=kind,
            checkpoint=checkpoint,
            **answers,
        )
        / "src"
        for kind, checkpoint in kinds.items()
    }
    output = drill("buffers.py", (2, str(tmp_path), *sources), sources=sources)
    assert output.count("the ranks agree") == 2


class Student(nn.Module):
    """A block with batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.norm(x))


class Teacher(Student):
    """It uses buffers that it has just changed: one is assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(64))
        self.register_buffer("scale", torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.center = 0.9 * self.center + 0.1 * x.detach().mean(0)
            self.scale.mul_(1.1)
        return super().forward(x - self.center) * self.scale


@pytest.mark.parametrize(("kind", "mode"), [(Teacher, "none"), (Student, "blocks")])
def test_recomputed_activations_update_buffers_once(image: Project, kind: Any, mode: str) -> None:
    """And the second forward sees the buffers of the first: the gradients are the same."""
    compile_, found = image.module("compile"), []
    config = compile_.CompileConfig(mode=mode, backend="aot_eager")
    for recompute in (False, True):
        torch.manual_seed(0)
        model = kind()
        if recompute:
            compile_.checkpoint_activations([model])
            compile_.compile_model(model, [model], config)
        for step in range(2):
            model(torch.rand(8, 64, generator=torch.Generator().manual_seed(step))).sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found.append(gradients | dict(model.named_buffers()))
    assert found[1]["norm.num_batches_tracked"] == 2
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_recomputed_activations_allow_several_backward_passes(image: Project) -> None:
    """Of one graph, and of a gradient: each sees the buffers of the forward."""
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = Teacher()
        if recompute:
            image.module("compile").checkpoint_activations([model])
        x = torch.rand(8, 64, generator=torch.Generator().manual_seed(1)).requires_grad_(True)
        loss = model(x).square().sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward(retain_graph=True)
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found.append(gradients | dict(model.named_buffers()))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_random_numbers_of_a_step_stay_what_they_were(image: Project) -> None:
    """A run that goes on with a newer render has the dropout that it would have had."""
    sampling, drawn = image.module("sampling"), []
    for seed, *place in ((0, 0, 0), (0, 1, 0), (0, 0, 1), (7, 0, 0)):
        sampling.seed_random(seed, sampling.STEP, *place, device=torch.device("cpu"))
        drawn.append(int(torch.randint(2**31, (1,))))
    assert drawn == [1513507357, 269167787, 1334207398, 1465103326]


def test_waiting_for_data_is_counted(image: Project, tmp_path: Path) -> None:
    training, sampling = image.module("train"), image.module("sampling")
    fetch = sampling.fetch

    def slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.02)
        return fetch(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "fetch", slowly)
        state = training.setup(image.config(data__path=None))
        for _ in range(3):
            state.loader.next()
    assert 0.06 <= state.loader.seconds < 10


def test_each_checkpoint_has_a_line(image: Project, tmp_path: Path) -> None:
    list_checkpoints = image.module("checkpoint.verify").list_checkpoints
    settings = {"run_dir": tmp_path, "data__path": None, "train__steps": 4}
    image.module("train").run(image.config(**settings, checkpoint__every=2))
    listing = list_checkpoints(tmp_path)
    starts = [line.split()[:2] for line in listing.lines]
    assert starts == [["step_00000002", "good"], ["step_00000004", "good"]]
    size = sum(f.stat().st_size for f in (tmp_path / "checkpoints/step_00000004").glob("*.pt"))
    wanted = f"good  {size / 1e6:.1f} MB in 1 file"
    assert not listing.any_damaged and all(wanted in line for line in listing.lines)
    (file,) = (tmp_path / "checkpoints/step_00000002").glob("*.pt")
    file.write_bytes(file.read_bytes()[:-1])
    listing = list_checkpoints(tmp_path)
    lines = listing.lines
    assert [line.split()[:2] for line in lines] == [
        ["step_00000002", "DAMAGED"],
        lines[1].split()[:2],
    ]
    assert "bytes, not" in lines[0] and listing.any_damaged


def test_what_a_manifest_says_commands_no_terminal(
    image: Project, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    manifest = image.module("checkpoint.manifest")
    image.module("train").run(image.config(run_dir=tmp_path, data__path=None, train__steps=1))
    path = tmp_path / "checkpoints/step_00000001/manifest.json"
    content = json.loads(path.read_bytes())
    del content["digest"]
    path.write_bytes(manifest.sealed({**content, "format_version": "\x1b[2J"}))
    assert image.module("__main__").dispatch(["verify", "--run-dir", str(tmp_path)]) == 1
    assert "has format \\x1b[2J; this code reads 1" in capsys.readouterr().out


def test_what_is_exported_is_synced_to_disk(image: Project, tmp_path: Path) -> None:
    """Into folders that it makes."""
    settings = {"run_dir": tmp_path / "run", "data__path": None, "train__steps": 1}
    image.module("train").run(image.config(**settings))
    synced, fsync = [], os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", note)
        target = tmp_path / "new/folder/w.safetensors"
        image("export", "--run-dir", str(tmp_path / "run"), "--to", str(target))
    assert synced[-1] == target.parent and synced[-2].name.endswith("w.safetensors")


def test_a_failed_save_ends_the_run_long_before_the_next(text: Project, tmp_path: Path) -> None:
    """And what ends it is a failure, no stop that somebody asked for."""
    training, steps = text.module("train"), []

    def slowly(state: Any, record: Any) -> None:
        steps.append(state.step)
        time.sleep(0.05)

    def refuse(*arguments: Any) -> None:
        raise text.module("checkpoint").CheckpointError("the disk is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text.module("checkpoint.publish").Publisher, "publish", refuse)
        settings = {"run_dir": tmp_path, "train__steps": 60, "checkpoint__every": 20}
        with pytest.raises(text.module("errors").RankError, match="the disk is gone"):
            training.run(text.config(**settings), [SimpleNamespace(after_step=slowly)])
    assert 20 <= steps[-1] < 40
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "failed"


def publish_slowly(project: Project, patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let each checkpoint take so much longer to be published."""
    publisher = project.module("checkpoint.publish").Publisher
    publish = publisher.publish

    def slowly(*arguments: Any) -> Any:
        time.sleep(seconds)
        return publish(*arguments)

    patch.setattr(publisher, "publish", slowly)


def test_what_a_save_costs_is_counted(image: Project, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        publish_slowly(image, patch, seconds=0.2)
        settings = {"train__steps": 4, "checkpoint__every": 2, "data__path": None}
        image.module("train").run(image.config(run_dir=tmp_path, **settings))
    status = json.loads((tmp_path / "status.json").read_text())
    assert 0.4 <= status["checkpoint_blocked_seconds"] < 20


def test_a_loader_that_seeks_forgets_what_it_read_ahead(image: Project) -> None:
    state = image.module("train").setup(image.config(data__path=None, train__loader_workers=1))
    loader, plain = state.loader, state.loader.of
    try:
        for step in (0, 5, 2):
            loader.resume(step, {}, None)
            for at in (step, step + 1):
                for found, wanted in zip(loader.next(), plain(at, state.plan), strict=True):
                    assert torch.equal(found["images"], wanted["images"])
    finally:
        loader.close()


@pytest.mark.parametrize("changes", [{"every": -1}, {"keep_every": -1}, {"keep": 0}])
def test_each_bound_of_retention_is_kept(image: Project, changes: dict[str, int]) -> None:
    config = image.module("checkpoint.publish").RetentionConfig
    with pytest.raises(image.module("errors").UserError, match="keep must be >= 1"):
        config(**changes)
    config(every=0, keep_every=0, keep=1)


def test_no_number_is_too_small_to_be_looked_at(image: Project) -> None:
    """float8 has no order of its own, and bfloat16 none in numpy."""
    tensors = image.module("checkpoint.tensors")
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float32):
        values = torch.tensor([0.5, -0.25]).to(dtype)
        tensors.refuse_nan({"model.w": values}, nn.Module())
        values[1] = torch.nan
        with pytest.raises(
            image.module("checkpoint").CheckpointError, match="w has NaN or infinite"
        ):
            tensors.refuse_nan({"model.w": values}, nn.Module())


def test_bytes_are_shown_as_people_read_them(image: Project) -> None:
    in_units = image.module("run.hardware").in_units
    sizes = (0, 7, 999, 1000, 1234, 999_999, 1_000_000, 2.5e9, 7e12, 7e15)
    shown = ("0 B", "7 B", "999 B", "1 kB", "1.23 kB", "1 MB", "1 MB", "2.5 GB", "7 TB")
    assert [in_units(size) for size in sizes[:-1]] == [*shown]
    assert in_units(sizes[-1]) == "7e+03 TB"


def test_the_machine_is_as_the_system_tells(image: Project) -> None:
    hardware = image.module("run.hardware")
    total = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    found = hardware.where_measured(torch.device("cpu"))["machine"]
    assert found["memory_gib"] == pytest.approx(int(total[1]) / 2**20, rel=0.02)
    peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    timing, cpu = image.module("workflow.timing"), torch.device("cpu")
    assert timing.peak_memory(cpu) == pytest.approx(int(peak[1]) * 1024, rel=0.2)


def test_a_container_has_what_its_limit_leaves(image: Project) -> None:
    """And what the system keeps of files, which it gives back when memory is asked for."""
    processes, gib = image.module("workflow.processes"), 2**30
    files = {
        "/sys/fs/cgroup/memory.max": f"{4 * gib}",
        "/sys/fs/cgroup/memory.current": f"{3 * gib}",
        "/sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {2 * gib}\n",
    }

    def path(name: str) -> Any:
        if name not in files:
            raise FileNotFoundError(name)
        return SimpleNamespace(read_text=lambda: files[name])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "Path", path)
        free = SimpleNamespace(available=8 * gib)
        patch.setattr(processes.psutil, "virtual_memory", lambda: free)
        assert processes.free_host_memory() == 3 * gib
        files["/sys/fs/cgroup/memory.max"] = "max"
        assert processes.free_host_memory() == 8 * gib
        files.clear()
        assert processes.free_host_memory() == 8 * gib


def test_settings_are_held_to_their_bounds(image: Project, text: Project) -> None:
    for project, part, names in (
        (text, "model.ModelConfig", {"dropout": (0.0, 0.99)}),
        (image, "optim.OptimConfig", {"beta1": (0.0, 0.99), "beta2": (0.0, 0.99)}),
        (text, "optim.OptimConfig", {"momentum": (0.0, 0.99), "beta1": (0.0, 0.99)}),
    ):
        module, kind = part.split(".")
        config = getattr(project.module(module), kind)
        for name, good in names.items():
            for value in good:
                config(**{name: value})
            for value in (-0.01, 1.0):
                with pytest.raises(project.module("errors").UserError, match=r"in \[0, 1\)"):
                    config(**{name: value})
    for name, wrong in {
        "learning_rate": (0.0, math.inf, math.nan),
        "warmup_steps": (-1,),
        "final_fraction": (-0.1, 10.0, math.nan),
        "decay_share": (0.0, 1.1),
        "ema": (-0.1, 1.0),
    }.items():
        for value in wrong:
            option = f"--optim.{name.replace('_', '-')} must be "
            with pytest.raises(image.module("errors").UserError, match=option):
                image.module("optim").OptimConfig(**{name: value})


def test_bad_samples_of_a_few_batches_are_named_as_those_of_all(
    text: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--train.overfit trains on a subset, but the user looks into the whole dataset."""
    training = text.module("train")
    compute = training.compute_loss

    def of_nan(model: Any, batch: Any) -> Any:
        loss = compute(model, batch)
        return loss._replace(total=loss.total * math.nan)

    monkeypatch.setattr(training, "compute_loss", of_nan)
    sizes = {"train__global_batch_size": 4, "train__micro_batch_size": 4, "train__overfit": 1}
    config = text.config(run_dir=tmp_path, train__on_bad_step="stop", **sizes)
    with pytest.raises(text.module("errors").UserError) as stopped:
        training.run(config)
    named = re.search(r"each of the samples ([\d, ]+) causes it", str(stopped.value))
    samples = len(training.build_datasets(config)[0])
    chosen = text.module("sampling").fixed_subset(samples, 4)
    assert named and {int(each) for each in named[1].split(", ")} == {*chosen.tolist()}
    assert max(chosen) > 4


def test_the_optimizer_is_one_kernel(image: Project, text: Project) -> None:
    for project, settings in ((image, {"data__path": None}), (text, {"optim__name": "adamw"})):
        state = project.module("train").setup(project.config(**settings))
        assert all(group["fused"] for group in state.optimizer.param_groups)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA RTX A6000", 155e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_peaks_are_those_of_the_data_sheets(
    image: Project, name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense bf16, without sparsity."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert image.module("run.hardware").peak_flops(torch.device("cuda", 0)) == peak


def test_waiting_for_saves_is_that_of_the_line(image: Project, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        publish_slowly(image, patch, seconds=0.1)
        settings = {"train__steps": 6, "checkpoint__every": 2, "train__log_every": 1}
        image.module("train").run(image.config(run_dir=tmp_path, data__path=None, **settings))
    waited = [record["checkpoint_blocked_seconds"] for record in records(tmp_path)]
    assert all(0 <= seconds < 5 for seconds in waited)
    assert [seconds >= 0.1 for seconds in waited] == [False, False, True, False, True, False]
    status = json.loads((tmp_path / "status.json").read_text())
    assert sum(waited) + 0.1 <= status["checkpoint_blocked_seconds"] < sum(waited) + 5


def test_a_validation_is_named_without_its_prefix(
    image: Project, caplog: pytest.LogCaptureFixture
) -> None:
    record = {"step": 9, "validation_bits_per_byte": 1.5, "validation_loss": 2.0, "loss": 3.0}
    record |= {"validation_odd": math.nan}
    caplog.set_level("INFO")
    journal = SimpleNamespace(undefined=set())
    image.module("run.journal").Journal._show_validation(journal, record)
    shown, warning = caplog.messages[::-1]
    assert shown == "validation at step 9: bits per byte 1.5000, loss 2.0000, odd nan"
    assert warning.startswith("validation odd is nan at step 9: ")


def test_what_is_not_there_is_not_read(image: Project, text: Project, tmp_path: Path) -> None:
    reader = image.module("checkpoint.reader")
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "state.pt")
    source, group = reader.OneFile(tmp_path / "state.pt"), image.module("distributed").Group()
    error = image.module("checkpoint").CheckpointError
    with pytest.raises(error, match=r"have no model\.v"):
        source.read({"model.v": torch.empty(2)}, group)
    with pytest.raises(error, match=r"model\.w has shape \[2\], expected \[3, 2\]"):
        source.read({"model.w": torch.empty(3, 2)}, group)
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("was ever woman in this humour wooed? " * 99)
    os.mkfifo(tmp_path / "text/b.txt")  # whose reader would wait
    with pytest.raises(text.module("errors").UserError, match=r"b\.txt is not a regular file"):
        text.module("data").build_datasets(text.config(data__path=tmp_path / "text"))


def test_flops_are_those_of_one_sample(image: Project) -> None:
    training = image.module("train")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.hardware, "peak_flops", lambda device: 1e12)
        state = training.setup(image.config(data__path=None))
    (batch,) = state.loader.of(0, state.plan[:1])
    several = {name: tensor[:3] for name, tensor in batch.items()}
    flops = image.module("run.hardware").forward_flops
    assert 3 * state.forward_flops == flops(state.model, training.compute_loss, several) > 0


def test_many_differences_are_a_few_and_a_count(image: Project) -> None:
    differences = image.module("checkpoint.tensors").identity_differences
    saved = {"parameters": {f"p{i}": [i] for i in range(5)}, "seed": 1}
    for count, lines in ((3, 3), (4, 4), (5, 4)):
        ours = {"parameters": {f"p{i}": [i + (i < count)] for i in range(5)}, "seed": 1}
        found = differences(saved, ours)
        assert len(found) == lines
        assert (found[-1] == f"parameters: {count - 3} more") == (count > 3)


def test_too_many_bad_steps_in_a_row_end_a_run(image: Project, tmp_path: Path) -> None:
    """Each of them counts, also those that share a line of the log with others."""
    training = image.module("train")
    compute = training.compute_loss
    settings = {"data__path": None, "train__steps": 20, "train__log_every": 2}

    def without_number(model: nn.Module, batch: Any) -> Any:
        loss = compute(model, batch)
        return loss._replace(total=loss.total * math.nan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "compute_loss", without_number)
        with pytest.raises(image.module("errors").UserError, match="the last 6 steps were skipped"):
            training.run(image.config(run_dir=tmp_path, train__max_bad_steps=5, **settings))
    assert not (tmp_path / "checkpoints/step_00000020").exists()


def test_a_good_step_ends_the_row_of_bad_ones(image: Project) -> None:
    module = image.module("run.bad_steps")
    settings = SimpleNamespace(on_bad_step="skip", max_bad_steps=4)
    callback = module.BadSteps(settings, None, image.module("distributed").Group())
    state, bad = SimpleNamespace(step=1), {"loss": math.nan, "skipped_steps": 2}
    callback.after_step(state, bad)
    callback.after_step(state, {"loss": 1.0, "skipped_steps": 1})
    callback.after_step(state, bad)
    with pytest.raises(image.module("errors").UserError, match="the last 4 steps were skipped"):
        callback.after_step(state, bad)


def test_a_good_run_warns_of_nothing(
    image: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        image.module("train").run(image.config(run_dir=tmp_path, data__path=None))
    assert not [line for line in caplog.records if line.levelno >= logging.WARNING]
    begins = [line.partition(" ")[0] for line in caplog.messages]
    assert {"model", "data", "batch", "run"} <= {*begins}


class Watched:
    """A harmless callback that notes what is called, and fails where it is told to."""

    harmless = True

    def __init__(self, fails: str) -> None:
        self.fails, self.calls = fails, []

    def call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails:
            raise ValueError(name)

    def __enter__(self) -> None:
        self.call("enter")

    def __exit__(self, *exception: object) -> None:
        self.call("exit")

    def after_step(self, state: Any, record: Any) -> None:
        self.call("step")


@pytest.mark.parametrize(
    ("fails", "calls"),
    [
        ("", ["enter", "step", "step", "exit"]),
        ("enter", ["enter"]),
        ("step", ["enter", "step", "exit"]),
        ("exit", ["enter", "step", "step", "exit"]),
    ],
)
def test_a_harmless_callback_is_left_out_when_it_fails(
    image: Project, fails: str, calls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    runner, callback = image.module("run.callback_runner"), Watched(fails)
    with contextlib.ExitStack() as stack:
        steps = runner.find_methods("after_step", runner.enter([callback], stack))
        for _ in range(2):
            for step in steps:
                step(None, None)
    assert callback.calls == calls
    assert len([line for line in caplog.records if line.levelno == logging.WARNING]) == bool(fails)


def test_a_log_that_cannot_be_written_is_told_once(
    image: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A line that was cut off goes on there, and all are there as soon as there is room."""
    full, room = [True], [30]  # from the first line on; bytes that it still takes then

    class Disk:
        """Takes a part of what is written once it is full, and refuses the rest."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *exception: object) -> None:
            self.file.close()

        def write(self, lines: bytes) -> int:
            if full[0] and not room[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            taken = self.file.write(lines[: room[0]] if full[0] else lines)
            room[0] = room[0] - taken if full[0] else 30
            return taken

    def fill(state: Any, record: Any) -> None:
        full[0] = not 5 <= state.step < 8 and state.step < 15
        seen.append((tmp_path / "metrics.jsonl").read_text().count("}\n"))

    journal, seen = image.module("run.journal"), []
    with pytest.MonkeyPatch.context() as patch:
        write = journal.open_to_write
        patch.setattr(journal, "open_to_write", lambda *how, **more: Disk(write(*how, **more)))
        settings = {"run_dir": tmp_path, "data__path": None, "train__log_every": 1}
        config = image.config(**settings, checkpoint__every=0, train__steps=20)
        image.module("train").run(config, [SimpleNamespace(after_step=fill)])
    warned = [text for text in caplog.messages if "metrics.jsonl cannot be written" in text]
    assert len(warned) == 2
    assert seen == [0] * 5 + [5, 6] + [7] * 8 + [*range(15, 20)]
    assert [record["step"] for record in records(tmp_path)] == [*range(1, 21)]


def test_what_is_set_aside_has_the_first_free_name(image: Project, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for count in range(3):
        settings = {"run_dir": run_dir, "data__path": None, "train__steps": 1}
        image.module("train").run(image.config(**settings, fresh=True))
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            *("run", "run.old-1", "run.old-2")[: count + 1]
        ]


@pytest.mark.parametrize("parallelism", ["single", "ddp"])
@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)]
)
def test_products_have_the_precision_that_was_asked_for(
    image: Project, ddp: Project, parallelism: str, precision: str, dtype: torch.dtype
) -> None:
    """Of training and of validation; the weights stay as they are."""
    project = ddp if parallelism == "ddp" else image
    training, seen = project.module("train"), []
    changes = {"train__precision": precision, "train__validate_samples": 8, "data__path": None}
    state = training.setup(project.config(**changes))
    for module in state.model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    training.train_step(state, state.loader.next())
    in_training = len(seen)
    project.module("validation").validate(state)
    assert 0 < in_training < len(seen) and set(seen) == {dtype}
    assert all(weight.dtype == torch.float32 for weight in state.model.parameters())
