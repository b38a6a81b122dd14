"""Chapter 4: batching. A step reads every weight, whether for one sequence or for four.

python course/04_batching.py
"""

import time
from collections.abc import Callable

import torch

from lesson import Count, Lesson, run
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
    """A request: its ids, how many of them have run, how many are still to come."""

    def __init__(self, ids: list[int], new: int) -> None:
        self.ids, self.left, self.done, self.slot, self.times = ids, new, 0, -1, []


def serve(model: Transformer, jobs: list[Job], may_join: Callable[[int], int]) -> None:
    """The loop of chapter 1 for many: who has not ended runs what the cache lacks."""
    runner, free = Runner(model, SLOTS, CAPACITY), [*range(SLOTS)]
    waiting, running = [*jobs], []
    while waiting or running:
        for _ in range(min(may_join(len(running)), len(waiting))):
            running.append(waiting.pop(0))
            running[-1].slot = free.pop()
        rows = [Row([job.slot], job.done, job.ids[job.done :]) for job in running]
        for job, logits in zip(running, runner.run(rows)):  # (V,) each
            job.done, job.left = len(job.ids), job.left - 1
            job.ids.append(int(logits.argmax()))
            job.times.append(time.perf_counter())
        free += [job.slot for job in running if not job.left]
        running = [job for job in running if job.left]


def chapter(lesson: Lesson) -> dict[str, int]:
    model, forwards, ended = lesson.random_model(), {}, {}
    words = torch.randint(model.config.vocab_size, (len(NEW), PROMPT)).tolist()
    count, lines, texts = Count(model), {}, []
    serve(model, [Job(words[0][:], 2)], POLICIES["continuous"])  # the first forward allocates
    count.take()
    # 1) the same eight requests, which come all at once, under each policy
    for name, may_join in POLICIES.items():
        jobs, start = [Job(ids[:], new) for ids, new in zip(words, NEW)], time.perf_counter()
        serve(model, jobs, may_join)
        forwards[name] = count.take().forwards
        texts.append([job.ids for job in jobs])
        lines[name] = [[at - start for at in job.times] for job in jobs]
        ended[name] = [times[-1] for times in lines[name]]
    # 2) who waits, on one scale for all
    longest = max(map(max, ended.values()))
    for name, rows in lines.items():
        strips = {}
        for job, times in enumerate(rows):
            first, last = (round(70 * at / longest) for at in (times[0], times[-1]))
            strips[f"{job} ({NEW[job]})"] = "." * first + "#" * max(1, last - first)
        title = f"{name}: request (and its tokens) over {longest:.1f} s"
        lesson.rows(title, {k: s.ljust(70) for k, s in strips.items()}, {".": "waits", "#": "gets"})
    # 3) what it comes to; the ideal is that a step costs the same with four as with one
    alone = max(ended["one at a time"])
    lesson.bars("seconds until all have ended", {n: max(e) for n, e in ended.items()},
                {"continuous": alone / SLOTS, "static batches": alone / SLOTS})  # fmt: skip
    lesson.bars("seconds until one has ended, on average", {
        name: sum(each) / len(each) for name, each in ended.items()})  # fmt: skip
    lesson.bars("forwards", forwards, sum(NEW) / SLOTS)
    steps = {name: max(ended[name]) / forwards[name] for name in forwards}
    dear = steps["continuous"] / steps["one at a time"]
    lesson.say(f"\nA step takes {dear:.2f} times as long as one for a single sequence, on average.")
    if max(ended["continuous"]) > 0.8 * alone:
        lesson.say("Little effect: here computing takes the time, and not reading the weights.")
    return forwards | {"same": texts[0] == texts[1] == texts[2]}


if __name__ == "__main__":
    run(chapter)
