"""Chapter 8: several processes. Each holds and reads a share of every matrix; they exchange sums.

python course/08_ranks.py
"""

from typing import Any

from lesson import Lesson, forward_ms, run, seconds, watch_sums

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from around.fast.packed import pack_linears
from around.folder import build
from around.machine import Ranks
from model import MLP
from tools.bench import SHAPES, random_model
from tools.measure import bytes_per_step

RANKS, PAST = 2, 2048  # processes; tokens in the cache
GPU_READS, GPU_SUM = 2e12, 0.01  # assumed: bytes a GPU reads per second; ms for a sum over two


def shared_mlp(mlp: MLP, x: Tensor, rank: int) -> Tensor:
    """Run a feed-forward: compute this rank's share of the F channels, and sum over the ranks."""
    gate, up = mlp.gate_up_proj.weight.chunk(2)  # (F, D) each
    mine = slice(len(gate) * rank // RANKS, len(gate) * (rank + 1) // RANKS)
    y = F.silu(x @ gate[mine].t()) * (x @ up[mine].t())  # (T, F / RANKS), without any exchange
    y = y @ mlp.down_proj.weight[:, mine].t()  # (T, D): this rank's part of each sum
    dist.all_reduce(y)
    return y


def one_rank(lesson: Lesson, place: Ranks) -> dict[str, Any]:
    """Do one process's work, on one thread. Returns what it has measured."""
    config = lesson.pick(SHAPES["110m"], lesson.tiny)
    # 1) the idea: one feed-forward, which every rank builds from the same seed
    torch.manual_seed(0)
    mlp, x = MLP(config, config.intermediate_size), torch.randn(3, config.hidden_size)
    apart = (shared_mlp(mlp, x, place.rank) - mlp(x)).abs().max().item()
    # 2) a rank's share of the whole model, by tp.shard: the sums for a token, and its time
    with watch_sums() as sizes:
        share = random_model(config, torch.float32, place)
    pack_linears(share)
    token = torch.zeros(1, 1, dtype=torch.long)
    share(token, token)  # token 0 at position 0
    held = bytes_per_step(share, PAST)
    found = {"apart": apart, "sums": len(sizes), "sum_bytes": sum(sizes), "mb": held / 1e6}
    one_sum = seconds(lambda: dist.all_reduce(torch.zeros(1, 1, config.hidden_size)), 50)
    return found | {"sums_ms": 1e3 * found["sums"] * one_sum, "ms": forward_ms(share, repeat=10)}


def on_gpus(shape: str) -> dict[str, float]:
    """Compute from the bytes how many ms one GPU, and several, would take for a token."""
    with torch.device("meta"):  # allocates nothing
        model = build(SHAPES[shape]).to(torch.bfloat16)
    alone = 1e3 * bytes_per_step(model, 0) / GPU_READS
    sums = 2 * len(model.layers) * GPU_SUM
    return {f"{shape}, 1 GPU": alone, f"{shape}, {RANKS} GPUs": alone / RANKS + sums}


def chapter(lesson: Lesson) -> dict[str, Any]:
    found = lesson.ranks(RANKS, __file__)  # what rank 0 has measured
    lesson.say(f"The shared feed-forward differs from the whole one by {found['apart']:.1g}.")
    # 3) the whole model in this process: what it holds, and its time on one thread and on two
    whole = lesson.random_model()
    times = {f"{RANKS} processes, 1 thread each": found["ms"]}
    for n in (1, RANKS):
        torch.set_num_threads(n)
        times[f"1 process, {n} thread{'s' * (n > 1)}"] = forward_ms(whole, repeat=10)
    mb = {f"each of {RANKS}": found["mb"], "one alone": bytes_per_step(whole, PAST) / 1e6}
    lesson.bars(f"MB held: weights, and a cache of {PAST:,} tokens", mb, mb["one alone"] / RANKS)
    lesson.bars("milliseconds for a token, here", times, times["1 process, 1 thread"] / RANKS)
    each, kb, ms = found["sums"], found["sum_bytes"] / 1e3, found["sums_ms"]
    lesson.say(f"\nA token takes {each} sums, {kb:.0f} kB in all: {ms:.1f} ms by themselves.")
    if found["ms"] > times[f"1 process, {RANKS} threads"]:
        lesson.say("No gain in time here: two threads share one memory, and need no sums.")
    # 4) what the bytes say about two devices, each with its own memory
    lesson.bars("computed, not measured: ms for a token, bfloat16", on_gpus("110m") | on_gpus("7b"))
    return found | {"mb": mb}


if __name__ == "__main__":
    run(chapter, each_rank=one_rank)
