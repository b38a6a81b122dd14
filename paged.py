"""Many sequences in one memory: fixed-size blocks, block tables, shared prefixes.

The keys and values of a sequence need not lie side by side. They lie in blocks, as a process's
memory lies in pages. The sequence's block table maps position p to slot p % 16 of block
table[p // 16]. So memory is handed out 16 tokens at a time, nothing is reserved for tokens that may
never come, and sequences with the same beginning share blocks. The first part of this file is
integers: who owns which block. The second is tensors: what a block holds, and a forward over rows
of many sequences. The file knows nothing about requests or text. Papers: Kwon et al. 2023
(PagedAttention, arXiv:2309.06180), Zheng et al. 2023 (prefix sharing, arXiv:2312.07104). Read:
BlockTable, BlockPool; then Row, PagedLayerCache, Runner. Next: scheduler.py.

The M new tokens of all sequences are laid end to end and run as a batch of one: (1, M).
Attention takes them apart again, into rows; a row is one sequence's share of the forward, with T
new tokens and W blocks. The model returns logits for R of the M tokens: (R, V). (around/fast puts
several rows into one call of attention.)

    ids      the_  king  _is        the_  king  _hat  h       block_size = 4; a letter is a token
    tables   [ 2,    5,   1 ]       [ 2,    5,    7,  3 ]
    pool     0:free  1:used x1  2:used x2  3:used x1  4:cached  5:used x2  6:free  7:used x1
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kv_cache import empty_layers, from_stored, to_stored
from model import LayerCache, Masks, Transformer, View, attention

# --- Who owns which block -------------------------------------------------------------------------


@dataclass
class BlockTable:
    """One sequence's blocks.

    Example: block_size 4, blocks [7, 2], positions 3..5 -> slots [31, 8, 9]
    """

    blocks: list[int] = field(default_factory=list)  # enough for `length` tokens, perhaps for more
    length: int = 0  # tokens whose keys and values are in the blocks
    # chain[i] is a prefix: an object() that stands for the text of the first i full blocks.
    # chain[0], of no text, is a salt: prefixes are found only under the same salt. See
    # BlockPool._key_of.
    chain: list[object] = field(default_factory=lambda: [None])


class BlockPool:
    """Hands out blocks, counts who uses them, and keeps freed ones for the next equal prefix.

    A block is free (holds nothing of use), used (`refs` counts the tables that hold it) or cached
    (in no table, but kept in case an equal prefix comes). Free blocks are handed out first, then
    the cached ones, least recently used first.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.refs = [0] * num_blocks
        # Free and cached blocks, in the order in which they are handed out.
        self.available = OrderedDict.fromkeys(range(num_blocks))
        self._by_key: dict[tuple, tuple[int, object]] = {}  # key -> block, prefix; see _key_of
        self._keys: dict[int, tuple] = {}  # block -> key

    @property
    def cached(self) -> list[int]:
        return [block for block in self.available if block in self._keys]

    def reuse(self, table: BlockTable, ids: list[int]) -> None:
        """Map the longest known prefix of `ids` into an empty table.

        At least one token is left to compute, because without its logits there would be nothing to
        sample from (nano-vllm#144). Only prefixes with the same salt are found. Without a salt, the
        time to the first token can tell one user what another has asked.
        """
        assert not table.blocks
        for i in range((len(ids) - 1) // self.block_size):
            entry = self._by_key.get(self._key_of(table, ids, i))
            if entry is None:
                break
            block, prefix = entry
            self.available.pop(block, None)
            self.refs[block] += 1
            table.blocks.append(block)
            table.chain.append(prefix)
        table.length = len(table.blocks) * self.block_size

    def cost(self, table: BlockTable, end: int) -> int:
        """How many blocks grow(table, end) would take: new ones, and copies of shared ones."""
        new = -(-end // self.block_size) - len(table.blocks)
        return max(0, new) + len(self._shared(table))

    def grow(self, table: BlockTable, end: int) -> list[tuple[int, int]]:
        """Make positions table.length .. end - 1 writable. The caller has checked the cost.

        Returns:
            Pairs of blocks (from, to). The content of `from` must be copied to `to` before the
            write, because the outputs of one prompt diverge within a shared block (copy-on-write).

        Example: 8 blocks of size 4, a table with blocks [7, 2] and length 6, block 2 in two tables,
            end 10. If 0 and 1 are the next in `available`, the blocks become [7, 0, 1], and
            [(2, 0)] is returned.
        """
        copies = []
        for i in self._shared(table):
            old = table.blocks[i]
            new = self._take()
            self.refs[old] -= 1  # from 2 or more
            table.blocks[i] = new
            copies.append((old, new))
        while len(table.blocks) * self.block_size < end:
            table.blocks.append(self._take())
        return copies

    def commit(self, table: BlockTable, ids: list[int], end: int) -> None:
        """Record that positions before `end` have been computed, and let full blocks be found.

        This comes after the forward, so a block is found only once it holds keys and values, and
        what a sequence computes in a step with NaN logits is never found. If two sequences compute
        blocks of equal content in one step, only the block that is committed first can be found.
        The other one serves its own sequence only (nano-vllm#219).
        """
        assert table.length <= end <= len(table.blocks) * self.block_size
        table.length = end
        for i in range(len(table.chain) - 1, end // self.block_size):
            key = self._key_of(table, ids, i)
            # If an equal block is known already, setdefault returns that one, and only the chain
            # changes.
            block, prefix = self._by_key.setdefault(key, (table.blocks[i], object()))
            self._keys[block] = key
            table.chain.append(prefix)

    def fork(self, table: BlockTable) -> BlockTable:
        """Make a second table over the same blocks."""
        for block in table.blocks:
            self.refs[block] += 1
        return BlockTable([*table.blocks], table.length, [*table.chain])

    def free(self, table: BlockTable) -> None:
        """Empty a table. Blocks that no other table uses become cached, and are handed out last, or
        free, and are handed out first."""
        # From the end, so that of the cached blocks the last one is evicted first: a block cannot
        # be found once the block before it is gone.
        for block in reversed(table.blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.available[block] = None  # at the end of the line
                if block not in self._keys:  # then it is free, not cached
                    self.available.move_to_end(block, last=False)
        table.blocks = []
        table.length = 0
        del table.chain[1:]  # all but the salt

    def _take(self) -> int:
        block, _ = self.available.popitem(last=False)
        if block in self._keys:  # its old content must not be found any more (nano-vllm#163)
            del self._by_key[self._keys.pop(block)]
        self.refs[block] = 1
        return block

    def _shared(self, table: BlockTable) -> list[int]:
        """Indices of the blocks that other tables also use, from position table.length on."""
        first = table.length // self.block_size
        return [i for i in range(first, len(table.blocks)) if self.refs[table.blocks[i]] > 1]

    def _key_of(self, table: BlockTable, ids: list[int], i: int) -> tuple:
        """The key of the i-th block of `ids`: the prefix before it, and its tokens.

        Except the salt, a prefix is a plain object(), equal only to itself. So equal keys mean
        equal texts from the start. This is vLLM's hash chain with a dict in place of sha256. A dict
        compares the keys and not just their hashes, so a collision cannot serve one user another's
        text (CVE-2025-25183).
        """
        return table.chain[i], tuple(ids[i * self.block_size : (i + 1) * self.block_size])


# --- What the blocks hold -------------------------------------------------------------------------


class Row(NamedTuple):
    """One sequence's share of a forward."""

    blocks: list[int]  # of its block table
    start: int  # the position of the first new token
    ids: list[int]  # the new tokens
    num_logits: int = 1  # how many of the last tokens need logits

    @property
    def positions(self) -> range:
        return range(self.start, self.start + len(self.ids))

    def num_blocks(self, block_size: int) -> int:
        """How many blocks hold its tokens, the new ones included."""
        return -(-self.positions.stop // block_size)

    def seen(self, view: View, block_size: int) -> range:
        """Which of its blocks the row attends to: none after its last new token, as those may hold
        an old NaN.

        Example: block_size 4, start 9, one new token, a window of 3: blocks 1 and 2, as the first
            position that is seen is 7
        """
        return range(view.first_seen(self.start) // block_size, self.num_blocks(block_size))


@dataclass
class PagedLayerCache(LayerCache):
    """One layer's keys and values in blocks, and the plan of one forward.

    Attributes:
        kv: (2 * K, blocks, block size, stored_dim): the heads' keys, then their values, as
            kv_cache.to_stored makes them.
        slots: (M,) int64, where each new token goes: block * block size + offset.
        rows: in the order of the tokens.
        model: the one that the layer belongs to, whose config makes the masks.
        view: this layer's.
    """

    kv: Tensor
    slots: Tensor
    rows: list[Row]
    model: Transformer
    view: View

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, then attend row by row. See model.LayerCache.attend; here the arguments
        are (1, N, M, H) and (1, K, M, H)."""
        self.store(k, v)
        queries = q.split([len(row.ids) for row in self.rows], 2)  # (1, N, T, H) each
        return torch.cat([self.attend_row(*each) for each in zip(queries, self.rows)], 2)

    def attend_row(self, q: Tensor, row: Row) -> Tensor:
        """Attend to the blocks that a row sees: (1, N, T, H) -> the same."""
        tensor = partial(torch.tensor, device=q.device)
        size = self.kv.shape[2]
        seen = row.seen(self.view, size)  # W blocks
        table = tensor([row.blocks[i] for i in seen])  # (W,)
        blocks = from_stored(self.kv[:, table], q.dtype)  # (2 * K, W, block size, H)
        k, v = blocks.flatten(1, 2)[None].chunk(2, 1)  # (1, K, S, H) each
        k_pos = tensor([range(seen.start * size, seen.stop * size)])  # (1, S)
        masks = Masks(self.model.config, tensor([row.positions]), k_pos, q.dtype)
        return attention(q, k, v, masks[self.view], self.view.kernel)

    def store(self, k: Tensor, v: Tensor) -> None:
        new = to_stored(torch.cat((k, v), 1)[0], self.kv.dtype)  # (2 * K, M, stored_dim)
        # flatten gives a view of all slots, so this writes into kv.
        self.kv.flatten(1, 2).index_copy_(1, self.slots, new)


class Runner:
    """A model, and the keys and values of all its sequences in small blocks.

    Bytes: 2 * layers * blocks * block_size * K * stored_dim * itemsize.
    """

    def __init__(
        self, model: Transformer, num_blocks: int, block_size: int, kv_dtype: str = "auto"
    ) -> None:
        """Allocate the blocks of each layer; kv_dtype as in kv_cache.StaticCache."""
        K = model.config.num_key_value_heads
        self.model = model
        self.block_size = block_size
        # The heads come first, because attention takes one head at a time, and reads its keys up to
        # twice as fast if they are contiguous.
        self.kv = empty_layers(model, kv_dtype, 2 * K, num_blocks, block_size)

    @torch.no_grad()
    def forward(self, rows: list[Row]) -> Tensor:
        """Run the rows' new tokens. Returns the wanted logits, row after row: (R, V)."""
        self.wipe_new_blocks(rows)
        return self.model(*self.plan(rows))

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy the content of blocks in every layer. Each pair is (from, to)."""
        old, new = torch.tensor(pairs, device=self.model.device).unbind(1)
        for kv in self.kv:
            kv[:, new] = kv[:, old]

    def plan(self, rows: list[Row]) -> tuple[Tensor, Tensor, list[PagedLayerCache], Tensor]:
        """Plan one forward over the new tokens of several sequences, side by side.

        Decoding and prefill are not told apart.

        Returns:
            The tokens and their positions, (1, M) int64 each; one PagedLayerCache per layer, for
            this forward; and the indices of the tokens whose logits are wanted. All in the order of
            the rows.

        Example: block_size 4, rows ([7, 2], 5, [a]), ([3], 2, [b]), ([0, 1], 4, [c, d, e]):
            tokens [a, b, c, d, e], positions [5, 2, 4, 5, 6], slots [9, 14, 4, 5, 6],
            select [0, 1, 4]
        """
        size = self.block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        select: list[int] = []
        for row in rows:
            tokens += row.ids
            positions += row.positions
            slots += [row.blocks[p // size] * size + p % size for p in row.positions]
            select += range(len(tokens) - row.num_logits, len(tokens))
        tensor = partial(torch.tensor, device=self.model.device)
        places = tensor(slots)
        caches = [
            PagedLayerCache(kv, places, rows, self.model, view)
            for kv, view in zip(self.kv, self.model.config.views, strict=True)
        ]
        return tensor([tokens]), tensor([positions]), caches, tensor(select)

    def wipe_new_blocks(self, rows: list[Row]) -> None:
        """Wipe each row's last block if it is new and not filled. A NaN that its last owner left
        there would be masked, but attention multiplies what is masked by 0, and 0 * NaN is NaN."""
        size = self.block_size
        new = [
            row.blocks[row.positions.stop // size]
            for row in rows
            if 0 < row.positions.stop % size <= len(row.ids)  # all of its tokens are new
        ]
        if new:
            blocks = torch.tensor(new, device=self.model.device)
            for kv in self.kv:
                kv.index_fill_(1, blocks, 0)
