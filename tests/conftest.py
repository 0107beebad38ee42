"""Helpers that all tests share: render the template, run its commands, import its modules."""

import contextlib
import gc
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cookiecutter.main import cookiecutter
from hypothesis import settings
from jinja2 import Environment
from xdist.scheduler import LoadScopeScheduling

from tests import forked

ROOT = Path(__file__).parents[1]
PROJECT = "{{cookiecutter.project_slug}}"
# One thread for each worker of pytest-xdist and each process it starts: more threads than cores
# slow each other down. torch reads this when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"
# Where a test has more threads, those that wait give way to the other workers.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# Under `nohup` or as a script's background job the tests would start with signals that are ignored,
# and so would all that they start; a run leaves such a signal ignored.
for number, handler in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Machines differ in speed: no deadline. Hypothesis draws the same examples each time, so
# that no change fails by chance: `pytest --hypothesis-profile anew` draws others.
settings.register_profile("anew", deadline=None, database=None, derandomize=False)
settings.register_profile("template", settings.get_profile("anew"), derandomize=True)
settings.load_profile("template")

# A run sets aside for the collector what is there when it begins, and takes it back at its end.
# Here that is done once for all runs of a test: to go through all that tests have imported, three
# times, would take ten times as long as a short run itself.
set_aside = gc.freeze
gc.freeze = gc.unfreeze = lambda: None


def pytest_runtest_setup() -> None:
    gc.collect()
    set_aside()


# Slow tests, the slowest first: started last, one of them would run alone at the end.
LONG = (
    "workflow/test_whole_workflow",
    "project/test_store",
    "stress/test_stops",
    "cluster/test_slurm",
    "cluster/test_hosts",
    "project/test_life.py::test_the_commands_of_its_readme",
    "stress/test_resources",
    "template/test_updating",
    "stress/test_kill_storm",
    "cluster/test_kubernetes",
    "stress/",
    "project/test_life.py::test_its_own",
    "project/test_reference",
    "project/test_travel",
    "project/test_own_models",
    "gpu_dry/",
    "workflow/test_scale_stage",
    "workflow/test_profile_stage",
    "workflow/test_checkpoint_stage",
    "template/test_matrix",
    "project/test_logs",
    "project/test_life",
    "cluster/test_hybrid",
    "project/test_tracker",
    "workflow/",
    "template/test_render",
    "template/test_docs",
    "template/test_demo",
    "template/test_benchmarks",
    "template/test_answers.py::test_all_answers_together",
)
# Left out by `make test`, run by `make slow`: tests, and files of tests, that together take two
# thirds of the time. What stays tries the promises in a shorter form.
SLOW = (
    "cluster/test_hosts",
    "cluster/test_hybrid",
    "cluster/test_kubernetes.py::test_what_a_pod_runs",
    "cluster/test_launch",
    "cluster/test_slurm",
    "gpu_dry/test_dry.py::test_a_breakage_is_noticed",
    "project/test_chat_recipe.py::test_blocks",
    "project/test_chat_recipe.py::test_whole",
    "project/test_console.py::test_callbacks_are_called_on_all",
    "project/test_console.py::test_the_sweep",
    "project/test_endings.py::test_a_stop_ends_the_wait",
    "project/test_entrances.py::test_long_numbers",
    "project/test_life.py::test_a_killed_worker",
    "project/test_life.py::test_a_mistake_is_told",
    "project/test_life.py::test_any_number_of_ranks",
    "project/test_life.py::test_its_own_tests_pass[image",
    "project/test_life.py::test_own_tests_that_depend",
    "project/test_life.py::test_the_commands",
    "project/test_mistakes.py::test_an_error_in_ones_own",
    "project/test_mistakes.py::test_ctrl_c_on_ranks",
    "project/test_mistakes.py::test_launched_ranks",
    "project/test_mistakes.py::test_other_ways_to_start",
    "project/test_mistakes.py::test_ranks_",
    "project/test_mistakes.py::test_the_tests_of_a_project_use",
    "project/test_mixture.py::test_mixture_average",
    "project/test_own_models",
    "project/test_own_tests",
    "project/test_owners",
    "project/test_program.py::test_the_program_of_the_average",
    "project/test_reference.py::test_the_own_tests_of_a_render_notice",
    "project/test_sizes.py::test_a_few_samples",
    "project/test_store",
    "project/test_stream.py::test_each_rank",
    "project/test_terminal",
    "project/test_tokens.py::test_a_killed_one",
    "project/test_tracker.py::test_a_user_without_a_home",
    "project/test_tracker.py::test_its_log_is_the_journal",
    "project/test_travel.py::test_every_pair",
    "stress/test_damage",
    "stress/test_elastic",
    "stress/test_entrances",
    "stress/test_hostile_files",
    "stress/test_kill_storm",
    "stress/test_resources",
    "stress/test_stops",
    "stress/test_store",
    "template/test_benchmarks.py::test_a_benchmark_measures",
    "template/test_benchmarks.py::test_a_gpus_figures",
    "template/test_benchmarks.py::test_costs_of_many_ranks",
    "template/test_matrix.py::test_a_",
    "template/test_updating",
    "workflow/test_baseline_stage.py::test_slow_data",
    "workflow/test_profile_stage",
    "workflow/test_scale_stage.py::test_what_depends_on_the_rank",
    "workflow/test_tuning.py::test_loader_workers_that_end",
    "workflow/test_whole_workflow",
)
# Files whose tests share nothing.
APART = {"test_answers", "test_benchmarks", "test_life"}


class Scheduling(LoadScopeScheduling):
    """The tests of a file go to one worker, since they share renders.

    (Marks that group tests are silently ignored under pytest 9.2: pytest-xdist#1386.)
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return nodeid if Path(file).stem in APART else file


def pytest_configure() -> None:
    """Not where these helpers are imported from: the stress tests in full start all for real."""
    subprocess.Popen = forked.Popen


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        name = item.nodeid.removeprefix("tests/")
        return next((at for at, long in enumerate(LONG) if name.startswith(long)), len(LONG))

    items.sort(key=rank)
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(SLOW):
            item.add_marker("slow")


@pytest.fixture(scope="session", autouse=True)
def _isolated_cookiecutter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's own settings out of the tests, and the tests out of the user's home."""
    home = tmp_path_factory.mktemp("cookiecutter")
    config = home / "config.yaml"
    folders = {name: str(home / name) for name in ("cookiecutters_dir", "replay_dir")}
    config.write_text(json.dumps(folders), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COOKIECUTTER_CONFIG", str(config))
        yield


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """A command that a test calls here ends with stop signals ignored: no later start has that."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread: on a busy machine tiny models are far slower on more."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _templates_compiled_once() -> Iterator[None]:
    """Some hundred renders compile the same templates, which takes four fifths of their time."""
    compile_, known = Environment.compile, {}

    def compile_once(self: Environment, source: str, *rest: Any, **named: Any) -> Any:
        key = (type(self), source, *rest, *named.items(), *sorted(self.filters))
        if key not in known:
            known[key] = compile_(self, source, *rest, **named)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Environment, "compile", compile_once)
        yield


def recipe(language: str, word: str) -> str:
    """The first block of docs/guides/, in a language, that has a word in it."""
    blocks: list[str] = []
    for page in sorted((ROOT / "docs/guides").glob("*.md")):
        # What is cut from a render is no recipe.
        text = re.sub(r"<!-- cut: .*?<!-- end -->", "", page.read_text("utf-8"), flags=re.DOTALL)
        blocks += re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return next(block for block in blocks if word in block)


def records(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def copy_template(folder: Path) -> Path:
    """Copy what a render needs, and return the folder."""
    for name in ("hooks", "templates", PROJECT):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("cookiecutter.json", "local_extensions.py"):
        shutil.copy(ROOT / name, folder)
    return folder


def bake(
    out_dir: Path, *, template: Path = ROOT, accept_hooks: bool = False, **answers: Any
) -> Path:
    """Render through the Python API and return the project's folder."""
    return Path(
        cookiecutter(
            str(template),
            no_input=True,
            extra_context=answers,
            output_dir=str(out_dir),
            accept_hooks=accept_hooks,
        )
    )


def bake_cli(
    out_dir: Path,
    *options: str,
    template: Path = ROOT,
    typed: str | None = None,
    timeout: float = 300,
    env: dict[str, str] | None = None,
    **answers: str,
) -> subprocess.CompletedProcess[str]:
    """Run the command, without prompts unless there is something to type at them."""
    return subprocess.run(
        [sys.executable, "-m", "cookiecutter", str(template), "--output-dir", str(out_dir)]
        + (["--no-input"] if typed is None else [])
        + [*options, *(f"{key}={value}" for key, value in answers.items())],
        input=typed or "",
        env=env,
        timeout=timeout,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="surrogateescape",
    )


def drill(
    script: str, *jobs: tuple[int | str, ...], sources: dict[str, Path], timeout: float = 1500
) -> str:
    """The output of a script of project/drills, job after job: its ranks (0: none), its arguments.

    The packages of several renders go into one process, whose start costs more than what it tests.
    """
    from benchmarks.common import free_ports

    path, output = os.pathsep.join(map(str, sources.values())), ""
    for port, (ranks, *words) in zip(free_ports(len(jobs)), jobs, strict=True):
        command = [sys.executable, str(ROOT / "tests/project/drills" / script), *map(str, words)]
        names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        world = dict(zip(names, ("127.0.0.1", str(port), str(ranks), str(ranks)), strict=True))
        each = [{**world, "RANK": str(it), "LOCAL_RANK": str(it)} for it in range(int(ranks))]
        output += run_together(
            command, timeout, [{"PYTHONPATH": path, **it} for it in each or [{}]]
        )
    return output


def run(command: list[str], timeout: float, **environment: str) -> str:
    """The output of a command that succeeds; nothing that it has started is left behind."""
    return run_together(command, timeout, [environment])


def run_together(command: list[str], timeout: float, environments: list[dict[str, str]]) -> str:
    """The output of processes that all succeed, one for each environment.

    When one fails the others are killed. When they hang, the output ends with where each thread of
    each of them stands.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log, contextlib.ExitStack() as stack:
        processes = []
        for environment in environments:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONFAULTHANDLER": "1", **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(process.wait)
            stack.callback(signal_session, process, signal.SIGKILL)
            processes.append(process)
        problem, end = "", time.monotonic() + timeout
        while not problem and any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break
            if time.monotonic() > end:
                problem = f"{command} hangs after {timeout} s\n"
                for process in processes:
                    signal_session(process, signal.SIGABRT)
                for process in processes:
                    process.wait(timeout=120)
            time.sleep(0.01)
        failed = problem or any(process.poll() for process in processes)
        log.seek(0)
        output = problem + log.read()
    assert not failed, output
    return output


def signal_session(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal a process and all that it has started, as far as they are there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def run_module(*arguments: str) -> None:
    """Run a module of this repository."""
    run([sys.executable, "-m", *arguments], timeout=1500)


class Project:
    """Calls commands of a render in this process; paths are relative to its folder."""

    settings = ("--preset", "tiny", "--device", "cpu", "--data.path", "text.txt")

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.trained: dict[str, Any] = {}

    @classmethod
    @contextlib.contextmanager
    def imported(cls, folder: Path, name: str, **answers: str) -> Iterator["Project"]:
        """Render it, with a text to train on; no other import may have this name."""
        project = cls(name, bake(folder, package_name=name, **answers))
        (project.folder / "text.txt").write_text("Was ever woman in this humour wooed? " * 100)
        sys.path.insert(0, str(project.folder / "src"))
        yield project
        sys.path.remove(str(project.folder / "src"))

    def __call__(self, *words: str) -> None:
        """Run a command that has to succeed."""
        with contextlib.chdir(self.folder):
            assert self.module("__main__").dispatch(list(words)) == 0

    def python(
        self, *words: str, cwd: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run Python in a process of its own that can import the render, by default in its folder.

        `words` are Python's arguments, `variables` are added to the environment.
        """
        return subprocess.run(
            [sys.executable, *words],
            cwd=cwd or self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder / "src"), **variables},
            capture_output=True,
            text=True,
            timeout=300,
        )

    def module(self, name: str) -> Any:
        """Import from the render."""
        return importlib.import_module(f"{self.name}.{name}")

    def config(self, **changes: Any) -> Any:
        """The tiny preset on its text, as a stage has it; changes as in train__steps=3."""
        config, stage = self.module("config"), self.module("workflow.stage")
        named = {key.replace("__", "."): value for key, value in changes.items()}
        ground = {"device": "cpu", "data.path": self.folder / "text.txt"}
        tiny = stage.StageConfig(**vars(config.preset("tiny")))
        return config.override(tiny, ground | named)

    def train_on(self, patch: pytest.MonkeyPatch, dataset: Any) -> None:
        """Replace the training data of all runs by `dataset`."""
        training = self.module("train")
        build_datasets = training.build_datasets

        def replaced(config: Any) -> Any:
            _, validation, spec = build_datasets(config)
            return dataset, validation, spec

        patch.setattr(training, "build_datasets", replaced)

    def refuses(self, *words: str) -> str:
        """The one line that bad input gets."""
        errors = (self.module("errors").UserError, self.module("errors").RankError)
        with pytest.raises(errors) as refused:
            self(*words)
        return str(refused.value)

    def tensors(self, where: Path, step: int | None = None) -> dict[str, Any]:
        """Everything in a checkpoint, by name."""
        reading = self.module("checkpoint.transfer")
        source = reading.open_tensors(*reading.find_checkpoint(where, step))
        import torch

        empty = {name: torch.empty(f.shape, dtype=f.dtype) for name, f in source.forms.items()}
        source.read(empty, self.module("distributed").Group())
        return empty


def project_fixture(name: str, **answers: str) -> Any:
    """A fixture of a module: the project of these answers, imported."""

    @pytest.fixture(scope="module")
    def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
        with Project.imported(tmp_path_factory.mktemp(name), name, **answers) as it:
            yield it

    return project
