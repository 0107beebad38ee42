"""The data: a source, or several in stated proportions. What one is stands in source.py: yours.

What the rest relies on: `DataConfig`, and `build_datasets`, which gives two datasets with `__len__`
and `__getitems__` and a spec with a fingerprint. The spec is a dataclass of plain values, as a run
saves it in spec.json, for `infer` without data.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import source
from .errors import UserError
from .files import fingerprint
from .mixture import Joined, parse
from .source import Spec as Spec  # for the model

if TYPE_CHECKING:
    from .config import Config


@dataclass(frozen=True)
class DataConfig(source.DataConfig):
    """What is read, and how."""

    mix: str = ""
    """Weights of the sources below `path`: "a=0.7,b=0.3" (default: `path` is the one source)."""


def build_datasets(config: "Config") -> tuple[Any, Any, Spec]:
    """Training and validation data and their spec; UserError for unusable data."""
    data = config.data
    if not data.mix:
        return source.build_datasets(config)
    if not data.path:
        raise UserError("--data.mix names what is below --data.path: give that, too")
    weights = parse(data.mix)
    parts = [replace(config, data=replace(data, path=data.path / name)) for name in weights]
    training, validation, specs = zip(*map(source.build_datasets, parts), strict=True)
    if any(replace(spec, fingerprint="") != replace(specs[0], fingerprint="") for spec in specs):
        raise UserError(
            f"--data.mix {data.mix}: a model cannot read all of these, since they differ in their "
            "vocabulary, tokenizer, end of text or classes"
        )
    # With the mixture in it, so that a resume with another one is refused with both.
    mixture = ",".join(f"{name}={weight}" for name, weight in weights.items())
    identity = f"{fingerprint(*(spec.fingerprint for spec in specs))} mixed {mixture}"
    spec = replace(specs[0], fingerprint=identity)
    return Joined(training, weights), Joined(validation, weights), spec
