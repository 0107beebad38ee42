"""What a start trains with: what is typed, then a preset or a file, then the run, then the code."""

import contextlib
import json
from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from tests.conftest import Project, project_fixture, records

ANSWERS = {"parallelism": "single", "checkpoint": "torch_save", "tracker": "none"}
text = project_fixture("text_settings", **ANSWERS)
image = project_fixture("image_settings", **ANSWERS, task="image_classifier")
store = project_fixture("store_settings", **ANSWERS, storage="object_store")
stream = project_fixture("stream_settings", **ANSWERS, samples="stream")
SMALL = ("--preset", "tiny", "--device", "cpu", "--data.path", "text.txt")


def saved(run_dir: Path) -> dict[str, Any]:
    """What config.json says."""
    return json.loads((run_dir / "config.json").read_text("utf-8"))


def test_a_start_takes_the_settings_of_its_run(
    text: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is typed is first, then a preset or a file, then what the run has, then the code."""
    run_dir, file = tmp_path / "run", tmp_path / "more.toml"
    where = ("--run-dir", str(run_dir))
    rates = ("--optim.learning-rate", "0.002", "--optim.clip", "0.5")
    text("train", *SMALL, *where, "--train.steps", "3", *rates, "--train.loader-workers", "1")
    file.write_text("optim.clip = 0.25\noptim.warmup-steps = 2\n")
    caplog.set_level("INFO")
    text("train", *where, "--train.steps", "4", "--config", str(file), "--device", "cpu")
    config = saved(run_dir)
    assert config["train"]["steps"] == 4, "typed"
    assert (config["optim"]["clip"], config["optim"]["warmup_steps"]) == (0.25, 2), "of the file"
    assert config["optim"]["learning_rate"] == 0.002 and config["model"]["width"] == 32, "saved"
    assert config["train"]["loader_workers"] == 0 and not config["fresh"], "of this start"
    (line,) = [text for text in caplog.messages if text.startswith("using the saved settings")]
    assert "optim.learning_rate 0.002 (default: " in line and "model.width 32 (" in line
    assert "clip" not in line and "steps" not in line and "loader_workers" not in line
    assert "resumed at step 3" in (run_dir / "logs/train.log").read_text("utf-8")
    # A preset that is typed stands above the run, for the settings that it has.
    steps = text.module("model").PRESETS["tiny"]["train.steps"]
    text("train", *SMALL, *where)
    assert saved(run_dir)["train"]["steps"] == steps
    assert saved(run_dir)["optim"]["learning_rate"] == 0.002
    assert [record["step"] for record in records(run_dir)][-1] == steps


@pytest.mark.parametrize("task", ["text", "image"])
def test_each_default_stands_in_one_place(task: str, request: pytest.FixtureRequest) -> None:
    """In a dataclass: the command line starts from `Config()`, and the preset "default" from it."""
    project = request.getfixturevalue(task)
    config = project.module("config")
    assert "default" not in project.module("model").PRESETS
    assert config.preset("") == config.preset("default") == config.Config()


def test_a_preset_named_default_of_a_model_of_ones_own_applies_to_every_run(
    text: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, presets = text.module("config"), text.module("model").PRESETS
    monkeypatch.setitem(presets, "default", {"optim.name": "adamw", "optim.learning_rate": 1e-4})
    assert config.preset("").optim.name == config.preset("tiny").optim.name == "adamw"
    saved = {"optim.learning_rate": 1e-5}
    assert config.preset("", saved=saved).optim.learning_rate == 1e-5


@pytest.mark.parametrize("damage", ["{", '{"train": {"steps": "many"}}', '{"train": 3}'])
def test_settings_that_cannot_be_read_end_the_start(
    text: Project, tmp_path: Path, damage: str
) -> None:
    """In a line that says what to do. A run without a checkpoint has none to continue with."""
    words = (*SMALL, "--run-dir", str(tmp_path / "run"), "--train.steps")
    file = tmp_path / "run/config.json"
    file.parent.mkdir()
    file.write_text(damage)
    text("train", *words, "2")
    file.write_text(damage)
    line = text.refuses("train", *words, "3")
    assert line.endswith(f"(in {file}: correct it, or remove the file)") and "\n" not in line
    file.unlink()
    text("train", *words, "3")


def test_an_address_in_a_run_is_not_taken(store: Project, tmp_path: Path) -> None:
    """Where it would upload to, and by whose code, is for the user to type."""
    words = (*SMALL, "--run-dir", str(tmp_path / "run"), "--train.steps")
    store("train", *words, "2")
    content = saved(tmp_path / "run")
    changed = content | {"checkpoint": content["checkpoint"] | {"url": "reference://{}"}}
    (tmp_path / "run/config.json").write_text(json.dumps(changed))
    refused = "names reference://{}, whose protocol may be unsafe"
    assert refused in store.refuses("train", *words, "3")


OWN = {
    **{"name": "n", "run_dir": "d", "fresh": True, "reset_optimizer": True, "device": "cuda"},
    **{"init_from": "x", "init_strict": True, "workflow": {"steps": 3}},
    "train": {"loader_workers": 2},
    "checkpoint": {"url": "s3://x/y", "local_first": True},
    "tracker": {"uri": "http://x"},
}


def hidden(tree: dict[str, Any]) -> dict[str, Any]:
    """The same settings under names that end with a dot."""
    return {n: hidden(v) if isinstance(v, dict) else {"": v} for n, v in tree.items()}


def test_what_is_of_one_start_is_not_taken(text: Project, tmp_path: Path) -> None:
    """Its device, its workers, its addresses, and what names a run or is done once."""
    (tmp_path / "checkpoints/step_00000001").mkdir(parents=True)
    content = {**OWN, "track": False, "train": {"seed": 5, **OWN["train"]}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    seen: list[dict[str, Any]] = []
    config = text.config(run_dir=tmp_path)
    text.module("run.directory").with_saved(config, lambda saved: seen.append(saved) or config)
    assert seen == [{"track": False, "train.seed": 5}]


def test_what_is_of_one_start_has_no_other_name(text: Project, tmp_path: Path) -> None:
    """Crafted names are refused, in a run's settings and in a file of settings."""
    run, file = tmp_path / "run", tmp_path / "config.json"
    words = ("train", *SMALL, "--run-dir", str(run), "--train.steps")
    text("train", *SMALL, "--run-dir", str(run), "--train.steps", "2")
    plain = saved(run)
    dotted = {f"{name}.": value for name, value in OWN.items()}
    pairs = [{name: value} for one in (hidden(OWN), dotted) for name, value in one.items()]
    for steps, content in enumerate([*pairs, {"train": 3, "train.seed": 5}], start=3):
        (run / "config.json").write_text(json.dumps({**plain, **content}))
        try:
            text(*words, str(steps))
        except text.module("errors").UserError as error:
            assert "\n" not in str(error)
        else:
            now = saved(run)
            assert now["run_dir"] == str(run) and now["device"] == "cpu"
            assert not now["fresh"] and not now["init_from"]
        assert not [*tmp_path.glob("*.old-*")]
        file.write_text(json.dumps(content))
        with contextlib.suppress(text.module("errors").UserError):
            loaded = text.module("config").load(file)
            assert (loaded.run_dir, loaded.fresh, loaded.init_from) == (None, False, None)


@pytest.mark.parametrize("local", [False, True], ids=["far", "local_first"])
def test_a_store_has_the_settings_of_its_run(store: Project, tmp_path: Path, local: bool) -> None:
    """For a machine that has no run directory of it; also when the newest manifest is damaged."""
    url = ("--checkpoint.url", f"file://{tmp_path}/store", "--device", "cpu")
    first, other, third = (("--run-dir", str(tmp_path / name)) for name in ("one", "two", "three"))
    words = (*SMALL, "--optim.clip", "0.5", "--checkpoint.every", "1", "--train.steps", "3")
    where = (*url, *first, *(["--checkpoint.local-first"] if local else []))
    store("train", *words, *where, "--train.steps", "2")
    store("train", *words, *where)
    assert "resumed at step 2" in (tmp_path / "one/logs/train.log").read_text("utf-8")
    data = ("--data.path", str(store.folder / "text.txt"))  # which a store does not choose
    refused = store.refuses("train", *url, *other, *data, "--name", "another")
    assert "belongs to another run" in refused
    store("train", *url, *other, *data, "--train.steps", "4", "--checkpoint.keep", "2")
    config = saved(tmp_path / "two")
    assert config["optim"]["clip"] == 0.5 and config["model"]["width"] == 32
    assert (config["train"]["steps"], config["checkpoint"]["keep"]) == (4, 2)
    assert not config["checkpoint"]["local_first"], "not typed"
    newest = sorted((tmp_path / "store").glob("step_*"))[-1] / "manifest.json"
    newest.write_bytes(newest.read_bytes()[:-9])
    store("train", *url, *third, *data, "--train.steps", "5")
    assert saved(tmp_path / "three")["optim"]["clip"] == 0.5
    assert "resumed at step 3" in (tmp_path / "three/logs/train.log").read_text("utf-8")


def test_settings_in_a_store_that_cannot_be_used(store: Project, tmp_path: Path) -> None:
    """One line with the way out; none at all, as in earlier releases, is no error."""
    url = f"file://{tmp_path}/store"
    words = (*SMALL, "--checkpoint.url", url, "--run-dir")
    store("train", *words, str(tmp_path / "one"), "--train.steps", "2")
    path = tmp_path / "store/step_00000002/manifest.json"
    content = json.loads(path.read_text())
    del content["digest"]
    sealed = store.module("checkpoint.manifest").sealed
    for odd in ({"train": {"steps": "many"}}, {"train": 3}):
        path.write_bytes(sealed({**content, "config": {"name": "default", **odd}}))
        line = store.refuses("train", *words, str(tmp_path / "two"), "--train.steps", "3")
        assert (
            line.endswith(f"(in {url}: give all settings with --config FILE.json)")
            and "\n" not in line
        )
    path.write_bytes(sealed({**content, "config": None}))
    store("train", *words, str(tmp_path / "other"), "--train.steps", "2")
    to = tmp_path / "whole"
    store("export", "--source", str(tmp_path / "store/step_00000002"), "--to", str(to))
    assert not (to / "config.json").exists()


def test_a_store_does_not_choose_what_is_read(store: Project, tmp_path: Path) -> None:
    """Nor who gets figures; the rest of its settings is taken."""
    config = store.config(run_dir=tmp_path / "two", checkpoint__url=f"file://{tmp_path}/store")
    url = ("--checkpoint.url", config.checkpoint.url)
    store("train", *SMALL, *url, "--run-dir", str(tmp_path / "one"), "--train.steps", "1")
    path = tmp_path / "store/step_00000001/manifest.json"
    content = json.loads(path.read_text())
    del content["digest"]
    content["config"] |= {"tracker": {"mode": "online"}, "track": False}
    path.write_bytes(store.module("checkpoint.manifest").sealed(content))
    seen: list[dict[str, Any]] = []
    store.module("run.directory").with_saved(config, lambda saved: seen.append(saved) or config)
    assert seen[0]["track"] is False and seen[0]["data.context"] == 32
    assert not {name for name in seen[0] if name.startswith(("data.path", "tracker", "device"))}


def test_a_store_that_cannot_be_used_says_what_to_look_at(store: Project, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    url = ("--checkpoint.url", f"file://{tmp_path}/file/x", "--run-dir", str(tmp_path / "run"))
    assert "cannot be used" in (line := store.refuses("train", *SMALL, *url))
    assert "Check the URL" in line and "--config" not in line


def test_a_run_that_is_uploaded_no_more_is_told(
    store: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = (*SMALL, "--run-dir", str(tmp_path / "run"), "--train.steps")
    url = ("--checkpoint.url", f"file://{tmp_path}/store", "--checkpoint.local-first")
    store("train", *where, "2", *url)
    assert "uploaded to" not in caplog.text
    store("train", *where, "3")
    assert f"this run is no longer uploaded to file://{tmp_path}/store" in caplog.text


@pytest.mark.parametrize("name", ["train.steps", "optim.learning_rate", "optim.clip"])
@pytest.mark.parametrize("value", [1 << 63, -(1 << 63), 10**400], ids=["large", "small", "huge"])
def test_a_number_that_no_step_could_hold_is_refused(text: Project, name: str, value: int) -> None:
    config, error = text.config(), text.module("errors").UserError
    override = text.module("config").override
    with pytest.raises(error, match=f"^{name} is .*: it must be less than 2\\^63"):
        override(config, {name: value})
    assert override(config, {"train.seed": abs(value)}).train.seed == abs(value)
    assert override(config, {"optim.clip": float("inf")}).optim.clip == float("inf")


@pytest.mark.parametrize("hint", [Optional[int], int | None, Optional[Literal[3]]])  # noqa: UP045
def test_a_setting_of_your_own_may_be_optional(text: Project, hint: Any) -> None:
    """In either way to write it."""
    checked, error = text.module("config")._checked, text.module("errors").UserError
    assert checked("own", 3, hint) == 3
    assert checked("own", None, hint) is None
    with pytest.raises(error, match="own is 'three': expected"):
        checked("own", "three", hint)


def test_an_upload_that_cannot_begin_is_told(
    store: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage, group = store.module("checkpoint.storage"), store.module("distributed").Group()
    config = storage.StorageConfig(url=f"file://{tmp_path}/store", local_first=True)
    publisher = storage.open_storage(tmp_path / "run", config, group, None)
    with pytest.raises(store.module("checkpoint").CheckpointError, match="is missing"):
        publisher._upload(tmp_path / "run/checkpoints/step_00000001")
    assert "step_00000001 was not uploaded: manifest.json is missing" in caplog.text


def test_a_fresh_run_and_a_new_one_take_nothing(text: Project, tmp_path: Path) -> None:
    """Settings of earlier releases and other renders are named, and left out."""
    where = ("--run-dir", str(tmp_path / "run"))
    text("train", *SMALL, *where, "--train.steps", "2", "--optim.clip", "0.5")
    content = saved(tmp_path / "run")
    content["checkpoint"] |= {"every": "auto", "auto_share": 0.1}
    content |= {"odd": {"setting": 1}}
    (tmp_path / "run/config.json").write_text(json.dumps(content))
    text("train", *SMALL, *where, "--train.steps", "3")
    assert saved(tmp_path / "run")["optim"]["clip"] == 0.5
    text("train", *SMALL, *where, "--train.steps", "2", "--fresh")
    assert saved(tmp_path / "run")["optim"]["clip"] != 0.5


def test_a_value_of_an_earlier_release_is_refused_in_a_file_of_settings(
    text: Project, tmp_path: Path
) -> None:
    """Only runs of that release may have it: a person wrote this one."""
    (tmp_path / "settings.toml").write_text('checkpoint.every = "auto"')
    said = text.refuses("train", *SMALL, "--config", str(tmp_path / "settings.toml"))
    assert "checkpoint.every is 'auto', which only earlier releases accept" in said


def test_epochs_are_steps(text: Project, tmp_path: Path) -> None:
    """As many as reach the end of the last epoch; more of them continue the run."""
    where = (*SMALL, "--run-dir", str(tmp_path / "run"))
    text("train", *where, "--train.epochs", "0.5")
    samples, batch = 109, saved(tmp_path / "run")["train"]["global_batch_size"]
    steps = -(-samples // (2 * batch))
    assert (
        saved(tmp_path / "run")["train"] | {"steps": steps, "epochs": 0}
        == (saved(tmp_path / "run")["train"])
    )
    text("train", *where, "--train.epochs", "1")
    status = json.loads((tmp_path / "run/status.json").read_text("utf-8"))
    assert (status["status"], status["step"]) == ("finished", -(-samples // batch))
    log = (tmp_path / "run/logs/train.log").read_text("utf-8")
    assert f"resumed at step {steps}" in log and f"{status['step']} steps (1.03 epochs)" in log
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(text.module("errors").UserError, match="epochs must be at least 0"):
            text.config(train__epochs=wrong)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_one_batch_is_learned_by_heart(image: Project, tmp_path: Path, workers: str) -> None:
    """Its samples alone, and not augmented; the run without it is another one."""
    run_dir = tmp_path / "run"
    where = ("--preset", "tiny", "--device", "cpu", "--run-dir", str(run_dir), "--train.overfit")
    options = ("--train.steps", "60", "--train.loader-workers", workers, "--train.log-every", "20")
    config = image.config(data__path=None, train__overfit=1)
    state = image.module("train").setup(config)
    batches = [[part["images"].flatten(1) for part in state.loader.next()] for _ in range(3)]
    first, *others = ({tuple(row) for part in it for row in part.tolist()} for it in batches)
    assert all(other == first for other in others)
    assert state.loader.size == sum(map(len, batches[0]))
    image("train", *where, "1", *options)
    assert records(run_dir)[-1]["accuracy"] == 1
    line = image.refuses("train", *where, "0", *options)
    batch = config.train.global_batch_size
    assert f"training_samples: {batch} saved" in line and "--name NEW" in line


@pytest.mark.parametrize("setting", ["epochs", "overfit"])
def test_a_stream_has_no_number_of_samples(
    stream: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    class Endless:
        """The first sample, for ever."""

        def __init__(self, data: Any) -> None:
            self.data = data

        def __iter__(self) -> Any:
            while True:
                yield {"tokens": self.data.__getitems__([0])["tokens"][0]}

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    config = stream.config(run_dir=tmp_path / "run")
    training_data, _, _ = stream.module("data").build_datasets(config)
    stream.train_on(monkeypatch, Endless(training_data))
    config = stream.module("config").override(config, {f"train.{setting}": 1})
    with pytest.raises(stream.module("errors").UserError, match="need a dataset with a length"):
        stream.module("train").run(config)


class Judge:
    """Adds a figure to each validation."""

    def __init__(self, *values: float) -> None:
        self.values = iter(values)

    def after_validation(self, state: Any, figures: dict[str, float]) -> None:
        """What is best, and when, is known."""
        figures["skill"] = next(self.values)


@pytest.mark.parametrize(("rule", "kept"), [("max", 2), ("min", 4)])
def test_the_best_checkpoint_by_any_figure(
    image: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str], rule: str, kept: int
) -> None:
    """It stays beside the newest, over a resume; a NaN is not the best; a new rule counts anew."""
    settings = {"checkpoint__best": "validation_skill", "checkpoint__best_is": rule}
    settings |= {"train__validate_every": 2, "checkpoint__every": 2, "checkpoint__keep": 1}
    settings |= {"run_dir": tmp_path / "run", "data__path": None}
    train, names = (
        image.module("train"),
        lambda: sorted(int(path.name[5:]) for path in (tmp_path / "run/checkpoints").iterdir()),
    )
    train.run(image.config(**settings, train__steps=4), [Judge(0.9, 0.1)])
    assert names() == sorted({kept, 4})
    train.run(image.config(**settings, train__steps=8), [Judge(float("nan"), 0.5)])
    assert names() == [kept, 8]
    image("verify", "--run-dir", str(tmp_path / "run"))
    first, last = capsys.readouterr().out.splitlines()
    value = {2: "0.9000", 4: "0.1000"}[kept]
    assert first.endswith(f"validation skill {value}  best") and last.endswith("0.5000")
    settings |= {"checkpoint__best": "validation_loss", "checkpoint__best_is": "min"}
    train.run(image.config(**settings, train__steps=10), [Judge(0.7)])
    assert names() == [10], "the rule is another one, and what it knows is the newest alone"


def test_a_figure_that_is_not_there_is_named(
    image: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"checkpoint__best": "validation_acuracy", "train__steps": 2, "data__path": None}
    run = image.module("train").run
    assert run(image.config(**settings, run_dir=tmp_path / "run")).step == 2, "it is saved"
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned == ["--checkpoint.best validation_acuracy: the validation has no such metric"]
    with pytest.raises(image.module("errors").UserError, match="is not a validation metric"):
        image.config(checkpoint__best="accuracy")
