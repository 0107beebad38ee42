"""The optimizer is yours: another one, several as one, groups with their rates; the schedule."""

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import Project, project_fixture, recipe

project = project_fixture("own_optimizer", parallelism="single", checkpoint="dcp")


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


class ScheduleFree(Counting):
    """Steps at a point between an average and what is averaged, as Defazio et al. do (2024)."""

    def step(self, closure: Any = None) -> None:
        """Refuse to, in evaluation."""
        for group in self.param_groups:
            assert group["train_mode"], "not in train mode"
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                p.data.lerp_(z, 1 / group["k"])
                p.data.sub_(p.grad, alpha=group["lr"] * 0.1)
                z.sub_(p.grad, alpha=group["lr"])

    def turn(self, mode: bool, weight: float) -> None:
        """Give the model other weights, unless it has them."""
        for group in self.param_groups:
            for p in group["params"] if group.get("train_mode", False) != mode else ():
                if "z" in self.state[p]:
                    p.data.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = mode


class Turning(ScheduleFree):
    """With the methods that say so."""

    def train(self) -> None:
        """The weights to train."""
        self.turn(True, 1 - 0.9)

    def eval(self) -> None:
        """Their average."""
        self.turn(False, 1 - 1 / 0.9)


def schedule_free(config: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    return Turning(model.parameters(), lr=config.learning_rate)


OWN = [sgd, adafactor, adam_on_two_rates, counting, schedule_free]


@pytest.mark.parametrize("build", ["Momentum SGD", "class Several", *OWN])
def test_another_optimizer_trains_and_resumes_exactly(
    project: Project, tmp_path, monkeypatch: pytest.MonkeyPatch, build: Any
) -> None:
    training = project.module("train")
    if isinstance(build, str):  # words of a recipe
        text = recipe("python", build)
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


def test_settings_of_several_optimizers_are_no_state(project: Project) -> None:
    """A checkpoint has none of them, so that a resume takes those of the present start."""
    model = torch.nn.Linear(2, 2)
    exec(recipe("python", "class Several"), names := dict(vars(project.module("optim"))))
    optimizer = names["build_optimizer"](project.module("optim").OptimConfig(), model)
    tensors = project.module("checkpoint.tensors")
    tensors.create_optimizer_state(optimizer)
    saved = {name for name, _, _ in tensors.optimizer_slots(model, optimizer)}
    adam = {f"bias.{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    assert saved == {"weight.momentum_buffer"} | adam
    state = project.module("train").setup(project.config(optim__name="muon"))
    tensors.create_optimizer_state(state.optimizer)
    names = {name for name, _, _ in tensors.optimizer_slots(state.model, state.optimizer)}
    assert names and not any(name.startswith("param_groups") for name in names)


def test_several_optimizers_obey_the_groups_that_were_loaded(project: Project) -> None:
    """`load_state_dict` makes new groups and a new state: the rates of these are what counts."""
    model = torch.nn.Linear(2, 2)
    exec(recipe("python", "class Several"), names := dict(vars(project.module("optim"))))
    optimizer = names["build_optimizer"](project.module("optim").OptimConfig(), model)
    optimizer.load_state_dict(optimizer.state_dict())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter, rate in ((model.weight, 0.0), (model.bias, 0.1)):
        parameter.grad = torch.ones_like(parameter)
        for group in optimizer.param_groups:
            if group["params"][0] is parameter:
                group["lr"] = rate
    optimizer.step()
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert changed == [False, True] and len(optimizer.state) == 2


def test_a_rate_falls_when_validations_do_not_improve(
    project: Project, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the recipe; a resume keeps the rate that it has come to."""
    exec(recipe("python", "class Plateau"), names := {"Any": Any})
    rates: list[float] = []

    class Worse(names["Plateau"]):
        """Sees losses that get worse."""

        def after_validation(self, state: Any, figures: dict[str, float]) -> None:
            super().after_validation(state, {"validation_loss": float(state.step)})

        def after_step(self, state: Any, record: Any) -> None:
            rates.append(state.optimizer.param_groups[0]["lr"])

    flat = {"optim__schedule": "constant", "optim__warmup_steps": 0, "train__validate_every": 1}
    for steps in (4, 8):  # the best is the first validation, then each second one is too many
        config = project.config(run_dir=tmp_path, train__steps=steps, **flat)
        project.module("train").run(config, [Worse()])
    assert [rates[0] / rate for rate in rates] == [1, 1, 1, 2, 2, 4, 4, 8]


def test_the_average_of_a_schedule_free_optimizer_is_validated_and_saved(
    project: Project, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it would be without; whether a run validates and saves changes no bit."""
    training, validated = project.module("train"), []

    def run(name: str, build: Any, every: int) -> Any:
        monkeypatch.setattr(training, "build_optimizer", build)
        states = []

        def after_validation(state: Any, figures: Any) -> None:
            validated[:] = [p.detach().clone() for p in state.model.parameters()]

        callback = SimpleNamespace(
            after_step=lambda state, record: states.append(state), after_validation=after_validation
        )
        changes = {"checkpoint__every": every, "train__validate_every": every}
        config = project.config(run_dir=tmp_path / name, train__steps=7, **changes)
        training.run(config, [callback])
        return states[-1]

    def never_turned(config: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = ScheduleFree(model.parameters(), lr=config.learning_rate)
        optimizer.turn(True, 0.1)
        return optimizer

    rarely, often = (run(f"each_{n}", schedule_free, n) for n in (0, 1))
    assert not often.optimizer.param_groups[0]["train_mode"]
    saved = project.tensors(tmp_path / "each_1")
    for name, p in often.model.named_parameters():
        for same in (rarely.model.get_parameter(name), validated.pop(0), saved[f"model.{name}"]):
            assert torch.equal(p, same), name
    reference = run("reference", never_turned, 0)
    training_point = [p.detach().clone() for p in reference.model.parameters()]
    reference.optimizer.turn(False, 1 - 1 / 0.9)
    apart = []
    for p, q, y in zip(
        often.model.parameters(), reference.model.parameters(), training_point, strict=True
    ):
        assert torch.allclose(p, q, atol=1e-6), (p - q).abs().max()
        apart.append((p - y).abs().max().item())
    assert max(apart) > 1e-4  # what is saved is not what is trained


def test_complex_weights_have_no_fused_kernel(project: Project) -> None:
    optim, model = project.module("optim"), torch.nn.Linear(2, 2)
    adamw = optim.OptimConfig(name="adamw")
    assert optim.build_optimizer(adamw, model).defaults["fused"]
    model.phase = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    optimizer = optim.build_optimizer(adamw, model)
    assert not optimizer.defaults["fused"]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_the_rate_warms_up_to_its_peak_and_decays_to_its_end(project: Project) -> None:
    optim, schedule = project.module("optim"), project.module("schedule")
    config = optim.OptimConfig(learning_rate=0.1, warmup_steps=20, final_fraction=0.1)
    rates = [schedule.learning_rate(config, step, 100) for step in range(101)]
    assert rates[:20] == pytest.approx([0.1 * (step + 1) / 20 for step in range(20)])
    assert max(rates) == 0.1 and rates[100] == pytest.approx(0.01)
    assert rates[20:] == sorted(rates[20:], reverse=True)


def test_each_schedule_falls_in_its_own_way(project: Project) -> None:
    """WSD: the rates before the decay are the same in a longer run, so it can be prolonged."""
    optim, schedule = project.module("optim"), project.module("schedule")

    def rates(name: str, steps: int, **more: float) -> list[float]:
        config = optim.OptimConfig(1.0, name, 10, 0.1, **more)
        return [schedule.learning_rate(config, step, steps) for step in range(steps + 1)]

    assert rates("constant", 60)[10:] == [1.0] * 51
    assert rates("linear", 60)[10::25] == pytest.approx([1.0, 0.55, 0.1])
    assert rates("cosine", 60)[10::25] == pytest.approx([1.0, 0.55, 0.1])
    assert rates("cosine", 60)[22] > rates("linear", 60)[22] > rates("cosine", 60)[48]
    short, long = rates("wsd", 60), rates("wsd", 110)
    falling = [1.0 - 0.09 * step for step in range(11)]
    assert short[10:51] == pytest.approx([1.0] * 41) and short[50:] == pytest.approx(falling)
    assert long[:51] == pytest.approx(short[:51]) and long[90:111:20] == pytest.approx([1.0, 0.1])
    assert rates("wsd", 60, decay_share=1.0) == rates("linear", 60)
    for each in (short, long):
        assert each[:10] == pytest.approx([0.1 * n for n in range(1, 11)])


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


class PassesOn(torch.optim.AdamW):
    """Passes its arguments on without naming them."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)


def test_settings_that_a_class_passes_on_are_no_state(project: Project) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = PassesOn(model.parameters(), lr=0.1, weight_decay=0.2, eps=1e-6)
    slots = project.module("checkpoint.tensors").optimizer_slots(model, optimizer)
    assert not [name for name, _, _ in slots if name.startswith("param_groups")]


def test_parameters_that_the_optimizer_lacks_are_named(
    project: Project, caplog: pytest.LogCaptureFixture
) -> None:
    check = project.module("loss").check_optimizer
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    check(optimizer, model)
    assert "2 trainable parameters are not in the optimizer, such as 0.weight" in caplog.text
    caplog.clear()
    model[0].requires_grad_(False)
    check(optimizer, model)
    assert not caplog.text


def test_a_run_names_the_parameters_that_its_optimizer_lacks(
    project: Project, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def of_the_norms(config: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], lr=0.1)

    training = project.module("train")
    monkeypatch.setattr(training, "build_optimizer", of_the_norms)
    training.setup(project.config())
    assert "trainable parameters are not in the optimizer" in caplog.text


def test_an_optimizer_without_any_gradient_is_refused(
    project: Project, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(config: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)

    training = project.module("train")
    monkeypatch.setattr(training, "build_optimizer", other)
    with pytest.raises(project.module("errors").UserError, match="no parameter in the optimizer"):
        training.run(project.config(run_dir=tmp_path, train__steps=2))


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_trained_may_change_on_a_single_rank_alone(project: Project, size: int) -> None:
    """DDP and FSDP would not reduce the gradient of what is unfrozen during a run."""
    error = project.module("errors").UserError
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world = SimpleNamespace(size=size, rank=0)
    state = SimpleNamespace(model=model, optimizer=optimizer, world=world)
    callback = project.module("run.model_state").ModelState(state)
    callback.before_step(state)
    model[1].weight.requires_grad_(False)
    if size == 1:
        callback.before_step(state)
    else:
        with pytest.raises(error, match=r"^1\.weight was frozen or unfrozen"):
            callback.before_step(state)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    with pytest.raises(error, match="added to or removed from the optimizer"):
        callback.before_step(state)
