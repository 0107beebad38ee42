"""Callbacks are called in order and resumed; an error disables them if they are harmless."""

import json
from pathlib import Path

import pytest
from conftest import after_step, tiny

from {{ cookiecutter.package_name }} import callbacks
from {{ cookiecutter.package_name }}.train import State, run


def test_callbacks_are_called_and_left_out_if_harmless(tmp_path, monkeypatch, caplog) -> None:
    """An error disables a callback that is `harmless`, and ends the run otherwise."""
    calls = []

    class Recorder:
        harmless = True

        def __enter__(self):
            calls.append("enter")

        def __exit__(self, *exception):
            calls.append("exit")

        def before_step(self, state):
            calls.append(f"before {state.step}")

        def after_step(self, state, record):
            calls.append(f"after {state.step} {record is not None}")

        def after_validation(self, state, figures):
            figures["validation_extra"] = 7.0
            raise RuntimeError("on purpose")

    monkeypatch.setattr(callbacks, "callbacks", lambda config, run_dir: [Recorder()])
    result = run(tiny(tmp_path, train__steps=4, train__log_every=2, train__validate_every=3))
    # `before_step` is called with the number of completed steps. Step 2 has a record, since it is
    # logged. After step 3 the validation comes before `after_step`, and its error disables the
    # callback, so no more calls follow, except for the exit.
    steps = ["before 0", "after 1 False", "before 1", "after 2 True", "before 2"]
    assert calls == ["enter", *steps, "exit"]
    assert result.status == "finished" and "on purpose" in caplog.text
    # The lines are of steps 2, 3 and 4. The metric that was set before the error is in the second.
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line).get("validation_extra") for line in lines] == [None, 7.0, None]
    Recorder.harmless = False
    # The run resumes from step 4, and raises the error in the validation at step 6.
    with pytest.raises(RuntimeError, match="on purpose"):
        run(tiny(tmp_path, train__steps=9, train__validate_every=6))


def test_the_state_of_a_callback_is_resumed(tmp_path: Path) -> None:
    """A callback that counts steps has 6 at the first end, and counts 3 more after the resume."""

    class Counter:
        count = 0

        def after_step(self, state, record):
            self.count += 1

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    run(tiny(tmp_path, train__steps=6), [Counter()])
    counter = Counter()
    run(tiny(tmp_path, train__steps=9), [counter])
    assert counter.count == 9


def test_a_callback_can_finish_a_run(tmp_path: Path) -> None:
    """The run ends soon after the request, and the same command does not continue it."""

    def finish(state: State, record: dict | None) -> None:
        if state.step == 3:
            state.finish("good enough")

    result = run(tiny(tmp_path), [after_step(finish)])
    # The ranks agree on the request of step 3 before they end the run, which takes a step or two.
    assert result.status == "finished" and 3 <= result.step <= 5
    assert json.loads((tmp_path / "status.json").read_text())["reason"] == "good enough"
    assert run(tiny(tmp_path)).status == "already finished"
