"""Turn a finished model's Linears, from outside, into fewer bits and into what a device reads fast.

Decoding reads every weight once per token, so its speed is the speed of reading them: int8 halves
the bytes of bfloat16, int4 takes a little over a quarter. A weight becomes an integer q with a
scale and a zero point for each group of input channels: w = scale * (q - zero). Only weights are
quantised; activations keep their precision, and embeddings and norms stay as they are.

    python generate.py --checkpoint DIR --quantize int8                     on the fly
    python tools/convert.py --checkpoint DIR --mode int4 --out DIR2         or once, as a folder

QuantLinear is the stored form and the oracle: it dequantises and multiplies. The packed forms, at
the end of the file and best skipped at first, replace it and plain Linears when a model is
compiled (compile_model); they are never stored. What it buys: int8 is 1.4 times as fast as bfloat16
for one sequence on two Zen 5 cores, and 1.6 times on two Zen 3 cores, which have AVX2 alone; there
int4 is as fast as bfloat16, see HalfLinear (`tools/bench.py latency --quantize`). It costs 0 and,
with GPTQ in 4 bits, 0.1 % more perplexity (`tools/bench.py quality`). Does not know what the
Linears are for. In this file N is output channels, K input channels, G groups, R rows. Papers:
Dettmers et al. 2022 (int8, arXiv:2208.07339), Frantar et al. 2022 (GPTQ, arXiv:2210.17323; see
tools/convert.py), Lin et al. 2023 (AWQ, arXiv:2306.00978). Read: QuantLinear, round_to_nearest,
load, compile_model. Next: speculative.py.
"""

import timeit
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kv_cache import StaticCache
from model import Files, Prepare, SparseMLP, Transformer, blame, load_model, progress, supported
from paged import Row, Runner, library

# --- The stored form ------------------------------------------------------------------------------

MODES = {"int8": 8, "int4": 4}


class QuantLinear(nn.Module):
    """A Linear over quantised weights; x (..., K) -> (..., N), same dtype.

    Buffers: qweight (N, K * bits / 8) uint8, two 4-bit values in a byte, the first in the low half;
    scales (N, G) float32 and zeros (N, G) uint8, for G groups of equally many input channels.

    Example: bits 4, scale 0.5, zero 8: the byte 0xA7 is q = 7, 10, so w = -0.5, 1.0
    """

    def __init__(self, linear: nn.Linear, bits: int, group_size: int) -> None:
        """Make an empty one in the place of a Linear, on its device. Raises: see num_groups."""
        super().__init__()
        N, K = self.out_features, self.in_features = linear.out_features, linear.in_features
        G = num_groups(K, group_size)
        self.bits, self.group_size = bits, K // G
        with linear.weight.device:
            self.register_buffer("qweight", torch.empty(N, K * bits // 8, dtype=torch.uint8))
            self.register_buffer("scales", torch.empty(N, G, dtype=torch.float32))
            self.register_buffer("zeros", torch.empty(N, G, dtype=torch.uint8))
        self.register_buffer("bias", linear.bias)
        self.parts = getattr(linear, "parts", {})  # of a FusedLinear: name -> its rows
        self.order: Tensor | None = None  # (K,): the channels of x, group by group (GPTQ desc_act)

    def store(self, q: Tensor, scales: Tensor, zeros: Tensor) -> None:
        """Take q (N, K), scales (N, G) and zeros (N, G)."""
        self.qweight, self.scales = pack_bits(q, self.bits), scales.float()
        self.zeros = zeros.to(torch.uint8)

    def dequantize(self) -> Tensor:
        """Return the weight that this one stands for: (N, K) float32, in the order of `order`."""
        N, G = self.scales.shape
        q = unpack_bits(self.qweight, self.bits).view(N, G, -1)
        return (self.scales[..., None] * (q.float() - self.zeros[..., None])).view(N, -1)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.order is None else x[..., self.order]
        return F.linear(x, self.dequantize().to(x.dtype), self.bias)


def num_groups(K: int, group_size: int) -> int:
    """How many groups K input channels make. A group_size of -1 is one group of all.

    Raises:
        ValueError: it does not divide them, or is odd (two 4-bit values share a byte).
    """
    size = K if group_size == -1 else group_size
    if size < 2 or size % 2 or K % size:
        here = f"{K} input channels (under torchrun, of each rank)"
        raise ValueError(f"group_size {size} does not divide {here}: try {K & -K}")
    return K // size


def pack_bits(q: Tensor, bits: int) -> Tensor:
    """(N, K) integers -> (N, K * bits / 8) bytes."""
    q = q.to(torch.uint8)
    return q if bits == 8 else q[:, ::2] | q[:, 1::2] << 4


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """The inverse of pack_bits."""
    return packed if bits == 8 else torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def round_to_nearest(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise a weight (N, K), each value for itself. 8 bits: symmetric; 4 bits: from the least to
    the largest value of each group.

    Returns:
        q (N, K), scales (N, G), zeros (N, G).

    Example: bits 4, one group [-1.0, 0.0, 2.0]: scale 0.2, zero 5, q = 0, 5, 15
    """
    w = weight.float().unflatten(1, (-1, group_size))  # (N, G, group_size)
    scales, zeros = group_scales(w, bits)
    q = (w / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    return q.flatten(1), scales, zeros


def group_scales(w: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each group: w (..., group_size) -> (...), (...)."""
    low, high = w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)  # zero stays exact
    scales = torch.maximum(-low, high) / 127 if bits == 8 else (high - low) / 15
    scales = scales.where(scales > 0, 1)  # a group of zeros
    return scales, torch.full_like(scales, 128) if bits == 8 else (-low / scales).round()


def quantize_model(
    model: Transformer, mode: str, group_size: int = 128, skip: tuple[str, ...] = ()
) -> Transformer:
    """Quantise a model's Linears in place, round to nearest, one after another.

    Args:
        mode: "int8" (one group for each output channel) or "int4".
        group_size: input channels per group, for int4.
        skip: names of Linears to leave alone, such as "lm_head".

    Raises:
        ValueError: see plain_linears; nothing is changed.
    """
    bits, size = MODES[mode], -1 if mode == "int8" else group_size
    found = plain_linears(model, size, skip)
    for parent, name, _ in progress(found, f"quantising to {mode}"):
        linear = getattr(parent, name)
        quantised = QuantLinear(linear, bits, size)
        quantised.store(*round_to_nearest(linear.weight, bits, quantised.group_size))
        setattr(parent, name, quantised)
        del linear  # and its weight, unless the embedding is tied to it
    return model


def plain_linears(
    model: Transformer, group_size: int, skip: tuple[str, ...] = ()
) -> list[tuple[nn.Module, str, str]]:
    """The Linears that are to be quantised, see linears().

    Raises:
        ValueError: some are quantised already, or the group size fits one of them not.
    """
    if any(isinstance(module, QuantLinear) for module in model.modules()):
        raise ValueError("this model is quantised already: start from the plain one")
    found = [each for each in linears(model) if each[2] not in skip]
    for parent, name, _ in found:
        num_groups(getattr(parent, name).in_features, group_size)
    return found


def linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield each Linear as its parent, its name there, and its path; but for routers, which are
    small, and of which an error sends a token to another expert."""
    for path, parent in [*model.named_modules()]:
        for name, child in [*parent.named_children()]:
            if isinstance(child, nn.Linear) and name != "gate":
                yield parent, name, f"{path}.{name}".strip(".")


# --- Folders --------------------------------------------------------------------------------------


def load(
    path: Path | str,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    shard: Prepare | None = None,
) -> Transformer:
    """model.load_model, for quantised folders too: ours, GPTQ's (4 and 8 bits) and AWQ's (gemm).

    Theirs are converted while they are read, exactly: the same integers, scales and zero points.

    Args:
        shard: cuts the empty model and the files down to one rank's share; see tp.shard.

    Raises:
        CheckpointError: see load_model; or a quantization_config that is unknown or contradicts the
            files.
    """

    def prepare(model: Transformer, files: Files) -> tuple[Transformer, Files]:
        settings, orders = model.config.quantization, {}
        with blame(path):
            if settings and settings.get("quant_method") != "kilolm":
                from tools.formats import ours  # here: a tool, for folders that other tools wrote

                if shard:
                    raise ValueError("ranks cannot share folders of other tools, only our own")
                files = ours(files, model, settings, orders)
            model, files = shard(model, files) if shard else (model, files)
            if settings:
                adapt(model, files, settings, {part: o.to(device) for part, o in orders.items()})
        return model, files

    return load_model(path, device, dtype, prepare)


def adapt(model: Transformer, files: Files, settings: Any, orders: dict[str, Tensor]) -> None:
    """Swap QuantLinears into an empty model where the files hold quantised weights.

    Args:
        settings: quantization_config, with bits and group_size.
        orders: of Linears whose groups are not of neighbours: see QuantLinear.order.

    Raises:
        ValueError: settings that we do not run or that do not fit the model.
    """
    bits = supported("bits", settings.get("bits"), 4, 8)
    for parent, name, path in [*linears(model)]:
        linear, prefix = getattr(parent, name), path.removesuffix(name)
        parts = [prefix + part for part in getattr(linear, "parts", {name: None})]
        if f"{parts[0]}.qweight" in files:  # unlike the lm_head of most
            quantised = QuantLinear(linear, bits, settings["group_size"])
            quantised.order = orders.get(parts[0])
            setattr(parent, name, quantised)


# --- Compiled -------------------------------------------------------------------------------------

# Prompt tokens per forward. Smaller chunks skip more of the keys that causality hides, larger ones
# read the weights less often: on two Zen 5 cores 256 is 3 to 5 % faster than 128 or 512 (1b shape).
CHUNK = 256


def compile_model(
    model: Transformer, batch_size: int | None = 1, kv_dtype: str = "auto", chunk: int = CHUNK
) -> Transformer:
    """Make a finished model fast: pack its weights for the CPU and compile it, in place.

    On a CPU one block is compiled and serves all layers, which differ only in their tensors: 5 s
    instead of 35 s for 22 layers as one graph, and no slower, as the guards of one big graph cost
    as much as entering 22 small ones. Lengths are symbolic, so nothing is compiled again later.
    On CUDA the whole model is one graph; with a static cache it is replayed as a CUDA graph for
    each length bucket. What it buys: nearly twice the speed of eager decoding (`tools/bench.py
    latency --shape 1b`, with and without `--compile`, on two Zen 5 cores).

    Args:
        batch_size: of the static cache that it will run against; None: that is paged.
        kv_dtype: of that cache.
        chunk: prompt tokens per forward, to warm up with.

    Raises:
        ValueError: there is no C++ compiler, which torch.compile needs on a CPU.
    """
    pack_linears(model)
    # Which experts run, and on how many rows, is other in each step: left out of the graph.
    sparse = [module for module in model.modules() if isinstance(module, SparseMLP)]
    for module in sparse:
        module.mix = torch.compiler.disable(module.mix)
    if model.device.type == "cpu":
        for block in model.layers:
            block.compile(fullgraph=not sparse, dynamic=True)
    else:
        # Lets a product of one row become a loop that reads int8 weights once, as they are.
        torch._inductor.config.coordinate_descent_tuning = True
        # A paged step is another one each time, in numbers that only the host sees: never replayed.
        model.compile(fullgraph=not sparse, mode="reduce-overhead" if batch_size else None)
    # The default of 8 graphs for one piece of code is few for several models in a process.
    torch._dynamo.config.recompile_limit = 64
    # Two sizes that happen to be equal now, such as the mask's and H, need not be later.
    torch.fx.experimental._config.use_duck_shape = False
    with torch.no_grad(), blame("--compile, for which a CPU needs a C++ compiler"):
        for length in progress([1, chunk], "compiling decode, prefill"):
            if batch_size:  # the logits of one token, then of two: any number
                positions, layers = StaticCache(model, batch_size, chunk, kv_dtype).step(0, length)
                select = torch.arange(min(length, 2), device=model.device)
                model(torch.zeros_like(positions), positions, layers, select)
            else:
                row = Row([*range(chunk)], 0, [0] * length, min(length, 2))
                Runner(model, chunk, 16, kv_dtype).run([row])
    return model


# --- Packed forms, for each device ----------------------------------------------------------------


def pack_linears(model: nn.Module) -> None:
    """Replace each Linear, plain or quantised, by a packed form, in place, before compiling.

    Memory peaks at one extra weight (of HalfLinear, at two in float32): the packed copy takes the
    plain one's place and serves every batch size. (Inductor's freezing packs too, but keeps a copy
    for each compiled graph.)
    """
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    kinds = nn.Linear, QuantLinear
    # The list holds parents only: a reference to a Linear would keep its plain weight alive.
    for module in progress([m for m in model.modules() if not isinstance(m, kinds)], "packing"):
        for name, child in module.named_children():
            if isinstance(child, kinds) and (form := form_of(child)):
                setattr(module, name, form(child, dtype))
            del child


def form_of(linear: nn.Linear | QuantLinear) -> "type[PackedLinear] | None":
    """What packs a Linear, for its device and its kind of weight; None: nothing does. Then it stays
    as it is, and a QuantLinear is dequantised at each step."""
    N, K, plain = linear.out_features, linear.in_features, isinstance(linear, nn.Linear)
    weight, bits = (linear.weight, 0) if plain else (linear.qweight, linear.bits)
    int4 = bits == 4 and linear.group_size in (32, 64, 128, 256)
    int8 = bits == 8 and linear.scales.shape[1] == 1 and bool((linear.zeros == 128).all())
    if not weight.is_cpu:
        return Int4Linear if int4 and weight.is_cuda and N % 8 == K % 128 == 0 else None
    if int4 and N % 64 == 0 and "AVX512" in torch.backends.cpu.get_cpu_capability():
        return Int4Linear
    fbgemm = "fbgemm" in torch.backends.quantized.supported_engines
    native = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }.get(weight.dtype, torch.backends.mkldnn.is_available)
    if (plain or (int8 and fbgemm)) and native():
        return PackedLinear if plain else Int8Linear
    return HalfLinear if fbgemm and weight.dtype != torch.float32 else None


class PackedLinear(nn.Module):
    """A Linear with its weight in oneDNN's blocked order; x (..., K) -> (..., N), same dtype.

    A packed tensor has no strides, so torch.compile cannot take it as an input: the compiled code
    calls a custom operator with a number, `key`, under which the operator finds this module and
    its `product`. The number is a tensor, so that all blocks of a model compile to one and the same
    graph.
    """

    def __init__(self, linear: nn.Module, dtype: torch.dtype) -> None:
        """Take a Linear, for inputs of that dtype."""
        super().__init__()
        self.out_features, self.bias = linear.out_features, linear.bias
        self.order = getattr(linear, "order", None)
        self.nbytes = sum(t.nbytes for t in (*linear.parameters(), *linear.buffers()))
        self.register_buffer("key", torch.tensor(len(_packed)), persistent=False)
        _packed.append(weakref.ref(self))
        self.pack(linear, dtype)

    def pack(self, linear: nn.Module, dtype: torch.dtype) -> None:
        # 32 is a hint for how many rows x will have. With 1 other numbers of rows are slower, 2 to
        # 64 by a fifth on Zen 3 (float32), 256 by two thirds with AMX (bfloat16); one is as fast.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 32)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.order is None else x[..., self.order]
        y = self.multiply(x.flatten(0, -2)).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def multiply(self, rows: Tensor) -> Tensor:
        """(R, K) -> (R, N), in compiled code."""
        return torch.ops.kilolm.packed_linear(rows, self.key, self.out_features)

    def product(self, rows: Tensor) -> Tensor:
        """The same, inside the operator."""
        return torch.ops.mkldnn._linear_pointwise(rows, self.packed, None, "none", [], "")

    def few(self, rows: Tensor) -> Tensor:
        """The same in another way, for few rows: here, with rows of zeros added, to six. On two Zen
        5 cores oneDNN read a bfloat16 weight at 25 GB/s for one or two rows, and at 31 for five
        (the limit was 35); on two Zen 3 cores a float32 one at 22 for one row, and at 10 for five.
        """
        return self.product(F.pad(rows, (0, 0, 0, max(0, 6 - len(rows)))))[: len(rows)]


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
        self.scales, self.zeros = linear.scales[:, 0].contiguous(), torch.zeros(len(signed)).long()
        if self.most == 127:
            self.packed = torch.ops.onednn.qlinear_prepack(signed, [1, linear.in_features])
        else:
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


class Int4Linear(PackedLinear):
    """int4 weights for PyTorch's own operators, which dequantise inside the product.

    They compute scale * (q - 8) + zero, and ours is scale * (q - z): so their zero is scale * (8 -
    z). On a CPU, with AVX-512, they take few rows; for many, the weight is dequantised, and
    multiplied as any other. On CUDA in bfloat16 alone; not yet run on a GPU by us.
    """

    def pack(self, linear: QuantLinear, dtype: torch.dtype) -> None:
        q, self.group_size = linear.qweight, linear.group_size
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
        # By pieces: the memory of the last one is used again while it is in the cache.
        pieces = zip(self.packed.split(512), self.scales.split(512, 1))
        pieces = ((q, *scales.movedim(2, 0).contiguous()) for q, scales in pieces)
        return torch.cat([rows @ _compiled(dequantize)(*piece) for piece in pieces], -1)

    def few(self, rows: Tensor) -> Tensor:
        x, aten = rows.to(self.scales.dtype).contiguous(), torch.ops.aten
        operator = aten._weight_int4pack_mm if x.is_cuda else aten._weight_int4pack_mm_for_cpu
        return operator(x, self.packed, self.group_size, self.scales).to(rows.dtype)


class HalfLinear(PackedLinear):
    """Weights of 16 bits and fewer, held as float16, which FBGEMM widens to float32 on the way into
    a product: for processors with no arithmetic of their own for what is stored.

    Each output channel is divided by a power of two, so that nothing overflows; 11 bits of a weight
    are kept, of which bfloat16 has 8, where it is not 2**-28 of the channel's largest or less. What
    it buys, on two Zen 3 cores (AVX2), of a bfloat16 matrix of 2048 x 11264: one row takes 2.4 ms,
    8 take 5.6 and 512 take 170, and with PyTorch's own product 3.8, 27 and 1,370. What it costs:
    packing a 1b model takes 15 s longer, and int4 four times its memory.
    """

    def pack(self, linear: nn.Module, dtype: torch.dtype) -> None:
        weight = linear.weight.float() if isinstance(linear, nn.Linear) else linear.dequantize()
        self.nbytes = 2 * weight.numel()
        self.scales = (weight.abs().amax(1).frexp().exponent - 15).exp2()  # largest: 2**14 to 2**15
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight / self.scales[:, None], None)

    def product(self, rows: Tensor) -> Tensor:
        y = torch.ops.quantized.linear_dynamic_fp16(rows.float(), self.packed)
        return (y * self.scales).to(rows.dtype)


def dequantize(packed: Tensor, scale: Tensor, zero: Tensor, lanes: int = 32) -> Tensor:
    """A weight from the CPU operator's order, (K, N): a byte holds, of 2 * lanes output channels,
    the one at its place and the one `lanes` after it. scale, zero: (G, N). AVX2 has 16 lanes."""
    (G, N), dtype = scale.shape, scale.dtype
    # As int32, which the compiler turns into vectors, unlike uint8: twice as fast as with floats.
    q = packed.view(N // (2 * lanes), G, -1, lanes).permute(1, 2, 0, 3).int()
    scale, zero = (t.float().view(G, 1, -1, 2, lanes) for t in (scale, zero))
    halves = [
        ((half.float() - 8) * scale[..., i, :] + zero[..., i, :]).to(dtype)
        for i, half in enumerate((q & 15, q >> 4))  # (G, K / G, blocks, lanes) each
    ]
    return torch.stack(halves, 3).view(-1, N)


# Made when it is first called: torch.compile takes 2 s to import. Not for any size at once: that
# returns (K, 0) the first time that K is another, in PyTorch 2.13.
_compiled = cache(partial(torch.compile, dynamic=False))
_packed: list[weakref.ref] = []  # key -> PackedLinear; weak, so that it can be freed
_few: dict[tuple, bool] = {}  # kind of product -> whether few() is the faster way


def _packed_linear(rows: Tensor, key: Tensor, out_features: int) -> Tensor:
    form = _packed[int(key)]()
    # Timed once for each kind of matrix and number of rows: 1, 2 to 3, 4 to 7, 8 to 15, ... One way
    # must be better by a tenth, or noise would choose, and tokens could differ from run to run.
    kind = (type(form), out_features, rows.shape[1], rows.dtype, len(rows).bit_length())
    if kind not in _few:
        _few[kind] = rows.is_cuda or seconds(form.few, rows) < 0.9 * seconds(form.product, rows)
    return form.few(rows) if _few[kind] else form.product(rows)


def seconds(way: Callable[[Tensor], Tensor], rows: Tensor) -> float:
    """The least time of three; with the weight in no cache, as between a large model's steps."""
    return min(timeit.repeat(lambda: way(rows), torch.zeros(2**23).sum, number=1, repeat=3))


def _empty(rows: Tensor, key: Tensor, out_features: int) -> Tensor:
    dtype = rows.dtype if rows.is_floating_point() else torch.float32
    return rows.new_empty((rows.shape[0], out_features), dtype=dtype)  # len() would be baked in


# A plain Library: the wrapper of torch.library.custom_op costs 8 us a call, this one 3 to 5, and a
# step makes four calls a layer.
library.define("packed_linear(Tensor rows, Tensor key, int out_features) -> Tensor")
library.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")
torch.library.register_fake("kilolm::packed_linear", _empty, lib=library)
