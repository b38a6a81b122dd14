"""An open-loop load on any OpenAI-compatible server; `bench.py serve` is its command line.

Requests arrive when they arrive (a Poisson process), not when the one before has been answered: a
server that falls behind gets a queue, as it would from real users. Each is streamed, and every
chunk is stamped when it is read. Knows HTTP and nothing of this engine.
"""

import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit


class Load(NamedTuple):
    """What to send."""

    url: str  # with /v1, as clients have it, or without
    model: str | None
    api_key: str | None
    requests: int
    prompt_tokens: tuple[int, int]  # least and most
    new_tokens: tuple[int, int]
    prefixes: int  # number of shared texts, with one of which each prompt begins
    prefix_tokens: int
    vocab_size: int  # ids are drawn below this
    sampling: dict[str, float]  # such as {"temperature": 0}
    seed: int = 0


class Limits(NamedTuple):
    """What counts as good: seconds to the first token, and for each one after it."""

    ttft_s: float
    tpot_s: float


@dataclass
class Outcome:
    """One request, in seconds since the load began."""

    arrived: float
    times: list[float] = field(default_factory=list)  # when chunks with text were read
    tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.times[0] - self.arrived

    @property
    def tpot(self) -> float:
        return (self.times[-1] - self.times[0]) / max(1, self.tokens - 1)


async def run(load: Load, rate: float) -> list[Outcome]:
    """Send the load at a rate, in requests per second, as its seed draws them.

    Args:
        rate: infinite: all at once.
    """
    rng = random.Random(load.seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(3, load.vocab_size) for _ in range(count)]

    shared = [ids(load.prefix_tokens) for _ in range(load.prefixes)]
    at, start, tasks = 0.0, time.perf_counter(), []
    for _ in range(load.requests):
        prompt = ids(rng.randint(*load.prompt_tokens))
        body = {
            "prompt": (rng.choice(shared) if shared else []) + prompt,
            "max_tokens": rng.randint(*load.new_tokens),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **load.sampling,
        }
        if load.model:
            body["model"] = load.model
        at += rng.expovariate(rate) if rate < float("inf") else 0
        await asyncio.sleep(max(0, start + at - time.perf_counter()))
        tasks.append(asyncio.create_task(one(load, body, start, at)))
    return await asyncio.gather(*tasks)


def port(url: SplitResult) -> int:
    """The port that an address names, or the one of its scheme."""
    return url.port or (443 if url.scheme == "https" else 80)


async def one(load: Load, body: dict[str, Any], start: float, arrived: float) -> Outcome:
    """Send one request and stamp what comes back."""
    outcome, url = Outcome(arrived), urlsplit(load.url)
    secure = True if url.scheme == "https" else None
    writer = None
    try:
        reader, writer = await asyncio.open_connection(url.hostname, port(url), ssl=secure)
        data = json.dumps(body).encode()
        key = f"Authorization: Bearer {load.api_key}\r\n" if load.api_key else ""
        path = url.path.rstrip("/").removesuffix("/v1")
        head = (
            f"POST {path}/v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
            "Connection: close\r\n\r\n"
        )
        writer.write(head.encode() + data)
        status = (await reader.readline()).split()[1].decode()
        async for line in reader:  # chunk sizes and empty lines fall through
            if status != "200" and line.startswith(b"{"):
                raise RuntimeError(f"{status}: {line.decode()[:200]}")
            if not line.startswith(b"data: ") or line == b"data: [DONE]\n":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"])[:200])
            if any(choice["text"] for choice in event["choices"]):
                outcome.times.append(time.perf_counter() - start)
            if event.get("usage"):
                outcome.tokens = event["usage"]["completion_tokens"]
        if status != "200" or not outcome.tokens:
            raise RuntimeError(f"{status}: the answer ended early")
        if not outcome.times:  # ids that are no text
            outcome.times.append(time.perf_counter() - start)
    except (OSError, RuntimeError, ValueError, IndexError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    finally:
        if writer:
            writer.close()
    return outcome


def summary(outcomes: list[Outcome], limits: Limits) -> dict[str, float]:
    """Throughput, latencies in ms at the 50th, 90th and 99th percentile, and goodput: requests a
    second that were within both limits."""
    good = [o for o in outcomes if not o.error]
    figures: dict[str, float] = {"requests": len(outcomes), "errors": len(outcomes) - len(good)}
    if not good:
        return figures
    took = max(o.times[-1] for o in good) - min(o.arrived for o in good)
    within = [o for o in good if o.ttft <= limits.ttft_s and o.tpot <= limits.tpot_s]
    gaps = [b - a for o in good for a, b in zip(o.times, o.times[1:])]
    figures |= {
        "request_s": len(good) / took,
        "output_tok_s": sum(o.tokens for o in good) / took,
        "goodput_s": len(within) / took,
        "within_limits": len(within) / len(outcomes),
    }
    for name, values in (
        ("ttft", [o.ttft for o in good]),
        ("tpot", [o.tpot for o in good]),
        ("itl", gaps),
        ("e2e", [o.times[-1] - o.arrived for o in good]),
    ):
        for p in (50, 90, 99) if values else ():
            figures[f"{name}_p{p}_ms"] = 1e3 * percentile(values, p)
    return figures


def percentile(values: list[float], p: int) -> float:
    """Example: the 50th of 1, 2, 3 is 2"""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[p - 1]
