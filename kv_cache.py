"""The static KV cache: keys and values of past tokens, kept in one slab of memory per layer.

The keys and values of past tokens never change, so they are computed once and kept. Each step then
costs one token instead of the whole text (Pope et al. 2022, arXiv:2211.05102, section 3.3, counts
the bytes). A slab suits sequences whose longest length is known. Where many sequences come, grow
and leave, use paged.py. This file knows the model's config and how to call attention; it knows
nothing about text or about who is being served. Read: StaticCache.plan, StaticLayerCache.attend.
The form in which a key is stored can wait; paged.py uses it too. Next: sampling.py.

    position    0    1    2    3    4    5    6    7        capacity 8
    slab       the  cat  sat  on    .    .    .    .        "on" runs: it is written to slot 3
                                                            and sees slots 0 to 3
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model import LayerCache, Masks, Transformer, View, attention

BUCKET = 64  # positions; a forward reads a multiple of this many, see StaticCache.plan


@dataclass
class StaticLayerCache(LayerCache):
    """One layer's slab, with a row per sequence, and the plan of one forward. Slot s holds position
    s.

    Attributes:
        kv: (B, 2 * K, num_slots, stored_dim): the heads' keys, then their values, as to_stored
            makes them. For stored_dim see empty_layers.
        slots: (T,) int64, where the new tokens go, the same in each sequence.
        masks: what the new tokens see. All layers share them.
        view: this layer's, which selects its mask.
    """

    kv: Tensor
    slots: Tensor
    masks: Masks
    view: View

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, then attend to all that is visible. See model.LayerCache.attend."""
        self.store(k, v)
        mask = self.masks[self.view]  # (1, 1, N / K * T, S), where S is how many slots are read
        k, v = from_stored(self.kv[:, :, : mask.shape[3]], q.dtype).chunk(2, 1)  # (B, K, S, H) each
        return attention(q, k, v, mask, self.view.kernel)

    def store(self, k: Tensor, v: Tensor) -> None:
        new = to_stored(torch.cat((k, v), 1), self.kv.dtype)  # (B, 2 * K, T, stored_dim)
        # Not scatter_, which the compiler turns into a copy of the whole slab.
        self.kv.index_copy_(2, self.slots, new)


class StaticCache:
    """Keys and values of a batch of sequences, of `max_seq_len` positions each.

    Bytes: 2 * layers * B * K * num_slots * stored_dim * itemsize.

    After the slabs are zeroed once, nothing is ever cleared: a position is written before it can be
    seen, because a query sees only positions up to its own. That also makes rolling back free,
    since generation just continues from an earlier position. Masked values must still be finite, as
    attention multiplies them by 0, and 0 * NaN is NaN. So after a NaN the cache is of no use.
    """

    def __init__(
        self, model: Transformer, batch_size: int, max_seq_len: int, kv_dtype: str = "auto"
    ) -> None:
        """Allocate the slabs.

        Args:
            model: gives the layers, K, H, the device, and the dtype.
            batch_size: B.
            max_seq_len: positions per sequence.
            kv_dtype: how keys and values are stored: "auto" (the model's dtype) or "int8".

        Raises:
            ValueError: there is not enough memory.
        """
        # A slot for each position, in whole buckets, and one more bucket, which is never read:
        # without it, a view of all slots would be contiguous, and torch.compile would compile again
        # for the last bucket.
        num_slots = (-(-max_seq_len // BUCKET) + 1) * BUCKET
        self.config = model.config
        self.dtype = model.dtype
        self.batch_size = batch_size
        self.max_seq_len = max_seq_len
        heads = 2 * model.config.num_key_value_heads  # those of the keys, then those of the values
        self.slabs = empty_layers(model, kv_dtype, batch_size, heads, num_slots)
        # The memory may hold a NaN, and a forward also reads slots that are not written yet.
        for slab in self.slabs:
            slab.zero_()
        self.slots = torch.arange(num_slots, device=model.device)  # last, as it always fits

    def plan(self, start: int, end: int) -> tuple[Tensor, list[StaticLayerCache]]:
        """Plan a forward over positions start .. end - 1 of each sequence.

        The forward reads only the slots before `end`, with `end` rounded up to a multiple of
        BUCKET, so that few shapes occur. If it read all slots under a mask, each step would cost
        the whole slab.

        Returns:
            The positions, (B, T), and one StaticLayerCache per layer for this forward.

        Raises:
            ValueError: `end` is more than the capacity.
        """
        if end > self.max_seq_len:
            raise ValueError(
                f"the cache has {self.max_seq_len} positions, {end} are needed: raise --max-seq-len"
            )
        # (T,), slots and positions in one: slot s holds position s. It is a copy, because
        # compiling.Replayed keeps this tensor and copies later slots into it.
        new = self.slots[start:end].clone()
        num_read = -(-end // BUCKET) * BUCKET  # rounded up
        masks = Masks(self.config, new[None], self.slots[None, :num_read], self.dtype)
        caches = [
            StaticLayerCache(kv, new, masks, view)
            for kv, view in zip(self.slabs, self.config.views, strict=True)
        ]
        return new.expand(self.batch_size, -1), caches


# --- How a key or a value is stored ---------------------------------------------------------------


def empty_layers(model: Transformer, kv_dtype: str, *shape: int) -> list[Tensor]:
    """Allocate the keys and values of each layer.

    Returns:
        A tensor (*shape, stored_dim) per layer. It is not zeroed: on a CPU, memory is taken from
        the system when it is first written, so blocks that paged.py never uses cost nothing.
        stored_dim is H; for int8 it is H + 4, as the scale takes four bytes.

    Raises:
        ValueError: there is not enough memory.
    """
    dtype = model.dtype
    stored_dim = model.config.head_dim
    if kv_dtype == "int8":
        dtype = torch.int8
        stored_dim += 4
    shape = (*shape, stored_dim)
    try:
        return [torch.empty(shape, dtype=dtype, device=model.device) for _ in model.layers]
    except RuntimeError as error:
        raise ValueError(
            f"no memory for a cache of {len(model.layers)} x {shape}, "
            "lower --max-seq-len or --kv-memory"
        ) from error


def to_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert keys or values (..., H) to the form in which the cache stores them.

    Any dtype but int8 leaves them as they are. In int8 each token and head has its own scale. The
    scale's four bytes (float32) follow the H bytes of values, so that one write stores both.

    Example: [1.0, -0.5, 0.25, 0.0] as int8: 127, -64, 32, 0, and the four bytes of 1 / 127
    """
    if dtype != torch.int8:
        return x
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127  # (..., 1)
    return torch.cat(((x / scale).round().to(torch.int8), scale.view(torch.int8)), -1)


def from_stored(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo to_stored: int8 (..., H + 4) becomes (..., H) of `dtype`, and any other tensor is
    returned as it is."""
    if stored.dtype != torch.int8:
        return stored
    # view(float32) needs strides that are multiples of 4, which a slice of rows of H + 4 bytes may
    # lack. So the scale is copied to contiguous memory, which is asked for, because clone() would
    # keep the strides of a single scale.
    scale = stored[..., -4:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (stored[..., :-4] * scale).to(dtype)
