"""What a render writes goes through files.py or the publisher: neither follows a link."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import bake
from tests.template.test_render import FULLEST, SMALLEST

WRITING = {"write_text", "write_bytes", "touch", "savefig", "save_file", "SummaryWriter"}
WRITING |= {"export_chrome_trace", "FileIO"}
BY_PATH = {"os.truncate", "shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.move"}
RESERVED = "in a folder of the publisher's, made anew under a random name"
EXCEPTIONS = {
    ("files.py", "open(path, mode, opener=regular, **options)"): "the one function",
    ("checkpoint/publish.py", "open(reservation / MANIFEST, 'wb')"): RESERVED,
    ("checkpoint/dcp.py", "path.open(mode)"): RESERVED,
    ("checkpoint/writer.py", "path.open('wb')"): RESERVED,
    ("checkpoint/transfer.py", "open(temporary, 'xb')"): "a name from `replacing`",
    ("checkpoint/paths.py", "lock_file.open('r+')"): "to lock it, and nothing is written",
    ("checkpoint/paths.py", "folder.with_suffix('.new').open('x')"): "a new file in TMPDIR",
    ("distributed/agreement.py", "open(os.dup(1), 'wb')"): "a descriptor",
    ("distributed/agreement.py", "open(os.dup(2), 'w')"): "a descriptor",
    ("errors.py", "os.open(os.devnull, os.O_WRONLY)"): "no file of a run",
    ("run/logs.py", "os.open(os.devnull, os.O_RDWR)"): "no file of a run",
    ("run/logs.py", "open(os.devnull, 'w')"): "no file of a run",
    ("profiler.py", "finished.export_chrome_trace(str(temporary))"): "a name from `replacing`",
    ("run/tracker_adapter.py", "SummaryWriter(folder)"): "names with the time, host and process",
    ("run/tracker_adapter.py", "Image.open(path)"): "it reads",
    ("workflow/recovery.py", "open(largest, 'r+b')"): "damage, in a run of the drill's own",
    ("workflow/plots.py", "figure.savefig(out)"): "into memory",
    ("workflow/tuning.py", "Path('/proc/self/clear_refs').write_text('5')"): "of the system",
}
"""Calls that write otherwise, with the reason why none can follow a link of somebody else's."""


def writers(path: Path) -> Iterator[str]:
    """The calls in a file that open something for writing, other than by `open_to_write`."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        words = {"w", "a", "x", "+"}
        if name == "open" and ast.unparse(node.func) != "os.open":
            # The mode is the second argument of the function, and the first of the method.
            modes = [a for a in node.args[isinstance(node.func, ast.Name) :][:1]]
            modes += [k.value for k in node.keywords if k.arg == "mode"]
            texts = [m.value for m in modes if isinstance(m, ast.Constant)]
            writes = len(texts) < len(modes) or any(words & set(str(text)) for text in texts)
            if ast.unparse(node.func) == "gzip.open":
                writes = any(words & set(str(text)) for text in texts)
        elif name == "open":
            writes = any(f in ast.unparse(node) for f in ("O_WRONLY", "O_RDWR", "O_CREAT"))
        else:
            writes = name in WRITING or ast.unparse(node.func) in BY_PATH
        if writes:
            kept = ast.Call(node.func, node.args, [])
            yield ast.unparse(node if "opener" in ast.unparse(node) else kept)


def test_nothing_is_written_but_by_the_one_function(tmp_path: Path) -> None:
    """In no render; and each exception is one that some render needs."""
    found = set()
    renders = [SMALLEST, FULLEST, {}, {"tracker": "wandb", "checkpoint": "torch_save"}]
    for n, answers in enumerate(renders):
        project = bake(tmp_path / str(n), **answers)
        (package,) = (project / "src").iterdir()
        for path in package.rglob("*.py"):
            found |= {(str(path.relative_to(package)), call) for call in writers(path)}
    assert found == EXCEPTIONS.keys()
