"""Your own callbacks: objects whose methods the loop calls, in every process.

A callback has any of these methods (train.py calls them):

    before_step(state)                  the next batch is loaded, but the step has not begun
    after_step(state, record)           the step is done; `record` is its line of metrics.jsonl, or
                                        None if it has no line
    after_validation(state, figures)    `figures` are the metrics, e.g. {"validation_loss": 1.2}

`state` is train.State, with `state.model` (your model, unwrapped), `state.optimizer`, `state.step`
and `state.config`. `state.finish("why")` ends the run.

A callback may be a context manager, entered before the first step and exited after the last one. If
it has `state_dict()` and `load_state_dict(state)`, checkpoints store its state as JSON.

An exception in a callback ends the run. If its class sets `harmless = True`, the first exception
logs a warning and disables the callback instead.

Numbers that a callback adds on rank 0 to `record`, or to `figures` under a key that begins with
`validation_`, go to metrics.jsonl and to the tracker. A callback may use random numbers, which does
not change those of training.
"""

# {% include "task/" ~ cookiecutter.task ~ "/callbacks.py" %}
