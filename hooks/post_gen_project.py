"""Print what to do next. A generated project is complete without this hook."""

import contextlib
import json
import os
import shlex
import sys
import tempfile

# Cookiecutter inserts the answers as JSON. In JSON there is a backslash before each quote of an
# answer, so no answer can end this raw string.
ANSWERS = json.loads(r"""{{ cookiecutter | tojson }}""")

TEXT = f"""
{ANSWERS["project_name"]} is ready. What to do next:

    cd {shlex.quote(os.getcwd())}
    python3 -m venv .venv && . .venv/bin/activate
    pip install -e '.[dev]'
    python -m {ANSWERS["package_name"]} train

README.md in that folder has the rest.
"""

# To update a project, cruft generates it in a temporary folder, TMPDIR/FOLDER/SLUG, which it then
# removes: print nothing there. cruft adds `_commit` to the answers.
PASSING = os.path.realpath(tempfile.gettempdir()) == os.path.dirname(os.path.dirname(os.getcwd()))
if "_commit" in ANSWERS and PASSING:
    sys.exit()

# If a hook fails, Cookiecutter deletes the project. So a character that the terminal cannot show is
# replaced, and a pipe that nobody reads is not an error. `print` would report that pipe at exit.
with contextlib.suppress(OSError):
    os.write(1, TEXT.encode(getattr(sys.stdout, "encoding", "ascii"), errors="replace"))
