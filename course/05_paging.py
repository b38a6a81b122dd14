"""Chapter 5: paging. Reserve nothing, share what is equal: more sequences fit, and more run.

python course/05_paging.py
"""

from lesson import Lesson, drain, memory_strip, random_ids, run

from scheduler import Engine
from settings import SamplingParams

SIZE, ROOM, SLOTS = 16, 256, 1024  # tokens in a block; that a sequence may get; in the memory
PREFIX, OWN, NEW = 96, 16, 24  # tokens of a prompt that all share, that are its own; to come


class Pool:
    """Who owns which block, and which block holds what."""

    def __init__(self, blocks: int, size: int) -> None:
        self.free, self.size, self.known = [*range(blocks)][::-1], size, {}

    def allocate(self, ids: list[int], room: int, share: bool) -> list[int] | None:
        """A table for a sequence of `room` tokens that begins with these; None: they do not fit."""
        starts = [tuple(ids[:end]) for end in range(self.size, len(ids), self.size)]
        found = [self.known[start] for start in starts if share and start in self.known]
        need = -(-room // self.size) - len(found)  # rounded up to whole blocks
        if need > len(self.free):
            return None
        table = found + [self.free.pop() for _ in range(need)]
        self.known |= dict(zip(starts, table))
        return table


def admit(prompts: list[list[int]], size: int, share: bool) -> list[list[int]]:
    """The tables of the prompts that fit into the memory at once."""
    pool, tables = Pool(SLOTS // size, size), []
    for ids in prompts:
        table = pool.allocate(ids, len(ids) + NEW, share)
        if table is None:
            break
        tables.append(table)
    return tables


def chapter(lesson: Lesson) -> dict[str, int]:
    # 1) who fits into 1,024 tokens of memory, as integers
    model = lesson.random_model()
    prefix = random_ids(model, PREFIX)
    prompts = [prefix + random_ids(model, OWN) for _ in range(24)]
    ways = {"slabs": (ROOM, False), "blocks": (SIZE, False), "shared": (SIZE, True)}
    fits, strips, most, took, computed = {}, {}, {}, {}, {}
    for name, (size, share) in ways.items():
        tables = admit(prompts, size, share)
        fits[name] = len(tables)
        strips[name] = memory_strip(tables, size, PREFIX + OWN + NEW, SLOTS)
    legend = {"A": "one request's", "*": "of several", "-": "reserved, empty", ".": "free"}
    lesson.rows("1,024 tokens of memory, a letter for each 16", strips, legend)
    lesson.bars("requests that fit at once", fits, SLOTS / (PREFIX + OWN + NEW), digits=2)
    # 2) the engine with each: a block as large as a slab is a slab; salts keep prefixes apart
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    for name, (size, share) in [*ways.items()] * 2:  # twice: the better time of each
        engine = Engine(model, block_size=size, num_blocks=SLOTS // size, max_seq_len=ROOM)
        for i, ids in enumerate(prompts[: lesson.pick(12, 8)]):
            engine.add_request(ids, params, cache_salt=None if share else f"of request {i}")
            if i == 0:
                engine.step()  # the first has come before: what all share is known
        most[name], seconds = drain(engine)
        took[name] = min(seconds, took.get(name, seconds))
        computed[name] = engine.stats["computed_tokens"]
    for name, n in computed.items():
        lesson.say(f"the engine, {name}: {most[name]} at once, {n:,} tokens computed")
    lesson.bars("seconds until all have ended", took)
    # 3) a tiny pool, step by step: prefix reuse, a fork, a copied block, preemption
    model = lesson.random_model(tiny=True)
    prompt = random_ids(model, 11)
    engine = Engine(model, max_num_seqs=4, max_num_batched_tokens=11, block_size=4, num_blocks=7)
    lesson.say("\nBlocks of 4 tokens, 11 tokens a step. A wants two texts; B begins as A does.")
    engine.add_request(prompt, SamplingParams(temperature=1, seed=1, max_tokens=6, n=2))
    engine.add_request([*prompt[:8], 1, 2], SamplingParams(temperature=0, max_tokens=8))
    return {"fits": fits, "most": most, "computed": computed, "events": lesson.watch(engine)}


if __name__ == "__main__":
    run(chapter)
