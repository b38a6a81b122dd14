"""Many sequences in one memory: fixed-size blocks, block tables, shared prefixes.

A sequence's keys and values need not lie side by side. As with an operating system's pages, its
block table maps position p to slot p % 16 of block table[p // 16], so memory is handed out 16
tokens at a time, nothing is reserved for tokens that may never come, and sequences that begin alike
map the same blocks. The first half is integers only: who owns which block. The second is tensors:
what a block holds, and a forward over rows of many sequences. What it buys: a prompt of 1,024
tokens, all but 16 of them cached, gets its first token 30 times as soon (`tools/bench.py prefix`,
on two Zen 5 cores). Knows no requests and no text. Papers: Kwon et al. 2023 (PagedAttention,
arXiv:2309.06180), Zheng et al. 2023 (prefix sharing, arXiv:2312.07104). Read: BlockTable,
BlockPool; then Runner.step, paged_attention. Next: scheduler.py.

    ids      t h e   k i n g   i s      t h e   k i n g   h a t h        block_size = 4
    tables   [   2,   5,   1   ]        [   2,   5,   7,   3    ]
    pool     0:free  1:used x1  2:used x2  3:used x1  4:cached  5:used x2  6:free  7:used x1
"""

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kv_cache import decode, empty_layers, encode
from model import LayerCache, Transformer, attention, check, visible

# --- Who owns which block -------------------------------------------------------------------------

# What a cached block holds: its tokens, and what stands before them, as the serial number of the
# block before; for a first block, the request's salt, in a tuple, so that no salt is a number. A
# serial number is never given twice, so equal keys mean equal texts from the start. This is vLLM's
# hash chain with Python's dict in place of sha256: a dict compares keys as well as their hashes, so
# a collision can serve nobody another's text (CVE-2025-25183).
Key = tuple[int | tuple[str | None], tuple[int, ...]]


@dataclass
class BlockTable:
    """One sequence's blocks.

    Example: block_size 4, blocks [7, 2], positions 3..5 -> slots [31, 8, 9]
    """

    blocks: list[int] = field(default_factory=list)  # may reach past `length`, never short of it
    length: int = 0  # tokens whose keys and values are in the blocks
    serials: list[int] = field(default_factory=list)  # of the blocks that can be found, see Key
    spoilt: bool = False  # its keys or values may be NaN: see BlockPool.free


class BlockPool:
    """Hands out blocks, counts who uses them, and keeps freed ones for the next equal prefix.

    A block is free (holds nothing of use), used (in `refs` tables) or cached (in no table, but its
    content can be found again). Cached blocks are given up least recently used first, when no free
    one is left.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        """Raises ValueError where there is no block, or a block has no slot."""
        self.num_blocks = check("blocks that fit into --kv-memory", num_blocks, int)
        self.block_size = check("block_size", block_size, int)
        self.refs = [0] * num_blocks
        self._free = list(range(num_blocks))[::-1]  # a stack, lowest block on top
        self.dirty: set[int] = set()  # must be wiped before the next use
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._found: dict[Key, tuple[int, int]] = {}  # key -> block, serial
        self._keys: dict[int, Key] = {}  # block -> key
        self._serials = itertools.count()

    @property
    def num_available(self) -> int:
        """Blocks that could be handed out now."""
        return len(self._free) + len(self.cached)

    def reuse(self, table: BlockTable, ids: list[int], salt: str | None = None) -> None:
        """Map the longest known prefix of `ids` into an empty table.

        At least one token is left to compute: without its logits there would be nothing to sample
        from (nano-vllm#144).

        Args:
            salt: only prefixes of requests with the same salt are found. Without it, how fast a
                reply comes can tell one user what another has asked.
        """
        assert not table.blocks
        before: int | tuple[str | None] = (salt,)
        for i in range((len(ids) - 1) // self.block_size):
            found = self._found.get((before, self._tokens(ids, i)))
            if found is None:
                break
            block, before = found
            self.cached.pop(block, None)
            self.refs[block] += 1
            table.blocks.append(block)
            table.serials.append(before)
        table.length = len(table.blocks) * self.block_size

    def cost(self, table: BlockTable, end: int) -> int:
        """Blocks that grow(table, end) would take: new ones, and copies of shared ones."""
        return max(0, -(-end // self.block_size) - len(table.blocks)) + len(self._shared(table))

    def grow(self, table: BlockTable, end: int) -> list[tuple[int, int]]:
        """Make positions table.length .. end - 1 writable. The caller has compared the cost.

        Returns:
            (from, to) blocks whose content must be copied before the write: where the sequences of
            one prompt diverge within a block that they share (copy-on-write); and for a new block
            that is dirty, from the empty one, which is `num_blocks`.

        Example: block_size 4, blocks [7, 2], length 6, block 2 in two tables, end 10:
            blocks become [7, 0, 1], and (2, 0) is returned.
        """
        assert self.cost(table, end) <= self.num_available, "out of blocks"
        copies = []
        for i in self._shared(table):
            old, table.blocks[i] = table.blocks[i], self._take()
            self.refs[old] -= 1  # it was 2 or more
            copies.append((old, table.blocks[i]))
        while len(table.blocks) * self.block_size < end:
            table.blocks.append(block := self._take())
            copies += [(self.num_blocks, block)] * (block in self.dirty)
        self.dirty.difference_update(table.blocks)
        return copies

    def commit(self, table: BlockTable, ids: list[int], end: int, salt: str | None = None) -> None:
        """Note that positions up to `end` have been computed, and let full blocks be found.

        Only now: a block that is announced before its forward has run would be read by another
        sequence of the same step. Where two sequences compute the same block at once, the first
        is found from then on, and the second is its owner's alone (nano-vllm#219).
        """
        assert table.length <= end <= len(table.blocks) * self.block_size
        table.length = end
        for i in range(len(table.serials), end // self.block_size):
            key = (table.serials[-1] if i else (salt,), self._tokens(ids, i))
            if key not in self._found:
                self._found[key] = table.blocks[i], next(self._serials)
                self._keys[table.blocks[i]] = key
            table.serials.append(self._found[key][1])

    def fork(self, table: BlockTable) -> BlockTable:
        """Return a second table over the same blocks."""
        for block in table.blocks:
            self.refs[block] += 1
        return BlockTable([*table.blocks], table.length, [*table.serials])

    def free(self, table: BlockTable) -> None:
        """Empty a table; blocks that nobody else uses become cached or free.

        Those of a spoilt one are found no more, and wiped before they are used again: attention
        multiplies what is masked by 0, and 0 * NaN is NaN.
        """
        # Last block first, so that it is also given up first: a block is of no use once the one
        # before it is gone.
        for block in reversed(table.blocks):
            if table.spoilt:
                self.dirty.add(block)
                self._found.pop(self._keys.pop(block, None), None)
            self.refs[block] -= 1
            if not self.refs[block]:
                if block in self._keys:
                    self.cached[block] = None
                else:
                    self._free.append(block)
        table.blocks, table.length, table.serials, table.spoilt = [], 0, [], False

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self.cached.popitem(last=False)
            # Or its old text would be served (nano-vllm#163).
            del self._found[self._keys.pop(block)]
        self.refs[block] = 1
        return block

    def _shared(self, table: BlockTable) -> list[int]:
        """Indices of the blocks that a write at table.length or after would change for others."""
        first = table.length // self.block_size
        return [i for i in range(first, len(table.blocks)) if self.refs[table.blocks[i]] > 1]

    def _tokens(self, ids: list[int], i: int) -> tuple[int, ...]:
        return tuple(ids[i * self.block_size : (i + 1) * self.block_size])


# --- What the blocks hold -------------------------------------------------------------------------


class Row(NamedTuple):
    """One sequence's share of a forward."""

    blocks: list[int]  # its block table's
    start: int  # the position of the first new token
    ids: list[int]  # the new tokens
    wanted: int = 1  # of how many of them, from the end, the logits are wanted


class Blocks(LayerCache):
    """One layer's pool, with the plan of one step."""

    def __init__(self, k: Tensor, v: Tensor, *plan: Tensor) -> None:
        """Take k and v, (blocks, block size, K, stored_dim) each; and see paged_attention."""
        self.k, self.v, self.plan = k, v, plan

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, then attend. B is 1 here: T counts the tokens of all rows."""
        return torch.ops.kilolm.paged_attention(q, k, v, self.k, self.v, *self.plan)


class Runner:
    """A model, and the keys and values of all its sequences, in one pool of small blocks per layer.

    Bytes: 2 * layers * blocks * block_size * K * stored_dim * itemsize. A step copies at most
    `most` blocks at a time, or one row, if that is more.
    """

    def __init__(
        self, model: Transformer, num_blocks: int, block_size: int, kv_dtype: str = "auto"
    ) -> None:
        """Allocate the pools; kv_dtype as in kv_cache.StaticCache."""
        self.model, self.block_size, K = model, block_size, model.config.num_key_value_heads
        self.num_blocks = num_blocks
        # One more, never written: what tables are filled up with, and dirty blocks wiped from.
        self.pools = empty_layers(model, kv_dtype, num_blocks + 1, block_size, K)
        # Blocks that are attended together. On a CPU 2 MB of keys: the memory of larger copies came
        # fresh from the system in each layer, page after page; 48 rows of 12 kv heads then took 208
        # ms a step, and take 148 (110m shape, float32, two Zen 3 cores). For a GPU more, so that
        # calls are few; not measured by us.
        size = block_size * K * model.config.head_dim * model.dtype.itemsize  # as it is attended
        self.most = min(num_blocks, (2**21 if model.device.type == "cpu" else 2**25) // size)

    @torch.no_grad()
    def run(self, rows: list[Row]) -> Tensor:
        """Run the rows' new tokens, side by side. Returns the wanted logits, row after row:
        (R, V)."""
        return self.model(*self.step(rows))

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy the content of blocks, in every layer. Each pair is (from, to)."""
        old, new = torch.tensor(pairs, device=self.model.device).unbind(1)
        for k, v in self.pools:
            k[new], v[new] = k[old], v[old]

    def step(self, rows: list[Row]) -> tuple[Tensor, Tensor, list[Blocks], Tensor]:
        """Prepare one forward over the new tokens of several sequences, side by side.

        Rows with equally many new tokens, the longest first and as many as `most` blocks hold, are
        attended together, as one batch whose keys reach to the end of the longest: the running
        sequences with their one token each, then each chunk of a prompt. So decoding and prefill
        need no code of their own, and what a long sequence adds to short ones has a bound.

        Returns:
            The tokens and their positions, (1, T) int64 each, group after group; the layers'
            caches, for that forward; and which of the tokens' logits the rows want, in the order
            of the rows.

        Example: block_size 4, rows ([0, 1], 4, [c, d, e]), ([7, 2], 5, [a]), ([3], 2, [b]):
            tokens [a, b, c, d, e], positions [5, 2, 4, 5, 6], slots [9, 14, 4, 5, 6],
            groups [2, 1, 2, 1, 3, 2], tables [7, 2, 3, 8, 0, 1, 0] (of 8 blocks), select [4, 0, 1]
        """
        rows = [Row(*row) for row in rows]  # from another rank they come as lists
        size, config, device = self.block_size, self.model.config, self.model.device
        tokens, positions, slots, tables, groups, masks = [], [], [], [], [], []
        last = [0] * len(rows)  # the index of each row's last token
        order = sorted(range(len(rows)), key=lambda i: (len(rows[i].ids), -rows[i].start))
        while order:  # the longest of those with the fewest new tokens, and what it stands with
            T = len(rows[order[0]].ids)
            width = -(-(rows[order[0]].start + T) // size)
            part = [i for i in order[: max(1, self.most // width)] if len(rows[i].ids) == T]
            del order[: len(part)]
            groups += [len(part), T, width]
            for i in part:
                blocks, start, ids, _ = rows[i]
                tokens += ids
                positions += (new := range(start, start + T))
                slots += [blocks[p // size] * size + p % size for p in new]
                tables += (blocks + [self.num_blocks] * width)[:width]
                last[i] = len(tokens) - 1
            at = torch.tensor(positions[-len(part) * T :]).view(-1, T)
            masks.append(visible(config, at, torch.arange(width * size)[None]))
        select = [end - i for end, row in zip(last, rows) for i in range(row.wanted)[::-1]]
        mask = {w: torch.cat([m[w].flatten() for m in masks]).to(device) for w in masks[0]}
        tables.append(0)  # two at least: to torch.compile a size of 1 is another case
        tokens, positions, slots, tables, select = (
            torch.tensor(x, device=device) for x in (tokens, positions, slots, tables, select)
        )
        plan = slots, tables, torch.tensor(groups)  # these are read by the host: never on a device
        pools = zip(self.pools, config.windows, strict=True)
        layers = [Blocks(k, v, *plan, mask[window]) for (k, v), window in pools]
        return tokens[None], positions[None], layers, select


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, *plan: Tensor
) -> Tensor:
    """Store new keys and values in a pool, then attend to each row's own blocks.

    A group's blocks are copied side by side before the attention, which wants one tensor. The copy
    is read back from the processor's cache and costs little: for 32 rows of 128 tokens 0.06 ms a
    layer, where the attention takes 0.5 (1b shape, two Zen 5 cores).

    Args:
        q: (1, N, T, H).
        k, v: (1, K, T, H).
        k_pool, v_pool: (blocks, block size, K, H), encoded; written to.
        plan: slots, tables, groups and mask, flat, the last three group after group.
            slots: (T,) int64, where each new token goes: block * block size + offset.
            tables: int64, each row's blocks; what lies past its length is never seen.
            groups: int64, on the CPU: how many rows, new tokens of each, and blocks of each.
            mask: bool, see model.visible.

    Returns:
        (1, N, T, H).
    """
    slots, tables, groups, mask = plan
    for pool, new in ((k_pool, k), (v_pool, v)):  # encoded: (T, K, H)
        pool.flatten(0, 1).index_copy_(0, slots, encode(new[0].transpose(0, 1), pool.dtype))
    out, size, row, block, seen = torch.empty_like(q), k_pool.shape[1], 0, 0, 0
    heads = q.shape[1] // k.shape[1]
    for B, T, W in groups.view(-1, 3).tolist():
        table, block = tables[block : block + B * W], block + B * W
        keys, values = (  # index_select: 6 times as fast as pool[table]
            decode(pool.index_select(0, table), q.dtype).view(B, -1, *k.shape[1::2]).transpose(1, 2)
            for pool in (k_pool, v_pool)
        )  # (B, K, S, H) each, S = W whole blocks
        here, row = slice(row, row + B * T), row + B * T
        queries = q[0, :, here].unflatten(1, (B, T)).transpose(0, 1)  # (B, N, T, H)
        count = B * heads * T * W * size
        visible, seen = mask[seen : seen + count].view(B, 1, heads * T, -1), seen + count
        y = attention(queries, keys, values, visible)
        out[0, :, here] = y.transpose(0, 1).flatten(1, 2)
    return out


# torch.compile need not look inside: how many groups there are, and how large, differs by the step.
library = torch.library.Library("kilolm", "FRAGMENT")
library.define(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, "
    "Tensor slots, Tensor tables, Tensor groups, Tensor mask) -> Tensor"
)
library.impl("paged_attention", paged_attention, "CompositeExplicitAutograd")
torch.library.register_fake("kilolm::paged_attention", lambda q, *_: torch.empty_like(q))
