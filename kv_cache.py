"""The static KV cache: one contiguous slab per sequence, allocated once for its longest length.

Keys and values of past tokens never change, so they are computed once and kept; each step then
costs one token instead of the whole text (Pope et al. 2022, arXiv:2211.05102, section 3.3, counts
the bytes). Does not know the model, which sees it through model.LayerCache. paged.py is the same
interface over small blocks, for many sequences. Read: StaticCache, upto, then Slab.attend.
"""

import torch
from torch import Tensor

from model import Config, KVCache, LayerCache, attention


class Slab(LayerCache):
    """One layer's keys and values, (B, K, S, H) each, where slot s holds position s."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, window: int | None
    ) -> Tensor:
        """Store k and v, then attend to all that is visible. See model.LayerCache.attend."""
        index = positions[:, None, :, None].expand_as(k)  # each row writes at its own positions
        self.k.scatter_(2, index, k)
        self.v.scatter_(2, index, v)
        slots = torch.arange(self.k.shape[2], device=q.device)[None]  # (1, S)
        return attention(q, self.k, self.v, positions, slots, window)


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
        shape = (batch_size, config.num_key_value_heads, max_seq_len, config.head_dim)
        k, v = torch.zeros((2, config.num_hidden_layers, *shape), dtype=dtype, device=device)
        self.layers = [Slab(*kv) for kv in zip(k, v, strict=True)]

    def upto(self, length: int) -> "StaticCache":
        """View only the first `length` positions: the cost of attention is that of what is there.

        A cache read in full through a mask would pay for its whole capacity at each step.

        Args:
            length: positions that the coming forward needs, its own new tokens included.

        Returns:
            A cache that shares this one's memory.

        Raises:
            ValueError: `length` is more than the capacity.
        """
        capacity = self.layers[0].k.shape[2]
        if length > capacity:
            raise ValueError(
                f"sequence needs {length} positions, its cache holds {capacity}: "
                "shorten the prompt or raise --max-seq-len"
            )
        view = object.__new__(StaticCache)
        view.layers = [Slab(slab.k[:, :, :length], slab.v[:, :, :length]) for slab in self.layers]
        return view
