"""Compiling a model, and what the compiler may see of it.

compile_model packs a model's weights (see packed.py) and leaves the rest to torch.compile, one
block at a time. What changes from step to step, such as how a prompt attends, is hidden from the
compiler. On CUDA, decoding with a static cache is recorded and replayed, compiled or not. Skip this
file at first: it is needed only for --compile, and for one sequence on CUDA. Read: compile_model,
OpaqueCache. The last two sections can wait, as each of them is a fast path for one case.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from around.machine import progress
from around.settings import CHUNK, blame, supported
from kv_cache import Slab, StaticCache
from model import LayerCache, Transformer
from paged import Group, Row, Runner

from .attending import FastBlocks, attend_fast, replace_layers
from .packed import Int4Linear, compile_once, dequantize, number_of, pack_linears

# --- Compiled -------------------------------------------------------------------------------------


def compile_model(model: Transformer, batch_size: int | None = 1, kv_dtype: str = "auto") -> None:
    """Make a finished model fast: pack its weights for its device and compile it, in place.

    Args:
        batch_size: sequences in the static cache with which the model will run; None: the model
            will run with a paged cache.
        kv_dtype: how the static or paged cache stores keys and values.

    Raises:
        SettingError: the device is MPS, where only the plain paths run.
        CheckpointError: compiling failed, for example because there is no C++ compiler, which a
            CPU needs.
    """
    device = supported("--compile on", model.device.type, "cpu", "cuda")
    pack_linears(model, alone=batch_size == 1)
    leave_out_experts(model)
    attend_fast(model, blocks_of(model))
    # This only marks the blocks. The first one that runs is compiled, and its code serves all that
    # differ from it only in their tensors. That takes seconds where one graph of all layers takes
    # minutes. Lengths are symbolic, so nothing is compiled again later.
    for block in model.layers:
        block.compile(dynamic=True)
    if device == "cpu":
        compile_for_cpu(model)
    else:
        compile_for_cuda(model, batch_size)
    # This runs before each forward, and outside the compiled code.
    model.register_forward_pre_hook(hide_caches)
    # The default, 8 graphs for one piece of code, is too few for several models in a process.
    torch._dynamo.config.recompile_limit = 64
    # Without this, two sizes that are equal by chance, such as S and H, would be taken as one.
    torch.fx.experimental._config.use_duck_shape = False
    # Code is compiled when it first runs. The compiler takes a size of 1 as fixed, and any other as
    # standing for all sizes above 1. So these forwards have one of everything, then more.
    with torch.no_grad(), blame("--compile"):  # PyTorch raises an error if there is no compiler
        if batch_size is None:
            compile_with_blocks(model, kv_dtype)
        else:
            compile_with_slabs(model, batch_size, kv_dtype)


COMPILING = "compiling decode, prefill"


def compile_with_slabs(model: Transformer, batch_size: int, kv_dtype: str) -> None:
    """Run one token, and its logits; then a prompt, and the logits of two tokens."""
    cache = StaticCache(model, batch_size, CHUNK, kv_dtype)
    for length in progress([1, CHUNK], COMPILING):
        positions, layers = cache.plan(0, length)
        select = positions[0, :2]  # the first tokens: their indices are their positions
        model(torch.zeros_like(positions), positions, layers, select)


def compile_with_blocks(model: Transformer, kv_dtype: str) -> None:
    """Run every kind of forward, so that all its code is compiled here. On a CPU the compiler sees
    how some of them attend (see may_compile): one row of one token, which is then run once more,
    hidden; not two such rows beside a prompt, which are two groups; and many such rows, which are
    one group. The compiler tunes its loops to the sizes that it sees first, so `many` is a usual
    number of rows."""
    runner = Runner(model, CHUNK, 16, kv_dtype)
    # Each of them is padded to two blocks (see FastGroup), and all of them fit into one group.
    many = max(2, min(32, blocks_of(model).most(runner) // 2))
    for lengths in progress([[1], [1, 1, CHUNK], [1] * many], COMPILING):
        # All write to block 0. The tables have CHUNK blocks, which is more than they need.
        rows = [Row([0] * CHUNK, 0, [0] * length) for length in lengths]
        tokens, positions, layers, select = runner.plan(rows)
        model(tokens, positions, layers, select)
        if lengths == [1]:  # once more, as a row that is too long to be seen; see may_compile
            _, _, layers, _ = replace_layers(
                blocks_of(model), model, (tokens, positions, layers, select)
            )
            model(tokens, positions, [OpaqueCache(layer) for layer in layers], select)


def blocks_of(model: Transformer) -> type[FastBlocks]:
    """Where no heads share a key, a class that makes no copies."""
    c = model.config
    is_plain = c.num_attention_heads == c.num_key_value_heads and model.device.type == "cpu"
    return CompiledBlocks if is_plain else FastBlocks


def leave_out_experts(model: Transformer) -> None:
    """Keep experts outside the graph, because each step runs different ones on different numbers of
    rows."""
    for block in model.layers:
        if hasattr(block.mlp, "mix"):
            block.mlp.mix = torch.compiler.disable(block.mlp.mix)


def compile_for_cpu(model: Transformer) -> None:
    """Do what only a CPU needs beside the blocks."""
    for module in model.modules():
        if isinstance(module, Int4Linear):
            module.unpack = compile_once(dequantize, dynamic=False)


def compile_for_cuda(model: Transformer, batch_size: int | None) -> None:
    """Do what only CUDA needs. lm_head stands outside the blocks, and in int8 it has no packed form
    on CUDA, so it is compiled by itself."""
    # With this, a product with one row becomes a loop that dequantises int8 weights as it reads
    # them, so that no dequantised copy is written to memory.
    torch._inductor.config.coordinate_descent_tuning = True
    model.lm_head.compile(dynamic=True)
    if batch_size:
        replay_steps(model)


# --- Which caches the compiler sees ---------------------------------------------------------------

# How a prompt attends depends on its place in the text, and how many groups attend differs from
# step to step. If the compiler saw that, it would compile again each time.


class OpaqueCache(LayerCache):
    """A layer's cache that the compiler does not look into. Compiled code calls the operator
    `opaque` (see packed.py), and that calls `compute`, which also writes the new keys and values.
    The operator's schema does not say so, and need not, because the code around it does not touch
    them."""

    def __init__(self, layer: LayerCache) -> None:
        self.layer = layer
        self.number = number_of(self)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.kilolm.opaque(q, [k, v], self.number, q.shape[3])

    def compute(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.layer.attend(q, k, v).contiguous()


def hide_caches(model: Any, args: tuple) -> tuple:
    """Replace each layer's cache by an OpaqueCache in the arguments of Transformer.forward, unless
    the compiler may look into it."""
    if len(args) == 2:  # there is no cache; see model.NoCache
        return args
    tokens, positions, layers, *select = args
    if not may_compile(tokens, layers[0]):
        return tokens, positions, [OpaqueCache(layer) for layer in layers], *select
    if isinstance(layers[0], Slab):
        masks: Any = {window: layers[0].masks[window] for window in model.config.windows}
        layers = [replace(layer, masks=masks) for layer in layers]
    else:
        (group,) = layers[0].groups  # the same for all layers
        # All such forwards look up their blocks in the table, because a slice would be another
        # piece of code. The masks are made here, once for all layers.
        group.span = None
        group.masks = {window: group.masks[window] for window in model.config.windows}
    return tokens, positions, layers, *select


def may_compile(tokens: Tensor, layer: Any) -> bool:
    """Whether the compiler may look into the caches of a forward. It may where one piece of code
    serves all forwards of a kind:

    - with a static cache on a GPU, all forwards. But an int8 cache is hidden, because the compiler
      fails to take a scale apart into bytes; then steps are not replayed either.
    - with a static cache on a CPU, those of one new token in each sequence. (A long prompt attends
      by attend_to_prompt.)
    - with a paged cache on a CPU, those of one new token in each row, if the rows form one group
      (see paged.groups_of). A single row can be longer than a group may be. Then it is hidden,
      because Blocks can read it in place.

    Everything else is hidden, such as a paged cache on a GPU. Attention as a part of
    its block saves many small calls. In float32 on a Zen 3, a step of 32 sequences of 64 tokens
    takes 0.84 times as long (110m), and one of a single sequence 0.85 times (135m, where heads
    share keys).
    """
    if isinstance(layer, Slab):
        return tokens.shape[1] == 1 if tokens.is_cpu else layer.kv.dtype != torch.int8
    if not tokens.is_cpu or type(layer) not in (FastBlocks, CompiledBlocks):
        return False
    group, *others = layer.groups
    key_bytes = group.table.numel() * layer.kv[:, 0].nbytes // 2  # the other half are values
    return not others and group.shape[1] == 1 and key_bytes <= layer.max_bytes


# --- Decoding rows attend without copies ----------------------------------------------------------


class CompiledBlocks(FastBlocks):
    """One layer's keys and values in blocks, which decoding rows read without a copy.

    PyTorch's attention wants a row's keys side by side. Where no query heads share a key, plain
    operators are no slower and need no copy: the compiler puts the look-up of the blocks into the
    loops that multiply them. A step of the 110m shape on a Zen 4, in ms, with that of Blocks in
    parentheses. Both were measured before attention was compiled as a part of its block (see
    may_compile):
                                float32       bfloat16
        32 rows of 128 tokens   70 (80)       43 (82)
        32 rows of 512 tokens   136 (150)     73 (222)
        1 row of 512 tokens     26.5 (26.5)   17.4 (20.5)
    A key that several heads share would be read once for each. With 2 to 4 heads that took 1.5 to
    1.9 times as long as Blocks in float32; in bfloat16 0.85 for 2 or 3 heads, and 1.4 for 4.
    """

    # Blocks reads fewer bytes in one call, as it copies them. Here nothing is copied, and few calls
    # are best: with half as many bytes, 32 rows of 512 tokens in float32 would need two, and a step
    # of the 110m shape would take 1.17 times as long. With more, more rows would be padded.
    # Guesses and int8, which attend_group leaves to Blocks, are copied in such large pieces too.
    max_bytes = 2**26

    def attend_group(self, q: Tensor, group: Group) -> Tensor:
        if q.shape[2] > 1 or self.kv.dtype != q.dtype:  # prompts and guesses; int8
            return super().attend_group(q, group)
        mask = group.masks[self.window]
        if torch.compiler.is_compiling():  # as a part of the block; see may_compile
            return attend_to_blocks(q, self.kv, group.table, mask)
        # A hidden row gets here: beside a prompt, in one of several groups, or too long. The code
        # compiled for it is for one order of q in memory, so this is a copy in that order.
        q = q.clone(memory_format=torch.contiguous_format)
        return compile_once(attend_to_blocks, dynamic=True)(q, self.kv, group.table, mask)


def attend_to_blocks(q: Tensor, kv: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    """Do what model.attention does, for one query of each row and head, and add up in float32.

    Args:
        q: (B, N, 1, H).
        kv: (2 * N, blocks, block size, H); see Blocks.
        table: (B, W) int64, the blocks of each row.
        mask: (B, 1, 1, W * block size) bool.

    Returns:
        (B, N, 1, H).
    """
    torch._dynamo.mark_static(kv, 3)  # H, which as a constant makes the loops a quarter faster
    keys, values = kv[:, table].transpose(0, 1).chunk(2, 1)  # (B, N, W, block size, H) each
    scores = (q[:, :, :, None].float() * keys).sum(-1)  # (B, N, W, block size)
    scores = scores.flatten(2).masked_fill(~mask[:, 0], -torch.inf)  # (B, N, S)
    # The softmax's division comes last, so that it divides H numbers and not S. The scores are
    # scaled and not q, because for q the compiler would compute the root anew for each key.
    scores = scores - scores.amax(-1, True)
    weights = (scores * q.shape[3] ** -0.5).exp()
    parts = weights.unflatten(2, (table.shape[1], -1))[..., None] * values
    total = parts.sum(3).sum(2)  # (B, N, H): within each block, then of all
    y = total / weights.sum(-1, True)
    return y[:, :, None].to(q.dtype)


# --- Replayed -------------------------------------------------------------------------------------


def replay_steps(model: Transformer) -> None:
    """Change a model on CUDA in place, so that it replays the steps of decoding with a static cache
    (see Replayed). On an H200 that makes a step of 1.1 billion parameters 5 times as fast: Python
    needs 10 ms to launch its kernels, and the GPU 2 ms to run them. A model with experts is left as
    it is, because in the middle of a step the host reads how many rows each expert gets. Steps with
    a paged cache are not replayed."""
    # Ranks exchange sums in the middle of a step. We have not tried to record that.
    has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not has_ranks and not any(hasattr(block.mlp, "mix") for block in model.layers):
        vars(model)["forward"] = Replayed(model.forward)


class Replayed:
    """A model's forward whose steps are recorded as CUDA graphs, and then replayed.

    A GPU often finishes a step's kernels faster than Python launches them. A CUDA graph records the
    launches, and then the whole step is one call, on the same memory each time. What the step reads
    is copied to where the graph reads it. Other sizes need another graph, so with a static cache
    one is recorded for each BUCKET of positions.
    """

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self.forward = forward
        # A cache's first tensor -> sizes -> a graph, what it reads, and the logits that it writes.
        # Weak, so that the cache can be freed.
        self.graphs: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __call__(
        self, tokens: Tensor, positions: Tensor, layers: list | None = None, *select: Tensor
    ) -> Tensor:
        """Do what Transformer.forward does. `select` is one tensor, or is left out."""
        if layers and isinstance(layers[0], Slab) and tokens.shape[1] == 1:
            return self.replay(tokens, positions, layers, *select)
        return self.forward(tokens, positions, layers, *select)

    @torch.no_grad()
    def replay(self, tokens: Tensor, positions: Tensor, layers: list, *select: Tensor) -> Tensor:
        """Do the same for a step of one token in each row."""
        graphs = self.graphs.setdefault(layers[0].kv, {})
        reads = self.reads(tokens, positions, layers, *select)
        sizes = tuple(tensor.shape for tensor in reads)
        if sizes not in graphs:
            graphs.clear()  # a text only grows, and each graph keeps memory of its own
            # A graph keeps the tensors that it reads, and later steps are copied over them.
            # StaticCache.plan makes positions and layers for one forward. The caller may still use
            # tokens and select, so these are cloned.
            args: Any = (tokens.clone(), positions, layers, *(each.clone() for each in select))
            self.forward(*args)  # what only the first run does must not be recorded
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = self.forward(*args)
            graphs[sizes] = graph, self.reads(*args), logits
        graph, recorded, logits = graphs[sizes]
        for old, new in zip(recorded, reads, strict=True):
            old.copy_(new)
        graph.replay()
        return logits.clone()

    def reads(self, tokens: Tensor, positions: Tensor, layers: list, *select: Tensor) -> list:
        """Return the tensors that a step reads and that change from step to step. Positions are
        left out, as they are a view of the slots. Layers share most masks, so each is listed
        once."""
        return [
            tokens,
            *select,
            layers[0].slots,
            *dict.fromkeys(layer.masks[layer.window] for layer in layers),
        ]
