"""The kernels that a compiled block of the language model has on a GPU, counted without one."""

import re
import sys

import pytest

from tests.conftest import bake
from tests.conftest import run as run_command
from tests.gpu_dry import dry
from tests.gpu_dry.test_dry import skip


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What kernels.py prints of a default render."""
    folder = tmp_path_factory.mktemp("kernels")
    try:
        dry.build(folder)
    except dry.NotHere as error:
        skip(str(error))
    source = bake(folder, parallelism="single", checkpoint="dcp") / "src"
    return run_command([sys.executable, "-m", "tests.gpu_dry.kernels", str(source)], timeout=600)


def test_a_block_moves_no_more_bytes_than_it_did(kernels: str) -> None:
    """Rotary positions behind the transposition cost a copy: 3461.6 MB in 23 kernels."""
    count, megabytes = re.findall(r"(\d+) fused kernels move ([\d.]+) MB", kernels)[0]
    assert int(count) <= 22 and float(megabytes) < 3362, kernels


def test_the_kernels_of_a_block_read_in_order(kernels: str) -> None:
    """With autograd's own backward of the rotary positions, one of them divides five addresses."""
    divisions = [int(number) for number in re.findall(r"(\d+) divisions", kernels)]
    assert len(divisions) > 10 and not any(divisions), kernels
