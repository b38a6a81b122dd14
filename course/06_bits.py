"""Chapter 6: fewer bits. A forward reads every weight, so read fewer bytes.

python course/06_bits.py
"""

import copy
from pathlib import Path

from lesson import Lesson, forward_ms, run

import torch
from torch import Tensor

from model import Transformer
from packed import has_arithmetic, pack_linears
from quantize import linears, quantize_model
from tools.measure import bytes_per_step

TEXT = Path(__file__).resolve().parent / "hamlet.txt"  # of a play that was not trained on


def rounded(weight: Tensor, bits: int, group: int) -> Tensor:
    """A weight (N, K) as integers of so many bits times a scale for each group of inputs."""
    w = weight.unflatten(1, (-1, group))  # (N, G, group)
    most = 2 ** (bits - 1) - 1  # 127 of 8 bits, 7 of 4, 1 of 2
    scale = w.abs().amax(-1, keepdim=True).clamp(min=1e-12) / most  # (N, G, 1)
    return ((w / scale).round() * scale).flatten(1)


def round_linears(model: Transformer, bits: int, group: int | None) -> int:
    """Round a model's weights in place, with a scale for each group or, without one, for each row.
    Returns how many values the weights of a group take, at most."""
    levels = 0
    for path in linears(model):
        if path != "lm_head":  # the embedding too: see the exercise
            weight = model.get_submodule(path).weight
            weight.copy_(rounded(weight, bits, group or weight.shape[1]))
            levels = max(levels, len(weight[0, :64].unique()))
    return levels


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
    base, levels = perplexity(plain, ids), {}
    lines: dict[str, list[float]] = {"ideal": [base] * len(bits)}
    for name, group in (("one scale a row", None), ("each 64 inputs", 64)):
        for b in bits:
            model = copy.deepcopy(plain)
            levels[b] = round_linears(model, b, group)
            lines.setdefault(name, []).append(perplexity(model, ids))
    title = f"perplexity on {len(ids)} tokens of Hamlet ({base:.1f} unrounded)"
    lesson.curves(title, bits, lines, "bits", log=True)
    # 2) what it brings: bytes, and with them time, if the processor can read the form
    held, times, limits = {}, {}, {}  # MB, and milliseconds
    whole = lesson.random_model(packed=False)
    for name in ("float32", "float32, packed", "int8", "int8, packed", "int4", "int4, packed"):
        mode, _, packed = name.partition(", ")
        half = name == "int4, packed" and has_arithmetic(torch.bfloat16)  # its fast product's dtype
        model = copy.deepcopy(whole).to(torch.bfloat16 if half else torch.float32)
        if mode != "float32":
            quantize_model(model, mode, 64)
        if packed:
            pack_linears(model)
        held[name], times[name] = bytes_per_step(model, 0) / 1e6, forward_ms(model, repeat=15)
        limits[name] = 1e9 * held[name] / lesson.bandwidth
    lesson.bars("MB read for a token", held)
    lesson.bars("milliseconds for a token", times, limits)
    for mode in ("int8", "int4"):
        if times[f"{mode}, packed"] > times["float32, packed"]:
            lesson.say(f"{mode} is no faster here, as nothing fast multiplies it: it saves memory.")
    return {"levels": levels, "bytes": held, "perplexity": lines["each 64 inputs"], "plain": base}


if __name__ == "__main__":
    run(chapter)
