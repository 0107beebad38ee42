"""Stress tests: programs that try to break what the template promises (`make torture`)."""

import os

# As `__main__` of a render does, and before torch is imported: forked runs do not pass there.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
