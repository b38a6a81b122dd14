"""One rank of the matrix in test_tp.py: torchrun starts it, rank 0 writes what came out.

    torchrun --standalone --nproc-per-node 2 tests/tp_worker.py JOBS.json OUT.json

One launch runs every row of every model. `tp_worker.py fault RANK ...` is generate.py with an
exception in the middle of one rank's forward; `tp_worker.py threads ...` says at its end what
threads are left.
"""

import json
import os
import signal
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import test_equivalence as paths
import torch
from conftest import DRAFT

import generate
import model as model_module
import tp
from kv_cache import Row, StaticCache
from model import load_model
from quantize import load, quantize_model
from runner import Runner
from sampling import SamplingParams, Sequence
from scheduler import Engine
from speculative import DraftModel, NGram, Proposer
from tp import Leader

SETTINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=8, ignore_eos=True),
}
SENT = Counter()


def alone(model, prompts, params, chunk=512, runner=Leader, dtype=torch.float32, guess=Proposer):
    """One prompt after another through generate()."""
    results = []
    for prompt in prompts:
        sequence = Sequence(prompt, params, model.config)
        cache = StaticCache(model.config, 1, sequence.max_len, dtype)
        steps = generate.generate(model, sequence, cache, chunk, guess(), runner)
        results.append([token.id for token in steps])
    return results


def draft_alone(model, prompts, params):
    """The draft is whole, on this rank alone: nobody follows it."""
    draft = load_model(DRAFT, dtype=torch.float32)
    cache = StaticCache(draft.config, 1, 256, torch.float32)
    guess = partial(DraftModel, Runner(draft, cache), 3, model.config.vocab_size)
    return alone(model, prompts, params, guess=guess)


def drafted(model, prompts, params):
    draft = load_model(DRAFT, dtype=torch.float32)
    return paths.run_engine(model, prompts, params, draft=draft, speculate=3, runner=Leader)


def compiled(model, prompts, params):
    Leader(model, StaticCache(model.config, 1, 512, torch.float32)).compile()
    return alone(model, prompts, params, chunk=7)


def compiled_engine(model, prompts, params):
    engine = Engine(model, block_size=4, max_seq_len=128, compile=True, runner=Leader)
    return paths.finish(engine, [engine.add_request(prompt, params) for prompt in prompts])


def press_after(op):
    """Ctrl-C between the two broadcasts of the next `op`."""
    real = tp.dist.broadcast

    def broadcast(tensor, source):
        real(tensor, source)
        if len(tensor) == 5 and tensor[0] == op:
            tp.dist.broadcast = real
            os.kill(os.getpid(), signal.SIGINT)

    tp.dist.broadcast = broadcast


def interrupted(model, prompts, params):
    """Ctrl-C in the middle of a message; then everything once more, as in a chat."""
    press_after(tp.RUN)
    try:
        alone(model, prompts, params)
    except KeyboardInterrupt:
        return alone(model, prompts, params)
    return "Ctrl-C was lost"


def interrupted_copy(model, prompts, params):
    engine = Engine(model, block_size=4, runner=Leader)
    press_after(tp.COPY)
    engine.add_request(prompts[-1], replace(params, n=3))
    try:
        while engine.has_work:
            engine.step()
    except KeyboardInterrupt:
        engine.reset()
        return paths.finish(engine, [engine.add_request(prompt, params) for prompt in prompts])
    return "Ctrl-C was lost"


@torch.no_grad()
def logits(model, prompts, params, runner=Leader, dtype=torch.float32):
    """Of every token of every prompt, the second half run as a chunk of its own."""
    found = []
    for prompt in prompts:
        forward = runner(model, StaticCache(model.config, 1, len(prompt), dtype))
        for ids in (range(len(prompt) // 2), range(len(prompt) // 2, len(prompt))):
            if ids:
                row = Row([], ids.start, ids.stop)
                found += forward([row], row.of(prompt), [*range(len(ids))]).tolist()
    return found


def engine(run, **options):
    return lambda *args: run(*args, runner=Leader, **options)


ROWS = {  # name -> setting, how to run it
    "greedy": ("greedy", alone),
    "sampled": ("sampled", alone),
    "chunks of 7": ("sampled", partial(alone, chunk=7)),
    "paged": ("sampled", engine(paths.run_engine, max_num_seqs=2, max_num_batched_tokens=24)),
    "preempted": ("greedy", engine(paths.run_preempted)),
    "n = 3": ("sampled", engine(paths.run_forked)),
    "prefix cached": ("sampled", engine(paths.run_prefix_cached)),
    "draft": ("greedy", drafted),
    "draft, alone": ("greedy", draft_alone),
    "n-gram": ("greedy", engine(paths.run_engine, speculate=3)),
    "n-gram, alone": ("greedy", partial(alone, guess=partial(NGram, 3))),
    "int8 cache": ("greedy", engine(paths.run_engine, kv_dtype=torch.int8)),
    "int8 cache, alone": ("greedy", partial(alone, dtype=torch.int8)),
    "logits": ("greedy", logits),
    "int8 cache, logits": ("greedy", partial(logits, dtype=torch.int8)),
    "interrupted": ("sampled", interrupted),
    "interrupted copy": ("greedy", interrupted_copy),
    "compiled": ("sampled", compiled),  # changes the model: last
    "paged, compiled": ("sampled", compiled_engine),
}


def run(jobs, out):
    """Run each job's rows. Written after each, for whoever must find out where it hung."""
    send, results = tp.send, {}

    def counting(op, *lists):
        SENT[op] += 1
        send(op, *lists)

    tp.send = counting
    with tp.join(torch.device("cpu")) as ranks:
        for name, job in jobs.items():
            model = load(job["folder"], "cpu", torch.float32, ranks.shard)
            if job["mode"]:
                quantize_model(model, job["mode"], job["group_size"])
            if ranks.rank:
                tp.follow(model)
                continue
            for row in job["rows"]:
                setting, way = ROWS[row]
                SENT.clear()
                try:
                    found = way(model, job["prompts"], SETTINGS[setting])
                except Exception as error:
                    found = repr(error)
                results[f"{name}, {row}"] = {"found": found, "sent": dict(SENT)}
                out.write_text(json.dumps(results))
            tp.send(tp.STOP)
        if ranks.rank:
            tp.receive()  # join's STOP


def fault(rank, argv):
    real, calls = model_module.MLP.forward, 0

    def forward(self, x):
        nonlocal calls
        calls += 1
        if calls == 60 and tp.dist.get_rank() == rank:
            raise IndexError("a fault for the test")
        return real(self, x)

    model_module.MLP.forward = forward
    return generate.main(argv)


def threads(argv):
    status = generate.main(argv)
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    print("threads:", *names, file=sys.__stderr__)
    return status


if __name__ == "__main__":
    if sys.argv[1] == "threads":
        sys.exit(threads(sys.argv[2:]))
    if sys.argv[1] == "fault":
        sys.exit(fault(int(sys.argv[2]), sys.argv[3:]))
    torch.set_num_threads(1)
    run(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
