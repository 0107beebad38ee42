"""Build the data from one source, or from several in given proportions.

To use your own data, edit source.py, which reads one source. Other modules rely on `DataConfig` and
`build_datasets`. The latter returns two datasets with `__len__` and `__getitems__`, and a spec with
a fingerprint. The spec is a dataclass of plain values: a run saves it as spec.json, so that `infer`
can read it without the data.
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
    """Settings of the data."""

    mix: str = ""
    """Sources, folders in `path`, and their weights: a=0.7,b=0.3 (empty: `path` is one source)."""


def build_datasets(config: "Config") -> tuple[Any, Any, Spec]:
    """Return training and validation data and their spec; UserError for unusable data."""
    data = config.data
    if not data.mix:
        return source.build_datasets(config)
    if not data.path:
        raise UserError("--data.mix names folders in --data.path: give --data.path, too")
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
    # One model reads all sources, so their specs may differ only in their fingerprints.
    for spec in specs:
        if replace(spec, fingerprint="") != replace(specs[0], fingerprint=""):
            raise UserError(
                f"--data.mix {data.mix}: one model cannot read all of these sources, since they "
                "differ in vocabulary, tokenizer, end of text or classes: convert them alike"
            )
    # The fingerprint includes the mixture as text. So if a resumed run has another mixture, the
    # error shows the old and the new one.
    mixture = ",".join(f"{name}={weight}" for name, weight in weights.items())
    digest = fingerprint(*(spec.fingerprint for spec in specs))
    spec = replace(specs[0], fingerprint=f"{digest} mixed {mixture}")
    return Joined(training, weights), Joined(validation, weights), spec
