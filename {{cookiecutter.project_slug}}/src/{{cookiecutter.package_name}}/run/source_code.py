"""Identify, with git, the version of the project's code that a run uses."""

import contextlib
import functools
import hashlib
import os
import subprocess
from pathlib import Path

# Time limit of a git command in seconds, since a repository may be on a slow network disk.
SECONDS = 10


@functools.cache
def code_version() -> dict[str, str]:
    """Return the commit of this package's repository, and a digest of uncommitted changes.

    The digest covers the diff from the commit, and the untracked files that git does not ignore.
    Without such changes, the digest is left out. Returns {} if a git command fails, as without git
    or outside a repository.
    """
    try:
        commit = git("rev-parse", "HEAD").decode().strip()
        root = Path(os.fsdecode(git("rev-parse", "--show-toplevel").rstrip(b"\n")))
        changes = git("diff", "HEAD", "--binary")
        # Git runs in this file's folder; ":/" makes it list new files of the whole repository.
        new_files = git("ls-files", "--others", "--exclude-standard", "--full-name", "-z", ":/")
        digest = hashlib.sha256(changes)
        for name in sorted(new_files.split(b"\0")):
            digest.update(name)
            file = root / os.fsdecode(name)
            # Only the names of large files enter the digest, to save time. The same holds for
            # unreadable files.
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
