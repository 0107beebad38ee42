"""Say what to do next. Nothing in the rendered project depends on this having run."""

import contextlib
import json
import os
import shlex
import sys
import tempfile

# JSON in a raw string: no answer can end the literal, whatever quotes it holds.
ANSWERS = json.loads(r"""{{ cookiecutter | tojson }}""")

TEXT = f"""
{ANSWERS["project_name"]} is ready. What to do next:

    cd {shlex.quote(os.getcwd())}
    python3 -m venv .venv && . .venv/bin/activate
    pip install -e '.[dev]'
    python -m {ANSWERS["package_name"]} train

README.md in that folder has the rest.
"""

# `cruft` (it adds `_commit`) updates by way of renders in temporary folders, which nobody goes to.
PASSING = os.path.realpath(tempfile.gettempdir()) == os.path.dirname(os.path.dirname(os.getcwd()))
if "_commit" in ANSWERS and PASSING:
    sys.exit()

# A hook that fails makes Cookiecutter delete the project. So: no character that the terminal cannot
# show is an error, nor is a pipe that nobody reads (which `print` would also report at exit).
with contextlib.suppress(OSError):
    os.write(1, TEXT.encode(getattr(sys.stdout, "encoding", "ascii"), errors="replace"))
