"""Compiling, and fast matrix products by PyTorch's private operators, in one place.

compile_model replaces each Linear of a finished model, plain or quantised, by a form that its
device multiplies fast, where PyTorch has one (on CUDA for int4 only), and leaves the rest to
torch.compile. These forms are never stored. The form that a matrix gets depends on the processor
and on the cache (one sequence, or many), never on timing, so the same command on the same machine
gives the same tokens in each process. What changes from step to step, such as how a prompt attends,
is hidden from the compiler. On CUDA, decoding with a static cache is recorded and replayed,
compiled or not. Skip this file at first: it is needed only for --compile, for quantised weights on
a CPU, and for one sequence on CUDA. In it, N is output channels, K input channels (in the last
section they are heads, as elsewhere), G groups, R rows. Read: compile_model, OpaqueCache, form_of,
PackedLinear. The last two sections can wait, as each of them is a fast path for one case.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from kv_cache import Slab, StaticCache
from machine import progress
from model import LayerCache, Transformer
from paged import Blocks, Group, Row, Runner
from quantize import QuantLinear, round_to_nearest, unpack_bits
from settings import CHUNK, blame, supported

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
    pack_linears(model, batch_size == 1)
    leave_out_experts(model)
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
    """Run one row of one token, seen by the compiler and hidden from it; many such rows; and one or
    two beside a prompt. The compiler tunes its loops to the sizes that it sees first, so these are
    usual ones."""
    runner = Runner(model, CHUNK, 16, kv_dtype)
    many = max(2, min(32, runner.max_blocks // 2))  # so many are one group, with two blocks each
    for lengths in progress([[1], [1, 1, CHUNK], [1] * many, [1, 2]], COMPILING):
        # All write to block 0. The tables have CHUNK blocks, which is more than they need.
        rows = [Row([0] * CHUNK, 0, [0] * length) for length in lengths]
        tokens, positions, layers, select = runner.plan(rows)
        model(tokens, positions, layers, select)
        if lengths == [1]:  # once more as if the row were long; see may_compile
            model(tokens, positions, [OpaqueCache(layer) for layer in layers], select)


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
            module.unpack = compiled(dequantize, dynamic=False)
    # Where no heads share a key, paged.Runner uses a class that makes no copies.
    if model.config.num_attention_heads == model.config.num_key_value_heads:
        vars(model)["paged_layer"] = CompiledBlocks


def compile_for_cuda(model: Transformer, batch_size: int | None) -> None:
    """Do what only CUDA needs. lm_head stands outside the blocks, and in int8 it has no packed form
    on CUDA, so it is compiled by itself."""
    # With this, a product with one row becomes a loop that dequantises int8 weights as it reads
    # them, so that no dequantised copy is written to memory.
    torch._inductor.config.coordinate_descent_tuning = True
    model.lm_head.compile(dynamic=True)
    if batch_size:
        replay_steps(model)


# --- Replayed -------------------------------------------------------------------------------------


def replay_steps(model: Transformer) -> None:
    """Change a model on CUDA in place, so that it replays the steps of decoding with a static cache
    (see Replayed). On an H200 that makes a step of 1.1 billion parameters 5 times as fast: Python
    needs 10 ms to launch its kernels, and the GPU 2 ms to run them. A model with experts is left as
    it is, because in the middle of a step the host reads how many rows each expert gets. For a
    paged cache see tools/cuda_graphs.py."""
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
            # A graph keeps the tensors of the step that it recorded, and later steps are copied
            # over them. So these two are clones. StaticCache.plan has copied the positions.
            select = tuple(each.clone() for each in select)
            return self.replay(tokens.clone(), positions, layers, *select)
        return self.forward(tokens, positions, layers, *select)

    @torch.no_grad()
    def replay(self, tokens: Tensor, positions: Tensor, layers: list, *select: Tensor) -> Tensor:
        """Do the same for a step of one token in each row. tools/cuda_graphs.py calls this with a
        paged cache too. A graph keeps these tensors, and what later steps read is written over
        them."""
        plan: Any = (tokens, positions, layers, *select)
        graphs = self.graphs.setdefault(layers[0].kv, {})
        reads = tensors_of(*plan)
        sizes = tuple(tensor.shape for tensor in reads)
        if sizes not in graphs:
            if isinstance(layers[0], Slab):
                graphs.clear()  # a text only grows, and each graph keeps memory of its own
            self.forward(*plan)  # what only the first run does must not be recorded
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = self.forward(*plan)
            graphs[sizes] = graph, reads, logits
        graph, recorded, logits = graphs[sizes]
        for old, new in zip(recorded, reads, strict=True):
            old.copy_(new)
        graph.replay()
        return logits.clone()


def tensors_of(tokens: Tensor, positions: Tensor, layers: list, *select: Tensor) -> list[Tensor]:
    """Return the tensors of a plan that a forward reads. Layers share most of them."""
    first = layers[0]
    if isinstance(first, Slab):  # no positions: they are a view of first.slots
        return [tokens, *select, first.slots, *dict.fromkeys(layer.mask for layer in layers)]
    masks = [mask for group in first.groups for mask in group.masks.values()]
    tables = [group.flat_table for group in first.groups]
    return [tokens, positions, *select, first.slots, *tables, *masks]


# torch.compile, once for each function. It is called where a function is needed, and is no
# decorator, because importing the compiler takes two seconds.
compiled = cache(torch.compile)


# --- What the compiler does not see ---------------------------------------------------------------

# A packed matrix has no strides, so compiled code cannot take it as an input. How a prompt attends
# depends on its place in the text, and how many groups attend differs from step to step, so if the
# compiler saw that, it would compile again each time. Therefore compiled code calls the operator
# `opaque` with a number, and the operator calls `compute` of the object with that number. A cache's
# compute also writes to its keys and values. The operator's schema does not say so, and need not,
# because the code around it does not touch them.
library = torch.library.Library("kilolm", "FRAGMENT")
library.define("opaque(Tensor x, Tensor[] more, Tensor number, SymInt width) -> Tensor")
# number -> object; weak, so that the object can be freed
numbered: WeakValueDictionary[int, Any] = WeakValueDictionary()


def number_of(thing: object) -> Tensor:
    """Number an object that compiled code uses through `opaque`. The number is a tensor, so that
    all layers compile to the same graph."""
    numbered[id(thing)] = thing
    return torch.tensor(id(thing))


# The wrapper of torch.library.custom_op would cost 8 us a call; this one costs 3 to 5. With packed
# matrices, a step makes four calls a layer, and one more for attention where that is hidden.
@torch.library.impl(library, "opaque", "CompositeExplicitAutograd")
def opaque(x: Tensor, more: list[Tensor], number: Tensor, width: int) -> Tensor:
    """Call `compute` of the object with this number. It returns a contiguous tensor of x's shape,
    except that the last size is `width`."""
    return numbered[int(number)].compute(x, *more)


@torch.library.register_fake("kilolm::opaque", lib=library)
def _empty(x: Tensor, more: list[Tensor], number: Tensor, width: int) -> Tensor:
    # The compiler knows only the result's shape and dtype. If x holds bytes (Int8Linear), the
    # result is float32.
    return x.new_empty((*x.shape[:-1], width), dtype=torch.result_type(x, 1.0))


class OpaqueCache(LayerCache):
    """A layer's cache that the compiler does not look into."""

    def __init__(self, layer: LayerCache) -> None:
        self.layer = layer
        self.number = number_of(self)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.kilolm.opaque(q, [k, v], self.number, q.shape[3])

    def compute(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.layer.attend(q, k, v).contiguous()


def hide_caches(model: nn.Module, args: tuple) -> tuple:
    """Replace each layer's cache by an OpaqueCache in the arguments of Transformer.forward, unless
    the compiler may look into it."""
    if len(args) == 2:  # there is no cache; see model.NoCache
        return args
    tokens, positions, layers, *select = args
    if may_compile(tokens, layers[0]):
        return args
    return tokens, positions, [OpaqueCache(layer) for layer in layers], *select


def may_compile(tokens: Tensor, layer: Any) -> bool:
    """Whether the compiler may look into the caches of a forward: whether all such forwards attend
    in the same way. For a static cache on a GPU, all of them do. But if it stores int8, it is
    hidden, because the compiler fails to take a scale apart into bytes. Then steps are not replayed
    either.

    On a CPU, all forwards of one new token in each sequence do. (A long prompt attends without a
    mask.) With a paged cache, the rows must form one group; see paged.groups_of. A row longer than
    a group may be is hidden, so that Blocks can read it in place. Attention as a part of its block
    saves many small calls. In float32 on a Zen 3, a step of 32 sequences of 64 tokens takes 0.84
    times as long (110m), and one of a single sequence 0.85 times (135m, where heads share keys).
    """
    if isinstance(layer, Slab):
        return tokens.shape[1] == 1 if tokens.is_cpu else layer.kv.dtype != torch.int8
    if not tokens.is_cpu or type(layer) not in (Blocks, CompiledBlocks):
        return False
    group, *others = layer.groups
    key_bytes = group.table.numel() * layer.kv[:, 0].nbytes // 2  # the other half are values
    if others or group.positions.shape[1] > 1 or key_bytes > layer.max_bytes:
        return False
    # A slice and None would be two pieces of code, so all such forwards read blocks by the table.
    group.span = None
    assert group.masks  # made here, once for all layers
    return True


# --- Which form a matrix gets ---------------------------------------------------------------------


def pack_linears(model: nn.Module, alone: bool = False, kind: type = nn.Module) -> None:
    """Replace each Linear, plain or quantised, that has a packed form (see form_of), in place. This
    comes before compiling. On a CPU, a quantised model is packed even if it is not compiled, which
    makes a step 4 to 9 times as fast.

    The packed weight replaces the plain one and serves every batch size, so memory peaks at one
    extra weight. (Inductor's freezing packs too, but keeps a copy for each compiled graph.)

    Args:
        alone: see form_of.
        kind: replace only these modules.
    """
    # A list of paths, since a reference to a Linear would keep its plain weight alive.
    paths = [path for path, _ in model.named_modules()]
    for path in progress(paths, "packing"):
        linear = model.get_submodule(path)
        if isinstance(linear, kind):
            form = form_of(linear, alone)
            if form:
                model.set_submodule(path, form(linear))


# FBGEMM is for x86 alone, so this also tells whether the processor is an x86, which Int8Linear and
# Int8WithoutVNNI need.
HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines


def form_of(linear: nn.Module, alone: bool = False) -> "type[PackedLinear] | None":
    """Which packed form a module gets, by its device and its kind of weight. None: the module stays
    as it is, and a QuantLinear is dequantised at each step.

    Args:
        alone: whether the model runs one sequence at a time, so that most products have one row.
    """
    if isinstance(linear, QuantLinear):
        q = linear.qweight
        if linear.bits == 4 and linear.group_size in (32, 64, 128, 256) and has_int4(q):
            return Int4Linear
        if q.is_cpu and HAS_FBGEMM:
            return Int8Linear if torch.cpu._is_vnni_supported() else Int8WithoutVNNI
    elif isinstance(linear, nn.Linear) and linear.weight.is_cpu:
        dtype = linear.weight.dtype
        if alone and dtype == torch.float32 and torch.cpu._is_amx_tile_supported():
            return None  # see "One sequence alone"
        if has_arithmetic(dtype):
            return LoopedLinear if alone and LOOPS else PackedLinear
        if HAS_FBGEMM:
            return HalfLinear
    return None


def has_int4(q: Tensor) -> bool:
    """Whether PyTorch has a fast product for (N, K / 2) bytes with two 4-bit values each."""
    N, half = q.shape
    if q.is_cpu:
        return N % 64 == 0 and "AVX512" in torch.backends.cpu.get_cpu_capability()
    return q.is_cuda and N % 8 == 0 and half % 64 == 0


def has_arithmetic(dtype: torch.dtype) -> bool:
    """Whether PyTorch lets oneDNN multiply this dtype. For bfloat16 any AVX-512 is enough, even
    where oneDNN emulates it."""
    if dtype == torch.float32:
        return torch.backends.mkldnn.is_available()
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_fp16_supported()


# --- The forms ------------------------------------------------------------------------------------


class PackedLinear(nn.Module):
    """A Linear with its weight in oneDNN's blocked order; x (..., K) -> (..., N), same dtype.

    A form has three parts. `pack` makes the packed weight. `multiply` is compiled, with the code
    around it, and calls `opaque` with this module's number. `opaque` calls `compute`, which the
    compiler does not see, for the product itself.
    """

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.number = number_of(self)
        self.pack(linear)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        y = self.multiply(rows).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias

    def pack(self, linear: Any) -> None:
        # 32 is a hint for how many rows x will have. With a hint of 1, more rows are a fifth to two
        # thirds slower on each kind of processor, and one row is no faster.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 32)

    def multiply(self, rows: Tensor) -> Tensor:
        """(R, K) -> (R, N)."""
        return torch.ops.kilolm.opaque(rows, [], self.number, self.out_features)

    def compute(self, rows: Tensor) -> Tensor:
        """(R, K) -> (R, N)."""
        x = filled_up(rows)  # where one row is slow; see "One sequence alone"
        y = torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        return y[: len(rows)]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied or pickled. Some packed tensors cannot be, and a copy would still
        have the number of the original."""
        raise TypeError("a packed model cannot be copied: copy it before compile_model")


class Int8Linear(PackedLinear):
    """int8 weights multiplied as integers, with next to no loss in the activations.

    The operator multiplies bytes, so each row of x becomes two rows of bytes, a high and a low
    digit: x = s * (128 * high + low), where s is the row's largest absolute value / (128 * 127).
    Every value is rounded to a multiple of s: the largest one in the row has 15 bits (sign
    included), and smaller ones have fewer, while bfloat16 gives every value 8 bits. Both digits go
    through one integer product as separate rows. For one token the second row is free: the time
    goes into reading the weights, which are half as many bytes as in bfloat16. For many rows, twice
    the products at twice the speed cost about what bfloat16 costs.

    Example: x = [1.0, -0.3], s = 1 / (128 * 127): 127 | 0 and -38 | -13 (128 * -38 - 13 = -4877)
    """

    most = 127  # the largest value of `high`

    def pack(self, linear: Any) -> None:
        q = linear.qweight
        scales = linear.scales
        if scales.shape[1] > 1 or (linear.zeros != 128).any():
            # The operators for bytes know neither groups nor zero points other than 128. So weights
            # that have either, as all 4-bit weights do, are rounded once more, to 8 bits with one
            # scale per output channel. That costs little beside the first rounding: for the bundled
            # model in 4 bits, the KL divergence to the plain model grows by a hundredth.
            q, scales, _ = round_to_nearest(linear.dequantize(), 8, linear.in_features)
        # These are no buffers, because .to(dtype) would round them.
        self.scales = scales.flatten()  # (N,)
        self.zeros = torch.zeros(len(q)).long()
        signed = q.byte() - 128  # the subtraction wraps around within a byte
        self.packed = self.prepack(signed.view(torch.int8))

    def prepack(self, signed: Tensor) -> Any:
        return torch.ops.onednn.qlinear_prepack(signed, None)

    def multiply(self, rows: Tensor) -> Tensor:
        # Without a compiler each operation has a price of its own, so there are few.
        x = rows.float()
        largest = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True).clamp_(min=1e-30)
        s = largest.div_(128 * self.most)  # (R, 1)
        digits = (x / s).round_()
        high = (digits / 128).round_()
        low = digits.sub_(high, alpha=128)
        # The bytes have no sign, so they hold each digit plus most + 1.
        pair = torch.cat((high, low)).add_(self.most + 1).byte()  # (2R, K)
        y_high, y_low = super().multiply(pair).chunk(2)  # (R, N) each
        return y_low.add_(y_high, alpha=128).mul_(s).to(rows.dtype)

    def compute(self, rows: Tensor) -> Tensor:
        x = filled_up(rows)
        # There is no bias. The results are float32, so their own scale and zero point, 1.0 and 0,
        # have no effect.
        options: Any = (None, 1.0, 0, torch.float32, "none", [], "")
        # The bytes in x have the scale 1.0 and the zero point 128.
        y = torch.ops.onednn.qlinear_pointwise(
            x, 1.0, 128, self.packed, self.scales, self.zeros, *options
        )
        return y[: len(rows)]


class Int8WithoutVNNI(Int8Linear):
    """The same by FBGEMM, for a processor without VNNI. Such a processor has no instruction that
    adds products of bytes in 32 bits, so FBGEMM adds two of them in 16. To keep this sum from
    overflowing, `high` stays below 64, and one bit of x is lost."""

    most = 63

    def prepack(self, signed: Tensor) -> Any:
        with warnings.catch_warnings(action="ignore"):  # such tensors are deprecated
            q = torch._make_per_channel_quantized_tensor(signed, self.scales, self.zeros, 0)
        return torch.ops.quantized.linear_prepack(q, None)

    def compute(self, rows: Tensor) -> Tensor:
        # The operator takes floats, and adds a zero point of 64 to make bytes of them. So 64 is
        # taken off before.
        product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        return product(rows.float() - 64, 1.0, 64, self.packed)


class Int4Linear(PackedLinear):
    """int4 weights for PyTorch's own operators, which dequantise inside the product.

    They compute scale * (q - 8) + zero, and we store scale * (q - z), so their zero is
    scale * (8 - z). They are fast only in bfloat16, and on a CPU only for few rows. For more rows,
    or another dtype, a CPU dequantises the weight and multiplies it like any other.

    The CPU's operator dequantises once for every four rows. So a step with three guesses, which has
    four rows, takes 1.3 times as long as one without guesses, and a step with four guesses takes
    2.2 times as long. Without AVX-512 the operator is slow for any number of rows, and form_of
    chooses a form of int8.
    """

    def pack(self, linear: Any) -> None:
        q = linear.qweight
        aten = torch.ops.aten
        if q.is_cuda:
            self.operator = aten._weight_int4pack_mm
            # This operator wants the first value in the high half. The 8 is its innerKTiles, the
            # largest allowed: a thread's values of 8 tiles (16 input channels each) lie together.
            self.packed = aten._convert_weight_to_int4pack(q << 4 | q >> 4, 8)
        else:
            self.operator = aten._weight_int4pack_mm_for_cpu
            self.packed = aten._convert_weight_to_int4pack_for_cpu(unpack_bits(q, 4).int(), 1)
        zeros = linear.scales * (8 - linear.zeros.float())
        # many_rows reads `scales`, and the operator reads them rounded and in its own order.
        self.scales = torch.stack((linear.scales, zeros)).mT.contiguous()  # (2, G, N)
        self.rounded = self.scales.permute(1, 2, 0).bfloat16().contiguous()  # (G, N, 2)
        self.group_size = linear.group_size
        self.unpack = dequantize  # compile_for_cpu compiles it

    def compute(self, rows: Tensor) -> Tensor:
        if rows.is_cpu and (len(rows) > FEW_ROWS or rows.dtype != torch.bfloat16):
            return self.many_rows(rows)
        x = rows.bfloat16().contiguous()
        return self.operator(x, self.packed, self.group_size, self.rounded).to(rows.dtype)

    def many_rows(self, rows: Tensor) -> Tensor:
        """Dequantise and multiply 512 output channels at a time, so that each dequantised piece is
        still in the processor's cache when it is multiplied."""
        products = []
        for packed, scales in zip(self.packed.split(512), self.scales.split(512, 2)):
            weight = self.unpack(packed, scales).to(rows.dtype)  # (K, 512)
            products.append(rows @ weight)
        return torch.cat(products, -1)


# Up to this many rows, PyTorch's int4 operator is faster than dequantising the weight first. For a
# weight of 2048 x 11264, in ms:
#                          32 rows with AMX   48 rows on a Zen 5   64 rows on a Zen 5
#     the operator         9.0                10.1                 13.8
#     dequantising first   7.6                10.5                 11.0
FEW_ROWS = 24 if torch.cpu._is_amx_tile_supported() else 56


def dequantize(packed: Tensor, scales: Tensor, lanes: int = 32) -> Tensor:
    """Dequantise a weight that is stored in the CPU operator's order.

    In each block of 2 * lanes output channels, every input channel has `lanes` bytes. Byte i holds
    output channel i in its low half and output channel i + lanes in its high half.

    Args:
        packed: (N, K / 2) uint8, in that order.
        scales: (2, G, N), the operator's scales and zeros.
        lanes: half of the output channels of a block.

    Returns:
        (K, N) float32.
    """
    _, G, N = scales.shape
    # q is int32, because the compiler does not vectorise uint8. One shift gives both halves,
    # because stacking them would be a second pass. The result is float32, because compiled code
    # rounds to bfloat16 slowly.
    q = packed.view(N // (2 * lanes), G, -1, 1, lanes).int()  # (blocks, G, K / G, 1, lanes)
    shifts = torch.arange(0, 8, 4, dtype=torch.int32)[:, None]  # the low half, then the high one
    q = (q >> shifts) & 15  # (blocks, G, K / G, 2, lanes)
    q = q.permute(1, 2, 0, 3, 4).flatten(2)  # (G, K / G, N)
    scale, zero = scales[:, :, None]  # (G, 1, N) each
    return ((q - 8) * scale + zero).flatten(0, 1)


class HalfLinear(PackedLinear):
    """float16 weights, which FBGEMM widens to float32 inside the product, for processors on which
    oneDNN does not multiply the stored dtype; see has_arithmetic.

    Each output channel is divided by a power of two, so that nothing overflows. A weight keeps 11
    bits, where bfloat16 has 8, unless it is smaller than 2**-28 of the channel's largest one. With
    AVX2 alone this is two to eight times as fast as PyTorch's own product in bfloat16.
    """

    def pack(self, linear: Any) -> None:
        weight = linear.weight.float()
        # frexp's exponent e says that 2**(e - 1) <= largest < 2**e. So the largest weight of each
        # channel is scaled to between 2**14 and 2**15, and float16 ends at 2**16.
        self.scales = (weight.abs().amax(1).frexp().exponent - 15).exp2()
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight / self.scales[:, None], None)

    def compute(self, rows: Tensor) -> Tensor:
        y = torch.ops.quantized.linear_dynamic_fp16(rows.float(), self.packed)
        return (y * self.scales).to(rows.dtype)


# --- One sequence alone ---------------------------------------------------------------------------

# Decoding one sequence multiplies one row. On some processors oneDNN's product with a packed weight
# is slow for one row. What is done about it depends on the processor (110m and 1b are shapes of
# tools/bench.py, with random weights; 135m is SmolLM2-135M):
#     Intel with AMX   float32 weights stay plain (see form_of), and MKL multiplies them. The 110m
#                      shape writes 47.6 tokens/s instead of 40.8, a prompt of 16 tokens takes 41 ms
#                      instead of 35, and one of 512 as long as before. On AMD processors, MKL is
#                      slower.
#     SLOW_ROW         On AMD's Zen 4, one row takes longer than six, so one or two are filled up to
#                      six. A Zen 4 is recognised by its instructions for bfloat16, together with
#                      the absence of AVX-VNNI.
#     LOOPS            On Zen 4, and with AVX2 alone (AMD's Zen 3), LoopedLinear takes the place of
#                      PackedLinear if the model runs one sequence at a time.
# Processors with AVX-VNNI (Zen 5, Intel) gain little from filling up, or lose. The speed of
# one sequence, as a multiple of the speed with packed weights and rows that are not filled up:
#                                          on a Zen 4                     on a Zen 3
#                                          110m    1b         1b          110m    135m
#                                          float   bfloat16   int8        float   float
#     decoding, filled up to six           1.03    1.19       1.23
#     decoding, LoopedLinear               1.38    1.40                   1.26    1.38
#     a prompt of 256, LoopedLinear        0.96    0.96
#     a prompt of 512, LoopedLinear                                       0.94    1.00
# On a Zen 4, int8 keeps oneDNN's product. With FBGEMM's product, decoding is 1.07 times as fast as
# with oneDNN's product of six rows, but a prompt is read only 0.80 times as fast. LoopedLinear,
# compiled as a part of its block, has run on a Zen 3 and a Zen 4 only.
capabilities = torch.cpu.get_capabilities()
AVX_VNNI = capabilities.get("avx_vnni")
SLOW_ROW = capabilities.get("avx512_bf16") and not AVX_VNNI
LOOPS = SLOW_ROW or (torch.backends.cpu.get_cpu_capability() == "AVX2" and not AVX_VNNI)


def filled_up(rows: Tensor) -> Tensor:
    """Repeat one or two rows (such as a token's two digits in Int8Linear) up to six, where oneDNN
    is slow for one row. Other rows stay as they are."""
    if SLOW_ROW and len(rows) in (1, 2):
        return rows.repeat(6 // len(rows), 1)
    return rows


class LoopedLinear(PackedLinear):
    """A Linear that multiplies one row by a loop over the plain weight. The loop is compiled as a
    part of its block. If there are more rows, those of a prompt, oneDNN reorders the weight on the
    way."""

    def pack(self, linear: Any) -> None:
        # Plain, and still a parameter, so compiled code takes its shape as fixed.
        self.packed = linear.weight
        # A compiled block inlines the loop. lm_head and experts stand outside the blocks, and call
        # the loop as it is compiled here.
        self.loop = compiled(dot, dynamic=False)

    def multiply(self, rows: Tensor) -> Tensor:
        if len(rows) == 1:
            return self.loop(self.packed, rows)
        return super().multiply(rows)


def dot(weight: Tensor, row: Tensor) -> Tensor:
    """(N, K), (1, K) -> (1, N), added up in float32."""
    # Each sum is made of pieces, because the compiler adds more than 4,096 numbers in cascades,
    # which takes three times as long.
    K = weight.shape[1]
    pieces = -(-K // 4096)
    while K % pieces:
        pieces += 1
    # The cumulative sum over one row is the row itself, so this changes nothing. But the compiler
    # leaves such sums to PyTorch, and has to store the row for it. Otherwise it would compute the
    # row, and the norm or silu that makes it, anew for each output channel.
    row = row.cumsum(0)
    x = row.view(pieces, -1).float()
    products = weight.unflatten(1, (pieces, -1)).float() * x  # (N, pieces, K / pieces)
    return products.sum(-1).sum(-1)[None].to(row.dtype)


# --- Decoding rows attend without copies ----------------------------------------------------------


class CompiledBlocks(Blocks):
    """One layer's keys and values in blocks, which decoding rows read without a copy.

    PyTorch's attention wants a row's keys side by side. Where no query heads share a key, plain
    operators are no slower and need no copy: the compiler puts the look-up of the blocks into the
    loops that multiply them. A step of the 110m shape on a Zen 4, in ms, and in parentheses that of
    Blocks, when attention was not yet compiled as a part of its block (see may_compile):
                                float32       bfloat16
        32 rows of 128 tokens   70 (80)       43 (82)
        32 rows of 512 tokens   136 (150)     73 (222)
        1 row of 512 tokens     26.5 (26.5)   17.4 (20.5)
    A key that several heads share would be read once for each. With 2 to 4 heads that took 1.5 to
    1.9 times as long as Blocks in float32; in bfloat16 0.85 for 2 or 3 heads, and 1.4 for 4.
    """

    # Blocks reads fewer bytes in one call, as it copies them. Here nothing is copied, and few calls
    # are best: with half as many bytes, 32 rows of 512 tokens in float32 would need two, and a step
    # of the 110m shape would take 1.17 times as long. With more, more rows would be padded. What
    # Blocks attends to for this class (guesses, int8) is copied in such large pieces too.
    max_bytes = 2**26

    def attend_group(self, q: Tensor, group: Group) -> Tensor:
        if q.shape[2] > 1 or self.kv.dtype != q.dtype:  # prompts and guesses; int8
            return super().attend_group(q, group)
        mask = group.masks[self.window]
        if torch.compiler.is_compiling():  # as a part of the block; see may_compile
            return attend_to_blocks(q, self.kv, group.table, mask)
        # The compiled code is for one order of q in memory, so this is a copy in that order.
        q = q.clone(memory_format=torch.contiguous_format)
        return compiled(attend_to_blocks, dynamic=True)(q, self.kv, group.table, mask)


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
