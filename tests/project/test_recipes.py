"""The recipes of docs/guides/ that end at a validation or in another program."""

import base64
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.metrics import r2_score, roc_auc_score

from tests.conftest import ROOT, Project, bake, project_fixture, recipe, records, run

ANSWERS = {"parallelism": "single", "checkpoint": "torch_save", "tracker": "none"}
text = project_fixture("text_recipes", **ANSWERS)
image = project_fixture("image_recipes", **ANSWERS, task="image_classifier")


def classes(project: Project, *words: str) -> dict[str, Any]:
    """What stands in the recipes, with what a project's callbacks.py has at hand."""
    names = {"Any": Any, "Path": Path, "np": np, "torch": torch, "roc_auc_score": roc_auc_score}
    names |= {"__package__": project.name, "fetch": project.module("sampling").fetch}
    names |= {"move": project.module("device").move}
    names["__name__"] = f"{project.name}.callbacks"  # for its relative import
    for word in words:
        exec(recipe("python", f"class {word}"), names)
    return names


def test_a_metric_over_the_whole_validation_and_early_stopping_by_it(
    image: Project, tmp_path: Path
) -> None:
    """AUC of a perfect model is 1; early stopping sees what the callback before it adds."""
    names = classes(image, "Auc", "EarlyStopping")

    class Stopping(names["EarlyStopping"]):
        """Stops by another figure."""

        def after_validation(self, state: Any, figures: dict[str, float]) -> None:
            super().after_validation(state, {"validation_loss": -figures["auc"]})

    train = image.module("train")
    settings = {"data__path": None, "train__validate_every": 5, "optim__learning_rate": 0.0001}
    config = image.config(run_dir=tmp_path / "run", train__steps=20, **settings)
    train.run(config, [names["Auc"](), Stopping()])
    values = [r["validation_auc"] for r in records(tmp_path / "run") if "validation_auc" in r]
    assert len(values) >= 2 and all(0 < value < 1 for value in values)
    state = train.setup(config)
    labels = state.validation.__getitems__([*range(len(state.validation))])["labels"]
    classes_there = 10
    size = config.train.micro_batch_size

    def knows_all(images: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(next(answers), classes_there).float()

    answers = iter(labels.split(size))

    state.module.forward = knows_all
    frozen = next(state.module.children()).eval()
    names["Auc"]().after_validation(state, figures := {})
    assert figures["auc"] == pytest.approx(1.0)
    assert state.module.training and not frozen.training
    classes_there, read = 2, type(state.validation).__getitems__

    def two(data: Any, ids: list[int]) -> dict[str, torch.Tensor]:
        batch = read(data, ids)
        return batch | {"labels": batch["labels"] % 2}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(state.validation), "__getitems__", two)
        answers = iter((labels % 2).split(size))
        names["Auc"]().after_validation(state, figures := {})
    assert figures["auc"] == pytest.approx(1.0)


def test_data_from_two_arrays(
    image: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains, resumes, and refuses other arrays."""
    monkeypatch.chdir(tmp_path)
    images = np.random.default_rng(0).random((60, 3, 8, 8), np.float32)
    np.save("images.npy", images)
    np.save("labels.npy", np.arange(60) % 4)
    data = image.module("data")
    exec(recipe("python", "class Arrays"), names := dict(vars(data)))
    train = image.module("train")
    monkeypatch.setattr(train, "build_datasets", names["build_datasets"])
    changes = {"run_dir": tmp_path / "run", "data__path": None}
    for steps in (3, 6):
        assert train.run(image.config(**changes, train__steps=steps)).step == steps
    assert "54 samples, 6 for validation" in (tmp_path / "run/logs/train.log").read_text()
    np.save("images.npy", images + 1)
    with pytest.raises(image.module("errors").UserError, match="data"):
        train.run(image.config(**changes, train__steps=9))


def test_a_second_validation_set(image: Project, tmp_path: Path) -> None:
    names = classes(image, "Other")
    config = image.config(run_dir=tmp_path / "run", data__path=None, train__steps=5)
    training, _, _ = image.module("data").build_datasets(config)
    seen: list[dict[str, float]] = []

    class Last:
        """Sees the figures of all."""

        def after_validation(self, state: Any, figures: dict[str, float]) -> None:
            seen.append(dict(figures))

    validation = image.module("data").build_datasets(config)[1]
    others = [names["Other"]("seen", training), names["Other"]("same", validation)]
    image.module("train").run(config, [*others, Last()])
    *_, last = records(tmp_path / "run")
    assert last["validation_seen_loss"] == seen[-1]["seen_loss"] != last["validation_loss"]
    assert last["validation_same_loss"] == last["validation_loss"]
    assert "validation_seen_accuracy" in last


def test_padding_changes_no_loss(text: Project) -> None:
    """A padded batch has the sum and the count of its sequences one by one."""
    model = text.module("model")
    names = dict(vars(model))
    exec(recipe("python", "ignore_index=-1"), names)
    names |= {"pad_sequence": torch.nn.utils.rnn.pad_sequence}
    exec(f"class Data:\n{recipe('python', 'pad_sequence')}", names)
    data = names["Data"]()
    drawn = np.random.default_rng(0)
    data.sequences = [drawn.integers(0, 256, size) for size in (5, 17, 9)]
    config = text.config()
    network = model.build_model(config, text.module("data").build_datasets(config)[2])
    together = names["compute_loss"](network, data.__getitems__([0, 1, 2]))
    alone = [names["compute_loss"](network, data.__getitems__([i])) for i in range(3)]
    assert together.count == sum(loss.count for loss in alone) == 4 + 16 + 8
    torch.testing.assert_close(together.total, sum(loss.total for loss in alone))
    names["Tensor"] = torch.Tensor
    exec(recipe("python", "class Sequences"), names)
    by_sample = names["Sequences"]()
    by_sample.sequences = data.sequences
    collated = by_sample.collate([by_sample[i] for i in range(3)])
    assert torch.equal(collated["tokens"], data.__getitems__([0, 1, 2])["tokens"])


def test_lora_trains_its_addition_only(
    text: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the weights of a run, exactly through a resume."""
    train, model = text.module("train"), text.module("model")
    train.run(text.config(run_dir=tmp_path / "base", train__steps=2))
    exec(recipe("python", "class Lora"), names := dict(vars(model)))
    monkeypatch.setattr(train, "build_model", names["build_model"])
    changes = {"run_dir": tmp_path / "lora", "init_from": tmp_path / "base"}
    for steps in (2, 4):
        train.run(text.config(**changes, train__steps=steps))
    before, after = text.tensors(tmp_path / "base"), text.tensors(tmp_path / "lora")
    weights = [name for name in before if name.startswith("model.")]
    assert weights and all(torch.equal(before[name], after[name]) for name in weights)
    added = {
        name: t for name, t in after.items() if name.startswith("model.blocks.0.attention.qkv.")
    }
    assert added.keys() - before.keys() == {
        f"model.blocks.0.attention.qkv.{name}" for name in ("up", "down")
    }
    assert after["model.blocks.0.attention.qkv.up"].abs().sum() > 0


def test_a_gan_in_one_backward(text: Project) -> None:
    """The generator gets the gradient that raises the loss; the discriminator, that lowers it."""
    exec(recipe("python", "class Reverse"), names := {**vars(text.module("model")), "NOISE": 3})
    torch.manual_seed(0)
    generator, discriminator = torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)
    gan = names["GAN"](generator, discriminator)
    real = torch.randn(5, 2)
    torch.manual_seed(1)
    loss = names["compute_loss"](gan, real)
    loss.total.backward()
    assert loss.count == 10

    torch.manual_seed(1)
    fake = generator(torch.randn(5, 3))
    scores = torch.nn.functional.logsigmoid(torch.cat([discriminator(real), -discriminator(fake)]))
    of_generator, of_discriminator = torch.autograd.grad(
        -scores.sum(), (generator.weight, discriminator.weight)
    )
    torch.testing.assert_close(generator.weight.grad, -of_generator)
    torch.testing.assert_close(discriminator.weight.grad, of_discriminator)


def test_rates_by_layer(text: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, optim = text.module("train"), text.module("optim")
    exec(recipe("python", "0.8 ** below"), names := dict(vars(optim)))
    monkeypatch.setattr(train, "build_optimizer", names["build_optimizer"])
    state = train.setup(config := text.config(run_dir=tmp_path, train__steps=3))
    train.train_step(state, state.loader.next())
    rates = {p: group["lr"] for group in state.optimizer.param_groups for p in group["params"]}
    top = rates[state.model.embedding.weight]
    layers = [rates[block.up.weight] / top for block in state.model.blocks]
    assert layers == pytest.approx([0.8 ** (len(layers) - i) for i in range(len(layers))])
    for group in state.optimizer.param_groups:
        decays = {config.optim.weight_decay if p.ndim >= 2 else 0.0 for p in group["params"]}
        assert {group["weight_decay"]} == decays
    assert train.run(config).step == 3  # which saves, by names


def order_of(project: Project, name: str, *arguments: Any) -> Any:
    """An order of samples from the page, made with these arguments."""
    code = recipe("python", f"class {name}(").replace("from .", f"from {project.name}.")
    exec(code, names := {"np": np})
    return names[name](*arguments)


def test_batches_of_similar_length(text: Project) -> None:
    """Each window has the samples of the plain order; any step is found at once."""
    lengths = np.random.default_rng(0).integers(1, 500, 1000)
    plain = text.module("sampling").GlobalBatches(1000, 8, 5)
    order = order_of(text, "ByLength", lengths, 8, 5)
    steps = [order.ids(step) for step in range(100)]
    for window in (range(50), range(50, 100)):
        ids = np.concatenate([steps[step] for step in window])
        expected = np.concatenate([plain.ids(step) for step in window])
        assert sorted(ids.tolist()) == sorted(expected.tolist())
    padding = [np.ptp(lengths[ids]) for ids in steps]
    assert np.mean(padding) < np.mean([np.ptp(lengths[plain.ids(k)]) for k in range(100)]) / 10
    # Shuffled: short batches do not come first.
    firsts = [lengths[ids].mean() for ids in steps[:50]]
    assert firsts != sorted(firsts)
    later = order_of(text, "ByLength", lengths, 8, 5)
    assert np.array_equal(later.ids(10**9), order.ids(10**9))
    assert np.array_equal(later.ids(77), steps[77])


def test_training_on_batches_of_similar_length(
    text: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A resume has the same losses; other micro-batches, which are padded otherwise, too."""
    train = text.module("train")
    names = {**vars(text.module("model")), "pad_sequence": torch.nn.utils.rnn.pad_sequence}
    exec(recipe("python", "ignore_index=-1"), names)
    exec(f"class Padded:\n{recipe('python', 'pad_sequence')}", names)
    draws = np.random.default_rng(0)
    lengths = draws.integers(2, 33, 120)

    class Sentences(names["Padded"]):
        """Samples of many lengths, and the order of the page, in windows of three batches."""

        def __init__(self, lengths: np.ndarray) -> None:
            self.lengths = lengths
            self.sequences = [draws.integers(97, 123, length) for length in lengths]

        def __len__(self) -> int:
            return len(self.sequences)

        def order(self, batch_size: int, seed: int) -> Any:
            order = order_of(text, "ByLength", self.lengths, batch_size, seed)
            order.batches = 3
            return order

    training, validation = Sentences(lengths), Sentences(lengths[:8])
    spec = text.module("data").build_datasets(text.config())[2]
    monkeypatch.setattr(train, "build_datasets", lambda config: (training, validation, spec))
    for module in ("train", "validation", "adds_up"):
        monkeypatch.setattr(text.module(module), "compute_loss", names["compute_loss"])

    def losses(run: str, steps: int, micro_batch: int) -> list[float]:
        """Train, with a rate that does not depend on the number of steps."""
        config = text.config(
            run_dir=tmp_path / run,
            train__steps=steps,
            train__micro_batch_size=micro_batch,
            train__log_every=1,
            optim__warmup_steps=0,
            optim__final_fraction=1.0,
        )
        train.run(config)
        return [record["loss"] for record in records(tmp_path / run) if "loss" in record]

    whole = losses("whole", 8, micro_batch=8)
    assert len(whole) == 8
    losses("halves", 4, micro_batch=8)
    assert losses("halves", 8, micro_batch=8) == whole
    assert losses("small", 8, micro_batch=2) == pytest.approx(whole, rel=1e-5)
    assert "does not add up" not in caplog.text


def test_weighted_samples(text: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn as often as their weights say, and trained by the dataset's order."""
    weights = np.array([1.0, 0.0, 5.0, 2.0, 2.0])
    order = order_of(text, "Weighted", weights, 10, 3)
    counts = np.bincount(np.concatenate([order.ids(k) for k in range(2000)]), minlength=5)
    assert counts[1] == 0
    assert counts / counts.sum() == pytest.approx(weights / weights.sum(), abs=0.01)
    assert not np.array_equal(order.ids(0), order_of(text, "Weighted", weights, 10, 4).ids(0))

    train = text.module("train")
    build = train.build_datasets

    def with_order(config: Any) -> Any:
        training, validation, spec = build(config)
        weights = np.zeros(len(training))
        weights[3] = 1.0
        training.order = lambda size, seed: order_of(text, "Weighted", weights, size, seed)
        return training, validation, spec

    monkeypatch.setattr(train, "build_datasets", with_order)
    state = train.setup(text.config(run_dir=tmp_path))
    [first, *_] = state.loader.next()
    samples = first["tokens"]
    assert all(torch.equal(sample, samples[0]) for sample in samples)


def test_a_histogram_is_in_the_report(text: Project, tmp_path: Path) -> None:
    code = recipe("python", "class Histogram").replace("from .", f"from {text.name}.")
    exec(code, names := {"Any": Any, "Path": Path})
    config = text.config(run_dir=tmp_path, train__steps=2, train__validate_every=1)
    text.module("train").run(config, [names["Histogram"](tmp_path, "embedding.weight")])
    pictures = sorted(path.name for path in (tmp_path / "samples").glob("*.png"))
    assert pictures == ["step_00000001.png", "step_00000002.png"]
    text("report", "--run-dir", str(tmp_path))
    page = (tmp_path / "report.html").read_text()
    for name in pictures:
        content = base64.b64encode((tmp_path / "samples" / name).read_bytes()).decode()
        assert f"data:image/png;base64,{content}" in page


def test_a_part_is_trained_from_a_step_on(
    text: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights stay as they are until then; a resume has the bits of the undisturbed run."""
    train = text.module("train")
    exec(recipe("python", "class Unfreeze"), names := {"Any": Any})
    names |= vars(text.module("optim"))
    exec(recipe("python", "the blocks train later"), names)

    class Watch:
        """Notes a weight of the part after each step."""

        def __init__(self) -> None:
            self.weights: list[torch.Tensor] = []

        def after_step(self, state: Any, record: Any) -> None:
            self.weights.append(state.model.blocks[0].up.weight.detach().clone())

    monkeypatch.setattr(train, "build_optimizer", names["build_optimizer"])
    watch = Watch()
    flat = {"optim__warmup_steps": 0, "optim__final_fraction": 1.0}
    for name, all_steps in (("whole", (6,)), ("halves", (4, 6))):
        for steps in all_steps:
            config = text.config(run_dir=tmp_path / name, train__steps=steps, **flat)
            train.run(config, [names["Unfreeze"](3), watch])
    first, whole = watch.weights[0], watch.weights[:6]
    assert all(torch.equal(weight, first) for weight in whole[:3])
    assert not torch.equal(whole[3], first)
    a, b = text.tensors(tmp_path / "whole"), text.tensors(tmp_path / "halves")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_metrics_of_your_own(
    image: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean over the count, one with its own divisor, and one that a callback puts together."""
    model, train = image.module("model"), image.module("train")
    exec(recipe("python", "recall_of_7"), names := dict(vars(model)))
    logits = torch.eye(10)[torch.tensor([7, 7, 3, 1])]
    batch = {"images": logits, "labels": torch.tensor([7, 2, 7, 1])}
    loss = names["compute_loss"](torch.nn.Identity(), batch)
    assert int(loss.metrics["accuracy"]) == 2 and loss.count == 4
    assert [int(part) for part in loss.metrics["recall_of_7"]] == [1, 2]
    monkeypatch.setattr(train, "compute_loss", names["compute_loss"])
    monkeypatch.setattr(image.module("validation"), "compute_loss", names["compute_loss"])
    train.run(image.config(run_dir=tmp_path / "run", data__path=None, train__steps=4))
    last = records(tmp_path / "run")[-1]
    assert 0 <= last["validation_recall_of_7"] <= 1 and 0 <= last["accuracy"] <= 1

    exec(recipe("python", "class R2"), names := {"Any": Any})
    y, guess = np.array([1.0, 2.0, 4.0, 3.0]), np.array([1.5, 2.0, 3.0, 3.5])
    figures = {"validation_y": y.mean(), "validation_y2": (y * y).mean()}
    figures["validation_squared_error"] = ((y - guess) ** 2).mean()
    names["R2"]().after_validation(None, figures)
    assert figures["r2"] == pytest.approx(r2_score(y, guess))


def test_one_cycle_is_torchs(text: Project) -> None:
    schedule = text.module("schedule")
    exec(recipe("python", "One cycle"), names := dict(vars(schedule)))
    config, steps = text.config().optim, 50
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.learning_rate, steps)
    for step in range(steps):
        assert names["learning_rate"](config, step, steps) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        if step < steps - 1:
            theirs.step()


def edited(code: str, *edits: tuple[str, str]) -> str:
    """A recipe with a user's changes."""
    for before, after in edits:
        assert before in code, before
        code = code.replace(before, after)
    return code


RECOMMENDER = """from sklearn.metrics import roc_auc_score
from typing import Any
import numpy as np
import torch

from .device import move
from .sampling import fetch


def callbacks(config, run_dir):
    return Auc(), EarlyStopping()
"""


def test_a_recommender_from_the_recipes(tmp_path: Path) -> None:
    """Two optimizers, AUC, early stopping and the best checkpoint by it; no sparse tables."""
    project = bake(tmp_path, **ANSWERS, task="image_classifier", package_name="recommender")
    package = project / "src/recommender"
    shutil.copytree(ROOT / "tests/project/own/recommender", package, dirs_exist_ok=True)
    with open(package / "optim.py", "a") as file:
        tables = ("first, *rest = (p for p in model", "users, items, *rest = (p for p in model")
        of_both = ("SGD([first],", 'SGD([{"params": [users, items], "rate_factor": 300.0}],')
        file.write(f"\n\n{edited(recipe('python', 'class Several'), tables, of_both)}")
    scores = 'state.module(batch["images"]).float().softmax(1)'
    parts = [
        edited(
            recipe("python", "class Auc"),
            (scores, "state.module(batch).float().sigmoid()"),
            ("        score /= score.sum(1, keepdim=True)  # scikit-learn wants it exact\n", ""),
            ("        score = score[:, 1] if score.shape[1] == 2 else score\n", ""),
            (', multi_class="ovr"', ""),
        ),
        edited(
            recipe("python", "class EarlyStopping"),
            ('figures["validation_loss"]', '-figures["auc"]'),
        ),
    ]
    (package / "callbacks.py").write_text("\n\n".join([RECOMMENDER, *parts]))
    run_dir = tmp_path / "run"

    def start(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "recommender", *words, "--run-dir", str(run_dir)]
        environment = {**os.environ, "PYTHONPATH": str(project / "src")}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path
        )

    best = ("--checkpoint.best", "validation_auc", "--checkpoint.best-is", "max")
    done = start("train", "--device", "cpu", "--train.steps", "40", *best)
    assert done.returncode == 0, done.stderr
    done = start("train", "--device", "cpu", "--train.steps", "3000")  # the rest is saved
    assert done.returncode == 0 and "resumed at step 40" in done.stderr, done.stderr
    status = json.loads((run_dir / "status.json").read_text())
    assert status["status"] == "finished" and 40 < status["step"] < 3000
    assert "no validation was better" in status["reason"]
    aucs = [r["validation_auc"] for r in records(run_dir) if "validation_auc" in r]
    assert max(aucs) > 0.85 and max(aucs[-3:]) <= max(aucs[:-3]), aucs
    listed = start("verify").stdout.splitlines()
    (marked,) = [line for line in listed if line.endswith("  best")]
    assert f"validation auc {max(aucs):.4f}" in marked, listed
    (package / "check.py").write_text(
        "import sys\nimport numpy as np\nimport torch\n"
        "from sklearn.metrics import roc_auc_score\nfrom . import load_trained\n"
        "from .data import build_datasets\n"
        "model, spec, config = load_trained(sys.argv[1], 'cpu', int(sys.argv[2]))\n"
        "data = build_datasets(config)[1]\nbatch = data.__getitems__([*range(len(data))])\n"
        "print(roc_auc_score(batch['labels'], model(batch).detach()))\n"
    )
    found = run(
        [sys.executable, "-m", "recommender.check", str(run_dir), marked[5:13]],
        300,
        PYTHONPATH=str(project / "src"),
    )
    assert float(found.split()[-1]) == pytest.approx(max(aucs), abs=1e-3)
    model = package / "model.py"
    model.write_text(model.read_text().replace("users, width)", "users, width, sparse=True)"))
    done = start("train", "--device", "cpu", "--fresh")
    line = "error: users.weight has sparse gradients: make it with sparse=False\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_early_stopping_does_not_count_a_loss_that_is_not_a_number() -> None:
    exec(recipe("python", "class EarlyStopping"), names := {"Any": Any})
    stopping, reasons = names["EarlyStopping"](), []
    state = SimpleNamespace(finish=reasons.append)
    for loss in (2.0, 3.0, math.nan, math.nan, math.nan, 3.0):
        stopping.after_validation(state, {"validation_loss": loss})
    assert (stopping.best, stopping.bad, reasons) == (2.0, 2, [])
    stopping.after_validation(state, {"validation_loss": math.inf})
    assert reasons == ["no validation was better than 2.0000"]


def test_lora_is_merged(text: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain model with the merged weights computes what the one with the addition does."""
    train, model = text.module("train"), text.module("model")
    load_trained = sys.modules[text.name].load_trained
    spec = text.module("data").build_datasets(text.config())[2]
    plain = model.build_model(text.config(), spec)
    exec(recipe("python", "class Lora"), names := dict(vars(model)))
    for module in (train, model):
        monkeypatch.setattr(module, "build_model", names["build_model"])
    monkeypatch.chdir(tmp_path)
    train.run(text.config(run_dir=tmp_path / "runs/lora", train__steps=4, train__validate_every=4))
    text(
        "export",
        "--run-dir",
        str(tmp_path / "runs/lora"),
        "--to",
        str(tmp_path / "lora.safetensors"),
    )
    exec(recipe("python", "merged.safetensors"), {})
    lora = load_trained(tmp_path / "runs/lora", "cpu")[0]
    plain.load_state_dict(load_file(tmp_path / "merged.safetensors"))
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert lora.blocks[0].attention.qkv.up.abs().sum() > 0
        torch.testing.assert_close(plain.eval()(tokens), lora(tokens))


def test_half_of_the_images_are_flipped() -> None:
    names: dict[str, Any] = {"Tensor": torch.Tensor, "torch": torch, "np": np}
    exec(f"class Data:\n{recipe('python', 'Flip about half')}", names)
    images, labels = torch.rand(6, 1, 2, 3), torch.arange(6)
    keys = np.array([0, 1, 2, 2**64 - 1, 3, 8], np.uint64)
    batch = names["Data"]().augment({"images": images, "labels": labels}, keys)
    for image, before, key in zip(batch["images"], images, keys, strict=True):
        assert torch.equal(image, before.flip(-1) if key % 2 == 0 else before)
    assert torch.equal(batch["labels"], labels)
