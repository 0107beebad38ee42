"""The baseline's gate: each check passes where it should and fails where it is made to."""

import contextlib
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import Project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with Project.imported(tmp_path_factory.mktemp("baseline"), "based", parallelism="ddp") as it:
        it.module("workflow.baseline").MEASURED = 12
        yield it


def test_it_can_be_the_only_stage(tmp_path: Path) -> None:
    answers = {"parallelism": "single", "checkpoint": "torch_save", "tracker": "none"}
    with Project.imported(tmp_path, "baseline_only", workflow="baseline", **answers) as alone:
        workflow = alone.module("workflow")
        assert list(workflow.COMMANDS) == list(workflow.STAGES) == ["baseline"]
        for name in ("compile", "profile", "scale", "checkpoint", "workflow", "report"):
            assert "there is no command" in alone.refuses(name)
        with contextlib.chdir(alone.folder):
            code = alone.module("__main__").dispatch(["baseline", *Project.settings])
        content = json.loads((alone.folder / "runs/default/workflow/baseline.json").read_text())
        assert code == (content["status"] == "fail")
        checks = {check["name"]: check["status"] for check in content["checks"]}
        assert checks.pop("data_wait") in ("pass", "fail")  # steps of a millisecond
        assert set(checks.values()) == {"pass"} and len(checks) == 4


def measure(project: Project, run_dir: Path, **changes: Any) -> tuple[dict[str, str], dict]:
    """The status of each check, and the figures."""
    # Wider than the tiny preset: data for a step of a millisecond would be waited for too long.
    wide = {"model__width": 192, "train__micro_batch_size": 8, "train__steps": 20}
    config = project.config(run_dir=run_dir, **wide | changes)
    code = project.module("workflow.baseline").measure(config)
    content = json.loads((run_dir / "workflow/baseline.json").read_text())
    assert code == (content["status"] == "fail")
    return {check["name"]: check["status"] for check in content["checks"]}, content["figures"]


def test_it_begins_with_the_weights_of_the_run(project: Project, tmp_path: Path) -> None:
    """Zeros, with which each byte is as likely as any other."""
    state = project.module("train").setup(project.config(model__width=192))
    zeros = {name: torch.zeros_like(tensor) for name, tensor in state.model.state_dict().items()}
    torch.save(zeros, tmp_path / "zeros.pt")
    state.loader.close()
    _, figures = measure(project, tmp_path / "run", init_from=tmp_path / "zeros.pt")
    assert figures["losses"][0] == pytest.approx(math.log(256), abs=1e-6)


def test_a_round_of_workers_is_averaged(project: Project) -> None:
    in_rounds = project.module("workflow.timing").in_rounds
    seconds = np.array([1.0, 1.0, 4.0, 1.0, 1.0, 7.0, 9.0])
    assert in_rounds(seconds, 3).tolist() == [2.0, 3.0]
    assert in_rounds(seconds, 1) is in_rounds(seconds, 4) is seconds


def test_a_sound_project_passes(project: Project, tmp_path: Path) -> None:
    found, figures = measure(project, tmp_path)
    wait = found.pop("data_wait")  # may be long on a busy machine; judged below
    assert wait in ("pass", "fail")
    passed = ("adds_up", "deterministic", "loss_falls", "throughput")
    assert found == dict.fromkeys(passed, "pass")
    seconds = figures["step_seconds"]
    assert 0 < seconds["p10"] <= seconds["median"] <= seconds["p90"]
    assert figures["samples_per_second"] == pytest.approx(8 / seconds["median"])
    assert figures["tokens_per_second"] == pytest.approx(32 * figures["samples_per_second"])
    assert figures["mfu"] is None  # of a CPU, whose peak nobody knows
    assert figures["peak_memory_bytes"] > 4 * figures["parameters"]


def test_mfu_counts_the_flops_of_a_transformer(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(project.module("run.hardware"), "peak_flops", lambda device: 1e12)
    _, figures = measure(project, tmp_path)
    per_token = 1e12 * figures["mfu"] / figures["tokens_per_second"]
    # 6 FLOPs a parameter and token, and the attention.
    assert 6 * figures["parameters"] <= per_token <= 9 * figures["parameters"]


def test_randomness_without_a_seed_is_found(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = project.module("train")
    compute = training.compute_loss

    def noisy(model: Any, batch: Any) -> Any:
        loss = compute(model, batch)
        return loss._replace(total=loss.total * (1 + 1e-3 * random.SystemRandom().random()))

    monkeypatch.setattr(training, "compute_loss", noisy)
    assert measure(project, tmp_path)[0]["deterministic"] == "fail"


def test_a_loss_that_does_not_fall_is_found(project: Project, tmp_path: Path) -> None:
    found, _ = measure(project, tmp_path, optim__learning_rate=3.0, optim__warmup_steps=0)
    assert found["loss_falls"] == "fail"


def judged_sums(project: Project, run_dir: Path, batch: int, change: Any) -> dict[str, str]:
    """The check of a project whose compute_loss is changed so: its result, and the batch."""
    sizes = {"train__global_batch_size": batch, "train__micro_batch_size": batch}
    config = project.config(run_dir=run_dir, **sizes)
    baseline, state = project.module("workflow.baseline"), project.module("train").setup(config)
    sums, compute = project.module("adds_up"), project.module("model").compute_loss
    stage = project.module("workflow.stage").Stage("baseline", config)
    with pytest.MonkeyPatch.context() as patch:
        changed = lambda model, batch: change(compute(model, batch), batch)  # noqa: E731
        patch.setattr(sums, "compute_loss", changed)
        baseline.judge_sums(stage, state)
    state.loader.close()
    assert state.module.training
    return stage.checks[0]


def test_a_loss_that_is_no_sum_is_found(project: Project, tmp_path: Path) -> None:
    import torch

    def judged(change: Any, batch: int = 7) -> dict[str, str]:
        return judged_sums(project, tmp_path, batch, lambda loss, _: change(loss))

    assert judged(lambda loss: loss)["status"] == "pass"  # though its halves are not alike
    assert judged(lambda loss: loss, batch=1)["status"] == "not_measured"
    for count in (None, 1):  # as of a mean over one whole
        mean = judged(
            lambda loss, n=count: loss._replace(total=loss.total / loss.count, count=n or 7)
        )
        assert mean["status"] == "fail" and "loss of 7 samples" in mean["measured"]
        assert "not means (reduction='sum')" in mean["advice"]
    share = judged(lambda loss: loss._replace(metrics={"right": torch.tensor(0.5)}))
    assert share["status"] == "fail" and "right of 7 samples" in share["measured"]
    assert "not means" in share["advice"]
    counted = judged(lambda loss: loss._replace(count=1))
    assert counted["status"] == "fail" and "count of 7 samples" in counted["measured"]
    assert "a count must be the number of values in this batch's sum" in counted["advice"]
    nan = judged(lambda loss: loss._replace(total=loss.total * torch.nan))
    assert nan["status"] == "fail" and "loss of 7 samples nan" in nan["measured"]


def test_metrics_may_have_counts_of_their_own(project: Project, tmp_path: Path) -> None:
    import torch

    def judged(**metrics: Any) -> dict[str, str]:
        def change(loss: Any, batch: Any) -> Any:
            values = {name: metric(batch["tokens"]) for name, metric in metrics.items()}
            return loss._replace(metrics=values)

        return judged_sums(project, tmp_path, 8, change)

    assert judged(a=torch.sum, b=lambda x: (x.sum(), (x > 99).sum()))["status"] == "pass"
    counted = judged(a=lambda x: (x.sum(), 1))
    assert counted["status"] == "fail" and "count of a of 8 samples" in counted["measured"]
    assert "a count must be the number of values in this batch's sum" in counted["advice"]
    mean = judged(a=torch.sum, b=lambda x: (x.double().mean(), len(x)))
    assert mean["status"] == "fail" and "b of 8 samples" in mean["measured"]
    assert "not means" in mean["advice"]
    r2 = judged(r2=lambda x: 1 - x[0].sum() / x.double().square().sum().sqrt())
    assert r2["status"] == "fail" and "r2 of 8 samples" in r2["measured"]
    assert "for a metric, return the sums it is computed from" in r2["advice"]


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["sum", "mean"])
def test_a_loss_that_compares_samples_is_no_mean(
    project: Project, tmp_path: Path, noise: float, kind: str
) -> None:
    """A contrastive one (InfoNCE), deterministic or with views of its samples drawn at random."""
    import torch
    import torch.nn.functional as F

    def views(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = F.one_hot(tokens.long(), 256).double()
        halves = (half.mean(1) + noise / 16 * torch.randn(len(tokens), 256) for half in
                  (seen[:, :16], seen[:, 16:]))  # fmt: skip
        first, second = (F.normalize(half, dim=1) for half in halves)
        return first, second

    def contrastive(loss: Any, batch: Any) -> Any:
        first, second = views(batch["tokens"])
        own = torch.arange(len(first))
        total = F.cross_entropy(first @ second.T, own, reduction=kind)
        return loss._replace(total=total, count=len(first), metrics={})

    check = judged_sums(project, tmp_path, 8, contrastive)
    assert check["status"] == "fail" and "loss of 8 samples" in check["measured"]
    assert "it compares samples of a batch" in check["advice"]
    assert "put all that is compared into one sample" in check["advice"]
    assert ("standard errors" in check["wanted"]) == (noise > 0)


def test_what_is_random_is_judged_on_average(project: Project, tmp_path: Path) -> None:
    """By seeded draws: a sum passes, a mean does not, and noise that hides either is named."""
    import torch

    def judged(noise: float, kind: str = "sum") -> dict[str, str]:
        def drawn(loss: Any, batch: Any) -> Any:
            each = 1 + noise * torch.randn(len(batch["tokens"]))
            total = loss.total / len(each) * getattr(each, kind)()
            return loss._replace(total=total, metrics={})

        return judged_sums(project, tmp_path, 8, drawn)

    assert judged(0.1)["status"] == "pass" and judged(0.1) == judged(0.1)
    mean = judged(0.1, "mean")
    assert mean["status"] == "fail" and "not means" in mean["advice"]
    hidden = judged(3.0)
    assert hidden["status"] == "not_measured"
    assert "too random to tell" in hidden["measured"] and not hidden["advice"]


def test_what_samples_draw_is_the_same_in_a_batch_and_in_its_parts(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random transforms and a metric about a rare class: judged, and exactly."""
    import torch

    class Drawn:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, number: int) -> Any:
            return {"tokens": torch.randint(0, 256, (33,), dtype=torch.uint8)}

    def judged(change: Any) -> dict[str, str]:
        return judged_sums(project, tmp_path, 8, change)

    project.train_on(monkeypatch, Drawn())
    rare = lambda loss, batch: (  # noqa: E731
        loss._replace(metrics={"rare": (batch["tokens"] < 3).sum()})
    )
    sound = judged(rare)
    assert sound["status"] == "pass" and "standard errors" not in sound["wanted"]
    mean = judged(lambda loss, batch: loss._replace(total=loss.total / loss.count))
    assert mean["status"] == "fail" and "not means" in mean["advice"]


def test_sums_that_are_not_meant_to_add_up_are_declared(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(project.module("model"), "ADDS_UP", False, raising=False)
    check = judged_sums(project, tmp_path, 8, lambda loss, _: loss._replace(count=1))
    assert check["status"] == "pass" and "declared" in check["measured"]


def test_a_loss_may_need_what_augment_adds(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted once more where a peak is known, as that of a GPU is."""
    import torch

    def augment(self: Any, batch: Any, keys: Any) -> Any:
        return {**batch, "shares": torch.from_numpy(keys % 1000 / 1000)}

    chunks, compute = project.module("data").Chunks, project.module("model").compute_loss
    monkeypatch.setattr(chunks, "augment", augment, raising=False)
    for module in ("train", "adds_up"):
        weighted = lambda model, batch: (  # noqa: E731
            compute(model, batch)._replace(metrics={"share": batch["shares"].sum()})
        )
        monkeypatch.setattr(project.module(module), "compute_loss", weighted)
    monkeypatch.setattr(project.module("run.hardware"), "peak_flops", lambda device: 1e12)
    found, figures = measure(project, tmp_path)
    assert (found["adds_up"], found["loss_falls"], figures["mfu"] > 0) == ("pass", "pass", True)


def test_a_loss_that_is_none_is_refused(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = project.module("train")
    compute = training.compute_loss
    monkeypatch.setattr(training, "compute_loss", lambda model, batch: compute(model, batch).total)
    said = project.refuses("train", "--run-dir", str(tmp_path / "run"))
    assert "what compute_loss (model.py) returns: expected LossSum, not Tensor" in said


def test_slow_data_is_found(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = project.module("data").Chunks
    fetch, since = chunks.__getitems__, [time.perf_counter()]

    def slow(self: Any, ids: Any) -> Any:
        """Takes as long as the step did, whatever the machine."""
        time.sleep(min(time.perf_counter() - since[0], 1))
        found = fetch(self, ids)
        since[0] = time.perf_counter()
        return found

    monkeypatch.setattr(chunks, "__getitems__", slow)
    found, figures = measure(project, tmp_path)
    assert found["data_wait"] == "fail"
    assert figures["data_wait"]["median"] > 0.3


def test_the_share_of_waiting_is_judged(project: Project, tmp_path: Path) -> None:
    """From recordings made up, either side of the limits: of the share, and of the time."""
    import numpy as np

    baseline, timing = project.module("workflow.baseline"), project.module("workflow.timing")
    state = project.module("train").setup(project.config(run_dir=tmp_path))
    every_third = np.resize([0.0, 0.0, 1.0], 30)  # as of workers that bring three at once
    for share, step, status in (
        (0.04, 0.1, "pass"),
        (0.06, 0.1, "fail"),
        (every_third, 0.1, "fail"),
        (0.4, 5e-4, "pass"),  # a step of half a millisecond: nothing would make it shorter
        (0.4, 2e-3, "pass"),
        (0.4, 3e-3, "fail"),
    ):
        steps = timing.Steps(np.linspace(2, 1, 30), np.full(30, step), np.full(30, step) * share)
        stage = project.module("workflow.stage").Stage("baseline", state.config)
        baseline.judge_waits(stage, steps, "")
        assert {check["name"]: check["status"] for check in stage.checks}["data_wait"] == status


def test_what_a_gpu_hides_is_no_wait(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host would only wait for the device, it reads in; not while it issues the step."""
    timing, clock = project.module("workflow.timing"), [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(timing, "means", lambda *given: {"loss": 1.0})

    for reading, issuing, working, seconds, waits in (
        (10.0, 4.0, 0.0, 14.0, 10.0),  # as on a CPU
        (10.0, 0.0, 4.0, 10.0, 6.0),
        (3.0, 0.0, 4.0, 4.0, 0.0),
        (2.0, 6.0, 0.0, 8.0, 2.0),  # a GPU that waits for the host
        (2.0, 3.0, 1.0, 5.0, 1.0),
    ):
        loader = SimpleNamespace(seconds=0.0)

        def issue(state: Any, batches: Any, issuing: float = issuing) -> None:
            clock[0] += issuing
            state.sums = np.zeros(2)

        def synchronize(device: Any, working: float = working) -> None:
            clock[0] += working if loader.seconds else 0.0  # noqa: B023 - of this round

        monkeypatch.setattr(timing, "train_step", issue)
        monkeypatch.setattr(timing, "synchronize", synchronize)

        def read(loader: Any = loader, reading: float = reading) -> None:
            clock[0] += reading
            loader.seconds += reading

        loader.next = read
        world = SimpleNamespace(device=None)
        state = SimpleNamespace(loader=loader, world=world, sums=0.0, metrics=())
        steps = timing.record_steps(state, 3)
        assert steps.seconds.tolist() == [seconds] * 3 and steps.waits.tolist() == [waits] * 3


def test_what_is_the_same_depends_on_the_kernels(project: Project, tmp_path: Path) -> None:
    """To the bit on a CPU; on a GPU about, unless it was asked to be deterministic."""
    import numpy as np

    baseline, stages = project.module("workflow.baseline"), project.module("workflow.stage")

    def judged(changes: list[float], cpu: bool, deterministic: bool = False) -> str:
        config = project.config(run_dir=tmp_path, train__deterministic=deterministic)
        stage = stages.Stage("baseline", config)
        losses = np.linspace(3, 2, len(changes))
        baseline.judge_losses(stage, losses, losses * (1 + np.array(changes)), cpu)
        return stage.checks[0]["status"]

    assert judged([0, 0, 0], cpu=True) == judged([0, 0, 0], cpu=False) == "pass"
    assert judged([0, 0, float("nan")], cpu=False) == "fail"
    for changes, gpu in (([0, 1e-9, 1e-3], "pass"), ([0, 0, 0.1], "fail"), ([1e-3, 0, 0], "fail")):
        assert judged(changes, cpu=True) == judged(changes, cpu=False, deterministic=True) == "fail"
        assert judged(changes, cpu=False) == gpu


def test_a_rate_of_almost_nothing_is_found(project: Project, tmp_path: Path) -> None:
    """A batch of one: the losses of a few batches differ by more than training teaches."""
    one = {"train__global_batch_size": 1, "train__micro_batch_size": 1}
    assert measure(project, tmp_path, **one)[0]["loss_falls"] == "pass"
    found, _ = measure(project, tmp_path, optim__learning_rate=1e-30, **one)
    assert found["loss_falls"] == "fail"


def test_a_gpu_is_known_by_its_whole_name(project: Project, monkeypatch) -> None:
    import torch

    flops, cuda = project.module("run.hardware"), torch.device("cuda", 0)
    for name, peak in (
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA RTX A1000", None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert flops.peak_flops(cuda) == peak
