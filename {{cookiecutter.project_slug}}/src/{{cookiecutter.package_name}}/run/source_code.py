"""Identify with git the version of your code that a run uses."""

import contextlib
import functools
import hashlib
import os
import subprocess
from pathlib import Path

# Timeout of a git command: a repository on a slow network disk must not delay the start.
SECONDS = 10


@functools.cache
def code_version() -> dict[str, str]:
    """Return the commit of this package's repository, and a digest of uncommitted changes.

    Returns {} without git or outside a repository. The digest covers the diff from the commit, and
    the untracked files that git does not ignore. If there are no such changes, it is left out.
    """
    try:
        commit = git("rev-parse", "HEAD").decode().strip()
        root = Path(os.fsdecode(git("rev-parse", "--show-toplevel").rstrip(b"\n")))
        changes = git("diff", "HEAD", "--binary")
        # Git runs in this folder; ":/" is the root of the repository.
        new_files = git("ls-files", "--others", "--exclude-standard", "--full-name", "-z", ":/")
        digest = hashlib.sha256(changes)
        for name in sorted(new_files.split(b"\0")):
            digest.update(name)
            file = root / os.fsdecode(name)
            # Large files count only by name, to save time, and so do unreadable ones.
            with contextlib.suppress(OSError):
                if file.is_file() and file.stat().st_size < 2**20:
                    digest.update(file.read_bytes())
    except (OSError, subprocess.SubprocessError):
        return {}
    version = {"commit": commit}
    if changes or new_files:
        version["changed"] = digest.hexdigest()[:16]
    return version


def git(*words: str) -> bytes:
    """Return the output of a read-only git command in the package's folder."""
    command = ["git", "-C", str(Path(__file__).parent), "--no-optional-locks", *words]
    done = subprocess.run(command, capture_output=True, check=True, timeout=SECONDS)
    return done.stdout
