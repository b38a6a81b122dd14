"""Chapter 9: serving. Users arrive at random, and near its limit a server makes them wait.

python course/09_serving.py
"""

import asyncio
import re
import urllib.request
from itertools import pairwise
from typing import Any

from lesson import Lesson, run, servers

from tools import load


def waits(service: float, arrivals: list[float]) -> list[float]:
    """Compute how long each arrival waits for a server that serves one at a time (Lindley 1952).

    Args:
        service: the time that each request takes once it is served.
        arrivals: when each request arrives, in the same unit.
    """
    wait, found = 0.0, [0.0]
    for before, at in pairwise(arrivals):
        wait = max(0.0, wait + service - (at - before))
        found.append(wait)
    return found


def steps(url: str) -> int:
    """Ask a server how many steps its engine has run."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        return int(re.search(r"\nvllm:engine_steps_total\{.*\} (\d+)", answer.read().decode())[1])


def chapter(lesson: Lesson) -> dict[str, int]:
    sizes = 1, 32  # sequences that run at once
    with servers(*(["--max-num-seqs", str(size)] for size in sizes)) as urls:
        return measure(lesson, dict(zip(sizes, urls)))


def measure(lesson: Lesson, urls: dict[int, str]) -> dict[str, int]:
    """Measure the servers, given by the number of sequences that each runs at once."""
    requests, new = lesson.pick((24, 16), (6, 4))
    what = load.Load("", None, None, requests, (32, 32), (new, new), 0, 0, 1000, {"temperature": 0})
    counts, lines, speed = {}, {}, {}

    def send(size: int, rate: float, requests: int = requests) -> dict[str, Any]:
        outcomes = asyncio.run(load.run(what._replace(url=urls[size], requests=requests), rate))
        arrivals = {"arrivals": [outcome.arrived for outcome in outcomes]}
        return load.summary(outcomes, load.Limits(1.0, 0.1)) | arrivals

    # 1) all requests at once: the most that each server can do
    for size, url in urls.items():
        send(size, float("inf"), 4)  # warm up
        before = steps(url)
        first = send(size, float("inf"))
        counts[f"steps, {size}"] = steps(url) - before
        counts["answered"] = counts.get("answered", 0) + requests - first["errors"]
        second = send(size, float("inf"))  # the better of two, because machines have bad moments
        speed[size] = max(first["request_s"], second["request_s"])
    lesson.bars("requests a second", {f"{n} at once": v for n, v in speed.items()})
    # 2) random arrivals, at rates below and above the first server's limit
    alone = 1 / speed[1]  # seconds that a request takes
    lesson.say(f"A request (32 tokens in, {new} out) takes {1e3 * alone:.0f} ms on the first.")
    if speed[32] < 1.5 * speed[1]:
        lesson.say("Batching has little effect here: the model is small, and quickly read.")
    rates = [round(part / alone, 1) for part in lesson.pick((0.4, 0.8, 1.2, 2.0), ())]
    runs = {size: [send(size, rate) for rate in rates] for size in urls}
    for size in urls:
        for p in (50, 90):
            lines[f"{size} at once, p{p}"] = [run[f"ttft_p{p}_ms"] for run in runs[size]]
    # 3) what the formula predicts for the same arrivals: the wait, plus a prompt's own time
    prompt_ms = send(1, float("inf"), 1)["ttft_p50_ms"]
    queues = [load.percentile(waits(alone, run["arrivals"]), 90) for run in runs[1]]
    lines["predicted, p90"] = [prompt_ms + 1e3 * wait for wait in queues]
    if rates:
        tails = {name.removesuffix(", p90"): lines[name] for name in lines if "p90" in name}
        title = "p90 of milliseconds to the first token"
        lesson.curves(title, rates, tails, "requests a second", log=True)
        for name, line in lines.items():
            lesson.say(f"  {name:18} " + " ".join(f"{value:9.0f}" for value in line) + " ms")
        lesson.say(f"  {'requests a second':18} " + " ".join(f"{rate:9.1f}" for rate in rates))
        longer = send(1, rates[-1], 2 * requests)["ttft_p90_ms"]
        lesson.say(f"\nTwice as many requests at {rates[-1]} a second: p90 {longer:.0f} ms.")
    return counts


if __name__ == "__main__":
    run(chapter)
