"""What it costs that ranks meet: the store of a job, gloo's connections, agreement on objects.

Ranks are processes of this machine, forked, that share its cores: so CPU time is what counts here,
and the store's, which one thread serves, before all. `Group` is the rendered project's own. The
store alone is tried with more clients than there can be processes. All of it happens in a network
of its own, which has no name server: torch looks up the name of every client that connects, and
what that takes is not the store's doing.
"""

import argparse
import importlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .common import (
    PACKAGE,
    RESULTS,
    ROOT,
    machine,
    numbers_on_one_line,
    render,
    today,
    versions,
)

CLIENTS = (64, 256, 1024, 4096, 10_240)
RANKS = (16, 32, 64, 128, 256)
CALLS = 5  # of each collective
HOSTS = 4  # processes that the clients of a store are divided among
PATIENCE = 120  # seconds
LAZY = "TORCH_GLOO_LAZY_INIT"
APART = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


class Child:
    """A forked process that runs `work(say)`; `say` sends an object to `heard`."""

    def __init__(
        self, work: Callable[[Callable[[Any], None]], None], patience: int = PATIENCE
    ) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            signal.alarm(patience)
            try:
                work(lambda what: os.write(writing, f"{json.dumps(what)}\n".encode()) and None)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}"[:300], file=sys.stderr)
                os._exit(1)
            os._exit(0)
        os.close(writing)
        self.lines = open(reading, encoding="utf-8")  # noqa: SIM115 - closed in `end`

    def heard(self) -> Any:
        """What it said next; RuntimeError when it ended instead."""
        if line := self.lines.readline():
            return json.loads(line)
        raise RuntimeError("a rank has failed")

    def end(self) -> None:
        """Wait until it has ended."""
        self.lines.close()
        os.waitpid(self.pid, 0)


class Store:
    """A store in a process of its own: forking beside its threads could leave a child hanging."""

    def __init__(self) -> None:
        reading, self.writing = os.pipe()

        def serve(say: Callable[[Any], None]) -> None:
            os.close(self.writing)
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            say(store.port)
            began = time.process_time()
            os.read(reading, 1)
            say(time.process_time() - began)

        self.child = Child(serve)
        os.close(reading)
        self.port = self.child.heard()

    def close(self) -> float:
        """End it; its CPU seconds."""
        os.close(self.writing)
        seconds = self.child.heard()
        self.child.end()
        return seconds


def connect(port: int) -> dist.TCPStore:
    """A client."""
    patience = timedelta(seconds=PATIENCE)
    return dist.TCPStore("127.0.0.1", port, timeout=patience, wait_for_workers=False)


def store(clients: int) -> dict[str, float]:
    """Clients connect and meet at a barrier, as ranks do that join."""
    server = Store()

    def meet(place: int) -> Callable[[Callable[[Any], None]], None]:
        def work(say: Callable[[Any], None]) -> None:
            os.close(server.writing)
            mine = [connect(server.port) for _ in range(place, clients, HOSTS)]
            for client in mine:
                if client.add("here", 1) == clients:
                    client.set("all", "1")
            for client in mine:
                client.get("all")
            say(None)

        return work

    began = time.perf_counter()
    hosts = [Child(meet(place)) for place in range(HOSTS)]
    for host in hosts:
        host.heard()
    seconds = time.perf_counter() - began
    for host in hosts:
        host.end()
    return {"seconds": seconds, "server_cpu_seconds": server.close()}


def groups(ranks: int, lazy: bool, package: str) -> dict[str, float]:
    """Ranks join, make a `Group`, and agree on what each would write."""
    control = importlib.import_module(f"{package}.distributed")
    os.environ |= {LAZY: str(int(lazy)), "GLOO_SOCKET_IFNAME": "lo"}
    server = Store()

    def rank_of(rank: int) -> Callable[[Callable[[Any], None]], None]:
        def work(say: Callable[[Any], None]) -> None:
            os.close(server.writing)
            patience = timedelta(seconds=PATIENCE)
            how = {"rank": rank, "world_size": ranks, "timeout": patience}
            dist.init_process_group("gloo", store=connect(server.port), **how)
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            before = len(os.listdir("/proc/self/fd"))
            group = control.Group(control.World(rank, ranks, torch.device("cpu"), True))
            found = {"group_cpu_seconds": time.process_time() - cpu}

            def block() -> None:
                with group.together():
                    pass

            calls = {
                "gather": lambda: group.gather(
                    {f"__{rank}_0.distcp": {"size": 123_456_789, "sha256": "0" * 64}}
                ),
                "broadcast": lambda: group.broadcast("checkpoints/step_00000120"),
                "together": block,
                "word": lambda: group.maximum([0, 0])(),
            }
            for name, call in calls.items():
                call()
                cpu = time.process_time()
                for _ in range(CALLS):
                    call()
                found[f"{name}_cpu_seconds"] = (time.process_time() - cpu) / CALLS
            dist.barrier()
            found["connections"] = len(os.listdir("/proc/self/fd")) - before
            found["seconds"] = time.perf_counter() - began
            say(found)
            dist.barrier()

        return work

    children = [Child(rank_of(rank)) for rank in range(ranks)]
    found = [child.heard() for child in children]
    for child in children:
        child.end()
    row = {key: statistics.median(entry[key] for entry in found) for key in found[0]}
    row |= {f"first_{key}": value for key, value in found[0].items()}
    return {**row, "server_cpu_seconds": server.close()}


def repeated(measure: Callable[[], dict[str, float]], times: int) -> dict[str, Any]:
    """Medians of several runs, and the least and the most."""
    found = [measure() for _ in range(times)]
    values = {key: [float(f"{it[key]:.4g}") for it in found] for key in found[0]}
    row: dict[str, Any] = {key: statistics.median(of) for key, of in values.items()}
    return {**row, "range": {key: [min(of), max(of)] for key, of in values.items()}}


def may_be_apart() -> bool:
    """Whether this system lets us have a network of our own."""
    tried = [*APART, "true"]
    return (
        bool(shutil.which(APART[0])) and not subprocess.run(tried, capture_output=True).returncode
    )


def main() -> None:
    """Try the store and the groups at each size; write the result."""
    parser = argparse.ArgumentParser("python -m benchmarks.meeting", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--repeats", type=int, default=3, help="of what has 64 ranks at most")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    parser.add_argument("--here", action="store_true", help="in this network, name server and all")
    given = parser.parse_args()
    if not given.here and may_be_apart():
        inside = [*APART, sys.executable, "-m", "benchmarks.meeting", "--here", *sys.argv[1:]]
        quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # else it misses each client's name
        raise SystemExit(subprocess.run(inside, cwd=ROOT, env=quiet, check=False).returncode)
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "command": "python -m benchmarks.meeting",
        "date": today(),
        "machine": machine(),
        "versions": versions("torch"),
        "settings": {"calls": CALLS, "repeats": given.repeats},
        "store": [],
        "groups": {"all at once": [], "as needed": []},
    }
    with tempfile.TemporaryDirectory() as folder:
        source = render(Path(folder))
        sys.path.insert(0, str(source))
        for clients in given.clients:
            row = repeated(lambda n=clients: store(n), given.repeats)
            result["store"].append({"ranks": clients, **row})
            print("store", json.dumps(result["store"][-1]), flush=True)
        for way, rows in result["groups"].items():
            for ranks in given.ranks:
                times = given.repeats if ranks <= 64 else 1
                lazy = way == "as needed"
                row = repeated(lambda n=ranks, lazy=lazy: groups(n, lazy, PACKAGE), times)
                rows.append({"ranks": ranks, **row})
                print(way, json.dumps(rows[-1]), flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    text = numbers_on_one_line(json.dumps(result, indent=1))
    (given.out / "meeting.json").write_text(f"{text}\n", "utf-8")


if __name__ == "__main__":
    main()
