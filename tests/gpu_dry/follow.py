"""`python -m tests.gpu_dry.follow GUARD PLAN`: follow runs of renders on fake CUDA tensors.

PLAN is a JSON file of {package: {"settings": {...}, "ranks": ..., "resume": ...}}, and the packages
are on PYTHONPATH. Prints a line of JSON for each: what happened, or an error and the line of the
package that it comes from.
"""

import contextlib
import functools
import importlib
import json
import logging
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

from tests.gpu_dry import dry

if __name__ == "__main__":
    try:
        dry.load(Path(sys.argv[1]))  # before torch
    except dry.NotHere as error:
        print(f"not here: {error}")
        sys.exit()

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor

RANK = 3  # among several


class Replica(nn.Module):
    """In the place of DDP, whose reducer reads data: sums each gradient when it is complete."""

    find_unused_parameters = False

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module, self.syncs = module, True
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, parameter: torch.Tensor) -> None:
        if self.syncs:
            dist.all_reduce(parameter.grad, async_op=True)

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.module(*given, **named)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, names: list[str]) -> None:
        """What is not sent at the start."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.syncs = False
        yield
        self.syncs = True


class Later:
    """In the place of a writer's thread: what it gets runs when its result is asked for."""

    def submit(self, call: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        action = functools.partial(call, *arguments)
        future.exception = lambda *_: self.run(future, action)  # type: ignore[method-assign]
        future.result = lambda *_: self.run(future, action)  # type: ignore[method-assign]
        return future

    def run(self, future: "Future[Any]", action: Callable[[], Any]) -> None:
        if not future.done():
            future.set_result(None)
            action()

    def shutdown(self) -> None:
        """There is no thread."""


def attention(q: Any, k: Any, v: Any, block_mask: Any) -> Any:
    """In the place of FlexAttention."""
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Run:
    """A run of a package on one rank of several, on a fake device."""

    def __init__(self, package: str, settings: dict[str, Any], ranks: int, folder: Path) -> None:
        self.package, self.ranks, self.folder = package, ranks, folder
        self.loop, config = self.module("train"), self.module("config")
        self.config = config.override(config.preset("tiny"), settings)
        self.distributed = self.module("distributed")
        self.world = self.distributed.World

    def module(self, name: str) -> Any:
        return importlib.import_module(f"{self.package}.{name}")

    def save_on_cpu(self) -> None:
        """Save a checkpoint of step 1, to restore from."""
        world = self.world(0, 1, torch.device("cpu"))
        state = self.loop.setup(self.config, world)
        saves = self.loop.resume(state, self.folder, self.distributed.Group(world))
        self.loop.train_step(state, state.loader.next())
        saves.finish(1)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """What the ranks agree on is agreed on at once; DDP and FSDP work on fake tensors."""
        parallel, group = self.distributed.parallel, self.distributed.Group
        with contextlib.ExitStack() as stack:

            def replace(owner: Any, name: str, value: Any) -> None:
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, value))

            def gather(each: list[Any], value: Any) -> None:
                each[:] = [value] * len(each)

            def wrap(model: nn.Module, *rest: Any, real: Any = parallel.wrap) -> nn.Module:
                if not parallel.SHARDED:  # that one places what it shards
                    model = dry.to_device(model, torch.device("cuda", 0))
                return real(model, *rest)

            def compile(function: Any, **options: Any) -> Any:
                # The compiler does not work on fake tensors, and flex_attention alone is compiled.
                return attention if function.__name__ == "flex_attention" else function

            def agree_on_buffers(
                running: Any, *rest: Any, real: Any = parallel.agree_on_buffers
            ) -> None:
                running.differing = {*range(len(running.slots))}  # which are found by their values
                real(running, *rest)

            def part_of(block: torch.Tensor, place: int, like: torch.Tensor) -> torch.Tensor:
                part = torch.empty(like.shape, dtype=like.dtype)
                return self.device.pin(part) if self.device.is_pinned(block) else part

            def first_of_all(self: Any, world: Any = None, real: Any = group.__init__) -> None:
                real(self, world)
                self.is_first = True

            for name in ("model", "gpt"):  # the language model's loss in parts, as of many tokens
                with contextlib.suppress(ModuleNotFoundError):
                    replace(self.module(name), "MAX_LOGITS", 2000)
            replace(torch, "compile", compile)
            with contextlib.suppress(ModuleNotFoundError):  # which has no memory to share
                replace(self.module("checkpoint.staging"), "part_of", part_of)
            replace(parallel, "agree_on_buffers", agree_on_buffers)
            if self.ranks > 1:
                stack.enter_context(dry.one_rank_of(self.ranks, RANK))
                replace(dist, "new_group", lambda *a, **k: None)
                replace(dist, "barrier", lambda *a, **k: None)
                replace(dist, "all_gather_object", gather)
                replace(dist, "broadcast_object_list", lambda *a, **k: None)
                replace(group, "__init__", first_of_all)
                replace(group, "broadcast", lambda self, value: value)
                replace(group, "gather", lambda self, value: [value])
                replace(group, "any", lambda self, flag: flag)
                replace(group, "maximum", lambda self, values: lambda: values)
                replace(parallel, "DistributedDataParallel", Replica)
                replace(parallel, "wrap", wrap)
                if parallel.SHARDED:  # all is fake already, and cannot be on `meta` as well
                    replace(parallel, "build_on_meta", lambda make: make())
                    for module in (parallel, self.module("distributed.shardable")):
                        replace(module, "can_be_filled", lambda it: not isinstance(it, DTensor))
                if hasattr(parallel, "build_mesh"):
                    mesh, really = parallel.build_mesh, unset_fake_temporarily
                    replace(parallel, "build_mesh", lambda *given: _outside(mesh, really, given))
            yield

    def follow(self) -> dict[str, Any]:
        """All that happens in a run, in its order; what the host waited for."""
        with self.alone(), dry.following() as device:
            self.device = device
            world = self.world(
                RANK if self.ranks > 1 else 0, self.ranks, torch.device("cuda", 0), self.ranks > 1
            )
            group = self.distributed.Group(world)
            state = self.state = self.loop.setup(self.config, world)
            assert {p.device.type for p in state.model.parameters()} == {"cuda"}
            groups = [dict(group) for group in state.optimizer.param_groups]
            saves = self.loop.resume(state, self.folder, group)
            for one, before in zip(state.optimizer.param_groups, groups, strict=True):
                one.update(before)  # what was read are numbers of fake tensors
            assert state.step == int(bool(saves.restored))
            self.callbacks(group)
            outcome: dict[str, Any] = {"record": self.step(recorded=True)}
            self.step()  # the optimizer has its state now: the buffers of saves are made
            outcome |= self.save(saves)
            outcome["pinned_again"] = self.save(saves, step=False)["pinned"]
            validate_averaged = self.module("validation").validate_averaged
            outcome["validation"] = dry.waits_of(lambda: validate_averaged(state, bool))
            assert state.compute_dtype == torch.bfloat16 and state.forward_flops
            return outcome

    def callbacks(self, group: Any) -> None:
        """Make those that a run has, and enter none: they would start threads."""
        hardware, runner = self.module("run.hardware"), self.module("run.callback_runner")
        state, watch = self.state, self.distributed.monitors
        before, after = watch(state, self.folder, group)
        self.journal = self.module("run.journal").Journal(self.folder, state, group)
        yours = (
            *self.loop.callbacks_file.callbacks(self.config, self.folder),
            self.journal,
            *after,
        )
        with mock.patch.object(self.module("profiler"), "profile"):
            profiler = self.module("profiler").Profiler
            everyone = [
                hardware.MemoryUse(),
                *before,
                self.loop.BadSteps(self.config.train, self.loop.train_step, group),
                *yours,
                *(tracker(self.config, self.folder, 0) for tracker in self.loop.TRACKERS),
                profiler(self.config.profile, self.folder / "traces", state),
            ]
        self.before_steps = runner.find_methods("before_step", everyone)
        self.after_steps = runner.find_methods("after_step", everyone)
        self.group = group

    def step(self, recorded: bool = False) -> list[str]:
        """One step and its callbacks, in which the host never waits; the waits of its record."""
        batches = self.state.loader.next()
        record: dict[str, Any] | None = None
        with dry.no_waiting():
            for call in self.before_steps:
                call(self.state)
            self.loop.train_step(self.state, batches)
        before = len(self.device.waits)
        if recorded:
            record = self.journal.record(self.state)
        waits = self.device.waits[before:]
        with dry.no_waiting():
            for call in self.after_steps:
                call(self.state, record)
        return waits

    def save(self, saves: Any, step: bool = True) -> dict[str, Any]:
        """Save and, while that goes on, take a step; where the save waits and what it copies."""
        writer, state, device = saves.writer, self.state, self.device
        background, module = hasattr(writer, "thread"), self.module("checkpoint.writer")
        written: dict[str, torch.Tensor] = {}
        planned: set[str] = set()
        events: list[int] = []
        copied: set[Any] = set()  # by which streams
        before, pinned = writer.wait_until_staged, len(device.pinned)
        if background:
            writer.thread = Later()

        def write(folder: Path, tensors: dict[str, Any], *rest: Any) -> list[str]:
            written.update(tensors)
            if hasattr(writer, "saver"):  # how DCP would write this rank's part
                planner = dcp.DefaultSavePlanner()
                planner.set_up_planner(self.module("checkpoint.tensors").nested(tensors))
                planned.update(item.index.fqn for item in planner.create_local_plan().items)
            return []

        def judge(tensors: dict[str, Any], model: nn.Module, real: Any = module.refuse_nan) -> None:
            if not background:
                return real(tensors, model)
            parts = [self.distributed.parallel.local_part(t) for t in tensors.values()]
            assert all(device.is_pinned(part) for part in parts), "a copy in pageable memory"
            copied.update(device.written[device.key(part)][0] for part in parts)
            return device.host_reads(parts)

        def wait_until_staged() -> None:
            count = device.events
            before()
            events.append(device.events - count)

        saver = (writer.saver, "write") if hasattr(writer, "saver") else (module, "write_tensors")
        publish = saves.publisher, "publish"
        with contextlib.ExitStack() as stack:
            for owner, name, value in (
                (*saver, write),
                (*publish, lambda step, write, facts: write(self.folder)),
                (module, "refuse_nan", judge),
                (writer, "wait_until_staged", wait_until_staged),
            ):
                stack.enter_context(mock.patch.object(owner, name, value))
            saves.last_good = None
            waits = dry.waits_of(lambda: saves.save(state.step))
            pinned = len(device.pinned) - pinned
            if step:
                self.step()
            saves.settle()
        return {
            "save": waits,
            "events": events,
            "written": len(written),
            "planned": len(planned),
            "pinned": pinned,
            "own_stream": bool(copied) and device.default not in copied,
        }


def _outside(action: Callable[..., Any], mode: Any, given: Any) -> Any:
    """A mesh has real tensors."""
    with mode():
        return action(*given)


def explain(error: BaseException, package: str) -> dict[str, str]:
    """An error, and the last line of the package on the way to it."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if f"/{package}/" in frame.filename] or frames
    where = f"{Path(theirs[-1].filename).name}: {theirs[-1].line}"
    text = "".join(traceback.format_exception(error))
    return {"error": f"{type(error).__name__}: {error}"[:500], "where": where, "traceback": text}


def main() -> None:
    """Follow each case of the plan."""
    plan = json.loads(Path(sys.argv[2]).read_text())
    logging.disable()
    for name, case in plan.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                settings = case["settings"] | {"data.path": Path(case["settings"]["data.path"])}
                run = Run(name, settings, case["ranks"], Path(folder))
                if case["resume"]:
                    run.save_on_cpu()
                outcome = run.follow()
            except Exception as error:
                outcome = explain(error, name)
        print("case " + json.dumps({name: outcome}), flush=True)


if __name__ == "__main__":
    main()
