"""Type all that docs/tutorial/ shows, in an empty folder, and put the outputs into its pages.

python -m scripts.tutorial             7 to 15 minutes on two cores with nothing beside
python -m scripts.tutorial --check     the same, but the pages stay as they are
python -m scripts.tutorial --picture   also the pictures of the tutorial, by chromium
python -m scripts.tutorial --readme    only the picture of README, by chromium: three minutes

The template is the last commit of this checkout, under its public address. A block of

    ```console    is typed: each line that begins with "$ " is a command, the others are its output;
    ```diff       is applied by git;
    any other     is shown only, as it needs a GPU, a cluster or a network.

A comment right before a console block says what is kept of each command's output:
`<!-- last 5 -->`, `<!-- matching validation|finished -->`. A command that begins with `timeout` is
killed, any other has to succeed.
"""

import gzip
import html
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# In the order in which a reader types them, in one folder.
PAGES = [ROOT / f"docs/tutorial/{name}.md" for name in ("train", "measure", "ranks")]
ADDRESS = "https://github.com/org/cookiecutter-pytorch-training"
BLOCK = re.compile(r"(?:<!-- (last|matching) (.*?) -->\n)?```(console|diff)\n(.*?)```", re.DOTALL)
COLOURS = re.compile(r"\x1b\[[\d;]*m")
LONGEST = 600.0  # seconds of a command


class Shell:
    """A folder, and an environment in which commands are typed there, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = self.home = folder
        template = folder / ".template"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(template)], check=True)
        version = re.search(
            r'"_template_version": "(.*?)"', (ROOT / "cookiecutter.json").read_text()
        )
        assert version
        tag = ["git", "-C", str(template), "tag", "--force", f"v{version[1]}"]
        subprocess.run(tag, check=True, capture_output=True)
        settings = folder / ".gitconfig"
        settings.write_text(f'[url "{template}"]\n\tinsteadOf = {ADDRESS}\n')
        bins = Path(sys.executable).parent
        self.environment = os.environ | {
            "GIT_CONFIG_GLOBAL": str(settings),
            "GIT_CONFIG_SYSTEM": os.devnull,
            "PATH": f"{bins}:{os.environ['PATH']}",
            "PYTHONPATH": "src",
            "HOME": str(folder),
            "COLUMNS": "100",
            "MPLCONFIGDIR": str(folder / ".matplotlib"),
            **{f"GIT_{who}_NAME": "Ada" for who in ("AUTHOR", "COMMITTER")},
            **{f"GIT_{who}_EMAIL": "ada@example.org" for who in ("AUTHOR", "COMMITTER")},
        }

    def type(self, command: str) -> list[str]:
        """Run a command; the lines that it prints. RuntimeError if it fails."""
        place = self.home / ".place"
        done = subprocess.run(
            ["bash", "-c", f'{command}\ncode=$?; pwd > "{place}"; exit $code'],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=LONGEST,
        )
        if done.returncode and not command.startswith("timeout "):
            raise RuntimeError(f"$ {command}\n{done.stdout}\nexit code {done.returncode}")
        self.folder = Path(place.read_text().strip())
        text = COLOURS.sub("", done.stdout).replace(str(self.home), "~")
        lines = text.rstrip("\n").split("\n") if text else []
        return [line.rsplit("\r", 1)[-1].rstrip() for line in lines]

    def apply(self, patch: str) -> None:
        """Apply a patch by git."""
        command = ["git", "apply", "-"]
        subprocess.run(command, input=patch, text=True, cwd=self.folder, check=True)


def kept(lines: list[str], how: str | None, what: str) -> list[str]:
    """The part of an output that the page shows; an ellipsis stands for the rest."""
    if how == "matching":
        chosen = [line for line in lines if re.search(what, line)]
    else:
        chosen = lines[max(0, len(lines) - int(what)) :] if how else lines
    return (["..."] if chosen != lines and chosen else []) + chosen


def typed(shell: Shell, how: str | None, what: str, block: str) -> str:
    """A console block with the output that its commands have now."""
    written: list[str] = []
    for command in re.findall(r"^\$ (.*)", block, re.MULTILINE):
        print(f"$ {command}", flush=True)
        lines = kept(shell.type(command), how, what)
        print("\n".join(lines), flush=True)
        written += [f"$ {command}", *lines]
    return "\n".join(written) + "\n"


# README's picture is as wide as a code host shows it, so that its letters keep their size.
WIDTH = 800
README_PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: {back} }}
pre {{ margin: 12px 12px 0; padding: 12px 14px; border-radius: 10px; background: #161b26;
  color: #dde3ee; font: 13px/1.5 monospace; white-space: pre-wrap }}
b {{ color: #8ec7ff }}
mark {{ color: #7ee0a1; background: none }}
iframe {{ border: 0; width: 1000px; height: 600px; zoom: .8 }}
</style><pre>{terminal}</pre><iframe src="{report}"></iframe>"""


def browse(page: Path, target: Path, size: tuple[int, int], dark: bool, scale: float) -> None:
    """Write a screenshot of a page in a window of `size`."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if not browser:
        raise SystemExit("error: a picture needs chromium")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--allow-file-access-from-files", f"--force-device-scale-factor={scale}"]
    if dark:
        command.append("--blink-settings=preferredColorScheme=0")
    command += [f"--window-size={size[0]},{size[1]}", f"--screenshot={target}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def photograph_report(report: Path) -> None:
    """Write the pictures of the top of a report, in light and dark colours."""
    for kind in ("light", "dark"):
        target = ROOT / f"docs/images/report-{kind}.png"
        browse(report, target, (1000, 708), kind == "dark", 1.5)


def kill_at(shell: Shell, command: str, step: int) -> str:
    """Run a command, kill it soon after it has logged this step, and return the line."""
    print(f"$ {command}, killed after step {step}", flush=True)
    process = subprocess.Popen(
        command.split(),
        cwd=shell.folder,
        env=shell.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    with process:
        for line in process.stderr:
            if line.startswith(f"step {step}/"):
                time.sleep(random.random() / 10)
                process.kill()
                return line.rstrip()
    raise RuntimeError(f"$ {command}: ended before step {step}")


def photograph_resume(shell: Shell) -> None:
    """Write README's pictures: a run undisturbed, the same run killed and resumed, its report.

    RuntimeError if the two runs end with different bytes.
    """
    shell.type(f"cruft create {ADDRESS} --no-input")
    shell.type("cd my-training-run")
    train = "python3 -m my_training_run train --name"
    shown: list[str] = []

    def show(command: str, pattern: str) -> list[str]:
        print(f"$ {command}", flush=True)
        lines = [line for line in shell.type(command) if re.search(pattern, line)]
        print("\n".join(lines), flush=True)
        shown.extend([f"$ {command}", *lines])
        return lines

    show(f"{train} whole", "validation bits|^finished")
    # Anywhere between the first checkpoint, after a third of the run, and its last steps.
    last_step = kill_at(shell, f"{train} killed", random.randrange(110, 300, 10))
    shown += [f"$ {train} killed    # kill -9 at a random step", last_step, "Killed"]
    show(f"{train} killed", "^resuming|validation bits|^finished")
    sums = show("sha1sum runs/*/checkpoints/step_00000300/__0_0.distcp", "distcp")
    if len(sums) != 2 or len({line.split()[0] for line in sums}) != 1:
        raise RuntimeError("the two runs end with different bytes")
    show("python3 -m my_training_run report --name killed", "report.html")
    escaped = html.escape("\n".join(shown), quote=False)
    terminal = re.sub(r"^(\$ .*)", r"<b>\1</b>", escaped, flags=re.MULTILINE)
    terminal = re.sub(r"^([0-9a-f]{40})", r"<mark>\1</mark>", terminal, flags=re.MULTILINE)
    report = shell.folder / "runs/killed/report.html"
    page = report.with_name("readme.html")
    height = 12 + 24 + 20 * len(shown) + 480
    for kind, back in (("light", "#f4f6fa"), ("dark", "#10141c")):
        text = README_PAGE.format(back=back, terminal=terminal, report=report.name)
        page.write_text(text, "utf-8")
        target = ROOT / f"docs/images/resume-{kind}.png"
        browse(page, target, (WIDTH, height), kind == "dark", 2)


def draw_trace(trace: Path, target: Path) -> None:
    """One step of a trace, as Perfetto shows the thread that trains."""
    from matplotlib.figure import Figure

    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    step = [event for event in events if event["name"].startswith("ProfilerStep#")][1]
    first, last = step["ts"], step["ts"] + step["dur"]
    same = [e for e in events if e["tid"] == step["tid"] and first <= e["ts"] < last]
    figure = Figure(figsize=(12, 2.9), layout="constrained")
    axes, ends = figure.subplots(), list[float]()
    for event in sorted(same, key=lambda event: (event["ts"], -event["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        while ends and ends[-1] < end:
            ends.pop()
        at, width = (start - first) / 1e3, event["dur"] / 1e3
        colour = "#2f6fde" if event["cat"] == "cpu_op" else "#e08a1e"
        axes.barh(-len(ends), width, left=at, height=0.9, color=colour, edgecolor="white", lw=0.2)
        if event["dur"] > 0.05 * step["dur"]:
            name = event["name"][: int(110 * event["dur"] / step["dur"])]
            axes.text(at + width / 2, -len(ends), name, ha="center", va="center", fontsize=7)
        ends.append(end)
    axes.set(xlabel="ms of one step", yticks=[], xlim=(0, step["dur"] / 1e3))
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(target, dpi=110)


def main(arguments: list[str]) -> int:
    """Go through the pages from top to bottom."""
    with tempfile.TemporaryDirectory() as place:
        shell = Shell(Path(place))
        if "--readme" in arguments:
            photograph_resume(shell)
            return 0

        def run(found: re.Match[str]) -> str:
            how, what, kind, block = found.groups()
            if kind == "diff":
                shell.apply(block)
                return found[0]
            start, end = found.start(4) - found.start(), found.end(4) - found.start()
            return found[0][:start] + typed(shell, how, what or "", block) + found[0][end:]

        new = {page: BLOCK.sub(run, page.read_text("utf-8")) for page in PAGES}
        if "--check" not in arguments:
            for page, text in new.items():
                page.write_text(text, "utf-8")
        if "--picture" in arguments:
            photograph_report(next(Path(place).glob("*/runs/gated/report.html")))
            traces = sorted(Path(place).glob("*/runs/gated/traces/*.json.gz"))
            draw_trace(traces[-1], ROOT / "docs/images/trace.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
