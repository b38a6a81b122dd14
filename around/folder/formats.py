"""How the tensors of GPTQ's and AWQ's folders become those of this engine's own format.

Both tools store integers q with scales and zero points, as quantize.py does. But they pack q and
the zero points into 32-bit words and transpose all three: (K, N) where quantize.py has (N, K). N is
the number of output channels, K of input channels, G of groups. GPTQ packs q along the inputs and
zero points along the outputs; a word's lowest bits hold its first value. It stores each zero point
less one; the newer format gptq_v2 does not. AWQ packs both along the outputs, from a word's lowest
bits on in the order 0 2 4 6 1 3 5 7. The conversion rounds nothing.

    GPTQ, 4 bits    qweight[0, n] = 0x87654321      output n: q of inputs 0..7 is 1, 2, ... 8
    AWQ             qweight[k, 0] = 0x75316420      input k: q of outputs 0..7 is 0, 1, ... 7

This file knows neither the model nor how a file stores tensors. Papers: Frantar et al. 2022 (GPTQ,
arXiv:2210.17323), Lin et al. 2023 (AWQ, arXiv:2306.00978). Read: convert.
"""

from collections.abc import Callable, Container

import torch
from torch import Tensor

from around.settings import JSON, blame, check, choose, supported
from quantize import pack_bits

# For each tool, the versions of its format that are read. Where none is named, the first counts.
VERSIONS = dict(gptq=("gptq", "gptq_v2"), awq=("awq", "gemm", "GEMM"))
# For each tool and number of bits: where a word holds its values 0, 1, 2, ... Place 0 is its lowest
# bits. In AWQ's word above, output 1 has place 4.
PLACES: JSON = dict(gptq={4: range(8), 8: range(4)}, awq={4: (0, 4, 1, 5, 2, 6, 3, 7)})


def convert(files: dict, config: JSON, wanted: Container[str]) -> None:
    """Convert the stored tensors of a GPTQ or AWQ folder to this engine's format, in place.

    Each tensor is converted by itself. One that is missing, or has a wrong size or dtype, is
    missing or wrong in the result too, and weights.check_tensors reports it.

    Args:
        files: see weights.locate_tensors. Their qweight, scales and zeros become those of
            quantize.QuantLinear.
        config: see conversions.
        wanted: the names of the model's tensors while all its Linears are still plain.

    Raises:
        ValueError: see conversions and check_order.
    """
    changes = conversions(config)
    for name, stored in [*files.items()]:
        kind = name.rpartition(".")[2]
        with blame(name):
            is_int32 = stored.empty.dtype == torch.int32  # no other word can be unpacked
            if kind == "scales" or (is_int32 and kind in changes):
                files[name] = stored.changed(changes[kind])
            elif kind == "g_idx":
                check_order(files.pop(name).read(), config["group_size"])
            elif name not in wanted and not stored.read().any():
                del files[name]  # a bias of zeros, which some tools add where the model has none


def conversions(config: JSON) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the functions that convert qweight, zeros and scales, under these names.

    Args:
        config: the settings of quantised weights.

    Raises:
        ValueError: the tool, its version or the number of bits is not supported.
    """
    method = supported("quant_method", config.get("quant_method"), *VERSIONS)
    version = (
        config.get("checkpoint_format") or config.get("format") or config.get("version", method)
    )
    supported("checkpoint_format, format or version", version, *VERSIONS[method])
    bits = config.get("bits", 0)
    check("group_size", config.get("group_size"), int, -1)
    places = choose("bits", bits, PLACES[method])
    mask = 2**bits - 1

    def unpack(words: Tensor) -> Tensor:
        """Unpack what is packed along the outputs: (K or G, N * bits / 32) -> (N, K or G)."""
        columns = words.t()  # (N * bits / 32, K or G)
        values = [(columns >> bits * place) & mask for place in places]
        return torch.stack(values, 1).flatten(0, 1)

    def qweight(words: Tensor) -> Tensor:
        if method == "gptq":  # an output's words, one after another, have our order of bytes
            return words.t().contiguous().view(torch.uint8)  # (N, K * bits / 8)
        return pack_bits(unpack(words), bits)

    def zeros(words: Tensor) -> Tensor:
        values = unpack(words)
        if version == "gptq":  # it stores zero - 1, and a zero of 0 as the largest value
            values = (values + 1) & mask
        return values.byte()

    return dict(qweight=qweight, zeros=zeros, scales=Tensor.t)


def check_order(groups: Tensor, group_size: int) -> None:
    """Refuse a weight whose inputs were sorted before they were grouped, which GPTQ does under
    desc_act. Then the inputs of a group are not neighbours. Refuse other groups, too, which
    GPTQModel's rules, `dynamic`, give to some Linears. (Other bits show in the shape.)

    Args:
        groups: (K,) the group of each input.
    """
    size = group_size if group_size > 0 else len(groups)
    if (groups != torch.arange(len(groups)) // size).any():
        raise ValueError(
            "the inputs are not in their groups' order (desc_act), or groups differ (dynamic)"
        )
