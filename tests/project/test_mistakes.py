"""What each mistake prints: one line, or the user's own frames; and advice that works as typed."""

import ast
import dataclasses
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tyro

from tests.conftest import Project, bake, drill

HERE = "of_mistakes"
TINY = ("--preset", "tiny", "--device", "cpu", "--data.path", "text.txt")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    folder = tmp_path_factory.mktemp("mistakes")
    with Project.imported(folder, HERE, checkpoint="torch_save", tracker="none") as project:
        yield project


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    folder, answers = tmp_path_factory.mktemp("stored"), {"task": "image_classifier"}
    answers |= {"parallelism": "fsdp", "storage": "object_store", "tracker": "mlflow"}
    with Project.imported(folder, "of_stored_mistakes", **answers) as project:
        yield project


# Options in the source that are of other programs: torchrun, cruft, torchfrtrace, tensorboard.
FOREIGN = {"--nnodes", "--local-addr", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-conf"}
FOREIGN |= {"--nproc-per-node", "--max-restarts", "--variables-to-update", "--prefix", "--logdir"}
FOREIGN |= {"--preset", "--config", "--help"}  # read before tyro's own
FOREIGN |= {"--shm-size", "--ipc"}  # of docker
FOREIGN |= {"--show-toplevel", "--binary", "--others", "--exclude-standard"}  # of git
FOREIGN |= {"--full-name", "--no-optional-locks"}
FOREIGN |= {"--train"}  # where a name begins, as in --train.{name}


def kinds_of(project: Project) -> list[type]:
    """The settings of each command, as tyro reads them."""
    main, kinds = project.module("__main__"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "parse", lambda name, kind, arguments: kinds.append(kind) or 1 / 0)
        for name in main.HELP:
            with pytest.raises(ZeroDivisionError):
                main.dispatch([name])
    return kinds


def options_of(project: Project) -> set[str]:
    """The options of all commands."""
    return {f"--{name}" for kind in kinds_of(project) for name in names_of(kind)}


def names_of(kind: type) -> Iterator[str]:
    """The settings of a kind as tyro names them; of one that is on or off, both names."""
    for name, hint in typing.get_type_hints(kind).items():
        name = name.replace("_", "-")
        if dataclasses.is_dataclass(hint):
            yield from (f"{name}.{inner}" for inner in names_of(hint))
        else:
            yield from (name, f"no-{name}") if hint is bool else (name,)


def test_every_option_in_a_message_is_one(project: Project, stored: Project) -> None:
    options, named = options_of(project) | options_of(stored) | FOREIGN, {}
    for it in (project, stored):
        for path in (it.folder / "src" / it.name).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9.-]*[a-z0-9]", node.value):
                        named.setdefault(option, f"{path}:{node.lineno}")
    assert len(named) > 40
    assert {option: where for option, where in named.items() if option not in options} == {}


def test_every_value_in_a_message_is_one(project: Project) -> None:
    """As in --compile.dynamic True: what stands behind an option can be typed."""
    seen = 0
    for path in (project.folder / "src" / project.name).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            values = r"(\d+|True|False|auto|bf16|blocks|none|skip|continue|aot_eager|cpu)\b"
            for option, value in re.findall(rf"(--[a-z][a-z.-]*[a-z]) {values}", node.value):
                kinds = [kind for kind in kinds_of(project) if option[2:] in names_of(kind)]
                if not kinds:  # of torchrun
                    continue
                words = [option, value]
                if "to" in names_of(kinds[0]):
                    words += ["--to", "weights.pt"]
                tyro.cli(kinds[0], args=words)
                seen += 1
    assert seen > 8


def typed(project: Project, line: str) -> None:
    """Type a line of advice."""
    words = shlex.split(line)
    assert words[:3] == ["python", "-m", project.name], line
    project(*words[3:])


def status(project: Project, run: str) -> str:
    return (project.folder / run / "status.json").read_text()


@pytest.mark.parametrize("named", [True, False])
def test_a_refused_resume_says_what_to_type(project: Project, tmp_path: Path, named: bool) -> None:
    """And what it says works, each way, whatever was typed before."""
    run = "runs/refused" if named else str(tmp_path / "elsewhere")
    place = ("--name", "refused") if named else ("--run-dir", run)
    command = ("train", *TINY, "--no-track", "--train.steps", "3", *place)
    project(*command)
    before = status(project, run)
    said = project.refuses(*command, "--train.seed", "1", "--train.steps", "4")
    assert "seed: 0 saved, 1 now" in said

    (line,) = re.findall("Resume with the saved settings: (.*)", said)
    assert line.endswith("train --name refused" if named else f"train --run-dir {run}")
    typed(project, line)
    assert status(project, run) == before, "it was finished"
    typed(project, f"{line} --train.steps 4")
    assert '"step": 4' in status(project, run)
    assert not (project.folder / "runs/default").exists()

    by_name, by_place, init = re.findall(r"--name NEW|--run-dir NEW|--init-from [^\s;]+", said)
    for number, more in enumerate(("", init)):
        options = f"{by_name if named else by_place} {more}".replace("NEW", f"new-{number}")
        project(*command, "--train.seed", "1", *shlex.split(options))
        assert '"step": 3' in status(project, f"{'runs/' * named}new-{number}")
    assert "start over with --fresh" in said
    project(*command, "--train.seed", "1", "--fresh")
    assert '"step": 3' in status(project, run)


def test_data_without_any_text_is_one_line(project: Project, tmp_path: Path) -> None:
    said = project.refuses("train", *TINY[:-2], "--data.path", str(tmp_path))
    assert said == f"--data.path {tmp_path} has neither text nor .bin files of tokens"


def test_what_does_not_fit_together_is_named(project: Project, capsys) -> None:
    with pytest.raises(SystemExit):
        project("train", *TINY, "--model.heads", "3")
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "--model.width must be a multiple of 2 x --model.heads" in said


def test_weights_of_another_shape_are_not_offered(project: Project) -> None:
    command = ("train", *TINY, "--no-track", "--train.steps", "2", "--name", "other_shape")
    project(*command)
    said = project.refuses(*command, "--model.width", "64")
    assert "parameters" in said and "--name NEW" in said and "--init-from" not in said


def test_a_spec_without_a_fingerprint_is_one_line(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = project.module("train")
    build = training.build_datasets

    def forgetful(config: Any) -> Any:
        first, second, spec = build(config)
        return first, second, SimpleNamespace(vocabulary=spec.vocabulary)

    monkeypatch.setattr(training, "build_datasets", forgetful)
    said = project.refuses("train", *project.settings, "--run-dir", str(tmp_path / "run"))
    assert (
        "`fingerprint` in the spec of build_datasets (data.py): expected str, not NoneType" in said
        and "\n" not in said
    )


def test_fresh_is_refused_for_a_store_before_anything_is_built(
    stored: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored.module("train"), "setup", lambda *_, **__: pytest.fail("too late"))
    address = (tmp_path / "store").as_uri()
    words = ("--preset", "tiny", "--device", "cpu", "--fresh", "--checkpoint.url", address)
    said = stored.refuses("train", *words, "--run-dir", str(tmp_path / "run"))
    assert (
        said == "--fresh does not clear an object store: give another --name and --checkpoint.url"
    )
    assert not (tmp_path / "run").exists()


def test_a_store_of_another_run_says_what_to_type(stored: Project, tmp_path: Path) -> None:
    def url(name: str) -> tuple[str, str]:
        return "--checkpoint.url", f"file://{tmp_path}/{name}"

    command = ("train", "--preset", "tiny", "--device", "cpu", "--no-track", "--train.steps", "2")
    stored(*command, "--name", "old", *url("old"))
    said = stored.refuses(*command, "--name", "old", *url("old"), "--train.seed", "1")
    assert "seed: 0 saved, 1 now\nGive this run another --checkpoint.url and --name " in said
    (init,) = re.findall(r"--init-from (\S+)$", said)
    stored(*command, "--name", "new", *url("new"), "--train.seed", "1", "--init-from", init)


def test_a_command_that_is_suggested_has_the_settings_of_its_run(project: Project) -> None:
    words = ("--name", "suggested", "--train.steps", "2", "--optim.learning-rate", "0.003")
    project("train", *project.settings, *words)
    main, errors, run = project.module("__main__"), project.module("errors"), Path("runs/suggested")
    stages = project.module("workflow.stage")
    for name in ("train", *project.module("workflow").STAGES, "workflow"):
        line = shlex.split(errors.command_for(name, project.folder / run))
        assert line[:4] == ["python", "-m", HERE, name]
        config = main.parse(name, stages.StageConfig, line[4:])
        assert config.optim.learning_rate == 0.003 and config.directory == project.folder / run
    assert errors.command_for("train", Path("runs/new")) == f"python -m {HERE} train --name new"


def test_what_is_no_optimizer_is_one_line(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = project.module("train")
    build = training.build_optimizer
    monkeypatch.setattr(training, "build_optimizer", lambda *given: [build(*given)])
    said = project.refuses("train", *project.settings, "--run-dir", str(tmp_path / "run"))
    assert said == "what build_optimizer (optim.py) returns: expected Optimizer, not list"


def test_an_optimizer_that_takes_several_losses_a_step_is_one_line(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = project.module("train")
    build = lambda config, model: torch.optim.LBFGS(model.parameters())  # noqa: E731
    monkeypatch.setattr(training, "build_optimizer", build)
    said = project.refuses("train", *project.settings, "--run-dir", str(tmp_path / "run"))
    assert said == "LBFGS computes a loss several times a step: use another one (optim.py)"


@pytest.mark.parametrize("workers", ["0", "1"])
def test_samples_of_different_shapes_are_one_line(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    class Ragged:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
            return {"tokens": torch.zeros(3 + number % 2)}

    project.train_on(monkeypatch, Ragged())
    words = (*project.settings, "--run-dir", str(tmp_path / "run"))
    said = project.refuses("train", *words, "--train.loader-workers", workers)
    assert said.startswith("the samples of a batch cannot be stacked: ")
    assert "\n" not in said


@pytest.mark.parametrize(("length", "plain"), [(None, False), (100, False), (9, True)])
@pytest.mark.parametrize("part", ["training", "validation"])
def test_a_stream_is_one_line(
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    length: int | None,
    part: str,
    plain: bool,
) -> None:
    from torch.utils.data import IterableDataset

    class Lines(IterableDataset):
        """A stream; with a length if it has one."""

        def __iter__(self) -> Iterator[Any]:
            yield from ()

    if length:
        Lines.__len__ = lambda self: length
    training = project.module("train")
    build = training.build_datasets

    def streams(config: Any) -> Any:
        first, second, spec = build(config)
        return (Lines(), second, spec) if part == "training" else (first, Lines(), spec)

    if plain:  # nothing of torch's
        Lines = type("Lines", (), {"__len__": lambda self: 9, "__iter__": Lines.__iter__})
    monkeypatch.setattr(training, "build_datasets", streams)
    said = project.refuses("train", *project.settings, "--run-dir", str(tmp_path / "run"))
    assert said == (
        f"the {part} data (build_datasets in data.py) is a Lines: "
        "it needs __len__, and __getitem__ or __getitems__. "
        "Write a stream to files first, or create the project with samples=stream"
    )


@pytest.mark.parametrize(
    ("module", "wanted"),
    [
        (torch.nn.LazyLinear(2), "0.weight is of a lazy module, without sizes so far: state its"),
        (torch.nn.LazyBatchNorm1d(affine=False), "0.running_mean is of a lazy module, without"),
        (torch.nn.Embedding(2, 2, sparse=True), "0.weight has sparse gradients: make it with"),
        (torch.nn.EmbeddingBag(2, 2, sparse=True), "0.weight has sparse gradients: make it with"),
    ],
)
def test_parameters_that_cannot_be_trained_are_named(
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: torch.nn.Module,
    wanted: str,
) -> None:
    model = torch.nn.Sequential(module)
    monkeypatch.setattr(project.module("train"), "build_model", lambda *given: model)
    said = project.refuses("train", *project.settings, "--run-dir", str(tmp_path / "run"))
    assert said.startswith(wanted) and "\n" not in said


@pytest.mark.parametrize(
    ("function", "result", "wanted"),
    [
        (
            "build_model",
            lambda it: None,
            "what build_model (model.py) returns: expected Module",
        ),
        (
            "blocks",
            lambda it: None,
            "blocks (model.py) returns NoneType: return a list of",
        ),
        (
            "blocks",
            lambda it: [it],
            "blocks (model.py) returns a ModuleList in it: return",
        ),
        ("blocks", lambda it: ["a"], "blocks (model.py) returns a str in it: return"),
    ],
)
def test_what_is_no_model_and_what_are_no_blocks(
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    result: Any,
    wanted: str,
) -> None:
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    monkeypatch.setattr(project.module("train"), function, lambda *given: result(layers))
    said = project.refuses("train", *project.settings, "--run-dir", str(tmp_path / "run"))
    assert said.startswith(wanted) and "\n" not in said


def test_fsdp_names_the_batch_norm_that_a_gpu_trains_in_float32(stored: Project) -> None:
    check = stored.module("distributed.parallel").check_batch_norm
    check(torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.GroupNorm(1, 2)))
    with pytest.raises(ValueError, match=r"1 is a BatchNorm2d, which FSDP trains on a GPU only in"):
        check(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm2d(2)))


def test_fsdp_names_what_it_cannot_shard(stored: Project) -> None:
    check = stored.module("distributed.parallel").check_shardable
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).bfloat16())
    check(model, [model[1]])
    message = r"1\.weight is torch\.bfloat16 and 0\.weight is torch\.float32"
    with pytest.raises(ValueError, match=message):
        check(model, [])
    model[1].requires_grad_(False)
    check(model, [])
    model[0].scale = torch.nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"cannot shard the scalar 0\.scale: give it the shape"):
        check(model, [model[1]])


SCALAR = """

_build = build_model


def build_model(config, spec):
    model = _build(config, spec)
    model.scale = nn.Parameter(torch.tensor(1.5))
    return model
"""


def test_ranks_refuse_a_scalar_under_fsdp_once(tmp_path: Path) -> None:
    answers = {"package_name": HERE, "tracker": "none", "checkpoint": "dcp"}
    folder = bake(tmp_path, **answers, parallelism="fsdp")
    (folder / "text.txt").write_text("Was ever woman in this humour wooed? " * 100)
    with open(folder / "src" / HERE / "model.py", "a") as file:
        file.write(SCALAR)
    lines = told(folder, "bash", "launch.sh", "-n", "2", "train", *TINY, code=2)
    said = {line.removeprefix("[rank 1] ") for line in lines}
    assert said == {"error: FSDP cannot shard the scalar scale: give it the shape [1]"}


def start(folder: Path, *words: str, **options: Any) -> "subprocess.Popen[str]":
    """A command of the project in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "PYTHON": sys.executable}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, cwd=folder, env=environment, **pipes, **options)


def told(folder: Path, *words: str, code: int) -> list[str]:
    """The lines that it prints; its exit code is as it should be."""
    with start(folder, *words) as process:
        output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output.splitlines()


# In model.py.
BROKEN = """

_compute = compute_loss


def compute_loss(model, batch):
    from .layers import scaled

    return _compute(scaled(model), batch)
"""
LAYERS = """def scaled(model):
    try:
        return model.no_such_thing
    except AttributeError as error:
        raise KeyError("no scale") from error
"""


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A project whose model.py can be edited, and what is in it."""
    folder = bake(tmp_path_factory.mktemp("edited"), package_name=HERE, tracker="none")
    (folder / "text.txt").write_text("Was ever woman in this humour wooed? " * 100)
    yield folder, (folder / "src" / HERE / "model.py").read_text()


def edit(edited: tuple[Path, str], text: str) -> tuple[Path, Path, str]:
    """The project, its model.py with `text` at its end, and all of that."""
    folder, model = edited
    file = folder / "src" / HERE / "model.py"
    file.write_text(model + text)
    return folder, file, model + text


def line_of(text: str, part: str) -> int:
    """The number of the last line that has a part."""
    return max(n for n, line in enumerate(text.splitlines(), 1) if part in line)


def test_an_error_in_ones_own_files_has_its_traceback(edited: tuple[Path, str]) -> None:
    """On one process, on ranks, with its cause; the file and the line of one's own come last."""
    folder, file, text = edit(edited, BROKEN)
    (layers := file.with_name("layers.py")).write_text(LAYERS)
    cause = [f'  File "{layers}", line 3, in scaled', "    return model.no_such_thing"]
    reason = "AttributeError: 'GPT' object has no attribute 'no_such_thing'"
    wanted = [
        f'  File "{file}", line {line_of(text, "scaled(model)")}, in compute_loss',
        "    return _compute(scaled(model), batch)",
        f'  File "{layers}", line 5, in scaled',
        '    raise KeyError("no scale") from error',
        "KeyError: 'no scale'",
    ]
    launch = ("env", "MAX_RESTARTS=0", "bash", "launch.sh", "-n", "2")
    for command in ((sys.executable, "-m", HERE), launch):
        lines = told(folder, *command, "train", *TINY, code=1)
        lines = [line for line in lines if not re.fullmatch(r"[ ^~]+", line)]
        whole = "\n".join(lines)
        places = [whole.find(text) for text in ("\n".join(cause), reason, "\n".join(wanted))]
        assert places == sorted(places) and places[0] >= 0, whole
        # torchrun's own report. The first step did not end, so a restart would fail as well.
        assert ("exitcode  : 70" in whole) == (command == launch)
    log = (folder / "runs/default/logs/train.log").read_text()
    assert f"{HERE}/train.py" in log and "KeyError: 'no scale'" in log, "it has the whole of them"


UNUSED = """

_build = build_model


def build_model(config, spec):
    model = _build(config, spec)
    model.never = nn.Linear(2, 2)
    return model
"""
PARTICULAR = """

_compute = compute_loss


def compute_loss(model, batch):
    assert type(model) is GPT, type(model)
    return _compute(model, batch)
"""


def test_ranks_name_an_unused_parameter_and_the_setting(edited: tuple[Path, str]) -> None:
    """On one line, once; with the setting it trains, and compute_loss gets the model itself."""
    folder, _, _ = edit(edited, UNUSED + PARTICULAR)
    command = ("bash", "launch.sh", "-n", "2", "train", *TINY, "--train.steps", "3")
    lines = told(folder, *command, "--name", "unused", code=2)
    errors = {line.removeprefix("[rank 1] ") for line in lines if "error" in line.lower()}
    assert errors == {
        "error: the loss does not depend on never.weight: remove or freeze "
        "such parameters, or add --parallel.find-unused-parameters"
    }
    assert not any("restarting all ranks" in line for line in lines)
    told(folder, *command, "--name", "used", "--parallel.find-unused-parameters", code=0)


ON_ONE_RANK = """

import os

_sum_up = compute_loss


def compute_loss(model, batch):
    loss = _sum_up(model, batch)
    if os.environ.get("RANK", "0") == "1":
        loss = loss._replace(total=loss.total + 0 * model.never.weight.sum())
    return loss
"""


def test_ranks_name_a_parameter_that_one_of_them_uses(edited: tuple[Path, str]) -> None:
    """As where the samples of one rank have no such target: the same line, and no restarts."""
    without_bias = UNUSED.replace("nn.Linear(2, 2)", "nn.Linear(2, 2, bias=False)")
    folder, _, _ = edit(edited, without_bias + ON_ONE_RANK)
    command = ("bash", "launch.sh", "-n", "2", "train", *TINY, "--train.steps", "3")
    lines = told(folder, *command, "--name", "on_one_rank", code=2)
    assert any("--parallel.find-unused-parameters" in line for line in lines), lines
    assert any("never.weight" in line for line in lines), lines
    assert not any("restarting all ranks" in line for line in lines), lines
    told(folder, *command, "--name", "on_one", "--parallel.find-unused-parameters", code=0)


IN_THE_FIRST_OF_TWO = """

_of_both = compute_loss
_calls = [0]


def compute_loss(model, batch):
    loss = _of_both(model, batch)
    if model.training:
        _calls[0] += 1
    if _calls[0] % 2:
        loss = loss._replace(total=loss.total + 0 * model.never.weight.sum())
    return loss
"""


def test_ranks_name_a_parameter_that_the_last_micro_batch_lacks(edited: tuple[Path, str]) -> None:
    """Its gradient is there, from the first micro-batch, but DDP would never reduce it."""
    without_bias = UNUSED.replace("nn.Linear(2, 2)", "nn.Linear(2, 2, bias=False)")
    folder, _, _ = edit(edited, without_bias + IN_THE_FIRST_OF_TWO)
    command = ("bash", "launch.sh", "-n", "2", "train", *TINY, "--train.steps", "3")
    command += ("--train.global-batch-size", "8", "--train.micro-batch-size", "2")
    lines = told(folder, *command, "--name", "first_of_two", code=2)
    wanted = "the loss of the last micro-batch does not depend on never.weight"
    assert any(wanted in line for line in lines), lines
    told(folder, *command, "--name", "both", "--parallel.find-unused-parameters", code=0)


IN_A_METRIC = """

_without_metric = compute_loss


def compute_loss(model, batch):
    loss = _without_metric(model, batch)
    return loss._replace(metrics={**loss.metrics, "never": model.never.weight.sum() * loss.count})
"""


def test_ranks_may_report_a_metric_of_an_unused_parameter(edited: tuple[Path, str]) -> None:
    """With the setting, DDP does not wait for the gradient of what only a metric depends on."""
    without_bias = UNUSED.replace("nn.Linear(2, 2)", "nn.Linear(2, 2, bias=False)")
    folder, _, _ = edit(edited, without_bias + IN_A_METRIC)
    command = ("bash", "launch.sh", "-n", "2", "train", *TINY, "--train.steps", "3")
    lines = told(folder, *command, "--name", "metric", code=2)
    assert any("the loss does not depend on never.weight" in line for line in lines), lines
    told(folder, *command, "--name", "unused", "--parallel.find-unused-parameters", code=0)


IN_ORDER_OF_RANK = """

import os

_build = build_model


def build_model(config, spec):
    model = _build(config, spec)
    # As a set of these names might list them.
    names = ["first", "second"]
    if os.environ.get("RANK", "0") == "1":
        names.reverse()
    for name in names:
        model.add_module(name, nn.Linear(2, 2))
    return model
"""


def test_ranks_refuse_models_in_different_orders(edited: tuple[Path, str]) -> None:
    """In one line, before the first step, and without a restart."""
    folder, _, _ = edit(edited, IN_ORDER_OF_RANK)
    command = ("bash", "launch.sh", "-n", "2", "train", *TINY, "--train.steps", "3")
    lines = told(folder, *command, "--name", "orders", code=2)
    (said,) = {line.removeprefix("[rank 1] ") for line in lines}
    assert said.startswith("error: the ranks have built different models: rank 0 has first.weight")
    assert "loop over a sorted list" in said


def test_other_ways_to_start_are_one_line(project: Project) -> None:
    """A script of the package; RANK without torchrun's other variables; tasks of srun."""
    script = str(project.folder / "src" / HERE / "train.py")
    said = told(project.folder, sys.executable, script, *TINY, code=1)
    assert said == [f"error: start it with python -m {HERE} train"]
    train = (sys.executable, "-m", HERE, "train", *TINY)
    said = told(project.folder, "env", "RANK=0", *train, code=2)
    problem = "RANK is set, but MASTER_ADDR is not"
    assert said == [f"error: {problem}: unset RANK, or start with ./launch.sh"]
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        (said,) = told(project.folder, "env", f"{name}=2", *train, code=2)
        assert said.startswith(f"error: {name} is 2: srun or mpirun has started several processes")
        assert "Let it start launch.sh once per machine" in said
    short = ("--train.steps", "2", "--name", "task_of_one")
    told(project.folder, "env", "SLURM_STEP_NUM_TASKS=1", *train, *short, code=0)


OWN_DATA = """

_build = build_datasets


def build_datasets(config):
    if config.data.path is None or config.data.path.name != "text.txt":
        raise UserError("this is not our data")
    return _build(config)
"""


def test_the_tests_of_a_project_use_its_own_settings(tmp_path: Path) -> None:
    """On ranks and by commands, too; they stand in one place at the top of conftest.py."""
    folder = bake(tmp_path, package_name=HERE, tracker="none", checkpoint="torch_save")
    (folder / "text.txt").write_text("Was ever woman in this humour won? " * 100)
    with open(folder / "src" / HERE / "data.py", "a") as file:
        file.write(OWN_DATA)
    conftest = folder / "tests/conftest.py"
    before = conftest.read_text()
    assert before.count("SETTINGS: dict[str, Any] = {}") == 1
    chosen = "test_ranks.py or commands_work or plain_one or not_taken_for"
    tests = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen)
    assert "this is not our data" in "\n".join(told(folder, *tests, "-x", code=1))
    own = 'SETTINGS: dict[str, Any] = {"data.path": Path(__file__).parents[1] / "text.txt"}'
    conftest.write_text(before.replace("SETTINGS: dict[str, Any] = {}", own))
    assert " passed" in told(folder, *tests, code=0)[-1]
    others = [path.read_text() for path in (folder / "tests").glob("test_*.py")]
    assert not any(re.search(r'preset\("|"--preset", "tiny"', text) for text in others)


def test_infer_and_the_workflow_can_be_deleted(tmp_path: Path) -> None:
    """Their commands go, all others work, and the render's own tests pass without them."""
    answers = {"parallelism": "single", "checkpoint": "torch_save", "tracker": "none"}
    with Project.imported(tmp_path, "deleted", **answers) as project:
        package = project.folder / "src/deleted"
        (package / "infer.py").unlink()
        shutil.rmtree(package / "workflow")
        (package / "workflow/__pycache__").mkdir(parents=True)  # as `git rm` leaves it
        for name in ("infer", "workflow", "baseline", "report"):
            line = project.refuses(name)
            assert line.startswith(f"there is no command '{name}'")
            assert f"\n  {name} " not in line and "\n  verify " in line
        project("train", *project.settings, "--train.steps", "2")
        project("verify")
        project("export", "--to", "weights.safetensors")
    names = "bad_settings or commands_work"
    words = (str(project.folder), "0", "tests/test_training.py", "-k", names)
    output = drill("own_tests.py", (0, *words), sources={"deleted": project.folder / "src"})
    assert "1 passed" in output and "1 skipped" in output, output


def test_a_step_that_does_not_fit_says_what_to_try(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU torch raises no such error: a step does in its place."""
    shown = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.02 GiB free."
    broken = f"""
import torch, {HERE}.model
from {HERE} import __main__, errors, train
def step(*given):
    raise torch.OutOfMemoryError({shown!r})
train.train_step = step
raise SystemExit(errors.run_main(lambda: __main__.dispatch({["train", *TINY, "--name", "oom"]})))
"""
    command = f"python -m {HERE} fit"
    (line,) = told(project.folder, sys.executable, "-c", broken, code=1)[-1:]
    assert line.startswith(f"error: {shown[:-1]}. Try --train.activation-checkpointing")
    assert line.endswith(f"(`{command}` with the same options shows what fits)")
    monkeypatch.setattr(Path, "exists", lambda path: False)  # without these stages
    assert command not in project.module("errors")._in_one_line(torch.OutOfMemoryError(shown))


def test_launched_ranks_refuse_in_one_line(project: Project) -> None:
    launch = ("bash", "launch.sh", "-n", "2", "train", "--preset", "tiny", "--device", "cpu")
    lines = told(project.folder, *launch, "--data.path", "nowhere", code=2)
    # On a busy machine the other rank may come to say so, too, before it is ended.
    said = {line.removeprefix("[rank 1] ") for line in lines}
    assert said == {f"error: --data.path: {project.folder / 'nowhere'} does not exist"}


def test_ctrl_c_on_ranks_shows_our_words_first(project: Project, tmp_path: Path) -> None:
    words = ("bash", "launch.sh", "-n", "2", "train", *TINY, "--train.steps", "100000")
    words += ("--run-dir", str(tmp_path / "run"), "--train.log-every", "1")
    with start(project.folder, *words, start_new_session=True) as process:
        try:
            metrics = tmp_path / "run/metrics.jsonl"
            deadline = time.monotonic() + 300
            while not (metrics.exists() and len(metrics.read_bytes().splitlines()) > 3):
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            output, _ = process.communicate(timeout=120)
        finally:
            with_all = process.poll() is None
            if with_all:
                os.killpg(process.pid, signal.SIGKILL)
    lines = [line for line in output.splitlines() if not line.startswith("step ")]
    after = lines[next(i for i, line in enumerate(lines) if "SIGINT" in line) :]
    assert after[0].startswith("SIGINT: stopping as soon as the "), output
    assert after[-1] == "torchrun: got SIGINT"
    assert not any("closing signal" in line or "death signal" in line for line in after)


def test_a_run_directory_that_cannot_be_is_not_tried_again(
    project: Project, tmp_path: Path
) -> None:
    """UserError: its exit code is the one after which launch.sh starts no rank again."""
    (tmp_path / "file").touch()
    with pytest.raises(project.module("errors").UserError, match=r"file/run cannot be a run dir"):
        project("train", *project.settings, "--run-dir", str(tmp_path / "file/run"))
