"""Some of the tests of a render, in this process.

Usage: own_tests.py PROJECT TEST... (by `drill`)
"""

import os
import sys

import pytest

if __name__ == "__main__":
    os.chdir(sys.argv[1])
    code = pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]])
    assert code == 0, f"{sys.argv[1]}: {code!r}"
