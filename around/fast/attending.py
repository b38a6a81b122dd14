"""How the caches attend fast: what kv_cache.Slab and paged.Blocks compute, sooner.

attend_fast adds a hook to a model, which replaces the layers of a cache before each forward. So the
caches do not know of this file, and without it the tokens are the same. What replaces a class of
the root overrides `attend` and `attend_group` alone. Attention itself is model.attention, whatever
the path, so a change there holds for all of them. Read: attend_fast, FastGroup, FastBlocks,
attend_to_prompt.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from around.settings import MAX_PAIRS
from kv_cache import Slab, decode
from model import Masks, Transformer, attention
from paged import MAX_COPY, Blocks, Group, Row, Runner, groups_of

from .packed import onednn_multiplies

# A row of at least this many new tokens counts as a prompt. Others are decoding, with or without
# guesses.
PROMPT = 16


def attend_fast(model: Transformer, kind: "type[FastBlocks] | None" = None) -> None:
    """Let a model attend fast, with either cache. `kind` is the class of a paged cache's layers."""
    model.register_forward_pre_hook(partial(replace_layers, kind or FastBlocks))


def replace_layers(kind: Any, model: Any, args: tuple) -> tuple:
    """Replace each layer of a cache in the arguments of Transformer.forward, where that pays."""
    if len(args) == 2:  # there is no cache; see model.NoCache
        return args
    tokens, positions, layers, *select = args
    first = layers[0]
    if type(first) is Slab and tokens.is_cpu and tokens.shape[1] >= PROMPT:
        layers = [PromptSlab(**vars(layer)) for layer in layers]
    elif type(first) is Blocks:
        groups = kind.groups_of(first.groups)
        layers = [kind(layer.kv, layer.slots, groups, layer.window) for layer in layers]
    return tokens, positions, layers, *select


# --- Blocks ---------------------------------------------------------------------------------------


class FastGroup:
    """A Group whose blocks are in ascending order, because they often follow each other then: the
    cached blocks 5 6 7 of a sequence that has ended are handed out again as 7 6 5. A prompt keeps
    the order of its text, so that each piece of it can leave out the keys that it does not see.

    Attributes:
        rows, shape, table, masks: see paged.Group.
        flat_table: (B, 2 * K, W) int64: for each head, the row's blocks as indices into
            Blocks.kv.flatten(0, 1), where block b of head h has the index h * num_blocks + b.
        span: the blocks of `table` as one slice, if each follows the one before it.
        is_prompt: whether the rows are prompts.
    """

    def __init__(self, rows: list[Row], runner: Runner) -> None:
        self.rows = rows
        self.shape = len(rows), len(rows[0].ids)
        size = runner.block_size
        device = runner.model.device
        self.is_prompt = self.shape[1] >= PROMPT
        used = [row.blocks[: row.num_blocks(size)] for row in rows]
        W = max(2, *map(len, used))  # 2, as the compiler takes a size of 1 as a case of its own
        table = torch.tensor([blocks + blocks[-1:] * (W - len(blocks)) for blocks in used])
        order = torch.arange(W).expand_as(table)  # the place of each block in its row's text
        if not self.is_prompt:
            table, order = table.sort()
        has_gap = (table.flatten().diff() != 1).any()
        self.span = None if has_gap else slice(int(table[0, 0]), int(table[-1, -1]) + 1)
        num_heads, num_blocks = runner.kv[0].shape[:2]  # 2 * K heads
        first_of_head = torch.arange(num_heads)[:, None] * num_blocks
        self.flat_table = (table[:, None] + first_of_head).to(device)
        self.table = table.to(device)
        positions = torch.tensor([row.positions for row in rows], device=device)  # (B, T)
        key_positions = order[..., None] * size + torch.arange(size)  # (B, W, block size)
        key_positions = key_positions.flatten(1).to(device)  # (B, S)
        self.masks = Masks(runner.model.config, positions, key_positions)


class FastBlocks(Blocks):
    """One layer's keys and values in blocks, of which as few as possible are copied."""

    max_bytes = MAX_COPY

    @classmethod
    def groups_of(cls, groups: list[Group]) -> list[FastGroup]:
        """Plan the rows of a forward anew, in groups of this class's own size."""
        runner = groups[0].runner
        size = runner.block_size
        rows = [row for group in groups for row in group.rows]
        made = []
        for T, alike in groupby(rows, key=lambda row: len(row.ids)):
            most = min(cls.most(runner), max(1, MAX_PAIRS // (T * size)))
            made += [FastGroup(each, runner) for each in groups_of([*alike], size, most)]
        return made

    @classmethod
    def most(cls, runner: Any) -> int:
        """How many blocks one call attends to. Their keys are counted in the model's dtype, because
        int8 is decoded. A GPU gets more, so that there are few calls; we have not measured that."""
        max_bytes = cls.max_bytes if runner.model.device.type == "cpu" else 2**25
        return max(1, runner.max_blocks * max_bytes // MAX_COPY)

    def attend_group(self, q: Tensor, group: Any) -> Tensor:
        k, v = side_by_side(self.kv, group, q.dtype).chunk(2, 1)  # (B, K, S, H) each
        if group.is_prompt and len(group.rows) == 1:
            end = group.rows[0].positions.stop
            return attend_to_prompt(q, k[:, :, :end], v[:, :, :end], self.window)
        # The logarithm of a bool is 0 where a key is seen, and -inf where not; see mask_of.
        return attention(q, k, v, group.masks[self.window].log().to(q.dtype), kernel_for(q))


def side_by_side(kv: Tensor, group: FastGroup, dtype: torch.dtype) -> Tensor:
    """Decode the keys and values of each row of a group into one tensor, as attention needs them.

    Blocks that follow each other are read in place; others are copied side by side. A short copy is
    still in the processor's cache when attention reads it, so it costs little. A long one is not.

    Args:
        kv: (2 * K, blocks, block size, stored_dim).

    Returns:
        (B, 2 * K, S, H) of `dtype`: a view of kv if the blocks follow each other and are stored in
        that dtype, else a copy.

    Example: with the table [[2, 3], [4, 5]] it is a view of kv[:, 2:6]; with [[2, 3], [5, 6]] it is
        a copy.
    """
    if group.span:
        blocks = kv[:, group.span].unflatten(1, group.table.shape).transpose(0, 1)
    else:
        # index_select(1, table) would take twice as long.
        blocks = kv.flatten(0, 1).index_select(0, group.flat_table.flatten())
        blocks = blocks.unflatten(0, group.flat_table.shape)
    # blocks: (B, 2 * K, W, block size, stored_dim)
    return decode(blocks, dtype).flatten(2, 3)


# --- Prompts --------------------------------------------------------------------------------------


class PromptSlab(Slab):
    """One layer's slabs, for a prompt."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.store(k, v)
        end = int(self.slots[-1]) + 1  # the slots after it must not be seen
        k, v = decode(self.kv[:, :, :end], q.dtype).chunk(2, 1)
        return attend_to_prompt(q, k, v, self.window)


PIECE = 128  # queries
# In bfloat16, where oneDNN multiplies it, PyTorch's fused kernel takes two to three times as long
# as two products (Zen 5); with AMX it takes half as long (Sapphire Rapids).
PRODUCTS = onednn_multiplies(torch.bfloat16) and not torch.cpu._is_amx_tile_supported()


def attend_to_prompt(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Attention of the last T of S tokens, in pieces of few queries.

    Each piece gets only the keys that one of its queries sees, and a mask of its own. So a causal
    prompt computes little that is hidden, a window leaves out what lies before it, and masks stay
    small however long the text is.

    Args:
        q: (B, N, T, H).
        k, v: (B, K, S, H), where K divides N: the keys of the S - T tokens that came before, of
            which there may be none, then those of the T tokens.
        window: how many tokens a query sees; None: all of them.

    Returns:
        (B, N, T, H).

    Example: T = 2, S = 5, window 3, in one piece: its keys are 1 to 4. Query 3 sees the keys 1, 2
        and 3, and query 4 the keys 2, 3 and 4, so the mask is [[1, 1, 1, 0], [0, 1, 1, 1]].
    """
    S = k.shape[2]
    window = min(window or S, S)
    kernel = kernel_for(q)
    size = max(1, MAX_PAIRS // S)
    if q.is_cpu:  # a GPU profits from large pieces
        size = min(size, PIECE)
    start = S - q.shape[2]  # the position of a piece's first query
    attended = []
    for queries in q.split(size, 2):
        end = start + queries.shape[2]
        first = max(0, start - window + 1)
        # All queries see the keys before the first query's own, if the window does not end there.
        # `own` is where the mask has the first query's own key.
        own = 0 if kernel is products and end <= window else start - first
        mask = mask_of(end - start, own, window, q.shape[1] // k.shape[1], q.device, q.dtype)
        attended.append(attention(queries, k[:, :, first:end], v[:, :, first:end], mask, kernel))
        start = end
    return torch.cat(attended, 2)


@lru_cache(4)  # all layers, and most pieces, have masks of few shapes
def mask_of(T: int, own: int, window: int, heads: int, device: Any, dtype: Any) -> Tensor:
    """What hides from T queries some of `own` keys and T more: (heads * T, own + T), which is added
    to the scores, -inf or 0. PyTorch's kernel would turn bools into that in each layer."""
    hidden = torch.full((T, own + T), -torch.inf, dtype=dtype, device=device)
    return (hidden.triu(own + 1) + hidden.tril(own - window)).repeat(heads, 1)


def kernel_for(q: Tensor) -> Callable:
    """What model.attention calls where there is a mask."""
    if PRODUCTS and q.is_cpu and q.dtype == torch.bfloat16 and q.shape[2] >= PROMPT:
        return products
    return scaled_dot_product_attention


def products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Do what scaled_dot_product_attention does, by two products with a softmax between them.

    Args:
        mask: is added to the scores; see mask_of.
        q: (B, K, N / K * T, H).
        k, v: (B, K, S, H).

    Returns:
        (B, K, N / K * T, H).
    """
    scores = (q * q.shape[3] ** -0.5) @ k.mT  # (B, K, N / K * T, S)
    scores[..., -mask.shape[-1] :] += mask
    return scores.softmax(-1) @ v
