"""Attention that reads a pool's blocks where they are, without copying them: for a GPU.

    python server.py --device cuda --attention flex --block-size 128

On a CPU paged.Blocks puts the blocks of each row side by side, which costs little next to the
attention, and a library's kernel does the rest. On a GPU that copy is waste. FlexAttention compiles
a kernel that is told, for each row, which blocks to read, and which of their slots count. Stands
behind paged.Runner, whose plan it shares; the scheduler and the model do not know. Must be asked
for: not yet run on a GPU by us. Paper: Dong et al. 2024 (arXiv:2412.05496). Read: Followed.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from paged import Blocks, Group, Runner

QUERIES = 128  # that the kernel takes together
compiled = torch.compile(flex_attention, dynamic=True)


class Followed(Blocks):
    """One layer's pool, attended to where it is."""

    def read(self, q: Tensor, group: Group) -> Tensor:
        """Blocks.read without a copy. To FlexAttention a pool is one long text, of which each row
        sees the slots of its blocks.

        Example: block_size 4, table [7, 2]: slot 9 is in block 2, whose place is 1, so it holds
            position 1 * 4 + 1 = 5
        """
        if self.kv.dtype != q.dtype:  # int8 keys must be decoded first
            return super().read(q, group)
        heads, num_blocks, size, _ = self.kv.shape
        B, W = group.table.shape
        queries = q.reshape(B, heads // 2, -1, q.shape[3])  # as in model.attention
        places = torch.arange(W, device=q.device).expand(B, W)
        # What is no block of a row's has the place after the last, where nothing is seen.
        place = torch.full((B, num_blocks), W, device=q.device).scatter_(1, group.table, places)
        seen = pad(group.masks(group.pieces[0])[self.window], (0, size))

        def visible(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
            return seen[row, 0, query, place[row, slot // size] * size + slot % size]

        parts = -(-queries.shape[2] // QUERIES)
        counts = torch.full((B, 1, parts), W, dtype=torch.int32, device=q.device)
        # As wide as there are blocks, which PyTorch asks for; the first W of them count.
        blocks = pad(group.table, (0, num_blocks - W))[:, None, None].expand(-1, 1, parts, -1).int()
        shape = dict(BLOCK_SIZE=(QUERIES, size), seq_lengths=(queries.shape[2], num_blocks * size))
        plan = BlockMask.from_kv_blocks(counts, blocks, mask_mod=visible, **shape)
        k, v = self.kv.flatten(1, 2)[None].chunk(2, 1)
        attend = compiled if q.is_cuda else flex_attention  # for tests: it looks at all blocks
        return attend(queries, k, v, block_mask=plan).reshape(q.shape)


class FlexRunner(Runner):
    """A Runner that follows the block tables."""

    layer = Followed
    pairs = 2**62  # all at once: its kernel reads the mask as it is
