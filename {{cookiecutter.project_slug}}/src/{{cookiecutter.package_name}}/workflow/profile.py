"""What the steps of the project's own loop spend their time on."""

from .. import parallel
from ..config import Config
from ..engine.profiling import trace_steps
from ..train import setup, train_step


def measure(config: Config) -> int:
    """Trace a few steps, plain or under torchrun."""
    state = setup(config)
    traces = trace_steps(config.profile, config.directory / "traces", state, train_step)
    if state.world.rank == 0:
        print(traces.table)
        print(f"open {traces.written[-1]} at https://ui.perfetto.dev")
    world = state.world
    del state
    parallel.teardown(world)
    return 0
