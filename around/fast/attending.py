"""How the caches attend fast: what kv_cache.Slab and paged.Blocks compute, sooner and in less memory.

attend_fast adds a hook to a model, which replaces the layers of a cache before each forward. So the
caches do not know of this file, and without it the tokens are the same. Read: attend_fast, FastGroup,
FastBlocks; then attend_to_prompt.
"""

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from kv_cache import Slab, decode
from model import Masks, Transformer, attention
from paged import MAX_COPY, Blocks, Group, Row, Runner, groups_of


def attend_fast(model: Transformer, kind: "type[Blocks] | None" = None) -> None:
    """Let a model attend fast, with either cache. `kind` is the class of a paged cache's layers."""
    model.register_forward_pre_hook(partial(replace_layers, kind or FastBlocks))


def replace_layers(kind: Any, model: Transformer, args: tuple) -> tuple:
    """Replace each layer of a cache in the arguments of Transformer.forward, where that pays."""
    if len(args) == 2:  # there is no cache; see model.NoCache
        return args
    tokens, positions, layers, *select = args
    first = layers[0]
    if type(first) is Slab and is_long_prompt(positions):
        layers = [PromptSlab(**vars(layer)) for layer in layers]
    elif type(first) is Blocks:
        runner = first.groups[0].runner
        rows = [row for group in first.groups for row in group.rows]
        groups = kind.groups_of(rows, runner)
        layers = [kind(layer.kv, layer.slots, groups, layer.window) for layer in layers]
    return tokens, positions, layers, *select


# --- Blocks ---------------------------------------------------------------------------------------

# One call of attention with a mask has at most this many pairs of a new token and a key, unless one
# token alone sees more keys. PyTorch widens the mask to the queries' dtype: for 257 tokens, 32 query
# heads, 4 kv heads and 32,000 keys in float32 that is 263 MB. In pieces it is 33 MB, and as fast on a
# CPU.
MAX_PAIRS = 2**20


class FastGroup(Group):
    """A group whose blocks are in ascending order, because they often follow each other then: the
    cached blocks 5 6 7 of a sequence that has ended are handed out again as 7 6 5. A long prompt
    keeps the order of its text: it has no mask that could tell another order.

    Attributes:
        positions: (B, T) int64, the new tokens' positions.
        key_positions: (B, S) int64, those of the keys, block after block; S = W * block size.
        flat_table: (B, 2 * K, W) int64: for each head, the row's blocks as indices into
            Blocks.kv.flatten(0, 1), where block b of head h has the index h * num_blocks + b.
        span: the blocks of `table` as one slice, if each follows the one before it.
        is_long: whether this is one row of a long prompt.
    """

    def __init__(self, rows: list[Row], runner: Runner) -> None:
        super().__init__(rows, runner)
        size = runner.block_size
        device = runner.model.device
        self.positions = torch.tensor([row.positions for row in rows], device=device)
        self.is_long = len(rows) == 1 and is_long_prompt(self.positions)
        used = [row.blocks[: row.num_blocks(size)] for row in rows]
        W = max(2, *map(len, used))  # 2, as the compiler takes a size of 1 as a case of its own
        table = torch.tensor(
            [blocks + blocks[-1:] * (W - len(blocks)) for blocks in used]
        )  # (B, W)
        order = torch.arange(W).expand_as(table)  # the place of each block in its row's text
        if not self.is_long:
            table, order = table.sort()
        has_gap = (table.flatten().diff() != 1).any()
        self.span = None if has_gap else slice(int(table[0, 0]), int(table[-1, -1]) + 1)
        num_heads, num_blocks = runner.kv[0].shape[:2]  # 2 * K heads
        first_of_head = torch.arange(num_heads)[:, None] * num_blocks
        self.flat_table = (table[:, None] + first_of_head).to(device)
        key_positions = order[..., None] * size + torch.arange(size)  # (B, W, block size)
        self.key_positions = key_positions.flatten(1).to(device)
        self.table = table.to(device)
        self.masks = Masks(runner.model.config, self.positions, self.key_positions)


class FastBlocks(Blocks):
    """One layer's keys and values in blocks, of which as few as possible are copied."""

    max_bytes: ClassVar[int] = 2**21  # see paged.MAX_COPY

    @classmethod
    def groups_of(cls, rows: list[Row], runner: Runner) -> list:
        split = groups_of(rows, runner.block_size, cls.most(runner))
        return [FastGroup(each, runner) for each in split]

    @classmethod
    def most(cls, runner: Any) -> int:
        """How many blocks one call attends to. Their keys are counted in the model's dtype, because
        int8 is decoded. A GPU gets more, so that there are few calls; we have not measured that."""
        max_bytes = cls.max_bytes if runner.model.device.type == "cpu" else 2**25
        return max(1, runner.max_blocks * max_bytes // MAX_COPY)

    def attend_group(self, q: Tensor, group: Any) -> Tensor:
        k, v = side_by_side(self.kv, group, q.dtype).chunk(2, 1)  # (B, K, S, H) each
        if group.is_long:  # one row, whose keys are in the order of its text
            end = int(group.positions[0, -1]) + 1
            return attend_to_prompt(q, k[:, :, :end], v[:, :, :end], self.window)
        size = max(1, MAX_PAIRS // group.key_positions.numel())
        if q.shape[2] <= size:
            return attention(q, k, v, group.masks[self.window])
        # A mask of all its tokens would be too large. Each layer makes the pieces again.
        attended = []
        for queries, positions in zip(q.split(size, 2), group.positions.split(size, 1)):
            masks = Masks(group.runner.model.config, positions, group.key_positions)
            attended.append(attention(queries, k, v, masks[self.window]))
        return torch.cat(attended, 2)


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


# --- Long prompts ---------------------------------------------------------------------------------


class PromptSlab(Slab):
    """One layer's slabs, for a long prompt."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.store(k, v)
        end = int(self.slots[-1]) + 1  # the slots after it must not be seen
        k, v = decode(self.kv[:, :, :end], q.dtype).chunk(2, 1)
        return attend_to_prompt(q, k, v, self.window)


# With a mask, PyTorch's kernel for a CPU also computes what the mask hides, and it widens the mask
# to the queries' dtype, so that the mask can be larger than the keys. Without a mask, the kernel's
# causal form skips what no query sees. So the new tokens attend to themselves causally, and to all
# that came before without a mask, and the two results are joined. For 512 new tokens and 4,096 keys
# that is 1.1 to 1.4 times as fast on a Zen 4; for 512 keys, or for fewer than 16 tokens, it is
# slower. Under a window there is a mask, but only over the keys within it.
LONG = 1024  # keys


def is_long_prompt(positions: Tensor) -> bool:
    """Whether the new tokens of one row, (1, T), attend by attend_to_prompt."""
    return positions.is_cpu and positions.shape[1] >= 16 and int(positions[0, -1]) + 1 >= LONG


def attend_to_prompt(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Attention of the last T of S tokens: without a mask, unless the window hides some of them.

    Attention over two sets of keys is a mean of the two results, weighted by the softmax's sums of
    exponentials. For each result the kernel returns the logarithm of its sum, here log_sum and
    past_log_sum. So the weight of the past is
    exp(past_log_sum) / (exp(past_log_sum) + exp(log_sum)) = sigmoid(past_log_sum - log_sum).

    Args:
        q: (B, N, T, H).
        k, v: (B, K, S, H), where K divides N: the keys of the S - T tokens that came before, of
            which there may be none, then those of the T tokens.
        window: how many tokens a query sees; None: all of them.

    Returns:
        (B, N, T, H).
    """
    if window and window < k.shape[2]:
        return attend_to_window(q, k, v, window)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    # 1) The new tokens among themselves. Causal attention needs the T queries of each head in
    # order, so heads cannot become queries as in 2), and each query head wants its own key head.
    num_past = k.shape[2] - q.shape[2]
    copies = q.shape[1] // k.shape[1]
    own_k = k[:, :, num_past:].repeat_interleave(copies, 1)  # (B, N, T, H)
    own_v = v[:, :, num_past:].repeat_interleave(copies, 1)
    y, log_sum = flash(q, own_k, own_v, is_causal=True)  # (B, N, T, H), (B, N, T) float32
    if num_past == 0:
        return y
    # 2) The new tokens and what came before. Query heads become queries, as in model.attention.
    queries = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # (B, K, N / K * T, H)
    past_y, past_log_sum = flash(queries, k[:, :, :num_past], v[:, :, :num_past])
    past_y = past_y.reshape(y.shape)
    # 3) Both together, in the dtype of the sums.
    weight = (past_log_sum.reshape(log_sum.shape) - log_sum).sigmoid()[..., None]  # (B, N, T, 1)
    return torch.lerp(y.to(weight.dtype), past_y.to(weight.dtype), weight).to(y.dtype)


def attend_to_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Do the same under a window, a few queries at a time. Each piece gets only the keys that one
    of its queries sees, so masks stay small however long the prompt and the text before it are. For
    512 queries of 4 heads of 256 and a window of 512, 8,192 keys take 45 ms instead of 374 (one
    thread of a Zen 3).

    Example: T = 2, S = 5, window 3, in one piece: its keys are 1 to 4. Query 3 sees the keys 1, 2
        and 3, and query 4 the keys 2, 3 and 4, so the mask is [[1, 1, 1, 0], [0, 1, 1, 1]].
    """
    start = k.shape[2] - q.shape[2]  # the position of a piece's first query
    attended = []
    for queries in q.split(max(1, 2**20 // (window + LONG)), 2):  # see MAX_PAIRS
        end = start + queries.shape[2]
        first = max(0, start - window + 1)
        own = start - first  # the first query's own key among those of the piece
        sees = q.new_ones(end - start, end - first, dtype=torch.bool)
        mask = sees.tril(own).triu(own - window + 1).repeat(q.shape[1] // k.shape[1], 1)
        keys = k[:, :, first:end]
        values = v[:, :, first:end]
        attended.append(attention(queries, keys, values, mask[None, None]))
        start = end
    return torch.cat(attended, 2)
