"""Read the folders that GPTQ and AWQ tools write: each stored tensor as ours, worked out while it
is read.

Both store integers q with scales and zero points, as we do, but packed into 32-bit words and turned
around: inputs down, outputs across, (K, N) where ours is (N, K). GPTQ packs along the inputs, the
lowest bits first, and (but in gptq_v2) its zero points less one; with desc_act, g_idx says to which
group an input belongs. AWQ packs along the outputs, in the order 0 2 4 6 1 3 5 7. Nothing is
rounded: the same integers, scales and zero points come out. quantize.load calls this file and this
file knows nothing of that one. N is output channels, K input channels, G groups. Papers: Frantar et
al. 2022 (GPTQ, arXiv:2210.17323), Lin et al. 2023 (AWQ, arXiv:2306.00978). Read: ours, converted.

    GPTQ, 4 bits    qweight[0, n] = 0x87654321      output n; inputs 0..7 are 1, 2, ... 8
    AWQ             qweight[k, 0] = 0x75316420      input k; outputs 0..7 are 0, 1, ... 7
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from model import Files, Stored, Transformer, check, supported

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # at which place of a word output n stands


def ours(
    files: Files, model: Transformer, settings: dict[str, Any], orders: dict[str, Tensor]
) -> Files:
    """Present the files of a GPTQ or AWQ folder as those of one of our own.

    Args:
        files: see model.locate_tensors.
        model: what they are for, on the meta device.
        settings: quantization_config; gets our names, bits and group_size, for whatever it has.
        orders: is filled, for Linears whose groups are not of neighbours, with (K,) int64: at place
            i the input channel that our i-th is.

    Returns:
        The files, with qweight, scales and zeros as quantize.QuantLinear has them.

    Raises:
        ValueError: another tool, version or number of bits; a tensor that is missing or has a wrong
            shape or dtype; groups that are not equally large.
    """
    method = supported("quant_method", settings.get("quant_method"), "kilolm", "gptq", "awq")
    for name, old in (("bits", "w_bit"), ("group_size", "q_group_size")):
        settings[name] = check(name, settings.get(name, settings.get(old)), int, -1)
    if method == "awq":
        supported("version", str(settings.get("version", "gemm")).lower(), "gemm")
    supported("bits", settings["bits"], *((4,) if method == "awq" else (4, 8)))
    form = settings.get("checkpoint_format") or "gptq"
    form = supported("checkpoint_format", form, "gptq", "gptq_v2") if method == "gptq" else method
    files, firsts = dict(files), {}
    for part, linear, N in parts_of(model):
        if f"{part}.qweight" in files:  # unlike the lm_head of most
            bias = files.get(f"{part}.bias")
            if bias and linear.bias is None and not bias.read().any():
                del files[f"{part}.bias"]  # some tools write biases of zero
            new, order = converted(files, part, (N, linear.in_features), settings, form)
            files |= new
            first = firsts.setdefault(linear, order)  # of what is stacked into one
            if (first is None) != (order is None) or not (order is None or order.equal(first)):
                raise ValueError(f"{part}: what it is stacked with differs in its g_idx")
            if order is not None:
                orders[part] = order
    return files


def parts_of(model: Transformer) -> Iterator[tuple[str, nn.Linear, int]]:
    """Yield, for each Linear that a file names: the name, the Linear that it is or is stacked into,
    and its output channels."""
    for path, linear in model.named_modules():
        if isinstance(linear, nn.Linear):
            above, _, name = path.rpartition(".")
            for part, N in getattr(linear, "parts", {name: linear.out_features}).items():
                yield f"{above}.{part}".strip("."), linear, N


def converted(
    files: Files, part: str, shape: tuple[int, int], settings: dict[str, Any], form: str
) -> tuple[Files, Tensor | None]:
    """Take one Linear's tensors out of `files`.

    Args:
        part: the Linear's name, less `.qweight`.
        shape: (N, K), of its weight.
        form: "gptq" (zero points less one), "gptq_v2" (as they are) or "awq".

    Returns:
        qweight, scales and zeros as ours; and the order of its inputs, None where it is 0, 1, 2 ...

    Raises:
        ValueError: see ours.
    """
    (N, K), bits, awq = shape, settings["bits"], form == "awq"
    size, per = K if settings["group_size"] == -1 else settings["group_size"], 32 // bits
    if size < 1 or K % size:
        raise ValueError(f"{part}: group_size {size} does not divide {K} input channels")
    if N % per or K % per:
        raise ValueError(f"{part}: {N} and {K} channels do not fill words of {per}")
    G = K // size
    shapes = {
        "qweight": (K, N // per) if awq else (K // per, N), "qzeros": (G, N // per),
        "scales": (G, N), "g_idx": (K,),
    }  # fmt: skip
    stored: Files = {}
    for name in shapes:
        at = files.pop(f"{part}.{name}", None) if name != "g_idx" or not awq else None
        if at is None and name != "g_idx":
            raise ValueError(f"{part}: no {name}")
        if at and at.shape != shapes[name]:
            raise ValueError(f"{part}.{name} is {at.shape}, should be {shapes[name]}")
        if at and at.kind not in {"scales": ("float",), "g_idx": ("I32", "I64")}.get(
            name, ("I32",)
        ):
            raise ValueError(f"{part}.{name} holds {at.kind}")
        stored[name] = at
    order = None
    if stored["g_idx"]:
        groups = stored["g_idx"].read().long()
        inside = groups.min() >= 0 and groups.max() < G
        if not inside or (groups.bincount(minlength=G) != size).any():
            raise ValueError(f"{part}.g_idx: not {G} groups of {size} channels")
        order = groups.argsort(stable=True)
        order = None if torch.equal(order, torch.arange(K)) else order
    shifts = torch.tensor(AWQ_PLACES) * 4 if awq else torch.arange(0, 32, bits)

    def unpacked(name: str, dim: int) -> Tensor:
        """int32 words -> the values in them, along `dim`."""
        words = stored[name].read().unsqueeze(dim + 1)
        values = (words >> shifts.view(-1, *[1] * (1 - dim))) & (2**bits - 1)
        return values.flatten(dim, dim + 1)

    def qweight() -> Tensor:
        q = unpacked("qweight", 1 if awq else 0)  # (K, N)
        q = (q if order is None else q[order]).t().to(torch.uint8)  # (N, K)
        return q.contiguous() if bits == 8 else q[:, ::2] | q[:, 1::2] << 4

    def zeros() -> Tensor:
        # A zero point of 0, less one, is all ones: it wraps around within its bits.
        z = (unpacked("qzeros", 1) + (form == "gptq")) & (2**bits - 1)  # (G, N)
        return z.t().to(torch.uint8)

    new = {
        "qweight": Stored((N, K * bits // 8), "U8", qweight),
        "scales": Stored((N, G), "float", lambda: stored["scales"].read().t().float()),
        "zeros": Stored((N, G), "U8", zeros),
    }
    return {f"{part}.{name}": tensor for name, tensor in new.items()}, order
