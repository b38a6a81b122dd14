"""tools/gpu_check.py and on_device.py on the CPU: what they run, and what they do where a part
breaks."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import on_device
import pytest
import torch
import ways
from conftest import ROOT
from pretend import Gpu

import model
import paged
from tools import gpu_check
from tools.gpu_check import Part

TINY = ("--device", "cpu", "--tiny")
# A module that is run with arguments, as the parts are; what it prints, and how it ends.
SCRIPT = """
import json, os, sys, time
rows, end = json.loads(sys.argv[2]), sys.argv[3]
for row in rows:
    print(json.dumps(row), flush=True)
print("a last word", file=sys.stderr, flush=True)
if end == "sleep":
    time.sleep(60)
os.kill(os.getpid(), 9) if end == "crash" else sys.exit(int(end))
"""
GOOD, BAD = {"row": "one", "fault": ""}, {"row": "two", "fault": "other tokens"}
ALMOST = {"row": "three", "fault": "", "near": 0.1, "off": 0.05}
FIGURES = dict(of_read_limit=[0.4] * 3, of_gemm_peak=[0.3] * 3, first_token_s=[1.0] * 3,
    vllm_times=[2.5] * 3, read_limit_gb_s=[4000.0] * 3)  # fmt: skip
LONG, SHORT = dict(prefill_tok_s=[2000.0] * 3), dict(prefill_tok_s=[10.0] * 3)
MEASURED = {"hardware": "H", "runs": {"long": FIGURES | LONG, "short": FIGURES | SHORT}}


@pytest.fixture
def table(monkeypatch, tmp_path):
    """Return a function that runs a table of parts, and returns the exit status and the records."""
    (tmp_path / "fake_part.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(made, *flags):
        machine = {"machine": fake([{"row": "Device (1)", "fault": ""}])}
        monkeypatch.setattr(gpu_check, "parts", lambda args, found: machine | made)
        status = gpu_check.main([*TINY, "--out", str(tmp_path / "out"), *flags])
        files = sorted((tmp_path / "out").glob("*.json"))
        return status, {file.stem: json.loads(file.read_text()) for file in files}

    return run


def fake(rows, end=0, limit=30):
    return Part(["-m", "fake_part", "latency", json.dumps(rows), str(end)], limit)


BROKEN = {  # a part, and what is said of it
    "other tokens": (fake([GOOD, BAD]), "failed", "1 of 2 as they should be", "two: other tokens"),
    "an error": (fake([GOOD], 3), "failed", "exit status 3; 1 of 1", "a last word"),
    "a crash": (fake([GOOD], "crash"), "failed", "exit status -9; 1 of 1", "a last word"),
    "late": (fake([BAD, {"row": "four", "late": True}]), "failed", "0 of 2", "two: other tokens"),
    "no row": (fake([]), "failed", "exit status 0; 0 of 0", "a last word"),
    "no end": (fake([GOOD], "sleep", 4), "failed", "did not end within 4 s; 1 of 1", "a last word"),
    "absent": (Part(["none"], 9, "there is one GPU"), "skipped", "there is one GPU", ""),
}


def test_a_broken_part_stops_nothing(table, capsys):
    """The check ends with the first part that fails, forgets what came before a crash, or reports
    success."""
    made = {name: part for name, (part, *_) in BROKEN.items()}
    made["last"] = fake([ALMOST, {"row": "four", "late": True}])
    status, records = table(made)
    out = capsys.readouterr().out
    assert status == 1
    for name, (_, result, text, line) in BROKEN.items():
        assert (records[name]["status"], records[name]["hardware"]) == (result, "Device (1)")
        assert text in records[name]["text"] and text in out
        assert line in "\n".join(records[name]["lines"]) and f"    {line}" in out
    assert records["a crash"]["runs"] == [GOOD]
    assert records["last"]["status"] == "passed"
    text = "1 of 2 as they should be, 1 had no time; off by 5.0e-02 at most, 0.1 is allowed"
    assert records["last"]["text"] == text
    *_, passed, failed, skipped, slow, _ = out.splitlines()
    assert passed == "passed: machine, last" and skipped == "skipped: absent"
    assert failed == f"failed: {', '.join([*BROKEN][:-1])}" and slow == "slow: nothing"


def test_what_no_longer_fits_is_skipped(table, capsys, monkeypatch):
    """A part begins with no time left, or is blamed for the time that others took."""
    made = {"long": fake([GOOD], "sleep", 100), "late": fake([GOOD])}
    monkeypatch.setattr(gpu_check, "TOO_SHORT", 1)
    status, records = table(made, "--minutes", "0.05")
    assert status == 0
    assert records["long"]["text"] == "the time was up, after 1 ways"
    assert records["late"]["text"].startswith("no time is left")
    assert "skipped: long, late" in capsys.readouterr().out


def test_slow_is_said(table, capsys):
    """A row at less than half of a limit is not named; a short prompt is called slow."""
    status, records = table({"speed": fake([MEASURED])}, "--only", "speed")
    out = capsys.readouterr().out
    assert status == 0 and records["speed"]["runs"] == MEASURED["runs"]
    assert "    long: of the read limit 0.4, prefill, tok/s 2,000, prefill MFU 0.3, " in out
    assert "read limit, GB/s 4,000" in out
    slow = [line for line in out.splitlines() if line.startswith("    speed: ")]
    assert slow == [
        "    speed: long: 0.40 of read limit", "    speed: long: 0.30 of gemm peak",
        "    speed: long: vllm is 2.5 times as fast", "    speed: short: 0.40 of read limit",
        "    speed: short: vllm is 2.5 times as fast",
    ]  # fmt: skip


def test_errors_of_use(capsys):
    """A traceback; the check begins without a GPU."""
    if not torch.cuda.is_available():
        assert gpu_check.main([]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "no cuda device here; --device cpu --tiny rehearses" in line
    assert gpu_check.main(["--device", "cpu", "--only", "nothing"]) == 2
    assert "--only nothing: there is no such part" in capsys.readouterr().err


def test_every_check_is_run():
    """A check stands in one of the two files alone."""
    assert [*gpu_check.CHECKS] == [*on_device.CHECKS]


def test_what_fits():
    """Keys and values of the batches are larger than the memory."""
    shapes = gpu_check.bench.SHAPES
    assert gpu_check.that_fit(shapes["7b"], None) == [1, 8, 32, 256]
    assert gpu_check.that_fit(shapes["7b"], 141) == [1, 8, 32, 256]
    assert gpu_check.that_fit(shapes["7b"], 40) == [1, 8, 32]
    assert gpu_check.that_fit(shapes["7b"], 16) == []


def run(*flags, **env):
    words = [sys.executable, "-m", "tools.gpu_check", *TINY, *map(str, flags)]
    return subprocess.Popen(
        words, cwd=ROOT, env=os.environ | env, stdout=subprocess.PIPE, text=True
    )


def test_interrupted(tmp_path):
    """Ctrl-C leaves a traceback or a process, or the list is missing."""
    process = run("--out", tmp_path, "--only", "tokens-trained")
    while not (tmp_path / "machine.json").exists():
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted" in out and "passed: machine\n" in out


def own_key_hidden(config, q_pos, k_pos):
    return model.Masks(config, (q_pos - 1).clamp(min=0), k_pos)


def last_block_of_another(pool, group, dtype):
    table = torch.cat((group.table[:, :-1], group.table[:, -1:].roll(1, 0)), 1)
    flat_table = group.flat_table + (table - group.table)[:, None]
    return side_by_side(pool, replace(group, flat_table=flat_table, span=None), dtype)


side_by_side = paged.side_by_side
FAULTS = [(paged, "visible", own_key_hidden), (paged, "side_by_side", last_block_of_another)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("owner", "name", "broken"), FAULTS)
def test_faults_are_found(monkeypatch, dtype, owner, name, broken):
    """The tolerance lets a fault through."""
    row = ("trained", dtype, "paged, batched", "plain", "cpu", False)
    assert on_device.try_way(*row)["fault"] == ""
    monkeypatch.setattr(owner, name, broken)
    fault = on_device.try_way(*row)["fault"]
    assert "off by" in fault
    assert ("is not that of" in fault) == (dtype == "float32")


@pytest.mark.parametrize(("path", "kind"), [
    ("no cache", "plain"), ("static cache", "int8 weights"), ("paged, batched", "draft"),
    ("prompts scored", "n-gram"), ("preempted", "plain"), ("n = 3", "int8 cache"),
])  # fmt: skip
def test_on_a_gpu(path, kind):
    """A way, or its comparison, mixes tensors of the CPU and the GPU."""
    with Gpu() as gpu:
        row = on_device.try_way("trained", "float32", path, kind, "cuda", True)
    assert row["fault"] == "" and gpu.reads


def test_forms_on_a_gpu():
    """A missing operator ends the checks of the other forms."""
    with Gpu():
        rows = [*on_device.packed("cuda", True)]
    assert len(rows) == 6
    for row in rows:
        is_there = "int4" not in row["row"]
        start = "" if is_there else "NotImplementedError at "
        assert row["fault"].startswith(start) and bool(row["fault"]) != is_there


def test_compiling_has_an_end(monkeypatch):
    """A way begins shortly before its part is ended, and makes it fail."""
    times = iter([0, 1, 99, *[101] * 99])
    monkeypatch.setattr(on_device.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(on_device, "try_way", lambda *row: {"row": row, "fault": ""})
    rows = [*on_device.compiled("cuda", False)]
    assert [row.get("late") for row in rows] == [None] * 2 + [True] * (len(on_device.COMPILED) - 2)


@pytest.mark.parametrize("error", ["CUDA error: an illegal address", "no such thing"])
def test_errors_of_a_way(monkeypatch, capsys, error):
    """A way that raises ends the next ones; a poisoned process goes on."""

    def fail(*_, **__):
        raise RuntimeError(error)

    monkeypatch.setitem(ways.PATHS, "no cache", fail)
    monkeypatch.setattr(ways, "rows_of", lambda case: [("no cache", "plain"), ("n = 3", "plain")])
    status = on_device.main(["tokens-trained", *TINY])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert re.fullmatch(rf"RuntimeError at test_gpu_check.py:\d+: {error}", rows[0]["fault"])
    assert (status, len(rows)) == ((1, 1) if "CUDA" in error else (0, 4))


def test_a_wrong_form_is_found(monkeypatch):
    """A packed form is compared with itself."""
    assert not any(row["fault"] for row in on_device.packed("cpu", True))
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: x @ self.weight.mT * 1.1)
    monkeypatch.setattr(on_device, "form_of", lambda linear: None)
    rows = [row for row in on_device.packed("cpu", True) if "plain" in row["row"]]
    assert len(rows) == 2 and all(row["fault"] for row in rows)


@pytest.mark.slow
def test_rehearsal(tmp_path):
    """A part does not run, on the CPU with tiny models. Three of them run what `tokens-trained`
    does on other models, as test_equivalence.py does here, and are left out."""
    before = os.times().children_user
    parts = [*gpu_check.parts(gpu_check.parse_args([*TINY]), {})]
    parts = [each for each in parts if not each.startswith("tokens") or each == "tokens-trained"]
    process = run("--out", tmp_path, "--only", *parts, OMP_NUM_THREADS="1")
    out, _ = process.communicate(timeout=1000)
    assert process.returncode == 0, out
    assert "failed: nothing\nskipped: throughput-graphs\n" in out  # it needs CUDA
    names = {file.stem for file in tmp_path.glob("*.json")}
    assert names == {*parts} and len(names) == 12
    seconds = os.times().children_user - before  # of processors, whatever else they do
    assert seconds < 400, "it is to take less than two minutes of a free machine"
