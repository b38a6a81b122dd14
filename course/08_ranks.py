"""Chapter 8: several processes. Each holds and reads a share of every matrix; sums are exchanged.

python course/08_ranks.py
"""

from typing import Any

from lesson import Lesson, forward_ms, run, seconds, watch_sums

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from model import MLP
from settings import Ranks
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


def one_rank(lesson: Lesson, place: Ranks) -> dict[str, Any]:
    """What each process does, on one thread, and what it has found."""
    config = lesson.pick(SHAPES["110m"], lesson.tiny)
    # 1) the idea, on one feed-forward, which every rank has made whole, from one seed
    torch.manual_seed(0)
    mlp, x = MLP(config, config.intermediate_size), torch.randn(3, config.hidden_size)
    apart = (shared_mlp(mlp, x, place.rank) - mlp(x)).abs().max().item()
    # 2) a rank's share of the whole model, by tp.shard: what it adds up for a token, and its time
    with watch_sums() as sizes:
        share = random_model(config, torch.float32, place)
    token = torch.zeros(1, 1, dtype=torch.long)
    share(token, token)  # token 0 at position 0
    found = {"apart": apart, "sums": len(sizes), "sum_bytes": sum(sizes)}
    one_sum = seconds(lambda: dist.all_reduce(torch.zeros(1, 1, config.hidden_size)), 50)
    found["sums_ms"] = 1e3 * found["sums"] * one_sum
    found["ms"] = forward_ms(share, repeat=10)
    found["mb"] = bytes_per_step(share, 0) / 1e6
    return found


def chapter(lesson: Lesson) -> dict[str, Any]:
    found = lesson.ranks(RANKS, __file__)  # of the first
    lesson.say(f"The feed-forward in shares is the whole one, but for {found['apart']:.1g}.")
    # 3) the same model whole, in this process, with as many threads as it may have
    config = lesson.pick(SHAPES["110m"], lesson.tiny)
    whole = random_model(config, torch.float32, Ranks(torch.device("cpu")))
    held = {f"each of {RANKS}": found["mb"], "one alone": bytes_per_step(whole, 0) / 1e6}
    times = {f"{RANKS} processes, 1 thread each": found["ms"]}
    for n in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(n)
        times[f"1 process, {n} thread{'s' * (n > 1)}"] = forward_ms(whole, repeat=10)
    half = held["one alone"] / RANKS
    lesson.bars("MB of weights that a process holds and reads for a token", held, half)
    both, alone = found["ms"], times["1 process, 1 thread"]
    lesson.bars("milliseconds for a token", times, alone / RANKS)
    lesson.say(f"\nA token takes {found['sums']} sums, {found['sum_bytes'] / 1e3:.0f} kB in all:")
    lesson.say(f"{found['sums_ms']:.1f} ms by themselves.")
    if both > 0.9 * alone:
        lesson.say("No effect: the exchanges, or the memory that both share, take what is saved.")
    elif both > min(times.values()):
        lesson.say("It pays, but threads do it better here: they share memory and need no sums.")
    return found | {"mb": held}


if __name__ == "__main__":
    run(chapter, each_rank=one_rank)
