"""Jinja filters that check an answer, derive the next default, and quote for a file format.

Cookiecutter loads this module by `_extensions` in cookiecutter.json, on every road to a render:
with hooks or without, from the command line, its Python API or cruft. It runs in Cookiecutter's own
interpreter, so it uses nothing but what Cookiecutter itself depends on.
"""

from __future__ import annotations

import contextlib
import json
import keyword
import os
import re
import shlex
import sys
import unicodedata
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import cache_from_source

import click
from jinja2 import Environment, pass_context
from jinja2.ext import Extension
from jinja2.runtime import Context
from slugify import slugify

SLUG_LIMIT = 40
PACKAGE_LIMIT = 30  # with it, import lines of the rendered tests stay within the formatter's 100

# What free text cannot hold: line breaks and other control characters, bidirectional overrides
# (text that reads differently from what it is), lone surrogates (not Unicode at all), and the marks
# of Jinja, which Cookiecutter would run whenever it is handed the answer again, as by an update.
_UNFIT = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]" + r"|\{\{|# \{[%#]"
)

_WINDOWS = re.compile("con|prn|aux|nul|(com|lpt)[0-9]")

# Names that a project must leave to others: as a slug one of them would replace a requirement or a
# command, as a package it would hide a module. tests/template/test_answers.py derives these tuples
# from renders and from torch, and compares.
DEPENDENCIES = (  # what the pyproject.toml of some answers requires
    *("alembic", "basedpyright", "fsspec", "jinja2", "matplotlib", "mlflow_skinny"),
    *("numpy", "pillow", "pre_commit", "pre_commit_hooks", "psutil", "pytest", "ruff"),
    *("s3fs", "safetensors", "scikit_learn"),
    *("setuptools", "sqlalchemy", "tensorboard", "tokenizers", "torch", "tqdm", "tyro", "wandb"),
)
PROVIDED = (  # modules and commands of these that have other names than their distributions
    *("basedpyright_langserver", "check_added_large_files", "check_ast", "check_builtin_literals"),
    *("check_case_conflict", "check_docstring_first", "check_executables_have_shebangs"),
    *("check_json", "check_merge_conflict", "check_shebang_scripts_are_executable"),
    *("check_symlinks", "check_toml", "check_vcs_permalinks", "check_xml", "check_yaml"),
    *("debug_statement_hook", "destroyed_symlinks", "detect_aws_credentials"),
    *("detect_private_key", "double_quote_string_fixer", "end_of_file_fixer"),
    *("file_contents_sorter", "fix_byte_order_marker", "forbid_new_submodules"),
    *("mixed_line_ending", "name_tests_test", "no_commit_to_branch", "pre_commit_hooks_removed"),
    *("pretty_format_json", "requirements_txt_fixer", "sort_simple_yaml"),
    *("trailing_whitespace_fixer",),
    *("f2py", "functorch", "mlflow", "mpl_toolkits", "numpy_config", "pil", "py", "pylab"),
    *("sklearn", "torchfrtrace", "torchgen", "torchrun", "wb"),
)
IMPORTED_BY_TORCH = ("filelock", "networkx", "sympy", "typing_extensions")
COMMANDS = ("activate", "pip", "pip3", "python", "python3")  # of any virtual environment
TAKEN = {*DEPENDENCIES, *PROVIDED, *IMPORTED_BY_TORCH, *COMMANDS}

# `sys.stdlib_module_names` leaves out `test`, and cannot know the modules of a newer Python.
_STDLIB = sys.stdlib_module_names | {"annotationlib", "compression", "profiling", "test"}

# Folders and modules of the rendered tree, and folders that its .gitignore leaves out.
_TREE = {"build", "conftest", "dist", "env", "runs", "src", "tests", "venv"}


def _line_problem(text: str, limit: int) -> str | None:
    if all(unicodedata.category(char) in ("Cc", "Cf", "Zs") for char in text):
        return "is empty"
    if unfit := _UNFIT.search(text):
        return f"contains {unfit[0]!r}, which cannot go into every file as it is"
    if text != text.strip():
        return "begins or ends with a space"
    if len(text) > limit:
        return f"is longer than {limit} characters"
    return None


def _line(text: str, limit: int, fallback: str) -> str:
    line = " ".join(_UNFIT.sub(" ", text).split())[:limit].strip()
    return fallback if _line_problem(line, limit) else line


def _slug_problem(slug: str) -> str | None:
    if len(slug) > SLUG_LIMIT:
        return f"is longer than {SLUG_LIMIT} characters"
    if not re.fullmatch(r"[a-z0-9]([a-z0-9_-]*[a-z0-9])?", slug):
        return "must be made of a-z, 0-9, '-' and '_', with a letter or digit at both ends"
    if _WINDOWS.fullmatch(slug):
        return "is a name that Windows reserves"
    if re.sub("[-_]+", "_", slug) in TAKEN:
        return "is the name of something that the project installs"
    return None


def _package_problem(name: str) -> str | None:
    if len(name) > PACKAGE_LIMIT:
        return f"is longer than {PACKAGE_LIMIT} characters"
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        return "must be made of a-z, 0-9 and '_', beginning with a letter"
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        return "is a word of the Python language"
    if name in _STDLIB or name in TAKEN:
        return "would hide a module that Python or the project needs"
    if _WINDOWS.fullmatch(name):
        return "is a name that Windows reserves"
    if name in _TREE or name.startswith("test_"):
        return "is a name that the project uses for something else"
    return None


def _derive(text: str, separator: str, limit: int, problem: Callable[[str], str | None]) -> str:
    """Return the first fit name made from the text; the last candidate is always fit."""
    run = f"{separator}run"
    # Entities stay text: some releases of slugify fail on one that names no character.
    short, long = (
        slugify(text, False, False, False, room, True, separator, save_order=True)
        for room in (limit - len(run), limit)
    )
    candidates = (long, short + run, f"run{separator}{short}", f"training{run}")
    return next(name for name in candidates if not problem(name))


slug = partial(_derive, separator="-", limit=SLUG_LIMIT, problem=_slug_problem)
package = partial(_derive, separator="_", limit=PACKAGE_LIMIT, problem=_package_problem)

# For each answer: what is wrong with it, if anything, and what would do instead.
_RULES: dict[str, tuple[Callable[[str], str | None], Callable[[str], str]]] = {
    "project_name": (
        partial(_line_problem, limit=80),
        partial(_line, limit=80, fallback="My Training Run"),
    ),
    "project_slug": (_slug_problem, slug),
    "package_name": (_package_problem, package),
    "author_name": (
        partial(_line_problem, limit=100),
        partial(_line, limit=100, fallback="My Training Run authors"),
    ),
}


def check(answer: object, key: str, answers: Mapping[str, object] | None = None) -> str:
    """Return nothing for an answer fit for use, else stop with one line and a suggestion.

    With the answers so far, the line ends with the command that keeps them.
    """
    find_problem, suggest = _RULES[key]
    text = answer if isinstance(answer, str) else ""  # the Python API lets any object through
    if problem := find_problem(text):
        shown = repr(answer)  # escapes what would break the line or the terminal
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        suggestion = suggest(text)
        line = f"{key} {shown} {problem}; try {suggestion!r}"
        command = corrected_command({**(answers or {}), key: suggestion})
        raise click.ClickException(f"{line}, as in: {command}" if command else f"{line}.")
    return ""


@pass_context
def check_answer(context: Context, answer: object, key: str) -> str:
    """Check an answer while Cookiecutter asks, when it knows the answers before this one."""
    return check(answer, key, context["cookiecutter"])


def corrected_command(answers: Mapping[str, object]) -> str:
    """Return the command that was typed, with these answers; "" if it was not typed at a shell."""
    program = sys.argv[0].replace(os.sep, "/")
    if not re.search(r"(^|/)cookiecutter(\.exe|/__main__\.py)?$", program):
        return ""
    typed = {word.partition("=")[0] for word in sys.argv[1:] if "=" in word}
    words = ["cookiecutter"]
    for word in sys.argv[1:]:
        if word.partition("=")[0] not in answers:
            words.append(word)
    wrong = list(answers)[-1]
    for key, answer in answers.items():
        # Without prompts the other answers that were not typed are the template's own.
        is_given = key in typed or key == wrong or "--no-input" not in words
        if is_given and not key.startswith("_"):
            words.append(f"{key}={answer}")
    command = shlex.join(words)
    return command if command.isprintable() else ""


def toml(text: str) -> str:
    """Quote as a basic string of TOML, which is also a double-quoted scalar of YAML, and JSON.

    JSON's escapes are valid in all. Left to escape is what JSON may hold raw and the others not.
    """
    return re.sub(
        "[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]",
        lambda char: f"\\u{ord(char[0]):04x}",
        json.dumps(text, ensure_ascii=False),
    )


def py(text: str) -> str:
    """Quote as a string of Python in ASCII, with the quotes that the formatter prefers.

    Not as it is, since linters refuse letters that look like others, such as Cyrillic ones.
    """
    quote = "'" if text.count('"') > text.count("'") else '"'
    escaped = text.encode("unicode_escape").decode().replace(quote, f"\\{quote}")
    return f"{quote}{escaped}{quote}"


def md(text: str) -> str:
    """Escape for a line of Markdown or HTML, by entities, which both of them read.

    Besides the marks of either it covers what at the start of a line opens a list or underlines a
    heading, and what GitHub makes of `:name:`, `@name` and `$`.
    """
    marks = r"""[]["#$&*:<>@\\_`{|}~]|^[-+=]|(?<=\d)[.)](?=\s|$)"""
    return re.sub(marks, lambda mark: f"&#{ord(mark[0])};", text)


class Filters(Extension):
    """All of the above, as filters of the template."""

    def __init__(self, environment: Environment) -> None:
        """Register them, and have the next environment load this file anew.

        `cruft update` renders the older and the newer version of the template in one process, from
        the same path. The newer must get its own filters: not those in memory, nor the bytecode,
        which Python takes for fresh when size and second of change are the same.
        """
        super().__init__(environment)
        # Not from the context: a replayed one holds the version that it was made with.
        with open(os.path.join(os.path.dirname(__file__), "cookiecutter.json"), "rb") as file:
            environment.globals["template_version"] = json.load(file)["_template_version"]
        sys.modules.pop(__name__, None)
        with contextlib.suppress(OSError):
            os.remove(cache_from_source(__file__))
        environment.filters.update(
            check=check_answer,
            slug=slug,
            package=package,
            toml=toml,
            yaml=toml,
            json=toml,
            py=py,
            md=md,
        )
