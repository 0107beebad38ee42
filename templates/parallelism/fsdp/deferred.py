"""Build a model without memory; compute the values of its parts later.

Each operator on its tensors is recorded. Random numbers are drawn and discarded, so that later ones
are the same. The values of a part come from replaying what it depends on, as in torchdistX's
deferred initialization.
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
    results: list[Any]  # None where one is unused
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
        for result, value in zip(self.results, values, strict=True):
            if len(tensors(result, value)) == 2 and key(result) not in memory:
                real(result, memory).copy_(value)


# A mode that copies of its tensors share.
OneMode = type("OneMode", (FakeTensorMode,), {"__deepcopy__": lambda mode, memo: mode})


class Deferred(TorchDispatchMode):
    """In its block tensors get no memory: they are fake, of the device that the code asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.fake, self.calls = OneMode(allow_non_fake_inputs=True), list[Call]()
        # Storages that it made; addresses of large data that it used, and the storages of that.
        self.made, self.used, self.brought = set[int](), set[int](), set[int]()
        self.refused, self.recent = "", Memory()  # why it failed; what was read since the last call
        self.scratch = torch.UntypedStorage(0)  # kept: malloc would not return what each draw frees
        self.before = torch.get_rng_state(), torch.get_default_dtype()

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named, schema = dict(kwargs or {}), call._schema
        given = tensors(args, named)
        makes = not given and any(each.name == "device" for each in schema.arguments)
        by_name = dict(zip((each.name for each in schema.arguments), args, strict=False)) | named
        writes = (a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write)
        written = tensors([by_name.get(name) for name in writes])
        if self.brought & {each.untyped_storage().data_ptr() for each in with_memory(written)}:
            self.refuse("data is changed after build_model used it")
        if not makes and not storages(given):
            return call(*args, **named)
        self.check(given)
        if call is torch.ops.aten._local_scalar_dense.default or (
            written and not storages(written)
        ):  # as by `item`, or into a tensor that has memory: what this needs is computed now
            now = tree_map_only(FakeTensor, self.read, (args, named))
            return call(*now[0], **now[1])
        draws = torch.Tag.nondeterministic_seeded in call.tags
        hides_writes = "batch_norm" in schema.name  # its schema has none, but in training it does
        if (
            torch.device(named.get("device") or "cpu").type != "cpu"
            or (draws and len(given) > len(written) and "_like" not in str(call))  # by values
            or len(written) > 1  # of which some may have memory
            or any(word in schema.name for word in ("set_", "resize"))
            or (hides_writes and any(each is True for each in args))
        ):
            self.refuse(f"{call}, called in build_model, cannot be done later")
        with self.fake:
            result = call(*args, **named)
        if makes and result.numel() < SMALL:
            return call(*args, **named)
        is_view = call.is_view or torch.Tag.inplace_view in call.tags
        if not is_view and tensors(result, written):
            self.note(call, (args, named), result, written, draws)
        return result

    def note(self, call: Any, given: Any, result: Any, written: list[Tensor], draws: bool) -> None:
        """Record a call. A random one is drawn and discarded."""
        generator = given[1].get("generator") or torch.default_generator
        drew_from = (generator, generator.get_state()) if draws else None
        whole = any(each.nbytes == each.untyped_storage().nbytes() for each in written)
        filled = written if whole and (draws or call._schema.name in FILLS) else []
        read = tensors(given)[len(filled) :]
        large = with_memory(read, SMALL)
        used = {each.data_ptr() for each in large}
        if self.used & used:
            self.refuse("build_model uses data twice, which may have changed in between")
        self.used |= used
        self.brought |= {each.untyped_storage().data_ptr() for each in large}
        noted, results = tree_map_only(Tensor, as_it_is, (given, result))
        self.made |= storages(results)
        self.recent.clear()
        touched = storages(results, written), storages(filled), storages(read)
        default = torch.get_default_dtype()
        self.calls.append(Call(call, noted, tree_leaves(results), drew_from, default, *touched))
        if draws:
            size = result.untyped_storage().nbytes()
            if size > self.scratch.nbytes():
                self.scratch = torch.UntypedStorage(size)
            self.calls[-1].run({key(result): self.scratch})

    def refuse(self, why: str) -> NoReturn:
        """Raise RuntimeError; `settle` raises it again in case the model's code caught it."""
        self.refused = why
        raise RuntimeError(why)

    def check(self, given: list[Tensor]) -> None:
        """Refuse tensors that this build did not make."""
        for each in given:
            unknown = isinstance(each, FakeTensor) and key(each) not in self.made
            if unknown or (not isinstance(each, FakeTensor) and each.device.type == "meta"):
                self.refuse("a tensor is of an earlier build, on meta, or its .data was replaced")

    def settle(self, model: nn.Module) -> None:
        """Check a model that was built in the block; drop what only building needs."""
        held = [*model.parameters(), *model.buffers()]
        self.check(held)
        known = {id(each) for each in held}
        for name, module in model.named_modules():
            for leaf in tensors([*vars(module).values()]):
                if isinstance(leaf, FakeTensor) and id(leaf) not in known:
                    self.refuse(f"module {name!r} holds a tensor that is no parameter or buffer")
        if self.refused:
            self.refuse(self.refused)
        del self.scratch, self.recent

    def undo(self) -> None:
        """Restore what a failed build changed: torch's random numbers, the default dtype."""
        self.fake.allow_non_fake_inputs = False  # what was kept of it must not make others fake
        torch.set_rng_state(self.before[0])
        torch.set_default_dtype(self.before[1])

    def read(self, tensor: Tensor) -> Tensor:
        """The tensor with its values, cached: code that reads one element reads several."""
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


def with_memory(given: list[Tensor], least: int = 0) -> list[Tensor]:
    """Those that are not fake and have at least so many elements."""
    return [each for each in given if not isinstance(each, FakeTensor) and each.numel() >= least]


def key(tensor: Tensor) -> int:
    """The identity of a storage."""
    return tensor.untyped_storage()._cdata


def as_it_is(tensor: Tensor) -> Tensor:
    """A snapshot of the form, and of the values of a small tensor with memory."""
    if isinstance(tensor, FakeTensor):
        return tensor.detach()
    return tensor.clone() if tensor.numel() < SMALL else tensor


def real(tensor: Tensor, memory: Memory) -> Tensor:
    """The real tensor that stands for a fake one."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    if key(tensor) not in memory:
        memory[key(tensor)] = torch.UntypedStorage(tensor.untyped_storage().nbytes())
    form = tensor.storage_offset(), tensor.shape, tensor.stride()
    value = torch.empty(0, dtype=tensor.dtype).set_(memory[key(tensor)], *form)
    value = value.conj() if tensor.is_conj() else value
    return torch._neg_view(value) if tensor.is_neg() else value
