"""The static KV cache: one contiguous slab per sequence, allocated once for its longest length.

Keys and values of past tokens never change, so they are computed once and kept; each step then
costs one token instead of the whole text (Pope et al. 2022, arXiv:2211.05102, section 3.3, counts
the bytes). Does not know the model, which sees it through model.LayerCache. paged.py is the same
interface over small blocks, for many sequences. Read: StaticCache, upto, then Slab.attend.
"""

import torch
from torch import Tensor

from model import Config, KVCache, LayerCache, attention

BUCKET = 64  # positions


class Slab(LayerCache):
    """One layer's keys and values, where slot s holds position s."""

    def __init__(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Take k and v, (B, K, capacity, H) each, and the slots in use: (S,) int64, 0..S-1."""
        self.k, self.v, self.slots = k, v, slots

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, window: int | None
    ) -> Tensor:
        """Store k and v, then attend to all that is visible. See model.LayerCache.attend."""
        (B, K), S = self.k.shape[:2], self.slots.shape[0]
        row = torch.arange(B, device=q.device)[:, None, None]
        head = torch.arange(K, device=q.device)[:, None]
        at = (row, head, positions[:, None])  # (B, K, T) together: each row at its own positions
        # index_put_ and not scatter_: of scatter_ the compiler makes a copy of the whole slab.
        self.k.index_put_(at, k)
        self.v.index_put_(at, v)
        k, v = self.k[:, :, :S], self.v[:, :, :S]  # (B, K, S, H)
        return attention(q, k, v, positions, self.slots[None], window)


class StaticCache(KVCache):
    """Keys and values of a batch of sequences, in slabs of `max_seq_len` positions.

    Bytes: 2 * layers * B * K * max_seq_len * H * itemsize. Nothing is ever cleared: a position is
    written before it can be seen, because a query sees only positions up to its own. That is also
    what makes rolling back free: generation just continues from an earlier position.
    """

    def __init__(
        self,
        config: Config,
        batch_size: int,
        max_seq_len: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
    ) -> None:
        """Allocate the slabs.

        Args:
            config: gives the layers, K and H.
            batch_size: B.
            max_seq_len: positions per sequence.
            dtype, device: of the keys and values; the model's own.
        """
        # Whole buckets, and one slot that is never used: a view of *all* slots would be contiguous,
        # another case for torch.compile, which would compile again when a sequence gets there.
        slots = -(-max_seq_len // BUCKET) * BUCKET + 1
        shape = (batch_size, config.num_key_value_heads, slots, config.head_dim)
        k, v = torch.zeros((2, config.num_hidden_layers, *shape), dtype=dtype, device=device)
        self.max_seq_len, self.slots = max_seq_len, torch.arange(slots, device=device)
        self.layers = [Slab(*kv, self.slots) for kv in zip(k, v, strict=True)]
        for slab in self.layers if k.is_cuda else ():  # a CUDA graph may write to it in place
            torch._dynamo.mark_static_address(slab.k)
            torch._dynamo.mark_static_address(slab.v)

    def upto(self, length: int) -> "StaticCache":
        """View only the first positions: the cost of attention is that of what is there.

        A cache read in full through a mask would pay for its whole capacity at each step. Views
        come in lengths that are multiples of BUCKET, so that few shapes occur; the mask hides the
        slots past the sequence's end.

        Args:
            length: positions that the coming forward needs, its own new tokens included.

        Returns:
            A cache that shares this one's memory.

        Raises:
            ValueError: `length` is more than the capacity.
        """
        if length > self.max_seq_len:
            raise ValueError(
                f"sequence needs {length} positions, its cache holds {self.max_seq_len}: "
                "shorten the prompt or raise --max-seq-len"
            )
        view = object.__new__(StaticCache)
        view.slots = self.slots[: -(-length // BUCKET) * BUCKET]  # rounded up
        view.layers = [Slab(slab.k, slab.v, view.slots) for slab in self.layers]
        return view
