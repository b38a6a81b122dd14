"""Chapter 4: batching. A forward reads every weight, whether for one sequence or for four.

python course/04_batching.py
"""

import math
import time
from collections.abc import Callable

from lesson import Count, Lesson, random_ids, run

from model import Transformer
from paged import Row, Runner

SLOTS, CAPACITY = 4, 128  # sequences at once; tokens that each has room for
PROMPT, NEW = 16, [40, 6, 10, 24, 8, 30, 6, 16]  # tokens of each prompt; tokens wanted of each
POLICIES: dict[str, Callable[[int], int]] = {  # sequences that run -> how many may join them
    "one at a time": lambda running: 1 if running == 0 else 0,
    "static batches": lambda running: SLOTS if running == 0 else 0,
    "continuous": lambda running: SLOTS - running,
}


class Job:
    """A request and what has come of it."""

    def __init__(self, ids: list[int], new: int) -> None:
        self.ids, self.left = ids, new  # its text; how many tokens are still to come
        self.done, self.slot = 0, -1  # how many of its ids have run; its place, while it has one
        self.times: list[float] = []  # when each new token came, in seconds


def serve(model: Transformer, jobs: list[Job], may_join: Callable[[int], int]) -> None:
    """The loop of chapter 1 for many: who has not ended runs what the cache lacks."""
    # The engine's cache, in so few and large blocks that each is a slab: a place for one sequence.
    runner, free = Runner(model, SLOTS, CAPACITY), [*range(SLOTS)]
    waiting, running, start = [*jobs], [], time.perf_counter()
    while waiting or running:
        for _ in range(min(may_join(len(running)), len(waiting))):
            running.append(waiting.pop(0))
            running[-1].slot = free.pop()
        # A row: where its keys and values are kept, the position of its first new token, and these.
        rows = [Row([job.slot], job.done, job.ids[job.done :]) for job in running]
        for job, logits in zip(running, runner.forward(rows)):  # (V,) each
            job.done, job.left = len(job.ids), job.left - 1
            job.ids.append(int(logits.argmax()))
            job.times.append(time.perf_counter() - start)
        free += [job.slot for job in running if not job.left]
        running = [job for job in running if job.left]


def chapter(lesson: Lesson) -> dict[str, int]:
    model = lesson.random_model()
    prompts = [random_ids(model, PROMPT) for _ in NEW]
    serve(model, [Job(prompts[0][:], 2)], POLICIES["continuous"])  # the first forward allocates
    count, forwards, took, texts, came = Count(model), {}, {}, [], {}
    # 1) the same eight requests, which come all at once, under each policy
    for name, may_join in [*POLICIES.items()] * 2:  # twice: the better time of each
        jobs = [Job(ids[:], new) for ids, new in zip(prompts, NEW)]
        serve(model, jobs, may_join)
        forwards[name] = count.take().forwards
        texts.append([job.ids for job in jobs])
        end = max(job.times[-1] for job in jobs)
        if end < took.get(name, math.inf):
            took[name] = end
            came[name] = {f"{i} ({NEW[i]})": job.times for i, job in enumerate(jobs)}
    # 2) who waits, on one scale for all
    longest = max(took.values())
    for name, rows in came.items():
        title = f"{name}: request (and its tokens) over {longest:.1f} s"
        lesson.timeline(title, rows, longest)
    # 3) what it comes to; the ideal is that a forward costs the same with four as with one
    alone, full = took["one at a time"], took["continuous"]
    lesson.bars("forwards", forwards, sum(NEW) / SLOTS)
    lesson.bars("seconds until all have ended", took, alone / SLOTS)
    dear = full / forwards["continuous"] / (alone / forwards["one at a time"])
    lesson.say(f"\nOn average a forward takes {dear:.2f} times as long as that of one sequence.")
    if full > 0.8 * alone:
        lesson.say("Little effect: here computing takes the time, and not reading the weights.")
    return forwards | {"same": all(text == texts[0] for text in texts)}


if __name__ == "__main__":
    run(chapter)
