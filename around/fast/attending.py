"""How the caches attend fast: what StaticLayerCache and PagedLayerCache compute, sooner.

attend_fast adds a hook to a model, which replaces the layers' caches before each forward. So they
do not know of this file, and without it the tokens are the same, but for rounding. What
replaces a class of the root overrides how it attends, and stores as it does. Attention itself is
model.attention, whatever the path, so a change there holds for all of them. Read: fast_caches,
groups_of, Group, FastLayerCache, attend_to_prompt. What a compiled step does (StepLayerCache,
attend_to_blocks) can wait.
"""

from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from around.settings import CHUNK
from kv_cache import BUCKET, StaticLayerCache, from_stored
from model import Masks, Transformer, View, attention, products, softcap
from paged import PagedLayerCache, Row

from . import packed

# A row of at least this many new tokens counts as a prompt. Others are decoding, with or without
# guesses.
PROMPT = 16


def attend_fast(model: Transformer) -> None:
    """Let a model attend fast, with either cache."""
    replace_caches(model, fast_caches)


def replace_caches(model: Transformer, change: Callable[..., list]) -> None:
    """Before each forward with caches, replace these by what `change` makes of the model and the
    arguments of Transformer.forward."""

    def hook(model: Any, args: tuple) -> tuple:
        if not any(args[2:3]):  # there are no caches; see model.NoCache
            return args
        return *args[:2], change(model, *args), *args[3:]

    model.register_forward_pre_hook(hook)


def fast_caches(
    model: Transformer,
    tokens: Tensor,
    positions: Tensor,
    caches: list,
    *select: Tensor,
    blocks: Any = None,
) -> list:
    """Return the layers' caches as they attend fast, where that pays.

    Args:
        blocks: what replaces PagedLayerCache; None: FastLayerCache.
    """
    if tokens.is_cpu and tokens.shape[1] >= PROMPT:
        caches = in_blocks(model, positions, caches)
    if type(caches[0]) is not PagedLayerCache:
        return caches
    groups = {
        view: [*groups_of(cache)] for view, cache in {cache.view: cache for cache in caches}.items()
    }
    return [
        (blocks or FastLayerCache)(**vars(cache) | {"rows": groups[cache.view]}) for cache in caches
    ]


def in_blocks(model: Transformer, positions: Tensor, caches: list) -> list:
    """Return the layers of a static cache of one sequence as those of a paged one: a slab is blocks
    of BUCKET slots, side by side. Others are returned as they are."""
    if type(caches[0]) is not StaticLayerCache or len(positions) > 1:
        return caches
    places = positions[0].tolist()  # they stand for the ids, of which only the number is read
    row = Row([*range(places[-1] // BUCKET + 1)], places[0], places)
    return [
        PagedLayerCache(each.kv[0].unflatten(1, (-1, BUCKET)), each.slots, [row], model, each.view)
        for each in caches
    ]


# --- Blocks ---------------------------------------------------------------------------------------


# Bytes of keys and values that are copied for one call of attention, unless a single row has more.
# On a CPU larger copies get fresh pages from the system in each layer, which takes a third longer.
# A GPU gets 16 times as much, so that there are few calls; we have not measured that.
MAX_COPY = 2**22


def max_blocks(kv: Tensor) -> int:
    """How many blocks MAX_COPY bytes are."""
    return MAX_COPY * (1 if kv.is_cpu else 16) // kv[:, 0].nbytes


def groups_of(cache: PagedLayerCache) -> Iterator["Group"]:
    """Split the rows of a layer's cache into groups, which serve all layers that have its view.
    Attention runs once for each, as one batch.

    A group is a run of rows with equally many new tokens, and no more blocks than max_blocks says,
    unless it is a single row. Each row is padded to as many blocks as the longest one has. Padding
    is least if the longest context comes first; see scheduler.run_order.

    Example: block_size 4, max_blocks 4. Three rows have 1 new token each, at positions 5, 3 and 2.
        The first of them needs two blocks, so only one other fits beside it. A fourth row has 3 new
        tokens. So the groups have 2, 1 and 1 rows.
    """
    group: list[Row] = []
    width = 0
    for row in cache.rows:
        num_blocks = len(row.seen(cache.view, cache.kv.shape[2]))
        width = max(width, num_blocks)
        fits = (len(group) + 1) * width <= max_blocks(cache.kv)
        if group and not (fits and len(row.ids) == len(group[0].ids)):
            yield Group(group, cache)
            group = []
            width = num_blocks
        group.append(row)
    yield Group(group, cache)


class Group:
    """B rows with T new tokens each: one call of attention, under one view.

    Attributes:
        ids: as many as the rows' new tokens, so that a group can stand for a row.
        table: (B, W) int64, the blocks that each row sees. A row with fewer is padded by the first
            of them, at positions that no query sees.
        starts: the positions at which the rows' first blocks begin.
    """

    def __init__(self, rows: list[Row], cache: PagedLayerCache) -> None:
        self.rows = rows
        self.cache = cache
        self.ids = rows[0].ids * len(rows)
        self.tensor = partial(torch.tensor, device=cache.kv.device)
        size = cache.kv.shape[2]
        spans = [row.seen(cache.view, size) for row in rows]
        self.starts = [span.start * size for span in spans]
        seen = [row.blocks[span.start : span.stop] for row, span in zip(rows, spans)]
        # For the compiler. It takes a size of 1 as a case of its own. And it would compile again
        # where widths under two views become equal, or different, so they are never equal: even
        # without a window, and odd with one.
        width = max(2, *map(len, seen))
        width += (width + (cache.view.window is not None)) % 2
        self.table = self.tensor([each + each[:1] * (width - len(each)) for each in seen])

    @cached_property
    def mask(self) -> Tensor:
        """What the rows see of their blocks' positions; see Masks."""
        model = self.cache.model
        places = range(self.table.shape[1] * self.cache.kv.shape[2])
        q_pos = self.tensor([row.positions for row in self.rows])  # (B, T)
        k_pos = self.tensor(self.starts)[:, None] + self.tensor(places)  # (B, S)
        return Masks(model.config, q_pos, k_pos, model.dtype)[self.cache.view]


class FastLayerCache(PagedLayerCache):
    """One layer's keys and values in blocks. `rows` are Groups. Rows are copied a few at a time: a
    short copy is still in the processor's cache when attention reads it."""

    def attend_row(self, q: Tensor, group: Any) -> Tensor:
        """Attend to the blocks of a group's rows: (1, N, B * T, H) -> the same."""
        rows = q[0].unflatten(1, (len(group.rows), -1)).transpose(0, 1)  # (B, N, T, H)
        return self.attend_group(rows, group).transpose(0, 1).flatten(1, 2)[None]

    def attend_group(self, q: Tensor, group: Group) -> Tensor:
        """Do the same, (B, N, T, H) -> the same."""
        # self.kv[:, group.table] would take twice as long.
        blocks = self.kv.index_select(1, group.table.flatten()).unflatten(1, group.table.shape)
        stored = blocks.flatten(2, 3).transpose(0, 1)  # (B, 2 * K, S, stored_dim)
        k, v = from_stored(stored, q.dtype).chunk(2, 1)  # (B, K, S, H) each
        if len(q) == 1 and q.shape[2] >= PROMPT and q.is_cpu:
            end = group.rows[0].positions.stop - group.starts[0]
            return attend_to_prompt(q, k[:, :, :end], v[:, :, :end], self.view)
        return attention(q, k, v, group.mask, self.view.kernel)


class StepLayerCache(PagedLayerCache):
    """One layer's keys and values in blocks, for one new token in each row, compiled as a part of
    the model's layer. It has nothing but the cap of its view and the tensors that the compiler
    sees: kv and slots of PagedLayerCache, a group's table, and its mask, (B, 1, N / K, W, block
    size)."""

    def __init__(self, cap: float | None, *tensors: Tensor) -> None:
        self.cap = cap
        self.tensors = tensors
        self.kv, self.slots, self.table, self.mask = tensors

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.store(k, v)
        y = attend_to_blocks(q.transpose(0, 2), self.kv, self.table, self.mask, self.cap)
        return y.transpose(0, 2)


def attend_to_blocks(
    q: Tensor, kv: Tensor, table: Tensor, mask: Tensor, cap: float | None = None
) -> Tensor:
    """Do what model.attention does, for one query of each row and head, and add up in float32.

    PyTorch's kernel wants a row's keys side by side, and most of its time goes into copying them.
    The loops are plain operators, and copy nothing: the compiler puts the look-up of the blocks
    into the loops that multiply them, and these loops into the code of the layer. The heads that
    share a key are written one after the other, so that the compiler puts them into one loop, which
    reads the key once. Their time as a multiple of the kernel's, copies included, with AVX2 alone
    (Zen 3) and 3 key heads of 64:
                             bfloat16; heads that share a key    float32
                             1      3      4      8              1      3      4      8
            1 row of 64      0.58   0.76   0.80   1.02           0.59   0.79   0.84   0.81
            1 row of 2,048   0.33   0.77   1.19   1.52           0.83   0.80   0.89   1.13
            8 rows of 512    0.31   0.82   1.04   1.22           0.87   0.73   0.79   1.21
            32 rows of 64    0.35   0.59   0.78   1.01           0.76   0.64   0.57   0.94
            32 rows of 512   0.27   0.67   0.96   1.42           0.53   0.63   0.77   0.89
            32 of 2,048      0.36   0.75   1.06   1.38           0.50   0.20   0.76   0.84

    Args:
        q: (B, N, 1, H).
        kv: as of PagedLayerCache.
        table: (B, W), as of Group.
        mask: (B or 1, 1, N / K, W, block size); see model.Masks.
        cap: see model.View.

    Returns:
        (B, N, 1, H).
    """
    blocks = from_stored(kv[:, table].transpose(0, 1), q.dtype)
    keys, values = blocks.chunk(2, 1)  # (B, K, W, block size, H) each

    # A kernel gets k and v, but this one reads the blocks where they lie, by `keys` and `values`.
    def loops(q: Tensor, _k: Tensor, _v: Tensor, mask: Tensor) -> Tensor:
        queries = q[:, :, :, None, None].float().unbind(2)  # N / K times (B, K, 1, 1, H)
        scores = torch.stack([(query * keys).sum(-1).flatten(2) for query in queries], 2)
        # The scores are scaled and not q, because for q the compiler would compute the root anew
        # for each key.
        scores = softcap(scores * q.shape[3] ** -0.5, cap) + mask  # (B, K, N / K, S)
        weights = (scores - scores.amax(-1, True)).exp()
        parts = weights.unflatten(3, keys.shape[2:4])[..., None].unbind(2)
        # (B, K, N / K, H): the values are added within each block, then over all.
        total = torch.stack([(part * values).sum(3).sum(2) for part in parts], 2)
        # The softmax's division comes last, so that it divides H numbers and not S.
        return (total / weights.sum(-1, True)).to(q.dtype)

    # A change of attention() may compute something else there, with all keys side by side.
    return attention(q, keys.flatten(2, 3), values.flatten(2, 3), mask.flatten(3), loops)


# --- Prompts --------------------------------------------------------------------------------------


PIECE = 128  # queries
MAX_SCORES = 2**23  # of `products` at once: as of 64 queries, 32 heads and 4,096 keys


def attend_to_prompt(q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
    """Attention of the last T of S tokens on a CPU, in pieces of few queries.

    Each piece gets only the keys that one of its queries sees, and a mask of its own. So a causal
    prompt computes little that is hidden, a window leaves out what lies before it, and masks stay
    small however long the text is.

    Args:
        q: (B, N, T, H), where T is at least PROMPT.
        k, v: (B, K, S, H), where K divides N: the keys of the S - T tokens that came before, of
            which there may be none, then those of the T tokens.

    Returns:
        (B, N, T, H).

    Example: T = 2, S = 5, window 3, in one piece: its keys are 1 to 4. Query 3 sees the keys 1, 2
        and 3, and query 4 the keys 2, 3 and 4: [[1, 1, 1, 0], [0, 1, 1, 1]], where 0 is hidden.
    """
    if q.dtype == torch.bfloat16 and not packed.FAST_BFLOAT16:
        # Here float32 takes 0.7 to 0.9 of the time. Two products in bfloat16, which are fast on
        # AMD, would take 1.2 to 3.5 times as long as that (an Emerald Rapids without AMX, and one
        # whose AVX-512 for bfloat16 is hidden too).
        return attend_to_prompt(q.float(), k.float(), v.float(), view).to(q.dtype)
    S = k.shape[2]
    window = min(view.window or S, S)
    # PyTorch's fused kernel profits from large pieces; products, and a window, from small ones. An
    # engine's chunk is a little longer than CHUNK, and still one piece. In bfloat16 the kernel
    # takes half as long as products with AMX (Sapphire Rapids), and two to three times as long on
    # AMD (Zen 5). Both take a mask that covers the last keys only.
    kernel: Callable = in_two
    piece = PIECE if window < S else CHUNK + CHUNK // 4
    if view.cap or (q.dtype == torch.bfloat16 and not packed.CAN("amx_tile")):
        kernel = partial(products, cap=view.cap)
        piece = min(PIECE, max(1, MAX_SCORES // (q.shape[1] * S)))
    start = S - q.shape[2]  # the position of a piece's first query
    attended = []
    for queries in q.split(piece, 2):
        end = start + queries.shape[2]
        first = max(0, start - window + 1)
        # The mask covers the earlier keys only if the window hides one of them from a query.
        earlier = 0 if end <= window else start - first
        mask = mask_of(end - start, earlier, window, q.shape[1] // k.shape[1], q.dtype)
        seen = slice(first, end)
        attended.append(attention(queries, k[:, :, seen], v[:, :, seen], mask, kernel))
        start = end
    return torch.cat(attended, 2)


@lru_cache(16)  # all layers have masks of the same few shapes
def mask_of(T: int, earlier: int, window: int, heads: int, dtype: Any) -> Tensor:
    """What T queries see of their own keys and of some before, as in model.Masks:
    (heads * T, earlier + T), 0 or -inf."""
    hidden = torch.full((T, earlier + T), -torch.inf, dtype=dtype)
    return (hidden.triu(earlier + 1) + hidden.tril(earlier - window)).repeat(heads, 1)


def in_two(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Do what model.products does by PyTorch's fused kernel, which is up to a quarter faster
    without a mask: first over the keys that all queries see, then over those that the mask covers.
    The kernel also returns the logarithm of each softmax's sum, (B, K, N / K * T), by which the two
    are weighed."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    seen = k.shape[2] - mask.shape[-1]
    y, total = kernel(q, k[:, :, seen:], v[:, :, seen:], attn_mask=mask)
    if seen:
        before, total_before = kernel(q, k[:, :, :seen], v[:, :, :seen])
        share = (total_before - total).sigmoid()[..., None].to(q.dtype)
        y = y.lerp(before, share)
    return y
