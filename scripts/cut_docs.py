"""Cut what the documentation shows from a real render, so that it cannot go stale unnoticed.

python scripts/cut_docs.py [PAGE …]            rewrite the blocks (of README.md and docs/)
python scripts/cut_docs.py --check [PAGE …]    name the stale ones; exit code 1 if there are any

A block stands between `<!-- cut: KIND WORDS -->` and `<!-- end -->`. It shows, of the project that
the default answers render,

tree NAME …         the files, each with the first line of its docstring; the names given come first
code FILE NAME …    functions or classes of a file
output COMMAND      a command, typed in the project's folder, and what it prints
refusal COMMAND     the same of a command that has to fail
calls NAME …        the functions of a batch, a save or a restore, followed through a real one
versions            what `make compat` found on other releases of torch and Python
sizes               the lines of Python that the smallest, default and fullest answers render
answers             the lines of Python that each other answer adds to the default render's package
settings GROUP      the settings of a group, of all answers: type, default, words, projects with it
"""

import ast
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

from cookiecutter.main import cookiecutter

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = "gh:org/cookiecutter-pytorch-training"
WIDTH = 100
RENDERS = {
    "smallest": {
        **{"task": "image_classifier", "parallelism": "single", "checkpoint": "torch_save"},
        **{"tracker": "none", "workflow": "baseline"},
    },
    "default": {},
    "fullest": {
        **{"text": "tokenizer", "samples": "stream", "parallelism": "fsdp"},
        **{"storage": "object_store", "tracker": "mlflow", "cluster": "kubernetes"},
        "workflow": "full",
    },
}
# For commands run in the project: bytecode would become part of the tree that is shown.
AS_RENDERED = {"PYTHONPATH": "src", "PYTHONDONTWRITEBYTECODE": "1"}
# Groups of settings whose options have no prefix.
OF_A_COMMAND = ("run", "fit", "compare", "export", "infer", "tokens")
BLOCK = re.compile(r"(<!-- cut: (\w+)(.*?) -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)


def tree(project: Path, first: list[str]) -> str:
    """The project's files. A package inside the package is one line, as are undescribed files."""

    def place(path: Path) -> tuple[int, bool, str]:
        known = path.name in first
        return first.index(path.name) if known else len(first), path.is_dir(), path.name

    def rows(folder: Path, indent: str) -> Iterator[tuple[str, str | None]]:
        """Names and words; of a folder whose files follow, no words."""
        for path in sorted(folder.iterdir(), key=place):
            name = path.name
            while path.is_dir() and len(inside := list(path.iterdir())) == 1:
                (path,) = inside
                name += f"/{path.name}"
            if path.is_dir():
                name, below = f"{name}/", list(rows(path, indent + "  "))
                if (path / "__init__.py").exists() and not (path / "__main__.py").exists():
                    yield indent + name, describe(path / "__init__.py")
                elif any(words for _, words in below):
                    yield from [(indent + name, None), *below]
                else:
                    yield indent + name, ""
            elif name != "__init__.py":
                yield indent + name, describe(path)

    listed = list(rows(project, "  "))
    column = max(len(name) for name, words in listed if words) + 2
    lines = [
        name if words is None else f"{name:<{column}}{fit(words, WIDTH - column)}"
        for name, words in listed
        if words != ""
    ]
    others = " ".join(name.strip() for name, words in listed if words == "")
    others = textwrap.fill(others, WIDTH, initial_indent="  ", subsequent_indent="  ")
    return block("", f"{project.name}/", *lines, others)


def describe(path: Path) -> str:
    """The first line of a Python file's docstring or of a script's opening comment."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").split("\n")[0].rstrip(".")
    comment = re.match(r"#!.*\n# (.*?)\.?\n", text)
    return comment[1] if comment else ""


def fit(words: str, room: int) -> str:
    """The words, else their first sentence, else as many of its clauses as there is room for."""
    for mark in (". ", ";", ":", ","):
        while len(words) > room and mark in words:
            words = words.rpartition(mark)[0]
    if len(words) > room:
        raise ValueError(f"for a line of the tree, begin with a shorter clause: {words}")
    return words


def code(project: Path, words: list[str]) -> str:
    """Functions or classes of a file, as they stand there."""
    file, *names = words
    text = (project / file).read_text("utf-8")
    nodes = {node.name: node for node in ast.parse(text).body if hasattr(node, "name")}
    parts = (ast.get_source_segment(text, nodes[name]) for name in names)
    return block("python", "\n\n\n".join(parts))


def refusal(project: Path, words: list[str]) -> str:
    """A command that has to fail, and what it prints."""
    return output(project, words, refused=True)


def output(project: Path, words: list[str], refused: bool = False) -> str:
    """A command and what it prints, with this repository as the template's address."""
    command = " ".join(words)
    ended = subprocess.run(
        ["bash", "-c", command.replace(TEMPLATE, str(ROOT))],
        cwd=project,
        env=os.environ
        | {
            "COOKIECUTTER_CONFIG": str(project.parent / "config"),
            "COLUMNS": str(WIDTH),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **AS_RENDERED,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if "Traceback" in ended.stdout or not ended.stdout or bool(ended.returncode) is not refused:
        raise RuntimeError(f"{command}: {ended.stdout}")
    # A message may repeat the address, which is that of this checkout here.
    printed = ended.stdout.replace(str(ROOT), TEMPLATE)
    return block("console", f"$ {command}", printed.rstrip())


def calls(project: Path, words: list[str]) -> str:
    """The functions that run in a batch, a save or a restore (`words`), by file, in order."""
    command = [
        sys.executable,
        str(ROOT / "scripts/follow_calls.py"),
        project.name.replace("-", "_"),
    ]
    environment = os.environ | AS_RENDERED | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(ended.stderr)
    followed = json.loads(ended.stdout.splitlines()[-1])
    lines = []
    for name in words:
        called, frames = followed[name]["calls"], followed[name]["frames"]
        files: dict[str, list[str]] = {}
        for file, function in called:
            files.setdefault(file, []).append(function)
        counts = f"{len(called)} functions in {len(files)} files, {frames} deep"
        lines += [f"**A {name}**: {counts}.", ""]
        for file, functions in files.items():
            row = f"- `{file}`: {', '.join(f'`{function}`' for function in functions)}"
            lines.append(textwrap.fill(row, 120, subsequent_indent="  ", break_long_words=False))
        lines.append("")
    return "\n".join(lines) + "\n"


def sizes(project: Path, words: list[str]) -> str:
    """Make a table of generated projects: their answers, and their lines of Python."""
    rows = ["| project | lines of the package | lines of its tests |", "|---|---|---|"]
    for name, answers in RENDERS.items():
        rendered = render(project, answers)
        package, tests = (lines_of_python(rendered / part) for part in ("src", "tests"))
        told = ", ".join(answers.values()) or "the default answers"
        rows.append(f"| {name} ({told}) | {package:,} | {tests:,} |")
    return "\n".join(rows) + "\n"


def answers(project: Path, words: list[str]) -> str:
    """A table of the answers that are not the default: each rendered alone, and compared."""
    rows = ["| question | answer | lines compared with the default |", "|---|---|---|"]
    for label, rendered in other_renders(project).items():
        question, answer = label.split("=")
        more = lines_of_python(rendered / "src") - lines_of_python(project / "src")
        rows.append(f"| `{question}` | {answer} | {more:+,} |")
    return "\n".join(rows) + "\n"


@functools.cache
def other_renders(project: Path) -> dict[str, Path]:
    """A render for each answer that is not the default, by "question=answer"."""
    rendered = {}
    questions = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))
    for question, choices in questions.items():
        # The licence changes no Python.
        if not isinstance(choices, list) or question == "license":
            continue
        for answer in choices[1:]:
            rendered[f"{question}={answer}"] = render(project, {question: answer})
    return rendered


@functools.cache
def all_settings(project: Path) -> dict[str, dict[str, dict[str, str]]]:
    """The settings of the default render ("") and of the others, by group and name."""
    renders = {"": project, **other_renders(project)}
    program = str(ROOT / "scripts/list_settings.py")
    ended = subprocess.run(
        [sys.executable, program, *map(str, renders.values())],
        env=os.environ | AS_RENDERED,
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        raise RuntimeError(ended.stderr)
    found: dict[str, dict[str, dict[str, str]]] = {}
    for label, rows in zip(renders, json.loads(ended.stdout), strict=True):
        found[label] = {f"{row['group']} {row['name']}": row for row in rows}
    return found


def settings(project: Path, words: list[str]) -> str:
    """A table of one group of settings; ValueError if one of them has no words."""
    (group,) = words
    found = all_settings(project)
    keys: list[str] = []
    for rows in found.values():
        keys += [key for key in rows if rows[key]["group"] == group and key not in keys]
    lines = ["| setting | type | default | meaning | in projects |", "|---|---|---|---|---|"]
    for key in keys:
        having = [label for label in found if key in found[label]]
        row = found[having[0]][key]
        if not row["words"]:
            raise ValueError(f"the setting {key} has no words: write some below it")
        prefix = "" if group in OF_A_COMMAND else f"{group}."
        meaning = sentence(row["words"])
        for label in having[1:]:
            if label.startswith("task=") and found[label][key]["words"] != row["words"]:
                meaning += f" With `{label}`: {sentence(found[label][key]['words'])}"
        values = [shown_default(row)]
        for label in having[1:]:
            if shown_default(found[label][key]) != values[0]:
                values.append(f"{shown_default(found[label][key])} (`{label}`)")
        # A positional argument has a name in capitals.
        option = row["name"] if row["name"].isupper() else f"--{prefix}{row['name']}"
        cells = (f"`{option}`", row["type"], ", ".join(values), meaning)
        lines.append(f"| {' | '.join(cells)} | {projects_with(having, list(found))} |")
    return "\n".join(lines) + "\n"


def sentence(words: str) -> str:
    """The words of a setting, as a cell of the table; options in it are code."""
    # An option with its value, such as "--weights ema", is one piece of code.
    text = re.sub(r"(?<![`\w-])(--[\w.-]*\w(?: (?:ema|no)\b)?)", r"`\1`", words)
    return text.rstrip(".").replace("|", "\\|") + "."


def shown_default(row: dict[str, str]) -> str:
    """The default of a setting, as a cell of the table."""
    if row["type"] == "flag" and row["default"]:
        return "on" if row["default"] == "True" else "off"
    if not row["default"]:
        return "none"
    # An unescaped | would end the cell.
    default = row["default"].replace("|", "\\|")
    return f"`{default}`"


def projects_with(having: list[str], labels: list[str]) -> str:
    """The answers with which a project has a setting."""
    if having == labels:
        return "all"
    if "" in having:
        return "not with " + " or ".join(f"`{label}`" for label in labels if label not in having)
    return ", ".join(f"`{label}`" for label in having)


def render(project: Path, answers: dict[str, str]) -> Path:
    """A render with these answers, beside the project's own folder."""
    folder, config = tempfile.mkdtemp(dir=project.parent), str(project.parent / "config")
    options = {"no_input": True, "accept_hooks": False, "config_file": config}
    return Path(cookiecutter(str(ROOT), output_dir=folder, extra_context=answers, **options))


def lines_of_python(folder: Path) -> int:
    """Comments and blank lines included."""
    return sum(path.read_text("utf-8").count("\n") for path in folder.rglob("*.py"))


def versions(project: Path, words: list[str]) -> str:
    """A table of the renders' own tests: a row per torch, a column per Python."""

    def by_number(version: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", version)]

    results = json.loads((ROOT / "tests/stress/results/compat.json").read_text("utf-8"))
    columns, lines = (sorted({key.split()[i] for key in results}, key=by_number) for i in (0, 1))
    rows = [f"| torch | {' | '.join(f'Python {python}' for python in columns)} |"]
    rows.append("|---" * (len(columns) + 1) + "|")
    for torch in lines:
        cells = [
            results.get(f"{python} {torch}", {}).get("summary", "not tried") for python in columns
        ]
        rows.append(f"| {torch} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def block(language: str, *lines: str) -> str:
    """A block of Markdown."""
    return "\n".join([f"```{language}", *lines, "```\n"])


KINDS = {"tree": tree, "code": code, "output": output, "refusal": refusal}
KINDS |= {"calls": calls, "sizes": sizes, "answers": answers, "versions": versions}
KINDS |= {"settings": settings}


def main(arguments: list[str]) -> int:
    """Rewrite or check the pages."""
    check = "--check" in arguments
    given = [Path(word) for word in arguments if word != "--check"]
    stale = 0
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config")  # not the user's own, which may hold other defaults
        places = ("cookiecutters_dir", "replay_dir")
        config.write_text(json.dumps({place: str(config.with_name(place)) for place in places}))
        options = {"no_input": True, "accept_hooks": False, "config_file": str(config)}
        project = Path(cookiecutter(str(ROOT), output_dir=folder, **options))
        for page in given or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
            text = page.read_text("utf-8")
            if len(BLOCK.findall(text)) != text.count("<!-- cut:"):
                raise ValueError(f"{page}: a block has no end")
            parts, end = [], 0
            for found in BLOCK.finditer(text):
                marker, kind, words, old = found.groups()
                new = KINDS[kind](project, words.split())
                if new != old:
                    stale += 1
                    line = text.count("\n", 0, found.start()) + 1
                    print(f"{page}:{line}: {'stale' if check else 'rewritten'}: {kind}{words}")
                parts += [text[end : found.start()], marker, new]
                end = found.end()
            if not check:
                page.write_text("".join([*parts, text[end:]]), "utf-8")
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
