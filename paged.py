"""Which block of the cache holds which token: fixed-size blocks, block tables, shared prefixes.

A sequence's keys and values need not lie side by side. As with an operating system's pages, its
block table maps position p to slot p % 16 of block table[p // 16], so memory is handed out 16
tokens at a time, nothing is reserved for tokens that may never come, and sequences that begin alike
map the same blocks. Integers only: this file imports no torch and never sees a key or a value
(kv_cache.PagedCache does). What it buys: a prompt of 1,024 tokens, all but 16 of them cached, gets
its first token 30 times as soon (`bench.py prefix`, on two Zen 5 cores). Papers: Kwon et al. 2023
(PagedAttention, arXiv:2309.06180), Zheng et al. 2023 (prefix sharing, arXiv:2312.07104). Read:
BlockTable, BlockPool. Next: scheduler.py.

    ids      t h e   k i n g   i s      t h e   k i n g   h a t h        block_size = 4
    tables   [   2,   5,   1   ]        [   2,   5,   7,   3    ]
    pool     0:free  1:used x1  2:used x2  3:used x1  4:cached  5:used x2  6:free  7:used x1
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

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


class BlockPool:
    """Hands out blocks, counts who uses them, and keeps freed ones for the next equal prefix.

    A block is free (holds nothing of use), used (in `refs` tables) or cached (in no table, but its
    content can be found again). Cached blocks are given up least recently used first, when no free
    one is left.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        """Raises ValueError where there is no block, or a block has no slot."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a cache of {num_blocks} blocks of {block_size} tokens holds nothing: "
                "raise --kv-memory"
            )
        self.num_blocks, self.block_size = num_blocks, block_size
        self.refs = [0] * num_blocks
        self._free = list(range(num_blocks))[::-1]  # a stack, lowest block on top
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._found: dict[Key, tuple[int, int]] = {}  # key -> block, serial
        self._keys: dict[int, Key] = {}  # block -> key
        self._serials = itertools.count()

    @property
    def num_available(self) -> int:
        """Blocks that could be handed out now."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> list[int]:
        """Blocks that hold nothing but what could be found again."""
        return [*self._cached]

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
            self._cached.pop(block, None)
            self.refs[block] += 1
            table.blocks.append(block)
            table.serials.append(before)
        table.length = len(table.blocks) * self.block_size

    def cost(self, table: BlockTable, end: int) -> int:
        """Blocks that grow(table, end) would take: new ones, and copies of shared ones."""
        new = -(-end // self.block_size) - len(table.blocks)
        return max(new, 0) + len(self._shared(table))

    def grow(self, table: BlockTable, end: int) -> list[tuple[int, int]]:
        """Make positions table.length .. end - 1 writable. The caller has compared the cost.

        Returns:
            (from, to) blocks whose content must be copied before the write: where the sequences of
            one prompt diverge within a block that they share (copy-on-write).

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
            table.blocks.append(self._take())
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
        """Empty a table; blocks that nobody else uses become cached or free."""
        # Last block first, so that it is also given up first: a block is of no use once the one
        # before it is gone.
        for block in reversed(table.blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                if block in self._keys:
                    self._cached[block] = None
                else:
                    self._free.append(block)
        table.blocks, table.length, table.serials = [], 0, []

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Assert the pool's invariant, given every table in use."""
        counts = [0] * self.num_blocks
        for table in tables:
            assert len(table.serials) <= table.length // self.block_size
            assert table.length <= len(table.blocks) * self.block_size
            for block in table.blocks:
                counts[block] += 1
        assert counts == self.refs, "reference counts differ from the tables"
        used = {block for block, count in enumerate(counts) if count}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & used and not cached & used and not free & cached, "a block in two states"
        assert len(free) + len(used) + len(cached) == self.num_blocks, "a block is lost"
        assert {b: k for k, (b, _) in self._found.items()} == self._keys, "a stale key"
        assert cached <= self._keys.keys() and not free & self._keys.keys()

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
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
