"""What is chosen for a GPU, by what torch and the system say of it: no GPU is needed. Checksums."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.conftest import Project, project_fixture

project = project_fixture("of_devices", parallelism="single", checkpoint="torch_save")
sharded = project_fixture("of_shards", parallelism="fsdp", tracker="none")
GPU = torch.device("cuda", 1)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two GPUs, as far as one may ask."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return monkeypatch


def test_a_process_takes_a_gpu_when_it_joins_and_not_before(
    project: Project, gpus: pytest.MonkeyPatch
) -> None:
    """A stage that only names the GPU must not hold memory on it."""
    taken: list[Any] = []
    gpus.setattr(torch.cuda, "set_device", taken.append)
    assert project.module("device").pick_device("cuda:1") == GPU and not taken
    assert project.module("distributed").join(None, "cuda:1").device == GPU and taken == [GPU]


@pytest.mark.parametrize("emulated", [True, False])
def test_bf16_is_chosen_where_the_gpu_has_it(
    project: Project, gpus: pytest.MonkeyPatch, emulated: bool
) -> None:
    def supported(including_emulation: bool = True) -> bool:
        return including_emulation or not emulated

    gpus.setattr(torch.cuda, "is_bf16_supported", supported)
    dtype = project.config().train.compute_dtype(GPU)
    assert dtype == (torch.float32 if emulated else torch.bfloat16)


@pytest.mark.parametrize(
    ("listed", "free", "kept"),
    [("0-3,8-11\n", True, {0, 1, 2, 3, 8, 9, 10, 11}), ("5\n", True, {5}), ("0-3\n", False, None)],
)
def test_a_process_keeps_to_the_cores_beside_its_gpu(
    project: Project,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    listed: str,
    free: bool,
    kept: set[int] | None,
) -> None:
    """But not where the user has chosen cores."""
    hardware, chosen = project.module("run.hardware"), []
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    (tmp_path / "0000:1b:02.0").mkdir()
    (tmp_path / "0000:1b:02.0/local_cpulist").write_text(listed)
    monkeypatch.setattr(hardware, "Path", lambda _, *rest: tmp_path.joinpath(*rest))
    monkeypatch.setattr(hardware, "usable_cores", lambda: (os.cpu_count() or 1) - (not free))
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: chosen.append(cores))
    hardware.pin_to_numa_node(GPU)
    assert chosen == ([kept] if kept else [])
    (tmp_path / "0000:1b:02.0/local_cpulist").unlink()  # as in many containers
    hardware.pin_to_numa_node(GPU)
    hardware.pin_to_numa_node(torch.device("cpu"))
    assert len(chosen) == bool(kept)


@pytest.mark.parametrize(("precision", "products"), [("fp32", "high"), ("bf16", "medium")])
def test_a_run_sets_its_process_up_before_it_builds_the_model(
    project: Project, monkeypatch: pytest.MonkeyPatch, precision: str, products: str
) -> None:
    training, beside, found = project.module("train"), [], []
    build, before = training.build_model, torch.get_float32_matmul_precision()

    def built(*given: Any) -> nn.Module:
        found.append((torch.get_float32_matmul_precision(), [*beside]))
        return build(*given)

    monkeypatch.setattr(training, "build_model", built)
    monkeypatch.setattr(training.hardware, "pin_to_numa_node", beside.append)
    training.setup(project.config(train__precision=precision))
    torch.set_float32_matmul_precision(before)
    assert found == [(products, [torch.device("cpu")])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_rounds_its_products_only_where_all_are_rounded(
    project: Project, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """In bfloat16 the losses of two ranks would differ by more than the gate of scale allows."""
    optim, used = project.module("optim"), []
    before = torch.get_float32_matmul_precision()
    project.module("device").set_up_torch(False, dtype)
    divide = optim.parallel.divide_work
    monkeypatch.setattr(
        optim.parallel, "divide_work", lambda m, *rest: used.append(m[0].dtype) or divide(m, *rest)
    )
    try:
        weight = nn.Parameter(torch.rand(4, 4))
        muon = optim.Muon([{"params": [weight], "matrices": 1}, {"params": [torch.rand(2)]}])
        weight.grad = torch.rand(4, 4)
        muon.step()
    finally:
        torch.set_float32_matmul_precision(before)
    assert used == [dtype] and weight.dtype == torch.float32


def test_autotune_is_a_mode_of_the_compiler(
    sharded: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For modules of torch's, which are compiled by their forward, and for all others."""
    compilation, modes = sharded.module("compile"), list[Any]()

    def compile_(target: Any, **options: Any) -> Any:
        modes.append(options["mode"])
        return target

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(nn.Module, "compile", compile_)
    own = type("Own", (nn.Module,), {"forward": lambda self, x: x, "__module__": "a.b"})()
    for autotune in (False, True):
        config = compilation.CompileConfig(mode="blocks", autotune=autotune)
        compilation.compile_model(nn.Module(), [nn.Linear(2, 2), own], config)
    assert modes == [None, None, *["max-autotune-no-cudagraphs"] * 2]


def test_whole_means_blocks_where_a_model_is_sharded(
    sharded: Project, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """FSDP's hooks break the graph of a whole model, which then runs eagerly, in silence."""
    compilation = sharded.module("compile")
    config = compilation.CompileConfig(mode="full", backend="eager")

    def compiled() -> list[bool]:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)))
        for module in model.modules():  # not torch's own forward, which is replaced
            module.forward = module.forward
        compilation.compile_model(model, model, config)
        return [
            "forward" in vars(module) and "as_function" in repr(module.forward)
            for module in (model, *model)
        ]

    assert compiled() == [True, False, False] and not caplog.text
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert compiled() == [False, True, True]
    assert "--compile.mode full: FSDP's hooks break the graph" in caplog.text
    assert sharded.module("workflow.compile").MODES == ("blocks",)


def test_ddp_leaves_compiled_blocks_whole(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cuts a graph at the bounds of its buckets, which helps a whole model alone."""
    compilation = project.module("compile")
    for mode, cuts in (("blocks", False), ("full", True)):
        monkeypatch.setattr(torch._dynamo.config, "optimize_ddp", not cuts)
        config = compilation.CompileConfig(mode=mode, backend="eager")
        compilation.compile_model(nn.Linear(2, 2), [nn.Linear(2, 2)], config)
        assert torch._dynamo.config.optimize_ddp is cuts


def test_that_nothing_was_compiled_is_a_warning(
    project: Project, caplog: pytest.LogCaptureFixture
) -> None:
    compilation = project.module("compile")
    torch._dynamo.utils.counters.clear()
    with compilation.Compiling():
        pass
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "compiled 0 graphs" in caplog.text


@given(seed=st.integers(0, 2**32), dtype=st.sampled_from([torch.float32, torch.bool, torch.int8]))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_checksum_sees_each_bit_and_each_place(sharded: Project, seed: int, dtype: Any) -> None:
    checksum = sharded.module("distributed.buffers").checksum
    random = torch.Generator().manual_seed(seed)
    size = int(torch.randint(2, 5000, (), generator=random))
    tensor = (torch.randn(size, generator=random) > 0).to(dtype)
    flipped = tensor.clone().view(torch.uint8)
    place = int(torch.randint(len(flipped), (), generator=random))
    flipped[place] ^= 1 << int(torch.randint(8, (), generator=random))
    assert checksum(flipped) != checksum(tensor.view(torch.uint8))
    first, second = torch.randint(size, (2,), generator=random).tolist()
    moved = tensor.clone()
    moved[first], moved[second] = tensor[second], tensor[first]
    assert bool(checksum(moved) == checksum(tensor)) is torch.equal(moved, tensor)


@pytest.mark.parametrize(
    ("name", "way_out"),
    [("cuda:5", "choose another index"), ("cuda", "start fewer processes on this machine")],
)
def test_a_gpu_that_is_not_there_has_a_way_out(
    project: Project, monkeypatch: pytest.MonkeyPatch, name: str, way_out: str
) -> None:
    """For an index of the user's, and for one of a process."""
    device = project.module("device")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "5")
    with pytest.raises(project.module("errors").UserError, match=f"no GPU 5 among.*{way_out}"):
        device.pick_gpu(torch.device(name))


@pytest.mark.parametrize("reduce_each", [False, True])
def test_each_micro_batch_that_is_reduced_counts_what_a_rank_lacks(
    sharded: Project, monkeypatch: pytest.MonkeyPatch, reduce_each: bool
) -> None:
    """Also the first one of a step: else ranks would sum gradients of different parameters."""
    parallel = sharded.module("distributed.parallel")
    counted: list[bool] = []
    module = SimpleNamespace(set_requires_gradient_sync=lambda flag: None)
    monkeypatch.setattr(parallel, "FSDPModule", SimpleNamespace)
    monkeypatch.setattr(parallel, "count_unused_as_zeros", lambda _, zeros: counted.append(zeros))
    config = SimpleNamespace(parallel=SimpleNamespace(reduce_each=reduce_each))
    state = SimpleNamespace(module=module, config=config, plan=[1, 2], compute_dtype=torch.bfloat16)
    parallel.accumulate(state, last=False)
    assert counted == ([True] if reduce_each else [])
    parallel.accumulate(state, last=True)
    # bf16 gradients of several micro-batches, added up in float32, go without zeros.
    assert counted == ([True, True] if reduce_each else [False])


def test_a_step_seeds_the_generator_of_its_device(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = project.module("sampling")
    key = sampling.stream_key(7) >> 1
    generators = tuple(torch.Generator().manual_seed(0) for _ in range(2))
    on_apple: list[int] = []
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.mps, "manual_seed", on_apple.append)
    sampling.seed_random(7, device=GPU)
    sampling.seed_random(7, device=torch.device("cpu"))
    assert [generator.initial_seed() for generator in generators] == [0, key] and not on_apple
    sampling.seed_random(7, device=torch.device("mps"))
    assert on_apple == [key]


@pytest.mark.parametrize(("count", "usable"), [(6, 6), (None, 1)])
def test_all_cores_count_where_the_system_says_no_less(
    project: Project, monkeypatch: pytest.MonkeyPatch, count: int | None, usable: int
) -> None:
    hardware = project.module("run.hardware")
    with monkeypatch.context() as patch:
        patch.delattr(os, "sched_getaffinity")
        patch.setattr(os, "cpu_count", lambda: count)
        found = hardware.usable_cores()
    assert found == usable


@pytest.mark.parametrize("number", [0, 1, 5, 2**40, -(2**63)])
def test_a_checksum_tells_a_number_from_its_complement(sharded: Project, number: int) -> None:
    """All bits differ between 0 and -1, which may both stand for "no index"."""
    checksum = sharded.module("distributed.buffers").checksum
    ours, theirs = torch.tensor([number]), torch.tensor([~number])
    assert checksum(ours) != checksum(theirs)
