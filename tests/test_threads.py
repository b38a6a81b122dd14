"""How many threads compute: one where the weights fit into a processor's cache."""

import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, SHAKESPEARE

import settings
from generate import LLM


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.get_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("asked", "variable", "weights", "expected"),
    [
        (None, None, settings.SMALL - 1, 1), (None, None, settings.SMALL, 6),
        (None, "6", settings.SMALL - 1, 6), (3, "6", 1, 3), (3, None, 2**40, 3),
    ],
    ids=["small", "large", "variable", "both", "option"],
)  # fmt: skip
def test_the_rule(asked, variable, weights, expected, threads, monkeypatch):
    """Two threads that wait for each other over a small model; a rule that overrides the user; a
    large model that keeps the one thread of a small one."""
    monkeypatch.setattr(settings, "ALL_THREADS", 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    torch.set_num_threads(2)
    settings.use_threads(asked, weights)
    assert threads() == expected


@pytest.mark.parametrize(("options", "expected"), [({}, 1), ({"threads": 2}, 2)])
def test_the_bundled_model(options, expected, threads, monkeypatch):
    """A rule that nothing calls. The command line and the server load models by the same call."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(3)
    LLM(SHAKESPEARE, num_blocks=4, **options)
    assert threads() == expected


@pytest.mark.slow
def test_a_busy_machine():
    """10 tokens a second on a machine that has other work, where a quiet one makes 400: each
    operator's threads waited for the one whose core was taken away."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}

    def rate():
        command = [sys.executable, "generate.py", "--seed", "1"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        return float(re.search(r"([\d.]+) tokens/s", done.stderr)[1])

    alone = max(rate() for _ in range(3))
    loop = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(loop) for _ in range(2 * len(os.sched_getaffinity(0)))]
    try:
        beside = max(rate() for _ in range(3))
    finally:
        for other in others:
            other.kill()
            other.wait()
    # Its fair share is a third: three processes on a core. With two threads it was a twentieth.
    assert beside > 60 and beside > alone / 5, (alone, beside)
