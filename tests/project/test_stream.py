"""Streams: each rank reads its own, and a resume reads on exactly where the checkpoint was."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import Project, bake, drill, project_fixture

project = project_fixture(
    "of_a_stream", parallelism="single", checkpoint="dcp", samples="stream", workflow="full"
)
counted = project_fixture("of_numbers", parallelism="single", checkpoint="torch_save")


class Stream:
    """Samples by a formula; begins anew at its end, in another order."""

    def __init__(self, length: int = 50, **more: Any) -> None:
        self.length, self.place, self.epoch, self.more = length, 0, 0, more
        self.seen: list[tuple[int, int]] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.place < self.length:
            number, self.place = self.place, self.place + 1
            self.seen.append((self.epoch, number))
            generator = torch.Generator().manual_seed(1000 * self.epoch + number)
            yield {"tokens": torch.randint(0, 256, (33,), generator=generator).byte()}
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, **self.more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def train(project: Project, stream: Any, run_dir: Path, **changes: Any) -> Any:
    """Train on a stream, 8 samples a step."""
    with pytest.MonkeyPatch.context() as patch:
        project.train_on(patch, stream)
        config = project.config(run_dir=run_dir, checkpoint__every=1, **changes)
        return project.module("train").run(config)


def test_a_resume_reads_on(project: Project, tmp_path: Path) -> None:
    """Through the end of the stream, too: 20 steps are three times 50 samples, and some."""
    train(project, whole := Stream(), tmp_path / "whole", checkpoint__keep=20)
    assert whole.seen == [(n // 50, n % 50) for n in range(160)]
    wanted = project.tensors(tmp_path / "whole")
    for step in (1, 6, 7, 13, 19):
        run_dir = tmp_path / f"from_{step}"
        shutil.copytree(tmp_path / "whole", run_dir)
        for later in range(step + 1, 21):
            shutil.rmtree(run_dir / f"checkpoints/step_{later:08}")
        train(project, resumed := Stream(), run_dir)
        assert resumed.seen == whole.seen[8 * step :], step
        found = project.tensors(run_dir)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    manifest = json.loads((tmp_path / "whole/checkpoints/step_00000013/manifest.json").read_text())
    assert manifest["streams"] == [{"epoch": 2, "state": {"place": 4}}]
    path = tmp_path / "whole/checkpoints/step_00000020"
    (other := Stream()).load_state_dict = lambda state: state["shard"]
    shutil.rmtree(path)
    with pytest.raises(
        project.module("errors").UserError, match="cannot resume at its saved position"
    ):
        train(project, other, tmp_path / "whole")


def test_samples_that_were_measured_are_not_trained_on_after_a_resume(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the device's peak is known, setup reads the stream's first samples to count FLOPs."""
    monkeypatch.setattr(project.module("run.hardware"), "peak_flops", lambda device: 1e12)
    train(project, Stream(), tmp_path, checkpoint__keep=20)
    wanted = project.tensors(tmp_path)
    for later in range(8, 21):
        shutil.rmtree(tmp_path / f"checkpoints/step_{later:08}")
    train(project, Stream(), tmp_path)
    found = project.tensors(tmp_path)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_what_a_stream_draws_follows_from_seed_step_and_rank(
    project: Project, tmp_path: Path
) -> None:
    class Drawing(Stream):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            for sample in super().__iter__():
                numbers = (torch.rand(()).item(), float(np.random.rand()), random.random())
                self.drawn = [*getattr(self, "drawn", []), *numbers]
                yield sample

    train(project, whole := Drawing(), tmp_path, checkpoint__keep=20)
    for later in range(8, 21):
        shutil.rmtree(tmp_path / f"checkpoints/step_{later:08}")
    train(project, resumed := Drawing(), tmp_path)
    assert resumed.drawn == whole.drawn[3 * 8 * 7 :] and len({*whole.drawn}) == 3 * 160
    sampling, found = project.module("sampling"), []
    for seed, rank in ((0, 0), (0, 1), (1, 0)):
        settings = project.config(train__seed=seed, train__global_batch_size=8).train
        world = SimpleNamespace(rank=rank, size=2)
        plan = sampling.micro_batches(8, 8, rank, 2)
        sampling.open_loader(stream := Drawing(), settings, plan, world).next()
        found.append({*stream.drawn})
    assert found[0] < {*whole.drawn} and not found[0] & found[1] and not found[0] & found[2]


@pytest.mark.parametrize("buffer_size", [1, 100])
def test_a_shuffle_buffer_is_told_as_it_is_lost(
    project: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture, buffer_size: int
) -> None:
    """Parts of a stream as Hugging Face's have them (datasets 5.2)."""
    stream = Stream()
    parts = {"ex_iterable": SimpleNamespace(buffer_size=None), "buffer_size": buffer_size}
    shuffled = type("BufferShuffledExamplesIterable", (), parts)()
    joined = SimpleNamespace(ex_iterables=[SimpleNamespace(), shuffled])
    stream._ex_iterable = SimpleNamespace(ex_iterable=joined)
    train(project, stream, tmp_path, train__steps=1)
    assert ("a resume is not exact" in caplog.text) is (buffer_size > 1)


def test_micro_batches_are_parts_of_the_same_samples(project: Project, tmp_path: Path) -> None:
    losses = []
    for size in (8, 2):
        run_dir = tmp_path / str(size)
        train(project, Stream(), run_dir, train__micro_batch_size=size, train__steps=4)
        last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
        losses.append(last["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_bad_samples_are_named_by_their_place(project: Project, tmp_path: Path) -> None:
    class Poisoned(Stream):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            for number, sample in enumerate(super().__iter__()):
                yield {"tokens": sample["tokens"], "bad": torch.tensor(float(number == 21))}

    model = project.module("train")
    with pytest.MonkeyPatch.context() as patch:
        compute = model.compute_loss

        def compute_loss(module: Any, batch: Any) -> Any:
            loss = compute(module, batch)
            bad = batch["bad"].sum() if "bad" in batch else torch.tensor(0.0)
            return loss._replace(total=loss.total / (1 - bad.clamp(max=1)))

        patch.setattr(model, "compute_loss", compute_loss)
        with pytest.raises(
            project.module("errors").UserError, match="each of the samples 21 causes it"
        ):
            train(project, Poisoned(), tmp_path, train__on_bad_step="stop")


@pytest.mark.parametrize(
    ("stream", "changes", "line"),
    [
        (iter([1]), {}, "without state_dict and load_state_dict: add both"),
        (Stream(0), {}, "has no samples"),
        (Stream(50, order={1, 2}), {}, "state_dict"),
        (Stream(50, order=(1, 2)), {}, "state_dict"),
        (Stream(50, names={1: 2}), {}, "state_dict"),
        (Stream(), {"train__loader_workers": 1}, "let the stream itself read ahead"),
    ],
)
def test_what_cannot_be_a_stream_is_refused(
    project: Project, stream: Any, changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(project.module("errors").UserError, match=line):
        train(project, stream, tmp_path, **changes)
    assert not list(tmp_path.glob("checkpoints/step_*"))


def test_without_the_answer_a_stream_is_refused_with_the_ways_out(
    counted: Project, tmp_path: Path
) -> None:
    error = counted.module("errors").UserError
    with pytest.raises(error, match=r"to files first, or create the project with samples=stream"):
        train(counted, Stream(), tmp_path)


def test_a_stream_is_no_numbered_run(project: Project, tmp_path: Path) -> None:
    project.module("train").run(project.config(run_dir=tmp_path, train__steps=10))
    with pytest.raises(project.module("errors").UserError, match="training_samples"):
        train(project, Stream(), tmp_path)


def test_the_baseline_measures_a_stream(project: Project, tmp_path: Path) -> None:
    training = project.module("train")
    build = training.build_datasets
    with pytest.MonkeyPatch.context() as patch:
        # Each of its runs reads a stream from the start.
        patch.setattr(training, "build_datasets", lambda c: (Stream(), *build(c)[1:]))
        tuning = project.module("workflow.tuning")
        patch.setattr(tuning, "workers_to_try", lambda *_: pytest.fail("it reads by itself"))
        tuning.measure(project.config(run_dir=tmp_path, train__steps=20))
    found = json.loads((tmp_path / "workflow/baseline.json").read_text())
    checks = {check["name"]: check["status"] for check in found["checks"]}
    assert checks["deterministic"] == checks["adds_up"] == checks["throughput"] == "pass"


def test_each_rank_reads_on_in_its_own(tmp_path: Path) -> None:
    """On two ranks to the bit, DDP and FSDP; refused on three."""
    sources = {}
    for parallelism in ("ddp", "fsdp"):
        name = f"streams_{parallelism}"
        answers = {"package_name": name, "parallelism": parallelism, "tracker": "none"}
        sources[name] = bake(tmp_path / name, samples="stream", **answers) / "src"
    output = drill(
        "streams.py", (2, str(tmp_path), *sources), (3, str(tmp_path), *sources), sources=sources
    )
    for name in sources:
        assert f"{name} on 2 ranks: the same" in output
        assert f"{name} on 3 ranks: refused" in output
