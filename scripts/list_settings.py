"""Print the settings of rendered projects as JSON, for the reference (scripts/cut_docs.py).

python scripts/list_settings.py FOLDER …    all of one package name

A list for each folder, and in it an object for each setting: its group, name, type, default and
words. torch is imported once: each project is read in a fork of this process.
"""

import ast
import importlib
import inspect
import json
import os
import sys
import textwrap
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

# Imported here, once, since each project imports them.
import torch.distributed.checkpoint  # noqa: F401
import tyro

# Options of commands that are not in Config: a group, and the module and class that hold them.
COMMANDS = {
    "workflow": ("workflow", "WorkflowConfig"),
    "fit": ("workflow.fit", "FitConfig"),
    "compare": ("workflow.compare", "CompareConfig"),
    "export": ("checkpoint.transfer", "ExportConfig"),
    "infer": ("infer", "InferConfig"),
    "tokens": ("tokens", "TokensConfig"),
}


def words_of(kind: type, name: str) -> str:
    """The text below a field of a dataclass, in the class that declares it."""
    for base in kind.__mro__:
        if name not in inspect.get_annotations(base):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, after in zip(tree.body, tree.body[1:], strict=False):
            is_field = isinstance(field, ast.AnnAssign) and ast.unparse(field.target) == name
            if is_field and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                return " ".join(str(after.value.value).split())
    return ""


def type_name(hint: Any) -> str:
    """The type of a setting, as a reader types its values."""
    if get_origin(hint) is Annotated:
        return type_name(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if hint == bool | None:
        return "`None`, `True`, `False`"
    if isinstance(hint, UnionType) or get_origin(hint) is not None:
        kinds = [kind for kind in get_args(hint) if kind not in (NoneType, Ellipsis)]
        text = " or ".join(type_name(kind) for kind in kinds)
        return f"{text} ..." if get_origin(hint) is tuple else text
    return {"bool": "flag", "str": "text", "Path": "path"}.get(hint.__name__, hint.__name__)


def settings_of(kind: type, group: str, start: Any = None, leave_out: type = object) -> list[Any]:
    """The settings of a dataclass, and of the dataclasses in it, with their values in `start`."""
    rows: list[Any] = []
    known = {field.name for field in fields(leave_out)} if is_dataclass(leave_out) else set()
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint = hints[field.name]
        if field.name in known and not (group == "fit" and field.name == "device"):
            continue
        if is_dataclass(hint):
            rows += settings_of(hint, field.name, getattr(start, field.name))
            continue
        value = field.default if start is None else getattr(start, field.name)
        default = "" if value in (MISSING, None, ()) else str(value)
        name = field.name.replace("_", "-")
        if tyro.conf.Positional in get_args(hint):
            # Its value is typed without an option.
            name = name.upper()
        about = {"group": group, "name": name, "type": type_name(hint), "default": default}
        rows.append(about | {"words": words_of(kind, field.name)})
    return rows


def read(folder: Path) -> list[Any]:
    """All settings of a project."""
    (package,) = (path.parent.name for path in folder.glob("src/*/__main__.py"))
    sys.path.insert(0, str(folder / "src"))
    config = importlib.import_module(f"{package}.config")
    rows = settings_of(config.Config, "run", config.preset())
    for group, (module, name) in COMMANDS.items():
        # Its class adds to the options of export.
        if group == "export" and Path(folder, "src", package, "huggingface.py").exists():
            module = "huggingface"
        path = Path(folder, "src", package, *module.split("."))
        if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
            kind = getattr(importlib.import_module(f"{package}.{module}"), name, None)
            if kind is not None:
                rows += settings_of(kind, group, leave_out=config.Config)
    return rows


def main(folders: list[str]) -> int:
    """Print the settings of each project."""
    found = []
    for folder in folders:
        receiver, sender = os.pipe()
        child = os.fork()
        if child == 0:
            with os.fdopen(sender, "w") as pipe:
                json.dump(read(Path(folder)), pipe)
            os._exit(0)
        os.close(sender)
        with os.fdopen(receiver) as pipe:
            text = pipe.read()
        if os.waitpid(child, 0)[1] or not text:
            raise SystemExit(f"error: the settings of {folder} cannot be read")
        found.append(json.loads(text))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
