"""Tensor parallelism: one model over several processes, each with a share of every matrix.

    torchrun --nproc-per-node 2 generate.py              two ranks on this machine
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT generate.py

The second is started on each of two machines, of which HOST is one, with the same versions, options
and checkpoint. Rank 0 is on the machine whose name, or --local-addr, sorts first. Where a machine's
name leads nowhere, or to itself alone, torchrun needs --local-addr ADDRESS there, and on HOST also
--rdzv-conf is_host=1; gloo needs the name of the network interface in GLOO_SOCKET_IFNAME, and NCCL
in NCCL_SOCKET_IFNAME. How many seconds a machine waits for the other is bounded by --rdzv-conf
join_timeout=600, and how many it looks for HOST by read_timeout=60.

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
exchanges are quick; over gloo on two CPU cores those of a step, 45 for 22 layers, take
longer than they save (`torchrun ... tools/bench.py latency`). Read: shard, Leader, lead, follow,
join.
"""

import contextlib
import json
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor, nn

from checkpoint import CheckpointError, Files, blame, build, is_tied
from model import Transformer
from paged import Row, Runner
from settings import BUNDLED, VERSION, EngineArgs, Ranks, given

# --- A rank's share of a model --------------------------------------------------------------------

# Linear -> which dimension of its weight is cut: 0, by outputs; 1, by inputs.
CUTS = dict(q_proj=0, k_proj=0, v_proj=0, o_proj=1, gate_proj=0, up_proj=0, down_proj=1, lm_head=0)


def shard(model: Transformer, files: Files, rank: int, ranks: int) -> tuple[Transformer, Files]:
    """Make one rank's share of a model that is still empty, and of the files that will fill it.

    Args:
        model: on the meta device, with QuantLinears where the files have them.
        files: see checkpoint.locate_tensors; they fit. {}: there are none, and the weights will be
            random.

    Returns:
        The share, with plain Linears; and what it reads.

    Raises:
        CheckpointError: something cannot be shared evenly; no weight has been read yet.

    Example: 4 query heads and 2 kv heads of 8 channels on 4 ranks: rank 3 reads rows 24..31 of q
        and, as two ranks share a kv head, rows 8..15 of k and v; and columns 24..31 of o
    """
    c, K = model.config, model.config.num_key_value_heads
    # Several ranks may have the same kv head.
    sizes = dict(num_attention_heads=c.num_attention_heads, intermediate_size=c.intermediate_size,
        moe_intermediate_size=c.moe_intermediate_size or 0,
        num_key_value_heads=K if ranks % K else ranks)  # fmt: skip
    if any(size % ranks for size in sizes.values()):
        raise CheckpointError(f"{sizes} cannot all be shared evenly by {ranks} ranks")
    sizes = {name: size // ranks for name, size in sizes.items()}
    with torch.device("meta"):
        share = build(replace(c, tie_word_embeddings=False, **sizes))
        share.lm_head = nn.Linear(c.hidden_size, -(-c.vocab_size // ranks), bias=False)
    share.requires_grad_(False).to(model.dtype)
    # Hooks, not modules around modules: names stay the checkpoint's, and the Linears inside can
    # still be replaced by quantised and packed ones.
    share.register_forward_hook(gather)
    for block in share.layers:
        block.self_attn.register_forward_hook(add_up)  # it ends with o_proj
        block.mlp.register_forward_hook(add_up)  # and this, or its experts, with down_proj
    if is_tied(model):  # of the embedding itself each rank has all, as rows are looked up
        files["lm_head.weight"] = files["embed_tokens.weight"]
    for name, stored in files.items():
        *_, module, kind = name.split(".")  # "layers.0.self_attn.o_proj.weight"
        dim = CUTS.get(module)
        if dim == 1 and kind == "bias":
            files[name] = stored.changed(lambda bias: bias * (rank == 0))  # added by rank 0 alone
        elif module in CUTS:
            n = stored.shape[dim]
            pieces = min(ranks, K if module in ("k_proj", "v_proj") else n)  # n is 1: all share it
            size = -(-n // pieces)
            files[name] = stored.changed(partial(cut, dim, rank * pieces // ranks, size))
    return share, files


def cut(dim: int, i: int, size: int, whole: Tensor) -> Tensor:
    """Piece i of a tensor; what is past its end, as of a vocabulary that does not divide evenly, is
    zeros."""
    piece = whole.movedim(dim, -1)[..., i * size : (i + 1) * size]
    return nn.functional.pad(piece, (0, size - piece.shape[-1])).movedim(-1, dim)


def add_up(module: nn.Module, args: tuple, y: Tensor) -> Tensor:
    """The sum of every rank's y."""
    return _ops.wait_tensor(_ops.all_reduce(y, "sum", _world))


def gather(module: Transformer, args: tuple, logits: Tensor) -> Tensor:
    """Put the ranks' parts of the vocabulary together: (..., V / ranks) -> (..., V)."""
    ranks = dist.get_world_size()
    parts = _ops.wait_tensor(_ops.all_gather_into_tensor(logits.contiguous(), ranks, _world))
    return torch.cat(parts.chunk(ranks), -1)[..., : module.config.vocab_size]


_ops = torch.ops._c10d_functional  # collectives that torch.compile can have inside a graph
# The name that PyTorch gives the group of all ranks. Nothing may keep that group alive when join
# ends, or its threads outlive Python, and now and then one of them aborts the process. Compiled
# code that asked the group for its name would; and torch.distributed.nn would, in its functions'
# defaults, if it were first loaded when there is a group: hence the import above.
_world = "0"


# --- One schedules, the others follow -------------------------------------------------------------


def broadcast(message: Any = None, source: int = 0) -> Any:
    """Broadcast what rank 0 is about to do, as JSON, or None at the end; elsewhere, receive it. Or
    the same from another rank."""
    data = torch.frombuffer(bytearray(json.dumps(message), "ascii"), dtype=torch.uint8).clone()
    size = torch.tensor(len(data))
    dist.broadcast(size, source)
    dist.broadcast(data.resize_(int(size)), source)
    return json.loads(bytes(data.tolist()))


class Leader(Runner):
    """Rank 0's Runner: tells the others what it is about to do, then does its share."""

    def __init__(self, model: Transformer, *shape: Any) -> None:
        lead("start", partial(super().__init__, model), *shape)

    def forward(self, rows: list[Row]) -> Tensor:
        return lead("forward", super().forward, rows)

    def copy_blocks(self, pairs: list) -> None:
        lead("copy_blocks", super().copy_blocks, pairs)


def lead(name: str, act: Callable, *args: Any) -> Any:
    """Have the others do what this rank does now. Ctrl-C in the middle would leave them there, so
    it is held back until the end. For the main thread, which is where engines run.

    Raises:
        ConnectionError: it failed here, or another rank is lost: no rank can go on. The others
            notice when this one closes its connections.
    """
    pressed = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        broadcast((name, *args))
        return act(*args)
    except Exception as error:
        raise ConnectionError(f"rank 0 cannot go on: {error!r}") from error
    finally:
        signal.signal(signal.SIGINT, before)
        for number in pressed:
            if callable(before):  # not raised again: the server counts signals
                before(number, None)


def follow(model: Transformer) -> int:
    """Do what rank 0 does, until it stops; from here on it decides what signals mean, too. Returns
    the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with blame(f"rank {dist.get_rank()}"):
        while message := broadcast():
            match message:
                case "start", *shape:
                    runner = Runner(model, *shape)
                case "forward", rows:
                    runner.forward([Row(*row) for row in rows])  # JSON has lists alone
                case "copy_blocks", pairs:
                    runner.copy_blocks(pairs)
    return 0


# --- Joining --------------------------------------------------------------------------------------


MEET = """unset RANK and WORLD_SIZE, or use torchrun, with a GPU each or --device cpu, and with \
GLOO_SOCKET_IFNAME where several machines do not find each other"""


@contextlib.contextmanager
def join(device: torch.device) -> Iterator[Ranks]:
    """Join the other processes that torchrun has started.

    When rank 0 is done, it tells the others. A rank that fails, or is killed, closes its
    connections: so the others' next exchange with it fails, and they end too, rank 0 with a line
    that says so, and so does the first rank of each other machine; the rest are silent. An error
    of its own any rank prints, but the rest only after 3 s: if all ranks have the same one, the
    first prints it before, and torchrun ends all ranks of a machine when one ends.

    Raises:
        ValueError: some of torchrun's variables only; fewer GPUs than ranks on this machine; or the
            ranks cannot reach each other.
        ConnectionError: see lead.
    """
    try:
        with blame(MEET):
            # Integers go over gloo even between GPUs.
            backend = "gloo"
            if device.type == "cuda":
                backend = "cpu:gloo,cuda:nccl"
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            # All start at once, but one may read PyTorch from a slow disk. Who cannot be reached is
            # waited for as long. From then on there is no deadline: a prompt may come late.
            dist.init_process_group(backend, timeout=timedelta(minutes=5))
            dist.distributed_c10d._set_pg_timeout(timedelta(days=365))
        rank, ranks = dist.get_rank(), dist.get_world_size()
        cut = partial(shard, rank=rank, ranks=ranks)
        yield Ranks(device, rank, ranks, cut, Leader, follow, agree)
        if rank == 0:
            with contextlib.suppress(RuntimeError):  # they may be gone
                broadcast()
    except Exception as error:
        if os.environ.get("LOCAL_RANK", "0") != "0" and "gloo" not in str(error):
            time.sleep(3)
            sys.stderr = sys.__stderr__
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# --- The same on every machine --------------------------------------------------------------------


def agree(args: Any) -> None:
    """Check that all ranks have the same versions, the same options, and a folder of the same
    content, wherever each machine keeps it. Of each file 64 MB count: to read all of it would take
    as long as to load it. A prompt, sampling settings and a draft model are rank 0's alone.

    Raises:
        ValueError: they do not. Every rank has the same error, with all that differs.
    """
    facts = given(EngineArgs, args) | dict(kilolm=VERSION, torch=torch.__version__)
    facts.pop("draft_checkpoint", None)
    folder = facts.pop("checkpoint", None) or BUNDLED
    for file in folder.glob("*.[js]*"):  # .json and .safetensors
        facts[file.name] = zlib.crc32(file.open("rb").read(2**26))
    first, *others = [broadcast(facts, rank).items() for rank in range(dist.get_world_size())]
    for rank, theirs in enumerate(others, 1):
        if theirs != first:
            raise ValueError(
                f"all ranks must be alike: rank {rank} has {dict(theirs - first)}, "
                f"rank 0 {dict(first - theirs)}"
            )
