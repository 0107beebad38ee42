"""Find phrases that have to be read twice, in documentation, docstrings and comments.

python scripts/check_prose.py [FILE …]    by default those that users read
"""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# A pattern, and what says the same more plainly.
PHRASES = {
    r"\bhad better\b": "should",
    r"\bits like\b": "its counterpart",
    r"\b(is|are|was|were) told (of|by|that|what|why|where)\b": "gets, or the log says",
    r"\bfor what it is worth\b": "leave it out",
    r"\b[Ww]hoever\b": "anyone who, the process that",
    r"\blies? (in|on|at|below|beside|there|where|outside|within)\b": "is",
    r"\b(what|it|sample|file) lies\b": "is",
    r"\b(go|goes|gone|went|going) on\b": "continue, resume",
    r"\b[Ww]anted is\b": "name the subject first",
    r"\bto the letter\b": "exactly",
    r"\bthereof\b": "of it",
    r'(^|"""|# )Of (a|an|the|all|its|this|those|these)\b(?!.*\b(is|are|has|have)\b)': "a subject",
}
# The same for pages only: comments of the code are shorter.
PAGES = {
    r"(?<![Tt]here )\b(is|are) no (?!longer|such|more|worse|slower|faster)[a-z]+": "is not a …",
    r"\banew\b": "again",
    r"\ball the same\b": "still",
    r"\bof (its|their) own\b": "its own …",
    r"^(?![#$])[^|`:;]*;[^.;:|`]*;": "two sentences",
}
TEXT = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs", "cookiecutter.json")
TEXT += ("local_extensions.py", "hooks", "templates", "{{cookiecutter.project_slug}}", "scripts")
TEXT += ("benchmarks", "tests/stress/page.md")
NO_TEXT = (".pyc", ".png", ".json")
# Legal text; the phrases.
EXEMPT = ("templates/license", "scripts/check_prose.py")


def files(names: list[str]) -> list[Path]:
    """The files of these names, and the text files in these folders."""
    found: list[Path] = []
    for path in (ROOT / name for name in names):
        inside = (it for it in sorted(path.rglob("*")) if it.is_file() and it.suffix not in NO_TEXT)
        found += inside if path.is_dir() else [path]
    return [it for it in found if not os.path.relpath(it, ROOT).startswith(EXEMPT)]


def main(names: list[str]) -> int:
    """A line for each phrase found, with its place; 1 if there is one."""
    problems = 0
    for path in files(names or list(TEXT)):
        phrases = PHRASES | PAGES if path.suffix == ".md" else PHRASES
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            for pattern, better in phrases.items():
                if match := re.search(pattern, line):
                    problems += 1
                    place = f"{os.path.relpath(path, ROOT)}:{number}"
                    print(f"{place}: {match[0]!r}: write: {better}")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
