"""Chapter 4: batching. A forward reads every weight once, for one sequence or for four.

python course/04_batching.py
"""

import math
import time
from collections.abc import Callable

from lesson import Count, Lesson, random_ids, run

from model import Transformer
from paged import Row, Runner

SLOTS, CAPACITY = 4, 128  # sequences at once; tokens in a slot
PROMPT, NEW = 16, [40, 6, 10, 24, 8, 30, 6, 16]  # tokens of a prompt; new tokens of each request
POLICIES: dict[str, Callable[[int], int]] = {  # running sequences -> how many may join them
    "one at a time": lambda running: 1 if running == 0 else 0,
    "static batches": lambda running: SLOTS if running == 0 else 0,
    "continuous": lambda running: SLOTS - running,
}


class Sequence:
    """A request's text so far, and where it stands."""

    def __init__(self, ids: list[int], new: int) -> None:
        self.ids = ids  # prompt and output
        self.left = new  # how many tokens are still to come
        self.done = 0  # how many of the ids have run
        self.slot = -1  # its place in the cache while it runs
        self.times: list[float] = []  # when each new token came, in seconds from the start


def serve(model: Transformer, seqs: list[Sequence], may_join: Callable[[int], int]) -> None:
    """Run chapter 1's loop for many: each running sequence runs the ids that the cache lacks."""
    # The engine's cache, with blocks so large that each is a slab for one sequence.
    runner, free = Runner(model, SLOTS, CAPACITY), [*range(SLOTS)]
    waiting, running = [*seqs], []
    start = time.perf_counter()
    while waiting or running:
        for _ in range(min(may_join(len(running)), len(waiting))):
            running.append(waiting.pop(0))
            running[-1].slot = free.pop()
        # A row: the block of its keys and values, the first new position, the new tokens.
        rows = [Row([seq.slot], seq.done, seq.ids[seq.done :]) for seq in running]
        for seq, logits in zip(running, runner.forward(rows)):  # (V,) each
            seq.done = len(seq.ids)
            seq.ids.append(int(logits.argmax()))
            seq.left -= 1
            seq.times.append(time.perf_counter() - start)
        free += [seq.slot for seq in running if not seq.left]
        running = [seq for seq in running if seq.left]


def chapter(lesson: Lesson) -> dict[str, int]:
    model = lesson.random_model()
    prompts = [random_ids(model, PROMPT) for _ in NEW]
    warm_up = [Sequence(prompts[0][:], 2)]
    serve(model, warm_up, POLICIES["continuous"])  # the first forward allocates
    count, texts = Count(model), []
    forwards, took, times = {}, {}, {}  # by policy
    # 1) the same eight requests, which arrive at once, under each policy
    for name, may_join in [*POLICIES.items()] * 2:  # twice: the better time of each
        seqs = [Sequence(ids[:], new) for ids, new in zip(prompts, NEW)]
        serve(model, seqs, may_join)
        forwards[name] = count.take().forwards
        texts.append([seq.ids for seq in seqs])
        end = max(seq.times[-1] for seq in seqs)
        if end < took.get(name, math.inf):
            took[name] = end
            times[name] = {f"{i} ({NEW[i]})": seq.times for i, seq in enumerate(seqs)}
    # 2) who waits, on one scale for all policies
    longest = max(took.values())
    for name, rows in times.items():
        title = f"{name}: request (and its tokens) over {longest:.1f} s"
        lesson.timeline(title, rows, longest)
    # 3) the totals; in the ideal case, a forward costs the same for four as for one
    alone, full = took["one at a time"], took["continuous"]
    lesson.bars("forwards", forwards, sum(NEW) / SLOTS)
    lesson.bars("seconds until all have ended", took, alone / SLOTS)
    ratio = full / forwards["continuous"] / (alone / forwards["one at a time"])
    lesson.say(f"\nOn average a forward takes {ratio:.2f} times as long as that of one sequence.")
    if full > 0.8 * alone:
        lesson.say("Little effect: on this machine arithmetic takes the time, not reading weights.")
    return forwards | {"same": all(text == texts[0] for text in texts)}


if __name__ == "__main__":
    run(chapter)
