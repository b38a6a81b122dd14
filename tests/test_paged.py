"""Blocks, tables and prefixes as plain integers: every way a sequence could read another's text.
Then attention over blocks, against a loop over single positions.

The machine at the end plays the device: it keeps for each slot of each block which text was last
written there, and after every step each table must read back exactly its own.
"""

import itertools
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from around.fast import attending, compiling
from around.fast.attending import FastLayerCache, fast_caches, groups_of
from around.fast.compiling import step_of
from kv_cache import StaticCache, from_stored, to_stored
from model import Config, Masks, Transformer, View, attention
from paged import BlockPool, BlockTable, PagedLayerCache, Row, Runner
from tools.books import audit_pool


def grown(pool, end):
    """Return a new table with room up to `end`."""
    table = BlockTable()
    assert pool.grow(table, end) == []
    return table


def computed(pool, ids, salt=None, table=None):
    """Return a table, this one or a new one, whose every token has been run, as after a step."""
    table = table or BlockTable(chain=[salt])
    assert pool.grow(table, len(ids)) == []
    pool.commit(table, ids, len(ids))
    return table


def found(pool, ids, salt=None):
    """Return the blocks that reuse maps, given back at once."""
    table = BlockTable(chain=[salt])
    pool.reuse(table, ids)
    blocks, length = table.blocks, table.length
    assert length == len(blocks) * pool.block_size
    pool.free(table)
    return blocks


def arrange(pool, *blocks):
    """Let the next blocks that are taken be these, in order; the pool is empty before."""
    by_block = {table.blocks[0]: table for table in [grown(pool, 1) for _ in pool.refs]}
    for block in [*blocks, *(by_block.keys() - {*blocks})]:
        computed(pool, [f"old {block}"] * pool.block_size, table=by_block[block])
        pool.free(by_block[block])


def test_which_blocks():
    """Compute, free and grow tables, and check which blocks each gets. Catches: sequences that
    begin alike and do not map the same blocks, or do not part where their texts part; a cached
    block that is taken while there are free ones."""
    pool = BlockPool(8, 4)
    arrange(pool, 2, 5, 1, 7, 3)
    first, second = [*"the king is"], [*"the king hath"]
    a, b = computed(pool, first), BlockTable()
    pool.reuse(b, second)
    assert b.length == 8
    computed(pool, second, table=b)
    assert (a.blocks, b.blocks) == ([2, 5, 1], [2, 5, 7, 3])
    assert pool.refs == [0, 1, 2, 1, 0, 2, 0, 1]
    audit_pool(pool, [a, b])
    pool = BlockPool(9, 2)
    a, b, c = grown(pool, 2), computed(pool, [1, 2]), grown(pool, 5)
    assert (a.blocks, b.blocks, c.blocks) == ([0], [1], [2, 3, 4])
    others = [grown(pool, 1) for _ in range(4)]  # 5, 6, 7, 8
    for table in (*others, b):
        pool.free(table)  # 8 comes first, and 1 is cached
    d = grown(pool, 2)
    assert d.blocks == [8]
    for table, end, blocks in ((c, 8, [2, 3, 4, 7]), (a, 4, [0, 6]), (d, 4, [8, 5])):
        pool.grow(table, end)
        assert (table.blocks, found(pool, [1, 2, 3])) == (blocks, [1])
    pool.grow(a, 6)
    assert a.blocks == [0, 6, 1] and found(pool, [1, 2, 3]) == []
    audit_pool(pool, [a, c, d])


def test_a_prefix_is_found():
    """Look for many prefixes while their owner runs, is freed or computes in chunks. Catches: one
    that only its owner could use; 0 query tokens, without logits (nano-vllm#144); the hash of a
    block taken again that stayed (#163); a block announced before it is written, and read in the
    same step; a chat's last reply computed again."""
    pool = BlockPool(8, 2)
    table = computed(pool, [1, 2, 3, 4, 5])
    for _ in range(2):  # while it is used, and once it is freed
        for ids, blocks in (
            ([1, 2, 3, 4, 9], [0, 1]), ([1, 2, 3, 4, 5, 6], [0, 1]),  # [5] fills no block
            ([1, 2, 9, 4, 9], [0]), ([9, 2, 3, 4, 9], []), ([3, 4, 9], []),  # after other tokens
            *(([1, 2, 3, 4][:n], [0][: (n - 1) // 2]) for n in (1, 2, 3, 4)),
        ):  # fmt: skip
            assert found(pool, ids) == blocks
        pool.free(table)
    table = computed(pool, [7] * 16)  # all blocks
    assert found(pool, [1, 2, 3, 4, 5]) == [] and found(pool, [7] * 9) == table.blocks[:4]
    pool, ids = BlockPool(8, 2), [1, 2, 3, 4, 5]
    table = grown(pool, 5)
    assert found(pool, ids) == []
    pool.commit(table, ids, 3)  # a chunk
    assert found(pool, ids) == [0]
    for token in (6, 7):  # outputs
        ids.append(token)
        computed(pool, ids, table=table)
        assert found(pool, [*ids, 9]) == table.blocks[: len(ids) // 2]
    pool.free(table)  # aborted half-way: what was computed is still of use
    assert found(pool, [*ids, 9]) == [0, 1, 2]


def twice(pool, ids, *ends):
    """Return tables that compute the same text in one step."""
    tables = [grown(pool, end) for end in ends]
    for table, end in zip(tables, ends, strict=True):
        pool.commit(table, ids, end)
    return tables


def test_two_sequences_of_one_step_compute_the_same_block():
    """Let two tables compute the same text in one step; go on, and free them. Catches: a hash that
    the second overwrites, so that both are lost with it (nano-vllm#219); pages that another had
    cached first, freed while mapped (mini-sglang#142); a block found by its tokens although what
    stood before it is gone."""
    pool, ids = BlockPool(8, 2), [1, 2, 3, 4, 5]
    a, b = twice(pool, ids, 3, 3)
    assert (a.blocks, b.blocks) == ([0, 1], [2, 3])
    assert found(pool, ids) == [0]
    computed(pool, ids, table=b)  # goes on from its own block, and is found behind the first's
    for table, left in ((BlockTable(), 3), (b, 6), (b, 6), (a, 8)):  # freed twice, as by an abort
        pool.free(table)
        assert (found(pool, ids), len(pool.available)) == ([0, 3], left)
        audit_pool(pool, [each for each in (a, b) if each.blocks])
    pool = BlockPool(4, 2)
    a, b = twice(pool, ids, 2, 4)
    assert (a.blocks, b.blocks, found(pool, ids)) == ([0], [1, 2], [0, 2])
    pool.free(a)
    other = grown(pool, 4)  # all that is left: a's block too
    assert found(pool, ids) == []
    pool.free(other)
    head = computed(pool, [1, 2, 7])  # the same tokens once more, in a new life
    assert found(pool, ids) == head.blocks[:1]
    audit_pool(pool, [b, head])


def test_nobody_is_served_anothers_text():
    """Look for prefixes whose hashes are equal, and for those of other salts. Catches: prefixes
    compared by their hashes alone (CVE-2025-25183); a salt ignored, so that the speed of a reply
    tells what another user has asked; a salt like "0" taken for a block's mark, and so for
    whoever's text was cached first."""
    for one, two in ((-1, -2), (0, 2**61 - 1), (5, 5 + (2**61 - 1)), (-(2**61), -2)):
        assert hash((None, (one, 1))) == hash((None, (two, 1)))
        pool = BlockPool(8, 2)
        computed(pool, [one, 1, one, 1, 3])
        assert found(pool, [two, 1, two, 1, 3]) == []
        assert found(pool, [one, 1, two, 1, 3]) == [0]
        assert found(pool, [one, 1, one, 1, 3]) == [0, 1]
    pool, ids = BlockPool(12, 2), [1, 2, 3, 4, 5]
    for n, salt in enumerate((None, "", "a", "b")):
        assert found(pool, ids, salt) == []
        computed(pool, ids, salt)
        assert found(pool, ids, salt) == [3 * n, 3 * n + 1]
    assert found(pool, ids, "c") == found(pool, ids, "0") == found(pool, [3, 4, 5], "0") == []


def test_what_is_given_up_first():
    """Fill pools until cached blocks are given up, and check their order. Catches: a prefix's head
    that goes before its children, which nothing can find then; a prefix given up while there was
    empty memory, or while it is in use; first in, first out, which gives up the system prompt that
    every request begins with."""
    pool, ids = BlockPool(3, 2), [1, 2, 3, 4, 5, 6, 7]
    pool.free(computed(pool, ids[:6]))
    for left in (2, 1, 0):
        pool.free(grown(pool, 2 * (3 - left)))
        assert found(pool, ids) == [0, 1, 2][:left]
        audit_pool(pool, [])
    pool, table = BlockPool(5, 2), BlockTable()
    for token in (1, 2, 3, 4):
        pool.free(computed(pool, [token, token]))
    assert found(pool, [1, 1, 0]) == [0]  # used again: now 2 is the oldest
    pool.reuse(table, [3, 3, 5])
    assert (len(pool.available), pool.cost(table, 4)) == (4, 1)
    for end, blocks in ((4, [2, 4]), (6, [2, 4, 1]), (10, [2, 4, 1, 3, 0])):
        pool.grow(table, end)
        assert table.blocks == blocks
    audit_pool(pool, [table])


def test_who_copies():
    """Fork tables, let them grow, and check which blocks are copied. Catches: a copy for every
    fork, so that nobody reads one block; the last one that writes into a shared block; a copy of a
    full block, to which nobody writes any more; only the block at `length` copied, and not those
    reserved behind it."""
    pool = BlockPool(8, 4)
    tables = [computed(pool, [1, 2, 3, 4, 5])]
    tables += [pool.fork(tables[0]), pool.fork(tables[0])]
    for i, copies, costs in (
        (1, [(1, 2)], [1, 0, 1]), (0, [(1, 3)], [0, 0, 0]), (2, [], [0, 0, 0])
    ):  # fmt: skip
        assert pool.cost(tables[i], 6) == len(copies)
        assert pool.grow(tables[i], 6) == copies
        assert [pool.cost(table, 6) for table in tables] == costs
    assert [table.blocks for table in tables] == [[0, 3], [0, 2], [0, 1]]
    audit_pool(pool, tables)
    pool = BlockPool(8, 4)
    table = computed(pool, [1, 2, 3, 4])
    other = pool.fork(table)
    assert pool.grow(table, 5) == pool.grow(other, 5) == []
    assert (table.blocks, other.blocks) == ([0, 1], [0, 2])
    pool = BlockPool(8, 2)
    table = grown(pool, 6)
    pool.commit(table, [1, 2, 3], 3)
    other = pool.fork(table)
    assert (pool.cost(other, 7), pool.cost(other, 4)) == (3, 2)
    assert pool.grow(other, 7) == [(1, 3), (2, 4)]
    computed(pool, [1, 2, 3, 4, 5], table=other)
    assert (table.blocks, table.length, len(table.chain)) == ([0, 1, 2], 3, 1 + 1)
    assert (other.blocks, other.length, len(other.chain)) == ([0, 3, 4, 5], 5, 1 + 2)
    audit_pool(pool, [table, other])


def test_check_sees_damage():
    """Damage a pool in six ways, and check that audit_pool finds each. Catches: a check that always
    holds, which would make every test above worth nothing."""
    for damage in (
        lambda pool, tables: pool.available.popitem(),  # a block is lost
        lambda pool, tables: pool.refs.__setitem__(0, 2),  # leaked
        lambda pool, tables: pool.available.__setitem__(0, None),  # free and used
        lambda pool, tables: pool._keys.__setitem__(2, (None, (7, 8))),  # a stale key
        lambda pool, tables: tables.clear(),  # a table left out
        lambda pool, tables: tables[0].blocks.append(2),  # a block that is not the table's
    ):
        pool = BlockPool(6, 2)
        tables = [computed(pool, [1, 2, 3])]
        pool.free(computed(pool, [4, 5, 6]))
        audit_pool(pool, tables)
        damage(pool, tables)
        with pytest.raises(AssertionError):
            audit_pool(pool, tables)


def runner_of(blocks, size, N=2, K=1, window=None, cap=None):
    """Return a runner of two layers, the last of which has the window."""
    config = Config(32, 16, 16, 2, N, K, 8, windows=(None, window), score_cap=cap)
    return Runner(Transformer(config).double(), blocks, size)


def shapes(runner, rows):
    """Return for each group: rows, new tokens of each, and blocks."""
    first, *_ = fast_caches(runner.model, *runner.plan(rows))
    return [(len(each.rows), len(each.ids) // len(each.rows), each.table.shape[1])
            for each in first.rows]  # fmt: skip


def slow_paged_attention(q, k, v, pool, rows, config):
    """Compute row after row, position after position, what PagedLayerCache does for all at once.
    Takes the rows in the order of their tokens, writes to the pool, and returns (1, N, T, H)."""
    k_pool, v_pool = pool.chunk(2)
    size, at, out, view = pool.shape[2], 0, [], config.views[-1]
    for blocks, start, ids, _ in rows:
        end = start + len(ids)
        for t, p in enumerate(range(start, end), at):
            k_pool[:, blocks[p // size], p % size] = k[0, :, t]
            v_pool[:, blocks[p // size], p % size] = v[0, :, t]
        here, at = slice(at, at + end - start), at + end - start
        seen = range(max(0, start + 1 - (view.window or end)), end)
        keys = [k_pool[:, blocks[p // size], p % size] for p in seen]  # (K, H) each
        values = [v_pool[:, blocks[p // size], p % size] for p in seen]
        keys, values = (torch.stack(x, dim=1)[None] for x in (keys, values))  # (1, K, S, H)
        masks = Masks(config, torch.arange(start, end)[None], torch.tensor([seen]), q.dtype)
        out.append(attention(q[:, :, here], keys, values, masks[view], view.kernel))
    return torch.cat(out, dim=2)


def random_rows(draw, blocks, size):
    """Return rows over blocks of their own, behind a prefix that some of them share."""
    free = draw.sample(range(blocks), blocks)
    prefix = [free.pop() for _ in range(2)]
    rows = []
    for _ in range(draw.randint(1, 6)):
        shared = prefix[: draw.randint(0, 2)]
        table = shared + [free.pop() for _ in range(draw.randint(1, 3))]
        end = draw.randint(len(shared) * size + 1, len(table) * size)
        start = end - 1 if draw.random() < 0.5 else draw.randint(len(shared) * size, end - 1)
        rows.append(Row(table, start, draw.choices(range(32), k=end - start)))
    return sorted(rows, key=lambda row: (len(row.ids), -row.start))


SHAPES = [(4, 2, 4), (3, 3, 1), (4, 1, 16)]  # N, K, block size


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("way", ["plain", "fast", "mixed", "step"])
def test_paged_attention_equals_its_slow_twin(way, window, monkeypatch):
    """Attend random rows in each way, and compare the outputs, and every slot of the pool, with the
    slow twin's. Catches: a key of another's block; a row attended with its neighbour's table; a
    slot written that is nobody's; a NaN in a slot of another row, or of nobody, that is multiplied
    by 0."""
    blocks, near = 24, {}
    for (N, K, size), seed in itertools.product(SHAPES, range(6)):
        runner = runner_of(blocks, size, N, K, window, 1.5 if seed % 2 else None)
        monkeypatch.setattr(attending, "max_blocks", lambda _: 4 ** (seed % 4))  # noqa: B023
        rows = random_rows(random.Random(seed), blocks, size)
        if seed == 3 and size > 4:  # two prompts in a group, behind 30 tokens and none
            rows = [Row([*range(i, i + 8)], start, [1] * 20) for i, start in ((0, 30), (8, 0))]
        if way == "step":
            rows = [row._replace(ids=row.ids[:1]) for row in rows]
        if way in ("mixed", "step"):
            near = {"rtol": 1e-5, "atol": 1e-5}  # queries are rounded to float32
        plan = runner.plan(rows)
        tokens, positions, caches, select = plan
        if way in ("fast", "mixed"):
            kind = FastLayerCache if way == "fast" else compiling.MixedLayerCache
            caches = fast_caches(runner.model, *plan, blocks=kind)
            assert all(type(cache) is kind for cache in caches)
        if way == "step":
            seen = step_of(runner.model, positions, caches)[1]
            caches = [None, seen]
        assert tokens.tolist() == [[i for row in rows for i in row.ids]]
        assert positions.tolist() == [[row.start + i for row in rows for i in range(len(row.ids))]]
        assert [tokens[0, i] for i in select] == [row.ids[-1] for row in rows]
        q, k, v = (torch.randn(1, n, tokens.shape[1], 8).double() for n in (N, K, K))
        pool = runner.kv[1].normal_()  # whatever has been left behind
        # What a window hides from all of a row's queries is not read either.
        seen = [(row, max(0, row.start + 1 - (window or 99))) for row in rows]
        read = {row.blocks[p // size] for row, p in seen for p in range(p, row.positions.stop)}
        pool[:, [*{*range(blocks)} - read]] = torch.nan
        twin = pool.clone()
        expected = slow_paged_attention(q, k, v, twin, rows, runner.model.config)
        with torch.compiler.set_stance("force_eager"):
            torch.testing.assert_close(caches[1].attend(q, k, v), expected, **near)
        torch.testing.assert_close(pool, twin, rtol=0, atol=0, equal_nan=True)


def test_int8_keys_are_read_back():
    """Store and read int8 values of many shapes, and compare the logits of both caches. Catches: a
    single key whose H + 4 bytes are no multiple of four, so that its scale could not be read;
    blocks or heads that are no multiple of four bytes, where another's bytes were read as a
    scale."""
    for shape in ((10,), (1, 1, 1, 2), (1, 1, 1, 10), (2, 1, 3, 6)):
        x, pool = torch.randn(shape), torch.zeros(5, *shape[:-1], shape[-1] + 4, dtype=torch.int8)
        pool[3] = to_stored(x, torch.int8)
        half = x.abs().amax(-1, keepdim=True) / 127 / 2
        for stored in (pool[3], pool.index_select(0, torch.tensor([3]))[0]):
            assert ((from_stored(stored, torch.float32) - x).abs() <= 1.001 * half).all()
    for K, H, size in itertools.product((1, 3), (2, 10), (1, 3, 16)):
        model, ids = Transformer(Config(32, 16, 16, 2, K, K, H)).double(), [*range(20)]
        slab, blocks = StaticCache(model, 1, 20, "int8"), [*range(19, -1, -1)]
        runner = Runner(model, 20, size, "int8")
        for start, end in ((0, 1), (1, 2), (2, 9), (9, 20)):
            last = torch.tensor([end - start - 1])
            want = model(torch.tensor([ids[start:end]]), *slab.plan(start, end), last)
            row = Row(blocks[: -(-end // size)], start, ids[start:end])
            torch.testing.assert_close(runner.forward([row]), want)


def test_copies():
    """Copy blocks, one of them onto the next, and compare each layer's pool. Catches: a block
    copied from after it had been copied to; a layer, or the values, left out."""
    runner = runner_of(5, 2)
    tensors = [pool.normal_() for pool in runner.kv]
    before = [tensor.clone() for tensor in tensors]
    runner.copy_blocks([(0, 1), (1, 2), (0, 4)])
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old[:, [0, 0, 1, 3, 0]])


def test_rows_that_stand_together(monkeypatch):
    """Check into which groups rows are put, and how many blocks the groups copy. Catches: a group
    of more than max_blocks by its longest row: one long sequence made all others as slow as itself,
    and many that share a long prompt took more memory than there was."""

    def counts_of(rows, size, most):
        monkeypatch.setattr(attending, "max_blocks", lambda _: most)
        runner = runner_of(80, size)
        groups = [*groups_of(PagedLayerCache(runner.kv[0], None, rows, runner.model, View()))]
        assert [row for group in groups for row in group.rows] == rows
        return [len(group.rows) for group in groups]

    def row(count, start=0):
        return Row([*range(80)], start, [5] * count)

    rows = [row(1, 5), row(1, 3), row(1, 2), row(3, 4)]
    for size, most, counts in (
        (4, 4, [2, 1, 1]), (4, 6, [3, 1]), (1, 18, [3, 1]), (4, 1, [1] * 4), (4, 0, [1] * 4),
    ):  # fmt: skip
        assert counts_of(rows, size, most) == counts
    # Prompts of equally many tokens stand together.
    assert counts_of([*map(row, (1, 2, 4, 4, 5))], 16, 1000) == [1, 1, 2, 1]
    # A draft's rows can come in another order; all of a group were padded to the last one.
    assert counts_of([row(1, start) for start in (3, 3, 79)], 4, 20) == [2, 1]
    monkeypatch.undo()
    runner = runner_of(80, 16)
    int8 = Runner(runner.model, 2**14, 16, "int8")
    for each, width in ((runner, 8 * 8), (int8, 8 + 4)):
        assert attending.max_blocks(each.kv[0]) == 2**22 // (2 * 16 * width)
    monkeypatch.setattr(attending, "max_blocks", lambda _: 40)
    ends = (1000, 600, 250, 200, 5, 3)  # in blocks: 63, 38, 16, 13, 1, 1
    rows = [Row([*range(-(-end // 16))], end - 1, [end % 32]) for end in ends]
    tokens, _, _, select = runner.plan(rows)
    assert shapes(runner, rows) == [(1, 1, 64), (1, 1, 38), (2, 1, 16), (2, 1, 2)]
    assert [int(tokens[0, i]) for i in select] == [end % 32 for end in ends]
    mixed = [Row([*range(1000)], 15_999, [1]), *[Row([*range(7)], 99, [1])] * 63]
    forks = [Row([*range(1000)], 15_999 - i, [1]) for i in range(64)]
    for rows, most in ((mixed, 63 * 7 + 1000), (forks, 64 * 1000)):
        monkeypatch.setattr(attending, "max_blocks", lambda _: 1500)
        copied = [B * W for B, _, W in shapes(runner_of(1500, 16), rows)]
        assert max(copied) <= 1500 and sum(copied) <= 1.5 * most


# --- Any order of events --------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)  # two tokens: prefixes meet often


@dataclass(eq=False)
class Live:
    """A sequence, and what the pool knows of it."""

    ids: list[int]
    salt: str | None
    table: BlockTable


class Pool(RuleBasedStateMachine):
    """A pool and the memory behind it: `memory` says which text each slot was last written for."""

    @initialize(num_blocks=st.integers(1, 9), block_size=st.integers(1, 4))
    def start(self, num_blocks, block_size):
        self.pool, self.live = BlockPool(num_blocks, block_size), []
        self.memory = [[None] * block_size for _ in range(num_blocks + 1)]  # the last stays empty

    @precondition(lambda self: len(self.live) < 6)
    @rule(ids=TOKENS, salt=st.sampled_from([None, None, "s"]))
    def arrive(self, ids, salt):
        self.live.append(Live(ids, salt, BlockTable(chain=[salt])))

    @precondition(lambda self: self.live)
    @rule(
        picks=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 7)), min_size=1, max_size=4),
        tail=TOKENS,
        fails=st.sampled_from([False, False, False, True]),
    )
    def step(self, picks, tail, fails):
        """Make room for several, copy, write, commit: the order of the engine's step."""
        batch, copies = {}, []
        for at, count in picks:
            live = self.live[at % len(self.live)]
            if live not in batch and (end := self.admit(live, count, tail, copies)):
                batch[live] = end
        assert len({new for _, new in copies}) == len(copies), "a block is copied to twice"
        targets = {new: [*self.memory[old]] for old, new in copies}
        for new, content in targets.items():
            self.memory[new] = content
        for live, end in batch.items():
            for p in range(live.table.length, end):
                block, slot = self.at(live, p)
                self.memory[block][slot] = self.text(live, p)
        for live, end in batch.items():
            if fails:  # the forward was interrupted
                self.pool.free(live.table)
            else:
                self.pool.commit(live.table, live.ids, end)

    def admit(self, live, count, tail, copies):
        """Reuse, compare the cost, grow: return the end, or None where it was preempted."""
        pool, table = self.pool, live.table
        if not table.blocks:
            pool.reuse(table, live.ids)
            assert table.length < len(live.ids)
        if table.length == len(live.ids):  # a token was sampled
            live.ids.append(tail[0])
        end = min(len(live.ids), table.length + count)
        cost, before = pool.cost(table, end), len(pool.available)
        if cost > before:
            pool.free(table)
            return None
        copies += pool.grow(table, end)
        assert before - len(pool.available) == cost
        written = table.blocks[table.length // pool.block_size :]
        assert all(pool.refs[block] == 1 for block in written)
        return end

    @precondition(lambda self: 0 < len(self.live) < 6)
    @rule(at=st.integers(0, 5))
    def fork(self, at):
        live = self.live[at % len(self.live)]
        self.live.append(Live([*live.ids], live.salt, self.pool.fork(live.table)))

    @precondition(lambda self: self.live)
    @rule(at=st.integers(0, 5))
    def free(self, at):
        self.pool.free(self.live.pop(at % len(self.live)).table)

    @invariant()
    def everyone_reads_their_own_text(self):
        audit_pool(self.pool, (live.table for live in self.live))
        for live in self.live:
            for p in range(live.table.length):
                block, slot = self.at(live, p)
                assert self.memory[block][slot] == self.text(live, p)

    def teardown(self):
        for _ in [*getattr(self, "live", ())]:
            self.free(0)
        if hasattr(self, "pool"):
            audit_pool(self.pool, [])
            assert len(self.pool.available) == self.pool.num_blocks

    def at(self, live, p):
        return live.table.blocks[p // self.pool.block_size], p % self.pool.block_size

    def text(self, live, p):
        return live.salt, tuple(live.ids[: p + 1])


class TestPool(Pool.TestCase):
    """Take random steps of Pool, after each of which every sequence must read its own text.
    Catches: any order of events in which a block is lost, shared by strangers or overwritten."""

    settings = settings(
        max_examples=30, stateful_step_count=40, deadline=None, derandomize=True, database=None
    )


@pytest.mark.slow
class TestPoolForLonger(Pool.TestCase):
    """Do the same four times as often."""

    settings = settings(TestPool.settings, max_examples=120)
