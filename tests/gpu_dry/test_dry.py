"""The CUDA path of renders, followed on a CPU by fake CUDA tensors: dry.py says what is seen."""

import itertools
import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT, bake
from tests.conftest import run as run_command
from tests.gpu_dry import dry

RANKS = 16
ANSWERS = ("parallelism", "checkpoint", "samples", "text")  # and "task", for images
FLAGS = ("muon", "ema", "accumulation", "recomputation", "dropout")
# Every pair of answers and flags is in one of these, except Muon for images.
RUNS = (
    ("single", "torch_save", "numbered", "bytes", True, True, True, True, True),
    ("single", "dcp", "mixture", "images", False, True, True, False, False),
    ("single", "dcp_async", "stream", "tokenizer", True, False, False, False, True),
    ("ddp", "torch_save", "mixture", "tokenizer", False, False, False, True, False),
    ("ddp", "dcp", "stream", "bytes", True, False, False, True, True),
    ("ddp", "dcp_async", "numbered", "images", False, False, False, True, True),
    ("fsdp", "torch_save", "stream", "images", False, False, True, False, True),
    ("fsdp", "dcp", "numbered", "tokenizer", True, True, True, False, False),
    ("fsdp", "dcp_async", "mixture", "bytes", True, True, False, True, True),
    ("ddp", "dcp_async", "stream", "bytes", False, True, True, False, False),
)
NAMES = ["_".join((run[0], run[1], run[3])) for run in RUNS]
PLAIN, MUON, SHARDED = NAMES[9], NAMES[4], NAMES[8]

# A run with other lines in one file: the run, the file, what stands there, what is put there.
VARIANTS = {
    "batch_statistics": (
        *(NAMES[5], "model.py", "nn.GroupNorm(config.groups, config.width)"),
        "nn.BatchNorm2d(config.width)",
    ),
}
FILES = {"bytes": "text.txt", "tokenizer": "tokens", "images": "images.npz"}

# The run, the file, what stands there, what is put in its place, and how it is noticed.
BREAKAGES = {
    "item": (
        *(PLAIN, "train.py", "loss_vectors.append(sums_of_batch)"),
        *("loss_vectors.append(sums_of_batch + 0 * sums_of_batch.sum().item())", "Waits"),
    ),
    "copy_to_the_host": (
        *(PLAIN, "train.py", "state.grad_norm = norm", "state.grad_norm = norm.cpu()", "Waits"),
    ),
    "batch_on_the_host": (
        *(PLAIN, "train.py", "state, move(batch, world.device))\n                if state.metrics"),
        "state, batch)\n                if state.metrics",
        "FakeTensorDeviceMismatchError",
    ),
    "bad_step_read": (
        *(PLAIN, "run/bad_steps.py", "    if isinstance(bad, torch.Tensor) and getattr("),
        *("    if not bad and getattr(", "Waits"),
    ),
    "not_fused": (PLAIN, "optim.py", "fused=supports", "fused=not supports", "Waits"),
    "pageable_batch": (PLAIN, "device.py", "batch = batch.pin_memory()", "pass", "Waits"),
    "blocking_copy_of_a_batch": (
        *(PLAIN, "device.py", "batch.to(device, non_blocking=True)", "batch.to(device)", "Waits"),
    ),
    "clipping_by_a_number": (
        *(PLAIN, "loss.py", "clip / (size + 1e-6)", "clip / (float(size) + 1e-6)", "Waits"),
    ),
    "count_made_on_the_host": (
        *(PLAIN, "loss.py", "total.new_full((), value)"),
        *("torch.tensor(value, device=total.device)", "Waits"),
    ),
    "bad_step_by_isfinite": (
        *(PLAIN, "loss.py", "(judged - judged) != 0", "not torch.isfinite(judged)", "Waits"),
    ),
    "mask_made_on_the_host": (
        *(PLAIN, "model.py", "k, v, dropout_p=dropout, is_causal=True"),
        *("k, v, torch.ones(32, 32).tril().bool().to(x.device), dropout", "Waits"),
    ),
    "angles_made_on_the_host": (
        *(PLAIN, "model.py", "block(x, self.table)", "block(x, rotary(32, 16).to(x.device))"),
        "Waits",
    ),
    "table_left_on_the_host": (
        *(PLAIN, "model.py", 'self.register_buffer("table", table, persistent=False)'),
        *("self.table = table", "FakeTensorDeviceMismatchError"),
    ),
    "part_of_the_loss_read": (
        *(
            PLAIN,
            "model.py",
            "weight_gradient += of_weight\n",
            "weight_gradient += of_weight * of_weight.any().item()\n",
        ),
        "Waits",
    ),
    "metric_read": (PLAIN, "model.py", "total.detach() / math", "total.item() / math", "Waits"),
    "empty_rows_dropped": (
        *(PLAIN, "model.py", 'tokens = batch["tokens"].long()'),
        *('tokens = batch["tokens"].long()\n    tokens = tokens[tokens.any(1)]', "Dynamic"),
    ),
    "average_read": (
        *(PLAIN, "ema.py", "fraction * (1 - is_bad)", "fraction * (0 if is_bad else 1)", "Waits"),
    ),
    "muon_reads_the_flag": (
        *(MUON, "optim.py", "rate * (1.0 - found_inf)", "rate * (1.0 - found_inf.item())"),
        "Waits",
    ),
    "muon_looks_for_gradients": (
        *(MUON, "optim.py", 'group["params"] if p.grad is not None]'),
        *('group["params"] if p.grad is not None and p.grad.any()]', "Waits"),
    ),
    "statistics_put_back_by_the_host": (
        *("batch_statistics", "run/bad_steps.py", "if isinstance(bad, torch.Tensor):"),
        *("if False:", "Waits"),
    ),
    "mask_by_a_number": (
        *("fsdp_dcp_tokenizer", "model.py", "documents = ends.cumsum(1) - ends"),
        *("documents = ends.cumsum(1) - ends + 0 * ends.max().item()", "Waits"),
    ),
    "norm_checked_by_torch": (
        *(SHARDED, "distributed/parallel.py", "get_total_norm(gradients,"),
        *("get_total_norm(gradients, error_if_nonfinite=True,", "Waits"),
    ),
    "state_restored_to_the_host": (
        *(PLAIN, "checkpoint/tensors.py", "torch.zeros_like(parameter)"),
        *("torch.zeros(parameter.shape)", "assign a gradient"),
    ),
    "staging_in_pageable_memory": (
        *(PLAIN, "checkpoint/staging.py", "pinned=self.stream is not None", "pinned=False"),
        "a copy in pageable memory",
    ),
    "pinned_memory_allocated_in_a_save": (
        *(PLAIN, "checkpoint/checkpointer.py", "self.writer.prepare(self.tensors_to_save())"),
        *("pass", "pinned"),
    ),
    "staging_blocks": (
        *(PLAIN, "checkpoint/staging.py", "(targets, sources, non_blocking=True)"),
        *("(targets, sources)", "a blocking copy"),
    ),
    "staging_waited_for": (
        *(PLAIN, "checkpoint/staging.py", "self.event = self.stream.record_event()"),
        *("self.event = self.stream.record_event(); self.event.synchronize()", "Event.synchronize"),
    ),
    "staging_on_the_training_stream": (
        *(PLAIN, "checkpoint/staging.py", "with torch.cuda.stream(self.stream):"),
        *("with torch.no_grad():", "Race"),
    ),
    "staging_before_the_step_is_done": (
        *(PLAIN, "checkpoint/staging.py"),
        *("self.stream.wait_stream(torch.cuda.current_stream(self.device))", "pass", "Race"),
    ),
    "host_waits_for_the_staging": (
        *(PLAIN, "checkpoint/writer.py"),
        "torch.cuda.current_stream(self.device).wait_event(self.buffers.event)",
        *("self.buffers.event.synchronize()", "Waits"),
    ),
    "optimizer_ahead_of_the_staging": (
        *(PLAIN, "checkpoint/writer.py"),
        "torch.cuda.current_stream(self.device).wait_event(self.buffers.event)",
        *("pass", "Race"),
    ),
    "written_before_it_is_copied": (
        *(PLAIN, "checkpoint/staging.py", "            self.event.synchronize()"),
        *("            pass", "Race"),
    ),
    "validation_reads_each_batch": (
        *(PLAIN, "validation.py", "sums = sums + loss_vector(loss) * micro_batch.weight"),
        *("sums = sums + loss_vector(loss).cpu() * micro_batch.weight", "validation"),
    ),
    "record_reads_each_figure": (
        *(PLAIN, "run/journal.py", "torch.cat([all_sums, bad_steps, grad_norm]).tolist()"),
        "[x.item() for x in torch.cat([all_sums, bad_steps, grad_norm])]",
        "record",
    ),
    "memory_waits_for_each_step": (
        *(PLAIN, "run/hardware.py", "        if record is None:\n            return\n"),
        *("        torch.cuda.synchronize()\n        if record is None:\n            return\n",),
        "Waits",
    ),
    "profiler_waits_for_each_step": (
        *(PLAIN, "profiler.py", "if records_from_next or window_ended:"),
        *("if True:", "Waits"),
    ),
    "bad_steps_looked_for_at_each_step": (
        *(PLAIN, "run/bad_steps.py", "if self.stop:", "if True:", "Waits"),
    ),
    "stragglers_timed_by_the_host": (
        *(PLAIN, "distributed/stragglers.py", "event.record()", "event.synchronize()", "Waits"),
    ),
    "stragglers_read_too_early": (
        *(PLAIN, "distributed/stragglers.py", "self.spans.append((self.began, self.arrived))"),
        *("self.began.elapsed_time(self.arrived)", "RuntimeError: elapsed_time"),
    ),
}
RESUMED = ("state_restored_to_the_host", "statistics_put_back_by_the_host")


def pairs(rows: Any) -> set[tuple[int, Any, int, Any]]:
    """Each two values that are in one row."""
    return {(i, row[i], j, row[j]) for row in rows for i, j in itertools.combinations(range(9), 2)}


def test_every_pair_of_answers_is_followed() -> None:
    values = [{run[i] for run in RUNS} for i in range(9)]
    whole = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))
    for answer, found in zip(ANSWERS[:3], values, strict=False):
        assert found == {*whole[answer]}
    assert pairs(itertools.product(*values)) - pairs(RUNS) == {(3, "images", 4, True)}


@pytest.fixture(scope="module")
def guard(request: pytest.FixtureRequest) -> Path:
    """The compiled guard."""
    try:
        return dry.build(request.config.cache.mkdir("gpu_dry"))
    except dry.NotHere as error:
        skip(str(error))
        raise


def skip(reason: str) -> None:
    """Skip a test, or let it fail in CI and where DRY_REQUIRED=1 is set."""
    required = os.environ.get("CI") or os.environ.get("DRY_REQUIRED") == "1"
    (pytest.fail if required else pytest.skip)(f"the CUDA path cannot be followed: {reason}")


def test_where_it_cannot_run_it_is_skipped_or_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.raises(dry.NotHere, match=r"no C\+\+ compiler: install g\+\+"):
        dry.build(tmp_path)
    command = [sys.executable, "-m", "tests.gpu_dry.follow", str(tmp_path / "none.so"), ""]
    assert run_command(command, timeout=60).startswith("not here: torch does not load the guard")
    monkeypatch.setenv("CI", "")
    for required, outcome in (("", pytest.skip.Exception), ("1", pytest.fail.Exception)):
        monkeypatch.setenv("DRY_REQUIRED", required)
        with pytest.raises(outcome, match="cannot be followed: a reason"):
            skip("a reason")


def make_data(folder: Path, kind: str) -> None:
    """Samples in the one form that a source has: a file, or a folder of tokens."""
    draw = random.Random(0)
    if kind == "bytes":
        folder.write_bytes(bytes(draw.choices(b"etaoin shrdlu\n", k=20_000)))
    elif kind == "images":
        images = np.zeros((60, 8, 8), np.uint8)
        with folder.open("wb") as file:
            np.savez(file, images=images, labels=np.arange(60) % 10)
    else:
        folder.mkdir()
        for name in ("train.bin", "val.bin"):
            np.array(draw.choices(range(300), k=20_000), np.uint16).tofile(folder / name)


def settings(run: tuple, data: Path) -> dict[str, Any]:
    """Small settings of a run, with its flags."""
    parallelism, _, samples, kind, muon, ema, accumulation, recomputation, dropout = run
    ranks = 1 if parallelism == "single" else RANKS
    chosen = {
        "data.path": str(data / FILES[kind]),
        "track": False,
        "profile.every": 100,
        "model.layers": 1,
        "model.dropout": 0.1 if dropout else 0.0,
        "train.validate_samples": 2 * ranks,
        "train.activation_checkpointing": recomputation,
        # Several micro-batches of which some ranks have fewer: the last one is padding.
        "train.global_batch_size": 2 * ranks + 1 if accumulation else ranks,
        "train.micro_batch_size": 1,
        "optim.ema": 0.9 if ema else 0.0,
    }
    if kind != "images":
        chosen["optim.name"] = "muon" if muon else "adamw"
    if kind == "tokenizer":
        chosen |= {"data.vocabulary": 300, "data.end_of_text": 0}
        chosen["data.documents"] = "separate" if parallelism == "fsdp" else "together"
    if samples == "mixture":
        chosen |= {"data.path": str(data), "data.mix": "{0}=0.7,more_{0}=0.3".format(FILES[kind])}
    if (parallelism, samples) == ("fsdp", "mixture"):
        chosen["parallel.replicate"] = 4
    return chosen


class Followed:
    """Renders, and what happened in their runs."""

    def __init__(self, guard: Path, folder: Path) -> None:
        self.guard, self.folder = guard, folder
        for kind, name in FILES.items():
            make_data(folder / name, kind)
            make_data(folder / f"more_{name}", kind)
        self.settings, self.ranks = {}, {}
        for name, run in zip(NAMES, RUNS, strict=True):
            answers = dict(zip(ANSWERS, run, strict=False))
            if run[3] == "images":
                answers |= {"task": "image_classifier", "text": "bytes"}
            if run[0] != "single":
                answers["cluster"] = "slurm"
            bake(folder / "renders" / name, package_name=name, tracker="none", **answers)
            self.settings[name] = settings(run, folder)
            self.ranks[name] = 1 if run[0] == "single" else RANKS
        for name, (run, *change) in VARIANTS.items():
            self.settings[name], self.ranks[name] = self.settings[run], self.ranks[run]
            self.change(name, run, *change)

    def change(self, name: str, run: str, file: str, right: str, wrong: str) -> None:
        """The package of a run under another name, with one file changed."""
        package = shutil.copytree(self.source(run), self.source(name))
        text = (package / file).read_text()
        assert right in text, f"{file} has changed: state {name} anew"
        (package / file).write_text(text.replace(right, wrong))

    def source(self, name: str) -> Path:
        """The folder of a package."""
        return self.folder / "renders" / name / "my-training-run/src" / name

    def follow(self, cases: dict[str, str]) -> dict[str, dict[str, Any]]:
        """What happens in packages, each of which is that of a run or like it."""
        plan = {
            name: {
                "settings": self.settings[run],
                "ranks": self.ranks[run],
                "resume": name in (*NAMES, *VARIANTS, *RESUMED),
            }
            for name, run in cases.items()
        }
        file = self.folder / "plan.json"
        file.write_text(json.dumps(plan))
        command = [sys.executable, "-m", "tests.gpu_dry.follow", str(self.guard), str(file)]
        path = os.pathsep.join([str(ROOT), *(str(self.source(n).parent) for n in cases)])
        output = run_command(command, timeout=900, PYTHONPATH=path)
        if output.startswith("not here: "):
            skip(output)
        lines = [line[5:] for line in output.splitlines() if line.startswith("case ")]
        return {name: outcome for line in lines for name, outcome in json.loads(line).items()}


@pytest.fixture(scope="module")
def followed(guard: Path, tmp_path_factory: pytest.TempPathFactory) -> Followed:
    return Followed(guard, tmp_path_factory.mktemp("gpu_dry"))


@pytest.fixture(scope="module")
def outcomes(followed: Followed) -> dict[str, dict[str, Any]]:
    return followed.follow({name: name for name in (*NAMES, *VARIANTS)})


def mistake(outcome: dict[str, Any], background: bool, ema: bool) -> str:
    """What is wrong in a run, "" if nothing is."""
    if "error" in outcome:
        return outcome["error"]
    if len(outcome["record"]) > 1:
        return "record"
    if len(outcome["validation"]) > 1 + ema:
        return "validation"
    if not background:
        return ""
    if outcome["save"]:
        return outcome["save"][0]
    staged = {"events": [1], "own_stream": True, "pinned": 0, "pinned_again": 0}
    return str({n: outcome[n] for n, v in staged.items() if outcome[n] != v} or "")


@pytest.mark.parametrize("name", [*NAMES, *VARIANTS])
def test_the_host_never_waits_for_the_device(
    name: str, outcomes: dict[str, dict[str, Any]]
) -> None:
    run = RUNS[NAMES.index(VARIANTS[name][0] if name in VARIANTS else name)]
    outcome = outcomes[name]
    assert not mistake(outcome, run[1] == "dcp_async", run[5]), outcome.get("traceback")
    assert outcome["planned"] == (0 if run[1] == "torch_save" else outcome["written"])


@pytest.fixture(scope="module")
def broken(followed: Followed, outcomes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What happens in runs of broken packages; those that are whole have compiled their files."""
    for name, (run, *change, _) in BREAKAGES.items():
        followed.change(name, run, *change)
    return followed.follow({name: each[0] for name, each in BREAKAGES.items()})


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_breakage_is_noticed(broken: dict[str, dict[str, Any]], name: str) -> None:
    *_, noticed = BREAKAGES[name]
    assert noticed in mistake(broken[name], True, True), broken[name]
