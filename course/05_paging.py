"""Chapter 5: paging. Reserve nothing and share equal blocks, and more sequences fit and run.

python course/05_paging.py
"""

from lesson import Lesson, drain, memory_strip, random_ids, run

from around.settings import SamplingParams
from scheduler import Engine

SIZE, ROOM, SLOTS = 16, 256, 1024  # tokens in a block, in the longest sequence, in the memory
PREFIX, OWN, NEW = 96, 16, 24  # tokens of the shared prefix, of the rest of a prompt; new tokens


class Pool:
    """Which blocks are free, and which text each full block holds."""

    def __init__(self, blocks: int, size: int) -> None:
        self.free = [*range(blocks)][::-1]
        self.size = size
        self.known: dict[tuple, int] = {}  # the text up to a block's end -> the block

    def allocate(self, ids: list[int], room: int, share: bool) -> list[int] | None:
        """Return a table for a sequence that begins with `ids` and may grow to `room` tokens, or
        None where too few blocks are free."""
        starts = [tuple(ids[:end]) for end in range(self.size, len(ids), self.size)]
        found = [self.known[start] for start in starts if share and start in self.known]
        need = -(-room // self.size) - len(found)  # rounded up to whole blocks
        if need > len(self.free):
            return None
        table = found + [self.free.pop() for _ in range(need)]
        self.known |= dict(zip(starts, table))
        return table


def admit(prompts: list[list[int]], size: int, share: bool) -> list[list[int]]:
    """Return the tables of the prompts that fit into the memory at once."""
    pool, tables = Pool(SLOTS // size, size), []
    for ids in prompts:
        table = pool.allocate(ids, len(ids) + NEW, share)
        if table is None:
            break
        tables.append(table)
    return tables


def chapter(lesson: Lesson) -> dict[str, int]:
    # 1) how many requests fit into 1,024 tokens of memory, by the tables alone
    model = lesson.random_model()
    prefix = random_ids(model, PREFIX)
    prompts = [prefix + random_ids(model, OWN) for _ in range(24)]
    ways = {"slabs": (ROOM, False), "blocks": (SIZE, False), "shared": (SIZE, True)}
    fits, strips = {}, {}
    for name, (size, share) in ways.items():
        tables = admit(prompts, size, share)
        fits[name] = len(tables)
        strips[name] = memory_strip(tables, size, PREFIX + OWN + NEW, SLOTS)
    legend = {"A": "one request's", "*": "shared", "-": "reserved, empty", ".": "free"}
    lesson.rows("1,024 tokens of memory, a letter for each 16", strips, legend)
    lesson.bars("requests that fit at once", fits, SLOTS / (PREFIX + OWN + NEW), digits=2)
    # 2) the same in the engine: slabs are blocks of a slab's size, and a cache salt for each
    # request keeps its prefix from being shared
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    most, took, computed = {}, {}, {}
    for name, (size, share) in [*ways.items()] * 2:  # twice: the better time of each
        engine = Engine(model, block_size=size, num_blocks=SLOTS // size, max_seq_len=ROOM)
        for i, ids in enumerate(prompts[: lesson.pick(12, 8)]):
            engine.add_request(ids, params, cache_salt=None if share else f"of request {i}")
            if i == 0:
                engine.step()  # the first request runs before the others: its prefix is cached
        most[name], seconds = drain(engine)
        took[name] = min(seconds, took.get(name, seconds))
        computed[name] = engine.stats["computed_tokens"]
    for name, n in computed.items():
        lesson.say(f"the engine, {name}: {most[name]} at once, {n:,} tokens computed")
    lesson.bars("seconds until all have ended", took)
    # 3) a tiny pool, step by step, with prefix reuse, a fork, a copied block and a preemption
    model = lesson.random_model(tiny=True)
    prompt = random_ids(model, 11)
    engine = Engine(model, max_num_seqs=4, max_num_batched_tokens=11, block_size=4, num_blocks=7)
    lesson.say("\nBlocks of 4 tokens, steps of 11. A wants two texts; B begins as A does.")
    engine.add_request(prompt, SamplingParams(temperature=1, seed=1, max_tokens=6, n=2))
    engine.add_request([*prompt[:8], 1, 2], SamplingParams(temperature=0, max_tokens=8))
    return {"fits": fits, "most": most, "computed": computed, "events": lesson.watch(engine)}


if __name__ == "__main__":
    run(chapter)
