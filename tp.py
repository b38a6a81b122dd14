"""Tensor parallelism: one model over several processes, each with a share of the weights.

    torchrun --nproc-per-node 2 generate.py              two ranks on this machine
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT generate.py

Start the second command on each of two machines, with the same versions, options and checkpoint.
docs/many-machines.md says what to do if they do not find each other, or if one is lost.

The matrices are cut in pairs, so that a pair needs one sum over the ranks, not two (Megatron-LM,
Shoeybi et al. 2019, arXiv:1909.08053). The first matrix is cut along its outputs, and the second
along its inputs, at the same places:

                 rank 0        rank 1
    x            whole         whole            every rank has all of x,
    q k v        heads 0, 1    heads 2, 3       computes its own heads (and its part of the MLP),
    o            columns of    columns of       multiplies these by its columns of o (MLP: down),
                 heads 0, 1    heads 2, 3
    all-reduce   y0 + y1       y0 + y1          and adds up the ranks' results, which gives all of y

A rank's share is itself a small Transformer, with fewer heads, a narrower MLP and a part of
lm_head. So the model, its caches, quantisation and compiling need no change. This file makes the
share's config, says which slice of each stored tensor the share reads, and attaches hooks that do
the all-reduces and gather the logits. Rank 0 alone schedules, samples and prints. Before each
forward it broadcasts the integers that describe the forward, and the other ranks run the same one.

A rank holds and reads 1/n of the weights, and the whole embedding, of which a step reads a few
rows. So n ranks are up to n times as fast where exchanges are quick. Over gloo on two CPU cores the
exchanges of a step, 45 for 22 layers, cost more time than the sharing saves (`torchrun ...
tools/bench.py latency`). Read: shard, Leader, lead, follow; then join, in around/start/ranks.py.
"""

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
import torch.distributed.nn  # here, before there is a group; see _world
from torch import Tensor, nn

from around.folder import Empty, Files, build, is_tied
from around.machine import ctrl_c_held_back
from around.settings import JSON, InputError, blame, supported
from model import Config, Transformer
from paged import Row, Runner

# --- A rank's share of a model --------------------------------------------------------------------

# For each Linear the dimension of its weight that is cut: 0 is its outputs, 1 its inputs.
CUTS = dict(q_proj=0, k_proj=0, v_proj=0, o_proj=1, gate_proj=0, up_proj=0, down_proj=1, lm_head=0)


def shard(
    model: Transformer, files: Files, rank: int, world_size: int
) -> tuple[Transformer, Files]:
    """Make one rank's share of an empty model, and of the files that will fill it.

    Args:
        model: the whole model on the meta device, with QuantLinears where the files have them.
        files: the stored tensors (see around/folder/weights.py), made to fit the model. {}: there
            are no files, and the weights will be random. Then the model's lm_head must not be tied.

    Returns:
        The share, with plain Linears, and the files that it reads.

    Raises:
        InputError: a size cannot be shared evenly. No weight has been read yet.

    Example: 4 query heads and 2 kv heads of 8 channels on 4 ranks. Rank 3 reads rows 24..31 of q
        and columns 24..31 of o. Two ranks share a kv head, so it reads rows 8..15 of k and v
    """
    # 1) A smaller model.
    c = model.config
    with Empty("meta"):
        share = build(replace(c, **share_sizes(c, world_size)))
        # A Linear of its own, also if the head is tied. The config still says that it is, for
        # quantize_model.
        share.lm_head = nn.Linear(c.hidden_size, -(-c.vocab_size // world_size), bias=False)
    share.requires_grad_(False).to(model.dtype)
    # 2) The exchanges. These are hooks, because wrapper modules would change the names of the
    # parameters. Quantised and packed Linears can still take the place of the plain ones.
    share.register_forward_hook(gather)
    for layer in share.layers:
        layer.self_attn.register_forward_hook(add_up)  # after o_proj
        layer.mlp.register_forward_hook(add_up)  # after down_proj; with experts, after their sum
    # 3) The slices of the files. A rank has all of a tied embedding, to look up rows, and a part of
    # it as lm_head.
    if is_tied(model):
        files["lm_head.weight"] = files["embed_tokens.weight"]
    for name, stored in files.items():
        *_, module, kind = name.split(".")  # "layers.0.self_attn.o_proj.weight"
        dim = CUTS.get(module)  # None: every rank reads all of it
        if dim == 1 and kind == "bias":  # rank 0 adds it
            files[name] = stored.changed(lambda bias: bias * (rank == 0))
        elif dim is not None:
            n = stored.empty.shape[dim]
            # Most tensors have a piece for each rank. Some have fewer, and several ranks read the
            # same piece: k and v if there are fewer kv heads, and the scales and zeros of o or down
            # if each of their rows has a single one.
            pieces = min(world_size, c.num_key_value_heads if module in ("k_proj", "v_proj") else n)
            i = rank * pieces // world_size
            files[name] = stored.changed(partial(cut, dim, i, -(-n // pieces)))
    return share, files


def share_sizes(c: Config, world_size: int) -> JSON:
    """Return the sizes in a rank's config that differ from the whole model's.

    Raises:
        InputError: a size cannot be shared evenly.
    """
    # This norm takes a mean over all heads, which would need another exchange.
    supported("wide_qk_norm under torchrun", c.wide_qk_norm, False)
    K = c.num_key_value_heads
    sizes: JSON = dict(
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=world_size if world_size % K == 0 else K,  # ranks may have the same one
        intermediate_size=c.intermediate_size,
        moe_intermediate_size=c.moe_intermediate_size or 0,
    )
    uneven = {name: size for name, size in sizes.items() if size % world_size}
    if uneven:
        raise InputError(
            f"{uneven} cannot be shared evenly by {world_size} ranks: take a common divisor"
        )
    return {name: size // world_size for name, size in sizes.items()}


def cut(dim: int, i: int, size: int, whole: Tensor) -> Tensor:
    """Return piece i of a tensor: `size` entries along `dim`. Where the tensor ends earlier, as a
    vocabulary does that cannot be shared evenly, zeros fill the piece up."""
    piece = whole.movedim(dim, -1)[..., i * size : (i + 1) * size]
    return nn.functional.pad(piece, (0, size - piece.shape[-1])).movedim(-1, dim)


# Collectives that torch.compile can put into a graph. They take the group of all ranks by its name,
# which is "0". Compiled code that asked the group for its name would keep the group alive after
# join, and then the group's threads now and then abort the process. The same happens if
# torch.distributed.nn is first imported while there is a group, so it is imported above.
_ops = torch.ops._c10d_functional
_world = "0"


def add_up(module: nn.Module, args: tuple, y: Tensor) -> Tensor:
    """Sum y over the ranks."""
    return _ops.wait_tensor(_ops.all_reduce(y, "sum", _world))


def gather(module: Transformer, args: tuple, logits: Tensor) -> Tensor:
    """Concatenate the ranks' parts of the logits: (..., V / world size) -> (..., V)."""
    world_size = dist.get_world_size()
    parts = _ops.wait_tensor(_ops.all_gather_into_tensor(logits.contiguous(), world_size, _world))
    return torch.cat(parts.chunk(world_size), -1)[..., : module.config.vocab_size]


# --- One schedules, the others follow -------------------------------------------------------------


def broadcast(message: Any = None) -> Any:
    """Send a message from rank 0 to all, as JSON, and return it on every rank.

    Args:
        message: read on rank 0 alone. lead() sends what rank 0 is about to do, and join() sends
            None at the end.
    """
    # A clone can be resized.
    data = torch.frombuffer(bytearray(json.dumps(message), "ascii"), dtype=torch.uint8).clone()
    size = torch.tensor(len(data))
    dist.broadcast(size, 0)
    dist.broadcast(data.resize_(int(size)), 0)
    return json.loads(bytes(data.tolist()))


class Leader(Runner):
    """Rank 0's Runner: it tells the others what it is about to do, then does its share."""

    def __init__(self, model: Transformer, *shape: Any) -> None:
        # The model is not sent, as each rank has its own. `shape`: Runner's other arguments.
        lead("start", partial(super().__init__, model), *shape)

    def forward(self, rows: list[Row]) -> Tensor:
        return lead("forward", super().forward, rows)

    def copy_blocks(self, pairs: list) -> None:
        lead("copy_blocks", super().copy_blocks, pairs)


def lead(name: str, act: Callable, *args: Any) -> Any:
    """Tell the other ranks to do the act called `name`, and do it on this rank by `act`.

    Raises:
        ConnectionError: the act failed here, or another rank is lost, so no rank can go on. The
            others notice when this rank closes its connections.
    """
    try:
        with ctrl_c_held_back():  # in the middle it would leave the other ranks waiting
            broadcast((name, *args))
            return act(*args)
    except Exception as error:
        raise ConnectionError(f"rank 0 cannot go on: {error!r}") from error


def follow(model: Transformer) -> None:
    """Do what rank 0 does, until it stops. Signals are ignored from here on, as rank 0 handles
    them."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    with blame(f"rank {dist.get_rank()}"):
        for message in iter(broadcast, None):  # until rank 0 sends None
            match message:
                case "start", *shape:
                    runner = Runner(model, *shape)
                case "forward", rows:
                    runner.forward([Row(*row) for row in rows])  # JSON turns a Row into a list
                case "copy_blocks", pairs:
                    runner.copy_blocks(pairs)
