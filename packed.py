"""How a processor reads a matrix fast: private operators of PyTorch, all in this one place.

compile_model replaces each Linear of a finished model, plain or quantised, by a form that its
device multiplies fast, and hands the rest to torch.compile. These forms are never stored. Which one
a matrix gets depends on what the processor has, never on timing: the same model on the same machine
gives the same tokens in each process. Best skipped at first: nothing else needs it. In this file N
is output channels, K input channels, G groups, R rows. Read: compile_model, PackedLinear, form_of.
"""

import warnings
import weakref
from functools import cache

import torch
from torch import Tensor, nn

from checkpoint import blame
from kv_cache import StaticCache
from model import Transformer
from paged import Row, Runner, library
from quantize import QuantLinear, unpack_bits
from settings import CHUNK, progress

# --- Compiled -------------------------------------------------------------------------------------


def compile_model(
    model: Transformer, batch_size: int | None = 1, kv_dtype: str = "auto", chunk: int = CHUNK
) -> Transformer:
    """Make a finished model fast: pack its weights for the CPU and compile it, in place.

    On a CPU one block is compiled and serves all layers, which differ only in their tensors: that
    takes seconds where one graph of all layers takes a minute, and is no slower. Lengths are
    symbolic, so nothing is compiled again later. On CUDA the whole model is one graph; with a
    static cache it is replayed as a CUDA graph for each length bucket.

    Args:
        batch_size: of the static cache that it will run against; None: that is paged.
        kv_dtype: of that cache.
        chunk: prompt tokens per forward, to warm up with.

    Raises:
        ValueError: there is no C++ compiler, which torch.compile needs on a CPU.
    """
    pack_linears(model)
    # Which experts run, and on how many rows, differs by the step: that is left out of the graph.
    dense = model.config.num_experts == 1
    for block in model.layers:
        if hasattr(block.mlp, "mix"):
            block.mlp.mix = torch.compiler.disable(block.mlp.mix)
    if model.device.type == "cpu":
        for block in model.layers:
            block.compile(fullgraph=dense, dynamic=True)
    else:
        # Lets a product of one row become a loop that reads int8 weights once, as they are.
        torch._inductor.config.coordinate_descent_tuning = True
        # A paged step is another one each time, in numbers that only the host sees: never replayed.
        model.compile(fullgraph=dense, mode="reduce-overhead" if batch_size else None)
    # The default of 8 graphs for one piece of code is few for several models in a process.
    torch._dynamo.config.recompile_limit = 64
    # Two sizes that happen to be equal now, such as the mask's and H, need not be later.
    torch.fx.experimental._config.use_duck_shape = False
    with torch.no_grad(), blame("--compile, for which a CPU needs a C++ compiler"):
        for length in progress([1, chunk], "compiling decode, prefill"):
            if batch_size:  # the logits of one token, then of two: any number
                positions, layers = StaticCache(model, batch_size, chunk, kv_dtype).plan(0, length)
                select = torch.arange(min(length, 2), device=model.device)
                model(torch.zeros_like(positions), positions, layers, select)
            else:
                row = Row([*range(chunk)], 0, [0] * length, min(length, 2))
                Runner(model, chunk, 16, kv_dtype).forward([row])
    return model


def pack_linears(model: nn.Module) -> None:
    """Replace each Linear, plain or quantised, by a packed form, in place, before compiling.

    The packed copy takes the plain one's place and serves every batch size, so memory peaks at one
    extra weight. (Inductor's freezing packs too, but keeps a copy for each compiled graph.)
    """
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    kinds = nn.Linear, QuantLinear
    # The list holds parents only: a reference to a Linear would keep its plain weight alive.
    for module in progress([m for m in model.modules() if not isinstance(m, kinds)], "packing"):
        for name, child in module.named_children():
            form = form_of(child) if isinstance(child, kinds) else None
            if form:
                setattr(module, name, form(child, dtype))
            del child


def form_of(linear: nn.Linear | QuantLinear) -> "type[PackedLinear] | None":
    """What packs a Linear, for its device and its kind of weight; None: nothing does. Then it stays
    as it is, and a QuantLinear is dequantised at each step."""
    plain = isinstance(linear, nn.Linear)
    weight = linear.weight if plain else linear.qweight
    N, K = linear.out_features, linear.in_features
    int4 = not plain and linear.bits == 4 and linear.group_size in (32, 64, 128, 256)
    if not weight.is_cpu:
        return Int4Linear if int4 and weight.is_cuda and N % 8 == K % 128 == 0 else None
    if int4 and N % 64 == 0 and "AVX512" in torch.backends.cpu.get_cpu_capability():
        return Int4Linear
    fbgemm = "fbgemm" in torch.backends.quantized.supported_engines
    if not plain:  # one group, around zero
        int8 = linear.bits == 8 and linear.group_size == K and bool((linear.zeros == 128).all())
        if int8 and fbgemm and torch.backends.mkldnn.is_available():
            return Int8Linear
    elif has_arithmetic(weight.dtype):
        return PackedLinear
    return HalfLinear if fbgemm and weight.dtype != torch.float32 else None


def has_arithmetic(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this dtype without emulating it."""
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return torch.backends.mkldnn.is_available()


# --- The forms ------------------------------------------------------------------------------------


class PackedLinear(nn.Module):
    """A Linear with its weight in oneDNN's blocked order; x (..., K) -> (..., N), same dtype.

    A packed tensor has no strides, so torch.compile cannot take it as an input. The compiled code
    calls an operator with a number, `key`, under which the operator finds this module and its
    `product`. The number is a tensor, so that all blocks of a model compile to the same graph.
    """

    def __init__(self, linear: nn.Module, dtype: torch.dtype) -> None:
        """Take a Linear, for inputs of that dtype."""
        super().__init__()
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.nbytes = sum(t.nbytes for t in (*linear.parameters(), *linear.buffers()))
        self.register_buffer("key", torch.tensor(len(_packed)), persistent=False)
        _packed.append(weakref.ref(self))
        self.pack(linear, dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = self.multiply(x.flatten(0, -2)).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def multiply(self, rows: Tensor) -> Tensor:
        """(R, K) -> (R, N), in compiled code."""
        return torch.ops.kilolm.packed_linear(rows, self.key, self.out_features)

    def pack(self, linear: nn.Module, dtype: torch.dtype) -> None:
        # 32 is a hint for how many rows x will have. With 1 other numbers of rows are slower, by a
        # fifth to two thirds on each kind of processor; one row is as fast.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 32)

    def product(self, rows: Tensor) -> Tensor:
        """(R, K) -> (R, N), inside the operator."""
        return torch.ops.mkldnn._linear_pointwise(rows, self.packed, None, "none", [], "")


class Int8Linear(PackedLinear):
    """int8 weights multiplied as integers, with next to no loss to the activations.

    The product is of bytes, so each row of x becomes two of them: with s = the row's largest value
    / 16256, x = s * (128 * high + low), to 15 bits below that largest value; bfloat16 has 8, of
    each value. Both digits go through one integer product as separate rows. For one token the
    second row is free, since reading the weights takes the time, half as much as in bfloat16; for
    many rows, twice the products at twice the speed cost about what bfloat16 costs. Where the
    processor cannot add up products of bytes in 32 bits (VNNI, AMX), FBGEMM adds two of them in 16:
    `high` is then below 64, and one bit is lost.

    Example: x = [1.0, -0.3], s = 1 / 16256: digits 127 | 0 and -38 | -13 (128 * -38 - 13 = -4877)
    """

    most = 127 if torch.cpu._is_vnni_supported() else 63  # of the digit `high`

    def pack(self, linear: QuantLinear, dtype: torch.dtype) -> None:
        signed = (linear.qweight.int() - 128).to(torch.int8)
        # Not buffers: .to(dtype) must not round them.
        self.scales = linear.scales[:, 0].contiguous()
        self.zeros = torch.zeros(len(signed)).long()
        if self.most == 127:
            self.packed = torch.ops.onednn.qlinear_prepack(signed, [1, linear.in_features])
            return
        with warnings.catch_warnings(action="ignore"):  # PyTorch will drop such tensors one day
            q = torch._make_per_channel_quantized_tensor(signed, self.scales, self.zeros, 0)
        self.packed = torch.ops.quantized.linear_prepack(q, None)

    def multiply(self, rows: Tensor) -> Tensor:
        x = rows.float()
        s = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / (self.most * 128)
        digits = (x / s).round()
        high = (digits / 128).round()
        pair = torch.cat((high, digits - 128 * high)) + self.most + 1  # (2R, K), in 0..255
        high, low = super().multiply(pair.to(torch.uint8)).chunk(2)  # (R, N) each
        return ((128 * high + low) * s).to(rows.dtype)

    def product(self, rows: Tensor) -> Tensor:
        if self.most == 63:
            product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
            return product(rows.float() - 64, 1.0, 64, self.packed)
        return torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, 128, self.packed, self.scales, self.zeros, None, 1.0, 0, torch.float32,
            "none", [], "",
        )  # fmt: skip


# Rows up to which PyTorch's int4 operator is faster than dequantising a weight of 2048 x 11264 and
# multiplying. With AMX: 9.0 and 7.6 ms for 32 rows. Without it, on a Zen 5: 13 and 21 ms for 64
# rows, 25 and 22 for 128.
FEW_ROWS = 24 if torch.cpu._is_amx_tile_supported() else 96


class Int4Linear(PackedLinear):
    """int4 weights for PyTorch's own operators, which dequantise inside the product.

    They compute scale * (q - 8) + zero, and ours is scale * (q - z): so their zero is scale * (8 -
    z). On a CPU, with AVX-512, they take few rows; for many, the weight is dequantised, and
    multiplied as any other. On CUDA in bfloat16 alone; not yet run on a GPU by us.
    """

    def pack(self, linear: QuantLinear, dtype: torch.dtype) -> None:
        q = linear.qweight
        self.group_size = linear.group_size
        scales = torch.stack((linear.scales, linear.scales * (8 - linear.zeros.float())), -1)
        if q.is_cuda:
            dtype, swapped = torch.bfloat16, q << 4 | q >> 4  # the first in the high half
            # 8: tiles of 16 input channels that one thread keeps together, the most there is
            self.packed = torch.ops.aten._convert_weight_to_int4pack(swapped, 8)
        else:
            q = unpack_bits(q, 4).int()
            self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
        self.scales = scales.transpose(0, 1).to(dtype).contiguous()  # (G, N, 2)

    def product(self, rows: Tensor) -> Tensor:
        if len(rows) > FEW_ROWS and rows.is_cpu:
            return self.many_rows(rows)
        aten = torch.ops.aten
        operator = aten._weight_int4pack_mm_for_cpu if rows.is_cpu else aten._weight_int4pack_mm
        x = rows.to(self.scales.dtype).contiguous()
        return operator(x, self.packed, self.group_size, self.scales).to(rows.dtype)

    def many_rows(self, rows: Tensor) -> Tensor:
        """By pieces: the memory of the last one is used again while it is in the cache."""
        pieces = zip(self.packed.split(512), self.scales.split(512, 1))
        columns = [dequantize(q, *scales.movedim(2, 0).contiguous()) for q, scales in pieces]
        return torch.cat([rows @ each for each in columns], -1)


class HalfLinear(PackedLinear):
    """Weights of 16 bits and fewer, held as float16, which FBGEMM widens to float32 on the way into
    a product: for processors with no arithmetic of their own for what is stored.

    Each output channel is divided by a power of two, so that nothing overflows; 11 bits of a weight
    are kept, of which bfloat16 has 8, where it is not 2**-28 of the channel's largest or less. With
    AVX2 alone that is twice to eight times as fast as PyTorch's own product in bfloat16. It costs
    packing time, and int4 four times its memory.
    """

    def pack(self, linear: nn.Module, dtype: torch.dtype) -> None:
        weight = linear.weight.float() if isinstance(linear, nn.Linear) else linear.dequantize()
        self.nbytes = 2 * weight.numel()
        self.scales = (weight.abs().amax(1).frexp().exponent - 15).exp2()  # largest: 2**14 to 2**15
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight / self.scales[:, None], None)

    def product(self, rows: Tensor) -> Tensor:
        y = torch.ops.quantized.linear_dynamic_fp16(rows.float(), self.packed)
        return (y * self.scales).to(rows.dtype)


def dequantize(packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """A weight from the CPU operator's order, (K, N); scale, zero: (G, N). Compiled at the first
    call, as torch.compile takes seconds to import; and for each size anew, as one graph for any
    size returns (K, 0) the first time that K is another, in PyTorch 2.13."""
    return _compiled(_dequantize)(packed, scale, zero)


def _dequantize(packed: Tensor, scale: Tensor, zero: Tensor, lanes: int = 32) -> Tensor:
    """A byte holds, of 2 * lanes output channels, the one at its place and the one `lanes` after
    it."""
    G, N = scale.shape
    # As int32, which the compiler turns into vectors, unlike uint8: twice as fast as with floats.
    q = packed.view(N // (2 * lanes), G, -1, lanes).permute(1, 2, 0, 3).int()
    scales = scale.float().view(G, 1, -1, 2, lanes)
    zeros = zero.float().view(G, 1, -1, 2, lanes)
    halves = [
        ((half.float() - 8) * scales[..., i, :] + zeros[..., i, :]).to(scale.dtype)
        for i, half in enumerate((q & 15, q >> 4))  # (G, K / G, blocks, lanes) each
    ]
    return torch.stack(halves, 3).view(-1, N)


@cache
def _compiled(function):  # noqa: ANN001, ANN202
    return torch.compile(function, dynamic=False)


# --- The operator ---------------------------------------------------------------------------------

_packed: list[weakref.ref] = []  # key -> PackedLinear; weak, so that it can be freed


def packed_linear(rows: Tensor, key: Tensor, out_features: int) -> Tensor:
    return _packed[int(key)]().product(rows)


def _empty(rows: Tensor, key: Tensor, out_features: int) -> Tensor:
    dtype = rows.dtype if rows.is_floating_point() else torch.float32
    return rows.new_empty((rows.shape[0], out_features), dtype=dtype)  # len() would be baked in


# A plain Library: the wrapper of torch.library.custom_op costs 8 us a call, this one 3 to 5, and a
# step makes four calls a layer.
library.define("packed_linear(Tensor rows, Tensor key, int out_features) -> Tensor")
library.impl("packed_linear", packed_linear, "CompositeExplicitAutograd")
torch.library.register_fake("kilolm::packed_linear", _empty, lib=library)
