"""A model built without memory, whose parts get their values when their turn comes.

What is done with its tensors is noted, and random numbers are drawn and let go, so that later ones
are the same. The values of a part come from what was done with it, done again with the same random
numbers. The idea is torchdistX's: deferred initialization.
"""

import warnings
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

SMALL = 4096  # elements: what is made with fewer has memory, for code that reads its values
FILLS = ("aten::zero_", "aten::fill_", "aten::copy_")
Memory = dict[int, torch.UntypedStorage]  # by the storages of fake tensors
# `copy.deepcopy` triggers this warning; the copy is right.
warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")


class Call(NamedTuple):
    """An operator, what it was given, its results, and what it drew from: generator and state."""

    operator: Any
    given: Any
    results: list[Tensor]
    drew_from: tuple[torch.Generator, Tensor] | None
    default: torch.dtype
    changed: set[int]  # storages that it may have written
    filled: set[int]  # those of which nothing is left that was there before
    read: set[int]

    def run(self, memory: Memory) -> None:
        """Compute the results from what is in the memory, and put them there."""
        args, named = tree_map_only(FakeTensor, lambda each: real(each, memory), self.given)
        if self.drew_from:
            generator, state = self.drew_from
            generator.set_state(state)
        torch.set_default_dtype(self.default)
        values = tree_leaves(self.operator(*args, **named))
        for result, value in zip(self.results, values, strict=False):  # None where one is unused
            if isinstance(value, Tensor) and key(result) not in memory:
                real(result, memory).copy_(value)


class OneMode(FakeTensorMode):
    """Also the mode of copied tensors."""

    def __deepcopy__(self, memo: Any) -> "OneMode":
        return self


class Deferred(TorchDispatchMode):
    """In its block tensors get no memory: they are fake, of the device that the code asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.fake, self.calls = OneMode(allow_non_fake_inputs=True), list[Call]()
        self.made, self.brought = set[int](), set[int]()  # storages, and addresses of large data
        self.refused, self.recent = "", Memory()  # why it failed; what was read since the last call
        self.scratch = torch.UntypedStorage(0)  # kept: malloc would not return what each draw frees
        self.before = torch.get_rng_state(), torch.get_default_dtype()

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named, schema = dict(kwargs or {}), call._schema
        given = tensors(args, named)
        makes = not given and any(each.name == "device" for each in schema.arguments)
        if not makes and not storages(given):
            if schema.is_mutable and addresses(given) & self.brought:
                self.refuse("data is changed after it was used")
            return call(*args, **named)
        self.check(given)
        by_name = dict(zip((each.name for each in schema.arguments), args, strict=False)) | named
        writes = (a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write)
        written = tensors([by_name.get(name) for name in writes])
        if call is torch.ops.aten._local_scalar_dense.default or (
            written and not storages(written)
        ):  # as by `item`, or into a tensor that has memory: what this needs is computed now
            now = tree_map_only(FakeTensor, self.read, (args, named))
            return call(*now[0], **now[1])
        draws = torch.Tag.nondeterministic_seeded in call.tags
        if (
            torch.device(named.get("device") or "cpu").type != "cpu"
            or (draws and len(given) > len(written) and "_like" not in str(call))  # by values
            or len(written) > 1  # of which some may have memory
            or any(word in schema.name for word in ("set_", "resize"))
            or (
                "batch_norm" in schema.name and any(each is True for each in args)
            )  # its schema hides that it writes
        ):
            self.refuse(f"{call} cannot be done later")
        with self.fake:
            result = call(*args, **named)
        if makes and result.numel() < SMALL:
            return call(*args, **named)
        if tensors(result) and not call.is_view and torch.Tag.inplace_view not in call.tags:
            self.note(call, (args, named), result, written, draws)
        return result

    def note(self, call: Any, given: Any, result: Any, written: list[Tensor], draws: bool) -> None:
        """Note a call; draw what it draws, and let that go."""
        generator = given[1].get("generator") or torch.default_generator
        drew_from = (generator, generator.get_state()) if draws else None
        whole = any(each.nbytes == each.untyped_storage().nbytes() for each in written)
        filled = written if whole and (draws or call._schema.name in FILLS) else []
        read = tensors(given)[len(filled) :]
        if self.brought & addresses(read):
            self.refuse("data is used again, which may have changed")
        self.brought |= addresses(read)
        noted, results = tree_map_only(Tensor, as_it_is, (given, result))
        self.made |= storages(results)
        self.recent.clear()
        touched = storages(results, written), storages(filled), storages(read)
        default = torch.get_default_dtype()
        self.calls.append(Call(call, noted, tensors(results), drew_from, default, *touched))
        if draws:
            size = result.untyped_storage().nbytes()
            if size > self.scratch.nbytes():
                self.scratch = torch.UntypedStorage(size)
            self.calls[-1].run({key(result): self.scratch})

    def refuse(self, why: str) -> NoReturn:
        """RuntimeError, once more in `settle` if the model's own code catches it."""
        self.refused = why
        raise RuntimeError(why)

    def check(self, given: list[Tensor]) -> None:
        """Refuse tensors that are not of this build, or that nothing vouches for."""
        for each in given:
            unknown = isinstance(each, FakeTensor) and key(each) not in self.made
            if unknown or (not isinstance(each, FakeTensor) and each.device.type == "meta"):
                self.refuse("a tensor is of another build, on meta, or its data was set")

    def settle(self, model: nn.Module) -> None:
        """Check a model that was built in the block, and let go what only building needs."""
        held = [*model.parameters(), *model.buffers()]
        self.check(held)
        known = {id(each) for each in held}
        for leaf in tensors([[*vars(module).values()] for module in model.modules()]):
            if isinstance(leaf, FakeTensor) and id(leaf) not in known:
                self.refuse("a module holds a tensor that is no parameter or buffer")
        if self.refused:
            self.refuse(self.refused)
        del self.scratch, self.recent

    def undo(self) -> None:
        """Put back what a build that failed has changed."""
        torch.set_rng_state(self.before[0])
        torch.set_default_dtype(self.before[1])

    def read(self, tensor: Tensor) -> Tensor:
        """The tensor with its values; kept, since code that reads one reads several."""
        if key(tensor) not in self.recent:
            self.recent[key(tensor)] = self.values([tensor])[0].untyped_storage()
        return real(tensor, self.recent)

    def values(self, wanted: list[Tensor]) -> list[Tensor]:
        """The tensors with their values, computed from what they depend on, and nothing else."""
        keys, chosen, memory = storages(wanted), list[Call](), Memory()
        for call in reversed(self.calls):
            if keys & call.changed:
                chosen.append(call)
                keys = keys - call.filled | call.read
        generators = {call.drew_from[0] for call in chosen if call.drew_from}
        states = [(generator, generator.get_state()) for generator in generators]
        default = torch.get_default_dtype()
        with torch.no_grad():
            for call in reversed(chosen):
                call.run(memory)
        torch.set_default_dtype(default)
        for generator, state in states:
            generator.set_state(state)
        return [real(each, memory) for each in wanted]


def tensors(*nested: Any) -> list[Tensor]:
    """The tensors in nested values."""
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)]


def storages(*nested: Any) -> set[int]:
    """The storages of the fake tensors in nested values."""
    return {key(each) for each in tensors(*nested) if isinstance(each, FakeTensor)}


def addresses(given: list[Tensor]) -> set[int]:
    """Where large tensors have their memory."""
    large = [t for t in given if not isinstance(t, FakeTensor) and t.numel() >= SMALL]
    return {tensor.data_ptr() for tensor in large}


def key(tensor: Tensor) -> int:
    """The identity of a storage."""
    return tensor.untyped_storage()._cdata


def as_it_is(tensor: Tensor) -> Tensor:
    """A snapshot: no later change of the form reaches it, nor of values, if it is small."""
    if isinstance(tensor, FakeTensor):
        return tensor.detach()
    return tensor.clone() if tensor.numel() < SMALL else tensor


def real(tensor: Tensor, memory: Memory) -> Tensor:
    """The tensor in memory in place of a fake one."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    if key(tensor) not in memory:
        memory[key(tensor)] = torch.UntypedStorage(tensor.untyped_storage().nbytes())
    form = tensor.storage_offset(), tensor.shape, tensor.stride()
    found = torch.empty(0, dtype=tensor.dtype).set_(memory[key(tensor)], *form)
    found = found.conj() if tensor.is_conj() else found
    return torch._neg_view(found) if tensor.is_neg() else found
