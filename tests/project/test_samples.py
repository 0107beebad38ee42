"""Samples of what a model has learned: in the run directory, the tracker and the report."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.conftest import Project, project_fixture

text = project_fixture("samples_of_text", parallelism="single", checkpoint="torch_save")
image = project_fixture(
    "samples_of_images", task="image_classifier", parallelism="single", checkpoint="torch_save"
)


def train(project: Project, folder: Path, **changes: object) -> list[Path]:
    """The samples of a run."""
    run_dir = folder / "run"
    settings = {"run_dir": run_dir, "train__steps": 6, "train__validate_every": 3}
    if "images" in project.name:
        settings |= {"optim__learning_rate": 1e-6, "data__path": None}
    project.module("train").run(project.config(**settings | changes))
    return project.module("run.samples").samples_of(run_dir)


def events_of(folder: Path) -> dict[str, list[int]]:
    """Steps by what TensorBoard shows of the samples."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run/tensorboard"), {"tensors": 0, "images": 0})
    events.Reload()
    texts = "sample/text_summary" in events.Tags()["tensors"]
    found = {"text": [e.step for e in events.Tensors("sample/text_summary")] if texts else []}
    shown = "sample" in events.Tags()["images"]
    return found | {"image": [e.step for e in events.Images("sample")] if shown else []}


def test_a_language_model_writes_a_text(
    text: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        paths = train(text, tmp_path)
    assert [path.name for path in paths] == ["step_00000003.txt", "step_00000006.txt"]
    one = paths[-1].read_text()
    assert len(one) >= 32 + 30
    start = (text.folder / "text.txt").read_text()
    assert one[:32] in start, "it begins with text for validation"
    assert "sample at step 6" in caplog.text and "left out" not in caplog.text
    assert events_of(tmp_path) == {"text": [3, 6], "image": []}
    text("report", "--run-dir", str(tmp_path / "run"))
    page = (tmp_path / "run/report.html").read_text()
    assert "Sample, step 6" in page and "<pre>" in page


def test_a_classifier_paints_its_worst_mistakes(
    image: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = train(image, tmp_path, train__micro_batch_size=12, train__global_batch_size=12)
    assert [path.name for path in paths] == ["step_00000003.png", "step_00000006.png"]
    with Image.open(paths[-1]) as picture:
        assert picture.width == 6 * 112 and picture.height > 100
        assert len(picture.getcolors(10_000) or ()) > 5
    assert "left out" not in caplog.text
    assert events_of(tmp_path) == {"text": [], "image": [3, 6]}
    image("report", "--run-dir", str(tmp_path / "run"))
    assert "data:image/png;base64," in (tmp_path / "run/report.html").read_text()


def test_who_is_right_has_no_mistakes_to_show(image: Project, tmp_path: Path) -> None:
    state = image.module("train").setup(image.config(data__path=None))
    labels = iter([image.module("sampling")])  # the labels of the batch, by another way

    class Knows(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            sampling = next(labels)
            size = state.config.train.micro_batch_size
            chosen = sampling.fixed_subset(len(state.validation), size)
            batch = sampling.fetch(state.validation, chosen)
            return 9.0 * torch.nn.functional.one_hot(batch["labels"], 10)

    state.module = Knows()
    callback = image.module("callbacks").WorstMistakes(tmp_path)
    callback.after_validation(state, {})
    assert not (tmp_path / "samples").exists()


def test_samples_change_nothing(text: Project, tmp_path: Path) -> None:
    train(text, tmp_path / "with")
    callbacks = text.module("callbacks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callbacks, "callbacks", lambda config, run_dir: ())
        assert train(text, tmp_path / "without") == []
    ends = [text.tensors(tmp_path / name / "run") for name in ("with", "without")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_report_shows_no_file_but_a_sample(text: Project, tmp_path: Path) -> None:
    """Who made an archive of a run directory may have left a link to any file."""
    train(text, tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("this is a secret")
    for ending in ("txt", "png"):
        link = tmp_path / f"run/samples/step_00000009.{ending}"
        link.symlink_to(secret)
    (tmp_path / "run/samples/step_<b>.txt").write_text("<script>a</script>\x1b[2J")
    text("report", "--run-dir", str(tmp_path / "run"))
    page = (tmp_path / "run/report.html").read_text()
    assert "a secret" not in page and "<script>" not in page and "\x1b" not in page


@pytest.mark.parametrize("kind", ["text", "image"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("a link")])
def test_a_sample_that_cannot_be_written_costs_no_later_one(
    kind: str,
    error: Exception,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A callback that was disabled on one rank would let the others wait for it."""
    project = request.getfixturevalue(kind)
    own = project.module("callbacks")
    replace_file, calls = own.replace_file, []

    def full_at_first(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            raise error
        replace_file(*arguments)

    monkeypatch.setattr(own, "replace_file", full_at_first)
    names = [path.stem for path in train(project, tmp_path)]
    assert names == ["step_00000006"]
    assert "step 3 is not saved" in caplog.text and "is disabled" not in caplog.text


def test_a_text_that_cannot_be_shown_is_a_warning(
    text: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Rank 0 alone shows it: an error there would leave the other ranks waiting for it."""

    def fail(*arguments: Any) -> Any:
        raise text.module("errors").UserError("tokenizer.json cannot be read as a tokenizer")

    monkeypatch.setattr(text.module("infer"), "decode", fail)
    config = text.config(run_dir=tmp_path, train__steps=4, train__validate_every=2)
    assert text.module("train").run(config).status == "finished"
    warned = [line for line in caplog.messages if "cannot be read as a tokenizer" in line]
    assert [line.partition(" is not")[0] for line in warned] == [
        "the sample of step 2",
        "the sample of step 4",
    ]
