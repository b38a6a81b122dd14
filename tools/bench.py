"""Measure the engine; every number in the README comes from here.

    python tools/bench.py latency --shape 1b --compile    one batch at a time: what a user waits for
    python tools/bench.py latency ... --speculate 4       the same with guessed tokens, and without
    python tools/bench.py throughput --shape 1b --compile     many requests, through the scheduler
    python tools/bench.py sample                          the sampler alone: rows, settings, words
    python tools/bench.py prefix --shape 1b --compile     a long prompt whose beginning is known
    python tools/bench.py growth --shape 1b --compile     a step, over the text and over sequences
    python tools/bench.py versus --shape 1b               beside the other engines that are there
    python tools/bench.py serve --url http://127.0.0.1:8000   a load on a running server
    python tools/bench.py quality --checkpoint DIR --text FILE     what quantisation costs
    python tools/bench.py report              put the recorded figures into README.md and its pages

Machines are noisy and drift, so a speed is never reported alone: the machine's own limits (reading
memory, multiplying matrices) are measured in the same process, in turn with the engine, and each
figure is given as a fraction of the limit taken beside it. Medians, with the spread.
"""

import argparse
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
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

if __name__ == "__main__":  # a script uses its own checkout, whichever is installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import program  # first: Ctrl-C may come while PyTorch is imported

import torch
from torch import Tensor

import tp
from checkpoint import build, load_config, load_model, named_tensors
from experts import SparseMLP
from kv_cache import StaticCache
from model import Config, Transformer, rope_frequencies
from packed import compile_model
from paged import BlockPool, BlockTable, Row, Runner
from quantize import MODES, quantize_model
from sampling import Sequence, sample
from scheduler import STATS, Engine, Proposer
from settings import CHUNK, DTYPES, Ranks, SamplingParams, check, launch, progress
from speculative import DraftModel, NGram
from tokenizer import Tokenizer
from tools import load as load_tool
from tools import report
from tools import versus as versus_tool
from tools.convert import calibrate, save_weights
from tools.cuda_graphs import runner_for
from tools.measure import bytes_per_step, gemm_peak, peak_memory, read_bandwidth

# Llama-like; parameters without the embedding table: 86 M, 1.03 B, 6.6 B; and 1.00 B, of which a
# token uses 208 M: three layers with the matrices of Qwen3-30B-A3B's experts, half as many of them.
# Qwen3-0.6B has 440 M, and its embedding, which is also its lm_head, 156 M.
SHAPES = {
    "110m": Config(32000, 768, 2048, 12, 12, 12, 64),
    "1b": Config(32000, 2048, 5632, 22, 32, 4, 64),
    "7b": Config(32000, 4096, 11008, 32, 32, 32, 128),
    "qwen3-0.6b": Config(
        151936, 1024, 3072, 28, 16, 8, 128, 40960, rope_theta=1e6, qk_norm=True,
        tie_word_embeddings=True,
    ),
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
PEERS = ("transformers", "transformers_compiled", "vllm", "llama_cpp")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, 2 for an error of use, 130 for Ctrl-C."""
    return launch("bench.py", argv, parse_args, measure, tp.join)


def measure(args: argparse.Namespace, ranks: Ranks) -> int:
    """Run the command that the arguments name."""
    check_numbers(args)
    if ranks.ranks > 1 and args.run is not latency:
        raise ValueError(f"{args.command} is of one process: only latency compares ranks")
    args.ranks = ranks
    if ranks.rank == 0:  # which is the one that writes
        check_outputs(args)
    return args.run(args) or 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.py", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    latency_parser = add_command(commands, latency, "time to first token, decode, prefill")
    add = latency_parser.add_argument
    add("--batch", type=int, nargs="+", default=[1], help="sequences at once; several to compare")
    add("--prompt-tokens", type=int, default=512)
    add("--new-tokens", type=int, default=32)
    add("--max-seq-len", type=int, nargs="+", help="capacity of the cache; several to compare")
    add("--repeat", type=int, default=5)
    add("--profile", type=Path, metavar="TRACE.JSON", help="write a Chrome trace of one run")
    guesses = latency_parser.add_mutually_exclusive_group()
    text = "tokens guessed in a step, by a draft"
    guesses.add_argument("--speculate", type=int, default=0, metavar="K", help=text)
    text = "... from what the text repeats"
    guesses.add_argument("--speculate-ngram", type=int, default=0, metavar="K", help=text)
    add("--draft-checkpoint", type=Path, help="the draft; without one, the first layers of --shape")
    add("--draft-layers", type=int, default=2, help="how many; the later ones then add nothing")
    add("--draft-noise", type=float, default=0.0, help="lowers its agreement; 1: as large as it")
    add("--prompt-file", type=Path, help="text to continue, for --speculate...")
    add = add_command(commands, throughput, "many requests through the scheduler").add_argument
    add("--requests", type=int, default=32)
    add("--prompt-tokens", type=int, nargs="+", default=[64], help="one length, or least and most")
    add("--new-tokens", type=int, nargs="+", default=[64], help="one length, or least and most")
    add("--max-num-seqs", type=int, default=64)
    add("--max-num-batched-tokens", type=int, default=512)
    add("--kv-memory", type=float, default=0.5, help="bytes, or below 1 a share of the free")
    add("--block-size", type=int, default=16, help="tokens in a block of the cache")
    add("--attention", choices=("copy", "flex"), default="copy", help="of blocks; see flex.py")
    add("--cuda-graphs", action="store_true", help="replay decoding; see tools/cuda_graphs.py")
    add("--baseline-requests", type=int, default=2, help="of those, how many run one at a time")
    add("--sampling", nargs="+", choices=SAMPLING, default=["greedy"], help="several to compare")
    text = "dollars that the machine costs; gives those of a million tokens"
    add("--price-per-hour", type=float, metavar="DOLLARS", help=text)
    add("--repeat", type=int, default=1)
    sample_parser = commands.add_parser("sample", help="the sampler alone, on random logits")
    sample_parser.set_defaults(run=sample_rows, checkpoint=None, shape="logits")
    add = sample_parser.add_argument
    add("--rows", type=int, nargs="+", default=[1, 32])
    add("--vocab-sizes", type=int, nargs="+", default=[32000, 151936])
    add("--settings", nargs="+", choices=SETTINGS, default=[*SETTINGS])
    add("--spread", type=float, default=4.0, help="standard deviation of the logits")
    add("--context", type=int, default=4000, help="tokens of each row, for penalties")
    add("--threads", type=int, default=1)
    add("--repeat", type=int, default=9)
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="cpu")
    add("--json", action="store_true", help="print the figures as one JSON object")
    add("--record", metavar="NAME", help="keep the figures in benchmarks/NAME.json")
    add = add_command(commands, prefix, "a prompt that is mostly cached").add_argument
    add("--prompt-tokens", type=int, default=1024)
    add("--new-prefix-tokens", type=int, default=16, help="tokens at the end that are not cached")
    add("--repeat", type=int, default=5)
    add = add_command(commands, growth, "a step over text length and sequences").add_argument
    add("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096, 8192])
    add("--sequences", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    add("--sequence-tokens", type=int, default=128, help="length of each of several sequences")
    add("--new-tokens", type=int, default=8, help="steps at each point, of which the median counts")
    add("--repeat", type=int, default=3)
    versus_parser = add_command(commands, versus, "this engine beside others, in turn")
    add = versus_parser.add_argument
    add("--eager", dest="compile", action="store_false", help="do not compile this engine")
    text = "others to measure (default: all that are there)"
    add("--peers", nargs="+", choices=PEERS, default=[*PEERS], help=text)
    add("--prompt-tokens", type=int, default=512, help="of the prompt whose prefill is measured")
    add("--new-tokens", type=int, default=32)
    add("--sequences", type=int, default=32, help="in the batch, with prompts of 16 to 64 tokens")
    add("--sampling", choices=SAMPLING, default="greedy")
    add("--repeat", type=int, default=3)
    add("--threads", type=int, help="of each engine (default: as many as PyTorch takes)")
    add("--timeout", type=float, default=600.0, help="seconds an engine may take for an answer")
    add("--gguf", type=Path, metavar="FILE", help="the checkpoint for llama.cpp")
    add("--llama-bench", type=Path, metavar="PATH", help="llama.cpp's program")
    add("--vllm-python", type=Path, metavar="PATH", help="of the environment that has vLLM")
    add("--gpt-fast", type=Path, metavar="PATH", help="a clone of gpt-fast")
    add("--plot", type=Path, metavar="FILE.svg")
    add = add_command(commands, quality, "what quantisation costs in perplexity").add_argument
    add("--text", type=Path, required=True, help="its last tenth is scored, the rest calibrates")
    add("--group-size", type=int, default=128)
    add("--tokens", type=int, default=2**16, help="tokens to score, at most")
    serve_parser = commands.add_parser("serve", help="a load on any OpenAI-compatible server")
    serve_parser.set_defaults(run=serve_load, device="cpu")
    add = serve_parser.add_argument
    add("--url", default="http://127.0.0.1:8000")
    add("--model", help="its name there, where the server wants one")
    add("--api-key")
    add("--rate", type=float, nargs="+", default=[1, 2, 4], help="requests a second; inf: at once")
    add("--ramp", action="store_true", help="double the first rate while the limits hold")
    add("--requests", type=int, default=64)
    add("--prompt-tokens", type=int, nargs="+", default=[16, 256], help="least and most")
    add("--new-tokens", type=int, nargs="+", default=[16, 128], help="least and most")
    add("--prefixes", type=int, default=0, help="so many beginnings that prompts share")
    add("--prefix-tokens", type=int, default=128)
    add("--vocab-size", type=int, default=1000, help="prompts are random ids below it")
    add("--sampling", choices=SAMPLING, default="greedy")
    add("--ttft-limit", type=float, default=1.0, help="seconds to the first token")
    add("--tpot-limit", type=float, default=0.1, help="seconds for each token after it")
    add("--plot", type=Path, metavar="FILE.svg")
    add("--json", action="store_true", help="print the figures as one JSON object")
    add("--record", metavar="NAME", help="keep the figures in benchmarks/NAME.json")
    report_parser = commands.add_parser("report", help="rewrite the generated parts of the pages")
    report_parser.set_defaults(run=lambda _: report.main(), device="cpu")
    args = parser.parse_args(argv)
    args.words = sys.argv[1:] if argv is None else argv
    return args


def add_command(
    commands: Any, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    """Add a command, named like its function, with the options that all measurements share."""
    parser = commands.add_parser(run.__name__, help=text)
    parser.set_defaults(run=run)
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--checkpoint", type=Path)
    model.add_argument("--shape", choices=SHAPES, default="110m", help="random weights")
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    modes = {"nargs": "+"} if run is latency else {}  # there, several to compare
    if run is not versus:
        add("--quantize", choices=("none", *MODES), default=["none"] if modes else "none", **modes)
        add("--compile", action="store_true")
    add("--json", action="store_true", help="print the figures as one JSON object")
    add("--record", metavar="NAME", help="keep the figures in benchmarks/NAME.json")
    return parser


# The least value of a number that may not be 1 or any above it.
LEAST = {
    "speculate": 0, "speculate_ngram": 0, "prefixes": 0, "draft_noise": 0.0, "vocab_size": 4,
    "rate": 1e-6, "ttft_limit": 1e-6, "tpot_limit": 1e-6, "group_size": -1, "kv_memory": 1e-6,
    "spread": 0.0, "price_per_hour": 1e-6, "shares": 1e-6,
}  # fmt: skip


def check_numbers(args: argparse.Namespace) -> None:
    """Raise ValueError where a number is too small to measure with, NaN, or a least above a most:
    it would end in a division by zero, or in a table of nothing."""
    for name, value in vars(args).items():
        flag, several = "--" + name.replace("_", "-"), isinstance(value, list)
        for each in value if several else [value]:
            if type(each) in (int, float):
                check(flag, each, type(each), LEAST.get(name, 1), math.inf)
    for name in ("prompt_tokens", "new_tokens"):
        value = vars(args).get(name)
        if isinstance(value, list) and (len(value) > 2 or value[0] > value[-1]):
            flag, numbers = "--" + name.replace("_", "-"), " ".join(map(str, value))
            raise ValueError(f"{flag} takes one length, or the least and the most, is {numbers}")


def check_outputs(args: argparse.Namespace) -> None:
    """Raise ValueError or OSError where a file for the results cannot be written: before the work,
    not after."""
    files = {f"--{name}": vars(args).get(name) for name in ("profile", "plot")}
    name = vars(args).get("record")
    if name is not None:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(f"--record {name!r} is no plain name: use letters, digits, . _ and -")
        report.RECORDS.mkdir(exist_ok=True)
        files["--record"] = report.RECORDS / f"{name}.json"
    for flag, file in files.items():
        if file is not None:
            try_to_write(flag, file)


def try_to_write(flag: str, file: Path) -> None:
    """Open a file as if to write, and remove it again where it was not there. Raises OSError."""
    there = os.path.lexists(file)
    try:
        file.open("a").close()
    except OSError as error:
        raise OSError(f"{flag}: {file} cannot be written: {error.strerror}") from error
    if not there:
        file.unlink()


# --- latency --------------------------------------------------------------------------------------


@torch.no_grad()
def latency(args: argparse.Namespace) -> int:
    """Time to first token, decode and prefill speed, next to the machine's limits."""
    if args.speculate or args.speculate_ngram:
        return speculation(args)
    result: dict[str, Any] = {}
    runs: dict[str, Run | None] = {}
    capacities = args.max_seq_len or [args.prompt_tokens + args.new_tokens]
    alone = Ranks(args.ranks.device)
    shares = [args.ranks] if args.ranks.ranks == 1 else [alone, args.ranks]
    for mode, share in itertools.product(args.quantize, shares):
        mine = share is args.ranks or args.ranks.rank == 0
        if mine:
            model, figures = prepare(args, mode, share)
            start = time.perf_counter()
            if args.compile:
                compile_model(model, args.batch[0])
                figures["compile_s"] = time.perf_counter() - start
            result = figures | result if share is args.ranks else result
        for batch, capacity in itertools.product(args.batch, capacities):
            name = f"{mode}, " * (mode != "none") + f"batch {batch}"
            name += f", capacity {capacity}" * (len(capacities) > 1)
            name += ", one rank" * (share is alone)
            runs[name] = Run(model, batch, capacity, args, share.ranks) if mine else None
            if mine:
                runs[name].generate()  # warm up: any graph for this batch size is compiled here
    device = args.ranks.device
    result["peak_memory_gb"] = peak_memory(device)  # before the limits' own buffers exist
    gemm = gemm_peak(model)
    for _ in progress(range(args.repeat), "measuring"):
        first = None  # the speed of this round's first row, which the others are compared with
        for run in runs.values():
            if len(shares) > 1:
                torch.distributed.barrier()  # where one rank works alone, the others wait
            if run:
                speed = run.measure(gemm)
                first = first or speed
                run.figures.setdefault("times_first_row", []).append(speed / first)
    if args.ranks.rank:
        return 0
    result["runs"] = {name: run.summary() for name, run in runs.items()}
    status = publish(result, args, device)
    if args.profile:
        with torch.profiler.profile() as profiler:
            next(iter(runs.values())).generate()
        profiler.export_chrome_trace(str(args.profile))
    return status


class Run:
    """One row of the table: what is run, and what was measured of it."""

    def __init__(
        self,
        model: Transformer,
        batch: int,
        capacity: int,
        args: argparse.Namespace,
        ranks: int = 1,
    ) -> None:
        self.model, self.batch, self.new_tokens, self.ranks = model, batch, args.new_tokens, ranks
        self.device, config = model.device, model.config
        torch.manual_seed(0)  # ranks run the same prompt
        self.prompt = torch.randint(config.vocab_size, (batch, args.prompt_tokens)).to(self.device)
        self.cache = StaticCache(model, batch, capacity)
        middle = args.prompt_tokens + args.new_tokens // 2
        self.bytes = bytes_per_step(model, middle, batch)
        self.figures: dict[str, list[float]] = {}

    def forward(self, tokens: Tensor, start: int) -> Tensor:
        for part in tokens.split(CHUNK, dim=1):
            B, T = part.shape
            last = torch.arange(T - 1, B * T, T, device=self.device)  # each row's last token
            positions, layers = self.cache.plan(start, start + T)
            start += T
            logits = self.model(part, positions, layers, last)
        return logits.argmax(-1, keepdim=True)  # (B, 1)

    def generate(self, pause: Callable[[], None] = lambda: None) -> tuple[float, float]:
        """Return the seconds to the first token, and the median seconds of a decode step.

        Args:
            pause: called now and then between steps, to measure something else in turn.
        """
        pause()
        start = time.perf_counter()
        tokens = self.forward(self.prompt, 0)
        tokens.tolist()  # waits for a device that runs behind, as a stream of text would
        first, steps = time.perf_counter() - start, []
        for i in range(self.new_tokens):
            if i % 8 == 0:
                pause()
            start = time.perf_counter()
            tokens = self.forward(tokens, self.prompt.shape[1] + i)
            tokens.tolist()
            steps.append(time.perf_counter() - start)
        return first, statistics.median(steps)

    def measure(self, gemm: Callable[[], float]) -> float:
        """One repetition, with the machine's limits measured in between; return its tokens/s."""
        limits: list[float] = []
        peak = gemm()
        first, step = self.generate(lambda: limits.append(read_bandwidth(self.device)))
        peak, limit = max(peak, gemm()), statistics.median(limits)
        T, speed = self.prompt.shape[1], self.bytes / step / 1e9
        c = self.model.config  # attention's own products are left out: they are not GEMM's
        heads = 2 * c.num_attention_heads + 2 * c.num_key_value_heads  # q, o and k, v
        weights = c.num_hidden_layers * heads * c.head_dim * c.hidden_size
        for block in self.model.layers:
            width = c.intermediate_size
            if isinstance(block.mlp, SparseMLP):
                width = c.num_experts_per_tok * (c.moe_intermediate_size or width)
            weights += 3 * c.hidden_size * width
        flops = 2 * self.batch * (T * weights + c.vocab_size * c.hidden_size)
        figures = {
            "first_token_s": first, "decode_tok_s": self.batch / step, "decode_gb_s": speed,
            "read_limit_gb_s": limit, "of_read_limit": speed / limit,
            "prefill_tok_s": self.batch * T / first, "gemm_peak_tflop_s": peak,
            "of_gemm_peak": flops / first / 1e12 / peak,  # the prefill's MFU
        }  # fmt: skip
        if self.ranks > 1:
            figures |= {"gb_per_rank": self.bytes / 1e9, "collectives_ms": 1e3 * self.collectives()}
        for name, value in figures.items():
            self.figures.setdefault(name, []).append(value)
        return self.batch / step

    def collectives(self) -> float:
        """Seconds that a step's exchanges take by themselves: a sum after the embedding and two in
        each layer, and the logits' parts put together."""
        c, shape = self.model.config, self.model.embed_tokens.weight.shape
        x = torch.zeros(self.batch, c.hidden_size, dtype=self.model.dtype, device=self.device)
        logits = x.new_zeros(self.batch, shape[0])
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(1 + 2 * c.num_hidden_layers):
                tp.add_up(None, (), x)
            tp.gather(self.model, (), logits)[0, 0].item()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def summary(self) -> dict[str, tuple[float, float, float]]:
        return spread(self.figures)


# --- speculation ----------------------------------------------------------------------------------


def speculation(args: argparse.Namespace) -> int:
    """Greedy decoding of one sequence with and without guesses, in turn, each through an Engine.

    The theory (Leviathan et al. 2022, theorem 3.8): a step makes 1 + (guesses accepted) tokens, and
    costs one step of the model and K of the draft. Both costs are measured, one token at a time.
    """
    if args.ranks.ranks > 1 or args.batch != [1] or len(args.quantize) > 1 or args.new_tokens < 2:
        raise ValueError(
            "--speculate compares one sequence with itself: no ranks, one --batch of 1, one "
            "--quantize, and --new-tokens 2 or more"
        )
    k, own = args.speculate or args.speculate_ngram, args.speculate and not args.draft_checkpoint
    if own and args.quantize != ["none"]:
        raise ValueError("the model's first layers are a draft before they are quantised: "
                         "give --draft-checkpoint, or leave --quantize out")  # fmt: skip
    model, result = prepare(args, args.quantize[0])
    draft = None
    if own:
        check("--draft-layers", args.draft_layers, int, 1, model.config.num_hidden_layers)
        draft = first_layers(model, args.draft_layers, args.draft_noise)
    elif args.speculate:
        draft = load_model(args.draft_checkpoint, model.device, DTYPES[args.dtype])
    prompt = torch.randint(model.config.vocab_size, (args.prompt_tokens,)).tolist()
    if args.prompt_file:
        if not args.checkpoint:
            raise ValueError("--prompt-file needs --checkpoint, for its tokenizer")
        text = args.prompt_file.read_text(encoding="utf-8")
        prompt = Tokenizer(args.checkpoint).encode(text)[: args.prompt_tokens]
    params = SamplingParams(temperature=0, max_tokens=args.new_tokens, ignore_eos=True)
    length, start = len(prompt) + args.new_tokens, time.perf_counter()
    models = [model, draft] if draft else [model]
    if args.compile:
        for each in models:
            compile_model(each, None)
        result["compile_s"] = time.perf_counter() - start

    def run(proposer: Proposer | None = None) -> Sequence:
        limits = {"max_seq_len": length, "max_num_seqs": 1, "max_num_batched_tokens": CHUNK + k}
        engine = Engine(model, proposer=proposer, **limits)
        (sequence,) = engine.add_request(prompt, params).outputs
        for _ in engine.run():
            pass
        return sequence

    def step(each: Transformer) -> float:
        """Seconds for one token, without sampling."""
        blocks, times = [*range(-(-length // 16))], []
        runner = Runner(each, len(blocks), 16)
        for at in range(len(prompt), length):
            start = time.perf_counter()
            runner.forward([Row(blocks, at, prompt[:1])])[0, 0].item()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    rows: dict[str, dict[str, list[float]]] = {"plain": {}, f"{k} guesses": {}}
    for repetition in progress(range(args.repeat + 1), "measuring"):
        proposer = DraftModel(draft, k, model.config.vocab_size) if draft else NGram(k)
        plain, guessed = run(), run(proposer)
        costs = [step(each) for each in models]
        if not repetition:  # warm up
            continue
        speeds = [(args.new_tokens - 1) / (s.times[-1] - s.times[1]) for s in (plain, guessed)]
        ratio = speeds[1] / speeds[0]
        mean = sum(proposer.accepted) / max(1, proposer.offered[0])
        cost = costs[1] / costs[0] if draft else 0.0
        theory = (1 + mean) / (1 + k * cost)
        same = sum(a == b for a, b in zip(plain.output_ids, guessed.output_ids, strict=True))
        figures = [
            {"decode_tok_s": speeds[0], "times_plain": 1.0},
            {
                "decode_tok_s": speeds[1], "times_plain": ratio, "theory": theory,
                "of_theory": ratio / theory, "accepted": mean, "draft_cost": cost,
                "same_tokens": same / args.new_tokens,
            },
        ]  # fmt: skip
        for i, (a, n) in enumerate(zip(proposer.accepted, proposer.offered, strict=True), 1):
            figures[1][f"accepted_{i}"] = a / max(1, n)
        for row, values in zip(rows.values(), figures, strict=True):
            for name, value in values.items():
                row.setdefault(name, []).append(value)
    result["runs"] = {name: spread(row) for name, row in rows.items()}
    result["peak_memory_gb"] = peak_memory(model.device)
    return publish(result, args, model.device)


def first_layers(model: Transformer, layers: int, noise: float) -> Transformer:
    """Make a pair with a known acceptance: a draft of a model's first layers, whose later layers
    are changed to add nothing (but cost what they cost), so that both say the same. Noise on the
    draft's last matrix, as a share of its own spread, makes them differ."""
    config = replace(model.config, num_hidden_layers=layers, windows=model.config.windows[:layers])
    with torch.device("meta"):
        draft = build(config)
    draft.embed_tokens, draft.norm, draft.inv_freq = model.embed_tokens, model.norm, model.inv_freq
    draft.layers, draft.lm_head = model.layers[:layers], copy.deepcopy(model.lm_head)
    weight = draft.lm_head.weight
    weight += torch.randn_like(weight) * weight.std() * noise
    for name, parameter in model.layers[layers:].named_parameters():
        if name.split(".")[-2] in ("o_proj", "down_proj"):
            parameter.zero_()
    return draft


# --- sample ---------------------------------------------------------------------------------------

SETTINGS = SAMPLING | {
    "temperature": {"temperature": 0.6},
    "min_p": {"temperature": 0.6, "min_p": 0.05},
    "flat": {"temperature": 2.0, "top_p": 0.99},  # so flat that all of it has to be sorted
    "penalties": {"temperature": 0.6, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "logprobs": {"temperature": 0.6, "logprobs": 5},
}


def sample_rows(args: argparse.Namespace) -> int:
    """Milliseconds to draw a token for each of some rows of logits. Every row runs `rows` times, in
    turn with the others, so that a disturbance meets all."""
    torch.set_num_threads(args.threads)
    rng, device = random.Random(0), args.ranks.device
    works: dict[str, Callable[[], Any]] = {}
    for V, B in itertools.product(args.vocab_sizes, args.rows):
        config = Config(V, 2, 2, 1, 1, 1, 2, args.context + 2)
        logits = torch.randn(B, V, generator=torch.Generator().manual_seed(0)) * args.spread
        logits = logits.to(device)
        prompts = [[rng.randrange(V) for _ in range(args.context)] for _ in range(B)]
        for name in args.settings:
            params = [SamplingParams(seed=i, **SETTINGS[name]) for i in range(B)]
            rows = [Sequence(*each, config) for each in zip(prompts, params)]
            works[f"{B} rows of {V}, {name}"] = partial(sample, logits, rows)
    figures: dict[str, dict[str, list[float]]] = {name: {"ms": []} for name in works}
    for repetition in progress(range(args.repeat + 1), "measuring"):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if repetition:  # the first warms up
                figures[name]["ms"].append(1e3 * (time.perf_counter() - start))
    return publish({"runs": {name: spread(row) for name, row in figures.items()}}, args, device)


# --- throughput and prefix ------------------------------------------------------------------------


def throughput(args: argparse.Namespace) -> int:
    """Output tokens per second of many requests, against simpler ways to serve them.

    All requests are handed in at the start, and the time to a first token counts from there.
    "static batches" admits --max-num-seqs requests, and the next ones only when the longest of
    these has ended; until then the others run on, and what they make is thrown away, as one call
    of `generate` in most libraries does. "one at a time" runs a few of the requests, each alone.
    """
    model, result = prepare(args, args.quantize)
    compile_paged(model, args, result)
    lengths = [(a[0], a[-1]) for a in (args.prompt_tokens, args.new_tokens)]
    length = lengths[0][1] + lengths[1][1] + 1
    kind = type("Timed", (Timed, runner_for(args.attention, args.cuda_graphs)), {})
    engine = Engine(
        model, runner=kind, max_seq_len=length, max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens, kv_memory=args.kv_memory,
        block_size=args.block_size,
    )  # fmt: skip
    rng = random.Random(0)
    V = model.config.vocab_size
    work: Work = []
    for _ in range(args.requests):
        prompt_len, new_len = (rng.randint(*length) for length in lengths)
        work.append(([rng.randrange(V) for _ in range(prompt_len)], new_len))
    batches = [work[i : i + args.max_num_seqs] for i in range(0, len(work), args.max_num_seqs)]
    first, *others = args.sampling
    ways = {"continuous batching": partial(serve, engine, [work], first)}
    ways |= {
        f"continuous batching, {name}": partial(serve, engine, [work], name) for name in others
    }
    if len(batches) > 1:  # else all are admitted at once either way
        ways["static batches"] = partial(serve, engine, batches, first, run_on=True)
    alone = [[item] for item in work[: args.baseline_requests]]
    ways["one at a time"] = partial(serve, engine, alone, first)
    serve(engine, [work[:2]])  # warm up
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in ways}
    for _ in progress(range(args.repeat), "measuring"):
        measured = {name: way() for name, way in ways.items()}
        if args.baseline_requests < args.requests:  # its queue is not the others'
            for key in ("first_token_s", "last_first_token_s"):
                del measured["one at a time"][key]
        for name, row in measured.items():
            if args.price_per_hour:
                row |= dollars(args.price_per_hour, row)
            against = {"times_one": "one at a time", "times_static": "static batches"}
            if others:
                against[f"times_{first}"] = "continuous batching"
            for key, of in against.items():
                if of in measured:
                    row[key] = row["output_tok_s"] / measured[of]["output_tok_s"]
            for key, value in row.items():
                figures[name].setdefault(key, []).append(value)
    result["runs"] = {name: spread(each) for name, each in figures.items()}
    result["peak_memory_gb"] = peak_memory(model.device)
    return publish(result, args, model.device)


Work = list[tuple[list[int], int]]  # a prompt's ids, and how many tokens are wanted


class Timed(Runner):
    """A Runner that says how long its forwards took."""

    seconds = 0.0

    def forward(self, rows: list[Row]) -> Tensor:
        start = time.perf_counter()
        logits = super().forward(rows)
        self.seconds += time.perf_counter() - start
        return logits


def compile_paged(model: Transformer, args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Compile the model for an Engine, where --compile asks for it, and note the seconds."""
    if args.compile:
        start = time.perf_counter()
        compile_model(model, None)
        result["compile_s"] = time.perf_counter() - start


def serve(
    engine: Engine, groups: list[Work], sampling: str = "greedy", run_on: bool = False
) -> dict[str, float]:
    """Run groups of requests, each group to its end, with an empty prefix cache.

    All of them are handed in at the start, so that the time to a first token counts from there,
    whenever the group's turn comes.

    Args:
        sampling: a name in SAMPLING.
        run_on: every request of a group runs until the longest one ends; only what it asked for
            counts.
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
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, **SAMPLING[sampling])
            requests.append(engine.add_request(ids, params))
        while engine.queue:
            began = time.perf_counter()
            engine.step()
            busy += time.perf_counter() - began
            blocks = sum(len(sequence.table.blocks) for sequence in engine.running)
            held = sum(sequence.table.length for sequence in engine.running)
            if blocks:
                waste.append(1 - held / (blocks * engine.pool.block_size))
        firsts += [request.outputs[0].times[1] - start for request in requests]
    elapsed = time.perf_counter() - start
    work = list(itertools.chain(*groups))
    prompts, output = sum(len(ids) for ids, _ in work), sum(wanted for _, wanted in work)
    return {
        "output_tok_s": output / elapsed,
        "total_tok_s": (prompts + output) / elapsed,
        "steps": stats["engine_steps"],
        "mean_batch": output / stats["engine_steps"],
        "first_token_s": statistics.median(firsts),
        "last_first_token_s": max(firsts),
        "step_ms": 1e3 * busy / stats["engine_steps"],
        "outside_ms": 1e3 * (busy - engine.runner.seconds) / stats["engine_steps"],
        "cached_share": stats["prefix_cache_hits"] / prompts,
        "computed_tokens": stats["computed_tokens"],
        "preemptions": stats["num_preemptions"],
        "kv_waste": statistics.mean(waste or [0.0]),
    }


def dollars(per_hour: float, speeds: dict[str, float]) -> dict[str, float]:
    """What a million tokens cost on a machine of this price: of prompts and output together; and of
    output, where the prompts are free.

    Example: 3.6 dollars an hour, 1,000 tokens a second in and out, of which 100 out: 1 and 10
    """
    million = 1e6 * per_hour / 3600
    return {
        "usd_per_million_in_and_out": million / speeds["total_tok_s"],
        "usd_per_million_out": million / speeds["output_tok_s"],
    }


def prefix(args: argparse.Namespace) -> int:
    """Time to first token of a long prompt, cold and with all but its end in the prefix cache, and
    of a prompt that is no longer than that end: the floor, where the weights are read once."""
    if args.new_prefix_tokens >= args.prompt_tokens:
        raise ValueError(
            f"--new-prefix-tokens {args.new_prefix_tokens} must be less than --prompt-tokens "
            f"{args.prompt_tokens}, or nothing is cached"
        )
    model, result = prepare(args, args.quantize)
    compile_paged(model, args, result)
    engine = Engine(model, max_seq_len=args.prompt_tokens + 2)
    params = SamplingParams(temperature=0, max_tokens=1)
    figures: dict[str, dict[str, list[float]]] = {"cold": {}, "cached": {}, "floor": {}}
    for repetition in range(args.repeat + 1):
        ids = torch.randint(model.config.vocab_size, (args.prompt_tokens,)).tolist()
        again = ids[: -args.new_prefix_tokens] + ids[: args.new_prefix_tokens]
        firsts = {}
        for name, prompt in (
            ("cold", ids), ("cached", again), ("floor", ids[-args.new_prefix_tokens :])
        ):  # fmt: skip
            before = engine.stats["prefix_cache_hits"]
            request = engine.add_request(prompt, params)
            for _ in engine.run():
                pass
            times = request.outputs[0].times
            firsts[name] = times[1] - times[0]
            if not repetition:  # warm up
                continue
            figures[name].setdefault("first_token_s", []).append(firsts[name])
            figures[name].setdefault("of_cold", []).append(firsts[name] / firsts["cold"])
            cached = engine.stats["prefix_cache_hits"] - before
            figures[name].setdefault("cached_tokens", []).append(cached)
        if repetition:
            for name, first in firsts.items():
                ratio = first / firsts["floor"]
                figures[name].setdefault("times_floor", []).append(ratio)
    result["runs"] = {name: spread(each) for name, each in figures.items()}
    result["peak_memory_gb"] = peak_memory(model.device)
    return publish(result, args, model.device)


# --- growth ---------------------------------------------------------------------------------------


@torch.no_grad()
def growth(args: argparse.Namespace) -> int:
    """Time of a decode step as a text gets longer, and as sequences get more, in either cache; and
    what reading the step's bytes, weights and keys and values, takes alone.

    The caches are filled with noise in place of a text: a step's time does not depend on it, but
    memory that was never written would be read faster.
    """
    model, result = prepare(args, args.quantize)
    if args.compile:
        start = time.perf_counter()
        compile_model(model, 1)
        result["compile_s"] = time.perf_counter() - start
    device, one = model.device, args.sequence_tokens
    points = [(1, length) for length in args.lengths] + [(B, one) for B in args.sequences]
    steps = {}
    for B, length in dict.fromkeys(points):
        room = length + args.new_tokens
        steps[B, length] = static_step(model, B, room), paged_step(model, B, room)
    figures: dict[str, dict[str, list[float]]] = {}
    for done in progress(range(args.repeat + 1), "measuring"):
        for (B, length), kinds in steps.items():
            size = bytes_per_step(model, length + args.new_tokens // 2, B)
            limit = read_bandwidth(device) if done else 1.0  # the first round warms up
            for kind, step in zip(("static", "paged"), kinds, strict=True):
                times = []
                for at in range(length, length + (args.new_tokens if done else 1)):
                    start = time.perf_counter()
                    step(at).tolist()
                    times.append(time.perf_counter() - start)
                if not done:
                    continue
                ms = 1e3 * statistics.median(times)
                measured = {
                    "step_ms": ms, "token_ms": ms / B, "read_ms": size / limit / 1e6,
                    "of_read_limit": size / limit / 1e6 / ms, "sequences": B, "length": length,
                }  # fmt: skip
                row = figures.setdefault(f"{B} x {length:,} tokens, {kind} cache", {})
                for name, value in measured.items():
                    row.setdefault(name, []).append(value)
    result["runs"] = {name: spread(row) for name, row in figures.items()}
    result["peak_memory_gb"] = peak_memory(device)
    return publish(result, args, device)


def static_step(model: Transformer, B: int, room: int) -> Callable[[int], Tensor]:
    """A decode step of B sequences at a position, over a static cache full of noise."""
    cache = StaticCache(model, B, room)
    for slab in cache.slabs:
        slab.uniform_(-1, 1)
    tokens = torch.zeros(B, 1, dtype=torch.int64, device=model.device)
    last = torch.arange(B, device=model.device)

    def step(at: int) -> Tensor:
        positions, layers = cache.plan(at, at + 1)
        return model(tokens, positions, layers, last).argmax(-1)

    return step


def paged_step(model: Transformer, B: int, room: int) -> Callable[[int], Tensor]:
    """The same over a paged cache, with the blocks that a pool gives to one sequence after the
    other. (Blocks without any order would be copied in each step; see paged.side_by_side.)"""
    pool = BlockPool(B * -(-room // 16))
    runner, tables = Runner(model, pool.num_blocks, 16), [BlockTable() for _ in range(B)]
    for each in runner.kv:
        each.uniform_(-1, 1)
    for table in tables:
        pool.grow(table, room)

    def step(at: int) -> Tensor:
        return runner.forward([Row(table.blocks, at, [0]) for table in tables]).argmax(-1)

    return step


# --- versus ---------------------------------------------------------------------------------------


def versus(args: argparse.Namespace) -> int:
    """This engine and the others that are installed, in turn, on the same folder: one sequence,
    a prompt, a batch. See tools/versus.py."""
    if args.llama_bench and args.checkpoint and not args.gguf:
        raise ValueError("--llama-bench needs --gguf FILE, the checkpoint in llama.cpp's format")
    for flag, path in (
        ("--gguf", args.gguf), ("--llama-bench", args.llama_bench),
        ("--vllm-python", args.vllm_python),
        ("--gpt-fast", args.gpt_fast and args.gpt_fast / "generate.py"),
    ):  # fmt: skip
        if path and not path.is_file():
            raise ValueError(f"{flag} {path}: there is no such file")
    check("--new-tokens", args.new_tokens, int, 2)  # the first is of the prompt
    length = max(args.prompt_tokens, versus_tool.BATCH[1]) + args.new_tokens + 1
    args.threads = args.threads or torch.get_num_threads()
    with tempfile.TemporaryDirectory() as temporary:
        folder, config = args.checkpoint, args.checkpoint and load_config(args.checkpoint)
        if not folder:
            folder, config = Path(temporary), SHAPES[args.shape]
            write_random(config, DTYPES[args.dtype], folder)
        longest = config.max_position_embeddings
        check("--prompt-tokens and --new-tokens", length, int, 1, longest)
        setup = {
            "folder": str(folder), "dtype": args.dtype, "device": args.ranks.device.type,
            "threads": args.threads, "length": length, "sequences": args.sequences,
            "vocab_size": config.vocab_size, "compile": args.compile,
            "gguf": args.gguf and str(args.gguf), "random": not args.checkpoint,
            "llama_bench": args.llama_bench and str(args.llama_bench),
            "sampling": SAMPLING[args.sampling],
            "gpt_fast": args.gpt_fast and str(args.gpt_fast.resolve()),
        }  # fmt: skip
        peers = dict.fromkeys(args.peers, sys.executable)
        if args.vllm_python and "vllm" in peers:
            peers["vllm"] = str(args.vllm_python)
        if args.llama_bench:
            peers["llama_bench"] = sys.executable
        if args.gpt_fast:
            peers["gpt_fast"] = sys.executable
        figures, engines, notes = versus_tool.compare(
            setup, peers, (args.prompt_tokens, args.new_tokens, args.sequences), args.repeat,
            args.timeout, progress,
        )  # fmt: skip
    result: dict[str, Any] = {"runs": {name: spread(row) for name, row in figures.items()}}
    result |= {"engines": engines, "notes": notes, "dtype": args.dtype}
    status = publish(result, args, args.ranks.device)
    if args.plot:
        args.plot.write_text(report.versus_picture(result))
    return status


def write_random(config: Config, dtype: torch.dtype, folder: Path) -> None:
    """Write a Llama, or a Qwen3, of random weights as a folder that every engine loads."""
    numbers = {
        name: getattr(config, name)
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta",
            "max_position_embeddings", "tie_word_embeddings",
        )
    }  # fmt: skip
    kind = "Qwen3" if config.qk_norm else "Llama"
    numbers |= {
        "architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(), "hidden_act": "silu",
        "torch_dtype": str(dtype).removeprefix("torch."), "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(numbers, indent=1))
    model = random_model(config, dtype, Ranks(torch.device("cpu")))
    save_weights(model, folder)


# --- serve ----------------------------------------------------------------------------------------


def serve_load(args: argparse.Namespace) -> int:
    """Load a server at each rate; with --ramp, find the highest whose requests keep the limits."""
    url = urlsplit(args.url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"--url {args.url} must be like http://127.0.0.1:8000")
    try:  # now, and not after the minute in which the requests would come
        socket.create_connection((url.hostname, load_tool.port(url)), timeout=2).close()
    except OSError as error:
        raise OSError(f"nobody listens at --url {args.url}: {error}") from error
    limits = load_tool.Limits(args.ttft_limit, args.tpot_limit)
    lengths = [(a[0], a[-1]) for a in (args.prompt_tokens, args.new_tokens)]
    what = load_tool.Load(
        args.url, args.model, args.api_key, args.requests, *lengths, args.prefixes,
        args.prefix_tokens, args.vocab_size, SAMPLING[args.sampling],
    )  # fmt: skip
    rates, figures = [*args.rate], []
    for i, rate in enumerate(rates):  # which --ramp extends
        outcomes = asyncio.run(load_tool.run(what._replace(seed=i), rate))
        figures.append(load_tool.summary(outcomes, limits))
        if error := next((o.error for o in outcomes if o.error), None):
            print(f"rate {rate:g}: {error}", file=sys.stderr)
        held = figures[-1].get("within_limits", 0) >= 0.99 and rate < float("inf")
        if args.ramp and held and i == len(rates) - 1:
            rates.append(rate * 2)
    rows = {
        f"{rate:g} requests/s" if rate < float("inf") else "all at once": {
            k: [v] for k, v in f.items()
        }
        for rate, f in zip(rates, figures)
    }
    result: dict[str, Any] = {"runs": {name: spread(row) for name, row in rows.items()}}
    if args.ramp:
        good = [r for r, f in zip(rates, figures) if f.get("within_limits", 0) >= 0.99]
        result["highest_rate"] = max(good, default=0.0)
    args.checkpoint, args.shape = None, args.model or "served"
    failed = all(f["errors"] == f["requests"] for f in figures)
    args.record = None if failed else args.record
    status = publish(result, args, torch.device("cpu"))
    # A rate at which nothing was answered has no place in the picture, and "at once" is no rate.
    drawn = [(r, f) for r, f in zip(rates, figures) if "ttft_p50_ms" in f and r < float("inf")]
    if args.plot and drawn:
        args.plot.write_text(load_tool.plot(*zip(*drawn), f"kilolm bench: {args.url}"))
    return status or 2 * failed


# --- quality --------------------------------------------------------------------------------------


@torch.no_grad()
def quality(args: argparse.Namespace) -> int:
    """Perplexity of each quantisation on held-out text, and how far its predictions move: the mean
    KL divergence from the unquantised model's, in nats per token."""
    if not args.checkpoint:
        raise ValueError("quality needs a trained model: give --checkpoint")
    if args.quantize != "none" or args.compile:
        raise ValueError("quality compares all forms by itself: leave --quantize and --compile out")
    text, tokenizer = args.text.read_text(encoding="utf-8"), Tokenizer(args.checkpoint)
    cut = len(text) * 9 // 10
    ids, calibration = tokenizer.encode(text[cut:]), tokenizer.encode(text[:cut])
    plain, result = prepare(args, "none")
    device = plain.device
    length = min(512, plain.config.max_position_embeddings)
    count = min(args.tokens, len(ids)) // length
    if not count:
        raise ValueError(f"the last tenth of {args.text} has {len(ids)} tokens, less than {length}")
    windows = torch.tensor(ids[: count * length], device=device).view(count, length)
    positions = torch.arange(length, device=device)[None]

    def logprobs(model: Transformer, window: Tensor, cache: StaticCache | None = None) -> Tensor:
        layers = cache and cache.plan(0, length)[1]
        return model(window[None], positions, layers)[0].float().log_softmax(-1)  # (T, V)

    def quantised(mode: str, method: str) -> Transformer:
        model = copy.deepcopy(plain)
        if method == "gptq":
            calibrate(model, calibration, mode, args.group_size)
            return model
        return quantize_model(model, mode, args.group_size)

    rows = {args.dtype: lambda: plain, "int8": lambda: quantised("int8", "rtn")}
    for method in ("rtn", "gptq"):
        rows[f"int4 {method}, group {args.group_size}"] = partial(quantised, "int4", method)
    rows["int8 KV cache"] = lambda: plain
    result["runs"] = {}
    for name, make in rows.items():
        model, loss, kl = make(), 0.0, 0.0
        int8 = StaticCache(model, 1, length, "int8") if "KV" in name else None
        for window in progress(windows, f"scoring {name}"):
            ours, theirs = logprobs(model, window, int8), logprobs(plain, window)
            loss -= ours[:-1].gather(1, window[1:, None]).mean().item() / count
            kl += (theirs.exp() * (theirs - ours)).sum(-1).mean().item() / count
        figures = {
            "weights_mb": bytes_per_step(model, 0) / 1e6,
            "perplexity": math.exp(loss),
            "more": math.exp(loss) / next(iter(result["runs"].values()))["perplexity"][0] - 1
            if result["runs"] else 0.0,
            "kl_nats": kl,
        }  # fmt: skip
        result["runs"][name] = spread({key: [value] for key, value in figures.items()})
    result["peak_memory_gb"] = peak_memory(device)
    return publish(result, args, device)


# --- Helpers --------------------------------------------------------------------------------------


def prepare(
    args: argparse.Namespace, mode: str, share: Ranks | None = None
) -> tuple[Transformer, dict[str, Any]]:
    """Make the model that the arguments ask for, or one rank's share; and the first figures."""
    start, dtype = time.perf_counter(), DTYPES[args.dtype]
    share = share or args.ranks
    if args.checkpoint:
        model = load_model(args.checkpoint, share.device, dtype, share.shard)
    else:
        model = random_model(SHAPES[args.shape], dtype, share)
    if mode != "none":
        quantize_model(model, mode)
    result = {"load_s": time.perf_counter() - start, "weights_gb": bytes_per_step(model, 0) / 1e9}
    result["model_gb"] = sum(t.nbytes for _, t in named_tensors(model)) / 1e9
    return model, result


def publish(result: dict[str, Any], args: argparse.Namespace, device: torch.device) -> int:
    """Add the provenance, print, and record where that is asked for: where one of the two fails,
    the other has been done."""
    result |= provenance(device, args)
    try:
        print(json.dumps(result) if args.json else table(result), flush=True)
    finally:
        if args.record:
            file = report.RECORDS / f"{args.record}.json"
            file.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def spread(figures: dict[str, list[float]]) -> dict[str, tuple[float, float, float]]:
    """Median, least and most of each figure."""
    return {name: (statistics.median(v), min(v), max(v)) for name, v in figures.items()}


def random_model(config: Config, dtype: torch.dtype, share: Ranks) -> Transformer:
    """A model of random weights, made in place: the model's speed does not depend on their values.
    The sampler's does, on how flat a distribution is: so logits have a trained model's spread."""
    with torch.device("meta"):
        model = build(config).to(dtype)
    if share.shard:
        model, _ = share.shard(model, {})
    model = model.to_empty(device=share.device)
    model.inv_freq = rope_frequencies(config).to(share.device)
    noise = (torch.randn(2**20 + 7) * 0.02).to(dtype).to(share.device)  # odd length: rows differ
    for parameter in model.parameters():
        for piece in parameter.view(-1).split(len(noise)):
            piece.copy_(noise[: len(piece)]) if parameter.dim() > 1 else piece.fill_(1)
    model.norm.weight.fill_(4 / (0.02 * config.hidden_size**0.5))
    return model


def provenance(device: torch.device, args: argparse.Namespace) -> dict[str, str]:
    """What a figure is worth nothing without."""
    name = platform.processor() or platform.machine()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    launcher = "python" if ranks == 1 else f"torchrun --standalone --nproc-per-node {ranks}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((x.split(": ")[1] for x in lines if x.startswith("model name")), name)
        name += f" ({torch.backends.cpu.get_cpu_capability()})"  # some names say little
    threads = getattr(args, "threads", None) or torch.get_num_threads()
    return {
        "hardware": f"{name}, {threads} threads" + " a rank" * (ranks > 1),
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "command": f"{launcher} tools/bench.py " + " ".join(args.words),
        "model": str(args.checkpoint.name if args.checkpoint else args.shape),
    }


def table(result: dict) -> str:
    """The figures for people: median, and least..most of the repetitions."""
    lines, number = [result["hardware"], result["versions"], result["command"], ""], report.number
    for name in ("load_s", "compile_s", "model_gb", "weights_gb", "peak_memory_gb", "highest_rate"):
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


if __name__ == "__main__":
    # Ended by a signal, versus leaves neither engines nor a folder of weights behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    program.run(main)
