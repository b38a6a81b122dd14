"""A model at work: rows of tokens in, logits out; and compiled, as fast as the machine allows.

Everything that generates (one sequence, a batch, a draft, one rank of many) runs its model through
a Runner. Does not know what the tokens are for; what pack_linears does can wait for quantize.py.
What compiling buys: nearly twice the speed of eager decoding (`bench.py latency --shape 1b`, with
and without `--compile`, on two Zen 5 cores). Read: Runner, compile_model. Next: generate.py.
"""

import torch
from torch import Tensor

from kv_cache import PagedCache, Row, StaticCache
from model import KVCache, Transformer, progress
from quantize import pack_linears

# Prompt tokens per forward. Smaller chunks skip more of the keys that causality hides, larger ones
# read the weights less often: on two Zen 5 cores 256 is 3 to 5 % faster than 128 or 512 (1b shape).
CHUNK = 256


class Runner:
    """A model and the cache that it runs against."""

    def __init__(self, model: Transformer, cache: StaticCache | PagedCache | KVCache) -> None:
        self.model, self.cache = model, cache
        self.device = model.embed_tokens.weight.device

    @torch.no_grad()
    def __call__(self, rows: list[Row], tokens: list[int], select: list[int]) -> Tensor:
        """Run the rows' tokens, side by side.

        Args:
            rows: see PagedCache.step.
            tokens: ids, row after row.
            select: indices into `tokens` whose logits are wanted.

        Returns:
            (len(select), V).
        """
        view, positions = self.cache.step(rows)
        ids, chosen = (torch.tensor(x, device=self.device) for x in ([tokens], select))
        return self.model(ids, positions.to(self.device), view, chosen)

    def compile(self) -> None:
        """Make the model fast, in place. See compile_model."""
        compile_model(self.model, self.cache)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """See PagedCache.copy_blocks."""
        self.cache.copy_blocks(pairs)


def compile_model(
    model: Transformer, cache: StaticCache | PagedCache | None = None, chunk: int = CHUNK
) -> Transformer:
    """Make a finished model fast: pack its weights for the CPU and compile it, in place.

    On a CPU one block is compiled and serves all layers, which differ only in their tensors: 5 s
    instead of 35 s for 22 layers as one graph, and no slower, as the guards of one big graph cost
    as much as entering 22 small ones. Lengths are symbolic, so nothing is compiled again later.
    On CUDA the whole model is one graph; with a static cache it is replayed as a CUDA graph for
    each length bucket.

    Args:
        cache: like the one that the model will run against; None: static, for one sequence.
        chunk: prompt tokens per forward, to warm up with.

    Raises:
        ValueError: there is no C++ compiler, which torch.compile needs on a CPU.
    """
    device, dtype = model.embed_tokens.weight.device, model.embed_tokens.weight.dtype
    cache = cache or StaticCache(model.config, 1, 2 * chunk, dtype, device)
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler  # here: importing it takes 1 s

        try:
            get_cpp_compiler()
        except RuntimeError:
            message = "--compile needs a C++ compiler such as g++: install one or leave it out"
            raise ValueError(message) from None
        if torch.backends.mkldnn.is_available():
            pack_linears(model)
        for part in (*model.layers, model.lm_head):
            part.compile(fullgraph=True)
    else:
        pack_linears(model)
        # Lets a product of one row become a loop that reads int8 weights once, as they are.
        torch._inductor.config.coordinate_descent_tuning = True
        # A paged step is another one each time, in numbers that only the host sees: never replayed.
        replay = cache.batch_size is not None
        model.compile(fullgraph=True, mode="reduce-overhead" if replay else None)
    # The default of 8 graphs for one piece of code is few for several models in a process.
    torch._dynamo.config.recompile_limit = 64
    for length in progress([1, chunk], "compiling decode, prefill"):
        view, positions = cache.probe(length)
        with torch.no_grad():
            # The logits of one token, then of two, which stands for any number.
            select = torch.arange(min(length, 2), device=device)
            model(torch.zeros_like(positions), positions, view, select)
    return model
