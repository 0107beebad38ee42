"""A step, its schedule and its samples are compared with a plain computation.

The tests use your model, data, loss and optimizer. If a property cannot hold for these, or cannot
be checked, the test is skipped with the reason.
"""

import dataclasses
import math
import random
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Recorder, contents, random_state, same, tiny, weights_of

from {{ cookiecutter.package_name }} import train as training
from {{ cookiecutter.package_name }}.collate import owner_of
from {{ cookiecutter.package_name }}.config import override
from {{ cookiecutter.package_name }}.data import build_datasets
from {{ cookiecutter.package_name }}.distributed import World
from {{ cookiecutter.package_name }}.ema import averaged_weights
from {{ cookiecutter.package_name }}.model import build_model, compute_loss
from {{ cookiecutter.package_name }}.sampling import STEP, MicroBatch, seed_random
from {{ cookiecutter.package_name }}.schedule import ScheduleConfig, learning_rate
from {{ cookiecutter.package_name }}.train import setup, train_step

CPU = torch.device("cpu")
# A gradient this small relative to the largest one is a rounding error of 0, as for the bias of
# keys in attention. Adam makes full-size steps of it, which differ from run to run.
ROUNDING = 1e-5


def gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients of all parameters that have one."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [p.grad for p in parameters if p.grad is not None]


def norm_of(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Return the norm of all gradients together."""
    return torch.nn.utils.get_total_norm(gradients(optimizer))


def test_the_loop_does_what_a_plain_one_does() -> None:
    """This covers accumulation, scaling, clipping, schedule, random numbers and sums.

    `state` takes steps with `train_step`; `plain` starts equal and takes them by hand. The batch of
    8 is accumulated from uneven micro-batches of 3, 3 and 2 samples. The warm-up ends after 3 of 9
    steps.
    """
    schedule = {"train__steps": 9, "optim__warmup_steps": 3, "optim__final_fraction": 0.1}
    settings = tiny(Path("unused"), train__micro_batch_size=3, **schedule)
    state, plain = setup(settings), setup(settings)
    # A schedule-free optimizer has `train` and `eval`.
    schedule_free: Any = plain.optimizer if hasattr(plain.optimizer, "eval") else None
    # The norms of the gradients that the optimizer of `state` gets: scaled and clipped.
    given: list[torch.Tensor] = []
    state.optimizer.register_step_pre_hook(lambda optimizer, *_: given.append(norm_of(optimizer)))
    # For each element of each parameter, its largest gradient in any step.
    largest: dict[str, torch.Tensor] = {}
    # The sums of losses and counts over all steps so far, as in `state.sums`.
    losses, samples = 0.0, 0.0
    clip = 0.0
    for step in range(9):
        # Compute the gradient of (sum of all losses) / (sum of all counts).
        batches = plain.loader.next()
        seed_random(settings.train.seed, STEP, step, 0, device=CPU)
        if schedule_free:
            schedule_free.train()
        count = 0.0
        for batch in batches:
            loss = compute_loss(plain.model, batch)
            loss.total.backward()
            losses += loss.total.item()
            count += float(loss.count)
        samples += count
        for gradient in gradients(plain.optimizer):
            gradient /= count
        norm = float(norm_of(plain.optimizer))
        # Set in the first step: it is smaller than that gradient, and maybe larger than later ones.
        clip = clip or 0.7 * norm
        factor = min(1.0, clip / norm)
        for gradient in gradients(plain.optimizer):
            gradient *= factor
        for name, p in plain.model.named_parameters():
            if p.grad is not None:
                largest[name] = torch.maximum(largest.get(name, p.grad.abs() * 0), p.grad.abs())
        for group in plain.optimizer.param_groups:
            rate = learning_rate(settings.optim, step, settings.train.steps)
            group["lr"] = rate * group.get("rate_factor", 1.0)
        plain.optimizer.step()
        if schedule_free:
            schedule_free.eval()
        plain.optimizer.zero_grad()

        state.config = override(settings, {"optim.clip": clip})
        train_step(state, state.loader.next())
        seen = [*torch.as_tensor(state.sums)[:2].tolist(), float(state.grad_norm), float(given[-1])]
        assert seen == pytest.approx([losses, samples, norm, factor * norm], rel=1e-3)
        rates = [[g["lr"] for g in each.optimizer.param_groups] for each in (state, plain)]
        assert rates[0] == pytest.approx(rates[1])
        assert state.step == step + 1 and not gradients(state.optimizer)
    bound = ROUNDING * max(float(each.max()) for each in largest.values() if each.numel())
    for name, p in plain.model.named_parameters():
        # Compare the elements with a real gradient, and all elements of parameters without one.
        visible = largest.get(name, torch.ones(p.shape)) > bound
        of_state = state.model.get_parameter(name)
        same({name: of_state[visible]}, {name: p[visible]}, near=1e-4)
    same(dict(state.model.named_buffers()), dict(plain.model.named_buffers()), near=1e-4)


def test_data_and_weights_are_drawn_from_the_seed(monkeypatch) -> None:
    """Earlier random numbers of torch, NumPy or Python do not matter."""
    # The states of the generators when the data is built: for seed 0, seed 0 again, and seed 1.
    states = []

    def note_state(settings: Any) -> Any:
        states.append(random_state())
        return build_datasets(settings)

    monkeypatch.setattr(training, "build_datasets", note_state)
    weights = []
    for seed in (0, 0, 1):
        # Advance all generators, so that each setup starts from another state.
        torch.rand(()), np.random.rand(), random.random()
        weights.append(weights_of(setup(tiny(Path("unused"), train__seed=seed))))
    assert states[0] == states[1] != states[2]
    same(weights[0], weights[1])


def test_a_micro_batch_of_weight_0_adds_nothing() -> None:
    """A rank without samples takes one with weight 0, since all ranks must take part."""
    states = []
    for weights in ([1.0], [1.0, 0.0]):
        state = setup(tiny(Path("unused"), optim__clip=0.0))
        state.plan = [MicroBatch(slice(0, 4), weight) for weight in weights]
        train_step(state, state.loader.of(0, state.plan))
        states.append(state)
    one, padded = states
    same({"sums": padded.sums}, {"sums": one.sums})
    assert float(padded.grad_norm) == pytest.approx(float(one.grad_norm))


def test_random_numbers_of_a_step_are_of_its_seed_number_and_rank(monkeypatch) -> None:
    """A step draws the same numbers again, and other ones with another seed, step or rank."""
    state = setup(tiny(Path("unused")))
    # One number for each micro-batch of each trial below.
    batches, drawn = state.loader.next(), []

    def draw(model: torch.nn.Module, batch: Any) -> Any:
        drawn.append(float(torch.rand(())))
        return compute_loss(model, batch)

    monkeypatch.setattr(training, "compute_loss", draw)
    for seed, step, rank in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)]:
        config = override(state.config, {"train.seed": seed})
        world = World(rank=rank, size=1, device=CPU)
        other = dataclasses.replace(state, config=config, step=step, world=world)
        train_step(other, batches)
    # The first and the last trial are the same; apart from that, no number repeats.
    each = len(batches)
    assert drawn[:each] == drawn[-each:]
    assert len({*drawn}) == len(drawn) - each


def test_a_step_changes_all_that_has_a_gradient() -> None:
    """The optimizer has each trained parameter once, and changes exactly those with a gradient."""
    state = setup(tiny(Path("unused"), optim__warmup_steps=0))
    parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
    trained = [p for p in state.model.parameters() if p.requires_grad]
    optimized = {*map(id, parameters)}
    assert optimized == {*map(id, trained)}, "the optimizer has other parameters than are trained"
    assert len({*map(id, parameters)}) == len(parameters), "a parameter is in two groups"
    # The largest element of each parameter's gradient, as the optimizer gets it.
    largest: dict[str, float] = {}

    def look(*_: Any) -> None:
        for name, p in state.model.named_parameters():
            if p.grad is not None and p.numel():
                largest[name] = float(p.grad.abs().max())

    state.optimizer.register_step_pre_hook(look)
    before = weights_of(state)
    for _ in range(2):
        train_step(state, state.loader.next())
    after = weights_of(state)
    for name, size in largest.items():
        if size > ROUNDING * max(largest.values()):
            assert not torch.equal(after[name], before[name]), f"{name} does not change"
    for name in before.keys() - largest.keys():
        assert torch.equal(after[name], before[name]), f"{name} changes without a gradient"


def test_a_step_that_is_not_finite_is_skipped(monkeypatch) -> None:
    """A bad step changes no weight, buffer, average or sum, and the next step trains again.

    The buffer `calls` counts forwards, so it is one that a bad step must restore.
    """

    def count_calls(model: torch.nn.Module, *_: Any) -> None:
        model.get_buffer("calls").add_(1)

    def build_with_buffer(*arguments: Any) -> torch.nn.Module:
        model = build_model(*arguments)
        model.register_buffer("calls", torch.zeros(()))
        model.register_forward_pre_hook(count_calls)
        return model

    monkeypatch.setattr(training, "build_model", build_with_buffer)
    state = setup(tiny(Path("unused"), optim__clip=1.0, optim__ema=0.5))
    train_step(state, state.loader.next())
    before = {name: each.clone() for name, each in state.model.state_dict().items()}
    with averaged_weights(state.model, state.optimizer):
        average = weights_of(state)
    sums = torch.as_tensor(state.sums).clone()
    hooks = []
    for p in state.model.parameters():
        if p.requires_grad:
            hooks.append(p.register_hook(lambda gradient: gradient * torch.nan))
    train_step(state, state.loader.next())
    for hook in hooks:
        hook.remove()
    assert int(state.bad_steps) == 1
    same(dict(state.model.state_dict()), before)
    same({"sums": torch.as_tensor(state.sums)}, {"sums": sums})
    with averaged_weights(state.model, state.optimizer):
        same(weights_of(state), average)
    train_step(state, state.loader.next())
    after = state.model.state_dict()
    assert any(not torch.equal(after[name], before[name]) for name in weights_of(state))


def test_a_step_with_its_flag_set_changes_nothing() -> None:
    """The flag is `found_inf`. A fused optimizer reads it on the device, without the host."""
    state = setup(tiny(Path("unused"), optim__ema=0.5))
    optimizer: Any = state.optimizer
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        pytest.skip("not applicable: the host decides whether this optimizer steps")
    # After two steps, average and weights differ.
    for _ in range(2):
        train_step(state, state.loader.next())
    before = weights_of(state)
    with averaged_weights(state.model, optimizer):
        average = weights_of(state)
    optimizer.found_inf = torch.ones(())
    for p in state.model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    same(weights_of(state), before)
    with averaged_weights(state.model, optimizer):
        same(weights_of(state), average)


def library_line(error: BaseException) -> str:
    """Return the line of a library that raised an error; "" if this project raised it."""
    project = Path(training.__file__).parent
    torch_folder = Path(torch.__file__).parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(project):
            return ""
        # Skip torch's private modules (torch/_…): the public line that called them says more.
        inside = path.relative_to(torch_folder) if path.is_relative_to(torch_folder) else path
        if inside.parts[0].startswith("_"):
            continue
        return f"{path}:{frame.lineno}"
    return ""


def test_a_step_reads_no_value_on_the_host(monkeypatch) -> None:
    """`if tensor`, .item() or float() would wait for a GPU; on `meta` they raise an error."""
    # With an optimizer that is not fused, `step_unless` reads whether the step is bad. That wait is
    # known, so leave it out.
    monkeypatch.setattr(training, "step_unless", lambda bad, optimizer: optimizer.step())
    # The first step checks the result of compute_loss, and may read values for that.
    first = setup(tiny(Path("unused")))
    train_step(first, first.loader.next())
    state = setup(tiny(Path("unused")), World(rank=0, size=1, device=torch.device("meta")))
    # Continue after the first step, without the checks of its result.
    state.metrics, state.step = first.metrics, first.step
    try:
        train_step(state, state.loader.next())
    except (RuntimeError, NotImplementedError) as error:
        line = library_line(error)
        if line:
            pytest.skip(f"not applicable: a library reads a value, or cannot run: {line}: {error}")
        is_read = "item()" in str(error) or "copy out of meta" in str(error)
        if isinstance(error, NotImplementedError) and not is_read:
            pytest.skip(f"not applicable: an operator does not run on `meta`: {error}")
        raise
    assert state.step == 2


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        # The rates at step 0 (a quarter of the peak), 3 (the last of 4 warm-up steps), 4, 8 (half
        # of the decay) and 12 (the end: a tenth of the peak, except for constant).
        ("cosine", [0.5, 2.0, 2.0, 1.1, 0.2]),
        ("linear", [0.5, 2.0, 2.0, 1.1, 0.2]),
        ("wsd", [0.5, 2.0, 2.0, 2.0, 0.2]),
        ("constant", [0.5, 2.0, 2.0, 2.0, 2.0]),
    ],
    ids=("cosine", "linear", "wsd", "constant"),
)
def test_the_rate_warms_up_then_falls_as_its_schedule_says(schedule: Any, rates: list) -> None:
    # The peak is 2.0. wsd falls in the last half of the 8 steps after the warm-up.
    config = ScheduleConfig(2.0, schedule, warmup_steps=4, final_fraction=0.1, decay_share=0.5)
    assert [learning_rate(config, step, 12) for step in (0, 3, 4, 8, 12)] == pytest.approx(rates)
    # At step 6 a quarter of the decay is over: there, cosine and linear differ. The other schedules
    # are still at the peak.
    early = learning_rate(config, 6, 12)
    expected = {"cosine": 2.0 - 1.8 * (1 - np.cos(np.pi / 4)) / 2, "linear": 1.55}
    assert early == pytest.approx(expected.get(schedule, 2.0))


def test_epochs_and_overfit_count_samples() -> None:
    """`epochs` becomes a number of steps, rounded up; `overfit` keeps a few batches of samples."""
    state = setup(tiny(Path("unused")))
    if not hasattr(state.loader.source.dataset, "__len__"):
        pytest.skip("not applicable: a stream has no number of samples")
    size, batch = len(state.loader.source.dataset), state.config.train.global_batch_size
    steps = setup(tiny(Path("unused"), train__epochs=1.5)).config.train.steps
    assert steps == math.ceil(1.5 * size / batch)
    few = setup(tiny(Path("unused"), train__overfit=2)).loader.source.dataset
    assert len(few) == min(size, 2 * batch)


def test_other_steps_read_other_samples() -> None:
    """A step reads the samples given by the order, and the same ones again in another run."""
    state = setup(tiny(Path("unused")))
    if hasattr(state.loader, "stream"):
        pytest.skip("not applicable: a stream is read in its own order")
    dataset, order = state.loader.source.dataset, state.loader.source.order
    recorder = Recorder(dataset, len(dataset), state.model)
    first = [contents(batch) for batch in state.loader.of(0, state.plan)]
    again = [contents(batch) for batch in setup(state.config).loader.next()]
    for values, others in zip(first, again, strict=True):
        for a, b in zip(values, others, strict=True):
            assert np.array_equal(a, b)
    # The loader calls the dataset's `augment`, if it has one. So the recorder needs it, too.
    augmenting = owner_of("augment", dataset)
    if augmenting is not None:
        recorder.augment = augmenting.augment
    state.loader.source.dataset = recorder
    for step in range(3):
        recorder.ids.clear()
        state.loader.next()
        assert recorder.ids == order.ids(step).tolist()
