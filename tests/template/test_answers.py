"""Answers: what is refused and how, what is accepted, and that it arrives unchanged."""

import ast
import html
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from packaging.requirements import Requirement

import local_extensions as answers
from tests.conftest import ROOT, bake, bake_cli

QUESTIONS = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))

HOSTILE = {
    "project_name": [
        "",
        "   ",
        "\u200b",
        " led by a space",
        "trailed by one ",
        "two\nlines",
        "tab\tbed",
        "nul\0",
        "\x1b[31mred",
        "c1\x9bcontrol",
        "line\u2028separator",
        "exe.\u202egnp",
        "lone \udcff surrogate",
        "a" * 81,
        "a" * 1_000_000,
        None,
        True,
        {"a": "dict"},
    ],
    "author_name": ["", "two\nlines", "a" * 101],
    "project_slug": [
        "",
        ".",
        "..",
        "../up",
        "/root",
        "a/b",
        "a\\b",
        "~",
        "$HOME",
        "$(id)",
        "a b",
        "Upper",
        "übung",
        "-n",
        "_a",
        "a-",
        "a.",
        "a ",
        "a\n",
        "nul",
        "com1",
        "a" * 41,
        "torch",
        "scikit--learn",
        "python3",
        "activate",
    ],
    "package_name": [
        "",
        "..",
        "a-b",
        "a.b",
        "a/b",
        "2fast",
        "Upper",
        "_private",
        "__init__",
        "modèle",
        "a\n",
        "class",
        "match",
        "json",
        "test",
        "torch",
        "sklearn",
        "profiling",
        "tests",
        "src",
        "test_sampling",
        "aux",
        "a" * 31,
    ],
}
# One of each kind on the command line, where a process costs half a second.
HOSTILE_COMMANDS = [
    ("project_name", ""),
    ("project_name", "two\nlines"),
    ("project_name", "lone \udcff surrogate"),
    ("project_name", "a" * 100_000),
    ("author_name", "exe.\u202egnp"),
    ("project_slug", "../up"),
    ("project_slug", "nul"),
    ("package_name", "class"),
    ("package_name", "torch"),
]

# Every quoting filter on every kind of text, and the licence, in a project that renders in no time.
NAME, AUTHOR = "{{ cookiecutter.project_name | %s }}", "{{ cookiecutter.author_name | %s }}"
MINI = {
    "a.toml": f"name = {NAME % 'toml'}\nby = {AUTHOR % 'toml'}\n",
    "a.yaml": f"name: {NAME % 'yaml'}\nby: {AUTHOR % 'yaml'}\n",
    "a.py": f"[{NAME % 'py'}, {AUTHOR % 'py'}]\n",
    "a.md": f"# {NAME % 'md'}\n\n{AUTHOR % 'md'}\n",
    "src/{{cookiecutter.package_name}}/__init__.py": "",
}


@pytest.fixture(scope="session")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the template's question side around a tiny project."""
    template = tmp_path_factory.mktemp("mini")
    for name in ("cookiecutter.json", "local_extensions.py"):
        shutil.copy(ROOT / name, template)
    for name in ("hooks", "templates/license"):
        shutil.copytree(ROOT / name, template / name)
    project = template / "{{cookiecutter.project_slug}}"
    for name, text in MINI.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text, encoding="utf-8")
    (licence,) = (ROOT / project.name).glob("*LICENSE*")
    shutil.copy(licence, project)
    return template


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file below the folder with what it holds."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


text = (
    st.text(st.characters(), max_size=90)  # surrogates included
    | st.text(max_size=90)
    | st.text("ab1 \"'\\$()`<>&#%{}[]|*_~:@!-+=.\x7fé\u0416漢\u200d🚀")
)
slugs = st.text("abt0289-_", min_size=1, max_size=40)
packages = st.from_regex("[a-z][a-z0-9_]{0,29}", fullmatch=True)


def accepted(key: str) -> st.SearchStrategy[str]:
    """Draw an answer that the check lets through."""
    kinds = {"project_slug": slugs, "package_name": packages}
    kind = kinds.get(key, text.map(str.strip))
    return kind.filter(lambda drawn: not answers._RULES[key][0](drawn))


def html_of(plain: str) -> str:
    """Return what a renderer of Markdown writes for text without any markup."""
    return html.escape(plain).replace("&#x27;", "'")


def test_every_question_and_choice_has_a_label() -> None:
    labels = QUESTIONS["__prompts__"]
    visible = {key: value for key, value in QUESTIONS.items() if not key.startswith("_")}
    assert labels.keys() == visible.keys()
    for key, choices in visible.items():
        if isinstance(choices, list):
            assert labels[key].keys() == {"__prompt__", *choices}
            for choice in choices:  # as README and docs name it
                assert labels[key][choice].startswith(f"{choice}: "), choice
    assert "[" not in json.dumps(labels).replace("\\", "")  # Rich would eat it as markup


def test_every_typed_answer_is_checked_before_the_next_question() -> None:
    order = [key for key in QUESTIONS if not re.fullmatch("_[^_].*|__prompts__", key)]
    for key, value in QUESTIONS.items():
        if isinstance(value, str) and not key.startswith("_"):
            assert order[order.index(key) + 1] == f"__check_{key}"


@pytest.mark.parametrize("accept_hooks", [True, False])
@pytest.mark.parametrize("key", HOSTILE)
def test_api_refuses(mini: Path, tmp_path: Path, key: str, accept_hooks: bool) -> None:
    for answer in HOSTILE[key]:
        with pytest.raises(click.ClickException) as refused:
            bake(tmp_path, template=mini, accept_hooks=accept_hooks, **{key: answer})
        assert re.fullmatch(rf"{key} .{{1,60}} \S.*; try '.+'\.", refused.value.message), answer
        assert refused.value.message.isprintable() and len(refused.value.message) < 250
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("key", "answer"), HOSTILE_COMMANDS)
def test_command_refuses(mini: Path, tmp_path: Path, key: str, answer: str) -> None:
    hooks = "yes" if len(answer) % 2 else "no"
    done = bake_cli(tmp_path, "--accept-hooks", hooks, template=mini, **{key: answer})
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert re.fullmatch(rf"Error: {key} .*; try '.+', as in: cookiecutter .* '?{key}=.*\n", said)
    assert not list(tmp_path.iterdir())


def test_refusal_comes_right_after_its_own_prompt(mini: Path, tmp_path: Path) -> None:
    done = bake_cli(tmp_path, template=mini, typed="Fine Name\n../up\nnever_read\n")
    labels = QUESTIONS["__prompts__"]
    assert done.returncode == 1
    assert labels["project_slug"] in done.stdout and labels["package_name"] not in done.stdout
    assert re.match(
        r"Error: project_slug '\.\./up' .*; try 'up', as in: cookiecutter ", done.stderr
    )
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_refusal_names_the_command_that_keeps_the_other_answers(
    mini: Path, tmp_path: Path
) -> None:
    """Typed at prompts or on the command line: nothing has to be typed again."""
    typed = "It's Fine\nfine\nclass\n"
    done = bake_cli(tmp_path, template=mini, typed=typed, license="none")
    command = shlex.split(done.stderr.partition("as in: ")[2])
    options = [str(mini), "--output-dir", str(tmp_path), "license=none"]
    suggested = command[-1].removeprefix("package_name=")
    given = ["project_name=It's Fine", "project_slug=fine", f"package_name={suggested}"]
    assert command == ["cookiecutter", *options, *given]
    answers = [word for word in command if "=" in word]
    again = dict(answer.split("=", 1) for answer in answers)
    # Enter takes the answer of the command line as it stands.
    done = bake_cli(tmp_path, template=mini, typed="\n" * 20, **again)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["fine"]
    done = bake_cli(tmp_path, template=mini, project_name="Other", package_name="class")
    command = shlex.split(done.stderr.partition("as in: ")[2])
    assert "--no-input" in command and "project_name=Other" in command
    assert not any(word.startswith("project_slug=") for word in command)


def examples(*values: str) -> Callable[[Any], Any]:
    """Let hypothesis try each of these values, too."""

    def decorate(test: Any) -> Any:
        for value in reversed(values):
            test = example(value)(test)
        return test

    return decorate


@given(answer=text, key=st.sampled_from(sorted(answers._RULES)))
@example("{{{{", "project_name")
@example("&#99999999999;", "project_slug")
@example("\udcff", "package_name")
def test_what_a_refusal_suggests_is_accepted(answer: str, key: str) -> None:
    _, suggest = answers._RULES[key]
    assert answers.check(suggest(answer), key) == ""


@given(name=accepted("project_name"))
@examples("学習", "🚀", "Test", "C:\\", "x" * 80)
def test_any_project_name_derives_good_names(name: str) -> None:
    slug = answers.slug(name)
    assert answers.check(slug, "project_slug") == ""
    assert answers.check(answers.package(slug), "package_name") == ""
    assert answers.check(f"{name} authors", "author_name") == ""


@given(slug=accepted("project_slug"))
@examples("test", "class", "2fast", "tests", "0" * 40)
def test_any_slug_derives_a_good_package(slug: str) -> None:
    package = answers.package(slug)
    assert answers.check(package, "package_name") == ""
    assert package.isidentifier()


def test_derived_packages_import(mini: Path, tmp_path: Path) -> None:
    names = ["my-run", "test", "class", "2fast", "match", "json", "sklearn-run", "src", "con-run"]
    projects = [bake(tmp_path, template=mini, project_slug=name) for name in names]
    found = [next((project / "src").iterdir()) for project in projects]
    program = """if True:
        import importlib, os, sys
        for package in sys.argv[1:]:
            folder, name = os.path.split(package)
            sys.path.append(folder)  # last, where an installed package has to stand its ground
            assert [*importlib.import_module(name).__path__] == [package], package
    """
    subprocess.run([sys.executable, "-c", program, *map(str, found)], check=True)


def normal(name: str) -> str:
    """Return the form in which names of distributions, modules and commands are compared."""
    return re.sub("[-_.]+", "_", name).lower()


def test_no_name_may_replace_a_dependency(mini: Path, tmp_path: Path) -> None:
    """Exactly what the renders require; a new requirement goes into the tuple, too."""
    required: set[str] = set()
    template = shutil.copytree(mini, tmp_path / "template")
    folder = "{{cookiecutter.project_slug}}"
    shutil.copy(ROOT / folder / "pyproject.toml", template / folder)
    shutil.copytree(ROOT / "templates/task", template / "templates/task")
    asked = "task text samples parallelism checkpoint storage tracker workflow"
    for question in asked.split():
        for number, answer in enumerate(QUESTIONS[question]):
            out = tmp_path / f"{question}-{number}"
            project = bake(out, template=template, **{question: answer})
            told = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))
            extras = told["project"].get("optional-dependencies", {}).values()
            groups = told["dependency-groups"]
            assert groups["dev"] == told["project"]["optional-dependencies"]["dev"]
            lists = (told["build-system"]["requires"], told["project"]["dependencies"], *extras)
            required |= {normal(Requirement(line).name) for line in itertools.chain(*lists)}
    assert set(answers.DEPENDENCIES) == required


def test_no_name_may_replace_what_a_dependency_provides() -> None:
    direct = set(answers.DEPENDENCIES)
    modules = {
        normal(module)
        for module, owners in metadata.packages_distributions().items()
        if direct & set(map(normal, owners)) and not module.startswith("_")
    }
    commands = {
        normal(entry.name)
        for entry in metadata.entry_points(group="console_scripts")
        if entry.dist and normal(entry.dist.name) in direct and "." not in entry.name
    }
    assert set(answers.PROVIDED) == (modules | commands) - direct


def test_no_name_may_replace_what_torch_imports() -> None:
    program = "import sys; old = {*sys.modules}; import torch; print(*({*sys.modules} - old))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported = {name.partition(".")[0] for name in done.stdout.split()} - sys.stdlib_module_names
    needs = map(Requirement, metadata.requires("torch") or [])
    imported |= {n.name for n in needs if not n.marker or n.marker.evaluate({"extra": ""})}
    known = {*answers.DEPENDENCIES, *answers.PROVIDED}
    assert {"numpy", "sympy"} <= imported
    # Which of them a release of torch for GPUs requires beside these is not ours to list.
    here = {normal(n) for n in imported if not n.startswith(("_", "nvidia", "cuda", "triton"))}
    assert here - known <= set(answers.IMPORTED_BY_TORCH) <= here


def test_names_of_others_are_refused_as_both() -> None:
    for name in answers.TAKEN:
        assert answers._package_problem(name), name
        assert answers._slug_problem(name.replace("_", "-")), name


@given(name=accepted("project_name"), author=accepted("author_name"))
@example("\"quotes\" 'both'", "back\\slash\\")
@example("$(id) `id` ${HOME}", '"""')
@example("1. {a} | <b> & #1 #", "- *a* _b_ [c](d) \\ : @e $f$")
@example("学習 обучение تدريب", "👩\u200d👩\u200d👧 \U0010ffff\ufeff\uffff")
def test_free_text_arrives_unchanged(mini: Path, name: str, author: str) -> None:
    with tempfile.TemporaryDirectory() as out:
        project = bake(Path(out), template=mini, project_name=name, author_name=author)
        written = {path: content.decode() for path, content in tree(project).items()}
    assert tomllib.loads(written["a.toml"]) == {"name": name, "by": author}
    assert yaml.safe_load(written["a.yaml"]) == {"name": name, "by": author}
    assert ast.literal_eval(written["a.py"]) == [name, author]
    page = MarkdownIt().enable(["table", "strikethrough"]).render(written["a.md"])
    assert page == f"<h1>{html_of(name)}</h1>\n<p>{html_of(author)}</p>\n"
    assert html.unescape(written["a.md"]) == f"# {name}\n\n{author}\n"
    assert f"Copyright (c) {author}\n" in written["LICENSE"]


def mostly(good: st.SearchStrategy[Any], bad: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw a bad answer now and then: of ten answers, one is enough to refuse the render."""
    return st.integers(0, 11).flatmap(lambda die: bad if die == 0 else good)


def some(key: str) -> st.SearchStrategy[Any]:
    """Draw an answer to any question."""
    if key in answers._RULES:
        hostile = [answer for answer in HOSTILE[key] if len(repr(answer)) < 1000]
        return mostly(accepted(key), text | st.sampled_from(hostile))
    return mostly(st.sampled_from(QUESTIONS[key]), text | st.sampled_from(["", "MIT ", "DDP"]))


WORDS = [key for key in QUESTIONS if not key.startswith("_")]
QUOTED = {"project_name": 'Größe "q" \\ $(x) 🚀 & <b>', "author_name": "O'Neil `whoami` 王"}
SCRIPTS = {
    "project_name": "学習 обучение تدريب",
    "author_name": "👩\u200d👧 \U0010ffff\ufeff\uffff",
}
LONGEST = {"project_slug": "s" * 40, "package_name": "p" * 30, "parallelism": "fsdp"}


def test_all_answers_together(tmp_path: Path) -> None:
    """Any draw is one clear error and nothing on disk, or a project that is right everywhere."""
    packages: list[str] = []
    parsed: set[tuple[str, bytes]] = set()  # most files are the same in all projects

    @settings(max_examples=40)
    @given(st.fixed_dictionaries({}, optional={key: some(key) for key in WORDS}))
    @example(QUOTED | {"project_slug": "groesse", "license": "Apache-2.0"})
    @example(LONGEST)
    @example(SCRIPTS)
    @example({"task": "Language_model"})
    @example({"project_name": "{{ 7 * 7 }}", "author_name": "{{ nothing }}"})
    @example({"project_name": "{{"})
    @example({"author_name": "# {# gone #} {{ 'Ada' }}"})
    def draw(drawn: dict[str, Any]) -> None:
        out = Path(tempfile.mkdtemp(dir=tmp_path))
        # Cookiecutter renders answers that come from outside, before any check can see them.
        jinja = any(re.search(r"\{\{|# \{[%#]", str(answer)) for answer in drawn.values())
        try:
            project = bake(out, **drawn)
        except Exception as error:
            assert not list(out.iterdir())
            assert jinja or is_clear(error, drawn), error
        else:
            assert list(out.iterdir()) == [project]
            stamp = json.loads((project / ".cookiecutter.json").read_text("utf-8"))
            assert jinja or drawn.items() <= stamp.items()
            assert_holds(project, stamp)
            for name, content in tree(project).items():
                if (Path(name).suffix, content) not in parsed:
                    parse(name, content.decode())
                    parsed.add((Path(name).suffix, content))
            assert_portable(project)
            packages.append(str(project / "src" / stamp["package_name"]))

    draw()
    assert len(packages) > 15, "too few draws were accepted to tell anything"
    program = """if True:
        import importlib, os, pkgutil, sys
        for package in sys.stdin.read().splitlines():
            folder, name = os.path.split(package)
            sys.path.append(folder)  # last, where an installed package has to stand its ground
            module = importlib.import_module(name)
            assert [*module.__path__] == [package], package
            for info in pkgutil.walk_packages(module.__path__, f"{name}."):
                importlib.import_module(info.name)
            for known in [known for known in sys.modules if known.split(".")[0] == name]:
                del sys.modules[known]
            sys.path.pop()
    """
    done = subprocess.run(
        [sys.executable, "-c", program], input="\n".join(packages), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def is_clear(error: Exception, drawn: dict[str, Any]) -> bool:
    """Whether the error is one line that names the question and helps with it, and is right."""
    if isinstance(error, click.ClickException):
        found = re.fullmatch(r"(\w+) .{1,60} \S.*; try '.+'\.", error.message)
        key = found[1] if found else ""
        given = drawn.get(key)
        return key in drawn and (not isinstance(given, str) or bool(answers._RULES[key][0](given)))
    found = re.search(
        r"provided for choice variable (\w+), but the choices are (\[.*\])", str(error)
    )
    if not isinstance(error, ValueError) or not found:
        return False
    choices = QUESTIONS[found[1]]
    return found[2] == str(choices) and drawn[found[1]] not in choices


def assert_holds(project: Path, stamp: dict[str, str]) -> None:
    """Assert that the files which name answers have them as they were given."""
    name, author, package = (stamp[key] for key in ("project_name", "author_name", "package_name"))
    declared = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]
    assert project.name == declared["name"] == stamp["project_slug"]
    assert declared["description"] == name
    assert declared["authors"] == [{"name": author}]
    assert declared["scripts"] == {project.name: f"{package}.__main__:main"}
    assert declared.get("license", "none") == stamp["license"]
    readme = (project / "README.md").read_text("utf-8")
    assert MarkdownIt().render(readme).startswith(f"<h1>{html_of(name)}</h1>\n")
    if stamp["license"] != "none":
        assert f"\n{stamp['license']}, {author}; see LICENSE.\n" in html.unescape(readme)
        licence = (project / "LICENSE").read_text("utf-8")
        assert re.search(rf"^ *Copyright (\(c\) )?{re.escape(author)}$", licence, re.MULTILINE)


def parse(name: str, content: str) -> None:
    """Parse a file in the language that its name tells."""
    parser = {
        ".py": ast.parse,
        ".toml": tomllib.loads,
        ".json": json.loads,
        ".yml": yaml.safe_load,
        ".yaml": lambda text: list(yaml.safe_load_all(text)),
    }.get(Path(name).suffix)
    if parser:
        parser(content)


def assert_portable(project: Path) -> None:
    """Assert that Windows and file systems that ignore case can hold the project, too."""
    paths = [path.relative_to(project.parent).as_posix() for path in project.rglob("*")]
    assert len({path.lower() for path in paths}) == len(paths)
    for path in paths:
        # Windows has 260 characters for a path: this leaves the better part to its folder.
        assert len(path) <= 120, path
        for part in path.split("/"):
            assert re.fullmatch(r"[\w.-]*[\w-]", part, re.ASCII), path
            assert not re.fullmatch(r"(?i:con|prn|aux|nul|(com|lpt)\d)(\..*)?", part), path


@given(st.text(max_size=40))
def test_quoting_is_right_for_every_text(drawn: str) -> None:
    assert tomllib.loads(f"a = {answers.toml(drawn)}") == {"a": drawn}
    assert yaml.safe_load(answers.toml(drawn)) == drawn
    assert ast.literal_eval(answers.py(drawn)) == drawn


def test_python_strings_suit_the_formatter_and_the_linter(tmp_path: Path) -> None:
    texts = ("".join(draw) for draw in itertools.product("\"'\\ -\u0416\x00\u00e9🚀", repeat=3))
    module = tmp_path / "strings.py"
    module.write_text("".join(f"x = {answers.py(drawn)}\n" for drawn in texts), encoding="ascii")
    for command in (["format", "--check"], ["check", "--select", "Q,RUF001,W,E"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--isolated", "--no-cache", str(module)]
        done = subprocess.run(ruff, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("licence", QUESTIONS["license"])
def test_licence(mini: Path, tmp_path: Path, licence: str) -> None:
    project = bake(tmp_path, template=mini, license=licence, author_name="Ada <ada@example.org>")
    if licence == "none":
        assert not (project / "LICENSE").exists()
    else:
        lines = (project / "LICENSE").read_text(encoding="utf-8").splitlines()
        (holder,) = (line for line in lines if line.lstrip().startswith("Copyright "))
        assert re.fullmatch(r" *Copyright (\(c\) )?Ada <ada@example.org>", holder)
        assert licence.split("-")[0] in "\n".join(lines[:3])


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_hook_says_what_to_do_next(mini: Path, tmp_path: Path, encoding: str) -> None:
    out, name = tmp_path / "größe 🚀", "\"🚀\" 'Run'"
    env = os.environ | {"PYTHONIOENCODING": encoding}
    done = bake_cli(out, template=mini, env=env, project_name=name)
    assert (done.returncode, done.stderr) == (0, "")
    shown = str(out / "run").encode(encoding, "replace").decode(encoding)
    for line in (f"cd '{shown}'", "pip install -e '.[dev]'", "python -m run train", "README.md"):
        assert line in done.stdout
    with_hooks = tree(out / "run")
    shutil.rmtree(out)
    assert with_hooks == tree(bake(out, template=mini, project_name=name))


def test_hook_without_a_reader_keeps_the_project(mini: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cookiecutter", str(mini), "--no-input", "-o", str(tmp_path)]
    reader, writer = os.pipe()
    os.close(reader)
    subprocess.run(command, stdout=writer, check=True, timeout=300)
    os.close(writer)
    assert (tmp_path / "my-training-run" / "LICENSE").exists()
