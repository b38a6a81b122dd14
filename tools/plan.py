"""How many machines does a service need? The real engine, with a runner that computes nothing.

    python tools/plan.py fit --record fit-mine -- --checkpoint DIR --compile
    python tools/plan.py run --fit fit-mine --rate 200 --requests 12000 --replicas 10 20
    python tools/plan.py run --fit fit-mine --trace FILE.jsonl --promise ttft_p99=2 tpot_p99=0.1
    python tools/plan.py check --fit fit-mine     predictions beside what load.py measures

Scheduling, blocks, prefix sharing and preemption are not modelled, but run: each replica is an
Engine of scheduler.py with its own BlockPool. Only its forward is replaced, by one that returns the
same logits for every row and advances a clock by the time that the step would take; and the clock
that sampling.py reads is that one. `fit` starts the server, sends it a load, and fits the time from
the start of one step to the start of the next over what the step had to do. So the sampler, and
what the server does beside the engine, is part of it. What follows `--` is for server.py.

Not simulated: the network between a proxy and the replicas, a replica that fails or starts, EOS (a
request has the length that it asks for), guesses, and other programs on the machine. Papers:
Agrawal et al. 2024 (Vidur, arXiv:2405.05465). Read: Simulated, simulate, Fleet, least_replicas;
then Times.
"""

import argparse
import asyncio
import contextlib
import heapq
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

if __name__ == "__main__":  # a script uses its own checkout, whichever is installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import program  # first: Ctrl-C may come while PyTorch is imported

import torch
from torch import Tensor

import sampling
import server
from generate import join
from model import Config
from paged import BlockTable, Row, groups_of
from scheduler import Engine, Request
from settings import Ranks, SamplingParams, check, launch, progress, supported
from tools import bench, load, report
from tools.load import Arrival, Load, Outcome

POLICIES = ("round-robin", "least-loaded", "prefix")
BOUND = 4  # sequences that a replica may have more than the least loaded; see exercise 19
SHARES = (0.3, 0.6, 0.9, 1.2)  # of the capacity: at which rates `check` measures


# --- A step's time --------------------------------------------------------------------------------

# What a step's time is fitted over: one step, and the numbers of its groups (each is attended by
# calls of its own), rows, tokens, blocks that are read (of each group, padded), and pairs of a
# token and a block.
WORK = ("step", "groups", "rows", "tokens", "blocks", "pairs")


def work_of(rows: list[Row], block_size: int, most: int) -> list[int]:
    """What a forward has to do, in the order of WORK.

    Args:
        most: Runner.most, which bounds a group.

    Example: block_size 4; rows of 1 token at positions 5 and 3, and of 3 tokens at 4:
        [1, 2, 3, 5, 6, 10]: groups of 2 rows x 1 token x 2 blocks, and 1 row x 3 tokens x 2 blocks
    """
    groups = tokens = blocks = pairs = 0
    for group in groups_of(rows, block_size, most):
        T = len(group[0].ids)
        read = len(group) * max(2, group[0].num_blocks(block_size))  # padded to the longest
        groups += 1
        tokens += T * len(group)
        blocks += read
        pairs += T * read
    return [1, groups, len(rows), tokens, blocks, pairs]


@dataclass(frozen=True)
class Times:
    """What a machine takes, and the limits of the server there.

    Attributes:
        seconds: of a step, for each of WORK.
        overhead: seconds between a client and the engine, of a request and its first token.
    """

    seconds: list[float]
    overhead: float
    vocab_size: int
    max_seq_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    most: int
    max_queue: int

    def step(self, work: list[int]) -> float:
        return sum(count * seconds for count, seconds in zip(work, self.seconds))


def fitted(works: list[list[int]], times: list[float]) -> list[float]:
    """Fit seconds, none of them negative, by least squares of the relative error.

    Steps that took more than three times what the first fit says are left out of the second, as
    something else ran then; but then the whole is scaled, so that all steps together take as long
    as they did.

    Raises:
        ValueError: there are too few steps.
    """
    if len(times) < 50:
        raise ValueError(f"{len(times)} steps were timed, too few to fit: raise --requests")
    X, y = torch.tensor(works, dtype=torch.float64), torch.tensor(times, dtype=torch.float64)
    kept = torch.ones(len(y), dtype=torch.bool)
    for _ in range(2):
        seconds = least_squares(X[kept] / y[kept, None])
        kept = y < 3 * X @ seconds
    seconds *= y.sum() / (X @ seconds).sum()
    return seconds.tolist()


def least_squares(X: Tensor) -> Tensor:
    """The solution of X @ seconds = 1 that has no negative number: where the plain one has, the
    most negative column (in its share of the whole) is left out, one after another."""
    used, seconds = [*range(X.shape[1])], X.new_zeros(X.shape[1])
    while used:
        scale = X[:, used].norm(dim=0).clamp(min=1e-30)
        # gelsd: columns may depend on each other, where a load never varies one of them.
        found = torch.linalg.lstsq(X[:, used] / scale, X.new_ones(len(X), 1), driver="gelsd")
        shares = found.solution[:, 0]
        if shares.min() >= 0:
            seconds[used] = shares / scale
            break
        used.pop(int(shares.argmin()))
    return seconds


# --- The simulation -------------------------------------------------------------------------------


class Clock:
    """What sampling.py takes for the module `time`: seconds that pass when they are told to."""

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
    """In the place of paged.Runner: a forward computes nothing, but takes its time."""

    def __init__(self, clock: Clock, times: Times, model: Any, *shape: Any) -> None:
        self.clock, self.times = clock, times
        self.logits = torch.zeros(times.max_num_seqs, 1)  # greedy: id 0

    def forward(self, rows: list[Row]) -> Tensor:
        work = work_of(rows, self.times.block_size, self.times.most)
        self.clock.now += self.times.step(work)
        return self.logits[: len(rows)]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Nothing is there to copy: a request here has one output."""


class Fleet:
    """Replicas, and who gets a request.

    Attributes:
        leaving: of each replica, how many requests end with the step that it is in: the engine does
            not count these any more, but a router still would.
    """

    def __init__(self, times: Times, count: int, policy: str, clock: Clock) -> None:
        self.times, self.policy = times, supported("--policy", policy, *POLICIES)
        config = Config(times.vocab_size, 1, 1, 1, 1, 1, 1, times.max_seq_len)
        model = SimpleNamespace(config=config, device=torch.device("cpu"))
        names = ("max_seq_len", "max_num_seqs", "max_num_batched_tokens", "num_blocks")
        limits = {name: getattr(times, name) for name in (*names, "block_size")}
        runner: Any = partial(Simulated, clock, times)
        self.engines = [Engine(model, runner=runner, **limits) for _ in range(count)]
        self.leaving = [0] * count
        self.sent = 0

    def prepare(self, arrival: Arrival) -> Request:
        params = SamplingParams(temperature=0, max_tokens=arrival.new_tokens, ignore_eos=True)
        return self.engines[0].prepare(arrival.prompt, params)

    def load(self, i: int) -> int:
        return len(self.engines[i].running) + len(self.engines[i].waiting) + self.leaving[i]

    def choose(self, request: Request) -> int:
        """Which replica gets a request."""
        everyone = range(len(self.engines))
        self.sent += 1
        if self.policy == "round-robin":
            return (self.sent - 1) % len(everyone)
        loads = [self.load(i) for i in everyone]
        computed = [engine.stats["computed_tokens"] for engine in self.engines]
        if self.policy == "least-loaded":
            return min(everyone, key=lambda i: (loads[i], computed[i]))
        # Exercise 19's rule: the longest beginning, of those that are not too far ahead in load.
        near = [i for i in everyone if loads[i] <= min(loads) + BOUND]
        ids = request.outputs[0].ids[:-1]  # the last one always runs
        return max(near, key=lambda i: (held(self.engines[i], ids), -loads[i], -computed[i]))


def held(engine: Engine, ids: list[int]) -> int:
    """How many of these ids stand in the engine's cache, or will once its queue has run, in whole
    blocks. Changes nothing, not even the order in which blocks are given up: so reuse() is not what
    to ask."""
    pool, table = engine.pool, BlockTable()
    while found := pool._found.get(pool._key_of(table, ids, len(table.chain) - 1)):
        table.chain.append(found[1])
    longest = len(table.chain) - 1
    for job in engine.queue:
        differ = (i for i, (a, b) in enumerate(zip(ids, job.ids)) if a != b)
        common = next(differ, min(len(ids), len(job.ids)))
        longest = max(longest, common // pool.block_size)
    return longest * pool.block_size


class Result(NamedTuple):
    """What came of a simulation.

    Attributes:
        outcomes: one of each request, in the order of arrival.
        figures: hits, preemptions, utilisation, ...
    """

    outcomes: list[Outcome]
    figures: dict[str, float]


def simulate(
    times: Times, arrivals: Iterable[Arrival], count: int = 1, policy: str = POLICIES[1]
) -> Result:
    """Run requests through so many replicas, event by event: an arrival, or a replica that is free
    for its next step.

    A step runs as a whole when it begins, so what arrives meanwhile waits for the next one, as in
    Server.drive.

    Raises:
        SettingError: a request that the engine refuses, or what no number can be.
    """
    clock = Clock()
    fleet = Fleet(times, check("--replicas", count, int, 1, 10000), policy, clock)
    outcomes, under_way = [], {}
    free = []  # (when, which): replicas that are in a step, or about to begin one
    resting = [True] * count
    busy, rows = 0.0, 0

    def submit(arrival: Arrival) -> None:
        outcome = Outcome(arrival.at)
        outcomes.append(outcome)
        request = fleet.prepare(arrival)
        i = fleet.choose(request)
        if len(fleet.engines[i].waiting) >= times.max_queue:
            outcome.error = "429"
            return
        under_way[fleet.engines[i].submit(request)] = outcome
        if resting[i]:
            resting[i] = False
            heapq.heappush(free, (clock.now, i))

    def step(i: int) -> None:
        nonlocal busy, rows
        fleet.leaving[i] = 0
        engine, start = fleet.engines[i], clock.now
        if not engine.queue:
            resting[i] = True
            return
        for request in engine.step():
            rows += 1
            if request.finished:
                fleet.leaving[i] += 1
                job = request.outputs[0]
                outcome = under_way.pop(request)
                outcome.times = array("d", (job.times[1], job.times[-1]))
                for k in range(2):
                    outcome.times[k] += times.overhead
                outcome.tokens = len(job.tokens)
        assert clock.now > start, "a step that runs nothing would be repeated for ever"
        busy += clock.now - start
        heapq.heappush(free, (clock.now, i))

    with clock.ticking():
        for arrival in arrivals:
            while free and free[0][0] < arrival.at:
                clock.now, i = heapq.heappop(free)
                step(i)
            clock.now = arrival.at
            submit(arrival)
        while free:
            clock.now, i = heapq.heappop(free)
            step(i)
    assert not under_way
    stats = [engine.stats for engine in fleet.engines]

    def total(name: str) -> int:
        return sum(each[name] for each in stats)

    ends = [outcome.times[-1] for outcome in outcomes if outcome.times]
    took = max(ends, default=0) - min((o.arrived for o in outcomes), default=0)
    figures = {
        "hits": total("prefix_cache_hits") / max(1, total("prefix_cache_queries")),
        "preemptions": total("num_preemptions"),
        "utilisation": busy / max(took * count, 1e-9),
        "mean_batch": rows / max(1, total("engine_steps")),
    }
    return Result(outcomes, figures)


def figures_of(result: Result, limits: load.Limits) -> dict[str, float]:
    """All figures of a simulation, those of load.summary included. Its gaps between tokens are not:
    of each request the first and the last token are kept."""
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
    """The least number of replicas that keeps a promise, by doubling and then halving: this takes
    it that one more never does harm.

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

    A prompt is its ids, or its length; then ids are drawn, and prompts of the same `shared` begin
    with the same shared_tokens.

    Raises:
        ValueError: names the line.
    """
    arrivals, before = [], 0.0
    # Lines end at \n alone.
    for number, line in enumerate(file.read_text(encoding="utf-8").rstrip("\n").split("\n"), 1):
        try:
            arrival = parse_line(line, number, times)
            if arrival.at < before:
                raise ValueError(f"arrival {arrival.at:g} is before that of the last, {before:g}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}, line {number}: {error}") from None
        before = arrival.at
        arrivals.append(arrival)
    return arrivals


def parse_line(line: str, number: int, times: Times) -> Arrival:
    """One line of a trace. Raises ValueError."""
    if not line.strip():
        raise ValueError("is empty: a trace has no gaps")
    wish = json.loads(line)
    if not isinstance(wish, dict):
        raise ValueError(f"must be an object, is {line:.40}")
    known = {"arrival", "prompt", "new_tokens", "shared", "shared_tokens"}
    if unknown := wish.keys() - known:
        raise ValueError(f"has the unknown field {min(unknown)!r}")
    for name in ("arrival", "prompt", "new_tokens"):
        if name not in wish:
            raise ValueError(f"lacks {name!r}")
    if ("shared" in wish) != ("shared_tokens" in wish):
        raise ValueError("needs both of shared and shared_tokens, or neither")
    at = check("arrival", wish["arrival"], float, 0, 1e9)
    count = check("new_tokens", wish["new_tokens"], int, 1)
    prompt = wish["prompt"]
    if isinstance(prompt, list):
        if "shared" in wish:
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
        shared = check("shared_tokens", wish.get("shared_tokens", 0), int, 0, length)
        begin = random.Random(f"shared {wish.get('shared')}")
        own = random.Random(f"line {number}")
        prompt = [begin.randrange(times.vocab_size) for _ in range(shared)]
        prompt += [own.randrange(times.vocab_size) for _ in range(length - shared)]
    return Arrival(float(at), prompt, count)


# --- The command line -----------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, 2 for an error of use, 130 for Ctrl-C."""
    return launch("plan.py", argv, parse_args, measure, join)


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
    text = "options of server.py, after --: --checkpoint DIR ..."
    fit_parser.add_argument("server", nargs="*", metavar="OPTION", help=text)
    run_parser = commands.add_parser("run", help="simulate a load on replicas")
    run_parser.set_defaults(run=run)
    add_load(run_parser, 1000)
    add = run_parser.add_argument
    add("--fit", required=True, metavar="NAME", help="the record that fit has made")
    arrivals = run_parser.add_mutually_exclusive_group(required=True)
    arrivals.add_argument("--rate", type=float, help="requests a second; inf: at once")
    arrivals.add_argument("--trace", type=Path, metavar="FILE.jsonl", help="see read_trace")
    add("--replicas", type=int, nargs="+", help="how many; several to compare (default: 1)")
    add("--policy", nargs="+", choices=POLICIES, default=["least-loaded"], help="several likewise")
    text = "such as ttft_p99=2 tpot_p99=0.1, in seconds: find the least number that keeps it"
    add("--promise", nargs="+", metavar="FIGURE=SECONDS", help=text)
    add("--most", type=int, default=1024, help="replicas to try")
    add("--ttft-limit", type=float, default=1.0, help="seconds to the first token, for goodput")
    add("--tpot-limit", type=float, default=0.1, help="seconds for each token after it")
    check_parser = commands.add_parser("check", help="what is predicted, and what is measured")
    check_parser.set_defaults(run=compare)
    add_load(check_parser, 100)
    add = check_parser.add_argument
    add("--fit", required=True, metavar="NAME", help="the record that fit has made")
    text = "of the simulated capacity: the rates"
    add("--shares", type=float, nargs="+", default=[*SHARES], help=text)
    add("--repeat", type=int, default=5)
    # A server whose steps are timed, which `fit` starts.
    timed_parser = commands.add_parser("timed")
    timed_parser.set_defaults(run=timed, record=None)
    timed_parser.add_argument("steps", type=Path)
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
    add("--prefixes", type=int, default=0, help="so many beginnings that prompts share")
    add("--prefix-tokens", type=int, default=128)
    add("--vocab-size", type=int, default=1000, help="prompts are random ids below it")
    add("--sampling", choices=bench.SAMPLING, default="greedy")
    add("--json", action="store_true", help="print the figures as one JSON object")
    add("--record", metavar="NAME", help="keep the figures in benchmarks/NAME.json")


def load_of(args: argparse.Namespace, url: str = "") -> Load:
    lengths = [(a[0], a[-1]) for a in (args.prompt_tokens, args.new_tokens)]
    return Load(
        url, None, None, args.requests, *lengths, args.prefixes, args.prefix_tokens,
        args.vocab_size, bench.SAMPLING[args.sampling],
    )  # fmt: skip


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
            moving = progress(arrivals, f"simulating {name}", total)
            rows[name] = figures_of(simulate(times, moving, count, policy), limits)
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
    """Print figures, and record them where that is asked for, with the machine of the fit."""
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
    """Serve, and write down each step: when it began, what it had to do, and whether another one
    followed at once; and the engine's limits."""
    serve = server.serve

    def watched(engine: Engine, options: server.ServerArgs) -> int:
        steps, work = [], []
        step, forward = engine.step, engine.runner.forward
        size, most = engine.pool.block_size, engine.runner.most

        def timed_forward(rows: list[Row]) -> Tensor:
            work[:] = work_of(rows, size, most)
            return forward(rows)

        def timed_step() -> list[Request]:
            start = time.perf_counter()
            ran = step()
            steps.append([start, bool(engine.queue), *work])
            return ran

        engine.step, engine.runner.forward = timed_step, timed_forward
        status = serve(engine, options)
        limits = {
            name: getattr(engine, name)
            for name in ("max_seq_len", "max_num_seqs", "max_num_batched_tokens")
        }
        limits |= {
            "vocab_size": engine.config.vocab_size, "num_blocks": engine.pool.num_blocks,
            "block_size": size, "most": most, "max_queue": options.max_queue,
            "threads": torch.get_num_threads(),
        }  # fmt: skip
        args.steps.write_text(json.dumps({"steps": steps, "limits": limits}))
        return status

    server.serve = watched
    return server.main(args.server)


@contextlib.contextmanager
def served(*words: str) -> Iterator[str]:
    """Start a program that serves, on any port, and end it again. Gives its address.

    Raises:
        ValueError: it has ended by itself, with its last line.
    """
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen([sys.executable, *words, "--port", "0"], stderr=said)
        try:
            while not (match := re.search(r"on (http://\S+:\d+)\n", text_of(said))):
                if process.poll() is not None:
                    lines = text_of(said).strip().splitlines() or ["no word"]
                    raise ValueError(f"the server has ended with {process.returncode}: {lines[-1]}")
                time.sleep(0.1)
            yield match[1]
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def text_of(file: Any) -> str:
    file.seek(0)
    return file.read()


def send(what: Load, rate: float) -> list[Outcome]:
    """Send a load. Raises ValueError where a request fails: then there is nothing to compare."""
    outcomes = asyncio.run(load.run(what, rate))
    if error := next((o.error for o in outcomes if o.error), None):
        raise ValueError(f"a request failed: {error}")
    return outcomes


def fit(args: argparse.Namespace) -> int:
    """Time the server's steps under four loads: all requests at once, which gives the capacity,
    and shares of that. Then fit a step's time; and, from the lightest, the overhead."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "steps.json"
        with served(__file__, "timed", str(file), "--", *args.server) as url:
            what = load_of(args, url)._replace(seed=1000)
            send(what._replace(requests=min(what.requests, 16), seed=999), math.inf)  # warm up
            began, start = time.perf_counter(), time.perf_counter()
            send(what, math.inf)
            capacity = what.requests / (time.perf_counter() - start)
            shares = progress((0.2, 0.5, 0.8, 1.0), "timing the server")
            sent = []
            for i, share in enumerate(shares):
                light = what._replace(seed=1001 + i, requests=max(8, int(what.requests * share)))
                sent.append((light, share * capacity, send(light, share * capacity)))
        found = json.loads(file.read_text())
    cycles = [
        (work, after[0] - at)
        for (at, goes_on, *work), after in pairwise(found["steps"])
        if goes_on and at > began
    ]
    threads = found["limits"].pop("threads")
    works, took = zip(*cycles) if cycles else ((), ())
    times = Times(fitted([*works], [*took]), 0.0, **found["limits"])
    light, rate, measured = sent[0]
    predicted = simulate(times, load.arrivals(light, rate)).outcomes
    overhead = [real.ttft - ours.ttft for real, ours in zip(measured, predicted)]
    times = Times(**asdict(times) | {"overhead": max(0.0, load.percentile(overhead, 50))})
    errors = [abs(times.step(work) / seconds - 1) for work, seconds in cycles]
    rows = {
        name: {"us": 1e6 * seconds}
        for name, seconds in zip((*WORK, "overhead"), (*times.seconds, times.overhead))
    }
    rows["all steps"] = {"steps": len(cycles), "median_error": load.percentile(errors, 50)}
    args.threads, args.checkpoint, args.shape = threads, None, "served"
    if "--checkpoint" in args.server:
        args.checkpoint = Path(args.server[args.server.index("--checkpoint") + 1])
    elif not args.server:
        args.shape = "shakespeare"
    record = bench.provenance(torch.device("cpu"), args)
    result = {"times": asdict(times), "server": args.server, "capacity": capacity, "runs": rows}
    return publish(args, result, record)


COMPARED = ("ttft_p50_ms", "ttft_p90_ms", "tpot_p50_ms", "tpot_p90_ms", "output_tok_s")


def compare(args: argparse.Namespace) -> int:
    """Send loads to a server as the fit's was started, at shares of its simulated capacity, and
    simulate the very same ones. Rounds go through all rates in turn."""
    times, record = read_fit(args.fit)
    torch.set_num_threads(1)
    limits = load.Limits(1.0, 0.1)
    what = load_of(args)
    at_once = load.summary(simulate(times, load.arrivals(what, math.inf)).outcomes, limits)
    rates = {share: share * at_once["request_s"] for share in args.shares}
    rows: dict[str, dict[str, list[float]]] = {}
    here = Path(__file__).resolve().parent.parent / "server.py"
    with served(str(here), *record["server"]) as url:
        send(what._replace(url=url, requests=16, seed=999), math.inf)  # warm up
        # Each with a seed of its own, or prompts would be found in the cache from the second rate
        # on: they do not depend on it.
        seeds = iter(range(args.repeat * len(rates)))
        for _ in progress(range(args.repeat), "measuring"):
            for share, rate in rates.items():
                each = what._replace(url=url, seed=next(seeds))
                real = load.summary(send(each, rate), limits)
                ours = load.summary(simulate(times, load.arrivals(each, rate)).outcomes, limits)
                row = rows.setdefault(f"{share:.0%} of capacity, {rate:.3g} requests/s", {})
                for name in COMPARED:
                    row.setdefault(name, []).append(real[name])
                    row.setdefault(f"{name}_predicted", []).append(ours[name])
    for row in rows.values():
        for name in COMPARED:
            real, ours = (bench.spread(row)[key][0] for key in (name, f"{name}_predicted"))
            row[f"{name}_off"] = [ours / real - 1]
    return publish(args, {"capacity": at_once["request_s"], "runs": rows}, record)


if __name__ == "__main__":
    program.run(main)
