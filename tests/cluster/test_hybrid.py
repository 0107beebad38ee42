"""What two and four ranks do together: sharded models, copies of these (HSDP), blocks of work."""

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


def test_only_rank_0_builds_the_whole_model(tmp_path: Path) -> None:
    name = "sharded_start"
    source = bake(tmp_path, parallelism="fsdp", package_name=name) / "src"
    assert "2 ranks have what one process builds" in drill(
        "shards.py", (2, name), sources={name: source}
    )


def test_fsdp_trains_what_ddp_trains_or_refuses_it(tmp_path: Path) -> None:
    sources = {
        name: bake(tmp_path / name, parallelism=name.removeprefix("twin_"), package_name=name)
        / "src"
        for name in ("twin_ddp", "twin_fsdp")
    }
    output = drill("twins.py", (2, *sources), sources=sources)
    assert "17 models are the same, 10 are refused" in output


def test_what_fails_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    sources = {"in_blocks": bake(tmp_path, package_name="in_blocks") / "src"}
    output = drill("blocks.py", (2, "in_blocks"), sources=sources)
    assert output.count("all errors were told") == 2
    assert "rank 0: the other one is gone" in output
