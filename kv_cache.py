"""The KV cache: keys and values in memory, as one slab per sequence or as blocks of a shared pool.

Keys and values of past tokens never change, so they are computed once and kept; each step then
costs one token instead of the whole text (Pope et al. 2022, arXiv:2211.05102, section 3.3, counts
the bytes). A slab suits one sequence whose longest length is known; blocks suit many sequences
that come, grow and go (Kwon et al. 2023, arXiv:2309.06180). What it buys: `bench.py latency` gives
the first token, which computes all of a prompt, beside those after it, which compute one. Does not
know the model, which sees either through model.LayerCache, nor who owns which block: paged.py does.
Read: StaticCache, Slab.attend, PagedCache, paged_attention. Next: tokenizer.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from model import Config, KVCache, LayerCache, attention

# --- One key or value, and one row of a step ------------------------------------------------------


def stored_dim(config: Config, dtype: torch.dtype) -> int:
    """Elements that a key or value takes in the cache: H, and for int8 four more for its scale."""
    return config.head_dim + 4 * (dtype == torch.int8)


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
    return (stored[..., :-4] * stored[..., -4:].contiguous().view(torch.float32)).to(dtype)


class Row(NamedTuple):
    """One sequence's share of a forward: its tokens start .. end - 1, and where its blocks are."""

    blocks: list[int]  # [] in a slab
    start: int
    end: int

    def of(self, ids: list[int]) -> list[int]:
        return ids[self.start : self.end]


# --- One slab per sequence ------------------------------------------------------------------------

BUCKET = 64  # positions


class Slab(LayerCache):
    """One layer's keys and values, where slot s holds position s."""

    def __init__(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Take encoded k and v, (B, K, capacity, stored_dim) each, and the slots in use: 0..S-1."""
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
        self.k.index_put_(at, encode(k, self.k.dtype))
        self.v.index_put_(at, encode(v, self.v.dtype))
        k, v = (decode(slab[:, :, :S], q.dtype) for slab in (self.k, self.v))  # (B, K, S, H)
        return attention(q, k, v, positions, self.slots[None], window)


class StaticCache(KVCache):
    """Keys and values of a batch of sequences, in slabs of `max_seq_len` positions.

    Bytes: 2 * layers * B * K * max_seq_len * stored_dim * itemsize. Nothing is ever cleared: a
    position is written before it can be seen, because a query sees only positions up to its own.
    That is also what makes rolling back free: generation just continues from an earlier position.
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
            dtype: of the keys and values: the model's own, or int8.
            device: the model's own.
        """
        # Whole buckets, and one slot that is never used: a view of *all* slots would be contiguous,
        # another case for torch.compile, which would compile again when a sequence gets there.
        slots = -(-max_seq_len // BUCKET) * BUCKET + 1
        shape = (batch_size, config.num_key_value_heads, slots, stored_dim(config, dtype))
        self.batch_size, self.max_seq_len = batch_size, max_seq_len
        self.slots = torch.arange(slots, device=device)
        # A memory each: torch.compile would guard the shape of one that they shared.
        self.layers = [
            Slab(*(torch.zeros(shape, dtype=dtype, device=device) for _ in "kv"), self.slots)
            for _ in range(config.num_hidden_layers)
        ]
        for slab in self.layers if self.slots.is_cuda else ():  # CUDA graphs write in place
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

    def step(self, rows: list[Row]) -> tuple["StaticCache", Tensor]:
        """Prepare a forward of one row: a view up to its end, and its positions, (1, T)."""
        ((_, start, end),) = rows
        return self.upto(end), torch.arange(start, end, device=self.slots.device)[None]

    def probe(self, length: int) -> tuple["StaticCache", Tensor]:
        """Return a view and positions 0 .. length - 1, (B, length), to compile a forward with: the
        length in use and the capacity are marked as sizes that will vary."""
        view = self.upto(length)
        torch._dynamo.mark_dynamic(view.slots, 0)
        for slab in view.layers:
            torch._dynamo.mark_dynamic(slab.k, 2)
            torch._dynamo.mark_dynamic(slab.v, 2)
        positions = torch.arange(length, device=self.slots.device)
        return view, positions.expand(self.batch_size, length)


# --- Blocks of a shared pool ----------------------------------------------------------------------


class Blocks(LayerCache):
    """One layer's pool, with the plan of one step (see PagedCache.step)."""

    def __init__(self, k: Tensor, v: Tensor, plan: tuple[Tensor, Tensor, Tensor]) -> None:
        self.k, self.v, self.plan = k, v, plan  # k, v: (blocks, block size, K, stored_dim)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, window: int | None
    ) -> Tensor:
        """Store k and v, then attend. B is 1 here: T counts the tokens of all rows."""
        paged = torch.ops.kilolm.paged_attention
        return paged(q, k, v, positions, self.k, self.v, *self.plan, window)


class PagedCache(KVCache):
    """The keys and values of all sequences, in one pool of small blocks per layer.

    Bytes: 2 * layers * blocks * block_size * K * stored_dim * itemsize.
    """

    batch_size = None  # a step has any number of sequences

    def __init__(
        self,
        config: Config,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
    ) -> None:
        heads = config.num_key_value_heads, stored_dim(config, dtype)
        shape = (num_blocks, block_size, *heads)
        # A memory each: of tensors that share one, torch.compile cannot tell what a write changes.
        self.pools = [
            tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in "kv")
            for _ in range(config.num_hidden_layers)
        ]
        self.num_blocks, self.block_size = num_blocks, block_size
        self.device = self.pools[0][0].device

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy the content of blocks, in every layer. Each pair is (from, to)."""
        if pairs:
            old, new = torch.tensor(pairs, device=self.device).unbind(1)
            for k, v in self.pools:
                k[new], v[new] = k[old], v[old]

    def step(self, rows: list[Row]) -> tuple["PagedCache", Tensor]:
        """Prepare one forward over the new tokens of several sequences, side by side.

        Rows with equally many new tokens stand together, and are attended together, as one batch
        whose keys reach to the end of the longest: the running sequences with their one token each,
        then each chunk of a prompt. So decoding and prefill need no code of their own.

        Args:
            rows: ordered by their number of new tokens.

        Returns:
            A cache that shares this one's memory, for that forward; and the positions of the
            tokens, (1, T) int64, row after row.

        Example: block_size 4, rows ([7, 2], 5, 6), ([3], 2, 3), ([0, 1], 4, 7):
            positions [5, 2, 4, 5, 6], slots [9, 14, 4, 5, 6], groups [[2, 1, 6], [1, 3, 7]]
        """
        positions, slots, groups, size = [], [], [], self.block_size
        for blocks, start, end in rows:
            new = range(start, end)
            positions += new
            slots += [blocks[p // size] * size + p % size for p in new]
            if groups and groups[-1][1] == len(new):
                groups[-1][0] += 1
                groups[-1][2] = max(groups[-1][2], end)
            else:
                groups.append([1, len(new), end])
        # Two rows and two columns at least: to torch.compile a size of 1 is another case.
        width = max(2, -(-max(row.end for row in rows) // size))
        tables = [(row.blocks + [0] * width)[:width] for row in rows]
        tables += [[0] * width] * (2 - len(tables))
        groups += [[0, 0, 0]] * (2 - len(groups))
        plan = [torch.tensor(x, device=self.device) for x in (slots, tables)]
        plan.append(torch.tensor(groups))  # read by the host: never on the device
        view = object.__new__(PagedCache)
        view.layers = [Blocks(k, v, tuple(plan)) for k, v in self.pools]
        return view, torch.tensor([positions], device=self.device)

    def probe(self, length: int) -> tuple["PagedCache", Tensor]:
        """Return a step of one row of `length` tokens, to compile a forward with: the numbers of
        rows, groups and blocks are marked as sizes that will vary. Overwrites the first blocks."""
        blocks = [i % self.num_blocks for i in range(-(-length // self.block_size))]
        view, positions = self.step([Row(blocks, 0, length)])
        for layer in view.layers:
            _, tables, groups = layer.plan
            for tensor in (tables, groups, layer.k, layer.v):
                torch._dynamo.mark_dynamic(tensor, 0)
            torch._dynamo.mark_dynamic(tables, 1)
        return view, positions


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    tables: Tensor,
    groups: Tensor,
    window: int | None,
) -> Tensor:
    """Store new keys and values in a pool, then attend to each row's own blocks.

    A group's blocks are copied side by side before the attention, which wants one tensor. The copy
    is read back from the processor's cache and costs little: for 32 rows of 128 tokens 0.06 ms a
    layer, where the attention takes 0.5 (1b shape, two Zen 5 cores).

    Args:
        q: (1, N, T, H).
        k, v: (1, K, T, H).
        positions: (1, T) int64.
        k_pool, v_pool: (blocks, block size, K, H), encoded; written to.
        slots: (T,) int64, where each new token goes: block * block size + offset.
        tables: (rows, W) int64 blocks; what lies past a row's length is never seen.
        groups: (groups, 3) int64 on the CPU: rows, new tokens of each, length of the longest.
        window: see LayerCache.attend.

    Returns:
        (1, N, T, H).
    """
    for pool, new in ((k_pool, k), (v_pool, v)):  # encoded: (T, K, H)
        pool.flatten(0, 1).index_copy_(0, slots, encode(new[0].transpose(0, 1), pool.dtype))
    out, size, row, at = torch.empty_like(q), k_pool.shape[1], 0, 0
    for B, T, S in groups.tolist():
        if not B:
            continue
        table = tables[row : row + B, : -(-S // size)].flatten()
        keys, values = (  # index_select: 6 times as fast as pool[table]
            decode(pool.index_select(0, table), q.dtype).view(B, -1, *k.shape[1::2]).transpose(1, 2)
            for pool in (k_pool, v_pool)
        )  # (B, K, S, H) each, S rounded up to whole blocks
        here = slice(at, at + B * T)
        queries = q[0, :, here].unflatten(1, (B, T)).transpose(0, 1)  # (B, N, T, H)
        at_keys = torch.arange(keys.shape[2], device=q.device)[None]
        q_pos = positions[0, here].view(B, T)
        y = attention(queries, keys, values, q_pos, at_keys, window)
        out[0, :, here] = y.transpose(0, 1).flatten(1, 2)
        row, at = row + B, at + B * T
    return out


# torch.compile need not look inside: how many groups there are, and how large, differs by the step.
_library = torch.library.Library("kilolm", "FRAGMENT")
_library.define(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor positions, Tensor(a!) k_pool, "
    "Tensor(b!) v_pool, Tensor slots, Tensor tables, Tensor groups, int? window) -> Tensor"
)
_library.impl("paged_attention", paged_attention, "CompositeExplicitAutograd")
torch.library.register_fake("kilolm::paged_attention", lambda q, *_: torch.empty_like(q))
