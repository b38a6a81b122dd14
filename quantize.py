"""Turn a finished model's Linears, from outside, into fewer bits and into what a device reads fast.

Decoding reads every weight once per token, so its speed is the speed of reading them: int8 halves
the bytes of bfloat16, int4 takes a little over a quarter. A weight becomes an integer q with a
scale and a zero point for each group of input channels: w = scale * (q - zero). Only weights are
quantised; activations keep their precision, and embeddings and norms stay as they are.

    python quantize.py --checkpoint DIR --mode int4 --out DIR2      an ordinary folder comes out
    python generate.py --checkpoint DIR --quantize int8             or on the fly

QuantLinear is the stored form and the oracle: it dequantises and multiplies. compile_model then
replaces it, and plain Linears too, by a form packed for the processor; that form is never stored.
What it buys: 1.5 times (int8) and 2.2 times (int4) the speed of bfloat16 for one sequence
(`bench.py latency --quantize`, on two Zen 5 cores), for 0 and, with GPTQ, 0.1 % more perplexity
(`bench.py quality`). Does not know what the Linears are for. In this file N is output channels, K
input channels, G groups, R rows. Papers: Dettmers et al. 2022 (int8, arXiv:2208.07339), Frantar et
al. 2022 (GPTQ, arXiv:2210.17323; see gptq.py), Lin et al. 2023 (AWQ, arXiv:2306.00978). Read:
QuantLinear, round_to_nearest, load, then pack_linears and the packed forms. Next: speculative.py.
"""

import argparse
import json
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from model import (
    CheckpointError,
    Files,
    Transformer,
    load_config,
    load_model,
    named_tensors,
    progress,
    read_json,
)

# --- The stored form ------------------------------------------------------------------------------

MODES = {"int8": 8, "int4": 4}


class QuantLinear(nn.Module):
    """A Linear over quantised weights; x (..., K) -> (..., N), same dtype.

    Buffers: qweight (N, K * bits / 8) uint8, two 4-bit values in a byte, the first in the low half;
    scales (N, G) float32 and zeros (N, G) uint8, for G groups of equally many input channels.

    Example: bits 4, scale 0.5, zero 8: the byte 0xA7 is q = 7, 10, so w = -0.5, 1.0
    """

    def __init__(
        self, in_features: int, out_features: int, bits: int, group_size: int, bias: Tensor | None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.bits, self.group_size = bits, group_size
        N, G = out_features, in_features // group_size
        self.register_buffer("qweight", torch.empty(N, in_features * bits // 8, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(N, G, dtype=torch.float32))
        self.register_buffer("zeros", torch.empty(N, G, dtype=torch.uint8))
        self.register_buffer("bias", bias)
        self.parts: dict[str, int] = {}  # of a FusedLinear: name in the checkpoint -> its rows
        self.order: Tensor | None = None  # (K,): the channels of x, group by group (GPTQ desc_act)

    @classmethod
    def like(cls, linear: nn.Linear, bits: int, group_size: int) -> "QuantLinear":
        """Return an empty one in the place of a Linear, on its device."""
        with linear.weight.device:
            new = cls(linear.in_features, linear.out_features, bits, group_size, linear.bias)
        new.parts = getattr(linear, "parts", {})
        return new

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

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())


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
    if bits == 8:
        scales = torch.maximum(-low, high) / 127
        scales = scales.where(scales > 0, 1)
        return scales, torch.full_like(scales, 128)
    scales = (high - low) / 15
    scales = scales.where(scales > 0, 1)  # a group of zeros
    return scales, (-low / scales).round()


def quantize_model(
    model: Transformer, mode: str, group_size: int = 128, skip: tuple[str, ...] = ()
) -> Transformer:
    """Quantise a model's Linears in place, round to nearest, one after another.

    Args:
        mode: "int8" (one group for each output channel) or "int4".
        group_size: input channels per group, for int4.
        skip: names of Linears to leave alone, such as "lm_head".

    Raises:
        ValueError: the group size does not divide a Linear's input channels; nothing is changed.
    """
    bits, found = MODES[mode], [*linears(model, skip)]
    check_group_size(model, mode, group_size)
    for parent, name, _ in progress(found, f"quantising to {mode}"):
        linear = getattr(parent, name)
        size = linear.in_features if bits == 8 else group_size
        quantised = QuantLinear.like(linear, bits, size)
        quantised.store(*round_to_nearest(linear.weight, bits, size))
        setattr(parent, name, quantised)
        del linear  # and its weight, unless the embedding is tied to it
    return model


def check_group_size(model: Transformer, mode: str, group_size: int) -> None:
    """Raise ValueError where the group size does not fit, or no plain Linear is left."""
    widths = sorted({getattr(p, n).in_features for p, n, _ in linears(model)})
    if not widths:
        raise ValueError("this model is quantised already: start from the plain one")
    for K in widths if MODES[mode] == 4 else ():
        if group_size < 2 or group_size % 2 or K % group_size:
            raise ValueError(
                f"group size {group_size} does not divide {K} input channels evenly: "
                f"this model's Linears have {', '.join(map(str, widths))}; try 32 or 64"
            )


def linears(model: Transformer, skip: tuple[str, ...] = ()) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield each Linear as its parent, its name there, and its path."""
    for path, parent in [*model.named_modules()]:
        for name, child in [*parent.named_children()]:
            full = f"{path}.{name}".strip(".")
            if isinstance(child, nn.Linear) and full not in skip:
                yield parent, name, full


# --- Folders --------------------------------------------------------------------------------------


def load(
    path: Path | str,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    shard: Callable[[Transformer, Files], tuple[Transformer, Files]] | None = None,
) -> Transformer:
    """model.load_model, for quantised folders too: ours, GPTQ's (4 and 8 bits) and AWQ's (gemm).

    Theirs are converted while they are read, exactly: the same integers, scales and zero points.

    Args:
        shard: cuts the empty model and the files down to one rank's share; see tp.shard.

    Raises:
        CheckpointError: see load_model; or a quantization_config that is unknown or contradicts the
            files.
    """
    quantization = load_config(path).quantization
    if shard and quantization.get("quant_method", "kilolm") != "kilolm":
        raise CheckpointError(
            f"{path}: folders of other tools cannot be shared by ranks, only quantize.py's own"
        )

    def prepare(model: Transformer, files: Files) -> tuple[Transformer, Files]:
        model, files = shard(model, files) if shard else (model, files)
        return model, adapt(model, files, quantization) if quantization else files

    model = load_model(path, device, dtype, prepare)
    for module in model.modules():
        if isinstance(module, QuantLinear) and module.order is not None:
            module.order = module.order.to(device)
    return model


def adapt(model: Transformer, files: Files, quantization: dict[str, Any]) -> Files:
    """Swap QuantLinears into an empty model where the files hold quantised weights, and present
    the files as ours. See model.load_model's `prepare`.

    Raises:
        CheckpointError: an unknown quantization_config, or one that does not fit the model.
    """
    method = quantization.get("quant_method")
    bits = quantization.get("bits", quantization.get("w_bit"))
    size = quantization.get("group_size", quantization.get("q_group_size"))
    known = method in ("kilolm", "gptq", "awq") and type(bits) is type(size) is int
    if not known or bits not in (4, 8):
        raise CheckpointError(
            f"quantization_config: quant_method {method!r} with bits {bits!r} and group_size "
            f"{size!r} is not supported; supported: kilolm, gptq (4 and 8 bits), awq (4 bits)"
        )
    version = str(quantization.get("version", "gemm")).lower()
    if method == "awq" and (bits != 4 or version != "gemm"):
        raise CheckpointError("quantization_config: of awq, only 4 bits in version gemm")
    files = dict(files)
    for parent, name, path in [*linears(model)]:
        linear = getattr(parent, name)
        prefix = path.rpartition(".")[0]
        parts = [f"{prefix}.{part}" for part in getattr(linear, "parts", {})] or [path]
        if f"{parts[0]}.qweight" not in files:
            continue  # such as the lm_head of most
        group_size = linear.in_features if size == -1 else size
        if group_size < 2 or group_size % 2 or linear.in_features % group_size:
            raise CheckpointError(
                f"{path}: group_size {size} does not divide {linear.in_features} input channels"
            )
        quantised = QuantLinear.like(linear, bits, group_size)
        setattr(parent, name, quantised)
        if method != "kilolm":
            from gptq import adopt  # here: a tool beside the engine, which imports this file

            adopt(files, parts, quantised, quantization)
    return files


def save(model: Transformer, source: Path, out: Path, quantization: dict[str, Any]) -> None:
    """Write a quantised model as a folder, tokenizer and all. It appears whole or not at all.

    Raises:
        ValueError: `out` exists.
    """
    if out.exists():
        raise ValueError(f"{out} exists: choose another --out, or remove it")
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.absolute().parent))
    try:
        for file in source.iterdir():
            # The tokenizer's files and the like; never weights, in whatever format.
            if file.suffix in (".json", ".model", ".txt", ".jinja", ".md"):
                shutil.copy(file, work)
        (work / "model.safetensors.index.json").unlink(missing_ok=True)
        config = read_json(source / "config.json") | {"quantization_config": quantization}
        (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tensors = {
            name if name.startswith("lm_head") else f"model.{name}": tensor.cpu().contiguous()
            for name, tensor in named_tensors(model)
        }
        save_file(tensors, work / "model.safetensors", {"format": "pt"})
        work.chmod(0o755)  # mkdtemp's and safetensors' are for the user alone
        (work / "model.safetensors").chmod(0o644)
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


# --- Packed forms, for each device ----------------------------------------------------------------


def pack_linears(model: nn.Module) -> nn.Module:
    """Replace each Linear, plain or quantised, by its packed form, in place, before compiling: on
    a CPU all of them, on CUDA the int4 ones.

    Leaves alone what has no fast form on this processor, such as float16 on many, and int8 in
    groups or without VNNI: that is dequantised at each step.

    Memory peaks at one extra weight: the packed copy takes the plain one's place and serves every
    batch size. (Inductor's freezing packs too, but keeps a copy for each compiled graph.)

    Returns:
        The same model.
    """
    packable = {
        torch.float32: True,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    kinds, on_cpu = (nn.Linear, QuantLinear), all(t.is_cpu for t in model.state_dict().values())
    # The list holds parents only: a reference to a Linear would keep its plain weight alive.
    for module in [m for m in model.modules() if not isinstance(m, kinds)]:
        for name, child in module.named_children():
            form = None
            if isinstance(child, nn.Linear) and on_cpu and packable.get(child.weight.dtype):
                form = PackedLinear
            elif isinstance(child, QuantLinear) and on_cpu:
                per_byte = Int8Linear if Int8Linear.can_pack(child) else None
                form = BlockedLinear if child.bits == 4 else per_byte
            elif isinstance(child, QuantLinear) and TinyGemmLinear.can_pack(child):
                form = TinyGemmLinear
            if form:
                setattr(module, name, form(child))
            del child
    return model


class PackedLinear(nn.Module):
    """A Linear with its weight in oneDNN's blocked order; x (..., in) -> (..., out), same dtype.

    A packed tensor has no strides, so torch.compile cannot take it as an input: the compiled code
    calls a custom operator with a number, `key`, under which the operator finds this module. The
    number is a tensor, so that all blocks of a model compile to one and the same graph.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features = len(linear.weight)
        self.nbytes, self.bias = linear.weight.nbytes, linear.bias
        # 1 is a hint for the number of rows of x; the layout chosen is good for any.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)
        self.register_buffer("key", torch.tensor(len(_packed)), persistent=False)
        _packed.append(weakref.ref(self))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.kilolm.packed_linear(x, self.key, self.out_features)


class TinyGemmLinear(nn.Module):
    """int4 weights for PyTorch's own CUDA operator, which dequantises inside the product.

    It computes scale * (q - 8) + zero, and ours is scale * (q - z): so its zero is scale * (8 - z).
    bfloat16 alone; not yet run on a GPU by us.
    """

    def __init__(self, linear: QuantLinear) -> None:
        super().__init__()
        self.group_size, self.order, self.bias = linear.group_size, linear.order, linear.bias
        self.nbytes, q = linear.nbytes, linear.qweight
        swapped = q << 4 | q >> 4  # this operator has the first of two values in the high half
        # 8: tiles of 16 input channels that one thread keeps together, the most there is
        packed = torch.ops.aten._convert_weight_to_int4pack(swapped, 8)
        scales = torch.stack((linear.scales, linear.scales * (8 - linear.zeros.float())), -1)
        self.register_buffer("packed", packed)  # (N / 8, K / 128, 32, 4) int32
        self.register_buffer("scales", scales.transpose(0, 1).to(torch.bfloat16).contiguous())

    @staticmethod
    def can_pack(linear: QuantLinear) -> bool:
        fits = linear.out_features % 8 == 0 and linear.in_features % 128 == 0
        groups = linear.group_size in (32, 64, 128, 256)
        return linear.bits == 4 and fits and groups and linear.qweight.is_cuda

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.order is None else x[..., self.order]
        y = torch.ops.aten._weight_int4pack_mm(
            x.flatten(0, -2).to(torch.bfloat16), self.packed, self.group_size, self.scales
        )
        y = y if self.bias is None else y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], -1)


class Int8Linear(nn.Module):
    """int8 weights multiplied as integers, by oneDNN, with next to no loss to the activations.

    The processor multiplies bytes (VNNI, AMX), so each row of x becomes two bytes: with s = the
    row's largest value / 16256, x = s * (128 * high + low), to 15 bits below that largest value;
    bfloat16 has 8, of each value. Both digits go through one integer product as separate rows. For
    one token the second row is free, since reading the weights takes the time, half as much as in
    bfloat16; for many rows, twice the products at twice the speed cost what bfloat16 costs.

    Example: x = [1.0, -0.3], s = 1 / 16256: digits 127 | 0 and -38 | -13 (128 * -38 - 13 = -4877)
    """

    @staticmethod
    def can_pack(linear: QuantLinear) -> bool:
        """One scale for each output channel, symmetric, and a processor that multiplies bytes."""
        per_channel = linear.scales.shape[1] == 1 and bool((linear.zeros == 128).all())
        return per_channel and torch.cpu._is_vnni_supported()

    def __init__(self, linear: QuantLinear) -> None:
        super().__init__()
        self.out_features, self.nbytes, self.bias = linear.out_features, linear.nbytes, linear.bias
        signed = (linear.qweight.int() - linear.zeros.int()).to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(signed, [1, linear.in_features])
        self.scales = linear.scales[:, 0].contiguous()  # not buffers: .to(dtype) must not round it
        self.zeros = torch.zeros(self.out_features, dtype=torch.int64)
        self.order = linear.order
        self.register_buffer("key", torch.tensor(len(_packed)), persistent=False)
        _packed.append(weakref.ref(self))

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.order is None else x[..., self.order]
        rows = x.flatten(0, -2).float()  # (R, K)
        s = rows.abs().amax(-1, keepdim=True).clamp(min=1e-30) / (127 * 128)
        digits = (rows / s).round()
        high = (digits / 128).round()
        pair = torch.cat((high, digits - 128 * high)) + 128  # (2R, K), in 1..255
        y = torch.ops.kilolm.int8_linear(pair.to(torch.uint8), self.key, self.out_features)
        high, low = y.chunk(2)  # (R, N) each
        y = ((128 * high + low) * s).to(x.dtype)
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], self.out_features)


def materialize(x: Tensor) -> Tensor:
    """x as a flat float32 tensor that torch.compile computes once. It would otherwise fuse what
    made x (a norm, an activation) into the product, and compute that anew for each output."""
    return x.float().contiguous().as_strided((x.numel(),), (1,))


class BlockedLinear(nn.Module):
    """int4 weights in blocks of 32 output channels, for code that torch.compile generates.

    A vector register holds 32 outputs, and the loop runs down the input channels with x[k] in every
    lane, so nothing is added up across lanes, and the bytes lie in the order in which they are
    read. For one row that is faster than PyTorch's own int4 operator (22 against 19 GB/s, where the
    limit was 35, on two Zen 5 cores). For more rows, pieces of the weight that fit the processor's
    cache are dequantised and multiplied as they are in bfloat16.
    """

    LANES = 32

    def __init__(self, linear: QuantLinear) -> None:
        super().__init__()
        self.out_features = linear.out_features
        self.nbytes, self.bias, self.order = linear.nbytes, linear.bias, linear.order
        N, G = linear.scales.shape

        def blocked(t: Tensor) -> Tensor:  # (N, ...) -> (blocks, ..., LANES), zeros at the end
            t = F.pad(t, (0, 0, 0, -N % self.LANES))
            return t.unflatten(0, (-1, self.LANES)).movedim(1, -1).contiguous()

        # A byte now holds channels j and j + half of a group, not neighbours.
        q = unpack_bits(linear.qweight, 4).view(N, G, 2, -1).transpose(2, 3)
        q = pack_bits(q.flatten(1), 4)
        # (blocks, G, bytes of a group, LANES), and (blocks, G, LANES) twice
        self.register_buffer("qweight", blocked(q).unflatten(1, (G, -1)))
        self.scales, self.zeros = blocked(linear.scales), blocked(linear.zeros.float())

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.order is None else x[..., self.order]
        if x.shape[:-1].numel() == 1:
            y = self.one_row(x).to(x.dtype)
        else:
            y = torch.ops.kilolm.blocked_linear(x, self.qweight, self.scales, self.zeros)
        y = y[..., : self.out_features].view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def one_row(self, x: Tensor) -> Tensor:
        """x (1, ..., K) -> (N,) float32. Of a byte b = low + 16 * high, b itself and high are cheap
        to get: low * x0 + high * x1 = b * x0 + high * (x1 - 16 * x0)."""
        G, b = self.scales.shape[1], self.qweight.float()  # (blocks, G, bytes, LANES)
        groups = materialize(x).view(G, -1)
        x0, x1 = groups.view(G, 2, -1, 1).unbind(1)  # (G, bytes, 1) each
        x1 = materialize(x1 - 16 * x0).view_as(x0)
        sums = (b * x0 + (b * 0.0625).floor() * x1).sum(2)  # (blocks, G, LANES)
        offset = groups.sum(1, keepdim=True)  # (G, 1)
        return (self.scales * (sums - self.zeros * offset)).sum(1).flatten()


def blocked_linear(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Dequantise 512 output channels, multiply, and go on to the next.

    Args:
        x: (..., K), its dtype that of the product.
        qweight, scales, zeros: see BlockedLinear.

    Returns:
        (..., blocks * LANES).
    """
    weights = [*zip(*(t.split(16) for t in (qweight, scales, zeros)))]
    # One piece at a time: the memory of the last is used again while it is in the cache.
    dequantize = _compiled(dequantize_blocks)
    parts = (dequantize(*weight, x.dtype).view(x.shape[-1], -1) for weight in weights)
    rows = x.reshape(-1, x.shape[-1])  # as 3-D it could become a bmm over copies of each piece
    return torch.cat([rows @ part for part in parts], -1).view(*x.shape[:-1], -1)


def dequantize_blocks(q: Tensor, scales: Tensor, zeros: Tensor, dtype: torch.dtype) -> Tensor:
    """(blocks, G, bytes, LANES) -> (G, 2, bytes, blocks, LANES), which is (K, N)."""
    q = q.float()
    high = (q * 0.0625).floor()
    halves = [
        (scales[:, :, None] * (half - zeros[:, :, None])).to(dtype).permute(1, 2, 0, 3)
        for half in (q - 16 * high, high)
    ]
    return torch.stack(halves, 1).contiguous()


_compiled = cache(torch.compile)  # made when it is first called: torch.compile takes 2 s to import


_packed: list[weakref.ref] = []  # key -> PackedLinear or Int8Linear; weak, so it can be freed


def _packed_linear(x: Tensor, key: Tensor, out_features: int) -> Tensor:
    module, rows = _packed[int(key)](), x.flatten(0, -2)
    y = torch.ops.mkldnn._linear_pointwise(
        _at_least(5, rows), module.packed, module.bias, "none", [], ""
    )
    return y[: len(rows)].view(*x.shape[:-1], out_features)


def _int8_linear(x: Tensor, key: Tensor, out_features: int) -> Tensor:
    module = _packed[int(key)]()
    y = torch.ops.onednn.qlinear_pointwise(
        _at_least(6, x), 1.0, 128, module.packed, module.scales, module.zeros, None, 1.0, 0,
        torch.float32, "none", [], "",
    )  # fmt: skip
    return y[: len(x)]


def _at_least(count: int, rows: Tensor) -> Tensor:
    """Add rows of zeros: oneDNN's code for one or two rows reads the weights more slowly than that
    for five (25 against 31 GB/s, where the limit was 35, on two Zen 5 cores)."""
    return rows if len(rows) >= count else F.pad(rows, (0, 0, 0, count - len(rows)))


def _empty(x: Tensor, key: Tensor, out_features: int, dtype: torch.dtype | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features), dtype=dtype or x.dtype)


# A plain Library: the wrapper of torch.library.custom_op costs 8 us a call, this one 3 to 5, and a
# step makes four calls a layer.
_library = torch.library.Library("kilolm", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor key, int out_features) -> Tensor")
_library.define("int8_linear(Tensor x, Tensor key, int out_features) -> Tensor")
_library.define("blocked_linear(Tensor x, Tensor q, Tensor scales, Tensor zeros) -> Tensor")
_library.impl("packed_linear", _packed_linear, "CPU")
_library.impl("int8_linear", _int8_linear, "CPU")
_library.impl("blocked_linear", blocked_linear, "CPU")
_fake = partial(torch.library.register_fake, lib=_library)
_fake("kilolm::packed_linear", _empty)
_fake("kilolm::int8_linear", partial(_empty, dtype=torch.float32))
_fake("kilolm::blocked_linear", lambda x, q, *_: _empty(x, x, q.shape[0] * q.shape[3]))


# --- The command line -----------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="quantize.py", description="Quantise a checkpoint.")
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="Hugging Face folder")
    add("--mode", choices=MODES, required=True)
    add("--group-size", type=int, default=128, help="input channels per scale, for int4 (128)")
    add("--method", choices=("rtn", "gptq"), default="rtn", help="gptq: needs --calibrate")
    add("--calibrate", type=Path, metavar="FILE", help="text like the model's future input")
    add("--keep-lm-head", action="store_true", help="leave lm_head as it is")
    add("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args(argv)
    try:
        if args.out.exists():
            raise ValueError(f"{args.out} exists: choose another --out, or remove it")
        if not args.out.absolute().parent.is_dir():
            raise ValueError(f"{args.out.parent} is no folder to write {args.out.name} into")
        model = load(args.checkpoint)
        skip = ("lm_head",) if args.keep_lm_head else ()
        if args.method == "gptq":
            from gptq import calibrate
            from tokenizer import Tokenizer

            if not args.calibrate:
                raise ValueError("--method gptq needs --calibrate FILE: text to calibrate with")
            ids = Tokenizer(args.checkpoint).encode(args.calibrate.read_text(encoding="utf-8"))
            calibrate(model, ids, args.mode, args.group_size, skip)
        else:
            quantize_model(model, args.mode, args.group_size, skip)
        size = args.group_size if args.mode == "int4" else -1
        quantization = {"quant_method": "kilolm", "bits": MODES[args.mode], "group_size": size}
        save(model, args.checkpoint, args.out, quantization)
    except (ValueError, OSError) as error:
        print(f"quantize.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.modules["quantize"] = sys.modules[__name__]  # gptq.py imports it: not a second time
    sys.exit(main())
