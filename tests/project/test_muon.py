"""Muon: what it does to a matrix, to which it does it, and what of it is left undone.

That a whole run agrees with a loop by hand on any number of ranks is in test_reference.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import Project, project_fixture

project = project_fixture("muon_project", parallelism="single", checkpoint="dcp")
MUON = {"optim__name": "muon"}


@given(st.integers(1, 60), st.integers(1, 60), st.floats(1e-12, 1e12), st.integers(0, 2**30))
def test_singular_values_become_alike_and_directions_stay(
    project: Project, rows: int, columns: int, size: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    u, _ = torch.linalg.qr(torch.randn(rows, rows, generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(columns, columns, generator=generator, dtype=torch.float64))
    rank = min(rows, columns)
    values = torch.rand(rank, generator=generator, dtype=torch.float64) * 0.95 + 0.05
    matrix = (u[:, :rank] * values * size) @ v[:, :rank].T
    (result,) = project.module("optim").orthogonalized([matrix])
    turned = u[:, :rank].T @ result @ v[:, :rank]
    found = turned.diagonal() / (0.2 * max(rows, columns) ** 0.5)
    assert found.min() > 0.6 and found.max() < 1.25
    assert (turned - turned.diagonal().diag()).abs().max() < 1e-6 * turned.abs().max()
    # Of the size of AdamW's changes: 0.2 a weight.
    assert 0.6 < result.square().mean().sqrt() / 0.2 < 1.25


def test_it_has_the_matrices_of_the_blocks_and_no_other(project: Project) -> None:
    state = project.module("train").setup(project.config(**MUON))
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    # The number of matrices that one parameter holds, by name: q, k and v are three in one.
    own = {
        names[p]: group["matrices"]
        for group in state.optimizer.param_groups
        for p in group["params"]
        if group["matrices"]
    }
    matrices = {
        name: 3 if name.endswith(".qkv.weight") else 1
        for p, name in names.items()
        if p.ndim == 2 and name.startswith("blocks.")
    }
    assert own == matrices and "embedding.weight" in set(names.values()) - own.keys()
    listed = [p for group in state.optimizer.param_groups for p in group["params"]]
    assert len(listed) == len(set(listed)) == len(names)


def test_a_bad_step_changes_neither_weights_nor_state(project: Project) -> None:
    """Told on the device (`found_inf`), as for AdamW."""
    state = project.module("train").setup(project.config(**MUON))
    parameters = list(state.model.parameters())

    def step(bad: bool, gradient: float) -> list[torch.Tensor]:
        for p in parameters:
            p.grad = torch.full_like(p, gradient)
        state.optimizer.found_inf = torch.tensor(float(bad))
        state.optimizer.step()
        kept = [v for held in state.optimizer.state.values() for v in held.values()]
        return [tensor.detach().clone() for tensor in (*parameters, *kept)]

    before, bad, after = step(False, 1.0), step(True, float("nan")), step(False, 1.0)
    assert all(map(torch.equal, before, bad))
    assert not any(map(torch.equal, bad, after))


def test_more_layers_take_no_more_kernels(project: Project) -> None:
    """Matrices of one shape are one batch, in bfloat16, too; no copy is made of each."""
    model, optim = project.module("model"), project.module("optim")

    class Counted(TorchDispatchMode):
        kernels = 0

        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.kernels += f.namespace == "aten" and not f.is_view and "empty" not in f.name()
            return f(*args, **(kwargs or {}))

    def kernels(layers: int) -> int:
        gpt = model.GPT(model.ModelConfig(layers=layers, heads=2, width=32), 100, 16)
        optimizer = optim.build_optimizer(optim.OptimConfig(name="muon"), gpt)
        for p in gpt.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        with Counted() as counted:
            optimizer.step()
        return counted.kernels

    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            assert kernels(8) == kernels(2) < 150
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_memory_that_it_takes(project: Project) -> None:
    """One number a weight of the blocks' matrices, two of others, and one more for the average."""
    settings = project.config(**MUON, optim__ema=0.9)
    state, training = project.module("train").setup(settings), project.module("train")
    training.train_step(state, state.loader.next())
    matrices = {p for block in state.model.blocks for p in block.parameters() if p.ndim == 2}
    for parameter, held in state.optimizer.state.items():
        moments = sum(tensor.nbytes for tensor in held.values() if tensor.ndim)
        assert moments == (2 if parameter in matrices else 3) * parameter.nbytes


def test_a_resume_loses_no_state_unless_it_is_told_to(
    project: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run begun with AdamW goes on with Muon after --reset-optimizer, once and for all."""
    train, errors = project.module("train"), project.module("errors")

    def run(**changes: Any) -> Any:
        return train.run(project.config(run_dir=tmp_path / "run", **changes))

    run(train__steps=3, optim__name="adamw")
    before = project.tensors(tmp_path / "run")
    for changes in (MUON, MUON | {"optim__ema": 0.9}):
        with pytest.raises(errors.UserError) as refused:
            run(train__steps=6, **changes)
        said = str(refused.value)
        assert "optim.name: 'adamw' saved, muon now" in said
        assert "--reset-optimizer" in said and "exp_avg" in said
        assert "Resume with the saved settings: python -m" in said
    after = project.tensors(tmp_path / "run")
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    result = run(train__steps=6, reset_optimizer=True, **MUON)
    assert (result.status, result.step) == ("finished", 6)
    (said,) = [
        text for text in caplog.messages if "are not in the checkpoint and start afresh" in text
    ]
    assert said.endswith(".momentum_buffer")
    # A launcher that restarts this command must not forget the new state.
    caplog.clear()
    run(train__steps=9, reset_optimizer=True, **MUON)
    assert not [text for text in caplog.messages if "start afresh" in text]
    with pytest.raises(errors.UserError, match="momentum_buffer"):
        run(train__steps=12, optim__name="adamw")


def test_freezing_more_is_refused_until_it_is_told_to(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of what no longer trains is lost, its weights are not."""
    train = project.module("train")
    train.run(project.config(run_dir=tmp_path / "run", train__steps=3, **MUON))
    before = project.tensors(tmp_path / "run")
    build = train.build_model

    def frozen(*given: Any) -> Any:
        model = build(*given)
        model.embedding.weight.requires_grad_(False)
        return model

    monkeypatch.setattr(train, "build_model", frozen)
    changes = {"run_dir": tmp_path / "run", "train__steps": 6} | MUON
    with pytest.raises(project.module("errors").UserError, match=r"embedding\.weight"):
        train.run(project.config(**changes))
    assert train.run(project.config(**changes, reset_optimizer=True)).step == 6
    after = project.tensors(tmp_path / "run")
    assert torch.equal(after["model.embedding.weight"], before["model.embedding.weight"])
    assert not torch.equal(after["model.norm.weight"], before["model.norm.weight"])


def test_what_loses_no_state_needs_no_word(project: Project, tmp_path: Path) -> None:
    """Another rate, decay, schedule or length, and an average that begins or ends."""
    train = project.module("train")
    changes: list[dict[str, Any]] = [{"optim__learning_rate": 1e-4}, {"optim__weight_decay": 0.0}]
    changes += [{"optim__ema": 0.9}, {"optim__schedule": "wsd"}, {"optim__momentum": 0.5}]
    for steps, change in enumerate([{}, *changes], 2):
        settings = {"run_dir": tmp_path / "run", "train__steps": steps} | MUON | change
        assert train.run(project.config(**settings)).step == steps


@pytest.mark.parametrize("setting", ["momentum", "beta1", "beta2"])
def test_what_cannot_be_a_momentum_is_refused(project: Project, setting: str) -> None:
    for value in (-0.1, 1.0):
        with pytest.raises(project.module("errors").UserError, match="momentum"):
            project.module("optim").OptimConfig(**{setting: value})
