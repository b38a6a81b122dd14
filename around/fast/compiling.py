"""Compiling a model, and what the compiler may see of it.

compile_model packs a model's weights (see packed.py) and leaves the rest to torch.compile. On a CPU
that makes one graph of a forward, in which all layers are calls of the same code. What changes from
step to step, such as how a prompt attends, is hidden from the compiler:

    show_steps      a hook, not compiled: each layer's cache becomes what the compiler sees
                        a step       StepLayerCache   kv, slots, table, mask
                        any other    Opaque           a number, which stands for cache.attend
    forward         compiled: Transformer.forward, in which each layer is a
      Region.forward    and calls
        run             one piece of code for all layers, whose Attention calls one of
          StepLayerCache.attend    loops over the blocks, a part of that code
          Opaque.attend            the operator `opaque`, which calls cache.attend, not compiled
                    and whose Linears, packed, call `opaque` too, for oneDNN's product

On CUDA each layer is compiled by itself, and decoding with a static cache is recorded and replayed,
compiled or not. Skip this file at first: it is needed only for --compile, and for one sequence on
CUDA. Read: compile_model, show_steps, step_of, run. The last section can wait, as it is a fast path
for one case.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from around.machine import progress
from around.settings import CHUNK, blame, supported
from kv_cache import StaticCache, StaticLayerCache
from model import Layer, LayerCache, NoCache, Transformer
from paged import PagedLayerCache, Row, Runner

from .attending import (
    FastLayerCache,
    Group,
    StepLayerCache,
    attend_to_blocks,
    fast_caches,
    in_blocks,
    max_blocks,
    replace_caches,
)
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
        InputError: compiling failed, for example because there is no C++ compiler, which a
            CPU needs.
    """
    device = supported("--compile on", model.device.type, "cpu", "cuda")
    pack_linears(model, alone=batch_size == 1)
    for layer in model.layers:
        if hasattr(layer.mlp, "mix"):  # each step runs other experts, on other numbers of rows
            layer.mlp.mix = Opaque(layer.mlp.mix).attend
    # This runs before each forward, and outside the compiled code.
    replace_caches(model, show_steps)
    # These three switches are the process's: they hold for all that it compiles from here on.
    # The default, 8 graphs for one piece of code, is too few for several models.
    torch._dynamo.config.recompile_limit = 64
    # Without this, two sizes that are equal by chance, such as S and H, would be taken as one.
    torch.fx.experimental._config.use_duck_shape = False
    # With this, a product with one row on CUDA becomes a loop that dequantises int8 weights as it
    # reads them, so that no dequantised copy is written to memory. A CPU's code does not change.
    torch._inductor.config.coordinate_descent_tuning = True
    if device == "cpu":
        compile_for_cpu(model)
    else:
        # lm_head stands outside the layers, and in int8 it has no packed form on CUDA.
        for each in (*model.layers, model.lm_head):
            each.compile(dynamic=True)
    # Code is compiled when it first runs, so each kind of forward is run here: one token, and a
    # prompt; with a paged cache also many rows of one token, and both together. The compiler takes
    # a size of 1 as fixed, and one that show_steps marks as standing for all above 1. It tunes its
    # loops to what it sees first, so 32 is a usual number.
    with torch.no_grad(), blame("--compile"):  # PyTorch raises an error if there is no compiler
        if batch_size is None:
            runner = Runner(model, CHUNK, 16, kv_dtype)
            one, prompt = (Row([0] * CHUNK, 0, [0] * T) for T in (1, CHUNK))  # they use block 0
            for rows in progress([[one], [one] * 32, [one] * 32 + [prompt]], "compiling"):
                runner.forward(rows)
        else:
            cache = StaticCache(model, batch_size, CHUNK, kv_dtype)
            for T in progress([1, CHUNK], "compiling"):
                positions, caches = cache.plan(0, T)
                model(torch.zeros_like(positions), positions, caches, positions[0, :1])


def compile_for_cpu(model: Transformer) -> None:
    """Compile the whole forward. One graph in which each layer has code of its own would take
    minutes, and a graph for each layer would cost Python 0.2 ms for each in a step. So the layers
    are regions: their code is compiled once, for all that differ only in their tensors."""
    for layer in model.layers:
        layer.__class__ = Region
    vars(model)["forward"] = torch.compile(model.forward, dynamic=False)
    for module in model.modules():
        if isinstance(module, Int4Linear):
            module.unpack = compile_once(dequantize, dynamic=False)


# --- What the compiler sees -----------------------------------------------------------------------


class Opaque(LayerCache):
    """A layer's cache, or experts, that the compiler does not look into: a function of x and more
    tensors, which returns a tensor of x's shape. Compiled code calls the operator `opaque` (see
    packed.py), and that calls `compute`. The function may also write to tensors, such as those of a
    cache. The operator's schema does not say so, and need not, because the code around it does not
    touch them. In compiled code an Opaque has nothing but the number of another."""

    cap = None  # what it hides knows its own

    def __init__(self, function: Any, number: Tensor | None = None) -> None:
        self.function = function
        self.tensors = (number_of(self) if number is None else number,)

    def attend(self, x: Tensor, *more: Tensor) -> Tensor:
        return torch.ops.kilolm.opaque(x, [*more], *self.tensors, x.shape[-1])

    def compute(self, x: Tensor, *more: Tensor) -> Tensor:
        return self.function(x, *more).contiguous()


class Region(Layer):
    """A layer of a model whose whole forward is compiled."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any) -> Tensor:
        if isinstance(cache, NoCache):
            return super().forward(x, cos, sin, cache)
        return run(self, cache.cap, x, cos, sin, *cache.tensors)


@torch.compiler.nested_compile_region
def run(
    layer: Layer, cap: float | None, x: Tensor, cos: Tensor, sin: Tensor, *tensors: Tensor
) -> Tensor:
    """Run a layer, which gets nothing but the tensors of its cache: those of a StepLayerCache,
    or the number of an Opaque."""
    cache = StepLayerCache(cap, *tensors) if len(tensors) > 1 else Opaque(None, *tensors)
    return Layer.forward(layer, x, cos, sin, cache)


def show_steps(
    model: Transformer, tokens: Tensor, positions: Tensor, caches: list, *select: Tensor
) -> list:
    """Return what the compiler sees of the layers' caches, so that one piece of code serves all
    forwards of a kind.

    How a prompt attends depends on its place in the text, and how many groups attend differs from
    step to step. If the compiler saw that, it would compile again each time. It sees

    - on a CPU, one new token of one sequence, or of each row if the rows form one group;
    - on a GPU, all forwards with a static cache, but not an int8 cache, because the compiler fails
      to take a scale apart into bytes; then steps are not replayed either.
    """
    first = caches[0]
    if not tokens.is_cpu and isinstance(first, StaticLayerCache) and first.kv.dtype != torch.int8:
        masks: Any = {cache.view: first.masks[cache.view] for cache in caches}
        return [replace(cache, masks=masks) for cache in caches]
    mark_dynamic(tokens, 1)
    mark_dynamic(positions, 1)
    if type(first) is PagedLayerCache:  # any number of tokens may need logits, one included
        torch._dynamo.decorators.mark_unbacked(select[0], 0)
    steps: Any = tokens.is_cpu and step_of(model, positions, caches)
    if steps:
        return steps
    caches = fast_caches(model, tokens, positions, caches, blocks=MixedLayerCache)
    return [Opaque(cache.attend) for cache in caches]


def step_of(model: Transformer, positions: Tensor, caches: list) -> list[StepLayerCache] | None:
    """Plan a step, for `run`. None: the forward is no step that can be one group, or the cache is
    one that this file does not know."""
    if positions.shape[1] == 1:
        caches = in_blocks(model, positions, caches)
    first = caches[0]
    if type(first) is not PagedLayerCache or positions.shape[1] > len(first.rows):
        return None
    # If some rows are much longer than others, the padding would take longer than several calls.
    widths = [row.num_blocks(first.kv.shape[2]) for row in first.rows]
    if len(widths) * max(widths) > 32 * max_blocks(first.kv):
        return None
    slots = mark_dynamic(first.slots, 0)
    plans = {
        view: plan_for_loops(Group(cache.rows, cache))
        for view, cache in {cache.view: cache for cache in caches}.items()
    }
    return [
        StepLayerCache(cache.view.cap, mark_dynamic(cache.kv, 1, 2), slots, *plans[cache.view])
        for cache in caches
    ]


class MixedLayerCache(FastLayerCache):
    """One layer's keys and values in blocks, for a forward that is no step. Rows with one new token
    attend as in a step, which copies nothing. (A single one would be compiled as a case of its
    own.)"""

    def attend_group(self, q: Tensor, group: Group) -> Tensor:
        if q.shape[2] > 1 or len(q) == 1 or not q.is_cpu:
            return super().attend_group(q, group)
        attend = compile_once(attend_to_blocks, dynamic=False)
        q = mark_dynamic(q.contiguous(), 0)
        return attend(q, mark_dynamic(self.kv, 1, 2), *plan_for_loops(group), self.view.cap)


def plan_for_loops(group: Group) -> tuple[Tensor, Tensor]:
    """Return a group's table and mask as attend_to_blocks takes them, with sizes that change from
    step to step."""
    # The compiler cannot yet give a region a size that is a product, such as W * block size.
    mask = group.mask.unflatten(3, (-1, group.cache.kv.shape[2]))
    return mark_dynamic(group.table, 0, 1), mark_dynamic(mask, 0, 3, 4)


def mark_dynamic(tensor: Tensor, *dims: int) -> Tensor:
    """Let one piece of code serve all sizes of these dimensions that are above 1."""
    torch._dynamo.maybe_mark_dynamic(tensor, dims)
    return tensor


# --- Replayed -------------------------------------------------------------------------------------


def replay_steps(model: Transformer) -> None:
    """Change a model on CUDA in place, so that it replays the steps of decoding with a static cache
    (see Replayed). On an H200 that makes a step of 1.1 billion parameters 5 times as fast: Python
    needs 10 ms to launch its kernels, and the GPU 2 ms to run them. A model with experts is left as
    it is, because in the middle of a step the host reads how many rows each expert gets. Steps with
    a paged cache are not replayed."""
    # Ranks exchange sums in the middle of a step. We have not tried to record that.
    has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not has_ranks and not any(hasattr(layer.mlp, "mix") for layer in model.layers):
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

    @torch.no_grad()
    def __call__(
        self, tokens: Tensor, positions: Tensor, caches: list | None = None, *select: Tensor
    ) -> Tensor:
        """Do what Transformer.forward does, without gradients. `select` is one tensor, or is left
        out."""
        if not caches or not isinstance(caches[0], StaticLayerCache) or tokens.shape[1] > 1:
            return self.forward(tokens, positions, caches, *select)
        graphs = self.graphs.setdefault(caches[0].kv, {})
        reads = self.reads(tokens, positions, caches, *select)
        sizes = tuple(tensor.shape for tensor in reads)
        if sizes not in graphs:
            graphs.clear()  # a text only grows, and each graph keeps memory of its own
            # A graph keeps the tensors that it reads, and later steps are copied over them.
            # StaticCache.plan makes positions and caches for one forward. The caller may still use
            # tokens and select, so these are cloned.
            args: Any = (tokens.clone(), positions, caches, *(each.clone() for each in select))
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

    def reads(self, tokens: Tensor, positions: Tensor, caches: list, *select: Tensor) -> list:
        """Return the tensors that a step reads and that change from step to step. Positions are
        left out, as they are a view of the slots. Layers share most masks, so each is listed
        once."""
        return [
            tokens,
            *select,
            caches[0].slots,
            *dict.fromkeys(cache.masks[cache.view] for cache in caches),
        ]
