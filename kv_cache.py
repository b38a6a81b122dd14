"""The static KV cache: keys and values of past tokens, kept in one slab of memory per sequence.

Keys and values of past tokens never change, so they are computed once and kept. Each step then
costs one token instead of the whole text (Pope et al. 2022, arXiv:2211.05102, section 3.3, counts
the bytes). A slab suits sequences whose longest length is known; for many that come, grow and go
see paged.py. Knows the model's config and how attention is called, and nothing of text or of who
is being served. Read: StaticCache.plan, Slab.attend, encode. Next: sampling.py.

    position    0    1    2    3    4    5    6    7        capacity 8
    slab       the  cat  sat  on    .    .    .    .        "on" runs: written at 3, sees 0..3
"""

import torch
from torch import Tensor

from model import LayerCache, Transformer, attention, visible

BUCKET = 64  # positions


class Slab(LayerCache):
    """One layer's keys and values, as one forward sees them: slot s holds position s."""

    def __init__(self, kv: Tensor, places: Tensor, mask: Tensor) -> None:
        """Hold on to a layer's slab and the plan of a forward.

        Args:
            kv: (B, 2 * K, capacity, stored_dim), encoded: the heads' keys, then their values.
            places: (T,), the slots of each sequence's new tokens.
            mask: (B or 1, 1, N / K * T, S), what they see.
        """
        self.kv, self.places, self.mask = kv, places, mask

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, then attend to all that is visible. See model.LayerCache.attend."""
        new = encode(torch.cat((k, v), 1), self.kv.dtype)
        # Not scatter_: of that the compiler makes a copy of the whole slab.
        self.kv.index_copy_(2, self.places, new)
        seen = decode(self.kv[:, :, : self.mask.shape[3]], q.dtype)
        return attention(q, *seen.chunk(2, 1), self.mask)


class StaticCache:
    """Keys and values of a batch of sequences, in slabs of `max_seq_len` positions.

    Bytes: 2 * layers * B * K * max_seq_len * stored_dim * itemsize. Nothing is ever cleared: a
    position is written before it can be seen, because a query sees only positions up to its own.
    That is also what makes rolling back free: generation just continues from an earlier position.
    What is not seen must be finite all the same: generate() stops at the first NaN.
    """

    def __init__(
        self, model: Transformer, batch_size: int, max_seq_len: int, kv_dtype: str = "auto"
    ) -> None:
        """Allocate the slabs.

        Args:
            model: gives the layers, K, H, the device, and the dtype.
            batch_size: B.
            max_seq_len: positions per sequence.
            kv_dtype: of the keys and values: "auto" is the model's own, or "int8".

        Raises:
            ValueError: there is not enough memory.
        """
        # Whole buckets, and one slot that is never used: a view of *all* slots would be contiguous,
        # another case for torch.compile, which would compile again when a sequence gets there.
        slots = -(-max_seq_len // BUCKET) * BUCKET + 1
        self.config = model.config
        self.batch_size, self.max_seq_len = batch_size, max_seq_len
        self.places = torch.arange(slots, device=model.device)
        K = model.config.num_key_value_heads
        self.slabs = empty_layers(model, kv_dtype, batch_size, 2 * K, slots)
        if model.device.type == "cuda":
            for slab in self.slabs:
                torch._dynamo.mark_static_address(slab)  # CUDA graphs write in place

    def plan(self, start: int, end: int) -> tuple[Tensor, list[Slab]]:
        """Plan a forward over positions start .. end - 1 of each sequence.

        It reads the first positions only, up to a multiple of BUCKET, so that few shapes occur.
        With a mask alone, each step would cost the whole capacity.

        Returns:
            The positions, (B, T), and each layer's slab, for that forward.

        Raises:
            ValueError: `end` is more than the capacity.
        """
        if end > self.max_seq_len:
            raise ValueError(
                f"the cache has {self.max_seq_len} positions, {end} are needed: raise --max-seq-len"
            )
        new = self.places[start:end]  # (T,)
        seen = -(-end // BUCKET) * BUCKET  # rounded up
        masks = visible(self.config, new[None], self.places[None, :seen])
        layers = zip(self.slabs, self.config.windows, strict=True)
        return (
            new.expand(self.batch_size, -1),
            [Slab(kv, new, masks[window]) for kv, window in layers],
        )


# --- One key or value -----------------------------------------------------------------------------


def empty_layers(model: Transformer, kv_dtype: str, *shape: int) -> list[Tensor]:
    """Memory for the keys and values of each layer: (*shape, stored_dim), where stored_dim is H,
    and for int8 four more, for the scale.

    Raises:
        ValueError: there is not enough memory.
    """
    dtype = {"auto": model.dtype, "int8": torch.int8}[kv_dtype]
    shape = (*shape, model.config.head_dim + 4 * (kv_dtype == "int8"))
    try:
        return [model.inv_freq.new_zeros(shape, dtype=dtype) for _ in model.layers]
    except RuntimeError as error:
        raise ValueError(
            f"no memory for a cache of {len(model.layers)} x {shape}, "
            "lower --max-seq-len or --kv-memory"
        ) from error


def encode(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values (..., H) as the cache stores them: as they are, or as int8, one scale for each
    token and head, whose float32 follows its H bytes, so that they are written and read as one.

    Example: [1.0, -0.5, 0.25, 0.0] as int8: 127, -64, 32, 0, and the bytes of 1 / 127
    """
    if dtype != torch.int8:
        return x
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127  # (..., 1)
    return torch.cat(((x / scale).round().to(torch.int8), scale.view(torch.int8)), -1)


def decode(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of encode, as a tensor of `dtype`: (..., H + 4) -> (..., H) where it is int8."""
    if stored.dtype != torch.int8:
        return stored
    # A copy, so that it is aligned. Of a single key a plain clone() keeps strides of H + 4 bytes.
    scale = stored[..., -4:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (stored[..., :-4] * scale).to(dtype)
