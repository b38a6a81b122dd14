"""Chapter 5: paging. Reserve nothing, share what is equal: more sequences fit, and more run.

python course/05_paging.py
"""

import time

import torch

from lesson import LETTERS, Lesson, pool, run
from sampling import SamplingParams
from scheduler import Engine

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


def admit(prompts: list[list[int]], size: int, share: bool) -> tuple[int, str]:
    """How many of the prompts fit at once, and a picture: 64 cells of 16 tokens."""
    blocks, cells = Pool(SLOTS // size, size), ["."] * (SLOTS // SIZE)
    for name, ids in zip(LETTERS[26:], prompts):
        table = blocks.allocate(ids, len(ids) + NEW, share)
        if table is None:
            return LETTERS[26:].index(name), "".join(cells)
        for at in range(0, len(table) * size, SIZE):
            cell = (table[at // size] * size + at % size) // SIZE
            held = name if at < len(ids) + NEW else "-"
            cells[cell] = held if cells[cell] == "." else "*"
    return len(prompts), "".join(cells)


def chapter(lesson: Lesson) -> dict[str, int]:
    # 1) who fits into 1,024 tokens of memory, as integers
    model = lesson.random_model()
    words = torch.randint(model.config.vocab_size, (24 * OWN + PREFIX,)).tolist()
    prompts = [words[:PREFIX] + words[i : i + OWN] for i in range(PREFIX, len(words), OWN)]
    ways = {"slabs": (ROOM, False), "blocks": (SIZE, False), "shared": (SIZE, True)}
    fits, strips = {}, {}
    for name, way in ways.items():
        fits[name], strips[name] = admit(prompts, *way)
    legend = {"A": "one request's", "*": "of several", "-": "reserved, empty", ".": "free"}
    lesson.rows("1,024 tokens of memory, a letter for each 16", strips, legend)
    lesson.bars("requests that fit at once", fits, SLOTS / (PREFIX + OWN + NEW), digits=2)
    # 2) the engine with each: a block as large as a slab is a slab; salts keep prefixes apart
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    took, computed, most = {}, {}, {}
    for name, (size, share) in ways.items():
        engine = Engine(model, None, block_size=size, num_blocks=SLOTS // size, max_seq_len=ROOM)
        for i, ids in enumerate(prompts[: lesson.pick(12, 8)]):
            engine.add_request(ids, params, cache_salt=None if share else f"of request {i}")
            if i == 0:
                engine.step()  # the first has come before: what all share is known
        start, most[name] = time.perf_counter(), 0
        while engine.queue:
            engine.step()
            if len(engine.running) > most[name]:
                most[name], busiest = len(engine.running), pool(engine)
        took[name], computed[name] = time.perf_counter() - start, engine.stats.computed_tokens
    lesson.rows("the engine's own pool with sharing, when most ran", {"shared": busiest}, legend)
    lesson.bars("most that ran at once", most, digits=2)
    lesson.bars("tokens computed", computed)
    lesson.bars("seconds until all have ended", took)
    # 3) a tiny pool, step by step: prefix reuse, a fork, a copied block, preemption
    model = type(model)(lesson.tiny).eval().requires_grad_(False)
    prompt = torch.randint(lesson.tiny.vocab_size, (11,)).tolist()
    engine = Engine(model, None, 4, 11, block_size=4, num_blocks=7, max_seq_len=28)
    lesson.say("\nA budget of 11 tokens a step, 7 blocks of 4 tokens. A is 11 tokens and wants two")
    lesson.say("texts of 6, B begins with the same 8 and wants one of 8.")
    engine.add_request(prompt, SamplingParams(temperature=1, seed=1, max_tokens=6, n=2))
    engine.add_request([*prompt[:8], 1, 2], SamplingParams(temperature=0, max_tokens=8))
    events = lesson.watch(engine)
    return {"fits": fits, "most": most, "computed": computed, "events": events}


if __name__ == "__main__":
    run(chapter)
