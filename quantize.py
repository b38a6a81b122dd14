"""Fewer bits for a model's weights: how they are rounded, and how they are stored.

Decoding reads every weight once per token, so its speed is the speed of reading them: int8 halves
the bytes of bfloat16, int4 takes a little over a quarter. A weight becomes an integer q with a
scale and a zero point for each group of input channels: w = scale * (q - zero). Only weights of
Linears are quantised; embeddings, norms and activations stay as they are.

    python generate.py --checkpoint DIR --quantize int8                     on the fly
    python tools/convert.py --checkpoint DIR --mode int4 --out DIR2         or once, as a folder

QuantLinear is the stored form and the oracle: it dequantises and multiplies. packed.py lays it out
so that a processor multiplies it fast, when a model is compiled. Does not know what the Linears are
for. In this file N is output channels, K input channels, G groups. Papers: Dettmers et al. 2022
(int8, arXiv:2208.07339), Frantar et al. 2022 (GPTQ, arXiv:2210.17323; see tools/convert.py), Lin et
al. 2023 (AWQ, arXiv:2306.00978). checkpoint.py reads them from a
folder. Read: QuantLinear, round_to_nearest, quantize_model.
"""

import torch
from torch import Tensor, nn

from model import Transformer
from settings import progress, supported

# --- The stored form ------------------------------------------------------------------------------

MODES = dict(int8=8, int4=4)


class QuantLinear(nn.Module):
    """A Linear over quantised weights; x (..., K) -> (..., N), same dtype.

    Buffers: qweight (N, K * bits / 8) uint8, two 4-bit values in a byte, the first in the low half;
    scales (N, G) float32 and zeros (N, G) uint8, for G groups of equally many input channels.

    Example: bits 4, scale 0.5, zero 8: the byte 0xA7 is q = 7, 10, so w = -0.5, 1.0
    """

    def __init__(self, linear: nn.Linear, bits: int, group_size: int) -> None:
        """Make an empty one in the place of a Linear, on its device. Raises: see num_groups."""
        super().__init__()
        N, K = self.out_features, self.in_features = linear.weight.shape
        G = num_groups(K, group_size)
        self.bits = supported("bits", bits, *MODES.values())
        self.group_size = K // G
        with linear.weight.device:
            self.register_buffer("qweight", torch.empty(N, K * bits // 8, dtype=torch.uint8))
            self.register_buffer("scales", torch.empty(N, G))
            self.register_buffer("zeros", torch.empty(N, G, dtype=torch.uint8))
        self.bias = linear.bias
        self.parts = getattr(linear, "parts", {})  # of a FusedLinear: name -> its rows

    def store(self, q: Tensor, scales: Tensor, zeros: Tensor) -> None:
        """Take q (N, K), scales (N, G) and zeros (N, G)."""
        self.qweight = pack_bits(q, self.bits)
        self.scales = scales.float()
        self.zeros = zeros.byte()

    def dequantize(self) -> Tensor:
        """Return the weight that this one stands for: (N, K) float32."""
        q = unpack_bits(self.qweight, self.bits).unflatten(1, (-1, self.group_size))
        return (self.scales[..., None] * (q.float() - self.zeros[..., None])).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.dequantize().to(x.dtype), self.bias)


def num_groups(K: int, group_size: int) -> int:
    """How many groups K input channels make. A group_size of -1 is one group of all.

    Raises:
        ValueError: it does not divide them, or is odd (two 4-bit values share a byte).
    """
    size = K if group_size == -1 else group_size
    if size < 2 or size % 2 or K % size:
        # Under torchrun K is that of a rank.
        raise ValueError(f"group_size {size} does not divide {K} input channels here: try {K & -K}")
    return K // size


def pack_bits(q: Tensor, bits: int) -> Tensor:
    """(N, K) integers -> (N, K * bits / 8) bytes."""
    q = q.byte()
    return q if bits == 8 else q[:, ::2] | q[:, 1::2] << 4


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """The inverse of pack_bits."""
    return packed if bits == 8 else torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


# --- Rounding -------------------------------------------------------------------------------------


def round_to_nearest(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise a weight (N, K), each value for itself. 8 bits: symmetric; 4 bits: from the least to
    the largest value of each group.

    Returns:
        q (N, K), scales (N, G), zeros (N, G).

    Example: bits 4, one group [-1.0, 0.0, 2.0]: scale 0.2, zero 5, q = 0, 5, 15
    """
    w = weight.float().unflatten(1, (-1, group_size))  # (N, G, group_size)
    scales, zeros = group_scales(w, bits)
    q = w / scales[..., None] + zeros[..., None]
    return q.round().clamp(0, 2**bits - 1).flatten(1), scales, zeros


def group_scales(w: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each group: w (..., group_size) -> (...), (...)."""
    low, high = w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)  # zero stays exact
    scales = torch.maximum(-low, high) / 127 if bits == 8 else (high - low) / 15
    scales = scales.where(scales > 0, 1)  # a group of zeros
    return scales, torch.full_like(scales, 128) if bits == 8 else (-low / scales).round()


def quantize_model(
    model: Transformer, mode: str, group_size: int = 128, skip: tuple = ()
) -> Transformer:
    """Quantise a model's Linears in place, round to nearest, one after another.

    Args:
        mode: "int8" (one group for each output channel) or "int4".
        group_size: input channels per group, for int4.
        skip: names of Linears to leave alone, such as "lm_head".

    Raises:
        ValueError: see plain_linears; nothing is changed.
    """
    size = -1 if mode == "int8" else group_size
    for path in progress(plain_linears(model, size, skip), f"quantising to {mode}"):
        linear = model.get_submodule(path)
        quantised = QuantLinear(linear, MODES[mode], size)
        quantised.store(*round_to_nearest(linear.weight, MODES[mode], quantised.group_size))
        model.set_submodule(path, quantised)
    return model


def plain_linears(model: Transformer, group_size: int, skip: tuple = ()) -> list[str]:
    """The paths of the Linears that are to be quantised, see linears().

    Raises:
        ValueError: some are quantised already, or the group size does not fit one of them.
    """
    if any(isinstance(module, QuantLinear) for module in model.modules()):
        raise ValueError("this model is quantised already: start from the plain one")
    found = [path for path in linears(model) if path not in skip]
    for path in found:
        num_groups(model.get_submodule(path).in_features, group_size)
    return found


def linears(model: nn.Module) -> list[str]:
    """The path of each Linear, except routers: they are small, and an error in one sends a token to
    another expert. Paths, as a list of the Linears would keep every plain weight alive."""
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and not path.endswith(".gate")
    ]
