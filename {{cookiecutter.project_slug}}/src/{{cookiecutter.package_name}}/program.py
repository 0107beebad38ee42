"""Export a trained model as a program that runs without this project: `export --to model.pt2`."""

import dataclasses
import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.utils import _pytree as pytree

from . import load_trained, model
from .checkpoint.transfer import ExportConfig, whole_file
from .data import build_datasets
from .errors import UserError
from .sampling import fetch

# Optional arguments with these names are targets for the loss; the program does not take them.
TARGETS = ("target", "targets", "label", "labels")
# A program that takes one sample in each call is compared on this many validation samples.
SINGLE_CHECKS = 9
# The kinds of parameters that take an argument by its position.
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Call:
    """The arguments with which `compute_loss` calls the model.

    Arguments with tensors are inputs of the program; settings are fixed in it.
    """

    # Inputs that are passed by position, and those that are passed by name.
    arguments: tuple[Any, ...]
    by_name: dict[str, Any]
    # Settings such as use_cache=False.
    fixed: dict[str, Any]

    def structure(self) -> pytree.TreeSpec:
        """Return the nesting of the inputs, including the number of tensors."""
        return pytree.tree_structure((self.arguments, self.by_name))


def export_program(run_dir: Path, options: ExportConfig) -> str:
    """Write a run's model to FILE.pt2 and return a summary line.

    Before the program is written, it is compared with the model: with batches of several sizes or,
    if it takes one sample, with several samples. Raises UserError if torch.export fails (with the
    line in the model) or the results differ.

    Usually the program takes batches of any size. But the number of its inputs is fixed: if a model
    takes a list with one tensor per sample, its program takes one sample.
    """
    target = options.to
    if target.exists():
        raise UserError(f"{target} exists and is not overwritten: give another --to, or remove it")
    source = options.source or run_dir
    trained, _, config = load_trained(source, "cpu", options.step, options.weights, options.base)
    _, validation, _ = build_datasets(config)

    def call_with(ids: Sequence[int]) -> Call:
        batch = fetch(validation, np.array(ids, dtype=np.int64))
        return find_call(trained, lambda: model.compute_loss(trained, batch))

    one = call_with([0])
    # The program is made with two samples, since torch.export treats a size of one as fixed.
    two = call_with([0, 0])
    # The structures differ if the model takes a list with one tensor per sample.
    if one.structure() == two.structure():
        program = make_program(target, trained, two)
        # Other sizes than the two samples that it was made with.
        batch_sizes = {1, config.train.micro_batch_size} - {2}
        for size in sorted(batch_sizes):
            # Repeats one sample, since a dataset may be smaller than the batch.
            call = call_with([0] * size)
            reason = f"the program was made with 2 samples and is wrong for {size}"
            check_program(target, program, trained, call, reason)
        inputs = ", ".join(describe_inputs(program))
    else:
        program = make_program(target, trained, one, batched=False)
        for sample in range(min(len(validation), SINGLE_CHECKS)):
            reason = f"the program was made with sample 0 and is wrong for sample {sample}"
            check_program(target, program, trained, call_with([sample]), reason)
        inputs = ", ".join(describe_inputs(program)) + " (one sample in each call)"
    with whole_file(target) as file:
        torch.export.save(program, file)
    return f"{target}: the model as a program; its inputs: {inputs}"


def find_call(trained: nn.Module, use: Callable[[], object]) -> Call:
    """Return the arguments of the first call of the model in `use()`; UserError if none is made."""
    calls: list[Call] = []

    def note(_: nn.Module, arguments: tuple[Any, ...], by_name: dict[str, Any]) -> None:
        if not calls:
            calls.append(sort_arguments(trained, arguments, by_name))

    with torch.no_grad(), trained.register_forward_pre_hook(note, with_kwargs=True):
        use()
    if not calls:
        raise UserError(
            "compute_loss does not call the model itself, so there is nothing to export: call "
            "model(...) in compute_loss (model.py)"
        )
    return calls[0]


def sort_arguments(trained: nn.Module, arguments: tuple[Any, ...], by_name: dict[str, Any]) -> Call:
    """Split the arguments of a call into inputs and settings, without optional targets."""
    parameters = inspect.signature(trained.forward).parameters
    required = {name for name, each in parameters.items() if each.default is each.empty}
    # A name that the signature lacks counts as optional: a wrapper with **kwargs, such as peft's,
    # does not name the arguments of its model.
    targets = set(TARGETS) - required
    by_position: list[Any] = []
    inputs_by_name: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    named = [name for name, each in parameters.items() if each.kind in POSITIONAL]
    # Whether a target or a setting was left out of the positions. Inputs after such a gap must be
    # passed by name.
    has_gap = False
    for position, value in enumerate(arguments):
        # A value for *args has no name, so it is passed by position, even if it is a setting.
        name = named[position] if position < len(named) else ""
        if name in targets:
            has_gap = True
        elif name and not has_tensors(value):
            fixed[name] = value
            has_gap = True
        elif name and has_gap:
            inputs_by_name[name] = copied(value)
        else:
            by_position.append(copied(value))
    for name, value in by_name.items():
        if name in targets:
            continue
        if has_tensors(value):
            inputs_by_name[name] = copied(value)
        else:
            fixed[name] = value
    return Call(tuple(by_position), inputs_by_name, fixed)


def has_tensors(value: Any) -> bool:
    """Return whether an argument contains a tensor."""
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def copied(value: Any) -> Any:
    """Copy the tensors of an argument.

    A program that is traced with a view of a larger tensor would refuse tensors that are no views.
    """
    return pytree.tree_map_only(Tensor, torch.clone, value)


def make_program(
    target: Path, trained: nn.Module, call: Call, batched: bool = True
) -> ExportedProgram:
    """Trace the program for inputs of all sizes that the model accepts; UserError if that fails.

    With `batched`, the first dimension of a tensor is a batch of any size.
    """
    shapes: Any = ShapesCollection()
    for leaf in pytree.tree_leaves((call.arguments, call.by_name)):
        if isinstance(leaf, Tensor):
            # A model may require a certain size of a dimension, so let torch decide (AUTO). torch
            # fixes a size of one in any case, and warns unless it is declared (STATIC).
            sizes: dict[int, Any] = {}
            for dimension, size in enumerate(leaf.shape):
                sizes[dimension] = Dim.STATIC if size == 1 else Dim.AUTO
            # A program for batches is traced with two samples. So a first dimension of one is not
            # the batch: all samples share the tensor, such as a mask. The dimension stays fixed.
            if batched and leaf.ndim > 0 and leaf.shape[0] > 1:
                sizes[0] = Dim.DYNAMIC
            shapes[leaf] = sizes
    forward = trained.forward
    try:
        trained.forward = with_named_inputs(forward, call)
        with torch.no_grad(), trained.register_forward_hook(as_plain_output):
            return torch.export.export(trained, call.arguments, call.by_name, dynamic_shapes=shapes)
    # torch.export raises many types, with pages of advice: keep the first line.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        where = place_in_model(error)
        raise UserError(
            f"{target}: torch.export cannot make a program from the model{where}: {reason}"
        ) from error
    finally:
        trained.forward = forward


def with_named_inputs(forward: Callable[..., Any], call: Call) -> Any:
    """Return `forward` with the settings of a call, and with a signature that names its inputs.

    torch.export fails for an input that the signature accepts only through **kwargs.
    """
    named: Any = functools.partial(forward, **call.fixed)
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(named).parameters.values():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            parameters.append(parameter)
    names = {parameter.name for parameter in parameters}
    for name in call.by_name:
        if name not in names:
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY))
    named.__signature__ = inspect.Signature(parameters)
    return named


def as_plain_output(_: nn.Module, arguments: Any, output: Any) -> Any:
    """Turn an output with fields (such as a transformers model's) into a plain dictionary."""
    if isinstance(output, Mapping):
        fields = dict(output)
    elif dataclasses.is_dataclass(output):
        fields = vars(output)
    else:
        # A hook that returns None keeps the output.
        return None
    return {name: value for name, value in fields.items() if has_tensors(value)}


def place_in_model(error: Exception) -> str:
    """Return " (model.py, line 7: code)" for the innermost line of this package in a traceback."""
    place = ""
    here = Path(__file__)
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename)
        if file.is_relative_to(here.parent) and file != here:
            # The innermost frame comes last, so the last match stays.
            place = f" ({file.name}, line {frame.lineno}: {frame.line})"
    return place


def check_program(
    target: Path, program: ExportedProgram, trained: nn.Module, call: Call, reason: str
) -> None:
    """Raise UserError with this reason unless the program gives the same results as the model."""
    problem = ""
    with torch.no_grad():
        output = trained(*call.arguments, **call.by_name, **call.fixed)
        expected = as_plain_output(trained, None, output)
        if expected is None:
            expected = output
        try:
            actual = program.module()(*call.arguments, **call.by_name)
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
        except AssertionError as error:
            problem = str(error).strip().partition("\n")[0]
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            problem = f"{type(error).__name__}: {first_line}"
    if problem:
        raise UserError(
            f"{target}: {reason} ({problem}): "
            "does `forward` in model.py look at the sizes of its inputs?"
        )


def describe_inputs(program: ExportedProgram) -> Iterator[str]:
    """Yield each input with its sizes, as in "tokens [any, up to 128]"."""
    inputs = program.graph_signature.user_inputs
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in inputs and "val" in node.meta:
            sizes = [describe_size(program, size) for size in node.meta["val"].shape]
            yield f"{node.name} [{', '.join(sizes)}]"


def describe_size(program: ExportedProgram, size: Any) -> str:
    """Describe an input's size: a number, "any", or "up to" the largest one."""
    if isinstance(size, int):
        return str(size)
    limits = program.range_constraints.get(size.node.expr)
    # For unlimited sizes torch gives a limit near the largest integer.
    if limits is None or limits.upper >= 2**60:
        return "any"
    return f"up to {limits.upper}"
