"""Measure the engine; every number in the README comes from here.

    python tools/bench.py latency --shape 1b --compile    one batch: first token, decode, prefill
    python tools/bench.py latency ... --speculate 4       the same with guessed tokens, and without
    python tools/bench.py throughput --shape 1b --compile     many requests, through the scheduler
    python tools/bench.py sample                          the sampler alone
    python tools/bench.py prefix --shape 1b --compile     a long prompt whose beginning is cached
    python tools/bench.py growth --shape 1b --compile     a step, by length and by sequences
    python tools/bench.py versus --shape 1b               other engines that are installed, in turn
    python tools/bench.py serve --url http://127.0.0.1:8000   a load on a running server
    python tools/bench.py quality --checkpoint DIR --text FILE     the cost of fewer bits
    python tools/bench.py report              put the recorded figures into README.md and its pages

Machines are noisy and drift, so a speed is never reported alone. The machine's own limits (reading
memory, multiplying matrices) are measured in the same process, in turn with the engine, and each
figure is given as a fraction of the limit measured beside it. Figures are medians, with their
spread. Read: Rows, in_turn, then the command of interest. COMMANDS, at the end, lists all options.
"""

import asyncio
import copy
import itertools
import json
import math
import os
import platform
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

if __name__ == "__main__":  # a script uses its own checkout, whichever is installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

import sampling
import tp
from around.fast import make_fast
from around.folder import Tokenizer, build, load_config, load_model, named_tensors
from around.machine import Ranks, progress
from around.settings import CHUNK, DTYPES, Limits, SamplingParams, check, given
from around.start import launch
from kv_cache import StaticCache
from model import Config, Transformer, rope_frequencies
from paged import BlockPool, BlockTable, Row, Runner
from quantize import MODES, quantize_model
from scheduler import STATS, Engine
from speculative import DraftModel, NGram
from tools import load as load_tool
from tools import report
from tools import versus as versus_tool
from tools.convert import calibrate, save_weights
from tools.measure import bytes_per_step, gemm_peak, peak_memory, prefill_flops, read_bandwidth

# Llama-like; parameters without the embedding table: 86 M, 1.03 B, 6.6 B. Of moe's 1.00 B a token
# uses 208 M: it has three layers with the matrices of Qwen3-30B-A3B's experts, half as many of
# them. Qwen3-0.6B has 440 M, and its embedding, which is also its lm_head, 156 M.
SHAPES = {
    "110m": Config(32000, 768, 2048, 12, 12, 12, 64),
    "1b": Config(32000, 2048, 5632, 22, 32, 4, 64),
    "7b": Config(32000, 4096, 11008, 32, 32, 32, 128),
    "qwen3-0.6b": Config(
        151936, 1024, 3072, 28, 16, 8, 128, 40960, rope_theta=1e6, qk_norm=True,
        tie_word_embeddings=True,
    ),
    "smollm2-135m": Config(49152, 576, 1536, 30, 9, 3, 64, 8192, tie_word_embeddings=True),
    "moe": Config(
        32000, 2048, 6144, 3, 32, 4, 64,
        num_experts=64, num_experts_per_tok=8, moe_intermediate_size=768,
    ),
}  # fmt: skip

# What these checkpoints' generation_config.json suggest.
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0},
    "qwen": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "llama": {"temperature": 0.6, "top_p": 0.9},
}
SETTINGS = SAMPLING | {
    "temperature": {"temperature": 0.6},
    "min_p": {"temperature": 0.6, "min_p": 0.05},
    "flat": {"temperature": 2.0, "top_p": 0.99},  # so flat that all of it has to be sorted
    "penalties": {"temperature": 0.6, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "logprobs": {"temperature": 0.6, "logprobs": 5},
}
SPREAD = 4.0  # standard deviation of a trained model's logits, of which random ones take it
Ways = dict[str, Callable[[], dict[str, float]]]  # a row -> what measures its figures

# --- What the commands share ----------------------------------------------------------------------


class Rows(dict[str, dict[str, list[float]]]):
    """What was measured: row -> figure -> one value for each round."""

    def add(self, row: str, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self.setdefault(row, {}).setdefault(name, []).append(value)


def rounds(repeat: int, warm_up: bool = True) -> Iterator[bool]:
    """Yield False for a round that warms up, and True for each round that counts."""
    for number in progress(range(repeat + warm_up), "measuring"):
        yield number >= warm_up


def in_turn(ways: Ways, repeat: int, ratios: Iterable[str] = (), warm_up: bool = True) -> Rows:
    """Measure each row once in each round, so that a disturbance meets all of them.

    Args:
        ways: row -> a function that measures its figures. (A rank that waits returns none.)
        ratios: names of report.RATIOS, which compare a row with another one of the same round.
    """
    rows = Rows()
    for counts in rounds(repeat, warm_up):
        measured = {name: way() for name, way in ways.items()}
        first = next(iter(measured.values()))
        for name, figures in measured.items():
            for ratio in ratios if first else ():
                figure, base = report.RATIOS[ratio]
                figures[ratio] = figures[figure] / measured.get(base, first)[figure]
            if counts:
                rows.add(name, figures)
    return rows


def seconds(act: Callable[..., Any], *args: Any) -> float:
    """Measure how long a call takes."""
    start = time.perf_counter()
    act(*args)
    return time.perf_counter() - start


def median_seconds(act: Callable[[Any], Any], values: Iterable[Any]) -> float:
    """Measure how long a call takes with each of several values."""
    return statistics.median(seconds(act, value) for value in values)


def finish(engine: Engine, prompt: list[int], params: SamplingParams) -> sampling.Sequence:
    """Run one request to its end, and return its only sequence."""
    (sequence,) = engine.add_request(prompt, params).outputs
    for _ in engine.run():
        pass
    return sequence


def prepare(
    args: Namespace, form: str = "none", batch: int | None = None, ranks: Ranks | None = None
) -> tuple[Transformer, dict[str, Any]]:
    """Make the model that the arguments ask for, or one rank's share, and make it fast, as
    generate.py and server.py do; `quality` leaves it plain. Returns the first figures, too.

    Args:
        form: the bits of its weights, as --quantize names them.
        batch: the most sequences that run at once, with a static cache; None: for an Engine.
    """
    start, dtype = time.perf_counter(), DTYPES[args.dtype]
    ranks = ranks or args.ranks
    if args.checkpoint:
        model = load_model(args.checkpoint, ranks.device, dtype, ranks.shard)
    else:
        model = random_model(SHAPES[args.shape], dtype, ranks)
    if form != "none":
        quantize_model(model, form)
    result = {"load_s": time.perf_counter() - start, "weights_gb": bytes_per_step(model, 0) / 1e9}
    result["model_gb"] = sum(t.nbytes for _, t in named_tensors(model)) / 1e9
    if "compile" in args:
        took = seconds(make_fast, model, args.compile, batch)
        result |= {"compile_s": took} if args.compile else {"load_s": result["load_s"] + took}
    return model, result


def random_model(config: Config, dtype: torch.dtype, ranks: Ranks) -> Transformer:
    """Make a model of random weights, in place: the model's speed does not depend on their values.
    The sampler's does depend on how flat a distribution is, so logits have a trained model's
    spread."""
    if ranks.shard:  # a rank has a part of lm_head, and the whole embedding
        config = replace(config, tie_word_embeddings=False)
    with torch.device("meta"):
        model = build(config).to(dtype)
    if ranks.shard:
        model, _ = ranks.shard(model, {})
    model = model.to_empty(device=ranks.device)
    model.inv_freq = rope_frequencies(config).to(ranks.device)
    noise = (torch.randn(2**20 + 7) * 0.02).to(dtype).to(ranks.device)  # odd length: rows differ
    for parameter in model.parameters():
        for piece in parameter.view(-1).split(len(noise)):
            piece.copy_(noise[: len(piece)]) if parameter.dim() > 1 else piece.fill_(1)
    model.norm.weight.fill_(SPREAD / (0.02 * config.hidden_size**0.5))
    return model


def publish(args: Namespace, rows: Rows, result: dict[str, Any]) -> int:
    """Complete the result, print it, and record it where that is asked for. Returns 0.

    Args:
        result: other figures than the rows; "runs" and the provenance are added.
    """
    result["runs"] = {name: spread(row) for name, row in rows.items()}
    if "model_gb" in result:
        result.setdefault("peak_memory_gb", peak_memory(args.ranks.device))
    result |= provenance(args.ranks.device, args)
    print(json.dumps(result) if args.json else table(result), flush=True)
    if args.record:
        file = report.RECORDS / f"{args.record}.json"
        file.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def spread(figures: dict[str, list[float]]) -> dict[str, tuple[float, float, float]]:
    """Return the median, the least and the most of each figure."""
    return {name: (statistics.median(v), min(v), max(v)) for name, v in figures.items()}


def provenance(device: torch.device, args: Namespace) -> dict[str, str]:
    """Return the machine, versions, command and model, without which a figure means nothing."""
    name = platform.processor() or platform.machine()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    launcher = "python" if ranks == 1 else f"torchrun --standalone --nproc-per-node {ranks}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((x.split(": ")[1] for x in lines if x.startswith("model name")), name)
        name += f" ({torch.backends.cpu.get_cpu_capability()})"  # some names do not tell it
    threads, words = getattr(args, "threads", None) or torch.get_num_threads(), " ".join(args.words)
    return {
        "hardware": f"{name}, {threads} threads" + " a rank" * (ranks > 1),
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        # without the key
        "command": re.sub(r"(--api-key[ =])\S+", r"\1...", f"{launcher} tools/bench.py " + words),
        "model": args.checkpoint.name if args.checkpoint else args.shape,
    }


def table(result: dict[str, Any]) -> str:
    """Format the figures for people: the median, and least..most of the rounds."""
    lines, number = [result["hardware"], result["versions"], result["command"], ""], report.number
    for name in ("load_s", "compile_s", "model_gb", "weights_gb", "peak_memory_gb"):
        if name in result:
            lines.append(f"{name:24}{number(result[name]):>10}")
    lines += [f"{name:24}{version}" for name, version in result.get("engines", {}).items()]
    lines += result.get("notes", [])
    for run, figures in result["runs"].items():
        lines += ["", run]
        for name, (median, low, high) in figures.items():
            name += " (prefill MFU)" * (name == "of_gemm_peak")
            lines.append(f"  {name:30}{number(median):>10}   ({number(low)} .. {number(high)})")
    return "\n".join(lines)


# --- latency --------------------------------------------------------------------------------------


@torch.no_grad()
def latency(args: Namespace) -> int:
    """Measure time to first token, decode and prefill speed, next to the machine's limits."""
    if args.speculate:
        return speculation(args)
    alone = Ranks(args.ranks.device)
    shares = [args.ranks] if args.ranks.world_size == 1 else [alone, args.ranks]
    runs: dict[str, Run | None] = {}
    result: dict[str, Any] = {}
    for mode, share in itertools.product(args.quantize, shares):
        works = share is args.ranks or args.ranks.rank == 0
        if works:
            model, figures = prepare(args, mode, max(args.batch), share)
            result = figures | result if share is args.ranks else result
        for batch in args.batch:
            name = f"{mode}, " * (mode != "none") + f"batch {batch}"
            name += ", one rank" * (share is alone)
            runs[name] = None  # this rank waits meanwhile
            if works:
                runs[name] = Run(model, batch, args, share.world_size)
                runs[name].generate()  # warm up: any graph for this batch size is compiled here
    result["peak_memory_gb"] = peak_memory(model.device)  # before the limits' own buffers exist
    gemm = gemm_peak(model)
    ways = {name: partial(run.measure, gemm) if run else dict for name, run in runs.items()}
    if len(shares) > 1:
        ways = {name: partial(after_all, way) for name, way in ways.items()}
    rows = in_turn(ways, args.repeat, ["times_first_row"], warm_up=False)
    return 0 if args.ranks.rank else publish(args, rows, result)


def after_all(act: Callable[[], Any]) -> Any:
    """Act when all ranks have come: where one works alone, the others wait."""
    torch.distributed.barrier()
    return act()


class Run:
    """One row of the table: a model, its cache, and a batch of equal prompts."""

    def __init__(self, model: Transformer, batch: int, args: Namespace, ranks: int) -> None:
        self.model, self.batch, self.new_tokens, self.ranks = model, batch, args.new_tokens, ranks
        torch.manual_seed(0)  # ranks run the same prompt
        prompt = torch.randint(model.config.vocab_size, (batch, args.prompt_tokens))
        self.prompt = prompt.to(model.device)
        self.cache = StaticCache(model, batch, args.prompt_tokens + args.new_tokens)

    def forward(self, tokens: Tensor, start: int) -> Tensor:
        for part in tokens.split(CHUNK, dim=1):
            B, T = part.shape
            last = torch.arange(T - 1, B * T, T, device=tokens.device)  # each row's last token
            positions, caches = self.cache.plan(start, start + T)
            start += T
            logits = self.model(part, positions, caches, last)
        return logits.argmax(-1, keepdim=True)  # (B, 1)

    def generate(self, pause: Callable[[], None] = lambda: None) -> tuple[float, float]:
        """Return the seconds to the first token, and the median seconds of a decode step.

        Args:
            pause: called now and then between steps, to measure something else in turn.
        """
        tokens = self.prompt

        def step(start: int) -> None:
            nonlocal tokens
            tokens = self.forward(tokens, start)
            tokens.tolist()  # waits for a device that runs behind, as a stream of text would

        pause()
        first, steps = seconds(step, 0), []
        for i in range(self.new_tokens):
            if i % 8 == 0:
                pause()
            steps.append(seconds(step, self.prompt.shape[1] + i))
        return first, statistics.median(steps)

    def measure(self, gemm: Callable[[], float]) -> dict[str, float]:
        """Run once, with the machine's limits measured in between; return the figures."""
        T, limits = self.prompt.shape[1], []
        peak = gemm()
        first, step = self.generate(lambda: limits.append(read_bandwidth(self.model.device)))
        peak, limit = max(peak, gemm()), statistics.median(limits)
        size = bytes_per_step(self.model, T + self.new_tokens // 2, self.batch) / 1e9
        flops = prefill_flops(self.model, self.batch, T)
        figures = {
            "first_token_s": first,
            "decode_tok_s": self.batch / step,
            "read_limit_gb_s": limit,
            "of_read_limit": size / step / limit,
            "prefill_tok_s": self.batch * T / first,
            "gemm_peak_tflop_s": peak,
            "of_gemm_peak": flops / first / 1e12 / peak,  # the prefill's MFU
        }
        if self.ranks > 1:
            exchanges = median_seconds(lambda _: self.exchange(), range(5))
            figures |= {"gb_per_rank": size, "collectives_ms": 1e3 * exchanges}
        return figures

    def exchange(self) -> None:
        """Repeat a step's exchanges between ranks: two sums in each layer, and one gather of the
        logits' parts."""
        c, vocab_part = self.model.config, self.model.lm_head.out_features
        x = torch.zeros(self.batch, c.hidden_size, dtype=self.model.dtype, device=self.model.device)
        for _ in range(2 * c.num_hidden_layers):
            tp.add_up(None, (), x)
        tp.gather(self.model, (), x.new_zeros(self.batch, vocab_part))[0, 0].item()


def speculation(args: Namespace) -> int:
    """Compare greedy decoding of one sequence with and without guesses, in turn, through an Engine.

    The theory (Leviathan et al. 2022, theorem 3.8): a step makes 1 + (guesses accepted) tokens, and
    costs one step of the model and K of the draft. Both costs are measured, one token at a time.
    """
    if args.ranks.world_size > 1 or args.batch != [1] or len(args.quantize) > 1:
        raise ValueError("--speculate takes one sequence, one --quantize and no ranks")
    check("--new-tokens", args.new_tokens, int, 2)  # the first is the prompt's
    model, result = prepare(args, args.quantize[0])
    models, k, vocab_size = [model], args.speculate, model.config.vocab_size
    if args.draft_checkpoint:
        models.append(load_model(args.draft_checkpoint, model.device, DTYPES[args.dtype]))
        make_fast(models[1], args.compile)
    prompt = torch.randint(vocab_size, (args.prompt_tokens,)).tolist()
    if args.prompt_file:
        text = args.prompt_file.read_text(encoding="utf-8")
        prompt = Tokenizer(args.checkpoint).encode(text)[: args.prompt_tokens]
    length = len(prompt) + args.new_tokens
    steps = [paged_step(each, 1, length) for each in models]  # of one token, without sampling
    params = SamplingParams(temperature=0, max_tokens=args.new_tokens, ignore_eos=True)
    limits = {"max_seq_len": length, "max_num_seqs": 1, "max_num_batched_tokens": CHUNK + k}
    before: list[Any] = []  # what the last plain run returned

    def run(proposer: Any) -> tuple[float, list[int]]:
        done = finish(Engine(model, proposer=proposer, **limits), prompt, params)
        return (args.new_tokens - 1) / (done.times[-1] - done.times[1]), done.token_ids

    def plain() -> dict[str, float]:
        before[:] = run(None)
        return {"decode_tok_s": before[0]}

    def guessed() -> dict[str, float]:
        proposer = NGram(k) if len(models) == 1 else DraftModel(models[1], k, vocab_size)
        speed, ids = run(proposer)
        costs = [median_seconds(step, range(len(prompt), length)) for step in steps]
        mean = proposer.accepted.total() / max(1, proposer.offered[0])
        cost = sum(costs[1:]) / costs[0]
        theory = (1 + mean) / (1 + k * cost)
        same = sum(a == b for a, b in zip(before[1], ids, strict=True)) / args.new_tokens
        figures = {"decode_tok_s": speed, "theory": theory, "of_theory": speed / before[0] / theory}
        figures |= {"accepted": mean, "draft_cost": cost, "same_tokens": same}
        for i in range(k):
            figures[f"accepted_{i + 1}"] = proposer.accepted[i] / max(1, proposer.offered[i])
        return figures

    ways = {"plain": plain, f"{k} guesses": guessed}
    return publish(args, in_turn(ways, args.repeat, ["times_plain"]), result)


# --- sample ---------------------------------------------------------------------------------------


def sample(args: Namespace) -> int:
    """Measure the milliseconds to draw a token for each of several rows of logits, on one thread.
    Each row has a text of 4,000 tokens, which its penalties count."""
    torch.set_num_threads(1)
    rng, ways, length = random.Random(0), {}, 4000

    def milliseconds(work: Callable[[], Any]) -> dict[str, float]:
        return {"ms": 1e3 * seconds(work)}

    for V, B in itertools.product(args.vocab_sizes, args.rows):
        config = Config(V, 2, 2, 1, 1, 1, 2, length + 2)
        logits = torch.randn(B, V, generator=torch.Generator().manual_seed(0)) * SPREAD
        prompts = [rng.choices(range(V), k=length) for _ in range(B)]
        for name, setting in SETTINGS.items():
            params = [SamplingParams(seed=i, **setting) for i in range(B)]
            sequences = [sampling.Sequence(*each, config) for each in zip(prompts, params)]
            work = partial(sampling.sample, logits.to(args.ranks.device), sequences)
            ways[f"{B} rows of {V}, {name}"] = partial(milliseconds, work)
    args.shape = "logits"
    return publish(args, in_turn(ways, args.repeat), {})


# --- throughput and prefix ------------------------------------------------------------------------

Work = list[tuple[list[int], int]]  # a prompt's ids, and how many tokens are wanted


def throughput(args: Namespace) -> int:
    """Measure the output tokens per second of many requests, against simpler ways to serve them.

    All requests are handed in at the start, and the time to a first token counts from there.
    "static batches" admits --max-num-seqs requests, and the next ones only when the longest of
    them has ended; until then the others run on, and their surplus tokens are thrown away, as one
    call of `generate` in most libraries does. "one at a time" runs --baseline-requests of the
    requests, each alone.
    """
    model, result = prepare(args, args.quantize)
    lengths = [(min(a), max(a)) for a in (args.prompt_tokens, args.new_tokens)]
    most = lengths[0][1] + lengths[1][1] + 1
    engine = Engine(model, runner=Timed, max_seq_len=most, **given(Limits, args))
    rng, work = random.Random(0), []
    for _ in range(args.requests):
        prompt_len, new_len = (rng.randint(*length) for length in lengths)
        prompt = [rng.randrange(model.config.vocab_size) for _ in range(prompt_len)]
        work.append((prompt, new_len))
    batches = [work[i : i + args.max_num_seqs] for i in range(0, len(work), args.max_num_seqs)]
    first, *others = args.sampling
    run = partial(run_groups, engine)
    ways = {"continuous batching": partial(run, [work], first)}
    ways |= {f"continuous batching, {name}": partial(run, [work], name) for name in others}
    if len(batches) > 1:  # else all are admitted at once either way
        ways["static batches"] = partial(run, batches, first, run_on=True)
    alone = [[item] for item in work[: args.baseline_requests]]
    ways["one at a time"] = partial(run, alone, first)
    ratios = ["times_one", *["times_static"] * (len(batches) > 1)]
    ratios += ["times_greedy"] * (first == "greedy" and bool(others))
    run([work[:2]])  # warm up
    rows = in_turn(ways, args.repeat, ratios, warm_up=False)
    for name in ("first_token_s", "last_first_token_s"):  # its queue is not the others'
        del rows["one at a time"][name]
    return publish(args, rows, result)


class Timed(Runner):
    """A Runner that adds up the seconds of its forwards."""

    seconds = 0.0

    def forward(self, rows: list[Row]) -> Tensor:
        start = time.perf_counter()
        logits = super().forward(rows)
        self.seconds += time.perf_counter() - start
        return logits


def run_groups(
    engine: Engine, groups: list[Work], setting: str = "greedy", run_on: bool = False
) -> dict[str, float]:
    """Run groups of requests, each group to its end, with an empty prefix cache.

    Args:
        setting: a name in SAMPLING.
        run_on: every request of a group runs until the longest one ends; only the tokens that it
            asked for count.
    """
    engine.reset()
    engine.stats = stats = dict.fromkeys(STATS, 0)
    engine.runner.seconds = 0.0
    busy, waste, firsts = 0.0, [], []
    start = time.perf_counter()
    for group in groups:
        longest = max(wanted for _, wanted in group)
        requests = []
        for ids, wanted in group:
            tokens = longest if run_on else wanted
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, **SAMPLING[setting])
            requests.append(engine.add_request(ids, params))
        while engine.queue:
            busy += seconds(engine.step)
            held = sum(len(sequence.table.blocks) for sequence in engine.running)
            used = sum(sequence.table.length for sequence in engine.running)
            if held:
                waste.append(1 - used / (held * engine.pool.block_size))
        firsts += [request.outputs[0].times[1] - start for request in requests]
    elapsed = time.perf_counter() - start
    work = list(itertools.chain(*groups))
    prompts = sum(len(ids) for ids, _ in work)
    output = sum(wanted for _, wanted in work)
    steps = stats["engine_steps"]
    return {
        "output_tok_s": output / elapsed,
        "total_tok_s": (prompts + output) / elapsed,
        "steps": steps,
        "mean_batch": output / steps,
        "first_token_s": statistics.median(firsts),
        "last_first_token_s": max(firsts),
        "step_ms": 1e3 * busy / steps,
        "outside_ms": 1e3 * (busy - engine.runner.seconds) / steps,
        "cached_share": stats["prefix_cache_hits"] / prompts,
        "computed_tokens": stats["computed_tokens"],
        "kv_waste": statistics.mean(waste or [0.0]),
    }


def prefix(args: Namespace) -> int:
    """Measure the time to first token of a long prompt, cold and with all but its last 16 tokens in
    the prefix cache; and of a prompt that is no longer than these: the floor, where the weights are
    read once."""
    new = 16
    check("--prompt-tokens", args.prompt_tokens, int, new + 1)
    model, result = prepare(args, args.quantize)
    engine = Engine(model, max_seq_len=args.prompt_tokens + 2)

    def first_token(prompt: list[int]) -> dict[str, float]:
        before = engine.stats["prefix_cache_hits"]
        times = finish(engine, prompt, SamplingParams(temperature=0, max_tokens=1)).times
        cached = engine.stats["prefix_cache_hits"] - before
        return {"first_token_s": times[1] - times[0], "cached_tokens": cached}

    def cold() -> dict[str, float]:
        ids[:] = torch.randint(model.config.vocab_size, (args.prompt_tokens,)).tolist()
        return first_token(ids)

    ids: list[int] = []  # another prompt in each round
    ways = {
        "cold": cold,
        "cached": lambda: first_token(ids[:-new] + ids[:new]),
        "floor": lambda: first_token(ids[-new:]),
    }
    return publish(args, in_turn(ways, args.repeat, ["of_cold", "times_floor"]), result)


# --- growth ---------------------------------------------------------------------------------------


@torch.no_grad()
def growth(args: Namespace) -> int:
    """Measure a decode step as a text gets longer, and as there are more sequences, in either
    cache; and the time that reading the step's weights, keys and values takes alone.

    The caches are filled with noise in place of a text: a step's time does not depend on it, but
    memory that was never written would be read faster.
    """
    model, result = prepare(args, args.quantize, max(args.sequences))
    points = [(1, length) for length in args.lengths]
    points += [(B, args.sequence_tokens) for B in args.sequences]
    ways = {}

    def measure_step(step: Callable[[int], Any], B: int, length: int) -> dict[str, float]:
        size = bytes_per_step(model, length + args.new_tokens // 2, B)
        read_ms = size / read_bandwidth(model.device) / 1e6
        ms = 1e3 * median_seconds(step, range(length, length + args.new_tokens))
        figures = {"step_ms": ms, "token_ms": ms / B, "sequences": B, "length": length}
        return figures | {"read_ms": read_ms, "of_read_limit": read_ms / ms}

    for B, length in dict.fromkeys(points):
        for kind, make in (("static", static_step), ("paged", paged_step)):
            step = make(model, B, length + args.new_tokens)
            ways[f"{B} x {length:,} tokens, {kind} cache"] = partial(measure_step, step, B, length)
    return publish(args, in_turn(ways, args.repeat), result)


def static_step(model: Transformer, B: int, room: int) -> Callable[[int], list[int]]:
    """Return a decode step of B sequences at a position, over a static cache full of noise."""
    cache = StaticCache(model, B, room)
    for slab in cache.slabs:
        slab.uniform_(-1, 1)
    tokens = torch.zeros(B, 1, dtype=torch.int64, device=model.device)
    last = torch.arange(B, device=model.device)

    def step(at: int) -> list[int]:
        positions, caches = cache.plan(at, at + 1)
        return model(tokens, positions, caches, last).argmax(-1).tolist()

    return step


def paged_step(model: Transformer, B: int, room: int) -> Callable[[int], list[int]]:
    """Return the same over a paged cache, with the blocks that a pool gives to one sequence after
    the other. (Blocks without any order would be copied in each step; see paged.py.)"""
    pool = BlockPool(B * -(-room // 16))
    runner, tables = Runner(model, pool.num_blocks, 16), [BlockTable() for _ in range(B)]
    for each in runner.kv:
        each.uniform_(-1, 1)
    for block_table in tables:
        pool.grow(block_table, room)

    def step(at: int) -> list[int]:
        return runner.forward([Row(each.blocks, at, [0]) for each in tables]).argmax(-1).tolist()

    return step


# --- versus ---------------------------------------------------------------------------------------


def versus(args: Namespace) -> int:
    """Measure this engine and the others that are installed, in turn, on the same folder: one
    sequence, a prompt, a batch. See tools/versus.py."""
    check("--new-tokens", args.new_tokens, int, 2)  # the first is the prompt's
    needed = max(args.prompt_tokens, versus_tool.BATCH[1]) + args.new_tokens + 1
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as others:
        folder = args.checkpoint or Path(temporary)
        if not args.checkpoint:
            write_random(SHAPES[args.shape], DTYPES[args.dtype], folder)
        config = load_config(folder)
        longest = config.max_position_embeddings
        check("--prompt-tokens and --new-tokens", needed, int, 1, longest)
        length = max(needed, min(longest, versus_tool.LONG[1] + versus_tool.LONG_NEW + 1))
        setup = {**vars(args), "folder": folder, "device": args.ranks.device.type}
        setup |= dict(length=length, vocab_size=config.vocab_size, sampling=SAMPLING[args.sampling])
        python = {"vllm": args.vllm_python or sys.executable}
        peers = {name: str(python.get(name, sys.executable)) for name in args.peers}
        for _ in range(args.busy):
            spin = subprocess.Popen(["sh", "-c", "while :; do :; done"])
            others.callback(spin.kill)
        rows, result = Rows(), {"dtype": args.dtype}
        found = versus_tool.compare(setup, peers, partial(rounds, args.repeat), rows.add)
        result["engines"], result["notes"] = found
    return publish(args, rows, result)


def write_random(config: Config, dtype: torch.dtype, folder: Path) -> None:
    """Write a Llama, or a Qwen3, of random weights as a folder that every engine loads."""
    names = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
        num_key_value_heads head_dim rms_norm_eps rope_theta max_position_embeddings
        tie_word_embeddings"""
    kind = "Qwen3" if config.qk_norm else "Llama"
    numbers = {name: getattr(config, name) for name in names.split()} | {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "hidden_act": "silu",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(numbers, indent=1))
    save_weights(random_model(config, dtype, Ranks(torch.device("cpu"))), folder)


# --- serve ----------------------------------------------------------------------------------------


def serve(args: Namespace) -> int:
    """Send a load to a server at each rate, and measure how it answers."""
    url = urlsplit(args.url)
    try:  # now, and not after the minute in which the requests would come
        socket.create_connection((url.hostname, load_tool.port(url)), timeout=2).close()
    except OSError as error:
        raise OSError(f"nobody listens at --url {args.url}: {error}") from error
    limits = load_tool.Limits(args.ttft_limit, args.tpot_limit)
    known = {name: value for name, value in vars(args).items() if name in load_tool.Load._fields}
    for name in ("prompt_tokens", "new_tokens"):
        known[name] = (min(known[name]), max(known[name]))
    load = load_tool.Load(**known | {"sampling": SAMPLING[args.sampling]})
    rows, answered = Rows(), False
    for i, rate in enumerate(args.rate):
        outcomes = asyncio.run(load_tool.run(load._replace(seed=i), rate))
        figures = load_tool.summary(outcomes, limits)
        rows.add("all at once" if rate == math.inf else f"{rate:g} requests/s", figures)
        answered |= figures["errors"] < figures["requests"]
        if error := next((o.error for o in outcomes if o.error), None):
            print(f"rate {rate:g}: {error}", file=sys.stderr)
    args.shape = args.model or "served"
    args.record = args.record if answered else None
    return publish(args, rows, {}) or 2 * (not answered)


# --- quality --------------------------------------------------------------------------------------


@torch.no_grad()
def quality(args: Namespace) -> int:
    """Measure the perplexity of each quantisation on held-out text, and how far its predictions
    move: the mean KL divergence from the unquantised model's, in nats per token."""
    if not args.checkpoint or not args.text:
        raise ValueError("quality needs a trained model and a text: give --checkpoint and --text")
    text, tokenizer = args.text.read_text(encoding="utf-8"), Tokenizer(args.checkpoint)
    cut = len(text) * 9 // 10
    ids, calibration = tokenizer.encode(text[cut:]), tokenizer.encode(text[:cut])
    plain, result = prepare(args)
    length = min(512, plain.config.max_position_embeddings)
    count = min(2**16, len(ids)) // length
    if not count:
        raise ValueError(f"the last tenth of {args.text} has {len(ids)} tokens, less than {length}")
    windows = torch.tensor(ids[: count * length], device=plain.device).view(count, length)
    positions = torch.arange(length, device=plain.device)[None]

    def logprobs(model: Transformer, window: Tensor, cache: StaticCache | None = None) -> Tensor:
        caches = cache and cache.plan(0, length)[1]
        return model(window[None], positions, caches)[0].float().log_softmax(-1)  # (T, V)

    group, rows, base = f"group {args.group_size}", Rows(), None
    forms = {args.dtype: "", "int8": "int8", "int8 KV cache": ""}
    forms |= {f"int4 rtn, {group}": "int4", f"int4 gptq, {group}": "int4"}
    for name, mode in forms.items():
        model, loss, kl = copy.deepcopy(plain), 0.0, 0.0
        if "gptq" in name:
            calibrate(model, calibration, mode, args.group_size)
        elif mode:
            quantize_model(model, mode, args.group_size)
        int8 = StaticCache(model, 1, length, "int8") if "KV" in name else None
        for window in progress(windows, f"scoring {name}"):
            ours, theirs = logprobs(model, window, int8), logprobs(plain, window)
            loss -= ours[:-1].gather(1, window[1:, None]).mean().item() / count
            kl += (theirs.exp() * (theirs - ours)).sum(-1).mean().item() / count
        base = base or math.exp(loss)
        figures = {
            "weights_mb": bytes_per_step(model, 0) / 1e6,
            "perplexity": math.exp(loss),
            "more": math.exp(loss) / base - 1,
            "kl_nats": kl,
        }
        rows.add(name, figures)
    return publish(args, rows, result)


# --- The command line -----------------------------------------------------------------------------

DEVICE = ("--device", "cpu", "", ("auto", "cpu", "cuda", "mps"))
OUTPUT = (
    ("--json", False, "print the figures as one JSON object"),
    ("--record", str, "keep the figures in benchmarks/RECORD.json"),
)
MODEL = (
    ("--checkpoint", Path, "Hugging Face folder, in place of a shape"),
    ("--shape", "110m", "random weights of this shape", SHAPES),
    ("--dtype", "bfloat16", "", [*DTYPES][1:]), ("--device", "auto", *DEVICE[2:]), *OUTPUT,
)  # fmt: skip
COMPILE = ("--compile", False, "start slower, run faster")
FORM = (("--quantize", "none", "", ("none", *MODES)), COMPILE)
PEERS = ("transformers", "vllm", "llama_cpp")
RANGE = "one length, or the least and the most"
# command -> what runs it, and its options: each with a default, its help, and its choices. A type
# stands for an option without a default; a list takes several values; False is a switch.
COMMANDS: dict[str, tuple] = {
    "latency": (latency, *MODEL, COMPILE,
        ("--quantize", ["none"], "several to compare", ("none", *MODES)),
        ("--batch", [1], "sequences at once; several to compare"),
        ("--prompt-tokens", 512), ("--new-tokens", 32), ("--repeat", 5),
        ("--speculate --speculate-ngram", 0, "tokens to guess in a step"),
        ("--draft-checkpoint", Path, "what guesses them, in place of the text's repetitions"),
        ("--prompt-file", Path, "text to continue, with --speculate"),
    ),
    "throughput": (throughput, *MODEL, *FORM, ("--requests", 32), ("--repeat", 1),
        ("--prompt-tokens", [64], RANGE), ("--new-tokens", [64], RANGE),
        ("--max-num-seqs", 64), ("--max-num-batched-tokens", 512),
        ("--baseline-requests", 2, "how many of the requests also run one at a time"),
        ("--sampling", ["greedy"], "several to compare", SAMPLING),
    ),
    "sample": (sample, DEVICE, *OUTPUT, ("--repeat", 9), ("--rows", [1, 32]),
        ("--vocab-sizes", [32000, 151936]),
    ),
    "prefix": (prefix, *MODEL, *FORM, ("--prompt-tokens", 1024), ("--repeat", 5)),
    "growth": (growth, *MODEL, *FORM, ("--repeat", 3),
        ("--lengths", [128, 256, 512, 1024, 2048, 4096, 8192]),
        ("--sequences", [1, 2, 4, 8, 16, 32, 64]),
        ("--sequence-tokens", 128, "length of each of several sequences"),
        ("--new-tokens", 8, "steps at each point, of which the median counts"),
    ),
    "versus": (versus, *MODEL,
        ("--eager", False, "do not compile this engine"),
        ("--peers", [*PEERS], "others to measure, where they are installed", PEERS),
        ("--prompt-tokens", 512, "length of the prompt whose prefill is measured"),
        ("--new-tokens", 32), ("--repeat", 3), ("--sampling", "greedy", "", SAMPLING),
        ("--sequences", 32, "sequences in the batch, with prompts of 16 to 64 tokens"),
        ("--busy", 0, "other processes that never wait, meanwhile"),
        ("--threads", torch.get_num_threads(), "of each engine"),
        ("--timeout", 600.0, "seconds an engine may take for an answer"),
        ("--gguf", Path, "the model in llama.cpp's format"),
        ("--vllm-python", Path, "Python of the environment that has vLLM"),
    ),
    "serve": (serve, *OUTPUT, ("--url", "http://127.0.0.1:8000"), ("--api-key", str),
        ("--model", str, "its name there, where the server requires one"),
        ("--rate", [1.0, 2.0, 4.0], "requests a second; inf: all at once"), ("--requests", 64),
        ("--prompt-tokens", [16, 256], RANGE), ("--new-tokens", [16, 128], RANGE),
        ("--prefixes", 0, "number of beginnings that prompts share"), ("--prefix-tokens", 128),
        ("--vocab-size", 1000, "prompts are random ids below it"),
        ("--sampling", "greedy", "", SAMPLING),
        ("--ttft-limit", 1.0, "seconds to the first token"),
        ("--tpot-limit", 0.1, "seconds for each token after it"),
    ),
    "quality": (quality, *MODEL, ("--group-size", 128),
        ("--text", Path, "its last tenth is scored, the rest calibrates"),
    ),
    "report": (lambda _: report.main(),),
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, 2 for an error of use, 130 for Ctrl-C."""
    return launch("bench.py", argv, parse_args, measure)


def measure(args: Namespace, ranks: Ranks) -> int:
    """Run the command that the arguments name."""
    if ranks.world_size > 1 and args.command != "latency":
        raise ValueError(f"{args.command} runs as one process: only latency compares ranks")
    if args.record and not ranks.rank:  # before the work, not after
        try_to_write("--record", report.RECORDS / f"{args.record}.json")
    args.ranks = ranks
    return COMMANDS[args.command][0](args)


def parse_args(argv: list[str] | None) -> Namespace:
    kind = RawDescriptionHelpFormatter
    parser = ArgumentParser(prog="bench.py", description=__doc__, formatter_class=kind)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (act, *options) in COMMANDS.items():
        command = commands.add_parser(name, description=act.__doc__, formatter_class=kind)
        command.set_defaults(checkpoint=None, device="cpu", record=None)
        for option in options:
            add_option(command, *option)
    args = parser.parse_args(argv)
    args.words = sys.argv[1:] if argv is None else argv
    return args


def add_option(
    command: ArgumentParser, flags: str, default: Any, text: str = "", choices: Any = None
) -> None:
    """Add an option as COMMANDS has it, with the type of its default."""
    several = isinstance(default, list)
    value = default[0] if several else default
    more: dict[str, Any] = {"nargs": "+"} if several else {}
    if value is False:
        more = {"action": "store_true"}
    elif isinstance(value, type):
        more |= {"type": value, "default": None}
    elif isinstance(value, str):
        more["choices"] = choices
    else:
        more["type"] = partial(number, type(value), min(1, value) if type(value) is int else 1e-6)
    command.add_argument(*flags.split(), **{"default": default, "help": text} | more)


def number(kind: type, least: float, text: str) -> Any:
    """Read a number that is large enough to measure with, and not NaN."""
    with suppress(ValueError):
        value = kind(text)
        if value >= least:
            return value
    raise ArgumentTypeError(f"must be a number ({kind.__name__}) of {least} or more, is {text}")


def try_to_write(flag: str, file: Path) -> None:
    """Open a file as if to write, and remove it again where it is new. Raises OSError."""
    existed = os.path.lexists(file)
    try:
        file.open("a").close()
    except OSError as error:
        raise OSError(f"{flag}: {file} cannot be written: {error.strerror}") from error
    if not existed:
        file.unlink()


if __name__ == "__main__":
    # Ended by a signal, versus leaves neither engines nor a folder of weights behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
