"""What a run computes is what a loop by hand computes (plain_loop.py), step by step."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import ROOT, Project, bake, drill
from tests.project import plain_loop
from tests.project.drills.reference import too_large
from tests.tasks import TASKS, Task

# Seven samples on two or three ranks, two at a time, are uneven shares and a padded micro-batch.
# The rate rises and falls within the steps; the clip is below some norms and above others.
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "track": False,
    "train.steps": 30,
    "train.global_batch_size": 7,
    "train.micro_batch_size": 2,
    "train.validate_every": 10,
    "train.validate_samples": 0,
    "optim.learning_rate": 3e-3,
    "optim.warmup_steps": 6,
    "optim.final_fraction": 0.2,
    "optim.weight_decay": 0.3,
    "optim.beta1": 0.8,
    "optim.beta2": 0.9,
    "optim.clip": 1.0,
    "checkpoint.every": 0,
}
# Enough to notice a mistake: on two ranks the first pads its share of three samples, too.
FEW = {"train.steps": 10, "train.global_batch_size": 3, "train.micro_batch_size": 1}
FEW |= {"train.validate_every": 5, "optim.warmup_steps": 3, "train.validate_samples": 0}
FEW |= {"optim.name": "adamw"}

BROKEN = "language_model"
# Each of these went unnoticed once: the file, what stands there, what is put in its place.
BREAKAGES = {
    "no_warm_up": ("schedule.py", "rate * (step + 1) / config.warmup_steps", "rate"),
    "clipped_at_twice_the_norm": ("loss.py", "clip / (size", "2 * clip / (size"),
    "not_clipped": ("loss.py", "    if clip:", "    if False:"),
    "no_decay_of_the_rate": ("schedule.py", "+ (1 - final) * height", "* 0 + 1"),
    "weight_decay_on_norms": ("optim.py", '"weight_decay": 0.0', '"weight_decay": 0.1'),
    "validation_without_weights": (
        "validation.py",
        "sums = sums + loss_vector(loss) * micro_batch.weight",
        "sums = sums + loss_vector(loss)",
    ),
    "attention_not_causal": ("model.py", "is_causal=True", "is_causal=False"),
    "targets_equal_to_inputs": ("model.py", "targets = tokens[:, 1:]", "targets = tokens[:, :-1]"),
    "residuals_not_scaled": ("model.py", "std /= math.sqrt(2 * config.layers)", "pass"),
    "gradient_of_the_mean_of_ranks": ("loss.py", "scale = ranks / count", "scale = 1 / count"),
}
IN_PARTS = "in_parts"  # no breakage: the loss of the language model, a few logits at a time
EDITS = BREAKAGES | {IN_PARTS: ("model.py", "MAX_LOGITS = 2**28", "MAX_LOGITS = 2000")}
# Of the render's own tests, the one that notices it.
PLAIN = "test_step.py::test_the_loop_does_what_a_plain_one_does"
RANKS = "test_ranks.py::test_two_ranks_do_what_one_does"
RATE = "test_step.py::test_the_rate_warms_up_then_falls_as_its_schedule_says[cosine]"
NOTICED_BY = {
    "no_warm_up": RATE,
    "clipped_at_twice_the_norm": PLAIN,
    "not_clipped": PLAIN,
    "no_decay_of_the_rate": RATE,
    "weight_decay_on_norms": "test_model.py::test_matrices_decay_and_nothing_else_does",
    "validation_without_weights": RANKS,
    "attention_not_causal": "test_model.py::test_a_later_token_changes_no_earlier_logit",
    "targets_equal_to_inputs": "test_model.py::test_the_targets_are_the_tokens_that_follow",
    "residuals_not_scaled": "test_model.py::"
    "test_what_is_added_to_the_residual_stream_starts_smaller_in_deep_models",
    "gradient_of_the_mean_of_ranks": RANKS,
}


def test_each_task_has_its_entry() -> None:
    assert [*TASKS] == json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))["task"]


def reference(project: Project, task: Task, settings: dict[str, Any]) -> tuple:
    """Trace and weights at the start of the loop by hand, and the metric's name."""
    config, sampling = project.module("config"), project.module("sampling")
    path = Path(settings["data.path"])
    own = config.override(config.preset("tiny"), settings | {"data.path": path})
    state = project.module("train").setup(own)
    start = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    size, seed = settings["train.global_batch_size"], own.train.seed
    training, validation = task.read(path)
    count = task.count(training)
    # As the docstring of sampling.py has it: a permutation of each epoch, one after the other.
    orders = [
        sampling.Permutation(count, sampling.stream_key(seed, 0, epoch))(np.arange(count))
        for epoch in range(size * settings["train.steps"] // count + 1)
    ]
    order = torch.from_numpy(np.concatenate(orders))

    def batch(step: int) -> Any:
        positions = range(step * size, (step + 1) * size)
        keys = sampling.sample_keys(seed, np.array(positions)).tolist()
        return task.batch(training, order[list(positions)], keys)

    trace = plain_loop.train(start, task.loss, batch, validation, settings)
    return vars(trace), start, task.metric


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data, the references, settings.json, and a render for each package that it names."""
    folder, plans = tmp_path_factory.mktemp("reference"), {}
    for name, task in TASKS.items():
        task.make_data(folder / task.file)
        settings = SETTINGS | task.settings | {"data.path": str(folder / task.file)}
        ddp, fsdp = f"ddp_{name}", f"fsdp_{name}"
        plans |= {ddp: (name, settings), fsdp: (name, settings)}
        bake(folder / fsdp, task=name, parallelism="fsdp", package_name=fsdp, tracker="none")
        with Project.imported(folder / ddp, ddp, task=name, tracker="none") as project:
            torch.save(reference(project, task, settings), folder / f"{name}.pt")
            if name == BROKEN:
                few = settings | FEW
                torch.save(reference(project, task, few), folder / "few.pt")
                plans |= {it: ("few", few) for it in ("whole", *EDITS)}
    (folder / "settings.json").write_text(json.dumps(plans))
    return folder


def test_each_feature_takes_part(folder: Path) -> None:
    """Or the reference would not test it."""
    for name in (*TASKS, "few"):
        trace, _, _ = torch.load(folder / f"{name}.pt")
        bitten = [n > c for n, c in zip(trace["norms"], trace["clipped"], strict=True)]
        assert any(bitten) and not all(bitten), trace["norms"]
        low, *_, high = sorted(trace["rates"])
        assert low < high / 3 and trace["rates"][-1] < high / 2
        (first, *_), (last, *_) = trace["sums"][0], trace["sums"][-1]
        assert last < 0.99 * first, "it does not learn"


def found_by(folder: Path, ranks: int) -> dict[str, dict[str, float]]:
    """The differences that are no rounding, by package."""
    found = json.loads((folder / f"{ranks}.json").read_text())
    return {name: too_large(differences) for name, differences in found.items()}


def test_any_number_of_ranks_computes_what_one_loop_does(folder: Path) -> None:
    packages = [f"{parallelism}_{task}" for task in TASKS for parallelism in ("ddp", "fsdp")]
    sources = {name: folder / name / "my-training-run/src" for name in packages}
    drill(
        "reference.py", *((ranks, str(folder), *packages) for ranks in (0, 2, 3)), sources=sources
    )
    for ranks in (1, 2, 3):
        assert found_by(folder, ranks) == {name: {} for name in packages}


def edit_line(package: Path, name: str) -> None:
    file, right, wrong = EDITS[name]
    text = (package / file).read_text()
    assert text.count(right) == 1, f"{file} has changed: state the breakage anew"
    (package / file).write_text(text.replace(right, wrong))


@pytest.fixture(scope="module")
def found_broken(folder: Path) -> dict[str, dict[str, float]]:
    """What two ranks compute otherwise with each breakage, and with none."""
    original, sources = folder / f"ddp_{BROKEN}/my-training-run/src/ddp_{BROKEN}", {}
    for name in ("whole", *EDITS):
        sources[name] = folder / "broken" / name
        package = shutil.copytree(original, sources[name] / name)
        if name in EDITS:
            edit_line(package, name)
    drill("reference.py", (2, str(folder), *sources), sources=sources)
    return found_by(folder, 2)


def test_what_is_whole_is_not_taken_for_broken(found_broken: dict[str, dict[str, float]]) -> None:
    assert found_broken["whole"] == {}


def test_a_loss_in_parts_is_the_same_loss(found_broken: dict[str, dict[str, float]]) -> None:
    """And so are the gradients, summed over the parts, the micro-batches and the ranks."""
    assert found_broken[IN_PARTS] == {}


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_breakage_is_noticed(found_broken: dict[str, dict[str, float]], name: str) -> None:
    assert found_broken[name]


@pytest.mark.parametrize("name", [None, *BREAKAGES])
def test_the_own_tests_of_a_render_notice_a_breakage(tmp_path: Path, name: str | None) -> None:
    project = bake(tmp_path, package_name="broken")
    tests, code = ("test_model.py", PLAIN, RANKS), 0
    if name:
        edit_line(project / "src/broken", name)
        tests, code = (NOTICED_BY[name],), 1
    jobs = (0, str(project), code, *(f"tests/{test}" for test in tests))
    output = drill("own_tests.py", jobs, sources={"broken": project / "src"})
    assert ("\n1 failed" if name else "\n15 passed") in output


def test_its_own_tests_name_the_line_that_reads_a_value(tmp_path: Path) -> None:
    """On a GPU each step would wait there."""
    project = bake(tmp_path, package_name="waiting")
    model = project / "src/waiting/model.py"
    text, right = model.read_text(), "total.detach() / math.log(2)"
    assert text.count(right) == 1
    model.write_text(text.replace(right, "total.item() / math.log(2)"))
    line = text[: text.index(right)].count("\n") + 1
    jobs = (0, str(project), 1, "tests/test_step.py::test_a_step_reads_no_value_on_the_host")
    output = drill("own_tests.py", jobs, sources={"waiting": project / "src"})
    assert f"model.py:{line}: " in output and "\n1 failed" in output
