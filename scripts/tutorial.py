"""Type all that docs/tutorial.md shows, in an empty folder, and put what it printed into the page.

python -m scripts.tutorial             7 to 15 minutes on two cores with nothing beside
python -m scripts.tutorial --check     the same, but the page stays as it is
python -m scripts.tutorial --picture   also docs/report-light.png and -dark.png, by chromium

The template is the last commit of this checkout, under its public address. A block of

    ```console    is typed: each line that begins with "$ " is a command, the others are its output;
    ```diff       is applied by git;
    any other     is shown only, as it needs a GPU, a cluster or a network.

A comment right before a console block says what is kept of each command's output:
`<!-- last 5 -->`, `<!-- matching validation|finished -->`. A command that begins with `timeout` is
killed, any other has to succeed.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/tutorial.md"
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


def photograph(report: Path) -> None:
    """The top of a report, in light and in dark colours."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if not browser:
        raise SystemExit("error: --picture needs chromium")
    for kind, dark in (("light", []), ("dark", ["--blink-settings=preferredColorScheme=0"])):
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *dark]
        words += ["--force-device-scale-factor=1.5", "--window-size=1000,708"]
        target = ROOT / f"docs/report-{kind}.png"
        command = [browser, *words, f"--screenshot={target}", report.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def main(arguments: list[str]) -> int:
    """Go through the page from top to bottom."""
    page = PAGE.read_text("utf-8")
    with tempfile.TemporaryDirectory() as place:
        shell = Shell(Path(place))

        def run(found: re.Match[str]) -> str:
            how, what, kind, block = found.groups()
            if kind == "diff":
                shell.apply(block)
                return found[0]
            start, end = found.start(4) - found.start(), found.end(4) - found.start()
            return found[0][:start] + typed(shell, how, what or "", block) + found[0][end:]

        new = BLOCK.sub(run, page)
        if "--check" not in arguments:
            PAGE.write_text(new, "utf-8")
        if "--picture" in arguments:
            photograph(next(Path(place).glob("*/runs/gated/report.html")))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
