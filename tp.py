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
it, and the other ranks do the same. What it buys: a rank holds and reads 1/n of the weights (and
all of the embedding, of which a step reads a few rows). That is up to n times the speed where
exchanges are quick; over gloo on two CPU cores the 45 of a step take longer than they save
(`torchrun ... tools/bench.py latency`). Read: shard, Leader, follow, join.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor, nn
from torch.nn.functional import pad

from checkpoint import CheckpointError, Files, Stored, blame, build, check_tensors
from model import Transformer
from paged import Row, Runner
from settings import Ranks

# --- A rank's share of a model --------------------------------------------------------------------

# Linear -> which dimension of its weight is cut: 0, by outputs; 1, by inputs.
CUTS = dict(q_proj=0, k_proj=0, v_proj=0, o_proj=1, gate_proj=0, up_proj=0, down_proj=1, lm_head=0)


def shard(model: Transformer, files: Files, rank: int, ranks: int) -> tuple[Transformer, Files]:
    """Make one rank's share of a model that is still empty, and of the files that will fill it.

    Args:
        model: on the meta device, with QuantLinears where the files have them.
        files: see checkpoint.locate_tensors; {}: there are none, and the weights will be random.

    Returns:
        The share, with plain Linears; and what it reads.

    Raises:
        CheckpointError: the files do not fit, or something cannot be shared evenly; no weight has
            been read yet.

    Example: 4 query heads and 2 kv heads of 8 channels on 4 ranks: rank 3 reads rows 24..31 of q
        and, as two ranks share a kv head, rows 8..15 of k and v; and columns 24..31 of o
    """
    c = model.config
    N, K, F = c.num_attention_heads, c.num_key_value_heads, c.intermediate_size
    M = c.moe_intermediate_size or F  # an expert's
    if N % ranks or F % ranks or M % ranks or (K % ranks and ranks % K):
        sizes = f"{N} attention heads, {K} key-value heads, {M} or {F} feed-forward channels"
        raise CheckpointError(f"{sizes} cannot all be shared evenly by {ranks} ranks")
    if files:
        check_tensors(files, model)
    local = replace(
        c, num_attention_heads=N // ranks, num_key_value_heads=max(1, K // ranks),
        intermediate_size=F // ranks, moe_intermediate_size=M // ranks, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        share = build(local)
        share.lm_head = nn.Linear(c.hidden_size, -(-c.vocab_size // ranks), bias=False)
    share.requires_grad_(False).to(model.dtype)
    # Hooks, not modules around modules: names stay the checkpoint's, and the Linears inside can
    # still be replaced by quantised and packed ones.
    share.register_forward_hook(gather)
    for block in share.layers:
        block.self_attn.register_forward_hook(add_up)  # it ends with o_proj
        block.mlp.register_forward_hook(add_up)  # and this, or its experts, with down_proj
    if model.tied:  # of the embedding itself each rank has all, as rows are looked up
        files = files | {"lm_head.weight": files["embed_tokens.weight"]}
    parts = dict(files)
    for name, stored in files.items():
        *_, module, kind = name.split(".")  # "layers.0.self_attn.o_proj.weight"
        dim = CUTS.get(module)
        if dim == 1 and kind == "bias":
            # Added once, by rank 0: the others read past its end, which is zeros.
            parts[name] = part_of(stored, 0, rank * c.hidden_size, c.hidden_size)
        elif module in CUTS:
            n = stored.shape[dim]
            pieces = min(ranks, K if module in ("k_proj", "v_proj") else n)  # n is 1: all share it
            size = -(-n // pieces)
            parts[name] = part_of(stored, dim, rank * pieces // ranks * size, size)
    return share, parts


def part_of(stored: Stored, dim: int, start: int, size: int) -> Stored:
    """A part of a stored tensor; what is past its end, as of a vocabulary that does not divide
    evenly, reads as zeros."""

    def read() -> Tensor:
        there = stored.read().movedim(dim, -1)[..., start : start + size]
        return pad(there, (0, size - there.shape[-1])).movedim(-1, dim)

    shape = list(stored.shape)
    shape[dim] = size
    return stored._replace(shape=tuple(shape), read=read)


def add_up(module: nn.Module, args: tuple, y: Tensor) -> Tensor:
    """The sum of every rank's y."""
    return _ops.wait_tensor(_ops.all_reduce(y, "sum", _world))


def gather(module: Transformer, args: tuple, logits: Tensor) -> Tensor:
    """Put the ranks' parts of the vocabulary together: (..., V / ranks) -> (..., V)."""
    ranks = dist.get_world_size()
    parts = _ops.wait_tensor(_ops.all_gather_into_tensor(logits.contiguous(), ranks, _world))
    return torch.cat(parts.chunk(ranks), -1)[..., : module.config.vocab_size]


_ops = torch.ops._c10d_functional  # collectives that torch.compile can have inside a graph
# The name of the group of all ranks; join sets it. Nothing may keep that group alive when join
# ends, or its threads outlive Python, and now and then one of them aborts the process. Compiled
# code that asked the group for its name would; and torch.distributed.nn would, in its functions'
# defaults, if it were first loaded when there is a group: hence the import above.
_world = ""


# --- One schedules, the others follow -------------------------------------------------------------


def broadcast(message: Any = None) -> Any:
    """Broadcast what rank 0 is about to do, as JSON, or None at the end; elsewhere, receive it."""
    data = torch.frombuffer(bytearray(json.dumps(message), "ascii"), dtype=torch.uint8).clone()
    size = torch.tensor(len(data))
    dist.broadcast(size, 0)
    dist.broadcast(data.resize_(int(size)), 0)
    return json.loads(bytes(data.tolist()))


class Leader(Runner):
    """Rank 0's Runner: tells the others what it is about to do, then does its share."""

    leads = False  # whether the others only wait for a message, so that the end would reach them

    def __init__(self, model: Transformer, *shape: Any) -> None:
        with leading("start", *shape):
            super().__init__(model, *shape)

    def forward(self, rows: list[Row]) -> Tensor:
        with leading("forward", rows):
            return super().forward(rows)

    def copy_blocks(self, pairs: list) -> None:
        with leading("copy_blocks", pairs):
            super().copy_blocks(pairs)


@contextlib.contextmanager
def leading(*call: Any) -> Iterator[None]:
    """What the others do too. Where it fails, they are left in the middle of it: so Ctrl-C is held
    back until the end. For the main thread, which is where engines run."""
    pressed = []

    def press(*_: Any) -> None:
        if pressed:  # the second time: at once, as another rank may never come
            os._exit(130)
        pressed.append(True)

    before = signal.signal(signal.SIGINT, press)
    Leader.leads = False
    try:
        broadcast(call)
        yield
        Leader.leads = True
    except Exception as error:
        blame_the_lost(error)
        raise
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            signal.raise_signal(signal.SIGINT)


def follow(model: Transformer) -> int:
    """Do what rank 0 does, until it stops; from here on it decides what signals mean, too. Returns
    the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _ended.append(True))
    while message := broadcast():
        match message:
            case "start", *shape:
                runner = Runner(model, *shape)
            case "forward", rows:
                runner.forward([Row(*row) for row in rows])  # JSON has lists alone
            case "copy_blocks", pairs:
                runner.copy_blocks(pairs)
    return 0


_ended = []  # not empty: a signal has asked this rank to end


# --- Joining --------------------------------------------------------------------------------------


@contextlib.contextmanager
def join(device: torch.device) -> Iterator[Ranks]:
    """Join the other processes that torchrun has started.

    On leaving, rank 0 stops the others; where a rank dies, the others' next exchange with it fails.
    Of an error that all ranks have rank 0 speaks.

    Raises:
        ValueError: fewer GPUs than ranks on this machine; or some of torchrun's variables only.
        ConnectionError: contact with another rank was lost.
    """
    try:
        with blame("unset RANK, WORLD_SIZE and LOCAL_..., or let torchrun set them"):
            names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
            rank, ranks, local, here = (int(os.environ[name]) for name in names)
        # Integers go over gloo even between GPUs. No deadline: rank 0 may wait long for a prompt,
        # and a rank that dies closes its connections, which the others notice at once.
        backend = "gloo"
        if device.type == "cuda":
            n = torch.cuda.device_count()
            if here > n:
                way_out = "lower --nproc-per-node or use --device cpu"
                raise ValueError(f"{here} ranks, {n} GPUs: {way_out}")
            backend = "cpu:gloo,cuda:nccl"
            device = torch.device("cuda", local)
            torch.cuda.set_device(device)
        dist.init_process_group(backend, timeout=timedelta(days=365))
        global _world
        _world = dist.group.WORLD.group_name
        try:
            yield Ranks(device, rank, ranks, partial(shard, rank=rank, ranks=ranks), Leader, follow)
        finally:
            # Ranks in the middle of something could not take the end; their connection closes.
            with contextlib.suppress(RuntimeError):  # they may be gone
                if Leader.leads:
                    broadcast()
            Leader.leads = False
            dist.destroy_process_group()
    except Exception as error:
        if os.environ.get("RANK", "0") != "0":
            wait_for_the_first()
        blame_the_lost(error)
        raise


def wait_for_the_first() -> None:
    """Let rank 0 say what went wrong, if it can: torchrun ends all ranks when one ends. After 3 s
    this rank says it itself."""
    for _ in range(30):
        time.sleep(0.1)
        if _ended:
            sys.exit(2)
    sys.stderr = sys.__stderr__


def blame_the_lost(error: Exception) -> None:
    """Raise ConnectionError where this error says that another rank is out of reach."""
    if isinstance(error, dist.DistError) or "gloo" in str(error):
        rank = os.environ.get("RANK")
        raise ConnectionError(f"rank {rank} lost contact with another rank") from error
