"""How many machines does a service need? The real engine, with a runner that computes nothing.

    python tools/plan.py fit --record fit-mine -- --checkpoint DIR --compile
    python tools/plan.py run --fit fit-mine --rate 200 --requests 12000 --replicas 10 20
    python tools/plan.py run --fit fit-mine --trace FILE.jsonl --promise ttft_p99=2 tpot_p99=0.1
    python tools/plan.py check --fit fit-mine     predictions beside what load.py measures

Scheduling, blocks, prefix sharing and preemption are not modelled: the real code runs. Each replica
is an Engine of scheduler.py with its own BlockPool. Only its forward is replaced, by one that
returns the same logits for every row and advances a clock by the time that the step would take.
sampling.py reads this clock.

`fit` starts the server and sends it requests. It measures the time from the start of each step to
the start of the next, and fits a linear function of the step's work to these times. So a step's
time includes sampling, and the server's own work between two steps. `fit` also measures how long a
request takes to reach the engine, and how long a token takes to reach the client. Each is the
difference between a time that the client notes and one that the server notes. What follows `--` is
for server.py.

Not simulated: the network between a proxy and the replicas, a replica that fails or starts, EOS (a
request has the length that it asks for), guesses, and other programs on the machine. Papers:
Agrawal et al. 2024 (Vidur, arXiv:2405.05465). Read: Simulated, Fleet, least_replicas; then Times.
"""

import argparse
import asyncio
import contextlib
import heapq
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

if __name__ == "__main__":  # a script uses its own checkout, whichever is installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from around import program  # first: Ctrl-C may come while PyTorch is imported

import torch
from torch import Tensor

import sampling
import server
from around.start import launch
from around.machine import Ranks, progress
from model import Config
from paged import BlockTable, Row, Runner, groups_of
from scheduler import Engine, Request
from around.settings import SamplingParams, check, supported
from tools import bench, load, report
from tools.load import Arrival, Load, Outcome

POLICIES = ("round-robin", "least-loaded", "prefix")
BOUND = 4  # a replica may have this many more sequences than the least loaded; see exercise 19
SHARES = (0.3, 0.6, 0.9, 1.2)  # the rates at which `check` measures, as shares of the capacity


# --- A step's time --------------------------------------------------------------------------------

# The terms of the linear function for a step's time: the step itself; prompts (rows of more than
# one token, which attention handles in groups of their own); rows; tokens and their square root
# (multiplying a matrix by many tokens at once is faster than by one after another); blocks read,
# padding included; pairs of a token and a block; and requests, those that came in while the step
# ran. Their HTTP is done by another thread, but Python runs one thread at a time, so the step waits
# for it. work_of counts all terms but this last one.
WORK = ("step", "prompts", "rows", "tokens", "root of tokens", "blocks", "pairs", "requests")


def work_of(rows: list[Row], block_size: int, max_blocks: int) -> list[float]:
    """Count what a forward has to do, in the order of WORK, without the requests.

    Args:
        max_blocks: Runner.max_blocks, which bounds a group.

    Example: block_size 4; rows of 1 token at positions 5 and 3, and of 2 tokens at 4:
        [1, 1, 3, 4, 2, 6, 8]: groups of 2 rows x 1 token x 2 blocks, and 1 row x 2 tokens x 2
        blocks
    """
    prompts = tokens = blocks = pairs = 0
    min_width = Runner.min_width
    for group in groups_of(rows, block_size, max_blocks, min_width):
        T = len(group[0].ids)
        read = len(group) * max(min_width, group[0].num_blocks(block_size))  # padded to the longest
        prompts += len(group) if T > 1 else 0
        tokens += T * len(group)
        blocks += read
        pairs += T * read
    return [1, prompts, len(rows), tokens, math.sqrt(tokens), blocks, pairs]


@dataclass(frozen=True)
class Times:
    """How long things take on a machine, and the limits of the server there.

    Attributes:
        seconds: for each item of WORK, the time that one unit of it adds to a step.
        inbound: seconds from a request's arrival until the engine may take it.
        outbound: seconds from when a sequence gets a token until its client has read it.
    """

    seconds: list[float]
    inbound: float
    outbound: float
    vocab_size: int
    max_seq_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    most: int
    max_queue: int
    small_chunk: int | None = None

    def step(self, work: list[float]) -> float:
        """Return the seconds of a step. The last item of `work`, the number of requests, may be
        missing, as in the result of work_of; then the time of their HTTP is not included."""
        return sum(count * seconds for count, seconds in zip(work, self.seconds))

    def scaled_to(self, sample: "Sample") -> "Times":
        """Return these times with `seconds` scaled by one factor to the machine's present speed.
        The factor is the total of a sample's measured step times, divided by the total of the
        predicted ones. Steps that took STALL_FACTOR times as long as predicted are left out of both
        totals. (fitted() scales by such a factor too, but includes these steps in it.)"""
        pairs = [(took, self.step(work)) for work, took in zip(sample.works, sample.took)]
        kept = [(took, ours) for took, ours in pairs if took < STALL_FACTOR * ours]
        factor = sum(took for took, _ in kept) / sum(ours for _, ours in kept)
        return replace(self, seconds=[factor * each for each in self.seconds])


# If a step takes this many times as long as expected, something else ran meanwhile.
STALL_FACTOR = 3


def fitted(works: list[list[float]], times: list[float]) -> list[float]:
    """Fit seconds, none of them negative, by least squares of the relative error.

    Steps that took STALL_FACTOR times what the first fit says are left out of the second. Then one
    factor scales all the seconds, so that the predictions for all steps, including those left out,
    add up to the measured time.

    Raises:
        ValueError: there are too few steps.
    """
    if len(times) < 50:
        raise ValueError(f"{len(times)} steps were timed, too few to fit: raise --requests")
    X, y = torch.tensor(works, dtype=torch.float64), torch.tensor(times, dtype=torch.float64)
    kept = torch.ones(len(y), dtype=torch.bool)
    for _ in range(2):
        seconds = least_squares(X[kept] / y[kept, None])
        kept = y < STALL_FACTOR * X @ seconds
    seconds *= y.sum() / (X @ seconds).sum()
    return seconds.tolist()


def least_squares(X: Tensor) -> Tensor:
    """Solve X @ seconds = 1 by least squares, with no negative number. While the solution has
    negative numbers, leave out one column and solve again: the column whose number, multiplied by
    the column's norm, is the most negative."""
    used, seconds = [*range(X.shape[1])], X.new_zeros(X.shape[1])
    while used:
        scale = X[:, used].norm(dim=0).clamp(min=1e-30)
        # gelsd allows linearly dependent columns. They occur if a term is the same in every step.
        found = torch.linalg.lstsq(X[:, used] / scale, X.new_ones(len(X), 1), driver="gelsd")
        shares = found.solution[:, 0]
        if shares.min() >= 0:
            seconds[used] = shares / scale
            break
        used.pop(int(shares.argmin()))
    return seconds


# --- The simulation -------------------------------------------------------------------------------


class Clock:
    """Stands in for the module `time` in sampling.py. Its time passes only when `now` is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    @contextlib.contextmanager
    def ticking(self) -> Iterator[None]:
        """Let sequences be stamped by this clock."""
        real, sampling.time = sampling.time, self
        try:
            yield
        finally:
            sampling.time = real


class Simulated:
    """Replaces paged.Runner. A forward only advances the clock by the time of a step."""

    def __init__(self, clock: Clock, times: Times, model: Any, *shape: Any) -> None:
        self.clock, self.times = clock, times
        self.logits = torch.zeros(times.max_num_seqs, 1)  # greedy: id 0

    def forward(self, rows: list[Row]) -> Tensor:
        work = work_of(rows, self.times.block_size, self.times.most)
        self.clock.now += self.times.step(work)
        return self.logits[: len(rows)]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Nothing is there to copy: a request here has one output."""


class Result(NamedTuple):
    """What came of a simulation.

    Attributes:
        outcomes: one for each request, in the order of arrival.
        figures: hits, preemptions, utilisation, ...; and `inside`, how many requests wait or run on
            average, which by Little's law is their rate times how long one stays.
    """

    outcomes: list[Outcome]
    figures: dict[str, float]


@dataclass
class Replica:
    """An engine, and what the simulation and the router keep track of.

    Attributes:
        is_resting: it has nothing to do, and no step is under way.
        came: requests that have come in during its step.
        leaving: requests that end with its step. The engine does not count them any more, but until
            the step is over a router does.
        busy: seconds in steps.
        made: tokens that it has made.
    """

    engine: Engine
    is_resting: bool = True
    came: int = 0
    leaving: int = 0
    busy: float = 0.0
    made: int = 0

    @property
    def load(self) -> int:
        return len(self.engine.running) + len(self.engine.waiting) + self.leaving

    @property
    def computed(self) -> int:
        return self.engine.stats["computed_tokens"]


class Fleet:
    """Replicas on one clock, and the router in front of them.

    Attributes:
        events: (when, which), a heap: when each replica is free for its next step.
        outcomes: one for each request, in the order of arrival.
        under_way: the outcome of each request that is in an engine.
    """

    def __init__(self, times: Times, count: int, policy: str) -> None:
        self.times, self.policy = times, supported("--policy", policy, *POLICIES)
        self.clock = Clock()
        config = Config(times.vocab_size, 1, 1, 1, 1, 1, 1, times.max_seq_len)
        model = SimpleNamespace(config=config, device=torch.device("cpu"))
        names = ("max_seq_len", "max_num_seqs", "max_num_batched_tokens", "num_blocks")
        limits = {name: getattr(times, name) for name in (*names, "block_size", "small_chunk")}
        if times.small_chunk:
            limits["max_num_batched_tokens"] = None  # the default, as in the server
        runner: Any = partial(Simulated, self.clock, times)
        count = check("--replicas", count, int, 1, 10000)
        self.replicas = [Replica(Engine(model, runner=runner, **limits)) for _ in range(count)]
        self.events: list[tuple[float, int]] = []
        self.outcomes: list[Outcome] = []
        self.under_way: dict[Request, Outcome] = {}

    def run(self, arrivals: Iterable[Arrival]) -> None:
        """Take one event after another: a request reaches its replica, or a replica is free."""
        with self.clock.ticking():
            for arrival in arrivals:
                joins = arrival.at + self.times.inbound
                self.run_until(joins)
                self.clock.now = joins
                self.submit(arrival)
            self.run_until(math.inf)
        assert not self.under_way

    def run_until(self, end: float) -> None:
        while self.events and self.events[0][0] < end:
            self.clock.now, i = heapq.heappop(self.events)
            self.step(i)

    def prepare(self, arrival: Arrival) -> Request:
        params = SamplingParams(temperature=0, max_tokens=arrival.new_tokens, ignore_eos=True)
        return self.replicas[0].engine.prepare(arrival.prompt, params)

    def submit(self, arrival: Arrival) -> None:
        """Queue a request at the replica that the router chooses."""
        outcome, request = Outcome(arrival.at), self.prepare(arrival)
        i = self.choose(request)
        replica = self.replicas[i]
        self.outcomes.append(outcome)
        if len(replica.engine.waiting) >= self.times.max_queue:
            outcome.error = "429"
            return
        self.under_way[replica.engine.submit(request)] = outcome
        if replica.is_resting:
            replica.is_resting = False
            heapq.heappush(self.events, (self.clock.now, i))
        else:
            replica.came += 1

    def choose(self, request: Request) -> int:
        """Which replica gets a request."""
        everyone = range(len(self.replicas))
        if self.policy == "round-robin":
            return len(self.outcomes) % len(everyone)
        loads = [replica.load for replica in self.replicas]
        computed = [replica.computed for replica in self.replicas]
        if self.policy == "least-loaded":
            return min(everyone, key=lambda i: (loads[i], computed[i]))
        # Exercise 19's rule: among the replicas whose load is within BOUND of the smallest, the one
        # that holds the longest beginning of the prompt.
        near = [i for i in everyone if loads[i] <= min(loads) + BOUND]
        ids = request.outputs[0].ids[:-1]  # the last one always runs
        return max(
            near, key=lambda i: (held(self.replicas[i].engine, ids), -loads[i], -computed[i])
        )

    def step(self, i: int) -> None:
        """Run a replica's next step as a whole. Requests that arrive before it ends wait for the
        following step, as in Server.drive."""
        replica, start = self.replicas[i], self.clock.now
        replica.leaving = 0
        if not replica.engine.queue:
            replica.is_resting = True
            return
        # Each request that came in during the previous step made that step end later.
        self.clock.now += replica.came * self.times.seconds[-1]
        replica.came = 0
        for request in replica.engine.step():
            replica.made += 1
            if request.finished:
                replica.leaving += 1
                job, outcome = request.outputs[0], self.under_way.pop(request)
                ends = (job.times[k] + self.times.outbound for k in (1, -1))
                outcome.times = array("d", ends)  # holds two floats without an object for each
                outcome.tokens = len(job.tokens)
        assert self.clock.now > start, "a step that runs nothing would be repeated for ever"
        replica.busy += self.clock.now - start
        heapq.heappush(self.events, (self.clock.now, i))


def held(engine: Engine, ids: list[int]) -> int:
    """Count how many of these ids, in whole blocks, are in the engine's cache, or will be once its
    queue has run. This does not call BlockPool.reuse(), because it must change nothing, not even
    the order in which blocks are evicted."""
    pool, table = engine.pool, BlockTable()
    while found := pool._by_key.get(pool._key_of(table, ids, len(table.chain) - 1)):
        table.chain.append(found[1])
    longest = len(table.chain) - 1
    for job in engine.queue:
        differ = (i for i, (a, b) in enumerate(zip(ids, job.ids)) if a != b)
        common = next(differ, min(len(ids), len(job.ids)))
        longest = max(longest, common // pool.block_size)
    return longest * pool.block_size


def simulate(
    times: Times, arrivals: Iterable[Arrival], count: int = 1, policy: str = POLICIES[1]
) -> Result:
    """Run requests through `count` replicas.

    Raises:
        SettingError: the engine refuses a request, or the policy or a number is not allowed.
    """
    fleet = Fleet(times, count, policy)
    fleet.run(arrivals)
    outcomes, stats = fleet.outcomes, [replica.engine.stats for replica in fleet.replicas]

    def total(name: str) -> int:
        return sum(each[name] for each in stats)

    answered = [outcome for outcome in outcomes if outcome.times]
    ends, starts = [o.times[-1] for o in answered], [o.arrived for o in answered]
    took = max(ends, default=0) - min(starts, default=0)
    figures = {
        "inside": (sum(ends) - sum(starts)) / max(took, 1e-9),
        "hits": total("prefix_cache_hits") / max(1, total("prefix_cache_queries")),
        "preemptions": total("num_preemptions"),
        "utilisation": sum(each.busy for each in fleet.replicas) / max(took * count, 1e-9),
        "mean_batch": sum(each.made for each in fleet.replicas) / max(1, total("engine_steps")),
    }
    return Result(outcomes, figures)


def figures_of(result: Result, limits: load.Limits) -> dict[str, float]:
    """Return all figures of a simulation and those of load.summary, except its gaps between tokens:
    only the times of a request's first and last token are kept."""
    figures = load.summary(result.outcomes, limits)
    return {k: v for k, v in figures.items() if not k.startswith("itl")} | result.figures


# --- How many replicas keep a promise -------------------------------------------------------------

PROMISE = re.compile(r"(ttft|tpot|e2e)_p(50|90|99)=(\d+\.?\d*|\.\d+)")


def parse_promise(words: list[str]) -> dict[str, float]:
    """Example: ["ttft_p99=2"], in seconds -> {"ttft_p99_ms": 2000.0}. Raises ValueError."""
    promise = {}
    for word in words:
        if not (match := PROMISE.fullmatch(word)) or float(match[3]) == 0:
            raise ValueError(f"--promise {word}: must be like ttft_p99=2 or tpot_p50=0.1, in s")
        promise[f"{match[1]}_p{match[2]}_ms"] = 1e3 * float(match[3])
    return promise


def least_replicas(
    figures_for: Callable[[int], dict[str, float]], promise: dict[str, float], most: int
) -> int:
    """Find the least number of replicas that keeps a promise, by doubling and then bisection. This
    assumes that one more replica never does harm.

    Raises:
        ValueError: `most` are not enough.
    """

    def kept(count: int) -> bool:
        figures = figures_for(count)
        return not figures["errors"] and all(figures[name] <= promise[name] for name in promise)

    too_few, enough = 0, 1
    while not kept(enough):
        if enough == most:
            worst = {name: figures_for(most).get(name, math.inf) for name in promise}
            words = ", ".join(f"{name} {value:.4g}" for name, value in worst.items())
            raise ValueError(f"the promise is not kept with {most} replicas: {words}")
        too_few, enough = enough, min(2 * enough, most)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if kept(middle):
            enough = middle
        else:
            too_few = middle
    return enough


# --- Traces ---------------------------------------------------------------------------------------


def read_trace(file: Path, times: Times) -> list[Arrival]:
    """Read a trace: a JSON object in each line, in the order of arrival:

        {"arrival": 0.5, "prompt": [5, 9, 2], "new_tokens": 64}
        {"arrival": 0.7, "prompt": 300, "shared": "system", "shared_tokens": 256, "new_tokens": 64}

    A prompt is a list of ids, or a length. For a length, ids are drawn at random, and prompts with
    the same `shared` begin with the same ids, shared_tokens of them.

    Raises:
        ValueError: names the line.
    """
    arrivals, before = [], 0.0
    # Lines end at \n alone.
    for number, line in enumerate(file.read_text(encoding="utf-8").rstrip("\n").split("\n"), 1):
        try:
            arrival = parse_line(line, number, times)
            if arrival.at < before:
                raise ValueError(f"arrival {arrival.at:g} is before the previous one, {before:g}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}, line {number}: {error}") from None
        before = arrival.at
        arrivals.append(arrival)
    return arrivals


def parse_line(line: str, number: int, times: Times) -> Arrival:
    """One line of a trace. Raises ValueError."""
    if not line.strip():
        raise ValueError("is empty: a trace must not have blank lines")
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError(f"must be an object, is {line:.40}")
    known = {"arrival", "prompt", "new_tokens", "shared", "shared_tokens"}
    if unknown := fields.keys() - known:
        raise ValueError(f"has the unknown field {min(unknown)!r}")
    for name in ("arrival", "prompt", "new_tokens"):
        if name not in fields:
            raise ValueError(f"lacks {name!r}")
    if ("shared" in fields) != ("shared_tokens" in fields):
        raise ValueError("needs both of shared and shared_tokens, or neither")
    at = check("arrival", fields["arrival"], float, 0, 1e9)
    count = check("new_tokens", fields["new_tokens"], int, 1)
    prompt = fields["prompt"]
    if isinstance(prompt, list):
        if "shared" in fields:
            raise ValueError("shared is for a prompt that is given by its length")
        for i in prompt:
            check("prompt", i, int, 0, times.vocab_size - 1)
        length = len(prompt)
    else:
        length = check("prompt", prompt, int, 1)
    if not length or length + count > times.max_seq_len:
        text = f"prompt of {length} tokens and {count} new ones, context is {times.max_seq_len}"
        raise ValueError(text if length else "prompt is empty")
    if not isinstance(prompt, list):
        shared = check("shared_tokens", fields.get("shared_tokens", 0), int, 0, length)
        begin = random.Random(f"shared {fields.get('shared')}")
        own = random.Random(f"line {number}")
        prompt = [begin.randrange(times.vocab_size) for _ in range(shared)]
        prompt += [own.randrange(times.vocab_size) for _ in range(length - shared)]
    return Arrival(float(at), prompt, count)


# --- The command line -----------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, 2 after an error, 130 after Ctrl-C."""
    return launch("plan.py", argv, parse_args, measure)


def measure(args: argparse.Namespace, ranks: Ranks) -> int:
    """Run the command that the arguments name."""
    bench.check_numbers(args)
    bench.check_outputs(args)
    return args.run(args)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="plan.py", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    fit_parser = commands.add_parser("fit", help="time the server's steps on this machine")
    fit_parser.set_defaults(run=fit, record=None)
    add_load(fit_parser, 96)
    text = "serve a model of random weights"
    fit_parser.add_argument("--shape", choices=bench.SHAPES, help=text)
    text = "options of server.py, after --: --checkpoint DIR ..."
    fit_parser.add_argument("server", nargs="*", metavar="OPTION", help=text)
    run_parser = commands.add_parser("run", help="simulate a load on replicas")
    run_parser.set_defaults(run=run)
    add_load(run_parser, 1000)
    add = run_parser.add_argument
    add("--fit", required=True, metavar="NAME", help="the record that fit has made")
    arrivals = run_parser.add_mutually_exclusive_group(required=True)
    arrivals.add_argument("--rate", type=float, help="requests a second; inf: at once")
    text = "requests, a JSON object in each line; see read_trace in plan.py"
    arrivals.add_argument("--trace", type=Path, metavar="FILE.jsonl", help=text)
    add("--replicas", type=int, nargs="+", help="how many; several to compare (default: 1)")
    text = "how to choose a replica; several to compare (default: least-loaded)"
    add("--policy", nargs="+", choices=POLICIES, default=["least-loaded"], help=text)
    text = "find the fewest replicas that keep, for example, ttft_p99=2 tpot_p99=0.1 (seconds)"
    add("--promise", nargs="+", metavar="FIGURE=SECONDS", help=text)
    add("--most", type=int, default=1024, help="most replicas to try for --promise")
    add("--ttft-limit", type=float, default=1.0, help="seconds to the first token, for goodput")
    add("--tpot-limit", type=float, default=0.1, help="seconds for each token after it")
    check_parser = commands.add_parser("check", help="compare predictions with measurements")
    check_parser.set_defaults(run=compare)
    add_load(check_parser, 100)
    add = check_parser.add_argument
    add("--fit", required=True, metavar="NAME", help="the record that fit has made")
    text = "the rates, as shares of the simulated capacity"
    add("--shares", type=float, nargs="+", default=[*SHARES], help=text)
    add("--repeat", type=int, default=5)
    # `fit` and `check` run this command to start a server that times its steps.
    timed_parser = commands.add_parser("timed")
    timed_parser.set_defaults(run=timed, record=None)
    timed_parser.add_argument("events", type=Path)
    timed_parser.add_argument("server", nargs="*")
    args = parser.parse_args(argv)
    args.words = sys.argv[1:] if argv is None else argv
    return args


def add_load(parser: argparse.ArgumentParser, requests: int) -> None:
    """Add the options of a load, those of `bench.py serve`."""
    add = parser.add_argument
    add("--requests", type=int, default=requests)
    add("--prompt-tokens", type=int, nargs="+", default=[16, 256], help="least and most")
    add("--new-tokens", type=int, nargs="+", default=[16, 128], help="least and most")
    add("--prefixes", type=int, default=0, help="how many beginnings the prompts share")
    add("--prefix-tokens", type=int, default=128)
    add("--vocab-size", type=int, default=1000, help="prompts are random ids below it")
    add("--sampling", choices=bench.SAMPLING, default="greedy")
    add("--json", action="store_true", help="print the figures as one JSON object")
    add("--record", metavar="NAME", help="keep the figures in benchmarks/NAME.json")


def load_of(args: argparse.Namespace, url: str = "") -> Load:
    lengths = [(a[0], a[-1]) for a in (args.prompt_tokens, args.new_tokens)]
    return Load(
        url,
        None,
        None,
        args.requests,
        *lengths,
        args.prefixes,
        args.prefix_tokens,
        args.vocab_size,
        bench.SAMPLING[args.sampling],
    )


def read_fit(name: str) -> tuple[Times, dict[str, Any]]:
    """The record that fit has made. Raises ValueError."""
    file = report.RECORDS / f"{name}.json"
    try:
        record = json.loads(file.read_text())
        return Times(**record["times"]), record
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--fit {name}: {file} is no record of `plan.py fit`: {error}") from None


def run(args: argparse.Namespace) -> int:
    """Simulate, for each number of replicas and each policy."""
    times, record = read_fit(args.fit)
    promise = args.promise and parse_promise(args.promise)
    torch.set_num_threads(1)
    limits = load.Limits(args.ttft_limit, args.tpot_limit)
    trace = args.trace and read_trace(args.trace, times)
    what = load_of(args)
    longest = what.prompt_tokens[1] + what.new_tokens[1] + what.prefix_tokens * bool(what.prefixes)
    if not trace and longest > times.max_seq_len:
        raise ValueError(f"{longest} tokens in a request, context is {times.max_seq_len}")
    rows: dict[str, dict[str, float]] = {}

    def figures_for(count: int, policy: str) -> dict[str, float]:
        name = f"{count} replicas, {policy}" if count > 1 else "1 replica"
        if name not in rows:
            arrivals = trace or load.arrivals(what, args.rate)
            total = len(trace) if trace else what.requests
            steps = progress(range(total), f"simulating {name}")
            moving = (arrival for _, arrival in zip(steps, arrivals))
            start = time.perf_counter()
            rows[name] = figures_of(simulate(times, moving, count, policy), limits)
            rows[name]["simulation_s"] = time.perf_counter() - start
        return rows[name]

    result: dict[str, Any] = {}
    for policy in args.policy:
        for count in args.replicas or ([] if promise else [1]):
            figures_for(count, policy)
        if promise:
            least = least_replicas(partial(figures_for, policy=policy), promise, args.most)
            result.setdefault("notes", []).append(f"{policy}: {least} replicas keep the promise")
    return publish(args, result | {"runs": rows}, record)


def publish(args: argparse.Namespace, result: dict[str, Any], record: dict[str, Any]) -> int:
    """Print figures, and with --record also write them to a file. They name the machine on which
    the fit was made."""
    rows = result["runs"].items()
    result["runs"] = {
        name: bench.spread({k: v if isinstance(v, list) else [v] for k, v in row.items()})
        for name, row in rows
    }
    result |= {name: record[name] for name in ("hardware", "versions", "model")}
    result["command"] = "python tools/plan.py " + " ".join(args.words)
    print(json.dumps(result) if args.json else bench.table(result), flush=True)
    if args.record:
        file = report.RECORDS / f"{args.record}.json"
        file.write_text(json.dumps(result, indent=1) + "\n")
    return 0


# --- Measuring ------------------------------------------------------------------------------------


def timed(args: argparse.Namespace) -> int:
    """Serve, and write down what happens, each event as a line of JSON:

    ["limits", the engine's and the server's limits by name, the number of threads]
    ["came", the prompt's key, when it was ready to be queued]
    ["step", when it began, whether another one followed at once, *what it had to do]
    ["first", the prompt's key, when it got its first token]
    """
    serve = server.serve

    def watched(engine: Engine, options: server.ServerArgs, listeners: list) -> int:
        work: list[float] = []
        step, forward, submit = engine.step, engine.runner.forward, engine.submit
        size, most = engine.pool.block_size, engine.runner.max_blocks

        def note(*event: Any) -> None:
            print(json.dumps(event), file=file, flush=True)

        def timed_forward(rows: list[Row]) -> Tensor:
            work[:] = work_of(rows, size, most)
            return forward(rows)

        def timed_step() -> list[Request]:
            start = time.perf_counter()
            ran = step()
            note("step", start, bool(engine.queue), *work)
            for job in (request.outputs[0] for request in ran):
                if len(job.tokens) == 1:
                    note("first", key_of(job.ids[: job.prompt_len]), job.times[1])
            return ran

        def timed_submit(request: Request) -> Request:
            job = request.outputs[0]
            note("came", key_of(job.ids), job.times[0])
            return submit(request)

        engine.step, engine.runner.forward, engine.submit = timed_step, timed_forward, timed_submit
        names = ("max_seq_len", "max_num_seqs", "max_num_batched_tokens")
        limits = {name: getattr(engine, name) for name in names} | {
            "vocab_size": engine.config.vocab_size,
            "num_blocks": engine.pool.num_blocks,
            "block_size": size,
            "most": most,
            "max_queue": options.max_queue,
            "small_chunk": None if options.max_num_batched_tokens else options.small_chunk,
        }
        with args.events.open("w") as file:
            note("limits", limits, torch.get_num_threads())
            return serve(engine, options, listeners)

    server.serve = watched
    return server.main(args.server)


def key_of(prompt: list[int]) -> int:
    return hash(tuple(prompt))  # the hash of a tuple of ints is the same in every process


@contextlib.contextmanager
def served(*words: str) -> Iterator[tuple[str, int]]:
    """Start a program that serves, on any free port, and end it again.

    Yields:
        Its address, and its process's id.

    Raises:
        ValueError: it has ended by itself. The error quotes the last line of its log.
    """
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([sys.executable, *words, "--port", "0"], stderr=log)
        try:
            while not (match := re.search(r"on (http://\S+:\d+)\n", text_of(log))):
                if process.poll() is not None:
                    lines = text_of(log).strip().splitlines() or ["no error"]
                    raise ValueError(f"the server has ended with {process.returncode}: {lines[-1]}")
                time.sleep(0.1)
            yield match[1], process.pid
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class OtherLoad:
    """How much of a processor is used by programs other than this one and its server. Only Linux
    reports it; on other systems it is 0."""

    def __init__(self, server: int) -> None:
        self.server = server
        self.start = time.perf_counter(), self.seconds()

    def seconds(self) -> float:
        """Processor seconds of all programs since the machine started, less those of ours."""
        if not Path("/proc/stat").exists():
            return 0.0
        user, nice, system, _, _, irq, softirq, *_ = map(
            int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]
        )
        # After the name, which is in parentheses: the 12th and 13th field are user and system.
        fields = Path(f"/proc/{self.server}/stat").read_text().rpartition(")")[2].split()
        ticks = user + nice + system + irq + softirq - int(fields[11]) - int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()

    def share(self) -> float:
        """Return the share of one processor that they have used since this object was made."""
        start, seconds = self.start
        return (self.seconds() - seconds) / (time.perf_counter() - start)


def text_of(file: Any) -> str:
    file.seek(0)
    return file.read()


def send(what: Load, rate: float) -> tuple[float, list[Outcome]]:
    """Send a load. Returns when it began, and what came of it.

    Raises:
        ValueError: a request has failed. Then there is nothing to compare.
    """
    start = time.perf_counter() + 0.1
    outcomes = asyncio.run(load.run(what, rate, start))
    if error := next((o.error for o in outcomes if o.error), None):
        raise ValueError(f"a request failed: {error}")
    return start, outcomes


class Sample(NamedTuple):
    """What a server did under a load that is sent to time it.

    Attributes:
        works, took: what its steps had to do, and the seconds that each took.
        inbound, outbound: of each request that was sent at a finite rate; see Times.
    """

    works: list[list[float]]
    took: list[float]
    inbound: list[float]
    outbound: list[float]

    def __add__(self, other: "Sample") -> "Sample":
        return Sample(*(mine + theirs for mine, theirs in zip(self, other)))


class TimedServer:
    """A server that writes down its steps; see timed().

    Attributes:
        url: its address.
        process: its id.
        limits: those of Times.
        threads: how many threads PyTorch uses in it.
    """

    def __init__(self, url: str, process: int, file: Any) -> None:
        self.url, self.process, self.file = url, process, file
        (_, self.limits, self.threads), *_ = self.events()

    def events(self) -> list[list[Any]]:
        """What has happened since this was last asked for."""
        return [json.loads(line) for line in self.file]

    def capacity(self, what: Load) -> float:
        """Requests a second, where all come at once."""
        _, outcomes = send(what._replace(url=self.url), math.inf)
        return len(outcomes) / max(outcome.times[-1] for outcome in outcomes)

    def sample(self, what: Load, rates: Iterable[float]) -> Sample:
        """Time the steps under loads of these rates, one after another. The first load has the seed
        what.seed, the next one what.seed + 1, and so on. Each load has a quarter of what.requests,
        but at least 8."""
        self.events()
        clients = {}  # prompt's key -> when it was to be sent, when its first token was read
        count = max(8, what.requests // 4)
        for i, rate in enumerate(rates):
            each = what._replace(url=self.url, seed=what.seed + i, requests=count)
            start, outcomes = send(each, rate)
            if rate < math.inf:  # requests that all come at once wait for each other
                for arrival, outcome in zip(load.arrivals(each, rate), outcomes):
                    ways = start + outcome.arrived, start + outcome.times[0]
                    clients[key_of(arrival.prompt)] = ways
        events = self.events()
        came = {key: at for kind, key, at, *_ in events if kind == "came"}
        first = {key: at for kind, key, at, *_ in events if kind == "first"}
        inbound = [came[key] - arrived for key, (arrived, _) in clients.items()]
        outbound = [read - first[key] for key, (_, read) in clients.items()]
        return Sample(*cycles(events), inbound, outbound)

    def times(self, sample: Sample) -> Times:
        """Fit the time of a step to the steps of a sample. The times on the way between a client
        and the engine are not fitted, but measured: both processes read the same clock."""
        ways = [load.percentile(values, 50) for values in (sample.inbound, sample.outbound)]
        return Times(fitted(sample.works, sample.took), *ways, **self.limits)


def cycles(events: list[list[Any]]) -> tuple[list[list[float]], list[float]]:
    """For each step that was followed at once by another, return its work, and the seconds from
    its start to the start of the next.

    Example: a step that began at 1.0, and was followed at once; a request; a step at 1.5:
        [[*work, 1]], [0.5]
    """
    works, took = [], []
    last, came = None, 0
    for kind, *event in events:
        came += kind == "came"
        if kind == "step":
            start, goes_on, *work = event
            if last:
                works.append([*last[1], came])
                took.append(start - last[0])
            last, came = (start, work) if goes_on else None, 0
    return works, took


@contextlib.contextmanager
def timed_server(options: list[str], shape: str | None = None) -> Iterator[TimedServer]:
    """Start a server with these options, send it a few requests, and end it again.

    Args:
        shape: serve a model of random weights, one of bench.SHAPES.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder, file = Path(temporary) / "model", Path(temporary) / "events.jsonl"
        if shape:
            write_shape(folder, bench.SHAPES[shape])
            options = ["--checkpoint", str(folder), *options]
        words = (__file__, "timed", str(file), "--", *options)
        with served(*words) as (url, process), file.open() as lines:
            timed = TimedServer(url, process, lines)
            send(Load(url, None, None, 16, (16, 256), (16, 64), 0, 0, 1000, {}, 999), math.inf)
            yield timed


def write_shape(folder: Path, config: Config) -> None:
    """Write a model with random weights, and a tokenizer in which every token has text (a number),
    because only a token with text is streamed at once."""
    folder.mkdir()
    bench.write_random(config, torch.bfloat16, folder)
    words = {f"\u0120{i}": i for i in range(config.vocab_size)}  # the mark of a space before it
    model = {"type": "BPE", "vocab": words, "merges": []}
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    text = json.dumps({"version": "1.0", "model": model, "decoder": decoder, "added_tokens": []})
    (folder / "tokenizer.json").write_text(text)


def fit(args: argparse.Namespace) -> int:
    """Time a server's steps, and how long requests and tokens take between client and engine."""
    what = load_of(args)._replace(seed=1000)
    with timed_server(args.server, args.shape) as timed:
        capacity = timed.capacity(what)
        rates = [math.inf, *(share * capacity for share in (0.3, 0.7, 1.0))]
        sample = Sample([], [], [], [])
        for i in progress(range(4), "timing the server"):
            sample += timed.sample(what._replace(seed=1001 + 4 * i), rates)
        times = timed.times(sample)
    errors = [abs(times.step(work) / took - 1) for work, took in zip(sample.works, sample.took)]
    rows: dict[str, dict[str, float]] = {
        name: {"us": 1e6 * seconds}
        for name, seconds in zip(
            (*WORK, "inbound", "outbound"), (*times.seconds, times.inbound, times.outbound)
        )
    }
    rows["all steps"] = {"steps": len(errors), "median_error": load.percentile(errors, 50)}
    served_model = re.search(r"--checkpoint[ =](\S+)", " ".join(args.server))
    args.checkpoint = Path(served_model[1]) if served_model else None
    args.threads, shape = timed.threads, args.shape
    args.shape = shape or "shakespeare"
    record = bench.provenance(torch.device("cpu"), args)
    result = {"times": asdict(times), "server": args.server, "shape": shape, "capacity": capacity}
    return publish(args, result | {"runs": rows}, record)


COMPARED = ("ttft_p50_ms", "ttft_p90_ms", "tpot_p50_ms", "tpot_p90_ms", "output_tok_s")


def compare(args: argparse.Namespace) -> int:
    """Start a server with the same options as the fit, send it loads at shares of its simulated
    capacity, and simulate the same loads. Each round goes through all rates in turn.

    This tests the fit and the simulation, not the changes in the machine's speed. That speed
    changes within seconds, depending on what else runs on the machine or on its host. Near the
    capacity, if steps take 2 % longer, the first token comes 10 % later. So a short sample of other
    requests is timed before and after each load, and the fit is scaled to these two by one factor.
    The prediction knows nothing of the load itself but the arrivals. `elsewhere` in the result
    tells how quiet the machine was.
    """
    times, record = read_fit(args.fit)
    torch.set_num_threads(1)
    limits, what = load.Limits(1.0, 0.1), load_of(args)
    # Each load has seeds of its own: a repeated prompt would be found in the prefix cache. They
    # count by 2, because a sample uses two.
    seeds = itertools.count(10000, 2)
    rows: dict[str, dict[str, list[float]]] = {}

    def sample() -> Sample:
        each = what._replace(seed=next(seeds))
        return timed.sample(each, (math.inf, 0.5 * record["capacity"]))

    def predicted(times: Times, what: Load, rate: float) -> dict[str, float]:
        return load.summary(simulate(times, load.arrivals(what, rate)).outcomes, limits)

    with timed_server(record["server"], record.get("shape")) as timed:
        capacity = predicted(times.scaled_to(sample()), what, math.inf)["request_s"]
        for _ in progress(range(args.repeat), "measuring"):
            before = sample()
            for share in args.shares:
                each = what._replace(url=timed.url, seed=next(seeds))
                others = OtherLoad(timed.process)
                real = load.summary(send(each, share * capacity)[1], limits)
                after = sample()
                now = times.scaled_to(before + after)
                ours = predicted(now, each, share * capacity)
                found = {name: real[name] for name in COMPARED}
                found |= {f"{name}_predicted": ours[name] for name in COMPARED}
                found |= {f"{name}_off": ours[name] / real[name] - 1 for name in COMPARED}
                found["slower_than_fit"] = sum(now.seconds) / sum(times.seconds)
                found["elsewhere"] = others.share()
                row = rows.setdefault(
                    f"{share:.0%} of capacity, {share * capacity:.3g} requests/s", {}
                )
                for name, value in found.items():
                    row.setdefault(name, []).append(value)
                before = after
    return publish(args, {"capacity": capacity, "runs": rows}, record)


if __name__ == "__main__":
    program.run(main)
