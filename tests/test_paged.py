"""Blocks, tables and prefixes as plain integers: every way a sequence could read another's text.

The machine at the end plays the device: it keeps for each slot of each block which text was last
written there, and after every step each table must read back exactly its own.
"""

import subprocess
import sys
from dataclasses import dataclass, field

import pytest
from conftest import ROOT
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged import BlockPool, BlockTable


def computed(pool, ids, salt=None, table=None):
    """A table whose every token has been run, as after a step; with its own blocks where it is not
    given one."""
    table = table or BlockTable()
    assert pool.grow(table, len(ids)) == []
    pool.commit(table, ids, len(ids), salt)
    return table


def found(pool, ids, salt=None):
    """The blocks that reuse maps, given back at once."""
    table = BlockTable()
    pool.reuse(table, ids, salt)
    blocks, length = table.blocks, table.length
    assert length == len(blocks) * pool.block_size
    pool.free(table)
    return blocks


def arrange(pool, *blocks):
    """Let the next blocks that are taken be these, in order; the pool is empty before."""
    singles = [BlockTable() for _ in range(pool.num_blocks)]
    for single in singles:
        pool.grow(single, 1)
    by_block = {single.blocks[0]: single for single in singles}
    for block in [*(by_block.keys() - {*blocks}), *reversed(blocks)]:
        pool.free(by_block[block])


# --- The examples of the docstrings ---------------------------------------------------------------


def test_import_needs_no_torch():
    """The integers dragged torch in, so that neither tests nor readers could do without it."""
    code = "import sys, paged; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_picture_of_the_header():
    """Sequences that begin alike must map the same blocks, and part where their texts part."""
    pool = BlockPool(8, 4)
    arrange(pool, 2, 5, 1, 7, 3)
    first, second = [*"the king is"], [*"the king hath"]
    a, b = computed(pool, first), BlockTable()
    pool.reuse(b, second)
    assert b.length == 8
    computed(pool, second, table=b)
    assert (a.blocks, b.blocks) == ([2, 5, 1], [2, 5, 7, 3])
    assert pool.refs == [0, 1, 2, 1, 0, 2, 0, 1]
    pool.check([a, b])


def test_example_of_grow():
    """A shared block written without a copy; a copy from or to the wrong block."""
    pool = BlockPool(8, 4)
    arrange(pool, 7, 2, 0, 1)
    table = computed(pool, [*range(6)])
    other = pool.fork(table)
    assert table.blocks == [7, 2]
    assert pool.grow(table, 10) == [(2, 0)]
    assert (table.blocks, other.blocks) == ([7, 0, 1], [7, 2])
    pool.check([table, other])


@pytest.mark.parametrize(("blocks", "size"), [(0, 16), (-1, 16), (4, 0), (4, -2)])
def test_a_pool_that_holds_nothing_is_refused(blocks, size):
    """A cache too large for the memory became one of 0 blocks, for which every prompt waits."""
    with pytest.raises(ValueError, match=f"{blocks} blocks of {size} tokens"):
        BlockPool(blocks, size)


def test_blocks_come_lowest_first_and_once():
    """A block handed out twice; a slot too few where the length ends on a block's border."""
    pool = BlockPool(4, 2)
    a, b = BlockTable(), BlockTable()
    assert pool.grow(a, 4) == pool.grow(b, 3) == []
    assert (a.blocks, b.blocks, pool.num_available) == ([0, 1], [2, 3], 0)
    assert (a.length, b.length) == (0, 0)
    assert pool.grow(a, 4) == []  # it has them already
    with pytest.raises(AssertionError, match="out of blocks"):
        pool.grow(a, 5)
    pool.check([a, b])


def test_commit_stays_within_the_blocks():
    """Tokens noted as computed that have no slot, or a length that goes backwards."""
    pool = BlockPool(4, 2)
    table = computed(pool, [1, 2, 3])
    for end in (2, 5):
        with pytest.raises(AssertionError):
            pool.commit(table, [1, 2, 3, 4, 5], end)


# --- Prefixes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("freed", [False, True])
def test_a_prefix_is_found(freed):
    """A prefix that only its first owner could use, or that was forgotten once the owner left."""
    pool = BlockPool(8, 2)
    table = computed(pool, [1, 2, 3, 4, 5])
    if freed:
        pool.free(table)
    assert found(pool, [1, 2, 3, 4, 9]) == [0, 1]
    assert found(pool, [1, 2, 3, 4, 5, 6]) == [0, 1]  # [5] fills no block
    assert found(pool, [1, 2, 9, 4, 9]) == [0]
    assert found(pool, [9, 2, 3, 4, 9]) == []
    assert found(pool, [3, 4, 9]) == []  # the same tokens after other ones


def test_output_tokens_are_found_too():
    """The next turn of a chat computed the last reply again; or a block was known before full."""
    pool, ids = BlockPool(8, 2), [1, 2, 3]
    table = computed(pool, ids)
    for token in (4, 5, 6):
        assert found(pool, [*ids, token, 9]) == table.blocks[: len(ids) // 2]
        ids.append(token)
        computed(pool, ids, table=table)
    assert found(pool, [1, 2, 3, 4, 5, 6, 7]) == table.blocks == [0, 1, 2]


@pytest.mark.parametrize("length", range(1, 8))
def test_a_fully_cached_prompt_leaves_a_token(length):
    """nano-vllm#144: with 0 query tokens there are no logits to sample from."""
    pool, ids = BlockPool(8, 2), [1, 2, 3, 4, 5, 6, 7]
    computed(pool, ids)
    assert found(pool, ids[:length]) == [0, 1, 2][: (length - 1) // 2]


def test_a_block_is_not_found_before_its_forward_has_run():
    """Announced at allocation, it was read by another sequence of the same step, still empty."""
    pool, ids = BlockPool(8, 2), [1, 2, 3, 4, 5]
    table = BlockTable()
    pool.grow(table, 5)
    assert found(pool, ids) == []
    pool.commit(table, ids, 3)  # a chunk
    assert found(pool, ids) == [0]
    pool.free(table)  # aborted half-way: what was computed is still of use
    assert found(pool, ids) == [0]
    pool.check([])


def test_a_block_taken_again_loses_its_prefix():
    """nano-vllm#163: the hash stayed behind, and the old prompt read the new one's text."""
    pool = BlockPool(2, 2)
    pool.free(computed(pool, [1, 2, 3, 4]))
    table = BlockTable()
    pool.grow(table, 3)
    assert found(pool, [1, 2, 3, 4, 5]) == []
    pool.commit(table, [7, 8, 9], 3)
    assert found(pool, [1, 2, 3, 4, 5]) == []
    assert found(pool, [7, 8, 9]) == table.blocks[:1]
    pool.check([table])


def test_a_chain_with_a_lost_head_is_not_found():
    """A block found by its own tokens although what stood before it is gone."""
    pool, ids = BlockPool(4, 2), [1, 2, 3, 4, 5]
    a, b = BlockTable(), BlockTable()
    for table, end in ((a, 2), (b, 4)):
        pool.grow(table, end)
    for table, end in ((a, 2), (b, 4)):
        pool.commit(table, ids, end)
    assert (a.blocks, b.blocks, found(pool, ids)) == ([0], [1, 2], [0, 2])
    pool.free(a)
    other = BlockTable()
    pool.grow(other, 4)  # all that is left: a's block too
    assert found(pool, ids) == []
    pool.free(other)
    head = computed(pool, [1, 2, 7])  # the same tokens once more, in a new life
    assert found(pool, ids) == head.blocks[:1]
    pool.check([b, head])


def test_two_sequences_of_one_step_compute_the_same_block():
    """nano-vllm#219: the second overwrote the first's hash, and both were lost with the second."""
    pool, ids = BlockPool(8, 2), [1, 2, 3, 4, 5]
    a, b = BlockTable(), BlockTable()
    for table in (a, b):
        pool.reuse(table, ids)
        pool.grow(table, 3)
    for table in (a, b):
        pool.commit(table, ids, 3)
    assert (a.blocks, b.blocks) == ([0, 1], [2, 3])
    assert found(pool, ids) == [0]
    computed(pool, ids, table=b)  # goes on from its own block, and is found behind the first's
    pool.check([a, b])
    assert found(pool, ids) == [0, 3]
    pool.free(b)
    assert found(pool, ids) == [0, 3]
    pool.free(a)
    assert found(pool, ids) == [0, 3]
    pool.check([])


def test_a_duplicate_stays_its_owners():
    """mini-sglang#142: pages that another had cached first were freed while still mapped."""
    pool, ids = BlockPool(4, 2), [1, 2, 3]
    a, b = BlockTable(), BlockTable()
    for table in (a, b):
        pool.grow(table, 3)
    for table in (a, b):
        pool.commit(table, ids, 3)
    assert pool.num_available == 0
    pool.free(a)
    assert pool.num_available == 2  # and none of b's
    other = BlockTable()
    pool.grow(other, 4)
    assert not {*other.blocks} & {*b.blocks}
    pool.free(b)
    pool.check([other])


@pytest.mark.parametrize(
    ("one", "two"), [(-1, -2), (0, 2**61 - 1), (5, 5 + (2**61 - 1)), (-(2**61), -2)]
)
def test_a_collision_serves_nobody_anothers_text(one, two):
    """CVE-2025-25183: prefixes were compared by their hashes alone."""
    assert hash((None, (one, 1))) == hash((None, (two, 1)))
    pool = BlockPool(8, 2)
    computed(pool, [one, 1, one, 1, 3])
    assert found(pool, [two, 1, two, 1, 3]) == []
    assert found(pool, [one, 1, two, 1, 3]) == [0]
    assert found(pool, [one, 1, one, 1, 3]) == [0, 1]


def test_a_salt_separates():
    """Without one, how fast a reply comes tells a user what another has asked."""
    pool, ids = BlockPool(12, 2), [1, 2, 3, 4, 5]
    for n, salt in enumerate((None, "", "a", "b")):
        assert found(pool, ids, salt) == []
        computed(pool, ids, salt)
        assert found(pool, ids, salt) == [3 * n, 3 * n + 1]
    assert found(pool, ids, "c") == found(pool, ids, "0") == []


def test_a_salt_is_no_serial_number():
    """Salt 0 stood for "behind the first block ever cached", whoever's that was."""
    pool = BlockPool(8, 2)
    computed(pool, [1, 2, 3, 4, 5])
    assert found(pool, [3, 4, 5], salt=0) == []


# --- Freeing --------------------------------------------------------------------------------------


def test_children_are_given_up_before_parents():
    """The head of a prefix went first, and left blocks behind that nothing could find."""
    pool, ids = BlockPool(3, 2), [1, 2, 3, 4, 5, 6, 7]
    pool.free(computed(pool, ids[:6]))
    for left in (2, 1, 0):
        table = BlockTable()
        pool.grow(table, 2 * (3 - left))
        pool.free(table)
        assert found(pool, ids) == [0, 1, 2][:left]
        pool.check([])


def test_the_least_recently_used_is_given_up_first():
    """First in, first out would give up the system prompt that every request begins with."""
    pool = BlockPool(3, 2)
    for token in (1, 2, 3):
        pool.free(computed(pool, [token, token]))
    assert found(pool, [1, 1, 0]) == [0]  # used again: now 2 is the oldest
    table = BlockTable()
    pool.grow(table, 2)
    assert table.blocks == [1]
    pool.grow(table, 4)
    assert table.blocks == [1, 2]
    assert found(pool, [1, 1, 0]) == [0]


def test_free_blocks_go_before_cached_ones():
    """A prefix given up while there was empty memory."""
    pool = BlockPool(3, 2)
    pool.free(computed(pool, [1, 2]))
    table = BlockTable()
    pool.grow(table, 4)
    assert table.blocks == [1, 2]
    assert found(pool, [1, 2, 3]) == [0]


def test_a_block_in_use_is_never_given_up():
    """A prefix was mapped, then taken for the rest of the same prompt."""
    pool, ids = BlockPool(3, 2), [1, 2, 3, 4, 5, 6]
    pool.free(computed(pool, ids))
    table = BlockTable()
    pool.reuse(table, ids)
    assert (table.blocks, pool.num_available) == ([0, 1], 1)
    assert pool.cost(table, 6) == 1
    pool.grow(table, 6)
    assert (table.blocks, pool.num_available) == ([0, 1, 2], 0)
    pool.check([table])


def test_freeing_twice_is_harmless():
    """An abort of what has just ended handed its blocks out twice."""
    pool = BlockPool(3, 2)
    table = computed(pool, [1, 2, 3])
    other = pool.fork(table)
    pool.free(table)
    pool.free(table)
    assert (table, pool.refs) == (BlockTable(), [1, 1, 0])
    pool.free(other)
    assert pool.num_available == 3
    pool.check([])


# --- Copy-on-write --------------------------------------------------------------------------------


def test_the_last_writer_needs_no_copy():
    """Every fork copied, so one block was read by nobody; or the last wrote into a shared one."""
    pool = BlockPool(8, 4)
    tables = [computed(pool, [1, 2, 3, 4, 5])]
    tables += [pool.fork(tables[0]), pool.fork(tables[0])]
    assert [pool.cost(table, 6) for table in tables] == [1, 1, 1]
    assert pool.grow(tables[1], 6) == [(1, 2)]
    assert [pool.cost(table, 6) for table in tables] == [1, 0, 1]
    assert pool.grow(tables[0], 6) == [(1, 3)]
    assert pool.grow(tables[2], 6) == []
    assert [table.blocks for table in tables] == [[0, 3], [0, 2], [0, 1]]
    pool.check(tables)


def test_nobody_copies_at_a_blocks_border():
    """A full block copied although nobody writes to it any more."""
    pool = BlockPool(8, 4)
    table = computed(pool, [1, 2, 3, 4])
    other = pool.fork(table)
    assert pool.cost(table, 5) == 1
    assert pool.grow(table, 5) == pool.grow(other, 5) == []
    assert (table.blocks, other.blocks) == ([0, 1], [0, 2])


def test_what_a_fork_left_behind_is_written_in_place():
    """A copy of what nobody else reads any more."""
    pool = BlockPool(8, 4)
    table = computed(pool, [1, 2, 3])
    pool.free(pool.fork(table))
    assert (pool.cost(table, 4), pool.grow(table, 4)) == (0, [])


def test_a_fork_has_its_own_table():
    """Two tables with one list: a block appended to one was read by the other."""
    pool = BlockPool(8, 2)
    table = computed(pool, [1, 2, 3])
    other = pool.fork(table)
    assert pool.grow(other, 4) == [(1, 2)]
    computed(pool, [1, 2, 3, 4, 5], table=other)
    assert (table.length, len(table.blocks), len(table.serials)) == (3, 2, 1)
    assert (other.length, len(other.blocks), len(other.serials)) == (5, 3, 2)
    assert found(pool, [1, 2, 3, 4, 9]) == other.blocks[:2]
    pool.check([table, other])


def test_blocks_reserved_ahead_are_shared_too():
    """Only the block at `length` was copied, and two forks wrote into the one behind it."""
    pool = BlockPool(8, 2)
    table = BlockTable()
    pool.grow(table, 6)
    pool.commit(table, [1, 2, 3], 3)
    other = pool.fork(table)
    assert (pool.cost(other, 7), pool.cost(other, 4)) == (3, 2)
    assert pool.grow(other, 7) == [(1, 3), (2, 4)]
    assert (table.blocks, other.blocks) == ([0, 1, 2], [0, 3, 4, 5])
    pool.check([table, other])


# --- The check itself -----------------------------------------------------------------------------


def _lose(pool):
    pool._free.pop()


def _double(pool):
    pool._free.append(pool._free[0])


def _leak(pool):
    pool.refs[0] += 1


def _free_and_used(pool):
    pool._free.append(0)


def _stale_key(pool):
    pool._keys[pool._free[0]] = (None, (7, 8))


def _cached_without_key(pool):
    pool._cached[pool._free.pop()] = None


@pytest.mark.parametrize(
    "damage", [_lose, _double, _leak, _free_and_used, _stale_key, _cached_without_key]
)
def test_check_sees_damage(damage):
    """A check that always holds would make every test above worth nothing."""
    pool = BlockPool(6, 2)
    table = computed(pool, [1, 2, 3])
    pool.free(computed(pool, [4, 5, 6]))
    pool.check([table])
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check([table])


@pytest.mark.parametrize("tables", [[], [BlockTable([0, 1, 2], 3, [0])]])
def test_check_sees_a_wrong_table(tables):
    """A table left out, or one that maps a block which it does not own."""
    pool = BlockPool(6, 2)
    computed(pool, [1, 2, 3])
    with pytest.raises(AssertionError):
        pool.check(tables)


# --- Any order of events --------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)  # two tokens: prefixes meet often


@dataclass(eq=False)
class Live:
    """A sequence, and what the pool knows of it."""

    ids: list[int]
    salt: str | None
    table: BlockTable = field(default_factory=BlockTable)


class Pool(RuleBasedStateMachine):
    """A pool and the memory behind it: `memory` says which text each slot was last written for."""

    @initialize(num_blocks=st.integers(1, 9), block_size=st.integers(1, 4))
    def start(self, num_blocks, block_size):
        self.pool, self.live = BlockPool(num_blocks, block_size), []
        self.memory = [[None] * block_size for _ in range(num_blocks)]

    @precondition(lambda self: len(self.live) < 6)
    @rule(ids=TOKENS, salt=st.sampled_from([None, None, "s"]))
    def arrive(self, ids, salt):
        self.live.append(Live(ids, salt))

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
        targets = {new: [*self.memory[old]] for old, new in copies}
        assert len(targets) == len(copies), "a block is copied to twice"
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
                self.pool.commit(live.table, live.ids, end, live.salt)

    def admit(self, live, count, tail, copies):
        """Reuse, compare the cost, grow: return the end, or None where it was preempted."""
        pool, table = self.pool, live.table
        if not table.blocks:
            pool.reuse(table, live.ids, live.salt)
            assert table.length < len(live.ids)
        if table.length == len(live.ids):  # a token was sampled
            live.ids.append(tail[0])
        end = min(len(live.ids), table.length + count)
        cost, before = pool.cost(table, end), pool.num_available
        if cost > before:
            pool.free(table)
            return None
        copies += pool.grow(table, end)
        assert before - pool.num_available == cost
        assert all(
            pool.refs[block] == 1 for block in table.blocks[table.length // pool.block_size :]
        )
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
        self.pool.check(live.table for live in self.live)
        for live in self.live:
            for p in range(live.table.length):
                block, slot = self.at(live, p)
                assert self.memory[block][slot] == self.text(live, p)

    def teardown(self):
        if hasattr(self, "pool"):
            for live in self.live:
                self.pool.free(live.table)
            self.pool.check([])
            assert self.pool.num_available == self.pool.num_blocks

    def at(self, live, p):
        size = self.pool.block_size
        return live.table.blocks[p // size], p % size

    def text(self, live, p):
        return live.salt, tuple(live.ids[: p + 1])


TestPool = Pool.TestCase
TestPool.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
