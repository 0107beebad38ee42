"""`fit` foretells the memory of a step, bounds its pace, and ends with a command to type."""

import contextlib
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch._C._profiler import _EventType as EventType
from torch.profiler import ProfilerActivity, profile

from tests.conftest import Project, bake, project_fixture
from tests.conftest import run as run_command

pytestmark = pytest.mark.usefixtures("one_thread")
language = project_fixture("fitted")
image = project_fixture("fitted_image", task="image_classifier")
sharded = project_fixture("fitted_fsdp", workflow="full", parallelism="fsdp")
CHANGES: list[dict[str, Any]] = [
    {},  # two micro-batches
    {"train.micro_batch_size": 8, "model.width": 128},
    {"train.activation_checkpointing": True, "optim.ema": 0.9},
    {"train.micro_batch_size": 32, "train.global_batch_size": 32, "model.layers": 3},
]


def config_of(project: Project, **changes: Any) -> Any:
    """The tiny preset for `fit`, of one rank on its text."""
    settings, config = project.module("config"), project.module("workflow.fit").FitConfig
    tiny = settings.preset("tiny", config)
    ground = {"device": "cpu", "ranks": 1}
    if hasattr(tiny.data, "context"):
        ground["data.path"] = project.folder / "text.txt"
    return settings.override(tiny, ground | changes)


def foretold(project: Project, config: Any) -> tuple[int, int, int]:
    """The peak with its micro-batch, and the bytes of the weights and of the optimizer's state."""
    module = project.module("workflow.fit")
    meter = module.Meter(1e12, 1e12)
    with mock.patch.object(project.module("workflow.fake_tensors"), "ON_GPU", {}):
        for size, state in module.measure(config, meter):
            if size == config.train.micro_batch_size:
                return meter.peak, *kept(project, state)
    raise AssertionError("no such size was measured")


def peaks_of(project: Project, **changes: Any) -> dict[int, int]:
    """The peak by the size of the micro-batch, with the kernels of a GPU."""
    module = project.module("workflow.fit")
    meter = module.Meter(1e12, 1e12)
    measured = module.measure(config_of(project, **changes), meter)
    return {size: meter.peak for size, _ in measured}


def kept(project: Project, state: Any) -> tuple[int, int]:
    """Bytes of the weights and of the optimizer's state that a rank has."""
    local = project.module("distributed").parallel.local_part
    states = [v for each in state.optimizer.state.values() for v in each.values()]
    moments = [local(value) for value in states if isinstance(value, torch.Tensor)]
    weights = [local(parameter) for parameter in state.model.parameters()]
    return sum(t.nbytes for t in weights), sum(t.nbytes for t in moments)


def changes_of_memory(prof: profile) -> list[int]:
    """Bytes allocated and freed (negative), in order, but for the scratch of a convolution.

    Its kernel allocates that and frees it before it ends: another one, as cuDNN's, takes another
    amount, which nobody can know beforehand.
    """
    found: list[tuple[int, int, int, int]] = []  # time, bytes, address, the convolution or 0

    def walk(event: Any, convolution: int) -> None:
        if event.tag == EventType.Allocation:
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.alloc_size, fields.ptr, convolution))
        elif event.tag == EventType.TorchOp and "convolution" in event.name:
            convolution = convolution or event.id
        for child in event.children:
            walk(child, convolution)

    assert prof.profiler is not None
    for root in prof.profiler.kineto_results.experimental_event_tree():
        walk(root, 0)
    found.sort()
    scratch, live = set[int](), dict[int, int]()
    for place, (_, size, address, convolution) in enumerate(found):
        if size > 0:
            live[address] = place
        elif address in live:
            born = live.pop(address)
            if convolution and found[born][3] == convolution:
                scratch |= {born, place}
    return [size for place, (_, size, *_) in enumerate(found) if place not in scratch]


def taken(project: Project, config: Any) -> tuple[int, int, int]:
    """The same of a real step: what is kept, and on top of it what the profiler sees allocated."""
    loop = project.module("train")
    state = loop.setup(config, project.module("distributed").World(0, 1, torch.device("cpu")))
    loop.train_step(state, state.loader.next())
    batches = state.loader.next()
    weights, moments = kept(project, state)
    buffers = sum(t.nbytes for t in state.model.buffers())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        loop.train_step(state, batches)
    now = peak = 0
    for change in changes_of_memory(prof):
        now += change
        peak = max(peak, now)
    data = sum(t.nbytes for batch in batches for t in batch.values())
    return weights + moments + buffers + peak + data, weights, moments


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("task", ["language", "image"])
def test_a_step_takes_what_was_foretold(
    request: pytest.FixtureRequest, task: str, changes: dict[str, Any]
) -> None:
    """Weights and the optimizer's state to the byte, the peak within 5 %."""
    project: Project = request.getfixturevalue(task)
    config = config_of(project, **changes)
    peak, *exact = foretold(project, config)
    real, *measured = taken(project, config)
    assert exact == measured
    assert abs(peak - real) <= 0.05 * real, (peak, real)


@pytest.mark.parametrize("ranks", [1, 2])
def test_scale_counts_as_the_command_does(language: Project, sharded: Project, ranks: int) -> None:
    """With the micro-batches of the settings, of a run that knows nothing of `fit`."""
    for project in (language, sharded):
        settings, changes = project.module("config"), {"train.precision": "bf16"}
        config = config_of(project, **changes)
        plain = settings.override(
            settings.preset("tiny"), {"data.path": config.data.path, "train.precision": "auto"}
        )
        size = min(config.train.micro_batch_size, config.train.global_batch_size // ranks)
        counted = project.module("workflow.fit").foretold(plain, ranks)
        # There it is not the first step, so that the run's sums are there already.
        assert counted == pytest.approx(peaks_of(project, ranks=ranks, **changes)[size], abs=100)


def test_ranks_share_what_fsdp_shards(sharded: Project) -> None:
    changes = {"train.global_batch_size": 16, "train.micro_batch_size": 4}
    one, four = (foretold(sharded, config_of(sharded, ranks=n, **changes)) for n in (1, 4))
    for alone, shared in zip(one[1:], four[1:], strict=True):
        assert alone / 4 <= shared <= 1.1 * alone / 4
    assert four[0] < one[0]


def test_the_first_size_is_counted_like_any_other(sharded: Project) -> None:
    """DTensor's own work at its first use of an operator, on tensors of the full size, is not."""
    module = sharded.module("workflow.fit")
    changes = {"ranks": 8, "train.global_batch_size": 8, "model.width": 256, "model.layers": 2}
    meter, found = module.Meter(1e12, 1e12), []
    torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    for size, _ in module.measure(config_of(sharded, **changes), meter, [1, 1]):
        found.append((size, meter.peak, meter.cost["memory"]))
    assert found[0] == found[1]


def test_gradients_that_wait_for_the_next_micro_batch_are_counted(sharded: Project) -> None:
    """With several micro-batches FSDP keeps them whole, unless it reduces each."""
    changes = {"train.global_batch_size": 8, "train.micro_batch_size": 1, "model.width": 128}
    changes |= {"model.layers": 8}
    whole = foretold(sharded, config_of(sharded, ranks=2, **changes))
    changes["parallel.reduce_each"] = True
    assert foretold(sharded, config_of(sharded, ranks=2, **changes))[0] < 0.9 * whole[0]


def test_a_gpu_keeps_what_its_kernels_keep(image: Project) -> None:
    """CUDA's autocast normalises in float32, so that more is kept than in a CPU's bfloat16."""
    changes = {"train.precision": "bf16"}
    config = config_of(image, **changes)
    of_gpu = peaks_of(image, **changes)[config.train.micro_batch_size]
    assert of_gpu > 1.1 * foretold(image, config)[0]


def test_attention_keeps_no_scores(language: Project) -> None:
    """With dropout a CPU's attention would; what a step needs is linear in the context."""
    peaks = [
        peaks_of(language, **{"data.context": n, "model.dropout": 0.1})[1] for n in (512, 1024)
    ]
    assert peaks[1] < 2.1 * peaks[0]


def test_dropout_is_called_in_any_way_and_costs_nothing_at_zero(language: Project) -> None:
    dropout, x = language.module("workflow.fake_tensors").ON_GPU["dropout"], torch.ones(64)
    for idle in (dropout(x, 0.0, True, False), dropout(x, p=0.5, training=False, inplace=False)):
        assert idle is x
    assert 0 < int((dropout(x, p=0.5, training=True) == 0).sum()) < 64


@pytest.mark.parametrize("each", [False, True], ids=["at_the_end", "each"])
def test_what_a_rank_sends(language: Project, sharded: Project, each: bool) -> None:
    """DDP: gradients, both ways. FSDP: weights twice a micro-batch, gradients once or each time."""
    changes = {"train.global_batch_size": 16, "optim.name": "adamw"}
    for project, ranks in ((language, 4), (sharded, 4)):
        module = project.module("workflow.fit")
        own = {"parallel.reduce_each": each} if project is sharded else {}
        meter = module.Meter(1e12, 1e12)
        for size, state in module.measure(config_of(project, ranks=ranks, **changes, **own), meter):
            sizes = {n: 4 * p.numel() for n, p in state.model.named_parameters()}
            weights, count = sum(sizes.values()), 4 // size
            expected = 2 * weights
            if project is sharded:  # what no block has is not gathered again
                again = sum(value for name, value in sizes.items() if name.startswith("blocks."))
                expected = count * (weights + again) + (count if each else 1) * weights
            assert module.sent_by(meter, state) == pytest.approx(0.75 * expected, rel=0.01)


def test_ddp_keeps_gradients_between_steps(language: Project) -> None:
    """Where a rank has one micro-batch of the same size, nothing else differs."""
    longer = {"data.context": 512}  # so that the peak is in backward
    alone = peaks_of(language, ranks=1, **longer, **{"train.global_batch_size": 1})[1]
    weights = foretold(language, config_of(language))[1]
    both = peaks_of(language, ranks=2, **longer, **{"train.global_batch_size": 2})[1]
    assert 0.5 * weights < both - alone <= 1.1 * weights


def test_a_norm_keeps_as_much_as_one_kernel(language: Project) -> None:
    on_gpu = language.module("workflow.fake_tensors").ON_GPU
    peak = peaks_of(language)[4]
    with mock.patch.dict(on_gpu):
        del on_gpu["rms_norm"]
        assert peak < 0.95 * peaks_of(language)[4]


def test_an_operator_takes_as_long_as_its_flops_or_its_bytes(language: Project) -> None:
    meter = language.module("workflow.fit").Meter(1e9, 1e12)
    a, b = torch.ones(64, 32), torch.ones(32, 16)
    with meter, meter.annotated("forward"):
        a @ b
    assert meter.cost["flops"] == 2 * 64 * 32 * 16
    assert meter.cost["eager"] == meter.cost["compiled"]
    # TF32 has half of the peak, of which 70 % are reached.
    assert meter.cost["eager"] == meter.cost["products"] == pytest.approx(2 * 65536 / 0.7e9)
    meter.begin(3)  # three micro-batches like this one
    with meter, meter.annotated("backward"):
        torch.add(a, a, out=torch.empty(64, 32))
    assert meter.cost["eager"] == meter.cost["kernels"] == pytest.approx(3 * 2.5e-6)
    meter.bandwidth = 1e9
    meter.begin(3)
    with meter, meter.annotated("backward"):
        torch.add(a, a, out=torch.empty(64, 32))
    # The same tensor is read once.
    seconds = 3 * 2 * a.nbytes / 0.85e9
    module = language.module("workflow.meter")
    assert meter.cost["eager"] == meter.cost["memory"] == pytest.approx(1.55 * seconds)
    assert meter.cost["compiled"] == meter.cost["fused"] == pytest.approx(0.6 * seconds)
    assert (module.EAGER_BYTES, module.FUSED_BYTES) == (1.55, 0.6)


def test_what_takes_longest_bounds_the_pace(language: Project) -> None:
    pace_of = language.module("workflow.fit").pace_of
    seconds = {"products": 0.25, "memory": 0.5, "kernels": 0.25}
    assert pace_of(seconds, 0.9, 8) == pace_of(seconds, 0.0, 8)
    one, other = pace_of(seconds, 0.9, 8), pace_of(seconds, 2.0, 8)
    assert (one.samples_per_second, one.bound) == (8, "memory")
    assert (other.samples_per_second, other.bound) == (4, "link")


class Held:
    """Samples with a megabyte each that the loss does not use, of what stays on the host."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.held = dataset, torch.zeros(64, 2**20, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, ids: list[int]) -> dict[str, torch.Tensor]:
        batch = self.dataset.__getitems__(ids)
        return batch | {"more": self.held[[i % 64 for i in ids]]}


def test_of_the_data_a_gpu_has_the_batch(
    language: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = language.module("train")
    before, real = peaks_of(language), loop.build_datasets

    def build_datasets(config: Any) -> Any:
        training, *rest = real(config)
        return Held(training), *rest

    monkeypatch.setattr(loop, "build_datasets", build_datasets)
    for size, peak in peaks_of(language).items():
        assert before[size] + 0.9 * size * 2**20 < peak < before[size] + 1.1 * size * 2**20


def test_a_step_has_as_many_flops_in_micro_batches_of_any_size(language: Project) -> None:
    module, changes = language.module("workflow.fit"), {"train.global_batch_size": 12}
    meter = module.Meter(1e12, 1e12)
    totals = [meter.cost["flops"] for _ in module.measure(config_of(language, **changes), meter)]
    assert len(totals) == 5 and totals == pytest.approx(totals[:1] * 5)


def test_one_sample_has_no_batch_statistics(
    language: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = language.module("train")
    real = loop.build_model

    def build_model(*given: Any) -> Any:
        model = real(*given)
        model.norm.extra = torch.nn.BatchNorm1d(2, affine=False, track_running_stats=False)
        return model

    monkeypatch.setattr(loop, "build_model", build_model)
    assert [*peaks_of(language)] == [2, 4, 8]
    # Unless it is the only size, as for `scale`, which foretells the size that it trains with.
    module = language.module("workflow.fit")
    one = module.measure(config_of(language), module.Meter(1e12, 1e12), [1])
    assert [size for size, _ in one] == [1]


def shown(project: Project, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """What the command prints for the tiny preset on its text, and its exit code."""
    capsys.readouterr()
    with contextlib.chdir(project.folder):
        words = ("fit", "--preset", "tiny", "--data.path", "text.txt", *words)
        return project.module("__main__").dispatch([*words]), capsys.readouterr().out


def test_it_ends_with_the_command_to_type(
    sharded: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--ranks", "16", "--device", "h200", "--train.global-batch-size", "32"
    # What is chosen here replaces what was typed, in any of its spellings.
    options += "--train.micro-batch-size", "8", "--train.activation-checkpointing"
    options += ("--train.micro_batch_size=4",)
    code, text = shown(sharded, capsys, *options, "--model.width", "64")
    assert code == 0 and text.startswith("16 ranks, H200 with 141 GB each, batches of 32\n")
    *_, command = text.splitlines()
    start = "to train: NNODES=2 RDZV_ENDPOINT=FIRST-MACHINE:29500 ./launch.sh -n 8 train "
    typed = "--preset tiny --data.path text.txt --train.global-batch-size 32 --model.width 64 "
    found = "--train.micro-batch-size=2 --train.no-activation-checkpointing"
    assert command == f"{start}{typed}{found}"
    rows = [line.split() for line in text.splitlines() if " fits " in line]
    assert [row[0] for row in rows] == ["1", "2"] * 2
    for row in rows:
        eager, compiled = (float(row[at].replace(",", "")) for at in (-4, -2))
        assert 0 < eager <= compiled, "what fuses operators is no slower"
        assert all(row[at] in ("products", "memory", "kernels", "link") for at in (-3, -1))


def test_what_does_not_fit(language: Project, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shown(language, capsys, "--ranks", "2", "--device-memory", "0.0002")
    assert code == 1 and "too much" in text and "parallelism=fsdp" in text
    assert "weights " in text and "to train" not in text
    rows = [line.split() for line in text.splitlines() if "too much" in line]
    units = {"kB": 1e3, "MB": 1e6}
    smallest = min(rows, key=lambda row: float(row[2]) * units[row[3]])
    assert f"peak with micro-batches of {smallest[0]}:" in text


def test_what_does_not_fit_although_it_is_sharded(
    sharded: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = shown(sharded, capsys, "--ranks", "2", "--device-memory", "0.0001")
    assert code == 1 and "use more ranks (--ranks), or a smaller model" in text


def test_what_fits_with_recomputation_only(
    language: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--train.global-batch-size", "16", "--model.layers", "8", "--ranks", "1"
    words += "--data.context", "256"
    text = shown(language, capsys, *words)[1]
    sizes = re.findall(r"^ +\d+  (no|yes) +([\d.]+) MB", text, re.M)
    kept, recomputed = (min(float(size) for it, size in sizes if it == ac) for ac in ("no", "yes"))
    room = kept * 1.05  # of which a tenth is left free
    assert recomputed < 0.9 * room < kept
    code, text = shown(language, capsys, *words, "--device-memory", str(room / 1000))
    assert code == 0 and "too much" in text
    assert text.splitlines()[-1].endswith("--train.activation-checkpointing")


def test_copies_that_no_default_fits_are_named_with_the_default(sharded: Project) -> None:
    """8 ranks, or one for each sample of a smaller batch."""
    module, error = sharded.module("workflow.fit"), sharded.module("errors").UserError
    settings = {"ranks": 0, "parallel.replicate": 3}
    config = sharded.module("config").override(config_of(sharded), settings)
    with pytest.raises(error, match="8 ranks cannot be divided evenly among 3 copies"):
        module.choose_ranks(config)
    six = sharded.module("config").override(config, {"train.global_batch_size": 6})
    assert module.choose_ranks(six) == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device", "H1000"), "choose from B200, "),
        (("--ranks", "12", "--train.global-batch-size", "12"), "a multiple of 8 above 8"),
        (("--ranks", "9"), "1 to 8 (the global batch size)"),
        (("--ranks", "-1"), "1 to 8"),
    ],
)
def test_what_cannot_be_is_refused(language: Project, words: tuple[str, ...], message: str) -> None:
    settings = "--preset", "tiny", "--data.path", "text.txt"
    assert message in language.refuses("fit", *settings, *words)


def test_a_step_that_reads_a_value_is_refused(
    language: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = language.module("train")
    real = loop.compute_loss

    def reads(model: Any, batch: Any) -> Any:
        loss = real(model, batch)
        assert loss.total.item()
        return loss

    monkeypatch.setattr(loop, "compute_loss", reads)
    settings = "--preset", "tiny", "--data.path", "text.txt"
    refusal = language.refuses("fit", *settings)
    assert "reads the value of a tensor" in refusal
    name = re.search(r"`pytest -k (\w+)`", refusal)
    assert name and name[1] in (language.folder / "tests/test_step.py").read_text("utf-8")


def test_each_kind_of_gpu_has_a_peak(language: Project) -> None:
    assert (
        language.module("workflow.fit").GPUS.keys()
        == language.module("run.hardware").PEAK_BF16_TFLOPS.keys()
    )


@dataclass(frozen=True)
class Measured:
    """Milliseconds of a step on an H200, as docs/evidence/gpus.md has them; 0: not measured."""

    folder: str
    eager: float
    compiled: float
    optimizer: str = "adamw"

    def __str__(self) -> str:
        return f"{self.folder}-{self.optimizer}"


# The loop compiled by block took 68.1 to 68.9 ms.
MEASURED = [
    Measured("loop", eager=112.4, compiled=67.2),
    Measured("loop", eager=0, compiled=75.5, optimizer="muon"),
    Measured("nanogpt", eager=79.3, compiled=63.4),
    Measured("trainer", eager=160.3, compiled=81.3),
]


def test_one_copy_for_each_machine_is_counted_on_one(sharded: Project) -> None:
    fit = sharded.module("workflow.fit")
    config = fit.FitConfig(parallel=sharded.module("distributed.parallel").ParallelConfig())
    every_machine = sharded.module("config").override(config, {"parallel.replicate": 0})
    assert fit.like_a_gpu(every_machine, 16).parallel.replicate == 2
    assert fit.like_a_gpu(every_machine, 4).parallel.replicate == 1
    assert fit.like_a_gpu(config, 16).parallel.replicate == config.parallel.replicate == 1


# The row of the table for micro-batches of 32.
ROW = """
import sys
from paced.config import override, preset
from paced.workflow import fit
path, optimizer = sys.argv[1:]
changes = {"ranks": 1, "device": "H200", "data.path": path, "optim.name": optimizer}
changes |= {"train.global_batch_size": 32}
config = override(preset("gpt2_124m", fit.FitConfig), changes)
target = fit.target_of(config)
meter = fit.Meter(target.flops, target.bandwidth)
for size, state in fit.measure(fit.like_a_gpu(config, 1), meter, [32]):
    row = fit.row_of(meter, state, target, size)
    print(row.eager.samples_per_second, row.compiled.samples_per_second)
"""


@pytest.mark.parametrize("measured", MEASURED, ids=str)
def test_the_pace_is_within_a_fifth_of_what_was_measured(
    measured: Measured, tmp_path: Path
) -> None:
    """By the command, in a project whose model is the one that was measured."""
    if measured.folder == "trainer":
        pytest.importorskip("transformers")
    project = bake(tmp_path, package_name="paced")
    package = project / "src/paced"
    (package / "model.py").rename(package / "own_model.py")
    for file in (Path(__file__).parent / "measured" / measured.folder).glob("*.py"):
        shutil.copy(file, package)
    for part in ("train", "val"):
        np.zeros(40_000, dtype=np.uint16).tofile(tmp_path / f"{part}.bin")
    words = [str(tmp_path), measured.optimizer]
    printed = run_command([sys.executable, "-c", ROW, *words], 300, PYTHONPATH=str(project / "src"))
    eager, compiled = (1000 * 32 / float(word) for word in printed.split()[-2:])
    assert compiled == pytest.approx(measured.compiled, rel=0.2)
    if measured.eager:
        assert eager == pytest.approx(measured.eager, rel=0.2)
