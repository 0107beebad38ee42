"""Jinja filters that check an answer, derive the next default, and quote for a file format.

Cookiecutter loads this module through `_extensions` in cookiecutter.json whenever it generates a
project: from the command line, from Python or by cruft, with or without hooks. The module runs in
Cookiecutter's own interpreter, so it only imports packages that Cookiecutter itself requires.
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

# Most characters in a slug, and in the name of a package. With a longer name, import lines in the
# tests of a project would exceed 100 characters, and the formatter would change them.
SLUG_LIMIT = 40
PACKAGE_LIMIT = 30

# What free text cannot contain: line breaks and other control characters, bidirectional overrides
# (which make text look different from what it is), lone surrogates (which cannot be encoded), and
# the beginnings of Jinja's expressions, blocks and comments ("# {%" and "# {#" in this template).
# Jinja would evaluate those when Cookiecutter gets the answer again, as in an update.
_UNFIT = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]" + r"|\{\{|# \{[%#]"
)

# Names that Windows reserves for devices, so that no file can have them.
_WINDOWS = re.compile("con|prn|aux|nul|(com|lpt)[0-9]")

# Names that a project must not take: as a slug, such a name would replace a requirement or a
# command; as a package, it would hide a module. tests/template/test_answers.py compares these
# tuples with generated projects and with torch.

# The packages that the pyproject.toml of some project requires.
DEPENDENCIES = (
    *("alembic", "basedpyright", "fsspec", "jinja2", "matplotlib", "mlflow_skinny"),
    *("numpy", "pillow", "pre_commit", "pre_commit_hooks", "psutil", "pytest", "ruff"),
    *("s3fs", "safetensors", "scikit_learn"),
    *("setuptools", "sqlalchemy", "tensorboard", "tokenizers", "torch", "tqdm", "tyro", "wandb"),
)
# Modules and commands of these packages whose names differ from that of their package.
PROVIDED = (
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
# Commands of every virtual environment.
COMMANDS = ("activate", "pip", "pip3", "python", "python3")
TAKEN = {*DEPENDENCIES, *PROVIDED, *IMPORTED_BY_TORCH, *COMMANDS}

# `sys.stdlib_module_names` lacks `test`, and the modules of Python versions newer than this one.
_STDLIB = sys.stdlib_module_names | {"annotationlib", "compression", "profiling", "test"}

# Folders and modules of a project, and folders that its .gitignore ignores.
_TREE = {"build", "conftest", "dist", "env", "runs", "src", "tests", "venv"}


# The functions named `…_problem` return what is wrong with an answer, as the end of a sentence that
# begins with the answer; None if the answer can be used.


def _line_problem(text: str, limit: int) -> str | None:
    # Control characters, formatting characters and spaces show nothing.
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
    """Return the text without what `_line_problem` refuses, or the fallback if nothing is left."""
    line = " ".join(_UNFIT.sub(" ", text).split())[:limit].strip()
    return fallback if _line_problem(line, limit) else line


def _slug_problem(slug: str) -> str | None:
    if len(slug) > SLUG_LIMIT:
        return f"is longer than {SLUG_LIMIT} characters"
    if not re.fullmatch(r"[a-z0-9]([a-z0-9_-]*[a-z0-9])?", slug):
        return "must be made of a-z, 0-9, '-' and '_', with a letter or digit at both ends"
    if _WINDOWS.fullmatch(slug):
        return "is a name that Windows reserves"
    # Package names that differ only in hyphens and underscores are the same. TAKEN has underscores.
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
    """Return the first name made from the text that has no problem; the last one never has any."""
    run = f"{separator}run"
    make_slug = partial(
        slugify,
        # Do not decode HTML entities: some releases of slugify fail if one names no character.
        entities=False,
        decimal=False,
        hexadecimal=False,
        # Cut the text between words.
        word_boundary=True,
        save_order=True,
        separator=separator,
    )
    long = make_slug(text, max_length=limit)
    # Leave room for `run`.
    short = make_slug(text, max_length=limit - len(run))
    candidates = (long, short + run, f"run{separator}{short}", f"training{run}")
    return next(name for name in candidates if not problem(name))


slug = partial(_derive, separator="-", limit=SLUG_LIMIT, problem=_slug_problem)
package = partial(_derive, separator="_", limit=PACKAGE_LIMIT, problem=_package_problem)

# By question, for answers of free text: a function that returns what is wrong with an answer, and
# one that makes an answer that can be used from it.
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
    """Return "" if an answer can be used; otherwise raise a one-line error with a suggestion.

    `answers` are the answers so far, this one last. With them, the line ends with a corrected
    command that keeps them.
    """
    find_problem, suggest = _RULES[key]
    # Cookiecutter's Python API accepts any object as an answer.
    text = answer if isinstance(answer, str) else ""
    if problem := find_problem(text):
        # `repr` escapes characters that would break the line or the terminal.
        shown = repr(answer)
        if len(shown) > 60:
            shown = f"{shown[:57]}..."
        suggestion = suggest(text)
        line = f"{key} {shown} {problem}; try {suggestion!r}"
        command = corrected_command({**(answers or {}), key: suggestion})
        if command:
            raise click.ClickException(f"{line}, as in: {command}")
        raise click.ClickException(f"{line}.")
    return ""


@pass_context
def check_answer(context: Context, answer: object, key: str) -> str:
    """Check an answer right after its question: the context has the answers so far."""
    return check(answer, key, context["cookiecutter"])


def corrected_command(answers: Mapping[str, object]) -> str:
    """Return the command that was typed, with these answers; "" if it was not typed in a shell.

    The last one of the answers is the corrected one.
    """
    program = sys.argv[0].replace(os.sep, "/")
    # Cookiecutter may also run in another program, such as cruft.
    if not re.search(r"(^|/)cookiecutter(\.exe|/__main__\.py)?$", program):
        return ""
    # The questions that were answered on the command line, as in `package_name=mine`.
    typed = {word.partition("=")[0] for word in sys.argv[1:] if "=" in word}
    words = ["cookiecutter"]
    for word in sys.argv[1:]:
        if word.partition("=")[0] not in answers:
            words.append(word)
    corrected = list(answers)[-1]
    for key, answer in answers.items():
        # With --no-input, an answer that was not typed is a default, which need not be repeated.
        is_given = key in typed or key == corrected or "--no-input" not in words
        # Keys with an underscore are not questions.
        if is_given and not key.startswith("_"):
            words.append(f"{key}={answer}")
    command = shlex.join(words)
    # A typed word may contain characters that would break the line or the terminal.
    return command if command.isprintable() else ""


def toml(text: str) -> str:
    """Quote as a basic string of TOML, which is also a double-quoted scalar of YAML, and JSON.

    JSON's escapes are valid in all three formats. But JSON allows some characters without an escape
    that TOML or YAML does not allow, so these are escaped, too.
    """
    return re.sub(
        "[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]",
        lambda char: f"\\u{ord(char[0]):04x}",
        json.dumps(text, ensure_ascii=False),
    )


def py(text: str) -> str:
    """Quote as a string of Python in ASCII, with the quotes that the formatter prefers.

    Other letters are escaped, since linters refuse those that look like ASCII letters, such as
    Cyrillic ones.
    """
    quote = "'" if text.count('"') > text.count("'") else '"'
    escaped = text.encode("unicode_escape").decode().replace(quote, f"\\{quote}")
    return f"{quote}{escaped}{quote}"


def md(text: str) -> str:
    """Escape a line for Markdown and HTML, with HTML entities, which both formats accept.

    This covers the special characters of both, characters that open a list or underline a heading
    at the start of a line, and GitHub's `:name:`, `@name` and `$`.
    """
    # The alternatives are special characters, the start of a line, and a number such as "1.".
    marks = r"""[]["#$&*:<>@\\_`{|}~]|^[-+=]|(?<=\d)[.)](?=\s|$)"""
    return re.sub(marks, lambda mark: f"&#{ord(mark[0])};", text)


class Filters(Extension):
    """Makes the functions above filters of the template."""

    def __init__(self, environment: Environment) -> None:
        """Register the filters, and let the next environment load this file again.

        `cruft update` generates the project with the older and the newer version of the template,
        in one process and from the same path. The newer version must not get the older filters:
        neither from the loaded module, nor from its bytecode, which Python uses while the size of
        the file and the second of its last change are the same.
        """
        super().__init__(environment)
        # Do not take the version from the context, since a replay has that of the older project.
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
