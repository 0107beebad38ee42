"""What a run keeps and notices of the user's model: modes, what is trained, state in forward."""

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Project, bake, drill, project_fixture

ANSWERS = {"parallelism": "single", "checkpoint": "torch_save", "tracker": "none"}
project = project_fixture("model_state", **ANSWERS)
images = project_fixture("model_state_of_images", task="image_classifier", **ANSWERS)


class Changed:
    """A GPT that was changed by `build_model`."""

    def __init__(self, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        self.project = project
        self.train = project.module("train")
        self.build = self.train.build_model
        self.monkeypatch = monkeypatch
        self.modes: list[dict[str, bool]] = []

    def after_step(self, state: Any, record: Any) -> None:
        """Note the modes of a step."""
        self.modes.append({name: each.training for name, each in state.model.named_modules()})

    def run(self, change: Any, run_dir: Path, **settings: Any) -> Any:
        """Train it."""

        def build(config: Any, spec: Any) -> nn.Module:
            model = self.build(config, spec)
            change(model)
            return model

        self.monkeypatch.setattr(self.train, "build_model", build)
        changes = {"train__steps": 4, "train__validate_every": 2} | settings
        return self.train.run(self.project.config(run_dir=run_dir, **changes), [self])


@pytest.fixture
def changed(project: Project, monkeypatch: pytest.MonkeyPatch) -> Changed:
    return Changed(project, monkeypatch)


class Merging(nn.Module):
    """A layer with an adapter that eval() adds to its weights, and train() takes out (loralib)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.merged = layer, False
        self.layer.weight.requires_grad_(False)
        self.adapter = nn.Parameter(torch.zeros_like(layer.weight))

    def train(self, mode: bool = True) -> "Merging":
        """Move the adapter."""
        super().train(mode)
        if mode == self.merged:
            self.layer.weight.data += -self.adapter.data if mode else self.adapter.data
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Once with the adapter."""
        y = self.layer(x)
        return y if self.merged else y + nn.functional.linear(x, self.adapter)


def test_an_adapter_is_trained_on_after_a_validation(changed: Changed, tmp_path: Path) -> None:
    """And only the adapter: the weights below it are what they were."""
    found = {}

    def adapt(model: Any) -> None:
        model.blocks[0].up = found["layer"] = Merging(model.blocks[0].up)
        found["before"] = found["layer"].layer.weight.clone()

    def after_step(state: Any, record: Any) -> None:
        adapters.append(found["layer"].adapter.detach().clone())

    adapters: list[Tensor] = []
    changed.after_step = after_step  # type: ignore[method-assign]
    changed.run(adapt, tmp_path / "run", train__validate_every=1)
    assert all(not torch.equal(*pair) for pair in itertools.pairwise(adapters))
    torch.testing.assert_close(found["layer"].layer.weight, found["before"])
    assert not found["layer"].merged


def test_parts_in_evaluation_mode_stay_so(
    changed: Changed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After validations and samples, too; a model that is in that mode as a whole is trained."""
    caplog.set_level(logging.INFO)

    def freeze_first_block(model: Any) -> None:
        model.blocks[0].eval()

    def override_train(model: Any) -> None:
        class Frozen(type(model)):
            def train(self, mode: bool = True) -> Any:
                super().train(mode)
                self.blocks[0].eval()
                return self

        model.__class__ = Frozen

    for change in (freeze_first_block, override_train):
        changed.modes.clear()
        caplog.clear()
        changed.run(change, tmp_path / change.__name__)
        assert len(changed.modes) == 4
        for modes in changed.modes:
            for name, training in modes.items():
                assert training == (not name.startswith("blocks.0")), name
        assert "modules kept in evaluation mode by model.py: blocks.0\n" in caplog.text

    class Stubborn(nn.Sequential):
        def train(self, mode: bool = True) -> "Stubborn":
            return super().train(False)

    caplog.clear()
    changed.project.module("run.model_state").begin_training(Stubborn(nn.Dropout()))
    assert "model.py keeps the whole model in evaluation mode" in caplog.text

    changed.modes.clear()
    changed.run(lambda model: model.eval(), tmp_path / "whole")
    assert all(all(modes.values()) for modes in changed.modes)


class Statistics(nn.Module):
    """Norm whose mean is None until the first forward, or not."""

    def __init__(self, width: int, late: bool) -> None:
        super().__init__()
        self.register_buffer("mean", None if late else torch.zeros(width))
        self.register_buffer("never", None)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.detach().mean((0, 1))
        return x - self.mean


def test_a_buffer_that_the_first_step_makes_is_refused(changed: Changed, tmp_path: Path) -> None:
    def change(late: bool) -> Any:
        return lambda model: setattr(model, "norm", Statistics(32, late))

    with pytest.raises(changed.project.module("errors").UserError, match=r"norm\.mean was None"):
        changed.run(change(True), tmp_path / "late")
    assert not [*(tmp_path / "late/checkpoints").glob("step_*")]
    assert changed.run(change(False), tmp_path / "early").step == 4


class Bank(nn.Module):
    """Keeps the mean of each step, in a buffer of so many rows that grows, or has room."""

    def __init__(self, width: int, persistent: bool, rows: int = 0, room: int = 0) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(room or rows, width), persistent=persistent)
        self.register_buffer("used", torch.zeros((), dtype=torch.long))
        self.room = room

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean((0, 1))
        if self.room:
            self.means[self.used] = mean
            self.used += 1
        elif self.training:
            self.means = torch.cat([self.means, mean[None]])
        return x


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_buffer_that_grows_is_refused(changed: Changed, tmp_path: Path, rows: int) -> None:
    """In one line, before anything is saved that could not be loaded."""

    def change(**bank: Any) -> Any:
        return lambda model: setattr(model, "norm", Bank(32, **bank))

    error = changed.project.module("errors").UserError
    # Two micro-batches in a step.
    grown = rf"buffer norm\.means has changed from \({rows}, 32\) to \({rows + 2}, 32\)"
    with pytest.raises(error, match=grown) as line:
        changed.run(change(persistent=True, rows=rows), tmp_path / "grows")
    assert "\n" not in str(line.value) and "its largest shape" in str(line.value)
    assert not [*(tmp_path / "grows/checkpoints").glob("step_*")]
    if rows:
        return
    assert changed.run(change(persistent=True, room=99), tmp_path / "room").step == 4
    assert changed.run(change(persistent=False), tmp_path / "not saved").step == 4


def test_python_values_that_forward_changes_are_named(
    changed: Changed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Counting(nn.Identity):
        """Keeps a number and a text, one of which changes."""

        calls = 0
        kind = "plain"

        def __init__(self) -> None:
            super().__init__()
            self.is_ready = False
            self.kind = "plain"

        def forward(self, x: Tensor) -> Tensor:
            self.is_ready = True
            return x

    changed.run(lambda model: setattr(model, "norm", Counting()), tmp_path / "run")
    warnings = [r.getMessage() for r in caplog.records if "Python attributes" in r.getMessage()]
    assert len(warnings) == 1
    assert "norm.is_ready (False -> True)" in warnings[0] and "kind" not in warnings[0]

    caplog.clear()
    changed.run(lambda model: None, tmp_path / "plain")
    assert "Python attributes" not in caplog.text


class Keeping(nn.Identity):
    """Keeps a value that it changes in each forward."""

    def __init__(self, kept: Any, change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.kept = kept
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.change(self.kept, x.detach())
        return x


def in_place(method: str, *arguments: Any) -> Callable[[Any, Tensor], Any]:
    """A change that calls a method of the value."""

    def change(kept: Any, x: Tensor) -> Any:
        getattr(kept, method)(*arguments)
        return kept

    return change


def counted(kept: np.ndarray, x: Tensor) -> np.ndarray:
    """Count in the first element."""
    kept[0] += 1
    return kept


# What a module keeps, how it changes it, and what the warning shows.
KEPT: dict[str, tuple[Any, Callable[[Any, Tensor], Any], str]] = {
    "a list": ([], in_place("append", 1.0), " (list of length 0 -> list of length "),
    "a dictionary": ({"calls": 0}, in_place("update", {"calls": 1}), " (dict of length 1)"),
    "a list in a dictionary": ({"at": [0]}, lambda kept, x: {"at": [1]}, " (dict of length 1)"),
    "an array": (np.zeros(3), counted, " (an array)"),
    "a number of numpy": (np.float32(1), lambda kept, x: kept / 2, " (np.float32(1.0) -> "),
    "an average": (torch.zeros(32), lambda kept, x: 0.9 * kept + x.mean((0, 1)), " (a tensor)"),
    "an average in place": (torch.zeros(32), in_place("mul_", 0.9), " (a tensor)"),
    "a queue of tensors": ([torch.zeros(2)], lambda kept, x: [x.mean()], " (list of length 1)"),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_forward_keeps_in_an_attribute_is_named(
    changed: Changed, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    kept, change, shown = KEPT[name]
    module = Keeping(kept, change)
    changed.run(lambda model: setattr(model, "norm", module), tmp_path / "run", train__steps=2)
    (warning,) = [r.getMessage() for r in caplog.records if "Python attributes" in r.getMessage()]
    assert f"not save: norm.kept{shown}" in warning
    assert "register them as buffers" in warning and "caches" in warning


def test_what_forward_leaves_alone_is_not_named(project: Project) -> None:
    """Attributes that stay equal, hold what checkpoints hold, or are computed from weights."""
    state = project.module("run.model_state")
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.LSTM(4, 4), nn.BatchNorm1d(4))
    model.batch_norm_statistics = [model[2].running_mean, model[2].running_var]
    model.sizes = {"width": 4, "table": np.arange(4), "nan": float("nan"), "all": {1, 2}}
    model.constant = torch.ones(4)
    model.large = np.zeros(state.MOST_BYTES + 1, np.uint8)
    model.many = [0] * (state.MOST_ITEMS + 1)
    model.itself = [model.many]
    model.itself.append(model.itself)
    before = state.python_attributes(model)
    model.sizes = {**model.sizes, "all": {2, 1}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    normed, _ = model[1](model[0](torch.randn(3, 4)))
    model[2](normed).pow(2).sum().backward()
    optimizer.step()
    assert state.changed_attributes(before, state.python_attributes(model)) == []
    model.sizes["width"] = 5
    changed = state.changed_attributes(before, state.python_attributes(model))
    assert changed == ["sizes (dict of length 4)"]


def test_models_of_libraries_are_not_named(project: Project) -> None:
    """A Llama of transformers, and with adapters of peft."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    state = project.module("run.model_state")
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(**sizes))
    adapted = get_peft_model(
        LlamaForCausalLM(LlamaConfig(**sizes)), LoraConfig(target_modules=["q_proj"])
    )
    for model in (llama, adapted):
        model.train()
        before = state.python_attributes(model)
        tokens = torch.arange(20).view(2, 10)
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert state.changed_attributes(before, state.python_attributes(model)) == []


def test_the_model_of_images_is_not_named(
    images: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = images.config(run_dir=tmp_path / "run", data__path=None, train__steps=2)
    assert images.module("train").run(config).step == 2
    assert "Python attributes" not in caplog.text


def test_a_metric_that_is_not_a_number_is_shown_and_named_once(
    changed: Changed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As the recall of a class that no validation sample has."""
    caplog.set_level(logging.INFO)
    for name in ("train", "validation"):
        module = changed.project.module(name)
        compute = module.compute_loss

        def with_recall(model: Any, batch: Any, compute: Any = compute) -> Any:
            loss = compute(model, batch)
            return loss._replace(metrics={"recall": (0.0, 0.0)})

        monkeypatch.setattr(module, "compute_loss", with_recall)
    changed.run(lambda model: None, tmp_path / "run", checkpoint__best="validation_recall")
    shown = [line for line in caplog.text.splitlines() if "validation at step" in line]
    assert len(shown) == 2 and all("recall nan" in line for line in shown)
    assert caplog.text.count("validation recall is nan at step 2") == 1
    assert "recall is nan at step 4" not in caplog.text


def test_ranks_notice_what_would_make_them_differ(tmp_path: Path) -> None:
    """Other orders of tensors, what is trained; and where one of them ends a run."""
    sources: dict[str, Path] = {}
    for parallelism in ("ddp", "fsdp"):
        name = f"state_{parallelism}"
        answers = {"parallelism": parallelism, "package_name": name, "tracker": "none"}
        sources[name] = bake(tmp_path / name, **answers) / "src"
    output = drill("model_state.py", (2, str(tmp_path), *sources), sources=sources)
    assert "noticed in state_ddp state_fsdp" in output
