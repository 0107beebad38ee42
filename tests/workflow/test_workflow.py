"""The workflow: gates that are read back and believed only when whole, stages in order, the report.

The stages themselves are tested in test_*_stage.py; here they are stand-ins that write what they
are told to.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from tests.conftest import Project, project_fixture

STAGES = ("baseline", "compile", "profile", "scale", "checkpoint")


project = project_fixture("gated")


def write_stage(project: Project, run_dir: Path, name: str, passed: bool | None = True) -> Path:
    """What a stage with one check leaves behind."""
    stages = project.module("workflow.stage")
    stage = stages.Stage(name, project.config(run_dir=run_dir))
    stage.figures |= FIGURES[name]
    stage.check("c", passed, measured="1 < 2", wanted="<b>", advice="try --that")
    project.module("workflow.chain").advise(stage, "more & better: `python -m <it>`")
    assert stage.close() == (passed is False)
    return stages.stage_file(run_dir, name)


def spread(median: float) -> dict[str, float]:
    return {"median": median, "p10": 0.9 * median, "p90": 1.2 * median, "n": 40}


RECORD = {kind: {"samples_per_second": 320.0} for kind in ("strong", "weak")}
RECORD["memory"] = {"measured": 1e6}
FIGURES: dict[str, dict[str, Any]] = {
    "baseline": {
        "losses": [3.0, 2.5, 2.0],
        "step_seconds": spread(0.06),
        "samples_per_second": 133.0,
        "tokens_per_second": 4000.0,
        "mfu": 0.4,
        "peak_memory_bytes": 4e8,
    },
    "compile": {
        "modes": {
            "full": {
                "step_seconds": spread(0.05),
                "eager_step_seconds": spread(0.06),
                "compile_seconds": {"cold": 19.0, "warm": 3.0},
                "speedup": {"value": 1.2, "low": 1.1, "high": 1.3},
            }
        },
        "best": "full",
    },
    "profile": {
        "shares": {"data": 0.1, "host": 0.2, "kernels": 0.7, "communication": 0, "copies": 0},
        "diagnosis": "kernel-bound",
        "operators": 2 * [{"name": "aten::mm", "self_seconds": 0.1, "share": 0.5, "calls": 9}],
    },
    "scale": {"ranks": {"1": RECORD, "2": RECORD}},
    "checkpoint": {
        "blocked_seconds": spread(0.01),
        "save_seconds": spread(0.1),
        "restart_seconds": {
            "imported": 3.0,
            "restored": 0.3,
            "first_step": 0.1,
            "total": 3.4,
        },
        "restore_seconds": 0.05,
        "interval_seconds": 41.0,
        "hours_between_failures": 24.0,
    },
}


def test_a_gate_is_as_good_as_its_worst_check(project: Project, tmp_path: Path, capsys) -> None:
    stages = project.module("workflow.stage")
    for outcomes, worst in (
        ([True, True], "pass"),
        ([True, None], "not_measured"),
        ([None, False, True], "fail"),
        ([], "not_measured"),
    ):
        stage = stages.Stage("baseline", project.config(run_dir=tmp_path))
        for outcome in outcomes:
            stage.check("it", outcome, measured="so", wanted="such", advice="do this")
        assert stage.close() == (worst == "fail")
        content = project.module("workflow.chain").read_stage(tmp_path, "baseline")
        assert content["status"] == worst
        assert [bool(check["advice"]) for check in content["checks"]] == [
            outcome is not True for outcome in outcomes
        ]
    assert "FAIL it: so (wanted: such)\n     do this" in capsys.readouterr().out


def test_damaged_results_are_refused_with_the_command_to_run(
    project: Project, tmp_path: Path
) -> None:
    chain, error = project.module("workflow.chain"), project.module("errors").UserError
    path = write_stage(project, tmp_path, "baseline")
    whole = json.loads(path.read_text())
    assert chain.read_stage(tmp_path, "baseline") == whole
    assert chain.read_stage(tmp_path, "compile") is None
    broken = [[], None, {**whole, "stage": "scale"}, {**whole, "status": "good"}]
    broken.append({**whole, "status": {"a": 1}})
    broken += [{k: v for k, v in whole.items() if k != key} for key in ("stage", "status")]
    texts = [json.dumps(content) for content in broken]
    for text in [*texts, "", path.read_text()[:-20], "\x00" * 30]:
        path.write_text(text)
        with pytest.raises(error, match=r"is damaged \(.*\): measure again with `python -m gated"):
            chain.read_stage(tmp_path, "baseline")
        project("report", "--run-dir", str(tmp_path))
        page = (tmp_path / "report.html").read_text("utf-8")
        assert page.count('class="word damaged"') == 1 and "is damaged (" in page


def test_a_place_that_cannot_be_written_is_told_before(project: Project, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    where = ("--run-dir", str(tmp_path / "file/run"))
    with pytest.raises(NotADirectoryError, match="file/run"):  # which is shown as one line
        project("baseline", *project.settings, *where)


def test_another_setting_makes_a_measurement_stale(project: Project, tmp_path: Path) -> None:
    path = write_stage(project, tmp_path, "baseline")
    content = project.module("workflow.chain").read_stage(tmp_path, "baseline")
    same = {"run_dir": tmp_path, "name": "x", "workflow__keep_going": True}

    def is_current(content: dict[str, Any], **changes: Any) -> bool:
        path.write_text(json.dumps(content))
        config = project.config(**same, **changes)
        return bool(project.module("workflow.chain").reusable_result(config, "baseline"))

    assert is_current(content)
    assert not is_current(content, workflow__force=True)
    for change in ({"train__seed": 1}, {"model__width": 64}, {"workflow__ranks": 3}):
        assert not is_current(content, **change)
    assert not is_current({**content, "code": "another"})
    assert not is_current({**content, "machine": {**content["machine"], "device": "NVIDIA H100"}})
    assert not is_current({**content, "machine": {**content["machine"], "cores": 99}})
    assert not is_current({**content, "versions": {"torch": "2.9.0"}})
    forced = content["settings"]["workflow"] | {"force": True}
    assert is_current({**content, "settings": {**content["settings"], "workflow": forced}})


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60))
def test_a_median_lies_in_its_interval(project: Project, values: list[float]) -> None:
    found = project.module("workflow.interleaved").median_interval(values)
    assert min(values) <= found.low <= found.value <= found.high <= max(values)


def test_the_interval_of_a_median_covers_it(project: Project) -> None:
    """Of many samples of a known distribution, 95 % have the true median in their interval."""
    import numpy as np

    median_interval = project.module("workflow.interleaved").median_interval
    generator = np.random.default_rng(0)
    for size in (8, 9, 15, 40):
        found = [median_interval(generator.exponential(size=size)) for _ in range(600)]
        covered = np.mean([f.low <= np.log(2) <= f.high for f in found])
        assert covered > 0.94, (size, covered)
        assert size == 8 or covered < 0.99


class Conducted:
    """Runs `workflow` with stand-ins for its stages, in this process instead of one each."""

    def __init__(self, project: Project, run_dir: Path, patch: pytest.MonkeyPatch) -> None:
        self.project, self.run_dir = project, run_dir
        self.ran: list[str] = []
        self.outcomes: dict[str, Any] = {}
        chain = project.module("workflow.chain")
        patch.setattr(chain, "subprocess", SimpleNamespace(Popen=self.start))
        patch.setattr(chain.signal, "signal", lambda *_: None)

    def start(self, command: list[str], **_: Any) -> Any:
        """Stands in for the start of a process."""
        python, *options, package, name = command[:5]
        assert (python, options, package) == (sys.executable, ["-u", "-m"], "gated")
        self.ran.append(name)
        outcome = self.outcomes.get(name, True)
        if outcome == "broken":
            code = 1  # as an exception that nobody caught
        else:
            write_stage(self.project, self.run_dir, name, outcome)
            code = int(outcome is False)
        return SimpleNamespace(wait=lambda: code)

    def __call__(self, *words: str) -> tuple[int, list[str]]:
        """The exit code, and the stages that were run."""
        self.ran.clear()
        main = self.project.module("__main__")
        settings = (*Project.settings, "--run-dir", str(self.run_dir), *words)
        settings = [str(self.project.folder / w) if w == "text.txt" else w for w in settings]
        return main.dispatch(["workflow", *settings]), list(self.ran)


def test_stages_run_in_order_and_resume_where_they_stopped(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    workflow = Conducted(project, tmp_path, monkeypatch)
    workflow.outcomes = {"profile": False}
    assert workflow() == (1, list(STAGES[:3]))
    assert "stopped at profile" in capsys.readouterr().out
    workflow.outcomes = {"scale": None}
    assert workflow() == (0, list(STAGES[2:]))  # not measured here is no failure
    assert workflow() == (0, [])
    assert workflow("--train.seed", "5")[1] == list(STAGES)
    assert workflow("--workflow.force") == (0, list(STAGES))
    recommended = tmp_path / "workflow/recommended.json"
    assert recommended.exists()
    recommended.with_suffix(".toml").write_text("# of before")
    workflow.outcomes = {"baseline": False}
    assert workflow("--workflow.force") == (1, ["baseline"])
    assert not [*recommended.parent.glob("recommended.*")], "it is of settings that fail now"
    workflow.outcomes = {"baseline": False, "checkpoint": False}
    assert workflow("--workflow.force", "--workflow.keep-going") == (1, list(STAGES))
    assert workflow("--workflow.keep-going")[1] == ["baseline", "checkpoint"]
    assert "workflow" in (tmp_path / "report.html").read_text()


def test_a_stage_that_breaks_down_is_no_pass(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    workflow = Conducted(project, tmp_path, monkeypatch)
    assert workflow()[0] == 0
    workflow.outcomes = {"compile": "broken"}  # with the file of the time before still there
    assert workflow("--workflow.force") == (1, ["baseline", "compile"])
    said = capsys.readouterr().out
    assert (
        "compile crashed (exit code 1); to run only this stage: python -m gated compile --preset"
        in said
    )
    assert f"--run-dir {tmp_path} --workflow.force" in said
    (tmp_path / "workflow/baseline.json").write_text("{}")
    workflow.outcomes = {}
    assert workflow() == (0, ["baseline", "compile"])
    assert "damaged" in capsys.readouterr().out

    def fail(run_dir: Path) -> None:
        raise project.module("errors").RankError(f"{run_dir} cannot be loaded: KeyError: 'x'")

    monkeypatch.setattr(project.module("workflow.report"), "publish_report", fail)
    assert workflow()[0] == 0, "that of the stages"
    assert "no report: " in capsys.readouterr().out


def test_the_settings_of_stages_are_none_of_a_run(project: Project, tmp_path: Path) -> None:
    project("train", *Project.settings, "--train.steps", "2", "--run-dir", str(tmp_path))
    content = json.loads((tmp_path / "config.json").read_text())
    assert "workflow" not in content
    with pytest.raises(SystemExit):
        project("train", *Project.settings, "--workflow.ranks", "2")
    content["workflow"] = {"ranks": 2, "go_on": False}  # as older versions wrote it
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = project.module("config").load(tmp_path / "config.json")
    assert config.train.steps == 2 and not hasattr(config, "workflow")


def test_the_commands_can_be_listed_without_torch(project: Project) -> None:
    listing = (
        f"import sys, {project.name}.workflow as w; print(*w.COMMANDS, 'torch' in sys.modules)"
    )
    outcome = project.python("-c", listing)
    *names, torch_is_imported = outcome.stdout.split()
    assert (
        names[-6:] == ["profile", "scale", "checkpoint", "fit", "workflow", "report"]
        and torch_is_imported == "False"
    )


def test_who_is_stopped_twice_leaves_once(project: Project) -> None:
    """As by `timeout`, which tells its child and the group: the second prints nothing."""
    stopped = f"""
import atexit, os, signal, sys
from {project.name}.errors import run_main
from {project.name}.workflow.processes import leave

def stop():
    os.kill(os.getpid(), signal.SIGTERM)

def command():
    signal.signal(signal.SIGTERM, leave)
    try:
        stop()
    finally:
        stop()
        print("put in order")
        signal.signal(signal.SIGTERM, leave)  # as a stage does that has started something

atexit.register(stop)
sys.exit(run_main(command))
"""
    outcome = project.python("-c", stopped)
    assert (outcome.returncode, outcome.stdout + outcome.stderr) == (143, "put in order\n")


def test_what_the_workflow_starts_itself_refuses_torchrun(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("baseline", "compile", "scale", "checkpoint", "workflow", "report"):
        assert "run it without torchrun" in project.refuses(name)


LOOK = """<script>addEventListener("load", () => {
  const pictures = [...document.images].map(picture => {
    const canvas = document.createElement("canvas");
    const context = canvas.getContext("2d");
    canvas.width = 240; canvas.height = 140;
    if (picture.naturalWidth) context.drawImage(picture, 0, 0, 240, 140);
    const found = new Set(new Uint32Array(context.getImageData(0, 0, 240, 140).data.buffer));
    return {name: picture.alt, width: picture.naturalWidth, colors: found.size};
  });
  const wide = document.documentElement.scrollWidth > innerWidth;
  const light = rgb => rgb.map(c => c / 255)
    .map(c => c <= 0.04 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0.05);
  const ground = element => {
    for (; element; element = element.parentElement) {
      const [r, g, b, a = 1] = getComputedStyle(element).backgroundColor.match(/[\\d.]+/g);
      if (+a) return [+r, +g, +b];
    }
    return [255, 255, 255];
  };
  const contrasts = [...document.body.querySelectorAll("*")]
    .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
    .filter(e => e.checkVisibility() && e.tagName !== "SCRIPT")
    .map(e => [light(getComputedStyle(e).color.match(/[\\d.]+/g).slice(0, 3)), light(ground(e)), e])
    .map(([a, b, e]) => [Math.max(a, b) / Math.min(a, b), e.className + ": " + e.textContent]);
  const [contrast, faintest] = contrasts.sort((a, b) => a[0] - b[0])[0] || [21, ""];
  const body = light(ground(document.body));
  const filter = document.images.length ? getComputedStyle(document.images[0]).filter : "none";
  const links = [...document.links].length;
  document.title = JSON.stringify({pictures, wide, links, contrast, faintest, body, filter});
});</script>"""


def look_at(page: Path, folder: Path, width: int, *more: str) -> tuple[dict[str, Any], list[str]]:
    """What a browser finds on a page, and what it says on its console."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("REPORT NOT LOOKED AT: no chromium here (Debian: apt-get install chromium)")
    copy = folder / f"seen-{width}.html"
    copy.write_text(page.read_text("utf-8") + LOOK, "utf-8")
    options = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--enable-logging=stderr", "--virtual-time-budget=4000", "--dump-dom"),
        *(f"--window-size={width},900", f"--user-data-dir={folder / 'browser'}", *more),
    ]
    outcome = subprocess.run(
        [browser, *options, copy.as_uri()], capture_output=True, text=True, timeout=300
    )
    title = re.search(r"<title>(\{.*?\})</title>", outcome.stdout)
    assert title, outcome.stderr
    return json.loads(title[1]), re.findall(r".*CONSOLE.*", outcome.stderr)


def test_the_report_can_be_looked_at(project: Project, tmp_path: Path, capsys) -> None:
    """In a browser, on a laptop and a phone: no error, no picture missing or empty."""
    project("train", *Project.settings, "--run-dir", str(tmp_path))
    for name in STAGES:
        write_stage(project, tmp_path, name, passed=None if name == "profile" else name != "scale")
    capsys.readouterr()
    project("report", "--run-dir", str(tmp_path))
    page = Path(capsys.readouterr().out.strip())
    text = page.read_text("utf-8")
    assert page == tmp_path / "report.html"
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", text), "it is not self-contained"
    assert "&lt;b&gt;" in text and "more &amp; better: <code>python -m &lt;it&gt;</code>" in text
    for width in (1280, 500):
        seen, console = look_at(page, tmp_path, width)
        assert not console
        assert not seen["wide"], f"it has to be scrolled sideways at {width}"
        assert seen["links"] == len(STAGES)
        assert len(seen["pictures"]) == 8
        for picture in seen["pictures"]:
            assert picture["width"] > 100 and picture["colors"] > 20, picture
    for dark in (False, True):
        seen, _ = look_at(page, tmp_path, 1280, *["--force-dark-mode"] * dark)
        assert (seen["body"] < 0.2) == dark
        assert seen["contrast"] > 3.9, seen["faintest"]
        assert ("invert" in seen["filter"]) == dark
    empty = tmp_path / "empty.html"
    empty.write_text("<img alt=x src=gone.png><script>nothing.here()</script>")
    seen, console = look_at(empty, tmp_path, 1280)
    assert seen["pictures"][0]["width"] == 0 and len(console) == 1


def test_what_is_not_finite_is_null(project: Project, tmp_path: Path) -> None:
    """As any reader of JSON wants it, and as the report can draw it."""
    stage = project.module("workflow.stage").Stage("baseline", project.config(run_dir=tmp_path))
    stage.figures |= FIGURES["baseline"] | {"losses": [2.0, float("nan"), 1.0], "far": (1e400,)}
    stage.close()
    text = (tmp_path / "workflow/baseline.json").read_text()
    figures = json.loads(text, parse_constant=lambda word: pytest.fail(word))["figures"]
    assert figures["losses"] == [2.0, None, 1.0] and figures["far"] == [None]
    project("report", "--run-dir", str(tmp_path))


def test_figures_of_an_older_version_are_shown_as_damaged(project: Project, tmp_path: Path) -> None:
    write_stage(project, tmp_path, "baseline")
    path = write_stage(project, tmp_path, "checkpoint")
    content = json.loads(path.read_text())
    del content["figures"]["restart_seconds"]["total"]
    path.write_text(json.dumps(content))
    project("report", "--run-dir", str(tmp_path))
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "KeyError(&#39;total&#39;)" in page and page.count('class="word damaged"') == 1
    assert "133" in page and f"checkpoint --run-dir {tmp_path}" in page
    path = tmp_path / "workflow/baseline.json"
    content = json.loads(path.read_text())
    content["figures"]["tokens_per_second"] = "many"
    path.write_text(json.dumps(content))
    line = f"{tmp_path} cannot be loaded: ValueError"
    with pytest.raises(project.module("errors").RankError, match=line):
        project("report", "--run-dir", str(tmp_path))


def test_whiskers_stay_inside_the_axes(project: Project) -> None:
    """However far above the median the upper end is."""
    plots = project.module("workflow.plots")

    def limits(*rows: Any) -> tuple[float, float]:
        axes = Figure().subplots()
        plots.bars(axes, rows, "samples/s", str)
        return axes.get_xlim()

    least, most = limits(plots.Bar("one", 10.0, 9.0, 11.0), plots.Bar("two", 12.0, 1.0, 300.0))
    assert least == 0 and most > 1.1 * 300
    assert limits(plots.Bar("none", 0.0)) == (0, 1)


def test_curves_show_all_that_they_have(project: Project) -> None:
    """A single point, records without a value, and a metric of one's own in bytes."""
    plots = project.module("workflow.plots")

    def line(records: list[dict[str, Any]], name: str = "loss") -> Any:
        axes = Figure().subplots()
        plots.curves(axes, records, name, {name: "training"})
        (drawn,) = axes.lines
        return drawn

    assert line([{"step": 1, "loss": 2.0}]).get_marker() == "o"
    gaps = line([{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}, {"step": 3, "loss": 1.0}])
    assert list(gaps.get_xdata()) == [1, 3] and gaps.get_marker() == "None"
    assert list(line([{"step": 1, "sent_bytes": 5.0}], "sent_bytes").get_ydata()) == [5.0]
    axes = Figure().subplots()
    plots.memory(axes, [{"step": 1, "host_bytes": 3e9}, {"step": 2, "host_bytes": 4e9}])
    assert list(axes.lines[0].get_ydata()) == [3.0, 4.0] and axes.get_ylim()[0] == 0


def test_numbers_of_any_size_are_readable(project: Project) -> None:
    plots = project.module("workflow.plots")
    for value, text in ((45678.9, "45,680"), (12.345, "12.35"), (0.00012, "0.00012"), (0, "0")):
        assert plots.four_digits(value) == text
    assert plots.three_digits(1234.5) == "1,230"
    for seconds, text in ((0.9996, "1,000 ms"), (0.25, "250 ms"), (1500 * plots.DAY, "1,500 d")):
        assert plots.in_time(seconds) == text


def test_a_report_of_what_there_is(project: Project, tmp_path: Path) -> None:
    assert "nothing to report" in project.refuses("report", "--run-dir", str(tmp_path))
    write_stage(project, tmp_path, "baseline")
    project("report", "--run-dir", str(tmp_path))
    text = (tmp_path / "report.html").read_text("utf-8")
    assert text.count("not run") == 4
    assert f"python -m gated compile --run-dir {tmp_path}" in text
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    (tmp_path / "status.json").write_text('{"status": "running", "step": 0, "at": "x"}')
    project("report", "--run-dir", str(tmp_path))
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "left out" not in page and "running or killed, last record at step 1<" in page


def test_a_report_shows_metrics_of_ones_own(project: Project, tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 2.0, "auc": 0.1 * step, "samples": 8} for step in range(1, 9)]
    lines[-1] |= {"validation_loss": 2.0, "validation_ema_loss": 2.0, "validation_f1_score": 0.5}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    project("report", "--run-dir", str(tmp_path))
    page = (tmp_path / "report.html").read_text("utf-8")
    titles = [title for title in ("Auc", "F1 score", "Ema loss", "Samples") if f">{title}<" in page]
    assert titles == ["Auc", "F1 score"]


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        ([], []),
        ([7], [7]),
        ([10, 20, 30, 40], [10, 20, 30, 40]),
        ([10, 20, 30, 40, 50, 60, 70], [10, 30, 50, 70]),
    ],
)
def test_a_report_shows_samples_over_time(
    project: Project, tmp_path: Path, steps: list[int], shown: list[int]
) -> None:
    """Of many some, the last one among them."""
    write_stage(project, tmp_path, "baseline")
    (tmp_path / "samples").mkdir()
    for step in steps:
        (tmp_path / f"samples/step_{step:08d}.txt").write_text(f"text of {step}")
    project("report", "--run-dir", str(tmp_path))
    page = (tmp_path / "report.html").read_text("utf-8")
    assert re.findall(r"text of (\d+)", page) == [str(step) for step in shown]


@pytest.mark.parametrize(
    ("name", "content", "note"),
    [
        ("status.json", b'{"status": "running", "step": 3}', None),  # as of an older version
        ("status.json", b'{"status": "run', "status.json cannot be read"),
        ("status.json", b"[1]", "status.json cannot be read"),
        ("status.json", b"\xff\xfe", "status.json cannot be read"),
        ("config.json", b"\x00" * 20, "config.json cannot be read"),
        (
            "metrics.jsonl",
            b'{"step": 1, "lo\n{"step": 2, "loss": 2.0}\n',
            "1 damaged line left out",
        ),
        (
            "metrics.jsonl",
            b'{"step": 1, "loss": 2.0}\n\xff\xfe\n7\n{}\n\n',
            "4 damaged lines left out",
        ),
        ("metrics.jsonl", b"\x00" * 50 + b"\n", "1 damaged line left out"),
        ("workflow/profile.json", b"\xff", "is damaged"),
    ],
)
def test_whatever_state_a_run_died_in_is_shown(
    project: Project, tmp_path: Path, name: str, content: bytes, note: str | None
) -> None:
    (tmp_path / "workflow").mkdir()
    (tmp_path / name).write_bytes(content)
    project("report", "--run-dir", str(tmp_path))
    page = (tmp_path / "report.html").read_text("utf-8")
    assert (note in page) if note else ("running at step 3" in page and "cannot" not in page)
    assert page.count("not run") >= 4


def test_losses_that_are_not_finite_are_told_in_the_report(
    project: Project, tmp_path: Path
) -> None:
    """A curve ends where they begin, as if the run had ended there."""
    lines = [{"step": step, "loss": 2.0 if step < 200 else None} for step in range(10, 391, 10)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    notes: list[str] = []
    project.module("workflow.report").read_metrics(tmp_path / "metrics.jsonl", notes)
    assert notes == ["the loss is not finite in 20 log lines, first at step 200"]


def test_hours_between_failures_are_finite(project: Project) -> None:
    with pytest.raises(project.module("errors").UserError, match="finite"):
        project.config(workflow__hours_between_failures=float("inf"))
