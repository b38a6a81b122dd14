"""Fast matrix products by PyTorch's private operators, in one place.

pack_linears replaces each Linear of a finished model, plain or quantised, by a form that its device
multiplies fast, where PyTorch has one (on CUDA for int4 only). These forms are never stored. The
form that a matrix gets depends on the processor, on the cache (one sequence, or many), and on
whether the model is compiled, never on timing. So the same command on the same machine gives the
same tokens in each process. Skip this file at first: it is needed only for --compile, and on a CPU
for quantised weights, bfloat16 and float16. In it, N is output channels, K input channels, G
groups, R rows. Read: form_of, PackedLinear, then one form. The last section can wait, as it is a
fast path for one case.
"""

import os
import warnings
from collections.abc import Iterable
from functools import cache
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from around.machine import progress

# oneDNN keeps the code that it makes for each number of rows, and PyTorch keeps it once more. With
# their own limits, 200 prompts of different lengths add 500 MB, and with these 70. 96 pieces of
# code are those of twenty numbers of rows, and to make one takes 2 ms. The limits are read at the
# first product.
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "96")

# --- Which form a matrix gets ---------------------------------------------------------------------


def pack_linears(model: nn.Module, alone: bool = False, compiled: bool = True) -> None:
    """Replace each Linear, plain or quantised, that has a packed form (see form_of), in place. This
    comes before compiling.

    The packed weight replaces the plain one and serves every batch size, so memory peaks at one
    extra weight. (Inductor's freezing packs too, but keeps a copy for each compiled graph.)

    Args:
        alone, compiled: see form_of.
    """
    # A list of paths, since a reference to a Linear would keep its plain weight alive.
    paths = [path for path, _ in model.named_modules()]
    for path in progress(paths, "packing"):
        linear = model.get_submodule(path)
        form = form_of(linear, alone, compiled)
        if form:
            model.set_submodule(path, form(linear))


# FBGEMM is for x86 alone, so this also tells whether the processor is an x86. Int8Linear and
# Int8WithoutVNNI need one. WidenedLinear would run anywhere, but has been measured on x86 alone.
HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines


def form_of(linear: Any, alone: bool = False, compiled: bool = True) -> "type[PackedLinear] | None":
    """Which packed form a module gets, by its device and its kind of weight. None: the module stays
    as it is, and a QuantLinear is dequantised at each step.

    Args:
        alone: whether the model runs one sequence at a time, so that most products have one row.
        compiled: whether the model will be compiled. If it will not, it is to start quickly, so a
            plain weight is replaced only where PyTorch's own product is far too slow. A quantised
            one is always packed: that makes a step on a CPU 4 to 9 times as fast.
    """
    if hasattr(linear, "qweight"):  # a QuantLinear; quantize.py is imported only if there is one
        q = linear.qweight
        if linear.bits == 4 and linear.group_size in (32, 64, 128, 256) and has_int4(q):
            return Int4Linear
        if q.is_cpu and HAS_FBGEMM:
            return Int8Linear if CAN("avx512_vnni") else Int8WithoutVNNI
    elif isinstance(linear, nn.Linear) and linear.weight.is_cpu:
        dtype = linear.weight.dtype
        if not onednn_multiplies(dtype):
            if HAS_FBGEMM:
                return HalfLinear if compiled else WidenedLinear
        elif compiled:
            return LoopedLinear if alone else PackedLinear
    return None


def has_int4(q: Tensor) -> bool:
    """Whether PyTorch has a fast product for (N, K / 2) bytes with two 4-bit values each."""
    N, half = q.shape
    if q.is_cpu:
        return N % 64 == 0 and "AVX512" in torch.backends.cpu.get_cpu_capability()
    return q.is_cuda and N % 8 == 0 and half % 64 == 0


def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this dtype by instructions of this processor. It also takes
    bfloat16 where there is AVX-512 without them, but emulates it."""
    short = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    can = not short or CAN(f"avx512_{short}") or CAN(short)  # x86 or ARM
    # A Mac has no such operators.
    return can and torch.backends.mkldnn.is_available()


CAN: Any = torch.cpu.get_capabilities().get
# Whether products of many rows are faster in bfloat16 than in float32. They are with AMX, and with
# AVX-512 for bfloat16 on AMD, which alone has SSE4a. On an Intel without AMX, as in a virtual
# machine that hides it, oneDNN's product of 512 rows reaches 0.5 to 0.7 of its speed in float32
# (Emerald Rapids), and where oneDNN emulates bfloat16, a quarter.
FAST_BFLOAT16 = CAN("amx_tile") or (CAN("avx512_bf16") and CAN("sse4a"))
# From here on, float32 is faster even if oneDNN's order of the weight must be undone first: 512
# rows take 0.65 to 0.8 of the time, and 128 rows 0.75 to 1.05.
MANY_ROWS = 192


# --- What the compiler does not see ---------------------------------------------------------------

# A packed matrix has no strides, so compiled code cannot take it as an input. Therefore compiled
# code calls the operator `opaque` with a number, and the operator calls `compute` of the object
# with that number. compiling.Opaque uses it too.
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
# matrices, a step makes four calls a layer.
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


# torch.compile, once for each function. It is called where a function is needed, and is no
# decorator, because importing the compiler takes two seconds.
compile_once = cache(torch.compile)


# --- The forms ------------------------------------------------------------------------------------


class PackedLinear(nn.Module):
    """A Linear with its weight in oneDNN's blocked order; x (..., K) -> (..., N), same dtype.

    A form has three parts. `pack` makes the packed weight. `multiply` is compiled, with the code
    around it, and calls `opaque` with this module's number. `opaque` calls `compute`, which the
    compiler does not see, for the product itself. WidenedLinear, and LoopedLinear for one row, need
    no such call.
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
        if rows.dtype == torch.bfloat16 and len(rows) >= MANY_ROWS and not FAST_BFLOAT16:
            return widened(rows, self.packed.to_dense())
        return torch.ops.mkldnn._linear_pointwise(rows, self.packed, None, "none", [], "")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied or pickled. Some packed tensors cannot be, and a copy would still
        have the number of the original."""
        raise TypeError("a packed model cannot be copied: copy it before it is packed")


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
        from quantize import round_to_nearest

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
        # There is no bias. The results are float32, so their own scale and zero point, 1.0 and 0,
        # have no effect.
        options: Any = (None, 1.0, 0, torch.float32, "none", [], "")
        # The bytes in x have the scale 1.0 and the zero point 128.
        return torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, 128, self.packed, self.scales, self.zeros, *options
        )


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
        return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            rows.float() - 64, 1.0, 64, self.packed
        )


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
        from quantize import unpack_bits

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
        self.unpack = dequantize  # compiling.compile_for_cpu compiles it

    def compute(self, rows: Tensor) -> Tensor:
        if rows.is_cpu and (len(rows) > FEW_ROWS or rows.dtype != torch.bfloat16):
            return self.many_rows(rows)
        x = rows.bfloat16().contiguous()
        return self.operator(x, self.packed, self.group_size, self.rounded).to(rows.dtype)

    def many_rows(self, rows: Tensor) -> Tensor:
        """Dequantise and multiply 512 output channels at a time."""
        pieces = zip(self.packed.split(512), self.scales.split(512, 2))
        return by_pieces(rows, (self.unpack(*piece) for piece in pieces))


# Up to this many rows, PyTorch's int4 operator is faster than dequantising the weight first. For a
# weight of 2048 x 11264, in ms:
#                          32 rows with AMX   48 rows on a Zen 5   64 rows on a Zen 5
#     the operator         9.0                10.1                 13.8
#     dequantising first   7.6                10.5                 11.0
FEW_ROWS = 24 if CAN("amx_tile") else 56


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
    oneDNN does not multiply the stored dtype; see onednn_multiplies.

    A weight keeps 11 bits, where bfloat16 has 8, if it is between 2**-14 and 2**16. Smaller ones
    are rounded to multiples of 2**-24, a thousandth of what bfloat16 rounds from an ordinary
    weight. With AVX2 alone this is two to eight times as fast as PyTorch's own product in bfloat16.
    """

    def pack(self, linear: Any) -> None:
        self.packed = torch.ops.quantized.linear_prepack_fp16(linear.weight.float(), None)

    def compute(self, rows: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(rows.float(), self.packed).to(rows.dtype)


class WidenedLinear(PackedLinear):
    """A plain weight in a dtype that oneDNN does not multiply on this processor (see
    onednn_multiplies), for a model that is not compiled. It is not packed, so that the model starts
    quickly.

    PyTorch's own product takes one row after another, each with the whole weight. Eight rows or
    more are multiplied in float32. With AVX2 alone, a prompt of 512 tokens is read 6 times as fast.
    """

    def pack(self, linear: Any) -> None:
        self.packed = linear.weight

    def multiply(self, rows: Tensor) -> Tensor:
        if len(rows) < 8:
            return F.linear(rows, self.packed)
        return widened(rows, self.packed)


def widened(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply in float32: (R, K), (N, K) -> (R, N)."""
    return by_pieces(rows, (piece.float().mT for piece in weight.split(1024)))


def by_pieces(rows: Tensor, pieces: Iterable[Tensor]) -> Tensor:
    """Multiply by a weight that is made piece by piece: (R, K), (K, some of N) float32 -> (R, N).
    So each piece is still in the processor's cache when it is multiplied."""
    x = rows if rows.dtype == torch.bfloat16 and FAST_BFLOAT16 else rows.float()
    return torch.cat([(x @ piece.to(x.dtype)).to(rows.dtype) for piece in pieces], -1)


# --- One sequence alone ---------------------------------------------------------------------------

# Decoding one sequence multiplies one row, which oneDNN does slowly. LoopedLinear multiplies it
# itself: the loop is a part of the layer's code, so that a layer of one row is a single function.
# The speed of one sequence, as a multiple of the speed with packed weights, when each layer was
# compiled by itself and the row was stored in another way (110m and 1b are shapes of
# tools/bench.py, 135m is SmolLM2-135M):
#                             decoding   a prompt of 256 or 512
#     Zen 3, 110m, float32    1.26       0.94
#     Zen 3, 135m, float32    1.38       1.00
#     Zen 4, 110m, float32    1.38       0.96
#     Zen 4, 1b, bfloat16     1.40       0.96
#     AMX, 135m, bfloat16     1.06       1.05
# In int8, and beside other sequences, oneDNN's product stays.


class LoopedLinear(PackedLinear):
    """A Linear that multiplies one row by a loop over the plain weight. The loop is compiled as a
    part of its layer. If there are more rows, those of a prompt, oneDNN reorders the weight on the
    way."""

    def pack(self, linear: Any) -> None:
        # Plain, and still a parameter, so compiled code takes its shape as fixed.
        self.packed = linear.weight
        # Compiled code inlines the loop. Experts stand outside it, and call the loop as it is
        # compiled here.
        self.loop = compile_once(dot, dynamic=False)

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
    # The compiler would compute the row, and the norm or silu that makes it, anew for each output
    # channel. But before as_strided it stores what it has.
    x = row.view(pieces, -1).float()
    x = x.as_strided(x.shape, x.stride())
    # Four sums at a time, which do not wait for each other: the compiler puts equal loops into one.
    # That takes 0.7 of the time in bfloat16, and 0.8 in float32 (Emerald Rapids).
    parts = weight.unflatten(1, (pieces, -1)).chunk(4)  # (N / 4, pieces, K / pieces) each
    y = torch.cat([(part.float() * x).sum(-1).sum(-1) for part in parts])
    return y[None].to(row.dtype)
