"""Tensor parallelism: what each rank reads, the tokens of all together, and how they end.

What a share computes is tested in this process, a thread for each rank, and what is sent by playing
it back. Ranks proper are processes: one launch runs a table of paths (tp_worker.py).
"""

import contextlib
import ctypes
import ctypes.util
import functools
import io
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_model
import torch
import tp_worker
from conftest import DRAFT, ROOT, SHAKESPEARE
from safetensors.torch import load_file, save_file
from serving import COMPLETIONS, Client
from test_gptq import other_folder
from tiny import tiny_folder

import paged
import quantize
import tp
from around.folder import load_model, named_tensors, weights
from around.settings import InputError
from around.start import launch
from around.start import ranks as meeting
from paged import Row, Runner
from scheduler import Engine

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PROGRAM, WORKER = ROOT / "generate.py", ROOT / "tests" / "tp_worker.py"

FAMILIES = {
    "plain": {}, "square": {"intermediate_size": 64},
    "one kv head": {  # norms on q and k, windows, words that 2 and 4 do not divide
        "model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 16,
        "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "vocab_size": 129},
    "two kv heads": {  # and every bias there is
        "num_attention_heads": 8, "attention_bias": True, "mlp_bias": True, "vocab_size": 127,
        "head_dim": 16},
    "nine words": {  # tied; of 4 ranks the last has nothing of the vocabulary
        "model_type": "mistral", "num_key_value_heads": 4, "sliding_window": 6,
        "vocab_size": 9, "tie_word_embeddings": True},
    "experts": {
        "model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 6,
        "num_experts_per_tok": 3, "moe_intermediate_size": 64},
}  # fmt: skip
QUANTISED = {
    "bundled int4": 64, "two kv heads int8": -1, "two kv heads int4": 8, "plain int4": 32,
    "square int4": 64, "experts int4": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    torch.manual_seed(1)
    root = tmp_path_factory.mktemp("checkpoints")
    made = {name: tiny_folder(root / name, **changes) for name, changes in FAMILIES.items()}
    for name in ("gemma2", "gemma3", "granite-tied-biases", "smollm3", "phi3", "olmo2"):
        made[name] = test_model.build(name, root / name).folder
    made["bundled"] = SHAKESPEARE
    for name, size in QUANTISED.items():
        plain, _, mode = name.rpartition(" ")
        kind = {"quant_method": "kilolm", "bits": quantize.MODES[mode], "group_size": size}
        config = json.loads((made[plain] / "config.json").read_text())
        model = quantize.quantize_model(load_model(made[plain]), mode, size)
        made[name] = root / name
        made[name].mkdir()
        (made[name] / "config.json").write_text(json.dumps(config | {"quantization_config": kind}))
        tensors = {name: tensor.clone() for name, tensor in named_tensors(model)}
        save_file(tensors, made[name] / "model.safetensors")
    for method in ("gptq", "awq"):
        (root / method).mkdir()
        made[method] = other_folder(root / method, method, group_size=8)[0]
    return made


def share_of(folder, rank, ranks, dtype=torch.float32):
    shard = functools.partial(tp.shard, rank=rank, world_size=ranks)
    return load_model(folder, "cpu", dtype, shard)


def at_once(ranks, work):
    """Run work(rank) for every rank, in a thread of its own, with exchanges between them."""
    barrier, parts, here = threading.Barrier(ranks, timeout=60), [None] * ranks, threading.local()

    def exchange(x):
        parts[here.rank] = x
        barrier.wait()
        found = [*parts]
        barrier.wait()
        return found

    def thread(rank):
        here.rank = rank
        return work(rank)

    ops = {"wait_tensor": lambda x: x, "all_reduce": lambda x, *_: sum(exchange(x)),
           "all_gather_into_tensor": lambda x, *_: torch.cat(exchange(x))}  # fmt: skip
    with pytest.MonkeyPatch.context() as m, ThreadPoolExecutor(ranks) as pool:
        m.setattr(tp, "_ops", SimpleNamespace(**ops))
        m.setattr(tp.dist, "get_world_size", lambda: ranks)
        return [*pool.map(thread, range(ranks))]


def logits(model, mode, kv_dtype):
    """Return the logits of 14 tokens, the second half as a chunk of its own."""
    if mode:
        quantize.quantize_model(model, mode, 8)
    generator, runner = torch.Generator().manual_seed(3), Runner(model, 4, 4, kv_dtype)
    ids = torch.randint(model.config.vocab_size, (14,), generator=generator).tolist()
    return torch.cat([runner.forward([Row([2, 0, 3, 1], i, ids[i : i + 7], 7)]) for i in (0, 7)])


def distance(a, b):
    return (a - b).square().mean().sqrt()


@pytest.mark.parametrize(
    ("mode", "kv_dtype", "names"),
    [
        ("", "auto", ["one kv head", "two kv heads", "nine words", "experts", "experts int4",
                      "two kv heads int4", "gemma2", "gemma3", "phi3", "granite-tied-biases",
                      "smollm3", "gptq", "awq", "two kv heads int8"]),
        ("int4", "auto", ["two kv heads", "experts", "nine words"]),
        ("int8", "auto", ["two kv heads", "nine words"]), ("", "int8", ["one kv head"]),
    ],
)  # fmt: skip
def test_same_logits(folders, mode, kv_dtype, names):
    """Run the shares of a model in threads, and compare the logits with the whole model's. Catches:
    a slice a head too early; keys of another head; a window or norm lost; a bias added by each
    rank; words in another rank's order; scales of other channels; a tied head in 4 bits. int8
    rounds otherwise, and may err no more."""
    for name in names:
        load = functools.partial(load_model, folders[name], "cpu", torch.float32)
        exact = want = logits(load(), "", "auto")
        if mode or kv_dtype != "auto":
            want = logits(load(), mode, kv_dtype)
        for ranks in (2, 4) if name in {*FAMILIES, *QUANTISED} else (2,):
            share = functools.partial(share_of, folders[name], ranks=ranks)
            for found in at_once(ranks, lambda rank: logits(share(rank), mode, kv_dtype)):  # noqa: B023
                row = f"{name} on {ranks} ranks"
                if mode == "int8":
                    worse = 1.1 * distance(want, exact)
                    assert 0 < distance(found, exact) < worse < 0.05 * exact.std(), row
                elif kv_dtype == "int8":
                    assert distance(found, want) < 0.1 * distance(want, exact), row
                else:
                    assert torch.allclose(found, want, rtol=1e-4, atol=1e-4), row


def kib(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")
def test_peak_memory_of_loading(folders, tmp_path):
    """Load a share and a whole model of 130 MB, and measure the peak memory. Catches: a state dict
    beside the model; a rank that first builds or reads the whole model, and then cuts it. A rank
    may hold its share and the embedding, and that once more as it is read; a tenth and 8 MB are for
    pages."""
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}
    sizes |= {"vocab_size": 16384, "intermediate_size": 4096, "num_hidden_layers": 2}
    folder = tiny_folder(tmp_path, torch_dtype="bfloat16", **sizes)
    size = (folder / "model.safetensors").stat().st_size
    share_of(folders["plain"], 3, 4)  # brings in what PyTorch needs once, 80 MB
    for ranks in (4, 1):
        ctypes.CDLL(None).malloc_trim(0)  # or what was freed before would be used again
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the most so far, begins anew
        before = kib("VmRSS")
        model = load_model(folder) if ranks == 1 else share_of(folder, 3, 4, None)
        table = model.embed_tokens.weight.nbytes
        share = (size - table) / ranks + table
        assert sum(p.nbytes for p in model.parameters()) < 1.01 * share
        assert 1024 * (kib("VmHWM") - before) < 1.1 * (share + table) + 8e6
        del model


def refused(folder, ranks, message):
    """Check that loading fails on each rank, before any weight is read."""
    real, unread = weights.locate_tensors, lambda: pytest.fail("a weight was read")
    with pytest.MonkeyPatch.context() as m:
        files = lambda *args: {n: at._replace(read=unread) for n, at in real(*args).items()}  # noqa: E731
        m.setattr(weights, "locate_tensors", files)
        for rank in range(ranks):
            with pytest.raises(InputError, match=message):
                share_of(folder, rank, ranks)


def test_what_can_be_shared(folders, tmp_path, monkeypatch):
    """Load models that the ranks cannot share, which is refused at once; then count the sums of one
    with experts. Catches: a head cut in two, after minutes of reading; packed weights cut where a
    group is not; a sum for each expert in place of one for all of them; none, after the
    router's."""
    heads = lambda n, k, **more: dict(  # noqa: E731
        num_attention_heads=n, num_key_value_heads=k, head_dim=8, **more)  # fmt: skip
    for i, (what, ranks, message) in enumerate((
        (heads(8, 2), 3, "num_attention_heads': 8.* cannot .*3 ranks"),
        (heads(2, 2), 4, "num_attention_heads': 2.* cannot .*4 ranks"),
        (heads(12, 6), 4, "num_key_value_heads': 6.* cannot .*4 ranks"),
        (heads(12, 4), 6, "num_key_value_heads': 4.* cannot .*6 ranks"),
        (heads(9, 3, intermediate_size=90), 2, "by 2 ranks: take a common divisor"),
        ({"intermediate_size": 98}, 4, "'intermediate_size': 98.* cannot .*4 ranks"),
        ({"model_type": "mixtral", "num_experts": 2, "moe_intermediate_size": 6}, 4,
         "moe_intermediate_size': 6.* cannot .*4 ranks"),
        ("olmo2", 2, "wide_qk_norm"),  # a mean over the heads of all ranks
        # Integers with the scales of another group; or of a group as wide as the model, as of int8.
        ("plain int4", 2, "group_size 32 does not divide 48 input channels"),
        ("square int4", 2, "group_size 64 does not divide 32 input channels"),
    )):  # fmt: skip
        folder = folders[what] if type(what) is str else tiny_folder(tmp_path / str(i), **what)
        refused(folder, ranks, message)
    sums = []
    monkeypatch.setattr(tp, "add_up", lambda module, _, y: sums.append(module) or y)
    share = share_of(folders["experts"], 0, 2)
    share._forward_hooks.clear()  # logits are parts
    share(torch.tensor([[1, 2, 3]]), torch.arange(3)[None])
    assert sums == [each for block in share.layers for each in (block.self_attn, block.mlp)]
    assert share.layers[1].mlp.gate.weight.shape == (6, 64)  # the router, whole


MISFITS = {  # what is stored in place of a tensor
    "layers.0.self_attn.q_proj.weight": [
        lambda t: t.repeat(2, 1), lambda t: t[:10], lambda t: t[:63], lambda t: t[0, 0],
        lambda t: t[..., None]],
    "embed_tokens.weight": [lambda t: t.repeat(2, 1), lambda t: t[:30], lambda t: t[:39]],
    "layers.1.mlp.down_proj.weight": [
        lambda t: t.repeat(1, 2), lambda t: t[:, :48], lambda t: t[:, :60], lambda t: t.flatten(),
        lambda t: t[:, :0]],
    "layers.0.self_attn.q_proj.qweight": [lambda t: t[:120]],
    "layers.0.self_attn.q_proj.scales": [lambda t: t.repeat(2, 1)],
    "layers.1.mlp.down_proj.qweight": [lambda t: t[:, :40]],
    "layers.1.mlp.down_proj.bias": [lambda t: t[:32]],
}  # fmt: skip


def test_weights_that_do_not_fit(folders, tmp_path):
    """Load shares of folders with each misfit of MISFITS, which is refused. Catches: a slice with
    the size that is asked for, whatever is stored: the weights of another model loaded without a
    word, filled up with zeros, or ended in a ZeroDivisionError."""
    for name, changes in MISFITS.items():
        folder = folders["plain" if name.endswith(".weight") else "two kv heads int4"]
        tensors = load_file(folder / "model.safetensors")
        stored = name if name in tensors else f"model.{name}"
        shutil.copy(folder / "config.json", tmp_path)
        for change in changes:
            changed = tensors | {stored: change(tensors[stored]).contiguous()}
            save_file(changed, tmp_path / "model.safetensors")
            refused(tmp_path, 2, name)


def press(number=signal.SIGINT):
    os.kill(os.getpid(), number)


def fail():
    raise MemoryError("a fault for the test")


@pytest.fixture
def ctrl_c():
    """Give the handlers back."""
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_followers_do_the_same(folders, ctrl_c, monkeypatch):
    """Press Ctrl-C at each broadcast in turn, reset the engine and go on, as a chat does; play back
    to a follower what was sent, and compare its cache with the leader's. Catches: half a message,
    or one without the forward that it announces, at whatever point Ctrl-C comes; other tokens after
    it."""
    model, params = load_model(folders["plain"]), replace(tp_worker.SAMPLED, n=3, max_tokens=3)
    sent, made, found = [], [], []

    def record(tensor, source):
        assert source == 0 and tensor.device.type == "cpu"
        sent.append(tensor.clone())
        if len(sent) == when:
            press()

    def play(tensor, source):
        want = sent.pop(0)
        assert want.shape == tensor.shape  # gloo would fail, or write past the end
        tensor.copy_(want)

    monkeypatch.setattr(tp, "Runner", lambda *args: made.append(Runner(*args)) or made[-1])
    empty_layers = paged.empty_layers  # what is never written may differ
    zeros = lambda *args: [kv.zero_() for kv in empty_layers(*args)]  # noqa: E731
    monkeypatch.setattr(paged, "empty_layers", zeros)
    monkeypatch.setattr(tp.dist, "get_rank", lambda: 1)
    for when in itertools.count(1):
        monkeypatch.setattr(tp.dist, "broadcast", record)
        engine, pressed = None, False
        try:
            engine = Engine(model, runner=tp.Leader, max_num_seqs=4, num_blocks=9, block_size=4)
            request = engine.add_request([5, 9, 2, 7, 4, 8], params)
            list(engine.run())
        except KeyboardInterrupt:
            pressed = True
        assert pressed == (len(sent) >= when)
        if pressed and engine:
            engine.reset()
            request = engine.add_request([5, 9, 2, 7, 4, 8], params)
            list(engine.run())
        if engine:
            found.append([seq.token_ids for seq in request.outputs])
            assert found[-1] == found[0]
        monkeypatch.setattr(tp.dist, "broadcast", lambda tensor, _: sent.append(tensor.clone()))
        tp.broadcast()
        monkeypatch.setattr(tp.dist, "broadcast", play)
        tp.follow(model)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        assert not sent
        for ours, theirs in zip(engine.runner.kv, made[-1].kv) if engine else ():
            assert torch.equal(ours, theirs) and ours.any()
        if not pressed:
            break
    assert when > 10  # start, three steps, and a copy: two broadcasts each


def test_signals(ctrl_c, monkeypatch):
    """Press Ctrl-C and fail within what a leader and a follower run. Catches: Ctrl-C lost, the
    second one too, or taken for a failure; a program deaf to it from then on; a failure that a
    server takes for one request's; a follower that ends before rank 0 has printed, or while a
    server finishes its answers."""
    monkeypatch.setattr(tp, "broadcast", lambda message: None)
    before = signal.getsignal(signal.SIGINT)
    for act, kind in ((press, KeyboardInterrupt), (fail, ConnectionError)):
        with pytest.raises(kind, match=None if act is press else "fault for the test"):
            tp.lead("forward", act)
        assert signal.getsignal(signal.SIGINT) is before
    assert tp.lead("forward", str, 3) == "3"
    counts = Counter()
    signal.signal(signal.SIGINT, lambda number, _: counts.update([number]))
    with pytest.raises(ConnectionError):
        tp.lead("forward", lambda: press() or press() or fail())
    assert counts[signal.SIGINT] == 2
    monkeypatch.setattr(tp, "broadcast", lambda: press() or press(signal.SIGTERM))
    monkeypatch.setattr(tp.dist, "get_rank", lambda: 1)
    assert tp.follow(None) is None
    monkeypatch.setattr(tp, "broadcast", fail)
    with pytest.raises(InputError, match=r"rank 1: .*a fault for the test"):
        tp.follow(None)
    for file in ("tp.py", "around/start/ranks.py"):  # pickles run their sender's code; fixed ports
        source = (ROOT / file).read_text()
        assert not re.search(r"_object|pickle|MASTER_|tcp://|(?<!arXiv):\d{4,5}\b|port=", source)


@pytest.fixture
def joining(monkeypatch):
    """Make this process take itself for a rank. Returns what it does to the group."""
    calls, place = [], []
    for name, fake in {
        "init_process_group": lambda backend, timeout: calls.append((backend, timeout.seconds)),
        "destroy_process_group": lambda: calls.append("destroyed"),
        "is_initialized": lambda: True, "get_rank": lambda: place[0],
        "get_world_size": lambda: place[1],
    }.items():  # fmt: skip
        monkeypatch.setattr(meeting.dist, name, fake)
    forever = lambda timeout: calls.append(timeout.days > 99)  # noqa: E731
    monkeypatch.setattr(meeting.dist.distributed_c10d, "_set_pg_timeout", forever)
    monkeypatch.setattr(meeting, "broadcast", lambda: calls.append("end"))
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # which a rank takes and gives back

    def join(*values):
        calls.clear()
        place[:] = values
        for name, value in zip(("RANK", "WORLD_SIZE", "LOCAL_RANK"), values):
            monkeypatch.setenv(name, str(value))
        return calls

    return join


CLOSED = RuntimeError("[/gloo/pair.cc:553] Connection closed by peer")


def test_join(joining, monkeypatch):
    """Join and leave a group as each rank, with each error, and check what is done to it. Catches:
    followers never told to stop, or that do not wait for it, stop each other, or leave before an
    error is told; a deadline for the next prompt; a group left open; two ranks on one GPU; GPUs
    numbered over all machines."""
    full = RuntimeError("out of memory")
    for rank, error, does in (
        (0, None, ["end"]), (1, None, []), (0, ConnectionError(), []), (1, CLOSED, []),
        (0, full, []), (1, full, []), (0, KeyboardInterrupt(), []), (1, KeyboardInterrupt(), []),
    ):  # fmt: skip
        calls = joining(rank, 2, rank)
        raises = pytest.raises(type(error)) if error else contextlib.nullcontext()
        with raises as raised, meeting.join(CPU) as ranks:
            assert ranks[:3] == (CPU, rank, 2) and ranks.runner is tp.Leader and ranks.shard
            if error:
                raise error
        assert calls == [("gloo", 300), True, *does, "destroyed"]
        assert not error or raised.value is error
    monkeypatch.setattr(torch.cuda, "set_device", lambda i: calls.append(range(2)[i]))
    calls = joining(3, 4, 1)
    with meeting.join(GPU) as ranks:
        assert ranks[:3] == (GPU, 3, 4)
    assert calls == [1, ("cpu:gloo,cuda:nccl", 300), True, "destroyed"]
    joining(0, 4, 2)
    with pytest.raises(ValueError, match=r"a GPU each or --device cpu.*: .*out of range"):
        meeting.join(GPU).__enter__()
    assert calls == ["destroyed"]


def test_an_error_of_use(joining, monkeypatch):
    """Launch as each rank with an error, and check what it prints. Catches: an error of rank 1
    alone that nobody tells; the loss of a rank told by each; a follower's other noise."""

    def run(error, *_):
        print("noise", file=sys.stderr)
        raise error

    def parse(argv):
        print("usage", file=sys.stderr)
        return SimpleNamespace(device="cpu")

    for rank, error, text in (
        (0, InputError("no"), "usage\nnoise\ngenerate.py: error: no\n"),
        (1, InputError("no"), "generate.py: error: no\n"),
        (1, InputError(f"rank 1: {CLOSED}"), ""),
    ):  # fmt: skip
        joining(rank, 2, rank)
        err = io.StringIO()
        with monkeypatch.context() as m:
            m.setattr(sys, "stderr", err)
            m.setattr(sys, "__stderr__", err)
            assert launch("generate.py", [], parse, functools.partial(run, error)) == 2
        assert err.getvalue() == text


def test_variables_of_torchrun(monkeypatch):
    """Run with some of torchrun's variables, or with a group of one. Catches: a traceback; an error
    that nobody sees, as by its RANK the process is not the first; a group of one, which costs a
    port and an exchange for each forward."""
    for env in ("WORLD_SIZE=2", "RANK=x", "RANK=1", "WORLD_SIZE=2 RANK=0", "WORLD_SIZE=1 RANK=0"):
        with monkeypatch.context() as m:
            for each in env.split():
                m.setenv(*each.split("="))
            code, out, err = tp_worker.captured(SOME)
        if "=1 " in env:
            assert (code, bool(out)) == (0, True)
            continue
        assert re.fullmatch(r"generate.py: error: .*WORLD_SIZE.*torchrun.*\n", err), env
        assert (code, out) == (2, "")


OUTPUTS = "out", "err"


def children(pid):
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Ranks:
    """Processes of a model's ranks, by torchrun or by hand, where nobody watches over them."""

    def __init__(self, folder):
        self.folder, self.started = folder, []

    def start(self, *command, **env):
        """Start a process, in a group of its own, with a Ctrl-C that works in the background."""
        out, err = ((self.folder / f"{kind}.{len(self.started)}").open("wb") for kind in OUTPUTS)
        env = {"OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT} | env
        self.started.append(subprocess.Popen(
            [*map(str, command)], stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=ROOT,
            env=os.environ | {k: str(v) for k, v in env.items()}, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ))  # fmt: skip

    @property
    def said(self):
        """Return what each has printed on stdout and stderr."""
        return [tuple((self.folder / f"{kind}.{i}").read_text() for kind in OUTPUTS)
                for i in range(len(self.started))]  # fmt: skip

    def until(self, find):
        end = time.monotonic() + 120
        while not (found := find()):
            assert self.started[0].poll() is None and time.monotonic() < end, self.said
            time.sleep(0.02)
        return found

    def speak(self):
        """Wait until the first generates. Returns the processes of each that was started here."""
        self.until(lambda: len(self.said[0][0]) > 2)
        return [[each.pid, *children(each.pid)] for each in self.started]

    def end(self, seconds=120):
        """Wait until none is left. Returns the exit statuses of those that were started here."""
        return [process.wait(seconds) for process in self.started]

    def kill(self):
        for each in self.started:
            for pid in (*children(each.pid), each.pid) if each.poll() is None else ():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            each.wait()


@pytest.fixture
def start(tmp_path):
    """Start ranks, see Ranks."""
    if not Path("/proc/self/task").exists():
        pytest.skip("reads /proc")
    made = []

    def by(how, n, *argv):
        made.append(ranks := Ranks(tmp_path))
        if how == "torchrun":
            run = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", n
            ranks.start(sys.executable, *run, *argv)
            return ranks
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": s.getsockname()[1]}
        env |= {"LOCAL_WORLD_SIZE": n, "WORLD_SIZE": n}
        for rank in range(n):
            ranks.start(sys.executable, *argv, **env, RANK=rank, LOCAL_RANK=rank)
        return ranks

    yield by
    for each in made:
        each.kill()


TEXT = ("--prompt", "ROMEO:\nWhat", "--seed", "3", "--ignore-eos", "--device", "cpu",
        "--dtype", "float32")  # fmt: skip
SOME = (*TEXT, "--max-tokens", "8")
LONG = (*TEXT, "--max-tokens", "9000", "--max-seq-len", "9999")
COMMANDS = [(*SOME, "--temperature", "0", "--draft-checkpoint", str(DRAFT)),
            (*SOME, "--num-samples", "2")]  # fmt: skip
ALL, ONE = [*tp_worker.ROWS], ["batched"]
# Without AVX-512, packed int4 weights are held as int8, and each rank rounds its share by itself.
PACKED = "bundled int4" if "AVX512" in torch.backends.cpu.get_cpu_capability() else "bundled"
FEW = ["batched", "n = 3", "draft", "interrupted"]


@pytest.mark.parametrize(
    ("ranks", "compiled", "models", "commands"),
    [
        (2, [], [("bundled", "", FEW), ("one kv head", "", ONE)], COMMANDS),
        pytest.param(2, ["--compile"], [(PACKED, "", ["batched", "draft", "interrupted"])], [],
                     marks=pytest.mark.slow),
        pytest.param(4, [], [("bundled", "", ALL), ("bundled int4", "", ONE), ("experts", "", ONE),
                             ("nine words", "", ONE), ("two kv heads int4", "", ONE),
                             ("two kv heads", "int4", ONE)], [],
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_same_tokens(folders, start, tmp_path, ranks, compiled, models, commands):
    """Run a table of paths and command lines on several ranks, and compare tokens and output with
    one process. Catches: a rank that runs something else, or stays behind at Ctrl-C; text from
    every rank, an error from each or from none; an end not sent or too early; a thread of gloo's
    that aborts Python's end, one time in ten."""
    models = [(str(folders[name]), *rest) for name, *rest in models]
    (tmp_path / "cases").write_text(json.dumps([models, commands, compiled]))
    group = start("by hand", ranks, WORKER, "cases", tmp_path)
    codes = group.end(400)
    assert not any(codes), group.said
    found = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(ranks)]
    for each in found:
        assert "python" in (threads := each.pop("threads")) and "gloo" not in threads
    assert found[0] == dict(tp_worker.cases(models, commands))
    assert not any(any(result) for each in found[1:] for result in each.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "who", "fault"),
    [("generate", 1, "start"), ("server", 0, "MLP"), ("server", 1, "copy_blocks")],
)
def test_a_rank_fails(start, program, who, fault):
    """Let a rank raise MemoryError at the start, in a forward or in a copy, and check how all of
    them end. Catches: others that wait for a sum that never comes; a follower's error thrown away,
    so that only a lost contact is told; a server that answers no more, and still says that it is
    well."""
    argv = ("--port", 0) if program == "server" else (*LONG, "--num-samples", 2)
    ranks = start("by hand", 2, WORKER, "fault", who, fault, program, *argv)
    if program == "server":
        client = Client()
        client.port = int(ranks.until(lambda: re.findall(r":(\d+)\n", ranks.said[0][1]))[0])
        body = {"prompt": "ROMEO:", "n": 2, "max_tokens": 99, "ignore_eos": True}
        assert client.post(COMPLETIONS, body).status == 500
    # Each has ended, whoever failed has said why, and the first rank has, in one line.
    assert all(ranks.end()), ranks.said
    for rank, (_, err) in enumerate(ranks.said):
        told = re.findall(".*(?:error: |Error).*", err)
        want = "a fault for the test" if rank == who else "Connection (closed|reset)"
        assert len(told) == (rank in (0, who)) and all(re.search(want, line) for line in told), err


@pytest.mark.slow
def test_torchrun_and_deaths(start):
    """Run torchrun with good and bad command lines, and kill a rank. Catches: another output than
    one process has; an error that each rank has, and that nobody tells; ranks that wait for those
    who failed, or for one that was killed."""
    for argv in (SOME, (*SOME, "--checkpoint", "/nowhere"), (*SOME, "--max-seq-len", "3")):
        ranks, want = start("torchrun", 2, PROGRAM, *argv), tp_worker.captured(argv)
        assert bool(ranks.end()[0]) == bool(want[0])
        ((out, err),) = ranks.said
        lines = re.findall(".*(?:error: |new tokens).*", err)
        told = [line for line in want[2].splitlines() if not line.startswith("sampling ")]
        assert out == want[1]
        # Each rank tells its error, if torchrun does not end it first.
        lines = [re.sub(r"\d+\.\d+", "", line) for line in lines]
        assert lines == told or (lines == 2 * told and "error: " in err)
    for who in (0, 1):
        ranks = start("by hand", 2, PROGRAM, *LONG)
        os.kill(ranks.speak()[who][0], signal.SIGKILL)
        assert all(ranks.end())
        assert [err.count("error: ") for _, err in ranks.said] == [who, 0]


@pytest.mark.slow
def test_ctrl_c(start):
    """Press Ctrl-C while ranks write, under torchrun and by hand. Catches: the text so far lost; a
    traceback; ranks left behind, or that end too early for rank 0 to print, or that call it a lost
    contact. (At a terminal torchrun alone gets Ctrl-C, as its ranks have sessions of their own, and
    hands it on.)"""
    for how in ("torchrun", "by hand"):
        ranks = start(how, 2, PROGRAM, *LONG)
        pids = ranks.speak()
        for each in ranks.started:
            each.send_signal(signal.SIGINT)
        ranks.end()
        assert not [pid for each in pids for pid in each if Path(f"/proc/{pid}").exists()]
        text, err = ranks.said[0][0], "".join(err for _, err in ranks.said)
        assert "KeyboardInterrupt" not in err and "error: " not in err
        whole = tp_worker.captured((*TEXT, "--max-tokens", "200"))[1]
        assert text.endswith("\n") and whole.startswith(text[:-1])


# --- Two machines, each with a torchrun -----------------------------------------------------------
# They are network namespaces joined by a cable (ip netns, which root may make); elsewhere, they are
# two addresses of this one. Their names lead nowhere, so all that tp.py says is needed.


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True)


class Machines(Ranks):
    """Two machines, each with one rank."""

    def __init__(self, folder):
        super().__init__(folder)
        self.names = [f"nodes-{os.getpid()}-{end}" for end in "ab"]
        self.port, self.addresses, self.links = 29400, ["10.99.0.1", "10.99.0.2"], ["va", "vb"]
        if not ip("netns", "add", self.names[0]).returncode:
            ip("netns", "add", self.names[1])
            a, b = self.names
            ip(*f"link add va netns {a} type veth peer name vb netns {b}".split())
            for name, address, link in zip(self.names, self.addresses, self.links):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
                for each in ("lo", link):
                    assert not ip("-n", name, "link", "set", each, "up").returncode
        else:
            self.names, self.links = [], ["lo", "lo"]
            self.addresses = ["127.0.0.1", "127.0.0.2"]
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                self.port = s.getsockname()[1]

    def inside(self, i):
        return ["ip", "netns", "exec", self.names[i]] if self.names else []

    def begin(self, *argv, **env):
        """Start torchrun and its one rank on the next machine."""
        i = len(self.started)
        self.start(
            *self.inside(i), sys.executable, "-m", "torch.distributed.run", "--nnodes", 2,
            "--nproc-per-node", 1, "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"{self.addresses[0]}:{self.port}",
            "--rdzv-conf", f"is_host={1 - i}", "--local-addr", self.addresses[i], PROGRAM, *argv,
            GLOO_SOCKET_IFNAME=self.links[i], **env,
        )  # fmt: skip

    def errors(self, i):
        """Return the lines of ours; torchrun has many of its own."""
        return re.findall(r"^\w+\.py: error: .*$", self.said[i][1], re.M)


@pytest.fixture
def machines(tmp_path):
    if not Path("/proc/self/task").exists():
        pytest.skip("reads /proc")
    made = Machines(tmp_path)
    yield made
    made.kill()
    for name in made.names:
        ip("netns", "del", name)


@pytest.mark.nightly
def test_two_machines(machines, tmp_path):
    """Run one model on two machines, where the second comes 10 s late and has its checkpoint
    elsewhere. Catches: another text than one process has, or a text on both machines; a first
    machine that gives up on the second, or refuses it."""
    machines.begin(*SOME)
    time.sleep(10)
    machines.begin(*SOME, "--checkpoint", shutil.copytree(SHAKESPEARE, tmp_path / "copy"))
    assert machines.end() == [0, 0], machines.said
    assert [out for out, _ in machines.said] == [tp_worker.captured(SOME)[1], ""]
    assert [err.count("new tokens") for _, err in machines.said] == [1, 0]


@pytest.mark.nightly
@pytest.mark.parametrize("who", [0, 1])
def test_a_machine_dies(machines, who):
    """Kill all processes of one of two machines. Catches: another one that waits for it for ever,
    or ends without a word of ours."""
    for _ in range(2):
        machines.begin(*LONG)
    for pid in machines.speak()[who]:
        os.kill(pid, signal.SIGKILL)
    assert all(machines.end())  # 1 s on a quiet machine, 4 beside eight busy processes
    (line,) = machines.errors(1 - who)
    assert f"rank {1 - who}" in line and not machines.errors(who)
