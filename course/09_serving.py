"""Chapter 9: serving. Users come when they come: near its limit, a server makes them wait.

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
    """How long each of these has to wait for a server of one at a time (Lindley 1952): as long as
    the one before it had to, and that one's service, less the time between the two."""
    wait, found = 0.0, [0.0]
    for before, at in pairwise(arrivals):
        wait = max(0.0, wait + service - (at - before))
        found.append(wait)
    return found


def steps(url: str) -> int:
    """How many steps a server's engine has run."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        return int(re.search(r"\nvllm:engine_steps_total\{.*\} (\d+)", answer.read().decode())[1])


def chapter(lesson: Lesson) -> dict[str, int]:
    mosts = 1, 32  # sequences that run at once
    with servers(*(["--max-num-seqs", str(most)] for most in mosts)) as urls:
        return measure(lesson, dict(zip(mosts, urls)))


def measure(lesson: Lesson, urls: dict[int, str]) -> dict[str, int]:
    requests, new = lesson.pick((24, 16), (6, 4))
    what = load.Load("", None, None, requests, (32, 32), (new, new), 0, 0, 1000, {"temperature": 0})
    counts, lines, speed = {}, {}, {}

    def send(most: int, rate: float, requests: int = requests) -> dict[str, Any]:
        outcomes = asyncio.run(load.run(what._replace(url=urls[most], requests=requests), rate))
        arrivals = {"arrivals": [outcome.arrived for outcome in outcomes]}
        return load.summary(outcomes, load.Limits(1.0, 0.1)) | arrivals

    # 1) all at once: what each server can do at most
    for most, url in urls.items():
        send(most, float("inf"), 4)  # warm up
        before, first = steps(url), send(most, float("inf"))
        counts[f"steps, {most}"] = steps(url) - before
        counts["answered"] = counts.get("answered", 0) + requests - first["errors"]
        second = send(most, float("inf"))  # as a machine has bad moments, the better of two
        speed[most] = max(first["request_s"], second["request_s"])
    lesson.bars("requests a second", {f"{n} at once": v for n, v in speed.items()})
    # 2) at a rate, as users come: a part of what the first can do, and more
    alone = 1 / speed[1]  # seconds that a request takes
    lesson.say(f"A request of 32 tokens in and {new} out takes {1e3 * alone:.0f} ms of the first.")
    if speed[32] < 1.5 * speed[1]:
        lesson.say("Little effect of batching here: the model is small, and so is what it reads.")
    rates = [round(part / alone, 1) for part in lesson.pick((0.4, 0.8, 1.2, 2.0), ())]
    for most in urls:
        runs = [send(most, rate) for rate in rates]
        for p in (50, 90):
            lines[f"{most} at once, p{p}"] = [run[f"ttft_p{p}_ms"] for run in runs]
    # 3) and what the queue in one line says of the same arrivals: waits, and a prompt's own time
    first = send(1, float("inf"), 1)["ttft_p50_ms"]
    queues = [load.percentile(waits(alone, run["arrivals"]), 90) for run in runs]
    lines["predicted, p90"] = [first + 1e3 * wait for wait in queues]
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
