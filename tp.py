"""Tensor parallelism: one model over several processes, each with a share of every matrix.

    torchrun --nproc-per-node 2 generate.py              two ranks on this machine
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT generate.py

A matrix is cut so that two in a row need one sum over the ranks, not two (Megatron-LM, Shoeybi et
al. 2019, arXiv:1909.08053). The first is cut by outputs, the second by the same numbers as inputs:

                 rank 0        rank 1
    x            whole         whole            every rank has all of x,
    q k v        heads 0, 1    heads 2, 3       computes its own heads (and its part of the MLP),
    o            columns of    columns of       multiplies them by its columns of o (and down),
                 heads 0, 1    heads 2, 3
    all-reduce   y0 + y1       y0 + y1          and the sum over the ranks is what one would have

A rank's share is itself a small Transformer with fewer heads, a narrower MLP and a part of the
vocabulary, so the model, its caches, quantisation and compiling need no change: this file makes the
config of that share, says which slice of each stored tensor it reads, and hooks the sums in. Rank 0
alone schedules, samples and prints. Before each forward it broadcasts the integers that describe
it, and the other ranks do the same. What it buys: a rank holds and reads 1/n of the weights. That
is up to n times the speed where exchanges are quick; over gloo on two CPU cores the 46 of a step
take longer than they save (`torchrun ... bench.py latency`). Read: shard, Leader, follow, join.
Next: server.py.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn
from safetensors import safe_open
from torch import Tensor, nn

from kv_cache import PagedCache, Row, StaticCache
from model import CheckpointError, Files, StoredTensor, Transformer, check_tensors, named_tensors
from runner import Runner

# --- A rank's share of a model --------------------------------------------------------------------


class Slice(NamedTuple):
    """The part of a stored tensor that a rank reads; see model.StoredTensor."""

    stored: StoredTensor
    dim: int
    start: int
    size: int  # with what is past the stored end, which reads as zeros

    @property
    def shape(self) -> tuple[int, ...]:
        shape = [*self.stored.shape]
        shape[self.dim] = self.size
        return tuple(shape)

    @property
    def dtype(self) -> str:
        return self.stored.dtype

    def read(self) -> Tensor:
        stored = self.stored.shape[self.dim]
        start, end = min(self.start, stored), min(self.start + self.size, stored)
        with safe_open(self.stored.file, "pt") as reader:
            part = reader.get_slice(self.stored.name)
            part = part[:, start:end] if self.dim else part[start:end]
        if end - start == self.size:
            return part
        return torch.cat((part, part.new_zeros(self.size - (end - start), *part.shape[1:])))


def shard(model: Transformer, files: Files, rank: int, ranks: int) -> tuple[Transformer, Files]:
    """Make one rank's share of a model that is still empty, and of the files that will fill it.

    Args:
        model: on the meta device.
        files: see model.locate_tensors.

    Raises:
        CheckpointError: something cannot be shared evenly; no weight has been read yet.

    Example: 4 query heads and 2 kv heads of 8 channels on 4 ranks: rank 3 reads rows 24..31 of q
        and, as two ranks share a kv head, rows 8..15 of k and v; and columns 24..31 of o
    """
    c = model.config
    N, K, H, F = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.intermediate_size
    for what, size in (("attention heads", N), ("feed-forward channels", F)):
        if size % ranks:
            raise CheckpointError(f"{size} {what} cannot be shared evenly by {ranks} ranks")
    if K % ranks and ranks % K:
        raise CheckpointError(f"{K} key-value heads cannot be shared evenly by {ranks} ranks")
    N, F, V, own = N // ranks, F // ranks, -(-c.vocab_size // ranks), max(1, K // ranks)
    local = replace(
        c, num_attention_heads=N, num_key_value_heads=own, intermediate_size=F, vocab_size=V
    )
    whole = {name: tensor for name, tensor in named_tensors(model) if name in files}
    # Of whole tensors: a slice would fit whatever it is cut of.
    check_tensors({name: files[name] for name in whole}, whole)
    with torch.device("meta"):
        share = Transformer(local)
        share.embed_tokens = ParallelEmbedding(V, c.hidden_size, rank * V)
    if c.tie_word_embeddings:
        share.lm_head.weight = share.embed_tokens.weight
    share.requires_grad_(False).to(model.embed_tokens.weight.dtype)
    share.config = replace(local, vocab_size=c.vocab_size)
    for block in share.layers:  # o_proj and down_proj are the last that these two run
        block.self_attn.register_forward_hook(_sum)
        block.mlp.register_forward_hook(_sum)
    share.register_forward_hook(gather)
    first = rank * K // ranks  # kv head
    spans = {  # by outputs, then by inputs: (dim, start, size)
        "q_proj": (0, rank * N * H, N * H), "k_proj": (0, first * H, own * H),
        "v_proj": (0, first * H, own * H), "gate_proj": (0, rank * F, F),
        "up_proj": (0, rank * F, F), "embed_tokens": (0, rank * V, V), "lm_head": (0, rank * V, V),
        "o_proj": (1, rank * N * H, N * H), "down_proj": (1, rank * F, F),
    }  # fmt: skip
    parts = {}
    for name, stored in files.items():
        module, _, kind = name.rpartition(".")  # "layers.0.self_attn.o_proj", "weight"
        dim, start, size = spans.get(module.rpartition(".")[2], (0, 0, None))
        if size is None or (dim == 1 and stored.shape[-1] == 1):  # one scale for all inputs
            parts[name] = stored
        elif dim == 1 and kind == "bias":  # added once, by rank 0
            (D,) = stored.shape
            parts[name] = Slice(stored, 0, 0 if rank == 0 else D, D)
        elif dim == 0:
            parts[name] = Slice(stored, 0, start, size)
        else:  # stored columns can stand for several input channels each, in bytes or groups
            stride = size * ranks // stored.shape[1]
            if size % stride:
                raise CheckpointError(
                    f"{name}: {size} input channels for each of {ranks} ranks do not make whole "
                    f"groups of {stride}"
                )
            parts[name] = Slice(stored, 1, start // stride, size // stride)
    return share, parts


class ParallelEmbedding(nn.Embedding):
    """Rows start .. start + V - 1 of an embedding table; the others are other ranks'."""

    def __init__(self, num_embeddings: int, embedding_dim: int, start: int) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.start = start

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.start
        here = (local >= 0) & (local < self.num_embeddings)
        rows = super().forward(local.clamp(0, self.num_embeddings - 1))
        return all_reduce(rows * here[..., None])


# Hooks, not modules around modules: names stay the checkpoint's, and the Linears inside can still
# be replaced by quantised and packed ones.
def _sum(module: nn.Module, args: tuple, y: Tensor) -> Tensor:
    return all_reduce(y)


def gather(module: Transformer, args: tuple, logits: Tensor) -> Tensor:
    """Put the ranks' parts of the vocabulary together: (..., V / ranks) -> (..., V)."""
    ranks = dist.get_world_size()
    parts = _ops.wait_tensor(_ops.all_gather_into_tensor(logits.contiguous(), ranks, _world))
    return torch.cat(parts.chunk(ranks), -1)[..., : module.config.vocab_size]


def all_reduce(x: Tensor) -> Tensor:
    """The sum of every rank's x."""
    return _ops.wait_tensor(_ops.all_reduce(x, "sum", _world))


_ops = torch.ops._c10d_functional  # collectives that torch.compile can have inside a graph
# The name of the group of all ranks; join sets it. Nothing may keep that group alive when join
# ends, or its threads outlive Python, and now and then one of them aborts the process. Compiled
# code that asked the group for its name would; and torch.distributed.nn would, in its functions'
# defaults, if it were first loaded when there is a group: hence the import above.
_world = ""


# --- One schedules, the others follow -------------------------------------------------------------

STOP, CACHE, COMPILE, COPY, RUN = range(5)


def send(op: int, *lists: list[int]) -> None:
    """Broadcast a command and up to four lists of integers: their lengths, then all in one."""
    head = [op] + [len(each) for each in lists] + [0] * (4 - len(lists))
    dist.broadcast(torch.tensor(head), 0)
    if flat := [i for each in lists for i in each]:
        dist.broadcast(torch.tensor(flat), 0)


def receive() -> tuple[int, list[list[int]]]:
    """Wait for what rank 0 sends."""
    head = torch.empty(5, dtype=torch.int64)
    dist.broadcast(head, 0)
    op, *sizes = head.tolist()
    flat = torch.empty(sum(sizes), dtype=torch.int64)
    if sum(sizes):
        dist.broadcast(flat, 0)
    return op, [part.tolist() for part in flat.split(sizes)]


class Leader(Runner):
    """Rank 0's Runner: tells the others what it is about to do, then does its share."""

    leads = False  # whether the others only wait for a message, so that STOP would reach them

    def __init__(self, model: Transformer, cache: StaticCache | PagedCache) -> None:
        super().__init__(model, cache)
        if cache.batch_size is None:
            shape, kind = (cache.num_blocks, cache.block_size), cache.pools[0][0].dtype
        else:
            shape, kind = (cache.batch_size, cache.max_seq_len), cache.layers[0].k.dtype
        with self.leading():
            send(CACHE, [cache.batch_size is None, *shape, kind == torch.int8])

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """What the others do too. Where it fails, they are left in the middle of it."""
        with uninterrupted():
            Leader.leads = False
            yield
            Leader.leads = True

    def compile(self) -> None:
        with self.leading():
            send(COMPILE)
            super().compile()

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            with self.leading():
                send(COPY, [i for pair in pairs for i in pair])
                super().copy_blocks(pairs)

    def __call__(self, rows: list[Row], tokens: list[int], select: list[int]) -> Tensor:
        with self.leading():
            blocks = [block for row in rows for block in row.blocks]
            shapes = [n for row in rows for n in (len(row.blocks), row.start, row.end)]
            send(RUN, shapes, blocks, tokens, select)
            return super().__call__(rows, tokens, select)


def follow(model: Transformer) -> None:
    """Do what rank 0 does, until it stops."""
    runner = None
    while True:
        op, lists = receive()
        if op == STOP:
            return
        if op == CACHE:
            paged, first, second, int8 = lists[0]
            weight = model.embed_tokens.weight
            dtype = torch.int8 if int8 else weight.dtype
            kind = PagedCache if paged else StaticCache
            runner = Runner(model, kind(model.config, first, second, dtype, weight.device))
        elif op == COMPILE:
            runner.compile()
        elif op == COPY:
            runner.copy_blocks([*zip(lists[0][::2], lists[0][1::2], strict=True)])
        else:
            shapes, blocks, tokens, select = lists
            rows = []
            for i in range(0, len(shapes), 3):
                count, start, end = shapes[i : i + 3]
                rows.append(Row(blocks[:count], start, end))
                blocks = blocks[count:]
            runner(rows, tokens, select)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back: between a broadcast and the forward, it would leave the others waiting. For
    the main thread, which is where engines run."""
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        signal.raise_signal(signal.SIGINT)


# --- Joining --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks."""

    device: torch.device
    rank: int = 0
    ranks: int = 1

    @property
    def shard(self) -> Callable[[Transformer, Files], tuple[Transformer, Files]] | None:
        """What to give to quantize.load."""
        if self.ranks == 1:
            return None
        return lambda model, files: shard(model, files, self.rank, self.ranks)

    @property
    def runner(self) -> type[Runner]:
        return Runner if self.ranks == 1 else Leader


@contextlib.contextmanager
def join(device: torch.device) -> Iterator[Ranks]:
    """Join the other processes that torchrun has started, if it has.

    On leaving, rank 0 stops the others; where a rank dies, the others' next exchange with it fails.

    Raises:
        ValueError: fewer GPUs than ranks on this machine.
        ConnectionError: contact with another rank was lost.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield Ranks(device)
        return
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if device.type == "cuda":
        if here > (have := torch.cuda.device_count()):
            raise ValueError(f"{here} ranks need {here} GPUs, this machine has {have}: "
                             "lower --nproc-per-node or use --device cpu")  # fmt: skip
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    # Integers go over gloo even between GPUs. No deadline: rank 0 may wait long for a prompt, and
    # a rank that dies closes its connections, which the others notice at once.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(days=365))
    global _world
    _world = dist.group.WORLD.group_name
    ranks = Ranks(device, dist.get_rank(), dist.get_world_size())
    if ranks.rank:  # rank 0 decides what signals mean
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: _ended.append(True))
    try:
        yield ranks
        Leader.leads = ranks.rank == 0
    except Exception as error:
        sys.stderr = sys.__stderr__  # a rank that fails says so, whichever it is
        if is_lost(error):
            message = f"rank {ranks.rank} lost contact with another rank, which may have died"
            raise ConnectionError(message) from error
        raise
    finally:
        # Ranks in the middle of something could not take a STOP; they see the connection close.
        with contextlib.suppress(RuntimeError):  # they may be gone
            if Leader.leads:
                send(STOP)
        Leader.leads = False
        dist.destroy_process_group()


_ended: list[bool] = []  # whether torchrun has asked this rank to end


def is_lost(error: Exception) -> bool:
    """Whether this says that another rank is out of reach."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def silence() -> None:
    """Throw away what ranks other than the first would print, for as long as the process lives."""
    if int(os.environ.get("RANK", 0)):
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def report(program: str, error: Exception) -> int:
    """Print an error, on one rank if all have it, and return the exit status, 2."""
    where = sys.stderr
    if int(os.environ.get("RANK", 0)):
        for _ in range(30):  # torchrun ends all ranks when one ends: let it be rank 0, if it can
            time.sleep(0.1)
            if _ended:
                return 2
        where = sys.__stderr__
    print(f"{program}: error: {error}", file=where)
    return 2
