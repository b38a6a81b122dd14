"""Attention that reads a pool's blocks where they are, without copying them: for a GPU.

    python server.py --device cuda --attention flex --block-size 128

paged.Blocks copies the blocks of each row side by side, unless they follow each other already,
because PyTorch's ordinary attention wants each row's keys in one tensor. On a CPU the copy costs
little beside the attention itself. On a GPU it is waste. FlexAttention compiles a kernel that is
told which blocks each row reads, and which of their slots are visible. FlexRunner takes the place
of paged.Runner and shares its plan; the scheduler and the model do not know of it. On an H200 its
tokens are right (docs/gpu.md); how much faster it is has not been measured, so it must be asked
for. Paper: Dong et al. 2024 (arXiv:2412.05496). Read: FlexBlocks.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from paged import Blocks, Group, Row, Runner, groups_of

QUERIES = 128  # the kernel takes this many queries together
compiled_attention = torch.compile(flex_attention, dynamic=True)
# The compiler takes a size of 1 as fixed, so it makes a kernel for each combination of sizes that
# are 1. After 8 kernels, the default limit, it would run the uncompiled function, which computes
# all blocks.
torch._dynamo.config.recompile_limit = 64


class FlexBlocks(Blocks):
    """One layer's pool, whose blocks are attended to in place."""

    @classmethod
    def groups_of(cls, rows: list[Row], runner: Runner) -> list:
        """No limit: nothing is copied, and the kernel reads the boolean mask without widening it."""
        return [Group(each, runner) for each in groups_of(rows, runner.block_size, 2**62)]

    def attend_group(self, q: Tensor, group: Group) -> Tensor:
        """Do what Blocks.attend_group does, without a copy.

        FlexAttention is given the whole pool as one long sequence of slots. A row sees the slots of
        its own blocks, as far as their positions are visible to its queries.

        Example: block_size 4, table [2, 7] (sorted): slot 29 is in block 7, which has index 1 in
            the table, so column 1 * 4 + 1 = 5 of the mask says which queries see it
        """
        if self.kv.dtype != q.dtype:  # int8 keys must be decoded first
            return super().attend_group(q, group)
        two_K, num_blocks, size, H = self.kv.shape
        table = group.table
        B, W = table.shape
        queries = q.reshape(B, two_K // 2, -1, H)  # (B, K, N / K * T, H), as in model.attention
        num_queries = queries.shape[2]
        # 1) Which slots a query sees. `index` is the table turned round: for each row and each
        # block of the pool, the block's index in the row's table. A block that is not in the table
        # gets W, one past the last index, and there the padded mask is False. What fills up a short
        # row goes to a column behind the last block.
        lengths = torch.tensor([row.num_blocks(size) for row in group.rows], device=q.device)
        places = torch.arange(W, device=q.device).expand(B, W)
        index = table.new_full((B, num_blocks + 1), W)
        index.scatter_(1, table.where(places < lengths[:, None], num_blocks), places)
        mask = pad(group.masks[self.window], (0, size))

        def sees(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
            column = index[row, slot // size] * size + slot % size
            return mask[row, 0, query, column]

        # 2) Which blocks each row reads, for each part of QUERIES queries. PyTorch wants a list as
        # long as the pool, and how many of its first entries count.
        num_parts = -(-num_queries // QUERIES)
        table = pad(table, (0, num_blocks - W))  # (B, num_blocks)
        blocks = table[:, None, None].expand(B, 1, num_parts, num_blocks).int()
        counts = lengths[:, None, None].expand(B, 1, num_parts).int()
        block_mask = BlockMask.from_kv_blocks(
            counts,
            blocks,
            BLOCK_SIZE=(QUERIES, size),
            mask_mod=sees,
            seq_lengths=(num_queries, num_blocks * size),
            compute_q_blocks=False,  # only training needs them
        )
        # 3) Attend. Without a GPU, in tests, the uncompiled function computes all blocks.
        k, v = self.kv.flatten(1, 2)[None].chunk(2, 1)  # (1, K, all slots, H) each
        attend = compiled_attention if q.is_cuda else flex_attention
        return attend(queries, k, v, block_mask=block_mask).reshape(q.shape)
