"""An audit of the engine's blocks, for tests and for whoever changes the scheduler or the pool.

    engine.step()
    books.audit(engine)

A block that is missing from the books is lost until the process ends. A block that stands in two
places gives a sequence another's keys and values, which shows as text that is fluent and wrong.
"""

from collections import Counter
from collections.abc import Iterable

from paged import BlockPool, BlockTable
from scheduler import Engine, place_in_line


def audit(engine: Engine) -> None:
    """Assert that every block is accounted for, and every sequence is in line once."""
    seqs = engine.running + engine.waiting
    audit_pool(engine.pool, (seq.table for seq in seqs))
    assert len({*map(id, seqs)}) == len(seqs)
    assert not any(seq.finish_reason for seq in seqs)
    assert len(engine.running) <= engine.max_num_seqs
    assert all(seq.table.blocks for seq in engine.running)
    assert not any(seq.table.blocks for seq in engine.waiting)
    for line in (engine.running, engine.waiting):
        assert line == sorted(line, key=place_in_line)


def audit_pool(pool: BlockPool, tables: Iterable[BlockTable]) -> None:
    """Assert the pool's invariant, given every table in use: each block is free, used or cached."""
    size, blocks = pool.block_size, range(pool.num_blocks)
    counts = Counter()
    for table in tables:
        assert (len(table.chain) - 1) * size <= table.length <= len(table.blocks) * size
        counts.update(table.blocks)
    assert pool.refs == [counts[b] for b in blocks], "reference counts differ from the tables"
    each = [*counts, *pool.available]
    assert sorted(each) == [*blocks], "a block is lost, or in two states"
    assert {b: k for k, (b, _) in pool._by_key.items()} == pool._keys, "a stale key"
    assert pool._keys.keys() <= {*each}
