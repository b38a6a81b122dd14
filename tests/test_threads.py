"""How many threads compute, and how they wait for each other."""

import os

import pytest
import torch
from conftest import SHAKESPEARE

from around import machine
from around.fast import threads as module
from around.start import begin
from llm import LLM


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.get_num_threads
    torch.set_num_threads(before)


def test_the_rule(threads, monkeypatch, tmp_path):
    """Ask for threads by flags, a variable and models of several sizes, and count them. Catches:
    two threads over a small model, which make 10 tokens a second in place of 400 on a busy machine;
    a rule that overrides the user, or that nothing calls; one thread for a large model; many for a
    tied one of 20 MB; this process's time counted as others'."""
    monkeypatch.setattr(machine, "ALL_THREADS", 6)
    monkeypatch.setattr(machine, "allowed_threads", lambda: 5)
    for asked, variable, weights, expected in (
        (None, "", machine.SMALL - 1, 1), (None, "", machine.SMALL, 5),
        (None, "6", machine.SMALL - 1, 6), (3, "6", 1, 3), (3, "", 2**40, 3),
    ):  # fmt: skip
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if variable:
            monkeypatch.setenv("OMP_NUM_THREADS", variable)
        torch.set_num_threads(2)
        machine.use_threads(asked, weights)
        assert threads() == expected, (asked, variable, weights)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    counted, use_threads = [], machine.use_threads
    monkeypatch.setattr(begin, "use_threads", lambda *a: counted.append(a) or use_threads(*a))
    for options, expected in (({}, 1), ({"plain": True}, 1), ({"threads": 2, "plain": True}, 2)):
        torch.set_num_threads(3)
        model = LLM(SHAKESPEARE, num_blocks=4, device="cpu", **options).engine.model
        assert threads() == expected
    assert model.config.tie_word_embeddings
    assert counted[-1] == (2, sum(each.nbytes for each in model.parameters()))
    (tmp_path / "proc").mkdir()
    ticks = os.sysconf("SC_CLK_TCK")
    lines = ["cpu 9 9 9 9 9 9 9 9 9 9"]
    lines += [f"cpu{i} {7 * ticks} {ticks} 0 99999 99999 0 0 {2 * ticks} 0 0" for i in range(3)]
    (tmp_path / "proc/stat").write_text("\n".join([*lines, "intr 1 2 3", "ctxt 5"]))
    monkeypatch.setattr(module, "CORES", {"cpu0", "cpu2"})
    monkeypatch.setattr(module.time, "process_time", lambda: 4.5)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert module.clocks()[1:] == pytest.approx((4.5, 2 * 10 - 4.5))
    monkeypatch.setattr(machine, "ROOT", tmp_path / "nothing")
    assert len(module.clocks()) == 3  # no error


def test_cpu_quotas(tmp_path, monkeypatch):
    """Read the number of threads from made-up files of control groups. Catches: a container of one
    CPU on a machine of many, where as many threads used up its quota at once and stood still for
    the rest of each period; the quota of a group around this one overlooked."""
    monkeypatch.setattr(machine, "ALL_THREADS", 6)
    for i, (expected, line, files) in enumerate((
        (6, "0::/", {}), (6, "0::/a", {"a/cpu.max": "max 100000\n"}),
        (2, "0::/a", {"cpu.max": "200000 100000\n"}), (1, "0::/", {"cpu.max": "50000 100000\n"}),
        (2, "0::/a/b", {"a/b/cpu.max": "450000 100000", "a/cpu.max": "250000 100000"}),
        (6, "0::/a", {"b/cpu.max": "100000 100000"}), (6, "0::/a", {"a/cpu.max": "900000 100000"}),
    )):  # fmt: skip
        groups = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
        for name, text in (groups | {"proc/self/cgroup": line + "\n"}).items():
            (tmp_path / str(i) / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / str(i) / name).write_text(text)
        monkeypatch.setattr(machine, "ROOT", tmp_path / str(i))
        assert machine.allowed_threads() == expected, (line, files)
    monkeypatch.setattr(machine, "ROOT", tmp_path)  # no Linux
    assert machine.allowed_threads() == 6


def test_threads_sleep_while_others_are_busy(threads, monkeypatch):
    """Play loads of the machine, and check when the threads spin and when they sleep. Catches:
    threads that spin for one that does not run, so that a model is 3 to 20 times as slow beside one
    other process; threads that sleep on an idle machine too."""
    clock, used, own = [0.0], [0.0], [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(module, "clocks", lambda: (clock[0], own[0], used[0]))
    torch.set_num_threads(len(module.CORES) or 2)
    monkeypatch.setattr(module, "CORES", {*range(torch.get_num_threads())})
    spinning = module.Spinning()
    never = threads() == 1
    # Others' cores, this process's, and whether its threads sleep then. While it is idle, as a
    # server between two requests, others' work (a build, another engine) says nothing.
    for load, work, sleeps in (
        (0.1, 1, False), (1, 1, True), (1, 2, True), (0.6, 0.6, True), (0.3, 1, False),
        (2, 0, False), (2, 0.4, False), (0.1, 1, False), (1, 1, True), (0.1, 0, True),
    ):  # fmt: skip
        clock[0] += 1
        used[0] += load
        own[0] += work
        spinning.adapt()
        assert bool(spinning.end_pool) == (sleeps and not never), (load, work)
        clock[0] += 0.1  # too early to look again
        spinning.adapt()
    if spinning.end_pool:
        spinning.end_pool.set()
