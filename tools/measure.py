"""The machine's limits, without which a speed means little: bandwidth, peak GEMM, memory.

Decoding one token reads every weight once, so its limit is read bandwidth; a prompt multiplies
matrices, so its limit is the GEMM peak (the two sides of the roofline, Williams et al. 2009).
bench.py takes both in turn with what it measures, and reports each speed beside its limit.
"""

import resource
import statistics
import sys
import time
from collections.abc import Callable

import torch

from around.fast.packed import HalfLinear, Int4Linear, Int8Linear, PackedLinear, form_of
from experts import SparseMLP
from model import Transformer


def bytes_per_step(model: Transformer, length: int, batch: int = 1) -> int:
    """Count the bytes that decoding one token of each of `batch` sequences must read: every weight
    but the embedding table (each sequence reads one row of it), plus the keys and values of
    `length` earlier positions of each sequence, in the model's dtype.

    It counts as many experts as the tokens choose together, if each chooses k of E and all are
    equally likely: E * (1 - (1 - k / E) ** batch). E = 64, k = 8: 8 for one token, 63.1 for 32.
    """
    c = model.config
    chosen = 1 - (1 - c.num_experts_per_tok / c.num_experts) ** batch
    weights = -model.embed_tokens.weight.nbytes  # tied, it is counted again as lm_head
    for name, module in model.named_modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        size = sum(tensor.nbytes for tensor in own)
        # Most packed weights are no parameter. One that has stayed plain has been counted.
        if isinstance(module, PackedLinear) and not isinstance(module.packed, torch.nn.Parameter):
            size += packed_bytes(module, model.dtype.itemsize)
        weights += size * (chosen if ".experts." in name else 1)
    kv = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * length
    return round(weights) + batch * kv * model.dtype.itemsize


def packed_bytes(linear: PackedLinear, itemsize: int) -> int:
    """Count the bytes of a packed weight and its scales. A plain number has `itemsize` bytes."""
    N, K = linear.out_features, linear.in_features
    match linear:
        case Int4Linear(group_size=size):
            return N * K // 2 + 5 * N * K // size
        case Int8Linear():
            return N * K + 4 * N
        case HalfLinear():
            return 2 * N * K
    return N * K * itemsize


def prefill_flops(model: Transformer, batch: int, tokens: int) -> int:
    """Count the FLOPs of multiplying prompts by the weights. Attention's own products are left out:
    they are not GEMM's."""
    c = model.config
    heads = 2 * c.num_attention_heads + 2 * c.num_key_value_heads  # q, o and k, v
    weights = c.num_hidden_layers * heads * c.head_dim * c.hidden_size
    for block in model.layers:
        width = c.intermediate_size
        if isinstance(block.mlp, SparseMLP):
            width = c.num_experts_per_tok * (c.moe_intermediate_size or width)
        weights += 3 * c.hidden_size * width
    # Only the last token of a prompt goes through lm_head.
    return 2 * batch * (tokens * weights + c.vocab_size * c.hidden_size)


def read_bandwidth(device: torch.device) -> float:
    """Measure how fast this machine reads memory, in GB/s: the limit that decoding runs into.

    It takes the better of a plain sum and a matrix-vector product over 256 MiB, more than caches
    hold: which one is better depends on the processor. Both are medians, like the speeds that they
    are compared with.
    """
    data = torch.ones(2**26, device=device)  # float32
    matrix = data.view(torch.bfloat16).view(-1, 2048)
    vector = matrix.new_ones(2048)
    return data.nbytes / min(_seconds(data.sum), _seconds(lambda: matrix @ vector)) / 1e9


def gemm_peak(model: Transformer) -> Callable[[], float]:
    """Return a function that measures the fastest GEMM the library has, in TFLOP/s: 512 rows
    against a feed-forward matrix, packed as --compile packs it."""
    c = model.config
    linear = torch.nn.Linear(c.hidden_size, 2 * c.intermediate_size, bias=False)
    linear = linear.to(model.device, model.dtype).requires_grad_(False)
    if form := form_of(linear):
        linear = form(linear)
    x = torch.randn(512, c.hidden_size).to(model.device, model.dtype)
    flops = 2 * 512 * c.hidden_size * 2 * c.intermediate_size

    return lambda: flops / _seconds(lambda: linear(x)) / 1e12


def _seconds(run: Callable[[], torch.Tensor], repeats: int = 5) -> float:
    """Return the median time of a call, without the first one."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run().view(-1)[0].item()  # .item() waits for a device that runs behind
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def peak_memory(device: torch.device) -> float:
    """Return the most memory that this process has held so far, in GB: resident, or on a GPU what
    tensors have taken (without what CUDA graphs keep for themselves)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
