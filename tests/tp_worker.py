"""One rank, for test_tp.py.

tp_worker.py cases FOLDER      what FOLDER/cases asks for; each rank writes to FOLDER/found.RANK
                               after each case, for whoever must find where it hung
tp_worker.py fault RANK WHERE PROGRAM ...
                               generate or server, with an exception of that rank's in the middle
                               of a forward (MLP), of copy_blocks or of start
tp_worker.py load ...          generate.py, with a model that takes a minute to load
"""

import contextlib
import importlib
import io
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from conftest import DRAFT

import generate
import model as model_module
import quantize
import tp
from around.fast.compiling import compile_model
from around.folder.weights import load_model
from around.machine import Ranks
from around.settings import SamplingParams
from around.start import begin as llm
from around.start import ranks as meeting
from paged import Runner
from scheduler import Engine
from speculative import DraftModel

CPU = torch.device("cpu")
PROMPTS = [5, 1, 2, 7, 4], [3], [5, 1, 2, 7, 4, 8, 6] * 3
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=6, ignore_eos=True)
ROWS = {  # name -> parameters, run's options
    "batched": (SAMPLED, {"max_num_seqs": 2, "max_num_batched_tokens": 24}),
    "n = 3": (SAMPLED, {"n": 3}),
    "preempted": (GREEDY, {"num_blocks": 9}),
    "draft": (GREEDY, {"guesses": 3}),
    "int8 cache": (GREEDY, {"kv_dtype": "int8"}),
    # Ctrl-C between a message and what it announces; then everything once more, as in a chat.
    "interrupted": (SAMPLED, {"times": 2, "press": "copy_blocks", "n": 3}),
    "chunks of 7": (SAMPLED, {"max_num_seqs": 1, "max_num_batched_tokens": 7}),
    "prefix cached": (SAMPLED, {"times": 2}),
}


def run(model, runner, params, n=1, times=1, press=None, guesses=0, **options):
    """Returns the tokens of the last time."""
    counts, send = Counter(), tp.broadcast
    options = {"block_size": 4, "num_blocks": 99, "max_seq_len": 64} | options
    proposer = None
    if guesses:
        draft = load_model(DRAFT, dtype=torch.float32)
        proposer = DraftModel(draft, guesses, model.config.vocab_size)

    def counting(message=None):
        send(message)
        counts[message[0]] += 1
        if message[0] == press and counts[press] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with mock.patch.object(tp, "broadcast", counting):
        engine = Engine(model, runner=runner, proposer=proposer, **options)
        for _ in range(times):
            requests = [engine.add_request(ids, replace(params, n=n)) for ids in PROMPTS]
            try:
                while engine.queue:
                    engine.step()
            except KeyboardInterrupt:
                counts["interrupted"] += 1
                engine.reset()
    # Else the row is not what its name says.
    assert not engine.proposer.k or engine.proposer.offered[0]
    assert engine.pool.num_blocks == 99 or engine.stats["num_preemptions"]
    if runner is tp.Leader:
        assert (counts["copy_blocks"] > 0) == (n > 1) and counts["interrupted"] == bool(press)
    return [[each.output_ids for each in request.outputs] for request in requests]


def captured(argv):
    """Exit status, stdout and stderr of a command line, less the seconds of the statistics."""
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.multiple(sys, stdout=out, stderr=err, __stderr__=err):
        code = generate.main([*argv])
    return [code, out.getvalue(), re.sub(r"\d+\.\d+", "", err.getvalue())]


def join():
    """What llm.launch does: alone, there is nobody to join."""
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
                params, options = ROWS[row]
                found = run(model, ranks.runner or Runner, params, **options)
                yield f"{folder}, {mode}, {row}", found
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


def load(*argv):
    llm.load_model = lambda *args: print("loading", flush=True) or time.sleep(60)
    return generate.main([*argv])


if __name__ == "__main__":
    torch.set_num_threads(1)
    modes = {"cases": write_cases, "fault": fault, "load": load}
    sys.exit(modes[sys.argv[1]](*sys.argv[2:]))
