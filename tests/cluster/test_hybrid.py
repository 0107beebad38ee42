"""Copies of a sharded model (HSDP): proven equal to DDP and FSDP."""

from pathlib import Path

from tests.conftest import bake, drill


def test_copies_of_a_sharded_model_are_ddp_and_fsdp(tmp_path: Path) -> None:
    """On four ranks as 1 x 4, 2 x 2 and 4 x 1: losses, checkpoints, memory as expected."""
    names = {}
    for parallelism, checkpoint in (("ddp", "dcp"), ("fsdp", "dcp_async")):
        name = f"hybrid_{parallelism}"
        answers = {"parallelism": parallelism, "checkpoint": checkpoint, "package_name": name}
        names[name] = bake(tmp_path / name, **answers) / "src"
    (tmp_path / "text.txt").write_text("A horse! a horse! my kingdom for a horse! " * 100)
    output = drill("hybrid.py", (4, str(tmp_path), *names), sources=names)
    assert "7 ways agree" in output


def test_no_rank_builds_the_whole_model(tmp_path: Path) -> None:
    name = "sharded_start"
    source = bake(tmp_path, parallelism="fsdp", package_name=name) / "src"
    assert "2 ranks have what one process builds" in drill(
        "shards.py", (2, name), sources={name: source}
    )
