"""Some of the tests of a render, in this process.

Usage: own_tests.py PROJECT CODE TEST..., where CODE is pytest's exit code (by `drill`)
"""

import os
import sys

import pytest

if __name__ == "__main__":
    os.chdir(sys.argv[1])
    code = pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[3:]])
    assert code == int(sys.argv[2]), f"{sys.argv[1]}: {code!r}"
