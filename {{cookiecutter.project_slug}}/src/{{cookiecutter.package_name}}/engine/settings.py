"""Settings are nested frozen dataclasses: changed by dotted names, saved as JSON and read back."""

import dataclasses
import json
import logging
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from . import UserError

log = logging.getLogger(__name__)
C = TypeVar("C")


def override(config: C, changes: dict[str, Any]) -> C:
    """Change settings by dotted names, as in {"train.steps": 20}; UserError for unknown names."""
    for name, value in changes.items():
        config = _replace(config, name.split("."), value, name)
    return config


def to_json(config: Any) -> dict[str, Any]:
    """Settings as JSON holds them: paths become strings."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def from_json(
    config: C, path: Path, leave_out: Iterable[str] = (), lenient: Iterable[str] = ()
) -> C:
    """Override `config` by what a JSON file holds, except the top-level names in `leave_out`.

    Below the names in `lenient`, what is no setting here is left out with a line that says so.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
        changes = dict(_flatten({k: v for k, v in content.items() if k not in leave_out}))
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is not a config.json that can be read ({error})") from error
    for name, value in changes.items():
        try:
            config = override(config, {name: value})
        except UserError as error:
            if name.split(".")[0] not in lenient:
                raise
            log.info("left out of %s: %s", path, error)
    return config


def _replace(node: Any, path: list[str], value: Any, full_name: str) -> Any:
    hints = typing.get_type_hints(type(node)) if dataclasses.is_dataclass(node) else {}
    if path[0] not in hints:
        raise UserError(f"{full_name} is not a setting of this project")
    if len(path) > 1:
        value = _replace(getattr(node, path[0]), path[1:], value, full_name)
    elif isinstance(value, str) and Path in (hints[path[0]], *typing.get_args(hints[path[0]])):
        value = Path(value)
    elif isinstance(value, list):
        value = tuple(value)
    return dataclasses.replace(node, **{path[0]: value})


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
