"""How the programs begin and end: Ctrl-C while they import, and a stderr that is full."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, SHAKESPEARE

pytestmark = pytest.mark.slow  # each test starts real programs, several times
PROGRAMS = {
    "generate.py": (),
    "server.py": ("--port", "0"),
    "tools/bench.py": ("latency", "--shape", "1b"),
    "tools/convert.py": ("--checkpoint", SHAKESPEARE, "--mode", "int8", "--out", "{}/out"),
    "tools/gpu_check.py": ("--device", "cpu", "--tiny"),
    "checkpoints/train.py": ("--text", ROOT / "README.md", "--out", "{}/out"),
    **{f"course/{file.name}": () for file in sorted(ROOT.glob("course/0*.py"))[:2]},
}


def start(name, *words):
    """Start a program, with a Ctrl-C that works even where the test runs in background."""
    return subprocess.Popen(
        [sys.executable, ROOT / name, *map(str, words)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("seconds", [0, 0.2, 0.6])
@pytest.mark.parametrize("name", PROGRAMS)
def test_ctrl_c_while_it_imports(name, seconds, tmp_path):
    """A traceback through PyTorch's files, for whoever has mistyped a flag."""
    process = start(name, *(str(word).format(tmp_path) for word in PROGRAMS[name]))
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (130, b"", b"")


@pytest.mark.parametrize("seconds", [0, 0.02, 0.1])
def test_ctrl_c_while_it_ends(seconds):
    """Exceptions that Python ignores, and shows, after the last line of a program."""
    process = start("generate.py", "--max-tokens", 1, "--device", "cpu")
    process.stderr.readline()  # the sampling
    process.stderr.readline()  # the statistics
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=120)[1] == b""
    assert process.returncode in (0, 130, -signal.SIGINT)  # the last is 130 to a shell, too


def test_ctrl_c_as_the_handler_changes():
    """The signal came after main had returned, in the line that puts the last handler in place."""
    code = """if True:
        import signal, sys
        from around import program
        set_handler = signal.signal
        def interrupted(number, handler):
            if handler is program.leave:
                signal.signal = set_handler
                signal.raise_signal(signal.SIGINT)
            return set_handler(number, handler)
        signal.signal = interrupted
        program.run(lambda: 0)"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stderr) == (130, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
@pytest.mark.parametrize(
    ("words", "status"),
    [("--max-tokens 3", 0), ("--max-tokens 3 --n 2 --speculate 2", 0), ("--checkpoint no", 2),
     ("--top-k many", 2)],
)  # fmt: skip
def test_a_full_stderr_changes_no_status(words, status):
    """A disk that is full: 120, as the line of statistics could not be written."""
    command = [sys.executable, ROOT / "generate.py", "--device", "cpu", *words.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full)
    assert done.returncode == status
    assert bool(done.stdout) == (status == 0)
