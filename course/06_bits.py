"""Chapter 6: fewer bits. A step reads every weight, so read fewer bytes.

python course/06_bits.py
"""

import copy
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kv_cache import StaticCache
from lesson import Lesson, run, seconds
from model import Transformer
from quantize import linears, pack_linears, quantize_model
from tools.measure import bytes_per_step, read_bandwidth

TEXT = Path(__file__).resolve().parent / "hamlet.txt"  # of a play that was not trained on


def rounded(weight: Tensor, bits: int, group: int) -> Tensor:
    """A weight (N, K) as integers of so many bits times a scale for each group of inputs."""
    w = weight.unflatten(1, (-1, group))  # (N, G, group)
    most = 2 ** (bits - 1) - 1  # 127 of 8 bits, 7 of 4, 1 of 2
    scale = w.abs().amax(-1, keepdim=True).clamp(min=1e-12) / most  # (N, G, 1)
    return ((w / scale).round() * scale).flatten(1)


def perplexity(model: Transformer, ids: list[int]) -> float:
    """e to the mean surprise at each token: among how many equally likely ones it chooses."""
    logits = model(torch.tensor([ids]), torch.arange(len(ids))[None])[0]  # (T, V)
    chances = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    return (-chances.mean()).exp().item()


def chapter(lesson: Lesson) -> dict[str, int]:
    # 1) what it costs: the bundled model on a text that it has not seen, with its weights rounded
    plain, tokenizer = lesson.bundled()
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))[: lesson.pick(1024, 128)]
    bits = lesson.pick([2, 3, 4, 5, 6, 8], [2, 4, 8])
    lines: dict[str, list[float]] = {"one scale a row": [], "each 64 inputs": []}
    errors, levels = copy.deepcopy(lines), {}
    for (name, points), group in zip(lines.items(), (None, 64)):
        for b in bits:
            model, error, norm = copy.deepcopy(plain), 0.0, 0.0
            for parent, child, _ in [*linears(model)]:
                if child != "lm_head":  # the embedding too: see the exercise
                    weight = getattr(parent, child).weight
                    q = rounded(weight, b, group or weight.shape[1])
                    error, norm = error + (q - weight).pow(2).sum(), norm + weight.pow(2).sum()
                    levels[b] = max(levels.get(b, 0), len((q[0, :64]).unique()))
                    weight.copy_(q)
            points.append(perplexity(model, ids))
            errors[name].append(100 * (error / norm).sqrt().item())
    base = perplexity(plain, ids)
    lesson.curves("error of the weights, percent of their size", bits, errors, "bits", log=True)
    lines["ideal"] = [base] * len(bits)
    title = f"perplexity on {len(ids)} tokens of Hamlet ({base:.1f} unrounded)"
    lesson.curves(title, bits, lines, "bits", log=True)
    # 2) what it brings: bytes, and with them time, if the processor can read the form
    held, times, limits = {}, {}, {}
    for mode in ("float32", "int8", "int4"):
        for packed in (False, True):
            model, name = lesson.random_model(), f"{mode}{', packed' * packed}"
            if mode != "float32":
                quantize_model(model, mode, 64)
            if packed:
                pack_linears(model)
            held[name] = bytes_per_step(model, 0)
            positions, layers = StaticCache(model, 1, 64).step(0, 1)
            token = torch.zeros_like(positions)
            forward = partial(model, token, positions, layers)
            times[name] = 1e3 * seconds(forward, 3)
    speed = 1e6 * read_bandwidth(model.device) if not lesson.small else 0
    limits = {name: size / speed for name, size in held.items() if speed}
    lesson.bars("MB read for a token", {n: size / 1e6 for n, size in held.items() if "," not in n})
    lesson.bars("milliseconds for a token", times, limits)
    for mode in ("int8", "int4"):
        if times[f"{mode}, packed"] > times["float32, packed"]:
            lesson.say(f"{mode} is no faster here: PyTorch has no fast product for it on this")
            lesson.say("processor. It saves memory, not time.")
    return {"levels": levels, "bytes": held, "perplexity": lines["each 64 inputs"], "plain": base}


if __name__ == "__main__":
    run(chapter)
