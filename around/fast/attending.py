"""How the caches attend fast: what kv_cache.Slab and paged.Blocks compute, sooner.

attend_fast adds a hook to a model, which replaces the layers of a cache before each forward. So the
caches do not know of this file, and without it the tokens are the same. What replaces a class of
the root overrides `attend` and `attend_group` alone. Attention itself is model.attention, whatever
the path, so a change there holds for all of them. Read: attend_fast, FastGroup, FastBlocks,
attend_to_prompt. What a compiled step does (StepBlocks, attend_to_blocks) can wait.
"""

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from around.settings import CHUNK
from kv_cache import Slab, decode
from model import Transformer, attention
from paged import Blocks, Group, groups_of

from .packed import onednn_multiplies

# A row of at least this many new tokens counts as a prompt. Others are decoding, with or without
# guesses.
PROMPT = 16


def attend_fast(model: Transformer) -> None:
    """Let a model attend fast, with either cache."""
    model.register_forward_pre_hook(replace_layers)


def replace_layers(model: Any, args: tuple) -> tuple:
    """Replace each layer of a cache in the arguments of Transformer.forward, where that pays."""
    if len(args) == 2:  # there is no cache; see model.NoCache
        return args
    tokens, positions, layers, *select = args
    first = layers[0]
    if type(first) is Slab and tokens.is_cpu and tokens.shape[1] >= PROMPT:
        layers = [PromptSlab(**vars(layer)) for layer in layers]
    elif type(first) is Blocks:
        groups = fast_groups(first.groups)
        layers = [FastBlocks(layer.kv, layer.slots, groups, layer.window) for layer in layers]
    return tokens, positions, layers, *select


# --- Blocks ---------------------------------------------------------------------------------------


class FastGroup(Group):
    """A Group, and the indices by which its blocks are copied."""

    @cached_property
    def flat_table(self) -> Tensor:
        """(B, 2 * K, W) int64: for each head, the row's blocks as indices into
        Blocks.kv.flatten(0, 1), where block b of head h has the index h * num_blocks + b."""
        num_heads, num_blocks = self.runner.kv[0].shape[:2]  # 2 * K heads
        firsts = torch.arange(num_heads, device=self.table.device)[:, None] * num_blocks
        return self.table[:, None] + firsts


def fast_groups(groups: list[Group]) -> list[Group]:
    """Plan the rows of a forward anew, on a GPU in larger groups, so that there are few calls; we
    have not measured that."""
    runner = groups[0].runner
    rows = [row for group in groups for row in group.rows]
    most = runner.max_blocks * (16 if runner.model.device.type == "cuda" else 1)
    return [FastGroup(each, runner) for each in groups_of(rows, runner.block_size, most)]


class FastBlocks(Blocks):
    """One layer's keys and values in blocks. Rows are copied a few at a time: a short copy is still
    in the processor's cache when attention reads it."""

    def attend_group(self, q: Tensor, group: Any) -> Tensor:
        # self.kv[:, group.table] would take twice as long.
        blocks = self.kv.flatten(0, 1).index_select(0, group.flat_table.flatten())
        stored = blocks.unflatten(0, group.flat_table.shape).flatten(2, 3)  # (B, 2 * K, S, ...)
        k, v = decode(stored, q.dtype).chunk(2, 1)  # (B, K, S, H) each
        if len(q) == 1 and q.shape[2] >= PROMPT:
            end = group.rows[0].positions.stop
            return attend_to_prompt(q, k[:, :, :end], v[:, :, :end], self.window)
        return attention(q, k, v, group.masks[self.window], kernel_for(q))


class StepGroup(NamedTuple):
    """A Group of one new token in each row, as nothing but tensors: what the compiler sees."""

    table: Tensor
    mask: Tensor  # (B, 1, N / K, W, block size), that of one layer

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.table), 1

    @property
    def masks(self) -> dict[None, Tensor]:
        return {None: self.mask.flatten(3)}


class StepBlocks(Blocks):
    """One layer's keys and values in blocks, for one new token in each row, compiled as a part of
    the layer's block."""

    def attend_group(self, q: Tensor, group: Any) -> Tensor:
        if not loops_pay(len(q), q.shape[1] * 2 // len(self.kv)):
            return super().attend_group(q, group)
        stored = self.kv[:, group.table].transpose(0, 1)  # (B, 2 * K, W, block size, stored_dim)
        return attend_to_blocks(q, decode(stored, q.dtype), group.masks[self.window])


def loops_pay(B: int, heads: int) -> bool:
    """Whether attend_to_blocks is faster than PyTorch's kernel after a copy, for B rows where
    `heads` query heads share a key. The time as a multiple of the kernel's, with heads of 64 (AMX):
                                   bfloat16    float32
        1 row of 512, 1 head       0.51        0.51
        1 row of 512, 3 heads      0.71        0.87
        1 row of 2,048, 4 heads    1.05        1.23
        32 rows of 64, 1 head      0.54        0.65
        32 rows of 64, 3 heads     1.05        1.38
    """
    return B == 1 or heads == 1


def attend_to_blocks(q: Tensor, blocks: Tensor, mask: Tensor) -> Tensor:
    """Do what model.attention does, for one query of each row and head, and add up in float32.

    PyTorch's attention wants a row's keys side by side. These are plain operators, and need no
    copy: the compiler puts the look-up of the blocks into the loops that multiply them, and these
    loops into the code of the block. A key that several heads share is read once for each.

    Args:
        q: (B, N, 1, H).
        blocks: (B, 2 * K, W, block size, H), the keys and values.
        mask: (B or 1, 1, N / K, W * block size); see model.Masks.

    Returns:
        (B, N, 1, H).
    """
    keys, values = blocks.chunk(2, 1)  # (B, K, W, block size, H) each

    def loops(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = (q[:, :, :, None, None].float() * keys[:, :, None]).sum(-1)
        # The scores are scaled and not q, because for q the compiler would compute the root anew
        # for each key.
        scores = scores.flatten(3) * q.shape[3] ** -0.5 + mask  # (B, K, N / K, S)
        weights = (scores - scores.amax(-1, True)).exp()
        parts = weights.unflatten(3, keys.shape[2:4])[..., None] * values[:, :, None]
        total = parts.sum(4).sum(3)  # (B, K, N / K, H): within each block, then of all
        # The softmax's division comes last, so that it divides H numbers and not S.
        return (total / weights.sum(-1, True)).to(q.dtype)

    # A fork may compute something else there, with all keys side by side.
    return attention(q, keys.flatten(2, 3), values.flatten(2, 3), mask, loops)


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
        q: (B, N, T, H), where T is at least PROMPT.
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
    start = S - q.shape[2]  # the position of a piece's first query
    attended = []
    # PyTorch's kernels profit from large pieces; products, and a window, from small ones. An
    # engine's chunk is a little longer than CHUNK, and still one piece.
    is_small = q.is_cpu and (kernel is products or window < S)
    for queries in q.split(PIECE if is_small else CHUNK + CHUNK // 4, 2):
        end = start + queries.shape[2]
        first = max(0, start - window + 1)
        # All queries see the keys before the first query's own, if the window does not end there.
        # `own` is where the mask has the first query's own key.
        own = 0 if q.is_cpu and end <= window else start - first
        mask = mask_of(end - start, own, window, q.shape[1] // k.shape[1], q.device, q.dtype)
        attended.append(attention(queries, k[:, :, first:end], v[:, :, first:end], mask, kernel))
        start = end
    return torch.cat(attended, 2)


@lru_cache(4)  # all layers, and most pieces, have masks of few shapes
def mask_of(T: int, own: int, window: int, heads: int, device: Any, dtype: Any) -> Tensor:
    """What T queries see of `own` keys and T more, as in model.Masks: (heads * T, own + T), 0 or
    -inf."""
    hidden = torch.full((T, own + T), -torch.inf, dtype=dtype, device=device)
    return (hidden.triu(own + 1) + hidden.tril(own - window)).repeat(heads, 1)


def kernel_for(q: Tensor) -> Callable:
    """What model.attention calls where there is a mask. All but PyTorch's own take one that covers
    the last keys only."""
    if not q.is_cpu or q.shape[2] < PROMPT:
        return scaled_dot_product_attention
    return products if PRODUCTS and q.dtype == torch.bfloat16 else in_two


def products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Do what scaled_dot_product_attention does, by two products with a softmax between them.

    Args:
        q: (B, K, N / K * T, H).
        k, v: (B, K, S, H).
        mask: (..., N / K * T, S or fewer), added to the scores of the last keys.

    Returns:
        (B, K, N / K * T, H).
    """
    scores = (q * q.shape[3] ** -0.5) @ k.mT  # (B, K, N / K * T, S)
    scores[..., -mask.shape[-1] :] += mask
    return scores.softmax(-1) @ v


def in_two(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Do the same by PyTorch's fused kernel, which is up to a quarter faster without a mask: first
    over the keys that all queries see, then over those that the mask covers. The kernel also
    returns the logarithm of each softmax's sum, (B, K, N / K * T), by which the two are weighed."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    seen = k.shape[2] - mask.shape[-1]
    y, total = kernel(q, k[:, :, seen:], v[:, :, seen:], attn_mask=mask)
    if seen:
        before, total_before = kernel(q, k[:, :, :seen], v[:, :, :seen])
        share = (total_before - total).sigmoid()[..., None].to(q.dtype)
        y = y.lerp(before, share)
    return y
