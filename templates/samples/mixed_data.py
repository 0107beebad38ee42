"""The data: one source, or several in stated proportions. source.py says what a source is: yours.

What the rest relies on: `DataConfig`, and `build_datasets`, which returns two datasets with
`__len__` and `__getitems__` and a spec with a fingerprint. The spec is a dataclass of plain values,
since a run saves it in spec.json, for `infer` without data.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import source
from .errors import UserError
from .files import fingerprint
from .mixture import Joined, parse
from .source import Spec as Spec

if TYPE_CHECKING:
    from .config import Config


@dataclass(frozen=True)
class DataConfig(source.DataConfig):
    """What is read, and how."""

    mix: str = ""
    """Sources, folders in `path`, and their weights: a=0.7,b=0.3 (empty: `path` is one source)."""


def build_datasets(config: "Config") -> tuple[Any, Any, Spec]:
    """Return training and validation data and their spec; UserError for unusable data."""
    data = config.data
    if not data.mix:
        return source.build_datasets(config)
    if not data.path:
        raise UserError("--data.mix names what is below --data.path: give that, too")
    weights = parse(data.mix)
    training: list[Any] = []
    validation: list[Any] = []
    specs: list[Spec] = []
    for name in weights:
        source_data = replace(data, path=data.path / name)
        train_set, validation_set, spec = source.build_datasets(replace(config, data=source_data))
        training.append(train_set)
        validation.append(validation_set)
        specs.append(spec)
    # One model reads them all, so they may differ in their fingerprints alone.
    for spec in specs:
        if replace(spec, fingerprint="") != replace(specs[0], fingerprint=""):
            raise UserError(
                f"--data.mix {data.mix}: a model cannot read all of these, since they differ in "
                "their vocabulary, tokenizer, end of text or classes"
            )
    # The fingerprint names the mixture, so that the error for a resume with another one shows both.
    mixture = ",".join(f"{name}={weight}" for name, weight in weights.items())
    digest = fingerprint(*(spec.fingerprint for spec in specs))
    spec = replace(specs[0], fingerprint=f"{digest} mixed {mixture}")
    return Joined(training, weights), Joined(validation, weights), spec
