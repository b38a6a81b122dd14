"""Chapter 8: several processes. Each holds and reads a share of every matrix; sums are exchanged.

python course/08_ranks.py
"""

import json
import os
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import tp
from kv_cache import StaticCache
from lesson import Lesson, ranks, run, seconds
from model import MLP, Transformer
from tools.bench import SHAPES, random_model
from tools.measure import bytes_per_step

RANKS = 2


def shared_mlp(mlp: MLP, x: Tensor, rank: int) -> Tensor:
    """A feed-forward of which this process computes its share of the F channels, and all sum up."""
    gate, up = mlp.gate_up_proj.weight.chunk(2)  # (F, D) each
    mine = slice(len(gate) * rank // RANKS, len(gate) * (rank + 1) // RANKS)
    y = F.silu(x @ gate[mine].t()) * (x @ up[mine].t())  # (T, F / RANKS): nothing to exchange
    y = y @ mlp.down_proj.weight[:, mine].t()  # (T, D): one part of each sum
    dist.all_reduce(y)
    return y


def token_ms(model: Transformer) -> float:
    positions, layers = StaticCache(model, 1, 64).step(0, 1)
    return 1e3 * seconds(lambda: model(torch.zeros_like(positions), positions, layers), 10)


@torch.no_grad()
def one_rank(small: bool) -> None:
    """What each process does; the first prints what it has measured, as JSON."""
    exchanged, add_up = [], tp.add_up
    tp.add_up = lambda *args: (exchanged.append(args[2].nbytes), add_up(*args))[1]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tp.join(torch.device("cpu")) as place:
        config, found = Lesson.tiny if small else SHAPES["110m"], {}
        # 1) the idea, on one feed-forward, which every rank has made whole, from one seed
        torch.manual_seed(0)
        mlp, x = MLP(config, config.intermediate_size), torch.randn(3, config.hidden_size)
        found["apart"] = (shared_mlp(mlp, x, place.rank) - mlp(x)).abs().max().item()
        # 2) a rank's share of the whole model, by tp.shard; and the whole one, in rank 0 alone
        share = random_model(config, torch.float32, place)
        token_ms(share)
        exchanged.clear()
        positions = torch.arange(1)[None]
        share(positions, positions)
        found["sums"], found["sum_bytes"] = len(exchanged), sum(exchanged)
        found["ms"] = {f"{RANKS} processes, 1 thread each": token_ms(share)}
        sums = partial(add_up, None, (), torch.zeros(1, 1, config.hidden_size))
        found["sums_ms"] = 1e3 * found["sums"] * seconds(sums, 50)
        found["mb"] = {f"each of {RANKS}": bytes_per_step(share, 0) / 1e6}
        dist.barrier()
        if place.rank == 0:
            whole = random_model(config, torch.float32, tp.Ranks(place.device))
            found["mb"]["one alone"] = bytes_per_step(whole, 0) / 1e6
            for n in sorted({1, threads}):
                torch.set_num_threads(n)
                found["ms"][f"1 process, {n} thread{'s' * (n > 1)}"] = token_ms(whole)
            print(json.dumps(found))
        dist.barrier()  # the others have nothing to do, and do not disturb


def chapter(lesson: Lesson) -> dict[str, Any]:
    words = [os.path.abspath(__file__), *["--small"] * lesson.small]
    found = json.loads(ranks(RANKS, words)[0])
    lesson.say(f"The feed-forward in shares is the whole one, but for {found['apart']:.1g}.")
    held, half = found["mb"], found["mb"]["one alone"] / RANKS
    lesson.bars("MB of weights that a process holds and reads for a token", held, half)
    both, alone, *_ = found["ms"].values()
    lesson.bars("milliseconds for a token", found["ms"], alone / RANKS)
    lesson.say(f"\nA token takes {found['sums']} sums, {found['sum_bytes'] / 1e3:.0f} kB in all:")
    lesson.say(f"{found['sums_ms']:.1f} ms by themselves.")
    if both > 0.9 * alone:
        lesson.say("No effect: the exchanges, or the memory that both share, take what is saved.")
    elif both > min(found["ms"].values()):
        lesson.say(
            "It pays, but threads do it better here: they share memory and exchange nothing."
        )
    return found


if __name__ == "__main__":
    one_rank("--small" in sys.argv) if "RANK" in os.environ else run(chapter)
