"""The optimizer is yours: another one in ten lines, groups with their rates; the schedule."""

import ast
import os
import re
import signal
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import Project, project_fixture

project = project_fixture("own_optimizer", parallelism="single", checkpoint="dcp")


def readme_example(project: Project) -> str:
    """The rendered README's own `build_optimizer`."""
    readme = (project.folder / "README.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)\n *```", readme, flags=re.DOTALL)
    return textwrap.dedent(next(block for block in blocks if "def build_optimizer" in block))


def sgd(config: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=config.learning_rate, momentum=0.9)


def adafactor(config: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=config.learning_rate)


def adam_on_two_rates(config: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    groups = [{"params": [first], "rate_factor": 0.1}, {"params": rest}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, amsgrad=True, fused=False)


class Counting(torch.optim.SGD):
    """Keeps a count in its groups and scales by it, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        for group in self.param_groups:
            group |= {"k": 0, "weight_sum": 0.0}

    def step(self, closure: Any = None) -> None:
        """Go less far each time."""
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += 1 / 3
            group["lr"] /= group["weight_sum"] + group["k"]
        super().step(closure)


def counting(config: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    return Counting(model.parameters(), lr=config.learning_rate)


@pytest.mark.parametrize("build", ["readme", sgd, adafactor, adam_on_two_rates, counting])
def test_another_optimizer_trains_and_resumes_exactly(
    project: Project, tmp_path, monkeypatch: pytest.MonkeyPatch, build: Any
) -> None:
    training = project.module("train")
    if build == "readme":
        text = readme_example(project)
        assert len(ast.unparse(ast.parse(text)).splitlines()) <= 10
        names = dict(vars(project.module("optim")))
        exec(text, names)
        build = names["build_optimizer"]
    monkeypatch.setattr(training, "build_optimizer", build)
    weights, rates = {}, set()

    def run(name: str, stop_at: int = 0) -> None:
        def watch(state: Any, record: Any) -> None:
            if state.step == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            rates.add(tuple(group["lr"] for group in state.optimizer.param_groups))
            weights[name] = {k: v.clone() for k, v in state.model.state_dict().items()}

        callback = SimpleNamespace(after_step=watch)
        training.run(project.config(run_dir=tmp_path / name, train__steps=8), [callback])

    run("undisturbed")
    run("resumed", stop_at=3)
    assert any(not torch.equal(v, weights["undisturbed"][k]) for k, v in weights["resumed"].items())
    run("resumed")
    for name, tensor in weights["undisturbed"].items():
        assert torch.equal(tensor, weights["resumed"][name]), name
    if build is adam_on_two_rates:
        assert all(low == pytest.approx(high / 10) for low, high in rates)


def test_the_rate_warms_up_to_its_peak_and_decays_to_its_end(project: Project) -> None:
    optim, schedule = project.module("optim"), project.module("schedule")
    config = optim.OptimConfig(learning_rate=0.1, warmup_steps=20, final_fraction=0.1)
    rates = [schedule.learning_rate(config, step, 100) for step in range(101)]
    assert rates[:20] == pytest.approx([0.1 * (step + 1) / 20 for step in range(20)])
    assert max(rates) == 0.1 and rates[100] == pytest.approx(0.01)
    assert rates[20:] == sorted(rates[20:], reverse=True)


def test_a_skipped_step_leaves_batch_statistics_as_they_were(project: Project) -> None:
    """Batch normalisation writes them without counting a version of the tensor."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    buffers = project.module("run.bad_steps").RunningBuffers(model)
    for batch, bad in ((torch.rand(4, 3), False), (torch.full((4, 3), torch.nan), True)) * 2:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        buffers.keep()
        model(batch)
        buffers.put_back(bad)
        changed = [key for key, v in model.state_dict().items() if not torch.equal(v, before[key])]
        assert len(changed) == (0 if bad else 3), changed
    assert len(buffers.copies) == 3
