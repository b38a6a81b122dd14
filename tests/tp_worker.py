"""One rank, for test_tp.py.

`cases FOLDER` runs what FOLDER/cases asks for; each rank writes to FOLDER/found.RANK after each.
`fault RANK WHERE PROGRAM ...` is generate or server, with an exception of that rank's in the middle
of a forward (MLP), of copy_blocks or of start.
"""

import contextlib
import importlib
import io
import json
import os
import re
import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import ways
from conftest import DRAFT

import generate
import model as model_module
import quantize
import tp
from around.fast.compiling import compile_model
from around.folder import load_model
from around.machine import Ranks
from around.settings import SamplingParams
from around.start import ranks as meeting
from paged import Runner

CPU = torch.device("cpu")
PROMPTS = [5, 1, 2, 7, 4], [3], [5, 1, 2, 7, 4, 8, 6] * 3
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=6, ignore_eos=True)
GREEDY = replace(SAMPLED, temperature=0)


def run_interrupted(model, jobs, **options):
    """Press Ctrl-C between a message and what it announces; then run everything once more, as in a
    chat."""
    engine = ways.make(model, **options)
    for _ in range(2):
        requests = [engine.add_request(ids, replace(params, n=3)) for ids, params in jobs]
        with contextlib.suppress(KeyboardInterrupt):
            found = ways.finish(engine, requests)
        engine.reset()
    return found


ROWS = {  # name -> parameters, the way, its options
    "batched": (SAMPLED, ways.run_small, {"seqs": 2, "size": 22}),
    "n = 3": (SAMPLED, ways.run_forked, {}),
    "preempted": (GREEDY, ways.run_preempted, {}),
    "draft": (GREEDY, ways.run_engine, {"speculate": 3}),
    "int8 cache": (GREEDY, ways.run_engine, {"kv_dtype": "int8"}),
    "interrupted": (SAMPLED, run_interrupted, {}),
    "chunks of 7": (SAMPLED, ways.run_small, {"seqs": 1, "size": 7}),
    "prefix cached": (SAMPLED, ways.run_prefix_cached, {}),
}


def run(model, runner, row):
    """Return the tokens of each prompt."""
    params, way, options = ROWS[row]
    counts, send = Counter(), tp.broadcast
    options = {"max_seq_len": 64, "runner": runner} | options
    if "speculate" in options:
        options["draft"] = load_model(DRAFT, dtype=torch.float32)

    def counting(message=None):
        send(message)
        counts[message[0]] += 1
        if way is run_interrupted and message[0] == "copy_blocks" and counts["copy_blocks"] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with mock.patch.object(tp, "broadcast", counting):
        found = way(model, [(ids, params) for ids in PROMPTS], **options)
    if runner is tp.Leader:  # else the row is not what its name says
        assert (counts["copy_blocks"] > 0) == (way in (ways.run_forked, run_interrupted))
    return [[token.id for token in tokens] for tokens in found]


def captured(argv):
    """Return exit status, stdout and stderr of a command line, less the seconds of the
    statistics."""
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.multiple(sys, stdout=out, stderr=err, __stderr__=err):
        code = generate.main([*argv])
    return [code, out.getvalue(), re.sub(r"\d+\.\d+", "", err.getvalue())]


def join():
    """Do what begin.launch does: alone, there is nobody to join."""
    return meeting.join(CPU) if "RANK" in os.environ else contextlib.nullcontext(Ranks(CPU))


def cases(models, commands, compiled=()):
    """Yield each case's name and what came of it, on one rank or alone: each row of each model, and
    each command line."""
    for folder, mode, rows in models:
        with join() as ranks:
            model = load_model(folder, "cpu", torch.float32, ranks.shard)
            if mode:
                quantize.quantize_model(model, mode, 8)
            if compiled:
                compile_model(model, None)
            if ranks.rank:
                tp.follow(model)
            for row in [] if ranks.rank else rows:
                yield f"{folder}, {mode}, {row}", run(model, ranks.runner or Runner, row)
    for argv in commands:
        yield " ".join(argv), captured((*argv, *compiled))


def write_cases(folder):
    folder, found = Path(folder), {}
    # What follows joins again and again, so that each time an end is sent.
    nothing = dict.fromkeys(("init_process_group", "destroy_process_group"), mock.DEFAULT)

    def note(name, result):
        found[name] = result
        (folder / f"found.{os.environ['RANK']}").write_text(json.dumps(found))

    with meeting.join(CPU), mock.patch.multiple(tp.dist, **nothing):
        for case in cases(*json.loads((folder / "cases").read_text())):
            note(*case)
    tasks = Path("/proc/self/task").glob("*/comm")
    note("threads", " ".join(task.read_text().strip() for task in tasks))


def fault(rank, where, program, *argv):
    def failing(real, when):
        calls = Counter()

        def call(*args):
            calls["all"] += 1
            if calls["all"] == when:
                raise MemoryError("a fault for the test")
            return real(*args)

        return call

    if os.environ["RANK"] == rank:
        match where:
            case "MLP":  # of the second of six layers
                model_module.MLP.forward = failing(model_module.MLP.forward, 56)
            case "copy_blocks":
                Runner.copy_blocks = failing(Runner.copy_blocks, 1)
            case "start":  # rank 0 has measured blocks with one before
                Runner.__init__ = failing(Runner.__init__, 1 if int(rank) else 2)
    return importlib.import_module(program).main([*argv])


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit({"cases": write_cases, "fault": fault}[sys.argv[1]](*sys.argv[2:]))
