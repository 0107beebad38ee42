"""The average of the weights (EMA): by its formula, through resumes, in exports and inference."""

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import Project, project_fixture

project = project_fixture("average_project", parallelism="single", checkpoint="dcp")
STEPS, EMA = 8, 0.7


class Weights:
    """Of each step; `average` follows them by hand, from the end of step `first`."""

    def __init__(self, first: int = 1) -> None:
        self.first, self.weights, self.state = first, {}, None

    def after_step(self, state: Any, record: Any) -> None:
        """Keep them."""
        self.state = state
        self.weights[state.step] = {k: v.clone() for k, v in state.model.state_dict().items()}

    def average(self) -> dict[str, torch.Tensor]:
        """At the end."""
        average = self.weights[self.first]
        for step in range(self.first + 1, STEPS + 1):
            # As in tf.train.ExponentialMovingAverage, whose steps are counted from 0 as well.
            decay = min(EMA, step / (9 + step))
            now = self.weights[step]
            average = {k: decay * v + (1 - decay) * now[k] for k, v in average.items()}
        return average


def train(project: Project, run_dir: Path, *callbacks: Any, **changes: Any) -> None:
    settings = {"run_dir": run_dir, "train__steps": STEPS, "train__validate_every": STEPS}
    settings |= {"optim__ema": EMA, "checkpoint__every": 4, **changes}
    project.module("train").run(project.config(**settings), callbacks)


def saved(project: Project, run_dir: Path) -> dict[str, torch.Tensor]:
    """The averages in the newest checkpoint, by the names of the weights."""
    ends = ("optimizer.", ".ema")
    return {
        name.removeprefix(ends[0]).removesuffix(ends[1]): tensor
        for name, tensor in project.tensors(run_dir).items()
        if name.endswith(ends[1])
    }


def near(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    assert first.keys() == second.keys()
    return all(torch.allclose(v, second[name], rtol=1e-4, atol=1e-6) for name, v in first.items())


def stop_at(step: int) -> SimpleNamespace:
    def end(state: Any, record: Any) -> None:
        if state.step == step:
            raise KeyboardInterrupt

    return SimpleNamespace(after_step=end)


@pytest.fixture(scope="module")
def trained(project: Project, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Weights]:
    run_dir, seen = tmp_path_factory.mktemp("trained") / "run", Weights()
    train(project, run_dir, seen)
    return run_dir, seen


def test_it_keeps_what_bfloat16_would_round_away(project: Project) -> None:
    ema = project.module("ema")
    model = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ema.keep_average(optimizer)
    optimizer.param_groups[0]["ema_decay"] = 0.999
    weight = model.weight
    for step in range(400):
        weight.grad = model.bias.grad = None
        weight.grad = torch.zeros_like(weight)
        if step == 1:
            weight.data.mul_(1.5)
        optimizer.step()
    average = optimizer.state[weight][ema.EMA]
    moved = 1 - 0.999**399
    wanted = weight.detach().double() / 1.5 * (1 + 0.5 * moved)
    # The factor of 1.5 is itself rounded to bfloat16.
    torch.testing.assert_close(average.double(), wanted, rtol=1e-2, atol=1e-5)
    kept, last = average.clone(), weight.detach().clone()
    with ema.averaged_weights(model, optimizer):
        assert torch.equal(weight, average.bfloat16())
    assert torch.equal(weight, last) and torch.equal(average, kept)


def test_it_is_what_its_formula_says(project: Project, trained: tuple[Path, Weights]) -> None:
    run_dir, seen = trained
    assert near(saved(project, run_dir), seen.average())
    assert not near(saved(project, run_dir), seen.weights[STEPS])


def test_both_are_validated(project: Project, trained: tuple[Path, Weights]) -> None:
    """And the weights are as they were afterwards."""
    run_dir, seen = trained
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert near(dict(seen.state.model.state_dict()), seen.weights[STEPS])
    validate = project.module("train").validate
    for weights, kind in ((seen.weights[STEPS], "validation"), (seen.average(), "validation_ema")):
        seen.state.model.load_state_dict(weights)
        for name, value in validate(seen.state).items():
            assert last[name.replace("validation", kind)] == pytest.approx(value, rel=1e-5)
    seen.state.model.load_state_dict(seen.weights[STEPS])
    assert last["validation_loss"] != last["validation_ema_loss"]


def test_it_is_exported_and_inferred_with(
    project: Project, trained: tuple[Path, Weights], tmp_path: Path, capsys: Any
) -> None:
    run_dir, seen = trained
    for kind, expected in (("last", seen.weights[STEPS]), ("ema", seen.average())):
        file = tmp_path / f"{kind}.safetensors"
        project("export", "--run-dir", str(run_dir), "--to", str(file), "--weights", kind)
        assert near(load_file(file), expected)
    texts = set()
    for kind in ("last", "ema"):
        words = ("--tokens", "60", "--temperature", "1", "--device", "cpu")
        capsys.readouterr()
        project("infer", "--run-dir", str(run_dir), "--weights", kind, *words)
        texts.add(capsys.readouterr().out)
    assert len(texts) == 2


def test_a_run_without_one_says_so(project: Project, tmp_path: Path) -> None:
    train(project, tmp_path / "run", optim__ema=0.0)
    words = ("--run-dir", str(tmp_path / "run"), "--weights", "ema")
    for command in (("export", "--to", str(tmp_path / "x.safetensors")), ("infer",)):
        assert "train with --optim.ema" in project.refuses(*command, *words)
    assert not (tmp_path / "x.safetensors").exists()


def test_it_goes_on_exactly(
    project: Project, trained: tuple[Path, Weights], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(project, run_dir, stop_at(6))
    train(project, run_dir)
    resumed, whole = saved(project, run_dir), saved(project, trained[0])
    assert all(torch.equal(tensor, whole[name]) for name, tensor in resumed.items())


def test_it_can_begin_and_end_at_a_resume(
    project: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It begins with the weights after the next step, and leaves nothing behind when it ends."""
    run_dir, seen = tmp_path / "run", Weights(first=5)
    with pytest.raises(KeyboardInterrupt):
        train(project, run_dir, seen, stop_at(5), optim__ema=0.0)
    assert not saved(project, run_dir)
    with caplog.at_level(logging.INFO):
        train(project, run_dir, seen)
    (said,) = [
        text for text in caplog.messages if "are not in the checkpoint and start afresh" in text
    ]
    assert re.fullmatch(r"\d+ tensors of the optimizer .* e\.g\. optimizer\..*\.ema", said)
    assert near(saved(project, run_dir), seen.average())
    train(project, run_dir, optim__ema=0.0, train__steps=STEPS + 2)
    assert not saved(project, run_dir)


def test_weights_that_are_tied_have_theirs_by_each_name(project: Project) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    project.module("ema").keep_average(optimizer)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    named = project.module("checkpoint.tensors").optimizer_tensors(model, optimizer)
    assert {n.removesuffix(".ema") for n in named if n.endswith(".ema")} == set(model.state_dict())
    assert {n.removesuffix(".exp_avg") for n in named if n.endswith(".exp_avg")} == {
        name for name, _ in model.named_parameters()
    }


def test_a_skipped_step_is_none_for_it(project: Project) -> None:
    """Of an optimizer that is told on the device (`found_inf`) that a gradient is not finite."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.AdamW([weight], lr=0.5, fused=True)
    project.module("ema").keep_average(optimizer)
    averages = []
    for bad in (0.0, 1.0, 0.0):
        optimizer.param_groups[0]["ema_decay"] = 0.5
        optimizer.found_inf = torch.tensor(bad)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        averages.append(optimizer.state[weight]["ema"].clone())
        weight.data += 1  # it would be seen
    assert torch.equal(averages[0], averages[1]) and not torch.equal(averages[1], averages[2])


def test_another_optimizer_does_not_drop_it(
    project: Project, trained: tuple[Path, Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some parameters would lose it in silence, others not."""

    def another(config: Any, model: Any) -> Any:
        return torch.optim.Adam(model.parameters(), amsgrad=True)

    monkeypatch.setattr(project.module("train"), "build_optimizer", another)
    with pytest.raises(
        project.module("errors").UserError, match=r"would lose \d+ tensors, e\.g\. .*\.ema"
    ):
        train(project, trained[0], train__steps=STEPS + 2)
