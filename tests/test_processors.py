"""The fast paths, as other processors than this machine's would choose and run them.

A path that is chosen by what a processor has was tested where it was written, and nowhere else: on
another processor the scores of a long prompt took 272 MB, and this suite was red.
"""

import os
import subprocess
import sys

import pytest
from conftest import ROOT
from processors import PROCESSORS

TESTS = (
    "test_bfloat16[sliding", "sliding and fast and plain and not budget", "stays_within",
    "packed_equals_plain and not looped", "which_form", "ends_of_its_range", "packed_without",
)  # fmt: skip


@pytest.mark.parametrize("name", PROCESSORS)
def test_on(name):
    """Run the tests of the fast paths in a process that takes itself for another processor's.
    Catches: other tokens; a form of a Linear that this processor cannot multiply; more memory than
    is free."""
    variables = {"KILOLM_PROCESSOR": name, "PYTHONPATH": f"{ROOT / 'tests'}"}
    files = ["equivalence", "scheduler", *["quantize"] * PROCESSORS[name].is_x86]
    paths = [f"tests/test_{file}.py" for file in files]
    options = ["-q", "-n", "0", "-p", "processors", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-k", " or ".join(TESTS), *paths],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    *_, last = done.stdout.strip().splitlines()
    assert int(last.split(" passed")[0].split()[-1]) > 5, last
