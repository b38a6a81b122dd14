"""The machine's limits, which a speed is worth little without: bytes, bandwidth, peak GEMM, memory.

Decoding one token reads every weight once, so its limit is read bandwidth; a prompt multiplies
matrices, so its limit is the GEMM peak (the two sides of the roofline, Williams et al. 2009).
generate.py prints the first beside each run; bench.py reports both. An instrument, not the engine.
"""

import resource
import statistics
import sys
import time
from collections.abc import Callable

import torch

from kv_cache import stored_dim
from model import Transformer
from quantize import PackedLinear


def bytes_per_token(model: Transformer, length: int, kv_dtype: torch.dtype | None = None) -> int:
    """Bytes that decoding one token must read: every weight but the embedding table (of which it
    reads one row), plus the keys and values of `length` earlier positions, in kv_dtype or in the
    model's own."""
    embedding, c = model.embed_tokens.weight, model.config
    sizes = [getattr(module, "nbytes", 0) for module in model.modules()]  # packed or quantised
    weights = sum(sizes) + sum(parameter.nbytes for parameter in model.parameters())
    if getattr(model.lm_head, "weight", None) is not embedding:  # tied, it is read in full
        weights -= embedding.nbytes
    kind = kv_dtype or embedding.dtype
    kv = 2 * c.num_hidden_layers * c.num_key_value_heads * stored_dim(c, kind) * length
    return weights + kv * kind.itemsize


def read_bandwidth(device: torch.device) -> float:
    """Measure how fast this machine reads memory, in GB/s: the limit that decoding runs into.

    The better of a plain sum and a matrix-vector product over 256 MiB, more than caches hold: which
    one that is depends on the processor. Medians, like the speeds they are compared with.
    """
    data = torch.ones(2**26, device=device)  # float32
    matrix = data.view(torch.bfloat16).view(-1, 2048)
    vector = matrix.new_ones(2048)
    return data.nbytes / min(_seconds(data.sum), _seconds(lambda: matrix @ vector)) / 1e9


def gemm_peak(model: Transformer) -> Callable[[], float]:
    """Return a function that measures the fastest GEMM the library has, in TFLOP/s: 512 rows
    against a feed-forward matrix, which a CPU gets in oneDNN's packed order."""
    c, weight = model.config, model.embed_tokens.weight
    linear = torch.nn.Linear(c.hidden_size, 2 * c.intermediate_size, bias=False)
    linear = linear.to(weight.device, weight.dtype)
    if weight.device.type == "cpu":
        linear = PackedLinear(linear)
    x = torch.randn(512, c.hidden_size).to(weight.device, weight.dtype)
    flops = 2 * 512 * c.hidden_size * 2 * c.intermediate_size

    return lambda: flops / _seconds(lambda: linear(x)) / 1e12


def _seconds(run: Callable[[], torch.Tensor], repeats: int = 5) -> float:
    """Median time of a call, the first one not counted."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run().view(-1)[0].item()  # .item() waits for a device that runs behind
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def peak_memory(device: torch.device) -> float:
    """Most memory this process has held so far, in GB: on the device, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
