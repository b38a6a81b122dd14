"""How many threads compute: one where the weights fit into a processor's cache."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, SHAKESPEARE

import around.fast
from around.fast import threads as machine
from llm import LLM


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.get_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("asked", "variable", "weights", "expected"),
    [
        (None, None, machine.SMALL - 1, 1), (None, None, machine.SMALL, 6),
        (None, "6", machine.SMALL - 1, 6), (3, "6", 1, 3), (3, None, 2**40, 3),
    ],
    ids=["small", "large", "variable", "both", "option"],
)  # fmt: skip
def test_the_rule(asked, variable, weights, expected, threads, monkeypatch):
    """Two threads that wait for each other over a small model; a rule that overrides the user; a
    large model that keeps the one thread of a small one."""
    monkeypatch.setattr(machine, "ALL_THREADS", 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    torch.set_num_threads(2)
    machine.use_threads(asked, weights)
    assert threads() == expected


def test_a_tied_matrix_counts_once(monkeypatch):
    """A tied model of 20 MB was taken for a large one."""
    counted = []
    monkeypatch.setattr(
        around.fast, "use_threads", lambda threads, weights: counted.append(weights)
    )
    model = LLM(SHAKESPEARE, device="cpu").engine.model
    assert model.config.tie_word_embeddings
    assert counted == [sum(each.nbytes for each in model.parameters())]


@pytest.mark.parametrize(("options", "expected"), [({}, 1), ({"threads": 2}, 2)])
def test_the_bundled_model(options, expected, threads, monkeypatch):
    """A rule that nothing calls. The command line and the server load models by the same call."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(3)
    LLM(SHAKESPEARE, num_blocks=4, **options)
    assert threads() == expected


# Prints the processor seconds of a text. Its argument is the number of threads, or nothing.
TEXT = """
import sys, time
from llm import LLM
llm = LLM("checkpoints/shakespeare", num_blocks=16, threads=int(sys.argv[1] or 0) or None)
before = time.process_time()
llm.generate("ROMEO:", max_tokens=200, ignore_eos=True)
print(time.process_time() - before)
"""


@pytest.mark.slow
def test_a_busy_machine():
    """10 tokens a second on a machine that has other work, where a quiet one makes 400: each
    operator's threads waited for the one whose core was taken away. While they wait they spin, so
    their processor time tells, which depends less than the speed on what else runs here."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}

    def processor_seconds(threads):
        command = [sys.executable, "-c", TEXT, threads]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
        return float(done.stdout)

    loop = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(loop) for _ in range(2 * len(os.sched_getaffinity(0)))]
    try:
        by_default = processor_seconds("")
        with_one = processor_seconds("1")
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert by_default < 2 * with_one, (by_default, with_one)


@pytest.mark.parametrize("variable", ["", "GOMP_SPINCOUNT"])
def test_threads_sleep_while_others_are_busy(variable, threads, monkeypatch):
    """Beside one other process a model was 3 to 20 times as slow, as its threads spun for one that
    did not run; or they sleep on an idle machine too; or what the user has set does not count."""
    clock, used = [0.0], [0.0]
    monkeypatch.setattr(machine.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(machine, "others_seconds", lambda: used[0])
    for name in machine.USER_DECIDES:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "9")
    torch.set_num_threads(len(machine.CORES) or 2)
    monkeypatch.setattr(machine, "CORES", {*range(torch.get_num_threads())})
    spinning = machine.Spinning()
    seen = []
    for load in (0.1, 1, 1, 0.6, 0.3, 0.1, 1):
        clock[0] += 1
        used[0] += load
        spinning.adapt()
        seen.append(bool(spinning.end_pool))
        clock[0] += 0.1  # too early to look again
        spinning.adapt()
    busy = [load > 0.5 for load in (0.1, 1, 1, 0.6, 0.3, 0.1, 1)]
    assert seen == ([False] * 7 if variable or threads() == 1 else busy)
    if spinning.end_pool:
        spinning.end_pool.set()


def test_the_load_of_others(tmp_path, monkeypatch):
    """The time of this process, of idle cores or of cores that are not ours counts as others'."""
    (tmp_path / "proc").mkdir()
    ticks = os.sysconf("SC_CLK_TCK")
    lines = ["cpu 9 9 9 9 9 9 9 9 9 9"]
    lines += [f"cpu{i} {7 * ticks} {ticks} 0 99999 99999 0 0 {2 * ticks} 0 0" for i in range(3)]
    (tmp_path / "proc/stat").write_text("\n".join([*lines, "intr 1 2 3", "ctxt 5"]))
    monkeypatch.setattr(machine, "CORES", {"cpu0", "cpu2"})
    monkeypatch.setattr(machine.time, "process_time", lambda: 4.5)
    assert machine.others_seconds(tmp_path) == pytest.approx(2 * 10 - 4.5)
    assert machine.others_seconds(tmp_path / "nothing") == 0
