"""Chapter 6: fewer bits. A forward reads every weight, so make the weights smaller.

python course/06_bits.py
"""

import copy
from pathlib import Path

from lesson import Lesson, forward_ms, run

import torch
from torch import Tensor

from around.fast.packed import onednn_multiplies, pack_linears
from model import Transformer
from quantize import linears, quantize_model
from tools.measure import bytes_per_step

TEXT = Path(__file__).resolve().parent / "hamlet.txt"  # the training text lacks this play


def rounded(weight: Tensor, bits: int, group: int) -> Tensor:
    """Round a weight (N, K) to integers of so many bits, times a scale for each group of inputs."""
    w = weight.unflatten(1, (-1, group))  # (N, G, group)
    most = 2 ** (bits - 1) - 1  # 127 with 8 bits, 7 with 4, 1 with 2
    scale = w.abs().amax(-1, keepdim=True).clamp(min=1e-12) / most  # (N, G, 1)
    return ((w / scale).round() * scale).flatten(1)


def round_linears(model: Transformer, bits: int, group: int | None) -> int:
    """Round a model's weights in place. Returns how many different values a group has at most.

    Args:
        group: inputs that share a scale; None: all inputs of a row.
    """
    levels = 0
    for path in linears(model):
        if path != "lm_head":  # it is the embedding too: see the exercise
            weight = model.get_submodule(path).weight
            weight.copy_(rounded(weight, bits, group or weight.shape[1]))
            levels = max(levels, len(weight[0, :64].unique()))
    return levels


def perplexity(model: Transformer, ids: list[int]) -> float:
    """Return e to the mean of -log p over the tokens of a text."""
    logits = model(torch.tensor([ids]), torch.arange(len(ids))[None])[0]  # (T, V)
    logprobs = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    return (-logprobs.mean()).exp().item()


def chapter(lesson: Lesson) -> dict[str, int]:
    # 1) what it costs: the perplexity of the bundled model on a text that it has not seen
    plain, tokenizer = lesson.bundled()
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))[: lesson.pick(1024, 128)]
    bits = lesson.pick([2, 3, 4, 5, 6, 8], [2, 4, 8])
    base = perplexity(plain, ids)
    levels: dict[int, int] = {}  # bits -> different values in a group
    lines: dict[str, list[float]] = {"ideal": [base] * len(bits)}
    for name, group in (("one scale a row", None), ("each 64 inputs", 64)):
        for b in bits:
            model = copy.deepcopy(plain)
            levels[b] = round_linears(model, b, group)
            lines.setdefault(name, []).append(perplexity(model, ids))
    title = f"perplexity on {len(ids)} tokens of Hamlet ({base:.1f} before rounding)"
    lesson.curves(title, bits, lines, "bits", log=True)
    # 2) what it brings: fewer bytes, and less time if the processor can multiply the form
    held, times, limits = {}, {}, {}  # MB, milliseconds, and the milliseconds to read so much
    whole = lesson.random_model(packed=False)
    for name in ("float32", "float32, packed", "int8", "int8, packed", "int4", "int4, packed"):
        mode, _, packed = name.partition(", ")
        dtype = torch.float32
        if name == "int4, packed" and onednn_multiplies(torch.bfloat16):
            dtype = torch.bfloat16  # the dtype of the fast product for int4
        model = copy.deepcopy(whole).to(dtype)
        if mode != "float32":
            quantize_model(model, mode, 64)
        if packed:
            pack_linears(model)
        held[name] = bytes_per_step(model, 0) / 1e6
        times[name] = forward_ms(model, repeat=15)
        limits[name] = 1e9 * held[name] / lesson.bandwidth
    lesson.bars("MB read for a token", held)
    lesson.bars("milliseconds for a token", times, limits)
    for mode in ("int8", "int4"):
        if times[f"{mode}, packed"] > times["float32, packed"]:
            lesson.say(f"{mode} is no faster: this processor has no fast product for it.")
            lesson.say("It only saves memory.")
    return {"levels": levels, "bytes": held, "perplexity": lines["each 64 inputs"], "plain": base}


if __name__ == "__main__":
    run(chapter)
