"""Fewer bits for a model's weights: how they are rounded, and how they are stored.

Decoding reads every weight once per token, so its speed is the speed of reading the weights. int8
halves the bytes of bfloat16, and int4 takes a little over a quarter. A weight w becomes an integer
q, which stands for scale * (q - zero). Each output channel has a scale and a zero point for each
group of its input channels. Only the weights of Linears are quantised. Embeddings, norms and
activations stay as they are.

    python generate.py --checkpoint DIR --quantize int8                     on the fly
    python tools/convert.py --checkpoint DIR --mode int4 --out DIR2         or once, as a folder

QuantLinear is the stored form and the oracle of the tests: it dequantises and multiplies. On a CPU,
and in a compiled model on any device, around/fast replaces it by a form that the device multiplies
fast, where there is one. around/folder reads QuantLinears from a folder. All that this file knows
of a Linear's purpose is that routers stay as they are, and that a tied lm_head keeps 8 bits.

In shapes here N is output channels, K input channels, G groups. Papers: Dettmers et al. 2022 (int8,
arXiv:2208.07339), Frantar et al. 2022 (GPTQ, arXiv:2210.17323; see tools/convert.py), Lin et al.
2023 (AWQ, arXiv:2306.00978). Read: QuantLinear, round_to_nearest, quantize_model.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from around.machine import progress
from around.settings import supported
from model import Transformer

# --- The stored form ------------------------------------------------------------------------------

MODES = dict(int8=8, int4=4)  # mode -> bits


class QuantLinear(nn.Module):
    """A Linear with quantised weights: x (..., K) -> (..., N) of the same dtype.

    The input channels form G groups of equal size.

    Attributes:
        qweight: (N, K * bits / 8) uint8. A byte holds two 4-bit values, the first in its low half.
        scales: (N, G) float32.
        zeros: (N, G) uint8.

    Example: bits 4, scale 0.5, zero 8: the byte 0xA7 is q = 7, 10, so w = -0.5, 1.0
    """

    def __init__(self, linear: nn.Linear, bits: int, group_size: int) -> None:
        """Make an empty one with a Linear's shape and bias, on its device.

        Raises:
            ValueError: bits is neither 4 nor 8, or the group size does not fit; see num_groups.
        """
        super().__init__()
        self.out_features = N = linear.out_features
        self.in_features = K = linear.in_features
        G = num_groups(K, group_size)
        self.bits = supported("bits", bits, *MODES.values())
        self.group_size = K // G
        with linear.weight.device:
            self.register_buffer("qweight", torch.empty(N, K * bits // 8, dtype=torch.uint8))
            self.register_buffer("scales", torch.empty(N, G))
            self.register_buffer("zeros", torch.empty(N, G, dtype=torch.uint8))
        self.bias = linear.bias
        self.parts = getattr(linear, "parts", {})  # see model.FusedLinear

    def store(self, q: Tensor, scales: Tensor, zeros: Tensor) -> None:
        """Keep quantised weights: q (N, K), scales (N, G) and zeros (N, G), of any dtype."""
        self.qweight = pack_bits(q, self.bits)
        self.scales = scales.float()
        self.zeros = zeros.byte()

    def dequantize(self) -> Tensor:
        """Return scale * (q - zero), (N, K) float32."""
        q = unpack_bits(self.qweight, self.bits)  # (N, K)
        q = q.unflatten(1, (-1, self.group_size)).float()  # (N, G, K / G)
        w = self.scales[..., None] * (q - self.zeros[..., None])
        return w.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.dequantize().to(x.dtype), self.bias)


def num_groups(K: int, group_size: int) -> int:
    """Return how many groups K input channels make. A group_size of -1 means one group of all.

    Raises:
        ValueError: the size does not divide K, or is odd (two 4-bit values share a byte).
    """
    size = K if group_size == -1 else group_size
    if size < 2 or size % 2 or K % size:
        raise ValueError(
            f"group_size {size} does not divide {K} input channels (under torchrun, one rank's "
            "share of them) into groups of even size"
        )
    return K // size


def pack_bits(q: Tensor, bits: int) -> Tensor:
    """Pack (N, K) integers into (N, K * bits / 8) bytes.

    Example: bits 4: [[7, 10]] -> [[0xA7]]
    """
    q = q.byte()
    if bits == 8:
        return q
    return q[:, ::2] | q[:, 1::2] << 4


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """Undo pack_bits: (N, K * bits / 8) bytes -> (N, K) uint8."""
    if bits == 8:
        return packed
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


# --- Rounding -------------------------------------------------------------------------------------


def round_to_nearest(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise a weight (N, K), each value to the nearest step of its group.

    Args:
        group_size: input channels in a group, never -1.

    Returns:
        q (N, K), scales (N, G), zeros (N, G), all float32.

    Example: bits 4, one group [-1.0, 0.0, 2.0]: scale 0.2, zero 5, q = 0, 5, 15
    """
    w = weight.float().unflatten(1, (-1, group_size))  # (N, G, group_size)
    scales, zeros = group_scales(w, bits)
    q = (w / scales[..., None] + zeros[..., None]).round()
    return q.clamp(0, 2**bits - 1).flatten(1), scales, zeros


def group_scales(w: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Choose each group's scale and zero point: w (..., group_size) -> scales (...), zeros (...).

    With 8 bits the range is symmetric around 0, and the zero point is 128. With 4 bits the range
    goes from the smallest value of the group to the largest, and always includes 0.
    """
    low = w.amin(-1).clamp(max=0)
    high = w.amax(-1).clamp(min=0)
    scales = torch.maximum(-low, high) / 127 if bits == 8 else (high - low) / 15
    scales = scales.where(scales > 0, 1)  # it is 0 if all weights of the group are 0
    zeros = torch.full_like(scales, 128) if bits == 8 else (-low / scales).round()
    return scales, zeros


def usual_group_size(model: Transformer) -> int:
    """Return the largest of 128, 64 and 32 that divides the input channels of all Linears; if none
    does, 128, which plain_linears will refuse."""
    size = math.gcd(128, *linears(model).values())
    return size if size >= 32 else 128


def quantize_model(
    model: Transformer, mode: str, group_size: int | None = None, skip: tuple = ()
) -> Transformer:
    """Quantise a model's Linears in place, one after another, by rounding to nearest.

    Args:
        mode: "int8", which has one group per output channel; or "int4", in which a tied lm_head
            gets 8 bits.
        group_size: input channels per group, for int4; None: see usual_group_size.
        skip: names of Linears to leave as they are, such as "lm_head".

    Raises:
        ValueError: see plain_linears. The model has not been changed then.
    """
    if mode == "int8":
        group_size = -1
    elif group_size is None:
        group_size = usual_group_size(model)
    for path in progress(plain_linears(model, group_size, skip), f"quantising to {mode}"):
        linear: Any = model.get_submodule(path)
        if path == "lm_head" and model.config.tie_word_embeddings:
            # A tied lm_head is the embedding too, and no matrix suffers more from 4 bits. The
            # embedding itself stays plain.
            quantised = QuantLinear(linear, 8, -1)
        else:
            quantised = QuantLinear(linear, MODES[mode], group_size)
        quantised.store(*round_to_nearest(linear.weight, quantised.bits, quantised.group_size))
        model.set_submodule(path, quantised)
    return model


def plain_linears(model: Transformer, group_size: int, skip: tuple) -> dict[str, int]:
    """Return the Linears to quantise: those of linears() that are not in `skip`.

    Raises:
        ValueError: the model is quantised already, or the group size does not fit a Linear.
    """
    if any(isinstance(module, QuantLinear) for module in model.modules()):
        raise ValueError("this model is quantised already: start from the plain one")
    found = {path: K for path, K in linears(model).items() if path not in skip}
    for K in found.values():
        num_groups(K, group_size)  # called only to raise its error
    return found


def linears(model: nn.Module) -> dict[str, int]:
    """Return the path of each Linear that is not a router, with its number of input channels.

    Routers are small, and a rounding error in one sends a token to another expert. The result has
    paths because a list of Linears would keep every plain weight alive.
    """
    return {
        path: module.in_features
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and not path.endswith(".gate")
    }
