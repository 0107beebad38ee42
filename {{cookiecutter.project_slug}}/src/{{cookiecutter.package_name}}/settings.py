"""Settings are nested frozen dataclasses: changed by dotted names, saved as JSON and read back."""

import dataclasses
import json
import logging
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from .errors import UserError

log = logging.getLogger(__name__)
C = TypeVar("C")


def override(config: C, changes: dict[str, Any]) -> C:
    """Change settings by dotted names, as in {"train.steps": 20}; UserError for unknown names.

    Those of one part are changed together, since only together they may be right.
    """
    tree: dict[str, Any] = {}
    for name, value in changes.items():
        *path, last = name.split(".")
        node = tree
        for key in path:
            node = node.setdefault(key, _Changes())
        node[last] = value
    return _replace(config, tree, "")


def to_json(config: Any) -> dict[str, Any]:
    """Settings as JSON holds them: paths become strings."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def from_json(
    config: C,
    path: Path,
    leave_out: Iterable[str] = (),
    lenient: Iterable[str] = (),
    elsewhere: Mapping[str, str] = types.MappingProxyType({}),
) -> C:
    """Override `config` by what a JSON file holds, except the top-level names in `leave_out`.

    Below the names in `lenient`, what is no setting here is left out with a line that says so;
    `elsewhere` names the answers that such settings need.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
        changes = dict(_flatten({k: v for k, v in content.items() if k not in leave_out}))
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is not a config.json that can be read ({error})") from error
    tolerated = [name for name in changes if name.split(".")[0] in lenient]
    config = override(config, {k: v for k, v in changes.items() if k not in tolerated})
    unknown = []
    for name in tolerated:
        try:
            config = override(config, {name: changes[name]})
        except UserError:
            answer = f" ({elsewhere[name]})" if changes[name] and name in elsewhere else ""
            unknown.append(f"{name}{answer}")
    if unknown:
        log.info("left out of %s, no settings of this project: %s", path, ", ".join(unknown))
    return config


class _Changes(dict):
    """Changes to a part of the settings, as opposed to a value that is a dictionary."""


def _replace(node: Any, changes: dict[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(type(node)) if dataclasses.is_dataclass(node) else {}
    values = {}
    for name, value in changes.items():
        if name not in hints:
            raise UserError(f"{prefix}{name} is not a setting of this project")
        if isinstance(value, _Changes):
            value = _replace(getattr(node, name), value, f"{prefix}{name}.")
        elif isinstance(value, str) and Path in (hints[name], *typing.get_args(hints[name])):
            value = Path(value)
        elif isinstance(value, list):
            value = tuple(value)
        values[name] = value
    return dataclasses.replace(node, **values)


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
