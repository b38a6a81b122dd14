"""Chapter 3: sampling and text. From logits to a token, and from tokens to characters.

python course/03_sampling.py
"""

from functools import partial

from lesson import LETTERS, Lesson, forward_ms, parts_strip, run, seconds

import torch
from torch import Tensor

from around.folder import Detokenizer
from around.settings import SamplingParams
from sampling import Sequence, distribution, draw, sample, uniform

SETTINGS = {
    "as it is": {}, "temperature 0.5": {"temperature": 0.5},
    "temperature 1.5": {"temperature": 1.5}, "top_k 4": {"top_k": 4},
    "top_p 0.7": {"top_p": 0.7}, "min_p 0.1": {"min_p": 0.1},
}  # fmt: skip


def settle(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Apply every setting to the logits of one position: (V,) -> (V,) probabilities."""
    probs, ids = (logits / temperature).softmax(-1).sort(descending=True)  # likeliest first
    probs[top_k or len(probs) :] = 0
    if top_p < 1:  # at 1 all stay, however their sum is rounded
        probs[probs.cumsum(0) - probs >= top_p * probs.sum()] = 0  # likelier ones suffice
    probs[probs < min_p * probs[0]] = 0
    return torch.zeros_like(probs).scatter(0, ids, probs / probs.sum())


def chapter(lesson: Lesson) -> dict[str, int]:
    # 1) one distribution under each setting; a token's share of a strip is its probability
    model, tokenizer = lesson.bundled()
    ids = tokenizer.encode("JULIET:\nO, my")
    logits = model(torch.tensor([ids]), torch.arange(len(ids))[None])[0, -1]  # (V,)
    likeliest = logits.topk(8).indices.tolist()
    strips, kept, wrong = {}, {}, 0  # by setting: a picture, tokens left; settings that differ
    for name, setting in SETTINGS.items():
        probs = settle(logits, **setting)
        sequence = Sequence(ids, SamplingParams(**setting), model.config)
        wrong += not torch.allclose(probs, distribution(logits[None], [sequence])[0], atol=1e-6)
        strips[name] = parts_strip(probs[likeliest].tolist(), 60)
        kept[name] = int((probs > 0).sum())
    legend = {a: tokenizer.piece(i) for a, i in zip(LETTERS, likeliest)} | {".": "others"}
    lesson.rows("what follows 'JULIET: O, my': a letter is a probability of 1/60", strips, legend)
    lesson.say("  tokens left: " + ", ".join(f"{name}: {n}" for name, n in kept.items()))
    lesson.say(f"  settings for which the engine's sampler differs: {wrong}")
    # 2) draws by counter: random number i of a seed is computed, without a generator's state
    u = torch.tensor([uniform(1, i) for i in range(8)])
    drawn = draw(settle(logits, top_k=4).expand(8, -1), u).tolist()
    lesson.say("  seed 1 draws, with top_k 4: " + " ".join(map(tokenizer.piece, drawn)))
    # 3) what sampling costs beside the forward before it
    model = lesson.random_model()
    scores = torch.randn(1, model.config.vocab_size)
    costs = {"forward of one token": forward_ms(model)}
    for name, value in (("temperature", 0.0), ("temperature", 0.8), ("top_p", 0.95)):
        rows = [Sequence([1], SamplingParams(**{name: value}), model.config)]
        costs[f"sample: {name} {value}"] = 1e3 * seconds(partial(sample, scores, rows))
    lesson.bars(f"milliseconds, with V = {model.config.vocab_size:,}", costs)
    # 4) a character that takes two tokens
    text = "café ♥"
    ids = tokenizer.encode(text, add_special=False)
    stream = Detokenizer(tokenizer, [])
    lesson.say(f"\n{text!r} is {len(text)} characters and {len(ids)} tokens:")
    broken, whole = 0, ""
    for i in ids:
        alone, new = tokenizer.decode([i]), stream.push(i)
        broken += "\ufffd" in alone
        whole += new
        lesson.say(f"  {i:5} {tokenizer.piece(i):8} alone {alone!r:8} in the stream {new!r}")
    counts = {"characters": len(text), "tokens": len(ids), "broken": broken}
    return kept | counts | {"wrong": wrong, "whole": whole == text}


if __name__ == "__main__":
    run(chapter)
