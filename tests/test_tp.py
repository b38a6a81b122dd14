"""Tensor parallelism: what each rank reads, the tokens of all together, and how they end.

Ranks are processes. The rows of the equivalence matrix run in one launch for each number of ranks
(tp_worker.py); what needs no second rank is tested in this process, with the collectives replaced.
"""

import contextlib
import functools
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import tp_worker
from conftest import DRAFT, ROOT, SHAKESPEARE
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_equivalence import run_alone
from test_generate import STATISTICS, without_bars
from test_quantize import tiny_folder
from tp_worker import ROWS, SETTINGS

import generate
import model as model_module
import quantize
import tp
from kv_cache import PagedCache, Row, StaticCache
from model import CheckpointError, StoredTensor, load_model, locate_tensors, named_tensors
from quantize import quantize_model
from runner import Runner
from tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
linux = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")


# --- Processes ------------------------------------------------------------------------------------


class Program:
    """A running process and what it has printed so far."""

    def __init__(self, process, out, err):
        self.process, self._out, self._err = process, out, err

    @property
    def out(self):
        return self._out.read_bytes().decode(errors="replace")

    @property
    def err(self):
        return without_bars(self._err.read_bytes().decode(errors="replace"))

    def code(self, seconds=90):
        return self.process.wait(timeout=seconds)

    def speaks(self, seconds=60):
        """Wait until it generates."""
        end = time.monotonic() + seconds
        while len(self.out) < 3:
            assert self.process.poll() is None and time.monotonic() < end, self.err
            time.sleep(0.02)


class Programs:
    """The processes of one test. All carry a mark in their environment, by which they are found
    even where their launcher has died."""

    def __init__(self, folder):
        self.folder, self.mark, self.started = folder, uuid.uuid4().hex, []

    def start(self, *argv, **env):
        """Start Python in a group of its own, with a Ctrl-C that works even in the background."""
        paths = [self.folder / f"{len(self.started)}.{kind}" for kind in ("out", "err")]
        inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        ours = {"OMP_NUM_THREADS": "1", "PYTHONUTF8": "1", "PYTHONPATH": str(ROOT)}
        ours["TP_TEST_MARK"] = self.mark
        with paths[0].open("wb") as out, paths[1].open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, *map(str, argv)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=ROOT,
                env=inherited | ours | env,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        self.started.append(Program(process, *paths))
        return self.started[-1]

    def torchrun(self, ranks, *argv, where=("--standalone",)):
        launch = ("-m", "torch.distributed.run", *where, "--nproc-per-node", ranks)
        return self.start(*launch, *argv)

    def by_hand(self, ranks, *argv):
        """Nobody watches over these: where one dies, the others must notice themselves."""
        place = {
            "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        }  # fmt: skip
        numbers = [str(rank) for rank in range(ranks)]
        return [self.start(*argv, **place, RANK=rank, LOCAL_RANK=rank) for rank in numbers]

    def alive(self):
        """Process id -> environment, of all that carry our mark."""
        found = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                text = (folder / "environ").read_bytes().decode(errors="replace")
                variables = dict(line.partition("=")[::2] for line in text.split("\0"))
                if variables.get("TP_TEST_MARK") == self.mark:
                    found[int(folder.name)] = variables
        return found

    def rank(self, number):
        """The process that is a rank, whoever started it."""
        return min(pid for pid, env in self.alive().items() if env.get("RANK") == str(number))

    def all_end(self, seconds=30):
        """Wait until none is left, and return what is left then."""
        end = time.monotonic() + seconds
        while self.alive() and time.monotonic() < end:
            for program in self.started:
                program.process.poll()  # or it stays as a zombie
            time.sleep(0.1)
        return self.alive()

    def kill(self):
        for pid in self.alive():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for program in self.started:
            program.process.wait()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture
def programs(tmp_path):
    group = Programs(tmp_path)
    yield group
    group.kill()


@pytest.fixture(scope="module")
def module_programs(tmp_path_factory):
    group = Programs(tmp_path_factory.mktemp("programs"))
    yield group
    group.kill()


# --- A rank's share -------------------------------------------------------------------------------

QWEN3 = {  # one kv head, norms on q and k, windows, and a vocabulary that 2 and 4 do not divide
    "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 1, "head_dim": 16,
    "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "vocab_size": 129,
}  # fmt: skip
BIASED = {  # two kv heads, and every bias there is
    "num_attention_heads": 8, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True,
    "vocab_size": 127, "head_dim": 16,
}  # fmt: skip
NINE = {  # tied; of 4 ranks the last has nothing of the vocabulary
    "architectures": ["MistralForCausalLM"], "num_key_value_heads": 4, "sliding_window": 6,
    "vocab_size": 9, "tie_word_embeddings": True,
}  # fmt: skip
FAMILIES = {"one kv head": QWEN3, "two kv heads": BIASED, "nine words": NINE}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The random checkpoints, plain and as quantize.py stores them."""
    root = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(1)
    made = {name: tiny_folder(root / name, **changes) for name, changes in FAMILIES.items()}
    made |= {"bundled": SHAKESPEARE, "plain": tiny_folder(root / "plain")}
    made["square"] = tiny_folder(root / "square", intermediate_size=64)
    for name, mode, size in (
        ("bundled", "int8", -1), ("bundled", "int4", 64), ("two kv heads", "int8", -1),
        ("two kv heads", "int4", 8), ("plain", "int4", 32), ("square", "int4", 64),
    ):  # fmt: skip
        model = quantize_model(quantize.load(made[name]), mode, size)
        config = {"quant_method": "kilolm", "bits": quantize.MODES[mode], "group_size": size}
        quantize.save(model, made[name], out := root / f"{name} {mode}", config)
        made[f"{name} {mode}"] = out
    return made


def share_of(folder, rank, ranks, **options):
    return quantize.load(folder, shard=lambda m, f: tp.shard(m, f, rank, ranks), **options)


def plan(folder, rank, ranks):
    """The empty share and where its tensors come from."""
    with torch.device("meta"):
        model = model_module.Transformer(model_module.load_config(folder))
    return tp.shard(model, locate_tensors(folder), rank, ranks)


def stored(folder):
    return {k.removeprefix("model."): v for k, v in load_file(folder / "model.safetensors").items()}


def test_docstring_example_of_shard(tmp_path):
    """The kv head of a neighbour; k and v cut like q where ranks share a head."""
    folder = tiny_folder(tmp_path, hidden_size=32, head_dim=8)
    share, parts = plan(folder, 3, 4)
    for name, want in {
        "q_proj": (0, 24, 8), "k_proj": (0, 8, 8), "v_proj": (0, 8, 8), "o_proj": (1, 24, 8)
    }.items():  # fmt: skip
        assert parts[f"layers.1.self_attn.{name}.weight"][1:] == want
    assert share.layers[0].self_attn.heads == (1, 1, 1)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_shares_make_up_the_model(folders, family, ranks):
    """A slice that starts a head too early, a head that meets another's keys, a norm cut up, a bias
    that each rank adds: all shares together are the stored tensors, head by head."""
    config, whole = model_module.load_config(folders[family]), stored(folders[family])
    N, K, H = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    shares = [share_of(folders[family], rank, ranks) for rank in range(ranks)]
    tensors = [dict(named_tensors(share)) for share in shares]
    assert {share.config.vocab_size for share in shares} == {config.vocab_size}
    for name, tensor in whole.items():
        parts = [each[name] for each in tensors]
        kind = name.split(".")[-2]
        if kind in ("q_proj", "k_proj", "v_proj"):
            heads = tensor.unflatten(0, (-1, H))
            for n in range(N):  # the head n of the model is head i of rank r
                r, i = divmod(n, N // ranks)
                n_local, k_local, _ = shares[r].layers[0].self_attn.heads
                local = parts[r].unflatten(0, (-1, H))
                there, here = (n, i) if kind == "q_proj" else (n * K // N, i * k_local // n_local)
                assert torch.equal(local[here], heads[there])
            assert len(parts[0]) == H * (N // ranks if kind == "q_proj" else max(1, K // ranks))
        elif kind in ("gate_proj", "up_proj"):
            assert torch.equal(torch.cat(parts), tensor)
        elif kind in ("o_proj", "down_proj") and tensor.dim() == 2:
            assert torch.equal(torch.cat(parts, 1), tensor)
        elif kind in ("o_proj", "down_proj"):
            assert torch.equal(parts[0], tensor) and not any(part.any() for part in parts[1:])
        elif kind in ("embed_tokens", "lm_head"):
            table = torch.cat(parts)
            assert torch.equal(table[: len(tensor)], tensor) and not table[len(tensor) :].any()
            assert {len(part) for part in parts} == {-(-len(tensor) // ranks)}
        else:
            assert all(torch.equal(part, tensor) for part in parts)
        assert {part.dtype for part in parts} == {tensor.dtype}
    assert all(each.keys() == whole.keys() for each in tensors)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_shares_of_a_quantised_folder(folders, mode, ranks):
    """Scales of other channels than the integers; the one scale of int8's inputs cut up."""
    folder = folders[f"two kv heads {mode}"]
    whole = stored(folder)
    shares = [share_of(folder, rank, ranks) for rank in range(ranks)]
    tensors = [dict(named_tensors(share)) for share in shares]
    for name, tensor in whole.items():
        parts, kind = [each[name] for each in tensors], name.split(".")[-2]
        if kind in ("q_proj", "gate_proj", "up_proj", "lm_head"):
            assert torch.equal(torch.cat(parts)[: len(tensor)], tensor)
        elif kind in ("o_proj", "down_proj") and tensor.dim() == 2 and tensor.shape[1] > 1:
            assert torch.equal(torch.cat(parts, 1), tensor)
        elif kind in ("o_proj", "down_proj") and tensor.dim() == 2:
            assert all(torch.equal(part, tensor) for part in parts)
    single = dict(quantize.load(folder).named_modules())
    for rank, share in enumerate(shares):
        n = 8 * 16 // ranks  # columns of o
        mine = share.layers[1].self_attn.o_proj.dequantize()
        theirs = single["layers.1.self_attn.o_proj"].dequantize()
        assert torch.equal(mine, theirs[:, rank * n : (rank + 1) * n])


@pytest.mark.parametrize(
    ("dim", "start", "size"),
    [(dim, *at) for dim in (0, 1) for at in ((0, 4), (3, 4), (6, 4), (0, 10))]
    + [(0, 8, 4), (0, 10, 3), (0, 14, 2)],  # only rows are ever padded: inputs divide evenly
)
def test_slice(tmp_path, dim, start, size):
    """Rows for columns; past the stored end other rows, an error, or memory that nobody filled."""
    tensor = torch.randn(10, 10)
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    at = StoredTensor(tmp_path / "x.safetensors", "x", (10, 10), "F32")
    padded = torch.cat((tensor, torch.zeros(20, 10))) if dim == 0 else tensor
    part = tp.Slice(at, dim, start, size)
    assert torch.equal(part.read(), padded.narrow(dim, start, size))
    assert part.shape == part.read().shape and part.dtype == "F32"


def test_slice_of_a_bias(tmp_path):
    """A padding with more dimensions than the tensor has."""
    save_file({"x": torch.arange(5.0).bfloat16()}, tmp_path / "x.safetensors")
    at = StoredTensor(tmp_path / "x.safetensors", "x", (5,), "BF16")
    assert tp.Slice(at, 0, 3, 4).read().tolist() == [3, 4, 0, 0]
    assert tp.Slice(at, 0, 5, 5).read().tolist() == [0] * 5
    assert tp.Slice(at, 0, 5, 5).read().dtype == torch.bfloat16


@pytest.mark.parametrize("ranks", [2, 4])
def test_parallel_embedding(folders, monkeypatch, ranks):
    """A token at the edge of a share found on two ranks or on none."""
    monkeypatch.setattr(tp, "all_reduce", lambda x: x)
    for family in FAMILIES:
        table = stored(folders[family])["embed_tokens.weight"]
        ids = torch.arange(len(table)).view(1, -1)
        shares = [share_of(folders[family], rank, ranks) for rank in range(ranks)]
        assert torch.equal(sum(share.embed_tokens(ids) for share in shares)[0], table)


# --- What is read ---------------------------------------------------------------------------------

CUT = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
       "embed_tokens", "lm_head")  # fmt: skip


class Counting:
    """A safe_open, or one of its slices, that notes how many numbers are read of each tensor."""

    def __init__(self, inside, seen, key=None):
        self.inside, self.seen, self.key = inside, seen, key

    def __getattr__(self, name):  # keys, get_shape, get_dtype
        return getattr(self.inside, name)

    def get_slice(self, key):
        return Counting(self.inside.get_slice(key), self.seen, key)

    def get_tensor(self, key):
        return Counting(self.inside.get_slice(key), self.seen, key)[:]

    def __getitem__(self, at):
        part = self.inside[at]
        self.seen[self.key] = self.seen.get(self.key, 0) + part.numel()
        return part


@pytest.fixture
def seen(monkeypatch):
    """Tensor -> numbers that have been read of it."""
    real, counts = tp.safe_open, {}

    @contextlib.contextmanager
    def opened(*args):
        with real(*args) as reader:
            yield Counting(reader, counts)

    monkeypatch.setattr(tp, "safe_open", opened)
    monkeypatch.setattr(model_module, "safe_open", opened)
    return counts


@pytest.mark.parametrize("name", ["two kv heads", "two kv heads int8", "two kv heads int4"])
def test_a_rank_reads_its_slices_only(folders, seen, name):
    """A whole matrix read, and then cut: as slow to load, and as much memory, as one process."""
    share_of(folders[name], 2, 4)
    for key, tensor in load_file(folders[name] / "model.safetensors").items():
        kind, last = key.split(".")[-2:]
        if kind in ("o_proj", "down_proj") and (last == "bias" or tensor.shape[-1] == 1):
            assert seen[key] == (0 if last == "bias" else tensor.numel()), key
        elif kind in CUT:
            share = 2 if kind in ("k_proj", "v_proj") else 4
            assert seen[key] <= -(-len(tensor) // share) * tensor[0].numel(), key
        else:
            assert seen[key] == tensor.numel()


MEASURE = """
import json, sys
import model, quantize, tp

def kib(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

folder, tiny, rank, ranks = *sys.argv[1:3], *map(int, sys.argv[3:])
shard = tp.Ranks("cpu", rank, ranks).shard
quantize.load(tiny, shard=shard)  # brings in what PyTorch needs once, 80 MB
before = kib("VmRSS")
model = quantize.load(folder, shard=shard)
print(json.dumps([kib("VmHWM") - before, sum(p.nbytes for p in model.parameters())]))
"""


@linux
def test_peak_memory_of_loading(programs, folders, tmp_path):
    """A rank that first builds or reads the whole model. Of 195 MB, it may hold its share and its
    part of the largest tensor as it is read: measured, 195, 98 and 48 MB. A tenth and 4 MB are
    allowed for pages. VmHWM and not ru_maxrss, which begins with that of the parent."""
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 16384, "hidden_size": 1024,
        "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16,
        "num_key_value_heads": 8, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        empty = model_module.Transformer(model_module.load_config(tmp_path)).bfloat16()
    tensors = {
        name if name.startswith("lm_head") else f"model.{name}": torch.ones(t.shape, dtype=t.dtype)
        for name, t in named_tensors(empty)
    }
    sizes = [tensor.nbytes for tensor in tensors.values()]
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    places = [(0, 1), (1, 2), (3, 4)]
    running = [programs.start("-c", MEASURE, tmp_path, folders["plain"], *p) for p in places]
    for (_, ranks), program in zip(places, running):
        assert program.code() == 0, program.err
        growth, size = json.loads(program.out)
        assert sum(sizes) / ranks <= size < 1.01 * sum(sizes) / ranks
        assert size < growth * 1024 < 1.1 * (sum(sizes) + max(sizes)) / ranks + 4e6


# --- What cannot be shared ------------------------------------------------------------------------


@pytest.fixture
def unread(monkeypatch):
    """Any weight that is read is a failure: an error must come first."""
    for kind in (tp.Slice, StoredTensor):
        monkeypatch.setattr(kind, "read", lambda self: pytest.fail(f"{self} was read"))


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({"num_attention_heads": 8}, 3, "8 attention heads cannot be shared evenly by 3 ranks"),
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, 4, "2 attention heads .* 4 ranks"),
        ({"intermediate_size": 98}, 4, "98 feed-forward channels .* 4 ranks"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 16}, 4,
         "6 key-value heads .* 4 ranks"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 16}, 6,
         "4 key-value heads .* 6 ranks"),
    ],
)  # fmt: skip
def test_uneven(tmp_path, unread, changes, ranks, message):
    """A head cut in two, after minutes of reading."""
    folder = tiny_folder(tmp_path, **changes)
    for rank in range(ranks):
        with pytest.raises(CheckpointError, match=message):
            share_of(folder, rank, ranks)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plain int4", "down_proj.*: 48 input channels for each of 2 ranks .* groups of 32"),
        ("square int4", "group_size 64 does not divide 32 input channels"),
    ],
)
def test_int4_groups_that_straddle_ranks(folders, unread, name, message):
    """Integers with the scales of another group; in the second, a single group as wide as the model
    has one scale for all inputs, as int8 has."""
    for rank in range(2):
        with pytest.raises(CheckpointError, match=message):
            share_of(folders[name], rank, 2)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_folders_of_other_tools_are_refused(tmp_path, method):
    """Packed along other dimensions: cut as if they were ours, they would be noise."""
    quantization = {"quant_method": method, "bits": 4, "group_size": 32}
    folder = tiny_folder(tmp_path, quantization_config=quantization)
    with pytest.raises(CheckpointError, match="other tools cannot be shared by ranks"):
        share_of(folder, 0, 2)


def repeat(tensor, dim):
    return torch.cat((tensor, tensor), dim)


MISFITS = {  # what is stored in place of the tensor, and is refused by a single process
    "q_proj": {
        "other heads": lambda t: repeat(t, 0), "rows lost": lambda t: t[:10],
        "a scalar": lambda t: t[0, 0].clone(), "3-D": lambda t: t[..., None],
    },
    "embed_tokens": {"more words": lambda t: repeat(t, 0), "fewer words": lambda t: t[:30]},
    "down_proj": {
        "other width": lambda t: repeat(t, 1), "half": lambda t: t[:, :48],
        "columns lost": lambda t: t[:, :60], "flat": lambda t: t.flatten(),
        "empty": lambda t: t[:, :0],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "what"), [(kind, what) for kind, group in MISFITS.items() for what in group]
)
def test_weights_that_do_not_fit(folders, tmp_path, unread, kind, what):
    """A slice has the size that is asked for whatever is stored: the weights of another model are
    loaded without a word, filled up with zeros, or end in a ZeroDivisionError."""
    name = {"embed_tokens": "model.embed_tokens.weight", "q_proj": "model.layers.0.self_attn.",
            "down_proj": "model.layers.1.mlp."}[kind]  # fmt: skip
    name += f"{kind}.weight" if name.endswith(".") else ""
    weights = load_file(folders["plain"] / "model.safetensors")
    weights[name] = MISFITS[kind][what](weights[name]).contiguous()
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders["plain"] / "config.json").read_text())
    for rank in range(2):
        with pytest.raises(CheckpointError, match=f"{kind}.weight is "):
            share_of(tmp_path, rank, 2)


# --- Messages -------------------------------------------------------------------------------------


@contextlib.contextmanager
def wire(after_first=lambda: None):
    """Collect what is broadcast; receive() then takes it from the list."""
    sent, taking = [], []

    def broadcast(tensor, source):
        assert source == 0 and tensor.dtype == torch.int64 and tensor.device.type == "cpu"
        if taking:
            want = sent.pop(0)
            assert want.shape == tensor.shape  # gloo would fail, or write past the end
            tensor.copy_(want)
        else:
            sent.append(tensor.clone())
            if len(sent) == 1:
                after_first()

    def receive():
        taking.append(True)
        message = tp.receive()
        taking.clear()
        return message

    with pytest.MonkeyPatch.context() as m:
        m.setattr(tp.dist, "broadcast", broadcast)
        yield sent, receive


integers = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.lists(integers, max_size=4)), max_size=5))
def test_messages_arrive_as_they_were_sent(messages):
    """Lists run together, a length of the list before, an empty one that is waited for."""
    with wire() as (sent, receive):
        for op, lists in messages:
            tp.send(op, *lists)
        for op, lists in messages:
            assert receive() == (op, lists + [[]] * (4 - len(lists)))
        assert not sent


def press():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def ctrl_c():
    """One that works even where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("op", ["RUN", "COPY", "CACHE"])
def test_ctrl_c_waits_for_the_end_of_a_message(folders, ctrl_c, op):
    """Half a message, or one without the forward that it announces: the others wait for ever."""
    model = load_model(folders["plain"])
    paged = PagedCache(model.config, 2, 4, torch.float32)
    cache = StaticCache(model.config, 1, 8, torch.float32)
    with wire():
        leader = tp.Leader(model, paged if op == "COPY" else cache)
    paged.pools[1][0][0] = 1
    with wire(press) as (_, receive):
        with pytest.raises(KeyboardInterrupt):
            if op == "RUN":
                leader([Row([], 0, 3)], [1, 2, 3], [2])
            elif op == "COPY":
                leader.copy_blocks([(0, 1)])
            else:
                tp.Leader(model, cache)
        assert receive()[0] == getattr(tp, op)
    assert op != "RUN" or cache.layers[1].k[:, :, :3].all()
    assert op != "COPY" or paged.pools[1][0][1].all()


def test_uninterrupted(ctrl_c):
    """Ctrl-C lost, or the program deaf to it from then on."""
    before, order = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt):
        with tp.uninterrupted():
            press()
            order.append("went on")
        order.append("never")
    assert order == ["went on"]
    with pytest.raises(IndexError), tp.uninterrupted():
        raise IndexError
    assert signal.getsignal(signal.SIGINT) is before
    with tp.uninterrupted():
        pass
    with pytest.raises(KeyboardInterrupt):
        press()
        time.sleep(1)


def test_no_pickle_and_no_fixed_port():
    """Objects sent by pickle run the sender's code; a fixed port is another's, or everybody's."""
    source = (ROOT / "tp.py").read_text()
    assert not re.search(r"_object|pickle|MASTER_|tcp://|(?<!arXiv):\d{4,5}\b|port=", source)


# --- Joining --------------------------------------------------------------------------------------


@pytest.fixture
def joining(monkeypatch):
    """A process that takes itself for a rank. Notes what it does to the group, and to Ctrl-C."""
    calls = []

    def place(rank, ranks, local=None, here=None):
        values = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank if local is None else local,
                  "LOCAL_WORLD_SIZE": here or ranks}  # fmt: skip
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))
        return calls

    fakes = {
        "init_process_group": lambda backend, timeout: calls.append((backend, timeout.days > 99)),
        "get_rank": lambda: int(os.environ["RANK"]),
        "get_world_size": lambda: int(os.environ["WORLD_SIZE"]),
        "destroy_process_group": lambda: calls.append("destroyed"),
        "group": SimpleNamespace(WORLD=SimpleNamespace(group_name="everybody")),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(tp.dist, name, fake)
    monkeypatch.setattr(tp, "send", lambda op: calls.append(op))
    monkeypatch.setattr(tp, "_world", "")
    ignore = signal.SIG_IGN
    note = lambda number, act: calls.append((number, act if act is ignore else "noted"))  # noqa: E731
    monkeypatch.setattr(tp.signal, "signal", note)
    return place


CPU = torch.device("cpu")
SIGNALS = (signal.SIGINT, signal.SIG_IGN), (signal.SIGTERM, "noted")


def test_join(joining):
    """Followers that end on Ctrl-C before rank 0 has printed, that are never told to stop, or that
    stop each other; a deadline for the next prompt."""
    calls = joining(0, 2)
    with tp.join(CPU) as ranks:
        assert ranks == tp.Ranks(CPU, 0, 2) and ranks.runner is tp.Leader and ranks.shard
    assert calls == [("gloo", True), tp.STOP, "destroyed"]
    calls.clear()
    joining(1, 2)
    with tp.join(CPU) as ranks:
        assert ranks == tp.Ranks(CPU, 1, 2)
    assert calls == [("gloo", True), *SIGNALS, "destroyed"]


@pytest.mark.parametrize("ranks", [None, 1])
def test_join_of_one(joining, monkeypatch, ranks):
    """A group of one, which costs a port and an exchange for each forward."""
    calls = joining(0, ranks or 7)
    if not ranks:
        monkeypatch.delenv("WORLD_SIZE")
    with tp.join(CPU) as alone:
        assert alone == tp.Ranks(CPU) and alone.shard is None and alone.runner is Runner
    assert calls == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("[/gloo/pair.cc:553] Connection closed by peer"), ConnectionError),
        (torch.distributed.DistBackendError("NCCL"), ConnectionError),
        (RuntimeError("out of memory"), RuntimeError),
        (CheckpointError("bad"), CheckpointError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_errors_inside_join(joining, error, kind):
    """A bug reported as a lost rank; a lost rank as a traceback; a group left open."""
    calls = joining(1, 2)
    with pytest.raises(kind) as raised, tp.join(CPU):
        raise error
    if kind is ConnectionError:
        assert str(raised.value).startswith("rank 1 lost contact") and raised.value.__cause__
    else:
        assert raised.value is error
    assert calls[-1] == "destroyed"


def test_more_ranks_than_gpus(joining, monkeypatch):
    """Two ranks on one GPU, which NCCL refuses with an internal error."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    calls = joining(0, 4)
    too_few = pytest.raises(ValueError, match="4 ranks need 4 GPUs, this machine has 1: lower")
    with too_few, tp.join(torch.device("cuda")):
        pass
    assert calls == []


def test_a_gpu_for_each_rank(joining, monkeypatch):
    """GPUs counted over all machines, or numbered by the rank over all machines."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(str(device)))
    calls = joining(3, 4, local=1, here=2)
    with tp.join(torch.device("cuda")) as ranks:
        assert ranks == tp.Ranks(torch.device("cuda:1"), 3, 4)
    assert calls == ["cuda:1", ("cpu:gloo,cuda:nccl", True), *SIGNALS, "destroyed"]


@pytest.mark.parametrize("rank", [0, 1])
def test_report(joining, monkeypatch, rank):
    """The same error once from each rank; one that only rank 1 has, from none."""
    calls, err = joining(rank, 2), io.StringIO()
    monkeypatch.setattr(tp.time, "sleep", calls.append)
    monkeypatch.setattr(sys, "__stderr__" if rank else "stderr", err)
    assert tp.report("generate.py", ValueError("no")) == 2
    assert err.getvalue() == "generate.py: error: no\n"
    assert bool(calls) == bool(rank)


# --- The equivalence matrix -----------------------------------------------------------------------

LONG_WORDS = "To be, or not to be, that is the question:\n" * 2
SHORT = ["logits", "sampled", "paged"]
AT_TWO = ("draft, alone", "n-gram, alone", "int8 cache, alone", "interrupted", "interrupted copy",
          "compiled", "paged, compiled")  # fmt: skip
MODELS = {  # name -> checkpoint, quantised on the fly, rows
    "one kv head": ("one kv head", None, [*SHORT, "preempted", "int8 cache, logits"]),
    "two kv heads": ("two kv heads", None, [*SHORT, "n = 3"]),
    "nine words": ("nine words", None, SHORT),
    "stored int8, biases": ("two kv heads int8", None, ["logits", "paged"]),
    "stored int4, biases": ("two kv heads int4", None, ["logits", "paged"]),
    "int4 on the fly, biases": ("two kv heads", "int4", ["logits", "paged"]),
    "int8 on the fly, biases": ("two kv heads", "int8", ["logits"]),
    "stored int8": ("bundled int8", None, ["paged"]),
    "stored int4": ("bundled int4", None, ["paged"]),
    "bundled": ("bundled", None, [*ROWS]),
}
MATRIX = [
    (ranks, name, row)
    for ranks in (2, 4)
    for name, (_, _, rows) in MODELS.items()
    for row in rows
    if ranks == 2 or row not in AT_TWO
]


@pytest.fixture(scope="module")
def jobs(folders):
    tokenizer, made = Tokenizer(SHAKESPEARE), {}
    for name, (folder, mode, rows) in MODELS.items():
        V = model_module.load_config(folders[folder]).vocab_size
        generator = torch.Generator().manual_seed(V)
        prompts = [torch.randint(V, (n,), generator=generator).tolist() for n in (5, 1, 14)]
        if V == 1024:
            prompts = [tokenizer.encode(text) for text in ("ROMEO:\n", "", LONG_WORDS)]
        made[name] = {"folder": str(folders[folder]), "mode": mode, "group_size": 8,
                      "prompts": prompts, "rows": rows}  # fmt: skip
    return made


@pytest.fixture(scope="module")
def launched(jobs, module_programs):
    """Ranks -> the results of one launch, and its log."""

    @functools.cache
    def launch(ranks):
        made = {
            name: job | {"rows": [row for row in job["rows"] if (ranks, name, row) in MATRIX]}
            for name, job in jobs.items()
        }
        paths = [module_programs.folder / f"{ranks} {kind}.json" for kind in ("jobs", "out")]
        paths[0].write_text(json.dumps(made))
        program = module_programs.torchrun(ranks, ROOT / "tests" / "tp_worker.py", *paths)
        try:
            code = program.code(150)
        except subprocess.TimeoutExpired:
            code = "hangs"
            module_programs.kill()
        results = json.loads(paths[1].read_text()) if paths[1].exists() else {}
        return results, f"{code}\n{program.err[-3000:]}"

    return launch


@pytest.fixture(scope="module")
def unsharded(jobs):
    """Name -> the plain model of one process."""

    @functools.cache
    def load(name):
        job = jobs[name]
        model = quantize.load(job["folder"], "cpu", torch.float32)
        return quantize_model(model, job["mode"], job["group_size"]) if job["mode"] else model

    return load


@pytest.fixture(scope="module")
def expected(jobs, unsharded):
    """Tokens of one process: with no cache, or with an int8 one, which changes them."""

    @functools.cache
    def slow(name, setting, dtype):
        args = unsharded(name), jobs[name]["prompts"], SETTINGS[setting]
        if dtype:
            return tp_worker.alone(*args, runner=Runner, dtype=dtype)
        return run_alone(*args, cached=False)

    return slow


def result(launched, ranks, name, row):
    results, log = launched(ranks)
    assert f"{name}, {row}" in results, log
    return results[f"{name}, {row}"]


@pytest.mark.parametrize(("ranks", "name", "row"), [c for c in MATRIX if "logits" not in c[2]])
def test_same_tokens(launched, expected, ranks, name, row):
    """A sum left out or done twice, words in the order of another rank, a rank that ran something
    else, or did not copy a block, or was left behind by Ctrl-C."""
    dtype = torch.int8 if row.startswith("int8 cache") else None
    assert result(launched, ranks, name, row)["found"] == expected(name, ROWS[row][0], dtype)


def distance(a, b):
    return (a - b).square().mean().sqrt()


@pytest.mark.parametrize(("ranks", "name", "row"), [c for c in MATRIX if "logits" in c[2]])
def test_same_logits(launched, jobs, unsharded, ranks, name, row):
    """What tokens do not show: a window or a norm lost, one bias of many, a zero in place of a word
    that nobody says, a follower whose cache is not int8. The int8 of a cache may be rounded to the
    other side; and on the fly int8 has scales of its own for each rank's inputs: no worse."""
    prompts, dtype = jobs[name]["prompts"], torch.int8 if "cache" in row else torch.float32
    found = torch.tensor(result(launched, ranks, name, row)["found"])
    want = torch.tensor(tp_worker.logits(unsharded(name), prompts, None, Runner, dtype))
    plain = unsharded("two kv heads" if jobs[name]["mode"] else name)
    plain = torch.tensor(tp_worker.logits(plain, prompts, None, Runner))
    if jobs[name]["mode"] == "int8":
        assert 0 < distance(found, plain) < 1.1 * distance(want, plain) < 0.05 * plain.std()
    elif dtype == torch.int8:
        assert distance(found, want) < 0.1 * distance(want, plain)
    else:
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_launch_ends(launched, ranks):
    """A STOP that is not sent, or arrives in the middle of something."""
    results, log = launched(ranks)
    assert len(results) == len([case for case in MATRIX if case[0] == ranks])
    assert log.startswith("0\n"), log


def test_what_is_sent(launched):
    """A path that does not do what it is there for; more than one message for a forward."""
    CACHE, COPY, RUN = map(str, (tp.CACHE, tp.COPY, tp.RUN))
    for ranks in (2, 4):
        assert result(launched, ranks, "bundled", "n = 3")["sent"][COPY] > 0
        sent = result(launched, ranks, "bundled", "chunks of 7")["sent"]
        prompts = [4, 1, 33]
        assert sent == {CACHE: 3, RUN: sum(-(-n // 7) + 7 for n in prompts)}


# --- The command line -----------------------------------------------------------------------------

TEXT = ("--prompt", "ROMEO:\nWhat", "--seed", 3, "--ignore-eos", "--device", "cpu",
        "--dtype", "float32")  # fmt: skip
SOME = (*TEXT, "--max-tokens", 24)
LONG = (*TEXT, "--max-tokens", 9000, "--max-seq-len", 9999)
PROGRAM = ROOT / "generate.py"


@pytest.fixture(scope="module")
def single():
    """What one process prints."""

    @functools.cache
    def run(*argv):
        out = io.StringIO()
        with pytest.MonkeyPatch.context() as m, contextlib.redirect_stdout(out):
            m.setattr(generate, "read_bandwidth", lambda device: 30.0)  # measuring takes seconds
            assert generate.main([str(arg) for arg in argv]) == 0
        return out.getvalue()

    return run


@linux
@pytest.mark.parametrize(
    "options",
    [("--temperature", 0, "--draft-checkpoint", DRAFT), ("--compile", "--num-samples", 2)],
    ids=["draft", "compiled"],
)
def test_torchrun(programs, single, options):
    """Text or statistics from every rank; statistics on stdout; a follower that waits for ever."""
    program = programs.torchrun(2, PROGRAM, *SOME, *options)
    assert program.code() == 0, program.err
    assert not programs.all_end(5)
    plain = options[1:] if "--compile" in options else options[:2]
    assert program.out == single(*SOME, *plain)
    assert re.fullmatch(STATISTICS, program.err)


@linux
@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (2, ("--checkpoint", "/nowhere"), ".*/nowhere.*"),
        (3, (), "8 attention heads cannot be shared evenly by 3 ranks"),
    ],
)  # fmt: skip
def test_an_error_of_use_is_printed_once(programs, ranks, options, message):
    """The same line from each rank, or from none; success; ranks that wait for those who failed."""
    program = programs.torchrun(ranks, PROGRAM, *SOME, *options)
    assert program.code(30) != 0
    assert not programs.all_end(30)
    assert program.out == ""
    (line,) = [line for line in program.err.splitlines() if "error:" in line]
    assert re.fullmatch(f"generate.py: error: {message}", line)


@linux
def test_no_thread_outlives_the_ranks(programs):
    """A thread of gloo's that lets go of a tensor while Python ends aborts the process, one time in
    ten, after all its work is done: the group was kept alive by who knows what."""
    worker = ROOT / "tests" / "tp_worker.py"
    for program in programs.by_hand(2, worker, "threads", *SOME, "--compile"):
        assert program.code() == 0, program.err
        assert "python" in program.err and "gloo" not in program.err.split("threads: ")[1]


@linux
def test_two_machines(programs, single):
    """Two launchers, which find each other through one port: what two machines would run."""
    meeting = ("--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-id", programs.mark,
               "--rdzv-endpoint", f"127.0.0.1:{free_port()}",
               "--local-addr", "127.0.0.1")  # fmt: skip
    machines = [programs.torchrun(1, PROGRAM, *SOME, where=meeting) for _ in range(2)]
    for machine in machines:
        assert machine.code() == 0, machine.err
    assert sorted(machine.out for machine in machines) == ["", single(*SOME)]
    assert not programs.all_end(5)


# --- How they end ---------------------------------------------------------------------------------


@linux
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("launcher", ["torchrun", "by hand"])
def test_a_rank_is_killed(programs, launcher, who):
    """The others wait for it for ever. By hand there is nobody to end them."""
    if launcher == "torchrun":
        started = [programs.torchrun(2, PROGRAM, *LONG)]
        started[0].speaks()
        os.kill(programs.rank(who), signal.SIGKILL)
    else:
        started = programs.by_hand(2, PROGRAM, *LONG)
        started[0].speaks()
        started[who].process.kill()
    assert not programs.all_end(30)
    if launcher == "torchrun":
        assert started[0].code() != 0
        assert re.search("SIGKILL|lost contact", started[0].err)
    else:
        survivor = started[1 - who]
        assert survivor.code() != 0
        assert survivor.err.count(f"error: rank {1 - who} lost contact with another rank") == 1
        assert "Traceback" not in survivor.err


@linux
@pytest.mark.parametrize("who", ["leader", "torchrun", "all, by hand"])
def test_ctrl_c(programs, single, who):
    """The text so far lost, a traceback, ranks that are left behind or that end too early for rank
    0 to print. At a terminal torchrun alone gets Ctrl-C, as its ranks have sessions of their own,
    and hands it on."""
    if who == "all, by hand":
        started = programs.by_hand(2, PROGRAM, *LONG)
        started[0].speaks()
        for program in started:
            program.process.send_signal(signal.SIGINT)
    else:
        started = [programs.torchrun(2, PROGRAM, *LONG)]
        started[0].speaks()
        os.kill(programs.rank(0) if who == "leader" else started[0].process.pid, signal.SIGINT)
    assert not programs.all_end(30)
    text = started[0].out
    assert text.endswith("\n") and single(*TEXT, "--max-tokens", 200).startswith(text[:-1])
    assert "KeyboardInterrupt" not in "".join(program.err for program in started)
    if who != "torchrun":  # which sends a second one that may hit the statistics
        assert started[0].err.count("new tokens") == 1


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """An exception in the middle of one rank's forward: the programs, and what is left of them."""

    @functools.cache
    def run(who):
        group = Programs(tmp_path_factory.mktemp("faulty"))
        started = group.by_hand(2, ROOT / "tests" / "tp_worker.py", "fault", who, *LONG)
        try:
            started[0].speaks()
            left = group.all_end(30)
            return [(p.out, p.err, p.process.poll()) for p in started], left
        finally:
            group.kill()

    return run


@linux
@pytest.mark.parametrize("who", [1, 0])
def test_an_exception_in_a_forward(faulty, who):
    """The other rank waits for a sum that never comes: out of memory on one of them, say."""
    programs, left = faulty(who)
    assert not left
    assert all(code != 0 for *_, code in programs)
    assert "lost contact" in programs[1 - who][1]


@linux
def test_the_cause_of_an_end_is_shown(faulty):
    """A follower's traceback is thrown away: what is left is that contact was lost."""
    programs, _ = faulty(1)
    assert "a fault for the test" in "".join(err for _, err, _ in programs)
