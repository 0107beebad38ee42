"""A model built without memory, whose parts get their values when their turn comes.

What is done with its tensors is noted, and random numbers are drawn and let go, so that later ones
are the same. The values of a part come from what was done with it, done again with the same random
numbers. The idea is torchdistX's: deferred initialization.
"""

import warnings
from typing import Any, NamedTuple

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
    changed: set[int]  # storages that it may have written
    filled: set[int]  # those of which nothing is left that was there before
    read: set[int]

    def run(self, memory: Memory) -> None:
        """Compute the results from what is in the memory, and put them there."""
        args, named = tree_map_only(FakeTensor, lambda each: real(each, memory), self.given)
        if self.drew_from:
            generator, state = self.drew_from
            generator.set_state(state)
        values = tensors(self.operator(*args, **named))
        for result, value in zip(self.results, values, strict=True):
            if key(result) not in memory:
                like = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype)
                memory[key(result)] = like.copy_(value).untyped_storage()


class Deferred(TorchDispatchMode):
    """In its block tensors get no memory: they are fake, of the device that the code asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.fake, self.calls = FakeTensorMode(allow_non_fake_inputs=True), list[Call]()
        self.made, self.brought = set[int](), set[int]()  # storages, and addresses of large data
        self.scratch = torch.UntypedStorage(0)  # kept: malloc would not return what each draw frees

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named, taken = dict(kwargs or {}), call._schema.arguments
        given = tensors(args, named)
        makes = not given and any(each.name == "device" for each in taken)
        if not makes and not storages(given):
            return call(*args, **named)
        self.check(given)
        by_name = dict(zip((each.name for each in taken), args, strict=False)) | named
        changes = [each.name for each in taken if each.alias_info and each.alias_info.is_write]
        written = tensors([by_name.get(name) for name in changes])
        if call is torch.ops.aten._local_scalar_dense.default or (
            written and not storages(written)
        ):  # as by `item`, or into a tensor that has memory: what this needs is computed now
            now = tree_map_only(FakeTensor, lambda each: self.values([each])[0], (args, named))
            return call(*now[0], **now[1])
        draws = torch.Tag.nondeterministic_seeded in call.tags
        by_value = draws and len(given) > len(written) and "_like" not in str(call)
        where = torch.device(named.get("device") or "cpu").type
        several = len(written) > 1  # of which some may have memory
        if where != "cpu" or by_value or several or torch.Tag.inplace_view in call.tags:
            raise RuntimeError(f"{call} ({where}) cannot be done later")
        with self.fake:
            result = call(*args, **named)
        if makes and result.numel() < SMALL:
            return call(*args, **named)
        if makes:
            named["dtype"] = result.dtype  # the default may be another one later
        if not call.is_view:
            self.note(call, (args, named), result, written, draws)
        return result

    def note(self, call: Any, given: Any, result: Any, written: list[Tensor], draws: bool) -> None:
        """Note a call; draw what it draws, and let that go."""
        generator = given[1].get("generator") or torch.default_generator
        drew_from = (generator, generator.get_state()) if draws else None
        whole = any(each.nbytes == each.untyped_storage().nbytes() for each in written)
        filled = written if whole and (draws or call._schema.name in FILLS) else []
        read = tensors(given)[len(filled) :]
        brought = {
            t.data_ptr() for t in read if not isinstance(t, FakeTensor) and t.numel() >= SMALL
        }
        if brought & self.brought:
            raise RuntimeError("data is used again, which may have changed")
        self.brought |= brought
        noted, results = tree_map_only(Tensor, as_it_is, (given, result))
        self.made |= storages(results)
        touched = storages(results, written), storages(filled), storages(read)
        self.calls.append(Call(call, noted, tensors(results), drew_from, *touched))
        if draws:
            size = result.untyped_storage().nbytes()
            if size > self.scratch.nbytes():
                self.scratch = torch.UntypedStorage(size)
            self.calls[-1].run({key(result): self.scratch})

    def check(self, given: list[Tensor]) -> None:
        """RuntimeError for tensors that are not of this build, or that nothing vouches for."""
        for each in given:
            if isinstance(each, FakeTensor):
                if key(each) not in self.made:
                    raise RuntimeError("a tensor is of another build, or its data was set")
            elif each.device.type == "meta":
                raise RuntimeError("a tensor is on meta, or its data was set")

    def settle(self, model: nn.Module) -> None:
        """Check a model that was built in the block, and let go what only building needs."""
        held = [*model.parameters(), *model.buffers()]
        self.check(held)
        known = {id(each) for each in held}
        for leaf in tensors([[*vars(module).values()] for module in model.modules()]):
            if isinstance(leaf, FakeTensor) and id(leaf) not in known:
                raise RuntimeError("a module holds a tensor that is no parameter or buffer")
        del self.scratch

    def values(self, wanted: list[Tensor]) -> list[Tensor]:
        """The tensors with their values, computed from what they depend on, and nothing else."""
        keys, chosen, memory = storages(wanted), list[Call](), Memory()
        for call in reversed(self.calls):
            if keys & call.changed:
                chosen.append(call)
                keys = keys - call.filled | call.read
        generators = {call.drew_from[0] for call in chosen if call.drew_from}
        states = [(generator, generator.get_state()) for generator in generators]
        with torch.no_grad():
            for call in reversed(chosen):
                call.run(memory)
        for generator, state in states:
            generator.set_state(state)
        return [real(each, memory) for each in wanted]


def tensors(*nested: Any) -> list[Tensor]:
    """The tensors in nested values."""
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)]


def storages(*nested: Any) -> set[int]:
    """The storages of the fake tensors in nested values."""
    return {key(each) for each in tensors(*nested) if isinstance(each, FakeTensor)}


def key(tensor: Tensor) -> int:
    """The identity of a storage."""
    if tensor.is_conj() or tensor.is_neg():
        raise RuntimeError("a conjugated tensor cannot be computed later")
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
    return torch.empty(0, dtype=tensor.dtype).set_(memory[key(tensor)], *form)
