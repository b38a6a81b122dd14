"""Exercise 05: evict the blocks that were found least often. See 05-lfu-eviction.md."""

import random
from copy import deepcopy
from typing import Any

import pytest
from common import call, serve, tiny_model

from around.settings import SamplingParams
from paged import BlockPool, BlockTable
from scheduler import Engine
from tools.books import audit_pool

TODO = "give BlockPool (and Engine, which makes it) the option evict"


def pool(evict: str, num_blocks: int = 10) -> BlockPool:
    return call(BlockPool, num_blocks, 4, todo=TODO, evict=evict)


def use(at: BlockPool, text: str) -> int:
    """Run one request from beginning to end, as the engine would. Returns how many of its tokens
    were found in the cache."""
    ids, table = [*map(ord, text)], BlockTable()
    at.reuse(table, ids)
    found = table.length
    at.grow(table, len(ids))
    at.commit(table, ids, len(ids))
    audit_pool(at, [table])
    at.free(table)
    audit_pool(at, [])
    return found


POPULAR = "popular prompt! "  # four blocks


def popular_then_flood(at: BlockPool) -> int:
    """Run a prompt several times, then many prompts once, then the first again. Returns how many of
    its tokens were found."""
    for i in range(5):
        use(at, POPULAR + str(i))
    for i in range(12):
        use(at, f"{i:02} comes just once")
    return use(at, POPULAR + "?")


def test_what_was_found_often_stays() -> None:
    assert popular_then_flood(pool("lfu")) == 16, "the popular prompt's blocks were evicted"


def test_lru_is_the_default_and_forgets() -> None:
    assert popular_then_flood(pool("lru")) == 0
    assert popular_then_flood(BlockPool(10, 4)) == 0


def test_of_equals_the_least_recently_used_goes() -> None:
    at = pool("lfu", 4)
    for text in ("aaaa.", "bbbb.", "cccc.", "bbbb!", "cccc!", "aaaa!", "dddd."):
        use(at, text)
    # There are four blocks, one of them always for the unfinished end. a, b and c have been found
    # once each, and b was used least recently, so b was evicted when d came.
    found = {letter for letter in "abcd" if use(deepcopy(at), letter * 4 + "?")}
    assert "b" not in found, "among blocks found equally often, evict the least recently used"
    assert {"a", "c"} <= found


def test_a_new_text_in_an_old_block_begins_at_zero() -> None:
    """Bug: the count stays with the block when its content is evicted."""
    at = pool("lfu", 2)
    for _ in range(9):
        use(at, "aaaa.")
    table = BlockTable()
    at.reuse(table, [*map(ord, "x" * 8)])
    at.grow(table, 8)  # takes both blocks: "aaaa" is gone
    at.commit(table, [*map(ord, "xxxxyyyy")], 8)
    at.free(table)
    use(at, "xxxx.")  # x was found once and y never, so the "." takes y's block
    use(at, "xxxx.")
    use(at, "bbbb")  # x was found twice; this takes the free block
    use(at, "cccc")
    assert use(at, "xxxx.") == 4, "a count belongs to the content: forget it at eviction"


@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_no_block_goes_before_those_that_come_after_it(evict: str) -> None:
    """Bug: a block stays whose predecessor is gone. It can never be found, and wastes memory."""
    rng = random.Random(3)
    at, running = pool(evict, 24), []
    for _ in range(300):
        if len(running) == 3 or (running and rng.random() < 0.5):
            at.free(running.pop(rng.randrange(len(running))))
        else:
            text = "".join(rng.choices("ab", k=rng.randrange(1, 6)))
            ids, table = [ord(c) for c in text for _ in range(4)] + [0], BlockTable()
            at.reuse(table, ids)
            at.grow(table, len(ids))
            at.commit(table, ids, len(ids))
            running.append(table)
        audit_pool(at, running)
        marks = {None} | {mark for _, mark in at._by_key.values()}  # None: there is no salt
        lost = [key for key in at._by_key if key[0] not in marks]
        assert not lost, "a block was evicted while a block that follows it stayed"


def test_the_engine_has_it_and_keeps_it() -> None:
    model = tiny_model()
    options: dict[str, Any] = {"num_blocks": 12, "block_size": 4, "max_num_seqs": 2}
    engine = call(Engine, model, max_num_batched_tokens=16, todo=TODO, evict="lfu", **options)

    def ask(ids: list[int]) -> list[int]:
        params = SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
        (request,) = serve(engine, (ids, params))
        return request.outputs[0].token_ids

    def popular_after_flood() -> int:
        popular = [*range(1, 18)]
        for _ in range(4):
            answer = ask(popular)
        for i in range(8):
            ask([20 + i] * 16)
        before = engine.stats["prefix_cache_hits"]
        assert ask(popular) == answer
        return engine.stats["prefix_cache_hits"] - before

    assert popular_after_flood() == 16
    engine.reset()
    assert popular_after_flood() == 16, "reset() must make the new pool with the same options"


def test_other_policies_are_refused() -> None:
    call(BlockPool, 8, 4, todo=TODO, evict="lru")
    with pytest.raises(ValueError, match="evict"):
        BlockPool(8, 4, evict="fifo")
