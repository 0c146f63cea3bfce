"""For tests of what an installation compiles."""

import shutil

import pytest

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None, reason="there is no C compiler, so nothing was compiled"
)
