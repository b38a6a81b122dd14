"""Chapter 11: many machines. Each has a cache of its own, so it matters who gets a request.

python course/11_machines.py
"""

import random
from collections.abc import Callable
from math import ceil
from statistics import mean
from zlib import crc32

from lesson import Lesson, run

from around.settings import SamplingParams
from scheduler import Engine

# OWN: tokens of a prompt after its document; NEW: tokens of an answer
MACHINES, DOCUMENTS, OWN, NEW = 3, 6, 16, 4
HOLDS = 3  # documents that a machine has room for


def home(document: bytes, loads: list[int], bound: float) -> int:
    """Choose a machine for a request: the home of its document, or the next machine that stays
    within the bound.

    Args:
        loads: requests that each machine has.
        bound: how many times the mean load a machine may have, with this request.

    Example: loads=[4, 0, 0], bound=2 -> at most ceil(2 * 5 / 3) = 4: a document of machine 0 goes
        to machine 1
    """
    most = ceil(bound * (sum(loads) + 1) / len(loads))
    first = crc32(document) % len(loads)
    places = [*range(first, len(loads)), *range(first)]
    return next(i for i in places if loads[i] < most)


def serve(lesson: Lesson, choose: Callable, rate: float, share: float) -> dict[str, float]:
    """Let requests come, and all machines step at once.

    Args:
        choose: number of the request, beginning of its prompt, requests on each machine -> machine.
        rate: requests a step, on average.
        share: part of the requests that is about the first document; the others are about any.
    """
    model, size = lesson.random_model(tiny=True), lesson.pick(512, 128)
    room = {"num_blocks": HOLDS * size // 16, "max_seq_len": size + OWN + NEW}
    engines = [Engine(model, max_num_batched_tokens=64, **room) for _ in range(MACHINES)]
    rng, waits, inside, came = random.Random(0), [], [], {}
    documents = [[rng.randrange(256) for _ in range(size)] for _ in range(DOCUMENTS)]
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    left = lesson.pick(300, 40)
    while left or came:
        while left and rng.random() < rate / (1 + rate):
            left -= 1
            document = documents[0] if rng.random() < share else rng.choice(documents)
            place = choose(left, str(document).encode(), [len(each.queue) for each in engines])
            own = [rng.randrange(256) for _ in range(OWN)]
            came[engines[place].add_request(document + own, params)] = len(inside)
        inside.append(len(came))
        ended = {each for engine in engines for each in engine.step() if each.finished}
        waits += [len(inside) - came.pop(each) for each in ended]
    hits, asked = (sum(each.stats[f"prefix_cache_{name}"] for each in engines)
                   for name in ("hits", "queries"))  # fmt: skip
    return {"found": 100 * hits / asked, "stay": mean(waits), "inside": mean(inside),
            "came": len(waits) / len(inside)}  # fmt: skip


LOADS = {"all alike": (0.5, 0.0), "a rush": (5.0, 0.9)}  # requests a step; one document's share
RULES = {
    "in turn": lambda i, document, loads: i % MACHINES,
    "least loaded": lambda i, document, loads: loads.index(min(loads)),
    "its home": lambda i, document, loads: home(document, loads, 100),
    "home, within 2": lambda i, document, loads: home(document, loads, 2),
}


def chapter(lesson: Lesson) -> dict[str, dict[str, float]]:
    rows = {}
    for title, load in LOADS.items():
        found = {name: serve(lesson, rule, *load) for name, rule in RULES.items()}
        lesson.bars(f"% of prompts found, {title}", {n: r["found"] for n, r in found.items()})
        stays = {name: row["stay"] for name, row in found.items()}
        lesson.bars(f"steps that a request stays, {title}", stays)
        rows |= {f"{name}, {title}": row for name, row in found.items()}
    lesson.say("\nrequests a step x steps that each stays = requests inside")
    for name, r in rows.items():
        law = f"{r['came']:.3f} x {r['stay']:5.2f} = {r['came'] * r['stay']:4.1f}"
        lesson.say(f"  {name:25} {law}; counted {r['inside']:4.1f}")
    return rows


if __name__ == "__main__":
    run(chapter)
