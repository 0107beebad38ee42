"""Try renders on other releases of torch and Python, and look up torch's private names.

python -m scripts.compat               all of TORCH on all of PYTHON that this machine has
python -m scripts.compat --torch 2.13.0 --python 3.12
python scripts/compat.py --names       look the names up in this interpreter's own torch

Each pair gets a virtual environment below build/compat, in which the renders' own tests run. What
was found is added to tests/stress/results/compat.json, from which `make docs` makes the README's
table; a pair that was not tried again keeps its last result.
"""

import argparse
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "tests/stress/results/compat.json"
NEWEST = "newest"
TORCH = ("2.9.0", "2.13.0", NEWEST)
PYTHON = ("3.11", "3.12", "3.13")
RENDERS: dict[str, dict[str, str]] = {
    "ddp, dcp_async": {},
    "fsdp, dcp": {"parallelism": "fsdp", "checkpoint": "dcp", "task": "image_classifier"},
}

# Every name of torch, and one of pickle, that a render uses although it is private. A test compares
# this list with the renders. What a later torch lacks has to be replaced there.
ELASTIC = "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent"
PRIVATE = (
    "multiprocessing.queues.Queue._on_queue_feeder_error",
    "pickle._Unpickler",
    "torch._dynamo",
    "torch._dynamo.utils",
    "torch._foreach_add_",
    "torch._foreach_copy_",
    "torch._foreach_lerp",
    "torch._foreach_lerp_",
    "torch._foreach_mul_",
    "torch._foreach_norm",
    "torch._foreach_sub",
    "torch._foreach_sub_",
    "torch._inductor.config",
    "torch._inductor.utils.fresh_cache",
    "torch._subclasses.fake_tensor",
    "torch.UntypedStorage._cdata",
    "torch._ops.OpOverload",
    "torch._utils.ExceptionWrapper",
    "torch.autograd._profiler_enabled",
    "torch.distributed.ProcessGroup._get_sequence_number_for_group",
    "torch.distributed.checkpoint.default_planner.DefaultSavePlanner._cached_plans_key",
    "torch.distributed.checkpoint.planner.SavePlanner._cached_all_plans",
    "torch.distributed.checkpoint.planner.SavePlanner._cached_final_save_plan",
    "torch.distributed.checkpoint.planner.SavePlanner._cached_global_plan",
    "torch.distributed.checkpoint.planner.SavePlanner._cached_metadata",
    "torch.distributed.checkpoint.planner.SavePlanner._cached_save_plan",
    "torch.distributed.distributed_c10d._world",
    "torch.distributed.tensor.DTensor._spec",
    "torch.distributed.elastic.multiprocessing.api._terminate_process_handler",
    "torch.nn.Module._buffers",
    "torch.nn.Module._non_persistent_buffers_set",
    "torch.nn.Module._parameters",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
    "torch.nn.utils.stateless._reparametrize_module",
    "torch.Tensor._backward_hooks",
    "torch.Tensor._base",
    "torch.Tensor._post_accumulate_grad_hooks",
    "torch.Tensor._version",
    "torch.ops.aten._scaled_dot_product_flash_attention",
    "torch.ops.aten._unsafe_view",
    "torch.ops.aten.add.Tensor._overloadpacket",
    "torch.testing._internal.distributed.fake_pg.FakeStore",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils.data._utils.signal_handling._error_if_any_worker_fails",
    "torch.utils.data._utils.signal_handling._remove_worker_pids",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._worker_pids_set",
    "torch.utils._pytree.tree_leaves",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._pin_memory_thread",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._workers",
    f"{ELASTIC}._monitor_workers",
    f"{ELASTIC}._remaining_restarts",
    # A build with NCCL, and one without it.
    "torch._C._distributed_c10d._dump_nccl_trace|torch._C._distributed_c10d._dump_fr_trace",
)


def missing(names: tuple[str, ...] = PRIVATE) -> list[str]:
    """Those of the names that are not there; of alternatives ("a|b") one is enough."""
    return [name for name in names if not any(map(is_there, name.split("|")))]


def is_there(name: str) -> bool:
    """Whether a name can be looked up, be it an attribute that a class gives to its instances."""
    found: Any = None
    words = name.split(".")
    for end in range(len(words), 0, -1):
        try:
            found = importlib.import_module(".".join(words[:end]))
            break
        except ImportError:
            continue
    for word in words[end:]:
        if hasattr(found, word):
            found = getattr(found, word)
        else:
            kinds = inspect.getmro(found)[:-1] if inspect.isclass(found) else ()
            return any(re.search(rf"self\.{word}\b", inspect.getsource(kind)) for kind in kinds)
    return True


def interpreters(wanted: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Versions and paths of the interpreters that this machine has."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in wanted:
        found = [shutil.which(f"python{version}"), *versions.glob(f"{version}*/bin/python")]
        for path in filter(None, found):
            command = [path, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
            ended = subprocess.run(command, capture_output=True, text=True)
            if ended.stdout.strip() == version:
                yield version, str(path)
                break
        else:
            print(f"Python {version} is not on this machine")


def try_pair(python: str, torch: str, renders: dict[str, Path], folder: Path) -> dict[str, Any]:
    """Install a torch beside the renders' requirements, look the names up, run the tests."""
    started = time.perf_counter()
    if not (folder / "bin/python").exists():
        run([python, "-m", "venv", str(folder)])
    own = str(folder / "bin/python")
    requirement = "torch" if torch == NEWEST else f"torch=={torch}"
    pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
    run([*pip, requirement, "pytest", *map(str, renders.values())])
    installed = run([own, "-c", "import torch; print(torch.__version__)"]).split("+")[0].strip()
    tests: dict[str, dict[str, int]] = {}
    lacking = json.loads(run([own, str(Path(__file__).resolve()), "--names"], (0, 1)))
    for name, project in renders.items():
        pytest = [own, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        output = run(pytest, (0, 1), cwd=project, PYTHONPATH="src")
        last = output.rstrip().rpartition("\n")[2]  # a warning before it may quote anything
        counts = dict(
            reversed(c.split()) for c in re.findall(r"\d+ (?:passed|failed|errors?)", last)
        )
        tests[name] = {kind: int(count) for kind, count in counts.items()}
        if counts.keys() != {"passed"}:
            print(output)
    return {
        "torch": installed,
        "summary": summary(tests, lacking),
        "passed": not lacking and all(it.keys() == {"passed"} for it in tests.values()),
        "seconds": round(time.perf_counter() - started),
        "date": datetime.now(UTC).date().isoformat(),
    }


def run(
    command: list[str], codes: tuple[int, ...] = (0,), cwd: Path = ROOT, **environment: str
) -> str:
    """The output of a command; RuntimeError if its exit code is another."""
    ended = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": command[0], **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if ended.returncode not in codes:
        raise RuntimeError(f"{' '.join(command)}: exit code {ended.returncode}\n{ended.stdout}")
    return ended.stdout


def summary(tests: dict[str, dict[str, int]], lacking: list[str]) -> str:
    """A result in a few words."""
    words = [
        f"{name}: {', '.join(f'{count} {kind}' for kind, count in counts.items())}"
        for name, counts in tests.items()
    ]
    return "; ".join([*words, *([f"lacks {', '.join(lacking)}"] if lacking else [])])


def main(arguments: list[str] | None = None) -> int:
    """Try the pairs that are wanted; 1 if a test failed or a name is missing."""
    parser = argparse.ArgumentParser("python -m scripts.compat", description=__doc__)
    parser.add_argument("--names", action="store_true", help="print the missing names as JSON")
    parser.add_argument("--torch", nargs="+", default=TORCH)
    parser.add_argument("--python", nargs="+", default=PYTHON)
    parser.add_argument("--out", type=Path, default=RESULT, help="where the results are")
    parser.add_argument("--build", type=Path, default=ROOT / "build/compat")
    given = parser.parse_args(arguments)
    if given.names:
        print(json.dumps(lacking := missing()))
        return int(bool(lacking))
    from cookiecutter.main import cookiecutter  # not in the environments of the pairs

    results = json.loads(given.out.read_text("utf-8")) if given.out.exists() else {}
    bad = 0
    with tempfile.TemporaryDirectory(prefix="compat-") as folder:
        renders = {
            name: Path(
                cookiecutter(
                    str(ROOT),
                    no_input=True,
                    output_dir=f"{folder}/{number}",
                    accept_hooks=False,
                    extra_context=answers | {"project_slug": f"compat-{number}"},
                )
            )
            for number, (name, answers) in enumerate(RENDERS.items())
        }
        for version, path in interpreters(tuple(given.python)):
            for torch in given.torch:
                environment = given.build / f"python{version}-torch{torch}"
                found = try_pair(path, torch, renders, environment)
                print(f"Python {version}, torch {found['torch']}: {found['summary']}", flush=True)
                results[f"{version} {found['torch']}"] = found
                bad += not found["passed"]
                given.out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
